"""Submodules whose forward is a pure function on the parts of their parameters: the `replace=` of `defer`."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from fshard import tree
from fshard._core.region import axes_of_own_values, checker, region
from fshard.errors import ShardingError, fail, must_be, raise_all
from fshard.nn import Replacement
from fshard.spec import P, box_shape, describe, format_axes, local_box, matches, same_placement

from .module_leaves import Place, leaves_at, named_modules
from .stand_ins import Split, SplitParameter, StandIn

Replace = Mapping[Any, Replacement] | None  # by a glob of paths, or by a class
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True)
class Replaced:
    """The submodules that are replaced, by their first names, and their parameters that are split."""

    by: Mapping[str, Replacement]
    specs_in: Mapping[str, Mapping[str, P]]  # of each, the specs of its parameters, by their names in it
    splits: Mapping[str, Split]
    specs: Mapping[str, Mapping[str, P]]  # of all leaves, by kind and name
    unreplaced: Mapping[str, str]  # the submodules of a class that cannot be replaced, and why

    @staticmethod
    def from_module(module: nn.Module, replace: Replace, places: Sequence[Place]) -> Replaced:
        """Choose the submodules that the globs and classes match; the first of several that match one counts."""
        by, errors, by_class = _matched(module, {} if replace is None else replace)
        specs_in: dict[str, dict[str, P]] = {}
        unreplaced: dict[str, str] = {}
        for name, replacement in by.items():
            m = module.get_submodule(name)
            try:
                _check_module(m, replacement)
                specs_in[name] = _checked_specs(m, replacement)
            except ShardingError as e:
                if name in by_class:
                    unreplaced[name] = str(e).partition("\n")[0]
                else:
                    errors.append(ShardingError(f"defer: replace: {name!r} is a {type(m).__name__}: {e}"))
        names = by.keys() - unreplaced.keys()
        while more := {x: why for x in sorted(names & by_class) if (why := _why_not(module, x, names, places))}:
            unreplaced, names = unreplaced | more, names - more.keys()
        by = {name: replacement for name, replacement in by.items() if name in names}
        specs_in = {name: specs for name, specs in specs_in.items() if name in names}
        for name in by:
            errors += [fail(f"defer: replace: {name!r} is in {outer!r}, which is replaced too",
                            f"{by[outer]} computes all of {outer!r}", fix="replace one of them")
                       for outer in by if name.startswith(f"{outer}.")]  # fmt: skip
        raise_all(errors)
        specs, users = _specs_of_leaves(module, by, specs_in, places)
        leaves = leaves_at(places)
        splits = {
            leaf: Split(tuple(leaves["params"][leaf].shape), spec, *_users(leaf, users[leaf], by, places))
            for leaf, spec in specs.items() if spec.axes
        }  # fmt: skip
        of_all = {kind: {name: specs.get(name, P()) if kind == "params" else P() for name in named_}
                  for kind, named_ in leaves.items()}  # fmt: skip
        return Replaced(by, specs_in, splits, of_all, unreplaced)

    @property
    def features(self) -> dict[tuple[str, ...], set[int]]:
        """The axes of the dims that are split, and the global sizes of these dims."""
        out: dict[tuple[str, ...], set[int]] = {}
        for x in self.splits.values():
            for n, over in zip(x.shape, x.spec.parts(len(x.shape)), strict=True):
                if over:
                    out.setdefault(over, set()).add(n)
        return out

    def install(self, label: str, module: nn.Module) -> None:
        """Give the submodules of a copy of the module their functions."""
        for name, replacement in self.by.items():
            m = module.get_submodule(name)
            axes = {axis for spec in self.specs_in[name].values() for axis in spec.axes}
            m.forward = functools.partial(_run, f"{label}: {name!r}: {replacement}", replacement, axes, m)

    def remove(self, module: nn.Module) -> None:
        """Give the submodules of a copy of the module the forwards of their classes."""
        for name in self.by:
            m: Any = module.get_submodule(name)
            m.forward = functools.partial(type(m).forward, m)


def _matched(
    module: nn.Module, replace: Mapping[Any, Replacement]
) -> tuple[dict[str, Replacement], list[ShardingError], set[str]]:
    """Return the replacements by the first names of submodules, the errors of globs, and the names of classes' ones."""
    if not isinstance(replace, Mapping):
        raise must_be("defer: replace", "a dict of globs and replacements", replace,
                      '{"fc": fs.nn.column_linear("model")}')  # fmt: skip
    raise_all([must_be(f"defer: replace[{glob!r}]", "a Replacement", x, "fs.nn.column_linear(axis), or another one")
               for glob, x in replace.items() if not isinstance(x, Replacement)])  # fmt: skip
    chosen: dict[str, Replacement] = {}
    used, by_class = set[Any](), set[str]()
    first_names = {id(m): name for name, m in module.named_modules()}
    names = [prefix[:-1] for prefix, _ in named_modules(module) if prefix]
    for name in names:
        m = module.get_submodule(name)
        glob = next((g for g in replace if (isinstance(m, g) if isinstance(g, type) else
                     matches(name.split("."), g.split(".")))), None)  # fmt: skip
        if glob is None:
            continue
        used.add(glob)
        first = first_names[id(m)]
        by_class |= {first} if isinstance(glob, type) else set()
        if chosen.setdefault(first, replace[glob]) is not replace[glob]:
            raise fail(f"defer: replace: {first!r} and {name!r} are one module, and globs replace it by "
                       f"{chosen[first]} and by {replace[glob]}", fix="one replacement for all names of a module"
                       )  # fmt: skip
    errors = []
    for glob in replace:
        if glob not in used:
            fix = ("a glob of paths, as '**.embed'; an earlier glob may match all of its submodules" if names else
                   "torch.nn.Sequential(module) has one, '0'")  # fmt: skip
            errors.append(fail(f"defer: replace: {glob!r} matches no submodule", fix=fix,
                               near=_near(glob, names) or f"{type(module).__name__} has none"))  # fmt: skip
    return chosen, errors, by_class


