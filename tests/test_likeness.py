"""Laws of the likeness of heads: known distances, independent computations, and heads that are one.

B sequences, T positions, N heads of a model, P positions of all sequences, D width of a head's output.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

from tests.conftest import built, make, tokens
from toymha.analysis import likeness as module
from toymha.analysis.capture import heads_of
from toymha.analysis.likeness import cka, effective_number, jensen_shannon, likeness
from toymha.analysis.results import Head
from toymha.schema import UserError


def patterns(*heads) -> torch.Tensor:
    """pattern_NBTS of heads given as lists of rows, one sequence."""
    return torch.tensor(heads, dtype=torch.float32)[:, None]


def random_patterns(N=4, B=2, T=5, sharp=3.0) -> torch.Tensor:
    return (torch.randn(N, B, T, T, generator=torch.Generator().manual_seed(0)) * sharp).softmax(-1)


# Jensen-Shannon


def test_known_distances():
    one, other, both = [[1, 0], [1, 0]], [[0, 1], [0, 1]], [[0.5, 0.5], [1, 0]]
    distance_NN, divergence_NN = jensen_shannon(patterns(one, other, both))
    bits = -(0.75 * math.log2(0.75) + 0.25 * math.log2(0.25)) - 0.5  # of (1, 0) and (1/2, 1/2)
    assert divergence_NN.tolist() == [
        pytest.approx(row, abs=1e-6)
        for row in ([0, 1, bits / 2], [1, 0, (bits + 1) / 2], [bits / 2, (bits + 1) / 2, 0])
    ]
    root = math.sqrt(bits)  # the mean of the roots, not the root of the mean
    assert distance_NN.tolist() == [
        pytest.approx(row, abs=1e-6)
        for row in ([0, 1, root / 2], [1, 0, (root + 1) / 2], [root / 2, (root + 1) / 2, 0])
    ]


def test_distances_are_those_of_scipy():
    p = random_patterns()
    distance_NN, divergence_NN = jensen_shannon(p)
    for i in range(4):
        for j in range(4):
            rows = jensenshannon(p[i].double().numpy(), p[j].double().numpy(), base=2, axis=-1)
            rows = np.nan_to_num(rows)  # scipy's own rounding below 0 where i == j
            assert distance_NN[i, j].item() == pytest.approx(rows.mean(), abs=2e-4)
            assert divergence_NN[i, j].item() == pytest.approx((rows**2).mean(), abs=1e-5)


# CKA


def test_cka_by_gram_matrices():
    """From centred P x P Gram matrices (Kornblith et al. 2019, section 3): another way to the same number."""
    z_PND = torch.randn(30, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    z_PND[:, 1] += 0.7 * z_PND[:, 0]
    centre_PP = torch.eye(30, dtype=torch.float64) - 1 / 30
    grams = [centre_PP @ z_PND[:, n] @ z_PND[:, n].T @ centre_PP for n in range(3)]
    hsic = [[float((a * b).sum()) for b in grams] for a in grams]
    expected = [[hsic[i][j] / math.sqrt(hsic[i][i] * hsic[j][j]) for j in range(3)] for i in range(3)]
    assert cka(z_PND).tolist() == [pytest.approx(row) for row in expected]


def test_cka_knows_no_rotation_scale_or_shift():
    x_PD = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rotation_DD = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))[0]
    constant_PD = torch.full((50, 4), 0.1, dtype=torch.float64)
    out_NN = cka(torch.stack([x_PD, x_PD @ rotation_DD * 7 + 3, constant_PD, constant_PD * 3], 1))
    assert out_NN[:2, :2].flatten().tolist() == pytest.approx([1] * 4)
    assert out_NN[2].tolist() == [0, 0, 1, 0]  # what never varies is like no other


# The number of different heads


def test_known_effective_numbers():
    assert effective_number(torch.zeros(5, 5)) == pytest.approx(1)
    assert effective_number(1 - torch.eye(5)) == pytest.approx(5)
    pairs = torch.block_diag(torch.ones(2, 2), torch.ones(2, 2))
    assert effective_number(1 - pairs) == pytest.approx(2)
    half = torch.tensor([[0, 0.5], [0.5, 0]])  # eigenvalues 3/4 and 1/4
    assert effective_number(half) == pytest.approx(math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))))
    assert effective_number(torch.zeros(0, 0)) == 0
    assert effective_number(torch.zeros(1, 1)) == 1


def test_the_kernel_is_positive():
    """So that nothing but rounding is cut off."""
    for sharp in (0.5, 3, 20):
        _, divergence_NN = jensen_shannon(random_patterns(12, 1, 3, sharp))
        assert torch.linalg.eigvalsh(1 - divergence_NN).min() > -1e-6


# Of models


def test_of_every_model(model_config):
    model, x_BT = built(model_config), tokens(B=3, T=12)
    found = likeness(model, x_BT)
    N, n_layer = len(heads_of(model)), model_config.n_layer
    assert found.heads == heads_of(model) and found.pattern.shape == found.z.shape == (N, N)
    for matrix_NN in (found.pattern, found.z):
        assert torch.allclose(matrix_NN, matrix_NN.T) and (matrix_NN.diagonal() == 1).all()
        assert matrix_NN.min() >= 0 and matrix_NN.max() <= 1
    assert len(found.effective) == n_layer
    assert all(1 - 1e-9 <= e <= model_config.n_head + 1e-9 for e in found.effective)
    grouped = [head for cluster in found.clusters for head in cluster]
    assert len(grouped) == len(set(grouped)) and all(len({h.layer for h in c}) == 1 < len(c) for c in found.clusters)


def test_heads_of_different_layers_by_an_independent_computation():
    model, x_BT = built(make("n_layer=2", "qkv_bias=true")), tokens(B=2, T=9)
    heard: dict[str, list] = {"pattern": [], "z": []}
    for block in model.blocks:
        for tap, out in heard.items():
            getattr(block.attn, tap).register_forward_hook(lambda _m, _i, x, out=out: out.append(x))
    with torch.no_grad():
        model(x_BT)
    pattern_NBTS, z_NBTD = torch.cat(heard["pattern"], 1).transpose(0, 1), torch.cat(heard["z"], 1).transpose(0, 1)
    model = built(make("n_layer=2", "qkv_bias=true"))
    found = likeness(model, x_BT)
    for i, j in ((0, 1), (2, 5), (7, 3)):
        p, q = (pattern_NBTS[n, :, 1:].double().numpy() for n in (i, j))  # but the first row
        assert found.pattern[i, j].item() == pytest.approx(1 - jensenshannon(p, q, base=2, axis=-1).mean(), abs=2e-4)
        x, y = (z_NBTD[n].flatten(0, 1).double() for n in (i, j))
        x, y = x - x.mean(0), y - y.mean(0)
        expected = (x.T @ y).norm() ** 2 / (x.T @ x).norm() / (y.T @ y).norm()
        assert found.z[i, j].item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("words", [(), ("pos=none",), ("n_head=8",), ("norm_position=post", "score_scale=none")])
def test_tied_heads_are_one(words):
    model = built(make("model=tied", *words))
    found = likeness(model, tokens(B=3, T=16))
    assert found.effective == pytest.approx([1, 1], abs=1e-9)
    H = len(model.blocks[0].attn.heads)
    assert found.clusters == [[Head(layer, h) for h in range(H)] for layer in (0, 1)]
    for layer in (0, 1):
        own = slice(layer * H, layer * H + H)
        assert found.pattern[own, own].min() == 1 and found.z[own, own].min() == pytest.approx(1)


def rows(T: int, offset: int, even: float = 0.0) -> torch.Tensor:
    """A pattern_TS that looks `offset` back, as far as there is something, with a share of its weight spread evenly."""
    t = torch.arange(T)
    return (1 - even) * torch.eye(T)[(t - offset).clamp(min=0)] + even * torch.ones(T, T).tril() / (t + 1)[:, None]


def planted(model, *pattern_TS) -> None:
    """Head h of each layer looks as pattern_TS[h] says."""
    for block in model.blocks:
        block.attn.pattern.register_forward_hook(
            lambda _m, _i, p_BHTS: torch.stack(pattern_TS).expand_as(p_BHTS).contiguous()
        )


def test_heads_that_share_no_key_are_all_different():
    model = built(make("n_layer=1", "causal=false"))
    planted(model, *(torch.eye(16).roll(k, 1) for k in range(4)))
    found = likeness(model, tokens())
    assert found.effective == pytest.approx([4]) and found.clusters == []
    assert found.pattern.tolist() == [pytest.approx(row, abs=1e-6) for row in torch.eye(4).tolist()]


def test_clusters_of_nearly_equal_heads():
    model = built(make("n_layer=1"))
    planted(model, rows(16, 1), rows(16, 5), rows(16, 1, even=0.05), rows(16, 5, even=0.05))
    found = likeness(model, tokens())
    assert found.clusters == [[Head(0, 0), Head(0, 2)], [Head(0, 1), Head(0, 3)]]
    assert found.pattern[0, 2] > 1 - module.CLOSE > found.pattern[0, 1]
    assert 1.9 < found.effective[0] < 2.3


def test_a_chain_is_no_cluster():
    """0 and 2 are each near 1 and not near each other: by average linkage 2 is (0.28 + 0.15) / 2 from the others."""
    distance_NN = torch.tensor([[0, 0.14, 0.28], [0.14, 0, 0.15], [0.28, 0.15, 0]], dtype=torch.float64)
    assert module._groups([0, 1, 2], distance_NN) == [[0, 1]]
    assert module._groups([0, 1, 2], distance_NN * 0.9) == [[0, 1, 2]]
    assert module._groups([1, 2], distance_NN) == [[1, 2]]


def test_the_first_row_does_not_count():
    """A causal head has no choice there; here two heads differ there and nowhere else."""
    model = built(make("n_layer=1", "n_head=2"))
    odd_TS = rows(16, 1)
    odd_TS[0] = torch.eye(16)[9]
    planted(model, rows(16, 1), odd_TS)
    assert likeness(model, tokens()).pattern.min() == 1


def test_the_result_does_not_depend_on_batches(monkeypatch):
    model, x_BT, seen = built(make("n_layer=2")), tokens(B=7), []
    for at_once in (16, 48, 1024):  # one sequence, three, all
        monkeypatch.setattr(module, "AT_ONCE", at_once)
        seen.append(likeness(model, x_BT))
    for other in seen[1:]:
        assert torch.allclose(other.pattern, seen[0].pattern, atol=1e-5)
        assert torch.allclose(other.z, seen[0].z, atol=1e-5)
        assert other.effective == pytest.approx(seen[0].effective, abs=1e-5)


def test_long_sequences_are_cut(monkeypatch):
    model, x_BT = built(make("n_layer=1")), tokens()
    monkeypatch.setattr(module, "LONGEST", 10)
    assert torch.equal(likeness(model, x_BT).pattern, likeness(model, x_BT[:, :10]).pattern)


def test_one_token_is_too_few():
    with pytest.raises(UserError, match="seq_len=1"):
        likeness(built(make("n_layer=1")), tokens(T=1))


def test_a_pruned_model():
    c = replace(make("n_layer=3"), kept_heads=[[0, 3], [], [2]])
    found = likeness(built(c), tokens())
    assert found.heads == [Head(0, 0), Head(0, 3), Head(2, 2)]
    assert 1 <= found.effective[0] <= 2 and found.effective[1:] == [0, pytest.approx(1)]
    c = replace(c, kept_heads=[[], [], []])
    found = likeness(built(c), tokens())
    assert (found.heads, found.clusters, found.effective) == ([], [], [0, 0, 0])
    assert found.pattern.shape == found.z.shape == (0, 0)


def test_it_leaves_no_trace():
    model = built(make("n_layer=1", "attn_dropout=0.5")).train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    first, second = likeness(model, tokens()), likeness(model, tokens())
    assert torch.equal(first.pattern, second.pattern) and torch.equal(first.z, second.z)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())
