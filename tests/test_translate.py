"""Targets from sources: greedy and beam search against exhaustive search, full passes and tables worked by hand; what
counts as right; and `toymha generate` on pairs.

N sources, R rows, T target positions, V vocabulary.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import make

from toymha.data.corpus import Split
from toymha.data.units import PairTokenizer
from toymha.device import arithmetic
from toymha.generation import beam, translate
from toymha.generation.beam import Hypothesis, likeliest, room, search, write_targets
from toymha.generation.translate import Match, generate_pairs, match
from toymha.model.attention import Attention
from toymha.model.seq2seq import make_model
from toymha.options import GenerateOptions
from toymha.schema import UserError, build

KINDS = ["n_encoder_layer=2", "n_kv_head=2", "pos=learned", "n_encoder_layer=1 n_kv_head=1 norm_position=post"]
END, TO = 0, 1  # ids of the marks
CPU = torch.device("cpu")


def model_of(words, vocab=6):
    """With weights so large that the logits differ by several nats: no search is a matter of luck. A head of its own,
    since with the embedding as the head a model says again what it has read."""
    model = make_model(make("data=reverse", "tie_embeddings=false", *words.split()), vocab).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=1.0 if name == "embed.weight" else 0.2)
    return model


def sources_of(lengths, vocab=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [[END, *torch.randint(2, vocab, (n - 1,), generator=generator).tolist()] for n in lengths]


@torch.inference_mode()
def full_pass(model, source, target):
    """logits_TV of each target token and of what follows, without a cache."""
    source_1S, x_1T = torch.tensor([source]), torch.tensor([[TO, *target]])
    if hasattr(model, "encoder"):
        return model(source_1S, x_1T)[0]
    return model(torch.cat((source_1S, x_1T), dim=1))[0, len(source) :]


def logits_of(model, source, target):
    return full_pass(model, source, target)[-1]


def logp_of(model, source, target):
    """Log-probability of each of these target tokens."""
    return full_pass(model, source, target[:-1]).double().log_softmax(-1)[range(len(target)), target]


def found(model, sources, **how):
    return write_targets(model, sources, separator=TO, end=END, vocab_size=6, **how)


# Against exhaustive search, and full passes


@pytest.mark.parametrize("words", KINDS)
def test_a_beam_as_wide_as_the_space_is_exhaustive_search(words):
    """V = 4, so 3 tokens that do not end: 1 + 3 + 9 + 27 targets of up to three tokens, all in order. With the end they
    are up to four symbols long, so no more than 4^4 of anything is ever to be looked at."""
    model = model_of(words, vocab=4)
    sources = sources_of((3, 1, 6, 3), vocab=4)
    how = dict(separator=TO, end=END, vocab_size=4, length=3)
    results = write_targets(model, sources, **how, width=4**4)
    for source, hypotheses in zip(sources, results, strict=True):
        targets = [list(t) for n in range(4) for t in itertools.product((1, 2, 3), repeat=n)]
        scored = sorted(((logp_of(model, source, [*t, END]).sum().item(), t) for t in targets), reverse=True)
        assert [h.tokens for h in hypotheses] == [t for _, t in scored]
        assert [h.logp for h in hypotheses] == pytest.approx([logp for logp, _ in scored], abs=1e-5)
        assert all(h.finished for h in hypotheses)
    for width in (1, 2, 5):
        for narrow, wide in zip(write_targets(model, sources, **how, width=width), results, strict=True):
            assert not narrow[0].finished or narrow[0].logp <= wide[0].logp + 1e-5  # rows are computed in other company


@pytest.mark.parametrize("path", ["fused", "explicit"])
@pytest.mark.parametrize("words", KINDS)
def test_greedy_takes_the_most_likely_token_each_time(words, path, monkeypatch):
    """As an argmax over full passes of each source alone finds it; sources of several lengths together."""
    if path == "explicit":
        monkeypatch.setattr(Attention, "can_fuse", lambda self, T, S: False)
    model, sources = model_of(words), sources_of((3, 9, 1, 5, 5, 2, 8, 4))
    ended = set()
    for source, [h] in zip(sources, found(model, sources, length=6), strict=True):
        target = []
        while len(target) < 7 and END not in target:
            target.append(int(logits_of(model, source, target).argmax()))
        assert h.finished == (END in target)
        assert h.tokens == (target[:-1] if h.finished else target[:6])
        told = [*h.tokens, *([END] if h.finished else [])]
        assert h.logp == pytest.approx(logp_of(model, source, told).sum().item(), abs=1e-5)
        ended.add(h.finished)
    assert ended == {True, False} or words != KINDS[0]


@pytest.mark.parametrize("words", KINDS)
def test_log_probabilities_are_those_of_a_full_pass(words):
    """Whatever rows the beams came from: order, distinct, and the sum of all tokens and the end."""
    model, sources = model_of(words), sources_of((3, 9, 1, 5))
    for source, hypotheses in zip(sources, found(model, sources, length=5, width=3), strict=True):
        assert len(hypotheses) == len({(tuple(h.tokens), h.finished) for h in hypotheses}) == 3
        finished = [h.logp for h in hypotheses if h.finished]
        assert finished == sorted(finished, reverse=True)
        assert [h.finished for h in hypotheses] == sorted((h.finished for h in hypotheses), reverse=True)
        for h in hypotheses:
            target = [*h.tokens, *([END] if h.finished else [])]
            assert h.logp == pytest.approx(logp_of(model, source, target).sum().item(), abs=1e-5)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("words", KINDS)
def test_a_source_is_not_changed_by_its_company(words, width):
    """Alone or among others, near the end of the context too, with a length and without; in the order asked."""
    model, sources = model_of(words), sources_of((16, 3, 15, 9, 1, 14, 9, 16, 12))
    for length in (None, 4):
        together = found(model, sources, length=length, width=width)
        for source, hypotheses in zip(sources, together, strict=True):
            [alone] = found(model, [source], length=length, width=width)
            assert [h.tokens for h in alone] == [h.tokens for h in hypotheses]
            assert [h.logp for h in alone] == pytest.approx([h.logp for h in hypotheses], abs=1e-5)


def test_small_batches_give_the_same(monkeypatch):
    model, sources = model_of(KINDS[0]), sources_of((3, 9, 1, 5, 5, 2, 8, 4))
    whole = found(model, sources, length=6)
    monkeypatch.setattr(beam, "ROWS", 3)
    assert [h.tokens for [h] in found(model, sources, length=6)] == [h.tokens for [h] in whole]


def test_the_context_limits_a_target():
    """A decoder of 16 positions reads source, separator and target; of an encoder-decoder each side has its own."""
    gpt, pair = model_of("pos=rope"), model_of(KINDS[0])
    assert [room(gpt, n) for n in (1, 15, 16)] == [14, 0, -1]
    assert [room(pair, n) for n in (1, 16, 17)] == [15, 15, -1]
    for model in (gpt, pair):
        with torch.no_grad():
            model.embed.weight[END] *= 0  # it hardly ends
        lengths = (1, 9, 15, 16, 17)
        for n, [h] in zip(lengths, found(model, sources_of(lengths)), strict=True):
            assert h.finished or len(h.tokens) == max(0, room(model, n))
            assert room(model, n) >= 0 or h == Hypothesis([], 0.0, False)
    assert found(gpt, []) == []


def test_mode_and_precision():
    """Dropout is off and the mode comes back; bf16 works, and one call is like the other."""
    model = make_model(make("data=reverse", "n_encoder_layer=1", "resid_dropout=0.5", "attn_dropout=0.5"), 6).train()
    sources = sources_of((3, 9, 5))
    assert found(model, sources, length=5, width=2) == found(model, sources, length=5, width=2)
    assert model.training
    with arithmetic("bf16", CPU):
        assert all(h.logp < 0 for [h] in found(model, sources, length=5))


def test_a_model_that_sees_the_future_is_refused():
    model = make_model(make("data=reverse", "causal=false"), 6)
    with pytest.raises(UserError, match="causal=false"):
        found(model, sources_of((3,)))


# Worked by hand


class Table:
    """A reader whose next token depends on what has been written alone: prefix -> probabilities of END, a, b."""

    def __init__(self, table, n=1):
        self.table, self.rows, self.calls = table, [""] * n, 0

    def first(self):
        self.calls += 1
        return torch.tensor([self.table[row] for row in self.rows]).log()

    def next(self, token_R, row_R):
        self.rows = [self.rows[r] + "-ab"[t] for r, t in zip(row_R.tolist(), token_R.tolist(), strict=True)]
        return self.first()


# Greedy writes a (0.5), then ends: 0.5 x 0.4 = 0.20. The best is b, end: 0.4 x 0.9 = 0.36.
LURE = {"": [0.1, 0.5, 0.4], "a": [0.4, 0.3, 0.3], "b": [0.9, 0.05, 0.05]}


def told(hypotheses):
    return [("".join("-ab"[t] for t in h.tokens), round(math.exp(h.logp), 6), h.finished) for h in hypotheses]


def test_a_beam_finds_what_greed_misses():
    reader = Table(LURE)
    [hypotheses] = search(reader, 1, 0, 3, 5, 1, 1)
    assert told(hypotheses) == [("a", 0.2, True)]
    [hypotheses] = search(Table(LURE), 1, 0, 3, 1, 2, 2)
    assert told(hypotheses) == [("b", 0.36, True), ("a", 0.2, True)]


def test_a_search_ends_when_nothing_can_overtake():
    """After b is finished with 0.36 the best open one has 0.5 x 0.3: no third call, if one hypothesis is wanted; for
    the second best (0.2 > 0.15) neither. The third (0.1 at most) has to be looked for."""
    for best, calls in ((1, 2), (2, 2)):
        reader = Table(LURE)
        search(reader, 1, 0, 3, 5, 2, best)
        assert reader.calls == calls
    long = LURE | {"aa": [1.0, 0, 0], "ab": [1.0, 0, 0]}
    reader = Table(long)
    [hypotheses] = search(reader, 1, 0, 3, 5, 2, 3)
    assert told(hypotheses) == [("b", 0.36, True), ("a", 0.2, True), ("aa", 0.15, True)]
    assert reader.calls == 3


def test_a_wider_beam_may_do_worse():
    """So `best beam >= greedy` is no law. Greedy: a a end = 0.5 x 0.4 x 1 = 0.2. At width 2 both continuations of b,
    0.45 x 0.5 each, push a a (0.2) out, and end badly: 0.225 x 0.4 = 0.09, of two equals the first."""
    ends_badly = [0.4, 0.3, 0.3]
    table = {"": [0.05, 0.5, 0.45], "a": [0.3, 0.4, 0.3], "b": [0.0, 0.5, 0.5]}
    table |= {"aa": [1.0, 0.0, 0.0], "ba": ends_badly, "bb": ends_badly}
    assert told(search(Table(table), 1, 0, 3, 2, 1, 1)[0]) == [("aa", 0.2, True)]
    assert told(search(Table(table), 1, 0, 3, 2, 2, 1)[0]) == [("ba", 0.09, True)]


def test_what_does_not_end_stands_last():
    """Two tokens at most, and END is never likely enough."""
    table = {key: [0.1, 0.6, 0.3] for key in ("", "a", "b", "aa", "ab", "ba", "bb")}
    [hypotheses] = search(Table(table), 1, 0, 3, 2, 2, 2)
    assert told(hypotheses) == [("aa", 0.36, False), ("ab", 0.18, False)]


def test_of_equally_likely_tokens_the_first():
    even = {key: [1 / 3] * 3 for key in ("", "a", "b", "aa", "ab", "ba", "bb")}
    [hypotheses] = search(Table({"": [0.2, 0.4, 0.4], "a": [0.2, 0.4, 0.4], "aa": [0.2, 0.4, 0.4]}), 1, 0, 3, 2, 1, 1)
    assert told(hypotheses) == [("aa", 0.16, False)]
    assert told(search(Table(even), 1, 0, 3, 2, 1, 1)[0]) == [("", 0.333333, True)]
    for V in (7, 5000):
        for k in (1, 2, 5):
            logp_RK, token_RK = likeliest(torch.zeros(3, V), k)
            assert token_RK.tolist() == [list(range(k))] * 3
            assert logp_RK.exp().allclose(torch.tensor(1 / V, dtype=torch.float64))
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]])
    assert likeliest(logits, 3)[1].tolist() == [[1, 2, 3]]


def test_finished_sources_are_read_no_further():
    """Rows of the second call are those of the two sources that go on."""
    reader = Table(LURE, n=3)
    reader.rows = ["", "b", ""]
    search(reader, 3, 0, 3, 1, 1, 1)
    assert reader.rows == ["a", "a"]


# What counts as right


def split_of(pairs):
    """<doc> source <to> target, one behind the other."""
    tokens, starts, separators = [], [], []
    for source, target in pairs:
        starts.append(len(tokens))
        separators.append(len(tokens) + 1 + len(source))
        tokens += [END, *source, TO, *target]
    at = {"starts": torch.tensor(starts), "separators": torch.tensor(separators)}
    return Split(torch.tensor(tokens, dtype=torch.uint8), 0, 0, **at)


def matched(monkeypatch, pairs, written, **how):
    """match() of a model that writes what the table says: source -> (target, finished)."""
    asked = []

    def write(_model, sources, *, separator, end, length, best, **_):
        assert (separator, end, best) == (TO, END, 1)
        assert length == max(len(target) for _, target in pairs) + 4
        asked.extend(sources)
        return [[Hypothesis(written[tuple(s[1:])][0], -1.0, written[tuple(s[1:])][1])] for s in sources]

    monkeypatch.setattr(translate, "write_targets", write)
    return match(None, split_of(pairs), 10, **how), asked


def test_exact_match_and_symbol_error_rate(monkeypatch):
    """Right; one replaced of two; one too many of three; the right one that does not end: 2 edits of 9 symbols."""
    pairs = [([2], [5, 6]), ([3], [5, 6]), ([4], [5, 6, 7]), ([5], [5, 6])]
    written = {(2,): ([5, 6], True), (3,): ([5, 7], True), (4,): ([5, 8, 6, 7], True), (5,): ([5, 6], False)}
    got, _ = matched(monkeypatch, pairs, written)
    assert got == Match(exact=0.25, se=pytest.approx(math.sqrt(0.25 * 0.75 / 3)), ser=pytest.approx(2 / 9), pairs=4)


def test_any_of_several_right_targets_will_do(monkeypatch):
    """Source 2 has two targets, and what is written is the second; source 3 has two, and is nearer to the shorter. The
    pairs of one source are right together, so they count as one cluster of two."""
    pairs = [([2], [5, 6]), ([2], [7]), ([3], [5, 6, 7, 8]), ([3], [5]), ([4], [9])]
    written = {(2,): ([7], True), (3,): ([6], True), (4,): ([9], True)}
    got, asked = matched(monkeypatch, pairs, written)
    assert len(asked) == 3
    assert (got.exact, got.pairs) == (3 / 5, 5)
    assert got.ser == pytest.approx(2 / (2 * 1 + 2 * 1 + 1))
    by_cluster = [2 - 2 * 0.6, 0 - 2 * 0.6, 1 - 0.6]
    assert got.se == pytest.approx(math.sqrt(sum(d * d for d in by_cluster) * 3 / 2) / 5)


def test_pairs_are_spread_evenly(monkeypatch):
    pairs = [([2 + i], [5]) for i in range(10)]
    written = {(2 + i,): ([5], True) for i in range(10)}
    got, asked = matched(monkeypatch, pairs, written, max_pairs=4)
    assert [s[1] - 2 for s in asked] == [0, 2, 5, 7]
    assert got.pairs == 4
    got, asked = matched(monkeypatch, pairs, written, max_pairs=50)
    assert got.pairs == 10


def padded(rows, value):
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


@pytest.mark.parametrize("words", ["n_encoder_layer=1", "pos=rope"])
def test_what_is_memorised_is_written(words):
    """From first weights to all right, by greedy and by beam search; `poll` may stop it."""
    pairs = [([2, 3], [6, 7, 8]), ([3, 2], [8]), ([4], [7, 7]), ([4, 4, 5], [6, 6, 8, 8]), ([5], [6])]
    model, split = make_model(make("data=reverse", "n_layer=1", *words.split()), 9), split_of(pairs)
    assert match(model, split, 9).exact < 1
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    if hasattr(model, "encoder"):
        rows = [([END, *source], [TO, *target], [*target, END]) for source, target in pairs]
        x = [padded([r[0] for r in rows], -1), padded([r[1] for r in rows], 0)]
        y_BT = padded([r[2] for r in rows], -100)
    else:
        x = [padded([[END, *source, TO, *target] for source, target in pairs], 0)]
        y_BT = padded([[-100] * (1 + len(source)) + [*target, END] for source, target in pairs], -100)
    for _ in range(80):
        loss = F.cross_entropy(model(*x).transpose(1, 2), y_BT)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for width in (1, 3):
        got = match(model, split, 9, width=width)
        assert (got.exact, got.ser, got.se, got.pairs) == (1, 0, 0, 5)

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        match(model, split, 9, poll=stop)


# toymha generate


@pytest.fixture(params=["n_encoder_layer=1", "pos=rope"])
def opened(request):
    """Some targets end at once, and some do not."""
    by = PairTokenizer("重庆长", ["chóng", "qìng", "cháng"], "char", "word")
    model, c = model_of(request.param, by.vocab_size), make("data=reverse", *request.param.split())
    with torch.no_grad():
        model.head.weight[END] *= 0.2 if hasattr(model, "encoder") else 1
    corpus = SimpleNamespace(tokenizer=by)
    return SimpleNamespace(config=c, model=model, corpus=corpus, device=CPU, precision="fp32", run=None)


def generated(capsys, opened, **options):
    generate_pairs(build({"run": "x", **options}, GenerateOptions), opened)
    return capsys.readouterr().out


def test_each_source_has_a_line(capsys, opened, tmp_path):
    """What greedy search finds, as text of the target's unit."""
    path = tmp_path / "sources"
    path.write_text("重庆\n长\n庆长重\n", encoding="utf-8")
    by = opened.corpus.tokenizer
    how = {"separator": by.separator, "end": by.begin, "vocab_size": by.vocab_size}
    for most in (5, 30):
        out = generated(capsys, opened, prompts=str(path), temperature=0, max_new_tokens=most)
        lines = [line.split("\t", 1) for line in out.removesuffix("\n").split("\n")]
        assert [source for source, _ in lines] == ["重庆", "长", "庆长重"]
        for source, target in lines:
            ids = by.encode_source(source).tolist()
            [[h]] = write_targets(opened.model, [ids], **how, length=most - 1)
            if by.separator in h.tokens:  # a mark that no target holds, so `generate` never writes it
                assert by.names[by.separator] not in target
                continue
            extra = target.split() if not h.finished else target.split()[: len(h.tokens)]
            assert extra[: len(h.tokens)] == by.decode_target(h.tokens).split()
            assert not h.finished or target == by.decode_target(h.tokens)


