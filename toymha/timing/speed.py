"""The speeds that a run notes of itself, and a step of decoding, which `toymha bench` times too.

B batch, P tokens of the prompt.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from toymha.config import Config
from toymha.device import arithmetic
from toymha.evaluate import evaluating
from toymha.model.cache import KVCache
from toymha.model.gpt import GPT
from toymha.seeds import stream
from toymha.timing.machine import timed

REPEATS = 5
WARM_UP = 3  # steps of a process that are slower than all later ones


def steady_tokens_per_s(step_seconds: list[float], tokens_per_step: float) -> float | None:
    """Training speed by the median step, the first ones of the run left out; None where there are no others."""
    steady = step_seconds[WARM_UP:]
    return tokens_per_step / statistics.median(steady) if steady else None


def decoding_speed(c: Config, vocab_size: int, device: torch.device, precision: str) -> float | None:
    """Tokens per second of 8 sequences with a cache of `budget.decode_tokens` tokens; no weight changes it."""
    T = c.budget.decode_tokens
    if not T:
        return None
    longer = GPT(replace(c, seq_len=T), vocab_size).to(device)
    with arithmetic(precision, device):
        return decode_tokens_per_s(longer, 8, T - T // 32, T // 32, device)


def decode_tokens_per_s(model: GPT, batch_size: int, prompt_len: int, new_tokens: int, device: torch.device) -> float:
    """Tokens per second of single-token steps with a cache, after a prompt of random tokens; `device` is the model's.

    Reading the prompt is not counted, nor is the first pass over `new_tokens` steps; the median of the others is.
    prompt_len + new_tokens is at most seq_len. Raises UserError where that, or the model, allows no cache.
    """
    V = model.embed.num_embeddings
    prompt_BT = torch.randint(V, (batch_size, prompt_len), generator=stream(0, "bench")).to(device)
    with evaluating(model), torch.inference_mode():
        cache = model.make_cache(batch_size, prompt_len + new_tokens)
        model.hidden(prompt_BT, cache)  # without the head, whose logits of a long prompt may not fit in memory
        step = timed(decoding_pass(model, cache, prompt_BT[:, -1:], prompt_len, new_tokens), REPEATS, device)
    return batch_size * new_tokens / step.median


def decoding_pass(model: GPT, cache: KVCache, idx_B1: Tensor, P: int, steps: int) -> Callable[[], None]:
    """Work to be timed: `steps` tokens one after the other, idx_B1 the first, after P tokens that the cache keeps."""

    def decode() -> None:
        cache.truncate(P)
        new_B1 = idx_B1
        for _ in range(steps):
            new_B1 = next_token(model, new_B1, cache)

    return decode


def next_token(model: GPT, idx_BT: Tensor, cache: KVCache | None = None) -> Tensor:
    """idx_BT -> the most likely token after it, idx_B1."""
    return model.unembed(model.hidden(idx_BT, cache)[:, -1:]).argmax(-1)
