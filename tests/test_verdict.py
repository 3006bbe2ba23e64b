"""From made-up runs to verdicts: each kind of check, what is unfinished, what was unequal, what changed nothing.

Claims about a number itself, and about heads, stand in the second half.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import scipy.stats

from toymha import caveats, metrics
from toymha.analysis import importance, kinds
from toymha.metrics import METRICS, Result, metric
from toymha.report import Report
from toymha.schema import UserError
from toymha.statement import Sweep
from toymha.verdict import judge

NOISE = (0.000, 0.001, -0.001, 0.002, -0.002, 0.0005, -0.0005, 0.0015)  # the same for all settings: pairs cancel it
WOBBLE = (0.0002, -0.0001, 0.0, 0.0001, -0.0002, 0.0001, -0.0001, 0.0)  # what pairs leave


def result(seed: int = 0, loss: float | None = None, status: str = "done", summary=None, **values) -> Result:
    """A run as reports see it; keyword arguments are its settings (`optim__lr` for optim.lr)."""
    values = {k.replace("__", "."): v for k, v in values.items()}
    numbers = {"status": status, "parameters": 1000, "flops_per_token": 6000, "tokens_trained": 100, "seconds": 1.0}
    if loss is not None:
        score = {"loss": loss, "ppl": math.exp(loss), "bits_per_char": loss / math.log(2)}
        numbers |= {"val": score, "test": score, "best": score | {"step": 1}, "unigram_loss": 3.0}
    about = {"values": {"seed": seed, "data.sha256": "x", **values}, "choices": {"model": "mha"}}
    return Result(Path("run"), about, numbers | (summary or {}))


def runs_of(key: str, losses: dict, seeds: int = 5, **more) -> list[Result]:
    """Runs of each value of a key, with the noise of their seeds."""
    return [
        result(s, loss + NOISE[s] * 20 + WOBBLE[s] * (i + 1), **{key: v}, **more)
        for i, (v, loss) in enumerate(losses.items())
        for s in range(seeds)
    ]


def sweep(**check) -> Sweep:
    checks = [{"that": "b against a", "value": {"k": "b"}, "against": {"k": "a"}} | check]
    return Sweep(name="s", question="?", statement="b differs from a", axes={"k": ["a", "b"]}, checks=checks)


@pytest.mark.parametrize(
    ("difference", "low", "high", "word"),
    [
        (-0.05, None, -0.01, "supported"),
        (-0.005, None, -0.01, "refuted"),  # there, but smaller than is of interest
        (+0.05, None, -0.01, "refuted"),
        (-0.01, None, -0.01, "undecided"),  # on the bound
        (0.3, 0.2, 0.5, "supported"),
        (0.15, 0.2, 0.5, "refuted"),
        (0.7, 0.2, 0.5, "refuted"),
        (0.0, -0.01, 0.01, "supported"),
        (0.02, -0.01, 0.01, "refuted"),
    ],
)
def test_a_claim_is_a_region(difference, low, high, word):
    """Inside it is supported, outside refuted, and pairs see through noise that is much larger than the difference."""
    verdict = judge(sweep(low=low, high=high), runs_of("k", {"a": 2.0, "b": 2.0 + difference}))
    assert verdict.word == word
    (f,) = verdict.findings
    assert f.n == 5 and f.difference == pytest.approx(difference, abs=1e-9)
    assert f.low < difference < f.high and f.bootstrap[0] < difference < f.bootstrap[1]
    assert f.perplexity() == pytest.approx(100 * (math.exp(f.difference) - 1))


def test_one_seed_gives_a_number_and_no_verdict():
    verdict = judge(sweep(high=-0.01), runs_of("k", {"a": 2.0, "b": 1.0}, seeds=1))
    (f,) = verdict.findings
    assert (
        verdict.word == "undecided"
        and f.difference == pytest.approx(-1, abs=1e-3)
        and math.isnan(f.low)
        and "one seed" in f.text()
    )


def test_how_many_seeds_would_decide():
    """A difference half a bound away with wide noise: more seeds are named, and enough of them would do."""
    noisy = [result(s, 2.0 + 0.1 * (v == "b") + 0.2 * (-1) ** s * (v == "b"), k=v) for v in "ab" for s in range(4)]
    verdict = judge(sweep(low=0.05), noisy)
    assert verdict.word == "undecided" and verdict.seeds_needed > 4
    many = [
        result(s, 2.0 + 0.1 * (v == "b") + 0.2 * (-1) ** s * (v == "b"), k=v)
        for v in "ab"
        for s in range(verdict.seeds_needed + 20)
    ]
    assert judge(sweep(low=0.05), many).word == "supported"


def test_unfinished_runs_are_counted_and_never_averaged():
    runs = [*runs_of("k", {"a": 2.0, "b": 2.1}), result(7, status="diverged", k="b"), result(7, 2.0, k="a")]
    (f,) = judge(sweep(low=0.05), runs).findings
    assert f.n == 5 and any("1/6 diverged" in note for note in f.notes)
    (f,) = judge(sweep(low=0.05), [result(0, 2.0, k="a")]).findings
    assert f.n == 0 and f.verdict == "undecided" and any("no such runs" in note for note in f.notes)


def diverging(value: int, against: int, seeds: int = 6, loss: float = 2.0) -> list[Result]:
    """Runs of a and b, of which the first ones of b (`value`) and of a (`against`) diverged."""
    out = []
    for k, bad, mean in (("b", value, loss), ("a", against, 2.0)):
        for s in range(seeds):
            out.append(result(s, None if s < bad else mean + WOBBLE[s], "diverged" if s < bad else "done", k=k))
    return out


@pytest.mark.parametrize(
    ("runs", "claim", "word"),
    [
        (diverging(6, 0), {"low": 0.02}, "supported"),  # claimed to be worse, and nothing of it survives
        (diverging(6, 0), {"high": -0.02}, "refuted"),
        (diverging(6, 0), {"low": -0.02, "high": 0.02}, "refuted"),
        (diverging(6, 0), {"low": 0.2, "high": 0.5}, "refuted"),  # infinitely worse is more than 0.5 worse
        (diverging(0, 6), {"high": -0.02}, "supported"),
        (diverging(2, 0, loss=1.0), {"high": -0.02}, "undecided"),  # the four that are left are better: not enough
        (diverging(5, 0, loss=1.0), {"high": -0.02}, "refuted"),
        (diverging(5, 0, loss=1.0), {"low": 0.02}, "undecided"),  # most diverge, and the one that is left is better
        (diverging(3, 3), {"low": -0.02, "high": 0.02}, "undecided"),
        (diverging(1, 0, seeds=2), {"low": 0.02}, "undecided"),
    ],
)
def test_a_diverged_run_is_worse_than_any_number(runs, claim, word):
    """The trap is a mean over the seeds that survived."""
    (f,) = judge(sweep(**claim), runs).findings
    assert f.verdict == word and any("diverged: " in note for note in f.notes)


def test_diverging_says_nothing_about_speed():
    runs = [
        result(s, 2.0, "diverged" if s < d else "done", {"steady_tokens_per_s": t}, k=k)
        for k, d, t in (("a", 0, 100.0), ("b", 3, 200.0))
        for s in range(6)
    ]
    (f,) = judge(sweep(metric="tokens_per_s", low=50), runs).findings
    assert f.verdict == "supported"


def test_what_was_asked_for_and_is_missing_is_told():
    asked = [{"k": v, "seed": s} for v in "ab" for s in range(7)]
    (f,) = judge(sweep(low=0.05), runs_of("k", {"a": 2.0, "b": 2.1}), axes=["k"], asked=asked).findings
    assert f.notes == ("k=b: 2/7 not begun, not in the mean", "k=a: 2/7 not begun, not in the mean")


def test_a_number_that_was_not_measured_is_told():
    """Finished runs without a test split, or of a text without relations, do not vanish."""
    runs = runs_of("k", {"a": 2.0, "b": 2.1}, seeds=2)
    (f,) = judge(sweep(metric="right/topic", low=0), runs).findings
    assert f.n == 0 and "k=b: 2/2 without right/topic, not in the mean" in f.notes


def test_swept_keys_that_a_check_leaves_open_make_slices():
    """A key typed beside a statement is judged value by value, and in whatever order the runs come."""
    runs = runs_of("k", {"a": 2.0, "b": 1.9}, dim=64) + runs_of("k", {"a": 2.0, "b": 2.1}, dim=128)
    for ordered in (runs, runs[::-1]):
        findings = judge(sweep(high=-0.01), ordered, axes=["k", "dim"]).findings
        assert {f.where["dim"]: f.verdict for f in findings} == {64: "supported", 128: "refuted"}


def test_keys_that_go_with_a_check_make_no_slices():
    """batch_size follows from seq_len, lr from pos: the check is made once, or once a value of pos."""
    both = [
        result(s, 2.0 + WOBBLE[s] - 0.1 * (k == "b"), k=k, batch=b) for k, b in (("a", 8), ("b", 4)) for s in range(5)
    ]
    (f,) = judge(sweep(high=-0.01), both, axes=["k", "batch"]).findings
    assert f.where == {} and f.n == 5
    runs = [
        r for pos, lr in (("rope", 1e-3), ("none", 1e-2)) for r in runs_of("k", {"a": 2.0, "b": 1.9}, pos=pos, lr=lr)
    ]
    s = Sweep(**{**vars(sweep(high=-0.01)), "slices": ["pos"]})
    assert [f.where for f in judge(s, runs, axes=["k", "pos", "lr"]).findings] == [{"pos": "rope"}, {"pos": "none"}]


def test_different_texts_are_compared_in_bits_a_character():
    runs = [
        result(s, 2.0, k=k, data__tokenizer=t, summary={"test": {"loss": loss, "ppl": 1, "bits_per_char": bits}})
        for k, t, loss, bits in (("a", "char", 1.0, 3.0), ("b", "byte", 2.0, 2.0))
        for s in range(3)
    ]
    (f,) = judge(sweep(low=0.5), runs).findings
    assert f.difference == -1.0 and f.metric.unit == "bits" and f.verdict == "refuted"


def test_slices_are_judged_apart():
    """What holds with one recipe and fails with another is refuted, and the verdict says on what it turns."""
    runs = runs_of("k", {"a": 2.0, "b": 1.9}, pos="rope") + runs_of("k", {"a": 2.0, "b": 2.1}, pos="learned")
    s = sweep(high=-0.01)
    verdict = judge(Sweep(**{**vars(s), "slices": ["pos"]}), runs)
    assert [f.verdict for f in verdict.findings] == ["supported", "refuted"]
    assert verdict.word == "refuted" and verdict.turns_on == "supported with pos=rope; refuted with pos=learned"


def test_a_difference_of_differences():
    """What b changes at depth 6 minus what it changes at depth 2."""
    runs = runs_of("k", {"a": 2.0, "b": 2.3}, n_layer=6) + runs_of("k", {"a": 2.0, "b": 2.1}, n_layer=2)
    s = sweep(value={"k": "b", "n_layer": 6}, against={"k": "a", "n_layer": 6}, minus={"n_layer": 2}, low=0.1)
    (f,) = judge(s, runs).findings
    assert f.difference == pytest.approx(0.2, abs=1e-3) and f.verdict == "supported"


@pytest.mark.parametrize(
    ("losses", "word"),
    [
        ([2.0, 1.9, 1.8, 1.9, 2.0], "supported"),
        ([2.0, 1.9, 1.8, 1.7, 1.6], "refuted"),  # the last is the best
        ([1.6, 1.7, 1.8, 1.9, 2.0], "refuted"),  # the first is
        ([2.0, 2.0, 1.999, 2.0, 2.0], "refuted"),  # smaller than is of interest
    ],
)
def test_the_best_lies_inside(losses, word):
    values = [1, 2, 4, 8, 16]
    s = sweep(value={"n_head": values}, against={}, best="inside", low=0.005)
    verdict = judge(s, runs_of("n_head", dict(zip(values, losses))))
    assert verdict.word == word, verdict.text()


def test_the_interval_that_is_shown_is_that_of_the_verdict():
    """2 is the best on average, and wildly so; 4 is a little worse and certain: it is 4 that supports the statement."""
    wild = itertools.cycle([0.3, -0.3, 0.2, -0.2, 0.0])
    losses = {1: 2.0, 2: 1.7, 4: 1.8, 8: 2.0}
    runs = [r for v, loss in losses.items() if v != 2 for r in runs_of("n_head", {v: loss})]
    runs += [result(s, 1.7 + next(wild), n_head=2) for s in range(5)]
    (f,) = judge(sweep(value={"n_head": [1, 2, 4, 8]}, against={}, best="inside", low=0.005), runs).findings
    assert f.verdict == "supported" and f.low > 0.005 and "n_head=4" in f.notes[0]


def test_an_inside_best_needs_evidence():
    """Noise that differs between settings leaves it undecided."""
    values = [1, 2, 4]
    wild = itertools.cycle([0.3, -0.2, 0.1, -0.3, 0.25, -0.1, 0.05])
    runs = [result(s, 2.0 + next(wild), n_head=v) for v in values for s in range(5)]
    s = sweep(value={"n_head": values}, against={}, best="inside", low=0.005)
    assert judge(s, runs).word == "undecided"


def test_ratios_are_told_in_percent():
    """Half the speed is -50 %, and the claim is in percent too."""
    runs = [
        result(s, 2.0, k=v, summary={"steady_tokens_per_s": t * (1 + 0.01 * s)})
        for v, t in (("a", 100), ("b", 50))
        for s in range(3)
    ]
    (f,) = judge(sweep(metric="tokens_per_s", low=-55, high=-45), runs).findings
    assert f.metric.told(f.difference) == pytest.approx(-50) and f.verdict == "supported" and "-50.0 [" in f.text()
    (f,) = judge(sweep(metric="tokens_per_s", low=-45), runs).findings
    assert f.verdict == "refuted"


@pytest.mark.parametrize("name", ["ppl", "tokens_per_s", "test_loss", "stalled"])
@pytest.mark.parametrize("told", [-60.0, -0.5, 0.0, 3.0, 150.0])
def test_told_and_scaled_are_inverse(name, told):
    assert METRICS[name].told(METRICS[name].scaled(told)) == pytest.approx(told)


def test_what_is_counted_needs_one_run():
    runs = [result(0, 2.0, k="a", summary={"kv_bytes": 800}), result(0, 2.0, k="b", summary={"kv_bytes": 100})]
    (f,) = judge(sweep(metric="kv_bytes", low=-88, high=-87), runs).findings
    assert f.verdict == "supported" and f.metric.told(f.difference) == pytest.approx(-87.5)


def test_shares_of_runs():
    """5 of 5 against 0 of 5 diverged is a finding, 1 of 5 is none; diverged runs count here."""
    good = [result(s, 2.0, k="a") for s in range(5)]
    bad = [result(s, status="diverged", k="b") for s in range(5)]
    (f,) = judge(sweep(metric="stalled", low=1), good + bad).findings
    assert f.verdict == "supported" and f.p == pytest.approx(2 / 252) and f.difference == 1.0
    one = [result(s, 2.0 + (s == 0), k="b") for s in range(5)]  # 3.0 is what frequencies alone give
    (f,) = judge(sweep(metric="stalled", low=1), good + one).findings
    assert f.verdict == "undecided" and any("1/5 against 0/5" in n for n in f.notes)


def test_metrics_by_relation():
    parts = {"topic": {"loss": 0.7, "floor": 0.0, "right": 0.5, "accuracy": 0.6}}
    r = result(0, 2.0, summary={"learned": {"topic": None}, "test": {"loss": 2.0, "parts": parts}})
    assert [metric(f"{k}/topic").of(r) for k in ("loss", "right", "accuracy", "learned")] == [0.7, 0.5, 0.6, 0.0]
    assert metric("loss/nothing").of(r) is None
    with pytest.raises(UserError, match="did you mean test_loss"):
        metric("tset_loss")


def test_unequal_budgets_are_told():
    """More than 1 % of difference in parameters or compute, within a slice, unless it was made equal."""
    s = sweep(low=0)
    same = runs_of("k", {"a": 2.0, "b": 2.0})
    assert caveats.warnings_of(s, same) == []
    unequal = [result(0, 2.0, k="a"), result(0, 2.0, k="b", summary={"parameters": 1020})]
    (warning,) = caveats.warnings_of(s, unequal)
    assert "parameters by up to 2%" in warning
    apart = [result(0, 2.0, k="a", pos="x"), result(0, 2.0, k="a", pos="y", summary={"parameters": 2000})]
    assert caveats.warnings_of(Sweep(**{**vars(s), "slices": ["pos"]}), apart) == []


def test_settings_that_begin_alike_are_inert():
    rows = [{"step": 0, "loss/val": 4.2}, {"step": 10, "loss/train": 3.1, "grad_norm": 0.5}]
    other = [rows[0], {"step": 10, "loss/train": 3.1000001, "grad_norm": 0.5}]
    assert len(caveats.inert([("k=a", "k=b", rows, list(rows))])) == 1
    assert caveats.inert([("k=a", "k=b", rows, other)]) == []
    assert caveats.inert([("k=a", "k=b", [], [])]) == []  # nothing has been logged yet


def test_a_folder_that_is_no_sweep_has_no_verdict(tmp_path):
    with pytest.raises(UserError, match="no runs"):
        Report.load(tmp_path)


# A number itself

LIKE = {"that": "b is like this", "value": {"k": "b"}}


def about(*checks: dict) -> Sweep:
    return Sweep(name="s", question="?", statement="b is so", axes={"k": ["a", "b"]}, checks=list(checks))


def losses(*values: float, k: str = "b", **more) -> list[Result]:
    return [result(s, v, k=k, **more) for s, v in enumerate(values)]


def studied(*shares: float, k: str = "b", **heads) -> list[Result]:
    """Runs whose heads were studied: the share of them that can go, and what else is known of all of them."""
    return [
        result(s, 2.0, summary={"heads": {"removable": {"zeroed": share}} | heads}, k=k)
        for s, share in enumerate(shares)
    ]


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0, 5, "supported"),
        (0.45, None, "undecided"),  # just above the lower end
        (0.44, None, "supported"),
        (None, 4.56, "supported"),
        (2, 3, "undecided"),  # the mean is inside, and the interval is wider
        (4, 6, "undecided"),
        (4.56, 6, "refuted"),
        (None, 0.44, "refuted"),
    ],
)
def test_a_number_is_judged_by_its_interval_over_seeds(low, high, word):
    """1, 2, 3, 4: mean 2.5, standard deviation 1.29099, t for 3 degrees 3.18245: 2.5 - 2.05426 to 2.5 + 2.05426."""
    verdict = judge(about(LIKE | {"low": low, "high": high}), losses(1, 2, 3, 4))
    (f,) = verdict.findings
    assert verdict.word == word and (f.n, f.difference, f.bootstrap) == (4, 2.5, None)
    assert (f.low, f.high) == pytest.approx((0.44574, 4.55426), abs=1e-5)
    assert (f.low, f.high) == pytest.approx(scipy.stats.t.interval(0.95, 3, 2.5, scipy.stats.sem([1, 2, 3, 4])))


def test_how_many_seeds_would_decide_a_number():
    """The half-width t x s / sqrt(n) must fall to the distance from the mean to the nearer bound, 0.5."""
    f = judge(about(LIKE | {"low": 2, "high": 3.7}), losses(1, 2, 3, 4)).findings[0]
    enough = [n for n in range(2, 99) if scipy.stats.t.ppf(0.975, n - 1) * math.sqrt(5 / 3 / n) <= 0.5]
    assert f.verdict == "undecided" and f.seeds_needed == enough[0]


def test_a_number_is_compared_with_nothing():
    """It has no p-value, no noise of a baseline, no percentage of perplexity; from five seeds on a second interval."""
    f = judge(about(LIKE | {"high": 9}), losses(1, 2, 3, 4, 5)).findings[0]
    assert math.isnan(f.p) and math.isnan(f.p_holm) and math.isnan(f.noise) and f.perplexity() is None
    low, high = f.bootstrap
    assert 1 <= low < 3 < high <= 5


def test_one_seed_gives_a_number_itself_and_no_verdict():
    (f,) = judge(about(LIKE | {"high": 9}), losses(1.5)).findings
    assert f.verdict == "undecided" and f.text() == "1.5000 (one seed: no interval) nats"


@pytest.mark.parametrize("claim", [{"high": 9}, {"low": 9}, {"low": 0, "high": 9}])
def test_a_number_of_some_seeds_only_decides_nothing(claim):
    """A diverged run has no such number, and those that are left are no sample: neither supported nor refuted."""
    runs = [*losses(1, 2, 3, 4), result(7, status="diverged", k="b")]
    (f,) = judge(about(LIKE | claim), runs).findings
    assert f.verdict == "undecided" and f.n == 4 and f.seeds_needed is None
    assert "k=b: 1/5 diverged, not in the mean" in f.notes and any("diverged: 1/5" in n for n in f.notes)
    nothing = [result(s, status="diverged", k="b") for s in range(2)]
    (f,) = judge(about(LIKE | claim), nothing).findings
    assert f.verdict == "undecided" and f.text() == "no finished runs"


def test_what_diverged_elsewhere_is_not_about_this_number():
    runs = [*losses(1, 2, 3, 4), result(0, status="diverged", k="a")]
    assert judge(about(LIKE | {"high": 9}), runs).word == "supported"


def test_a_number_has_no_sign_and_a_share_is_in_percent():
    """0.2, 0.3, 0.4: 30 % and 4.30265 x 10 / sqrt(3) = 24.8 on either side. Bounds are in percent too."""
    (f,) = judge(about(LIKE | {"metric": "removable", "low": 20, "high": 40}), studied(0.2, 0.3, 0.4)).findings
    assert f.text() == "30.0 [5.2, 54.8] %" and f.claim() == "20.0 to 40.0 %" and f.verdict == "undecided"
    (f,) = judge(about(LIKE | {"metric": "removable", "low": 20}), studied(0.31, 0.3, 0.29)).findings
    assert f.claim() == "at least 20.0 %" and f.verdict == "supported"
    text = judge(about(LIKE | {"metric": "removable", "high": 20}), studied(0.3, 0.3)).text()
    assert "b is like this: 30.0 [30.0, 30.0] %; claimed at most 20.0 %: refuted" in text and "+" not in text


def test_a_difference_of_percentages_is_in_points():
    runs = studied(0.30, 0.31, 0.32) + studied(0.20, 0.21, 0.22, k="a")
    (f,) = judge(sweep(metric="removable", low=9), runs).findings
    assert f.text() == "+10.0 [+10.0, +10.0] percentage points" and f.claim() == "at least +9.0 percentage points"


def test_what_is_compared_by_ratio_is_itself_in_its_own_unit():
    """An arithmetic mean over seeds, as in the table. 100, 110, 120: 4.30265 x 10 / sqrt(3) = 24.8 on either side."""
    speeds = [result(s, 2.0, summary={"steady_tokens_per_s": t}, k="b") for s, t in enumerate((100, 110, 120))]
    (f,) = judge(about(LIKE | {"metric": "tokens_per_s", "low": 85}), speeds).findings
    assert f.text() == "110 [85, 135] tokens/s" and f.claim() == "at least 85 tokens/s" and f.verdict == "supported"
    (f,) = judge(about(LIKE | {"metric": "ppl", "high": 9}), losses(math.log(4), math.log(6))).findings
    assert f.difference == pytest.approx(5) and f.text().startswith("5.000 [")
    (f,) = judge(about(LIKE | {"metric": "parameters", "low": 1000, "high": 1000}), losses(2.0)).findings
    assert f.text() == "1000 parameters (counted)" and f.verdict == "supported" and f.claim().startswith("1000 to 1000")


def test_a_share_of_runs_itself():
    """9 of 10 learned it, one diverged: Wilson's interval, as scipy has it."""
    runs = [result(s, 2.0, summary={"learned": {"topic": 30}}, k="b") for s in range(9)]
    runs.append(result(9, status="diverged", k="b"))
    ci = scipy.stats.binomtest(9, 10).proportion_ci(method="wilson")
    for low, word in ((50, "supported"), (70, "undecided"), (99, "refuted")):
        (f,) = judge(about(LIKE | {"metric": "learned/topic", "low": low}), runs).findings
        assert (f.low, f.high) == pytest.approx((ci.low, ci.high)) and f.difference == 0.9 and f.verdict == word
    assert f.text() == "90.0 [59.6, 98.2] %" and "9/10 runs" in f.notes


