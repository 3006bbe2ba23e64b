"""trace.html and trace.txt: the generation loop made visible, step by step. The same steps give the same bytes.

What a step read, what the cache held, which tokens could have come and which came, and where each head looked back to.
A position counts all tokens, the prompt's first; step n chooses the token at position P + n, where P is the prompt's
length, and its query is the token before that one. H heads of a layer, S visible tokens, R rows of cells, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from toymha import cost, runs
from toymha.config import Config
from toymha.generation import sampling
from toymha.generation.sampling import Rules
from toymha.generation.trace_page import facts_of
from toymha.generation.trace_text import text_of
from toymha.page import render
from toymha.schema import word

if TYPE_CHECKING:
    from toymha.generation.decoding import Step
    from toymha.opened import Opened
    from toymha.options import GenerateOptions

MOST_STEPS = 200  # in page and text
TOP = 10  # candidates of a step
LOOKS = 6  # tokens that a step looks at most, in words
LONGEST = 300  # letters of the prompt above the steps


@dataclass(frozen=True)
class Candidate:
    """A token that could have come. before: softmax of the raw logits; after: of what penalty, temperature and filters
    made of them, None where a filter removed it; by: which."""

    label: str
    before: float
    after: float | None
    chosen: bool = False
    by: str = ""


@dataclass(frozen=True)
class Look:
    """A token that is looked back at."""

    label: str
    position: int
    weight: float


@dataclass(frozen=True)
class View:
    """What page and text say of one step."""

    number: int
    phase: str
    label: str  # of the chosen token
    facts: list[tuple[str, str]]
    candidates: list[Candidate]  # the likeliest before or after, the likeliest before first
    others: Candidate | None  # all others together
    looks: list[Look]  # where the mean over all heads looks most
    strongest: list[Look]  # where each row does
    rows_RS: np.ndarray | None  # weights over the visible tokens, see `row_names`; None: not recorded
    start: int  # position of the first visible token
    query: int  # position of the last


@dataclass(frozen=True)
class Trace:
    """All that page and text say."""

    run: str
    title: str
    says: str
    about: list[tuple[str, str]]
    notes: list[str]
    rules: str
    prompt: int  # P
    labels: list[str]  # of every token
    breaks: list[bool]  # whether a line ends with it
    rows: list[str]  # of cells, see `row_names`
    views: list[View]
    read: list[int]  # tokens that each step read
    again: list[int]  # that it would have read without a cache
    held: list[int]  # bytes in the cache after it


def write_trace(
    opened: Opened, o: GenerateOptions, prompt_ids: list[int], steps: list[Step], folder: Path
) -> list[Path]:
    """trace.html and trace.txt of one sample, in a folder which is made where it is missing; their paths.

    `prompt_ids`: what the model began from. `steps`: at least one; of more than 200 the first are shown. Raises
    ValueError for attention over other tokens than those that were visible.
    """
    trace = trace_of(opened, o, prompt_ids, steps)
    page = render("trace.html", **facts_of(trace))
    folder.mkdir(parents=True, exist_ok=True)
    runs.write_text(folder / "trace.html", page)
    runs.write_text(folder / "trace.txt", text_of(trace))
    return [folder / "trace.html", folder / "trace.txt"]


def trace_of(opened: Opened, o: GenerateOptions, prompt_ids: Sequence[int], steps: Sequence[Step]) -> Trace:
    """What there is to say of these steps."""
    tokenizer, P, shown = opened.corpus.tokenizer, len(prompt_ids), steps[:MOST_STEPS]
    names = tokenizer.labels()
    ids = [*prompt_ids, *(s.token for s in shown)]
    labels = [names[i] for i in ids]
    return Trace(
        run=o.run,
        title=f"{_count(len(steps))} after a prompt of {P:,}",
        says=_says(steps, P, o),
        about=_about(opened.config, o, labels[:P], len(names), steps),
        notes=_notes(steps, opened.config),
        rules=rules(o),
        prompt=P,
        labels=labels,
        breaks=[tokenizer.token_bytes(i).endswith(b"\n") for i in ids],
        rows=row_names(opened.config),
        views=[_view(s, steps[i - 1] if i else None, ids, names, P, o) for i, s in enumerate(shown)],
        read=[s.new for s in shown],
        again=[_again(s, P + s.number, o) for s in shown],
        held=[s.cache_bytes for s in shown],
    )


def _count(n: int, what: str = "token") -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


# One step


def _view(s: Step, before: Step | None, ids: Sequence[int], names: Sequence[str], P: int, o: GenerateOptions) -> View:
    start, query = s.context_start, P + s.number - 1
    rows_RS = _rows(s)
    if rows_RS is not None and rows_RS.shape[1] != query + 1 - start:
        seen = f"{query + 1 - start} tokens from position {start} on"
        raise ValueError(f"step {s.number}: {rows_RS.shape[1]} weights a head, and {seen} are visible")

    def look(row: np.ndarray, i: int) -> Look:
        return Look(names[ids[start + i]], start + i, float(row[i]))

    candidates, others = candidates_of(s, names, stages_of(s, Rules.of(o), ids[: query + 1]))
    left = int(s.kept_V.isfinite().sum())
    return View(
        number=s.number,
        phase=s.phase,
        label=names[s.token],
        facts=[
            *_facts(s, before, names[ids[query]], query + 1, o),
            ("tokens that may come", f"{left:,} of {len(s.kept_V):,}"),
        ],
        candidates=candidates,
        others=others,
        looks=[] if rows_RS is None else [look(rows_RS[0], i) for i in np.argsort(-rows_RS[0], kind="stable")[:LOOKS]],
        strongest=[] if rows_RS is None else [look(row, int(row.argmax())) for row in rows_RS],
        rows_RS=rows_RS,
        start=start,
        query=query,
    )


def stages_of(s: Step, rules: Rules, seen: Sequence[int]) -> dict[str, Tensor]:
    """Rule -> the logits behind it. `seen`: the text before."""
    seen_V = torch.zeros(len(s.logits_V), dtype=torch.bool)
    seen_V[list(seen)] = True
    return sampling.stages(s.logits_V, rules, seen_V)


def remover(stages: Mapping[str, Tensor], token: int) -> str:
    """The first rule that removed the token, or nothing."""
    return next((rule for rule, kept_V in stages.items() if kept_V[token].isneginf()), "")


def candidates_of(
    s: Step, names: Sequence[str], stages: Mapping[str, Tensor]
) -> tuple[list[Candidate], Candidate | None]:
    """The likeliest tokens before or after the rules, with the chosen one; and the others together, if there are any.

    Each column adds up to 1 over all of them.
    """
    before_V, after_V = (x_V.double().softmax(-1) for x_V in (s.logits_V, s.kept_V))
    kept_V = s.kept_V.isfinite()
    order = before_V.maximum(after_V).argsort(descending=True, stable=True)[:TOP].tolist()
    order = sorted({*order, s.token}, key=lambda i: (-float(before_V[i]), i))
    out = []
    for i in order:
        after = float(after_V[i]) if kept_V[i] else None
        out.append(Candidate(names[i], float(before_V[i]), after, i == s.token, remover(stages, i)))
    kept_V[order] = False
    before_V[order] = after_V[order] = 0
    n = len(before_V) - len(order)
    others = Candidate(_count(n, "other"), float(before_V.sum()), float(after_V.sum()) if kept_V.any() else None)
    return out, others if n else None


def _facts(s: Step, before: Step | None, last: str, length: int, o: GenerateOptions) -> list[tuple[str, str]]:
    """What the model read and what the cache held. `last`: the token before the new one, `length`: tokens up to it."""
    whole = "the prompt" if s.phase == "prefill" else "the text so far"
    if s.new == 1 and s.phase == "decode":
        read = f"1 token: “{last}”"
    else:
        read = f"{_count(s.new)}: {'the end of ' if s.new < length else ''}{whole}"
    facts = [("phase", s.phase), ("the model reads", read)]
    if s.cache_tokens or (before and before.cache_tokens):
        tokens, held = (before.cache_tokens, before.cache_bytes) if before else (0, 0)
        facts += [
            ("tokens in the cache", f"{tokens:,} → {s.cache_tokens:,}"),
            ("bytes in the cache", f"{held:,} → {s.cache_bytes:,}"),
            ("without a cache", f"{_count(_again(s, length, o))} to read"),
        ]
    else:
        facts.append(("cache", "none"))
    if s.context_start:
        facts.append(("visible", f"the last {length - s.context_start:,} of {length:,} tokens"))
    return facts


def _again(s: Step, length: int, o: GenerateOptions) -> int:
    """Tokens to read without a cache: those that are visible. Where the context slides, they have seen earlier ones,
    which are to be read too."""
    return length if o.overflow == "slide" else length - s.context_start


def _rows(s: Step) -> np.ndarray | None:
    """weights_RS as `row_names` has them; None without recorded attention."""
    if not s.attention or not any(len(p) for p in s.attention):
        return None
    layers = [p.double().numpy() for p in s.attention]
    every = np.concatenate(layers).mean(0, keepdims=True)
    return np.concatenate([every, *(x for p in layers if len(p) for x in (p.mean(0, keepdims=True), p))])


def row_names(c: Config) -> list[str]:
    """The rows of cells: the mean over all heads, then for each layer that has any its mean and its heads."""
    out = ["all heads"]
    for layer in range(c.n_layer):
        if c.heads_of(layer):
            out += [f"layer {layer}", *(f"L{layer}H{h}" for h in c.heads_of(layer))]
    return out


# All of them


def rules(o: GenerateOptions) -> str:
    """Those that act, as they are typed, in the order in which they do."""
    acting = {
        "repetition_penalty": o.repetition_penalty != 1,
        "temperature": True,
        "top_k": bool(o.top_k),
        "top_p": o.top_p is not None and o.top_p < 1,
        "min_p": bool(o.min_p),
    }
    return " ".join(f"{name}={word(getattr(o, name))}" for name, acts in acting.items() if acts)


def _says(steps: Sequence[Step], P: int, o: GenerateOptions) -> str:
    """What the cache saved."""
    read, again = sum(s.new for s in steps), sum(_again(s, P + s.number, o) for s in steps)
    said = f"The model read {_count(read)} in {_count(len(steps), 'step')}"
    if read == again:
        return f"{said}{', the text so far in each' if len(steps) > 1 else ''}."
    return f"{said}. Without a cache it would have read {again:,}."


def _about(
    c: Config, o: GenerateOptions, prompt: Sequence[str], vocab_size: int, steps: Sequence[Step]
) -> list[tuple[str, str]]:
    heads, _, stored = cost.stored_heads(c)
    text = "".join(prompt)
    out = [
        ("run", f"{o.run} ({o.weights} weights)"),
        ("model", f"{_count(c.n_layer, 'layer')}, {_count(heads, 'head')} in all, dim {c.dim}, head_dim {c.D}"),
        ("context", f"{_count(c.seq_len)}, overflow={o.overflow}"),
        ("vocabulary", _count(vocab_size)),
        ("prompt", f"{text[:LONGEST]}{f'… ({len(text):,} letters)' if len(text) > LONGEST else ''}"),
        ("sampling", f"{rules(o)} seed={o.seed}" if o.temperature else f"{rules(o)}: always the likeliest"),
    ]
    held = next((s for s in steps if s.cache_bytes), None)
    if held:
        each = held.cache_bytes // held.cache_tokens
        size = each // cost.kv_bytes(c, 1, bytes_per_number=1)
        by = f"{stored:,} key/value heads × ({c.D} + {c.Dv}) numbers × {size} bytes"
        out.append(("cache of one token", f"{each:,} bytes = {by}"))
    return out


def _notes(steps: Sequence[Step], c: Config) -> list[str]:
    out = []
    if len(steps) > MOST_STEPS:
        out.append(f"The first {MOST_STEPS} of {len(steps):,} steps are shown.")
    if not c.causal:
        out.append("causal=false: each new token changes what earlier ones see, so nothing can be kept in a cache.")
    cropped = next((s for s in steps if s.context_start), None)
    if cropped:
        out.append(
            f"From step {cropped.number} on the text is longer than the context, and its beginning is out of sight"
            + (
                "; each token left stands at another position, so all are read anew in each step."
                if not cropped.cache_tokens
                else "."
            )
        )
    return out
