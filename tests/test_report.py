"""From run folders to a table: the folder and its rules, the table."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import filelock
import pytest

from toymha import caveats, cli, compose, pictures, runs
from toymha.config import GROUPS, choices
from toymha.metrics import Result, metric, percent, setting_name
from toymha.report import Report
from toymha.schema import UserError
from toymha.statement import Sweep
from toymha.table import Table
from toymha.words import parse


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Each test in a folder of its own; git is not asked for every run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "git", lambda: None)
    return tmp_path


composer = compose.Composer()


def point(*words: str) -> compose.Point:
    values = {"data": "pydoc"} | {a.key: a.values[0] for a in parse(words)}
    return composer.point(values, set())


def a_run(*words: str, loss: float | None = None, status: str = "done", text: str = "text", **summary) -> runs.Run:
    """A run folder as training leaves it, without training."""
    p = point(*words)
    run = runs.Run.open(runs.folder(p.config, p.label), p.config, text, {"choices": p.choices, "label": p.label})
    run.release()
    if loss is not None:
        val = {"loss": loss, "ppl": math.exp(loss) if loss < 709 else math.inf, "bits_per_char": loss / math.log(2)}
        summary = {"val": val, "best": val | {"step": 1}, "unigram_loss": 3.0, "parameters": 1000} | summary
    run.update(status=status, **summary)
    return run


def table(axes: list[str], order=(), root: str = "outputs") -> Table:
    return Table.of(map(Result.of, runs.find(root)), axes, list(order))


def a_sweep(
    axes: list[str],
    made: list[runs.Run],
    missing: Sequence[dict] = (),
    sweep: dict | None = None,
    **about,
) -> Path:
    """sweep.json beside runs of one folder; `missing`: settings that have not begun; `sweep`: keys of a statement."""
    folder = made[0].path.parent.parent
    values = [{k: r.info["values"][k] for k in (*axes, "seed")} for r in made]
    paths = [r.path.relative_to(folder).as_posix() for r in made]
    paths += ["/".join(f"{k}={v}" for k, v in m.items()) for m in missing]
    said = {
        "axes": axes,
        "order": [*values, *missing],
        "runs": paths,
        "sweep": None if sweep is None else {"name": "s", "question": "?"} | sweep,
    }
    runs.write_json(folder / "sweep.json", said | about)
    return folder


def load_table(folder: str) -> Table:
    return Report.load(folder).table


# The run folder


def test_a_second_identity_is_refused_and_named():
    """A folder that holds another run is left alone; the message has the differing keys and the way out."""
    p, q = point("n_head=2"), point("n_head=4")
    path = a_run("n_head=2", loss=1.0).path
    before = (path / "run.json").read_bytes()
    with pytest.raises(UserError) as e:
        runs.Run.open(path, q.config, "text", {})
    for part in ("n_head", "2", "4", "name=", "overwrite=true"):
        assert part in str(e.value)
    assert "n_layer" not in str(e.value) and (path / "run.json").read_bytes() == before
    with pytest.raises(UserError, match=r"data\.sha256"):
        runs.Run.open(path, p.config, "another text", {})
    with pytest.raises(UserError):
        runs.state_of(path, q.config, "text")
    assert runs.state_of(path, p.config, "text") == "done"


def test_output_and_machine_keys_are_no_conflict():
    """The same run on other threads, with other logging, finds its folder."""
    path = a_run("n_head=2", loss=1.0).path
    p = point("n_head=2", "threads=3", "budget.log_every=3", "compile=true", "device=cpu")
    run = runs.Run.open(path, p.config, "text", {})
    run.release()
    assert run.status == "done"


def test_overwrite_replaces_the_run_and_keeps_what_is_not_ours():
    """overwrite=true deletes the files of the old run only."""
    run = a_run("n_head=2", loss=1.0)
    ours = [
        "metrics.jsonl", "tokenizer.json", "log.txt", "checkpoint.pt", "model.safetensors", "best.safetensors",
        "events.out.tfevents.1.host",
    ]  # fmt: skip
    foreign = ["notes.txt", "model.py", "runner.sh", "logbook.md"]
    for name in ours + foreign:
        (run.path / name).write_text("old")
    (run.path / "folder").mkdir()
    p = point("n_head=2", "overwrite=true")
    again = runs.Run.open(run.path, p.config, "a new text", {})
    again.release()
    there = {f.name for f in run.path.iterdir()} - {".lock"}
    assert there == {"config.yaml", "run.json", "folder", *foreign}
    assert again.status == "running" and again.summary == {}


def test_a_run_in_use_is_refused_and_unharmed(monkeypatch):
    """A second process is told; the folder of the first stays, also with overwrite=true."""

    class Impatient(filelock.FileLock):
        def acquire(self, *_args, **_kwargs):
            return super().acquire(timeout=0)

    monkeypatch.setattr(runs.filelock, "FileLock", Impatient)
    p = point("n_head=2")
    first = runs.Run.open(Path("r"), p.config, "text", {})
    first.update(step=3)
    for words in (["n_head=2"], ["n_head=2", "overwrite=true"]):
        with pytest.raises(UserError, match="another process"):
            runs.Run.open(Path("r"), point(*words).config, "text", {})
    assert first.summary == {"step": 3}
    first.release()
    runs.Run.open(Path("r"), p.config, "text", {}).release()


def test_a_resumed_run_remembers_when_it_was_created():
    """Opening again keeps `created`, and brings the rest up to date."""
    run = a_run("n_head=2", status="interrupted")
    info = runs.read_json(run.path / "run.json") | {"created": "then"}
    runs.write_json(run.path / "run.json", info)
    again = runs.Run.open(run.path, run.config, "text", {"device": "cpu"})
    again.release()
    assert again.info["created"] == "then" and runs.read_json(run.path / "run.json")["device"] == "cpu"
    assert again.status == "interrupted"


def test_load_reads_back_what_open_wrote():
    """The typed config and the facts of a run survive the folder, also when numbers look like words."""
    run = a_run("optim.lr=1e-5", "name=1984", loss=2.0)
    again = runs.Run.load(run.path)
    assert again.config == run.config and again.info == run.info and again.status == "done"
    assert again.config.optim.lr == 1e-5 and again.config.name == "1984"


def test_load_of_what_is_no_run():
    """The message names the folder, or a run that lies below it."""
    with pytest.raises(UserError, match="nothing is not a run folder"):
        runs.Run.load("nothing")
    run = a_run("n_head=2", loss=1.0)
    with pytest.raises(UserError) as e:
        runs.Run.load("outputs")
    assert str(run.path) in str(e.value)
    with pytest.raises(UserError, match=f"did you mean {run.path}"):
        runs.Run.load(str(run.path).replace("n_head=2", "n_head=4"))


@pytest.mark.parametrize("name", ["run.json", "config.yaml"])
@pytest.mark.parametrize("content", ["{", "[]", "", "a: [", None, '{"a": 1}'])
def test_a_damaged_folder_is_one_line(name, content):
    """A file that is missing, cut short or foreign is a UserError that names the folder."""
    run = a_run("n_head=2", loss=1.0)
    (run.path / name).unlink()
    if content is not None:
        (run.path / name).write_text(content)
    with pytest.raises(UserError) as e:
        runs.Run.load(run.path)
    assert "\n" not in str(e.value) and "seed=0" in str(e.value)


@pytest.mark.parametrize("content", ["{", "[]", "", '{"a": 1}'])
def test_a_damaged_run_beside_good_ones(content):
    """The table leaves it out."""
    a_run("n_head=2", loss=1.0)
    bad = a_run("n_head=4", loss=1.0)
    (bad.path / "run.json").write_text(content)
    assert len(load_table("outputs").rows) == 1


def test_a_failed_write_leaves_the_old_file(home):
    """Writing is all or nothing, and leaves no temporary file."""
    path = home / "f.txt"
    path.write_text("old")

    def save(p: Path) -> None:
        p.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError):
        runs.write(path, save)
    assert path.read_text() == "old" and [p.name for p in home.iterdir()] == ["f.txt"]
    runs.write(path, lambda p: p.write_text("new"))
    assert path.read_text() == "new" and [p.name for p in home.iterdir()] == ["f.txt"]


def test_a_last_row_cut_short_is_left_out():
    """metrics.jsonl after a kill in the middle of a line."""
    run = a_run("n_head=2", status="running")
    (run.path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"ste')
    assert [r["step"] for r in run.rows()] == [0, 1]


def test_runs_are_found_in_the_order_of_numbers():
    """n_head=2 before n_head=16, seed=2 before seed=10."""
    for words in ("n_head=16", "seed=0"), ("n_head=2", "seed=10"), ("n_head=2", "seed=2"):
        a_run(*words, loss=1.0)
    assert [(r.info["values"]["n_head"], r.info["values"]["seed"]) for r in runs.find("outputs")] == [
        (2, 2), (2, 10), (16, 0)
    ]  # fmt: skip


# The table


def test_rows_columns_and_baseline():
    """One row a value, in the order asked for; the first is the baseline; means and paired differences by hand."""
    losses = {4: [2.0, 2.2, 2.4], 1: [2.1, 2.4, 2.4], 2: [1.9, 2.1, 2.3]}
    for h, values in losses.items():
        for seed, loss in enumerate(values):
            a_run(f"n_head={h}", f"seed={seed}", loss=loss)
    t = table(["n_head"], [{"n_head": h, "seed": s} for h in losses for s in range(3)])
    four, one, two = t.records()
    assert [r["n_head"] for r in (four, one, two)] == [4, 1, 2]
    assert (four["runs"], four["done"], four["parameters"]) == (3, 3, 1000)
    assert four["val_loss"] == pytest.approx(2.2) and four["val_loss_std"] == pytest.approx(0.2)
    assert four["difference"] is None and four["difference_low"] is None
    assert one["difference"] == pytest.approx(0.1) and one["pairs"] == 3
    assert two["difference"] == pytest.approx(-0.1) and two["difference_high"] < 0
    text = t.text()
    assert "baseline" in text.splitlines()[1] and "*" not in text.splitlines()[2]


@pytest.mark.parametrize(
    "key, values", [("n_head", [1, 2, 4, 8, 16]), ("optim.lr", [1e-5, 1e-4, 1e-3, 2.0]), ("n_kv_head", [None, 1, 2])]
)
def test_without_an_order_numbers_are_sorted_as_numbers(key, values):
    """null first, then by size: 1e-5 before 1e-3, 2 before 16."""
    for v in reversed(values):
        a_run(f"{key}={'null' if v is None else v}", loss=1.0)
    assert [r[key] for r in load_table("outputs").records()] == values


def test_the_order_of_floats_typed_as_whole_numbers():
    """-m attn_dropout=0,0.1 has 0 as its first row, since the first row is what the others are compared with."""
    points = compose.points(["data=pydoc", "attn_dropout=0,0.1"], multirun=True)
    for p in points:
        a_run(f"attn_dropout={p.config.attn_dropout}", loss=1.0)
    t = table(["attn_dropout"], [p.swept for p in points])
    assert [r["attn_dropout"] for r in t.records()] == [0.0, 0.1]


def test_only_common_seeds_are_paired():
    """A seed that one of the two settings lacks counts in its mean and not in the difference."""
    for seed, loss in [(0, 1.0), (1, 2.0)]:
        a_run("n_head=1", f"seed={seed}", loss=loss)
    for seed, loss in [(1, 2.5), (2, 9.0)]:
        a_run("n_head=2", f"seed={seed}", loss=loss)
    _, two = table(["n_head"]).records()
    assert (two["pairs"], two["difference"], two["difference_low"]) == (1, 0.5, None)
    assert two["val_loss"] == pytest.approx(5.75)
    assert "one seed" in table(["n_head"]).text()


@pytest.mark.parametrize("status", ["diverged", "failed", "interrupted", "running"])
def test_what_is_not_done_is_counted_and_not_averaged(status):
    """Its number stands beside the mean; nothing of it goes into the mean."""
    a_run("n_head=1", "seed=0", loss=1.0)
    a_run("n_head=2", "seed=0", loss=1.5)
    a_run("n_head=2", "seed=1", status=status, loss=77.0, error="loss nan at step 3")
    a_run("n_head=2", "seed=2", status=status)
    _, two = table(["n_head"]).records()
    assert (two["runs"], two["done"], two["val_loss"]) == (3, 1, 1.5)
    text = table(["n_head"]).text()
    assert "1/3" in text and f"2 {status}" in text and "77" not in text
    assert status not in ("diverged", "failed") or "loss nan at step 3" in text


def test_a_setting_of_which_nothing_is_done():
    """The row stays; the baseline may be such a row, and then nothing is compared with it."""
    a_run("n_head=1", status="diverged", error="loss inf at step 1")
    a_run("n_head=2", loss=1.5)
    one, two = table(["n_head"]).records()
    assert (one["done"], one["val_loss"], two["difference"], two["pairs"]) == (0, None, None, 0)
    assert "no pairs" in table(["n_head"]).text()


def test_a_number_that_is_none_is_not_averaged():
    """A run whose final loss is not a number does not pass for a result."""
    a_run("n_head=1", "seed=0", loss=1.0)
    a_run("n_head=1", "seed=1", loss=math.nan)
    (row,) = table(["n_head"]).records()
    assert row["done"] == 1 and row["val_loss"] == 1.0


def test_no_better_than_letter_frequencies():
    """A run that never beat the unigram model is flagged."""
    a_run("n_head=1", loss=3.1)
    a_run("n_head=2", loss=2.9)
    flagged = [line for line in table(["n_head"]).text().splitlines() if "no better than the frequencies" in line]
    assert len(flagged) == 1 and "n_head=1" in flagged[0]


def test_last_and_best_are_two_columns():
    """The loss of the last weights and of the best evaluation are both there, named, and differences use the last."""
    best = {"loss": 1.0, "step": 5}
    a_run("n_head=1", loss=2.0, best=best)
    a_run("n_head=2", loss=1.8, best=best | {"loss": 1.5})
    one, two = table(["n_head"]).records()
    assert (one["val_loss"], one["best_val_loss"]) == (2.0, 1.0)
    assert two["difference"] == pytest.approx(-0.2)
    assert "best" in table(["n_head"]).text() and "last" in table(["n_head"]).text()


def test_different_texts_are_warned_of():
    """Perplexities over different texts or tokens do not compare, and the table says so."""
    a_run("n_head=1", loss=1.0, text="a")
    a_run("n_head=2", loss=1.0, text="a")
    assert "warning" not in load_table("outputs").text()
    a_run("n_head=4", loss=1.0, text="b")
    (warning,) = [x for x in load_table("outputs").text().splitlines() if x.startswith("warning")]
    assert "bits/char" in warning
    _, two, four = load_table("outputs").records()
    assert (two["compared_in"], four["compared_in"]) == ("val_loss", "bits_per_char")
    assert four["percent_of_perplexity"] is None and "n_head=4" in warning and "n_head=2" not in warning


def test_marks_are_for_the_whole_table():
    """A difference that would be significant alone is not marked where Holm's correction takes it back."""
    for h, losses in {1: [2.0, 2.0, 2.0], 2: [2.03, 2.06, 2.05], 4: [2.9, 2.91, 2.9]}.items():
        for seed, loss in enumerate(losses):
            a_run(f"n_head={h}", f"seed={seed}", loss=loss)
    _, two, four = table(["n_head"]).records()
    assert two["p"] < 0.05 and two["p_holm"] == two["p"] and four["p_holm"] == 2 * four["p"]
    for h, losses in {8: [2.0, 2.01, 1.98], 16: [2.0, 1.98, 2.01]}.items():
        for seed, loss in enumerate(losses):
            a_run(f"n_head={h}", f"seed={seed}", loss=loss)
    _, two, four, *_ = table(["n_head"]).records()
    lines = table(["n_head"]).text().splitlines()
    assert two["p_holm"] > 0.05 and "*" not in lines[2] and lines[3].endswith("*")


