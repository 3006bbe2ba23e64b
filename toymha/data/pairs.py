"""Pairs of source and target out of a split: rows for an encoder and a decoder, distances, and a baseline.

B documents, S source positions, T target positions, D documents of a split, N its tokens, K tokens of some of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from toymha.data.corpus import Split

PADDING = -1  # in sources: no token


def pair_rows(split: Split, docs_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(source_BS, at_BT, counted_BT) of the documents with these numbers.

    source_BS, int64: from the mark that begins a document to its last source token, then PADDING. at_BT, int64: index
    in `tokens` of each token to predict, the target's and the mark that ends it; what a decoder reads are the tokens
    at_BT - 1. counted_BT: False where a row is over, and for the mark that the last document of a split does not have.
    """
    assert split.starts is not None and split.separators is not None, "these documents are no pairs"
    N = len(split.tokens)
    start_B, to_B, end_B = split.starts[docs_B], split.separators[docs_B], _ends(split)[docs_B]
    source_at_BS = start_B[:, None] + torch.arange(int((to_B - start_B).max()))
    inside_BS = source_at_BS < to_B[:, None]
    tokens_BS = split.tokens[source_at_BS.clamp(max=N - 1)].long()
    at_BT = to_B[:, None] + torch.arange(1, int((end_B - to_B).max()) + 1)
    counted_BT = at_BT <= end_B.clamp(max=N - 1)[:, None]
    return tokens_BS.where(inside_BS, PADDING), at_BT.clamp(max=N - 1), counted_BT


def pairs_of(split: Split) -> Iterator[tuple[list[int], list[int]]]:
    """(source with its begin mark, target) of each document."""
    assert split.starts is not None and split.separators is not None, "these documents are no pairs"
    tokens = split.tokens.tolist()
    for start, to, end in zip(split.starts.tolist(), split.separators.tolist(), _ends(split).tolist()):
        yield tokens[start:to], tokens[to + 1 : end]


def sizes_of_pairs(split: Split) -> tuple[Tensor, Tensor]:
    """source_D and target_D: tokens of each source, its begin mark included, and of each target, with the mark after it
    (which the last one lacks). Raises ValueError for a text that is no pairs."""
    if split.separators is None or split.starts is None:
        raise ValueError("this text has no pairs of source and target")
    ends_D = torch.cat([split.starts[1:] + 1, torch.tensor([len(split.tokens)])])
    return split.separators - split.starts, ends_D - split.separators - 1


def edit_distance(a: Sequence[int] | str, b: Sequence[int] | str) -> int:
    """The fewest insertions, deletions and replacements of one symbol that turn `a` into `b` (Levenshtein 1966)."""
    row = list(range(len(b) + 1))  # distances of the beginning of `a` from each beginning of `b`
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]


def edits_to_nearest(written: Sequence[int], right: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Edits to the nearest of several right targets, and the symbols of that one."""
    return min((0 if written == t else edit_distance(written, t), len(t)) for t in right)


def most_frequent(train: Split, split: Split) -> dict[str, float] | None:
    """How far one gets without context: the target token that stood most often in the place of each source token.

    exact: share of the documents of `split` that come out right; ser: symbol error rate, the edit distances of all
    documents over the tokens of their targets. Of equally frequent tokens the first in the vocabulary is taken; for
    a source token that training never shows, the most frequent target token of all. Where a source has several
    targets, each is right, and edits are counted from the nearest. None where the targets of the training split do not
    have a token for each token of their source.
    """
    source_D, target_D = sizes_of_pairs(train)
    target_D[-1] += 1  # it has no mark behind it, as every source has one before it
    if not torch.equal(source_D, target_D):
        return None
    source_K, target_K = (side_K.numpy() for side_K in _sides(train))
    reading_V = _commonest(source_K, target_K, 1 + int(max(train.tokens.max(), split.tokens.max())))
    right: dict[tuple[int, ...], list[list[int]]] = {}
    for source, target in pairs_of(split):
        right.setdefault(tuple(source), []).append(target)
    exact = edits = symbols = pairs = 0
    for source_key, found in right.items():
        read, times = reading_V[list(source_key[1:])].tolist(), len(found)
        wrong, size = edits_to_nearest(read, found)
        exact, pairs = exact + times * (wrong == 0), pairs + times
        edits, symbols = edits + times * wrong, symbols + times * size
    return {"exact": exact / pairs, "ser": edits / symbols}


def _commonest(source_K: np.ndarray, target_K: np.ndarray, V: int) -> np.ndarray:
    """reading_V: the target that stands most often with each source; of equals the lowest."""
    count_V = np.bincount(target_K, minlength=V)
    reading_V = np.full(V, count_V.argmax())
    pair_U, count_U = np.unique(source_K * V + target_K, return_counts=True)  # sorted by source, then by target
    order_U = np.lexsort((pair_U, count_U * -1, pair_U // V))
    source_U = pair_U[order_U] // V
    first_U = np.append(True, source_U[1:] != source_U[:-1])
    reading_V[source_U[first_U]] = pair_U[order_U][first_U] % V
    return reading_V


def _ends(split: Split) -> Tensor:
    """end_D: where the next document begins, or the split ends."""
    assert split.starts is not None
    return torch.cat([split.starts[1:], torch.tensor([len(split.tokens)])])


def _sides(split: Split) -> tuple[Tensor, Tensor]:
    """All tokens of sources, of targets, int64, without marks and in their order."""
    assert split.starts is not None and split.separators is not None and split.tags is not None
    is_source_N = split.tags == 0
    is_source_N[split.starts], is_source_N[split.separators] = False, False
    return split.tokens[is_source_N].long(), split.tokens[split.tags > 0].long()
