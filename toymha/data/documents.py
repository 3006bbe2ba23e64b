"""What generated texts have in common: a language, and a page on which many of its documents are written at once.

D documents side by side, L columns (the longest document). Every random choice shows in the token that is written next,
so the probability written beside it is exactly what the visible part of the document allows. A token with a tag also
has a governor: the earlier token of its document that decides it, and that a reader must look back to.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from toymha.config import Data

BEGIN = "<doc>"  # the first token of every document


@dataclass(frozen=True)
class Expected:
    """What the rules of a language say of a document, before one is drawn."""

    tokens: float  # tokens of a document, on average
    nats: float  # its entropy: what a reader who knows all the rules still has to guess
    floors: dict[str, float]  # the same for one token with the tag


@dataclass(frozen=True)
class Language:
    """A kind of generated text. `tags[i]` names the tokens with tag i + 1; tag 0 is the rest."""

    title: str
    origin: str
    tags: tuple[str, ...]
    vocabulary: Callable[[Data], dict[str, list[str]]]  # word classes; together, in this order, the vocabulary
    draw: Callable[[Data, Page], None]
    expected: Callable[[Data], Expected]
    open_classes: tuple[str, ...] = ()  # where any word of the class is right when one of them is
    check: Callable[[Data], None] = lambda _: None  # raises UserError for sizes that cannot be


class Page:
    """D documents written side by side, a column at a time. A column may skip documents: see `only`.

    A governor is named by its column: one number, or an array of D where it differs between documents.
    """

    def __init__(self, D: int, rng: np.random.Generator, vocabulary: dict[str, list[str]]) -> None:
        self.D, self.rng = D, rng
        words = [w for of_class in vocabulary.values() for w in of_class]
        self.id_of = {w: i for i, w in enumerate(words)}
        self.ids = {name: np.array([self.id_of[w] for w in of_class]) for name, of_class in vocabulary.items()}
        self.here_D = np.ones(D, bool)
        self.owed_D = np.zeros(D)
        self.columns: list[tuple[np.ndarray, np.ndarray, int, np.ndarray]] = []
        self.governors: dict[int, int | np.ndarray] = {}  # column -> column of the governor, or governor_D

    @contextlib.contextmanager
    def only(self, here_D: np.ndarray) -> Iterator[None]:
        """What is written inside goes to these documents."""
        before, self.here_D = self.here_D, self.here_D & here_D
        yield
        self.here_D = before

    def write(self, ids_D: Any, logp_D: Any = 0.0, tag: int = 0, governor_D: int | np.ndarray | None = None) -> int:
        """One token each, by id; `logp_D`: log-probability of this token given the document so far, nats.

        `governor_D`: column of the token that decides this one. Tokens with a tag have one, and no others: ValueError.
        Returns the column that was written, for the governors of later ones.
        """
        if (tag > 0) != (governor_D is not None):
            raise ValueError(f"tag={tag}, governor_D={governor_D}: a token has both or neither")
        if governor_D is not None:
            self.governors[len(self.columns)] = governor_D
        ids, logp = np.broadcast_to(ids_D, self.D), np.broadcast_to(logp_D, self.D) + self.owed_D
        self.columns.append((ids.astype(np.int32), logp.astype(np.float32), tag, self.here_D))
        self.owed_D = np.where(self.here_D, 0.0, self.owed_D)
        return len(self.columns) - 1

    def say(self, text: str) -> None:
        """Words that are bound to come."""
        for word in text.split():
            self.write(self.id_of[word])

    def below(self, n: int) -> np.ndarray:
        """A number from 0 to n - 1 for each document, uniform. By `random`, whose stream no numpy changed."""
        return (self.rng.random(self.D) * n).astype(np.int64)

    def owe(self, logp: float) -> None:
        """The log-probability of a decision that shows in the next word: it is counted there."""
        self.owed_D = self.owed_D + np.where(self.here_D, logp, 0.0)

    def times(self, fewest: int, most: int) -> Iterator[None]:
        """A loop of `fewest` to `most` rounds, each number as likely; the word that comes next shows if it goes on."""
        rounds_D = fewest + self.below(most - fewest + 1)
        for done in range(most + 1):
            possible = most - max(done, fewest) + 1  # numbers of rounds that are still possible
            with self.only(rounds_D == done):
                self.owe(-math.log(possible))
            with self.only(rounds_D > done):
                if done >= fewest and done < most:
                    self.owe(math.log((possible - 1) / possible))
                if done < most:
                    yield

    def choose(self, name: str) -> tuple[np.ndarray, int]:
        """A word of the class, uniform. Returns which of them, and its column."""
        which_D = self.below(len(self.ids[name]))
        return which_D, self.write(self.ids[name][which_D], -math.log(len(self.ids[name])))

    def draw(self, name: str, p_S: np.ndarray) -> None:
        """A word of the class, with the probabilities `p_S`."""
        which_D = np.minimum(np.searchsorted(np.cumsum(p_S), self.rng.random(self.D), side="right"), len(p_S) - 1)
        self.write(self.ids[name][which_D], np.log(p_S)[which_D])

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(ids_DL, logp_DL, tags_DL, back_DL, there_DL); what is not `there` is no part of its document.

        back_DL: how many tokens before a token its governor stands; 0 where it has none.
        """
        ids, logp, tags, there = zip(*self.columns)
        tags_DL = np.broadcast_to(np.array(tags, np.uint8), (self.D, len(tags)))
        there_DL = np.stack(there, 1)
        return np.stack(ids, 1), np.stack(logp, 1), tags_DL, self._back(there_DL), there_DL

    def _back(self, there_DL: np.ndarray) -> np.ndarray:
        """From columns to tokens: columns that skip a document do not count in it."""
        at_DL, rows = there_DL.cumsum(1, dtype=np.int32), np.arange(self.D)
        back_DL = np.zeros_like(at_DL)
        for column, governor_D in self.governors.items():
            back_DL[:, column] = at_DL[:, column] - at_DL[rows, governor_D]
        return back_DL


def numbered(words: list[str], n: int) -> list[str]:
    """n different words: those given, then the same with 2, 3, ... behind them."""
    return [words[i % len(words)] + (str(i // len(words) + 1) if i >= len(words) else "") for i in range(n)]


def spelled(words: list[str]) -> str:
    """Words as text: a space behind each, and a line end where a document ends."""
    return " ".join(words).replace(f" {BEGIN}", f"\n{BEGIN}") + "\n" if words else ""
