"""trace.txt: the steps of a trace for a terminal, in lines of one width; a Chinese character is two columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from toymha.analysis.plots import columns as width
from toymha.analysis.plots import cut
from toymha.table import columns

if TYPE_CHECKING:
    from toymha.generation.trace import Candidate, Look, Trace, View

WIDTH = 88  # of a line
BAR = 20  # of a bar for a probability of 1
LABEL = 24  # of a token's label
NEAREST = 256  # tokens under which weights are drawn, the last ones
EIGHTHS = " ▏▎▍▌▋▊▉"  # the end of a bar
HEIGHTS = "▁▂▃▄▅▆▇█"  # of a weight, on a scale of square roots


def text_of(trace: Trace) -> str:
    """The whole text."""
    lines = [trace.title, trace.says, ""]
    lines += columns([list(fact) for fact in trace.about], 2)
    lines += [line for note in trace.notes for line in textwrap.wrap(f"note: {note}", WIDTH)]
    if any(v.rows_RS is not None for v in trace.views):
        lines += [
            "",
            f"attention: {HEIGHTS} a weight from 0 to 1, on a scale of square roots; under each token, the mean over",
            "all heads. In brackets: positions, which count all tokens from 0.",
        ]
    for view in trace.views:
        lines += ["", *_step(trace, view)]
    return "\n".join(lines) + "\n"


def _step(trace: Trace, v: View) -> list[str]:
    head = f"step {v.number}: {v.label}"
    out = [head, "-" * width(head), *columns([list(fact) for fact in v.facts], 2), ""]
    table = [["", "token", "before", "", "after", ""], *map(_candidate, v.candidates)]
    table += [_candidate(v.others)] if v.others else []
    out += columns(table, 2)
    if v.rows_RS is not None:
        begin = max(v.start, v.query + 1 - NEAREST)
        weights, far = v.rows_RS[0].tolist(), begin - v.start
        out += ["", *([f"{far:,} earlier tokens, together {sum(weights[:far]):.2f}; then:"] if far else [])]
        out += under(trace.labels[begin : v.query + 1], weights[far:])
        heads = [f"{n} {_look(x)}" for n, x in zip(trace.rows, v.strongest) if n.startswith("L")]
        out += ["most of each head:", *wrapped(heads)]
    return out


def _candidate(c: Candidate) -> list[str]:
    mark = ">" if c.chosen else ""
    after = [removed(c), " " * BAR] if c.after is None else [percent(c.after), bar(c.after)]
    return [mark, cut(c.label, LABEL), percent(c.before), bar(c.before), *after]


def removed(c: Candidate) -> str:
    """What became of a token that is out."""
    return f"out by {c.by}" if c.by else "out"


def _look(x: Look) -> str:
    return f"{cut(x.label)} ({x.position}) {x.weight:.2f}"


def percent(p: float) -> str:
    """0.3123 -> 31.2 %; what would be 0.0 though it is not nothing is < 0.1."""
    return "< 0.1 %" if 0 < p < 0.0005 else f"{100 * p:.1f} %"


def bar(p: float) -> str:
    """A bar of block characters in BAR columns, to an eighth of one."""
    whole, rest = divmod(round(8 * BAR * min(p, 1)), 8)
    return ("█" * whole + (EIGHTHS[rest] if rest else "")).ljust(BAR)


def under(labels: Sequence[str], weights: Sequence[float]) -> list[str]:
    """Tokens in lines of at most WIDTH columns, under each its weight as the height of a block; a token longer than
    a block has blocks as wide as itself."""
    out, tokens, blocks, used = [], "", "", 0
    for label, weight in zip(labels, weights, strict=True):
        shown = cut(label)
        room = width(shown) + 1
        if used + room > WIDTH:
            out += [tokens.rstrip(), blocks.rstrip()]
            tokens, blocks, used = "", "", 0
        block = HEIGHTS[min(7, int(8 * max(weight, 0) ** 0.5))]
        tokens, blocks, used = f"{tokens}{shown} ", f"{blocks}{block * (room - 1)} ", used + room
    return [*out, tokens.rstrip(), blocks.rstrip()]


def wrapped(items: Sequence[str]) -> list[str]:
    """Items with two spaces between them, in lines of at most WIDTH columns."""
    out = [""]
    for item in items:
        longer = f"{out[-1]}  {item}" if out[-1] else item
        if width(longer) > WIDTH and out[-1]:
            out.append(item)
        else:
            out[-1] = longer
    return out
