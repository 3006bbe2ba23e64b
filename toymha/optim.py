"""Optimizers, parameter groups, the learning-rate schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn

from toymha.config import Config, Optim
from toymha.team import ALONE, Team


def make_optimizers(model: nn.Module, c: Config, team: Team = ALONE) -> list[torch.optim.Optimizer]:
    """Each parameter in exactly one group: matrices are decayed, vectors not; Muon takes the matrices inside blocks."""
    o = c.optim
    named = {id(p): (name, p) for name, p in model.named_parameters()}  # a tied tensor once
    inside = [p for name, p in named.values() if name.startswith(("blocks.", "encoder.")) and p.ndim == 2]
    for_muon = inside if o.name == "muon" else []
    taken = {id(p) for p in for_muon}
    rest = [p for _, p in named.values() if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=o.lr, betas=(o.betas[0], o.betas[1]), eps=o.eps, fused=True
    )
    if not for_muon:
        return [adamw]
    assert o.muon_lr is not None and o.muon_momentum is not None and o.muon_weight_decay is not None  # config checks
    return [adamw, Muon(for_muon, o.muon_lr, o.muon_momentum, o.muon_weight_decay, team)]


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz (Jordan et al. 2024); steps are scaled by sqrt(max(1, rows / columns)).

    The same equation as torch.optim.Muon, with two differences that are about speed alone: matrices of one shape are
    orthogonalised together in batched products, and outside CUDA in fp32 rather than bf16 (on a CPU without bf16
    arithmetic torch's products run over 100 times slower than fp32 ones, and one step took seconds).
    """

    def __init__(
        self, params: Iterable[Tensor], lr: float, momentum: float, weight_decay: float, team: Team = ALONE
    ) -> None:
        self.team = team
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
                    if "momentum" not in self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
            n = self.team.n
            shares = [share for params in by_shape.values() for k in range(n) if (share := params[k::n])]
            for _ in self.team.map(partial(self._step_some, group), shares):
                pass

    def _step_some(self, group: dict, params: list[Tensor]) -> None:
        """Of matrices of one shape."""
        shape = params[0].shape
        moments = [self.state[p]["momentum"] for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        torch._foreach_lerp_(moments, grads, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(grads, moments, group["momentum"])
        update_NRC = orthogonalise(torch.stack(nesterov))
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, list(update_NRC), alpha=-group["lr"] * math.sqrt(max(1, shape[0] / shape[1])))


def orthogonalise(m_NRC: Tensor) -> Tensor:
    """Every singular value of each matrix towards 1: five quintic Newton-Schulz iterations (Jordan et al. 2024).

    Coefficients 3.4445, -4.7750, 2.0315 bring singular values from 0.002 to 1 into about [0.7, 1.2]; smaller ones grow
    485 times.
    """
    x = m_NRC.bfloat16() if m_NRC.is_cuda else m_NRC
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, poly, x, beta=3.4445)
    return (x if wide else x.mT).to(m_NRC.dtype)


def lr_factor(o: Optim, step: int, progress: float, warmup_progress: float) -> float:
    """What the peak learning rates are multiplied by at this step, in [0, 1].

    `step` counts from 0; `progress` is the share of the run that is over, in [0, 1]; `warmup_progress` the share at
    which warm-up ends. Linear warm-up over `o.warmup` steps (its first step is not zero), then the peak until `o.hold`,
    then down to `o.min_lr` at the end.
    """
    warm = min(1.0, (step + 1) / (o.warmup + 1))
    start = max(o.hold, warmup_progress)
    fall = min(1.0, max(0.0, (progress - start) / (1 - start))) if start < 1 else 0.0
    shape = {"cosine": 0.5 * (1 + math.cos(math.pi * fall)), "linear": 1 - fall}[o.schedule]
    return warm * (o.min_lr + (1 - o.min_lr) * shape)


def set_lr(optimizers: list[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * factor
