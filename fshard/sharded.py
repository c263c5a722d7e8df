"""Placed leaves, `Sharded`, and the functions that make them: `materialize`, `device_put`, `from_callback`."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import tree
from ._core.host_memory import memory_device, to_spec_memory
from ._core.torch import is_view
from .errors import ShardingError, a_type, api_boundary, call_of, checked, fail, raise_all, shown
from .init import Deferred
from .mesh import Mesh
from .random import check_key, fold_in
from .spec import (
    Box,
    P,
    Sized,
    box_bounds,
    box_shape,
    describe,
    draw,
    format_value,
    is_spec,
    local_box,
    same_placement,
    spec_errors,
)


class Placement(NamedTuple):
    """Everything about a placed leaf but its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: P
    mesh: Mesh


@checked
class Sharded(Sized):
    """A placed leaf: a global shape, a spec, a mesh, and the local parts of this process.

    `shards` has one local tensor for each of `mesh.ranks`: all of them on a simulated mesh, one on a process mesh.
    A `Sharded` is not a tensor: compute with it inside `shard_map`, look at it with `device_get` or `item`. Operators,
    functions of torch, and attributes of tensors are errors that explain it; `==` too, which Python would otherwise
    answer by identity; and a pickle, since a mesh is of live devices.

    Every rank has all of a leaf that is not split: it can be unpacked, indexed by an int, and read as a numpy array
    (`plt.plot(losses)`). Its repr shows the value of a 0-d leaf.

    >>> mesh = make_mesh(model=4)
    >>> materialize({"w": init.zeros((64, 256)), "step": init.full((), 0.1)}, {"w": column("model"), "step": P()}, mesh,
    ...             key=key(0))
    {'w': f32[64, 256@model], 'step': f32[] 0.1}
    """

    __slots__ = ("_donated_to", "_shards", "placement")

    def __init__(self, shape: Sequence[int], spec: P, mesh: Mesh, shards: Sequence[Tensor]) -> None:
        if len(shards) != len(mesh.ranks):
            raise fail(f"Sharded: {len(shards)} shards, of a mesh with {len(mesh.ranks)} ranks in this process",
                       fix="one for each rank")  # fmt: skip
        self.placement = Placement(tuple(shape), shards[0].dtype, spec, mesh)
        # One without a tuple: the garbage collector visits every tuple, and a step makes a leaf for each result.
        self._shards: Any = shards[0] if len(shards) == 1 else tuple(shards)

    @property
    def shards(self) -> tuple[Tensor, ...]:
        """The local tensors, in the order of `mesh.ranks`. Raises ShardingError once the leaf has been donated."""
        if self._shards is None:
            raise fail(f"{self!r} was donated to {self._donated_to}, which may have overwritten it",
                       fix="use the value that call returned, or leave the argument out of donate=")  # fmt: skip
        return self._shards if isinstance(self._shards, tuple) else (self._shards,)

    def donate_to(self, function: str) -> None:
        """Drop the shards; any later use of the leaf is an error that names `function`."""
        self._donated_to, self._shards = function, None

    # By attrgetter, so that reading one runs no Python function: a step reads them for each leaf.
    shape: tuple[int, ...] = property(attrgetter("placement.shape"), doc="The global shape.")  # type: ignore[assignment]
    dtype: torch.dtype = property(attrgetter("placement.dtype"), doc="As of a tensor.")  # type: ignore[assignment]
    spec: P = property(attrgetter("placement.spec"), doc="How the mesh's axes split it.")  # type: ignore[assignment]
    mesh: Mesh = property(attrgetter("placement.mesh"), doc="The mesh with its parts.")  # type: ignore[assignment]

    def box(self, rank: int) -> Box:
        """Return the global slices of the part of `rank`."""
        return local_box(self.shape, self.spec, self.mesh.axes, self.mesh.coords(rank))

    @api_boundary
    def item(self) -> Any:
        """Return the value of a leaf with one element, as a Python number."""
        if self.numel() != 1:
            raise fail(f"item: {self!r} has {self.numel()} elements", fix="fs.device_get(x)")
        if self.mesh.kind == "abstract":
            raise fail(f"item: {self!r} is on an abstract mesh, where leaves have no values")
        if self.mesh.kind == "process" and self.spec.axes:
            raise fail(f"item: {self!r} is split, and its element is on one rank only",
                       fix="fs.device_get(x).item() on every rank")  # fmt: skip
        return next(x for x in self.shards if x.numel()).item()

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, form: str) -> str:
        return format(self.item(), form) if form else repr(self)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __repr__(self) -> str:
        return f"{describe(self, self.spec)} {self._value()}".rstrip()

    def _value(self) -> str:
        """Return the number of a 0-d leaf, which every rank has; "" for others, and for a donated one."""
        return "" if self.shape or self._shards is None else format_value(self.shards[0])

    def _repr_html_(self) -> str:
        """Draw the blocks and the ranks that have them."""
        return draw(repr(self), self.shape, self.spec, self.mesh.axes, itemsize=self.dtype.itemsize)._repr_html_()

    @api_boundary
    def __len__(self) -> int:
        return len(self._unsplit("len", 1)[0])

    @api_boundary
    def __iter__(self) -> Iterator[Sharded]:
        return iter([self[i] for i in range(len(self._unsplit("iteration", 1)[0]))])

    @api_boundary
    def __getitem__(self, i: int) -> Sharded:
        shards = self._unsplit("[]", 1 if isinstance(i, int) else self.ndim + 1)
        parts = [x[i].clone() for x in shards]  # a donated leaf may be overwritten
        return Sharded(parts[0].shape, P(memory=self.spec.memory), self.mesh, parts)

    @api_boundary
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if self.mesh.kind == "abstract":
            raise _no_tensor(self, "numpy")
        x = self._unsplit("numpy", 0)[0].cpu()
        return np.array((x.float() if x.dtype == torch.bfloat16 else x).numpy(), dtype=dtype)

    def _unsplit(self, operation: str, dims: int) -> tuple[Tensor, ...]:
        """Return the shards of a leaf that every rank has all of. Raises ShardingError for others, and fewer dims."""
        if self.spec.axes or self.ndim < dims:
            raise _no_tensor(self, operation)
        return self.shards

    def __copy__(self) -> Sharded:
        return Sharded(self.shape, self.spec, self.mesh, self.shards)

    def __deepcopy__(self, memo: Any) -> Sharded:
        return Sharded(self.shape, self.spec, self.mesh, [x.clone() for x in self.shards])

    @api_boundary
    def __reduce__(self) -> Any:
        raise fail(f"pickle: {self!r} is placed on the devices of {self.mesh!r}",
                   fix="fs.checkpoint.save(path, tree), which fs.checkpoint.restore places again on any mesh; or "
                       "torch.save(fs.device_get(tree), path), of full tensors")  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        if name == "__qualname__" and (frame := sys._getframe(1)).f_code is torch.typename.__code__:
            raise _no_tensor(self, getattr(frame.f_back, "f_code", frame.f_code).co_name)  # an error of torch names it
        if name.startswith("__"):  # a protocol that Python or a library asks for
            raise AttributeError(name)
        raise AttributeError(str(_no_tensor(self, f".{name}")))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaf = next(x for x in tree.leaves((args, kwargs)) if isinstance(x, Sharded))
        raise _no_tensor(leaf, getattr(func, "__name__", "a function of torch"))

    __hash__ = object.__hash__  # a class that defines __eq__ loses it


