"""Text from a trained model, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from toymha.evaluate import evaluating
from toymha.model.cache import KVCache
from toymha.model.gpt import GPT
from toymha.seeds import stream


def sample(
    model: GPT, prompt: list[int], length: int, vocab_size: int, seed: int, temperature: float = 0.8
) -> list[int]:
    """`length` tokens that follow the prompt (at least one token), each below `vocab_size`. A random stream of its own.

    The context is the last seq_len tokens.
    """
    ids, generator = list(prompt), stream(seed, "sample")
    with evaluating(model), torch.inference_mode():
        cache = model.make_cache(1, min(len(prompt) + length, model.seq_len)) if model.causal else None
        for _ in range(length):
            logits_V = next_logits(model, ids, cache)[:vocab_size]
            probs_V = (logits_V.float().cpu() / temperature).softmax(-1)
            ids.append(int(torch.multinomial(probs_V, 1, generator=generator)))
    return ids[len(prompt) :]


def next_logits(model: GPT, ids: list[int], cache: KVCache | None) -> Tensor:
    """logits_V of the token after `ids`. The cache has read a beginning of them, and then all.

    Past seq_len the context begins at a later token, which changes every position: it is computed anew for each token.
    """
    if cache is None or len(ids) > model.seq_len:
        new, cache = ids[-model.seq_len :], None
    else:
        new = ids[cache.length :]
    return model(torch.tensor([new], device=model.embed.weight.device), cache)[0, -1]
