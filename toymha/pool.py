"""Worker processes that keep torch imported: points in, outcomes out, signals passed on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from toymha import runs
from toymha.compose import Point

Task = Callable[[Point, Any], Any]  # of a point and a Stop


def worker(pipe: Connection, task: Task) -> None:
    """Do the task with each point that comes through the pipe, one after the other, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent passes it on as SIGTERM
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from toymha.stop import Stop

    with suppress(EOFError, OSError):
        while True:
            point = pipe.recv()
            with Stop(signal.SIGTERM) as stop:
                outcome = task(point, stop)
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

    def __init__(self, n: int, stop: Any, task: Task) -> None:
        """`task`: what is done with each point; a function of a module, for it travels to another process."""
        self.n, self.stop, self.task = n, stop, task
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
        process = self.context.Process(target=worker, args=(theirs, self.task), daemon=True)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C is the parent's to hear
        process.start()
        signal.signal(signal.SIGINT, before)
        theirs.close()
        return ours, process

    def outcomes(self, todo: list[Point]) -> Iterator[tuple[Point, Any, float]]:
        """(point, what the task gave, or that its process died, seconds) as they end.

        A signal stops those under way, which are told of too.
        """
        queue = list(todo)
        while self.n == 1 and queue and not self.stop.signum:
            point, began = queue.pop(0), time.perf_counter()
            yield point, self.task(point, self.stop), time.perf_counter() - began
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
