"""Keys and element-addressed draws: element i of a draw is a function of (key, i), on every mesh.

A key is a CPU int64 tensor of shape [2]: two 32-bit words, for one draw. `split` and `fold_in` make more.
Inside `shard_map` a draw takes the global shape (`fs.global_shape`) and a spec and returns this rank's part, with the
type of the spec; work and memory grow with the part. Words, and so keys, `bits`, `bernoulli`, `randint`, are the
same everywhere; floats are bitwise the same for every mesh, spec and world size on one device type and build.

Layout, version 1. Any change is another version, as it changes everybody's initial values and masks.

    block        Philox4x32-10 of counter (n mod 2^32, n >> 32, 0, tag) under the key's two words
    tag          0 a draw, 1 fold_in of an int, 2 split, 3 fold_in of a str
    element i    (row-major, in the global shape) has word w = word i & 3 of block i >> 2
    key(n)       (n mod 2^32, n >> 32)
    fold_in      words 0, 1 of block n: the int in two's complement, or the str's BLAKE2b-64, little-endian
    split        words 0, 1 of block j, for key j
    uniform      low + w (high - low) / 2^32
    normal       mean + std sqrt(2) erfinv(y), y = (w + 1/2) / 2^31 - 1: within 6.34 std of the mean
    trunc_normal the same with y = lo + (w + 1/2) (hi - lo) / 2^32; lo, hi = erf((a|b - mean) / (std sqrt(2)))
    bernoulli    w < round(2^32 p)
    randint      low + floor(w (high - low) / 2^32)
    exponential  -log(u), u = (w + 1/2) / 2^32
    gumbel       -log(-log(u))
    floats       in float64, rounded to float32, then to the dtype (float64: not at all, with 32 random bits);
                 where there are bounds, last clamped to the values of the dtype within them

Source: Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard._core.microbatch import microbatch
from fshard._core.region import checker, in_region
from fshard._core.region import region as current_region
from fshard.errors import checked, fail, raise_all
from fshard.spec import Box, P, box_shape, full_box, local_box, spec_errors

from .keys import DRAW, key_words
from .philox import M, Word, philox, philox_in_place
from .threads import fill_parts, threads_to_fill

VERSION = 1

_REPLICATED = P()
_TILE_BLOCKS = 1 << 15  # Philox blocks per tile and CPU thread; torch splits no operation finer between threads


# --- any part of a draw -----------------------------------------------------------------------------------


class _Distribution(NamedTuple):
    """A map from random words to values; `from_words` may overwrite them: int64, or float64 for a floating `dtype`."""

    from_words: Callable[[Tensor], Tensor]
    dtype: torch.dtype
    low: float | None = None  # bounds, after the cast
    high: float | None = None


class _Runs(NamedTuple):
    """A box as runs of equal length, whose elements are contiguous in the global row-major order."""

    number: int
    length: int
    base: int  # the global index of the box's first element
    outer: list[tuple[int, int]]  # (size, stride) of the dims outside the runs, at least one
    offset: int | None  # of each run's first element in its block of four; None where the runs differ

    @staticmethod
    def from_box(shape: Sequence[int], box: Box) -> _Runs:
        sizes = box_shape(box)
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        last_cut = max([0, *(d for d, n in enumerate(sizes) if n != shape[d])])  # all dims after it are complete
        base = sum(s.start * stride for s, stride in zip(box, strides, strict=True))
        outer = [(1, 0)]
        for size, stride in zip(sizes[:last_cut], strides[:last_cut], strict=True):
            if outer[-1][0] == 1 or outer[-1][1] == size * stride:  # join dims: `start` divides once per dim
                outer[-1] = (outer[-1][0] * size, stride)
            else:
                outer.append((size, stride))
        offset = base & 3 if all(n == 1 or stride % 4 == 0 for n, stride in outer) else None
        return _Runs(math.prod(sizes[:last_cut]), math.prod(sizes[last_cut:]), base, outer, offset)

    def start(self, run: Word) -> Word:
        """Return the global index of the first element of a run (an int) or of several (an int64 tensor)."""
        index = self.base
        for size, stride in reversed(self.outer[1:]):
            quotient = run // size
            index, run = index + (run - quotient * size) * stride, quotient
        return index + run * self.outer[0][1]

    def blocks(self, length: int) -> int:
        """Return the number of blocks that hold `length` elements of any run; the first index is a multiple of four."""
        return ((3 if self.offset is None else self.offset) + length + 3) >> 2

    def trim(self, x: Tensor, start: Tensor, length: int) -> Tensor:
        """Cut blocks [R, 4 N] to the runs, [R, length], which start at the indices `start` [R, 1]."""
        if self.offset is not None:
            return x[:, self.offset : self.offset + length]
        return x.gather(1, (start & 3) + torch.arange(length, device=x.device))

    def trim_to(self, out: Tensor, x: Tensor, top: int, start: Tensor) -> None:
        """Write `trim` to `out`, from run `top` on.

        Equally spaced runs have the same offset every fourth run, so that four slices replace the gather.
        """
        if len(self.outer) > 1:
            out.copy_(self.trim(x, start, out.shape[1]))
            return
        for run in range(min(4, len(out))):
            offset = self.start(top + run) & 3
            out[run::4] = x[run::4, offset : offset + out.shape[1]]


def _draw(verb: str, key: Tensor, shape: Sequence[int], box: Box, distribution: _Distribution, device: Any) -> Tensor:
    """Draw the part that `box` selects of a leaf of global `shape`.

    The part is drawn in tiles that stay in the cache: at most 16 MiB of extra memory on a CPU, for any size.
    """
    k = key_words(f"random.{verb}", key)
    if len(box) != len(shape):
        raise fail(f"random.{verb}: a box of {len(box)} dims", fix="a slice for each dim of shape", shape=list(shape))
    if isinstance(k[0], Tensor):
        return _draw_out_of_place(distribution, k, shape, box, device)
    out = torch.empty(box_shape(box), dtype=distribution.dtype, device=device)
    if type(out) is not Tensor:  # a fake tensor
        return _draw_out_of_place(distribution, k, shape, box, device)
    if out.numel():
        _fill(distribution, k, _Runs.from_box(shape, box), out)
    return out


def _fill(distribution: _Distribution, k: Sequence[int], runs: _Runs, out: Tensor) -> None:
    """Fill `out`, one tile of runs and elements at a time.

    On a CPU, outside `shard_map`, each tile is filled by one of several threads: see `threads`.
    """
    most = 2 if runs.offset is None else 4  # a gather takes more memory
    on_cpu, total = out.device.type == "cpu", runs.number * runs.blocks(runs.length)
    threads = min(most, threads_to_fill(4 * total, out.device))
    blocks = _TILE_BLOCKS * (1 if threads else min(most, torch.get_num_threads())) if on_cpu else 1 << 20
    if threads > 1:  # as many tiles for each
        blocks = -(-total // (threads * -(-total // (threads * blocks))))
    width = min(runs.length, 4 * blocks)
    height = min(runs.number, max(1, blocks // runs.blocks(width)))
    rows = out.view(runs.number, runs.length)

    def filler() -> Callable[[tuple[int, int]], None]:
        scratch = torch.empty(5 * height * runs.blocks(width), dtype=torch.int64, device=out.device)

        def fill(origin: tuple[int, int]) -> None:
            top, left = origin
            _fill_tile(distribution, k, runs, origin, rows[top : top + height, left : left + width], scratch)

        return fill

    fill_parts(itertools.product(range(0, runs.number, height), range(0, runs.length, width)), filler, threads)


def _fill_tile(
    distribution: _Distribution, k: Sequence[int], runs: _Runs, origin: tuple[int, int], out: Tensor, scratch: Tensor
) -> None:
    """Fill out [R, L] with the elements from origin[1] on of the runs from origin[0] on."""
    top, left = origin
    count, length = out.shape
    n = runs.blocks(length)
    scratch = scratch[: 5 * count * n].view(5, -1)
    words = scratch[1:]
    start = runs.start(torch.arange(top, top + count, device=out.device)[:, None]) + left  # [R, 1]
    torch.add(start >> 2, torch.arange(n, device=out.device), out=words[3].view(count, n))
    first, last = runs.start(top) + left, runs.start(top + count - 1) + left + length + 3
    high = first >> 34 if first >> 34 == last >> 34 else words[3] >> 32
    words[3].bitwise_and_(M)
    philox_in_place(words, scratch[0], high, k)
    as_floats = distribution.dtype.is_floating_point
    x = distribution.from_words(words.view(torch.float64).copy_(words) if as_floats else words)
    fills_blocks = runs.offset == 0 and length % 4 == 0
    to = out if fills_blocks else torch.empty(count, 4 * n, dtype=distribution.dtype, device=out.device)
    to.view(count, n, 4).permute(2, 0, 1).copy_(x.view(4, count, n))
    if not fills_blocks:
        runs.trim_to(out, to, top, start)
    if distribution.low is not None:
        out.clamp_(distribution.low, distribution.high)


def _draw_out_of_place(
    distribution: _Distribution, k: Sequence[Word], shape: Sequence[int], box: Box, device: Any
) -> Tensor:
    """Draw all elements at once: for compilers, which fuse this, for vmap and for fake tensors."""
    out = torch.empty(box_shape(box), dtype=distribution.dtype, device=device)
    if out.numel() == 0:
        return out
    runs, device = _Runs.from_box(shape, box), out.device
    k = [w.to(device) if isinstance(w, Tensor) else w for w in k]
    start = runs.start(torch.arange(runs.number, device=device)[:, None])
    block = (start >> 2) + torch.arange(runs.blocks(runs.length), device=device)
    words = torch.stack(philox((block & M, block >> 32, 0, DRAW), k), -1).flatten(-2)
    words = runs.trim(words, start, runs.length)
    x = distribution.from_words(words.double() if distribution.dtype.is_floating_point else words)
    x = x.to(distribution.dtype)
    return (x if distribution.low is None else x.clamp(distribution.low, distribution.high)).view(out.shape)


# --- distributions ----------------------------------------------------------------------------------------------


def _floating(
    from_words: Callable[[Tensor], Tensor], dtype: torch.dtype, low: float | None = None, high: float = 0.0
) -> _Distribution:
    def rounded(words: Tensor) -> Tensor:
        return from_words(words) if dtype.itemsize >= 4 else from_words(words).float()

    if not dtype.is_floating_point:
        raise fail(f"random: dtype is {dtype}, and these numbers are floats", fix="a floating dtype, or random.randint")
    bounds = () if low is None else (-_round_down(-low, dtype), _round_down(high, dtype))
    return _Distribution(rounded, dtype, *bounds)


def _round_down(x: float, dtype: torch.dtype) -> float:
    """Return the largest value of `dtype` that is at most x."""
    if not math.isfinite(x):
        return x
    info = torch.finfo(dtype)
    spacing = info.eps * max(2.0 ** (math.frexp(x)[1] - 1), info.tiny)
    return math.floor(x / spacing) * spacing


def _inverse_cdf(lo: float, hi: float, mean: float, std: float) -> Callable[[Tensor], Tensor]:
    scale = (hi - lo) * 2.0**-32

    def from_words(w: Tensor) -> Tensor:
        # One operation per rounding: with a fused multiply-add a value would depend on its position in a register.
        x = w.mul_(scale).add_(lo + scale / 2).erfinv_().mul_(std * math.sqrt(2))
        return x.add_(mean) if mean else x

    return from_words


def _normal(mean: float, std: float, dtype: torch.dtype) -> _Distribution:
    if not std >= 0:
        raise fail(f"random.normal: std={std}", fix="0 or more")
    return _floating(_inverse_cdf(-1.0, 1.0, mean, std), dtype)


def _trunc_normal(mean: float, std: float, a: float, b: float, dtype: torch.dtype) -> _Distribution:
    lo, hi = (math.erf((x - mean) / (std * math.sqrt(2))) if std > 0 else 0.0 for x in (a, b))
    if not hi - lo > 1e-9:  # too few float64 values between lo and hi to draw from
        raise fail("random.trunc_normal: [a, b] has almost no probability", mean=mean, std=std,
                   a=a, b=b, fix="std > 0 and a < b, which are values, not multiples of std")  # fmt: skip
    return _floating(_inverse_cdf(lo, hi, mean, std), dtype, a, b)


def _uniform(low: float, high: float, dtype: torch.dtype) -> _Distribution:
    if not low < high:
        raise fail("random.uniform: [low, high) is empty", low=low, high=high, fix="low < high")
    scale, last = (high - low) * 2.0**-32, math.nextafter(high, -math.inf)
    return _floating(lambda w: w.mul_(scale).add_(low), dtype, low, last)


def _exponential(dtype: torch.dtype) -> _Distribution:
    return _floating(lambda w: w.add_(0.5).mul_(2.0**-32).log_().neg_(), dtype)


def _gumbel(dtype: torch.dtype) -> _Distribution:
    return _floating(lambda w: w.add_(0.5).mul_(2.0**-32).log_().neg_().log_().neg_(), dtype)


def _bernoulli(p: float) -> _Distribution:
    if not 0 <= p <= 1:
        raise fail("random.bernoulli: p is not a probability", p=p, fix="0 <= p <= 1")
    threshold = round(p * (1 << 32))
    return _Distribution(lambda w: w < threshold, torch.bool)


@checked
def normal_box(
    key: Tensor, shape: Sequence[int], box: Box, *, mean: float = 0.0, std: float = 1.0,
    dtype: torch.dtype = torch.float32, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """Draw `normal` for an explicit box of the global shape, without a mesh, as initializers do.

    >>> torch.equal(normal_box(key(0), (6,), (slice(2, 4),)), normal(key(0), (6,))[2:4])
    True
    """
    return _draw("normal", key, shape, box, _normal(mean, std, dtype), device)


@checked
def trunc_normal_box(
    key: Tensor, shape: Sequence[int], box: Box, *, mean: float = 0.0, std: float = 1.0, a: float = -2.0,
    b: float = 2.0, dtype: torch.dtype = torch.float32, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """Draw `trunc_normal` for an explicit box of the global shape.

    >>> torch.equal(trunc_normal_box(key(0), (6,), (slice(2, 4),)), trunc_normal(key(0), (6,))[2:4])
    True
    """
    return _draw("trunc_normal", key, shape, box, _trunc_normal(mean, std, a, b, dtype), device)


@checked
def bernoulli_box(
    key: Tensor, shape: Sequence[int], box: Box, *, p: float = 0.5, device: torch.device | None = None
) -> Tensor:
    """Draw `bernoulli` for an explicit box of the global shape.

    >>> torch.equal(bernoulli_box(key(0), (6,), (slice(2, 4),)), bernoulli(key(0), (6,))[2:4])
    True
    """
    return _draw("bernoulli", key, shape, box, _bernoulli(p), device)


@checked
def uniform_box(
    key: Tensor, shape: Sequence[int], box: Box, *, low: float = 0.0, high: float = 1.0,
    dtype: torch.dtype = torch.float32, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """Draw `uniform` for an explicit box of the global shape.

    >>> torch.equal(uniform_box(key(0), (6,), (slice(2, 4),)), uniform(key(0), (6,))[2:4])
    True
    """
    return _draw("uniform", key, shape, box, _uniform(low, high, dtype), device)


# --- draws ------------------------------------------------------------------------------------------------


def _draw_local(
    verb: str, key: Tensor, shape: Sequence[int], spec: P, distribution: _Distribution, device: torch.device | None,
    pieces: tuple[int, Sequence[slice]] | None = None,
) -> Tensor:  # fmt: skip
    """Draw this rank's part by `spec`, by default on the region's device; in a checked call, with the spec's type.

    In `accumulate`, the rows of a microbatch get the numbers that they have in a draw for the full batch. `pieces` are
    a dim, and the ranges of it that this rank has, if its part of that dim is not the one by `spec`.
    """
    if device is None and in_region():
        device = current_region().device
    box = full_box(shape)
    if spec.axes:
        region = current_region(f"random.{verb} with spec={spec}")
        raise_all(spec_errors(f"random.{verb}", tuple(shape), spec, region.sizes))
        box = local_box(shape, spec, region.sizes, region.coords)
    if (part := microbatch()) is not None:
        sizes = current_region().sizes if in_region() else {}
        shape, box = part.of_batch(f"random.{verb}", shape, box, spec.parts(len(shape)), sizes)

    def draw() -> Tensor:
        if pieces is None:
            return _draw(verb, key, shape, box, distribution, device)
        dim, ranges = pieces
        boxes = [(*box[:dim], s, *box[dim + 1 :]) for s in ranges]
        return torch.cat([_draw(verb, key, shape, b, distribution, device) for b in boxes], dim)

    types = checker()
    if types is None:
        return draw()
    with types.paused():
        out = draw()
    types.set_draw_type(out, f"random.{verb}", key, spec.axes)
    types.record_shape(f"random.{verb}", shape, types.info(out).type.invariant | set(spec.axes))
    return out


@checked
def normal(
    key: Tensor, shape: Sequence[int], *, spec: P = _REPLICATED, mean: float = 0.0, std: float = 1.0,
    dtype: torch.dtype = torch.float32, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """Draw this rank's part, by `spec`, of a leaf of global `shape` from N(mean, std^2).

    The dtype is float32 unless it is passed: a draw depends only on its arguments, not on `torch.set_default_dtype`.
    The same holds for `uniform` and `trunc_normal`.

    >>> normal(key(0), (3,))
    tensor([-0.2558,  1.1776,  0.6302])
    """
    return _draw_local("normal", key, shape, spec, _normal(mean, std, dtype), device)


@checked
def trunc_normal(
    key: Tensor, shape: Sequence[int], *, spec: P = _REPLICATED, mean: float = 0.0, std: float = 1.0,
    a: float = -2.0, b: float = 2.0, dtype: torch.dtype = torch.float32, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """Draw from N(mean, std^2) cut to [a, b]: values, not multiples of std, as in `torch.nn.init.trunc_normal_`.

    >>> trunc_normal(key(0), (3,), std=0.02)
    tensor([-0.0051,  0.0236,  0.0126])
    """
    return _draw_local("trunc_normal", key, shape, spec, _trunc_normal(mean, std, a, b, dtype), device)


@checked
def uniform(
    key: Tensor, shape: Sequence[int], *, spec: P = _REPLICATED, low: float = 0.0, high: float = 1.0,
    dtype: torch.dtype = torch.float32, device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """Draw from U[low, high): never `high`, also where the dtype would round to it.

    >>> uniform(key(0), (3,), low=-1.0)
    tensor([-0.2019,  0.7610,  0.4714])
    """
    return _draw_local("uniform", key, shape, spec, _uniform(low, high, dtype), device)


@checked
def bernoulli(
    key: Tensor, shape: Sequence[int], *, p: float = 0.5, spec: P = _REPLICATED, device: torch.device | None = None
) -> Tensor:
    """Draw a bool mask, True with probability p to within 2^-33; p = 0 and p = 1 are exact.

    >>> bernoulli(key(0), (6,), p=0.5)
    tensor([ True, False, False, False, False,  True])
    """
    return _draw_local("bernoulli", key, shape, spec, _bernoulli(p), device)


def bernoulli_pieces(
    key: Tensor, shape: Sequence[int], dim: int, ranges: Sequence[slice], *, p: float, spec: P, device: torch.device
) -> Tensor:
    """Draw `bernoulli` for several ranges of a dim, joined, and for this rank's part by `spec` of the others."""
    return _draw_local("bernoulli", key, shape, spec, _bernoulli(p), device, (dim, ranges))


