"""The program as its user meets it: mistakes told in one line, any path taken, sweeps that end, resume and report."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from toymha import cli, runs, train
from toymha.cli import main

TINY = [
    "dim=16", "n_layer=1", "seq_len=16", "batch_size=4", "budget.steps=3", "budget.eval_tokens=64",
    "budget.sample_tokens=0", "optim.warmup=0", "threads=1",
]  # fmt: skip
PYDOC = [*TINY, "data=pydoc"]
LINE = "It was the best of times, it was the worst of times, it was the age of wisdom.\n"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Each test in an empty folder of its own."""
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(runs, "git", lambda: None)
    return folder


@pytest.fixture(autouse=True, scope="module")
def compose_once():
    """The files of conf/ are read once for this file: each group choice takes a tenth of a second."""
    from toymha.compose import Composer

    shared: dict = {}
    original = Composer.__init__

    def init(self, like=None, extra=None, compare=None):
        original(self, like, extra, compare)
        if not (like or extra or compare):
            self.cache = shared

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Composer, "__init__", init)
        yield


@pytest.fixture
def toymha(capsys):
    """`toymha(*words)` in this process -> (exit status, stdout, stderr)."""

    def call(*words: str) -> tuple[int, str, str]:
        code = main(list(words))
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


def script(*words: str, **env: str) -> subprocess.CompletedProcess:
    """The program in a process of its own."""
    command = [sys.executable, "-m", "toymha.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | env)


def found(root: str = "outputs") -> list[runs.Run]:
    return list(runs.find(root))


# Mistakes

MISTAKES = [
    # own options of commands that take the keys of train too
    ("cost shape=true", "unknown key shape; did you mean shapes?"),
    ("cost comapre=mha,gqa", "unknown key comapre; did you mean compare?"),
    ("cost compare=mha,gqqa", "compare=gqqa: no such model; did you mean gqa?"),
    ("bench prompt_lne=32", "unknown key prompt_lne; did you mean prompt_len?"),
    ("bench n_hed=4", "unknown key n_hed; did you mean n_head?"),
    ("bench lr=4", "unknown key lr; did you mean optim.lr?"),
    ("bench trian", "no command bench trian; did you mean bench train?"),
    ("bench train repeat=3", "unknown key repeat; did you mean repeats?"),
    # commands and flags
    ("tran", "train"),
    ("trian data=pydoc", "train"),
    ("n_head=8", "toymha train n_head=8"),
    ("train --n_head 8", "n_head=8"),
    ("train --n_head=8", "n_head=8"),
    ("train --n-head 8", "n_head=8"),
    ("train --model mqa", "model=mqa"),
    ("train -x", "-x", "key=value"),
    ("train n_head", "n_head=", "key=value"),
    ("train =3", "=3"),
    ("train --config-dir nowhere", "--config-dir", "nowhere"),
    ("train --config-dir", "--config-dir"),
    # keys
    ("train n_heads=8", "n_heads", "n_head?"),
    ("train +n_heads=8", "n_heads", "n_head?"),
    ("train ++n_head=8", "n_head"),
    ("train ~n_head", "n_head"),
    ("train model.n_kv_head=2", "model.n_kv_head", "n_kv_head?"),
    ("train -m model=mha,gqa model.n_kv_head=2", "model.n_kv_head", "n_kv_head?"),
    ("train lr=1e-3", "lr", "optim.lr?"),
    ("train steps=3", "steps", "budget.steps?"),
    ("train dropout=0.1", "attn_dropout"),
    ("train hydra.job.chdir=true", "hydra.job.chdir"),
    ("train sweep.name=x", "sweep.name"),
    ("train optim.name=adamw", "optim.name"),
    ("train -m n_head=2,4 n_head=8", "n_head", "twice"),
    ("train -m seed=1,2 seed=3", "seed", "twice"),
    ("train n_head=4 n_kv_head=${n_heads}", "n_heads"),
    ("train n_head=${n_head}", "n_head"),
    # choices
    ("train model=mah", "model=mah", "mha?", "gqa"),
    ("train model=", "model=", "mha"),
    ("train model=null", "model=null", "mha"),
    ("train data=pydocs", "data=pydocs", "pydoc?"),
    ("train budget=smok", "budget=smok", "smoke?"),
    ("train sweep=head", "sweep=head", "heads?"),
    ("train sweep=heads,heads", "sweep"),
    ("train mlp=glu", "mlp=glu", "gelu", "swiglu"),
    ("train precision=fp16", "precision=fp16", "fp32", "bf16"),
    ("train device=gpu", "device=gpu", "cuda", "cpu"),
    ("train -m device=gpu n_head=1,2 workers=1", "device=gpu", "cuda", "cpu"),
    # types and ranges
    ("train w_o=off", "w_o=off", "w_o=false"),
    ("train w_o=1", "w_o=1", "w_o=true"),
    ("train n_head=8.0", "n_head=8.0", "n_head=8?"),
    ("train n_head=0", "n_head=0", ">= 1"),
    ("train n_head=-4", "n_head=-4", ">= 1"),
    ("train n_head=[1,2]", "n_head=", "whole number"),
    ("train n_head={a:1}", "n_head=", "whole number"),
    ("train n_head=abc", "n_head=abc", "whole number"),
    ("train n_head=", "n_head=", "whole number"),
    ("train n_head=null", "n_head=null", "whole number"),
    ("train n_head=99999999999999999999999", "n_head=", "4096"),
    ("train optim.lr=nan", "optim.lr=nan", "> 0"),
    ("train optim.lr=inf", "optim.lr=inf", "> 0"),
    ("train optim.lr=-1", "optim.lr=-1", "> 0"),
    ("train optim.lr=fast", "optim.lr=fast", "number"),
    ("train attn_dropout=1.5", "attn_dropout=1.5", "< 1"),
    ("train budget.steps=1e3", "budget.steps=1", "budget.steps=1000?"),
    ("train batch_size=0", "batch_size=0", ">= 1"),
    ("train seed=-1", "seed=-1", "4294967295"),
    ("train seed=4294967296", "seed=4294967296", "4294967295"),
    ("train seed=null", "seed=null"),
    ("train optim.betas=[0.9]", "optim.betas", "[0.9,0.95]"),
    ("train optim.betas=[0.9,nan]", "optim.betas"),
    ("train data.split=[0.9,0.2]", "data.split", "add up to 1"),
    ("train data.split=[0.9,nan]", "data.split"),
    ("train data.split=[]", "data.split"),
    # combinations
    ("train dim=256 n_head=6", "dim=256", "n_head=6", "1, 2, 4, 8, 16"),
    ("train n_kv_head=3 n_head=8", "n_kv_head=3", "n_head=8", "1, 2, 4, 8"),
    ("train n_head=8 n_kv_head=16", "n_kv_head=16", "n_head=8"),
    ("train n_kv_head=0", "n_kv_head=0", ">= 1"),
    ("train model=single n_head=8", "model=single", "n_head=8"),
    ("train n_head=8 model=single", "model=single", "n_head=8"),
    ("train -m model=single n_head=1,8", "model=single", "n_head=8"),
    ("train -m dim=128 n_head=1,2,3", "n_head=3"),
    ("train w_o=false head_dim=8", "w_o=false", "v_head_dim"),
    ("train tied_heads=true n_kv_head=1", "tied_heads=true", "n_kv_head=1"),
    ("train pos=rope head_dim=3", "pos=rope", "head_dim"),
    ("train grad_accum=5", "grad_accum=5", "batch_size=16"),
    ("train data.tokenizer=bpe", "data.tokenizer=bpe", "data.vocab_size"),
    ("train data.vocab_size=100", "data.vocab_size=100", "bpe"),
    ("train optim=adamw optim.muon_lr=0.1", "optim.muon_lr=0.1", "optim=muon"),
    ("train budget.steps=null", "budget.steps", "budget.minutes"),
    # sweeps
    ("train n_head=2,4", "n_head=2,4", "-m"),
    ("train seed=range(3)", "seed", "-m"),
    ("plan n_head=2,4", "n_head=2,4", "-m"),
    ("train -m n_head=glob(*)", "n_head=glob(*)"),
    ("train -m n_head=interval(1,4)", "n_head=interval(1,4)", "range"),
    ("train -m n_head=range(1,4", "n_head=range(1,4"),
    ("train -m n_head=1,two", "n_head=two"),
    ("train -m threads=1,2", "threads"),
    # data
    ("train data=file", "data.path"),
    ("train -m data=file seed=1,2", "data.path"),
    ("train data.path=a.txt", "data.path=a.txt", "data=file"),
    ("train data=file data.path=sub/none.txt", "sub/none.txt"),
    ("train -m data=file data.path=./none.txt seed=0,1", "none.txt"),
    ("train data=file data.path=.", "folder"),
    ("train data=pydoc vocab_size=5", "vocab_size=5"),
    ("train data=pydoc seq_len=1000000", "seq_len=1000000"),
    # folders
    ("train name=../../x", "name=../../x"),
    ("train like=outputs/none", "outputs/none"),
    ("train like=", "like"),
    ("eval", "run"),
    ("eval run=outputs/none", "outputs/none"),
    ("eval run=x split=tset", "split=tset", "test?"),
    ("eval foo=1", "foo", "run="),
    ("report", "run"),
    ("report run=outputs/none", "outputs/none"),
    ("report run=a run=b", "run"),
    ("data fetch=tinyshakespear", "tinyshakespeare?"),
    ("completion shell=fish", "bash", "zsh"),
]


@pytest.mark.parametrize("line, parts", [(m[0], m[1:]) for m in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_a_mistake_is_one_line(toymha, home, line, parts):
    """Exit status 2, one line that names what is wrong and what would be right, and no folder made."""
    words = line.split()
    if words[0] in ("train", "plan"):  # were the mistake taken, the run should be short
        short = ["data=pydoc", "budget.steps=1", "budget.eval_tokens=64", "budget.sample_tokens=0", "threads=1"]
        words[1:1] = [w for w in short if w.partition("=")[0] + "=" not in line.replace("data.", "")]
    code, out, err = toymha(*words)
    assert code == 2 and out == ""
    assert err.startswith("toymha: ") and err.count("\n") == 1 and err.endswith("\n")
    for part in parts:
        assert part in err
    assert not list(home.iterdir())


def test_a_text_too_short_for_one_point_refuses_the_sweep(toymha, home):
    """All points are held against the data before the first one starts."""
    code, _, err = toymha("train", "-m", *TINY, "data=pydoc", "n_head=1,2", "vocab_size=null,5", "workers=1")
    assert code == 2 and "vocab_size=5" in err and err.count("\n") == 1
    assert not list(home.iterdir())


def test_a_missing_file_is_told_with_the_path_tried(toymha, home):
    """A relative path is relative to where one types, and the message shows where that is."""
    _, _, err = toymha("train", "data=file", "data.path=./sub/../none.txt")
    assert str(home) in err and "none.txt" in err


@pytest.mark.parametrize("position", range(5))
def test_m_may_stand_anywhere(toymha, position):
    """Before the command, between the words, or at the end."""
    words = ["plan", "n_head=1,2", "data=pydoc", "seed=0"]
    words.insert(position, "-m")
    code, out, err = toymha(*words)
    assert (code, err) == (0, "") and "2 runs" in out


def test_plan_trains_nothing(toymha, home):
    """It lists the points with their parameters and makes no folder."""
    code, out, _ = toymha("plan", "-m", "n_head=1,2", "seed=0,1,1", "data=pydoc")
    assert code == 0 and "4 runs" in out and "n_head=2" in out and "parameters" in out
    assert not list(home.iterdir())


# Help


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_overview(toymha, words):
    """Every command, three examples."""
    code, out, err = toymha(*words)
    assert (code, err) == (0, "")
    assert all(f"\n  {c} " in out for c in cli.COMMANDS) and out.count("\n  to") >= 2


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_help_of_each_command(toymha, command):
    """A command's own keys; for train each key of the schema with its choices, nothing of Hydra's."""
    code, out, err = toymha(command, "--help")
    assert (code, err) == (0, "") and "hydra" not in out.lower()
    if command == "train":
        from toymha import compose, config

        assert all(f"{k}=" in out for k in config.settable())
        assert all(name in out for g in compose.GROUPS for name in config.choices(g))
        assert "gelu|" in out and "null" in out
    if command in ("completion", "version"):
        assert "fetch" not in out
    if command == "completion":
        assert "shell" in out


@pytest.mark.parametrize("shell, before", [("bash", ""), ("zsh", "KEY=")])
@pytest.mark.parametrize(
    "typed, offered",
    [
        ("toymha tr", ["train"]),
        ("toymha train n_kv", ["n_kv_head="]),
        ("toymha train -m model=mq", ["mqa"]),
        ("toymha train mlp=sw", ["swiglu"]),
        ("toymha train w_o=", ["true", "false"]),
        ("toymha eval we", ["weights="]),
        ("toymha train nothing=", []),
    ],
)
def test_completion(toymha, shell, before, typed, offered):
    """Commands, keys and values that may follow; bash takes what stands behind `=` for a word of its own."""
    _, out, _ = toymha("_complete", shell, typed)
    if "=" in typed:
        offered = [before.replace("KEY", typed.split()[-1].partition("=")[0]) + value for value in offered]
    assert out.split() == offered


def test_cfg_prints_the_whole_configuration(toymha, home):
    """--cfg is YAML that builds the same configuration, and trains nothing."""
    import yaml

    from toymha import compose, config

    code, out, _ = toymha("train", "--cfg", "n_head=2", "data=pydoc")
    assert code == 0 and config.build(yaml.safe_load(out)) == compose.points(["n_head=2", "data=pydoc"])[0].config
    assert not list(home.iterdir())


# Paths

FILES = ["语料/输入 1.txt", "a=b.txt", "a,b.txt", "it's (1)!.txt", '"q".txt', "步 $HOME #1.txt"]


@pytest.mark.parametrize("name", FILES)
def test_any_file_name_works_unquoted(toymha, name):
    """`=`, comma, space, quotes and Chinese in data.path need nothing beyond what the shell needs."""
    Path(name).parent.mkdir(exist_ok=True)
    Path(name).write_text(LINE * 40, "utf-8")
    code, out, err = toymha("train", *TINY, "data=file", f"data.path={name}")
    assert (code, err) == (0, "")
    (run,) = found()
    assert runs.Run.load(run.path).config.data.path == name
    printed = next(line for line in out.splitlines() if line.startswith("run folder ")).removeprefix("run folder ")
    assert Path(printed) == run.path


@pytest.mark.parametrize("name", [None, "my runs, a=1 (x)!", "语料", "it's", "a;b&c"])
def test_a_printed_path_pastes_back(toymha, name):
    """The line that toymha prints for eval is a shell line that works; so do report and like with that folder."""
    code, out, _ = toymha("train", *PYDOC, *([f"name={name}"] if name else []))
    assert code == 0
    (line,) = [x[x.index("toymha eval") :] for x in out.splitlines() if "toymha eval" in x]
    words = shlex.split(line)
    assert words[:2] == ["toymha", "eval"] and Path(words[2].removeprefix("run=")) == found()[0].path
    assert toymha(*words[1:])[0] == 0
    code, out, _ = toymha("report", words[2])
    assert code == 0
    code, out, _ = toymha("plan", words[2].replace("run=", "like="), "n_head=2")
    assert code == 0 and "n_head=2" in out


def test_a_run_over_a_file_is_scored_from_another_folder(toymha, home, monkeypatch):
    """The text of a run is found again wherever eval and like are typed."""
    Path("a.txt").write_text(LINE * 40)
    assert toymha("train", *TINY, "data=file", "data.path=a.txt")[0] == 0
    path = found()[0].path.absolute()
    monkeypatch.chdir(home.parent)
    code, _, err = toymha("eval", f"run={path}")
    assert (code, err) == (0, "")
    assert toymha("plan", f"like={path}", "n_head=2")[0] == 0


def test_a_sweep_over_two_files(toymha):
    """data.path=a.txt,b.txt with -m is two runs with two names; without -m it is one file of that name."""
    for name in ("a.txt", "b.txt"):
        Path(name).write_text(LINE * 40)
    code, out, _ = toymha("plan", "-m", "data=file", "data.path=a.txt,b.txt", "seq_len=16")
    assert code == 0 and "2 runs" in out


# One run


def test_a_run_says_where_it_is_and_what_it_reached(toymha):
    """Folder, numbers, and the lines for the curves and the test split; again, it is done already."""
    code, out, err = toymha("train", *PYDOC)
    assert (code, err) == (0, "")
    for part in ("run folder outputs/train/", "perplexity", "bits/char", "tensorboard --logdir outputs", "split=test"):
        assert part in out
    (run,) = found()
    stamp = (run.path / "model.safetensors").stat().st_mtime_ns
    code, out, _ = toymha("train", *PYDOC)
    assert code == 0 and "done already" in out
    assert (run.path / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_diverged_run_says_so(toymha):
    """Exit status 1, the step and the learning rate on the screen, status `diverged`, also when it is typed again."""
    words = ["train", *PYDOC, "tie_embeddings=false", "optim=adamw", "optim.eps=1e-50", "budget.steps=5"]
    words.remove("budget.steps=3")
    for _ in range(2):
        code, out, err = toymha(*words)
        assert code == 1 and found()[0].status == "diverged"
        assert "diverged" in out + err and "step 2" in out + err and "learning rate" in out + err


def test_a_run_that_ends_in_nan_is_not_done(toymha):
    """Weights that the last step broke give a final loss that is no number: diverged, not a result."""
    words = ["train", *PYDOC, "tie_embeddings=false", "optim=adamw", "optim.eps=1e-50", "budget.steps=1"]
    words.remove("budget.steps=3")
    code, _, _ = toymha(*words)
    assert code == 1 and found()[0].status == "diverged"


def test_a_failed_run_keeps_its_traceback_and_resumes(toymha, monkeypatch):
    """log.txt and the status say why; the next try forgets the old error."""
    original = train.make_model

    def broken(*_a):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(train, "make_model", broken)
    with pytest.raises(RuntimeError):
        main(["train", *PYDOC])
    (run,) = found()
    assert run.status == "failed" and "no such luck" in run.summary["error"]
    assert "Traceback" in (run.path / "log.txt").read_text()
    monkeypatch.setattr(train, "make_model", original)
    assert toymha("train", *PYDOC)[0] == 0
    assert run.status == "done" and "error" not in run.summary and not (run.path / "log.txt").exists()


def test_each_step_stands_once_after_a_kill_before_the_first_checkpoint(toymha, monkeypatch):
    """The evaluation at step 0 is not logged a second time by a run that begins again at step 0."""

    def killed(*_a, **_k):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train.Lab, "log_row", killed)
        assert main(["train", *PYDOC, "budget.log_every=1"]) == 130
    assert toymha("train", *PYDOC, "budget.log_every=1")[0] == 0
    (run,) = found()
    steps = [r["step"] for r in run.rows() if "loss/val" in r]
    assert steps == [0, 3]


# Sweeps


def scalars(folder: Path) -> dict[str, list[int]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    assert "_hparams_/session_start_info" in events.summary_metadata
    return {tag: [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_a_sweep_in_two_processes(toymha, home):
    """Four runs, a table, each step once in one event file a run; again: nothing to do; serially: the same numbers."""
    words = ["train", "-m", "n_head=1,2", "seed=0,1", *PYDOC, "workers=2", "budget.log_every=1"]
    done = script(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\r" not in done.stdout and done.stdout.count("validation loss") == 4
    assert [(r.info["values"]["n_head"], r.info["values"]["seed"]) for r in found()] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(r.status == "done" for r in found())
    events = sorted(home.rglob("events.out.tfevents*"))
    assert sorted(e.parent for e in events) == sorted(r.path.absolute() for r in found())
    for r in found():
        there = scalars(r.path)
        assert there["loss/train"] == there["lr"] == there["grad_norm"] == there["tokens_per_s"] == [1, 2, 3]
        assert there["loss/val"] == there["ppl/val"] == [0, 3]
    folder = home / "outputs/train"
    assert len(json.loads((folder / "report.json").read_text())) == 2 and (folder / "report.csv").is_file()
    stamps = {p: p.stat().st_mtime_ns for p in home.rglob("*.safetensors")}
    code, out, err = toymha(*words)
    assert (code, err) == (0, "") and "0 to train" in out
    assert {p: p.stat().st_mtime_ns for p in home.rglob("*.safetensors")} == stamps
    code, again, _ = toymha("report", "run=outputs/train")
    assert code == 0 and again.strip() in out
    assert toymha(*words[:-2], "workers=1", "name=serial")[0] == 0
    assert [r.summary["val"] for r in found("outputs/serial")] == [r.summary["val"] for r in found("outputs/train")]


@pytest.mark.parametrize("error", [RuntimeError("out of luck"), SystemExit(3), torch.OutOfMemoryError("big")])
def test_a_failing_run_stops_no_other(toymha, monkeypatch, error):
    """The others are done, the summary names the one, its log has the traceback, exit status 1; then it is repaired."""
    original = train.train

    def sometimes(run, *rest):
        if run.config.n_head == 2:
            raise error
        original(run, *rest)

    words = ["train", "-m", "n_head=1,2,4", *PYDOC, "workers=1"]
    with monkeypatch.context() as patch:
        patch.setattr(train, "train", sometimes)
        code, out, _ = toymha(*words)
    assert code == 1
    assert [r.status for r in found()] == ["done", "failed", "done"]
    bad = found()[1]
    assert "Traceback" in (bad.path / "log.txt").read_text()
    named = [line for line in out.splitlines() if line.startswith("failed: ")]
    assert len(named) == 1 and "n_head=2" in named[0] and "log.txt" in named[0]
    assert "0/1" in out
    code, out, _ = toymha(*words)
    assert code == 0 and "1 to train" in out and [r.status for r in found()] == ["done"] * 3


def test_a_diverging_run_stops_no_other(toymha):
    """It is named with its step, it is not in the means, exit status 1, and it is not trained again."""
    words = ["train", "-m", "optim.eps=1e-50,1e-8", *PYDOC, "tie_embeddings=false", "optim=adamw", "workers=1"]
    for _ in range(2):
        code, out, _ = toymha(*words)
        assert code == 1 and {r.status for r in found()} == {"done", "diverged"}
        assert any(line.startswith("diverged: ") and "1e-50" in line and "step" in line for line in out.splitlines())
    assert "0 to train" in out


def test_an_unfinished_run_of_a_sweep_goes_on(toymha):
    """What is done is skipped, what was interrupted is trained, the table has all."""
    words = ["train", "-m", "n_head=1,2", *PYDOC, "workers=1"]
    assert toymha(*words)[0] == 0
    one, two = found()
    stamp = (one.path / "model.safetensors").stat().st_mtime_ns
    two.update(status="interrupted")
    code, out, _ = toymha(*words)
    assert code == 0 and "1 to train" in out and "1 finished" in out
    assert two.status == "done" and (one.path / "model.safetensors").stat().st_mtime_ns == stamp


def test_another_text_in_a_used_folder_is_refused_before_any_training(toymha):
    """The file was replaced since: the folder's run is not mixed with a new one, unless overwrite=true."""
    Path("a.txt").write_text(LINE * 40)
    words = ["train", "-m", "n_head=1,2", *TINY, "data=file", "data.path=a.txt", "workers=1"]
    assert toymha(*words)[0] == 0
    stamps = {p: p.stat().st_mtime_ns for p in Path("outputs").rglob("*.safetensors")}
    Path("a.txt").write_text(LINE.upper() * 40)
    code, out, err = toymha(*words)
    assert code == 2 and out == "" and err.count("\n") == 1 and "data.sha256" in err and "overwrite=true" in err
    assert {p: p.stat().st_mtime_ns for p in Path("outputs").rglob("*.safetensors")} == stamps
    code, _, err = toymha("eval", f"run={found()[0].path}")
    assert code == 2 and "changed" in err
    assert toymha(*words, "overwrite=true")[0] == 0


def test_redirected_output_has_no_carriage_return(toymha):
    """A run and a sweep print few plain lines into a file, and nothing on stderr."""
    for words in ([], ["-m", "seed=0,1", "workers=1", "name=two"]):
        _, out, err = toymha("train", *PYDOC, *words)
        assert err == "" and "\r" not in out and 5 < len(out.splitlines()) < 30
