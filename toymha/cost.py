"""What a configuration costs, by closed formula: no torch, no model is built.

T tokens, V vocabulary, L layers, C dim, D head_dim (of values: Dv).
"""

from __future__ import annotations

from toymha.config import Config


def parameters(c: Config, vocab_size: int) -> dict[str, int]:
    """Number of parameters by part; their sum is the model's. `vocab_size`: what the data has."""
    V, L, C = c.vocab_size or vocab_size, c.n_layer, c.dim
    heads, q_heads, kv_heads = stored_heads(c)
    widths = {"w_q": q_heads * c.D, "w_k": kv_heads * c.D, "w_v": kv_heads * c.Dv}
    pre = c.norm_position == "pre"
    unread = sum(not c.heads_of(layer) for layer in range(L)) if pre else 0  # norms before an attention without heads
    norms = (2 * L + pre - unread) * C * (2 if c.norm == "layer" and c.bias else 1)
    inward, bias = (2 if c.mlp == "swiglu" else 1), int(c.bias)
    return {
        "embedding": V * C + (c.seq_len * C if c.pos == "learned" else 0),
        **{name: width * (C + int(c.qkv_bias)) for name, width in widths.items()},
        "w_o": (heads * c.Dv + L * bias) * C if c.w_o else 0,
        "mlp": L * (inward * (C + bias) * c.F + (c.F + bias) * C),
        "norms": norms,
        "head": 0 if c.tie_embeddings else V * C,
    }


def stored_heads(c: Config) -> tuple[int, int, int]:
    """Over all layers: query heads, and those of them and of the key/value heads that have weights (the latter also a
    cache) of their own; tied heads have one of each a layer."""
    by_layer = [(len(c.heads_of(layer)), len(c.kv_heads_of(layer))) for layer in range(c.n_layer)]
    heads, kv_heads = (sum(n) for n in zip(*by_layer))
    return heads, kv_heads if c.tied_heads else heads, kv_heads


def flops(c: Config, vocab_size: int, seq_len: int | None = None) -> dict[str, int]:
    """FLOPs by part of a forward pass over one sequence of `seq_len` tokens (null: the context length).

    2 FLOPs a multiply-add, matrix products only: norms, softmax, activations and look-ups count nothing. Scores and
    mixing are those of all T x T pairs, also of the half that the causal mask hides, as the explicit path (and
    torch.utils.flop_counter) has them; they are computed for all heads, shared, tied or not.
    """
    T = c.seq_len if seq_len is None else seq_len
    V, L, C = c.vocab_size or vocab_size, c.n_layer, c.dim
    heads, q_heads, kv_heads = stored_heads(c)
    width = q_heads * c.D + kv_heads * (c.D + c.Dv) + (heads * c.Dv if c.w_o else 0)
    return {
        "projections": 2 * T * C * width,
        "scores": 2 * heads * T * T * c.D,
        "mixing": 2 * heads * T * T * c.Dv,
        "mlp": 2 * L * T * C * c.F * (3 if c.mlp == "swiglu" else 2),
        "head": 2 * T * C * V,
    }


def training_flops_per_token(c: Config, vocab_size: int) -> int:
    """Forward and backward pass at the context length: each product has two of its size in its gradient."""
    return 3 * sum(flops(c, vocab_size).values()) // c.seq_len  # each part is a multiple of T


def kv_bytes(c: Config, seq_len: int, batch_size: int = 1, bytes_per_number: int = 4) -> int:
    """Bytes of the keys and values of `batch_size` sequences of `seq_len` tokens in all layers."""
    _, _, kv_heads = stored_heads(c)
    return kv_heads * (c.D + c.Dv) * seq_len * batch_size * bytes_per_number
