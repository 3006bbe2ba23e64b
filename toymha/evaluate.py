"""How good a model is on a split: loss with its standard error, perplexity, bits per character.

Axes: W windows, T positions, V vocabulary. A split of N tokens has N - 1 predictions; they are cut into windows of
seq_len that follow each other, so that every one of them is made once, from at most seq_len tokens of context.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toymha.data.corpus import Split
from toymha.model.attention import Attention
from toymha.model.gpt import GPT


@dataclass(frozen=True)
class Score:
    """loss and se in nats a token; tokens is the number of predictions; chars and bytes are what they spell."""

    loss: float
    se: float
    tokens: int
    chars: float
    bytes: float

    @property
    def ppl(self) -> float:
        """exp(loss); infinite where a double overflows."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_char(self) -> float:
        return self.loss / math.log(2) * self.tokens / self.chars

    @property
    def bits_per_byte(self) -> float:
        return self.loss / math.log(2) * self.tokens / self.bytes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "ppl": self.ppl,
            "bits_per_char": self.bits_per_char,
            "bits_per_byte": self.bits_per_byte,
        }


def evaluate(
    model: nn.Module,
    split: Split,
    seq_len: int,
    *,
    max_tokens: int | None = None,
    batch_tokens: int = 4096,
    poll: Callable[[], None] = lambda: None,
) -> Score:
    """The model's score on the whole split, or on about `max_tokens` of it in windows spread evenly, always the same.

    `batch_tokens`: how many tokens to evaluate at once; it changes no result. `poll` is called between batches and may
    raise. The standard error is that of the mean over tokens, with the tokens of a window taken as one cluster.
    """
    device = next(model.parameters()).device
    sums, counts = [], []
    with evaluating(model), torch.inference_mode():
        for x_WT, y_WT in windows(split.tokens, seq_len, max_tokens, max(1, batch_tokens // seq_len)):
            poll()
            logits_WTV = model(x_WT.to(device)).float()
            nats_WT = F.cross_entropy(logits_WTV.transpose(1, 2), y_WT.to(device), reduction="none")
            sums.append(nats_WT.double().sum(1).cpu() if device.type != "mps" else nats_WT.cpu().double().sum(1))
            counts.append(torch.full((len(x_WT),), x_WT.shape[1], dtype=torch.float64))
    sum_W, count_W = torch.cat(sums), torch.cat(counts)
    n = int(count_W.sum())
    loss = sum_W.sum().item() / n
    deviation_W = sum_W - loss * count_W
    W = len(sum_W)
    se = math.sqrt(deviation_W.square().sum().item() * W / (W - 1)) / n if W > 1 else math.nan
    share = n / (len(split.tokens) - 1)
    return Score(loss, se, n, split.chars * share, split.bytes * share)


def windows(tokens_N: Tensor, seq_len: int, max_tokens: int | None, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(x_WT, y_WT) in int64, `batch` windows at a time; the last, shorter window comes alone."""
    n = len(tokens_N) - 1
    full, rest = divmod(n, seq_len)
    if max_tokens is not None and max_tokens < n and full:
        k = min(full, math.ceil(max_tokens / seq_len))
        starts, rest = torch.arange(k) * full // k * seq_len, 0
    else:
        starts = torch.arange(full) * seq_len
    for chunk in starts.split(batch) if full else ():
        block = tokens_N[chunk[:, None] + torch.arange(seq_len + 1)].long()
        yield block[:, :-1], block[:, 1:]
    if rest:
        block = tokens_N[full * seq_len :].long()[None]
        yield block[:, :-1], block[:, 1:]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and back to whatever it was, also after an error."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


def unigram_loss(train: Split, split: Split, vocab_size: int) -> float:
    """Nats a token of a model that knows the training frequencies (plus one each) and no context: the bar to beat."""
    count_V = torch.bincount(train.tokens.long(), minlength=vocab_size).double() + 1
    logp_V = (count_V / count_V.sum()).log()
    return -logp_V[split.tokens[1:].long()].mean().item()


def attention_statistics(model: GPT, x_BT: Tensor) -> dict[str, float]:
    """By layer: standard deviation of the visible scores, and mean entropy of the pattern's rows in nats."""
    out: dict[str, float] = {}

    def watch(layer: int, attn: Attention) -> None:
        def on_scores(_m: nn.Module, _i: Any, scores_BHTS: Tensor) -> None:
            visible = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=scores_BHTS.device)
            visible = visible.tril() if attn.causal else visible
            out[f"scores_std/layer{layer}"] = scores_BHTS[..., visible].float().std().item()

        def on_pattern(_m: nn.Module, _i: Any, pattern_BHTS: Tensor) -> None:
            out[f"entropy/layer{layer}"] = torch.special.entr(pattern_BHTS.float()).sum(-1).mean().item()

        handles.append(attn.scores.register_forward_hook(on_scores))
        handles.append(attn.pattern.register_forward_hook(on_pattern))

    handles: list[Any] = []
    for i, block in enumerate(model.blocks):
        watch(i, block.attn)  # type: ignore[arg-type]
    try:
        with evaluating(model), torch.inference_mode():
            model(x_BT)
    finally:
        for handle in handles:
            handle.remove()
    return out
