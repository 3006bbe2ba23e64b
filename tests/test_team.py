"""Laws of threads that share a batch: the same gradients, the same bits each time, the same order.

B batch, T positions, C dim.
"""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import built, make, tokens

from toymha.batches import UNCOUNTED, Batch
from toymha.data.corpus import Split
from toymha.device import arithmetic
from toymha.evaluate import evaluate
from toymha.model.parts import drawing, dropout, fill_mask
from toymha.optim import make_optimizers
from toymha.team import Team, members
from toymha.train import backward, move

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def four_threads():
    """That a team may divide."""
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def gradients(c, batch, n, parts=1, precision="fp32", seed=0):
    """The loss, and the gradient of each parameter."""
    model = built(c).train()
    with Team(n) as team:
        loss = backward(model, batch, parts, CPU, precision, seed, team).item()
    return loss, {name: p.grad for name, p in model.named_parameters()}


def text(B=6, T=16):
    idx_BT = tokens(B, T + 1)
    return Batch((idx_BT[:, :-1],), idx_BT[:, 1:], B * T)


def pairs(B=6, S=7, T=5):
    """Targets of different lengths."""
    idx_BT, y_BT = tokens(B, T), tokens(B, T, 1)
    for b in range(B):
        y_BT[b, T - b // 2 :] = UNCOUNTED
    return Batch((tokens(B, S, 2), idx_BT), y_BT, int((y_BT != UNCOUNTED).sum()))


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize(
    "words, batch",
    [((), text()), (("n_kv_head=2", "pos=rope"), text()), (("model=encdec",), pairs()), (("model=no_cross",), pairs())],
)
def test_a_team_finds_the_gradients_of_one(words, batch, n, parts):
    """Also where 6 rows go to 4, and where tokens are not spread evenly; what nobody hears has no gradient."""
    c = make(*words)
    loss, whole = gradients(c, batch, 1)
    shared, found = gradients(c, batch, n, parts)
    assert shared == pytest.approx(loss, rel=1e-6)
    assert (None in whole.values()) == ("model=no_cross" in words)
    for name, g in whole.items():
        assert (found[name] is None) == (g is None)
        if g is not None:
            assert torch.allclose(found[name], g, rtol=1e-4, atol=1e-6 * float(g.abs().max() + 1)), name


def test_a_team_finds_the_gradients_of_one_in_bf16():
    """Autocast reaches the members."""
    (loss, whole), (shared, found) = (gradients(make(), text(), n, precision="bf16") for n in (1, 2))
    assert shared == pytest.approx(loss, rel=2e-3) and shared != gradients(make(), text(), 2)[0]
    for name, g in whole.items():
        assert (found[name] - g).norm() < 0.05 * g.norm(), name


DROPPING = [
    (("resid_dropout=0.3",), text()),
    (("attn_dropout=0.3",), text()),
    (("model=encdec", "resid_dropout=0.3"), pairs()),
]


@pytest.mark.parametrize("n, parts", [(1, 1), (2, 1), (3, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("words, batch", DROPPING)
def test_dropout_is_the_same_whoever_computes(words, batch, n, parts):
    """Up to rounding, for any number of members and micro-batches; to the bit each time; another seed is another
    draw, and so is another row of the same tokens."""
    c = make(*words)
    loss, whole = gradients(c, batch, 1)
    shared, first = gradients(c, batch, n, parts)
    assert shared == pytest.approx(loss, rel=1e-6)
    for name, g in whole.items():
        assert torch.allclose(first[name], g, rtol=1e-4, atol=1e-6 * float(g.abs().max() + 1)), name
    for _ in range(3):
        again, found = gradients(c, batch, n, parts)
        assert again == shared and all(torch.equal(found[name], g) for name, g in first.items())
    assert gradients(c, batch, n, parts, seed=1)[0] != pytest.approx(shared, rel=1e-4)


def test_where_nothing_is_dropped_nothing_is_seeded():
    """A generator a row costs more than a small step; evaluation draws none either."""

    def seeds():
        raise AssertionError("asked for a seed")
        yield

    x = torch.ones(4, 50)
    with drawing(seeds(), CPU):
        assert dropout(x, 0.0, True) is x and torch.equal(dropout(x, 0.5, False), x)
        with pytest.raises(AssertionError):
            dropout(x, 0.5, True)


def test_rows_of_the_same_tokens_drop_different_numbers():
    x = torch.ones(4, 50)
    with drawing([7, 8, 7, 9], CPU):
        a, b, again, _ = dropout(x, 0.5, True)
        more = dropout(x, 0.5, True)[0]
    assert torch.equal(a, again) and not torch.equal(a, b) and not torch.equal(a, more)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("optim", ["muon", "adamw"])
def test_a_team_moves_as_one(optim, n):
    """Each parameter once, by the same step, the second step too; the same bits each time."""
    c, moved = make(f"optim={optim}", "n_layer=2"), []
    for size in (1, n, n):
        model = built(c)
        optimizers = make_optimizers(model, c, "fp32")
        with Team(size) as team:
            for step in range(2):
                for i, p in enumerate(model.parameters()):
                    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
                move(optimizers, team)
        moved.append([p.detach() for p in model.parameters()])
    alone, shared, again = moved
    before = list(built(c).parameters())
    for a, b, c_, start in zip(alone, shared, again, before, strict=True):
        assert torch.allclose(a, b, atol=1e-5) and torch.equal(b, c_) and not torch.equal(a, start)


@pytest.mark.parametrize("max_tokens", [None, 100])
def test_a_team_finds_the_score_of_one(max_tokens):
    split = Split(tokens(1, 500)[0].to(torch.uint8), 499, 499)
    model = built(make())
    alone = evaluate(model, split, 16, max_tokens=max_tokens, batch_tokens=32)
    with Team(3) as team:
        shared = evaluate(model, split, 16, max_tokens=max_tokens, batch_tokens=32, team=team)
    assert shared.tokens == alone.tokens
    assert (shared.loss, shared.se) == pytest.approx((alone.loss, alone.se), rel=1e-6)


@pytest.mark.parametrize("n", [1, 3])
def test_results_come_in_order_and_only_what_is_needed_is_taken(n):
    """A member that is slow holds up its own result and those behind it, not their order."""
    taken, last = [], threading.Event()

    def items():
        for i in range(20):
            taken.append(i)
            yield i

    def work(i):
        if i == 0 and n > 1:
            last.wait(5)  # until its neighbour is done
        elif i == 1:
            last.set()
        return i * i

    with Team(n) as team:
        results = team.map(work, items())
        assert next(results) == 0 and len(taken) <= n + 1
        assert list(results) == [i * i for i in range(1, 20)]


@pytest.mark.parametrize("n", [1, 3])
def test_what_a_member_raises_is_raised_here(n):
    done = []

    def work(i):
        if i == 2:
            raise ZeroDivisionError
        done.append(i)
        return i

    with Team(n) as team:
        with pytest.raises(ZeroDivisionError):
            list(team.map(work, range(1000)))
        assert len(done) < 10
        assert list(team.map(str, range(3))) == ["0", "1", "2"]  # it goes on


def test_members_compute_as_the_caller_does():
    """With or without gradients, in inference mode, in autocast; and each on its share of the threads."""
    with Team(2) as team:

        def modes(_):
            x = torch.ones(1, requires_grad=True) * 2
            product = torch.ones(2, 2) @ torch.ones(2, 2)
            return x.requires_grad, torch.is_inference_mode_enabled(), product.dtype, torch.get_num_threads()

        def all_modes():
            return set(team.map(modes, range(8)))

        assert all_modes() == {(True, False, torch.float32, 2)}
        with torch.no_grad():
            assert all_modes() == {(False, False, torch.float32, 2)}
        with torch.inference_mode(), arithmetic("bf16", CPU):
            assert all_modes() == {(False, True, torch.bfloat16, 2)}
        assert all_modes() == {(True, False, torch.float32, 2)}
        with team.resting():
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 4


def test_who_shares_a_batch():
    """On a CPU as many as there are threads, where the model is small and there are rows for all."""
    assert members(CPU, 1_000_000, 12) == 4
    assert members(CPU, 1_000_000, 3) == 1
    assert members(CPU, 1_000_000) == 4
    assert members(CPU, 100_000_000, 12) == 1
    assert members(torch.device("cuda"), 1_000_000, 12) == 1
    for threads, n in ((1, 1), (8, 8), (9, 4), (16, 8), (31, 7)):  # each with as many, and at most 8 of them
        torch.set_num_threads(threads)
        assert members(CPU, 1_000_000, 64) == n


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_scales_what_it_keeps(dtype):
    """Each number is 0, or x / (1 - p) rounded once; as many are 0 as p says; the gradient is the same mask."""
    x = torch.full((200, 500), 7.0, dtype=dtype, requires_grad=True)
    with drawing(range(200), CPU):
        y = dropout(x, 0.1, True)
        assert torch.equal(dropout(x, 0.1, False), x)
    kept = torch.tensor(7 / 0.9).to(dtype)  # in bf16 7 x bf16(1 / 0.9) would be another number
    assert y.unique().tolist() == [0.0, pytest.approx(kept.item(), rel=1e-6)]
    assert (y == 0).double().mean().item() == pytest.approx(0.1, abs=0.005)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0) and x.grad.max().item() == pytest.approx(1 / 0.9, rel=1e-2)


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.25, 0.9, 1 - 1e-12])
def test_as_many_are_kept_as_p_says(p):
    """Of an odd number of them too; within five standard errors; and a neighbour says nothing of a number."""
    mask = torch.full((1001, 999), 7.0)
    fill_mask(mask, p, torch.Generator().manual_seed(0))
    share, n = (mask == 0).double(), mask.numel()
    assert ((mask == 0) | (mask == 1)).all()
    assert abs(share.mean().item() - p) <= 5 * (p * (1 - p) / n) ** 0.5 + 2**-32
    both = (share[:, 1:] * share[:, :-1]).mean().item()
    assert abs(both - p * p) <= 5 * (p * p / n) ** 0.5 + 2**-32
