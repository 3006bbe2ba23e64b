"""What a configuration costs, by closed formula: no torch, no model is built.

T tokens (of the target, where there is an encoder), S tokens of the source, V vocabulary, L layers, E encoder layers, C
dim, D head_dim (of values: Dv). `vocab_size` is what the data has; a configuration may fix a larger one.
"""

from __future__ import annotations

from typing import NamedTuple

from toymha.config import Config

BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}  # of a number


class Heads(NamedTuple):
    """Heads of one kind of attention, all layers together."""

    all: int  # query heads
    queries: int  # those of them that have weights of their own; tied heads have one a layer
    keys: int  # key/value heads: they have weights and a cache

    def width(self, c: Config) -> tuple[int, int, int]:
        """Channels of W_q's, W_k's and W_v's outputs."""
        return self.queries * c.D, self.keys * c.D, self.keys * c.Dv


def stored_heads(c: Config, layers: int | None = None) -> Heads:
    """Those of the first `layers` layers (null: of all the decoder's) in self-attention."""
    layers = c.n_layer if layers is None else layers
    different = range(layers if c.kept_heads else min(layers, 1))  # where none is pruned, all are like the first
    n, keys = (sum(len(of(layer)) for layer in different) for of in (c.heads_of, c.kv_heads_of))
    if not c.kept_heads:
        n, keys = n * layers, keys * layers
    return Heads(n, keys if c.tied_heads else n, keys)


def heads(c: Config) -> dict[str, Heads]:
    """By kind: `self` (of the decoder), `encoder`, `cross`; a kind that the model lacks has none."""
    layers = {"self": c.n_layer, "encoder": c.n_encoder_layer or 0, "cross": c.n_layer * c.crosses}
    return {kind: stored_heads(c, n) for kind, n in layers.items()}


def parameters(c: Config, vocab_size: int) -> dict[str, int]:
    """Number of parameters by part, of all layers together; their sum is the model's."""
    V, L, E, C = c.vocab_size or vocab_size, c.n_layer, c.n_encoder_layer or 0, c.dim
    kinds = heads(c).values()
    q, k, v = (sum(widths) for widths in zip(*(h.width(c) for h in kinds)))
    attentions, bias = L + E + L * c.crosses, int(c.bias)
    read_by, write_by = C + int(c.qkv_bias), sum(h.all for h in kinds) * c.Dv
    return {
        "embedding": V * C + (c.seq_len * C if c.pos == "learned" else 0),
        "w_q": q * read_by,
        "w_k": k * read_by,
        "w_v": v * read_by,
        "w_o": (write_by + attentions * bias) * C if c.w_o else 0,
        "mlp": (L + E) * (_inward(c) * (C + bias) * c.F + (c.F + bias) * C),
        "norms": _norms(c) * C * (2 if c.norm == "layer" and c.bias else 1),
        "head": 0 if c.tie_embeddings else V * C,
    }


def _inward(c: Config) -> int:
    """Matrices of the MLP that read the stream."""
    return 2 if c.mlp == "swiglu" else 1


def _norms(c: Config) -> int:
    """Normalisations of the whole model."""
    stacks = 1 if c.n_encoder_layer is None else 2
    last = stacks if c.norm_position == "pre" else 0  # one behind each stack
    return _norms_of(c, c.n_layer) + _norms_of(c, c.n_encoder_layer or 0) + c.n_layer * c.crosses + last


def _norms_of(c: Config, layers: int) -> int:
    """Two a layer; in pre-LN nobody reads the one before an attention without heads, and it is not there."""
    unread = sum(not c.heads_of(layer) for layer in range(layers)) if c.norm_position == "pre" else 0
    return 2 * layers - unread


def flops(
    c: Config, vocab_size: int, seq_len: int | None = None, source_len: int | None = None, causal: bool = False
) -> dict[str, int]:
    """FLOPs by part of a forward pass over one sequence of `seq_len` tokens (null: the context length).

    2 FLOPs a multiply-add, matrix products only: norms, softmax, activations and look-ups count nothing. Scores and
    mixing are those of all T x T pairs, also of the half that the causal mask hides, as the explicit path (and
    torch.utils.flop_counter) has them; `causal`: of the T (T + 1) / 2 pairs that it leaves, which is what a fused
    kernel needs. They are computed for all heads, shared, tied or not.

    With an encoder the sequence is a target, and the source has `source_len` tokens (null: as many). Without
    cross-attention nobody hears the encoder, and it does not run.
    """
    T = c.seq_len if seq_len is None else seq_len
    S = T if source_len is None else source_len
    V, L, C = c.vocab_size or vocab_size, c.n_layer, c.dim
    E = (c.n_encoder_layer or 0) * c.crosses
    seen = T * (T + 1) // 2 if causal and c.causal else T * T
    projections = pairs = 0
    for kind, h in heads(c).items():
        queries, keys, read = {"self": (T, T, seen), "encoder": (S, S, S * S), "cross": (T, S, T * S)}[kind]
        if kind == "encoder" and not E:
            continue
        q, k, v = h.width(c)
        projections += queries * (q + (h.all * c.Dv if c.w_o else 0)) + keys * (k + v)
        pairs += h.all * read
    return {
        "projections": 2 * C * projections,
        "scores": 2 * pairs * c.D,
        "mixing": 2 * pairs * c.Dv,
        "mlp": 2 * (L * T + E * S) * C * c.F * (_inward(c) + 1),
        "head": 2 * T * C * V,
    }


