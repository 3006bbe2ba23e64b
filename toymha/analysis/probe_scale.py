"""How large scores are, and what that makes of the softmax: measured, against what the textbook derives.

Vaswani et al. 2017, section 3.2.1: where the entries of q and k are independent, with mean 0 and variance 1, q.k is a
sum of D such products and has the standard deviation sqrt(D). Undivided, such scores push the softmax to where it has
extremely small gradients. Here that is tried with such q and k, and with those of a model, which need not be like that.

B sequences, T query positions, S key positions, H heads that a layer has, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from toymha.analysis.results import Head
from toymha.config import Config
from toymha.evaluate import evaluating
from toymha.model.gpt import GPT
from toymha.model.parts import rotate
from toymha.schema import UserError
from toymha.seeds import stream

HEAD_DIMS = (16, 32, 64, 128, 256, 512, 1024)
TOLERANCE = 0.02  # how far from sqrt(D) still counts as sqrt(D)
GROUPS, QUERIES, KEYS = 32, 64, 128  # of drawn q and k: each query of a group meets each key of it
MOST_LAYERS, MOST_HEADS = 2, 4  # of the models that are built for each head_dim


@dataclass(frozen=True)
class Softmaxed:
    """Scores after one choice of scale, and their softmax: but for `std`, means over rows that see at least two keys.

    std: of the visible scores. entropy: of a row, in shares of the largest there can be, ln of the visible keys, so 1
    for an even row. largest: its largest weight. passed: trace of the softmax's Jacobian, in shares of an even row's:
    1 even, 0 where one key has all the weight and no gradient comes through.
    """

    std: float
    entropy: float
    largest: float
    passed: float


@dataclass(frozen=True)
class Products:
    """Standard deviations of the entries of q and of k, and of q.k over visible pairs; after: scale -> what it makes
    of these q.k."""

    head_dim: int
    q: float
    k: float
    product: float
    after: dict[str, Softmaxed]

    @property
    def textbook(self) -> float:
        """Of q.k, for independent entries of mean 0 and variance 1."""
        return math.sqrt(self.head_dim)

    @property
    def expected(self) -> float:
        """Of q.k, for independent entries of mean 0 and the measured deviations."""
        return self.q * self.k * self.textbook

    @property
    def ratio(self) -> float:
        return self.product / self.textbook

    @property
    def holds(self) -> bool:
        """Whether q.k is as the textbook derives it, within TOLERANCE."""
        return abs(self.ratio - 1) <= TOLERANCE


@dataclass(frozen=True)
class ScaleProbe:
    """All heads that a model has. factors: scale -> what it multiplies q.k by; chosen: the one the model has."""

    heads: dict[Head, Products]
    factors: dict[str, float]
    chosen: str

    def layers(self) -> dict[int, Products]:
        """Means over the heads of each layer that has any."""
        return {
            layer: mean([p for head, p in self.heads.items() if head.layer == layer])
            for layer in dict.fromkeys(head.layer for head in self.heads)
        }


def scale(model: GPT, c: Config, x_BT: Tensor) -> ScaleProbe:
    """Measure q, k and q.k of every head while the model reads x_BT, and try all choices of `score_scale` on them.

    Layers without heads are left out. Raises UserError where there is nothing to attend to: no heads, or one token.
    """
    factors, out = factors_of(c), {}
    for layer, (q_BHTD, k_BHSD) in queries_and_keys(model, x_BT).items():
        attn: Any = model.blocks[layer].attn
        for i, h in enumerate(attn.heads):
            out[Head(layer, h)] = products(q_BHTD[:, i], k_BHSD[:, i], factors, c.causal)
    return ScaleProbe(out, factors, c.score_scale)


def factors_of(c: Config) -> dict[str, float]:
    """Choice of `score_scale` -> what q.k is multiplied by."""
    return {"head_dim": c.D**-0.5, "dim": c.dim**-0.5, "none": 1.0}


def queries_and_keys(model: GPT, x_BT: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """layer -> q_BHTD and k_BHSD as they meet: turned where positions are rotary, k repeated where heads share it.

    In double precision, on the CPU. Raises UserError as `scale` does.
    """
    heard: dict[int, tuple[Tensor, Tensor]] = {}
    handles: list[Any] = []

    def listen(layer: int, attn: Any) -> None:
        def hear(_module: Any, inputs: tuple[Any, ...]) -> None:
            x_BTC, place, *_ = inputs
            q_BHTD, k_BGSD, _ = attn.project(x_BTC)
            if place.rope is not None:
                q_BHTD, k_BGSD = rotate(q_BHTD, *place.rope), rotate(k_BGSD, *place.rope)
            q_BHTD = q_BHTD.expand(-1, attn.H, -1, -1)  # tied heads have one
            heard[layer] = q_BHTD.cpu().double(), k_BGSD[:, attn.kv_of].cpu().double()

        handles.append(attn.register_forward_pre_hook(hear))

    if x_BT.shape[1] < 2:
        raise UserError("probe=scale needs sequences of at least 2 tokens: a single one has nothing to choose from")
    try:
        for layer, block in enumerate(model.blocks):
            if block.attn.heads:  # type: ignore[union-attr]
                listen(layer, block.attn)
        if not handles:
            raise UserError("probe=scale needs heads, and this model has lost all of them")
        with evaluating(model), torch.inference_mode():
            model(x_BT)
    finally:
        for handle in handles:
            handle.remove()
    return heard


def products(q_BTD: Tensor, k_BSD: Tensor, factors: Mapping[str, float], causal: bool) -> Products:
    """What is measured of one head's queries and keys; `causal`: query t sees the keys up to t."""
    product_BTS = q_BTD @ k_BSD.transpose(1, 2)
    visible_TS = torch.ones(product_BTS.shape[1:], dtype=torch.bool)
    visible_TS = visible_TS.tril() if causal else visible_TS
    after = {name: softmaxed(product_BTS * factor, visible_TS) for name, factor in factors.items()}
    return Products(q_BTD.shape[-1], _std(q_BTD), _std(k_BSD), _std(product_BTS[:, visible_TS]), after)


