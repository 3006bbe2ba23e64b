"""Generation: the loop over tokens, and `toymha generate` from words to what it prints.

B samples, S visible tokens, T positions, H heads, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, built, make, tokens

from toymha import runs, train
from toymha.analysis.capture import capture
from toymha.cli import main
from toymha.compose import points
from toymha.console import Console
from toymha.data.tokenizer import ByteTokenizer, CharTokenizer
from toymha.generation.continuation import Continuation
from toymha.generation.decoding import steps
from toymha.generation.generate import sample, unescaped
from toymha.generation.prompts import Prompt
from toymha.generation.sampling import Rules
from toymha.schema import UserError
from toymha.stop import Stop

GREEDY = Rules(temperature=0)
SEVERAL = ["model=mha", "model=mqa", "pos=none", "n_kv_head=2 kept_heads=[[0,1,3],[2,3]]", "norm_position=post"]


def lively(*words, c=None):
    """A model whose next token depends on all that it sees: tied and barely initialised ones say one token for ever."""
    model = built(dataclasses.replace(c or make(*words), tie_embeddings=False))
    with torch.no_grad():
        for p in model.blocks.parameters():
            p.mul_(3)
    return model


def prompt(length, seed=0):
    return tokens(1, length, seed)[0].tolist()


def chosen(model, prompts, length, rules=GREEDY, seeds=None, V=VOCAB, **how):
    """The new tokens of each sample."""
    out = [[] for _ in prompts]
    for of_samples in steps(model, prompts, rules, V, seeds or [0] * len(prompts), length, **how):
        for said, step in zip(out, of_samples, strict=True):
            said += [] if step is None else [step.token]
    return out


def by_hand(model, ids, length):
    """Greedy, from the full forward pass over the last seq_len tokens."""
    ids = list(ids)
    with torch.inference_mode():
        for _ in range(length):
            ids.append(int(model(torch.tensor([ids[-model.seq_len :]]))[0, -1, :VOCAB].argmax()))
    return ids[-length:]


# The loop


@pytest.mark.parametrize("prompt_len", [1, 12, 20])
def test_greedy_is_the_argmax_of_the_full_forward_pass(model_config, prompt_len):
    """For every model, with a cache and without, across the end of the context, for every seed."""
    model, ids = lively(c=model_config), prompt(prompt_len)
    expected = by_hand(model, ids, 20)
    assert prompt_len == 1 or len(set(expected)) > 4
    for cache in (True, False):
        assert chosen(model, [ids], 20, cache=cache) == [expected]
    assert chosen(model, [ids, ids], 20, seeds=[1, 2]) == [expected] * 2
    assert chosen(model, [ids], 20, Rules(0.7, top_k=1), seeds=[5]) == [expected]


@pytest.mark.parametrize("words", SEVERAL)
@pytest.mark.parametrize("overflow", ["crop", "slide", "stop"])
@pytest.mark.parametrize("prompt_len", [1, 12, 15, 16, 17, 40])
def test_the_cache_changes_no_token(words, overflow, prompt_len):
    """Also past the end of the context, and for prompts beyond it."""
    model, ids = lively(*words.split()), prompt(prompt_len)
    with_cache, without = (
        chosen(model, [ids], 20, Rules(1.0), seeds=[3], overflow=overflow, cache=cache)[0] for cache in (True, False)
    )
    assert with_cache == without
    assert len(with_cache) == (20 if overflow != "stop" else max(0, min(20, 17 - prompt_len)))


@pytest.mark.parametrize("overflow", ["crop", "slide"])
@pytest.mark.parametrize("words", [*SEVERAL, "pos=learned"])
def test_a_batch_of_prompts_of_different_lengths_is_each_alone(words, overflow):
    """They fill the context at different times; two are over early, one of them before the longest is."""
    if words == "pos=learned" and overflow == "slide":
        pytest.skip("positions end")
    model, prompts = lively(*words.split()), [prompt(n, seed=n) for n in (3, 14, 1, 30, 9)]
    alone = [chosen(model, [ids], 25, Rules(1.0), seeds=[7], overflow=overflow)[0] for ids in prompts]
    assert chosen(model, prompts, 25, Rules(1.0), seeds=[7] * 5, overflow=overflow) == alone
    for cache in (True, False):
        count = [0] * 5

        def over(row, token, count=count):
            count[row] += 1
            return count[row] == {0: 8, 1: 4}.get(row, 100)

        cut = chosen(model, prompts, 25, Rules(1.0), seeds=[7] * 5, overflow=overflow, over=over, cache=cache)
        assert cut == [alone[0][:8], alone[1][:4], *alone[2:]]


def test_a_sliding_context_is_a_band_of_attention():
    """One layer, rotary positions: each token sees the last 16, so the logits are those of a pass over these 16."""
    model, ids = lively("n_layer=1"), prompt(40)
    for (step,) in steps(model, [ids], GREEDY, VOCAB, [0], 30, overflow="slide"):
        with torch.inference_mode():
            expected = model(torch.tensor([ids[-16:]]))[0, -1]
        torch.testing.assert_close(step.logits_V, expected, atol=1e-4, rtol=1e-4)
        assert (step.context_start, step.cache_tokens) == (len(ids) - 16, 16)
        ids.append(step.token)


def test_no_sample_knows_of_another():
    """Neither their number nor the other prompts, and a second call starts afresh."""
    model, rules = lively(), Rules(1.0, top_p=0.9)
    a, b = prompt(5, seed=1), prompt(9, seed=2)
    five = chosen(model, [a] * 5, 12, rules, seeds=[0, 1, 2, 3, 4])
    assert len({tuple(said) for said in five}) == 5
    for i in range(5):
        assert chosen(model, [a], 12, rules, seeds=[i]) == [five[i]]
    assert chosen(model, [b, a], 12, rules, seeds=[0, 2])[1] == five[2]
    assert sample(model, a, 12, VOCAB, seed=3, temperature=1.0) == chosen(model, [a], 12, Rules(1.0), seeds=[3])[0]


def test_tokens_that_the_data_does_not_have_are_never_chosen():
    model = lively("vocab_size=40")
    assert max(chosen(model, [prompt(3)], 200, Rules(5.0), V=VOCAB)[0]) < VOCAB
    assert max(chosen(model, [prompt(3)], 200, Rules(5.0), V=40)[0]) >= VOCAB


def test_what_is_said_already_is_less_likely():
    """Greedy with a penalty of 1.5 over prompt and new tokens, also those that the context has lost, by hand."""
    model, ids = lively(), prompt(3)
    found = chosen(model, [ids], 30, Rules(0, repetition_penalty=1.5))[0]
    with torch.inference_mode():
        for token in found:
            logits = model(torch.tensor([ids[-16:]]))[0, -1].tolist()
            logits = [x if i not in ids else x / 1.5 if x > 0 else x * 1.5 for i, x in enumerate(logits)]
            assert token == max(range(VOCAB), key=logits.__getitem__)
            ids.append(token)
    assert len(set(found)) > len(set(by_hand(model, prompt(3), 30)))


def test_no_length_is_no_step():
    assert list(steps(built(make()), [[1]], GREEDY, VOCAB, [0], 0)) == []


def test_the_facts_of_a_step():
    """Prompt 12, seq_len 16, 2 layers of 4 heads of 8 channels: 512 bytes a token."""
    model, ids = built(make()), prompt(12)
    made = [step for (step,) in steps(model, [ids], Rules(1.0), VOCAB, [0], 7)]
    assert [s.number for s in made] == list(range(7))
    assert [s.phase for s in made] == ["prefill"] + ["decode"] * 6
    assert [s.new for s in made] == [12, 1, 1, 1, 1, 16, 16]
    assert [s.cache_tokens for s in made] == [12, 13, 14, 15, 16, 0, 0]
    assert [s.cache_bytes for s in made] == [512 * s.cache_tokens for s in made]
    assert [s.context_start for s in made] == [0, 0, 0, 0, 0, 1, 2]
    for cache in (False, True):
        without = [step for (step,) in steps(model, [ids], Rules(1.0), VOCAB, [0], 7, cache=cache, overflow="stop")]
        assert [s.new for s in without] == ([12, 1, 1, 1, 1] if cache else [12, 13, 14, 15, 16])
        assert any(s.cache_bytes for s in without) is cache
    slid = [step for (step,) in steps(model, [prompt(40)], Rules(1.0), VOCAB, [0], 3, overflow="slide")]
    assert [(s.new, s.cache_tokens, s.context_start) for s in slid] == [(40, 16, 24), (1, 16, 25), (1, 16, 26)]
    assert made[0].attention is None


def test_a_cache_of_shared_heads_is_smaller():
    """One key head for four query heads: a quarter."""
    (of_samples,) = steps(built(make("n_kv_head=1")), [prompt(12)], GREEDY, VOCAB, [0], 1)
    assert of_samples[0].cache_bytes == 12 * 512 // 4


@pytest.mark.parametrize("words", ["", "causal=false", "kept_heads=[[0,2],[]]", "n_kv_head=1"])
@pytest.mark.parametrize("cache", [True, False])
def test_attention_is_the_last_row_over_what_is_visible(words, cache):
    """As the full forward pass has it, in the order of the text, past the end of the context too."""
    model, ids = lively(*words.split()), prompt(12)
    for (step,) in steps(model, [ids], Rules(1.0), VOCAB, [0], 8, attention=True, cache=cache):
        visible = torch.tensor([ids[step.context_start :]])
        for found_HS, whole_BHTS in zip(step.attention, capture(model, visible, "pattern")["pattern"], strict=True):
            assert found_HS.shape[1] == visible.shape[1]
            torch.testing.assert_close(found_HS, whole_BHTS[0, :, -1].reshape(found_HS.shape), atol=1e-5, rtol=1e-4)
        ids.append(step.token)
    assert not any(m._forward_hooks for m in model.modules())


def test_attention_slides():
    """Each row is over the 16 tokens that the query sees, and adds up to one."""
    for (step,) in steps(built(make()), [prompt(40)], GREEDY, VOCAB, [0], 25, attention=True, overflow="slide"):
        for pattern_HS in step.attention:
            assert pattern_HS.shape == (4, 16)
            torch.testing.assert_close(pattern_HS.sum(-1), torch.ones(4))


def test_the_loop_leaves_nothing_open():
    """Whoever uses it computes with gradients in between, and the model's mode is what it was."""
    model = built(make("attn_dropout=0.5")).train()
    for _ in steps(model, [prompt(3)], GREEDY, VOCAB, [0], 3):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and model.training


