"""All statements of conf/sweep, one after the other, and one page with a line for each."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

from toymha import compose, fair, runs
from toymha.compose import Experiment
from toymha.config import choices
from toymha.console import duration, quote
from toymha.page import Entry, write_index
from toymha.report import Report, columns
from toymha.schema import UserError, nearest
from toymha.sweep import plans, run_sweep


def reproduce(o: Any) -> int:
    """`o`: cli.ReproduceOptions. The exit status is that of the worst sweep; a signal ends it all at once.

    What is done is not done again: the same command goes on where the last one stopped.
    """
    found = [(name, experiment_of(name, o)) for name in statements(o.claims)]  # all are checked before the first begins
    experiments = dict(sorted(found, key=lambda item: item[1].sweep.place if item[1].sweep else 0))
    if o.plan:
        return say_plan(experiments)
    folder = Path(o.output_dir) / "reproduce"
    status = 0
    for i, (name, experiment) in enumerate(experiments.items(), 1):
        assert experiment.sweep is not None
        print(f"\n[{i}/{len(found)}] {name}: {experiment.sweep.statement}\n", flush=True)
        outcome = run_sweep(experiment)
        page = write_page(folder, experiments, o)
        if outcome > 1:
            return outcome
        status = max(status, outcome)
    print("\n" + summary([entry(name, e, folder) for name, e in experiments.items()]))
    print(f"page  {quote(page)}")
    return status


def statements(claims: list[str] | None) -> list[str]:
    """The names asked for, or all files in conf/sweep. Raises UserError for one that is not there."""
    known = choices("sweep")
    for name in claims or []:
        if name not in known:
            raise UserError(f"claims={name}: no such statement{nearest(name, known) or ';'} valid: {', '.join(known)}")
    return list(dict.fromkeys(claims)) if claims else known


def experiment_of(name: str, o: Any) -> Experiment:
    words = [f"sweep={name}", f"budget={o.budget}", f"name=reproduce/{o.budget}/{name}", f"output_dir={o.output_dir}"]
    words += [f"device={o.device}", *([f"workers={o.workers}"] if o.workers else [])]
    return fair.equalise(compose.experiment(words))


def say_plan(experiments: dict[str, Experiment]) -> int:
    """How long each takes and all together, after trials of a few steps."""
    from toymha.predict import predict

    made = {name: plans(experiment) for name, experiment in experiments.items()}
    seconds = predict([plan for ps in made.values() for plan in ps])
    total = sum(seconds)
    for name, ps in made.items():
        each, seconds = seconds[: len(ps)], seconds[len(ps) :]
        todo, all_runs = sum(len(p.todo) for p in ps), sum(len(p.jobs) for p in ps)
        print(f"{name:24} {todo:4} of {all_runs:4} runs to train   about {duration(sum(each))}")
    print(f"{'all':24} {'':31}about {duration(total)}")
    return 0


def entry(name: str, experiment: Experiment, folder: Path) -> Entry:
    """The line of one statement, whatever there is of it."""
    sweep = experiment.sweep
    assert sweep is not None
    path = runs.folder(experiment.points[0].config, "x").parent.parent
    budget = experiment.points[0].choices["budget"]
    about = (sweep.statement or sweep.question, sweep.source, f"toymha train sweep={name} budget={budget}")
    if not (path / "sweep.json").is_file() or not list(path.glob("*/*/run.json")):
        return Entry(name, *about[:2], "not run yet", None, [], about[2], None, 0, len(experiment.points), "")
    report = Report.load(path)
    verdict, results = report.verdict, report.table.results
    assert verdict is not None
    findings = [(f"{f.that} ({f.place})" if f.where else f.that, f.text(), f.verdict) for f in verdict.findings]
    workers = experiment.points[0].config.workers or runs.cores()
    seconds = sum(r.summary.get("wall_seconds", 0.0) for r in results) / workers
    done, link = sum(r.done for r in results), str(path.relative_to(folder) / "report.html")
    asked = len(experiment.points)
    return Entry(name, *about[:2], verdict.word, verdict.turns_on, findings, about[2], seconds, done, asked, link)


def write_page(folder: Path, experiments: dict[str, Experiment], o: Any) -> Path:
    entries = [entry(name, e, folder) for name, e in experiments.items()]
    commit = runs.git() or {}
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{runs.processor()}, {runs.cores()} cores, {platform.system()}",
        "commit": f"{commit.get('commit', 'installed')[:12]}{' and changes' if commit.get('dirty') else ''}",
        "command": f"toymha reproduce budget={o.budget}",
    }
    runs.write_text(folder / "index.md", markdown(entries))
    return write_index(folder, entries, about)


def summary(entries: list[Entry]) -> str:
    """For a terminal: a line for each statement, and its checks."""
    lines = [["statement", "verdict", "runs", "time", "measured"]]
    for e in entries:
        time_ = duration(e.seconds) if e.seconds is not None else "-"
        first, *more = e.findings or [("", "", "")]
        lines.append([e.name, e.word, f"{e.done}/{e.runs}", time_, f"{first[0]}: {first[1]}".strip(": ")])
        lines += [["", "", "", "", f"{that}: {text}"] for that, text, _ in more]
    return "\n".join(columns(lines, 5)) + "\n"


def markdown(entries: list[Entry]) -> str:
    """The same as a table for a README."""
    lines = ["| statement | verdict | measured | runs | time |", "| --- | --- | --- | --- | --- |"]
    for e in entries:
        measured = "<br>".join(f"{that}: {text} ({word})" for that, text, word in e.findings)
        verdict = f"**{e.word}**" + (f" ({e.turns_on})" if e.turns_on else "")
        time_ = duration(e.seconds) if e.seconds is not None else "-"
        lines.append(f"| `{e.name}`: {e.statement} | {verdict} | {measured} | {e.done}/{e.runs} | {time_} |")
    return "\n".join(line.replace("\n", " ") for line in lines) + "\n"
