"""What Hydra composes, kept in the cache folder: reading it back takes a hundredth of the time, and no Hydra.

It is kept under a hash of all that could change it, so that nothing in the folder can be out of date; whatever is
damaged there is composed again, and a folder that cannot be written is no error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from toymha.config import GROUPS, conf_dir
from toymha.data import store
from toymha.provenance import version
from toymha.schema import UserError

Composed = tuple[dict[str, Any], dict[str, str]]
FORMAT = 1  # of the files: raise it when what is kept in them, or how it is read, changes
MADE_BY = ("hydra-core", "omegaconf", "pyyaml", "toymha")
MOST_FILES = 2_000  # of a folder that is worth reading whole to save a composition
RESOLVER = re.compile(rb"\$\{\s*[\w.]+\s*:")  # such as ${oc.env:HOME}: what it gives is in no file


def composed(words: Sequence[str], extra: Path | None = None, like: dict[str, Any] | None = None) -> Composed:
    """Group choices -> (plain values, interpolations unresolved, of conf/; the choice made in every group).

    `words`: such as `model=gqa`. `extra`: a folder of the user's own configs. `like`: a primary configuration in the
    place of conf/train.yaml. Raises UserError, in one line, for what Hydra cannot compose.
    """
    name = key(words, extra, like)
    if name is None:
        return fresh(words, extra, like)
    path = store.cache_dir() / "composed" / f"{name}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        checksum, _, body = path.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() == checksum:
            values, made = json.loads(body)
            if isinstance(values, dict) and isinstance(made, dict):
                return values, made
    values, made = fresh(words, extra, like)
    if key(words, extra, like) != name:  # a file was changed meanwhile, and nobody knows which of the two was read
        return values, made
    with contextlib.suppress(TypeError):  # bytes, which YAML has and JSON has not
        body = json.dumps([values, made]).encode()
        if json.loads(body) == [values, made]:  # not where a key of a table is a number
            store.write(path, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    return values, made


def key(words: Sequence[str], extra: Path | None, like: dict[str, Any] | None) -> str | None:
    """A hash of what `fresh` is made from; None where that cannot be told, or not faster than by composing."""
    contents = []
    for root in (conf_dir(), *([extra] if extra else [])):
        files = list(_files(root))
        if len(files) > MOST_FILES:
            return None
        for path in files:
            try:
                content = path.read_bytes()
            except OSError:
                return None
            if RESOLVER.search(content):
                return None
            contents.append([path.relative_to(root).as_posix(), hashlib.sha256(content).hexdigest()])
        contents.append(["", ""])  # where one folder ends
    return store.digest(FORMAT, [version(p) for p in MADE_BY], contents, list(words), like)


def _files(root: Path) -> Iterator[Path]:
    """The YAML files below a folder, in a fixed order; more than MOST_FILES where it holds so much of any kind."""
    seen = 0
    for folder, folders, names in os.walk(root, followlinks=True):
        folders.sort()
        seen += len(folders) + len(names)
        if seen > MOST_FILES:
            yield from [root] * (MOST_FILES + 1)
            return
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".yaml"))


def fresh(words: Sequence[str], extra: Path | None = None, like: dict[str, Any] | None = None) -> Composed:
    """`composed`, by Hydra."""
    import yaml
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    words = list(words)
    if extra:
        quoted = str(extra).replace("'", r"\'")
        words.append(f"hydra.searchpath=['file://{quoted}']")
    if like is not None:
        ConfigStore.instance().store("like", like)
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            made = compose("train" if like is None else "like", words, return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as e:
        raise UserError(f"the configuration cannot be composed: {' '.join(str(e).split())[:200]}") from None
    choices: dict[str, str] = {k: v for k in GROUPS if (v := made.hydra.runtime.choices.get(k))}
    values: Any = OmegaConf.to_container(OmegaConf.masked_copy(made, [str(k) for k in made if k != "hydra"]))
    return values, choices
