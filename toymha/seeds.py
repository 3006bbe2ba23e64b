"""Random streams. Each use of chance has its own, so that none of them shifts another."""

from __future__ import annotations

import zlib

import torch


def stream_seed(seed: int, *what: object) -> int:
    """A 32-bit seed (torch's CPU generator reads no more bits) for the stream named `what` of this run's seed."""
    return zlib.crc32(":".join(map(str, (seed, *what))).encode())


def stream(seed: int, *what: object) -> torch.Generator:
    """A CPU generator for one named stream, such as stream(0, "batch", step)."""
    return torch.Generator().manual_seed(stream_seed(seed, *what))