def test_several_sweeps_are_no_one_table():
    """Their texts and questions differ; the line names what to type."""
    for name in ("a", "b"):
        a_run(f"name={name}", loss=2.0)
        runs.write_json(Path(f"outputs/{name}/sweep.json"), {"axes": [], "order": [], "runs": []})
    with pytest.raises(UserError, match=r"sweeps of their own; report one of them: run=outputs/a, run=outputs/b"):
        Report.load("outputs")
    assert len(Report.load("outputs/a").table.rows) == 1
    shutil.rmtree("outputs/a")
    assert Report.load("outputs").table.rows  # one that tests no statement is what it was before
    about = {"axes": [], "order": [], "runs": [], "sweep": {"name": "b", "question": "?"}}
    runs.write_json(Path("outputs/b/sweep.json"), about)
    with pytest.raises(UserError, match="report one of them: run=outputs/b"):
        Report.load("outputs")


def test_diverging_more_often_is_a_finding():
    for seed in range(4):
        a_run("n_head=1", f"seed={seed}", loss=2.0)
        a_run("n_head=2", f"seed={seed}", status="diverged", error="loss nan")
    assert "4/4 diverged or stalled against 0/4 (Fisher's exact p = 0.0286)" in table(["n_head"]).text()


def test_slices_have_baselines_of_their_own():
    for pos, losses in (("rope", (2.0, 1.9)), ("none", (3.0, 3.2))):
        for h, loss in zip((1, 2), losses):
            a_run(f"n_head={h}", f"pos={pos}", loss=loss)
    t = table(["pos", "n_head"])
    t.slices = ["pos"]
    differences = {(r["pos"], r["n_head"]): r["difference"] for r in t.records()}
    assert differences["rope", 1] is None and differences["none", 1] is None
    assert differences["rope", 2] == pytest.approx(-0.1) and differences["none", 2] == pytest.approx(0.2)


