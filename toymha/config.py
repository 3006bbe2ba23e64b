"""What a run is: every key with its type, meaning and range, the sizes that follow, and what cannot be combined.

The values themselves live in conf/ (one default for each key in conf/train.yaml); this file has none.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toymha import combinations, schema
from toymha.combinations import GENERATED as GENERATED
from toymha.combinations import OWN_KEYS as OWN_KEYS
from toymha.combinations import PAIRED as PAIRED
from toymha.schema import key
from toymha.statement import Sweep

GROUPS = ("model", "data", "optim", "budget", "recipe", "sweep")  # folders of conf/
SPECIAL = ("like", "compare")  # what the command line takes beside groups and keys
REPLICATES = ("seed", "init_seed", "data_seed")  # keys that repeat a setting and make none


def conf_dir() -> Path:
    """conf/ of the source tree, or the copy inside an installed wheel."""
    here = Path(__file__).parent
    return next(p for p in (here / "conf", here.parent / "conf") if (p / "train.yaml").is_file())


def choices(group: str, extra: Path | None = None) -> list[str]:
    """The valid choices of a group, sorted: the files in conf/<group> and in the user's --config-dir."""
    roots = [conf_dir(), *([extra] if extra else [])]
    return sorted({p.stem for root in roots for p in (root / group).glob("*.yaml")})


