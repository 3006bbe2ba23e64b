"""Laws of the machine's arithmetic: fp32 is fp32 whichever library multiplies, and each CPU gets the right one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from conftest import make

from toymha import device, provenance
from toymha.batches import sent

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_before():
    yield
    torch.set_float32_matmul_precision("highest")


def machine(monkeypatch, capability="AVX512", vendor="AuthenticAMD", amx=False, error=1e-7):
    """Of these properties; `error`: of its products in precision "medium", null for what this one's have."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(device, "vendor", lambda: vendor)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    if error is not None:
        monkeypatch.setattr(device, "product_error", lambda: error)


@pytest.mark.parametrize(
    "here, setting",
    [
        ({}, "medium"),
        ({"capability": "AVX512_VNNI"}, "medium"),
        ({"capability": "AVX2"}, "highest"),
        ({"vendor": "GenuineIntel"}, "highest"),
        ({"vendor": ""}, "highest"),
        ({"amx": True}, "highest"),
        ({"error": 1e-3}, "highest"),
    ],
)
def test_only_where_it_is_faster_and_fp32_does_onednn_multiply(monkeypatch, here, setting):
    """AMD with AVX-512 and without AMX; not where a product shows that it rounds to bf16."""
    machine(monkeypatch, **here)
    device.choose_products(CPU)
    assert torch.get_float32_matmul_precision() == setting


def test_whatever_is_chosen_fp32_stays_fp32(monkeypatch):
    """By real products: where flags and vendor are wrong about "medium", which rounds to bf16 on a CPU with AMX."""
    machine(monkeypatch, error=None)
    device.choose_products(CPU)
    assert device.product_error() < device.FP32_ERROR / 10


def test_a_gpu_keeps_fp32(monkeypatch):
    """There the same setting would allow bf16."""
    machine(monkeypatch)
    device.choose_products(torch.device("cuda"))
    assert torch.get_float32_matmul_precision() == "highest"


def test_the_check_tells_fp32_from_bf16():
    """Products on this machine in fp32; and those of bf16 are seen."""
    assert device.product_error() < device.FP32_ERROR / 10
    with torch.autocast("cpu", torch.bfloat16):
        assert device.product_error() > 10 * device.FP32_ERROR


def test_a_run_sets_it_up(monkeypatch):
    machine(monkeypatch)
    before = torch.get_num_threads()
    device.set_up(make("device=cpu"))
    torch.set_num_threads(before)
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("T, S, fused", [(16, 16, False), (300, 300, True), (1, 16, True)])
def test_with_onednn_short_contexts_take_explicit_attention(T, S, fused):
    """A single new token does not: it has few products whichever way."""
    from toymha.model.attention import Attention

    attn = Attention(make("seq_len=512"))
    assert attn.can_fuse(T, S)
    torch.set_float32_matmul_precision("medium")
    assert attn.can_fuse(T, S) == fused


@pytest.mark.parametrize("setting", ["highest", "medium"])
@pytest.mark.parametrize("S, fused", [(16, False), (512, False), (513, True)])
def test_in_bf16_short_contexts_take_explicit_attention_where_a_gradient_is_wanted(S, fused, setting):
    """The kernel's backward pass is slow there, not its forward pass, whichever library multiplies in fp32."""
    from toymha.model.attention import Attention

    attn = Attention(make("seq_len=1024"))
    torch.set_float32_matmul_precision(setting)
    with device.arithmetic("bf16", CPU):
        assert attn.can_fuse(S, S) == fused
        with torch.inference_mode():
            assert attn.can_fuse(S, S)


def test_the_maker_of_the_cpu(tmp_path, monkeypatch):
    said = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: Some CPU @ 2 GHz\n"
    (tmp_path / "cpuinfo").write_text(said)
    monkeypatch.setattr(provenance, "Path", lambda _: tmp_path / "cpuinfo")
    assert provenance.vendor() == "AuthenticAMD" and provenance.processor() == "Some CPU @ 2 GHz"
    (tmp_path / "cpuinfo").unlink()
    for said, found in (("AMD64 Family 26 Model 68, AuthenticAMD", "AuthenticAMD"), ("arm", "")):
        monkeypatch.setattr(provenance.platform, "processor", lambda said=said: said)
        assert provenance.vendor() == found


@pytest.mark.parametrize(
    "largest, asked",
    [
        (2**30, [(-3, 2**30), (-1, 2**31 - 1), (-8, 1)]),
        (2**25, [(-3, 2**30), (-3, 2**25), (-1, 2**31 - 1), (-8, 1)]),  # glibc before 2.35
        (0, [(-3, 2**30), (-3, 2**25)]),  # without a threshold the rest would do harm
    ],
)
def test_memory_is_kept_as_far_as_the_library_allows(monkeypatch, largest, asked):
    calls = []

    def mallopt(parameter, value):
        calls.append((parameter, value))
        return int(parameter != -3 or value <= largest)

    monkeypatch.setattr(device.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=mallopt))
    device.keep_memory()
    assert calls == asked


def test_a_library_without_the_switch_is_left_alone(monkeypatch):
    monkeypatch.setattr(device.ctypes, "CDLL", lambda _: SimpleNamespace())
    device.keep_memory()


def test_only_what_is_elsewhere_is_sent(monkeypatch):
    """What lies on the GPU already is not pinned, which would be an error."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: pinned.append(x) or x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device, **how: (x, how))
    x, gpu = torch.zeros(2), SimpleNamespace(type="cuda")
    assert sent(x, gpu) == (x, {"non_blocking": True}) and pinned == [x]
    assert sent(torch.zeros(2, device="meta"), gpu)[1] == {} and len(pinned) == 1
    assert sent(x, CPU)[1] == {} and len(pinned) == 1
