"""Run one function on every device at once, on local tensors: `shard_map`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from . import tree
from .comm import Comm, Region, bind
from .errors import ShardingError, fail, raise_all
from .linear import prepare
from .mesh import Mesh
from .sharded import Sharded
from .spec import P, is_even, is_spec, lengths, local_box, problems, same, short


@overload
def shard_map(
    f: Callable[..., Any], *, mesh: Mesh, in_specs: Any = None, out_specs: Any, compile: bool = False,
    donate: int | Sequence[int] = (),
) -> ShardMapped: ...  # fmt: skip


@overload
def shard_map(
    f: None = None, *, mesh: Mesh, in_specs: Any = None, out_specs: Any, compile: bool = False,
    donate: int | Sequence[int] = (),
) -> Callable[[Callable[..., Any]], ShardMapped]: ...  # fmt: skip


def shard_map(
    f: Callable[..., Any] | None = None,
    *,
    mesh: Mesh,
    in_specs: Any = None,
    out_specs: Any,
    compile: bool = False,
    donate: int | Sequence[int] = (),
) -> ShardMapped | Callable[[Callable[..., Any]], ShardMapped]:
    """Run `f` on every device of `mesh`, on local tensors, with the mesh axes bound.

    A `Sharded` argument arrives as its local part, and must be placed as `in_specs` says. A plain tensor is a global
    value, the same on every rank, of which each takes its part. Anything else is passed on as it is. Results come
    back as `Sharded`, placed as `out_specs` says. Works as a decorator too; `.on(mesh)` is the same function on
    another mesh.

    Args:
        in_specs: specs for the tuple of arguments, a prefix tree. `None`, for all or for one argument, takes each
            `Sharded` leaf as it is placed and plain tensors whole.
        out_specs: specs for the result, a prefix tree.
        compile: run `torch.compile(f, fullgraph=True)`; needs a process mesh, or a mesh of one rank.
        donate: positions of arguments whose storage the call may overwrite; using them afterwards is an error.

    >>> double = shard_map(lambda x: 2 * x, mesh=make_mesh(data=2), in_specs=(P("data"),), out_specs=P("data"))
    >>> double(torch.arange(3))
    i64[3@data]

    Raises ShardingError for arguments that do not fit `in_specs`, results that do not fit `out_specs`, mixed meshes and
    donated arguments. If a rank raises, its own exception is the one seen and the other ranks end.
    """
    if f is None:
        return functools.partial(
            shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, compile=compile, donate=donate
        )
    return ShardMapped(f, mesh, in_specs, out_specs, compile, (donate,) if isinstance(donate, int) else tuple(donate))


class ShardMapped:
    """A function bound to a mesh by `shard_map`. Call it with global values."""

    def __init__(
        self, f: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, compile: bool, donate: tuple[int, ...]
    ) -> None:
        if compile and mesh.kind == "simulated" and mesh.size > 1:
            raise fail(f"shard_map: compile=True on {mesh!r}",
                       "simulated ranks are threads, and one compiler serves them all",
                       fix="compile on a process mesh or on a mesh of one rank")  # fmt: skip
        functools.update_wrapper(self, f)
        self.mesh = mesh
        self._name = getattr(f, "__name__", type(f).__name__)
        self._f, self._in_specs, self._out_specs = f, in_specs, out_specs
        self._compile, self._donate = compile, donate
        self._body = torch.compile(f, fullgraph=True) if compile else f
        self._plans: dict[Any, _Plan] = {}
        # signature -> what every rank returned
        self._kinds: dict[Any, list[_Kinds]] = {}

    def on(self, mesh: Mesh) -> ShardMapped:
        """The same function on another mesh."""
        return ShardMapped(self._f, mesh, self._in_specs, self._out_specs, self._compile, self._donate)

    def __repr__(self) -> str:
        return f"shard_map({self._name}, {self.mesh!r})"

    def __call__(self, *args: Any) -> Any:
        leaves, treedef = tree.flatten(args)
        signature = (treedef, *[_signature(leaf) for leaf in leaves])
        plan = self._plans.get(signature)
        if plan is None:
            if self._compile:
                prepare(max(256, 2 * len(leaves)))
            self._plans[signature] = plan = self._plan(args, leaves)
        given = [leaf.shards if isinstance(leaf, Sharded) else None for leaf in leaves]
        donated = self._donated(args) if self._donate else []

        def rank_main(comm: Comm, rank: int) -> list[Any]:
            at = rank if self.mesh.kind == "simulated" else 0
            local = [
                shards[at] if shards is not None else _part(leaf, box, self.mesh)
                for leaf, shards, box in zip(leaves, given, plan.boxes[at], strict=True)
            ]
            storages = frozenset(x.shards[at].untyped_storage().data_ptr() for x in donated)
            with bind(Region(comm, rank, self.mesh.device, plan.uneven, storages)):
                out = self._body(*tree.unflatten(treedef, local))
                taken = {_storage(x) for x in local if isinstance(x, Tensor)} - storages
                return [out, self._agree(signature, out), taken]

        try:
            results = self.mesh.run(rank_main)
        finally:
            for x in donated:
                x.give_away(self._name)
        return self._collect(results)

    def _plan(self, args: tuple[Any, ...], leaves: list[Any]) -> _Plan:
        """Check the arguments against the specs, once for each signature."""
        flat = self._flat_in_specs(args, len(leaves))
        errors: list[ShardingError] = []
        specs = []
        for (path, leaf), spec in zip(tree.leaves_with_path(args), flat, strict=True):
            where = f"{self._name}: {tree.show('args', path)}"
            spec = spec if spec is not None else leaf.spec if isinstance(leaf, Sharded) else P()
            specs.append(spec)
            if isinstance(leaf, (Sharded, Tensor)):
                wrong = problems(where, tuple(leaf.shape), spec, self.mesh.axes)
                errors += wrong or self._misplaced(where, leaf, spec)
        raise_all(errors)
        boxes = []
        for rank in self.mesh.ranks:
            coords = self.mesh.coords(rank)
            boxes.append([local_box(tuple(x.shape), s, self.mesh.axes, coords) if isinstance(x, Tensor) else None
                          for x, s in zip(leaves, specs, strict=True)])  # fmt: skip
        placed = [(x, s) for x, s in zip(leaves, specs, strict=True) if isinstance(x, (Tensor, Sharded))]
        return _Plan(boxes, any(not is_even(tuple(x.shape), s, self.mesh.axes) for x, s in placed))

    def _flat_in_specs(self, args: tuple[Any, ...], n: int) -> list[P | None]:
        if self._in_specs is None:
            return [None] * n
        name = f"{self._name}: in_specs"
        return tree.broadcast(self._in_specs, args, name=name, leaf=lambda s: s is None or is_spec(s))

    def _misplaced(self, where: str, leaf: Sharded | Tensor, spec: P) -> list[ShardingError]:
        if isinstance(leaf, Tensor):
            if leaf.requires_grad and torch.is_grad_enabled():
                return [fail(f"{where}: requires grad, and no gradient flows out of shard_map",
                             fix="differentiate inside, with fs.value_and_grad, or pass x.detach()")]  # fmt: skip
            if is_functorch_wrapped_tensor(leaf):
                return [fail(f"{where}: is inside a torch.func transform, which cannot see into shard_map",
                             fix="transform inside")]  # fmt: skip
            return []
        if leaf.mesh != self.mesh:
            return [fail(f"{where}: is on another mesh", fix="fs.reshard(x, specs, mesh), or f.on(mesh)",
                         leaf=leaf.mesh, function=self.mesh)]  # fmt: skip
        if not same(leaf.spec, spec, leaf.ndim):
            return [fail(f"{where}: is placed as {leaf.spec}, in_specs says {spec}", fix=f"fs.reshard(x, {spec})",
                         leaf=leaf)]  # fmt: skip
        return []

    def _donated(self, args: tuple[Any, ...]) -> list[Sharded]:
        found: dict[int, Sharded] = {}
        for i in self._donate:
            if i >= len(args):
                raise fail(f"{self._name}: donate={i}, but there are {len(args)} arguments", fix="count from 0")
            for path, leaf in tree.leaves_with_path(args[i]):
                if isinstance(leaf, Sharded):
                    if id(leaf) in found:
                        raise fail(f"{self._name}: {tree.show(f'args[{i}]', path)} is donated twice",
                                   fix="keep a tied leaf once in the tree, or do not donate it")  # fmt: skip
                    found[id(leaf)] = leaf
        return list(found.values())

    def _agree(self, signature: Any, out: Any) -> list[_Kinds] | None:
        """On a process mesh, what every rank returned: they tell each other, and compare, once per signature."""
        if self.mesh.kind == "simulated" or self.mesh.size == 1:
            return None
        leaves, treedef = tree.flatten(out)
        mine = str(treedef), [_kind(x) for x in leaves]
        if signature not in self._kinds:
            everyone: list[Any] = [None] * self.mesh.size
            dist.all_gather_object(everyone, mine)
            for rank, other in enumerate(everyone):
                if _alike(other) != _alike(everyone[0]):
                    raise fail(f"{self._name}: rank {rank} returned something else than rank 0",
                               f"rank 0  {_told(everyone[0])}", f"rank {rank}  {_told(other)}",
                               fix="return the same tree, dtypes and Python values on every rank")  # fmt: skip
            self._kinds[signature] = everyone
        before = self._kinds[signature][self.mesh.ranks[0]]
        if [shape for _, shape in before[1]] != [shape for _, shape in mine[1]]:
            raise fail(f"{self._name}: the results changed shape between calls with like arguments",
                       f"before  {_told(before)}", f"now     {_told(mine)}")  # fmt: skip
        return self._kinds[signature]

    def _collect(self, results: list[list[Any]]) -> Any:
        """Join the ranks' results by out_specs."""
        first = results[0][0]
        _, treedef = tree.flatten(first)
        flat = tree.broadcast(self._out_specs, first, name=f"{self._name}: out_specs", leaf=is_spec)
        columns = []
        for rank, (out, *_) in zip(self.mesh.ranks, results, strict=True):
            own, own_def = tree.flatten(out)
            if own_def != treedef:
                raise fail(f"{self._name}: rank {rank} returned another tree than rank 0",
                           rank_0=treedef, other=own_def)  # fmt: skip
            columns.append(own)
        everyone = results[0][1]
        taken: set[int] = set().union(*(kept for _, _, kept in results))
        errors: list[ShardingError] = []
        joined = []
        for i, ((path, leaf), spec) in enumerate(zip(tree.leaves_with_path(first), flat, strict=True)):
            where = f"{self._name}: {tree.show('result', path)}"
            parts = [own[i] for own in columns]
            kinds = [p.dtype if isinstance(p, Tensor) else None for p in parts]
            if len(set(kinds)) > 1:
                named = [type(p).__name__ if kind is None else str(kind) for p, kind in zip(parts, kinds, strict=True)]
                errors.append(fail(f"{where}: the ranks returned different kinds", f"{named}"))
                continue
            if not isinstance(leaf, Tensor):
                errors += _disagreeing(where, parts)
                joined.append(leaf)
                continue
            shapes = [tuple(p.shape) for p in parts] if everyone is None else [row[i][1] for _, row in everyone]
            wrong = problems(where, tuple(leaf.shape), spec, self.mesh.axes)
            if wrong:
                errors += wrong
                continue
            shape, wrong = self._global_shape(where, shapes, spec)
            errors += wrong
            joined.append(None if wrong else Sharded(shape, spec, self.mesh, [_own(p.detach(), taken) for p in parts]))
        raise_all(errors)
        return tree.unflatten(treedef, joined)

    def _global_shape(
        self, where: str, shapes: Sequence[tuple[int, ...]], spec: P
    ) -> tuple[tuple[int, ...], list[ShardingError]]:
        """The shape whose parts by `spec` are these, rank by rank."""
        ndim = len(shapes[0])
        if any(len(s) != ndim for s in shapes):
            return (), [fail(f"{where}: the ranks returned {sorted(set(map(len, shapes)))} dims")]
        shape = []
        for dim, axes in enumerate(spec.parts(ndim)):
            sizes = [self.mesh.axes[a] for a in axes]
            line = _along(self.mesh, axes, shapes, dim)
            total = sum(line)
            if lengths(total, sizes) != line:
                fix = "return equal parts, or parts of ceil(n / ranks) with the short ones last"
                return (), [fail(f"{where}: the parts do not make up dim {dim} split by {axes}",
                                 f"the ranks hold {line}", f"a dim of {total} splits into {lengths(total, sizes)}",
                                 fix=fix)]  # fmt: skip
            shape.append(total)
        for rank, have in enumerate(shapes):
            want = tuple(s.stop - s.start for s in local_box(shape, spec, self.mesh.axes, self.mesh.coords(rank)))
            if have != want:
                return (), [fail(f"{where}: rank {rank} returned {list(have)}, its part of {shape} is {list(want)}",
                                 spec=spec)]  # fmt: skip
        return tuple(shape), []


