"""Keys and values of the tokens a model has read, so that the next token costs one row of queries, not all of them.

Axes: B batch, S positions read so far, T new positions, G key/value heads that are stored (one where heads are tied),
D head_dim (of values: Dv). Every layer's memory is laid out at once for the longest text it will hold.
"""

from __future__ import annotations

import torch
from torch import Tensor

from toymha.schema import UserError


class LayerCache:
    """One layer's keys (already turned, where positions are rotary) and values."""

    def __init__(self, k_BGSD: Tensor, v_BGSD: Tensor) -> None:
        """The memory itself, with room for S tokens; its values do not matter."""
        self.k_BGSD, self.v_BGSD, self.length = k_BGSD, v_BGSD, 0

    def extend(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Add T tokens; returns views of all keys and values so far, k_BGSD and v_BGSD with S = past + T."""
        new = slice(self.length, self.length + k_BGTD.shape[2])
        self.k_BGSD[:, :, new], self.v_BGSD[:, :, new] = k_BGTD, v_BGTD
        self.length = new.stop
        return self.k_BGSD[:, :, : new.stop], self.v_BGSD[:, :, : new.stop]


class KVCache:
    """The caches of all layers, made by `GPT.make_cache`. For inference: it keeps no gradients."""

    def __init__(self, layers: list[LayerCache]) -> None:
        self.layers = layers

    @property
    def length(self) -> int:
        """Tokens read so far."""
        return self.layers[0].length

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, filled or not; `cost.kv_bytes` foretells them."""
        return sum(layer.k_BGSD.nbytes + layer.v_BGSD.nbytes for layer in self.layers)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens. Raises ValueError when there are not as many."""
        if not 0 <= length <= self.length:
            raise ValueError(f"the cache holds {self.length} tokens, so it cannot be cut to {length}")
        for layer in self.layers:
            layer.length = length

    def check(self, idx_BT: Tensor) -> None:
        """Whether these tokens can be added. UserError: the context is full. ValueError: a call that makes no sense."""
        B, _, room, _ = self.layers[0].k_BGSD.shape
        if len(idx_BT) != B:
            raise ValueError(f"the cache holds {B} sequences, and {len(idx_BT)} came")
        if torch.is_grad_enabled():
            raise ValueError("a cache keeps no gradients: use it inside torch.inference_mode()")
        if self.length + idx_BT.shape[1] > room:
            raise UserError(
                f"the context is full: {self.length} + {idx_BT.shape[1]} tokens, and there is room for {room}"
            )
