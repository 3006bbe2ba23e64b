"""`toymha heads run=FOLDER` of many runs: which kinds of heads each setting has over seeds, how stable that is, and
what is lost as heads go, where the runs keep it (`budget.heads`) or it is asked for (`parts=pruning`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toymha import runs
from toymha.analysis import over_seeds
from toymha.analysis.census import Counts, census, census_counts
from toymha.analysis.probe_page import Cells, Part, write_parts
from toymha.analysis.probe_plots import Axis, Line, lines, model_styles
from toymha.analysis.probing import Logged, probe
from toymha.analysis.results import Census
from toymha.analysis.study import numbers as numbers_of
from toymha.analysis.study import study, subject
from toymha.console import quote
from toymha.metrics import Result
from toymha.opened import open_run
from toymha.pictures import Picture
from toymha.report import Report, columns
from toymha.schema import UserError
from toymha.table import Row

QUESTION = "Which kinds of heads are there, and do they come back with another seed?"
TOLD = (
    "Each head of each run is labelled by what it looks at (the page of one run has the rules). Counts "
    "are means over seeds, with the least and the most in brackets. Stability is how much the mixtures of two seeds "
    "overlap, in the mean over all pairs of seeds: 1 for the same counts, 0 for no kind in common."
)


@dataclass(frozen=True)
class Setting:
    """A row of the folder's report with the censuses of its runs."""

    row: Row
    censuses: Sequence[Census]
    numbers: Sequence[over_seeds.Numbers | None]

    @property
    def pruned(self) -> list[over_seeds.Numbers]:
        """Of the runs whose heads were removed one by one."""
        return [n for n in self.numbers if n and over_seeds.has_curves(n)]

    @property
    def counts(self) -> Counts:
        return census_counts(self.row.name, self.censuses)


def folder_of_runs(o: Any) -> int:
    """`o`: options.HeadsOptions. Prints the table, and writes heads.html and heads.json beside the runs.

    Raises UserError where no run is finished.
    """
    report = Report.load(o.run)
    done = [(row, [r for r in row.results if r.done and not r.value("n_encoder_layer")]) for row in report.table.rows]
    done = [(row, results) for row, results in done if results]
    if across := sum(bool(r.value("n_encoder_layer")) for row in report.table.rows for r in row.results):
        print(f"toymha: note: {across} runs with an encoder are left out; look at each by itself", file=sys.stderr)
    if not done:
        raise UserError(f"run={o.run}: none of its runs without an encoder is finished")
    if o.probe:
        first = open_run(
            str(done[0][1][0].path), weights=o.weights, device=o.device, precision="fp32", threads=o.threads
        )
        logged: Logged = {row.name: results[0].rows() for row, results in done}
        return probe(o, first, Path(o.run), logged)
    found = [Setting(row, *zip(*(_looked_at(o, r) for r in results))) for row, results in done]
    cells = cells_of([s.counts for s in found])
    print("\n".join(columns(cells, 1)))
    print("kinds of heads: mean over seeds (least-most); stability: overlap of two seeds' counts, 1 the same, 0 none")
    sections, pruned = _parts(found, cells), {s.row.name: s.pruned for s in found if s.pruned}
    if pruned:
        sections += over_seeds.parts(pruned)
        print("\n" + "\n".join(columns(over_seeds.removable_cells(pruned), 1)))
        print("share of the heads that can go at less than 1 % perplexity: mean over seeds (least-most)")
        print("\n" + "\n".join(columns(over_seeds.correlation_cells(pruned), 1)))
        print("rank correlations of the measures of importance: mean over seeds, 95 % interval")
    where = report.folder
    write_parts(where / "heads.html", report.folder.name, "kinds of heads", QUESTION, [TOLD], sections)
    runs.write_json(where / "heads.json", [_json(s) for s in found])
    print(f"page    {quote(where / 'heads.html')}")
    return 0


def _looked_at(o: Any, result: Result) -> tuple[Census, over_seeds.Numbers | None]:
    """The census of a run, and its numbers of importance and pruning: those that it keeps, or measured if asked for."""
    print(f"{result.path} ...", file=sys.stderr, flush=True)
    opened = open_run(str(result.path), weights=o.weights, device=o.device, precision="fp32", threads=o.threads)
    found = census(opened.gpt, opened.config, opened.corpus, seed=o.seed)
    numbers = result.summary.get("heads") if o.weights == "last" else None
    if "pruning" in (o.parts or ()):
        numbers = numbers_of(study(subject(opened, o), "", ("pruning",), lambda _: None))
    return found, numbers


def cells_of(found: Sequence[Counts]) -> list[list[str]]:
    """The table, its head first; kinds that no setting has are left out."""
    names = list(dict.fromkeys(kind for counts in found for kind in counts.kinds))
    out = [["", "seeds", *names, "stability"]]
    for counts in found:
        line = [counts.label, str(counts.seeds)]
        for name in names:
            n = counts.kinds.get(name)
            line.append(f"{n.mean:.1f} ({n.least}-{n.most})" if n else "0")
        out.append([*line, "-" if counts.stability is None else f"{counts.stability:.2f}"])
    return out


def _parts(found: Sequence[Setting], cells: list[list[str]]) -> list[Part]:
    table = Cells("Kinds of heads by setting", cells, 1)
    axis = _axis(found)
    if axis is None:
        return [Part("Counts", [], tables=[table])]
    key, x = axis
    names = list(dict.fromkeys(kind for s in found for kind in s.counts.kinds))
    style = model_styles(names)
    drawn = []
    for name in names:
        shares = [_share(s, name) for s in found]
        drawn.append(Line(x, shares, style[name], mark="o"))
    svg = lines(drawn, Axis(key, log=min(x) > 0, at=x), Axis("share of the heads", limits=(-0.03, 1.03)), "kinds")
    caption = "Share of all heads of a model that are of this kind, in the mean over seeds."
    return [Part("Counts", [], list(style.items()), [Picture(f"Kinds against {key}", svg, caption)], [table])]


def _share(s: Setting, kind: str) -> float:
    total = sum(len(c.heads) for c in s.censuses)
    return sum(c.counts().get(kind, 0) for c in s.censuses) / total if total else 0.0


def _axis(found: Sequence[Setting]) -> tuple[str, list[float]] | None:
    """The one swept key, where its values are numbers and there are several."""
    keys = {k for s in found for k in s.row.setting}
    values = [next(iter(s.row.setting.values()), None) for s in found]
    numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
    if len(keys) != 1 or len(numbers) < 2 or len(numbers) < len(found):
        return None
    return next(iter(keys)), [float(v) for v in numbers]


def _json(s: Setting) -> dict[str, Any]:
    counts = s.counts
    return {
        "setting": s.row.setting,
        "seeds": counts.seeds,
        "stability": counts.stability,
        "kinds": {
            k: {"mean": n.mean, "least": n.least, "most": n.most, "share": n.share} for k, n in counts.kinds.items()
        },
    }
