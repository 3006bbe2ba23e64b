"""The tables and notes of `toymha bench train`."""

from __future__ import annotations

from toymha.subjects import amount
from toymha.table import columns
from toymha.timing.bench_report import (
    FLOPS_NOTE,
    Results,
    Row,
    again_notes,
    machine_lines,
    models_of,
    percent,
    seconds,
    shown,
    told_range,
    varying,
    with_spread,
)

PASSES = "forward and backward"  # the part of a step that is divided by kinds of operations
PRODUCTS = "matrix products"  # one of these kinds
BESIDE = ("evaluation", "logging")  # phases that are no part of a step
STEP_KEYS = {
    "model": "model",
    "precision": "precision",
    "batch": "batch",
    "seq_len": "context",
    "attention": "attention",
}


def in_short(row: Row) -> str:
    return f"{seconds(row['step']['median'])} a step, {amount(row['saved_bytes'], 'B', 1024)} kept"


def training_text(rows: list[Row], out: Results) -> list[str]:
    """The tables of `toymha bench train`."""
    told = [r for r in rows if not r["check"]]
    keys = varying(told, STEP_KEYS, ("seq_len", "attention"))
    same = ", ".join(f"{v} {told[0][k]}" for k, v in STEP_KEYS.items() if k not in keys and k != "model")
    lines = [*models_of(told), *([same] if same else []), *machine_lines(out), ""]
    lines += [*columns(step_table(told, keys), len(keys)), ""]
    lines += [*columns(anatomy_table(told, keys), 1), ""]
    notes = [
        "step: forward, loss, backward, clip, optimizer; the median, and least to most, of "
        f"{told_range(told, 'timings', ('step',))} timings after those that do not count",
        f"{FLOPS_NOTE}; three forward passes a step, without the optimizer's own products",
        "kept: memory that the backward pass needs, weights left out, as autograd keeps it, and by the formula of "
        "`toymha cost`, which leaves out copies of weights too; T x T: its part in the patterns, which grows with "
        "the square of the context",
    ]
    if any(r["dropout"] for r in told):
        notes.append("dropout keeps its masks too, which the formula leaves out")
    if any(r["step"]["of_products"] > 1 for r in told):
        notes.append("over 100 % of products: their rate was measured while the machine was slower, or in other shapes")
    if any(r["pattern_bytes"] is None for r in told):
        notes.append(
            "* by the formula: where a head is as wide as the context is long, shapes do not tell its T x T tensors "
            "from others"
        )
    notes += anatomy_notes(told) + again_notes(rows, ("step",))
    return lines + [f"note  {n}" for n in notes]


def anatomy_table(rows: list[Row], keys: dict[str, str]) -> list[list[str]]:
    """Where a step goes: a line a part, a column a row of the first table. Shares are of the parts of a step together;
    evaluation and logging stand beside it."""
    told = [r["anatomy"] for r in rows]
    wholes = [sum(seconds for phase, seconds in t["phases"].items() if phase not in BESIDE) for t in told]
    names = shorter([r["model"] for r in rows])
    heads = [" ".join(shown({**r, "model": name}[k]) for k in keys) for r, name in zip(rows, names)]
    lines = [["where a step goes", *heads]]

    def add(name: str, values: list[float]) -> None:
        shares = [value / whole for value, whole in zip(values, wholes)]
        lines.append([name, *(f"{seconds(v)} {percent(share):>6}" for v, share in zip(values, shares))])

    for phase in told[0]["phases"]:
        if phase in BESIDE:
            continue
        add(phase, [t["phases"][phase] for t in told])
        if phase == PASSES:
            for kind in dict.fromkeys(kind for t in told for kind in t["kinds"]):
                add(f"  {kind}", [t["kinds"].get(kind, 0.0) for t in told])
    add("together", wholes)
    for phase in BESIDE:
        add(f"beside: {phase}", [t["phases"][phase] for t in told])
    add("products alone", [t["products"]["seconds"] for t in told])
    lines.append(["  their rate", *(amount(t["products"]["flops_per_s"], "FLOP/s") for t in told)])
    return lines


def shorter(labels: list[str]) -> list[str]:
    """Labels without what all of them have."""
    parts = [label.split(",") for label in labels]
    common = set.intersection(*map(set, parts)) if len(set(labels)) > 1 else set()
    return [",".join(p for p in own if p not in common) or "default" for own in parts]


def anatomy_notes(rows: list[Row]) -> list[str]:
    notes = [
        "where a step goes: its parts timed one after the other, after the first table's; the passes divided "
        "as torch's profiler sees them in all threads; evaluation and logging by their share, as often as budget=full "
        "has them; products alone: the matrix products of the passes, without those inside the fused kernel, in the "
        "same shapes and threads, with nothing between them",
    ]
    if any(t["products"]["seconds"] > 1.05 * t["kinds"].get(PRODUCTS, 0.0) for t in (r["anatomy"] for r in rows)):
        notes.append(
            "products that are slower alone than in the step were disturbed more, or lie in memory otherwise: the two "
            "are equal then, as far as this machine lets one see"
        )
    return notes


def step_table(rows: list[Row], keys: dict[str, str]) -> list[list[str]]:
    head = ["a step", "", "tokens/s", "FLOP/s", "of products", "kept", "by formula", "a token", "T x T"]
    peak = any(r["peak_bytes"] for r in rows)
    lines = [[*keys.values(), *head, *["peak"] * peak]]
    for r in rows:
        s, tokens = r["step"], r["batch"] // r["grad_accum"] * r["seq_len"]
        line = [*(shown(r[k]) for k in keys), *with_spread(s), f"{s['tokens_per_s']:,.0f}"]
        line += [amount(s["flops_per_s"], "FLOP"), percent(s["of_products"])]
        sizes = [r["saved_bytes"], r["saved_bytes_formula"], r["saved_bytes"] / tokens]
        line += [*(amount(size, "B", 1024) for size in sizes)]
        if r["pattern_bytes"] is None:
            line.append(f"{amount(r['pattern_bytes_formula'], 'B', 1024)} *")
        else:
            line.append(amount(r["pattern_bytes"], "B", 1024))
        lines.append(line + ([amount(r["peak_bytes"], "B", 1024)] if peak else []))
    return lines
