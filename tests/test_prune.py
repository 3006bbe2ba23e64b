"""Heads taken away: a smaller model is the larger one whose other heads are silent."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from conftest import VOCAB, built, make, tokens

from toymha.analysis.capture import capture, gated, heads_of, listening, without
from toymha.analysis.results import Head
from toymha.model.gpt import GPT
from toymha.model.shrink import shrink

KEPT = [[[0, 2], [1, 2, 3]], [[3], []], [[], []], [[0, 1, 2, 3], [0]]]


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def kept_of(c, kept):
    """The same shares of the heads for any number of them."""
    rows = [[h for h in range(c.n_head) if h % 4 in row] for row in kept]
    rows = [*rows, *[list(range(c.n_head))] * (c.n_layer - len(rows))][: c.n_layer]
    return rows if any(len(row) < c.n_head for row in rows) else [[], *rows[1:]]


def smaller(model, before, after):
    out = GPT(after, VOCAB).eval()
    out.load_state_dict(shrink(model.state_dict(), before, after))
    return out


def gone(before, after):
    return {Head(n, h) for n in range(before.n_layer) for h in before.heads_of(n)} - {
        Head(n, h) for n in range(after.n_layer) for h in after.heads_of(n)
    }


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("biases", [False, True])
@torch.inference_mode()
def test_removed_equals_silent(model_config, kept, biases):
    """To 1e-5 in the logits, for every model, with biases and without; also with a cache."""
    c = (
        dataclasses.replace(model_config, bias=biases, qkv_bias=biases)
        if model_config.norm == "layer"
        else model_config
    )
    model, x = built(c), tokens()
    after = dataclasses.replace(c, kept_heads=kept_of(c, kept))
    small = smaller(model, c, after)
    with without(model, gone(c, after)):
        expected = model(x)
    close(small(x), expected)
    assert heads_of(small) == [h for h in heads_of(model) if h not in gone(c, after)]
    if c.causal:
        cache = small.make_cache(2)
        close(torch.cat([small(x[:, :7], cache), small(x[:, 7:8], cache), small(x[:, 8:], cache)], 1), expected)


@torch.inference_mode()
def test_twice_is_once(model_config):
    """Pruned in two rounds or in one: the same weights."""
    c = model_config
    half = dataclasses.replace(c, kept_heads=kept_of(c, [[0, 1, 2], [1, 3]]))
    end = dataclasses.replace(c, kept_heads=kept_of(c, [[0, 2], []]))
    model = built(c)
    once = shrink(model.state_dict(), c, end)
    twice = shrink(shrink(model.state_dict(), c, half), half, end)
    assert once.keys() == twice.keys() == GPT(end, VOCAB).state_dict().keys()
    assert all(torch.equal(once[k], twice[k]) for k in once)


def test_shared_keys_stay_while_somebody_reads_them():
    """GQA: K and V go with the last reader of a group. MQA: with the last head."""
    c = make("n_head=4", "n_kv_head=2")
    rows = {"[[0],[0,1,2]]": [1, 2], "[[2,3],[]]": [1, 0], "[[1,2],[0,1]]": [2, 1]}
    for kept, groups in rows.items():
        after = make("n_head=4", "n_kv_head=2", f"kept_heads={kept}")
        weights = shrink(built(c).state_dict(), c, after)
        widths = [len(weights[f"blocks.{n}.attn.w_k.weight"]) // c.D if after.heads_of(n) else 0 for n in range(2)]
        assert widths == groups
    one = make("n_head=4", "n_kv_head=1", "kept_heads=[[3],[]]")
    weights = shrink(built(make("n_head=4", "n_kv_head=1")).state_dict(), make("n_head=4", "n_kv_head=1"), one)
    assert len(weights["blocks.0.attn.w_k.weight"]) == c.D
    assert not [k for k in weights if k.startswith("blocks.1.attn")]


def test_a_head_that_is_gone_cannot_be_kept():
    half, all_of = make("kept_heads=[[0],[0]]"), make("kept_heads=[[0,1],[0]]")
    with pytest.raises(ValueError, match="layer 0 has no head 1"):
        shrink(built(half).state_dict(), half, all_of)


def test_a_pruned_model_learns():
    """Every weight that is left gets a gradient."""
    for words in (["kept_heads=[[0,2],[]]", "bias=true"], ["n_kv_head=2", "kept_heads=[[0,1,3],[2]]"]):
        model = built(make(*words)).train()
        model(tokens()).square().mean().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


# What is heard


@torch.inference_mode()
def test_writes_add_up_to_the_layer(model_config):
    """Law 3 at the tap: the stream after attention is the stream before it plus all writes and the bias (pre-LN)."""
    c = dataclasses.replace(model_config, bias=True)
    model, x = built(c), tokens()
    heard = capture(model, x, "write", "embedded", "after_attn", "after_mlp", "logits")
    close(heard["logits"][0], model(x))
    stream = [heard["embedded"][0], *heard["after_mlp"]]
    for layer, block in enumerate(model.blocks):
        bias = 0 if block.attn.w_o is None or block.attn.w_o.bias is None else block.attn.w_o.bias
        sums = stream[layer] + heard["write"][layer].sum(1) + bias
        close(heard["after_attn"][layer], sums if block.pre else block.norm_attn(sums))


def test_what_is_heard_cannot_be_changed():
    heard = capture(built(make()), tokens(), "pattern")
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
        heard["pattern"][0][:] = 0


def test_patterns_are_those_of_evaluation():
    """No dropout, also from a model in training, which stays in it; rows sum to 1 and the future is exactly 0."""
    model = built(make("attn_dropout=0.5", "resid_dropout=0.5")).train()
    first, second = (capture(model, tokens(), "pattern")["pattern"] for _ in range(2))
    assert model.training
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        close(a.sum(-1), torch.ones(a.shape[:-1]), 1e-6)
        assert a.triu(1).count_nonzero() == 0


def test_no_listener_stays():
    model, x = built(make()), tokens()
    with pytest.raises(ZeroDivisionError), listening(model, "z", "write"), gated(model, {0: torch.zeros(4)}):
        raise ZeroDivisionError
    assert not any(m._forward_hooks for m in model.modules())
    before = model(x)
    with without(model, heads_of(model)):
        assert (model(x) - before).abs().max() > 1e-3
    assert torch.equal(model(x), before)


def test_gates_differ_between_sequences():
    """Gates of (B, H): each sequence has its own."""
    model, x = built(make()), tokens(B=3)
    gate_BH = torch.tensor([[1.0, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0.5, 1]])
    with torch.no_grad(), gated(model, {1: gate_BH}):
        together = model(x)
    for b in range(3):
        with torch.no_grad(), gated(model, {1: gate_BH[b]}):
            close(model(x[b : b + 1]), together[b : b + 1], 1e-6)
    with pytest.raises(ValueError, match="4 heads, and 3 gates"), gated(model, {0: torch.ones(3)}):
        pass
