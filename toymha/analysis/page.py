"""heads.html and the figures beside it: everything that is known of the heads of a run, in one file that asks nobody
for anything. The same study gives the same bytes.

H heads of a layer, N of the model, T query positions, S key positions.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from toymha import runs
from toymha.analysis import plots, tables
from toymha.analysis.results import Head, Passage, Study
from toymha.page import render, with_script
from toymha.pictures import Picture
from toymha.plots import COLOURS, Style

UNITS = 65535  # of a weight of 1 in the page
ALONG = "head_"  # tags of the logged scores: head_<score>/L0H3
LEFT_OUT = ("diagonal", "second", "offset", "entropy")  # of those scores: they make no curve that is worth its room


def write_study(folder: Path, study: Study, along: Sequence[Mapping[str, Any]] = ()) -> tuple[list[Path], list[str]]:
    """heads.html and, where there is a text, maps/layer<n>.png and .svg for each layer that has heads.

    `along`: logged rows of the run, with `step` and the scores of heads as head_<score>/L0H3. Returns the paths, the
    page first, and what the user should know: a text that was cut, characters that no font has.
    """
    (folder / "maps").mkdir(parents=True, exist_ok=True)
    notes: list[str] = []
    paths: list[Path] = []
    if study.passage:
        passage, said = cropped(study.passage)
        study = replace(study, passage=passage)
        notes += [*said, *boxes(passage.labels)]
        for layer, heads in _layers(study.heads).items():
            titles = [tables.title(study, head) for head in heads]
            name = folder / "maps" / f"layer{layer}"
            paths += plots.write_maps(name, titles, _numbers(passage, layer), passage.labels, causal(passage))
    runs.write_text(folder / "heads.html", render("heads.html", **facts_of(study, along, notes)))
    return [folder / "heads.html", *paths], notes


def cropped(passage: Passage) -> tuple[Passage, list[str]]:
    """Its first tokens, as many as maps can show, and a note if there were more."""
    most, T = plots.MOST_TOKENS, len(passage.labels)
    if most >= T:
        return passage, []
    patterns = [p[:, :most, :most] for p in passage.patterns]
    note = f"The maps show the first {most} of the text's {T:,} tokens: more would not be legible."
    return replace(passage, labels=passage.labels[:most], patterns=patterns), [note]


def boxes(labels: Iterable[str]) -> list[str]:
    """A note, if the PNG maps cannot show some of these."""
    missing = plots.lacking(map(plots.visible, labels))
    if not missing:
        return []
    some = " ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return [
        f"The PNG maps show boxes for {some}: no font that matplotlib finds has them (for Chinese, install Noto Sans "
        "CJK). The SVG maps and the page are right: the reader's own fonts draw them."
    ]


def _layers(heads: Iterable[Head]) -> dict[int, list[Head]]:
    out: dict[int, list[Head]] = {}
    for head in heads:
        out.setdefault(head.layer, []).append(head)
    return out


def _numbers(passage: Passage, layer: int) -> np.ndarray:
    """pattern_HTS of a layer, float64."""
    return passage.patterns[layer].detach().double().cpu().numpy()


def causal(passage: Passage) -> bool:
    """Whether no head puts any weight on a later token."""
    return all(not np.triu(_numbers(passage, n), 1).any() for n in range(len(passage.patterns)))


# What the page says


def facts_of(study: Study, along: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> dict[str, Any]:
    """All that the template needs."""
    matrices = matrices_of(study)
    return {
        "study": study,
        "notes": [*notes, *study.notes],
        "overview": tables.overview(study),
        "rows": [(n, [_card(study, head) for head in heads]) for n, heads in _layers(study.heads).items()],
        "widest": max((head.head + 1 for head in study.heads), default=1),
        "causal": study.passage is not None and causal(study.passage),
        **scale(),
        "names": tables.explained(study),
        "clusters": tables.clusters(study),
        "tables": tables.of(study),
        "matrices": matrices,
        "along": along_training(study.heads, along),
        "pruning": _pruning(study),
        **with_script("heads.js"),
        "data": Markup(_json(data_of(study, matrices))),
    }


def _card(study: Study, head: Head) -> dict[str, Any]:
    importance = tables.importance(study, head, short=True)
    return {"name": head.name, "column": head.head + 1, "kind": tables.kind(study, head), "importance": importance}


def scale() -> dict[str, Any]:
    """The colours of weights and their marks, for `weights_scale` in page.html."""
    return {
        "gradient": ", ".join("#" + c for c in colours()[::15]),
        "ticks": [(f"{t:g}", f"{100 * t**0.5:.1f}") for t in plots.TICKS],
    }


def colours() -> list[str]:
    """Of weights from 0 to 1, on the scale of their square roots, as hexadecimal digits."""
    return [bytes(c).hex() for c in plots.palette()]


def _json(value: Any) -> str:
    """For a <script> element: no `<` in it, so that nothing ends it early or opens a comment."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def data_of(study: Study, matrices: Mapping[str, plots.Matrix]) -> dict[str, Any]:
    """What the script of the page reads: the text, each head with its packed pattern, the values of the matrices."""
    out: dict[str, Any] = {
        "names": [h.name for h in study.heads],
        "matrices": {key: {"box": m.box, "values": _rounded(_values(study)[key])} for key, m in matrices.items()},
    }
    if not study.passage or not study.heads:
        return out
    passage, packed = study.passage, []
    for layer in _layers(study.heads):
        packed += [pack(p, causal(passage)) for p in _numbers(passage, layer)]
    return out | {
        "labels": [plots.visible(label) for label in passage.labels],
        "causal": causal(passage),
        "titles": [tables.title(study, h).replace("\n", " · ") for h in study.heads],
        "patterns": packed,
        "colours": "".join(colours()),
        "first": tables.first(study),
    }


