"""Train one run: from its folder to its folder. `train` is the loop, top to bottom."""

from __future__ import annotations

import contextlib
import math
import traceback
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toymha import cost
from toymha.batches import Batch, MicroBatch, check_pairs, draw
from toymha.compose import Point
from toymha.config import Config
from toymha.console import Console
from toymha.data.corpus import Corpus, check_lengths, load_corpus
from toymha.device import arithmetic, set_up
from toymha.lab import Lab
from toymha.log import Log
from toymha.model.parts import drawing
from toymha.model.seq2seq import make_model
from toymha.optim import Optimizer, lr_factor, make_optimizers, set_lr
from toymha.runs import FINISHED, Run, folder
from toymha.schema import UserError
from toymha.seeds import stream, stream_seed
from toymha.start import first_weights
from toymha.stop import Interrupted, Stop
from toymha.team import ALONE, Team, members, readers_of
from toymha.timing.machine import check_room
from toymha.unread import Unread

TRAINING_BYTES = 16  # a parameter: itself, its gradient and two moments, each in fp32


def train_point(point: Point, console: Console, stop: Stop) -> Run:
    """Train, resume, or leave alone one point of a plan; `run.summary` tells how it ended.

    Raises UserError for bad data or a folder in use, Interrupted, and whatever fails; each leaves its status behind.
    """
    c = point.config
    corpus = check_data(c)
    begins = c.start and not (folder(c, point.label) / "checkpoint.pt").is_file()
    first = first_weights(c, corpus) if begins else None  # before a folder is made
    device, precision = set_up(c)
    n = sum(cost.parameters(c, corpus.tokenizer.vocab_size).values())
    check_room(device, TRAINING_BYTES * n, f"training {n:,} parameters", "a smaller model, or only `toymha cost`")
    about = {"choices": point.choices, "label": point.label, "device": str(device), "precision": precision}
    run = Run.open(folder(c, point.label), c, corpus.sha256, about | {"threads": torch.get_num_threads()})
    try:
        if run.status in FINISHED:
            console.say(f"{run.path} is {run.status} already (overwrite=true trains it anew)")
            console.finish(run)
        else:
            train(run, corpus, first, device, precision, console, stop)
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
    if c.n_encoder_layer is None:
        check_lengths(corpus, c.seq_len)
    else:
        check_pairs(corpus.splits, c.seq_len)
    if c.vocab_size and c.vocab_size < corpus.tokenizer.vocab_size:
        raise UserError(f"vocab_size={c.vocab_size}: the data has {corpus.tokenizer.vocab_size} symbols; leave it null")
    return corpus


def train(
    run: Run,
    corpus: Corpus,
    first: dict[str, Tensor] | None,
    device: torch.device,
    precision: str,
    console: Console,
    stop: Stop,
) -> None:
    """The loop. `first`: weights to begin with, null for new ones.

    All chance is a function of (seed, step), so that only weights and moments need to be restored.
    """
    c, b, text = run.config, run.config.budget, corpus.splits["train"]
    model = make_model(c, corpus.tokenizer.vocab_size).to(device)
    optimizers = make_optimizers(model, c, precision)
    state = restore(run, first, model, optimizers)
    forward = compiled(model, c, device, precision, console) if c.compile else model
    unread = Unread(state, c, device)
    with team_for(c, device, model) as team, readers_of(model, device) as readers, Log(run, state["step"]) as log:
        lab = Lab(run, corpus, model, device, precision, console, stop, readers, state)
        going = lab.begin(log)
        while going and progress_of(c, state) < 1:
            if stop.signum and not unread.read(state["step"]):
                unread.note_time()
                lab.checkpoint(optimizers)
            stop.check()
            unread.begin()
            factor = lr_factor(c.optim, state["step"], progress_of(c, state), warmup_share(c))
            set_lr(optimizers, factor)
            batch = draw(model, text, c.seq_len, c.batch_size, stream(c.seed_of_data, "batch", state["step"]))
            dropout_seed = stream_seed(c.seed_of_data, "dropout", state["step"])
            loss = backward(forward, batch, c.grad_accum, device, precision, dropout_seed, team)
            unread.add(loss, clipped(model, c, team), factor)
            step = state["step"] + 1
            logs, looks, saves = (
                step % n == 0 for n in (b.log_every, b.eval_every, b.checkpoint_every or b.eval_every)
            )
            due = unread.is_due(step, logs or looks or saves or step == c.max_steps)
            if due and (broken := unread.read(step)):  # on a CPU before it reaches the weights
                lab.diverged(f"{broken}, learning rate {c.optim.lr * broken.lr_factor:.3g}", broken.step - 1)
                going = False
                break
            move(optimizers, team)
            unread.note_time()
            state["step"] = step
            state["tokens"] += batch.tokens
            last = progress_of(c, state) >= 1
            console.step(step, state["seconds"], unread.seen.loss if unread.seen else None)
            if (logs or last) and unread.seen:
                lab.log_row(log, unread.seen)
            if looks or last:
                going = lab.look(log)
            if going and (saves or last):
                lab.checkpoint(optimizers)
        if going:
            lab.finish(log)
    console.finish(run)