def softmaxed(scores_BTS: Tensor, visible_TS: Tensor) -> Softmaxed:
    """What becomes of scaled scores."""
    rows_T = visible_TS.sum(1) > 1
    seen_T = visible_TS.sum(1)[rows_T].to(scores_BTS)
    pattern_BTS = scores_BTS.masked_fill(~visible_TS, -math.inf)[:, rows_T].softmax(-1)
    entropy_BT = torch.special.entr(pattern_BTS).sum(-1) / seen_T.log()
    passed_BT = softmax_trace(pattern_BTS) / (1 - 1 / seen_T)
    largest = pattern_BTS.amax(-1).mean().item()
    return Softmaxed(_std(scores_BTS[:, visible_TS]), entropy_BT.mean().item(), largest, passed_BT.mean().item())


def softmax_trace(pattern: Tensor) -> Tensor:
    """Trace of the softmax's Jacobian diag(p) - p p^T for each row p on the last axis: 1 - sum of p^2.

    It is the sum of how much each weight answers to its own score: 1 - 1/n for n even weights, its largest value, and
    0 where one weight is 1. (The Jacobian's Frobenius norm is largest where two keys share the weight, so it would
    call a softmax that is nearly decided open.)
    """
    return 1 - pattern.square().sum(-1)


def textbook(head_dims: Iterable[int] = HEAD_DIMS, seed: int = 0) -> dict[int, Products]:
    """head_dim -> what is measured of q and k that are as the derivation wants them: independent standard normal
    entries, 128 keys to a query; undivided, and divided by sqrt(head_dim)."""
    out = {}
    for d in head_dims:
        chance = stream(seed, "probe", "scale", d)
        q_BTD = torch.randn(GROUPS, QUERIES, d, generator=chance).double()
        k_BSD = torch.randn(GROUPS, KEYS, d, generator=chance).double()
        out[d] = products(q_BTD, k_BSD, {"head_dim": d**-0.5, "none": 1.0}, causal=False)
    return out


def untrained(c: Config, vocab_size: int, x_BT: Tensor, head_dims: Iterable[int] = HEAD_DIMS) -> dict[int, Products]:
    """head_dim -> the same of a new model of this configuration but for its head_dim: what the initial weights give.

    Means over up to 4 heads of the last of up to 2 layers (post-LN gives the first layer another input than all
    others). The width of a value stays as it is, so that this works without W_o too. Raises UserError for a head_dim
    that the configuration does not allow (pos=rope: an odd one), else as `scale` does.
    """
    out = {}
    for d in head_dims:
        small = replace(c, head_dim=d, v_head_dim=c.Dv, n_layer=min(c.n_layer, MOST_LAYERS), kept_heads=None)
        model = new_model(small, vocab_size, x_BT.device)
        q_BHTD, k_BHSD = queries_and_keys(model, x_BT)[small.n_layer - 1]
        heads = range(min(small.n_head, MOST_HEADS))
        out[d] = mean([products(q_BHTD[:, i], k_BHSD[:, i], factors_of(small), c.causal) for i in heads])
    return out


def new_model(c: Config, vocab_size: int, device: torch.device) -> GPT:
    """A model of c as it begins. torch fills its layers from the global generator before they get their own values:
    here that is undone."""
    with torch.random.fork_rng(devices=[]):
        return GPT(c, vocab_size).to(device)


def mean(found: Sequence[Products]) -> Products:
    """Of each number, over heads of one head_dim."""

    def over(values: Iterable[float]) -> float:
        return math.fsum(values) / len(found)

    after = {
        name: Softmaxed(*(over(getattr(p.after[name], f) for p in found) for f in Softmaxed.__dataclass_fields__))
        for name in found[0].after
    }
    q, k, product = (over(getattr(p, f) for p in found) for f in ("q", "k", "product"))
    return Products(found[0].head_dim, q, k, product, after)


def _std(x: Tensor) -> float:
    return x.std(correction=0).item()
