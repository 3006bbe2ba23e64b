"""Batches of pairs, and what an encoder-decoder is scored on. B batch, D documents, S source and T target positions."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from conftest import built, make

from toymha import lab
from toymha.batches import UNCOUNTED, Batch, check_pairs, draw, pairs_alike, random_pairs
from toymha.cli import main
from toymha.data.corpus import Split, load_corpus
from toymha.data.pairs import pairs_of, sizes_of_pairs
from toymha.evaluate import attention_statistics, attentions, evaluate, looked_at, predicted, unigram_loss
from toymha.runs import find
from toymha.schema import UserError
from toymha.seeds import stream

CPU = torch.device("cpu")
BEGIN, TO = 0, 1


def split_of(pairs):
    """A split of (source, target) lists, by hand."""
    tokens, starts, separators, tags = [], [], [], []
    for source, target in pairs:
        starts.append(len(tokens))
        tokens += [BEGIN, *source, TO]
        separators.append(len(tokens) - 1)
        tokens += target
        tags += [0] * (len(source) + 2) + [1] * len(target)
    return Split(
        torch.tensor(tokens, dtype=torch.uint8),
        chars=len(tokens) - 1,
        bytes=len(tokens) - 1,
        starts=torch.tensor(starts),
        tags=torch.tensor(tags, dtype=torch.uint8),
        names=("answer",),
        classes=torch.arange(32),
        separators=torch.tensor(separators),
        targets=(7, 9),
    )


PAIRS = [([5, 6], [15, 16]), ([7], [17]), ([8, 9, 10, 5], [18, 19]), ([6], [16, 16, 15, 15, 15]), ([9, 9], [19, 19])]


@pytest.fixture(scope="module")
def reverse():
    return load_corpus(make("model=encdec", "data.tokens=3000", "data.length=5").data)


@pytest.fixture
def model():
    return built(make("model=encdec", "n_layer=1", "n_encoder_layer=1"))


def test_sizes_are_those_of_sources_and_targets():
    """With the mark before a source, and the one behind a target, which the last has not."""
    source_D, target_D = sizes_of_pairs(split_of(PAIRS))
    assert source_D.tolist() == [3, 2, 5, 2, 3] and target_D.tolist() == [3, 2, 3, 6, 2]


def test_each_pair_is_as_likely_as_any_other():
    """And the pairs of a batch are about equally long."""
    split = split_of([([4] * (1 + i % 3), [4]) for i in range(60)])
    seen = Counter()
    for i in range(300):
        batch = random_pairs(split, 8, stream(0, "test", i))
        assert len({int((row >= 0).sum()) for row in batch.inputs[0]}) == 1
    numbered = split_of([([4 + i], [4] * (1 + (i >= 4) + (i >= 12))) for i in range(24)])  # classes of 4, 8 and 12
    for i in range(2000):
        seen.update(random_pairs(numbered, 12, stream(1, "test", i)).inputs[0][:, 1].tolist())
    expected = 2000 * 12 / 24
    # Batches share a length, so counts vary more than those of single draws: by some 5 % of 1,000.
    assert len(seen) == 24 and all(abs(n / expected - 1) < 0.2 for n in seen.values())


def test_classes_of_length_hold_each_document_once():
    """Also the few that are longest, and no class is small."""
    split = split_of([([4] * (1 + i % 4), [4]) for i in range(1000)] + [([4] * 20, [4])])
    docs = torch.cat(split.alike)
    assert sorted(docs.tolist()) == list(range(1001))
    assert min(map(len, split.alike)) * 64 >= 1001 and len(split.alike) == 4


def test_a_batch_is_the_pair_shifted_by_one():
    """The decoder reads the separator and the target, and predicts the target and the mark that ends it."""
    split = split_of([([5, 6], [15, 16]), ([7, 7], [17, 18])])
    batch = random_pairs(split, 64, stream(0, "test"))
    for source, x, y in zip(*batch.inputs, batch.y_BT, strict=True):
        at = [5, 7].index(int(source[1]))  # the last place of the second pair counts for nothing
        assert source.tolist() == [[BEGIN, 5, 6], [BEGIN, 7, 7]][at]
        assert x.tolist()[: 3 - at] == [[TO, 15, 16], [TO, 17]][at]
        assert y.tolist() == [[15, 16, BEGIN], [17, 18, UNCOUNTED]][at]  # nothing follows the last document
    assert batch.tokens == int((batch.y_BT != UNCOUNTED).sum())


@pytest.mark.parametrize("n", [2, 4])
def test_micro_batches_have_the_gradient_of_the_batch(model, n):
    """Though they differ in how many tokens count."""
    split = split_of(PAIRS[:4])
    batch = random_pairs(split, 8, stream(3, "test"))
    ragged = batch.y_BT.clone()
    ragged[:3, -1] = UNCOUNTED
    batch = Batch(batch.inputs, ragged, int((ragged != UNCOUNTED).sum()))
    grads = []
    for parts in (1, n):
        model.zero_grad()
        shares = 0.0
        for inputs, y_BT, share, _ in batch.parts(parts, CPU):
            shares += share
            (F.cross_entropy(model(*inputs).flatten(0, 1), y_BT.flatten()) * share).backward()
        assert shares == pytest.approx(1)
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*grads, atol=1e-6, rtol=1e-5)


def test_a_decoder_alone_reads_windows(reverse):
    """Source and target are one text to it."""
    batch = draw(built(make("data=reverse")), reverse.splits["train"], 16, 4, stream(0, "test"))
    assert len(batch.inputs) == 1 and batch.tokens == 64 and torch.equal(batch.inputs[0][:, 1:], batch.y_BT[:, :-1])


# Scores


def by_hand(model, split):
    """Summed nats and number of predictions, a pair at a time."""
    nats, n, last = 0.0, 0, len(split.starts) - 1
    for d, (source, target) in enumerate(pairs_of(split)):
        y = [*target, int(split.tokens[0])] if d < last else target
        logits = model(torch.tensor([source]), torch.tensor([[int(split.tokens[split.separators[d]]), *target]]))[0]
        nats += F.cross_entropy(logits[: len(y)].double(), torch.tensor(y), reduction="sum").item()
        n += len(y)
    return nats, n


@torch.no_grad()
def test_the_loss_is_that_of_each_pair_alone(model):
    """Over all targets with the mark behind them, whatever is evaluated at once; nothing of a source is predicted."""
    split = split_of(PAIRS)
    nats, n = by_hand(model, split)
    for batch_tokens in (1, 32, 4096):
        score = evaluate(model, split, 16, batch_tokens=batch_tokens)
        assert score.tokens == n == 16 and score.loss == pytest.approx(nats / n, abs=1e-6)
        assert (score.chars, score.bytes) == (7, 9)
    assert score.parts["answer"].tokens == 12 and score.parts["answer"].floor is None


def test_a_part_of_the_split_is_spread_over_it(model, reverse):
    """As many tokens as asked for, by at most a pair more."""
    split = reverse.splits["val"]
    score = evaluate(model, split, 16, max_tokens=30)
    assert 30 <= score.tokens <= 36 and score.floor == 0  # the answers of a task are certain


@torch.no_grad()
def test_constant_logits_have_the_perplexity_of_their_number(model):
    """Law 6 for targets: V = 32 equally likely tokens."""
    model.embed.weight.zero_()
    assert evaluate(model, split_of(PAIRS), 16).loss == pytest.approx(math.log(32), abs=1e-6)


def test_frequencies_are_those_of_targets(model):
    """By hand: two targets, one mark between them; sources count nothing."""
    split = split_of([([5], [4, 4]), ([6, 6], [3])])
    assert predicted(model, split).tolist() == [4, 4, BEGIN, 3]
    expected = -(2 * math.log(3 / 36) + 2 * math.log(2 / 36)) / 4  # 32 tokens, plus one each
    assert unigram_loss(model, split, split, 32) == pytest.approx(expected)


def test_looking_inside_sees_no_padding(model):
    """Pairs of one size, and statistics of every attention by name."""
    split = split_of(PAIRS)
    assert pairs_alike(split).tolist() == [1]  # of equally common sizes the smallest
    source_BS, idx_BT = looked_at(model, split, 16)
    assert (source_BS >= 0).all() and idx_BT.shape == (1, 2)
    found = attention_statistics(model, source_BS, idx_BT)
    assert set(attentions(model)) == {"encoder0", "layer0", "cross0"}
    assert {k.partition("/")[2] for k in found} == {"encoder0", "layer0", "cross0"} and len(found) == 12
    assert found["entropy/cross0"] <= math.log(2) + 1e-6


@pytest.mark.parametrize("which", ["source", "target"])
def test_what_is_longer_than_the_model_is_refused(which):
    """With the length that would do."""
    long = ([4] * 9, [4]) if which == "source" else ([4], [4] * 9)
    splits = {"train": split_of([long, ([4], [4])])}
    check_pairs(splits, 10)
    with pytest.raises(UserError, match=rf"^seq_len=9: the longest {which} of the train split has 10 tokens; use "):
        check_pairs(splits, 9)


@pytest.mark.parametrize(
    "words, said",
    [
        ("cross_attention=false", "cross_attention=false is for a model with an encoder: model=encdec"),
        ("n_encoder_layer=1", "an encoder (n_encoder_layer=1) reads pairs of source and target: data=pinyin, dates"),
        ("model=encdec causal=false", "causal=false: with n_encoder_layer=2 the decoder would see the target"),
        ("model=encdec budget.heads=true", "budget.heads=true cannot be had with n_encoder_layer=2"),
        ("model=encdec budget.watch=1", "budget.watch=1 cannot be had"),
        ("model=encdec budget.decode_tokens=64", "budget.decode_tokens=64 cannot be had"),
        ("model=encdec budget.tokens=1000", "budget.tokens=1000 cannot be had"),
        ("model=encdec kept_heads=[[0],[1]]", "kept_heads is for models without an encoder"),
    ],
)
def test_what_an_encoder_cannot_have_is_refused(words, said):
    """In one line, when it is configured."""
    with pytest.raises(UserError, match=re.escape(said)):
        make(*words.split())


def test_a_split_without_pairs_is_refused():
    """By whoever asks for pairs."""
    with pytest.raises(ValueError, match="no pairs"):
        random_pairs(dataclasses.replace(split_of(PAIRS), separators=None), 2, stream(0, "test"))


# The command line, from one end to the other


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a file of 60 pairs and a run of a small encoder-decoder on it, of two steps."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("pairs")
        patch.chdir(folder)
        lines = [f"{a}{b}\t{b}{a}" for a in "abcdefgh" for b in "ijklmnop"][:60]
        (folder / "my.tsv").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
        words = "n_layer=1 n_encoder_layer=1 dim=32 batch_size=8 threads=1 device=cpu".split()
        words += "budget.steps=2 budget.eval_every=1 budget.eval_pairs=3 budget.beam=2 name=tiny".split()
        data = ["data=pairs", "data.path=my.tsv", "data.split=[0.5,0.25,0.25]"]
        assert main(["train", "model=encdec", *data, *words]) == 0
        yield next(find(folder / "outputs"))


def test_a_few_short_pairs_are_enough(trained):
    """60 pairs of two characters: no split holds a window of the context, and none is needed."""
    s = trained.summary
    assert s["status"] == "done" and s["tokens_trained"] > 0
    assert set(s["pairs"]) == {"val", "test"}
    for way in s["pairs"].values():
        assert set(way) == {"greedy", "beam", "frequent"} and way["greedy"]["pairs"] == 15
    assert [r["step"] for r in trained.rows() if "pairs/exact" in r] == [0, 1, 2]
    assert any("final/exact_beam" in r for r in trained.rows())


def test_eval_tells_the_numbers_of_the_run(trained, capsys, monkeypatch):
    """The same loss and the same share of right targets; another file of pairs in the run's own tokens."""
    monkeypatch.chdir(trained.path.parents[2])
    assert main(["eval", f"run={trained.path}", "device=cpu", "threads=1"]) == 0
    out = capsys.readouterr().out
    greedy = trained.summary["pairs"]["val"]["greedy"]
    assert f"loss {trained.summary['val']['loss']:.4f}" in out
    assert f"{greedy['exact']:8.2%} {greedy['ser']:14.2%}" in out and "beam search" in out
    other = trained.path.parents[2] / "other.tsv"
    other.write_text("ab\tba\nac\tca\nad\tda\nae\tea\n", encoding="utf-8")
    assert main(["eval", f"run={trained.path}", "data=pairs", f"path={other}", "split=train", "device=cpu"]) == 2
    assert "leaves none for val; such shares need 11 or more" in capsys.readouterr().err
    assert main(["eval", f"run={trained.path}", "data=pairs", "device=cpu"]) == 2
    assert "data=pairs needs path=" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["", "optim=adamw"])
