"""Dates as people write them, and as ISO 8601 does: `30 November 2026` and `2026-11-30`, of 1900 to 2099.

Only what can be read in one way: 30/11/26 has an order and a century that a reader would have to guess.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable

import numpy as np

from toymha.config import Data
from toymha.data.numerals import DIGITS, numeral
from toymha.schema import UserError

FIRST, LAST = datetime.date(1900, 1, 1), datetime.date(2099, 12, 31)
MONTHS = "January February March April May June July August September October November December".split()
ROMAN = "I II III IV V VI VII VIII IX X XI XII".split()


def _ordinal(day: int) -> str:
    return f"{day}{'th' if 10 < day < 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(day % 10, 'th')}"


def _year(d: datetime.date) -> str:
    return "".join(DIGITS[int(c)] for c in str(d.year)).replace("零", "〇")


def _month(d: datetime.date) -> str:
    return MONTHS[d.month - 1]


# No two of them write two dates alike, nor one date alike (`30 May 2026` is one form, so another has hyphens).
FORMS: tuple[Callable[[datetime.date], str], ...] = (
    lambda d: f"{_year(d)}年{numeral(d.month)}月{numeral(d.day)}日",  # 二〇二六年十一月三十日
    lambda d: f"{_year(d)}年{numeral(d.month)}月{numeral(d.day)}号",
    lambda d: f"{d.year}年{d.month}月{d.day}日",  # 2026年11月30日
    lambda d: f"{d.day} {_month(d)} {d.year}",  # 30 November 2026
    lambda d: f"{_ordinal(d.day)} {_month(d)} {d.year}",  # 30th November 2026
    lambda d: f"{_month(d)} {d.day}, {d.year}",  # November 30, 2026
    lambda d: f"{_month(d)[:3]} {d.day} {d.year}",  # Nov 30 2026
    lambda d: f"{d.day}-{_month(d)[:3]}-{d.year}",  # 30-Nov-2026
    lambda d: f"{d.day}.{d.month}.{d.year}",  # 30.11.2026
    lambda d: f"{d.day}. {ROMAN[d.month - 1]}. {d.year}",  # 30. XI. 2026
    lambda d: f"{d.year}/{d.month}/{d.day}",  # 2026/11/30
    lambda d: f"{d.year:04}{d.month:02}{d.day:02}",  # 20261130
)
POSSIBLE = ((LAST - FIRST).days + 1) * len(FORMS)


def draw(data: Data) -> list[tuple[str, str]]:
    """`data.examples` different ones of all dates in all forms, each as likely. Raises UserError for more than that."""
    examples = data.examples or 0
    if examples > POSSIBLE:
        raise UserError(f"data.examples={examples}: there are {POSSIBLE:,} dates, in {len(FORMS)} forms each")
    rng = np.random.Generator(np.random.PCG64(data.text_seed or 0))
    chosen = rng.random(POSSIBLE).argsort(kind="stable")[:examples]
    days = [(FIRST + datetime.timedelta(days=int(i) // len(FORMS)), int(i) % len(FORMS)) for i in chosen]
    return [(FORMS[form](day), day.isoformat()) for day, form in days]
