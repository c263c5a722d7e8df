"""Check the types of a program without data, on a mesh of any size."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fshard import tree
from fshard._core.call import compare_result_types, is_settled, result_types, run_groups
from fshard._core.display import page
from fshard._core.protocol import index_of
from fshard._core.transfers import Transfer, groups_of, transfer_rows, transfer_table
from fshard._core.typecheck import same_numbers
from fshard.errors import ShardingError, checked, fail, join_limited, number_of, raise_all
from fshard.init import Deferred
from fshard.mesh import Mesh
from fshard.shard_map import DryRun, ShardMapped, dry_run
from fshard.sharded import Sharded, abstract_sharded, array_dtype
from fshard.spec import Size, format_axes, is_uneven, part_lengths, part_range, short_dtype, size, total

_MOST_ROWS = 6
_MOST_NAMED = 8  # ranks in a text
_SAME_ORDER = "every rank must call the same collectives in the same order"
_IN_PAIRS = "both ranks of a pair start the same messages, of the same shapes, in one order"


@dataclass(frozen=True)
class UnevenDim:
    """A dim whose parts differ in size: its axes do not divide it, or its spec has their lengths.

    `name` is the argument as the function writes it, `params['k']`, or a collective that splits the dim, and its line;
    `lengths` are the lengths of the parts, by rank over `axes`.
    """

    name: str
    dim: int
    size: int
    axes: tuple[str, ...]
    lengths: tuple[int, ...]

    def is_empty(self) -> bool:
        """Return whether some rank has an empty part."""
        return 0 in self.lengths


@dataclass(frozen=True, repr=False)
class Checked:
    """Outcome of `check`: the described result, and every collective of one rank with the line that called it.

    `uneven`: the dims whose parts differ in length. `ranks`: the ranks that ran the program. `branches_on`: the axes
    whose positions the program asks for by `fs.axis_position`.
    """

    mesh: dict[str, int]
    result: Any
    transfers: tuple[Transfer, ...]
    uneven: tuple[UnevenDim, ...] = ()
    ranks: tuple[int, ...] = (0,)
    branches_on: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return "\n".join([self._title(), *transfer_rows(self.transfers), *self._uneven_rows()])

    def _repr_html_(self) -> str:
        return page(self._title(), transfer_table(self.transfers), *self._uneven_rows())

    def _title(self) -> str:
        n = math.prod(self.mesh.values())
        count, sent = number_of(len(self.transfers), "transfer"), size(sum(t.sent for t in self.transfers))
        at = f", at each position of {', '.join(self.branches_on)}" if self.branches_on else ""
        each = "rank 0" if at else "each"
        return f"checked on {n} ranks ({format_axes(self.mesh)}){at}: {each} makes {count} and sends {sent}"

    def _uneven_rows(self) -> list[str]:
        """Return a row for each arithmetic: first empty parts, then by the share of the ranks' time that is used."""
        names: dict[tuple[int, tuple[str, ...], tuple[int, ...]], list[str]] = {}
        for d in self.uneven:
            if not is_settled(d.axes, d.lengths, self.branches_on, self.mesh):
                names.setdefault((d.size, d.axes, d.lengths), []).append(f"{d.name} dim {d.dim}")
        order = sorted(names, key=lambda key: (0 not in key[2], key[0] / (len(key[2]) * max(key[2]))))
        texts = [_arithmetic(*key, self.mesh) for key in order[:_MOST_ROWS]]
        width = max(map(len, texts), default=0)
        rows = [f"  {text:<{width}}    {join_limited(names[key], 1)}" for text, key in zip(texts, order, strict=False)]
        if len(order) > _MOST_ROWS:
            rows.append(f"  and {len(order) - _MOST_ROWS} more")
        ran = f"ranks {', '.join(map(str, self.ranks[:-1]))} and {self.ranks[-1]}"
        ran = f"{len(self.ranks)} ranks" if len(self.ranks) > _MOST_NAMED else ran
        head = f"uneven parts (checked as {ran}) are right, but ranks with less to do wait for the others"
        return [head, *rows] if rows else []


