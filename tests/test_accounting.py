"""`toymha cost`: what it prints, as a user reads it. The numbers themselves are checked in test_cost.py."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import FILES, make, tokens

from toymha import accounting, config, cost, shapes, subjects
from toymha.cli import main
from toymha.data import text
from toymha.model.attention import Attention
from toymha.model.seq2seq import Seq2Seq, make_model
from toymha.shapes import Step, walk


def asked(capsys, *words: str) -> str:
    assert main(["cost", *words]) == 0
    return capsys.readouterr().out


def rows(out: str, name: str) -> list[list[str]]:
    """The cells of every line that begins with `name`."""
    return [line.removeprefix(f"  {name}").split() for line in out.splitlines() if line.startswith(f"  {name} ")]


def lines(out: str) -> list[dict]:
    return [json.loads(line) for line in out.splitlines()]


def test_one_table_with_a_column_for_each_batch(capsys):
    """Exact numbers, and units that one can read beside them; 32 users have 32 times the cache and the same weights."""
    out = asked(capsys, "model=llama2_70b", "seq_len=4096", "batch_size=1,32")
    assert rows(out, "n_head")[0] == ["64", "64"] and rows(out, "batch_size") == [["1", "32"]]
    assert rows(out, "vocab_size") == [["32,000", "32,000"]]
    assert rows(out, "total")[0] == "68,976,648,192 69 billion 68,976,648,192 69 billion".split()
    assert rows(out, "KV cache, batch_size x seq_len") == ["1,342,177,280 1.25 GiB 42,949,672,960 40 GiB".split()]
    assert rows(out, "weights") == ["137,953,296,384 128 GiB 137,953,296,384 128 GiB".split()]
    assert "2 a multiply-add" in out


def test_models_side_by_side(capsys):
    """compare= is a list of models; what shares keys keeps an eighth of the cache."""
    out = asked(capsys, "compare=llama2_70b,llama2_70b_mha", "seq_len=4096", "batch_size=1")
    assert out.splitlines()[0].split() == ["llama2_70b", "llama2_70b_mha"]
    assert rows(out, "n_kv_head")[0] == ["8", "64"]
    assert rows(out, "KV cache, batch_size x seq_len") == ["1,342,177,280 1.25 GiB 10,737,418,240 10 GiB".split()]
    both = asked(capsys, "model=llama2_70b,llama2_70b_mha", "seq_len=4096", "batch_size=1")
    assert both == out


def test_the_table_of_real_models(capsys):
    """Their sizes as their papers give them."""
    names = ["gpt2_small", "llama2_7b", "llama2_70b", "llama3_8b", "mistral_7b", "qwen2_7b"]
    sizes = [line["sizes"] for line in lines(asked(capsys, f"compare={','.join(names)}", "json=true"))]
    seen = {m: tuple(s[k] for k in list(s)[:7]) for m, s in zip(names, sizes)}
    assert seen == {  # n_layer, dim, n_head, head_dim, n_kv_head, d_ff, vocab_size
        "gpt2_small": (12, 768, 12, 64, 12, 3072, 50257),
        "llama2_7b": (32, 4096, 32, 128, 32, 11008, 32000),
        "llama2_70b": (80, 8192, 64, 128, 8, 28672, 32000),
        "llama3_8b": (32, 4096, 32, 128, 8, 14336, 128256),
        "mistral_7b": (32, 4096, 32, 128, 8, 14336, 32000),
        "qwen2_7b": (28, 3584, 28, 128, 4, 18944, 152064),
    }


@pytest.mark.parametrize("model", FILES)
def test_json_lines_say_what_the_table_says(capsys, model):
    """Every exact number of a line stands in the table; the parts add up."""
    words = [f"model={model}", "batch_size=2", "vocab_size=99"]
    (line,) = lines(asked(capsys, *words, "json=true"))
    out = asked(capsys, *words)
    assert line["model"] == model and line["sizes"]["vocab_size"] == 99
    for section in ("sizes", "parameters", "forward_flops", "causal_flops", "training_flops", "bytes", "activations"):
        assert all(f" {n:,}" in out for n in line[section].values())
    for section in ("parameters", "forward_flops"):
        *parts, total = line[section].values()
        assert sum(parts) == total
    assert line["training_flops"]["per_token"] * 2 * line["sizes"]["seq_len"] == line["training_flops"]["step"]
    assert line["bytes"]["weights"] == 2 * line["parameters"]["total"]


def test_what_the_number_of_heads_changes(capsys):
    """At one dim: the width of a head and the memory of T x T patterns alone; with n_kv_head fixed, the cache too."""
    out = asked(capsys, "model=mha", "vocab_size=99")
    moves = {
        line.split("  ")[1].strip(): line.split("  ")[-1].strip()
        for line in out.split("other numbers of heads")[1].splitlines()[2:]
    }
    assert {name for name, told in moves.items() if told == "the same"} == {
        "w_q, parameters", "w_k", "w_v", "w_o", "all parameters", "projections, forward", "scores", "mixing", "mlp",
        "head", "KV cache",
    }  # fmt: skip
    assert moves["activations, T x T"] == "changes" and moves["head_dim"] == "changes"
    (line,) = lines(asked(capsys, "model=mha", "vocab_size=99", "json=true"))
    heads = line["by_n_head"]
    assert heads["head_dim"] == {"1": 128, "2": 64, "4": 32, "8": 16, "16": 8}
    pattern = [
        heads["materialised"][h] for h in ("1", "2", "4")
    ]  # 4 layers x 16 sequences x 128 x 128 x 2 bytes a head
    assert pattern[1] - pattern[0] == 4 * 16 * 128 * 128 * 2 and pattern[2] - pattern[1] == 2 * 4 * 16 * 128 * 128 * 2
    (line,) = lines(asked(capsys, "model=gqa", "vocab_size=99", "json=true"))
    assert line["by_n_head"]["kv_cache"]["8"] * 2 == line["by_n_head"]["kv_cache"]["4"]


def test_heads_that_are_given_or_fixed_are_not_varied(capsys):
    """n_head=1,2 has its own columns; model=single stands for one head."""
    for words in (["n_head=1,2"], ["model=single"]):
        assert "other numbers of heads" not in asked(capsys, *words, "vocab_size=99")
        assert all(not line["by_n_head"] for line in lines(asked(capsys, *words, "vocab_size=99", "json=true")))


def test_precision_is_that_of_the_numbers(capsys):
    """fp32 takes twice what fp16 does, bf16 as much."""
    four, two, brain = (
        lines(asked(capsys, "model=mha", "vocab_size=99", "json=true", f"dtype={d}"))[0]["bytes"]
        for d in ("fp32", "fp16", "bf16")
    )
    assert four == {k: 2 * n for k, n in two.items()} and two == brain


def test_only_columns_that_differ(capsys, tmp_path):
    """What a statement varies beside costs nothing; a switch without a number of its own is told above its column."""
    (tmp_path / "sweep").mkdir()
    axes = "{optim.lr: '1e-3,1e-4', seed: '0,1', mlp: 'gelu,swiglu'}"
    (tmp_path / "sweep/mlps.yaml").write_text(
        f"# @package _global_\nsweep: {{name: mlps, question: '?', axes: {axes}}}\n"
    )
    out = asked(capsys, f"--config-dir={tmp_path}", "sweep=mlps", "vocab_size=99")
    assert out.splitlines()[0].split() == ["mha", "mha"] and rows(out, "mlp")[0] == ["gelu", "swiglu"]
    assert "lr" not in out


def test_a_vocabulary_that_only_the_data_knows(capsys, monkeypatch):
    """vocab_size=null is counted in the data; a number spares reading it."""
    (line,) = lines(asked(capsys, "data=pydoc", "json=true"))
    assert line["sizes"]["vocab_size"] == len(set(text.read_text(make("data=pydoc").data)))
    monkeypatch.setattr(text, "vocab_size", None)
    assert "vocab_size" in asked(capsys, "data=pydoc", "vocab_size=99")


@pytest.mark.parametrize(
    "words, said",
    [
        ("compare=llama2_70b,llama_70", "did you mean llama2_70b?"),
        ("compare=mha model=gqa", "leave out model="),
        ("compare=", "compare= must name models, such as compare=llama2_70b,llama2_70b_mha"),
        ("compare=[]", "compare= must name models"),
        ("precision=bf16", "precision changes nothing that is counted; write dtype="),
        ("optim.lr=1e-3,1e-4", "optim.lr changes nothing that is counted; leave it out"),
        ("sweep=heads budget=smoke", "budget changes nothing that is counted"),
        ("score_scale=none", "score_scale changes nothing that is counted"),
        ("n_head=3", "n_head=3"),
        ("dtype=int8", "dtype=int8"),
        ("shapes=yes", "shapes=true"),
        ("n_heads=4", "did you mean n_head?"),
        ("data=file data.path=nowhere.txt", "nowhere.txt"),
    ],
)
def test_mistakes_are_one_line(capsys, words, said):
    assert main(["cost", *words.split()]) == 2
    seen = capsys.readouterr()
    assert said in seen.err and seen.err.count("\n") == 1 and not seen.out


@pytest.mark.parametrize(
    "n, told",
    [(1023, ""), (1024, "1 KiB"), (1.5 * 2**20, "1.5 MiB"), (10 * 2**30, "10 GiB"), (300 * 2**40, "300 TiB")],
)
def test_units(n, told):
    assert accounting._of_bytes(n) == told
    assert accounting._of_flops(1.5e15) == "1.5 PFLOP" and accounting._of_parameters(68_976_648_192) == "69 billion"
    assert subjects.number(999.6) == "1,000" and subjects.amount(0.4) == "0.4 B" and subjects.amount(7e24) == "7,000 ZB"


# What changes something, and what does not

ENCDEC = "data=reverse n_encoder_layer=1"
CHANGES = {  # a key that is counted -> the words of two configurations that differ in it alone
    **{w.partition("=")[0]: ("", w) for w in ("n_layer=3", "dim=64", "n_head=2", "n_kv_head=2", "head_dim=6")},
    **{w.partition("=")[0]: ("", w) for w in ("v_head_dim=6", "d_ff=50", "mlp=swiglu", "norm=rms", "pos=learned")},
    **{w.partition("=")[0]: ("", w) for w in ("norm_position=post", "w_o=false", "tied_heads=true", "causal=false")},
    **{w.partition("=")[0]: ("", w) for w in ("bias=true", "qkv_bias=true", "tie_embeddings=false", "vocab_size=77")},
    **{w.partition("=")[0]: ("", w) for w in ("seq_len=17", "batch_size=17", "kept_heads=[[0],[1,2]]")},
    "n_encoder_layer": (ENCDEC, "data=reverse n_encoder_layer=2"),
    "cross_attention": (ENCDEC, f"{ENCDEC} cross_attention=false"),
}
NO_CHANGE = ["norm_eps=1e-3", "rope_theta=5", "score_scale=none", "attn_dropout=0.1", "resid_dropout=0.1"]
NO_CHANGE += ["grad_accum=2", "precision=bf16", "compile=true", "workers=2", "threads=2", "seed=3", "device=cpu"]
NO_CHANGE += ["optim.lr=0.1", "optim=adamw", "budget.steps=3", "budget=quick", "name=x", "output_dir=x"]


def test_all_that_is_counted_is_taken_and_nothing_else():
    """Each key of a model and of the batch changes a number, or is refused (law 9)."""
    assert CHANGES.keys() == accounting.COUNTED
    refused = {w.partition("=")[0] for w in NO_CHANGE}
    assert accounting.COUNTED | refused >= {*config.MODEL_KEYS} and not accounting.COUNTED & refused


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_taken_changes_a_number(name):
    a, b = (accounting.measure(make(*words.split()), 40, "fp16") for words in CHANGES[name])
    assert any(a[section] != b[section] for section in a if section != "sizes")


@pytest.mark.parametrize("word", NO_CHANGE)
def test_what_changes_nothing_is_refused(capsys, word):
    assert accounting.measure(make(word), 40, "fp16") == accounting.measure(make(), 40, "fp16")
    assert main(["cost", "vocab_size=99", word]) == 2
    assert f"{word}: {word.partition('=')[0]} changes nothing that is counted" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["model=mha", "model=gqa", "model=gpt2_small", "model=encdec", "n_head=1 dim=8"])
@pytest.mark.parametrize("causal", ["full", "causal"])
def test_the_crossover_is_the_first_length_at_which_pairs_take_more(words, causal):
    """At the T that is printed they take more, at T - 1 they do not yet."""
    c = make(*words.split())
    T = accounting.measure(c, 40, "fp16")["crossover"][causal]

    def more(T: int) -> bool:
        parts = cost.flops(replace(c, seq_len=T), 40, causal=causal == "causal")
        pairs = parts["scores"] + parts["mixing"]
        return pairs > sum(parts.values()) - pairs

    assert more(T) and not more(T - 1)


def test_an_even_crossover_is_not_yet_more():
    """1 layer, dim 4, 1 head, MLP of 4, 4 tokens: 2 x 16 x (4 + 2 + 1) = 224 FLOPs a token, 16 a pair: even at 14."""
    c = make("n_layer=1", "dim=4", "n_head=1", "d_ff=4")
    parts = cost.flops(c, 4, 14)
    assert parts["scores"] + parts["mixing"] == sum(parts.values()) / 2
    assert accounting.measure(c, 4, "fp16")["crossover"]["full"] == 15


def test_a_statement_is_counted_as_it_is_compared(capsys):
    """sweep=w_o_parameters gives the MLP what W_o leaves: 2 layers x 128 x 128 = 2 x 2 x 128 x 64, d_ff 512 + 64."""
    both = lines(asked(capsys, "sweep=w_o_parameters", "data=pydoc", "json=true"))
    assert [line["sizes"]["d_ff"] for line in both] == [512, 576]
    assert [line["parameters"]["w_o"] for line in both] == [2 * 128 * 128, 0]
    assert both[0]["parameters"]["total"] == both[1]["parameters"]["total"]


@pytest.mark.parametrize(
    ("words", "named", "several"),
    [
        ("compare=mha,post_ln,rms,no_wo batch_size=1,2", "mha", True),
        ("mlp=gelu,swiglu d_ff=512", "mha, mlp=gelu", True),
        ("compare=single,mha", "mha", True),  # model=single stands for one head
        ("model=mha batch_size=1,2 seq_len=16,32", "mha", False),
    ],
)
def test_one_table_of_heads(capsys, words, named, several):
    """Of the first model that can have other numbers of heads; a line says so where there are several models."""
    out = asked(capsys, *words.split(), "vocab_size=99")
    told = [line.split(" with other")[0] for line in out.splitlines() if "with other numbers of heads (" in line]
    assert told == [named]
    assert out.count("of several models only this one is told with other numbers of heads") == several


def test_a_warm_start_needs_no_hydra():
    """Once its files were composed, a model of known vocabulary is counted without hydra, numpy or torch."""
    code = "import sys; from toymha.cli import main; main(['cost', 'model=llama2_70b']); print(*sys.modules)"
    for _ in range(2):
        seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    modules = set(seen.splitlines()[-1].split())
    assert "toymha.cost" in modules and "68,976,648,192" in seen
    assert not modules & {"hydra", "omegaconf", "numpy", "scipy", "torch"}


# The walk of a tensor


def test_the_walk_through_llama2_70b(capsys):
    """By hand: 64 query heads of 128 channels over 8 key/value heads, 4,096 tokens; scores are 4,096 x 4,096 a head."""
    out = asked(capsys, "model=llama2_70b", "seq_len=4096", "batch_size=1", "shapes=true", "json=true")
    (line,) = lines(out)
    steps = [(s["tensor"], tuple(s["shape"])) for s in line["steps"]]
    assert steps[0] == ("x", (1, 4096, 8192)) and steps[-1] == ("out", (1, 4096, 8192))
    in_order = [
        ("q", (1, 4096, 8192)),  # W_q x
        ("q", (1, 4096, 64, 128)),  # view
        ("q", (1, 64, 4096, 128)),  # transpose
        ("scores", (1, 64, 4096, 4096)),
        ("pattern", (1, 64, 4096, 4096)),
        ("z", (1, 64, 4096, 128)),  # mix
        ("z", (1, 4096, 64, 128)),
        ("z", (1, 4096, 8192)),  # merge
        ("out", (1, 4096, 8192)),  # W_o
    ]
    places = [steps.index(step) for step in in_order]
    assert places == sorted(places)
    assert ("k", (1, 4096, 1024)) in steps and ("v", (1, 8, 4096, 128)) in steps
    table = asked(capsys, "model=llama2_70b", "seq_len=4096", "batch_size=1", "shapes=true")
    assert "1 x 64 x 4096 x 4096  1,073,741,824    2 GiB" in table and "W_q x, W_k x, W_v x" in table


@pytest.mark.parametrize("model", FILES)
def test_the_walk_is_that_of_the_model(model):
    """The shapes at the taps are those that the model has where there are real numbers."""
    c = make(f"model={model}", "batch_size=2")
    real, seen = make_model(c, 40), {}
    attention = next(m for m in real.blocks.modules() if isinstance(m, Attention))
    for tap in ("scores", "pattern", "z"):
        getattr(attention, tap).register_forward_hook(lambda m, a, out, tap=tap: seen.update({tap: tuple(out.shape)}))
    read = tokens(2, c.seq_len)
    real(read, read) if isinstance(real, Seq2Seq) else real(read)
    steps = walk(c, 40)["self-attention"]
    assert {s.tensor: s.shape for s in reversed(steps) if s.tensor in seen} == seen
    assert ("cross-attention" in walk(c, 40)) == c.crosses
    for steps in walk(c, 40).values():
        (pattern,) = [s for s in steps if s.tensor == "pattern"]
        assert pattern.made_by[0] == "softmax"


def test_the_walk_is_watched_and_not_described(monkeypatch):
    """A model that does something else walks otherwise: here it takes the heads' outputs twice, and drops one."""
    c = make("batch_size=1")
    merge = Attention.merge
    monkeypatch.setattr(Attention, "merge", lambda self, z_BHTD: merge(self, torch.cat((z_BHTD, z_BHTD))[:1]))
    assert Step("z", ["cat"], (2, 4, 16, 8)) in walk(c, 40)["self-attention"]


