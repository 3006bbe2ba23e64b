"""How fast a model reads and writes, measured: `toymha bench`.

B batch, T positions, P tokens of the prompt, S tokens of context, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toymha import cost, runs
from toymha.compose import Point
from toymha.config import MODEL_KEYS, Config
from toymha.console import duration
from toymha.data import tokenizer
from toymha.data.corpus import load_corpus
from toymha.device import arithmetic, pick_precision, set_up
from toymha.model.cache import KVCache
from toymha.model.gpt import GPT
from toymha.options import BenchOptions
from toymha.runs import Run
from toymha.schema import UserError
from toymha.seeds import stream
from toymha.subjects import check_words, described
from toymha.timing.bench_plot import inference_plot
from toymha.timing.bench_report import Results, in_short, inference_text, make_folder
from toymha.timing.machine import LEAST, PATIENCE, Timing, check_room, facts, memory_told, timed
from toymha.timing.roofline import STORED, Rates, Work, decoding, judge, measure_rates, reading
from toymha.timing.speed import decoding_pass, next_token

# The keys that change how long inference takes: nothing is dropped, and an epsilon is another number in the same place.
TIMED = {*MODEL_KEYS, "seq_len"} - {"attn_dropout", "resid_dropout", "norm_eps"}
MOST_SAMPLED = 32  # of the tokens that are made without a cache so many are timed, evenly spaced
LONGEST_PASS = 4.0  # seconds that they may take together; where they would take longer, fewer are timed


# `toymha bench`: what is timed


@dataclass(frozen=True)
class Subject:
    """A model that is timed: its configuration, with a context that is long enough, and what the text decides."""

    label: str
    config: Config
    vocab_size: int
    seq_len: int  # its own

    @property
    def parameters(self) -> int:
        """Those of its own context: with learned positions, the longer one has more, which are not the model's."""
        return sum(cost.parameters(replace(self.config, seq_len=self.seq_len), self.vocab_size).values())


@dataclass(frozen=True)
class Case:
    """One row. `cache`: whether keys and values are kept, or the whole text is read again for each token."""

    subject: Subject
    precision: str
    batch: int
    prompt_len: int
    new_tokens: int
    cache: bool

    @property
    def number(self) -> int:
        """Bytes of a key's or value's number, and of a logit's."""
        return 2 if self.precision == "bf16" else 4

    @property
    def kv_bytes(self) -> int:
        """Of a cache with room for the prompt and all new tokens."""
        return cost.kv_bytes(self.subject.config, self.prompt_len + self.new_tokens, self.batch, self.number)

    def __str__(self) -> str:
        kept = "with" if self.cache else "without"
        return f"{self.subject.label}, {self.precision}, batch {self.batch}, prompt {self.prompt_len}, {kept} a cache"


def bench(o: BenchOptions, words: list[str], extra: Path | None = None) -> int:
    """`toymha bench`. `words`: the keys of `train` that describe the models; `extra`: the user's own configs.

    Prints two tables and writes bench.jsonl, bench.svg and bench.png. The exit status: 130 where it was interrupted,
    which keeps the rows that were finished. Raises UserError, before anything is written, for what cannot be timed.
    """
    subjects = subjects_of(o, words, extra)
    device, _ = set_up(replace(subjects[0].config, device=o.device, threads=o.threads, precision="fp32"))
    precisions = list(dict.fromkeys(pick_precision(p, device) for p in o.precision))
    cases = [
        Case(subject, precision, batch, prompt_len, o.new_tokens, cache)
        for precision, batch, prompt_len, cache, subject in itertools.product(
            precisions,
            o.batch,
            o.prompt_len,
            o.cache,
            subjects,  # models that are compared follow each other
        )
    ]
    weights = STORED * sum(sum(cost.parameters(s.config, s.vocab_size).values()) for s in subjects)
    for case in cases:
        check(case, weights, device)
    make_folder(Path(o.output_dir) / o.name)
    say(f"measuring what {device} can do")
    rates = measure_rates(device, precisions)
    with Results(Path(o.output_dir) / o.name, facts(device), rates, inference_text, inference_plot) as out:
        models = {s.label: GPT(s.config, s.vocab_size).to(device).eval() for s in subjects}
        for i, case in enumerate([*cases, cases[0]]):  # the first again: whether the machine is still as fast
            if (expected := at_least(case, rates)) > PATIENCE:
                say(f"{i + 1}/{len(cases) + 1}  {case}: takes {duration(expected)} or longer")
            with memory_told(str(case)):
                row = out.add(
                    measure(models[case.subject.label], case, o.repeats, device, rates) | {"check": i == len(cases)}
                )
            say(f"{i + 1}/{len(cases) + 1}  {case}: {in_short(row)}")
    return out.status


