"""The draws of one call of a module by a key, on each rank its part of them where a mesh axis splits the batch."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard import tree
from fshard._core.microbatch import Microbatch, microbatch
from fshard._core.ops import global_size
from fshard._core.region import UncheckedError, axes_of_own_values, checker, in_region, known_axes, live_axes, region
from fshard._core.torch import is_batched
from fshard.errors import fail
from fshard.spec import Axis, describe, part_lengths, part_range

from .draws import Batch, Draws, Expected, Features, Probe, Read
from .probe import fake_like, prime_for, probe

RunOnFakes = Callable[[Any, Any], None]  # (arguments, keyword arguments): runs forward on fake leaves


class BatchRows(NamedTuple):
    """Examples of this rank in the arguments of a call: their number, and their dim by position among the tensors."""

    number: int
    dims: Mapping[int, int]


@dataclass(frozen=True)
class SplitBatch:
    """The axis that splits the examples of a batch, their dim, and the probes of calls: see `Apply.draws_over`."""

    axis: Axis
    dim: int
    with_probe: bool
    is_stated: bool = True
    probed: dict[str, tuple[BatchRows, list[Probe]]] = field(default_factory=dict)  # by the arguments, without values


def draws_of(
    name: str, key: Tensor, split: SplitBatch, leaves: Sequence[Tensor], args: Any, kwargs: Any, run: RunOnFakes,
    split_features: Mapping[tuple[str, ...], Collection[int]],
) -> Draws:  # fmt: skip
    """Return the mode that makes the random numbers of a call of the function `name`, whose module has `leaves`.

    Replaced modules may leave features split over `split_features`, whose global numbers they are.
    """
    if torch.compiler.is_dynamo_compiling():
        raise fail(f"{name}: draws by a key cannot be compiled", fix="call it outside torch.compile")
    if is_batched(key):
        raise fail(f"{name}: torch.vmap over keys", "draws of a module are made below torch.vmap",
                   fix="a loop over the keys")  # fmt: skip
    part, here = microbatch(), region() if in_region() else None
    bound = here.sizes if here else {}
    live = live_axes(here.comm, tuple(bound)) if here else ()
    if not live and part is None:
        return Draws(name, key)
    if live and not split.is_stated:
        raise fail(f"{name}: with a key a region must say which axis splits the examples of a batch",
                   fix=f'apply = apply.draws_over("{live[0]}"); apply.draws_over(None) if each rank has all of them'
                   )  # fmt: skip
    named = known_axes(f"{name}.draws_over", here, split.axis) if here and bound else ()
    axes = live_axes(here.comm, named) if here else ()
    features = [Features(over, tuple(here.sizes[a] for a in over), tuple(here.coords[a] for a in over),
                         frozenset(numbers))
                for over, numbers in split_features.items()
                if here and split.with_probe and live_axes(here.comm, over)]  # fmt: skip
    if part is not None:
        rows_of = part.rows if split.is_stated else tuple((n, ()) for n, _ in part.rows)
        part = replace(part, rows=rows_of, flattened=True)
    rows = None if part is None or axes else _rows(name, part, named, bound, split.dim, args, kwargs)
    if not axes and not features and rows is None:
        return Draws(name, key)
    count, expected = _probed(name, key, split, axes, rows, leaves, args, kwargs, run)
    sizes, coords = ([values[a] for a in axes] for values in (bound, here.coords if here else {}))
    exact = axes and region().comm.has_values  # without values a draw is only a shape
    total = global_size(f"{name}.draws_over", count, axes) if exact else count * math.prod(sizes)
    start, mine = part_range(total, sizes, coords)
    if mine != count:
        raise fail(f"{name}: this rank has {count} examples, and its part of {total} over {axes} is {mine}",
                   f"{total} splits into {part_lengths(total, sizes)}",
                   fix="pass the batch by a spec that names the axis")  # fmt: skip
    if part is not None and (rows or (axes and part.dim_of_rows(name, [total], [mine], [named], bound) == 0)):
        start, total = part.range_of(start, mine).start, total * part.steps
    batch = Batch(axes, start, mine, total, split.dim)
    return Draws(name, key, batch, expected, features)


def _probed(
    name: str, key: Tensor, split: SplitBatch, axes: tuple[str, ...], rows: BatchRows | None,
    leaves: Sequence[Tensor], args: Any, kwargs: Any, run: RunOnFakes,
) -> tuple[int, Expected | None]:  # fmt: skip
    """Return the number of examples, and the draws that calls with such arguments make; None without a probe."""
    values, structure = tree.flatten((args, kwargs))
    xs = [x for x in values if isinstance(x, Tensor)]
    rest = [type(x) if " at 0x" in repr(x) else x for x in values if not isinstance(x, Tensor)]
    signature = repr((axes, rows, structure, [(x.dtype, x.shape) for x in xs], rest))
    known = split.probed.get(signature)
    if known is None or checker() is not None:
        here = rows or _examples(name, axes, split.dim, args, kwargs)
        if known is not None and known[0].dims != here.dims:
            raise fail(f"{name}.draws_over: in an earlier call, of the same shapes, other dims had the examples",
                       fix="draws_over once for each of the two functions that call it")  # fmt: skip
        known = split.probed.setdefault(signature, (here, []))
    (count, dims), probes = known

    def run_with(prime: int) -> None:
        sizes = [[prime * (n // max(1, count) or 1) if dims.get(i) == d else n
                  for d, n in enumerate(x.shape)] for i, x in enumerate(xs)]  # fmt: skip
        fakes = iter([fake_like(x, size) for x, size in zip(xs, sizes, strict=True)])
        run(*tree.unflatten(structure, [next(fakes) if isinstance(x, Tensor) else x for x in values]))

    def expected(read: Sequence[Read], number: int) -> Probe:
        known = [known for known in probes if [r for r in known.read if r[0] <= number] == read]
        if not known:
            prime = prime_for(n for x in (*xs, *leaves) for n in x.shape)
            known = [probe(name, key, prime, functools.partial(run_with, prime))]
            probes.append(known[0])
        return known[0]

    if split.with_probe and not probes:
        expected([], 0)
    return count, expected if split.with_probe else None


def _examples(name: str, axes: tuple[str, ...], dim: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchRows:
    if not axes:
        return BatchRows(1, {})
    types, name = checker(), f"{name}: draws_over({axes[0] if len(axes) == 1 else axes!r})"
    if types is None:
        raise UncheckedError(str(fail(f"{name}: the first call for arguments of these shapes must be a checked one",
                                      "its types show which arguments have a part of the batch",
                                      fix='shard_map(..., check="first")')))  # fmt: skip
    dims: dict[int, int] = {}
    named = [(path, x) for path, x in tree.leaves_with_path((args, kwargs)) if isinstance(x, Tensor)]
    for i, (path, x) in enumerate(named):
        if not axes_of_own_values(x) & set(axes):
            continue
        spec = types.info(x).spec
        parts = dict(enumerate(() if spec is None else spec.parts(x.ndim)))
        d = next((d for d, over in parts.items() if set(over) & set(axes)), dim)
        if not -x.ndim <= d < x.ndim or live_axes(region().comm, tuple(parts.get(d, axes))) != axes:
            argument = tree.show("args" if path[0] == 0 else "kwargs", path[1:])
            raise fail(f"{name}: {argument} has no dim that {' and '.join(map(repr, axes))} alone split",
                       argument=describe(x), **({} if spec is None else {"spec": spec}),
                       fix="name the axes that split its examples, in this order; dim= of an argument that was "
                       "computed in the region")  # fmt: skip
        dims[i] = d % x.ndim
    if not dims:
        raise fail(f"{name}: no argument has a part of the batch: none varies over {' or '.join(map(repr, axes))}",
                   fix="apply.draws_over(None), if each rank has all examples")  # fmt: skip
    count = math.gcd(*(named[i][1].shape[d] for i, d in dims.items()))
    for i, (_, x) in enumerate(named):  # made in the region from nothing
        type_ = types.info(x).type
        if not type_.varying | type_.invariant and x.ndim > dim >= -x.ndim and x.shape[dim] == count:
            dims[i] = dim % x.ndim
    return BatchRows(count, dims)


def _rows(
    name: str, part: Microbatch, axes: tuple[str, ...], sizes: Mapping[str, int], dim: int, *arguments: Any
) -> BatchRows | None:
    """Return the examples that are the rows of a microbatch, where no axis splits them; None if no argument has them.

    They are found by their number: where no dim has as many entries, in dims that have several for each row.
    """
    xs = [x for x in tree.leaves(arguments) if isinstance(x, Tensor)]
    lengths = {i: x.shape[dim] for i, x in enumerate(xs) if -x.ndim <= dim < x.ndim}
    found = {i for i, n in lengths.items() if part.dim_of_rows(name, [n], [n], [axes], sizes) == 0}
    exact = {i for i in found if lengths[i] in dict(part.rows)}
    dims = {i: dim % xs[i].ndim for i in sorted(exact or found)}
    return BatchRows(math.gcd(*(lengths[i] for i in dims)), dims) if dims else None
