"""probe_scale.html and probe_depth.html: the derivation, what was measured of it, figures and tables, in one file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toymha import runs
from toymha.analysis import probe
from toymha.analysis.probe import DepthStudy, ScaleStudy
from toymha.analysis.probe_plots import BY_RULE, DASH, Axis, Line, layer_styles, lines, model_styles
from toymha.analysis.probe_scale import KEYS, Products
from toymha.page import render
from toymha.pictures import Picture
from toymha.plots import COLOURS, Style

DRAWN, MODEL = COLOURS[0], COLOURS[1]  # q and k that are drawn, and those of a model
SHARES = (-0.03, 1.03)  # the ends of an axis from 0 to 1


@dataclass(frozen=True)
class Cells:
    """A table, its head first; from column `left` on it holds numbers; folded: shown on a click."""

    label: str
    cells: list[list[str]]
    left: int
    folded: bool = False


@dataclass(frozen=True)
class Part:
    """A section of the page."""

    title: str
    text: list[str] = field(default_factory=list)
    legend: list[tuple[str, Style]] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Cells] = field(default_factory=list)


def write_probe(folder: str | Path, study: ScaleStudy | DepthStudy) -> Path:
    """Write the page of a study into a folder, which is made where it is missing; its path. The same study gives the
    same bytes."""
    if isinstance(study, ScaleStudy):
        kind, question, says, parts = "scale", SCALE_QUESTION, probe.scale_says(study), scale_parts(study)
    else:
        kind, question, says, parts = "depth", DEPTH_QUESTION, probe.depth_says(study), depth_parts(study)
    over = f"probe={kind}"
    return write_parts(Path(folder) / f"probe_{kind}.html", study.name, over, question, says, parts, study.about)


def write_parts(
    path: Path,
    title: str,
    over: str,
    question: str,
    says: Sequence[str],
    parts: Sequence[Part],
    about: Sequence[tuple[str, str]] = (),
) -> Path:
    """A page of sections under a question and sentences that answer it; `over`: the kind of page, beside its title."""
    path.parent.mkdir(parents=True, exist_ok=True)
    facts = {"title": title, "over": over, "question": question, "says": says, "about": about}
    runs.write_text(path, render("parts.html", **facts, parts=parts))
    return path


# probe=scale

SCALE_QUESTION = "How large are the scores, and what must they be divided by?"
DERIVATION = (
    "A score is q·k, a sum of head_dim products. If the entries of q and k are independent, with mean 0 and variance "
    "1, each product has mean 0 and variance 1, and the sum has variance head_dim: a standard deviation of √head_dim. "
    "Divided by it, scores have the standard deviation 1 whatever the width of a head (Vaswani et al. 2017, section "
    "3.2.1).",
    "Why it matters: the gradient reaches q and k through the softmax, whose Jacobian is diag(p) − p pᵀ. Its trace, "
    "1 − Σp², is largest for an even row p of weights, and 0 where one key has all the weight: then nothing comes "
    "through, and the head cannot learn to look elsewhere. “Gradient passed” is this trace as a share of an even "
    "row's. It is that of the softmax alone: the factor before it, such as 1/√head_dim, multiplies the gradient once "
    "more.",
    "The assumption can fail in two ways. The entries may have another variance, which the initial weights decide. And "
    "they may depend on each other, as those of queries and keys that were trained to find each other can.",
)


def scale_parts(study: ScaleStudy) -> list[Part]:
    return [
        Part("The derivation", list(DERIVATION)),
        _by_head_dim(study),
        _by_head(study),
        *_along(study.logged, SCALE_TAGS, "Lines: one for each layer, as the run logged them at its evaluations."),
    ]


def _by_head_dim(study: ScaleStudy) -> Part:
    """How it goes with the width of a head."""
    found, new = study.textbook, study.untrained
    ways = {"none": "undivided", "head_dim": "divided by √head_dim"}
    sources = [("independent, unit variance", found, DRAWN)]
    sources += [("untrained model", new, MODEL)] if new else []
    style = {(name, w): Style(colour, DASH if w == "head_dim" else ()) for name, _, colour in sources for w in ways}
    legend = [(f"{name}, {ways[w]}", s) for (name, w), s in style.items()] + [("√head_dim, as derived", BY_RULE)]
    x = Axis("head_dim", log=True, at=list(found))
    size = [
        Line(list(rows), [p.product for p in rows.values()], style[name, "none"], mark="o") for name, rows, _ in sources
    ]
    size.append(Line(list(found), [p.textbook for p in found.values()], BY_RULE))  # on top: what agrees would hide it
    pictures = [
        Picture("Standard deviation of q·k", lines(size, x, Axis("standard deviation", log=True), "size"), "Undivided.")
    ]
    for number, title, axis, caption in (
        ("passed", "Gradient passed by the softmax", "share of an even row's", "1: all keys weigh the same."),
        ("largest", "Largest weight of a row", "weight", "1: one key has it all."),
        ("entropy", "Entropy of a row", "share of ln(keys)", "1: all keys weigh the same."),
    ):
        drawn = [
            Line(list(rows), _of(rows, way, number), style[name, way], mark="o")
            for name, rows, _ in sources
            for way in ways
        ]
        pictures.append(Picture(title, lines(drawn, x, Axis(axis, limits=SHARES), number), caption))
    text = [
        f"The independent q and k are drawn, {KEYS} keys to a query. The untrained model is this configuration with "
        "another head_dim, newly initialised (of at most two layers, the last): its queries see as many keys as text "
        "and mask leave them, so the largest weight and the entropy differ a little for that reason too."
    ]
    tables = [Cells("Drawn q and k, in numbers", probe.head_dim_cells(found), 2, True)]
    tables += [Cells("Untrained model, in numbers", probe.head_dim_cells(new), 2, True)] if new else []
    return Part("Over head_dim", text, legend, pictures, tables)


def _of(rows: dict[int, Products], way: str, number: str) -> list[float]:
    return [getattr(p.after[way], number) for p in rows.values()]


def _by_head(study: ScaleStudy) -> Part:
    """All heads of this model."""
    found = study.probe
    places, measured = [], list(found.heads.values())
    for head in found.heads:
        inside = [h for h in found.heads if h.layer == head.layer]
        places.append(head.layer + 0.6 * ((inside.index(head) + 0.5) / len(inside) - 0.5))
    layers = list(found.layers())
    rule = Line([layers[0] - 0.4, layers[-1] + 0.4], [measured[0].textbook] * 2, BY_RULE)
    legend = [
        ("measured", Style(DRAWN)),
        ("from the measured std of q and of k (hollow)", Style(MODEL)),
        ("√head_dim, as derived", BY_RULE),
    ]
    drawn = [
        rule,
        Line(places, [p.expected for p in measured], legend[1][1], "o", joined=False, filled=False),
        Line(places, [p.product for p in measured], legend[0][1], "o", joined=False),
    ]
    svg = lines(drawn, Axis("layer", at=layers), Axis("standard deviation", log=True), "heads")
    text = [
        "Each dot is a head; within a layer they stand in their order. The hollow one is where q·k would be if the "
        "entries of q and k had the deviations that were measured, but were independent with mean 0: where dot and "
        "circle agree, the variance explains all."
    ]
    tables = [
        Cells("q, k and q·k of each head", probe.head_cells(found), 1),
        Cells("Scores and softmax for each scale, means over heads (* this model's)", probe.layer_cells(found), 2),
        Cells("Scores and softmax for each scale and head", probe.each_cells(found), 2, True),
    ]
    picture = Picture("Standard deviation of q·k by head", svg, "All pairs that the mask leaves visible.")
    return Part("Head by head", text, legend, [picture], tables)


# probe=depth

DEPTH_QUESTION = "What do signal and gradient look like at each depth, with the norm before or after the sum?"
WHY_DEPTH = (
    "Every block adds to the residual stream. With the norm before the sublayer (pre-LN) the stream itself is never "
    "normalised, so it may grow from block to block; with the norm after the sum (post-LN) it has a root mean square "
    "of 1 behind every block, as long as the norm's weights are 1. On the way back a norm divides the gradient by what "
    "it divided the stream by: where the stream is small, the gradient is large.",
    "Xiong et al. 2020 (arXiv:2002.04745) derive for initial weights that in post-LN the expected gradients of the "
    "parameters near the output are large, so that a large learning rate is unstable until it is warmed up, and that "
    "in pre-LN they are well-behaved. That is an expectation over weights, and its authors' weights; one small model "
    "need not look like it. Here both are built from this configuration, with one seed, each with the initial weights "
    "that toymha gives it.",
)


def depth_parts(study: DepthStudy) -> list[Part]:
    models = study.probe.models
    style = model_styles(list(models))
    blocks = range(len(next(iter(models.values())).parameters))
    behind = Axis("blocks passed", at=range(len(blocks) + 1))

    def drawn(number: str, x: Sequence[float]) -> list[Line]:
        return [Line(x, getattr(d, number), style[name], mark="o") for name, d in models.items()]

    def over(number: str, x: Axis, label: str) -> str:
        return lines(drawn(number, list(x.at or ())), x, Axis(label, log=True), number)

    pictures = [
        Picture(
            "Gradient by a block's parameters",
            over("parameters", Axis("block", at=blocks), "Euclidean norm"),
            "Of the mean loss, all parameters of the block together.",
        ),
        Picture("Residual stream", over("stream", behind, "root mean square"), "0 blocks: the embedding."),
        Picture(
            "Gradient by the residual stream",
            over("stream_gradient", behind, "norm at a position"),
            "Of the summed loss, root mean square over positions.",
        ),
    ]
    table = Cells("By depth, in numbers", probe.depth_cells(study.probe), 1)
    now = Part("By depth", [], list(style.items()), pictures, [table])
    along = _along(study.logged, DEPTH_TAGS, "Lines: one for each block, as the run logged them at its evaluations.")
    return [Part("Why it matters", list(WHY_DEPTH)), now, *_growths(study.logged), *along]


def _growths(logged: dict[str, probe.Rows]) -> list[Part]:
    """All runs in one figure: how the last block's gradient stands to the first's."""
    found = {name: g for name, rows in logged.items() if (g := probe.growth(rows))[0]}
    if not found:
        return []
    style = model_styles(list(found))
    drawn = [Line(*g, style[name]) for name, g in found.items()]
    svg = lines(drawn, Axis("step"), Axis("last block / first", log=True), "growth")
    picture = Picture("Gradient of the last block, in shares of the first's", svg, "1: even. Above: larger at the end.")
    return [Part("Along training", [], list(style.items()), [picture])]


# Both

SCALE_TAGS = {
    "scores_std": ("Standard deviation of the scores", "after the division", False),
    "entropy": ("Entropy of the pattern's rows", "nats", False),
    "largest": ("Largest weight of a row", "mean over rows", False),
    "passed": ("Gradient that passes the softmax", "1 less the sum of squared weights", False),
}
DEPTH_TAGS = {
    "grad_norm": ("Gradient by a block's parameters", "Euclidean norm", True),
    "stream_norm": ("Residual stream", "root mean square", True),
}


def _along(logged: dict[str, probe.Rows], tags: dict[str, tuple[str, str, bool]], text: str) -> list[Part]:
    """A section for each run that has logged something of it: a figure for each tag, a line for each layer."""
    out = []
    for i, (name, rows) in enumerate(logged.items(), 1):
        found: dict[str, Any] = {tag: layers for tag in tags if (layers := probe.by_layer(rows, tag))}
        style = layer_styles(sorted({layer for layers in found.values() for layer in layers}))
        pictures = []
        for tag, layers in found.items():
            title, label, log = tags[tag]
            drawn = [Line(points[0], points[1], style[layer]) for layer, points in layers.items()]
            pictures.append(Picture(title, lines(drawn, Axis("step"), Axis(label, log), f"{tag}{i}"), ""))
        if pictures:
            legend = [(f"layer {layer}", s) for layer, s in style.items()]
            out.append(Part(f"Along training: {name}", [text], legend, pictures))
    return out
