"""Law 2: decoding with a cache is the full forward pass; and what stands on it, sampling and the decoding benchmark.

B batch, T new positions, S positions read so far, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import ENCODERS, MODELS, PRUNED, VOCAB, built, make, tokens

from toymha import cost
from toymha.device import arithmetic
from toymha.generation.generate import sample
from toymha.generation.sampling import choose
from toymha.model.attention import Attention
from toymha.model.gpt import GPT
from toymha.schema import UserError
from toymha.seeds import stream
from toymha.timing import machine, speed

CPU = torch.device("cpu")
SPLITS = [[16], [1] * 16, [5, 1, 10], [3, 3, 10], [15, 1]]
CONFIGS = [
    *(f"model={model}" for model in MODELS),
    *("pos=sinusoidal", "pos=none", "n_kv_head=2 v_head_dim=4 qkv_bias=true", "tied_heads=true v_head_dim=4"),
    *PRUNED,
]


@pytest.fixture(params=["fused", "explicit"])
def path(request, monkeypatch):
    """Both ways of computing attention."""
    if request.param == "explicit":
        monkeypatch.setattr(Attention, "can_fuse", lambda self, T, S: False)


def in_parts(model, idx_BT, split, cache=None):
    """logits_BTV of the whole, read with a cache in calls of `split` tokens."""
    cache = cache or model.make_cache(len(idx_BT))
    return torch.cat([model(part_BT, cache) for part_BT in idx_BT.split(split, dim=1)], dim=1)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


# Cached equals uncached


@pytest.mark.parametrize("words", CONFIGS)
@torch.inference_mode()
def test_cached_equals_uncached(path, words):
    """To 1e-5, for every model and position encoding, on both paths, however the text is cut."""
    model = built(make(*words.split()))
    for B in (1, 3):
        x = tokens(B=B)
        expected = model(x)
        for split in SPLITS:
            close(in_parts(model, x, split), expected)


@pytest.mark.parametrize("model", [*MODELS, *ENCODERS])
@pytest.mark.parametrize("B", [1, 3])
@pytest.mark.parametrize("new", [1, 3])
@torch.inference_mode()
def test_every_model_decodes_as_it_reads(model, B, new):
    """Prompts that end at, before and behind the window's end, and calls of one and of three tokens after them.

    Up to the end of the context the logits are those of the whole text read at once; beyond it models whose positions
    go on slide, each token seeing the last seq_len tokens, and the others say that the context is full.
    """
    c = make(f"model={model}")
    short, source = built(c), tokens(B=B, T=7, seed=2)
    long = built(dataclasses.replace(c, seq_len=48)) if c.pos in ("rope", "none") else None
    x = tokens(B=B, T=24)
    for prompt in (1, 12, 13, 15, 16, 17, 20):
        slide = prompt + new > 16
        if model in ENCODERS:
            read, cache = short.decode, short.make_cache(source)
        else:
            read, cache = short, short.make_cache(B, slide=slide and long is not None)
        parts = [prompt] if prompt <= 16 else [16, prompt - 16]
        calls = [*parts, *[new] * ((24 - prompt) // new if slide else (16 - prompt) // new)]
        if slide and long is None:
            with pytest.raises(UserError, match="the context is full"):
                for part_BT in x.split([*calls, 24 - sum(calls)], dim=1):
                    read(part_BT, cache)
            continue
        seen = sum(calls)
        logits = torch.cat([read(part_BT, cache) for part_BT in x[:, :seen].split(calls, dim=1)], dim=1)
        close(logits, banded(long, x[:, :seen], 16) if slide else short(*([source] * (model in ENCODERS)), x[:, :seen]))


def banded(model, idx_BT, window):
    """logits_BTV of a whole text of which each token sees the last `window` tokens."""
    T = idx_BT.shape[1]
    outside_TT = torch.ones(T, T).tril(-window).bool()
    attentions = [block.attn for block in model.blocks]
    handles = [
        a.scores.register_forward_hook(lambda _m, _i, s: s.masked_fill(outside_TT, -math.inf)) for a in attentions
    ]
    try:
        return model(idx_BT)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@torch.inference_mode()
def test_a_later_token_changes_no_earlier_logit_after_a_past(path, precision):
    """Law 1 for several new tokens at once: not by one bit, with scores of 1e5 too."""
    model, x = built(make("n_kv_head=2")), tokens()
    for block in model.blocks:
        block.attn.w_q.weight *= 1000
        block.attn.w_k.weight *= 1000
    with arithmetic(precision, CPU):
        before = in_parts(model, x, [6, 10])
        for t in (7, 11, 15):
            after = in_parts(model, torch.cat((x[:, :t], (x[:, t:] + 1) % VOCAB), dim=1), [6, 10])
            assert torch.equal(after[:, :t], before[:, :t])
            assert not torch.equal(after[:, t], before[:, t])


@pytest.mark.parametrize("words", ["n_kv_head=2", "pos=none"])
@torch.inference_mode()
def test_cached_equals_uncached_in_bf16(path, words):
    """As far as bf16 goes; the cache then holds bf16."""
    model, x = built(make(*words.split())), tokens()
    with arithmetic("bf16", CPU):
        expected, cache = model(x), model.make_cache(2)
        close(in_parts(model, x, [5, 1, 10], cache), expected, 0.03)
    assert cache.layers[0].k_BGSD.dtype == torch.bfloat16


@torch.inference_mode()
def test_patterns_are_tapped_with_a_cache():
    """T rows over all S keys: the last rows of the whole pattern."""
    model, x, seen = built(make()), tokens(), []
    model.blocks[1].attn.pattern.register_forward_hook(lambda _m, _i, pattern: seen.append(pattern))
    model(x)
    in_parts(model, x, [10, 6])
    whole, _, last = seen
    close(last, whole[:, :, 10:])


@torch.inference_mode()
def test_a_shortened_cache_goes_on_from_there():
    """What was read after the cut leaves no trace."""
    model, x = built(make()), tokens()
    cache = model.make_cache(2)
    model(x.flip(1), cache)
    cache.truncate(0)
    model(x[:, :12], cache)
    cache.truncate(5)
    assert cache.length == 5
    close(model(x[:, 5:], cache), model(x)[:, 5:])
    with pytest.raises(ValueError, match="holds 16 tokens"):
        cache.truncate(17)


# Sizes and refusals


@pytest.mark.parametrize("words", CONFIGS)
def test_bytes_are_those_of_the_formula(words):
    """Law 5: stored are the key heads, not the query heads, and one where heads are tied."""
    c = make(*words.split())
    model = GPT(c, VOCAB)
    assert model.make_cache(3).nbytes == cost.kv_bytes(c, c.seq_len, 3)
    with arithmetic("bf16", CPU):
        assert model.make_cache(1, 5).nbytes == cost.kv_bytes(c, 5, 1, bytes_per_number=2)


def test_bytes_of_a_known_cache():
    """4 layers, 2 of 8 heads of 16 channels, 128 tokens, 3 sequences, fp32: 2 x 4 x 2 x 16 x 128 x 3 x 4 bytes."""
    model = GPT(make("n_layer=4", "dim=128", "n_head=8", "n_kv_head=2", "seq_len=128"), VOCAB)
    assert model.make_cache(3).nbytes == 393_216


@torch.inference_mode()
def test_a_full_context_is_refused():
    """Before anything is read: the cache stays as it was."""
    model, x = built(make()), tokens()
    cache = model.make_cache(2)
    model(x[:, :14], cache)
    with pytest.raises(UserError, match=r"the context is full: 14 \+ 3 tokens, and there is room for 16"):
        model(x[:, :3], cache)
    close(model(x[:, 14:], cache), model(x)[:, 14:])
    with pytest.raises(UserError, match="seq_len=16"):
        model.make_cache(2, 17)


def test_a_model_that_sees_the_future_has_no_cache():
    with pytest.raises(UserError, match=r"^causal=false: .* nothing can be cached$"):
        GPT(make("causal=false"), VOCAB).make_cache(1)


def test_calls_that_make_no_sense_are_refused():
    """Another batch size, which would be spread over all sequences; gradients, which would be wrong."""
    model = built(make())
    with torch.inference_mode(), pytest.raises(ValueError, match="holds 3 sequences, and 1 came"):
        model(tokens(B=1), model.make_cache(3))
    with pytest.raises(ValueError, match="no gradients"):
        model(tokens(), model.make_cache(2))


# Sampling


def recomputed(model, prompt, length, seed):
    """What `sample` says it does, without a cache."""
    ids, generator = list(prompt), stream(seed, "sample")
    for _ in range(length):
        ids.append(choose(model(torch.tensor([ids[-model.seq_len :]]))[0, -1] / 0.8, generator))
    return ids[len(prompt) :]


@pytest.mark.parametrize("words", [*CONFIGS, "causal=false"])
@pytest.mark.parametrize("prompt_len", [1, 10, 16, 20])
@torch.inference_mode()
def test_samples_are_those_of_recomputing(words, prompt_len):
    """The same tokens for the same seed, across the end of the context too."""
    model, prompt = built(make(*words.split())), tokens(B=1, T=prompt_len)[0].tolist()
    V = model.embed.num_embeddings
    assert sample(model, prompt, 30, V, seed=1) == recomputed(model, prompt, 30, seed=1)


def test_sampling_reads_each_token_once():
    """While the context is not full; then the last seq_len tokens for each."""
    model, read = built(make()), []
    model.embed.register_forward_hook(lambda _m, idx, _o: read.append(idx[0].shape[1]))
    sample(model, [1, 2, 3], 20, VOCAB, seed=0)
    assert read == [3] + [1] * 13 + [16] * 6


# The benchmark


def test_decoding_speed_is_tokens_over_time(monkeypatch):
    """By a clock that only the model moves. Prompt and first pass do not count; two of the other five are slow."""
    model, now, calls = built(make()), [0.0], itertools.count()

    def work(_m, idx, _o):
        call = next(calls)  # 0 reads the prompt, 1 to 6 are the first pass, 7 to 18 the next two
        assert idx[0].shape == (3, 10 if call == 0 else 1)
        now[0] += 0.1 if call <= 18 else 0.005

    model.embed.register_forward_hook(work)
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    assert speed.decode_tokens_per_s(model, 3, 10, 6, CPU) == pytest.approx(3 / 0.005)
    assert next(calls) == 1 + 6 * (1 + speed.REPEATS)
    with pytest.raises(UserError, match="seq_len=16"):
        speed.decode_tokens_per_s(model, 3, 10, 7, CPU)
