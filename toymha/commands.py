"""What each command does with its words: it reads them, and calls the module that does the work.

Imports neither hydra nor torch at the top, so that help and completion answer at once.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toymha import config
from toymha.config import GROUPS, SPECIAL
from toymha.help import COMPLETION, Command
from toymha.options import (
    BenchOptions,
    BenchTrainOptions,
    CompletionOptions,
    CostOptions,
    DataOptions,
    EvalOptions,
    GenerateOptions,
    HeadsOptions,
    NoOptions,
    PlanOptions,
    PruneOptions,
    ReportOptions,
    ReproduceOptions,
)
from toymha.schema import UserError, build, is_list, keys, nearest


@dataclass
class Flags:
    """What is written with dashes."""

    multirun: bool = False
    help: bool = False
    cfg: bool = False
    config_dir: Path | None = None


def train(words: list[str], flags: Flags) -> int:
    """One point in this process, several in parallel."""
    asked = compose_experiment(words, flags)
    if flags.cfg:
        return show_config(asked.points)
    with contextlib.redirect_stdout(Unbreakable(sys.stdout)):
        if len(asked.points) > 1 or flags.multirun or asked.sweep is not None:
            from toymha.sweep import run_sweep

            return run_sweep(asked)
        return train_one(asked.points[0])


def train_one(point: Any, quiet: bool = False) -> int:
    """One run, in this process; `quiet`: it says nothing of its own."""
    from toymha.console import Console, again
    from toymha.stop import Interrupted, Stop
    from toymha.train import train_point

    if point.config.workers is not None:
        raise UserError(f"workers={point.config.workers} is for sweeps; this is one run, which threads= is for")
    with Stop() as stop:
        try:
            run = train_point(point, Console(quiet), stop)
        except (Interrupted, KeyboardInterrupt):
            print(f"toymha: interrupted; {again(point.config)}", file=sys.stderr)
            return 128 + (stop.signum or signal.SIGINT)
    return 0 if run.status == "done" else 1


class Unbreakable:
    """A stream whose reader may leave (`toymha train | head`): training goes on, unheard."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        return self._try(self.stream.write, text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, act: Any, *args: Any) -> Any:
        try:
            return act(*args)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def plan(words: list[str], flags: Flags) -> int:
    """Only say what `train` would do, and with `time=true` how long it would take."""
    if flags.cfg:
        return train(words, flags)
    from toymha.sweep import plans
    from toymha.words import read_value

    asked = [w for w in words if w.startswith("time=")]
    timed = asked and build({"time": read_value(asked[-1])}, PlanOptions).time
    made = plans(compose_experiment([w for w in words if w not in asked], flags))
    for p in made:
        print(p.text(), end="", flush=True)
    if timed and any(p.todo for p in made):
        from toymha.console import duration
        from toymha.predict import predict

        print(f"about {duration(sum(predict(made)))}")
    return 0


def compose_experiment(words: list[str], flags: Flags) -> Any:
    from toymha import compose, fair

    return fair.equalise(compose.experiment(words, flags.multirun, flags.config_dir))


def show_config(points: list[Any]) -> int:
    import yaml

    for p in points:
        print(yaml.safe_dump(config.plain(p.config), sort_keys=False, allow_unicode=True), end="")
    return 0


def evaluate(words: list[str], flags: Flags) -> int:
    """A finished run on a whole split."""
    from toymha.score import score_run

    print(score_run(options("eval", words, flags)))
    return 0


def heads(words: list[str], flags: Flags) -> int:
    """What the heads of a model do; without run= of one that the other words describe."""
    forgot_run(words)
    own = [w for w in words if w.partition("=")[0] in keys(HeadsOptions)]
    given = any(w.startswith("run=") for w in own)
    if given:
        o, rest = options("heads", words, flags), []
    else:  # seed, device and threads are keys of both
        o, rest = options("heads", own, flags), [w for w in words if w not in own or w.startswith("seed=")]
    from toymha.heads import heads as look

    return look(o, {w.partition("=")[0] for w in own}, rest)


def generate(words: list[str], flags: Flags) -> int:
    """Text from a finished run."""
    from toymha.generation.generate import generate_run

    return generate_run(options("generate", words, flags))


def bench(words: list[str], flags: Flags) -> int:
    """Prefill and decoding, measured."""
    forgot_run(words)
    o, rest = own_and_rest(BenchOptions, words, flags)
    from toymha.timing.bench import bench as measure

    return measure(o, rest, flags.config_dir)


def bench_train(words: list[str], flags: Flags) -> int:
    """A step of training, measured."""
    o, rest = own_and_rest(BenchTrainOptions, words, flags)
    from toymha.timing.bench_train import bench_train as measure

    return measure(o, rest, flags.config_dir)


def cost(words: list[str], flags: Flags) -> int:
    """What a configuration costs, counted."""
    o, rest = own_and_rest(CostOptions, words, flags)
    from toymha.accounting import cost as count

    return count(o, rest, flags.config_dir)


def prune(words: list[str], flags: Flags) -> int:
    """A smaller run."""
    from toymha.prune import prune_run

    return prune_run(options("prune", words, flags))


def report(words: list[str], flags: Flags) -> int:
    """Print the table and the verdict, and write them beside the runs."""
    from toymha.console import quote
    from toymha.page import write_report
    from toymha.report import Report

    found = Report.load(options("report", words, flags).run)
    print(found.text(), end="", flush=True)
    try:
        print(f"\nreport  {quote(write_report(found)[0])}")
    except OSError as e:  # somebody else's folder may be read too
        print(f"toymha: no page is written: {e}", file=sys.stderr)
    return 0


