"""A data set as training sees it: token tensors of the splits, cut by position, and batches of random windows.

B batch, T positions, N tokens of a split, D documents in it, V vocabulary.
"""

from __future__ import annotations

import functools
import io
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from toymha.config import PAIRED, Data
from toymha.data import generated, parallel, store, text
from toymha.data.tokenizer import Tokenizer, from_dict, make
from toymha.data.units import COLON, PairTokenizer, WordTokenizer
from toymha.schema import UserError

FORMAT = 5  # of the cached tokens: raise it when tokenizers, splits or what is known of their tokens change


@dataclass(frozen=True)
class Split:
    """`chars` and `bytes` (UTF-8) are those of what is predicted: all but the first token, which nothing precedes.

    Loss in nats, summed over the predicted tokens and divided by them, is nats a character or a byte.
    A character counts once its last byte is predicted. What follows is known of generated texts and of pairs only, of
    pairs neither `logp` (but of generated ones) nor `governors`.
    """

    tokens: Tensor  # N, uint8 where the vocabulary fits, else int32
    chars: int
    bytes: int
    starts: Tensor | None = None  # D, int64: index of each document's first token
    tags: Tensor | None = None  # N, uint8: 0, or 1 + the index into `names` of what the token is an example of
    logp: Tensor | None = None  # N, float32: the generator's own log-probability, nats
    governors: Tensor | None = None  # N, int32: index in `tokens` of the token that decides this one; -1 where tag is 0
    names: tuple[str, ...] = ()  # of the tags
    classes: Tensor | None = None  # V, int64: where a token is right, all tokens of its class are
    separators: Tensor | None = None  # D, int64: of pairs, index of the mark between source and target
    targets: tuple[int, int] | None = None  # characters and bytes of all targets, with the marks that end them

    @functools.cached_property
    def longest(self) -> int | None:
        """Tokens of the longest document; None where no documents are known."""
        if self.starts is None:
            return None
        ends_D = torch.cat([self.starts[1:], torch.tensor([len(self.tokens)])])
        return int((ends_D - self.starts).max()) if len(self.starts) else 0

    @functools.cached_property
    def alike(self) -> list[Tensor]:
        """The documents (int64 numbers) in classes of about equal length: no class has less than a 64th of them."""
        assert self.starts is not None
        size_D = torch.cat([self.starts[1:], torch.tensor([len(self.tokens)])]) - self.starts
        sizes, counts = size_D.unique(return_counts=True)
        out, of_class, n = [], [], 0
        for size, count in zip(sizes.tolist(), counts.tolist()):
            of_class.append(size)
            n += count
            if 64 * n >= len(size_D):
                out.append(of_class)
                of_class, n = [], 0
        if of_class:  # the longest are too few for a class of their own
            out = [*out[:-1], out[-1] + of_class]
        return [torch.isin(size_D, torch.tensor(c)).nonzero().flatten() for c in out]


@dataclass(frozen=True)
class Corpus:
    """`sha256` is that of the normalised text; `splits` has train and val, and test where it has a share."""

    name: str
    sha256: str
    tokenizer: Tokenizer
    splits: dict[str, Split]


def load_corpus(data: Data, tokenizer: Tokenizer | None = None) -> Corpus:
    """The corpus of a data config, from the cache when it holds the tokens of exactly this text.

    A `tokenizer` (a run's own) is used instead of the config's. Raises UserError for whatever is wrong with the text.
    """
    whole = text.read_text(data)
    sha256 = text.sha256(whole)
    how = tokenizer.to_dict() if tokenizer else [data.tokenizer, data.vocab_size, data.source_unit, data.target_unit]
    path = store.cache_dir() / "tokens" / f"{data.name}-{store.digest(FORMAT, sha256, data.split, how)}.npz"
    try:
        tokenizer, splits = _unpack(path.read_bytes())
    except Exception:  # missing, cut short, changed or old: all the same, it is made again
        kind = tokenizer.kind if tokenizer else data.tokenizer
        if data.name in generated.LANGUAGES and kind == "word":
            tokenizer = tokenizer or WordTokenizer(generated.words(data))
            splits = _generated_splits(data, tokenizer)
        elif kind == "pair":
            tokenizer = tokenizer or make(data, whole, whole)
            splits = _pair_splits(data, whole, tokenizer)
        else:
            parts = cut(whole, data.split)
            tokenizer = tokenizer or make(data, whole, parts["train"])
            splits = {name: _split(part, tokenizer) for name, part in parts.items()}
        store.write(path, _pack(tokenizer, splits))
    return Corpus(data.name, sha256, tokenizer, splits)


def cut(whole: str, shares: list[float]) -> dict[str, str]:
    """Train, val and test (where it has a share), by position: train is the first int(n * shares[0]) characters."""
    return {name: whole[low:high] for name, (low, high) in parallel.edges(len(whole), shares).items()}


def check_lengths(corpus: Corpus, seq_len: int) -> None:
    """Refuse splits without a window of `seq_len` tokens and the token after it. Raises UserError with the numbers."""
    full_names = {"train": "training", "val": "validation", "test": "test"}
    for name, split in corpus.splits.items():
        if (n := len(split.tokens)) < seq_len + 1:
            shortest = min(len(s.tokens) for s in corpus.splits.values())
            way_out = f"use seq_len={shortest - 1} or less, " if shortest > 1 else "use "
            raise UserError(
                f"the {full_names[name]} split has {n} tokens, seq_len={seq_len} needs at least {seq_len + 1}; "
                f"{way_out}a longer text, or other shares in data.split"
            )


