"""A run that begins with the weights of another, whole or with fewer heads (`start=`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from toymha.config import MODEL_KEYS, Config, identity_values
from toymha.data.corpus import Corpus
from toymha.model.seq2seq import make_model
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
    theirs, ours = sizes(run.config), sizes(c)
    differing = [f"{k}={word(theirs[k])} there, {word(ours[k])} here" for k in ours if theirs[k] != ours[k]]
    if differing:
        raise UserError(f"start={c.start} is another model: {'; '.join(differing[:4])}")
    try:
        weights = shrink(run.load_weights("model"), run.config, c)
    except ValueError as e:
        raise UserError(f"start={c.start}: {e}; take its kept_heads={run.config.kept_heads}, or fewer") from None
    own = make_model(c, corpus.tokenizer.vocab_size).state_dict()
    wrong = [k for k in own | weights if k not in own or k not in weights or own[k].shape != weights[k].shape]
    if wrong:
        raise UserError(f"start={c.start} is a model of another shape: {', '.join(wrong[:4])}")
    return weights


def sizes(c: Config) -> dict[str, Any]:
    """What two models must have equal to share weights: all that decides a shape or what a number in it means."""
    free = ("kept_heads", "attn_dropout", "resid_dropout", "causal", "score_scale", "vocab_size")
    values = {k: v for k, v in identity_values(c).items() if k in MODEL_KEYS and k not in free}
    return values | {"n_kv_head": c.G, "head_dim": c.D, "v_head_dim": c.Dv, "d_ff": c.F}
