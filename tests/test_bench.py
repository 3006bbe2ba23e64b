"""`toymha bench`: what is counted, what is timed and what is not, what bounds a phase, and what is told of it.

B batch, P tokens of the prompt, S tokens of context, T positions, H heads, V vocabulary.
"""

from __future__ import annotations

import itertools
import json
import time
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import MODELS, PRUNED, VOCAB, built, make, tokens
from torch.utils.flop_counter import FlopCounterMode

from toymha import cost
from toymha.batches import Batch
from toymha.cli import main
from toymha.console import duration
from toymha.evaluate import attention_statistics
from toymha.model.attention import Attention
from toymha.model.parts import GeluMLP
from toymha.optim import Optimizer, make_optimizers
from toymha.options import BenchOptions, BenchTrainOptions
from toymha.schema import UserError, build, keys
from toymha.team import ALONE, Team
from toymha.timing import bench, bench_report, bench_train, machine, roofline, train_report
from toymha.timing.anatomy import anatomy, step_by_phases
from toymha.timing.roofline import Rates, Work, decoding, judge, reading
from toymha.timing.train_report import PASSES
from toymha.train import loss_of

CPU = torch.device("cpu")
TINY = ["data=pydoc", "n_layer=1", "dim=16", "n_head=2", "vocab_size=200"]
RATES = Rates(10e9, {"fp32": 100e9, "bf16": 200e9}, 1_000_000, 40e9)
CONFIGS = [f"model={m}" for m in MODELS if make(f"model={m}").n_encoder_layer is None]
CONFIGS += ["n_kv_head=1 v_head_dim=4 mlp=swiglu", "tie_embeddings=false pos=learned", *PRUNED]


@pytest.fixture
def quick(monkeypatch):
    """Rates that nobody has to wait for."""
    for module in (bench, bench_train):
        monkeypatch.setattr(module, "measure_rates", lambda device, precisions: RATES)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until `now[0]` is moved."""
    now = [0.0]
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def case(words: str = "", **more) -> bench.Case:
    values = {"precision": "fp32", "batch": 3, "prompt_len": 10, "new_tokens": 6, "cache": True} | more
    return bench.Case(bench.Subject("tiny", make(*words.split()), VOCAB, 16), **values)


def run_bench(folder, *words, **options) -> list[dict]:
    small = {"prompt_len": [4], "new_tokens": 3, "repeats": 3, "threads": 1, "device": "cpu", "precision": ["fp32"]}
    o = build(small | {"output_dir": str(folder)} | options, BenchOptions)
    assert bench.bench(o, [*TINY, *words] if "run" not in options else []) == 0
    return read(folder / o.name)


def run_train(folder, *words, **options) -> list[dict]:
    small = {"repeats": 3, "threads": 1, "device": "cpu", "precision": ["fp32"], "output_dir": str(folder)}
    o = build(small | options, BenchTrainOptions)
    assert bench_train.bench_train(o, [*TINY, "batch_size=2", *words]) == 0
    return read(folder / o.name)


def read(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "bench.jsonl").read_text("utf-8").splitlines()]


# Bytes and FLOPs


def test_a_step_by_hand():
    """1 layer, 2 query heads and 1 key head of 4, dim 8, MLP of 32, 10 tokens of vocabulary, batch 3, context 5."""
    c = make("n_layer=1", "dim=8", "n_head=2", "n_kv_head=1", "vocab_size=null", "seq_len=8")
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 2 * 8 * 32 + 3 * 8 + 10 * 8  # W_q, W_k and W_v, W_o, MLP, norms, head
    flops = 2 * (weights - 3 * 8) + 2 * 2 * (4 + 4) * 5  # each weight but those of norms once; 2 heads, 5 keys
    one = 2 * 4 * 4  # bytes of a token's key and value
    work = decoding(c, 10, 3, 5)
    assert work.flops == 3 * flops
    assert work.bytes == 4 * weights + 3 * (5 + 1) * one + 3 * 10 * 4  # five read, one written, logits
    assert work.resident == 4 * weights + 3 * 5 * one
    assert reading(c, 10, 3, 1).flops == decoding(c, 10, 3, 1).flops
    half = decoding(c, 10, 3, 5, number=2)
    assert work.bytes - half.bytes == (3 * 6 * one + 3 * 10 * 4) / 2  # weights stay as they are


@pytest.mark.parametrize("words", CONFIGS)
@torch.inference_mode()
def test_flops_of_both_phases_are_those_that_torch_counts(words):
    """Of a prefill with the last logits alone, and of a token after it: in explicit attention, which torch counts."""
    c = make(*words.split())
    model, idx_BT = built(c), tokens(B=3, T=7)
    cache = model.make_cache(3)
    with bench_train.path_of_attention(model, "explicit"):
        for x, work in ((idx_BT[:, :6], reading(c, VOCAB, 3, 6)), (idx_BT[:, 6:], decoding(c, VOCAB, 3, 7))):
            with FlopCounterMode(display=False) as counter:
                bench.next_token(model, x, cache)
            assert counter.get_total_flops() == work.flops


@pytest.mark.parametrize("words", CONFIGS)
def test_weights_that_a_pass_reads(words):
    """All but the embedding's rows of other tokens, and all positions; a tied embedding is the head."""
    c = make(*words.split())
    model = built(c)
    unread = 0 if c.tie_embeddings else model.embed.weight.numel()
    unread += model.embed_pos.weight.numel() if c.pos == "learned" else 0
    assert roofline.read_weights(c, VOCAB) == sum(p.numel() for p in model.parameters()) - unread


