"""A run folder opened for reading: its model with the weights of a moment, and the text that it reads."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from toymha import runs
from toymha.batches import check_pairs
from toymha.config import Config, Data
from toymha.data import text, tokenizer
from toymha.data.corpus import Corpus, check_lengths, load_corpus
from toymha.device import set_up
from toymha.model.gpt import GPT
from toymha.model.seq2seq import Seq2Seq, make_model
from toymha.runs import Run
from toymha.schema import UserError

WEIGHTS = {"last": "model", "best": "best"}  # as options name them -> as the run folder does


@dataclass(frozen=True)
class Opened:
    """`config` is the run's own, on this machine's device and threads; `precision` is what `auto` came to. `run` is
    None for a model that was made to be looked at, and never trained."""

    run: Run | None
    config: Config
    model: GPT | Seq2Seq
    corpus: Corpus
    device: torch.device
    precision: str

    @property
    def gpt(self) -> GPT:
        """The model of a run without an encoder. Raises UserError for one with."""
        if isinstance(self.model, Seq2Seq):
            raise UserError(
                f"this is for models without an encoder, and the run has {self.config.n_encoder_layer} layers of one"
            )
        return self.model

    def split(self, name: str) -> str:
        """The name of a split that is there. Raises UserError with those that are."""
        if name not in self.corpus.splits:
            here = ", ".join(self.corpus.splits)
            raise UserError(f"split={name}: data.split={self.config.data.split} has no {name} text; here: {here}")
        return name


def open_run(
    path: str,
    *,
    weights: str = "last",
    device: str = "auto",
    precision: str | None = None,
    threads: int | None = None,
    data: Data | None = None,
) -> Opened:
    """The run at `path`. `data`: another text for it, in the run's own tokens; null: its own.

    Raises UserError where the run, its weights or its text are not there, or the text has changed since.
    """
    run = Run.load(path)
    c = dataclasses.replace(
        run.config, device=device, threads=threads, precision=precision or run.config.precision, workers=None
    )
    own = tokenizer.from_dict(runs.read_json(run.path / "tokenizer.json"))
    where, arithmetic = set_up(c)
    c = dataclasses.replace(c, data=own_data(run))
    if data is None and text.fingerprint(c.data) != run.info["values"]["data.sha256"]:
        again = f"data={c.data.name}" + (f" path={c.data.path}" if c.data.path else "")
        raise UserError(f"the text of this run has changed since it was trained; {again} scores the new one")
    corpus = load_corpus(data or c.data, own)
    if c.n_encoder_layer is None:
        check_lengths(corpus, c.seq_len)
    else:
        check_pairs(corpus.splits, c.seq_len)
    model = make_model(c, own.vocab_size).to(where)
    model.load_state_dict(run.load_weights(WEIGHTS[weights]))
    return Opened(run, c, model.eval(), corpus, where, arithmetic)


def own_data(run: Run) -> Data:
    """The run's own text, wherever the command is typed."""
    return dataclasses.replace(run.config.data, path=str(run.data_path) if run.data_path else None)