def test_holm_counts_comparisons_and_a_number_is_none():
    """Two differences and a number between them: the smaller p is doubled, not tripled."""
    checks = [c | {"metric": m} for c, m in zip(sweep(low=0).checks * 2, ("test_loss", "val_loss"))]
    checks.insert(1, LIKE | {"high": 9})
    noisy = [result(s, 2.0 + WOBBLE[s] * (k == "b") + 0.0001 * (k == "b"), k=k) for k in "ab" for s in range(4)]
    first, number, second = judge(about(*[{"low": 0} | c for c in checks]), noisy).findings
    assert first.p == second.p and 0.05 < first.p < 0.5
    assert first.p_holm == second.p_holm == pytest.approx(2 * first.p) and math.isnan(number.p_holm)


def test_a_statement_is_as_good_as_all_its_checks():
    """Of a difference and of a number."""
    claims = [dict(sweep(low=0.05).checks[0]), LIKE | {"low": 2.0, "high": 2.2}]
    runs = runs_of("k", {"a": 2.0, "b": 2.1})
    assert judge(about(*claims), runs).word == "supported"
    assert judge(about(claims[0], LIKE | {"low": 3}), runs).word == "refuted"


def test_one_setting_and_its_seeds():
    """`value: {}` is all runs; what is missing of them is told."""
    check = {"that": "it is low", "value": {}, "high": 9}
    runs = [result(s, 2.0 + s) for s in range(4)]
    asked = [{"seed": s} for s in range(6)]
    (f,) = judge(Sweep(name="s", question="?", checks=[check]), runs, asked=asked).findings
    assert f.where == {} and f.n == 4 and f.verdict == "supported"
    assert f.notes == ("all runs: 2/6 not begun, not in the mean",)


