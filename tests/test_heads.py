"""`toymha heads` and `toymha prune`, from the words of a command line to the files that they leave."""

from __future__ import annotations

import json
import re

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from toymha import opened, runs, train
from toymha.analysis.capture import heads_of, without
from toymha.analysis.results import Head
from toymha.cli import main
from toymha.compose import points
from toymha.console import Console
from toymha.evaluate import evaluate
from toymha.runs import Run
from toymha.schema import UserError
from toymha.stop import Stop

TINY = [
    "precision=fp32",  # also where auto is bf16: numbers of two ways are compared
    *("data=relations", "data.tokens=20000", "n_layer=2", "dim=32", "n_head=4", "seq_len=64", "batch_size=8"),
    *("budget.steps=20", "budget.eval_every=10", "budget.eval_tokens=640", "budget.sample_tokens=0"),
    "threads=1",
]
QUICK = ["tokens=640", "gate_steps=2", "random_orders=2", "threads=1"]


def trained(*words, console=None):
    given = {w.partition("=")[0] for w in words}
    (point,) = points([*(w for w in TINY if w.partition("=")[0] not in given), *words])
    with Stop() as stop:
        return train.train_point(point, console or Console(quiet=True), stop)


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """One trained run for all tests that only read it."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "git", lambda: None)
        return trained(f"output_dir={folder}", "name=a")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "git", lambda: None)
    return tmp_path


@pytest.fixture
def toymha(capsys):
    """`toymha(*words)` in this process -> (exit status, stdout, stderr)."""

    def call(*words):
        code = main([*map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def images(run):
    accumulator = EventAccumulator(str(run.path), size_guidance={"images": 0})
    accumulator.Reload()
    return {tag: [e.step for e in accumulator.Images(tag)] for tag in accumulator.Tags()["images"]}


# toymha heads


def test_all_of_it(outputs, toymha):
    """Page, maps, numbers and TensorBoard images of a run; a second time the same bytes."""
    code, out, err = toymha("heads", f"run={outputs.path}", *QUICK)
    assert code == 0 and "Traceback" not in err
    folder = outputs.path / "heads"
    found = json.loads((folder / "heads.json").read_text())
    names = [f"L{layer}H{h}" for layer in range(2) for h in range(4)]
    assert list(found["heads"]) == names and all(re.search(rf"^{name} ", out, re.MULTILINE) for name in names)
    assert sum(found["kinds"].values()) == 8 == found["n"]
    assert set(found["heads"]["L0H0"]["importance"]) == {"zeroed", "mean", "gradient", "gates"}
    assert {"agreement", "topic", "previous", "entropy"} <= set(found["heads"]["L0H0"]["scores"])
    for layer in range(2):
        shares = [found["heads"][n]["write"]["share"] for n in names if n.startswith(f"L{layer}")]
        assert sum(shares) == pytest.approx(1, abs=1e-4)  # no bias in W_o
        assert (folder / "maps" / f"layer{layer}.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / "maps" / f"layer{layer}.svg").is_file()
    assert images(outputs) == {"maps/layer0": [20], "maps/layer1": [20]}
    assert not outputs.summary["heads"]  # measured in little: statements must not read that
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert toymha("heads", f"run={outputs.path}", *QUICK)[0] == 0
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    assert images(outputs) == {"maps/layer0": [20], "maps/layer1": [20]}


def test_a_part_alone(outputs, toymha):
    code, out, _ = toymha("heads", f"run={outputs.path}", "parts=writes", "threads=1")
    found = json.loads((outputs.path / "heads" / "writes" / "heads.json").read_text())
    assert code == 0 and "write" in found["heads"]["L1H3"] and "scores" not in found["heads"]["L1H3"]
    assert "L1H3" in out and "can go" not in out


def test_before_training(outputs, toymha):
    """steps=0 is the model that the run began with, in a folder of its own."""
    assert toymha("heads", f"run={outputs.path}", "steps=0", "parts=importance", *QUICK)[0] == 0
    found = json.loads((outputs.path / "heads" / "untrained" / "importance" / "heads.json").read_text())
    opened_run = opened.open_run(str(outputs.path))
    model = train.make_model(opened_run.config, opened_run.corpus.tokenizer.vocab_size)
    train_split = opened_run.corpus.splits["train"]
    loss = evaluate(model, train_split, 64, max_tokens=640).loss
    with without(model, [Head(1, 2)]):
        risen = evaluate(model, train_split, 64, max_tokens=640).loss - loss
    assert found["heads"]["L1H2"]["importance"]["zeroed"]["value"] == pytest.approx(risen, abs=1e-6)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["parts=cencus"], "did you mean census"),
        (["run=nowhere"], "nowhere is not a run folder"),
        ([], "run=FOLDER"),
        (["text=a"], "run=FOLDER"),
        (["run=nowhere", "n_head=2"], "n_head=2"),
        (["probe=scal"], "did you mean scale"),
        (["steps=5"], "steps=5"),
        (["n_head=2", "parts=passage", "weights=best"], "weights="),
        (["probe=scale", "n_head=2", "show=8"], "show="),
        (["sweep=pruning"], "3"),
    ],
)
def test_mistakes_are_one_line(toymha, home, words, said):
    code, out, err = toymha("heads", *words)
    assert code == 2 and said in err and err.count("\n") == 1 and not out
    assert not list(home.iterdir())


def test_a_text_of_ones_own(outputs, toymha):
    text = "<doc> sea Anna because she said the cat always likes salt and pepper ."
    assert toymha("heads", f"run={outputs.path}", "parts=passage", f"text={text}", "threads=1")[0] == 0
    page = (outputs.path / "heads" / "passage" / "heads.html").read_text()
    assert "pepper" in page and "Anna" in page
    code, _, err = toymha("heads", f"run={outputs.path}", "parts=passage", "text=the cat miaows")
    assert code == 2 and "miaows" in err and err.count("\n") == 1
    assert toymha("heads", f"run={outputs.path}", "parts=passage", "text=" + "the cat " * 50)[0] == 0
    assert "first 64 of 100" in (outputs.path / "heads" / "passage" / "heads.html").read_text()


@pytest.mark.parametrize("probe", ["scale", "depth"])
def test_probes(outputs, toymha, probe):
    """Of a run, and of a model that was never trained."""
    code, out, _ = toymha("heads", f"run={outputs.path}", f"probe={probe}", "threads=1")
    assert code == 0 and (outputs.path / "heads" / f"probe_{probe}.html").is_file() and len(out.splitlines()) > 5
    code, out, _ = toymha("heads", f"probe={probe}", "steps=0", "seed=3", "threads=1", *TINY[:6])
    assert code == 0
    (page,) = (p for p in (runs.Path("outputs") / "heads").rglob(f"probe_{probe}.html"))
    assert "seed=3" in str(page)


def test_a_folder_of_runs(toymha, home):
    """Counts by setting over seeds; a stability where there are two."""
    words = [w for w in TINY if not w.startswith("n_head")]
    assert toymha("train", "-m", *words, "n_head=2,4", "seed=0,1", "name=many", "workers=1")[0] == 0
    code, out, _ = toymha("heads", "run=outputs/many", "threads=1")
    found = json.loads((home / "outputs" / "many" / "heads.json").read_text())
    assert code == 0 and "stability" in out
    assert [sum(k["mean"] for k in s["kinds"].values()) for s in found] == [4, 8]
    assert all(0 <= s["stability"] <= 1 and s["seeds"] == 2 for s in found)
    assert (home / "outputs" / "many" / "heads.html").is_file()
    assert toymha("heads", "run=outputs/many", "probe=depth", "threads=1")[0] == 0


# Along training


def test_watching_changes_no_weight(home):
    plain, watched = trained("name=plain"), trained("name=watched", "budget.watch=1", "budget.heads=true")
    assert (plain.path / "model.safetensors").read_bytes() == (watched.path / "model.safetensors").read_bytes()
    assert plain.summary["val"] == watched.summary["val"]
    rows = [r for r in watched.rows() if "head_previous/L1H3" in r]
    assert [r["step"] for r in rows] == [0, 10, 20]
    assert {"head_topic/L0H0", "head_induction/L0H0", "grad_norm/layer1", "stream_norm/layer0"} <= rows[0].keys()
    assert images(watched) == {f"maps/layer{n}": [0, 10, 20] for n in range(2)}
    found = watched.summary["heads"]
    assert sum(found["kinds"].values()) == 8 and 0 < found["effective"] <= 1
    assert set(found["removable"]) == {"zeroed", "mean", "gradient", "gates", "random"}


class Failing(Console):
    """Dies after a step."""

    def __init__(self, at):
        super().__init__(quiet=True)
        self.at = at

    def step(self, step, seconds, loss):
        if step == self.at:
            raise MemoryError("as if killed")


def test_watched_and_resumed(home):
    """Rows and images of each step once, also after a death between two looks."""
    whole = trained("name=whole", "budget.watch=1")
    for step in (13, 19):
        with pytest.raises(MemoryError):
            trained("name=cut", "budget.watch=1", console=Failing(step))
    cut = trained("name=cut", "budget.watch=1")
    scores = [{k: v for k, v in r.items() if k.startswith("head_")} for r in whole.rows()]
    assert [{k: v for k, v in r.items() if k.startswith("head_")} for r in cut.rows()] == scores
    assert images(cut) == images(whole) == {f"maps/layer{n}": [0, 10, 20] for n in range(2)}


# toymha prune


def test_pruned_run_is_an_ordinary_run(outputs, toymha):
    """It has the loss of the masked model, evaluates, resumes training, and is pruned again."""
    code, out, err = toymha("prune", f"run={outputs.path}", "heads=L0H1,L1H0,L1H1,L1H2,L1H3", "threads=1")
    assert code == 0, err
    (path,) = runs.Path("outputs/prune").rglob("seed=0")
    small = Run.load(path)
    assert small.config.kept_heads == [[0, 2, 3], []]
    big = opened.open_run(str(outputs.path))
    with without(big.model, [Head(0, 1), *(Head(1, h) for h in range(4))]):
        masked = evaluate(big.model, big.corpus.splits["val"], 64).loss
    assert small.summary["val"]["loss"] == pytest.approx(masked, abs=1e-5)
    assert small.status == "done" and small.summary["parameters"] < outputs.summary["parameters"]
    for said in ("parameters", "FLOPs", "KV cache", "decoding", "validation loss", "L1H3"):
        assert said in out
    code, said, _ = toymha("eval", f"run={path}", "threads=1")
    assert code == 0 and f"{masked:.4f}" in said
    assert toymha("heads", f"run={path}", *QUICK)[0] == 0
    assert list(json.loads((path / "heads" / "heads.json").read_text())["heads"]) == ["L0H0", "L0H2", "L0H3"]
    code, _, err = toymha(
        "prune", f"run={path}", "share=0.34", "by=gradient", "tokens=640", "name=again", "steps=20", "threads=1"
    )
    assert code == 0, err
    (path,) = runs.Path("outputs/again").rglob("seed=0")
    again = Run.load(path)
    assert sum(map(len, again.config.kept_heads)) == 2 and again.summary["step"] == 20
    assert again.summary["val"]["loss"] < small.summary["val"]["loss"] + 0.1
    model = opened.open_run(str(path)).model
    assert len(heads_of(model)) == 2 and "done already" in toymha("prune", *prune_words(small))[1]


def prune_words(small):
    return [f"run={small.path}", "share=0.34", "by=gradient", "tokens=640", "name=again", "steps=20", "threads=1"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "share=0.25"),
        (["share=0.25", "heads=L0H0"], "share=0.25"),
        (["share=0.01"], "none"),
        (["share=1.5"], "<= 1"),
        (["heads=L0H7"], "no such head"),
        (["share=0.5", "by=zero"], "did you mean zeroed"),
    ],
)
def test_what_cannot_be_pruned(outputs, toymha, home, words, said):
    code, _, err = toymha("prune", f"run={outputs.path}", *words)
    assert code == 2 and said in err and not list(home.iterdir())


def test_training_from_the_weights_of_another(outputs, toymha, home):
    """start= takes the last weights; a different shape or text is refused before a folder is made."""
    again = trained("name=b", f"start={outputs.path}", "budget.steps=0")
    assert again.summary["val"] == outputs.summary["val"]
    for words, said in (
        (["n_head=2"], "n_head=4 there, 2 here"),
        (["dim=64"], "dim=32 there, 64 here"),
        (["data.symbols=9"], "other tokens"),
        (["start=nowhere"], "nowhere"),
    ):
        given = {w.partition("=")[0] for w in words}
        rest = [w for w in [*TINY, f"start={outputs.path}"] if w.partition("=")[0] not in given]
        code, _, err = toymha("train", *rest, *words, "name=c")
        assert code == 2 and said in err and err.count("\n") == 1, err
        assert not (home / "outputs" / "c").exists()


def test_the_weights_are_part_of_what_a_run_is(outputs, toymha):
    """The same words with other weights behind `start=` are another run."""
    first = trained("name=s", "seed=1", "budget.steps=5")
    trained("name=d", f"start={first.path}", "budget.steps=2")
    (first.path / "model.safetensors").write_bytes((outputs.path / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="start="):
        trained("name=d", f"start={first.path}", "budget.steps=2")


def test_a_run_outlives_what_it_began_with(outputs, home):
    """Once it has begun, the folder behind `start=` may go: the run is resumed, and a finished one is left alone."""
    source = trained("name=source", "budget.steps=5")
    with pytest.raises(MemoryError):
        trained("name=e", f"start={source.path}", console=Failing(13))
    source.path.rename(home / "elsewhere")
    resumed = trained("name=e", f"start={source.path}")
    assert resumed.status == "done" and trained("name=e", f"start={source.path}").status == "done"
    with pytest.raises(UserError, match="not a run folder"):
        trained("name=f", f"start={source.path}")


def test_a_claim_about_heads_needs_them_studied(toymha, home):
    """Told before training, not after it."""
    (home / "sweep").mkdir()
    (home / "sweep/mine.yaml").write_text(
        "# @package _global_\nsweep: {name: mine, question: '?', seeds: {full: 2}, checks: "
        "[{that: few, value: {}, metric: removable, high: 50}]}\n"
    )
    words = ["data=pydoc", "n_layer=1", "dim=32", "budget.steps=2", "--config-dir", home, "sweep=mine"]
    code, _, err = toymha("plan", *words)
    assert code == 2 and "budget.heads=true" in err
    assert toymha("plan", *words, "budget.heads=true")[0] == 0


def test_a_path_without_its_option(outputs, toymha):
    """`toymha heads FOLDER` is told to write run=."""
    for command in ("heads", "eval", "prune"):
        code, _, err = toymha(command, outputs.path)
        assert code == 2 and f"write run={outputs.path}" in err


def test_numbers_are_kept_as_training_measures_them(home, toymha):
    """What `toymha heads` leaves in the summary is what `budget.heads` would, and sizes of one's own change nothing."""
    whole, later = trained("name=whole", "budget.heads=true"), trained("name=later")
    for words, kept in ((QUICK, None), (["weights=best", "threads=1"], None), (["threads=1"], whole.summary["heads"])):
        assert toymha("heads", f"run={later.path}", *words)[0] == 0
        assert later.summary["heads"] == kept
    assert toymha("heads", f"run={later.path}", *QUICK)[0] == 0
    assert later.summary["heads"] == whole.summary["heads"]


def test_a_model_without_heads_is_studied_too(home, toymha):
    """There is nothing to find, which is told."""
    code, out, err = toymha("train", *TINY, "kept_heads=[[],[]]", "budget.heads=true", "name=none")
    assert code == 0 and "heads       none" in out, err
