"""The weights of a model with fewer heads, cut out of those of one that has them and more.

Axes: C dim, H heads of a layer, G its key/value heads, D head_dim (of values: Dv).
"""

from __future__ import annotations

import torch
from torch import Tensor

from toymha.config import Config


def shrink(weights: dict[str, Tensor], before: Config, after: Config) -> dict[str, Tensor]:
    """`weights` of a model by `before`, as a model by `after` has them, which differs in `kept_heads` alone.

    Its logits are those of the larger model while the other heads write nothing. A key/value head goes with the last
    query head that reads it; the biases of W_o stay. Raises ValueError for a head that `before` has not.
    """
    out = dict(weights)
    for layer in range(before.n_layer):
        old, new = before.heads_of(layer), after.heads_of(layer)
        if missing := sorted(set(new) - set(old)):
            raise ValueError(f"layer {layer} has no head {missing[0]}; it has {list(old)}")
        at = f"blocks.{layer}."
        if new:
            _cut_layer(out, at + "attn.", before, after, layer)
        elif old:
            _empty_layer(out, at, after)
    return out


def _cut_layer(out: dict[str, Tensor], at: str, before: Config, after: Config, layer: int) -> None:
    """Of W_q and W_o what belongs to the heads that stay, of W_k and W_v what these read."""
    heads = [before.heads_of(layer).index(h) for h in after.heads_of(layer)]
    groups = [before.kv_heads_of(layer).index(g) for g in after.kv_heads_of(layer)]
    queries = [0] if after.tied_heads else heads
    for name, which, width in (("w_q", queries, after.D), ("w_k", groups, after.D), ("w_v", groups, after.Dv)):
        for kind in ("weight", "bias"):
            if (key := f"{at}{name}.{kind}") in out:
                out[key] = _blocks(out[key], which, width, 0)
    if (key := f"{at}w_o.weight") in out:
        out[key] = _blocks(out[key], heads, after.Dv, 1)


def _blocks(x: Tensor, which: list[int], width: int, axis: int) -> Tensor:
    """Blocks of `width` along an axis, those in `which`."""
    return x.unflatten(axis, (-1, width)).index_select(axis, torch.tensor(which)).flatten(axis, axis + 1)


def _empty_layer(out: dict[str, Tensor], at: str, after: Config) -> None:
    """No heads: the bias of W_o is all that is left, and nobody reads the norm before them in pre-LN."""
    bias = out.get(f"{at}attn.w_o.bias")
    unread = (f"{at}attn.", f"{at}norm_attn.") if after.norm_position == "pre" else (f"{at}attn.",)
    for key in [k for k in out if k.startswith(unread)]:
        del out[key]
    if bias is not None:
        out[f"{at}attn.bias"] = bias