def random_batch(split: Split, seq_len: int, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows drawn uniformly, with replacement, and the same ones a token later: x_BT and y_BT, int64.

    They start at 0 to N - seq_len - 1 inclusive, so the first and the last token are reached too; needs N > seq_len.
    In a generated text whose documents fit into a window they start where a document does.
    """
    tokens_N = split.tokens
    n = len(tokens_N) - seq_len
    starts_D = None
    if split.starts is not None and (split.longest or 0) <= seq_len:
        starts_D = split.starts[: int(torch.searchsorted(split.starts, n))]
        n = len(starts_D)
    start_B = torch.randint(n, (batch_size,), generator=generator, device=generator.device)
    start_B = start_B if starts_D is None else starts_D[start_B]
    window_BT1 = tokens_N.unfold(0, seq_len + 1, 1).index_select(0, start_B.to(tokens_N.device)).long()
    return window_BT1[:, :-1], window_BT1[:, 1:]


def _split(part: str, by: Tokenizer) -> Split:
    ids = by.encode(part)
    first = by.token_bytes(int(ids[0])) if len(ids) else b""
    whole_chars = len(first.decode("utf-8", errors="ignore"))  # a byte of a longer character completes none
    return Split(torch.from_numpy(ids), chars=len(part) - whole_chars, bytes=len(part.encode("utf-8")) - len(first))


def _generated_splits(data: Data, by: Tokenizer) -> dict[str, Split]:
    """By the generator itself, which knows what no text says; `by` may have its words in another order, and more."""
    id_of_word = by.encode(" ".join(generated.words(data))).astype(np.int64)
    classes_V = torch.full((by.vocab_size,), -1)
    classes_V[torch.from_numpy(id_of_word)] = torch.tensor(generated.classes(data))
    sizes_V = np.array([len(by.token_bytes(i)) for i in range(by.vocab_size)])
    out = {}
    for name, part in generated.generate(data).items():
        ids_N = id_of_word[part.ids].astype(np.uint8 if by.vocab_size <= 256 else np.int32)
        size = int(sizes_V[ids_N[1:]].sum())  # words are ASCII: a byte is a character
        known: dict[str, Any] = {
            what: torch.from_numpy(getattr(part, what)) for what in ("starts", "tags", "logp", "governors")
        }
        if data.name in PAIRED:
            known["separators"] = torch.from_numpy(np.flatnonzero(part.ids == generated.words(data).index(COLON)))
            # The space behind a target's last word is the line end that the mark behind it stands for.
            known["targets"] = (int(sizes_V[ids_N[part.tags > 0]].sum()),) * 2
        names = generated.LANGUAGES[data.name].tags
        out[name] = Split(torch.from_numpy(ids_N), size, size, **known, names=names, classes=classes_V)
    return out


def _pair_splits(data: Data, whole: str, by: Tokenizer) -> dict[str, Split]:
    """Of a text of pairs. Every token of a target has the tag `answer`."""
    readable = [name for name in PAIRED if name not in generated.LANGUAGES]
    if not isinstance(by, PairTokenizer) or data.name not in readable:
        raise UserError(f"tokens of pairs read data={', '.join(readable)}; not data={data.name}")
    out = {}
    for name, part in parallel.cut(whole, data).items():
        ids_N = by.encode(part)
        begins_N, separates_N = ids_N == by.begin, ids_N == by.separator
        answers_N = (begins_N.cumsum() == separates_N.cumsum()) & ~separates_N
        targets = "\n".join(line.partition("\t")[2] for line in part.removesuffix("\n").split("\n"))
        out[name] = Split(
            torch.from_numpy(ids_N),
            chars=len(part) - 1,  # a mark is a line end or a tab, but the first begins no new line
            bytes=len(part.encode("utf-8")) - 1,
            starts=torch.from_numpy(np.flatnonzero(begins_N)),
            tags=torch.from_numpy(answers_N.astype(np.uint8)),
            names=("answer",),
            classes=torch.arange(by.vocab_size),
            separators=torch.from_numpy(np.flatnonzero(separates_N)),
            targets=(len(targets), len(targets.encode("utf-8"))),
        )
    return out


_ARRAYS = ("tokens", "starts", "tags", "logp", "governors", "classes", "separators")
_PLAIN = ("chars", "bytes", "names", "targets")


def _pack(by: Tokenizer, splits: dict[str, Split]) -> bytes:
    """An .npz file: a zip, which checks its own content by CRC when it is read."""
    plain = {name: {what: getattr(s, what) for what in _PLAIN} for name, s in splits.items()}
    arrays: dict[str, Any] = {
        f"{name}.{what}": array.numpy()
        for name, s in splits.items()
        for what in _ARRAYS
        if (array := getattr(s, what)) is not None
    }
    file = io.BytesIO()
    np.savez(file, meta=np.array(json.dumps({"tokenizer": by.to_dict(), "splits": plain})), **arrays)
    return file.getvalue()


def _unpack(content: bytes) -> tuple[Tokenizer, dict[str, Split]]:
    splits = {}
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        meta = json.loads(str(arrays["meta"]))
        for name, plain in meta["splits"].items():
            found: dict[str, Any] = {
                a: torch.from_numpy(arrays[f"{name}.{a}"]) for a in _ARRAYS if f"{name}.{a}" in arrays
            }
            found |= {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
            splits[name] = Split(**found)
    return from_dict(meta["tokenizer"]), splits