@checked
def check(f: ShardMapped, *args: Any) -> Checked:
    """Check over which axes every tensor of `f` varies, forward and backward, without data or devices.

    The first rank of an abstract mesh runs `f` on fake tensors. The mesh has the axes of `f`; for another size, check
    `f.on(make_mesh(kind="abstract", ...))`. Arguments may be `Deferred`, `Sharded` or tensors: only shapes and dtypes
    matter.

    Where axes do not divide a dim, ranks have parts of different sizes, and some may have none. That is right, but
    wastes the time of the ranks that have less to do, so `check` lists these dims. Then ranks with smaller parts run
    `f` too, one axis at a time and all axes together, at most 3 for each set of axes: their collectives, results and
    Python numbers must be the same as on the first rank. `transfers` lists the first rank's. If the parts of a dim of
    the result differ, it has the size of an argument's dim with such parts, else the largest size with such parts. A
    mean of each rank's part is not found, though it is NaN for an empty part.

    A program that asks for `fs.axis_position` may be another one at each position, so each position of these axes runs
    it: 64 stages of a pipeline are 64 runs, each of its stage. The messages that one rank sends must be those that the
    other one expects. Waits are not followed: `fs.plan` with a device finds ranks that wait for each other.

    >>> step = shard_map(lambda x: psum(x.sum(), "data"), mesh=make_mesh(data=4), in_specs=(P("data"),), out_specs=P())
    >>> check(step, fs.init.zeros((8, 3)))
    checked on 4 ranks (data=4): each makes 1 transfer and sends 6 B
          1  all_reduce  data  forward         6 B  ...:1 in <lambda>
    >>> check(step, fs.init.zeros((2, 3)))
    checked on 4 ranks (data=4): each makes 1 transfer and sends 6 B
          1  all_reduce  data  forward         6 B  ...:1 in <lambda>
    uneven parts (checked as ranks 0 and 3) are right, but ranks with less to do wait for the others
      2 over data=4: 2 ranks have 1, 2 have none    x dim 0

    The table has the bytes that a rank sends, by the cost formula of each collective: 2(n-1)/n b for a sum over n ranks
    of an argument of b bytes, (n-1) b for a gather, b less the part that it keeps for the others.

    Raises ShardingError at the line that breaks a rule, as `shard_map(check=...)` does, for a program that needs the
    value of a tensor, and for ranks that disagree on a collective or a result. If the first rank does not raise the
    error, it names the rank and its parts.
    """
    first = dry_run(f, args)
    uneven = _uneven_dims(first, args)

    def run(rank: int) -> DryRun:
        nonlocal uneven
        if rank == 0:
            return first
        with _named_rank(rank, first, uneven):
            found = dry_run(f, args, rank)
        if first.branches_on or found.branches_on:
            uneven = tuple(dict.fromkeys([*uneven, *_uneven_dims(found, args)]))
        return found

    runs, _, over = run_groups(run, lambda _: [(d.axes, d.lengths) for d in uneven], first.mesh.axes)
    _compare_transfers(runs, over)
    if len(runs) > 1:
        same_numbers(first.mesh, {rank: run.checker for rank, run in runs.items() if run.checker is not None})
    result = _joined_result(f._name, runs, uneven)
    return Checked(first.mesh.axes, result, tuple(first.mesh.transfers), uneven, tuple(runs), over)


# --- uneven dims ----------------------------------------------------------------------------------------------


