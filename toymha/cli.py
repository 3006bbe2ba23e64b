"""`toymha COMMAND key=value ...`: dispatch, help, completion, one-line errors.

Imports neither hydra nor torch at the top, so that help and completion answer at once.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toymha import config
from toymha.config import GROUPS
from toymha.help import COMPLETION, Command, complete, help_of, overview
from toymha.options import (
    CompletionOptions,
    DataOptions,
    EvalOptions,
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


def main(argv: list[str] | None = None) -> int:
    """The exit status: 0 all well, 1 a run failed or diverged in a sweep, 2 a mistake, 130 or 143 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    with contextlib.suppress(AttributeError):  # Chinese text also under LC_ALL=C
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        sys.stderr.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        return dispatch(words)
    except UserError as e:
        print(f"toymha: {e}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `toymha report ... | head`
        sys.stderr.close()
        return 0
    except OSError as e:  # a full disk, a folder that cannot be written
        more = "; free space, and the same command goes on" if e.errno == errno.ENOSPC else ""
        print(f"toymha: {e}{more}", file=sys.stderr)
        return 1
    except UnicodeEncodeError:
        print("toymha: this locale cannot name such files; set PYTHONUTF8=1", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("toymha: interrupted", file=sys.stderr)
        return 130


def dispatch(words: list[str]) -> int:
    if words[:1] == ["_complete"]:
        print("\n".join(complete(words[1], " ".join(words[2:]), COMMANDS)))
        return 0
    flags, rest = read_flags(words)
    name = next((w for w in rest if "=" not in w), None)
    if name is None or name == "help":
        if rest and name is None:
            raise UserError(f"{rest[0]}: a command comes first, such as `toymha train {rest[0]}`")
        print(overview(COMMANDS))
        return 0
    if name not in COMMANDS:
        raise UserError(f"no command {name}{nearest(name, COMMANDS) or ';'} commands: {', '.join(COMMANDS)}")
    rest.remove(name)
    command = COMMANDS[name]
    if flags.help:
        print(help_of(name, command, flags.config_dir))
        return 0
    return command.run(rest, flags) or 0


def read_flags(words: list[str]) -> tuple[Flags, list[str]]:
    """Flags may stand anywhere. Raises UserError for one that does not exist."""
    flags, rest, words = Flags(), [], list(words)
    while words:
        word = words.pop(0)
        if word in ("-m", "--multirun"):
            flags.multirun = True
        elif word in ("-h", "--help", "--hydra-help"):
            flags.help = True
        elif word in ("--version", "-V"):
            rest.append("version")
        elif word in ("-c", "--cfg"):
            flags.cfg = True
            if words and words[0] in ("job", "hydra", "all"):
                words.pop(0)
        elif word.partition("=")[0] in ("-cd", "--config-dir"):
            _, _, value = word.partition("=")
            value = value or (words.pop(0) if words and "=" not in words[0] else "")
            if not value:
                raise UserError(f"{word} needs a folder")
            flags.config_dir = Path(value).absolute()
            if not flags.config_dir.is_dir():
                raise UserError(f"--config-dir {value}: no such folder ({flags.config_dir})")
        elif word.startswith("-"):
            bare, _, value = word.lstrip("-").partition("=")
            value = value or (words[0] if words and not words[0].startswith("-") and "=" not in words[0] else "VALUE")
            raise UserError(f"{word}: options are written key=value{nearest_option(bare, value)}")
        else:
            rest.append(word)
    return flags, rest


def nearest_option(name: str, value: str) -> str:
    close = nearest(name.replace("-", "_"), [*GROUPS, *config.keys()])
    return close.replace("?", f"={value}?")


# Commands


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
    from toymha.words import read_value

    if flags.multirun or flags.cfg or flags.config_dir:
        raise UserError(f"`toymha {command}` takes no -m, --cfg or --config-dir")
    spec = COMMANDS[command].options
    known, values = keys(spec), {}
    if "run" in known:
        forgot_run(words)
    for word in words:
        name, equals, _ = word.partition("=")
        if not equals or name not in known:
            if not equals and "run" in known:
                raise UserError(f"{word}: write run={word}")
            valid = ", ".join(f"{k}=" for k in known)
            raise UserError(f"{word}: no such option of `toymha {command}`{nearest(name, known) or ';'} valid: {valid}")
        f, hint = known[name]
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
    "heads": Command("what each head of a run does, and how much it is needed", heads, HeadsOptions),
    "prune": Command("a run without the heads that it needs least, as a run of its own", prune, PruneOptions),
    "data": Command("list the data sets, or fetch one", data, DataOptions),
    "completion": Command("tab completion: shell=bash or shell=zsh", completion, CompletionOptions),
    "version": Command("print the version", version, NoOptions),
}


if __name__ == "__main__":
    sys.exit(main())
