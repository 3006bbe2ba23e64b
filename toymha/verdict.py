"""From the runs of a statement to its verdict: every check measured, judged, and told. No torch.

A check claims that a difference, or a number itself, lies in a region (`low` to `high`). Its 95 % interval over seeds
(paired, for a difference) inside the region supports the claim, outside it refutes it, across a bound leaves it
undecided.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from toymha import stats
from toymha.finding import Finding
from toymha.metrics import Metric, Result, metric, setting_name
from toymha.schema import word
from toymha.statement import Check, Sweep

CONFIDENCE = 0.95


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
            by_slice.setdefault(setting_name(f.where), []).append(f.verdict)
        words = {where: stats.combine(v) for where, v in by_slice.items()}
        if len(set(words.values())) < 2:
            return None
        return "; ".join(f"{verdict} with {where}" for where, verdict in words.items())

    @property
    def seeds_needed(self) -> int | None:
        """How many seeds would decide the checks that are undecided; None when none would, or nothing is open."""
        needed = [f.seeds_needed for f in self.findings if f.verdict == "undecided"]
        return None if None in needed or not needed else max(n for n in needed if n is not None)

    def open_text(self) -> str:
        """What would decide an undecided statement, or nothing."""
        if self.word != "undecided":
            return ""
        n = self.seeds_needed
        return f"{n} seeds would decide it, if the numbers stay as they are" if n else ""

    def text(self) -> str:
        """For a terminal."""
        s = self.sweep
        lines = [f"statement  {s.statement}"] if s.statement else []
        if s.source:
            lines.append(f"source     {s.source}")
        for f in self.findings:
            lines.append(f"check      {f.title}: {f.text()}; claimed {f.claim()}: {f.verdict}")
            lines += [f"           {note}" for note in f.notes]
        lines.append(f"verdict    {self.word}{f' ({self.turns_on})' if self.turns_on else ''}")
        lines.append(f"           {self.open_text()}" if self.open_text() else "")
        lines += [f"warning    {w}" for w in self.warnings]
        return "\n".join(filter(None, lines)) + "\n"


def judge(
    sweep: Sweep,
    results: Sequence[Result],
    warnings: Iterable[str] = (),
    axes: Sequence[str] = (),
    asked: Sequence[dict[str, Any]] = (),
) -> Verdict:
    """The verdict on a statement from the runs that are there. Raises UserError for a metric that does not exist.

    `axes`: the swept keys; one that a check leaves open makes slices, as `sweep.slices` does. `asked`: the settings of
    all runs that were asked for, with their seeds, to tell how many are missing.
    """
    findings = [
        measure(check, where, [r for r in results if matches(r, where)], asked)
        for check in sweep.parsed_checks
        for where in slices_of([*sweep.slices, *open_keys(check, sweep, results, axes)], results)
    ]
    adjusted = stats.holm([f.p for f in findings])
    return Verdict(sweep, [replace(f, p_holm=p) for f, p in zip(findings, adjusted)], list(warnings))


def slices_of(keys: Sequence[str], results: Iterable[Result]) -> list[dict[str, Any]]:
    """The combinations of the keys' values, in order of appearance; one empty slice where there are no keys."""
    found = [{k: r.value(k) for k in keys} for r in results]
    return [w for i, w in enumerate(found) if w not in found[:i]] or [{}]


def open_keys(check: Check, sweep: Sweep, results: Sequence[Result], axes: Sequence[str]) -> list[str]:
    """Swept keys that neither the check nor the slices fix, so that several runs of one seed would stand for one side.

    A key that follows from those that are fixed, such as a batch_size that goes with seq_len, is none of them.
    """
    out: list[str] = []
    for key in (k for k in axes if k not in (*check.value, *check.against, *sweep.slices)):
        fixed = [*sweep.slices, *out]
        for side in check.sides:
            there = [r for r in results if matches(r, side)]
            runs = {repr((r.replicate, [r.value(k) for k in fixed])): r.value(key) for r in there}
            if any(runs[repr((r.replicate, [r.value(k) for k in fixed]))] != r.value(key) for r in there):
                out.append(key)
                break
    return out


def matches(result: Result, setting: dict[str, Any]) -> bool:
    return all(result.value(k) == v for k, v in setting.items())


def measure(
    check: Check, where: dict[str, Any], results: list[Result], asked: Sequence[dict[str, Any]] = ()
) -> Finding:
    """One check on the runs of one slice."""
    m, sides = metric(check.metric), check.sides
    if check.absolute:
        m = m.absolute
    by_text = not check.absolute and len({r.text for r in results if any(matches(r, side) for side in sides)}) > 1
    if by_text and m.unit == "nats":
        m = metric("bits_per_char")
    low, high = (m.scaled(b) if b is not None else s * math.inf for b, s in ((check.low, -1), (check.high, 1)))
    notes = missing(m, results, sides, [a for a in asked if fits(a, where)])
    if by_text:
        notes = ("the texts or their tokens differ: compared in bits a character", *notes)
    found = Finding(check.that, where, m, claim_low=low, claim_high=high, absolute=check.absolute, notes=notes)
    if check.best == "inside":
        return _inside(found, check, results)
    by_side = [values_at(m, results, side) for side in sides]
    if m.share:
        return (_share if check.absolute else _shares)(found, *(list(side.values()) for side in by_side))
    if check.absolute:
        there = [r for r in results if m.step and matches(r, sides[0]) and r.done]
        step = max((m.step(r) for r in there if m.step), default=0.0)
        return _with_diverged(_judged(found, list(by_side[0].values()), [], step), results, sides)
    common = sorted(set.intersection(*map(set, by_side)))
    differences = [by_side[0][k] - by_side[1][k] for k in common]
    if check.minus:
        differences = [d - (by_side[2][k] - by_side[3][k]) for d, k in zip(differences, common)]
    return _with_diverged(_judged(found, differences, list(by_side[1].values())), results, sides)


