"""What a head looks at: scores of its pattern, and the kind that follows from them. Pure functions of tensors.

Axes: B sequences, H heads (of one layer or of all), T query positions (rows), S key positions, V vocabulary. A score is
a mean over rows for each head and each sequence, BH, from 0 to 1: the weight that a head puts on the places which a
`look` marks, or the entropy of its rows. A sequence that has no such row gives nan. The first FIRST rows are left out:
with two or three keys to choose from, every head looks along the diagonal and at the beginning.

The kinds, and their families after Voita et al. 2019 (arXiv:1905.09418, section 5: positional, syntactic, rare words):

    positional  previous token, offset (any other fixed distance but 0)
    syntactic   the relations that a generated text plants, each a kind with its own name
    rare-word   rare
    other       what Voita et al. have no class for: diagonal (the token itself) and begin, where heads rest; induction
                and duplicate, which look for equal tokens; uniform, scattered, other
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from toymha.analysis.results import Mean

FIRST = 8  # rows that are left out
FURTHEST = 16  # fixed offsets looked at: up to so many tokens back, and in a model that sees the future, ahead
HELD = 0.4  # weight that makes a kind, in the mean over rows
BEYOND = 0.2  # and of a relation: so much more than the head's weight at the same distances in all rows
EVEN = 0.9  # entropy from which a head is uniform, as a share of the largest possible
SHARP = 0.5  # entropy up to which it is scattered, if it is nothing else
ERRORS = 2  # standard errors by which a weight must be above HELD
SURE = 4.0  # z that every kind but `uniform` and `other` needs

FAMILY = {
    **dict.fromkeys(("previous token", "offset"), "positional"),
    **dict.fromkeys(("diagonal", "begin", "duplicate", "induction", "uniform", "scattered", "other"), "other"),
    "rare": "rare-word",
}
PLACES = {  # kind -> its score, and the places in words; the order decides between equals, so the general comes first
    "previous token": ("previous", "on the token before"),
    "diagonal": ("diagonal", "on the token itself"),
    "offset": ("offset", "at one fixed distance, which is neither 0 nor 1"),
    "begin": ("begin", "on the first token of the sequence, or of a document in it"),
    "duplicate": ("duplicate", "on other copies of the token, in repeated random sequences"),
    "induction": ("induction", "on what followed other copies of the token, in repeated random sequences"),
    "rare": ("rare", "on the token it sees that is rarest in the training text"),
}


def family(kind: str) -> str:
    """positional, syntactic, rare-word or other; a kind that is not in FAMILY is the name of a relation."""
    return FAMILY.get(kind, "syntactic")


# Scores


def offsets(T: int) -> list[int]:
    """The distances that are tried: 0, 1, 2, ... tokens back, then -1, -2, ... ahead; each has a row that counts."""
    furthest = min(FURTHEST, (T - 1) // 2)
    return [*range(furthest + 1), *(-k for k in range(1, min(furthest, T - FIRST - 1) + 1))]


def along(pattern_BHTS: Tensor, offset: int) -> Tensor:
    """Mean weight at t - offset over rows t, BH: 0 is `diagonal`, 1 `previous`, 2 `second`, -1 the token to come.

    Voita et al. 2019, section 5.1, count how often the largest weight lies there; this is the weight itself.
    """
    diagonal_BHN = pattern_BHTS.diagonal(-offset, -2, -1)  # its first row is `offset`, or 0
    return diagonal_BHN[..., max(FIRST - max(offset, 0), 0) :].float().mean(-1)


def entropy(pattern_BHTS: Tensor, causal: bool) -> Tensor:
    """Mean entropy of the rows as a share of the largest possible, ln of the number of visible keys, BH.

    1: the same weight everywhere, 0: all on one key. Clark et al. 2019 (arXiv:1906.04341), section 3.3, in nats.
    """
    T, S = pattern_BHTS.shape[-2:]
    visible_T = torch.arange(1, T + 1, device=pattern_BHTS.device) if causal else torch.full((T,), S)
    most_T = visible_T[FIRST:].to(pattern_BHTS.device).log()
    return (torch.special.entr(pattern_BHTS[..., FIRST:, :].float()).sum(-1) / most_T).mean(-1)


def weight(pattern_BHTS: Tensor, looks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """name -> weight on the places of each look_BTS, in the mean over its rows, BH."""
    if not looks:
        return {}
    look_BLTS = torch.stack(list(looks.values()), 1).to(pattern_BHTS.device)
    out_BHL = torch.einsum("bhts,blts->bhl", pattern_BHTS.float(), look_BLTS)
    return dict(zip(looks, out_BHL.unbind(-1)))


# Looks: look_BTS marks places, and is divided by the number of rows that have one


def beginning(begins_BT: Tensor) -> Tensor:
    """`begin`: the places of begins_BT (bool: position 0, and where a text has documents, the first token of each), for
    all other rows. A sink for weight that a head has no use for (Xiao et al. 2023, arXiv:2309.17453)."""
    return _look(begins_BT[:, None, :].expand(-1, begins_BT.shape[1], -1), ~begins_BT)


def rarest(x_BT: Tensor, count_V: Tensor, causal: bool) -> Tensor:
    """`rare`: the visible token that is least frequent in training (count_V), wherever it stands; equally rare ones
    count together. Voita et al. 2019, section 5.3: a head that points to the least frequent tokens of a sentence."""
    count_BT = count_V[x_BT]
    least_BT = count_BT.cummin(1).values if causal else count_BT.amin(1, keepdim=True).expand_as(count_BT)
    return _look(count_BT[:, None, :] == least_BT[:, :, None])


def copies(x_BT: Tensor) -> Tensor:
    """`duplicate`: the same token elsewhere, for rows that have an earlier copy. On repeated random sequences, where no
    two tokens are alike but by repetition (duplicate token heads: Wang et al. 2022, arXiv:2211.00593, section 3)."""
    same_BTS = x_BT[:, :, None] == x_BT[:, None, :]
    same_BTS.diagonal(0, 1, 2).fill_(False)
    return _look(same_BTS, same_BTS.tril().any(2))


def after_copies(x_BT: Tensor) -> Tensor:
    """`induction`: the token after an earlier (or other) copy, which is the one to come if the text repeats itself.
    Olsson et al. 2022 (arXiv:2209.11895), prefix matching, on repeated random sequences."""
    after_BTS = torch.zeros(*x_BT.shape, x_BT.shape[1], dtype=torch.bool)
    after_BTS[:, :, 1:] = x_BT[:, :, None] == x_BT[:, None, :-1]
    after_BTS.diagonal(0, 1, 2).fill_(False)  # the token itself,
    after_BTS.diagonal(1, 1, 2).fill_(False)  # and the one after it, are no find
    return _look(after_BTS, after_BTS.tril().any(2))


def governor(governor_BT: Tensor) -> Tensor:
    """A relation: from the position that predicts the dependent token to its governor, governor_BT (the governor's
    place in the sequence; below 0: this row predicts no such token, or the governor is outside).

    In a decoder the row before the dependent has to know it: what is fetched from the governor at the dependent itself
    comes too late for its prediction. Voita et al. 2019, section 5.2, look at an encoder, from word to word.
    """
    T = governor_BT.shape[1]
    return _look(governor_BT[:, :, None] == torch.arange(T), governor_BT >= 0)


def habit(governor_BT: Tensor) -> Tensor:
    """For comparison with `governor`: the same distances, each as frequent as there, in all rows. A head that always
    looks one token back finds every governor that stands one token back, and knows nothing of the relation (Voita et
    al. 2019, section 5.2, compare with the best fixed distance too)."""
    B, T = governor_BT.shape
    t = torch.arange(T)
    there_BT = (governor_BT >= 0) & (t >= FIRST)
    count_BK = torch.zeros(B, T).scatter_add_(1, (t - governor_BT).clamp(0, T - 1), there_BT.float())
    rows_K = T - torch.arange(T).clamp(min=FIRST)  # rows that have a key so far back
    share_BK = count_BK / count_BK.sum(1, keepdim=True) / rows_K
    back_TS = t[:, None] - t
    return share_BK[:, back_TS.clamp(min=0)] * ((back_TS >= 0) & (t >= FIRST)[:, None])


def _look(hits_BTS: Tensor, rows_BT: Tensor | None = None) -> Tensor:
    """1 / (number of rows) at each place, 0 elsewhere; nan for a sequence without a row."""
    B, T, _ = hits_BTS.shape
    counted_BT = (torch.arange(T) >= FIRST).expand(B, T)
    if rows_BT is not None:
        counted_BT = counted_BT & rows_BT
    return (hits_BTS & counted_BT[:, :, None]) / counted_BT.sum(1)[:, None, None]


# Kinds


def by_offset(relation: str) -> str:
    """Name of the score that `habit` gives."""
    return f"{relation} by offset"


def kind_of(scores: Mapping[str, Mean], offset: int, relations: Sequence[str]) -> str:
    """The kind of a head with these scores and this best fixed offset.

    Where several hold, the one whose score is furthest above its threshold, in shares of what is possible; among equals
    the first in the order of PLACES with the relations before `rare`. A score that is not there makes no kind, and none
    does whose error is not known, as from a single sequence.
    """
    best, most = None, -1.0
    for kind, name in _candidates(relations).items():
        if name not in scores or not _sure(scores[name]) or (kind == "offset" and offset in (0, 1)):
            continue
        value = scores[name].value
        if kind in relations and value - scores[by_offset(kind)].value < BEYOND:
            continue
        margin = (value - HELD) / (1 - HELD)
        if margin > most + 1e-6:  # sums round
            best, most = kind, margin
    if best is not None:
        return best
    even = scores["entropy"]
    if even.value >= EVEN:
        return "uniform"
    return "scattered" if even.value <= SHARP and _z(even) <= -SURE else "other"


def _sure(score: Mean) -> bool:
    """A few examples may have a large mean by accident, and then their error is large too."""
    return score.value - ERRORS * score.se >= HELD and _z(score) >= SURE


def _z(score: Mean) -> float:
    assert score.z is not None
    return score.z


def _candidates(relations: Sequence[str]) -> dict[str, str]:
    """Kind -> score, in their order."""
    found = {kind: score for kind, (score, _) in PLACES.items() if kind != "rare"}
    return found | {name: name for name in relations} | {"rare": PLACES["rare"][0]}


def kinds(relations: Sequence[str]) -> list[str]:
    """All kinds that a head can be, in their order."""
    return [*_candidates(relations), "uniform", "scattered", "other"]


def rules(relations: Sequence[str]) -> dict[str, str]:
    """Kind -> its rule in words."""
    sure = f"and z of at least {SURE:g} against untrained heads"
    held = f"at least {HELD:g} of its weight (less {ERRORS} standard errors)"
    out = {kind: f"{held} {places}, {sure}" for kind, (_, places) in PLACES.items()}
    for name in relations:
        out[name] = (
            f"where a word is predicted that another decides, {held} on that other word, by {BEYOND:g} more than it "
            f"gives the same distances everywhere, {sure}"
        )
    out["uniform"] = f"none of these, and its rows have at least {EVEN:g} of the largest possible entropy"
    out["scattered"] = (
        f"none of these, its rows have at most {SHARP:g} of the largest possible entropy, and z of at most "
        f"{-SURE:g} against untrained heads"
    )
    out["other"] = "none of these"
    return {kind: out[kind] for kind in kinds(relations)}


def reached(null_M: Mapping[str, Tensor], relations: Sequence[str]) -> dict[str, float]:
    """Kind -> the largest score of untrained heads (`scattered`: the least entropy), of the scores they have."""
    out = {kind: float(null_M[score].max()) for kind, score in _candidates(relations).items() if score in null_M}
    return out | ({"scattered": float(null_M["entropy"].min())} if "entropy" in null_M else {})


def deviations(value_N: Tensor, null_M: Tensor) -> Tensor:
    """z_N: distance from the mean of the untrained heads null_M in their standard deviations, or in units of 1e-6 where
    they differ by less: that is how far sums of float32 weights are exact, and z is finite for every head."""
    std = null_M.double().std(correction=1) if len(null_M) > 1 else torch.tensor(0.0)
    return (value_N.double() - null_M.double().mean()) / max(float(std), 1e-6)


def mean_and_error(score_BN: Tensor) -> tuple[Tensor, Tensor]:
    """(mean_N, error_N) over the sequences that have the score; the standard error is nan where only one has."""
    there_N = (~score_BN.isnan()).sum(0)
    mean_N = score_BN.double().nanmean(0)
    square_N = (score_BN - mean_N).square().nansum(0)
    return mean_N, (square_N / (there_N - 1) / there_N).sqrt()


def furthest_above(along_KN: Tensor, tried: Sequence[int]) -> tuple[Tensor, list[int]]:
    """(index_N, offsets): for each head the offset with the largest mean weight; nearest first among equals."""
    index_N = along_KN.argmax(0)
    return index_N, [tried[i] for i in index_N.tolist()]
