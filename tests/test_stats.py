"""Laws of the statistics: hand-worked numbers, scipy.stats as the second opinion, and how often they are right."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import scipy.stats

from toymha import stats

SAMPLES = [[1.5, 1.7], [0.1, -0.2, 0.4], [3, 3, 3.1, 2.9, 3.05, 1e-3], [1e9, 1e9 + 1, 1e9 + 2]]


def normal(*shape: int, seed: int = 0) -> list:
    return np.random.default_rng(seed).standard_normal(shape).tolist()


def test_nothing_slow_is_imported():
    """Every function of the module, without scipy.stats and without torch."""
    code = """
import sys
from toymha import stats
d = [0.1, 0.2, 0.3, 0.25, 0.5]
stats.estimate(d), stats.bootstrap(d), stats.p_value(d), stats.holm(d), stats.fisher(1, 2, 1, 2)
stats.seeds_needed(1, 1), stats.judge(0, 1, 0, 1)
print([m for m in ("scipy.stats", "torch") if m in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# Means and intervals


def test_an_estimate_by_hand():
    """1, 2, 3, 4: mean 2.5, standard deviation sqrt(5/3), half-width 3.18245 (t for 3 degrees, 95 %) x sd / 2."""
    e = stats.estimate([1, 2, 3, 4])
    assert (e.n, e.mean) == (4, 2.5)
    assert e.std == pytest.approx(1.2909944)
    assert e.half_width == pytest.approx(3.1824463 * 1.2909944 / 2)
    assert (e.low, e.high) == (e.mean - e.half_width, e.mean + e.half_width)


@pytest.mark.parametrize("values", SAMPLES)
@pytest.mark.parametrize("confidence", [0.95, 0.8, 0.99])
def test_intervals_are_those_of_scipy(values, confidence):
    """The interval is Student's t, as scipy.stats gives it."""
    e, n = stats.estimate(values, confidence), len(values)
    expected = scipy.stats.t.interval(confidence, n - 1, loc=sum(values) / n, scale=scipy.stats.sem(values))
    assert (e.low, e.high) == pytest.approx(expected, rel=1e-9)


def test_a_paired_difference_is_the_t_test_on_differences():
    """Seeds that only one side has are left out; the interval excludes 0 exactly where the t test says p < 0.05."""
    a, b = {0: 1.30, 1: 1.42, 2: 1.35, 3: 1.28, 9: 99.0}, {0: 1.25, 1: 1.41, 2: 1.31, 3: 1.26, 7: -99.0}
    d = stats.paired(a, b)
    test = scipy.stats.ttest_rel([a[s] for s in range(4)], [b[s] for s in range(4)])
    assert d.n == 4 and d.mean == pytest.approx(0.03)
    assert (d.low, d.high) == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert (d.low > 0 or d.high < 0) == (test.pvalue < 0.05)


def test_seeds_have_any_name_and_order():
    """Tuples of seeds pair as numbers do, and the order of the two sides says nothing."""
    a = {(0, 1): 1.30, (0, 2): 1.42, (1, 1): 1.35}
    b = {(1, 1): 1.28, (0, 1): 1.25, (0, 2): 1.41}
    assert stats.paired(a, b) == stats.paired(dict(enumerate(a.values())), {0: 1.25, 1: 1.41, 2: 1.28})


def test_pairing_removes_what_seeds_share():
    """Two settings that differ by 0.1 under each seed have a difference without spread, however the seeds differ."""
    d = stats.paired({s: s + 0.1 for s in range(5)}, {s: float(s) for s in range(5)})
    assert d.mean == pytest.approx(0.1) and d.half_width < 1e-9


def test_too_few_values():
    """One value has a mean and no interval; none has nothing; no common seed is none."""
    e = stats.estimate([2.0])
    assert e.mean == 2.0 and e.n == 1 and all(map(math.isnan, (e.std, e.half_width, e.low, e.high)))
    for e in (stats.estimate([]), stats.paired({0: 1.0}, {1: 1.0})):
        assert e.n == 0 and all(map(math.isnan, (e.mean, e.std, e.low)))


@pytest.mark.parametrize("n", range(2, 12))
@pytest.mark.parametrize("value", [0.1, -1 / 3, 5e8 + 0.1])
def test_equal_values_have_no_spread(value, n):
    """An interval of exactly one point, not a rounding error: a measurement without chance is judged exactly."""
    e = stats.estimate([value] * n)
    assert (e.mean, e.std, e.low, e.high) == (value, 0, value, value)


def test_t_intervals_cover_the_truth():
    """95 of 100 intervals of five normal differences hold the true one, whatever the scale."""
    found = [stats.estimate([3 + 0.01 * v for v in values]) for values in normal(2000, 5)]
    assert 0.93 < sum(e.low <= 3 <= e.high for e in found) / 2000 < 0.97


# The bootstrap


@pytest.mark.parametrize("n, low, high", [(5, 0.90, 0.94), (10, 0.93, 0.96)])
def test_bootstrap_intervals_cover_what_is_stated(n, low, high):
    """As measured in the docstring; a plain percentile interval has 0.84 and 0.90."""
    found = [stats.bootstrap(values) for values in normal(1000, n, seed=1)]
    assert low < sum(b[0] <= 0 <= b[1] for b in found if b) / 1000 < high


def test_the_bootstrap_is_a_function():
    """The same values, in whatever order, give the same interval, and nobody else's random numbers move."""
    values = normal(7)
    np.random.seed(0)
    before = np.random.get_state()[1].tolist()
    assert stats.bootstrap(values) == stats.bootstrap(values[::-1]) == stats.bootstrap(tuple(values))
    assert np.random.get_state()[1].tolist() == before


def test_the_bootstrap_follows_its_values():
    """Shifted and scaled with them, wider with more confidence, never outside their range, None where there are few."""
    values = normal(8)
    low, high = stats.bootstrap(values)
    assert stats.bootstrap([3 + 2 * v for v in values]) == pytest.approx((3 + 2 * low, 3 + 2 * high))
    assert min(values) < low < sum(values) / 8 < high < max(values)
    narrow, wide = stats.bootstrap(values, 0.5), stats.bootstrap(values, 1 - 1e-9)
    assert min(values) <= wide[0] < low < narrow[0] < narrow[1] < high < wide[1] <= max(values)
    assert stats.bootstrap([0.1] * 7) == (0.1, 0.1)
    assert stats.bootstrap(values[:4]) is None and stats.bootstrap(values[:5]) is not None
    assert stats.bootstrap([*values, math.nan]) is None and stats.bootstrap([*values, math.inf]) is None


@pytest.mark.parametrize("n, ones, low, high", [(5, 1, 0, 0.8), (10, 3, 0, 0.7)])
def test_the_bootstrap_of_zeros_and_ones(n, ones, low, high):
    """The mean of a sample is a binomial count / n, whose quantiles are known; here further out."""
    tail = scipy.stats.norm.cdf(math.sqrt(n / (n - 1)) * scipy.stats.t.ppf(0.025, n - 1))
    expected = scipy.stats.binom.ppf([tail, 1 - tail], n, ones / n) / n
    found = stats.bootstrap([1] * ones + [0] * (n - ones), draws=200_000)
    assert found == pytest.approx(tuple(expected)) == (low, high)


# Tests of no difference


@pytest.mark.parametrize("values", [*SAMPLES, [-v for v in SAMPLES[2]], [1.0 + 1e-9 * i for i in range(9)]])
def test_p_values_are_those_of_scipy(values):
    """Two-sided, also far out in the tails."""
    assert stats.p_value(values) == pytest.approx(scipy.stats.ttest_1samp(values, 0).pvalue, rel=1e-6, abs=0)


def test_p_values_agree_with_intervals():
    """p < 0.05 exactly where the 95 % interval leaves out 0."""
    for values in normal(200, 4):
        e = stats.estimate(values)
        assert (stats.p_value(values) < 0.05) == (e.low > 0 or e.high < 0)


@pytest.mark.parametrize("values, p", [([0.1] * 3, 0.0), ([-0.1] * 3, 0.0), ([0.0, 0.0], 1.0), ([1.0, -1.0], 1.0)])
def test_p_values_without_spread_or_without_mean(values, p):
    """Equal differences are certain; a mean of 0 is no evidence."""
    assert stats.p_value(values) == p


@pytest.mark.parametrize("values", [[], [1.0], [1.0, math.nan]])
def test_no_p_value(values):
    """Fewer than two differences, or one that is no number."""
    assert math.isnan(stats.p_value(values))


@pytest.fixture(scope="module")
def null_sweep() -> np.ndarray:
    """5,000 sweeps of four values against one baseline, five seeds, no difference anywhere: p-values (sweep, value)."""
    draws = np.random.default_rng(0).standard_normal((5000, 5, 5))  # sweep, value (the first: baseline), seed
    differences = (draws[:, 1:] - draws[:, :1]).tolist()
    return np.array([[stats.p_value(d) for d in sweep] for sweep in differences])


def test_p_values_without_a_difference_are_uniform(null_sweep):
    """Each comparison by itself, since those of one sweep share their baseline (Kolmogorov-Smirnov)."""
    for p in null_sweep.T:
        assert scipy.stats.kstest(p, "uniform").pvalue > 0.01


def test_holm_keeps_the_error_of_the_family(null_sweep):
    """Without a difference, some p of four is below 0.05 in about 17 of 100 sweeps, some adjusted one in at most 5."""
    raw = (null_sweep < 0.05).any(axis=1).mean()
    adjusted = np.mean([min(stats.holm(p.tolist())) < 0.05 for p in null_sweep])
    assert 0.14 < raw < 0.20 and 0.03 < adjusted < 0.056  # 0.05 and two standard errors


def test_holm_by_hand():
    """0.01 x 4, 0.02 x 3, 0.03 x 2 lifted to its predecessor's 0.06, 0.9; in the order given; at most 1."""
    assert stats.holm([0.03, 0.9, 0.01, 0.02]) == pytest.approx([0.06, 0.9, 0.04, 0.06])
    assert stats.holm([0.6, 0.7]) == [1.0, 1.0]
    assert stats.holm([0.04]) == [0.04] and stats.holm([]) == []
    assert stats.holm([0.02, 0.02]) == [0.04, 0.04]


def test_holm_leaves_nan_out():
    """What could not be compared stays nan and costs the others nothing."""
    first, *rest = stats.holm([math.nan, 0.01, 0.04, math.nan])
    assert math.isnan(first) and math.isnan(rest[2]) and rest[:2] == [0.02, 0.04]


def test_holm_rejects_what_its_steps_reject():
    """Holm's own procedure: from the smallest p on, compare with 0.05 / (how many are left); stop at one above."""
    for p in np.random.default_rng(4).uniform(0, 0.1, (200, 5)).tolist():
        steps = itertools.takewhile(lambda ip: ip[1] <= 0.05 / (5 - ip[0]), enumerate(sorted(p)))
        rejected = [x for _, x in steps]
        assert [x in rejected for x in p] == [x <= 0.05 for x in stats.holm(p)]


def test_fisher_by_hand():
    """3 of 4 against 1 of 4: of C(8, 4) = 70 splits, 16 + 1 give 3 or more, and as many 1 or fewer (the tea, 1935)."""
    assert stats.fisher(3, 4, 1, 4) == stats.fisher(1, 4, 3, 4) == 34 / 70
    assert stats.fisher(4, 4, 0, 4) == 2 / 70 and stats.fisher(2, 4, 2, 4) == 1


def test_fisher_is_that_of_scipy():
    """Every table of up to 6 against up to 6 runs, and some large ones."""
    sizes = [*itertools.product(range(1, 7), repeat=2), (40, 9)]
    tables = [(k1, n1, k2, n2) for n1, n2 in sizes for k1 in range(n1 + 1) for k2 in range(n2 + 1)]
    for k1, n1, k2, n2 in [*tables, (30, 200, 55, 300), (0, 1000, 9, 900)]:
        counts = [[k1, n1 - k1], [k2, n2 - k2]]
        p = scipy.stats.fisher_exact(counts).pvalue
        assert stats.fisher(k1, n1, k2, n2) == pytest.approx(p, rel=1e-9), counts


def test_fisher_of_nothing_and_of_nonsense():
    """No runs on a side, or all of one kind, show no difference; impossible counts are refused."""
    for table in [(0, 0, 0, 0), (0, 0, 2, 5), (0, 5, 0, 5), (5, 5, 3, 3)]:
        assert stats.fisher(*table) == 1
    for table in [(3, 2, 0, 5), (-1, 2, 1, 5), (0, 5, 3, 2), (1, 2, -1, 5)]:
        with pytest.raises(ValueError, match="not counts"):
            stats.fisher(*table)


@pytest.mark.parametrize("confidence", [0.95, 0.8])
def test_shares_are_those_of_wilson(confidence):
    """As scipy has them; by hand, 0 of n ends at z^2 / (n + z^2), and no share leaves 0 to 1 by rounding."""
    for k, n in ((0, 1), (1, 1), (3, 5), (9, 10), (0, 200), (200, 200)):
        ci = scipy.stats.binomtest(k, n).proportion_ci(confidence, "wilson")
        assert stats.share(k, n, confidence) == pytest.approx((ci.low, ci.high))
    for n in range(1, 60):
        assert stats.share(0, n)[0] == 0 and stats.share(n, n)[1] == 1
    assert stats.share(0, 10) == (0, pytest.approx(3.84146 / 13.84146, abs=1e-5))


@pytest.mark.parametrize(
    "counts, low, high",
    [
        ((56, 70, 48, 80), 0.0524, 0.3339),
        ((9, 10, 3, 10), 0.1705, 0.8090),
        ((10, 10, 0, 10), 0.6075, 1.0),
        ((5, 56, 0, 29), -0.0381, 0.1926),
    ],
)
def test_differences_of_shares_are_those_of_newcombe(counts, low, high):
    """Examples of his own table (1998, method 10), and mirrored."""
    k1, n1, k2, n2 = counts
    assert stats.share_difference(*counts) == pytest.approx((low, high), abs=6e-5)
    assert stats.share_difference(k2, n2, k1, n1) == pytest.approx((-high, -low), abs=6e-5)


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_differences_of_shares_from_wilson_intervals(confidence):
    """Put together from the Wilson intervals of scipy.stats, for every pair of counts of five runs and of eight."""
    for k1, k2 in itertools.product(range(6), range(9)):
        a = scipy.stats.binomtest(k1, 5).proportion_ci(confidence, "wilson")
        b = scipy.stats.binomtest(k2, 8).proportion_ci(confidence, "wilson")
        p, q = k1 / 5, k2 / 8
        low = p - q - math.sqrt((p - a.low) ** 2 + (b.high - q) ** 2)
        high = p - q + math.sqrt((a.high - p) ** 2 + (q - b.low) ** 2)
        assert stats.share_difference(k1, 5, k2, 8, confidence) == pytest.approx((low, high))


# Seeds


def test_what_seeds_settle():
    """The half-width of an estimate with that spread; falls with n; nothing from one seed."""
    e = stats.estimate([1, 2, 3, 4], 0.9)
    assert stats.settles(e.std, 4, 0.9) == e.half_width
    widths = [stats.settles(1.0, n) for n in range(2, 1001)]
    assert widths == sorted(widths, reverse=True) and widths[3] == pytest.approx(2.7764451 / math.sqrt(5))
    assert stats.settles(0.0, 3) == 0
    assert all(map(math.isnan, (stats.settles(1.0, 0), stats.settles(1.0, 1), stats.settles(math.nan, 3))))


@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_seeds_needed_is_the_least_number(confidence):
    """n is enough and n - 1 is not; a distance that n settles to the last digit needs n."""
    for std, distance in itertools.product([0.001, 0.02, 1.0], [0.001, 0.007, 0.3, 2.0]):
        n = stats.seeds_needed(std, distance, confidence)
        if n is None:
            assert stats.settles(std, 1000, confidence) > distance
        else:
            assert stats.settles(std, n, confidence) <= distance
            assert n == 2 or stats.settles(std, n - 1, confidence) > distance
    for n in (2, 3, 17, 1000):
        assert stats.seeds_needed(0.3, stats.settles(0.3, n, confidence), confidence) == n


def test_no_number_of_seeds_is_enough():
    """A mean on the bound, a limit, no spread known; without spread two are enough."""
    for std, distance in [(1.0, 0.0), (0.0, 0.0), (1.0, -1.0), (1.0, math.nan), (math.nan, 1.0), (1.0, 1e-6)]:
        assert stats.seeds_needed(std, distance) is None
    n = stats.seeds_needed(1.0, 0.5)
    assert stats.seeds_needed(1.0, 0.5, limit=n) == n and stats.seeds_needed(1.0, 0.5, limit=n - 1) is None
    assert stats.seeds_needed(0.0, 1e-9) == stats.seeds_needed(1.0, math.inf) == 2


# Verdicts


@pytest.mark.parametrize(
    "low, high, verdict",
    [
        (-2, -1, "refuted"),  # before the region 0..10
        (-2, 0, "undecided"),  # touches it from outside
        (-2, 5, "undecided"),  # reaches into it
        (-2, 10, "undecided"),
        (-2, 12, "undecided"),  # holds all of it
        (0, 5, "supported"),  # from its bound inwards
        (3, 5, "supported"),
        (0, 10, "supported"),  # all of it
        (5, 10, "supported"),
        (0, 12, "undecided"),
        (5, 12, "undecided"),
        (10, 12, "undecided"),
        (11, 12, "refuted"),
        (-1, -1, "refuted"),  # exact measurements
        (0, 0, "supported"),
        (5, 5, "supported"),
        (10, 10, "supported"),
        (11, 11, "refuted"),
    ],
)
def test_an_interval_against_a_region(low, high, verdict):
    """Each way in which low..high may lie to 0..10, and mirrored."""
    assert stats.judge(low, high, 0, 10) == stats.judge(-high, -low, -10, 0) == verdict


@pytest.mark.parametrize(
    "low, high, verdict", [(1, 2, "supported"), (0, 2, "supported"), (-1, 2, "undecided"), (-2, -1, "refuted")]
)
def test_a_claim_without_an_upper_bound(low, high, verdict):
    """At least 0, mirrored at most 0; a claim of everything is always supported, one of a point only by that point."""
    assert stats.judge(low, high, 0, math.inf) == stats.judge(-high, -low, -math.inf, 0) == verdict
    assert stats.judge(low, high, -math.inf, math.inf) == "supported"
    assert stats.judge(low, high, low, low) == "undecided" and stats.judge(low, low, low, low) == "supported"


def test_an_interval_that_is_none():
    """A bound that is nan decides nothing, also where the other bound could; a low above its high is a mistake."""
    for bounds in itertools.product([math.nan, -5.0], repeat=2):
        if not all(b == -5.0 for b in bounds):
            assert stats.judge(*bounds, 0, 1) == stats.judge(0, 1, *bounds) == "undecided"
    for bounds in [(2, 1, 0, 5), (0, 5, 2, 1)]:
        with pytest.raises(ValueError, match="low above high"):
            stats.judge(*bounds)


@pytest.mark.parametrize("several", itertools.product(["supported", "undecided", "refuted"], repeat=3))
def test_several_checks(several):
    """One that is refuted refutes, all that are supported support."""
    expected = "refuted" if "refuted" in several else "undecided" if "undecided" in several else "supported"
    assert stats.combine(several) == stats.combine(several[:1] * 2 + several[1:]) == expected


def test_a_statement_without_checks():
    """Nothing was asked, so nothing is decided; one check speaks for itself."""
    assert stats.combine([]) == "undecided"
    for v in ("supported", "undecided", "refuted"):
        assert stats.combine([v]) == v
