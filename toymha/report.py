"""Run folders -> a report: the table, what was tuned, the verdict where the runs test a statement. No torch."""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toymha import caveats, runs, schema
from toymha.config import REPLICATES
from toymha.metrics import Result, setting_name
from toymha.schema import UserError
from toymha.statement import Sweep
from toymha.table import Table, columns
from toymha.verdict import Verdict, judge


@dataclass
class Report:
    """All that is known of the runs in a folder: the table, and the verdict where they test a statement."""

    folder: Path
    table: Table
    sweep: Sweep | None = None
    tuned: list[dict[str, Any]] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)  # the setting of each run that was asked for
    told: list[str] = field(default_factory=list)  # warnings that sweep.json has from the sweep itself

    @classmethod
    def load(cls, folder: str | Path) -> Report:
        """The report of all runs in or below a folder. Raises UserError where there are none."""
        path = Path(folder).expanduser()
        about = runs.read_json(path / "sweep.json") if (path / "sweep.json").is_file() else {}
        sweeps = sorted(p.parent for p in path.rglob("sweep.json"))
        statements = [p for p in sweeps if runs.read_json(p / "sweep.json").get("sweep")]
        if not about and (len(sweeps) > 1 or statements):  # other texts, other questions: no one table holds them
            several = ", ".join(f"run={p}" for p in sweeps[:3]) + (", ..." if len(sweeps) > 3 else "")
            raise UserError(f"the runs in {path} belong to sweeps of their own; report one of them: {several}")
        found = [Result.of(r) for r in runs.find(path)] if path.is_dir() else []
        if not found:
            raise UserError(f"no runs in {path} (looked in {path.absolute()})")
        return cls.of(path, found, about)

    @classmethod
    def of(cls, path: Path, found: list[Result], about: dict[str, Any]) -> Report:
        """`about`: the contents of sweep.json, or nothing. Raises UserError where no run of a statement has begun."""
        asked = asked_of(about)
        names = {id(r): r.path.relative_to(path).as_posix() for r in found}
        sweep = schema.build(about["sweep"], Sweep, "sweep.") if about.get("sweep") else None
        if sweep:  # a statement is judged by the runs it asked for
            others = len(found)
            found = [r for r in found if names[id(r)] in asked]
            others -= len(found)
            if not found:
                raise UserError(f"{path}: none of the {len(asked)} runs of this sweep has begun")
        here = {names[id(r)] for r in found}
        missing = [setting for name, setting in asked.items() if name not in here]
        # The axes of the last sweep tell its own runs apart; other runs in the folder may differ in other keys.
        if here <= asked.keys():
            table = Table.of(found, about["axes"], about.get("order", []), missing)
        else:
            table = Table.of(found, differing(found), about.get("order", []))
            table.missing = len(missing)
        if sweep:
            table.slices = [k for k in sweep.slices if k in table.axes]
            table.split = "test" if all(r.summary.get("test") for r in table.results if r.done) else "val"
        told = list(about.get("warnings") or [])
        if sweep and others:
            told.append(
                f"{others} more runs in this folder, of other seeds or settings than last asked for, are not here"
            )
        return cls(path, table, sweep, about.get("tuned") or [], list(asked.values()), told)

    @functools.cached_property
    def warnings(self) -> list[str]:
        """What a reader must know before believing the comparison."""
        if self.sweep is None:
            return self.told
        return [*self.told, *caveats.warnings_of(self.sweep, self.table.results), *self._inert()]

    @functools.cached_property
    def verdict(self) -> Verdict | None:
        if self.sweep is None:
            return None
        return judge(self.sweep, self.table.results, self.warnings, self.table.axes, [a for a in self.asked if a])

    def _inert(self) -> list[str]:
        """Settings that differ in a swept key and end alike to the last bit, by the seed that most have finished."""
        if self.sweep is None or self.sweep.equal:
            return []
        counted = Counter(r.replicate for r in self.table.results if r.done)
        if not counted:
            return []
        replicate = min(counted, key=lambda k: (-counted[k], k))
        done = {row.name: r for row in self.table.rows for r in row.done if r.replicate == replicate}
        rows = {name: caveats.logged(r) for name, r in done.items()}
        names = list(rows)
        return caveats.inert((a, b, rows[a], rows[b]) for i, a in enumerate(names) for b in names[i + 1 :])

    def text(self) -> str:
        """For a terminal: the table, by relation, how it was compared, the verdict."""
        parts = [self.table.text()]
        if lines := self.table.relations():
            parts.append("\n".join(columns(lines, len(self.table.axes) + 1)) + "\n")
        if self.tuned:
            said = [f"  {where}: {chosen} of {tried}" for where, chosen, tried in map(tuned_words, self.tuned)]
            parts.append("\n".join(["tuned on validation text, with seeds of their own (losses):", *said]) + "\n")
        if self.sweep and (shown := caveats.realised(self.table.results)):
            parts.append(f"compared at equal {self.sweep.compare}: {shown}\n{caveats.FLOPS}\n")
        if self.verdict:
            parts.append(self.verdict.text())  # with the warnings
        elif self.warnings:
            parts.append("".join(f"warning: {w}\n" for w in self.warnings))
        return "\n".join(parts)


def asked_of(about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The runs that sweep.json names: path from the folder, with slashes -> setting. A run asked for twice is one."""
    paths, order = about.get("runs") or [], about.get("order") or []
    settings = [*order, *({} for _ in paths[len(order) :])]
    return {Path(p).as_posix(): setting for p, setting in zip(paths, settings)}


def differing(found: list[Result]) -> list[str]:
    """Keys that take several values among the runs, but for the seeds; the text itself counts as data.name.

    Where the choice of `model` decides two or more of them, it stands in their place.
    """
    keys = [k for k in found[0].info["values"] if k not in REPLICATES]
    out = [k for k in keys if len({json.dumps(r.value(k)) for r in found}) > 1]
    if "data.name" in out or "data.path" in out:
        out = [k for k in out if k != "data.sha256"]
    values = {k: {(r.value("model"), json.dumps(r.value(k))) for r in found} for k in out}
    models = {r.value("model") for r in found}
    decided = [k for k in out if len(values[k]) == len(models)]
    return ["model", *(k for k in out if k not in decided)] if len(models) > 1 and len(decided) > 1 else out


def tuned_words(t: dict[str, Any]) -> tuple[str, str, str]:
    """(setting, what was chosen for it, all candidates with their validation losses)."""
    losses = ["-" if c["val_loss"] is None else f"{c['val_loss']:.4f}" for c in t["candidates"]]
    tried = "; ".join(f"{setting_name(c['values'])} ({loss})" for c, loss in zip(t["candidates"], losses))
    return setting_name(t["setting"]) or "all", setting_name(t["chosen"]) or "-", tried
