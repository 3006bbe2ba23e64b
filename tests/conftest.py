"""What the tests share: small configurations, one for each file in conf/model, and a cache folder of their own."""

from __future__ import annotations

import functools

import pytest
import torch
import yaml

from toymha.compose import Composer, choices, conf_dir, parse
from toymha.config import Config
from toymha.model.gpt import GPT

torch.set_num_threads(1)  # small products are no faster on several threads, and results do not depend on the machine

VOCAB = 32  # what "the data" has in tests that need none
SMALL = {"n_layer": 2, "dim": 32, "n_head": 4, "seq_len": 16}
SMALL_WHERE_SET = {
    "n_kv_head": 2,
    "head_dim": 8,
    "v_head_dim": 8,
    "d_ff": 48,
    "vocab_size": 40,
}  # else what follows from the rest
MODELS = choices("model")


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOYMHA_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@functools.cache
def composer() -> Composer:
    """One for all tests: it reads the files of conf/ once, and a point then costs a millisecond."""
    return Composer()


def make(*words: str) -> Config:
    """A small configuration with the words of a command line laid over it."""
    small = {"data": "pydoc", "budget": "smoke", **SMALL}
    return composer().point(small | {a.key: a.values[0] for a in parse(words)}, set()).config


def shrunk(model: str, *words: str) -> Config:
    """conf/model/<model>.yaml in small: the sizes that it fixes stay, those that it merely sets shrink."""
    file = yaml.safe_load((conf_dir() / "model" / f"{model}.yaml").read_text(encoding="utf-8")) or {}
    fixed = file.get("fixed", [])
    sizes = SMALL | {k: v for k, v in SMALL_WHERE_SET.items() if file.get(k) is not None}
    small = {"data": "pydoc", "budget": "smoke", "model": model} | {k: v for k, v in sizes.items() if k not in fixed}
    return composer().point(small | {a.key: a.values[0] for a in parse(words)}, set()).config


@pytest.fixture(params=MODELS)
def model_config(request) -> Config:
    """Each file in conf/model in turn, in small."""
    return shrunk(request.param)


def built(c: Config, scale: float = 0.1) -> GPT:
    """The model in evaluation mode, every parameter moved by noise: no zero bias and no even pattern hides a mistake."""
    model, generator = GPT(c, VOCAB).eval(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=scale)
    return model


def tokens(B: int = 2, T: int = 16, seed: int = 0) -> torch.Tensor:
    """idx_BT."""
    return torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(seed))
