"""All statements on one page, a sweep with trials from the command line to its verdict, and the prediction of time."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pytest

from toymha import predict, reproduce, runs
from toymha.cli import COMMANDS, main
from toymha.compose import experiment
from toymha.runs import find
from toymha.schema import build
from toymha.timing import speed

TINY = "data=pydoc n_layer=1 dim=16 seq_len=16 batch_size=4 budget.steps=4 budget.eval_tokens=64 seed=0,1".split()
SMALL = ("tied", "w_o", "w_o_parameters", "heads_tuned")  # the statements that are trained here
STATEMENTS = [*SMALL, "norm"]  # all of them are composed for each page, which takes its time
TINY += ["data.split=[0.98,0.01,0.01]", "budget.sample_tokens=0", "device=cpu", "workers=1", "threads=1"]
OPTIONS = build({"budget": "smoke"}, COMMANDS["reproduce"].options)


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """Each test in a folder of its own; statements at a size that trains in a moment, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "git", lambda: None)
    monkeypatch.setattr(reproduce, "choices", lambda _group: STATEMENTS)
    full = reproduce.compose.experiment

    def shrunk(words, *more):
        if more:  # what the test typed itself
            return full(words, *more)
        if words[0].removeprefix("sweep=") not in SMALL:  # it is only listed
            return full(words)
        kept = [w for w in words if w.partition("=")[0] not in ("device", "workers")]
        return full([*kept, *TINY])

    monkeypatch.setattr(reproduce.compose, "experiment", shrunk)


def test_one_page_for_all(capsys):
    """A row each with verdict, effect, command and link; a second start trains nothing and writes the same page."""
    words = ["reproduce", "claims=[tied,w_o_parameters]", "budget=smoke"]
    assert main(words) == 0
    out = capsys.readouterr().out
    page = Path("outputs/reproduce/index.html").read_text("utf-8")
    assert out.index("w_o_parameters: ") < out.index("tied: ")  # by their place on the page
    for name in ("tied", "w_o_parameters"):
        assert f"toymha train sweep={name} budget=smoke" in page
        assert Path(f"outputs/reproduce/smoke/{name}/report.html").is_file() and f"smoke/{name}/report.html" in page
    assert re.search(r"^tied +(supported|refuted|undecided) +6/6 ", out, re.M)
    before = {r.path: r.summary for r in find("outputs")}
    assert len(before) == 6 + 4 and {s["status"] for s in before.values()} == {"done"}
    assert main(words) == 0
    assert {r.path: r.summary for r in find("outputs")} == before
    assert Path("outputs/reproduce/index.html").read_text("utf-8") == page


def test_statements_not_yet_run_are_on_the_page(monkeypatch):
    """When it is stopped after the first one, the page tells of both."""
    train, calls = reproduce.run_sweep, []

    def stopped_at_the_second(e):
        calls.append(e.sweep.name)
        return train(e) if len(calls) == 1 else 130

    monkeypatch.setattr(reproduce, "run_sweep", stopped_at_the_second)
    assert main(["reproduce", "claims=[w_o,tied]", "budget=smoke"]) == 130
    assert calls == ["w_o", "tied"]
    rows = dict(
        re.findall(r"^\| `(\w+)`.*? \| \*\*(.*?)\*\*", Path("outputs/reproduce/index.md").read_text("utf-8"), re.M)
    )
    assert rows.keys() == set(STATEMENTS) and {n for n, word in rows.items() if word != "not run yet"} == {"w_o"}


def test_one_statement_anew_keeps_the_others_on_the_page():
    """The page is drawn from the folders: asking for one statement changes its row alone. It tells what was typed."""
    pages = []
    for claim in ("w_o", "tied", "w_o"):
        assert main(["reproduce", f"claims=[{claim}]", "budget=smoke"]) == 0
        pages.append(Path("outputs/reproduce/index.md").read_text("utf-8").splitlines())
    changed = [(a, b) for a, b in zip(pages[0], pages[1]) if a != b]
    assert len(changed) == 1 and "`tied`" in changed[0][0] and pages[1] == pages[2]
    assert "toymha reproduce &#39;claims=[w_o]&#39; budget=smoke" in Path("outputs/reproduce/index.html").read_text(
        "utf-8"
    )


