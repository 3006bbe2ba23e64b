"""`toymha COMMAND key=value ...`: dispatch, help, completion, one-line errors.

Imports neither hydra nor torch at the top, so that help and completion answer at once.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toymha import config
from toymha.config import UserError, key, nearest

EXAMPLES = """
Examples
  toymha train model=mha n_head=8                        train one model, under three minutes on two cores
  toymha train -m n_head=1,2,4,8,16 seed=0,1,2           train fifteen, in parallel, and compare them
  tensorboard --logdir outputs                           look at the curves
"""


@dataclass(frozen=True)
class EvalOptions:
    """Options of `toymha eval`."""

    run: str = key("the run folder", text=True)
    split: str = key("which part of the text", choices=("train", "val", "test"))
    weights: str = key("of the last step or of the best evaluation", choices=("last", "best"))
    data: str | None = key("another data set, read with the run's own tokenizer; null = the run's")
    path: str | None = key("the file, for data=file", text=True)
    device: str = key("auto = cuda, else mps, else cpu")
    threads: int | None = key("CPU threads; null = all cores", low=1)


@dataclass(frozen=True)
class ReportOptions:
    """Options of `toymha report`."""

    run: str = key("a folder with runs in it, such as outputs/heads", text=True)


@dataclass(frozen=True)
class DataOptions:
    """Options of `toymha data`."""

    fetch: str | None = key("a data set to bring here ahead of time")


@dataclass(frozen=True)
class Command:
    """One word after `toymha`."""

    about: str
    run: Callable[[list[str], Flags], int | None]
    options: type
    defaults: dict[str, Any] | None = None  # None: conf/train.yaml


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
    except KeyboardInterrupt:
        print("toymha: interrupted", file=sys.stderr)
        return 130


def dispatch(words: list[str]) -> int:
    if words[:1] == ["_complete"]:
        return complete(words[1:])
    flags, rest = read_flags(words)
    name = next((w for w in rest if "=" not in w), None)
    if name is None or name == "help":
        if rest and name is None:
            raise UserError(f"{rest[0]}: a command comes first, such as `toymha train {rest[0]}`")
        print(overview())
        return 0
    if name not in COMMANDS:
        raise UserError(f"no command {name}{nearest(name, COMMANDS) or ';'} commands: {', '.join(COMMANDS)}")
    rest.remove(name)
    command = COMMANDS[name]
    if flags.help:
        print(help_of(name))
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
            value = value or (words.pop(0) if words else "")
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


GROUPS = ("model", "data", "optim", "budget", "sweep")


# Commands


def train(words: list[str], flags: Flags) -> int:
    """One point in this process, several in parallel."""
    points = compose_points(words, flags)
    if flags.cfg:
        return show_config(points)
    several = len(points) > 1 or flags.multirun or points[0].config.sweep is not None
    if several:
        from toymha.sweep import run_sweep

        return run_sweep(points)
    from toymha.console import Console
    from toymha.train import Interrupted, Stop, train_point

    with Stop() as stop:
        try:
            run = train_point(points[0], Console(), stop)
        except (Interrupted, KeyboardInterrupt) as e:
            print("toymha: interrupted; the same command goes on from here", file=sys.stderr)
            return 128 + (stop.signum or 2 if isinstance(e, Interrupted) else 2)
    return 0 if run.status == "done" else 1


def plan(words: list[str], flags: Flags) -> int:
    """Only say what `train` would do."""
    from toymha.sweep import make_plan

    print(make_plan(compose_points(words, flags)).text(), end="")
    return 0


def compose_points(words: list[str], flags: Flags) -> list[Any]:
    from toymha import compose

    return compose.points(words, flags.multirun, flags.config_dir)


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


def report(words: list[str], flags: Flags) -> int:
    from toymha.report import load_table

    print(load_table(options("report", words, flags).run).text(), end="")
    return 0


def data(words: list[str], flags: Flags) -> int:
    from toymha.data import text

    o = options("data", words, flags)
    if o.fetch:
        size = text.fetch(o.fetch)
        print(f"{o.fetch} is here: {size:,} characters")
        return 0
    rows = text.listing()
    head = ("data=", "here", "size", "needs", "licence", "origin")
    columns = [
        head,
        *((r["name"], "yes" if r["here"] else "no", r["size"], r["needs"], r["licence"], r["origin"]) for r in rows),
    ]
    widths = [max(len(str(row[i])) for row in columns) for i in range(len(head) - 1)]
    for row in columns:
        print("  ".join([*(str(cell).ljust(w) for cell, w in zip(row, widths)), str(row[-1])]))
    return 0


def version(words: list[str], flags: Flags) -> int:
    from importlib.metadata import version as of

    print(f"toymha {of('toymha')}")
    return 0


def options(command: str, words: list[str], flags: Flags) -> Any:
    """Words -> the command's options. Raises UserError."""
    from toymha.compose import read_value

    spec, values = COMMANDS[command].options, dict(COMMANDS[command].defaults or {})
    known = config.keys(spec)
    for word in words:
        name, equals, _ = word.partition("=")
        if not equals or name not in known:
            valid = ", ".join(f"{k}=" for k in known)
            raise UserError(f"{word}: no such option of `toymha {command}`{nearest(name, known) or ';'} valid: {valid}")
        values[name] = read_value(word, literal=known[name][0].metadata["text"])
    return config.build(values, spec)


