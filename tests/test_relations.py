"""Laws of the toy language: its frequencies, its floor, its difficulty, and what training is told of it.

D documents, N tokens, V vocabulary. The oracle below knows the rules and reads only what stands before a token.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from toymha import compose, lab, runs, train
from toymha.cli import main
from toymha.config import Data
from toymha.console import Console
from toymha.data import corpus, generated, relations, text
from toymha.data.documents import Page
from toymha.data.relations import ADVERBS, NAMES, PAIRS, TOPICS
from toymha.evaluate import evaluate
from toymha.log import learned
from toymha.stop import Stop

SETTINGS = [
    dict(),
    dict(together=False),
    dict(symbols=3, distance=1, distractors=2),
    dict(symbols=40, distance=0, distractors=0, together=False),
]


def language(**keys) -> Data:
    given = dict(tokens=200_000, text_seed=0, symbols=18, distance=2, distractors=1, together=True) | keys
    return Data("relations", None, "word", None, [0.9, 0.05, 0.05], **given)


@functools.cache
def documents(split="train", **keys) -> list[list[str]]:
    """Each document as a list of words."""
    d = language(**keys)
    part, words = generated.generate(d)[split], generated.words(d)
    return [[words[i] for i in ids] for ids in np.split(part.ids, part.starts[1:])]


# The oracle: an independent reading of the rules


def even(words):
    return {w: 1 / len(words) for w in words}


def mix(*parts):
    """(probability, distribution) ... -> one distribution."""
    out = Counter()
    for p, distribution in parts:
        for word, q in distribution.items():
            out[word] += p * q
    return {w: q for w, q in out.items() if q}


class Oracle:
    """`distribution(prefix)`: word -> probability of what follows the first words of a document."""

    def __init__(self, d: Data) -> None:
        self.d = d
        classes = relations.vocabulary(d)
        self.singular, self.plural = set(classes["singular nouns"]), set(classes["plural nouns"])
        self.verbs = {False: classes["singular verbs"], True: classes["plural verbs"]}
        weights = [1 / r for r in range(1, d.symbols + 1)]
        self.adverbs = {w: x / sum(weights) for w, x in zip(classes["adverbs"], weights)}
        self.start = mix((0.5, even(NAMES)), (0.5, even(NAMES)))
        if not d.together:
            self.start = mix((1 / 3, even(NAMES)), (1 / 3, self.subject(0)), (1 / 3, even(PAIRS)))

    def more(self, done, most, again, then):
        """After `done` of 0 to `most` rounds: one more, or what comes after them."""
        p = (most - done) / (most - done + 1)
        return mix((p, again), (1 - p, then))

    def filler(self, done, cue):
        return self.more(done, 2 * self.d.distance, self.adverbs, {cue: 1})

    def subject(self, done):
        return self.more(done, self.d.distractors, {"near": 1}, {"the": 1})

    def distribution(self, prefix):
        if len(prefix) < 2:
            return even(TOPICS) if prefix else {"<doc>": 1}
        sentences = " ".join(prefix[2:]).split(" .")
        done, now = len(sentences) - 1, sentences[-1].split()
        if not now:
            fewest, most = (1, 2) if self.d.together else (3, 3)
            return self.start if done < fewest else self.more(done - fewest, most - fewest, self.start, {"farewell": 1})
        if now[0] == "farewell":
            return {TOPICS[prefix[1]]: 1} if len(now) == 1 else {"<doc>": 1}
        return self.within(now)

    def within(self, now):
        last, said = now[-1], "said" in now
        if last in PAIRS:
            return {"and": 1}
        if last == "and":
            return {PAIRS[now[-2]]: 1}
        if last in PAIRS.values() or last in ("it", "smiled"):
            return {".": 1}
        if now[0] in NAMES and not said:
            return self.about_names(now)
        return self.about_nouns(now[now.index("said") + 1 :] if said else now)

    def about_names(self, now):
        last, adverbs = now[-1], sum(w in self.adverbs for w in now)
        if last == "met":
            return even(NAMES)
        if last == "because":
            return {"she" if NAMES.index(now[0]) < 4 else "he": 1}
        if last in ("she", "he"):
            return {"said" if self.d.together else "smiled": 1}
        then = self.filler(adverbs, "because")
        return then if adverbs else self.more(now.count("met"), 2 * self.d.distractors, {"met": 1}, then)

    def about_nouns(self, now):
        nouns = self.singular | self.plural
        subjects = [i for i, w in enumerate(now) if w in nouns and now[i - 2 : i - 1] != ["near"]]
        before, behind = (now[: subjects[0]], now[subjects[0] + 1 :]) if subjects else (now, [])
        last = now[-1] if now else None
        if last == "near":
            return {"the": 1}
        if last == "the":
            return even(nouns)
        if not subjects:
            return self.subject(before.count("near"))
        if last == "always":
            return even(self.verbs[now[subjects[0]] in self.plural])
        if last in self.verbs[True] or last in self.verbs[False]:
            return even(PAIRS) if self.d.together else {"it": 1}
        adverbs = sum(w in self.adverbs for w in behind)
        then = self.filler(adverbs, "always")
        return then if adverbs else self.more(behind.count("near"), self.d.distractors, {"near": 1}, then)


@pytest.mark.parametrize("keys", SETTINGS)
def test_the_oracle_reaches_the_floor_exactly(keys):
    """Each token's stored log-probability is what the rules give from the visible beginning of its document."""
    d = language(**keys)
    oracle, part, classes = Oracle(d), generated.generate(d)["val"], generated.classes(d)
    class_of = dict(zip(generated.words(d), classes))
    for k, document in enumerate(documents("val", **keys)[:60]):
        for i, word in enumerate(document):
            seen, at = oracle.distribution(document[:i]), part.starts[k] + i
            assert sum(seen.values()) == pytest.approx(1)
            assert math.log(seen[word]) == pytest.approx(part.logp[at], abs=1e-5), document[: i + 1]
            if part.tags[at]:  # the whole probability is in one class
                assert {class_of[w] for w in seen} == {class_of[word]}