def values_at(m: Metric, results: list[Result], setting: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Replicate -> the metric, of the finished runs with that setting."""
    found = {r.replicate: m.of(r) for r in results if matches(r, setting)}
    return {k: v for k, v in found.items() if v is not None}


def fits(asked: dict[str, Any], setting: dict[str, Any]) -> bool:
    """Whether a setting that was asked for belongs to a side or a slice; keys that are not swept do not tell."""
    return all(asked[k] == v for k, v in setting.items() if k in asked)


def missing(
    m: Metric, results: list[Result], sides: Iterable[dict[str, Any]], asked: Sequence[dict[str, Any]]
) -> tuple[str, ...]:
    """Runs of a check that are not in it, by setting and reason: none is dropped in silence."""
    out = []
    for setting in sides:
        name = setting_name(setting) or "all runs"
        there = [r for r in results if matches(r, setting)]
        total = max(len(there), sum(fits(a, setting) for a in asked))
        reasons = [r.status if not r.done else m.lacking(r) for r in there if m.of(r) is None]
        reasons += ["not begun"] * (total - len(there))
        if not total:
            out.append(f"{name}: no such runs in this sweep")
        out += [f"{name}: {reasons.count(r)}/{total} {r}, not in the mean" for r in sorted(set(reasons))]
    return tuple(out)


def _judged(found: Finding, values: list[float], against: list[float], step: float = 0.0) -> Finding:
    """Interval and verdict of paired differences, or of numbers themselves: either way, of the mean of `values`, which
    may be counted in steps."""
    e, exact = stats.estimate(values, CONFIDENCE, step), found.metric.exact
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
        bootstrap=None if exact else stats.bootstrap(values, CONFIDENCE),
        p=math.nan if exact or found.absolute else stats.p_value(values),
        noise=e.mean / spread if spread else math.nan,
        verdict=verdict,
        seeds_needed=stats.seeds_needed(e.std, distance) if verdict == "undecided" else None,
    )


def _with_diverged(found: Finding, results: list[Result], sides: list[dict[str, Any]]) -> Finding:
    """The verdict when runs have diverged: each is worse than any number, so the pairs that are left do not decide.

    A setting that diverges more often (Fisher's exact test) confirms the claim that it is worse and refutes any other;
    short of that nothing is decided. Speed is not what diverging is about. Of a number itself nothing is decided as
    soon as one run diverged: it has no such number, and the seeds that are left are not a sample of all.
    """
    there = [[r for r in results if matches(r, side) and (r.done or r.status == "diverged")] for side in sides]
    diverged = [sum(not r.done for r in side) for side in there]
    if not any(diverged) or found.metric.name.endswith("tokens_per_s") or found.metric.exact:
        return found
    if found.absolute:
        said = f"diverged: {diverged[0]}/{len(there[0])}, which have no such number, so that the others decide nothing"
        return replace(found, verdict="undecided", seeds_needed=None, notes=(*found.notes, said))
    (k1, k2), (n1, n2) = diverged[:2], map(len, there[:2])
    p = stats.fisher(k1, n1, k2, n2)
    notes = (*found.notes, f"diverged: {k1}/{n1} against {k2}/{n2} (Fisher's exact p = {p:.3g})")
    worse = 0 if not n1 or not n2 else (k1 * n2 > k2 * n1) - (k1 * n2 < k2 * n1)  # +1: the value's side
    # Only a claim without an end on that side is met by what is worse than any number: "0.2 to 0.5 higher" is not.
    claims_more = found.claim_low > 0 and found.claim_high == math.inf
    claims_less = found.claim_high < 0 and found.claim_low == -math.inf
    claimed = (claims_more - claims_less) * (-1 if found.metric.higher_is_better else 1)
    if len(sides) > 2 or not worse or p >= 1 - CONFIDENCE or not found.metric.quality:
        verdict = "undecided"
    elif worse == claimed:
        verdict = "supported" if found.verdict == "supported" or not found.n else "undecided"
    else:
        verdict = "refuted"
    return replace(found, verdict=verdict, seeds_needed=None, notes=notes)


def _share(found: Finding, value: list[float]) -> Finding:
    """A share of runs itself, with Wilson's interval; diverged runs are among them."""
    k, n = int(sum(value)), len(value)
    if not n:
        return found
    low, high = stats.share(k, n, CONFIDENCE)
    verdict = stats.judge(low, high, found.claim_low, found.claim_high)
    notes = (f"{k}/{n} runs", *found.notes)
    return replace(found, n=n, difference=k / n, low=low, high=high, verdict=verdict, notes=notes)


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
    known = [v for v in between if all(e.n for e in gain[v])]
    if not known:
        return found
    proven = [v for v in known if all(e.low >= margin for e in gain[v])]
    best = max(proven or known, key=lambda v: min(e.mean for e in gain[v]))
    nearer = min(gain[best], key=lambda e: e.low if proven else e.mean)
    trouble = any(r.status == "diverged" for r in results if r.value(key) in values)
    if trouble:
        verdict = "undecided"  # pairs are missing, and not by chance
    elif proven:
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
        seeds_needed=None if verdict != "undecided" or trouble else needed,
        notes=(f"the best in between is {key}={word(best)}; against it {', '.join(said)}", *found.notes),
        simultaneous=True,
    )
