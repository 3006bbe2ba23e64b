"""`toymha cost`: what configurations cost, side by side, and which of it depends on the number of heads. No torch.

B batch_size, T seq_len, H n_head.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from toymha import cost as formulas
from toymha.compose import Experiment, Point
from toymha.config import MODEL_KEYS, Config
from toymha.options import CostOptions
from toymha.schema import UserError
from toymha.schema import word as typed
from toymha.subjects import amount, check_words, described
from toymha.table import columns
from toymha.words import check_choice

# The keys that change a number; scores are divided by something, which only the walk of a tensor shows.
UNCOUNTED = {"norm_eps", "rope_theta", "score_scale", "attn_dropout", "resid_dropout"}
COUNTED = {*MODEL_KEYS, "seq_len", "batch_size"} - UNCOUNTED
HINTS = {
    "precision": "write dtype=fp32, fp16 or bf16",
    "grad_accum": "write the batch_size that passes at once",
}

Numbers = dict[str, dict[str, Any]]  # section -> what -> exact value, in the order of the table


def cost(o: CostOptions, words: Sequence[str], extra: Path | None = None) -> int:
    """Print what the configurations cost that the words describe, one column each. Returns 0; raises UserError.

    `words`: keys of `train`, with one value or several. `extra`: the user's --config-dir.
    """
    words = list(words)
    check_words(words, COUNTED | ({"score_scale"} if o.shapes else set()), "that is counted", HINTS)
    if o.compare:
        if any(w.startswith("model=") for w in words):
            raise UserError(f"compare={','.join(o.compare)} names the models; leave out model=")
        for name in o.compare:
            check_choice("model", name, extra, "compare")
        words.append(f"model={','.join(o.compare)}")
    asked = described(words, extra)
    if o.shapes:
        return _print_shapes(o, asked.points)
    texts = {repr(p.config.data): p.config for p in asked.points if p.config.vocab_size is None}
    V = {name: vocab_size(c) for name, c in texts.items()}  # each text is read once
    counted = [(p, measure(p.config, V.get(repr(p.config.data), 0), o.dtype)) for p in asked.points]
    different = {repr((told(p), numbers)): (p, numbers) for p, numbers in counted}
    counted = list(different.values())  # what differs in its learning rate costs the same
    if o.json:
        for p, numbers in counted:
            heads = by_n_head(asked, p, numbers["sizes"]["vocab_size"], o.dtype)
            moving = {
                name: {str(h): n[section][name] for h, n in heads.items()} for section, name, _ in BY_HEADS if heads
            }
            print(json.dumps({"model": p.choices["model"], "dtype": o.dtype} | numbers | {"by_n_head": moving}))
        return 0
    print("\n".join(table(counted, o.dtype)))
    _print_heads(o, asked, counted)
    return 0


def _print_heads(o: CostOptions, asked: Experiment, counted: Sequence[tuple[Point, Numbers]]) -> None:
    """The first model that can have other numbers of heads; of further ones a line says how to see theirs."""
    different: dict[str, tuple[Point, Numbers]] = {}  # batches and contexts of a model have one table together
    for p, numbers in counted:
        sizes = {k: v for k, v in numbers["sizes"].items() if k not in ("seq_len", "batch_size")}
        different.setdefault(repr((told(p), sizes)), (p, numbers))
    tables = ((p, by_n_head(asked, p, n["sizes"]["vocab_size"], o.dtype)) for p, n in different.values())
    found = next(((p, heads) for p, heads in tables if heads), None)
    if found is None:
        return
    print("\n" + "\n".join(heads_table(*found)))
    if len(different) > 1:
        print("\nof several models only this one is told with other numbers of heads; ask for each alone, or json=true")


def told(p: Point) -> dict[str, Any]:
    """What heads a point's column: its model, and the keys of models that were given several values."""
    return {"model": p.choices["model"]} | {k: p.swept[k] for k in p.swept if k in MODEL_KEYS or k == "data"}


def vocab_size(c: Config) -> int:
    """V: the configuration's own, else that of its data. Raises UserError where the data is not here."""
    if c.vocab_size is not None:
        return c.vocab_size
    from toymha.data import text

    return text.vocab_size(c.data)


