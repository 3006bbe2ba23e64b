"""The decoder-only language model. B batch, T positions, C dim, V vocabulary."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toymha.config import Config
from toymha.model.attention import Attention, NoHeads
from toymha.model.cache import KVCache, LayerCache
from toymha.model.parts import MLPS, NORMS, rotary_tables, sinusoid_table
from toymha.schema import UserError
from toymha.seeds import stream


class Block(nn.Module):
    """Attention, then MLP, each added to the residual stream, with the norm before (pre) or after the sum (post).

    `after_attn` and `after_mlp` are taps on the stream, behind each sum (in post-LN behind its norm).
    """

    def __init__(self, c: Config, layer: int = 0) -> None:
        super().__init__()
        norm = NORMS[c.norm]
        self.pre = c.norm_position == "pre"
        self.dropout = c.resid_dropout
        self.attn = Attention(c, layer) if c.heads_of(layer) else NoHeads(c)
        read = self.attn.heads or not self.pre  # nobody reads what is normalised before an attention without heads
        self.norm_attn = norm(c.dim, c.bias) if read else nn.Identity()
        self.norm_mlp, self.mlp = norm(c.dim, c.bias), MLPS[c.mlp](c)
        self.after_attn, self.after_mlp = nn.Identity(), nn.Identity()

    def forward(self, x_BTC: Tensor, rope: tuple[Tensor, Tensor] | None, cache: LayerCache | None = None) -> Tensor:
        if self.pre:
            x_BTC = self.after_attn(x_BTC + self.drop(self.attn(self.norm_attn(x_BTC), rope, cache)))
            return self.after_mlp(x_BTC + self.drop(self.mlp(self.norm_mlp(x_BTC))))
        x_BTC = self.after_attn(self.norm_attn(x_BTC + self.drop(self.attn(x_BTC, rope, cache))))
        return self.after_mlp(self.norm_mlp(x_BTC + self.drop(self.mlp(x_BTC))))

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class GPT(nn.Module):
    """Tokens -> logits of the next token at every position. `embedded`: a tap on the stream before the first block."""

    def __init__(self, c: Config, vocab_size: int) -> None:
        """`vocab_size`: what the data has; `c.vocab_size` may be larger."""
        super().__init__()
        self.seq_len, self.pos, self.causal, self.dropout = c.seq_len, c.pos, c.causal, c.resid_dropout
        V = c.vocab_size or vocab_size
        self.embed = nn.Embedding(V, c.dim)
        if c.pos == "learned":
            self.embed_pos = nn.Embedding(c.seq_len, c.dim)
        self.embedded = nn.Identity()
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.n_layer))
        # Post-LN blocks end in a normalisation already.
        self.norm = NORMS[c.norm](c.dim, c.bias) if c.norm_position == "pre" else nn.Identity()
        # Tied: the embedding is the head, and there is one tensor, under one name, in memory and on disk.
        self.head = None if c.tie_embeddings else nn.Linear(c.dim, V, bias=False)
        self.make_tables(c)
        self.initialise(c)

    def make_tables(self, c: Config) -> None:
        """Fixed tables of positions, as buffers, so that they follow the model to its device; they are no weights."""
        self.sinusoid_TC: Tensor
        self.cos_TD: Tensor
        self.sin_TD: Tensor
        if c.pos == "sinusoidal":
            self.register_buffer("sinusoid_TC", sinusoid_table(c.seq_len, c.dim), persistent=False)
        if c.pos == "rope":
            cos_TD, sin_TD = rotary_tables(c.seq_len, c.D)
            self.register_buffer("cos_TD", cos_TD, persistent=False)
            self.register_buffer("sin_TD", sin_TD, persistent=False)

    @torch.no_grad()
    def initialise(self, c: Config) -> None:
        """Normal weights, zero biases, such that the first loss is within 0.1 of ln V.

        Pre-LN: GPT-2's recipe (Radford et al. 2019, section 2.3), matrices of std 0.02, those that write to the stream
        0.02 / sqrt(2 n_layer). Post-LN: std 1 / sqrt(fan-in), so that what a sublayer adds is as large as what
        it is added to; with GPT-2's small weights the stream would stay the embedding of the token that was read,
        and the model would begin by predicting that one. The embedding, which is also the head, has std 0.02, less
        where the model is wide: 0.3 / sqrt(dim), for logits of std 0.3, and in post-LN 2.56 / dim for the same reason.

        Each tensor has a random stream of its own name, so that two models with one seed begin with the same values
        wherever their shapes agree.
        """
        post = c.norm_position == "post"
        for name, p in self.named_parameters():
            if name.endswith(".bias"):
                p.zero_()
            if p.ndim < 2:
                continue
            std = 0.02
            if name.startswith(("embed.", "head.")):
                std = min(std, 0.3 / math.sqrt(c.dim), 2.56 / c.dim if post else std)
            elif name.startswith("blocks.") and post:
                std = p.shape[1] ** -0.5
            elif name.endswith(("w_o.weight", "down.weight")):
                std /= math.sqrt(2 * c.n_layer)
            p.copy_(torch.randn(p.shape, generator=stream(c.seed_of_init, "init", name)) * std)

    def forward(self, idx_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """idx_BT (int64, T <= seq_len) -> logits_BTV.

        With a cache the tokens continue those that it has read (all together at most seq_len), and it reads them too.
        Raises UserError when they do not fit.
        """
        return self.unembed(self.hidden(idx_BT, cache))

    def unembed(self, x_BTC: Tensor) -> Tensor:
        """What `hidden` gives -> logits_BTV."""
        return F.linear(x_BTC, (self.head or self.embed).weight)

    def hidden(self, idx_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """idx_BT -> the residual stream after the last block and norm, x_BTC. `cache` as in `forward`."""
        past = 0
        if cache is not None:
            cache.check(idx_BT)
            past = cache.length
        here = slice(past, past + idx_BT.shape[1])
        x_BTC = self.embed(idx_BT)
        if self.pos == "learned":
            x_BTC = x_BTC + self.embed_pos.weight[here]
        elif (
            self.pos == "sinusoidal"
        ):  # Vaswani et al. 2017, section 3.4: tokens are scaled up to the size of the table
            x_BTC = x_BTC * math.sqrt(x_BTC.shape[-1]) + self.sinusoid_TC[here]
        rope = (self.cos_TD[here], self.sin_TD[here]) if self.pos == "rope" else None
        x_BTC = self.embedded(F.dropout(x_BTC, self.dropout, self.training) if self.dropout else x_BTC)
        for i, block in enumerate(self.blocks):
            x_BTC = block(x_BTC, rope, None if cache is None else cache.layers[i])
        return self.norm(x_BTC)

    def make_cache(self, batch_size: int, length: int | None = None) -> KVCache:
        """An empty cache for `batch_size` sequences of up to `length` tokens (seq_len by default).

        In the precision in force: that of autocast where it is on, else that of the weights. Raises UserError for a
        model that sees the future, and for more tokens than the model has positions.
        """
        if not self.causal:
            raise UserError("causal=false: each new token changes what earlier ones see, so nothing can be cached")
        length = self.seq_len if length is None else length
        if length > self.seq_len:
            raise UserError(f"a cache of {length} tokens is longer than the model's context, seq_len={self.seq_len}")
        weight = self.embed.weight
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        return KVCache([block.attn.make_cache(batch_size, length, dtype) for block in self.blocks])  # type: ignore[operator, union-attr]
