"""Laws of evaluation: every token once, no dependence on batches or moods, honest errors, numbers known by hand.

Axes: W windows, T positions, V vocabulary; N tokens of a split.
"""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from conftest import VOCAB, built, make, tokens
from torch import nn

from toymha.console import score_line
from toymha.data.corpus import Split
from toymha.evaluate import Score, attention_statistics, evaluate, evaluating, unigram_loss, windows
from toymha.model.gpt import GPT


def split_of(N, seed=0):
    """N random tokens, each of which spells one character and one byte."""
    return Split(tokens(1, N, seed)[0].to(torch.uint8), N - 1, N - 1)


class Constant(nn.Module):
    """The same logits at every position."""

    def __init__(self, *logits):
        super().__init__()
        self.logits_V = nn.Parameter(torch.tensor(logits))

    def forward(self, x_WT):
        return self.logits_V.expand(*x_WT.shape, -1)


# Counting


@pytest.mark.parametrize("N", [2, 9, 16, 17, 18, 100, 161])
@pytest.mark.parametrize("seq_len", [1, 7, 16])
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_every_token_but_the_first_is_predicted_once(N, seq_len, batch):
    """In order, after at most seq_len tokens of context, whatever N and the batch."""
    predicted = []
    for at_WT, counted_WT in windows(split_of(N), seq_len, None, batch):
        assert at_WT.numel() and at_WT.shape[1] <= seq_len and len(at_WT) <= batch
        assert torch.equal(at_WT, at_WT[:, :1] + torch.arange(at_WT.shape[1]))
        assert counted_WT.all()
        predicted += at_WT.flatten().tolist()
    assert predicted == list(range(1, N))


def documents(N, longest, seed=0):
    """A split of documents of 1 to `longest` random tokens, a few of which have one of two tags."""
    draw = torch.Generator().manual_seed(seed)
    ends = torch.randint(1, longest + 1, (N,), generator=draw).cumsum(0)
    starts = torch.cat([torch.tensor([0]), ends[ends < N]])
    tags = torch.randint(4, (N,), generator=draw).clamp(max=2).to(torch.uint8)
    logp = -torch.rand(N, generator=draw)
    classes = torch.arange(VOCAB) // 2
    return dataclasses.replace(
        split_of(N, seed), starts=starts, tags=tags % 3, logp=logp, names=("one", "two"), classes=classes
    )


@pytest.mark.parametrize("N", [2, 17, 100, 500])
@pytest.mark.parametrize("longest", [1, 6, 16, 40])
def test_every_token_counts_once_with_its_document_before_it(N, longest):
    """Windows start where a document does; one that is too long goes on in the next window, as in any text."""
    split, seq_len = documents(N, longest), 16
    starts, counted = split.starts.tolist(), []
    for at_WT, counted_WT in windows(split, seq_len, None, 3):
        assert len(at_WT) <= 3 and (at_WT.shape[1] == seq_len or len(at_WT) == 1)
        for at_T, counted_T in zip(at_WT, counted_WT):
            begin = int(at_T[0]) - 1
            for at in at_T[counted_T].tolist():
                document = max(s for s in starts if s < at)  # of the token before, which predicts it
                end = min([s for s in starts if s > document], default=N)
                assert begin <= document or end - document > seq_len
                counted.append(at)
    assert counted == list(range(1, N))


def test_a_subset_of_documents_is_spread_evenly():
    split = documents(2000, 10)
    chosen = list(windows(split, 16, 300, 4))
    starts = [int(at_T[0]) - 1 for at_WT, _ in chosen for at_T in at_WT]
    assert 250 < sum(int(c.sum()) for _, c in chosen) < 350
    assert starts == sorted(set(starts)) and set(starts) <= set(split.starts.tolist())
    assert starts[0] == 0 and starts[-1] > 1800
    whole = evaluate(Constant(*[0.0] * VOCAB), split, 16, max_tokens=1999)
    assert whole.tokens == 1999


