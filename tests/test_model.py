"""Laws of the model: causality, equal paths, sharing, heads that add up, peers, parameter counts, a sound start.

Axes as in toymha/model: B batch, T and S positions, C dim, H heads, D head_dim, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import pickle
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from conftest import MODELS, VOCAB, built, composer, make, tokens
from torch import nn

from toymha import cost
from toymha.config import Config
from toymha.device import arithmetic, pick_device
from toymha.model.attention import Attention
from toymha.model.gpt import GPT, Transformer
from toymha.model.parts import Place, gelu, rotary_tables, rotate, sinusoid_table
from toymha.optim import make_optimizers
from toymha.schema import UserError

CPU = torch.device("cpu")


@pytest.fixture(params=["fused", "explicit"])
def path(request, monkeypatch):
    """Both ways of computing attention."""
    if request.param == "explicit":
        monkeypatch.setattr(Attention, "can_fuse", lambda self, T, S: False)
    return request.param


@contextlib.contextmanager
def hooked(model, tap, see):
    """`see(layer, tensor)` at one tap of every layer; what it returns, if anything, takes the tensor's place."""
    handles = [
        getattr(block.attn, tap).register_forward_hook(lambda _m, _i, x, layer=layer: see(layer, x))
        for layer, block in enumerate(model.blocks)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def tapped(model, tap, idx_BT):
    """What passes a tap, by layer."""
    seen = {}
    with hooked(model, tap, lambda layer, x: seen.update({layer: x})):
        model(idx_BT)
    return [seen[i] for i in range(len(model.blocks))]


def gradients(model, idx_BT):
    model.zero_grad()
    F.cross_entropy(model(idx_BT[:, :-1]).flatten(0, 1), idx_BT[:, 1:].flatten()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def close(a, b, tolerance=1e-5):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


# Law 1: causality


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("huge", [False, True], ids=["", "huge"])
def test_a_later_token_changes_no_earlier_logit(model_config, path, precision, huge):
    """Not by one bit, on either path, in either precision, with scores of 1e5 too."""
    if not model_config.causal:
        pytest.skip("this model sees the future on purpose")
    model, x = built(model_config), tokens()
    if huge:
        with torch.no_grad():
            for block in model.blocks:
                block.attn.w_q.weight *= 1000
                block.attn.w_k.weight *= 1000
        assert max(s.abs().max() for s in tapped(model, "scores", x)) > 1e5
    with torch.inference_mode(), arithmetic(precision, CPU):
        before = model(x)
        for t in (1, 7, 15):
            y = torch.cat((x[:, :t], (x[:, t:] + 1) % VOCAB), dim=1)
            after = model(y)
            assert torch.equal(after[:, :t], before[:, :t])
            assert not torch.equal(after[:, t], before[:, t])


@torch.inference_mode()
def test_without_the_causal_mask_the_future_is_seen(path):
    """`causal=false` does what it says."""
    model, x = built(make("causal=false")), tokens()
    y = torch.cat((x[:, :-1], (x[:, -1:] + 1) % VOCAB), dim=1)
    assert (model(x) - model(y))[:, 0].abs().max() > 1e-4


# The equation


def test_fused_and_explicit_attention_are_equal(model_config, monkeypatch):
    """The two paths agree to 1e-5, in logits and in every gradient."""
    model, x = built(model_config), tokens()
    logits, grads = model(x), gradients(model, x)
    monkeypatch.setattr(Attention, "fused", None)
    monkeypatch.setattr(Attention, "can_fuse", lambda self, T, S: False)
    close(model(x), logits)
    close(gradients(model, x), grads)


SCALES = {"head_dim": 0.35355339, "dim": 0.125, "none": 1.0}  # of 8 heads in dim 64


@pytest.mark.parametrize("words", ["", "n_kv_head=2 v_head_dim=4 qkv_bias=true bias=true", "causal=false"])
@pytest.mark.parametrize("score_scale", SCALES)
def test_attention_is_the_equation(path, score_scale, words):
    """Head by head in double precision, with PyTorch's own attention, a known scale and interleaved sharing."""
    c = make("dim=64", "n_head=8", f"score_scale={score_scale}", *words.split())
    attn = built(c).blocks[0].attn
    x_BTC = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0)) * 0.5

    def project(linear, head, width):
        rows = slice(head * width, (head + 1) * width)
        bias = 0 if linear.bias is None else linear.bias[rows].double()
        return x_BTC.double() @ linear.weight[rows].double().T + bias

    heads = []
    for h in range(8):
        g = {8: [0, 1, 2, 3, 4, 5, 6, 7], 2: [0, 0, 0, 0, 1, 1, 1, 1]}[c.G][h]
        q, k, v = project(attn.w_q, h, 8), project(attn.w_k, g, 8), project(attn.w_v, g, c.Dv)
        heads.append(F.scaled_dot_product_attention(q, k, v, is_causal=c.causal, scale=SCALES[score_scale]))
    expected = F.linear(torch.cat(heads, -1), attn.w_o.weight.double()) + (attn.w_o.bias if c.bias else 0)
    assert attn.scale == pytest.approx(SCALES[score_scale], abs=1e-8)
    close(attn(x_BTC).double(), expected)


