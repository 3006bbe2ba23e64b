"""Multi-head attention (Vaswani et al. 2017, section 3.2.2) with the switches that the laboratory turns.

Axes: B batch, T query positions, S key positions, C dim, H query heads, G key/value heads, R = n_head / n_kv_head query
heads that share one, D head_dim (of values: Dv). Query head h reads key/value head h // R. Without a cache S = T; with
one the T queries are the last of S = past + T positions; in cross-attention the S positions are those of the source. A
pruned layer has fewer heads: its axes H and G are those that are left, in the order of their old numbers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toymha.config import Config
from toymha.model.cache import LayerCache
from toymha.model.parts import Place, Tap, at_hand, dropout, rotate, visible

NOWHERE = Place()
KV = tuple[Tensor, Tensor]  # k_BGSD, v_BGSD
FEW = 8  # tokens: so few are projected by three products
SHORT = 256  # positions: so few are attended explicitly where fp32 products go through oneDNN
SHORT_IN_BF16 = 512  # and so few in bf16, where a gradient is wanted


class Attention(nn.Module):
    """softmax(q k^T x scale + mask) v for each head, heads side by side, then W_o.

    `scores`, `pattern`, `z` and `write` are taps. A forward hook on one of them sees, and may replace, scores_BHTS
    (scaled, before mask and softmax), pattern_BHTS (probabilities), z_BHTD (each head's output) or write_BHTC (what
    each head adds to the residual stream). Without a hook on scores or pattern the fused kernel may be
    used, which never builds those tensors; without one on write, W_o is a single product for all heads.
    """

    def __init__(self, c: Config, layer: int = 0, causal: bool = True) -> None:
        """`causal`: whether the future is hidden, unless the configuration says that it is not."""
        super().__init__()
        self.heads, stored = c.heads_of(layer), c.kv_heads_of(layer)
        self.H, self.D, self.Dv, self.n_head = len(self.heads), c.D, c.Dv, c.n_head
        self.causal, self.dropout, self.tied = causal and c.causal, c.attn_dropout, c.tied_heads
        self.scale = {"head_dim": c.D**-0.5, "dim": c.dim**-0.5, "none": 1.0}[c.score_scale]
        # Tied heads own one slice of each matrix; the others of H are that slice again.
        q_heads, self.kv_heads = 1 if c.tied_heads else self.H, len(stored)
        self.kv_of = [0 if c.tied_heads else stored.index(h * c.G // c.n_head) for h in self.heads]
        size = self.H // self.kv_heads
        self.even = [h // size for h in range(self.H)] == self.kv_of  # groups of one size
        self.w_q = nn.Linear(c.dim, q_heads * self.D, bias=c.qkv_bias)
        self.w_k = nn.Linear(c.dim, self.kv_heads * self.D, bias=c.qkv_bias)
        self.w_v = nn.Linear(c.dim, self.kv_heads * self.Dv, bias=c.qkv_bias)
        self.w_o = nn.Linear(self.H * self.Dv, c.dim, bias=c.bias) if c.w_o else None
        self.scores, self.pattern, self.z, self.write = (Tap() for _ in range(4))
        at_hand(self)

    def forward(self, x_BTC: Tensor, place: Place = NOWHERE, cache: LayerCache | None = None) -> Tensor:
        """x_BTC -> what this layer adds to the residual stream. `cache`: what came before; it grows by T."""
        q_BHTD, k_BGSD, v_BGSD = self.project(x_BTC)
        if place.rope is not None:
            q_BHTD, k_BGSD = rotate(q_BHTD, *place.rope), rotate(k_BGSD, *place.rope)
        if cache is not None:
            k_BGSD, v_BGSD = cache.extend(k_BGSD, v_BGSD)
        return self.attend(q_BHTD, k_BGSD, v_BGSD, place)

    def attend(self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, place: Place) -> Tensor:
        """Queries, keys and values -> what this layer adds to the residual stream.

        A query that may see no key at all gives zeros, and finite gradients.
        """
        if self.tied:
            q_BHTD = q_BHTD.expand(-1, self.H, -1, -1)
        if not self.even:  # what pruning left of the groups has several sizes
            k_BGSD, v_BGSD = k_BGSD[:, self.kv_of], v_BGSD[:, self.kv_of]
        attend = self.fused if self.can_fuse(q_BHTD.shape[2], k_BGSD.shape[2]) else self.explicit
        return self.merge(self.z(attend(q_BHTD, k_BGSD, v_BGSD, place)))

    def merge(self, z_BHTD: Tensor) -> Tensor:
        """The heads' outputs -> what the layer adds to the stream, by head where somebody listens."""
        if self.write._forward_hooks:
            out_BTC = self.write(self.writes(z_BHTD)).sum(1)
            return out_BTC if self.w_o is None or self.w_o.bias is None else out_BTC + self.w_o.bias
        merged_BTHD = z_BHTD.transpose(1, 2)
        if self.w_o is not None:
            return self.w_o(merged_BTHD.flatten(2))
        if self.n_head > self.H:  # each head writes to its own slice of the stream, and some are gone
            B, T = merged_BTHD.shape[:2]
            all_BTHD = merged_BTHD.new_zeros(B, T, self.n_head, self.Dv)
            all_BTHD[:, :, list(self.heads)] = merged_BTHD
            merged_BTHD = all_BTHD
        return merged_BTHD.flatten(2)

    def writes(self, z_BHTD: Tensor) -> Tensor:
        """write_BHTC: each head's output through its own block of W_o (Elhage et al. 2021, section on the residual
        stream). They add up to the layer's output less the bias of W_o."""
        if self.w_o is not None:
            return torch.einsum("bhtd,chd->bhtc", z_BHTD, self.w_o.weight.unflatten(1, (self.H, self.Dv)))
        B, H, T, _ = z_BHTD.shape
        write_BHTHD = z_BHTD.new_zeros(B, H, T, self.n_head, self.Dv)
        write_BHTHD[:, list(range(H)), :, list(self.heads)] = z_BHTD.transpose(0, 1)
        return write_BHTHD.flatten(3)

    def project(self, x_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x_BTC -> q_BHTD, k_BGSD, v_BGSD (one head each where heads are tied)."""
        w_q, w_k, w_v = self.w_q, self.w_k, self.w_v
        if x_BTC.shape[0] * x_BTC.shape[1] <= FEW:
            q, k, v = w_q(x_BTC), w_k(x_BTC), w_v(x_BTC)
            return self.split_heads(q, self.D), self.split_heads(k, self.D), self.split_heads(v, self.Dv)
        # One wide product is faster than three narrow ones; laying the weights side by side costs next to nothing, but
        # for a few tokens as much as the product.
        weight = torch.cat((w_q.weight, w_k.weight, w_v.weight))
        bias = None if w_q.bias is None else torch.cat((w_q.bias, w_k.bias, w_v.bias))
        qkv = F.linear(x_BTC, weight, bias)
        q, k, v = qkv.split((w_q.out_features, w_k.out_features, w_v.out_features), dim=-1)
        return self.split_heads(q, self.D), self.split_heads(k, self.D), self.split_heads(v, self.Dv)

    @staticmethod
    def split_heads(x: Tensor, width: int) -> Tensor:
        """(B, T, heads x width) -> (B, heads, T, width)."""
        return x.unflatten(-1, (-1, width)).transpose(1, 2)

    def can_fuse(self, T: int, S: int) -> bool:
        """Whether nobody listens to what the fused kernel never builds, and no dropout is to be drawn on a CPU, where
        all threads have one generator: there the two are about equally fast.

        And not where a CPU's kernel is slow. Its many small products go through oneDNN in bf16, and in fp32 where
        `device.choose_products` says so. In fp32 a step took twice as long with it at 64 positions. In bf16 it is its
        backward pass: on a CPU with AMX the passes of a model with 4 layers took 1.3 (one thread, 256 positions) to 3.8
        times as long (two threads, 64 positions), at 1,024 about as long, and there it saves the T x T pattern. The
        explicit way rounds scores to bf16 before the softmax, which the kernel does not: see the test of both errors.
        """
        draws = self.dropout and self.training
        if torch.is_autocast_enabled("cpu"):
            short = SHORT_IN_BF16 if torch.is_grad_enabled() else 0
        else:
            short = SHORT if torch.get_float32_matmul_precision() == "medium" else 0
        many_small = T > 1 and short >= S
        return not (self.tapped or ((draws or many_small) and self.w_q.weight.is_cpu))

    @property
    def tapped(self) -> bool:
        """Whether somebody listens to what the fused kernel never builds."""
        return bool(self.scores._forward_hooks or self.pattern._forward_hooks)

    def fused(self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, place: Place = NOWHERE) -> Tensor:
        """The same in one kernel, which knows the causal mask and needs no T x S tensor."""
        attend = F.scaled_dot_product_attention
        p = self.dropout if self.training else 0.0
        B, H, T, D = q_BHTD.shape
        G, S = k_BGSD.shape[1:3]
        if T == S and place.seen_BS is None and place.window is None:
            return attend(q_BHTD, k_BGSD, v_BGSD, dropout_p=p, is_causal=self.causal, scale=self.scale, enable_gqa=True)
        if T == 1:
            # The newest token sees everything that is there. Where heads share keys the kernel would read these once
            # for each head; the R query heads of a group as R queries of one head read them once, which is the point.
            q_BGRD = q_BHTD.reshape(B, G, H // G, D)
            seen = None if place.seen_BS is None else place.seen_BS[:, None, None, :]
            z_BGRD = attend(q_BGRD, k_BGSD, v_BGSD, attn_mask=seen, dropout_p=p, scale=self.scale)
            return z_BGRD.reshape(B, H, 1, self.Dv)
        # The kernel's own mask is for queries that start where the keys start: these are the last T of S.
        mask = visible(T, S, self.causal, place, q_BHTD.device)
        return attend(q_BHTD, k_BGSD, v_BGSD, attn_mask=mask, dropout_p=p, scale=self.scale, enable_gqa=True)

    def explicit(self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, place: Place = NOWHERE) -> Tensor:
        """The equation, step by step; every tensor of it can be tapped."""
        k_BHSD, v_BHSD = (self.share(x) for x in (k_BGSD, v_BGSD))
        scores_BHTS = self.scores((q_BHTD * self.scale) @ k_BHSD.transpose(-2, -1))
        T, S = scores_BHTS.shape[-2:]
        seen = visible(T, S, self.causal, place, scores_BHTS.device)
        if seen is None:
            pattern_BHTS = scores_BHTS.softmax(dim=-1)
        else:
            blind = None if place.seen_BS is None else ~seen.any(-1, keepdim=True)  # queries that may see nothing
            hidden = ~seen if blind is None else ~(seen | blind)
            # Adding is ten times as fast as masked_fill of the scores on a CPU.
            bias = torch.zeros(seen.shape, dtype=scores_BHTS.dtype, device=seen.device)
            pattern_BHTS = (scores_BHTS + bias.masked_fill_(hidden, float("-inf"))).softmax(dim=-1)
            pattern_BHTS = pattern_BHTS if blind is None else pattern_BHTS * ~blind
        pattern_BHTS = self.pattern(pattern_BHTS)
        return dropout(pattern_BHTS, self.dropout, self.training) @ v_BHSD

    def share(self, x_BGSD: Tensor) -> Tensor:
        """Each key/value head for the R query heads that read it: (B, G, S, D) -> (B, H, S, D)."""
        return x_BGSD.repeat_interleave(self.H // x_BGSD.shape[1], dim=1)

    def make_cache(self, batch_size: int, length: int, dtype: torch.dtype, window: int | None = None) -> LayerCache:
        """Room for the keys and values of `length` tokens, on the device of the weights."""
        device = self.w_k.weight.device
        k_BGSD, v_BGSD = (
            torch.empty(batch_size, self.kv_heads, length, width, dtype=dtype, device=device)
            for width in (self.D, self.Dv)
        )
        return LayerCache(k_BGSD, v_BGSD, window)


class CrossAttention(Attention):
    """Queries from the decoder's stream, keys and values from the encoder's output (Vaswani et al. 2017, 3.2.3).

    With rotary positions a score depends on how far the place in the target is from that in the source, each counted
    from its own beginning.
    """

    def __init__(self, c: Config, layer: int = 0) -> None:
        super().__init__(c, layer, causal=False)

    def keys_values(self, memory_BSC: Tensor, place: Place = NOWHERE) -> KV:
        """The encoder's output -> k_BGSD, v_BGSD, which serve every token of the target. `place`: of the source."""
        k_BGSD, v_BGSD = self.split_heads(self.w_k(memory_BSC), self.D), self.split_heads(self.w_v(memory_BSC), self.Dv)
        return (k_BGSD if place.rope is None else rotate(k_BGSD, *place.rope)), v_BGSD

    def forward(self, x_BTC: Tensor, place: Place, kv: KV, seen_BS: Tensor) -> Tensor:  # type: ignore[override]
        """x_BTC -> what this layer adds to the decoder's stream. `place`: of these T tokens; seen_BS: bool, which
        source positions are there."""
        q_BHTD = self.split_heads(self.w_q(x_BTC), self.D)
        q_BHTD = q_BHTD if place.rope is None else rotate(q_BHTD, *place.rope)
        return self.attend(q_BHTD, *kv, Place(seen_BS=seen_BS))


class NoHeads(nn.Module):
    """What is left of an attention that has lost all its heads: the bias of W_o, where it has one."""

    heads: tuple[int, ...] = ()

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.D, self.Dv = c.D, c.Dv
        self.bias = nn.Parameter(torch.zeros(c.dim)) if c.w_o and c.bias else None

    def forward(self, x_BTC: Tensor, place: Place = NOWHERE, cache: LayerCache | None = None) -> Tensor:
        """x_BTC -> the same for every token; the cache notes how many came."""
        if cache is not None:
            nothing_BGTD = x_BTC.new_empty(x_BTC.shape[0], 0, x_BTC.shape[1], 1)
            cache.extend(nothing_BGTD, nothing_BGTD)
        return torch.zeros_like(x_BTC) if self.bias is None else self.bias.expand_as(x_BTC)

    def make_cache(self, batch_size: int, length: int, dtype: torch.dtype, window: int | None = None) -> LayerCache:
        nothing_BGSD = torch.empty(batch_size, 0, length, 1, dtype=dtype)
        return LayerCache(nothing_BGSD, nothing_BGSD, window)
