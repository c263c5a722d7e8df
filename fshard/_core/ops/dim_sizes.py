"""The dims that a collective gathers or splits, their global sizes, and this rank's range of a split dim."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fshard._core.protocol import index_of, size_of
from fshard._core.region import UnevenSize, checker, known_axes, live_axes, region, unchecked, user_line
from fshard._core.torch import unwrapped, without_functorch
from fshard.errors import fail, raise_all
from fshard.spec import Axis, P, names_of, part_lengths, part_range, spec_errors


def dim_of(verb: str, x: Tensor, dim: int) -> int:
    """Return the dim counted from the front. Raises ShardingError, naming `verb`, if the tensor has no such dim."""
    if not -x.ndim <= dim < x.ndim:
        raise fail(f"{verb}: a {x.ndim}-d tensor has no dim {dim}", shape=list(x.shape))
    return dim % x.ndim


def split_layout(verb: str, axes: tuple[str, ...], xs: Sequence[Tensor], dim: int) -> tuple[tuple[int, int], ...]:
    """Return the (dim, size) that is split, of each tensor. Mark the region uneven if pieces differ in size."""
    layout = tuple((d, x.shape[d]) for x in xs for d in [dim_of(verb, x, dim)])
    current = region(verb)
    if not current.comm.has_values:
        current.split_sizes.setdefault(axes, set()).update(size for _, size in layout)
    if uneven := [(d, size) for d, size in layout if size % size_of(axes, current.sizes)]:
        d, size = uneven[0]
        for a in axes:
            if a not in current.uneven:
                current.uneven[a] = UnevenSize(f"dim {d} of {verb}", size, axes)
        if (types := checker()) is not None:
            types.record_split(verb, layout, axes)
    return layout


def gather_layout(
    verb: str, axes: tuple[str, ...], xs: Sequence[Tensor], dims: Sequence[int], sizes: Sequence[int | None]
) -> tuple[tuple[int, int], ...]:
    """Return the (dim, global size) of each gathered dim; exchange sizes that are `None`, if they can differ."""
    current = region(verb)
    ns = [current.sizes[a] for a in axes]
    coords = [current.coords[a] for a in axes]
    local = [x.shape[d] for x, d in zip(xs, dims, strict=True)]
    if any(s is None for s in sizes) and any(a in current.uneven for a in axes):
        collective = verb in ("all_gather", "all_to_all")
        word = "size=, the global size" if collective else "shapes=, the described tree, such as init()"
        sizes = _exchange_sizes(verb, axes, local, word)
    known = [n * size_of(axes, current.sizes) if s is None else s for n, s in zip(local, sizes, strict=True)]
    for n, size in zip(local, known, strict=True):
        if part_range(size, ns, coords)[1] != n:
            me = index_of(axes, current.sizes, current.coords)
            raise fail(f"{verb}: the part of rank {me} has the wrong size for a dim of global size {size}",
                       f"{size} over {axes} splits into {part_lengths(size, ns)}; rank {me} has {n}", *user_line(),
                       fix="pass the global size of the gathered dim")  # fmt: skip
    return tuple(zip(dims, known, strict=True))


def _exchange_sizes(verb: str, axes: tuple[str, ...], local: Sequence[int], word: str) -> list[int]:
    """Return the sums over the ranks of local sizes, by a transfer. `word` is the argument that states them."""
    current = region(verb)
    comm = current.comm
    if comm.static_sizes:
        program = "a compiled program" if comm.has_values else "an abstract mesh"
        cause = next(current.uneven[a] for a in axes if a in current.uneven)
        size, n, over = cause.size, size_of(cause.axes, comm.sizes), " and ".join([f"'{a}'" for a in cause.axes])
        parts = " and ".join(dict.fromkeys([f"{n}" for n in local]))
        raise fail(f"{verb}: sizes that the axis does not divide must be known to {program}",
                   f"{cause.name} is {size}, split over the {n} ranks of {over}: {size} % {n} = {size % n}",
                   f"so where this rank has {parts}, another may have another size", *user_line(),
                   fix=f"pass {word}; or make {cause.name} a multiple of {n}: {size - size % -n}")  # fmt: skip
    # Tensors made inside a transform of torch.func would be wrapped, and could not be sent.
    with unchecked(), without_functorch():
        gathered = comm.all_gather(torch.tensor(local, dtype=torch.int64, device=current.device), axes)
        return [int(n) for n in gathered.sum(0).tolist()]


def global_size(verb: str, n: int, axis: Axis, *, word: str = "size=") -> int:
    """Return the global size of a dim that `axis` splits; this rank has `n` entries of it.

    If no argument of the region is uneven over the axis, that is a product. Otherwise the ranks exchange their sizes.
    A compiled program cannot: the error names `word` as the argument to pass. Nor can an abstract mesh, where it is the
    size of an argument's dim if only one fits.
    """
    return global_sizes(verb, [n], axis, word=word)[0]


def global_sizes(verb: str, ns: Sequence[int], axis: Axis, *, word: str = "size=") -> list[int]:
    """Return the global sizes of several dims, as `global_size`, by at most one exchange."""
    current = region(verb)
    axes = live_axes(current.comm, known_axes(verb, current, axis))
    if not any(a in current.uneven for a in axes):
        return [n * size_of(axes, current.sizes) for n in ns]
    described = [described_size(n, axes) for n in ns]
    if None not in described:
        return [size for size in described if size is not None]
    return _exchange_sizes(verb, axes, ns, word)


def described_size(n: int, axis: Axis) -> int | None:
    """Return, on an abstract mesh, the one size of arguments' dims whose part here has `n` entries; None if unsure."""
    current = region()
    if current.comm.has_values:
        return None
    axes = live_axes(current.comm, names_of(axis))
    fitting = [size for size in current.split_sizes.get(axes, ()) if _length_here(size, axes) == n]
    return fitting[0] if len(fitting) == 1 else None