def test_all_runs_of_several_settings_are_one_claim_each():
    """A mean over settings would be none of them."""
    check = {"that": "it is low", "value": {}, "high": 2.5}
    findings = judge(about(check), runs_of("k", {"a": 2.0, "b": 3.0}), axes=["k"]).findings
    assert {f.where["k"]: f.verdict for f in findings} == {"a": "supported", "b": "refuted"}


def test_a_number_in_nats_stays_in_nats():
    """A claim about it cannot be read in bits, also where the seeds do not have the same text."""
    runs = [result(s, s + 1.0, k="b", data__tokenizer=t) for s, t in enumerate(("char", "byte"))]
    (f,) = judge(about(LIKE | {"high": 9}), runs).findings
    assert (f.metric.unit, f.difference, f.notes) == ("nats", 1.5, ())


@pytest.mark.parametrize(
    ("check", "said"),
    [
        ({"that": "x", "low": 1}, "needs value and against, .* or value alone"),
        ({"that": "x", "against": {"k": "a"}, "low": 1}, "needs value and against"),
        ({"that": "x", "value": {}, "against": {"k": "a"}, "low": 1}, "needs value and against"),
        ({"that": "x", "value": {"k": "a"}, "against": {}, "low": 1}, "needs value and against"),
        ({"that": "x", "value": {"k": "a"}}, "needs low, high or both"),
        ({"that": "x", "value": {"k": "a"}, "minus": {"n": 1}, "low": 1}, "no against"),
    ],
)
def test_checks_that_cannot_be_made_are_one_line(check, said):
    with pytest.raises(UserError, match=said) as e:
        about(check)
    assert "\n" not in str(e.value)


