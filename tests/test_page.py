"""The pages: one file each, the same bytes for the same runs, nothing unescaped, numbers that agree."""

from __future__ import annotations

import csv
import html
import json
import math
import re
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest
from markupsafe import Markup

from toymha import caveats, compose, page, pictures, plots, runs
from toymha.page import Entry, write_index, write_report
from toymha.report import Report
from toymha.table import Row
from toymha.words import parse

RELATIONS = ("topic", "agreement")
NASTY = "<script>alert(1)</script> & \"q\" 'q' $x$ 多头|`a` [b](c) *d*"
CHECKS = [
    {"that": "one head loses", "value": {"n_head": 1}, "against": {"n_head": 4}, "low": 0.05},
    {"that": "two are as good", "value": {"n_head": 2}, "against": {"n_head": 4}, "low": -0.01, "high": 0.01},
]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Each test in a folder of its own; git is not asked for every run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "git", lambda: {"commit": "abc123", "dirty": True})
    return tmp_path


composer = compose.Composer()


def a_run(
    *words: str, final: float = 2.0, status: str = "done", name: str = "train", label="", relations=()
) -> runs.Run:
    """A run folder as training leaves it, without training: its summary, and a loss that falls to `final`."""
    values = {"data": "pydoc"} | {a.key: a.values[0] for a in parse([f"name={name}", *words])}
    p = composer.point(values, set())
    about = {"choices": p.choices, "label": p.label, "device": "cpu", "precision": "fp32", "threads": 1}
    run = runs.Run.open(runs.folder(p.config, label or p.label), p.config, "text", about)
    run.release()
    right = {f"relation_right/{r}": 0.5 for r in relations}
    rows = [{"step": s, "loss/val": final + 2 * math.exp(-s / 30)} | right for s in range(0, 101, 10)]
    if status == "diverged":
        rows[-1]["loss/val"] = None  # type: ignore[assignment]
    run.write_text("metrics.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    if status != "done":
        run.update(status=status, error=f"loss nan {NASTY}")
        return run
    score = {"loss": final, "ppl": math.exp(final), "bits_per_char": final / math.log(2)}
    if relations:
        score["parts"] = {r: {"loss": 0.5, "floor": 0.25, "right": 0.75, "accuracy": 1.0} for r in relations}  # type: ignore
    parts = {"val": score, "test": score, "best": score | {"step": 90}, "unigram_loss": 3.0, "parameters": 1000}
    more = {"flops_per_token": 1e6, "tokens_trained": 1000, "seconds": 9.0, "tokens_per_s": 111.0}
    run.update(status="done", **parts, **more)
    return run


def a_statement(checks=CHECKS, missing: int = 0, bad: dict | None = None, **more) -> Path:
    """Three numbers of heads with five seeds each, and their sweep.json; `missing` runs were never begun."""
    made, order = [], []
    for n_head, loss in ((1, 2.2), (2, 2.05), (4, 2.0)):
        for seed in range(5):
            status = (bad or {}).get((n_head, seed), "done")
            final = loss + 0.002 * seed * n_head
            run = a_run(
                f"n_head={n_head}", f"seed={seed}", final=final, name="heads", status=status, relations=RELATIONS
            )
            made.append(str(run.path.relative_to("outputs/heads")))
            order.append({"n_head": n_head, "seed": seed})
    made += [f"n_head=8/seed={s}" for s in range(missing)]
    sweep = {"name": "heads", "question": f"How many? {NASTY}", "statement": NASTY, "source": NASTY, "checks": checks}
    about = {"axes": ["n_head"], "order": order, "runs": made, "sweep": sweep | more}
    tuned = [{"setting": {"n_head": 1}, "chosen": {"optim.lr": 0.01}, "candidates": []}]
    tuned[0]["candidates"] = [
        {"values": {"optim.lr": 0.01}, "val_loss": 2.0},
        {"values": {"a": NASTY}, "val_loss": None},
    ]
    runs.write_json(Path("outputs/heads/sweep.json"), about | {"tuned": tuned})
    return Path("outputs/heads")


def written(folder: str | Path) -> str:
    return write_report(Report.load(folder))[0].read_text("utf-8")


def text_of(source: str) -> str:
    """What a reader sees, roughly."""
    body = re.sub(r"<(style|svg).*?</\1>", "", source, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body)).split())


