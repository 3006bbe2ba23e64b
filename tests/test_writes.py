"""Laws of what heads write: the parts are the whole, whatever the norms; shares, cosines and logits known by hand.

Axes as in toymha/analysis/writes.py: B sequences, T positions, C dim, H heads, V vocabulary.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from conftest import MODELS, PRUNED, VOCAB, built, make, tokens

from toymha.analysis import writes as module
from toymha.analysis.capture import capture, heads_of
from toymha.analysis.results import Head
from toymha.analysis.writes import Geometry, contributions, writes

EVERY = [
    *(f"model={m}" for m in MODELS),
    *PRUNED,
    "norm_position=post norm=rms bias=true pos=learned",
    "norm_position=post w_o=false pos=sinusoidal kept_heads=[[0,3],[]]",
    "pos=sinusoidal bias=true tie_embeddings=false mlp=swiglu",
    "pos=none norm=rms causal=false n_layer=3",
]
every = pytest.mark.parametrize("words", EVERY)


def model_of(words):
    return built(make(*words.split())).double()


def heard(model, x):
    return capture(model, x, "embedded", "write", "after_attn", "after_mlp", "logits")


def sequences(B=3, T=16, seed=0):
    """x_BT, the next tokens, and predictions all of which count."""
    idx = tokens(B, T + 1, seed)
    return idx[:, :-1], idx[:, 1:], torch.ones(B, T, dtype=torch.bool)


@every
@torch.inference_mode()
def test_all_parts_add_up_to_the_logits(words):
    """Embedding, positions, every head, every MLP and all biases: to every token, at every position."""
    model, (x, _, _) = model_of(words), sequences()
    seen, unembed_VC = heard(model, x), (model.head or model.embed).weight
    for v in range(VOCAB):
        parts = contributions(model, seen, unembed_VC[v].expand(3, 16, -1))
        assert {p for p in parts if isinstance(p, Head)} == set(heads_of(model))
        torch.testing.assert_close(sum(parts.values()), seen["logits"][0][..., v], atol=1e-9, rtol=1e-9)


@every
@torch.inference_mode()
def test_a_part_is_what_gets_through_all_later_norms(words):
    """Sent forward through every norm that comes after it, each held at the deviation that was heard."""
    model, (x, y, _) = model_of(words), sequences()
    norms = [n for b in model.blocks for n in ((b.norm_attn, b.norm_mlp) if not b.pre else ())] + [model.norm]
    norms = [n for n in norms if hasattr(n, "weight")]
    reads = {}
    handles = [n.register_forward_hook(lambda m, given, _out: reads.update({m: given[0]})) for n in norms]
    seen = heard(model, x)
    for handle in handles:
        handle.remove()

    def through(v_BTC, norms):
        for n in norms:
            x_BTC = reads[n]
            if type(n).__name__ == "LayerNorm":
                x_BTC, v_BTC = x_BTC - x_BTC.mean(-1, keepdim=True), v_BTC - v_BTC.mean(-1, keepdim=True)
            v_BTC = v_BTC / (x_BTC.pow(2).mean(-1, keepdim=True) + n.eps).sqrt() * n.weight
        return v_BTC

    right_BTC = (model.head or model.embed).weight[y]
    parts, post = contributions(model, seen, right_BTC), not model.blocks[0].pre
    for layer, block in enumerate(model.blocks):
        for i, h in enumerate(block.attn.heads):
            arrived_BTC = through(seen["write"][layer][:, i], norms[2 * layer if post else 0 :])
            torch.testing.assert_close(parts[Head(layer, h)], (arrived_BTC * right_BTC).sum(-1), atol=1e-9, rtol=1e-9)
    at_start = sum(parts[p] for p in ("embedding", "positions") if p in parts)
    arrived_BTC = through(seen["embedded"][0], norms)
    torch.testing.assert_close(at_start, (arrived_BTC * right_BTC).sum(-1), atol=1e-9, rtol=1e-9)


@every
def test_everything_together_is_the_right_logit_less_the_mean(words):
    """And the shares of a layer's heads and of its bias are 1."""
    model, (x, y, counted) = model_of(words), sequences()
    counted[0, :5] = False
    w = writes(model, x, y, counted)
    logits_BTV = capture(model, x, "logits")["logits"][0]
    wanted = (logits_BTV.gather(-1, y[..., None])[..., 0] - logits_BTV.mean(-1))[counted].mean().item()
    assert sum(h.logit.value for h in w.heads.values()) + sum(w.direct.values()) == pytest.approx(wanted, abs=1e-9)
    assert set(w.direct) >= {"embedding", "biases", "mlp0", "mlp1"}
    assert ("positions" in w.direct) == (model.pos in ("learned", "sinusoidal"))
    for layer, block in enumerate(model.blocks):
        shares = [w.heads[Head(layer, h)].share for h in block.attn.heads]
        if shares:
            assert sum(shares) + w.bias[layer] == pytest.approx(1, abs=1e-9)
            assert (w.bias[layer] != 0) == any(n.endswith("w_o.bias") for n, _ in block.attn.named_parameters("attn"))


