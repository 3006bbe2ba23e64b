"""What each command takes beside `train` and `plan`, whose keys are those of a run (config.py)."""

from __future__ import annotations

from dataclasses import dataclass

from toymha.analysis.names import ORDERS
from toymha.help import COMPLETION
from toymha.schema import key


@dataclass(frozen=True)
class EvalOptions:
    """Options of `toymha eval`."""

    run: str = key("the run folder", text=True)
    split: str = key("which part of the text", choices=("train", "val", "test"), default="val")
    weights: str = key("of the last step or of the best evaluation", choices=("last", "best"), default="last")
    data: str | None = key("another data set, read with the run's own tokenizer; null = the run's", default=None)
    path: str | None = key("the file, for data=file", text=True, default=None)
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
    text: str | None = key("a text whose maps are drawn; null: validation text", text=True, default=None)
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
