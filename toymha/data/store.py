"""The cache folder: downloads with checksums, prepared texts, token tensors. Whatever is lost here is made again.

Nothing depends on the folder being writable, except downloads; nothing in it is believed without a checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toymha.schema import UserError


@dataclass(frozen=True)
class Remote:
    """One file of a data set on the internet, and the addresses that hold a copy, in the order they are tried."""

    name: str
    sha256: str
    urls: tuple[str, ...]


def cache_dir() -> Path:
    """The folder in `TOYMHA_CACHE`, else the one where this system keeps caches. It need not exist yet."""
    if folder := os.environ.get("TOYMHA_CACHE"):
        return Path(folder).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("toymha", appauthor=False))


def digest(*parts: Any) -> str:
    """A short name for what a cached file was made from: a hash of values that JSON can write."""
    return hashlib.sha256(
        json.dumps(parts, sort_keys=True, ensure_ascii=False).encode("utf-8", "surrogatepass")
    ).hexdigest()[:24]


def write(path: Path, content: bytes) -> None:
    """Put a file into the cache in one step, or not at all: a full or read-only disk is no reason to stop."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix="unfinished-", delete=False) as f:
            temporary = f.name
            f.write(content)
        os.replace(temporary, path)
    except OSError:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def prepared(name: str, key: str, make: Callable[[], str]) -> str:
    """`make()`, or what it gave earlier for the same key: a file whose first line is the sha256 of the rest."""
    path = cache_dir() / "texts" / f"{name}-{key}.txt"
    with contextlib.suppress(OSError, ValueError):
        checksum, _, body = path.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() == checksum:
            return body.decode("utf-8")
    text = make()
    body = text.encode("utf-8")
    write(path, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    return text


def local(data_set: str, remote: Remote) -> Path:
    """Where the file lies once it is downloaded."""
    return cache_dir() / "downloads" / data_set / remote.name


def download(data_set: str, remote: Remote) -> Path:
    """The local copy of a file, fetched from the first address that gives the right content.

    A copy that is already here is checked again. Raises UserError naming every address tried and what went wrong there.
    """
    import pooch  # type: ignore[import-untyped]

    path = local(data_set, remote)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise UserError(
            f"cannot write to the cache folder {path.parent} ({e.strerror}); set TOYMHA_CACHE to another folder"
        ) from None
    pooch.get_logger().setLevel("ERROR")
    downloader = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=20, headers={"User-Agent": "toymha"})
    tried = []
    for url in remote.urls:
        try:
            pooch.retrieve(url, f"sha256:{remote.sha256}", remote.name, path.parent, downloader=downloader)
            return path
        except (
            Exception
        ) as e:  # requests, urllib3 and pooch each have their own; any of them means: try the next address
            tried.append(f"{url} ({_reason(e)})")
    raise UserError(
        f"data={data_set}: cannot download {remote.name}; tried {', '.join(tried)}; "
        "when offline, use a text file you have (data=file data.path=FILE), or data=pydoc, which needs nothing"
    )


def _reason(e: Exception) -> str:
    if "hash" in str(e) and isinstance(e, ValueError):
        return "wrong checksum"
    status = getattr(getattr(e, "response", None), "status_code", None)
    return f"status {status}" if status else type(e).__name__