def _near(glob: Any, names: Sequence[str]) -> str:
    """Return the names of submodules most like a glob, by their last parts, one for each of these."""
    by_last = {name.rpartition(".")[2]: name for name in reversed(names)}
    close = difflib.get_close_matches(str(glob).rpartition(".")[2], list(by_last), 3, 0.0)
    return ", ".join(by_last[last] for last in close)


def _check_module(m: nn.Module, replacement: Replacement) -> None:
    """Raise ShardingError, without the module's name, for a module that a replacement does not take."""
    classes = type(m).__mro__
    kinds: list[Any] = [c for t in replacement.takes for c in classes if t in (c, c.__name__)]
    if not kinds:
        taken = " and ".join(t if isinstance(t, str) else t.__name__ for t in replacement.takes)
        raise fail(f"{replacement} takes {taken}", fix="a narrower glob, or another fs.nn.Replacement")
    if all(type(m).forward is not kind.forward for kind in kinds) or "forward" in vars(m):
        raise fail(f"{replacement} computes the forward of {kinds[0].__name__}, and this one has its own",
                   fix="an fs.nn.Replacement for this class")  # fmt: skip
    for part in m.modules():
        if parametrize.is_parametrized(part):
            raise fail("it has parametrizations, which compute its parameters",
                       fix="do not replace it, or torch.nn.utils.parametrize.remove_parametrizations")  # fmt: skip
        if any(getattr(part, hooks) for hooks in _HOOKS):
            raise fail("it has hooks, which see, or compute, whole tensors", fix="remove them in the constructor")