def measure(c: Config, vocab_size: int, dtype: str) -> Numbers:
    """All that is counted, for a batch of B sequences of T tokens, with weights, cache and activations in `dtype`."""
    B, T, width = c.batch_size, c.seq_len, formulas.BYTES[dtype]
    V = c.vocab_size or vocab_size
    encoder = {} if c.n_encoder_layer is None else {"n_encoder_layer": c.n_encoder_layer}
    parameters = formulas.parameters(c, vocab_size)
    total = sum(parameters.values())
    full, causal = ({k: B * n for k, n in formulas.flops(c, vocab_size, causal=half).items()} for half in (False, True))
    kept, fused = (formulas.activations(c, vocab_size, None, width, explicit) for explicit in (True, False))
    crossings = (formulas.crossover(c, vocab_size, half) for half in (False, True))
    return {
        "sizes": {"n_layer": c.n_layer, **encoder, "dim": c.dim, "n_head": c.n_head, "head_dim": c.D}
        | {"n_kv_head": c.G, "d_ff": c.F, "vocab_size": V, "seq_len": T, "batch_size": B},
        "parameters": parameters | {"total": total},
        "forward_flops": full | {"total": sum(full.values())},
        "causal_flops": {k: causal[k] for k in ("scores", "mixing")} | {"total": sum(causal.values())},
        "training_flops": {
            "step": 3 * sum(full.values()),
            "per_token": formulas.training_flops_per_token(c, vocab_size),
        },
        "crossover": dict(zip(("full", "causal"), (None if t is None else math.floor(t) + 1 for t in crossings))),
        "bytes": {
            "weights": total * width,
            "kv_cache": formulas.kv_bytes(c, T, B, width),
            "kv_cache_per_token": formulas.kv_bytes(c, 1, 1, width, 0),
        },
        "activations": {
            "materialised": B * sum(kept.values()),
            "pattern": B * kept["pattern"],
            "fused": B * sum(fused.values()),
        },
    }


# Units


def _of_flops(n: float) -> str:
    return amount(n, "FLOP") if n >= 1000 else ""


def _of_bytes(n: float) -> str:
    return amount(n, "B", 1024) if n >= 1024 else ""


def _of_parameters(n: float) -> str:
    return amount(n, "", prefixes=("", "thousand", "million", "billion", "trillion")) if n >= 1e6 else ""


def _plain(n: float) -> str:
    return ""


SECTIONS: dict[str, tuple[str, Callable[[float], str], dict[str, str]]] = {
    "sizes": ("", _plain, {}),
    "parameters": ("parameters", _of_parameters, {}),
    "forward_flops": (
        "FLOPs, forward pass of the batch: 2 a multiply-add, matrix products alone, all T x T pairs (T = seq_len)",
        _of_flops,
        {},
    ),
    "causal_flops": ("the same, with the T (T + 1) / 2 pairs alone that the causal mask leaves", _of_flops, {}),
    "training_flops": (
        "FLOPs, forward and backward pass: three times the forward pass with all pairs",
        _of_flops,
        {"step": "the batch", "per_token": "one token"},
    ),
    "crossover": (
        "T from which scores and mixing, which grow with T x T, take more FLOPs than all the rest",
        _plain,
        {"full": "all pairs", "causal": "causal pairs"},
    ),
    "bytes": (
        "bytes in {dtype}",
        _of_bytes,
        {"kv_cache": "KV cache, batch_size x seq_len", "kv_cache_per_token": "KV cache, one token"},
    ),
    "activations": (
        "bytes in {dtype} kept for the backward pass, beside weights and optimizer, as PyTorch keeps them on a CPU",
        _of_bytes,
        {
            "materialised": "T x T in memory",
            "pattern": "of it T x T",
            "fused": "fused kernel, no T x T",
        },
    ),
}


def table(counted: Sequence[tuple[Point, Numbers]], dtype: str) -> list[str]:
    """One column a configuration: exact numbers, and the large ones in human units beside them."""
    names = dict.fromkeys(k for p, _ in counted for k in told(p) if k not in counted[0][1]["sizes"])
    rows: list[list[str] | str] = [
        ["" if k == "model" else f"  {k}", *_pairs([typed(told(p).get(k)) for p, _ in counted])] for k in names
    ]
    for section, (title, human, labels) in SECTIONS.items():
        if title:
            rows += ["", title.format(dtype=dtype)]
        names = dict.fromkeys(name for _, numbers in counted for name in numbers[section])
        for name in names:
            cells = [f"  {labels.get(name, name)}"]
            for _, numbers in counted:
                n = numbers[section].get(name)
                cells += ["-", ""] if n is None else [f"{n:,}", human(n)]
            rows.append(cells)
    return _aligned(rows)


def _pairs(cells: Sequence[str]) -> list[str]:
    return [x for cell in cells for x in (cell, "")]


