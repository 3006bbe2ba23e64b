"""`toymha bench train`: a step of training by the two paths of attention, and the T x T tensors that one of them keeps.

B batch, T positions, H heads, L layers, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from toymha import cost
from toymha.batches import Batch
from toymha.config import MODEL_KEYS, Config
from toymha.device import pick_precision, set_up
from toymha.model.attention import Attention
from toymha.model.gpt import GPT
from toymha.optim import make_optimizers
from toymha.options import BenchTrainOptions
from toymha.schema import UserError
from toymha.seeds import stream
from toymha.subjects import check_elsewhere, check_words, described
from toymha.timing.anatomy import anatomy, step_by_phases
from toymha.timing.bench import refuse_encoders, say, sized
from toymha.timing.bench_plot import training_plot
from toymha.timing.bench_report import Results, make_folder
from toymha.timing.machine import check_room, facts, memory_told, timed
from toymha.timing.roofline import STORED, Rates, measure_rates
from toymha.timing.train_report import in_short, training_text
from toymha.train import loss_of, team_for

WARM_UP = 2  # steps that are not counted: the first also makes the optimizer's moments
# That change a step; a norm's epsilon is another number in the same place.
TIMED = {*MODEL_KEYS, "seq_len", "batch_size", "grad_accum", "optim"} - {"norm_eps"}

OF_BENCH = {  # its options -> what to write here
    "prompt_len": "write seq_len=",
    "batch": "write batch_size=",
    "new_tokens": "nothing is decoded",
    "cache": "nothing is cached",
    "run": "write the keys of the model",
}


@dataclass(frozen=True)
class Case:
    """One row. `label`: the model's, with what else was asked for."""

    label: str
    config: Config
    vocab_size: int
    attention: str
    precision: str

    @property
    def rows(self) -> int:
        """Sequences that pass at once."""
        return self.config.batch_size // self.config.grad_accum

    def formula(self) -> dict[str, int]:
        """Bytes by part that the sequences of one pass keep for the backward pass, by cost.activations."""
        c, number = self.config, cost.BYTES[self.precision]
        parts = cost.activations(c, self.vocab_size, c.seq_len, number, self.attention == "explicit")
        return {part: self.rows * size for part, size in parts.items()}

    def __str__(self) -> str:
        return f"{self.label}, context {self.config.seq_len}, {self.attention}, {self.precision}"


def bench_train(o: BenchTrainOptions, words: list[str], extra: Path | None = None) -> int:
    """`toymha bench train`. `words`: keys of `train` (seq_len=64,128,256); `extra`: the user's own configs.

    Prints three tables and writes bench.jsonl, bench.svg and bench.png. The exit status: 130 where it was interrupted,
    which keeps the rows that were finished. Raises UserError, before anything is written, for what cannot be timed.
    """
    check_elsewhere(words, OF_BENCH, "bench")
    check_words(words, TIMED, "of what is timed", {})
    models = sized(described(words, extra).points)
    refuse_encoders(models)
    device, _ = set_up(replace(models[0][1], device=o.device, threads=o.threads, precision="fp32"))
    precisions = list(dict.fromkeys(pick_precision(p, device) for p in o.precision))
    cases = [
        Case(without_length(label), c, V, attention, precision)
        for (label, c, V), precision, attention in itertools.product(models, precisions, o.attention)
    ]
    for case in cases:
        check(case, device)
    make_folder(Path(o.output_dir) / o.name)
    say(f"measuring what {device} can do")
    rates = measure_rates(device, precisions)
    with Results(Path(o.output_dir) / o.name, facts(device), rates, training_text, training_plot) as out:
        for i, case in enumerate([*cases, cases[0]]):  # the first again: whether the machine is still as fast
            with memory_told(str(case)):
                row = out.add(measure(case, o.repeats, device, rates, check=i == len(cases)))
            say(f"{i + 1}/{len(cases) + 1}  {case}: {in_short(row)}")
    return out.status


def without_length(label: str) -> str:
    """The label of a setting less its context, which has a column of its own."""
    return ",".join(part for part in label.split(",") if not part.startswith("seq_len=")) or "default"


