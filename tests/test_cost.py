"""Law 5: what a configuration costs by formula is what torch counts in the model, and what other people publish.

T tokens, S tokens of a source, V vocabulary, H heads, D head_dim (of values: Dv).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import FILES, PRUNED, VOCAB, built, make, tokens
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from toymha import cost
from toymha.compose import points
from toymha.console import Console
from toymha.model.attention import Attention
from toymha.model.seq2seq import Seq2Seq, make_model
from toymha.schema import UserError
from toymha.stop import Stop
from toymha.timing import speed
from toymha.train import train_point


@pytest.fixture
def explicit(monkeypatch):
    """Attention as it is written; torch counts the fused kernel of a CPU as nothing."""
    monkeypatch.setattr(Attention, "can_fuse", lambda self, T, S: False)


def counted(model, run):
    """FLOPs that torch counts in `run()`: by part of the model, where attention is one part, and `total`."""
    with FlopCounterMode(display=False) as counter:
        run()
    by_module = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    # The keys and values of a source are computed once, before its cross-attention runs.
    parts = {".attn": (".attn", ".cross", ".cross.w_k", ".cross.w_v"), ".mlp": (".mlp",)}
    stacks = tuple(f"{type(model).__name__}.{stack}." for stack in ("blocks", "encoder"))
    sums = {
        part: sum(n for name, n in by_module.items() if name.startswith(stacks) and name.endswith(ends))
        for part, ends in parts.items()
    }
    return sums | {"total": counter.get_total_flops()}


def inputs(model, B, T, S):
    """What the model reads: tokens, and before them a source where it has an encoder."""
    return (tokens(B, S, seed=2), tokens(B, T)) if isinstance(model, Seq2Seq) else (tokens(B, T),)


SWITCHES = [
    *("tied_heads=true v_head_dim=4", "w_o=false", "n_kv_head=2 v_head_dim=4 head_dim=6", "n_head=2 head_dim=10"),
    *("mlp=swiglu d_ff=20", "tie_embeddings=false bias=true qkv_bias=true", "causal=false", "vocab_size=40 n_layer=3"),
    *("norm=rms norm_position=post pos=none", "pos=sinusoidal"),
]
ENCDEC = "data=reverse n_layer=2 n_encoder_layer"
SWITCHES += [
    *(f"{ENCDEC}=1 bias=true qkv_bias=true", f"{ENCDEC}=3 norm=rms norm_position=post", f"{ENCDEC}=2 w_o=false"),
    *(f"{ENCDEC}=2 n_kv_head=2 mlp=swiglu pos=learned", f"{ENCDEC}=1 tied_heads=true", f"{ENCDEC}=2 pos=none"),
    *(f"{ENCDEC}=2 cross_attention=false", f"{ENCDEC}=1 cross_attention=false norm_position=post bias=true"),
]
SWITCHES += PRUNED
CONFIGS = [f"model={model}" for model in FILES] + SWITCHES


@pytest.mark.parametrize("words", CONFIGS)
@torch.inference_mode()
def test_flops_are_those_that_torch_counts(explicit, words):
    """By part, for every model and every switch of size, at the context length and below it, with shorter sources."""
    c = make(*words.split())
    model = built(c)
    for parts, T, S in (
        (cost.flops(c, VOCAB), c.seq_len, c.seq_len),
        (cost.flops(c, VOCAB, 7), 7, 7),
        (cost.flops(c, VOCAB, 9, 5), 9, 5),
    ):
        seen = counted(model, lambda T=T, S=S: model(*inputs(model, 1, T, S)))
        assert parts["mlp"] == seen[".mlp"]
        assert parts["projections"] + parts["scores"] + parts["mixing"] == seen[".attn"]
        assert sum(parts.values()) == seen["total"]


@pytest.mark.parametrize("words", CONFIGS)
def test_a_training_step_is_three_forward_passes(explicit, words):
    """Exactly: torch counts two products for each one, in the first layer too, since the embedding below it learns."""
    c = make(*words.split())
    model, y_BT = built(c), tokens(3, c.seq_len, seed=1)

    def step():
        F.cross_entropy(model(*inputs(model, 3, c.seq_len, c.seq_len)).flatten(0, 1), y_BT.flatten()).backward()

    assert counted(model, step)["total"] == cost.training_flops_per_token(c, VOCAB) * 3 * c.seq_len


@pytest.mark.parametrize("words", CONFIGS)
def test_parameters_are_those_of_the_model(words):
    """By part: what a parameter is called says which part it is of."""
    c = make(*words.split())
    seen = dict.fromkeys(cost.parameters(c, VOCAB), 0)
    for name, p in make_model(c, VOCAB).named_parameters():
        part = next((part for part in seen if f".{part}." in f".{name}"), None)
        part = part or ("embedding" if "embed" in name else "norms" if "norm" in name else "w_o")  # of no heads: a bias
        seen[part] += p.numel()
    assert seen == cost.parameters(c, VOCAB)


PUBLISHED = {
    "gpt2_small": 124_439_808,
    "llama2_7b": 6_738_415_616,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "mistral_7b": 7_241_732_096,
    "qwen2_7b": 7_615_616_512,
}


@pytest.mark.parametrize("model", [m for m, file in FILES.items() if file and "vocab_size" in file])
def test_real_models_have_their_published_size(model):
    """To the last parameter; and the model that is built has as many, on a device that stores no numbers."""
    (point,) = points([f"model={model}"])
    # The variant with 64 key/value heads has W_k and W_v eight times as wide: 80 x 2 x 8192 x 56 x 128 more.
    expected = PUBLISHED.get(model, PUBLISHED["llama2_70b"] + 9_395_240_960)
    with torch.device("meta"):
        assert sum(p.numel() for p in make_model(point.config, 1).parameters()) == expected
    assert sum(cost.parameters(point.config, 1).values()) == expected


def test_keys_and_values_of_llama2_70b():
    """At 4,096 tokens in fp16, alone and for 32 users: 2 x 80 x heads x 128 x 4096 x 2 bytes."""
    shared, whole = (points([f"model={m}"])[0].config for m in ("llama2_70b", "llama2_70b_mha"))
    assert (shared.n_head, shared.G, whole.n_head, whole.G) == (64, 8, 64, 64)
    for users in (1, 32):
        assert cost.kv_bytes(shared, 4096, users, 2) == users * 1_342_177_280
        assert cost.kv_bytes(whole, 4096, users, 2) == users * 10_737_418_240


def test_flops_by_hand():
    """At T = 64: 2 layers, dim 32, 4 query and 2 key heads of 6 channels, values of 10, SwiGLU of 48, 50 tokens."""
    c = make("n_kv_head=2", "head_dim=6", "v_head_dim=10", "mlp=swiglu", "d_ff=48", "seq_len=64")
    assert cost.flops(c, 50) == {
        "projections": 786_432,  # 2 x 2 layers x 64 x 32 x (24 + 12 + 20 + 40)
        "scores": 393_216,  # 2 x 2 layers x 4 heads x 64 x 64 x 6
        "mixing": 655_360,  # 2 x 2 layers x 4 heads x 64 x 64 x 10
        "mlp": 1_179_648,  # 2 x 2 layers x 64 x 3 x 32 x 48
        "head": 204_800,  # 2 x 64 x 32 x 50
    }
    assert cost.training_flops_per_token(c, 50) == 150_912  # 3 x 3,219,456 / 64


def test_flops_of_an_encoder_decoder_by_hand():
    """5 source and 3 target tokens; 2 encoder and 1 decoder layer, dim 8, 2 heads of 4, MLP of 16, 10 tokens."""
    words = "data=reverse n_encoder_layer=2 n_layer=1 dim=8 n_head=2 d_ff=16"
    c = make(*words.split())
    assert cost.flops(c, 10, 3, 5) == {
        # encoder 2 layers x 4 x 5 rows, decoder 4 x 3, cross q and o 2 x 3, k and v 2 x 5; 8 x 8 products, 2 FLOPs
        "projections": 2 * 8 * 8 * (40 + 12 + 6 + 10),
        "scores": 2 * 8 * (2 * 5 * 5 + 3 * 3 + 3 * 5),
        "mixing": 2 * 8 * (2 * 5 * 5 + 3 * 3 + 3 * 5),
        "mlp": 2 * 2 * 8 * 16 * (2 * 5 + 3),
        "head": 2 * 3 * 8 * 10,
    }
    causal = cost.flops(c, 10, 3, 5, causal=True)
    assert causal["scores"] == 2 * 8 * (2 * 5 * 5 + 6 + 3 * 5)  # only the decoder's own past is hidden


@pytest.mark.parametrize("words", ["model=mha", "model=gqa", "model=llama3_8b", "model=encdec"])
@pytest.mark.parametrize("causal", [False, True])
def test_the_crossover_is_where_both_parts_are_equal(words, causal):
    """Just below it the linear part is larger, just above it the quadratic one."""
    c = make(*words.split())
    crossing = cost.crossover(c, VOCAB, causal)
    for T, larger in ((int(crossing) - 1, False), (int(crossing) + 2, True)):
        parts = cost.flops(c, VOCAB, T, causal=causal)
        quadratic = parts["scores"] + parts["mixing"]
        assert (quadratic > sum(parts.values()) - quadratic) == larger


def test_the_crossover_by_hand():
    """gpt2_small: 24 x 768 + 2 x 50257 / 12 ... FLOPs a token, against 4 x 768 a pair, in each of 12 layers."""
    (point,) = points(["model=gpt2_small"])
    linear = 12 * (2 * 12 * 768 * 768) + 2 * 768 * 50257
    assert cost.crossover(point.config, 0) == pytest.approx(linear / (12 * 4 * 768))
    assert cost.crossover(make("kept_heads=[[],[]]"), VOCAB) is None


# Activations


def saved_bytes(model, B, T):
    """Bytes that autograd keeps of a forward pass and the loss, each memory once, without parameters and buffers."""
    known = {x.untyped_storage().data_ptr() for x in [*model.parameters(), *model.buffers()]}
    kept = {}

    def pack(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage  # held, so that no address is given twice
        return x

    read, y_BT = inputs(model, B, T, T), tokens(B, T, seed=1)
    with saved_tensors_hooks(pack, lambda x: x):
        F.cross_entropy(model(*read).flatten(0, 1).float(), y_BT.flatten())
    return sum(storage.nbytes() for storage in kept.values())


def kept_a_sequence(model, T):
    """What a batch keeps for each of its sequences; the rest, such as copies of weights, does not depend on it."""
    return (saved_bytes(model, 5, T) - saved_bytes(model, 2, T)) / 3


@pytest.mark.parametrize("words", CONFIGS)
def test_activations_are_what_autograd_keeps(explicit, words):
    """To the byte with the T x T pattern in memory; masks of sources, a byte a head and layer or less, are not ours."""
    c = make(*words.split())
    model = make_model(c, VOCAB).train()
    for T in (16, 11):
        formula = sum(cost.activations(c, VOCAB, T, materialised=True).values())
        assert 0 <= kept_a_sequence(model, T) - formula <= 8 * isinstance(model, Seq2Seq)


# No kernel takes values of another width than keys, and uneven groups are copied: there is something else in memory.
FUSED = [w for w in CONFIGS if "v_head_dim" not in w and w != "n_kv_head=2 kept_heads=[[0,1,3],[2,3]]"]


@pytest.mark.parametrize("words", FUSED)
def test_activations_with_a_fused_kernel(words):
    """To the byte without a T x T pattern; masks of sources, 4 bytes a token and layer, are not counted."""
    c = make(*words.split())
    model = make_model(c, VOCAB).train()
    for T in (16, 11):
        parts = cost.activations(c, VOCAB, T)
        masks = 4 * T * (c.n_layer + c.n_encoder_layer) if c.crosses else 0
        assert parts["pattern"] == 0
        assert 0 <= kept_a_sequence(model, T) - sum(parts.values()) <= masks


@pytest.mark.parametrize("words", ["model=rms mlp=swiglu", "norm=rms norm_position=post pos=learned n_kv_head=2"])
def test_activations_in_half_precision(monkeypatch, words):
    """bf16 halves all but token numbers, statistics, what RMSNorm keeps and the log-probabilities."""
    c = make(*words.split())
    model = make_model(c, VOCAB).train().bfloat16()
    assert kept_a_sequence(model, 16) == sum(cost.activations(c, VOCAB, 16, 2).values())
    monkeypatch.setattr(Attention, "can_fuse", lambda self, T, S: False)
    assert kept_a_sequence(model, 16) == sum(cost.activations(c, VOCAB, 16, 2, materialised=True).values())


LLAMA2_70B = "n_layer=80 dim=8192 n_head=64 head_dim=128"


@pytest.mark.parametrize(
    ("words", "seq_len", "batch_size", "bytes_per_number", "expected"),
    [
        ("n_layer=4 n_head=8 n_kv_head=2 head_dim=16", 128, 3, 4, 393_216),
        (f"{LLAMA2_70B} n_kv_head=8", 4096, 1, 2, 1_342_177_280),
        (LLAMA2_70B, 4096, 1, 2, 10_737_418_240),
        ("tied_heads=true v_head_dim=4", 10, 1, 4, 960),  # 2 layers x (8 + 4) x 10 x 4
    ],
)
def test_kv_bytes(words, seq_len, batch_size, bytes_per_number, expected):
    """2 x layers x key heads x head_dim x tokens x sequences x bytes; tied heads keep one head."""
    assert cost.kv_bytes(make(*words.split()), seq_len, batch_size, bytes_per_number) == expected


@pytest.mark.parametrize("words", [f"model={model}" for model in FILES] + SWITCHES)
def test_kv_bytes_are_those_of_the_cache(words):
    """Of the tensors that hold 3 sequences of 9 tokens, and of a source of 5."""
    c = make(*words.split())
    if not c.causal:
        return
    model = built(c)
    with torch.inference_mode():
        read = tokens(3, 5) if isinstance(model, Seq2Seq) else 3
        assert model.make_cache(read, 9).nbytes == cost.kv_bytes(c, 9, 3, source_len=5)


def test_decoding_is_timed_in_the_precision_of_the_run(monkeypatch):
    """With bf16 the cache holds two bytes a number, as the summary's kv_bytes says; fp32 stays fp32."""
    c, seen = make("budget.decode_tokens=64"), []

    def timed(model, B, prompt_len, new_tokens, device):
        seen.append(model.make_cache(1).nbytes)
        return prompt_len, new_tokens

    monkeypatch.setattr(speed, "decode_tokens_per_s", timed)
    for precision, size in (("fp32", 4), ("bf16", 2)):
        assert speed.decoding_speed(c, VOCAB, torch.device("cpu"), precision) == (62, 2)
        assert seen[-1] == cost.kv_bytes(c, 64, bytes_per_number=size)
    assert speed.decoding_speed(make(), VOCAB, torch.device("cpu"), "fp32") is None


@pytest.mark.parametrize(
    "words", ["budget.decode_tokens=1", "budget.decode_tokens=63", "budget.decode_tokens=64 causal=false"]
)
def test_decoding_that_cannot_be_timed_is_refused(words):
    """Before anything is trained."""
    with pytest.raises(UserError, match="decode_tokens"):
        make(*words.split())


def test_kv_bytes_of_a_run_are_those_of_its_precision(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = (
        "data=pydoc n_layer=1 dim=16 n_head=2 seq_len=16 batch_size=4 budget.steps=1 budget.eval_tokens=64 device=cpu"
    )
    tiny += " threads=1 budget.sample_tokens=0 data.split=[0.98,0.01,0.01]"
    for precision, expected in (("fp32", 2048), ("bf16", 1024)):  # 2 x 16 channels x 16 tokens x 4 or 2 bytes
        (point,) = points([*tiny.split(), f"precision={precision}", f"name={precision}"])
        assert train_point(point, Console(quiet=True), Stop()).summary["kv_bytes"] == expected
