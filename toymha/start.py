"""A run that begins with the weights of another, whole or with fewer heads (`start=`)."""

from __future__ import annotations

from torch import Tensor

from toymha.config import MODEL_KEYS, Config, identity_values
from toymha.data.corpus import Corpus
from toymha.model.gpt import GPT
from toymha.model.shrink import shrink
from toymha.runs import Run, read_json
from toymha.schema import UserError, word


def first_weights(c: Config, corpus: Corpus) -> dict[str, Tensor]:
    """The last weights of the run folder `c.start`, without the heads that this model has not.

    Raises UserError where that run has other tokens or another shape.
    """
    assert c.start
    run = Run.load(c.start)
    if read_json(run.path / "tokenizer.json") != corpus.tokenizer.to_dict():
        raise UserError(
            f"start={c.start} has other tokens than data={c.data.name} gives; begin with a run on this text"
        )
    try:
        weights = shrink(run.load_weights("model"), run.config, c)
    except (ValueError, IndexError, RuntimeError, KeyError):
        weights = {}
    own = GPT(c, corpus.tokenizer.vocab_size).state_dict()
    if {k: v.shape for k, v in own.items()} != {k: v.shape for k, v in weights.items()}:
        theirs, ours = (identity_values(x) for x in (run.config, c))
        differing = [f"{k}={word(theirs[k])} there, {word(ours[k])} here" for k in MODEL_KEYS if theirs[k] != ours[k]]
        raise UserError(f"start={c.start} is a model of another shape: {'; '.join(differing[:4])}")
    return weights
