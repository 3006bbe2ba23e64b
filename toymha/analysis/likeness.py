"""How alike heads are, in what they look at and in what comes of it, and how many different ones a layer has.

Axes: B sequences, T query positions, S key positions, N heads of a model (all layers), H of one layer, P positions of
all sequences, D width of a head's output z.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from toymha.analysis.capture import capture, heads_of
from toymha.analysis.results import Likeness
from toymha.model.gpt import GPT
from toymha.schema import UserError

CLOSE = 0.2  # Jensen-Shannon distance up to which heads of one layer are nearly the same
LONGEST = 128  # tokens that are read of each sequence: patterns grow with the square
AT_ONCE = 1024  # tokens in one forward pass; it changes no result


def likeness(model: GPT, x_BT: Tensor) -> Likeness:
    """Of all heads, on the first LONGEST tokens of each of these sequences (int64, T of 2 or more).

    pattern: 1 - the mean Jensen-Shannon distance of two heads' rows. z: linear CKA over all positions. clusters: groups
    of two or more heads of one layer, by average linkage (Sokal & Michener 1958) cut at a distance of CLOSE. effective:
    see `effective_number`; 0 for a layer without heads. The first row is left out, where a causal head has no choice.
    Raises UserError for shorter sequences.
    """
    heads, x_BT = heads_of(model), x_BT[:, :LONGEST]
    B, T = x_BT.shape
    N = len(heads)
    if T < 2:
        raise UserError(f"seq_len={T}: with one token there is nothing to choose from; heads are compared from 2 on")
    distance_NN, divergence_NN = torch.zeros(2, N, N, dtype=torch.float64)
    outputs: list[Tensor] = []
    for part_BT in x_BT.split(max(1, AT_ONCE // T)):
        heard = capture(model, part_BT, "pattern", "z")
        pattern_NBTS = torch.cat([p.transpose(0, 1)[:, :, 1:].float() for p in heard["pattern"]])
        distances, divergences = jensen_shannon(pattern_NBTS)
        distance_NN += distances * (len(part_BT) / B)
        divergence_NN += divergences * (len(part_BT) / B)
        outputs.append(torch.cat([z.transpose(1, 2) for z in heard["z"]], 2).flatten(0, 1).cpu().double())
    layers = [[i for i, h in enumerate(heads) if h.layer == layer] for layer in range(len(model.blocks))]
    return Likeness(
        heads=heads,
        pattern=1 - distance_NN,
        z=cka(torch.cat(outputs)),
        clusters=[[heads[i] for i in group] for layer in layers for group in _groups(layer, distance_NN)],
        effective=[effective_number(divergence_NN[layer][:, layer]) for layer in layers],
    )


def jensen_shannon(pattern_NBTS: Tensor) -> tuple[Tensor, Tensor]:
    """(distance_NN, divergence_NN), float64: means over all rows, from 0 (the same) to 1 (no key in common).

    The divergence of two rows p and q is the entropy of their mean less the mean of their entropies, in bits (Lin
    1991); the distance is its square root, which is a metric (Endres & Schindelin 2003). One head at a time against
    those behind it, so the memory is that of the patterns.
    """
    N = len(pattern_NBTS)
    distance_NN, divergence_NN = torch.zeros(2, N, N, dtype=torch.float64)
    bits_NBT = _bits(pattern_NBTS)
    for i in range(N - 1):
        others = slice(i + 1, N)
        mixed_bits = _bits((pattern_NBTS[i] + pattern_NBTS[others]) / 2)
        rows = (mixed_bits - (bits_NBT[i] + bits_NBT[others]) / 2).clamp(0, 1)  # sums round
        divergence_NN[i, others] = divergence_NN[others, i] = rows.mean((1, 2)).cpu().double()
        distance_NN[i, others] = distance_NN[others, i] = rows.sqrt().mean((1, 2)).cpu().double()
    return distance_NN, divergence_NN


def _bits(p: Tensor) -> Tensor:
    """Entropy over the last axis, in bits."""
    return torch.special.entr(p).sum(-1) / math.log(2)


def cka(z_PND: Tensor) -> Tensor:
    """Linear CKA of the outputs of N heads at P positions, cka_NN from 0 to 1: |X'Y|^2 / (|X'X| |Y'Y|) with centred
    columns and Frobenius norms (Kornblith et al. 2019, arXiv:1905.00414, section 3). 1: equal up to rotation, scale
    and shift. An output that never varies is like no other.
    """
    N = z_PND.shape[1]
    z_PND = z_PND - z_PND[:1]  # what never varies is now 0 without rounding
    centred_NPD = (z_PND - z_PND.mean(0)).transpose(0, 1)
    square_NN = z_PND.new_zeros(N, N)
    for i in range(N):
        square_NN[i] = (centred_NPD[i].T @ centred_NPD).square().sum((1, 2))
    norm_N = square_NN.diagonal().sqrt()
    out_NN = torch.where(square_NN > 0, square_NN / (norm_N[:, None] * norm_N), 0.0)
    return out_NN.clamp(0, 1).fill_diagonal_(1)


def effective_number(divergence_HH: Tensor) -> float:
    """exp of the Shannon entropy of the eigenvalues of K / H, K = 1 - divergence (Friedman & Dieng 2022, the Vendi
    score, arXiv:2210.02410): 1 for heads that are all the same, H for heads with no key in common, 0 for none.

    1 - divergence is a positive definite kernel (Martins et al. 2009), so eigenvalues below 0 are rounding.
    """
    H = len(divergence_HH)
    if not H:
        return 0.0
    value_H = torch.linalg.eigvalsh((1 - divergence_HH.double()) / H).clamp(min=0)
    return float(torch.special.entr(value_H).sum().exp())


def _groups(of_layer: list[int], distance_NN: Tensor) -> list[list[int]]:
    """Of these heads of one layer, the groups that are nearly the same."""
    if len(of_layer) < 2:
        return []
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import squareform

    tree = linkage(squareform(distance_NN[of_layer][:, of_layer].numpy(), checks=False), "average")
    labels = fcluster(tree, CLOSE, "distance").tolist()
    groups = [[i for i, own in zip(of_layer, labels) if own == label] for label in dict.fromkeys(labels)]
    return [group for group in groups if len(group) > 1]
