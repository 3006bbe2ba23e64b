"""Keys that are tuned for each setting: tried with seeds of their own, chosen on validation text. No torch.

The runs of the verdict then have other seeds and are scored on test text, so the choice cannot flatter what it chose.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from toymha import runs
from toymha.compose import Experiment, Point, product, sweep_axes
from toymha.config import REPLICATES
from toymha.metrics import Result
from toymha.statement import Sweep

FIRST_SEED = 1000  # of the trials: no seed of a verdict


def trials(experiment: Experiment) -> dict[str, list[list[Point]]]:
    """Label of a setting -> for each candidate, in order, its runs: one for every three seeds of the verdict."""
    sweep = experiment.sweep
    assert sweep is not None
    name = runs.name_of(experiment.points[0].config) + "-tuning"
    settings = {p.label: p for p in reversed(experiment.points)}
    seeds = max(1, sum(p.label == experiment.points[0].label for p in experiment.points) // 3)
    return {
        label: [
            [experiment.vary(settings[label], {**c, "seed": FIRST_SEED + s, "name": name}) for s in range(seeds)]
            for c in candidates(sweep, experiment)
        ]
        for label in dict.fromkeys(p.label for p in experiment.points)
    }


def runs_of(tried: dict[str, list[list[Point]]]) -> list[Point]:
    """All of them in one list."""
    return [p for candidates in tried.values() for points in candidates for p in points]


def candidates(sweep: Sweep, experiment: Experiment) -> list[dict[str, Any]]:
    return product(sweep_axes(sweep.tune or {}, sweep.name, experiment.composer.extra))


def choose(experiment: Experiment, tried: dict[str, list[list[Point]]]) -> tuple[Experiment, list[dict[str, Any]]]:
    """The experiment with the best candidate of each setting, and the record of the choice.

    Best: the lowest mean validation loss; a candidate with a run that did not finish has none.
    """
    sweep = experiment.sweep
    assert sweep is not None
    values, best, record = candidates(sweep, experiment), {}, []
    for label, points_of in tried.items():
        losses = [_mean_loss(points) for points in points_of]
        known = [(loss, i) for i, loss in enumerate(losses) if loss is not None]
        best[label] = values[min(known)[1]] if known else {}
        setting = {k: v for k, v in points_of[0][0].swept.items() if k not in REPLICATES}
        listed = [{"values": v, "val_loss": loss} for v, loss in zip(values, losses)]
        record.append({"setting": setting, "chosen": best[label], "candidates": listed})
    points = [experiment.vary(p, best[p.label]) for p in experiment.points]
    return dataclasses.replace(experiment, points=points), record


def _mean_loss(points: list[Point]) -> float | None:
    results = [Result.of(runs.Run(runs.folder(p.config, p.label), p.config)) for p in points]
    if not all(r.done for r in results):
        return None
    return sum(r.summary["val"]["loss"] for r in results) / len(results)
