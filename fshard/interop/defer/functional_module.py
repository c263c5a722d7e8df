"""Any `nn.Module` as a pure function of its parameters and buffers: `Apply`."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fshard import tree
from fshard._comm import Axis, checker, in_region, region
from fshard._ops import differentiable_dtype
from fshard._torch_compat import FakeTensor, unwrapped, version_of
from fshard.collectives import psum, pvary
from fshard.errors import ShardingError, checked, fail, raise_all
from fshard.schedule.units import UnitOptions
from fshard.spec import describe, names_of

from .units import Placeholder, UnitForwards, UnshardedByUnit, leaves_of_units, shapes_of

Named = Mapping[str, Tensor]
Leaves = dict[str, dict[str, Tensor]]  # by kind ("params", "buffers") and name


class Apply:
    """A module's forward as a pure function: `apply(params, buffers, *args, **kwargs)`.

        params, buffers: {dotted name: tensor}, whole leaves; a tied leaf once, by the name that comes first

    The module is a skeleton: its own parameters and buffers are never read and may be on meta. All changes that
    `forward` makes to the module (an attribute, an entry of a list or dict, a hook) are undone after each call. Calls
    that run at the same time, as those of simulated ranks do, each use a copy of the module, which shares its tensors.

    A float buffer is invariant over the mesh, like a parameter, and needs `unshard` (or `pvary`) too:

        apply(fs.unshard(params, specs, "data"), fs.unshard(buffers, P(), "data"), x)

    A buffer that `forward` updates is returned by `with_buffers`; a plain call, which would lose it, is an error. A
    buffer that is not persistent is a cache (the frequencies of dynamic rope) and no state: a plain call may lose it.

    Dropout draws from torch's generator, which is an error in a region: use `.eval()`, or rates of 0. Hugging Face's
    `gradient_checkpointing` is an error: `torch.utils.checkpoint` fails under torch.func, and elsewhere would recompute
    with the skeleton's own tensors; use `fs.remat`. An autograd.Function in the module needs a `setup_context`, or
    torch.func refuses it (as Bloom's GeLU).

    Args:
        ties: tied name -> the name of the leaf it uses, beyond the ties of `module` itself.
        whole: leaves whose initial values are computed in full, and their bytes; for information.
        transient: names of buffers that are not persistent, beyond those of `module` itself.
        units: names of the submodules that `unshard` gathers one by one.

    >>> apply = Apply(torch.nn.Linear(2, 3, device="meta"))
    >>> apply({"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, {}, torch.ones(1, 2))
    tensor([[2., 2., 2.]])

    `frozen` has the names of the parameters with `requires_grad=False`: differentiate the others.

    Raises ShardingError listing every name that is missing or unexpected and every leaf with a wrong number of dims.
    """

    def __init__(
        self, module: nn.Module, ties: Mapping[str, str] | None = None, whole: Mapping[str, int] | None = None,
        transient: frozenset[str] = frozenset(), units: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.module, self.ties, self.whole = module, dict(ties or {}), dict(whole or {})
        self._places = places_of(module, self.ties)
        self.ties.update((p.name, p.leaf) for p in self._places if p.name != p.leaf)
        self.transient = transient | {p.leaf for p in self._places if p.transient}
        self._leaves = leaves_at(self._places)  # of the skeleton, for their shapes
        self.shapes = shapes_of(self._leaves["params"])
        self.frozen = frozenset(k for k, x in self._leaves["params"].items() if not x.requires_grad)
        self.units = leaves_of_units(module, units, self._places)
        self._free_copies: deque[_ModuleCopy] = deque()
        self._values_compared = False

    def __call__(self, params: Named, buffers: Named, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `forward`. Raises ShardingError if it changed a buffer, which would be lost."""
        self.check_names(params, buffers)
        out, _, changed = self.run(params, buffers, args, kwargs)
        self.refuse_changed(changed)
        return out

    def refuse_changed(self, changed: Sequence[str]) -> None:
        """Raise ShardingError if `forward` has changed these buffers."""
        if changed:
            raise fail(f"{self!r}: forward changed buffers, and a plain call returns none: {', '.join(changed)}",
                       fix="out, buffers = apply.with_buffers(params, buffers, ...), or apply.eval()")  # fmt: skip

    def with_buffers(
        self, params: Named, buffers: Named, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return the result of `forward` and the buffers after it; the arguments are not changed.

        On a mesh each rank updates the buffers by its own batch, so they vary: see `batch_norm_over` for batch norms.
        To have one value on all ranks, take the mean, and for counters, which are equal on every rank, the maximum:

            fs.tree.map(lambda b: fs.pmean(b, "data") if b.is_floating_point() else fs.pmax(b, "data"), new)

        >>> norm = torch.nn.BatchNorm1d(1, affine=False, momentum=0.5)
        >>> before = dict(norm.named_buffers())
        >>> _, after = Apply(norm).with_buffers({}, before, torch.tensor([[1.0], [3.0]]))
        >>> after["running_mean"], before["running_mean"]
        (tensor([1.]), tensor([0.]))
        """
        self.check_names(params, buffers)
        out, after, _ = self.run(params, buffers, args, kwargs)
        return out, after

    def eval(self) -> Apply:
        """Return the function in evaluation mode: no dropout, batch norms by their running statistics."""
        return self.train(False)

    def train(self, mode: bool = True) -> Apply:
        """Return the function in training mode, as constructors leave modules."""
        return self._with(_deepcopy(self.module).train(mode))

    @checked
    def batch_norm_over(self, axis: Axis) -> Apply:
        """Return the function whose batch norms take the statistics of the examples on all ranks of `axis`.

            in train mode: x [B@axis, C, *] -> [B@axis, C, *]     cost: two psum of C numbers each

        Without it a batch norm in train mode is an error where its input varies, since statistics of each rank's own
        examples would change with the mesh. `None` takes those all the same, as torch's DistributedDataParallel does:
        for ranks that train models of their own. The running statistics are those of all ranks too.

        An axis that splits the channels, and so the norm's leaves, needs nothing: each rank has all examples of its
        channels. To name it here is an error when the norm runs, as is an input that torch refuses: one with other dims
        or channels than the norm's, or in train mode with one value of each channel on all ranks together.

        >>> apply = Apply(torch.nn.BatchNorm1d(3, device="meta")).batch_norm_over("data")
        """
        module = _deepcopy(self.module)
        for name, m in _batch_norms(module):
            m.forward = functools.partial(_batch_norm_over, axis, f"{self!r}: {repr(name) if name else 'it'}", m)
        return self._with(module)

    @checked
    def unshard(
        self, specs: Any, axis: Axis, *, remat: bool = False, release: bool = True, prefetch: int = 1,
        dtype: torch.dtype | None = None, reduce_dtype: torch.dtype | None = None, shapes: Any = None,
    ) -> UnshardedByUnit:  # fmt: skip
        """Return the function of shards, which gathers the leaves of each unit just before its forward and frees them.

            f(params {by specs}, buffers {I}, *args, **kwargs)      buffers are replicated

        Its numbers are those of this definition, `how` being `dtype`, `reduce_dtype` and `shapes`:

            apply(fs.unshard(params, specs, axis, **how), fs.unshard(buffers, P(), axis), *args, **kwargs)

        `fs.defer(constructor, units=...)` chooses the units. `prefetch` of them are gathered while one computes, in
        forward those defined next, in backward those called before; gradients are summed over the ranks while the
        units before compute theirs. Leaves outside of units, or used by several, are gathered once and kept: without
        units, all leaves. A leaf that is used outside of its unit's forward is an error that names both.

        All ranks must call the same units in the same order. In a compiled program, and under a transform of
        torch.func, it is the definition: same numbers, without release. So is a unit with a leaf that is gathered along
        two dims.

        Args:
            specs: of the params, or a prefix.
            release: free gathered leaves after use and gather them again in backward; if False, keep them.
            remat: keep only the arguments of each unit (of the outermost, if units are nested), and recompute it in
                backward. A cache that the module fills as it runs would be filled twice: switch it off (`use_cache`).
            prefetch: number of units to gather ahead; 0 gathers when needed.
            dtype, reduce_dtype: as for `fs.unshard`.
            shapes: as for `fs.unshard`; by default the shapes of the module's own parameters.

        Transfers, for each dtype of a unit and each of its calls: a gather in forward, one in backward if a gradient
        needs its leaves, and one sum. Frozen leaves have no gradient: no buffer and no sum. A unit that is called again
        and again, as ALBERT's, is gathered for the first two calls and once in backward.

        >>> apply, tree = defer(lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), units="*")
        >>> apply.units
        {'0': ('0.weight', '0.bias'), '1': ('1.weight', '1.bias')}
        >>> mesh = make_mesh(data=2)
        >>> specs = fully_shard(P(), tree["params"], axis="data")
        >>> f = shard_map(lambda p, x: apply.unshard(specs, "data")(p, {}, x), mesh=mesh,
        ...               in_specs=(specs, P("data")), out_specs=P("data"))
        >>> f(materialize(tree["params"], specs, mesh, key=key(0)), torch.zeros(4, 8))
        f32[4@data, 8]

        Raises ShardingError, when the result is called, for the errors of `fs.unshard`, and inside
        torch.utils.checkpoint, which does not know that leaves are freed.
        """
        if prefetch < 0:
            raise fail(f"apply.unshard: prefetch={prefetch}", fix="0 or more")
        if remat and not self.units:
            raise fail("apply.unshard: remat=True recomputes each unit, and there are none",
                       fix="fs.defer(constructor, units=...); or fs.remat around the call")  # fmt: skip
        options = UnitOptions(release, remat, prefetch)
        return UnshardedByUnit(self, specs, axis, options, dtype, reduce_dtype, shapes)

    def _with(self, module: nn.Module) -> Apply:
        """Return the function of a changed copy of the module."""
        return Apply(module, self.ties, self.whole, self.transient, tuple(self.units))

    def __repr__(self) -> str:
        return f"Apply({type(self.module).__name__})"

    def run(
        self, params: Named, buffers: Named, args: tuple[Any, ...], kwargs: dict[str, Any], calls: Any = None,
        in_units: Named | None = None,
    ) -> tuple[Any, dict[str, Tensor], list[str]]:  # fmt: skip
        """Return the result of forward, the buffers after it, and the names of the buffers that it changed.

        With `calls` (`UnitCalls`) the units run by it, and `in_units` has placeholders for their leaves.
        """
        copies = {name: x.clone() for name, x in buffers.items()}  # forward may overwrite them
        leaves: dict[str, Named] = {"params": {**params, **(in_units or {})}, "buffers": copies}
        if torch.compiler.is_dynamo_compiling():  # dynamo traces one thread, and supports functional_call
            named = {p.name: leaves[p.kind][p.leaf] for p in self._places}
            out = torch.func.functional_call(self.module, named, args, kwargs, tie_weights=False)
            return out, {**copies, **{p.leaf: named[p.name] for p in self._places if p.kind == "buffers"}}, []
        versions = {name: _version(x) for name, x in copies.items()}
        mine = self._take_copy()
        for p in mine.places:
            p.holder[p.key] = leaves[p.kind][p.leaf]
        mine.units.calls, mine.units.keep = calls, functools.partial(self._keep_unit, mine)
        try:
            out = mine.module(*args, **kwargs)
        except Exception as e:  # the state of the copy is unknown, so the copy is not used again
            self._explain(e, params, buffers, (args, kwargs))
            raise
        after = dict(copies)
        for p in mine.places:
            x = p.holder.get(p.key)
            if p.kind == "buffers" and x is not None and x is not copies[p.leaf]:
                after[p.leaf] = x
        mine.contents.restore()
        self._give_back(mine)
        state = {name: x for name, x in after.items() if name not in self.transient}
        changed = [name for name, x in state.items() if x is not copies[name] or _version(x) != versions[name]]
        if not changed and not self._values_compared:  # torch's batch_norm does not count all its writes as versions
            changed = [name for name, x in state.items() if not _equal(x, buffers[name])]
            self._values_compared = not changed
        return out, after, changed

    def check_names(self, params: Named, buffers: Named) -> None:
        """Raise ShardingError listing every name that is missing or unexpected, and every wrong number of dims."""
        errors: list[ShardingError] = []
        for kind, named in (("params", params), ("buffers", buffers)):
            expected = self._leaves[kind]
            for name in expected.keys() - named.keys():
                errors.append(fail(f"{self!r}: {kind}[{name!r}] is missing"))
            for name in named.keys() - expected.keys():
                other = "buffers" if kind == "params" else "params"
                fix = f"leave it out: it is tied to {self.ties[name]!r}" if name in self.ties else \
                    f"pass it in {other}" if name in self._leaves[other] else "leave it out"  # fmt: skip
                errors.append(fail(f"{self!r}: {kind}[{name!r}] is not a leaf of the module", fix=fix))
            for name, x in named.items():
                if not isinstance(x, Tensor):
                    fix = "names are flat: 'a.b', not ['a']['b']" if isinstance(x, Mapping) else \
                        "call it inside shard_map, where leaves are tensors"  # fmt: skip
                    errors.append(fail(f"{self!r}: {kind}[{name!r}] is a {type(x).__name__}, not a tensor", fix=fix))
                elif name in expected and x.ndim != expected[name].ndim:
                    what = f"{self!r}: {kind}[{name!r}] has {x.ndim} dims, not {expected[name].ndim}"
                    errors.append(fail(what, argument=describe(x.dtype, x.shape),
                                       module=describe(x.dtype, expected[name].shape)))  # fmt: skip
        raise_all(sorted(errors, key=str))

    def _explain(self, e: Exception, params: Named, buffers: Named, arguments: Any) -> None:
        """Add to an error of forward the names of the leaves that were not unsharded."""
        for name, x in params.items():
            expected = self._leaves["params"][name].shape
            if x.shape != expected:
                shapes = f"params[{name!r}] is {list(x.shape)}, and {list(expected)} in the module"
                e.add_note(f"{shapes}: fs.unshard gathers whole leaves")
        types = checker()
        if types is None or not isinstance(e, ShardingError) or "invariant" not in str(e):
            return
        tensors = [x for x in tree.leaves((params, buffers, arguments)) if isinstance(x, Tensor)]
        floats = {name: types.info(x).type for name, x in params.items() if differentiable_dtype(x)}
        for axis in sorted(set[str]().union(*(types.info(x).type.varying for x in tensors))):
            names = [name for name, type_ in floats.items() if axis in type_.invariant]
            if names:
                rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
                what = f"in {self!r}, params[{names[0]!r}]{rest} of its params are invariant over {axis!r}"
                e.args = (f'{e}\n  {what}\n  fix: params = fs.unshard(params, its specs, "{axis}")',)

    def _take_copy(self) -> _ModuleCopy:
        """Return a copy of the module that no other call is using."""
        try:
            return self._free_copies.pop()
        except IndexError:
            for name, m in self.module.named_modules():
                if m.training and getattr(m, "gradient_checkpointing", False) is True:
                    raise fail(f"{self!r}: gradient checkpointing is on in {name or type(m).__name__!r}",
                               "torch.utils.checkpoint would recompute with the skeleton's tensors, not with params",
                               fix="switch it off, and wrap the recomputed call in fs.remat") from None  # fmt: skip
            module = _deepcopy(self.module)
            for name, norm in _batch_norms(module):
                if "forward" in vars(norm):  # that of `batch_norm_over`
                    continue
                norm.forward = functools.partial(
                    _batch_norm_of_one_rank, f"{self!r}: {repr(name) if name else 'it'}", norm
                )
            return _ModuleCopy(module, places_of(module, self.ties), self.units)

    def _give_back(self, mine: _ModuleCopy) -> None:
        mine.units.calls, mine.units.keep = None, str
        self._free_copies.append(mine)

    def _keep_unit(self, mine: _ModuleCopy, name: str) -> Callable[[Sequence[Tensor], Any, Any, Any], None]:
        """Return a function that repeats a call of a unit, once, with the present values of the other leaves in it."""
        modules = list(mine.module.get_submodule(name).modules())
        holders = {id(m._parameters) for m in modules} | {id(m._buffers) for m in modules}
        own = set(self.units[name])
        now: dict[str, Tensor] = {}
        for p in mine.places:
            if id(p.holder) in holders and not (p.kind == "params" and p.leaf in own):
                x = p.holder[p.key]
                if p.kind == "buffers":
                    now[p.name] = x.clone()  # forward may update it
                else:
                    now[p.name] = x if isinstance(x, Placeholder) else x.detach().requires_grad_(x.requires_grad)

        def repeat(leaves: Sequence[Tensor], args: Any, kwargs: Any, calls: Any) -> None:
            copy = self._take_copy()
            before = copy.unit_contents(name)
            for p in copy.places:
                if p.name in now:
                    p.holder[p.key] = now[p.name]
            copy.units.calls = calls
            try:
                copy.units.run(name, leaves, args, kwargs)
            finally:
                before.restore()
                self._give_back(copy)

        return repeat


# --- leaves of a module ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """One entry of a module's parameters or buffers: its dotted name, and the name of the leaf it uses."""

    holder: dict[str, Any]
    key: str
    name: str
    leaf: str
    kind: str  # "params" or "buffers"
    transient: bool


def places_of(module: nn.Module, ties: Mapping[str, str] | None = None) -> list[Place]:
    """Return the places of all parameters and buffers. Places of one tensor use one leaf, by the first name."""
    ties = ties or {}
    first: dict[int, str] = {}
    places = []
    for prefix, m in module.named_modules(remove_duplicate=False):
        for kind, holder in (("params", m._parameters), ("buffers", m._buffers)):
            for key, x in holder.items():
                if x is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    own = first.setdefault(id(x), name)
                    leaf = ties.get(name, ties.get(own, own))
                    places.append(Place(holder, key, name, leaf, kind, key in m._non_persistent_buffers_set))
    return places


def leaves_at(places: Sequence[Place]) -> Leaves:
    leaves: Leaves = {"params": {}, "buffers": {}}
    for p in places:
        leaves[p.kind].setdefault(p.leaf, p.holder[p.key])
    return leaves


# --- batch norms ----------------------------------------------------------------------------------------------

_BATCH_NORMS: dict[type[nn.Module], Sequence[int]] = {  # kind -> the numbers of dims that its input may have
    nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,), nn.SyncBatchNorm: range(2, 64)
}  # fmt: skip


def _batch_norms(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return torch's own batch norms with their names, and none whose forward is another."""
    own = {kind.forward for kind in _BATCH_NORMS}
    return [(name, m) for name, m in module.named_modules()
            if any(isinstance(m, kind) for kind in _BATCH_NORMS) and type(m).forward in own]  # fmt: skip


def _axes_of_own_values(x: Tensor) -> frozenset[str]:
    """Return the axes over which ranks have values of their own, not copies of one; none in calls without checks."""
    types = checker()
    if types is None:
        return frozenset()
    type_, history = types.info(x).type, types.info(x).history
    return frozenset(type_.varying - history.copies - {g.axis for g in history.gathers})


def _axes_of_channels(m: Any) -> frozenset[str]:
    """Return the axes that split the channels of a batch norm: all its leaves but the counter vary over them."""
    leaves = [x for x in (m.weight, m.bias, m.running_mean, m.running_var) if x is not None]
    return frozenset[str].intersection(*map(_axes_of_own_values, leaves)) if leaves else frozenset()


def _batch_norm_of_one_rank(name: str, m: Any, x: Tensor) -> Tensor:
    """Run a batch norm. Raise ShardingError if it would take the statistics of one rank's examples."""
    axes: frozenset[str] = frozenset()
    if m.training or m.running_mean is None:
        if not isinstance(m, nn.SyncBatchNorm):
            axes = _axes_of_own_values(x) - _axes_of_channels(m)
        elif in_region():  # its process group is none of the mesh's
            axes = frozenset(a for a, n in region().sizes.items() if n > 1)
    if not axes:
        return type(m).forward(m, x)  # type: ignore[no-any-return]
    kind = type(m).__name__
    state = "in train mode" if m.training else "without running statistics"
    why = ("it would take the statistics of all processes, whatever the mesh; on a simulated mesh, of each rank alone"
           if isinstance(m, nn.SyncBatchNorm) else
           f"its input varies over {' and '.join(map(repr, sorted(axes)))}: the statistics of each rank's own examples "
           "change with the mesh")  # fmt: skip
    batch = axes - _axes_of_channels(m)
    over = "the axes that split the batch" if len(batch) > 1 else f'"{min(batch)}"' if batch else "None"
    raise fail(f"{name} is a {kind} {state}", why,
               fix=f"apply = apply.batch_norm_over({over}): the statistics of all examples; or apply.eval(); or\n"
                   "       apply.batch_norm_over(None), if each rank has channels or a model of its own")  # fmt: skip


def _batch_norm_over(axis: Axis, name: str, m: Any, x: Tensor) -> Tensor:
    """Run a batch norm; in train mode with the mean and the variance of the examples on all ranks of `axis`."""
    if axis is None or not (m.training or m.running_mean is None):
        return nn.BatchNorm1d.forward(m, x)  # that of all kinds but SyncBatchNorm's, which uses a process group
    name = f"{name} is a {type(m).__name__}"
    if split := sorted(_axes_of_channels(m) & set(names_of(axis))):
        raise fail(f"{name} whose leaves vary over {split[0]!r}: batch_norm_over({axis!r}) would take the mean over "
                   "different channels", fix="leave that axis out: each rank has all examples of its channels; "
                   "for no axis at all, leave out batch_norm_over")  # fmt: skip
    if x.ndim not in next(ndims for kind, ndims in _BATCH_NORMS.items() if isinstance(m, kind)):
        raise fail(f"{name}, and its input has {x.ndim} dims", input=describe(x.dtype, x.shape))
    for key in ("weight", "bias", "running_mean", "running_var"):
        leaf = getattr(m, key)
        if leaf is not None and len(leaf) != x.shape[1]:
            raise fail(f"{name} whose {key} has {len(leaf)} channels, and its input has {x.shape[1]}",
                       input=describe(x.dtype, x.shape))  # fmt: skip
    dims, shape = [d for d in range(x.ndim) if d != 1], [1, -1] + [1] * (x.ndim - 2)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    values = x.numel() // max(1, x.shape[1])  # of each channel on this rank
    count = torch.tensor(values, dtype=wide.dtype, device=x.device)
    total, count = psum((wide.sum(dims), count), axis)
    if values <= 1 and _equal(count, torch.ones_like(count), unknown=False):  # read only where so few are possible
        raise fail(f"{name}, and all ranks of {axis!r} together have one value of each channel: it has no variance",
                   input=describe(x.dtype, x.shape), fix="a larger batch, or apply.eval()")  # fmt: skip
    mean = total / count
    centred = wide - pvary(mean, axis).view(shape)
    variance = psum(centred.square().sum(dims), axis) / count
    y = centred * pvary(variance + m.eps, axis).rsqrt().view(shape)
    if m.weight is not None:
        y = y * m.weight.view(shape) + m.bias.view(shape)
    if m.training and m.track_running_stats and m.running_mean is not None:
        rate: Any = m.momentum or 0.0
        if m.num_batches_tracked is not None:
            m.num_batches_tracked.add_(1)
            rate = m.momentum if m.momentum is not None else 1 / m.num_batches_tracked.to(wide.dtype)
        unbiased = variance * (count / (count - 1))
        for key, new in (("running_mean", mean), ("running_var", unbiased)):
            old = getattr(m, key)
            setattr(m, key, (old + rate * (new.detach() - old)).to(old.dtype))
    out: Tensor = y.to(x.dtype)
    return out


# --- copies of a module ---------------------------------------------------------------------------------------


class _Contents:
    """The contents of all containers that a module refers to, to be restored."""

    def __init__(self, module: nn.Module) -> None:
        containers: list[Any] = [x for x in _reachable(module) if isinstance(x, (dict, list, set))]
        self._empty = [x for x in containers if not x]  # nearly all: dicts of hooks
        self._contents = [(x, copy.copy(x)) for x in containers if x]

    def restore(self) -> None:
        if any(map(len, self._empty)):
            for x in self._empty:
                x.clear()
        for x, before in self._contents:
            if not _same_objects(x, before):
                x.clear()
                x.extend(before) if isinstance(x, list) else x.update(before)


class _ModuleCopy:
    """A copy of a module, used by one call at a time, and the contents of all its containers."""

    def __init__(self, module: nn.Module, places: list[Place], units: Mapping[str, Sequence[str]]) -> None:
        self.module, self.places = module, places
        self.units = UnitForwards(module, units, places)
        self.contents = _Contents(module)
        self._unit_contents: dict[str, _Contents] = {}

    def unit_contents(self, name: str) -> _Contents:
        """Return the contents of the containers of a unit, before anything in them is changed."""
        if name not in self._unit_contents:
            self._unit_contents[name] = _Contents(self.module.get_submodule(name))
        return self._unit_contents[name]


def _same_objects(x: Any, before: Any) -> bool:
    """Return whether a container has the same objects as before."""
    if isinstance(x, set):
        return bool(x == before)
    pair = (x.values(), before.values()) if isinstance(x, dict) else (x, before)
    return len(x) == len(before) and all(map(is_, *pair))


def _deepcopy(module: nn.Module) -> Any:
    """Copy a module, but share its tensors."""
    memo = {id(x): x for x in _reachable(module) if isinstance(x, Tensor)}
    try:
        return copy.deepcopy(module, memo)
    except Exception as e:
        raise fail(
            f"{type(module).__name__}: cannot be copied, and each rank of a simulated mesh needs its own",
            f"{type(e).__name__}: {e}",
            fix="keep objects that copy.deepcopy refuses out of the module",
        ) from e


def _reachable(module: nn.Module) -> Iterator[Any]:
    """Yield the objects that a module refers to, directly or not: attributes, containers, tensors."""
    pending: list[Any] = [module]
    seen: dict[int, Any] = {}
    while pending:
        x = pending.pop()
        if id(x) in seen or isinstance(x, (str, int, float, type, FunctionType, ModuleType)):
            continue
        seen[id(x)] = x
        yield x
        if isinstance(x, Tensor):
            continue
        if isinstance(x, Mapping):
            pending += x.values()
        elif isinstance(x, (list, tuple, set, frozenset, deque)):
            pending += x
        elif isinstance(x, MethodType):
            pending.append(x.__self__)
        elif isinstance(x, functools.partial):
            pending += [x.func, *x.args, x.keywords]
        if hasattr(x, "__dict__"):
            pending.append(x.__dict__)


def _version(x: Tensor) -> int:
    return version_of(unwrapped(x))


def _equal(x: Tensor, y: Tensor, unknown: bool = True) -> bool:
    """Return whether two tensors have the same values; `unknown` for tensors without values."""
    x, y = unwrapped(x.detach()), unwrapped(y.detach())
    if x is y:
        return True
    if x.is_meta or isinstance(x, FakeTensor):
        return unknown
    return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())  # NaN equals NaN