def team_for(c: Config, device: torch.device, model: nn.Module) -> Team:
    """Those who share each micro-batch. A compiled model is one program for the whole of it."""
    rows = 0 if c.compile else c.batch_size // c.grad_accum
    return Team(members(device, sum(p.numel() for p in model.parameters()), rows))


def backward(
    forward: Any,
    batch: Batch,
    parts: int,
    device: torch.device,
    precision: str,
    dropout_seed: int = 0,
    team: Team = ALONE,
) -> Tensor:
    """The mean loss over the batch's tokens, in nats, and its gradient, which is added up over the micro-batches. A GPU
    is not waited for.

    In a team each member takes a part of a micro-batch. The gradients are added in the order of the parts, so that the
    same number of members gives the same bits, and another number the same up to rounding.
    """
    losses, leaves = [], list(forward.parameters())

    def work(micro: MicroBatch) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        inputs, y_BT, share, first = micro
        with drawing((stream_seed(dropout_seed, first + b) for b in range(len(y_BT))), device):
            part = loss_of(forward, inputs, y_BT, device, precision) * share
        return part.detach(), torch.autograd.grad(part, leaves, allow_unused=True)

    with team.resting():
        for part, gradients in team.map(work, batch.parts(parts * team.n, device)):
            losses.append(part)
            for p, gradient in zip(leaves, gradients, strict=True):
                if gradient is not None:
                    p.grad = gradient if p.grad is None else p.grad.add_(gradient)
        return torch.stack(losses).sum()


def clipped(model: nn.Module, c: Config, team: Team) -> Tensor:
    """The norm of the whole gradient, which is then no longer than the configuration allows."""
    with team.resting():
        return nn.utils.clip_grad_norm_(model.parameters(), c.optim.clip or math.inf)


def move(optimizers: list[Optimizer], team: Team) -> None:
    """One step along the gradients, which are gone afterwards."""
    for optimizer in optimizers:
        optimizer.step(team)
        optimizer.zero_grad()


def loss_of(forward: Any, inputs: tuple[Tensor, ...], y_BT: Tensor, device: torch.device, precision: str) -> Tensor:
    """The mean loss of the tokens to predict, in nats."""
    with arithmetic(precision, device):
        logits_BTV = forward(*inputs)
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), y_BT.flatten())


def progress_of(c: Config, state: dict[str, Any]) -> float:
    """Share of the run that is over: of its steps, or of its minutes where those are used up sooner."""
    by_steps = state["step"] / c.max_steps if c.max_steps else 0.0 if c.max_steps is None else 1.0
    return max(by_steps, state["seconds"] / 60 / c.budget.minutes if c.budget.minutes else 0.0)


def warmup_share(c: Config) -> float:
    return c.optim.warmup / c.max_steps if c.max_steps else 0.0


def restore(run: Run, first: dict[str, Tensor] | None, model: nn.Module, optimizers: list[Optimizer]) -> dict[str, Any]:
    """The last checkpoint, loaded into model and optimizers; the rest of it is the state of the loop."""
    new: dict[str, Any] = {"step": 0, "tokens": 0, "losses": [], "best": None}
    new |= {"seconds": 0.0, "step_seconds": [], "wall_seconds": 0.0, "around": {}}
    saved = run.load_checkpoint()
    if saved is None:
        if first is not None:
            model.load_state_dict(first)
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
            logits = fast(*([idx_BT] if c.n_encoder_layer is None else [idx_BT, idx_BT]))
        logits.float().mean().backward()
        model.zero_grad()
    except Exception as e:
        reason = (str(e).strip() or type(e).__name__).splitlines()[0][:120]
        console.warn(f"compile=true does not work here ({reason}); going on without")
        return model
    return fast
