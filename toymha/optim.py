"""Optimizers, parameter groups, the learning-rate schedule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from toymha.config import Config, Optim
from toymha.device import number_type
from toymha.team import ALONE, Team


class Optimizer:
    """Parameters in groups, a state of each, and both as plain values for a checkpoint, in the form of torch.optim's.

    Not torch.optim.Optimizer: making one imports torch's compiler, which takes longer than all else before the first
    step (1.7 of 4.3 s, measured with torch 2.13 on two cores).
    """

    def __init__(self, groups: Iterable[dict[str, Any]], **defaults: Any) -> None:
        self.defaults = defaults
        self.param_groups = [defaults | group for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {p: {} for p in self.params}

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, team: Team = ALONE) -> None:
        """Move each parameter that has a gradient."""
        raise NotImplementedError

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        number = {p: i for i, p in enumerate(self.params)}
        groups = [group | {"params": [number[p] for p in group["params"]]} for group in self.param_groups]
        return {"state": {number[p]: state for p, state in self.state.items() if state}, "param_groups": groups}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Raises ValueError where it is that of other parameters."""
        if [len(g["params"]) for g in saved["param_groups"]] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError("the saved state belongs to other parameters")
        for group, before in zip(self.param_groups, saved["param_groups"], strict=True):
            group.update({k: v for k, v in before.items() if k in group and k != "params"})
        for i, p in enumerate(self.params):
            kept = saved["state"].get(i, {})
            self.state[p] = {k: x.to(p.device, copy=True) for k, x in kept.items()}


class AdamW(Optimizer):
    """Loshchilov & Hutter 2019, by torch's fused kernel."""

    def __init__(self, groups: Iterable[dict[str, Any]], lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps)

    @torch.no_grad()
    def step(self, team: Team = ALONE) -> None:
        with team.resting():
            self._step()

    def _step(self) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:
                if not self.state[p]:
                    # The fused kernel counts steps where the parameter is.
                    zero = torch.zeros((), dtype=torch.float32, device=p.device)
                    self.state[p] = {"step": zero, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            adamw(
                params,
                [p.grad for p in params if p.grad is not None],
                [self.state[p]["exp_avg"] for p in params],
                [self.state[p]["exp_avg_sq"] for p in params],
                [],
                [self.state[p]["step"] for p in params],
                fused=True,
                amsgrad=False,
                maximize=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
            )


def make_optimizers(model: nn.Module, c: Config, precision: str) -> list[Optimizer]:
    """Each parameter in exactly one group: matrices are decayed, vectors not; Muon takes the matrices inside blocks.
    `precision`: of the run, fp32 or bf16."""
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
    optimizers: list[Optimizer] = [
        AdamW([g for g in groups if g["params"]], o.lr, betas=(o.betas[0], o.betas[1]), eps=o.eps)
    ]
    if not for_muon:
        return optimizers
    assert o.muon_lr is not None and o.muon_momentum is not None and o.muon_weight_decay is not None  # config checks
    return [*optimizers, Muon(for_muon, o.muon_lr, o.muon_momentum, o.muon_weight_decay, number_type(precision))]


class Muon(Optimizer):
    """Momentum, orthogonalised by Newton-Schulz (Jordan et al. 2024); steps are scaled by sqrt(max(1, rows / columns)).

    The same equation as torch.optim.Muon, with two differences: matrices of one shape are orthogonalised together in
    batched products, which is about speed, and their type is the run's, where torch's is always bf16, whose products
    take seconds a step on a CPU that has none; on one with AMX they were 1.2 to 5 times as fast as those in fp32.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        momentum: float,
        weight_decay: float,
        dtype: torch.dtype,
    ) -> None:
        """`dtype`: of the numbers that are orthogonalised; parameters and momentum keep theirs."""
        super().__init__([{"params": list(params)}], lr=lr, momentum=momentum, weight_decay=weight_decay)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, team: Team = ALONE) -> None:
        jobs = []
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
                    if "momentum" not in self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
            for params in by_shape.values():
                each = -(-len(params) // team.n)
                jobs += [(group, params[i : i + each]) for i in range(0, len(params), each)]
        for _ in team.map(self._step_alike, jobs):
            pass

    def _step_alike(self, job: tuple[dict[str, Any], list[Tensor]]) -> None:
        """Move matrices of one shape."""
        group, params = job
        rows, columns = params[0].shape
        moments = [self.state[p]["momentum"] for p in params]
        grads = [p.grad for p in params if p.grad is not None]
        torch._foreach_lerp_(moments, grads, 1 - group["momentum"])
        nesterov = torch._foreach_lerp(grads, moments, group["momentum"])
        update_NRC = orthogonalise(torch.stack(nesterov), self.dtype)
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, list(update_NRC), alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))


ITERATIONS = 5
A, B, C = 3.4445, -4.7750, 2.0315


def orthogonalise(m_NRC: Tensor, dtype: torch.dtype) -> Tensor:
    """Every singular value of each matrix towards 1: five quintic Newton-Schulz iterations (Jordan et al. 2024), in
    this type of numbers.

    The coefficients bring singular values from 0.002 to 1 into about [0.7, 1.2]; smaller ones grow
    485 times.
    """
    x = m_NRC.to(dtype)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    x = _iterated_by_gram(x) if x.shape[-1] >= 2 * x.shape[-2] and x.dtype == torch.float32 else _iterated(x)
    return (x if wide else x.mT).to(m_NRC.dtype)


def _iterated(x: Tensor) -> Tensor:
    """x becomes (a + b x x^T + c (x x^T)^2) x, so many times."""
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x


def _iterated_by_gram(x: Tensor) -> Tensor:
    """The same for wide matrices, by products of small square ones: with P = a + b G + c G^2 of the Gram matrix
    G = x x^T, x becomes P x and G becomes P G P, so that x is needed at the beginning and at the end alone. Of matrices
    four times as wide as high it takes 25 products of squares where the other takes 45.
    """
    gram = x @ x.mT
    eye = torch.eye(gram.shape[-1], dtype=x.dtype, device=x.device)
    whole = eye
    for i in range(ITERATIONS):
        poly = torch.baddbmm(gram, gram, gram, beta=B, alpha=C) + A * eye
        whole = poly @ whole if i else poly
        gram = poly @ gram @ poly if i < ITERATIONS - 1 else gram
    return whole @ x


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


def set_lr(optimizers: list[Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = optimizer.defaults["lr"] * factor
