"""The run folder: what it is called, what lies in it, who may write there. Only this file knows the names inside.

outputs/<name>/<what differs from the defaults>/seed=<n>/
    config.yaml        every key, resolved            run.json      identity, versions, data, machine, command
    metrics.jsonl      one row a logged step          summary.json  status and final numbers
    tokenizer.json     text <-> tokens                log.txt       a failed run's traceback
    checkpoint.pt      all that resuming needs        model.safetensors, best.safetensors   weights: last and best
    events.out...      the same rows, for TensorBoard
    heads/             what `toymha heads` found  watch/        maps of attention along training (budget.watch)
No torch at import.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
import yaml

from toymha import config
from toymha.config import Config
from toymha.provenance import git, processor, version
from toymha.schema import UserError, nearest

FILES = (
    *("config.yaml", "run.json", "metrics.jsonl", "summary.json", "tokenizer.json", "log.txt"),
    *("checkpoint.pt", "model.safetensors", "best.safetensors"),
)
STATUSES = ("running", "done", "diverged", "failed", "interrupted")
FOLDERS = ("heads", "watch", "trace")  # of `toymha heads`, of heads along training, of `toymha generate trace=true`
FINISHED = ("done", "diverged")


def identity(cfg: Config, data_sha256: str, path: Path | None = None) -> str:
    """Hash of all that decides the numbers of a run: its keys without output and machine, and the text itself.

    `path`: the run's folder, see `values_of`.
    """
    values = values_of(cfg, data_sha256, path) | {"data.path": None}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def folder(cfg: Config, label: str) -> Path:
    """Where a run goes: <output_dir>/<name>/<label>/seed=<n>."""
    return Path(cfg.output_dir) / name_of(cfg) / label / f"seed={cfg.seed}"


def name_of(cfg: Config) -> str:
    """The folder below output_dir."""
    return cfg.name or (cfg.sweep.name if cfg.sweep else "train")


@dataclass
class Run:
    """One run folder, opened for training (`Run.open`) or for reading (`Run.load`)."""

    path: Path
    config: Config
    info: dict[str, Any] = field(default_factory=dict)  # run.json

    # Opening

    @classmethod
    def open(cls, path: Path, cfg: Config, data_sha256: str, info: dict[str, Any]) -> Run:
        """The folder, locked for this process, new or to be resumed.

        Raises UserError when another process trains there, or when the folder holds a different run.
        """
        run = cls(path, cfg, describe(cfg, data_sha256, path) | info)
        created = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            run._lock = filelock.FileLock(path / ".lock")
            run._lock.acquire(timeout=5)  # the worker of a killed sweep may need a moment to stop
        except filelock.Timeout:
            raise UserError(f"{path} is being trained by another process") from None
        except OSError as e:
            raise UserError(f"{path} cannot be written: {e.strerror}") from None
        try:
            run._take_over(cfg.overwrite)
        except BaseException:
            run.release()
            if created:
                shutil.rmtree(path, ignore_errors=True)
            raise
        return run

    _lock: Any = field(default=None, repr=False)

    def _take_over(self, overwrite: bool) -> None:
        if overwrite or not (self.path / "run.json").is_file():
            self.clear()  # what lies there without run.json belongs to nobody, and must not be resumed
        else:
            conflict(self.path, self.info)
            before = read_json(self.path / "run.json")
            if self.status in FINISHED:  # it tells how the numbers came about, not who asked for them again
                self.info = before
                return
            self.info["created"] = before["created"]
        self.write_text("config.yaml", yaml.safe_dump(config.plain(self.config), sort_keys=False, allow_unicode=True))
        self.write_json("run.json", self.info)

    def clear(self) -> None:
        """Forget an earlier run in this folder: only files of ours are deleted."""
        for p in self.path.iterdir():
            temporary = p.name.startswith(".") and p.name.endswith(".tmp")
            if p.name in FILES or temporary or p.name.startswith("events.out.tfevents"):
                p.unlink()
            elif p.name in FOLDERS:
                shutil.rmtree(p)

    def release(self) -> None:
        if self._lock:
            self._lock.release()

    @classmethod
    def load(cls, path: str | Path) -> Run:
        """A run folder for reading. Raises UserError when there is none, with the nearest one that exists."""
        path = Path(path).expanduser()
        if not (path / "run.json").is_file():
            here = next((p for p in (path, *path.parents) if p.is_dir()), path)
            # Of a path that is typed from here; a whole disk would take long to walk.
            walk = path.is_dir() or (here != Path(".") and not path.is_absolute() and ".." not in path.parts)
            near = [str(p.path) for p in find(here)] if walk else []
            more = ", ..." if len(near) > 3 else ""
            hint = f"; runs in it: {', '.join(near[:3])}{more}" if near and here == path else nearest(str(path), near)
            raise UserError(f"{path} is not a run folder{hint or f' (looked in {path.absolute()})'}")
        info = read_json(path / "run.json")
        try:
            cfg = config.build(yaml.safe_load((path / "config.yaml").read_text("utf-8")))
        except (OSError, ValueError, TypeError, yaml.YAMLError, UserError) as e:
            raise UserError(f"{path / 'config.yaml'} cannot be read: {' '.join(str(e).split())[:200]}") from None
        return cls(path, cfg, info)

    @property
    def data_path(self) -> Path | None:
        """The run's own text file: `data.path` as it was meant in the folder where the run was started."""
        return Path(self.info["folder"]) / self.config.data.path if self.config.data.path else None

    # Small files

    def write_text(self, name: str, text: str) -> None:
        write_text(self.path / name, text)

    def write_json(self, name: str, value: Any) -> None:
        write_json(self.path / name, value)

    def write(self, name: str, save: Callable[[Path], Any]) -> None:
        write(self.path / name, save)

    @property
    def summary(self) -> dict[str, Any]:
        """Status and final numbers; `{}` before the first step."""
        return read_json(self.path / "summary.json") if (self.path / "summary.json").is_file() else {}

    @property
    def status(self) -> str:
        return self.summary.get("status", "running")

    def update(self, **values: Any) -> None:
        """Merge values into summary.json."""
        self.write_json("summary.json", self.summary | values)

    def restart(self, **values: Any) -> None:
        """A new summary.json; what an earlier attempt left behind is gone, its error and traceback too."""
        (self.path / "log.txt").unlink(missing_ok=True)
        self.write_json("summary.json", values)

    def rows(self) -> list[dict[str, Any]]:
        """The logged rows; a last line that a kill cut short is left out."""
        path, out = self.path / "metrics.jsonl", []
        # split("\n"): a sample may hold other characters that splitlines takes for the end of a line
        for line in filter(None, path.read_text("utf-8").split("\n") if path.is_file() else []):
            try:
                out.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return out

    # Weights and state (torch from here on)

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        import torch

        self.write("checkpoint.pt", lambda p: torch.save(state, p))

    def load_checkpoint(self) -> dict[str, Any] | None:
        """The state of the last checkpoint, on the CPU; None when there is none."""
        import torch

        path = self.path / "checkpoint.pt"
        return torch.load(path, map_location="cpu", weights_only=True) if path.is_file() else None

    def save_weights(self, name: str, state: dict[str, Any], **about: Any) -> None:
        """`name`: model or best."""
        from safetensors.torch import save

        content = save(
            {k: v.detach().cpu().contiguous() for k, v in state.items()}, {k: str(v) for k, v in about.items()}
        )
        self.write(f"{name}.safetensors", lambda p: p.write_bytes(content))

    def load_weights(self, name: str) -> dict[str, Any]:
        """Raises UserError when the run has not got that far."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        path = self.weights_file(name)
        try:
            return load_file(path)
        except SafetensorError as e:
            raise UserError(f"{path} is damaged: {e}") from None

    def weights_file(self, name: str) -> Path:
        path = self.path / f"{name}.safetensors"
        if not path.is_file():
            raise UserError(f"{self.path} has no {path.name} yet (status {self.status})")
        return path


def write(path: Path, save: Callable[[Path], Any]) -> None:
    """Write by `save(temporary path)`, then rename: the file is whole or it is the old one."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        save(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    write(path, lambda p: p.write_text(text, "utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find(root: str | Path) -> Iterator[Run]:
    """Every run folder at or below `root`, in order of path, damaged ones left out; its `config` is not read."""
    for p in sorted(Path(root).rglob("run.json"), key=lambda p: natural(str(p))):
        with contextlib.suppress(UserError):
            run = Run(p.parent, None, read_json(p))  # type: ignore[arg-type]
            _ = run.summary
            yield run


