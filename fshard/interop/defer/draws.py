"""Random numbers of a module that draws from torch's generator, by a key and the global index instead.

Draw number j of a call is a draw of `fs.random` under fold_in(key, j), so element i of the global tensor has the same
number on every mesh. `Draws` is the mode that makes the numbers. It sees the operations below autograd and torch.func,
where dropout of every kind ends in a few of them: bernoulli_, uniform_, rand.

Inside a region a module sees a part of the batch, so a draw needs to know which of its dims has the examples. `probe`
runs forward on fake tensors with a prime number of examples: a dim that this prime divides has the examples, and its
position is known as `Examples`. It also follows how examples lie in such a dim: a view of [B, T] as [B*T] keeps those
of one example together, and one of [T, B] as [T*B] does not, so that a rank's part of it is no range of rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fshard._callsite import quote, site
from fshard._comm import checker
from fshard._operations import tensors_in
from fshard._torch_compat import FakeTensorMode, TorchDispatchMode, schema_of, without_functorch, without_modes
from fshard.errors import ShardingError, fail
from fshard.random import bernoulli_box, fold_in
from fshard.spec import Box, describe, full_box

from .distributions import MAX_RANDINT_RANGE, draw_box

Values = dict[str, Any]  # argument name -> value, of one call of an operation


def draw_error(what: str, *notes: str, fix: str, **facts: object) -> ShardingError:
    """Return an error that names the line of the module's code."""
    line = site()
    source = () if line is None else (f"{line}", *(f"  {text}" for text in quote(line).splitlines()))
    return fail(what, *source, *notes, fix=fix, **facts)


@dataclass(frozen=True)
class Examples:
    """The dim of a drawn tensor that has the examples, `each` entries for one."""

    dim: int
    each: int


@dataclass(frozen=True)
class Drawn:
    """One draw of a probe: its shape, with a prime number of examples, and the dim of these; None if no dim has."""

    op: str
    shape: tuple[int, ...]
    examples: Examples | None


@dataclass(frozen=True)
class Batch:
    """This rank's part of the examples of a batch: `count` from `start` on, of `total`, over mesh `axes`."""

    axes: tuple[str, ...]
    start: int
    count: int
    total: int


# --- the mode ---------------------------------------------------------------------------------------------------


