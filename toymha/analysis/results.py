"""What is known of the heads of one run: plain values, made by the other files here and shown by the page.

A head is (layer, head), both counted from 0; in a model that has lost heads they keep the numbers they had. N heads of
a model, H of a layer, T query positions, S key positions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class Head(NamedTuple):
    layer: int
    head: int

    @property
    def name(self) -> str:
        """`L0H3`."""
        return f"L{self.layer}H{self.head}"


@dataclass(frozen=True)
class Mean:
    """A mean over sequences with its standard error; z: its distance from untrained heads, in their deviations."""

    value: float
    se: float
    z: float | None = None


@dataclass(frozen=True)
class Kind:
    """What a head does: its kind, its scores by name, and the offset of the diagonal that it looks along most."""

    kind: str
    scores: dict[str, Mean]
    offset: int


@dataclass(frozen=True)
class Census:
    """The kinds of all heads. `rules`: kind -> the rule in words; `false_positives`: kind -> share of untrained heads
    that the same rules call so (kinds that are not the null itself)."""

    heads: dict[Head, Kind]
    rules: dict[str, str]
    false_positives: dict[str, float]
    untrained_models: int
    untrained_heads: int
    sequences: int

    def counts(self) -> dict[str, int]:
        """Kind -> number of heads, most frequent first."""
        found = [k.kind for k in self.heads.values()]
        return dict(sorted(((k, found.count(k)) for k in dict.fromkeys(found)), key=lambda kn: -kn[1]))


@dataclass(frozen=True)
class Likeness:
    """How alike heads are. Matrices are N x N in the order of `heads`, symmetric, 1 on the diagonal.

    pattern: 1 - Jensen-Shannon distance of patterns (its square root form, base 2, so from 0 to 1); z: linear CKA of
    the heads' outputs. clusters: heads of one layer that are nearly the same. effective: layer -> number of different
    heads, from 1 (all the same) to H.
    """

    heads: list[Head]
    pattern: Tensor
    z: Tensor
    clusters: list[list[Head]]
    effective: list[float]


@dataclass(frozen=True)
class Write:
    """What one head writes to the residual stream through its block of W_o.

    norm: mean Euclidean norm over positions. share: its share of what its layer's attention writes, by projection on
    the sum (the shares of all heads and of the bias add up to 1; it may be negative). logit: its direct contribution to
    the logit of the right next token, less its mean contribution to all tokens.
    """

    norm: float
    share: float
    logit: Mean


@dataclass(frozen=True)
class Writes:
    """`cosine`: N x N, mean cosine between the writes of two heads at the same position. `bias`: layer -> the share of
    the bias of W_o. `direct`: what else writes to the stream -> its direct contribution to the right logit."""

    heads: dict[Head, Write]
    cosine: Tensor
    bias: list[float]
    direct: dict[str, float]


@dataclass(frozen=True)
class Importance:
    """measures: name -> head -> score (larger: the model needs it more). loss: of the whole model on the same tokens.
    correlations: (measure, measure) -> Spearman's rank correlation over heads."""

    measures: dict[str, dict[Head, Mean]]
    correlations: dict[tuple[str, str], float]
    loss: float
    tokens: int
    split: str


@dataclass(frozen=True)
class Curve:
    """Loss after removing 0, 1, ... N heads in an order; low and high: least and most over orders, where there are
    several (random ones), else empty. `order`: of one order, the heads as they go."""

    loss: list[float]
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    order: list[Head] = field(default_factory=list)


@dataclass(frozen=True)
class Pruning:
    """curves: name of the order (a measure, or `random`) -> curve. removable: the same name -> largest share of heads
    that can go while perplexity rises by less than `tolerance` (0.01: 1 %), all smaller numbers in the order too."""

    curves: dict[str, Curve]
    removable: dict[str, float]
    tolerance: float
    split: str
    tokens: int


@dataclass(frozen=True)
class Passage:
    """A text and what every head sees in it: labels of its T tokens; layer -> pattern_HTS of the heads it has."""

    labels: list[str]
    patterns: list[Tensor]
    note: str | None = None


@dataclass(frozen=True)
class Study:
    """All of it; what was not asked for is None. `about`: facts of the model, name and text."""

    name: str
    about: list[tuple[str, str]]
    heads: list[Head]
    passage: Passage | None = None
    census: Census | None = None
    likeness: Likeness | None = None
    writes: Writes | None = None
    importance: Importance | None = None
    pruning: Pruning | None = None
    notes: tuple[str, ...] = ()
