"""Run folders -> a table: for each swept value the runs, mean, spread, and difference to the first. No torch."""

from __future__ import annotations

import csv
import io
import json
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toymha import runs, stats
from toymha.runs import Run
from toymha.schema import UserError, word


@dataclass
class Row:
    """All seeds of one setting."""

    setting: dict[str, Any]  # swept key -> value
    runs: list[Run] = field(default_factory=list)
    loss: dict[int, float] = field(default_factory=dict)  # seed -> validation loss of the last weights, done runs only
    best: dict[int, float] = field(default_factory=dict)
    best_steps: list[int] = field(default_factory=list)
    ppl: list[float] = field(default_factory=list)
    bits: list[float] = field(default_factory=list)
    statuses: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, run: Run) -> None:
        s = run.summary
        seed = run.info["values"]["seed"]
        if seed in {r.info["values"]["seed"] for r in self.runs}:
            return  # the same run under a second name
        self.runs.append(run)
        status = s.get("status", "running")
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if status == "done" and math.isfinite(s["val"]["loss"]):
            self.loss[seed], self.best[seed] = s["val"]["loss"], s["best"]["loss"]
            self.best_steps.append(s["best"]["step"])
            self.ppl.append(s["val"]["ppl"])
            self.bits.append(s["val"]["bits_per_char"])
            if s["val"]["loss"] >= s["unigram_loss"]:
                self.notes.append(f"seed {seed} is no better than letter frequencies")
        elif "error" in s:
            self.notes.append(f"seed {seed} {status}: {s['error']}")

    @property
    def parameters(self) -> int | None:
        return next((p for r in self.runs if (p := r.summary.get("parameters"))), None)


