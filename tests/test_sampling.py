"""Choosing a token: each rule by hand, all of them against an independent implementation, and the draw itself.

B batch, V vocabulary, S tokens of a text.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from toymha.generation.sampling import Rules, choose, keep, min_p, penalise, temper, top_k, top_p
from toymha.schema import UserError
from toymha.seeds import stream

OUT = float("-inf")


def logits(B=4, V=50, seed=0, scale=3.0):
    """logits_BV, float64, no two of a row alike."""
    return torch.randn(B, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def kept(logits_V):
    """The tokens that are in."""
    return (logits_V > OUT).nonzero().flatten().tolist()


def of(*probs):
    return torch.tensor(probs, dtype=torch.float64).log()


NONE = torch.zeros(1, dtype=torch.bool)  # nothing has been seen; broadcasts over V

EDGES = {
    "one token": torch.tensor([[2.0]]),
    "huge": torch.tensor([[1e30, -1e30, 5e29, 0.0]]),
    "one hot": torch.tensor([[0.0, 0.0, 1e4, -1e4]]),
    "with -inf": torch.tensor([[OUT, 1.0, OUT, 0.5, -2.0]]),
    "one that is not -inf": torch.tensor([[OUT, OUT, 3.0]]),
    "far below zero": torch.tensor([[-1000.0, -1001.0, -1005.0]]),
    "tiny differences": torch.tensor([[1.0, 1.0 + 1e-9, 1.0 - 1e-9, 0.0]], dtype=torch.float64),
}


# By hand


def test_nucleus_by_hand():
    """0.5, 0.25, 0.125, 0.125, shuffled: half is reached by the first; a hair more than half takes a second."""
    at = of(0.125, 0.5, 0.125, 0.25)
    assert kept(top_p(at, 0.5)) == [1]
    assert kept(top_p(at, 0.500001)) == kept(top_p(at, 0.75)) == [1, 3]
    assert kept(top_p(at, 0.76)) == [0, 1, 3]  # the first of two equal ones
    assert kept(top_p(at, 0.9)) == [0, 1, 2, 3]
    assert kept(top_p(at, 0.0)) == [1]
    assert kept(top_p(at, 1.0)) == kept(top_p(at, None)) == [0, 1, 2, 3]


def test_min_p_by_hand():
    at = of(0.1, 0.5, 0.15, 0.25)
    assert kept(min_p(at, 0.49)) == [1, 3]
    assert kept(min_p(at, 0.25)) == [1, 2, 3]
    assert kept(min_p(at, 0.0)) == kept(min_p(at, None)) == [0, 1, 2, 3]
    assert kept(min_p(at, 1.0)) == [1]
    assert kept(min_p(torch.zeros(3), 1.0)) == [0, 1, 2]  # all are as likely as the most likely


def test_top_k_by_hand():
    at = torch.tensor([1.0, 3.0, 2.0, 3.0, 3.0])
    assert kept(top_k(at, 1)) == [1]
    assert kept(top_k(at, 2)) == [1, 3]  # exactly two of the three equal ones
    assert kept(top_k(at, 4)) == [1, 2, 3, 4]
    for all_of_them in (None, 0, 5, 10_000):
        assert torch.equal(top_k(at, all_of_them), at)


def test_penalty_by_hand():
    """2 -> 1, -2 -> -4, 0 -> 0 where seen; others and what is out stay."""
    at = torch.tensor([2.0, -2.0, 0.0, 2.0, OUT])
    seen = torch.tensor([True, True, True, False, True])
    assert penalise(at, seen, 2.0).tolist() == [1, -4, 0, 2, OUT]
    assert penalise(at, seen, 0.5).tolist() == [4, -1, 0, 2, OUT]
    assert torch.equal(penalise(at, seen, 1.0), at)


def test_temperature_by_hand():
    assert temper(torch.tensor([1.0, 3.0, 2.0]), 0.5).tolist() == [-4, 0, -2]


# The same as Hugging Face


def theirs(logits_BV, ids_BS, rules):
    """In the order of their `generate`."""
    from transformers.generation import logits_process as hf

    chain = [
        hf.RepetitionPenaltyLogitsProcessor(rules.repetition_penalty),
        hf.TemperatureLogitsWarper(rules.temperature),
    ]
    if rules.top_k:
        chain.append(hf.TopKLogitsWarper(rules.top_k))
    if rules.top_p is not None and rules.top_p < 1:
        chain.append(hf.TopPLogitsWarper(rules.top_p))
    if rules.min_p is not None:
        chain.append(hf.MinPLogitsWarper(rules.min_p))
    for process in chain:
        logits_BV = process(ids_BS, logits_BV)
    return logits_BV.softmax(-1)


def ours(logits_BV, ids_BS, rules):
    seen_BV = torch.zeros(logits_BV.shape, dtype=torch.bool).scatter(1, ids_BS, True)
    return keep(logits_BV, rules, seen_BV).softmax(-1)


GRID = [
    Rules(*values)
    for values in itertools.product(
        (1.0, 0.3, 4.0, 1e-8),
        (None, 1, 3, 50, 10_000),
        (None, 0.0, 0.1, 0.7, 0.999),
        (None, 0.02, 0.5),
        (1.0, 1.7, 0.6),
    )
]


def test_combined_as_an_independent_implementation():
    """All combinations of all rules, over logits that are peaked, plain and nearly even; also in shuffled order."""
    pytest.importorskip("transformers")
    for scale, seed in ((0.1, 1), (3.0, 2), (30.0, 3)):
        at = logits(scale=scale, seed=seed)
        ids = torch.randint(50, (4, 12), generator=torch.Generator().manual_seed(seed))
        order = torch.randperm(50, generator=torch.Generator().manual_seed(seed))
        back = order.argsort()
        for rules in GRID:
            expected, found = theirs(at, ids, rules), ours(at, ids, rules)
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
            assert torch.equal(found > 0, expected > 0)
            shuffled = ours(at[:, order], back[ids], rules)
            torch.testing.assert_close(shuffled[:, back], found, atol=1e-12, rtol=1e-9)
            assert torch.equal(shuffled[:, back] > 0, found > 0)


@pytest.mark.parametrize("case", EDGES)
def test_edges_as_an_independent_implementation(case):
    """In float64, and to 1e-8, which is what dividing by a temperature of 1e-8 leaves of it."""
    pytest.importorskip("transformers")
    at = EDGES[case].double()
    ids = torch.tensor([[0, at.shape[1] - 1]])
    for rules in GRID:
        found = ours(at, ids, rules)
        torch.testing.assert_close(found, theirs(at, ids, rules), atol=1e-8, rtol=1e-7)
        assert found.isfinite().all() and found.sum().item() == pytest.approx(1)


def test_where_it_differs_from_hugging_face():
    """Equal logits: they keep all that are as likely as the k-th, here exactly k stay. Nuclei are of one size."""
    hf = pytest.importorskip("transformers.generation.logits_process")
    even = torch.zeros(1, 8, dtype=torch.float64)
    assert len(kept(hf.TopKLogitsWarper(1)(None, even)[0])) == 8
    for k in range(1, 9):
        assert kept(top_k(even, k)[0]) == list(range(k))
    for p in (0.0, 0.1, 0.5, 0.51, 0.9):
        assert kept(top_p(even, p)[0]) == list(range(len(kept(hf.TopPLogitsWarper(p)(None, even)[0]))))
        assert len(kept(hf.MinPLogitsWarper(p)(None, even)[0])) == len(kept(min_p(even, p)[0])) == 8


def test_a_batch_is_its_rows():
    at = torch.cat([logits(B=6, seed=4), torch.zeros(1, 50, dtype=torch.float64)])
    seen = torch.rand(7, 50, generator=torch.Generator().manual_seed(5)) < 0.3
    for rules in [*GRID, Rules(temperature=0)]:
        whole = keep(at, rules, seen)
        for row, alone, was in zip(whole, at, seen, strict=True):
            torch.testing.assert_close(keep(alone, rules, was), row, atol=0, rtol=0)


# Edges


@pytest.mark.parametrize("temperature", [1e-8, 1e-30, 1e-300, 5e-324])
def test_the_lowest_temperatures_are_greedy(temperature):
    """Never NaN; on a tie both are left, as at any temperature but 0."""
    for at in (logits(1)[0], torch.tensor([1e30, -1e30, 0.0]), torch.tensor([-5.0, OUT, -3.0])):
        p = keep(at, Rules(temperature=temperature), NONE).softmax(-1)
        assert p.isfinite().all() and p[at.argmax()] == 1
    assert keep(torch.tensor([1.0, 1.0, 0.0]), Rules(temperature=temperature), NONE).softmax(-1).tolist() == [
        0.5,
        0.5,
        0,
    ]


@pytest.mark.parametrize("temperature", [1e8, 1e300])
def test_the_highest_temperatures_are_even(temperature):
    p = keep(logits(1)[0], Rules(temperature=temperature), NONE).softmax(-1)
    assert p.tolist() == pytest.approx([1 / 50] * 50)


@pytest.mark.parametrize("penalty", [1e-320, 1e-300, 1e300, 1.7e308])
def test_extreme_penalties_leave_a_distribution(penalty):
    seen = torch.tensor([True, True, True])
    for at in ([5.0, -5.0, 0.0], [-5.0, -5.0, -6.0], [5.0, 6.0, OUT]):
        assert keep(torch.tensor(at), Rules(1.0, repetition_penalty=penalty), seen).softmax(-1).sum() == 1


def test_greedy_takes_the_first_of_equal_ones():
    for rules in (Rules(temperature=0), Rules(1.0, top_k=1), Rules(temperature=0, top_k=3, top_p=0.1, min_p=0.5)):
        assert kept(keep(torch.tensor([0.0, 2.0, 2.0, 1.0]), rules, NONE)) == [1]


def test_greedy_after_the_penalty():
    """What has been seen may no longer be the most likely."""
    at, seen = torch.tensor([2.0, 1.9]), torch.tensor([True, False])
    assert kept(keep(at, Rules(temperature=0, repetition_penalty=1.2), seen)) == [1]


@pytest.mark.parametrize("bad", [[math.nan, 1.0], [math.inf, 1.0], [OUT, OUT]])
def test_logits_that_are_no_numbers_are_refused(bad):
    for temperature in (0, 1.0):
        with pytest.raises(UserError, match="not finite"):
            keep(torch.tensor(bad), Rules(temperature), NONE)


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": -0.1},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"repetition_penalty": -1.0},
    ],
)
def test_rules_without_a_meaning_are_refused(bad):
    with pytest.raises(UserError, match=f"{next(iter(bad))}="):
        Rules(**bad)


# The draw


def test_draws_have_the_frequencies_of_the_distribution():
    """20,000 draws, each count within four standard deviations; what is out never comes."""
    p = torch.tensor([0.0, 0.5, 0.2, 0.0, 0.299, 0.001, 0.0])
    generator, n = stream(0, "test"), 20_000
    counts = torch.bincount(torch.tensor([choose(p.log(), generator) for _ in range(n)]), minlength=7)
    assert (counts[p == 0] == 0).all()
    assert ((counts - n * p).abs() <= 4 * (n * p * (1 - p)).sqrt()).all()


def test_a_draw_takes_one_number_whatever_the_logits():
    """So that the draws of a sample stay in step: the third number of the stream decides the third token."""
    expected = torch.rand(3, dtype=torch.float64, generator=stream(3, "test"))[2].item()
    generator = stream(3, "test")
    choose(torch.zeros(2), generator)
    choose(torch.tensor([0.0, OUT, OUT]), generator)
    assert choose(torch.zeros(1000), generator) == int(expected * 1000)


def test_the_ends_of_the_distribution(monkeypatch):
    """The lowest number a generator gives is the first possible token, the highest the last possible one."""
    at = torch.tensor([OUT, 0.0, OUT, 0.0, OUT])
    for u, token in ((0.0, 1), (1 - 2**-53, 3), (1.0, 3)):
        monkeypatch.setattr(torch, "rand", lambda *_, u=u, **__: torch.tensor(u, dtype=torch.float64))
        assert choose(at, stream(0, "test")) == token