def _aligned(rows: Sequence[list[str] | str], left: int = 1) -> list[str]:
    """Cells under each other, the first `left` flush left, the others right; a row that is text stands as it is."""
    lines = iter(columns([row for row in rows if not isinstance(row, str)], left))
    return [row if isinstance(row, str) else next(lines) for row in rows]


# What depends on the number of heads

BY_HEADS = [
    ("sizes", "head_dim", "head_dim"),
    ("sizes", "n_kv_head", "n_kv_head"),
    ("parameters", "w_q", "w_q, parameters"),
    ("parameters", "w_k", "w_k"),
    ("parameters", "w_v", "w_v"),
    ("parameters", "w_o", "w_o"),
    ("parameters", "total", "all parameters"),
    ("forward_flops", "projections", "projections, forward"),
    ("forward_flops", "scores", "scores"),
    ("forward_flops", "mixing", "mixing"),
    ("forward_flops", "mlp", "mlp"),
    ("forward_flops", "head", "head"),
    ("bytes", "kv_cache", "KV cache"),
    ("activations", "fused", "activations, fused"),
    ("activations", "materialised", "activations, T x T"),
]


def by_n_head(asked: Experiment, p: Point, vocab_size: int, dtype: str) -> dict[int, Numbers]:
    """The same configuration with other numbers of heads, where it can have them; nothing where it cannot.

    All other keys stay: where head_dim is null, the heads share the same dim.
    """
    out, H = {}, p.config.n_head
    if "n_head" in p.swept:
        return {}
    for h in sorted({1, H // 4, H // 2, H, 2 * H, 4 * H} - {0}):
        try:
            c = asked.vary(p, {"n_head": h}).config
        except UserError:  # dim or n_kv_head cannot be divided, or the model stands for its own number
            continue
        out[h] = measure(c, vocab_size, dtype)
    return out if len(out) > 1 else {}


def heads_table(p: Point, heads: dict[int, Numbers]) -> list[str]:
    """One column for each number of heads, the last tells what is the same in all."""
    c = p.config
    fixed = [f"{k}={typed(v)}" for k, v in (("n_kv_head", c.n_kv_head), ("head_dim", c.head_dim)) if v is not None]
    stays = f"dim={c.dim} and all else as it is" + (f", also {' and '.join(fixed)}" if fixed else "")
    rows: list[list[str] | str] = [["  n_head", *(f"{h:,}" for h in heads), ""]]
    for section, name, label in BY_HEADS:
        human = SECTIONS[section][1]
        values = [numbers[section][name] for numbers in heads.values()]
        grows = max(values) / max(min(values), 1) - 1
        moves = "changes" if grows >= 0.01 else f"changes by {100 * grows:.1g} %" if grows else "the same"
        rows.append([f"  {label}", *(human(n) or f"{n:,}" for n in values), moves])
    where = f"batch_size={c.batch_size} seq_len={c.seq_len}"
    name = ", ".join([p.choices["model"], *(f"{k}={typed(v)}" for k, v in list(told(p).items())[1:])])
    return [f"{name} with other numbers of heads ({stays}; {where})", *_aligned(rows)]


# The walk of a tensor


def _print_shapes(o: CostOptions, points: Sequence[Point]) -> int:
    from toymha.shapes import walk

    blocks = []
    for p in points:
        c = p.config
        for kind, steps in walk(c, vocab_size(c)).items():
            if o.json:
                about = {"model": p.choices["model"], "batch_size": c.batch_size, "seq_len": c.seq_len}
                print(json.dumps(about | {"attention": kind, "steps": [s.to_dict() for s in steps]}))
                continue
            lengths = f"T={c.seq_len}"
            if kind == "cross-attention":
                lengths = f"T={c.seq_len} (target positions) S={c.seq_len} (source positions)"
            sizes = f"B={c.batch_size} {lengths} C={c.dim} H={c.n_head} G={c.G} D={c.D}"
            rows: list[list[str] | str] = [["tensor", "made by", "shape", "numbers", f"in {o.dtype}"]]
            for s in steps:
                size = s.numbers * formulas.BYTES[o.dtype]
                rows.append(
                    [s.tensor, ", ".join(s.made_by), " x ".join(map(str, s.shape)), f"{s.numbers:,}", _of_bytes(size)]
                )
            blocks.append("\n".join([f"{p.choices['model']}, {kind} of one layer: {sizes}", *_aligned(rows, 2)]))
    if blocks:
        print("\n\n".join(blocks))
    return 0
