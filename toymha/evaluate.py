"""How good a model is on a split: loss with its standard error, perplexity, bits per character; relations one by one.

Axes: W windows, T positions, V vocabulary, K tokens with a tag. A split of N tokens has N - 1 predictions, and each is
counted once. Windows of seq_len follow each other; in a generated text a window goes back to the beginning of the
document that it continues, and what was predicted before is context only. An encoder-decoder predicts the targets of
its pairs and nothing else; there a window is one target.
"""

from __future__ import annotations

import bisect
import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toymha.batches import pair_windows, pairs_alike
from toymha.data.corpus import Split
from toymha.data.pairs import pair_rows, sizes_of_pairs
from toymha.model.attention import Attention
from toymha.model.gpt import GPT
from toymha.model.seq2seq import Seq2Seq
from toymha.team import ALONE, Team

K = TypeVar("K")


@dataclass(frozen=True)
class Part:
    """One relation, or the answers of a task: means over the tokens that have its tag.

    loss and floor in nats (the floor is None where nobody knows the lowest possible loss); right: probability of the
    right class (any verb of the right number), from 0 to 1; accuracy: share of tokens whose most likely prediction is
    in it.
    """

    loss: float
    floor: float | None
    right: float
    accuracy: float
    tokens: int


@dataclass(frozen=True)
class Score:
    """loss and se in nats a token; tokens is the number of predictions; chars and bytes are what they spell.

    floor: of a generated text, the loss of one who knows its rules, on the same tokens: chance is the same in both.
    """

    loss: float
    se: float
    tokens: int
    chars: float
    bytes: float
    floor: float | None = None
    parts: dict[str, Part] = field(default_factory=dict)

    @property
    def ppl(self) -> float:
        """exp(loss); infinite where a double overflows."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def bits_per_char(self) -> float:
        return self.loss / math.log(2) * self.tokens / self.chars

    @property
    def bits_per_byte(self) -> float:
        return self.loss / math.log(2) * self.tokens / self.bytes

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {
            "se": self.se if math.isfinite(self.se) else None,  # JSON has no nan
            "ppl": self.ppl,
            "bits_per_char": self.bits_per_char,
            "bits_per_byte": self.bits_per_byte,
        }


def evaluate(
    model: nn.Module,
    split: Split,
    seq_len: int,
    *,
    max_tokens: int | None = None,
    batch_tokens: int = 4096,
    poll: Callable[[], None] = lambda: None,
    team: Team = ALONE,
) -> Score:
    """The model's score on the whole split, or on about `max_tokens` of it in windows spread evenly, always the same.

    `batch_tokens`: how many tokens the team evaluates at once, or a window each; it changes no result. `poll` is called
    between batches and may raise. `team`: who reads the batches. The standard error is that of the mean over tokens,
    with the tokens of a window taken as one cluster.
    """
    device = next(model.parameters()).device
    sums, counts, floors, tagged = [], [], [], Tagged(split)

    def read(page: tuple[tuple[Tensor, ...], Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        inputs, at_WT, counted_WT = page
        y_WT = split.tokens[at_WT].long()
        logits_WTV = model(*(x.to(device) for x in inputs)).float()
        nats_WT = F.cross_entropy(logits_WTV.transpose(1, 2), y_WT.to(device), reduction="none")
        return at_WT, counted_WT, logits_WTV, nats_WT.double().cpu() if device.type != "mps" else nats_WT.cpu().double()

    with evaluating(model), torch.inference_mode():
        for at_WT, counted_WT, logits_WTV, nats_WT in team.map(
            read, pages(model, split, seq_len, max_tokens, batch_tokens // team.n)
        ):
            poll()
            sums.append((nats_WT * counted_WT).sum(1))
            counts.append(counted_WT.sum(1).double())
            if split.logp is not None:
                floors.append(-split.logp[at_WT[counted_WT]].double())
            tagged.add(at_WT, counted_WT, logits_WTV, nats_WT)
    sum_W, count_W = torch.cat(sums), torch.cat(counts)
    n, (loss, se) = int(count_W.sum()), mean_and_error(sum_W, count_W)
    all_of, chars, size = split_sizes(model, split)
    share = n / all_of
    floor = torch.cat(floors).sum().item() / n if floors else None
    return Score(loss, se, n, chars * share, size * share, floor, tagged.parts())


def pages(
    model: nn.Module, split: Split, seq_len: int, max_tokens: int | None, batch_tokens: int
) -> Iterator[tuple[tuple[Tensor, ...], Tensor, Tensor]]:
    """What the model is to read, batch by batch, and `windows`: inputs, at_WT, counted_WT."""
    if isinstance(model, Seq2Seq):
        yield from pair_windows(split, max_tokens, batch_tokens)
        return
    for at_WT, counted_WT in windows(split, seq_len, max_tokens, max(1, batch_tokens // seq_len)):
        yield (split.tokens[at_WT - 1].long(),), at_WT, counted_WT


def split_sizes(model: nn.Module, split: Split) -> tuple[int, float, float]:
    """How many predictions the whole split has for this model, and the characters and bytes that they spell."""
    if not isinstance(model, Seq2Seq):
        return len(split.tokens) - 1, split.chars, split.bytes
    assert split.targets is not None
    return int(sizes_of_pairs(split)[1].sum()), *split.targets


def mean_and_error(sum_W: Tensor, count_W: Tensor) -> tuple[float, float]:
    """The mean over tokens from the sums and numbers of each window (double), and its standard error with the tokens of
    a window taken as one cluster; nan for a single window."""
    n, W = count_W.sum().item(), len(count_W)
    mean = sum_W.sum().item() / n
    deviation_W = sum_W - mean * count_W
    return mean, math.sqrt(deviation_W.square().sum().item() * W / (W - 1)) / n if W > 1 else math.nan


class Tagged:
    """Sums over the tokens with a tag, batch by batch."""

    def __init__(self, split: Split) -> None:
        self.split = split
        self.sums = torch.zeros(len(split.names) + 1, 5, dtype=torch.float64)  # by tag: the fields of Part

    def add(self, at_WT: Tensor, counted_WT: Tensor, logits_WTV: Tensor, nats_WT: Tensor) -> None:
        if self.split.tags is None or self.split.classes is None:
            return
        chosen_WT = counted_WT & (self.split.tags[at_WT] > 0)
        at_K, logits_KV = at_WT[chosen_WT], logits_WTV[chosen_WT.to(logits_WTV.device)].cpu()
        unused = logits_KV.shape[1] - len(self.split.classes)  # a model may have more tokens than the text
        class_V = F.pad(self.split.classes, (0, unused), value=-1)
        class_K = class_V[self.split.tokens[at_K].long()]
        right_K = (logits_KV.softmax(-1) * (class_V == class_K[:, None])).sum(-1)
        hit_K = class_V[logits_KV.argmax(-1)] == class_K
        floor_K = torch.zeros(len(at_K)) if self.split.logp is None else -self.split.logp[at_K]
        columns = (nats_WT[chosen_WT], floor_K, right_K, hit_K, torch.ones(len(at_K)))
        self.sums.index_add_(0, self.split.tags[at_K].long(), torch.stack([c.double() for c in columns], 1))

    def parts(self) -> dict[str, Part]:
        out = {}
        for name, (loss, floor, right, accuracy, n) in zip(self.split.names, self.sums[1:].tolist()):
            if n:
                known = None if self.split.logp is None else floor / n
                out[name] = Part(loss / n, known, right / n, accuracy / n, int(n))
        return out


def windows(split: Split, seq_len: int, max_tokens: int | None, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(at_WT, counted_WT), `batch` windows at a time: positions of the tokens to predict, from the one before each
    and what precedes it in the window, and whether this is where they count. The last, shorter window comes alone.
    """
    n = len(split.tokens) - 1
    starts_W, first_W = _starts(split, seq_len)
    full = int((starts_W + seq_len <= n).sum())  # all but the last, or all
    new = int((starts_W[full - 1] + seq_len - first_W[0] + 1) if full else 0)  # predictions of the full windows
    chosen, rest = torch.arange(full), len(starts_W) > full
    if max_tokens is not None and max_tokens < n and full:
        k = min(full, -(-max_tokens * full // new))
        chosen, rest = torch.arange(k) * full // k, False
    for chunk in chosen.split(batch) if full else ():
        at_WT = starts_W[chunk, None] + torch.arange(1, seq_len + 1)
        yield at_WT, at_WT >= first_W[chunk, None]
    if rest:
        at_WT = torch.arange(int(starts_W[-1]) + 1, n + 1)[None]
        yield at_WT, at_WT >= first_W[-1]


def _starts(split: Split, seq_len: int) -> tuple[Tensor, Tensor]:
    """(starts_W, first_W): where each window starts, and the first token that it predicts as the first of all windows.

    A token is predicted with the whole of its document before it in the window, where that fits.
    """
    n = len(split.tokens) - 1
    if split.starts is None:
        starts_W = torch.arange(0, n, seq_len)
        return starts_W, starts_W + 1
    documents, starts, firsts, first = split.starts.tolist(), [], [], 1
    while first <= n:
        start = documents[bisect.bisect_right(documents, first - 1) - 1]  # of the document that is to be continued
        if first > start + seq_len:  # too long for a window
            start = first - 1
        starts.append(start)
        firsts.append(first)
        first = start + seq_len + 1
    return torch.tensor(starts), torch.tensor(firsts)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and back to whatever it was, also after an error."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


@contextlib.contextmanager
def hooked(modules: Mapping[K, nn.Module], hear: Callable[[K, Tensor], None]) -> Iterator[None]:
    """Inside, `hear` gets the name and the output of each module that runs; afterwards nobody listens."""
    handles = [m.register_forward_hook(lambda _m, _i, out, name=name: hear(name, out)) for name, m in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def unigram_loss(model: nn.Module, train: Split, split: Split, vocab_size: int) -> float:
    """Nats a token of one who knows the training frequencies (plus one each) of the kind of tokens that this model
    predicts, and no context: the bar to beat."""
    seen_N = predicted(model, train) if isinstance(model, Seq2Seq) else train.tokens
    count_V = torch.bincount(seen_N.long(), minlength=vocab_size).double() + 1
    logp_V = (count_V / count_V.sum()).log()
    return -logp_V[predicted(model, split)].mean().item()


def predicted(model: nn.Module, split: Split) -> Tensor:
    """The tokens that this model predicts, int64: all but the first; or targets, with the mark after each."""
    tokens_N = split.tokens[1:].long()
    if not isinstance(model, Seq2Seq):
        return tokens_N
    assert split.tags is not None and split.starts is not None
    ends_N = torch.zeros(len(split.tokens), dtype=torch.bool).index_fill_(0, split.starts, True)
    return tokens_N[(split.tags[1:] > 0) | ends_N[1:]]


def looked_at(model: GPT | Seq2Seq, split: Split, seq_len: int) -> tuple[Tensor, ...]:
    """What the model reads while somebody looks inside: two windows, or pairs without padding; always the same."""
    if isinstance(model, Seq2Seq):
        source_BS, at_BT, _ = pair_rows(split, pairs_alike(split))
        return source_BS, split.tokens[at_BT - 1].long()
    T = min(seq_len, 512)  # the statistics need T x T tensors, which training may have been spared
    at_WT, _ = next(windows(split, T, 2 * T, 2))
    return (split.tokens[at_WT - 1].long(),)


def attentions(model: GPT | Seq2Seq) -> dict[str, Attention]:
    """Every attention that has heads, by name: `layer0`; of an encoder-decoder `encoder0`, `layer0` and `cross0`."""
    stacks = {"layer": (model.blocks, "attn")}
    if isinstance(model, Seq2Seq):
        stacks = {"encoder": (model.encoder, "attn"), **stacks}
        if model.crosses:
            stacks["cross"] = (model.blocks, "cross")
    found = {f"{name}{i}": getattr(b, which) for name, (blocks, which) in stacks.items() for i, b in enumerate(blocks)}
    return {name: attn for name, attn in found.items() if isinstance(attn, Attention)}  # a pruned layer may have none


def attention_statistics(model: GPT | Seq2Seq, *inputs: Tensor) -> dict[str, float]:
    """By attention: standard deviation of the visible scores; of the pattern's rows the mean entropy in nats, the mean
    largest weight, and the gradient that passes the softmax, 1 - sum p^2 (the trace of its Jacobian)."""
    out: dict[str, float] = {}
    found = attentions(model)

    def on_scores(name: str, scores_BHTS: Tensor) -> None:
        visible = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool, device=scores_BHTS.device)
        visible = visible.tril() if found[name].causal else visible
        out[f"scores_std/{name}"] = scores_BHTS[..., visible].float().std().item()

    def on_pattern(name: str, pattern_BHTS: Tensor) -> None:
        pattern_BHTS = pattern_BHTS.float()
        out[f"entropy/{name}"] = torch.special.entr(pattern_BHTS).sum(-1).mean().item()
        out[f"largest/{name}"] = pattern_BHTS.amax(-1).mean().item()
        out[f"passed/{name}"] = 1 - pattern_BHTS.square().sum(-1).mean().item()

    scores, patterns = ({name: getattr(attn, tap) for name, attn in found.items()} for tap in ("scores", "pattern"))
    with evaluating(model), torch.inference_mode(), hooked(scores, on_scores), hooked(patterns, on_pattern):
        model(*inputs)
    return out
