"""What cannot be combined in a configuration, told in one line. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from toymha import schema
from toymha.schema import UserError

if TYPE_CHECKING:
    from toymha.config import Config, Data, Optim

# The keys of `Data` that a generated text has.
GENERATED = {
    "relations": ("tokens", "text_seed", "symbols", "distance", "distractors", "together"),
    "recall": ("tokens", "text_seed", "symbols", "length"),
    "induction": ("tokens", "text_seed", "symbols", "length"),
    "copy": ("tokens", "text_seed", "symbols", "length"),
    "reverse": ("tokens", "text_seed", "symbols", "length"),
    "selective_copy": ("tokens", "text_seed", "symbols", "length", "distractors"),
    "dates": ("text_seed", "examples"),
    "numbers": ("text_seed", "examples"),
}
# The same of every data set that has keys of its own; all others leave all of these null.
OWN_KEYS = GENERATED | {"pinyin": ("text_seed",), "pairs": ("text_seed", "source_unit", "target_unit")}
# The data sets whose documents are pairs: a target that is asked for, after the whole of its source.
PAIRED = ("pinyin", "dates", "numbers", "pairs", "copy", "reverse", "selective_copy")


def check(c: Config) -> None:
    """Refuse what cannot be built. Raises UserError naming the keys, their values and what would be right."""
    _check_heads(c)
    if c.pos == "rope" and c.D % 2:
        raise UserError(f"pos=rope rotates pairs of channels, so head_dim must be even, not {c.D}")
    if c.rope_theta is not None and c.pos != "rope":
        raise UserError(f"rope_theta={c.rope_theta:g} belongs to pos=rope, and this model has pos={c.pos}")
    if c.pos == "sinusoidal" and c.dim % 2:
        raise UserError(f"pos=sinusoidal needs an even dim, not {c.dim}")
    if c.batch_size % c.grad_accum:
        refused = f"batch_size={c.batch_size} cannot be split into grad_accum={c.grad_accum} equal parts"
        raise UserError(f"{refused}; {_divisors(c.batch_size)}")
    if c.name is not None:
        check_folder(c.name, c.output_dir)
    _check_encoder(c)
    _check_data(c.data)
    _check_optim(c.optim)
    b = c.budget
    if b.steps is None and b.tokens is None and b.minutes is None:
        raise UserError("the run would never end: give budget.steps, budget.tokens or budget.minutes")
    if 0 < b.decode_tokens < 64:
        raise UserError(f"budget.decode_tokens={b.decode_tokens} must be 0 or at least 64: fewer cannot be timed")
    if (b.watch or b.heads) and c.seq_len < 9:
        what = "budget.heads=true" if b.heads else f"budget.watch={b.watch}"
        raise UserError(f"{what} looks at positions from the ninth on, so it needs seq_len=9 or more, not {c.seq_len}")
    if b.decode_tokens and not c.causal:
        raise UserError(f"budget.decode_tokens={b.decode_tokens} needs causal=true: nothing else can be cached")


def check_folder(name: str, output_dir: str) -> None:
    """Raises UserError for a `name` that is no folder below output_dir."""
    if not name or Path(name).is_absolute() or ".." in Path(name).parts:
        raise UserError(f"name={name} must be a folder below output_dir={output_dir}")


def _check_encoder(c: Config) -> None:
    if c.n_encoder_layer is None:
        if c.cross_attention is not None:
            refused = f"cross_attention={schema.word(c.cross_attention)} is for a model with an encoder"
            raise UserError(f"{refused}: model=encdec, or n_encoder_layer=2")
        return
    what = f"n_encoder_layer={c.n_encoder_layer}"
    if c.data.name not in PAIRED:
        raise UserError(
            f"an encoder ({what}) reads pairs of source and target: data={', '.join(PAIRED)}; not data={c.data.name}"
        )
    if not c.causal:
        raise UserError(f"causal=false: with {what} the decoder would see the target that it is to write")
    if c.kept_heads is not None:
        raise UserError(f"kept_heads is for models without an encoder, and this one has {what}")
    b = c.budget
    for name, off, why in (
        ("watch", None, "its maps are in `toymha heads`"),
        ("heads", False, "kinds and importance of heads are those of a decoder alone"),
        ("decode_tokens", 0, "`toymha bench` times a decoder alone"),
        ("tokens", None, "a batch of pairs has no fixed number of tokens: give budget.steps"),
    ):
        if getattr(b, name) != off:
            raise UserError(f"budget.{name}={schema.word(getattr(b, name))} cannot be had with {what}: {why}")


def _check_heads(c: Config) -> None:
    if c.head_dim is None and c.dim % c.n_head:
        free = f"or set head_dim (say head_dim={max(2, round(c.dim / c.n_head / 2) * 2)})"
        raise UserError(f"dim={c.dim} cannot be divided among n_head={c.n_head} heads; {_divisors(c.dim)}, {free}")
    if c.n_kv_head is not None and c.n_head % c.n_kv_head:
        raise UserError(f"n_kv_head={c.n_kv_head} must divide n_head={c.n_head}; {_divisors(c.n_head)}")
    if c.tied_heads and c.n_kv_head not in (None, c.n_head):
        raise UserError(
            f"tied_heads=true has one slice of W_k and W_v for all heads; n_kv_head={c.n_kv_head} must be null"
        )
    if not c.w_o and c.n_head * c.Dv != c.dim:
        widths = f"{c.n_head} x {c.Dv} is not {c.dim}"
        raise UserError(
            f"w_o=false adds the heads to the stream as they are: n_head x v_head_dim must be dim, but {widths}"
        )
    if c.kept_heads is not None:
        _check_kept(c.kept_heads, c.n_layer, c.n_head)


def _check_kept(kept: list[list[int]], n_layer: int, n_head: int) -> None:
    if len(kept) != n_layer:
        raise UserError(f"kept_heads has {len(kept)} lists of heads, and there are n_layer={n_layer} layers")
    for layer, heads in enumerate(kept):
        if heads != sorted(set(heads)) or not set(heads) <= set(range(n_head)):
            raise UserError(
                f"kept_heads of layer {layer} is {heads}: it must name heads from 0 to {n_head - 1}, in order and once"
            )
    if all(len(heads) == n_head for heads in kept):
        raise UserError("kept_heads keeps all heads of all layers; leave it null")


def _check_data(d: Data) -> None:
    example = {"file": "corpus.txt", "pairs": "pairs.tsv"}
    if d.name in example and d.path is None:
        raise UserError(f"data={d.name} needs data.path, such as data.path={example[d.name]}")
    if d.name not in example and d.path is not None:
        raise UserError(f"data.path={d.path} needs data=file, or data=pairs for a file of pairs")
    own = OWN_KEYS.get(d.name, ())
    for name in sorted({k for keys in OWN_KEYS.values() for k in keys}):
        value = getattr(d, name)
        if value is not None and name not in own:
            which = ", ".join(n for n, keys in OWN_KEYS.items() if name in keys)
            raise UserError(f"data.{name}={schema.word(value)} belongs to data={which}, and this run has data={d.name}")
        if value is None and name in own:
            raise UserError(f"data={d.name} needs data.{name}")
    fixed = "word" if "tokens" in own else "pair" if d.name in PAIRED else None
    if d.tokenizer != fixed if fixed else d.tokenizer in ("word", "pair"):
        kinds = f"{fixed}, the only one" if fixed else "char, byte or bpe"
        raise UserError(f"data.tokenizer={d.tokenizer}: data={d.name} has tokens of the kind {kinds}")
    if d.tokenizer == "bpe" and d.vocab_size is None:
        raise UserError("data.tokenizer=bpe needs data.vocab_size, such as data.vocab_size=1024")
    if d.tokenizer != "bpe" and d.vocab_size is not None:
        raise UserError(f"data.vocab_size={d.vocab_size} needs data.tokenizer=bpe; {d.tokenizer} tokens are counted")
    shares = d.split
    good = len(shares) in (2, 3) and all(0 <= x <= 1 for x in shares) and all(shares[:2])
    if not good or abs(sum(shares) - 1) > 1e-9:
        raise UserError(f"data.split={shares} must be two or three shares that add up to 1, such as [0.9,0.05,0.05]")


def _check_optim(o: Optim) -> None:
    if len(o.betas) != 2 or not all(0 <= b < 1 for b in o.betas):
        raise UserError(f"optim.betas={o.betas} must be two numbers in [0, 1), such as [0.9,0.95]")
    for name in ("muon_lr", "muon_momentum", "muon_weight_decay"):
        value = getattr(o, name)
        if value is not None and o.name != "muon":
            raise UserError(f"optim.{name}={value} belongs to optim=muon, and this run has optim={o.name}")
        if value is None and o.name == "muon":
            raise UserError(f"optim=muon needs optim.{name}")


def _divisors(n: int) -> str:
    return "valid: " + ", ".join(str(i) for i in range(1, n + 1) if n % i == 0)
