"""What trace.html says beside the steps themselves: the weights for its script, two figures, the colours."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from toymha.analysis.page import colours, scale
from toymha.analysis.probe_plots import DASH, Axis, Line, lines
from toymha.generation.trace_text import percent, removed
from toymha.page import with_script
from toymha.pictures import Picture
from toymha.plots import COLOURS, Style

if TYPE_CHECKING:
    from toymha.generation.trace import Trace

FARTHEST = 2000  # tokens of the prompt that are shown, the last ones
ROOM = 1_000_000  # weights of attention: a byte each, and three bytes take four letters
UNITS = 255  # of the square root of a weight: small weights are as legible as large ones
AS_READ, AGAIN = Style(COLOURS[0]), Style(COLOURS[1], DASH)  # tokens read: as it was, and without a cache


def facts_of(trace: Trace) -> dict[str, Any]:
    """All that the template needs."""
    data, notes = data_of(trace)
    return {
        "trace": trace,
        "notes": [*trace.notes, *notes],
        "begin": data["begin"],
        "percent": percent,
        "removed": removed,
        "pictures": _pictures(trace),
        "read": [("as it was", AS_READ), ("without a cache", AGAIN)],
        "recorded": any(v.rows_RS is not None for v in trace.views),
        **scale(),
        **with_script("trace.js"),
        "data": Markup(json.dumps(data, separators=(",", ":"))),  # numbers and names of heads: nothing from a text
    }


def data_of(trace: Trace) -> tuple[dict[str, Any], list[str]]:
    """What the script of the page reads, and what the page has no room for, in words.

    The means over all heads come first; what room they leave goes to the other rows, the first steps first.
    """
    begin = max(0, trace.prompt - FARTHEST)
    notes = [f"The page begins at token {begin:,} of the prompt."] if begin else []
    across = {v.number: v.query + 1 - max(v.start, begin) for v in trace.views if v.rows_RS is not None}
    left, full = ROOM - sum(across.values()), 0
    for number, cells in across.items():
        left -= (len(trace.rows) - 1) * cells
        if left < 0:
            notes.append(f"From step {number} on, attention is shown as the mean over all heads only.")
            break
        full = number + 1
    steps = []
    for v in trace.views:
        rows_RS = None if v.rows_RS is None else v.rows_RS[: None if v.number < full else 1, max(0, begin - v.start) :]
        steps.append({"start": max(v.start, begin) - begin, "query": v.query - begin, "rows": pack(rows_RS)})
    return {"begin": begin, "names": trace.rows, "steps": steps, "colours": "".join(colours())}, notes


def pack(rows_RS: np.ndarray | None) -> str:
    """Square roots of the weights in units of 1 / 255, a byte each, row by row, in base64."""
    if rows_RS is None:
        return ""
    return base64.b64encode(np.rint(UNITS * np.sqrt(rows_RS.clip(0, 1))).astype(np.uint8).tobytes()).decode()


def _pictures(trace: Trace) -> list[Picture]:
    """The cache as it grows, and the tokens that were read, added up. Units stand in titles, clear of long numbers."""
    at = [v.number for v in trace.views]
    x, out = Axis("step", at=at), []
    if any(trace.held):
        held = [n / 1024 for n in trace.held]
        svg = lines([Line(at, held, AS_READ)], x, Axis("", limits=(0, 1.08 * max(held))), "cache")
        out.append(
            Picture("Cache, in KiB", svg, "Keys and values of all layers after each step; 1 KiB is 1,024 bytes.")
        )
    read, again = np.cumsum(trace.read).tolist(), np.cumsum(trace.again).tolist()
    y = Axis("", limits=(0, 1.08 * max(*read, *again)))
    svg = lines([Line(at, again, AGAIN), Line(at, read, AS_READ)], x, y, "read")
    out.append(Picture("Tokens read, added up", svg, "Without a cache the text so far is read in each step."))
    return out
