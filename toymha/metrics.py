"""What can be compared between runs: each metric with its name, its unit and where it is read. No torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toymha.analysis.names import FAMILIES, KINDS, MEASURES, ORDERS
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
    def predicts(self) -> str:
        """What its loss is taken over: with an encoder targets alone, else every token, those of sources too."""
        return "targets" if self.value("n_encoder_layer") else "everything"

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
    runs too. `scale`: by what the number is multiplied when it is told, 100 for percent. `quality`: it tells how good
    a run is, and a diverged one is worse than any number. `needs`: the key with which training measures it. `step`:
    of a count, the distance between the numbers that are possible.
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
    scale: float = 1.0
    quality: bool = True
    needs: str = ""
    step: Callable[[Result], float] | None = None

    def signed(self, told: float) -> str:
        """A difference as `told` gives it, with its sign."""
        return "-" if math.isnan(told) else f"{told:+.{self._digits(told)}f}"

    def shown(self, told: float) -> str:
        """A number itself as `told` gives it."""
        return "-" if math.isnan(told) else f"{told:.{self._digits(told)}f}"

    def _digits(self, told: float) -> int:
        in_percent = self.ratio or self.unit == "%"
        return self.digits if not in_percent else 1 if abs(told) >= 1 or not told else 2

    @property
    def unit_of_difference(self) -> str:
        return "%" if self.ratio else "percentage points" if self.unit == "%" else self.unit

    @property
    def absolute(self) -> Metric:
        """The same for a number itself: without logarithms, in its own unit."""
        return replace(self, ratio=False)

    def lacking(self, result: Result) -> str:
        """Why a finished run is without the number."""
        advice = f" (train with {self.needs})" if self.needs and not result.summary.get("heads") else ""
        return f"without {self.name}{advice}"

    def of(self, result: Result) -> float | None:
        """The number on the scale of differences: its logarithm, where settings are compared by ratio."""
        if not (result.done or (self.share and result.status == "diverged")):
            return None
        value = self.read(result)
        if value is None or not math.isfinite(value):
            return None
        return value if not self.ratio else math.log(value) if value > 0 else None

    def told(self, x: float) -> float:
        """A difference, or a number itself, on that scale as people tell it: in the metric's unit, or in percent."""
        return percent(x) if self.ratio else self.scale * x

    def scaled(self, told: float) -> float:
        """The inverse of `told`, for the bounds of a claim."""
        if self.ratio:
            return math.log1p(told / 100) if told > -100 else -math.inf
        return told / self.scale


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
    return Metric("ppl", f"perplexity on the {SPLITS[split]} split", "", _number(split, "ppl"), ratio=True, digits=3)


def _bits_per_char(split: str) -> Metric:
    label = f"bits per character on the {SPLITS[split]} split"
    return Metric("bits_per_char", label, "bits", _number(split, "bits_per_char"))


def _speed(name: str, label: str, field: str) -> Metric:
    return Metric(name, label, "tokens/s", _number(field), ratio=True, digits=0, higher_is_better=True)


def _share(name: str, label: str, read: Callable[[Result], float | None], higher_is_better: bool = False) -> Metric:
    return Metric(name, label, "%", read, share=True, scale=100, higher_is_better=higher_is_better)


def _counted(name: str, label: str, unit: str, field: str) -> Metric:
    return Metric(name, label, unit, _number(field), ratio=True, exact=True, digits=0)


# Of the heads: what summary.json has in `heads` once training has studied them (toymha/analysis).


def _of_heads(
    name: str,
    label: str,
    unit: str,
    read: Callable[[Result], float | None],
    scale: float = 1.0,
    digits: int = 1,
    step: Callable[[Result], float] | None = None,
) -> Metric:
    """None of these tells how good a model is: a diverged run is no worse in it, it has none."""
    told: dict[str, Any] = {"scale": scale, "digits": digits, "needs": "budget.heads=true", "step": step}
    return Metric(name, label, unit, read, quality=False, higher_is_better=True, **told)


def _one_head(result: Result) -> float:
    """As a share of all heads."""
    n = (result.summary.get("heads") or {}).get("n")
    return 1 / n if n else 0.0


