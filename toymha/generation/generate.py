"""Text from a trained model: `toymha generate`, and the samples that are drawn during training."""

from __future__ import annotations

import re
import sys
import time

from toymha.console import quote
from toymha.device import arithmetic
from toymha.generation import prompts
from toymha.generation.continuation import OUTPUTS, Continuation
from toymha.generation.decoding import Step, check_overflow, steps
from toymha.generation.sampling import Rules
from toymha.model.gpt import GPT
from toymha.model.seq2seq import Seq2Seq
from toymha.opened import Opened, open_run
from toymha.options import GenerateOptions
from toymha.schema import UserError

ROWS = 64  # samples side by side
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


def sample(
    model: GPT, prompt: list[int], length: int, vocab_size: int, seed: int, temperature: float = 0.8
) -> list[int]:
    """`length` tokens that follow the prompt, of the last seq_len tokens each. A random stream of its own."""
    made = steps(model, [prompt], Rules(temperature), vocab_size, [seed], length)
    return [step.token for (step,) in made if step]


def generate_run(o: GenerateOptions) -> int:
    """`toymha generate`. Raises UserError before anything is written."""
    prompts.check(o)
    opened = open_run(o.run, weights=o.weights, device=o.device, precision=o.precision, threads=o.threads)
    pairs = opened.corpus.splits["train"].separators is not None
    if isinstance(opened.model, Seq2Seq) or (pairs and o.beam > 1):
        from toymha.generation.translate import generate_pairs

        return generate_pairs(o, opened)
    if o.beam > 1:
        raise UserError(f"beam={o.beam}: beam search is for pairs of source and target, such as data=dates")
    samples = asked(o, opened)
    notes(o, opened, samples)
    began, traced = time.perf_counter(), []
    with arithmetic(opened.precision, opened.device):
        for first in range(0, len(samples), ROWS):
            traced += generate(o, opened, samples[first : first + ROWS], len(samples) == 1)
    seconds, tokens = time.perf_counter() - began, sum(len(s.tokens) for s in samples)
    if full := sum(s.stopped == "context" for s in samples):
        which = "the sample ends" if len(samples) == 1 else f"{full} of {len(samples)} samples end"
        note(f"the context of seq_len={opened.config.seq_len} tokens is full, so {which}; overflow=crop goes on")
    if o.output == "text" and sys.stderr.isatty():
        print(f"{tokens:,} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tokens/s", file=sys.stderr)
    if o.trace and opened.run is not None:
        from toymha.generation.trace import write_trace

        for path in write_trace(opened, o, samples[0].prompt.ids, traced, opened.run.path / "trace"):
            print(f"trace  {quote(path)}", file=sys.stderr)
    return 0


def asked(o: GenerateOptions, opened: Opened) -> list[Continuation]:
    """All samples, still empty: those of the first prompt, then those of the second. Raises UserError."""
    if o.stop and "" in o.stop:
        raise UserError("stop holds an empty text, which every text holds; write stop=null for none")
    corpus, T = opened.corpus, opened.config.seq_len
    given = prompts.encode(prompts.read(o), corpus)
    check_overflow(opened.gpt, o.overflow)
    longest = max(len(p.ids) for p in given)
    if o.overflow == "stop" and longest > T:
        raise UserError(f"overflow=stop: a prompt of {longest} tokens does not fit seq_len={T}; overflow=crop cuts it")
    if o.trace and (len(given) > 1 or o.num_samples > 1 or not o.max_new_tokens):
        raise UserError("trace=true shows the steps of one sample: give one prompt, num_samples=1, max_new_tokens >= 1")
    stops, end = [unescaped(s) for s in o.stop or []], prompts.begin(corpus)
    return [
        Continuation(
            corpus.tokenizer,
            p,
            title=f"prompt {number}, " * (len(given) > 1) + f"sample {i + 1}, seed {o.seed + i}",
            seed=o.seed + i,
            most=o.max_new_tokens,
            stops=stops,
            end=end,
        )
        for number, p in enumerate(given, 1)
        for i in range(o.num_samples)
    ]


def unescaped(text: str) -> str:
    """The line ends and tabs that one writes as \\n, \\r and \\t, since a shell makes typing them hard."""
    return re.sub(r"\\([ntr\\])", lambda found: ESCAPES[found[1]], text)


def notes(o: GenerateOptions, opened: Opened, samples: list[Continuation]) -> None:
    """What happens to these prompts that their user may not expect."""
    T, longest = opened.config.seq_len, max(len(s.prompt.ids) for s in samples)
    if (first := next((s.prompt for s in samples if s.prompt.empty), None)) is not None:
        label = ", ".join(opened.corpus.tokenizer.labels()[i] for i in first.ids)
        note(f"the prompt is empty, so the text starts after the token {label}")
    if o.overflow != "crop":
        return
    if longest > T:
        note(f"a prompt of {longest} tokens is longer than seq_len={T}: the model sees its last {T}")


def note_the_end_of_the_context(o: GenerateOptions, opened: Opened, streamed: bool) -> None:
    """Told when it is reached, which many texts never do."""
    if o.overflow == "crop" and o.cache and opened.model.causal:
        T = opened.config.seq_len
        way_out = "; overflow=slide does without" if opened.config.pos in ("rope", "none") else ""
        if streamed:  # the text is in the middle of a line
            print(file=sys.stderr)
        note(f"from here on the last seq_len={T} tokens are read anew for each token, which is slow{way_out}")


def note(text: str) -> None:
    print(f"toymha: note: {text}", file=sys.stderr)


def generate(o: GenerateOptions, opened: Opened, samples: list[Continuation], alone: bool) -> list[Step]:
    """The samples side by side, printed as they come: one that is `alone` by the token.

    Returns the steps of the first, if a trace is asked for.
    """
    rules = Rules.of(o)
    traced, out = [], OUTPUTS[o.output](samples, alone)
    made = steps(
        opened.gpt,
        [s.prompt.ids for s in samples],
        rules,
        opened.corpus.tokenizer.vocab_size,
        [s.seed for s in samples],
        o.max_new_tokens,
        cache=o.cache,
        overflow=o.overflow,
        attention=o.trace,
        over=lambda row, token: samples[row].add(token),
    )
    told = False
    try:
        for of_samples in made:
            if not told and any(step is not None and step.context_start for step in of_samples):
                note_the_end_of_the_context(o, opened, alone and o.output == "text")
                told = True
            for said, step in zip(samples, of_samples, strict=True):
                if step is not None:
                    said.logprob += float(step.logits_V.double().log_softmax(-1)[step.token])
            if o.trace and of_samples[0] is not None:
                traced.append(of_samples[0])
            out.tell()
    except KeyboardInterrupt:
        out.end_line()
        raise
    for said in samples:
        said.stopped = said.stopped or "context"
    out.tell()
    return traced
