"""Models that write a target when they have read a source: how many are right, and `toymha generate` for such runs.

R samples side by side, W sources (clusters of pairs), V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from toymha.data.corpus import Split
from toymha.data.pairs import edits_to_nearest, most_frequent, pairs_of
from toymha.data.units import UnitTokenizer
from toymha.device import arithmetic
from toymha.evaluate import evaluating, mean_and_error
from toymha.generation import prompts
from toymha.generation.beam import ROWS, Reader, batches, room, write_targets
from toymha.generation.continuation import OUTPUTS, Continuation, Lines, json_line
from toymha.generation.prompts import Prompt
from toymha.generation.sampling import Rules, choose, keep
from toymha.model.gpt import GPT
from toymha.model.seq2seq import Seq2Seq
from toymha.opened import Opened
from toymha.options import GenerateOptions
from toymha.schema import UserError
from toymha.seeds import stream

MARGIN = 4  # tokens beyond the longest target: enough to see that a model does not stop


@dataclass(frozen=True)
class Match:
    """How many targets are right. exact: share of pairs whose whole target is, from 0 to 1, and se its standard error;
    ser: symbol error rate, edits over symbols of the right targets (Levenshtein 1966); above 1 where far too much is
    written."""

    exact: float
    se: float
    ser: float
    pairs: int


def match(
    model: GPT | Seq2Seq,
    split: Split,
    vocab_size: int,
    *,
    width: int = 1,
    max_pairs: int | None = None,
    poll: Callable[[], None] = lambda: None,
) -> Match:
    """Targets for the sources of a split, or for `max_pairs` of them spread evenly, always the same.

    A target that does not end, or is not the whole target, is not right. Where a source stands in the split with
    several targets, each of them is right, and edits are counted from the nearest. The standard error takes the pairs
    with one source as one cluster. `poll` is called between batches and may raise.
    """
    pairs = [(tuple(source), target) for source, target in pairs_of(split)]
    right: dict[tuple[int, ...], list[list[int]]] = {}
    for source, target in pairs:
        right.setdefault(source, []).append(target)
    count = min(len(pairs), max_pairs or len(pairs))
    asked = Counter(pairs[i * len(pairs) // count][0] for i in range(count))
    assert split.starts is not None and split.separators is not None
    separator, end = (int(split.tokens[at[0]]) for at in (split.separators, split.starts))
    length = max(len(target) for _, target in pairs) + MARGIN
    found = write_targets(
        model,
        [list(source) for source in asked],
        separator=separator,
        end=end,
        vocab_size=vocab_size,
        length=length,
        width=width,
        best=1,
        poll=poll,
    )
    edits = symbols = 0
    hits = []
    for (source, times), [hypothesis] in zip(asked.items(), found, strict=True):
        hits.append(hypothesis.finished and hypothesis.tokens in right[source])
        written = hypothesis.tokens
        wrong, size = edits_to_nearest(written, right[source])
        edits, symbols = edits + times * wrong, symbols + times * size
    times_W = torch.tensor(list(asked.values()), dtype=torch.float64)
    exact, se = mean_and_error(torch.tensor(hits) * times_W, times_W)
    return Match(exact, se, edits / symbols, count)


def all_ways(
    model: GPT | Seq2Seq,
    splits: Mapping[str, Split],
    name: str,
    vocab_size: int,
    beam: int,
    poll: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Of a whole split: targets that are written greedily, by beam search (if it is wider than 1), and symbol by symbol
    by frequency alone, without a model (None where pairs are not aligned). Each as plain numbers, `exact` and `ser`."""
    out: dict[str, Any] = {"greedy": asdict(match(model, splits[name], vocab_size, poll=poll))}
    if beam > 1:
        out["beam"] = asdict(match(model, splits[name], vocab_size, width=beam, poll=poll))
    return out | {"frequent": most_frequent(splits["train"], splits[name])}


def generate_pairs(o: GenerateOptions, opened: Opened) -> int:
    """`toymha generate` for a run on pairs: prompts are sources, one a line. Raises UserError before anything is
    written."""
    refuse(o)
    by = opened.corpus.tokenizer
    assert isinstance(by, UnitTokenizer)
    given = asked(o, opened, by)
    with arithmetic(opened.precision, opened.device):
        if o.beam > 1:
            print_beams(o, opened, by, given)
        else:
            sample_targets(o, opened, by, given)
    return 0


def refuse(o: GenerateOptions) -> None:
    """Raises UserError for what means nothing here."""
    if o.trace:
        raise UserError("trace=true shows a text that goes on; of pairs, toymha heads shows where the decoder looks")
    if not o.cache:
        raise UserError("cache=false: targets are written with a cache")
    if o.overflow != "crop":
        raise UserError(f"overflow={o.overflow}: a target that fills the context ends there; leave overflow out")
    if o.stop:
        raise UserError(f"stop={o.stop}: a target ends where the model ends it, or after max_new_tokens")
    if o.beam == 1:
        return
    if o.temperature:
        raise UserError(f"beam={o.beam} looks for the most likely target: it needs temperature=0, not {o.temperature}")
    off = {"top_k": (None, 0), "top_p": (None, 1), "min_p": (None, 0), "repetition_penalty": (1,), "num_samples": (1,)}
    for name, values in off.items():
        if getattr(o, name) not in values:
            raise UserError(f"{name}={getattr(o, name)} is for samples, and beam={o.beam} draws none")