def test_a_shuffled_control_stays_at_chance():
    """With the answers of other documents in their place, the oracle finds them right as often as chance has it."""
    d = language()
    oracle, found = Oracle(d), {1: [], 2: [], 3: [], 4: []}
    part = generated.generate(d)["val"]
    for k, document in enumerate(documents("val")):
        for i, word in enumerate(document):
            if tag := part.tags[part.starts[k] + i]:
                found[tag].append((word, oracle.distribution(document[:i])))
    rng = np.random.default_rng(0)
    for tag, chance in {1: 1 / 8, 2: 1 / 2, 3: 1 / 2, 4: 1 / 8}.items():
        words, seen = zip(*found[tag])
        hits = [w in s for w, s in zip(rng.permutation(words), seen)]
        assert np.mean(hits) == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / len(hits)))
        assert all(w in s for w, s in found[tag])


# The declared distribution


def fits(counts, p=None):
    """A chi-square test; the seed is fixed, so it passes always or never."""
    counts = np.array(counts)
    expected = counts.sum() * (np.full(len(counts), 1 / len(counts)) if p is None else np.array(p))
    return stats.chisquare(counts, expected).pvalue > 1e-3


def test_frequencies_are_those_declared():
    docs = documents()
    words = Counter(w for d in docs for w in d)
    topics = Counter(d[1] for d in docs)
    assert fits([topics[t] for t in TOPICS])
    assert fits([words[n] for n in NAMES])
    assert fits([words[first] for first in PAIRS])
    classes = relations.vocabulary(language())
    assert fits([words[n] for n in classes["singular nouns"] + classes["plural nouns"]])
    assert fits([words[v] for v in classes["singular verbs"] + classes["plural verbs"]])
    zipf = 1 / np.arange(1, 19)
    assert fits([words[a] for a in ADVERBS], zipf / zipf.sum())
    assert fits([n for _, n in sorted(Counter(d.count(".") for d in docs).items())])
    kinds = Counter(s[0] in NAMES for d in documents(together=False) for s in sentences(d))
    assert fits([kinds[True], kinds[False]], [1 / 3, 2 / 3])


def sentences(document):
    return [s.split() for s in " ".join(document[2:]).split(" .")[:-1]]


@pytest.mark.parametrize("distance, distractors", [(2, 1), (0, 2), (3, 0)])
def test_difficulty_keys_do_what_they_say(distance, distractors):
    """Fillers and distractors have the stated mean and the stated range, each number as often as the others."""
    keys = dict(distance=distance, distractors=distractors)
    fillers, names, before, behind = Counter(), Counter(), Counter(), Counter()
    for s in (s for d in documents(**keys) for s in sentences(d)):
        cut = s.index("because")
        fillers[sum(w in ADVERBS for w in s[:cut])] += 1
        names[s.count("met")] += 1
        nouns = s[s.index("said") + 1 : s.index("always")]
        subject = next(i for i, w in enumerate(nouns) if w == "the" and (i == 0 or nouns[i - 1] != "near"))
        before[nouns[:subject].count("near")] += 1
        behind[nouns[subject:].count("near")] += 1
        assert len(nouns) == 2 + 3 * nouns.count("near") + sum(w in ADVERBS for w in nouns)
    for counted, most in (
        (fillers, 2 * distance),
        (names, 2 * distractors),
        (before, distractors),
        (behind, distractors),
    ):
        assert sorted(counted) == list(range(most + 1))
        assert most == 0 or fits([counted[i] for i in range(most + 1)])


