"""The probes: known values by hand, the model's own path, autograd; and that they leave nothing behind.

B batch, T and S positions, H heads, D head_dim, C dim.
"""

from __future__ import annotations

import copy
import html
import itertools
import math
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCAB, built, make, tokens
from torch import Tensor

from toymha.analysis import probe, probe_plots
from toymha.analysis.capture import capture
from toymha.analysis.probe import DepthStudy, ScaleStudy
from toymha.analysis.probe_depth import Depth, DepthProbe, by_depth, depth, depth_row
from toymha.analysis.probe_page import write_probe
from toymha.analysis.probe_plots import Axis, Line, lines
from toymha.analysis.probe_scale import (
    HEAD_DIMS,
    Products,
    ScaleProbe,
    Softmaxed,
    scale,
    softmax_trace,
    softmaxed,
    textbook,
    untrained,
)
from toymha.analysis.results import Head
from toymha.config import Config
from toymha.model.gpt import GPT
from toymha.model.parts import Place
from toymha.plots import Style
from toymha.schema import UserError

NASTY = "<script>alert(1)</script> & \"q\" 'q' 多头"


def vocab_of(c: Config) -> int:
    return c.vocab_size or VOCAB


def texts(B: int = 3, T: int = 12) -> tuple[Tensor, Tensor]:
    return tokens(B, T), tokens(B, T, seed=1)


# The derivation, and the softmax


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_unit_variance_gives_sqrt_head_dim(seed):
    """Vaswani et al. 2017, section 3.2.1: to within 2 % at every width, and 1 after the division."""
    found = textbook(seed=seed)
    assert tuple(found) == HEAD_DIMS
    for d, p in found.items():
        assert p.q == pytest.approx(1, rel=0.01) and p.k == pytest.approx(1, rel=0.01)
        assert p.product == pytest.approx(math.sqrt(d), rel=0.02) and p.holds
        assert p.after["head_dim"].std == pytest.approx(1, rel=0.02)
        assert p.after["none"].std == pytest.approx(math.sqrt(d), rel=0.02)


def test_undivided_scores_close_the_softmax_with_width():
    """Divided, nothing depends on head_dim; undivided, the wider the head the less passes."""
    found = list(textbook().values())
    bare, divided = ([p.after[way] for p in found] for way in ("none", "head_dim"))
    assert all(a.passed > b.passed and a.largest < b.largest for a, b in itertools.pairwise(bare))
    assert bare[0].passed < 0.7 and bare[-1].passed < 0.1
    assert max(s.passed for s in divided) - min(s.passed for s in divided) < 0.01 and divided[0].passed > 0.97


def test_the_same_seed_draws_the_same_and_disturbs_nobody():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert textbook([16], 3) == textbook([16], 3) != textbook([16], 4)
    assert torch.equal(before, torch.get_rng_state())


def test_trace_of_the_softmax_is_that_of_autograd():
    scores_BS = 3 * torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for scores_S in scores_BS:
        jacobian_SS = torch.autograd.functional.jacobian(lambda x: x.softmax(-1), scores_S)
        torch.testing.assert_close(softmax_trace(scores_S.softmax(-1)), jacobian_SS.trace())
    assert softmax_trace(torch.full((4,), 0.25)).item() == pytest.approx(1 - 1 / 4)
    assert softmax_trace(torch.tensor([0.0, 1.0, 0.0])).item() == 0


def test_softmaxed_by_hand():
    """Rows of weights 3/4, 1/4 and 1/2, 1/4, 1/4; the row that sees one key does not count, nor what is hidden."""
    scores_BTS = torch.tensor([[[5.0, 100, 100], [math.log(3), 0, 100], [math.log(2), 0, 0]]], dtype=torch.float64)
    got = softmaxed(scores_BTS, torch.ones(3, 3, dtype=torch.bool).tril())
    visible = [5.0, math.log(3), 0, math.log(2), 0, 0]
    middle = sum(visible) / 6
    assert got.std == pytest.approx(math.sqrt(sum((v - middle) ** 2 for v in visible) / 6))
    two = (0.75 * math.log(4 / 3) + 0.25 * math.log(4)) / math.log(2)
    three = 1.5 * math.log(2) / math.log(3)
    assert got.entropy == pytest.approx((two + three) / 2)
    assert got.largest == pytest.approx((0.75 + 0.5) / 2)
    assert got.passed == pytest.approx(((3 / 8) / (1 / 2) + (5 / 8) / (2 / 3)) / 2)


