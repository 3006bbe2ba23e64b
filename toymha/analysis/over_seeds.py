"""Importance and pruning over the seeds of a setting, from the numbers that each run keeps (`study.numbers`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from toymha import stats
from toymha.analysis import plots
from toymha.analysis.probe_page import Cells, Part
from toymha.analysis.results import Curve, Pruning
from toymha.pictures import Picture

NEARLY = 0.9999  # a correlation of 1 has no finite atanh
Numbers = dict[str, Any]  # of one run
TOLD = (
    "Each line is the mean over seeds of what perplexity rises by as heads go, one after the other; the band is the "
    "least and the most of them. The removable share is the largest at which perplexity has risen by less than 1 %."
)


def has_curves(numbers: Numbers | None) -> bool:
    return bool(numbers and numbers.get("curves"))


def pruning_of(runs: Sequence[Numbers]) -> Pruning:
    """The curves of runs with equally many heads as one: means with least and most, as a rise above each run's own
    whole model, laid on the mean loss of these; the removable shares as means."""
    whole = math.fsum(r["loss"] for r in runs) / len(runs)
    curves = {}
    for order in runs[0]["curves"]:
        risen = [[loss - r["loss"] for loss in r["curves"][order]] for r in runs]
        at = list(zip(*risen))
        mean = [whole + math.fsum(x) / len(x) for x in at]
        bands = ([whole + min(x) for x in at], [whole + max(x) for x in at]) if len(runs) > 1 else ([], [])
        curves[order] = Curve(mean, *bands)
    shares = {order: math.fsum(r["removable"][order] for r in runs) / len(runs) for order in curves}
    return Pruning(curves, shares, 0.01, "test", 0)


def removable_cells(runs: Mapping[str, Sequence[Numbers]]) -> list[list[str]]:
    """setting -> its runs; a table of the removable share by order, mean and extremes over seeds, its head first."""
    orders = list(dict.fromkeys(order for some in runs.values() for r in some for order in r["removable"]))
    out = [["", "seeds", *(f"by {order}" if order != "random" else order for order in orders)]]
    for name, some in runs.items():
        line = [name, str(len(some))]
        for order in orders:
            shares = [100 * r["removable"][order] for r in some]
            line.append(f"{math.fsum(shares) / len(shares):.1f} % ({min(shares):.1f}-{max(shares):.1f})")
        out.append(line)
    return out


def correlation_cells(runs: Mapping[str, Sequence[Numbers]]) -> list[list[str]]:
    """Rank correlations of the measures over heads, the head first: mean over seeds with a 95 % t interval, both on
    the scale of atanh (Fisher 1921), which keeps them between -1 and 1."""
    pairs = list(dict.fromkeys(pair for some in runs.values() for r in some for pair in r["correlations"]))
    out = [["", "seeds", *(pair.replace(" ", " and ") for pair in pairs)]]
    for name, some in runs.items():
        line = [name, str(len(some))]
        for pair in pairs:
            found = [r["correlations"][pair] for r in some if r["correlations"].get(pair) is not None]
            e = stats.estimate([math.atanh(max(-NEARLY, min(NEARLY, rho))) for rho in found])
            low, mean, high = (math.tanh(x) for x in (e.low, e.mean, e.high))
            line.append((f"{mean:.2f}" + (f" [{low:.2f}, {high:.2f}]" if e.n > 1 else "")) if found else "-")
        out.append(line)
    return out


def parts(runs: Mapping[str, Sequence[Numbers]]) -> list[Part]:
    """Sections of a page: a figure for each setting whose runs have as many heads, and two tables."""
    pictures = []
    for i, (name, some) in enumerate(runs.items(), 1):
        if len({r["n"] for r in some}) == 1:
            found = pruning_of(some)
            caption = f"{some[0]['n']} heads, {len(some)} seeds."
            pictures.append(Picture(name, plots.pruning(found, f"pruning{i}"), caption))
    style = plots.pruning_styles(next(iter(runs.values()))[0]["curves"])
    shares = Cells("Share of the heads that can go at less than 1 % of perplexity", removable_cells(runs), 1)
    ranks = Cells("Rank correlations of the measures", correlation_cells(runs), 1)
    return [
        Part("Pruning over seeds", [TOLD], list(style.items()), pictures, [shares]),
        Part("Do the measures agree?", ["Spearman's rank correlation over the heads of a run."], tables=[ranks]),
    ]