@pytest.mark.parametrize("words", ["pos=learned", "pos=sinusoidal", "causal=false"])
def test_what_cannot_slide_is_refused(words):
    with pytest.raises(UserError, match=r"slide"):
        list(steps(built(make(words)), [prompt(3)], GREEDY, VOCAB, [0], 1, overflow="slide"))


# What a sample says


def said(tokenizer, text, stops=(), end=None, most=100, given=""):
    """(what is certain after each token, the continuation) of a text fed token by token, until it is over."""
    ids = tokenizer.encode(given).tolist()
    c = Continuation(
        tokenizer, Prompt(given, ids), title="", seed=0, most=most, stops=[unescaped(s) for s in stops], end=end
    )
    certain = []
    for token in tokenizer.encode(text).tolist():
        over = c.add(token)
        certain.append(c.certain())
        if over:
            break
    return certain, c


def test_characters_of_several_bytes_come_whole():
    certain, _ = said(ByteTokenizer(), "a中é!", given="文")
    assert certain == ["a", "a", "a", "a中", "a中", "a中é", "a中é!"]


def test_bytes_that_are_no_character_are_shown_at_last():
    c = Continuation(ByteTokenizer(), Prompt("a", [97]), title="", seed=0, most=3, stops=[], end=None)
    shown = []
    for byte in (0xE4, 0xB8, 0x41):
        c.add(byte)
        shown.append(c.certain())
    assert shown == ["", "", "\ufffdA"] and c.text() == "\ufffdA"