def test_even_rows_of_several_lengths():
    got = softmaxed(torch.zeros(2, 4, 4, dtype=torch.float64), torch.ones(4, 4, dtype=torch.bool).tril())
    assert (got.std, got.entropy, got.passed) == pytest.approx((0, 1, 1))
    assert got.largest == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)


# q and k of a model


def test_a_tiny_model_by_hand():
    """One layer, no positions: q and k are the normalised embedding times each head's rows of W_q and W_k."""
    c = make("n_layer=1", "dim=8", "n_head=2", "pos=none", "qkv_bias=true", "seq_len=5")
    model, idx_BT = built(c), tokens(3, 5)
    block = model.blocks[0]
    x_BTC = F.layer_norm(model.embed.weight[idx_BT], (8,), block.norm_attn.weight)
    found = scale(model, c, x_BT=idx_BT).heads
    assert list(found) == [Head(0, 0), Head(0, 1)]
    for h, p in enumerate(found.values()):
        rows = slice(4 * h, 4 * h + 4)
        q_BTD = x_BTC @ block.attn.w_q.weight[rows].T + block.attn.w_q.bias[rows]
        k_BTD = x_BTC @ block.attn.w_k.weight[rows].T + block.attn.w_k.bias[rows]
        pairs = torch.tensor(
            [(q_BTD[b, t] @ k_BTD[b, s]).item() for b in range(3) for t in range(5) for s in range(t + 1)]
        )
        assert p.q == pytest.approx(q_BTD.std(correction=0).item(), rel=1e-5)
        assert p.k == pytest.approx(k_BTD.std(correction=0).item(), rel=1e-5)
        assert p.product == pytest.approx(pairs.std(correction=0).item(), rel=1e-5)
        assert p.textbook == 2.0 and p.expected == pytest.approx(2 * p.q * p.k)


@pytest.mark.parametrize("score_scale", ["head_dim", "dim", "none"])
def test_heads_are_as_the_model_has_them(model_config, score_scale):
    """Scores and pattern that the attention itself builds have these numbers, head by head, at its own scale."""
    c = replace(model_config, score_scale=score_scale)
    model, (x_BT, _) = built(c), texts()
    found, heard = scale(model, c, x_BT), capture(model, x_BT, "scores", "pattern")
    assert len(found.heads) == c.n_layer * c.n_head and found.chosen == score_scale
    for (layer, h), p in found.heads.items():
        scores_BTS, pattern_BTS = heard["scores"][layer][:, h], heard["pattern"][layer][:, h]
        visible = torch.cat([scores_BTS[:, t, : t + 1].flatten() for t in range(12)])
        rows = [pattern_BTS[b, t, : t + 1].double() for b in range(3) for t in range(1, 12)]
        got = p.after[score_scale]
        assert got.std == pytest.approx(visible.std(correction=0).item(), rel=1e-4)
        assert got.largest == pytest.approx(sum(r.max().item() for r in rows) / len(rows), rel=1e-4)
        entropy = sum(-(r * r.log()).sum().item() / math.log(len(r)) for r in rows) / len(rows)
        assert got.entropy == pytest.approx(entropy, rel=1e-4)
        passed = sum((r * (1 - r)).sum().item() / (1 - 1 / len(r)) for r in rows) / len(rows)
        assert got.passed == pytest.approx(passed, rel=1e-4)


def test_scores_are_products_times_their_scale(model_config):
    x_BT, _ = texts()
    found = scale(built(model_config), model_config, x_BT)
    factors = {"head_dim": 1 / math.sqrt(model_config.D), "dim": 1 / math.sqrt(model_config.dim), "none": 1.0}
    assert found.factors == pytest.approx(factors)
    for p in found.heads.values():
        assert {w: s.std for w, s in p.after.items()} == pytest.approx({w: p.product * f for w, f in factors.items()})


def test_without_a_mask_all_keys_are_visible():
    c = make("causal=false")
    model, (x_BT, _) = built(c), texts()
    scores_BHTS = capture(model, x_BT, "scores")["scores"][0]
    got = scale(model, c, x_BT).heads[Head(0, 1)].after["head_dim"]
    assert got.std == pytest.approx(scores_BHTS[:, 1].std(correction=0).item(), rel=1e-4)


