"""The words of a command line, `key=value`, as axes: known keys, each with its values. Hydra's grammar reads them.

Numbers and plain words are read here in the same way, since importing Hydra takes longer than all the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

from toymha import config
from toymha.config import GROUPS, SPECIAL, choices
from toymha.schema import UserError, nearest
from toymha.schema import word as typed

LITERAL_KEYS = {name for name, (f, _) in config.keys().items() if f.metadata.get("text")} | set(SPECIAL)


@dataclass(frozen=True)
class Axis:
    """One key or group with the values it takes: one value when it is not swept."""

    key: str
    values: tuple[Any, ...]
    swept: bool


def parse(words: Iterable[str], extra: Path | None = None, multirun: bool = False, where: str = "") -> list[Axis]:
    """Overrides -> axes, each key once and known. Raises UserError."""
    out: dict[str, Axis] = {}
    for word in words:
        axis = parse_word(word, extra, multirun)
        if axis.swept and axis.key not in GROUPS and not config.keys()[axis.key][0].metadata["identity"]:
            raise UserError(f"{word}: {axis.key} makes no run of its own, so it takes one value")
        if axis.key in out:
            raise UserError(f"{axis.key} is given twice{where}; keep one of the two")
        out[axis.key] = axis
    return list(out.values())


def parse_word(word: str, extra: Path | None, multirun: bool) -> Axis:
    """One override, such as `n_head=1,2,4`, -> its axis. Paths with commas are several in a multirun, if they exist."""
    name, equals, _text = word.partition("=")
    if name.startswith("hydra"):
        raise UserError(
            f"{word}: toymha runs sweeps itself; folders are set by output_dir= and name=, parallel runs by workers="
        )
    if name.startswith(("+", "~")):
        bare = name.lstrip("+~")
        raise UserError(f"{word}: keys cannot be added or removed; {_known(bare, extra) or f'write {bare}=...'}")
    if not equals or not name:
        close = nearest(word, [*GROUPS, *config.settable()]).replace("?", "=...?")
        raise UserError(f"{word}: an option is written key=value{close}")
    if problem := _known(name, extra):
        raise UserError(problem)
    if name in LITERAL_KEYS:
        value = read_value(word, literal=True)
        paths = value.split(",") if multirun and name == "data.path" and value and not Path(value).exists() else []
        if len(paths) > 1 and all(Path(p).is_file() for p in paths):
            return Axis(name, tuple(paths), True)
        return Axis(name, (value,), False)
    values, swept = _values(word)
    if name in GROUPS:
        for value in values:
            check_choice(name, value, extra)
    return Axis(name, values, swept)


def read_value(word: str, literal: bool = False, several: bool = False) -> Any:
    """The value of `key=value`; a literal one is taken as it stands, but for quotes around it and null.

    `several`: the key holds a list, which may be written without its brackets. Raises UserError.
    """
    name, _, text = word.partition("=")
    if literal:
        return None if text == "null" else _unquote(text)
    values, swept = _values(word)
    if several and values[0] is not None and not isinstance(values[0], list):
        return list(values)
    if swept:
        raise UserError(f"{word}: {name} takes one value")
    return values[0]


NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
CONSTANTS = {"true": True, "false": False, "null": None}


def is_plain(text: str) -> bool:
    """Whether these are numbers, constants and names, with commas between them."""
    return all((NUMBER.fullmatch(p) or NAME.fullmatch(p)) and p.lower() not in ("nan", "inf") for p in text.split(","))


def _values(word: str) -> tuple[tuple[Any, ...], bool]:
    """The values of `key=value`, and whether it is a sweep. Raises UserError."""
    text = word.partition("=")[2]
    if is_plain(text):
        return tuple(map(_simple, text.split(","))), "," in text
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ValueType

    override = _override(word)
    if not override.is_sweep_override():
        return (_plain(override.value()),), False
    if not override.is_discrete_sweep() or override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        raise UserError(f"{word}: a sweep is a list (1,2,4), range(...) or choice(...)")
    parser = OverridesParser.create()
    items = [parser.parse_override(f"{override.key_or_group}={item}") for item in override.sweep_string_iterator()]
    return tuple(_plain(item.value()) for item in items), True


def _simple(text: str) -> Any:
    """A number, a constant or a plain word."""
    if found := NUMBER.fullmatch(text):
        return float(text) if found[2] or found[3] else int(text)
    return CONSTANTS.get(text.lower(), text)


def _override(word: str) -> Override:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        name = word.partition("=")[0]
        raise UserError(
            f"{word}: the value cannot be read; put text with special characters in quotes: {name}='\"...\"'"
        ) from None


def _plain(value: Any) -> Any:
    """Hydra's parsed value as plain Python; its quoted strings as text."""
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return value if value is None or isinstance(value, (bool, int, float)) else getattr(value, "text", str(value))


def _unquote(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text


# What peers call it: nanoGPT, Hugging Face, textbooks.
ELSEWHERE = {
    "max_iters": "budget.steps",
    "max_steps": "budget.steps",
    "block_size": "seq_len",
    "n_positions": "seq_len",
    "context": "seq_len",
    "n_embd": "dim",
    "d_model": "dim",
    "hidden_size": "dim",
    "learning_rate": "optim.lr",
    "warmup_iters": "optim.warmup",
    "eval_interval": "budget.eval_every",
    "gradient_accumulation_steps": "grad_accum",
    "dtype": "precision",
    "dataset": "data",
}


def _known(name: str, extra: Path | None) -> str | None:
    """Why this key is unknown, with the nearest valid one, or None when it is known."""
    known = config.settable()
    if name in known or name in GROUPS or name in SPECIAL:
        return None
    if name in config.keys():  # noqa: SIM118
        # data.name, optim.name, sweep.axes
        return f"{name} is set by the file chosen with {name.partition('.')[0]}=..."
    if name in ELSEWHERE:
        return f"unknown key {name}; did you mean {ELSEWHERE[name]}?"
    tail = name.rpartition(".")[2]
    for k in known:  # `lr` for optim.lr, `model.n_head` for n_head
        if k.rpartition(".")[2] == tail:
            return f"unknown key {name}; did you mean {k}?"
    inside = [k for k in known if tail in k] if len(tail) > 3 else []
    hint = f"; did you mean {' or '.join(inside[:2])}?" if inside else nearest(name, [*GROUPS, *known])
    return f"unknown key {name}{hint or '; `toymha train --help` lists all keys'}"


def check_choice(group: str, value: Any, extra: Path | None, typed_as: str | None = None) -> None:
    """Raises UserError for a value that is no file of the group. `typed_as`: the word that it was given by, if another
    than the group's name."""
    valid = choices(group, extra)
    if group == "data" and isinstance(value, str) and value not in valid and (Path(value).suffix or "/" in value):
        kind = "pairs" if Path(value).suffix == ".tsv" else "file"
        raise UserError(f"data={value}: a file of your own is data={kind} data.path={value}")
    if value not in valid and not (group in ("recipe", "sweep") and value is None):
        close = nearest(str(value), valid) or ";"
        raise UserError(f"{typed_as or group}={typed(value)}: no such {group}{close} valid: {', '.join(valid)}")