class Draws(TorchDispatchMode):  # type: ignore[misc]
    """The draws of one call of a module: draw number j is under fold_in(key, j).

    `number` counts the draws. A caller that runs a part of forward again, to recompute it in backward, reads `number`
    before the part runs first, and later enters a `resumed` copy: the same part then draws the same numbers.

        start = draws.number
        y = block(x)                                # in the call
        with draws.resumed(start): y = block(x)     # in backward

    Args:
        name: of the function, for errors.
        batch: this rank's part of the batch; None where nothing is split.
        plan: the draws that a probe found, one after the other.
    """

    def __init__(self, name: str, key: Tensor, batch: Batch | None = None, plan: Sequence[Drawn] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.key, self.batch, self.plan = name, key, batch, plan
        self.number = 0

    def resumed(self, number: int) -> Draws:
        """Return a mode that goes on from draw `number`."""
        other = Draws(self.name, self.key, self.batch, self.plan)
        other.number = number
        return other

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        rule = _rule(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        return self._run(rule, func, args, kwargs or {})

    def _run(self, rule: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: Values) -> Any:
        """Run a random operation by its rule, unless it draws nothing or by a generator of its own."""
        values = _values(func, args, kwargs)
        name = func.overloadpacket.__name__
        rate = values.get("dropout_p", values.get("dropout", values.get("p") if "dropout" in name else None))
        off = rate == 0 or values.get("train") is False or values.get("training") is False
        if off or any(x.is_meta for x in tensors_in(*args)):
            return func(*args, **kwargs)
        if values.get("generator") is not None:
            raise draw_error(f"{self.name}: {name} draws from a generator of its own, and key= cannot replace it",
                             "its numbers depend on the process and on earlier draws",
                             fix="leave generator= out: the numbers are then drawn by key")  # fmt: skip
        return rule(self, name, values)

    def numbers(
        self, op: str, shape: Sequence[int], distribution: str, *args: float, dtype: torch.dtype, device: Any,
        like: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Draw this rank's part of the next draw, of local `shape`. A probe asks how the examples of `like` lie."""
        key = fold_in(self.key, self.number)
        whole, box, split = self._part(op, tuple(shape))
        self.number += 1
        types = checker()
        with contextlib.nullcontext() if types is None else types.paused():
            if distribution == "bernoulli":
                out = bernoulli_box(key, whole, box, p=args[0], device=device).to(dtype)
            else:
                out = draw_box(distribution, args, key, whole, box, dtype, device)
        if types is not None and self.batch is not None:
            types.set_draw_type(out, op, self.key, self.batch.axes if split else (), shared=self.batch.axes)
        elif types is not None:
            types.set_draw_type(out, op, self.key, ())
        return out

    def _part(self, op: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Box, bool]:
        """Return the global shape of a draw, this rank's box of it, and if the batch splits it."""
        if self.batch is None:
            return shape, full_box(shape), False
        drawn = self.plan[self.number] if self.number < len(self.plan) else None
        examples = drawn.examples if drawn else None
        expected = list(drawn.shape) if drawn else []
        if examples:
            expected[examples.dim] = examples.each * self.batch.count
        if drawn is None or (op, shape) != (drawn.op, tuple(expected)):
            found = "no such draw" if drawn is None else f"{drawn.op} of {list(drawn.shape)}"
            raise draw_error(f"{self.name}: draw {self.number} is {op} of {list(shape)}, and in a run on another "
                             f"batch {found}", "the draws of forward depend on its values or on the number of examples",
                             fix="draw as often, and in the same shapes, for any batch")  # fmt: skip
        if examples is None:
            return shape, full_box(shape), False
        whole, box, n = list(shape), list(full_box(shape)), examples.each
        whole[examples.dim] = n * self.batch.total
        box[examples.dim] = slice(n * self.batch.start, n * (self.batch.start + self.batch.count))
        return tuple(whole), tuple(box), True


# A __torch_dispatch__ in the class body would be wrapped by torch: the first operation would import dynamo for seconds.
Draws.__torch_dispatch__ = Draws._dispatch  # type: ignore[assignment]


def _values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Values:
    """Return the arguments of a call by name, defaults included."""
    arguments = schema_of(func).arguments
    values = {a.name: None if a.name == "dtype" else a.default_value for a in arguments}
    return {**values, **dict(zip(values, args, strict=False)), **kwargs}


# --- the operations ---------------------------------------------------------------------------------------------

Rule = Callable[[Draws, str, Values], Any]
_RULES: dict[str, Rule] = {}


def _rule_of(*names: str) -> Callable[[Rule], Rule]:
    return lambda rule: [_RULES.setdefault(name, rule) for name in names][0]


@functools.cache
def _rule(func: Any) -> Rule | None:
    """Return the rule of a random operation (an OpOverload); None for the others."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    schema = schema_of(func)
    out_variant = any(a.kwarg_only and a.alias_info is not None for a in schema.arguments)
    return _refuse if out_variant else _RULES.get(schema.name.split("::")[-1], _refuse)


def _refuse(draws: Draws, name: str, values: Values) -> Any:
    if "attention" in name:
        raise draw_error(f"{draws.name}: {name} draws its dropout inside a fused kernel, where key= cannot reach it",
                         fix="with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): around the call; or, for models of "
                         'Hugging Face, attn_implementation="eager"')  # fmt: skip
    if "rnn" in name:
        raise draw_error(f"{draws.name}: {name} draws its dropout inside a kernel, where key= cannot reach it",
                         fix="with torch.backends.cudnn.flags(enabled=False): around the call")  # fmt: skip
    raise draw_error(f"{draws.name}: {name} draws in a way that key= cannot replace",
                     fix="draw by torch.rand, torch.randn, torch.randint, torch.bernoulli or dropout; "
                     "apply.eval() draws nothing")  # fmt: skip


@_rule_of("bernoulli_", "bernoulli")
def _bernoulli(draws: Draws, name: str, v: Values) -> Tensor:
    x, p = v["self"], v.get("p")
    if p is None or isinstance(p, Tensor):  # probabilities
        wide = torch.promote_types((x if p is None else p).dtype, torch.float32)
        drawn = draws.numbers(name, x.shape, "uniform", 0.0, 1.0, dtype=wide, device=x.device, like=x)
        drawn = drawn < (x if p is None else p)
    else:
        if not 0 <= p <= 1:
            raise draw_error(f"{draws.name}: {name}: p={p} is not a probability", fix="0 <= p <= 1")
        drawn = draws.numbers(name, x.shape, "bernoulli", p, dtype=torch.bool, device=x.device, like=x)
    return (x if name.endswith("_") else torch.empty_like(x)).copy_(drawn)


@_rule_of("native_dropout")
def _native_dropout(draws: Draws, name: str, v: Values) -> tuple[Tensor, Tensor]:
    x, p = v["input"], v["p"]
    keep = torch.empty_like(x, dtype=torch.bool)
    keep.copy_(draws.numbers("dropout", x.shape, "bernoulli", 1 - p, dtype=torch.bool, device=x.device, like=x))
    return x * keep * (0.0 if p == 1 else 1 / (1 - p)), keep


_IN_PLACE = {  # operation -> (distribution, names of its arguments)
    "uniform_": ("uniform", "from", "to"), "normal_": ("normal", "mean", "std"), "exponential_": ("exponential", "lambd"),
    "log_normal_": ("log_normal", "mean", "std"), "cauchy_": ("cauchy", "median", "sigma"),
    "geometric_": ("geometric", "p"),
}  # fmt: skip


@_rule_of(*_IN_PLACE)
def _in_place(draws: Draws, name: str, v: Values) -> Tensor:
    x, (distribution, *names) = v["self"], _IN_PLACE[name]
    args = [v[n] for n in names]
    drawn = draws.numbers(name, x.shape, distribution, *args, dtype=x.dtype, device=x.device, like=x)
    return x.copy_(drawn)  # type: ignore[no-any-return]


@_rule_of("random_", "randint", "randint_like", "randperm")
def _integers(draws: Draws, name: str, v: Values) -> Tensor:
    x = v.get("self")
    low, high = v.get("from", v.get("low")) or 0, v.get("to", v.get("high"))
    if high is None and x is not None:  # random_(): all integers that the dtype has without gaps
        info = torch.finfo(x.dtype) if x.is_floating_point() else torch.iinfo(x.dtype)
        high = round(2 / info.eps) + 1 if isinstance(info, torch.finfo) else info.max + 1
        high = 2 if x.dtype is torch.bool else high
    if name == "randperm":
        drawn = draws.numbers(name, (v["n"],), name, dtype=v["dtype"] or torch.int64, device=_device(v))
        return drawn
    if not 0 < high - low <= MAX_RANDINT_RANGE:
        raise draw_error(f"{draws.name}: {name} of range({low}, {high})", fix="0 < high - low <= 2^32")
    if name == "randint":
        dtype = v["dtype"] or torch.int64
        return draws.numbers(name, v["size"], name, low, high, dtype=dtype, device=_device(v))
    assert x is not None
    drawn = draws.numbers(name, x.shape, "randint", low, high, dtype=v.get("dtype") or x.dtype, device=x.device, like=x)
    return x.copy_(drawn) if name == "random_" else torch.empty_like(x, dtype=drawn.dtype).copy_(drawn)


@_rule_of("rand", "randn", "rand_like", "randn_like")
def _floats(draws: Draws, name: str, v: Values) -> Tensor:
    args = ("normal", 0.0, 1.0) if name.startswith("randn") else ("uniform", 0.0, 1.0)
    x = v.get("self")
    if x is None:
        dtype = v["dtype"] or torch.get_default_dtype()
        return draws.numbers(name, v["size"], *args, dtype=dtype, device=_device(v))
    drawn = draws.numbers(name, x.shape, *args, dtype=v["dtype"] or x.dtype, device=v["device"] or x.device, like=x)
    return torch.empty_like(x, dtype=drawn.dtype, device=drawn.device).copy_(drawn)


@_rule_of("normal")
def _normal(draws: Draws, name: str, v: Values) -> Tensor:
    mean, std = v["mean"], v["std"]
    given = [x for x in (mean, std) if isinstance(x, Tensor)]
    if not given:
        dtype = v["dtype"] or torch.get_default_dtype()
        return draws.numbers(name, v["size"], name, mean, std, dtype=dtype, device=_device(v))
    shape, like = torch.broadcast_shapes(*(x.shape for x in given)), max(given, key=lambda x: x.ndim)
    drawn = draws.numbers(name, shape, name, 0.0, 1.0, dtype=like.dtype, device=like.device, like=like)
    return mean + std * drawn  # type: ignore[no-any-return]


@_rule_of("rrelu_with_noise", "rrelu_with_noise_")
def _rrelu(draws: Draws, name: str, v: Values) -> Tensor:
    x, noise, low, high = v["self"], v["noise"], v["lower"], v["upper"]
    slope = draws.numbers("rrelu", x.shape, "uniform", 0.0, 1.0, dtype=x.dtype, device=x.device, like=x)
    noise.copy_(torch.where(x <= 0, low + (high - low) * slope, 1.0))
    return x.mul_(noise) if name.endswith("_") else x * noise  # type: ignore[no-any-return]


@_rule_of("multinomial")
def _multinomial(draws: Draws, name: str, v: Values) -> Tensor:
    """Choose by exponential clocks; with replacement by the inverse of the cumulative distribution."""
    p, n = v["self"], v["num_samples"]
    wide = p.double()
    if n == 1 or not v["replacement"]:
        clock = draws.numbers(name, p.shape, "exponential", 1.0, dtype=torch.float64, device=p.device, like=p)
        return (wide / clock).topk(n, -1).indices
    shape = (*p.shape[:-1], n)
    u = draws.numbers(name, shape, "uniform", 0.0, 1.0, dtype=torch.float64, device=p.device, like=p)
    cumulative = wide.cumsum(-1)
    chosen = torch.searchsorted(cumulative, u * cumulative[..., -1:], right=True)
    return chosen.clamp_(max=p.shape[-1] - 1)


def _device(v: Values) -> torch.device:
    return v["device"] or torch.get_default_device()  # type: ignore[no-any-return]


# --- the dims that have the examples ------------------------------------------------------------------------------


@dataclass
class Probe:
    """The draws of forward, found on fake tensors. `by_value`: a drawn number decided what forward does."""

    draws: list[Drawn]
    by_value: bool


class _ProbingDraws(Draws):
    """The draws of a run on fake tensors with a prime number of examples.

    A dim that the prime divides has the examples. Entry i of such a dim of size outer * prime * inner belongs to example
    i // inner % prime; `_outer` has this outer factor by tensor where it is not 1, that is where the entries of one
    example are no contiguous range.
    """

    def __init__(self, name: str, key: Tensor, prime: int) -> None:
        super().__init__(name, key)
        self.prime = prime
        self.found: list[Drawn] = []
        self.by_value = False
        self._outer: Any = WeakTensorKeyDictionary()
        self._drawn: Any = WeakTensorKeyDictionary()  # tensors of draws alone -> None

    def _dispatch(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = tensors_in(args, kwargs)
        drawn = bool(operands) and all(x in self._drawn for x in operands)
        if drawn and func is torch.ops.aten._local_scalar_dense.default:
            self.by_value = True
        rule = _rule(func)
        out = func(*args, **kwargs) if rule is None else self._run(rule, func, args, kwargs)
        for y in tensors_in(out):
            if drawn:
                self._drawn[y] = None
            outer = self._outer_of(schema_of(func).name.split("::")[-1], args, operands, y)
            if outer != 1:
                self._outer[y] = outer
        return out

    def _dim(self, x: Tensor) -> int | None:
        """Return the first dim that has the examples."""
        return next((d for d, n in enumerate(x.shape) if n and n % self.prime == 0), None)

    def _outer_of(self, op: str, args: tuple[Any, ...], operands: Sequence[Tensor], y: Tensor) -> float:
        """Return the outer factor of a result: of a view by its place in memory, else the largest of the operands."""
        dim, known = self._dim(y), [(x, d, self._outer.get(x, 1)) for x in operands if (d := self._dim(x)) is not None]
        if dim is None or not known:
            return 1
        x, d, outer = known[0]
        if op in ("view", "_unsafe_view", "_reshape_alias", "view_copy"):
            return outer * math.prod(x.shape[:d]) / math.prod(y.shape[:dim])  # type: ignore[no-any-return]
        if op == "repeat":
            return outer * int(args[1][dim])  # type: ignore[no-any-return]
        if op == "cat" and len(known) > 1 and y.shape[dim] > x.shape[d]:
            return y.shape[dim] / x.shape[d] * outer  # type: ignore[no-any-return]
        if op in ("slice", "split", "split_with_sizes", "select") and y.shape[dim] < x.shape[d]:
            return outer * y.shape[dim] / x.shape[d]  # type: ignore[no-any-return]
        factors = {o: x for x, _, o in known}
        if len(factors) > 1 and any(x in self._drawn for x, _, _ in known):
            raise self._interleaved(f"{op} of", next(x for x, _, o in known if o != 1))
        return max(o for _, _, o in known)

    def _interleaved(self, what: str, x: Tensor) -> ShardingError:
        return draw_error(f"{self.name}: {what} {self._shown(x)}, in which the entries of one example are not together",
                          "B is the number of examples; a rank has every entry of its own examples, and so no range of "
                          "this dim", fix="keep the batch in a dim of its own, or flatten [B, T], not [T, B]")  # fmt: skip

    def _shown(self, x: Tensor) -> str:
        sizes = [str(n) if n % self.prime or not n else "B" if n == self.prime else f"{n // self.prime}*B" for n in x.shape]
        return f"{describe(x.dtype, ())[:-2]}[{', '.join(sizes)}]"

    def numbers(
        self, op: str, shape: Sequence[int], distribution: str, *args: float, dtype: torch.dtype, device: Any,
        like: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Record a draw. One that no example has a part of has its true values: forward may depend on them."""
        dims = [d for d, n in enumerate(shape) if n and n % self.prime == 0]
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        if len(dims) > 1:
            raise draw_error(f"{self.name}: {op} of {self._shown(out)} draws a number for each pair of examples",
                             fix="draw for each example: the batch in one dim")  # fmt: skip
        if like is not None and self._outer.get(like, 1) != 1:
            raise self._interleaved(f"{op} of", like)
        examples = Examples(dims[0], shape[dims[0]] // self.prime) if dims else None
        self.found.append(Drawn(op, tuple(shape), examples))
        if not dims and out.numel() == 1:
            with without_modes():
                key = fold_in(self.key, self.number)
                box, cpu = full_box(shape), torch.device("cpu")
                exact = draw_box(distribution, args, key, tuple(shape), box, dtype, cpu).tolist()
            out = torch.tensor(exact, dtype=dtype, device=device)
        self._drawn[out] = None
        self.number += 1
        return out


_ProbingDraws.__torch_dispatch__ = _ProbingDraws._dispatch  # type: ignore[assignment]


def prime_for(sizes: Iterator[int]) -> int:
    """Return a prime from 1009 on that divides none of the sizes."""
    known = {n for n in sizes if n}
    is_prime = lambda n: all(n % d for d in range(2, math.isqrt(n) + 1))  # noqa: E731
    return next(n for n in range(1009, 1 << 30) if is_prime(n) and all(m % n for m in known))


Fake = Callable[[Tensor, Sequence[int]], Tensor]  # a fake tensor like a real one, of another shape


def probe(name: str, key: Tensor, prime: int, run: Callable[[Fake], Any]) -> Probe:
    """Find the draws of forward, which `run` runs on tensors that it makes by a `Fake`, with `prime` examples."""
    before = np.random.get_state()
    found = _probe_once(name, key, prime, run)
    if not _same_state(before, np.random.get_state()):
        before = np.random.get_state()
        _probe_once(name, key, prime, run)
        if not _same_state(before, np.random.get_state()):  # again, so it was no other thread
            raise _foreign_draw(name, "numpy.random", None)
    return found


def _probe_once(name: str, key: Tensor, prime: int, run: Callable[[Fake], Any]) -> Probe:
    types = checker()
    fakes: Any = FakeTensorMode(allow_non_fake_inputs=True)
    mode = _ProbingDraws(name, key, prime)
    lines: list[ShardingError] = []

    def fake(x: Tensor, sizes: Sequence[int]) -> Tensor:
        with fakes:
            return torch.empty(tuple(sizes), dtype=x.dtype, device=x.device)

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and isinstance(getattr(arg, "__self__", None), random.Random):
            lines.append(_foreign_draw(name, f"random.{arg.__name__}", frame))

    former = sys.getprofile()
    with (contextlib.nullcontext() if types is None else types.paused()), without_modes(), without_functorch(), \
         torch.no_grad(), fakes, mode:  # fmt: skip
        sys.setprofile(watch)
        try:
            run(fake)
        finally:
            sys.setprofile(former)
    if lines:
        raise lines[0]
    return Probe(mode.found, mode.by_value)


def _foreign_draw(name: str, source: str, frame: FrameType | None) -> ShardingError:
    line = site(frame) if frame is not None else None
    return fail(f"{name}: forward draws from {source}, which key= cannot replace", *([str(line)] if line else []),
                "its numbers depend on the process and on earlier draws", fix="draw by torch.rand")  # fmt: skip


def _same_state(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
