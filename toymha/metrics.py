"""What can be compared between runs: each metric with its name, its unit and where it is read. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toymha.config import GROUPS, REPLICATES
from toymha.runs import Run
from toymha.schema import UserError, nearest, word


@dataclass(frozen=True)
class Result:
    """One run as reports see it: its folder, run.json and summary.json, read once."""

    path: Path
    info: dict[str, Any]
    summary: dict[str, Any]

    @classmethod
    def of(cls, run: Run) -> Result:
        return cls(run.path, run.info, run.summary)

    def rows(self) -> list[dict[str, Any]]:
        """Its logged rows, read anew each time."""
        return Run(self.path, None).rows()  # type: ignore[arg-type]

    @property
    def status(self) -> str:
        return self.summary.get("status", "running")

    @property
    def done(self) -> bool:
        return self.status == "done" and math.isfinite(self.summary["val"]["loss"])

    @property
    def replicate(self) -> tuple[int, ...]:
        """What pairs this run with those of other settings: its seeds, of everything, of weights, of batches."""
        values = self.info["values"]
        return tuple(values["seed"] if values.get(k) is None else values[k] for k in REPLICATES)

    @property
    def seed_name(self) -> str:
        values = self.info["values"]
        return ", ".join(f"{k.replace('_', ' ')} {values[k]}" for k in REPLICATES if values.get(k) is not None)

    def value(self, key: str) -> Any:
        """A key's value in this run; a group (`model`) has the name of the chosen file."""
        return self.info["choices"].get(key) if key in GROUPS else self.info["values"].get(key)

    @property
    def text(self) -> tuple[Any, ...]:
        """What must be equal for losses a token to be comparable."""
        return tuple(self.value(k) for k in ("data.sha256", "data.tokenizer", "data.vocab_size"))

    @property
    def stalled(self) -> bool:
        """Whether it diverged, or ended no better than the frequencies of the tokens alone."""
        s = self.summary
        return self.status == "diverged" or (self.done and s["val"]["loss"] >= s["unigram_loss"])


@dataclass(frozen=True)
class Metric:
    """`read` gives the number of a finished run, or None where it has none.

    `ratio`: settings are compared by ratio, in percent, rather than by difference. `exact`: the number follows from
    the configuration alone, so that one run is enough. `share`: a property that a run has (1) or not (0), diverged
    runs too.
    """

    name: str
    label: str
    unit: str
    read: Callable[[Result], float | None]
    ratio: bool = False
    exact: bool = False
    share: bool = False
    digits: int = 4
    higher_is_better: bool = False

    def signed(self, told: float) -> str:
        """A difference as `told` gives it, with its sign."""
        if math.isnan(told):
            return "-"
        return f"{told:+.{(1 if abs(told) >= 1 or not told else 2) if self.ratio or self.share else self.digits}f}"

    @property
    def unit_of_difference(self) -> str:
        return "%" if self.ratio or self.share else self.unit

    def of(self, result: Result) -> float | None:
        """The number on the scale of differences: its logarithm, where settings are compared by ratio."""
        if not (result.done or (self.share and result.status == "diverged")):
            return None
        value = self.read(result)
        if value is None or not math.isfinite(value):
            return None
        return value if not self.ratio else math.log(value) if value > 0 else None

    def told(self, difference: float) -> float:
        """A difference on that scale as people tell it: in the metric's unit, or in percent."""
        if self.ratio:
            return percent(difference)
        return 100 * difference if self.share else difference

    def scaled(self, told: float) -> float:
        """The inverse of `told`, for the bounds of a claim."""
        if self.ratio:
            return math.log1p(told / 100) if told > -100 else -math.inf
        return told / 100 if self.share else told


def percent(log_ratio: float) -> float:
    """A difference of logarithms, such as of two losses, as the change in percent; infinite where it overflows."""
    return 100 * math.expm1(log_ratio) if log_ratio < 700 else math.inf