_Kinds = tuple[str, list[tuple[str, tuple[int, ...]]]]  # a tree's structure, and each leaf's dtype and local shape


class _Plan:
    """What a signature of arguments settles: the part of each plain tensor, and whether anything is uneven."""

    def __init__(self, boxes: list[list[Any]], uneven: bool) -> None:
        self.boxes, self.uneven = boxes, uneven


def _kind(x: Any) -> tuple[str, tuple[int, ...]]:
    """A result in words that travel: its dtype and local shape, or a Python value."""
    return (short(x.dtype), tuple(x.shape)) if isinstance(x, Tensor) else (f"{type(x).__name__} {x!r}", ())


def _alike(kinds: _Kinds) -> Any:
    """What must be the same on every rank: everything but the sizes."""
    return kinds[0], [(word, len(shape)) for word, shape in kinds[1]]


def _told(kinds: _Kinds) -> str:
    return f"{', '.join(word if ' ' in word else f'{word}{list(shape)}' for word, shape in kinds[1])} in {kinds[0]}"


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Sharded):
        return leaf.shape, leaf.dtype, leaf.spec, leaf.mesh
    if isinstance(leaf, Tensor):
        tracked = leaf.requires_grad and torch.is_grad_enabled()
        return tuple(leaf.shape), leaf.dtype, tracked, is_functorch_wrapped_tensor(leaf)
    return type(leaf)


