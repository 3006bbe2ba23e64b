"""The loop of generation: the prompt is read (prefill), then token after token (decode), with a cache or without.

B samples side by side, L of them not over yet, T new tokens, S visible tokens, H heads of a layer, V vocabulary of the
data.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from toymha.analysis.capture import listening
from toymha.evaluate import evaluating
from toymha.generation.sampling import Rules, choose, keep
from toymha.model.cache import KVCache
from toymha.model.gpt import GPT
from toymha.schema import UserError
from toymha.seeds import stream


@dataclass(frozen=True)
class Step:
    """One token of one sample. What was visible are the tokens context_start to len(prompt) + number - 1."""

    number: int  # 0 for the token that the prefill gives
    phase: str  # "prefill" or "decode"
    new: int  # tokens that the model read in this step: with a cache one, recomputed all that are visible
    cache_tokens: int  # tokens in the cache afterwards, of those that a token can see; 0 without
    cache_bytes: int  # bytes of these tokens' keys and values; 0 without
    context_start: int  # index, in prompt and new tokens, of the first token that was visible
    logits_V: Tensor  # of the next token, as the model gave them: float32, on the CPU
    kept_V: Tensor  # after penalty, temperature and filters: float64, on the CPU; -inf where out, 0 the most likely
    token: int  # what was chosen
    attention: list[Tensor] | None = None  # if asked: of each layer the last token's pattern_HS, as the text goes


def check_overflow(model: GPT, overflow: str) -> None:
    """Raises UserError where the context cannot slide."""
    if overflow == "slide" and not model.causal:
        raise UserError("overflow=slide: with causal=false each new token changes what earlier ones see; use crop")
    if overflow == "slide":
        model.make_cache(1, slide=True)  # which refuses positions that end


def never(row: int, token: int) -> bool:
    """A sample ends with no token."""
    return False


def steps(
    model: GPT,
    prompts: list[list[int]],
    rules: Rules,
    vocab_size: int,
    seeds: list[int],
    length: int,
    *,
    cache: bool = True,
    overflow: str = "crop",
    attention: bool = False,
    over: Callable[[int, int], bool] = never,
) -> Iterator[list[Step | None]]:
    """Up to `length` tokens after each prompt (at least one token), each below `vocab_size`, a list at a time with one
    entry for each sample, None where it is over.

    Each sample has a random stream of its own, that of its seed: no other sample changes it. `over(row, token)` is
    called once for each new token, and says whether the sample ends with it.

    When a text is longer than seq_len, the `overflow` is: crop, the model reads the last seq_len tokens anew for each
    token, since each stands at another position; slide, each token sees the last seq_len tokens in each layer; or
    stop, the sample is over. `cache` changes the time only. A model that sees the future has none.
    Raises UserError for a context that cannot slide.
    """
    check_overflow(model, overflow)
    texts = [list(prompt) for prompt in prompts]
    reading = Reading(model, texts, vocab_size, cache and model.causal, overflow == "slide", attention)
    generators = [stream(seed, "sample") for seed in seeds]
    seen_BV = torch.stack([torch.bincount(torch.tensor(t), minlength=vocab_size) > 0 for t in texts])
    live = list(range(len(texts)))
    for number in range(length):
        if overflow == "stop":
            live = [row for row in live if len(texts[row]) <= model.seq_len]
        if not live:
            return
        out: list[Step | None] = [None] * len(texts)
        reads = reading.read(live, length - number)
        seen_LV = seen_BV if len(live) == len(texts) else seen_BV[live]
        kept_BV = keep(torch.stack([reads[row].logits_V for row in live]), rules, seen_LV)
        for row, kept_V in zip(live, kept_BV, strict=True):
            token, read = choose(kept_V, generators[row]), reads[row]
            texts[row].append(token)
            seen_BV[row, token] = True
            out[row] = Step(
                number=number,
                phase="decode" if number else "prefill",
                new=read.new,
                cache_tokens=read.cache_tokens,
                cache_bytes=read.cache_bytes,
                context_start=read.start,
                logits_V=read.logits_V,
                kept_V=kept_V,
                token=token,
                attention=read.attention,
            )
        live = [row for row in live if not over(row, texts[row][-1])]
        yield out


@dataclass(frozen=True)
class Read:
    """What reading a text gave: see Step."""

    logits_V: Tensor
    new: int
    start: int
    cache_tokens: int
    cache_bytes: int
    attention: list[Tensor] | None


class Reading:
    """Texts that grow side by side, what a model has kept of them, and what it says comes next."""

    def __init__(
        self, model: GPT, texts: list[list[int]], vocab_size: int, keeps: bool, slides: bool, attention: bool
    ) -> None:
        """`keeps`: the cache outlives a call."""
        self.model, self.texts, self.vocab_size = model, texts, vocab_size
        self.keeps, self.slides, self.attention = keeps, slides, attention
        self.cache: KVCache | None = None
        self.bytes = 0  # of a token in it
        self.rows: list[int] = []  # of the texts in the cache
        self.room = 0  # for tokens, padding among them; means nothing where the cache slides

    def read(self, rows: list[int], left: int) -> dict[int, Read]:
        """The rows' texts, of which all but the last token have been read before. `left`: tokens to come, at most.

        No context is left open in between: who uses the generator `steps` computes what he likes.
        """
        fit = [row for row in rows if self.slides or (self.keeps and len(self.texts[row]) <= self.model.seq_len)]
        # The others stand at new positions, or nothing is kept of them. Texts of one length are read together.
        others = sorted(set(rows) - set(fit), key=lambda row: len(self.context(row)))
        # To change the mode and back takes as long as a small model takes for a token.
        mode = evaluating(self.model) if self.model.training else contextlib.nullcontext()
        with mode, torch.inference_mode():
            out = self.go_on(fit, left) if fit else {}
            for _, group in groupby(others, key=lambda row: len(self.context(row))):
                same = list(group)
                out |= self.forward(same, [self.context(row) for row in same])
        return out

    def context(self, row: int) -> list[int]:
        return self.texts[row][-self.model.seq_len :]

    def go_on(self, rows: list[int], left: int) -> dict[int, Read]:
        """With a cache: what it has not read yet."""
        if self.cache is not None and rows != self.rows:  # some are over
            self.cache.select(
                torch.tensor([self.rows.index(row) for row in rows], device=self.model.embed.weight.device)
            )
        self.rows = rows
        if self.cache is None or (not self.slides and self.cache.length == self.room):
            # Full with texts that fit: shorter ones beside a longer one, which has left. They begin later than it did.
            longest = max(len(self.texts[row]) for row in rows)
            padding = [longest - len(self.texts[row]) for row in rows]
            self.room = min(longest + left, self.model.seq_len)
            length = None if self.slides else self.room
            self.cache = self.model.make_cache(len(rows), length, padding=padding, slide=self.slides)
            self.bytes = bytes_per_token(self.cache)
            new = [[0] * pad + self.texts[row] for pad, row in zip(padding, rows, strict=True)]
        else:
            new = [self.texts[row][-1:] for row in rows]
        out = self.forward(rows, new, self.cache)
        if not self.keeps:
            self.cache = None
        return out

    def forward(self, rows: list[int], new: list[list[int]], cache: KVCache | None = None) -> dict[int, Read]:
        """The model reads the `new` tokens, at most seq_len at once."""
        idx_BT = torch.tensor(new, device=self.model.embed.weight.device)
        heard: dict[str, list[Tensor]] = {}
        with contextlib.ExitStack() as stack:
            if self.attention:
                heard = stack.enter_context(listening(self.model, "pattern"))
            for part_BT in idx_BT.split(self.model.seq_len, dim=1):
                x_BTC = self.model.hidden(part_BT, cache)
            logits_BV = self.model.unembed(x_BTC[:, -1])[:, : self.vocab_size].float().cpu()
        kept = cache if self.keeps else None
        out = {}
        for b, (row, tokens) in enumerate(zip(rows, new, strict=True)):
            length = len(self.texts[row])
            visible = min(length, self.model.seq_len)
            patterns = [last_row(pattern_BHTS[b], visible) for pattern_BHTS in heard.get("pattern", [])]
            out[row] = Read(
                logits_V=logits_BV[b],
                new=min(len(tokens), length),  # what pads a row is no token
                start=length - visible,
                cache_tokens=visible if kept else 0,
                cache_bytes=visible * self.bytes if kept else 0,
                attention=patterns if self.attention else None,
            )
        return out


def bytes_per_token(cache: KVCache) -> int:
    """Bytes of one token's keys and values in all layers."""
    kept = [kept_BGSD for layer in cache.layers for kept_BGSD in (layer.k_BGSD, layer.v_BGSD)]
    return sum(t_BGSD.shape[1] * t_BGSD.shape[3] * t_BGSD.element_size() for t_BGSD in kept)


def last_row(pattern_HTS: Tensor, visible: int) -> Tensor:
    """pattern_HS of the last query over the last `visible` keys; a layer without heads has none to tell them from."""
    if not len(pattern_HTS):
        return torch.empty(0, visible)
    return pattern_HTS[:, -1, -visible:].float().cpu()
