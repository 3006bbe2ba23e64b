"""Laws of importance: leaving out is exact, slopes are slopes, gates are the papers' gates, and nothing else matters.

Axes as in toymha/analysis/importance.py: W sequences, T positions, H heads, D width of a value, V vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from conftest import MODELS, PRUNED, VOCAB, built, make, tokens

from toymha.analysis import importance as module
from toymha.analysis.capture import capture, gated, heads_of, without
from toymha.analysis.importance import (
    MEASURES,
    hard_concrete,
    importance,
    mean_outputs,
    order_of,
    probability_open,
    rank_correlation,
)
from toymha.analysis.losses import counts, losses, sequences
from toymha.analysis.results import Head, Importance, Mean
from toymha.data.corpus import Split
from toymha.evaluate import evaluate, windows
from toymha.schema import UserError

T, CPU = 16, torch.device("cpu")
EVERY = [
    *(f"model={m}" for m in MODELS),
    *PRUNED,
    "norm_position=post norm=rms bias=true pos=learned w_o=false",
    "causal=false n_layer=3 attn_dropout=0.5 resid_dropout=0.5",
]
every = pytest.mark.parametrize("words", EVERY)


def split_of(N=6 * T + 6, seed=0):
    """N random tokens: six windows and a short one."""
    return Split(tokens(1, N, seed)[0].to(torch.uint8), N - 1, N - 1)


def documents(N=200):
    """Documents of 7 tokens: windows overlap, and what was counted before counts no more."""
    return dataclasses.replace(split_of(N), starts=torch.arange(0, N, 7))


def measured(model, *measures, split=None, **options):
    options = {"max_tokens": None, "gate_steps": 3} | options
    return importance(model, split or split_of(), T, measures=measures or tuple(MEASURES), **options)


def values(found, name):
    return [score.value for score in found.measures[name].values()]


def without_by_hand(model, head):
    """A copy whose slice of W_o is zero; without W_o the head's channels are cut from what the layer adds."""
    model = copy.deepcopy(model)
    attn = model.blocks[head.layer].attn
    if attn.w_o is not None:
        i = attn.heads.index(head.head)
        with torch.no_grad():
            attn.w_o.weight[:, i * attn.Dv : (i + 1) * attn.Dv] = 0
    else:
        here = slice(head.head * attn.Dv, (head.head + 1) * attn.Dv)
        attn.register_forward_hook(
            lambda _m, _i, out: torch.cat((out[..., : here.start], 0 * out[..., here], out[..., here.stop :]), -1)
        )
    return model


# The loss without heads


@every
@pytest.mark.parametrize("split", [split_of(), documents()], ids=["text", "documents"])
def test_the_loss_is_that_of_evaluate(words, split):
    """For any sets in any order, though only what changes is computed again."""
    model = built(make(*words.split()))
    heads = heads_of(model)
    draw = torch.Generator().manual_seed(0)
    sets = [set(), {heads[-1]}, {heads[0]}, set(heads), set(heads), set()]
    sets += [{h for h in heads if torch.rand((), generator=draw) < 0.5} for _ in range(6)]
    data = sequences(split, T, None, CPU, batch_tokens=4 * T)
    found = losses(model, data, sets).sum(1) / counts(data).sum()
    for gone, loss in zip(sets, found.tolist()):
        with without(model, gone):
            assert loss == pytest.approx(evaluate(model, split, T).loss, abs=1e-6)
    assert len({round(loss, 5) for loss in found.tolist()}) >= min(4, 2 ** len(heads))


def test_a_subset_is_the_one_that_evaluate_takes():
    model = built(make())
    found = measured(model, "zeroed", max_tokens=40, split_name="val")
    score = evaluate(model, split_of(), T, max_tokens=40)
    assert found.tokens == score.tokens == 48 and found.split == "val"
    assert found.loss == pytest.approx(score.loss, abs=1e-6)


# Leave one out


@every
def test_leave_one_out_is_brute_force(words):
    """The whole evaluation again, of a copy without the head's slice of W_o: equal to 1e-6."""
    model = built(make(*words.split()))
    found, whole = measured(model, "zeroed"), evaluate(model, split_of(), T).loss
    assert list(found.measures["zeroed"]) == heads_of(model)
    for head, score in found.measures["zeroed"].items():
        assert score.value == pytest.approx(
            evaluate(without_by_hand(model, head), split_of(), T).loss - whole, abs=1e-6
        )
    assert max(map(abs, values(found, "zeroed"))) > 1e-3


