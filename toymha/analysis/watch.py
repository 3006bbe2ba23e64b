"""Heads along training: the scores of a census and the maps at one moment (`budget.watch`)."""

from __future__ import annotations

from pathlib import Path

from toymha.analysis.capture import heads_of
from toymha.analysis.census import material, measure
from toymha.analysis.losses import sequences
from toymha.analysis.plots import write_maps
from toymha.analysis.probe_depth import depth_row
from toymha.analysis.results import Head
from toymha.analysis.study import Subject, passage
from toymha.config import Config
from toymha.data.corpus import Corpus
from toymha.model.gpt import GPT

SEQUENCES = 16
TOKENS = 32  # of the passage that is drawn


def watch(model: GPT, c: Config, corpus: Corpus, folder: Path) -> tuple[dict[str, float], dict[str, Path]]:
    """(`head_<score>/L0H3` for each head, `grad_norm/layerN`, `stream_norm/layerN`; tag -> PNG of each layer's maps).

    The PNG files lie in `folder`. No weight, no gradient and no random stream of training is touched.
    """
    means, _ = measure(model, material(c, corpus, SEQUENCES, seed=0)).summary()
    row = {
        f"head_{score}/{head.name}": float(mean)
        for score, mean_N in means.items()
        for head, mean in zip(heads_of(model), mean_N)
    }
    batch = sequences(corpus.splits["val"], c.seq_len, 8 * c.seq_len, next(model.parameters()).device)[0]
    row |= depth_row(model, batch.x_WT, batch.y_WT)
    folder.mkdir(parents=True, exist_ok=True)
    seen = passage(Subject(model, c, corpus, show=TOKENS), {})
    maps = {}
    for layer, pattern_HTS in enumerate(seen.patterns):
        if len(pattern_HTS):
            titles = [Head(layer, h).name for h in model.blocks[layer].attn.heads]  # type: ignore[union-attr]
            png, svg = write_maps(folder / f"layer{layer}", titles, pattern_HTS.numpy(), seen.labels, c.causal)
            svg.unlink()
            maps[f"maps/{png.stem}"] = png
    return row, maps
