"""From the runs of a statement to its verdict: every check measured, judged, and told. No torch.

A check claims that a difference lies in a region (`low` to `high`). Its 95 % interval over paired seeds inside the
region supports the claim, outside it refutes it, across a bound leaves it undecided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toymha import stats
from toymha.metrics import Metric, Result, metric
from toymha.schema import word
from toymha.statement import Check, Sweep

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Finding:
    """One check in one slice, measured. Numbers are on the metric's scale (`Metric.told` turns them into words)."""

    that: str
    where: dict[str, Any]  # the slice: key -> value
    metric: Metric
    claim_low: float  # the region in which the statement claims the difference to be
    claim_high: float
    n: int = 0  # pairs
    difference: float = math.nan  # their mean
    low: float = math.nan  # its 95 % interval
    high: float = math.nan
    bootstrap: tuple[float, float] | None = None
    p: float = math.nan
    p_holm: float = math.nan
    noise: float = math.nan  # the difference in units of the baseline's standard deviation over seeds
    verdict: str = "undecided"
    seeds_needed: int | None = None  # where it is undecided: how many seeds would decide a difference of this size
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """The measured difference with its interval, such as `+0.1500 [+0.1400, +0.1600] nats`."""
        m = self.metric
        if not self.n:
            return "no finished pairs"
        shown, low, high = (m.signed(m.told(x)) for x in (self.difference, self.low, self.high))
        if m.exact:
            return f"{shown} {m.unit_of_difference} (counted)"
        interval = "(one seed: no interval)" if math.isnan(self.low) else f"[{low}, {high}]"
        return f"{shown} {interval} {m.unit_of_difference}".rstrip()

    @property
    def place(self) -> str:
        """The slice in words."""
        return name_of(self.where)

    def claim(self) -> str:
        """What is claimed of the difference, such as `+0.2000 to +0.5000 nats`."""
        m, bounds = self.metric, (self.claim_low, self.claim_high)
        low, high = (m.signed(m.told(x)) if math.isfinite(x) else "" for x in bounds)
        words = f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}"
        return f"{words} {m.unit_of_difference}".rstrip()

    def perplexity(self) -> float | None:
        """The difference of a loss in percent of perplexity."""
        return 100 * math.expm1(self.difference) if self.metric.unit == "nats" and self.n else None


@dataclass(frozen=True)
class Verdict:
    """All checks of a statement; `word` is supported, refuted or undecided."""

    sweep: Sweep
    findings: list[Finding]
    warnings: list[str]

    @property
    def word(self) -> str:
        return stats.combine([f.verdict for f in self.findings])

    @property
    def turns_on(self) -> str | None:
        """Where the outcome differs between the slices: which of them supports the statement, and which does not."""
        by_slice: dict[str, list[str]] = {}
        for f in self.findings:
            by_slice.setdefault(name_of(f.where), []).append(f.verdict)
        words = {where: stats.combine(v) for where, v in by_slice.items()}
        if len(set(words.values())) < 2:
            return None
        return "; ".join(f"{verdict} with {where}" for where, verdict in words.items())

    @property
    def seeds_needed(self) -> int | None:
        """How many seeds would decide the checks that are undecided; None when none would, or nothing is open."""
        needed = [f.seeds_needed for f in self.findings if f.verdict == "undecided"]
        return None if None in needed or not needed else max(n for n in needed if n is not None)

    def text(self) -> str:
        """For a terminal."""
        s = self.sweep
        lines = [f"statement  {s.statement}"] if s.statement else []
        if s.source:
            lines.append(f"source     {s.source}")
        for f in self.findings:
            where = f" ({f.place})" if f.where else ""
            lines.append(f"check      {f.that}{where}: {f.text()}; claimed {f.claim()}: {f.verdict}")
            lines += [f"           {note}" for note in f.notes]
        lines.append(f"verdict    {self.word}{f' ({self.turns_on})' if self.turns_on else ''}")
        if self.word == "undecided" and self.findings:
            n = self.seeds_needed
            lines.append(f"           {n} seeds would decide it, if the difference stays" if n else "")
        lines += [f"warning    {w}" for w in self.warnings]
        return "\n".join(filter(None, lines)) + "\n"


def judge(sweep: Sweep, results: Sequence[Result], warnings: Iterable[str] = ()) -> Verdict:
    """The verdict on a statement from the runs that are there. Raises UserError for a metric that does not exist."""
    findings = [
        measure(check, where, [r for r in results if matches(r, where)])
        for check in sweep.parsed_checks
        for where in slices_of(sweep, results)
    ]
    adjusted = stats.holm([f.p for f in findings])
    return Verdict(sweep, [replace(f, p_holm=p) for f, p in zip(findings, adjusted)], list(warnings))


def slices_of(sweep: Sweep, results: Iterable[Result]) -> list[dict[str, Any]]:
    """The combinations of the sliced keys' values, in order of appearance; one empty slice where there are no keys."""
    found = [{k: r.value(k) for k in sweep.slices} for r in results]
    return [w for i, w in enumerate(found) if w not in found[:i]] or [{}]


def matches(result: Result, setting: dict[str, Any]) -> bool:
    return all(result.value(k) == v for k, v in setting.items())


def name_of(setting: dict[str, Any]) -> str:
    return ", ".join(f"{k}={word(v)}" for k, v in setting.items())


