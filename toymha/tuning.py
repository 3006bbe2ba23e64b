"""Keys that are tuned for each setting: tried with seeds of their own, chosen on validation text. No torch.

The runs of the verdict then have other seeds and are scored on test text, so the choice cannot flatter what it chose.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from toymha import runs
from toymha.compose import Experiment, Point, distinct, product, sweep_axes
from toymha.config import REPLICATES
from toymha.metrics import Result, setting_name
from toymha.schema import word

FIRST_SEED = 1000  # of the trials, and those after it that the verdict has not

Trials = dict[str, list[list[Point]]]  # a setting's name -> for each candidate, in order, its runs


def axes(experiment: Experiment) -> dict[str, Any]:
    """The keys that the sweep's file has tuned, with their candidates; what is given otherwise is not tuned."""
    tune = (experiment.sweep and experiment.sweep.tune) or {}
    return {k: v for k, v in tune.items() if k not in experiment.points[0].values}


def given(experiment: Experiment) -> str:
    """One line on what is not tuned because it was typed; empty where there is nothing to say."""
    tune = (experiment.sweep and experiment.sweep.tune) or {}
    typed = sorted(tune.keys() - axes(experiment).keys())
    return f"{', '.join(typed)}: given, so not tuned" if typed else ""


def trials(experiment: Experiment) -> Trials:
    """The runs that tuning needs: of each setting and candidate one for every three seeds of the verdict."""
    settings = {name_of(p): p for p in reversed(experiment.points)}
    n = max(1, sum(name_of(p) == name_of(experiment.points[0]) for p in experiment.points) // 3)
    c = [p.config for p in experiment.points]
    used = {seed for x in c for seed in (x.seed, x.seed_of_init, x.seed_of_data)}
    seeds = list(itertools.islice((s for s in itertools.count(FIRST_SEED) if s not in used), n))
    return {
        name: [[_trial(experiment, settings[name], {**c, "seed": s}) for s in seeds] for c in candidates(experiment)]
        for name in dict.fromkeys(map(name_of, experiment.points))
    }


def _trial(experiment: Experiment, p: Point, more: dict[str, Any]) -> Point:
    """The point without its own seeds, with other values for some keys, in the folder of the trials."""
    values = {k: v for k, v in p.values.items() if k not in REPLICATES}
    swept = [k for k in p.swept if k == "seed" or k not in REPLICATES]
    inherited = {k: None for k in REPLICATES[1:] if k not in p.values and getattr(p.config, k) is not None}
    name = {"name": runs.name_of(p.config) + "-tuning"}
    return experiment.composer.point({**values, **inherited, **more, **name}, swept)


def name_of(p: Point) -> str:
    """Tells settings apart, but not their replicates."""
    return repr(setting_of(p))


def setting_of(p: Point) -> dict[str, Any]:
    return {k: v for k, v in p.swept.items() if k not in REPLICATES}


def runs_of(tried: Trials) -> list[Point]:
    """All of them in one list."""
    return distinct(p for candidates in tried.values() for points in candidates for p in points)


def candidates(experiment: Experiment) -> list[dict[str, Any]]:
    name = experiment.sweep.name if experiment.sweep else ""
    return product(sweep_axes(axes(experiment), name, experiment.composer.extra))


def choose(experiment: Experiment, tried: Trials) -> tuple[Experiment, list[dict[str, Any]]]:
    """The experiment with the best candidate of each setting, and the record of the choice.

    Best: the lowest mean validation loss; a candidate with a run that did not finish has none. Where that is so of
    all, nothing is chosen, and the setting stays as it was.
    """
    values, best, record = candidates(experiment), {}, []
    for name, points_of in tried.items():
        losses = [_mean_loss(points) for points in points_of]
        known = [(loss, i) for i, loss in enumerate(losses) if loss is not None]
        best[name] = values[min(known)[1]] if known else {}
        listed = [{"values": v, "val_loss": loss} for v, loss in zip(values, losses)]
        record.append({"setting": setting_of(points_of[0][0]), "chosen": best[name], "candidates": listed})
    points = distinct(experiment.vary(p, best[name_of(p)]) for p in experiment.points)
    return dataclasses.replace(experiment, points=points), record


def warnings_of(record: list[dict[str, Any]]) -> list[str]:
    """What a reader must know of the choice."""
    out = []
    for r in record:
        setting = setting_name(r["setting"]) or "the setting"
        for key, value in r["chosen"].items():
            tried = sorted({c["values"][key] for c in r["candidates"]}, key=str)
            numbers = [v for v in tried if isinstance(v, (int, float))]
            if len(numbers) == len(tried) > 2 and value in (min(numbers), max(numbers)):
                out.append(f"{setting}: the best {key}={word(value)} lies at the end of what was tried")
        if not r["chosen"]:
            keys = ", ".join(r["candidates"][0]["values"])
            out.append(f"{setting}: no candidate finished all its trials, so {keys} is not tuned")
    return out


def _mean_loss(points: list[Point]) -> float | None:
    results = [Result.of(runs.Run(runs.folder(p.config, p.label), p.config)) for p in points]
    if not all(r.done for r in results):
        return None
    return sum(r.summary["val"]["loss"] for r in results) / len(results)