def test_heads_that_are_left_keep_their_numbers():
    c = make("kept_heads=[[0,3],[]]", "n_kv_head=2")
    model, (x_BT, _) = built(c), texts()
    found, heard = scale(model, c, x_BT), capture(model, x_BT, "scores")
    assert list(found.heads) == [Head(0, 0), Head(0, 3)] and list(found.layers()) == [0]
    visible = torch.cat([heard["scores"][0][:, 1, t, : t + 1].flatten() for t in range(12)])
    assert found.heads[Head(0, 3)].after["head_dim"].std == pytest.approx(visible.std(correction=0).item(), rel=1e-4)


def test_nothing_to_attend_to_is_refused():
    with pytest.raises(UserError, match="at least 2 tokens"):
        scale(built(make()), make(), tokens(2, 1))
    c = make("kept_heads=[[],[]]")
    with pytest.raises(UserError, match="lost all of them"):
        scale(built(c), c, tokens(2, 8))


def test_means_over_the_heads_of_a_layer():
    one, two = (Softmaxed(*(x * f for x in (1.0, 0.5, 0.25, 0.125))) for f in (1, 3))
    heads = {
        Head(0, 0): Products(4, 1.0, 2.0, 3.0, {"none": one}),
        Head(0, 1): Products(4, 3.0, 2.0, 5.0, {"none": two}),
    }
    (got,) = ScaleProbe(heads, {"none": 1.0}, "none").layers().values()
    assert got == Products(4, 2.0, 2.0, 4.0, {"none": Softmaxed(2.0, 1.0, 0.5, 0.25)})


def test_untrained_models_at_other_widths(model_config):
    """Every configuration allows them, also without W_o. Small weights on a normalised stream: q has the deviation
    0.02 sqrt(dim), far from 1; in post-LN, behind the first layer, 1 / sqrt(fan-in) gives it 1."""
    found = untrained(model_config, vocab_of(model_config), tokens(3, 16), (16, 64))
    assert [p.head_dim for p in found.values()] == [16, 64]
    for p in found.values():
        wanted = 1.0 if model_config.norm_position == "post" else 0.02 * math.sqrt(model_config.dim)
        assert p.q == pytest.approx(wanted, rel=0.15) and p.k == pytest.approx(wanted, rel=0.15)
        assert p.ratio == pytest.approx(wanted**2, rel=0.4)
        assert not p.holds or model_config.norm_position == "post"


def test_untrained_models_have_all_heads():
    """A pruned configuration is taken whole: a width is compared, and not what is left of the heads."""
    c = make("n_layer=3")
    assert untrained(replace(c, kept_heads=[[0, 3], [1], []]), VOCAB, tokens(), (16,)) == untrained(
        c, VOCAB, tokens(), (16,)
    )


def test_untrained_refuses_what_the_configuration_does():
    with pytest.raises(UserError, match="head_dim must be even"):
        untrained(make("pos=rope"), VOCAB, tokens(), (15,))


# Depth


def by_hand(model: GPT, x_BT: Tensor, y_BT: Tensor) -> tuple[list[Tensor], float]:
    """The stream before block 0 and behind each, with the gradient of the summed loss, and the mean loss; by a forward
    pass that is written out here. Parameters get the gradient of the mean loss. No positions."""
    stream = [model.embed(x_BT)]
    for block in model.blocks:
        stream.append(block(stream[-1], Place()))
    for x_BTC in stream:
        x_BTC.retain_grad()
    logits_BTV = model.norm(stream[-1]) @ model.embed.weight.T
    nats_BT = -logits_BTV.log_softmax(-1).gather(-1, y_BT[..., None])[..., 0]
    nats_BT.sum().backward()
    for p in model.parameters():
        p.grad /= nats_BT.numel()
    return stream, nats_BT.mean().item()


