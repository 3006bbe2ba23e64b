"""All statements on one page, a sweep with trials from the command line to its verdict, and the prediction of time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from toymha import predict, reproduce, runs
from toymha.cli import main
from toymha.compose import experiment
from toymha.runs import find

TINY = "data=pydoc n_layer=1 dim=16 seq_len=16 batch_size=4 budget.steps=4 budget.eval_tokens=64 seed=0,1".split()
TINY += ["data.split=[0.98,0.01,0.01]", "budget.sample_tokens=0", "device=cpu", "workers=1", "threads=1"]


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    """Each test in a folder of its own; statements at a size that trains in a moment, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "git", lambda: None)
    full = reproduce.compose.experiment

    def shrunk(words, *more):
        if more:  # what the test typed itself
            return full(words, *more)
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
    assert calls == ["w_o", "tied"] and "not run yet" in Path("outputs/reproduce/index.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("claims=[w_oo]", "did you mean w_o?"),
        ("claims=7", "must be a list"),
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
    (point,) = experiment(["data=pydoc", "budget.steps=100", "budget.eval_every=25"]).points
    pace = predict.Pace(step=0.1, look=2.0, end=3.0)
    assert pace.of(point.config) == pytest.approx(10 + 5 * 2 + 3)
    assert pace.of(point.config, done=50) == pytest.approx(5 + 3 * 2 + 3)


def test_a_pace_is_read_from_the_rows():
    rows = [
        {"step": 0, "time": 10.0, "loss/val": 4.0},
        {"step": 1, "time": 10.5, "loss/train": 4.0},
        {"step": 2, "time": 10.6, "loss/train": 4.0},
        {"step": 3, "time": 10.7, "loss/train": 4.0},
        {"step": 3, "time": 11.7, "loss/val": 4.0},
    ]
    pace = predict.pace_of(rows, {}, looks_at_end=6.0)
    assert (pace.step, pace.look, pace.end) == pytest.approx((0.1, 1.0, 6.0))
    assert predict.pace_of(rows[:2], {"status": "failed", "error": "no memory"}, 6.0) == "no memory"


def test_a_prediction_from_trials_leaves_nothing_behind(capsys, tmp_path):
    words = [w if w != "workers=1" else "workers=2" for w in TINY]
    assert main(["plan", "sweep=w_o", *words, "time=true"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^about \d", out, re.M) and "4 to train" in out and not list(tmp_path.iterdir())
