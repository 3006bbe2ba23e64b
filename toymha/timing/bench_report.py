"""What `toymha bench` leaves behind: JSON lines as they come, at the end tables in the terminal and a plot."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toymha.console import quote
from toymha.schema import UserError
from toymha.subjects import amount, number
from toymha.table import columns
from toymha.timing.roofline import OVERHEAD, Rates

Row = dict[str, Any]
SAME = 0.2  # medians that differ by a larger share are not told as the same, however wide their spread


class Results:
    """The rows of one command, in a folder: `with Results(...) as out`, `out.add(row)`.

    At the end, also of a command that was interrupted or ran out of memory, it prints the tables and draws the plot of
    the rows that are there.
    """

    def __init__(
        self,
        folder: Path,
        machine: dict[str, Any],
        rates: Rates,
        text: Callable[[list[Row], Results], list[str]],
        plot: Callable[[list[Row], Rates, Path], None],
    ) -> None:
        """`text`: lines of rows; `plot`: writes their figure. What an earlier command left there is replaced."""
        self.folder, self.machine, self.rates, self.text, self.plot = folder, machine, rates, text, plot
        self.rows: list[Row] = []
        self.status = 0  # of the command: 130 where it was interrupted

    def __enter__(self) -> Results:
        make_folder(self.folder)
        for name in ("bench.jsonl", "bench.svg", "bench.png"):
            (self.folder / name).unlink(missing_ok=True)
        return self

    def add(self, row: Row) -> Row:
        """Write one row, with what it was measured on and what that can do."""
        self.rows.append(row)
        whole = row | {"machine": self.machine, "rates": dataclasses.asdict(self.rates)}
        with (self.folder / "bench.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(whole, ensure_ascii=False) + "\n")
        return row

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> bool:
        if kind is KeyboardInterrupt:
            print(f"toymha: interrupted; {len(self.rows)} rows are kept", file=sys.stderr)
            self.status = 130
        if self.rows and (kind is None or issubclass(kind, (KeyboardInterrupt, UserError))):
            print("\n".join(self.text(self.rows, self)), flush=True)
            self.plot(self.rows, self.rates, self.folder)
            print(
                f"\nrows    {quote(self.folder / 'bench.jsonl')}\nplot    {quote(self.folder / 'bench.svg')}, bench.png"
            )
        if not self.rows:
            with contextlib.suppress(OSError):  # somebody else's files are in it
                self.folder.rmdir()
        return kind is KeyboardInterrupt


def make_folder(folder: Path) -> None:
    """Raises UserError where it cannot be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(f"{folder} cannot be written: {e.strerror}; choose another output_dir= or name=") from None


# Words and numbers


def seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{number(value / size)} {unit}"
    return f"{number(value / 1e-6)} µs"


def with_spread(phase: dict[str, Any]) -> list[str]:
    """The median, and the least and most: `1.24 ms`, `1.2-1.4`."""
    unit = seconds(phase["median"]).split()[1]
    size = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]
    return [seconds(phase["median"]), f"{number(phase['low'] / size)}-{number(phase['high'] / size)}"]


def percent(value: float) -> str:
    return f"{100 * value:.1f} %" if value < 0.1 else f"{100 * value:.0f} %"


def in_short(row: Row) -> str:
    """One line of progress."""
    return f"first token {seconds(row['prefill']['median'])}, then {seconds(row['decode']['median'])} a token"


def varying(rows: Sequence[Row], keys: dict[str, str], always: Sequence[str] = ()) -> dict[str, str]:
    """Those of the keys (with their headings) that tell rows apart."""
    return {k: v for k, v in keys.items() if k in always or len({str(r[k]) for r in rows}) > 1}


