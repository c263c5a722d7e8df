"""`defer`: any `nn.Module` constructor as a pure function and a tree of described leaves."""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from fshard import init as initial
from fshard import tree as trees
from fshard._core.callsite import user_frame
from fshard._core.region import in_region
from fshard._core.torch import FakeTensor, storage_id
from fshard.errors import ShardingError, checked, fail, raise_all
from fshard.init import Deferred, Initializer, Scope, describe_initializer
from fshard.random import fold_in
from fshard.spec import Box, describe

from . import graph
from .functional_module import Apply
from .graph import Draw, Node, draws, step_name, topological_order
from .module_leaves import MODULE_ATTRIBUTES, Leaves, Place, leaves_at, places_of
from .recorder import EAGER, NESTED, GradientHooks, Recorder, recording, recording_error
from .references import Outside, Slot, items, reachable
from .replaced import Replace
from .replay import Replay, bytes_in_full, is_local
from .units import Units

Tree = dict[str, dict[str, Deferred]]
Source = tuple[int, int]  # (index of the owner whose key a draw uses, number of the draw among the owner's)


@checked
def defer(
    constructor: Callable[[], nn.Module], *, units: Units = None, replace: Replace = None, budget: int = 1 << 30,
    reference: int | None = None,
) -> tuple[Apply, Tree]:  # fmt: skip
    """Run a constructor without allocating its parameters: return a pure function and a tree of their descriptions.

    `materialize` replays the constructor's operations for the part of each device, and draws from its distributions by
    the leaf's key: the values are the same on every mesh, and not as by `torch.manual_seed`. An operation that needs a
    full tensor (a QR) computes it in full, one leaf at a time: `apply.whole` has the bytes of each such leaf.

    The tree is `{"params": {name: Deferred}, "buffers": {name: Deferred}}`. A tied leaf is in it once, by its first
    name. A part of the tree has the same values if only it is materialized. Copies of a drawn leaf
    (`nn.TransformerEncoder` copies its layer) are equal.

    The generators of Python and numpy are seeded with 0 (or with `reference=`) during the call and restored. A leaf
    drawn by a `torch.Generator` that the constructor passes has exactly its numbers, and is computed in full.
    `numpy.random.default_rng()` without a seed is an error. Numbers of `os.urandom` or the clock are not seen.

    Args:
        units: the submodules that `apply.unshard` gathers one by one: the name of a class ("T5Block"), a glob of paths
            ("encoder.block.*"; `**` is any number of parts) or several of both; a function (path, module) -> bool; or a
            number: the innermost submodules with this number of parameters or more. `apply.units` has their leaves.
        replace: globs of paths of submodules, and the pure functions that compute them on shards:
            `{"fc": fs.nn.column_linear("model"), "**.embed": fs.nn.row_embedding("model")}`; or classes,
            `{torch.nn.Linear: fs.nn.column_linear("model")}`: submodules of a class that cannot be replaced are left,
            and `apply.unreplaced` has the reasons. `apply.specs` has the specs of all leaves. The first key that
            matches a submodule counts; one that matches none is an error.
        budget: the most bytes that may be computed in full for one leaf.
        reference: a seed. The module is built eagerly under `torch.manual_seed(reference)`, and its leaves are
            sliced: they are bitwise the constructor's, on every mesh, and take as much memory.

    >>> apply, tree = defer(lambda: torch.nn.Embedding(1000, 64, padding_idx=0))
    >>> tree
    {'params': {'weight': f32[1000, 64] = recorded(normal, write)}, 'buffers': {}}
    >>> materialize(tree["params"], row("model"), make_mesh(model=4), key=key(0))
    {'weight': f32[1000@model, 64]}

    Raises ShardingError for an operation that cannot be recorded, naming the line of the constructor, and for leaves
    that need more than `budget`, listing all.
    """
    if in_region():
        raise fail("defer: called inside shard_map, where leaves are local parts", fix="call it outside")
    recorder = Recorder(budget)
    with contextlib.ExitStack() as during:
        if reference is not None:  # on every kind of device
            during.enter_context(torch.random.fork_rng())
            torch.manual_seed(reference)
        during.enter_context(_seeded(reference or 0))
        if reference is None:
            during.enter_context(recording(recorder))
        module = _construct(constructor)
    places = places_of(module)
    leaves = leaves_at(places)
    raise_all([fail(f"defer: {name}: {reason[0]}", fix=reason[1]) for named in leaves.values()
               for name, x in named.items() if (reason := recorder.why_unrecorded(x))])  # fmt: skip
    outside, in_full = Outside(constructor, module), dict[str, int]()
    if reference is None:
        tree, in_full = _describe(leaves, recorder, budget)
    else:
        tree = {kind: {name: Deferred(tuple(x.shape), x.dtype, Reference(x.detach(), reference))
                       for name, x in named.items()} for kind, named in leaves.items()}  # fmt: skip
        outside.made = {name: weakref.ref(x) for named in leaves.values() for name, x in named.items()}
    _release(module, places, recorder, outside)
    return Apply(module, whole=in_full, units=units, replace=replace, outside=outside), tree


