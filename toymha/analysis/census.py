"""A census of heads: what kind each one is, judged against heads that have learned nothing.

Axes: B sequences, T positions, N heads of a model (all layers), M heads of all untrained models, K offsets, W windows,
V vocabulary.
Every score is a mean over the same sequences for all models: windows of validation text, and for `duplicate` and
`induction` random sequences that repeat themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from toymha.analysis import kinds
from toymha.analysis.capture import capture, heads_of
from toymha.analysis.results import Census, Kind, Mean
from toymha.config import Config
from toymha.data.corpus import Corpus, Split
from toymha.evaluate import windows
from toymha.model.gpt import GPT
from toymha.schema import UserError
from toymha.seeds import stream, stream_seed

LONGEST = 128  # tokens of a sequence, or the model's context where that is shorter: patterns grow with its square
AT_ONCE = 8  # sequences in one forward pass; it changes no result
NULL_TOKENS = 2048  # of text, and of random sequences, that each untrained model reads


@dataclass(frozen=True)
class Material:
    """What the heads read, and where to look in it: name -> look_BTS, see kinds."""

    text_BT: Tensor
    repeated_BT: Tensor
    text_looks: dict[str, Tensor]
    repeated_looks: dict[str, Tensor]
    relations: tuple[str, ...]
    causal: bool

    def part(self, chosen: slice) -> Material:
        text, repeated = ({k: v[chosen] for k, v in x.items()} for x in (self.text_looks, self.repeated_looks))
        return replace(
            self,
            text_BT=self.text_BT[chosen],
            repeated_BT=self.repeated_BT[chosen],
            text_looks=text,
            repeated_looks=repeated,
        )


@dataclass(frozen=True)
class Measured:
    """Scores of N heads by name, a score_BN (nan for a sequence without such a row), and their best fixed offsets."""

    scores: dict[str, Tensor]
    offsets: list[int]

    def summary(self, sequences: int | None = None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """name -> mean_N and name -> its error_N over the first sequences, of scores of which they have an example."""
        first = {name: score_BN[:sequences] for name, score_BN in self.scores.items()}
        both = {name: kinds.mean_and_error(x_BN) for name, x_BN in first.items() if not x_BN.isnan().all()}
        return {name: x[0] for name, x in both.items()}, {name: x[1] for name, x in both.items()}


def census(model: GPT, c: Config, corpus: Corpus, *, sequences: int = 32, untrained: int = 20, seed: int = 0) -> Census:
    """The kind of each head of `model`, whose configuration is `c`, on `sequences` windows of the validation text (all
    of them, where there are fewer) and as many repeated random sequences.

    The null are the heads of `untrained` (2 or more) models of the same shape with other initial weights. A head's z is
    the distance of its score from their mean in their standard deviations, all on the same sequences: the first ones,
    up to NULL_TOKENS. The false positives are those of the untrained heads themselves, each model judged by the others.
    A score of which these sequences have no example is left out: nothing is known of its chance. Small initial weights
    make patterns so even that untrained heads hardly differ, and z in the hundreds is common; then the threshold of the
    weight decides alone, so each rule also says what the untrained heads reach.

    `seed` draws the random sequences and the untrained weights. 4 layers of 8 heads, dim 256, T = 128 take 8 seconds
    of processor time. Raises UserError for a context in which no row is left to count, for too short a text, and for a
    model whose patterns are not finite.
    """
    if sequences < 1 or untrained < 2:
        raise UserError(f"a census with sequences={sequences} and untrained={untrained}: at least 1 and 2")
    device, V = next(model.parameters()).device, corpus.tokenizer.vocab_size
    data = material(c, corpus, sequences, seed)
    found = measure(model, data)
    few = NULL_TOKENS // data.text_BT.shape[1]
    read, nulls = data.part(slice(few)), []
    for i in range(untrained):
        with torch.random.fork_rng(devices=[]):  # torch fills new matrices by chance before the model does
            other = GPT(replace(c, init_seed=stream_seed(seed, "untrained", i)), V)
        nulls.append(measure(other.to(device), read))
    null_M = _all_of(nulls).summary()[0]
    chance = []
    for i, n in enumerate(nulls):
        others_M = _all_of([*nulls[:i], *nulls[i + 1 :]]).summary()[0]
        chance += [k.kind for k in _kinds(n, _deviations(n.summary()[0], others_M), data.relations)]
    z_N = _deviations(found.summary(few)[0], null_M)
    rates = {kind: chance.count(kind) / max(1, len(chance)) for kind in kinds.kinds(data.relations)}
    rules = kinds.rules(data.relations)
    for kind, reached in kinds.reached(null_M, data.relations).items():
        rules[kind] += f", which have {reached:.2g} at the most" if kind != "scattered" else f" ({reached:.2g} or more)"
    for kind in ("uniform", "other"):
        rules[kind] += f"; {rates.pop(kind):.1%} of the untrained heads are"
    return Census(
        heads=dict(zip(heads_of(model), _kinds(found, z_N, data.relations))),
        rules=rules,
        false_positives=rates,
        untrained_models=untrained,
        untrained_heads=len(chance),
        sequences=len(data.text_BT),
    )


def _all_of(parts: Sequence[Measured]) -> Measured:
    """The heads of several models as those of one."""
    scores = {name: torch.cat([p.scores[name] for p in parts], 1) for name in parts[0].scores}
    return Measured(scores, [offset for p in parts for offset in p.offsets])


def _deviations(mean_N: dict[str, Tensor], null_M: dict[str, Tensor]) -> dict[str, Tensor]:
    """name -> z_N, of the scores that both have."""
    return {name: kinds.deviations(mean_N[name], null_M[name]) for name in mean_N if name in null_M}


def _kinds(found: Measured, z_N: dict[str, Tensor], relations: Sequence[str]) -> list[Kind]:
    mean_N, error_N = found.summary()
    out = []
    for i, offset in enumerate(found.offsets):
        scores = {k: Mean(float(mean_N[k][i]), float(error_N[k][i]), float(z_N[k][i])) for k in z_N}
        out.append(Kind(kinds.kind_of(scores, offset, relations), scores, offset))
    return out


# What they read


def material(c: Config, corpus: Corpus, sequences: int, seed: int) -> Material:
    """The sequences of a census. Raises UserError."""
    T, split, V = min(c.seq_len, LONGEST), corpus.splits["val"], corpus.tokenizer.vocab_size
    if T <= kinds.FIRST:
        raise UserError(
            f"seq_len={T}: a census of heads leaves out the first {kinds.FIRST} positions, "
            f"where there is little to choose from, so it needs seq_len={kinds.FIRST + 1} or more"
        )
    at_BT = _spread(split, T, sequences)
    text_BT = split.tokens[at_BT - 1].long()
    count_V = torch.bincount(corpus.splits["train"].tokens.long(), minlength=V)
    looks = {
        "begin": kinds.beginning(_begins(split, at_BT)),
        "rare": kinds.rarest(text_BT, count_V, c.causal),
    }
    relations = tuple(split.names) if split.governors is not None else ()
    for tag, name in enumerate(relations, 1):
        governor_BT = _governors(split, at_BT, tag)
        looks |= {name: kinds.governor(governor_BT), kinds.by_offset(name): kinds.habit(governor_BT)}
    repeated_BT = repeated(len(at_BT), T, V, seed)
    repeated_looks = {"duplicate": kinds.copies(repeated_BT), "induction": kinds.after_copies(repeated_BT)}
    return Material(text_BT, repeated_BT, looks, repeated_looks, relations, c.causal)


def repeated(B: int, T: int, V: int, seed: int) -> Tensor:
    """x_BT: each sequence repeats its own random tokens with its own period, so that an earlier copy is at no fixed
    distance. Periods go through all from half the longest to the longest, which is T / 2, or V where that is less: no
    token is twice in a period."""
    longest = min(T // 2, V)
    shortest = max(1, longest // 2)
    generator = stream(seed, "repeated")
    order = torch.randperm(longest - shortest + 1, generator=generator) + shortest
    t = torch.arange(T)
    rows = []
    for b in range(B):
        period = int(order[b % len(order)])
        rows.append(torch.randperm(V, generator=generator)[:period][t % period])
    return torch.stack(rows)


def _spread(split: Split, T: int, sequences: int) -> Tensor:
    """at_BT: full windows spread evenly over the split; where a text has documents, each begins where one does."""
    found = [at_WT for at_WT, _ in windows(split, T, None, 1024) if at_WT.shape[1] == T]
    if not found:
        raise UserError(f"the validation split has {len(split.tokens)} tokens, and a sequence needs {T + 1}")
    at_WT = torch.cat(found)
    W = len(at_WT)
    return at_WT[torch.arange(min(sequences, W)) * W // min(sequences, W)]


def _begins(split: Split, at_BT: Tensor) -> Tensor:
    """begins_BT: position 0, and where a text has documents, the first token of each."""
    begins_BT = torch.zeros(at_BT.shape, dtype=torch.bool)
    if split.starts is not None:
        begins_BT = torch.isin(at_BT - 1, split.starts)
    begins_BT[:, 0] = True
    return begins_BT


def _governors(split: Split, at_BT: Tensor, tag: int) -> Tensor:
    """governor_BT: where in the window the governor stands of the token that each position predicts, if that token has
    this tag; below 0 else, and where it is outside of the window."""
    assert split.tags is not None and split.governors is not None
    place_BT = split.governors[at_BT].long() - (at_BT[:, :1] - 1)
    return torch.where(split.tags[at_BT] == tag, place_BT, -1)


# What they look at


def measure(model: GPT, data: Material) -> Measured:
    """The scores of all heads, in the order of `heads_of`."""
    device, tried = next(model.parameters()).device, kinds.offsets(data.text_BT.shape[1])
    parts: list[dict[str, Tensor]] = []
    for at in range(0, len(data.text_BT), AT_ONCE):
        now = data.part(slice(at, at + AT_ONCE))
        text_BNTS, repeated_BNTS = (
            torch.cat(capture(model, x_BT.to(device), "pattern")["pattern"], 1)
            for x_BT in (now.text_BT, now.repeated_BT)
        )
        if not (text_BNTS.isfinite().all() and repeated_BNTS.isfinite().all()):
            raise UserError("the model's attention is not finite, so its heads have no kind: its training diverged")
        scores = {"entropy": kinds.entropy(text_BNTS, data.causal)}
        scores |= {f"along {k}": kinds.along(text_BNTS, k) for k in tried}
        scores |= kinds.weight(text_BNTS, now.text_looks) | kinds.weight(repeated_BNTS, now.repeated_looks)
        parts.append({name: score_BN.cpu() for name, score_BN in scores.items()})
    score = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    along_BKN = torch.stack([score.pop(f"along {k}") for k in tried], 1)
    index_N, best = kinds.furthest_above(along_BKN.mean(0), tried)
    named = dict(zip(("diagonal", "previous", "second"), along_BKN.unbind(1)))  # offsets 0, 1 and 2 come first
    named["offset"] = along_BKN.gather(1, index_N.expand(len(along_BKN), 1, -1))[:, 0]
    return Measured(named | score, best)


# Over seeds


@dataclass(frozen=True)
class Frequency:
    """Heads of one kind in a model: mean over seeds, least and most; share of the seeds that have one at all."""

    mean: float
    least: int
    most: int
    share: float


@dataclass(frozen=True)
class Counts:
    """The kinds of one setting over its seeds, most frequent first.

    stability: how much the counts of two seeds overlap, in the mean over all pairs: 1 - the total variation distance of
    their shares of kinds, sum of min(p, q). 1: the same mixture in each seed, 0: no kind in common; None for one seed.
    """

    label: str
    seeds: int
    kinds: dict[str, Frequency]
    stability: float | None


def census_counts(label: str, censuses: Sequence[Census]) -> Counts:
    """What recurs in the censuses of one setting, one for each seed. Raises ValueError without any."""
    if not censuses:
        raise ValueError(f"{label}: no census to count")
    counts = [found.counts() for found in censuses]
    out = {}
    for kind in dict.fromkeys(k for count in counts for k in count):
        n = [count.get(kind, 0) for count in counts]
        out[kind] = Frequency(sum(n) / len(n), min(n), max(n), sum(k > 0 for k in n) / len(n))
    overlaps = [_overlap(a, b) for a, b in itertools.combinations(counts, 2)]
    ordered = dict(sorted(out.items(), key=lambda kf: -kf[1].mean))
    return Counts(label, len(censuses), ordered, sum(overlaps) / len(overlaps) if overlaps else None)


def _overlap(a: dict[str, int], b: dict[str, int]) -> float:
    """Models without heads have everything in common with each other, and nothing with others."""
    if not a or not b:
        return float(a == b)
    return sum(min(a[k] / sum(a.values()), b[k] / sum(b.values())) for k in a.keys() & b.keys())
