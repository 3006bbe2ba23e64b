"""The encoder-decoder of Vaswani et al. 2017, figure 1: an encoder reads the source, a decoder writes the target.

Axes: B batch, S source positions, T target positions, C dim, V vocabulary, which source and target share.
"""

from __future__ import annotations

from torch import Tensor, nn

from toymha.config import Config
from toymha.model.cache import KVCache, LayerCache, PairCache
from toymha.model.gpt import GPT, Block, Transformer, make_norm
from toymha.model.parts import at_hand
from toymha.schema import UserError


class Seq2Seq(Transformer):
    """A source and the beginning of its target -> logits of the target's next token, at every position.

    The encoder's blocks see the whole source, the decoder's the past of the target and, through cross-attention, what
    the encoder made of the source. With cross_attention=false the encoder is there, and nobody hears it.
    """

    def __init__(self, c: Config, vocab_size: int) -> None:
        """`vocab_size`: what the data has; `c.vocab_size` may be larger."""
        super().__init__(c, vocab_size)
        self.crosses, pre = c.crosses, c.norm_position == "pre"
        self.encoder = nn.ModuleList(Block(c, layer, causal=False) for layer in range(c.n_encoder_layer or 0))
        self.norm_encoder = make_norm(c) if pre else nn.Identity()
        self.blocks = nn.ModuleList(Block(c, layer, cross=self.crosses) for layer in range(c.n_layer))
        self.norm = make_norm(c) if pre else nn.Identity()
        self.initialise(c)
        at_hand(self)

    def forward(self, source_BS: Tensor, idx_BT: Tensor) -> Tensor:
        """source_BS (int64, -1 where a source has ended), idx_BT (int64; S and T at most seq_len) -> logits_BTV."""
        return self.unembed(self.continued(idx_BT, [None] * len(self.blocks), 0, *self.encode(source_BS)))

    def encode(self, source_BS: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
        """source_BS -> k_BGSD and v_BGSD for each layer's cross-attention (none without), and seen_BS."""
        seen_BS = source_BS >= 0
        if not self.crosses:
            return [], seen_BS
        x_BSC, place = self.read(source_BS.clamp(min=0))
        for block in self.encoder:
            x_BSC = block(x_BSC, place._replace(seen_BS=seen_BS))
        memory_BSC = self.norm_encoder(x_BSC)
        return [block.cross.keys_values(memory_BSC, place) for block in self.blocks], seen_BS  # type: ignore[operator, union-attr]

    def decode(self, idx_BT: Tensor, cache: PairCache) -> Tensor:
        """idx_BT, which continue the target tokens in the cache -> logits_BTV. Raises UserError when it is full."""
        cache.past.check(idx_BT)
        x_BTC = self.continued(idx_BT, cache.past.layers, cache.length, cache.cross, cache.seen_BS)
        cache.past.length += idx_BT.shape[1]
        return self.unembed(x_BTC)

    def continued(
        self,
        idx_BT: Tensor,
        layers: list[LayerCache] | list[None],
        past: int,
        cross: list[tuple[Tensor, Tensor]],
        seen_BS: Tensor,
    ) -> Tensor:
        """The decoder: target tokens from number `past` on -> the stream after its last norm, x_BTC."""
        x_BTC, place = self.read(idx_BT, past)
        for i, block in enumerate(self.blocks):
            x_BTC = block(x_BTC, place, layers[i], (cross[i], seen_BS) if self.crosses else None)
        return self.norm(x_BTC)

    def make_cache(self, source_BS: Tensor, length: int | None = None) -> PairCache:
        """Reads the sources; room for `length` target tokens of each (seq_len by default).

        Raises UserError for a source or a target that is longer than the model has positions.
        """
        if not self.causal:
            raise UserError("causal=false: each new token changes what earlier ones see, so nothing can be cached")
        length = self.seq_len if length is None else length
        for what, n in (("source", source_BS.shape[1]), ("target", length)):
            if n > self.seq_len:
                raise UserError(f"a {what} of {n} tokens is longer than the model's context, seq_len={self.seq_len}")
        cross, seen_BS = self.encode(source_BS)
        return PairCache(KVCache(self.cache_of(self.blocks, len(source_BS), length)), cross, seen_BS)


def make_model(c: Config, vocab_size: int) -> GPT | Seq2Seq:
    """The model of a configuration, with its first weights. `vocab_size`: what the data has."""
    return GPT(c, vocab_size) if c.n_encoder_layer is None else Seq2Seq(c, vocab_size)