def test_seeds_of_weights_and_of_batches_make_pairs_too():
    """Runs that differ in init_seed alone are repeats of one setting, and pair with those of equal seeds."""
    for init, (one, two) in enumerate([(2.0, 1.9), (2.2, 2.1)]):
        a_run("n_head=1", f"init_seed={init}", loss=one)
        a_run("n_head=2", f"init_seed={init}", loss=two)
    _, two = load_table("outputs").records()
    assert two["pairs"] == 2 and two["difference"] == pytest.approx(-0.1) and "init_seed" not in two


def test_different_tokenizers_are_warned_of():
    """The same for characters against bytes."""
    for words in (["data.tokenizer=char"], ["data.tokenizer=byte"]):
        a_run(*words, loss=1.0)
    assert "warning" in load_table("outputs").text()


def test_files_beside_the_runs():
    """report.csv and report.json hold the same records, unrounded, and strict JSON."""
    a_run("n_head=1", loss=1 / 3)
    a_run("n_head=2", "seed=1", loss=800.0)
    table(["n_head"]).write(Path("outputs"))

    def strict(x: str):
        raise AssertionError(f"{x} is not JSON")

    records = json.loads(Path("outputs/report.json").read_text(), parse_constant=strict)
    rows = list(csv.DictReader(Path("outputs/report.csv").read_text().splitlines()))
    assert [r["val_loss"] for r in records] == [1 / 3, 800.0] and float(rows[0]["val_loss"]) == 1 / 3
    assert list(records[0]) == list(rows[0]) and rows[0]["difference"] == ""
    assert {p.name for p in Path("outputs").iterdir()} == {"train", "report.csv", "report.json"}


