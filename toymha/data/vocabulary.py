"""What all tokenizers have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


class Tokenizer:
    """Ids are 0 to `vocab_size` - 1; token i stands for the bytes `token_bytes(i)`."""

    kind: str
    vocab_size: int

    def encode(self, text: str) -> np.ndarray:
        """Ids, one-dimensional: uint8 where they fit, else int32. Raises UserError for symbols that have no token."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of the ids; bytes that are no whole character become U+FFFD."""
        return b"".join(map(self.token_bytes, np.asarray(ids).tolist())).decode("utf-8", errors="replace")

    def token_bytes(self, i: int) -> bytes:
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """What JSON can write and `from_dict` reads."""
        return {"kind": self.kind}

    def labels(self) -> list[str]:
        """A printable name of each token: a space is `␣`, a line end `\\n`, a byte that is no character `\\xe4`."""
        return [
            printable(self.token_bytes(i).decode("utf-8", errors="backslashreplace")) for i in range(self.vocab_size)
        ]

    def _dtype(self) -> type:
        return np.uint8 if self.vocab_size <= 256 else np.int32


def printable(text: str) -> str:
    """The text with what cannot be seen spelled out."""
    return "".join("␣" if c == " " else c if c.isprintable() else repr(c)[1:-1] for c in text)


def named(unknown: Iterable[str]) -> str:
    """The first ten of what has no token, sorted, for an error."""
    names = sorted(unknown)
    return ", ".join(map(repr, names[:10])) + (", ..." if len(names) > 10 else "")