_PARALLEL = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")


def _construct(constructor: Callable[[], nn.Module]) -> nn.Module:
    hooks: Any = GradientHooks()
    if isinstance(constructor, nn.Module):
        name = type(constructor).__name__
        raise fail(f"defer: got a {name}, which is constructed already, not a constructor",
                   fix=f"fs.defer(lambda: {name}(...)), which allocates nothing; for the values of this one, "
                       "fs.device_put(dict(module.named_parameters()), specs, mesh)")  # fmt: skip
    if missing := _required(constructor):
        name = getattr(constructor, "__name__", "constructor")
        raise fail(f"defer: the constructor needs arguments: {', '.join(missing)}",
                   fix=f"fs.defer(lambda: {name}({', '.join(missing)}))")  # fmt: skip
    try:
        with hooks:
            module = constructor()
    except Exception as e:
        frames = [frame for frame, _ in traceback.walk_tb(e.__traceback__)]
        if any(frame.f_code.co_name == "register_empty_parameter" for frame in frames):
            raise fail("defer: the constructor runs inside init_empty_weights of Accelerate, which puts parameters on "
                       "the meta device", fix="leave it out: fs.defer allocates no parameter") from None  # fmt: skip
        if any(frame.f_globals.get("__name__", "").startswith("torch.nested") for frame in frames):
            raise recording_error(f"a tensor here {NESTED[0]}", fix=NESTED[1], frame=user_frame(frames[-1])) from e
        if not isinstance(e, RuntimeError) or "FakeTensor" not in str(e):
            if not isinstance(e, ShardingError):
                e.add_note(f"while fs.defer ran the constructor; if it runs alone: {EAGER}")
            raise
        # of torch: an operation that fake tensors do not support
        what, fix = "this operation needs a tensor that has memory", EAGER
        if "Uninitialized" in str(e):
            what = "the shape of a lazy layer is decided by its first call"
            fix = ("give the constructor the sizes, as Linear for LazyLinear; or call the lazy module in it once, with "
                   "reference=0")  # fmt: skip
        raise recording_error(what, fix=fix, frame=user_frame(frames[-1])) from e
    if not isinstance(module, nn.Module):
        raise fail(f"defer: the constructor returned {module!r}", fix="return the nn.Module")
    for name, m in module.named_modules():
        if isinstance(m, torch.jit.ScriptModule):
            raise fail(f"defer: {repr(name) if name else 'the module'} is compiled by torch.jit",
                       "its parameters are in C++, where no pure function can replace them",
                       fix="construct the plain module")  # fmt: skip
        if kind := next((c.__name__ for c in type(m).__mro__ if c.__name__ in _PARALLEL), None):
            raise fail(f"defer: {repr(name) if name else 'the module'} is a {kind}",
                       "it moves parameters and gradients between devices by itself, whatever the mesh",
                       fix="construct the plain module; specs and fs.unshard do the same on every mesh")  # fmt: skip
    return module