@pytest.mark.parametrize("stop", ["END", "ND", "D", "一END"])
def test_a_stop_string_is_not_printed_where_it_straddles_tokens(stop):
    """Nor is a part of it, while it may still become one."""
    certain, c = said(ByteTokenizer(), "中E一END more", [stop])
    whole = "中E一END"
    assert c.stopped == "stop" and c.text() == whole[: whole.index(stop)]
    assert all(c.text().startswith(part) for part in certain) and certain[-1] == c.text()
    assert len(c.tokens) == len(whole.encode())


def test_what_only_looked_like_a_stop_string_is_printed():
    certain, c = said(CharTokenizer.of("abc\n"), "ab\nab\n\nc", ["\\n\\n", "cab"])
    assert certain[:4] == ["a", "ab", "ab", "ab\na"] and c.text() == "ab\nab"
    certain, c = said(CharTokenizer.of("abc\n"), "ab\na\n", ["\\n\\n"])
    assert c.text() == "ab\na\n" and c.stopped is None and c.certain() == "ab\na"


def test_the_first_of_several_stop_strings_counts():
    assert said(CharTokenizer.of("abcd"), "abcd", ["bcd", "c"])[1].text() == "ab"
    assert said(CharTokenizer.of("abcd"), "abcd", ["cd", "bcd"])[1].text() == "a"


