"""Laws of training's arithmetic: who is decayed, what Muon computes, how the learning rate moves, what a batch is.

Axes: R rows, C columns of a matrix.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from conftest import ENCODERS, MODELS, VOCAB, built, make, tokens

from toymha.batches import Batch
from toymha.model.gpt import GPT
from toymha.model.seq2seq import make_model
from toymha.optim import Muon, _iterated, _iterated_by_gram, lr_factor, make_optimizers, orthogonalise, set_lr
from toymha.train import backward

SHAPES = [(16, 48), (48, 16), (24, 24), (24, 24), (1, 8)]


def noise(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Parameter groups


@pytest.mark.parametrize("optim", ["adamw", "muon"])
@pytest.mark.parametrize("model", [*MODELS, *ENCODERS])
def test_each_parameter_is_in_one_group(model, optim):
    """Exactly once over all optimizers; vectors are not decayed, matrices are; Muon has the matrices inside blocks."""
    chosen = make(f"optim={optim}", "optim.weight_decay=0.1").optim
    c = dataclasses.replace(
        make(f"model={model}"), optim=chosen, bias=True, pos="learned", rope_theta=None, tie_embeddings=False
    )
    model = make_model(c, VOCAB)
    groups = {}
    for optimizer in make_optimizers(model, c, "fp32"):
        for group in optimizer.param_groups:
            for p in group["params"]:
                assert id(p) not in groups
                groups[id(p)] = type(optimizer).__name__, group["weight_decay"]
    for name, p in model.named_parameters():
        kind, decay = groups.pop(id(p))
        assert (kind == "Muon") == (optim == "muon" and name.startswith(("blocks.", "encoder.")) and p.ndim == 2), name
        assert (decay > 0) == name.endswith(".weight") * ("norm" not in name), name
    assert not groups


@pytest.mark.parametrize("model", [*MODELS, *ENCODERS])
def test_gradients_lie_in_memory_as_their_weights_do(model):
    """torch's fused AdamW trusts that they do, and reads the wrong numbers where they do not."""
    c = make(f"model={model}")
    net, x = built(c).train(), tokens(2, 9)
    inputs = (x[:, :-1],) if c.n_encoder_layer is None else (x[:, :-1], x[:, :-1])
    backward(net, Batch(inputs, x[:, 1:], 16), 1, torch.device("cpu"), "fp32")
    for name, p in net.named_parameters():
        assert p.grad is None or p.grad.stride() == p.stride(), name


def test_decay_alone_shrinks_matrices_only():
    """A step without gradient multiplies matrices by 1 - lr x weight_decay and leaves vectors alone."""
    c = make("optim=adamw", "optim.weight_decay=0.5", "bias=true")
    model, before = built(c), dict(built(c).named_parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    (optimizer,) = make_optimizers(model, c, "fp32")
    set_lr([optimizer], 0.1)
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 1 - 0.1 * c.optim.lr * 0.5 if p.ndim == 2 else 1
        torch.testing.assert_close(p, before[name] * factor, atol=0, rtol=1e-6)


def test_set_lr_scales_each_peak():
    """Muon and AdamW keep their own peaks, however often the factor is set."""
    c = make("optim=muon", "optim.lr=0.01", "optim.muon_lr=0.2")
    optimizers = make_optimizers(GPT(c, VOCAB), c, "fp32")
    for factor in (1.0, 0.5, 0.25):
        set_lr(optimizers, factor)
        assert [[g["lr"] for g in o.param_groups] for o in optimizers] == [[0.01 * factor] * 2, [0.2 * factor]]


def test_adamw_is_pytorchs():
    """Step by step to the bit, by torch.optim.AdamW's fused kernel; each goes on from what the other has saved."""
    c = make("optim=adamw", "bias=true", "optim.weight_decay=0.2", "optim.eps=1e-6")
    model, peer = built(c), built(c)
    (mine,) = make_optimizers(model, c, "fp32")
    groups = [[p for p in peer.parameters() if (p.ndim >= 2) == matrices] for matrices in (True, False)]
    theirs = torch.optim.AdamW(
        [{"params": g, "weight_decay": d} for g, d in zip(groups, (0.2, 0.0))],
        lr=c.optim.lr,
        betas=tuple(c.optim.betas),
        eps=1e-6,
        fused=True,
    )
    for step in range(6):
        for i, (p, q) in enumerate(zip(model.parameters(), peer.parameters(), strict=True)):
            p.grad = q.grad = noise(p.shape, 100 * step + i)
        if step == 3:
            saved, other = mine.state_dict(), theirs.state_dict()
            assert all(torch.equal(saved["state"][i][k], v) for i, s in other["state"].items() for k, v in s.items())
            (mine,) = make_optimizers(model, c, "fp32")
            mine.load_state_dict(other)
            theirs.load_state_dict(saved | {"param_groups": other["param_groups"]})
        mine.step()
        theirs.step()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), peer.parameters()))


def test_a_saved_state_of_other_parameters_is_refused():
    (small,), (large,) = (
        make_optimizers(built(c), c, "fp32") for c in (make("optim=adamw"), make("optim=adamw", "n_layer=1"))
    )
    with pytest.raises(ValueError, match="other parameters"):
        small.load_state_dict(large.state_dict())


