"""trace.html and trace.txt: their numbers are those of the steps, no token is markup, no script is needed to read."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import string
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import PRUNED, VOCAB, built, make

from toymha import cost
from toymha.analysis.capture import capture
from toymha.analysis.plots import columns
from toymha.data.tokenizer import ByteTokenizer, CharTokenizer, WordTokenizer
from toymha.generation import trace_page, trace_text
from toymha.generation.decoding import Step, steps
from toymha.generation.sampling import Rules, keep
from toymha.generation.trace import candidates_of, remover, row_names, rules, stages_of, trace_of, write_trace
from toymha.generation.trace_text import bar, percent, under, wrapped
from toymha.options import GenerateOptions

NASTY = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(1)>", "<!--", "{{ 7 * 7 }}", "'\"&amp;", "a"]
PROBABILITIES = [0.5, 0.25, 0.125, 0.125]
WIDEST = 88  # columns of a line of text


def removed(step, rules, seen):
    """Token -> the rule that removed it."""
    stages = stages_of(step, rules, seen)
    return {i: rule for i in range(len(step.logits_V)) if (rule := remover(stages, i))}


def opened_of(tokenizer, *words):
    """What a trace reads of an opened run."""
    return SimpleNamespace(config=make(*words), corpus=SimpleNamespace(tokenizer=tokenizer))


def options(**more):
    return GenerateOptions(run="outputs/a <run>", **{"temperature": 1.0} | more)


def patterns(c, S, seed=0):
    """For each layer pattern_HS, random rows that add up to 1."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(len(c.heads_of(n)), S, generator=g).mul(2).softmax(-1) for n in range(c.n_layer)]


def a_step(c, P, number=0, token=0, logits_V=None, o=None, seen=(), start=0, **more):
    """A step with a cache; its logits are ln of PROBABILITIES where they are not given."""
    o, length = o or options(), P + number
    logits_V = torch.tensor(PROBABILITIES).log() if logits_V is None else logits_V
    seen_V = torch.zeros(len(logits_V), dtype=torch.bool)
    seen_V[list(seen)] = True
    acting = Rules(o.temperature, o.top_k, o.top_p, o.min_p, o.repetition_penalty)
    own = dict(new=1 if number else P, cache_tokens=length, cache_bytes=cost.kv_bytes(c, length), context_start=start)
    own |= dict(logits_V=logits_V, kept_V=keep(logits_V, acting, seen_V), token=token)
    own["attention"] = patterns(c, length - start, seed=number)
    return Step(number, "decode" if number else "prefill", **own | more)


def written(tmp_path, opened, prompt, made, o=None):
    """(page, text)."""
    paths = write_trace(opened, o or options(), prompt, made, tmp_path / "trace")
    assert [p.name for p in paths] == ["trace.html", "trace.txt"]
    assert sorted(p.name for p in (tmp_path / "trace").iterdir()) == ["trace.html", "trace.txt"]
    return [p.read_text("utf-8") for p in paths]


def data_in(page):
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, flags=re.DOTALL)
    return json.loads(found)


def weights_in(step):
    """Another reader of the packed weights: rows over the cells that are shown."""
    across = step["query"] + 1 - step["start"]
    return np.array([(n / 255) ** 2 for n in base64.b64decode(step["rows"])]).reshape(-1, across)


def markup(page):
    """The page without script and style."""
    return re.sub(r"<script.*?</script>|<style>.*?</style>", "", page, flags=re.DOTALL)


def table_of(page, number):
    """The candidates of a step as texts, one list a row."""
    article = page[page.index(f'id="step{number}"') :]
    rows = re.findall(r"<tr.*?</tr>", article[: article.index("</article>")], flags=re.DOTALL)[1:]
    cells = [re.findall(r"<td.*?</td>", row, flags=re.DOTALL) for row in rows]
    return [[html.unescape(re.sub("<[^>]*>", "", cell)) for cell in row] for row in cells]


ABC = CharTokenizer("abcd")


# Numbers


