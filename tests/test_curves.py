"""Laws of pruning curves: each point is an evaluation, orders are greedy, shares and rounds known by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from conftest import MODELS, PRUNED, built, make, tokens

from toymha.analysis.capture import heads_of, without
from toymha.analysis.curves import curves, greedy, removable, removals
from toymha.analysis.importance import MEASURES, importance, order_of
from toymha.analysis.results import Head, Importance, Mean
from toymha.data.corpus import Split
from toymha.evaluate import evaluate

T = 16
every = pytest.mark.parametrize("words", [*(f"model={m}" for m in MODELS), *PRUNED, "causal=false resid_dropout=0.5"])


def split_of(N, seed):
    return Split(tokens(1, N, seed)[0].to(torch.uint8), N - 1, N - 1)


CHOOSE, REPORT = split_of(70, 0), split_of(101, 1)


def pruned(model, *measures, report=REPORT, choose=CHOOSE, **options):
    """Scores and curves."""
    options = {"max_tokens": None, "gate_steps": 2} | options
    of_both = {key: options[key] for key in ("max_tokens", "gate_steps")}
    scores = importance(model, choose, T, measures=measures or tuple(MEASURES), **of_both)
    return scores, curves(model, choose, T, report, scores, **options)


@every
def test_each_point_is_an_evaluation_of_the_other_split(words):
    """Heads go from the least important to the most, as measured on the split where they are chosen."""
    model = built(make(*words.split()))
    scores, found = pruned(model)
    assert list(found.curves) == [*MEASURES, "random"]
    for name in MEASURES:
        curve = found.curves[name]
        assert curve.order == order_of(scores, name) and sorted(curve.order) == heads_of(model)
        assert curve.low == curve.high == []
        for k in range(len(curve.order) + 1):
            with without(model, curve.order[:k]):
                assert curve.loss[k] == pytest.approx(evaluate(model, REPORT, T).loss, abs=1e-6)
    assert found.tokens == 100 and found.tolerance == 0.01 and found.split == "test"


def test_bands_are_those_of_random_orders():
    """Two heads go in two orders: after one of them there are two losses, before and after all only one."""
    model = built(make("n_layer=1", "n_head=2"))
    losses = []
    for gone in ([], [Head(0, 0)], [Head(0, 1)], heads_of(model)):
        with without(model, gone):
            losses.append(evaluate(model, REPORT, T).loss)
    _, found = pruned(model, "zeroed", random_orders=20)
    curve, (least, most) = found.curves["random"], sorted(losses[1:3])
    assert curve.low == pytest.approx([losses[0], least, losses[3]], abs=1e-6)
    assert curve.high == pytest.approx([losses[0], most, losses[3]], abs=1e-6)
    shares = {round(20 * (curve.loss[1] - least) / (most - least), 3)}
    assert shares <= {float(n) for n in range(1, 20)} and curve.order == []


def test_random_orders_differ_by_seed_and_lie_in_their_band():
    model = built(make())
    a, b, c = (pruned(model, "zeroed", seed=s)[1].curves["random"] for s in (0, 0, 1))
    assert a == b != c and a.loss[0] == c.loss[0]
    assert all(low - 1e-12 <= mean <= high + 1e-12 for low, mean, high in zip(a.low, a.loss, a.high))
    one = pruned(model, "zeroed", random_orders=1)[1].curves["random"]
    assert one.low == one.loss == one.high and one.loss not in (a.loss, a.low, a.high)
    assert list(pruned(model, "zeroed", random_orders=0)[1].curves) == ["zeroed"]


def test_the_reported_split_chooses_nothing():
    model = built(make())
    _, a = pruned(model, rounds=3)
    _, b = pruned(model, rounds=3, report=split_of(60, 5))
    assert all(a.curves[n].order == b.curves[n].order and a.curves[n].loss != b.curves[n].loss for n in MEASURES)
    _, c = pruned(model, rounds=3, choose=split_of(70, 9))
    assert any(a.curves[n].order != c.curves[n].order for n in MEASURES)


def test_the_share_that_can_go_by_hand():
    ten = math.log(1.01)  # 1 % perplexity, which is no longer less than 1 %
    assert removable([2.0, 2.001, 2.0, 2.009, 2.02], 0.01) == 0.75
    assert removable([2.0, 1.9, 2.05, 1.9, 1.9], 0.01) == 0.25  # what comes after a rise does not count
    assert removable([0.0, ten - 1e-9, ten + 1e-9], 0.01) == 0.5
    assert removable([2.0, 2.5], 0.01) == 0 and removable([2.0, 1.5], 0.01) == 1 and removable([2.0], 0.01) == 0
    assert removable([2.0, 2.05, 2.09, 2.1], 0.1) == pytest.approx(2 / 3)  # e^0.09 is 1.094, e^0.1 is 1.105
    assert removable([2.0, 1e9], 0.01) == removable([2.0, math.nan, 2.0], 0.01) == 0


def test_heads_that_say_nothing_go_first_and_for_free():
    model = built(make())
    silent = [Head(0, 2), Head(1, 0), Head(1, 1)]
    with torch.no_grad():
        for head in silent:
            model.blocks[head.layer].attn.w_o.weight[:, 8 * head.head : 8 * head.head + 8] = 0
    _, found = pruned(model, "gradient")
    curve = found.curves["gradient"]
    assert curve.order[:3] == silent and curve.loss[3] == pytest.approx(curve.loss[0], abs=1e-7)
    assert found.removable["gradient"] >= 3 / 8
    assert found.removable["gradient"] == removable(curve.loss, 0.01)
    assert pruned(model, "gradient", tolerance=1e9)[1].removable["gradient"] == 1


# Several rounds


def test_rounds_by_hand():
    """Five heads in three rounds: two, two, one. What is measured anew turns the order round."""
    heads = [Head(0, i) for i in range(5)]
    asked = []

    def scores(sign):
        return Importance({"m": {h: Mean(sign * h.head, 0.0) for h in heads}}, {}, 1.0, 1, "val")

    def again(name, removed):
        asked.append((name, list(removed)))
        return scores(-1)

    assert greedy(scores(1), "m", 3, again) == [heads[i] for i in (0, 1, 4, 3, 2)]
    assert asked == [("m", heads[:2]), ("m", [heads[i] for i in (0, 1, 4, 3)])]
    assert greedy(scores(1), "m", 1, again) == heads and len(asked) == 2
    assert greedy(scores(1), "m", 100, again) == [heads[i] for i in (0, 4, 3, 2, 1)]  # one head a round


@pytest.mark.parametrize("name", MEASURES)
def test_later_rounds_measure_what_is_left_without_what_is_gone(name):
    model = built(make("model=gqa", "bias=true"))
    scores, found = pruned(model, name, rounds=2, max_tokens=40)
    first = order_of(scores, name)[:4]
    bare = copy.deepcopy(model)
    with torch.no_grad():
        for head in first:
            bare.blocks[head.layer].attn.w_o.weight[:, 8 * head.head : 8 * head.head + 8] = 0
    second = importance(bare, CHOOSE, T, measures=[name], max_tokens=40, gate_steps=2)
    rest = [h for h in order_of(second, name) if h not in first]
    assert found.curves[name].order == first + rest
    with pytest.raises(ValueError, match="rounds=0"):
        pruned(model, name, rounds=0)


def test_removals():
    heads = [Head(1, 0), Head(0, 0)]
    assert list(removals(heads)) == [frozenset(), {Head(1, 0)}, set(heads)]


def test_a_model_without_heads_has_one_point():
    _, found = pruned(built(make("kept_heads=[[],[]]")))
    assert all(len(curve.loss) == 1 for curve in found.curves.values()) and set(found.removable.values()) == {0.0}


def test_the_model_is_left_as_it_was():
    model = built(make("attn_dropout=0.5", "resid_dropout=0.5")).train()
    before, chance = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert pruned(model, rounds=2)[1] == pruned(model, rounds=2)[1]
    assert model.training and torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
