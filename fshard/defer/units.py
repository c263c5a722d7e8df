"""Units of a module: the submodules whose leaves `Apply.unshard` gathers around their forward, and in backward."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fshard import tree
from fshard._core.region import Region, region
from fshard._core.torch import has_tangent, in_transform
from fshard._core.weight import is_weight
from fshard.errors import fail, must_be, no_attribute, raise_all
from fshard.schedule.buckets import plan_buckets
from fshard.schedule.recompute import refuse_saved_tensor_hooks
from fshard.schedule.units import Unit, UnitCalls, UnitOptions, UnitSchedule
from fshard.schedule.unshard import Route, placements, routes, unshard
from fshard.spec import Axis, P, is_spec, matches

from .module_leaves import Named, Place, in_memory_order
from .stand_ins import OutsideUnit, Split, in_module, path_to

Units = str | int | Callable[[str, nn.Module], bool] | Sequence[str] | None


# --- the choice of units --------------------------------------------------------------------------------------


def choose_units(module: nn.Module, units: Units) -> tuple[str, ...]:
    """Return the names of the submodules that are units, in the order of their definition; never the module itself."""
    if units is None:
        return ()
    named = {name: m for name, m in module.named_modules() if name}
    if isinstance(units, int):
        if units < 1 or isinstance(units, bool):
            raise must_be("defer: units", "1 or more, the least number of parameters of a unit,", units)
        large: set[str] = set()
        _choose_large("", module, units, large, set())
        return tuple(name for name in named if name in large)
    if callable(units):
        chosen = [name for name, m in named.items() if units(name, m)]
        if not chosen:
            raise fail(f"defer: units={units!r} chooses none of {len(named)} submodules", _classes(named))
    else:
        entries = [units] if isinstance(units, str) else list(units)
        found = {entry: [name for name, m in named.items() if type(m).__name__ == entry
                         or matches(name.split("."), entry.split("."))] for entry in entries}  # fmt: skip
        raise_all([fail(f"defer: units={entry!r} matches no submodule", _classes(named),
                        fix="the name of a class, or a glob of paths: 'encoder.block.*'")
                   for entry, names in found.items() if not names])  # fmt: skip
        chosen = [name for name in named if any(name in names for names in found.values())]
    raise_all([fail(f"defer: unit {name!r} is a {type(named[name]).__name__}, which has no forward of its own",
                    "its leaves are used in its children's", fix=f"units='{name}.*'")
               for name in chosen if not _has_forward(named[name])])  # fmt: skip
    return tuple(chosen)


def _has_forward(m: nn.Module) -> bool:
    return getattr(type(m), "forward", None) is not nn.Module.forward


def _classes(named: Mapping[str, nn.Module]) -> str:
    count = Counter(type(m).__name__ for m in named.values())
    return "classes  " + ", ".join(f"{kind} ({n})" for kind, n in sorted(count.items()))


def _choose_large(name: str, m: nn.Module, least: int, chosen: set[str], seen: set[int]) -> int:
    """Choose the innermost submodules with `least` parameters that no unit inside has; return the number left."""
    if id(m) in seen:
        return 0
    seen.add(id(m))
    # Attention computes with the leaves of its child, whose forward nobody calls; and its parent may, without it.
    attention = isinstance(m, nn.MultiheadAttention)
    numels = {id(x): x.numel() for x in m.parameters(recurse=attention) if id(x) not in seen}
    seen.update(numels)
    left = sum(numels.values())
    if attention:
        return left
    left += sum(_choose_large(f"{name}.{key}" if name else key, child, least, chosen, seen)
                for key, child in m.named_children())  # fmt: skip
    if left >= least and name and _has_forward(m):
        chosen.add(name)
        return 0
    return left


def leaves_of_units(module: nn.Module, names: Sequence[str], places: Sequence[Place]) -> dict[str, tuple[str, ...]]:
    """Return the names of each unit's parameters: each is in the innermost unit that has all places of the leaf.

    A leaf that no single unit has is in the innermost unit of each of its places, if all are in units. A leaf of a
    module that is in several others has a place in each.
    """
    units = {id(module.get_submodule(name)): name for name in names}

    def around(name: str, key: str) -> list[str]:  # outermost first
        path, m = [], module
        for part in name.removesuffix(key).split(".")[:-1]:  # a key may have dots, as in tensordict's modules
            m = m.get_submodule(part)
            path += [units[id(m)]] if id(m) in units else []
        return path

    of_leaf: dict[str, list[list[str]]] = {}
    for p in places:
        if p.kind == "params":
            of_leaf.setdefault(p.leaf, []).extend(around(name, p.key) for name in p.names)
    out: dict[str, list[str]] = {name: [] for name in names}
    for leaf, paths in of_leaf.items():
        only = [name for name in paths[0] if all(name in path for path in paths)]
        found = [only] if only else paths
        for name in names if all(found) else ():
            if any(name == path[-1] for path in found):
                out[name].append(leaf)
    return {name: tuple(leaves) for name, leaves in out.items()}


def shapes_of(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return objects that have the shapes of these leaves, and nothing else."""
    return {name: SimpleNamespace(shape=tuple(x.shape)) for name, x in named.items()}