@every
def test_the_mean_of_a_head_takes_its_place(words):
    """The whole evaluation again with z at its mean, which is taken over all tokens of the split."""
    model, split = built(make(*words.split())), split_of(5 * T + 1)
    x_WT, whole = split.tokens[:-1].long().view(5, T), evaluate(model, split, T).loss
    z = capture(model, x_WT, "z")["z"]
    for head, score in measured(model, "mean", split=split).measures["mean"].items():
        attn = model.blocks[head.layer].attn
        i = attn.heads.index(head.head)
        mean_D = z[head.layer][:, i].mean((0, 1))

        def fill(_m, _i, z_WHTD, i=i, mean_D=mean_D):
            return torch.cat((z_WHTD[:, :i], mean_D.expand_as(z_WHTD[:, i : i + 1]), z_WHTD[:, i + 1 :]), 1)

        handle = attn.z.register_forward_hook(fill)
        assert score.value == pytest.approx(evaluate(model, split, T).loss - whole, abs=1e-6)
        handle.remove()


def test_each_token_counts_once_in_a_mean():
    """Also where windows overlap, and without what removed heads would have said."""
    model, split, gone = built(make()), documents(), [Head(0, 1)]
    total_HD, n = 0, 0
    with without(model, gone):
        for at_WT, counted_WT in windows(split, T, None, 1):
            z_HTD = capture(model, split.tokens[at_WT - 1].long(), "z")["z"][1][0]
            total_HD, n = total_HD + z_HTD[:, counted_WT[0]].double().sum(1), n + int(counted_WT.sum())
    found = mean_outputs(model, sequences(split, T, None, CPU), gone)
    assert n == 199 and list(found) == heads_of(model)
    for h in range(4):
        torch.testing.assert_close(found[Head(1, h)].double(), total_HD[h] / n, atol=1e-6, rtol=1e-5)


def test_a_head_that_always_says_the_same_is_missed_only_where_it_is_zeroed():
    model = built(make("qkv_bias=true"))
    with torch.no_grad():
        model.blocks[1].attn.w_v.weight[8:16] = 0  # its value is the bias, at each token
        model.blocks[1].attn.w_v.bias[8:16] = 1
    found = measured(model, "zeroed", "mean")
    assert abs(found.measures["zeroed"][Head(1, 1)].value) > 1e-3
    assert found.measures["mean"][Head(1, 1)].value == pytest.approx(0, abs=1e-7)
    assert found.measures["mean"][Head(1, 1)].se == pytest.approx(0, abs=1e-7)


def test_the_error_is_that_of_paired_differences():
    """Sequences of one length: the deviation of their differences over the root of their number."""
    model, split = built(make()), split_of(6 * T + 1)
    score = measured(model, "zeroed", split=split).measures["zeroed"][Head(0, 3)]
    parts = [Split(split.tokens[i * T : (i + 1) * T + 1], T, T) for i in range(6)]
    other = without_by_hand(model, Head(0, 3))
    each = torch.tensor([evaluate(other, p, T).loss - evaluate(model, p, T).loss for p in parts], dtype=torch.float64)
    assert score.se == pytest.approx((each.std() / 6**0.5).item(), abs=1e-6)
    assert score.se < evaluate(model, split, T).se


# The slope of a gate


@every
def test_michel_is_a_finite_difference_of_the_gate(words):
    """Of each sequence alone, in double precision: equal to 1e-3, and to much less."""
    model, split = built(make(*words.split())).double(), split_of(4 * T + 1)
    x_WT, y_WT = split.tokens[:-1].long().view(4, T), split.tokens[1:].long().view(4, T)

    @torch.inference_mode()
    def loss_W(head, gate):
        gate_H = torch.ones(len(model.blocks[head.layer].attn.heads), dtype=torch.float64)
        gate_H[model.blocks[head.layer].attn.heads.index(head.head)] = gate
        with gated(model, {head.layer: gate_H}):
            return F.cross_entropy(model(x_WT).transpose(1, 2), y_WT, reduction="none").mean(1)

    for head, score in measured(model, "gradient", split=split).measures["gradient"].items():
        slope_W = (loss_W(head, 1 + 1e-4) - loss_W(head, 1 - 1e-4)) / 2e-4
        assert score.value == pytest.approx(slope_W.abs().mean().item(), rel=1e-3)
        assert score.value == pytest.approx(slope_W.abs().mean().item(), rel=1e-5, abs=1e-7)
        assert score.se == pytest.approx((slope_W.abs().std() / 2).item(), rel=1e-4)
        assert score.value > slope_W.mean().abs() * 1.001 or (slope_W > 0).all() or (slope_W < 0).all()


# Hard-concrete gates


