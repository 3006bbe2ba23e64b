"""The runs of a folder as a table: for each setting mean, spread, and difference to its baseline. No torch."""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toymha import runs, stats
from toymha.metrics import METRICS, Metric, Result, metric, number, percent, setting_name
from toymha.schema import word

MOST_NAMES = 3  # of rows in one warning


@dataclass
class Row:
    """All seeds of one setting."""

    setting: dict[str, Any]  # swept key -> value
    results: list[Result] = field(default_factory=list)
    missing: int = 0  # runs that were asked for and have not begun

    def add(self, result: Result) -> None:
        if result.replicate not in {r.replicate for r in self.results}:  # else the same run under a second name
            self.results.append(result)

    @property
    def asked(self) -> int:
        return len(self.results) + self.missing

    @property
    def done(self) -> list[Result]:
        return [r for r in self.results if r.done]

    @property
    def texts(self) -> set[tuple[Any, ...]]:
        return {r.text for r in self.results}

    @property
    def predicts(self) -> set[str]:
        return {r.predicts for r in self.results}

    def values(self, metric: Metric) -> dict[tuple[int, ...], float]:
        """Replicate -> the metric, on its scale."""
        found = {r.replicate: metric.of(r) for r in self.results}
        return {k: v for k, v in sorted(found.items()) if v is not None}

    def mean(self, *path: str) -> float | None:
        """The mean of a number in summary.json over the finished runs."""
        numbers = [v for r in self.done if (v := number(r.summary, path)) is not None]
        return math.fsum(numbers) / len(numbers) if numbers else None

    @property
    def name(self) -> str:
        return setting_name(self.setting) or "runs"

    def notes(self) -> list[str]:
        """What is not in the means, and why."""
        statuses = [r.status for r in self.results if r.status != "done"] + ["not begun"] * self.missing
        counted = ", ".join(f"{statuses.count(s)} {s}" for s in sorted(set(statuses)))
        out = [f"{self.name}: {counted} (not in the means)"] if counted else []
        for r in self.results:
            if r.done and r.stalled:
                out.append(f"{self.name}: {r.seed_name} is no better than the frequencies of tokens")
            elif not r.done and "error" in r.summary:
                out.append(f"{self.name}: {r.seed_name} {r.status}: {r.summary['error']}")
        return out


