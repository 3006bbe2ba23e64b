"""CPU threads that compute parts of a batch side by side.

Left alone, torch spreads each product of a pass over all threads and waits for the slowest of them, some hundred times
a step. Where models are small that waiting costs more than it gains, and where other programs use the machine too it
is nearly all that happens. Parts of a batch, one a thread, wait for each other once a step.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import nn

A = TypeVar("A")
R = TypeVar("R")

LARGEST = 8_000_000  # parameters: of larger models one product is work enough for all threads
MOST = 8  # members: what Python does between products they do one after the other


def members(device: torch.device, parameters: int, rows: int | None = None) -> int:
    """How many share a batch of so many rows (None: of more than there are members), each with an equal number of the
    threads that torch may use; 1 where that is faster."""
    threads = torch.get_num_threads()
    n = threads // -(-threads // MOST)
    return 1 if device.type != "cpu" or parameters > LARGEST or (rows is not None and rows < n) else n


class Team:
    """n members; with one, everything happens in the thread that calls. A context manager."""

    def __init__(self, n: int = 1) -> None:
        self.n, self.threads = n, torch.get_num_threads()
        self.pool: ThreadPoolExecutor | None = None
        if n > 1:
            here = threading.Barrier(n, timeout=60)  # a thread that cannot be started is an error, not a wait
            self.pool = ThreadPoolExecutor(n, "toymha")
            list(self.pool.map(_begin, [(max(1, self.threads // n), here)] * n))
            torch.set_num_threads(self.threads)  # what a thread sets is also what threads begin with that come later

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: Any) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def map(self, work: Callable[[A], R], items: Iterable[A]) -> Iterator[R]:
        """The results in the order of the items, of which few more than n are taken ahead. What a member raises is
        raised here, when it is its turn. Gradients, inference mode and autocast are on or off as in the thread that
        calls."""
        if self.pool is None:
            yield from map(work, items)
            return
        modes = _modes()
        going: deque[Future[R]] = deque()
        try:
            for item in items:
                going.append(self.pool.submit(_in_modes, modes, work, item))
                if len(going) > self.n:
                    yield going.popleft().result()
            while going:
                yield going.popleft().result()
        finally:  # nobody asks for the rest
            for future in going:
                future.cancel()

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Inside, where the members have nothing to do, small work of the calling thread takes one CPU thread: it costs
        more to spread it than that gains. Not so in a team of one: its model may be large."""
        if self.pool is None:
            yield
            return
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(self.threads)


ALONE = Team()


def readers_of(model: nn.Module, device: torch.device) -> Team:
    """Those who evaluate a model."""
    return Team(members(device, sum(p.numel() for p in model.parameters())))


def _begin(how: tuple[int, threading.Barrier]) -> None:
    """In each member, once."""
    threads, here = how
    torch.get_num_threads()  # a thread that has never been asked begins with the number that others set meanwhile
    torch.set_num_threads(threads)
    here.wait()  # so that no member begins twice


def _modes() -> tuple[bool, bool, bool, torch.dtype]:
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def _in_modes(modes: tuple[bool, bool, bool, torch.dtype], work: Callable[[A], R], item: A) -> R:
    gradients, inference, autocast, dtype = modes
    with (
        torch.inference_mode(inference),
        torch.set_grad_enabled(gradients),
        torch.autocast("cpu", dtype, enabled=autocast),
    ):
        return work(item)
