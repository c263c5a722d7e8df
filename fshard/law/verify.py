"""Check the law, that the mesh never changes the answer: run a program on smaller meshes and compare every leaf."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._core.call import force_eager
from fshard._core.compare import (
    Comparison,
    Difference,
    Evidence,
    OtherRounding,
    Tolerance,
    compare,
    describe_differences,
    max_finite_magnitude,
    recording_program,
    replica_errors,
    reround,
    sum_over_ranks,
    widen,
)
from fshard._core.display import page, table
from fshard.errors import ShardingError, checked, fail, join_limited, raise_all
from fshard.mesh import Mesh, make_mesh
from fshard.reshard import device_get
from fshard.shard_map import ShardMapped
from fshard.sharded import Sharded, arrays_as_tensors, device_put
from fshard.spec import format_axes

ORDERS = 3  # of the examples, in addition to the order that is passed

Sizes = dict[str, int]
Earlier = tuple[str, Tensor] | None  # the name and value of the argument that a leaf updates


@dataclass(frozen=True)
class Verified:
    """Outcome of `verify`: the meshes that were compared, and the largest error."""

    meshes: tuple[str, ...]
    leaves: int  # that were compared, without the `unchanged` ones
    error: float  # relative to the largest value of its leaf
    noise: tuple[str, ...] = ()  # leaves that differ by more, but only by as much as other roundings change them
    orders: int = 1  # of the examples
    unchanged: tuple[str, ...] = ()  # leaves that equal the argument that they update: on any mesh, whatever updates it

    def __repr__(self) -> str:
        if len(self.meshes) == 1:
            return f"verified: nothing, as {self.meshes[0]} has no axis to collapse"
        noise = f"; only noise: {join_limited(self.noise, 3)}" if self.noise else ""
        meshes = "; ".join(self.meshes) + (f"; in {self.orders} orders of the examples" if self.orders > 1 else "")
        return f"{self._title()} on {meshes} (largest relative error {self.error:.0e}{noise})"

    def _title(self) -> str:
        title = f"verified: {self.leaves} lea{'ves' if self.leaves != 1 else 'f'} the same"
        return f"not verified, as unchanged: {join_limited(self.unchanged, 3)}; {title}" if self.unchanged else title

    def _repr_html_(self) -> str:
        if len(self.meshes) == 1:
            return page(repr(self))
        rows = [("meshes", self.meshes[0]), *[("", mesh) for mesh in self.meshes[1:]],
                ("largest relative error", f"{self.error:.0e}")]  # fmt: skip
        rows += [("orders of the examples", f"{self.orders}")] * (self.orders > 1)
        rows += [("only noise", join_limited(self.noise, 3))] * bool(self.noise)
        return page(f"{self._title()} on {len(self.meshes)} meshes", table(rows))


@checked
def verify(
    f: ShardMapped, *args: Any, meshes: Sequence[Mapping[str, int]] | None = None, rtol: Any = None, atol: Any = None,
    bitwise: bool = False, examples: int | Sequence[int] = (), locate: bool = True,
) -> Verified:  # fmt: skip
    """Run `f` on its mesh and on smaller ones, and compare the results.

    The smaller meshes have each axis in turn collapsed to size 1, and then all. Arguments are copied to every mesh, so
    donated ones stay valid. Every process simulates the smaller meshes, where `f` is not compiled. Where results
    differ, more runs with other roundings measure the noise. So the precision that a leaf was computed in determines
    what is allowed, whatever its dtype.

    Args:
        meshes: sizes of axes of the meshes to compare with instead, if an axis cannot be collapsed by itself. Axes that
            are left out keep their sizes. `[{"rows": 1, "cols": 1}]` for two axes that must be equal.
        rtol: allowed error relative to each value, by default 1000 eps of the leaf's dtype, 4 eps of half precision: a
            number, or a prefix tree of the results, with None for the default.
        atol: allowed absolute error in addition, in the same form; by default 100 (or 2) eps of the leaf's largest
            value, plus 4 times the noise in it. If a leaf updates an argument (it has its path and shape), the default
            is at most 1 % of its largest change, plus the noise.
        bitwise: allow no difference.
        locate: where something differs, name the first line whose result differs while its operands agree, forward or
            backward. The program runs once more on its mesh and on the smallest that differs, both simulated, and
            records sums over every tensor. Such an error takes 2.8 times as long in the median of small programs, 1.3
            times for an MLP of 2 million weights; without a difference there is no cost.
        examples: positions of arguments that hold examples, split over the ranks along dim 0. All meshes are then
            compared with the examples in three other orders too. This changes how many examples of each rank a mask
            keeps, or meet a condition. Pass 7 examples instead of 8 for ranks of unequal size.

    >>> total = shard_map(lambda x: psum(x.sum(), "data"), mesh=mesh, in_specs=(P("data"),), out_specs=P())
    >>> verify(total, torch.ones(8))
    verified: 1 leaf the same on data=2, model=2; data=1, model=2; data=2, model=1; data=1, model=1 (...)
    >>> verify(total, torch.ones(8), meshes=[{"data": 1}]).meshes
    ('data=2, model=2', 'data=1, model=2')

    Raises ShardingError with the leaves that differ, by the axis that changes them: the largest error, the ratio if it
    is constant, the likely cause; then the first different line. NaN never equals anything; another shape, dtype or
    tree is a difference. Raises it too for a step that changes no leaf of an argument, which proves nothing.
    """
    if f.mesh.kind == "abstract":
        raise fail(f"verify: {f._name} is on an abstract mesh, where nothing has a value",
                   fix="fs.check it; or verify it on a simulated mesh")  # fmt: skip
    leaves, treedef = tree.flatten(args)
    args = tree.unflatten(treedef, arrays_as_tensors(leaves))
    others = _collapsed(f.mesh.axes) if meshes is None else _other_sizes(f.mesh.axes, meshes)
    runs = [(f._name, args)]
    if examples != ():
        positions = [examples] if isinstance(examples, int) else list(examples)
        runs += [(f"{f._name} (with the examples in another order)", a) for a in _in_other_orders(f, args, positions)]
    outcomes = [_compare_meshes(f, name, a, others, rtol, atol, bitwise, locate) for name, a in runs]
    noise = tuple(dict.fromkeys(name for out in outcomes for name in out.noise))
    return replace(outcomes[0], error=max(out.error for out in outcomes), noise=noise, orders=len(runs))


def _compare_meshes(
    f: ShardMapped, name: str, args: tuple[Any, ...], others: Sequence[Sizes], rtol: Any, atol: Any, bitwise: bool,
    locate: bool,
) -> Verified:  # fmt: skip
    """Compare one order of the examples. Raises if leaves differ, or if all leaves of an argument are unchanged."""
    f._compare_arguments(args)
    axes = f.mesh.axes
    full_args = device_get(args)
    results = f(*_place_copies(args, full_args, f.mesh))
    got = device_get(results)
    earlier = [*_earlier_values(full_args, got), None]  # the last entry of each list is for the tree
    tolerances = [*_tolerances(got, earlier, rtol, atol, bitwise), Tolerance()]
    mismatched_replicas = replica_errors(f"verify: {name}", results, tolerances)
    names = [*(tree.show("result", path) for path, _ in tree.leaves_with_path(got)), "the tree of results"]
    differences: list[Difference] = []
    worst = 0.0
    # Simulated ranks cannot be compiled, and the program was checked on its mesh.
    meshes = [make_mesh(kind="simulated", device=f.mesh.device, **sizes) for sizes in others]
    functions = [f.on(mesh, check="never", compile=False) for mesh in meshes]
    for other, sizes in zip(functions, others, strict=True):
        try:
            want = _run(other, args, full_args)
        except Exception as e:
            raise fail(f"verify: {name} runs on {format_axes(axes)}, and raises on {format_axes(sizes)}",
                       f"{type(e).__name__}: {e}") from e  # fmt: skip
        more, error = compare(got, want, {a: (n, sizes[a]) for a, n in axes.items() if sizes[a] != n}, tolerances)
        differences, worst = differences + more, max(worst, error)
    only_noise: list[str] = []
    if any(f.mesh.gather_objects(bool(differences))):
        rerun = [*tree.leaves(_run(f, args, full_args)), None]
        noise, refusal = [0.0] * len(names), ""
        if any(t.measures_noise for t in tolerances[:-1]):
            smallest = min(functions, key=lambda g: g.mesh.size)
            noise, refusal = _measure_noise(smallest, args, full_args, noise)
            # The mesh of `f` adds roundings of parts, which may be larger than their sum, but rarely 10000 times.
            certain = any(d.is_certain(tolerances[d.leaf], noise[d.leaf]) for d in differences)
            if not any(f.mesh.gather_objects(certain)):
                noise, more_refusal = _measure_noise(f, args, full_args, noise)
                refusal = refusal or more_refusal
        real = [d for d in differences if d.exceeds(tolerances[d.leaf], noise[d.leaf])]
        only_noise = [names[i] for i in sorted({d.leaf for d in differences} - {d.leaf for d in real})]
        not_repeated = {d.leaf for d in differences if d.changed_in(rerun[d.leaf], tolerances[d.leaf])}
        facts = zip(tolerances, noise, earlier, [*tree.leaves(results), None], strict=True)
        evidence = [Evidence(t, e, before, functools.partial(sum_over_ranks, x)) for t, e, before, x in facts]
        text = describe_differences(name, real, names, evidence)
        text += refusal if text else ""
        text += _locate(f, args, full_args, real) if text and locate and not not_repeated else ""
        if not_repeated:
            changed = join_limited([names[i] for i in sorted(not_repeated)], 3)
            text = str(fail(f"verify: {changed} of {name}: another run on the same mesh gives a different answer",
                            fix="draw with fs.random and a key, not with torch's generator"))  # fmt: skip
        if first_text := next(filter(None, f.mesh.gather_objects(text)), ""):
            raise ShardingError(first_text)
    raise_all(mismatched_replicas)
    unchanged = _unchanged(f, name, args, full_args, got, earlier)
    return Verified(tuple(map(format_axes, [axes, *others])), len(names) - 1 - len(unchanged), worst, tuple(only_noise),
                    unchanged=tuple(names[i] for i in unchanged))  # fmt: skip


def _unchanged(
    f: ShardMapped, name: str, args: tuple[Any, ...], full_args: Any, got: Any, earlier: Sequence[Earlier]
) -> list[int]:
    """Return the results that were computed as new values of arguments, and equal them bit for bit.

    Raises if that is so of all leaves of an argument that has more than numbers, such as a scale of the loss. A copy of
    an argument, such as a buffer in evaluation, is not computed.
    """
    rows = list(enumerate(zip(tree.leaves_with_path(got), earlier, strict=False)))
    same = [i for i, ((_, x), old) in rows if old is not None and x.numel() and torch.equal(x, old[1])]
    if same:
        with contextlib.suppress(ShardingError):  # of a program that is not checked
            recorder, *_ = _record(f, args, full_args, f.mesh.axes, {})
            same = [i for i in same if not recorder.is_argument(i)]
    groups: dict[str, list[bool]] = {}
    for i, ((path, x), old) in rows:
        if old is not None and path and (x.ndim or i not in same):  # a result by itself may be gathered and split again
            groups.setdefault(old[0][: old[0].index("]") + 1], []).append(i in same)
    if unchanged := [argument for argument, which in groups.items() if all(which)]:
        raise fail(f"verify: {name} returns {' and '.join(unchanged)} unchanged, bit for bit",
                   "a step that changes nothing gives the same answer on every mesh, also with wrong gradients",
                   fix="verify a later step, as a warmup from 0 has learning rate 0 at first; or scale the gradients "
                       "up, if the update is less than a rounding")  # fmt: skip
    return same


def _in_other_orders(f: ShardMapped, args: tuple[Any, ...], positions: Sequence[int]) -> list[tuple[Any, ...]]:
    """Return the arguments with the examples in other orders, the same order at all `positions`."""
    leaves, treedef = tree.flatten(args)
    specs = (f._find_plan(leaves, treedef) or f._make_plan(leaves, args)).specs
    split: dict[int, list[int]] = {i: [] for i in positions}  # leaves of each argument whose dim 0 is split
    for i, ((path, x), spec) in enumerate(zip(tree.leaves_with_path(args), specs, strict=True)):
        if path[0] in split and isinstance(x, (Tensor, Sharded)) and x.ndim and spec.parts(x.ndim)[0]:
            split[path[0]].append(i)
    which = [i for row in split.values() for i in row]
    counts = {leaves[i].shape[0] for i in which}
    if len(counts) != 1 or not all(split.values()):
        rows = [f"args[{i}] has {sorted({leaves[j].shape[0] for j in row})}" for i, row in split.items()]
        raise fail(f"verify: examples={positions!r}: these arguments do not hold one number of examples",
                   "lengths of dim 0 where it is split", *rows,
                   fix="name the positions of the arguments that hold examples, counted from 0")  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    out = []
    for _ in range(ORDERS):
        order, new = torch.randperm(*counts, generator=generator), list(leaves)
        for i, full in zip(which, device_get([leaves[i] for i in which]), strict=True):
            new[i] = device_put(full[order], leaves[i].spec, f.mesh) if isinstance(leaves[i], Sharded) else full[order]
        out.append(tree.unflatten(treedef, new))
    return out


def _collapsed(axes: Sizes) -> list[Sizes]:
    """Return the sizes with each axis collapsed, and with all."""
    collapsed = [{**axes, a: 1} for a, n in axes.items() if n > 1]
    return [*collapsed, dict.fromkeys(axes, 1)] if len(collapsed) > 1 else collapsed


def _other_sizes(axes: Sizes, meshes: Sequence[Mapping[str, int]]) -> list[Sizes]:
    """Return the sizes of all axes of each mesh. Raises ShardingError if `meshes` are not sizes of these axes."""
    known = f"the axes are {format_axes(axes)}"
    if isinstance(meshes, (str, Mapping)) or not isinstance(meshes, Sequence) or not meshes:
        raise fail(f"verify: meshes={meshes!r}", "not a list of sizes of axes, with at least one mesh to compare with",
                   known, fix=f"meshes=[{dict.fromkeys(axes, 1)}]")  # fmt: skip
    for i, sizes in enumerate(meshes):
        label = f"verify: meshes[{i}]={sizes!r}"
        if not isinstance(sizes, Mapping) or any(type(n) is not int or n < 1 for n in sizes.values()):
            raise fail(label, "not sizes of axes, integers of 1 or more", known, fix=f"{dict.fromkeys(axes, 1)}")
        if unknown := [a for a in sizes if a not in axes]:
            raise fail(f"{label}: the mesh of the function has no axis {unknown[0]!r}", known)
        if all(axes[a] == n for a, n in sizes.items()):
            raise fail(f"{label}: is the mesh of the function", known, fix="give an axis another size")
    return [{**axes, **sizes} for sizes in meshes]


def _tolerances(got: Any, earlier: Sequence[Earlier], rtol: Any, atol: Any, bitwise: bool) -> list[Tolerance]:
    """Return the tolerance of each leaf, from prefix trees. Raises ShardingError for prefixes that do not fit."""

    def each(name: str, prefix: Any) -> list[float | None]:
        is_number = lambda x: x is None or (isinstance(x, (int, float)) and x >= 0)  # noqa: E731
        return tree.broadcast(prefix, got, name=f"verify: {name}", leaf=is_number, kind="number of 0 or more")

    changes = [
        max_finite_magnitude(widen(x) - widen(old[1])) if old is not None else math.inf
        for x, old in zip(tree.leaves(got), earlier, strict=False)
    ]
    rows = zip(each("rtol", rtol), each("atol", atol), changes, strict=True)
    return [Tolerance(r, a, bitwise, change) for r, a, change in rows]


def _earlier_values(args: Any, results: Any) -> list[Earlier]:
    """Return, for each leaf of the results, the argument of its shape and dtype whose path has the longest common end.

    A program that updates parameters returns them at such a path: `args[0]['up']` and `result[0]['up']`.
    """
    floats = [(path, x) for path, x in tree.leaves_with_path(args) if isinstance(x, Tensor) and x.is_floating_point()]

    def find(path: tree.Path, y: Any) -> Earlier:
        same = [(p, x) for p, x in floats if isinstance(y, Tensor) and (x.shape, x.dtype) == (y.shape, y.dtype)]
        best = max(same, key=lambda row: _common_end(path, row[0]), default=None)
        return (tree.show("args", best[0]), best[1]) if best and (not path or _common_end(path, best[0])) else None

    return [find(path, y) for path, y in tree.leaves_with_path(results)]


def _common_end(a: tree.Path, b: tree.Path) -> int:
    """Return how many keys at the end of two paths are the same."""
    return next((i for i, (x, y) in enumerate(zip(a[::-1], b[::-1], strict=False)) if x != y), min(len(a), len(b)))


def _run(f: ShardMapped, args: tuple[Any, ...], full_args: tuple[Any, ...]) -> Any:
    """Return the results of `f` as full tensors."""
    return device_get(f(*_place_copies(args, full_args, f.mesh)))


def _place_copies(args: tuple[Any, ...], full_args: tuple[Any, ...], mesh: Mesh) -> Any:
    """Return copies of the arguments on `mesh`. One object at several paths, a tie, becomes one copy."""
    copies: dict[int, Any] = {}

    def copy(x: Any, full: Any) -> Any:
        if isinstance(full, Tensor) and id(x) not in copies:
            copies[id(x)] = device_put(full, x.spec, mesh) if isinstance(x, Sharded) else full.clone()
        return copies.get(id(x), x)

    return tree.map(copy, args, full_args)


def _measure_noise(f: ShardMapped, args: Any, full_args: Any, least: Sequence[float]) -> tuple[list[float], str]:
    """Return the largest change of each leaf between runs with other roundings, at least `least`.

    A program may refuse such arguments; then its error is returned too.
    """
    noise, runs, refusal = list(least), [], ""
    for key in range(3):
        try:
            with force_eager:
                rounded = tree.map(functools.partial(reround, key=key), full_args)
                runs.append(tree.leaves(_run(_with_other_rounding(f, key), args, rounded)))
        except Exception as e:
            refusal = f"\n  noise is not known: with other roundings it raises {type(e).__name__}: {e}"
    for i, values in enumerate(zip(*runs, strict=False)):
        for a, b in itertools.combinations(values, 2):
            if i < len(noise) and isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
                noise[i] = max(noise[i], max_finite_magnitude(widen(a) - widen(b)))
    return noise, refusal


def _locate(
    f: ShardMapped, args: tuple[Any, ...], full_args: tuple[Any, ...], differences: Sequence[Difference]
) -> str:
    """Describe the first different line. Runs on the mesh and on the smallest that differs, both simulated."""
    others = [{**f.mesh.axes, **{axis: n for axis, (_, n) in d.sizes.items()}} for d in differences]
    other = min(others, key=lambda sizes: math.prod(sizes.values()))
    leaves = {d.leaf for d, sizes in zip(differences, others, strict=True) if sizes == other}
    places: dict[Any, Any] = {}
    try:
        runs = [_record(f, args, full_args, sizes, places) for sizes in (f.mesh.axes, other)]
        found = Comparison((f.mesh.axes, other), runs)
        key = found.first(range(len(runs[0][0].results)) if leaves & {-1, len(runs[0][0].results)} else leaves)
        lines = [] if key is None else found.describe(key)
    except ShardingError as e:
        lines = ['first different line: check="always" finds a mistake', *str(e).splitlines()]
    except Exception as e:
        lines = [f"first different line: not known, since a run that records it raises {type(e).__name__}: {e}"]
    return "".join(f"\n  {'' if i == 0 else '  '}{line}" for i, line in enumerate(lines))


def _record(f: ShardMapped, args: tuple[Any, ...], full_args: Any, sizes: Sizes, places: dict[Any, Any]) -> list[Any]:
    """Return the recorders of the ranks of a simulated mesh of these sizes."""
    mesh = make_mesh(kind="simulated", device=f.mesh.device, **sizes)
    placed = _place_copies(args, full_args, mesh)
    plan = f.on(mesh, check="never", compile=False)._make_plan(tree.leaves(placed), placed)
    run, recorders = recording_program(f._f, sizes, plan.specs, plan.names, places)
    with force_eager:
        ShardMapped(run, mesh, f._in_specs, f._out_specs, "never", False, f._donate)(*placed)
    return recorders


def _with_other_rounding(f: ShardMapped, key: int) -> ShardMapped:
    """Return the function with other last bits in the result of every operation."""

    @functools.wraps(f._f)
    def run(*args: Any) -> Any:
        with OtherRounding(key):
            return f._f(*args)

    return ShardMapped(run, f.mesh, f._in_specs, f._out_specs, "never", False, f._donate)