# One file, the same bytes


def test_the_same_runs_give_the_same_bytes():
    """Also in another process, where sets and hashes have another order, and from another folder."""
    folder = a_statement()
    before = {p.name: p.read_bytes() for p in write_report(Report.load(folder))}
    assert list(before) == ["report.html", "report.md", "report.csv", "report.json"]
    code = f"from toymha.page import *; write_report(Report.load({str(folder.absolute())!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
    assert {n: (folder / n).read_bytes() for n in before} == before


def test_a_page_asks_nobody_for_anything():
    """No address but of the folder, no script, no import in the style; ids are unique, and those referred to exist."""
    source = written(a_statement())
    outside = [u for u in re.findall(r'(?:src|href|action)="([^"#]*)"', source) if not u.startswith(("./", "data:,"))]
    assert outside == [] and "@import" not in source and not re.search(r"url\((?!#)", source)
    assert "<script" not in source and "http://" not in source and "https://" not in source
    ids = re.findall(r'\bid="([^"]*)"', source)
    assert len(ids) == len(set(ids)) > 0
    assert set(re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', source)) <= {(i, "") for i in ids} | {
        ("", i) for i in ids
    }


def test_figures_are_well_formed_and_scale():
    """Each is XML with a viewBox and without a size of its own."""
    figures = re.findall(r"<svg.*?</svg>", written(a_statement()), flags=re.DOTALL)
    assert len(figures) >= 6
    for figure in figures:
        root = ElementTree.fromstring(figure)
        assert root.get("viewBox") and root.get("width") is None


def test_everything_is_escaped():
    """Statement, source, question, errors, tuned values and folder names show as they were typed."""
    folder = a_statement([CHECKS[0] | {"that": NASTY}], bad={(1, 0): "failed"})
    source = written(folder)
    assert "<script" not in source and "<b]" not in source
    assert text_of(source).count("<script>alert(1)</script> & \"q\" 'q' $x$ 多头|`a` [b](c) *d*") >= 5
    markdown = (folder / "report.md").read_text("utf-8")
    assert "<script" not in markdown and "](c)" not in markdown.replace("\\](c)", "")
    assert "&lt;script>" in markdown


def test_markdown_shows_what_was_meant():
    """Names with underscores stay readable; what would be markup is not."""
    assert page.markdown("n_head=1, d_ff=90") == "n_head=1, d_ff=90"
    assert page.markdown("_a_ *b* `c` a|b <i>\n# d") == r"\_a\_ \*b\* \`c\` a\|b &lt;i> # d"
    assert page.markdown("# head") == r"\# head"
    assert page.markdown_code("a `b` c") == "`` a `b` c ``"
    lines = page.markdown_table([["a", "b"], ["*x*", Markup("**y**")]]).splitlines()
    assert lines == ["| a | b |", "| --- | ---: |", r"| \*x\* | **y** |"]  # what is marked up already stays


# What it says


@pytest.mark.parametrize(
    ("low", "high", "word", "sign"),
    [(0.1, 0.5, "supported", "✓"), (0.5, None, "refuted", "✗"), (0.19, 0.195, "undecided", "?")],
)
def test_the_verdict_is_there_and_right(low, high, word, sign):
    """As a word with a sign, in HTML and in Markdown, and no other word is a badge."""
    folder = a_statement([CHECKS[0] | {"low": low, "high": high}])
    source = written(folder)
    assert Report.load(folder).verdict.word == word
    badges = re.findall(r'<span class="badge (\w*)[^"]*"><span aria-hidden="true">(.)</span> (\w+)</span>', source)
    assert badges == [(word, sign, word)] * 2
    assert f"**{word}**" in (folder / "report.md").read_text("utf-8")