def test_settings_that_nothing_is_compared_with_need_not_be_equal():
    """Four times the parameters: no warning of a claim about each, and the usual one of a comparison."""
    runs = losses(2, 2) + losses(2, 2, k="a") + losses(2, 2, k="c", summary={"parameters": 4000})
    numbers = [LIKE | {"value": {"k": k}, "high": 9} for k in "abc"]
    assert caveats.warnings_of(about(*numbers), runs) == []
    assert caveats.warnings_of(about({"that": "x", "value": {}, "high": 9}), runs) == []
    compared = dict(sweep(low=0).checks[0])
    assert caveats.warnings_of(about(*numbers, compared), runs) == []
    (warning,) = caveats.warnings_of(about(*numbers, compared | {"against": {"k": "c"}}), runs)
    assert "parameters by up to 300%" in warning


# Heads


def test_metrics_about_heads():
    heads = {
        "n": 8,
        "effective": 0.75,
        "kinds": {"induction": 2, "previous token": 5, "topic": 1},
        "families": {"other": 2, "positional": 5, "syntactic": 1},
        "removable": {"zeroed": 0.25, "random": 0.125},
        "correlations": {"zeroed gradient": 0.9, "zeroed mean": math.nan},
    }
    parts = {"topic": {"loss": 0.7}, "agreement": {"loss": 0.7}}
    r = result(0, 2.0, summary={"heads": heads, "val": {"loss": 2.0, "parts": parts}})
    for name, value in (
        ("removable", 25),
        ("removable/zeroed", 25),
        ("removable/random", 12.5),
        ("effective_heads", 75),
        ("heads/induction", 2),
        ("heads/previous token", 5),
        ("heads/topic", 1),
        ("heads/agreement", 0),  # a relation of this text, of which there is no head
        ("heads/uniform", 0),
        ("heads/other", 0),  # the kind, not the family, which has two
        ("heads/positional", 5),
        ("heads/rare-word", 0),
        ("correlation/zeroed/gradient", 0.9),
    ):
        m = metric(name)
        assert m.told(m.of(r)) == pytest.approx(value) and m.told(m.scaled(value)) == pytest.approx(value), name
    assert metric("removable").unit == metric("effective_heads").unit == "%"
    for name in ("removable/gates", "correlation/zeroed/mean", "heads/inductoin", "heads/coreference"):
        assert metric(name).of(r) is None and metric(name).lacking(r) == f"without {name}"


