"""Many runs: what is to be done, doing it in parallel, saying how it went."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from toymha import cost, runs, tuning
from toymha.compose import Experiment, Point
from toymha.config import REPLICATES, Config, plain
from toymha.console import Console, again, duration, quote
from toymha.data import text
from toymha.metrics import Result
from toymha.page import write_report
from toymha.pool import Pool
from toymha.report import Report
from toymha.schema import UserError
from toymha.statement import Sweep

GPU_RUNS = 4  # at a time, for they share one GPU


@dataclass(frozen=True)
class Job:
    """A point, where it goes, how far it is, and how many parameters it has."""

    point: Point
    path: Path
    state: str
    parameters: int

    @property
    def title(self) -> str:
        return f"{self.point.label}/seed={self.point.config.seed}"


@dataclass(frozen=True)
class Plan:
    """All jobs of a sweep, in the order they were asked for."""

    jobs: list[Job]

    @property
    def todo(self) -> list[Job]:
        return [j for j in self.jobs if j.state not in runs.FINISHED]

    @property
    def folder(self) -> Path:
        """The folder that holds all of them."""
        return self.jobs[0].path.parent.parent

    def text(self) -> str:
        """One line a setting: its name, parameters, and how many of its seeds are where."""
        by_label: dict[str, list[Job]] = {}
        for j in self.jobs:
            by_label.setdefault(j.point.label, []).append(j)
        width = max(map(len, by_label))
        skip = len(self.jobs) - len(self.todo)
        lines = [f"{len(self.jobs)} runs in {self.folder}: {len(self.todo)} to train, {skip} finished already"]
        for label, jobs in by_label.items():
            states = [j.state for j in jobs]
            seeds = ",".join(str(j.point.config.seed) for j in jobs)
            found = ", ".join(f"{states.count(s)} {s}" for s in ("new", *runs.STATUSES) if s in states)
            lines.append(f"  {label.ljust(width)}  {jobs[0].parameters:>11,} parameters  seed={seeds}  {found}")
        return "\n".join(lines) + "\n"


def make_plan(points: list[Point]) -> Plan:
    """Look at the data and at each run folder. Raises UserError for missing data or a folder that holds another run."""
    read: dict[str, tuple[str, int]] = {}
    jobs = []
    for p in points:
        data = p.config.data
        if repr(data) not in read:
            read[repr(data)] = (text.fingerprint(data), text.vocab_size(data))
        sha256, vocab_size = read[repr(data)]
        path = runs.folder(p.config, p.label)
        parameters = sum(cost.parameters(p.config, vocab_size).values())
        jobs.append(Job(p, path, runs.state_of(path, p.config, sha256), parameters))
    return Plan(jobs)


def run_sweep(experiment: Experiment) -> int:
    """Train what is not finished. The exit status: 0 all done, 1 some failed or diverged, 128 + signal when stopped."""
    tuned: list[dict[str, Any]] = []
    if said := tuning.given(experiment):
        print(said, flush=True)
    if tuning.axes(experiment):
        trials = tuning.trials(experiment)
        if stopped := train_plan(make_plan(tuning.runs_of(trials))):
            return _interrupted(experiment.points[0].config, stopped)
        experiment, tuned = tuning.choose(experiment, trials)
    plan = make_plan(experiment.points)
    about = about_of(plan, experiment.sweep, tuned)
    return finish(plan, about, train_plan(plan, about))


def plans(experiment: Experiment) -> list[Plan]:
    """What `run_sweep` would train: the trials of what is tuned, and, once they are done, the runs of the verdict."""
    if not tuning.axes(experiment):
        return [make_plan(experiment.points)]
    trials = tuning.trials(experiment)
    return [make_plan(tuning.runs_of(trials)), make_plan(tuning.choose(experiment, trials)[0].points)]


def about_of(plan: Plan, sweep: Sweep | None, tuned: list[dict[str, Any]]) -> dict[str, Any]:
    """What sweep.json says: the swept keys, their values in order, the runs, the statement, what was tuned.

    Its paths are written with slashes, so that the folder can be read on another system.
    """
    return {
        "axes": [a for a in plan.jobs[0].point.swept if a not in (*REPLICATES, "sweep")],
        "order": [j.point.swept for j in plan.jobs],
        "runs": [j.path.relative_to(plan.folder).as_posix() for j in plan.jobs],
        "sweep": plain(sweep) if sweep else None,
        "tuned": tuned,
        "warnings": tuning.warnings_of(tuned),
    }


def crew(plan: Plan) -> tuple[int, int]:
    """(runs at a time, CPU threads of each). Raises UserError for a device or precision that is not here."""
    c = plan.jobs[0].point.config
    workers = c.workers or runs.cores()
    if plan.todo:
        from toymha.device import pick_device, pick_precision

        device = pick_device(c.device)
        for j in plan.todo:
            pick_precision(j.point.config.precision, device)
        workers = c.workers or (runs.cores() if device.type == "cpu" else min(GPU_RUNS, runs.cores()))
    return min(workers, max(1, len(plan.todo))), c.threads or max(1, runs.cores() // workers)


def train_plan(plan: Plan, about: dict[str, Any] | None = None) -> int:
    """Say what is to be done and do it. Returns the signal that stopped it, or 0.

    `about`: what sweep.json shall say, from before the first run, so that `report` knows what was asked for. Raises
    UserError, and leaves nothing behind, for a device, a precision or a text that cannot be used.
    """
    n, threads = crew(plan)
    if plan.todo:
        check_texts(plan)
    if about is not None:
        plan.folder.mkdir(parents=True, exist_ok=True)
        runs.write_json(plan.folder / "sweep.json", about)
    print(plan.text(), flush=True)
    if not plan.todo:
        return 0
    print(f"{n} at a time, {threads} thread{'s' * (threads > 1)} each", flush=True)
    return _train_all([replace(j.point, config=replace(j.point.config, threads=threads)) for j in plan.todo], n)


def check_texts(plan: Plan) -> None:
    """Load every text of the plan once, which also fills the cache that the workers read. Raises UserError."""
    from toymha.train import check_data

    configs = [j.point.config for j in plan.todo]
    for c in {(repr(c.data), c.seq_len, c.vocab_size): c for c in configs}.values():
        check_data(c)


def _train_all(todo: list[Point], n: int) -> int:
    """Run them all, a line for each that ends. Returns the signal that stopped the sweep, or 0."""
    from toymha.stop import Stop

    bar = tqdm(total=len(todo), unit="run", leave=False, dynamic_ncols=True, disable=not sys.stderr.isatty())
    with Stop() as stop, Pool(n, stop, train_quietly) as pool, bar:
        for k, (point, outcome, seconds) in enumerate(pool.outcomes(todo), 1):
            count = f"[{k:>{len(str(len(todo)))}}/{len(todo)}]"
            tqdm.write(f"{count} {point.label}/seed={point.config.seed}  {outcome}  {duration(seconds)}")
            bar.update()
        return stop.signum


def outcome_of(point: Point) -> str:
    s = runs.Run(runs.folder(point.config, point.label), point.config).summary
    if s.get("status") == "done":
        return f"validation loss {s['val']['loss']:.4f}  perplexity {s['val']['ppl']:.3f}"
    return f"{s.get('status', 'not started')} {s.get('error', '')}".rstrip()


def train_quietly(point: Point, stop: Any) -> str:
    """One run of a sweep, in whichever process: what came of it, in one line. Its own log has the traceback."""
    from toymha.stop import Interrupted
    from toymha.train import train_point

    try:
        train_point(point, Console(quiet=True), stop)
    except (Interrupted, KeyboardInterrupt):
        return "interrupted"
    except UserError as e:
        return f"failed: {e}"
    except BaseException as e:  # also SystemExit: one run must not end the others
        return f"failed: {type(e).__name__}: {e}".splitlines()[0]
    return outcome_of(point)


# The end


def finish(plan: Plan, about: dict[str, Any], stopped: int) -> int:
    """The table and the verdict, the files beside the runs, what to type next."""
    found = [
        runs.Run(j.path, j.point.config, runs.read_json(j.path / "run.json"))
        for j in plan.jobs
        if (j.path / "run.json").is_file()
    ]
    if found:
        report = Report.of(plan.folder, [Result.of(r) for r in found], about)
        print("\n" + report.text())
        print(f"report  {quote(write_report(report)[0])}")
    bad = [j for j in plan.jobs if runs.Run(j.path, j.point.config).status != "done"]
    for job in bad:
        summary = runs.Run(job.path, job.point.config).summary
        log = f"; see {job.path / 'log.txt'}" if (job.path / "log.txt").is_file() else ""
        print(f"{summary.get('status', 'not started')}: {job.title} {summary.get('error', '')}{log}")
    c = plan.jobs[0].point.config
    print(f"curves  tensorboard --logdir {quote(c.output_dir)}")
    print(f"again   toymha report run={quote(plan.folder)}")
    return _interrupted(c, stopped) if stopped else 1 if bad else 0


def _interrupted(c: Config, stopped: int) -> int:
    print(f"toymha: interrupted; {again(c)}", file=sys.stderr)
    return 128 + stopped