def test_the_walk_of_cross_attention(capsys):
    """Queries from the target, keys and values from the encoder's output: 2 sequences, 4 heads of 32, 2 for keys."""
    words = ["model=encdec", "data=dates", "n_kv_head=2", "batch_size=2", "vocab_size=99", "shapes=true"]
    line = lines(asked(capsys, *words, "json=true"))[1]
    steps = [(s["tensor"], " ".join(s["made_by"])) for s in line["steps"]]
    assert steps[:3] == [("memory", "given by the encoder"), ("k", "W_k memory"), ("k", "view as heads")]
    in_order = [("v", "W_v memory"), ("x", "given"), ("q", "W_q x"), ("scores", "q @ k add"), ("z", "pattern @ v")]
    places = [steps.index(step) for step in [*in_order, ("out", "W_o z")]]
    assert places == sorted(places)
    T = line["seq_len"]
    shapes = [tuple(s["shape"]) for s in line["steps"] if s["tensor"] == "v"]
    assert shapes == [(2, T, 64), (2, T, 2, 32), (2, 2, T, 32), (2, 4, T, 32)]
    own, cross = (text.splitlines()[0] for text in asked(capsys, *words).split("\n\n"))
    assert f"T={T} (target positions) S={T} (source positions)" in cross and "S=" not in own


