"""How long plans will take on this machine: each kind of run is tried for a few steps, as many at a time as later.

A trial is the beginning of a real run, in a temporary folder: its steps and looks cost what they cost later.
"""

from __future__ import annotations

import math
import signal
import tempfile
import time
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
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
FIRST = 3  # of them, which are slower than all others
START = 5.0  # seconds until workers have imported torch


@dataclass(frozen=True)
class Pace:
    """Seconds of one training step, of one look, and of what is done once in a run.

    A look is an evaluation with its statistics, the sample and the checkpoint. Once: reading the text, building the
    model, evaluating the whole splits (of the last weights; where others were the best, theirs come on top),
    timing the decoding and studying the heads, where that is asked for.
    """

    step: float
    look: float
    once: float

    def of(self, c: Config, done: int = 0) -> float:
        """Seconds of the whole run, of which `done` steps are over."""
        limits = [] if c.max_steps is None else [c.max_steps]
        limits += [math.ceil(60 * c.budget.minutes / self.step)] if c.budget.minutes and self.step else []
        steps, every = min(limits, default=0), c.budget.eval_every
        looks = math.ceil(steps / every) - done // every + (not done)  # the last step and the untrained model too
        return max(0, steps - done) * self.step + looks * self.look + self.once


@dataclass
class Clock(Console):
    """A Console and a Stop in one, so that it hears all that it wants to time; it stops after STEPS steps."""

    outer: Any  # the Stop that a signal reaches
    began: float = field(default_factory=time.perf_counter)
    started: float = 0.0  # everything is ready
    asked: list[float] = field(default_factory=list)  # before each step, what belongs to the last one being done
    stepped: list[float] = field(default_factory=list)  # after each step, before it is logged and looked at
    quiet = True
    bar = None

    def start(self, *_: Any) -> None:
        self.started = time.perf_counter()

    def step(self, *_: Any) -> None:
        self.stepped.append(time.perf_counter())

    @property
    def signum(self) -> int:
        """`train` asks once before each step."""
        self.asked.append(time.perf_counter())
        return self.outer.signum or (signal.SIGTERM if len(self.stepped) >= STEPS else 0)

    def check(self) -> None:
        from toymha.stop import Interrupted

        if self.outer.signum or len(self.stepped) >= STEPS:
            raise Interrupted(self.outer.signum or signal.SIGTERM)

    def pace(self, looks_at_end: float, decoding: float) -> Pace:
        """`looks_at_end`: how many times a look's tokens are evaluated at the end; `decoding`: seconds of timing it."""
        steps = [b - a for a, b in zip(self.asked, self.stepped)]
        first, last = self.asked[0] - self.started, self.asked[STEPS] - self.stepped[STEPS - 1]
        evaluating = min(first, last)  # the first look draws no sample and saves no checkpoint, but meets a cold cache
        once = self.started - self.began + evaluating * looks_at_end + decoding
        return Pace(median(steps[FIRST:]), last, once)


def predict(plans: list[Plan]) -> list[float]:
    """Seconds for what each plan has still to train. Raises UserError when a trial fails."""
    crews = [crew(plan) for plan in plans]
    kinds = {kind_of(j.point.config): (j.point, threads) for p, (_, threads) in zip(plans, crews) for j in p.todo}
    if not kinds:
        return [0.0] * len(plans)
    paces = _tried(list(kinds.values()), max(n for n, _ in crews))
    return [_duration(plan, n, paces) for plan, (n, _) in zip(plans, crews)]


