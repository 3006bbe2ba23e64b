"""How figures are drawn, as SVG text: effects with their intervals, curves. No torch; matplotlib inside functions.

A figure is drawn narrow, so that it is legible on a telephone, and without title and legend: those are HTML beside it,
where long names wrap. Its text stays text (svg.fonttype none): small files, searchable, and the reader's browser has
the Chinese characters that matplotlib's fonts lack. The same numbers give the same bytes.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import textwrap
import unicodedata
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from toymha.table import Row

WIDTH = 400  # of a figure, in the pixels of its text
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#333333", "#8c564b")  # Okabe, Ito 2008
INK, QUIET, GRID = "#222222", "#666666", "#e4e4e4"
BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # text: no line runs through it
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "toymha",  # else the ids in it are random
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
    "font.family": "DejaVu Sans",
    "font.size": 13,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """matplotlib's settings while a figure is made and written, whatever the user's own matplotlibrc says."""
    import matplotlib

    defaults: Any = {
        k: v for k, v in matplotlib.rcParamsDefault.items() if not k.startswith("backend")
    }  # not ours to set
    with matplotlib.rc_context(defaults | STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # it is only measured here; the browser draws it
        yield


@dataclass(frozen=True)
class Bar:
    """One line of an effect plot, in the unit of its axis; nan where there is nothing to draw."""

    label: str
    value: float
    low: float = math.nan
    high: float = math.nan
    wide: tuple[float, float] | None = None  # a second interval, drawn thin
    said: str = ""  # at the right end
    colour: str = INK
    filled: bool = True


@styled()
def forest(
    bars: Sequence[Bar], axis: str, name: str, region: tuple[float, float] | None = None, zero: bool = True
) -> str:
    """Numbers with intervals, one below the other, each under its label; `region`: what is claimed of them.

    `zero`: a line at 0, which is where there is no difference; it means nothing for a number itself.
    """
    labels = _apart(bars)
    tops = [0.0]
    for lines in labels:
        tops.append(tops[-1] + 17 * max(1, len(lines)) + 22)
    figure, axes = _figure(tops[-1] + 58, left=10, right=10, top=6, bottom=46)
    axes.set_ylim(tops[-1] + 6, 0)
    low, high = _span(bars, region, zero)
    axes.set_xlim(low, high)
    if region:
        axes.axvspan(max(region[0], low), min(region[1], high), color="#dcebf7", zorder=0)
    for b, lines, top in zip(bars, labels, tops):
        y = top + 17 * max(1, len(lines)) + 10
        if zero:  # beside the bar alone: it would run through the label above
            axes.plot((0, 0), (y - 8, y + 12), color=INK, linewidth=1, solid_capstyle="butt", zorder=1)
        for i, line in enumerate(lines):
            axes.text(0.005, top + 13 + 17 * i, line, transform=axes.get_yaxis_transform(), color=INK, bbox=BEHIND)
        _at_right(axes, b, top + 13)
        if math.isfinite(b.value):
            _bar(axes, b, y)
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    axes.set_xlabel(axis)
    _ticks(axes.xaxis, 5)
    return svg(figure, name)


def _apart(bars: Sequence[Bar]) -> list[list[str]]:
    """Each label in two lines at most, or in as many as it takes for labels that differ to look different."""
    most = 2
    while True:
        cut = [shortened(b.label, 28 if b.said else 46, most) for b in bars]
        if len({tuple(c) for c in cut}) == len({b.label for b in bars}) or most > max(len(b.label) for b in bars):
            return cut
        most += 1


def _bar(axes: Any, b: Bar, y: float) -> None:
    for ends, width in ((b.wide, 1), ((b.low, b.high), 3)):
        if ends and all(map(math.isfinite, ends)):
            axes.plot(ends, (y, y), color=b.colour, linewidth=width, solid_capstyle="butt", zorder=2)
            if width == 1:
                axes.plot(ends, (y, y), "|", color=b.colour, markersize=9, zorder=2)
    face = b.colour if b.filled else "white"
    axes.plot([b.value], [y], "o", color=b.colour, markerfacecolor=face, markersize=8, markeredgewidth=1.6, zorder=3)


def _at_right(axes: Any, b: Bar, y: float) -> None:
    if b.said:
        where = {"transform": axes.get_yaxis_transform(), "horizontalalignment": "right", "bbox": BEHIND}
        axes.text(0.995, y, b.said, color=b.colour if b.colour != INK else QUIET, **where)


def _span(bars: Iterable[Bar], region: tuple[float, float] | None, zero: bool) -> tuple[float, float]:
    """The ends of the axis: all that is finite, and zero where it is asked for, with some air."""
    numbers = [*((0.0,) if zero else ()), *(region or ())]
    for b in bars:
        numbers += [b.value, b.low, b.high, *(b.wide or ())]
    finite = [x for x in numbers if math.isfinite(x)]
    low, high = min(finite), max(finite)
    air = 0.08 * (high - low) or 1.0
    return low - air, high + air


@dataclass(frozen=True)
class Style:
    """How a row is drawn, in the figure and in the legend beside it."""

    colour: str
    dash: tuple[int, ...] = ()


def styles(rows: Sequence[Row]) -> list[Style]:
    """A scale of colours where the rows are steps of one number, else colours that are far apart; then dashes."""
    values = [v for row in rows for v in row.setting.values()]
    numbers = len(values) == len(rows) and all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
    if not numbers or len(rows) < 3:
        return [Style(COLOURS[i % len(COLOURS)], (5, 2) if i >= len(COLOURS) else ()) for i in range(len(rows))]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    scale = colormaps["viridis"]
    return [Style(to_hex(scale(0.88 * i / (len(rows) - 1))), (5, 2) if i % 2 else ()) for i in range(len(rows))]


@dataclass(frozen=True)
class Curve:
    """A number along training: mean, least and most over a row's finished runs; every other run on its own."""

    style: Style
    steps: list[int] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    loose: list[tuple[list[int], list[float], bool]] = field(default_factory=list)  # steps, values, whether it diverged

    @property
    def series(self) -> list[tuple[list[int], list[float]]]:
        drawn = [(self.steps, v) for v in (self.low, self.high)] if self.steps else []
        return drawn + [(steps, values) for steps, values, _ in self.loose]


