"""Where a step of training goes, and how fast its matrix products would be alone.

Phases are timed from outside, one after the other. Forward and backward pass are then divided by kinds of operations
as torch's profiler sees them in all threads; what is left of their time is Python, and threads that wait.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent

from toymha.batches import Batch, draw
from toymha.config import Config
from toymha.data.corpus import Split
from toymha.device import arithmetic, number_type
from toymha.evaluate import attention_statistics, evaluate, looked_at
from toymha.log import Log
from toymha.model.gpt import GPT
from toymha.optim import Optimizer
from toymha.runs import Run
from toymha.seeds import stream
from toymha.team import Team
from toymha.timing.machine import synchronize
from toymha.timing.train_report import PASSES, PRODUCTS
from toymha.train import backward, clipped, move

REST = "Python, waiting"
KINDS = {  # operations as torch names them -> what they are for; those of both passes
    PRODUCTS: ("mm", "addmm", "bmm", "baddbmm"),
    "fused attention": (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_cudnn_attention_backward",
    ),
    "softmax": ("_softmax", "_softmax_backward_data"),
    "normalisation": (
        "native_layer_norm",
        "native_layer_norm_backward",
        "rms_norm",
        "_fused_rms_norm",
        "_fused_rms_norm_backward",
    ),
    "activation": ("gelu", "gelu_backward", "silu", "silu_backward"),
    "loss": ("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward"),
    "embedding": ("embedding", "embedding_dense_backward"),
    "dropout": ("random_", "ge", "bernoulli_", "native_dropout", "native_dropout_backward"),
}
KIND_OF = {f"aten::{name}": kind for kind, names in KINDS.items() for name in names}
OTHER = "by element, copies"  # additions, scaling, rotation of positions, masks, casts, laying tensors side by side
BEST_OF = 3
TEXT = 100_000  # random tokens that batches are drawn from, and evaluated


def anatomy(
    model: GPT, optimizers: list[Optimizer], c: Config, precision: str, device: torch.device, team: Team, repeats: int
) -> dict[str, Any]:
    """`phases`: seconds of a step's parts, medians of `repeats` steps, and evaluation and logging by their share of a
    step, as often as the budget has them (samples and checkpoints are left out). `kinds`: seconds of the forward and
    backward pass, by kind. `products`: FLOPs of a step's products, the seconds of the same products alone, and the
    FLOPs a second of these.
    """
    V = model.embed.num_embeddings
    text = Split(torch.randint(V, (TEXT + c.seq_len,), generator=stream(0, "bench")), TEXT, TEXT)
    phases = timed_phases(model, optimizers, text, c, precision, device, team, repeats)
    batch = draw(model, text, c.seq_len, c.batch_size, stream(0, "bench"))
    watched = [profiled(model, batch, c, precision, device, team) for _ in range(1 + BEST_OF)][1:]
    events, whole = min(watched, key=lambda pair: pair[1])  # the one that was disturbed least
    kinds = {kind: seconds / team.n for kind, seconds in by_kind(events, device).items()}
    known, passes = sum(kinds.values()), phases[PASSES]
    if known > passes:  # it was disturbed all the same: then by shares of it
        kinds = {kind: seconds * passes / max(whole, known) for kind, seconds in kinds.items()}
    kinds[REST] = max(0.0, passes - sum(kinds.values()))
    return {
        "phases": phases | looking(model, text, c, precision, device, team),
        "kinds": kinds,
        "products": alone(events, precision, device, team),
    }


def step_by_phases(
    model: GPT, optimizers: list[Optimizer], c: Config, batch: Batch, precision: str, device: torch.device, team: Team
) -> Iterator[str]:
    """What `train` does with one batch; the name of each part when it is done."""
    backward(model, batch, c.grad_accum, device, precision, team=team)
    yield PASSES
    clipped(model, c, team)
    yield "clipping"
    move(optimizers, team)
    yield "optimizer"


def timed_phases(
    model: GPT,
    optimizers: list[Optimizer],
    text: Split,
    c: Config,
    precision: str,
    device: torch.device,
    team: Team,
    repeats: int,
) -> dict[str, float]:
    """The parts of what `train` does for one step, in its order."""
    found: dict[str, list[float]] = {}
    began = 0.0

    def until_now(phase: str) -> None:
        nonlocal began
        synchronize(device)
        now = time.perf_counter()
        found.setdefault(phase, []).append(now - began)
        began = now

    for i in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        batch = draw(model, text, c.seq_len, c.batch_size, stream(0, "batch", i))
        until_now("data")
        for phase in step_by_phases(model, optimizers, c, batch, precision, device, team):
            until_now(phase)
    return {phase: statistics.median(seconds) for phase, seconds in found.items()}


def looking(model: GPT, text: Split, c: Config, precision: str, device: torch.device, team: Team) -> dict[str, float]:
    """Seconds a step of evaluating and of logging, each as often as the budget says."""
    for _ in range(2):  # the first of them warms up
        began = time.perf_counter()
        with arithmetic(precision, device):
            score = evaluate(model, text, c.seq_len, max_tokens=c.budget.eval_tokens, team=team)
        row: dict[str, float | str] = {"loss/val": score.loss, "ppl/val": score.ppl}
        row |= attention_statistics(model, *(x.to(device) for x in looked_at(model, text, c.seq_len)))
        evaluation = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        run = Run.open(Path(folder) / "run", replace(c, output_dir=folder), "", {})
        try:
            with Log(run, 0) as log:
                began = time.perf_counter()
                log.row(1, row)
                log.flush()
                wide = time.perf_counter() - began
                log.row(2, {"loss/train": 1.0, "lr": 1.0, "grad_norm": 1.0, "tokens_per_s": 1.0})
                narrow = time.perf_counter() - began - wide
        finally:
            run.release()
    b = c.budget
    return {"evaluation": (evaluation + wide) / b.eval_every, "logging": narrow / b.log_every}


def profiled(
    model: GPT, batch: Batch, c: Config, precision: str, device: torch.device, team: Team
) -> tuple[list[FunctionEvent], float]:
    """What torch did in one forward and backward pass, in all threads, and the seconds of it."""
    from torch._C._profiler import _ExperimentalConfig  # the public profiler sees the calling thread alone without it
    from torch.profiler import ProfilerActivity, profile  # seldom needed, and slow to import

    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it writes of itself to the terminal
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(activities=activities, record_shapes=True, experimental_config=everywhere) as seen:
        began = time.perf_counter()
        backward(model, batch, c.grad_accum, device, precision, team=team)
        synchronize(device)
        seconds = time.perf_counter() - began
    for p in model.parameters():
        p.grad = None
    return list(seen.events()), seconds


def by_kind(events: list[FunctionEvent], device: torch.device) -> dict[str, float]:
    """Seconds a step, added up over the threads; on CUDA by its own clock. Small operations inside a named one count as
    that."""
    found: dict[str, float] = dict.fromkeys([*KINDS, OTHER], 0.0)
    for e in events:
        kind: str | None = None
        parent: FunctionEvent | None = e
        while parent is not None and kind is None:
            kind, parent = KIND_OF.get(parent.name), parent.cpu_parent
        if kind is None and not e.name.startswith("aten::"):
            continue  # autograd's own bookkeeping
        spent = e.self_device_time_total if device.type == "cuda" else e.self_cpu_time_total
        found[kind or OTHER] += spent / 1e6
    return {kind: seconds for kind, seconds in found.items() if seconds}


def alone(events: list[FunctionEvent], precision: str, device: torch.device, team: Team) -> dict[str, float]:
    """The matrix products of a step and nothing else, of contiguous operands, each thread those that it had."""
    by_thread: dict[int, Counter[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
    for e in events:
        if KIND_OF.get(e.name) == PRODUCTS:
            shapes: list[list[int]] = e.input_shapes  # type: ignore[assignment]  # of each argument
            a, b = [tuple(shape) for shape in shapes if len(shape) >= 2][-2:]
            by_thread.setdefault(e.thread, Counter())[a, b] += 1
    dtype = number_type(precision)
    operands = {
        pair: tuple(torch.rand(shape, generator=stream(0, "bench")).to(device, dtype) for shape in pair)
        for todo in by_thread.values()
        for pair in todo
    }

    def work(todo: Counter[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
        for pair, times in todo.items():
            a, b = operands[pair]
            out = torch.empty(*a.shape[:-1], b.shape[-1], dtype=dtype, device=device)
            for _ in range(times):
                torch.matmul(a, b, out=out)

    seconds = []
    with torch.inference_mode():
        for _ in range(1 + BEST_OF):
            synchronize(device)
            began = time.perf_counter()
            list(team.map(work, by_thread.values()))
            synchronize(device)
            seconds.append(time.perf_counter() - began)
    flops = sum(n * product_flops(*pair) for todo in by_thread.values() for pair, n in todo.items())
    return {"flops": flops, "seconds": min(seconds[1:]), "flops_per_s": flops / min(seconds[1:])}


def product_flops(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """2 a multiply-add of (..., M, K) times (..., K, N)."""
    return 2 * math.prod(a) * b[-1]