def test_what_is_loaded_is_a_copy():
    """The optimizer that saved it may go on."""
    a, b = (Muon([torch.nn.Parameter(torch.ones(2, 2))], **HYPER, dtype=torch.float32) for _ in range(2))
    (a.params[0]).grad = torch.eye(2)
    a.step()
    b.load_state_dict(a.state_dict())
    before = b.state[b.params[0]]["momentum"].clone()
    a.step()
    assert torch.equal(b.state[b.params[0]]["momentum"], before)


def test_a_step_needs_no_compiler():
    """torch's own Optimizer imports it, which takes longer than all else before the first step."""
    code = """
import sys, torch
from toymha.optim import AdamW, Muon
p = torch.nn.Parameter(torch.ones(2, 2))
p.grad = torch.ones(2, 2)
AdamW([{"params": [p], "weight_decay": 0.1}], 0.1, (0.9, 0.99), 1e-8).step()
Muon([p], 0.1, 0.9, 0.1, torch.float32).step()
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# Muon


def steps(make_optimizer, n=4):
    """Parameters after n steps on the same gradients, by shape."""
    params = [torch.nn.Parameter(noise(shape, i)) for i, shape in enumerate(SHAPES)]
    optimizer = make_optimizer(params)
    for step in range(n):
        for i, p in enumerate(params):
            p.grad = noise(p.shape, 100 + 10 * step + i)
        optimizer.step()
    return [p.detach() for p in params]


HYPER = dict(lr=0.02, momentum=0.95, weight_decay=0.1)


def ours(params):
    return Muon(params, **HYPER, dtype=torch.float32)


def written_out(params):
    """Jordan et al. 2024, one matrix at a time: momentum, Nesterov, five quintic iterations, scale, decay."""

    moments = [torch.zeros_like(p) for p in params]

    class Reference:
        @torch.no_grad()
        def step(self):
            for p, m in zip(params, moments):
                m += 0.05 * (p.grad - m)
                x = 0.05 * p.grad + 0.95 * m
                x = x / x.norm()
                for _ in range(5):
                    xxt = x @ x.T
                    x = 3.4445 * x - 4.7750 * xxt @ x + 2.0315 * xxt @ xxt @ x
                p.copy_(p * (1 - 0.02 * 0.1) - 0.02 * max(1, p.shape[0] / p.shape[1]) ** 0.5 * x)

    return Reference()


def test_muon_is_its_equation():
    """To 1e-5, for wide, tall and square matrices, several of one shape together."""
    torch.testing.assert_close(steps(ours), steps(written_out), atol=1e-5, rtol=0)


def test_muon_is_pytorchs():
    """torch.optim.Muon with the same settings makes the same steps, as far as its bf16 products allow."""
    peer = steps(lambda params: torch.optim.Muon(params, **HYPER, nesterov=True, adjust_lr_fn="original"))
    for shape, start, a, b in zip(SHAPES, map(noise, SHAPES, range(9)), steps(ours), peer):
        assert (a - b).norm() < 0.02 * (b - start).norm(), shape


@pytest.mark.parametrize("shape", [(16, 32), (16, 64), (32, 100)])
def test_the_way_by_gram_matrices_gives_the_same(shape):
    """As the way that is written in the paper, for wide matrices of even and of very uneven singular values."""
    u, _, vt = torch.linalg.svd(noise((3, *shape)), full_matrices=False)
    for least, close in ((-1, 1e-5), (-5, 5e-4)):
        x_NRC = u * torch.logspace(least, 0, shape[0]) @ vt
        x_NRC = x_NRC / x_NRC.norm(dim=(-2, -1), keepdim=True)
        exact = _iterated(x_NRC.double())
        assert (_iterated_by_gram(x_NRC) - exact).abs().max() < close
        assert torch.equal(
            orthogonalise(x_NRC, torch.float32), _iterated_by_gram(x_NRC / x_NRC.norm(dim=(-2, -1), keepdim=True))
        )


@pytest.mark.parametrize("dtype, close, turned", [(torch.float32, 1e-5, 3e-4), (torch.bfloat16, 2e-2, 0.1)])
@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (32, 32)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape, dtype, close, turned):
    """Whatever the scale, and without turning the singular vectors (by Gram matrices up to 1e-4 in fp32, which differs
    from CPU to CPU); a batch is its matrices, one by one, to the rounding of the type."""
    u, _, vt = torch.linalg.svd(noise((3, *shape)), full_matrices=False)
    sizes = torch.logspace(-2, 0, min(shape))
    for scale in (1e-4, 1e4):
        m_NRC = u * sizes @ vt * scale
        out = orthogonalise(m_NRC, dtype)
        in_fp32 = orthogonalise(m_NRC, torch.float32)
        assert out.dtype == torch.float32 and torch.equal(out, in_fp32) == (dtype == torch.float32)
        values = u.mT @ out @ vt.mT  # diagonal, if the singular vectors are the old ones
        diagonal = values.diagonal(dim1=-2, dim2=-1)
        assert diagonal.min() > 0.6 and diagonal.max() < 1.3
        assert (values - diagonal.diag_embed()).abs().max() < turned
        torch.testing.assert_close(orthogonalise(m_NRC[1:2], dtype)[0], out[1], atol=close, rtol=0)


def test_a_step_is_in_the_precision_of_the_run():
    """The matrices of Muon move a little otherwise in bf16, AdamW's not; what is kept is fp32 in both."""
    moved = []
    for precision in ("fp32", "bf16"):
        model = built(make())
        for i, p in enumerate(model.parameters()):
            p.grad = noise(p.shape, i)
        optimizers = make_optimizers(model, make(), precision)
        for optimizer in optimizers:
            optimizer.step()
        kept = [*model.parameters(), *(x for o in optimizers for state in o.state.values() for x in state.values())]
        assert {x.dtype for x in kept} == {torch.float32}
        moved.append({name: p.detach() for name, p in model.named_parameters()})
    before = dict(built(make()).named_parameters())
    for name, exact in moved[0].items():
        by_muon, found = name.startswith("blocks.") and exact.ndim == 2, moved[1][name]
        assert torch.equal(found, exact) != by_muon
        assert (found - exact).norm() < 0.05 * (exact - before[name]).norm()


