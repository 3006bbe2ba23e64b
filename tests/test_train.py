"""The trainer: resuming, stopping, diverging, and what must not change a weight."""

import itertools
import json
import math
import signal
import statistics
import time

import pytest
import torch
from conftest import built, make, tokens
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from toymha import lab, runs, train, unread
from toymha.batches import Batch
from toymha.compose import points
from toymha.console import Console
from toymha.evaluate import evaluate
from toymha.generation.generate import sample
from toymha.model.gpt import GPT
from toymha.optim import lr_factor, make_optimizers
from toymha.schema import UserError
from toymha.stop import Interrupted, Stop
from toymha.team import ALONE
from toymha.timing import speed

TINY = [
    "n_layer=1",
    "dim=16",
    "n_head=2",
    "seq_len=16",
    "batch_size=4",
    "threads=1",
    "precision=fp32",
    "device=cpu",
    "data=file",
    "data.path=text.txt",
    "budget.steps=13",
    "budget.eval_every=5",
    "budget.log_every=3",
    "budget.eval_tokens=64",
    "budget.sample_tokens=5",
    "optim.warmup=2",
    "attn_dropout=0.1",
    "resid_dropout=0.1",
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "".join(f"{i} times {j} is {i * j}.\n" for i in range(20) for j in range(20))
    (tmp_path / "text.txt").write_text(text)
    return tmp_path


class Failing(Console):
    """Raises, or sends a signal, when a given step is over."""

    def __init__(self, at, what):
        super().__init__(quiet=True)
        self.at, self.what = at, what

    def step(self, step, seconds, loss):
        if step == self.at:
            self.what()


def die():
    raise MemoryError("as if killed")


def run(*words, console=None):
    given = {w.partition("=")[0] for w in words}
    (point,) = points([*(w for w in TINY if w.partition("=")[0] not in given), *words])
    with Stop() as stop:
        return train.train_point(point, console or Console(quiet=True), stop)


def rows(r):
    """The logged rows without what depends on the clock."""
    return [{k: v for k, v in row.items() if k not in ("time", "tokens_per_s")} for row in r.rows()]


def same_files(a, b):
    return all(
        (a.path / n).read_bytes() == (b.path / n).read_bytes() for n in ("model.safetensors", "best.safetensors")
    )


@pytest.mark.parametrize("words", [("optim=adamw",), ("optim=muon",), ("optim=muon", "threads=2")])
@pytest.mark.parametrize("deaths", [[1], [5], [7], [13], [4, 11, 12]])
def test_killed_and_resumed_is_never_killed(here, words, deaths):
    """Law 8: dying at any step and resuming gives the same weights and the same rows, to the bit."""
    whole = run(*words, "name=whole")
    for step in deaths:
        with pytest.raises(MemoryError):
            run(*words, "name=cut", console=Failing(step, die))
    cut = run(*words, "name=cut")
    assert rows(cut) == rows(whole) and same_files(cut, whole)
    assert cut.summary["val"] == whole.summary["val"] and cut.summary["best"] == whole.summary["best"]


@pytest.mark.parametrize("place", ["log_row", "look", "checkpoint"])
def test_killed_between_a_row_and_its_checkpoint(here, monkeypatch, place):
    """Rows behind the last checkpoint are written again, and once."""
    whole = run("name=whole", "budget.checkpoint_every=4")
    method, calls = getattr(train.Lab, place), []

    def deadly(lab, *args):
        out = method(lab, *args) if place != "checkpoint" else None
        calls.append(lab.state["step"])
        if len(calls) == 3:
            die()
        return out if place != "checkpoint" else method(lab, *args)

    monkeypatch.setattr(train.Lab, place, deadly)
    with pytest.raises(MemoryError):
        run("name=cut", "budget.checkpoint_every=4")
    monkeypatch.setattr(train.Lab, place, method)
    cut = run("name=cut", "budget.checkpoint_every=4")
    assert rows(cut) == rows(whole) and same_files(cut, whole)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_and_is_resumed(here, signum):
    """Ctrl-C and SIGTERM leave a checkpoint of that very step, and the status `interrupted`."""
    whole = run("name=whole")
    with pytest.raises(Interrupted) as e:
        run("name=cut", console=Failing(8, lambda: signal.raise_signal(signum)))
    assert e.value.signum == signum
    (cut,) = runs.find("outputs/cut")
    assert cut.status == "interrupted" and cut.load_checkpoint()["step"] == 8
    cut = run("name=cut")
    assert cut.status == "done" and rows(cut) == rows(whole) and same_files(cut, whole)


def test_death_in_the_final_evaluation_keeps_the_weights(here, monkeypatch):
    """The weights are on disk before the whole split is evaluated, and resuming only evaluates."""
    whole = run("name=whole")
    monkeypatch.setattr(lab, "unigram_loss", lambda *_: die())
    with pytest.raises(MemoryError):
        run("name=cut")
    (cut,) = runs.find("outputs/cut")
    assert cut.status == "failed" and (cut.path / "model.safetensors").is_file() and (cut.path / "log.txt").is_file()
    monkeypatch.undo()
    monkeypatch.chdir(here)
    cut = run("name=cut", console=Failing(13, die))
    assert cut.status == "done" and rows(cut) == rows(whole)


def test_tensorboard_holds_each_step_once(here):
    """One event file a run, each step of each tag once, also after being killed twice."""
    for step in (7, 12):
        with pytest.raises(MemoryError):
            run(console=Failing(step, die))
    r = run()
    assert len(list(r.path.glob("events*"))) == 1
    events = EventAccumulator(str(r.path)).Reload()
    assert [e.step for e in events.Scalars("loss/train")] == [3, 6, 9, 12, 13]
    assert [e.step for e in events.Scalars("loss/val")] == [0, 5, 10, 13]
    for tag in ("ppl/val", "lr", "grad_norm", "tokens_per_s", "scores_std/layer0", "entropy/layer0", "final/ppl_val"):
        steps = [e.step for e in events.Scalars(tag)]
        assert steps and len(steps) == len(set(steps))
    assert {"_hparams_/experiment", "_hparams_/session_start_info"} <= set(events.summary_metadata)
    assert {"config/text_summary", "sample/text_summary"} <= set(events.Tags()["tensors"])


def test_looking_changes_no_weight(here):
    """How often one evaluates, logs, samples or saves does not change the result."""
    a = run("name=a")
    b = run(
        "name=b", "budget.eval_every=2", "budget.log_every=1", "budget.sample_tokens=0", "budget.checkpoint_every=1"
    )
    assert (a.path / "model.safetensors").read_bytes() == (b.path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_seed_decides_everything(here, threads):
    """To the bit, on the same number of threads."""
    a, b, c = (run(f"name={name}", f"threads={threads}", f"seed={seed}") for name, seed in zip("abc", (0, 0, 1)))
    assert rows(a) == rows(b) and same_files(a, b)
    assert rows(a) != rows(c)


def test_accumulated_gradients_equal_the_large_batch(here):
    """4 micro-batches of 1 are one batch of 4: same losses to float accuracy."""
    words = ("attn_dropout=0", "resid_dropout=0", "optim=adamw", "optim.eps=1e-4")
    a, b = run("name=a", *words), run("name=b", "grad_accum=4", *words)
    for x, y in zip(rows(a), rows(b), strict=True):
        assert y.get("loss/train", 0) == pytest.approx(x.get("loss/train", 0), rel=1e-5)


def test_more_threads_than_cores_are_warned_of(here, monkeypatch, capsys):
    monkeypatch.setattr(lab, "cores", lambda: 2)
    before = torch.get_num_threads()
    for threads, warned in ((2, False), (3, True)):
        run(f"threads={threads}", f"name=t{threads}", "budget.steps=1", "optim.warmup=0", console=Console())
        assert ("threads=3 on 2 cores: slower" in capsys.readouterr().err) == warned
    torch.set_num_threads(before)


# A device whose numbers are far away


@pytest.fixture
def far(monkeypatch):
    """What a GPU does, on a CPU: losses are read when somebody looks."""
    monkeypatch.setattr(unread, "near", lambda device: False)


@pytest.mark.parametrize("words", [(), ("budget.log_every=4", "budget.eval_every=6", "budget.checkpoint_every=3")])
@pytest.mark.parametrize("deaths", [[], [5], [7], [4, 11, 12]])
def test_numbers_that_are_read_seldom_are_the_same(here, monkeypatch, words, deaths):
    """To the bit, also where the run is killed between; every step has its seconds."""
    whole = run(*words, "name=whole")
    monkeypatch.setattr(unread, "near", lambda device: False)
    for step in deaths:
        with pytest.raises(MemoryError):
            run(*words, "name=cut", console=Failing(step, die))
    cut = run(*words, "name=cut")
    assert rows(cut) == rows(whole) and same_files(cut, whole)
    state = cut.load_checkpoint()
    assert len(state["step_seconds"]) == 13 and sum(state["step_seconds"]) == pytest.approx(state["seconds"])


def test_a_signal_reads_what_was_not_read(here, far):
    whole = run("name=whole")
    with pytest.raises(Interrupted):
        run("name=cut", console=Failing(8, lambda: signal.raise_signal(signal.SIGTERM)))
    (cut,) = runs.find("outputs/cut")
    state = cut.load_checkpoint()
    assert state["step"] == 8 and len(state["losses"]) == 2  # since the row of step 6
    assert len(state["step_seconds"]) == 8 and sum(state["step_seconds"]) == pytest.approx(state["seconds"])
    cut = run("name=cut")
    assert rows(cut) == rows(whole) and same_files(cut, whole)


@pytest.mark.parametrize("distance", ["near", "far"])
def test_the_step_that_was_not_finite_is_told_and_nothing_broken_is_saved(here, monkeypatch, distance):
    """Whenever the loss is read: the fourth of a row of five."""
    real, steps = train.backward, itertools.count(1)

    def backward(*given):
        loss = real(*given)
        return loss * math.nan if next(steps) == 4 else loss

    monkeypatch.setattr(unread, "near", lambda device: distance == "near")
    monkeypatch.setattr(train, "backward", backward)
    r = run("budget.log_every=5", "budget.eval_every=5", f"budget.checkpoint_every={1 if distance == 'near' else 5}")
    rate = 3e-3 * lr_factor(r.config.optim, 3, 3 / 13, 2 / 13)
    assert r.status == "diverged" and r.summary["step"] == 3
    assert r.summary["error"].startswith("loss nan, gradient norm ")
    assert r.summary["error"].endswith(f" at step 4, learning rate {rate:.3g}")
    saved = r.load_checkpoint()
    assert saved is None if distance == "far" else saved["step"] == 3


def test_minutes_are_kept_where_numbers_are_far(here, far):
    """Nothing is logged for 10,000 steps, and the run ends in time."""
    every = ("budget.log_every=10000", "budget.eval_every=10000")
    r = run("budget.steps=null", "budget.minutes=0.01", *every)
    assert r.status == "done" and 0.6 <= r.summary["seconds"] < 3 and len(r.load_checkpoint()["step_seconds"]) > 3


def test_the_first_steps_are_told_one_by_one(here, far):
    """They are slower than all later ones, and are left out of the speed."""
    r = run("budget.log_every=13", "budget.eval_every=13")
    first, rest = (lambda s: (s[:3], s[3:]))(r.load_checkpoint()["step_seconds"])
    assert len(set(first)) == 3 and len(set(rest)) == 1


@pytest.mark.parametrize("optim", ["adamw", "muon"])
def test_a_step_asks_the_device_for_no_number(optim):
    """On a device that has shapes and no numbers: whoever asks for one gets an error."""
    c, nowhere = make(f"optim={optim}", "grad_accum=2", "batch_size=4"), torch.device("meta")
    model = built(c).train().to(nowhere)
    x, optimizers = tokens(B=4, T=17), make_optimizers(model, c, "fp32")
    loss = train.backward(model, Batch((x[:, :-1],), x[:, 1:], 64), 2, nowhere, "fp32")
    norm = train.clipped(model, c, ALONE)
    train.move(optimizers, ALONE)
    with pytest.raises(RuntimeError):
        torch.stack((loss, norm)).tolist()


def test_diverging_stops_at_once_and_keeps_the_checkpoint(here):
    """The first loss that is not finite ends the run with its step and learning rate; it is not trained again."""
    words = (
        "optim=adamw",
        "optim.lr=1e4",
        "optim.clip=null",
        "norm_position=post",
        "budget.steps=50",
        "score_scale=none",
    )
    words += ("optim.weight_decay=0.1", "optim.warmup=6")
    r = run(*words, console=Console(quiet=True))
    assert r.status == "diverged" and "step" in r.summary["error"] and "learning rate" in r.summary["error"]
    before = (r.path / "metrics.jsonl").read_bytes()
    assert run(*words).status == "diverged" and (r.path / "metrics.jsonl").read_bytes() == before


def test_learning_rate_and_steps_are_those_of_the_optimizer(here):
    """grad_accum does not stretch the schedule; the rate ends at its floor and is logged as it was used."""
    r = run("budget.steps=50", "grad_accum=4", "budget.log_every=1", "optim.min_lr=0.1", "optim.schedule=linear")
    lr = [row["lr"] for row in r.rows() if "lr" in row]
    assert len(lr) == 50 and min(lr) >= 0.1 * r.config.optim.lr * (1 / 3) and lr[-1] < 0.15 * max(lr)


def test_weights_broken_by_an_update_are_a_divergence(here):
    """Also when the step that breaks them is evaluated: no sample is drawn from NaN, and the run is not failed."""
    words = ("optim=adamw", "optim.lr=1e4", "optim.clip=null", "norm_position=post", "score_scale=none")
    r = run(*words, "optim.warmup=0", "budget.eval_every=1", "budget.steps=50")
    assert r.status == "diverged" and r.load_checkpoint()["step"] < r.summary["step"] + 1
    assert all(t.isfinite().all() for t in r.load_checkpoint()["model"].values())


def test_odd_line_ends_in_samples_lose_no_rows(here):
    """U+2028 and its like are characters of a text, not the end of a row."""
    (here / "text.txt").write_text("a\u2028b\u0085c\n" * 300, "utf-8")
    r = run("budget.sample_tokens=60", "budget.eval_every=1")
    assert len(r.rows()) == (r.path / "metrics.jsonl").read_text("utf-8").count("\n")


def test_asking_again_changes_nothing(here):
    """A finished run keeps its own record of how it came about."""
    r = run()
    before = {p.name: p.read_bytes() for p in r.path.iterdir()}
    run("budget.log_every=7", "compile=true")
    assert {p.name: p.read_bytes() for p in r.path.iterdir()} == before


@pytest.mark.parametrize("words", [["optim.warmup=0"], ["optim.warmup=13"], ["optim.warmup=99"], ["budget.steps=1"]])
def test_degenerate_schedules_train(here, words):
    """Step 1 changes the weights whatever the warm-up."""
    r = run(*words)
    start = GPT(r.config, 18).state_dict()
    assert any(not torch.equal(v, start[k]) for k, v in r.load_weights("model").items())


def test_no_steps_is_an_evaluation_of_the_untrained_model(here):
    r = run("budget.steps=0")
    assert r.status == "done" and r.summary["val"]["loss"] == pytest.approx(math.log(18), abs=0.1)


def test_budgets_end_the_run_whichever_comes_first(here):
    assert run("budget.tokens=100", "name=a").summary["step"] == 2  # 64 tokens a step
    assert run("budget.minutes=1e-9", "name=b").summary["step"] == 1


def test_final_numbers_are_those_of_the_saved_weights(here):
    """Reloading the weights in a fresh model gives the reported loss to the last digit."""
    from toymha.data.corpus import load_corpus

    r = run("budget.steps=30", "optim.lr=0.05", "optim=adamw")
    corpus = load_corpus(r.config.data)
    for name, key in (("model", "val"), ("best", "best")):
        model = GPT(r.config, corpus.tokenizer.vocab_size)
        model.load_state_dict(r.load_weights(name))
        assert evaluate(model, corpus.splits["val"], 16).loss == r.summary[key]["loss"]


def test_best_survives_resuming(here):
    """An evaluation after resuming replaces the best weights only when it is better."""
    words = ("optim=adamw", "optim.lr=0.3", "budget.steps=20", "budget.eval_every=2", "optim.min_lr=1")
    with pytest.raises(MemoryError):
        run(*words, "name=cut", console=Failing(15, die))
    cut, whole = run(*words, "name=cut"), run(*words, "name=whole")
    losses = {row["step"]: row["loss/val"] for row in whole.rows() if "loss/val" in row}
    assert cut.summary["best"]["step"] == whole.summary["best"]["step"] == min(losses, key=losses.get)


def test_a_changed_text_is_refused(here):
    """The text is part of a run's identity: another text in the same file is another run."""
    run()
    (here / "text.txt").write_text("something else " * 100)
    with pytest.raises(UserError, match=r"data\.sha256"):
        run()


def test_checkpoints_hold_plain_values_only(here):
    """torch.load with its safe default reads them, on a machine without the device too."""
    r = run()
    state = torch.load(r.path / "checkpoint.pt", weights_only=True)
    assert state["step"] == 13 and all(t.device.type == "cpu" for t in state["model"].values())
    json.dumps({k: v for k, v in state.items() if k not in ("model", "optimizers")})


def test_seconds_survive_an_interruption(here, monkeypatch):
    """Wall time counts earlier attempts up to their checkpoint, and timing the decoding; each step's seconds stay."""
    monkeypatch.setattr(lab, "decoding_speed", lambda *_: time.sleep(0.6) or 7.0)
    with pytest.raises(Interrupted):
        slow = Failing(5, lambda: (time.sleep(1.5), signal.raise_signal(signal.SIGTERM)))
        run("budget.decode_tokens=64", console=slow)
    (cut,) = runs.find("outputs")
    state = cut.load_checkpoint()
    assert len(state["step_seconds"]) == 5 and sum(state["step_seconds"]) == pytest.approx(state["seconds"])
    assert cut.summary["wall_seconds"] >= state["wall_seconds"] > 1.5
    r = run("budget.decode_tokens=64")
    assert len(r.load_checkpoint()["step_seconds"]) == 13 and r.summary["decode_tokens_per_s"] == 7.0
    assert r.summary["wall_seconds"] > state["wall_seconds"] + 0.6


def test_seconds_around_training_are_told_by_what_they_went_to(here, monkeypatch):
    """Each of them once, all attempts together; with the training they are the run."""
    slow = {"score": 0.05, "sample": 0.02}
    for name, seconds in slow.items():
        real = getattr(lab.Lab, name)
        call = lambda *a, real=real, s=seconds, **k: [time.sleep(s), real(*a, **k)][1]  # noqa: E731
        monkeypatch.setattr(lab.Lab, name, call)
    with pytest.raises(Interrupted):
        run(console=Failing(7, lambda: signal.raise_signal(signal.SIGTERM)))
    s = run().summary
    around = s["seconds_around"]
    assert around.keys() == {"evaluation", "samples", "logging", "checkpoints", "the end"}
    assert around["evaluation"] > 4 * 0.05 and around["samples"] > 3 * 0.02
    assert around["the end"] > 0.05 + 0.02  # the whole split, and a sample
    assert s["wall_seconds"] / 2 < sum(around.values()) + s["seconds"] <= s["wall_seconds"]


def test_the_first_steps_of_a_process_are_no_speed(here):
    """The median of the seconds without the first three; a slow beginning and an outlier change nothing."""
    assert speed.steady_tokens_per_s([9, 8, 7, 0.5, 0.5, 6, 0.25, 0.5], 64) == 128
    assert speed.steady_tokens_per_s([1, 1, 1], 64) is None
    s = run().summary
    seconds = runs.Run(next(runs.find("outputs")).path, None).load_checkpoint()["step_seconds"]
    assert s["steady_tokens_per_s"] == pytest.approx(64 / statistics.median(seconds[3:]))
    assert s["tokens_per_s"] == pytest.approx(13 * 64 / sum(seconds))


def test_a_checkpoint_of_an_earlier_version_is_resumed(here):
    """It has the seconds of neither the steps nor the attempts; the weights come out the same."""
    whole = run("name=whole")
    with pytest.raises(MemoryError):
        run("name=cut", console=Failing(7, die))
    (cut,) = runs.find("outputs/cut")
    state = cut.load_checkpoint()
    cut.save_checkpoint({k: v for k, v in state.items() if k not in ("step_seconds", "wall_seconds", "around")})
    cut = run("name=cut")
    assert cut.status == "done" and rows(cut) == rows(whole) and same_files(cut, whole)


def test_a_folder_of_an_earlier_version_is_told(here):
    """Other keys with the same values: the message has a reason, not an empty list."""
    r = run("budget.steps=1")
    info = runs.read_json(r.path / "run.json")
    del info["values"]["data.together"]
    r.write_json("run.json", info | {"identity": "of other keys"})
    with pytest.raises(UserError, match=r"holds another run \(made by an earlier version of toymha, with other keys\)"):
        run("budget.steps=1")


def test_two_processes_cannot_train_one_folder(here):
    r = run("budget.steps=1")
    lock = r.open(r.path, r.config, r.info["values"]["data.sha256"], {})
    with pytest.raises(UserError, match="another process"):
        runs.Run.open(r.path, r.config, r.info["values"]["data.sha256"], {})
    lock.release()


def test_vocabulary_smaller_than_the_data_is_refused(here):
    with pytest.raises(UserError, match="the data has 18 symbols"):
        run("vocab_size=10")


def test_padded_vocabulary_and_samples(here):
    """A model with more tokens than the data writes only tokens that the data has."""
    r = run("vocab_size=64", "budget.sample_tokens=50")
    assert len(r.summary["sample"]) == 50
    model = GPT(r.config, 18)
    model.embed.weight.data[18:] = 0  # unused tokens level with the best of the others, and used ones far below
    model.embed.weight.data[:18] *= 1e-3
    assert max(sample(model, [0], 50, 18, seed=0)) < 18 <= max(sample(model, [0], 50, 64, seed=0))
