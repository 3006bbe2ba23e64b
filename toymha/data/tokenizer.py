"""Text to token ids and back: characters, bytes, BPE, words or pairs. A run keeps its own, as tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from toymha.config import Data
from toymha.data import parallel
from toymha.data.units import PairTokenizer, WordTokenizer
from toymha.data.vocabulary import Tokenizer, named
from toymha.schema import UserError


class CharTokenizer(Tokenizer):
    """A token is a character. The vocabulary is that of the WHOLE text, sorted by code point.

    So validation text can't hold an unknown symbol; what the training split never shows is at least nameable.
    """

    kind = "char"

    def __init__(self, symbols: str) -> None:
        self.symbols = symbols
        self.vocab_size = len(symbols)
        self._codes = _code_points(symbols)
        self._ids = np.full(int(self._codes[-1]) + 2, -1, np.int32)  # code point -> id, else -1; the last: all beyond
        self._ids[self._codes] = np.arange(self.vocab_size)

    @classmethod
    def of(cls, text: str) -> CharTokenizer:
        """The tokenizer of a text that is not empty."""
        return cls("".join(sorted(set(text))))

    def encode(self, text: str, block: int = 1_000_000) -> np.ndarray:
        out: np.ndarray = np.empty(len(text), self._dtype())
        for start in range(0, len(text), block):
            codes = _code_points(text[start : start + block])
            ids = self._ids[np.minimum(codes, len(self._ids) - 1)]
            if ids.min() < 0:
                unknown = sorted(set(text) - set(self.symbols))
                raise UserError(
                    f"{len(unknown)} symbols have no token among the {self.vocab_size} of this vocabulary: "
                    + named(unknown)
                )
            out[start : start + block] = ids
        return out

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._codes[np.asarray(ids, np.int64)].tobytes().decode("utf-32-le")

    def token_bytes(self, i: int) -> bytes:
        return self.symbols[i].encode("utf-8")

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "symbols": self.symbols}


class ByteTokenizer(Tokenizer):
    """A token is one of the 256 bytes of UTF-8, whatever the text."""

    kind = "byte"
    vocab_size = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8).copy()

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return np.asarray(ids).astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def token_bytes(self, i: int) -> bytes:
        return bytes([i])


class BPETokenizer(Tokenizer):
    """Byte-level byte-pair encoding: 256 bytes, and the most frequent pairs of a text, merged step by step.

    Sennrich et al. 2016, section 3.2; over bytes as in GPT-2, so every text has an encoding.
    `state` is the library's own description of the tokenizer.
    """

    kind = "bpe"

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self._library = _tokenizers().Tokenizer.from_str(json.dumps(state))
        self.vocab_size = self._library.get_vocab_size()
        byte_of = _byte_alphabet()
        self._bytes = [bytes(byte_of[c] for c in self._library.id_to_token(i)) for i in range(self.vocab_size)]

    @classmethod
    def train(cls, text: str, vocab_size: int) -> BPETokenizer:
        """The tokenizer with exactly `vocab_size` tokens; give it the training split only.

        Raises UserError when the text is too short for that many, or 256 bytes are too many.
        """
        t = _tokenizers()
        alphabet = sorted(_byte_alphabet())
        if vocab_size < len(alphabet):
            raise UserError(
                f"data.vocab_size={vocab_size} must be at least {len(alphabet)}: byte-level BPE starts from all bytes"
            )
        library = t.Tokenizer(t.models.BPE())
        library.pre_tokenizer = t.pre_tokenizers.ByteLevel(add_prefix_space=False)
        library.decoder = t.decoders.ByteLevel()
        trainer = t.trainers.BpeTrainer(
            vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=[], show_progress=False
        )
        library.train_from_iterator(_chunks(text), trainer)
        if library.get_vocab_size() < vocab_size:
            raise UserError(
                f"data.vocab_size={vocab_size}: the training split gives only {library.get_vocab_size()} BPE tokens"
            )
        return cls(json.loads(library.to_str()))

    def encode(self, text: str) -> np.ndarray:
        _utf8(text)
        pieces = self._library.encode_batch_fast(list(_chunks(text)), add_special_tokens=False)
        return np.array([i for piece in pieces for i in piece.ids], self._dtype())

    def token_bytes(self, i: int) -> bytes:
        return self._bytes[i]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "state": self.state}


TOKENIZERS: dict[str, Callable[[dict[str, Any]], Tokenizer]] = {
    "char": lambda d: CharTokenizer(d["symbols"]),
    "byte": lambda d: ByteTokenizer(),
    "bpe": lambda d: BPETokenizer(d["state"]),
    "word": lambda d: WordTokenizer(d["words"]),
    "pair": lambda d: PairTokenizer(d["sources"], d["targets"], d["source_unit"], d["target_unit"]),
}


def from_dict(d: dict[str, Any]) -> Tokenizer:
    """The tokenizer that `to_dict` wrote."""
    return TOKENIZERS[d["kind"]](d)


def make(data: Data, text: str, train: str) -> Tokenizer:
    """The tokenizer that a data config asks for: units of the whole `text`, but BPE from its `train` split only."""
    if data.tokenizer == "pair":
        return PairTokenizer.of(text, *parallel.units(data))
    if data.tokenizer == "bpe":
        return BPETokenizer.train(train, data.vocab_size or 0)
    return ByteTokenizer() if data.tokenizer == "byte" else CharTokenizer.of(text)


def _code_points(text: str) -> np.ndarray:
    """Unicode code points, one a character; a lone surrogate (a bad byte on the command line) stays what it is."""
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as e:  # Python holds a byte of the command line that is not UTF-8 as a lone surrogate
        raise UserError(f"the text holds {text[e.start]!r} at character {e.start}, which is not UTF-8") from None


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(
            "data.tokenizer=bpe needs the package tokenizers: pip install 'toymha[bpe]'; char and byte need nothing"
        ) from None
    return tokenizers


def _byte_alphabet() -> dict[str, int]:
    """The letter that byte-level BPE writes for each byte -> the byte.

    Printable bytes of Latin-1 are themselves; the other bytes, in order, are the letters from U+0100 on.
    """
    letters = sorted(_tokenizers().pre_tokenizers.ByteLevel.alphabet())
    themselves = {c: ord(c) for c in letters if ord(c) < 256}
    others = sorted(set(range(256)) - set(themselves.values()))
    return themselves | dict(zip((c for c in letters if ord(c) >= 256), others, strict=True))


def _chunks(text: str, size: int = 20_000) -> Iterator[str]:
    """The text in pieces of about `size` characters, for speed.

    A piece ends between a visible character and a line end, where BPE never merges: the tokens are those of the whole.
    """
    start = 0
    while start < len(text):
        end = text.find("\n", start + size)
        while 0 < end < len(text) and text[end - 1].isspace():
            end = text.find("\n", end + 1)
        end = end if end > 0 else len(text)
        yield text[start:end]
        start = end