def test_page_and_text_say_the_probabilities_that_were_worked_out_by_hand(tmp_path):
    """Of 1/2, 1/4, 1/8, 1/8 the two likeliest are left by top_k=2: 2/3 and 1/3."""
    opened, o = opened_of(ABC, "n_layer=1"), options(top_k=2)
    page, text = written(tmp_path, opened, [3, 3, 3], [a_step(opened.config, 3, o=o, token=1)], o)
    assert table_of(page, 0) == [
        ["a", "50.0 %", "66.7 %"],
        ["bchosen", "25.0 %", "33.3 %"],
        ["c", "12.5 %", "out by top_k"],
        ["d", "12.5 %", "out by top_k"],
    ]
    assert page.count("<s>c</s>") == page.count("<s>d</s>") == 1 and "<s>a</s>" not in page
    assert "2 of 4" in page and "top_k=2" in page
    lines = text.splitlines()
    assert any(re.fullmatch(r"   a +50\.0 % +█{10} +66\.7 % +█{13}▍", line) for line in lines)
    assert any(re.fullmatch(r">  b +25\.0 % +█{5} +33\.3 % +█{6}▋", line) for line in lines)
    assert sum("out by top_k" in line for line in lines) == 2


def test_the_rule_that_removed_a_token_is_the_first_that_did():
    """Of 0.4, 0.3, 0.2, 0.06, 0.04: top_k=4 takes the last; of the others' sum, 0.96, the first three have 0.9375, so
    that top_p=0.9 takes the fourth; min_p=0.6 the third, which is half as likely as the first."""
    logits_V = torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04]).log()
    o = options(top_k=4, top_p=0.9, min_p=0.6)
    step = a_step(make(), 1, logits_V=logits_V, o=o)
    found = removed(step, Rules(1.0, 4, 0.9, 0.6), [])
    assert found == {4: "top_k", 3: "top_p", 2: "min_p"}
    assert rules(o) == "temperature=1.0 top_k=4 top_p=0.9 min_p=0.6"
    assert removed(step, Rules(0.0), []) == dict.fromkeys([1, 2, 3, 4], "temperature")
    # a penalty of 4 multiplies ln 0.4 by 4: 0.4 ** 4 = 0.0256 makes the first the least likely
    assert removed(step, Rules(1.0, top_k=4, repetition_penalty=4.0), [0]) == {0: "top_k"}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_p": 0.7}, {"repetition_penalty": 3.0}, {"temperature": 0.0}])
def test_each_column_adds_up_to_one_and_what_is_struck_out_is_what_was_removed(seed, more):
    o, g = options(**more), torch.Generator().manual_seed(seed)
    logits_V = 3 * torch.randn(50, generator=g)
    seen = torch.randint(50, (9,), generator=g).tolist()
    kept_V = a_step(make(), 9, logits_V=logits_V, o=o, seen=seen).kept_V
    token = int(kept_V.isfinite().nonzero()[-1])
    step = a_step(make(), 9, logits_V=logits_V, o=o, seen=seen, token=token)
    names = [f"token {i}" for i in range(50)]
    acting = Rules(**{"temperature": 1.0} | more)
    out = removed(step, acting, seen)
    assert set(out) == set(step.kept_V.isneginf().nonzero().flatten().tolist())
    found, others = candidates_of(step, names, stages_of(step, acting, seen))
    assert math.fsum(c.before for c in [*found, others]) == pytest.approx(1)
    assert math.fsum(c.after or 0 for c in [*found, others]) == pytest.approx(1)
    assert [c.label for c in found if c.chosen] == [names[token]]
    assert all((c.after is None) == (names.index(c.label) in out) == bool(c.by) for c in found)
    assert [c.before for c in found] == sorted((c.before for c in found), reverse=True)
    best = names[int(step.kept_V.argmax())]
    assert best in [c.label for c in found] and 10 <= len(found) <= 11 and others.label == f"{50 - len(found)} others"


def test_a_chosen_token_that_is_unlikely_is_shown_too():
    logits_V = torch.arange(30.0, 0, -1)
    found, others = told(a_step(make(), 2, logits_V=logits_V, token=25), [])
    assert [c.label for c in found] == [*map(str, range(10)), "25"] and found[-1].chosen and others.label == "19 others"


def test_what_the_rules_raise_is_shown_though_it_was_unlikely_before():
    """A penalty makes the ten likeliest, which are in the text, less likely than the others: two of these come up."""
    logits_V = torch.tensor([2.0] * 10 + [1.9, 1.8] + [-5.0] * 18)
    o = options(repetition_penalty=10.0)
    found, others = told(a_step(make(), 10, logits_V=logits_V, o=o, seen=range(10), token=10), range(10), o)
    assert {"10", "11"} <= {c.label for c in found} and others.after < 0.3
    assert next(c for c in found if c.label == "10").after > 0.2


def told(step, seen, o=None):
    """Its candidates, by names that are their numbers."""
    names = [str(i) for i in range(len(step.logits_V))]
    return candidates_of(step, names, stages_of(step, Rules.of(o or options()), seen))


