"""The figures of the probes, as SVG text: numbers over head_dim, over blocks, over steps. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from toymha import plots
from toymha.plots import COLOURS, GRID, QUIET, Style
from toymha.table import Row

DASH = (5, 2)
BY_RULE = Style(QUIET, (2, 2))  # what a derivation says
MOST_LABELS = 8  # on one axis
LEAST_FACTOR, LEAST = 5.5, 0.05  # what a logarithmic and a plain axis span at least


@dataclass(frozen=True)
class Line:
    """y over x; `mark`: matplotlib's marker for each point, `joined`: with a line through them."""

    x: Sequence[float]
    y: Sequence[float]
    style: Style
    mark: str = ""
    joined: bool = True
    filled: bool = True


@dataclass(frozen=True)
class Axis:
    """log: logarithmic. limits: of a plain axis, else what is drawn on it. at: where its labels are, else chosen."""

    label: str
    log: bool = False
    limits: tuple[float, float] | None = None
    at: Sequence[float] | None = None


def layer_styles(layers: Iterable[int]) -> dict[int, Style]:
    """A colour for each layer, on a scale from first to last."""
    found = list(layers)
    return dict(zip(found, plots.styles([Row({"layer": layer}) for layer in found])))


def model_styles(names: Sequence[str]) -> dict[str, Style]:
    """A colour for each name, in the order given."""
    return {n: Style(COLOURS[i % len(COLOURS)], DASH if i >= len(COLOURS) else ()) for i, n in enumerate(names)}


@plots.styled()
def lines(drawn: Sequence[Line], x: Axis, y: Axis, name: str, height: int = 260) -> str:
    """Lines and points over x. On a logarithmic axis what is not positive is left out. `name`: unique on the page."""
    figure, axes = plots._figure(height, left=62, right=14, top=10, bottom=48)
    for line in drawn:
        points = [(a, b) for a, b in zip(line.x, line.y) if _fits(a, x) and _fits(b, y)]
        if not points:
            continue
        dash: Any = ((0, line.style.dash) if line.style.dash else "-") if line.joined else "none"
        mark = line.mark or ("o" if len(points) == 1 else "")
        face = line.style.colour if line.filled else "none"
        look = {"marker": mark or None, "markersize": 5, "markerfacecolor": face, "markeredgewidth": 1.4}
        axes.plot(*zip(*points), color=line.style.colour, linestyle=dash, linewidth=1.8, **look)
    for axis, place, coordinates in ((x, axes.xaxis, [v for d in drawn for v in d.x]), (y, axes.yaxis, _ys(drawn))):
        _axis(axes, axis, place, [v for v in coordinates if _fits(v, axis)])
    axes.set_xlabel(x.label)
    axes.set_ylabel(y.label)
    axes.grid(axis="y", color=GRID)
    axes.set_axisbelow(True)
    return plots.svg(figure, name)


def _ys(drawn: Sequence[Line]) -> list[float]:
    return [v for d in drawn for v in d.y]


def _fits(value: float, axis: Axis) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.log)


def _axis(axes: Any, axis: Axis, place: Any, values: Sequence[float]) -> None:
    """Its scale, its ends and its labels."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    is_x = place is axes.xaxis
    low, high = (min(values, default=1.0), max(values, default=2.0))
    if axis.log:
        (axes.set_xscale if is_x else axes.set_yscale)("log")
        short = max(1.0, LEAST_FACTOR / (high / low)) ** 0.5
        low, high = low / short / 1.1, high * short * 1.1
    elif axis.limits:
        low, high = axis.limits
    else:
        short = max(LEAST, (high - low) * 1.08) - (high - low)
        low, high = low - short / 2, high + short / 2
    (axes.set_xlim if is_x else axes.set_ylim)(low, high)
    if axis.log or axis.at is not None:
        at = list(axis.at) if axis.at is not None else _decades(low, high)
        step = -(-len(at) // MOST_LABELS)
        place.set_major_locator(FixedLocator(at[::step]))
        place.set_minor_locator(NullLocator())
        place.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.6g}".replace("-", "\N{MINUS SIGN}")))
        place.set_tick_params(length=3)
    else:
        plots._ticks(place, 5)


def _decades(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... between two positive numbers; powers of ten alone where those are many."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    few = [10.0**p for p in powers]
    many = [m * p for p in few for m in (1, 2, 5)]
    chosen = few if high / low > 1000 else many
    return [v for v in chosen if low <= v <= high]
