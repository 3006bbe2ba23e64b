"""Is a difference real? Estimates, tests and verdicts. Pure numbers: no torch, no run folders.

Special functions come from scipy.special, inside the functions: scipy.stats takes a second to import.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Seed = TypeVar("Seed", bound=Hashable)  # whatever names a replicate: a seed, or a tuple of several


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


def estimate(values: Sequence[float], confidence: float = 0.95, step: float = 0.0) -> Estimate:
    """Student's t interval for the mean of independent normal values (Student 1908), in the unit of the values.

    `step`: of values that are counted in steps, for which a spread below step / sqrt(12), that of rounding (Sheppard
    1897), is not to be believed: it is taken in its place.
    """
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    # equal values are their own mean: a sum divided by n may be off in the last digit, and the spread then not 0
    mean = values[0] if len(set(values)) == 1 else math.fsum(values) / n
    if n == 1:
        return Estimate(mean, math.nan, math.nan, 1)
    std = max(math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1)), step / math.sqrt(12))
    return Estimate(mean, std, settles(std, n, confidence), n)


def paired(values: Mapping[Seed, float], baseline: Mapping[Seed, float], confidence: float = 0.95) -> Estimate:
    """The mean of value minus baseline over the seeds that both have, with its interval."""
    return estimate([v - baseline[seed] for seed, v in values.items() if seed in baseline], confidence)


def bootstrap(
    differences: Sequence[float], confidence: float = 0.95, draws: int = 10_000
) -> tuple[float, float] | None:
    """An interval for the mean that assumes no normal values; None below 5 values, or if one is not finite.

    The expanded percentile bootstrap (Hesterberg 2015): means of samples drawn with replacement, between quantiles that
    lie further out than (1 - confidence) / 2, by as much as a percentile interval is too narrow for n normal values.
    Measured over 10,000 experiments at confidence 0.95, the share of intervals that hold the true mean:

        n                                      5       7      10      20
        this one, normal values             0.92    0.94    0.95    0.95
        BCa (Efron 1987), normal values     0.84    0.87    0.90    0.93
        Student's t, normal values          0.95    0.95    0.95    0.95
        this one, exponential values        0.88    0.90    0.91    0.93
        BCa, exponential values             0.81    0.85    0.88    0.92
        Student's t, exponential values     0.89    0.89    0.90    0.92

    So at few seeds trust `estimate` first; this is a second opinion on values that are far from normal. The interval
    never leaves the range of the values. The same values in any order give the same interval: the draws are fixed.
    """
    n = len(differences)
    if n < 5 or not all(map(math.isfinite, differences)):
        return None
    import numpy as np
    from scipy.special import ndtr, stdtrit

    values = np.sort(np.asarray(differences, dtype=float))
    drawn = np.random.default_rng(0).integers(n, size=(n, draws), dtype=np.uint16)  # small numbers: half the time
    means = values[drawn].mean(axis=0)
    tail = ndtr(math.sqrt(n / (n - 1)) * stdtrit(n - 1, (1 - confidence) / 2))
    low, high = np.quantile(means, [tail, 1 - tail]).clip(values[0], values[-1])  # a mean of equal values may round
    return float(low), float(high)


# Tests: how surprising is it, if there is no difference?


def p_value(differences: Sequence[float]) -> float:
    """Two-sided paired t test that the mean is 0 (Student 1908): below 0.05 where the 95 % interval leaves out 0.

    nan for fewer than two differences. Equal differences leave no doubt: 1 where they are 0, else 0.
    """
    d = estimate(differences)
    if d.n < 2:
        return math.nan
    if d.std == 0:
        return 1.0 if d.mean == 0 else 0.0
    from scipy.special import stdtr

    return 2 * float(stdtr(d.n - 1, -abs(d.mean) / (d.std / math.sqrt(d.n))))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given (Holm 1979).

    Of several comparisons without a difference, the chance that any is below 0.05 is then at most 5 %, also where they
    share a baseline. A nan is no comparison: it stays nan, and the others are adjusted as if it were not there.
    """
    smallest_first = sorted((p, i) for i, p in enumerate(p_values) if not math.isnan(p))
    adjusted, least = [math.nan] * len(p_values), 0.0
    for rank, (p, i) in enumerate(smallest_first):
        least = max(least, min(1.0, (len(smallest_first) - rank) * p))  # never below that of a smaller p
        adjusted[i] = least
    return adjusted