def test_a_damaged_folder_does_not_take_the_page_away():
    folder = Path("outputs/reproduce/smoke/norm")
    (folder / "a/seed=0").mkdir(parents=True)
    (folder / "a/seed=0/run.json").write_text("{}")
    (folder / "sweep.json").write_text("{")
    assert main(["reproduce", "claims=[w_o]", "budget=smoke"]) == 0
    page = Path("outputs/reproduce/index.md").read_text("utf-8")
    assert re.search(r"^\| `norm`.*cannot be read", page, re.M) and re.search(r"^\| `w_o`.* \| 4/4 \|", page, re.M)


def test_the_time_of_a_statement_counts_its_trials():
    """Wall time of all runs and of all trials before them, here one at a time."""
    assert main(["reproduce", "claims=[heads_tuned]", "budget=smoke"]) == 0
    wall = [r.summary["wall_seconds"] for r in find("outputs")]
    (e,) = (reproduce.experiment_of(n, OPTIONS) for n in ["heads_tuned"])
    assert len(wall) == 9 + 6
    assert reproduce.entry("heads_tuned", e, Path("outputs/reproduce")).seconds == pytest.approx(sum(wall))


def test_cells_of_the_markdown_table_are_escaped():
    e = reproduce.Entry(
        "a", "p(x | y) rises", None, "supported", None, [("x | y", "+1", "supported")], "c", 1.0, 1, 1, ""
    )
    row = reproduce.markdown([e]).splitlines()[-1]
    assert len(re.findall(r"(?<!\\)\|", row)) == 6 and r"p(x \| y) rises" in row


