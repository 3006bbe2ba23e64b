"""How long a plan will take on this machine: each kind of run is tried for a few steps, as many at a time as later.

A trial is a real run in a temporary folder, so it costs what a run costs: the steps, one evaluation with all that goes
with it, the end. What is measured there is multiplied by what the plan has of it.
"""

from __future__ import annotations

import math
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


@dataclass(frozen=True)
class Pace:
    """Seconds of one training step, one look (evaluation, sample, checkpoint), and of beginning and end together."""

    step: float
    look: float
    ends: float

    def of(self, c: Config, done: int = 0) -> float:
        """Seconds of the whole run, of which `done` steps are over."""
        if c.max_steps is None:
            return 60 * (c.budget.minutes or 0.0) + self.ends + 5 * self.look
        left = c.max_steps - done
        return left * self.step + math.ceil(left / c.budget.eval_every) * self.look + self.ends


def predict(plan: Plan) -> float:
    """Seconds for what the plan has still to train. Raises UserError when a trial fails."""
    if not plan.todo:
        return 0.0
    from toymha.train import Stop

    n, threads = crew(plan)
    kinds = {kind_of(j.point.config): j.point for j in plan.todo}
    paces: dict[str, Pace] = {}
    with tempfile.TemporaryDirectory() as folder, Stop() as stop, Pool(min(n, len(kinds)), stop, trial) as pool:
        todo = [shortened(p, folder, threads) for p in kinds.values()]
        for point, outcome, _ in pool.outcomes(todo):
            if not isinstance(outcome, Pace):
                raise UserError(f"{point.label} cannot be tried: {outcome}")
            paces[kind_of(point.config)] = outcome
    free = [0.0] * n  # when each worker has time for the next run
    for j in plan.todo:
        done = runs.Run(j.path, j.point.config).summary.get("step", 0) if j.state != "new" else 0
        k = free.index(min(free))
        free[k] += paces[kind_of(j.point.config)].of(j.point.config, done)
    return max(free) + 4.0  # of starting the workers


def kind_of(c: Config) -> str:
    """What runs of equal pace have in common: all but seeds and what is neither size nor shape."""
    budget = (c.budget.eval_tokens, c.budget.sample_tokens, c.budget.decode_tokens)
    model = (c.n_layer, c.dim, c.n_head, c.G, c.D, c.Dv, c.F, c.mlp, c.norm, c.pos, c.w_o, c.tied_heads)
    return repr((model, c.seq_len, c.batch_size, c.grad_accum, c.optim.name, c.data, budget))


def shortened(p: Point, folder: str, threads: int) -> Point:
    """The point as a trial. A run in minutes or with fewer steps is tried for as many steps."""
    short = replace(p.config.budget, steps=STEPS, tokens=None, minutes=None, eval_every=STEPS, log_every=1)
    sweep_name = runs.name_of(p.config)
    c = replace(p.config, budget=short, output_dir=folder, threads=threads, overwrite=True, name=sweep_name)
    return replace(p, config=c)


def trial(point: Point, stop: Any) -> Pace | str:
    """In a worker: the pace of one point, or what went wrong."""
    from toymha.train import Interrupted, train_point

    try:
        run = train_point(point, Console(quiet=True), stop)
    except (Interrupted, KeyboardInterrupt):
        return "interrupted"
    except UserError as e:
        return str(e)
    return pace_of(run.rows(), run.summary)


def pace_of(rows: list[dict[str, Any]], summary: dict[str, Any]) -> Pace | str:
    """From the times of the logged rows: one for the first look, one a step, one for the last look, one for the end."""
    if summary.get("status") != "done":
        return summary.get("error", "it did not finish")
    times = [r["time"] for r in rows if "loss/train" in r]
    last_look = next(r["time"] for r in reversed(rows) if "loss/val" in r)
    step = median(b - a for a, b in pairwise(times))
    return Pace(step, last_look - times[-1], rows[-1]["time"] - last_look + (times[0] - rows[0]["time"]))