def fisher(k1: int, n1: int, k2: int, n2: int) -> float:
    """Two-sided exact test of k1 in n1 runs against k2 in n2 (Fisher 1922), such as runs that diverged.

    The chance, with no difference and k1 + k2 in all, of a split no more likely than this one. Chances are compared as
    whole numbers, so that equally likely splits are equal without a tolerance. Raises ValueError unless 0 <= k <= n.
    """
    ways = _splits(k1, n1, k2, n2)
    return sum(w for w in ways.values() if w <= ways[k1]) / sum(ways.values())


def _splits(k1: int, n1: int, k2: int, n2: int) -> dict[int, int]:
    """Count among the first n1 -> in how many ways k1 + k2 of n1 + n2 runs give that count."""
    if not (0 <= k1 <= n1 and 0 <= k2 <= n2):
        raise ValueError(f"{k1} of {n1} and {k2} of {n2} are not counts among runs")
    k = k1 + k2
    return {i: math.comb(n1, i) * math.comb(n2, k - i) for i in range(max(0, k - n2), min(n1, k) + 1)}


def share_difference(k1: int, n1: int, k2: int, n2: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval for the difference of two shares, k1 / n1 - k2 / n2 (Newcombe 1998, method 10: from Wilson's scores).

    Also for shares of 0 and 1, where the usual interval has no width. Needs n1 > 0 and n2 > 0.
    """
    (low1, high1), (low2, high2) = (share(k, n, confidence) for k, n in ((k1, n1), (k2, n2)))
    p1, p2 = k1 / n1, k2 / n2
    return p1 - p2 - math.hypot(p1 - low1, high2 - p2), p1 - p2 + math.hypot(high1 - p1, p2 - low2)


def share(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Interval for a share k / n of runs (Wilson 1927: from the score test). Needs n > 0."""
    from scipy.special import ndtri

    z = float(ndtri(0.5 + confidence / 2))
    middle, half = (k + z * z / 2) / (n + z * z), z * math.sqrt(k * (n - k) / n + z * z / 4) / (n + z * z)
    return middle - half if k else 0.0, middle + half if k < n else 1.0  # no rounding beyond what a share can be


# Seeds: what can so many tell?


def settles(std: float, n: int, confidence: float = 0.95) -> float:
    """Half the width of the interval of n differences with this standard deviation, in its unit; nan for n < 2.

    n seeds can tell from 0 what is further from 0 than this.
    """
    if n < 2:
        return math.nan
    from scipy.special import stdtrit  # the quantile of Student's t

    return float(stdtrit(n - 1, 0.5 + confidence / 2)) * std / math.sqrt(n)


def seeds_needed(std: float, distance: float, confidence: float = 0.95, limit: int = 1000) -> int | None:
    """The least number of paired seeds, 2 or more, whose interval reaches no further than `distance` from the mean.

    `distance`, in the unit of `std`: from the mean to the nearest bound of the claim. None where no number up to
    `limit` is enough, as for a mean that lies on the bound, and where std is nan. A rough number: it takes mean and std
    for the true ones, and of five seeds the true std may well be 0.6 or 2.9 times theirs (95 % chi-squared interval).
    """
    if not distance > 0:
        return None
    return next((n for n in range(2, limit + 1) if settles(std, n, confidence) <= distance), None)


# Verdicts: what does it say about the claim?


def judge(low: float, high: float, claim_low: float, claim_high: float) -> str:
    """The interval low..high of a measured difference against the region that a statement claims for it.

    supported: the interval lies inside the region. refuted: it has no point in common with it. undecided: it has points
    inside and outside, or a bound is nan. Bounds belong to both, and those of the region may be infinite: an
    interval that ends on the region's bound from within is supported, one that touches it from outside undecided. An
    exact measurement has low == high and is never undecided. Raises ValueError for a low above its high.
    """
    if low > high or claim_low > claim_high:
        raise ValueError(f"{low}..{high} against {claim_low}..{claim_high}: low above high")
    if any(map(math.isnan, (low, high, claim_low, claim_high))):
        return "undecided"
    if claim_low <= low and high <= claim_high:
        return "supported"
    return "refuted" if high < claim_low or claim_high < low else "undecided"


def combine(verdicts: Sequence[str]) -> str:
    """A statement of several checks: refuted when one is, supported when all are, else (and without any) undecided."""
    if "refuted" in verdicts:
        return "refuted"
    return "supported" if verdicts and all(v == "supported" for v in verdicts) else "undecided"