def test_gender_and_number_of_distractors_are_independent():
    """So that following a distractor is right half of the time."""
    same = [
        (NAMES.index(s[0]) < 4) == (NAMES.index(s[s.index("met") + 1]) < 4)
        for d in documents()
        for s in sentences(d)
        if "met" in s
    ]
    assert np.mean(same) == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(len(same)))


def test_symbols_sets_the_size_of_the_open_classes():
    for symbols in (2, 18, 50):
        d = language(symbols=symbols)
        words = generated.words(d)
        assert len(words) == len(set(words)) == text.vocab_size(d) == 5 * symbols + 52
        assert len(set(generated.classes(d))) == len(words) - 2 * (symbols - 1)
    assert "cat3" in generated.words(language(symbols=50)) and "cats3" in generated.words(language(symbols=50))


@pytest.mark.parametrize("keys", SETTINGS)
def test_the_closed_form_is_the_mean_over_documents(keys):
    """Within four standard errors of the ratio nats / tokens; by relation exactly."""
    d = language(**keys, tokens=1_000_000)
    whole, _ = generated._draw(d)
    nats_D = np.add.reduceat(-whole.logp.astype(float), whole.starts)
    length_D = np.diff(np.append(whole.starts, len(whole.ids)))
    floor = generated.floors(d)
    error = (nats_D - floor["all"] * length_D).std() / length_D.mean() / math.sqrt(len(nats_D))
    assert nats_D.sum() / length_D.sum() == pytest.approx(floor["all"], abs=4 * error)
    assert error < 0.01
    assert length_D.mean() == pytest.approx(relations.expected(d).tokens, rel=0.01)
    for i, name in enumerate(relations.TAGS):
        assert -whole.logp[whole.tags == i + 1] == pytest.approx(floor[name], abs=1e-6)


def test_the_floor_of_agreement_and_chance():
    """By hand: 18 verbs of the right number."""
    assert generated.floors(language())["agreement"] == pytest.approx(2.8904, abs=1e-4)


# Governors


def governor(document, i, classes):
    """Where the word that decides the i-th one stands, by reading back from it; -1 where the rules name none."""
    word, start = document[i], i
    while start > 2 and document[start - 1] != ".":
        start -= 1
    if word in classes["closings"]:
        return 1
    if word in classes["pronouns"]:
        return start
    if word in classes["seconds"]:
        return i - 2
    if word not in classes["singular verbs"] + classes["plural verbs"]:
        return -1
    while start < i and not (document[start] == "the" and document[start - 1] != "near"):
        start += 1
    return start + 1


def decides(document, g, i, classes):
    """Does the g-th word allow the i-th, and forbid what it forbids?"""
    a, b = document[g], document[i]
    if a in NAMES:
        return b == ("she" if NAMES.index(a) < 4 else "he")
    if a in classes["singular nouns"] + classes["plural nouns"]:
        return b in classes["singular verbs"] if a in classes["singular nouns"] else b in classes["plural verbs"]
    return (PAIRS | TOPICS)[a] == b


@pytest.mark.parametrize("keys", [*SETTINGS, dict(together=False, distance=3, distractors=3)])
def test_a_reader_finds_the_governor_of_every_tagged_token(keys):
    """And of no other; in each split, by its own positions, as it comes from the cache."""
    d = language(**keys, tokens=20_000)
    classes, _ = relations.vocabulary(d), corpus.load_corpus(d)
    for name, split in corpus.load_corpus(d).splits.items():
        found, tags = split.governors.tolist(), split.tags.tolist()
        lines = [[generated.words(d)[t] for t in ids] for ids in split.tokens.tensor_split(split.starts[1:])]
        for start, document in zip(split.starts.tolist(), lines):
            for i in range(len(document)):
                g = governor(document, i, classes)
                assert (g >= 0) == (tags[start + i] > 0)
                assert found[start + i] == (start + g if g >= 0 else -1), (name, document, i)
                assert g < 0 or decides(document, g, i, classes)
        assert len(found) == len(tags) == len(split.tokens) and len(lines) > 10