def training_flops_per_token(c: Config, vocab_size: int) -> int:
    """Forward and backward pass at the context length: each product has two of its size in its gradient.

    With an encoder: for a token of the target, and one of the source beside it.
    """
    return 3 * sum(flops(c, vocab_size).values()) // c.seq_len  # each part is a multiple of T


def crossover(c: Config, vocab_size: int, causal: bool = False) -> float | None:
    """The T at which scores and mixing take as many FLOPs as all the rest; None without heads. A source is as long."""

    def quadratic(T: int) -> int:
        parts = flops(c, vocab_size, T, causal=causal)
        return parts["scores"] + parts["mixing"]

    linear = sum(flops(c, vocab_size, 1, causal=causal).values()) - quadratic(1)
    square = (quadratic(2) - 2 * quadratic(1)) / 2  # quadratic(T) = square T^2 + rest T
    return (linear - (quadratic(1) - square)) / square if square else None


def kv_bytes(
    c: Config, seq_len: int, batch_size: int = 1, bytes_per_number: int = 4, source_len: int | None = None
) -> int:
    """Bytes of the keys and values of `batch_size` sequences of `seq_len` tokens in all layers.

    With cross-attention, those of the source's `source_len` tokens (null: as many) are kept too, once.
    """
    kinds, S = heads(c), seq_len if source_len is None else source_len
    return (kinds["self"].keys * seq_len + kinds["cross"].keys * S) * (c.D + c.Dv) * batch_size * bytes_per_number


def activations(
    c: Config, vocab_size: int, seq_len: int | None = None, bytes_per_number: int = 4, materialised: bool = False
) -> dict[str, int]:
    """Bytes by part that one sequence of training (with an encoder: a source as long) keeps for the backward pass.

    Counted are the tensors that autograd saves in the forward pass and the loss, each memory once: token numbers and
    targets (8 bytes each), what each normalisation and each matrix reads, queries, keys, values and heads' outputs,
    what the activation of the MLP reads and gives, and the log-probabilities. What normalisation keeps of its own and
    the log-probabilities are fp32 in any precision; RMSNorm keeps what PyTorch keeps of it on a CPU, where it is
    made of single steps (another device's kernel may keep less). Not counted: weights, their copies and gradients, the
    optimizer, masks, dropout (taken to be off), what is freed within the forward pass.

    `materialised`: the equation step by step, which keeps the T x T pattern of each head. Otherwise one fused kernel,
    which keeps one number a row of it (Dao et al. 2022, section 3.1).
    """
    T = c.seq_len if seq_len is None else seq_len
    V, C, w, F = c.vocab_size or vocab_size, c.dim, bytes_per_number, c.F
    pre, E = c.norm_position == "pre", (c.n_encoder_layer or 0) * c.crosses
    kinds = {kind: h for kind, h in heads(c).items() if kind != "encoder" or E}
    streams = 2 if E else 1
    norms = _norms_of(c, c.n_layer) + _norms_of(c, E) + c.n_layer * c.crosses + pre * streams
    # Read by W_q, W_k, W_v of a layer together, by its MLP, and by the head; the encoder's output by all cross layers.
    attending = sum(bool(c.heads_of(i)) for i in range(c.n_layer)) + E + c.n_layer * c.crosses
    read = attending + c.n_layer + E + streams
    attention = pattern = 0
    for kind, h in kinds.items():
        q, k, v = h.width(c)
        mixed = h.all * c.Dv
        if materialised:  # every query head has its keys and values laid out; what is masked is kept a second time
            attention += w * (h.all * (2 * c.D + c.Dv) + (mixed if c.w_o else 0))
            pattern += w * h.all * T * (1 if kind == "self" else 2)
        else:
            turned = q + k if c.pos == "rope" and kind != "cross" else 0  # beside the ones that are not turned
            again = mixed if c.tied_heads and c.w_o else 0  # laid out anew for W_o; others have that layout
            attention += w * (q + k + v + turned + mixed + again) + 4 * h.all
    return {
        "tokens": T * 8 * (streams + 1),
        "norms": T * norms * (C * w + 8 if c.norm == "layer" else 2 * C * 4 + 4),
        "inputs": T * read * C * w,
        "attention": T * attention,
        "pattern": T * pattern,
        "mlp": T * (c.n_layer + E) * F * w * (4 if c.mlp == "swiglu" else 2),
        "loss": T * V * 4,
    }
