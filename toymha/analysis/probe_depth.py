"""What depth does to signal and gradient: the residual stream and the gradient of the loss, block by block.

Xiong et al. 2020, On Layer Normalization in the Transformer Architecture (arXiv:2002.04745): at initialisation, and
with the norm after the residual sum (post-LN), the expected gradients of the parameters near the output are large,
which is why such a model wants its learning rate warmed up; with the norm before the sublayer (pre-LN) they are not.

B sequences, T positions, C dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from toymha.analysis.capture import listening
from toymha.analysis.probe_scale import new_model
from toymha.config import Config
from toymha.evaluate import evaluating
from toymha.model.gpt import GPT

NAMES = {"pre": "pre-LN", "post": "post-LN"}


@dataclass(frozen=True)
class Depth:
    """One model, by depth. stream and stream_gradient begin before block 0, and have L + 1 entries for L blocks.

    loss: nats a token. stream: root mean square of the residual stream's entries. parameters: Euclidean norm of the
    loss's gradient by all parameters of a block. stream_gradient: root mean square, over positions, of the Euclidean
    norm of the gradient of the summed loss by the stream there, so that it does not depend on how many tokens are read.
    """

    loss: float
    stream: list[float]
    parameters: list[float]
    stream_gradient: list[float]

    @property
    def growth(self) -> float:
        """The last block's parameter gradient in shares of the first's; nan where either has none."""
        first, last = self.parameters[0], self.parameters[-1]
        return last / first if first > 0 and last > 0 else math.nan


@dataclass(frozen=True)
class DepthProbe:
    """models: what it is (`pre-LN, untrained`) -> the model by depth."""

    models: dict[str, Depth]


def depth(c: Config, vocab_size: int, x_BT: Tensor, y_BT: Tensor, model: GPT | None = None) -> DepthProbe:
    """New models of this configuration with the norm before and after the sum, of one seed, and beside them `model`,
    the configuration's own with the weights it has come to. y_BT: the token that follows each in x_BT."""
    out = {}
    for position, name in NAMES.items():
        new = new_model(replace(c, norm_position=position), vocab_size, x_BT.device)
        out[f"{name}, untrained"] = by_depth(new, x_BT, y_BT)
    if model is not None:
        out[f"{NAMES[c.norm_position]}, trained"] = by_depth(model, x_BT, y_BT)
    return DepthProbe(out)


def by_depth(model: GPT, x_BT: Tensor, y_BT: Tensor) -> Depth:
    """Measured in evaluation mode, in fp32. The model stays as it is, also its `.grad` and mode; no chance is used."""
    blocks = [list(block.parameters()) for block in model.blocks]
    with evaluating(model), torch.enable_grad(), listening(model, "embedded", "after_mlp") as heard:
        logits_BTV = model(x_BT)
        loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), y_BT.flatten())
        stream = [*heard["embedded"], *heard["after_mlp"]]
        flat = [p for parameters in blocks for p in parameters]
        gradients = iter(torch.autograd.grad(loss, [*stream, *flat]))
    tokens = x_BT.numel()
    # The mean loss gives each position 1 / tokens of its gradient: the summed one, mean-squared, is sqrt(tokens) of it.
    by_stream = [math.sqrt(tokens) * norm([next(gradients)]) for _ in stream]
    by_block = [norm([next(gradients) for _ in parameters]) for parameters in blocks]
    sizes = [x_BTC.detach().float().square().mean().sqrt().item() for x_BTC in stream]
    return Depth(loss.item(), sizes, by_block, by_stream)


def norm(tensors: Sequence[Tensor]) -> float:
    """Euclidean norm of all entries together."""
    return math.sqrt(math.fsum(t.detach().float().square().sum().item() for t in tensors))


def depth_row(model: GPT, x_BT: Tensor, y_BT: Tensor) -> dict[str, float]:
    """For the log of a run: grad_norm/layerN, of block N's parameters, and stream_norm/layerN, root mean square of the
    stream behind it. As `by_depth`, it leaves the model as it is."""
    found = by_depth(model, x_BT, y_BT)
    row = {f"grad_norm/layer{i}": g for i, g in enumerate(found.parameters)}
    return row | {f"stream_norm/layer{i}": s for i, s in enumerate(found.stream[1:])}