def test_scale_none_is_one():
    """Not almost one."""
    assert GPT(make("score_scale=none"), VOCAB).blocks[0].attn.scale == 1.0


# Law 2: sharing and tying


def with_copies(model, words, readers):
    """An MHA model that computes the same: row block `readers[w][h]` of each matrix w becomes head h's own."""
    wide, weights = built(make(*words)), model.state_dict()
    for name, w in weights.items():
        if (which := name.split(".")[-2]) in readers:
            blocks = w.chunk(max(readers[which]) + 1)
            weights[name] = torch.cat([blocks[g] for g in readers[which]])
    wide.load_state_dict(weights)
    return wide


def test_as_many_kv_heads_as_heads_is_mha():
    """`n_kv_head = n_head` is MHA, bit for bit."""
    same, mha = GPT(make("n_kv_head=4"), VOCAB), GPT(make(), VOCAB)
    assert torch.equal(same(tokens()), mha(tokens()))


@pytest.mark.parametrize(("kv_heads", "readers"), [(2, [0, 0, 1, 1]), (1, [0, 0, 0, 0])])
def test_sharing_is_interleaved(path, kv_heads, readers):
    """With 2 KV heads, query heads 0 and 1 read the first: as MHA with its keys and values copied in that order."""
    gqa = built(make(f"n_kv_head={kv_heads}", "qkv_bias=true"))
    mha = with_copies(gqa, ["qkv_bias=true"], {"w_k": readers, "w_v": readers})
    close(gqa(tokens()), mha(tokens()), 1e-6)


def test_tied_heads_are_copied_weights(path):
    """In logits; and the gradient of the one slice is the sum of its copies' gradients."""
    readers = {w: [0, 0, 0, 0] for w in ("w_q", "w_k", "w_v")}
    tied = built(make("tied_heads=true", "qkv_bias=true"))
    mha = with_copies(tied, ["qkv_bias=true"], readers)
    close(tied(tokens()), mha(tokens()), 1e-6)
    tied_grads, grads = gradients(tied, tokens()), gradients(mha, tokens())
    for name, grad in tied_grads.items():
        own = sum(grads[name].chunk(4)) if name.split(".")[-2] in readers else grads[name]
        close(grad, own, 1e-6)


# Law 3: heads add up, and are told apart


def test_writes_of_the_heads_add_up_to_the_layer(model_config):
    """z of each head through its own slice of W_o, summed, is the layer's output; without W_o, side by side."""
    c = model_config
    attn = built(c).blocks[0].attn
    x_BTC, seen = torch.randn(2, 7, c.dim, generator=torch.Generator().manual_seed(0)), []
    attn.z.register_forward_hook(lambda _m, _i, z: seen.append(z))
    out, z_BHTD = attn(x_BTC), seen[0]
    w_o = torch.eye(c.dim) if attn.w_o is None else attn.w_o.weight
    bias = 0 if attn.w_o is None or attn.w_o.bias is None else attn.w_o.bias
    writes = [z_BHTD[:, h] @ w_o[:, h * c.Dv : (h + 1) * c.Dv].T for h in range(c.n_head)]
    close(out, sum(writes) + bias, 1e-6)


