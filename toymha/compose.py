"""From the words of a command line and the files in conf/ to typed, validated points.

Hydra does what it is good at: its grammar parses values and sweeps, its defaults lists compose the groups. The values
typed on the command line are then laid on top, here, so that a sweep of 1,000 points composes its files once.
"""

from __future__ import annotations

import copy
import itertools
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from toymha import config, runs
from toymha.config import GROUPS, Config, choices, conf_dir
from toymha.schema import UserError, nearest
from toymha.schema import word as typed

LITERAL_KEYS = {name for name, (f, _) in config.keys().items() if f.metadata.get("text")} | {"like"}


@dataclass(frozen=True)
class Point:
    """One run of a plan: what to train, and what it is called."""

    config: Config
    label: str  # what differs from the defaults, as a folder name
    choices: dict[str, str]  # the file chosen from each group
    swept: dict[str, Any] = field(default_factory=dict)  # axis -> this point's value


@dataclass(frozen=True)
class Axis:
    """One key or group with the values it takes: one value when it is not swept."""

    key: str
    values: tuple[Any, ...]
    swept: bool


def points(words: Iterable[str], multirun: bool = False, extra: Path | None = None) -> list[Point]:
    """All runs that the command line asks for, each composed and validated; duplicates are dropped.

    `words`: Hydra overrides such as `model=gqa` or `n_head=1,2,4`. `extra`: a folder of the user's own configs.
    Raises UserError, in one line, for whatever is wrong with any of them.
    """
    axes = {a.key: a for a in parse(words, extra, multirun)}
    like = axes.pop("like").values[0] if "like" in axes else None
    if like == "":
        raise UserError("like= needs a run folder")
    base = Composer(like, extra)
    sweep = axes["sweep"].values if "sweep" in axes else (None,)
    if len(sweep) > 1:
        raise UserError("sweep=... takes one file; run one sweep after the other")
    if sweep[0] is not None:
        canned = base.composed({"sweep": sweep[0]})[0]["sweep"]["axes"]
        axes = {a.key: a for a in sweep_axes(canned, sweep[0], extra)} | axes
    elif not multirun and (several := [a for a in axes.values() if a.swept]):
        shown = f"{several[0].key}={','.join(map(str, several[0].values))}"
        raise UserError(f"{shown} has several values: add -m to train one run for each")
    out: dict[tuple, Point] = {}
    for values in itertools.product(*(a.values for a in axes.values())):
        point = base.point(dict(zip(axes, values)), {a.key for a in axes.values() if a.swept})
        out.setdefault((point.label, point.config.seed), point)
    return list(out.values())


def sweep_axes(axes: dict[str, Any], name: str, extra: Path | None) -> list[Axis]:
    """The axes of a file in conf/sweep; a list stands for its items, text is Hydra's sweep syntax."""
    words = [f"{k}={','.join(map(typed, v)) if isinstance(v, list) else typed(v)}" for k, v in axes.items()]
    return [Axis(a.key, a.values, True) for a in parse(words, extra, True, f" (in conf/sweep/{name}.yaml)")]


# Words


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
    values, swept = _values(_override(word), word)
    if name in GROUPS:
        for value in values:
            _check_choice(name, value, extra)
    return Axis(name, values, swept)


def read_value(word: str, literal: bool = False) -> Any:
    """The single value of `key=value`; a literal one is taken as it stands, but for quotes around it and null."""
    name, _, text = word.partition("=")
    if literal:
        return None if text == "null" else _unquote(text)
    values, swept = _values(_override(word), word)
    if swept:
        raise UserError(f"{word}: {name} takes one value")
    return values[0]


def _override(word: str) -> Override:
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        name = word.partition("=")[0]
        raise UserError(
            f"{word}: the value cannot be read; put text with special characters in quotes: {name}='\"...\"'"
        ) from None


