"""heads.html and the maps: the numbers in them are those of the study, rows are queries, no token is markup."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import logging
import math
import re
import struct
import warnings
import zlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from toymha.analysis import page, plots, tables
from toymha.analysis.page import write_study
from toymha.analysis.results import (
    Census,
    Curve,
    Head,
    Importance,
    Kind,
    Likeness,
    Mean,
    Passage,
    Pruning,
    Study,
    Write,
    Writes,
)
from toymha.page import render

L, H = 2, 3
HEADS = [Head(layer, h) for layer in range(L) for h in range(H)]
N = len(HEADS)
NASTY = "<img src=x onerror=alert(1)>"
LABELS = ["T", "\n", "\t", "\0", "多", "</script>", NASTY, "$x$", "a&b", " ", '"q"', "<!--"]
SHOWN = ["T", "\\n", "\\t", "\\x00", "多", "</script>", NASTY.replace(" ", "␣"), "$x$", "a&b", "␣", '"q"', "<!--"]
LOGGED = [{"step": 5, "head_previous/L0H0": 0.5}]
SVG = "{http://www.w3.org/2000/svg}"


def patterns(T: int, causal: bool = True, heads: int = H, seed: int = 0) -> torch.Tensor:
    """pattern_HTS, random rows that add up to 1."""
    scores = 2 * torch.randn(heads, T, T, generator=torch.Generator().manual_seed(seed))
    if causal:
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
    return scores.softmax(-1)


def passage(labels=LABELS, causal: bool = True) -> Passage:
    return Passage(list(labels), [patterns(len(labels), causal, seed=layer) for layer in range(L)])


def a_study(labels=LABELS, causal: bool = True, **more) -> Study:
    """All parts, with numbers that are easy to find again."""
    scores = [{"previous": Mean(i / 10, 0.004, i - 2.5), "induction": Mean(0.5, 0.01)} for i in range(N)]
    kinds = {h: Kind("induction" if i == 4 else "other", s, i) for i, (h, s) in enumerate(zip(HEADS, scores))}
    matrix = torch.eye(N)
    matrix[1, 4] = matrix[4, 1] = 0.875
    measured = {h: Mean(0.01 * i, 0.0012) for i, h in enumerate(HEADS)}
    logit = Mean(-0.25, 0.013)
    curve = Curve([2.0, 2.0, 2.005, 2.1, 2.2, 2.3, 2.5], order=HEADS)
    chance = Curve([2.0, 2.1, 2.2, 2.3, 2.4, 2.45, 2.5], [2.0] * 6 + [2.5], [2.5] * 7)
    parts = dict(
        passage=passage(labels, causal),
        census=Census(kinds, {"induction": "finds <b>copies</b>", "other": "none"}, {"induction": 0.0125}, 20, 120, 64),
        likeness=Likeness(HEADS, matrix, matrix, [[HEADS[0]], [HEADS[1], HEADS[4]]], [1.5, 2.25]),
        writes=Writes({h: Write(1.5, -0.125, logit) for h in HEADS}, matrix, [0.0, 0.02], {"embedding": -0.5}),
        importance=Importance({"zeroed": measured}, {}, 2.0, 8192, "train"),
        pruning=Pruning({"zeroed": curve, "random": chance}, {"zeroed": 2 / 6, "random": 0.0}, 0.01, "test", 4096),
    )
    return Study(f"run {NASTY}", [("text", NASTY)], HEADS, **(parts | more))


def written(study: Study, along=()) -> str:
    """The page alone."""
    return render("heads.html", **page.facts_of(study, along, ()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Page and maps of the whole study, written once."""
    out = tmp_path_factory.mktemp("heads")
    write_study(out, a_study(), LOGGED)
    return out


def data_in(text: str) -> dict:
    found = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert len(found) == 1
    return json.loads(found[0])


def unpacked(text: str, T: int, causal: bool) -> np.ndarray:
    """Another reader of the packed weights than the page's own."""
    numbers = [n / 65535 for (n,) in struct.iter_unpack("<H", base64.b64decode(text))]
    out, rest = np.zeros((T, T)), iter(numbers)
    for t in range(T):
        for s in range(t + 1 if causal else T):
            out[t, s] = next(rest)
    assert next(rest, None) is None
    return out


