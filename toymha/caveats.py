"""What a reader must know before believing a comparison: unequal budgets, keys that change nothing. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from toymha.metrics import Result
from toymha.statement import Sweep

TOLERANCE = 0.01  # of parameters and FLOPs, beyond which settings count as unequal


def warnings_of(sweep: Sweep, results: Iterable[Result]) -> list[str]:
    """Settings that differ in parameters or in compute, within a slice, by more than the tolerance."""
    found = [r for r in results if r.summary.get("flops_per_token")]
    out = []
    for name, label in (("parameters", "parameters"), ("flops", "training FLOPs")):
        by_slice: dict[str, set[float]] = {}
        for r in found:
            value = r.summary["parameters"] if name == "parameters" else training_flops(r)
            by_slice.setdefault(repr([r.value(k) for k in sweep.slices]), set()).add(value)
        spread = max((max(v) / min(v) - 1 for v in by_slice.values()), default=0.0)
        if spread > TOLERANCE and sweep.compare != "time":
            how = "" if sweep.compare == "steps" else f", also with compare: {sweep.compare}"
            out.append(f"the settings differ in {label} by up to {spread:.0%}{how}")
    return out


def training_flops(r: Result) -> float:
    """FLOPs of the whole training."""
    return r.summary["flops_per_token"] * r.summary.get("tokens_trained", 0)


def inert(pairs: Iterable[tuple[str, str, list[dict[str, Any]], list[dict[str, Any]]]]) -> list[str]:
    """Settings that begin alike to the last bit although a swept key differs.

    `pairs`: (name, other name, logged rows, other rows) of two runs of one seed. The same first evaluation and the
    same first logged row, each to the last digit, come from the same logits and the same first steps.
    """
    out = []
    for name, other, rows, other_rows in pairs:
        keys = ("loss/val", "loss/train", "grad_norm")
        begins = [tuple(next((r[k] for r in rs if k in r), None) for k in keys) for rs in (rows, other_rows)]
        if begins[0] == begins[1] and None not in begins[0]:
            out.append(f"{name} and {other} begin alike to the last bit: what differs between them changes nothing")
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
