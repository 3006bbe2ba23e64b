"""What a run is: every key with its type, meaning and range, the sizes that follow, and what cannot be combined.

The values themselves live in conf/ (one default for each key in conf/train.yaml); this file has none.
It imports neither torch nor hydra, so that `report`, `plan` and tab completion stay fast.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
import operator
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


class UserError(Exception):
    """A mistake of the user's, told in one line; the command line prints it and exits with 2."""


def key(
    help: str,
    *,
    choices: Iterable[str] = (),
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    text: bool = False,
    identity: bool = True,
) -> Any:
    """A schema field: `low <= value <= high`, `above < value < below`.

    `text`: taken literally from the command line, never parsed as Hydra's grammar.
    `identity`: part of what makes two runs the same run; False for output, logging and machine keys.
    """
    return field(
        metadata={
            "help": help,
            "choices": tuple(choices),
            "low": low,
            "above": above,
            "high": high,
            "below": below,
            "text": text,
            "identity": identity,
        }
    )


@dataclass(frozen=True)
class Data:
    """Where the text comes from and how it becomes tokens."""

    name: str = key("the data set (set by the group `data`)")
    path: str | None = key("the text file, for data=file; relative to the folder you type in", text=True)
    tokenizer: str = key("what a token is", choices=("char", "byte", "bpe"))
    vocab_size: int | None = key("number of BPE tokens; only for data.tokenizer=bpe", low=2, high=65536)
    split: list[float] = key("shares of train, validation and test text, by position; they add up to 1")


@dataclass(frozen=True)
class Optim:
    """The optimizer and the learning-rate schedule."""

    name: str = key("the optimizer (set by the group `optim`)", choices=("adamw", "muon"))
    lr: float = key("peak learning rate of AdamW", above=0, high=10_000)
    betas: list[float] = key("AdamW's decay rates of the first and second moment")
    eps: float = key("AdamW's epsilon", above=0, below=1)
    weight_decay: float = key(
        "decoupled weight decay of AdamW on matrices; vectors are never decayed", low=0, below=100
    )
    muon_lr: float | None = key(
        "peak learning rate of Muon on the matrices inside blocks; only for optim=muon", above=0, high=10_000
    )
    muon_momentum: float | None = key("Muon's Nesterov momentum; only for optim=muon", low=0, below=1)
    muon_weight_decay: float | None = key("decoupled weight decay of Muon; only for optim=muon", low=0, below=100)
    clip: float | None = key("largest norm of the whole gradient; null for no clipping", above=0)
    schedule: str = key("how the learning rate falls", choices=("cosine", "linear", "constant"))
    warmup: int = key("steps of linear warm-up", low=0)
    hold: float = key("share of the run before the fall begins", low=0, below=1)
    min_lr: float = key("floor of the learning rate, as a share of its peak", low=0, high=1)


@dataclass(frozen=True)
class Budget:
    """How long to train, and how often to look. The first limit reached ends the run."""

    steps: int | None = key("optimizer steps; 0 only evaluates the untrained model", low=0)
    tokens: int | None = key("training tokens, rounded up to whole steps", low=1)
    minutes: float | None = key("minutes of training; such a run cannot be repeated to the bit", above=0)
    eval_every: int = key("steps between evaluations on the validation subset; the last step always", low=1)
    eval_tokens: int = key("tokens of that subset (the final evaluation takes the whole split)", low=1)
    log_every: int = key("steps between logged rows", low=1, identity=False)
    checkpoint_every: int | None = key("steps between checkpoints; null: at each evaluation", low=1, identity=False)
    sample_tokens: int = key(
        "length of the text written at each evaluation; 0 for none", low=0, high=100_000, identity=False
    )