def _values(override: Override, word: str) -> tuple[tuple[Any, ...], bool]:
    if not override.is_sweep_override():
        return (_plain(override.value()),), False
    if not override.is_discrete_sweep() or override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        raise UserError(f"{word}: a sweep is a list (1,2,4), range(...) or choice(...)")
    parser = OverridesParser.create()
    items = [parser.parse_override(f"{override.key_or_group}={item}") for item in override.sweep_string_iterator()]
    return tuple(_plain(item.value()) for item in items), True


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
    if name in known or name in GROUPS or name == "like":
        return None
    if name in config.keys():  # noqa: SIM118
        # data.name, optim.name, sweep.axes
        return f"{name} is set by the file chosen with {name.partition('.')[0]}=..."
    if name in ("data_seed", "init_seed"):
        return f"unknown key {name}; seed sets both the data order and the initial weights"
    if name in ELSEWHERE:
        return f"unknown key {name}; did you mean {ELSEWHERE[name]}?"
    tail = name.rpartition(".")[2]
    for k in known:  # `lr` for optim.lr, `model.n_head` for n_head
        if k.rpartition(".")[2] == tail:
            return f"unknown key {name}; did you mean {k}?"
    inside = [k for k in known if tail in k] if len(tail) > 3 else []
    hint = f"; did you mean {' or '.join(inside[:2])}?" if inside else nearest(name, [*GROUPS, *known])
    return f"unknown key {name}{hint or '; `toymha train --help` lists all keys'}"


def _check_choice(group: str, value: Any, extra: Path | None) -> None:
    valid = choices(group, extra)
    if group == "data" and isinstance(value, str) and value not in valid and (Path(value).suffix or "/" in value):
        raise UserError(f"data={value}: a file of your own is data=file data.path={value}")
    if value not in valid and not (group == "sweep" and value is None):
        raise UserError(
            f"{group}={typed(value)}: no such {group}{nearest(str(value), valid) or ';'} valid: {', '.join(valid)}"
        )


# Composition


class Composer:
    """Composes group choices once each, and lays values over them."""

    def __init__(self, like: str | None = None, extra: Path | None = None) -> None:
        """`like`: a run folder whose configuration takes the place of the defaults."""
        self.extra = extra
        self.saved = _saved_config(like) if like else None
        self.defaults = Composer(extra=extra) if like else self
        self.cache: dict[tuple, tuple[dict, dict[str, str]]] = {}

    def composed(self, groups: Mapping[str, str | None]) -> tuple[dict[str, Any], dict[str, str]]:
        """Group choices -> (plain values with interpolations unresolved, the choice made in every group)."""
        cached = tuple(sorted(groups.items(), key=str))
        if cached not in self.cache:
            self.cache[cached] = self._compose(groups)
        return self.cache[cached]

    def _compose(self, groups: Mapping[str, str | None]) -> tuple[dict[str, Any], dict[str, str]]:
        words = [f"{k}={typed(v)}" for k, v in groups.items()]
        if self.extra:
            quoted = str(self.extra).replace("'", r"\'")
            words.append(f"hydra.searchpath=['file://{quoted}']")
        primary, before = "train", {}
        fixed: list[str] = []
        if self.saved:
            # The saved values take the place of conf/train.yaml; only the groups named now are laid over them.
            before, primary = self.saved["choices"], "like"
            fixed = self.defaults.composed({"model": before["model"]})[0]["fixed"] if "model" not in groups else []
            defaults = ["_self_", *({k: None} for k in groups)]
            ConfigStore.instance().store("like", {"defaults": defaults, "fixed": fixed, **self.saved["config"]})
        try:
            with initialize_config_dir(str(conf_dir()), version_base="1.3"):
                composed = compose(primary, words, return_hydra_config=True)
        except (HydraException, OmegaConfBaseException, yaml.YAMLError) as e:
            raise UserError(f"the configuration cannot be composed: {' '.join(str(e).split())[:200]}") from None
        made: dict[str, str] = {k: v for k in GROUPS if (v := composed.hydra.runtime.choices.get(k))}
        values: Any = OmegaConf.to_container(
            OmegaConf.masked_copy(composed, [str(k) for k in composed if k != "hydra"])
        )
        return {"sweep": None, **values}, before | made

    def point(self, values: dict[str, Any], swept: set[str]) -> Point:
        """One value for each key and group -> the validated point."""
        groups = {k: v for k, v in values.items() if k in GROUPS}
        composed, made = self.composed(groups)
        settings = {k: v for k, v in values.items() if k not in GROUPS}
        if strange := sorted(composed.keys() - config.field_names() - {"fixed"}):
            files = ", ".join(f"{g}/{v}.yaml" for g, v in made.items())
            hint = (
                "begin a model's file with `# @package _global_`" if "model" in strange else f"one of {files} sets it"
            )
            raise UserError(f"unknown key {strange[0]}{nearest(strange[0], config.keys())}; {hint}")
        cfg = build(composed, settings)
        for k in composed["fixed"]:
            stands_for, asked = (typed(_get(tree, k)) for tree in (composed, config.plain(cfg)))
            if asked != stands_for:
                said = f"model={made['model']} stands for {k}={stands_for}, so {k}={asked} contradicts it"
                raise UserError(f"{said}; choose another model")
        canned = {"sweep": made["sweep"]} if "sweep" in made else {}
        _, default_made = self.defaults.composed(canned)
        chosen, _ = self.defaults.composed(canned | {g: made[g] for g in GROUPS if made.get(g) != default_made.get(g)})
        named = set(settings) | {g for g in groups if g in swept}
        label = label_of(cfg, chosen, made, default_made, named)
        plain = config.plain(cfg)
        return Point(cfg, label, made, {k: made[k] if k in GROUPS else _get(plain, k) for k in values if k in swept})


