"""Tokens that are whole words or characters of documents: of generated texts, and of pairs of source and target.

    line of a text          重庆<TAB>chóng qìng            d k a : a k d
    tokens                  <doc> 重 庆 <to> chóng qìng    <doc> d k a : a k d

A document begins with a mark; the next one ends it. Where documents are pairs a second mark ends the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from toymha.data.documents import BEGIN, spelled
from toymha.data.vocabulary import Tokenizer, named, printable
from toymha.schema import UserError

TO = "<to>"  # between source and target; the generated texts have a colon there
COLON = ":"
SPACE = {"char": "", "word": " "}  # what stands between two units


def split(text: str, unit: str) -> list[str]:
    """The units of one side of a pair: its characters, spaces too, or its words."""
    return list(text) if unit == "char" else text.split()


class UnitTokenizer(Tokenizer):
    """What words and pairs have in common: a source that is encoded and a target that is decoded on its own."""

    names: list[str]  # of the tokens
    marks: tuple[str, str]  # that begins a document, that ends its source
    source_unit = target_unit = "word"

    def _know(self, names: list[str]) -> None:
        self.names, self.vocab_size = names, len(names)
        self._id_of = {name: i for i, name in enumerate(names)}

    @property
    def begin(self) -> int:
        """Id of the mark that begins a document, and so ends the one before."""
        return self._id_of[self.marks[0]]

    @property
    def separator(self) -> int:
        """Id of the mark between source and target. Generated texts that are no pairs have none: KeyError."""
        return self._id_of[self.marks[1]]

    def encode_source(self, text: str) -> np.ndarray:
        """Ids of a source: the mark that begins a document, and the units. Raises UserError for unknown ones."""
        units = split(text, self.source_unit)
        if not units:
            raise UserError("the source is empty")
        self._check(units)
        return np.array([self.begin, *(self._id_of[u] for u in units)], self._dtype())

    def source_text(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of a source, with or without the mark that begins it."""
        units = [i for i in np.asarray(ids).tolist() if i != self.begin]
        return SPACE[self.source_unit].join(self.names[i] for i in units)

    def decode_target(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of a target, up to the mark that begins the next document, if there is one."""
        units = list(np.asarray(ids).tolist())
        end = units.index(self.begin) if self.begin in units else len(units)
        return SPACE[self.target_unit].join(self.names[i] for i in units[:end])

    def _check(self, units: Iterable[str], allowed: tuple[str, ...] = ()) -> None:
        """Raises UserError naming units that have no token; marks are none, unless they are `allowed`."""
        if unknown := set(units) - (self._id_of.keys() - (set(self.marks) - set(allowed))):
            kinds = {"word": "words", "char": "symbols"}
            what = kinds[self.source_unit] if self.source_unit == self.target_unit else "symbols or words"
            raise UserError(
                f"{len(unknown)} {what} are not among the {self.vocab_size} of this vocabulary: {named(unknown)}"
            )


class WordTokenizer(UnitTokenizer):
    """A token is a word of a generated text with the white space behind it. Each document is a line."""

    kind = "word"
    marks = (BEGIN, COLON)

    def __init__(self, words: list[str]) -> None:
        self._know(words)

    @property
    def words(self) -> list[str]:
        return self.names

    def encode(self, text: str) -> np.ndarray:
        in_words = text.split()
        self._check(in_words, allowed=self.marks)
        return np.array([self._id_of[w] for w in in_words], self._dtype())

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return spelled([self.names[i] for i in np.asarray(ids).tolist()])

    def token_bytes(self, i: int) -> bytes:
        return f"{self.names[i]} ".encode()  # before a new document the space is a line end, which is one byte too

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "words": self.names}

    def labels(self) -> list[str]:
        return list(self.names)


class PairTokenizer(UnitTokenizer):
    """Texts of pairs, one `source<TAB>target` a line. The vocabulary: two marks, then all units, sorted.

    `sources` and `targets`: the units that occur on each side, characters or words (`source_unit`, `target_unit`).
    What occurs on both is one token. The marks are spelled `\\n` and `\\t`.
    """

    kind = "pair"
    marks = (BEGIN, TO)

    def __init__(self, sources: Iterable[str], targets: Iterable[str], source_unit: str, target_unit: str) -> None:
        self.source_unit, self.target_unit = source_unit, target_unit
        self.sources, self.targets = sorted(set(sources)), sorted(set(targets))
        self._know([*self.marks, *sorted({*self.sources, *self.targets})])
        by_side = ((source_unit, self.sources), (target_unit, self.targets))
        chars = {u for unit, units in by_side for u in units if unit == "char"}
        self._spaced = {u for unit, units in by_side for u in units if unit == "word"} - chars

    @classmethod
    def of(cls, text: str, source_unit: str, target_unit: str) -> PairTokenizer:
        """The tokenizer of a text of pairs."""
        sides: tuple[set[str], set[str]] = (set(), set())
        for line in text.split("\n"):
            source, _, target = line.partition("\t")
            sides[0].update(split(source, source_unit))
            sides[1].update(split(target, target_unit))
        return cls(*sides, source_unit, target_unit)

    def encode(self, text: str) -> np.ndarray:
        """A line without a tab is a source whose target is to come: `重庆` is `<doc> 重 庆 <to>`. Empty lines are
        nothing. Raises UserError for a line with more than one tab."""
        documents = []
        for line in filter(None, text.split("\n")):
            source, _, target = line.partition("\t")
            if "\t" in target:
                raise UserError(f"{line!r} has {line.count(chr(9))} tabs; a pair has one, between source and target")
            documents.append((split(source, self.source_unit), split(target, self.target_unit)))
        self._check(chain.from_iterable(chain(*document) for document in documents))
        marked = chain.from_iterable((BEGIN, *source, TO, *target) for source, target in documents)
        return np.array([self._id_of[u] for u in marked], self._dtype())

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Lines. Ids that do not begin with a document are the rest of one: of its source, if a separator follows
        before the next document does, else of its target."""
        tokens = list(np.asarray(ids).tolist())
        before = tokens[: tokens.index(self.begin)] if self.begin in tokens else tokens
        out: list[str] = []
        space, between = SPACE[self.source_unit if self.separator in before else self.target_unit], ""
        for i in tokens:
            if i == self.begin:
                out += ["\n"] if out else []
                space, between = SPACE[self.source_unit], ""
            elif i == self.separator:
                out.append("\t")
                space, between = SPACE[self.target_unit], ""
            else:
                out += [between, self.names[i]]
                between = space
        return "".join(out) + ("\n" if out and out[-1] != "\n" else "")

    def token_bytes(self, i: int) -> bytes:
        """A word has a space behind it, also the last of its side, where the text has none."""
        spelling = {self.begin: "\n", self.separator: "\t"}
        name = self.names[i]
        return spelling.get(i, name + " " * (name in self._spaced)).encode()

    def to_dict(self) -> dict[str, Any]:
        units = {"source_unit": self.source_unit, "target_unit": self.target_unit}
        return {"kind": self.kind, **units, "sources": self.sources, "targets": self.targets}

    def labels(self) -> list[str]:
        return list(map(printable, self.names))
