"""Pages: the report of a folder of runs, and the index of all statements. No torch.

Each page is one file that asks nobody for anything: style and figures are in it. The same runs give the same bytes, so
there is no date of drawing in a report. What it says is gathered here, as plain text; the templates lay it out.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote as url_quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from toymha import caveats, runs
from toymha.config import GROUPS, REPLICATES
from toymha.console import duration, quote
from toymha.finding import Finding
from toymha.metrics import Result
from toymha.report import Report, tuned_words
from toymha.schema import word
from toymha.table import Row

TEMPLATES = Path(__file__).parent / "templates"

SIGNS = {"supported": "✓", "refuted": "✗", "undecided": "?"}  # a verdict is never told by colour alone


def write_report(report: Report) -> list[Path]:
    """report.html, report.md, report.csv and report.json in the folder of the runs; their paths, in this order."""
    from toymha.pictures import pictures

    facts = facts_of(report)
    for name, more in (("report.html", {"pictures": pictures(report)}), ("report.md", {})):
        runs.write_text(report.folder / name, render(name, **facts, **more))
    report.table.write(report.folder)
    return [report.folder / f"report.{kind}" for kind in ("html", "md", "csv", "json")]


@dataclass(frozen=True)
class Entry:
    """A line of the index: one statement and what came of it."""

    name: str
    statement: str
    source: str | None
    word: str  # supported, refuted, undecided, or `not run yet`
    turns_on: str | None
    findings: list[tuple[str, str, str]]  # each check in words, what was measured, its verdict
    command: str
    seconds: float | None
    done: int  # runs
    runs: int
    link: str  # path of its report.html from the index; empty where there is none


def write_index(folder: Path, entries: list[Entry], about: dict[str, str]) -> Path:
    """index.html: how many statements are supported, what `about` says, a row for each entry."""
    counted = Counter(e.word for e in entries)
    tally = [(w, counted[w]) for w in (*SIGNS, *sorted(counted.keys() - SIGNS.keys())) if counted[w] or w in SIGNS]
    folder.mkdir(parents=True, exist_ok=True)
    runs.write_text(folder / "index.html", render("index.html", entries=entries, tally=tally, about=about))
    return folder / "index.html"


# What a report says


def facts_of(report: Report) -> dict[str, Any]:
    """All that the templates need but the figures."""
    table, results, verdict = report.table, report.table.results, report.verdict
    notes = table.notes()
    warnings = [n.removeprefix("warning: ") for n in notes if n.startswith("warning: ")]
    begun = [row for row in table.rows if row.results]
    shared, differing = _configuration(begun)
    return {
        "title": report.sweep.name if report.sweep else report.folder.absolute().name,
        "progress": _progress(report),
        "sweep": report.sweep,
        "verdict": verdict if verdict and verdict.findings else None,
        "needed": verdict.open_text() if verdict else "",
        "tally": Counter(f.verdict for f in verdict.findings).items() if verdict else (),
        "checks": [_check(f) for f in verdict.findings] if verdict else [],
        "check_cells": _check_cells(verdict.findings) if verdict else [],
        "warnings": [*report.warnings, *warnings],
        "cells": table.cells(),
        "left": len(table.axes),
        "notes": [n for n in notes if not n.startswith("warning: ")],
        "relations": table.relations(),
        "realised": caveats.realised(results),
        "flops": caveats.FLOPS,
        "tuned": [tuned_words(t) for t in report.tuned],
        "shared": shared,
        "differing": differing,
        "provenance": _provenance(results),
        "links": [(row.name, [_link(report.folder, r) for r in row.results]) for row in begun],
        "commands": _commands(report),
    }


def _progress(report: Report) -> dict[str, Any]:
    """How many runs are done of those that were asked for, and how the others stand."""
    table = report.table
    counted = Counter(r.status for r in table.results)
    missing = table.missing + sum(row.missing for row in table.rows)
    others = [f"{counted[s]} {s}" for s in runs.STATUSES if s != "done" and counted[s]]
    others += [f"{missing} not begun"] if missing else []
    going = bool(missing or counted["running"] or counted["interrupted"])
    return {"done": counted["done"], "runs": counted.total() + missing, "others": ", ".join(others), "going": going}


def _check(f: Finding) -> dict[str, Any]:
    """One check in words. `facts`: pairs of name and text; what it has no answer for is left out."""
    m, percent = f.metric, f.perplexity()
    facts = {
        "claimed": f.claim(),
        "simultaneous 95 % interval" if f.simultaneous else "95 % interval": (
            "" if m.exact else _interval(f, (f.low, f.high))
        ),
        "bootstrap interval": _interval(f, f.bootstrap) if f.bootstrap else "",
        "p": _p(f.p),
        "p after Holm": _p(f.p_holm),
        "of perplexity": "" if percent is None or not math.isfinite(percent) else f"{percent:+.1f} %",
        "in seed noise (std)": f"{f.noise:+.1f}" if math.isfinite(f.noise) else "",
        "seeds" if f.absolute else "pairs": "" if m.exact or m.share else str(f.n),
        "would be decided by": f"{f.seeds_needed} seeds" if f.seeds_needed else "",
    }
    return {
        "that": f.that,
        "title": f.title,
        "place": f.place,
        "verdict": f.verdict,
        "metric": m.label,
        "absolute": f.absolute,
        "measured": f.measured(),
        "how": _how(f) if f.n else "",
        "facts": {k: v for k, v in facts.items() if v},
        "notes": list(f.notes),
    }


def _how(f: Finding) -> str:
    """What a number without an interval has to say for itself."""
    return "counted, not estimated" if f.metric.exact else "one seed: no interval" if math.isnan(f.low) else ""


def _check_cells(findings: Sequence[Finding]) -> list[list[str]]:
    """The checks as a table, its head first."""
    checks = [_check(f) for f in findings]
    names = list(dict.fromkeys(name for c in checks for name in c["facts"]))
    measured = "measured" if any(c["absolute"] for c in checks) else "difference"
    lines = [["check", "verdict", measured, *names]]
    for c in checks:
        how = f" ({c['how']})" if c["how"] else ""
        lines.append([c["title"], c["verdict"], c["measured"] + how, *(c["facts"].get(name, "-") for name in names)])
    return lines


def _interval(f: Finding, ends: tuple[float, float]) -> str:
    if any(map(math.isnan, ends)):
        return ""
    low, high = map(f.said, ends)
    return f"{low} to {high} {f.unit}".rstrip()


def _p(p: float) -> str:
    return "" if math.isnan(p) else "< 0.0001" if p < 0.0001 else f"{p:.4f}"


def _configuration(rows: Sequence[Row]) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """(what all rows share; a table of what differs, its head first, empty if that is the axes alone). No seeds."""
    info = rows[0].results[0].info
    known = [k for k in dict.fromkeys([*GROUPS, *info["values"]]) if k not in REPLICATES and k != "sweep"]
    values = {k: [_distinct(r.value(k) for r in row.results) for row in rows] for k in known}
    shared = [(k, v[0]) for k, v in values.items() if len(set(v)) == 1 and v[0] != "null"]
    axes = list(rows[0].setting)
    differing = [*axes, *(k for k, v in values.items() if len(set(v)) > 1 and k not in axes)]
    table = [differing, *([values[k][i] for k in differing] for i in range(len(rows)))]
    return shared, table if len(differing) > len(axes) else []


def _distinct(values: Iterable[Any]) -> str:
    return " | ".join(dict.fromkeys(map(word, values)))


def _provenance(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """Where the numbers come from: for each fact, its different values over the runs."""
    facts: dict[str, dict[str, None]] = {}
    for r in results:
        for name, value in _origin(r.info).items():
            if value:
                facts.setdefault(name, {})[value] = None
    return [(name, list(values)) for name, values in facts.items()]


def _origin(info: dict[str, Any]) -> dict[str, str]:
    git, machine = info.get("git"), info.get("machine") or {}
    versions = [f"{k} {v}" for k, v in (info.get("versions") or {}).items() if v]
    parts = [machine.get("cpu"), f"{machine['cores']} cores" if machine.get("cores") else "", machine.get("system")]
    device = [info.get("device"), info.get("precision"), f"{info['threads']} threads" if "threads" in info else ""]
    return {
        "source": f"commit {git['commit']}{', with uncommitted changes' if git['dirty'] else ''}" if git else "no git",
        "versions": ", ".join(versions),
        "machine": ", ".join(filter(None, parts)),
        "device": ", ".join(map(str, filter(None, device))),
        "sha256 of the text": str(info["values"].get("data.sha256") or ""),
        "typed": _command(info.get("command") or ""),
    }


def _command(typed: str) -> str:
    """A command as one types it: without the path of the program."""
    try:
        program, *words = shlex.split(typed)
    except ValueError:
        return typed
    ours = PurePath(program).name in ("toymha", "__main__.py") or PurePath(program).stem == "toymha"
    return shlex.join(["toymha", *words]) if ours else typed


def _commands(report: Report) -> list[str]:
    """What to type to get these runs again, this page again, and the curves."""
    infos = [r.info for r in report.table.results]
    typed = list(dict.fromkeys(_command(i.get("command") or "") for i in infos))
    again = [c for c in typed if c.startswith("toymha train ")]
    if not again and report.sweep:
        budget = infos[0]["choices"].get("budget")
        again = [f"toymha train sweep={report.sweep.name}{f' budget={budget}' if budget else ''}"]
    where = quote(_seen_from(report.folder, infos[0].get("folder")))
    return [*again, f"toymha report run={where}", f"tensorboard --logdir {where}"]


def _seen_from(folder: Path, start: str | None) -> Path:
    """The folder of the runs from where they were started, so that the page does not depend on where it is written."""
    inside = start and Path(os.path.abspath(folder)).is_relative_to(start)
    return Path(os.path.relpath(folder, start)) if inside else folder


def _link(root: Path, r: Result) -> dict[str, str]:
    loss = f"{r.summary['val']['loss']:.4f}" if r.done else r.status
    return {"name": r.seed_name or "run", "address": href(r.path.relative_to(root)), "loss": loss}


def href(path: PurePath) -> str:
    """A relative path as the address of a link; `./` keeps a colon in it from passing for a scheme."""
    return "./" + "".join(f"{url_quote(part, safe='')}/" for part in path.parts)


# From facts to text


def with_script(name: str) -> dict[str, Any]:
    """For a page whose policy allows one script alone: the script, and its digest, which names it there."""
    script = (TEMPLATES / name).read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {"script": Markup(script), "digest": digest}


def render(name: str, **facts: Any) -> str:
    return environment(name.endswith(".html")).get_template(name).render(facts)


@functools.cache
def environment(html: bool) -> Environment:
    """Of templates in which every expression is escaped, as HTML or as Markdown; a name that is missing is an error."""
    out = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=html,
        finalize=None if html else markdown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    out.filters |= {"duration": duration, "address": lambda link: href(PurePath(link)).removesuffix("/")}
    out.filters |= {"svg": Markup, "cells": markdown_table, "code": markdown_code}
    out.globals |= {"signs": SIGNS}
    return out


def markdown(value: Any) -> Any:
    """Text that GitHub shows as it is, also at the start of a line."""
    if isinstance(value, Markup):
        return value
    return Markup(re.sub(r"^([#>+-]|\d+\.)(?=\s|$)", r"\\\1", cell(value)))


def cell(value: Any) -> str:
    """The same inside a line. Underscores inside words mean nothing there and stay."""
    if isinstance(value, Markup):
        return str(value)
    text = " ".join(str(value).split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*|~$]|(?<![^\W_])_|_(?![^\W_])|\](?=[(\[:]))", r"\\\1", text)


def markdown_table(lines: Sequence[Sequence[str]], left: int = 1) -> Markup:
    """Cells as a table, the head first; from column `left` on they are numbers."""
    head, *rows = ["| " + " | ".join(map(cell, line)) + " |" for line in lines]
    rule = "|" + "|".join(" --- " if i < left else " ---: " for i in range(len(lines[0]))) + "|"
    return Markup("\n".join([head, rule, *rows]))


def markdown_code(text: str) -> Markup:
    """A code span, between more backticks than it has in a row."""
    text = " ".join(text.split())
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return Markup(f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}")