def reproduce(words: list[str], flags: Flags) -> int:
    """All statements, one after the other."""
    from toymha.reproduce import reproduce as all_of

    with contextlib.redirect_stdout(Unbreakable(sys.stdout)):
        return all_of(options("reproduce", words, flags), words)


def data(words: list[str], flags: Flags) -> int:
    from toymha.data import text

    o = options("data", words, flags)
    if o.fetch:
        size = text.fetch(o.fetch)
        print(f"{o.fetch} is here: {size:,} characters")
        return 0
    rows = text.listing()
    from toymha.report import columns

    lines = [["data=", "here", "size", "needs", "licence", "origin"]]
    lines += [[r["name"], "yes" if r["here"] else "no", *(str(r[k]) for k in lines[0][2:])] for r in rows]
    print("\n".join(columns(lines, len(lines[0]))))
    return 0


def version(words: list[str], flags: Flags) -> int:
    from importlib.metadata import version as of

    options("version", words, flags)
    print(f"toymha {of('toymha')}")
    return 0


def forgot_run(words: list[str]) -> None:
    """Raises UserError for a path without `run=` before it."""
    for word in words:
        name, equals, _ = word.partition("=")
        an_option = equals and re.fullmatch(r"[\w.]+", name)
        if not an_option and (any(slash in word for slash in "/\\") or Path(word).is_dir()):
            raise UserError(f"{word}: write run={word}")


def options(command: str, words: list[str], flags: Flags) -> Any:
    """Words -> the command's options. Raises UserError."""
    if flags.multirun or flags.cfg or flags.config_dir:
        raise UserError(f"`toymha {command}` takes no -m, --cfg or --config-dir")
    spec = COMMANDS[command].options
    known = keys(spec)
    if "run" in known:
        forgot_run(words)
    for word in words:
        name, equals, _ = word.partition("=")
        if not equals or name not in known:
            if not equals and (before := [w for w in words[: words.index(word)] if _takes_text(w, known)]):
                raise UserError(f"{word}: put text with spaces in quotes, such as {_quoted(before[-1], word)}")
            if not equals and "run" in known and not any(w.startswith("run=") for w in words):
                raise UserError(f"{word}: write run={word}")
            valid = ", ".join(f"{k}=" for k in known)
            raise UserError(f"{word}: no such option of `toymha {command}`{nearest(name, known) or ';'} valid: {valid}")
    return read_options(spec, words)


def _takes_text(word: str, known: Mapping[str, Any]) -> bool:
    """Whether this is an option whose text a shell may have cut at a space; paths are seldom."""
    name = word.partition("=")[0]
    return name in ("prompt", "text") and name in known


def _quoted(word: str, rest: str) -> str:
    name, _, text = word.partition("=")
    return f"{name}='{text} {rest} ...'"


def own_and_rest(spec: type, words: list[str], flags: Flags) -> tuple[Any, list[str]]:
    """The options of a command that also takes the keys of `train`, and the words that are not its own.

    Raises UserError for a word that is nearest to one of its own options, which those who read the rest do not know.
    """
    from toymha.words import ELSEWHERE

    if flags.cfg:
        raise UserError("--cfg belongs to `toymha train` and `toymha plan`")
    own = [w for w in words if "=" in w and w.partition("=")[0] in keys(spec)]
    rest = [w for w in words if w not in own]
    for word in rest:
        name, equals, _ = word.partition("=")
        others = [*GROUPS, *config.keys(), *SPECIAL, *ELSEWHERE]
        close = difflib.get_close_matches(name, [*keys(spec), *others], n=1)
        if equals and name not in others and close and close[0] in keys(spec):
            raise UserError(f"unknown key {name}; did you mean {close[0]}?")
    return read_options(spec, own), rest


def read_options(spec: type, words: Sequence[str]) -> Any:
    """`key=value` words of known keys -> the typed options. Raises UserError."""
    from toymha.words import read_value

    values: dict[str, Any] = {}
    for word in words:
        name = word.partition("=")[0]
        f, hint = keys(spec)[name]
        if name in values:
            raise UserError(f"{name} is given twice; keep one of the two")
        values[name] = read_value(word, literal=f.metadata["text"], several=is_list(hint))
    return build(values, spec)


def completion(words: list[str], flags: Flags) -> int:
    """In bash: eval "$(toymha completion shell=bash)"."""
    print(COMPLETION[options("completion", words, flags).shell])
    return 0


COMMANDS = {
    "train": Command("train one model, or many (-m, sweep=NAME)", train, config.Config),
    "plan": Command("say what `train` would do, and what is done already", plan, config.Config),
    "report": Command("table, verdict and page of a folder of runs", report, ReportOptions),
    "reproduce": Command("all statements of conf/sweep, and one page of verdicts", reproduce, ReproduceOptions),
    "eval": Command("score a trained run on a whole split", evaluate, EvalOptions),
    "heads": Command("what each head of a run does, and how much it is needed", heads, HeadsOptions, True),
    "generate": Command("text from a run, with a KV cache; trace=true shows each step", generate, GenerateOptions),
    "bench": Command("time prefill and decoding, against the machine's limits", bench, BenchOptions, True),
    "bench train": Command("time training steps, explicit and fused attention", bench_train, BenchTrainOptions, True),
    "cost": Command("parameters, FLOPs and bytes of any configuration, counted", cost, CostOptions, True),
    "prune": Command("a run without the heads that it needs least, as a run of its own", prune, PruneOptions),
    "data": Command("list the data sets, or fetch one", data, DataOptions),
    "completion": Command("tab completion: shell=bash or shell=zsh", completion, CompletionOptions),
    "version": Command("print the version", version, NoOptions),
}