def png_pixels(path: Path) -> np.ndarray:
    """(height, width, 4) bytes; raises for a file that is no whole PNG."""
    from matplotlib.image import imread

    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at = 8
    while at < len(data):
        (size,) = struct.unpack(">I", data[at : at + 4])
        assert zlib.crc32(data[at + 4 : at + 8 + size]) == struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0]
        at += 12 + size
    return (imread(path) * 255).round().astype(int)


def texts(path: Path) -> list[str]:
    """What stands in an SVG file, in order; raises for a file that is not well-formed."""
    return ["".join(e.itertext()) for e in ElementTree.parse(path).iter(f"{SVG}text")]


# The numbers


@pytest.mark.parametrize("causal", [True, False])
def test_the_page_holds_every_weight_with_rows_as_queries(causal):
    study = a_study(causal=causal)
    data, T = data_in(written(study)), len(LABELS)
    assert data["causal"] is causal and data["labels"] == SHOWN and data["names"] == [h.name for h in HEADS]
    for packed, head in zip(data["patterns"], HEADS, strict=True):
        weights = unpacked(packed, T, causal)
        assert np.abs(weights - study.passage.patterns[head.layer][head.head].numpy()).max() <= 0.5001 / 65535
        assert np.allclose(weights.sum(1), 1, atol=T / 65535)  # rows, not columns, add up to 1


def test_a_pattern_is_causal_only_if_no_head_looks_ahead():
    seen = passage()
    assert page.causal(seen)
    seen.patterns[1][2, 3, 4] = 1e-4
    assert not page.causal(seen)


def test_the_file_has_the_colours_of_the_weights_where_they_belong(tmp_path):
    """One head whose only weight is that of query 3 on key 1. Below it the bar of the scale has all colours."""
    pattern = torch.zeros(1, 8, 8)
    pattern[0, 3, 1] = 1
    png, svg = plots.write_maps(tmp_path / "layer0", ["L0H0"], pattern.numpy(), list("abcdefgh"), True)
    pixels = png_pixels(png)[..., :3]
    dark, light, middle = (np.argwhere((pixels == plots.palette()[i]).all(-1)) for i in (255, 0, 128))
    dark, light = (found[found[:, 0] < middle[:, 0].min() - 5] for found in (dark, light))
    corner, cell = light.min(0), (light.max(0) - light.min(0) + 1) / 8
    assert ((dark.mean(0) - corner) // cell).tolist() == [3, 1]
    assert texts(svg).count("a") == 2  # as a query and as a key


def test_square_roots_are_coloured_and_what_is_masked_is_white():
    pattern = np.array([[1.0, 0.0], [0.25, 0.75]])
    painted = plots.painted(pattern, causal=True)
    assert (painted[0, 1] == 255).all()
    assert (painted[1, 0] == plots.palette()[128]).all()  # 255 * sqrt(0.25), rounded to even
    assert (plots.painted(pattern, causal=False)[0, 1] == plots.palette()[0]).all()


def test_values_of_matrices_and_the_places_of_their_cells():
    data = data_in(written(a_study()))
    for key in ("pattern", "z", "cosine"):
        values = data["matrices"][key]["values"]
        assert len(values) == N * N and values[1 * N + 4] == values[4 * N + 1] == 0.875 and values[2] == 0
        left, top, width, height = data["matrices"][key]["box"]
        assert 0 < left < left + width < 1 and 0 < top < top + height < 1


def test_what_is_no_number_is_null_in_the_data_and_a_dash_in_tables():
    study = a_study()
    study.writes.cosine[0, 1] = math.nan
    study.likeness.effective[0] = math.nan
    data = data_in(written(study))
    assert data["matrices"]["cosine"]["values"][1] is None
    assert tables.of(study)["effective"][1] == ["layer 0", "3", "–"]


# Files


def test_maps_are_valid_have_all_labels_and_say_which_side_is_which(folder):
    assert sorted(p.name for p in folder.rglob("*.*")) == sorted(
        ["heads.html", *(f"layer{n}.{k}" for n in range(L) for k in ("png", "svg"))]
    )  # and no temporary file is left
    for n in range(L):
        assert png_pixels(folder / f"maps/layer{n}.png").shape[2] == 4
        found = texts(folder / f"maps/layer{n}.svg")
        assert found.count("query") == found.count("key") == H
        for label in SHOWN:
            assert found.count(plots.cut(label)) == 2 * H
    assert {"L1H1 · induction", "zeroed 0.0400 ± 0.0012"} <= set(found)


def test_the_same_study_gives_the_same_bytes(folder, tmp_path):
    paths, _ = write_study(tmp_path, a_study(), LOGGED)
    assert len(paths) == 1 + 2 * L
    for path in paths:
        assert path.read_bytes() == (folder / path.relative_to(tmp_path)).read_bytes()


def test_a_layer_without_heads_has_no_file_and_the_others_keep_their_numbers(tmp_path):
    heads = [Head(1, 0), Head(1, 2)]
    patterns_ = [patterns(4, heads=0), patterns(4, heads=2)]
    study = Study("pruned", [], heads, Passage(list("abcd"), patterns_))
    paths, _ = write_study(tmp_path, study)
    assert [p.name for p in paths[1:]] == ["layer1.png", "layer1.svg"]
    text = paths[0].read_text("utf-8")
    assert "2 heads in 1 layer; layer 0 without any" in text and "Layer 0" not in text
    assert data_in(text)["names"] == ["L1H0", "L1H2"]
    assert '--column: 3" aria-pressed' in text  # head 2 stands in the third column


def test_a_text_that_is_too_long_is_cut_and_the_page_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "MOST_TOKENS", 8)
    study = a_study(census=None, likeness=None, writes=None, importance=None, pruning=None)
    paths, notes = write_study(tmp_path, study)
    text = paths[0].read_text("utf-8")
    assert "first 8 of the text's 12 tokens" in notes[0] and html.escape(notes[0], quote=False) in html.unescape(text)
    data = data_in(text)
    assert data["labels"] == SHOWN[:8]
    assert np.allclose(unpacked(data["patterns"][0], 8, True), study.passage.patterns[0][0, :8, :8], atol=1e-5)


