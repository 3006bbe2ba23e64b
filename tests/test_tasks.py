"""Laws of the tasks: answers that an independent solver finds, and log-probabilities that counting gives."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from toymha.config import Data
from toymha.data import corpus, generated, tasks, text
from toymha.schema import UserError

TASKS = {
    "recall": dict(symbols=32, length=8),
    "induction": dict(symbols=32, length=30),
    "copy": dict(symbols=16, length=16),
    "reverse": dict(symbols=16, length=16),
    "selective_copy": dict(symbols=16, length=8, distractors=16),
}
TINY = {
    "recall": dict(symbols=3, length=2),
    "induction": dict(symbols=4, length=3),
    "copy": dict(symbols=3, length=3),
    "reverse": dict(symbols=2, length=4),
    "selective_copy": dict(symbols=2, length=2, distractors=2),
}


def task(name, **keys) -> Data:
    return Data(name, None, "word", None, [0.8, 0.1, 0.1], **dict(tokens=50_000, text_seed=0) | keys)


def drawn(d, part):
    """(words, tags, logp) of each document."""
    words = np.array(generated.words(d))[part.ids]
    return list(zip(*(np.split(a, part.starts[1:]) for a in (words, part.tags, part.logp))))


def solve(name, before):
    """What must follow these words of a document, by the task's own description."""
    body = before[1 : before.index(":")]
    asked = before[before.index(":") + 1 :]
    if name == "recall":
        return dict(zip(body[::2], body[1::2]))[asked[-1]]
    if name == "induction":
        return body[body.index(asked[-1]) + 1]
    string = {"copy": body, "reverse": body[::-1], "selective_copy": [w for w in body if w != "_"]}[name]
    return string[len(asked)]


@pytest.mark.parametrize("name", TASKS)
def test_a_solver_finds_every_answer(name):
    d = task(name, **TASKS[name])
    answers = {"recall": 8, "induction": 1, "copy": 16, "reverse": 16, "selective_copy": 8}[name]
    for words, tags, logp in drawn(d, generated.generate(d)["val"]):
        words = words.tolist()
        assert len(words) == 34 and (tags > 0).sum() == answers
        for i in np.flatnonzero(tags):
            assert words[i] == solve(name, words[:i])
            assert logp[i] == 0


def source(name, before):
    """Where what must follow these words stands before the colon: found by its place, not by what it is."""
    colon = before.index(":")
    answered, asked = len(before) - colon - 1, before[-1]
    if name in ("recall", "induction"):  # the keys of recall have other words than its values
        return before.index(asked) + 1
    places = [i for i in range(1, colon) if before[i] != "_"]
    return places[::-1][answered] if name == "reverse" else places[answered]


@pytest.mark.parametrize("name", TASKS)
def test_the_governor_of_an_answer_is_what_it_repeats(name):
    """The same token, at the place that the task means, in the same document; in each split, also from the cache."""
    d = task(name, **TASKS[name])
    words = generated.words(d)
    for split in [s for _ in range(2) for s in corpus.load_corpus(d).splits.values()]:
        tokens, governors, tags = split.tokens.tolist(), split.governors.tolist(), split.tags.tolist()
        assert [g < 0 for g in governors] == [tag == 0 for tag in tags] and min(governors) == -1
        ends = [*split.starts[1:].tolist(), len(tokens)]
        for start, end in zip(split.starts.tolist(), ends):
            document = [words[t] for t in tokens[start:end]]
            for i in range(start, end):
                if tags[i]:
                    assert start <= governors[i] < i and tokens[governors[i]] == tokens[i]
                    assert governors[i] - start == source(name, document[: i - start])


@pytest.mark.parametrize("name", TINY)
def test_log_probabilities_by_counting(name):
    """In a tiny language every document occurs, all are equally likely, and prefixes can be counted."""
    d = task(name, **TINY[name])
    whole, _ = generated._draw(d)
    docs = drawn(d, whole)
    different = {tuple(words) for words, _, _ in docs}
    expected = tasks.expected(d)
    assert len(different) == round(math.exp(expected.nats))
    assert {len(x) for x in different} == {expected.tokens}
    prefixes = Counter(x[:i] for x in different for i in range(len(x) + 1))
    for words, _, logp in docs[:200]:
        for i in range(len(words)):
            ratio = prefixes[tuple(words[: i + 1])] / prefixes[tuple(words[:i])]
            assert logp[i] == pytest.approx(math.log(ratio), abs=1e-6)


@pytest.mark.parametrize("name", TASKS)
def test_every_document_has_the_declared_entropy(name):
    d = task(name, **TASKS[name])
    expected, part = tasks.expected(d), generated.generate(d)["train"]
    nats_D = np.add.reduceat(-part.logp.astype(float), part.starts)
    assert nats_D == pytest.approx(expected.nats, rel=1e-5)
    assert generated.floors(d) == {"all": expected.nats / expected.tokens, "answer": 0}


def test_sizes_do_what_they_say():
    d = task("selective_copy", symbols=30, length=5, distractors=9)
    words, _, _ = drawn(d, generated.generate(d)["val"])[0]
    assert (words == "_").sum() == 9 and len(words) == 2 + 5 + 9 + 5
    assert set(generated.words(d)) > {"z", "a2", "d2"} and len(generated.words(d)) == text.vocab_size(d) == 33
    # Every place holds a blank as often as the others.
    blank = np.array([w[1:15] == "_" for w, _, _ in drawn(d, generated.generate(d)["train"])])
    assert blank.mean(0) == pytest.approx(9 / 14, abs=4 * 0.5 / math.sqrt(len(blank)))


@pytest.mark.parametrize("name", TASKS)
def test_splits_share_no_document(name):
    d = task(name, **TASKS[name])
    lines = {k: {" ".join(w) for w, _, _ in drawn(d, part)} for k, part in generated.generate(d).items()}
    assert not lines["train"] & (lines["val"] | lines["test"]) and not lines["val"] & lines["test"]
    assert len(lines["val"]) > 100


def test_repeated_documents_are_left_out_of_what_is_held_out():
    """4,096 different documents, of which training shows about 5 %."""
    d = task("copy", symbols=2, length=12, tokens=6500)
    whole, hash_D = generated._draw(d)
    parts = generated.generate(d)
    assert len(set(hash_D.tolist())) == len({tuple(w) for w, _, _ in drawn(d, whole)}) < len(hash_D)
    assert sum(len(p.starts) for p in parts.values()) < len(hash_D)
    for p in parts.values():  # `<doc>`, twelve symbols, a colon, and the symbols again
        assert p.governors.dtype == np.int32
        assert (p.governors.reshape(-1, 26) - p.starts[:, None])[:, 14:].tolist() == [list(range(1, 13))] * len(
            p.starts
        )


@pytest.mark.parametrize(
    "name, keys, words",
    [
        ("copy", dict(symbols=2, length=3), ["of the val documents", "data.symbols=2"]),
        ("recall", dict(symbols=4, length=5), ["data.length=5", "data.symbols=4"]),
        ("induction", dict(symbols=4, length=1), ["data.length=1", "at least 2"]),
    ],
)
def test_what_cannot_be_is_told_in_one_line(name, keys, words):
    with pytest.raises(UserError) as e:
        generated.generate(task(name, **keys))
    assert "\n" not in str(e.value) and all(w in str(e.value) for w in words)