def test_a_layer_without_heads_writes_its_bias_or_nothing():
    x, y, counted = sequences()
    assert writes(built(make("kept_heads=[[],[1]]", "bias=true")), x, y, counted).bias[0] == pytest.approx(1)
    nothing = writes(built(make("kept_heads=[[],[1]]")), x, y, counted)
    assert math.isnan(nothing.bias[0]) and nothing.bias[1] == 0 and list(nothing.heads) == [Head(1, 1)]
    none = writes(built(make("kept_heads=[[],[]]")), x, y, counted)
    assert none.heads == {} and none.cosine.shape == (0, 0)


@torch.no_grad()
def test_norm_share_and_cosine_by_hand():
    """Heads say the same v; blocks of W_o make of it v, -3v, 0 and something at a right angle."""
    model, (x, y, counted) = built(make("tied_heads=true", "n_layer=1")), sequences()
    blocks_CHD = model.blocks[0].attn.w_o.weight.unflatten(1, (4, 8))
    blocks_CHD[16:, 0] = 0
    blocks_CHD[:, 1] = -3 * blocks_CHD[:, 0]
    blocks_CHD[:, 2] = 0
    blocks_CHD[:, 3] = blocks_CHD[:, 0].roll(16, dims=0)
    w = writes(model, x, y, counted)
    norm, share, logit = ([getattr(w.heads[Head(0, h)], f) for h in range(4)] for f in ("norm", "share", "logit"))
    z_BTD = capture(model, x, "z")["z"][0][:, 0]
    assert norm[0] == pytest.approx((z_BTD @ blocks_CHD[:, 0].T).norm(dim=-1).mean().item(), rel=1e-5)
    assert norm[1:] == pytest.approx([3 * norm[0], 0, norm[0]], rel=1e-5)
    # the sum is -2v + r with |r| = |v|: products with v, -3v, 0, r are -2, 6, 0, 1 of 5
    assert share == pytest.approx([-0.4, 1.2, 0, 0.2], abs=1e-5)
    assert logit[1].value == pytest.approx(-3 * logit[0].value, rel=1e-4) and logit[2].value == 0
    nan = math.nan
    wanted = [[1, -1, nan, 0], [-1, 1, nan, 0], [nan] * 4, [0, 0, nan, 1]]
    torch.testing.assert_close(w.cosine, torch.tensor(wanted), atol=1e-5, rtol=0, equal_nan=True)


