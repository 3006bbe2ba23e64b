"""Where a generated text begins: prompts from the command line, a file or standard input, as tokens of a run."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path

from toymha.data.corpus import Corpus
from toymha.data.text import decode
from toymha.options import GenerateOptions
from toymha.schema import UserError

WAYS = ("prompt", "prompt_file", "prompts")


@dataclass(frozen=True)
class Prompt:
    """`ids`: at least one token; for an empty text that of `start`."""

    text: str
    ids: list[int]

    @property
    def empty(self) -> bool:
        return not self.text


def check(o: GenerateOptions) -> None:
    """Raises UserError where prompts are given in two ways."""
    given = [f"{way}=" for way in WAYS if getattr(o, way) is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are given; a prompt comes from one of them")


def read(o: GenerateOptions) -> list[str]:
    """The texts of all prompts, in order; none given is one that is empty. Raises UserError for what is no text."""
    if o.prompt_file is not None:
        return [_file(o.prompt_file, "prompt_file")]
    if o.prompts is not None:
        return _file(o.prompts, "prompts").removesuffix("\n").split("\n")
    if o.prompt == "-":
        return [decode(sys.stdin.buffer.read(), "standard input")]
    return [o.prompt or ""]


def _file(name: str, way: str) -> str:
    path = Path(name).expanduser().absolute()
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{way}={name}: there is no file {path}") from None
    except OSError as e:
        raise UserError(f"{way}={name}: {'it is a folder' if path.is_dir() else e.strerror}") from None
    return decode(raw, str(path))


def encode(texts: list[str], corpus: Corpus) -> list[Prompt]:
    """Texts as tokens. Raises UserError naming symbols that have no token."""
    encoded = ((text, corpus.tokenizer.encode(text).tolist()) for text in texts)
    return [Prompt(text, ids) if ids else Prompt("", start(corpus)) for text, ids in encoded]


def start(corpus: Corpus) -> list[int]:
    """What an empty prompt starts from: the mark that begins a document; in a text without documents a line end, and
    where it has no line ends its first token."""
    if (mark := begin(corpus)) is not None:
        return [mark]
    with contextlib.suppress(UserError):
        return corpus.tokenizer.encode("\n").tolist()
    return corpus.splits["train"].tokens[:1].tolist()


def begin(corpus: Corpus) -> int | None:
    """The token that begins each document, and so ends the one before; None for a text without documents."""
    train = corpus.splits["train"]
    return None if train.starts is None else int(train.tokens[train.starts[0]])
