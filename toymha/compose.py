"""From the words of a command line and the files in conf/ to typed, validated points.

Hydra does what it is good at: its grammar parses values and sweeps, its defaults lists compose the groups. The values
typed on the command line are then laid on top, here, so that a sweep of 1,000 points composes its files once.
"""

from __future__ import annotations

import copy
import itertools
import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toymha import composed, config, recipe, schema
from toymha.config import GROUPS, REPLICATES, Config
from toymha.schema import UserError, nearest
from toymha.schema import word as typed
from toymha.statement import Sweep
from toymha.words import LITERAL_KEYS, Axis, parse


@dataclass(frozen=True)
class Point:
    """One run of a plan: what to train, and what it is called."""

    config: Config
    label: str  # what differs from the defaults, as a folder name
    choices: dict[str, str]  # the file chosen from each group
    swept: dict[str, Any] = field(default_factory=dict)  # axis -> this point's value
    values: dict[str, Any] = field(default_factory=dict)  # what was asked for, before defaults


@dataclass(frozen=True)
class Experiment:
    """All runs that a command line asks for; with `sweep`, those of a statement."""

    composer: Composer
    points: list[Point]

    @property
    def sweep(self) -> Sweep | None:
        return self.points[0].config.sweep

    def vary(self, point: Point, more: Mapping[str, Any]) -> Point:
        """The same point with other values for some keys. Raises UserError."""
        return self.composer.point({**point.values, **more}, list(point.swept))


def points(words: Iterable[str], multirun: bool = False, extra: Path | None = None) -> list[Point]:
    """The points of `experiment`."""
    return experiment(words, multirun, extra).points


def experiment(words: Iterable[str], multirun: bool = False, extra: Path | None = None) -> Experiment:
    """All runs that the command line asks for, each composed and validated; duplicates are dropped.

    `words`: Hydra overrides such as `model=gqa` or `n_head=1,2,4`. `extra`: a folder of the user's own configs.
    Raises UserError, in one line, for whatever is wrong with any of them.
    """
    axes = {a.key: a for a in parse(words, extra, multirun)}
    like = axes.pop("like").values[0] if "like" in axes else None
    if like == "":
        raise UserError("like= needs a run folder")
    if like and "sweep" in axes:
        raise UserError("like= and sweep= exclude each other: a statement says itself what it is tested with")
    compare = axes.pop("compare").values[0] if "compare" in axes else None
    if compare and "sweep" not in axes:
        raise UserError(f"compare={compare} is for sweep=NAME: it says what the settings of a statement have equal")
    base = Composer(like, extra, compare)
    name = axes["sweep"].values if "sweep" in axes else (None,)
    if len(name) > 1:
        raise UserError("sweep=... takes one file; run one sweep after the other, or `toymha reproduce`")
    if name[0] is not None:
        settings, swept = base.settings(name[0], axes)
    elif not multirun and (several := [a for a in axes.values() if a.swept]):
        shown = f"{several[0].key}={','.join(map(str, several[0].values))}"
        raise UserError(f"{shown} has several values: add -m to train one run for each")
    else:
        settings, swept = product(axes.values()), [a.key for a in axes.values() if a.swept]
    made = Experiment(base, distinct(base.point(values, swept) for values in settings))
    if made.sweep is not None:
        _check_settings(made.sweep, made.points)
    return made


def distinct(points: Iterable[Point]) -> list[Point]:
    """Each folder once: two points of a plan with one label and seed would be trained there at the same time."""
    return list({(p.label, p.config.seed): p for p in points}.values())


def product(axes: Iterable[Axis]) -> list[dict[str, Any]]:
    """One setting for each combination of the axes' values; the last axis turns fastest."""
    axes = list(axes)
    return [dict(zip([a.key for a in axes], values)) for values in itertools.product(*(a.values for a in axes))]


def sweep_axes(axes: Mapping[str, Any], name: str, extra: Path | None) -> list[Axis]:
    """The axes of a file in conf/sweep; a list stands for its items, text is Hydra's sweep syntax."""
    words = [f"{k}={','.join(map(typed, v)) if isinstance(v, list) else typed(v)}" for k, v in axes.items()]
    return [Axis(a.key, a.values, True) for a in parse(words, extra, True, f" (in conf/sweep/{name}.yaml)")]


