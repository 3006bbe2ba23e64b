"""What each command takes beside `train` and `plan`, whose keys are those of a run (config.py)."""

from __future__ import annotations

from dataclasses import dataclass

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
