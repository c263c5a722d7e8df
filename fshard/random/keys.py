"""Keys: a key is a CPU int64 tensor [2], two 32-bit words, for one draw; `split` and `fold_in` make more."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard._core.region import checker
from fshard._core.torch import assume_constant_result
from fshard.errors import checked, fail
from fshard.spec import describe

from .philox import M, Word, philox

DRAW, _FOLD, _SPLIT, _NAME = range(4)  # the tags of the counter layout: see `draws`


@checked
def key(n: int) -> Tensor:
    """Make the key of an integer of up to 64 bits: int64[2], on the CPU.

    >>> key(2**32 + 7)
    tensor([7, 1])

    Raises ShardingError for anything else, negative integers included.
    """
    if not isinstance(n, int) or not 0 <= n < 1 << 64:
        raise fail(f"key: cannot make a key of {n!r}", needed="an int, 0 <= n < 2^64", fix="fs.key(0)")
    return torch.tensor([n & M, n >> 32], device="cpu")


@checked
def fold_in(key: Tensor, data: int | str | Tensor) -> Tensor:
    """Derive another key from a key and `data`: the name of a layer, the number of a step or an example.

    An int has 64 bits and may be negative; a tensor is an integer of shape []. If a compiled step takes its number as
    a tensor, it is compiled only once.

    >>> fold_in(fold_in(key(0), "h.3.up"), 100)
    tensor([2581983587, 1866330723])

    Raises ShardingError for data that is neither an int of 64 bits nor a str.
    """
    k = key_words("fold_in", key)
    n: Word = data
    if isinstance(data, str):
        n = _digest(data)
    elif isinstance(data, Tensor) and data.ndim == 0 and data.dtype in (torch.int64, torch.int32):
        known = values_now(data)
        n = data.long() if known is None else known
    elif not isinstance(data, int) or not -(1 << 63) <= data < 1 << 63:
        got = describe(data) if isinstance(data, Tensor) else repr(data)
        raise fail("fold_in: data of the wrong type", got=got,
                   needed="a str, an int of 64 bits, i64[], i32[]", fix="fs.fold_in(key, step)")  # fmt: skip
    tag = _NAME if isinstance(data, str) else _FOLD
    words = philox((n & M, (n >> 32) & M, 0, tag), k)[:2]
    return torch.stack(words) if isinstance(words[0], Tensor) else _key_tensor(words, "fold_in", key, data)


@checked
def split(key: Tensor, n: int = 2) -> Tensor:
    """Derive several keys from one: int64[n, 2].

    >>> a, b = split(key(0))
    >>> a
    tensor([3710895380, 2918555867])

    Raises ShardingError for n below 0.
    """
    if n < 0:
        raise fail(f"split: n={n}", fix="0 or more keys")
    k = key_words("split", key)
    if isinstance(k[0], int) and 0 < n <= 64:
        return _key_tensor([philox((j, 0, 0, _SPLIT), k)[:2] for j in range(n)], "split", key)
    return torch.stack(philox((torch.arange(n, device=key.device), 0, 0, _SPLIT), k)[:2], -1)


def check_key(verb: str, key: object) -> None:
    """Raise ShardingError, naming `verb`, unless `key` is a key.

    >>> check_key("draw", torch.ones(3))
    Traceback (most recent call last):
        ...
    ShardingError: draw: not a key
      got  f32[3]    needed  i64[2]
      fix: fs.key(0)
    """
    if isinstance(key, Tensor) and key.dtype == torch.int64 and tuple(key.shape) == (2,):
        return
    fix = "fs.key(0)"
    if isinstance(key, Tensor) and key.dtype == torch.int64 and key.ndim == 2 and key.shape[1] == 2:
        fix = "pass one of these keys, keys[0], or map over them with torch.vmap"
    got = describe(key) if isinstance(key, Tensor) else repr(key)
    raise fail(f"{verb}: not a key", got=got, needed="i64[2]", fix=fix)


def values_now(x: Tensor) -> Any:
    """Return the values of a tensor as Python numbers, or None if it has none yet: traced, batched or fake."""
    if torch.compiler.is_dynamo_compiling() or type(x) is not Tensor:
        return None
    try:
        return x.tolist()
    except RuntimeError:  # batched by vmap, on the meta device, or fake under a gradient
        return None


def key_words(verb: str, key: Tensor) -> Sequence[Word]:
    """Return the two words of a key: ints where they are known, else tensors of shape []."""
    check_key(verb, key)
    known = values_now(key)
    return (key & M).unbind() if known is None else [w & M for w in known]


def _key_tensor(words: Any, verb: str, *sources: Any) -> Tensor:
    """Make a key of Python ints that were computed from `sources`: the key varies over what they vary over."""
    out = torch.tensor(words, device="cpu")
    types = checker()
    if types is not None:
        types.set_integer_type(out, verb, of=sources)
    return out


@assume_constant_result  # dynamo cannot trace hashlib
def _digest(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
