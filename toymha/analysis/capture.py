"""What happens inside a model while it reads: tensors heard at its taps, and heads turned down or off.

B batch, T query positions, S key positions, H heads that a layer has, D width of a value, C dim, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from toymha.analysis.results import Head
from toymha.evaluate import evaluating, hooked
from toymha.model.gpt import GPT

OF_HEADS = ("scores", "pattern", "z", "write")  # taps of each attention
OF_BLOCKS = ("after_attn", "after_mlp")  # taps of each block, on the residual stream
OF_MODEL = ("embedded",)
TAPS = (*OF_HEADS, *OF_BLOCKS, *OF_MODEL, "logits")


def heads_of(model: GPT) -> list[Head]:
    """All heads that the model has, layer by layer."""
    return [Head(layer, h) for layer, block in enumerate(model.blocks) for h in block.attn.heads]  # type: ignore[union-attr]


def capture(model: GPT, idx_BT: Tensor, *taps: str) -> dict[str, list[Tensor]]:
    """One forward pass without dropout and gradients. tap -> a tensor for each layer, or one for embedded and logits.

    scores_BHTS (scaled, not masked), pattern_BHTS, z_BHTD, write_BHTC, after_attn_BTC, after_mlp_BTC, embedded_BTC,
    logits_BTV. A layer without heads has H = 0. torch refuses to change them in place outside of inference mode.
    """
    with evaluating(model), torch.inference_mode(), listening(model, *taps) as heard:
        logits_BTV = model(idx_BT)
        if "logits" in taps:
            heard["logits"] = [logits_BTV]
    return heard


@contextlib.contextmanager
def listening(model: GPT, *taps: str) -> Iterator[dict[str, list[Tensor]]]:
    """The same for whatever forward passes run inside, the last of which is kept; gradients flow, dropout acts as the
    model's mode has it. Raises KeyError for a tap that does not exist."""
    heard: dict[str, list[Tensor]] = {}
    modules: dict[tuple[str, int], nn.Module] = {}
    for tap in taps:
        if tap not in TAPS:
            raise KeyError(f"no tap {tap}; there are {', '.join(TAPS)}")
        if tap in OF_MODEL:
            heard[tap] = [torch.empty(0)]
            modules[tap, 0] = getattr(model, tap)
        elif tap != "logits":
            heard[tap] = [torch.empty(0)] * len(model.blocks)
    for layer, block in enumerate(model.blocks):
        for tap in taps:
            if tap in OF_BLOCKS:
                modules[tap, layer] = getattr(block, tap)
            elif tap in OF_HEADS and block.attn.heads:  # type: ignore[union-attr]
                modules[tap, layer] = getattr(block.attn, tap)
    headless = [layer for layer, block in enumerate(model.blocks) if not block.attn.heads]  # type: ignore[union-attr]

    def hear(where: tuple[str, int], out: Tensor) -> None:
        heard[where[0]][where[1]] = out

    def fill(_name: str, x_BTC: Tensor) -> None:
        B, T, C = x_BTC.shape
        for layer in headless:
            attn: Any = model.blocks[layer].attn
            shapes = {"scores": (T, T), "pattern": (T, T), "z": (T, attn.Dv), "write": (T, C)}
            for tap in set(taps) & shapes.keys():
                heard[tap][layer] = x_BTC.new_empty(B, 0, *shapes[tap])

    with hooked(modules, hear), hooked({"embedded": model.embedded} if headless else {}, fill):
        yield heard


@contextlib.contextmanager
def gated(model: GPT, gates: dict[int, Tensor]) -> Iterator[None]:
    """Inside, the output z of each head is multiplied by its gate. layer -> gates of shape (H,), or (B, H) with one for
    each sequence; they may ask for gradients."""
    handles = []
    try:
        for layer, gate in gates.items():
            attn: Any = model.blocks[layer].attn
            if gate.shape[-1] != len(attn.heads):
                raise ValueError(f"layer {layer} has {len(attn.heads)} heads, and {gate.shape[-1]} gates came")
            if attn.heads:
                handles.append(attn.z.register_forward_hook(_times(gate)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _times(gate: Tensor) -> Any:
    return lambda _module, _inputs, z_BHTD: z_BHTD * gate[..., None, None].to(z_BHTD.device)


def without(model: GPT, heads: Iterable[Head]) -> contextlib.AbstractContextManager[None]:
    """Inside, these heads write nothing. Raises ValueError for one that the model does not have."""
    gone = set(heads)
    if missing := gone - set(heads_of(model)):
        raise ValueError(f"the model has no {', '.join(sorted(h.name for h in missing))}")
    gates = {
        layer: torch.tensor([float(Head(layer, h) not in gone) for h in block.attn.heads])  # type: ignore[union-attr]
        for layer, block in enumerate(model.blocks)
        if any(head.layer == layer for head in gone)
    }
    return gated(model, gates)
