"""How fast a model is, measured. B batch, T positions."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace

import torch

from toymha.config import Config
from toymha.device import arithmetic
from toymha.evaluate import evaluating
from toymha.model.gpt import GPT
from toymha.seeds import stream

REPEATS = 5
WARM_UP = 3  # steps of a process that are slower than all later ones


def steady_tokens_per_s(step_seconds: list[float], tokens_per_step: int) -> float | None:
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

    Reading the prompt is not counted, nor is the first of the passes over `new_tokens` steps; the median of the others
    is. prompt_len + new_tokens is at most seq_len. Raises UserError where that, or the model, allows no cache.
    """
    V, seconds = model.embed.num_embeddings, []
    prompt_BT = torch.randint(V, (batch_size, prompt_len), generator=stream(0, "bench")).to(device)
    with evaluating(model), torch.inference_mode():
        cache = model.make_cache(batch_size, prompt_len + new_tokens)
        model.hidden(prompt_BT, cache)  # without the head, whose logits of a long prompt may not fit in memory
        for _ in range(1 + REPEATS):
            cache.truncate(prompt_len)
            idx_B1 = prompt_BT[:, -1:]
            synchronize(device)
            began = time.perf_counter()
            for _ in range(new_tokens):
                idx_B1 = model(idx_B1, cache).argmax(-1)
            synchronize(device)
            seconds.append(time.perf_counter() - began)
    return batch_size * new_tokens / statistics.median(seconds[1:])


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was told; a CPU has when the call returns."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
