"""The proof that a tree is initialized: its leaves are there and written, its ties and replicas as they should be.

What one process can see is looked at first, without any communication. Then the processes tell each other what they
found, once for the whole tree, so that all of them raise the same error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from . import tree
from ._comm import in_region
from ._compare import join_limited
from .errors import ShardingError, fail, raise_all
from .evidence import SCALARS, Held, Leaf, shapeless
from .init import Deferred, describe_initializer
from .mesh import Mesh, make_mesh
from .sharded import Sharded
from .show.table import size
from .spec import describe, matches


@dataclass(frozen=True, repr=False)
class Validated:
    """What `validate` has proved. A leaf at several paths counts once.

    `finite`: leaves of which every element is finite. `infinite`: the names of those that hold infinities, as allowed.
    `replicated`: leaves found bitwise equal on the ranks that should hold the same, over `axes`. `ties`: paths that are
    another path's leaf, where a description was given.
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
            lines.append(f"  as described  {self.leaves}, with {self.ties} tie{'s' * (self.ties != 1)}")
        return "\n".join(lines)


def validate(tree_: Any, described: Any = None, *, allow_inf: str | Sequence[str] = ()) -> Validated:
    """Prove that every leaf is initialized, or raise one error that names every leaf that is not, and why.

    - It has values: it is not only described, not on the meta device or an abstract mesh, and was not donated.
    - Every element is written: none is NaN, which is what `defer` leaves where a constructor writes nothing, and none
      is infinite. Every integer is a value, so one that nothing has written cannot be told.
    - It is as `described`: nothing is missing or extra, shapes and dtypes agree (but for a cast from one floating
      dtype to another), leaves that are one object there are one object here, and others are not.
    - Ranks that should hold the same do, in every bit.

    On a process mesh every rank must call it: one exchange for the whole tree, after which all raise the same.

    Args:
        tree_: `Sharded` leaves, tensors that are the same on every rank, and Python numbers and strings.
        described: the tree of `Deferred` leaves that it was made from.
        allow_inf: path globs, as in `rules`, of leaves that may hold infinities: `"**.mask"`. None may hold NaN.

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
    found = dict(tree.leaves_with_path(tree_))
    wanted = None if described is None else dict(tree.leaves_with_path(described))
    globs = (allow_inf,) if isinstance(allow_inf, str) else tuple(allow_inf)
    processes = _processes(found.values())
    leaves = _distinct(found, wanted or {}, globs, processes)
    mine = _Report({tree.show("tree", leaf.path): repr(leaf) for leaf in leaves})
    mine.errors += [(len(leaves), str(e)) for e in (*_undescribed(found, wanted), *_unused(globs, found))]
    for i, leaf in enumerate(leaves):
        problem = leaf.problem()
        if problem is None:
            mine.held |= {(i, rank): held for rank, held in leaf.look()}
        else:
            mine.errors.append((i, str(problem)))
    errors, held = _exchange(mine, processes)
    for i, leaf in enumerate(leaves):
        by_rank = {r: held[i, r] for r in leaf.ranks if (i, r) in held}
        if len(by_rank) == len(leaf.ranks):  # else it has a problem on some rank
            errors += [(i, e) for e in (leaf.unwritten(by_rank), leaf.unequal(by_rank)) if e]
    raise_all([e for _, e in sorted(errors, key=lambda pair: pair[0])])
    infinite = sorted({leaves[i].name for (i, _), h in held.items() if h.odd})
    return Validated(
        leaves=len(leaves),
        nbytes=sum(leaf.x.nbytes for leaf in leaves if leaf.is_tensor),
        finite=len(leaves) - len(infinite),
        infinite=tuple(infinite),
        replicated=sum(bool(leaf.over) for leaf in leaves),
        axes=tuple(dict.fromkeys(a for leaf in leaves for a in leaf.over)),
        ties=None if wanted is None else len(found) - len(leaves),
    )


# --- the leaves -----------------------------------------------------------------------------------------------


def _distinct(
    found: Mapping[tree.Path, Any], wanted: Mapping[tree.Path, Any], globs: Sequence[str], processes: Mesh | None
) -> list[Leaf]:
    """Every leaf once, by its first path."""
    seen: set[int] = set()
    leaves = []
    for path, x in found.items():
        if id(x) not in seen or isinstance(x, SCALARS):  # equal numbers may be one object, and are no tie
            init = getattr(wanted.get(path), "init", None)
            mesh = x.mesh if isinstance(x, Sharded) else processes
            may = any(_fits(path, glob) for glob in globs)
            leaves.append(Leaf(path, x, mesh, "" if init is None else describe_initializer(init), may))
        seen.add(id(x))
    return leaves


def _fits(path: tree.Path, glob: str) -> bool:
    return matches(tree.dotted(path).split(".") if path else [], glob.split("."))


def _unused(globs: Sequence[str], found: Mapping[tree.Path, Any]) -> list[ShardingError]:
    return [fail(f"validate: allow_inf={glob!r} matches no leaf", fix="remove or mend it")
            for glob in globs if not any(_fits(path, glob) for path in found)]  # fmt: skip


def _undescribed(found: Mapping[tree.Path, Any], wanted: Mapping[tree.Path, Any] | None) -> list[ShardingError]:
    """How the tree is not what is described."""
    if wanted is None:
        return []
    where = {path: f"validate: {tree.show('tree', path)}" for path in (*found, *wanted)}
    errors = [fail(f"{where[p]} is missing", fix="materialize the whole tree", described=wanted[p])
              for p in wanted if p not in found]  # fmt: skip
    errors += [fail(f"{where[p]} is not described", fix="take it out, or describe it too")
               for p in found if p not in wanted]  # fmt: skip
    first: dict[int, tree.Path] = {}
    first_wanted: dict[int, tree.Path] = {}
    for p in found:
        if p not in wanted or isinstance(found[p], SCALARS) or isinstance(wanted[p], SCALARS):
            continue
        x, w, here = found[p], wanted[p], tree.show("tree", p)
        twin, other = first.setdefault(id(x), p), first_wanted.setdefault(id(w), p)
        if w is not wanted[twin]:
            errors.append(fail(f"{where[p]} is one leaf with {tree.show('tree', twin)}, and is not described so",
                               "whatever updates one of them changes both", fix="place a copy of it"))  # fmt: skip
        if x is not found[other]:
            name = tree.show("tree", other)
            errors.append(fail(f"{where[p]} is another leaf than {name}, and is described as tied to it",
                               "two leaves, even of equal values, are updated and saved apart",
                               fix=f"put one object at both paths: {here} = {name}"))  # fmt: skip
        if not _alike(x, w):
            errors.append(fail(f"{where[p]} is {describe(x.dtype, x.shape)}, and is described as "
                               f"{describe(w.dtype, w.shape)}", fix="materialize it from its description"))  # fmt: skip
    return errors


def _alike(x: Any, described: Any) -> bool:
    """Whether shape and dtype agree; what has none of them is an error of its own."""
    if not (_is_leaf(x) and _is_leaf(described)):
        return True
    cast = x.dtype.is_floating_point and described.dtype.is_floating_point
    return tuple(x.shape) == tuple(described.shape) and (x.dtype == described.dtype or cast)


def _is_leaf(x: Any) -> bool:
    return isinstance(x, (Deferred, Sharded, Tensor)) and not shapeless(x)


# --- what the processes tell each other -----------------------------------------------------------------------


@dataclass
class _Report:
    """What one process has found. Leaves are numbers; an error that is of no one leaf has the number after the last."""

    leaves: dict[str, str]
    errors: list[tuple[int, str]] = field(default_factory=list)
    held: dict[tuple[int, int], Held] = field(default_factory=dict)


def _processes(leaves: Iterable[Any]) -> Mesh | None:
    """The mesh of the processes that hold the tree together, if there are several."""
    meshes = {x.mesh.kind: x.mesh for x in leaves if isinstance(x, Sharded)}
    if "process" in meshes:
        return meshes["process"] if meshes["process"].size > 1 else None
    if "simulated" in meshes or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return make_mesh(kind="process", rank=-1)


def _exchange(
    mine: _Report, processes: Mesh | None
) -> tuple[list[tuple[int, ShardingError]], dict[tuple[int, int], Held]]:
    """The errors and holdings of all processes: the same on each of them."""
    everyone: list[_Report] = [mine] if processes is None else processes.gather_objects(mine)
    said: dict[tuple[int, str], list[str]] = {}
    held: dict[tuple[int, int], Held] = {}
    for rank, report in enumerate(everyone):
        for error in dict.fromkeys(report.errors):
            said.setdefault(error, []).append(str(rank))
        held |= report.held
    errors = []
    for (i, text), ranks in said.items():
        first, *rest = text.split("\n")
        on = f", on rank {join_limited(ranks, 8)}" if len(ranks) < len(everyone) else ""
        errors.append((i, ShardingError("\n".join([first + on, *rest]))))
    names = dict.fromkeys(name for report in everyone for name in report.leaves)
    for name in names:
        has: dict[str, list[str]] = {}
        for rank, report in enumerate(everyone):
            has.setdefault(report.leaves.get(name, "nothing"), []).append(str(rank))
        if len(has) > 1:
            held = {}  # what is under a number is not one leaf
            rows = [f"rank {join_limited(ranks, 8)}: {what}" for what, ranks in has.items()]
            errors.append((len(names), fail(f"validate: {name} is not alike on every rank", *rows,
                                            fix="make the same tree on every rank")))  # fmt: skip
    return errors, held


__all__ = ["Validated", "validate"]