# Relations


def test_right_accuracy_and_floor_by_hand():
    """Five tokens, of which two have the tag `one`; tokens 0 and 1 are of one class, 2 and 3 are alone."""
    split = Split(
        *(torch.tensor([0, 1, 2, 3, 0]), 4, 4),
        starts=torch.tensor([0, 2]),
        tags=torch.tensor([1, 1, 0, 1, 2], dtype=torch.uint8),  # the first token is predicted by nobody
        logp=torch.tensor([-9.0, -0.5, -0.25, 0.0, -1.0]),
        names=("one", "two", "three"),
        classes=torch.tensor([7, 7, 8, 9]),
    )
    p = torch.tensor([0.1, 0.3, 0.4, 0.15, 0.05])  # the model has a token more than the text
    score = evaluate(Constant(*p.log().tolist()), split, 3)
    assert score.floor == pytest.approx((0.5 + 0.25 + 0 + 1) / 4)
    assert score.parts.keys() == {"one", "two"}
    one, two = score.parts["one"], score.parts["two"]
    assert (one.tokens, two.tokens) == (2, 1)
    assert one.loss == pytest.approx(-(math.log(0.3) + math.log(0.15)) / 2)
    assert one.floor == pytest.approx(0.25)
    assert one.right == pytest.approx((0.4 + 0.15) / 2)  # token 1 is right, and so would be token 0
    assert (one.accuracy, two.accuracy) == (0, 0)  # the most likely token is 2
    assert two.right == pytest.approx(0.4) and two.loss == pytest.approx(-math.log(0.1))
    best = evaluate(Constant(2.0, 0.0, 0.0, 0.0), split, 3).parts
    assert best["one"].accuracy == 0.5 and best["two"].accuracy == 1
    assert score.to_dict()["parts"]["one"]["tokens"] == 2


@pytest.mark.parametrize("batch_tokens", [1, 50, 10_000])
def test_the_evaluation_batch_changes_no_relation(batch_tokens):
    model, split = built(make()), documents(500, 12)
    a, b = (evaluate(model, split, 16, batch_tokens=n) for n in (4096, batch_tokens))
    assert (a.loss, a.se, a.floor) == pytest.approx((b.loss, b.se, b.floor), rel=1e-6)
    for name in ("one", "two"):
        assert dataclasses.astuple(a.parts[name]) == pytest.approx(dataclasses.astuple(b.parts[name]), rel=1e-5)


def test_relations_add_up_to_the_whole():
    """With a tag on every token, the means by relation, weighted by their tokens, are the loss and the floor."""
    split = documents(500, 12)
    split = dataclasses.replace(split, tags=(split.tags % 2 + 1).to(torch.uint8))
    score = evaluate(built(make()), split, 16)
    for what in ("loss", "floor"):
        total = sum(getattr(p, what) * p.tokens for p in score.parts.values())
        assert total / score.tokens == pytest.approx(getattr(score, what), rel=1e-6)
    assert sum(p.tokens for p in score.parts.values()) == score.tokens == 499


@pytest.mark.parametrize("N", [2, 9, 17, 100, 161])
@pytest.mark.parametrize("seq_len", [1, 7, 16])
def test_a_model_that_knows_nothing_has_perplexity_v(N, seq_len):
    """All logits zero: perplexity V and N - 1 predictions, for any length of text and window."""
    c = make("tie_embeddings=false")
    model = GPT(c, VOCAB)
    nn.init.zeros_(model.head.weight)
    score = evaluate(model, split_of(N), seq_len)
    assert score.ppl == pytest.approx(VOCAB, rel=1e-6)
    assert score.tokens == N - 1
    assert score.bits_per_char == score.bits_per_byte == pytest.approx(5)


def test_bits_count_what_tokens_spell():
    """Three bytes a token and two bytes a character: 6 bits a token are 4 a character and 2 a byte."""
    score = Score(loss=6 * math.log(2), se=0.0, tokens=100, chars=150, bytes=300)
    assert (score.bits_per_char, score.bits_per_byte) == pytest.approx((4, 2))


