"""Typed sections of settings: what a field may hold, and plain values checked against it with one-line errors.

It imports neither torch nor hydra, so that `report`, `plan` and tab completion stay fast.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import math
import operator
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any


class UserError(Exception):
    """A mistake of the user's, told in one line; the command line prints it and exits with 2."""


def key(
    help: str,
    *,
    choices: Iterable[str] = (),
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    below: float | None = None,
    text: bool = False,
    identity: bool = True,
    default: Any = dataclasses.MISSING,
) -> Any:
    """A schema field: `low <= value <= high`, `above < value < below`.

    `text`: taken literally from the command line, never parsed as Hydra's grammar.
    `identity`: part of what makes two runs the same run; False for output, logging and machine keys.
    `default`: what `fill` puts where a file leaves the key out.
    """
    return field(
        default_factory=dataclasses.MISSING if default is dataclasses.MISSING else lambda: copy.copy(default),
        metadata={
            "help": help,
            "choices": tuple(choices),
            "low": low,
            "above": above,
            "high": high,
            "below": below,
            "text": text,
            "identity": identity,
        },
    )


def fill(values: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """Values with the defaults of the fields that have one; all others come from conf/."""
    out = {}
    for name, (f, hint) in field_types(cls).items():
        section = section_of(hint)
        if name not in values and f.default_factory is not dataclasses.MISSING:
            out[name] = f.default_factory()
        elif section and isinstance(values.get(name), Mapping):
            out[name] = fill(values[name], section)
    return {**values, **out}


@functools.cache
def field_types(cls: type) -> dict[str, tuple[dataclasses.Field, Any]]:
    """name -> (field, type) of a schema dataclass."""
    hints = typing.get_type_hints(cls)
    return {f.name: (f, hints[f.name]) for f in dataclasses.fields(cls)}


def section_of(hint: Any) -> type | None:
    """The dataclass that a field holds (also when it may be null), else None."""
    return next((t for t in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(t)), None)  # type: ignore[return-value]


def is_list(hint: Any) -> bool:
    """Whether a field holds a list (also when it may be null)."""
    return any(typing.get_origin(t) is list for t in (hint, *typing.get_args(hint)))


@functools.cache
def keys(cls: type, prefix: str = "") -> dict[str, tuple[dataclasses.Field, Any]]:
    """Every key as typed on the command line (`n_head`, `optim.lr`) -> (field, type)."""
    out = {}
    for name, (f, hint) in field_types(cls).items():
        section = section_of(hint)
        out.update(keys(section, f"{prefix}{name}.") if section else {prefix + name: (f, hint)})
    return out


def nearest(word: str, valid: Iterable[str]) -> str:
    """`; did you mean X?` for the closest valid word, or nothing."""
    close = difflib.get_close_matches(word, list(valid), n=3, cutoff=0.5)
    close.sort(key=lambda w: sorted(w) != sorted(word))  # mah is mha with two letters swapped, before it is mqa
    return f"; did you mean {close[0]}?" if close else ""


def build(values: Mapping[str, Any], cls: type, prefix: str = "") -> Any:
    """Plain values (from YAML and the command line) -> the typed object.

    Raises UserError for an unknown or missing key, a wrong type, a value out of range, an impossible combination.
    """
    spec, values = field_types(cls), fill(dict(values), cls)
    for name in values:
        if name not in spec:
            raise UserError(f"unknown key {prefix}{name}{nearest(str(name), spec)}")
    if missing := [prefix + name for name in spec if name not in values or values[name] == "???"]:
        raise UserError(
            f"{missing[0]} has no value; {spec[missing[0].removeprefix(prefix)][0].metadata.get('help', '')}"
        )
    out = {}
    for name, (f, hint) in spec.items():
        section, value = section_of(hint), values[name]
        if section and isinstance(value, Mapping):
            out[name] = build(value, section, f"{prefix}{name}.")
        else:
            out[name] = check_value(prefix + name, value, f, hint)
    return cls(**out)


BOUNDS = (
    ("low", ">=", operator.ge),
    ("above", ">", operator.gt),
    ("high", "<=", operator.le),
    ("below", "<", operator.lt),
)


def check_value(name: str, value: Any, f: dataclasses.Field, hint: Any) -> Any:
    """`value` if it has the key's type and range (an int becomes a float where one is due). Raises UserError."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    nullable, kind = type(None) in options, next(o for o in options if o is not type(None))
    if value is None and nullable:
        return None
    m = f.metadata
    shown = f"{name}={word(value)}"
    if m["choices"] and value not in m["choices"]:
        raise UserError(f"{shown}: must be one of {', '.join(m['choices'])}{nearest(str(value), m['choices'])}")
    value = _convert(shown, name, value, kind, nullable)
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        bounds = [(sign, m[b], test) for b, sign, test in BOUNDS if m[b] is not None]
        if not math.isfinite(value) or not all(test(value, limit) for _, limit, test in bounds):
            wanted = " and ".join(f"{sign} {limit}" for sign, limit, _ in bounds)
            if m["low"] is not None and m["low"] == m["high"]:
                wanted = f"{m['low']}{' or null' if nullable else ''}"
            raise UserError(f"{shown}: must be {wanted or 'finite'}")
    return value


def _convert(shown: str, name: str, value: Any, kind: Any, nullable: bool) -> Any:
    origin = typing.get_origin(kind) or kind
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if origin is float and number:
        return float(value)
    if origin is list and isinstance(value, (list, tuple)):
        (item,) = typing.get_args(kind)
        return [_convert(f"{name}={word(v)}", name, v, item, False) for v in value]
    if origin is str and number:  # a file named 1984, a name like 7
        return str(value)
    if isinstance(value, origin) and not (origin is int and isinstance(value, bool)):
        return value
    what = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        str: "a word",
        list: "a list, such as [0.9,0.1]",
        dict: "a table, such as {quick: 3}",
    }
    hint = ""
    if origin is bool:
        yes, no = ("on", "yes", "y", "1"), ("off", "no", "n", "0")
        hint = (
            f"; did you mean {name}={'true' if str(value).lower() in yes else 'false'}?"
            if str(value).lower() in yes + no
            else ""
        )
    elif origin is int and isinstance(value, float) and value.is_integer():
        hint = f"; did you mean {name}={int(value)}?"
    raise UserError(f"{shown}: must be {what.get(origin, origin.__name__)}{' or null' if nullable else ''}{hint}")


def word(value: Any) -> str:
    """A value as one types it: true, false, null, [abc]."""
    if isinstance(value, list) and any(isinstance(v, str) for v in value):
        return f"[{','.join(map(word, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