@dataclass(frozen=True)
class Data:
    """Where the text comes from and how it becomes tokens."""

    name: str = key("the data set (set by the group `data`)")
    path: str | None = key("the text file, for data=file and data=pairs; relative to the folder you type in", text=True)
    tokenizer: str = key(
        "what a token is; word for generated texts, pair for pairs of source and target",
        choices=("char", "byte", "bpe", "word", "pair"),
    )
    vocab_size: int | None = key("number of BPE tokens; only for data.tokenizer=bpe", low=2, high=65536)
    split: list[float] = key("shares of train, validation and test text, by position; they add up to 1")
    tokens: int | None = key(
        "size of a generated text in tokens, all splits together", low=100, high=100_000_000, default=None
    )
    text_seed: int | None = key(
        "seed of a generated text, and of the order of pairs", low=0, high=2**32 - 1, default=None
    )
    symbols: int | None = key(
        "relations: words in each open class; tasks: number of symbols", low=2, high=10_000, default=None
    )
    length: int | None = key("tasks: symbols in a string, or pairs to recall", low=1, high=10_000, default=None)
    distance: int | None = key(
        "relations: filler words between two words that belong together, on average", low=0, high=1000, default=None
    )
    distractors: int | None = key(
        "relations: attractors of a relation, on average; selective_copy: blanks among the symbols",
        low=0,
        high=1000,
        default=None,
    )
    together: bool | None = key(
        "relations: agreement, coreference and collocation in every sentence, or one in each", default=None
    )
    examples: int | None = key(
        "dates, numbers: number of pairs, all splits together", low=1, high=1_000_000, default=None
    )
    source_unit: str | None = key("pairs: what a token of the source is", choices=("char", "word"), default=None)
    target_unit: str | None = key("pairs: what a token of the target is", choices=("char", "word"), default=None)


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
    schedule: str = key("how the learning rate falls", choices=("cosine", "linear"))
    warmup: int = key("steps of linear warm-up", low=0)
    hold: float = key("share of the run before the fall begins", low=0, below=1)
    min_lr: float = key("floor of the learning rate, as a share of its peak; 1 keeps it constant", low=0, high=1)


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
    eval_pairs: int = key(
        "pairs whose targets are written at each evaluation (data in pairs); 0 for none",
        low=0,
        default=200,
        identity=False,
    )
    beam: int = key(
        "width of the beam search of the final evaluation (data in pairs), beside greedy; 1: none",
        low=1,
        high=64,
        default=1,
        identity=False,
    )
    watch: int | None = key(
        "evaluations between maps of attention and scores of each head; null: never",
        low=1,
        default=None,
        identity=False,
    )
    heads: bool = key(
        "after training, study the heads: kinds, importance, how many can go", default=False, identity=False
    )
    decode_tokens: int = key(
        "tokens of context with which decoding is timed after training; 0: it is not", low=0, default=0, identity=False
    )


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training run. Derived sizes are properties; values left null stay null."""

    # The model
    n_layer: int = key("number of blocks (of the decoder, where there is an encoder too)", low=1, high=1000)
    dim: int = key("C, width of the residual stream", low=1, high=65536)
    n_head: int = key("H, number of query heads", low=1, high=4096)
    n_kv_head: int | None = key("G, number of key/value heads: null = n_head (MHA), 1 = MQA, in between GQA", low=1)
    head_dim: int | None = key("D, width of a query and key; null = dim / n_head", low=1, high=65536)
    v_head_dim: int | None = key("width of a value; null = head_dim", low=1, high=65536)
    d_ff: int | None = key("F, hidden width of the MLP; null = 4 dim, or 8 ceil(dim / 3) for swiglu", low=1)
    mlp: str = key("the MLP; gelu_tanh is GPT-2's approximation of gelu", choices=("gelu", "gelu_tanh", "swiglu"))
    norm: str = key("the normalisation", choices=("layer", "rms"))
    norm_eps: float = key("what a normalisation adds to the variance", above=0, below=1, default=1e-5)
    norm_position: str = key("normalise before (pre) or after (post) each residual sum", choices=("pre", "post"))
    pos: str = key("positions", choices=("learned", "sinusoidal", "rope", "none"))
    rope_theta: float | None = key(
        "base of the frequencies of rotary positions; null = 10,000, for pos=rope only", above=1, default=None
    )
    w_o: bool = key("output projection after the heads; false needs n_head x v_head_dim = dim")
    tied_heads: bool = key("all heads share one slice of W_q, W_k and W_v")
    kept_heads: list[list[int]] | None = key(
        "of each layer, the numbers of the heads that it has; null = all n_head (`toymha prune` sets it)", default=None
    )
    n_encoder_layer: int | None = key(
        "blocks of an encoder that reads the source; null = none: a decoder reads source and target as one sequence",
        low=1,
        high=1000,
        default=None,
    )
    cross_attention: bool | None = key(
        "the decoder attends to the encoder's output; false: it sees its own past alone; only with an encoder",
        default=None,
    )
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
    init_seed: int | None = key("seeds the initial weights; null = seed", low=0, high=2**32 - 1)
    data_seed: int | None = key("seeds the order of the batches, and dropout; null = seed", low=0, high=2**32 - 1)
    start: str | None = key(
        "a run folder whose last weights this run begins with; null = new ones", text=True, default=None
    )
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
        combinations.check(self)

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

    def heads_of(self, layer: int) -> tuple[int, ...]:
        """Numbers of the query heads that the layer has."""
        return tuple(range(self.n_head) if self.kept_heads is None else self.kept_heads[layer])

    def kv_heads_of(self, layer: int) -> tuple[int, ...]:
        """Numbers of the key/value heads that they read. Tied heads have one."""
        heads = self.heads_of(layer)
        return (0,) * bool(heads) if self.tied_heads else tuple(sorted({h * self.G // self.n_head for h in heads}))

    @property
    def F(self) -> int:
        """Hidden width of the MLP."""
        if self.d_ff:
            return self.d_ff
        return 8 * math.ceil(self.dim / 3) if self.mlp == "swiglu" else 4 * self.dim

    @property
    def theta(self) -> float:
        """Base of the frequencies of rotary positions."""
        return self.rope_theta or 10_000.0

    @property
    def crosses(self) -> bool:
        """Whether there is cross-attention: wherever there is an encoder, unless it is switched off."""
        return self.n_encoder_layer is not None and self.cross_attention is not False

    @property
    def seed_of_init(self) -> int:
        return self.seed if self.init_seed is None else self.init_seed

    @property
    def seed_of_data(self) -> int:
        return self.seed if self.data_seed is None else self.data_seed

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


# The keys, and the typed object from plain values and back


@functools.cache
def keys() -> dict[str, tuple[dataclasses.Field, Any]]:
    """Every key of a run as it is typed (`n_head`, `optim.lr`) -> (field, type)."""
    return schema.keys(Config)


def field_names() -> set[str]:
    """The top level of a configuration."""
    return {f.name for f in dataclasses.fields(Config)}


def settable() -> dict[str, tuple[dataclasses.Field, Any]]:
    """The keys that may be typed: all but those that a group's file sets."""
    return {k: v for k, v in keys().items() if not k.endswith(".name") and not k.startswith("sweep.")}


def build(values: Mapping[str, Any]) -> Config:
    """Plain values (from YAML and the command line) -> the typed object. Raises UserError."""
    return schema.build(values, Config)


def plain(config: Any) -> dict[str, Any]:
    """The typed object back as plain values, for YAML and JSON."""
    return dataclasses.asdict(config)


def identity_values(config: Config) -> dict[str, Any]:
    """Flat `key -> value` of all that makes a run what it is: no output, logging or machine keys."""
    out: dict[str, Any] = {}
    for name, (f, _) in keys().items():
        if f.metadata.get("identity", True) and not name.startswith("sweep."):
            value: Any = config
            for part in name.split("."):
                value = getattr(value, part)
            out[name] = value
    return out


# The keys of a model, which come first.
MODEL_KEYS = list(itertools.takewhile(lambda name: name != "seq_len", schema.field_types(Config)))
