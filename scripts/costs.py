"""What toymha itself costs on this machine: how a step grows with the model, and what surrounds the steps.

    python scripts/costs.py                            all of it, about ten minutes
    python scripts/costs.py --only planning,start      or some of it: growth,planning,start,surroundings,agreement,sweep

growth        Seconds of a training step (AdamW, fused attention, fp32) against layers, dim, context and batch, each
              alone doubled from the default model's; one figure, with the counted FLOPs at the rate of the default
              model's step. It is written to outputs/costs/growth.svg and .png.
planning      Seconds of `toymha plan -m` with 1,000 points.
start         Seconds from the command to the end of the first step, and of `import torch` alone, in turn.
surroundings  Share of a default run that is not training: start, evaluation, logging, checkpoints, the final scores.
agreement     Validation losses of three seeds with one thread in fp32, with the threads of this machine in fp32, and
              with these in bf16 where the CPU multiplies it fast.
sweep         What a run of a sweep takes beyond what it notes of itself, in seconds.

It ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from toymha import runs
from toymha.compose import points
from toymha.device import has_fast_bf16, set_up
from toymha.plots import GRID, INK, QUIET
from toymha.timing.bench_plot import lengths, save
from toymha.timing.bench_train import Case, measure
from toymha.timing.roofline import Rates

GROWTH = {
    "n_layer": [1, 2, 4, 8, 16],
    "dim": [32, 64, 128, 256, 512],
    "seq_len": [32, 64, 128, 256, 512, 1024],
    "batch_size": [2, 4, 8, 16, 32, 64],
}
NAMES = {"n_layer": "layers", "dim": "dim", "seq_len": "context, tokens", "batch_size": "batch, sequences"}
DATA = ["data=pydoc"]  # the one that is on every machine


def toymha(folder: Path, *words: str) -> float:
    """Seconds of a whole command."""
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "toymha", *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return time.perf_counter() - began


def summaries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(p.read_text("utf-8")) for p in sorted(folder.rglob("summary.json"))]


def growth(folder: Path) -> dict[str, Any]:
    device, _ = set_up(points([*DATA, "device=cpu"])[0].config)
    rates = Rates(1.0, {"fp32": 1.0})  # not asked for
    found: dict[str, Any] = {}
    for key, values in GROWTH.items():
        for value in values:
            c = points([*DATA, "optim=adamw", f"{key}={value}"])[0].config
            row = measure(Case(f"{key}={value}", c, 65, "fused", "fp32"), 5, device, rates, check=True)
            found.setdefault(key, []).append({"value": value, **row["step"]})
            ms = 1e3 * row["step"]["median"]
            rate = row["step"]["flops_per_s"] / 1e9
            print(f"{key:>10} {value:>5}  {ms:9.1f} ms  {row['step']['flops'] / 1e9:9.2f} GFLOP  {rate:6.1f} GFLOP/s")
    draw(found, Path("outputs") / "costs")
    return found


def draw(found: dict[str, Any], folder: Path) -> None:
    from matplotlib.figure import Figure

    base = next(p for p in found["n_layer"] if p["value"] == 4)
    figure = Figure(figsize=(14, 3.8), layout="constrained", facecolor="white")
    for axes, (key, line) in zip(figure.subplots(1, len(found), sharey=True), found.items()):
        x = [p["value"] for p in line]
        y = [p["median"] for p in line]
        spread = [[p["median"] - p["low"] for p in line], [p["high"] - p["median"] for p in line]]
        counted = [p["flops"] / base["flops_per_s"] for p in line]
        axes.plot(x, counted, color=QUIET, linewidth=1, label="counted FLOPs, at the default model's rate")
        axes.errorbar(x, y, spread, color=INK, marker="o", markersize=4, linewidth=0, elinewidth=1, label="measured")
        lengths(axes, x, NAMES[key])
        axes.grid(color=GRID)
    figure.axes[0].set_ylabel("seconds a step")
    figure.axes[0].legend(frameon=False, fontsize=9)
    folder.mkdir(parents=True, exist_ok=True)
    save(figure, folder, "growth")
    print(f"figure    {folder / 'growth.svg'}, growth.png")


def planning(folder: Path) -> dict[str, Any]:
    seeds = ",".join(map(str, range(100)))
    seconds = toymha(folder, "plan", "-m", *DATA, "n_head=1,2,4,8,16", "dim=128,256", f"seed={seeds}")
    print(f"planning 1,000 points: {seconds:.1f} s")
    return {"points": 1000, "seconds": seconds}


FIRST_STEP = """
import sys, time
from toymha import train
real = train.move
def move(*given):
    real(*given)
    print("moved at", time.time(), flush=True)
    train.move = real