def test_cache_and_reading_of_prefill_and_decode(tmp_path):
    """2 layers of 2 KV heads of 8 + 8 numbers of 4 bytes: 256 bytes a token. 5 tokens, then 1 and 1; 5 + 6 + 7 without
    a cache."""
    opened = opened_of(ABC, "n_layer=2", "n_kv_head=2")
    page, text = written(tmp_path, opened, [0, 1, 2, 3, 0], [a_step(opened.config, 5, n, n) for n in range(3)])
    for said in (page, text):
        assert "3 tokens after a prompt of 5" in said
        assert "The model read 7 tokens in 3 steps. Without a cache it would have read 18." in said
        assert "256 bytes = 4 key/value heads × (8 + 8) numbers × 4 bytes" in said
        found = [
            said.index(x)
            for x in ("5 tokens: the prompt", "0 → 1,280", "1 token: “a”", "1,280 → 1,536", "1,536 → 1,792")
        ]
        assert found == sorted(found)
    assert re.search(r"tokens in the cache +5 → 6\n", text) and re.search(r"without a cache +7 tokens to read\n", text)
    trace = trace_of(opened, options(), [0, 1, 2, 3, 0], [a_step(opened.config, 5, n, n) for n in range(3)])
    assert (trace.read, trace.again, trace.held) == ([5, 1, 1], [5, 6, 7], [1280, 1536, 1792])


def test_without_a_cache_the_page_says_that_there_is_none(tmp_path):
    opened = opened_of(ABC)
    made = [a_step(opened.config, 4, n, new=4 + n, cache_tokens=0, cache_bytes=0) for n in range(2)]
    page, text = written(tmp_path, opened, [0] * 4, made, options(cache=False))
    for said in (page, text):
        assert "The model read 9 tokens in 2 steps, the text so far in each." in said
        assert "5 tokens: the text so far" in said and "bytes in the cache" not in said
    assert "Cache, in KiB" not in page and page.count("<figure>") == 1


@pytest.mark.parametrize("words", ["n_layer=2", *PRUNED])
def test_cells_are_the_visible_tokens_and_their_weights(tmp_path, words):
    """Each row adds up to 1; the first is the mean over all heads, that of a layer the mean over its own."""
    opened = opened_of(ABC, *words.split())
    c, P = opened.config, 6
    made = [a_step(c, P, n, start=max(0, n - 2)) for n in range(5)]
    data = data_in(written(tmp_path, opened, [0] * P, made)[0])
    assert data["names"] == row_names(c) and data["begin"] == 0
    for step, shown in zip(made, data["steps"], strict=True):
        assert (shown["start"], shown["query"]) == (step.context_start, P + step.number - 1)
        found = weights_in(shown)
        assert found.shape == (len(data["names"]), P + step.number - step.context_start)
        assert np.allclose(found.sum(1), 1, atol=0.02)
        every = torch.cat(step.attention).numpy()
        heads = [i for i, name in enumerate(data["names"]) if name.startswith("L")]
        assert [data["names"][i] for i in heads] == [f"L{n}H{h}" for n in range(c.n_layer) for h in c.heads_of(n)]
        assert np.abs(found[heads] - every).max() < 1 / 255  # half a unit of the root, twice, at a weight of 1
        assert np.abs(found[0] - every.mean(0)).max() < 1 / 255
        for n in range(c.n_layer):
            if c.heads_of(n):
                mean = step.attention[n].numpy().mean(0)
                assert np.abs(found[data["names"].index(f"layer {n}")] - mean).max() < 1 / 255


def test_the_words_about_attention_are_those_of_the_weights(tmp_path):
    opened = opened_of(ABC, "n_layer=1", "n_head=2")
    pattern_HS = torch.tensor([[0.5, 0.2, 0.3], [0.1, 0.8, 0.1]])
    page, text = written(tmp_path, opened, [0, 1, 2], [a_step(opened.config, 3, attention=[pattern_HS])])
    said = re.sub(" +", " ", html.unescape(re.sub("<[^>]*>", "", markup(page))))
    assert "“c” (2) looks most at “b” (1) 0.50, “a” (0) 0.30, “c” (2) 0.20." in said
    assert "L0H0 a (0) 0.50  L0H1 b (1) 0.80" in text
    assert "a b c\n▅ ▆ ▄\n" in text  # 8 sqrt(w) = 4.4, 5.7, 3.6, where ▁ stands for 0 to 1
    step = a_step(opened.config, 4, attention=[pattern_HS], start=1)  # without the first of four
    (view,) = trace_of(opened, options(), [0, 1, 2, 3], [step]).views
    assert [(x.label, x.position) for x in view.looks] == [("c", 2), ("b", 1), ("d", 3)]
    assert [(x.label, x.position) for x in view.strongest[2:]] == [("b", 1), ("c", 2)]