def _no_tensor(leaf: Sharded, operation: str) -> ShardingError:
    """Return the error of an operation that a tensor has and a placed leaf has not."""
    value = "x.item() is its value" if leaf.numel() == 1 else "fs.device_get(x) is the full tensor"
    fix = f"{value}, x.shards are its local parts; compute inside fs.shard_map; fs.reshard moves it"
    if operation == "add_param_group":  # of an optimizer of torch
        update = "params, state = opt.update(grads, state, params)"
        fix = f"opt = fs.optim.adamw(1e-3); state = opt.init(params); and in fs.shard_map {update}"
    return fail(f"{operation}: {leaf!r} is a placed leaf, not a tensor", fix=fix)


def _refused(operation: str) -> Callable[..., Any]:
    @api_boundary
    def refuse(self: Sharded, *_: Any, **__: Any) -> Any:
        raise _no_tensor(self, operation)

    return refuse


_BINARY = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**",
           "matmul": "@", "and": "&", "or": "|", "xor": "^"}  # fmt: skip
_OTHERS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "neg": "-", "abs": "abs",
           "invert": "~", "setitem": "[]", "contains": "in", "round": "round"}  # fmt: skip
for _name, _operation in [*_OTHERS.items(), *((f"{side}{n}", op) for n, op in _BINARY.items() for side in ("", "r"))]:
    setattr(Sharded, f"__{_name}__", _refused(_operation))