train.move = move
from toymha.cli import main
sys.exit(main(sys.argv[1:]))
"""


def start(folder: Path) -> dict[str, Any]:
    ours, alone = [], []
    words = ["train", *DATA, "budget.steps=1", "optim.warmup=0", "overwrite=true"]
    for _ in range(5):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        alone.append(time.perf_counter() - began)
        at = time.time()
        command = [sys.executable, "-c", FIRST_STEP, *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        ours.append(float(done.stdout.partition("moved at ")[2].split()[0]) - at)
    first, imported = statistics.median(ours), statistics.median(alone)
    bar = f"1.3 times that + 0.5 s, is {1.3 * imported + 0.5:.2f} s"
    print(f"first step after {first:.2f} s; import torch alone takes {imported:.2f} s; the bar, {bar}")
    return {"first_step_s": ours, "import_torch_s": alone}


def surroundings(folder: Path) -> dict[str, Any]:
    whole = toymha(folder, "train", *DATA, "name=whole")
    (run,) = summaries(folder / "outputs" / "whole")
    parts = {"start": whole - run["wall_seconds"], "training": run["seconds"], **run["seconds_around"]}
    said = ", ".join(f"{name} {seconds:.1f} s ({seconds / whole:.1%})" for name, seconds in parts.items())
    print(f"a default run: {whole:.1f} s: {said}")
    return {"command": whole, **parts}


def agreement(folder: Path) -> dict[str, Any]:
    losses = {}
    ways = [("fp32", 1), ("fp32", runs.cores())]
    ways += [("bf16", runs.cores())] * has_fast_bf16(torch.device("cpu"))
    for precision, threads in ways:
        way = f"{precision}, {threads} thread{'s' * (threads > 1)}"
        name = f"agreement_{precision}_{threads}"
        words = ["budget=quick", "n_layer=2", "dim=64", f"precision={precision}", f"threads={threads}", "workers=1"]
        toymha(folder, "train", "-m", *DATA, "seed=0,1,2", *words, "device=cpu", f"name={name}")
        losses[way] = [run["val"]["loss"] for run in summaries(folder / "outputs" / name)]
        print(f"{way}: validation losses {', '.join(f'{loss:.4f}' for loss in losses[way])}")
    return losses


def sweep(folder: Path) -> dict[str, Any]:
    """Two sweeps of different size, so that starting the workers cancels."""
    few, many = 4, 24
    workers = runs.cores()
    seconds, noted = [], 0.0
    for n in (few, many):
        seeds = ",".join(map(str, range(n)))
        words = ["-m", *DATA, f"name=sweep{n}", "budget=smoke", f"seed={seeds}", "n_layer=1", "dim=32", "n_head=2"]
        seconds.append(toymha(folder, "train", *words))
        done = summaries(folder / "outputs" / f"sweep{n}")
        noted = statistics.mean(run["wall_seconds"] for run in done)
    each = workers * (seconds[1] - seconds[0]) / (many - few)
    print(f"a run of a sweep takes {each:.2f} s, of which it notes {noted:.2f} s itself: {each - noted:.2f} s beyond")
    return {"each_s": each, "noted_s": noted, "beyond_s": each - noted}


PARTS = {
    "growth": growth,
    "planning": planning,
    "start": start,
    "surroundings": surroundings,
    "agreement": agreement,
    "sweep": sweep,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    o = parser.parse_args()
    if strange := [part for part in o.only.split(",") if part not in PARTS]:
        parser.error(f"--only {strange[0]}: some of {','.join(PARTS)}")
    result: dict[str, Any] = {"torch": torch.__version__}
    with tempfile.TemporaryDirectory() as temporary:
        for part in o.only.split(","):
            result[part] = PARTS[part](Path(temporary))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
