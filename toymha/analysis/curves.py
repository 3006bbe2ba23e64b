"""What a model loses as its heads go one by one: chosen by a measure on one split, seen on another.

N heads of a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from toymha.analysis.capture import heads_of
from toymha.analysis.importance import GATE_STEPS, order_of
from toymha.analysis.importance import importance as measure
from toymha.analysis.losses import counts, losses, sequences
from toymha.analysis.results import Curve, Head, Importance, Pruning
from toymha.data.corpus import Split
from toymha.model.gpt import GPT
from toymha.seeds import stream


def curves(
    model: GPT,
    choose_split: Split,
    seq_len: int,
    report_split: Split,
    importance: Importance,
    *,
    max_tokens: int | None,
    tolerance: float = 0.01,
    random_orders: int = 5,
    rounds: int = 1,
    gate_steps: int = GATE_STEPS,
    seed: int = 0,
    split_name: str = "test",
) -> Pruning:
    """Loss on the report split after 0, 1, ... N removals, by each measure in `importance` and at random.

    `importance` was measured on the choose split, on as many tokens. With several rounds each measure is taken anew
    after every ceil(N / rounds) removals, on the heads that are left. Random orders have a curve together: the mean,
    least and most over `random_orders` of them. At 4,096 tokens, scores and curves of 32 heads (4 layers, dim 128) take
    45 seconds of one core. Raises ValueError for less than one round.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} must be at least 1")

    def again(name: str, removed: Sequence[Head]) -> Importance:
        size: dict[str, Any] = {"max_tokens": max_tokens, "gate_steps": gate_steps, "seed": seed}
        return measure(model, choose_split, seq_len, measures=[name], removed=removed, **size)

    orders = {name: [greedy(importance, name, rounds, again)] for name in importance.measures}
    orders |= {"random": [_shuffled(model, seed, i) for i in range(random_orders)]} if random_orders else {}
    data = sequences(report_split, seq_len, max_tokens, next(model.parameters()).device)
    tokens = int(counts(data).sum())
    sets = list(dict.fromkeys(gone for some in orders.values() for order in some for gone in removals(order)))
    loss_of = dict(zip(sets, (losses(model, data, sets).sum(1) / tokens).tolist()))
    lines = {name: [[loss_of[gone] for gone in removals(order)] for order in some] for name, some in orders.items()}
    found = {name: Curve(lines[name][0], order=orders[name][0]) for name in importance.measures}
    if random_orders:
        by_step = list(zip(*lines["random"]))
        found["random"] = Curve(
            [math.fsum(s) / len(s) for s in by_step], [min(s) for s in by_step], [max(s) for s in by_step]
        )
    shares = {name: removable(curve.loss, tolerance) for name, curve in found.items()}
    return Pruning(found, shares, tolerance, split_name, tokens)


def greedy(first: Importance, name: str, rounds: int, again: Callable[[str, Sequence[Head]], Importance]) -> list[Head]:
    """The order in which heads go, the least important first; `again(name, removed)` measures what is left."""
    order: list[Head] = []
    scores, total = first, len(first.measures[name])
    while True:
        left = [head for head in order_of(scores, name) if head not in order]
        order += left[: math.ceil(total / rounds)]
        if len(order) == total:
            return order
        scores = again(name, order)


def removals(order: Sequence[Head]) -> Iterator[frozenset[Head]]:
    """The sets of heads that are gone after 0, 1, ... N steps."""
    return (frozenset(order[:k]) for k in range(len(order) + 1))


def _shuffled(model: GPT, seed: int, i: int) -> list[Head]:
    heads = heads_of(model)
    return [heads[j] for j in torch.randperm(len(heads), generator=stream(seed, "random order", i)).tolist()]


def removable(loss: Sequence[float], tolerance: float) -> float:
    """The largest share k / N such that perplexity rises by less than `tolerance` after k removals and after fewer.

    `loss`: after 0 to N removals, nats a token; 0 for a model without heads.
    """
    fits = [
        math.exp(min(later - loss[0], 700)) < 1 + tolerance for later in loss[1:]
    ]  # e^700 is near the largest double
    k = fits.index(False) if False in fits else len(fits)
    return k / max(1, len(fits))
