"""Law 10: every file in conf/ builds, trains two steps, evaluates and reloads. A new file is tested by being there."""

from pathlib import Path

import pytest
from conftest import ENCODERS, FILES, SMALL_WHERE_SET

from toymha.cli import main
from toymha.compose import points
from toymha.config import choices
from toymha.data.text import SOURCES
from toymha.report import Report
from toymha.runs import Run, find

QUICK = (
    "n_layer=2 dim=32 seq_len=16 batch_size=4 threads=1 device=cpu budget.eval_tokens=64 budget.sample_tokens=4".split()
)
TWO_STEPS = [*QUICK, "budget.steps=2", "budget.tokens=null", "budget.minutes=null"]
REAL = [m for m, file in FILES.items() if file and "vocab_size" in file]  # they have their true sizes
MODELS = [m for m in choices("model") if m not in REAL]
LOCAL = [d for d in choices("data") if d not in ("file", "pairs") and not SOURCES[d].files]
BUNDLES = [("model", m) for m in MODELS] + [("data", d) for d in LOCAL]
BUNDLES += [(group, choice) for group in ("optim", "recipe") for choice in choices(group)]


@pytest.mark.parametrize("group, choice", BUNDLES)
def test_trains_evaluates_and_reloads(tmp_path, monkeypatch, capsys, group, choice):
    monkeypatch.chdir(tmp_path)
    words = [f"{group}={choice}"]
    if choice in ENCODERS:
        words += ["data.length=8", "data.tokens=20000"]
    elif group != "data":
        words += ["data=pydoc"]
    assert main(["train", *words, *TWO_STEPS]) == 0
    (run,) = find("outputs")
    assert main(["eval", f"run={run.path}", "device=cpu", "threads=1"]) == 0
    loss = Run.load(run.path).summary["val"]["loss"]
    _about, line = capsys.readouterr().out.split(str(run.path))[-1].splitlines()[:2]
    assert f"loss {loss:.4f}" in line


@pytest.mark.parametrize("model", REAL)
def test_real_models_train_at_a_smaller_size(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    small = {k: v for k, v in SMALL_WHERE_SET.items() if FILES[model].get(k) is not None}
    words = [f"{k}={v}" for k, v in (small | {"n_head": 4, "vocab_size": "null"}).items()]
    assert main(["train", f"model={model}", "data=pydoc", *words, *TWO_STEPS]) == 0


@pytest.mark.parametrize("budget", choices("budget"))
def test_budgets_end(budget):
    (point,) = points([f"budget={budget}"])
    assert 0 < point.config.max_steps < 10_000


@pytest.mark.parametrize("sweep", choices("sweep"))
def test_sweeps_compose(sweep):
    """With several settings, each with the same seeds, or with one whose numbers themselves are claimed."""
    made = points([f"sweep={sweep}"])
    seeds = {label: {p.config.seed for p in made if p.label == label} for label in {p.label for p in made}}
    assert len(set(map(frozenset, seeds.values()))) == 1 and min(map(len, seeds.values())) > 1
    assert len(seeds) > 1 or all(c.absolute for c in made[0].config.sweep.parsed_checks)
    assert made[0].config.sweep.name == sweep and made[0].config.sweep.question.endswith("?")


@pytest.mark.deep
@pytest.mark.parametrize("sweep", choices("sweep"))
def test_statements_end_in_a_verdict(tmp_path, monkeypatch, capsys, sweep):
    """As they are, with the smallest budget: every run ends, each check is measured, and there is a page."""
    monkeypatch.chdir(tmp_path)
    assert main(["train", f"sweep={sweep}", "budget=smoke"]) == 0
    verdict = Report.load(f"outputs/{sweep}").verdict
    assert verdict.word in ("supported", "refuted", "undecided") and all(f.n >= 1 for f in verdict.findings)
    assert f"verdict    {verdict.word}" in capsys.readouterr().out
    assert verdict.word in Path(f"outputs/{sweep}/report.html").read_text("utf-8")


@pytest.mark.deep
def test_relations_are_learned_to_the_floor(tmp_path, monkeypatch):
    """Within 0.1 nats of the generator's own loss, on text that the model has not seen."""
    monkeypatch.chdir(tmp_path)
    assert main("train data=relations seq_len=64 batch_size=32 budget.steps=300".split()) == 0
    val = next(find("outputs")).summary["val"]
    assert 0 < val["loss"] - val["floor"] < 0.1


@pytest.mark.deep
def test_compiled_runs_like_the_plain_one(tmp_path, monkeypatch):
    """torch.compile changes speed, names of weights and last digits not at all or hardly."""
    monkeypatch.chdir(tmp_path)
    for compiled in ("true", "false"):
        words = [
            "data=pydoc",
            f"name={compiled}",
            f"compile={compiled}",
            *QUICK,
            "budget.steps=20",
            "budget.tokens=null",
        ]
        assert main(["train", *words]) == 0
    a, b = (next(find(f"outputs/{n}")) for n in ("true", "false"))
    assert a.load_weights("model").keys() == b.load_weights("model").keys()
    assert a.summary["val"]["loss"] == pytest.approx(b.summary["val"]["loss"], rel=1e-4)
