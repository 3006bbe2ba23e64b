"""Law 5: what a configuration costs by formula is what torch counts in the model, and what other people publish.

T tokens, V vocabulary, H heads, D head_dim (of values: Dv).
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import MODELS, PRUNED, VOCAB, built, make, tokens
from torch.utils.flop_counter import FlopCounterMode

from toymha import bench, cost
from toymha.compose import points
from toymha.console import Console
from toymha.model.attention import Attention
from toymha.schema import UserError
from toymha.stop import Stop
from toymha.train import train_point


@pytest.fixture
def explicit(monkeypatch):
    """Attention as it is written; torch counts the fused kernel of a CPU as nothing."""
    monkeypatch.setattr(Attention, "can_fuse", lambda self: False)


def counted(model, run):
    """FLOPs that torch counts in `run()`: by part of the model, where attention is one part, and `total`."""
    with FlopCounterMode(display=False) as counter:
        run()
    by_module = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    sums = {
        part: sum(n for name, n in by_module.items() if name.startswith("GPT.blocks.") and name.endswith(part))
        for part in (".attn", ".mlp")
    }
    return sums | {"total": counter.get_total_flops()}


SWITCHES = [
    *("tied_heads=true v_head_dim=4", "w_o=false", "n_kv_head=2 v_head_dim=4 head_dim=6", "n_head=2 head_dim=10"),
    *("mlp=swiglu d_ff=20", "tie_embeddings=false bias=true qkv_bias=true", "causal=false", "vocab_size=40 n_layer=3"),
]
SWITCHES += PRUNED
CONFIGS = [f"model={model}" for model in MODELS] + SWITCHES


@pytest.mark.parametrize("words", CONFIGS)
@torch.inference_mode()
def test_flops_are_those_that_torch_counts(explicit, words):
    """By part, for every model and every switch of size, at the context length and below it."""
    c = make(*words.split())
    model = built(c)
    for parts, T in ((cost.flops(c, VOCAB), c.seq_len), (cost.flops(c, VOCAB, 7), 7)):
        seen = counted(model, lambda T=T: model(tokens(B=1, T=T)))
        assert parts["mlp"] == seen[".mlp"]
        assert parts["projections"] + parts["scores"] + parts["mixing"] == seen[".attn"]
        assert sum(parts.values()) == seen["total"]


@pytest.mark.parametrize("words", CONFIGS)
def test_a_training_step_is_three_forward_passes(explicit, words):
    """Exactly: torch counts two products for each one, in the first layer too, since the embedding below it learns."""
    c = make(*words.split())
    model, idx_BT = built(c), tokens(B=3, T=c.seq_len + 1)

    def step():
        F.cross_entropy(model(idx_BT[:, :-1]).flatten(0, 1), idx_BT[:, 1:].flatten()).backward()

    assert counted(model, step)["total"] == cost.training_flops_per_token(c, VOCAB) * 3 * c.seq_len


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


def test_decoding_is_timed_in_the_precision_of_the_run(monkeypatch):
    """With bf16 the cache holds two bytes a number, as the summary's kv_bytes says; fp32 stays fp32."""
    c, seen = make("budget.decode_tokens=64"), []

    def timed(model, B, prompt_len, new_tokens, device):
        seen.append(model.make_cache(1).nbytes)
        return prompt_len, new_tokens

    monkeypatch.setattr(bench, "decode_tokens_per_s", timed)
    for precision, size in (("fp32", 4), ("bf16", 2)):
        assert bench.decoding_speed(c, VOCAB, torch.device("cpu"), precision) == (62, 2)
        assert seen[-1] == cost.kv_bytes(c, 64, bytes_per_number=size)
    assert bench.decoding_speed(make(), VOCAB, torch.device("cpu"), "fp32") is None


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
