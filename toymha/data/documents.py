"""What generated texts have in common: a language, and a page on which many of its documents are written at once.

D documents side by side, L columns (the longest document). Every random choice shows in the token that is written next,
so the probability written beside it is exactly what the visible part of the document allows.
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
    """D documents written side by side, a column at a time. A column may skip documents: see `only`."""

    def __init__(self, D: int, rng: np.random.Generator, vocabulary: dict[str, list[str]]) -> None:
        self.D, self.rng = D, rng
        words = [w for of_class in vocabulary.values() for w in of_class]
        self.id_of = {w: i for i, w in enumerate(words)}
        self.ids = {name: np.array([self.id_of[w] for w in of_class]) for name, of_class in vocabulary.items()}
        self.here_D = np.ones(D, bool)
        self.owed_D = np.zeros(D)
        self.columns: list[tuple[np.ndarray, np.ndarray, int, np.ndarray]] = []

    @contextlib.contextmanager
    def only(self, here_D: np.ndarray) -> Iterator[None]:
        """What is written inside goes to these documents."""
        before, self.here_D = self.here_D, self.here_D & here_D
        yield
        self.here_D = before

    def write(self, ids_D: Any, logp_D: Any = 0.0, tag: int = 0) -> None:
        """One token each, by id; `logp_D`: log-probability of this token given the document so far, nats."""
        ids, logp = np.broadcast_to(ids_D, self.D), np.broadcast_to(logp_D, self.D) + self.owed_D
        self.columns.append((ids.astype(np.int32), logp.astype(np.float32), tag, self.here_D))
        self.owed_D = np.where(self.here_D, 0.0, self.owed_D)

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

    def choose(self, name: str, tag: int = 0) -> np.ndarray:
        """A word of the class, uniform. Returns which of them."""
        which_D = self.below(len(self.ids[name]))
        self.write(self.ids[name][which_D], -math.log(len(self.ids[name])), tag)
        return which_D

    def draw(self, name: str, p_S: np.ndarray) -> None:
        """A word of the class, with the probabilities `p_S`."""
        which_D = np.minimum(np.searchsorted(np.cumsum(p_S), self.rng.random(self.D), side="right"), len(p_S) - 1)
        self.write(self.ids[name][which_D], np.log(p_S)[which_D])

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(ids_DL, logp_DL, tags_DL, there_DL); what is not `there` is no part of its document."""
        ids, logp, tags, there = zip(*self.columns)
        tags_DL = np.broadcast_to(np.array(tags, np.uint8), (self.D, len(tags)))
        return np.stack(ids, 1), np.stack(logp, 1), tags_DL, np.stack(there, 1)


def numbered(words: list[str], n: int) -> list[str]:
    """n different words: those given, then the same with 2, 3, ... behind them."""
    return [words[i % len(words)] + (str(i // len(words) + 1) if i >= len(words) else "") for i in range(n)]


def spelled(words: list[str]) -> str:
    """Words as text: a space behind each, and a line end where a document ends."""
    return " ".join(words).replace(f" {BEGIN}", f"\n{BEGIN}") + "\n" if words else ""