def setting_name(setting: dict[str, Any]) -> str:
    """Keys with their values as one types them: `n_head=4, w_o=false`."""
    return ", ".join(f"{k}={word(v)}" for k, v in setting.items())


def number(summary: Any, path: tuple[str, ...]) -> float | None:
    """A number inside nested tables, or None where it is not there."""
    for part in path:
        summary = summary.get(part) if isinstance(summary, dict) else None
    return summary if isinstance(summary, (int, float)) else None


def _number(*path: str) -> Callable[[Result], float | None]:
    return lambda result: number(result.summary, path)


SPLITS = {"val": "validation", "test": "test"}


def _loss(split: str) -> Metric:
    return Metric(f"{split}_loss", f"loss on the {SPLITS[split]} split", "nats", _number(split, "loss"))


def _ppl(split: str) -> Metric:
    return Metric("ppl", f"perplexity on the {SPLITS[split]} split", "%", _number(split, "ppl"), ratio=True, digits=3)


def _bits_per_char(split: str) -> Metric:
    label = f"bits per character on the {SPLITS[split]} split"
    return Metric("bits_per_char", label, "bits", _number(split, "bits_per_char"))


def _speed(name: str, label: str, field: str) -> Metric:
    return Metric(name, label, "tokens/s", _number(field), ratio=True, higher_is_better=True)


OF_SPLIT = {"ppl": _ppl, "bits_per_char": _bits_per_char}  # metrics whose name does not say on which split
METRICS = {
    m.name: m
    for m in (
        _loss("test"),
        _loss("val"),
        _ppl("test"),
        _bits_per_char("test"),
        _speed("tokens_per_s", "training speed, of the median step", "steady_tokens_per_s"),
        _speed("decode_tokens_per_s", "decoding speed", "decode_tokens_per_s"),
        Metric("parameters", "parameters", "", _number("parameters"), ratio=True, exact=True),
        Metric("flops", "FLOPs of training, a token", "", _number("flops_per_token"), ratio=True, exact=True),
        Metric("kv_bytes", "bytes of KV cache for one sequence", "", _number("kv_bytes"), ratio=True, exact=True),
        Metric(
            "stalled", "runs that diverged or never beat frequencies alone", "", lambda r: float(r.stalled), share=True
        ),
    )
}
# By relation: `right/topic` and so on, for data sets whose tokens are tagged.
BY_RELATION = {
    "loss": ("loss on {}", "nats", "loss", {}),
    "right": ("probability of the right class on {}", "", "right", {"higher_is_better": True}),
    "accuracy": ("accuracy on {}", "", "accuracy", {"higher_is_better": True}),
}


def metric(name: str, split: str = "test") -> Metric:
    """A metric by name: one of METRICS, or `loss/R`, `right/R`, `accuracy/R`, `learned/R` for a relation R.

    `split`: where it is measured, if its name does not say. Raises UserError with the nearest name.
    """
    if name in OF_SPLIT:
        return OF_SPLIT[name](split)
    if name in METRICS:
        return METRICS[name]
    kind, _, relation = name.partition("/")
    if relation and kind in BY_RELATION:
        label, unit, field, more = BY_RELATION[kind]
        return Metric(name, label.format(relation), unit, _number(split, "parts", relation, field), **more)
    if relation and kind == "learned":
        return Metric(name, f"runs that learned {relation}", "", _learned(relation), share=True, higher_is_better=True)
    valid = [*METRICS, *(f"{k}/RELATION" for k in (*BY_RELATION, "learned"))]
    raise UserError(f"metric {name}: no such metric{nearest(name, valid) or ';'} valid: {', '.join(valid)}")


def _learned(relation: str) -> Callable[[Result], float | None]:
    def read(result: Result) -> float | None:
        if result.status == "diverged":
            return 0.0
        learned = result.summary.get("learned") or {}
        return float(learned[relation] is not None) if relation in learned else None

    return read
