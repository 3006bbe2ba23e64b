"""Everything about the heads of one model: which analyses there are, and what they are made on.

The text that a choice is made by (which heads to remove) is training text; what is reported is validation text, and the
loss of pruned models that of the test split where there is one. B sequences, T positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from toymha import cost
from toymha.analysis.capture import capture, heads_of
from toymha.analysis.census import census
from toymha.analysis.curves import curves
from toymha.analysis.importance import GATE_STEPS, importance
from toymha.analysis.kinds import FIRST, family
from toymha.analysis.likeness import likeness
from toymha.analysis.losses import sequences
from toymha.analysis.results import Head, Importance, Passage, Study
from toymha.analysis.writes import writes
from toymha.config import Config
from toymha.data.corpus import Corpus
from toymha.model.gpt import GPT
from toymha.opened import Opened
from toymha.schema import word

SEQUENCES = 32  # that similarity and writes are measured on
LONGEST = 256  # tokens of a passage whose maps are drawn


@dataclass(frozen=True)
class Subject:
    """A model and its text, with the sizes of what is measured. tokens: of each measurement of a loss."""

    model: GPT
    config: Config
    corpus: Corpus
    tokens: int = 4096
    gate_steps: int = GATE_STEPS
    random_orders: int = 5
    rounds: int = 1
    seed: int = 0
    text: str | None = None
    show: int = 48

    @property
    def report_split(self) -> str:
        return "test" if "test" in self.corpus.splits else "val"

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """x_BT, y_BT, counted_BT: validation text of whole windows."""
        device = next(self.model.parameters()).device
        T = self.config.seq_len
        first = sequences(self.corpus.splits["val"], T, SEQUENCES * T, device, SEQUENCES * T)[0]
        return first.x_WT, first.y_WT, first.counted_WT


def subject(opened: Opened, o: Any) -> Subject:
    """`o`: options.HeadsOptions."""
    sizes = {k: getattr(o, k) for k in ("tokens", "gate_steps", "random_orders", "rounds", "seed", "text", "show")}
    return Subject(opened.gpt, opened.config, opened.corpus, **sizes)


def passage(s: Subject, _done: Mapping[str, Any]) -> Passage:
    """What every head sees in `text`, or in the first window of the validation split."""
    tokenizer, most = s.corpus.tokenizer, min(s.config.seq_len, LONGEST)
    if s.text is None:
        ids = s.corpus.splits["val"].tokens[: s.show].long()
    else:
        ids = torch.from_numpy(tokenizer.encode(s.text)).long()
    note = None
    if len(ids) > most:
        note = f"the first {most} of {len(ids)} tokens; the model reads {s.config.seq_len} at a time"
    ids = ids[:most]
    device, names = next(s.model.parameters()).device, tokenizer.labels()
    patterns = capture(s.model, ids[None].to(device), "pattern")["pattern"]
    return Passage([names[i] for i in ids.tolist()], [p[0].float().cpu() for p in patterns], note)


def _census(s: Subject, _done: Mapping[str, Any]) -> Any:
    return census(s.model, s.config, s.corpus, seed=s.seed)


def _likeness(s: Subject, _done: Mapping[str, Any]) -> Any:
    return likeness(s.model, s.batch()[0])


def _writes(s: Subject, _done: Mapping[str, Any]) -> Any:
    return writes(s.model, *s.batch())


def _importance(s: Subject, _done: Mapping[str, Any]) -> Importance:
    return importance(
        s.model,
        s.corpus.splits["train"],
        s.config.seq_len,
        max_tokens=s.tokens,
        gate_steps=s.gate_steps,
        seed=s.seed,
        split_name="train",
    )


def _pruning(s: Subject, done: Mapping[str, Any]) -> Any:
    return curves(
        s.model,
        s.corpus.splits["train"],
        s.config.seq_len,
        s.corpus.splits[s.report_split],
        done["importance"],
        max_tokens=s.tokens,
        random_orders=s.random_orders,
        rounds=s.rounds,
        gate_steps=s.gate_steps,
        seed=s.seed,
        split_name=s.report_split,
    )


# Field of results.Study -> how it is made, in an order in which each finds what it builds on; a new one is added here.
PARTS: dict[str, Callable[[Subject, Mapping[str, Any]], Any]] = {
    "passage": passage,
    "census": _census,
    "likeness": _likeness,
    "writes": _writes,
    "importance": _importance,
    "pruning": _pruning,
}
OF_RUNS = ("census", "likeness", "importance", "pruning")  # what the numbers of a run are made of
NEEDS = {"pruning": "importance"}


def study(s: Subject, name: str, parts: Collection[str] = tuple(PARTS), say: Callable[[str], None] = print) -> Study:
    """The parts that are asked for, and those that they build on. `say` is told what begins."""
    wanted = {*parts, *(NEEDS[p] for p in parts if p in NEEDS)}
    done: dict[str, Any] = {}
    notes = [] if heads_of(s.model) else ["the model has no heads"]
    for part, make in PARTS.items():
        if part == "census" and part in wanted and s.config.seq_len <= FIRST:
            notes.append(f"no census: it leaves out {FIRST} positions, and the context is seq_len={s.config.seq_len}")
        elif part in wanted and heads_of(s.model):
            say(part)
            done[part] = make(s, done)
    return Study(name, about(s), heads_of(s.model), notes=tuple(notes), **done)


def about(s: Subject) -> list[tuple[str, str]]:
    """Facts of model and text, for a page."""
    c, V = s.config, s.corpus.tokenizer.vocab_size
    keys = ("n_layer", "dim", "n_head", "n_kv_head", "head_dim", "norm", "norm_position", "pos", "w_o", "tied_heads")
    settings = ", ".join(f"{k}={word(getattr(c, k))}" for k in keys if getattr(c, k) is not None)
    n = len(heads_of(s.model))
    left = "" if c.kept_heads is None else f" of {c.n_layer * c.n_head}"
    return [
        ("model", settings),
        ("heads", f"{n}{left}, head_dim {c.D}, {c.n_layer} layers"),
        ("parameters", f"{sum(cost.parameters(c, V).values()):,}"),
        ("text", f"{s.corpus.name}, {V} {s.corpus.tokenizer.kind} tokens"),
    ]


def numbers(found: Study) -> dict[str, Any]:
    """What a run's summary keeps of a study, for reports and verdicts: plain numbers."""
    out: dict[str, Any] = {"n": len(found.heads)}
    if found.census:
        out["kinds"] = found.census.counts()
        out["families"] = {}
        for kind, n in found.census.counts().items():
            out["families"][family(kind)] = out["families"].get(family(kind), 0) + n
    if found.likeness:
        sizes = [sum(h.layer == layer for h in found.heads) for layer in range(len(found.likeness.effective))]
        shares = [e / n for e, n in zip(found.likeness.effective, sizes) if n]
        out["effective"] = sum(shares) / len(shares) if shares else None
    if found.importance:
        out["correlations"] = {" ".join(pair): rho for pair, rho in found.importance.correlations.items()}
    if found.pruning:
        out["loss"] = next(iter(found.pruning.curves.values())).loss[0]
        out["removable"] = found.pruning.removable
        out["curves"] = {name: curve.loss for name, curve in found.pruning.curves.items()}
    return plain(out)


def heads_of_run(model: GPT, c: Config, corpus: Corpus, poll: Callable[[], None]) -> dict[str, Any]:
    """The numbers that training keeps (`budget.heads`). `poll` is called between the parts and may raise."""
    return numbers(study(Subject(model, c, corpus), "", OF_RUNS, lambda _: poll()))


def plain(value: Any) -> Any:
    """For JSON, which has no nan and no infinity: null stands for both."""
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def by_head(found: Study) -> dict[Head, dict[str, Any]]:
    """One row for each head, for a terminal and for heads.json."""
    out: dict[Head, dict[str, Any]] = {head: {} for head in found.heads}
    for head, row in out.items():
        if found.census:
            kind = found.census.heads[head]
            row["kind"], row["offset"] = kind.kind, kind.offset
            row["scores"] = {k: {"value": m.value, "se": m.se, "z": m.z} for k, m in kind.scores.items()}
        if found.writes:
            w = found.writes.heads[head]
            row["write"] = {"norm": w.norm, "share": w.share, "logit": w.logit.value, "logit_se": w.logit.se}
        if found.importance:
            measured = found.importance.measures.items()
            row["importance"] = {name: {"value": m[head].value, "se": m[head].se} for name, m in measured}
    return out