def test_a_statement_that_turns_on_a_slice():
    """The page says on which, and has a line for each."""
    made, order = [], []
    for lr, gap in (("0.001", 0.3), ("0.01", -0.3)):
        for heads, loss in (("1", 2.0 + gap), ("4", 2.0)):
            for seed in range(3):
                words = (f"n_head={heads}", f"optim.lr={lr}", f"seed={seed}")
                made.append(str(a_run(*words, final=loss + 0.01 * seed, name="s").path.relative_to("outputs/s")))
                order.append({"n_head": int(heads), "optim.lr": float(lr), "seed": seed})
    sweep = {"name": "s", "question": "?", "statement": "One loses.", "slices": ["optim.lr"], "checks": CHECKS[:1]}
    runs.write_json(
        Path("outputs/s/sweep.json"), {"axes": ["n_head", "optim.lr"], "order": order, "runs": made, "sweep": sweep}
    )
    said = text_of(written("outputs/s"))
    assert "supported with optim.lr=0.001; refuted with optim.lr=0.01" in said
    assert "one head loses (optim.lr=0.001)" in said and "one head loses (optim.lr=0.01)" in said


def test_each_check_has_its_numbers():
    """Difference, both intervals, p-values, perplexity, claim: those of the finding, rounded."""
    folder = a_statement()
    (first, _), said = Report.load(folder).verdict.findings, text_of(written(folder))
    assert f"{first.difference:+.4f} nats" in said and f"{first.low:+.4f} to {first.high:+.4f} nats" in said
    assert first.bootstrap and f"{first.bootstrap[0]:+.4f} to {first.bootstrap[1]:+.4f} nats" in said
    assert f"{first.perplexity():+.1f} %" in said and first.claim() in said and "p after Holm" in said


def test_unfinished_runs_are_counted():
    """Done of asked for, while it is running too; what never began is counted from sweep.json."""
    folder = a_statement(bad={(1, 0): "running", (4, 1): "diverged", (2, 2): "failed"}, missing=2)
    said = text_of(written(folder))
    assert "12/17 runs done · 1 running, 1 diverged, 1 failed, 2 not begun" in said and "Not finished" in said
    assert "4/5" in said
    markdown = (folder / "report.md").read_text("utf-8")
    assert markdown.splitlines()[2].startswith("12/17 runs done")


def test_a_finished_sweep_is_called_finished():
    assert "Not finished" not in text_of(written(a_statement()))


def test_the_terminal_and_the_page_count_alike():
    """Also where a setting has no run at all yet."""
    folder = a_statement(missing=2)
    about = runs.read_json(folder / "sweep.json")
    about["order"] += [{"n_head": 8, "seed": s} for s in range(2)]
    runs.write_json(folder / "sweep.json", about)
    said, text = text_of(written(folder)), Report.load(folder).text()
    assert "15/17 runs done · 2 not begun" in said
    for part in ("0/2", "n_head=8: 2 not begun"):
        assert part in said and part in text


def test_warnings_of_the_sweep_and_the_convention_of_flops():
    folder = a_statement()
    runs.write_json(folder / "sweep.json", runs.read_json(folder / "sweep.json") | {"warnings": [f"wide {NASTY}"]})
    said = text_of(written(folder))
    assert said.count("Warning: wide <script>") == 1 and said.count(caveats.FLOPS) == 1
    markdown = (folder / "report.md").read_text("utf-8")
    assert markdown.count("- Warning: wide") == 1 and "T x T" in markdown
    assert "of perplexity" in said


def test_a_best_inside_has_a_simultaneous_interval():
    """It is named as one, in HTML and in Markdown; a gain is no percentage of perplexity."""
    check = {"that": "two are best", "value": {"n_head": [1, 2, 4]}, "best": "inside", "low": 0.0}
    folder = a_statement([check])
    source = written(folder)
    said = text_of(source)
    assert "simultaneous 95 % interval" in said and said.count("95 % interval") == said.count(
        "simultaneous 95 % interval"
    ) + said.count("baseline, 95 % interval")
    assert "of perplexity" not in said and "Right is better" in source
    assert "simultaneous 95 % interval" in (folder / "report.md").read_text("utf-8")