def test_orthogonalising_nothing_is_nothing():
    """A zero gradient gives a zero step, not 0/0."""
    assert torch.equal(orthogonalise(torch.zeros(1, 4, 4), torch.float32), torch.zeros(1, 4, 4))


def test_parameters_without_gradient_stay():
    """A tensor that had no gradient is not moved, nor decayed."""
    a, b = torch.nn.Parameter(noise((4, 4))), torch.nn.Parameter(noise((4, 4), 1))
    optimizer, before = ours([a, b]), b.detach().clone()
    a.grad = noise((4, 4), 2)
    optimizer.step()
    assert torch.equal(b, before)
    assert not torch.equal(a, noise((4, 4)))


# The learning rate


def factors(n, **changes):
    """lr_factor at every step of a run of n steps, and at its end."""
    o = dataclasses.replace(make("optim=adamw").optim, **changes)
    return [lr_factor(o, step, step / n, o.warmup / n) for step in range(n + 1)]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
@pytest.mark.parametrize("warmup", [0, 1, 30, 99, 100, 250])
@pytest.mark.parametrize("hold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("min_lr", [0.0, 0.1, 1.0])
def test_schedules_stay_in_bounds(schedule, warmup, hold, min_lr):
    """In [0, 1], never zero at the first step; rising in warm-up, then never rising and never below min_lr."""
    f = factors(100, schedule=schedule, warmup=warmup, hold=hold, min_lr=min_lr)
    assert all(0 <= x <= 1 for x in f)
    assert f[0] > 0
    up, down = f[: warmup + 1], f[warmup:]
    assert up == sorted(up)
    assert down == sorted(down, reverse=True)
    assert all(x >= min_lr - 1e-12 for x in down)
    if schedule != "constant" and warmup < 100 and hold < 1:
        assert f[100] == pytest.approx(min_lr, abs=1e-12)
        assert max(f) == pytest.approx(1)
    if schedule == "constant":
        assert down == [1.0] * len(down)


def test_known_factors():
    """By hand: a warm-up of 3 steps rises by quarters; half-way down, cosine and linear are half-way to the floor."""
    assert factors(100, warmup=3)[:4] == [0.25, 0.5, 0.75, 1.0]
    for schedule in ("cosine", "linear"):
        assert factors(100, schedule=schedule, warmup=0, min_lr=0.2)[50] == pytest.approx(0.6)
        held = factors(100, schedule=schedule, warmup=0, min_lr=0.2, hold=0.5)
        assert held[50] == 1.0 and held[51] < 1.0 and held[75] == pytest.approx(0.6)
        assert factors(100, schedule=schedule, warmup=20, min_lr=0.0)[60] == pytest.approx(0.5)
    assert factors(100, schedule="cosine", warmup=0, min_lr=0.0)[25] == pytest.approx(0.5 + 0.5**1.5)


def test_a_run_that_overshoots_stays_at_the_floor():
    """A run bounded by minutes may pass its end by a step: progress above 1 changes nothing more."""
    o = make("optim=adamw", "optim.warmup=0").optim
    assert lr_factor(o, 100, 1.3, 0.0) == lr_factor(o, 100, 1.0, 0.0) == pytest.approx(o.min_lr)


# Batches


@pytest.mark.parametrize("model", ["mha", "post_ln", "tied"])
def test_accumulated_gradients_are_those_of_the_whole_batch(model):
    """16 sequences at once or in 4 parts of 4: equal gradients and equal loss (1e-6)."""
    c, grads, losses = make(f"model={model}"), [], []
    idx_BT = tokens(16, 17)
    for parts in (1, 4):
        model, loss = built(c), 0.0
        for part in idx_BT.chunk(parts):
            share = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / parts
            share.backward()
            loss += share.item()
        grads.append([p.grad for p in model.parameters()])
        losses.append(loss)
    torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-5)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