@dataclass(frozen=True)
class Sweep:
    """A canned sweep: one file in conf/sweep."""

    name: str = key("the sweep (set by the group `sweep`); names the folder of its runs", text=True)
    question: str = key("what it asks")
    axes: dict = key("the swept keys, each with its values in Hydra's sweep syntax: '1,2,4', 'range(3)', a list")


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run. Derived sizes are properties; values left null stay null."""

    # The model
    n_layer: int = key("number of blocks", low=1, high=1000)
    dim: int = key("C, width of the residual stream", low=1, high=65536)
    n_head: int = key("H, number of query heads", low=1, high=4096)
    n_kv_head: int | None = key("G, number of key/value heads: null = n_head (MHA), 1 = MQA, in between GQA", low=1)
    head_dim: int | None = key("D, width of a query and key; null = dim / n_head", low=1, high=65536)
    v_head_dim: int | None = key("width of a value; null = head_dim", low=1, high=65536)
    d_ff: int | None = key("F, hidden width of the MLP; null = 4 dim (gelu) or 8 ceil(dim / 3) (swiglu)", low=1)
    mlp: str = key("the MLP", choices=("gelu", "swiglu"))
    norm: str = key("the normalisation", choices=("layer", "rms"))
    norm_position: str = key("normalise before (pre) or after (post) each residual sum", choices=("pre", "post"))
    pos: str = key("positions", choices=("learned", "sinusoidal", "rope", "none"))
    w_o: bool = key("output projection after the heads; false needs n_head x v_head_dim = dim")
    tied_heads: bool = key("all heads share one slice of W_q, W_k and W_v")
    score_scale: str = key("scores are divided by its square root; none = not", choices=("head_dim", "dim", "none"))
    causal: bool = key("hide the future; false lets a token see what it has to predict")
    bias: bool = key("biases in W_o, MLP and LayerNorm")
    qkv_bias: bool = key("biases in W_q, W_k and W_v")
    tie_embeddings: bool = key("token embedding and output head are one tensor")
    vocab_size: int | None = key("V; null = what the data has; larger leaves unused tokens", low=1)
    attn_dropout: float = key("dropout on attention probabilities", low=0, below=1)
    resid_dropout: float = key("dropout on what each sublayer adds, and on the embedding", low=0, below=1)
    # The run
    seq_len: int = key("T, context length in tokens", low=1, high=1_048_576)
    batch_size: int = key("sequences in one optimizer step", low=1)
    grad_accum: int = key("number of micro-batches a step's batch is split into", low=1)
    seed: int = key("seeds the initial weights, the batches and dropout", low=0, high=2**32 - 1)
    precision: str = key("arithmetic: auto picks what the hardware is fast at", choices=("auto", "fp32", "bf16"))
    data: Data
    optim: Optim
    budget: Budget
    sweep: Sweep | None
    # Output and machine
    name: str | None = key(
        "folder of the run below output_dir; null = the sweep's name, or `train`", text=True, identity=False
    )
    output_dir: str = key("where run folders go; relative to the folder you type in", text=True, identity=False)
    overwrite: bool = key("start anew, deleting the run that is in the folder", identity=False)
    device: str = key("auto = cuda, else mps, else cpu; also cuda:1", identity=False)
    threads: int | None = key(
        "CPU threads of one run; null = all cores, in a sweep cores / workers", low=1, identity=False
    )
    workers: int | None = key("runs of a sweep at a time; null = one a core", low=1, high=1024, identity=False)
    compile: bool = key("torch.compile: seconds of compiling for faster steps", identity=False)

    def __post_init__(self) -> None:
        check_combinations(self)

    # Sizes that follow

    @property
    def D(self) -> int:
        """Width of a query and key."""
        return self.head_dim or self.dim // self.n_head

    @property
    def Dv(self) -> int:
        """Width of a value."""
        return self.v_head_dim or self.D

    @property
    def G(self) -> int:
        """Number of key/value heads."""
        return self.n_kv_head or self.n_head

    @property
    def F(self) -> int:
        """Hidden width of the MLP."""
        if self.d_ff:
            return self.d_ff
        return 4 * self.dim if self.mlp == "gelu" else 8 * math.ceil(self.dim / 3)

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def max_steps(self) -> int | None:
        """Optimizer steps by `budget.steps` and `budget.tokens`; None when only `budget.minutes` bounds the run."""
        limits = []
        if self.budget.steps is not None:
            limits.append(self.budget.steps)
        if self.budget.tokens is not None:
            limits.append(math.ceil(self.budget.tokens / self.tokens_per_step))
        return min(limits) if limits else None


def check_combinations(c: Config) -> None:
    """Refuse what cannot be built. Raises UserError naming the keys, their values and what would be right."""
    _check_heads(c)
    if c.pos == "rope" and c.D % 2:
        raise UserError(f"pos=rope rotates pairs of channels, so head_dim must be even, not {c.D}")
    if c.pos == "sinusoidal" and c.dim % 2:
        raise UserError(f"pos=sinusoidal needs an even dim, not {c.dim}")
    if c.batch_size % c.grad_accum:
        refused = f"batch_size={c.batch_size} cannot be split into grad_accum={c.grad_accum} equal parts"
        raise UserError(f"{refused}; {_divisors(c.batch_size)}")
    _check_data(c.data)
    _check_optim(c.optim)
    b = c.budget
    if b.steps is None and b.tokens is None and b.minutes is None:
        raise UserError("the run would never end: give budget.steps, budget.tokens or budget.minutes")


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


def _check_data(d: Data) -> None:
    if d.name == "file" and d.path is None:
        raise UserError("data=file needs data.path, such as data.path=corpus.txt")
    if d.name != "file" and d.path is not None:
        raise UserError(f"data.path={d.path} needs data=file")
    if d.tokenizer == "bpe" and d.vocab_size is None:
        raise UserError("data.tokenizer=bpe needs data.vocab_size, such as data.vocab_size=1024")
    if d.tokenizer != "bpe" and d.vocab_size is not None:
        raise UserError(f"data.vocab_size={d.vocab_size} needs data.tokenizer=bpe; {d.tokenizer} tokens are counted")
    shares = d.split
    if len(shares) not in (2, 3) or min(shares) < 0 or min(shares[:2]) == 0 or abs(sum(shares) - 1) > 1e-9:
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


# From plain values to the typed object


@functools.cache
def field_types(cls: type) -> dict[str, tuple[dataclasses.Field, Any]]:
    """name -> (field, type) of a schema dataclass."""
    hints = typing.get_type_hints(cls)
    return {f.name: (f, hints[f.name]) for f in dataclasses.fields(cls)}


def section_of(hint: Any) -> type | None:
    """The dataclass that a field holds (also when it may be null), else None."""
    return next((t for t in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(t)), None)  # type: ignore[return-value]


@functools.cache
def keys(cls: type = Config, prefix: str = "") -> dict[str, tuple[dataclasses.Field, Any]]:
    """Every key as typed on the command line (`n_head`, `optim.lr`) -> (field, type)."""
    out = {}
    for name, (f, hint) in field_types(cls).items():
        section = section_of(hint)
        out.update(keys(section, f"{prefix}{name}.") if section else {prefix + name: (f, hint)})
    return out


def nearest(word: str, valid: Iterable[str]) -> str:
    """`; did you mean X?` for the closest valid word, or nothing."""
    close = difflib.get_close_matches(word, list(valid), n=3, cutoff=0.5)
    close.sort(key=lambda w: sorted(w) != sorted(word))  # mah is mha with two letters swapped, before it is mqa
    return f"; did you mean {close[0]}?" if close else ""


def build(values: Mapping[str, Any], cls: type = Config, prefix: str = "") -> Any:
    """Plain values (from YAML and the command line) -> the typed object.

    Raises UserError for an unknown or missing key, a wrong type, a value out of range, an impossible combination.
    """
    spec = field_types(cls)
    for name in values:
        if name not in spec:
            raise UserError(f"unknown key {prefix}{name}{nearest(str(name), spec)}")
    if missing := [prefix + name for name in spec if name not in values or values[name] == "???"]:
        raise UserError(
            f"{missing[0]} has no value; {spec[missing[0].removeprefix(prefix)][0].metadata.get('help', '')}"
        )
    out = {}
    for name, (f, hint) in spec.items():
        section, value = section_of(hint), values[name]
        if section and isinstance(value, Mapping):
            out[name] = build(value, section, f"{prefix}{name}.")
        else:
            out[name] = check_value(prefix + name, value, f, hint)
    return cls(**out)


BOUNDS = (
    ("low", ">=", operator.ge),
    ("above", ">", operator.gt),
    ("high", "<=", operator.le),
    ("below", "<", operator.lt),
)


def check_value(name: str, value: Any, f: dataclasses.Field, hint: Any) -> Any:
    """`value` if it has the key's type and range (an int becomes a float where one is due). Raises UserError."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    nullable, kind = type(None) in options, next(o for o in options if o is not type(None))
    if value is None and nullable:
        return None
    m = f.metadata
    shown = f"{name}={word(value)}"
    if m["choices"] and value not in m["choices"]:
        raise UserError(f"{shown}: must be one of {', '.join(m['choices'])}{nearest(str(value), m['choices'])}")
    value = _convert(shown, name, value, kind, nullable)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        tests = {
            "low": (">=", operator.ge),
            "above": (">", operator.gt),
            "high": ("<=", operator.le),
            "below": ("<", operator.lt),
        }
        bounds = [(sign, m[b], test) for b, (sign, test) in tests.items() if m[b] is not None]
        if not math.isfinite(value) or not all(test(value, limit) for _, limit, test in bounds):
            wanted = " and ".join(f"{sign} {limit}" for sign, limit, _ in bounds)
            raise UserError(f"{shown}: must be {wanted or 'finite'}")
    return value


