"""Keys and element-addressed draws: element i of a draw is a function of (key, i), whatever the mesh.

A key is a CPU int64 tensor of shape [2]: two 32-bit words, for one draw. `split` and `fold_in` make more.
Inside `shard_map` a draw takes the global shape and a spec and returns this rank's part, with the type of the
spec; work and memory are those of the part. Words, and so keys, `bits`, `bernoulli`, `randint`, are the same
everywhere; floats are bitwise the same for every mesh, spec and world size on one device type and build.

Layout, version 1. Any change is another version, as it changes everybody's initial values and masks.

    block        Philox4x32-10 of counter (n mod 2^32, n >> 32, 0, tag) under the key's two words
    tag          0 a draw, 1 fold_in of an int, 2 split, 3 fold_in of a str
    element i    (row-major, in the global shape) has word w = word i & 3 of block i >> 2
    key(n)       (n mod 2^32, n >> 32)
    fold_in      words 0, 1 of block n: the int in two's complement, or the str's BLAKE2b-64, little-endian
    split        words 0, 1 of block j, for key j
    uniform      low + w (high - low) / 2^32
    normal       mean + std sqrt(2) erfinv(y), y = (w + 1/2) / 2^31 - 1: within 6.34 std of the mean
    trunc_normal the same of y = lo + (w + 1/2) (hi - lo) / 2^32; lo, hi = erf((a|b - mean) / (std sqrt(2)))
    bernoulli    w < round(2^32 p)
    randint      low + floor(w (high - low) / 2^32)
    floats       in float64, rounded to float32, then to the dtype (float64: not at all, with 32 random bits);
                 where there are bounds, last clamped to the values of the dtype within them

Source: Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard._comm import checker, in_region
from fshard._comm import region as current_region
from fshard._torch_compat import without_functorch
from fshard.errors import fail, raise_all
from fshard.spec import Box, P, box_shape, full_box, local_box, spec_errors

from .keys import DRAW, plain, words_of
from .philox import M, Word, philox, philox_lanes

VERSION = 1

_ALL = P()
_LANES = 1 << 15  # blocks at a time for each CPU thread; torch gives none a smaller share of an operation


# --- any part of a draw -----------------------------------------------------------------------------------


class _Law(NamedTuple):
    """How words become values; `of` may overwrite them. They are int64, or float64 if `dtype` is floating."""

    of: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    low: float | None = None  # bounds, after the cast
    high: float | None = None


class _Runs(NamedTuple):
    """A box as equally long runs of elements that are contiguous in the global row-major order."""

    many: int
    length: int
    base: int  # the global index of the box's first element
    outer: list[tuple[int, int]]  # (size, stride) of the dims that lead from run to run, at least one

    @staticmethod
    def of(shape: Sequence[int], box: Box) -> _Runs:
        sizes = box_shape(box)
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        cut = max([0, *(d for d, n in enumerate(sizes) if n != shape[d])])  # the dims after it are whole
        base = sum(s.start * stride for s, stride in zip(box, strides, strict=True))
        outer = [(1, 0)]
        for size, stride in zip(sizes[:cut], strides[:cut], strict=True):
            if outer[-1][0] == 1 or outer[-1][1] == size * stride:  # as one dim: a run divides by each but the first
                outer[-1] = (outer[-1][0] * size, stride)
            else:
                outer.append((size, stride))
        return _Runs(math.prod(sizes[:cut]), math.prod(sizes[cut:]), base, outer)

    def start(self, run: Word) -> Word:
        """The global index of the first element of a run (an int), or of many (an int64 tensor)."""
        at = self.base
        for size, stride in reversed(self.outer[1:]):
            rest = run // size
            at, run = at + (run - rest * size) * stride, rest
        return at + run * self.outer[0][1]

    def offset(self) -> int | None:
        """Where in its block of four every run starts; None where they differ."""
        return self.base & 3 if all(n == 1 or stride % 4 == 0 for n, stride in self.outer) else None

    def blocks(self, length: int) -> int:
        """How many blocks hold the words of `length` elements of any run, from a multiple of four on."""
        offset = self.offset()
        return ((3 if offset is None else offset) + length + 3) >> 2

    def trim(self, x: Tensor, start: Tensor, length: int) -> Tensor:
        """From whole blocks [R, 4 N] the runs themselves, [R, length]."""
        offset = self.offset()
        if offset is not None:
            return x[:, offset : offset + length]
        return x.gather(1, (start & 3) + torch.arange(length, device=x.device))

    def trim_to(self, out: Tensor, x: Tensor, top: int, start: Tensor) -> None:
        """`trim` into out, run `top` the first: equally spaced runs are alike every four, and need no gather."""
        if len(self.outer) > 1:
            out.copy_(self.trim(x, start, out.shape[1]))
            return
        for run in range(min(4, len(out))):
            at = self.start(top + run) & 3
            out[run::4] = x[run::4, at : at + out.shape[1]]


def _draw(verb: str, key: Tensor, shape: Sequence[int], box: Box, law: _Law, device: Any) -> Tensor:
    """The part of a draw of global `shape` that `box` selects.

    It is made in tiles that stay in the cache: at most 16 MiB of extra memory on a CPU, whatever the size.
    """
    k = words_of(f"random.{verb}", key)
    if plain(key) is None:
        return _traced(law, k, shape, box, device)
    with without_functorch():  # a draw is a constant to any gradient
        out = torch.empty(box_shape(box), dtype=law.dtype, device=device)
        if plain(out) is None:
            return _traced(law, k, shape, box, device)
        if out.numel():
            _fill(law, k, _Runs.of(shape, box), out)
        return out


def _fill(law: _Law, k: Sequence[int], runs: _Runs, out: Tensor) -> None:
    threads = min(torch.get_num_threads(), 2 if runs.offset() is None else 4)  # a gather takes more memory
    lanes = _LANES * threads if out.device.type == "cpu" else 1 << 20
    width = min(runs.length, 4 * lanes)
    height = min(runs.many, max(1, lanes // runs.blocks(width)))
    scratch = torch.empty(5 * height * runs.blocks(width), dtype=torch.int64, device=out.device)
    rows = out.view(runs.many, runs.length)
    for top in range(0, runs.many, height):
        for left in range(0, runs.length, width):
            _tile(law, k, runs, (top, left), rows[top : top + height, left : left + width], scratch)


def _tile(law: _Law, k: Sequence[int], runs: _Runs, at: tuple[int, int], out: Tensor, lanes: Tensor) -> None:
    """Fill out [R, L] with the runs from at[0] on, of each the elements from at[1] on."""
    top, left = at
    count, length = out.shape
    n = runs.blocks(length)
    lanes = lanes[: 5 * count * n].view(5, -1)
    words = lanes[1:]
    start = runs.start(torch.arange(top, top + count, device=out.device)[:, None]) + left  # [R, 1]
    torch.add(start >> 2, torch.arange(n, device=out.device), out=words[3].view(count, n))
    first, last = runs.start(top) + left, runs.start(top + count - 1) + left + length + 3
    high = first >> 34 if first >> 34 == last >> 34 else words[3] >> 32
    words[3].bitwise_and_(M)
    philox_lanes(words, lanes[0], high, k)
    x = law.of(words.view(torch.float64).copy_(words) if law.dtype.is_floating_point else words)
    whole_blocks = runs.offset() == 0 and length % 4 == 0
    to = out if whole_blocks else torch.empty(count, 4 * n, dtype=law.dtype, device=out.device)
    to.view(count, n, 4).permute(2, 0, 1).copy_(x.view(4, count, n))
    if not whole_blocks:
        runs.trim_to(out, to, top, start)
    if law.low is not None:
        out.clamp_(law.low, law.high)


def _traced(law: _Law, k: Sequence[Word], shape: Sequence[int], box: Box, device: Any) -> Tensor:
    """All at once and out of place: for compilers, which fuse it, for vmap and for fake tensors."""
    out = torch.empty(box_shape(box), dtype=law.dtype, device=device)
    if out.numel() == 0:
        return out
    runs, device = _Runs.of(shape, box), out.device
    k = [w.to(device) if isinstance(w, Tensor) else w for w in k]
    start = runs.start(torch.arange(runs.many, device=device)[:, None])
    block = (start >> 2) + torch.arange(runs.blocks(runs.length), device=device)
    words = torch.stack(philox((block & M, block >> 32, 0, DRAW), k), -1).flatten(-2)
    words = runs.trim(words, start, runs.length)
    x = law.of(words.double() if law.dtype.is_floating_point else words).to(law.dtype)
    return (x if law.low is None else x.clamp(law.low, law.high)).view(out.shape)


# --- laws -------------------------------------------------------------------------------------------------


def _float_law(of: Callable[[Tensor], Tensor], dtype: torch.dtype, low: float | None = None, high: float = 0.0) -> _Law:
    def rounded(words: Tensor) -> Tensor:
        return of(words) if dtype.itemsize >= 4 else of(words).float()

    bounds = () if low is None else (-_floor(-low, dtype), _floor(high, dtype))
    return _Law(rounded, dtype, *bounds)


def _floor(x: float, dtype: torch.dtype) -> float:
    """The largest value of `dtype` that is at most x."""
    if not math.isfinite(x):
        return x
    info = torch.finfo(dtype)
    spacing = info.eps * max(2.0 ** (math.frexp(x)[1] - 1), info.tiny)
    return math.floor(x / spacing) * spacing


def _inverse_cdf(lo: float, hi: float, mean: float, std: float) -> Callable[[Tensor], Tensor]:
    scale = (hi - lo) * 2.0**-32

    def of(w: Tensor) -> Tensor:
        # Each operation rounds. A fused multiply-add would make a value depend on its place in a vector.
        x = w.mul_(scale).add_(lo + scale / 2).erfinv_().mul_(std * math.sqrt(2))
        return x.add_(mean) if mean else x

    return of


def normal_box(
    key: Tensor, shape: Sequence[int], box: Box, *, mean: float = 0.0, std: float = 1.0,
    dtype: torch.dtype = torch.float32, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """`normal`, for an explicit box of the global shape: no mesh, no region. Initializers use these three."""
    return _draw("normal", key, shape, box, _float_law(_inverse_cdf(-1.0, 1.0, mean, std), dtype), device)


def trunc_normal_box(
    key: Tensor, shape: Sequence[int], box: Box, *, mean: float = 0.0, std: float = 1.0, a: float = -2.0,
    b: float = 2.0, dtype: torch.dtype = torch.float32, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """`trunc_normal`, for an explicit box of the global shape."""
    lo, hi = (math.erf((x - mean) / (std * math.sqrt(2))) if std > 0 else 0.0 for x in (a, b))
    if not hi - lo > 1e-9:  # float64 has too few values there to draw from
        raise fail("random.trunc_normal: next to nothing of this normal lies in [a, b]", mean=mean, std=std,
                   a=a, b=b, fix="std > 0 and a < b, which are values, not multiples of std")  # fmt: skip
    law = _float_law(_inverse_cdf(lo, hi, mean, std), dtype, a, b)
    return _draw("trunc_normal", key, shape, box, law, device)


def uniform_box(
    key: Tensor, shape: Sequence[int], box: Box, *, low: float = 0.0, high: float = 1.0,
    dtype: torch.dtype = torch.float32, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """`uniform`, for an explicit box of the global shape."""
    if not low < high:
        raise fail("random.uniform: nothing lies in [low, high)", low=low, high=high, fix="low < high")
    scale, last = (high - low) * 2.0**-32, math.nextafter(high, -math.inf)
    law = _float_law(lambda w: w.mul_(scale).add_(low), dtype, low, last)
    return _draw("uniform", key, shape, box, law, device)


# --- draws ------------------------------------------------------------------------------------------------


def _part(
    verb: str, key: Tensor, shape: Sequence[int], spec: P, device: torch.device | None,
    draw: Callable[[Box, torch.device | None], Tensor],
) -> Tensor:  # fmt: skip
    """This rank's part by `spec`, made by `draw`, and in a checked call typed."""
    box, device = _here(verb, shape, spec, device)
    found = checker()
    if found is None:
        return draw(box, device)
    with found.paused():
        out = draw(box, device)
    found.set_draw_type(out, f"random.{verb}", key, spec.axes)
    return out


