"""From a file in conf/sweep to runs: axes, listed settings, seeds and steps by budget, what is equal, what is tuned."""

from __future__ import annotations

import dataclasses
from pathlib import PureWindowsPath
from types import SimpleNamespace

import pytest
import yaml

from toymha import compose, cost, fair, runs, sweep, tuning
from toymha.config import choices
from toymha.data import text
from toymha.schema import UserError

TOKENS = 68  # of a text; sizes here do not depend on it


@pytest.fixture
def write(tmp_path):
    """A sweep file of the user's own; `run` composes it."""

    def run(sweep: dict, *words: str, head: str = "") -> compose.Experiment:
        (tmp_path / "sweep").mkdir(exist_ok=True)
        about = {"sweep": {"name": "mine", "question": "?", "statement": "so it is", **sweep}}
        content = f"# @package _global_\ndefaults:\n  - override /data: pydoc\n{head}"
        (tmp_path / "sweep" / "mine.yaml").write_text(content + yaml.safe_dump(about), "utf-8")
        return compose.experiment(["sweep=mine", *words], extra=tmp_path)

    return run


def settings(experiment: compose.Experiment, *keys: str) -> list[tuple]:
    """Values of the keys, each setting once, in order."""
    return list(dict.fromkeys(tuple(p.swept.get(k) for k in keys) for p in experiment.points))


def test_axes_make_the_full_product(write):
    e = write({"axes": {"n_head": "1,2", "w_o": [True, False]}, "seeds": {"full": 2}})
    assert settings(e, "n_head", "w_o") == [(1, True), (1, False), (2, True), (2, False)]
    assert len(e.points) == 8 and {p.config.seed for p in e.points} == {0, 1}


def test_points_are_coupled_and_conditional(write):
    """A list of settings is no product: keys move together, and an axis may belong to some of them only."""
    points = [
        {"seq_len": 16, "batch_size": 4},
        {"seq_len": 32, "batch_size": 2},
        {"norm_position": "post", "optim.warmup": [0, 5]},
    ]
    e = write({"points": points, "axes": {"seed": "range(2)"}})
    got = settings(e, "seq_len", "batch_size", "norm_position", "optim.warmup")
    assert got == [(16, 4, "pre", 30), (32, 2, "pre", 30), (128, 16, "post", 0), (128, 16, "post", 5)]
    assert all(set(p.swept) == {"seq_len", "batch_size", "norm_position", "optim.warmup", "seed"} for p in e.points)


def test_what_is_typed_wins(write):
    sweep = {"axes": {"n_head": "1,2,4"}, "seeds": {"full": 2}, "points": [{"dim": 64}, {"dim": 32}]}
    assert settings(write(sweep, "n_head=2,8"), "n_head") == [(2,), (8,)]
    assert {p.config.seed for p in write(sweep, "seed=7").points} == {7}
    assert {p.config.init_seed for p in write(sweep, "init_seed=range(3)").points} == {0, 1, 2}
    assert {(p.config.data_seed, p.config.seed) for p in write(sweep, "data_seed=7").points} == {(7, 0), (7, 1)}
    assert len(write(sweep, "dim=16", "seed=0").points) == 3  # both listed settings are now the same


def test_seeds_and_steps_follow_the_budget(write):
    sweep = {"axes": {"n_head": "1,2"}, "seeds": {"quick": 3, "full": 5}, "steps": {"quick": 70}}
    for words, seeds, steps in (
        (["budget=quick"], 3, 70),
        (["budget=full"], 5, 900),
        (["budget=smoke"], 3, 50),  # not in the file: three seeds, the budget's own steps
        (["budget=quick", "budget.steps=9"], 3, 9),
    ):
        e = write(sweep, *words)
        assert len(e.points) == 2 * seeds and {p.config.max_steps for p in e.points} == {steps}
    assert "budget.steps" not in write(sweep, "budget=quick").points[0].label