def _uneven_dims(run: DryRun, args: tuple[Any, ...]) -> tuple[UnevenDim, ...]:
    """Return the dims that their axes do not divide, of arguments and of tensors that collectives split."""
    sizes, found = run.mesh.axes, []
    lengths = functools.cache(lambda n, ranks: tuple(part_lengths(n, ranks)))

    def note(name: str, dim: int, n: Size, names: Sequence[str]) -> None:
        axes = tuple(a for a in names if sizes[a] > 1)
        ranks = tuple(sizes[a] for a in axes)
        if is_uneven(n, math.prod(ranks)):
            found.append(UnevenDim(name, dim, total(n), axes, lengths(n, ranks)))

    for name, spec, x in zip(run.plan.names, run.plan.specs, tree.leaves(args), strict=True):
        if isinstance(x, (Tensor, Sharded, Deferred)) or array_dtype(x) is not None:
            for dim, (n, axes) in enumerate(zip(spec.sizes(x.shape, sizes), spec.parts(x.ndim), strict=True)):
                note(name, dim, n, axes)
    for path, x in tree.leaves_with_path(run.joined):
        for dim, n in enumerate(x.spec.sizes(x.shape, sizes) if isinstance(x, Sharded) else ()):
            if isinstance(n, tuple):
                note(tree.show("result", path), dim, n, x.spec.parts(x.ndim)[dim])
    for verb, layout, axes, site in run.checker.uneven_splits if run.checker is not None else ():
        for dim, n in dict.fromkeys(layout):
            note(f"{verb} at {site}" if site else verb, dim, n, axes)
    return tuple(found)


def _arithmetic(n: int, axes: Sequence[str], lengths: Sequence[int], sizes: Mapping[str, int]) -> str:
    """Return `8 over model=16: 8 ranks have 1, 8 have none`."""
    have = [(sum(1 for x in lengths if x == length), length) for length in sorted(set(lengths), reverse=True)]
    words = [f"{count} {'has' if count == 1 else 'have'} {length or 'none'}" for count, length in have]
    words[0] = words[0].replace(" ha", " rank ha" if have[0][0] == 1 else " ranks ha", 1)
    return f"{n} over {format_axes({a: sizes[a] for a in axes})}: {', '.join(words)}"


# --- ranks with the smaller parts -----------------------------------------------------------------------------


@contextlib.contextmanager
def _named_rank(rank: int, first: DryRun, uneven: Sequence[UnevenDim]) -> Iterator[None]:
    """Add to an error the rank that raises it, and its parts."""
    try:
        yield
    except Exception as e:
        sizes, coords = first.mesh.axes, first.mesh.coords(rank)
        lengths = [(d, d.lengths[index_of(d.axes, sizes, coords)]) for d in uneven]
        others = sorted(((d, n) for d, n in lengths if n != d.lengths[0]), key=lambda pair: pair[1])
        parts = [f"{n or 'none'} of the {d.size} of {d.name} dim {d.dim}" for d, n in others]
        has = f", which has {join_limited(parts, 2)}" if parts else ""
        note = f"on rank {rank} ({format_axes(coords)}){has}; rank 0 does not raise it"
        if isinstance(e, ShardingError):
            e.args = (f"{e}\n  {note}",)
        else:
            e.add_note(note)
        raise


def _compare_transfers(runs: Mapping[int, DryRun], branches_on: Sequence[str]) -> None:
    """Raise unless each two ranks start what both take part in, collectives and messages, in the same order."""
    mesh = runs[0].mesh
    common: dict[tuple[bool, int, int], dict[int, list[Transfer]]] = {}  # of two ranks, the transfers of each
    for rank, run in runs.items() if len(runs) > 1 else ():
        for t in run.mesh.transfers:
            for other in {r for group in groups_of(t, rank, mesh.axes) for r in group} & runs.keys() - {rank}:
                key = t.message is not None, min(rank, other), max(rank, other)
                common.setdefault(key, {}).setdefault(rank, []).append(t)
    for (is_message, *pair), rows in sorted(common.items(), key=operator.itemgetter(0)):
        for both in itertools.zip_longest(*[rows.get(rank, ()) for rank in pair]):
            if len({t and (t.op, t.axes, t.dtype, t.message) for t in both}) > 1:
                axes = next(filter(None, both)).axes if is_message else branches_on
                names = [f"rank {rank}" + (f" ({format_axes({a: mesh.coords(rank)[a] for a in axes})})" if axes else "")
                         for rank in pair]  # fmt: skip
                width = max(map(len, names))
                lines = [f"{names[i]:<{width}}  {_describe(t, is_message, pair[i], pair[1 - i], names[1 - i], mesh)}"
                        for i, t in enumerate(both)]  # fmt: skip
                why = "" if branches_on else ": do not branch on the size of a part"
                raise fail(f"the ranks disagree on a {'message' if is_message else 'collective'}", *lines,
                           fix=_IN_PAIRS if is_message else _SAME_ORDER + why)  # fmt: skip


