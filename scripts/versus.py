"""toymha against nanoGPT on this machine, in one run: the two take turns, A B A B ...

    python scripts/versus.py --nanogpt PATH --data FILE                      all of it, about fifty minutes
    python scripts/versus.py --nanogpt PATH --data FILE --only training      or some: training,decoding,loss,a100,sweep

PATH is a checkout of nanoGPT (it is copied to a temporary folder and not changed), FILE the tiny shakespeare text. Both
have the same number of threads, data (the first 90 % train), shapes and batches.

training  Seconds of a step, and peak memory of the whole command, at three shapes; AdamW; fp32, and bf16 where the
          hardware multiplies it fast (nanoGPT computes in fp32 on every CPU). A round's number is the median of its
          steps without the first fifth, which warms up.
decoding  128 tokens after a prompt of 512, one sequence, 4 layers, dim 256, 4 heads, context 1,024.
loss      From typing the command to its end: nanoGPT's README recipe for CPU, and `toymha train recipe=nano`. Both
          models are scored by toymha on the whole validation split, in windows of their context.
a100      `toymha train recipe=a100` from typing it to its end, three seeds, and their losses on the whole validation
          split, beside what nanoGPT's README reports of its larger model on an A100 (which is not run here).
sweep     5 numbers of heads x 3 seeds, nanoGPT's README recipe and `recipe=nano`: a shell loop over nanoGPT, of which
          one run of each number of heads is timed and counted three times, and one `toymha train -m`.

It ends with one line of JSON.
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
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from toymha.data.corpus import Split
from toymha.device import has_fast_bf16
from toymha.evaluate import evaluate

SHAPES = [  # layers, dim, heads, context, batch; the first is that of nanoGPT's README for CPU
    (4, 128, 4, 64, 12),
    (4, 128, 4, 64, 64),
    (4, 256, 4, 256, 16),
]
# nanoGPT's README, "I only have a macbook".
README = (
    "--device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 "
    "--n_head=4 --n_embd=128 --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0"
)
HEADS, SEEDS = (1, 2, 4, 8, 16), (0, 1, 2)

DECODE_THEIRS = """
import json, sys, time, torch
sys.path.insert(0, {folder!r})
from model import GPT, GPTConfig
torch.set_num_threads({threads})
torch.manual_seed(0)
model = GPT(GPTConfig(block_size=1024, vocab_size=65, n_layer=4, n_head=4, n_embd=256, dropout=0.0, bias=False)).eval()
prompt = torch.randint(65, (1, 512))
with torch.no_grad():
    model.generate(prompt, 2)
    began = time.perf_counter()
    model.generate(prompt, 128, top_k=200)
