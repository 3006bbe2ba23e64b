"""All statements of conf/sweep, one after the other, and one page with a line for each."""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from toymha import compose, fair, provenance, runs
from toymha.compose import Experiment
from toymha.config import choices
from toymha.console import duration, quote
from toymha.metrics import Result
from toymha.page import Entry, cell, markdown_code, markdown_table, write_index
from toymha.report import Report, columns
from toymha.schema import UserError, nearest
from toymha.sweep import GPU_RUNS, plans, run_sweep


def reproduce(o: Any, words: Sequence[str] = ()) -> int:
    """`o`: cli.ReproduceOptions; `words`: what was typed. The exit status is that of the worst sweep; a signal ends it
    all at once.

    What is done is not done again: the same command goes on where the last one stopped. The page has all statements
    at this budget, whichever were asked for.
    """
    # All that is asked for is checked before the first begins.
    experiments = by_place({name: fair.equalise(experiment_of(name, o)) for name in statements(o.claims)})
    if o.plan:
        return say_plan(experiments)
    folder = Path(o.output_dir) / "reproduce"
    others = {name: experiment_of(name, o) for name in choices("sweep") if name not in experiments}
    listed, status = by_place(experiments | others), 0
    for i, (name, experiment) in enumerate(experiments.items(), 1):
        assert experiment.sweep is not None
        print(f"\n[{i}/{len(experiments)}] {name}: {experiment.sweep.statement}\n", flush=True)
        outcome = run_sweep(experiment)
        page = write_page(folder, listed, shlex.join(["toymha", "reproduce", *words]))
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
    if claims == []:
        raise UserError("claims=[] names no statement; leave it out for all of them")
    return list(dict.fromkeys(claims)) if claims else known


def experiment_of(name: str, o: Any) -> Experiment:
    words = [f"sweep={name}", f"budget={o.budget}", f"name=reproduce/{o.budget}/{name}", f"output_dir={o.output_dir}"]
    words += [f"device={o.device}", *([f"workers={o.workers}"] if o.workers else [])]
    return compose.experiment(words)


def by_place(experiments: dict[str, Experiment]) -> dict[str, Experiment]:
    """In the order of the page."""
    return dict(sorted(experiments.items(), key=lambda item: item[1].sweep.place if item[1].sweep else 0))


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
    try:
        report = Report.load(path)
    except UserError as e:  # one folder that is damaged, or of an earlier version, must not take the page away
        return Entry(name, *about[:2], "cannot be read", str(e), [], about[2], None, 0, len(experiment.points), "")
    verdict, results = report.verdict, report.table.results
    assert verdict is not None
    findings = [(f.title, f.text(), f.verdict) for f in verdict.findings]
    seconds = seconds_of(path, results, experiment.points[0].config.workers)
    done, link = sum(r.done for r in results), (path.relative_to(folder) / "report.html").as_posix()
    asked = len(experiment.points)
    ended = sum(r.status in runs.FINISHED for r in results)
    turns_on = verdict.turns_on if ended == asked else f"so far, with {ended} of {asked} runs"
    return Entry(name, *about[:2], verdict.word, turns_on, findings, about[2], seconds, done, asked, link)


def seconds_of(folder: Path, results: Sequence[Result], workers: int | None) -> float:
    """How long the runs of a statement and the trials before them took, as many at a time as the machine had them.

    The wall time of each run counts all its attempts, with evaluation and decoding; starting the workers is left out.
    """
    trials = [Result.of(r) for r in runs.find(f"{folder}-tuning")]
    out = 0.0
    for part in filter(None, (results, trials)):
        info = part[0].info
        cores = (info.get("machine") or {}).get("cores") or runs.cores()
        at_a_time = workers or (cores if info.get("device", "cpu") == "cpu" else min(GPU_RUNS, cores))
        out += sum(r.summary.get("wall_seconds", 0.0) for r in part) / min(at_a_time, len(part))
    return out


def write_page(folder: Path, experiments: dict[str, Experiment], command: str) -> Path:
    entries = [entry(name, e, folder) for name, e in experiments.items()]
    commit = provenance.git() or {}
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{provenance.processor()}, {runs.cores()} cores, {platform.system()}",
        "commit": f"{commit.get('commit', 'installed')[:12]}{' and changes' if commit.get('dirty') else ''}",
        "command": command,
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
    lines = [["statement", "verdict", "measured", "runs", "time"]]
    for e in entries:
        statement = Markup(f"{markdown_code(e.name)}: {cell(e.statement)}")
        verdict = Markup(f"**{e.word}**" + (f" ({cell(e.turns_on)})" if e.turns_on else ""))
        measured = Markup("<br>".join(cell(f"{that}: {text} ({word})") for that, text, word in e.findings))
        time_ = duration(e.seconds) if e.seconds is not None else "-"
        lines.append([statement, verdict, measured, f"{e.done}/{e.runs}", time_])
    return markdown_table(lines, left=3) + "\n"