def test_a_head_is_its_slice_of_w_o(path):
    """Zero a head's slice of W_o or zero its z: the same model; with both, nothing more changes."""
    c, x = make(), tokens()
    model, sliced = built(c), built(c)

    def without_head_2(_layer, z_BHTD):
        return z_BHTD * torch.tensor([1, 1, 0, 1]).view(1, 4, 1, 1)

    with torch.no_grad():
        for block in sliced.blocks:
            block.attn.w_o.weight[:, 2 * c.Dv : 3 * c.Dv] = 0
    with hooked(model, "z", without_head_2):
        ablated = model(x)
    close(ablated, sliced(x), 1e-6)
    assert (ablated - model(x)).abs().max() > 1e-3
    with hooked(sliced, "z", without_head_2):
        close(sliced(x), ablated, 1e-6)


@torch.no_grad()
def test_without_w_o_a_head_writes_to_its_own_channels(path):
    """Another V of head 2 changes the channels of head 2, all of them, and no other."""
    c = make("w_o=false")
    attn = built(c).blocks[0].attn
    x_BTC = torch.randn(7, 2, c.dim, generator=torch.Generator().manual_seed(0)).transpose(0, 1)  # not contiguous
    before, mine = attn(x_BTC), slice(2 * c.Dv, 3 * c.Dv)
    attn.w_v.weight[mine] += 1
    changed = (attn(x_BTC) != before).any(0).any(0)
    assert changed.nonzero().flatten().tolist() == list(range(c.dim))[mine]
    close(attn(x_BTC), attn(x_BTC.contiguous()), 0.0)


@torch.inference_mode()
def test_one_token_is_enough(model_config, path):
    """B = T = 1 works, and is the beginning of a longer text."""
    model, x = built(model_config), tokens(B=1)
    assert model(x[:, :1]).shape == (1, 1, model_config.vocab_size or VOCAB)
    if model_config.causal:
        close(model(x[:, :1]), model(x)[:, :1])


# Taps


@torch.inference_mode()
def test_patterns_are_distributions_over_the_past(model_config):
    """Rows of the pattern sum to 1 and give the future exactly nothing; dropout in training does not show in them."""
    c = dataclasses.replace(model_config, attn_dropout=0.5)
    for pattern_BHTS in tapped(built(c).train(), "pattern", tokens()):
        assert pattern_BHTS.shape == (2, c.n_head, 16, 16)
        close(pattern_BHTS.sum(-1), torch.ones(2, c.n_head, 16), 1e-6)
        assert not c.causal or pattern_BHTS.triu(1).count_nonzero() == 0


@pytest.mark.parametrize("tap", ["scores", "pattern", "z", "write"])
@torch.inference_mode()
def test_looking_changes_nothing(model_config, tap):
    """A hook that only looks leaves the logits alone; once it is gone they are the old ones, bit for bit."""
    model, x, seen = built(model_config), tokens(), []
    before = model(x)
    with hooked(model, tap, lambda layer, _x: seen.append(layer)):
        close(model(x), before)
    assert seen == [0, 1]
    assert torch.equal(model(x), before)


@torch.inference_mode()
def test_a_tap_replaces_what_it_returns():
    """Scores set to 0 give every visible token the same weight."""
    model = built(make())
    with hooked(model, "scores", lambda _layer, scores: torch.zeros_like(scores)):
        pattern_BHTS = tapped(model, "pattern", tokens())[0]
    close(pattern_BHTS[0, 0], torch.ones(16, 16).tril() / torch.arange(1, 17)[:, None], 1e-6)


# Law 4: peers


