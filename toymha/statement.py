"""A statement and its experiment, as a file in conf/sweep says it."""

from __future__ import annotations

from dataclasses import dataclass

from toymha.schema import UserError, build, key


@dataclass(frozen=True)
class Check:
    """One comparison: the metric at `value` minus the metric at `against`, paired by seed, lies within low and high.

    `value` without `against`: the metric itself, in the mean over seeds, lies within low and high; `{}` is all runs.
    `minus`: compare two effects: that of `value` with these keys laid over both sides is subtracted.
    `best: inside`: instead, some value of the one key in `value` (a list) beats both the first and the last.
    """

    that: str = key("what is claimed, in words")
    value: dict = key("the setting: swept key -> value", default={})
    against: dict = key("what it is compared with; none: the claim is about the number itself", default={})
    minus: dict | None = key("keys laid over both sides for the effect that is subtracted", default=None)
    best: str | None = key("inside: some value in between beats both ends", choices=("inside",), default=None)
    metric: str = key("what is measured", default="test_loss")
    low: float | None = key("the statement claims a difference, or a number, of at least this", default=None)
    high: float | None = key("the statement claims a difference, or a number, of at most this", default=None)

    @property
    def absolute(self) -> bool:
        """Whether it is about a number itself, not about a difference."""
        return not self.against and not self.best

    @property
    def sides(self) -> list[dict]:
        """The settings that are compared; the one setting, where nothing is."""
        if self.best:
            ((key_, values),) = self.value.items()
            return [{key_: v} for v in values]
        if self.absolute:
            return [self.value]
        sides = [self.value, self.against]
        return sides + [side | self.minus for side in sides] if self.minus else sides


@dataclass(frozen=True)
class Sweep:
    """A statement and the experiment that tests it: one file in conf/sweep."""

    name: str = key("the sweep (set by the group `sweep`); names the folder of its runs", text=True)
    question: str = key("what it asks")
    statement: str | None = key("what people say", default=None)
    source: str | None = key("who says it, and where", default=None)
    place: int = key("where it stands on the page of `toymha reproduce`", default=99)
    axes: dict = key(
        "swept keys, each with its values in Hydra's sweep syntax ('1,2,4', 'range(3)') or as a list", default={}
    )
    points: list[dict] | None = key(
        "settings, each a table of keys; a list in one stands for each of its values", default=None
    )
    seeds: dict = key("budget -> number of seeds, where the command line gives none", default={})
    steps: dict = key("budget -> steps, where they differ from the budget's own", default={})
    compare: str = key(
        "what is equal: steps, parameters (d_ff is solved for), flops (steps are) or time (minutes)",
        choices=("steps", "parameters", "flops", "time"),
        default="steps",
    )
    reference: dict | None = key("the setting whose parameters or FLOPs the others get; null: the first", default=None)
    minutes: dict = key("budget -> minutes of training, for compare=time", default={})
    tune: dict | None = key("keys tuned for each setting on validation text, with seeds of their own", default=None)
    slices: list[str] = key("swept keys within each of whose values the checks are made", default=[])
    checks: list[dict] = key("the comparisons; the statement is supported when all of them are", default=[])
    equal: bool = key(
        "settings may be equal to the bit; otherwise an axis that changes nothing is reported", default=False
    )

    def __post_init__(self) -> None:
        where = f"sweep {self.name}"
        if not self.name or not all(part not in ("", ".", "..") for part in self.name.split("/")):
            raise UserError(f"{where}: the name must be a folder below output_dir")
        if both := [k for entry in self.points or [] for k in entry if k in self.axes]:
            raise UserError(f"{where}: {both[0]} is in points and in axes; keep one of the two")
        for name in ("seeds", "steps", "minutes"):
            for budget, n in getattr(self, name).items():
                number = isinstance(n, (int, float) if name == "minutes" else int) and not isinstance(n, bool)
                if not number or n <= 0:
                    raise UserError(f"{where}: {name} for budget={budget} must be a number above 0, not {n}")
        for said, c in zip(self.checks, self.parsed_checks):
            self._check(f"{where}: the check `{c.that}`", c, said)

    @staticmethod
    def _check(where: str, c: Check, said: dict) -> None:
        """Raises UserError for a check that cannot be made; `said`: its keys as the file has them."""
        if c.best:
            values = list(c.value.values())
            if len(values) != 1 or not isinstance(values[0], list) or len(values[0]) < 3:
                raise UserError(
                    f"{where} needs one key with three values or more, such as value: {{n_head: [1, 2, 4]}}"
                )
            if c.against or c.minus or c.high is not None:
                raise UserError(f"{where} has best: inside, which takes no against, minus or high")
        elif c.low is None and c.high is None:
            raise UserError(f"{where} needs low, high or both")
        elif "value" not in said or ("against" in said and not (c.value and c.against)):
            example = "value: {n_head: 4} and against: {n_head: 1}"
            raise UserError(
                f"{where} needs value and against, such as {example}, or value alone ({{}}: all runs) "
                "for a claim about the number itself"
            )
        elif c.minus and c.absolute:
            raise UserError(f"{where} has minus, which subtracts a difference, and no against to make one")
        if c.low is not None and c.high is not None and c.low > c.high:
            raise UserError(f"{where} has low={c.low} above high={c.high}")

    @property
    def parsed_checks(self) -> list[Check]:
        """The checks, typed. Raises UserError."""
        return [build(c, Check, f"sweep {self.name}: checks.") for c in self.checks]
