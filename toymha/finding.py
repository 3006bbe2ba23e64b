"""What a check of a statement measured, and how people tell it. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from toymha.metrics import Metric, percent, setting_name


@dataclass(frozen=True)
class Finding:
    """One check in one slice, measured: a difference, or a number itself (`absolute`).

    Numbers are on the metric's scale; `Metric.told` turns them into those that people read.
    """

    that: str
    where: dict[str, Any]  # the slice: key -> value
    metric: Metric
    claim_low: float  # the region in which the statement claims the difference, or the number itself, to be
    claim_high: float
    absolute: bool = False
    n: int = 0  # pairs; runs, where it is a number itself
    difference: float = math.nan  # their mean, also that of a number itself
    low: float = math.nan  # its 95 % interval
    high: float = math.nan
    bootstrap: tuple[float, float] | None = None
    p: float = math.nan  # of no difference; a number itself is compared with nothing and has none
    p_holm: float = math.nan
    noise: float = math.nan  # the difference in units of the baseline's standard deviation over seeds
    verdict: str = "undecided"
    seeds_needed: int | None = None  # where it is undecided: how many seeds would decide a difference of this size
    notes: tuple[str, ...] = ()
    simultaneous: bool = False  # the interval holds for several comparisons at once; the difference is a gain

    @property
    def unit(self) -> str:
        return self.metric.unit if self.absolute else self.metric.unit_of_difference

    def said(self, x: float) -> str:
        """A number on the metric's scale as people read it, without its unit: a difference has its sign."""
        told = self.metric.told(x)
        return self.metric.shown(told) if self.absolute else self.metric.signed(told)

    def measured(self) -> str:
        """The mean in its unit, such as `+0.1500 nats` or `31.2 %`."""
        if not self.n:
            return f"no finished {'runs' if self.absolute else 'pairs'}"
        return f"{self.said(self.difference)} {self.unit}".rstrip()

    def text(self) -> str:
        """The same with its interval: `+0.1500 [+0.1400, +0.1600] nats`, `31.2 [24.1, 38.3] %`."""
        if not self.n:
            return self.measured()
        if self.metric.exact:
            return f"{self.measured()} (counted)"
        one = "(one seed: no interval)"
        interval = one if math.isnan(self.low) else f"[{self.said(self.low)}, {self.said(self.high)}]"
        return f"{self.said(self.difference)} {interval} {self.unit}".rstrip()

    @property
    def place(self) -> str:
        """The slice in words."""
        return setting_name(self.where)

    @property
    def title(self) -> str:
        """What is claimed, and in which slice."""
        return f"{self.that} ({self.place})" if self.where else self.that

    def claim(self) -> str:
        """The region that is claimed, such as `+0.2000 to +0.5000 nats` or `20.0 to 40.0 %`."""
        low, high = (self.said(x) if math.isfinite(x) else "" for x in (self.claim_low, self.claim_high))
        words = f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}"
        return f"{words} {self.unit}".rstrip()

    def perplexity(self) -> float | None:
        """The difference of a loss in percent of perplexity."""
        is_one = self.metric.unit == "nats" and not self.absolute and not self.simultaneous
        return percent(self.difference) if self.n and is_one else None