def _describe(t: Transfer | None, is_message: bool, rank: int, other: int, name: str, mesh: Mesh) -> str:
    """Return what a rank does: `all_reduce over data of f32 at file.py:3 in f`, `sends f32[2, 4] to rank 1 at ...`."""
    if t is None:
        return f"starts no further message with {name}" if is_message else "has returned"
    what = f"{t.op} over {', '.join(t.axes)} of {short_dtype(t.dtype)}"
    if t.message is not None:
        groups = groups_of(t, rank, mesh.axes)
        verbs = ["sends"] * ((rank, other) in groups) + ["expects"] * ((other, rank) in groups)
        shapes = " + ".join(f"{short_dtype(t.dtype)}{list(shape)}" for shape in t.message.shapes)
        what = f"{' and '.join(verbs)} {shapes} {'to' if verbs[0] == 'sends' else 'from'} {name}"
    return f"{what} at {t.where}" if t.where else what


def _joined_result(name: str, runs: Mapping[int, DryRun], uneven: Sequence[UnevenDim]) -> Any:
    """Return the described result. Raises ShardingError for trees that differ, and for parts that do not fit."""
    first = runs[0]
    if len(runs) == 1:
        return first.joined
    compare_result_types(name, {rank: result_types(run.result) for rank, run in runs.items()})
    fitting = functools.cache(functools.partial(_fitting_size, runs, uneven))
    errors: list[ShardingError] = []
    leaves = []
    rows = zip(tree.leaves_with_path(first.joined), *(run.result.leaves for run in runs.values()), strict=True)
    for (path, x), *parts in rows:
        leaves.append(x)
        if not isinstance(x, Sharded) or len({p.shape for p in parts}) == 1:
            continue
        dims = zip(x.spec.sizes(x.shape, first.mesh.axes), x.spec.parts(x.ndim),
                   zip(*(p.shape for p in parts), strict=True), strict=True)  # fmt: skip
        shape = [total(n) if isinstance(n, tuple) else fitting(axes, column) for n, axes, column in dims]
        known = [n for n in shape if n is not None]
        if len(known) == len(shape):
            leaves[-1] = abstract_sharded(known, x.dtype, x.spec, first.mesh)
            continue
        dim = shape.index(None)
        axes = x.spec.parts(x.ndim)[dim]
        have = ", ".join(f"rank {rank} has {p.shape[dim]}" for rank, p in zip(runs, parts, strict=True))
        what = f"{name}: {tree.show('result', path)}: the parts do not make up dim {dim}"
        errors.append(fail(f"{what} split by {axes}" if axes else f"{what}, which its out spec does not split", have,
                           fix="return equal parts, or parts of ceil(n / ranks) with the short ones last" if axes else
                           "name the axis in the out spec, or return one size on every rank",
                           spec=x.spec))  # fmt: skip
    raise_all(errors)
    return tree.unflatten(tree.structure(first.joined), leaves)


def _fitting_size(
    runs: Mapping[int, DryRun], uneven: Sequence[UnevenDim], axes: tuple[str, ...], lengths: tuple[int, ...]
) -> int | None:
    """Return a size that `axes` split so that each of these ranks has its length; None if there is none.

    If all have the same length, all other ranks are assumed to have it; else a size of an uneven argument goes first.
    """
    sizes = runs[0].mesh.axes
    ranks = math.prod(sizes[a] for a in axes)
    largest, smallest = lengths[0] * ranks, max(0, (lengths[0] - 1) * ranks + 1)  # as rank 0 has ceil(n / ranks)
    known = [d.size for d in uneven if d.axes == tuple(a for a in axes if sizes[a] > 1)]
    coords = [runs[rank].mesh.coords(rank) for rank in runs]
    for n in [largest] if len(set(lengths)) == 1 else [*known, *range(largest, smallest - 1, -1)]:
        parts = [part_range(n, [sizes[a] for a in axes], [c[a] for a in axes])[1] for c in coords]
        if parts == list(lengths):
            return n
    return None