def shown(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def machine_lines(out: Results) -> list[str]:
    """What was measured of the machine."""
    r, m = out.rates, out.machine
    products = ", ".join(f"{amount(rate, 'FLOP/s')} in {p}" for p, rate in r.products.items())
    lines = [
        f"machine   {m['device']} ({m['name']}), {m['threads']} threads, torch {m['versions']['torch']}",
        f"memory    {amount(r.bandwidth, 'B/s')}, the faster of reading and of copying a large array",
    ]
    if r.cache_size and r.cache_bandwidth:
        lines.append(
            f"cache     {amount(r.cache_size, 'B', 1024)} is the last one; {amount(r.cache_bandwidth, 'B/s')} from it"
        )
    return [*lines, f"products  {products}, of the fastest square matrices"]


def models_of(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(f"{r['model']}: {r['parameters']:,} parameters" for r in rows))


# Prefill and decoding

KEYS = {"model": "model", "precision": "precision", "batch": "batch", "prompt_len": "prompt", "cache": "cache"}
ALWAYS = ("prompt_len", "cache")


def inference_text(rows: list[Row], out: Results) -> list[str]:
    """The tables of `toymha bench`."""
    told = [r for r in rows if not r["check"]]
    keys = varying(told, KEYS, ALWAYS)
    same = ", ".join(f"{v} {told[0][k]}" for k, v in KEYS.items() if k not in keys and k != "model")
    lines = [*models_of(told), *([same] if same else []), *machine_lines(out), ""]
    lines += [*columns([*speed_table(told, keys)], len(keys)), ""]
    lines += [*columns([*roofline_table(told, keys)], len(keys) + 1), ""]
    return lines + [f"note  {n}" for n in inference_notes(told, out) + again_notes(rows, ("prefill", "decode"))]


def speed_table(rows: list[Row], keys: dict[str, str]) -> list[list[str]]:
    """How long, how fast, how much a cache takes and saves, and how the models compare."""
    both = {r["cache"] for r in rows} == {True, False}
    several = len({r["model"] for r in rows}) > 1
    head = [*keys.values(), "first token", "", "tokens/s", "each next", "", "tokens/s", "KV cache"]
    lines = [head + ["x recomputing"] * both + ["x first model"] * several]
    for r in rows:
        line = [*(shown(r[k]) for k in keys), *with_spread(r["prefill"]), f"{r['prefill']['tokens_per_s']:,.0f}"]
        line += [*with_spread(r["decode"]), f"{r['decode']['tokens_per_s']:,.0f}"]
        line.append("-" if r["kv_bytes"] is None else amount(r["kv_bytes"], "B", 1024))
        line += [faster(r, rows, cache=False)] * both + [faster(r, rows, model=rows[0]["model"])] * several
        lines.append(line)
    return lines


def faster(row: Row, rows: list[Row], **other: Any) -> str:
    """How many times as many tokens a second are decoded as in the row with another cache or model."""
    wanted = {k: row[k] for k in KEYS} | other
    against = next((r for r in rows if all(r[k] == v for k, v in wanted.items())), None)
    if against is None or against is row:
        return "-"
    return f"{row['decode']['tokens_per_s'] / against['decode']['tokens_per_s']:.2f}"


def roofline_table(rows: list[Row], keys: dict[str, str], phases: Sequence[str] = ("prefill", "decode")) -> list[Any]:
    """What each phase moves and computes, against what the machine can, and which bounds it."""
    head = ["moved", "a second", "of memory", "computed", "a second", "of products", "FLOP/byte", "bound by"]
    lines = [[*keys.values(), "phase", *head]]
    for r in rows:
        for name in phases:
            p = r[name]
            bound = f"overhead ({p['nearer']} {percent(p['reached'])})" if p["bound"] == "overhead" else p["bound"]
            moved = [amount(p["bytes"]), amount(p["bytes_per_s"]), percent(p["of_bandwidth"])]
            computed = [amount(p["flops"], "FLOP"), amount(p["flops_per_s"], "FLOP"), percent(p["of_products"])]
            lines.append([*(shown(r[k]) for k in keys), name, *moved, *computed, number(p["intensity"]), bound])
    return lines


FLOPS_NOTE = (
    "FLOPs: 2 a multiply-add, matrix products only, scores and mixing of all T x T pairs, also those that the causal "
    "mask hides"
)


def inference_notes(rows: list[Row], out: Results) -> list[str]:
    first = rows[0]
    notes = [
        "first token: reading the prompt, and the logits of its last position; each next: the mean over "
        f"{first['new_tokens']} tokens after it, the prompt not counted; the median, and least to most, of "
        f"{told_range(rows, 'timings')} timings after one that does not count"
    ]
    sampled = sorted({(r["prompt_len"], r["decode"]["steps_timed"]) for r in rows if not r["cache"]})
    sampled = [(P, n) for P, n in sampled if n < first["new_tokens"]]
    if sampled:
        said = ", ".join(f"{n} (prompt {P})" for P, n in sampled)
        notes.append(f"without a cache not all {first['new_tokens']} new tokens are timed, but evenly spaced: {said}")
    if raised := sorted({r["seq_len"] for r in rows if r["context"] > r["seq_len"]}):
        said = f"the context was raised from {', '.join(map(str, raised))} to {first['context']:,} tokens"
        notes.append(f"{said}; no weight, learned positions included, changes the speed")
    if any(r["cache"] for r in rows):
        notes.append("KV cache: the bytes of the tensors, and those read in a step, equal the formula")
    notes.append(
        f"moved: at least, weights once (fp32) and keys and values; other activations are left out. {FLOPS_NOTE}"
    )
    return notes + bound_notes([r[p] for r in rows for p in ("prefill", "decode")])


def told_range(rows: list[Row], what: str, phases: Sequence[str] = ("prefill", "decode")) -> str:
    found = sorted({r[p][what] for r in rows for p in phases})
    return str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"


def bound_notes(phases: list[dict[str, Any]]) -> list[str]:
    """What the words in the last column mean, of those that are there."""
    notes = []
    if any(p["bound"] == "overhead" for p in phases):
        notes.append(
            f"overhead: less than {100 * OVERHEAD:.0f} % of what memory or products allow; it waits for something "
            "else: calls, which cost small models most, small products, other work of this machine"
        )
    if any(p["cache_resident"] for p in phases):
        notes.append(
            "where weights, keys and values are smaller than the last cache they may stay in it, so that more than "
            "100 % of the memory's rate is no mistake; what bounds such a phase is judged by the cache's rate"
        )
    return notes


def again_notes(rows: list[Row], phases: Sequence[str]) -> list[str]:
    """Whether the first row, measured again at the end, came out the same."""
    again = next((r for r in rows if r["check"]), None)
    if again is None:
        return []
    pairs = {name: (rows[0][name], again[name]) for name in phases}
    changed = [name for name, pair in pairs.items() if apart(*pair)]
    unsteady = [name for name, pair in pairs.items() if name not in changed and slower(*pair) > SAME]
    notes = []
    if changed:
        said = ", ".join(compared(name, *pairs[name]) for name in changed)
        notes.append(f"the machine's speed changed between the first row and the same at the end: {said}")
    if unsteady:
        said = ", ".join(compared(name, *pairs[name]) for name in unsteady)
        notes.append(
            f"the first row, measured again at the end, has another median: {said}; its timings are spread as widely, "
            "so that rows which differ by no more may be equally fast"
        )
    return notes or ["the first row, measured again at the end, came out the same within its spread"]


def compared(name: str, a: dict[str, Any], b: dict[str, Any]) -> str:
    way = "slower" if b["median"] > a["median"] else "faster"
    return f"{name} {seconds(a['median'])} against {seconds(b['median'])}, {100 * slower(a, b):.0f} % {way}"


def slower(a: dict[str, Any], b: dict[str, Any]) -> float:
    """By which share the slower of two medians takes longer than the other."""
    low, high = sorted((a["median"], b["median"]))
    return high / low - 1


def apart(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two medians differ by more than the wider spread of the two."""
    return abs(a["median"] - b["median"]) > max(a["high"] - a["low"], b["high"] - b["low"])
