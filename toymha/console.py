"""What one run tells its user: a bar in a terminal, plain lines in a file, nothing in the worker of a sweep."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from toymha.config import Config
    from toymha.evaluate import Score
    from toymha.runs import Run


class Console:
    """`quiet`: say nothing at all. Progress goes to stderr, results to stdout."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.bar: tqdm | None = None

    def say(self, text: str) -> None:
        if self.quiet:
            return
        if self.bar is not None:
            tqdm.write(text)
        else:
            print(text, flush=True)

    def warn(self, text: str) -> None:
        if not self.quiet:
            tqdm.write(f"toymha: warning: {text}", file=sys.stderr)

    def start(self, run: Run, about: str, step: int) -> None:
        """`about`: one line on what is trained; `step`: where a resumed run goes on."""
        c = run.config
        self.say(about)
        self.say(f"run folder {run.path}")
        if step:
            self.say(f"resuming at step {step:,}")
        self.timed = c.max_steps is None
        self.total = c.max_steps if c.max_steps is not None else int(60 * (c.budget.minutes or 0))
        if not self.quiet and sys.stderr.isatty():
            self.bar = tqdm(
                total=self.total,
                initial=0 if self.timed else step,
                unit="s" if self.timed else "step",
                dynamic_ncols=True,
                leave=False,
                file=sys.stderr,
            )

    def step(self, step: int, seconds: float, loss: float | None) -> None:
        if self.bar is not None:
            now = min(int(seconds), self.total) if self.timed else step
            self.bar.update(now - self.bar.n)
            if loss is not None:
                self.bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)

    def evaluated(self, step: int, score: Score, tokens_per_s: float) -> None:
        pace = f"  {tokens_per_s:9,.0f} tokens/s" if tokens_per_s else ""
        self.say(f"step {step:6,}  validation loss {score.loss:.4f}  perplexity {score.ppl:9.3f}{pace}")

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def finish(self, run: Run) -> None:
        """One screen: how it ended, the numbers, and what to type next."""
        s = run.summary
        if s["status"] == "diverged":
            self.say(f"diverged: {s['error']}; {_kept(run)}")
            return
        self.say(
            f"\ndone: {s['step']:,} steps, {s['tokens_trained']:,} tokens in {duration(s['seconds'])}, "
            f"{s['tokens_per_s']:,.0f} tokens/s"
        )
        self.say(score_line("validation", s["val"]))
        for line in parts_table(s["val"], s["learned"]):
            self.say(line)
        for line in pairs_table((s.get("pairs") or {}).get("val")):
            self.say(line)
        if s["best"]["step"] != s["step"]:
            self.say(score_line(f"best, step {s['best']['step']:,}", s["best"]))
        warning = "" if s["val"]["loss"] < s["unigram_loss"] else "; this run is no better"
        self.say(f"{'frequencies alone':18} loss {s['unigram_loss']:.4f} nats (a model without context){warning}")
        if s.get("sample"):
            self.say("\n" + "\n".join("    " + line for line in s["sample"].splitlines()))
        if s.get("heads"):
            kinds = ", ".join(f"{n} {kind}" for kind, n in s["heads"].get("kinds", {}).items()) or "none"
            share = s["heads"].get("removable", {}).get("zeroed")
            self.say(
                f"\nheads       {kinds}"
                + (f"; {100 * share:.0f} % can go at less than 1 %" if share is not None else "")
            )
            self.say(f"            toymha heads run={quote(run.path)}")
        self.say(f"\ncurves      tensorboard --logdir {quote(run.config.output_dir)}")
        if len(run.config.data.split) == 3:
            self.say(f"test split  toymha eval run={quote(run.path)} split=test")


def _kept(run: Run) -> str:
    return (
        "the last good checkpoint is kept"
        if (run.path / "checkpoint.pt").is_file()
        else "it never reached a checkpoint"
    )


def again(c: Config) -> str:
    """How an interrupted command is taken up."""
    return f"the same command {'without overwrite=true ' if c.overwrite else ''}goes on from here"


def score_line(what: str, s: dict[str, Any]) -> str:
    error = "" if s["se"] is None else f" ± {s['se']:.4f}"
    return (
        f"{what:18} loss {s['loss']:.4f}{error} nats   perplexity {s['ppl']:.4f}   "
        f"{s['bits_per_char']:.4f} bits/char   {s['tokens']:,} tokens"
    )


def parts_table(s: dict[str, Any], learned: dict[str, int | None] | None = None) -> list[str]:
    """Of a text with tagged tokens: how far from the lowest possible loss, and each relation. `s`: Score.to_dict()."""
    if not s["parts"]:
        return []
    lines = []
    if s["floor"] is not None:
        above = f"{s['loss'] - s['floor']:.4f} above it"
        lines.append(f"{'lowest possible':18} loss {s['floor']:.4f} nats on these tokens; {above}")
    head = f"{'':18} {'loss':>8} {'lowest':>8} {'p(right)':>8} {'accuracy':>8} {'tokens':>8}"
    lines.append(head + ("  learned at step" if learned else ""))
    for name, p in s["parts"].items():
        lowest = f"{'-' if p['floor'] is None else format(p['floor'], '.4f'):>8}"
        numbers = f"{p['loss']:8.4f} {lowest} {p['right']:8.3f} {p['accuracy']:8.3f} {p['tokens']:8,}"
        step = f"  {'not yet' if learned[name] is None else learned[name]:>15}" if learned else ""
        lines.append(f"  {name:16} {numbers}{step}")
    return lines


def pairs_table(written: dict[str, Any] | None) -> list[str]:
    """Targets that were written, against the right ones: of one split, what `Lab.pairs` gives."""
    names = {"greedy": "greedy", "beam": "beam search", "frequent": "by frequency"}
    rows = [(label, m) for name, label in names.items() if (m := (written or {}).get(name))]
    if not rows:
        return []
    lines = [f"{'written':18} {'exact':>8} {'symbol errors':>14} {'pairs':>8}"]
    for label, m in rows:
        n = f"{m['pairs']:8,}" if "pairs" in m else ""
        lines.append(f"  {label:16} {m['exact']:8.2%} {m['ser']:14.2%} {n}".rstrip())
    return lines


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m} min" if hours else f"{m} min {s} s"


def quote(path: str | Path) -> str:
    """A path as one pastes it into the shell."""
    return str(path) if os.name == "nt" else shlex.quote(str(path))
