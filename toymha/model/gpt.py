"""The decoder-only language model, and what it shares with the encoder-decoder. B batch, T positions, C dim."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toymha.config import Config
from toymha.model.attention import Attention, CrossAttention, NoHeads
from toymha.model.cache import KVCache, LayerCache
from toymha.model.parts import MLPS, NORMS, Place, Tap, at_hand, dropout, rotary_tables, sinusoid_table
from toymha.schema import UserError
from toymha.seeds import stream


class Block(nn.Module):
    """Attention, then MLP, each added to the residual stream, with the norm before (pre) or after the sum (post).

    A decoder block that reads a source has cross-attention between the two. `after_attn`, `after_cross` and `after_mlp`
    are taps on the stream, behind each sum (in post-LN behind its norm).
    """

    def __init__(self, c: Config, layer: int = 0, causal: bool = True, cross: bool = False) -> None:
        super().__init__()
        self.pre = c.norm_position == "pre"
        self.dropout = c.resid_dropout
        self.attn = Attention(c, layer, causal) if c.heads_of(layer) else NoHeads(c)
        read = self.attn.heads or not self.pre  # nobody reads what is normalised before an attention without heads
        self.norm_attn = make_norm(c) if read else nn.Identity()
        if cross:
            self.norm_cross, self.cross = make_norm(c), CrossAttention(c, layer)
            self.after_cross = Tap()
        self.norm_mlp, self.mlp = make_norm(c), MLPS[c.mlp](c)
        self.after_attn, self.after_mlp = Tap(), Tap()
        at_hand(self)

    def forward(
        self,
        x_BTC: Tensor,
        place: Place,
        cache: LayerCache | None = None,
        source: tuple[tuple[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """x_BTC -> x_BTC. `source`: this layer's keys and values of the encoder's output, and seen_BS of the source."""
        if self.pre:
            x_BTC = self.after_attn(x_BTC + self.drop(self.attn(self.norm_attn(x_BTC), place, cache)))
            if source is not None:
                x_BTC = self.after_cross(x_BTC + self.drop(self.cross(self.norm_cross(x_BTC), place, *source)))
            return self.after_mlp(x_BTC + self.drop(self.mlp(self.norm_mlp(x_BTC))))
        x_BTC = self.after_attn(self.norm_attn(x_BTC + self.drop(self.attn(x_BTC, place, cache))))
        if source is not None:
            x_BTC = self.after_cross(self.norm_cross(x_BTC + self.drop(self.cross(x_BTC, place, *source))))
        return self.after_mlp(self.norm_mlp(x_BTC + self.drop(self.mlp(x_BTC))))

    def drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)


def make_norm(c: Config) -> nn.Module:
    return NORMS[c.norm](c.dim, c.bias, c.norm_eps)


class Transformer(nn.Module):
    """Tokens into the residual stream, and out of it. `embedded`: a tap on the stream before the first block."""

    def __init__(self, c: Config, vocab_size: int) -> None:
        """`vocab_size`: what the data has; `c.vocab_size` may be larger."""
        super().__init__()
        self.seq_len, self.pos, self.causal, self.dropout = c.seq_len, c.pos, c.causal, c.resid_dropout
        self.D, self.theta = c.D, c.theta
        V = c.vocab_size or vocab_size
        self.embed = nn.Embedding(V, c.dim)
        if c.pos == "learned":
            self.embed_pos = nn.Embedding(c.seq_len, c.dim)
        self.embedded = Tap()
        # Tied: the embedding is the head, and there is one tensor, under one name, in memory and on disk.
        self.head = None if c.tie_embeddings else nn.Linear(c.dim, V, bias=False)
        # Fixed tables of positions are buffers, so that they follow the model to its device; they are no weights.
        self.sinusoid_TC: Tensor
        self.cos_TD: Tensor
        self.sin_TD: Tensor
        if c.pos == "sinusoidal":
            self.register_buffer("sinusoid_TC", sinusoid_table(c.seq_len, c.dim), persistent=False)
        if c.pos == "rope":
            self.turn(c.seq_len)

    def turn(self, length: int) -> None:
        """Make the rotary tables long enough for `length` positions."""
        device = self.embed.weight.device
        with torch.inference_mode(False):  # training may read these tables later
            cos_TD, sin_TD = rotary_tables(length, self.D, self.theta)
            self.register_buffer("cos_TD", cos_TD.to(device), persistent=False)
            self.register_buffer("sin_TD", sin_TD.to(device), persistent=False)

    @torch.no_grad()
    def initialise(self, c: Config) -> None:
        """Normal weights, zero biases, such that the first loss is within 0.1 of ln V.

        Pre-LN: GPT-2's recipe (Radford et al. 2019, section 2.3), matrices of std 0.02, those that write to the stream
        0.02 / sqrt(number of them), which is 2 n_layer (with cross-attention 3). Post-LN: std 1 / sqrt(fan-in), so that
        what a sublayer adds is as large as what it is added to; with GPT-2's small weights the stream would stay the
        embedding of the token that was read, and the model would begin by predicting that one. The embedding, which is
        also the head, has std 0.02, less where the model is wide: 0.3 / sqrt(dim), for logits of std 0.3, and in
        post-LN 2.56 / dim for the same reason.

        Each tensor has a random stream of its own name, so that two models with one seed begin with the same values
        wherever their shapes agree.
        """
        post = c.norm_position == "post"
        writes = {"blocks": (3 if c.crosses else 2) * c.n_layer, "encoder": 2 * (c.n_encoder_layer or 0)}
        for name, p in self.named_parameters():
            if name.endswith(".bias"):
                p.zero_()
            if p.ndim < 2:
                continue
            std, stack = 0.02, name.partition(".")[0]
            if stack in ("embed", "head"):
                std = min(std, 0.3 / math.sqrt(c.dim), 2.56 / c.dim if post else std)
            elif stack in writes and post:
                std = p.shape[1] ** -0.5
            elif name.endswith(("w_o.weight", "down.weight")):
                std /= math.sqrt(writes[stack])
            p.copy_(torch.randn(p.shape, generator=stream(c.seed_of_init, "init", name)) * std)

    def read(
        self, idx_BT: Tensor, past: int = 0, padding_B: Tensor | None = None, sliding: bool = False
    ) -> tuple[Tensor, Place]:
        """idx_BT, the tokens from number `past` on -> the stream before the first block, x_BTC, and where they stand.

        Row b begins with padding_B[b] tokens that are none; positions count from the first that is one. Where the
        context slides, rotary positions have no end.
        """
        T, x_BTC = idx_BT.shape[1], self.embed(idx_BT)
        here: slice | Tensor = slice(past, past + T)
        if padding_B is not None:
            at_T = torch.arange(past, past + T, device=idx_BT.device)
            here = (at_T - padding_B[:, None]).clamp(min=0)
        if self.pos == "learned":
            x_BTC = x_BTC + self.embed_pos.weight[here]
        elif self.pos == "sinusoidal":
            # Vaswani et al. 2017, section 3.4: tokens are scaled up to the size of the table.
            x_BTC = x_BTC * math.sqrt(x_BTC.shape[-1]) + self.sinusoid_TC[here]
        rope = None
        if self.pos == "rope":
            if sliding and past + T > len(self.cos_TD):
                self.turn(2 * (past + T))
            rope = (self.cos_TD[here], self.sin_TD[here])
            if padding_B is not None:  # one row of angles for all heads
                rope = (rope[0][:, None], rope[1][:, None])
        x_BTC = self.embedded(dropout(x_BTC, self.dropout, self.training))
        return x_BTC, Place(rope)

    def unembed(self, x_BTC: Tensor) -> Tensor:
        """The residual stream after the last norm -> logits_BTV."""
        return F.linear(x_BTC, (self.head or self.embed).weight)

    def cache_of(self, blocks: nn.ModuleList, batch_size: int, length: int, slide: bool = False) -> list[LayerCache]:
        """An empty cache for each block, in the precision in force: that of autocast where it is on, else that of the
        weights."""
        kind = self.embed.weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.embed.weight.dtype
        window = self.seq_len if slide else None
        return [block.attn.make_cache(batch_size, length, dtype, window) for block in blocks]  # type: ignore[operator, union-attr]


class GPT(Transformer):
    """Tokens -> logits of the next token at every position."""

    def __init__(self, c: Config, vocab_size: int) -> None:
        """`vocab_size`: what the data has; `c.vocab_size` may be larger."""
        super().__init__(c, vocab_size)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.n_layer))
        # Post-LN blocks end in a normalisation already.
        self.norm = make_norm(c) if c.norm_position == "pre" else nn.Identity()
        self.initialise(c)
        at_hand(self)

    def forward(self, idx_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """idx_BT (int64, T <= seq_len) -> logits_BTV.

        With a cache the tokens continue those that it has read (all together at most seq_len, unless it slides), and
        they see these too. Raises UserError when they do not fit.
        """
        return self.unembed(self.hidden(idx_BT, cache))

    def hidden(self, idx_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """idx_BT -> the residual stream after the last block and norm, x_BTC. `cache` as in `forward`."""
        if cache is None:
            x_BTC, place = self.read(idx_BT)
            for block in self.blocks:
                x_BTC = block(x_BTC, place)
            return self.norm(x_BTC)
        cache.check(idx_BT)
        past, T, window = cache.length, idx_BT.shape[1], cache.window
        x_BTC, place = self.read(idx_BT, past, cache.padding_B, window is not None)
        place = place._replace(window=window)
        if cache.padding_B is not None:
            first = 0 if window is None else max(0, past - window + 1)  # of the keys that the layers hand out
            at_S = torch.arange(first, past + T, device=idx_BT.device)
            place = place._replace(seen_BS=at_S >= cache.padding_B[:, None])
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            x_BTC = block(x_BTC, place, layer)
        cache.length += T
        return self.norm(x_BTC)

    def make_cache(
        self, batch_size: int, length: int | None = None, *, padding: Sequence[int] | None = None, slide: bool = False
    ) -> KVCache:
        """An empty cache for `batch_size` sequences of up to `length` tokens (seq_len by default).

        `padding`: how many tokens at the beginning of each row are none, such that prompts of different lengths end
        together; nobody sees them. `slide`: each token sees the last seq_len tokens, in each layer, and there is no end
        (so `length` means nothing); the memory is twice as large. Raises UserError for a model that sees the future,
        for more tokens than the model has positions, and for sliding where positions end.
        """
        if not self.causal:
            raise UserError("causal=false: each new token changes what earlier ones see, so nothing can be cached")
        if slide and self.pos not in ("rope", "none"):
            raise UserError(f"pos={self.pos}: positions end at seq_len={self.seq_len}, so the context cannot slide")
        length = 2 * self.seq_len if slide else self.seq_len if length is None else length
        if length > self.seq_len and not slide:
            raise UserError(f"a cache of {length} tokens is longer than the model's context, seq_len={self.seq_len}")
        at = self.embed.weight.device
        padding_B = torch.tensor(padding, device=at) if padding is not None and any(padding) else None
        return KVCache(self.cache_of(self.blocks, batch_size, length, slide), padding_B)
