"""One row per logged step, to metrics.jsonl and TensorBoard; the event file is a picture of metrics.jsonl.

After an interruption the rows behind the checkpoint are dropped and the event file is drawn anew from the rest, so
that each step stands in it once.
"""

from __future__ import annotations

import json
import math
import time
from typing import Any

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
RELATIONS = {  # of generated texts, one curve each; `answer` of a task
    "relations": {
        "probability of what is right": ["Multiline", ["relation_right/.*"]],
        "accuracy": ["Multiline", ["relation_accuracy/.*"]],
        "loss (nats)": ["Multiline", ["relation_loss/.*"]],
        "lowest possible loss (nats)": ["Multiline", ["relation_floor/.*"]],
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

    def flush(self) -> None:
        self.writer.flush()

    def final(self, step: int, score: Any) -> None:
        """The whole-split numbers, also as the metrics of TensorBoard's HParams page."""
        self.row(step, {tag: getattr(score, name) for tag, name in FINAL.items()})

    def _draw(self, r: dict[str, Any]) -> None:
        for tag, value in r.items():
            if isinstance(value, str):
                self.writer.add_text(tag, "    " + value.replace("\n", "\n    "), r["step"], walltime=r["time"])
            elif tag not in ("step", "time") and value is not None:
                self.writer.add_scalar(tag, value, r["step"], walltime=r["time"])

    def _head(self) -> None:
        """What does not change along the run: layout of the curves, configuration, hyperparameters."""
        generated = self.run.config.data.name in config.GENERATED
        self.writer.add_custom_scalars(LAYOUT | (RELATIONS if generated else {}))
        text = (self.run.path / "config.yaml").read_text("utf-8")
        self.writer.add_text("config", "    " + text.replace("\n", "\n    "), 0)
        flat = {
            k: v if isinstance(v, (bool, int, float, str)) else json.dumps(v)
            for k, v in config.identity_values(self.run.config).items()
        }
        # add_hparams would make a second run; these three records belong to this run's own event file.
        for record in hparams(flat, dict.fromkeys(FINAL, 0.0)):
            self.writer._get_file_writer().add_summary(record)


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