# --- leaves that are not tensors ------------------------------------------------------------------------------


def array_dtype(x: Any) -> torch.dtype | None:
    """Return torch's dtype for a numpy array, which is a leaf like a tensor; None for anything else.

    Arrays of objects, texts or dates have none, nor has one with a mask, which a tensor would lose.
    """
    return _torch_dtype(x.dtype) if isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray) else None


def _has_dtype(x: Any) -> bool:
    """Return whether torch has the dtype of an array or a number of numpy; True for anything else."""
    if isinstance(x, np.ndarray):
        return array_dtype(x) is not None
    return not isinstance(x, np.generic) or _torch_dtype(x.dtype) is not None


@functools.cache
def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    try:
        return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype
    except TypeError:
        return None


def as_tensor(x: np.ndarray[Any, Any]) -> Tensor:
    """Return a numpy array as a tensor that shares its memory, where torch can: not a read-only or reversed one."""
    shared = x.flags.writeable and x.dtype.isnative and all(n >= 0 and n % x.itemsize == 0 for n in x.strides)
    return torch.from_numpy(x if shared else np.array(x, x.dtype.newbyteorder("="), order="C"))


def array_part(x: Any, box: Box) -> Tensor:
    """Return a part of a numpy array as a tensor. Only the part is copied or read: the array may be a file."""
    return as_tensor(x[(*box, ...)])  # `...` keeps an array of 0 dims one


def arrays_as_tensors(leaves: list[Any]) -> list[Any]:
    """Return leaves with copies of the numpy arrays as tensors; the same list if there are none."""
    if not any(issubclass(kind, np.ndarray) for kind in set(map(type, leaves))):
        return leaves
    return [x if array_dtype(x) is None else as_tensor(x).clone() for x in leaves]


def no_parts_errors(label: str, leaf: Any, spec: P) -> list[ShardingError]:
    """Return the error of a leaf that is neither a tensor nor an array, under a spec that splits it."""
    if not spec.axes:
        return []
    of_list = isinstance(leaf, (int, float)) and label.count("[") > 1 and label[-2].isdigit()
    fix = f"give it P(), which passes it on unchanged; or {_as_leaves(leaf)}"
    return [fail(f"{label}: is {a_type(type(leaf))}, not a tensor: it has no parts for {spec} to place",
                 fix="pass one tensor: torch.tensor(the list)" if of_list else fix)]  # fmt: skip


def _as_leaves(leaf: Any) -> str:
    """Return how to make tensors of a leaf that is not one."""
    if isinstance(leaf, torch.nn.Module):
        return "pass its tensors: dict(module.named_parameters()); fs.defer(constructor) also computes with them"
    if isinstance(leaf, Iterator):
        return "pass a dict or a list, which have the same leaves each time: dict(module.named_parameters()), list(x)"
    if isinstance(leaf, np.ndarray):
        return f"make it an array of numbers or bools without a mask: this one is of {leaf.dtype}"
    if isinstance(leaf, Mapping):
        return "make it a dict: dict(x)"
    if dataclasses.is_dataclass(leaf):
        name = type(leaf).__name__
        return f"register its class, so that its fields are leaves: @fs.tree.register above @dataclass of {name}"
    return "make it a tensor, or a dict, a tuple or a dataclass with @fs.tree.register that has tensors"


# --- many at once, for every call of a `shard_map` ------------------------------------------------------------