# One number


@pytest.mark.parametrize("batch_tokens", [1, 16, 50, 10_000])
def test_the_evaluation_batch_changes_nothing(model_config, batch_tokens):
    """Loss, error and counts are the same however many windows are computed at once (1e-6)."""
    model, split = built(model_config), split_of(16 * 9 + 6)
    a, b = (evaluate(model, split, 16, batch_tokens=n).to_dict() for n in (4096, batch_tokens))
    assert a.pop("parts") == b.pop("parts") == {} and a.pop("floor") is b.pop("floor") is None
    assert a == pytest.approx(b, rel=1e-6)


def test_loss_is_the_mean_over_tokens_not_over_batches():
    """The last, shorter window counts by its tokens: of 4 predictions in windows of 3, three cost a and one costs b."""
    tokens_N = torch.tensor([0, 0, 0, 0, 1])
    score = evaluate(Constant(1.0, 0.0), Split(tokens_N, 4, 4), 3)
    a, b = math.log(1 + math.exp(-1)), math.log(1 + math.e)
    assert score.loss == pytest.approx((3 * a + b) / 4)
    # Worked by hand: the windows' sums 3a and b miss their shares 3 x loss and 1 x loss by 3 (a - b) / 4, one above and
    # one below; the squares add up to 2 (3 (a - b) / 4)^2, times W / (W - 1) = 2, and the root over N = 4 remains.
    assert score.se == pytest.approx(2 * 3 * (b - a) / 4 / 4)


def test_standard_error_is_the_spread_of_estimates():
    """Over many texts from one source, losses scatter by as much as each says of itself."""
    model = Constant(2.0, 1.0, 0.0)
    scores = []
    for seed in range(200):
        # Runs of one symbol: tokens inside a window are far from independent.
        runs = torch.randint(3, (60,), generator=torch.Generator().manual_seed(seed)).repeat_interleave(8)
        scores.append(evaluate(model, Split(runs, 479, 479), 8))
    scatter = torch.tensor([s.loss for s in scores]).std().item()
    assert sum(s.se for s in scores) / 200 == pytest.approx(scatter, rel=0.15)


def test_one_window_has_no_standard_error():
    """There is nothing to compare it with: not a number, and not zero. JSON has no nan, and the screen says nothing."""
    score = evaluate(built(make()), split_of(17), 16)
    assert math.isnan(score.se) and score.to_dict()["se"] is None
    json.dumps(score.to_dict(), allow_nan=False)
    assert "±" not in score_line("validation", score.to_dict())


def test_a_subset_is_always_the_same():
    """About max_tokens of them in whole windows, spread over the split, no chance involved."""
    model, split = built(make()), split_of(16 * 50 + 5)
    torch.manual_seed(1)
    part = evaluate(model, split, 16, max_tokens=100)
    torch.manual_seed(2)
    assert evaluate(model, split, 16, max_tokens=100, batch_tokens=16).loss == pytest.approx(part.loss, rel=1e-6)
    assert evaluate(model, split, 16, max_tokens=100) == part
    assert part.tokens == 7 * 16
    assert (part.chars, part.bits_per_char) == pytest.approx((7 * 16, part.loss / math.log(2)))
    starts = torch.cat([at_WT[:, 0] - 1 for at_WT, _ in windows(split, 16, 100, 3)]).tolist()
    assert starts == sorted(set(starts)) and all(s % 16 == 0 for s in starts)
    assert starts[0] == 0 and starts[-1] > 16 * 40


@pytest.mark.parametrize("max_tokens", [805, 10_000, None])
def test_a_subset_as_large_as_the_split_is_the_split(max_tokens):
    """Down to the last token."""
    model, split = built(make()), split_of(806)
    assert evaluate(model, split, 16, max_tokens=max_tokens) == evaluate(model, split, 16)