# --- the forward of units -------------------------------------------------------------------------------------


# (unit, its gathered tensors) -> its leaves; without tensors, leaves that are gathered once and kept
Fill = Callable[[str, Sequence[Tensor] | None], Sequence[Any]]


@dataclass(frozen=True)
class RunningUnits:
    """The schedule and the leaves of the units of one call."""

    calls: Any  # `UnitCalls`
    fill: Fill
    outside: Named = field(default_factory=dict)  # what the module has of their leaves outside of their forwards
    keep: Callable[[str], Any] = str  # from a unit's name to a function that repeats its call
    watch: Callable[[Mapping[str, Tensor]], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    replaced: list[str] = field(default_factory=list)  # parameters that the forward of a unit has replaced


def _with_hooks(m: nn.Module) -> Callable[..., Any]:
    """Return the forward of a module with its hooks, which may use its leaves, and take them from the module."""
    calling = {key: vars(m)[key] for key in ("_forward_pre_hooks", "_forward_hooks")} | {"forward": m.forward}

    def forward(*args: Any, **kwargs: Any) -> Any:
        before = {key: vars(m)[key] for key in calling}
        vars(m).update(calling)
        try:
            return m(*args, **kwargs)
        finally:
            vars(m).update(before)

    vars(m).update({key: OrderedDict() for key in calling if key != "forward"})
    return forward


class UnitForwards:
    """The forwards of the units in one copy of a module, which run by the schedule of the call that is running."""

    __slots__ = ("_original", "_places", "_splits", "_units", "running")  # no dict: `reachable` ends here

    def __init__(
        self, module: nn.Module, units: Mapping[str, Sequence[str]], places: Sequence[Place],
        splits: Mapping[str, Split],
    ) -> None:  # fmt: skip
        self._units, self._splits = units, splits
        self.running: RunningUnits | None = None  # None: a call with full leaves
        self._original: dict[str, Callable[..., Any]] = {}
        by_leaf: dict[str, list[Place]] = {}
        for p in places:
            if p.kind == "params":
                by_leaf.setdefault(p.leaf, []).append(p)
        self._places = {name: [p for leaf in leaves for p in by_leaf[leaf]] for name, leaves in units.items()}
        for name in units:
            m = module.get_submodule(name)
            self._original[name] = _with_hooks(m) if m._forward_pre_hooks or m._forward_hooks else m.forward
            m.forward = functools.partial(self._forward, name)

    def _forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        running = self.running
        if running is None or name not in running.calls.units:
            return self._original[name](*args, **kwargs)
        run = functools.partial(self.run, running, name)
        if in_transform():
            return run(None, args, kwargs)
        try:
            return running.calls.run(name, run, args, kwargs, functools.partial(running.keep, name))
        except RuntimeError as e:
            if any(text in str(e) for text in ("support saved tensor hooks", "invalid python storage")):
                raise fail(f"unit {name!r} calls a transform of torch.func inside its forward, which cannot trace the "
                           "release of leaves", fix="choose the modules inside it; or units=None") from e  # fmt: skip
            raise

    def run(self, running: RunningUnits, name: str, tensors: Sequence[Tensor] | None, args: Any, kwargs: Any) -> Any:
        """Run the forward of a unit with the leaves that these tensors are, or with those that the call keeps."""
        given = dict(zip(self._units[name], running.fill(name, tensors), strict=True))
        leaves = in_module(given, self._splits)
        outside = [(p, p.value) for p in self._places[name]]
        for p, _ in outside:
            p.put(leaves[p.leaf])
        try:
            with running.watch(given):
                return self._original[name](*args, **kwargs)
        finally:
            for p, x in outside:
                if isinstance(p.value, nn.Parameter) and p.value is not leaves[p.leaf]:
                    running.replaced.append(p.leaf)
                p.put(x)


class Pure:
    """A module's forward as a pure function: `f(params, buffers, *args, **kwargs)`."""

    _run: Callable[..., Any]  # (params, buffers, args, kwargs) -> (result, buffers after it, names of changed ones)
    refuse_changed: Callable[[Sequence[str]], None]

    def __call__(self, params: Named, buffers: Named, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `forward`. Raises ShardingError if it changed a buffer, which would be lost."""
        out, _, changed = self._run(params, buffers, args, kwargs)
        self.refuse_changed(changed)
        return out

    def with_buffers(self, params: Named, buffers: Named, /, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Return the result of `forward` and the buffers after it; the arguments are not changed.

        On a mesh each rank updates the buffers by its examples, so they vary: see `batch_norm_over` for batch norms.
        `fs.tree.map(lambda b: fs.pmean(b, "data") if b.is_floating_point() else fs.pmax(b, "data"), new)`: one value.

        >>> norm = torch.nn.BatchNorm1d(1, affine=False, momentum=0.5)
        >>> before = dict(norm.named_buffers())
        >>> _, after = Apply(norm).with_buffers({}, before, torch.tensor([[1.0], [3.0]]))
        >>> after["running_mean"], before["running_mean"]
        (tensor([1.]), tensor([0.]))
        """
        out, after, _ = self._run(params, buffers, args, kwargs)
        return out, after


class UnshardedByUnit(Pure):
    """The function of shards that `Apply.unshard` returns: `f(params, buffers, *args, **kwargs)`."""

    def __init__(
        self, apply: Any, specs: Any, axis: Axis, options: UnitOptions, dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None, shapes: Any,
    ) -> None:  # fmt: skip
        self._apply, self._specs, self._axis, self._options = apply, specs, axis, options
        self.module: nn.Module = apply.module
        self._dtype, self._reduce_dtype, self.refuse_changed = dtype, reduce_dtype, apply.refuse_changed
        shapes = apply.shapes if shapes is None else shapes
        if not isinstance(shapes, Mapping) or apply.shapes.keys() - shapes.keys():
            raise must_be("apply.unshard: shapes", f"a dict of the {len(apply.shapes)} params", shapes,
                          "pass the tree that params were materialized from")  # fmt: skip
        # Only the shapes: a described tree may refer to full tensors.
        self._shapes = shapes if shapes is apply.shapes else shapes_of({name: shapes[name] for name in apply.shapes})

    def __repr__(self) -> str:
        return f"{self._apply!r}.unshard({self._axis!r})"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            earlier = {n: f"apply.{n}(...).unshard(specs, axis)" for n in ("draws_over", "eval", "batch_norm_over")}
            raise no_attribute("the function of apply.unshard", name, self, earlier)

    def _run(self, params: Named, buffers: Named, args: Any, kwargs: Any) -> Any:
        here = region("apply.unshard")
        apply, kwargs = self._apply.split_key(kwargs)
        apply.check_names(params, buffers)
        named: Any = dict(params)
        # Neither a compiler nor a transform of torch.func can trace a schedule.
        is_traced = torch.compiler.is_dynamo_compiling() or in_transform() or any(map(has_tangent, tree.leaves(named)))
        if is_traced or not apply.units:
            return apply.run(self._full(named, self._specs), unshard(dict(buffers), P(), self._axis), args, kwargs)
        refuse_saved_tensor_hooks("apply.unshard")
        flat = tree.broadcast(self._specs, named, name="apply.unshard: specs", leaf=is_spec, is_leaf=is_weight)
        specs: Any = tree.unflatten(tree.flatten(named, is_weight)[1], flat)
        not_units: set[str] = here.scratch.setdefault((UnshardedByUnit, *apply.units), set())
        units = self._units(here, params, specs, not_units)
        in_units = {leaf for name in units for leaf in apply.units[name]}
        in_units -= {leaf for name, leaves in apply.units.items() if name not in units for leaf in leaves}
        root = [leaf for leaf in named if leaf not in in_units]
        full = self._full({leaf: named[leaf] for leaf in root}, {leaf: specs[leaf] for leaf in root})
        full_buffers = unshard(dict(buffers), P(), self._axis)
        records, known = torch.is_grad_enabled(), dict[str, Any]()

        def kept(unit: str, leaf: str) -> Any:
            """Return a leaf that is used outside of the unit's schedule, and leave the unit out of later calls."""
            not_units.add(unit)
            with torch.set_grad_enabled(records):
                x = known[leaf] if leaf in known else self._full({leaf: params[leaf]}, {leaf: specs[leaf]})[leaf]
            return x if in_transform() else known.setdefault(leaf, x)  # what a transform returns ends with it

        shards = [x for name in units for leaf in apply.units[name] for x in tree.leaves(params[leaf])]
        memories = functools.cache(functools.partial(path_to, shards, apply.largest))
        placeholders = {}
        for name, unit in units.items():
            parts = iter([x if part is None else part for part, x in zip(unit.plan.slices, unit.shards, strict=True)])
            for leaf in apply.units[name]:
                x = params[leaf]
                full_leaf = tree.map(lambda _, parts=parts: next(parts), x)
                by_size = apply.are_units_by_size and not is_weight(x) and not apply.specs["params"][leaf].axes
                value = functools.partial(kept, name) if by_size else None
                if leaf in in_units:
                    memory = memories(x.dtype) if isinstance(x, Tensor) and x.requires_grad else None
                    placeholders[leaf] = OutsideUnit.like(
                        leaf, full_leaf.shape, full_leaf.dtype, here.device, f" of unit {name}", memory, unit=name,
                        value=value,
                    )  # fmt: skip
        calls = UnitCalls(UnitSchedule(here, units, self._options), shards)
        running = RunningUnits(calls, self._fill(units, params, kept), placeholders)
        result = apply.run(full, full_buffers, args, kwargs, running)
        calls.end()
        return result

    def _fill(self, units: Mapping[str, Unit], params: Any, kept: Callable[[str, str], Any]) -> Fill:
        """Return the function that makes the leaves of a unit of its gathered tensors."""
        structures = {name: tree.flatten([params[leaf] for leaf in self._apply.units[name]])[1] for name in units}

        def fill(name: str, tensors: Sequence[Tensor] | None) -> Sequence[Any]:
            if tensors is None:
                return [kept(name, leaf) for leaf in self._apply.units[name]]
            named = dict(zip(self._apply.units[name], tree.unflatten(structures[name], tensors), strict=True))
            return list(in_memory_order(named, self._apply.orders).values())

        return fill

    def _full(self, params: dict[str, Tensor], specs: Any) -> Any:
        shapes = {name: self._shapes[name] for name in params}
        return unshard(params, specs, self._axis, shapes=shapes, dtype=self._dtype, reduce_dtype=self._reduce_dtype)

    def _units(self, here: Region, params: Named, specs: Any, not_units: set[str]) -> dict[str, Unit]:
        """Return the leaves of each unit and their buckets, without units that have a leaf gathered along two dims."""
        out = {}
        for name, names in self._apply.units.items():
            if name in not_units:
                continue
            xs: list[Tensor] = []
            found: list[Route] = []
            for leaf in names:
                verb, shards = f"apply.unshard: params[{leaf!r}]", tree.leaves(params[leaf])
                parts, sizes = placements(verb, params[leaf], specs[leaf], self._shapes[leaf])
                found += routes("apply.unshard", here, {leaf: params[leaf]}, shards, parts, self._axis, sizes)
                xs += shards
            plan = plan_buckets(here, xs, found, self._dtype, self._reduce_dtype)
            if plan is not None:
                out[name] = Unit.from_shards(xs, plan)
        return out
