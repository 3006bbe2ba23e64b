"""What a model reads in one step, and what it has to predict: of a text windows, of pairs a source and its target.

Axes: B batch, S source positions, T positions to predict. For a decoder alone, pairs are a text like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from toymha.data.corpus import Split, random_batch
from toymha.data.pairs import pair_rows, sizes_of_pairs
from toymha.model.seq2seq import Seq2Seq
from toymha.schema import UserError

UNCOUNTED = -100  # in y_BT: nothing is to be predicted here; the value that torch's cross entropy leaves out


@dataclass(frozen=True)
class Batch:
    """`inputs`: idx_BT, or source_BS and idx_BT; y_BT: the tokens to predict, int64."""

    inputs: tuple[Tensor, ...]
    y_BT: Tensor
    tokens: int  # of y_BT, those that count

    def parts(self, n: int, device: torch.device) -> Iterator[MicroBatch]:
        """n micro-batches."""
        first = 0
        for *inputs, y_BT in zip(*(x.chunk(n) for x in (*self.inputs, self.y_BT)), strict=True):
            share = 1.0 if n == 1 else int((y_BT != UNCOUNTED).sum()) / self.tokens  # here, where nobody waits for it
            yield MicroBatch(tuple(sent(x, device) for x in inputs), sent(y_BT, device), share, first)
            first += len(y_BT)


class MicroBatch(NamedTuple):
    """`inputs` and y_BT as in Batch, their share of the batch's tokens, and the number of the first row."""

    inputs: tuple[Tensor, ...]
    y_BT: Tensor
    share: float
    first: int


def sent(x: Tensor, device: torch.device) -> Tensor:
    """On the device; a GPU fetches it when it comes to it, from memory that the system leaves where it is."""
    on_its_way = device.type == "cuda" and x.device.type == "cpu"
    return x.pin_memory().to(device, non_blocking=True) if on_its_way else x.to(device)


def random_pairs(split: Split, batch_size: int, generator: torch.Generator) -> Batch:
    """Pairs of about equal length, so that little is padded: a length is drawn as often as pairs have it, then pairs
    that have it, with replacement, so that each pair is as likely as any other. Raises ValueError for a text that is no
    pairs."""
    if split.separators is None:
        raise ValueError("this text has no pairs of source and target")
    weights = torch.tensor([len(docs) for docs in split.alike], dtype=torch.float64)
    alike_K = split.alike[int(torch.multinomial(weights, 1, generator=generator))]
    docs_B = alike_K[torch.randint(len(alike_K), (batch_size,), generator=generator)]
    source_BS, at_BT, counted_BT = pair_rows(split, docs_B)
    y_BT = split.tokens[at_BT].long().masked_fill_(~counted_BT, UNCOUNTED)
    return Batch((source_BS, split.tokens[at_BT - 1].long()), y_BT, int(counted_BT.sum()))


def draw(model: nn.Module, split: Split, seq_len: int, batch_size: int, generator: torch.Generator) -> Batch:
    """A training batch for this model."""
    if isinstance(model, Seq2Seq):
        return random_pairs(split, batch_size, generator)
    x_BT, y_BT = random_batch(split, seq_len, batch_size, generator)
    return Batch((x_BT,), y_BT, y_BT.numel())


def pair_windows(
    split: Split, max_tokens: int | None, batch_tokens: int
) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
    """All targets in turn, or those of pairs spread evenly, about `max_tokens` tokens: inputs, at_WT (where the tokens
    to predict are in the split) and counted_WT (bool)."""
    _, target_D = sizes_of_pairs(split)
    D = len(target_D)
    docs = torch.arange(D)
    if max_tokens is not None:
        k = min(D, max(1, -(-max_tokens * D // int(target_D.sum()))))
        docs = torch.arange(k) * D // k
    for docs_W in docs.split(max(1, batch_tokens // int(target_D.max()))):
        source_WS, at_WT, counted_WT = pair_rows(split, docs_W)
        yield (source_WS, split.tokens[at_WT - 1].long()), at_WT, counted_WT


def check_pairs(splits: Mapping[str, Split], seq_len: int) -> None:
    """Refuse pairs that an encoder or decoder of `seq_len` positions cannot read. Raises UserError with the numbers."""
    for name, split in splits.items():
        if split.separators is None:
            raise UserError("an encoder-decoder reads pairs of source and target, and this text has none")
        for what, size_D in zip(("source", "target"), sizes_of_pairs(split)):
            if (n := int(size_D.max())) > seq_len:
                raise UserError(
                    f"seq_len={seq_len}: the longest {what} of the {name} split has {n} tokens; use seq_len={n}"
                )


def pairs_alike(split: Split, most: int = 32) -> Tensor:
    """docs_B: up to `most` pairs whose sources are equally long and whose targets are too, so that none is padded; the
    sizes are those that are most common."""
    source_D, target_D = sizes_of_pairs(split)
    if len(source_D) > 1:  # the last target has no mark behind it
        source_D, target_D = source_D[:-1], target_D[:-1]
    size_D = source_D * (int(target_D.max()) + 1) + target_D
    return (size_D == size_D.mode().values).nonzero().flatten()[:most]
