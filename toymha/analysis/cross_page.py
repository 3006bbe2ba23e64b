"""heads.html of an encoder-decoder, and the figures beside it. The page needs no script: what a cell says shows where
one points at it. The same study gives the same bytes.

T rows, S columns of a map. Sizes in pixels.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toymha import runs
from toymha.analysis import plots
from toymha.analysis.cross import CrossStudy, Look, Pair, stack
from toymha.analysis.page import boxes, scale
from toymha.analysis.results import Head
from toymha.page import render

TOLD = 0.1  # weights from here on are told in the page, at most 10 in a row


@dataclass(frozen=True)
class Stack:
    """What one of the three attentions is called, and what stands at the axes of its maps."""

    title: str
    short: str
    words: tuple[str, str]
    causal: bool
    text: str


STACKS = {
    "cross": Stack(
        "Cross-attention",
        "cross",
        ("writes", "reads"),
        False,
        "A row is a step of the decoder, named by the target token that it writes. A column is a source token.",
    ),
    "layer": Stack(
        "Self-attention of the decoder",
        "decoder",
        ("writes", "reads"),
        True,
        "A row is a step, named by the token that it writes. A column is a token that the decoder has read: in step i "
        "the target token before, so that the diagonal is the newest one. White: it does not see later ones.",
    ),
    "encoder": Stack(
        "Self-attention of the encoder",
        "encoder",
        ("query", "key"),
        False,
        "A row is a source token that looks, a column one that is looked at; the encoder sees all of them.",
    ),
}


def write_cross(folder: Path, found: CrossStudy) -> tuple[list[Path], list[str]]:
    """heads.html and maps/pair<n>_<attention>.png and .svg. Returns the paths, the page first, and what the user
    should know: characters that no font has."""
    (folder / "maps").mkdir(parents=True, exist_ok=True)
    notes = boxes(label for p in found.pairs for label in (*p.source, *p.target, *p.past))
    paths: list[Path] = []
    for i, p in enumerate(found.pairs, 1):
        for name, pattern_HTS in p.maps.items():
            kind, (rows, columns) = STACKS[stack(name)], p.sides(name)
            titles = [f"{kind.short} {head.name}\n{said(found, name, head)}" for head in found.heads[name]]
            path = folder / "maps" / f"pair{i}_{name}"
            paths += plots.write_maps(path, titles, pattern_HTS.numpy(), rows, kind.causal, columns, kind.words)
    runs.write_text(folder / "heads.html", render("cross.html", **facts_of(found, notes)))
    return [folder / "heads.html", *paths], notes


def facts_of(found: CrossStudy, notes: Sequence[str]) -> dict[str, Any]:
    """All that the template needs."""
    return {
        "study": found,
        "notes": notes,
        "statement": statement(found),
        "cells": cells(found) if found.measured else [],
        "rows": rows_told(found),
        "stacks": {stack(name): STACKS[stack(name)] for p in found.pairs for name in p.maps},
        "shown": [(i, p, _files(p), _drawn(found, p)) for i, p in enumerate(found.pairs, 1)],
        **scale(),
    }


# Numbers

LEAST = 100  # rows of pairs of equal lengths, below which nothing is said of diagonals


def cells(found: CrossStudy) -> list[list[str]]:
    """A line for each head of cross-attention, the head of the table first, and what even weights would give."""
    assert found.measured
    lines = [["cross", "entropy", "largest", "diagonal", "antidiagonal", "begin"]]
    for name, x in [*((h.name, x) for h, x in found.measured.heads.items()), ("even weights", found.measured.even)]:
        shares = [share(s) for s in (x.diagonal, x.antidiagonal)]
        lines.append([name, f"{x.entropy:.3f}", f"{x.largest:.3f}", *shares, share(x.begin)])
    return lines


def share(x: float | None) -> str:
    return "-" if x is None else f"{100 * x:.1f} %"


def rows_told(found: CrossStudy) -> str:
    """What the numbers were measured on."""
    if not (m := found.measured):
        return ""
    on = "all" if m.pairs == m.of else f"{m.pairs:,} of {m.of:,}"
    return f"{on} validation pairs, {m.rows:,} rows; diagonals: {m.aligned:,} rows of pairs of equal lengths"


def statement(found: CrossStudy) -> str:
    """The head that reads most nearly one token after the other."""
    if not found.measured:
        return "cross_attention=false: the decoder sees its own past alone, so there are no maps of cross-attention"
    best: tuple[float, str, Head] | None = None
    for head, x in found.measured.heads.items():
        for name in ("diagonal", "antidiagonal"):
            if (value := getattr(x, name)) is not None and (best is None or value > best[0]):
                best = value, name, head
    if best is None:
        return "No pair has as many source as target tokens, so nothing is known of diagonals"
    if (n := found.measured.aligned) < LEAST:
        return f"Only {n} rows are of pairs with as many source as target tokens, too few to tell of diagonals"
    value, name, head = best
    largest, even = found.measured.heads[head].largest, getattr(found.measured.even, name)
    lies = f"its largest weight, {largest:.2f} in the mean, lies there in {share(value)} of {n:,} rows"
    return f"{head.name} comes closest to reading the {name}: {lies} ({share(even)} by chance)"


def said(found: CrossStudy, name: str, head: Head) -> str:
    """A few numbers of a head of cross-attention, for a title."""
    if not found.measured or stack(name) != "cross":
        return ""
    x: Look = found.measured.heads[head]
    on = max(((v, k) for k in ("diagonal", "antidiagonal") if (v := getattr(x, k)) is not None), default=None)
    return f"entropy {x.entropy:.2f}" + (f", {on[1]} {share(on[0])}" if on else "")


# Maps in the page


@dataclass(frozen=True)
class Drawn:
    """One map as parts of an SVG. Labels: x, y and text of each row; of each column also whether it is turned. marks:
    x, y and words of each cell whose weight is told."""

    title: str
    caption: str
    alt: str
    width: float
    height: float
    left: float
    foot: float
    cell: float
    size: float
    image: str
    rows: list[tuple[float, float, str]]
    columns: list[tuple[float, float, str, bool]]
    marks: list[tuple[float, float, str]]


def _files(p: Pair) -> list[tuple[str, str]]:
    """Of each figure the name of its attention in the files, and in words."""
    return [(name, f"{STACKS[stack(name)].short}, layer {name.removeprefix(stack(name))}") for name in p.maps]


def _drawn(found: CrossStudy, p: Pair) -> dict[str, list[tuple[str, list[Drawn]]]]:
    """`cross` -> (its name, the maps of its heads) for each layer."""
    out: dict[str, list[tuple[str, list[Drawn]]]] = {}
    for name in p.maps:
        heads = zip(found.heads[name], p.maps[name].numpy(), strict=True)
        drawn = [draw(p, name, head.name, said(found, name, head), pattern_TS) for head, pattern_TS in heads]
        out.setdefault(stack(name), []).append((name, drawn))
    return out


def draw(p: Pair, name: str, title: str, caption: str, pattern_TS: np.ndarray) -> Drawn:
    """The map of one head."""
    kind, sides = STACKS[stack(name)], p.sides(name)
    T, S = pattern_TS.shape
    cell, size = next(s[1:] for s in plots.SIZES if s[0] >= max(T, S))
    rows, columns = ([plots.cut(label) for label in labels] for labels in sides)
    wide_T, wide_S = ([0.58 * size * plots.columns(text) for text in labels] for labels in (rows, columns))
    turned = [wide > cell for wide in wide_S]
    left, foot = 18 + max(wide_T) + 8, 2 + cell * T
    below = max(wide if turn else size for wide, turn in zip(wide_S, turned)) + 8
    marks = []
    for t, s in zip(*(axis.tolist() for axis in np.nonzero(pattern_TS >= TOLD))):
        words = f"{kind.words[0]} {sides[0][t]}, {kind.words[1]} {sides[1][s]}: {pattern_TS[t, s]:.3f}"
        marks.append((left + cell * s, 2 + cell * t, words))
    return Drawn(
        title=title,
        caption=caption,
        alt=f"{kind.title}, head {title}, of {p.title}",
        width=left + cell * S + 2,
        height=foot + below + 20,
        left=left,
        foot=foot,
        cell=cell,
        size=size,
        image=_png(plots.painted(pattern_TS, kind.causal)),
        rows=[(left - 5, 2 + cell * (t + 0.5) + 0.36 * size, text) for t, text in enumerate(rows)],
        columns=[(left + cell * (s + 0.5), foot + 5, text, turned[s]) for s, text in enumerate(columns)],
        marks=marks,
    )


def _png(colours_TSC: np.ndarray) -> str:
    """A pixel for each cell, in base64."""
    from matplotlib.image import imsave

    file = io.BytesIO()
    no_version: dict[str, Any] = {"Software": None}
    imsave(file, colours_TSC, format="png", metadata=no_version)
    return base64.b64encode(file.getvalue()).decode()
