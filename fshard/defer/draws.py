"""Random numbers of a module that draws from torch's generator, by a key and the global index instead.

Draw number j of a call is a draw of `fs.random` under fold_in(key, j). `Draws` is the mode that makes the numbers. It
sees the operations below autograd and torch.func, where dropout of every kind ends in a few of them: bernoulli_,
uniform_, rand. `probe` finds which dim of each draw has the examples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fshard._core.callsite import place_and_source, site
from fshard._core.operations import OperationMode, tensors_in
from fshard._core.region import checker, unchecked
from fshard._core.torch import schema_of
from fshard.errors import ShardingError, fail
from fshard.random import bernoulli_box, fold_in
from fshard.spec import Box, full_box, part_range

from .aten_rules import Values, values_of
from .distributions import MAX_RANDINT_RANGE, distribution_of, draw_box

Read = tuple[int, Any]  # a Python number computed only from draws, and the number of draws before


@dataclass(frozen=True)
class Drawn:
    """One draw of a probe: its shape, with a prime number of examples, and the dim that has them."""

    op: str
    shape: tuple[int, ...]
    dim: int | None  # None: no dim has examples
    each: int  # entries of one example in that dim


@dataclass(frozen=True)
class Probe:
    """The draws of forward, found on fake tensors."""

    draws: Sequence[Drawn]
    read: Sequence[Read]  # the drawn numbers that forward read, to skip a layer or not
    failure: ShardingError | None  # of a run that could not go on; only a draw needs to know


Expected = Callable[[Sequence[Read], int], Probe]


class SplitDim(NamedTuple):
    """A split dim of a draw: this rank's part begins at `start`."""

    dim: int
    full: int  # size, on all ranks
    start: int
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Batch:
    """Part of the examples of a batch that this rank has: `count` from `start` on, of `total`, over mesh `axes`."""

    axes: tuple[str, ...]
    start: int
    count: int
    total: int
    dim: int | None = None  # of the examples in every draw, if no probe finds it

    def split(self, dim: int, each: int) -> SplitDim:
        """Return this rank's part of a dim that has `each` entries for an example."""
        return SplitDim(dim, each * self.total, each * self.start, self.axes)


