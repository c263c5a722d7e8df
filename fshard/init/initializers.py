"""Initializers: each describes a leaf as a `Deferred`, without storage until it is materialized.

Fans assume `[in, out]` matrices used as `x @ w`: fan_in is the size of dim -2 (times any dims before it), fan_out the
size of dim -1; `in_dim` and `out_dim` choose other dims: `in_dim=1, out_dim=0` for a torch.nn.Linear weight. For the
stacked layers of `fs.scan`, [layers, in, out], describe one layer and pass it to `stacked`: dim 0 is not part of a fan.
Every element depends only on the key and its global index, so every device fills only its part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fshard import random, tree
from fshard.errors import checked, fail
from fshard.spec import Box, box_shape

from .deferred import Deferred, Initializer, describe_initializer

Shape = int | Sequence[int]
Mode = Literal["fan_in", "fan_out"]
Nonlinearity = Literal["linear", "sigmoid", "tanh", "relu", "leaky_relu", "selu"]


@dataclass(frozen=True)
class Normal:
    """Draws from N(mean, std^2).

    >>> fs.init.normal((3,), std=0.02).init
    Normal(mean=0.0, std=0.02)
    """

    mean: float = 0.0
    std: float = 1.0

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        return random.normal_box(key, shape, box, mean=self.mean, std=self.std, dtype=dtype, device=device)


@dataclass(frozen=True)
class TruncNormal:
    """Draws from N(mean, std^2) within [a, b].

    >>> fs.init.trunc_normal((3,), std=0.02).init
    TruncNormal(mean=0.0, std=0.02, a=-2.0, b=2.0)
    """

    mean: float = 0.0
    std: float = 1.0
    a: float = -2.0
    b: float = 2.0

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        return random.trunc_normal_box(key, shape, box, mean=self.mean, std=self.std, a=self.a, b=self.b, dtype=dtype,
                                       device=device)  # fmt: skip


@dataclass(frozen=True)
class Uniform:
    """Draws from U[low, high).

    >>> fs.init.uniform((3,), low=-1.0).init
    Uniform(low=-1.0, high=1.0)
    """

    low: float = 0.0
    high: float = 1.0

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        return random.uniform_box(key, shape, box, low=self.low, high=self.high, dtype=dtype, device=device)


@dataclass(frozen=True)
class Full:
    """One value everywhere.

    >>> fs.init.full((3,), 0.5).init
    Full(value=0.5)
    """

    value: float = 0.0

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(box_shape(box), self.value, dtype=dtype, device=device)

    def describe(self) -> str:
        return "zeros" if self.value == 0 else "ones" if self.value == 1 else f"full({self.value:.4g})"


@dataclass(frozen=True)
class Eye:
    """`gain` on the diagonal, 0 elsewhere.

    >>> fs.init.eye(3).init
    Eye(gain=1.0)
    """

    gain: float = 1.0

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        out = torch.zeros(box_shape(box), dtype=dtype, device=device)
        first, last = max(s.start for s in box), min(s.stop for s in box)
        if first < last:
            out[first - box[0].start :, first - box[1].start :].diagonal()[: last - first].fill_(self.gain)
        return out


@dataclass(frozen=True)
class Arange:
    """start + step * i.

    >>> fs.init.arange(4, start=1).init
    Arange(start=1, step=1)
    """

    start: float = 0
    step: float = 1

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        index = torch.arange(box[0].start, box[0].stop, device=device)
        wide = torch.float64 if dtype.is_floating_point else torch.int64
        return (index.to(wide) * self.step + self.start).to(dtype)


@dataclass(frozen=True)
class Orthogonal:
    """A random orthonormal matrix, times `gain`.

    >>> fs.init.orthogonal((3, 3)).init
    Orthogonal(gain=1.0)
    """

    gain: float = 1.0

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        # A QR needs the full matrix: every device computes it on the CPU, with the same bits, and keeps its part.
        rows, columns = math.prod(shape[:-1]), shape[-1]
        tall = (max(rows, columns), min(rows, columns))
        gaussian = random.normal(key, tall, dtype=torch.float64)
        q, r = torch.linalg.qr(gaussian)
        q = q * r.diagonal().sign()  # for a uniform distribution and a unique factor
        full: Tensor = (q if rows >= columns else q.T).reshape(shape) * self.gain
        return full[box].to(device=device, dtype=dtype).contiguous()


@dataclass(frozen=True)
class ZeroRow:
    """Another initializer, but zeros at one index of dim 0."""

    inner: Initializer
    row: int

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        out = self.inner.fill(key, shape, box, dtype, device)
        if box[0].start <= self.row < box[0].stop:
            out[self.row - box[0].start] = 0
        return out

    def describe(self) -> str:
        return f"{describe_initializer(self.inner)}, row {self.row} zero"


@dataclass(frozen=True)
class _Stacked:
    """The initializer of each layer, with a key of its index."""

    inner: Initializer

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        out = torch.empty(box_shape(box), dtype=dtype, device=device)
        for i, row in enumerate(out, box[0].start):
            row.copy_(self.inner.fill(random.fold_in(key, i), shape[1:], box[1:], dtype, device))
        return out

    def describe(self) -> str:
        return f"stacked {describe_initializer(self.inner)}"


def _describe(shape: Shape, init: Initializer, dtype: torch.dtype | None) -> Deferred:
    return Deferred((shape,) if isinstance(shape, int) else tuple(shape), dtype or torch.get_default_dtype(), init)


@checked
def normal(shape: Shape, *, mean: float = 0.0, std: float = 1.0, dtype: torch.dtype | None = None) -> Deferred:
    """Describe a leaf of N(mean, std^2).

    >>> normal((64, 256), std=0.02)
    f32[64, 256] = normal(std=0.02)

    Raises ShardingError for a negative std.
    """
    if not std >= 0:
        raise fail(f"normal: std={std}", fix="0 or more")
    return _describe(shape, Normal(mean, std), dtype)


@checked
def trunc_normal(
    shape: Shape, *, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0,
    dtype: torch.dtype | None = None,
) -> Deferred:  # fmt: skip
    """Describe a leaf of N(mean, std^2) cut to [a, b], values and not multiples of std.

    The bounds mean what they mean in `torch.nn.init.trunc_normal_`.

    >>> trunc_normal((8, 4), std=0.02)
    f32[8, 4] = trunc_normal(std=0.02)

    Raises ShardingError for an empty range, and for a std that is not positive.
    """
    if not a < b:
        raise fail(f"trunc_normal: the range from a={a} to b={b} is empty", fix="a < b")
    if not std > 0:
        raise fail(f"trunc_normal: std={std}", fix="more than 0")
    return _describe(shape, TruncNormal(mean, std, a, b), dtype)


@checked
def uniform(shape: Shape, *, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None) -> Deferred:
    """Describe a leaf of U[low, high).

    >>> uniform((8, 4), low=-0.1, high=0.1)
    f32[8, 4] = uniform(low=-0.1, high=0.1)

    Raises ShardingError for an empty range.
    """
    if not low < high:
        raise fail(f"uniform: the range from low={low} to high={high} is empty", fix="low < high")
    return _describe(shape, Uniform(low, high), dtype)


@checked
def full(shape: Shape, value: float, *, dtype: torch.dtype | None = None) -> Deferred:
    """Describe a leaf with one value everywhere.

    >>> full((8, 4), 0.5)
    f32[8, 4] = full(0.5)
    """
    return _describe(shape, Full(value), dtype)


@checked
def zeros(shape: Shape, *, dtype: torch.dtype | None = None) -> Deferred:
    """Describe a leaf of zeros.

    >>> zeros((8, 4), dtype=torch.bfloat16)
    bf16[8, 4] = zeros
    """
    return full(shape, 0.0, dtype=dtype)


@checked
def ones(shape: Shape, *, dtype: torch.dtype | None = None) -> Deferred:
    """Describe a leaf of ones.

    >>> ones((8, 4))
    f32[8, 4] = ones
    """
    return full(shape, 1.0, dtype=dtype)


@checked
def eye(n: int, m: int | None = None, *, gain: float = 1.0, dtype: torch.dtype | None = None) -> Deferred:
    """Describe an [n, m] matrix with `gain` on its diagonal and zeros elsewhere; m is n by default.

    >>> device_get(materialize(eye(2, 3), P(), mesh, key=key(0)))
    tensor([[1., 0., 0.],
            [0., 1., 0.]])
    """
    return _describe((n, n if m is None else m), Eye(gain), dtype)


@checked
def arange(n: int, *, start: float = 0, step: float = 1, dtype: torch.dtype | None = None) -> Deferred:
    """Describe the vector start + step * i for i < n: int64 unless start or step is a float or `dtype` is passed.

    >>> device_get(materialize(arange(4, start=1), P("data"), mesh, key=key(0)))
    tensor([1, 2, 3, 4])
    """
    kind = torch.int64 if isinstance(start, int) and isinstance(step, int) else None
    return _describe(n, Arange(start, step), dtype or kind)


@checked
def orthogonal(shape: Shape, *, gain: float = 1.0, dtype: torch.dtype | None = None) -> Deferred:
    """Describe a random matrix with orthonormal rows or columns, whichever are fewer; all dims but the last are rows.

    Every device computes the full matrix, on the CPU, and keeps its part. Source: Saxe et al., 2013, "Exact
    solutions to the nonlinear dynamics of learning in deep linear neural networks"; Mezzadri, 2007, for the signs.

    >>> q = device_get(materialize(orthogonal((4, 4)), P("data"), mesh, key=key(0)))
    >>> torch.allclose(q @ q.mT, torch.eye(4), atol=1e-5)
    True

    Raises ShardingError for a shape of fewer than 2 dims.
    """
    described = _describe(shape, Orthogonal(gain), dtype)
    if described.ndim < 2:
        raise fail(f"orthogonal: shape {list(described.shape)} is not a matrix", fix="two dims or more")
    return described


@checked
def zero_row(leaf: Deferred, row: int) -> Deferred:
    """Describe the same leaf with zeros at one index of dim 0: the padding row of an embedding.

    >>> zero_row(normal((50257, 64), std=0.02), 0)
    f32[50257, 64] = normal(std=0.02), row 0 zero

    Raises ShardingError where dim 0 has no such index.
    """
    if not leaf.ndim or not 0 <= row < leaf.shape[0]:
        raise fail(f"zero_row: {list(leaf.shape)} has no row {row}", fix="an index of dim 0, counted from 0")
    return replace(leaf, init=ZeroRow(leaf.init, row))


@checked
def stacked(layer: Any, n: int) -> Any:
    """Describe the leaves of `n` layers, stacked on a new dim 0 as `fs.scan` takes them, from a tree for one layer.

    Each layer gets different values, of the scale that the initializer computed for one layer.

    >>> stacked({"up": kaiming_normal((64, 256), nonlinearity="relu"), "b": zeros(256)}, 12)
    {'up': f32[12, 64, 256] = normal(std=0.1768), 'b': f32[12, 256] = zeros}

    Raises ShardingError listing every leaf that is not described.
    """
    tree.check_leaves("stacked", "layer", layer, Deferred)

    def stack(leaf: Deferred) -> Deferred:
        init = leaf.init if isinstance(leaf.init, (Normal, TruncNormal, Uniform, Full)) else _Stacked(leaf.init)
        return replace(leaf, shape=(n, *leaf.shape), init=init)

    return tree.map(stack, layer)


@checked
def fans(shape: Sequence[int], in_dim: int = -2, out_dim: int = -1) -> tuple[int, int]:
    """Return (fan_in, fan_out): the sizes of the two dims, each times the product of all other dims.

    >>> fans((64, 256))
    (64, 256)
    >>> fans((64, 3, 5, 5), in_dim=1, out_dim=0)
    (75, 1600)

    Raises ShardingError for a shape of fewer than 2 dims, and for dims that it lacks.
    """
    if len(shape) < 2:
        raise fail(f"a leaf of shape {list(shape)} has no fans", fix="two dims or more, or normal(std=...)")
    for name, dim in (("in_dim", in_dim), ("out_dim", out_dim)):
        if not -len(shape) <= dim < len(shape):
            raise fail(f"fans: {name}={dim}, of a leaf of shape {list(shape)}", fix="one of its dims")
    field = math.prod(shape) // max(1, shape[in_dim] * shape[out_dim])
    return shape[in_dim] * field, shape[out_dim] * field


def _xavier_gain(gain: float) -> float:
    if not gain > 0:
        raise fail(f"xavier: gain={gain}", fix="more than 0")
    return gain


def _fan(mode: Mode, shape: Sequence[int], in_dim: int, out_dim: int) -> int:
    return max(1, fans(shape, in_dim, out_dim)[mode == "fan_out"])


@checked
def kaiming_uniform(
    shape: Sequence[int], *, a: float = 0.0, mode: Mode = "fan_in", nonlinearity: Nonlinearity = "leaky_relu",
    in_dim: int = -2, out_dim: int = -1, dtype: torch.dtype | None = None,
) -> Deferred:  # fmt: skip
    """Describe a leaf of U(-b, b), b = gain sqrt(3 / fan). Source: He et al., 2015, "Delving deep into rectifiers".

    >>> kaiming_uniform((64, 256))
    f32[64, 256] = uniform(low=-0.3062, high=0.3062)
    """
    bound = torch.nn.init.calculate_gain(nonlinearity, a) * math.sqrt(3 / _fan(mode, shape, in_dim, out_dim))
    return uniform(shape, low=-bound, high=bound, dtype=dtype)


@checked
def kaiming_normal(
    shape: Sequence[int], *, a: float = 0.0, mode: Mode = "fan_in", nonlinearity: Nonlinearity = "leaky_relu",
    in_dim: int = -2, out_dim: int = -1, dtype: torch.dtype | None = None,
) -> Deferred:  # fmt: skip
    """Describe a leaf of N(0, gain^2 / fan). Source: He et al., 2015.

    >>> kaiming_normal((64, 256), nonlinearity="relu")
    f32[64, 256] = normal(std=0.1768)
    """
    gain = torch.nn.init.calculate_gain(nonlinearity, a)
    return normal(shape, std=gain / math.sqrt(_fan(mode, shape, in_dim, out_dim)), dtype=dtype)


@checked
def xavier_uniform(
    shape: Sequence[int], *, gain: float = 1.0, in_dim: int = -2, out_dim: int = -1, dtype: torch.dtype | None = None
) -> Deferred:
    """Describe a leaf of U(-b, b), b = gain sqrt(6 / (fan_in + fan_out)). Source: Glorot & Bengio, 2010.

    >>> xavier_uniform((64, 256))
    f32[64, 256] = uniform(low=-0.1369, high=0.1369)
    """
    bound = _xavier_gain(gain) * math.sqrt(6 / max(1, sum(fans(shape, in_dim, out_dim))))
    return uniform(shape, low=-bound, high=bound, dtype=dtype)


@checked
def xavier_normal(
    shape: Sequence[int], *, gain: float = 1.0, in_dim: int = -2, out_dim: int = -1, dtype: torch.dtype | None = None
) -> Deferred:
    """Describe a leaf of N(0, 2 gain^2 / (fan_in + fan_out)). Source: Glorot & Bengio, 2010.

    >>> xavier_normal((64, 256))
    f32[64, 256] = normal(std=0.07906)
    """
    return normal(shape, std=_xavier_gain(gain) * math.sqrt(2 / max(1, sum(fans(shape, in_dim, out_dim)))), dtype=dtype)