def subjects_of(o: BenchOptions, words: list[str], extra: Path | None) -> list[Subject]:
    """The models that `run=` or the words describe, each once, with room for the longest prompt and its new tokens.

    No weight changes how fast a model is, so that those of a run are not read, and positions that a model has not
    learned are as good as others. Raises UserError.
    """
    needed = max(o.prompt_len) + o.new_tokens
    if o.run is not None:
        if words:
            raise UserError(f"{words[0]}: run= says already which model is timed; leave out one of the two")
        run = Run.load(o.run)
        size = tokenizer.from_dict(runs.read_json(run.path / "tokenizer.json")).vocab_size
        found = [(run.info["label"], run.config, size)]
    else:
        check_words(words, TIMED, "of what is timed", {"batch_size": "write batch=..."})
        points = described(words, extra).points
        if len(lengths := {p.config.seq_len: None for p in points if "seq_len" in p.swept}) > 1:
            asked = f"seq_len={','.join(map(str, lengths))}"
            raise UserError(f"{asked}: give one; prompt_len= and new_tokens= decide what is timed, and it is raised")
        found = sized(points)
    refuse_encoders(found)
    return [Subject(label, replace(c, seq_len=max(c.seq_len, needed)), size, c.seq_len) for label, c, size in found]


def refuse_encoders(found: Sequence[tuple[str, Config, int]]) -> None:
    """Raises UserError where a model has an encoder."""
    for label, c, _ in found:
        if c.n_encoder_layer is not None:
            raise UserError(f"{label}: models with an encoder are not timed; choose one without n_encoder_layer")


def sized(points: Sequence[Point]) -> list[tuple[str, Config, int]]:
    """Label, configuration and vocabulary of each model."""
    sizes: dict[str, int] = {}
    found = {p.label: p.config for p in points}
    for c in found.values():
        if str(c.data) not in sizes:
            sizes[str(c.data)] = c.vocab_size or load_corpus(c.data).tokenizer.vocab_size
    return [(label, c, c.vocab_size or sizes[str(c.data)]) for label, c in found.items()]


def check(case: Case, weights: int, device: torch.device) -> None:
    """Raises UserError for a case that cannot be timed. `weights`: bytes of those of all models."""
    c = case.subject.config
    if case.cache and not c.causal:
        raise UserError("causal=false: each new token changes what earlier ones see, so nothing is cached; cache=false")
    check_room(device, weights + case.kv_bytes, str(case), "choose a smaller model, batch= or prompt_len=")


def at_least(case: Case, rates: Rates) -> float:
    """Seconds that reading the prompt takes at this machine's rate, as often as it is done."""
    work = reading(case.subject.config, case.subject.vocab_size, case.batch, case.prompt_len)
    return (1 + LEAST) * work.flops / rates.products[case.precision]


# How it is timed