def measure(check: Check, where: dict[str, Any], results: list[Result]) -> Finding:
    """One check on the runs of one slice."""
    m = metric(check.metric)
    low, high = (m.scaled(b) if b is not None else s * math.inf for b, s in ((check.low, -1), (check.high, 1)))
    found = Finding(check.that, where, m, claim_low=low, claim_high=high)
    if check.best == "inside":
        return _inside(found, check, results)
    value, against = values_at(m, results, check.value), values_at(m, results, check.against)
    differences = {k: value[k] - against[k] for k in sorted(value.keys() & against.keys())}
    sides = [check.value, check.against]
    if check.minus is not None:
        sides += [check.value | check.minus, check.against | check.minus]
        other_value, other_against = (values_at(m, results, s) for s in sides[2:])
        common = differences.keys() & other_value.keys() & other_against.keys()
        differences = {k: differences[k] - (other_value[k] - other_against[k]) for k in sorted(common)}
    notes = unfinished(results, sides, counted=("done", "diverged") if m.share else ("done",))
    if m.share:
        return _shares(replace(found, notes=notes), list(value.values()), list(against.values()))
    return _judged(replace(found, notes=notes), list(differences.values()), list(against.values()))


def values_at(m: Metric, results: list[Result], setting: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Replicate -> the metric, of the finished runs with that setting."""
    found = {r.replicate: m.of(r) for r in results if matches(r, setting)}
    return {k: v for k, v in found.items() if v is not None}


def unfinished(
    results: list[Result], sides: Iterable[dict[str, Any]], counted: tuple[str, ...] = ("done",)
) -> tuple[str, ...]:
    """Runs of a comparison that are not in it, by setting and status: never dropped in silence."""
    out = []
    for setting in sides:
        there = [r for r in results if matches(r, setting)]
        if not there:
            out.append(f"{name_of(setting)}: no runs yet")
        bad = [r.status for r in there if r.status not in counted]
        for status in sorted(set(bad)):
            out.append(f"{name_of(setting)}: {bad.count(status)}/{len(there)} {status}, not in the mean")
    return tuple(out)


def _judged(found: Finding, differences: list[float], against: list[float]) -> Finding:
    """Interval and verdict of paired differences."""
    e, exact = stats.estimate(differences, CONFIDENCE), found.metric.exact
    low, high = (e.mean, e.mean) if exact else (e.low, e.high)
    verdict = stats.judge(low, high, found.claim_low, found.claim_high)
    distance = min(abs(e.mean - bound) for bound in (found.claim_low, found.claim_high))
    spread = stats.estimate(against).std
    return replace(
        found,
        n=e.n,
        difference=e.mean,
        low=low,
        high=high,
        bootstrap=None if exact else stats.bootstrap(differences, CONFIDENCE),
        p=math.nan if exact else stats.p_value(differences),
        noise=e.mean / spread if spread else math.nan,
        verdict=verdict,
        seeds_needed=stats.seeds_needed(e.std, distance) if verdict == "undecided" else None,
    )


def _shares(found: Finding, value: list[float], against: list[float]) -> Finding:
    """Two shares of runs: the difference with its interval, and Fisher's exact test."""
    k1, n1, k2, n2 = int(sum(value)), len(value), int(sum(against)), len(against)
    if not n1 or not n2:
        return found
    low, high = stats.share_difference(k1, n1, k2, n2, CONFIDENCE)
    p = stats.fisher(k1, n1, k2, n2)
    return replace(
        found,
        n=min(n1, n2),
        difference=k1 / n1 - k2 / n2,
        low=low,
        high=high,
        p=p,
        verdict=stats.judge(low, high, found.claim_low, found.claim_high),
        notes=(f"{k1}/{n1} against {k2}/{n2} runs, Fisher's exact p = {p:.3g}", *found.notes),
    )


def _inside(found: Finding, check: Check, results: list[Result]) -> Finding:
    """Whether some value between the ends of a list beats both ends, with intervals that hold for all of them at once.

    Bonferroni: with k values in between there are 2 k comparisons, each at confidence 1 - 0.05 / 2k.
    """
    m, ((key, values),) = found.metric, check.value.items()
    margin = max(0.0, found.claim_low)  # of the worse of its two advantages
    found = replace(found, claim_low=margin)
    sign = -1 if m.higher_is_better else 1
    at = {v: {k: sign * x for k, x in values_at(m, results, {key: v}).items()} for v in values}
    first, last, between = values[0], values[-1], values[1:-1]
    confidence = 1 - (1 - CONFIDENCE) / (2 * len(between))
    gain = {v: [stats.paired(at[end], at[v], confidence) for end in (first, last)] for v in between}
    notes = unfinished(results, [{key: v} for v in values])
    known = [v for v in between if all(e.n for e in gain[v])]
    if not known:
        return replace(found, notes=notes)
    best = max(known, key=lambda v: min(e.mean for e in gain[v]))
    nearer = min(gain[best], key=lambda e: e.mean)
    if any(all(e.low >= margin for e in gain[v]) for v in between):
        verdict = "supported"
    elif any(all(gain[v][end].high < margin for v in between) for end in (0, 1)):
        verdict = "refuted"
    else:
        verdict = "undecided"
    needed = stats.seeds_needed(nearer.std, abs(nearer.mean - margin), confidence)
    said = [f"{key}={word(end)} {m.signed(m.told(e.mean))}" for end, e in zip((first, last), gain[best])]
    return replace(
        found,
        n=nearer.n,
        difference=nearer.mean,
        low=nearer.low,
        high=nearer.high,
        verdict=verdict,
        seeds_needed=needed if verdict == "undecided" else None,
        notes=(f"the best in between is {key}={word(best)}; against it {', '.join(said)}", *notes),
    )