# What was asked for


def test_missing_runs_are_counted_by_setting(capsys):
    """3 of 5 seeds is 3/5, with the reason; a setting of which nothing has begun has a row, in the order asked for."""
    made = [a_run(f"n_head={h}", f"seed={s}", loss=2.0 + h / 10) for h, n in ((2, 5), (4, 3)) for s in range(n)]
    missing = [{"n_head": 4, "seed": s} for s in (3, 4)] + [{"n_head": 8, "seed": s} for s in range(5)]
    t = load_table(str(a_sweep(["n_head"], made, missing)))
    assert [(r["n_head"], r["asked"], r["runs"], r["done"]) for r in t.records()] == [
        (2, 5, 5, 5),
        (4, 5, 3, 3),
        (8, 5, 0, 0),
    ]
    text = t.text()
    assert "3/5" in text and "0/5" in text
    assert "n_head=4: 2 not begun" in text and "n_head=8: 5 not begun" in text and "n_head=2:" not in text
    assert cli.main(["report", "run=outputs/train"]) == 0
    assert "3/5" in capsys.readouterr().out


def test_a_baseline_that_has_not_begun_stays_the_baseline():
    """The others wait for it, rather than being compared with whichever began first."""
    made = [a_run("n_head=2", loss=2.0), a_run("n_head=4", loss=1.0)]
    folder = a_sweep(["n_head"], made, [{"n_head": 1, "seed": 0}])
    about = runs.read_json(folder / "sweep.json")
    for key in ("order", "runs"):
        about[key] = about[key][-1:] + about[key][:-1]
    runs.write_json(folder / "sweep.json", about)
    one, two, four = load_table(str(folder)).records()
    assert one["n_head"] == 1 and one["difference"] is None and two["pairs"] == four["pairs"] == 0


