"""How much a model needs each of its heads: four measures on the same sequences.

W sequences, T positions, N heads of a model, H heads that a layer has, D width of a value, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from toymha.analysis.capture import gated, heads_of, listening
from toymha.analysis.losses import BATCH_TOKENS, Batch, counts, held, losses, over_sequences, sequences
from toymha.analysis.results import Head, Importance, Mean
from toymha.data.corpus import Split
from toymha.evaluate import evaluating
from toymha.model.gpt import GPT
from toymha.schema import UserError, nearest
from toymha.seeds import stream

BETA, GAMMA, ZETA = (
    2 / 3,
    -0.1,
    1.1,
)  # temperature and ends of the stretched gate (Louizos et al. 2018, sections 2.2 and 4)
OPEN = 2.0  # log alpha that gates begin with: each is open with probability 0.97
PRICE = 0.05  # nats a token that a head has to save for its gate to stay open
GATE_LR = 0.05  # of Adam, on log alpha
GATE_TOKENS = 512  # in one step
GATE_STEPS = 100


@dataclass(frozen=True)
class Task:
    """What every measure is given: a model, some of whose heads are gone already, and what it reads.

    `sum_W`, `count_W`: nats and predictions of each sequence, before anything more is taken away.
    """

    model: GPT
    data: list[Batch]
    removed: frozenset[Head]
    sum_W: Tensor
    count_W: Tensor
    gate_steps: int
    seed: int

    @property
    def left(self) -> list[Head]:
        return [head for head in heads_of(self.model) if head not in self.removed]


def zeroed(task: Task) -> dict[Head, Mean]:
    """Leave one out, exactly: how much the loss rises when the head writes nothing, nats a token."""
    return _leave_one_out(task, {})


def mean(task: Task) -> dict[Head, Mean]:
    """The same when the head's z is set to its mean over all positions of these sequences: what it says of a token is
    gone, and what it always says stays, so that the layers behind it see nothing unusual."""
    return _leave_one_out(task, mean_outputs(task.model, task.data, task.removed))


def _leave_one_out(task: Task, instead: Mapping[Head, Tensor]) -> dict[Head, Mean]:
    """Paired: the error is that of the difference, sequence by sequence."""
    sum_MW = losses(task.model, task.data, [task.removed | {head} for head in task.left], instead)
    return {head: over_sequences(sum_W - task.sum_W, task.count_W) for head, sum_W in zip(task.left, sum_MW)}


def mean_outputs(model: GPT, data: Sequence[Batch], removed: Collection[Head]) -> dict[Head, Tensor]:
    """head -> z_D, its mean over the positions that count."""
    sums: dict[Head, Tensor] = {}
    with evaluating(model), torch.inference_mode(), held(model, removed, {}), listening(model, "z") as heard:
        for batch in data:
            model(batch.x_WT)
            for layer, z_WHTD in enumerate(heard["z"]):
                sum_HD = torch.einsum("whtd,wt->hd", z_WHTD, batch.counted_WT.to(z_WHTD.dtype)).cpu().double()
                for n, sum_D in zip(model.blocks[layer].attn.heads, sum_HD):  # type: ignore[union-attr, arg-type]
                    head = Head(layer, n)
                    sums[head] = sums[head] + sum_D if head in sums else sum_D
        total = counts(data).sum()
        weight = next(model.parameters())
        return {head: (sum_D / total).to(weight) for head, sum_D in sums.items()}


def gradient(task: Task) -> dict[Head, Mean]:
    """Michel et al. 2019, section 4.1: |d loss / d gate|, where the gate multiplies the head's output and is 1, in nats
    a token, averaged over sequences. It is how much the loss would change if it went on as steeply as it begins when
    the head is turned down. (The paper also divides by the norm over a layer; here heads of all layers are compared.)

    Each sequence has gates of its own, as gradients of both signs would cancel in a batch.
    """
    slopes = []
    with evaluating(task.model):
        for batch in task.data:
            gate_WN = _closed_where_removed(task, len(batch.x_WT)).requires_grad_()
            with torch.enable_grad(), gated(task.model, _by_layer(task.model, gate_WN)):
                total = batch.nats(task.model(batch.x_WT)).sum()
                slopes.append(torch.autograd.grad(total, gate_WN)[0].abs().cpu().double())
    slope_WN = torch.cat(slopes)
    return {
        head: over_sequences(slope_W, task.count_W)
        for head, slope_W in zip(heads_of(task.model), slope_WN.T)
        if head in task.left
    }


def gates(task: Task) -> dict[Head, Mean]:
    """Voita et al. 2019, section 6.1, with the weights frozen: the probability that a trained gate is open; it has no
    standard error.

    One hard-concrete gate a head (Louizos et al. 2018, section 2.2), between 0 and 1 and often exactly either.
    What is minimised, by Adam over random sequences of the same data, is loss + lambda x expected number of open gates
    / N, with lambda = PRICE x N: a gate stays open where its head saves more than PRICE nats a token, given what the
    others do. A higher price closes more gates and tells apart those that stay open, a lower one those that close; and
    after many steps all probabilities are near 0 or 1, which is a choice of heads, while after few they are a ranking.
    Seen on 32 heads of a model of Shakespeare after 100 steps: rank correlations with `zeroed` of 0.81 at 0.03 nats,
    0.87 at 0.05 and 0.92 at 0.1, and with up to half of the heads gone the smallest losses at 0.05. Each sequence draws
    gates of its own, which makes steps less noisy.
    """
    noise, order = stream(task.seed, "gates", "noise"), stream(task.seed, "gates", "sequences")
    full = [batch for batch in task.data if batch.x_WT.shape[1] == task.data[0].x_WT.shape[1]]
    whole = Batch(*(torch.cat([getattr(b, name) for b in full]) for name in ("x_WT", "y_WT", "counted_WT")))
    B, N = max(1, GATE_TOKENS // whole.x_WT.shape[1]), len(heads_of(task.model))
    keep_BN = _closed_where_removed(task, B)
    log_alpha_N = torch.full((N,), OPEN, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([log_alpha_N], lr=GATE_LR)
    with evaluating(task.model), torch.enable_grad():
        for _ in range(task.gate_steps):
            pick_B = torch.randint(len(whole.x_WT), (B,), generator=order).to(whole.x_WT.device)
            batch = Batch(whole.x_WT[pick_B], whole.y_WT[pick_B], whole.counted_WT[pick_B])
            gate_BN = hard_concrete(log_alpha_N, torch.rand(B, N, generator=noise, dtype=torch.float64))
            with gated(task.model, _by_layer(task.model, gate_BN.to(keep_BN) * keep_BN)):
                loss = batch.nats(task.model(batch.x_WT)).sum() / batch.counted_WT.sum()
            price = PRICE * probability_open(log_alpha_N).sum().to(loss)
            log_alpha_N.grad = torch.autograd.grad(loss + price, log_alpha_N)[0]
            adam.step()
    scores = zip(heads_of(task.model), probability_open(log_alpha_N).tolist())
    return {head: Mean(p, math.nan) for head, p in scores if head not in task.removed}


def hard_concrete(log_alpha_N: Tensor, uniform_BN: Tensor) -> Tensor:
    """gate_BN: a stretched and clipped binary concrete variable (Louizos et al. 2018, section 2.2)."""
    s_BN = torch.sigmoid((uniform_BN.log() - (-uniform_BN).log1p() + log_alpha_N) / BETA)
    return (s_BN * (ZETA - GAMMA) + GAMMA).clamp(0, 1)


def probability_open(log_alpha_N: Tensor) -> Tensor:
    """That such a gate is not 0 (the same section)."""
    return torch.sigmoid(log_alpha_N - BETA * math.log(-GAMMA / ZETA))


def _closed_where_removed(task: Task, W: int) -> Tensor:
    """gate_WN: 1, and 0 for the heads that are gone."""
    weight = next(task.model.parameters())
    gate_N = torch.tensor([float(head not in task.removed) for head in heads_of(task.model)])
    return gate_N.to(weight.device, weight.dtype).repeat(W, 1)


def _by_layer(model: GPT, gate_WN: Tensor) -> dict[int, Tensor]:
    """layer -> gate_WH, for the layers that have heads."""
    sizes = [len(block.attn.heads) for block in model.blocks]  # type: ignore[union-attr, arg-type]
    return {layer: gate for layer, gate in enumerate(gate_WN.split(sizes, dim=1)) if sizes[layer]}


# name -> measure. Each takes a Task and scores the heads that are left; a new one is added here.
MEASURES = {"zeroed": zeroed, "mean": mean, "gradient": gradient, "gates": gates}


def importance(
    model: GPT,
    split: Split,
    seq_len: int,
    *,
    max_tokens: int | None,
    measures: Sequence[str] = tuple(MEASURES),
    gate_steps: int = GATE_STEPS,
    seed: int = 0,
    split_name: str = "val",
    removed: Collection[Head] = (),
    batch_tokens: int = BATCH_TOKENS,
) -> Importance:
    """Each measure of each head, on about `max_tokens` of a split (the tokens that `evaluate` would take).

    `removed`: heads that are gone already; they score 0, stay gone while others are measured, and are left out of the
    correlations. `batch_tokens` changes no result. Raises UserError for a measure that does not exist, ValueError for
    removed heads that the model does not have.
    """
    for name in measures:
        if name not in MEASURES:
            raise UserError(f"{name}: must be one of {', '.join(MEASURES)}{nearest(name, MEASURES)}")
    data = sequences(split, seq_len, max_tokens, next(model.parameters()).device, batch_tokens)
    gone, count_W = frozenset(removed), counts(data)
    sum_W = losses(model, data, [gone])[0]
    task = Task(model, data, gone, sum_W, count_W, gate_steps, seed)
    scores = {name: MEASURES[name](task) if task.left else {} for name in measures}
    pairs = itertools.combinations(measures, 2)
    return Importance(
        {name: {h: found.get(h, Mean(0.0, 0.0)) for h in heads_of(model)} for name, found in scores.items()},
        {(a, b): rank_correlation(scores[a], scores[b]) for a, b in pairs},
        sum_W.sum().item() / count_W.sum().item(),
        int(count_W.sum()),
        split_name,
    )


def rank_correlation(a: Mapping[Head, Mean], b: Mapping[Head, Mean]) -> float:
    """Spearman's rank correlation over heads; nan where one of the two is the same for all of them."""
    from scipy.stats import spearmanr  # a second to import

    pairs = [(a[head].value, b[head].value) for head in a]
    if any(len(set(values)) < 2 for values in zip(*pairs)) or not pairs:
        return math.nan
    return float(spearmanr(*zip(*pairs)).statistic)


def order_of(importance: Importance, name: str) -> list[Head]:
    """Heads from the least to the most important by one measure; equal ones by layer and number."""
    scores = importance.measures[name]
    return sorted(scores, key=lambda head: (scores[head].value, head))