def test_equal_parameters_are_solved_for(write):
    sweep = {"axes": {"w_o": "true,false"}, "compare": "parameters"}
    points = fair.equalise(write(sweep, "seed=0")).points
    counts = [sum(cost.parameters(p.config, TOKENS).values()) for p in points]
    per_unit = 2 * points[0].config.dim * points[0].config.n_layer
    assert points[0].config.d_ff is None and points[1].config.d_ff > points[0].config.F
    assert abs(counts[0] - counts[1]) <= per_unit / 2
    assert points[1].label.endswith("w_o=false") and f"d_ff={points[1].config.d_ff}" in points[1].label


def test_equal_flops_are_steps(write):
    sweep = {"axes": {"w_o": "true,false"}, "compare": "flops"}
    points = fair.equalise(write(sweep, "seed=0")).points
    vocab = text.vocab_size(points[0].config.data)
    spent = [cost.training_flops_per_token(p.config, vocab) * p.config.max_steps for p in points]
    assert points[1].config.max_steps > points[0].config.max_steps
    assert spent[1] == pytest.approx(spent[0], rel=1e-3)


def test_equal_time_is_minutes(write):
    sweep = {"axes": {"w_o": "true,false"}, "compare": "time", "minutes": {"full": 0.25}}
    budget = write(sweep).points[0].config.budget
    assert (budget.steps, budget.tokens, budget.minutes) == (None, None, 0.25)
    with pytest.raises(UserError, match="no minutes for budget=quick"):
        write(sweep, "budget=quick")
    typed = write({"axes": {"w_o": "true,false"}}, "compare=time", "budget.minutes=0.5").points[0].config.budget
    assert (typed.steps, typed.minutes) == (None, 0.5)


def test_compare_can_be_typed(write):
    """It is what the points are made equal in, and they get a folder of their own."""
    sweep = {"axes": {"w_o": "true,false"}}
    e = write(sweep, "compare=parameters")
    assert e.sweep.compare == "parameters" and e.sweep.name == "mine_equal_parameters"
    assert fair.equalise(e).points[-1].config.d_ff and not fair.equalise(write(sweep)).points[-1].config.d_ff
    assert {runs.folder(p.config, p.label).parts[1] for p in e.points} == {"mine_equal_parameters"}
    with pytest.raises(UserError, match="must be one of steps, parameters, flops, time"):
        write(sweep, "compare=params")
    with pytest.raises(UserError, match="is for sweep=NAME"):
        compose.experiment(["compare=flops"])


def test_parameters_that_cannot_be_equal(write):
    sweep = {"axes": {"dim": "16,256"}, "compare": "parameters"}
    with pytest.raises(UserError, match="no width of the MLP"):
        fair.equalise(write(sweep, "seed=0"))


def test_the_reference_can_be_named(write):
    sweep = {"axes": {"head_dim": "8,32,64"}, "compare": "parameters", "reference": {"head_dim": 64}}
    widths = [p.config.d_ff for p in fair.equalise(write(sweep, "seed=0")).points]
    assert widths[2] is None and widths[0] > widths[1] > 512