def _required(constructor: Callable[..., Any]) -> list[str]:
    """Return the arguments that a constructor cannot be called without."""
    try:
        parameters = inspect.signature(constructor).parameters.values()
    except (ValueError, TypeError):  # of a builtin
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed the generators of Python, numpy and torch, so that they draw the same in every process; restore them.

    Torch's has the draws that are not recorded: those in a thread of the constructor.
    """
    python, numbers, state = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    random.seed(seed)
    np.random.seed(seed % (1 << 32))  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)  # noqa: NPY002
        torch.set_rng_state(state)


def _release(module: nn.Module, places: Sequence[Place], recorder: Recorder, outside: Outside) -> None:
    """Replace the leaves by tensors on meta, and recorded tensors in attributes and closures by real ones."""
    on_meta: dict[Tensor, Tensor] = {}

    def release(x: Tensor) -> Tensor:
        if x not in on_meta:
            y: Tensor = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
            on_meta[x] = nn.Parameter(y, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else y
        return on_meta[x]

    for place in places:
        release(place.value)
    for part in module.modules():
        for name in _computed_by_hooks(part):
            if isinstance(x := vars(part).get(name), Tensor):
                release(x)
    errors: list[ShardingError] = []

    storages = {storage_id(x): place.leaf for place in places if (x := place.value).layout is torch.strided}

    def leaf_of(x: Tensor) -> str | None:
        return storages.get(storage_id(x)) if x.layout is torch.strided else None

    def is_replaced(x: Any) -> bool:
        return isinstance(x, Tensor) and (x in on_meta or isinstance(x, FakeTensor) or leaf_of(x) is not None
                                          or recorder.is_recorded(x))  # fmt: skip

    def replace(name: str, path: trees.Path, x: Any) -> Any:
        if not is_replaced(x):
            return x
        if x in on_meta:
            return on_meta[x]
        label = trees.show(name, path)
        if leaf := leaf_of(x):
            why = f"is a view of {leaf!r}, and each call has another tensor for that leaf", "make the view in forward"
        elif unrecorded := recorder.why_unrecorded(x):
            why = unrecorded
        elif not draws(recorder.node(x)):
            return recorder.value(x, label)
        elif storage_id(x) in recorder.on_meta:
            return release(x)
        else:
            why = ("is drawn, and neither a parameter nor a buffer",
                   f"make it a buffer, with persistent=False; or {EAGER}")  # fmt: skip
        errors.append(fail(f"defer: {label}: {why[0]}", fix=why[1]))
        return x

    found = list(reachable(module, outside.objects))
    variables = {id(c): f"{name} of {f.__qualname__}" for f in found if isinstance(f, FunctionType)
                 for name, c in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)}  # fmt: skip
    slots = [(f"{prefix}.{key}" if prefix else key, Slot(vars(m), key))
             for prefix, m in module.named_modules() for key in vars(m)]  # fmt: skip
    slots += [(f"{type(x).__name__}.{key}", Slot(vars(x), key)) for x in found
              if hasattr(x, "__dict__") and not isinstance(x, (nn.Module, Tensor)) for key in vars(x)]  # fmt: skip
    for x in found:
        if isinstance(x, (FunctionType, CellType, functools.partial)):
            name = variables.get(id(x)) or f"an argument of {getattr(x, '__qualname__', type(x).__name__)}"
            named = x.keywords if isinstance(x, functools.partial) else getattr(x, "__kwdefaults__", None) or {}
            slots += [(name, Slot(holder, key)) for holder in (x, named) for key, _ in items(holder)]
    for name, slot in slots:
        x = slot.value
        if slot.key not in MODULE_ATTRIBUTES and any(map(is_replaced, trees.leaves(x))):  # others keep their containers
            slot.put(_in_place(x, trees.map_with_path(functools.partial(replace, name), x)))
    raise_all(errors)
    for place in places:
        place.put(on_meta[place.value])


def _in_place(x: Any, new: Any) -> Any:
    """Give a list or a dict the contents of another one: others may refer to it."""
    if isinstance(x, list):
        x[:] = new
    elif isinstance(x, dict):
        x.update(new)
    return x if isinstance(x, (list, dict)) else new


def _computed_by_hooks(part: nn.Module) -> Iterator[str]:
    """Yield the names of plain attributes that torch's older hooks compute from parameters before each forward."""
    for hook in part._forward_pre_hooks.values():
        if isinstance(hook, (WeightNorm, SpectralNorm)):
            yield hook.name
        elif isinstance(hook, BasePruningMethod):
            yield hook._tensor_name


