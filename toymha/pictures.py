"""The figures of a report: which there are, of what rows, with what words around them. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toymha.finding import Finding
from toymha.metrics import Metric, setting_name
from toymha.plots import QUIET, Bar, Curve, Style, curve, curves, forest, styles
from toymha.report import Report
from toymha.table import Row, Table

MOST_CURVES, MOST_BARS = 12, 40  # in one figure
VERDICT = {"supported": "#1a7f4b", "refuted": "#b3321f", "undecided": "#8a6100"}
RIGHT = "relation_right/"  # tags of the probability of the right class


@dataclass(frozen=True)
class Picture:
    """A figure with what stands above and below it."""

    title: str
    svg: str
    caption: str


@dataclass(frozen=True)
class Pictures:
    """All figures of a report; `legend`: name and style of each row in the curves."""

    effects: list[Picture]
    losses: list[Picture]
    relations: list[Picture]
    legend: list[tuple[str, Style]]
    left_out: int  # rows without curves


def pictures(report: Report) -> Pictures:
    """Draw them. Of the runs' logs, those of the drawn rows are read, once."""
    begun = [row for row in report.table.rows if row.results]
    rows = begun[:MOST_CURVES]
    logged = {str(r.path): r.rows() for row in rows for r in row.results}
    style = styles(rows)
    effects = [*_effects(report.table), *_checks(report.verdict.findings if report.verdict else [])]
    losses = _losses([curve(row, logged, "loss/val", s) for row, s in zip(rows, style)])
    relations = _relations(report.table, rows, logged, style)
    legend = [(row.name, s) for row, s in zip(rows, style)] if losses or relations else []
    return Pictures(effects, losses, relations, legend, len(begun) - len(rows))


def _effects(table: Table) -> list[Picture]:
    """Each row's difference to its baseline; a figure for each unit that rows are compared in."""
    metrics = dict.fromkeys(m for m, d in zip(table.compared_in, table.differences) if d)
    found = [_effects_in(m, table, "effects" if i == 1 else f"effects{i}") for i, m in enumerate(metrics, 1)]
    return [p for p in found if p]


def _effects_in(m: Metric, table: Table, name: str) -> Picture | None:
    """The rows that are compared in this metric, under their baselines; None where there is nothing to draw yet."""
    drawn = [(row, d) for row, n, d in zip(table.rows, table.compared_in, table.differences) if d and n == m]
    baselines = {id(table.baseline(row)) for row, _ in drawn}
    wanted = {id(row) for row, _ in drawn} | baselines
    lines = [(row, d) for row, d in zip(table.rows, table.differences) if id(row) in wanted]
    labels = _labels([row for row, _ in lines])
    bars = []
    for label, (_, d) in list(zip(labels, lines))[:MOST_BARS]:
        if d is None:
            bars.append(Bar(label, 0.0, said="baseline", colour=QUIET, filled=False))
        elif d["pairs"] < 2:
            said = "one seed" if d["pairs"] else "no pairs"
            bars.append(Bar(label, m.told(d["difference"]), said=said, filled=False))
        else:
            wide = None if d["bootstrap_low"] is None else (m.told(d["bootstrap_low"]), m.told(d["bootstrap_high"]))
            value, low, high = (m.told(d[k]) for k in ("difference", "difference_low", "difference_high"))
            bars.append(Bar(label, value, low, high, wide, filled=d["p_holm"] < 0.05))
    if not any(math.isfinite(b.value) for b, (_, d) in zip(bars, lines) if d):
        return None
    caption = (
        "Thick: 95 % t interval, paired by seed. Thin: bootstrap, from five seeds on. Filled: p < 0.05 after Holm."
    )
    if len(lines) > MOST_BARS:
        caption += f" The first {MOST_BARS} of {len(lines)} rows; the table has all of them."
    what = {"nats": "loss (nats)", "bits": "bits a character"}.get(m.unit, m.unit_of_difference)
    better = "right" if m.higher_is_better else "left"
    svg = forest(bars, f"difference in {what}; {better} is better", name)
    return Picture(f"{m.label[0].upper()}{m.label[1:]}, difference to the baseline", svg, caption)


def _labels(rows: Sequence[Row]) -> list[str]:
    """The rows by the keys in which they differ: what all of them share tells none of them from another."""
    varied = [k for k in rows[0].setting if any(r.setting[k] != rows[0].setting[k] for r in rows)] if rows else []
    return [setting_name({k: r.setting[k] for k in varied}) or r.name for r in rows]


def _checks(findings: Sequence[Finding]) -> list[Picture]:
    """A figure for each check, a line for each slice, over the region that the statement claims."""
    by_check: dict[str, list[Finding]] = {}
    for f in findings:
        by_check.setdefault(f.that, []).append(f)
    out = []
    for i, (that, group) in enumerate(by_check.items(), 1):
        m, first = group[0].metric, group[0]
        bars = []
        for f in group[:MOST_BARS]:
            value, *ends = map(m.told, (f.difference, f.low, f.high))
            bars.append(Bar(f.place, value, ends[0], ends[1], _told(f), f.verdict, VERDICT[f.verdict]))
        low, high = (m.told(x) if math.isfinite(x) else x for x in (first.claim_low, first.claim_high))
        what = "difference" if not first.absolute else "counted" if m.exact else "mean over seeds"
        axis = f"{what} ({first.unit})" if first.unit else what
        caption = f"{m.label[0].upper()}{m.label[1:]}. Shaded: what is claimed, {first.claim()}."
        if first.simultaneous:
            caption += " Right is better; the interval holds for all comparisons of the check at once."
        if any(math.isfinite(b.value) for b in bars):
            drawn = forest(bars, axis, f"check{i}", (low, high), zero=not first.absolute)
            out.append(Picture(that, drawn, caption))
    return out


def _told(f: Finding) -> tuple[float, float] | None:
    return f.bootstrap and (f.metric.told(f.bootstrap[0]), f.metric.told(f.bootstrap[1]))


def _losses(lines: Sequence[Curve]) -> list[Picture]:
    if not any(c.series for c in lines):
        return []
    caption = "Lines: mean over finished runs. Bands: from the lowest to the highest seed."
    if any(c.loose for c in lines):
        caption += " Dotted: runs that are not finished, one by one; a cross where one diverged."
    caption += " The frame fits what comes after the first fifth of training."
    return [Picture("Validation loss during training", curves(lines, "loss (nats a token)", "losses", 300), caption)]


def _relations(
    table: Table, rows: Sequence[Row], logged: dict[str, list[dict[str, Any]]], style: Sequence[Style]
) -> list[Picture]:
    """How the probability of the right class grows, a figure for each relation."""
    tags = dict.fromkeys(t for lines in logged.values() for x in lines for t in x if t.startswith(RIGHT))
    out = []
    for i, tag in enumerate(tags, 1):
        name = tag.removeprefix(RIGHT)
        lines = [curve(row, logged, tag, s) for row, s in zip(rows, style)]
        ended = [row for row in rows if row.mean(table.split, "parts", name, "loss") is not None]
        floors = {row.mean(table.split, "parts", name, "floor") for row in ended}
        caption = "Probability of the right class."
        if len(floors) == 1 and (floor := floors.pop()) is not None:  # of all curves
            caption += f" Floor of its loss: {floor:.3f} nats."
        if any(c.series for c in lines):
            drawn = curves(lines, "probability", f"relation{i}", 220, (-0.03, 1.03))
            out.append(Picture(name, drawn, caption))
    return out