def _length_here(size: int, axes: Sequence[str]) -> int:
    """Return the length of this rank's part of a dim."""
    current = region()
    return part_range(size, [current.sizes[a] for a in axes], [current.coords[a] for a in axes])[1]


def global_shape(verb: str, x: Tensor, spec: P, *, word: str) -> tuple[int, ...]:
    """Return the shape whose part by `spec` is `x` on this rank; sizes are found as by `global_size`."""
    raise_all(spec_errors(verb, tuple(x.shape), spec, region(verb).sizes))
    described = x.shape if region().comm.has_values else getattr(unwrapped(x), "global_sizes", x.shape)
    if len(described) != x.ndim:  # the examples of a vmap
        described = x.shape
    shape = []
    for n, known, axes in zip(x.shape, described, spec.parts(x.ndim), strict=True):
        fits = known != n and _length_here(known, axes) == n
        shape.append(known if fits else global_size(verb, n, axes, word=word) if axes else n)
        if (length := _length_here(shape[-1], axes)) != n:
            lengths = part_lengths(shape[-1], [region().sizes[a] for a in axes])
            raise fail(f"{verb}: x is not this rank's part of an array with spec {spec}",
                       f"{shape[-1]} over {axes} splits into {lengths}; this rank has {n}, and its part is {length}",
                       *user_line(),
                       fix="parts of ceil(n / ranks), the last ones shorter", shape=list(x.shape))  # fmt: skip
    return tuple(shape)


def argument_shape(x: Tensor, spec: P) -> tuple[int, ...] | None:
    """Return the global shape of an uneven argument of the call that was placed by this spec, else None."""
    if torch.compiler.is_dynamo_compiling():
        return None
    shape, placed = getattr(unwrapped(x), "placed", ((), None))
    same = placed is not None and len(shape) == x.ndim and placed.parts(x.ndim) == spec.parts(x.ndim)
    return shape if same else None


def keep_placed(xs: Sequence[Tensor], like: Sequence[Tensor]) -> None:
    """Let `argument_shape` know copies of arguments."""
    for x, y in zip(xs, like, strict=True):
        if hasattr(y, "placed"):
            x.placed = y.placed  # type: ignore[attr-defined]


def own_range(verb: str, size: int, axis: Axis) -> tuple[int, int]:
    """Return (start, length) of this rank's part of a dim of this global size: all of it without an axis."""
    if not names_of(axis):
        return 0, size
    current = region(verb)
    names = known_axes(verb, current, axis)
    if current.checker is not None:
        current.checker.record_shape(verb, [size], names)
    return part_range(size, [current.sizes[a] for a in names], [current.coords[a] for a in names])


def local_range(verb: str, n: int, axis: Axis, size: int | None, *, word: str = "the vocabulary") -> tuple[int, int]:
    """Return (start, size): the offset of this rank's `n` entries, and the number of entries over `axis`.

    Raises ShardingError if this rank's part of `size` is not `n`.
    """
    names = names_of(axis)
    size = size if size is not None else global_size(verb, n, axis) if names else n
    start, length = own_range(verb, size, axis)
    if length != n:
        sizes = [region(verb).sizes[a] for a in names]
        fix = f"leave out axis={axis!r}: this rank has all of {word}" if n == size else "pass size=, of all ranks"
        raise fail(f"{verb}: this rank holds {n} of {word}, its part is {length}",
                   f"{size} over {axis!r} splits into {part_lengths(size, sizes)}", fix=fix)  # fmt: skip
    return start, size
