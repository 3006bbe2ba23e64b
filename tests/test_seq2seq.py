"""Laws of the encoder-decoder: who sees what, padding, the cache, an independent implementation, the first loss.

B batch, S source and T target positions, V vocabulary.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCAB, make, tokens
from conftest import built as moved
from torch import nn

from toymha.config import Config
from toymha.device import arithmetic
from toymha.model.attention import Attention
from toymha.model.seq2seq import Seq2Seq, make_model
from toymha.schema import UserError

CONFIGS = [
    *("norm_position=pre", "norm_position=post", "norm=rms", "norm=rms norm_position=post"),
    *("pos=learned", "pos=sinusoidal", "pos=rope", "pos=none"),
    *("n_kv_head=2", "n_kv_head=1", "tied_heads=true", "v_head_dim=4", "w_o=false"),
    "n_kv_head=2 v_head_dim=4 bias=true qkv_bias=true tie_embeddings=false mlp=swiglu",
]
LENGTHS = (16, 5, 1)  # of sources


@pytest.fixture(params=["fused", "explicit"])
def path(request, monkeypatch):
    """Both ways of computing attention."""
    if request.param == "explicit":
        monkeypatch.setattr(Attention, "can_fuse", lambda self, T, S: False)


def config(words: str) -> Config:
    return make("n_encoder_layer=2", "data=reverse", *words.split())


def first_weights(words: str = "") -> Seq2Seq:
    return make_model(config(words), VOCAB).eval()


def built(words: str = "") -> Seq2Seq:
    return moved(config(words))


def sources(lengths=LENGTHS, seed=7):
    """source_BS, padded with -1 behind."""
    x = tokens(B=len(lengths), T=max(lengths), seed=seed)
    return x.masked_fill(torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None], -1)


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


# Who sees what


@pytest.mark.parametrize("words", CONFIGS)
@torch.inference_mode()
def test_a_later_target_token_changes_no_earlier_logit(path, words):
    """Not by one bit; its own logits it does change."""
    model, source, x = built(words), sources(), tokens(B=3)
    before = model(source, x)
    for t in (1, 8, 15):
        after = model(source, torch.cat((x[:, :t], (x[:, t:] + 1) % VOCAB), dim=1))
        assert torch.equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any(-1).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@torch.inference_mode()
def test_huge_scores_let_nothing_through(path, precision):
    """The same with scores of 1e5 in every attention, in both arithmetics, with and without a cache."""
    model, source, x = built("n_kv_head=2"), sources(), tokens(B=3)
    for block in [*model.encoder, *model.blocks]:
        for attn in (block.attn, *([block.cross] if hasattr(block, "cross") else [])):
            attn.w_q.weight *= 1000
            attn.w_k.weight *= 1000
    with arithmetic(precision, torch.device("cpu")):
        whole, cached = model(source, x), read(model, source, x)
        assert whole.isfinite().all()
        for t in (1, 8, 15):
            other = torch.cat((x[:, :t], (x[:, t:] + 1) % VOCAB), dim=1)
            assert torch.equal(model(source, other)[:, :t], whole[:, :t])
            assert torch.equal(read(model, source, other)[:, :t], cached[:, :t])


def read(model, source, x):
    """logits_BTV in calls of 6 and 10 tokens."""
    cache = model.make_cache(source)
    return torch.cat([model.decode(part, cache) for part in x.split([6, 10], dim=1)], dim=1)


@torch.inference_mode()
def test_rotary_scores_across_depend_on_distance_alone():
    """The same word at every place of source and target: a score is that of t - s, and these differ."""
    model, heard = built("pos=rope n_layer=1"), []
    model.blocks[0].cross.scores.register_forward_hook(lambda _m, _i, scores_BHTS: heard.append(scores_BHTS[0]))
    x = torch.full((1, 12), 3)
    for block in (*model.encoder, *model.blocks):  # so that streams are the same everywhere, too
        block.attn.w_o.weight.zero_()
    model(x, x)
    (scores_HTS,) = heard
    close(scores_HTS[:, 1:, 1:], scores_HTS[:, :-1, :-1])
    assert (scores_HTS[:, :, 1:] - scores_HTS[:, :, :-1]).abs().max() > 1e-3


def test_writes_begin_as_small_as_there_are_many():
    """GPT-2's recipe: 0.02 over the root of the number of writes, 3 a decoder block, 2 an encoder block."""
    model = make_model(config("dim=64 n_layer=4 n_head=2"), VOCAB)
    for block, writes in ((model.blocks[1], 12), (model.encoder[1], 4)):
        names = ["attn", "cross"] if block in model.blocks else ["attn"]
        for w in (*(getattr(block, name).w_o for name in names), block.mlp.down):
            assert w.weight.std().item() == pytest.approx(0.02 / math.sqrt(writes), rel=0.05)