def _here(verb: str, shape: Sequence[int], spec: P, device: torch.device | None) -> tuple[Box, torch.device | None]:
    """This rank's box, and where it is made: if not said, on the region's device."""
    if device is None and in_region():
        device = current_region().device
    if not spec.axes:
        return full_box(shape), device
    region = current_region(f"random.{verb} with spec={spec}")
    raise_all(spec_errors(f"random.{verb}", tuple(shape), spec, region.sizes))
    return local_box(shape, spec, region.sizes, region.coords), device


def normal(
    key: Tensor, shape: Sequence[int], *, spec: P = _ALL, mean: float = 0.0, std: float = 1.0,
    dtype: torch.dtype = torch.float32, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """N(mean, std^2): of a draw of global `shape`, this rank's part by `spec`.

    >>> normal(key(0), (3,))
    tensor([-0.2558,  1.1776,  0.6302])
    """
    return _part("normal", key, shape, spec, device, lambda box, at: normal_box(
        key, shape, box, mean=mean, std=std, dtype=dtype, device=at))  # fmt: skip


def trunc_normal(
    key: Tensor, shape: Sequence[int], *, spec: P = _ALL, mean: float = 0.0, std: float = 1.0,
    a: float = -2.0, b: float = 2.0, dtype: torch.dtype = torch.float32, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """N(mean, std^2) cut to [a, b]: values, not multiples of std, as in `torch.nn.init.trunc_normal_`."""
    return _part("trunc_normal", key, shape, spec, device, lambda box, at: trunc_normal_box(
        key, shape, box, mean=mean, std=std, a=a, b=b, dtype=dtype, device=at))  # fmt: skip


def uniform(
    key: Tensor, shape: Sequence[int], *, spec: P = _ALL, low: float = 0.0, high: float = 1.0,
    dtype: torch.dtype = torch.float32, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """U[low, high): never `high`, also where the dtype would round to it."""
    return _part("uniform", key, shape, spec, device, lambda box, at: uniform_box(
        key, shape, box, low=low, high=high, dtype=dtype, device=at))  # fmt: skip


def bernoulli(
    key: Tensor, shape: Sequence[int], *, p: float = 0.5, spec: P = _ALL, device: torch.device | None = None
) -> Tensor:
    """True with probability p, to within 2^-33: a bool mask. p = 0 and p = 1 are exact."""
    if not 0 <= p <= 1:
        raise fail("random.bernoulli: p is no probability", p=p, fix="0 <= p <= 1")
    threshold = round(p * (1 << 32))
    law = _Law(lambda w: w < threshold, torch.bool)
    return _part("bernoulli", key, shape, spec, device, lambda box, at: _draw("bernoulli", key, shape, box, law, at))


def randint(
    key: Tensor, shape: Sequence[int], *, low: int = 0, high: int, spec: P = _ALL,
    device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """An int64 of range(low, high), each with probability 1 / (high - low) to within 2^-32.

    Raises ShardingError unless 0 < high - low <= 2^31.
    """
    n = high - low
    if not 0 < n <= 1 << 31:
        raise fail("random.randint: no range to draw from", low=low, high=high,
                   needed="0 < high - low <= 2^31", fix="low < high; for more bits, random.bits")  # fmt: skip

    def of(w: Tensor) -> Tensor:
        return w.mul_(n).bitwise_right_shift_(32).add_(low)

    law = _Law(of, torch.int64)
    return _part("randint", key, shape, spec, device, lambda box, at: _draw("randint", key, shape, box, law, at))


def bits(key: Tensor, shape: Sequence[int], *, spec: P = _ALL, device: torch.device | None = None) -> Tensor:
    """The words themselves: 32 random bits in each int64."""
    law = _Law(lambda w: w, torch.int64)
    return _part("bits", key, shape, spec, device, lambda box, at: _draw("bits", key, shape, box, law, at))