def test_logits_are_those_of_gpt2():
    """Hugging Face's GPT-2 with the same random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ours = built(make("bias=true", "qkv_bias=true", "pos=learned", "mlp=gelu_tanh"))
    peer = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=16, vocab_size=VOCAB)).eval()
    weights = {"transformer.wte": ours.embed, "transformer.wpe": ours.embed_pos, "transformer.ln_f": ours.norm}
    for i, block in enumerate(ours.blocks):
        weights |= {f"transformer.h.{i}.ln_1": block.norm_attn, f"transformer.h.{i}.ln_2": block.norm_mlp}
        weights |= {f"transformer.h.{i}.mlp.c_fc": block.mlp.up, f"transformer.h.{i}.mlp.c_proj": block.mlp.down}
        qkv = (block.attn.w_q, block.attn.w_k, block.attn.w_v)
        weights |= {f"transformer.h.{i}.attn.c_attn": qkv, f"transformer.h.{i}.attn.c_proj": block.attn.w_o}
    copy(weights, peer, transposed="c_")
    close(ours(tokens()), peer(tokens()).logits)


def test_logits_are_those_of_llama():
    """Hugging Face's Llama: rotary positions, RMSNorm, SwiGLU, grouped queries, a head of its own."""
    from transformers import LlamaConfig, LlamaForCausalLM

    words = ("norm=rms", "mlp=swiglu", "n_kv_head=2", "tie_embeddings=false", "d_ff=48", "head_dim=6")
    ours = built(make("pos=rope", *words))
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=6)
    same = dict(num_key_value_heads=2, vocab_size=VOCAB, max_position_embeddings=16, rms_norm_eps=1e-5)
    peer = LlamaForCausalLM(LlamaConfig(**sizes, **same, tie_word_embeddings=False)).eval()
    weights = {"model.embed_tokens": ours.embed, "model.norm": ours.norm, "lm_head": ours.head}
    for i, block in enumerate(ours.blocks):
        attn, mlp, at = block.attn, block.mlp, f"model.layers.{i}."
        weights |= {f"{at}self_attn.{n}_proj": w for n, w in zip("qkvo", (attn.w_q, attn.w_k, attn.w_v, attn.w_o))}
        weights |= {f"{at}mlp.gate_proj": mlp.gate, f"{at}mlp.up_proj": mlp.up, f"{at}mlp.down_proj": mlp.down}
        weights |= {f"{at}input_layernorm": block.norm_attn, f"{at}post_attention_layernorm": block.norm_mlp}
    copy(weights, peer)
    close(ours(tokens()), peer(tokens()).logits)


@torch.no_grad()
def copy(weights, peer, transposed=None):
    """Each of our modules (or several, side by side) into the peer's; those with `transposed` in their name lie."""
    left = {name for name, _ in peer.named_parameters()}
    for name, modules in weights.items():
        modules = modules if isinstance(modules, tuple) else (modules,)
        for kind in ("weight", "bias"):
            if getattr(modules[0], kind, None) is not None:
                ours = torch.cat([getattr(m, kind) for m in modules])
                lies = transposed and transposed in name and kind == "weight"
                peer.get_parameter(f"{name}.{kind}").copy_(ours.T if lies else ours)
                left.remove(f"{name}.{kind}")
    assert not left


@pytest.mark.parametrize("position", ["pre", "post"])
@torch.no_grad()
def test_blocks_are_those_of_pytorch(position):
    """torch.nn.TransformerEncoderLayer, which Vaswani's post-LN is the default of, with a causal mask."""
    model = built(make(f"norm_position={position}", "bias=true", "qkv_bias=true", "pos=none"))
    x_BTC = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0))
    mask = nn.Transformer.generate_square_subsequent_mask(16)
    for block in model.blocks:
        peer = nn.TransformerEncoderLayer(
            32, 4, 128, dropout=0, activation="gelu", batch_first=True, norm_first=position == "pre"
        )
        attn, mha = block.attn, peer.self_attn
        mha.in_proj_weight.copy_(torch.cat((attn.w_q.weight, attn.w_k.weight, attn.w_v.weight)))
        mha.in_proj_bias.copy_(torch.cat((attn.w_q.bias, attn.w_k.bias, attn.w_v.bias)))
        pairs = ((mha.out_proj, attn.w_o), (peer.linear1, block.mlp.up), (peer.linear2, block.mlp.down))
        for theirs, ours in (*pairs, (peer.norm1, block.norm_attn), (peer.norm2, block.norm_mlp)):
            theirs.load_state_dict(ours.state_dict())
        close(block(x_BTC, Place()), peer(x_BTC, src_mask=mask))


# Law 5: parameters


def count(c, vocab_size=VOCAB):
    """Of the model itself, on a device without memory."""
    with torch.device("meta"):
        return sum(p.numel() for p in GPT(c, vocab_size).parameters())


@pytest.fixture
def no_chance(monkeypatch):
    """Only shapes matter: no random numbers, which would be drawn for real."""
    monkeypatch.setattr(Transformer, "initialise", lambda self, c: None)


def test_gpt2_small_has_124_439_808_parameters(no_chance):
    """As published with its weights."""
    assert count(composer().point({"model": "gpt2_small"}, set()).config) == 124_439_808