def test_differences_in_two_units_are_two_figures():
    """Nats and bits have no common axis."""
    a_run("n_head=1")
    a_run("n_head=2", final=2.1)
    a_run("n_head=4", "data.tokenizer=byte", final=2.2)
    report = Report.load("outputs")
    drawn = pictures.pictures(report).effects
    assert [("nats" in p.svg, "bits" in p.svg) for p in drawn] == [(True, False), (False, True)]
    assert all("baseline" in p.svg for p in drawn)
    ids = re.findall(r'\bid="([^"]*)"', written("outputs"))
    assert len(ids) == len(set(ids))


def test_targets_alone_beside_everything_are_drawn_in_percentage_points():
    """An encoder's loss is of targets alone: rows are compared by the share that is right, where more is better."""
    right = {"n_encoder_layer=1": 0.25, "n_encoder_layer=null": 0.75}
    for word, share in right.items():
        for seed in (0, 1):
            run = a_run("data=reverse", word, "d_ff=64", f"seed={seed}")
            run.update(pairs={"val": {"greedy": {"exact": share + seed / 100 * share, "ser": 0.1}}})
    (drawn,) = pictures.pictures(Report.load("outputs")).effects
    assert "difference in percentage points; right is better" in drawn.svg and "bits" not in drawn.svg
    ticks = [float(t.replace("\N{MINUS SIGN}", "-")) for t in re.findall(r">(\N{MINUS SIGN}?[\d.]+)</text>", drawn.svg)]
    assert 40 <= max(map(abs, ticks)) <= 60  # 50.25 points between the means


def test_labels_leave_out_what_all_rows_share_and_stay_apart():
    rows = [Row({"d_ff": 64, "n_head": h, "pos": "rope"}) for h in (1, 2)]
    assert pictures._labels(rows) == ["n_head=1", "n_head=2"]
    long = "a=1, " * 40
    texts = [f"{long}x={i}, {long}" for i in (1, 2)]  # that differ in the very middle
    cut = plots._apart([plots.Bar(t, 0.0) for t in texts])
    assert cut[0] != cut[1] and len(cut[0]) > 2
    assert all(len(c) == 2 for c in plots._apart([plots.Bar(long + t, 0.0) for t in "xy"]))


def test_relations_have_a_table_and_figures():
    said = written(a_statement())
    assert "By relation" in said and all(f"<h3>{r}</h3>" in said for r in RELATIONS) and "0.250 nats" in said


def test_warnings_are_lifted_out_of_the_notes():
    """Different texts: a warning in HTML and Markdown, once each."""
    a_run("n_head=1")
    a_run("n_head=2", "data.tokenizer=byte")
    said = text_of(written("outputs"))
    assert said.count("compare bits/char") == 1 and "Warning: other text or tokens" in said
    assert "- Warning: other text or tokens" in Path("outputs/report.md").read_text("utf-8")


# Any folder


@pytest.mark.parametrize("statuses", [["done"], ["failed"], ["diverged"], ["running"], ["interrupted", "failed"]])
def test_a_plain_folder_of_whatever_there_is(statuses):
    """No statement, no verdict; a page all the same."""
    for i, status in enumerate(statuses):
        a_run(f"n_head={2**i}", status=status)
    said = written("outputs/train")
    assert (
        'class="verdict' not in said and "All settings" in said and f"{statuses.count('done')}/{len(statuses)}" in said
    )


def test_a_single_run_folder_and_one_without_rows():
    run = a_run()
    (run.path / "metrics.jsonl").unlink()
    assert "1/1 runs done" in text_of(written(run.path))


def test_numbers_that_are_none_or_not_finite():
    a_run("n_head=1", final=math.nan)
    a_run("n_head=2", final=700.0)
    said = written("outputs")
    assert "0/1" in said and "All settings" in said


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null"])
def test_a_curve_with_holes(value):
    """A row without a number is left out, and its neighbours stay; the run is marked."""
    run = a_run("n_head=1", status="diverged")
    rows = [f'{{"step": {s}, "loss/val": {value if s in (2, 4) else 2.0 + s}}}\n' for s in range(6)]
    (run.path / "metrics.jsonl").write_text("".join(rows))
    a_run("n_head=2")
    said = written("outputs")
    figures = "".join(re.findall(r"<svg viewBox.*?</svg>", said, flags=re.DOTALL))
    assert "1 diverged" in text_of(said) and "Validation loss during training" in said and " nan" not in figures
    (row, _) = Report.load("outputs").table.rows
    c = plots.curve(row, {str(run.path): run.rows()}, "loss/val", plots.Style("#000000"))
    assert c.loose == [([0, 1, 3, 5], [2.0, 3.0, 5.0, 7.0], True)]


