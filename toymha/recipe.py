"""`recipe=`: sizes, optimizer and steps that belong together. No other group that is typed may set the same keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from toymha.schema import UserError

Choices = Mapping[str, str | None]  # group -> file
Tree = Mapping[str, Any]


def check(groups: Choices, composed: Tree, compose: Callable[[Choices], Tree]) -> None:
    """Raises UserError where a recipe sets what another typed group sets too: one would be read and ignored.

    `composed`: what `groups` come to, the recipe among them; `compose`: what other choices come to.
    """
    others = {group: file for group, file in groups.items() if group != "recipe" and file is not None}
    if not others:
        return
    found, wanted, default = flat(composed), flat(compose(others)), flat(compose({}))
    for key, value in wanted.items():
        own = key.partition(".")[0]  # budget=full says budget.steps, although that is the default
        if found.get(key) != value and (own in others or value != default.get(key)):
            alone = {own} & others.keys() or {g for g, f in others.items() if flat(compose({g: f}))[key] == value}
            group = min(alone or others)
            said = f"recipe={groups['recipe']} sets {key}, and so does {group}={others[group]}"
            raise UserError(f"{said}; leave one of them out (a single key may be changed: {key}=...)")


def flat(tree: Tree, prefix: str = "") -> dict[str, Any]:
    """{"optim": {"lr": 1}} -> {"optim.lr": 1}."""
    out: dict[str, Any] = {}
    for k, v in tree.items():
        out |= flat(v, f"{prefix}{k}.") if isinstance(v, Mapping) else {prefix + k: v}
    return out