def asked(o: GenerateOptions, opened: Opened, by: UnitTokenizer) -> list[Prompt]:
    """The sources, with the separator behind each. Raises UserError for one that cannot be read."""
    texts = [line for text in prompts.read(o) for line in text.removesuffix("\n").split("\n")]
    out = []
    for number, text in enumerate(texts, 1):
        which = f"line {number}: " * (len(texts) > 1)
        if not text.strip():
            raise UserError(f"{which}the source is empty; give prompt=, or prompts=FILE with a source a line")
        try:
            source = by.encode_source(text).tolist()
        except UserError as e:
            raise UserError(f"{which}{e}") from None
        if room(opened.model, len(source)) < 0:
            T = opened.config.seq_len
            raise UserError(f"{which}the source has {len(source)} tokens, which leave no room in seq_len={T}")
        out.append(Prompt(text, [*source, by.separator]))
    return out


def print_beams(o: GenerateOptions, opened: Opened, by: UnitTokenizer, given: list[Prompt]) -> None:
    """The `beam` most likely targets of each source that the search finds."""
    found = write_targets(
        opened.model,
        [p.ids[:-1] for p in given],
        separator=by.separator,
        end=by.begin,
        vocab_size=by.vocab_size,
        length=max(0, o.max_new_tokens - 1),  # beside the mark that ends a target, which is a token too
        width=o.beam,
    )
    for p, hypotheses in zip(given, found, strict=True):
        if o.output == "text":
            print(p.text)
        for rank, h in enumerate(hypotheses, 1):
            text, probability = by.decode_target(h.tokens), math.exp(h.logp)
            if o.output == "text":
                print(f"{rank:>4}  {probability:<9.3g} {h.logp:>8.3f}  {text}" + " ..." * (not h.finished))
                continue
            tokens = [*h.tokens, by.begin] if h.finished else h.tokens
            full = len(h.tokens) + 1 < o.max_new_tokens  # the context, before the length was reached
            stopped = "end" if h.finished else "context" if full else "length"
            row = {"prompt": p.text, "text": text, "tokens": tokens, "stopped": stopped, "rank": rank}
            print(json_line(row | {"logprob": h.logp, "probability": probability}))


def sample_targets(o: GenerateOptions, opened: Opened, by: UnitTokenizer, given: list[Prompt]) -> None:
    """Targets drawn token by token, each sample with a random stream of its own; with temperature=0 the most likely
    tokens. Tokens that are there already, for repetition_penalty, are those of the target."""
    samples: list[Continuation] = [
        Target(by, p, title="", seed=o.seed + i, most=o.max_new_tokens, stops=[], end=by.begin)
        for p in given
        for i in range(o.num_samples)
    ]
    out = (Targets if o.output == "text" and len(samples) > 1 else OUTPUTS[o.output])(samples, len(samples) == 1)
    generators = [stream(s.seed, "sample") for s in samples]
    if not o.max_new_tokens:
        out.tell()
        return
    try:
        # The last token of a sample is drawn, and not read.
        lengths, most = [len(s.prompt.ids) - 1 for s in samples], o.max_new_tokens - 1
        for batch, length in batches(opened.model, lengths, most, ROWS):
            draw(o, opened.model, [samples[i] for i in batch], [generators[i] for i in batch], length, out.tell)
    except KeyboardInterrupt:
        out.end_line()
        raise


def draw(
    o: GenerateOptions,
    model: GPT | Seq2Seq,
    live: list[Continuation],
    generators: list[torch.Generator],
    length: int,
    tell: Callable[[], None],
) -> None:
    """One token more for each sample, then again, until all are over. `length`: tokens of each that the model reads.
    `tell` is called after each round."""
    rules = Rules.of(o)
    by = live[0].tokenizer
    assert isinstance(by, UnitTokenizer)
    seen_RV = torch.zeros(len(live), by.vocab_size, dtype=torch.bool)
    with evaluating(model), torch.inference_mode():
        reader = Reader(model, [s.prompt.ids[:-1] for s in live], live[0].prompt.ids[-1], length)
        logits_RV = reader.first()
        for t in range(length + 1):
            logits_RV = logits_RV[:, : by.vocab_size].cpu()
            logp_RV = logits_RV.double().log_softmax(-1)
            logits_RV[:, by.separator] = -math.inf  # a mark that no target holds
            kept_RV = keep(logits_RV, rules, seen_RV)
            tokens = [choose(kept_V, g) for kept_V, g in zip(kept_RV, generators, strict=True)]
            for row, (sample, token) in enumerate(zip(live, tokens, strict=True)):
                sample.logprob += float(logp_RV[row, token])
                seen_RV[row, token] = True
                if not sample.add(token) and t == length:
                    sample.stopped = "context"
            tell()
            rows = [row for row, sample in enumerate(live) if not sample.stopped]
            if not rows:
                return
            live, generators, seen_RV = [live[r] for r in rows], [generators[r] for r in rows], seen_RV[rows]
            logits_RV = reader.next(torch.tensor([tokens[r] for r in rows]), torch.tensor(rows))


class Target(Continuation):
    """What follows the separator. Source and target have spellings of their own, and a tab between them."""

    def opening(self) -> str:
        return f"{self.prompt.text}\t"

    def text(self) -> str:
        assert isinstance(self.tokenizer, UnitTokenizer)
        return self.tokenizer.decode_target(self.tokens)


class Targets(Lines):
    """As text: a line for each sample."""

    def line(self, sample: Continuation) -> str:
        return sample.shown()