def build(composed: dict[str, Any], settings: dict[str, Any]) -> Config:
    """Composed values with settings laid over them -> the typed object."""
    tree = copy.deepcopy({k: v for k, v in composed.items() if k != "fixed"})
    literal = {k: v for k, v in settings.items() if k in LITERAL_KEYS}
    for k, v in settings.items():
        if k not in literal:
            _set(tree, k, v)
    if "${" in repr(tree):  # OmegaConf resolves n_kv_head=${n_head}; it takes its time, so only where it is asked to
        try:
            tree = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)  # type: ignore[assignment]
        except OmegaConfBaseException as e:
            asked = ", ".join(f"{k}={v}" for k, v in settings.items() if "${" in str(v))
            raise UserError(f"{asked}: refers to what is not there, or to itself ({str(e).splitlines()[0]})") from None
    for k, v in literal.items():
        _set(tree, k, v)
    return config.build(tree)


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        tree = tree[section]
    tree[name] = value


def _get(tree: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def _saved_config(run: str) -> dict[str, Any]:
    """The configuration of a run folder, as `like` wants it: what belongs to its sweep or its machine stays behind."""
    saved = runs.Run.load(run)
    with_defaults = Composer().composed({})[0]
    values = config.plain(saved.config)
    for k, (f, _) in config.keys().items():
        if not f.metadata["identity"] and "." not in k:
            values[k] = with_defaults[k]
    if saved.config.data.path:
        values["data"]["path"] = str(saved.data_path)
    return {
        "config": values | {"sweep": None},
        "choices": {k: v for k, v in saved.info["choices"].items() if k != "sweep"},
    }


# Names


def label_of(
    cfg: Config, chosen: dict[str, Any], made: dict[str, str], default: dict[str, str], named: set[str]
) -> str:
    """What was named or differs from the defaults, as one folder name: groups first, then keys; `default` for neither.

    `chosen`: the values of the groups that were `made` (chosen), `default`: the default choices; `named`: keys given
    on the command line, groups that are swept. At most 120 bytes of letters, digits and `._=,+-`; a hash at the end
    tells apart what is lost by that.
    """
    groups = [g for g in GROUPS if g in made and g != "sweep"]
    parts = [f"{g}={made[g]}" for g in groups if g in named or made[g] != default.get(g)]
    for name, value in config.identity_values(cfg).items():
        if name != "seed" and (name in named or value != _get(chosen, name)):
            short = {"data.path": "path", "data.tokenizer": "tokenizer", "data.split": "split"}.get(name, name)
            parts.append(f"{short}={_shown(value)}")
    full = ",".join(parts) or "default"
    safe = re.sub(r"[^\w.=,+-]", "-", full)
    path = cfg.data.path or ""
    if safe == full and len(safe.encode()) <= 120 and Path(path).name == path:
        return safe
    return safe.encode()[:110].decode(errors="ignore") + f"-{zlib.crc32(f'{full},{path}'.encode()):08x}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list):
        return "-".join(_shown(v) for v in value)
    return Path(value).name if isinstance(value, str) else typed(value)
