"""Laws of the census: hand-worked scores, planted heads found without a mistake, untrained heads left in peace.

B sequences, T query positions, S key positions, H heads, V vocabulary.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F

from tests.conftest import make
from toymha import optim
from toymha.analysis import census as heads
from toymha.analysis import kinds
from toymha.analysis.capture import heads_of
from toymha.analysis.census import census, census_counts
from toymha.analysis.results import Census, Head, Kind, Mean
from toymha.data.corpus import Corpus, Split, load_corpus
from toymha.data.tokenizer import WordTokenizer
from toymha.evaluate import windows
from toymha.model.gpt import GPT
from toymha.schema import UserError
from toymha.seeds import stream_seed

SMALL_TEXT = ("data=relations", "data.tokens=30000", "data.split=[0.6,0.4]")


@pytest.fixture(scope="module")
def relations() -> Corpus:
    return load_corpus(make(*SMALL_TEXT, "seq_len=96").data)


# Scores, by hand

HAND = torch.tensor([[1, 0, 0, 0], [0.25, 0.75, 0, 0], [0.2, 0.3, 0.5, 0], [0.1, 0.2, 0.3, 0.4]])[None, None]


@pytest.fixture
def from_row_1(monkeypatch):
    monkeypatch.setattr(kinds, "FIRST", 1)


@pytest.mark.parametrize(
    "offset, expected", [(0, (0.75 + 0.5 + 0.4) / 3), (1, (0.25 + 0.3 + 0.3) / 3), (2, 0.2), (3, 0.1), (-1, 0)]
)
def test_weight_along_a_diagonal(from_row_1, offset, expected):
    assert kinds.along(HAND, offset).item() == pytest.approx(expected)


def test_weight_on_what_is_to_come(from_row_1):
    assert kinds.along(HAND.transpose(2, 3), -1).item() == pytest.approx((0.3 + 0.3) / 2)


def test_entropy_as_a_share_of_the_largest(from_row_1):
    rows = [(0.25, 0.75), (0.2, 0.3, 0.5), (0.1, 0.2, 0.3, 0.4)]
    shares = [-sum(p * math.log(p) for p in row) / math.log(len(row)) for row in rows]
    assert kinds.entropy(HAND, causal=True).item() == pytest.approx(sum(shares) / 3)
    seen = [-sum(p * math.log(p) for p in row) / math.log(4) for row in rows]
    assert kinds.entropy(HAND, causal=False).item() == pytest.approx(sum(seen) / 3)


def look(pattern_BHTS, look_BTS) -> float:
    return kinds.weight(pattern_BHTS, {"it": look_BTS})["it"].item()


def test_weight_on_beginnings(from_row_1):
    first, two = torch.tensor([[True, False, False, False]]), torch.tensor([[True, False, True, False]])
    assert look(HAND, kinds.beginning(first)) == pytest.approx((0.25 + 0.2 + 0.1) / 3)
    # with a document that begins at 2: row 2 is a beginning itself, and row 3 sees both
    assert look(HAND, kinds.beginning(two)) == pytest.approx((0.25 + (0.1 + 0.3)) / 2)


def test_weight_on_the_rarest_token_in_sight(from_row_1):
    x_BT, count_V = torch.tensor([[0, 1, 0, 2]]), torch.tensor([5, 2, 2])
    # tokens 1 and 2 are equally rare; a causal row does not know what comes
    assert look(HAND, kinds.rarest(x_BT, count_V, True)) == pytest.approx((0.75 + 0.3 + (0.2 + 0.4)) / 3)
    assert look(HAND, kinds.rarest(x_BT, count_V, False)) == pytest.approx((0.75 + 0.3 + 0.6) / 3)
    count_V[2] = 1
    assert look(HAND, kinds.rarest(x_BT, count_V, True)) == pytest.approx((0.75 + 0.3 + 0.4) / 3)
    assert look(HAND, kinds.rarest(x_BT, count_V, False)) == pytest.approx((0 + 0 + 0.4) / 3)


def test_weight_on_copies_and_on_what_followed_them(from_row_1):
    x_BT = torch.tensor([[7, 3, 7, 3]])  # rows 2 and 3 have copies at 0 and 1, which 1 and 2 follow
    assert look(HAND, kinds.copies(x_BT)) == pytest.approx((0.2 + 0.2) / 2)
    assert look(HAND, kinds.after_copies(x_BT)) == pytest.approx((0.3 + 0.3) / 2)
    assert math.isnan(look(HAND, kinds.copies(torch.arange(4)[None])))


def test_weight_on_governors_and_at_their_distances(from_row_1):
    governor_BT = torch.tensor([[-1, 0, 0, 1]])  # distances 1, 2, 2
    assert look(HAND, kinds.governor(governor_BT)) == pytest.approx((0.25 + 0.2 + 0.2) / 3)
    along_1, along_2 = (0.25 + 0.3 + 0.3) / 3, 0.2
    assert look(HAND, kinds.habit(governor_BT)) == pytest.approx((along_1 + 2 * along_2) / 3)
    assert math.isnan(look(HAND, kinds.governor(torch.full((1, 4), -1))))
    assert math.isnan(look(HAND, kinds.habit(torch.full((1, 4), -1))))


def test_a_mean_and_its_error():
    score_BN = torch.tensor([[0.1, 0.5], [0.3, math.nan], [0.8, math.nan]])
    mean_N, error_N = kinds.mean_and_error(score_BN)
    assert mean_N.tolist() == pytest.approx([0.4, 0.5])
    assert error_N[0].item() == pytest.approx(math.sqrt((0.09 + 0.01 + 0.16) / 2 / 3))
    assert error_N[1].isnan()


def test_deviations_are_finite():
    null_M = torch.tensor([0.1, 0.2, 0.3])
    assert kinds.deviations(torch.tensor([0.4, 0.0]), null_M).tolist() == pytest.approx([2, -2])
    equal_M = torch.full((3,), 0.25)
    assert kinds.deviations(torch.tensor([0.25, 0.75]), equal_M).tolist() == pytest.approx([0, 5e5])
    assert kinds.deviations(torch.tensor([0.75]), torch.tensor([0.25])).tolist() == pytest.approx([5e5])


# Kinds from scores

LOW = {"previous": 0.1, "diagonal": 0.1, "offset": 0.1, "begin": 0.1, "rare": 0.1, "entropy": 0.7}


def kind(at=3, relations=(), z=9.0, se=0.01, **scores) -> str:
    """`at`: the best offset. Entropy has -z."""
    values = LOW | {k.replace("_", " "): v for k, v in scores.items()}
    means = {k: Mean(v, se, -z if k == "entropy" else z) for k, v in values.items()}
    return kinds.kind_of(means, at, relations)


def test_a_kind_needs_its_threshold_its_z_and_a_small_error():
    assert kind(previous=0.43) == kind(previous=0.43, z=4) == kind(previous=0.43, se=0.015) == "previous token"
    assert kind(previous=0.41) == kind(previous=0.9, z=3.9) == kind(previous=0.9, se=0.26) == "other"
    assert kind(previous=0.9, se=math.nan) == "other"
    assert kind(entropy=0.9, z=-5) == "uniform"
    assert kind(entropy=0.5) == "scattered"
    assert kind(entropy=0.5, z=3.9) == kind(entropy=0.51) == "other"


def test_the_largest_margin_wins_and_named_offsets_are_preferred():
    assert kind(previous=0.5, begin=0.6) == "begin"
    assert kind(previous=0.6, begin=0.5, entropy=0.3) == "previous token"
    assert kind(at=1, previous=0.7, offset=0.7) == "previous token"
    assert kind(at=0, diagonal=0.7, offset=0.7) == "diagonal"
    assert kind(at=2, offset=0.7) == kind(at=-1, offset=0.7) == "offset"
    assert kind(at=1, offset=0.7) == kind(at=0, offset=0.7) == "other"
    assert kind(rare=0.7, duplicate=0.7) == "duplicate"


def test_a_relation_is_more_than_a_habit():
    scores = {"topic": 0.9, "topic_by_offset": 0.6}
    assert kind(relations=("topic",), **scores) == "topic"
    assert kind(relations=("topic",), **scores | {"topic_by_offset": 0.75}) == "other"
    assert kind(relations=("topic", "agreement"), **scores) == "topic"  # no example of agreement


def test_every_kind_has_a_rule_and_a_family():
    names = ("topic", "agreement")
    rules = kinds.rules(names)
    assert list(rules) == kinds.kinds(names) and len(set(rules)) == 12
    for name in set(rules) - {"uniform", "other"}:
        assert ("0.5" if name == "scattered" else "0.4") in rules[name] and "z of at" in rules[name], name
    families = {name: kinds.family(name) for name in rules}
    assert set(families.values()) == {"positional", "syntactic", "rare-word", "other"}
    assert {n for n, f in families.items() if f == "syntactic"} == set(names)
    assert kinds.FAMILY.keys() == rules.keys() - set(names)


# What is read


@pytest.mark.parametrize("T, V, longest", [(128, 500, 64), (96, 30, 30), (16, 30, 8)])
def test_repeated_sequences(T, V, longest):
    x_BT = heads.repeated(40, T, V, seed=3)
    periods = []
    for row in x_BT.tolist():
        period = next(p for p in range(1, T) if all(row[t] == row[t - p] for t in range(p, T)))
        assert len(set(row)) == period
        periods.append(period)
    every = range(longest // 2, longest + 1)
    assert set(periods) == set(every) if len(every) <= 40 else len(set(periods)) == 40
    assert x_BT.unique().numel() == V or V == 500
    assert torch.equal(x_BT, heads.repeated(40, T, V, seed=3)) and not torch.equal(x_BT, heads.repeated(40, T, V, 4))


def test_governors_are_those_of_the_predicted_tokens():
    tokens = torch.arange(40)
    tags, governors = torch.zeros(40, dtype=torch.uint8), torch.full((40,), -1)
    tags[15], governors[15] = 1, 12
    tags[25], governors[25] = 2, 12
    tags[29], governors[29] = 1, 3  # outside of the window
    split = Split(tokens, 40, 40, torch.tensor([0, 10, 20]), tags, governors=governors, names=("a", "b"))
    at_BT = torch.arange(11, 31)[None]  # the window shows tokens 10 to 29
    a_T, b_T = (heads._governors(split, at_BT, tag)[0] for tag in (1, 2))
    assert {t: int(g) for t, g in enumerate(a_T) if g >= 0} == {14 - 10: 12 - 10}
    assert {t: int(g) for t, g in enumerate(b_T) if g >= 0} == {24 - 10: 12 - 10}
    assert heads._begins(split, at_BT)[0].nonzero().flatten().tolist() == [0, 10]


def test_material_of_a_generated_text(relations):
    data = heads.material(make(*SMALL_TEXT, "seq_len=96"), relations, 5, 0)
    assert data.text_BT.shape == data.repeated_BT.shape == (5, 96)
    assert data.relations == ("topic", "agreement", "coreference", "collocation")
    assert (data.text_BT[:, 0] == data.text_BT[0, 0]).all()  # each begins with the mark of a document
    for look_BTS in (data.text_looks | data.repeated_looks).values():
        assert look_BTS.shape == (5, 96, 96) and (look_BTS[:, : kinds.FIRST] == 0).all()
        assert look_BTS.sum((1, 2)).min() >= 1 - 1e-5


# Planted heads


def targets(what: str, x: list[int], of: dict) -> list[list[int]]:
    """For each position of the text x those that a head looks at which does `what`. Written on its own, in loops."""
    rng, T = random.Random(str(x)), len(x)
    out = []
    for t in range(T):
        seen = range(t + 1)
        if what in ("previous token", "diagonal", "offset 3", "offset 2"):
            found = [t - {"previous token": 1, "diagonal": 0, "offset 3": 3, "offset 2": 2}[what]]
        elif what == "begin":
            found = [0]
        elif what == "own document":
            found = [max(s for s in seen if x[s] == of["mark"] or s == 0)]
        elif what == "scattered":
            found = [rng.randrange(t + 1)]
        elif what == "rare":
            least = min(of["count"][x[s]] for s in seen)
            found = [s for s in seen if of["count"][x[s]] == least]
        elif what == "duplicate":
            found = [s for s in range(t) if x[s] == x[t]] or [0]
        elif what == "induction":
            found = [s for s in range(1, t) if x[s - 1] == x[t]] or [0]
        else:  # uniform, or a relation, which is uniform where it has nothing to do
            found = [of["governor"][tuple(x)][t]] if of["governor"].get(tuple(x), {}).get(t, (0, ""))[1] == what else []
            found = [f[0] for f in found]
        out.append([s for s in found if s >= 0] or list(seen))
    return out


PLANTED = {
    w: w for w in ("previous token", "diagonal", "begin", "uniform", "scattered", "rare", "duplicate", "induction")
}
PLANTED |= {"own document": "begin", "offset 3": "offset", "offset 2": "offset"}
PLANTED |= {w: w for w in ("topic", "agreement", "coreference", "collocation")}


def knowledge(corpus: Corpus, T: int) -> dict:
    """What `targets` needs to know: where governors are, by window, token and position; how frequent words are."""
    split, governor = corpus.splits["val"], {}
    for at_WT, _ in windows(split, T, None, 64):
        for at in at_WT.tolist():
            x = tuple(split.tokens[i - 1].item() for i in at)
            governor[x] = {
                t: (int(split.governors[i]) - at[0] + 1, split.names[split.tags[i] - 1])
                for t, i in enumerate(at)
                if split.tags[i] and split.governors[i] >= at[0] - 1
            }
    count = torch.bincount(corpus.splits["train"].tokens.long(), minlength=corpus.tokenizer.vocab_size).tolist()
    return {"governor": governor, "count": count, "mark": int(split.tokens[0])}


@contextlib.contextmanager
def planted(model: GPT, what: list[str], of: dict, even: float = 0.0, first: int = 0):
    """Inside, head h of each layer has the pattern what[h]; a share `even` of its weight is spread over all keys.
    Rows before `first` are all on the diagonal."""
    read = []

    def replaced(_module, _inputs, pattern_BHTS):
        out = torch.zeros_like(pattern_BHTS)
        T = out.shape[2]
        for b, x in enumerate(read[-1]):
            for h, name in enumerate(what):
                for t, found in enumerate(targets(name, x, of)):
                    out[b, h, t, found] = 1 / len(found)
        out = (1 - even) * out + even * torch.ones(T, T).tril() / torch.arange(1, T + 1)[:, None]
        out[:, :, :first] = torch.eye(T)[:first]
        return out

    handles = [model.embed.register_forward_pre_hook(lambda _m, inputs: read.append(inputs[0].tolist()))]
    handles += [block.attn.pattern.register_forward_hook(replaced) for block in model.blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def with_heads(n: int, *words: str, layers: int = 1):
    return make(*SMALL_TEXT, f"n_layer={layers}", f"n_head={n}", "head_dim=2", "dim=16", "seq_len=96", *words)


@pytest.mark.parametrize("even", [0, 0.3])
def test_planted_heads_are_found(relations, even):
    c = with_heads(len(PLANTED))
    model = GPT(c, relations.tokenizer.vocab_size)
    with planted(model, list(PLANTED), knowledge(relations, 96), even):
        found = census(model, c, relations, sequences=16, untrained=4)
    assert [k.kind for k in found.heads.values()] == list(PLANTED.values())
    by_name = dict(zip(PLANTED, found.heads.values()))
    assert [by_name[n].offset for n in ("diagonal", "previous token", "offset 2", "offset 3")] == [0, 1, 2, 3]
    scores = {
        "previous token": "previous",
        "offset 3": "offset",
        "offset 2": "second",
    }
    for name in PLANTED.keys() - {"uniform", "scattered", "begin", "own document"}:
        score = by_name[name].scores[scores.get(name, name)]
        assert score.value == pytest.approx(1 - even, abs=0.1 if even else 1e-5) and score.z > 4, name


def test_a_previous_token_head_is_no_collocation(relations):
    """Although it finds every governor of a collocation."""
    c = with_heads(2)
    model = GPT(c, relations.tokenizer.vocab_size)
    with planted(model, ["previous token", "collocation"], knowledge(relations, 96), 0.2):
        previous, collocation = census(model, c, relations, sequences=8, untrained=2).heads.values()
    assert previous.kind == "previous token" and collocation.kind == "collocation"
    both = [k.scores["collocation"].value for k in (previous, collocation)]
    assert both[0] == pytest.approx(both[1], abs=1e-5)


def test_early_rows_do_not_count(relations):
    c = with_heads(4)
    model, what = GPT(c, relations.tokenizer.vocab_size), ["previous token", "begin", "topic", "induction"]
    of, seen = knowledge(relations, 96), []
    for first in (0, kinds.FIRST, kinds.FIRST + 1):
        with planted(model, what, of, first=first):
            seen.append(census(model, c, relations, sequences=4, untrained=2))
    assert seen[0].heads == seen[1].heads
    assert seen[2].heads[Head(0, 0)] != seen[0].heads[Head(0, 0)]


def test_a_model_that_sees_the_future(relations):
    c = with_heads(2, "causal=false", layers=2)
    model = GPT(c, relations.tokenizer.vocab_size)
    ahead = torch.roll(torch.eye(96), 1, 1)
    handle = model.blocks[0].attn.pattern.register_forward_hook(lambda _m, _i, p_BHTS: ahead.expand_as(p_BHTS))
    found = census(model, c, relations, sequences=4, untrained=3)
    handle.remove()
    assert found.heads[Head(0, 0)].kind == "offset" and found.heads[Head(0, 0)].offset == -1
    assert found.heads[Head(1, 0)].kind == "uniform"
    assert max(found.false_positives.values()) == 0


# Laws of the census


def test_scores_do_not_depend_on_batches(relations, monkeypatch):
    c = with_heads(2, layers=2)
    model = GPT(c, relations.tokenizer.vocab_size)
    seen = []
    for at_once in (1, 3, 8):
        monkeypatch.setattr(heads, "AT_ONCE", at_once)
        seen.append(census(model, c, relations, sequences=7, untrained=2))
    for head, kind in seen[0].heads.items():
        for name, score in kind.scores.items():
            others = [s.heads[head].scores[name] for s in seen[1:]]
            assert [o.value for o in others] == pytest.approx([score.value] * 2, abs=1e-6), name
            assert [o.se for o in others] == pytest.approx([score.se] * 2, abs=1e-6), name


def test_a_census_repeats_itself_and_leaves_no_trace(relations):
    c = with_heads(2)
    model = GPT(c, relations.tokenizer.vocab_size).train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    first, second = (census(model, c, relations, sequences=4, untrained=2, seed=5) for _ in range(2))
    assert first == second and first != census(model, c, relations, sequences=4, untrained=2, seed=6)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    text = json.dumps([asdict(k) for k in first.heads.values()], allow_nan=False)
    assert len(json.loads(text)) == 2 and first.counts() == {"uniform": 2}
    assert (first.untrained_models, first.untrained_heads, first.sequences) == (2, 4, 4)


def test_z_compares_on_the_same_sequences(relations):
    """One of two nulls is 1 / sqrt(2) of their deviation from their mean, however many sequences it reads beyond
    theirs, and less where both have nearly the same score."""
    c = replace(with_heads(1), init_seed=stream_seed(0, "untrained", 0))
    found = census(GPT(c, relations.tokenizer.vocab_size), c, relations, sequences=32, untrained=2)
    assert found.sequences * 96 > heads.NULL_TOKENS
    scores = found.heads[Head(0, 0)].scores
    assert all(abs(score.z) <= 0.7072 for score in scores.values())
    assert abs(scores["previous"].z) == pytest.approx(0.5**0.5)


SHAPES = [
    "n_head=1",
    "score_scale=none",
    "causal=false",
    "pos=none",
    "pos=learned",
    "qkv_bias=true dim=16",
    "seq_len=12",
]


@pytest.mark.parametrize("words", SHAPES)
def test_untrained_heads_are_nothing_else(relations, words):
    none_stands_out(make(*SMALL_TEXT, *words.split()), relations)


def test_untrained_heads_are_nothing_in_any_model(model_config, relations):
    none_stands_out(replace(model_config, vocab_size=None), relations)


@pytest.mark.parametrize("words", ["", "score_scale=none", "seq_len=64"])
def test_untrained_post_ln_heads_are_nothing(relations, words):
    """They have large scores at the beginning, and patterns that are far from even."""
    none_stands_out(make("model=post_ln", *SMALL_TEXT, *words.split()), relations)


def none_stands_out(c, corpus) -> None:
    model = GPT(replace(c, init_seed=99), corpus.tokenizer.vocab_size)
    found = census(model, c, corpus, sequences=12, untrained=20)
    assert found.untrained_heads == 20 * len(heads_of(model)) == 20 * len(found.heads)
    assert set(found.false_positives) == set(found.rules) - {"uniform", "other"}
    assert max(found.false_positives.values()) < 0.05, found.false_positives
    assert set(found.counts()) <= {"uniform", "other"}
    assert "% of the untrained heads are" in found.rules["uniform"]


def test_a_pruned_model(relations):
    c = replace(with_heads(4, layers=2), kept_heads=[[], [1, 3]])
    found = census(GPT(c, relations.tokenizer.vocab_size), c, relations, sequences=4, untrained=2)
    assert list(found.heads) == [Head(1, 1), Head(1, 3)] and found.untrained_heads == 4
    c = replace(c, kept_heads=[[], []])
    assert census(GPT(c, relations.tokenizer.vocab_size), c, relations, sequences=4, untrained=2).heads == {}


def test_a_plain_text_has_no_relations():
    c = make("data=pydoc", "seq_len=32", "n_layer=1")
    corpus = load_corpus(c.data)
    found = census(GPT(c, corpus.tokenizer.vocab_size), c, corpus, sequences=4, untrained=2)
    assert set(found.rules) == {*kinds.PLACES, "uniform", "scattered", "other"}


def test_what_cannot_be_counted(relations):
    c = with_heads(2)
    model = GPT(c, relations.tokenizer.vocab_size)
    with pytest.raises(UserError, match="first 8 positions"):
        census(model, replace(c, seq_len=8), relations)
    with pytest.raises(UserError, match="untrained=0"):
        census(model, c, relations, untrained=0)
    with torch.no_grad():
        model.embed.weight.fill_(math.nan)
    with pytest.raises(UserError, match="not finite"):
        census(model, c, relations, sequences=2, untrained=2)


# A head that was trained


def test_an_induction_circuit_is_found():
    """Trained on texts that repeat themselves: a previous token head, then an induction head (Olsson et al. 2022)."""
    V, T, generator = 16, 32, torch.Generator().manual_seed(0)

    def texts(B: int):
        periods = torch.randint(4, V + 1, (B,), generator=generator).tolist()
        return torch.stack([torch.randperm(V, generator=generator)[:p][torch.arange(T + 1) % p] for p in periods])

    c = make("n_layer=2", "n_head=4", "dim=32", f"seq_len={T}", "optim=muon")
    model = GPT(c, V)
    optimizers = optim.make_optimizers(model, c, "fp32")
    for _ in range(300):
        x_BT = texts(32)
        F.cross_entropy(model(x_BT[:, :-1]).flatten(0, 1), x_BT[:, 1:].flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    splits = {name: Split(texts(32).flatten(), 0, 0, starts=torch.arange(32) * (T + 1)) for name in ("train", "val")}
    corpus = Corpus("repeats", "", WordTokenizer([f"w{i}" for i in range(V)]), splits)
    found = census(model, c, corpus, untrained=5)
    kinds_by_layer = [{k.kind for h, k in found.heads.items() if h.layer == layer} for layer in (0, 1)]
    assert "previous token" in kinds_by_layer[0] and "induction" in kinds_by_layer[1]
    assert "induction" not in kinds_by_layer[0]


# Over seeds


def counted(**kinds_of) -> Census:
    heads_, i = {}, 0
    for name, n in kinds_of.items():
        for _ in range(n):
            heads_[Head(0, i)] = Kind(name, {"previous": Mean(0.5, 0.1, 3.0)}, 1)
            i += 1
    return Census(heads_, {}, {}, 1, 1, 1)


def test_counts_over_seeds():
    found = census_counts("n_head=4", [counted(uniform=4), counted(uniform=2, begin=2), counted(begin=1, rare=3)])
    assert (found.label, found.seeds, list(found.kinds)) == ("n_head=4", 3, ["uniform", "begin", "rare"])
    assert astuple_of(found, "uniform") == (2, 0, 4, 2 / 3)
    assert astuple_of(found, "begin") == (1, 0, 2, 2 / 3)
    assert astuple_of(found, "rare") == (1, 0, 3, 1 / 3)
    assert found.stability == pytest.approx((0.5 + 0 + 0.25) / 3)  # of the three pairs


def astuple_of(found, kind) -> tuple:
    return tuple(asdict(found.kinds[kind]).values())


def test_stability():
    assert census_counts("", [counted(begin=3, rare=1)] * 3).stability == 1
    assert census_counts("", [counted(begin=3, rare=1), counted(begin=6, rare=2)]).stability == 1  # shares, not heads
    assert census_counts("", [counted(begin=3)]).stability is None
    assert census_counts("", [counted(), counted()]).stability == 1
    assert census_counts("", [counted(), counted(rare=1)]).stability == 0
    with pytest.raises(ValueError, match="no census"):
        census_counts("n_head=2", [])
