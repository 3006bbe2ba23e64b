"""Where numbers come from: versions, processor, commit. No torch."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def processor() -> str:
    """The CPU's name."""
    return _said_of_cpu("model name") or platform.processor() or platform.machine()


def vendor() -> str:
    """Who made the CPU, as it says itself (`AuthenticAMD`, `GenuineIntel`); empty where nobody knows."""
    names = ("AuthenticAMD", "GenuineIntel")
    return _said_of_cpu("vendor_id") or next((name for name in names if name in platform.processor()), "")


def _said_of_cpu(what: str) -> str:
    """What Linux says of the first CPU; empty elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith(what):
                return line.partition(":")[2].strip()
    return ""


def git() -> dict[str, Any] | None:
    """Commit of the source tree that toymha runs from, and whether it has been changed since; None in a wheel."""
    here = Path(__file__).parent.parent
    if not (here / ".git").exists():
        return None
    try:
        ask = ["git", "-C", str(here)]
        commit = subprocess.run([*ask, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5).stdout.strip()
        dirty = subprocess.run(
            [*ask, "status", "--porcelain", "-uno"], capture_output=True, text=True, timeout=5
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    return {"commit": commit, "dirty": bool(dirty.strip())} if commit else None