@checked
def randint(
    key: Tensor, shape: Sequence[int], *, low: int = 0, high: int, spec: P = _REPLICATED,
    device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """Draw int64s of range(low, high), each with probability 1 / (high - low) to within 2^-32.

    >>> randint(key(0), (6,), low=0, high=10)
    tensor([3, 8, 7, 6, 9, 3])

    Raises ShardingError unless 0 < high - low <= 2^31.
    """
    n = high - low
    if not 0 < n <= 1 << 31:
        raise fail("random.randint: the range is empty or too large", low=low, high=high,
                   needed="0 < high - low <= 2^31", fix="low < high; for more bits, random.bits")  # fmt: skip

    def from_words(w: Tensor) -> Tensor:
        return w.mul_(n).bitwise_right_shift_(32).add_(low)

    distribution = _Distribution(from_words, torch.int64)
    return _draw_local("randint", key, shape, spec, distribution, device)


@checked
def bits(key: Tensor, shape: Sequence[int], *, spec: P = _REPLICATED, device: torch.device | None = None) -> Tensor:
    """Draw the random words: 32 bits in each int64.

    >>> bits(key(0), (2,))
    tensor([1713891541, 3781805453])
    """
    distribution = _Distribution(lambda w: w, torch.int64)
    return _draw_local("bits", key, shape, spec, distribution, device)


@checked
def exponential(
    key: Tensor, shape: Sequence[int], *, spec: P = _REPLICATED, dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """Draw from the exponential distribution of rate 1: above 0, with mean 1. Divide by another rate.

    >>> exponential(key(0), (3,))
    tensor([0.9187, 0.1272, 0.3069])
    """
    return _draw_local("exponential", key, shape, spec, _exponential(dtype), device)


@checked
def gumbel(
    key: Tensor, shape: Sequence[int], *, spec: P = _REPLICATED, dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
) -> Tensor:  # fmt: skip
    """Draw from the standard Gumbel distribution: `argmax(logits + gumbel)` is a draw from softmax(logits).

    >>> gumbel(key(0), (3,))
    tensor([0.0848, 2.0617, 1.1812])
    """
    return _draw_local("gumbel", key, shape, spec, _gumbel(dtype), device)


def _gather_logits(axes: Sequence[str], dim: int) -> str:
    axis = repr(axes[0] if len(axes) == 1 else tuple(axes)).replace("'", '"')
    return f'logits = fs.all_gather(logits, {axis}, {dim}, to="invariant")'


@checked
def categorical(
    key: Tensor, logits: Tensor, *, dim: int = -1, spec: P = _REPLICATED, shape: Sequence[int] | None = None
) -> Tensor:
    """Draw an index along `dim` of the logits, with the probabilities of their softmax, as `jax.random.categorical`.

        logits [B, N]{by spec} -> int64 [B]{by spec}

    Args:
        spec: of the logits, if they are a rank's part of a global tensor; it must not split `dim`.
        shape: the global shape of such logits, `fs.global_shape(logits, spec)`.

    >>> categorical(key(0), torch.tensor([[0.0, 3.0, 0.0], [5.0, 0.0, 0.0]]))
    tensor([1, 0])

    Raises ShardingError for integer logits, a split `dim`, and in a checked call for logits that vary over an axis that
    `spec` does not name: all ranks would draw the same numbers for different rows.
    """
    if not logits.is_floating_point() or not -logits.ndim <= dim < logits.ndim:
        raise fail(f"random.categorical: logits {str(logits.dtype)[6:]}{list(logits.shape)}, dim={dim}",
                   fix="floating logits, and one of their dims")  # fmt: skip
    if sum(entry is not ... for entry in spec) > logits.ndim:
        raise fail(f"random.categorical: spec={spec} has more dims than the logits, {list(logits.shape)}",
                   fix="an entry for each dim, at most")  # fmt: skip
    if axes := spec.parts(logits.ndim)[dim]:
        raise fail(f"random.categorical: spec={spec} splits dim {dim}, whose indices are drawn",
                   fix=_gather_logits(axes, dim))  # fmt: skip
    if spec.axes and shape is None:
        raise fail(f"random.categorical: spec={spec} without the global shape",
                   fix="shape=fs.global_shape(logits, spec)")  # fmt: skip
    types = checker()
    if types is not None and (others := sorted(types.info(logits).type.varying - set(spec.axes))):
        parts = spec.parts(logits.ndim)
        rows = P((*parts[0], *others), *[names or None for names in parts[1:]]) if parts else spec
        of_rows = f"spec={rows}, shape=fs.global_shape(logits, spec), if {others[-1]!r} splits the rows"
        fix = f"{of_rows}; or {_gather_logits(others[-1:], dim)}, if it splits dim {dim}, which is drawn"
        if {g.axis for g in types.info(logits).history.gathers}.issuperset(others):
            fix = 'to="invariant" in the all_gather of the logits'
        raise fail(f"random.categorical: the logits vary over {', '.join(map(repr, others))}, which spec={spec} does "
                   "not name", "all ranks would draw the same numbers for different rows", fix=fix)  # fmt: skip
    noise = gumbel(key, logits.shape if shape is None else shape, spec=spec, device=logits.device)
    return (logits.detach().to(noise.dtype) + noise).argmax(dim)
