"""The parts of a block that are not attention: normalisation, MLP, positions.

B batch, T positions, S key positions, C dim, E half of a width, D head_dim, H heads.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toymha.config import Config


class Tap(nn.Module):
    """A place where hooks may listen to what passes, or change it. torch's way through a module without hooks took 1 %
    of a token that a small model decodes on a CPU; here there is none."""

    def __call__(self, x: Tensor) -> Tensor:
        heard = self._forward_hooks or self._forward_pre_hooks or self._backward_hooks or self._backward_pre_hooks
        return super().__call__(x) if heard else x

    def forward(self, x: Tensor) -> Tensor:
        return x


def at_hand(module: nn.Module) -> None:
    """Let Python find a module's children as it finds any attribute. The search of nn.Module takes 0.8 us each time,
    7 % of a token that a small model decodes on a CPU. A child may be set anew by assignment of another module, not by
    None, `del` or `add_module`, which do not know of this."""
    module.__dict__.update(module._modules)


class LayerNorm(nn.Module):
    """Ba, Kiros & Hinton 2016: (x - mean) / sqrt(var + eps) * weight + bias, over the last axis."""

    def __init__(self, dim: int, bias: bool, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None

    def forward(self, x_BTC: Tensor) -> Tensor:
        return F.layer_norm(x_BTC, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Zhang & Sennrich 2019: x / sqrt(mean(x^2) + eps) * weight, over the last axis. It has no bias."""

    def __init__(self, dim: int, bias: bool, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x_BTC: Tensor) -> Tensor:
        return F.rms_norm(x_BTC, self.weight.shape, self.weight, self.eps)


FEW_NUMBERS = 4096  # from 16,384 on oneDNN is faster


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU; of a few numbers without gradients sooner, and the same to rounding.

    On a CPU torch gives contiguous numbers to oneDNN, which takes 10 to 25 us for the fewest, those of a transposed
    tensor to a kernel of its own, which takes 5: 8 % of a token that a small model decodes. This may go once torch
    chooses like this itself.
    """
    n = x.numel()
    if n > FEW_NUMBERS or n % 2 or not x.is_cpu or torch.is_grad_enabled():
        return F.gelu(x, approximate=approximate)
    return F.gelu(x.reshape(-1, 2).t(), approximate=approximate).t().reshape(x.shape)


class GeluMLP(nn.Module):
    """Two matrices with GELU between (Hendrycks & Gimpel 2016)."""

    approximate = "none"

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.up = nn.Linear(c.dim, c.F, bias=c.bias)
        self.down = nn.Linear(c.F, c.dim, bias=c.bias)
        at_hand(self)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(gelu(self.up(x_BTC), self.approximate))


class GeluTanhMLP(GeluMLP):
    """GELU in the tanh form that GPT-2 was trained with; on a CPU it takes four times as long as the exact one."""

    approximate = "tanh"


class SwigluMLP(nn.Module):
    """Shazeer 2020: down(silu(gate(x)) * up(x))."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(c.dim, c.F, bias=c.bias)
        self.up = nn.Linear(c.dim, c.F, bias=c.bias)
        self.down = nn.Linear(c.F, c.dim, bias=c.bias)
        at_hand(self)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BTC)) * self.up(x_BTC))


class Chance(threading.local):
    """What `dropout` draws from in this thread: a generator a sequence of the batch, made when one is needed."""

    seeds: Iterable[int] | None = None
    rows: list[torch.Generator] | None = None


CHANCE = Chance()


@contextlib.contextmanager
def drawing(seeds: Iterable[int], device: torch.device) -> Iterator[None]:
    """Inside, dropout draws from streams with these seeds, one a sequence of the batch, in this thread alone where the
    device is a CPU. So what is dropped depends neither on which thread has a sequence nor on what stands beside it;
    torch's own dropout has one generator for all threads, and would leave it to chance which of them draws what.
    """
    if device.type != "cpu":
        torch.manual_seed(next(iter(seeds)))
        yield
        return
    CHANCE.seeds = seeds
    try:
        yield
    finally:
        CHANCE.seeds = CHANCE.rows = None


def dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Zero with probability p, else x / (1 - p); x itself in evaluation. The first axis counts sequences."""
    if not (p and training) or CHANCE.seeds is None:
        return F.dropout(x, p, training) if p else x
    if CHANCE.rows is None:
        CHANCE.rows = [torch.Generator().manual_seed(seed) for seed in CHANCE.seeds]
    mask = torch.empty_like(x, memory_format=torch.contiguous_format)
    for row, generator in zip(mask, CHANCE.rows, strict=True):
        fill_mask(row, p, generator)
    return (x * mask).mul_(1 / (1 - p))  # by a number of full precision, also where x is in bf16


def fill_mask(mask: Tensor, p: float, generator: torch.Generator) -> None:
    """Fill with 0, with probability p, and 1: p to the nearest of 2^-32, and below 1. `bernoulli_`, which draws a
    number of 64 bits for each, takes 2.5 times as long, and was a tenth of a step in bf16."""
    bits = torch.empty(-(-mask.numel() // 2), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    numbers = bits.view(torch.int32)[: mask.numel()].view(mask.shape)
    torch.ge(numbers, min(round(p * 2**32), 2**32 - 1) - 2**31, out=mask)


NORMS = {"layer": LayerNorm, "rms": RMSNorm}
MLPS = {"gelu": GeluMLP, "gelu_tanh": GeluTanhMLP, "swiglu": SwigluMLP}


def sinusoid_table(seq_len: int, dim: int) -> Tensor:
    """Vaswani et al. 2017, section 3.5: sin in even and cos in odd channels, wavelengths 2 pi to 20,000 pi."""
    angle_TE = rotary_angles(seq_len, dim)
    return torch.stack((angle_TE.sin(), angle_TE.cos()), dim=-1).flatten(1).float()


def rotary_angles(seq_len: int, width: int, theta: float = 10_000.0) -> Tensor:
    """Position times frequency, (seq_len, width / 2), frequencies theta^(-2i / width) for i = 0, 1, ...

    In double precision: of an angle of 100,000 fp32 keeps no more than two decimals.
    """
    frequency = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    return torch.arange(seq_len, dtype=torch.float64)[:, None] * frequency


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021): channels i and i + D/2 form a plane that turns by position x frequency_i.

    The tables hold each half's angles twice, the first half of `sin_TD` negated, so that no negation is needed here.
    Where each sequence has positions of its own, they have the axes B1TD.
    """
    half = x_BHTD.shape[-1] // 2
    return x_BHTD * cos_TD + x_BHTD.roll(half, dims=-1) * sin_TD


def rotary_tables(seq_len: int, head_dim: int, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos_TD and sin_TD as `rotate` wants them."""
    angle_TE = rotary_angles(seq_len, head_dim, theta)
    cos_TE, sin_TE = angle_TE.cos().float(), angle_TE.sin().float()
    return torch.cat((cos_TE, cos_TE), dim=-1), torch.cat((-sin_TE, sin_TE), dim=-1)


class Place(NamedTuple):
    """Where the tokens of a forward pass stand, and what may be seen from there: the same for all layers."""

    rope: tuple[Tensor, Tensor] | None = None  # rows of `rotary_tables` at the T positions
    seen_BS: Tensor | None = None  # bool, which keys are there at all; None: all
    window: int | None = None  # how many tokens up to its own one sees; None: all


def visible(T: int, S: int, causal: bool, place: Place, device: torch.device) -> Tensor | None:
    """(B or 1, 1, T, S), bool: which keys a query may see, the T queries being the last of the S tokens; None: all."""
    out = None
    if causal:
        out = torch.ones(T, S, dtype=torch.bool, device=device).tril_(S - T)
        if place.window is not None:
            out = out.triu_(S - T - place.window + 1)
        out = out[None, None]
    if place.seen_BS is not None:
        seen_B11S = place.seen_BS[:, None, None, :]
        out = seen_B11S if out is None else out & seen_B11S
    return out
