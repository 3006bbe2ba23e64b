"""Where and in what arithmetic a run computes."""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import Any

import torch

from toymha.config import Config
from toymha.provenance import vendor
from toymha.runs import cores
from toymha.schema import UserError, nearest


def pick_device(name: str) -> torch.device:
    """`auto`: cuda, else mps, else cpu. Raises UserError for a device that is not here."""
    here = ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available() + ["cpu"]
    if name == "auto":
        return torch.device(here[0])
    kind, _, index = name.partition(":")
    if kind not in ("cuda", "mps", "cpu"):
        raise UserError(
            f"device={name}: must be one of auto, cuda, mps, cpu{nearest(kind, ('auto', 'cuda', 'mps', 'cpu'))}"
        )
    if kind not in here:
        raise UserError(f"device={name}: this machine has no {kind}; here: {', '.join(here)}")
    count = torch.cuda.device_count() if kind == "cuda" else 1
    if index and not (index.isdigit() and int(index) < count):
        raise UserError(f"device={name}: valid here: {', '.join(f'{kind}:{i}' for i in range(count))}")
    return torch.device(name)


def pick_precision(name: str, device: torch.device) -> str:
    """`auto`: bf16 where the hardware multiplies it fast, else fp32. Raises UserError where bf16 cannot run."""
    if name != "auto":
        if name == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise UserError("precision=bf16: this GPU has no bf16; use precision=fp32")
        if name == "bf16" and device.type == "mps" and not torch.backends.mps.is_macos_or_newer(14, 0):
            raise UserError("precision=bf16: on mps it needs macOS 14; use precision=fp32")
        return name
    return "bf16" if has_fast_bf16(device) else "fp32"


def has_fast_bf16(device: torch.device) -> bool:
    """Whether bf16 products are done by the hardware; elsewhere they are emulated, over 100 times slower than fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        return any(getattr(torch.cpu, f, bool)() for f in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return False


def arithmetic(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context in which forward passes run; weights stay fp32."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()


def number_type(precision: str) -> torch.dtype:
    """Of what is multiplied."""
    return torch.bfloat16 if precision == "bf16" else torch.float32


# Numbers of mallopt's parameters, from malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8


def keep_memory() -> None:
    """Let this process keep the memory that it frees: each training step needs the same again.

    glibc gives large blocks back to the system, and gets them anew page by page, each filled with zeros: on a CPU a
    sixth of the time of a step of 4,096 tokens. One arena, because those of further threads cannot hold large blocks.
    Other C libraries have no such switch, or no need of one.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        set_to = ctypes.CDLL(None).mallopt
        # glibc before 2.35 takes no threshold above 32 MiB, and says so by 0. Without one the rest would do harm: it
        # ends what glibc adjusts of itself.
        if any(set_to(M_MMAP_THRESHOLD, size) for size in (2**30, 2**25)):
            set_to(M_TRIM_THRESHOLD, 2**31 - 1)
            set_to(M_ARENA_MAX, 1)


def slow_products() -> bool:
    """Whether torch's own library for fp32 products, MKL, is slow here: on AMD's CPUs with AVX-512 it reaches less than
    half of what oneDNN does (105 against 240 GFLOP/s a core of a Zen 5). Not with AMX: there oneDNN rounds to bf16."""
    wide = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return wide and vendor() == "AuthenticAMD" and not torch.cpu._is_amx_tile_supported()


FP32_ERROR = 1e-5  # of a product's largest number; in fp32 it is about 1e-7, in bf16 1e-3


def product_error() -> float:
    """The largest error of fp32 products, as a share of their largest number: of a large one, of one with a narrow
    side, of a batch of small ones."""
    generator, worst = torch.Generator().manual_seed(0), 0.0
    for left, right in (((256, 256), (256, 256)), ((512, 64), (64, 192)), ((8, 64, 32), (8, 32, 64))):
        a, b = (torch.rand(shape, generator=generator) - 0.5 for shape in (left, right))
        exact = a.double() @ b.double()
        worst = max(worst, ((a @ b - exact).abs().max() / exact.abs().max()).item())
    return worst


def choose_products(device: torch.device) -> None:
    """Let oneDNN multiply fp32 matrices where that is faster, and is fp32.

    torch hands them over in its precision "medium", which allows oneDNN to round to bf16. With AMX it does; on a Zen 5,
    which multiplies bf16 by AVX-512 too, it does not (its errors are those of MKL), and if another CPU should, it is
    seen here. Attention looks at this setting too.
    """
    torch.set_float32_matmul_precision("highest")
    if device.type == "cpu" and slow_products():
        torch.set_float32_matmul_precision("medium")
        if product_error() > FP32_ERROR:
            torch.set_float32_matmul_precision("highest")


def set_up(c: Config) -> tuple[torch.device, str]:
    """Device and precision of this run, with its share of the CPU set: `threads`, else OMP_NUM_THREADS, else all."""
    device = pick_device(c.device)
    if device.type == "cpu":
        keep_memory()
    said = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(c.threads or (int(said) if said.isdigit() and int(said) else cores()))
    choose_products(device)
    return device, pick_precision(c.precision, device)
