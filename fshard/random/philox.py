"""The Philox4x32-10 generator: random words as a function of a counter and a key.

Source: Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard._core.region import has_values

M = 0xFFFFFFFF
_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)

Word = Any  # 32 bits: a Python int, or each element of an int64 tensor


def philox(counter: Sequence[Word], key: Sequence[Word]) -> tuple[Word, Word, Word, Word]:
    """Compute four random words from four counter words and two key words.

    >>> [f"{w:08x}" for w in philox((0, 0, 0, 0), (0, 0))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    a, b, c, d = counter
    if not has_values():  # an abstract mesh needs only the shape and the type
        total = a + b + c + d + key[0] + key[1]
        if isinstance(total, Tensor):
            return total, total, total, total
    for k0, k1 in _round_keys(key):
        (high0, low0), (high1, low1) = _product(_MULTIPLY[0], a), _product(_MULTIPLY[1], c)
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
    return a, b, c, d


def _round_keys(key: Sequence[Word]) -> list[tuple[Word, Word]]:
    return [((key[0] + r * _WEYL[0]) & M, (key[1] + r * _WEYL[1]) & M) for r in range(10)]


def _product(m: int, x: Word) -> tuple[Word, Word]:
    """Return the high and the low word of m x, from (m - 2^32) x, which does not overflow an int64.

    Overflow is undefined in C++: a compiler may assume that m x is positive, and drop the mask of (m x >> 32) & M.
    """
    p = (m - (1 << 32)) * x
    return (p >> 32) + x, p & M


def philox_in_place(words: Tensor, spare: Tensor, high: Word, key: Sequence[int]) -> None:
    """Replace int64 words [4, N] by `philox` of (words[3], high, 0, 0), in a third of its time; spare [N].

    Products wrap. The high word of a product is masked before it is multiplied, the low word only at the end. The rows
    change places every round. Rounds 1 and 2 are unrolled, since half of their words are constants.
    """
    a, b, c, d = words.unbind()
    keys = _round_keys(key)
    d.mul_(_MULTIPLY[0])
    torch.bitwise_right_shift(d, 32, out=b).bitwise_xor_(keys[0][1]).bitwise_and_(M).mul_(_MULTIPLY[1])
    torch.bitwise_right_shift(b, 32, out=a).bitwise_xor_(keys[1][0]).bitwise_and_(M)
    high, low = _product(_MULTIPLY[0], high ^ keys[0][0])
    torch.bitwise_xor(d, high ^ keys[1][1], out=c).bitwise_and_(M)
    d[...] = low
    for k0, k1 in keys[2:]:
        for x, m, other, k in ((c, _MULTIPLY[1], b, k0), (a, _MULTIPLY[0], d, k1)):
            torch.bitwise_right_shift(x.mul_(m), 32, out=spare)
            other.bitwise_xor_(spare).bitwise_xor_(k).bitwise_and_(M)
        a, b, c, d = b, c, d, a
    words[1::2].bitwise_and_(M)