def test_losses_that_are_very_large():
    """Above 709 the perplexity is infinite, which the table says; the page is drawn."""
    run = a_run("n_head=1", final=700.0)
    score = {"loss": 900.0, "ppl": math.inf, "bits_per_char": 900 / math.log(2)}
    run.update(val=score, test=score, best=score | {"step": 1})
    a_run("n_head=2")
    said = text_of(written("outputs"))
    assert "900.0000" in said and "inf" in said


def test_a_sweep_without_checks_has_no_verdict():
    """A question alone is no statement."""
    said = written(a_statement(checks=[], statement=None))
    assert 'class="badge' not in said and "<h1>How many?" in said


def test_links_lead_to_the_run_folders():
    """Also with Chinese, blanks, `#`, `%` and `:` in their names."""
    a_run("n_head=2", label="中文 a=1,b#c%20d")
    a_run("n_head=4", label="x:y?z")
    links = re.findall(r'class="link"><a href="([^"]*)"', written("outputs"))
    found = {(Path("outputs") / unquote(link)).resolve() for link in links}
    assert found == {r.path.resolve() for r in runs.find("outputs")} and all(link.startswith("./") for link in links)


def test_tables_agree_with_the_json():
    """Every loss in Markdown, HTML and CSV is that of report.json, rounded."""
    folder = a_statement()
    source, markdown = written(folder), (folder / "report.md").read_text("utf-8")
    records = json.loads((folder / "report.json").read_text("utf-8"))
    rows = list(csv.DictReader((folder / "report.csv").read_text("utf-8").splitlines()))
    table = markdown.split("## All settings")[1].split("##")[0]
    lines = [[c.strip() for c in x.strip("| ").split("|")] for x in table.splitlines() if x.startswith("|")]
    column = lines[0].index("test loss")
    assert len(records) == len(rows) == len(lines) - 2 == 3
    for r, row, line in zip(records, rows, lines[2:]):
        assert float(row["test_loss"]) == r["test_loss"] and line[column] == f"{r['test_loss']:.4f}"
        assert f'<td class="number">{r["test_loss"]:.4f}</td>' in source
        assert r["difference"] is None or line[-1].startswith(f"{r['difference']:+.4f} ")


def test_provenance_and_commands(monkeypatch):
    """Distinct values, once each; the command as one types it, and the way to the page and the curves."""
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/toymha", "train", "sweep=heads", "budget=quick"])
    said = text_of(written(a_statement()))
    assert said.count("toymha train sweep=heads budget=quick") == 2 and "/somewhere" not in said
    assert "toymha report run=outputs/heads" in said and "tensorboard --logdir outputs/heads" in said
    assert said.count("commit abc123, with uncommitted changes") == 1


def test_many_rows_are_limited_in_figures_and_whole_in_the_table():
    for i in range(pictures.MOST_CURVES + 3):
        a_run(f"d_ff={10 + i}")
    said = text_of(written("outputs"))
    assert "the first 12 rows" in said and "3 more are left out" in said
    assert said.count("1,000") >= 15


# Figures


def test_long_and_wide_labels_are_shortened():
    assert plots.shortened("short", 20) == ["short"] and plots.shortened("", 20) == []
    lines = plots.shortened("key=value, " * 30, 40)
    assert len(lines) == 2 and lines[1].startswith("…") and all(len(x) <= 40 for x in lines)
    assert all(len(x) <= 20 for x in plots.shortened("多头注意力" * 20, 40))


