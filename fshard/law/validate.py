"""Prove that a tree is initialized: its leaves have values, its ties are as described, its replicas are equal.

1. Each process inspects its leaves, without communication.
2. The processes exchange their findings, once for the full tree, so that all of them raise the same error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import parameter

from fshard import tree
from fshard._core.compare import compare_digests, digest_and_value, flat_slice, format_mismatch
from fshard._core.ops import differentiable_dtype
from fshard._core.region import in_region
from fshard.errors import ShardingError, checked, fail, join_limited, number_of, raise_all
from fshard.init import Deferred, describe_initializer
from fshard.mesh import Mesh, make_mesh
from fshard.sharded import Sharded
from fshard.spec import Box, P, box_bounds, box_shape, describe, format_axes, format_tensor, full_box, matches, size

SCALARS = (bool, int, float, str)
CHUNK = 1 << 20  # elements inspected at a time


@dataclass(frozen=True, repr=False)
class Validated:
    """Outcome of `validate`. A leaf at several paths counts once.

    `finite`: number of leaves in which every element is finite. `infinite`: the names of leaves with allowed
    infinities. `replicated`: number of leaves whose replicas are bitwise equal, over `axes`. `ties`: number of paths to
    a leaf that has an earlier path, if a description was passed.
    """

    leaves: int
    nbytes: int
    finite: int
    infinite: tuple[str, ...]
    replicated: int
    axes: tuple[str, ...]
    ties: int | None

    def __repr__(self) -> str:
        but = f", and infinities in {join_limited(self.infinite, 4)}" if self.infinite else ""
        over = f", equal over {', '.join(self.axes)}" if self.axes else ""
        lines = [f"valid: {self.leaves} leaves, {size(self.nbytes)}", f"  finite        {self.finite}{but}",
                 f"  replicated    {self.replicated}{over}"]  # fmt: skip
        if self.ties is not None:
            lines.append(f"  as described  {self.leaves}, with {number_of(self.ties, 'tie')}")
        return "\n".join(lines)


@checked
def validate(tree_: Any, described: Any = None, *, allow_inf: str | Sequence[str] = ()) -> Validated:
    """Prove that every leaf is initialized, or raise one error that names every leaf that is not, and why.

    - It has values: it is not only described, not on the meta device or an abstract mesh, and was not donated.
    - Every element is written: none is NaN, which `defer` leaves where a constructor writes nothing, and none is
      infinite. Every integer is a value, so an integer that was never written cannot be recognized.
    - It is as `described`: nothing is missing or extra; shapes and dtypes agree (except for a cast from one floating
      dtype to another); leaves that are one object in the description are one object in the tree, and others are not.
    - Its replicas are equal in every bit.

    On a process mesh every rank must call it: there is one exchange for the full tree, then all raise the same error.

    Args:
        tree_: `Sharded` leaves, tensors that are the same on every rank, and Python numbers and strings.
        described: the tree of `Deferred` leaves that it was made from.
        allow_inf: path globs, as in `rules`, of leaves that may have infinities: `"**.mask"`. None may have NaN.

    >>> described = {"up": fs.init.normal((64, 256), std=0.02), "scale": fs.init.ones(64)}
    >>> params = fs.materialize(described, {"up": fs.column("model"), "scale": P()}, mesh, key=fs.key(0))
    >>> validate(params, described)
    valid: 2 leaves, 64.2 KiB
      finite        2
      replicated    2, equal over data, model
      as described  2, with 0 ties
    """
    if in_region():
        raise fail("validate: called inside shard_map, where every leaf is a local part", fix="call it outside")
    by_path = dict(tree.leaves_with_path(tree_))
    expected = None if described is None else dict(tree.leaves_with_path(described))
    globs = (allow_inf,) if isinstance(allow_inf, str) else tuple(allow_inf)
    processes = _process_mesh(by_path.values())
    leaves = _unique_leaves(by_path, expected or {}, globs, processes)
    mine = _Report({tree.show("tree", leaf.path): repr(leaf) for leaf in leaves})
    unused_globs = [fail(f"validate: allow_inf={glob!r} matches no leaf", fix="remove or correct it")
                    for glob in globs if not any(_matches_glob(path, glob) for path in by_path)]  # fmt: skip
    mine.errors += [(len(leaves), str(e)) for e in (*_description_errors(by_path, expected), *unused_globs)]
    for i, leaf in enumerate(leaves):
        error = leaf.no_values_error()
        if error is None:
            mine.findings |= {(i, rank): finding for rank, finding in leaf.inspect()}
        else:
            mine.errors.append((i, str(error)))
    errors, findings = _exchange(mine, processes)
    for i, leaf in enumerate(leaves):
        by_rank = {r: findings[i, r] for r in leaf.ranks if (i, r) in findings}
        if len(by_rank) == len(leaf.ranks):  # else it has an error on some rank
            errors += [(i, e) for e in (leaf.nonfinite_error(by_rank), leaf.replica_error(by_rank)) if e]
    raise_all([e for _, e in sorted(errors, key=lambda pair: pair[0])])
    infinite = sorted({leaves[i].name for (i, _), finding in findings.items() if finding.nonfinite})
    return Validated(
        leaves=len(leaves),
        nbytes=sum(leaf.x.nbytes for leaf in leaves if leaf.is_tensor),
        finite=len(leaves) - len(infinite),
        infinite=tuple(infinite),
        replicated=sum(bool(leaf.replicated_over) for leaf in leaves),
        axes=tuple(dict.fromkeys(a for leaf in leaves for a in leaf.replicated_over)),
        ties=None if expected is None else len(by_path) - len(leaves),
    )


# --- one leaf -------------------------------------------------------------------------------------------------

NonFinite = dict[str, tuple[int, tuple[int, ...]]]  # "NaN" or "infinite" -> count, and the global index of the first


@dataclass(frozen=True)
class _Finding:
    """Findings of one rank about a leaf: its elements that are not finite, and a digest if it has replicas."""

    nonfinite: NonFinite
    digest: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class _Leaf:
    """A leaf to inspect, under its first path."""

    path: tree.Path
    x: Any
    mesh: Mesh | None  # for a leaf without one, the mesh of the processes
    initializer: str  # as described; "" if unknown
    may_be_infinite: bool

    @property
    def is_tensor(self) -> bool:
        return isinstance(self.x, (Sharded, Tensor))

    @property
    def name(self) -> str:
        return tree.dotted(self.path)

    @property
    def label(self) -> str:
        return f"validate: {tree.show('tree', self.path)}"

    @property
    def spec(self) -> P:
        return self.x.spec if isinstance(self.x, Sharded) else P()

    @property
    def ranks(self) -> Sequence[int]:
        return range(self.mesh.size) if self.mesh else (0,)

    @property
    def replicated_over(self) -> tuple[str, ...]:
        """Return the axes of more than one rank whose ranks must have the same value."""
        sizes = self.mesh.axes if self.mesh and self.is_tensor else {}
        return tuple(a for a, n in sizes.items() if n > 1 and a not in self.spec.axes)

    def box(self, rank: int) -> Box:
        return self.x.box(rank) if isinstance(self.x, Sharded) else full_box(self.x.shape)

    def __repr__(self) -> str:
        """Describe what must be the same on every process: for a number, its value."""
        x = self.x
        if isinstance(x, (Sharded, Tensor)) and not _is_lazy(x):
            on = f" on {format_axes(self.mesh.axes)}" if self.mesh else ""
            return f"{describe(x, self.spec)}{on}"
        return repr(x) if isinstance(x, (Deferred, *SCALARS)) else f"a {type(x).__name__}"

    def fail(self, what: str, *notes: str, fix: str) -> ShardingError:
        facts = {"leaf": describe(self.x, self.spec), "described as": self.initializer,
                 "mesh": format_axes(self.mesh.axes) if self.mesh else ""}  # fmt: skip
        return fail(f"{self.label} {what}", *notes, fix=fix, **{name: x for name, x in facts.items() if x})

    def no_values_error(self) -> ShardingError | None:
        """Return the error of a leaf that has no values in this process."""
        x = self.x
        if isinstance(x, SCALARS):
            return None
        if isinstance(x, Deferred):
            return fail(f"{self.label} is only described", fix="fs.materialize(tree, specs, mesh, key=key)", leaf=x)
        if not isinstance(x, (Sharded, Tensor)):
            return fail(f"{self.label} is a {type(x).__name__}, not a leaf", fix="a Sharded, a tensor or a number")
        if _is_lazy(x):
            return fail(f"{self.label} is a lazy parameter: it has no shape yet", fix="give its module all its sizes")
        if isinstance(x, Tensor) and x.layout != torch.strided:
            return fail(f"{self.label} is {x.layout}, and a leaf must be strided", fix="x.to_dense()")
        try:
            shards = x.shards if isinstance(x, Sharded) else (x,)
        except ShardingError as e:  # it was donated
            return ShardingError(f"{self.label}: {e}")
        make = "fs.materialize its description"
        if isinstance(x, Sharded) and x.mesh.kind == "abstract":
            return self.fail("is on an abstract mesh, where leaves have no values", fix=f"{make} on a mesh with ranks")
        for s in shards:
            if s.untyped_storage().device.type == "meta":  # also the storage of a fake tensor
                return self.fail("is on the meta device: it has a shape and no values", fix=make)
            if s.numel() and not s.untyped_storage().nbytes():
                return self.fail("has no storage: something has freed it", fix=f"{make}, or do not free its storage")
        for rank, s in zip(x.mesh.ranks, shards, strict=True) if isinstance(x, Sharded) else ():
            shard, part = describe(s), format_tensor(x.dtype, box_shape(self.box(rank)))
            if shard != part:
                return self.fail("is not placed by its spec", f"rank {rank} has {shard}, and its part is {part}",
                                 fix="make it with fs.materialize, fs.device_put or fs.from_callback")  # fmt: skip
        return None

    def inspect(self) -> list[tuple[int, _Finding]]:
        """Return the finding of each rank of this process."""
        x, ranks = self.x, self.mesh.ranks if self.mesh else (0,)
        if isinstance(x, SCALARS):
            kind = "NaN" if x != x else "infinite" if x in (math.inf, -math.inf) else ""
            return [(rank, _Finding({kind: (1, ())} if kind else {}, ())) for rank in ranks]
        shards = x.shards if isinstance(x, Sharded) else [x] * len(ranks)
        return [
            (rank, _Finding(_find_nonfinite(s.detach(), self.box(rank)),
                            tuple(digest_and_value(s).tolist()) if self.replicated_over else ()))
            for rank, s in zip(ranks, shards, strict=True)
        ]  # fmt: skip

    def nonfinite_error(self, findings: Mapping[int, _Finding]) -> ShardingError | None:
        """Return the error of elements that are not finite."""
        kinds = ["NaN"] if self.may_be_infinite else ["NaN", "infinite"]
        wrong = {k: {r: f.nonfinite[k] for r, f in findings.items() if k in f.nonfinite} for k in kinds}
        wrong = {k: by_rank for k, by_rank in wrong.items() if by_rank}
        if not wrong:
            return None
        if not self.is_tensor:
            return fail(f"{self.label} is {self.x}", fix="give it a finite value")
        notes, total = [], 0
        for kind, by_rank in wrong.items():
            boxes: dict[Any, int] = {}  # replicas have the same elements
            for r, (n, _) in by_rank.items():
                bounds = box_bounds(self.box(r))
                boxes[bounds] = max(n, boxes.get(bounds, 0))
            n, first = sum(boxes.values()), min(by_rank, key=lambda r: (by_rank[r][1], r))
            total += n
            on = f", on rank {join_limited([str(r) for r in sorted(by_rank)], 8)}" if self.mesh else ""
            cause = ", as in memory that was never written" if kind == "NaN" else ""
            notes.append(f"{n} {kind}, the first at {list(by_rank[first][1])}{on}{cause}")
        glob = ".".join("*" if part.isdecimal() else part for part in self.name.split(".")) or "**"
        fixes = {"NaN": "write every element in the constructor, or repair the file it was read from",
                 "infinite": f"correct what made it; or, if infinities are meant here: allow_inf={glob!r}"}  # fmt: skip
        fix = "\n       ".join(fixes[k] for k in wrong)
        return self.fail(f"is not finite in {total} of {self.x.numel()} elements", *notes, fix=fix)

    def replica_error(self, findings: Mapping[int, _Finding]) -> ShardingError | None:
        """Return the error of replicas that differ."""
        if not self.replicated_over or self.mesh is None:
            return None
        live = [a for a, n in self.mesh.axes.items() if n > 1]
        sizes = [self.mesh.axes[a] for a in live]
        grid = torch.tensor([findings[r].digest for r in self.ranks]).view(*sizes, 1, 3)
        mismatches = compare_digests(grid, live, [self.spec])
        if not mismatches:
            return None
        axes = " and ".join(repr(m.axis) for m in mismatches)
        x = self.x.shards[0] if isinstance(self.x, Sharded) else self.x
        return self.fail(f"is not one value: it differs between ranks of {axes}",
                         *[format_mismatch(m, x) for m in mismatches],
                         fix="make it from one key or file on every rank, or name the axis in its spec")  # fmt: skip


def _is_lazy(x: object) -> bool:
    """Return whether x is a lazy parameter, which has no shape yet."""
    return isinstance(x, Tensor) and parameter.is_lazy(x)


def _find_nonfinite(x: Tensor, box: Box) -> NonFinite:
    """Count the NaN and the infinities in the shard of this box."""
    kinds: NonFinite = {}
    for start in range(0, x.numel(), CHUNK) if differentiable_dtype(x) else ():
        chunk = flat_slice(x, start, min(start + CHUNK, x.numel()))
        chunk = chunk.to(torch.float32) if chunk.itemsize == 1 else chunk  # isfinite is not implemented for float8
        if bool(chunk.isfinite().all()):
            continue
        nan = chunk.isnan()
        for kind, mask in (("NaN", nan), ("infinite", chunk.isinf() & ~nan)):  # a complex number may be both
            n = int(mask.count_nonzero())
            if n:
                local = np.unravel_index(start + int(mask.to(torch.uint8).argmax()), x.shape)
                first = tuple(int(i) + s.start for i, s in zip(local, box, strict=True))
                before, first = kinds.get(kind, (0, first))
                kinds[kind] = (before + n, first)
    return kinds


# --- the tree -------------------------------------------------------------------------------------------------


def _unique_leaves(
    by_path: Mapping[tree.Path, Any], expected: Mapping[tree.Path, Any], globs: Sequence[str], processes: Mesh | None
) -> list[_Leaf]:
    """Return every leaf once, under its first path."""
    seen: set[int] = set()
    leaves = []
    for path, x in by_path.items():
        if id(x) not in seen or isinstance(x, SCALARS):  # equal numbers may be one object without a tie
            init = getattr(expected.get(path), "init", None)
            mesh = x.mesh if isinstance(x, Sharded) else processes
            may_be_infinite = any(_matches_glob(path, glob) for glob in globs)
            initializer = "" if init is None else describe_initializer(init)
            leaves.append(_Leaf(path, x, mesh, initializer, may_be_infinite))
        seen.add(id(x))
    return leaves


def _matches_glob(path: tree.Path, glob: str) -> bool:
    return matches(tree.dotted(path).split(".") if path else [], glob.split("."))


def _description_errors(
    by_path: Mapping[tree.Path, Any], expected: Mapping[tree.Path, Any] | None
) -> list[ShardingError]:
    """Return the errors of a tree that differs from its description."""
    if expected is None:
        return []
    labels = {path: f"validate: {tree.show('tree', path)}" for path in (*by_path, *expected)}
    errors = [fail(f"{labels[p]} is missing", fix="materialize the full tree", described=expected[p])
              for p in expected if p not in by_path]  # fmt: skip
    errors += [fail(f"{labels[p]} is not described", fix="remove it, or describe it too")
               for p in by_path if p not in expected]  # fmt: skip
    first: dict[int, tree.Path] = {}
    first_expected: dict[int, tree.Path] = {}
    for p in by_path:
        if p not in expected or isinstance(by_path[p], SCALARS) or isinstance(expected[p], SCALARS):
            continue
        x, described, here = by_path[p], expected[p], tree.show("tree", p)
        twin, other = first.setdefault(id(x), p), first_expected.setdefault(id(described), p)
        if described is not expected[twin]:
            errors.append(fail(f"{labels[p]} is one leaf with {tree.show('tree', twin)}, and is described as another",
                               "an update of one of them changes both", fix="place a copy of it"))  # fmt: skip
        if x is not by_path[other]:
            name = tree.show("tree", other)
            errors.append(fail(f"{labels[p]} is another leaf than {name}, and is described as tied to it",
                               "two leaves, even of equal values, are updated and saved separately",
                               fix=f"put one object at both paths: {here} = {name}"))  # fmt: skip
        if not _fits_description(x, described):
            errors.append(fail(f"{labels[p]} is {describe(x)}, and is described as {describe(described)}",
                               fix="materialize it from its description"))  # fmt: skip
    return errors


def _fits_description(x: Any, described: Any) -> bool:
    """Return whether shape and dtype agree; True for a leaf without them, which has another error."""
    if not all(isinstance(y, (Deferred, Sharded, Tensor)) and not _is_lazy(y) for y in (x, described)):
        return True
    cast = x.dtype.is_floating_point and described.dtype.is_floating_point
    return tuple(x.shape) == tuple(described.shape) and (x.dtype == described.dtype or cast)


# --- the exchange ---------------------------------------------------------------------------------------------


@dataclass
class _Report:
    """Findings of one process. Leaves are numbered; an error that is not about one leaf has the next number."""

    leaves: dict[str, str]
    errors: list[tuple[int, str]] = field(default_factory=list)
    findings: dict[tuple[int, int], _Finding] = field(default_factory=dict)  # by (leaf, rank)


def _process_mesh(leaves: Iterable[Any]) -> Mesh | None:
    """Return the mesh of the processes that share the tree; None if there is only one."""
    meshes = {x.mesh.kind: x.mesh for x in leaves if isinstance(x, Sharded)}
    if "process" in meshes:
        return meshes["process"] if meshes["process"].size > 1 else None
    if "simulated" in meshes or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return make_mesh(kind="process", rank=-1)


def _exchange(
    mine: _Report, processes: Mesh | None
) -> tuple[list[tuple[int, ShardingError]], dict[tuple[int, int], _Finding]]:
    """Return the errors and findings of all processes, the same on each of them."""
    reports: list[_Report] = [mine] if processes is None else processes.gather_objects(mine)
    ranks_of: dict[tuple[int, str], list[str]] = {}
    findings: dict[tuple[int, int], _Finding] = {}
    for rank, report in enumerate(reports):
        for error in dict.fromkeys(report.errors):
            ranks_of.setdefault(error, []).append(str(rank))
        findings |= report.findings
    errors = []
    for (i, text), ranks in ranks_of.items():
        first, *rest = text.split("\n")
        on = f", on rank {join_limited(ranks, 8)}" if len(ranks) < len(reports) else ""
        errors.append((i, ShardingError("\n".join([first + on, *rest]))))
    names = dict.fromkeys(name for report in reports for name in report.leaves)
    for name in names:
        variants: dict[str, list[str]] = {}
        for rank, report in enumerate(reports):
            variants.setdefault(report.leaves.get(name, "nothing"), []).append(str(rank))
        if len(variants) > 1:
            findings = {}  # one number means different leaves on different ranks
            rows = [f"rank {join_limited(ranks, 8)}: {variant}" for variant, ranks in variants.items()]
            errors.append((len(names), fail(f"validate: {name} is not the same on every rank", *rows,
                                            fix="make the same tree on every rank")))  # fmt: skip
    return errors, findings
