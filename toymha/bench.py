"""How fast a model is, measured. B batch, T positions."""

from __future__ import annotations

import statistics
import time

import torch

from toymha.evaluate import evaluating
from toymha.model.gpt import GPT
from toymha.seeds import stream

REPEATS = 5


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