def test_the_walk_of_a_pruned_layer():
    """The first layer that has heads, with those that it has; a model without any has no walk."""
    steps = walk(make("batch_size=1", "kept_heads=[[],[0,2,3]]"), 40)["self-attention"]
    assert ("scores", (1, 3, 16, 16)) in {(s.tensor, s.shape) for s in steps}
    assert walk(make("kept_heads=[[],[]]"), 40) == {}


@pytest.mark.parametrize(
    ("words", "layers"),
    [
        ("n_layer=7", 1),
        ("kept_heads=[[],[0,2,3]]", 2),
        ("kept_heads=[[0,1,2,3],[1]]", 1),  # the first layer alone keeps all, which is to say that none is gone
        (f"{ENCDEC} n_layer=5", 1),
        ("data=reverse n_encoder_layer=4", 1),
    ],
)
def test_no_more_is_built_than_is_watched(monkeypatch, words, layers):
    """Layers up to the first one that has heads; the walk is that of the whole model."""
    c, built, real = make(*words.split()), [], make_model
    monkeypatch.setattr(shapes, "make_model", lambda c, V: built.append((c.n_layer, c.n_encoder_layer)) or real(c, V))
    steps = walk(c, 40)
    assert built == [(layers, None if c.n_encoder_layer is None else 1)]
    monkeypatch.setattr(shapes, "short", lambda c, last: c)
    assert walk(c, 40) == steps
