"""How far the characters beside it decide how a character is read: a bar for `toymha train model=encdec data=pinyin`.

    python scripts/readings.py

For each character that has several readings in the training split one logistic regression (AdaGrad, 8 passes) over the
characters beside it, their pairs, its place, and all characters of the phrase; all others are read as they always are.
No network, no shared weights: what a model of attention has to beat. Prints errors on the validation and test splits.
"""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterator

from toymha.compose import points
from toymha.data.corpus import load_corpus
from toymha.data.pairs import pairs_of

Features = list[tuple]


def features(source: list[int], i: int) -> Features:
    """What decides the reading of the i-th character."""
    at = {i + k: x for k, x in zip(range(-i, len(source)), source)}
    beside = [("L", at.get(i - 1)), ("R", at.get(i + 1)), ("LL", at.get(i - 2)), ("RR", at.get(i + 2))]
    both = ("LR", at.get(i - 1), at.get(i + 1))
    return [("bias",), *beside, both, ("place", i, len(source)), *(("holds", x) for j, x in at.items() if j != i)]


class Readings:
    """The readings of each character in the training pairs, and weights of features for those that have several."""

    def __init__(self, pairs: list[tuple[list[int], list[int]]]) -> None:
        self.known: dict[int, Counter] = defaultdict(Counter)
        for source, target in pairs:
            for character, reading in zip(source[1:], target):
                self.known[character][reading] += 1
        self.weights: dict[tuple[int, int], dict[tuple, float]] = defaultdict(lambda: defaultdict(float))

    def score(self, character: int, reading: int, found: Features) -> float:
        weights = self.weights[character, reading]
        return sum(weights[f] for f in found)

    def fit(self, pairs: list[tuple[list[int], list[int]]], passes: int, lr: float = 0.3, decay: float = 1e-3) -> None:
        """Duchi et al. 2011 (AdaGrad), on the cross entropy of each reading in its place."""
        squares: dict[tuple[int, int], dict[tuple, float]] = defaultdict(lambda: defaultdict(float))
        examples = [
            (s[i], features(s, i), t[i])
            for s, t in ((s[1:], t) for s, t in pairs)
            for i in range(len(s))
            if len(self.known[s[i]]) > 1
        ]
        chance = random.Random(0)
        for _ in range(passes):
            chance.shuffle(examples)
            for character, found, right in examples:
                scores = {r: self.score(character, r, found) for r in self.known[character]}
                most = max(scores.values())
                total = sum(math.exp(v - most) for v in scores.values())
                for r, v in scores.items():
                    slope = math.exp(v - most) / total - (r == right)
                    weights, sums = self.weights[character, r], squares[character, r]
                    for f in found if abs(slope) > 1e-3 else ():
                        g = slope + decay * weights[f]
                        sums[f] += g * g
                        weights[f] -= lr * g / math.sqrt(sums[f] + 1e-8)

    def read(self, source: list[int]) -> Iterator[int | None]:
        """A reading for each character; None for one that training never shows."""
        for i, character in enumerate(source):
            readings = self.known.get(character)
            found = features(source, i)
            yield max(readings, key=lambda r: self.score(character, r, found)) if readings else None


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    (point,) = points(["data=pinyin"])
    splits = load_corpus(point.config.data).splits
    train = list(pairs_of(splits["train"]))
    model = Readings(train)
    model.fit(train, passes=8)
    for name in ("val", "test"):
        syllables = wrong = unseen = right = 0
        pairs = list(pairs_of(splits[name]))
        for source, target in pairs:
            read = list(model.read(source[1:]))
            errors = sum(a != b for a, b in zip(read, target))
            wrong, unseen = wrong + errors, unseen + read.count(None)
            syllables, right = syllables + len(target), right + (errors == 0)
        print(
            f"{name:5} syllables right {1 - wrong / syllables:.2%} of {syllables:,} ({unseen} of unseen characters), "
            f"phrases right {right / len(pairs):.2%} of {len(pairs):,}"
        )


if __name__ == "__main__":
    main()
