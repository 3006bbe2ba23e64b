"""Fair comparisons: settings that get the same number of parameters or the same compute as a reference. No torch.

Parameters are made equal by the width of the MLP, which no statement here is about; compute by the number of steps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from toymha import cost
from toymha.compose import Experiment, Point, distinct
from toymha.config import REPLICATES, Config
from toymha.data import text
from toymha.schema import UserError
from toymha.statement import Sweep


def equalise(experiment: Experiment) -> Experiment:
    """The experiment as its sweep wants it compared. Raises UserError where no size makes a setting equal."""
    sweep = experiment.sweep
    if sweep is None or sweep.compare not in SOLVERS:
        return experiment
    solve, points = SOLVERS[sweep.compare], []
    texts = {repr(p.config.data): p.config.data for p in experiment.points}
    vocab_size = {name: text.vocab_size(data) for name, data in texts.items()}  # each text is read once
    for p in experiment.points:
        for k in SOLVED[sweep.compare]:
            if p.values.get(k) is not None:
                raise UserError(f"compare={sweep.compare} finds {k} itself, so {k}={p.values[k]} cannot be given")
        reference = experiment.vary(p, reference_of(sweep, experiment.points)).config
        solved = solve(p, reference, vocab_size[repr(p.config.data)])
        points.append(experiment.vary(p, solved) if solved else p)
    return dataclasses.replace(experiment, points=distinct(points))


def reference_of(sweep: Sweep, points: list[Point]) -> dict[str, Any]:
    """The keys that are laid over a setting to get the one that it shall be equal to."""
    if sweep.reference is not None:
        return sweep.reference
    return {k: v for k, v in points[0].swept.items() if k not in (*sweep.slices, *REPLICATES)}


def equal_parameters(p: Point, reference: Config, vocab_size: int) -> dict[str, Any]:
    """d_ff such that the parameters are those of the reference, as nearly as whole numbers can."""

    def count(c: Config) -> int:
        return sum(cost.parameters(c, vocab_size).values())

    c = p.config
    per_unit = count(dataclasses.replace(c, d_ff=c.F + 1)) - count(c)
    d_ff = c.F + round((count(reference) - count(c)) / per_unit)
    if d_ff < 1:
        raise UserError(f"{p.label}: no width of the MLP gives it the {count(reference):,} parameters of the reference")
    return {} if d_ff == c.F else {"d_ff": d_ff}


def equal_flops(p: Point, reference: Config, vocab_size: int) -> dict[str, Any]:
    """Steps such that training takes the FLOPs of the reference."""

    def per_step(c: Config) -> float:
        return cost.training_flops_per_token(c, vocab_size) * c.tokens_per_step

    c = p.config
    if c.n_encoder_layer is not None or reference.n_encoder_layer is not None:
        raise UserError("compare=flops: a batch of pairs has no fixed number of FLOPs; compare=parameters or steps")
    if reference.max_steps is None:
        raise UserError("compare=flops needs a budget in steps or tokens")
    least = min(1, reference.max_steps)  # 0 steps are an evaluation of untrained models
    steps = max(least, round(reference.max_steps * per_step(reference) / per_step(c)))
    return {} if steps == c.max_steps else {"budget.steps": steps, "budget.tokens": None}


SOLVERS = {"parameters": equal_parameters, "flops": equal_flops}
SOLVED = {"parameters": ("d_ff",), "flops": ("budget.steps", "budget.tokens")}  # the keys that they set