def test_without_w_o_each_head_writes_to_its_own_channels():
    model, (x, y, counted) = built(make("model=no_wo")), sequences()
    w, z = writes(model, x, y, counted), capture(model, x, "z")["z"]
    for layer in range(2):
        square_BHT = z[layer].square().sum(-1)
        for h in range(4):
            assert w.heads[Head(layer, h)].norm == pytest.approx(square_BHT[:, h].sqrt().mean().item(), rel=1e-5)
            share = (square_BHT[:, h].sum() / square_BHT.sum()).item()
            assert w.heads[Head(layer, h)].share == pytest.approx(share, rel=1e-5)
        same = w.cosine[4 * layer : 4 * layer + 4, 4 * layer : 4 * layer + 4]
        torch.testing.assert_close(same, torch.eye(4), atol=1e-6, rtol=0)
    assert w.cosine[:4, 4:].abs().max() > 1e-3


def test_cosines_are_means_over_positions():
    model, (x, y, counted) = built(make("model=gqa", "bias=true")), sequences()
    counted[1, 3:] = False
    w, (first, second) = writes(model, x, y, counted), capture(model, x, "write")["write"]
    by_hand = torch.cosine_similarity(first[:, 1], second[:, 2], dim=-1)[counted].mean()
    assert w.cosine[1, 6] == w.cosine[6, 1] == pytest.approx(by_hand.item(), abs=1e-6)


def test_where_one_of_two_heads_is_silent_there_is_no_cosine():
    """Two positions; head 1 writes at the first only, where the angle has the sides 3, 4 and 5."""
    geometry = Geometry(built(make("n_layer=1", "n_head=2")))
    write_BHTC = torch.zeros(1, 2, 2, 32)
    write_BHTC[0, 0, :, 0], write_BHTC[0, 1, 0, :2] = 7, torch.tensor([3.0, 4.0])
    geometry.add([write_BHTC], torch.ones(1, 2, dtype=torch.bool))
    torch.testing.assert_close(geometry.cosine(), torch.tensor([[1, 0.6], [0.6, 1]]))
    assert geometry.norms() == [7, 2.5]
    # sums are (10, 4) and (7, 0): products 70 + 49 and 46
    assert geometry.shares() == ([pytest.approx(119 / 165), pytest.approx(46 / 165)], [0])


def test_error_of_a_logit_by_hand():
    """Sequences of one length: the deviation of their means over the root of their number."""
    model, (x, y, counted) = model_of("model=mha"), sequences(B=5)
    each = [writes(model, *(t[b : b + 1] for t in (x, y, counted))).heads[Head(1, 2)].logit for b in range(5)]
    means = torch.tensor([e.value for e in each], dtype=torch.float64)
    logit = writes(model, x, y, counted).heads[Head(1, 2)].logit
    assert logit.value == pytest.approx(means.mean().item()) and math.isnan(each[0].se)
    assert logit.se == pytest.approx((means.std() / 5**0.5).item())


def test_what_does_not_count_and_how_much_fits_into_memory_change_nothing(monkeypatch):
    model, (x, y, counted) = model_of("norm_position=post bias=true"), sequences(B=5)
    counted[0, :7], counted[3, 9:] = False, False
    w = writes(model, x, y, counted)
    other_y = torch.where(counted, y, (y + 1) % VOCAB)
    monkeypatch.setattr(module, "ROOM", 2 * 8 * 16 * 32)  # two sequences at a time
    again = writes(model, x, other_y, counted)
    torch.testing.assert_close(again.cosine, w.cosine)
    assert again.direct == pytest.approx(w.direct, abs=1e-12) and again.bias == pytest.approx(w.bias, abs=1e-12)
    for head, write in w.heads.items():
        assert again.heads[head].norm == pytest.approx(write.norm)
        assert again.heads[head].share == pytest.approx(write.share)
        assert again.heads[head].logit.value == pytest.approx(write.logit.value)
        assert again.heads[head].logit.se == pytest.approx(write.logit.se)


def test_the_model_is_left_as_it_was():
    model = built(make("attn_dropout=0.5", "resid_dropout=0.5")).train()
    before, chance = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first, second = writes(model, *sequences()), writes(model, *sequences())
    assert first.heads == second.heads  # without dropout
    assert model.training and torch.equal(torch.get_rng_state(), chance)
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
