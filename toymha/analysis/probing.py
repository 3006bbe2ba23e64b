"""`toymha heads probe=...`: the probes, from an opened model to their page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from toymha.analysis.probe import DepthStudy, Rows, ScaleStudy, depth_text, scale_text
from toymha.analysis.probe_depth import depth
from toymha.analysis.probe_page import write_probe
from toymha.analysis.probe_scale import scale, textbook, untrained
from toymha.analysis.study import about, subject
from toymha.console import quote
from toymha.opened import Opened

Logged = dict[str, Rows]  # name of a run -> its rows


def _scale(o: Any, opened: Opened, name: str, logged: Logged) -> tuple[ScaleStudy, list[str]]:
    s, c, V = subject(opened, o), opened.config, opened.corpus.tokenizer.vocab_size
    x_BT, _, _ = s.batch()
    fresh = untrained(c, V, x_BT)
    found = ScaleStudy(name, about(s), scale(opened.gpt, c, x_BT), textbook(seed=o.seed), fresh, logged)
    return found, scale_text(found)


def _depth(o: Any, opened: Opened, name: str, logged: Logged) -> tuple[DepthStudy, list[str]]:
    s, c, V = subject(opened, o), opened.config, opened.corpus.tokenizer.vocab_size
    x_BT, y_BT, _ = s.batch()
    trained = opened.gpt if opened.run else None
    found = DepthStudy(name, about(s), depth(c, V, x_BT, y_BT, trained), logged)
    return found, depth_text(found)


# What probe= names: a new one is added here.
PROBES: dict[str, Callable[[Any, Opened, str, Logged], tuple[Any, list[str]]]] = {"scale": _scale, "depth": _depth}


def probe(o: Any, opened: Opened, where: Path, logged: Logged | None = None) -> int:
    """Print what was found and write its page into `where`. `logged`: rows of several runs; null: of this one."""
    if logged is None:
        logged = {str(opened.run.path): opened.run.rows()} if opened.run else {}
    name = str(opened.run.path if opened.run else where)
    found, lines = PROBES[o.probe](o, opened, name, logged)
    print("\n".join(lines), flush=True)
    print(f"page    {quote(write_probe(where, found))}")
    return 0
