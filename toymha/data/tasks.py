"""Five tasks of attention: each document is one instance, and its answers, with the tag `answer`, are certain.

    recall          <doc> c 4 a 7 f 1 : a 7 c 4 f 1       a key is followed by the value it had (Arora et al. 2023,
                            =               =   =   =     arXiv:2312.04927: multi-query associative recall)
    induction       <doc> d k a f c : a f                 what followed it before (Olsson et al. 2022, arXiv:2209.11895)
    copy            <doc> d k a k : d k a k               the string once more
    reverse         <doc> d k a k : k a k d               backwards
    selective_copy  <doc> d _ k _ _ a : d k a             without the blanks (Gu and Dao 2023, arXiv:2312.00752)

`data.length` symbols (recall: pairs), out of `data.symbols` different ones (recall: as many keys and as many values).
Keys, and the symbols of induction, do not repeat in a document. selective_copy has `data.distractors` blanks.
The governor of an answer is the token before the colon that it repeats: not merely an equal one, the one in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from toymha.config import Data
from toymha.data.documents import BEGIN, Expected, Language, Page, numbered
from toymha.schema import UserError

ANSWER = 1
LETTERS = list("abcdefghijklmnopqrstuvwxyz")


def vocabulary(data: Data) -> dict[str, list[str]]:
    marks = [BEGIN, ":", *(["_"] if data.name == "selective_copy" else [])]
    values = {"values": [str(i) for i in range(data.symbols or 0)]} if data.name == "recall" else {}
    return {"marks": marks, "symbols": numbered(LETTERS, data.symbols or 0), **values}


def _sizes(data: Data) -> tuple[int, int]:
    """(symbols, length)"""
    return data.symbols or 0, data.length or 0


def check(data: Data) -> None:
    S, L = _sizes(data)
    if data.name in ("recall", "induction") and L > S:
        raise UserError(f"data.length={L}: {data.name} has no symbol twice, and there are data.symbols={S}")
    if data.name == "induction" and L < 2:
        raise UserError(f"data.length={L}: in induction a symbol must be followed by another, so at least 2")


def _different(data: Data, page: Page) -> np.ndarray:
    """which_DL: `length` symbols that do not repeat, each order equally likely."""
    S, L = _sizes(data)
    return page.rng.random((page.D, S)).argsort(1, kind="stable")[:, :L]


def _recall(data: Data, page: Page) -> None:
    S, L = _sizes(data)
    keys, values = page.ids["symbols"], page.ids["values"]
    which_DL = _different(data, page)
    value_DL = np.stack([page.below(S) for _ in range(L)], 1)
    column_L = np.zeros(L, int)  # of the values
    page.say(BEGIN)
    for i in range(L):
        page.write(keys[which_DL[:, i]], -math.log(S - i))
        column_L[i] = page.write(values[value_DL[:, i]], -math.log(S))
    page.say(":")
    order_DL, rows = page.rng.random((page.D, L)).argsort(1, kind="stable"), np.arange(page.D)
    for i in range(L):
        asked_D = order_DL[:, i]
        page.write(keys[which_DL[rows, asked_D]], -math.log(L - i))
        page.write(values[value_DL[rows, asked_D]], tag=ANSWER, governor_D=column_L[asked_D])


def _induction(data: Data, page: Page) -> None:
    S, L = _sizes(data)
    symbols, which_DL = page.ids["symbols"], _different(data, page)
    page.say(BEGIN)
    column_L = np.array([page.write(symbols[which_DL[:, i]], -math.log(S - i)) for i in range(L)])
    page.say(":")
    asked_D = page.below(L - 1)
    rows = np.arange(page.D)
    page.write(symbols[which_DL[rows, asked_D]], -math.log(L - 1))
    page.write(symbols[which_DL[rows, asked_D + 1]], tag=ANSWER, governor_D=column_L[asked_D + 1])


def _copy(data: Data, page: Page, step: int = 1) -> None:
    page.say(BEGIN)
    chosen = [page.choose("symbols") for _ in range(data.length or 0)]
    page.say(":")
    for which_D, column in chosen[::step]:
        page.write(page.ids["symbols"][which_D], tag=ANSWER, governor_D=column)


def _reverse(data: Data, page: Page) -> None:
    _copy(data, page, -1)


def _selective_copy(data: Data, page: Page) -> None:
    S, L = _sizes(data)
    n, symbols = L + (data.distractors or 0), page.ids["symbols"]
    is_blank_DN = page.rng.random((page.D, n)).argsort(1, kind="stable") >= L  # each arrangement equally likely
    which_DL = np.stack([page.below(S) for _ in range(L)], 1)
    written_D = np.zeros(page.D, np.int64)
    column_N = np.zeros(n, int)
    page.say(BEGIN)
    for i in range(n):
        blank_D, symbols_left_D = is_blank_DN[:, i], L - written_D
        symbol_D = symbols[which_DL[np.arange(page.D), np.minimum(written_D, L - 1)]]
        # Of the n - i places left, symbols_left_D hold a symbol.
        left_D = np.where(blank_D, n - i - symbols_left_D, symbols_left_D)
        logp_D = np.log(left_D / (n - i)) - np.where(blank_D, 0, math.log(S))
        column_N[i] = page.write(np.where(blank_D, page.id_of["_"], symbol_D), logp_D)
        written_D += ~blank_D
    page.say(":")
    place_DN = is_blank_DN.argsort(1, kind="stable")  # of the symbols in their order, then of the blanks
    for i in range(L):
        page.write(symbols[which_DL[:, i]], tag=ANSWER, governor_D=column_N[place_DN[:, i]])


def _log_arrangements(n: int, k: int) -> float:
    """ln of n! / (n - k)!"""
    return math.lgamma(n + 1) - math.lgamma(n - k + 1)


def expected(data: Data) -> Expected:
    """Exact: all documents are equally likely, so the entropy is the log of their number."""
    S, L = _sizes(data)
    blanks = data.distractors or 0
    strings = L * math.log(S)
    tokens, nats = {
        "recall": lambda: (2 + 4 * L, _log_arrangements(S, L) + strings + math.lgamma(L + 1)),
        "induction": lambda: (4 + L, _log_arrangements(S, L) + math.log(L - 1)),
        "copy": lambda: (2 + 2 * L, strings),
        "reverse": lambda: (2 + 2 * L, strings),
        "selective_copy": lambda: (
            2 + 2 * L + blanks,
            strings + _log_arrangements(L + blanks, L) - math.lgamma(L + 1),
        ),
    }[data.name]()
    return Expected(tokens, nats, {"answer": 0.0})


def _task(title: str, origin: str, draw: Callable[[Data, Page], None]) -> Language:
    return Language(title, f"generated; {origin}", ("answer",), vocabulary, draw, expected, check=check)


TASKS = {
    "recall": _task("keys and their values", "after Arora et al. 2023, arXiv:2312.04927", _recall),
    "induction": _task("what followed it before?", "after Olsson et al. 2022, arXiv:2209.11895", _induction),
    "copy": _task("a string twice", "after Graves et al. 2014, arXiv:1410.5401", _copy),
    "reverse": _task("a string, and backwards", "after Weiss et al. 2021, arXiv:2106.06981", _reverse),
    "selective_copy": _task("symbols among blanks", "after Gu and Dao 2023, arXiv:2312.00752", _selective_copy),
}