def test_columns_that_skip_a_document_do_not_count_in_it():
    """Two documents by hand: `a b c b*` and `a c b*`; the first b* is decided by the c, the second by the a."""
    page = Page(2, np.random.default_rng(0), {"letters": ["a", "b", "c"]})
    page.say("a")
    with page.only(np.array([True, False])):
        page.say("b")
    page.say("c")
    page.write(page.id_of["b"], tag=1, governor_D=np.array([2, 0]))
    *_, back_DL, there_DL = page.arrays()
    assert there_DL.tolist() == [[True, True, True, True], [True, False, True, True]]
    assert back_DL.tolist() == [[0, 0, 0, 1], [0, 0, 0, 2]]
    for alone in (dict(tag=1), dict(governor_D=0)):
        with pytest.raises(ValueError, match="both or neither"):
            page.write(0, **alone)


# As data


def test_splits_share_no_document():
    splits = {name: {" ".join(d) for d in documents(name, together=False)} for name in ("train", "val", "test")}
    assert not splits["train"] & splits["val"] and not (splits["train"] | splits["val"]) & splits["test"]
    assert len(splits["val"]) > 200


def test_the_seed_decides_the_text():
    """The same on every machine: this is the hash of one."""
    small = language(tokens=5000)
    assert text.fingerprint(small)[:16] == "21a7040422f21f94"
    assert text.fingerprint(dataclasses.replace(small, text_seed=1)) != text.fingerprint(small)
    again = generated.generate(small)
    assert all(np.array_equal(again[k].ids, p.ids) for k, p in generated.generate(small).items())


def test_text_and_tokens_are_the_same_words():
    """Documents are lines; the size is about data.tokens; characters and bytes are those of the predicted words."""
    d = language(tokens=20_000)
    c, whole = corpus.load_corpus(d), text.read_text(d)
    assert whole == "".join(c.tokenizer.decode(s.tokens) for s in c.splits.values())
    assert all(line.startswith("<doc> ") for line in whole.splitlines())
    assert sum(len(s.tokens) for s in c.splits.values()) == pytest.approx(20_000, rel=0.03)
    for s in c.splits.values():
        assert s.chars == s.bytes == len(c.tokenizer.decode(s.tokens)) - len("<doc> ")
        assert torch.equal(s.starts, (s.tokens == c.tokenizer.encode("<doc>")[0]).nonzero()[:, 0])
        assert s.longest <= 64 and s.names == relations.TAGS
    again = corpus.load_corpus(d)  # from the cache
    for name, s in c.splits.items():
        for what in ("tokens", "starts", "tags", "logp", "governors", "classes"):
            found = getattr(again.splits[name], what)
            assert torch.equal(getattr(s, what), found) and getattr(s, what).dtype == found.dtype


def test_with_the_tokenizer_of_another_run():
    """Words in another order: the same words, tags and classes under other ids."""
    d = language(tokens=5000)
    plain = corpus.load_corpus(d)
    other = type(plain.tokenizer)(["more", *reversed(plain.tokenizer.words)])
    c = corpus.load_corpus(d, other)
    a, b = plain.splits["val"], c.splits["val"]
    assert c.tokenizer.decode(b.tokens) == plain.tokenizer.decode(a.tokens)
    assert torch.equal(a.tags, b.tags) and torch.equal(a.governors, b.governors) and b.classes[0] == -1
    assert torch.equal(a.classes[a.tokens.long()], b.classes[b.tokens.long()])


# A perfect model


class Perfect(nn.Module):
    """Predicts by the oracle from the last beginning of a document in its window."""

    def __init__(self, d: Data, words: list[str]) -> None:
        super().__init__()
        self.oracle, self.words, self.one = Oracle(d), words, nn.Parameter(torch.zeros(1))

    def forward(self, x_WT):
        logits_WTV = torch.full((*x_WT.shape, len(self.words) + 3), -1e9)  # three tokens that the text has not
        for w, row in enumerate(x_WT.tolist()):
            for t in range(len(row)):
                begin = max(i for i in range(t + 1) if self.words[row[i]] == "<doc>")
                prefix = [self.words[i] for i in row[begin : t + 1]]
                seen = self.oracle.distribution(prefix)
                for word, p in seen.items():
                    logits_WTV[w, t, self.words.index(word)] = math.log(p)
        return logits_WTV