@pytest.mark.parametrize(("loss", "ppl"), [(100.0, math.exp(100)), (709.5, math.exp(709.5)), (1000.0, math.inf)])
def test_perplexity_overflows_no_sooner_than_a_double(loss, ppl):
    """A loss of 100 nats has a finite perplexity, one of 1,000 an infinite one; the loss stays finite."""
    score = evaluate(Constant(loss, 0.0), Split(torch.ones(10, dtype=torch.long), 9, 9), 4)
    assert score.loss == pytest.approx(loss)
    assert score.ppl == (ppl if math.isinf(ppl) else pytest.approx(ppl))


def test_no_number_stays_no_number():
    """A loss that is NaN has no perplexity, not an infinite one."""
    assert math.isnan(Score(math.nan, 0.0, 1, 1, 1).ppl)


def test_unigram_loss_by_hand():
    """Frequencies of the training text, plus one each: 3/5 and 2/5 after 0, 0, 1."""
    text = Split(torch.tensor([0, 0, 1], dtype=torch.uint8), 2, 2)
    assert unigram_loss(torch.nn.Identity(), text, text, 2) == pytest.approx(-(math.log(3 / 5) + math.log(2 / 5)) / 2)


# Moods


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_what_it_was(training):
    """After evaluation, after statistics, and after an error inside of either."""
    model = built(make("attn_dropout=0.5")).train(training)

    def fail():
        raise ZeroDivisionError

    evaluate(model, split_of(50), 16)
    attention_statistics(model, tokens())
    with pytest.raises(ZeroDivisionError):
        evaluate(model, split_of(50), 16, poll=fail)
    with pytest.raises(IndexError):
        attention_statistics(model, tokens() + VOCAB)
    with pytest.raises(ZeroDivisionError), evaluating(model):
        assert not any(m.training for m in model.modules())
        fail()
    assert all(m.training is training for m in model.modules())
    assert not any(m._forward_hooks for m in model.modules())


def test_dropout_and_chance_play_no_part():
    """A training model with dropout scores the same twice, as without dropout, and draws no random number."""
    c = make("attn_dropout=0.5", "resid_dropout=0.5")
    model, split = built(c).train(), split_of(100)
    torch.manual_seed(0)
    first, state = evaluate(model, split, 16), torch.get_rng_state()
    attention_statistics(model, tokens())
    assert evaluate(model, split, 16) == first == evaluate(built(make()), split, 16)
    torch.manual_seed(0)
    assert torch.equal(state, torch.get_rng_state())


# Statistics of attention


@pytest.mark.parametrize("causal", ["true", "false"])
def test_even_attention_has_the_entropy_of_counting(causal):
    """With W_q = 0 every visible token weighs the same: entropy ln(t + 1) in row t, or ln T; scores do not spread."""
    model = built(make(f"causal={causal}"))
    for block in model.blocks:
        nn.init.zeros_(block.attn.w_q.weight)
    seen = attention_statistics(model, tokens())
    rows = range(1, 17) if causal == "true" else [16] * 16
    for layer in (0, 1):
        assert seen[f"entropy/layer{layer}"] == pytest.approx(sum(map(math.log, rows)) / 16, rel=1e-5)
        assert seen[f"scores_std/layer{layer}"] == 0


@pytest.mark.parametrize("causal", [True, False])
def test_scores_spread_over_what_is_visible(causal):
    """Their standard deviation is taken over the past, or over all where nothing is hidden."""
    model, scores = built(dataclasses.replace(make(), causal=causal)), []
    handle = model.blocks[0].attn.scores.register_forward_hook(lambda _m, _i, s: scores.append(s))
    seen = attention_statistics(model, tokens())
    handle.remove()
    visible = [s for t in range(16) for s in scores[0][:, :, t, : t + 1 if causal else 16].flatten().tolist()]
    assert seen["scores_std/layer0"] == pytest.approx(torch.tensor(visible).std().item(), rel=1e-5)
