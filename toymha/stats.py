"""Means, and differences paired by seed. Pure numbers: no torch, no run folders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A mean over n seeds, its standard deviation (n - 1), half the width of its interval; nan where n is too small."""

    mean: float
    std: float
    half_width: float
    n: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def estimate(values: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Student's t interval for the mean of independent normal values."""
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1))
    from scipy.special import stdtrit  # the t quantile, without the second that scipy.stats takes to import

    t = float(stdtrit(n - 1, 0.5 + confidence / 2))
    return Estimate(mean, std, t * std / math.sqrt(n), n)


def paired(values: Mapping[int, float], baseline: Mapping[int, float], confidence: float = 0.95) -> Estimate:
    """The mean of value minus baseline over the seeds that both have, with its interval."""
    return estimate([values[seed] - baseline[seed] for seed in sorted(values.keys() & baseline.keys())], confidence)
