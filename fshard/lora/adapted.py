"""The base of adapted matrices, and the placement of their tensors by other specs: LoRA and IA3 share them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard import nn, tree
from fshard._core.host_memory import to_device
from fshard._core.weight import Leaf, Part, Weight
from fshard.collectives import pslice, pvary
from fshard.errors import ShardingError, fail
from fshard.spec import Axis, P, is_spec, names_of

from .targets import parts_of


def sum_of_factors(leaf: Leaf, a: Tensor, b: Tensor) -> Tensor:
    """Return a b in the shape of a summed leaf: [.., in, r], [r, .., out] -> [.., in, out], or [.., out, in]."""
    ab = a @ b.movedim(0, -2)
    return ab if leaf.layout == "sum_io" else ab.mT


class AdaptedWeight(Weight):
    """Base class of a matrix `base`, a tensor or a Weight, with a few numbers that train."""

    base: Tensor | Weight  # [in.., out..]; flattened as its user asks
    leaf: Leaf
    inputs: int  # the number of input dims of the base, as flattened now

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def base_parts(self, spec: P | None, shape: Sequence[int] | None) -> list[Part]:
        """Return the parts of the base: several if it is a Weight."""
        return self.base.parts(spec, shape) if isinstance(self.base, Weight) else [(spec, shape)]  # type: ignore[list-item]

    def flatten(self, start: int = 0, end: int = -1) -> Self:
        start, end, inputs = self.flattened(self.inputs, start, end)
        return replace(self, base=self.base.flatten(start, end), inputs=inputs)  # type: ignore[type-var]

    @property
    def layout(self) -> str | None:
        """The order of the dims of the base, as `Leaf` has it."""
        return self.leaf.layout

    def base_linear(self, x: Tensor, b: Tensor | None) -> Tensor:
        """Compute x @ base + b; of a module a base is stored [out, in]."""
        if self.layout == "oi" and isinstance(self.base, Tensor):
            return F.linear(x, self.base, b)
        if isinstance(self.base, Weight) and (stored := getattr(self.base, "layout", None)) != self.layout:
            name, ours = self.leaf.module or "the base", _DIMS[self.layout]
            raise fail(f"linear: {name} is {ours}, and its base was quantized as {_DIMS[stored]}",
                       fix="pass one of= to lora.quantize and to lora.apply: of a module, the function that fs.defer "
                           "returned")  # fmt: skip
        return nn.linear(x, self.base, b)


_DIMS = {"io": "[in, out]", "oi": "[out, in]", "table": "a table", None: "no matrix"}


# --- tensors of adapters, placed by other specs than the leaves that use them ----------------------------------------


class Placement(NamedTuple):
    """The placement of a tensor as its leaf uses it, and the changes from the placement that it has."""

    spec: P
    base: P  # of the leaf
    slices: tuple[tuple[int, tuple[str, ...], tuple[int, ...] | None], ...]  # (dim, axes, lengths)
    varied: tuple[str, ...]  # axes to vary over
    same: tuple[int, ...]  # dims that are split as the leaf's
    misplaced: tuple[tuple[int, tuple[str, ...], tuple[str, ...]], ...]  # (dim, its axes, the leaf's)


@functools.lru_cache(maxsize=1 << 13)  # `apply` asks for each tensor in every step
def placement(part: str, wanted: P, given: P | None, base: P, ndim: int, model: tuple[str, ...]) -> Placement:
    """Return how a tensor of an adapter comes from its `given` spec to the `wanted` one, over the axes `model`."""
    slices, same, misplaced = [], [], []
    label = "specs" if given is None else "adapter_specs"
    dims = list(parts_of(f"{label} of {part!r}", wanted if given is None else given, ndim))
    for dim, (axes, base_axes) in enumerate(zip(dims, wanted.parts(ndim), strict=True)):
        over, base_over = (tuple(a for a in of if a in model) for of in (axes, base_axes))
        if over != base_over and axes:
            misplaced.append((dim, axes, base_axes))
        elif over != base_over:
            slices.append((dim, base_over, base.lengths_over(base_over)))
            dims[dim] = base_over
        elif axes == base_axes:
            same.append(dim)
    spec = wanted.with_entries(*dims)
    varied = tuple(a for a in base.axes if a in model and a not in spec.axes)
    return Placement(spec, base, tuple(slices), varied, tuple(same), tuple(misplaced))


def model_axes(verb: str, model: Axis, specs: Any) -> tuple[str, ...]:
    """Return the axes of a model. Raises ShardingError if there are some, and no `specs` of its parameters."""
    if model and specs is None:
        raise fail(f"{verb}: model={model!r}, and no specs", fix="specs=, the specs of params")
    return names_of(model)


def given_specs(verb: str, adapters: Mapping[str, Any], adapter_specs: Any) -> dict[tuple[str, str], P]:
    """Return the specs of adapters by name and part, from `adapter_specs`, a prefix; {} if that is None."""
    if adapter_specs is None:
        return {}
    chosen = {name: dict(parts) for name, parts in adapters.items()}
    flat = tree.broadcast(adapter_specs, chosen, name=f"{verb}: adapter_specs", leaf=is_spec)
    pairs = [(name, part) for name in sorted(chosen) for part in sorted(chosen[name])]
    return dict(zip(pairs, flat, strict=True))


def aligned(
    verb: str, adapters: Mapping[str, Mapping[str, Tensor]], placements: Mapping[tuple[str, str], Placement],
    given: Mapping[tuple[str, str], P],
) -> tuple[dict[str, dict[str, Tensor]], list[ShardingError]]:  # fmt: skip
    """Return the tensors as their leaves use them, and an error for each that is split in another way.

    Over the axes of the model that split a leaf its tensors are split in the same way, or vary: one that is replicated
    is sliced. Each kind of slice, and all that vary over the same axes, are one call.
    """
    out = {(name, part): x for name, parts in adapters.items() for part, x in parts.items()}
    slices: dict[Any, list[tuple[str, str]]] = {}
    varied: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    errors = []
    for key, where in placements.items():
        spec = given.get(key)
        if spec is not None and spec.memory == "host":
            out[key] = to_device(out[key])
        errors += [fail(f"{verb}: adapters[{key[0]!r}][{key[1]!r}] has dim {dim} over {axes}, and its base that dim "
                        f"over {base_axes or None}", factor=spec, base=where.base,
                        fix=f"the specs of {verb.replace('apply', 'specs')}, or P()")
                   for dim, axes, base_axes in where.misplaced]  # fmt: skip
        for one in where.slices:
            slices.setdefault(one, []).append(key)
        if where.varied:
            varied.setdefault(where.varied, []).append(key)
    if errors:
        return {}, errors
    for (dim, axes, lengths), keys in slices.items():
        out.update(zip(keys, pslice([out[key] for key in keys], axes, dim, lengths=lengths), strict=True))
    for axes, keys in varied.items():
        out.update(zip(keys, pvary([out[key] for key in keys], axes), strict=True))
    return {name: {part: out[name, part] for part in parts} for name, parts in adapters.items()}, []