def test_nothing_to_train_needs_no_torch(monkeypatch, capsys):
    """A second start, and the question how long it takes, answer from the folders."""
    words = ["reproduce", "claims=[w_o]", "budget=smoke"]
    assert main(words) == 0
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "toymha.train", None)
    monkeypatch.setitem(sys.modules, "toymha.device", None)
    assert main(words) == 0
    capsys.readouterr()
    assert main([*words, "plan=true"]) == 0
    assert re.search(r"^w_o +0 of +4 runs to train +about 0", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("word", ["claims=[tied,w_o]", "claims=tied,w_o", "claims=null", ""])
def test_statements_are_named_with_and_without_brackets(monkeypatch, word):
    """And none of them means all."""
    asked = []
    monkeypatch.setattr(reproduce, "reproduce", lambda o, words: asked.append(o.claims) or 0)
    assert main(["reproduce", *filter(None, [word])]) == 0
    assert asked == [None if word in ("claims=null", "") else ["tied", "w_o"]]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("claims=[w_oo]", "did you mean w_o?"),
        ("claims=[]", "names no statement"),
        ("budget=long", "must be one of smoke, quick, full"),
        ("cliams=[w_o]", "did you mean claims?"),
    ],
)
def test_mistakes_are_one_line(capsys, word, said):
    assert main(["reproduce", word]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not Path("outputs").exists()


def test_tuned_from_trials_to_verdict(capsys):
    """The trials lie beside the runs, what was chosen is recorded, shown, and part of each run's configuration."""
    assert main(["reproduce", "claims=[heads_tuned]", "budget=smoke"]) == 0
    folder = Path("outputs/reproduce/smoke/heads_tuned")
    about = json.loads((folder / "sweep.json").read_text("utf-8"))
    chosen = {t["setting"]["n_head"]: t["chosen"]["optim.lr"] for t in about["tuned"]}
    assert set(chosen) == {1, 4, 16} and all(len(t["candidates"]) == 3 for t in about["tuned"])
    values = [r.info["values"] for r in find(folder)]
    assert {(v["n_head"], v["optim.lr"]) for v in values} == set(chosen.items()) and len(values) == 6
    assert {v["seed"] for v in values} == {0, 1}
    trials = [r.info["values"] for r in find(f"{folder}-tuning")]
    assert len(trials) == 9 and {v["seed"] for v in trials} == {1000}
    assert "statement" in capsys.readouterr().out


def test_the_verdict_is_taken_on_the_test_split():
    """The difference on the page is that of the test losses in the run folders."""
    main(["reproduce", "claims=[w_o]", "budget=smoke"])
    report = reproduce.Report.load("outputs/reproduce/smoke/w_o")
    (finding,) = report.verdict.findings
    by = {(r.info["values"]["w_o"], r.info["values"]["seed"]): r.summary["test"]["loss"] for r in find("outputs")}
    expected = sum(by[False, s] - by[True, s] for s in (0, 1)) / 2
    assert finding.difference == pytest.approx(expected, abs=1e-12) and report.table.split == "test"


def test_a_pace_is_multiplied_by_what_there_is_to_do():
    """Seconds by hand: 100 steps of 0.1 s, five looks of 2 s, 3 s at the end; half of it when half is done."""
    pace = predict.Pace(step=0.1, look=2.0, once=3.0)

    def of(*words, done=0):
        (point,) = experiment(["data=pydoc", "budget.eval_every=25", *words]).points
        return pace.of(point.config, done)

    assert of("budget.steps=100") == pytest.approx(10 + 5 * 2 + 3)
    assert of("budget.steps=100", done=50) == pytest.approx(5 + 2 * 2 + 3)  # at 75 and 100
    assert of("budget.steps=90") == pytest.approx(9 + 5 * 2 + 3)
    assert of("budget.steps=0") == pytest.approx(2 + 3)
    assert of("budget.steps=null", "budget.minutes=0.25") == pytest.approx(15 + (1 + 6) * 2 + 3)


def test_a_pace_is_read_from_the_clock():
    """Steps from the question before them to their end, without the slow first ones; a look until the next question."""
    clock = predict.Clock(None, began=10.0, started=11.0)
    at = 11.5  # the first look: half a second
    for k in range(predict.STEPS):
        clock.asked.append(at)
        clock.stepped.append(at + (2.0 if k < predict.FIRST else 0.1))
        at = clock.stepped[-1] + (0.7 if k == predict.STEPS - 1 else 0.01)
    clock.asked.append(at)
    pace = clock.pace(looks_at_end=6.0, decoding=4.0)
    assert (pace.step, pace.look, pace.once) == pytest.approx((0.1, 0.7, 1 + 0.5 * 6 + 4))


class NoSignal:
    signum = 0


@pytest.mark.parametrize("more", [["budget.steps=100"], ["budget.steps=1"], ["budget.steps=0"], ["optim.lr=1e4"]])
def test_a_trial_takes_its_steps_and_no_more(more, monkeypatch, tmp_path):
    """A tiny model, really trained: whatever the length of the run, eight steps, then a look and a sample."""
    words = [w for w in TINY if w.partition("=")[0] not in ("budget.steps", "seed", "workers", "budget.sample_tokens")]
    (point,) = experiment([*words, "budget.sample_tokens=3", "budget.decode_tokens=64", *more]).points
    timed = []
    monkeypatch.setattr(speed, "decoding_speed", lambda *_: timed.append(time.sleep(0.3)))
    short = predict.shortened(point, str(tmp_path), 1)
    pace = predict.trial(short, NoSignal())
    (run,) = find(tmp_path)
    assert run.summary["step"] == predict.STEPS and len(timed) == 1
    assert [r["step"] for r in run.rows() if "loss/val" in r] == [0, predict.STEPS] and "sample" in run.rows()[-1]
    assert 0 < pace.step < 0.3 and 0 < pace.look < 3 and pace.once > 0.3


def test_a_plan_of_one_kind_is_tried_by_as_many_as_later(monkeypatch):
    """Each worker has something to do from the first trial to the last, in a folder of its own; the median counts."""
    (point,) = experiment(["data=pydoc"]).points
    tried = []

    class Parallel:
        def __init__(self, n, stop, task):
            assert n == 3

        __enter__ = lambda self: self  # noqa: E731
        __exit__ = lambda *_: None  # noqa: E731

        def outcomes(self, tasks):
            tried.extend(tasks)
            return [(p, predict.Pace(s, 1.0, 1.0), 0.0) for p, s in zip(tasks, (1.0, 5.0, 2.0))]

    monkeypatch.setattr(predict, "Pool", Parallel)
    paces = predict._tried([(point, 1)], 3)
    assert [p.step for p in paces.values()] == [2.0] and len({p.config.output_dir for p in tried}) == 3


def test_a_trial_that_fails_is_told(monkeypatch, tmp_path):
    (point,) = experiment(["data=file", "data.path=none.txt"]).points
    assert "none.txt" in predict.trial(predict.shortened(point, str(tmp_path), 1), NoSignal())


def test_a_prediction_from_trials_leaves_nothing_behind(capsys, tmp_path):
    words = [w if w != "workers=1" else "workers=2" for w in TINY]
    assert main(["plan", "sweep=w_o", *words, "time=true"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^about \d", out, re.M) and "4 to train" in out and not list(tmp_path.iterdir())