@pytest.mark.parametrize("model", MODELS)
def test_parameters_follow_the_formula(model, no_chance):
    """The sum over tensors is that of the closed formula, for every model in full size and in small."""
    for c in (composer().point({"model": model}, set()).config, make(f"model={model}")):
        assert count(c) == sum(cost.parameters(c, VOCAB).values())


SWITCHES = [
    *("w_o=false", "tied_heads=true", "bias=true", "qkv_bias=true", "mlp=swiglu", "norm=rms", "norm_position=post"),
    *("v_head_dim=4", "head_dim=10", "d_ff=20", "vocab_size=40", "n_kv_head=2", "n_head=2", "dim=36"),
    *("pos=learned", "pos=sinusoidal", "tie_embeddings=false"),
]


@pytest.mark.parametrize("switch", SWITCHES)
def test_parameters_follow_the_formula_in_pairs(no_chance, switch):
    """For every pair of switches that can be combined."""
    for other in SWITCHES[: SWITCHES.index(switch)]:
        with contextlib.suppress(UserError):
            c = make(switch, other)
            assert count(c) == sum(cost.parameters(c, VOCAB).values()), other


# Law 6: a sound start


def first_loss(*words):
    c = make(*words, "vocab_size=65")
    idx_BT = tokens(8, c.seq_len + 1, vocab=65)
    with torch.inference_mode():
        return F.cross_entropy(GPT(c, 65)(idx_BT[:, :-1]).flatten(0, 1), idx_BT[:, 1:].flatten()).item()


@pytest.mark.parametrize("model", MODELS)
def test_the_first_loss_is_that_of_guessing(model):
    """Within 0.1 of ln V at the default size, for every model."""
    words = [f"model={model}", "dim=128", "n_layer=4", "seq_len=64"]
    assert first_loss(*words) == pytest.approx(math.log(65), abs=0.1)


@pytest.mark.parametrize(("position", "tie"), [("pre", "true"), ("pre", "false"), ("post", "true"), ("post", "false")])
@pytest.mark.parametrize("dim", [16, 128, 768])
def test_the_first_loss_depends_on_no_width(dim, position, tie):
    """Within 0.1 of ln V, with the head tied or not."""
    words = (f"dim={dim}", f"norm_position={position}", f"tie_embeddings={tie}")
    assert first_loss(*words) == pytest.approx(math.log(65), abs=0.1)


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_one_batch_can_be_memorised(optim):
    """A loss below 0.1 in 150 steps."""
    c = make(f"optim={optim}", "pos=rope")
    model, idx_BT = GPT(c, VOCAB), tokens(B=4, T=17)
    optimizers = make_optimizers(model, c, "fp32")
    for _ in range(150):
        loss = F.cross_entropy(model(idx_BT[:, :-1]).flatten(0, 1), idx_BT[:, 1:].flatten())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert loss < 0.1


# Law 9: every key changes something

OTHERS = dict(
    n_layer=[1, 3],
    dim=[16, 64],
    n_head=[1, 2],
    n_kv_head=[1, 2],
    kept_heads=[[[0], [0, 1, 2, 3]], [[0, 1, 2], []]],
    head_dim=[4, 16],
    v_head_dim=[4, 16],
    d_ff=[64, 65],
    norm_eps=[0.1, 0.5],
    rope_theta=[2.0, 100.0],
    n_encoder_layer=[1, 2],
    cross_attention=[True, False],
    vocab_size=[33, 64],
    attn_dropout=[0.1, 0.5],
    resid_dropout=[0.1, 0.5],
)
FIELDS = {f.name: f for f in dataclasses.fields(Config)}
MODEL_KEYS = list(FIELDS)[: list(FIELDS).index("seq_len")]


def behaviour(c):
    """Shapes of the parameters, and logits in training mode."""
    model = built(c).train()
    torch.manual_seed(0)
    inputs = [tokens(vocab=16)] * (1 if c.n_encoder_layer is None else 2)
    return [p.shape for p in model.parameters()], model(*inputs)