@dataclass
class Table:
    """Rows in order of the swept values. `axes`: the swept keys; `slices`: those within which rows are compared."""

    axes: list[str]
    rows: list[Row]
    slices: list[str] = field(default_factory=list)
    split: str = "val"  # test for a statement: nothing was chosen by it
    missing: int = 0  # runs that were asked for, have not begun, and belong to no row

    @classmethod
    def of(
        cls,
        found: Iterable[Result],
        axes: list[str],
        order: Sequence[dict[str, Any]] = (),
        missing: Sequence[dict[str, Any]] = (),
    ) -> Table:
        """`axes`: the keys that tell the rows apart; `order`: their values in the order they were asked for;
        `missing`: the settings of the runs that have not begun, a row of their own where no other seed has either."""
        rows: dict[str, Row] = {}
        for result in found:
            setting = {a: result.value(a) for a in axes}
            rows.setdefault(json.dumps(setting), Row(setting)).add(result)
        placed = [{a: m[a] for a in axes} for m in missing if set(axes) <= set(m)]
        for setting in placed:
            rows.setdefault(json.dumps(setting), Row(setting)).missing += 1
        asked = {
            json.dumps({a: o[a] for a in axes}): i for i, o in reversed(list(enumerate(order))) if set(axes) <= set(o)
        }

        def place(k: str) -> tuple[int, list[Any]]:
            return asked.get(k, len(asked)), [_sort_key(v) for v in rows[k].setting.values()]

        return cls(axes, [rows[k] for k in sorted(rows, key=place)], missing=len(missing) - len(placed))

    @property
    def results(self) -> list[Result]:
        return [r for row in self.rows for r in row.results]

    def baseline(self, row: Row) -> Row:
        """The first row of the same slice."""
        return next(r for r in self.rows if all(r.setting[k] == row.setting[k] for k in self.slices))

    @functools.cached_property
    def compared_in(self) -> list[Metric]:
        """For each row what it is compared with its baseline in: the loss; bits a character where their texts or tokens
        differ; the share of right targets where one predicts targets alone and the other sources too."""
        loss, bits, exact = METRICS[f"{self.split}_loss"], *(metric(n, self.split) for n in ("bits_per_char", "exact"))

        def of(row: Row, first: Row) -> Metric:
            if len(row.predicts | first.predicts) > 1:
                return exact
            return loss if len(row.texts | first.texts) < 2 else bits

        return [of(row, self.baseline(row)) for row in self.rows]

    @functools.cached_property
    def differences(self) -> list[dict[str, Any] | None]:
        """A row each: its paired difference to the baseline with intervals and p-values; None for a baseline."""
        out: list[dict[str, Any] | None] = []
        for row, m in zip(self.rows, self.compared_in):
            first = self.baseline(row)
            out.append(None if row is first else _difference(row.values(m), first.values(m), m))
        found = [d for d in out if d]
        for d, p in zip(found, stats.holm([d["p"] for d in found])):
            d["p_holm"] = p
        return out

    def records(self) -> list[dict[str, Any]]:
        """A flat record a row, numbers unrounded; what the data has no answer for is None."""
        out: list[dict[str, Any]] = []
        names = ["difference", "difference_low", "difference_high", "bootstrap_low", "bootstrap_high", "p", "p_holm"]
        names += ["percent_of_perplexity", "in_seed_noise", "settles", "pairs"]
        for row, m, difference in zip(self.rows, self.compared_in, self.differences):
            loss = stats.estimate([r.summary[self.split]["loss"] for r in row.done if r.summary.get(self.split)])
            steps = [r.summary["best"]["step"] for r in row.done]
            numbers = {
                "parameters": next((p for r in row.results if (p := r.summary.get("parameters"))), None),
                "asked": row.asked,
                "runs": len(row.results),
                "done": len(row.done),
                f"{self.split}_loss": loss.mean,
                f"{self.split}_loss_std": loss.std,
                "best_val_loss": row.mean("best", "loss"),
                "best_step_min": min(steps, default=None),
                "best_step_max": max(steps, default=None),
                "perplexity": row.mean(self.split, "ppl"),
                "bits_per_char": row.mean(self.split, "bits_per_char"),
                "exact": row.mean("pairs", self.split, "greedy", "exact"),
                "ser": row.mean("pairs", self.split, "greedy", "ser"),
                "flops_per_token": row.mean("flops_per_token"),
                "kv_bytes": row.mean("kv_bytes"),
                "tokens_per_s": row.mean("tokens_per_s"),
                "steady_tokens_per_s": row.mean("steady_tokens_per_s"),
                "compared_in": m.name,
                **{k: (difference or {}).get(k) for k in names},
            }
            clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}
            out.append(row.setting | clean)
        return out

    def text(self) -> str:
        """The table for a terminal, with the rule of reading below."""
        if not self.rows:
            return "no runs\n"
        return "\n".join([*columns(self.cells(), len(self.axes)), *self.notes()]) + "\n"

    def cells(self) -> list[list[str]]:
        """The table as people read it, the head first."""
        head = ["parameters", "runs", f"{self.split} loss", "std", "best val", "at step", "perplexity", "bits/char"]
        pairs = any(r["exact"] is not None for r in self.records())
        head += ["exact", "symbol errors"] if pairs else []
        units = {m.unit for m, d in zip(self.compared_in, self.differences) if d} or {"nats"}
        mixed = len(units) > 1
        names = {"nats": "loss -", "bits": "bits/char -", "%": "exact (percentage points) -"}
        what = "difference to" if mixed else names[min(units)]
        lines = [[*self.axes, *head, f"{what} baseline, 95 % interval"]]
        for row, r, m, d in zip(self.rows, self.records(), self.compared_in, self.differences):
            low, high = r["best_step_min"], r["best_step_max"]
            cells = [
                "-" if r["parameters"] is None else f"{r['parameters']:,}",
                f"{r['done']}/{r['asked']}" if r["done"] < r["asked"] else str(r["asked"]),
                *(_num(r[k]) for k in (f"{self.split}_loss", f"{self.split}_loss_std", "best_val_loss")),
                "-" if low is None else f"{low}" if low == high else f"{low}-{high}",
                _num(row.mean(self.split, "ppl")),  # infinite where exp of the loss is, which a record cannot say
                _num(r["bits_per_char"]),
                *("-" if r[k] is None else f"{r[k]:.1%}" for k in ("exact", "ser") if pairs),
                _told(d, m) + (f" {m.unit_of_difference}" if mixed and d and d["pairs"] else ""),
            ]
            lines.append([*map(word, row.setting.values()), *cells])
        return lines

    def relations(self) -> list[list[str]]:
        """By relation, for texts with tags: loss (floor), probability of the right class, learned in how many runs."""
        scores = [r.summary[self.split] for r in self.results if r.done and r.summary.get(self.split)]
        parts: dict[str, Any] = next((s["parts"] for s in scores if s.get("parts")), {})
        if not parts:
            return []
        lines = [[*self.axes, "relation", "loss", "floor", "right", "accuracy", "learned", "at step"]]
        for row in self.rows:
            if row.done and not any((r.summary.get(self.split) or {}).get("parts") for r in row.done):
                continue  # its text has no relations
            ended = [r for r in row.results if r.done or r.status == "diverged"]  # which has not learned anything
            for name in parts:
                at = [r.summary.get("learned", {}).get(name) if r.done else None for r in ended]
                steps = sorted(s for s in at if s is not None)
                span = "" if not steps else str(steps[0]) if steps[0] == steps[-1] else f"{steps[0]}-{steps[-1]}"
                numbers = [row.mean(self.split, "parts", name, k) for k in ("loss", "floor", "right", "accuracy")]
                shown = ["-" if v is None else f"{v:.3f}" for v in numbers]
                lines.append([*map(word, row.setting.values()), name, *shown, f"{len(steps)}/{len(at)}", span or "-"])
        return lines

    def notes(self) -> list[str]:
        tested = "test: whole test split; " if self.split == "test" else ""
        out = [
            f"loss: mean over seeds, nats a token, whole split, last weights; {tested}best: of the best evaluation;",
            "rows in the order of their settings, not ranked; differences to the first row"
            + (f" of the same {', '.join(self.slices)}" if self.slices else "")
            + ", paired by seed; * p < 0.05 after Holm",
        ]
        out += [note for row in self.rows for note in row.notes()]
        if self.missing:
            out.append(f"{self.missing} of the runs that were asked for last: not begun")
        out += filter(None, map(self._troubles, self.rows))
        return out + self._texts()

    def _texts(self) -> list[str]:
        """What to make of different texts or tokens: a warning where two rows that are compared differ in them."""
        sizes = sorted({s for r in self.results if (s := r.summary.get("vocab_size"))})
        shown = f"vocabularies: {', '.join(map(str, sizes))}"
        apart = [row.name for row, m in zip(self.rows, self.compared_in) if m.name == "bits_per_char"]
        other = [row.name for row, m in zip(self.rows, self.compared_in) if m.name == "exact"]
        if other:
            said = f"losses of targets alone stand beside losses of whole texts: {'; '.join(other[:MOST_NAMES])}"
            return [f"warning: {said}; compare exact, not loss, perplexity, bits/char or tokens/s"]
        if apart:
            names = "; ".join(apart[:MOST_NAMES]) + (f" and {len(apart) - MOST_NAMES} more" * (len(apart) > MOST_NAMES))
            said = f"other text or tokens than in the baseline ({shown}): {names}"
            return [f"warning: {said}; compare bits/char, not loss or perplexity"]
        if len({r.text for r in self.results}) > 1:
            return [f"texts or tokens differ with {', '.join(self.slices)} ({shown}): between those, compare bits/char"]
        return []

    def _troubles(self, row: Row) -> str:
        """Whether a setting diverges or stalls more often than its baseline, by Fisher's exact test."""
        sides = [[r.stalled for r in side.results if r.done or r.stalled] for side in (row, self.baseline(row))]
        (k1, n1), (k2, n2) = ((sum(side), len(side)) for side in sides)
        if not n1 or not n2 or k1 * n2 == k2 * n1:
            return ""
        p = stats.fisher(k1, n1, k2, n2)
        return f"{row.name}: {k1}/{n1} diverged or stalled against {k2}/{n2} (Fisher's exact p = {p:.3g})"

    def write(self, folder: Path) -> None:
        """report.csv and report.json in the folder of the runs."""
        records = self.records()
        text = io.StringIO()
        if records:
            writer = csv.DictWriter(text, fieldnames=list(records[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(records)
        for name, content in (("report.csv", text.getvalue()), ("report.json", json.dumps(records, indent=1) + "\n")):
            runs.write_text(folder / name, content)


def _difference(value: dict[tuple[int, ...], float], base: dict[tuple[int, ...], float], m: Metric) -> dict[str, Any]:
    """Value minus baseline over the seeds that both have, on the scale of the metric."""
    pairs = [value[k] - base[k] for k in sorted(value.keys() & base.keys())]
    e, spread = stats.estimate(pairs), stats.estimate(list(base.values())).std
    low, high = stats.bootstrap(pairs) or (None, None)
    return {
        "difference": e.mean,
        "difference_low": e.low,
        "difference_high": e.high,
        "bootstrap_low": low,
        "bootstrap_high": high,
        "p": stats.p_value(pairs),
        "percent_of_perplexity": percent(e.mean) if m.unit == "nats" else None,
        "in_seed_noise": e.mean / spread if spread else None,
        "settles": stats.settles(e.std, e.n) if e.n > 1 else None,
        "pairs": e.n,
    }


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


def _told(d: dict[str, Any] | None, m: Metric) -> str:
    if d is None:
        return "baseline"
    if not d["pairs"]:
        return "no pairs"
    if d["pairs"] < 2:
        return f"{m.signed(m.told(d['difference']))} (one seed: no interval)"
    mark = " *" if d["p_holm"] < 0.05 else ""
    mean, low, high = (m.signed(m.told(d[k])) for k in ("difference", "difference_low", "difference_high"))
    return f"{mean} [{low}, {high}]{mark}"


def _num(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
