"""Keys: a key is a CPU int64 tensor [2], two 32-bit words, for one draw; `split` and `fold_in` make more."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard._comm import checker
from fshard._torch_compat import get_unwrapped, is_grad_tracking, is_wrapped, without_functorch
from fshard.errors import fail
from fshard.spec import describe

from .philox import M, Word, philox

DRAW, _FOLD, _SPLIT, _NAME = range(4)  # the tags: see the layout in `random`


def key(n: int) -> Tensor:
    """The key of an integer of up to 64 bits: int64[2], on the CPU.

    >>> key(2**32 + 7)
    tensor([7, 1])

    Raises ShardingError for anything else, negative integers included.
    """
    if not isinstance(n, int) or not 0 <= n < 1 << 64:
        raise fail(f"key: {n!r} makes no key", needed="an int, 0 <= n < 2^64", fix="fs.key(0)")
    return torch.tensor([n & M, n >> 32], device="cpu")


def fold_in(key: Tensor, data: int | str | Tensor) -> Tensor:
    """Another key, for this `data`: the name of a layer, the number of a step or an example.

    An int has 64 bits and may be negative; a tensor is an integer of shape []. A compiled step that takes its
    number as a tensor is compiled once.

    >>> fold_in(fold_in(key(0), "h.3.up"), 100)
    tensor([2581983587, 1866330723])
    """
    k = words_of("fold_in", key)
    n: Word = data
    if isinstance(data, str):
        n = _digest(data)
    elif isinstance(data, Tensor) and data.ndim == 0 and data.dtype in (torch.int64, torch.int32):
        known = plain(data)
        n = data.long() if known is None else int(known)
    elif not isinstance(data, int) or not -(1 << 63) <= data < 1 << 63:
        got = describe(data.dtype, data.shape) if isinstance(data, Tensor) else repr(data)
        raise fail("fold_in: this cannot be folded in", got=got,
                   needed="a str, an int of 64 bits, i64[], i32[]", fix="fs.fold_in(key, step)")  # fmt: skip
    tag = _NAME if isinstance(data, str) else _FOLD
    made = philox((n & M, (n >> 32) & M, 0, tag), k)[:2]
    return torch.stack(made) if isinstance(made[0], Tensor) else _tensor(made, "fold_in", key, data)


def split(key: Tensor, n: int = 2) -> Tensor:
    """Several keys from one: int64[n, 2].

    >>> a, b = split(key(0))
    >>> a
    tensor([3710895380, 2918555867])
    """
    k = words_of("split", key)
    if isinstance(k[0], int) and 0 < n <= 64:
        return _tensor([philox((j, 0, 0, _SPLIT), k)[:2] for j in range(n)], "split", key)
    return torch.stack(philox((torch.arange(n, device=key.device), 0, 0, _SPLIT), k)[:2], -1)


def check_key(verb: str, key: object) -> None:
    """Raise ShardingError, naming `verb`, unless `key` is a key."""
    if isinstance(key, Tensor) and key.dtype == torch.int64 and tuple(key.shape) == (2,):
        return
    fix = f"fs.key({key})" if isinstance(key, int) and 0 <= key < 1 << 64 else "fs.key(0)"
    if isinstance(key, Tensor) and key.dtype == torch.int64 and key.ndim == 2 and key.shape[1] == 2:
        fix = "pass one of these keys, keys[0], or map over them with torch.vmap"
    got = describe(key.dtype, key.shape) if isinstance(key, Tensor) else repr(key)
    raise fail(f"{verb}: this is no key", got=got, needed="i64[2]", fix=fix)


def plain(x: Tensor) -> Tensor | None:
    """The tensor itself, if it is just its values, here and now; `None` if it is traced, batched or fake.

    Under a gradient every tensor comes wrapped; integers have none, so the wrapping is taken off.
    """
    if torch.compiler.is_dynamo_compiling():
        return None
    while is_grad_tracking(x):
        x = get_unwrapped(x)
    return x if type(x) is Tensor and not is_wrapped(x) else None


def words_of(verb: str, key: Tensor) -> Sequence[Word]:
    """The two words of a key: ints where they can be known, tensors of shape [] where not."""
    check_key(verb, key)
    known = plain(key)
    return (key & M).unbind() if known is None else [w & M for w in known.tolist()]


def _tensor(words: Any, verb: str, *of: Any) -> Tensor:
    """A key made of Python numbers, which `of` gave: it varies over what they vary over."""
    with without_functorch():  # a constant to any gradient, and not wrapped by it
        out = torch.tensor(words, device="cpu")
    found = checker()
    if found is not None:
        found.set_integer_type(out, verb, of=of)
    return out


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


# Dynamo cannot trace hashlib. This is torch.compiler.assume_constant_result, less its import of the compiler.
_digest._dynamo_marked_constant = True  # type: ignore[attr-defined]


__all__ = ["DRAW", "check_key", "fold_in", "key", "plain", "split", "words_of"]