@pytest.mark.parametrize("key", MODEL_KEYS)
@torch.no_grad()
def test_every_key_changes_something(key, path):
    """Any two values of a key of the model differ in shapes or, by more than rounding, in logits."""
    words = {"rope_theta": ["pos=rope"], "n_encoder_layer": ["data=reverse"], "cross_attention": ["model=encdec"]}
    c = make("n_head=4", *words.get(key, ["pos=learned"]))
    value = getattr(c, key)
    values = FIELDS[key].metadata["choices"] or ([True, False] if isinstance(value, bool) else [value, *OTHERS[key]])
    values = OTHERS[key] if key == "cross_attention" else values
    seen = [behaviour(dataclasses.replace(c, **{key: v})) for v in values]
    assert len(seen) > 1
    for (shapes, logits), (other_shapes, other_logits) in itertools.combinations(seen, 2):
        assert shapes != other_shapes or (logits - other_logits).abs().max() > 3e-5


def test_seq_len_is_the_number_of_learned_positions():
    """Learned positions beyond seq_len do not exist."""
    assert GPT(make("pos=learned", "seq_len=5"), VOCAB).embed_pos.weight.shape == (5, 32)


REFUSED = {
    "dim=64 n_head=6": "valid: 1, 2, 4, 8, 16, 32, 64",
    "dim=64 n_head=128": "valid: 1, 2, 4, 8, 16, 32, 64",
    "n_head=6 n_kv_head=4 dim=48": "valid: 1, 2, 3, 6",
    "n_head=8 n_kv_head=16": "valid: 1, 2, 4, 8",
    "n_kv_head=0": "must be >= 1",
    "tied_heads=true n_kv_head=2": "n_kv_head=2",
    "w_o=false head_dim=16": "n_head x v_head_dim",
    "kept_heads=[[0,1]]": "n_layer=2",
    "kept_heads=[[1,0],[0]]": "in order",
    "kept_heads=[[0,4],[0]]": "from 0 to 3",
    "kept_heads=[[0,0],[0]]": "once",
    "kept_heads=[[0,1,2,3],[0,1,2,3]]": "leave it null",
    "pos=rope head_dim=7": "even",
    "pos=sinusoidal dim=33 head_dim=8": "even",
    "attn_dropout=1.0": "attn_dropout",
    "precision=float16": "auto, fp32, bf16",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_built_is_refused(words):
    """At configuration time, with the key and what would be right."""
    with pytest.raises(UserError, match=REFUSED[words]):
        make(*words.split())


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is one here")
def test_a_device_that_is_not_here_is_refused():
    """By name, with those that are here."""
    with pytest.raises(UserError, match="has no mps; here: "):
        pick_device("mps")


# Dropout


@torch.inference_mode()
def test_dropout_sleeps_in_evaluation(path):
    """In evaluation mode a model with dropout is the model without."""
    x = tokens()
    close(built(make("attn_dropout=0.5", "resid_dropout=0.5"))(x), built(make())(x), 0.0)


@torch.inference_mode()
def test_dropout_keeps_the_mean(path):
    """On average over many draws, dropout on the pattern changes no output of a layer."""
    attn = built(make("attn_dropout=0.5")).blocks[0].attn
    x_BTC = torch.randn(1, 4, 32, generator=torch.Generator().manual_seed(0))
    expected = attn(x_BTC)
    torch.manual_seed(0)
    mean = attn.train()(x_BTC.expand(20_000, -1, -1)).mean(0)
    close(mean, expected[0], 0.02)


# Initial weights


def test_equal_shapes_start_equal():
    """One seed gives the same first weights wherever shapes agree, whatever n_head, depth or position encoding."""
    first = GPT(make(), VOCAB).state_dict()
    for words in (["n_head=8"], ["n_kv_head=1"], ["w_o=false"], ["pos=learned"], ["attn_dropout=0.5"]):
        other = GPT(make(*words), VOCAB).state_dict()
        same = [name for name, w in first.items() if name in other and other[name].shape == w.shape]
        assert len(same) >= len(first) - 4
        assert all(torch.equal(first[name], other[name]) for name in same), words


def test_the_seed_alone_decides_the_first_weights():
    """Nothing is left to PyTorch's global generator, biases included: they are zero."""
    c, weights = make("bias=true", "qkv_bias=true", "pos=learned", "tie_embeddings=false"), []
    for state in (1, 2):
        torch.manual_seed(state)
        weights.append(GPT(c, VOCAB).state_dict())
    for name, w in weights[0].items():
        assert torch.equal(w, weights[1][name]), name
        assert w.count_nonzero() == (0 if name.endswith("bias") else w.numel()), name


def test_seeds_and_tensors_have_streams_of_their_own():
    """No two random tensors share a number, neither of one seed nor of two."""
    weights = [p for seed in (0, 1) for p in GPT(make(f"seed={seed}"), VOCAB).parameters() if p.ndim > 1]
    starts = [tuple((p / p.std()).flatten()[:4].tolist()) for p in weights]
    for a, b in itertools.combinations(starts, 2):
        assert abs(a[0] - b[0]) + abs(a[1] - b[1]) > 1e-3


def test_initial_spread():
    """GPT-2's standard deviations: 0.02, and 0.02 / sqrt(2 n_layer) for what writes to the residual stream."""
    model = GPT(make("dim=64", "n_layer=8", "pos=learned", "tie_embeddings=false"), 1000)
    for name, p in model.named_parameters():
        expected = 0.005 if name.endswith(("w_o.weight", "down.weight")) else 0.02
        assert p.ndim < 2 or p.std().item() == pytest.approx(expected, rel=0.1), name


def test_tied_embedding_is_one_tensor():
    """Under one name, trained from both ends: a token that is never an input is moved as an output."""
    model = GPT(make("n_head=2", "head_dim=8"), VOCAB)
    assert [name for name, p in model.named_parameters() if p.shape == (VOCAB, 32)] == ["embed.weight"]
    logits = model(torch.zeros(1, 4, dtype=torch.long))
    F.cross_entropy(logits[0], torch.ones(4, dtype=torch.long)).backward()
    assert model.embed.weight.grad[1].abs().max() > 0


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize("size, close_to", [(1.0, 0.01), (8**0.5, 0.04)])
def test_attention_in_bf16_is_that_in_double(monkeypatch, fuse, size, close_to):
    """Output and gradients. The explicit way rounds scores too, so its error grows with them: 0.005 of the largest
    number, and 0.02 where they are 8 times as large."""
    monkeypatch.setattr(Attention, "can_fuse", lambda self, T, S: fuse)
    c = make("dim=128", "n_head=4", "seq_len=128")
    found = {}
    for dtype in (torch.float64, torch.float32):
        attn = Attention(c)
        qkv = [size * torch.randn(2, 4, 128, 32, generator=torch.Generator().manual_seed(i)) for i in range(3)]
        qkv = [x.bfloat16().to(dtype).requires_grad_() for x in qkv]
        go = torch.randn(2, 4, 128, 32, generator=torch.Generator().manual_seed(3)).bfloat16().to(dtype)
        with arithmetic("fp32" if dtype == torch.float64 else "bf16", pick_device("cpu")):
            q, k, v = qkv if dtype == torch.float64 else [x.bfloat16() for x in qkv]
            z = (attn.fused if fuse else attn.explicit)(q, k, v)
        found[dtype] = [z, *torch.autograd.grad(z, qkv, go.to(z.dtype))]
    for exact, x in zip(*found.values(), strict=True):
        assert 1e-4 < (x.double() - exact).norm() / exact.norm() < close_to


# What makes a decoded token faster


@pytest.mark.parametrize("shape", [(1, 1, 1024), (2, 3, 8), (1, 1, 7), (3, 5, 7), (1, 2, 4096), (1, 0, 8)])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gelu_of_few_numbers_is_gelu(shape, approximate, dtype):
    x = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for given in (x, x.transpose(0, 2)):
        with torch.inference_mode():
            found = gelu(given, approximate)
        assert found.shape == given.shape and found.dtype == dtype
        torch.testing.assert_close(found, F.gelu(given, approximate=approximate))
    x.requires_grad_()
    (ours,) = torch.autograd.grad(gelu(x, approximate).sum(), x)
    (theirs,) = torch.autograd.grad(F.gelu(x, approximate=approximate).sum(), x)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("n, gradients, as_it_is", [(1024, False, False), (1024, True, True), (8192, False, True)])
def test_few_numbers_go_another_way(monkeypatch, n, gradients, as_it_is):
    """Where no gradient is wanted."""
    given = []
    monkeypatch.setattr(F, "gelu", lambda x, approximate: [given.append(x.is_contiguous()), x][1])
    with torch.set_grad_enabled(gradients):
        gelu(torch.ones(1, n))
    assert given == [as_it_is]


@pytest.mark.parametrize("words", [(), ("model=encdec",), ("mlp=swiglu", "norm_position=post")])
@pytest.mark.parametrize("copied", [lambda m: m, deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_children_at_hand_are_the_children(words, copied):
    """Python finds them without torch; those of a copy are its own."""
    model = built(make(*words))
    found = [m for m in copied(model).modules() if set(m._modules) & set(vars(m))]
    assert len(found) > 2 * len(model.blocks)
    for module in found:
        assert all(vars(module)[name] is child for name, child in module._modules.items())


def test_a_child_that_is_set_anew_is_the_one_that_works():
    """A tap too."""
    model = built(make())
    before = model(tokens())
    for block in model.blocks:
        for name in ("attn", "mlp"):
            assert block.__dict__[name] is getattr(block, name)
            setattr(block, name, Nothing())
    changed = model(tokens())
    assert not torch.allclose(changed, before)
    close(changed, model.unembed(model.norm(model.read(tokens())[0])))
    model.blocks[-1].after_mlp = Nothing()
    assert not model(tokens()).any()


def test_whoever_listens_to_a_tap_hears():
    """Before, behind, and on the way back."""
    model, heard = built(make()), []
    tap = model.blocks[0].after_mlp
    for listen in (tap.register_forward_pre_hook, tap.register_forward_hook, tap.register_full_backward_hook):
        hook = listen(lambda *_, name=listen.__name__: heard.append(name))
        model(tokens()).sum().backward()
        hook.remove()
    assert heard == ["register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook"]
    model(tokens()).sum().backward()
    assert len(heard) == 3


class Nothing(nn.Module):
    """Writes nothing to the stream."""

    def forward(self, x_BTC, *_):
        return torch.zeros_like(x_BTC)


# Positions


def test_sinusoids_are_those_of_vaswani():
    """sin(t / 10000^(2i / dim)) in channel 2i, cos in channel 2i + 1 (2017, section 3.5)."""
    table_TC = sinusoid_table(1001, 8)
    assert table_TC[0].tolist() == [0, 1] * 4
    for t in (1, 2, 1000):
        angles = [t / 10_000 ** (2 * i / 8) for i in range(4)]
        expected = [f(a) for a in angles for f in (math.sin, math.cos)]
        assert table_TC[t].tolist() == pytest.approx(expected, abs=1e-6)


def test_sinusoids_are_added_to_the_embedding():
    """A model with learned positions that has learned the table and embeddings sqrt(dim) as large is the same model."""
    fixed, learned = (built(make(f"pos={pos}", "tie_embeddings=false")) for pos in ("sinusoidal", "learned"))
    weights = {"embed.weight": fixed.embed.weight * 32**0.5, "embed_pos.weight": sinusoid_table(16, 32)}
    learned.load_state_dict(fixed.state_dict() | weights)
    close(fixed(tokens()), learned(tokens()), 1e-5)


@pytest.fixture(scope="module")
def turned():
    """q and k at every position from 0 to 99,999: (T, D) each."""
    q_D, k_D = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    tables = rotary_tables(100_000, 16)
    return q_D, k_D, rotate(q_D.expand(100_000, -1), *tables), rotate(k_D.expand(100_000, -1), *tables)


def test_rotation_keeps_lengths_and_starts_at_rest(turned):
    """Position 0 is not turned at all, and no position changes the length of a vector."""
    q_D, _, q_TD, _ = turned
    assert torch.equal(q_TD[0], q_D)
    close(q_TD.norm(dim=-1), q_D.norm().expand(100_000))


@pytest.mark.parametrize("distance", [0, 1, 1000])
def test_rotated_products_depend_on_distance_alone(turned, distance):
    """q at t and k at t - distance have the same product at every t, and at another distance another one."""
    _, _, q_TD, k_TD = turned
    products = (q_TD[distance:] * k_TD[: len(k_TD) - distance]).sum(-1)
    close(products, products[0].expand(len(products)))
    assert (products[0] - (q_TD[distance + 1] * k_TD[0]).sum()).abs() > 1e-2


def test_rotation_has_known_angles():
    """Channels i and i + D/2 turn by t / 10000^(2i / D)."""
    turned = rotate(torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(8, -1), *rotary_tables(8, 4))
    for t in (1, 7):
        expected = [math.cos(t), math.cos(t / 100), math.sin(t), math.sin(t / 100)]
        assert turned[t].tolist() == pytest.approx(expected, abs=1e-6)