def test_the_cache_of_a_known_case():
    """4 layers, 2 of 8 heads of 16 channels, 128 tokens, 3 sequences, fp32: 393,216 bytes, and half of that for MQA."""
    words = "n_layer=4 dim=128 n_head=8 seq_len=128"
    for G, size in ((2, 393_216), (1, 196_608)):
        asked = case(f"{words} n_kv_head={G}", prompt_len=120, new_tokens=8)
        row = bench.measure(built(asked.subject.config), asked, 3, CPU, RATES)
        assert row["kv_bytes"] == row["kv_bytes_read"] == row["kv_bytes_formula"] == size
    halved = bench.measure(built(asked.subject.config), case(f"{words} n_kv_head=1", precision="bf16"), 3, CPU, RATES)
    assert halved["kv_bytes"] == 2 * 4 * 16 * 16 * 3 * 2


def test_a_wrong_formula_is_an_error(monkeypatch):
    real = cost.kv_bytes
    monkeypatch.setattr(cost, "kv_bytes", lambda *a, **k: real(*a, **k) + 4)
    with pytest.raises(RuntimeError, match=r"have not the size that cost\.kv_bytes gives"):
        bench.measure(built(case().subject.config), case(), 3, CPU, RATES)


@torch.inference_mode()
def test_looking_at_what_is_read_leaves_no_trace():
    model = built(make("n_kv_head=1"))
    cache = model.make_cache(2)
    bench.next_token(model, tokens(T=9), cache)
    assert bench.read_in_a_step(model, cache, tokens(T=1)) == cost.kv_bytes(make("n_kv_head=1"), 9, 2)
    assert all("extend" not in vars(layer) for layer in cache.layers)


# What is timed


def watched(model, clock, seconds):
    """Shapes of all calls; each moves the clock by `seconds(call number, tokens)`."""
    calls = []

    def note(_m, idx, _o):
        clock[0] += seconds(len(calls), idx[0].shape[1])
        calls.append(tuple(idx[0].shape))

    model.embed.register_forward_hook(note)
    return calls


def test_decoding_does_not_count_the_prefill(clock):
    """One call of all the prompt, then calls of one token; the first of each kind, which is slow, does not count."""
    model = built(case().subject.config)
    calls = watched(model, clock, lambda i, T: 50 if i in (0, *range(6, 12)) else {10: 4, 1: 0.5}[T])
    row = bench.measure(model, case(), 5, CPU, RATES)
    timings = row["prefill"]["timings"]
    assert calls[: 1 + timings] == [(3, 10)] * (1 + timings)
    assert set(calls[1 + timings :]) == {(3, 1)}
    assert row["prefill"]["median"] == 4
    assert row["prefill"]["tokens_per_s"] == 3 * 10 / 4
    assert row["decode"]["median"] == pytest.approx(0.5)
    assert row["decode"]["tokens_per_s"] == pytest.approx(3 / 0.5)
    assert row["decode"]["steps_timed"] == 6
    assert [k for k, _ in itertools.groupby(calls)] == [(3, 10), (3, 1)]


