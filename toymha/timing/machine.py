"""The machine that something is timed on: a clock that does not count warming up, what it is, how much fits into it."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from toymha.provenance import git, processor, version
from toymha.runs import cores
from toymha.schema import UserError

SHORTEST = 0.02  # seconds of one timing: shorter work is done several times in a row
MOST_CALLS = 100
PATIENCE = 10.0  # seconds for all timings of one number; there are three at least, however long they take
LEAST = 3


@dataclass(frozen=True)
class Timing:
    """Seconds of one piece of work: median, least and most of `timings`, each the mean of `calls` in a row."""

    median: float
    low: float
    high: float
    timings: int
    calls: int = 1

    def over(self, n: int) -> Timing:
        """Of one of n equal parts."""
        return Timing(self.median / n, self.low / n, self.high / n, self.timings, self.calls)

    @property
    def spread(self) -> float:
        return self.high - self.low


def timed(work: Callable[[], Any], repeats: int, device: torch.device, warm_up: int = 1) -> Timing:
    """Time `work` so many times, after `warm_up` calls that are not counted; fewer times where it takes long."""
    for _ in range(warm_up):
        first = _seconds(work, 1, device)
    calls = max(1, min(MOST_CALLS, math.ceil(SHORTEST / max(first, 1e-9))))
    repeats = max(LEAST, min(repeats, int(PATIENCE / max(first * calls, 1e-9))))
    found = sorted(_seconds(work, calls, device) / calls for _ in range(repeats))
    return Timing(statistics.median(found), found[0], found[-1], repeats, calls)


def _seconds(work: Callable[[], Any], calls: int, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        work()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told; a CPU has when the call returns."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def facts(device: torch.device) -> dict[str, Any]:
    """What a number was measured with."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return {
        "device": str(device),
        "name": name,
        "system": platform.platform(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version()} | {p: version(p) for p in ("toymha", "torch")},
        "git": git(),
    }


def last_cache(device: torch.device) -> int | None:
    """Bytes of the processor's last cache; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    if device.type != "cpu":
        return None
    found = []
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
            size = (index / "size").read_text().strip()
            unit = {"K": 2**10, "M": 2**20, "G": 2**30}[size[-1]]
            found.append((int((index / "level").read_text()), int(size[:-1]) * unit))
    return max(found)[1] if found else None


def room(device: torch.device) -> int | None:
    """Bytes of memory that the device has; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def check_room(device: torch.device, needed: float, what: str, way_out: str) -> None:
    """Raises UserError where `needed` bytes are more than the device has: a CPU's system would kill without a word."""
    there = room(device)
    if there is not None and needed > there:
        here = f"about {needed / 2**30:,.1f} GiB, and {device} has {there / 2**30:,.1f}"
        raise UserError(f"{what} takes {here}; {way_out}")


@contextlib.contextmanager
def memory_told(what: str) -> Iterator[None]:
    """Raises UserError where what is done inside runs out of memory."""
    try:
        yield
    except RuntimeError as e:  # a GPU's own error, and that of the CPU, which has none
        if isinstance(e, torch.OutOfMemoryError) or "allocate memory" in str(e):
            raise UserError(f"{what}: out of memory") from None
        raise
