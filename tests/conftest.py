"""What the tests share: small configurations, one for each file in conf/model, and a cache folder of their own.

B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch
import yaml
from torch import Tensor

from toymha.compose import Composer
from toymha.config import Config, choices, conf_dir
from toymha.model.gpt import GPT
from toymha.model.seq2seq import Seq2Seq, make_model
from toymha.words import parse

# Small products gain nothing from more threads, results then depend on no core count, and the tests run on all cores.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)

VOCAB = 32  # what "the data" has, in tests that need no data
FILES = {m: yaml.safe_load((conf_dir() / "model" / f"{m}.yaml").read_text(encoding="utf-8")) for m in choices("model")}
ENCODERS = [m for m, file in FILES.items() if file and "n_encoder_layer" in file]  # they read a source and a target
MODELS = [m for m in FILES if m not in ENCODERS]  # they read one sequence
SMALL = dict(n_layer=2, dim=32, n_head=4, seq_len=16)
SMALL_WHERE_SET = dict(n_kv_head=2, head_dim=8, v_head_dim=8, d_ff=48, vocab_size=40)  # left alone where they follow
# Models of two layers that have lost heads: a group of its own size, a layer without heads, a slice of the stream.
PRUNED = [
    *("kept_heads=[[0,2],[]]", "kept_heads=[[],[1]] bias=true qkv_bias=true", "n_kv_head=2 kept_heads=[[0,1,3],[2,3]]"),
    *("n_kv_head=1 kept_heads=[[3],[0,1,2]]", "norm_position=post bias=true kept_heads=[[1,2],[]]"),
    *("w_o=false kept_heads=[[0,3],[]]", "tied_heads=true kept_heads=[[1,3],[0,1,2,3]]"),
]


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOYMHA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@functools.cache
def composer() -> Composer:
    """One for all tests: it reads the files of conf/ once, after which a configuration costs a millisecond."""
    return Composer()


def make(*words: str) -> Config:
    """A small configuration with the words of a command line laid over it.

    With `model=...`, sizes that the model's file fixes stay as they are, and those that it merely sets shrink.
    """
    said = {a.key: a.values[0] for a in parse(words)}
    file = FILES[said.get("model", "mha")] or {}
    sizes = SMALL | {k: v for k, v in SMALL_WHERE_SET.items() if file.get(k) is not None}
    sizes = {k: v for k, v in sizes.items() if k not in file.get("fixed", [])}
    data = {} if said.get("model") in ENCODERS else {"data": "pydoc"}
    return composer().point(data | {"budget": "smoke"} | sizes | said, set()).config


@pytest.fixture(params=MODELS)
def model_config(request) -> Config:
    """Each file in conf/model in turn, in small."""
    return make(f"model={request.param}")


def built(c: Config) -> GPT | Seq2Seq:
    """The model in evaluation mode, each parameter moved by noise: no zero bias, no even pattern hides a mistake."""
    model, generator = make_model(c, VOCAB).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
    return model


def tokens(B: int = 2, T: int = 16, seed: int = 0, vocab: int = VOCAB) -> Tensor:
    """idx_BT, uniform."""
    return torch.randint(vocab, (B, T), generator=torch.Generator().manual_seed(seed))