# Help


def overview() -> str:
    lines = ["toymha COMMAND key=value ...   a laboratory for attention", "", "Commands"]
    lines += [f"  {name:12} {c.about}" for name, c in COMMANDS.items()]
    lines.append(EXAMPLES.rstrip("\n"))
    lines += ["", "`toymha COMMAND --help` lists its keys."]
    return "\n".join(lines)


def help_of(name: str) -> str:
    """Every key of a command with its meaning, type and default; the choices of each group."""
    command, lines = COMMANDS[name], [f"toymha {name} key=value ...   {COMMANDS[name].about}", ""]
    if command.options is not config.Config:
        defaults = command.defaults or {}
        return "\n".join(
            lines
            + [
                _key_line(k, f, hint, defaults.get(k, "required"))
                for k, (f, hint) in config.keys(command.options).items()
            ]
        )
    from toymha.compose import Composer, choices

    composed, made = Composer().composed({})
    lines += [
        "-m                 several values, such as n_head=1,2,4 or seed=range(5): one run each",
        "--cfg              print the configuration and stop",
        "--config-dir DIR   a folder of your own model/*.yaml, data/*.yaml, sweep/*.yaml ...",
        "",
        "Groups: one file of settings each",
    ]
    for group in GROUPS:
        lines.append(f"  {group + '=':10} {made.get(group, 'none'):12} of {', '.join(choices(group))}")
    lines.append(f"  {'like=':10} {'none':12} a finished run folder whose settings take the place of the defaults")
    section = None
    for k, (f, hint) in config.keys().items():
        head = k.rpartition(".")[0]
        if head == "sweep":
            continue
        if head != section:
            lines += ["", {"": "Keys", "data": "Data", "optim": "Optimizer", "budget": "Budget"}[head]]
            section = head
        value: Any = composed
        for part in k.split("."):
            value = value[part]
        lines.append(_key_line(k, f, hint, value))
    return "\n".join([*lines, EXAMPLES.rstrip()])


def _key_line(name: str, f: Any, hint: Any, default: Any) -> str:
    kind = "|".join(f.metadata["choices"]) or str(getattr(hint, "__name__", hint)).replace(" | None", "").replace(
        "builtins.", ""
    )
    shown = "null" if default is None else str(default).lower() if isinstance(default, bool) else default
    return f"  {name + '=' + str(shown):28} {kind:24} {f.metadata['help']}"


# Completion

COMPLETION = {
    "bash": r"""_toymha() {
  local IFS=$'\n'
  COMPREPLY=($(toymha _complete "${COMP_LINE:0:COMP_POINT}"))
  [[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
}
complete -o default -F _toymha toymha""",
    "zsh": r"""_toymha() {
  local -a out
  out=(${(f)"$(toymha _complete "$LBUFFER")"})
  compadd -Q -S '' -- $out || _files
}
compdef _toymha toymha""",
}


def completion(words: list[str], flags: Flags) -> int:
    shell = words[0].removeprefix("shell=") if words else ""
    if shell not in COMPLETION:
        raise UserError('toymha completion shell=bash or shell=zsh; in bash: eval "$(toymha completion shell=bash)"')
    print(COMPLETION[shell])
    return 0


def complete(words: list[str]) -> int:
    """Print what may follow the line typed so far. Reads folder names only: no hydra, no torch."""
    line = words[0] if words else ""
    typed = line.split()
    current = "" if not typed or line.endswith(" ") else typed[-1]
    done = typed[1:] if not current else typed[1:-1]
    command = next((w for w in done if w in COMMANDS), None)
    name, equals, start = current.partition("=")
    if command is None:
        out = [c for c in COMMANDS if c.startswith(current)]
    elif not equals:
        schema = COMMANDS[command].options
        names = [*(GROUPS if schema is config.Config else ()), *config.keys(schema)]
        out = [f"{n}=" for n in names if n.startswith(current)]
    else:
        # bash splits words at "=", so only what follows it is offered there
        values = value_choices(COMMANDS[command].options, name)
        out = [v for v in values if v.startswith(start)]
    print("\n".join(out))
    return 0


def value_choices(schema: type, name: str) -> list[str]:
    if schema is config.Config and name in GROUPS:
        here = Path(__file__).parent
        return sorted({p.stem for root in (here / "conf", here.parent / "conf") for p in (root / name).glob("*.yaml")})
    known = config.keys(schema)
    if name not in known:
        return []
    f, hint = known[name]
    return list(f.metadata["choices"]) or (["true", "false"] if hint is bool else [])


COMMANDS = {
    "train": Command("train one model, or many (-m, sweep=NAME)", train, config.Config),
    "plan": Command("say what `train` would do, and what is done already", plan, config.Config),
    "report": Command("the table of a folder of runs", report, ReportOptions, {}),
    "eval": Command(
        "score a trained run on a whole split",
        evaluate,
        EvalOptions,
        {"split": "val", "weights": "last", "data": None, "path": None, "device": "auto", "threads": None},
    ),
    "data": Command("list the data sets, or fetch one", data, DataOptions, {"fetch": None}),
    "completion": Command("tab completion: shell=bash or shell=zsh", completion, DataOptions, {}),
    "version": Command("print the version", version, DataOptions, {}),
}


if __name__ == "__main__":
    sys.exit(main())
