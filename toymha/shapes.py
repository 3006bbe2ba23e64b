"""The walk of a tensor through one attention layer, watched in the model itself.

The model is built on torch's meta device, where tensors have shapes and no numbers, so that one of 70 billion
parameters is built at once. A mode listens to every torch function that its attention calls.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from toymha.config import Config
from toymha.model.attention import Attention
from toymha.model.seq2seq import Seq2Seq, make_model

# What torch calls it -> what the equation calls it; all else goes by torch's own word.
WORDS = {"unflatten": "view as heads", "flatten": "merge heads", "repeat_interleave": "repeat for each query head"}
RESULTS = {"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "out"}  # a matrix -> what it makes


@dataclass
class Step:
    """A tensor, and what made it from the ones before: one function, or several that leave its shape alone."""

    tensor: str
    made_by: list[str]
    shape: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return math.prod(self.shape)

    def to_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor, "made_by": self.made_by, "shape": list(self.shape), "numbers": self.numbers}


def walk(c: Config, vocab_size: int) -> dict[str, list[Step]]:
    """Kind of attention -> the steps through the first layer that has heads, for batch_size x seq_len tokens.

    With an encoder, the decoder's self-attention and its cross-attention, to a source as long (S = T), from the
    encoder's output on, here called memory.
    """
    first = next((i for i in range(c.n_layer) if c.heads_of(i)), None)
    if first is None:
        return {}
    shape = (c.batch_size, c.seq_len)
    with torch.device("meta"), torch.no_grad():
        model, idx_BT = make_model(short(c, first), vocab_size).eval(), torch.zeros(shape, dtype=torch.int64)
        watches = {"self-attention": watch(model.blocks[first].attn)}
        if c.crosses:
            watches["cross-attention"] = watch(model.blocks[first].cross)
            watch_source(model.blocks[first].cross, watches["cross-attention"])
        model(idx_BT, idx_BT) if isinstance(model, Seq2Seq) else model(idx_BT)
    return {kind: merged(w.steps) for kind, w in watches.items()}


def short(c: Config, last: int) -> Config:
    """The same model up to layer `last`, behind an encoder of one: nobody asks what the others do."""
    kept = None if c.kept_heads is None else c.kept_heads[: last + 1]
    if kept and all(len(heads) == c.n_head for heads in kept):  # which a configuration says by leaving it out
        kept = None
    n_encoder_layer = None if c.n_encoder_layer is None else 1
    return replace(c, n_layer=last + 1, kept_heads=kept, n_encoder_layer=n_encoder_layer)


def watch(attention: Any) -> Watch:
    """Listen to an attention, from its inputs to its output, and to its taps, with which it writes out its scores."""
    w = Watch(attention)

    def begin(module: nn.Module, args: Any) -> None:
        w.given("x", args[0])
        w.__enter__()

    def end(module: nn.Module, args: Any, out: Any) -> None:
        w.__exit__(None, None, None)

    attention.register_forward_pre_hook(begin)
    attention.register_forward_hook(end)
    for tap in ("scores", "pattern", "z"):
        getattr(attention, tap).register_forward_hook(lambda module, args, out, tap=tap: w.name(tap, out))
    return w


def watch_source(cross: Any, w: Watch) -> None:
    """Listen also while a cross-attention makes its keys and values, which it does once, ahead of the decoder."""
    real = cross.keys_values

    def keys_values(memory_BSC: Tensor, *place: Any) -> Any:
        w.given("memory", memory_BSC, "given by the encoder")
        with w:
            return real(memory_BSC, *place)

    cross.keys_values = keys_values


class Watch(TorchFunctionMode):
    """Follows what comes from an attention's inputs, and names each tensor by the matrix or the tap it comes from."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.made_in: dict[int, Step] = {}  # id of a tensor -> its step
        self.alive: list[Tensor] = []  # an id is given again once its tensor is gone
        present = {n: w for n in RESULTS if (w := getattr(attention, n)) is not None}
        self.matrices: dict[int, tuple[str, ...]] = {id(w.weight): (n,) for n, w in present.items()}

    def given(self, name: str, tensor: Tensor, made_by: str = "given") -> None:
        self.note(Step(name, [made_by], tuple(tensor.shape)), tensor)

    def note(self, step: Step, tensor: Tensor) -> None:
        self.steps.append(step)
        self.made_in[id(tensor)] = step
        self.alive.append(tensor)

    def name(self, tap: str, tensor: Tensor) -> None:
        self.made_in[id(tensor)].tensor = tap

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read, made = list(tensors(args)), [t for t in tensors(out) if id(t) not in self.made_in]
        known = [self.made_in[id(t)] for t in read if id(t) in self.made_in]
        matrices = [n for t in read for n in self.matrices.get(id(t), ())]
        if not known:
            if matrices:  # laid side by side, for one product
                self.matrices |= {id(t): tuple(matrices) for t in made}
                self.alive += made
            return out
        names, said = known[0].tensor.split(", "), func.__name__
        if said == "matmul":
            said = " @ ".join(step.tensor for step in known)
        elif said == "softmax":
            names = ["pattern"]
        if matrices:
            names, said = [RESULTS[n] for n in matrices], ", ".join(f"W{n[1:]} {known[0].tensor}" for n in matrices)
        for i, t in enumerate(made):
            self.note(Step(names[i] if len(made) == len(names) else ", ".join(names), [said], tuple(t.shape)), t)
        return out


def tensors(tree: Any) -> Iterator[Tensor]:
    """The tensors of nested tuples and lists."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (tuple, list)):
        for branch in tree:
            yield from tensors(branch)


def merged(steps: list[Step]) -> list[Step]:
    """Functions that leave name and shape alone in the line of the tensor that they work on."""
    out: list[Step] = []
    for s in steps:
        made_by = [WORDS.get(f, f) for f in s.made_by]
        if out and (out[-1].tensor, out[-1].shape) == (s.tensor, s.shape):
            out[-1].made_by += made_by
        else:
            out.append(Step(s.tensor, made_by, s.shape))
    return out