def _why_not(module: nn.Module, name: str, replaced: Collection[str], places: Sequence[Place]) -> str | None:
    """Return why others may use the parameters of a submodule in full; None if only replaced ones have them."""
    if isinstance(module.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
        return "its parent computes with its parameters, and does not call it"
    if outer := next((outer for outer in replaced if name.startswith(f"{outer}.")), None):
        return f"it is in {outer!r}, which is replaced"
    leaves = {p.leaf for p in places if any(n.startswith(f"{name}.") for n in p.names)}
    others = (p.name for p in places if p.leaf in leaves
              and not any(n.startswith(f"{user}.") for n in p.names for user in replaced))  # fmt: skip
    return next((f"{other!r} is one of its parameters, in a module that is not replaced" for other in others), None)


def _checked_specs(m: nn.Module, replacement: Replacement) -> dict[str, P]:
    """Return the specs of a module's parameters by their names in it. Raises ShardingError without its name."""
    specs, params = replacement.specs(m), _parameters(m)
    if not isinstance(specs, Mapping):
        raise must_be(f"{replacement}: specs", "a function that returns a dict of parameters' names and specs", specs)
    for key, spec in specs.items():
        if key not in params:
            raise fail(f"{replacement} has a spec for {key!r}, and it has no such parameter", has=", ".join(params),
                       fix="specs of parameters, by their names in the module")  # fmt: skip
        if not isinstance(spec, P):
            raise must_be(f"{replacement}: the spec of {key!r}", "a P", spec)
        try:
            spec.parts(params[key].ndim)
        except ShardingError as e:
            raise ShardingError(f"{replacement}: {key!r}: {e}") from None
    return {key: specs.get(key, P()) for key in params}


def _parameters(m: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module by all their names in it, as it has them now."""
    return {f"{prefix}{key}": x for prefix, part in named_modules(m) for key, x in part._parameters.items()
            if x is not None}  # fmt: skip


def _specs_of_leaves(
    module: nn.Module, by: Mapping[str, Replacement], specs_in: Mapping[str, Mapping[str, P]], places: Sequence[Place]
) -> tuple[dict[str, P], dict[str, list[str]]]:
    """Return the spec of each leaf of a replaced module, and the names of the modules. Raises for ties that differ."""
    place_of = {id(p.value): p for p in places}
    specs: dict[str, P] = {}
    users: dict[str, list[str]] = {}
    errors = []
    for name, of_module in specs_in.items():
        for key, spec in of_module.items():
            place = place_of[id(module.get_parameter(f"{name}.{key}"))]
            leaf = place.leaf
            users.setdefault(leaf, []).append(name)
            if not same_placement(specs.setdefault(leaf, spec), spec, len(place.value.shape)):
                first = users[leaf][0]
                errors.append(fail(f"defer: replace: {leaf!r} is one tensor of {first!r} and {name!r}, placed in two "
                                   "ways", **{first: f"{specs[leaf]}, by {by[first]}", name: f"{spec}, by {by[name]}"},
                                   fix="replacements that place it in the same way: row_embedding and column_linear do"
                                   ))  # fmt: skip
    raise_all(errors)
    return specs, users


def _users(leaf: str, users: Sequence[str], by: Mapping[str, Replacement], places: Sequence[Place]) -> tuple[str, str]:
    """Return the replaced modules that have a leaf, and its names in others, as texts."""
    others = [name for p in places if p.leaf == leaf for name in p.names[:1]
              if not any(name.startswith(f"{user}.") for user in users)]  # fmt: skip
    return ", ".join(f"{user}: {by[user]}" for user in dict.fromkeys(users)), ", ".join(others)


def _run(label: str, replacement: Replacement, axes: set[str], m: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the function of a replaced module on this rank's parts of its parameters, which `axes` split."""
    here = region(label)
    for x in tree.leaves((args, kwargs)):
        if isinstance(x, Tensor) and replacement.input == "whole" and (split := axes_of_own_values(x) & axes):
            raise fail(f"{label}: its input varies over {' and '.join(map(repr, sorted(split)))}, which split its "
                       "parameters: each rank has another part of it", input=describe(x),
                       fix="split the batch over other axes; after a module with out='split', input='split'"
                       )  # fmt: skip
    leaves = _parameters(m)
    for key, part in leaves.items():
        if isinstance(part, SplitParameter):
            _check_part(label, part, here.sizes, here.coords)
            leaves[key] = part.part
    try:
        return replacement.forward(leaves, *args, of=m, **kwargs)
    except ShardingError as e:
        e.args = (f"{label}: {e}",) if label not in str(e) else e.args
        raise


def _check_part(label: str, x: SplitParameter, sizes: Mapping[str, int], coords: Mapping[str, int]) -> None:
    """Raise ShardingError for a leaf that is not this rank's part by the spec of the replacement."""
    spec = x.placed.spec
    if missing := [axis for axis in spec.axes if axis not in sizes]:
        raise fail(f"{label}: the mesh has no axis {missing[0]!r}", mesh=format_axes(sizes),
                   fix=f"use one of {list(sizes)}")  # fmt: skip
    expected = list(box_shape(local_box(x.placed.shape, spec, sizes, coords)))
    fix = 'place it by apply.specs["params"]; fs.unshard over other axes alone'
    if list(x.part.shape) != expected:
        raise fail(f"{label}: params[{x.leaf!r}] is {list(x.part.shape)} here, and not {expected}, this rank's part of "
                   f"{list(x.placed.shape)}", spec=spec, mesh=format_axes(sizes), fix=fix)  # fmt: skip
    if (types := checker()) is None or isinstance(x.part, StandIn):
        return
    if same := [a for a in spec.axes if sizes[a] > 1 and a not in types.info(x.part).type.varying]:
        raise fail(f"{label}: params[{x.leaf!r}] is the same on all ranks of {same[0]!r}, which is to split it",
                   spec=spec, mesh=format_axes(sizes), fix=fix)  # fmt: skip
