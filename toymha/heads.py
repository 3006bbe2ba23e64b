"""`toymha heads`: what each head of a model does, how much the model needs it, and how many it can do without."""

from __future__ import annotations

import dataclasses
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from toymha import runs
from toymha.analysis import probing
from toymha.analysis.cross import CrossStudy, cross_study
from toymha.analysis.cross import as_json as cross_json
from toymha.analysis.cross_page import cells, rows_told, statement, write_cross
from toymha.analysis.page import write_study
from toymha.analysis.results import Study
from toymha.analysis.study import PARTS, by_head, numbers, plain, study, subject
from toymha.compose import experiment
from toymha.console import quote
from toymha.device import set_up
from toymha.model.seq2seq import make_model
from toymha.opened import Opened, open_run
from toymha.report import columns
from toymha.runs import Run
from toymha.schema import UserError, nearest
from toymha.start import first_weights
from toymha.train import check_data

SCORES = ("previous", "begin", "entropy", "duplicate", "induction")  # of each head, in the terminal
SIZES = {"tokens", "gate_steps", "rounds", "random_orders", "seed"}  # options that change what is measured
OF_PROBES = {"run", "probe", "seed", "device", "threads", "weights", "steps"}  # those that mean something to each
OF_PAIRS = {"run", "text", "weights", "steps", "device", "threads"}
OF_FOLDERS = {"run", "probe", "parts", "device", "threads", "weights"} | SIZES


def heads(o: Any, typed: Collection[str], words: Sequence[str]) -> int:
    """`o`: options.HeadsOptions, of which `typed` were given; `words`: of a model to be made, where no run is given.

    Raises UserError.
    """
    for part in o.parts or ():
        if part not in PARTS:
            raise UserError(f"parts={part}: must be one of {', '.join(PARTS)}{nearest(part, PARTS)}")
    if o.run is not None and words:
        raise UserError(f"{words[0]}: run= has a model already; leave one of the two out")
    if o.probe:
        refuse(set(typed) - OF_PROBES, f"probe={o.probe}")
    if o.run is not None and not (Path(o.run).expanduser() / "run.json").is_file() and list(runs.find(o.run)):
        refuse(set(typed) - OF_FOLDERS, "a folder of runs")
        if set(o.parts or ()) - {"census", "pruning"}:
            raise UserError(f"parts={','.join(o.parts)}: of a folder of runs there are census and pruning")
        from toymha.analysis.folder import folder_of_runs

        return folder_of_runs(o)
    if o.run is None and "weights" in typed:
        refuse({"weights"}, "a model that was never trained")
    opened, where = open_model(o, words)
    if opened.config.n_encoder_layer is not None:
        refuse(set(typed) - OF_PAIRS - ({"seed"} if words else set()), "a model with an encoder")
        return look_across(o, opened, where)
    if o.text is not None and not len(opened.corpus.tokenizer.encode(o.text)):
        raise UserError("text= is empty: nothing to draw")
    where.mkdir(parents=True, exist_ok=True)  # before minutes of work
    if o.probe:
        return probing.probe(o, opened, where)
    return look(o, opened, where, keep=not set(typed) & SIZES and o.weights == "last")


def refuse(extra: Collection[str], what: str) -> None:
    if extra:
        raise UserError(f"{sorted(extra)[0]}= says nothing about {what}; leave it out")


def look(o: Any, opened: Opened, where: Path, keep: bool) -> int:
    """Study one model and write what was found; `keep`: in the run's summary too, as `budget.heads` does, where reports
    and statements look for it: only what was measured as they expect it."""
    whole = o.parts is None
    found = study(
        subject(opened, o),
        name_of(where),
        o.parts or tuple(PARTS),
        lambda part: print(f"{part} ...", file=sys.stderr, flush=True),
    )
    print("\n".join(text(found)), flush=True)
    if not whole:
        where = where / ",".join(p for p in PARTS if p in o.parts)  # what was found of everything stays
    shutil.rmtree(where / "maps", ignore_errors=True)
    paths, notes = write_study(where, found, opened.run.rows() if opened.run else [])
    runs.write_json(where / "heads.json", as_json(found))
    if opened.run and whole:
        log_maps(opened.run, o.weights, paths)
        if keep:
            opened.run.update(heads=numbers(found))
    return tell(where, notes)


def look_across(o: Any, opened: Opened, where: Path) -> int:
    """The same for a model with an encoder: what its decoder looks at in the source. Raises UserError."""
    found = cross_study(opened, name_of(where), o.text)
    print("\n".join(text_across(found)), flush=True)
    shutil.rmtree(where / "maps", ignore_errors=True)
    paths, notes = write_cross(where, found)
    runs.write_json(where / "heads.json", cross_json(found))
    if opened.run:
        log_maps(opened.run, o.weights, paths)
    return tell(where, notes)


def name_of(where: Path) -> str:
    return str(where.parent if where.name == "heads" else where)


def log_maps(run: Run, weights: str, paths: Sequence[Path]) -> None:
    """The PNG files among these, in TensorBoard."""
    from toymha.log import write_images

    step = run.summary["best"]["step"] if weights == "best" else run.summary["step"]
    write_images(run, step, {f"maps/{p.stem}": p for p in paths if p.suffix == ".png"})