def test_without_a_cache_each_token_reads_the_whole_text(clock):
    model = built(case().subject.config)
    calls = watched(model, clock, lambda i, T: 0.01 * T)
    row = bench.measure(model, case(cache=False, prompt_len=8, new_tokens=4), 3, CPU, RATES)
    lengths = [T for _, T in calls]
    first = lengths.index(9)
    assert set(lengths[:first]) == {8}
    assert lengths[first:] == [9, 10, 11, 12] * (len(lengths[first:]) // 4)
    assert row["decode"]["median"] == pytest.approx(0.105)  # the mean of 9, 10, 11 and 12 tokens
    assert row["kv_bytes"] is None
    c = case().subject.config
    assert row["decode"]["flops"] == sum(reading(c, VOCAB, 3, T).flops for T in (9, 10, 11, 12)) / 4


@pytest.mark.parametrize(("first", "timings", "median", "high"), [(1.5, 5, 2.0, 90.0), (7.0, 3, 3.0, 90.0)])
def test_medians_and_ends(clock, first, timings, median, high):
    """Of all timings without the first call; three at least, where that took long."""
    durations = iter([first, 1.0, 3.0, 90.0, 2.0, 1.5])

    def work():
        clock[0] += next(durations)

    found = machine.timed(work, 5, CPU)
    assert (found.median, found.low, found.high, found.timings, found.calls) == (median, 1.0, high, timings, 1)
    assert found.over(4).median == median / 4


def test_short_work_is_done_several_times(clock):
    def work():
        clock[0] += 0.001

    found = machine.timed(work, 5, CPU)
    assert found.calls == 20
    assert found.timings == 5
    assert found.median == pytest.approx(0.001)


def test_long_texts_are_sampled_evenly():
    assert bench.sampled(64, 0.1) == list(range(1, 64, 2))
    assert bench.sampled(6, 0.001) == list(range(6))
    assert bench.sampled(512, 0.01) == list(range(8, 512, 16))
    few = bench.sampled(512, 1.0)  # a second each: four of them
    assert few == [64, 192, 320, 448]
    assert len(bench.sampled(512, 100.0)) == 2


# What bounds a phase


@pytest.mark.parametrize(
    ("flops", "moved", "resident", "seconds", "bound", "nearer"),
    [
        (1e9, 1e9, 1e9, 0.11, "memory", "memory"),  # 0.1 s of moving, 0.01 s of computing
        (1e9, 1e9, 1e9, 1.0, "overhead", "memory"),  # a tenth of what memory allows
        (50e9, 1e9, 1e9, 0.6, "compute", "compute"),  # 0.5 s of computing
        (1e6, 900_000, 900_000, 40e-6, "cache", "cache"),  # 22.5 us from the cache, of 1 MB
        (1e6, 900_000, 900_000, 400e-6, "overhead", "cache"),
    ],
)
def test_bounds_by_hand(flops, moved, resident, seconds, bound, nearer):
    found = judge(Work(flops, moved, resident), seconds, RATES, "fp32")
    assert (found.bound, found.nearer) == (bound, nearer)
    assert found.of_bandwidth == pytest.approx(moved / seconds / 10e9)
    assert found.of_products == pytest.approx(flops / seconds / 100e9)
    assert found.cache_resident == (resident < 1_000_000)


def test_an_unknown_cache_is_not_spoken_of():
    found = judge(Work(1e6, 1e6, 1e6), 1e-4, Rates(10e9, {"fp32": 100e9}), "fp32")
    assert found.cache_resident is None
    assert found.bound == "memory"


def test_rates_are_of_this_machine(monkeypatch):
    """More than nothing, and less than any machine has."""
    monkeypatch.setattr(roofline, "LARGE", 2**22)
    monkeypatch.setattr(roofline, "SIZES", (64, 128))
    monkeypatch.setattr(roofline, "last_cache", lambda device: 2**19)
    found = roofline.measure_rates(CPU, ["fp32"])
    assert 1e7 < found.bandwidth <= found.cache_bandwidth < 1e14
    assert 1e7 < found.products["fp32"] < 1e15


# The command


def test_rows_files_and_tables(tmp_path, quick, capsys):
    """Every combination once and the first again; JSON lines that parse, a plot, and the rows of a sweep compared."""
    options = {"prompt_len": [2, 4], "batch": [1, 2]}
    found = run_bench(tmp_path, "n_kv_head=2,1", **options)
    assert len(found) == 2 * 2 * 2 * 2 + 1
    keys = ("model", "batch", "prompt_len", "cache", "precision", "new_tokens")
    assert len({tuple(r[k] for k in keys) for r in found}) == 16
    assert [r["check"] for r in found] == [False] * 16 + [True]
    assert [found[-1][k] for k in keys] == [found[0][k] for k in keys]
    for r in found:
        assert r["machine"]["threads"] == torch.get_num_threads()
        assert r["machine"]["versions"]["torch"]
        assert r["rates"]["bandwidth"] == 10e9
        for p in (r["prefill"], r["decode"]):
            assert 0 < p["low"] <= p["median"] <= p["high"]
    out, err = capsys.readouterr()
    assert "x recomputing" in out and "x first model" in out
    assert "17/17" in err
    assert {p.name for p in (tmp_path / "bench").iterdir()} == {"bench.jsonl", "bench.svg", "bench.png"}
    assert "<svg" in (tmp_path / "bench" / "bench.svg").read_text("utf-8")
    by_model = {r["model"]: r["kv_bytes"] for r in found if r["cache"] and r["prompt_len"] == 4 and r["batch"] == 2}
    assert sorted(by_model.values()) == [
        cost.kv_bytes(make("n_layer=1", "dim=16", "n_head=2", f"n_kv_head={G}"), 7, 2) for G in (1, 2)
    ]


def test_files_are_replaced(tmp_path, quick):
    run_bench(tmp_path)
    assert len(run_bench(tmp_path, cache=[True])) == 2


@pytest.mark.parametrize("pos", ["rope", "learned", "sinusoidal", "none"])
def test_a_short_context_is_raised(tmp_path, quick, capsys, pos):
    (row, _) = run_bench(tmp_path, f"pos={pos}", "seq_len=5", cache=[True])
    assert (row["seq_len"], row["context"]) == (5, 7)
    out = capsys.readouterr().out
    assert "raised from 5 to 7 tokens" in out
    own = make(*TINY[1:], f"pos={pos}", "seq_len=5")
    assert (
        row["parameters"] == sum(cost.parameters(own, 200).values()) == sum(p.numel() for p in built(own).parameters())
    )
    assert f"{row['parameters']:,} parameters" in out


def test_both_precisions(tmp_path, quick):
    found = run_bench(tmp_path, precision=["fp32", "bf16"], cache=[True])
    assert [r["precision"] for r in found] == ["fp32", "bf16", "fp32"]
    assert found[0]["kv_bytes"] == 2 * found[1]["kv_bytes"]


def test_a_changed_machine_is_told():
    def row(median, low, high, check=False):
        return {"prefill": {"median": median, "low": low, "high": high}, "check": check}

    steady = [row(1.0, 0.9, 1.2), row(1.15, 1.1, 1.3, True)]
    assert "the same within" in bench_report.again_notes(steady, ("prefill",))[0]
    (said,) = bench_report.again_notes([row(1.0, 0.9, 1.2), row(1.5, 1.4, 1.6, True)], ("prefill",))
    assert "speed changed" in said and "prefill 1 s against 1.5 s, 50 % slower" in said


@pytest.mark.parametrize(("median", "told"), [(1.49, "1.49 s, 49 % slower"), (0.8, "800 ms, 25 % faster")])
def test_medians_far_apart_are_not_the_same_because_ranges_touch(median, told):
    """Timings of 0.7 to 1.6 s both times: medians of 1 and 1.49 s lie within them, and are not told as the same."""
    first, again = ({"prefill": {"median": m, "low": 0.7, "high": 1.6}, "check": m != 1} for m in (1.0, median))
    (said,) = bench_report.again_notes([first, again], ("prefill",))
    assert f"has another median: prefill 1 s against {told}" in said and "came out the same" not in said


def test_long_work_is_announced(tmp_path, monkeypatch, capsys):
    """Where the prompt's FLOPs, four times, take over ten seconds at the machine's rate (here one that is made up)."""
    for rate, said in ((1e12, False), (1e3, True)):
        monkeypatch.setattr(bench, "measure_rates", lambda *_, rate=rate: Rates(10e9, {"fp32": rate}))
        run_bench(tmp_path, cache=[True])
        err = capsys.readouterr().err
        flops = reading(make(*TINY[1:]), 200, 1, 4).flops
        assert (f": takes {duration(4 * flops / 1e3)} or longer" in err) == said and ("takes" in err) == said


def test_an_interrupted_command_keeps_its_rows(tmp_path, quick, monkeypatch, capsys):
    real, calls = bench.measure, itertools.count()

    def measure(*args):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(bench, "measure", measure)
    o = build({"prompt_len": [4], "new_tokens": 2, "repeats": 3, "output_dir": str(tmp_path)}, BenchOptions)
    assert bench.bench(o, TINY) == 130
    out, err = capsys.readouterr()
    assert len(read(tmp_path / "bench")) == 1
    assert "interrupted; 1 rows are kept" in err
    assert "first token" in out


@pytest.mark.parametrize("module", [bench, bench_train])
def test_a_command_that_runs_out_of_memory_keeps_its_rows(tmp_path, quick, monkeypatch, capsys, module):
    """The rows before it are told and drawn; then it is an error in one line."""
    real, calls = module.measure, itertools.count()

    def measure(*args, **more):
        if next(calls) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return real(*args, **more)

    monkeypatch.setattr(module, "measure", measure)
    with pytest.raises(UserError, match=r"out of memory$"):
        run_bench(tmp_path) if module is bench else run_train(tmp_path)
    (folder,) = tmp_path.iterdir()
    assert len(read(folder)) == 1
    assert {p.name for p in folder.iterdir()} == {"bench.jsonl", "bench.svg", "bench.png"}
    assert "tokens/s" in capsys.readouterr().out


def test_another_error_is_not_hidden_behind_tables(tmp_path, quick, monkeypatch, capsys):
    real, calls = bench.measure, itertools.count()
    monkeypatch.setattr(bench, "measure", lambda *args: real(*args) if next(calls) == 0 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_bench(tmp_path)
    assert not capsys.readouterr().out


@pytest.mark.parametrize("cache", [True, False])
def test_what_was_held_against_the_formula_is_told(tmp_path, quick, capsys, cache):
    run_bench(tmp_path, cache=[cache])
    told = "KV cache: the bytes of the tensors, and those read in a step, equal the formula"
    assert (told in capsys.readouterr().out) == cache


def test_a_statement_is_timed_as_it_is_compared(tmp_path, monkeypatch):
    """sweep=w_o_parameters: the MLP has what W_o leaves, so that both models have as many parameters."""
    o = build({"output_dir": str(tmp_path)}, BenchOptions)
    found = bench.subjects_of(o, ["sweep=w_o_parameters", "data=pydoc"], None)
    assert [(s.config.w_o, s.config.d_ff) for s in found] == [(True, None), (False, 576)]
    assert found[0].parameters == found[1].parameters


ERRORS = [
    ({"prompt_len": [0]}, [], "prompt_len=0: must be >= 1"),
    ({"prompt_len": []}, [], "prompt_len=[]: give at least one value"),
    ({"batch": [2, 2]}, [], "batch: 2 is given twice"),
    ({"precision": ["fp23"]}, [], "precision=fp23: must be one of auto, fp32, bf16; did you mean fp32?"),
    ({}, ["batch_size=4"], "batch_size=4: batch_size changes nothing of what is timed; write batch=..."),
    ({}, ["optim.lr=1"], "optim.lr=1: optim.lr changes nothing of what is timed; leave it out"),
    ({}, ["attn_dropout=0.1"], "attn_dropout changes nothing of what is timed"),
    ({}, ["resid_dropout=0,0.1"], "resid_dropout changes nothing of what is timed"),
    ({}, ["norm_eps=1e-6"], "norm_eps changes nothing of what is timed"),
    ({}, ["seq_len=64,128"], "seq_len=64,128: give one; prompt_len= and new_tokens= decide what is timed"),
    ({"name": "../x"}, [], "name=../x must be a folder below output_dir="),
    ({"name": "/x"}, [], "name=/x must be a folder below output_dir="),
    ({"name": ""}, [], "name= must be a folder below output_dir="),
    ({}, ["causal=false"], "causal=false: each new token changes what earlier ones see, so nothing is cached"),
    ({}, ["n_haed=4"], "unknown key n_haed; did you mean n_head?"),
    ({"batch": [10**9]}, [], "choose a smaller model, batch= or prompt_len="),
    ({"run": "nowhere"}, [], "nowhere is not a run folder"),
    ({"run": "x"}, ["dim=4"], "dim=4: run= says already which model is timed"),
]


@pytest.mark.parametrize(("options", "words", "said"), ERRORS)
def test_mistakes_are_told_before_anything_is_written(tmp_path, options, words, said):
    base = [] if "run" in options else [w for w in TINY if w.partition("=")[0] not in " ".join(words)]
    with pytest.raises(UserError) as e:
        bench.bench(build({"output_dir": str(tmp_path / "out")} | options, BenchOptions), base + words)
    assert said in str(e.value)
    assert "\n" not in str(e.value)
    assert not (tmp_path / "out").exists()


def test_a_run_is_timed_as_it_is(tmp_path, quick, monkeypatch):
    """Its sizes and vocabulary, wherever it was trained."""
    from toymha.compose import points
    from toymha.console import Console
    from toymha.stop import Stop
    from toymha.train import train_point

    small = "data=pydoc n_layer=1 dim=16 n_head=2 n_kv_head=1 seq_len=8 batch_size=2 budget.steps=1"
    small += " budget.eval_tokens=64 device=cpu threads=1 budget.sample_tokens=0 data.split=[0.98,0.01,0.01]"
    monkeypatch.chdir(tmp_path)
    run = train_point(points(small.split())[0], Console(quiet=True), Stop())
    row = run_bench(tmp_path, run=str(run.path), cache=[True])[0]
    assert row["parameters"] == run.summary["parameters"]
    assert row["kv_bytes"] == 1 * (8 + 8) * 7 * 4  # one head of 8 channels, 4 + 3 tokens


@pytest.mark.parametrize("command", ["bench", "bench train"])
def test_the_help_says_what_cannot_be_asked(command, capsys):
    """The limit is the one that is held."""
    cls = BenchOptions if command == "bench" else BenchTrainOptions
    assert main([*command.split(), "--help"]) == 0
    out = capsys.readouterr().out
    assert "3 at least" in out and "models with an encoder are not timed" in out
    assert build({"repeats": 3}, cls).repeats == 3
    with pytest.raises(UserError, match="repeats=2"):
        build({"repeats": 2}, cls)


def test_options_of_bench_that_a_training_step_has_not():
    of_bench, of_training = (keys(cls).keys() for cls in (BenchOptions, BenchTrainOptions))
    assert bench_train.OF_BENCH.keys() == of_bench - of_training


# A step of training


def test_what_each_path_keeps(tmp_path, quick):
    """Explicit attention keeps one T x T tensor a head and layer, fused none: quadratic against linear."""
    found = run_train(tmp_path, "seq_len=24,48,72")
    kept = {(r["attention"], r["seq_len"]): r for r in found[:-1]}
    for T in (24, 48, 72):
        explicit, fused = kept["explicit", T], kept["fused", T]
        assert explicit["pattern_bytes"] == 1 * 2 * 2 * T * T * 4  # layers, sequences, heads, T x T, fp32
        assert explicit["pattern_bytes_formula"] == explicit["pattern_bytes"]
        assert fused["pattern_bytes"] == fused["pattern_bytes_formula"] == 0
        for r in (explicit, fused):
            copied = 16 * 48 * 4  # W_q, W_k and W_v side by side, which the formula leaves out
            assert r["saved_bytes"] == pytest.approx(r["saved_bytes_formula"] + copied, abs=64)  # a few scalars
    for name, quadratic in (("explicit", 1 * 2 * 2 * 4), ("fused", 0)):
        low, middle, high = (kept[name, T]["saved_bytes"] for T in (24, 48, 72))
        assert high - 2 * middle + low == 2 * quadratic * 24**2
    assert (
        found[0]["step"]["flops"]
        == cost.training_flops_per_token(make(*TINY[1:], "seq_len=24", "batch_size=2"), 200) * 2 * 24
    )


def test_a_pattern_that_shapes_do_not_tell_is_that_of_the_formula(tmp_path, quick, capsys):
    """Heads of 8 channels in a context of 8: 1 layer x 2 sequences x 2 heads x 8 x 8 x 4 bytes, and a note says why."""
    found = run_train(tmp_path, "seq_len=8", attention=["explicit"])
    out = capsys.readouterr().out
    assert found[0]["pattern_bytes"] is None and "1 KiB *" in out and "?" not in out
    assert "* by the formula: where a head is as wide as the context is long" in out
    run_train(tmp_path, "seq_len=12", attention=["explicit"])
    assert "*" not in capsys.readouterr().out


def test_the_path_is_put_back():
    model = built(make())
    with pytest.raises(ZeroDivisionError), bench_train.path_of_attention(model, "explicit"):
        assert not any(block.attn.can_fuse(8, 8) for block in model.blocks)
        raise ZeroDivisionError
    assert all(block.attn.can_fuse(8, 8) and "can_fuse" not in vars(block.attn) for block in model.blocks)
    assert Attention.can_fuse is type(model.blocks[0].attn).can_fuse


def test_on_the_fused_path_attention_is_looked_at_too():
    """Whoever listens to a pattern gets it."""
    model = built(make())
    with bench_train.path_of_attention(model, "fused"):
        assert (
            attention_statistics(model, tokens(2, 16)).keys()
            == attention_statistics(built(make()), tokens(2, 16)).keys()
        )


def test_both_paths_are_the_same_step():
    """The loss and its gradients, to fp32's precision."""
    grads = []
    for name in ("explicit", "fused"):
        model = built(make("n_kv_head=2")).train()
        with bench_train.path_of_attention(model, name):
            x = tokens(T=17)
            loss_of(model, (x[:, :-1],), x[:, 1:], CPU, "fp32").backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


class Down(Optimizer):
    """Moves by the gradient itself."""

    def __init__(self, model):
        super().__init__([{"params": list(model.parameters())}])

    @torch.no_grad()
    def step(self, team=ALONE):
        for p in self.params:
            p -= p.grad


@pytest.mark.parametrize("clip", ["0.1", "null"])
def test_a_step_is_that_of_training(clip):
    """Micro-batches add up to the batch, the gradient is clipped, the weights move by it, and it is gone."""
    c = make("batch_size=4", "grad_accum=2", f"optim.clip={clip}")
    x, model, other = tokens(B=4, T=17), built(c), built(c)
    phases = list(step_by_phases(model, [Down(model)], c, Batch((x[:, :-1],), x[:, 1:], 64), "fp32", CPU, ALONE))
    assert phases == [PASSES, "clipping", "optimizer"]
    F.cross_entropy(other(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
    norm = torch.stack([p.grad.norm() for p in other.parameters()]).norm()
    assert norm > 0.2
    for a, b in zip(model.parameters(), other.parameters()):
        scale = 0.1 / norm if clip == "0.1" else 1.0
        torch.testing.assert_close(a, b - scale * b.grad, atol=1e-5, rtol=1e-4)
        assert a.grad is None


def test_training_mistakes(tmp_path):
    with pytest.raises(UserError, match=r"^attention=fuse: must be one of explicit, fused; did you mean fused\?$"):
        build({"attention": ["fuse"]}, BenchTrainOptions)
    with pytest.raises(UserError, match=r"^name=\.\./x must be a folder below output_dir=outputs$"):
        build({"name": "../x"}, BenchTrainOptions)
    o = build({"output_dir": str(tmp_path / "out")}, BenchTrainOptions)
    with pytest.raises(UserError, match=r"^norm_eps=1e-6: norm_eps changes nothing of what is timed; leave it out$"):
        bench_train.bench_train(o, [*TINY, "norm_eps=1e-6"])
    said = r"^prompt_len=32: prompt_len belongs to `toymha bench`; here write seq_len=$"
    with pytest.raises(UserError, match=said):
        bench_train.bench_train(o, [*TINY, "prompt_len=32"])
    with pytest.raises(UserError, match=r"^budget\.steps=3: budget\.steps changes nothing of what is timed"):
        bench_train.bench_train(o, [*TINY, "budget.steps=3"])
    with pytest.raises(UserError, match=r"explicit.* GiB, and cpu has .*attention=fused"):
        bench_train.bench_train(o, [*TINY, "seq_len=1000000", "batch_size=16"])
    with pytest.raises(UserError, match="on a CPU dropout of attention takes the explicit path; write attention=exp"):
        bench_train.bench_train(o, [*TINY, "attn_dropout=0.1"])
    assert not (tmp_path / "out").exists()


# Where a step goes


def anatomy_of(*words, n=1, precision="fp32"):
    c = make("batch_size=4", "budget.eval_tokens=200", *words)
    model = built(c).train()
    with Team(n) as team:
        return c, anatomy(model, make_optimizers(model, c, precision), c, precision, CPU, team, 2)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("words", ["n_kv_head=1 v_head_dim=4 mlp=swiglu", "pos=learned tie_embeddings=false"])
def test_products_of_a_step_are_those_that_are_counted(monkeypatch, words, n):
    """All of them, whichever thread they are in: by cost, three forward passes of every token."""
    monkeypatch.setattr(Attention, "can_fuse", lambda self, T, S: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: n)
    c, found = anatomy_of(*words.split(), n=n)
    products = found["products"]
    assert products["flops"] == cost.training_flops_per_token(c, VOCAB) * c.tokens_per_step
    assert products["flops_per_s"] == pytest.approx(products["flops"] / products["seconds"])


@pytest.mark.parametrize("words", [(), ("attn_dropout=0.1",), ("norm=rms", "optim=adamw")])
def test_kinds_add_up_to_the_passes(words):
    _, found = anatomy_of(*words)
    assert list(found["phases"]) == ["data", PASSES, "clipping", "optimizer", "evaluation", "logging"]
    assert min(*found["phases"].values(), *found["kinds"].values()) > -1e-9
    assert sum(found["kinds"].values()) == pytest.approx(found["phases"][PASSES])
    assert (("softmax" if words == ("attn_dropout=0.1",) else "fused attention") in found["kinds"]) and (
        {"matrix products", "normalisation", "activation", "loss", "embedding"} <= found["kinds"].keys()
    )
    assert ("dropout" in found["kinds"]) == (words == ("attn_dropout=0.1",))


def test_time_that_python_takes_is_told(monkeypatch):
    """A model that sleeps a tenth of a second in each MLP, which is far longer than all that it computes."""
    forward = GeluMLP.forward
    monkeypatch.setattr(GeluMLP, "forward", lambda self, x: [time.sleep(0.1), forward(self, x)][1])
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # on a busy machine several would wait for each other, within what they compute
    c, found = anatomy_of()
    torch.set_num_threads(before)
    assert found["phases"][PASSES] > 0.1 * c.n_layer
    assert found["kinds"]["Python, waiting"] > 0.7 * 0.1 * c.n_layer
    assert sum(found["kinds"].values()) == pytest.approx(found["phases"][PASSES])


def test_watching_leaves_no_gradient_and_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    c = make("batch_size=2")
    model = built(c).train()
    anatomy(model, make_optimizers(model, c, "fp32"), c, "fp32", CPU, ALONE, 1)
    assert not list(tmp_path.iterdir()) and model.training
    assert all(p.grad is None for p in model.parameters())


def test_the_table_of_a_step_has_all_its_parts(tmp_path, quick, capsys):
    rows = run_train(tmp_path, "seq_len=8,16")
    out = capsys.readouterr().out
    table = out.partition("where a step goes")[2].partition("\n\n")[0]
    for name in (PASSES, "matrix products", "normalisation", "optimizer", "evaluation", "products alone", "their rate"):
        assert name in table
    assert rows[-1]["check"] and rows[-1]["anatomy"] is None and rows[0]["anatomy"]["products"]["flops"] > 0


def test_parts_of_a_step_are_shares_of_their_sum():
    """Evaluation and logging stand beside it; a column is named by what tells it from the others."""
    phases = {"data": 0.1, PASSES: 0.6, "clipping": 0.1, "optimizer": 0.2, "evaluation": 0.05, "logging": 0.0}
    one = {"phases": phases, "kinds": {"matrix products": 0.6}, "products": {"seconds": 0.3, "flops_per_s": 2e9}}
    rows = [{"model": f"n_layer=1,n_kv_head={g},dim=64", "seq_len": 8, "anatomy": one} for g in (8, 2)]
    table = train_report.anatomy_table(rows, {"model": "model", "seq_len": "context"})
    assert table[0] == ["where a step goes", "n_kv_head=8 8", "n_kv_head=2 8"]
    shares = {line[0].strip(): line[1].split(" s ")[-1].split(" ms ")[-1].strip() for line in table[1:-1]}
    assert shares["together"] == "100 %" and shares[PASSES] == "60 %" and shares["beside: evaluation"] == "5.0 %"
    assert shares["products alone"] == "30 %"
    assert train_report.shorter(["a=1", "a=1"]) == ["a=1", "a=1"] and train_report.shorter(["x", "x,a=1"]) == [
        "default",
        "a=1",
    ]


def test_nothing_is_left_where_nothing_was_measured(tmp_path, quick, monkeypatch, capsys):
    """Interrupted in the first row: no folder. One that cannot be made is one line, before anything is measured."""

    def interrupt(*args, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_train, "measure", interrupt)
    o = build({"output_dir": str(tmp_path), "device": "cpu"}, BenchTrainOptions)
    assert bench_train.bench_train(o, [*TINY, "batch_size=2"]) == 130 and not list(tmp_path.iterdir())
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(bench, "measure_rates", interrupt)
    with pytest.raises(UserError, match=r"cannot be written: .*; choose another output_dir= or name="):
        run_bench(tmp_path / "file")
