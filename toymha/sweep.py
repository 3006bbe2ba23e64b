"""Many runs: what is to be done, doing it in parallel, saying how it went."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

from toymha import cost, runs
from toymha.compose import Point
from toymha.config import Data
from toymha.console import Console, again, duration, quote
from toymha.data import text
from toymha.report import Table
from toymha.schema import UserError


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
    read: dict[tuple, tuple[str, int]] = {}

    def known(d: Data) -> tuple[str, int]:
        which = (d.name, d.path, d.tokenizer, d.vocab_size)
        if which not in read:
            whole = text.read_text(d)
            read[which] = (
                text.sha256(whole),
                {"byte": 256, "bpe": d.vocab_size or 0}.get(d.tokenizer) or len(set(whole)),
            )
        return read[which]

    jobs = []
    for p in points:
        sha256, vocab_size = known(p.config.data)
        path = runs.folder(p.config, p.label)
        parameters = sum(cost.parameters(p.config, vocab_size).values())
        jobs.append(Job(p, path, runs.state_of(path, p.config, sha256), parameters))
    return Plan(jobs)


def run_sweep(points: list[Point]) -> int:
    """Train what is not finished. The exit status: 0 all done, 1 some failed or diverged, 128 + signal when stopped."""
    plan, c = make_plan(points), points[0].config
    workers = c.workers or runs.cores()
    if plan.todo:
        from toymha.device import pick_device, pick_precision

        device = pick_device(c.device)
        for p in plan.todo:
            pick_precision(p.point.config.precision, device)
        workers = c.workers or (runs.cores() if device.type == "cpu" else min(4, runs.cores()))  # one GPU for all
    print(plan.text(), flush=True)
    n = min(workers, max(1, len(plan.todo)))
    threads = c.threads or max(1, runs.cores() // workers)
    todo = [replace(j.point, config=replace(j.point.config, threads=threads)) for j in plan.todo]
    stopped = 0
    if todo:
        print(f"{n} at a time, {threads} thread{'s' * (threads > 1)} each", flush=True)
        stopped = _train_all(todo, n)
    return finish(plan, stopped)


def _train_all(todo: list[Point], n: int) -> int:
    """Run them all, a line for each that ends. Returns the signal that stopped the sweep, or 0."""
    from toymha.train import Stop, check_data

    bar = tqdm(total=len(todo), unit="run", leave=False, dynamic_ncols=True, disable=not sys.stderr.isatty())
    with Stop() as stop, Pool(n, stop) as pool, bar:
        for c in {(repr(p.config.data), p.config.seq_len, p.config.vocab_size): p.config for p in todo}.values():
            check_data(c)  # before the first run starts; it also fills the cache that the workers read
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
    from toymha.train import Interrupted, train_point

    try:
        train_point(point, Console(quiet=True), stop)
    except (Interrupted, KeyboardInterrupt):
        return "interrupted"
    except UserError as e:
        return f"failed: {e}"
    except BaseException as e:  # also SystemExit: one run must not end the others
        return f"failed: {type(e).__name__}: {e}".splitlines()[0]
    return outcome_of(point)


# Worker processes


def worker(pipe: Connection) -> None:
    """Train what comes through the pipe, one after the other, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent passes it on as SIGTERM
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from toymha.train import Stop

    with suppress(EOFError, OSError):
        while True:
            point = pipe.recv()
            with Stop(signal.SIGTERM) as stop:
                outcome = train_quietly(point, stop)
            pipe.send((outcome, not stop.signum))
            if stop.signum:
                return