def test_a_gate_is_closed_and_open_as_often_as_the_formulas_say():
    """Louizos et al. 2018: P(not 0), and P(1) by the same reasoning, against a count of 100,000 draws."""
    log_alpha_N, draw = torch.tensor([-2.0, 0.0, 1.5]).double(), torch.Generator().manual_seed(0)
    gate_BN = hard_concrete(log_alpha_N, torch.rand(100_000, 3, generator=draw, dtype=torch.float64))
    assert gate_BN.min() == 0 and gate_BN.max() == 1
    bound = 4 * 0.5 / 100_000**0.5  # four standard errors at most
    open_N = (gate_BN > 0).double().mean(0)
    torch.testing.assert_close(open_N, probability_open(log_alpha_N), atol=bound, rtol=0)
    fully_N = torch.sigmoid(log_alpha_N - 2 / 3 * math.log((1 + 0.1) / (1.1 - 1)))
    torch.testing.assert_close((gate_BN == 1).double().mean(0), fully_N, atol=bound, rtol=0)
    assert probability_open(torch.zeros(1)).item() == pytest.approx(11 ** (2 / 3) / (1 + 11 ** (2 / 3)))
    assert hard_concrete(torch.zeros(1), torch.tensor([[0.5]])).item() == pytest.approx(0.5)
    assert hard_concrete(torch.zeros(1), torch.zeros(1, 1)).item() == 0  # what a generator may draw


def test_only_the_price_moves_the_gate_of_a_head_that_says_nothing():
    """One step of Adam is one learning rate, whatever the slope."""
    model = without_by_hand(built(make()), Head(1, 2))
    found = measured(model, "gates", gate_steps=1).measures["gates"]
    assert found[Head(1, 2)].value == pytest.approx(1 / (1 + math.exp(-(2 - 0.05) - 2 / 3 * math.log(11))), rel=1e-6)
    later = measured(model, "gates", gate_steps=30).measures["gates"]
    assert later[Head(1, 2)].value < 0.9 < 0.97 < found[Head(1, 2)].value
    assert measured(model, "gates", gate_steps=0).measures["gates"][Head(0, 0)].value == pytest.approx(
        1 / (1 + math.exp(-2 - 2 / 3 * math.log(11)))
    )


def test_gates_open_for_heads_that_help_and_close_for_heads_that_hurt(monkeypatch):
    """Nearly every token comes again: head 0 adds what was read to its half of the stream, and head 1 takes it off."""
    monkeypatch.setattr(module, "PRICE", 1e-6)
    model = built(make("n_layer=1", "n_head=2", "pos=none"))
    split = Split(torch.arange(20).repeat_interleave(8), 159, 159)
    with torch.no_grad():
        attn = model.blocks[0].attn
        model.blocks[0].mlp.down.weight.zero_()
        attn.w_q.weight.zero_()
        attn.w_v.weight.copy_(torch.eye(32))
        attn.w_o.weight.copy_(torch.diag(torch.tensor([1.0] * 16 + [-1.0] * 16)))
    change = values(measured(model, "zeroed", split=split), "zeroed")
    assert change[0] > 1e-3 and change[1] < -1e-3
    gates = values(measured(model, "gates", split=split, gate_steps=40), "gates")
    assert gates[0] > 0.99 > 0.9 > gates[1]


def test_gates_are_the_same_for_the_same_seed_only():
    model = built(make())
    a, b, c = (values(measured(model, "gates", seed=s), "gates") for s in (1, 1, 2))
    assert a == b != c
    assert all(0 < p < 1 for p in a) and all(math.isnan(s.se) for s in measured(model).measures["gates"].values())


# What changes nothing


@pytest.mark.parametrize("words", ["model=gqa", "norm_position=post bias=true kept_heads=[[1,2],[]]"])
@pytest.mark.parametrize("split", [split_of(), documents()], ids=["text", "documents"])
def test_scores_do_not_depend_on_batching(words, split):
    model = built(make(*words.split())).double()
    first = measured(model, split=split, batch_tokens=T)
    for batch_tokens in (3 * T, 4096):
        again = measured(model, split=split, batch_tokens=batch_tokens)
        for name in MEASURES:
            assert values(again, name) == pytest.approx(values(first, name), rel=1e-9, abs=1e-12)
        assert again.loss == pytest.approx(first.loss, rel=1e-12)