def pack(pattern_TS: np.ndarray, causal: bool) -> str:
    """Weights in units of 1 / 65535 as little-endian 16-bit numbers, row by row (of a causal pattern the part up to the
    diagonal), in base64."""
    weights = pattern_TS[np.tril_indices(len(pattern_TS))] if causal else pattern_TS.ravel()
    return base64.b64encode(np.rint(UNITS * weights).astype("<u2").tobytes()).decode()


def _values(study: Study) -> dict[str, np.ndarray]:
    """Key of a matrix -> N x N."""
    out = {}
    if study.likeness:
        out = {"pattern": study.likeness.pattern, "z": study.likeness.z}
    if study.writes:
        out["cosine"] = study.writes.cosine
    return {key: t.detach().double().cpu().numpy() for key, t in out.items()}


def _rounded(values: np.ndarray) -> list[float | None]:
    return [round(x, 3) if x == x else None for x in values.ravel().tolist()]


# Figures in the page


def matrices_of(study: Study) -> dict[str, plots.Matrix]:
    """pattern and z of the likeness, cosine of the writes; empty without heads."""
    if not study.heads:
        return {}
    heads = study.likeness.heads if study.likeness else study.heads
    return {
        key: plots.matrix(values, heads if key != "cosine" else study.heads, key, diverging=key == "cosine")
        for key, values in _values(study).items()
    }


def along_training(heads: Sequence[Head], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every logged score of every head against the step: figures by layer, a colour for each number of a head."""
    series: dict[tuple[str, str], tuple[list[int], list[float]]] = {}
    for row in rows:
        for key, value in row.items():
            score, _, name = key.removeprefix(ALONG).partition("/")
            if not key.startswith(ALONG) or value is None or score in LEFT_OUT or score.endswith(" by offset"):
                continue
            steps, values = series.setdefault((score, name), ([], []))
            steps.append(row["step"])
            values.append(value)
    style = {h: Style(COLOURS[h % len(COLOURS)], (5, 2) if h >= len(COLOURS) else ()) for h in {h.head for h in heads}}
    layers = []
    for layer, inside in _layers(heads).items():
        pictures: list[Picture] = []
        for score in dict.fromkeys(score for score, _ in series):
            found = [(h, series[score, h.name]) for h in inside if (score, h.name) in series]
            lines = [(style[h.head], steps, values) for h, (steps, values) in found]
            top = max(1.0, *(v for (s, _), (_, values) in series.items() if s == score for v in values))
            pictures.append(Picture(score, plots.scores(lines, f"along{layer}-{len(pictures)}", top), ""))
        layers.append((layer, pictures))
    used = [(f"head {h}", s) for h, s in sorted(style.items())]
    return {"layers": layers, "legend": used} if series else {}


def _pruning(study: Study) -> dict[str, Any]:
    if not study.pruning:
        return {}
    return {
        "svg": plots.pruning(study.pruning, "pruning"),
        "legend": list(plots.pruning_styles(study.pruning.curves).items()),
    }
