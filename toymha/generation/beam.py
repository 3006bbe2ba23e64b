"""Targets from sources, by greedy and by beam search, with a cache.

Axes: N sources, A those whose search goes on, W open hypotheses of each, R = A x W rows of a batch, K continuations of
a row, X = W x K those of a source, V vocabulary, T target positions.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from toymha.data.pairs import PADDING
from toymha.evaluate import evaluating
from toymha.model.cache import KVCache, PairCache
from toymha.model.gpt import GPT
from toymha.model.seq2seq import Seq2Seq

ROWS = 256  # of a batch: larger ones are no faster on a CPU, and waste more on sources of different lengths


class Hypothesis(NamedTuple):
    """`tokens` of the target, without the end symbol; `logp`: the sum of their log-probabilities, nats, and where the
    hypothesis is `finished` that of the end symbol too."""

    tokens: list[int]
    logp: float
    finished: bool


class Reader:
    """A model that has read some sources, and reads on what is written, one token of each row at a time.

    An encoder-decoder reads the source with its encoder, and its decoder begins with the separator. A decoder-only
    model reads source and separator as the beginning of one sequence; shorter ones are padded on the left.
    """

    def __init__(self, model: GPT | Seq2Seq, sources: Sequence[list[int]], separator: int, length: int) -> None:
        """`sources`: each at least the begin mark. `length`: target tokens of a row that can be read, at most."""
        self.model, self.at = model, model.embed.weight.device
        gaps = [max(map(len, sources)) - len(source) for source in sources]
        self.cache: KVCache | PairCache
        if isinstance(model, Seq2Seq):
            padded = [source + [PADDING] * gap for source, gap in zip(sources, gaps, strict=True)]
            self.cache = model.make_cache(torch.tensor(padded, device=self.at), 1 + length)
            self.begin_RT = torch.full((len(sources), 1), separator, device=self.at)
        else:
            padded = [[separator] * gap + source + [separator] for source, gap in zip(sources, gaps, strict=True)]
            self.begin_RT = torch.tensor(padded, device=self.at)
            self.cache = model.make_cache(len(sources), self.begin_RT.shape[1] + length, padding=gaps)
        self.source_R = torch.arange(len(sources))

    def first(self) -> Tensor:
        """logits_RV of the first token of each target; float32."""
        return self.read(self.begin_RT)

    def next(self, token_R: Tensor, row_R: Tensor) -> Tensor:
        """logits_RV of the token after token_R, which continues the row numbered row_R of the call before."""
        if not torch.equal(row_R, torch.arange(len(self.source_R))):
            before, self.source_R = self.source_R, self.source_R[row_R]
            # Rows that trade places within one source need no copies of what that source gave them.
            same = isinstance(self.cache, PairCache) and torch.equal(before, self.source_R)
            (self.cache.past if same else self.cache).select(row_R.to(self.at))  # type: ignore[union-attr]
        return self.read(token_R.to(self.at)[:, None])

    def read(self, idx_RT: Tensor) -> Tensor:
        if isinstance(self.cache, PairCache):
            return self.model.decode(idx_RT, self.cache)[:, -1].float()  # type: ignore[union-attr, operator]
        return self.model.unembed(self.model.hidden(idx_RT, self.cache)[:, -1]).float()  # type: ignore[union-attr, operator]


def room(model: GPT | Seq2Seq, source: int) -> int:
    """How many target tokens the model can read after a source of that many tokens, and then still tell whether they
    end; negative where it cannot read the source."""
    if isinstance(model, Seq2Seq):
        return model.seq_len - 1 if source <= model.seq_len else -1
    return model.seq_len - source - 1


def write_targets(
    model: GPT | Seq2Seq,
    sources: Sequence[list[int]],
    *,
    separator: int,
    end: int,
    vocab_size: int,
    length: int | None = None,
    width: int = 1,
    best: int | None = None,
    poll: Callable[[], None] = lambda: None,
) -> list[list[Hypothesis]]:
    """The `best` hypotheses for each source (all `width` by default), the most likely first.

    `width` 1 is greedy search: always the most likely token, of equals the one with the lowest id. More is beam search
    (Sutskever et al. 2014, section 3.2, from left to right): of all continuations of the open hypotheses the `width`
    with the largest sum of log-probabilities are looked at, those among them that end are kept as finished, and the
    `width` best that do not end go on. Sums are not divided by lengths. The search is over once no open hypothesis can
    overtake the `best` finished ones, or after `length` tokens (null: what the context allows, see `room`). Those that
    have not ended then stand behind all that have; a source that leaves no room has an empty one.

    A wider beam mostly finds likelier targets, but no width below V^(length + 1) makes sure of it. Results do not
    depend on which sources are searched together, as far as arithmetic goes. `poll` is called between batches and may
    raise. Raises UserError for a model that cannot be cached.
    """
    found = [[Hypothesis([], 0.0, False)] for _ in sources]
    with evaluating(model), torch.inference_mode():
        for batch, most in batches(model, [len(source) for source in sources], length, max(1, ROWS // width)):
            poll()
            reader = Reader(model, [sources[i] for i in batch], separator, most)
            results = search(reader, len(batch), end, vocab_size, most, width, best or width)
            for i, hypotheses in zip(batch, results, strict=True):
                found[i] = hypotheses
    return found


def batches(model: GPT | Seq2Seq, lengths: list[int], length: int | None, size: int) -> Iterator[tuple[list[int], int]]:
    """(indices of sources, target tokens of each at most), up to `size` sources of similar lengths at a time.

    Padding takes room in a decoder's context, so that sources go together only where all keep the room they have alone.
    """
    batch: list[int] = []
    most = 0
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if (here := room(model, lengths[i])) < 0:
            continue
        if batch and (len(batch) == size or here < most):
            yield batch, most
            batch = []
        if not batch:
            most = here if length is None else min(length, here)
        batch.append(i)
    if batch:
        yield batch, most


def search(
    reader: Reader, n: int, end: int, vocab_size: int, length: int, width: int, best: int
) -> list[list[Hypothesis]]:
    """Beam search for the n sources that `reader` has read: the `best` hypotheses of each, as `write_targets` has them.

    All sources have the same number of open hypotheses at any time, 1 at first, then V - 1, (V - 1)^2, ... up to width.
    """
    finished: list[list[Hypothesis]] = [[] for _ in range(n)]
    unfinished: list[list[Hypothesis]] = [[] for _ in range(n)]
    worst_N = torch.full((n,), -math.inf, dtype=torch.float64)  # logp of the last of `best` finished ones
    source_A, logp_AW = torch.arange(n), torch.zeros(n, 1, dtype=torch.float64)
    written_AWT = torch.zeros(n, 1, 0, dtype=torch.int64)
    logits_RV = reader.first()
    for t in range(length + 1):
        A, W = logp_AW.shape
        more_RK, token_RK = likeliest(logits_RV[:, :vocab_size], min(width + 1, vocab_size))
        K = more_RK.shape[1]
        sum_AX, token_AX = (logp_AW.view(-1, 1) + more_RK).view(A, W * K), token_RK.view(A, W * K)
        order_AX = sum_AX.argsort(dim=1, descending=True, stable=True)  # of equals the earlier row, the lower token
        ends_AX = token_AX.gather(1, order_AX) == end
        ended = [(a, int(order_AX[a, x])) for a, x in ends_AX[:, :width].nonzero().tolist()]
        for a, x in ended:
            i, tokens = int(source_A[a]), written_AWT[a, x // K].tolist()
            finished[i].append(Hypothesis(tokens, float(sum_AX[a, x]), True))
            if len(finished[i]) >= best:
                worst_N[i] = heapq.nlargest(best, (h.logp for h in finished[i]))[-1]
        if t == length:
            over = {(a, x // K) for a, x in ended}
            for a, w in ((a, w) for a in range(A) for w in range(W) if (a, w) not in over):
                open_one = Hypothesis(written_AWT[a, w].tolist(), float(logp_AW[a, w]), False)
                unfinished[int(source_A[a])].append(open_one)
            break
        on_AX = ends_AX.byte().argsort(dim=1, stable=True)[:, : min(width, W * (vocab_size - 1))]
        on_AX = order_AX.gather(1, on_AX)
        logp_AW, token_AW, parent_AW = sum_AX.gather(1, on_AX), token_AX.gather(1, on_AX), on_AX // K
        row_AW = torch.arange(A)[:, None] * W + parent_AW
        written_AWT = torch.cat((written_AWT.flatten(0, 1)[row_AW], token_AW[..., None]), dim=-1)
        alive_A = worst_N[source_A] < logp_AW[:, 0]
        if not alive_A.any():
            break
        source_A, logp_AW, written_AWT = source_A[alive_A], logp_AW[alive_A], written_AWT[alive_A]
        logits_RV = reader.next(token_AW[alive_A].flatten(), row_AW[alive_A].flatten())
    ranked = (sorted(f, key=lambda h: -h.logp) + sorted(u, key=lambda h: -h.logp) for f, u in zip(finished, unfinished))
    return [hypotheses[:best] for hypotheses in ranked]


def likeliest(logits_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most likely tokens of each row (of equals those with the lowest ids), in the order of their ids:
    log-probabilities logp_RK (nats, double) and token_RK, on the CPU."""
    value_RK, token_RK = logits_RV.topk(min(k + 1, logits_RV.shape[1]), dim=1)
    tied_R = (value_RK[:, k - 1 : k] == value_RK[:, k:]).any(1)  # topk takes any of the equals
    if tied_R.any():
        token_RK[tied_R, :k] = logits_RV[tied_R].sort(dim=1, descending=True, stable=True).indices[:, :k]
    token_RK = token_RK[:, :k].sort(dim=1).values
    # In double: single precision would make equals of logits that are not.
    exact_RV = logits_RV.cpu().double()
    return exact_RV.log_softmax(1).gather(1, token_RK.cpu()), token_RK.cpu()
