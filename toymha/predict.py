"""How long plans will take on this machine: each kind of run is tried for a few steps, as many at a time as later.

A trial is the beginning of a real run, in a temporary folder: its steps and evaluations cost what they cost later.
"""

from __future__ import annotations

import math
import signal
import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

from toymha import runs
from toymha.compose import Point
from toymha.config import Config
from toymha.console import Console
from toymha.pool import Pool
from toymha.schema import UserError
from toymha.sweep import Plan, crew

STEPS = 8  # of a trial
START = 5.0  # seconds until workers have imported torch


@dataclass(frozen=True)
class Pace:
    """Seconds of one training step, of one look (evaluation, checkpoint), and of the evaluations at the end."""

    step: float
    look: float
    end: float

    def of(self, c: Config, done: int = 0) -> float:
        """Seconds of the whole run, of which `done` steps are over."""
        if c.max_steps is None:
            return 60 * (c.budget.minutes or 0.0) + self.end + 5 * self.look
        left = c.max_steps - done
        return left * self.step + math.ceil(left / c.budget.eval_every + 1) * self.look + self.end


class Enough:
    """A Stop that arrives after some steps: `train` asks for its `signum` before each."""

    def __init__(self, stop: Any, steps: int) -> None:
        self.stop, self.left = stop, steps + 1

    @property
    def signum(self) -> int:
        self.left -= 1
        return self.stop.signum or (signal.SIGTERM if self.left < 0 else 0)

    def check(self) -> None:
        from toymha.train import Interrupted

        if self.stop.signum or self.left < 0:
            raise Interrupted(self.stop.signum or signal.SIGTERM)


def predict(plans: list[Plan]) -> list[float]:
    """Seconds for what each plan has still to train. Raises UserError when a trial fails."""
    from toymha.train import Stop

    crews = [crew(plan) for plan in plans]
    kinds = {kind_of(j.point.config): (j.point, threads) for p, (_, threads) in zip(plans, crews) for j in p.todo}
    n = min(max(n for n, _ in crews), len(kinds))
    paces: dict[str, Pace] = {}
    with tempfile.TemporaryDirectory() as folder, Stop() as stop, Pool(n, stop, trial) as pool:
        for point, outcome, _ in pool.outcomes([shortened(p, folder, threads) for p, threads in kinds.values()]):
            if not isinstance(outcome, Pace):
                raise UserError(f"{point.label} cannot be tried: {outcome}")
            paces[kind_of(point.config)] = outcome
    return [_duration(plan, n, paces) for plan, (n, _) in zip(plans, crews)]


def _duration(plan: Plan, n: int, paces: dict[str, Pace]) -> float:
    """Seconds until the last of n workers has nothing left to do."""
    free = [0.0] * n  # when each worker has time for the next run
    for j in plan.todo:
        done = runs.Run(j.path, j.point.config).summary.get("step", 0) if j.state != "new" else 0
        k = free.index(min(free))
        free[k] += paces[kind_of(j.point.config)].of(j.point.config, done)
    return max(free) + START if plan.todo else 0.0


def kind_of(c: Config) -> str:
    """What runs of equal pace have in common: all but seeds and what is neither size nor shape."""
    model = (c.n_layer, c.dim, c.n_head, c.G, c.D, c.Dv, c.F, c.mlp, c.norm, c.pos, c.w_o, c.tied_heads)
    return repr((model, c.seq_len, c.batch_size, c.grad_accum, c.optim.name, c.data, c.budget.eval_tokens))


def shortened(p: Point, folder: str, threads: int) -> Point:
    """The point as a trial: every step is logged, and the last of them is looked at."""
    budget = replace(p.config.budget, eval_every=STEPS, log_every=1, sample_tokens=0)
    c = replace(p.config, budget=budget, output_dir=folder, threads=threads, overwrite=True)
    return replace(p, config=c)


def trial(point: Point, stop: Any) -> Pace | str:
    """In a worker: the pace of one point, or what went wrong."""
    from toymha.train import Interrupted, check_data, train_point

    c = point.config
    run = runs.Run(runs.folder(c, point.label), c)
    enough: Any = Enough(stop, STEPS)
    try:
        train_point(point, Console(quiet=True), enough)
    except (Interrupted, KeyboardInterrupt):
        if stop.signum:
            return "interrupted"
    except UserError as e:
        return str(e)
    sizes = {name: len(split.tokens) for name, split in check_data(c).splits.items()}
    tokens = sizes["val"] + sizes.get("test", 0)
    return pace_of(run.rows(), run.summary, tokens / min(c.budget.eval_tokens, sizes["val"]))


def pace_of(rows: list[dict[str, Any]], summary: dict[str, Any], looks_at_end: float) -> Pace | str:
    """From the times of the logged rows, one a step and one for the look after the last of them.

    `looks_at_end`: how many times a look's tokens are evaluated at the end of a run.
    """
    times = [r["time"] for r in rows if "loss/train" in r]
    looks = [r["time"] for r in rows if "loss/val" in r]
    if len(times) < 3 or len(looks) < 2:
        return summary.get("error", "it did not get far enough")
    look = looks[-1] - times[-1]
    return Pace(median(b - a for a, b in pairwise(times)), look, look * looks_at_end)