def test_attention_over_other_tokens_than_the_visible_ones_is_an_error(tmp_path):
    opened = opened_of(ABC)
    with pytest.raises(ValueError, match="step 1: 4 weights a head, and 5 tokens"):
        write_trace(
            opened, options(), [0] * 4, [a_step(opened.config, 4, 1, attention=patterns(opened.config, 4))], tmp_path
        )
    assert not list(tmp_path.iterdir())


def test_steps_without_attention_have_no_cells(tmp_path):
    opened = opened_of(ABC)
    page, text = written(tmp_path, opened, [0, 1], [a_step(opened.config, 2, attention=None)])
    assert "Every head" not in markup(page) and "looks most" not in page and "most of each head" not in text
    assert data_in(page)["steps"][0]["rows"] == ""


# A real model


def real(c, rules, P, length, **more):
    """A model, a prompt of P tokens and the steps after it."""
    model = built(c)
    prompt = torch.randint(VOCAB, (P,), generator=torch.Generator().manual_seed(3)).tolist()
    made = [s for (s,) in steps(model, [prompt], rules, VOCAB, [0], length, attention=True, **more) if s]
    return model, prompt, made


LETTERS = CharTokenizer.of(string.ascii_letters[:VOCAB])


def test_the_steps_of_every_model(tmp_path, model_config):
    """Cells are what a pass without a cache attends to, to the fineness of a byte; the cache has the formula's bytes.
    The context of 16 is full at the fourth step, and moves on."""
    c = model_config
    model, prompt, made = real(c, Rules(1.0, top_k=5), 13, 6)
    opened = SimpleNamespace(config=c, corpus=SimpleNamespace(tokenizer=LETTERS))
    o = options(top_k=5, max_new_tokens=6)
    page, text = written(tmp_path, opened, prompt, made, o)
    data, ids = data_in(page), [*prompt, *(s.token for s in made)]
    assert [s.context_start for s in made] == [0, 0, 0, 0, 1, 2]
    for step, shown in zip(made, data["steps"], strict=True):
        seen = ids[step.context_start : 13 + step.number]
        heard = capture(model, torch.tensor([seen]), "pattern")["pattern"]
        expected = torch.cat([p[0, :, -1] for p in heard]).numpy()
        found = weights_in(shown)[[n.startswith("L") for n in data["names"]]]
        assert found.shape == (len(expected), len(seen)) and np.abs(found - expected).max() < 1.01 / 255
        assert step.cache_bytes == cost.kv_bytes(c, step.cache_tokens)
        assert table_of(page, step.number)[-1][0] == f"{VOCAB - len(table_of(page, step.number)) + 1} others"
        left = [row for row in table_of(page, step.number) if not row[2].startswith("out")]
        assert len(left) == 5 and sum(float(row[2].removesuffix(" %")) for row in left) == pytest.approx(100, abs=0.3)
    assert "From step 4 on" in page and "each token left stands" in page
    assert text.count("\nstep ") == 6


def test_a_context_that_slides_keeps_its_cache_and_hides_what_left_it(tmp_path):
    c = make("pos=rope", "n_layer=1")
    _, prompt, made = real(c, Rules(0.0), 14, 5, overflow="slide")
    opened = SimpleNamespace(config=c, corpus=SimpleNamespace(tokenizer=LETTERS))
    page, text = written(tmp_path, opened, prompt, made, options(temperature=0.0, overflow="slide"))
    assert [s.new for s in made] == [14, 1, 1, 1, 1] and "tokens left stand" not in page
    assert [(s["start"], s["query"]) for s in data_in(page)["steps"]] == [(0, 13), (0, 14), (0, 15), (1, 16), (2, 17)]
    assert "The model read 18 tokens in 5 steps. Without a cache it would have read 80." in text  # 14 + ... + 18
    assert text.count("16 → 16\n") == 2 and "the last 16 of 18 tokens" in text
    assert "temperature=0.0: always the likeliest" in text and "100.0 %" in text


# Text that is hostile, Chinese, or invisible