@pytest.mark.parametrize("position", ["pre", "post"])
def test_gradients_are_those_of_backward(position):
    c = make("pos=none", "n_layer=3", f"norm_position={position}", "bias=true")
    (x_BT, y_BT), model = texts(), built(c)
    got = by_depth(model, x_BT, y_BT)
    twin = copy.deepcopy(model)
    stream, loss = by_hand(twin, x_BT, y_BT)
    assert got.loss == pytest.approx(loss, rel=1e-5)
    assert len(got.stream) == len(got.stream_gradient) == 4 and len(got.parameters) == 3
    for i, x_BTC in enumerate(stream):
        assert got.stream[i] == pytest.approx(math.sqrt(x_BTC.square().mean().item()), rel=1e-5)
        norms_BT = x_BTC.grad.norm(dim=-1)
        assert got.stream_gradient[i] == pytest.approx(math.sqrt(norms_BT.square().mean().item()), rel=1e-4)
    for i, block in enumerate(twin.blocks):
        squares = sum(p.grad.square().sum().item() for p in block.parameters())
        assert got.parameters[i] == pytest.approx(math.sqrt(squares), rel=1e-4)
    assert got.growth == pytest.approx(got.parameters[2] / got.parameters[0])


def test_reading_the_same_twice_changes_no_number():
    (x_BT, y_BT), model = texts(), built(make())
    one, two = by_depth(model, x_BT, y_BT), by_depth(model, x_BT.repeat(2, 1), y_BT.repeat(2, 1))
    assert two.parameters == pytest.approx(one.parameters, rel=1e-4)
    assert two.stream_gradient == pytest.approx(one.stream_gradient, rel=1e-4)


def test_both_positions_of_one_seed(model_config):
    """New models of this configuration, whatever it has; the trained one beside them under its own name."""
    c, V = model_config, vocab_of(model_config)
    (x_BT, y_BT), model = texts(), built(model_config)
    found = depth(c, V, x_BT, y_BT, model).models
    own = "post-LN, trained" if c.norm_position == "post" else "pre-LN, trained"
    assert list(found) == ["pre-LN, untrained", "post-LN, untrained", own]
    for position in ("pre", "post"):
        assert found[f"{position}-LN, untrained"] == by_depth(GPT(replace(c, norm_position=position), V), x_BT, y_BT)
    assert found["post-LN, untrained"].stream[1:] == pytest.approx([1.0] * c.n_layer, rel=1e-2)
    assert found[own] == by_depth(model, x_BT, y_BT)
    assert list(depth(c, V, x_BT, y_BT).models) == ["pre-LN, untrained", "post-LN, untrained"]


def test_a_layer_without_heads_has_a_depth_too():
    c = make("kept_heads=[[0,3],[]]", "bias=true")
    found = by_depth(built(c), *texts())
    assert len(found.parameters) == 2 and min(found.parameters) > 0


def test_a_row_for_the_log():
    model, (x_BT, y_BT) = built(make()), texts()
    row, found = depth_row(model, x_BT, y_BT), by_depth(model, x_BT, y_BT)
    assert list(row) == ["grad_norm/layer0", "grad_norm/layer1", "stream_norm/layer0", "stream_norm/layer1"]
    assert list(row.values()) == [*found.parameters, *found.stream[1:]]


# Nothing is left behind