def test_a_sample_depends_on_its_seed_alone(capsys, opened, tmp_path):
    """On neither the number of samples nor the other sources."""
    how = dict(temperature=1.5, max_new_tokens=6, output="jsonl")
    first = [json.loads(s) for s in generated(capsys, opened, prompt="重庆", num_samples=3, **how).splitlines()]
    assert [s["seed"] for s in first] == [0, 1, 2] and len({str(s["tokens"]) for s in first}) > 1
    path = tmp_path / "sources"
    path.write_text("长\n重庆\n", encoding="utf-8")
    for seed in (1, 2):
        out = generated(capsys, opened, prompts=str(path), seed=seed, **how).splitlines()
        assert json.loads(out[1])["tokens"] == first[seed]["tokens"]
    for s in first:
        ids = opened.corpus.tokenizer.encode_source("重庆").tolist()
        logp = logp_of_ids(opened, ids, s["tokens"])
        assert s["logprob"] == pytest.approx(logp, abs=1e-4)
        assert s["stopped"] == ("end" if s["tokens"][-1] == END else "length")


def logp_of_ids(opened, source, tokens):
    by = opened.corpus.tokenizer
    assert (by.begin, by.separator) == (END, TO)
    return logp_of(opened.model, source, tokens).sum().item()


def test_what_is_penalised_are_tokens_of_the_target(capsys, opened, tmp_path):
    """Each token from a full pass of its own, while other targets end; those of the source are not penalised."""
    path, by = tmp_path / "sources", opened.corpus.tokenizer
    path.write_text("重庆\n长\n庆长重\n重\n长长\n", encoding="utf-8")
    how = dict(temperature=0, max_new_tokens=7, output="jsonl", repetition_penalty=3)
    ended = set()
    for line in generated(capsys, opened, prompts=str(path), **how).splitlines():
        made = json.loads(line)
        source, target = by.encode_source(made["prompt"]).tolist(), []
        while len(target) < 7 and END not in target:
            logits_V = logits_of(opened.model, source, target).clone()
            logits_V[TO] = -math.inf  # never in a target
            for seen in set(target):
                logits_V[seen] = logits_V[seen] / 3 if logits_V[seen] > 0 else logits_V[seen] * 3
            target.append(int(logits_V.argmax()))
        assert made["tokens"] == target
        ended.add(len(target))
    assert len(ended) > 1