@pytest.mark.parametrize("words", CONFIGS)
@torch.inference_mode()
def test_each_source_token_changes_the_first_logits(path, words):
    """The encoder sees the whole source, so the last token too; without cross-attention none does, by no bit."""
    model, deaf = built(words), built(f"{words} cross_attention=false")
    source, x = sources((9,)), tokens(B=1, T=1)
    for s in range(9):
        other = source.clone()
        other[0, s] = (other[0, s] + 1) % VOCAB
        assert (model(other, x) - model(source, x)).abs().max() > 1e-6
        for at in (0, 8):  # and so does what the encoder makes of each place
            keys, others = (model.encode(ids)[0][0][0][:, :, at] for ids in (source, other))
            assert (keys - others).abs().max() > 1e-6
        assert torch.equal(deaf(other, x), deaf(source, x))


@torch.inference_mode()
def test_without_cross_attention_its_weights_are_not_there():
    names = [name for name, _ in first_weights("cross_attention=false").named_parameters()]
    assert not [name for name in names if "cross" in name]
    assert [name for name in names if name.startswith("encoder.")]


# The cache


@pytest.mark.parametrize("words", [*CONFIGS, "cross_attention=false"])
@torch.inference_mode()
def test_cached_equals_uncached(path, words):
    """For one and for three sources of several lengths, and however the target is cut."""
    model = built(words)
    for lengths in (LENGTHS, (7,)):
        source, x = sources(lengths), tokens(B=len(lengths))
        expected = model(source, x)
        for split in ([1] * 16, [3] * 5 + [1], [5, 1, 10], [16]):
            cache = model.make_cache(source)
            parts = [model.decode(part_BT, cache) for part_BT in x.split(split, dim=1)]
            close(torch.cat(parts, dim=1), expected)
            assert cache.length == 16


@torch.inference_mode()
def test_the_source_is_read_once():
    """Neither the encoder nor the keys and values of cross-attention are computed again while decoding."""
    model, source, x, calls = built(), sources(), tokens(B=3), []
    for block in model.blocks:
        for w in (block.cross.w_k, block.cross.w_v):
            w.register_forward_hook(lambda *_: calls.append("cross"))
    for block in model.encoder:
        block.register_forward_hook(lambda *_: calls.append("encoder"))
    cache = model.make_cache(source)
    once = sorted(["encoder"] * 2 + ["cross"] * 4)
    assert sorted(calls) == once
    for t in range(16):
        model.decode(x[:, t : t + 1], cache)
    assert sorted(calls) == once


@torch.inference_mode()
def test_selected_rows_go_on_as_if_they_had_been_alone():
    """Dropped, repeated and in another order; source and past go together."""
    model, source, x = built("n_kv_head=2"), sources(), tokens(B=3)
    cache = model.make_cache(source)
    model.decode(x[:, :6], cache)
    rows = torch.tensor([2, 0, 0, 2])
    cache.select(rows)
    new = tokens(B=4, T=5, seed=3)
    whole = model(source[rows], torch.cat((x[rows, :6], new), dim=1))
    close(model.decode(new, cache), whole[:, 6:])


@torch.inference_mode()
def test_bytes_of_a_known_cache():
    """2 layers, 2 key heads of 8 channels, fp32, 3 rows: 10 target tokens, and 16 source tokens."""
    cache = built("n_kv_head=2").make_cache(sources(), 10)
    assert cache.nbytes == 2 * 2 * 2 * 8 * 4 * 3 * (10 + 16)


@torch.inference_mode()
def test_what_does_not_fit_is_refused():
    model = built()
    with pytest.raises(UserError, match=r"source of 17 tokens .* seq_len=16"):
        model.make_cache(tokens(T=17))
    with pytest.raises(UserError, match=r"target of 17 tokens .* seq_len=16"):
        model.make_cache(tokens(), 17)
    cache = model.make_cache(tokens(), 4)
    with pytest.raises(UserError, match=r"the context is full: 0 \+ 5 tokens, and there is room for 4"):
        model.decode(tokens(T=5), cache)


# Padding


@pytest.mark.parametrize("words", CONFIGS)
@torch.inference_mode()
def test_a_padded_batch_is_its_pairs_alone(path, words):
    model, source, x = built(words), sources(), tokens(B=3)
    together = model(source, x)
    for b, length in enumerate(LENGTHS):
        close(together[b : b + 1], model(source[b : b + 1, :length], x[b : b + 1]))


@pytest.mark.parametrize("words", CONFIGS)
@torch.inference_mode()
def test_what_stands_in_padded_places_changes_nothing(path, words):
    """By no bit, however large it is: the stream at those places is replaced by noise, in the encoder's input."""
    model, source, x = built(words), sources(), tokens(B=3)
    before, reads = model(source, x), []

    def disturb(_m, _i, x_BSC):
        reads.append(x_BSC)
        if len(reads) == 1:  # the source is read before the target
            noise = torch.randn(x_BSC.shape, generator=torch.Generator().manual_seed(2)) * 100
            return torch.where(source[..., None] < 0, noise, x_BSC)
        return x_BSC

    model.embedded.register_forward_hook(disturb)
    assert torch.equal(model(source, x), before)
    assert len(reads) == 2


# A source without any token