class Composer:
    """Composes group choices once each, and lays values over them."""

    def __init__(self, like: str | None = None, extra: Path | None = None, compare: str | None = None) -> None:
        """`like`: a run folder whose settings take the place of the defaults; `compare`: the sweep's, if typed."""
        self.extra, self.compare = extra, compare
        self.saved = _saved_config(like) if like else None
        self.defaults = Composer(extra=extra, compare=compare) if like else self
        self.cache: dict[tuple, tuple[dict, dict[str, str]]] = {}

    def composed(self, groups: Mapping[str, str | None]) -> tuple[dict[str, Any], dict[str, str]]:
        """Group choices -> (plain values with interpolations unresolved, the choice made in every group)."""
        cached = tuple(sorted(groups.items(), key=str))
        if cached not in self.cache:
            self.cache[cached] = self._compose(groups)
        return self.cache[cached]

    def _compose(self, groups: Mapping[str, str | None]) -> tuple[dict[str, Any], dict[str, str]]:
        before, like = {}, None
        if self.saved:
            # The saved values take the place of conf/train.yaml; only the groups named now are laid over them.
            before = self.saved["choices"]
            fixed = self.defaults.composed({"model": before["model"]})[0]["fixed"] if "model" not in groups else []
            like = {"defaults": ["_self_", *({k: None} for k in groups)], "fixed": fixed, **self.saved["config"]}
        values, made = composed.composed(_words(groups), self.extra, like)
        if groups.get("recipe") and like is None:
            recipe.check(groups, values, lambda some: composed.composed(_words(some), self.extra)[0])
        if "sweep" in made:
            section = values.get("sweep")
            if not isinstance(section, dict) or not section.keys() & schema.field_types(Sweep).keys():
                file = f"conf/sweep/{made['sweep']}.yaml"
                raise UserError(f"{file} must begin with `# @package _global_` and have a section `sweep:`")
        values = schema.fill({"sweep": None, **values}, Config)
        if "sweep" in made:
            schema.build(values["sweep"], Sweep, "sweep.")  # says what is wrong with it
            if self.compare not in (None, values["sweep"]["compare"]):
                values["sweep"] |= {"compare": self.compare, "name": f"{values['sweep']['name']}_equal_{self.compare}"}
            _budget_of(values["sweep"], values["budget"], made["budget"])
        return values, before | made

    def settings(self, name: str, typed_axes: Mapping[str, Axis]) -> tuple[list[dict[str, Any]], list[str]]:
        """(the settings of a file in conf/sweep, its swept keys); what is typed takes the place of the file's values.

        Raises UserError for what is wrong with the file.
        """
        groups = {k: a.values[0] for k, a in typed_axes.items() if k in GROUPS}
        composed, made = self.composed(groups | {"sweep": name})
        sweep: Sweep = schema.build(composed["sweep"], Sweep, "sweep.")
        _check_keys(sweep)
        budgets = config.choices("budget", self.extra)
        if strange := [b for table in (sweep.seeds, sweep.steps, sweep.minutes) for b in table if b not in budgets]:
            raise UserError(f"sweep {sweep.name}: no budget {strange[0]}{nearest(str(strange[0]), budgets)}")
        if sweep.compare == "time" and "budget.minutes" not in typed_axes and composed["budget"]["minutes"] is None:
            said = f"sweep={name} compares at equal time and has no minutes for budget={made['budget']}"
            raise UserError(f"{said}; give budget.minutes=..., such as budget.minutes=0.5")
        settings, swept = [], []
        for entry in sweep.points or [{}]:
            axes = {a.key: a for a in sweep_axes({**entry, **sweep.axes}, name, self.extra)} | dict(typed_axes)
            if "seed" not in axes and not any(axes[k].swept for k in REPLICATES if k in axes):
                axes["seed"] = Axis("seed", tuple(range(sweep.seeds.get(made["budget"], 3))), True)
            settings += product(axes.values())
            swept += [a.key for a in axes.values() if a.swept and a.key not in swept]
        return settings, swept

    def point(self, values: dict[str, Any], swept: Collection[str] = ()) -> Point:
        """One value for each key and group -> the validated point. `swept`: the keys that tell it from others."""
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
        return Point(cfg, label, made, {k: made.get(k) if k in GROUPS else _get(plain, k) for k in swept}, values)


