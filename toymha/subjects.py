"""What `cost` and `bench` share: the models that they are asked about, and how large numbers are written. No torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from toymha import config
from toymha.compose import Experiment, experiment
from toymha.config import GROUPS
from toymha.schema import UserError

DESCRIBING = {"model", "data", "recipe", "like", "sweep", "compare"}  # words that describe models beside their keys

PREFIXES = {
    1000: ("", "k", "M", "G", "T", "P", "E", "Z"),
    1024: ("", "Ki", "Mi", "Gi", "Ti", "Pi"),
}


def check_words(words: Sequence[str], known: Collection[str], what: str, hints: Mapping[str, str]) -> None:
    """Raises UserError for a key of `train` that changes nothing here; what is no key of it is left to others.

    `known`: the keys that do change something, beside DESCRIBING. `what`: whose part they would be, such as `of what
    is timed`. `hints`: key or group -> what to write in its place.
    """
    for word in words:
        name = word.partition("=")[0]
        group = name.partition(".")[0]
        if {name, group} & {*known, *DESCRIBING} or not (name in config.keys() or name in GROUPS):  # noqa: SIM118
            continue
        hint = hints.get(name, hints.get(group, "leave it out"))
        raise UserError(f"{word}: {name} changes nothing {what}; {hint}")


def check_elsewhere(words: Sequence[str], elsewhere: Mapping[str, str], command: str) -> None:
    """Raises UserError for an option of another command. `elsewhere`: option -> what to write in its place here."""
    for word in words:
        name = word.partition("=")[0]
        if name in elsewhere:
            raise UserError(f"{word}: {name} belongs to `toymha {command}`; here {elsewhere[name]}")


def described(words: Sequence[str], extra: Path | None) -> Experiment:
    """The experiment that the words describe, each of its settings once: seeds make no other model.

    The settings of a statement are made equal as it wants them compared. Raises UserError.
    """
    asked = experiment(words, True, extra)
    if asked.sweep is not None:
        from toymha.fair import equalise  # here: it brings in what reads texts, which most models do without

        asked = equalise(asked)
    return dataclasses.replace(asked, points=list({p.label: p for p in asked.points}.values()))


def amount(value: float, unit: str = "B", step: int = 1000, prefixes: Sequence[str] | None = None) -> str:
    """12.3 MB, 1.2 GFLOP, or with step=1024 3.1 MiB. `prefixes`: of the powers of `step`, in the place of these."""
    prefixes = PREFIXES[step] if prefixes is None else prefixes
    power = next((i for i in range(len(prefixes) - 1) if value < step ** (i + 1)), len(prefixes) - 1)
    return f"{number(value / step**power)} {prefixes[power]}{unit}"


def number(value: float) -> str:
    """Three digits, and all before the point."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"
