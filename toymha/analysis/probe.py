"""What the two probes found, in tables and in words: `probe=scale` and `probe=depth`.

Every sentence is made from the numbers it tells; which sentence it is depends on them too.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from toymha.analysis.probe_depth import NAMES, Depth, DepthProbe
from toymha.analysis.probe_scale import TOLERANCE, Products, ScaleProbe, Softmaxed
from toymha.table import columns

DIVISORS = {"head_dim": "√head_dim", "dim": "√dim", "none": "nothing"}
OPEN = 0.95  # a softmax that passes this share of an even one's gradient is not saturated
EVEN = 1.5  # last block over first: less than this, either way, is about even
DIFFERENT = 1.5  # one layer's q.k over another's: more than this is told layer by layer
ALIKE = 0.2  # so near std(q) std(k) sqrt(D), q.k is put down to the variances
Rows = Sequence[dict[str, Any]]  # of a run's log
Series = dict[int, tuple[list[int], list[float]]]  # layer -> steps and values


@dataclass(frozen=True)
class ScaleStudy:
    """All of probe=scale. about: facts of model and text; textbook, untrained: by head_dim; logged: name of a run ->
    its rows, drawn where they hold scores_std/layerN or entropy/layerN."""

    name: str
    about: list[tuple[str, str]]
    probe: ScaleProbe
    textbook: dict[int, Products]
    untrained: dict[int, Products]
    logged: dict[str, Rows] = field(default_factory=dict)


@dataclass(frozen=True)
class DepthStudy:
    """All of probe=depth. logged: name of a run -> its rows, drawn where they hold grad_norm/layerN or
    stream_norm/layerN."""

    name: str
    about: list[tuple[str, str]]
    probe: DepthProbe
    logged: dict[str, Rows] = field(default_factory=dict)


# Numbers


def shown(x: float) -> str:
    """Three significant digits."""
    if not math.isfinite(x):
        return "-"
    power = math.floor(math.log10(abs(x))) if x else 0
    return f"{x:.2e}" if power < -4 else f"{x:,.{max(0, 2 - power)}f}"


def between(values: Iterable[float]) -> str:
    """`0.2 to 0.3`, or one number where they look alike."""
    found = list(values)
    ends = list(dict.fromkeys(map(shown, (min(found), max(found)))))
    return " to ".join(ends)


def by_layer(rows: Rows, tag: str) -> Series:
    """layer -> steps and values of `tag/layerN` in a run's log; what was not finite is left out."""
    out: Series = {}
    for row in rows:
        for key, value in row.items():
            name, _, layer = key.rpartition("/layer")
            if name == tag and layer.isdigit() and isinstance(value, (int, float)) and math.isfinite(value):
                steps, values = out.setdefault(int(layer), ([], []))
                steps.append(row["step"])
                values.append(value)
    return dict(sorted(out.items()))


def growth(rows: Rows) -> tuple[list[int], list[float]]:
    """Steps, and grad_norm of the last block in shares of the first's; nothing where the log has fewer than two."""
    layers = by_layer(rows, "grad_norm")
    if len(layers) < 2:
        return [], []
    first, last = (dict(zip(*layers[i])) for i in (min(layers), max(layers)))
    steps = [s for s in first if s in last and first[s] > 0 and last[s] > 0]
    return steps, [last[s] / first[s] for s in steps]


# probe=scale


def head_cells(probe: ScaleProbe) -> list[list[str]]:
    """A line for each head: what goes into q.k and what comes out."""
    head = ["head", "std of q", "std of k", "std of q·k", "from these", "√head_dim", "q·k / √head_dim"]
    lines = [
        [h.name, *map(shown, (p.q, p.k, p.product, p.expected, p.textbook, p.ratio))] for h, p in probe.heads.items()
    ]
    return [head, *lines]


def softmax_head(left: Sequence[str]) -> list[str]:
    return [*left, "std of scores", "entropy", "largest weight", "gradient passed"]


def softmax_line(s: Softmaxed) -> list[str]:
    return [shown(s.std), f"{s.entropy:.3f}", f"{s.largest:.3f}", f"{s.passed:.3f}"]


def layer_cells(probe: ScaleProbe) -> list[list[str]]:
    """A line for each layer and each scale: means over its heads; the model's own scale has a star."""
    lines = [softmax_head(["layer", "q·k divided by"])]
    for layer, p in probe.layers().items():
        for name, s in p.after.items():
            lines.append([str(layer), DIVISORS[name] + (" *" if name == probe.chosen else ""), *softmax_line(s)])
    return lines