def _check_keys(sweep: Sweep) -> None:
    """Raises UserError for a check of an unknown metric or key, before anything is trained."""
    from toymha.metrics import metric

    known = [*GROUPS, *config.keys()]
    for c in sweep.parsed_checks:
        m = metric(c.metric)
        if m.share and (c.minus or c.best):
            raise UserError(f"sweep {sweep.name}: the check `{c.that}`: {c.metric} is a share, without minus or best")
        named = [*c.value, *c.against, *(c.minus or {}), *sweep.slices]
        if unknown := [k for k in named if k not in known]:
            hint = nearest(unknown[0], known)
            raise UserError(f"sweep {sweep.name}: the check `{c.that}`: unknown key {unknown[0]}{hint}")


def _check_settings(sweep: Sweep, points: list[Point]) -> None:
    """Raises UserError for a check of a setting that is not trained, before it is too late to say so."""
    from toymha.metrics import metric

    settings = [(p.choices, config.plain(p.config)) for p in points]
    for c in sweep.parsed_checks:
        needed, _, value = metric(c.metric).needs.partition("=")
        if needed and any(typed(_get(plain, needed)) != value for _, plain in settings):
            raise UserError(f"sweep={sweep.name}: the check `{c.that}` of {c.metric} needs {needed}={value}")
        for side in c.sides:
            found = [{k: made.get(k) if k in GROUPS else _get(plain, k) for k in side} for made, plain in settings]
            if side in found:
                continue
            shown = ", ".join(f"{k}={typed(v)}" for k, v in side.items())
            key = next((k for k, v in side.items() if all(f[k] != v for f in found)), next(iter(side)))
            said = f"the check `{c.that}` needs {shown}, which is none of these settings"
            raise UserError(f"sweep={sweep.name}: {said}; leave {key} to the sweep, or train other values with -m")


def _budget_of(sweep: dict[str, Any], budget: dict[str, Any], name: str) -> None:
    """A sweep's own number of steps for a budget, or, where wall time is what is equal, its minutes."""
    budget["steps"] = sweep["steps"].get(name, budget["steps"])
    if sweep["compare"] == "time":
        budget.update(steps=None, tokens=None, minutes=sweep["minutes"].get(name))


def build(composed: dict[str, Any], settings: dict[str, Any]) -> Config:
    """Composed values with settings laid over them -> the typed object."""
    tree = copy.deepcopy({k: v for k, v in composed.items() if k != "fixed"})
    literal = {k: v for k, v in settings.items() if k in LITERAL_KEYS}
    for k, v in settings.items():
        if k not in literal:
            _set(tree, k, v)
    if "${" in repr(tree):  # OmegaConf resolves n_kv_head=${n_head}; it takes its time, so only where it is asked to
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

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


def _words(groups: Mapping[str, str | None]) -> list[str]:
    """As Hydra wants them: it knows no null for a group, only silence."""
    return [f"{k}={typed(v)}" for k, v in groups.items() if v is not None]


def _get(tree: dict[str, Any], key: str) -> Any:
    for part in key.split("."):
        tree = tree[part]
    return tree


def _saved_config(run: str) -> dict[str, Any]:
    """The configuration of a run folder, as `like` wants it: what belongs to its sweep or its machine stays behind."""
    from toymha.runs import Run

    saved = Run.load(run)
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
    on the command line, groups that are swept.
    """
    groups = [g for g in GROUPS if g in made and g != "sweep"]
    parts = [f"{g}={made[g]}" for g in groups if g in named or made[g] != default.get(g)]
    for name, value in config.identity_values(cfg).items():
        if name != "seed" and (name in named or value != _get(chosen, name)):
            short = {"data.path": "path", "data.tokenizer": "tokenizer", "data.split": "split"}.get(name, name)
            parts.append(f"{short}={_shown(value)}")
    path = cfg.data.path or ""
    return folder_name(",".join(parts) or "default", path if Path(path).name != path else "")


def folder_name(text: str, more: str = "") -> str:
    """`text` as the name of a folder: at most 120 bytes of letters, digits and `._=,+-`. Where that loses something,
    and where there is `more` that it does not tell, a hash at the end tells names apart."""
    safe = re.sub(r"[^\w.=,+-]", "-", text)
    if safe == text and len(safe.encode()) <= 120 and not more:
        return safe
    return safe.encode()[:110].decode(errors="ignore") + f"-{zlib.crc32(f'{text},{more}'.encode()):08x}"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, list):
        return "-".join(_shown(v) for v in value)
    return Path(value).name if isinstance(value, str) else typed(value)
