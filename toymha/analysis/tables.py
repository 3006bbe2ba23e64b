"""What heads.html says in words and numbers: tables, their head first, and the sentences above them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from toymha.analysis.results import Head, Kind, Mean, Study

MINUS, NONE = "\N{MINUS SIGN}", "–"
MOST_PAIRS = 10  # that are told as the most alike
# What the measures of importance are; one that is not here has its name only.
MEASURES = {
    "zeroed": "how much the loss rises when the head writes nothing, in nats a token",
    "mean": "the same when the head always writes its mean",
    "gradient": "how steeply the loss changes as the head is turned down, in nats a token (Michel et al. 2019)",
    "gates": "the probability that a trained gate on the head stays open (Voita et al. 2019); it has no standard error",
}


# Numbers


def number(x: float | None, digits: int, sign: bool = False) -> str:
    """With a true minus, and none before a zero; a dash where there is no number."""
    if x is None or not math.isfinite(x):
        return NONE
    text = f"{x:{'+' if sign else ''},.{digits}f}"
    if not text.strip("+-0.,"):
        text = text.lstrip("+-")
    return text.replace("-", MINUS)


def percent(x: float, digits: int = 0) -> str:
    return number(100 * x, digits) + (" %" if math.isfinite(x) else "")


def digits_of(means: Iterable[Mean], most: int = 6) -> int:
    """Decimals for a column: two digits of its usual standard error, or three of its largest value."""
    means = list(means)
    errors = [m.se for m in means if math.isfinite(m.se) and m.se > 0]
    sizes = [abs(m.value) for m in means if math.isfinite(m.value) and m.value]
    if not errors and not sizes:
        return 2
    at, shown = (statistics.median(errors), 2) if errors else (max(sizes), 3)
    return min(most, max(0, shown - 1 - math.floor(math.log10(at))))


def said(m: Mean | None, digits: int) -> str:
    """`0.412 ± 0.003 (+8.1)`: value, standard error, z; without what it does not have. Beyond 100 a z says no more."""
    if m is None:
        return NONE
    out = number(m.value, digits)
    if math.isfinite(m.se):
        out += f" ± {number(m.se, digits)}"
    if m.z is not None and math.isfinite(m.z):
        far = f"< {MINUS}100" if m.z < 0 else "> 100"
        out += f" ({number(m.z, 1, sign=True) if abs(m.z) < 100 else far})"
    return out


def _column(means: Sequence[Mean | None], most: int = 6) -> list[str]:
    digits = digits_of((m for m in means if m), most)
    return [said(m, digits) for m in means]


def _side_by_side(*columns: Sequence[str]) -> list[list[str]]:
    return [list(line) for line in zip(*columns, strict=True)]


# Heads


def kind(study: Study, head: Head) -> str:
    """`induction`, or `offset 3`: three tokens back; empty where it was not asked for."""
    if not study.census:
        return ""
    found = study.census.heads[head]
    return f"offset {number(found.offset, 0)}" if found.kind == "offset" else found.kind


def main_measure(study: Study) -> str | None:
    """The measure of importance that titles show: the first."""
    return next(iter(study.importance.measures), None) if study.importance else None


def importance(study: Study, head: Head, short: bool = False) -> str:
    """`zeroed 0.0123 ± 0.0004`; short: without the error. Empty where it was not measured."""
    measure = main_measure(study)
    if not measure or not study.importance:
        return ""
    scores = study.importance.measures[measure]
    digits = digits_of(scores.values())
    return f"{measure} {number(scores[head].value, digits) if short else said(scores[head], digits)}"


def title(study: Study, head: Head) -> str:
    """`L0H3 · induction`, and on a second line its importance."""
    first = " · ".join(filter(None, (head.name, kind(study, head))))
    return "\n".join(filter(None, (first, importance(study, head))))


def first(study: Study) -> int:
    """Index of the head that the page opens with: the most important one, or one that has a kind."""
    measure = main_measure(study)
    if measure and study.importance:
        scores = study.importance.measures[measure]
        return max(range(len(study.heads)), key=lambda i: (scores[study.heads[i]].value, -i))
    if not study.census:
        return 0
    heads, counts = study.census.heads, study.census.counts()
    return min(range(len(study.heads)), key=lambda i: counts[heads[study.heads[i]].kind], default=0)


# The page


def overview(study: Study) -> dict[str, Any]:
    """`count`: how many heads there are; `kinds`: (kind, number of heads); `removable`: a line on pruning."""
    having = {h.layer for h in study.heads}
    count = f"{_count(len(study.heads), 'head')} in {_count(len(having), 'layer')}"
    layers = len(study.passage.patterns) if study.passage else max(having, default=-1) + 1
    empty = [n for n in range(layers) if n not in having]
    if having and empty:
        count += f"; {'layer' if len(empty) == 1 else 'layers'} {', '.join(map(str, empty))} without any"
    kinds = list(study.census.counts().items()) if study.census else []
    return {"count": count, "kinds": kinds, "removable": _best(study)}


def _best(study: Study) -> str:
    """How many heads can go, in the order that lets most of them go."""
    p, N = study.pruning, len(study.heads)
    named = {k: s for k, s in p.removable.items() if k != "random"} if p else {}
    if not p or not named:
        return ""
    order = max(named, key=lambda k: named[k])
    n = round(named[order] * N)
    out = f"{n} of {_count(N, 'head')} can go before perplexity rises by {p.tolerance:.1%}".replace(".0%", " %")
    out += f", the least important first (by {order})" if n else ", in any order tried"
    if "random" in p.removable:
        out += f"; in random order {round(p.removable['random'] * N)}"
    return out


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def clusters(study: Study) -> list[str]:
    """The heads that are nearly the same, for each such group."""
    found = study.likeness.clusters if study.likeness else []
    return [", ".join(h.name for h in cluster) for cluster in found if len(cluster) > 1]


def explained(study: Study) -> list[tuple[str, str]]:
    """The measures of importance that the study has, in words."""
    return [(m, MEASURES[m]) for m in study.importance.measures if m in MEASURES] if study.importance else []


def of(study: Study) -> dict[str, list[list[str]]]:
    """All tables of the page by name, those of parts that the study has."""
    out: dict[str, list[list[str]]] = {}
    if study.census:
        out |= _kinds(study)
    if study.likeness:
        out |= _likeness(study)
    if study.writes:
        out |= _writes(study)
    if study.importance:
        out |= _importance(study)
    if study.pruning:
        out |= _pruning(study)
    return out


def _kinds(study: Study) -> dict[str, list[list[str]]]:
    census = study.census
    assert census
    found = {h: census.heads[h] for h in study.heads}
    names = list(dict.fromkeys(name for k in found.values() for name in k.scores))
    columns = [_column([k.scores.get(name) for k in found.values()], most=3) for name in names]
    lines = _side_by_side(
        [h.name for h in found], [kind(study, h) for h in found], *columns, [_back(k) for k in found.values()]
    )
    counts = census.counts()
    rules = [
        [
            name,
            str(counts.get(name, 0)),
            percent(census.false_positives[name], 1) if name in census.false_positives else NONE,
            rule,
        ]
        for name, rule in census.rules.items()
    ]
    return {
        "kinds": [["head", "kind", *names, "looks back"], *lines],
        "rules": [["kind", "heads", "of untrained heads", "rule"], *rules],
    }


def _back(k: Kind) -> str:
    return number(k.offset, 0)


def _likeness(study: Study) -> dict[str, list[list[str]]]:
    like = study.likeness
    assert like
    N = len(like.heads)
    pairs = [(like.heads[i], like.heads[j], i, j) for i in range(N) for j in range(i)]
    pairs.sort(key=lambda p: (-float(like.pattern[p[2], p[3]]), p[1], p[0]))
    lines = [
        [f"{b.name}, {a.name}", number(float(like.pattern[i, j]), 3), number(float(like.z[i, j]), 3)]
        for a, b, i, j in pairs[:MOST_PAIRS]
    ]
    held = [sum(h.layer == n for h in like.heads) for n in range(len(like.effective))]
    effective = [[f"layer {n}", str(held[n]), number(e, 2)] for n, e in enumerate(like.effective) if held[n]]
    return {
        "pairs": [["most alike", "pattern", "output"], *lines],
        "effective": [["layer", "heads", "different heads"], *effective],
    }


def _writes(study: Study) -> dict[str, list[list[str]]]:
    writes = study.writes
    assert writes
    found = [writes.heads[h] for h in study.heads]
    lines = _side_by_side(
        [h.name for h in study.heads],
        [kind(study, h) or NONE for h in study.heads],
        [number(w.norm, 2) for w in found],
        [percent(w.share, 1) for w in found],
        _column([w.logit for w in found]),
    )
    z = " (z)" if any(w.logit.z is not None for w in found) else ""
    direct = [[name, number(x, 3)] for name, x in writes.direct.items()]
    bias = [[f"layer {n}, bias of W_o", percent(x, 1)] for n, x in enumerate(writes.bias) if any(writes.bias)]
    return {
        "writes": [["head", "kind", "norm", "share of its layer", f"logit of the right token{z}"], *lines],
        "direct": [["what else writes", "logit of the right token"], *direct],
        "bias": [["what else writes", "share of the layer"], *bias],
    }


def _importance(study: Study) -> dict[str, list[list[str]]]:
    found = study.importance
    assert found
    names = list(found.measures)
    heads = sorted(study.heads)
    columns = [_column([found.measures[m].get(h) for h in heads]) for m in names]
    lines = _side_by_side([h.name for h in heads], [kind(study, h) or NONE for h in heads], *columns)
    both = found.correlations | {(b, a): x for (a, b), x in found.correlations.items()}
    ranks = [[a, *("1" if a == b else number(both.get((a, b)), 2) for b in names)] for a in names]
    out = {"importance": [["head", "kind", *names], *lines]}
    return out | ({"ranks": [["", *names], *ranks]} if len(names) > 1 else {})


def _pruning(study: Study) -> dict[str, list[list[str]]]:
    p, N = study.pruning, len(study.heads)
    assert p
    lines = [[name, f"{round(share * N)} of {N}", percent(share)] for name, share in p.removable.items()]
    orders = [[name, " ".join(h.name for h in c.order)] for name, c in p.curves.items() if c.order]
    return {
        "removable": [["order", "heads that can go", "share"], *lines],
        "orders": [["order", "the heads as they go, first to last"], *orders],
    }
