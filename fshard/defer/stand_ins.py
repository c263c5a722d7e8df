"""Tensors without values in place of the leaves of a module: not gathered ones, a `Weight`, and parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fshard import tree
from fshard._core.torch import without_modes
from fshard._core.weight import Leaf, Weight
from fshard.errors import ShardingError, fail
from fshard.nn import linear
from fshard.spec import P

from .module_leaves import Place
from .refusals import recomputed

_METADATA = frozenset({
    Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.ndim.__get__, Tensor.layout.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__, Tensor.is_cuda.__get__, Tensor.is_meta.__get__, Tensor.itemsize.__get__,  # type: ignore[attr-defined]
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__len__, Tensor.__hash__,
    torch.is_floating_point, torch.is_complex, torch.numel,
})  # fmt: skip


class StandIn(Tensor):
    """A tensor in a module in the place of a leaf: it has a shape, a dtype and a device, and no values.

    An operation on it raises `error(name of the operation)`.
    """

    leaf: str
    note: str  # why the leaf is not here, for its repr
    _device: torch.device

    @classmethod
    def like(
        cls, leaf: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, note: str,
        memory: Tensor | None = None, **attributes: Any,
    ) -> Self:  # fmt: skip
        with without_modes():  # of a dry run, whose fake tensors have no subclass
            flat = torch.empty(math.prod(shape), dtype=dtype, device="meta") if memory is None else memory
            out = flat[: math.prod(shape)].view(tuple(shape)).as_subclass(cls)
        vars(out).update(attributes, leaf=leaf, note=note, _device=device)
        return out

    def error(self, operation: str) -> ShardingError:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._device

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{self.leaf}{self.note}>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        x = next(x for x in tree.leaves((args, kwargs)) if isinstance(x, StandIn))
        return x._run(func, args, kwargs or {})

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise self.error(getattr(func, "__name__", str(func)))


class OutsideUnit(StandIn):
    """A leaf of a unit outside of the unit's forward. An operation on it uses `value(leaf)`, if there is a function."""

    unit: str
    value: Callable[[str], Tensor] | None

    def error(self, operation: str) -> ShardingError:
        return fail(f"{self.leaf!r} of unit {self.unit!r} is used outside of the unit's forward, by {operation}",
                    "it is gathered only while the unit runs",
                    fix=f"leave {self.unit!r} out of units=, or choose the module that uses the leaf there; or "
                    "units=None")  # fmt: skip

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.value is None or func is torch.autograd.grad:
            return super()._run(func, args, kwargs)
        x = self.value(self.leaf)
        args, kwargs = tree.map(lambda y: x if y is self else y, (args, kwargs))
        return func(*args, **kwargs)


