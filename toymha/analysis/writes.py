"""How heads talk: what each writes to the residual stream through its block of W_o, and where the logits come from.

B sequences, T positions, P positions that count, C dim, H heads that a layer has, N of the model, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from toymha.analysis.capture import capture, heads_of
from toymha.analysis.losses import over_sequences
from toymha.analysis.results import Head, Write, Writes
from toymha.evaluate import evaluating
from toymha.model.attention import NoHeads
from toymha.model.gpt import GPT
from toymha.model.parts import LayerNorm, RMSNorm

ROOM = 2**24  # numbers that the writes of all heads may take at once: 64 MiB


def writes(model: GPT, x_BT: Tensor, y_BT: Tensor, counted_BT: Tensor) -> Writes:
    """What the heads write over the positions that count; y_BT are the right next tokens.

    Without W_o a head's block is the identity on its own slice of the stream. A logit is less its mean over all tokens,
    which softmax ignores; the contributions of all heads and of all that is in `direct` add up to it. `direct` has the
    embedding, positions where they are added to it, each MLP (with its own biases), and the biases of W_o and of norms.

    Means are over positions, the error is that over sequences. A share is that of the sums over all positions. The
    cosine of two heads is over positions where both write something. Both are nan where there is nothing to compare.
    """
    weight, heads = next(model.parameters()), heads_of(model)
    x_BT, y_BT, counted_BT = (t.to(weight.device) for t in (x_BT, y_BT, counted_BT))
    geometry, count_B = Geometry(model), counted_BT.sum(1).cpu().double()
    sums: dict[Head | str, list[Tensor]] = {}
    unembed_VC = (model.head or model.embed).weight
    size = max(1, ROOM // max(1, len(heads) * x_BT.shape[1] * unembed_VC.shape[1]))
    with evaluating(model), torch.inference_mode():
        for x, y, counted in zip(x_BT.split(size), y_BT.split(size), counted_BT.split(size)):
            seen = capture(model, x, "embedded", "write", "after_attn", "after_mlp")
            geometry.add(seen["write"], counted)
            for part, logit_BT in contributions(model, seen, unembed_VC[y] - unembed_VC.mean(0)).items():
                sums.setdefault(part, []).append((logit_BT * counted).cpu().double().sum(1))
    logits = {part: over_sequences(torch.cat(s), count_B) for part, s in sums.items()}
    norms, shares, bias = geometry.norms(), *geometry.shares()
    return Writes(
        {head: Write(norm, share, logits[head]) for head, norm, share in zip(heads, norms, shares)},
        geometry.cosine(),
        bias,
        {part: logit.value for part, logit in logits.items() if isinstance(part, str)},
    )


class Geometry:
    """Sums over positions, batch by batch, of lengths and products of writes."""

    def __init__(self, model: GPT) -> None:
        N = len(heads_of(model))
        self.biases_C = [bias_of(block.attn) for block in model.blocks]
        self.norm_N, self.positions = torch.zeros(N, dtype=torch.float64), 0
        self.cosine_NN, self.both_NN = (torch.zeros(N, N, dtype=torch.float64) for _ in range(2))
        # by layer: the product of what each head, and last the bias, writes with the sum of all
        self.along = [torch.zeros(len(block.attn.heads) + 1, dtype=torch.float64) for block in model.blocks]  # type: ignore[union-attr, arg-type]

    def add(self, writes: list[Tensor], counted_BT: Tensor) -> None:
        """write_BHTC by layer."""
        by_layer = [write_BHTC.transpose(0, 1)[:, counted_BT] for write_BHTC in writes]
        for layer, write_HPC in enumerate(by_layer):
            bias_C = self.biases_C[layer]
            sum_PC = write_HPC.sum(0) if bias_C is None else write_HPC.sum(0) + bias_C
            along_H = torch.einsum("hpc,pc->h", write_HPC, sum_PC).cpu().double()
            along_bias = along_H.new_zeros(1) if bias_C is None else (sum_PC @ bias_C).sum().cpu().double()[None]
            self.along[layer] += torch.cat((along_H, along_bias))
        write_NPC = torch.cat(by_layer)
        norm_NP = write_NPC.norm(dim=-1)
        unit_NPC = write_NPC / norm_NP.where(norm_NP > 0, 1)[..., None]
        self.cosine_NN += (unit_NPC.flatten(1) @ unit_NPC.flatten(1).T).cpu().double()
        some_NP = (norm_NP > 0).cpu().double()
        self.both_NN += some_NP @ some_NP.T
        self.norm_N += norm_NP.sum(1).cpu().double()
        self.positions += norm_NP.shape[1]

    def norms(self) -> list[float]:
        return (self.norm_N / self.positions).tolist()

    def cosine(self) -> Tensor:
        return (self.cosine_NN / self.both_NN).float()

    def shares(self) -> tuple[list[float], list[float]]:
        """Of all heads, layer by layer, and of the biases. The products with the sum add up to its square."""
        shares = [(along / along.sum()).tolist() for along in self.along]
        return [share for layer in shares for share in layer[:-1]], [layer[-1] for layer in shares]


def contributions(model: GPT, seen: dict[str, list[Tensor]], towards_BTC: Tensor) -> dict[Head | str, Tensor]:
    """What each part adds to the product of the last hidden state with `towards_BTC`: part -> logit_BT.

    Direct logit attribution (Elhage et al. 2021, on the direct paths of a one-layer transformer; logit lens:
    nostalgebraist 2020): the stream is a sum, and a norm whose denominator is held at its actual value is linear in it.
    Instead of carrying each part through the norms that come after it, the direction is carried back through them once:
    <t, A w> = <A^T t, w>.

    With a row of the unembedding for `towards_BTC` the parts add up to that token's logit.

    `seen`: what `capture` heard at embedded, write, after_attn and after_mlp.
    """
    before = [seen["embedded"][0], *seen["after_mlp"]]  # what each block reads, and what the last one leaves
    out: dict[Head | str, Tensor] = {}
    towards_BTC, from_norms_BT = carry_back(model.norm, before[-1], towards_BTC)
    biases_BT = from_norms_BT
    for layer in reversed(range(len(model.blocks))):
        block: Any = model.blocks[layer]
        after_attn_BTC, write_BHTC, bias_C = seen["after_attn"][layer], seen["write"][layer], bias_of(block.attn)
        mlp_BTC = block.mlp(block.norm_mlp(after_attn_BTC) if block.pre else after_attn_BTC)
        if not block.pre:
            towards_BTC, from_norms_BT = carry_back(block.norm_mlp, after_attn_BTC + mlp_BTC, towards_BTC)
            biases_BT = biases_BT + from_norms_BT
        out[f"mlp{layer}"] = (mlp_BTC * towards_BTC).sum(-1)
        if not block.pre:
            summed_BTC = before[layer] + write_BHTC.sum(1) + (0 if bias_C is None else bias_C)
            towards_BTC, from_norms_BT = carry_back(block.norm_attn, summed_BTC, towards_BTC)
            biases_BT = biases_BT + from_norms_BT
        logit_BHT = torch.einsum("bhtc,btc->bht", write_BHTC, towards_BTC)
        out.update({Head(layer, h): logit_BHT[:, i] for i, h in enumerate(block.attn.heads)})
        if bias_C is not None:
            biases_BT = biases_BT + towards_BTC @ bias_C
    T, embedded_BTC = towards_BTC.shape[1], before[0]
    tables = {"learned": lambda: model.embed_pos.weight, "sinusoidal": lambda: model.sinusoid_TC}
    if model.pos in tables:
        positions_TC = tables[model.pos]()[:T]
        out["positions"] = (positions_TC * towards_BTC).sum(-1)
        embedded_BTC = embedded_BTC - positions_TC
    return out | {"embedding": (embedded_BTC * towards_BTC).sum(-1), "biases": biases_BT}


def carry_back(norm: nn.Module, x_BTC: Tensor, towards_BTC: Tensor) -> tuple[Tensor, Tensor]:
    """The direction before a norm that read x_BTC, for one behind it; and the product of its bias with the latter."""
    bias_C = getattr(norm, "bias", None)
    bias_BT = towards_BTC.new_zeros(towards_BTC.shape[:-1]) if bias_C is None else towards_BTC @ bias_C
    return CARRY_BACK[type(norm)](norm, x_BTC, towards_BTC), bias_BT


def _through_layer_norm(norm: Any, x_BTC: Tensor, towards_BTC: Tensor) -> Tensor:
    scaled_BTC = towards_BTC * norm.weight / (x_BTC.var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
    return scaled_BTC - scaled_BTC.mean(-1, keepdim=True)  # taking off the mean is its own transpose


def _through_rms_norm(norm: Any, x_BTC: Tensor, towards_BTC: Tensor) -> Tensor:
    return towards_BTC * norm.weight / (x_BTC.square().mean(-1, keepdim=True) + norm.eps).sqrt()


CARRY_BACK: dict[type, Callable[[Any, Tensor, Tensor], Tensor]] = {
    LayerNorm: _through_layer_norm,
    RMSNorm: _through_rms_norm,
    nn.Identity: lambda _norm, _x_BTC, towards_BTC: towards_BTC,  # behind the last block of post-LN
}


def bias_of(attn: Any) -> Tensor | None:
    """bias_C that an attention adds besides its heads."""
    if isinstance(attn, NoHeads):
        return attn.bias
    return None if attn.w_o is None else attn.w_o.bias
