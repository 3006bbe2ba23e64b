"""What a decoder looks at in the source while it writes: numbers over validation pairs, and maps of a few pairs.

Axes: B pairs, H heads, T rows, S columns. A row of cross-attention is a step of the decoder, named by the target token
that it writes; a column is a source token, the begin mark first. What a decoder reads in that step is the token before.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from toymha import cost
from toymha.analysis.plots import MOST_TOKENS, visible
from toymha.analysis.results import Head
from toymha.data.corpus import Corpus, Split
from toymha.data.pairs import pair_rows, pairs_of
from toymha.data.units import SPACE, UnitTokenizer
from toymha.evaluate import attentions, evaluating, hooked
from toymha.generation.beam import write_targets
from toymha.model.seq2seq import Seq2Seq
from toymha.opened import Opened
from toymha.schema import UserError, word

PAIRS = 256  # that heads are measured on
BATCH = 32  # of them at a time
SHOWN = 4  # pairs whose maps are drawn
ORDER = ("cross", "layer", "encoder")  # of maps: the three kinds of attention, as evaluate.attentions names them


@dataclass(frozen=True)
class Look:
    """How one head of cross-attention reads, as means over rows.

    entropy of a row in nats; largest: its largest weight; begin: the weight on the begin mark. diagonal: how often the
    largest weight of the row that writes target token i lies on source token i; antidiagonal: on source token n + 1 - i
    of n. Both over pairs of n source and n target tokens; None where there are none.
    """

    entropy: float
    largest: float
    begin: float
    diagonal: float | None
    antidiagonal: float | None


@dataclass(frozen=True)
class Measured:
    """`even`: what a head would have that gives each source token the same weight; its largest weight then lies
    anywhere. aligned: rows that diagonal and antidiagonal are of."""

    heads: dict[Head, Look]
    even: Look
    pairs: int
    of: int
    rows: int
    aligned: int


@dataclass(frozen=True)
class Pair:
    """One pair and its maps. Labels of what the encoder reads (source), of what the decoder writes (target) and reads
    (past), row by row; maps: `cross0`, `layer0` or `encoder0` -> pattern_HTS, float32."""

    title: str
    source: list[str]
    target: list[str]
    past: list[str]
    maps: dict[str, Tensor]
    note: str

    def sides(self, name: str) -> tuple[list[str], list[str]]:
        """Labels of the rows and of the columns of a map."""
        return {
            "cross": (self.target, self.source),
            "layer": (self.target, self.past),
            "encoder": (self.source, self.source),
        }[stack(name)]


@dataclass(frozen=True)
class CrossStudy:
    """`measured` is None without cross-attention; heads: name of an attention -> the heads that it has."""

    name: str
    about: list[tuple[str, str]]
    heads: dict[str, list[Head]]
    measured: Measured | None
    pairs: list[Pair]


def stack(name: str) -> str:
    """`cross0` -> `cross`."""
    return name.rstrip("0123456789")


def cross_study(opened: Opened, name: str, text: str | None = None) -> CrossStudy:
    """Maps of the source `text` and of the target that the model writes for it, or of the first validation pairs.

    Raises UserError for a text that is no source for this model.
    """
    model, corpus = opened.model, opened.corpus
    assert isinstance(model, Seq2Seq)
    pairs = first_pairs(model, corpus) if text is None else [written(model, corpus, text)]
    measured = measure(model, corpus.splits["val"]) if model.crosses else None
    return CrossStudy(name, about(opened), heads_by_name(model), measured, pairs)


def about(opened: Opened) -> list[tuple[str, str]]:
    """Facts of model and text, for a page."""
    c, by = opened.config, opened.corpus.tokenizer
    keys = ("n_encoder_layer", "n_layer", "cross_attention", "dim", "n_head", "n_kv_head", "head_dim", "norm", "pos")
    return [
        ("model", ", ".join(f"{k}={word(getattr(c, k))}" for k in keys if getattr(c, k) is not None)),
        ("parameters", f"{sum(cost.parameters(c, by.vocab_size).values()):,}"),
        ("text", f"{opened.corpus.name}, {by.vocab_size} {by.kind} tokens"),
    ]


def heads_by_name(model: Seq2Seq) -> dict[str, list[Head]]:
    """Name of an attention -> its heads."""
    return {
        name: [Head(int(name.removeprefix(stack(name))), h) for h in attn.heads]
        for name, attn in attentions(model).items()
    }


def patterns(model: Seq2Seq, source_BS: Tensor, idx_BT: Tensor) -> dict[str, Tensor]:
    """Every attention that runs -> its pattern_BHTS, float32, on the CPU: the weights without dropout. Without
    cross-attention the encoder does not run."""
    heard: dict[str, Tensor] = {}

    def hear(name: str, pattern_BHTS: Tensor) -> None:
        heard[name] = pattern_BHTS.float().cpu()

    taps = {name: attn.pattern for name, attn in attentions(model).items()}
    with evaluating(model), torch.inference_mode(), hooked(taps, hear):
        model(*(x.to(model.embed.weight.device) for x in (source_BS, idx_BT)))
    return heard


# Numbers


def measure(model: Seq2Seq, split: Split, pairs: int = PAIRS) -> Measured:
    """All heads of cross-attention on `pairs` pairs of a split, spread evenly over it: always the same."""
    assert split.starts is not None
    D = len(split.starts)
    k = min(D, pairs)
    sums: dict[Head, Tensor] = {}
    even, rows, aligned = torch.zeros(4, dtype=torch.float64), 0, 0
    for docs_B in (torch.arange(k) * D // k).split(BATCH):
        source_BS, at_BT, counted_BT = pair_rows(split, docs_B)
        heard = patterns(model, source_BS, split.tokens[at_BT - 1].long())
        seen_B = (source_BS >= 0).sum(1)
        places = Places(seen_B, counted_BT, split.tokens[at_BT] != split.tokens[split.starts[0]])
        for name, heads in heads_by_name(model).items():
            if stack(name) == "cross":
                for head, found in zip(heads, sums_of(heard[name], places), strict=True):
                    sums[head] = sums.get(head, 0) + found
        per_row_B, aligned_B = counted_BT.sum(1), places.aligned_BT.sum(1)
        S_B = seen_B.double()
        even += torch.stack([per_row_B * S_B.log(), per_row_B / S_B, per_row_B / S_B, aligned_B / S_B]).sum(1)
        rows, aligned = rows + int(per_row_B.sum()), aligned + int(aligned_B.sum())
    found = {head: look(s.tolist(), rows, aligned) for head, s in sums.items()}
    return Measured(found, look([*even.tolist(), even[3].item()], rows, aligned), k, D, rows, aligned)


class Places:
    """Where in a batch rows are, and on which source tokens the two diagonals lie.

    seen_B: source tokens with the begin mark; counted_BT: rows that are there; target_BT: those that write no mark.
    """

    def __init__(self, seen_B: Tensor, counted_BT: Tensor, target_BT: Tensor) -> None:
        self.counted_BT = counted_BT
        target_BT = target_BT & counted_BT
        self.aligned_BT = target_BT & (target_BT.sum(1) == seen_B - 1)[:, None]
        t_T = torch.arange(counted_BT.shape[1])
        self.diagonal_BT = (t_T + 1).expand_as(counted_BT)  # source token i is in column i, the begin mark in 0
        self.antidiagonal_BT = seen_B[:, None] - 1 - t_T


def sums_of(pattern_BHTS: Tensor, places: Places) -> Tensor:
    """(H, 5): the fields of Look, summed over rows; float64."""
    p_BHTS = pattern_BHTS.double()
    top_BHT = p_BHTS.argmax(-1)
    on = [top_BHT == at_BT[:, None] for at_BT in (places.diagonal_BT, places.antidiagonal_BT)]
    of_rows = torch.stack([torch.special.entr(p_BHTS).sum(-1), p_BHTS.amax(-1), p_BHTS[..., 0]])
    of_pairs = torch.stack(on).double()
    counted_B1T, aligned_B1T = places.counted_BT[:, None], places.aligned_BT[:, None]
    both = [(of_rows * counted_B1T).sum((1, 3)), (of_pairs * aligned_B1T).sum((1, 3))]
    return torch.cat(both).T


def look(sums: Sequence[float], rows: int, aligned: int) -> Look:
    shares = [s / aligned if aligned else None for s in sums[3:]]
    return Look(*(s / rows for s in sums[:3]), *shares)


# Maps


def first_pairs(model: Seq2Seq, corpus: Corpus, count: int = SHOWN) -> list[Pair]:
    """The first pairs of the validation split, with their right targets. Maps of self-attention are those of the very
    first; those of every pair would be many."""
    by = units(corpus)
    out: list[Pair] = []
    for source, target in itertools.islice(pairs_of(corpus.splits["val"]), count):
        found = pair(model, by, source, [*target, by.begin], "The right target.")
        first = stack(next(iter(found.maps)))
        maps = {name: maps for name, maps in found.maps.items() if not out or stack(name) == first}
        out.append(replace(found, maps=maps))
    return out


def written(model: Seq2Seq, corpus: Corpus, text: str) -> Pair:
    """A source of the user's, and the target that the model finds most likely token by token."""
    by = units(corpus)
    source = by.encode_source(text).tolist()
    if len(source) > model.seq_len:
        raise UserError(
            f"text= has {len(source)} tokens with the begin mark, and the model's context is seq_len={model.seq_len}"
        )
    names: Any = {"separator": by.separator, "end": by.begin, "vocab_size": by.vocab_size}
    [[found]] = write_targets(model, [source], **names, best=1)
    note = "The target is what the model writes, always the most likely token"
    if found.finished:
        return pair(model, by, source, [*found.tokens, by.begin], f"{note}.")
    return pair(model, by, source, found.tokens, f"{note}; it does not end within the context.")


