"""One row per logged step, to metrics.jsonl and TensorBoard; the event file is a picture of metrics.jsonl.

After an interruption the rows behind the checkpoint are dropped and the event file is drawn anew from the rest, so
that each step stands in it once.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from toymha import config
from toymha.runs import Run

LAYOUT = {
    "training": {
        "loss": ["Multiline", ["loss/train", "loss/val", "floor/val"]],
        "perplexity": ["Multiline", ["ppl/val"]],
        "pace": ["Multiline", ["tokens_per_s"]],
    },
    "attention": {
        "std of the scores": ["Multiline", ["scores_std/.*"]],
        "entropy of the pattern (nats)": ["Multiline", ["entropy/.*"]],
    },
}
HEADS = {  # of watched runs, one curve a head
    "heads": {
        f"weight on {what}": ["Multiline", [f"head_{score}/.*"]]
        for score, what in (
            ("previous", "the token before"),
            ("second", "the token before that"),
            ("begin", "the first token"),
            ("duplicate", "an earlier copy"),
            ("induction", "what followed an earlier copy"),
            ("rare", "the rarest token"),
        )
    },
}
RELATIONS = {  # of generated texts, one curve each; `answer` of a task
    "relations": {
        "probability of what is right": ["Multiline", ["relation_right/.*"]],
        "accuracy": ["Multiline", ["relation_accuracy/.*"]],
        "loss (nats)": ["Multiline", ["relation_loss/.*"]],
        "lowest possible loss (nats)": ["Multiline", ["relation_floor/.*"]],
    },
}
PAIRS = {  # targets that the model wrote itself
    "pairs": {
        "right entirely": ["Multiline", ["pairs/exact"]],
        "symbol error rate": ["Multiline", ["pairs/ser"]],
    },
}
FINAL = {"final/loss_val": "loss", "final/ppl_val": "ppl", "final/bits_per_char": "bits_per_char"}


class Log:
    """`log.row(step, {tag: number or text})`. A context manager: whatever happens, the rows reach the disk."""

    def __init__(self, run: Run, step: int) -> None:
        """Keeps the rows up to `step`, where the run goes on. What is done again is dropped: all of a run at step 0,
        and the final numbers."""
        self.run = run
        rows = [r for r in run.rows() if r["step"] <= step and step and not FINAL.keys() <= r.keys()]
        run.write_text("metrics.jsonl", "".join(dumps(r) for r in rows))
        for old in run.path.glob("events.out.tfevents*"):
            old.unlink()
        self.file = open(  # noqa: SIM115 (closed in __exit__)
            run.path / "metrics.jsonl", "a", encoding="utf-8"
        )
        self.writer = SummaryWriter(str(run.path), max_queue=1000)
        self._head()
        for r in rows:
            self._draw(r)
        for folder in sorted((run.path / "watch").glob("step=*")):
            at = int(folder.name.removeprefix("step="))
            if at <= step and step:
                self.images(at, {f"maps/{p.stem}": p for p in sorted(folder.glob("*.png"))})
            else:
                shutil.rmtree(folder)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()
        self.writer.close()

    def row(self, step: int, values: dict[str, float | str]) -> None:
        """One row; a number that is not finite is written as null and not drawn."""
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        r = {"step": step, "time": round(time.time(), 3), **clean}
        self.file.write(dumps(r))
        self.file.flush()
        self._draw(r)

    def images(self, step: int, paths: Mapping[str, Path]) -> None:
        """tag -> a PNG file."""
        _add_images(self.writer, step, paths)

    def flush(self) -> None:
        self.writer.flush()

    def final(self, step: int, score: Any, written: Mapping[str, Any]) -> None:
        """The whole-split numbers, also as the metrics of TensorBoard's HParams page. `written`: of pairs, how -> exact
        and ser."""
        row = {tag: getattr(score, name) for tag, name in FINAL.items()}
        row |= {f"final/{k}_{how}": m[k] for how, m in written.items() if m for k in ("exact", "ser")}
        self.row(step, row)

    def _draw(self, r: dict[str, Any]) -> None:
        for tag, value in r.items():
            if isinstance(value, str):
                self.writer.add_text(tag, "    " + value.replace("\n", "\n    "), r["step"], walltime=r["time"])
            elif tag not in ("step", "time") and value is not None:
                self.writer.add_scalar(tag, value, r["step"], walltime=r["time"])

    def _head(self) -> None:
        """What does not change along the run: layout of the curves, configuration, hyperparameters."""
        data, watched = self.run.config.data.name, self.run.config.budget.watch
        layout = LAYOUT | (HEADS if watched else {})
        layout |= RELATIONS if data in config.GENERATED or data in config.PAIRED else {}
        layout |= PAIRS if data in config.PAIRED else {}
        self.writer.add_custom_scalars(layout)
        text = (self.run.path / "config.yaml").read_text("utf-8")
        self.writer.add_text("config", "    " + text.replace("\n", "\n    "), 0)
        flat = {
            k: v if isinstance(v, (bool, int, float, str)) else json.dumps(v)
            for k, v in config.identity_values(self.run.config).items()
        }
        written = ["final/exact_greedy", "final/ser_greedy"] if data in config.PAIRED else []
        # add_hparams would make a second run; these three records belong to this run's own event file.
        for record in hparams(flat, dict.fromkeys([*FINAL, *written], 0.0)):
            self.writer._get_file_writer().add_summary(record)


def write_images(run: Run, step: int, paths: Mapping[str, Path]) -> None:
    """PNG files in the run's pages of TensorBoard, in an event file of their own, which replaces the last one."""
    suffix = ".heads"
    for old in run.path.glob(f"events.out.tfevents*{suffix}"):
        old.unlink()
    with SummaryWriter(str(run.path), filename_suffix=suffix) as writer:
        _add_images(writer, step, paths)


def _add_images(writer: SummaryWriter, step: int, paths: Mapping[str, Path]) -> None:
    for tag, path in paths.items():
        png = path.read_bytes()
        width, height = struct.unpack(">II", png[16:24])  # PNG specification, chunk IHDR
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png)
        writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), step)


def dumps(row: dict[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def learned(rows: list[dict[str, Any]], name: str, bar: float = 0.9) -> int | None:
    """The step of the evaluation from which on the relation's right class had `bar` of the probability, to the end.

    None where it has not at the end.
    """
    tag, since = f"relation_right/{name}", None
    for row in rows:
        if row.get(tag) is not None:
            good = row[tag] >= bar
            since = (row["step"] if since is None else since) if good else None
    return since