def natural(text: str) -> list[Any]:
    """A sort key that puts n_head=2 before n_head=16."""
    out: list[Any] = []
    for part in re.split(r"([=,/]|\d+(?:\.\d+)?(?:e-?\d+)?)", text):
        number = part[:1].isdigit()
        out.append((0, float(part), "") if number else (1, 0.0, part))
    return out


def read_json(path: Path) -> dict[str, Any]:
    """Raises UserError for a file that is missing or damaged."""
    needed = ("identity", "values") if path.name == "run.json" else ()
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read: {e}") from None
    if not isinstance(content, dict) or any(k not in content for k in needed):
        raise UserError(f"{path} is damaged: {', '.join(needed) or 'a table'} expected")
    return content


def conflict(path: Path, info: dict[str, Any]) -> None:
    """Raise UserError when the folder holds a run of another identity, showing the keys that differ."""
    there = read_json(path / "run.json")
    if there["identity"] == info["identity"]:
        return
    old, new = there["values"], info["values"]
    differing = [f"{k}={old.get(k)} there, {new.get(k)} here" for k in new | old if old.get(k) != new.get(k)]
    if old.get("data.sha256") != new.get("data.sha256"):
        differing = ["the text has another data.sha256", *(d for d in differing if not d.startswith("data.sha256"))]
    if not differing or old.keys() != new.keys():
        differing.insert(0, "made by an earlier version of toymha, with other keys")
    raise UserError(
        f"{path} holds another run ({'; '.join(differing[:4])}): choose name=..., or overwrite=true to replace it"
    )


