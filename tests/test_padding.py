"""Prompts of different lengths as one batch, padded on the left; and a context that slides.

B batch, T query positions, S key positions, C dim, V vocabulary.
"""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, built, make, tokens

from toymha.model.attention import Attention
from toymha.model.gpt import GPT
from toymha.schema import UserError

CONFIGS = [
    *("pos=learned", "pos=sinusoidal", "pos=rope", "pos=none", "pos=rope norm_position=post"),
    *("n_kv_head=2", "n_kv_head=1", "tied_heads=true", "n_kv_head=2 kept_heads=[[0,1,3],[2,3]]"),
]
SLIDING = ["pos=rope", "pos=none", "pos=rope n_kv_head=2", "pos=none n_kv_head=1 norm_position=post"]
LENGTHS = (9, 1, 5)  # of prompts
GAPS = [0, 8, 4]
NEW = 5


@pytest.fixture(params=["fused", "explicit"])
def path(request, monkeypatch):
    """Both ways of computing attention."""
    if request.param == "explicit":
        monkeypatch.setattr(Attention, "can_fuse", lambda self, T, S: False)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


def read(model, x_BT, split, **how):
    """logits_BTV, in calls of `split` tokens."""
    cache = model.make_cache(len(x_BT), **how)
    return torch.cat([model(part_BT, cache) for part_BT in x_BT.split(split, dim=1)], dim=1)


# Left padding


@pytest.mark.parametrize("words", CONFIGS)
@torch.inference_mode()
def test_padded_prompts_are_each_prompt_alone(path, words):
    """Prefill and five more tokens, one at a time, three at a time, all at once; and with the prompt cut inside."""
    model, x = built(make(*words.split())), tokens(B=3, T=9 + NEW)
    alone = [model(x[b : b + 1, gap:]) for b, gap in enumerate(GAPS)]
    for split in ([9] + [1] * NEW, [9, 3, 2], [9 + NEW], [2, 7, 5], [1] * (9 + NEW)):
        together = read(model, x, split, padding=GAPS)
        for b, gap in enumerate(GAPS):
            close(together[b : b + 1, gap:], alone[b])


@pytest.mark.parametrize("words", CONFIGS)
@torch.inference_mode()
def test_what_pads_a_prompt_changes_nothing(path, words):
    """By no bit: other tokens, and in their places a stream of noise."""
    model, x = built(make(*words.split())), tokens(B=3, T=9 + NEW)
    pads = torch.arange(9 + NEW) < torch.tensor(GAPS)[:, None]
    split = [9, 3, 1, 1]
    before = read(model, x, split, padding=GAPS)
    after = read(model, torch.where(pads, (x + 5) % VOCAB, x), split, padding=GAPS)
    assert torch.equal(after[~pads], before[~pads])
    noise = torch.randn(3, 9, 32, generator=torch.Generator().manual_seed(2)) * 100
    model.embedded.register_forward_hook(
        lambda _m, _i, x_BTC: torch.where(pads[:, :9, None], noise, x_BTC) if x_BTC.shape[1] == 9 else x_BTC
    )
    after = read(model, x, split, padding=GAPS)
    assert torch.equal(after[~pads], before[~pads])


@pytest.mark.parametrize("words", CONFIGS[:-1])
@torch.inference_mode()
def test_padding_that_looks_back_on_nothing_gives_zeros(path, words):
    """Its queries see no key at all: each head's output and write are 0, and all logits are finite."""
    model, x, heard = built(make(*words.split())), tokens(B=3, T=9), []
    for block in model.blocks:
        block.attn.z.register_forward_hook(lambda _m, _i, z_BHTD: heard.append(z_BHTD))
        block.attn.write.register_forward_hook(lambda _m, _i, write_BHTC: heard.append(write_BHTC))
    for split in ([9], [3, 6], [1] * 9):
        heard.clear()
        assert read(model, x, split, padding=GAPS).isfinite().all()
        whole = [torch.cat(heard[i::4], dim=2) for i in range(4)]
        for out_BHTX in whole:
            for b, gap in enumerate(GAPS):
                assert (out_BHTX[b, :, :gap] == 0).all()
                assert (out_BHTX[b, :, gap:] != 0).any(-1).all()


