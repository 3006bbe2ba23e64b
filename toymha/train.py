"""Train one run: from its folder to its folder. `train` is the loop, top to bottom."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from toymha import cost
from toymha.bench import decoding_speed, steady_tokens_per_s
from toymha.compose import Point
from toymha.config import Config
from toymha.console import Console
from toymha.data.corpus import Corpus, check_lengths, load_corpus, random_batch
from toymha.device import arithmetic, set_up
from toymha.evaluate import Score, attention_statistics, evaluate, unigram_loss, windows
from toymha.generate import sample
from toymha.log import Log, learned
from toymha.model.gpt import GPT
from toymha.optim import lr_factor, make_optimizers, set_lr
from toymha.runs import FINISHED, Run, folder
from toymha.schema import UserError
from toymha.seeds import stream, stream_seed


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived; `signum` says which."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Stop:
    """Turns the first SIGINT or SIGTERM into a note that the loop reads between steps; a second one acts at once."""

    def __init__(self, *signals: signal.Signals) -> None:
        """`signals`: which to catch; both by default."""
        self.signum, self.signals = 0, signals or (signal.SIGINT, signal.SIGTERM)

    def __enter__(self) -> Stop:
        self.before = {s: signal.signal(s, self._note) for s in self.signals}
        return self

    def __exit__(self, *_: Any) -> None:
        for s, handler in self.before.items():
            signal.signal(s, handler)

    def _note(self, signum: int, _frame: Any) -> None:
        if self.signum:
            raise KeyboardInterrupt
        self.signum = signum
        if signal.SIGINT in self.signals:  # not in a worker, whose parent has said it
            print("\ntoymha: stopping after this step; once more to stop at once", file=sys.stderr, flush=True)

    def check(self) -> None:
        """Raises Interrupted when a signal has arrived."""
        if self.signum:
            raise Interrupted(self.signum)


def train_point(point: Point, console: Console, stop: Stop) -> Run:
    """Train, resume, or leave alone one point of a plan; `run.summary` tells how it ended.

    Raises UserError for bad data or a folder in use, Interrupted, and whatever fails; each leaves its status behind.
    """
    c = point.config
    corpus = check_data(c)
    device, precision = set_up(c)
    about = {"choices": point.choices, "label": point.label, "device": str(device), "precision": precision}
    run = Run.open(folder(c, point.label), c, corpus.sha256, about | {"threads": torch.get_num_threads()})
    try:
        if run.status in FINISHED:
            console.say(f"{run.path} is {run.status} already (overwrite=true trains it anew)")
            console.finish(run)
        else:
            train(run, corpus, device, precision, console, stop)
    except (Interrupted, KeyboardInterrupt):
        run.update(status="interrupted")
        raise
    except BaseException as e:
        with contextlib.suppress(OSError):  # a full disk must not hide the first error
            run.update(status="failed", error=f"{type(e).__name__}: {e}".splitlines()[0])
            run.write_text("log.txt", traceback.format_exc())
        raise
    finally:
        console.stop()
        run.release()
    return run


def check_data(c: Config) -> Corpus:
    """The corpus of a run. Raises UserError when the text cannot be had, is too short, or has too many symbols."""
    corpus = load_corpus(c.data)
    check_lengths(corpus, c.seq_len)
    if c.vocab_size and c.vocab_size < corpus.tokenizer.vocab_size:
        raise UserError(f"vocab_size={c.vocab_size}: the data has {corpus.tokenizer.vocab_size} symbols; leave it null")
    return corpus


def train(run: Run, corpus: Corpus, device: torch.device, precision: str, console: Console, stop: Stop) -> None:
    """The loop. All chance is a function of (seed, step), so that only weights and moments need to be restored."""
    c, b, text = run.config, run.config.budget, corpus.splits["train"]
    model = GPT(c, corpus.tokenizer.vocab_size).to(device)
    optimizers = make_optimizers(model, c)
    state = restore(run, model, optimizers)
    lab = Lab(run, corpus, model, device, precision, console, stop, state)
    forward = compiled(model, c, device, precision, console) if c.compile else model
    with Log(run, state["step"]) as log:
        going = lab.begin(log)
        while going and progress_of(c, state) < 1:
            if stop.signum:
                lab.checkpoint(optimizers)
            stop.check()
            began = time.perf_counter()
            factor = lr_factor(c.optim, state["step"], progress_of(c, state), warmup_share(c))
            set_lr(optimizers, factor)
            x_BT, y_BT = random_batch(text, c.seq_len, c.batch_size, stream(c.seed_of_data, "batch", state["step"]))
            if c.attn_dropout or c.resid_dropout:
                torch.manual_seed(stream_seed(c.seed_of_data, "dropout", state["step"]))
            loss = 0.0
            for x, y in zip(x_BT.to(device).chunk(c.grad_accum), y_BT.to(device).chunk(c.grad_accum), strict=True):
                with arithmetic(precision, device):
                    logits = forward(x)
                part = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten()) / c.grad_accum
                part.backward()
                loss += part.item()
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), c.optim.clip or math.inf).item()
            if not math.isfinite(loss + grad_norm):  # before it reaches the weights
                rate = f"learning rate {c.optim.lr * factor:.3g}"
                lab.diverged(f"loss {loss}, gradient norm {grad_norm} at step {state['step'] + 1}, {rate}")
                going = False
                break
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            state["losses"].append(loss)
            state["step"] += 1
            state["step_seconds"].append(time.perf_counter() - began)
            state["seconds"] += state["step_seconds"][-1]
            step, last = state["step"], progress_of(c, state) >= 1
            console.step(step, state["seconds"], loss)
            if step % b.log_every == 0 or last:
                lab.log_row(log, factor, grad_norm)
            if step % b.eval_every == 0 or last:
                going = lab.look(log)
            if going and (step % (b.checkpoint_every or b.eval_every) == 0 or last):
                lab.checkpoint(optimizers)
        if going:
            lab.finish(log)
    console.finish(run)


def progress_of(c: Config, state: dict[str, Any]) -> float:
    """Share of the run that is over: of its steps, or of its minutes where those are used up sooner."""
    by_steps = state["step"] / c.max_steps if c.max_steps else 0.0 if c.max_steps is None else 1.0
    return max(by_steps, state["seconds"] / 60 / c.budget.minutes if c.budget.minutes else 0.0)


def warmup_share(c: Config) -> float:
    return c.optim.warmup / c.max_steps if c.max_steps else 0.0


def restore(run: Run, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """The last checkpoint, loaded into model and optimizers; the rest of it is the state of the loop."""
    new = {"step": 0, "seconds": 0.0, "step_seconds": [], "wall_seconds": 0.0, "losses": [], "best": None}
    saved = run.load_checkpoint()
    if saved is None:
        return new
    model.load_state_dict(saved.pop("model"))
    for optimizer, moments in zip(optimizers, saved.pop("optimizers"), strict=True):
        optimizer.load_state_dict(moments)
    return new | saved  # a checkpoint of an earlier version has not all of it


def compiled(model: nn.Module, c: Config, device: torch.device, precision: str, console: Console) -> Any:
    """torch.compile, or the plain model and one warning where it cannot run. The weights keep their names."""
    torch._dynamo.reset()  # each run of a sweep gets the whole limit of recompilations
    fast = torch.compile(model)
    try:
        idx_BT = torch.zeros(c.batch_size // c.grad_accum, c.seq_len, dtype=torch.long, device=device)
        with arithmetic(precision, device):
            logits = fast(idx_BT)
        logits.float().mean().backward()
        model.zero_grad()
    except Exception as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0][:120]
        console.warn(f"compile=true does not work here ({reason}); going on without")
        return model
    return fast


@dataclass
class Lab:
    """What surrounds the loop: looking, logging, saving. None of it touches weights or chance."""

    run: Run
    corpus: Corpus
    model: GPT
    device: torch.device
    precision: str
    console: Console
    stop: Stop
    state: dict[str, Any]  # step, seconds of training, of each step, of all; losses since the last row, best
    began: float = field(default_factory=time.perf_counter)

    def begin(self, log: Log) -> bool:
        c, step = self.run.config, self.state["step"]
        parameters = sum(p.numel() for p in self.model.parameters())
        self.run.write_json("tokenizer.json", self.corpus.tokenizer.to_dict())
        tokenizer = self.corpus.tokenizer
        about = {"parameters": parameters, "vocab_size": tokenizer.vocab_size, "wall_seconds": self.wall_seconds}
        self.run.restart(status="running", step=step, **about)
        if c.max_steps and c.optim.warmup >= c.max_steps:
            self.console.warn(f"optim.warmup={c.optim.warmup} is not shorter than the run of {c.max_steps} steps")
        if self.precision == "bf16" and self.device.type == "cpu" and c.precision == "bf16":
            self.console.warn(
                "precision=bf16 on a CPU is fast only where the CPU has bf16 arithmetic; precision=auto knows"
            )
        where = f"{self.device}, {self.precision}, {torch.get_num_threads()} threads"
        data = f"{self.corpus.name}, {self.corpus.tokenizer.vocab_size} {self.corpus.tokenizer.kind} tokens"
        self.console.start(self.run, f"{self.run.info['label']}: {parameters:,} parameters; {data}; {where}", step)
        return self.look(log) if step == 0 else True

    @property
    def wall_seconds(self) -> float:
        """Of this attempt and of the earlier ones up to their last checkpoint: training, looking, saving."""
        return self.state["wall_seconds"] + time.perf_counter() - self.began

    def score(self, split: str = "val", max_tokens: int | None = None) -> Score:
        poll = self.stop.check if max_tokens is None else lambda: None
        with arithmetic(self.precision, self.device):
            return evaluate(
                self.model, self.corpus.splits[split], self.run.config.seq_len, max_tokens=max_tokens, poll=poll
            )

    def look(self, log: Log) -> bool:
        """Evaluate on the fixed subset of the validation split, keep the best weights, log, write a sample.

        False when the loss is not finite: the run has diverged.
        """
        c, step = self.run.config, self.state["step"]
        score = self.score(max_tokens=c.budget.eval_tokens)
        if not math.isfinite(score.loss):
            self.diverged(f"validation loss {score.loss} after step {step}")
            return False
        row: dict[str, float | str] = {"loss/val": score.loss, "ppl/val": score.ppl}
        if score.floor is not None:
            row["floor/val"] = score.floor
        for name, part in score.parts.items():
            row |= {f"relation_{k}/{name}": v for k, v in asdict(part).items() if k != "tokens"}
        T = min(c.seq_len, 512)  # the statistics need T x T tensors, which training may have been spared
        at_WT, _ = next(windows(self.corpus.splits["val"], T, 2 * T, 2))
        row |= attention_statistics(self.model, self.corpus.splits["val"].tokens[at_WT - 1].long().to(self.device))
        if c.budget.sample_tokens and step:
            row["sample"] = self.sample()
        log.row(step, row)
        log.flush()
        best = self.state["best"]
        if best is None or score.loss < best["loss"]:
            self.state["best"] = {"step": step, "loss": score.loss}
            self.run.save_weights("best", self.model.state_dict(), step=step)
        pace = c.tokens_per_step * step / self.state["seconds"] if step else 0.0
        self.console.evaluated(step, score, pace)
        return True

    def sample(self) -> str:
        tokenizer, c = self.corpus.tokenizer, self.run.config
        start = self.corpus.splits["val"].tokens[:1].tolist()
        with contextlib.suppress(UserError):  # a text of one line
            start = tokenizer.encode("\n").tolist() or start
        return tokenizer.decode(sample(self.model, start, c.budget.sample_tokens, tokenizer.vocab_size, c.seed))

    def log_row(self, log: Log, factor: float, grad_norm: float) -> None:
        c, losses = self.run.config, self.state["losses"]
        row = {"loss/train": sum(losses) / len(losses), "lr": c.optim.lr * factor, "grad_norm": grad_norm}
        row["tokens_per_s"] = c.tokens_per_step * self.state["step"] / self.state["seconds"]
        log.row(self.state["step"], row)
        losses.clear()

    def checkpoint(self, optimizers: list[torch.optim.Optimizer]) -> None:
        moments, wall = [o.state_dict() for o in optimizers], {"wall_seconds": self.wall_seconds}
        self.run.save_checkpoint(self.state | wall | {"model": self.model.state_dict(), "optimizers": moments})
        self.run.update(step=self.state["step"], **wall)

    def diverged(self, error: str) -> None:
        about = {"step": self.state["step"], "wall_seconds": self.wall_seconds}
        self.run.update(status="diverged", error=error, **about)
        self.console.stop()

    def finish(self, log: Log) -> None:
        """Save the weights first; then the numbers on the whole splits, of the last weights and of the best.

        The test split is for verdicts: nothing is chosen by it.
        """
        c, step = self.run.config, self.state["step"]
        self.run.save_weights("model", self.model.state_dict(), step=step)
        last = self.score()
        if not math.isfinite(last.loss):
            return self.diverged(f"validation loss {last.loss} after step {step}")
        best_step, best = self.state["best"]["step"], last
        if best_step != step:
            self.model.load_state_dict(self.run.load_weights("best"))
            best = self.score()
            self.model.load_state_dict(self.run.load_weights("model"))
        splits, V = self.corpus.splits, self.corpus.tokenizer.vocab_size
        test = self.score("test") if "test" in splits else None
        rows = self.run.rows() if last.parts else []
        self.run.update(
            step=step,
            tokens_trained=step * c.tokens_per_step,
            seconds=self.state["seconds"],
            tokens_per_s=step * c.tokens_per_step / self.state["seconds"] if step else 0.0,
            steady_tokens_per_s=steady_tokens_per_s(self.state["step_seconds"], c.tokens_per_step),
            flops_per_token=cost.training_flops_per_token(c, V),
            kv_bytes=cost.kv_bytes(c, c.seq_len, bytes_per_number=2 if self.precision == "bf16" else 4),
            decode_tokens_per_s=decoding_speed(c, V, self.device, self.precision),
            val=last.to_dict(),
            best=best.to_dict() | {"step": best_step},
            test=test.to_dict() if test else None,
            unigram_loss=unigram_loss(splits["train"], splits["val"], V),
            sample=self.sample() if c.budget.sample_tokens else None,
            learned={name: learned(rows, name) for name in last.parts},
        )
        log.final(step, last)
        self.console.stop()
        self.run.update(status="done", wall_seconds=self.wall_seconds)
