"""Chinese numerals and the numbers they stand for: `十二万三千` and `123000`, from 1 to 99,999,999.

    section     four digits: 千 百 十 and units; zeros inside are one 零, zeros at its end are not read
    number      section 万 section; 零 between them where the second one has less than four digits
    10 to 19    as the first thing that is said `十二`, elsewhere `一百一十二`
    2           before 百, 千 and 万 (alone) `二` or `两`, all of a number alike; in all other places `二`

So 10,005 is 一万零五, 100,500 is 十万零五百, 10,005,000 is 一千万五千 and 1,050,000 is 一百零五万.
"""

from __future__ import annotations

import numpy as np

from toymha.config import Data

DIGITS = "零一二三四五六七八九"
LONGEST = 8  # digits


def numeral(n: int, two: str = "二") -> str:
    """The number as it is read, 1 <= n < 10^8; `two` is 二 or 两."""
    high, low = divmod(n, 10_000)
    out = (two if high == 2 else _section(high, two)) + "万" if high else ""
    if low:
        out += ("零" if high and low < 1000 else "") + _section(low, two)
    return out.removeprefix("一") if out.startswith("一十") else out


def _section(n: int, two: str) -> str:
    out, gap = "", False
    for size, name in ((1000, "千"), (100, "百"), (10, "十"), (1, "")):
        digit = n // size % 10
        if digit:
            spoken = two if digit == 2 and size >= 100 else DIGITS[digit]
            out += ("零" if gap and out else "") + spoken + name
        gap = not digit
    return out


def draw(data: Data) -> list[tuple[str, str]]:
    """`data.examples` different numbers. Each length is as likely, and so is zero as all other digits behind the first.

    A number that was drawn before is drawn again: of the short ones there are few, and soon all of them are there.
    """
    examples = data.examples or 0
    rng = np.random.Generator(np.random.PCG64(data.text_seed or 0))
    values, twos = np.empty(0, np.int64), np.empty(0, bool)
    while len(values) < examples:
        random_NL = rng.random((examples, LONGEST + 2))
        length_N = 1 + (random_NL[:, 0] * LONGEST).astype(np.int64)
        digit_NL = np.maximum(0, (random_NL[:, 2:] * 18).astype(np.int64) - 8)  # 0 with probability 9/18
        digit_NL[:, 0] = 1 + (random_NL[:, 2] * 9).astype(np.int64)
        inside_NL = np.arange(LONGEST) < length_N[:, None]
        place_NL = 10 ** np.where(inside_NL, length_N[:, None] - 1 - np.arange(LONGEST), 0)
        values = np.append(values, (digit_NL * place_NL * inside_NL).sum(1))
        twos = np.append(twos, random_NL[:, 1] < 0.5)
        first = np.sort(np.unique(values, return_index=True)[1])
        values, twos = values[first], twos[first]
    return [(numeral(n, "两" if is_liang else "二"), str(n)) for n, is_liang in zip(values.tolist(), twos[:examples])]