def test_one_sample_streams(capsys, opened, monkeypatch):
    """From standard input, and the same text as without streaming."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("重庆\n".encode())))
    alone = generated(capsys, opened, prompt="-", max_new_tokens=6)
    both = generated(capsys, opened, prompt="重庆", max_new_tokens=6, num_samples=2)
    assert alone.startswith("重庆\t") and alone == both.splitlines(keepends=True)[0]
    assert generated(capsys, opened, prompt="重庆", max_new_tokens=0) == "重庆\t\n"


def test_a_full_context_ends_a_target(capsys, opened):
    """A decoder that has read 3 + 13 tokens says one more; one beside an encoder reads 16 of its own."""
    how = dict(prompt="重庆", temperature=1, num_samples=40, output="jsonl")
    samples = [json.loads(line) for line in generated(capsys, opened, **how).splitlines()]
    longest = max(len(s["tokens"]) for s in samples)
    assert longest <= room(opened.model, 3) + 1
    for s in samples:
        assert s["stopped"] == ("end" if s["tokens"][-1] == END else "context")
        assert s["stopped"] == "end" or len(s["tokens"]) == room(opened.model, 3) + 1


def test_beams_are_listed(capsys, opened):
    """The k best with log-probability and probability, as text and as JSON."""
    how = dict(prompt="重庆", temperature=0, beam=3, max_new_tokens=4)
    rows = [json.loads(line) for line in generated(capsys, opened, output="jsonl", **how).splitlines()]
    assert [row["rank"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["probability"] == pytest.approx(math.exp(row["logprob"]))
        ids = opened.corpus.tokenizer.encode_source("重庆").tolist()
        assert row["logprob"] == pytest.approx(logp_of_ids(opened, ids, row["tokens"]), abs=1e-4)
        assert row["stopped"] == ("end" if row["tokens"][-1] == END else "length")
    text = generated(capsys, opened, **how).splitlines()
    assert text[0] == "重庆" and len(text) == 4
    for row, line in zip(rows, text[1:], strict=True):
        rank, probability, logprob, *words = line.split()
        assert (int(rank), " ".join(words).removesuffix("...").strip()) == (row["rank"], row["text"])
        assert float(probability) == pytest.approx(row["probability"], rel=1e-2)
        assert float(logprob) == pytest.approx(row["logprob"], abs=1e-3)


@pytest.mark.parametrize(
    "words, said",
    [
        ({}, "^the source is empty; give prompt="),
        ({"prompt": "重\n\n庆"}, "^line 2: the source is empty"),
        ({"prompt": "重x"}, "1 symbols or words are not among .*'x'"),
        ({"prompt": "重\n重x"}, "^line 2: 1 symbols or words are not among"),
        ({"prompt": "重" * 20}, "the source has 21 tokens, which leave no room in seq_len=16"),
        ({"prompt": "重", "trace": True}, "trace=true .* toymha heads"),
        ({"prompt": "重", "cache": False}, "cache=false"),
        ({"prompt": "重", "overflow": "slide"}, "overflow=slide"),
        ({"prompt": "重", "stop": ["a"]}, "a target ends where the model ends it"),
        ({"prompt": "重", "beam": 2}, "beam=2 .* needs temperature=0, not 0.8"),
        ({"prompt": "重", "beam": 2, "temperature": 0, "top_k": 3}, "top_k=3 is for samples"),
        ({"prompt": "重", "beam": 2, "temperature": 0, "num_samples": 3}, "num_samples=3 is for samples"),
    ],
)
def test_what_cannot_be_is_refused(capsys, opened, words, said):
    with pytest.raises(UserError, match=said):
        generated(capsys, opened, **words)
    assert capsys.readouterr().out == ""