def each_cells(probe: ScaleProbe) -> list[list[str]]:
    """The same for each head."""
    lines = [softmax_head(["head", "q·k divided by"])]
    for head, p in probe.heads.items():
        lines += [[head.name, DIVISORS[name], *softmax_line(s)] for name, s in p.after.items()]
    return lines


def head_dim_cells(found: dict[int, Products]) -> list[list[str]]:
    """A line for each head_dim and each scale."""
    lines = [softmax_head(["head_dim", "q·k divided by", "std of q·k", "of √head_dim"])]
    for d, p in found.items():
        for name, s in p.after.items():
            lines.append([str(d), DIVISORS[name], shown(p.product), shown(p.ratio), *softmax_line(s)])
    return lines


def scale_says(study: ScaleStudy) -> list[str]:
    """The findings, in sentences."""
    said = [_textbook_says(study.textbook), *_heads_say(study.probe), _softmax_says(study.probe)]
    said += [_untrained_says(study.untrained, study.textbook)] if study.untrained else []
    return said + [s for name, rows in study.logged.items() if (s := _steps_say(name, by_layer(rows, "scores_std")))]


def _textbook_says(found: dict[int, Products]) -> str:
    off = {d: 100 * abs(p.ratio - 1) for d, p in found.items()}
    worst = max(off, key=lambda d: off[d])
    begin = f"With independent q and k of mean 0 and variance 1, {_over(found)}, the standard deviation of q·k"
    if all(p.holds for p in found.values()):
        return f"{begin} is √head_dim to within {off[worst]:.1f} %: the derivation holds."
    return f"{begin} should be √head_dim, and is off by up to {off[worst]:.1f} %, at head_dim {worst:,}."


def _over(found: dict[int, Products]) -> str:
    return f"from head_dim {min(found)} to {max(found):,}" if len(found) > 1 else f"at head_dim {min(found):,}"


def _heads_say(probe: ScaleProbe) -> list[str]:
    """Whether the derivation holds in the model, and if not, which of its assumptions fails."""
    heads, layers = list(probe.heads.values()), list(probe.layers().values())
    q, k, product, ratio = (between(getattr(p, n) for p in heads) for n in ("q", "k", "product", "ratio"))
    good = sum(p.holds for p in heads)
    said = [
        f"In this model the standard deviation of q is {q} and that of k {k}, where the derivation has 1. That of q·k "
        f"is {product}, or {ratio} times √head_dim = {shown(heads[0].textbook)}: to within {100 * TOLERANCE:.0f} % the "
        f"derivation holds for {good} of {len(heads)} heads."
    ]
    if max(p.ratio for p in layers) > DIFFERENT * min(p.ratio for p in layers):
        by_layer = ", ".join(shown(p.ratio) for p in layers)
        said.append(f"The layers differ: on average it is {by_layer} times √head_dim, from the first to the last.")
    if good == len(heads) or not all(p.expected for p in heads):
        return said
    found = [p.product / p.expected for p in heads]
    off = 100 * max(abs(x - 1) for x in found)
    why = (
        f"to within {off:.0f} % it is the variance alone that differs from the derivation"
        if off <= 100 * ALIKE
        else "it is not the variance alone: the entries of q and k are not independent with mean 0"
    )
    said.append(
        f"Independent entries with mean 0 and the measured deviations would give std(q) std(k) √head_dim; q·k has "
        f"{between(found)} times that, so {why}."
    )
    return said


def _softmax_says(probe: ScaleProbe) -> str:
    def passed(way: str) -> list[float]:
        return [p.after[way].passed for p in probe.heads.values()]

    own, other = probe.chosen, "none" if probe.chosen != "none" else "head_dim"
    entropy = between(p.after[own].entropy for p in probe.heads.values())
    said = (
        f"{_divided(own)}, as in this model, the rows have {entropy} of the largest entropy, and the softmax passes "
        f"{between(passed(own))} of an even row's gradient. {_divided(other)} it would pass {between(passed(other))}"
    )
    return said + (": nothing is saturated that a division had to open." if min(passed("none")) >= OPEN else ".")


def _divided(way: str) -> str:
    return "Undivided" if way == "none" else f"Divided by {DIVISORS[way]}"


def _untrained_says(found: dict[int, Products], drawn: dict[int, Products]) -> str:
    last = found[max(found)]
    said = (
        f"In an untrained model of this configuration, {_over(found)}, q·k has "
        f"{between(p.ratio for p in found.values())} times the standard deviation √head_dim. Undivided, at head_dim "
        f"{last.head_dim:,}, the softmax passes {shown(last.after['none'].passed)} of an even row's gradient"
    )
    if last.head_dim in drawn:
        said += f"; with the independent q and k it is {shown(drawn[last.head_dim].after['none'].passed)}"
    return said + "."


