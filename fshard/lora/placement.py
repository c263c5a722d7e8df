"""Tensors of adapters, placed by other specs than the leaves that use them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fshard import tree
from fshard._core.host_memory import to_device
from fshard.collectives import pslice, pvary
from fshard.errors import ShardingError, fail
from fshard.spec import Axis, P, is_spec, names_of

from .targets import parts_of


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


def given_specs(
    verb: str, names: Sequence[str], adapters: Mapping[str, Any], adapter_specs: Any
) -> dict[tuple[str, str], P]:
    """Return the specs of adapters by name and part, from `adapter_specs`, a prefix; {} if that is None."""
    if adapter_specs is None:
        return {}
    chosen = {name: dict(adapters[name]) for name in names}
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
    out = {name: dict(parts) for name, parts in adapters.items()}
    slices: dict[Any, list[tuple[str, str]]] = {}
    varied: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    errors = []
    for (name, part), where in placements.items():
        spec = given.get((name, part))
        if spec is not None and spec.memory == "host":
            out[name][part] = to_device(out[name][part])
        errors += [fail(f"{verb}: adapters[{name!r}][{part!r}] has dim {dim} over {axes}, and its base that dim over "
                        f"{base_axes or None}", factor=spec, base=where.base,
                        fix=f"the specs of {verb.replace('apply', 'specs')}, or P()")
                   for dim, axes, base_axes in where.misplaced]  # fmt: skip
        for one in where.slices:
            slices.setdefault(one, []).append((name, part))
        if where.varied:
            varied.setdefault(where.varied, []).append((name, part))
    if errors:
        return out, errors
    for (dim, axes, lengths), which in slices.items():
        _replace(out, which, pslice([out[name][part] for name, part in which], axes, dim, lengths=lengths))
    for axes, which in varied.items():
        _replace(out, which, pvary([out[name][part] for name, part in which], axes))
    return out, []


def _replace(out: dict[str, dict[str, Tensor]], which: Sequence[tuple[str, str]], new: Sequence[Tensor]) -> None:
    for (name, part), x in zip(which, new, strict=True):
        out[name][part] = x