@pytest.mark.parametrize("words", ["model=gqa", "bias=true norm_position=post", "model=tied", "model=no_wo"])
def test_removed_heads_score_zero_and_stay_away(words):
    """The others score as in a model that never had them; so they do in a second round."""
    model, gone = built(make(*words.split())), [Head(0, 1), Head(1, 3)]
    for _ in range(2):
        found = measured(model, removed=gone)
        bare = model
        for head in gone:
            bare = without_by_hand(bare, head)
        alone = measured(bare)
        assert found.loss == pytest.approx(evaluate(bare, split_of(), T).loss, abs=1e-6)
        for name in MEASURES:
            for head, score in found.measures[name].items():
                if head in gone:
                    assert score == Mean(0.0, 0.0)
                else:
                    assert score.value == pytest.approx(alone.measures[name][head].value, abs=1e-6)
        gone = [*gone, next(h for h in order_of(found, "gradient") if h not in gone)]
    with pytest.raises(ValueError, match="no L7H0"):
        measured(model, removed=[Head(7, 0)])


def test_when_all_heads_are_gone_there_is_nothing_to_measure():
    model = built(make())
    found = measured(model, removed=heads_of(model))
    assert all(score == Mean(0.0, 0.0) for scores in found.measures.values() for score in scores.values())
    assert all(map(math.isnan, found.correlations.values())) and len(found.correlations) == 6
    never = measured(built(make("kept_heads=[[],[]]")))
    assert never.measures == {name: {} for name in MEASURES} and never.loss > 0


@every
def test_the_model_is_left_as_it_was(words):
    """In its mode, with its weights, flags, gradients and no hooks; and no chance but our own is used."""
    model = built(make(*words.split())).train()
    first = next(model.parameters()).requires_grad_(False)
    last = list(model.parameters())[-1]
    last.grad = torch.ones_like(last)
    before, chance = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert repr(measured(model)) == repr(measured(model))  # without dropout
    assert model.training and all(m.training for m in model.modules())
    assert torch.equal(torch.get_rng_state(), chance) and torch.is_grad_enabled()
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == [p is not first for p in model.parameters()]
    assert all(p.grad is None for p in model.parameters() if p is not last) and torch.equal(
        last.grad, torch.ones_like(last)
    )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_error_leaves_no_hooks(monkeypatch):
    model = built(make()).train()
    monkeypatch.setattr(model.blocks[1].mlp, "forward", lambda x: 1 / 0)
    for name in MEASURES:
        with pytest.raises(ZeroDivisionError):
            measured(model, name)
    assert model.training and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# Ranks


def scores(*numbers):
    return {Head(0, i): Mean(v, 0.0) for i, v in enumerate(numbers)}


def test_rank_correlations_by_hand():
    """1 - 6 sum d^2 / (n (n^2 - 1)) of ranks 1 2 3 4 and 2 1 4 3; ties have the mean of their ranks."""
    a = scores(1, 2, 3, 100)
    assert rank_correlation(a, scores(5, 4, 7, 6)) == pytest.approx(1 - 6 * 4 / (4 * 15))
    assert rank_correlation(a, scores(0.1, 0.2, 0.3, 0.31)) == pytest.approx(1)
    assert rank_correlation(a, scores(3, 2, 1, 0)) == pytest.approx(-1)
    assert rank_correlation(a, scores(0, 0, 1, 1)) == pytest.approx(2 / 5**0.5)
    assert all(map(math.isnan, (rank_correlation(a, scores(1, 1, 1, 1)), rank_correlation({}, {}))))
    assert math.isnan(rank_correlation(scores(1), scores(2)))


def test_removed_heads_are_in_no_correlation():
    model = built(make())
    found = measured(model, "zeroed", "gradient", removed=[Head(0, 0), Head(0, 1)])
    left = [
        {h: s for h, s in found.measures[name].items() if h not in (Head(0, 0), Head(0, 1))} for name in found.measures
    ]
    assert found.correlations == {("zeroed", "gradient"): pytest.approx(rank_correlation(*left))}


def test_order_has_the_least_first_and_ties_by_place():
    found = Importance({"m": scores(0.5, -1, 0.5, 0) | {Head(1, 0): Mean(-1, 0)}}, {}, 1.0, 1, "val")
    assert [h.name for h in order_of(found, "m")] == ["L0H1", "L1H0", "L0H3", "L0H0", "L0H2"]


def test_unknown_measures_are_refused():
    with pytest.raises(UserError, match="zeroe: must be one of zeroed, mean, gradient, gates; did you mean zeroed"):
        measured(built(make()), "zeroe")


def test_bigger_vocabulary_is_no_trouble():
    assert built(make("vocab_size=40")).embed.num_embeddings == 40 > VOCAB
    assert len(measured(built(make("vocab_size=40"))).measures["mean"]) == 8