def tell(where: Path, notes: Sequence[str]) -> int:
    for note in notes:
        print(f"note    {note}")
    print(f"page    {quote(where / 'heads.html')}")
    return 0


def open_model(o: Any, words: Sequence[str]) -> tuple[Opened, Path]:
    """(the model, the folder for what is found). A model that is not trained has no run. Raises UserError."""
    if o.run is not None:
        opened = open_run(o.run, weights=o.weights, device=o.device, precision="fp32", threads=o.threads)
        folder = Path(o.run).expanduser() / "heads"
        if o.steps is None:
            return opened, folder / "best" if o.weights == "best" else folder
        c, corpus = opened.config, opened.corpus
        fresh = make_model(c, corpus.tokenizer.vocab_size)
        if c.start:
            fresh.load_state_dict(first_weights(c, corpus))
        return dataclasses.replace(opened, run=None, model=fresh.to(opened.device).eval()), folder / "untrained"
    if not words:
        raise UserError(
            "heads needs run=FOLDER, or a model to look at untrained, such as `toymha heads probe=scale model=mha`"
        )
    points = experiment(words).points
    if len(points) > 1:
        raise UserError(f"heads looks at one untrained model, and these words describe {len(points)}")
    c = dataclasses.replace(points[0].config, device=o.device, threads=o.threads, precision="fp32")
    corpus = check_data(c)
    device, precision = set_up(c)
    model = make_model(c, corpus.tokenizer.vocab_size).to(device).eval()
    folder = Path(c.output_dir) / "heads" / f"{points[0].label},untrained" / f"seed={c.seed}"
    return Opened(None, c, model, corpus, device, precision), folder


def as_json(found: Study) -> dict[str, Any]:
    """The numbers of a study; heads by name."""
    rows = {head.name: row for head, row in by_head(found).items()}
    out = {"run": found.name, "about": dict(found.about), "heads": rows, **numbers(found)}
    if found.census:
        out |= {"rules": found.census.rules, "false_positives": found.census.false_positives}
    if found.likeness:
        out["clusters"] = [[h.name for h in cluster] for cluster in found.likeness.clusters]
    return plain(out)


# For a terminal


def text(found: Study) -> list[str]:
    """One line a head, then what follows from all of them."""
    lines = [f"{name:10}  {said}" for name, said in found.about]
    rows = by_head(found)
    if rows and (found.census or found.writes or found.importance):
        lines += ["", *columns([head_line(found), *(line(head.name, row) for head, row in rows.items())], 2), ""]
    if found.census:
        lines += census_lines(found)
    if found.likeness:
        effective = ", ".join(f"layer {i}: {e:.1f}" for i, e in enumerate(found.likeness.effective))
        lines.append(f"different   patterns, as if so many heads were unlike each other: {effective}")
        for cluster in found.likeness.clusters:
            lines.append(f"alike       {', '.join(h.name for h in cluster)}")
    if found.importance:
        ranks = ", ".join(f"{a} and {b} {rho:.2f}" for (a, b), rho in found.importance.correlations.items())
        lines.append(f"ranks       of the heads by two measures, correlation: {ranks}")
    notes = [*found.notes, *([found.passage.note] if found.passage and found.passage.note else [])]
    return [*lines, *pruning_lines(found), *(f"note        {n}" for n in notes)]


def text_across(found: CrossStudy) -> list[str]:
    """The same for cross-attention."""
    lines = [f"{name:10}  {said}" for name, said in found.about]
    if found.measured:
        lines += [f"{'measured':10}  {rows_told(found)}", "", *columns(cells(found), 1), ""]
    return [*lines, f"{statement(found)}"]


def head_line(found: Study) -> list[str]:
    cells = ["head", "kind" if found.census else ""]
    cells += list(SCORES) if found.census else []
    cells += ["writes", "share"] if found.writes else []
    return cells + (list(found.importance.measures) if found.importance else [])


def line(name: str, row: dict[str, Any]) -> list[str]:
    kind = row.get("kind", "")
    cells = [name, f"offset {row['offset']}" if kind == "offset" else kind]
    if "scores" in row:
        cells += [f"{row['scores'][k]['value']:.2f}" if k in row["scores"] else "-" for k in SCORES]
    if "write" in row:
        cells += [f"{row['write']['norm']:.2f}", f"{100 * row['write']['share']:.0f} %"]
    return cells + [f"{m['value']:.4f}" for m in row.get("importance", {}).values()]


def census_lines(found: Study) -> list[str]:
    assert found.census
    counts = ", ".join(f"{n} {kind}" for kind, n in found.census.counts().items())
    rates = ", ".join(f"{kind} {100 * rate:.1f} %" for kind, rate in found.census.false_positives.items() if rate)
    heads, models = found.census.untrained_heads, found.census.untrained_models
    return [
        f"kinds       {counts}",
        f"by chance   of {heads} heads of {models} untrained models the same rules name: {rates or 'none'} "
        "(uniform and other are no finds, and not counted)",
    ]


def pruning_lines(found: Study) -> list[str]:
    if not found.pruning:
        return []
    p = found.pruning
    shares = ", ".join(f"{100 * share:.0f} % by {name}" for name, share in p.removable.items())
    return [
        f"can go      of the heads, for less than {100 * p.tolerance:.0f} % of perplexity ({p.split} split): {shares}"
    ]