def _end_with_parent() -> None:
    """A worker whose parent was killed stops at its next step, as by SIGTERM, so that its folder is free."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


class Pool:
    """n processes that keep torch imported; n = 1 is this process. One that dies is replaced, and only its run is lost.

    Not joblib's loky: there a worker that dies takes all waiting runs with it, and a signal cannot be passed on.
    """

    def __init__(self, n: int, stop: Any) -> None:
        self.n, self.stop = n, stop
        self.context = multiprocessing.get_context("spawn")
        self.idle: list[tuple[Connection, Any]] = []
        self.busy: dict[Connection, tuple[Any, Point, float]] = {}

    def __enter__(self) -> Pool:
        if self.n > 1:
            self.idle = [self._start() for _ in range(self.n)]
        return self

    def __exit__(self, *_: Any) -> None:
        self._terminate()  # those that are still busy, when this ends by an error
        for pipe, _ in self.idle:
            pipe.close()
        processes = [p for _, p in self.idle] + [p for p, _, _ in self.busy.values()]
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()

    def _start(self) -> tuple[Connection, Any]:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=worker, args=(theirs,), daemon=True)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is the parent's to hear
        process.start()
        signal.signal(signal.SIGINT, before)
        theirs.close()
        return ours, process

    def outcomes(self, todo: list[Point]) -> Iterator[tuple[Point, str, float]]:
        """(point, what came of it, seconds) as they end. A signal stops those under way, which are told of too."""
        queue = list(todo)
        while self.n == 1 and queue and not self.stop.signum:
            point, began = queue.pop(0), time.perf_counter()
            yield point, train_quietly(point, self.stop), time.perf_counter() - began
        told = False
        while self.n > 1 and (self.busy or (queue and not self.stop.signum)):
            while self.idle and queue and not self.stop.signum:
                pipe, process = self.idle.pop()
                point = queue.pop(0)
                with suppress(OSError):  # a worker that died idle is noticed below, like one that died busy
                    pipe.send(point)
                self.busy[pipe] = (process, point, time.perf_counter())
            if self.stop.signum and not told:
                told = True
                self._terminate()
            ready = wait(list(self.busy), timeout=0.2)
            for pipe in [p for p in self.busy if p in ready]:
                process, point, began = self.busy.pop(pipe)
                goes_on = False
                try:
                    outcome, goes_on = pipe.recv()
                except (EOFError, OSError):
                    process.join()
                    outcome = self._died(point, process.exitcode)
                if goes_on:
                    self.idle.append((pipe, process))
                elif queue and not self.stop.signum:
                    self.idle.append(self._start())
                yield point, outcome, time.perf_counter() - began

    def _terminate(self) -> None:
        for process, _, _ in self.busy.values():
            process.terminate()

    def _died(self, point: Point, exitcode: int) -> str:
        how = f"signal {-exitcode}" if exitcode < 0 else f"exit status {exitcode}"
        error = f"its process died ({how}{', perhaps out of memory' if exitcode == -9 else ''})"
        run = runs.Run(runs.folder(point.config, point.label), point.config)
        if (run.path / "run.json").is_file() and run.status == "running":
            stopped = {"status": "interrupted"} if self.stop.signum else {"status": "failed", "error": error}
            run.update(**stopped)
        return "interrupted" if self.stop.signum else f"failed: {error}"


# The end


def finish(plan: Plan, stopped: int) -> int:
    """The table, the files beside the runs, what to type next."""
    found = [
        runs.Run(j.path, j.point.config, runs.read_json(j.path / "run.json"))
        for j in plan.jobs
        if (j.path / "run.json").is_file()
    ]
    axes = [a for a in plan.jobs[0].point.swept if a not in ("seed", "sweep")]
    if found:
        table = Table.of(found, axes, [j.point.swept for j in plan.jobs])
        print("\n" + table.text())
        table.write(plan.folder)
        made = [str(j.path.relative_to(plan.folder)) for j in plan.jobs]
        order = [j.point.swept for j in plan.jobs]
        runs.write_json(plan.folder / "sweep.json", {"axes": axes, "order": order, "runs": made})
    bad = [j for j in plan.jobs if runs.Run(j.path, j.point.config).status != "done"]
    for job in bad:
        summary = runs.Run(job.path, job.point.config).summary
        log = f"; see {job.path / 'log.txt'}" if (job.path / "log.txt").is_file() else ""
        print(f"{summary.get('status', 'not started')}: {job.title} {summary.get('error', '')}{log}")
    print(f"curves  tensorboard --logdir {quote(plan.jobs[0].point.config.output_dir)}")
    print(f"again   toymha report run={quote(plan.folder)}")
    if stopped:
        print(f"toymha: interrupted; {again(plan.jobs[0].point.config)}", file=sys.stderr)
        return 128 + stopped
    return 1 if bad else 0