def _steps_say(name: str, layers: Series) -> str:
    """How the scores of a run grew; nothing where it was looked at once."""
    steps = next(iter(layers.values()))[0] if layers else []
    if len(steps) < 2:
        return ""
    begin, end = (between(values[i] for _, values in layers.values()) for i in (0, -1))
    return (
        f"{name}: the standard deviation of its scores, as they enter the softmax, is {begin} at step {steps[0]:,} and "
        f"{end} at step {steps[-1]:,}."
    )


def scale_text(study: ScaleStudy) -> list[str]:
    """For the terminal."""
    out = [f"{study.name}: q·k and its scale", "", *columns(head_cells(study.probe), 1), ""]
    out += [*columns(layer_cells(study.probe), 2), "* what this model divides by", ""]
    out += ["independent q and k of unit variance:", *columns(head_dim_cells(study.textbook), 2), ""]
    if study.untrained:
        out += ["untrained, by head_dim:", *columns(head_dim_cells(study.untrained), 2), ""]
    return out + wrapped(scale_says(study))


# probe=depth


def depth_cells(probe: DepthProbe) -> list[list[str]]:
    """A line for each block, and before them the embedding; for each model stream, gradients by block and by stream."""
    models = probe.models
    head = ["behind"]
    for name in models:
        head += [f"{name}: stream", "gradient by block", "gradient by stream"]
    blocks = len(next(iter(models.values())).parameters)
    lines = [head]
    for i in range(blocks + 1):
        line = [f"block {i - 1}" if i else "embedding"]
        for d in models.values():
            line += [shown(d.stream[i]), shown(d.parameters[i - 1]) if i else "", shown(d.stream_gradient[i])]
        lines.append(line)
    return lines


def depth_says(study: DepthStudy) -> list[str]:
    """The findings, in sentences."""
    models = study.probe.models
    said = [_depth_says(name, d) for name, d in models.items()]
    pre, post = (models[f"{name}, untrained"] for name in NAMES.values())
    if len(pre.parameters) == 1:
        said.append("There is one block, so there is nothing to compare by depth: n_layer=6 would show more.")
    else:
        said.append(_compared(pre, post))
    for name, rows in study.logged.items():
        steps, ratios = growth(rows)
        if len(steps) > 1:
            said.append(
                f"{name}: the gradient of the last block is {shown(ratios[0])} times that of the first at step "
                f"{steps[0]:,}, and {shown(ratios[-1])} times at step {steps[-1]:,}."
            )
    return said


def _depth_says(name: str, d: Depth) -> str:
    begin = (
        f"{name}: the residual stream has a root mean square of {shown(d.stream[0])} before block 0 and "
        f"{shown(d.stream[-1])} at the end; the gradient of a block's parameters has the norm"
    )
    if len(d.parameters) == 1:
        return f"{begin} {shown(d.parameters[0])}."
    most = max(range(len(d.parameters)), key=lambda i: d.parameters[i])
    first, last = shown(d.parameters[0]), shown(d.parameters[-1])
    return f"{begin} {first} in the first block and {last} in the last, and is largest in block {most}."


def _compared(pre: Depth, post: Depth) -> str:
    """Of two untrained models: what was derived of them, and whether it is seen here."""
    said = (
        f"At initialisation the gradient of the last block is {shown(post.growth)} times that of the first in post-LN, "
        f"and {shown(pre.growth)} times in pre-LN."
    )
    outward, even = post.growth >= EVEN, 1 / EVEN < pre.growth < EVEN
    if outward and even:
        return f"{said} That is what Xiong et al. derive: large near the output in post-LN, about even in pre-LN."
    if outward:
        return f"{said} As Xiong et al. derive, it is large near the output in post-LN; in pre-LN it is not even here."
    return f"{said} Xiong et al. derive that it is large near the output in post-LN: this model does not show that."


def depth_text(study: DepthStudy) -> list[str]:
    """For the terminal: a table for each model, side by side they would be too wide."""
    out = [f"{study.name}: by depth", ""]
    for name, d in study.probe.models.items():
        lines = depth_cells(DepthProbe({name: d}))
        lines[0] = ["behind", "stream", "gradient by block", "gradient by stream"]
        out += [f"{name} (loss {d.loss:.4f})", *columns(lines, 1), ""]
    return out + wrapped(depth_says(study))


def wrapped(sentences: Iterable[str]) -> list[str]:
    return [line for s in sentences for line in textwrap.wrap(s, 110)]
