"""What a configuration costs, by closed formula: no torch, no model is built."""

from __future__ import annotations

from toymha.config import Config


def parameters(c: Config, vocab_size: int) -> dict[str, int]:
    """Number of parameters by part; their sum is the model's. `vocab_size`: what the data has."""
    V, L, C = c.vocab_size or vocab_size, c.n_layer, c.dim
    q_heads, kv_heads = (1, 1) if c.tied_heads else (c.n_head, c.G)
    widths = {"w_q": q_heads * c.D, "w_k": kv_heads * c.D, "w_v": kv_heads * c.Dv}
    norms = (2 * L + (c.norm_position == "pre")) * C * (2 if c.norm == "layer" and c.bias else 1)
    inward, bias = (2 if c.mlp == "swiglu" else 1), int(c.bias)
    return {
        "embedding": V * C + (c.seq_len * C if c.pos == "learned" else 0),
        **{name: L * width * (C + int(c.qkv_bias)) for name, width in widths.items()},
        "w_o": L * (c.n_head * c.Dv + bias) * C if c.w_o else 0,
        "mlp": L * (inward * (C + bias) * c.F + (c.F + bias) * C),
        "norms": norms,
        "head": 0 if c.tie_embeddings else V * C,
    }
