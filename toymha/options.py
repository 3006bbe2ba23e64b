"""What each command takes beside `train` and `plan`, whose keys are those of a run (config.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from toymha.analysis.names import ORDERS
from toymha.combinations import check_folder
from toymha.help import COMPLETION
from toymha.schema import UserError, key, nearest, word


@dataclass(frozen=True)
class EvalOptions:
    """Options of `toymha eval`."""

    run: str = key("the run folder", text=True)
    split: str = key("which part of the text", choices=("train", "val", "test"), default="val")
    weights: str = key("of the last step or of the best evaluation", choices=("last", "best"), default="last")
    data: str | None = key("another data set, read with the run's own tokenizer; null = the run's", default=None)
    path: str | None = key("the file, for data=file and data=pairs", text=True, default=None)
    device: str = key("auto = cuda, else mps, else cpu", default="auto")
    precision: str | None = key(
        "auto, fp32 or bf16; null = as the run was told", choices=("auto", "fp32", "bf16"), default=None
    )
    threads: int | None = key("CPU threads; null = all cores", low=1, default=None)


@dataclass(frozen=True)
class ReportOptions:
    """Options of `toymha report`."""

    run: str = key("a folder with runs in it, such as outputs/heads", text=True)


@dataclass(frozen=True)
class PlanOptions:
    """What `toymha plan` takes beside the keys of `train`."""

    time: bool = key("try a few steps of each kind of run and predict how long all take", default=False)


@dataclass(frozen=True)
class ReproduceOptions:
    """Options of `toymha reproduce`."""

    claims: list[str] | None = key("which statements, such as w_o,tied; null = all of conf/sweep", default=None)
    budget: str = key("steps and seeds of every statement", choices=("smoke", "quick", "full"), default="quick")
    output_dir: str = key("where the folder reproduce/ goes", text=True, default="outputs")
    workers: int | None = key("runs at a time; null = one a core", low=1, high=1024, default=None)
    device: str = key("auto = cuda, else mps, else cpu", default="auto")
    plan: bool = key("say what would be done and how long it would take, and stop", default=False)


@dataclass(frozen=True)
class HeadsOptions:
    """What `toymha heads` takes; without run= also the keys of `train`, for a model to look at untrained."""

    run: str | None = key("a run folder, or a folder of runs whose kinds of heads are counted", text=True, default=None)
    parts: list[str] | None = key(
        "what to look at, such as census,writes; null = passage, census, likeness, writes, importance, pruning",
        default=None,
    )
    text: str | None = key(
        "a text whose maps are drawn (of a model with an encoder: a source); null: validation text",
        text=True,
        default=None,
    )
    show: int = key("tokens of validation text that are drawn", low=2, high=256, default=48)
    weights: str = key("of the last step or of the best evaluation", choices=("last", "best"), default="last")
    steps: int | None = key("0: the run's model as it was before training", low=0, high=0, default=None)
    tokens: int = key("text that each loss is measured on", low=128, default=4096)
    gate_steps: int = key("steps in which gates are trained (importance by gates)", low=1, default=100)
    rounds: int = key("pruning: how often importance is measured anew on the way", low=1, default=1)
    random_orders: int = key("pruning: random orders to compare with", low=1, default=5)
    probe: str | None = key(
        "scale: how large scores are, by head; depth: signal and gradient by layer, pre-LN and post-LN",
        choices=("scale", "depth"),
        default=None,
    )
    seed: int = key("of gates, random orders and random text", low=0, high=2**32 - 1, default=0)
    device: str = key("auto = cuda, else mps, else cpu", default="auto")
    threads: int | None = key("CPU threads; null = all cores", low=1, default=None)


@dataclass(frozen=True)
class PruneOptions:
    """Options of `toymha prune`."""

    run: str = key("the run folder", text=True)
    share: float | None = key("share of the heads that go, the least important first", above=0, high=1, default=None)
    heads: list[str] | None = key("or their names, such as L0H1,L2H3", default=None)
    by: str | None = key(
        "what importance is: zeroed or mean (leave one out), gradient, gates, or random; null = zeroed",
        choices=ORDERS,
        default=None,
    )
    steps: int = key("training steps afterwards", low=0, default=0)
    lr: float = key("learning rates of these steps, as a share of the run's own", above=0, high=1, default=0.1)
    tokens: int = key("training text that importance is measured on", low=128, default=4096)
    name: str | None = key("folder below output_dir; null = prune/ and that of the run", text=True, default=None)
    output_dir: str = key("where the new run goes", text=True, default="outputs")
    overwrite: bool = key("replace a run that is in the folder", default=False)
    seed: int = key("of by=random and by=gates", low=0, high=2**32 - 1, default=0)
    device: str = key("auto = cuda, else mps, else cpu", default="auto")
    threads: int | None = key("CPU threads; null = all cores", low=1, default=None)


@dataclass(frozen=True)
class GenerateOptions:
    """Options of `toymha generate`."""

    run: str = key("the run folder", text=True)
    prompt: str | None = key(
        "the text to go on from, any characters (- reads standard input); null or empty: from the begin mark of a "
        "document, else from a line end, else from the first token of the training text",
        text=True,
        default=None,
    )
    prompt_file: str | None = key("a file whose whole text is the prompt", text=True, default=None)
    prompts: str | None = key("a file with one prompt a line, read as one batch", text=True, default=None)
    max_new_tokens: int = key("tokens to make, at most", low=0, default=200)
    temperature: float = key("divides the logits; 0 = always the most likely token", low=0, default=0.8)
    top_k: int | None = key("keep the k most likely tokens; null or 0 = all", low=0, default=None)
    top_p: float | None = key(
        "keep the most likely tokens that together have this probability; null or 1 = all", low=0, high=1, default=None
    )
    min_p: float | None = key(
        "keep tokens at least this share as likely as the most likely; null or 0 = all", low=0, high=1, default=None
    )
    repetition_penalty: float = key(
        "divides positive and multiplies negative logits of tokens that are there already; 1 = off",
        above=0,
        default=1.0,
    )
    beam: int = key("width of the beam search; 1 = none; only for temperature=0", low=1, high=1024, default=1)
    num_samples: int = key("texts for each prompt", low=1, high=10_000, default=1)
    stop: list[str] | None = key(
        "texts that end a sample and are not printed, such as stop=['\\n\\n'], where \\n is a line end; documents end "
        "at the next begin mark anyway",
        default=None,
    )
    seed: int = key(
        "of the first sample of each prompt; the next have seed + 1, + 2, ..., each a random stream of its own",
        low=0,
        high=2**32 - 1,
        default=0,
    )
    cache: bool = key("keep keys and values; false recomputes the whole text for each token", default=True)
    overflow: str = key(
        "when the context is full: crop (recompute the last seq_len tokens for each), slide (rotary or no positions: "
        "each token sees the last seq_len), stop",
        choices=("crop", "slide", "stop"),
        default="crop",
    )
    output: str = key("text as it is made, or one JSON object a sample", choices=("text", "jsonl"), default="text")
    trace: bool = key("write each step, its candidates and its attention as a page and a text", default=False)
    weights: str = key("of the last step or of the best evaluation", choices=("last", "best"), default="last")
    device: str = key("auto = cuda, else mps, else cpu", default="auto")
    precision: str | None = key(
        "auto, fp32 or bf16; null = as the run was told", choices=("auto", "fp32", "bf16"), default=None
    )
    threads: int | None = key("CPU threads; null = all cores", low=1, default=None)


@dataclass(frozen=True)
class BenchOptions:
    """What `toymha bench` takes beside the keys of `train` that describe a model (n_kv_head=8,2,1)."""

    run: str | None = key(
        "a run whose model is timed; null: those that the other words describe; models with an encoder are not timed",
        text=True,
        default=None,
    )
    prompt_len: list[int] = key("tokens of the prompt, such as 32,128,512", default=[32, 128, 512])
    batch: list[int] = key("sequences at a time, such as 1,32", default=[1])
    new_tokens: int = key("tokens that are decoded after the prompt", low=2, high=1_000_000, default=64)
    cache: list[bool] = key("with a cache, without, or both", default=[True, False])
    precision: list[str] = key("fp32, bf16 or both; auto = what this machine is fast at", default=["auto"])
    repeats: int = key("timings of each number, 3 at least; their median is told", low=3, high=1000, default=5)
    name: str = key("folder below output_dir", text=True, default="bench")
    output_dir: str = key("where the table, the plot and the JSON lines go", text=True, default="outputs")
    device: str = key("auto = cuda, else mps, else cpu", default="auto")
    threads: int | None = key("CPU threads; null = all cores", low=1, default=None)

    def __post_init__(self) -> None:
        check_items("prompt_len", self.prompt_len, low=1)
        check_items("batch", self.batch, low=1)
        check_items("cache", self.cache)
        check_items("precision", self.precision, ("auto", "fp32", "bf16"))
        check_folder(self.name, self.output_dir)


@dataclass(frozen=True)
class BenchTrainOptions:
    """What `toymha bench train` takes beside the keys of `train` (seq_len=64,256): one step of training."""

    attention: list[str] = key(
        "explicit (T x T in memory), fused, or both; models with an encoder are not timed",
        default=["explicit", "fused"],
    )
    precision: list[str] = key("fp32, bf16 or both; auto = what this machine is fast at", default=["auto"])
    repeats: int = key("timings of a step, 3 at least; their median is told", low=3, high=1000, default=5)
    name: str = key("folder below output_dir", text=True, default="bench_train")
    output_dir: str = key("where the table, the plot and the JSON lines go", text=True, default="outputs")
    device: str = key("auto = cuda, else mps, else cpu", default="auto")
    threads: int | None = key("CPU threads; null = all cores", low=1, default=None)

    def __post_init__(self) -> None:
        check_items("attention", self.attention, ("explicit", "fused"))
        check_items("precision", self.precision, ("auto", "fp32", "bf16"))
        check_folder(self.name, self.output_dir)


def check_items(name: str, values: Sequence[Any], choices: Sequence[str] = (), low: int | None = None) -> None:
    """Raises UserError for an empty list, an item that is there twice, or one that is none of the choices."""
    if not values:
        raise UserError(f"{name}=[]: give at least one value")
    for i, value in enumerate(values):
        if choices and value not in choices:
            raise UserError(f"{name}={value}: must be one of {', '.join(choices)}{nearest(str(value), choices)}")
        if low is not None and value < low:
            raise UserError(f"{name}={value}: must be >= {low}")
        if value in values[:i]:
            raise UserError(f"{name}: {word(value)} is given twice")


@dataclass(frozen=True)
class CostOptions:
    """What `toymha cost` takes beside the keys of `train` (model=llama2_70b seq_len=4096 batch_size=1,32)."""

    compare: list[str] | None = key("models side by side, such as llama2_70b,llama2_70b_mha", default=None)
    dtype: str = key("numbers of weights, cache and activations", choices=("fp32", "fp16", "bf16"), default="fp16")
    shapes: bool = key("walk a tensor through one attention layer, and print its shape after each step", default=False)
    json: bool = key("one JSON object a configuration instead of the table", default=False)

    def __post_init__(self) -> None:
        if self.compare is not None and not (self.compare and all(self.compare)):
            asked = f"compare={','.join(self.compare)}"
            raise UserError(f"{asked} must name models, such as compare=llama2_70b,llama2_70b_mha")


@dataclass(frozen=True)
class DataOptions:
    """Options of `toymha data`."""

    fetch: str | None = key("a data set to bring here ahead of time", default=None)


@dataclass(frozen=True)
class CompletionOptions:
    """Options of `toymha completion`."""

    shell: str = key("whose completion to print", choices=tuple(COMPLETION))


@dataclass(frozen=True)
class NoOptions:
    """Of `toymha version`."""
