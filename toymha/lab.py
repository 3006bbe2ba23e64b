"""What surrounds the training loop: looking, logging, saving."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from toymha import cost
from toymha.config import PAIRED
from toymha.console import Console
from toymha.data.corpus import Corpus
from toymha.data.pairs import pairs_of
from toymha.data.units import UnitTokenizer
from toymha.device import arithmetic
from toymha.evaluate import Score, attention_statistics, evaluate, looked_at, unigram_loss
from toymha.generation.beam import write_targets
from toymha.generation.generate import sample
from toymha.generation.translate import all_ways, match
from toymha.log import Log, learned
from toymha.model.gpt import GPT
from toymha.model.seq2seq import Seq2Seq
from toymha.optim import Optimizer
from toymha.runs import Run, cores
from toymha.schema import UserError
from toymha.stop import Stop
from toymha.team import Team
from toymha.timing.speed import decoding_speed, steady_tokens_per_s
from toymha.unread import Seen


@dataclass
class Lab:
    """What surrounds the loop: looking, logging, saving. None of it touches weights or chance."""

    run: Run
    corpus: Corpus
    model: GPT | Seq2Seq
    device: torch.device
    precision: str
    console: Console
    stop: Stop
    team: Team
    state: dict[str, Any]  # step, tokens, seconds: of training, of each step, of all, around; losses since a row, best
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
        threads, here = torch.get_num_threads(), cores()
        if self.device.type == "cpu" and threads > here:
            self.console.warn(f"threads={threads} on {here} cores: slower than with as many as there are")
        longest = self.corpus.splits["val"].longest
        if self.writes and isinstance(self.model, GPT) and longest and longest > c.seq_len:
            what = f"pairs of up to {longest} tokens do not fit seq_len={c.seq_len}"
            self.console.warn(f"{what}; targets that are cut off count as wrong")
        where = f"{self.device}, {self.precision}, {torch.get_num_threads()} threads"
        data = f"{self.corpus.name}, {self.corpus.tokenizer.vocab_size} {self.corpus.tokenizer.kind} tokens"
        if c.start:
            data += f"; begins with the weights of {c.start}"
        self.console.start(self.run, f"{self.run.info['label']}: {parameters:,} parameters; {data}; {where}", step)
        return self.look(log) if step == 0 else True

    @property
    def wall_seconds(self) -> float:
        """Of this attempt and of the earlier ones up to their last checkpoint: training, looking, saving."""
        return self.state["wall_seconds"] + time.perf_counter() - self.began

    @contextlib.contextmanager
    def spending(self, what: str) -> Iterator[None]:
        """Seconds that are not training are noted by what they went to."""
        began, around = time.perf_counter(), self.state["around"]
        try:
            yield
        finally:
            around[what] = around.get(what, 0.0) + time.perf_counter() - began

    @property
    def writes(self) -> bool:
        """Whether there are targets that the model can write itself."""
        return self.run.config.data.name in PAIRED and self.run.config.causal

    def score(self, split: str = "val", max_tokens: int | None = None) -> Score:
        poll = self.stop.check if max_tokens is None else lambda: None
        with arithmetic(self.precision, self.device):
            return evaluate(
                self.model,
                self.corpus.splits[split],
                self.run.config.seq_len,
                max_tokens=max_tokens,
                poll=poll,
                team=self.team,
            )

    def look(self, log: Log) -> bool:
        """Evaluate on the fixed subset of the validation split, keep the best weights, log, write a sample.

        False when the loss is not finite: the run has diverged.
        """
        c, step = self.run.config, self.state["step"]
        with self.spending("evaluation"):
            score = self.score(max_tokens=c.budget.eval_tokens)
            if not math.isfinite(score.loss):
                self.diverged(f"validation loss {score.loss} after step {step}")
                return False
            row = self.row_of(score)
        if c.budget.sample_tokens and step:
            with self.spending("samples"):
                row["sample"] = self.sample()
        every = c.budget.watch and c.budget.watch * c.budget.eval_every
        if every and (step % every == 0 or step == c.max_steps):
            from toymha.analysis.watch import watch  # matplotlib takes half a second

            assert isinstance(self.model, GPT)
            with self.spending("watching"):
                scores, maps = watch(self.model, c, self.corpus, self.run.path / "watch" / f"step={step}")
                row |= scores
                log.images(step, maps)
        with self.spending("logging"):
            log.row(step, row)
            log.flush()
        best = self.state["best"]
        if best is None or score.loss < best["loss"]:
            self.state["best"] = {"step": step, "loss": score.loss}
            with self.spending("checkpoints"):
                self.run.save_weights("best", self.model.state_dict(), step=step)
        pace = self.state["tokens"] / self.state["seconds"] if step else 0.0
        self.console.evaluated(step, score, pace)
        return True

    def row_of(self, score: Score) -> dict[str, float | str]:
        """The row of an evaluation: the score, by relation too, what attention does, targets that the model writes."""
        c, split = self.run.config, self.corpus.splits["val"]
        row: dict[str, float | str] = {"loss/val": score.loss, "ppl/val": score.ppl}
        if score.floor is not None:
            row["floor/val"] = score.floor
        for name, part in score.parts.items():
            row |= {f"relation_{k}/{name}": v for k, v in asdict(part).items() if k != "tokens"}
        row |= attention_statistics(self.model, *(x.to(self.device) for x in looked_at(self.model, split, c.seq_len)))
        if self.writes and c.budget.eval_pairs:
            V = self.corpus.tokenizer.vocab_size
            with arithmetic(self.precision, self.device):
                found = match(self.model, split, V, max_pairs=c.budget.eval_pairs)
            row |= {"pairs/exact": found.exact, "pairs/ser": found.ser}
        return row

    def pairs(self) -> dict[str, Any] | None:
        """By split: what `all_ways` of writing targets come to."""
        if not self.writes:
            return None
        splits, V, beam = self.corpus.splits, self.corpus.tokenizer.vocab_size, self.run.config.budget.beam
        with arithmetic(self.precision, self.device):
            names = [name for name in ("val", "test") if name in splits]
            return {name: all_ways(self.model, splits, name, V, beam, self.stop.check) for name in names}

    def sample(self) -> str:
        tokenizer, c = self.corpus.tokenizer, self.run.config
        if self.writes:
            return self.sample_of_pairs()
        assert isinstance(self.model, GPT)
        start = self.corpus.splits["val"].tokens[:1].tolist()
        with contextlib.suppress(UserError):  # a text of one line
            start = tokenizer.encode("\n").tolist() or start
        return tokenizer.decode(sample(self.model, start, c.budget.sample_tokens, tokenizer.vocab_size, c.seed))

    def sample_of_pairs(self, n: int = 4) -> str:
        """The first pairs of the validation split: source, target as the model writes it, and the right one."""
        by, split = self.corpus.tokenizer, self.corpus.splits["val"]
        assert isinstance(by, UnitTokenizer)
        pairs = list(itertools.islice(pairs_of(split), n))
        longest = max(len(target) for _, target in pairs) + 4
        sources, V = [source for source, _ in pairs], by.vocab_size
        found = write_targets(self.model, sources, separator=by.separator, end=by.begin, vocab_size=V, length=longest)
        lines = []
        for (source, target), (best, *_) in zip(pairs, found):
            written, right = by.decode_target(best.tokens), by.decode_target(target)
            told = "" if written == right else f"   (right: {right})"
            lines.append(f"{by.source_text(source)} -> {written}{told}")
        return "\n".join(lines)

    def heads(self) -> dict[str, Any]:
        """What `toymha heads` would find, as numbers."""
        from toymha.analysis.study import heads_of_run

        assert isinstance(self.model, GPT)
        return heads_of_run(self.model, self.run.config, self.corpus, self.stop.check)

    def log_row(self, log: Log, seen: Seen) -> None:
        c, losses = self.run.config, self.state["losses"]
        row = {"loss/train": sum(losses) / len(losses), "lr": c.optim.lr * seen.lr_factor, "grad_norm": seen.grad_norm}
        row["tokens_per_s"] = self.state["tokens"] / self.state["seconds"]
        with self.spending("logging"):
            log.row(self.state["step"], row)
        losses.clear()

    def checkpoint(self, optimizers: list[Optimizer]) -> None:
        moments, wall = [o.state_dict() for o in optimizers], {"wall_seconds": self.wall_seconds}
        with self.spending("checkpoints"):
            self.run.save_checkpoint(self.state | wall | {"model": self.model.state_dict(), "optimizers": moments})
            self.run.update(step=self.state["step"], **wall)

    def diverged(self, error: str, step: int | None = None) -> None:
        """`step`: the last that was sound, if not the last that was taken."""
        about = {"step": self.state["step"] if step is None else step, "wall_seconds": self.wall_seconds}
        self.run.update(status="diverged", error=error, **about)
        self.console.stop()

    def finish(self, log: Log) -> None:
        """Save the weights first; then the numbers on the whole splits, of the last weights and of the best.

        The test split is for verdicts: nothing is chosen by it.
        """
        with self.spending("the end"):
            done = self.conclude(log)
        if done:
            about = {"wall_seconds": self.wall_seconds, "seconds_around": self.state["around"]}
            self.run.update(status="done", **about)

    def conclude(self, log: Log) -> bool:
        """The work of `finish`. False when the run has diverged."""
        c, step = self.run.config, self.state["step"]
        self.run.save_weights("model", self.model.state_dict(), step=step)
        last = self.score()
        if not math.isfinite(last.loss):
            self.diverged(f"validation loss {last.loss} after step {step}")
            return False
        best_step, best = self.state["best"]["step"], last
        if best_step != step:
            self.model.load_state_dict(self.run.load_weights("best"))
            best = self.score()
            self.model.load_state_dict(self.run.load_weights("model"))
        splits, V = self.corpus.splits, self.corpus.tokenizer.vocab_size
        test = self.score("test") if "test" in splits else None
        rows = self.run.rows() if last.parts else []
        pairs = self.pairs()
        self.run.update(
            step=step,
            tokens_trained=self.state["tokens"],
            seconds=self.state["seconds"],
            tokens_per_s=self.state["tokens"] / self.state["seconds"] if step else 0.0,
            steady_tokens_per_s=steady_tokens_per_s(self.state["step_seconds"], self.state["tokens"] / max(step, 1)),
            flops_per_token=cost.training_flops_per_token(c, V),
            kv_bytes=cost.kv_bytes(c, c.seq_len, bytes_per_number=2 if self.precision == "bf16" else 4),
            decode_tokens_per_s=decoding_speed(c, V, self.device, self.precision),
            val=last.to_dict(),
            best=best.to_dict() | {"step": best_step},
            test=test.to_dict() if test else None,
            unigram_loss=unigram_loss(self.model, splits["train"], splits["val"], V),
            pairs=pairs,
            sample=self.sample() if c.budget.sample_tokens else None,
            heads=self.heads() if c.budget.heads else None,
            learned={name: learned(rows, name) for name in last.parts},
        )
        log.final(step, last, (pairs or {}).get("val") or {})
        self.console.stop()
        return True