def _tried(kinds: list[tuple[Point, int]], n: int) -> dict[str, Pace]:
    """Kind -> its pace while n are tried at a time: the first come again at the end, so that no trial runs alone."""
    from toymha.stop import Stop

    found: dict[str, list[Pace]] = {}
    with tempfile.TemporaryDirectory() as folder, Stop() as stop, Pool(n, stop, trial) as pool:
        trials = islice(cycle(kinds), len(kinds) + n - 1)
        tasks = [shortened(point, f"{folder}/{i}", threads) for i, (point, threads) in enumerate(trials)]
        for point, outcome, _ in pool.outcomes(tasks):
            if stop.signum:
                raise KeyboardInterrupt
            if not isinstance(outcome, Pace):
                raise UserError(f"{point.label} cannot be tried: {outcome}")
            found.setdefault(kind_of(point.config), []).append(outcome)
    return {
        kind: Pace(median(p.step for p in paces), median(p.look for p in paces), median(p.once for p in paces))
        for kind, paces in found.items()
    }


def _duration(plan: Plan, n: int, paces: dict[str, Pace]) -> float:
    """Seconds until the last of n workers has nothing left to do."""
    free = [0.0] * n  # when each worker has time for the next run
    for j in plan.todo:
        done = runs.Run(j.path, j.point.config).summary.get("step", 0) if j.state != "new" else 0
        k = free.index(min(free))
        free[k] += paces[kind_of(j.point.config)].of(j.point.config, done)
    return max(free) + START if plan.todo else 0.0


def kind_of(c: Config) -> str:
    """What runs of equal pace have in common: all but seeds, lengths and what is neither size nor shape."""
    sizes = (c.n_layer, c.dim, c.n_head, c.G, c.D, c.Dv, c.F, c.vocab_size)
    switches = (c.mlp, c.norm, c.norm_position, c.pos, c.w_o, c.tied_heads, c.score_scale, c.causal, repr(c.kept_heads))
    pairs = (c.n_encoder_layer, c.crosses, c.budget.eval_pairs, c.budget.beam)
    dropout = (c.attn_dropout > 0, c.resid_dropout > 0)
    work = (c.seq_len, c.batch_size, c.grad_accum, c.optim.name, c.data, c.precision, c.compile)
    b = c.budget
    looks = (b.eval_tokens, b.sample_tokens, b.decode_tokens, b.heads, b.watch)
    return repr((sizes, switches, dropout, work, looks, pairs))


def shortened(p: Point, folder: str, threads: int) -> Point:
    """The point as a trial: its last step but one is looked at. The learning rate is too small for it to diverge."""
    c = p.config
    limits = {"steps": STEPS + 1, "tokens": None, "minutes": None, "eval_every": STEPS, "checkpoint_every": None}
    optim = replace(c.optim, lr=1e-6, muon_lr=c.optim.muon_lr and 1e-6)
    budget = replace(c.budget, **limits)  # type: ignore[arg-type]
    return replace(p, config=replace(c, budget=budget, optim=optim, output_dir=folder, threads=threads))


def trial(point: Point, stop: Any) -> Pace | str:
    """In a worker: the pace of one point, or what went wrong."""
    from toymha.analysis.study import heads_of_run
    from toymha.device import set_up
    from toymha.model.gpt import GPT
    from toymha.stop import Interrupted
    from toymha.timing.speed import decoding_speed
    from toymha.train import check_data, train_point

    c = point.config
    try:
        corpus = check_data(c)  # the first in a process, and it warms what later ones find warm
        clock: Any = Clock(stop)
        train_point(point, clock, clock)
    except (Interrupted, KeyboardInterrupt):
        if stop.signum:
            return "interrupted"
    except UserError as e:
        return str(e)
    if len(clock.asked) <= STEPS:
        return runs.Run(runs.folder(c, point.label), c).summary.get("error", "it did not get far enough")
    began = time.perf_counter()
    device, precision = set_up(c)
    decoding_speed(c, corpus.tokenizer.vocab_size, device, precision)
    if c.budget.heads:
        heads_of_run(GPT(c, corpus.tokenizer.vocab_size).to(device), c, corpus, stop.check)
    sizes = {name: len(split.tokens) for name, split in corpus.splits.items()}
    tokens = sizes["val"] + sizes.get("test", 0)
    looks_at_end = tokens / min(c.budget.eval_tokens, sizes["val"])
    return clock.pace(looks_at_end, time.perf_counter() - began)
