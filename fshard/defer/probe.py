"""The dims of a module's draws that have the examples of a batch, found on fake tensors: `probe`.

Forward runs on fake tensors with a prime number of examples: a dim that this prime divides has the examples. A view of
[T, B] as [T*B] does not keep the entries of one example together, and a draw of such a tensor is refused.
"""

from __future__ import annotations

import math
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from fshard._core.callsite import place_and_source, site, user_frame
from fshard._core.operations import tensors_in
from fshard._core.region import unchecked
from fshard._core.torch import FakeTensorMode, schema_of, without_functorch, without_modes
from fshard.errors import ShardingError, fail
from fshard.random import fold_in
from fshard.spec import full_box, short_dtype

from .aten_rules import values_of
from .distributions import draw_box
from .draws import Drawn, Draws, Probe, rule_of

_REORDER = {"index", "index_select", "gather", "sort", "argsort", "topk", "flip", "roll"}


class _ProbingDraws(Draws):  # type: ignore[no-untyped-call]
    """The draws of a run on fake tensors with a prime number of examples.

    Entry i of a dim of size outer * prime * inner belongs to example i // inner % prime. `_outer` has the outer factor
    of a tensor where it is not 1: there the entries of one example are not contiguous. It is NaN if unknown, of
    entries that were sorted or picked; added to others they are in the order of those.
    """

    def __init__(self, name: str, key: Tensor, prime: int) -> None:
        super().__init__(name, key)
        self.prime = prime
        self.found: list[Drawn] = []
        self._outer: Any = WeakTensorKeyDictionary()
        self._ranges: Any = WeakTensorKeyDictionary()  # tensors made only of torch.arange

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = schema_of(func).name.split("::")[-1]
        parts = self._decomposed(func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        operands, rule = tensors_in(args, kwargs), rule_of(func)
        if rule is not None:
            out = self._run(rule, func, args, kwargs)
        elif name == "_grouped_mm" and args[0].ndim == 2 and args[1].ndim == 3:  # torch's fake one refuses float32
            out = args[0].new_empty(args[0].shape[0], args[1].shape[-1])
        else:
            out = func(*args, **kwargs)
        self._follow(func, operands, out)
        for y in tensors_in(out):
            if name == "arange" or (operands and all(x in self._ranges for x in operands)):
                self._ranges[y] = None
            self._outer[y] = self._outer_of(func, name, args, kwargs, y)
        return out

    def _dim(self, x: Tensor) -> int | None:
        """Return the first dim that has the examples."""
        return next((d for d, n in enumerate(x.shape) if n and n % self.prime == 0), None)

    def _factor(self, x: Tensor) -> float:
        return float(self._outer.get(x, 1))

    def _outer_of(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor) -> float:
        """Return the outer factor of a result: of a view by its place in memory, else the operands' factor."""
        operands = tensors_in(args, kwargs)
        dim, known = self._dim(y), [(x, d, self._factor(x)) for x in operands if (d := self._dim(x)) is not None]
        if dim is None or not known:
            return 1
        x, d, outer = known[0]
        if name in ("view", "_unsafe_view", "_reshape_alias", "view_copy"):
            return outer * (math.prod(x.shape[:d]) / math.prod(y.shape[:dim]))
        if name in ("repeat", "cat", "slice", "split", "split_with_sizes"):
            return outer * (y.shape[dim] / x.shape[d])
        if name in _REORDER and x is args[0] and self._reorders(func, name, args, kwargs, d):
            return math.nan
        others = [o for _, _, o in known if o != 1]
        if others and len(others) < len(known) and any(x in self._drawn for x, _, _ in known):
            raise self._interleaved(f"{name} of", next(x for x, _, o in known if o != 1))
        certain = [o for o in others if not math.isnan(o)]
        return certain[0] if certain else math.nan if len(others) == len(known) else 1

    def _reorders(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> bool:
        """Return whether an operation sorts or picks the entries of a dim of its first argument."""
        values = values_of(func, args, kwargs)
        if name == "index":  # by torch.arange over the examples they keep their order
            index = values["indices"][dim] if dim < len(values["indices"]) else None
            return index is not None and (index not in self._ranges or self._factor(index) != 1)
        dims = values["dims"] if "dims" in values else [values.get("dim", -1)]
        return dim in [d % args[0].ndim for d in dims]

    def _interleaved(self, what: str, x: Tensor) -> ShardingError:
        return self.error(f"{what} {self._shown(x)}, in which the entries of one example are not together",
                          "B is the number of examples; a rank's examples are not a range of this dim",
                          fix="keep the batch in a separate dim, or flatten [B, T], not [T, B]")  # fmt: skip

    def _shown(self, x: Tensor) -> str:
        each = [n // self.prime if n % self.prime == 0 else 0 for n in x.shape]
        sizes = ["B" if k == 1 else f"{k}*B" if k else str(n) for k, n in zip(each, x.shape, strict=True)]
        return f"{short_dtype(x.dtype)}[{', '.join(sizes)}]"

    def numbers(
        self, op: str, shape: Sequence[int], distribution: str, *args: float, dtype: torch.dtype, device: Any,
        like: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Record a draw. One that no example has a part of has its true values: forward may depend on them."""
        dims = [d for d, n in enumerate(shape) if n and n % self.prime == 0]
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        if len(dims) > 1:
            raise self.error(f"{op} of {self._shown(out)} draws a number for each pair of examples",
                             fix="draw for each example: the batch in one dim")  # fmt: skip
        if (op == "randperm" and dims) or any(type(a) is int and a and a % self.prime == 0 for a in args):
            raise self.error(f"{op} draws positions among all examples, and each rank has a part of them",
                             fix="choose within each example")  # fmt: skip
        if like is not None and self._factor(like) != 1:
            raise self._interleaved(f"{op} of", like)
        dim = dims[0] if dims else None
        self.found.append(Drawn(op, tuple(shape), dim, 0 if dim is None else shape[dim] // self.prime))
        if not dims and out.numel() == 1:
            with without_modes():
                key = fold_in(self.key, self.number)
                box, cpu = full_box(shape), torch.device("cpu")
                exact = draw_box(distribution, args, key, tuple(shape), box, dtype, cpu).tolist()
            out = torch.tensor(exact, dtype=dtype, device=device)
        self._drawn[out] = None
        self.number += 1
        return out


def prime_for(sizes: Iterator[int]) -> int:
    """Return a prime from 1009 on that divides none of the sizes."""
    known = {n for n in sizes if n}
    primes = (n for n in range(1009, 1 << 30) if all(n % d for d in range(2, math.isqrt(n) + 1)))
    return next(n for n in primes if all(m % n for m in known))


def fake_like(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return a tensor like another one, of another shape: in a probe a fake one."""
    return torch.empty(tuple(sizes), dtype=x.dtype, device=x.device)


def probe(name: str, key: Tensor, prime: int, run: Callable[[], Any]) -> Probe:
    """Find the draws of forward, which `run` runs on tensors that it makes by `fake_like`, with `prime` examples."""
    before = _numpy_state()
    found = _probe_once(name, key, prime, run)
    if not _same(before, _numpy_state()):
        _probe_once(name, key, prime, run, of_numpy=True)  # by this thread?
    return found


def _probe_once(name: str, key: Tensor, prime: int, run: Callable[[], Any], of_numpy: bool = False) -> Probe:
    fakes: Any = FakeTensorMode(allow_non_fake_inputs=True)
    mode = _ProbingDraws(name, key, prime)
    foreign: list[ShardingError] = []
    failure: ShardingError | None = None
    before = _numpy_state()

    def watch(frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call" and isinstance(getattr(arg, "__self__", None), random.Random):
            foreign.append(_foreign_draw(name, "random", frame))
        if of_numpy and not foreign and not _same(before, _numpy_state()):
            foreign.append(_foreign_draw(name, "numpy.random", frame))

    former = sys.getprofile()
    with unchecked(), without_modes(), without_functorch(), \
         torch.no_grad(), fakes, mode:  # fmt: skip
        sys.setprofile(watch)
        try:
            run()
        except ShardingError:
            raise
        except Exception as e:
            failure = _cannot_run(name, e)
        finally:
            sys.setprofile(former)
    if foreign:
        raise foreign[0]
    return Probe(mode.found, mode.read, failure)


def _foreign_draw(name: str, source: str, frame: FrameType) -> ShardingError:
    return fail(f"{name}: forward draws from {source}, which key= cannot replace",
                *place_and_source(site(user_frame(frame))), "its numbers depend on the process and on earlier draws",
                fix="draw by torch.rand")  # fmt: skip


def _cannot_run(name: str, e: Exception) -> ShardingError:
    frames = [f for f, _ in traceback.walk_tb(e.__traceback__)]
    line = site(next((f for f in reversed(frames) if user_frame(f) is f), None))
    why = str(e).partition("\n")[0]
    return fail(f"{name}: draws_over cannot find the dims of the examples: forward failed on tensors without values",
                *place_and_source(line), f"{type(e).__name__}: {why}",
                fix="draws_over(axis, probe=False), if the examples are in the same dim of every draw, one after the "
                "other")  # fmt: skip


def _numpy_state() -> Any:
    return np.random.get_state()  # noqa: NPY002  of the generator that old code draws from


def _same(a: Any, b: Any) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
