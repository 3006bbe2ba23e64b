"""Figures of heads: a layer's maps as PNG and SVG files; matrices and pruning curves as SVG text for the page.

A map has a row for each query and a column for each key. H heads, T query positions, S key positions, N all heads.
Sizes are in pixels of the SVG. Figures are made without pyplot, which would keep them open. The same values give the
same bytes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toymha import runs
from toymha.analysis import results
from toymha.plots import COLOURS, GRID, INK, QUIET, Style, styled, svg

MOST_TOKENS = 256  # on each side of a map; of a longer text the first so many
SCALE, DIVERGING = "YlGnBu", "RdBu"  # both can be told apart by colour-blind readers (Harrower and Brewer 2003)
TICKS = (0, 0.01, 0.05, 0.2, 0.5, 1)  # of the weights, which lie on a square-root scale
HAN = (
    *("Noto Sans CJK SC", "Noto Sans SC", "Noto Sans CJK JP", "Source Han Sans SC", "Source Han Sans CN"),
    *("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Microsoft YaHei", "SimHei", "DengXian", "SimSun", "PingFang SC"),
    *("PingFang HK", "Hiragino Sans GB", "Heiti SC", "Heiti TC", "STHeiti", "Songti SC", "Arial Unicode MS"),
    *("Noto Serif CJK SC", "Noto Serif CJK JP", "AR PL UMing CN", "AR PL UKai CN", "Droid Sans Fallback"),
)
LABEL = 10  # columns of a token's label; a Chinese character takes two
# Up to so many tokens: cells, letters.
SIZES = ((4, 40, 13), (8, 24, 12), (32, 16, 11), (64, 12, 10), (128, 10, 9), (MOST_TOKENS, 8, 7))
GAP, AXIS, TITLE, FOOT = 22, 22, 40, 58  # between maps, for a word at an axis, above a map, below all


# Text in figures


def visible(label: str) -> str:
    """A label in which nothing is invisible: a space is `␣`, a line end `\\n`, a NUL `\\x00`."""
    return "".join("␣" if c == " " else c if c.isprintable() else repr(c)[1:-1] for c in label)


def columns(text: str) -> int:
    """How wide a text is in Latin letters; one that stands on the letter before it takes no room."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def cut(text: str, most: int = LABEL) -> str:
    """The text, or as much of its begin as fits in so many columns, with an ellipsis."""
    if columns(text) <= most:
        return text
    end = next(n for n in range(len(text), -1, -1) if columns(text[:n]) < most)
    return text[:end] + "…"


@functools.cache
def families() -> tuple[str, ...]:
    """matplotlib's own font, and the first installed one of HAN for what that lacks."""
    from matplotlib import font_manager

    installed = set(font_manager.get_font_names())
    return ("DejaVu Sans", *[name for name in HAN if name in installed][:1])


@contextlib.contextmanager
def _unspoken() -> Iterator[None]:
    """matplotlib does not say that a Chinese font has no weight of just 400."""
    log = logging.getLogger("matplotlib.font_manager")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def lacking(texts: Iterable[str]) -> list[str]:
    """The characters that no font of `families` has: a PNG shows a box for each."""
    from matplotlib import font_manager

    known: set[int] = set()
    with _unspoken():
        for name in families():
            known |= font_manager.get_font(font_manager.findfont(name)).get_charmap().keys()
    return sorted(c for c in set().union(*texts) if ord(c) not in known)


# Colours


def palette() -> np.ndarray:
    """(256, 3) bytes: the colours of weights from 0 to 1; a weight w has entry 255 sqrt(w), rounded."""
    return _colours(SCALE)[:, :3]


def _colours(name: str) -> np.ndarray:
    from matplotlib import colormaps

    return colormaps[name](np.arange(256), bytes=True)


def painted(pattern_TS: np.ndarray, causal: bool) -> np.ndarray:
    """(T, S, 3) bytes: the colours of the weights, white where a causal head may not look."""
    out = palette()[np.rint(255 * np.sqrt(pattern_TS)).astype(int)]
    if causal:
        out[np.triu_indices(len(out), 1, out.shape[1])] = 255
    return out


