"""From logits to a token: repetition penalty, temperature, top-k, top-p, min-p, in this order, and one draw.

It is Hugging Face's order. Each function takes logits over its last axis, of one distribution or of a batch of them,
and gives logits of the same shape, with -inf for a token that is out. The most likely token is never out; of equally
likely ones the first counts as the most likely. V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from toymha.schema import UserError

OUT = float("-inf")


@dataclass(frozen=True)
class Rules:
    """How the next token is chosen. Raises UserError for a value that has no meaning."""

    temperature: float = 0.8  # 0 = the most likely token
    top_k: int | None = None  # None or 0 = all
    top_p: float | None = None  # None or 1 = all
    min_p: float | None = None  # None or 0 = all
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, o: Any) -> Rules:
        """Those among the options of a command."""
        return cls(**{f.name: getattr(o, f.name) for f in fields(cls)})

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0, math.inf),
            ("top_k", 0, math.inf),
            ("top_p", 0, 1),
            ("min_p", 0, 1),
            ("repetition_penalty", 0, math.inf),
        ):
            value = getattr(self, name)
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                limits = f"at least {low}" if high == math.inf else f"{low} to {high}"
                raise UserError(f"{name}={value}: must be {limits}")
        if self.repetition_penalty == 0:
            raise UserError("repetition_penalty=0: must be above 0; 1 is none")


def keep(logits_V: Tensor, rules: Rules, seen_V: Tensor) -> Tensor:
    """kept_V, float64: its softmax is what the next token is drawn from; the largest is 0, what is out -inf.

    `seen_V`: True for tokens that are in the text already. Raises UserError for logits that are no numbers.
    """
    check(logits_V)
    return list(stages(logits_V, rules, seen_V).values())[-1]


def stages(logits_V: Tensor, rules: Rules, seen_V: Tensor) -> dict[str, Tensor]:
    """Rule -> the logits behind it, float64, in the order in which they act."""
    out = {"repetition_penalty": penalise(logits_V.double(), seen_V, rules.repetition_penalty)}
    out["temperature"] = temper(out["repetition_penalty"], rules.temperature)
    out["top_k"] = top_k(out["temperature"], rules.top_k)
    out["top_p"] = top_p(out["top_k"], rules.top_p)
    out["min_p"] = min_p(out["top_p"], rules.min_p)
    return out


def check(logits_V: Tensor) -> None:
    """Raises UserError where a distribution cannot be made of these."""
    largest = logits_V.amax(-1).flatten().tolist()  # NaN where one of them is
    if not all(map(math.isfinite, largest)):
        raise UserError("the model's logits are not finite, so no token can be drawn: the run has diverged")


def penalise(logits_V: Tensor, seen_V: Tensor, penalty: float) -> Tensor:
    """Keskar et al. 2019, section 4.1, as Hugging Face computes it: positive logits of tokens that have been seen are
    divided by the penalty, negative ones multiplied, so that either way they become less likely (if it is above 1)."""
    if penalty == 1:
        return logits_V
    most = torch.finfo(logits_V.dtype).max
    changed_V = torch.where(logits_V < 0, logits_V * penalty, logits_V / penalty).clamp(-most, most)
    return torch.where(seen_V & (logits_V > OUT), changed_V, logits_V)


def temper(logits_V: Tensor, temperature: float) -> Tensor:
    """(logits - their largest) / temperature. At 0 the limit: the most likely token alone, the first of equal ones.

    The largest is taken off first, so that no division overflows upwards, however low the temperature.
    """
    if temperature == 0:
        logits_V, temperature = top_k(logits_V, 1), 1.0
    return (logits_V - logits_V.amax(-1, keepdim=True)) / temperature


def top_k(logits_V: Tensor, k: int | None) -> Tensor:
    """The k most likely (Fan et al. 2018, section 5.4): exactly k, the first of equal ones. More than V are V.

    Hugging Face keeps all that are as likely as the k-th, which may be more than k.
    """
    if not k or k >= logits_V.shape[-1]:
        return logits_V
    order_V = logits_V.sort(dim=-1, descending=True, stable=True).indices
    return logits_V.scatter(-1, order_V[..., k:], OUT)


def top_p(logits_V: Tensor, p: float | None) -> Tensor:
    """The nucleus (Holtzman et al. 2020, section 3.1): the smallest set of most likely tokens whose probability
    reaches p. So a token stays while those before it have less than p together; the first always does."""
    if p is None or p >= 1:
        return logits_V
    sorted_V, order_V = logits_V.sort(dim=-1, descending=True, stable=True)
    probs_V = sorted_V.softmax(-1)
    before_V = probs_V.cumsum(-1) - probs_V
    out_V = before_V >= p
    out_V[..., 0] = False
    return logits_V.masked_fill(torch.zeros_like(out_V).scatter(-1, order_V, out_V), OUT)


def min_p(logits_V: Tensor, p: float | None) -> Tensor:
    """Nguyen et al. 2024, section 3: tokens at least p times as likely as the most likely one."""
    if not p:
        return logits_V
    # The logit of the most likely is subtracted on the left, where it is exact for the most likely itself.
    return logits_V.masked_fill(logits_V - logits_V.amax(-1, keepdim=True) < math.log(p), OUT)


def choose(kept_V: Tensor, generator: torch.Generator) -> int:
    """One draw by the inverse of the distribution function, in float64, with one number of the generator, on the CPU.

    A token that is out is never drawn.
    """
    probs_V = kept_V.double().softmax(-1)
    reach_V = probs_V.cumsum(-1)
    at = torch.rand((), dtype=torch.float64, generator=generator) * reach_V[-1]
    # The first token that reaches beyond `at` has a probability above zero, or it would reach no further than the last.
    chosen = int(torch.searchsorted(reach_V, at, right=True))
    if chosen == len(reach_V):  # rounding has put `at` on the very end
        chosen = int(probs_V.nonzero()[-1])
    return chosen