def test_missing_runs_beside_foreign_ones_are_counted():
    """Where the folder holds runs of other keys too, the rows are told apart by those; the sum is still told."""
    folder = a_sweep(["n_head"], [a_run("n_head=2", loss=1.0)], [{"n_head": 4, "seed": 0}])
    a_run("dim=32", "n_head=2", loss=1.5)
    assert "1 of the runs that were asked for last: not begun" in load_table(str(folder)).text()


@pytest.mark.parametrize("command", ["report", "load"])
def test_a_statement_of_which_nothing_has_begun(command, capsys):
    """Runs of another sweep in its folder are not its runs."""
    folder = a_sweep(["n_head"], [a_run("n_head=2", loss=1.0)], sweep={})
    about = runs.read_json(folder / "sweep.json")
    runs.write_json(folder / "sweep.json", about | {"runs": ["n_head=4/seed=0", "n_head=8/seed=0"]})
    if command == "load":
        with pytest.raises(UserError, match="none of the 2 runs of this sweep has begun"):
            Report.load(folder)
    else:
        assert cli.main(["report", f"run={folder}"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and "none of the 2 runs" in err


def test_a_seed_given_three_times_is_one(capsys):
    """-m seed=1,1,1: one run was asked for, and it has no spread."""
    points = compose.points(["data=pydoc", "seed=1,1,1"], multirun=True)
    folder = a_sweep([], [a_run("seed=1", loss=2.0)])
    about = runs.read_json(folder / "sweep.json")
    about |= {"order": [p.swept for p in points] or about["order"], "runs": about["runs"] * max(1, len(points))}
    runs.write_json(folder / "sweep.json", about)
    (row,) = load_table(str(folder)).records()
    assert (row["asked"], row["runs"], row["done"], row["val_loss_std"]) == (1, 1, 1, None)
    assert cli.main(["report", f"run={folder}"]) == 0
    assert "0.0000" not in capsys.readouterr().out


# Warnings

ROWS = [{"step": 0, "loss/val": 4.2}, {"step": 10, "loss/train": 3.1, "grad_norm": 0.5}]
LATER = {"step": 20, "loss/train": 2.5, "grad_norm": 0.4, "loss/val": 2.6}


def logged(run: runs.Run, rows: list[dict]) -> runs.Run:
    run.write_text("metrics.jsonl", "".join(json.dumps(r) + "\n" for r in rows))
    return run


@pytest.mark.parametrize(
    ("other", "loss", "status", "inert"),
    [
        (LATER, 2.0, "done", True),
        (LATER | {"loss/train": 2.5000000001}, 2.0, "done", False),  # alike during warm-up only
        (LATER | {"loss/val": 2.61}, 2.0, "done", False),
        (LATER | {"grad_norm": 0.41}, 2.0, "done", False),
        (LATER | {"step": 30}, 2.0, "done", False),
        (LATER, 2.0000000001, "done", False),  # the whole split tells them apart
        (LATER, 2.0, "running", False),  # what comes may differ
    ],
)
def test_only_what_is_alike_to_the_end_changes_nothing(other, loss, status, inert):
    """A schedule begins to act after warm-up, so equal beginnings say nothing."""
    one = logged(a_run("optim.min_lr=0.0", loss=2.0), [*ROWS, LATER])
    two = logged(a_run("optim.min_lr=0.1", loss=loss, status=status), [*ROWS, other])
    folder = a_sweep(["optim.min_lr"], [one, two], sweep={"axes": {"optim.min_lr": "0,0.1"}})
    assert any("changes nothing" in w for w in Report.load(folder).warnings) == inert
    runs.write_json(folder / "sweep.json", runs.read_json(folder / "sweep.json") | {"sweep": None})
    assert Report.load(folder).warnings == []


def test_warnings_of_the_sweep_are_told(capsys):
    """Those in sweep.json stand with the others: under the verdict, or under the table where there is none."""
    made = [a_run("n_head=1", loss=2.0), a_run("n_head=2", loss=1.9)]
    for sweep, line in (({}, "warning    d_ff is 3"), (None, "warning: d_ff is 3")):
        a_sweep(["n_head"], made, sweep=sweep, warnings=["d_ff is 3"])
        assert cli.main(["report", "run=outputs/train"]) == 0
        assert capsys.readouterr().out.count(line) == 1


def test_what_was_tuned_is_told():
    """A line for each setting: what was chosen, and each candidate with its loss."""
    tried = [{"values": {"optim.lr": 0.01}, "val_loss": 2.25}, {"values": {"optim.lr": 0.1}, "val_loss": None}]
    tuned = [{"setting": {"n_head": 1}, "chosen": {"optim.lr": 0.01}, "candidates": tried}]
    folder = a_sweep(["n_head"], [a_run("n_head=1", loss=2.0)], sweep={}, tuned=tuned)
    assert "  n_head=1: optim.lr=0.01 of optim.lr=0.01 (2.2500); optim.lr=0.1 (-)\n" in Report.load(folder).text()


def test_the_convention_of_flops_is_told():
    """Beside the FLOPs; not where there are none."""
    cost = {"flops_per_token": 1e6, "tokens_trained": 100, "seconds": 1.0}
    folder = a_sweep(["n_head"], [a_run("n_head=1", loss=2.0, **cost)], sweep={})
    assert Report.load(folder).text().count(caveats.FLOPS) == 1
    for part in ("2 a multiply-add", "T x T", "3 x forward", "elementwise"):
        assert part in caveats.FLOPS
    folder = a_sweep(["n_head"], [a_run("n_head=1", "name=b", loss=2.0)], sweep={})
    assert caveats.FLOPS not in Report.load(folder).text()


@pytest.mark.parametrize(
    ("tokens", "said"), [((0, 0), None), ((0, 100), "some have none"), ((100, 150), "by up to 50%")]
)
def test_trainings_without_steps_have_no_flops(tokens, said):
    """budget.steps=0 is a ratio of nothing."""
    made = [
        a_run(f"n_head={h}", loss=2.0, flops_per_token=1e6, tokens_trained=n, seconds=0.0)
        for h, n in zip((1, 2), tokens)
    ]
    warnings = caveats.warnings_of(Sweep("s", "?", slices=[], compare="steps"), [Result.of(r) for r in made])
    assert [said in w for w in warnings] == ([True] if said else [])


# A claim about a number itself


def of_heads(*shares: float) -> list[runs.Run]:
    """Runs of one setting whose heads were studied."""
    return [
        a_run(f"seed={s}", loss=2.0, heads={"removable": {"zeroed": share}}, test={"loss": 2.0, "ppl": 7.4})
        for s, share in enumerate(shares)
    ]


def test_a_statement_of_one_setting(capsys):
    """No axis, three seeds: the claim is told without signs in the terminal, in HTML and in Markdown."""
    made = of_heads(0.2, 0.3, 0.4)
    check = {"that": "a third can go", "value": {}, "metric": "removable", "low": 20, "high": 40}
    folder = a_sweep([], made, sweep={"checks": [check], "statement": "A third of the heads can go."})
    assert cli.main(["report", f"run={folder}"]) == 0
    out = capsys.readouterr().out
    assert "check      a third can go: 30.0 [5.2, 54.8] %; claimed 20.0 to 40.0 %: undecided\n" in out
    assert "warning" not in out and "would decide it, if the numbers stay as they are" in out
    source, markdown = ((folder / f"report.{kind}").read_text("utf-8") for kind in ("html", "md"))
    for part in ("30.0 %", "5.2 to 54.8 %", "20.0 to 40.0 %"):
        assert part in source and part in markdown and f"+{part}" not in source + markdown
    assert "heads that can go at less than 1 % perplexity" in source
    assert "What was measured" in source and "How large the differences are" not in source
    assert "<dt>seeds</dt><dd>3</dd>" in source and "<dt>pairs" not in source and "<dt>p</dt>" not in source
    head, _, row = [line for line in markdown.splitlines() if line.startswith("|")][:3]
    assert head.startswith("| check | verdict | measured | claimed |")
    assert row.startswith("| a third can go | undecided | 30.0 % | 20.0 to 40.0 % |")
    records = json.loads((folder / "report.json").read_text())
    assert len(records) == 1 and records[0]["done"] == 3


def test_the_figure_of_a_number_has_no_line_at_zero():
    """Nor does it reach down to zero: the numbers and what is claimed of them fill it."""
    made = of_heads(0.30, 0.31, 0.32)
    check = {"that": "a third can go", "value": {}, "metric": "removable", "low": 25}
    drawn = pictures.pictures(Report.load(a_sweep([], made, sweep={"checks": [check]}))).effects
    assert len(drawn) == 1 and "mean over seeds (%)" in drawn[0].svg and "stroke: #222222" not in drawn[0].svg
    assert ">0</text>" not in drawn[0].svg and "at least 25.0 %" in drawn[0].caption
    made = [a_run(f"n_head={h}", f"seed={s}", loss=2.0 + h) for h in (1, 2) for s in (0, 1)]
    check = {"that": "x", "value": {"n_head": 1}, "against": {"n_head": 2}, "metric": "val_loss", "high": 0.0}
    drawn = pictures.pictures(Report.load(a_sweep(["n_head"], made, sweep={"checks": [check]}))).effects
    assert "difference (nats)" in drawn[-1].svg and "stroke: #222222" in drawn[-1].svg


# Texts


def test_each_row_is_compared_with_its_own_baseline():
    """Slices of different texts are compared in nats within each, without a warning; the vocabularies are told."""
    made = []
    for text, losses in (("a", (2.0, 1.9)), ("b", (3.0, 3.2))):
        for h, loss in zip((1, 2), losses):
            words = (f"n_head={h}", f"data.split={'[0.9,0.1]' if text == 'a' else '[0.8,0.2]'}")
            made.append(a_run(*words, loss=loss, text=text, vocab_size=27 if text == "a" else 90))
    axes = ["data.split", "n_head"]
    t = Report.load(a_sweep(axes, made, sweep={"slices": ["data.split"]})).table
    assert {r["compared_in"] for r in t.records()} == {"val_loss"}
    assert [r["difference"] for r in t.records() if r["difference"]] == pytest.approx([-0.1, 0.2])
    text = t.text()
    assert "warning" not in text and "loss - baseline" in text and "vocabularies: 27, 90" in text


def test_rows_in_two_units_say_which():
    """One text differs from the baseline's: its difference is in bits, and says so; the others' are in nats."""
    a_run("n_head=1", loss=1.0, text="a")
    a_run("n_head=2", loss=1.1, text="a")
    a_run("n_head=4", loss=2.0, text="b")
    lines = load_table("outputs").text().splitlines()
    assert "difference to baseline" in lines[0]
    assert lines[2].endswith("+0.1000 (one seed: no interval) nats")
    assert lines[3].endswith(f"{1 / math.log(2):+.4f} (one seed: no interval) bits")


def test_bits_are_those_of_the_split():
    """The column of the test split and the difference beside it are of the same numbers."""
    scores = {"test": {"loss": 3.0, "ppl": math.exp(3), "bits_per_char": 5.0}}
    runs_ = [a_run(f"n_head={h}", loss=1.0, text=t, **scores) for h, t in ((1, "a"), (2, "b"))]
    r = Result.of(runs_[0])
    assert metric("bits_per_char").of(r) == 5.0 and "test" in metric("bits_per_char").label
    assert metric("bits_per_char", "val").of(r) == pytest.approx(1 / math.log(2))
    assert metric("ppl").of(r) == pytest.approx(3) and metric("ppl", "val").of(r) == pytest.approx(1)
    t = load_table("outputs")
    t.split = "test"
    assert [r["difference"] for r in t.records()] == [None, 0.0] and t.records()[1]["bits_per_char"] == 5.0


# Numbers


def test_losses_whose_perplexity_is_too_large():
    """A loss above 709 stays a number, its perplexity is infinite, and differences of it have no percentage."""
    made = [a_run("n_head=1", loss=2.0), a_run("n_head=2", loss=900.0)]
    checks = [{"that": "two", "value": {"n_head": 2}, "against": {"n_head": 1}, "metric": "val_loss", "high": 0.0}]
    report = Report.load(a_sweep(["n_head"], made, sweep={"checks": checks}))
    _, two = report.table.records()
    assert two["difference"] == 898.0 and two["perplexity"] is None and two["percent_of_perplexity"] is None
    assert "900.0000" in report.text() and "inf" in report.text().splitlines()[2]
    assert percent(898.0) == math.inf and percent(math.log(1.5)) == pytest.approx(50) and percent(-900.0) == -100


def test_speed_is_that_of_the_median_step():
    """The mean over the whole run counts the slow start; a run of an older version has none."""
    new, old = a_run("n_head=1", loss=2.0, tokens_per_s=5.0, steady_tokens_per_s=9.0), a_run(loss=2.0, tokens_per_s=5.0)
    assert metric("tokens_per_s").of(Result.of(new)) == math.log(9.0)
    assert metric("tokens_per_s").of(Result.of(old)) is None


def test_a_text_without_relations_has_not_failed_to_learn_them():
    """Beside runs of a generated text it has no rows in the table of relations."""
    part = {"loss": 0.1, "floor": 0.0, "right": 0.95, "accuracy": 1.0, "tokens": 9}
    val = {"loss": 2.0, "ppl": 7.4, "bits_per_char": 2.9, "parts": {"topic": part}}
    a_run("n_head=1", loss=2.0, val=val, learned={"topic": 30})
    a_run("n_head=2", loss=2.0)
    assert [line[0] for line in table(["n_head"]).relations()] == ["n_head", "1"]


def test_a_diverged_run_has_learned_nothing():
    """It counts among the runs, in the share and in the table by relation."""
    score = {"loss": 1.0, "ppl": 3.0, "bits_per_char": 1.0, "parts": {"topic": {"loss": 0.1, "right": 0.9}}}
    good = a_run("n_head=1", "seed=0", loss=1.0, val=score, learned={"topic": 30})
    bad = a_run("n_head=1", "seed=1", status="diverged", error="loss nan")
    slow = a_run("n_head=1", "seed=2", loss=1.0, val=score, learned={"topic": None})
    going = a_run("n_head=1", "seed=3", status="running")
    m = metric("learned/topic")
    assert [m.of(Result.of(r)) for r in (good, bad, slow, going)] == [1.0, 0.0, 0.0, None]
    assert metric("learned/nothing").of(Result.of(good)) is None
    assert load_table("outputs").relations()[1][-2:] == ["1/3", "30"]


def test_settings_as_one_types_them():
    assert setting_name({"n_head": 4, "w_o": False, "d_ff": None}) == "n_head=4, w_o=false, d_ff=null"


def test_models_that_differ_in_several_keys_are_told_by_their_name():
    """One key alone is the axis itself; several that the choice of model decides are one axis, `model`."""
    for model in ("mha", "gqa"):
        a_run(f"model={model}", "name=one", loss=1.0)
    assert Report.load("outputs/one").table.axes == ["n_kv_head"]
    for model, loss in (("encdec", 1.0), ("no_cross", 2.0), ("mha", 1.5)):
        for layers in (2, 3):
            a_run(f"model={model}", "data=dates", f"n_layer={layers}", "name=several", loss=loss)
    found = Report.load("outputs/several").table
    assert found.axes == ["model", "n_layer"] and len(found.rows) == 6
    assert found.rows[0].setting == {"model": "encdec", "n_layer": 2}


# The command


def test_report_of_a_half_finished_sweep(capsys):
    """A folder whose sweep was killed, so that no list of its axes was left: the differing keys are the axes."""
    a_run("n_head=1", "mlp=swiglu", "seed=0", loss=1.0)
    a_run("n_head=1", "mlp=swiglu", "seed=1", status="running")
    a_run("n_head=2", "mlp=swiglu", "seed=0", status="interrupted")
    assert cli.main(["report", "run=outputs/train"]) == 0
    out = capsys.readouterr().out
    assert out.split()[0] == "n_head" and "mlp" not in out and "1/2" in out and "0/1" in out


def test_report_of_one_run_and_of_none(capsys):
    """A run folder itself is a table of one row; a folder without runs is refused."""
    run = a_run("n_head=2", loss=1.0)
    assert cli.main(["report", f"run={run.path}"]) == 0
    assert "1.0000" in capsys.readouterr().out
    Path("empty").mkdir()
    for words in (["run=empty"], ["run=nowhere"]):
        assert cli.main(["report", *words]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("toymha: no runs in") and err.count("\n") == 1


def test_a_stale_list_of_axes_hides_nothing():
    """A run that differs in a key the last sweep did not vary keeps that key as a column."""
    a_run("dim=128", "n_head=2", loss=1.0)
    a_run("dim=32", loss=1.5)
    a_run("dim=64", loss=1.2)
    order = [{"dim": 32}, {"dim": 64}]
    runs.write_json(Path("outputs/train/sweep.json"), {"axes": ["dim"], "order": order})
    assert {"dim", "n_head"} <= set(load_table("outputs/train").records()[0])


def test_one_run_under_two_names_counts_once():
    """`train` and `train n_head=4` are the same run in two folders: one run, not two that agree perfectly."""
    a_run(loss=1.0)
    a_run("n_head=4", loss=1.0)
    (row,) = load_table("outputs").records()
    assert (row["runs"], row["done"]) == (1, 1)


def test_a_single_setting_has_a_readable_note(capsys):
    """Notes under a table without axes begin with a name."""
    a_run("n_head=1", loss=9.0)
    assert not any(line.startswith(":") for line in load_table("outputs").text().splitlines())


def test_groups_are_axes():
    """A sweep over model= is a table by the name of the file."""
    for m in ("mqa", "mha"):
        a_run(f"model={m}", loss=1.0)
    t = table(["model"], [{"model": "mha"}, {"model": "mqa"}])
    assert [r["model"] for r in t.records()] == ["mha", "mqa"]
    assert Result.of(next(iter(runs.find("outputs")))).value("optim") == "muon"


@pytest.mark.parametrize("group", GROUPS)
def test_readme_lists_every_choice(group):
    """The table of options has each file of conf/."""
    readme = (Path(__file__).parent.parent / "README.md").read_text("utf-8")
    (line,) = [x for x in readme.splitlines() if x.startswith(f"| `{group}=` |")]
    assert [c for c in choices(group) if not re.search(rf"`{c}[` ]", line)] == []