@dataclass(frozen=True)
class Features:
    """Mesh axes over which replaced modules leave features split: their sizes, and this rank's coordinates."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    coords: tuple[int, ...]
    numbers: frozenset[int]  # of the features, of each dim of a parameter that the axes split

    def split(self, dim: int, ndim: int, full: int, size: int) -> SplitDim | None:
        """Return this rank's part of a dim with features, or with heads of them; None if `size` is not its size.

        A dim where they are flattened with others may have that size too, but a rank's part of it is not a range: dim 0
        of several is [B*heads], and another product divides no number of features, as a rule.
        """
        is_features = (dim > 0 or ndim == 1) and any(n % max(1, full) == 0 for n in self.numbers)
        start, length = part_range(full, self.sizes, self.coords)
        return SplitDim(dim, full, start, self.axes) if is_features and length == size else None


# --- the mode ---------------------------------------------------------------------------------------------------


class Draws(OperationMode):  # type: ignore[no-untyped-call]
    """The draws of one call of a module: draw number j is under fold_in(key, j).

    `number` counts the draws. A caller that runs a part of forward again, to recompute it in backward, reads `number`
    before the part runs first, and later enters a `resumed` copy: the same part then draws the same numbers.

        start = draws.number
        y = block(x)                                # in the call
        with draws.resumed(start): y = block(x)     # in backward

    Args:
        name: of the function, for errors.
        batch: this rank's part of the batch; None where nothing is split.
        expected: from the numbers that forward has read, and the number of draws, to a probe that read the same, and so
            makes the same draws so far.
        features: the axes that may split other dims than the examples'; the probes know the sizes of these dims.
    """

    def __init__(
        self, name: str, key: Tensor, batch: Batch | None = None, expected: Expected | None = None,
        features: Sequence[Features] = (),
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.key, self.batch, self.expected, self.features = name, key, batch, expected, features
        self.number = 0
        self.read: list[Read] = []
        self._drawn: Any = WeakTensorKeyDictionary()  # tensors made only of draws

    def error(self, what: str, *notes: str, fix: str) -> ShardingError:
        """Return an error that names the function, and the line of the module's code."""
        return fail(f"{self.name}: {what}", *place_and_source(site()), *notes, fix=fix)

    def resumed(self, number: int) -> Draws:
        other = Draws(self.name, self.key, self.batch, self.expected, self.features)
        other.number, other.read = number, [r for r in self.read if r[0] <= number]
        return other

    def check_number(self) -> None:
        """Raise ShardingError after a call that drew fewer times than expected."""
        if self.expected is None or self.batch is None or not self.batch.count:
            return
        found = self.expected(self.read, self.number)
        if found.failure is None and self.number < len(found.draws):
            raise self._unexpected(f"{self.number} draws were made", f"{len(found.draws)}")

    def _unexpected(self, here: str, there: str) -> ShardingError:
        axes = " or ".join(str(f.axes) for f in self.features)
        split = [f"or {why}: replace= is to leave them unsplit" for why in (
            f"this rank has no part of the features that {axes} splits, and torch draws nothing for it",
            "they are flattened with another dim, and a rank's part is no range of it",
            *["axes whose parts have one size cannot be told apart"] * (len(self.features) > 1)) if axes]  # fmt: skip
        return self.error(f"{here}, and {there} in a run with another number of examples",
                          "the draws of forward depend on that number, or on values, and may differ between ranks",
                          *split, fix="draw as often, and in the same shapes, for any batch: for all examples at once"
                          )  # fmt: skip

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rule = rule_of(func)
        if rule is not None:
            parts = self._decomposed(func, args, kwargs)
            return self._run(rule, func, args, kwargs) if parts is NotImplemented else parts
        out = func(*args, **kwargs)
        if len(self._drawn):
            self._follow(func, tensors_in(args, kwargs), out)
        return out

    def _decomposed(self, func: Any, args: tuple[Any, ...], kwargs: Values) -> Any:
        """Run an operation as those that it is made of; NotImplemented if it is not, or only for its gradient.

        In inference mode, and inside another operation, torch has not decomposed dropout, attention or lstm before.
        """
        if func.namespace == "prim":  # an attribute of a tensor, no operation
            return NotImplemented
        with self:
            return func.decompose(*args, **kwargs)

    def _follow(self, func: Any, operands: Sequence[Tensor], out: Any) -> None:
        """Note the tensors that are made only of draws, and the numbers that are read from them."""
        if operands and all(x in self._drawn for x in operands):
            if func.overloadpacket.__name__ == "_local_scalar_dense":
                self.read.append((self.number, out))
            for y in tensors_in(out):
                self._drawn[y] = None

    def _run(self, rule: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: Values) -> Any:
        """Run a random operation by its rule, unless it draws nothing or by a given generator."""
        values = values_of(func, args, kwargs)
        name = func.overloadpacket.__name__
        rate = values.get("dropout_p", values.get("dropout", values.get("p") if "dropout" in name else None))
        off = rate == 0 or values.get("train") is False or values.get("training") is False
        if off or any(x.is_meta for x in tensors_in(*args)):
            return func(*args, **kwargs)
        if values.get("generator") is not None:
            raise self.error(f"{name} draws from a generator of its own, and key= cannot replace it",
                             "its numbers depend on the process and on earlier draws",
                             fix="leave generator= out: the numbers are then drawn by key")  # fmt: skip
        return rule(self, name, values)

    def numbers(
        self, op: str, shape: Sequence[int], distribution: str, *args: float, dtype: torch.dtype, device: Any,
        like: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Draw this rank's part of the next draw, of local `shape`. A probe asks how the examples of `like` lie."""
        full, box, axes = self._part(op, tuple(shape))
        key = fold_in(self.key, self.number)
        self.number += 1
        types = checker()
        with unchecked():
            if distribution == "bernoulli":
                out = bernoulli_box(key, full, box, p=args[0], device=device).to(dtype)
            else:
                out = draw_box(distribution, args, key, full, box, dtype, device)
        if types is not None:
            types.set_draw_type(out, op, self.key, axes, shared=() if self.batch is None else self.batch.axes)
        if self.expected is not None and not axes and out.numel() == 1:
            self._drawn[out] = None
        return out

    def _part(self, op: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Box, tuple[str, ...]]:
        """Return the global shape of a draw, this rank's box of it, and the axes that split it."""
        full, box, axes = list(shape), list(full_box(shape)), list[str]()
        for split in self._splits(op, shape):
            full[split.dim], box[split.dim] = split.full, slice(split.start, split.start + shape[split.dim])
            axes += split.axes
        return tuple(full), tuple(box), tuple(axes)

    def _splits(self, op: str, shape: tuple[int, ...]) -> list[SplitDim]:
        """Return the split dims of a draw, from this rank's `shape`."""
        if self.batch is None:
            return []
        if self.expected is None:
            return self._stated(op, shape, self.batch)
        probe = self.expected(self.read, self.number)
        if probe.failure is not None:
            raise probe.failure
        last = len(probe.draws) if not self.batch.count else self.number + 1  # torch may draw nothing for no examples
        for number, drawn in enumerate(probe.draws[self.number : last], self.number):
            found = self._splits_from(drawn, shape, self.batch)
            if op == drawn.op and found is not None:
                self.number = number
                return found
        there = [f"{drawn.op} of {list(drawn.shape)}" for drawn in probe.draws[self.number : self.number + 1]]
        raise self._unexpected(f"draw {self.number} is {op} of {list(shape)}", there[0] if there else "there is none")

    def _splits_from(self, drawn: Drawn, shape: tuple[int, ...], batch: Batch) -> list[SplitDim] | None:
        """Return the split dims, if this rank's `shape` is a part of a draw that a probe found; else None."""
        if len(shape) != len(drawn.shape):
            return None
        out = []
        for dim, (n, full) in enumerate(zip(shape, drawn.shape, strict=True)):
            if dim == drawn.dim:
                found = [batch.split(dim, drawn.each)] if n == drawn.each * batch.count else []
            elif n != full:
                found = [part for f in self.features if (part := f.split(dim, len(shape), full, n)) is not None]
            else:
                continue
            if len(found) != 1 or drawn.op == "randperm":
                return None
            out += found
        return out

    def _stated(self, op: str, shape: tuple[int, ...], batch: Batch) -> list[SplitDim]:
        """Return the dim that was given as the dim of the examples."""
        dim = batch.dim or 0
        if not shape:
            return []
        n = shape[dim] if -len(shape) <= dim < len(shape) else None
        if n is None or (n % batch.count if batch.count else n):
            what = "no such dim" if n is None else f"{n} entries, of {batch.count} examples"
            raise self.error(f"draw {self.number} is {op} of {list(shape)}, whose dim {dim} has {what}",
                             "a draw for some of the examples at a time is not the same on every mesh",
                             fix="draws_over(axis), without probe=False, finds the dim of each draw; or a rate of 0"
                             )  # fmt: skip
        return [batch.split(dim % len(shape), n // max(1, batch.count))]


# --- the operations ---------------------------------------------------------------------------------------------

Rule = Callable[[Draws, str, Values], Any]


@functools.cache
def rule_of(func: Any) -> Rule | None:
    """Return the rule of a random operation (an OpOverload); None for the others."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    schema = schema_of(func)
    out_variant = any(a.kwarg_only and a.alias_info is not None for a in schema.arguments)
    return _refuse if out_variant else _RULES.get(schema.name.split("::")[-1], _refuse)


_REFUSED = {  # a part of an operation's name -> how it draws, and a fix
    "attention": ("its dropout inside a fused kernel, where key= cannot reach it",
                  ("with torch.nn.attention.sdpa_kernel(SDPBackend.MATH): around the call; or, for models of "
                   'Hugging Face, attn_implementation="eager"')),
    "rnn": ("its dropout inside a kernel, where key= cannot reach it",
            "with torch.backends.cudnn.flags(enabled=False): around the call"),
    "": ("in a way that key= cannot replace",
         "draw by torch.rand, torch.randn, torch.randint, torch.bernoulli or dropout; apply.eval() draws nothing"),
}  # fmt: skip


def _refuse(draws: Draws, name: str, values: Values) -> Any:
    how, fix = next(refused for part, refused in _REFUSED.items() if part in name)
    raise draws.error(f"{name} draws {how}", fix=fix)


def _bernoulli(draws: Draws, name: str, v: Values) -> Tensor:
    x, p = v["self"], v.get("p")
    if p is None or isinstance(p, Tensor):  # probabilities
        wide = torch.promote_types((x if p is None else p).dtype, torch.float32)
        drawn = draws.numbers(name, x.shape, "uniform", 0.0, 1.0, dtype=wide, device=x.device, like=x)
        drawn = drawn < (x if p is None else p)
    else:
        if not 0 <= p <= 1:
            raise draws.error(f"{name}: p={p} is not a probability", fix="0 <= p <= 1")
        drawn = draws.numbers(name, x.shape, "bernoulli", p, dtype=torch.bool, device=x.device, like=x)
    return (x if name.endswith("_") else torch.empty_like(x)).copy_(drawn)


def _native_dropout(draws: Draws, name: str, v: Values) -> tuple[Tensor, Tensor]:
    """Draw as the dropout of CPUs does, with the same numbers."""
    x, p = v["input"], v["p"]
    keep = torch.empty_like(x, dtype=torch.bool)
    keep.copy_(draws.numbers("bernoulli_", x.shape, "bernoulli", 1 - p, dtype=torch.bool, device=x.device, like=x))
    return x * keep * (0.0 if p == 1 else 1 / (1 - p)), keep


def _numbers(draws: Draws, name: str, v: Values) -> Tensor:
    x, default = v.get("self"), torch.int64 if name in ("randint", "randperm") else torch.get_default_dtype()
    dtype: torch.dtype = v.get("dtype") or (default if x is None else x.dtype)
    found = distribution_of(name.removesuffix("_"), v, dtype)
    assert found is not None
    if found[0] == "randint" and not 0 < found[2] - found[1] <= MAX_RANDINT_RANGE:
        raise draws.error(f"{name} of range({found[1]}, {found[2]})", fix="0 < high - low <= 2^32")
    if x is None:
        return draws.numbers(name, v["size"] if "size" in v else (v["n"],), *found, dtype=dtype, device=_device(v))
    drawn = draws.numbers(name, x.shape, *found, dtype=dtype, device=v.get("device") or x.device, like=x)
    out = x if name.endswith("_") else torch.empty_like(x, dtype=drawn.dtype, device=drawn.device)
    return out.copy_(drawn)


def _normal(draws: Draws, name: str, v: Values) -> Tensor:
    mean, std = v["mean"], v["std"]
    given = [x for x in (mean, std) if isinstance(x, Tensor)]
    if not given:
        dtype = v["dtype"] or torch.get_default_dtype()
        return draws.numbers(name, v["size"], name, mean, std, dtype=dtype, device=_device(v))
    like = max(given, key=lambda x: x.ndim)
    shape = (mean + std).shape
    drawn = draws.numbers(name, shape, name, 0.0, 1.0, dtype=like.dtype, device=like.device, like=like)
    out: Tensor = mean + std * drawn
    return out


def _rrelu(draws: Draws, name: str, v: Values) -> Tensor:
    x, noise, low, high = v["self"], v["noise"], v["lower"], v["upper"]
    slope = draws.numbers("rrelu", x.shape, "uniform", 0.0, 1.0, dtype=x.dtype, device=x.device, like=x)
    noise.copy_(torch.where(x <= 0, low + (high - low) * slope, 1.0))
    out: Tensor = x.mul_(noise) if name.endswith("_") else x * noise
    return out


def _multinomial(draws: Draws, name: str, v: Values) -> Tensor:
    """Choose by exponential clocks; with replacement by the inverse of the cumulative distribution."""
    p, n = v["self"], v["num_samples"]
    wide = p.double()
    if n == 1 or not v["replacement"]:
        clock = draws.numbers(name, p.shape, "exponential", 1.0, dtype=torch.float64, device=p.device, like=p)
        first: Tensor = (wide / clock).topk(n, -1).indices
        return first
    shape = (*p.shape[:-1], n)
    u = draws.numbers(name, shape, "uniform", 0.0, 1.0, dtype=torch.float64, device=p.device, like=p)
    cumulative = wide.cumsum(-1)
    chosen = torch.searchsorted(cumulative, u * cumulative[..., -1:], right=True)
    return chosen.clamp_(max=p.shape[-1] - 1)


def _device(v: Values) -> torch.device:
    return v["device"] or torch.get_default_device()


_RULES: dict[str, Rule] = {
    **dict.fromkeys(("uniform_", "normal_", "geometric_", "exponential_", "log_normal_", "cauchy_", "random_", "rand",
                     "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like"), _numbers),
    "bernoulli": _bernoulli, "bernoulli_": _bernoulli, "native_dropout": _native_dropout, "normal": _normal,
    "rrelu_with_noise": _rrelu, "rrelu_with_noise_": _rrelu, "multinomial": _multinomial,
}  # fmt: skip
