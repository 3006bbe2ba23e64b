"""What a phase of inference must compute and move, how fast this machine can do either, and which of the two bounds it.

The roofline model (Williams, Waterman & Patterson 2009): work of F FLOPs that moves M bytes takes at least
max(F / products a second, M / bandwidth). Which of them is the larger is decided by the arithmetic intensity F / M.

B sequences, T tokens read at once, S tokens of context (the new one included), V vocabulary, C dim.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from toymha import cost
from toymha.config import Config
from toymha.device import arithmetic, number_type
from toymha.timing.machine import last_cache, synchronize

STORED = 4  # bytes of a weight: they are fp32 in either precision, and autocast makes its copies from them
OVERHEAD = 0.3  # of the nearer bound: a phase that reaches less than this share waits for something else
LARGE = 256 * 2**20  # bytes of the array that is read for the bandwidth, where the last cache is no larger than 64 MiB
SIZES = (256, 512, 1024, 2048, 4096, 8192)  # of the square matrices that are multiplied
LONGEST = 0.5  # seconds of one product: larger ones, and the sizes after it, are left out
BEST_OF = 5


# What has to be done


@dataclass(frozen=True)
class Work:
    """`flops` by the convention of cost.flops; `bytes` that must pass between memory and processor; `resident`: bytes
    that the phase comes back to, weights and keys and values."""

    flops: float
    bytes: float
    resident: float

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes


def read_weights(c: Config, vocab_size: int) -> int:
    """Numbers of the weights that a forward pass reads as a whole: all matrices, biases and norms, the head. Of a token
    embedding that is not the head, and of learned positions, it reads a few rows, which are left out."""
    parts = cost.parameters(c, vocab_size)
    head = (c.vocab_size or vocab_size) * c.dim if c.tie_embeddings else 0
    return sum(parts.values()) - parts["embedding"] + head


def reading(c: Config, vocab_size: int, B: int, T: int, number: int = 4) -> Work:
    """One pass over T tokens of B sequences, with the logits of the last position alone: prefill, and what each new
    token costs without a cache. `number`: bytes of a key's or value's number, and of a logit's.

    Moved: each weight once, keys and values once each way, the logits. Other activations are not counted.
    """
    parts = cost.flops(c, vocab_size, T)
    flops = sum(parts.values()) - parts["head"] + parts["head"] // T
    weights, kv = read_weights(c, vocab_size) * STORED, cost.kv_bytes(c, T, B, number)
    return Work(B * flops, weights + 2 * kv + _logits(c, vocab_size, B, number), weights + kv)


def decoding(c: Config, vocab_size: int, B: int, S: float, number: int = 4) -> Work:
    """One token for each of B sequences that end at context S, with a cache; S may be a mean, all of it is linear in S.

    FLOPs: the matrices for one token; scores and mixing with all S keys. Moved: each weight once for all sequences, the
    S keys and values of each sequence read, one written, the logits (Shazeer 2019, section 2.4).
    """
    parts = cost.flops(c, vocab_size, 1)
    flops = sum(parts.values()) + (S - 1) * (parts["scores"] + parts["mixing"])
    weights, one = read_weights(c, vocab_size) * STORED, cost.kv_bytes(c, 1, B, number)
    return Work(B * flops, weights + (S + 1) * one + _logits(c, vocab_size, B, number), weights + S * one)


def _logits(c: Config, vocab_size: int, B: int, number: int) -> int:
    return B * (c.vocab_size or vocab_size) * number


# What the machine can do


@dataclass(frozen=True)
class Rates:
    """Measured here, by the best of several: bytes a second from memory and (null: its size is unknown) from the last
    cache, FLOP a second of matrix products in each precision."""

    bandwidth: float
    products: dict[str, float]
    cache_size: int | None = None
    cache_bandwidth: float | None = None


@dataclass(frozen=True)
class Verdict:
    """How near a phase comes to the machine's rates; `bound`: memory, cache, compute, or overhead where it comes near
    to none; `nearer`: the one of the first three that it would meet first."""

    bytes_per_s: float
    flops_per_s: float
    of_bandwidth: float  # of the memory's: above 1 where the bytes come from a cache
    of_products: float
    cache_resident: bool | None
    nearer: str
    reached: float  # the shortest possible time by the roofline, as a share of what it took
    bound: str


def judge(work: Work, seconds: float, rates: Rates, precision: str) -> Verdict:
    """`seconds`: what `work` took in arithmetic of `precision`."""
    resident = None if rates.cache_size is None else work.resident < rates.cache_size
    from_cache = bool(resident and rates.cache_bandwidth)
    bandwidth = rates.cache_bandwidth if from_cache and rates.cache_bandwidth else rates.bandwidth
    moving, computing = work.bytes / bandwidth, work.flops / rates.products[precision]
    nearer = "compute" if computing > moving else "cache" if from_cache else "memory"
    reached = max(moving, computing) / seconds
    bytes_per_s, flops_per_s = work.bytes / seconds, work.flops / seconds
    return Verdict(
        bytes_per_s,
        flops_per_s,
        bytes_per_s / rates.bandwidth,
        flops_per_s / rates.products[precision],
        resident,
        nearer,
        reached,
        nearer if reached >= OVERHEAD else "overhead",
    )


def measure_rates(device: torch.device, precisions: list[str]) -> Rates:
    """In this process, with its threads: what else the machine does meanwhile is in it."""
    size = last_cache(device)
    large = max(LARGE, 4 * (size or 0))
    within = reading_rate(device, size // 4) if size else None
    rate = max(reading_rate(device, large), copying_rate(device, large))
    # Where the rest of a machine uses the cache too, it may be no faster than the memory is.
    return Rates(rate, {p: product_rate(device, p) for p in precisions}, size, max(within, rate) if within else None)


def reading_rate(device: torch.device, size: int) -> float:
    """Bytes a second while an array of `size` bytes is summed; a small one several times: it lies in a cache."""
    numbers = torch.ones(size // 4, device=device)
    again = max(1, LARGE // size)
    return again * numbers.nbytes / best(lambda: [numbers.sum() for _ in range(again)], device)


def copying_rate(device: torch.device, size: int) -> float:
    """Bytes a second, read and written, while one array of `size` bytes is copied to another."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best(lambda: target.copy_(source), device)


@torch.inference_mode()
def product_rate(device: torch.device, precision: str) -> float:
    """FLOP a second of the fastest square matrix product, 2 a multiply-add."""
    rate = 0.0
    with arithmetic(precision, device):
        for n in SIZES:
            if rate and 2 * n**3 / rate > LONGEST:
                break
            a = torch.ones(n, n, device=device, dtype=number_type(precision))
            rate = max(rate, 2 * n**3 / best(lambda a=a: a @ a, device))  # type: ignore[misc]
    return rate


def best(work: Callable[[], Any], device: torch.device) -> float:
    """Seconds of the fastest of several calls, after one that is not counted."""
    seconds = []
    for _ in range(1 + BEST_OF):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