print(json.dumps(time.perf_counter() - began))
"""
DECODE_OURS = """
import json, time, torch
from toymha.compose import points
from toymha.device import set_up
from toymha.generation.generate import sample
from toymha.model.gpt import GPT
words = "data=pydoc n_layer=4 dim=256 n_head=4 seq_len=1024 pos=learned device=cpu threads={threads}".split()
config = points(words)[0].config
set_up(config)
model = GPT(config, 65).eval()
prompt = torch.randint(65, (512,), generator=torch.Generator().manual_seed(0)).tolist()
sample(model, prompt, 2, 65, 0)
began = time.perf_counter()
sample(model, prompt, 128, 65, 0)
print(json.dumps(time.perf_counter() - began))
"""


@dataclass
class Bench:
    """What all parts need."""

    folder: Path
    data: Path
    threads: int
    rounds: int
    steps: int

    def run(self, command: list[str]) -> tuple[str, float, float]:
        """What it printed, its seconds, and the most memory it had at once, in MB."""
        with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
            environment = os.environ | {"OMP_NUM_THREADS": str(self.threads)}
            began = time.perf_counter()
            child = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=out, stderr=subprocess.STDOUT)
            _, status, used = os.wait4(child.pid, 0)
            seconds = time.perf_counter() - began
            child.returncode = os.waitstatus_to_exitcode(status)
            out.seek(0)
            said = out.read()
        if child.returncode:
            sys.exit(f"{' '.join(command)}\n{said[-4000:]}")
        return said, seconds, used.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3)

    def nanogpt(self, *words: str) -> tuple[str, float, float]:
        return self.run([sys.executable, "train.py", "config/train_shakespeare_char.py", *words])

    def toymha(self, *words: str) -> tuple[Path, float, float]:
        """The folder with the runs, seconds, MB."""
        shutil.rmtree(self.folder / "outputs", ignore_errors=True)
        data = ["data=file", f"data.path={self.data}", "data.split=[0.9,0.1]"]
        _, seconds, memory = self.run([sys.executable, "-m", "toymha", "train", *data, *words])
        return self.folder / "outputs", seconds, memory


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


def settled(seconds: list[float]) -> float:
    """Median without the first fifth, which warms up."""
    return statistics.median(seconds[len(seconds) // 5 :])


def told(what: str, theirs: list[float], ours: list[float], show: Callable[[float], str]) -> dict[str, Any]:
    """Print medians with their spread and the median of the ratios of neighbours; the same as numbers."""
    ratios = sorted(a / b for a, b in zip(theirs, ours, strict=True))
    print(what)
    for name, values in (("nanoGPT", theirs), ("toymha", ours)):
        print(f"  {name:8} {show(statistics.median(values)):>14}   {show(min(values))} to {show(max(values))}")
    print(f"  ratio    {statistics.median(ratios):>14.2f}   {ratios[0]:.2f} to {ratios[-1]:.2f}", flush=True)
    return {"nanogpt": theirs, "toymha": ours, "ratio": statistics.median(ratios)}


# The parts


def training(b: Bench) -> dict[str, Any]:
    out = {}
    precisions = ["fp32"] + ["bf16"] * has_fast_bf16(torch.device("cpu"))
    if len(precisions) == 1:
        print("this CPU does not multiply bf16: fp32 alone")
    for shape in SHAPES:
        layers, dim, heads, context, batch = shape
        steps = max(20, b.steps * 768 // (batch * context) * 128 // dim)
        sizes = f"--block_size={context} --batch_size={batch} --n_layer={layers} --n_head={heads} --n_embd={dim}"
        quiet = f"--eval_interval=100000 --eval_iters=1 --log_interval=1 --max_iters={steps}"
        same = f"n_layer={layers} dim={dim} n_head={heads} seq_len={context} batch_size={batch} pos=learned optim=adamw"
        looks = "device=cpu budget.eval_every=100000 budget.eval_tokens=64 budget.log_every=1 budget.sample_tokens=0"
        theirs: list[tuple[float, float]] = []
        ours: dict[str, list[tuple[float, float]]] = {p: [] for p in precisions}
        for _ in range(b.rounds):
            said, _, memory = b.nanogpt("--device=cpu", "--compile=False", "--dropout=0.0", *f"{sizes} {quiet}".split())
            times = [float(ms) / 1000 for ms in re.findall(r"iter \d+: loss [\d.]+, time ([\d.]+)ms", said)]
            theirs.append((settled(times), memory))
            for p in precisions:
                words = f"{same} {looks} precision={p} threads={b.threads} budget.steps={steps}"
                folder, _, memory = b.toymha(*words.split())
                ours[p].append((settled(step_seconds(folder)), memory))
        tokens = batch * context
        for p in precisions:
            name = f"{layers} layers, dim {dim}, {heads} heads, context {context}, batch {batch}, {p}"
            out[name] = {
                "step_s": told(
                    f"training, {name}",
                    [s for s, _ in theirs],
                    [s for s, _ in ours[p]],
                    lambda s, tokens=tokens: f"{tokens / s:,.0f} tokens/s",  # type: ignore[misc]
                ),
                "peak_MB": told(
                    "  peak memory", [m for _, m in theirs], [m for _, m in ours[p]], lambda m: f"{m:,.0f} MB"
                ),
            }
    return out


def step_seconds(folder: Path) -> list[float]:
    """Time from each logged row of training to the next, logging included."""
    (path,) = folder.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text("utf-8").strip().split("\n")]
    return [b - a for a, b in pairwise(r["time"] for r in rows if "loss/train" in r)]


def decoding(b: Bench) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {DECODE_THEIRS: [], DECODE_OURS: []}
    for _ in range(b.rounds):
        for script, found in seconds.items():
            said, _, _ = b.run([sys.executable, "-c", script.format(folder=str(b.folder), threads=b.threads)])
            found.append(json.loads(said.strip().split("\n")[-1]))
    what = "decoding 128 tokens after 512, 4 layers, dim 256, 4 heads, context 1,024"
    return told(what, *seconds.values(), lambda s: f"{128 / s:,.0f} tokens/s")


def loss(b: Bench) -> dict[str, Any]:
    theirs, ours, losses = [], [], []
    for _ in range(b.rounds):
        _, seconds, _ = b.nanogpt(*README.split(), "--always_save_checkpoint=True")
        theirs.append(seconds)
        folder, seconds, _ = b.toymha("recipe=nano", f"threads={b.threads}")
        ours.append(seconds)
        losses.append((score_nanogpt(b), val_loss(folder)[0]))
    out = told("the whole command, to its validation loss", theirs, ours, lambda s: f"{s:.1f} s")
    for i, name in enumerate(("nanoGPT", "toymha")):
        print(f"  {name:8} validation loss, whole split: {', '.join(f'{pair[i]:.4f}' for pair in losses)}")
    return out | {"losses": losses}


REPORTED = 1.4697  # nanoGPT's README: 6 layers, dim 384, context 256, on one A100


def a100(b: Bench) -> dict[str, Any]:
    each, losses = [], []
    for seed in SEEDS:
        folder, seconds, _ = b.toymha("recipe=a100", f"seed={seed}", f"threads={b.threads}")
        each.append(seconds)
        losses += val_loss(folder)
    print(f"the whole command, to the loss that nanoGPT's README reports of an A100, {REPORTED}")
    print(f"  toymha   {', '.join(f'{s:.0f} s ({x:.4f})' for s, x in zip(each, losses))}", flush=True)
    return {"toymha": each, "losses": losses, "reported": REPORTED}


def val_loss(folder: Path) -> list[float]:
    return [json.loads(p.read_text())["val"]["loss"] for p in sorted(folder.rglob("summary.json"))]


def score_nanogpt(b: Bench) -> float:
    """Whole-split loss of the checkpoint that nanoGPT wrote."""
    sys.path.insert(0, str(b.folder))
    from model import GPT, GPTConfig

    saved = torch.load(b.folder / "out-shakespeare-char" / "ckpt.pt", map_location="cpu")
    model = GPT(GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    ids = torch.from_numpy(
        np.fromfile(b.folder / "data" / "shakespeare_char" / "val.bin", dtype=np.uint16).astype(np.int64)
    )

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, idx_BT: torch.Tensor) -> torch.Tensor:
            idx_BT = idx_BT.contiguous()
            return self.model(idx_BT, idx_BT)[0]  # it gives every position's logits only when it is given targets

    return evaluate(Logits(), Split(ids, len(ids) - 1, len(ids) - 1), model.config.block_size).loss


def sweep(b: Bench) -> dict[str, Any]:
    each, theirs_found = [], []
    for heads in HEADS:
        words = README.replace("--n_head=4", f"--n_head={heads}").split()
        _, seconds, _ = b.nanogpt(*words, "--always_save_checkpoint=True")
        each.append(seconds)
        theirs_found.append(score_nanogpt(b))
    theirs = len(SEEDS) * sum(each)
    heads, seeds = ",".join(map(str, HEADS)), ",".join(map(str, SEEDS))
    folder, ours, _ = b.toymha("-m", f"n_head={heads}", f"seed={seeds}", "recipe=nano")
    found = val_loss(folder)
    out = told(f"a sweep of {len(HEADS) * len(SEEDS)} runs", [theirs], [ours], lambda s: f"{s:,.0f} s")
    for name, losses in (("nanoGPT", theirs_found), ("toymha", found)):
        print(f"  {name:8} validation loss, whole split: {min(losses):.4f} to {max(losses):.4f}")
    return out | {"nanogpt_each_s": each, "nanogpt_losses": theirs_found, "toymha_losses": found}


PARTS = {"training": training, "decoding": decoding, "loss": loss, "a100": a100, "sweep": sweep}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150, help="of a round of training at the first shape")
    o = parser.parse_args()
    if strange := [part for part in o.only.split(",") if part not in PARTS]:
        parser.error(f"--only {strange[0]}: some of {','.join(PARTS)}")
    if strange := [name for name in ("threads", "rounds", "steps") if getattr(o, name) < 1]:
        parser.error(f"--{strange[0]}: at least 1")
    if missing := [name for name in ("train.py", "model.py", "config") if not (o.nanogpt / name).exists()]:
        parser.error(f"--nanogpt {o.nanogpt}: no checkout of nanoGPT ({missing[0]} is missing)")
    if not o.data.is_file():
        parser.error(f"--data {o.data}: there is no such file")
    text = o.data.read_text("utf-8")
    result: dict[str, Any] = {"threads": o.threads, "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        prepare(o.nanogpt, text, folder)
        b = Bench(folder, o.data.absolute(), o.threads, o.rounds, o.steps)
        for part in o.only.split(","):
            result[part] = PARTS[part](b)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
