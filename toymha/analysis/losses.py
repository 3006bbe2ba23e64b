"""The loss of a model that has lost some of its heads, sequence by sequence.

W sequences, T positions, C dim, H heads that a layer has, D width of a value, V vocabulary, M sets of heads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from toymha.analysis.capture import without
from toymha.analysis.results import Head, Mean
from toymha.data.corpus import Split
from toymha.evaluate import evaluating, mean_and_error, windows
from toymha.model.gpt import GPT

BATCH_TOKENS = 4096  # as in `evaluate`; it changes no result


@dataclass(frozen=True)
class Batch:
    """Sequences of one length: what is read, what comes next, and where the prediction counts."""

    x_WT: Tensor
    y_WT: Tensor
    counted_WT: Tensor

    def nats(self, logits_WTV: Tensor) -> Tensor:
        """nats_WT of the right tokens, 0 where the prediction does not count; gradients flow."""
        exact = logits_WTV.to(torch.promote_types(logits_WTV.dtype, torch.float32))
        return F.cross_entropy(exact.transpose(1, 2), self.y_WT, reduction="none") * self.counted_WT


def sequences(
    split: Split, seq_len: int, max_tokens: int | None, device: torch.device, batch_tokens: int = BATCH_TOKENS
) -> list[Batch]:
    """The windows that `evaluate` takes of this split, on a device."""
    found = windows(split, seq_len, max_tokens, max(1, batch_tokens // seq_len))
    return [
        Batch(split.tokens[at_WT - 1].long().to(device), split.tokens[at_WT].long().to(device), counted_WT.to(device))
        for at_WT, counted_WT in found
    ]


def counts(data: Sequence[Batch]) -> Tensor:
    """count_W: predictions of each sequence."""
    return torch.cat([batch.counted_WT.sum(1) for batch in data]).cpu().double()


def over_sequences(sum_W: Tensor, count_W: Tensor) -> Mean:
    """The mean over tokens, and its standard error with the tokens of a sequence taken as one cluster, as `evaluate`
    has it; nan for a single sequence."""
    return Mean(*mean_and_error(sum_W, count_W))


def losses(
    model: GPT, data: Sequence[Batch], gone: Sequence[Collection[Head]], instead: Mapping[Head, Tensor] | None = None
) -> Tensor:
    """sum_MW: for each set of heads the nats of each sequence when these heads write nothing.

    `instead`: head -> z_D that it has at every position when it is gone, in place of zero. Sets that follow each other
    cost least when they differ in late layers only: what comes before the first difference is not computed again.
    Raises ValueError for a head that the model does not have.
    """
    with evaluating(model), torch.inference_mode():
        return torch.cat([_of_batch(model, batch, gone, instead or {}) for batch in data], dim=1)


def _of_batch(model: GPT, batch: Batch, gone: Sequence[Collection[Head]], instead: Mapping[Head, Tensor]) -> Tensor:
    read: dict[int, Any] = {}  # layer -> what its block was given last

    def hear(layer: int, _block: Any, given: Any) -> None:
        read[layer] = given

    handles = [block.register_forward_pre_hook(partial(hear, layer)) for layer, block in enumerate(model.blocks)]
    rows, before = [], None
    try:
        for heads in gone:
            with held(model, heads, instead):
                if before is None:
                    logits_WTV = model(batch.x_WT)
                else:
                    changed = [head.layer for head in set(heads) ^ before]
                    logits_WTV = _onward(model, read, min(changed, default=len(model.blocks) - 1))
            before = set(heads)
            rows.append(batch.nats(logits_WTV).cpu().double().sum(1))
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(rows)


def _onward(model: GPT, read: Mapping[int, Any], first: int) -> Tensor:
    """The rest of a forward pass, from what block `first` was given the last time."""
    x_WTC, *positions = read[first]
    for block in model.blocks[first:]:
        x_WTC = block(x_WTC, *positions)
    return model.unembed(model.norm(x_WTC))


@contextlib.contextmanager
def held(model: GPT, heads: Collection[Head], instead: Mapping[Head, Tensor]) -> Iterator[None]:
    """Inside, the z of these heads is what `instead` has for them at every position, and zero where it has nothing."""
    with without(model, heads), contextlib.ExitStack() as stack:
        for layer, block in enumerate(model.blocks):
            attn: Any = block.attn
            values = {
                i: instead[h] for i, n in enumerate(attn.heads) if (h := Head(layer, n)) in heads and h in instead
            }
            if values:
                nothing_D = torch.zeros_like(next(iter(values.values())))
                shift_HD = torch.stack([values.get(i, nothing_D) for i in range(len(attn.heads))])
                # behind the gates of `without`: hooks run in the order in which they came
                stack.callback(attn.z.register_forward_hook(partial(_add, shift_HD)).remove)
        yield


def _add(shift_HD: Tensor, _module: Any, _inputs: Any, z_BHTD: Tensor) -> Tensor:
    return z_BHTD + shift_HD[:, None]