# Maps


def write_maps(
    path: Path,
    titles: Sequence[str],
    pattern_HTS: np.ndarray,
    labels: Sequence[str],
    causal: bool,
    keys: Sequence[str] | None = None,
    words: tuple[str, str] = ("query", "key"),
) -> list[Path]:
    """One figure of a layer's maps as <path>.png and <path>.svg; `titles` may have two lines. `keys`: labels of the
    columns, where they are other tokens than those of the rows; `words`: at the axes, for rows and columns."""
    with styled(), _unspoken():
        figure, scale = _maps(titles, pattern_HTS, labels, labels if keys is None else keys, causal, words)
        png, vector = path.with_name(path.name + ".png"), path.with_name(path.name + ".svg")
        runs.write(png, lambda p: figure.savefig(p, format="png", dpi=72 * scale, metadata={"Software": None}))
        runs.write(vector, lambda p: figure.savefig(p, format="svg", metadata={"Date": None, "Creator": None}))
    return [png, vector]


def _maps(
    titles: Sequence[str],
    pattern_HTS: np.ndarray,
    queries: Sequence[str],
    keys: Sequence[str],
    causal: bool,
    words: tuple[str, str],
) -> tuple[Any, float]:
    """The figure, and how many pixels of a PNG make one of its own: two, fewer in one that is large already."""
    from matplotlib.figure import Figure

    H, T, S = len(titles), len(queries), len(keys)
    cell, size = next(s[1:] for s in SIZES if s[0] >= max(T, S))
    rows, columns = ([cut(visible(label)) for label in labels] for labels in (queries, keys))
    wide_S = _widths(columns, size)
    beside, below = max(_widths(rows, size)) + 6, max(wide_S) + 6  # room for the longest label
    across = min(H, 4 if max(T, S) <= 128 else 2)
    down = math.ceil(H / across)
    pitch = (AXIS + beside + max(cell * S, 200) + GAP, TITLE + cell * T + below + AXIS + GAP)
    width, height = across * pitch[0] + GAP, down * pitch[1] + FOOT + GAP
    figure = Figure(figsize=(width / 72, height / 72), dpi=72, facecolor="white")
    for h, title in enumerate(titles):
        left, top = GAP + (h % across) * pitch[0] + AXIS + beside, GAP + (h // across) * pitch[1] + TITLE
        box = left / width, 1 - (top + cell * T) / height, cell * S / width, cell * T / height
        axes = figure.add_axes(box)
        axes.imshow(painted(pattern_HTS[h], causal), interpolation="none", aspect="auto")
        axes.set_axis_off()
        _frame(axes, T, S)
        _label(axes, rows, columns, wide_S, cell, size)
        name, _, more = title.partition("\n")
        _at(axes, name, (0, 1), (0, 22), fontsize=14, weight="bold")
        _at(axes, more, (0, 1), (0, 7), fontsize=11, color=QUIET)
        _at(axes, words[1], (0.5, 0), (0, -below - 4), fontsize=size + 2, ha="center", va="top")
        side: Any = {"ha": "center", "va": "center", "rotation": 90}
        _at(axes, words[0], (0, 0.5), (-beside - 8, 0), fontsize=size + 2, **side)
    _scale(figure, GAP + AXIS, height - FOOT, width, height, causal)
    return figure, max(1.0, min(2.0, 4000 / width))


def _at(axes: Any, text: str, corner: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """A text so many pixels right of and above a point of the axes, given in shares of their sides."""
    style = {"color": INK} | style
    axes.annotate(text, corner, offset, xycoords="axes fraction", textcoords="offset points", **style)


def _frame(axes: Any, rows: int, columns: int) -> None:
    """A hair line around the cells."""
    right, foot = columns - 0.5, rows - 0.5
    axes.plot([-0.5, right, right, -0.5, -0.5], [-0.5, -0.5, foot, foot, -0.5], color="#bbbbbb", lw=0.8, clip_on=False)
    axes.set_xlim(-0.5, right)
    axes.set_ylim(foot, -0.5)


def _widths(shown: Sequence[str], size: float) -> list[float]:
    """How wide texts are, in pixels."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font = FontProperties(family=list(families()), size=size)
    with _unspoken():
        known = {text: text_to_path.get_text_width_height_descent(text, font, False)[0] for text in set(shown)}
    return [known[text] for text in shown]


def _label(
    axes: Any, rows: Sequence[str], columns: Sequence[str], wide_S: Sequence[float], cell: float, size: float
) -> None:
    """Labels left of the rows and below the columns, there upright where they are narrow enough. As texts, on a common
    baseline: ticks would take several times as long to draw."""
    end, drop = len(rows) - 0.5, 0.36 * size / cell  # from the middle of a letter to its foot, in cells
    style: dict[str, Any] = {"fontsize": size, "color": INK, "family": list(families())}
    for i, text in enumerate(rows):
        axes.text(-0.5 - 4 / cell, i + drop, text, ha="right", **style)
    for i, (text, width) in enumerate(zip(columns, wide_S)):
        if width > cell:
            axes.text(i, end + 4 / cell, text, ha="center", va="top", rotation=90, **style)
        else:
            axes.text(i, end + 4 / cell + 2 * drop, text, ha="center", **style)


def _scale(figure: Any, left: float, top: float, width: float, height: float, causal: bool) -> None:
    """The colours of the weights below all maps: a bar and what it means."""
    axes = figure.add_axes((left / width, 1 - (top + 12) / height, 240 / width, 12 / height))
    axes.imshow(palette()[None], interpolation="none", aspect="auto", extent=(0, 1, 0, 1))
    axes.set_yticks([])
    axes.set_xticks([math.sqrt(t) for t in TICKS], [f"{t:g}" for t in TICKS], fontsize=10)
    axes.tick_params(length=3)
    words = ["attention weight, on a square-root scale that all maps share"]
    words += ["white: masked, the key comes later than the query"] if causal else []
    _at(axes, "\n".join(words), (1, 0.5), (14, -4), fontsize=11, va="center")


# Figures in the page


@dataclass(frozen=True)
class Matrix:
    """An N x N matrix as a figure. `box`: left, top, width and height of its cells, as shares of the figure."""

    svg: str
    width: int  # below which its labels would be too small to read
    box: tuple[float, float, float, float]


@styled()
def matrix(values_NN: np.ndarray, heads: Sequence[results.Head], name: str, diverging: bool = False) -> Matrix:
    """Values from 0 to 1, or from -1 to 1, with the heads' names at both sides and lines between layers."""
    from matplotlib.figure import Figure

    N, low = len(heads), -1 if diverging else 0
    cell = max(13.0, 255 / N) if N <= 64 else max(3.0, 840 / N)
    side, left, top = cell * N, 56, 52
    begins = [i for i in range(N) if i == 0 or heads[i].layer != heads[i - 1].layer]
    at = begins if N > 64 else range(N)
    named, size = [heads[i].name for i in at], min(12.0, cell - 2) if N <= 64 else 11.0
    longest = max(_widths(named, size))
    turned = longest + 4 > cell
    width, height = left + side + 12, top + side + (longest if turned else size) + 12
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    axes = figure.add_axes((left / width, 1 - (top + side) / height, side / width, side / height))
    colours = _colours(DIVERGING if diverging else SCALE)
    entries = np.rint(255 * (np.clip(np.nan_to_num(values_NN), low, 1) - low) / (1 - low))
    axes.imshow(colours[entries.astype(int)], interpolation="none", aspect="auto")
    _frame(axes, N, N)
    axes.spines[:].set_visible(False)
    for i in begins[1:]:
        axes.axhline(i - 0.5, color=INK, linewidth=0.9)
        axes.axvline(i - 0.5, color=INK, linewidth=0.9)
    axes.set_xticks(at, named, rotation=90 if turned else 0, fontsize=size)
    axes.set_yticks(at, named, fontsize=size)
    axes.tick_params(length=0, colors=INK)
    bar = figure.add_axes((left / width, 1 - 22 / height, min(200, side) / width, 12 / height))
    bar.imshow(colours[None], interpolation="none", aspect="auto", extent=(low, 1, 0, 1))
    bar.set_yticks([])
    ticks = [low, (low + 1) / 2, 1]
    bar.set_xticks(ticks, [f"{t:g}".replace("-", "\N{MINUS SIGN}") for t in ticks], fontsize=11)
    bar.tick_params(length=3)
    return Matrix(svg(figure, name), round(width), (left / width, top / height, side / width, side / height))


@styled()
def scores(lines: Sequence[tuple[Style, Sequence[int], Sequence[float]]], name: str, top: float) -> str:
    """A score of several heads along training, from 0 to `top`: style, steps and values of each."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    width, height = 270, 170
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    axes = figure.add_axes((34 / width, 38 / height, 1 - 56 / width, 1 - 46 / height))
    for style, steps, values in lines:
        line: Any = (0, style.dash) if style.dash else "-"
        marker = "o" if len(steps) == 1 else "none"
        axes.plot(steps, values, color=style.colour, linestyle=line, linewidth=1.6, clip_on=False, marker=marker)
    axes.set_ylim(0, top)
    axes.set_xlim(0, max([1, *(step for _, steps, _ in lines for step in steps)]))
    axes.set_xlabel("step", fontsize=11, labelpad=2)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.3g}"))
    axes.tick_params(length=3, labelsize=11)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    return svg(figure, name)


def pruning_styles(curves: Iterable[str]) -> dict[str, Style]:
    """Name of an order -> how its line is drawn; `random` in grey."""
    named = [name for name in curves if name != "random"]
    out = {name: Style(COLOURS[i % len(COLOURS)]) for i, name in enumerate(named)}
    return {name: out.get(name, Style(QUIET, (5, 2))) for name in curves}


def risen(losses: Sequence[float], whole: float) -> list[float]:
    """By how many percent each loss's perplexity lies above that of the whole model (losses in nats)."""
    return [100 * math.expm1(loss - whole) for loss in losses]


@styled()
def pruning(found: results.Pruning, name: str) -> str:
    """Rise of perplexity against the share of heads removed, in percent both; the rise linear up to 1, then a log."""
    from matplotlib.figure import Figure

    width, height = 420, 340
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    axes = figure.add_axes((62 / width, 46 / height, 1 - 74 / width, 1 - 58 / height))
    style, seen = pruning_styles(found.curves), [100 * found.tolerance]
    for key, c in found.curves.items():
        share = [100 * k / max(1, len(c.loss) - 1) for k in range(len(c.loss))]
        rise, dash = risen(c.loss, c.loss[0]), style[key].dash
        if c.low:
            band = risen(c.low, c.loss[0]), risen(c.high, c.loss[0])
            axes.fill_between(share, *band, color=style[key].colour, alpha=0.16, linewidth=0)
            seen += [*band[0], *band[1]]
        line: Any = (0, dash) if dash else "-"
        marker = "o" if len(share) <= 40 else "none"
        axes.plot(share, rise, color=style[key].colour, linestyle=line, linewidth=1.8, marker=marker, markersize=3.5)
        seen += rise
    axes.axhline(100 * found.tolerance, color=INK, linewidth=0.9, linestyle=(0, (2, 2)))
    axes.set_yscale("symlog", linthresh=1, linscale=0.8)
    ticks = [s * t for s in (-1, 1) for t in (1, 3, 10, 30, 100, 300, 1e3, 1e4, 1e5, 1e6)] + [0]
    low, high = min(0.0, *seen), max(x for x in seen if math.isfinite(x))
    ticks = sorted(t for t in ticks if 1.05 * low <= t <= 1.5 * high)
    axes.set_yticks(ticks, [f"{t:,g}".replace("-", "\N{MINUS SIGN}") for t in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(low * 1.1 - 0.15, high * 1.3)
    axes.set_xlim(-1, 101)
    axes.set_xlabel("heads removed, %")
    axes.set_ylabel("perplexity above the whole model, %")
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    return svg(figure, name)