def test_a_mean_is_over_steps_that_all_finished_runs_have():
    """A run that stopped is drawn on its own and takes no part."""
    a_run("seed=0", final=1.0)
    a_run("seed=1", final=3.0)
    a_run("seed=2", final=9.0, status="diverged")
    (row,) = Report.load("outputs").table.rows
    logged = {str(r.path): runs.Run(r.path, None).rows() for r in row.results}  # type: ignore[arg-type]
    c = plots.curve(row, logged, "loss/val", plots.Style("#000000"))
    assert c.steps == list(range(0, 101, 10)) and c.mean[-1] == pytest.approx(2.0 + 2 * math.exp(-100 / 30))
    assert c.high[0] - c.low[0] == pytest.approx(2.0)
    ((steps, _, diverged),) = c.loose
    assert diverged and steps[-1] == 90


def test_drawing_leaves_the_settings_of_matplotlib_alone():
    import matplotlib

    matplotlib.rcParams["svg.fonttype"] = "path"
    before = dict(matplotlib.rcParams.copy())
    drawn = plots.forest([plots.Bar("多头", 1.0, 0.5, 1.5)], "x", "f", (-math.inf, 2.0))
    assert dict(matplotlib.rcParams.copy()) == before and "多头" in drawn


# The index


def test_the_index_has_a_row_for_each_statement():
    """Counts, badges, links that resolve; a statement without runs says so."""
    measured = [("one head loses", "+0.2 [+0.1, +0.3] nats", "supported")]
    command = "toymha train sweep=heads budget=smoke"
    entries = [
        Entry("heads", NASTY, "me", "supported", "yes with a=1", measured, command, 75.0, 14, 15, "a=1/report.html"),
        Entry("w_o", "Heads talk.", None, "not run yet", None, [], "toymha train sweep=w_o", None, 0, 12, ""),
    ]
    about = {"date": "2026-01-02", "command": "toymha reproduce"}
    path = write_index(Path("pages"), entries, about)
    source = path.read_text("utf-8")
    said = text_of(source)
    assert path == Path("pages/index.html") and "<script" not in source and NASTY in said
    for part in (
        "1 supported",
        "0 refuted",
        "0 undecided",
        "1 not run yet",
        "14/15",
        "0/12",
        "1 min 15 s",
        "2026-01-02",
    ):
        assert part in said
    assert all(part in said for part in (*measured[0], command, "yes with a=1", "me"))
    assert re.findall(r'<a href="([^"]*)"', source) == ["./a%3D1/report.html"]
    assert write_index(Path("pages"), entries, about).read_text("utf-8") == source


# Cost


def test_neither_torch_nor_pyplot_is_imported():
    """Importing the page imports no torch and no matplotlib; drawing opens no window and keeps no figure."""
    a_run()
    code = (
        "import sys; import toymha.page; assert not {'torch', 'matplotlib'} & set(sys.modules); "
        "toymha.page.write_report(toymha.page.Report.load('outputs')); "
        "assert not {'torch', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def copies(n: int) -> None:
    """n runs with five seeds for each setting, made from the files of one."""
    run = a_run()
    files = {f.name: f.read_bytes() for f in run.path.iterdir() if f.suffix in (".json", ".jsonl", ".yaml")}
    info = json.loads(files["run.json"])
    for i in range(n):
        path = Path("outputs/many") / f"d_ff={10 + i // 5}" / f"seed={i % 5}"
        path.mkdir(parents=True)
        for name, content in files.items():
            (path / name).write_bytes(content)
        values = info["values"] | {"d_ff": 10 + i // 5, "seed": i % 5}
        (path / "run.json").write_text(json.dumps(info | {"values": values}))


@pytest.mark.parametrize(
    ("n", "bar"), [(45, 6), pytest.param(1000, 15, marks=pytest.mark.deep)]
)  # seconds; 45 runs take a tenth of it
def test_text_of_a_sweep_is_fast(n, bar):
    """Without drawing; the bounds are loose, for busy machines."""
    copies(n)
    began = time.perf_counter()
    report = Report.load("outputs/many")
    report.text()
    facts = page.facts_of(report)
    page.render("report.md", **facts)
    assert time.perf_counter() - began < bar and len(report.table.results) == n