def joined(placements: Sequence[Placement | None], columns: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the leaves whose parts on each rank are `columns`: `Sharded` by its placement, or without one, the first.

    Nothing checks that shards fit their placement, and no function is called for a leaf.
    """
    leaves: list[Any] = []
    new = object.__new__
    parts_of_leaves: Any = columns[0] if len(columns) == 1 else zip(*columns, strict=True)
    for placement, parts, first in zip(placements, parts_of_leaves, columns[0], strict=True):
        if placement is None:
            leaves.append(first)
        else:
            leaves.append(leaf := new(Sharded))
            leaf.placement, leaf._shards = placement, parts
    return leaves


def _placed(shape: Sequence[int], spec: P, mesh: Mesh, shards: Sequence[Tensor]) -> Sharded:
    leaf: Sharded = joined([Placement(tuple(shape), shards[0].dtype, spec, mesh)], [[x] for x in shards])[0]
    return leaf


def local_parts(leaves: Sequence[Any], ranks: int) -> list[list[Any]]:
    """Return the local leaves of each rank of this process: the shard of a `Sharded`, anything else unchanged.

    Raises ShardingError for a leaf that has been donated.
    """
    try:
        if ranks > 1:
            return [[x._shards[i] if x.__class__ is Sharded else x for x in leaves] for i in range(ranks)]
        parts = [x._shards if x.__class__ is Sharded else x for x in leaves]
        if type(None) not in set(map(type, parts)):
            return [parts]
    except TypeError:  # None[i]
        pass
    return [[x.shards[i] if isinstance(x, Sharded) else x for x in leaves] for i in range(ranks)]  # raises


# --- making leaves --------------------------------------------------------------------------------------------


@checked
def materialize(tree_: Any, specs: Any, mesh: Mesh, *, key: Tensor, dtype: torch.dtype | None = None) -> Any:
    """Place a described tree: every device fills only its part of every `Deferred` leaf.

    Each element depends only on `key`, the leaf's path and the element's global index, so the values are bitwise the
    same on every mesh and with every spec, and adding a leaf changes no other. The path is that in `tree_`:
    `materialize(tree["a"])` draws other values than `materialize(tree)["a"]`. Leaves of `fs.defer` keep their
    name, so that any part of the tree has the same values as the full tree, `tree["params"]` or
    `tree["params"]["weight"]`; in a larger tree the path of the module is added.

    Tensors and numpy arrays in the tree are placed unchanged; Python numbers, bools and texts stay as in checkpoints.
    One object at several paths is one leaf, with the key of its first path. On a process mesh every rank must call it,
    with the same key.

    Args:
        specs: a `P` per leaf, or a prefix: one `P` for a subtree.
        dtype: replaces the dtype of floating-point `Deferred` leaves.

    >>> materialize({"w": init.normal((64, 256), std=0.02)}, {"w": column("model")}, mesh, key=fs.key(0))
    {'w': f32[64, 256@model]}

    Raises ShardingError listing every leaf that cannot be placed.
    """
    check_key("materialize", key)
    _check_names(tree_)

    def place(path: tree.Path, leaf: Any, spec: P) -> Any:
        if isinstance(leaf, (Tensor, np.ndarray)):
            return _put(leaf, spec, mesh)
        return _fill(leaf, spec, mesh, key_of(leaf, path, key), dtype) if isinstance(leaf, Deferred) else leaf

    return place_tree("materialize", tree_, specs, mesh, (Deferred, Tensor, np.ndarray, *_VALUES), place)


def _check_names(tree_: Any) -> None:
    """Raise for two leaves of one name, which would have one key, and so the same values."""
    names: dict[str, tuple[tree.Path, Any]] = {}
    for path, leaf in tree.leaves_with_path(tree_):
        name = _names_of(leaf, path)[0] if isinstance(leaf, Deferred) else tree.dotted(path)
        twin, other = names.setdefault(name, (path, leaf))
        if isinstance(leaf, Deferred) and twin != path and leaf is not other:
            fix = "rename one: no dots in keys" if tree.dotted(path) == tree.dotted(twin) else \
                "put modules under paths of their own: {'a': tree_a, 'b': tree_b}"  # fmt: skip
            raise fail(f"materialize: {tree.show('tree', path)} and {tree.show('tree', twin)} have one name",
                       f"both are {name!r}, and would have the same values", fix=fix)  # fmt: skip


def _names_of(leaf: Deferred, path: tree.Path) -> tuple[str, list[str]]:
    """Return the name of a leaf, and the names of the leaves whose draws it is made of, if others."""
    name, scope = tree.dotted(path), leaf.scope
    module = None if scope is None else scope.module_path(name)
    if scope is not None and module is not None:
        name, *owners = (module + n.partition(".")[2] for n in (scope.name, *scope.owners))
        return name, owners
    if scope is not None and scope.owners:
        raise fail(f"materialize: {tree.show('tree', path)}: is made of the draws of other leaves, found by its name",
                   f"{name!r} is not {scope.name!r}, nor a part of it",
                   fix="keep the tree that fs.defer returned, or a part of it",
                   draws=", ".join(scope.owners))  # fmt: skip
    return name, []


def key_of(leaf: Deferred, path: tree.Path, key: Tensor) -> Tensor:
    """Return the leaf's key; for a leaf made of the draws of other leaves, their keys, int64[owners, 2]."""
    name, owners = _names_of(leaf, path)
    return torch.stack([fold_in(key, owner) for owner in owners]) if owners else fold_in(key, name)


def _fill(leaf: Deferred, spec: P, mesh: Mesh, key: Tensor, dtype: torch.dtype | None) -> Sharded:
    kind = dtype if dtype is not None and leaf.dtype.is_floating_point else leaf.dtype
    if mesh.kind == "abstract":
        return abstract_sharded(leaf.shape, kind, spec, mesh)
    return leaf_from_parts(leaf.shape, spec, mesh, lambda box: leaf.init.fill(key, leaf.shape, box, kind, mesh.device))


def abstract_sharded(shape: Sequence[int], dtype: torch.dtype, spec: P, mesh: Mesh) -> Sharded:
    """Return a leaf on an abstract mesh: the shape of the first rank's part, without values."""
    box = local_box(tuple(shape), spec, mesh.axes, mesh.coords(mesh.ranks[0]))
    return _placed(shape, spec, mesh, [torch.empty(box_shape(box), dtype=dtype, device="meta")])


@checked
def device_put(tree_: Any, specs: Any, mesh: Mesh) -> Any:
    """Place global tensors, the same on every rank: each device receives a copy of its part.

    `specs` may be a prefix. Numpy arrays and Python numbers become tensors.

    >>> device_put({"x": torch.arange(6)}, P("data"), make_mesh(data=4))
    {'x': i64[6@data]}
    """
    kinds = (Tensor, np.ndarray, *_NUMBERS)
    return place_tree("device_put", tree_, specs, mesh, kinds, lambda _, x, spec: _put(x, spec, mesh))


_NUMBERS = (int, float, complex, np.number, np.bool)
_VALUES = (bool, int, float, str)


def _put(x: Any, spec: P, mesh: Mesh) -> Sharded:
    array = isinstance(x, np.ndarray)
    full = x if array else torch.as_tensor(x).detach()
    if mesh.kind == "abstract":
        return abstract_sharded(tuple(full.shape), array_dtype(x) or full.dtype, spec, mesh)
    device = memory_device(spec, mesh.device)

    def part(box: Box) -> Tensor:
        local = array_part(full, box) if array else full[box]
        return local.to(device, copy=True, memory_format=torch.contiguous_format)

    return leaf_from_parts(tuple(full.shape), spec, mesh, part)


@checked
def from_callback(shape: Sequence[int], spec: P, mesh: Mesh, fn: Callable[[Box], Tensor]) -> Sharded:
    """Make a placed leaf from `fn(global slices)`, so that each rank loads only its data.

    `fn` is called once for each different part of this process; replicas on a simulated mesh get copies.

    >>> from_callback((8, 4), P("data"), mesh, lambda box: torch.from_numpy(memory_map[box]))
    f32[8@data, 4]

    The returned tensors become the leaf's storage: return a copy of a tensor that is used elsewhere.

    Raises ShardingError if `fn` returns anything but a tensor of the shape of its slices.
    """
    raise_all(spec_errors("from_callback", tuple(shape), spec, mesh.axes))
    return leaf_from_parts(tuple(shape), spec, mesh, fn)


def leaf_from_parts(shape: tuple[int, ...], spec: P, mesh: Mesh, fn: Callable[[Box], Tensor]) -> Sharded:
    """Return `from_callback`, of arguments that are right."""
    parts: dict[tuple[tuple[int, int], ...], Tensor] = {}
    shards = []
    for rank in mesh.ranks:
        box = local_box(shape, spec, mesh.axes, mesh.coords(rank))
        bounds = box_bounds(box)
        if bounds in parts:
            shards.append(to_spec_memory(parts[bounds], spec, mesh.device, copy=True))
            continue
        part = fn(box)
        if not isinstance(part, Tensor) or tuple(part.shape) != box_shape(box):
            returned = list(part.shape) if isinstance(part, Tensor) else f"a {type(part).__name__}"
            raise fail(f"from_callback: the callback returned {returned} for rank {rank}",
                       fix=f"return the elements of the slices it is called with: {list(box_shape(box))}",
                       slices=[f"{s.start}:{s.stop}" for s in box])  # fmt: skip
        if shards and shards[0].dtype != part.dtype:
            raise fail(f"from_callback: the callback returned {part.dtype} for rank {rank}, and {shards[0].dtype} "
                       "before",
                       fix="return one dtype for every part")  # fmt: skip
        if mesh.kind == "abstract":
            parts[bounds] = part.to("meta")
        else:  # a donated leaf is overwritten: a view shares its storage with another tensor
            parts[bounds] = to_spec_memory(part, spec, mesh.device, copy=is_view(part))
        shards.append(parts[bounds])
    return _placed(shape, spec, mesh, shards)


def place_tree(
    verb: str, tree_: Any, specs: Any, mesh: Mesh | None, kinds: tuple[type, ...], place: Callable[..., Any]
) -> Any:
    """Check every leaf against its spec, then place them all. An object at several paths, a tie, stays one leaf.

    Without a mesh, each leaf is `Sharded` and stays on its mesh.
    """
    leaves = tree.leaves_with_path(tree_)
    leaf_specs = tree.broadcast(specs, tree_, name="specs", leaf=is_spec)
    errors: list[ShardingError] = []
    first: dict[int, tuple[tree.Path, P]] = {}
    for (path, leaf), spec in zip(leaves, leaf_specs, strict=True):
        label = f"{verb}: {tree.show('tree', path)}"
        twin, twin_spec = first.setdefault(id(leaf), (path, spec))
        shape = tuple(leaf.shape) if isinstance(leaf, (Tensor, Deferred, Sharded, np.ndarray)) else None
        if shape is not None and not same_placement(twin_spec, spec, len(shape)):
            errors.append(fail(f"{label}: is tied to {tree.show('tree', twin)}, which has another spec",
                               fix="give both one spec, or untie them", spec=spec, other=twin_spec))  # fmt: skip
        if not isinstance(leaf, kinds) or not _has_dtype(leaf):
            fix = "fs.reshard(tree, specs) moves placed leaves" if isinstance(leaf, Sharded) else \
                "fs.materialize places described leaves" if isinstance(leaf, Deferred) else \
                call_of(leaf) or _as_leaves(leaf)  # fmt: skip
            what = shown(leaf) if callable(leaf) else a_type(type(leaf))
            errors.append(fail(f"{label}: cannot place {what}", fix=fix))
        elif isinstance(leaf, Tensor) and ((leaf.is_meta and mesh is not None and mesh.kind != "abstract")
                                           or leaf.layout is not torch.strided):  # fmt: skip
            errors.append(fail(f"{label}: has no values to place" if leaf.is_meta else f"{label}: is not strided",
                               fix="a tensor on a device; x.to_dense() of a sparse one"))  # fmt: skip
        else:
            errors += spec_errors(label, shape or (), spec, (mesh or leaf.mesh).axes)  # type: ignore[attr-defined]
    raise_all(errors)
    placed: dict[int, Any] = {}
    out = []
    for (path, leaf), spec in zip(leaves, leaf_specs, strict=True):
        if id(leaf) not in placed or isinstance(leaf, _NUMBERS):  # equal numbers may be one object without being tied
            placed[id(leaf)] = place(path, leaf, spec)
        out.append(placed[id(leaf)])
    return tree.unflatten(tree.structure(tree_), out)