def _studied() -> list[Metric]:
    """Those whose names have no part to fill in."""
    can_go, read = "heads that can go at less than 1 % perplexity", _number("heads", "removable", "zeroed")
    out = [_of_heads("removable", can_go, "%", read, scale=100, step=_one_head)]
    for order in ORDERS:
        label, read = f"{can_go}, in the order of `{order}`", _number("heads", "removable", order)
        out.append(_of_heads(f"removable/{order}", label, "%", read, scale=100, step=_one_head))
    for a, b in itertools.combinations(MEASURES, 2):
        label = f"Spearman's rank correlation of the importance of heads, `{a}` with `{b}`"
        read = _number("heads", "correlations", f"{a} {b}")
        out.append(_of_heads(f"correlation/{a}/{b}", label, "", read, digits=3))
    label = "heads that are different from the others of their layer"
    return [*out, _of_heads("effective_heads", label, "%", _number("heads", "effective"), scale=100)]


def _of_kind(kind: str) -> Metric:
    """How many heads are of a kind or a family: 0, where all heads were looked at and none is.

    A kind that is not in KINDS is a relation of a generated text, and no run of another text has it.
    """

    def read(result: Result) -> float | None:
        heads = result.summary.get("heads") or {}
        counts = heads.get("families" if kind in FAMILIES else "kinds")
        known = (*KINDS, *FAMILIES, *(result.summary["val"].get("parts") or ()))
        if counts is None or kind not in (*counts, *known):
            return None
        return float(counts.get(kind, 0))

    return _of_heads(f"heads/{kind}", f"{kind} heads", "heads", read, step=lambda _: 1.0)


def _exact(split: str, how: str = "greedy") -> Metric:
    label = f"targets that are right entirely, {HOW[how]}, {SPLITS[split]} split"
    read = _number("pairs", split, how, "exact")
    return Metric(_written("exact", how), label, "%", read, scale=100, digits=1, higher_is_better=True)


def _ser(split: str, how: str = "greedy") -> Metric:
    label = f"symbol error rate of what is written, {HOW[how]}, {SPLITS[split]} split"
    return Metric(_written("ser", how), label, "%", _number("pairs", split, how, "ser"), scale=100, digits=1)


def _written(name: str, how: str) -> str:
    return name if how == "greedy" else f"{name}/{how}"


HOW = {"greedy": "greedily", "beam": "by beam search"}  # targets of pairs are written
OF_SPLIT = {  # metrics whose name does not say on which split
    "ppl": _ppl,
    "bits_per_char": _bits_per_char,
    "exact": _exact,
    "exact/beam": lambda split: _exact(split, "beam"),
    "ser": _ser,
    "ser/beam": lambda split: _ser(split, "beam"),
}
METRICS = {
    m.name: m
    for m in (
        _loss("test"),
        _loss("val"),
        _speed("tokens_per_s", "training speed, of the median step", "steady_tokens_per_s"),
        _speed("decode_tokens_per_s", "decoding speed", "decode_tokens_per_s"),
        _counted("parameters", "parameters", "parameters", "parameters"),
        _counted("flops", "FLOPs of training, a token", "FLOPs", "flops_per_token"),
        _counted("kv_bytes", "bytes of KV cache for one sequence", "bytes", "kv_bytes"),
        _share("stalled", "runs that diverged or never beat frequencies alone", lambda r: float(r.stalled)),
        *_studied(),
        *(make("test") for make in OF_SPLIT.values()),
    )
}
# By relation: `right/topic` and so on, for data sets whose tokens are tagged.
BY_RELATION: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "loss": ("loss on {}", "nats", "loss", {}),
    "right": ("probability of the right class on {}", "", "right", {"higher_is_better": True}),
    "accuracy": ("accuracy on {}", "", "accuracy", {"higher_is_better": True}),
}


def metric(name: str, split: str = "test") -> Metric:
    """A metric by name: one of METRICS, or `loss/R`, `right/R`, `accuracy/R`, `learned/R` for a relation R, or
    `heads/K` for a kind or a family of heads.

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
        return _share(name, f"runs that learned {relation}", _learned(relation), higher_is_better=True)
    if relation and kind == "heads":
        return _of_kind(relation)
    valid = [*METRICS, *(f"{k}/RELATION" for k in (*BY_RELATION, "learned")), "heads/KIND"]
    meant = [*valid, *(f"{k}/{relation}" for k in (*BY_RELATION, "learned", "heads") if relation)]
    raise UserError(f"metric {name}: no such metric{nearest(name, meant) or ';'} valid: {', '.join(valid)}")


def _learned(relation: str) -> Callable[[Result], float | None]:
    def read(result: Result) -> float | None:
        if result.status == "diverged":
            return 0.0
        learned = result.summary.get("learned") or {}
        return float(learned[relation] is not None) if relation in learned else None

    return read