def test_tuning_has_seeds_of_its_own(write, tmp_path, monkeypatch):
    """Trials are no runs of the verdict; the best by validation loss is laid over the setting, and all are recorded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "git", lambda: None)
    e = write({"axes": {"n_head": "1,2"}, "tune": {"optim.lr": [1e-3, 1e-2]}, "seeds": {"full": 6}})
    tried = tuning.trials(e)
    trials = tuning.runs_of(tried)
    assert len(trials) == 2 * 2 * 2  # settings, candidates, a third of six seeds
    assert not {p.config.seed for p in trials} & {p.config.seed for p in e.points}
    assert {runs.name_of(p.config) for p in trials} == {"mine-tuning"}

    def finish(p, loss, status="done"):
        run = runs.Run.open(runs.folder(p.config, p.label), p.config, "text", {"choices": p.choices, "label": p.label})
        run.update(status=status, val={"loss": loss})
        run.release()

    for p in trials:
        best = {1: 1e-2, 2: 1e-3}[p.config.n_head]
        finish(p, 2.0 if p.config.optim.lr == best else 2.1)
    tuned, record = tuning.choose(e, tried)
    assert {(p.config.n_head, p.config.optim.lr) for p in tuned.points} == {(1, 1e-2), (2, 1e-3)}
    assert len(tuned.points) == 12 and {p.config.name for p in tuned.points} == {None}
    assert record[0]["setting"] == {"n_head": 1} and record[0]["chosen"] == {"optim.lr": 0.01}
    assert [c["val_loss"] for c in record[0]["candidates"]] == pytest.approx([2.1, 2.0])
    for p in trials:  # a candidate that diverged is not the best, whatever the others of its runs gave
        if p.config.n_head == 1 and p.config.optim.lr == 1e-2:
            finish(p, 1.0, "diverged")
    assert {p.config.optim.lr for p in tuning.choose(e, tried)[0].points if p.config.n_head == 1} == {1e-3}


def finish(p, loss, status="done"):
    run = runs.Run.open(runs.folder(p.config, p.label), p.config, "text", {"choices": p.choices, "label": p.label})
    run.update(status=status, val={"loss": loss})
    run.release()


TUNED = {"axes": {"n_head": "1,2"}, "tune": {"optim.lr": [1e-3, 1e-2], "optim.weight_decay": [0, 0.1]}}


def test_what_is_typed_is_not_tuned(write):
    """One typed key leaves the other to be tuned, two leave nothing; a line says so."""
    e = write(TUNED, "optim.lr=7e-3", "seed=0")
    trials = tuning.runs_of(tuning.trials(e))
    assert {p.config.optim.lr for p in trials} == {7e-3} and len(trials) == 2 * 2
    assert tuning.given(e) == "optim.lr: given, so not tuned"
    e = write(TUNED, "optim.lr=7e-3", "optim.weight_decay=0", "seed=0")
    assert tuning.axes(e) == {} and len(sweep.plans(e)) == 1
    assert tuning.given(write(TUNED)) == "" and tuning.given(write({"axes": {"n_head": "1,2"}}, "optim.lr=1")) == ""


@pytest.mark.parametrize("word", ["seed=999,1000,1001", "init_seed=1000,1001", "data_seed=1000,1001", "init_seed=7"])
def test_trials_share_no_seed_with_the_verdict(write, word):
    """Whatever the seeds of the verdict are of: trials have others, for weights and for batches."""
    e = write(TUNED, word)
    trials = [p.config for p in tuning.runs_of(tuning.trials(e))]
    ours = {s for c in (p.config for p in e.points) for s in (c.seed_of_init, c.seed_of_data)}
    theirs = {s for c in trials for s in (c.seed_of_init, c.seed_of_data)}
    assert not ours & theirs and {(c.init_seed, c.data_seed) for c in trials} == {(None, None)}


def test_replicates_are_tuned_as_one_setting(write, tmp_path, monkeypatch):
    """Three initial weights of one setting get one learning rate, chosen once."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "git", lambda: None)
    e = write({"axes": {"n_head": "1,2"}, "tune": {"optim.lr": [1e-3, 1e-2]}}, "init_seed=0,1,2")
    tried = tuning.trials(e)
    assert len(tuning.runs_of(tried)) == 2 * 2
    for p in tuning.runs_of(tried):
        finish(p, 2.0 if (p.config.optim.lr == 1e-2) == (p.config.n_head == 1) else 2.1)
    chosen, record = tuning.choose(e, tried)
    assert len(record) == 2 and len(chosen.points) == 6
    assert {(p.config.n_head, p.config.optim.lr) for p in chosen.points} == {(1, 1e-2), (2, 1e-3)}


