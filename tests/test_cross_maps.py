"""`toymha heads` of encoder-decoders: planted attention is reported as what it is, rows are steps of the decoder and
columns are source tokens, no token is markup.

B pairs, H heads, T rows, S columns.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from conftest import make
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from toymha import runs, train
from toymha.analysis import cross, cross_page, plots
from toymha.analysis.cross import cross_study, measure, patterns
from toymha.analysis.cross_page import facts_of, write_cross
from toymha.analysis.results import Head
from toymha.cli import main
from toymha.compose import points
from toymha.console import Console
from toymha.data.corpus import Split
from toymha.data.units import PairTokenizer
from toymha.model.seq2seq import make_model
from toymha.page import render
from toymha.schema import UserError
from toymha.stop import Stop

NASTY = "<img/src=x>"
PAIRS = [("重庆长", f"chóng qìng {NASTY}"), ("庆\x07", "qìng </script>"), ("长 ", "cháng $x$ a&b")]
TEXT = "".join(f"{source}\t{target}\n" for source, target in PAIRS)
SVG = "{http://www.w3.org/2000/svg}"


def split_of(ids: list[int]) -> Split:
    """0 is the mark that begins a document, 1 the separator."""
    tokens = torch.tensor(ids, dtype=torch.uint8)
    starts, separators = ((tokens == mark).nonzero().flatten() for mark in (0, 1))
    return Split(tokens, len(ids) - 1, len(ids) - 1, starts=starts, separators=separators)


def model_of(*words: str, vocab: int = 12):
    """With weights so large that no pattern is even."""
    model = make_model(make("model=encdec", *words), vocab).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.3)
    return model


def opened_of(*words: str):
    """A model that was never trained, and PAIRS."""
    c = make("model=encdec", "data=pinyin", *words)
    by = PairTokenizer.of(TEXT.strip("\n"), "char", "word")
    corpus = SimpleNamespace(name="pairs", tokenizer=by, splits={"val": split_of(by.encode(TEXT).tolist())})
    return SimpleNamespace(config=c, model=model_of(*words, vocab=by.vocab_size), corpus=corpus, run=None)


def plant(model, layer: int, *heads) -> None:
    """Head h of a layer of cross-attention has all of its weight where heads[h](t, S) says; None: even weights."""

    def instead(_module, _inputs, pattern_BHTS):
        out_BHTS = torch.zeros_like(pattern_BHTS)
        for b, S in enumerate((pattern_BHTS[:, 0, 0] > 0).sum(-1).tolist()):  # padding has no weight
            for h, at in enumerate(heads):
                for t in range(pattern_BHTS.shape[2]):
                    if at is None:
                        out_BHTS[b, h, t, :S] = 1 / S
                    else:
                        out_BHTS[b, h, t, min(max(at(t, S), 0), S - 1)] = 1
        return out_BHTS

    model.blocks[layer].cross.pattern.register_forward_hook(instead)


# Numbers

# Sources of 3, 2 and 2 tokens, targets of 3, 2 and 3; nothing ends the last.
THREE = split_of([0, 5, 6, 7, 1, 7, 6, 5, 0, 8, 9, 1, 9, 8, 0, 5, 9, 1, 2, 3, 4])


def test_planted_heads_are_called_what_they_are():
    """4 + 3 + 3 rows, of which 3 + 2 write a token of a pair of equal lengths. The middle row of three is on both
    diagonals."""
    model = model_of()
    plant(model, 1, lambda t, S: S - 1 - t, lambda t, S: t + 1, None, lambda t, S: 0)
    found = measure(model, THREE)
    assert (found.pairs, found.of, found.rows, found.aligned) == (3, 3, 10, 5)
    back, on, even, begin = (found.heads[Head(1, h)] for h in range(4))
    assert (back.antidiagonal, back.diagonal, back.largest, back.entropy) == (1, 1 / 5, 1, 0)
    assert (on.diagonal, on.antidiagonal) == (1, 1 / 5)
    assert back.begin == pytest.approx(3 / 10)  # the last row of each: there the source is used up
    assert begin.begin == 1 and begin.diagonal == begin.antidiagonal == 0
    entropy, share = (4 * math.log(4) + 6 * math.log(3)) / 10, (4 / 4 + 6 / 3) / 10
    assert (even.entropy, even.largest, even.begin) == pytest.approx((entropy, share, share))
    expected = (entropy, share, share, (3 / 4 + 2 / 3) / 5, (3 / 4 + 2 / 3) / 5)
    assert dataclasses.astuple(found.even) == pytest.approx(expected)
    assert list(found.heads) == [Head(layer, h) for layer in range(2) for h in range(4)]


def test_without_pairs_of_equal_lengths_nothing_is_said_of_diagonals():
    found = measure(model_of(), split_of([0, 5, 6, 1, 7, 0, 5, 1, 6, 7]))
    assert {(x.diagonal, x.antidiagonal) for x in found.heads.values()} == {(None, None)}
    study = cross.CrossStudy("x", [], {}, found, [])
    assert {line[3] for line in cross_page.cells(study)[1:]} == {"-"}
    assert "nothing is known of diagonals" in cross_page.statement(study)


def test_the_numbers_do_not_depend_on_the_batch(monkeypatch):
    """So padding counts for nothing. Half of 6 pairs: every second one."""
    split, model = split_of([*THREE.tokens.tolist(), *THREE.tokens.tolist()]), model_of()
    whole = measure(model, split)
    monkeypatch.setattr(cross, "BATCH", 1)
    alone = measure(model, split)
    for head, x in whole.heads.items():
        assert dataclasses.astuple(x) == pytest.approx(dataclasses.astuple(alone.heads[head]), abs=1e-6)
    some = measure(model, split, pairs=3)
    assert (some.pairs, some.of, some.rows) == (3, 6, 4 + 4 + 3)  # pairs 0, 2 and 4; a mark ends the third


# Maps


def test_maps_are_distributions_without_dropout():
    """Rows add up to 1, the decoder sees nothing that it has yet to write; also of a model that is being trained."""
    opened = opened_of("attn_dropout=0.5")
    again = cross_study(opened, "x").pairs
    opened.model.train()
    pairs = cross_study(opened, "x").pairs
    assert opened.model.training and not opened.model.blocks[0].cross.pattern._forward_hooks
    assert [list(p.maps) for p in pairs] == [["cross0", "cross1", "layer0", "layer1", "encoder0", "encoder1"]] + [
        ["cross0", "cross1"]
    ] * 2
    for p, same in zip(pairs, again, strict=True):
        for name, pattern_HTS in p.maps.items():
            rows, columns = p.sides(name)
            assert pattern_HTS.shape == (4, len(rows), len(columns))
            torch.testing.assert_close(pattern_HTS.sum(-1), torch.ones(4, len(rows)), atol=1e-6, rtol=0)
            assert torch.equal(pattern_HTS, same.maps[name])
            if name.startswith("layer"):
                assert (pattern_HTS.triu(1) == 0).all()


def test_a_row_is_the_step_that_writes_its_token():
    """The row of y_t is the last row of what the decoder sees when it has read all before y_t, and nothing else."""
    opened = opened_of()
    by, (p, *_) = opened.corpus.tokenizer, cross_study(opened, "x").pairs
    source, past = by.encode_source("重庆长"), by.encode(TEXT)[4:8].tolist()
    assert p.source == ["<doc>", *"重庆长"] and p.target == ["chóng", "qìng", NASTY, "<doc>"]
    assert p.past == [by.labels()[i] for i in past] == ["<to>", "chóng", "qìng", NASTY]
    for t in range(len(past)):
        heard = patterns(opened.model, torch.from_numpy(source).long()[None], torch.tensor([past[: t + 1]]))
        for name in ("cross0", "cross1"):
            torch.testing.assert_close(heard[name][0, :, -1], p.maps[name][:, t])


def test_the_target_of_a_text_is_what_the_model_writes():
    """As a loop without cache and search writes it."""
    opened = opened_of("seq_len=8")
    by, model = opened.corpus.tokenizer, opened.model
    source, past = torch.from_numpy(by.encode_source("长长庆")).long()[None], [by.separator]
    while len(past) <= 8 and past[-1] != by.begin:
        with torch.inference_mode():
            past.append(int(model(source, torch.tensor([past]))[0, -1, : by.vocab_size].argmax()))
    (p,) = cross_study(opened, "x", "长长庆").pairs
    assert p.source == ["<doc>", "长", "长", "庆"]
    assert p.target == [plots.visible(by.labels()[i]) for i in past[1 : 1 + len(p.target)]]
    assert len(p.target) == len(past) - 1 or (len(p.target) == 7 and "does not end" in p.note)
    assert len(p.maps) == 6
    for text, why in (("", "the source is empty"), ("重x", "'x'"), ("长" * 8, "text= has 9 tokens .* seq_len=8")):
        with pytest.raises(UserError, match=why):
            cross_study(opened, "x", text)


def test_without_cross_attention_there_are_maps_of_self_attention():
    """The encoder is never heard, so that it does not run either."""
    found = cross_study(opened_of("cross_attention=false"), "x")
    assert found.measured is None and {name for p in found.pairs for name in p.maps} == {"layer0", "layer1"}
    assert "no maps of cross-attention" in cross_page.statement(found)
    html = render("cross.html", **facts_of(found, []))
    assert "Heads of cross-attention" not in html and "Self-attention of the encoder" not in html
    assert html.count("<svg") == 3 * 8


# Page and files


def planted() -> cross.CrossStudy:
    """Of the first head the only weight of the row that writes 7 (of 5 rows) lies on `b` (of 7 columns)."""
    pattern_HTS = torch.zeros(1, 5, 7)
    pattern_HTS[0, 2, 1] = 1
    p = cross.Pair("t", list("abcdefg"), list("56789"), list("<5678"), {"cross0": pattern_HTS}, "")
    return cross.CrossStudy("x", [], {"cross0": [Head(0, 0)]}, None, [p])


def test_rows_are_steps_and_columns_source_tokens(tmp_path):
    """In the page and in the pixels of the file, whose labels say which is which."""
    (_, png, svg), _ = write_cross(tmp_path, planted())
    html = (tmp_path / "heads.html").read_text("utf-8")
    assert re.findall(r"<title>(.*)</title></rect>", html) == ["writes 7, reads b: 1.000"]
    (box,) = re.findall(r'class="frame" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', html)
    (cell,) = re.findall(r'class="cell" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)"', html)
    (left, top, width, height), (x, y, side) = map(float, box), map(float, cell)
    assert ((x - left) / side, (y - top) / side, width / side, height / side) == pytest.approx((1, 2, 7, 5))
    pixels = (imread(png) * 255).round().astype(int)[..., :3]
    dark, light, middle = (np.argwhere((pixels == plots.palette()[i]).all(-1)) for i in (255, 0, 128))
    dark, light = (found[found[:, 0] < middle[:, 0].min() - 5] for found in (dark, light))
    corner, size = light.min(0), (light.max(0) - light.min(0) + 1) / (5, 7)
    assert ((dark.mean(0) - corner) // size).tolist() == [2, 1]
    at = {}
    for e in ElementTree.parse(svg).iter(f"{SVG}text"):
        turned = re.match(r"translate\(([\d.]+) ([\d.]+)\)", e.get("transform"))
        at["".join(e.itertext())] = tuple(map(float, turned.groups() if turned else (e.get("x"), e.get("y"))))
    rows, columns = [at[label] for label in "56789"], [at[label] for label in "abcdefg"]
    assert len({x for x, _ in rows}) == len({y for _, y in columns}) == 1  # one below the other, side by side
    assert rows == sorted(set(rows)) and columns == sorted(set(columns))
    assert rows[0][1] < at["writes"][1] < rows[-1][1] and columns[0][0] < at["reads"][0] < columns[-1][0]
    assert "cross L0H0" in at


def test_no_token_is_markup(tmp_path):
    found = cross_study(opened_of(), f"run {NASTY}")
    paths, _ = write_cross(tmp_path, found)
    html = paths[0].read_text("utf-8")
    assert NASTY not in html and "</script>" not in html and "<script" not in html and "\x07" not in html
    assert "&lt;img/src=x&gt;" in html and "\\x07" in html and "重庆长 → chóng qìng" in html and "␣" in html
    assert re.search(r"default-src 'none'; style-src 'unsafe-inline'; img-src data:\">", html)
    assert not re.search(r"(src|href)=\"(?!\./maps/|data:)", html)
    svgs = re.findall(r"<svg .*?</svg>", html, flags=re.DOTALL)
    assert len(svgs) == 3 * 8 + 2 * 8  # cross-attention of three pairs, the others of the first
    for svg in svgs:
        ElementTree.fromstring(svg)
    pictures = [p for p in paths if p.suffix == ".svg"]
    assert len(pictures) == 3 * 2 + 4
    for picture in pictures:
        ElementTree.parse(picture)
    before = {p: p.read_bytes() for p in paths}
    write_cross(tmp_path, found)
    assert {p: p.read_bytes() for p in paths} == before


# The command

TINY = [
    *("model=encdec", "data=reverse", "data.tokens=4000", "data.length=4", "dim=16", "n_head=2", "seq_len=16"),
    *("batch_size=8", "budget.steps=2", "budget.eval_every=2", "budget.eval_tokens=100", "budget.sample_tokens=0"),
    *("budget.eval_pairs=4", "budget.beam=1", "threads=1"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch, Stop() as stop:
        patch.setattr(runs, "git", lambda: None)
        (point,) = points([*TINY, f"output_dir={tmp_path_factory.mktemp('cross')}", "name=a"])
        return train.train_point(point, Console(quiet=True), stop)


@pytest.fixture
def toymha(capsys):
    """`toymha(*words)` in this process -> (exit status, stdout, stderr)."""

    def call(*words):
        code = main([*map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def test_the_command_writes_page_maps_numbers_and_images(run, toymha):
    code, out, err = toymha("heads", f"run={run.path}", "threads=1")
    assert (code, err) == (0, "")
    table = [line.split() for line in out.splitlines()]
    assert ["cross", "entropy", "largest", "diagonal", "antidiagonal", "begin"] in table
    assert {"L0H0", "L0H1", "L1H0", "L1H1"} <= {line[0] for line in table if line}
    found = json.loads((run.path / "heads" / "heads.json").read_text("utf-8"))
    measured = found["cross_attention"]["heads"]["L1H0"]
    assert next(line for line in table if line and line[0] == "L1H0")[1] == f"{measured['entropy']:.3f}"
    assert len(found["pairs"]) == 4
    for p in found["pairs"]:
        assert np.array(p["maps"]["cross1"]).shape == (2, 5, 5)
        np.testing.assert_allclose(np.sum(p["maps"]["cross1"], -1), 1, atol=1e-6)
    accumulator = EventAccumulator(str(run.path), size_guidance={"images": 0})
    accumulator.Reload()
    assert {"maps/pair1_encoder0", "maps/pair1_layer1", "maps/pair4_cross1"} <= set(accumulator.Tags()["images"])
    assert "heads" not in run.summary or run.summary["heads"] is None  # the numbers of decoders alone
    one = toymha("heads", f"run={run.path}", "threads=1", f"text={' '.join(found['pairs'][0]['source'][1:])}")
    assert one[0] == 0
    again = json.loads((run.path / "heads" / "heads.json").read_text("utf-8"))
    assert again["cross_attention"] == found["cross_attention"]
    assert [p["source"] for p in again["pairs"]] == [found["pairs"][0]["source"]]
    assert len(list((run.path / "heads" / "maps").glob("*.png"))) == 6  # those of the pairs before are gone


def test_the_first_weights_can_be_looked_at(run, toymha, tmp_path):
    """Of a run, and of a model without one: the same, where the words are."""
    assert toymha("heads", f"run={run.path}", "steps=0", "threads=1")[0] == 0
    whole = [w for w in TINY if not w.startswith(("budget", "threads", "batch"))]
    code, out, _ = toymha("heads", *whole, f"output_dir={tmp_path}", "threads=1", "seed=0")
    assert code == 0 and "untrained" in out
    (other,) = tmp_path.rglob("heads.json")
    found = [json.loads(p.read_text("utf-8")) for p in (run.path / "heads" / "untrained" / "heads.json", other)]
    assert found[0]["cross_attention"] == found[1]["cross_attention"]


@pytest.mark.parametrize(
    "word", ["parts=census", "probe=scale", "show=8", "tokens=512", "gate_steps=2", "rounds=2", "seed=3"]
)
def test_options_that_say_nothing_are_refused(run, toymha, tmp_path, word):
    before = sorted(run.path.rglob("*"))
    code, out, err = toymha("heads", f"run={run.path}", word, "threads=1")
    name = word.partition("=")[0]
    assert (code, out, err) == (2, "", f"toymha: {name}= says nothing about a model with an encoder; leave it out\n")
    assert sorted(run.path.rglob("*")) == before


def test_prune_is_refused(run, toymha):
    code, out, err = toymha("prune", f"run={run.path}", "share=0.5")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "prune is for models without an encoder" in err
