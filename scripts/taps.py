"""What the taps cost while nobody listens: a training step of the model as it is, and of one without them, in turn.

    python scripts/taps.py [--rounds 40]

The model is small (4 layers, dim 128, 4 heads, context 64, batch 12), so that the fixed cost of a call shows. Ends with
one line of JSON: medians in milliseconds and their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F

from toymha.compose import points
from toymha.model.gpt import GPT

V = 65
TAPS = ("embedded", "after_attn", "after_mlp", "scores", "pattern", "z", "write")


class Plain:
    """What an identity module does, without being a module."""

    def __init__(self) -> None:
        self._forward_hooks: dict = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x


def without_taps(model: GPT) -> GPT:
    for module in list(model.modules()):
        for name in TAPS:
            if name in module._modules:
                del module._modules[name]
                object.__setattr__(module, name, Plain())
    return model


def step(model: GPT, x_BT: torch.Tensor) -> float:
    began = time.perf_counter()
    logits = model(x_BT)
    F.cross_entropy(logits.flatten(0, 1), x_BT.flatten()).backward()
    model.zero_grad()
    return 1000 * (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    (point,) = points(["data=pydoc", "n_layer=4", "dim=128", "n_head=4", "seq_len=64", "batch_size=12"])
    models = {"with taps": GPT(point.config, V), "without": without_taps(GPT(point.config, V))}
    x_BT = torch.randint(V, (12, 64), generator=torch.Generator().manual_seed(0))
    times: dict[str, list[float]] = {name: [] for name in models}
    for i in range(rounds):
        for name, model in models.items():
            taken = [step(model, x_BT) for _ in range(5)]
            if i >= 3:
                times[name] += taken
    medians = {name: statistics.median(t) for name, t in times.items()}
    ratios = sorted(a / b for a, b in zip(times["with taps"], times["without"]))
    n = len(ratios)
    middle = f"{ratios[n // 4]:.4f} to {ratios[3 * n // 4]:.4f}"
    print(f"ratio of neighbouring steps: median {ratios[n // 2]:.4f}, middle half {middle}")
    print(json.dumps({"ms": medians, "ratio": medians["with taps"] / medians["without"]}))


if __name__ == "__main__":
    main()