@dataclass
class Table:
    """Rows in order of the swept values; `axes`: the swept keys."""

    axes: list[str]
    rows: list[Row]

    @classmethod
    def of(cls, found: Iterable[Run], axes: list[str], order: Sequence[dict[str, Any]] = ()) -> Table:
        """`axes`: the keys that tell the rows apart; `order`: their values in the order they were asked for."""
        rows: dict[str, Row] = {}
        for run in found:
            setting = {a: value_of(run, a) for a in axes}
            rows.setdefault(json.dumps(setting), Row(setting)).add(run)
        asked = {
            json.dumps({a: o[a] for a in axes}): i for i, o in reversed(list(enumerate(order))) if set(axes) <= set(o)
        }
        return cls(
            axes,
            [
                rows[k]
                for k in sorted(
                    rows, key=lambda k: (asked.get(k, len(asked)), [_sort_key(v) for v in rows[k].setting.values()])
                )
            ],
        )

    def records(self) -> list[dict[str, Any]]:
        """A flat record a row, numbers unrounded; what the data has no answer for is None."""
        out: list[dict[str, Any]] = []
        for row in self.rows:
            first, mean = self.rows[0], stats.estimate(list(row.loss.values()))
            vs = stats.paired(row.loss, first.loss) if row is not first else stats.estimate([])
            numbers = {
                "parameters": row.parameters,
                "runs": len(row.runs),
                "done": len(row.loss),
                "val_loss": mean.mean,
                "val_loss_std": mean.std,
                "best_val_loss": stats.estimate(list(row.best.values())).mean,
                "best_step_min": min(row.best_steps, default=None),
                "best_step_max": max(row.best_steps, default=None),
                "perplexity": stats.estimate(row.ppl).mean,
                "bits_per_char": stats.estimate(row.bits).mean,
                "difference": vs.mean,
                "difference_low": vs.low,
                "difference_high": vs.high,
                "pairs": vs.n,
            }
            clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}
            out.append(row.setting | clean)
        return out

    def text(self) -> str:
        """The table for a terminal, with the rule of reading below."""
        if not self.rows:
            return "no runs\n"
        head = ["parameters", "runs", "val loss", "std", "best", "at step", "perplexity", "bits/char"]
        lines = [[*self.axes, *head, "loss - first row, 95 % interval"]]
        for row, r in zip(self.rows, self.records()):
            low, high = r["best_step_min"], r["best_step_max"]
            cells = [
                f"{r['parameters'] or 0:,}",
                f"{r['done']}/{r['runs']}" if r["done"] < r["runs"] else str(r["runs"]),
                *(_num(r[k]) for k in ("val_loss", "val_loss_std", "best_val_loss")),
                "-" if low is None else f"{low}" if low == high else f"{low}-{high}",
                *(_num(r[k]) for k in ("perplexity", "bits_per_char")),
                self._difference(row, r),
            ]
            lines.append([*map(word, row.setting.values()), *cells])
        return "\n".join([*columns(lines, len(self.axes)), *self._notes()]) + "\n"

    def _difference(self, row: Row, r: dict[str, Any]) -> str:
        if row is self.rows[0]:
            return "the first"
        if r["difference"] is None:
            return "no pairs"
        if r["difference_low"] is None:
            return f"{r['difference']:+.4f} (one seed: no interval)"
        mark = "" if r["difference_low"] <= 0 <= r["difference_high"] else " *"
        return f"{r['difference']:+.4f} [{r['difference_low']:+.4f}, {r['difference_high']:+.4f}]{mark}"

    def _notes(self) -> list[str]:
        out = [
            "val loss: mean over seeds, nats a token, whole split, last weights; best: those of the best evaluation;",
            "rows as they were asked for, not ranked; differences paired by seed; * where the interval excludes 0",
        ]
        for row in self.rows:
            label = ", ".join(f"{k}={word(v)}" for k, v in row.setting.items()) or "runs"
            unfinished = ", ".join(f"{n} {s}" for s, n in sorted(row.statuses.items()) if s != "done")
            if unfinished:
                out.append(f"{label}: {unfinished} (not in the means)")
            out += [f"{label}: {note}" for note in row.notes]
        found = [r for row in self.rows for r in row.runs]
        if any(
            len({json.dumps(value_of(r, k)) for r in found}) > 1
            for k in ("data.sha256", "data.tokenizer", "data.vocab_size")
        ):
            sizes = sorted({s for r in found if (s := r.summary.get("vocab_size"))})
            said = f"these runs have different texts or tokens (vocabularies: {', '.join(map(str, sizes))})"
            out.append(f"warning: {said}; compare bits/char, not loss or perplexity")
        return out

    def write(self, folder: Path) -> None:
        """table.csv and table.json in the folder of the runs."""
        records = self.records()
        text = io.StringIO()
        if records:
            writer = csv.DictWriter(text, fieldnames=list(records[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(records)
        for name, content in (("table.csv", text.getvalue()), ("table.json", json.dumps(records, indent=1) + "\n")):
            runs.write_text(folder / name, content)


def load_table(folder: str) -> Table:
    """The table of all runs in or below a folder. Raises UserError where there are none."""
    path = Path(folder).expanduser()
    found = list(runs.find(path)) if path.is_dir() else []
    if not found:
        raise UserError(f"no runs in {path} (looked in {path.absolute()})")
    sweep = runs.read_json(path / "sweep.json") if (path / "sweep.json").is_file() else {}
    # The axes of the last sweep tell its own runs apart; other runs in the folder may differ in other keys.
    ours = {str(r.path.relative_to(path)) for r in found} <= set(sweep.get("runs", []))
    return Table.of(found, sweep["axes"] if ours else differing(found), sweep.get("order", []))


def differing(found: list[runs.Run]) -> list[str]:
    """Keys that take several values among the runs, but for the seed; the text itself counts as data.name."""
    keys = [k for k in found[0].info["values"] if k != "seed"]
    out = [k for k in keys if len({json.dumps(value_of(r, k)) for r in found}) > 1]
    if "data.name" in out or "data.path" in out:
        out = [k for k in out if k != "data.sha256"]
    return out


def value_of(run: runs.Run, key: str) -> Any:
    """A key's value in this run; a group (`model`) has the name of the chosen file."""
    return run.info["choices"].get(key) if key in ("model", "data", "optim", "budget") else run.info["values"].get(key)


def _sort_key(value: Any) -> tuple[int, float, str]:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (1, float(value), "") if number else (0 if value is None else 2, 0.0, str(value))


def columns(lines: list[list[str]], left: int) -> list[str]:
    """Cells under each other, the first `left` columns flush left; a Chinese character is two wide."""

    def width(cell: str) -> int:
        return sum(1 + (unicodedata.east_asian_width(ch) in "WF") for ch in cell)

    widths = [max(width(line[i]) for line in lines) for i in range(len(lines[0]))]
    out = []
    for line in lines:
        gaps = [" " * (w - width(cell)) for cell, w in zip(line, widths)]
        out.append("  ".join(c + g if i < left else g + c for i, (c, g) in enumerate(zip(line, gaps))).rstrip())
    return out


def _num(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
