"""`toymha prune`: a run without the heads that it needs least, as a run folder of its own."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from toymha import cost, runs
from toymha.analysis.capture import heads_of
from toymha.analysis.importance import importance, order_of
from toymha.analysis.results import Head
from toymha.compose import Point, folder_name
from toymha.config import Config
from toymha.console import quote
from toymha.device import arithmetic
from toymha.model.gpt import GPT
from toymha.opened import Opened, open_run
from toymha.report import columns
from toymha.runs import Run
from toymha.schema import UserError, nearest
from toymha.seeds import stream
from toymha.timing.speed import decode_tokens_per_s

BATCH = 8  # sequences that decoding is timed with
TURNS = 5  # times that each model is timed


def prune(o: Any) -> tuple[Point, Opened]:
    """`o`: options.PruneOptions. The run to train (for no step, or for a few), and the one that it begins with.

    Raises UserError for heads or a share that cannot be.
    """
    if (layers := Run.load(o.run).config.n_encoder_layer) is not None:
        raise UserError(f"{o.run}: prune is for models without an encoder, and this run has {layers} layers of one")
    opened = open_run(o.run, device=o.device, threads=o.threads)
    going = chosen(o, opened)
    there = heads_of(opened.gpt)
    c = opened.config
    kept = [[h.head for h in there if h.layer == layer and h not in going] for layer in range(c.n_layer)]
    how = f"without={'+'.join(h.name for h in sorted(going))}"
    if o.heads is None:
        how = f"by={o.by or 'zeroed'}" + (f",order={o.seed}" if o.by in ("random", "gates") else "")
    label = f"heads={len(there) - len(going)}of{c.n_layer * c.n_head},{how}" + (f",steps={o.steps}" if o.steps else "")
    source = Path(o.run).expanduser()
    new = dataclasses.replace(
        c,
        kept_heads=kept,
        start=str(source),
        name=o.name or f"prune/{folder_name(','.join(source.absolute().parts[-3:]))}",
        output_dir=o.output_dir,
        overwrite=o.overwrite,
        budget=dataclasses.replace(c.budget, steps=o.steps, tokens=None, minutes=None, heads=False, watch=None),
        optim=tuned_down(c, o),
        sweep=None,
    )
    assert opened.run
    return Point(new, folder_name(label), dict(opened.run.info["choices"])), opened


def tuned_down(c: Config, o: Any) -> Any:
    """The optimizer for a few steps more: at a share of its learning rates, with a warm-up that leaves room."""
    if not o.steps:
        return c.optim
    rates: dict[str, Any] = {
        k: float(f"{o.lr * v:.6g}") for k in ("lr", "muon_lr") if (v := getattr(c.optim, k)) is not None
    }
    return dataclasses.replace(c.optim, **rates, warmup=min(c.optim.warmup, o.steps // 10))


def chosen(o: Any, opened: Opened) -> set[Head]:
    """The heads that go: those named, or the least important ones by a measure on training text."""
    there = heads_of(opened.gpt)
    if (o.heads is None) == (o.share is None):
        both = "one of the two is enough" if o.heads else "say what shall go"
        raise UserError(f"{both}: share=0.25 (of the heads, the least important), or heads=L0H1,L2H3")
    if o.heads is not None and o.by is not None:
        raise UserError(
            f"by={o.by} chooses heads, and heads={','.join(o.heads)} has chosen them; leave one of the two out"
        )
    if not there:
        raise UserError(f"{o.run} has no heads left")
    if o.heads is not None:
        by_name = {h.name: h for h in there}
        for name in o.heads:
            if name not in by_name:
                raise UserError(f"heads={name}: the run has no such head{nearest(name, by_name)}; {', '.join(by_name)}")
        return {by_name[name] for name in o.heads}
    count = math.floor(o.share * len(there) + 1e-9)
    if not count:
        raise UserError(f"share={o.share} of {len(there)} heads is none; at least {1 / len(there):.3g}")
    by = o.by or "zeroed"
    print(f"share={o.share} of {len(there)} heads: {count}, the least important by {by}", flush=True)
    if by == "random":
        import torch

        order = torch.randperm(len(there), generator=stream(o.seed, "prune")).tolist()
        return {there[i] for i in order[:count]}
    train, c = opened.corpus.splits["train"], opened.config
    print("measuring ...", file=sys.stderr, flush=True)
    measured = importance(
        opened.gpt, train, c.seq_len, max_tokens=o.tokens, measures=[by], seed=o.seed, split_name="train"
    )
    return set(order_of(measured, by)[:count])


def comparison(before: Opened, after: Run) -> list[str]:
    """What went and what is left: a table, before beside after."""
    c, d, V = before.config, after.config, before.corpus.tokenizer.vocab_size
    assert before.run
    old, new = before.run.summary, after.summary
    model = GPT(dataclasses.replace(d, start=None), V).to(before.device)
    model.load_state_dict(after.load_weights("model"))
    width = 2 if before.precision == "bf16" else 4
    costs = [
        (
            sum(cost.parameters(x, V).values()),
            sum(cost.flops(x, V).values()) / x.seq_len,
            cost.kv_bytes(x, x.seq_len, 1, width),
        )
        for x in (c, d)
    ]
    names = ("parameters", "FLOPs of a token, forward", "KV cache, bytes a sequence")
    rows: list[tuple[str, float, float, str]] = []
    rows.append(("heads", len(heads_of(before.gpt)), len(heads_of(model)), ",.0f"))
    rows += [(name, old_cost, new_cost, ",.0f") for name, old_cost, new_cost in zip(names, *costs)]
    for split, name in (("val", "validation"), ("test", "test")):
        if old.get(split) and new.get(split):
            rows.append((f"{name} loss", old[split]["loss"], new[split]["loss"], ".4f"))
            rows.append((f"{name} perplexity", old[split]["ppl"], new[split]["ppl"], ".4f"))
    lines = [["", "before", "after", "change"]]
    for name, a, b, form in rows:
        lines.append([name, f"{a:{form}}", f"{b:{form}}", f"{100 * (b / a - 1):+.1f} %" if a else "-"])
    if c.causal and c.seq_len >= 16:
        lines.append(decoding_line(before.gpt, model, c.seq_len, before))
    return columns(lines, 1)


def decoding_line(old: GPT, new: GPT, seq_len: int, opened: Opened) -> list[str]:
    """Both measured in turn, so that a machine that is busy with other work is so for both: medians with extremes."""
    speeds: dict[str, list[float]] = {"old": [], "new": []}
    for _ in range(TURNS):
        for name, model in (("old", old), ("new", new)):
            speeds[name].append(decoding(model, seq_len, opened))
    cells = [f"{statistics.median(x):,.0f} ({min(x):,.0f}-{max(x):,.0f})" for x in speeds.values()]
    apart = min(speeds["new"]) > max(speeds["old"]) or max(speeds["new"]) < min(speeds["old"])
    ratio = statistics.median(speeds["new"]) / statistics.median(speeds["old"])
    change = f"{100 * (ratio - 1):+.0f} %" if apart else "within noise"
    return [f"decoding, tokens/s ({BATCH} at a time)", *cells, change]


def decoding(model: GPT, seq_len: int, opened: Opened) -> float:
    """Tokens per second with a cache that fills up to the context length."""
    new = max(1, seq_len // 32)
    with arithmetic(opened.precision, opened.device):
        return decode_tokens_per_s(model, BATCH, seq_len - new, new, opened.device)


def prune_run(o: Any) -> int:
    """Make the run, train it where steps are asked for, and print what changed."""
    from toymha.commands import train_one

    point, before = prune(o)
    path = runs.folder(point.config, point.label)
    outcome = train_one(point, quiet=not o.steps)
    if outcome == 0:
        after = Run.load(path)
        gone = sorted(set(heads_of(before.gpt)) - {Head(n, h) for n, k in enumerate(kept_of(after)) for h in k})
        print(f"without  {', '.join(h.name for h in gone)}\n")
        print("\n".join(comparison(before, after)))
        print(f"\nrun folder  {quote(path)}")
    return outcome


def kept_of(run: Run) -> list[list[int]]:
    return [list(run.config.heads_of(layer)) for layer in range(run.config.n_layer)]