def state_of(path: Path, cfg: Config, data_sha256: str) -> str:
    """`new`, or the status of the run in the folder. Raises UserError on a different run, unless cfg.overwrite."""
    if cfg.overwrite or not (path / "run.json").is_file():
        return "new"
    values = values_of(cfg, data_sha256, path)
    conflict(path, {"identity": identity(cfg, data_sha256, path), "values": values})
    return Run(path, cfg).status


def values_of(cfg: Config, data_sha256: str, path: Path | None = None) -> dict[str, Any]:
    """The keys with their values; of `start` the weights themselves. Where they have gone since the run in the folder
    `path` began, it is taken at its word. Raises UserError where nothing is known of them."""
    start = None
    if cfg.start:
        try:
            start = weights_sha256(cfg.start)
        except UserError:
            known = read_json(path / "run.json")["values"] if path and (path / "run.json").is_file() else {}
            if cfg.overwrite or not known.get("start"):
                raise
            start = known["start"]
    return config.identity_values(cfg) | {"start": start, "data.sha256": data_sha256}


def weights_sha256(path: str | Path) -> str:
    """Of the last weights of the run folder at `path`. Raises UserError where there are none."""
    return hashlib.sha256(Run.load(path).weights_file("model").read_bytes()).hexdigest()[:16]


def describe(cfg: Config, data_sha256: str, path: Path) -> dict[str, Any]:
    """The contents of run.json that do not depend on torch."""
    return {
        "identity": identity(cfg, data_sha256, path),
        "values": values_of(cfg, data_sha256, path),
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": shlex.join(sys.argv),
        "folder": os.getcwd(),
        "versions": {"python": platform.python_version()}
        | {p: version(p) for p in ("toymha", "torch", "hydra-core", "numpy")},
        "machine": {
            "host": platform.node(),
            "system": platform.platform(),
            "cpu": processor(),
            "cores": cores(),
        },
        "git": git(),
    }