def test_a_setting_that_cannot_be_tuned_is_told(write, tmp_path, monkeypatch):
    """All its trials failed: it goes on as it was, and sweep.json has a warning."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "git", lambda: None)
    e = write({"axes": {"n_head": "1,2"}, "tune": {"optim.lr": [1e-3, 1e-2]}}, "seed=0")
    tried = tuning.trials(e)
    for p in tuning.runs_of(tried):
        finish(p, 2.0, "done" if p.config.n_head == 1 else "failed")
    chosen, record = tuning.choose(e, tried)
    about = sweep.about_of(sweep.make_plan(chosen.points), e.sweep, record)
    assert about["tuned"][1]["chosen"] == {}
    (warning,) = about["warnings"]
    assert warning == "n_head=2: no candidate finished all its trials, so optim.lr is not tuned"


def test_no_folder_is_trained_twice_at_once(write):
    """Candidates that are the same, and points that become the same, are one run."""
    e = write({"axes": {"n_head": "1,2"}, "tune": {"optim.lr": [1e-3, 0.001]}}, "seed=0")
    assert len(tuning.runs_of(tuning.trials(e))) == 2
    (a, b) = e.points
    assert fair.distinct([a, b, a]) == [a, b]


@pytest.mark.parametrize(
    ("compare", "word", "said"),
    [
        ("parameters", "d_ff=64", "compare=parameters finds d_ff itself, so d_ff=64 cannot be given"),
        ("parameters", "d_ff=64,128", "compare=parameters finds d_ff itself"),
        ("flops", "budget.steps=9", "compare=flops finds budget.steps itself"),
        ("flops", "budget.tokens=9000", "compare=flops finds budget.tokens itself"),
    ],
)
def test_what_is_solved_for_cannot_be_given(write, compare, word, said):
    with pytest.raises(UserError, match=said):
        fair.equalise(write({"axes": {"w_o": "true,false"}, "compare": compare}, word))


def test_equal_flops_of_no_steps_are_no_steps(write):
    e = write({"axes": {"w_o": "true,false"}, "compare": "flops"}, "seed=0", head="budget:\n  steps: 0\n")
    assert {p.config.max_steps for p in fair.equalise(e).points} == {0}


def test_paths_in_sweep_json_have_slashes(write, tmp_path, monkeypatch):
    """So that a folder made on Windows is read elsewhere."""
    monkeypatch.chdir(tmp_path)
    plan = sweep.make_plan(write({"axes": {"n_head": "1,2"}}, "seed=0").points)
    jobs = [dataclasses.replace(j, path=PureWindowsPath(j.path)) for j in plan.jobs]
    windows = SimpleNamespace(jobs=jobs, folder=PureWindowsPath(plan.folder))
    assert sweep.about_of(windows, None, [])["runs"] == [f"{j.point.label}/seed=0" for j in plan.jobs]


AB = {"that": "x", "value": {"n_head": 2}, "against": {"n_head": 1}}


@pytest.mark.parametrize(
    ("sweep", "said"),
    [
        ({"axes": {"n_haed": "1,2"}}, "did you mean n_head"),
        ({"points": [{"n_head": [1, 2], "nn": 1}]}, "unknown key nn"),
        ({"axes": {"n_head": "1,2"}, "compare": "energy"}, "must be one of steps, parameters, flops, time"),
        ({"checks": [{"that": "x"}]}, "needs low, high or both"),
        ({"checks": [AB | {"low": 2, "high": 1}]}, "above high"),
        ({"checks": [AB | {"lwo": 2}]}, "unknown key sweep mine: checks.lwo"),
        ({"checks": [{"that": "x", "low": 1}]}, "needs value and against"),
        ({"checks": [AB | {"low": 1, "metric": "tset_loss"}]}, "did you mean test_loss"),
        ({"checks": [AB | {"low": 1, "value": {"n_haed": 2}}]}, "did you mean n_head"),
        ({"checks": [AB | {"low": 1, "metric": "stalled", "minus": {"dim": 8}}]}, "is a share, without minus"),
        ({"checks": [{"that": "x", "best": "inside", "value": {"n_head": [1, 2]}}]}, "three values or more"),
        ({"checks": [{"that": "x", "best": "inside", "value": {"n_head": [1, 2, 4]}, "high": 1}]}, "takes no against"),
        ({"checks": 7}, "checks=7: must be a list"),
        ({"slices": ["poss"], "checks": [AB | {"low": 1}]}, "did you mean pos"),
        ({"points": [{"n_head": 1}], "axes": {"n_head": "1,2"}}, "in points and in axes"),
        ({"seeds": {"smok": 2}}, "did you mean smoke"),
        ({"steps": 200}, "steps=200: must be a table"),
        ({"seeds": {"full": 0}}, "seeds for budget=full must be a number above 0"),
        ({"seeds": {"full": "3"}}, "seeds for budget=full must be a number above 0"),
        ({"name": "../x"}, "must be a folder below output_dir"),
        ({"axes": {"n_head": "1,2"}, "compare": "time"}, "has no minutes for budget=full"),
        ({"question": None, "axes": {"n_head": "1,2"}}, "sweep.question"),
    ],
)
def test_mistakes_in_a_file_are_one_line(write, sweep, said):
    with pytest.raises(UserError, match=said):
        write(sweep)


@pytest.mark.parametrize("name", choices("sweep"))
def test_shipped_statements_are_whole(name):
    """Each has a statement, its source, checks whose settings exist, and seeds for an interval in each budget."""
    for budget, least in (("smoke", 2), ("quick", 3), ("full", 5)):
        e = compose.experiment([f"sweep={name}", f"budget={budget}"])
        s = e.sweep
        assert s.statement and s.source and s.question.endswith("?") and s.name == name and s.checks
        assert min(sum(p.label == q.label for q in e.points) for p in e.points) >= least
    for check in s.parsed_checks:
        sides = [{k: v} for k, vs in check.value.items() for v in vs] if check.best else [check.value, check.against]
        sides += [side | check.minus for side in sides] if check.minus else []
        for side in sides:
            assert any(all(p.swept.get(k) == v for k, v in side.items()) for p in e.points), (check.that, side)


def test_files_that_are_no_sweeps(tmp_path):
    (tmp_path / "sweep").mkdir()
    for content in ("n_head: 2\n", "# @package _global_\nn_head: 2\n", "sweep: {name: a, question: '?'}\n"):
        (tmp_path / "sweep" / "odd.yaml").write_text(content, "utf-8")
        with pytest.raises(UserError, match="must begin with `# @package _global_` and have a section `sweep:`"):
            compose.experiment(["sweep=odd"], extra=tmp_path)


def test_a_statement_keeps_what_it_compares():
    """A key that a check is about cannot be narrowed away: the runs would be trained and decide nothing."""
    with pytest.raises(UserError, match="needs w_o=false, which is none of these settings; leave w_o to the sweep"):
        compose.experiment(["sweep=w_o", "w_o=true"])
    with pytest.raises(UserError, match="leave n_head to the sweep"):
        compose.experiment(["sweep=relations", "n_head=2,4"])
    assert len(compose.experiment(["sweep=relations", "n_head=1,4", "seed=0"]).points) == 2


def test_the_end_of_what_was_tried_is_told():
    """A best value at the edge may have a better one beyond it."""
    tried = [{"values": {"optim.lr": lr}, "val_loss": 2.0} for lr in (1e-3, 3e-3, 1e-2)]
    record = [{"setting": {"n_head": 4}, "chosen": {"optim.lr": lr}, "candidates": tried} for lr in (3e-3, 1e-2)]
    (warning,) = tuning.warnings_of(record)
    assert warning == "n_head=4: the best optim.lr=0.01 lies at the end of what was tried"


def test_like_and_sweep_exclude_each_other():
    with pytest.raises(UserError, match="exclude each other"):
        compose.experiment(["like=outputs/train/default/seed=0", "sweep=w_o"])
