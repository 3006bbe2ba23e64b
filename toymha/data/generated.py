"""Generated texts as data: documents drawn from data.text_seed, cut into splits, and what is known of every token.

No torch here. The text is the documents, one a line; N tokens of a split, D documents.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toymha.config import GENERATED, Data
from toymha.data import store
from toymha.data.documents import Language, Page, spelled
from toymha.data.relations import RELATIONS
from toymha.data.tasks import TASKS
from toymha.schema import UserError

FORMAT = 2  # of the generators: raise it when one of them gives another text

LANGUAGES: dict[str, Language] = {"relations": RELATIONS, **TASKS}


@dataclass(frozen=True)
class Part:
    """The documents of one split, one after the other."""

    ids: np.ndarray  # N, int32: index into words(data)
    starts: np.ndarray  # D, int64: index of each document's first token
    tags: np.ndarray  # N, uint8: 0, or 1 + index into the language's tags
    logp: np.ndarray  # N, float32: log-probability of the token given the document before it, nats
    back: np.ndarray  # N, int32: how many tokens before the token its governor stands; 0 where it has none

    @property
    def governors(self) -> np.ndarray:
        """N, int32: index of the token that decides this one, in the same document; -1 where it has none."""
        return np.where(self.back > 0, np.arange(len(self.back), dtype=np.int32) - self.back, np.int32(-1))


def words(data: Data) -> list[str]:
    """The vocabulary, in the order of the ids."""
    return [w for of_class in LANGUAGES[data.name].vocabulary(data).values() for w in of_class]


def classes(data: Data) -> list[int]:
    """For each word a number; two words with the same one are equally right where one of them is."""
    language, out, n = LANGUAGES[data.name], [], 0
    for name, of_class in language.vocabulary(data).items():
        shared = name in language.open_classes
        out += [n if shared else n + i for i in range(len(of_class))]
        n += 1 if shared else len(of_class)
    return out


def floors(data: Data) -> dict[str, float]:
    """The exact expected loss, nats a token, of a reader who knows the rules and sees each document from its beginning.

    `all` over all tokens, and one for each tag. From the declared distribution, not from a sample.
    """
    expected = LANGUAGES[data.name].expected(data)
    return {"all": expected.nats / expected.tokens, **expected.floors}


def text(data: Data) -> str:
    """The whole text: train, validation and test documents in this order, each on a line of its own."""
    key = store.digest(FORMAT, {k: getattr(data, k) for k in ("split", *GENERATED[data.name])})

    def made() -> str:
        name = np.array(words(data), object)
        return "".join(spelled(name[part.ids].tolist()) for part in generate(data).values())

    return store.prepared(data.name, key, made)


def generate(data: Data) -> dict[str, Part]:
    """The splits, cut at document boundaries. A held-out document that an earlier split has is left out.

    Raises UserError when that befalls more than a tenth of a split: the language has too few different documents.
    """
    whole, hash_D = _draw(data)
    ends_D = np.append(whole.starts[1:], len(whole.ids))
    edges = [0, *(np.cumsum(data.split) * len(whole.ids)).round().astype(int).tolist()]
    out, seen = {}, np.empty(0, np.uint64)
    for name, share, low, high in zip(("train", "val", "test"), data.split, edges, edges[1:]):
        if share <= 0:
            continue
        own_D = (whole.starts >= low) & (whole.starts < high)
        keep_D = own_D & ~np.isin(hash_D, seen)
        if keep_D.sum() < 0.9 * own_D.sum():
            raise UserError(
                f"data={data.name}: {1 - keep_D.sum() / own_D.sum():.0%} of the {name} documents occur in earlier "
                f"splits too, so nothing is held out; make the language larger (data.symbols={data.symbols}) "
                f"or the text shorter (data.tokens={data.tokens})"
            )
        seen = np.append(seen, hash_D[own_D])
        out[name] = _documents(whole, keep_D, ends_D)
    return out


def _documents(whole: Part, keep_D: np.ndarray, ends_D: np.ndarray) -> Part:
    lengths_D = ends_D - whole.starts
    keep_N = np.repeat(keep_D, lengths_D)
    starts_D = np.append(0, np.cumsum(lengths_D[keep_D]))[:-1]
    return Part(whole.ids[keep_N], starts_D, whole.tags[keep_N], whole.logp[keep_N], whole.back[keep_N])


def _draw(data: Data) -> tuple[Part, np.ndarray]:
    """About data.tokens tokens in whole documents, and a 64-bit hash of each document."""
    language = LANGUAGES[data.name]
    language.check(data)
    vocabulary, mean = language.vocabulary(data), language.expected(data).tokens
    D = max(1, round((data.tokens or 0) / mean))
    at_once = max(1, int(1_000_000 / mean))  # documents; bounds the memory, and is part of the rule: do not change
    rng = np.random.Generator(np.random.PCG64(data.text_seed or 0))
    parts, hashes = [], []
    for done in range(0, D, at_once):
        page = Page(min(at_once, D - done), rng, vocabulary)
        language.draw(data, page)
        *known, there_DL = page.arrays()
        parts.append((*(a_DL[there_DL] for a_DL in known), there_DL.sum(1)))
        hashes.append(_hash(known[0], there_DL))
    ids, logp, tags, back, lengths_D = (np.concatenate(arrays) for arrays in zip(*parts))
    starts_D = np.append(0, np.cumsum(lengths_D))[:-1].astype(np.int64)
    return Part(ids, starts_D, tags, logp, back), np.concatenate(hashes)


def _hash(ids_DL: np.ndarray, there_DL: np.ndarray) -> np.ndarray:
    """hash_D, uint64: sum of id times a random odd number of its column, modulo 2^64."""
    factor_L = np.random.Generator(np.random.PCG64(0)).integers(2**63, size=ids_DL.shape[1], dtype=np.uint64) * 2 + 1
    return ((ids_DL + 1).astype(np.uint64) * there_DL * factor_L).sum(1, dtype=np.uint64)