def test_no_token_and_no_path_is_markup(tmp_path):
    words = WordTokenizer(NASTY)
    opened, logits_V = opened_of(words), torch.zeros(len(NASTY))
    o = options(top_k=1)  # so that the others are struck through
    made = [a_step(opened.config, 6, n, n, logits_V=logits_V, o=o) for n in range(6)]
    page, _ = written(tmp_path, opened, list(range(6)), made, o)
    bare = markup(page)
    for word in NASTY[:3]:
        assert word not in bare and html.escape(word, quote=False) in bare.replace("&#34;", '"').replace("&#39;", "'")
    assert "<run>" not in page and "a &lt;run&gt;" in page and "{{ 7 * 7 }}" in bare
    assert page.count("<script") == page.count("</script>") == 2 and "alert(1)</script>" not in page
    assert not re.search(r"<[^>]*\son\w+=", bare) and "<!--" not in page
    assert not re.search("[<>]", json.dumps(data_in(page)))


def test_control_characters_are_named_and_chinese_is_itself(tmp_path):
    tokenizer = CharTokenizer.of("\x00\x1b\n 春天来了\u200b\u202e")
    ids = tokenizer.encode("春天 来了\n\x1b\x00\u202e\u200b").tolist()
    opened, logits_V = opened_of(tokenizer), torch.zeros(tokenizer.vocab_size)
    made = [a_step(opened.config, len(ids), n, n, logits_V=logits_V) for n in range(tokenizer.vocab_size)]
    page, text = written(tmp_path, opened, ids, made)
    for said in (page, text):
        assert all(c.isprintable() or c == "\n" for c in said)
        assert "春天␣来了\\n\\x1b\\x00\\u202e\\u200b" in said
    strip = page[page.index('class="strip"') : page.index("</article>")]
    assert strip.count("<br>") == 2  # after the line end in the prompt, and after that which was made
    assert '<span data-at="0">春</span>' in strip and f'<a data-at="{len(ids)}" href="#step0">\\x00</a>' in strip


def test_bytes_that_are_no_character_have_labels(tmp_path):
    opened = opened_of(ByteTokenizer())
    step = a_step(opened.config, 3, token=0xE4, logits_V=torch.zeros(256))
    page, text = written(tmp_path, opened, list("春".encode()), [step])
    assert "Step 0: prefill, <b>“\\xe4”</b>" in page and "step 0: \\xe4" in text and "\\xe6 \\x98 \\xa5\n" in text


def test_lines_of_a_terminal_count_chinese_as_two_columns():
    """Each block stands under its token; no line is wider than a terminal."""
    labels = ["春", "a", "\\n", "来了"] * 30
    lines = under(labels, [0.0, 0.25, 0.5, 1.0] * 30)
    assert all(columns(line) <= WIDEST for line in lines) and len(lines) % 2 == 0 and len(lines) > 2
    tokens, blocks = lines[:2]
    assert tokens.startswith("春 a \\n 来了 春") and blocks.startswith("▁▁ ▅ ▆▆ ████ ▁▁")
    assert columns(tokens) == columns(blocks)
    assert " ".join(lines[::2]).split(" ") == labels
    assert all(columns(line) <= WIDEST for line in wrapped(["L0H0 春 (0) 0.50"] * 40))


@pytest.mark.parametrize(
    ("p", "said", "drawn"),
    [
        (0, "0.0 %", ""),
        (0.0004, "< 0.1 %", ""),
        (0.0005, "0.1 %", ""),
        (0.31249, "31.2 %", "██████▎"),
        (1, "100.0 %", "█" * 20),
    ],
)
def test_a_probability_in_words_and_as_a_bar(p, said, drawn):
    assert percent(p) == said and bar(p) == drawn.ljust(20)


# The page


def test_all_can_be_read_without_the_script(tmp_path):
    """Every token that was made leads to its step, which is there and hidden from nobody."""
    opened = opened_of(ABC)
    made = [a_step(opened.config, 3, n, n % 4) for n in range(6)]
    bare = markup(written(tmp_path, opened, [0, 1, 2], made)[0])
    links, articles = re.findall(r'href="#(step\d+)"', bare), re.findall(r'<article class="step" id="(step\d+)">', bare)
    assert links == articles == [f"step{n}" for n in range(6)]
    assert all(len(table_of(bare, n)) == 4 for n in range(6)) and bare.count("looks most at") == 6
    ids = re.findall(r'\bid="([^"]*)"', bare)
    assert len(ids) == len(set(ids))


