"""`toymha eval`: the weights of a run folder on a whole split of its own text, or of another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toymha.compose import Composer
from toymha.config import Data
from toymha.console import pairs_table, parts_table, score_line
from toymha.device import arithmetic
from toymha.evaluate import evaluate
from toymha.generation.translate import all_ways
from toymha.opened import open_run
from toymha.runs import Run
from toymha.schema import UserError, build
from toymha.team import readers_of


def score_run(o: Any) -> str:
    """`o`: options.EvalOptions. Raises UserError where run, weights, split or data are not there."""
    if o.path is not None and o.data not in ("file", "pairs"):
        raise UserError(f"path={o.path} needs data=file, or data=pairs for a file of pairs")
    if o.path is None and o.data in ("file", "pairs"):
        raise UserError(f"data={o.data} needs path=, such as path={'corpus.txt' if o.data == 'file' else 'pairs.tsv'}")
    data = other_data(o, Run.load(o.run).config.data) if o.data else None
    opened = open_run(o.run, weights=o.weights, device=o.device, precision=o.precision, threads=o.threads, data=data)
    split = opened.corpus.splits[opened.split(o.split)]
    with arithmetic(opened.precision, opened.device), readers_of(opened.model, opened.device) as team:
        score = evaluate(opened.model, split, opened.config.seq_len, team=team)
        written = None
        if split.separators is not None and opened.config.causal:
            splits, V = opened.corpus.splits, opened.corpus.tokenizer.vocab_size
            written = all_ways(opened.model, splits, o.split, V, opened.config.budget.beam)
    where = f"{opened.device}, {opened.precision}"
    about = f"{Path(o.run)}, {o.weights} weights, {opened.corpus.name} {o.split} split, {where}"
    line = f"{score_line(o.split, score.to_dict())}   {score.bits_per_byte:.4f} bits/byte"
    return "\n".join([about, line, *parts_table(score.to_dict()), *pairs_table(written)])


def other_data(o: Any, own: Data) -> Data:
    """Another text, cut by its own rule, in this run's tokens."""
    values = Composer().composed({"data": o.data})[0]["data"]
    tokens = {"tokenizer": own.tokenizer, "vocab_size": own.vocab_size}
    if o.data == "pairs" and own.source_unit:
        tokens |= {"source_unit": own.source_unit, "target_unit": own.target_unit}
    return build({**values, "path": o.path, **tokens}, Data, "data.")