@torch.inference_mode()
def measure(model: GPT, case: Case, repeats: int, device: torch.device, rates: Rates) -> dict[str, Any]:
    """One row, as numbers. `prefill`: until the first new token, which is reading the prompt and the logits of its last
    position; `decode`: each token after it, without the prefill.

    Raises RuntimeError where the cache's real tensors are not those that the formula foretells.
    """
    c, V, B, P = case.subject.config, case.subject.vocab_size, case.batch, case.prompt_len
    shape = (B, P + case.new_tokens)
    idx_BT = torch.randint(model.embed.num_embeddings, shape, generator=stream(0, "bench")).to(device)
    kept: dict[str, Any] = {"kv_bytes": None, "kv_bytes_formula": case.kv_bytes if case.cache else None}
    with arithmetic(case.precision, device):
        if case.cache:
            cache = model.make_cache(B, P + case.new_tokens)
            prefill, decode, at = with_cache(model, cache, idx_BT, P, repeats, device)
            kept |= {"kv_bytes": cache.nbytes, "kv_bytes_read": read_in_a_step(model, cache, idx_BT[:, -1:])}
            if set(kept.values()) != {case.kv_bytes}:
                raise RuntimeError(f"{case}: keys and values have not the size that cost.kv_bytes gives: {kept}")
        else:
            prefill, decode, at = without_cache(model, idx_BT, P, repeats, device)
    works = [(decoding if case.cache else reading)(c, V, B, S, case.number) for S in at]
    about = {"model": case.subject.label, "parameters": case.subject.parameters, "seq_len": case.subject.seq_len}
    return {
        **about,
        "context": c.seq_len,
        **{k: getattr(case, k) for k in ("precision", "batch", "prompt_len", "new_tokens", "cache")},
        "prefill": phase(prefill, reading(c, V, B, P, case.number), B * P, rates, case.precision),
        "decode": phase(decode, mean_of(works), B, rates, case.precision) | {"steps_timed": len(at)},
        **kept,
    }


def with_cache(
    model: GPT, cache: KVCache, idx_BT: Tensor, P: int, repeats: int, device: torch.device
) -> tuple[Timing, Timing, list[int]]:
    """Seconds of the prefill, seconds of one token after it, and the contexts S of the tokens that were timed."""
    steps = idx_BT.shape[1] - P

    def prefill() -> None:
        cache.truncate(0)
        next_token(model, idx_BT[:, :P], cache)

    decode = decoding_pass(model, cache, idx_BT[:, P : P + 1], P, steps)
    return (
        timed(prefill, repeats, device),
        timed(decode, repeats, device).over(steps),
        [P + 1 + i for i in range(steps)],
    )


def without_cache(
    model: GPT, idx_BT: Tensor, P: int, repeats: int, device: torch.device
) -> tuple[Timing, Timing, list[int]]:
    """The same where each token reads the whole text before it again; of many tokens some are timed."""
    prefill = timed(lambda: next_token(model, idx_BT[:, :P]), repeats, device)
    at = [P + 1 + i for i in sampled(idx_BT.shape[1] - P, prefill.median)]
    decode = timed(lambda: [next_token(model, idx_BT[:, :S]) for S in at], repeats, device)
    return prefill, decode.over(len(at)), at


def sampled(steps: int, seconds: float) -> list[int]:
    """Which of so many steps are timed: all, or evenly spaced ones. `seconds`: what the first takes, about."""
    n = max(2, min(steps, MOST_SAMPLED, int(LONGEST_PASS / max(seconds, 1e-9))))
    return [(2 * i + 1) * steps // (2 * n) for i in range(n)]


def read_in_a_step(model: GPT, cache: KVCache, idx_B1: Tensor) -> int:
    """Bytes of the keys and values that attention is given in the last step that the cache has room for."""
    seen: list[int] = []
    cache.truncate(cache.length - 1)
    for layer in cache.layers:

        def extend(*new: Tensor, real: Any = layer.extend) -> tuple[Tensor, Tensor]:
            k_BGSD, v_BGSD = real(*new)
            seen.append(k_BGSD.nbytes + v_BGSD.nbytes)
            return k_BGSD, v_BGSD

        vars(layer)["extend"] = extend
    try:
        next_token(model, idx_B1, cache)
    finally:
        for layer in cache.layers:
            del vars(layer)["extend"]
    return sum(seen)


def mean_of(works: list[Work]) -> Work:
    return Work(*(statistics.fmean(getattr(w, f.name) for w in works) for f in dataclasses.fields(Work)))


def phase(timing: Timing, work: Work, tokens: int, rates: Rates, precision: str) -> dict[str, Any]:
    """What is known of a prefill, a token or a training step that took so long. `tokens`: how many it read."""
    found = dataclasses.asdict(timing) | {"tokens_per_s": tokens / timing.median}
    found |= dataclasses.asdict(work) | {"intensity": work.intensity}
    return found | dataclasses.asdict(judge(work, timing.median, rates, precision))


def say(text: str) -> None:
    print(f"toymha: {text}", file=sys.stderr, flush=True)
