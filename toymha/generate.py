"""Text from a trained model, one token at a time."""

from __future__ import annotations

import torch
from torch import nn

from toymha.evaluate import evaluating
from toymha.seeds import stream


def sample(
    model: nn.Module, prompt: list[int], length: int, vocab_size: int, seed: int, temperature: float = 0.8
) -> list[int]:
    """`length` tokens that follow the prompt (at least one token), each below `vocab_size`. A random stream of its own.

    The context is the last seq_len tokens, computed anew for each token.
    """
    device = next(model.parameters()).device
    ids, generator = list(prompt), stream(seed, "sample")
    with evaluating(model), torch.inference_mode():
        for _ in range(length):
            x_BT = torch.tensor([ids[-model.seq_len :]], device=device)  # type: ignore[arg-type, operator]
            probs_V = (model(x_BT)[0, -1, :vocab_size].float().cpu() / temperature).softmax(-1)
            ids.append(int(torch.multinomial(probs_V, 1, generator=generator)))
    return ids[len(prompt) :]
