"""The figures of `toymha bench`: speed over length, memory over length, the roofline. matplotlib inside functions."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toymha import runs
from toymha.plots import COLOURS, GRID, INK, QUIET, styled
from toymha.subjects import amount
from toymha.timing.bench_report import Row
from toymha.timing.roofline import Rates

PANEL = (4.4, 3.6)  # inches
MARKS = "osD^v<>P"
MOST = 16  # series that the legend names


def save(figure: Any, folder: Path, name: str = "bench") -> None:
    """bench.svg, whose text stays text, and bench.png; each is whole or the old one."""
    for kind in ("svg", "png"):
        out = io.BytesIO()
        figure.savefig(out, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
        content = out.getvalue()
        runs.write(folder / f"{name}.{kind}", lambda p, content=content: p.write_bytes(content))  # type: ignore[misc]


@styled()
def inference_plot(rows: list[Row], rates: Rates, folder: Path) -> None:
    """Tokens a second of prefill and decoding over the length of the prompt; the roofline."""
    rows = [r for r in rows if not r["check"]]
    figure, (left, middle, right) = panels(3, len({name for name, _ in series(rows)}))
    for axes, phase, title in ((left, "prefill", "prompt tokens"), (middle, "decode", "new tokens")):
        for (_, line), style in zip(series(rows), looks(rows)):
            axes.plot([r["prompt_len"] for r in line], [r[phase]["tokens_per_s"] for r in line], **style)
        lengths(axes, sorted({r["prompt_len"] for r in rows}), "tokens of the prompt")
        axes.set_ylabel(f"{title} a second")
    roofline(right, [(line, ("prefill", "decode")) for _, line in series(rows)], looks(rows), rates)
    legend(figure, left)
    save(figure, folder)


@styled()
def training_plot(rows: list[Row], _rates: Rates, folder: Path) -> None:
    """Tokens a second, and bytes that the backward pass keeps, over the context."""
    rows = [r for r in rows if not r["check"]]
    figure, (left, right) = panels(2, len({name for name, _ in series(rows)}))
    for (_, line), style in zip(series(rows), looks(rows)):
        x = [r["seq_len"] for r in line]
        left.plot(x, [r["step"]["tokens_per_s"] for r in line], **style)
        right.plot(x, [r["saved_bytes"] for r in line], **style)
        if line[0]["attention"] == "explicit":
            right.plot(x, [r["pattern_bytes_formula"] for r in line], ":", color=style["color"], linewidth=1)
            right.text(
                x[-1],
                line[-1]["pattern_bytes_formula"],
                "T x T alone   ",
                color=QUIET,
                fontsize=9,
                ha="right",
                va="top",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
            )
    for axes, what in ((left, "tokens a second"), (right, "bytes kept in training")):
        lengths(axes, sorted({r["seq_len"] for r in rows}), "context, tokens")
        axes.set_ylabel(what)
    legend(figure, left)
    save(figure, folder)


def panels(n: int, lines: int) -> tuple[Any, Any]:
    """A figure with n pairs of axes beside each other, and room for a legend of so many names below them."""
    from matplotlib.figure import Figure

    below = 0.26 * ((min(lines, MOST) + 1) // 2) + 0.15
    figure = Figure(figsize=(PANEL[0] * n, PANEL[1] + below), layout="constrained")
    figure.patch.set_facecolor("white")
    figure.get_layout_engine().set(rect=(0, below / (PANEL[1] + below), 1, 1 - below / (PANEL[1] + below)))  # type: ignore[union-attr, call-arg]
    return figure, figure.subplots(1, n)


def series(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Rows that differ in their length alone, as one line, under a name of what tells it from the others."""
    keys = [k for k in ("model", "attention", "precision", "batch", "cache") if k in rows[0]]
    told = [k for k in keys if k == "cache" or len({r[k] for r in rows}) > 1]
    found: dict[tuple, list[Row]] = {}
    for r in rows:
        found.setdefault(tuple(r[k] for k in keys), []).append(r)
    return [(", ".join(_said(k, line[0][k]) for k in told) or line[0]["model"], line) for line in found.values()]


def _said(key: str, value: Any) -> str:
    if key == "cache":
        return "cache" if value else "no cache"
    return f"batch {value}" if key == "batch" else str(value)


def looks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """How each line of `series` is drawn: a colour a model, a mark a batch size and precision; dashed where it does
    without a cache, or without the fused kernel."""
    found = series(rows)
    models = list(dict.fromkeys(line[0]["model"] for _, line in found))
    kinds = list(dict.fromkeys((line[0]["batch"], line[0]["precision"]) for _, line in found))
    styles = []
    for name, line in found:
        r = line[0]
        whole = r.get("cache", True) and r.get("attention", "fused") == "fused"
        colour = COLOURS[models.index(r["model"]) % len(COLOURS)]
        mark = MARKS[kinds.index((r["batch"], r["precision"])) % len(MARKS)]
        look: dict[str, Any] = {"color": colour, "marker": mark, "linestyle": "-" if whole else "--", "label": name}
        styles.append(look | {"markerfacecolor": colour if whole else "white", "markersize": 6, "linewidth": 1.5})
    return styles


def roofline(
    axes: Any, lines: Sequence[tuple[list[Row], Sequence[str]]], styles: Sequence[dict[str, Any]], rates: Rates
) -> None:
    """FLOP a second over FLOPs a byte, under what memory and products allow (Williams et al. 2009, figure 1)."""
    x = [r[p]["intensity"] for line, phases in lines for r in line for p in phases]
    low, high = min(x) / 3, max(*x, *(rate / rates.bandwidth for rate in rates.products.values())) * 3
    for bandwidth, dash in ((rates.bandwidth, "-"), (rates.cache_bandwidth, ":")):
        if bandwidth:
            for precision, rate in rates.products.items():
                if rate / bandwidth < high:
                    axes.plot([low, rate / bandwidth, high], [low * bandwidth, rate, rate], dash, color=QUIET, lw=1)
                    axes.text(high, rate * 1.1, f"products, {precision}", color=QUIET, fontsize=9, ha="right")
            name = "memory" if dash == "-" else "cache"
            axes.annotate(name, (low, low * bandwidth), (4, 2), textcoords="offset points", color=QUIET, fontsize=9)
    for (line, phases), style in zip(lines, styles):
        for phase in phases:
            size = {"markersize": 9 if phase == "prefill" else 5, "linestyle": ""}
            axes.plot([r[phase]["intensity"] for r in line], [r[phase]["flops_per_s"] for r in line], **style | size)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOPs a byte; large: the prompt")
    axes.set_ylabel("FLOP a second")
    powers(axes.xaxis)
    powers(axes.yaxis)
    axes.grid(color=GRID)


def lengths(axes: Any, at: Sequence[int], label: str) -> None:
    """Both axes logarithmic, with the lengths that were measured as ticks."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(at, [f"{n:,}" for n in at])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)
    powers(axes.yaxis)
    axes.grid(color=GRID)


def powers(axis: Any) -> None:
    """A logarithmic axis whose ticks are 1, 2 and 5 with k, M and G, few enough to be read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high < 300 * low else (1.0,)
    axis.set_major_locator(LogLocator(base=10, subs=subs, numticks=9))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: amount(x, "").strip()))


def legend(figure: Any, axes: Any) -> None:
    """Below the axes, one name a line."""
    handles, names = axes.get_legend_handles_labels()
    options = {"loc": "lower center", "ncol": 2, "frameon": False, "fontsize": 10, "labelcolor": INK}
    figure.legend(handles[:MOST], names[:MOST], **options)