@pytest.mark.parametrize("graded", [False, True])
def test_probes_leave_the_model_as_it_was(model_config, graded):
    """Weights, gradients, mode, hooks, chance; and dropout does not act, also in training mode."""
    c = replace(model_config, attn_dropout=0.3, resid_dropout=0.3)
    (x_BT, y_BT), model = texts(), built(c)
    calm = scale(model, c, x_BT), by_depth(model, x_BT, y_BT)
    model.train()
    for p in model.parameters() if graded else ():
        p.grad = torch.ones_like(p)
    weights = copy.deepcopy(model.state_dict())
    torch.manual_seed(0)
    chance = torch.get_rng_state()
    with torch.no_grad():  # as an evaluation may
        row = depth_row(model, x_BT, y_BT)
        found = scale(model, c, x_BT), by_depth(model, x_BT, y_BT)
        depth(c, vocab_of(c), x_BT, y_BT, model)
        assert not torch.is_grad_enabled()
    assert found == calm and row["grad_norm/layer0"] == calm[1].parameters[0]
    assert torch.equal(chance, torch.get_rng_state()) and all(m.training for m in model.modules())
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    assert all((p.grad == 1).all() if graded else p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


def test_no_hook_stays_after_an_error():
    model = built(make())
    with pytest.raises(IndexError):
        scale(model, make(), torch.full((1, 4), 10**6))
    assert not any(m._forward_pre_hooks for m in model.modules())


# Along training


def test_rows_of_a_log():
    """What is not finite, of another tag, or a text is left out; layer 10 comes after layer 2."""
    rows = [
        {"step": 0, "a/layer10": 1.0, "a/layer2": 2.0, "b/layer0": 9.0, "sample": "a/layer1"},
        {"step": 5, "a/layer10": None, "a/layer2": 3, "a/layerx": 1.0},
        {"step": 7, "loss/train": 1.0},
    ]
    assert list(probe.by_layer(rows, "a").items()) == [(2, ([0, 5], [2.0, 3])), (10, ([0], [1.0]))]
    assert probe.by_layer(rows, "c") == {}


def test_growth_along_a_log():
    rows = [
        {"step": s, "grad_norm/layer0": 2.0, "grad_norm/layer1": None, "grad_norm/layer2": g}
        for s, g in ((0, 3.0), (9, 1.0))
    ]
    assert probe.growth(rows) == ([0, 9], [1.5, 0.5])
    assert probe.growth([{"step": 0, "grad_norm/layer0": 1.0}]) == ([], [])
    assert probe.growth([{"step": 0, "grad_norm/layer0": 0.0, "grad_norm/layer1": 1.0}]) == ([], [])


# In words


def products_of(q: float, product: float, passed: dict[str, float], d: int = 16) -> Products:
    after = {w: Softmaxed(product, 0.5, 0.5, x) for w, x in passed.items()}
    return Products(d, q, q, product, after)


def scale_study(
    q: float, product: float, bare: float = 0.5, chosen: str = "head_dim", drawn: float = 4.0, **more
) -> ScaleStudy:
    """Two heads alike, head_dim 16, so that sqrt(head_dim) is 4."""
    p = products_of(q, product, {"head_dim": 0.97, "dim": 0.98, "none": bare})
    heads = {Head(0, 0): p, Head(0, 1): p}
    rows = {16: products_of(1.0, drawn, {"head_dim": 0.97, "none": 0.62})}
    found = ScaleProbe(heads, {"head_dim": 0.25, "dim": 0.125, "none": 1.0}, chosen)
    return ScaleStudy(NASTY, [("text", NASTY)], found, rows, {16: p}, **more)


def test_sentences_about_scale_follow_the_numbers():
    def said(*numbers, **more):
        return " ".join(probe.scale_says(scale_study(*numbers, **more)))

    assert "to within 1.0 %: the derivation holds." in said(1.0, 4.0, drawn=4.04)
    assert "should be √head_dim, and is off by up to 5.0 %" in said(1.0, 4.0, drawn=4.2)
    assert "holds for 2 of 2 heads" in said(1.0, 4.0) and "so " not in said(1.0, 4.0)
    assert "holds for 0 of 2 heads" in said(0.5, 1.0) and "it is the variance alone" in said(0.5, 1.0)
    assert "not the variance alone" in said(0.5, 2.0)
    assert "nothing is saturated" in said(0.5, 1.0, bare=0.99) and "nothing is saturated" not in said(0.5, 1.0)
    assert "Undivided, as in this model" in said(1.0, 4.0, chosen="none")
    assert "Divided by √dim, as in this model" in said(1.0, 4.0, chosen="dim")


def test_layers_that_differ_are_told_one_by_one():
    a, b = (products_of(1.0, x, {"head_dim": 0.9, "dim": 0.9, "none": 0.9}) for x in (4.0, 1.0))
    found = ScaleProbe({Head(0, 0): a, Head(1, 0): b}, {}, "none")
    study = replace(scale_study(1.0, 4.0), probe=found)
    assert "The layers differ: on average it is 1.00, 0.250 times" in " ".join(probe.scale_says(study))
    assert "The layers differ" not in " ".join(probe.scale_says(scale_study(1.0, 4.0)))


def depth_study(pre: list[float], post: list[float], **more) -> DepthStudy:
    models = {}
    for name, gradients in (("pre-LN, untrained", pre), ("post-LN, untrained", post)):
        stream = [0.5] * (len(gradients) + 1)
        models[name] = Depth(2.0, stream, gradients, stream)
    return DepthStudy(NASTY, [("text", NASTY)], DepthProbe(models), **more)


def test_sentences_about_depth_follow_the_numbers():
    def compared(pre, post):
        return probe.depth_says(depth_study(pre, post))[-1]

    assert "2.00 times that of the first in post-LN, and 1.00 times in pre-LN" in compared([1.0, 1.0], [1.0, 2.0])
    assert "That is what Xiong et al. derive" in compared([1.0, 1.0], [1.0, 2.0])
    assert "in pre-LN it is not even here" in compared([3.0, 1.0], [1.0, 2.0])
    assert "does not show that" in compared([1.0, 1.0], [2.0, 1.0])
    assert "does not show that" in compared([1.0, 1.0], [0.0, 1.0])
    assert "nothing to compare by depth" in compared([1.0], [1.0])
    assert "largest in block 1" in probe.depth_says(depth_study([1.0, 3.0, 2.0], [1.0, 1.0, 1.0]))[0]


def test_numbers_as_they_are_shown():
    shown = ["0.00", "1.00", "0.0526", "12.3", "1,234", "1.00e-07", "-", "-2.50"]
    assert [probe.shown(x) for x in (0.0, 1.0, 0.05263, 12.34, 1234.4, 1e-7, math.nan, -2.5)] == shown
    assert probe.between([1.0, 2.0, 1.5]) == "1.00 to 2.00" and probe.between([1.0001, 1.0]) == "1.00"


# Figures and pages

LOGGED = {
    NASTY: [
        {
            "step": s,
            **{
                f"{t}/layer{i}": 1.0 + s + i
                for t in ("scores_std", "entropy", "grad_norm", "stream_norm")
                for i in range(3)
            },
        }
        for s in (0, 10, 20)
    ],
    "other": [{"step": 0, "grad_norm/layer0": 1.0, "grad_norm/layer1": 2.0, "scores_std/layer0": 1.0}],
}


def test_lines_that_cannot_be_drawn_are_left_out():
    """Zero and nan on a logarithmic axis; no points at all; one number only."""
    one = Style("#000000")
    for ys in ([0.0, 1.0, math.nan], [], [math.nan], [2.0, 2.0, 2.0], [1e-6, 1.0, 1e6]):
        for log in (True, False):
            figure = lines([Line(range(len(ys)), ys, one)], Axis("x"), Axis("y", log), "name")
            assert ElementTree.fromstring(figure).get("viewBox")
    assert probe_plots._decades(0.9, 12) == [1, 2, 5, 10]
    assert probe_plots._decades(0.9, 2000) == [1, 10, 100, 1000]


@pytest.mark.parametrize(
    "study", [scale_study(0.5, 1.0, logged=LOGGED), depth_study([1.0, 2.0], [0.5, 3.0], logged=LOGGED)]
)
def test_a_page_is_one_sound_file(study, tmp_path):
    """Well-formed figures, unique ids, nothing unescaped, nothing asked of anybody, the same bytes again."""
    kind = "scale" if isinstance(study, ScaleStudy) else "depth"
    path = write_probe(tmp_path / "new", study)
    assert path == tmp_path / "new" / f"probe_{kind}.html"
    source = path.read_text("utf-8")
    assert write_probe(tmp_path / "again", study).read_bytes() == path.read_bytes()
    assert "<script" not in source and NASTY in html.unescape(source) and "https://" not in source
    figures = [f for f in re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL) if "<defs>" in f]
    assert len(figures) == (4 + 1 + 3 if kind == "scale" else 3 + 1 + 3)
    for figure in figures:
        assert ElementTree.fromstring(figure).get("viewBox")
    ids = re.findall(r'\bid="([^"]*)"', source)
    assert len(ids) == len(set(ids)) > 0
    said = probe.scale_says(study) if isinstance(study, ScaleStudy) else probe.depth_says(study)
    assert all(html.escape(s).replace("&#x27;", "&#39;").replace("&quot;", "&#34;") in source for s in said)


def test_every_model_has_a_page_and_a_text(model_config, tmp_path):
    c, V = model_config, vocab_of(model_config)
    (x_BT, y_BT), model = texts(), built(model_config)
    a = ScaleStudy("one", [], scale(model, c, x_BT), textbook([16]), untrained(c, V, x_BT, [16]))
    b = DepthStudy("two", [], depth(c, V, x_BT, y_BT, model))
    texts_of = probe.scale_text(a), probe.depth_text(b)
    assert sum(line.startswith("L1H") for line in texts_of[0]) == c.n_head
    assert sum(line.startswith("block 1") for line in texts_of[1]) == 3
    for study in (a, b):
        assert not re.search(r"\b(nan|inf)\b", write_probe(tmp_path, study).read_text("utf-8").split("<main>")[1])
