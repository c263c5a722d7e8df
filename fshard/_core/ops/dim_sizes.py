"""The dims that a collective gathers or splits, their global sizes, and this rank's range of a split dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fshard._core.protocol import index_of, size_of
from fshard._core.region import UnevenSize, checker, known_axes, live_axes, region, unchecked, user_line
from fshard._core.torch import unwrapped, without_functorch
from fshard.errors import fail, number_of, raise_all
from fshard.spec import Axis, P, Size, as_size, is_uneven, names_of, part_lengths, part_range, spec_errors, total

from .linear_maps import Layout


def dim_of(verb: str, x: Tensor, dim: int) -> int:
    """Return the dim counted from the front. Raises ShardingError, naming `verb`, if the tensor has no such dim."""
    if not -x.ndim <= dim < x.ndim:
        raise fail(f"{verb}: a {x.ndim}-d tensor has no dim {dim}", shape=list(x.shape))
    return dim % x.ndim


def split_layout(
    verb: str, axes: tuple[str, ...], xs: Sequence[Tensor], dim: int, chosen: Size | None = None
) -> Layout:
    """Return the (dim, size) that is split, of each tensor. Mark the region uneven if pieces differ in size.

    Raises ShardingError for `chosen` lengths that do not sum to the dim.
    """
    current = region(verb)
    for x in xs:
        if chosen is not None and total(chosen) != x.shape[dim]:
            raise fail(f"{verb}: the lengths sum to {total(chosen)}, and dim {dim % x.ndim} has {x.shape[dim]}",
                       *user_line(), fix=f"lengths that sum to {x.shape[dim]}")  # fmt: skip
    layout = tuple([(dim % x.ndim, x.shape[dim] if chosen is None else chosen) for x in xs])
    if not current.comm.has_values:
        current.split_sizes.setdefault(axes, set()).update(size for _, size in layout)
    if uneven := [(d, size) for d, size in layout if is_uneven(size, size_of(axes, current.sizes))]:
        d, size = uneven[0]
        for a in axes:
            if a not in current.uneven:
                current.uneven[a] = UnevenSize(f"dim {d} of {verb}", size, axes)
        if (types := checker()) is not None:
            types.record_split(verb, layout, axes)
    return layout


def checked_size(verb: str, size: int | Sequence[int] | None, axis: Axis, *, word: str = "size=") -> Size | None:
    """Return an argument of the caller. Lengths are for the first axis: over an axis of one rank, their sum.

    Raises ShardingError unless there is a length for each rank.
    """
    if size is None or isinstance(size, int) or not names_of(axis):
        return size if size is None or isinstance(size, int) else sum(size)
    current = region(verb)
    first = known_axes(verb, current, axis)[0]
    n = current.sizes[first]
    if n not in (1, len(size)):
        raise fail(f"{verb}: {word} has {number_of(len(size), 'length')}, and axis {first!r} has {n} ranks",
                   *user_line(), fix="a length for each of its ranks", lengths=list(size))  # fmt: skip
    return sum(size) if n == 1 else as_size(size, (n,))


def gather_layout(
    verb: str, axes: tuple[str, ...], xs: Sequence[Tensor], dims: Sequence[int],
    sizes: Sequence[Size | None],
) -> Layout:  # fmt: skip
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
            raise fail(f"{verb}: the part of rank {me} has the wrong size for a dim of global size {total(size)}",
                       f"{total(size)} over {axes} splits into {part_lengths(size, ns)}; rank {me} has {n}",
                       *user_line(), fix="pass the global size of the gathered dim")  # fmt: skip
    return tuple(zip(dims, known, strict=True))


def _exchange_sizes(verb: str, axes: tuple[str, ...], local: Sequence[int], word: str) -> list[Size]:
    """Return the sizes of dims from the lengths of all ranks' parts. `word` is the argument that states the sizes."""
    current = region(verb)
    comm = current.comm
    if comm.static_sizes:
        program = "a compiled program" if comm.has_values else "an abstract mesh"
        cause = next(current.uneven[a] for a in axes if a in current.uneven)
        size, n, over = cause.size, size_of(cause.axes, comm.sizes), " and ".join([f"'{a}'" for a in cause.axes])
        parts = " and ".join(dict.fromkeys([f"{n}" for n in local]))
        if isinstance(size, tuple):
            why, other = f"in parts of {list(size)}", "leave out lengths= in its spec"
        else:
            why = f"{size} % {n} = {size % n}"
            other = f"make {cause.name} a multiple of {n}, such as {size - size % -n}"
        raise fail(f"{verb}: sizes that the axis does not divide must be known to {program}",
                   f"{cause.name} is {total(size)}, split over the {n} ranks of {over}: {why}",
                   f"so where this rank has {parts}, another may have another size", *user_line(),
                   fix=f"pass {word}; or {other}")  # fmt: skip
    # Tensors made inside a transform of torch.func would be wrapped, and could not be sent.
    with unchecked(), without_functorch():
        gathered = comm.all_gather(torch.tensor(local, dtype=torch.int64, device=current.device), axes)
        ranks = [current.sizes[a] for a in axes]
        return [as_size(column, ranks) for column in gathered.t().tolist()]


def global_size(verb: str, n: int, axis: Axis, *, word: str = "size=") -> int:
    """Return the global size of a dim that `axis` splits evenly; this rank has `n` entries of it. See `known_sizes`."""
    (size,) = known_sizes(verb, [n], axis, word=word)
    if isinstance(size, tuple):
        raise fail(f"{verb}: the ranks of {axis!r} have {list(size)} entries of a dim", *user_line(),
                   fix=f"equal parts: {verb} does not take chosen lengths")  # fmt: skip
    return size


