"""toymha against nanoGPT on this machine, in one run.

    python scripts/versus.py --nanogpt PATH --data FILE            training speed at nanoGPT's CPU shape
    python scripts/versus.py --nanogpt PATH --data FILE --loss     also its README recipe for CPU against our default

PATH is a checkout of nanoGPT (it is copied to a temporary folder and not changed), FILE the tiny shakespeare text.
Speed: the two programs train in turn, A B A B ..., at 4 layers, dim 128, 4 heads, context 64, batch 12, AdamW, fp32 and
the same number of threads; a step's time is the median of all but the first fifth. Loss: each program's own recipe;
both models are scored by toymha on the whole validation split (the last 10 % of the text), in windows of their
context length.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from toymha.data.corpus import Split
from toymha.evaluate import evaluate

# nanoGPT's README, "I only have a macbook" (its eval_iters and intervals concern logging alone).
SHAPE = "--device=cpu --compile=False --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0"
OURS = "n_layer=4 dim=128 n_head=4 seq_len=64 batch_size=12 pos=learned optim=adamw precision=fp32 device=cpu"
QUIET = "budget.eval_every=100000 budget.eval_tokens=64 budget.log_every=1 budget.sample_tokens=0"


def prepare(checkout: Path, text: str, folder: Path) -> None:
    """nanoGPT's files and its character-level data in `folder`, where its train.py expects them."""
    for name in ("train.py", "model.py", "configurator.py", "config"):
        source = checkout / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
    data = folder / "data" / "shakespeare_char"
    data.mkdir(parents=True)
    chars = sorted(set(text))
    ids = np.array([chars.index(c) for c in text], dtype=np.uint16)
    cut = int(len(text) * 0.9)
    ids[:cut].tofile(data / "train.bin")
    ids[cut:].tofile(data / "val.bin")
    meta = {"vocab_size": len(chars), "itos": dict(enumerate(chars)), "stoi": {c: i for i, c in enumerate(chars)}}
    (data / "meta.pkl").write_bytes(pickle.dumps(meta))


def run(command: list[str], cwd: Path, threads: int) -> tuple[str, float]:
    began = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout, time.perf_counter() - began


def nanogpt(folder: Path, threads: int, *more: str) -> tuple[list[float], float]:
    """Seconds of each logged step, and of the whole command."""
    command = [sys.executable, "train.py", "config/train_shakespeare_char.py", *SHAPE.split(), *more]
    out, seconds = run(command, folder, threads)
    return [float(ms) / 1000 for ms in re.findall(r"iter \d+: loss [\d.]+, time ([\d.]+)ms", out)], seconds


def toymha(folder: Path, threads: int, data: Path, *more: str) -> tuple[Path, float]:
    """The run folder, and the seconds of the whole command."""
    shutil.rmtree(folder / "outputs", ignore_errors=True)
    words = ["data=file", f"data.path={data}", "data.split=[0.9,0.1]", f"threads={threads}", *more]
    _, seconds = run([sys.executable, "-m", "toymha", "train", *words], folder, threads)
    return next((folder / "outputs").rglob("metrics.jsonl")).parent, seconds


def step_seconds(run_folder: Path) -> list[float]:
    """Time from each logged row of training to the next, logging included."""
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text("utf-8").strip().split("\n")]
    times = [r["time"] for r in rows if "loss/train" in r]
    return [b - a for a, b in pairwise(times)]


def settled(seconds: list[float]) -> float:
    """Median without the first fifth, which warms up."""
    return statistics.median(seconds[len(seconds) // 5 :])


def speed(folder: Path, data: Path, threads: int, rounds: int, steps: int) -> dict:
    theirs, ours = [], []
    for _ in range(rounds):
        once = ("--eval_interval=100000", "--eval_iters=1", "--log_interval=1", f"--max_iters={steps}")
        theirs.append(settled(nanogpt(folder, threads, *once)[0]))
        run_folder, _ = toymha(folder, threads, data, *OURS.split(), *QUIET.split(), f"budget.steps={steps}")
        ours.append(settled(step_seconds(run_folder)))
    tokens = 12 * 64
    ratios = sorted(a / b for a, b in zip(theirs, ours))
    print(f"nanoGPT  {tokens / statistics.median(theirs):9,.0f} tokens/s   {[f'{1000 * s:.1f} ms' for s in theirs]}")
    print(f"toymha   {tokens / statistics.median(ours):9,.0f} tokens/s   {[f'{1000 * s:.1f} ms' for s in ours]}")
    print(f"ratio    {statistics.median(ratios):.2f} (from {ratios[0]:.2f} to {ratios[-1]:.2f})")
    return {"nanogpt_step_s": theirs, "toymha_step_s": ours, "ratio": statistics.median(ratios)}


def score_nanogpt(folder: Path, text: str) -> float:
    """Whole-split loss of the checkpoint that nanoGPT wrote."""
    sys.path.insert(0, str(folder))
    from model import GPT, GPTConfig

    saved = torch.load(folder / "out-shakespeare-char" / "ckpt.pt", map_location="cpu")
    model = GPT(GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    ids = torch.from_numpy(
        np.fromfile(folder / "data" / "shakespeare_char" / "val.bin", dtype=np.uint16).astype(np.int64)
    )

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, idx_BT: torch.Tensor) -> torch.Tensor:
            idx_BT = idx_BT.contiguous()
            return self.model(idx_BT, idx_BT)[0]  # it gives every position's logits only when it is given targets

    return evaluate(Logits(), Split(ids, len(ids) - 1, len(ids) - 1), model.config.block_size).loss


def loss(folder: Path, data: Path, text: str, threads: int) -> dict:
    recipe = ("--max_iters=2000", "--lr_decay_iters=2000", "--eval_iters=20", "--always_save_checkpoint=True")
    _, their_seconds = nanogpt(folder, threads, *recipe)
    theirs = score_nanogpt(folder, text)
    print(f"nanoGPT  README recipe for CPU     validation loss {theirs:.4f}   whole command {their_seconds:.0f} s")
    run_folder, seconds = toymha(folder, threads, data)
    ours = json.loads((run_folder / "summary.json").read_text())["val"]["loss"]
    print(f"toymha   `toymha train`            validation loss {ours:.4f}   whole command {seconds:.0f} s")
    return {"nanogpt_loss": theirs, "nanogpt_s": their_seconds, "toymha_loss": ours, "toymha_s": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--loss", action="store_true")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    o = parser.parse_args()
    text = o.data.read_text("utf-8")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(o.nanogpt, text, folder)
        result = speed(folder, o.data.absolute(), o.threads, o.rounds, o.steps)
        if o.loss:
            result |= loss(folder, o.data.absolute(), text, o.threads)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