def units(corpus: Corpus) -> UnitTokenizer:
    assert isinstance(corpus.tokenizer, UnitTokenizer)  # that of pairs, always
    return corpus.tokenizer


def pair(model: Seq2Seq, by: UnitTokenizer, source: list[int], target: list[int], note: str) -> Pair:
    """`source` from its begin mark on; `target`: what is written, with the mark that ends it, if it comes."""
    past = [by.separator, *target[:-1]]
    heard = patterns(model, torch.tensor([source]), torch.tensor([past]))
    order = sorted(heard, key=lambda name: ORDER.index(stack(name)))
    maps = {name: heard[name][0, :, :MOST_TOKENS, :MOST_TOKENS] for name in order}
    names = [visible(label) for label in by.labels()]
    sides = {"source": source, "target": target, "past": past}
    labels = {side: [names[i] for i in ids[:MOST_TOKENS]] for side, ids in sides.items()}
    spelled = [
        SPACE[unit].join(names[i] for i in ids if i != by.begin)
        for unit, ids in ((by.source_unit, source), (by.target_unit, target))
    ]
    if (longest := max(len(source), len(target))) > MOST_TOKENS:
        note += f" The maps show the first {MOST_TOKENS} of {longest} tokens: more would not be legible."
    return Pair(" → ".join(spelled), **labels, maps=maps, note=note)


def as_json(found: CrossStudy) -> dict[str, Any]:
    """Everything that was found; weights to seven digits."""
    measured = None
    if found.measured:
        m = found.measured
        measured = asdict(m) | {"heads": {head.name: asdict(x) for head, x in m.heads.items()}}
    pairs = [
        {
            **{k: getattr(p, k) for k in ("source", "target", "past", "note")},
            "maps": {
                name: [[[round(w, 7) for w in row] for row in head] for head in pattern_HTS.tolist()]
                for name, pattern_HTS in p.maps.items()
            },
        }
        for p in found.pairs
    ]
    return {"run": found.name, "about": dict(found.about), "cross_attention": measured, "pairs": pairs}
