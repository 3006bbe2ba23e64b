"""The loss and gradient norm of steps that a GPU may still be busy with.

Whoever asks a GPU for a number waits until it has done all that it was told before. So these are read where somebody
looks at the run anyway; those of a CPU at once.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toymha.config import Config
from toymha.timing.speed import WARM_UP


@dataclass(frozen=True)
class Seen:
    """The loss and gradient norm of one step, counted from 1, and its share of the peak learning rates."""

    loss: float
    grad_norm: float
    step: int
    lr_factor: float

    def __str__(self) -> str:
        return f"loss {self.loss}, gradient norm {self.grad_norm} at step {self.step}"

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss + self.grad_norm)


def near(device: torch.device) -> bool:
    """Whether reading a number of the device costs nothing."""
    return device.type == "cpu"


class Unread:
    """The steps since the last that was read, and their clock. `seen`: that last one; None before the first."""

    def __init__(self, state: dict[str, Any], c: Config, device: torch.device) -> None:
        """`state`: of the loop; what is read goes to its `losses`, `seconds` and `step_seconds`. Steps are read one by
        one where minutes bound the run, and at the beginning of a process, where they are slower than all later ones.
        """
        self.state = state
        self.one_by_one = near(device) or c.budget.minutes is not None
        self.first = state["step"] + 1  # of the steps of this process
        self.seen: Seen | None = None
        self.rows: list[Tensor] = []
        self.factors: list[float] = []
        self.steps, self.began = 0, 0.0  # steps that have been read and whose time has not been noted

    def begin(self) -> None:
        """A step begins."""
        if not self.rows:
            self.began = time.perf_counter()

    def add(self, loss: Tensor, grad_norm: Tensor, lr_factor: float) -> None:
        self.rows.append(torch.stack((loss, grad_norm)))
        self.factors.append(lr_factor)

    def is_due(self, step: int, looked_at: bool) -> bool:
        """Whether to read now that this step, counted from 1, has its gradient."""
        return self.one_by_one or looked_at or step < self.first + WARM_UP

    def read(self, step: int) -> Seen | None:
        """Read all, the last of which is this step; the first that is not finite, else None."""
        rows: list[list[float]] = torch.stack(self.rows).tolist() if self.rows else []
        first = step + 1 - len(rows)
        seen = [Seen(loss, norm, first + i, self.factors[i]) for i, (loss, norm) in enumerate(rows)]
        self.rows.clear()
        self.factors.clear()
        self.state["losses"] += [s.loss for s in seen]
        self.steps += len(seen)
        self.seen = seen[-1] if seen else self.seen
        return next((s for s in seen if not s.finite), None)

    def note_time(self) -> None:
        """Of the steps that have been read, to each the same share."""
        if self.steps:
            seconds = time.perf_counter() - self.began
            self.state["step_seconds"] += [seconds / self.steps] * self.steps
            self.state["seconds"] += seconds
            self.steps = 0