@pytest.mark.parametrize("together", [True, False])
def test_a_perfect_model_is_right_everywhere(together):
    """Its loss is the floor on the same tokens, to the sixth digit, and its probability is all on what is right."""
    d = language(tokens=30_000, together=together)
    c = corpus.load_corpus(d)
    score = evaluate(Perfect(d, c.tokenizer.words), c.splits["val"], 64)
    assert score.loss == pytest.approx(score.floor, abs=1e-6)
    assert score.parts.keys() == set(relations.TAGS)
    for part in score.parts.values():
        assert part.loss == pytest.approx(part.floor, abs=1e-6)
        assert part.right == pytest.approx(1) and part.accuracy == 1


# What training makes of it

TINY = (
    "data=relations data.tokens=20000 n_layer=1 dim=32 n_head=2 seq_len=64 batch_size=8 threads=1 device=cpu "
    "budget.steps=30 budget.tokens=null budget.minutes=null budget.eval_every=10 budget.eval_tokens=512"
).split()


def test_learned_is_since_when_it_stayed_learned():
    rows = [{"step": s, "relation_right/topic": r} for s, r in enumerate([0.1, 0.95, 0.89, 0.9, 0.99])]
    assert learned([*rows, {"step": 4, "final/loss_val": 1.0}], "topic") == 3
    assert learned(rows[:3], "topic") is None and learned(rows[:2], "topic") == 1
    assert learned(rows, "agreement") is None


def test_rows_summary_screen_and_eval(tmp_path, monkeypatch, capsys):
    """Each relation is logged, summed up, shown at the end, and shown again by `toymha eval` on any split."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(lab, "learned", lambda rows, name: learned(rows, name, bar=0.01))
    assert main(["train", *TINY]) == 0
    screen = capsys.readouterr().out
    (run,) = runs.find("outputs")
    summary, rows = run.summary, [r for r in run.rows() if "loss/val" in r]
    assert [r["step"] for r in rows] == [0, 10, 20, 30]
    parts = summary["val"]["parts"]
    assert list(parts) == list(summary["learned"]) == list(relations.TAGS)
    assert 1.3 < summary["val"]["floor"] < 1.6 and all("floor/val" in r for r in rows)
    for name, part in parts.items():
        for what in ("loss", "floor", "right", "accuracy"):
            assert rows[-1][f"relation_{what}/{name}"] == pytest.approx(part[what], abs=0.3)
        assert summary["learned"][name] == learned(run.rows(), name, bar=0.01)
        assert f"{part['loss']:8.4f} {part['floor']:8.4f} {part['right']:8.3f}" in screen
    assert summary["learned"]["agreement"] is not None
    assert f"{summary['val']['floor']:.4f} nats on these tokens" in screen
    assert main(["eval", f"run={run.path}", "split=test", "device=cpu", "threads=1"]) == 0
    out = capsys.readouterr().out
    assert f"{summary['test']['parts']['topic']['loss']:8.4f}" in out and "learned" not in out
    assert main(["eval", f"run={run.path}", "data=pydoc", "device=cpu", "threads=1"]) == 2
    assert "words are not among the 142 of this vocabulary" in capsys.readouterr().err


def test_curves_have_a_place(tmp_path, monkeypatch):
    """TensorBoard's custom page has the relations of a generated text, and no empty charts for any other."""
    monkeypatch.chdir(tmp_path)
    for data, has in (("relations", True), ("pydoc", False)):
        words = [w for w in TINY if not w.startswith(("data", "budget.steps"))] + ["budget.steps=2", f"name={data}"]
        assert main(["train", f"data={data}", *words]) == 0
        (run,) = runs.find(f"outputs/{data}")
        events = EventAccumulator(str(run.path), size_guidance={"tensors": 0}).Reload()
        (layout,) = events.Tensors("custom_scalars__config__")
        assert (b"relation_right/.*" in layout.tensor_proto.string_val[0]) is has
        assert ("relation_right/topic" in events.Tags()["scalars"]) is has
        assert (run.summary["val"]["floor"] is not None) is has


def test_what_was_learned_survives_resuming(tmp_path, monkeypatch):
    """An interrupted run that goes on ends with the numbers of one that was never interrupted."""
    monkeypatch.chdir(tmp_path)

    class Dying(Console):
        def step(self, step, seconds, loss):
            if step == 15:
                raise MemoryError

    points = compose.points([*TINY, "name=a"])
    with Stop() as stop, pytest.raises(MemoryError):
        train.train_point(points[0], Dying(quiet=True), stop)
    assert main(["train", *TINY, "name=a"]) == main(["train", *TINY, "name=b"]) == 0
    (a,), (b,) = (list(runs.find(f"outputs/{n}")) for n in "ab")
    assert a.summary["val"] == b.summary["val"] and a.summary["learned"] == b.summary["learned"]
    assert [r["step"] for r in a.rows()] == [r["step"] for r in b.rows()]
