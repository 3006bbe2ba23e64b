"""`toymha eval`: the weights of a run folder on a whole split of its own text, or of another."""

from __future__ import annotations

import dataclasses
from typing import Any

from toymha import runs
from toymha.compose import Composer
from toymha.config import Data
from toymha.console import parts_table, score_line
from toymha.data import text, tokenizer
from toymha.data.corpus import check_lengths, load_corpus
from toymha.device import arithmetic, set_up
from toymha.evaluate import evaluate
from toymha.model.gpt import GPT
from toymha.schema import UserError, build


def score_run(o: Any) -> str:
    """`o`: cli.EvalOptions. Raises UserError where run, weights, split or data are not there."""
    if o.path is not None and o.data != "file":
        raise UserError(f"path={o.path} needs data=file")
    run = runs.Run.load(o.run)
    precision = o.precision or run.config.precision
    c = dataclasses.replace(run.config, device=o.device, threads=o.threads, precision=precision)
    own = tokenizer.from_dict(runs.read_json(run.path / "tokenizer.json"))
    device, precision = set_up(c)
    own_path = str(run.data_path) if run.data_path else None
    data = other_data(o, c.data) if o.data else dataclasses.replace(c.data, path=own_path)
    if o.data is None and text.fingerprint(data) != run.info["values"]["data.sha256"]:
        again = f"data={data.name}" + (f" path={data.path}" if data.path else "")
        raise UserError(f"the text of this run has changed since it was trained; {again} scores the new one")
    corpus = load_corpus(data, own)
    check_lengths(corpus, c.seq_len)
    if o.split not in corpus.splits:
        raise UserError(f"split={o.split}: data.split={data.split} has no test text; here: {', '.join(corpus.splits)}")
    model = GPT(c, own.vocab_size).to(device)
    model.load_state_dict(run.load_weights({"last": "model", "best": "best"}[o.weights]))
    with arithmetic(precision, device):
        score = evaluate(model, corpus.splits[o.split], c.seq_len)
    about = f"{run.path}, {o.weights} weights, {corpus.name} {o.split} split, {device}, {precision}"
    line = f"{score_line(o.split, score.to_dict())}   {score.bits_per_byte:.4f} bits/byte"
    return "\n".join([about, line, *parts_table(score.to_dict())])


def other_data(o: Any, own: Data) -> Data:
    """Another text, cut by its own rule, in this run's tokens."""
    values = Composer().composed({"data": o.data})[0]["data"]
    return build({**values, "path": o.path, "tokenizer": own.tokenizer, "vocab_size": own.vocab_size}, Data, "data.")
