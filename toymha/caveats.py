"""What a reader must know before believing a comparison: unequal budgets, keys that change nothing. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from toymha.metrics import Result, number
from toymha.statement import Sweep
from toymha.verdict import matches

TOLERANCE = 0.01  # of parameters and FLOPs, beyond which settings count as unequal
FLOPS = (
    "FLOPs: 2 a multiply-add, attention over the full T x T; training is forward and backward pass, 3 x forward; "
    "no elementwise work"
)
TOLD_APART_BY = {"loss/val", "loss/train", "grad_norm"}  # without all of these, nothing is known of two trainings yet
KEYS = (*sorted(TOLD_APART_BY), "loss/test")


def warnings_of(sweep: Sweep, results: Iterable[Result]) -> list[str]:
    """Settings that differ in parameters or in compute, within a slice, by more than the tolerance.

    Settings of which nothing but numbers themselves is claimed are compared with none, and need not be equal.
    """
    found = [r for r in results if r.summary.get("flops_per_token")]
    if any(c.absolute for c in sweep.parsed_checks):
        compared = [side for c in sweep.parsed_checks if not c.absolute for side in c.sides]
        found = [r for r in found if any(matches(r, side) for side in compared)]
    out = []
    for name, label in (("parameters", "parameters"), ("flops", "training FLOPs")):
        by_slice: dict[str, set[float]] = {}
        for r in found:
            value = r.summary["parameters"] if name == "parameters" else training_flops(r)
            by_slice.setdefault(repr([r.value(k) for k in sweep.slices]), set()).add(value)
        spread = max((_spread(v) for v in by_slice.values()), default=0.0)
        if spread > TOLERANCE and sweep.compare != "time":
            how = "" if sweep.compare == "steps" else f", also with compare: {sweep.compare}"
            size = f"by up to {spread:.0%}" if math.isfinite(spread) else "and some have none"
            out.append(f"the settings differ in {label} {size}{how}")
    return out


def _spread(values: set[float]) -> float:
    """By how much the most exceeds the least, as a share of it. A training of no steps has no FLOPs."""
    low, high = min(values), max(values)
    return high / low - 1 if low else math.inf if high else 0.0


def training_flops(r: Result) -> float:
    """FLOPs of the whole training."""
    return r.summary["flops_per_token"] * r.summary.get("tokens_trained", 0)


def logged(r: Result) -> list[dict[str, Any]]:
    """The logged rows of a finished run, and one more with its final numbers on the whole splits."""
    return [
        *r.rows(),
        {"step": "end"} | {f"loss/{split}": number(r.summary, (split, "loss")) for split in ("val", "test")},
    ]


def inert(pairs: Iterable[tuple[str, str, list[dict[str, Any]], list[dict[str, Any]]]]) -> list[str]:
    """Settings that train alike to the last bit although a swept key differs.

    `pairs`: (name, other name, logged rows, other rows) of two runs of one seed. Every number of every row must be the
    same: a schedule acts after warm-up only, clipping at the first large gradient, and until then they look inert.
    """
    known: dict[str, dict[tuple[Any, str], float]] = {}  # by name, for each stands in many pairs
    out = []
    for name, other, rows, other_rows in pairs:
        for n, rs in ((name, rows), (other, other_rows)):
            if n not in known:
                known[n] = {(r["step"], k): r[k] for r in rs for k in KEYS if r.get(k) is not None}
        if known[name] == known[other] and {k for _, k in known[name]} >= TOLD_APART_BY:
            out.append(f"{name} and {other} are alike to the last bit: what differs between them changes nothing")
    return out


def realised(results: Iterable[Result]) -> str:
    """Parameters and training FLOPs of the runs, from the least to the most."""
    found = [r for r in results if r.summary.get("flops_per_token") and r.done]
    if not found:
        return ""
    spans = []
    for label, values in (
        ("parameters", [float(r.summary["parameters"]) for r in found]),
        ("training FLOPs", [training_flops(r) for r in found]),
        ("seconds of training", [r.summary["seconds"] for r in found]),
    ):
        low, high = (f"{v:.3g}" if v >= 1e7 else f"{v:,.0f}" for v in (min(values), max(values)))
        spans.append(f"{label} {low if low == high else f'{low} to {high}'}")
    return ", ".join(spans)