def _convert(shown: str, name: str, value: Any, kind: Any, nullable: bool) -> Any:
    origin = typing.get_origin(kind) or kind
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if origin is float and number:
        return float(value)
    if origin is list and isinstance(value, (list, tuple)):
        (item,) = typing.get_args(kind)
        return [_convert(shown, name, v, item, False) for v in value]
    if origin is str and number:  # a file named 1984, a name like 7
        return str(value)
    if isinstance(value, origin) and not (origin is int and isinstance(value, bool)):
        return value
    what = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a word",
        list: "a list of numbers, such as [0.9,0.1]",
    }
    hint = ""
    if origin is bool:
        yes, no = ("on", "yes", "y", "1"), ("off", "no", "n", "0")
        hint = (
            f"; did you mean {name}={'true' if str(value).lower() in yes else 'false'}?"
            if str(value).lower() in yes + no
            else ""
        )
    elif origin is int and isinstance(value, float) and value.is_integer():
        hint = f"; did you mean {name}={int(value)}?"
    raise UserError(f"{shown}: must be {what.get(origin, origin.__name__)}{' or null' if nullable else ''}{hint}")


def word(value: Any) -> str:
    """A value as one types it: true, false, null."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def plain(config: Any) -> dict[str, Any]:
    """The typed object back as plain values, for YAML and JSON."""
    return dataclasses.asdict(config)


def identity_values(config: Config) -> dict[str, Any]:
    """Flat `key -> value` of all that makes a run what it is: no output, logging or machine keys."""
    out: dict[str, Any] = {}
    for name, (f, _) in keys(Config).items():
        if f.metadata.get("identity", True) and not name.startswith("sweep."):
            value: Any = config
            for part in name.split("."):
                value = getattr(value, part)
            out[name] = value
    return out