# Labels and fonts


def test_nothing_in_a_label_is_invisible_and_what_is_visible_stays():
    assert list(map(plots.visible, LABELS)) == SHOWN
    assert list(map(plots.visible, SHOWN)) == SHOWN  # labels of the tokenizer are visible already
    assert plots.visible("\u200b\ud800") == "\\u200b\\ud800"


def test_cut_counts_a_chinese_character_as_two():
    assert plots.cut("a" * 10) == "a" * 10 and plots.cut("a" * 11) == "a" * 9 + "…"
    assert plots.cut("多" * 5) == "多" * 5 and plots.cut("多" * 6) == "多" * 4 + "…"


def test_characters_that_no_font_has_are_told_once_and_by_nothing_else(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(plots, "HAN", ())
    plots.families.cache_clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            paths, notes = write_study(tmp_path, a_study())
    finally:
        plots.families.cache_clear()
    assert len(notes) == 1 and " 多:" in notes[0] and "PNG" in notes[0]
    assert not caplog.records
    assert texts(paths[2]).count("多") == 2 * H  # the reader's fonts draw it


# The page


def test_no_token_and_no_name_is_markup():
    text = written(a_study())
    assert NASTY not in text and "<b>copies" not in text and "&lt;img" in text
    assert text.count("<script") == text.count("</script>") == 2 and "<!--" not in text
    assert "<\\/" not in text and "\\u003c/script>" in text


def test_the_policy_names_the_script_and_nothing_else_may_run(folder):
    text = (folder / "heads.html").read_text("utf-8")
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith("default-src 'none';") and policy.endswith(f"; script-src 'sha256-{digest}'")
    assert script.startswith('"use strict"')
    markup = re.sub(r"<script.*?</script>|<style>.*?</style>", "", text, flags=re.DOTALL)
    assert not re.search(r"<[^>]*\son\w+=", markup)
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|fetch\(|https?://(?!www\.w3)", script
    )
    links = re.findall(r'(?:href|src)="([^"#][^"]*)"', markup)
    assert {x for x in links if not x.startswith("data:")} == {
        f"./maps/layer{n}.{k}" for n in range(L) for k in ("png", "svg")
    }
    ids = re.findall(r'\bid="([^"]*)"', markup)
    assert len(ids) == len(set(ids))


def test_a_page_without_a_script_allows_none():
    text = render("index.html", entries=[], tally=[], about={})
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:\"" in text and "<script" not in text


def test_every_part_has_its_section_and_what_is_missing_has_none():
    sections = {"passage": {"maps", "lines"}} | {p: {p} for p in ("likeness", "writes", "importance", "pruning")}
    sections["census"] = {"kinds"}
    everything = set().union(*sections.values())
    found = set(re.findall(r'<section id="(\w+)">', written(a_study())))
    assert found == everything
    for part, its in sections.items():
        text = written(a_study(**{part: None}))
        assert set(re.findall(r'<section id="(\w+)">', text)) == everything - its
    bare = written(Study("bare", [], []))
    assert "0 heads in 0 layers" in bare and "<section id" not in bare


def test_curves_along_training_are_drawn_for_logged_scores_only():
    tags = [f"head_{score}/{h.name}" for score in ("previous", "second", "r by offset") for h in HEADS]
    rows = [{"step": s, "loss/val": 2.0} | dict.fromkeys(tags, s / 100) for s in (0, 50, 100)]
    text = written(a_study(), rows)
    section = text[text.index('<section id="along">') : text.index('<section id="likeness">')]
    assert re.findall(r"<h3>(.*?)</h3>", section) == ["previous"] * L
    assert len(re.findall(r"<svg viewBox=\"0 0 2", section)) == L
    assert 'id="along"' not in written(a_study(), [{"step": 0, "loss/val": 2.0}])


def test_numbers_of_the_study_stand_in_the_tables():
    study = a_study()
    t = tables.of(study)
    assert t["kinds"][5] == ["L1H1", "induction", "0.400 ± 0.004 (+1.5)", "0.500 ± 0.010", "4"]
    assert t["rules"][1] == ["induction", "1", "1.2 %", "finds <b>copies</b>"]
    assert t["rules"][2][2] == "–"
    assert t["pairs"][1] == ["L0H1, L1H1", "0.875", "0.875"]
    assert t["writes"][1] == ["L0H0", "other", "1.50", "−12.5 %", "−0.250 ± 0.013"]
    assert t["importance"][3] == ["L0H2", "other", "0.0200 ± 0.0012"]
    assert t["removable"][1:] == [["zeroed", "2 of 6", "33 %"], ["random", "0 of 6", "0 %"]]
    assert t["orders"][1] == ["zeroed", "L0H0 L0H1 L0H2 L1H0 L1H1 L1H2"]
    text = html.unescape(written(study))
    assert "2 of 6 heads can go before perplexity rises by 1 %, the least important first (by zeroed)" in text
    assert "in random order 0" in text
    assert "Nearly the same: L0H1, L1H1." in text
    for table in t.values():
        assert all(len(line) == len(table[0]) for line in table)
        assert all(f">{cell}<" in text for line in table for cell in line if cell and table is not t["orders"])


@pytest.mark.parametrize(
    ("mean", "digits", "said"),
    [
        (Mean(0.41234, 0.0031, 8.06), 4, "0.4123 ± 0.0031 (+8.1)"),
        (Mean(-0.00001, 0.5), 2, "0.00 ± 0.50"),
        (Mean(-1.5, math.nan, -250.4), 1, "−1.5 (< −100)"),
        (None, 2, "–"),
    ],
)
def test_a_mean_in_words(mean, digits, said):
    assert tables.said(mean, digits) == said


def test_digits_follow_the_standard_errors():
    assert tables.digits_of([Mean(5.0, 0.013), Mean(5.0, 0.02), Mean(1.0, math.nan)]) == 3
    assert tables.digits_of([Mean(123.4, 20.0)]) == 0
    assert tables.digits_of([Mean(0.0123, math.nan)]) == 4
    assert tables.digits_of([Mean(0.0, 0.0)]) == 2


def test_the_page_opens_with_the_most_important_head():
    assert tables.first(a_study()) == N - 1
    assert tables.first(a_study(importance=None)) == 4  # the only induction head


def test_rise_of_perplexity_is_in_percent():
    """A loss that rises by ln 2 doubles perplexity."""
    assert plots.risen([1.0, 1.0 + math.log(2), 1.0 - math.log(2)], 1.0) == pytest.approx([0, 100, -50])


def test_a_page_of_the_usual_size_is_light():
    """4 layers of 8 heads on 128 tokens: 8256 weights of two bytes each."""
    heads = [Head(layer, h) for layer in range(4) for h in range(8)]
    seen = Passage(["a"] * 128, [patterns(128, heads=8, seed=layer) for layer in range(4)])
    data = page.data_of(Study("large", [], heads, seen), {})
    assert len(page._json(data)) < 800_000


def test_matplotlib_is_silent_about_fonts_only_while_figures_are_drawn(caplog):
    log = logging.getLogger("matplotlib.font_manager")
    before = log.level
    with plots._unspoken():
        log.warning("findfont: Failed to find font weight normal")
    assert not caplog.records and log.level == before