# --- descriptions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Recorded:
    """Initializer that replays a recorded value on any box."""

    node: Node
    sources: Mapping[int, Source]  # by the id of a draw
    owners: tuple[str, ...] = ()  # the leaves whose keys the draws use; empty if only this leaf's
    name: str = ""

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        keys = key if self.owners else key[None]

        def key_of(draw: Draw) -> Tensor:
            owner, number = self.sources[id(draw)]
            return fold_in(keys[owner], number) if number else keys[owner]

        try:
            return Replay(self.node, key_of, device).fill(box, dtype)
        except ShardingError as e:
            raise ShardingError(f"{self.name}: {e}") from None

    def describe(self) -> str:
        """Return each kind of step once, the owners of its draws, and the bytes computed in full."""
        plain = _plain_initializer(self.node)
        if plain is not None:
            text = describe_initializer(plain)
        else:
            nodes = [n for n in topological_order(self.node) if not isinstance(n, (graph.Full, graph.View))]
            text = f"recorded({', '.join(dict.fromkeys(map(step_name, nodes))) or 'full'})"
        others = [o for o in self.owners if o != self.name]
        size = _bytes_in_full(self.node)
        return text + (f" of {', '.join(others)}" if others else "") + (f", {size:,} bytes in full" if size else "")


@dataclass(frozen=True, eq=False)
class Reference:
    """Initializer that slices a tensor made eagerly under a seed."""

    tensor: Tensor
    seed: int

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.tensor[box].to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)

    def describe(self) -> str:
        return f"reference(seed={self.seed})"


def _describe(leaves: Leaves, recorder: Recorder, budget: int) -> tuple[Tree, dict[str, int]]:
    owners: dict[int, tuple[str, int]] = {}  # id of a draw -> (the first leaf computed from it, its number there)
    tree: Tree = {"params": {}, "buffers": {}}
    computed_in_full: dict[str, int] = {}
    errors: list[ShardingError] = []
    for kind, named in leaves.items():
        for name, x in named.items():
            node = recorder.node(x)
            for number, draw in enumerate([draw for draw in draws(node) if id(draw) not in owners]):
                owners[id(draw)] = f"{kind}.{name}", number
            tree[kind][name] = _describe_leaf(kind, name, node, owners)
            if size := _bytes_in_full(node):
                computed_in_full[name] = size
            if size > budget:
                ops = sorted({step_name(n) for n in topological_order(node) if not is_local(n)})
                errors.append(fail(f"defer: {name}: {describe(node)} is computed in full, beyond budget=",
                                   f"{size:,} bytes > {budget:,}", operations=", ".join(ops),
                                   fix=f"budget={size}, of each device; or {EAGER}"))  # fmt: skip
    raise_all(errors)
    return tree, computed_in_full


def _describe_leaf(kind: str, name: str, node: Node, owners: Mapping[int, tuple[str, int]]) -> Deferred:
    leaf, drawn = f"{kind}.{name}", draws(node)
    names = tuple(dict.fromkeys(owners[id(d)][0] for d in drawn))
    shared = any(o != leaf for o in names)
    plain = None if shared else _plain_initializer(node)
    if plain is not None:
        return Deferred(node.shape, node.dtype, plain, Scope(leaf))
    sources = {id(d): (names.index(owners[id(d)][0]), owners[id(d)][1]) for d in drawn}
    names = names if shared else ()
    shown = tuple(o.partition(".")[2] for o in names)
    return Deferred(node.shape, node.dtype, Recorded(node, sources, shown, name), Scope(leaf, names))


def _bytes_in_full(node: Node) -> int:
    return 0 if _plain_initializer(node) is not None else bytes_in_full(node)


_INITIALIZERS: dict[str, Callable[..., Initializer]] = {
    "normal": initial.Normal, "uniform": initial.Uniform, "trunc_normal": initial.TruncNormal,
}  # fmt: skip


def _plain_initializer(node: Node) -> Initializer | None:
    """Return the initializer of `fs.init` with the values of a node, or None."""
    match node:
        case graph.Full() if not node.dtype.is_complex:
            return initial.Full(node.value)
        case Draw() if node.distribution in _INITIALIZERS and not node.dtype.is_complex:
            return _INITIALIZERS[node.distribution](*node.args)
        case graph.Cast() if isinstance(node.source, Draw) and node.source.distribution == "normal":
            # A draw is rounded to float32, then to its dtype: that is this cast.
            is_rounded = node.source.dtype == torch.float32 and node.dtype.itemsize < 4
            return initial.Normal(*node.source.args) if is_rounded else None
        case graph.Op() if node.call.name == "eye" and node.dtype.is_floating_point:
            return initial.Eye()
        case graph.Op() if node.call.name == "arange" and node.dtype == torch.int64:
            start, end, step = (*node.call.args, 1)[:3] if len(node.call.args) > 1 else (0, node.call.args[0], 1)
            return initial.Arange(start, step) if all(isinstance(n, int) for n in (start, end, step)) else None
    return None
