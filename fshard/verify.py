"""Check the law, that the mesh never changes the answer: run a program on smaller meshes and compare every leaf."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from . import tree
from ._call import force_eager
from ._compare import (
    Difference,
    Evidence,
    OtherRounding,
    Tolerance,
    compare,
    describe_differences,
    max_finite_magnitude,
    replica_errors,
    reround,
    sum_over_ranks,
    widen,
)
from .errors import ShardingError, fail, join_limited, raise_all
from .mesh import Mesh, make_mesh
from .reshard import device_get
from .shard_map import ShardMapped
from .sharded import Sharded, device_put
from .spec import format_axes

Sizes = dict[str, int]


@dataclass(frozen=True)
class Verified:
    """Outcome of `verify`: the meshes that were compared, and the largest error."""

    meshes: tuple[str, ...]
    leaves: int
    error: float  # relative to the largest value of its leaf
    noise: tuple[str, ...] = ()  # leaves that differ by more, but not by more than another rounding changes them

    def __repr__(self) -> str:
        if len(self.meshes) == 1:
            return f"verified: nothing, as {self.meshes[0]} has no axis to collapse"
        count = f"{self.leaves} leaves" if self.leaves != 1 else "1 leaf"
        noise = f"; only noise: {join_limited(self.noise, 3)}" if self.noise else ""
        meshes = "; ".join(self.meshes)
        return f"verified: {count} the same on {meshes} (largest relative error {self.error:.0e}{noise})"


def verify(
    f: ShardMapped, *args: Any, meshes: Sequence[Mapping[str, int]] | None = None, rtol: Any = None, atol: Any = None,
    bitwise: bool = False,
) -> Verified:  # fmt: skip
    """Run `f` on its mesh and on others, by default with each axis collapsed to size 1, and with all; compare the results.

    Arguments are copied to every mesh, so donated ones stay valid. Every process simulates the other meshes, where `f`
    is not compiled. Where something differs, further runs with other roundings measure the noise: so the precision that
    a leaf was computed in sets what is allowed, whatever its dtype.

    Args:
        meshes: sizes of axes for each mesh to compare with, where not every axis can be collapsed by itself; an axis
            that is left out keeps its size. `[{"rows": 1, "cols": 1}]` for two axes that must be equal.
        rtol: allowed error relative to each value, by default 1000 eps of the leaf's dtype, 4 eps of half precision: a
            number, or a prefix tree of the results, with None for the default.
        atol: allowed absolute error, in the same form; by default 100 (or 2) eps of the largest value of the leaf, or 4
            times the noise in it, whichever is larger. It is the whole of it where given.
        bitwise: allow no difference.

    >>> total = shard_map(lambda x: psum(x.sum(), "data"), mesh=mesh, in_specs=(P("data"),), out_specs=P())
    >>> verify(total, torch.ones(8))
    verified: 1 leaf the same on data=2, model=2; data=1, model=2; data=2, model=1; data=1, model=1 (...)
    >>> verify(total, torch.ones(8), meshes=[{"data": 1}]).meshes
    ('data=2, model=2', 'data=1, model=2')

    Raises ShardingError with the leaves that differ, by the axis that changes them: the largest error, the ratio where
    it is constant, the likely cause. NaN equals nothing; another shape, dtype or tree is a difference.
    """
    if not isinstance(f, ShardMapped):
        raise fail(f"verify: {f!r} is a {type(f).__name__}", fix="verify what fs.shard_map returns")
    if f.mesh.kind == "abstract":
        raise fail(f"verify: {f._name} is on an abstract mesh, where nothing has a value",
                   fix="fs.check it; or verify it on a simulated mesh")  # fmt: skip
    axes = f.mesh.axes
    others = _collapsed(axes) if meshes is None else _other_sizes(axes, meshes)
    full_args = device_get(args)
    results = f(*_place_copies(args, full_args, f.mesh))
    got = device_get(results)
    tolerances = [*_tolerances(got, rtol, atol, bitwise), Tolerance()]  # the last one, and the last name, of the tree
    mismatched_replicas = replica_errors(f"verify: {f._name}", results, tolerances)
    names = [*(tree.show("result", path) for path, _ in tree.leaves_with_path(got)), "the tree of results"]
    differences: list[Difference] = []
    worst = 0.0
    for sizes in others:
        # Simulated ranks cannot be compiled, and the program was checked on its own mesh.
        other = f.on(make_mesh(kind="simulated", device=f.mesh.device, **sizes), check="never", compile=False)
        try:
            want = _run(other, args, full_args)
        except Exception as e:
            raise fail(f"verify: {f._name} runs on {format_axes(axes)}, and raises on {format_axes(sizes)}",
                       f"{type(e).__name__}: {e}") from e  # fmt: skip
        more, error = compare(got, want, {a: (n, sizes[a]) for a, n in axes.items() if sizes[a] != n}, tolerances)
        differences, worst = differences + more, max(worst, error)
    only_noise: list[str] = []
    if any(f.mesh.gather_objects(bool(differences))):
        rerun = [*tree.leaves(_run(f, args, full_args)), None]
        noise = [0.0] * len(names)
        if any(t.measures_noise for t in tolerances):
            noise = _measure_noise(other, args, full_args, noise)
            # The mesh of `f` adds roundings of the parts: a leaf that is wrong by 1000 times the noise stays wrong.
            if any(f.mesh.gather_objects(any(d.is_near(tolerances[d.leaf], noise[d.leaf]) for d in differences))):
                noise = _measure_noise(f, args, full_args, noise)
        real = [d for d in differences if d.exceeds(tolerances[d.leaf], noise[d.leaf])]
        only_noise = [names[i] for i in sorted({d.leaf for d in differences} - {d.leaf for d in real})]
        not_repeated = {d.leaf for d in differences if d.changed_in(rerun[d.leaf], tolerances[d.leaf])}
        facts = zip(
            tolerances, noise, [*_earlier_values(full_args, got), None], [*tree.leaves(results), None], strict=True
        )
        evidence = [Evidence(t, e, before, functools.partial(sum_over_ranks, x)) for t, e, before, x in facts]
        text = describe_differences(f._name, real, names, evidence)
        if not_repeated:
            changed = join_limited([names[i] for i in sorted(not_repeated)], 3)
            text = str(fail(f"verify: {changed} of {f._name}: another run on the same mesh gives another answer",
                            fix="draw with fs.random and a key, not with torch's own generator"))  # fmt: skip
        if first_text := next(filter(None, f.mesh.gather_objects(text)), ""):
            raise ShardingError(first_text)
    raise_all(mismatched_replicas)
    return Verified(tuple(map(format_axes, [axes, *others])), len(names) - 1, worst, tuple(only_noise))


def _collapsed(axes: Sizes) -> list[Sizes]:
    """Return the sizes with each axis collapsed, and with all."""
    collapsed = [{**axes, a: 1} for a, n in axes.items() if n > 1]
    return [*collapsed, dict.fromkeys(axes, 1)] if len(collapsed) > 1 else collapsed


def _other_sizes(axes: Sizes, meshes: Sequence[Mapping[str, int]]) -> list[Sizes]:
    """Return all sizes of each of the meshes. Raises ShardingError for what is not sizes of those axes."""
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
            raise fail(f"{label}: is the mesh of the function itself", known, fix="give an axis another size")
    return [{**axes, **sizes} for sizes in meshes]


def _tolerances(got: Any, rtol: Any, atol: Any, bitwise: bool) -> list[Tolerance]:
    """Return the tolerance of each leaf, from prefix trees. Raises ShardingError for prefixes that do not fit."""

    def each(name: str, prefix: Any) -> list[float | None]:
        is_number = lambda x: x is None or (isinstance(x, (int, float)) and x >= 0)  # noqa: E731
        return tree.broadcast(prefix, got, name=f"verify: {name}", leaf=is_number, kind="number of 0 or more")

    return [Tolerance(r, a, bitwise) for r, a in zip(each("rtol", rtol), each("atol", atol), strict=True)]


def _earlier_values(args: Any, results: Any) -> list[tuple[str, Tensor] | None]:
    """Return, for each leaf of the results, the argument of the same shape and dtype whose path ends most alike.

    A program that updates parameters returns them at such a path: `args[0]['up']` and `result[0]['up']`.
    """
    floats = [(path, x) for path, x in tree.leaves_with_path(args) if isinstance(x, Tensor) and x.is_floating_point()]

    def find(path: tree.Path, y: Any) -> tuple[str, Tensor] | None:
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


def _measure_noise(f: ShardMapped, args: Any, full_args: Any, least: Sequence[float]) -> list[float]:
    """Return the largest change of each leaf between runs with other roundings, or `least` where that is larger."""
    noise, runs = list(least), []
    for key in range(3):
        with contextlib.suppress(Exception), force_eager:  # a program may refuse such arguments
            out = _run(_with_other_rounding(f, key), args, tree.map(functools.partial(reround, key=key), full_args))
            runs.append(tree.leaves(out))
    for i, values in enumerate(zip(*runs, strict=False)):
        for a, b in itertools.combinations(values, 2):
            if i < len(noise) and isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape:
                noise[i] = max(noise[i], max_finite_magnitude(widen(a) - widen(b)))
    return noise


def _with_other_rounding(f: ShardMapped, key: int) -> ShardMapped:
    """Return the function with other last bits in the result of every operation."""

    @functools.wraps(f._f)
    def run(*args: Any) -> Any:
        with OtherRounding(key):
            return f._f(*args)

    return ShardMapped(run, f.mesh, f._in_specs, f._out_specs, "never", False, f._donate)