class _PathTo(torch.autograd.Function):
    """A tensor that depends on shards, without values or a gradient."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, numel: int, *shards: Tensor) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="meta")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise fail("leaves of units are passed to an autograd.Function outside of the units' forwards, which returns "
                   "gradients of them", "they are gathered only while the unit runs", fix="units=None")  # fmt: skip


def path_to(shards: Sequence[Tensor], numel: int, dtype: torch.dtype) -> Tensor:
    """Return memory, for tensors without values, that depends on shards: a backward to these passes the users of both.

    An autograd.Function that is passed parameters of a unit, as an adjoint method is, then runs, and raises an error.
    """
    with without_modes():
        out: Tensor = _PathTo.apply(dtype, numel, *shards)  # type: ignore[no-untyped-call]
    return out


class BetweenCalls(StandIn):
    """A leaf of a module that no call uses: an operation on it belongs to a call that has ended."""

    apply: str

    def error(self, operation: str) -> ShardingError:
        return recomputed(f"{self.apply}: {self.leaf!r} is used by {operation} after forward has ended",
                          "a module has the leaves of a call while its forward runs; "
                          "torch.utils.checkpoint, and an adjoint method, run a part of it again in backward"
                          )  # fmt: skip


class AdaptedParameter(StandIn):
    """A `Weight` in the place of a parameter, used as by nn.Linear, nn.Embedding and transformers' Conv1D.

    A head that shares a table of embeddings uses only the base, as in PEFT.
    """

    weight: Weight

    @staticmethod
    def from_weight(leaf: str, weight: Weight) -> AdaptedParameter:
        device = tree.leaves(weight)[0].device
        return AdaptedParameter.like(leaf, weight.shape, weight.dtype, device, ", adapted", weight=weight)

    def error(self, operation: str) -> ShardingError:
        if self._layout is None:
            return fail(f"{self.leaf!r} is of type {type(self.weight).__name__}, and used by {operation}",
                        "in a deferred module only an adapter of a layer stands for it",
                        fix="exclude its module in lora.quantize, or adapt it")  # fmt: skip
        return fail(f"{self.leaf!r} is adapted, and used by {operation}, which adapters do not take part in",
                    "they do in nn.Linear, nn.Embedding and transformers' Conv1D",
                    fix="exclude its module from the adapter's targets")  # fmt: skip

    def _run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        rules: dict[Any, Callable[..., Any]] = {
            F.linear: self._linear, torch.addmm: self._addmm, torch.matmul: self._matmul, F.embedding: self._embedding
        }  # fmt: skip
        out = rules[func](*args, **kwargs) if func in rules else NotImplemented
        return super()._run(func, args, kwargs) if out is NotImplemented else out

    @property
    def _layout(self) -> str | None:
        return getattr(self.weight, "layout", None)

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> Any:
        if weight is self and self._layout == "io":
            raise fail(f"{self.leaf!r} was quantized, or adapted, as [in, out], and linear takes [out, in]",
                       fix="pass of=, the function that fs.defer returned, to each function of fs.lora")  # fmt: skip
        if weight is not self or self._layout not in ("oi", "table"):
            return NotImplemented
        if self._layout == "table":
            return linear(input, self.weight.transpose(0, 1), bias)
        return self.weight.linear(input, bias)

    def _addmm(self, input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
        if mat2 is not self or self._layout != "io" or beta != 1 or alpha != 1:
            return NotImplemented
        return self.weight.linear(mat1, input)

    def _matmul(self, input: Any, other: Any) -> Any:
        return self.weight.linear(input) if other is self and self._layout == "io" else NotImplemented

    def _embedding(
        self, input: Any, weight: Any, padding_idx: int | None = None, max_norm: float | None = None,
        norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
    ) -> Any:  # fmt: skip
        if weight is not self or self._layout != "table" or max_norm is not None or scale_grad_by_freq or sparse:
            return NotImplemented
        return self.embed(input, padding_idx=padding_idx)

    def embed(self, ids: Tensor, **options: Any) -> Tensor:
        """Look up rows, as `nn.embedding`."""
        if self._layout != "table":
            raise self.error("embedding")
        return self.weight.embed(ids, **options)


@dataclass(frozen=True)
class Split:
    """A parameter of replaced modules that mesh axes split: its full shape, its spec, and the texts of errors."""

    shape: tuple[int, ...]
    spec: P
    by: str  # "0: column_linear('model')", of each module that has it
    others: str  # its names in modules that are not replaced


class SplitParameter(StandIn):
    """A parameter that mesh axes split, in its module: it has the full shape, and `part` is the rank's part."""

    part: Tensor
    placed: Split

    @staticmethod
    def from_part(leaf: str, part: Tensor, split: Split) -> SplitParameter:
        note = f", split by {split.spec}"
        return SplitParameter.like(leaf, split.shape, part.dtype, part.device, note, part=part, placed=split)

    def error(self, operation: str) -> ShardingError:
        where = f", as {self.placed.others}" if self.placed.others else ""
        return fail(f"{self.leaf!r} is split by replace= ({self.placed.by}), and used by {operation} outside of the "
                    f"forward of these modules{where}", "a rank has only its part of the parameter",
                    fix="replace every module that uses it, or none of them")  # fmt: skip


def detached(x: Tensor) -> Tensor:
    """Return a leaf of a module, detached; it requires a gradient where it did."""
    if isinstance(x, AdaptedParameter):
        return AdaptedParameter.from_weight(x.leaf, tree.map(detached, x.weight))
    if isinstance(x, SplitParameter):
        return SplitParameter.from_part(x.leaf, detached(x.part), x.placed)
    return x if isinstance(x, StandIn) else x.detach().requires_grad_(x.requires_grad)


def in_module(params: Mapping[str, Any], splits: Mapping[str, Split]) -> dict[str, Tensor]:
    """Return the leaves as a module may have them: a Weight, and a part of a leaf that is split, by its stand-in."""
    out = {name: AdaptedParameter.from_weight(name, x) if isinstance(x, Weight) else x for name, x in params.items()}
    for name, split in splits.items():
        if name in out and not isinstance(out[name], OutsideUnit):
            out[name] = SplitParameter.from_part(name, out[name], split)
    return out


_LAYOUTS: dict[Any, Literal["oi", "table", "io"]] = {  # of the weights of modules, by class or its name
    nn.Linear: "oi", nn.Embedding: "table", "Conv1D": "io",  # of transformers: [in, out]
}  # fmt: skip


def adapted_as(module: nn.Module, places: Sequence[Place]) -> dict[str, Leaf]:
    """Return how adapters see each parameter, by the module that has it under its first name."""
    out: dict[str, Leaf] = {}
    for p in places:
        if p.kind != "params" or p.leaf in out:
            continue
        name, _, part = p.leaf.rpartition(".")
        m = module.get_submodule(p.name.removesuffix(p.key).rstrip("."))
        kinds = {kind for c in type(m).__mro__ for kind in (c, c.__name__)}
        layout = next((layout for kind, layout in _LAYOUTS.items() if kind in kinds), None)
        if part != "weight" or p.value.ndim != 2:
            out[p.leaf] = Leaf(name, part, why=f"it is the {part} of a {type(m).__name__}")
        else:
            out[p.leaf] = Leaf(name, part, layout, why="" if layout else f"its module is a {type(m).__name__}")
    return out