def _part(leaf: Any, box: Any, mesh: Mesh) -> Any:
    """This rank's part of a plain tensor; where threads would share it, a copy."""
    return leaf if box is None else leaf.detach()[box].to(mesh.device, copy=mesh.kind == "simulated" and mesh.size > 1)


def _own(x: Tensor, taken: set[int]) -> Tensor:
    """A result, copied where it shares storage with an argument that was not donated, or with another result."""
    at = _storage(x)
    if at in taken:
        return x.clone()
    taken.add(at)
    return x


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() or id(x)  # empty storages are at 0, and nobody's


def _along(mesh: Mesh, axes: Sequence[str], shapes: Sequence[tuple[int, ...]], dim: int) -> list[int]:
    """The local sizes of a dim over the flattened axes, on the ranks at the origin of all other axes."""
    strides = {}
    stride = mesh.size
    for a, n in mesh.axes.items():
        stride //= n
        strides[a] = stride
    ranks = [0]
    for a in axes:
        ranks = [r + i * strides[a] for r in ranks for i in range(mesh.axes[a])]
    return [shapes[r][dim] for r in ranks]


def _disagreeing(where: str, parts: Sequence[Any]) -> list[ShardingError]:
    """A result that is no tensor must be the same on every rank this process runs."""
    try:
        equal = all(bool(p == parts[0]) or (p != p and parts[0] != parts[0]) for p in parts)
    except (TypeError, ValueError, RuntimeError):
        equal = all(p is parts[0] for p in parts)
    if equal:
        return []
    return [fail(f"{where}: is not a tensor and differs between ranks", f"{parts[:4]}",
                 fix="return a tensor with a spec")]  # fmt: skip


__all__ = ["ShardMapped", "shard_map"]