def known_sizes(verb: str, ns: Sequence[int], axis: Axis, *, word: str = "size=") -> list[Size]:
    """Return the sizes of dims that `axis` splits; this rank has `ns` entries of them.

    If no argument of the region is uneven over the axis, they are products. Otherwise the ranks exchange their sizes,
    once. A compiled program cannot: the error names `word` as the argument to pass. Nor can an abstract mesh, where it
    is the size of an argument's dim if only one fits.
    """
    current = region(verb)
    axes = live_axes(current.comm, known_axes(verb, current, axis))
    if not any(a in current.uneven for a in axes):
        return [n * size_of(axes, current.sizes) for n in ns]
    described = [described_size(n, axes) for n in ns]
    if None not in described:
        return [size for size in described if size is not None]
    return _exchange_sizes(verb, axes, ns, word)


def described_size(n: int, axis: Axis) -> Size | None:
    """Return, on an abstract mesh, the one size of arguments' dims whose part here has `n` entries; None if unsure."""
    current = region()
    if current.comm.has_values:
        return None
    axes = live_axes(current.comm, names_of(axis))
    fitting = [size for size in current.split_sizes.get(axes, ()) if _length_here(size, axes) == n]
    return fitting[0] if len(fitting) == 1 else None


def _length_here(size: Size, axes: Sequence[str]) -> int:
    """Return the length of this rank's part of a dim."""
    current = region()
    return part_range(size, [current.sizes[a] for a in axes], [current.coords[a] for a in axes])[1]


def global_shape(verb: str, x: Tensor, spec: P, *, word: str) -> tuple[int, ...]:
    """Return the shape whose part by `spec` is `x` on this rank; sizes are found as by `global_size`."""
    current = region(verb)
    raise_all(spec_errors(verb, tuple(x.shape), spec, current.sizes, local=True))
    described = x.shape if current.comm.has_values else getattr(unwrapped(x), "global_sizes", x.shape)
    if len(described) != x.ndim:  # the examples of a vmap
        described = x.shape
    shape = []
    for n, known, axes in zip(x.shape, spec.sizes(described, current.sizes), spec.parts(x.ndim), strict=True):
        fits = known != n and _length_here(known, axes) == n
        size = known if fits or isinstance(known, tuple) else total(known_sizes(verb, [n], axes, word=word)[0])
        if (length := _length_here(size, axes)) != n:
            lengths = part_lengths(size, [current.sizes[a] for a in axes])
            raise fail(f"{verb}: x is not this rank's part of an array with spec {spec}",
                       f"{total(size)} over {axes} splits into {lengths}; this rank has {n}, and its part is {length}",
                       *user_line(),
                       fix="parts of ceil(n / ranks), the last ones shorter; for others, lengths= in the spec",
                       shape=list(x.shape))  # fmt: skip
        shape.append(total(size))
    return tuple(shape)


def argument_shape(x: Tensor, spec: P) -> tuple[int, ...] | None:
    """Return the global shape of an argument that was placed by this spec: of one donated or over an uneven axis."""
    if torch.compiler.is_dynamo_compiling():
        return None
    shape, placed = getattr(unwrapped(x), "placed", ((), None))
    if placed is None or len(shape) != x.ndim or placed.parts(x.ndim) != spec.parts(x.ndim):
        return None
    return shape if placed.lengths == spec.lengths else None


def argument_specs() -> Callable[[Tensor], P | None]:
    """Return a function that returns the spec of an argument of the call, also a donated one; else None."""
    kept = {id(x): spec for x, spec in zip(*region().arguments, strict=True)}
    return lambda x: kept.get(id(x)) or getattr(x, "placed", (None, None))[1]


def keep_placed(xs: Sequence[Tensor], like: Sequence[Tensor]) -> None:
    """Let `argument_shape` know copies of arguments."""
    for x, y in zip(xs, like, strict=True):
        if hasattr(y, "placed"):
            x.placed = y.placed  # type: ignore[attr-defined]


def own_range(verb: str, size: Size, axis: Axis) -> tuple[int, int]:
    """Return (start, length) of this rank's part of a dim of this global size: all of it without an axis."""
    if not names_of(axis):
        return 0, total(size)
    current = region(verb)
    names = known_axes(verb, current, axis)
    if current.checker is not None:
        current.checker.record_shape(verb, [total(size)], names)
    return part_range(size, [current.sizes[a] for a in names], [current.coords[a] for a in names])


def local_range(
    verb: str, n: int, axis: Axis, size: Size | None, *, word: str = "the vocabulary"
) -> tuple[int, int]:  # fmt: skip
    """Return (start, size): the offset of this rank's `n` entries, and the number of entries over `axis`.

    `size` may be the lengths of all parts. Raises ShardingError if this rank's part of `size` is not `n`.
    """
    names = names_of(axis)
    known = checked_size(verb, size, axis)
    if known is None:
        (known,) = known_sizes(verb, [n], axis) if names else [n]
    start, length = own_range(verb, known, axis)
    if length != n:
        sizes = [region(verb).sizes[a] for a in names]
        fix = "pass size=, of all ranks, or the lengths of their parts"
        if n == total(known):
            fix = f"leave out axis={axis!r}: this rank has all of {word}"
        raise fail(f"{verb}: this rank holds {n} of {word}, its part is {length}",
                   f"{total(known)} over {axis!r} splits into {part_lengths(known, sizes)}", fix=fix)  # fmt: skip
    return start, total(known)