def test_a_stop_string_in_the_prompt_ends_nothing():
    c = said(CharTokenizer.of("abc"), "ac", ["b"], given="b")[1]
    assert c.text() == "ac" and c.stopped is None


def test_escapes():
    assert unescaped(r"\n\t\\n\x") == "\n\t\\n\\x"


# toymha generate

TINY = [
    *("n_layer=1", "dim=16", "n_head=2", "seq_len=16", "batch_size=8", "threads=1"),
    *("budget.steps=20", "budget.eval_every=20", "budget.eval_tokens=320", "budget.sample_tokens=0"),
]
POEM = "床前明月光，疑是地上霜。\n举头望明月，低头思故乡。\n" * 40


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """`trained(*words)`: a small run with these words, each trained once for all tests, which only read it."""
    folder, made = tmp_path_factory.mktemp("trained"), {}
    (folder / "poem.txt").write_text(POEM, encoding="utf-8")

    def run(*words):
        if words not in made:
            given = {w.partition("=")[0] for w in words}
            (point,) = points(
                [
                    *(w for w in TINY if w.partition("=")[0] not in given),
                    *words,
                    f"output_dir={folder}",
                    f"name={len(made)}",
                ]
            )
            with pytest.MonkeyPatch.context() as patch, Stop() as stop:
                patch.setattr(runs, "git", lambda: None)
                made[words] = train.train_point(point, Console(quiet=True), stop)
        return made[words].path

    run.poem = ("data=file", f"data.path={folder / 'poem.txt'}")
    return run