@torch.inference_mode()
def test_selected_rows_keep_their_padding(path):
    model, x = built(make("n_kv_head=2")), tokens(B=3, T=9)
    cache = model.make_cache(3, padding=GAPS)
    model(x, cache)
    rows, new = [1, 2, 2, 1], tokens(B=4, T=NEW, seed=3)
    cache.select(torch.tensor(rows))
    logits = model(new, cache)
    for b, row in enumerate(rows):
        whole = model(torch.cat((x[row : row + 1, GAPS[row] :], new[b : b + 1]), dim=1))
        close(logits[b : b + 1], whole[:, -NEW:])


# A context that slides


def banded(model, words, x_BT):
    """logits_BTV of one full pass of the same weights in a model with room for all, whose scores lose what lies
    further back than the window. An independent way: no cache, no mask of the package but the causal one."""
    whole = GPT(make(*words.split(), f"seq_len={x_BT.shape[1]}"), VOCAB).eval()
    whole.load_state_dict(model.state_dict())
    T = x_BT.shape[1]
    back_TS = torch.arange(T)[:, None] - torch.arange(T)
    far_TS = torch.zeros(T, T).masked_fill(back_TS >= model.seq_len, float("-inf"))
    for block in whole.blocks:
        block.attn.scores.register_forward_hook(lambda _m, _i, scores_BHTS: scores_BHTS + far_TS)
    return whole(x_BT)


@pytest.mark.parametrize("words", SLIDING)
@torch.inference_mode()
def test_sliding_is_a_band(path, words):
    """Far past seq_len = 16, over three windows, in calls of 1, 3 and up to 16 tokens."""
    model, x = built(make(*words.split())), tokens(B=2, T=60)
    expected = banded(model, words, x)
    for split in ([1] * 60, [3] * 20, [16, 16, 1, 1, 10, 16], [10] + [1] * 50, [15, 3, 14, 7, 7, 14]):
        close(read(model, x, split, slide=True), expected)


@pytest.mark.parametrize("words", SLIDING)
@torch.inference_mode()
def test_a_padded_context_slides_too(path, words):
    """Each row as if it were alone: the gap before it is in sight for a while, and then out of it."""
    model, x = built(make(*words.split())), tokens(B=3, T=60)
    alone = [banded(model, words, x[b : b + 1, gap:]) for b, gap in enumerate(GAPS)]
    for split in ([9] + [1] * 51, [9] + [3] * 17, [16, 16, 16, 12], [1] * 60):
        together = read(model, x, split, padding=GAPS, slide=True)
        for b, gap in enumerate(GAPS):
            close(together[b : b + 1, gap:], alone[b])


@torch.inference_mode()
def test_a_sliding_cache_does_not_grow():
    """Two windows of 16 tokens: 2 layers x 2 x 4 heads x 8 channels x fp32, whatever has been read."""
    model = built(make("pos=rope"))
    cache, size = model.make_cache(1, slide=True), 2 * 2 * 4 * 8 * 4 * 2 * 16
    for n in range(100):
        assert cache.nbytes == size and cache.length == n
        model(tokens(B=1, T=1), cache)


@torch.inference_mode()
def test_what_cannot_slide_is_refused():
    for words in ("pos=learned", "pos=sinusoidal"):
        with pytest.raises(UserError, match=rf"^{words}: positions end at seq_len=16"):
            built(make(words)).make_cache(1, slide=True)
    model = built(make("pos=rope"))
    with pytest.raises(ValueError, match="at most as many at once, not 17"):
        model(tokens(T=17), model.make_cache(2, slide=True))