def test_the_policy_names_the_script_and_nothing_else_may_run(tmp_path):
    opened = opened_of(ABC)
    page, _ = written(tmp_path, opened, [0, 1, 2], [a_step(opened.config, 3)])
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    (script,) = re.findall(r"<script>(.*?)</script>", page, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none';") and policy.endswith(f"; script-src 'sha256-{digest}'")
    bad = r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|fetch\(|https?://"
    assert script.startswith('"use strict"') and not re.search(bad, script)
    links = re.findall(r'(?:href|src)="([^"]*)"', re.sub(r"<svg.*?</svg>", "", markup(page), flags=re.DOTALL))
    assert all(link == "data:," or link.startswith("#step") for link in links)


def test_the_same_steps_give_the_same_bytes(tmp_path):
    opened = opened_of(ABC)
    made = [a_step(opened.config, 3, n) for n in range(3)]
    assert written(tmp_path / "a", opened, [0, 1, 2], made) == written(tmp_path / "b", opened, [0, 1, 2], made)


def large(P, N, **sizes):
    words = [f"{k}={v}" for k, v in ({"n_layer": 4, "n_head": 8, "seq_len": 4096} | sizes).items()]
    opened = opened_of(CharTokenizer.of(string.printable[:60]), *words)
    g = torch.Generator().manual_seed(0)
    return opened, [a_step(opened.config, P, n, logits_V=torch.randn(60, generator=g)) for n in range(N)]


def test_a_page_of_the_usual_size_is_light(tmp_path):
    """4 layers of 8 heads, 100 steps after a prompt of 100: contexts of 150 tokens in the mean."""
    opened, made = large(100, 100)
    page, text = written(tmp_path, opened, [0] * 100, made)
    assert len(page.encode()) < 2_000_000 and len(text.encode()) < 500_000
    assert "mean over all heads only" not in page and all(weights_in(s).shape[0] == 37 for s in data_in(page)["steps"])


def test_more_steps_than_two_hundred_are_cut_and_the_page_says_so(tmp_path):
    opened, made = large(3, 205, n_layer=1, n_head=2)
    page, text = written(tmp_path, opened, [0] * 3, made)
    assert "The first 200 of 205 steps are shown." in page and "The first 200 of 205 steps are shown." in text
    assert 'id="step199"' in page and 'id="step200"' not in page and "205 tokens after a prompt of 3" in page
    assert "The model read 207 tokens in 205 steps" in page and text.count("\nstep ") == 200


def test_what_a_page_has_no_room_for_is_left_out_and_said(tmp_path, monkeypatch):
    """Rows of 5, 6, 7 and 8 cells, 4 of them: 26 cells of means and 15 more of the first step fit into 41."""
    monkeypatch.setattr(trace_page, "ROOM", 41)
    opened = opened_of(ABC, "n_layer=1", "n_head=2")
    page, _ = written(tmp_path, opened, [0] * 5, [a_step(opened.config, 5, n) for n in range(4)])
    assert [len(weights_in(s)) for s in data_in(page)["steps"]] == [4, 1, 1, 1]
    assert "From step 1 on, attention is shown as the mean over all heads only." in page


def test_the_text_draws_the_nearest_tokens_and_adds_up_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_text, "NEAREST", 2)
    opened = opened_of(ABC, "n_layer=1", "n_head=1")
    step = a_step(opened.config, 4, attention=[torch.tensor([[0.5, 0.25, 0.25, 0.0]])])
    text = written(tmp_path, opened, [0, 1, 2, 3], [step])[1]
    assert "2 earlier tokens, together 0.75; then:\nc d\n▅ ▁\n" in text


def test_of_a_long_prompt_the_end_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_page, "FARTHEST", 4)
    opened = opened_of(ABC, "n_layer=1", "n_head=2", "seq_len=16")
    made = [a_step(opened.config, 10, n, start=5 + n) for n in range(3)]
    page, _ = written(tmp_path, opened, [0] * 10, made)
    data = data_in(page)
    assert data["begin"] == 6 and "The page begins at token 6 of the prompt." in page
    assert re.findall(r'data-at="(\d+)"', page) == [str(n) for n in range(6, 13)]
    assert [(s["start"], s["query"]) for s in data["steps"]] == [(0, 3), (0, 4), (1, 5)]
    kept = made[0].attention[0][:, 1:].numpy()  # position 5 is visible and stands before the page's begin
    assert np.abs(weights_in(data["steps"][0])[2:] - kept).max() < 1 / 255