def curve(row: Row, logged: dict[str, list[dict[str, Any]]], tag: str, style: Style) -> Curve:
    """`logged`: run folder -> its rows. The mean is over the steps that all finished runs have, so that none drops out
    of it on the way."""
    done, loose = [], []
    for r in row.results:
        points = {x["step"]: x[tag] for x in logged.get(str(r.path), []) if _finite(x.get(tag))}
        if points and r.done:
            done.append(points)
        elif points:
            loose.append((sorted(points), [points[s] for s in sorted(points)], r.status == "diverged"))
    steps = sorted(set.intersection(*(set(p) for p in done))) if done else []
    at = [[p[s] for p in done] for s in steps]
    return Curve(style, steps, [math.fsum(v) / len(v) for v in at], [*map(min, at)], [*map(max, at)], loose)


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


@styled()
def curves(lines: Sequence[Curve], axis: str, name: str, height: int, limits: tuple[float, float] | None = None) -> str:
    """Means with bands; unfinished runs dotted, a cross where one diverged. `limits` of y: else of the later part."""
    figure, axes = _figure(height, left=60, right=12, top=10, bottom=48)
    low, high = limits or _later(lines)
    for c in lines:
        if c.steps:
            axes.fill_between(c.steps, c.low, c.high, color=c.style.colour, alpha=0.18, linewidth=0)
            dash: Any = (0, c.style.dash) if c.style.dash else "-"
            alone = {"marker": "o"} if len(c.steps) == 1 else {}
            axes.plot(c.steps, c.mean, color=c.style.colour, linestyle=dash, linewidth=1.8, **alone)
        for steps, values, diverged in c.loose:
            axes.plot(steps, values, color=c.style.colour, linestyle=":", linewidth=1.2)
            if diverged:
                end = min(max(values[-1], low), high)
                axes.plot(steps[-1:], [end], "x", color=c.style.colour, markersize=8, clip_on=False)
    axes.set_ylim(low, high)
    axes.set_xlim(left=0)
    axes.set_xlabel("step")
    axes.set_ylabel(axis)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    _ticks(axes.xaxis, 5)
    _ticks(axes.yaxis, 6)
    return svg(figure, name)


def _later(lines: Sequence[Curve]) -> tuple[float, float]:
    """Limits that show what comes after the first fifth of training: the fall before it would flatten all the rest."""
    series = [s for c in lines for s in c.series[:2] if c.steps] or [s for c in lines for s in c.series]
    begin = max((steps[-1] for steps, _ in series), default=0) / 5
    values = [v for steps, vs in series for s, v in zip(steps, vs) if s >= begin or len(steps) == 1]
    low, high = min(values, default=0.0), max(values, default=1.0)
    air = 0.05 * (high - low) or 0.5
    return low - air, high + air


# Text and SVG


def shortened(text: str, width: int, lines: int = 2) -> list[str]:
    """Text in so many lines at most; a Chinese character is two wide. What is left out of the middle is an ellipsis."""
    wide = sum(unicodedata.east_asian_width(ch) in "WF" for ch in text)
    columns = max(8, width * len(text) // (len(text) + wide)) if text else width
    out = textwrap.wrap(text, columns, break_on_hyphens=False)
    return out if len(out) <= lines else [*out[: lines - 1], "…" + text[1 - columns :].lstrip()]


def _figure(height: float, left: float, right: float, top: float, bottom: float) -> tuple[Any, Any]:
    """A figure with one pair of axes, margins in pixels. Not by pyplot, which would keep it open."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
    box = (left / WIDTH, bottom / height, 1 - (left + right) / WIDTH, 1 - (top + bottom) / height)
    return figure, figure.add_axes(box)


def _ticks(axis: Any, most: int) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(most))
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.6g}".replace("-", "\N{MINUS SIGN}")))
    axis.set_tick_params(length=3)


def svg(figure: Any, name: str) -> str:
    """The figure as an <svg> element for a page: it scales, and its ids begin with `name`, unique on the page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*|<style.*?</style>\s*|<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg [^>]*viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true">', text, count=1)
    text = re.sub(r"font-family: [^;\"]*; ?| transform=\"rotate\(-0 [^)]*\)\"", "", text)  # the font of the page
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text).replace("xlink:href", "href")