@pytest.fixture
def toymha(capsys):
    """`toymha(*words)` in this process -> (exit status, stdout, stderr) of `toymha generate`."""

    def call(*words):
        code = main(["generate", "threads=1", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def objects(out):
    return [json.loads(line) for line in out.splitlines()]


def test_text_goes_on_from_the_prompt(trained, toymha):
    """Greedy: the same for all seeds, all paths, with and without a cache; and nothing else is on stdout."""
    run = trained("data=pydoc")
    code, out, err = toymha(f"run={run}", "prompt=The if", "max_new_tokens=30", "temperature=0")
    assert code == 0 and out.startswith("The if") and len(out.rstrip("\n")) <= 36
    assert err.count("\n") == 2 and "from here on the last seq_len=16 tokens are read anew" in err
    assert "read anew" not in toymha(f"run={run}", "prompt=The if", "max_new_tokens=5", "temperature=0")[2]
    for more in ("seed=7", "cache=false", "top_k=5", "weights=last", "num_samples=1"):
        assert toymha(f"run={run}", "prompt=The if", "max_new_tokens=30", "temperature=0", more)[1] == out
    assert toymha(f"run={run}", "prompt=The if", "max_new_tokens=30", "temperature=1.0", "top_k=1")[1] == out


def test_the_first_sample_is_the_same_among_five(trained, toymha):
    words = [f"run={trained('data=pydoc')}", "prompt=for", "max_new_tokens=25", "temperature=1.0", "output=jsonl"]
    (one,) = objects(toymha(*words)[1])
    five = objects(toymha(*words, "num_samples=5")[1])
    assert len({o["text"] for o in five}) == 5 and [o["seed"] for o in five] == [0, 1, 2, 3, 4]
    (third,) = objects(toymha(*words, "seed=2")[1])
    for alone, among in ((one, five[0]), (third, five[2])):
        assert alone.pop("logprob") == pytest.approx(among.pop("logprob"), abs=1e-3)
        assert alone == among


def test_json_has_what_text_prints(trained, toymha):
    """And the log-probability of its tokens by the model itself, whatever the rules."""
    words = [f"run={trained('data=pydoc')}", "prompt=for", "max_new_tokens=10", "temperature=0.5", "top_k=4"]
    words.append("precision=fp32")
    (found,) = objects(toymha(*words, "output=jsonl")[1])
    assert toymha(*words)[1] == found["prompt"] + found["text"].removesuffix("\n") + "\n"
    assert (found["prompt"], found["stopped"], len(found["tokens"])) == ("for", "length", 10)
    from toymha.opened import open_run

    opened = open_run(str(trained("data=pydoc")), threads=1)
    ids = opened.corpus.tokenizer.encode("for").tolist() + found["tokens"]
    with torch.inference_mode():
        logp_TV = opened.model(torch.tensor([ids]))[0].double().log_softmax(-1)
    expected = sum(logp_TV[t, ids[t + 1]].item() for t in range(2, len(ids) - 1))
    assert found["logprob"] == pytest.approx(expected, abs=1e-3)


def test_several_texts_have_a_line_above_each(trained, toymha, tmp_path):
    (tmp_path / "p.txt").write_text("for\n\nThe longer one, of more than seq_len\n")
    words = [f"run={trained('data=pydoc')}", f"prompts={tmp_path / 'p.txt'}", "num_samples=2", "max_new_tokens=5"]
    _, out, err = toymha(*words)
    assert [line for line in out.splitlines() if line.startswith("---")] == [
        f"--- prompt {p}, sample {i + 1}, seed {i} ---" for p in (1, 2, 3) for i in (0, 1)
    ]
    found = objects(toymha(*words, "output=jsonl")[1])
    assert [o["prompt"] for o in found] == ["for", "for", "", "", *["The longer one, of more than seq_len"] * 2]
    for o in found:
        one = objects(toymha(words[0], f"prompt={o['prompt']}", f"seed={o['seed']}", words[3], "output=jsonl")[1])
        assert one[0]["tokens"] == o["tokens"] and one[0]["logprob"] == pytest.approx(o["logprob"], abs=1e-3)
    assert "starts after the token \\n" in err and "36 tokens is longer than seq_len=16" in err


def test_prompts_of_all_ways_are_one(trained, toymha, tmp_path, monkeypatch):
    """Quotes, braces, commas, equals signs and line ends: from the command line, a file (of Windows too), stdin."""
    run, text = trained("data=pydoc"), "a = \"b, c\" {d: [1]}\n'x' # %"
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    words = [f"run={run}", "max_new_tokens=8", "output=jsonl"]
    code, out, err = toymha(*words, f"prompt={text}")
    assert code == 0, err
    expected = objects(out)
    assert expected[0]["prompt"] == text
    assert objects(toymha(*words, f"prompt_file={tmp_path / 'a.txt'}")[1]) == expected
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
    assert objects(toymha(*words, "prompt=-")[1]) == expected


def test_an_empty_prompt_starts_somewhere(trained, toymha, tmp_path):
    """At a line end, at the begin of a document, or at the first token of the text; none given is an empty one."""
    (tmp_path / "line.txt").write_text("abcd" * 200)
    for words, token in (
        (("data=pydoc",), "\\n"),
        (("data=relations", "data.tokens=20000", "seq_len=64"), "<doc>"),
        (("data=file", f"data.path={tmp_path / 'line.txt'}"), "a"),
    ):
        run = trained(*words)
        code, out, err = toymha(f"run={run}", "max_new_tokens=5", "prompt=")
        assert code == 0 and f"the prompt is empty, so the text starts after the token {token}" in err
        assert toymha(f"run={run}", "max_new_tokens=5")[1:] == (out, err)
        assert not out.startswith("<doc>")
    code, out, err = toymha(f"run={trained('data=pydoc')}", "max_new_tokens=5", "prompt= ")
    assert code == 0 and out.startswith(" ") and err == ""  # a space is a text


def test_documents_end_at_the_next(trained, toymha):
    """Generated texts are words: prompts and text are spelled with spaces, and the mark is not printed."""
    run = trained("data=relations", "data.tokens=20000", "seq_len=64")
    words = [f"run={run}", "max_new_tokens=60", "temperature=1.0", "num_samples=20"]
    found = objects(toymha(*words, "output=jsonl")[1])
    assert {o["stopped"] for o in found} >= {"end"}
    for o in found:
        assert "<doc>" not in o["text"] and "\n" not in o["text"]
        assert len(o["text"].split()) == len(o["tokens"]) - (o["stopped"] == "end")
    first = found[0]["text"].split()[:3]
    _, out, _ = toymha(f"run={run}", f"prompt=<doc>  {' '.join(first)}", "max_new_tokens=4")
    assert out.startswith(f"<doc> {' '.join(first)} ") and out.endswith("\n") and "  " not in out


def test_a_source_is_a_prompt(trained, toymha):
    """For a decoder alone, a text of pairs is a text: the marks around the source are not typed."""
    words = [f"run={trained('data=dates', 'data.examples=2000', 'seq_len=64')}", "prompt=二〇二六年十一月三十日"]
    (found,) = objects(toymha(*words, "temperature=0", "max_new_tokens=12", "output=jsonl")[1])
    code, out, err = toymha(*words, "temperature=0", "max_new_tokens=12")
    assert (code, err) == (0, "") and out == f"二〇二六年十一月三十日\t{found['text']}\n"
    assert found["text"] and not set("\t\n") & set(found["text"])


@pytest.mark.parametrize("kind", ["char", "byte"])
def test_chinese(trained, toymha, kind):
    """By character and by byte; streamed text is the text."""
    run = trained(*trained.poem, f"data.tokenizer={kind}", "budget.steps=60")
    words = [f"run={run}", "prompt=举头", "max_new_tokens=20", "temperature=0"]
    code, out, _ = toymha(*words)
    assert code == 0 and out.startswith("举头")
    (found,) = objects(toymha(*words, "output=jsonl")[1])
    assert out == "举头" + found["text"].removesuffix("\n") + "\n"


def test_streaming_is_the_text_in_pieces(trained, toymha, monkeypatch):
    """Each token as it comes, flushed; together they are what is printed at once."""
    pieces, run = [], trained("data=pydoc")

    class Pipe(io.StringIO):
        def flush(self):
            pieces.append(self.getvalue())

    monkeypatch.setattr(sys, "stdout", Pipe())
    main(["generate", f"run={run}", "prompt=for", "max_new_tokens=12", "overflow=slide", "threads=1"])
    pieces = list(dict.fromkeys(pieces))
    assert len(pieces) >= 12 and all(b.startswith(a) for a, b in pairwise(pieces))
    monkeypatch.undo()
    _, out, err = toymha(f"run={run}", "prompt=for", "max_new_tokens=12", "overflow=slide")
    assert pieces[-1] == out and err == ""


def test_stop_strings(trained, toymha):
    """One that the text holds ends it before; the rest of the text is as without."""
    run = trained("data=pydoc")
    words = [f"run={run}", "prompt=for", "max_new_tokens=30", "temperature=0", "output=jsonl"]
    (whole,) = objects(toymha(*words)[1])
    stop = whole["text"][10:13]
    (cut,) = objects(toymha(*words, f"stop=['{stop}',@@]")[1])
    assert cut["stopped"] == "stop" and cut["text"] == whole["text"][: whole["text"].index(stop)]


def test_a_full_context_stops_with_a_note(trained, toymha):
    """seq_len = 16: of a prompt of 12 tokens, 5 more, the last of which is not read."""
    run = trained("data=pydoc")
    _, out, err = toymha(f"run={run}", "prompt=The if state", "overflow=stop", "output=jsonl")
    (found,) = objects(out)
    assert len(found["tokens"]) == 5 and found["stopped"] == "context"
    assert "the context of seq_len=16 tokens is full, so the sample ends" in err


def test_no_new_tokens(trained, toymha):
    run = trained("data=pydoc")
    assert toymha(f"run={run}", "prompt=for", "max_new_tokens=0") == (0, "for\n", "")
    (found,) = objects(toymha(f"run={run}", "prompt=for", "max_new_tokens=0", "output=jsonl")[1])
    assert (found["text"], found["tokens"], found["logprob"]) == ("", [], 0)


MISTAKES = {
    "temperature=-1": "temperature=-1: must be >= 0",
    "top_k=-1": "top_k=-1: must be >= 0",
    "top_p=1.5": "top_p=1.5: must be >= 0 and <= 1",
    "max_new_tokens=-1": "must be >= 0",
    "repetition_penalty=0": "repetition_penalty=0: must be > 0",
    "overflow=slid": "did you mean slide?",
    "prompt=£é": "2 symbols have no token among the",
    "prompt_file=nowhere.txt": "there is no file",
    "prompts=.": "it is a folder",
    "prompt=a prompt_file=b": "prompt= and prompt_file= are given",
    "prompt=The-if-statement,-which overflow=stop": "overflow=stop: a prompt of 23 tokens does not fit seq_len=16",
    "beam=2": "beam search is for pairs of source and target",
    "stop=['']": "stop holds an empty text",
    "trace=true num_samples=2": "trace=true shows the steps of one sample",
    "trace=true max_new_tokens=0": "trace=true shows the steps of one sample",
    "promt=a": "no such option of `toymha generate`; did you mean prompt?",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_told_in_one_line(trained, toymha, words):
    run = trained("data=pydoc")
    before = sorted(run.rglob("*"))
    code, out, err = toymha(f"run={run}", *words.split(" "))
    assert code == 2 and out == "" and err.count("\n") == 1 and MISTAKES[words] in err
    assert sorted(run.rglob("*")) == before


def test_learned_positions_cannot_slide(trained, toymha):
    run = trained("data=pydoc", "pos=learned")
    code, out, err = toymha(f"run={run}", "overflow=slide")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "pos=learned" in err
    assert toymha(f"run={run}", "prompt=The", "max_new_tokens=30")[0] == 0


def test_interrupted_text_stays(trained, toymha, monkeypatch):
    """The line is ended, and the exit status is that of an interrupt."""
    from toymha.model.gpt import GPT

    calls, unembed = [], GPT.unembed

    def interrupted(self, x):
        calls.append(1)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return unembed(self, x)

    monkeypatch.setattr(GPT, "unembed", interrupted)
    code, out, err = toymha(f"run={trained('data=pydoc')}", "prompt=for", "temperature=0")
    assert code == 130 and err.endswith("toymha: interrupted\n") and "Traceback" not in err
    assert out.startswith("for") and out.endswith("\n") and len(out) in (9, 8)


def test_a_trace_is_written(trained, toymha, monkeypatch):
    """With the steps of the sample; text goes to stdout as without."""
    run = trained("data=pydoc")
    words = [f"run={run}", "prompt=for", "max_new_tokens=6", "temperature=0"]
    told = []
    from toymha.generation import trace

    monkeypatch.setattr(trace, "write_trace", lambda *args: told.append(args) or [run / "trace" / "trace.html"])
    code, out, err = toymha(*words, "trace=true")
    ((opened, o, ids, made, folder),) = told
    assert code == 0 and out == toymha(*words)[1] and "trace.html" in err
    assert ids == opened.corpus.tokenizer.encode("for").tolist() and folder == run / "trace" and o.trace
    assert [s.number for s in made] == list(range(6)) and made[0].attention[0].shape == (2, 3)
