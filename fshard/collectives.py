"""The collectives: functions that move tensors between ranks.

Each takes a tensor or a tree (one transfer per dtype for a tree) and a mesh axis, a tuple of axes (major first), or
`None`, which does nothing. Shapes are local. Types, per axis: a value *varies* (V) over an axis or is *invariant*
(I): the same on each of its ranks, one logical computation. Legend: [n@axis] is a dim split over the axis.

A Python number must be the same on every rank. `psum`, `pmean`, `pmax`, `pmin` and `pvary` of one are numbers, without
a transfer (so `psum(1, axis)` counts the ranks); the others take no numbers.

Each but `pmax` and `pmin` (`_core.ops.minmax`) is a linear map of `_core.ops.linear_maps`, whose transpose is its
backward pass, applied to the leaves of a tree. To add one: write the map and its transpose there, its function here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from . import tree
from ._core.ops import (
    AllToAll,
    Gather,
    GatherInvariant,
    Map,
    Permute,
    Scatter,
    Slice,
    Sum,
    Vary,
    apply_map,
    check_counts,
    check_types,
    checked_size,
    exchange_padded,
    exchange_rows,
    gather_layout,
    known_sizes,
    minmax,
    row_counts,
    split_layout,
    tally,
)
from ._core.ops import global_shape as checked_shape
from ._core.ops import local_range as checked_range
from ._core.protocol import Comm, index_of, size_of
from ._core.region import has_values, known_axes, live_axes, region, user_line
from ._core.transfers import refuse_tracing
from .errors import ShardingError, checked, fail, must_be, number_of, raise_all
from .spec import Axis, P, Size, part_lengths, total

T = TypeVar("T")


@checked
def psum(x: T, axis: Axis) -> T:
    """Sum over the ranks of a mesh axis, giving every rank the total.

        [B, D]{V} -> [B, D]{I}     transpose: pvary     cost: 2(n-1)/n bytes

    >>> psum(torch.ones(3) * axis_index("model"), "model")      # model=4
    tensor([6., 6., 6.])
    >>> psum(1, ("data", "model"))                              # data=2: the number of ranks
    8

    Raises ShardingError for bools, whose sum would be a logical or: `psum(x.int(), axis)` counts them, `pmin(x, axis)`
    is true where all ranks are, `pmax(x, axis)` where any is.
    """
    return _on_leaves("psum", x, axis, lambda comm, axes, xs: Sum(comm, axes), of_number=lambda number, n: number * n)


@checked
def pmean(x: T, axis: Axis) -> T:
    """Average over the ranks of a mesh axis.

        [B, D]{V} -> [B, D]{I}     transpose: pvary / n     cost: 2(n-1)/n bytes

    A mean of means is the mean only of equal counts: for unequal ones, psum the sums and the counts.

    >>> pmean(axis_index("model").float(), "model")                  # model=4
    tensor(1.5000)

    Raises ShardingError for integers and bools, whose mean is not of their dtype.
    """
    return _on_leaves("pmean", x, axis, lambda comm, axes, xs: Sum(comm, axes, size_of(axes, comm.sizes)),
                      of_number=lambda number, n: number / 1)  # fmt: skip


@checked
def pvary(x: T, axis: Axis) -> T:
    """Let each rank use an invariant value differently: its gradients are summed over the axis.

        [B, D]{I} -> [B, D]{V}     transpose: psum     cost: none forward, 2(n-1)/n bytes backward

    >>> loss = lambda w: pmean(pvary(w, "data") * axis_index("data"), "data")      # data=2: the mean of 0 and w
    >>> grad(loss)(torch.tensor(3.0))
    tensor(0.5000)
    """
    return _on_leaves("pvary", x, axis, lambda comm, axes, xs: Vary(comm, axes), of_number=lambda number, n: number)


@checked
def pmax(x: T, axis: Axis, *, grad: Literal["tied"] | None = None) -> T:
    """Return the elementwise maximum over the ranks of a mesh axis.

        [B, D]{V} -> [B, D]{I}     transpose: raises; with grad="tied" split evenly among the ranks with the maximum

    NaN on any rank gives NaN. Of bools, `pmax` is whether any rank has True, and `pmin` whether all have.

    >>> pmax(axis_index("model"), "model")                           # model=4
    tensor(3)
    """
    return _minmax("max", x, axis, grad)


@checked
def pmin(x: T, axis: Axis, *, grad: Literal["tied"] | None = None) -> T:
    """Return the elementwise minimum over the ranks of a mesh axis; see `pmax`.

    >>> pmin(axis_index("model") + 5, "model")
    tensor(5)
    """
    return _minmax("min", x, axis, grad)


@checked
def all_gather(
    x: T, axis: Axis, dim: int = 0, *, size: Size | None = None,
    to: Literal["varying", "invariant"] = "varying",
) -> T:  # fmt: skip
    """Concatenate the ranks' parts along a dim.

        [B@axis, D]{V} -> [B, D]{V}                     transpose: psum_scatter
        [B@axis, D]{V} -> [B, D]{I}   to="invariant"    transpose: pslice      cost: (n-1)/n of the result

    `size` is the global size of the dim, or the lengths over the first axis as in a spec, needed only if parts differ
    (without `size`, and with arguments whose parts differ, the ranks first exchange their sizes). Use "invariant" if
    the result is one logical value, "varying" if each rank uses it differently.

    >>> all_gather(axis_index("model")[None], "model")               # model=4
    tensor([0, 1, 2, 3])
    """
    known = checked_size("all_gather", size, axis)

    def gather(comm: Comm, axes: tuple[str, ...], xs: Sequence[Tensor]) -> Map:
        layout = gather_layout("all_gather", axes, xs, [dim % t.ndim for t in xs], [known] * len(xs))
        return (GatherInvariant if to == "invariant" else Gather)(comm, axes, layout)

    return _on_leaves("all_gather", x, axis, gather, dim=dim)


@checked
def psum_scatter(x: T, axis: Axis, dim: int = 0, *, lengths: Sequence[int] | None = None) -> T:
    """Sum over the ranks, each keeping its part of a dim: an equal part, or as many entries as `lengths` has for it.

        [B, D]{V} -> [B@axis, D]{V}     transpose: all_gather     cost: (n-1)/n bytes

    >>> psum_scatter(torch.ones(8) * axis_index("model"), "model")   # model=4: 0 + 1 + 2 + 3
    tensor([6., 6.])

    Raises ShardingError for bools, as `psum`, and for lengths that do not sum to the dim.
    """
    chosen = checked_size("psum_scatter", lengths, axis, word="lengths=")

    def scatter(comm: Comm, axes: tuple[str, ...], xs: Sequence[Tensor]) -> Map:
        return Scatter(comm, axes, split_layout("psum_scatter", axes, xs, dim, chosen))

    return _on_leaves("psum_scatter", x, axis, scatter, dim=dim)


@checked
def pslice(x: T, axis: Axis, dim: int = 0, *, lengths: Sequence[int] | None = None) -> T:
    """Keep this rank's part of a dim of an invariant value: an equal part, or as many entries as `lengths` has for it.

        [B, D]{I} -> [B@axis, D]{V}     transpose: all_gather(to="invariant")     cost: none forward

    >>> pslice(torch.arange(8), "model")                             # model=4: the first rank
    tensor([0, 1])
    """
    chosen = checked_size("pslice", lengths, axis, word="lengths=")

    def keep(comm: Comm, axes: tuple[str, ...], xs: Sequence[Tensor]) -> Map:
        return Slice(comm, axes, split_layout("pslice", axes, xs, dim, chosen))

    return _on_leaves("pslice", x, axis, keep, dim=dim)


@checked
def all_to_all(
    x: T, axis: Axis, *, split: int, concat: int, size: Size | None = None
) -> T:  # fmt: skip
    """Split one dim over the ranks and gather another: move the sharding from dim to dim.

        [B, D@axis]{V} -> [B@axis, D]{V}   split=0, concat=1     transpose: split and concat swapped
        cost: (n-1)/n bytes

    `size` is the global size of the gathered dim, or the lengths as in a spec, needed only if parts differ.

    >>> all_to_all(torch.ones(4, 1), "model", split=0, concat=1).shape      # model=4
    torch.Size([1, 4])

    Raises ShardingError if `split` and `concat` are one dim, and where ranks have sizes that `size` does not explain.
    """
    known = checked_size("all_to_all", size, axis)

    def exchange(comm: Comm, axes: tuple[str, ...], xs: Sequence[Tensor]) -> Map:
        if any(split % t.ndim == concat % t.ndim for t in xs):
            raise fail(f"all_to_all: split and concat are both dim {split}", fix="name two different dims")
        gathered = gather_layout("all_to_all", axes, xs, [concat % t.ndim for t in xs], [known] * len(xs))
        return AllToAll(comm, axes, split_layout("all_to_all", axes, xs, split), gathered)

    return _on_leaves("all_to_all", x, axis, exchange, split=split, concat=concat)


@checked
def ppermute(x: T, axis: Axis, perm: Sequence[tuple[int, int]]) -> T:
    """Send along (source, target) pairs of axis positions; a rank that receives nothing has zeros.

        [B, D]{V} -> [B, D]{V}     transpose: the inverse pairs     cost: bytes

    >>> ppermute(x, "stage", [(i, i + 1) for i in range(axis_size("stage") - 1)])     # shift by one

    Raises ShardingError for positions that are not on the axis, or named twice.
    """
    current = region("ppermute")
    names = known_axes("ppermute", current, axis)
    n = size_of(names, current.sizes)
    for role, positions in (("source", [source for source, _ in perm]), ("target", [target for _, target in perm])):
        if len(set(positions)) < len(positions) or any(not 0 <= i < n for i in positions):
            raise fail(f"ppermute: {role}s {positions} are not distinct positions of axis {axis!r}",
                       f"positions are 0 to {n - 1}", fix="name every source and every target once")  # fmt: skip
    pairs = tuple((int(source), int(target)) for source, target in perm)
    if names and n == 1 and not pairs:
        x = tree.map(lambda t: torch.zeros_like(t) if isinstance(t, Tensor) else t, x)
    return _on_leaves("ppermute", x, axis, lambda comm, axes, xs: Permute(comm, axes, pairs))


@checked
def all_to_all_rows(
    x: T, axis: Axis, send: Tensor | Sequence[int], receive: Tensor | Sequence[int] | None = None, *,
    most: int | None = None,
) -> T:  # fmt: skip
    """Send the first `send[0]` rows to rank 0, the next `send[1]` to rank 1; receive rows in the order of the ranks.

        [N, ..]{V} -> [M, ..]{V}     transpose: send and receive swapped     cost: bytes of the rows for other ranks

    N is the sum of `send` and M the sum of `receive`, [n] numbers over the axis. They are values: read by the host, and
    any may be 0. Without `receive` the ranks exchange their counts first. On an abstract mesh counts that are tensors
    are balanced.

    With `most` no value is read, as a compiled program needs: buffers have `most` rows for each rank, x may have more
    rows than the sum of `send`, and the result has n * `most` rows: the received ones, then zeros.

    >>> all_to_all_rows(torch.arange(5.0), "model", [0, 1, 3, 1]).shape           # model=4: 4 ranks send rank 2 3 rows
    torch.Size([0])

    Raises ShardingError, on both ranks, where one sends another number of rows than the other one expects.
    """
    if axis is None or axis == ():
        return x
    current = region("all_to_all_rows")
    axes = live_axes(current.comm, known_axes("all_to_all_rows", current, axis))
    tensors = [t for t in tree.leaves(x) if isinstance(t, Tensor) and t.ndim]
    if not tensors or len(tensors) < len(tree.leaves(x)):
        raise_all(_leaf_errors("all_to_all_rows", x, False, {"dim": 0}))
        return x
    check_types("all_to_all_rows", send, tensors)
    if most is not None:
        padded: T = tree.map(lambda t: exchange_padded(axes, t, send, receive, most), x)
        return padded
    counts = row_counts("all_to_all_rows", axes, send, receive, len(tensors[0]))
    check_counts("all_to_all_rows", counts, tensors)
    return _on_leaves("all_to_all_rows", x, axis, lambda comm, axes, xs: exchange_rows(axes, counts, xs), dim=0)


@checked
def take_rows(x: T, axis: Axis, rows: Tensor) -> T:
    """Return the rows with these global indices, of a tensor whose rows are split over an axis.

        [N@axis, ..]{V} -> [M, ..]{V}, rows [M]{V}     transpose: gradients are summed where the rows came from
        cost: bytes of the rows of other ranks

    Each rank may ask for any number of rows, in any order, and for one row several times.

    >>> take_rows(axis_index("model")[None], "model", torch.tensor([3, 0]))       # model=4
    tensor([3, 0])

    Raises ShardingError for indices outside of the global size.
    """
    sizes = {len(t) for t in tree.leaves(x) if isinstance(t, Tensor) and t.ndim}
    if len(sizes) != 1 or rows.ndim != 1:
        raise_all(_leaf_errors("take_rows", x, False, {"dim": 0}))
        raise fail(f"take_rows: rows must be 1-d, and x have one number of rows: {sorted(sizes)}", *user_line(),
                   fix="take rows of tensors of one length together", rows=list(rows.shape))  # fmt: skip
    (length,) = sizes
    current = region("take_rows")
    axes = live_axes(current.comm, known_axes("take_rows", current, axis))
    (known,) = known_sizes("take_rows", [length], axis, word="x in equal parts")
    size = total(known)
    if has_values() and len(rows) and not 0 <= (low := int(rows.min())) <= (high := int(rows.max())) < size:
        raise fail(f"take_rows: indices are {low} to {high}, and x has {number_of(size, 'row')}", *user_line(),
                   fix=f"global indices from 0 to {size - 1}")  # fmt: skip
    if not axes:
        taken: T = tree.map(lambda t: t[rows], x)
        return taken
    parts = part_lengths(known, [current.sizes[a] for a in axes])
    owner = torch.searchsorted(torch.tensor(parts, device=rows.device).cumsum(0), rows, right=True)
    order = owner.argsort(stable=True)
    counts = row_counts("take_rows", axes, tally(owner, len(parts)), None, len(rows))
    (asked,) = exchange_rows(axes, counts, [rows[order]])
    first = sum(parts[: index_of(axes, current.sizes, current.coords)])
    place = order.argsort()

    def answer(comm: Comm, axes: tuple[str, ...], xs: Sequence[Tensor]) -> Sequence[Tensor]:
        return [y[place] for y in exchange_rows(axes, counts.transpose, [t[asked - first] for t in xs])]

    return _on_leaves("take_rows", x, axis, answer, dim=0)


@checked
def axis_index(axis: str | tuple[str, ...]) -> Tensor:
    """Return this rank's position along an axis, or over a tuple of axes flattened: a 0-d int64 tensor, {V}.

    >>> all_gather(axis_index("data")[None], "data")                 # data=2
    tensor([0, 1])
    """
    current = region("axis_index")
    names = known_axes("axis_index", current, axis)
    out = torch.tensor(index_of(names, current.sizes, current.coords), dtype=torch.int64, device=current.device)
    if current.checker is not None:
        current.checker.set_integer_type(out, "axis_index", varies=names)
    return out


@checked
def axis_size(axis: Axis) -> int:
    """Return the number of ranks along an axis, or a tuple of axes; 1 for `None`.

    >>> axis_size("model"), axis_size(("data", "model")), axis_size(None)
    (4, 8, 1)
    """
    if axis is None:
        return 1
    current = region("axis_size")
    return size_of(known_axes("axis_size", current, axis), current.sizes)


@checked
def axis_position(axis: Axis) -> int:
    """Return this rank's position along an axis, or over a tuple of axes flattened, as a number; 0 for `None`.

    `axis_index` is the same as a tensor. On a number the function may branch, as a pipeline does, whose first stage
    has the embedding. `fs.check` and `fs.plan` then run each position of the axis.

    >>> axis_position("model"), axis_position(("data", "model")), axis_position(None)       # the first rank
    (0, 0, 0)

    Raises ShardingError outside of `shard_map`, and for an axis that the mesh lacks.
    """
    if axis is None:
        return 0
    current = region("axis_position")
    names = known_axes("axis_position", current, axis)
    if not current.comm.has_values:
        current.branches_on.update(live_axes(current.comm, names))
    return index_of(names, current.sizes, current.coords)


@checked
def global_shape(x: Tensor, spec: P) -> tuple[int, ...]:
    """Return the global shape of a local tensor that `spec` splits: the shape that a draw for it takes.

    It is the same on every rank. A product with `axis_size` is not, where the axis does not divide the dim. No transfer
    is needed unless an argument is uneven over an axis of the spec: then the ranks exchange their sizes, which compiled
    programs cannot.

    >>> x = torch.ones(3, 2)                                         # data=2: 3 rows of each rank
    >>> global_shape(x, P("data"))
    (6, 2)
    >>> random.normal(key(0), global_shape(x, P("data")), spec=P("data")).shape
    torch.Size([3, 2])

    Raises ShardingError where the ranks do not have the parts of one array by that spec.
    """
    return checked_shape("global_shape", x, spec, word="the global size as a number")


@checked
def local_range(n: int, axis: Axis, *, size: Size | None = None) -> tuple[int, int]:
    """Return (start, stop): the global indices of this rank's `n` entries of a dim that `axis` splits.

    A custom layer or loss uses it to find its rows, as `nn.embedding` and `nn.cross_entropy` do. `size` is the
    global size, or the lengths as in a spec, needed only where parts differ; without it the ranks exchange their sizes
    if they can differ. Raises ShardingError if this rank's part of `size` is not `n`. For `None` the range is (0, n).

    >>> local_range(3, "model", size=12)      # model=4: the first rank
    (0, 3)
    """
    start, _ = checked_range("local_range", n, axis, size, word="the dim")
    if axis is not None and (current := region("local_range")).checker is not None:
        current.checker.asked.update(known_axes("local_range", current, axis))
    return start, start + n


# --- leaves of a tree ---


def _on_leaves(
    verb: str, x: T, axis: Axis, f: Callable[[Comm, tuple[str, ...], Sequence[Tensor]], Map | Sequence[Tensor]], *,
    of_number: Callable[[Any, int], Any] | None = None, **dims: int,
) -> T:  # fmt: skip
    """Apply the map that `f` returns to the tensors of each dtype together; `f` may return the results instead.

    The map is over the axes of more than one rank; without any, `x` is returned. `of_number(number, ranks)` is applied
    to the leaves that are Python numbers. Every tensor must have all of `dims`.
    """
    if axis is None or axis == ():
        return x
    current = region(verb)
    names = known_axes(verb, current, axis)
    axes = live_axes(current.comm, names)
    out, treedef = tree.flatten(x)
    tensors = [i for i, leaf in enumerate(out) if isinstance(leaf, Tensor)]
    numbers = [i for i, leaf in enumerate(out) if of_number is not None and isinstance(leaf, (int, float, complex))]
    dtypes = {out[i].dtype for i in tensors} if verb in ("psum", "psum_scatter", "pmean") else ()
    if (
        len(tensors) + len(numbers) < len(out)
        or any(_wrong_dtype(verb, dtype) for dtype in dtypes)
        or any(not -out[i].ndim <= d < out[i].ndim for i in tensors for d in dims.values())
    ):
        raise_all(_leaf_errors(verb, x, of_number is not None, dims))
    for i in numbers:
        assert of_number is not None
        if current.checker is not None and verb != "pvary":
            current.checker.record_number(verb, out[i], axes)
        out[i] = of_number(out[i], size_of(names, current.sizes))
    if axes:
        refuse_tracing(verb)
        for group in by_dtype([out[i] for i in tensors]):
            which = [tensors[g] for g in group]
            xs = [out[i] for i in which]
            made = f(current.comm, axes, xs)
            for i, y in zip(which, apply_map(made, xs) if isinstance(made, Map) else made, strict=True):
                out[i] = y
    return tree.unflatten(treedef, out) if axes or numbers else x


def _leaf_errors(verb: str, x: Any, takes_numbers: bool, dims: Mapping[str, int]) -> list[ShardingError]:
    """Return the errors of leaves that a collective does not take, and of tensors that lack one of `dims`."""
    errors = []
    for path, leaf in tree.leaves_with_path(x):
        label = f"{verb}: {tree.show('x', path)}"
        if isinstance(leaf, Tensor):
            errors += [fail(f"{label}: a {leaf.ndim}-d tensor has no {name} {d}", shape=list(leaf.shape))
                       for name, d in dims.items() if not -leaf.ndim <= d < leaf.ndim]  # fmt: skip
            if wrong := _wrong_dtype(verb, leaf.dtype):
                errors.append(fail(f"{label} is {wrong[0]}", *user_line(), fix=wrong[1]))
        elif not (takes_numbers and isinstance(leaf, (int, float, complex))):
            errors.append(must_be(label, "a Tensor or a number" if takes_numbers else "a Tensor", leaf))
    return errors


def _wrong_dtype(verb: str, dtype: torch.dtype) -> tuple[str, str] | None:
    """Return why a sum or mean is not of a dtype, and the fix; None if it is."""
    if verb == "pmean" and not (dtype.is_floating_point or dtype.is_complex):
        return f"{str(dtype).removeprefix('torch.')}, and its mean is not", "cast to a floating dtype first"
    if verb != "pmean" and dtype == torch.bool:
        others = "pmin(x, axis) is whether all ranks have True, pmax(x, axis) whether any has"
        return "bool, and its sum would be a logical or", f"{verb}(x.int(), axis) counts; {others}"
    return None


def by_dtype(leaves: Sequence[Tensor]) -> list[list[int]]:
    """Return the positions of the tensors of each dtype."""
    groups: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(leaves):
        groups.setdefault(x.dtype, []).append(i)
    return list(groups.values())


def _minmax(op: Literal["max", "min"], x: T, axis: Axis, grad: str | None) -> T:
    def extremum(comm: Comm, axes: tuple[str, ...], xs: Sequence[Tensor]) -> Sequence[Tensor]:
        if xs[0].is_complex():
            raise fail(f"p{op}: x is complex, and complex numbers have no order", fix="x.abs()")
        return minmax(comm, axes, op, grad == "tied", xs)

    return _on_leaves(f"p{op}", x, axis, extremum, of_number=lambda number, n: number)
