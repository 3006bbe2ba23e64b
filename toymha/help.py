"""What `toymha --help`, `toymha COMMAND --help` and the Tab key answer. No torch; hydra for the defaults alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toymha import config
from toymha.config import GROUPS, SPECIAL, choices
from toymha.schema import fill, keys, word

EXAMPLES = """
Examples
  toymha train model=mha n_head=8                        train one model, about three minutes on two cores
  toymha train -m n_head=1,2,4,8,16 seed=0,1,2           train fifteen, in parallel, and compare them
  toymha train sweep=w_o                                 test a statement, with a verdict
  toymha reproduce                                       test them all, in an hour on two cores
  toymha heads run=outputs/train/n_head=8/seed=0         see what each head does
  tensorboard --logdir outputs                           look at the curves
"""


@dataclass(frozen=True)
class Command:
    """One word after `toymha`: what it does, and what it takes; a run's defaults are those of conf/train.yaml."""

    about: str
    run: Callable[..., int | None]
    options: type
    models: bool = False  # it takes the keys of `train` too, which describe a model


def overview(commands: dict[str, Command]) -> str:
    lines = ["toymha COMMAND key=value ...   a laboratory for attention", "", "Commands"]
    lines += [f"  {name:12} {c.about}" for name, c in commands.items()]
    lines.append(EXAMPLES.rstrip("\n"))
    lines += ["", "`toymha COMMAND --help` lists its keys."]
    return "\n".join(lines)


def help_of(name: str, command: Command, extra: Path | None = None) -> str:
    """Every key of a command with its meaning, type and default; the choices of each group."""
    lines = [f"toymha {name} key=value ...   {command.about}", ""]
    if command.options is not config.Config:
        known, defaults = keys(command.options).items(), fill({}, command.options)
        lines += [_key_line(k, f, hint, defaults.get(k, "required")) for k, (f, hint) in known]
        more = ["", "and the keys of a model and its data, which `toymha train --help` lists"] if command.models else []
        return "\n".join(lines + more)
    from toymha.compose import Composer

    composed, made = Composer(extra=extra).composed({})
    lines += [
        "-m                 several values, such as n_head=1,2,4 or seed=range(5): one run each",
        "--cfg              print the configuration and stop",
        "--config-dir DIR   a folder of your own model/*.yaml, data/*.yaml, sweep/*.yaml ...",
        "",
        "Groups: one file of settings each",
    ]
    lines += [
        f"  {group + '=':10} {made.get(group, 'null'):12} of {', '.join(choices(group, extra))}" for group in GROUPS
    ]
    lines.append(f"  {'like=':10} {'null':12} a finished run folder whose settings take the place of the defaults")
    lines.append(f"  {'compare=':10} {'null':12} of steps, parameters, flops, time: what a sweep=NAME makes equal")
    if name == "plan":
        lines.append(
            f"  {'time=':10} {'false':12} true: try a few steps of each kind of run, and say how long all take"
        )
    section = None
    for k, (f, hint) in config.settable().items():
        head = k.rpartition(".")[0]
        if head != section:
            titles = {"": "Keys" if section is None else "Output and machine", "data": "Data", "optim": "Optimizer"}
            lines += ["", (titles | {"budget": "Budget"})[head]]
            section = head
        value: Any = composed
        for part in k.split("."):
            value = value[part]
        lines.append(_key_line(k, f, hint, value))
    return "\n".join([*lines, EXAMPLES.rstrip()])


def _key_line(name: str, f: Any, hint: Any, default: Any) -> str:
    kind = "|".join(f.metadata["choices"]) or str(getattr(hint, "__name__", hint)).replace(" | None", "")
    plain = isinstance(default, list) and not any(isinstance(v, (list, float)) for v in default)
    shown = ",".join(map(word, default)) if plain else word(default)
    return f"  {name + '=' + shown:28} {kind:24} {f.metadata['help']}"


COMPLETION = {
    "bash": r"""_toymha() {
  local IFS=$'\n'
  COMPREPLY=($(toymha _complete bash "${COMP_LINE:0:COMP_POINT}"))
  [[ "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
}
complete -o default -F _toymha toymha""",
    "zsh": r"""_toymha() {
  local -a out
  out=(${(f)"$(toymha _complete zsh "$LBUFFER")"})
  compadd -Q -S '' -- $out || _files
}
compdef _toymha toymha""",
}


def complete(shell: str, line: str, commands: dict[str, Command]) -> list[str]:
    """What may follow the line typed so far. Reads folder names only: no hydra, no torch."""
    typed = line.split()
    current = "" if line.endswith(" ") or not typed else typed.pop()
    command = next((w for w in typed[1:] if w in commands), None)
    if command and (pair := next((f"{command} {w}" for w in typed[2:] if f"{command} {w}" in commands), None)):
        command = pair
    name, equals, start = current.partition("=")
    if command is None:
        return [c for c in commands if c.startswith(current) and " " not in c]
    options, models = commands[command].options, commands[command].models
    if not equals:
        names = [] if options is config.Config else list(keys(options))
        if options is config.Config or models:
            names += [*GROUPS, *SPECIAL, *(k for k in config.settable() if k not in names)]
        return [f"{n}=" for n in names if n.startswith(current)]
    # bash takes the part behind "=" for a word of its own, zsh does not
    before = f"{name}=" if shell == "zsh" else ""
    return [
        before + v
        for v in value_choices(options if name in keys(options) or not models else config.Config, name)
        if v.startswith(start)
    ]


def value_choices(schema: type, name: str) -> list[str]:
    if schema is config.Config and name in GROUPS:
        return choices(name)
    known = keys(schema)
    if name not in known:
        return []
    f, hint = known[name]
    return list(f.metadata["choices"]) or (["true", "false"] if hint is bool else [])
