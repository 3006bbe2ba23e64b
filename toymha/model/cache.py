"""Keys and values of the tokens a model has read, so that the next token costs one row of queries, not all of them.

Axes: B batch, S positions that are kept, T new positions, G key/value heads that are stored (one where heads are tied),
D head_dim (of values: Dv). Every layer's memory is laid out at once for the longest text it will hold.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from toymha.schema import UserError


class LayerCache:
    """One layer's keys (already turned, where positions are rotary) and values."""

    def __init__(self, k_BGSD: Tensor, v_BGSD: Tensor, window: int | None = None) -> None:
        """The memory itself; its values do not matter. `window`: how many tokens up to its own a token sees; what none
        will see any more makes room."""
        self.k_BGSD, self.v_BGSD, self.window, self.length = k_BGSD, v_BGSD, window, 0

    @property
    def room(self) -> int:
        return self.k_BGSD.shape[2]

    def select(self, rows_B: Tensor) -> None:
        """As `KVCache.select`; only what is filled is copied."""
        for name in ("k_BGSD", "v_BGSD"):
            x_BGSD = getattr(self, name)
            rows_B = rows_B.to(x_BGSD.device)
            if len(rows_B) > len(x_BGSD):
                setattr(self, name, x_BGSD[rows_B])
            else:
                x_BGSD[: len(rows_B), :, : self.length] = x_BGSD[:, :, : self.length][rows_B]
                setattr(self, name, x_BGSD[: len(rows_B)])

    def extend(self, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        """Add T tokens; returns views, k_BGSD and v_BGSD, of all that the T may see: all so far, or with a window
        its last window - 1 tokens, and the T."""
        T = k_BGTD.shape[2]
        past = self.length if self.window is None else min(self.length, self.window - 1)
        if self.window is not None and self.length + T > self.room:  # seldom: the memory holds two windows
            kept = slice(self.length - past, self.length)
            self.k_BGSD[:, :, :past] = self.k_BGSD[:, :, kept].clone()
            self.v_BGSD[:, :, :past] = self.v_BGSD[:, :, kept].clone()
            self.length = past
        new = slice(self.length, self.length + T)
        self.k_BGSD[:, :, new], self.v_BGSD[:, :, new] = k_BGTD, v_BGTD
        self.length = new.stop
        seen = slice(new.start - past, new.stop)
        return self.k_BGSD[:, :, seen], self.v_BGSD[:, :, seen]


class KVCache:
    """The caches of all layers, made by `GPT.make_cache`. For inference: it keeps no gradients."""

    def __init__(self, layers: list[LayerCache], padding_B: Tensor | None = None) -> None:
        """`padding_B`: how many tokens at the beginning of each row are none."""
        self.layers, self.padding_B = layers, padding_B
        self.length = 0  # tokens read so far

    @property
    def window(self) -> int | None:
        return self.layers[0].window

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, filled or not; `cost.kv_bytes` foretells them."""
        return sum(layer.k_BGSD.nbytes + layer.v_BGSD.nbytes for layer in self.layers)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens. Raises ValueError when there are not as many any more."""
        kept = self.layers[0].length
        if not 0 <= length <= self.length or kept < self.length:
            gone = f" of {self.length}" if kept < self.length else ""
            raise ValueError(f"the cache holds {kept} tokens{gone}, so it cannot be cut to {length}")
        self.length = length
        for layer in self.layers:
            layer.length = length

    def select(self, rows_B: Tensor) -> None:
        """Put rows in another order, drop some or repeat some: what a beam search keeps. rows_B: int64 indices."""
        for layer in self.layers:
            layer.select(rows_B)
        if self.padding_B is not None:
            self.padding_B = self.padding_B[rows_B]

    def check(self, idx_BT: Tensor) -> None:
        """Whether these tokens can be added. UserError: the context is full. ValueError: a call that makes no sense."""
        B, T = idx_BT.shape
        rows, _, room, _ = self.layers[0].k_BGSD.shape
        if rows != B:
            raise ValueError(f"the cache holds {rows} sequences, and {B} came")
        if torch.is_grad_enabled():
            raise ValueError("a cache keeps no gradients: use it inside torch.inference_mode()")
        if self.window is not None and self.window < T:
            raise ValueError(f"a sliding cache of {self.window} tokens reads at most as many at once, not {T}")
        if self.window is None and self.length + T > room:
            raise UserError(f"the context is full: {self.length} + {T} tokens, and there is room for {room}")


@dataclass
class PairCache:
    """What the decoder of an encoder-decoder keeps: its own past, which grows, and of each layer the keys and values
    of the source, which are computed once."""

    past: KVCache
    cross: list[tuple[Tensor, Tensor]]  # k_BGSD, v_BGSD of each layer; none without cross-attention
    seen_BS: Tensor  # bool: which source positions are there

    @property
    def length(self) -> int:
        """Target tokens read so far."""
        return self.past.length

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, those of the source included."""
        return self.past.nbytes + sum(k_BGSD.nbytes + v_BGSD.nbytes for k_BGSD, v_BGSD in self.cross)

    def select(self, rows_B: Tensor) -> None:
        """As `KVCache.select`, of the source too."""
        self.past.select(rows_B)
        self.cross = [(k_BGSD[rows_B], v_BGSD[rows_B]) for k_BGSD, v_BGSD in self.cross]
        self.seen_BS = self.seen_BS[rows_B]