@pytest.mark.parametrize("name", ["removable", "effective_heads", "heads/induction", "correlation/mean/gates"])
def test_runs_whose_heads_were_not_studied_say_how_to(name):
    (f,) = judge(about(LIKE | {"metric": name, "low": 0}), losses(2.0, 2.0)).findings
    assert f.verdict == "undecided" and f.text() == "no finished runs"
    assert f.notes == (f"k=b: 2/2 without {name} (train with budget.heads=true), not in the mean",)


def test_the_names_of_kinds_and_measures_are_those_of_the_analyses():
    assert set(metrics.KINDS) == set(kinds.kinds(()))
    families = {kinds.family(k) for k in (*metrics.KINDS, "a relation")}
    assert families == {*metrics.FAMILIES, "other"} and not families & set(metrics.KINDS) - {"other"}
    assert tuple(importance.MEASURES) == metrics.MEASURES


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("removabel", "removable"),
        ("removable/zeored", "removable/zeroed"),
        ("haeds/induction", "heads/induction"),
        ("efective_heads", "effective_heads"),
        ("correlation/zeroed/gradeint", "correlation/zeroed/gradient"),
    ],
)
def test_the_nearest_name_of_a_metric(name, meant):
    with pytest.raises(UserError, match=rf"did you mean {meant}\? valid: test_loss, .*heads/KIND"):
        metric(name)


def test_a_diverged_run_is_no_worse_in_what_is_no_matter_of_quality():
    """All of b diverged and has no heads to count: neither more of them nor fewer than a."""
    runs = [result(s, status="diverged", k="b") for s in range(6)] + studied(*[0.25] * 6, k="a")
    for claim in ({"low": 5}, {"high": -5}, {"low": -5, "high": 5}):
        (f,) = judge(sweep(metric="removable", **claim), runs).findings
        assert f.verdict == "undecided" and any("diverged: 6/6 against 0/6" in n for n in f.notes)