@pytest.mark.parametrize("words", CONFIGS)
def test_an_empty_source_gives_zeros_and_finite_gradients(words, monkeypatch):
    """A row whose keys are all masked: 0 / 0 in a softmax, unless it is dealt with. On both paths the same."""
    source, x, y = sources(), tokens(B=3), tokens(B=3, seed=5)
    source[1] = -1
    results = []
    for fuse in (True, False):
        monkeypatch.setattr(Attention, "can_fuse", lambda self, T, S, fuse=fuse: fuse)
        model, heard = built(words), []
        for block in model.blocks:
            for tap in (block.cross.z, block.cross.write):
                tap.register_forward_hook(lambda _m, _i, out, heard=heard: heard.append(out))
        logits = model(source, x)
        assert len(heard) == 4
        assert all((out[1] == 0).all() and (out[[0, 2]] != 0).any() for out in heard)
        F.cross_entropy(logits.transpose(1, 2), y).backward()
        grads = [p.grad for p in model.parameters()]
        assert logits.isfinite().all() and all(g.isfinite().all() for g in grads)
        results.append([logits.detach(), *grads])
    for fused, explicit in zip(*results, strict=True):
        close(fused, explicit)


# Somebody else's


def copied(model: Seq2Seq, pre: bool) -> nn.Transformer:
    """torch's own encoder-decoder with this model's weights. Its post-LN stacks have no norm of their own at the end,
    as in Vaswani et al. 2017."""
    C, H, F_ = 32, 4, 128
    how = {"activation": "gelu", "batch_first": True, "norm_first": pre, "dropout": 0.0}
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(C, H, F_, **how), 2, nn.LayerNorm(C) if pre else None, enable_nested_tensor=False
    )
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(C, H, F_, **how), 2, nn.LayerNorm(C) if pre else None)
    other = nn.Transformer(C, H, custom_encoder=encoder, custom_decoder=decoder, batch_first=True)

    def copy_attention(theirs, ours):
        for what in ("weight", "bias"):
            parts = [getattr(w, what) for w in (ours.w_q, ours.w_k, ours.w_v)]
            getattr(theirs, f"in_proj_{what}").copy_(torch.cat(parts))
        theirs.out_proj.load_state_dict(ours.w_o.state_dict())

    with torch.no_grad():
        for stack, blocks in ((encoder, model.encoder), (decoder, model.blocks)):
            for theirs, ours in zip(stack.layers, blocks, strict=True):
                crosses = stack is decoder
                copy_attention(theirs.self_attn, ours.attn)
                norms = [ours.norm_attn, *([ours.norm_cross] if crosses else []), ours.norm_mlp]
                if crosses:
                    copy_attention(theirs.multihead_attn, ours.cross)
                for i, norm in enumerate(norms):
                    getattr(theirs, f"norm{i + 1}").load_state_dict(norm.state_dict())
                theirs.linear1.load_state_dict(ours.mlp.up.state_dict())
                theirs.linear2.load_state_dict(ours.mlp.down.state_dict())
        if pre:
            encoder.norm.load_state_dict(model.norm_encoder.state_dict())
            decoder.norm.load_state_dict(model.norm.state_dict())
    return other.eval()


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_logits_are_those_of_an_independent_implementation(path, norm_position):
    """torch.nn.Transformer, with all biases, padded sources and a causal mask; positions are added outside of it."""
    model = built(f"norm_position={norm_position} bias=true qkv_bias=true mlp=gelu pos=none")
    other, source, x = copied(model, norm_position == "pre"), sources(), tokens(B=3)
    embed, hidden_BS = model.embed, source < 0
    with torch.no_grad():
        out = other(
            embed(source.clamp(min=0)),
            embed(x),
            tgt_mask=torch.ones(16, 16, dtype=torch.bool).triu(1),
            src_key_padding_mask=hidden_BS,
            memory_key_padding_mask=hidden_BS,
        )
        close(model(source, x), out @ embed.weight.T)


# Learning


@pytest.mark.parametrize("words", [*CONFIGS, "cross_attention=false", "n_layer=4"])
@torch.inference_mode()
def test_the_first_loss_is_that_of_knowing_nothing(words):
    """Law 6: ln V, to 0.1, with every kind of block."""
    logits = first_weights(words)(sources(), tokens(B=3))
    loss = F.cross_entropy(logits.transpose(1, 2), tokens(B=3, seed=5))
    assert abs(loss.item() - math.log(VOCAB)) < 0.1


@pytest.mark.parametrize("words", ["norm_position=pre", "norm_position=post", "n_kv_head=1 norm=rms"])
def test_one_batch_can_be_memorised(words):
    """All targets begin alike, so that the first token can be known by the source alone."""
    model, source, y = first_weights(words).train(), sources((6, 5, 4, 6)), tokens(B=4, T=6, seed=5)
    y[:, 0] = torch.tensor([3, 4, 5, 6])
    x = torch.cat((torch.ones(4, 1, dtype=torch.int64), y[:, :-1]), dim=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = F.cross_entropy(model(source, x).transpose(1, 2), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