def check(case: Case, device: torch.device) -> None:
    """Raises UserError for a step that this machine has no room for."""
    weights = 4 * STORED * sum(cost.parameters(case.config, case.vocab_size).values())  # with gradients and moments
    way_out = "choose a smaller batch_size= or seq_len=, or attention=fused"
    check_room(device, weights + sum(case.formula().values()), str(case), way_out)
    if case.config.attn_dropout and case.attention == "fused" and device.type == "cpu":
        raise UserError(f"{case}: on a CPU dropout of attention takes the explicit path; write attention=explicit")


def measure(case: Case, repeats: int, device: torch.device, rates: Rates, check: bool) -> dict[str, Any]:
    """One row, as numbers: `step`, what is kept from the forward pass until the backward pass has used it, and, unless
    it is a row that was measured before, where a step goes."""
    c, model = case.config, GPT(case.config, case.vocab_size).to(device).train()
    V = model.embed.num_embeddings
    idx_BT = torch.randint(V, (c.batch_size, c.seq_len + 1), generator=stream(0, "bench")).to(device)
    batch = Batch((idx_BT[:, :-1],), idx_BT[:, 1:], c.tokens_per_step)
    with path_of_attention(model, case.attention), team_for(c, device, model) as team:
        optimizers = make_optimizers(model, c, case.precision)
        inputs, y_BT, _, _ = next(batch.parts(c.grad_accum, device))
        kept = saved(model, case.rows, lambda: loss_of(model, inputs, y_BT, device, case.precision))
        peak = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        step = partial(step_by_phases, model, optimizers, c, batch, case.precision, device, team)
        timing = timed(lambda: list(step()), repeats, device, WARM_UP)
        if device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device)
        parts = None if check else anatomy(model, optimizers, c, case.precision, device, team, timing.timings)
    flops = cost.training_flops_per_token(c, case.vocab_size) * c.tokens_per_step
    numbers = {"tokens_per_s": c.tokens_per_step / timing.median, "flops": flops, "flops_per_s": flops / timing.median}
    numbers["of_products"] = numbers["flops_per_s"] / rates.products[case.precision]
    formula = case.formula()
    return {
        "model": case.label,
        "parameters": sum(cost.parameters(c, case.vocab_size).values()),
        **{k: getattr(case, k) for k in ("attention", "precision")},
        "batch": c.batch_size,
        "grad_accum": c.grad_accum,
        "seq_len": c.seq_len,
        "dropout": bool(c.attn_dropout or c.resid_dropout),
        "step": dataclasses.asdict(timing) | numbers,
        "saved_bytes": kept.bytes,
        "saved_bytes_formula": sum(formula.values()),
        "pattern_bytes": kept.pattern_bytes,
        "pattern_bytes_formula": formula["pattern"],
        "peak_bytes": peak,
        "anatomy": parts,
        "check": check,
    }


@contextlib.contextmanager
def path_of_attention(model: nn.Module, name: str) -> Iterator[None]:
    """`explicit` or `fused` attention in every layer; afterwards it is chosen as before."""
    layers = [m for m in model.modules() if isinstance(m, Attention)]
    for layer in layers:
        vars(layer)["can_fuse"] = lambda T, S, layer=layer: name == "fused" and not layer.tapped
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["can_fuse"]


@dataclass(frozen=True)
class Kept:
    """`bytes` of all memory that autograd keeps; `pattern_bytes`: those of its T x T tensors, null where a head is as
    wide as the context is long, so that shapes do not tell."""

    bytes: int
    pattern_bytes: int | None


def saved(model: GPT, B: int, forward: Callable[[], Tensor]) -> Kept:
    """What autograd keeps of a pass over B sequences of seq_len tokens, each memory once, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in itertools.chain(model.parameters(), model.buffers())}
    sizes: dict[int, int] = {}
    square: set[int] = set()
    layers, T = [m for m in model.modules() if isinstance(m, Attention)], model.seq_len
    patterns = {(B, m.H, T, T) for m in layers} | {(B * m.H, T, T) for m in layers if m.H > 1}
    alive: list[Tensor] = []  # so that no address is used again while it is counted

    def note(x: Tensor) -> Tensor:
        memory = x.untyped_storage()
        if memory.data_ptr() not in weights:
            sizes[memory.data_ptr()] = memory.nbytes()
            alive.append(x)
            if x.shape in patterns:
                square.add(memory.data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        forward()
    told = not any(T in (m.D, m.Dv) for m in layers)
    return Kept(sum(sizes.values()), sum(sizes[at] for at in square) if told else None)