def test_an_interrupted_run_of_pairs_ends_like_one_that_never_was(tmp_path, monkeypatch, words):
    """Law 8: the same weights and rows, bit for bit, and the tokens that were trained on."""
    monkeypatch.chdir(tmp_path)
    common = "model=encdec n_layer=1 n_encoder_layer=1 dim=32 data.length=5 data.tokens=20000 batch_size=8 threads=1"
    common += f" device=cpu resid_dropout=0.1 budget.eval_every=2 budget.eval_pairs=4 budget.beam=1 {words}"
    whole = [*common.split(), "budget.steps=4", "name=whole"]
    assert main(["train", *whole]) == 0
    with pytest.MonkeyPatch.context() as patch:
        real = lab.Lab.log_row

        def stop_after(self, *args):
            real(self, *args)
            if self.state["step"] == 3:
                raise KeyboardInterrupt

        patch.setattr(lab.Lab, "log_row", stop_after)
        parts = [*common.split(), "budget.steps=4", "name=parts", "budget.log_every=1"]
        assert main(["train", *parts]) == 130
    assert main(["train", *parts]) == 0
    a, b = (next(find(f"outputs/{name}")) for name in ("whole", "parts"))
    for name, weight in a.load_weights("model").items():
        assert torch.equal(weight, b.load_weights("model")[name]), name
    assert a.summary["tokens_trained"] == b.summary["tokens_trained"]
    assert a.summary["pairs"] == b.summary["pairs"] and a.summary["val"] == b.summary["val"]
