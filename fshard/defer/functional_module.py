"""Any `nn.Module` as a pure function of its parameters and buffers: `Apply`."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fshard import tree
from fshard._core.ops import differentiable_dtype
from fshard._core.region import checker, has_values, in_region
from fshard._core.torch import in_transform, unwrapped, version_of
from fshard._core.weight import Leaf, Weight, is_weight
from fshard.errors import ShardingError, checked, fail, join_limited, no_attribute, raise_all
from fshard.random import check_key
from fshard.schedule.options import BackwardPrefetch, Release
from fshard.schedule.units import UnitOptions
from fshard.spec import Axis, describe, format_tensor

from . import refusals
from .batch_draws import SplitBatch, draws_of
from .batch_statistics import UNSET, BatchStatistics, without_process_group
from .draws import Draws
from .module_copy import ModuleCopy, copy_module
from .module_leaves import Named, in_memory_order, leaves_at, memory_orders, places_of, tensors_of
from .probe import fake_like
from .references import Outside, Seen, reachable
from .replaced import Replace, Replaced
from .stand_ins import BetweenCalls, adapted_as, detached, in_module
from .units import Fill, Pure, RunningUnits, Units, UnshardedByUnit, choose_units, leaves_of_units, shapes_of

# Attributes of modules, and the expressions here, of `apply, tree = fs.defer(constructor)`.
_NAMES_ELSEWHERE = {
    "parameters": 'tree["params"], placed by fs.materialize', "named_parameters": 'tree["params"]',
    "buffers": 'tree["buffers"]', "named_buffers": 'tree["buffers"]',
    "state_dict": "fs.state_dict.gather", "load_state_dict": "fs.state_dict.read, and fs.materialize",
    "generate": "fs.hf.generate(apply, params, buffers, ids, new=20)", "forward": "apply(params, buffers, x)",
    "to": "fs.materialize(tree, specs, mesh, key=key), on the devices of the mesh", "cuda": "make_mesh(device='cuda')",
    "half": "fs.Policy(compute=torch.float16)", "bfloat16": "fs.Policy(compute=torch.bfloat16)",
    "zero_grad": "not needed: fs.value_and_grad returns new gradients", "requires_grad_": "fs.partition",
}  # fmt: skip
_ASSIGNED = re.compile(r"cannot assign '.*' as parameter '(\w+)'")  # torch's error


class Apply(Pure):
    """A module's forward as a pure function: `apply(params, buffers, *args, **kwargs)`.

        params, buffers: {dotted name: tensor}, full leaves; a tied leaf once, by the name that comes first

    The module is a skeleton, whose parameters and buffers, which may be on meta, are never read. A call takes a copy of
    it that no other call uses, since simulated ranks call at the same time, and puts its leaves, and clones of its
    buffers, in their places. Copies share tensors; functions of the module (a lambda, a hook) are copied with it.

    In forward draws are by a key, see `with_key`. A write to a parameter (`self.weight.data.clamp_(...)`,
    `nn.Embedding(max_norm=)`), and a tensor stored outside of the module or read by a global name, are errors.

    After forward all changes that it made to the module (an attribute, a hook) are undone. `with_buffers` returns the
    updated buffers; a plain call may lose only those that are not persistent, a cache (the frequencies of rope).

    In backward the module has no leaves: a hook that reads one then, and `torch.utils.checkpoint` in a call that is
    differentiated, are errors; use `fs.remat` around the call, or `unshard(remat=True)`.

    A float buffer is invariant over the mesh, like a parameter, and needs `fs.unshard(buffers, P(), "data")` too.

    Args:
        ties: tied name -> the name of the leaf it uses, beyond the ties of `module` itself.
        whole: leaves whose initial values are computed in full, and their bytes; for information.
        transient: names of buffers that are not persistent, beyond the ones of `module` itself.
        units: the submodules that `unshard` gathers one by one, as for `fs.defer`.
        replace: the submodules that are pure functions on shards, as for `fs.defer`.
        outside: the objects that functions of the module capture and that are not of the module.

    >>> apply = Apply(torch.nn.Linear(2, 3, device="meta"))
    >>> apply({"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, {}, torch.ones(1, 2))
    tensor([[2., 2., 2.]])

    `frozen` has the names of the parameters with `requires_grad=False`: differentiate the others. `specs` has the spec
    of each leaf, `{"params": {name: P}, "buffers": {name: P}}`: as its replacement places it, else P(). `unreplaced`
    has the reasons for submodules of a class in `replace` that are left.

    Raises ShardingError listing every name that is missing or unexpected and every wrong number of dims.
    """

    def __init__(
        self, module: nn.Module, ties: Mapping[str, str] | None = None, whole: Mapping[str, int] | None = None,
        transient: frozenset[str] = frozenset(), units: Units = None, replace: Replace = None,
        outside: Outside | None = None,
    ) -> None:  # fmt: skip
        self.module, self.ties, self.whole = module, dict(ties or {}), dict(whole or {})
        self._outside = Outside(module, module) if outside is None else outside
        self._places = places_of(module, self.ties)
        self.ties.update((name, p.leaf) for p in self._places for name in p.names if name != p.leaf)
        self.transient = transient | {p.leaf for p in self._places if p.transient}
        self._leaves = leaves_at(self._places)  # of the skeleton, for their shapes
        self.shapes, self.orders = shapes_of(self._leaves["params"]), memory_orders(self._leaves)
        self.largest = max([x.numel() for x in self._leaves["params"].values()], default=0)
        self.frozen = frozenset(k for k, x in self._leaves["params"].items() if not x.requires_grad)
        self._chosen, self.are_units_by_size = units, isinstance(units, int)
        self.units = leaves_of_units(module, choose_units(module, units), self._places)
        self._replaced = Replaced.from_module(module, replace, self._places)
        self.specs, self.unreplaced = self._replaced.specs, self._replaced.unreplaced
        self._free_copies: dict[int, list[ModuleCopy]] = {}  # by thread: see `_take_copy`
        self._done: set[str] = set()  # the checks that only the first call makes; shared with copies, as the others are
        self._key: Tensor | None = None
        self._split_batch = SplitBatch(None, 0, True, is_stated=False)
        self._norms_over: Axis = UNSET
        self._is_sparse = any(getattr(m, "sparse", False) is True for m in module.modules())
        self._forward_has_key = "key" in inspect.signature(module.forward).parameters

    def _run(self, params: Named, buffers: Named, args: Any, kwargs: Any) -> Any:
        apply, kwargs = self.split_key(kwargs)
        apply.check_names(params, buffers)
        apply._refuse_parts(params, 2)
        return apply.run(params, buffers, args, kwargs)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise no_attribute("an Apply", name, self, _NAMES_ELSEWHERE)

    def module_leaf(self, path: tree.Path, ndim: int) -> Leaf:
        """Describe a parameter for `fs.lora`, which is passed this function as `of`: its module, and its layout."""
        name = tree.dotted(path)
        if name not in self._adapted_as:
            raise fail(f"{self!r}: {name!r} is not a parameter of the module", fix='pass tree["params"] of fs.defer')
        return self._adapted_as[name]

    @functools.cached_property
    def _adapted_as(self) -> dict[str, Leaf]:
        return adapted_as(self.module, self._places)

    def refuse_changed(self, changed: Sequence[str]) -> None:
        """Raise ShardingError if `forward` has changed these buffers."""
        if changed:
            raise fail(f"{self!r}: forward changed buffers, and a plain call returns none: {join_limited(changed, 3)}",
                       fix="out, buffers = apply.with_buffers(params, buffers, ...), or apply.eval()")  # fmt: skip

    @checked
    def eval(self) -> Apply:
        """Return the function in evaluation mode: no dropout, batch norms by their running statistics."""
        return self.train(False)

    @checked
    def train(self, mode: bool = True) -> Apply:
        """Return the function in training mode, as constructors leave modules."""
        module = copy_module(self.module, self._outside).train(mode)
        other = Apply(module, self.ties, self.whole, self.transient, self._chosen, self._replaced.by, self._outside)
        other._key, other._norms_over, other.unreplaced = self._key, self._norms_over, self.unreplaced
        other._split_batch = replace(self._split_batch, probed={})  # in another mode forward makes other draws
        return other

    @checked
    def batch_norm_over(self, axis: Axis) -> Apply:
        """Return the function whose batch norms take the statistics of the examples on all ranks of `axis`.

            in train mode: x [B@axis, C, *] -> [B@axis, C, *]     cost: two psum of C numbers each

        It applies to each `F.batch_norm`, and to the running statistics of instance norms. Without it a batch norm in
        train mode is an error where its input varies. `None` takes the statistics of each rank's examples, as torch's
        DistributedDataParallel does. The running ones are of all ranks.

        An axis that splits the channels, and so the norm's leaves, needs nothing; to name it here is an error.

        >>> apply = Apply(torch.nn.BatchNorm1d(3, device="meta")).batch_norm_over("data")
        """
        return self._with(_norms_over=axis)

    @checked
    def unshard(
        self, specs: Any, axis: Axis, *, remat: bool = False, release: Release = True, prefetch: int = 1,
        backward_prefetch: BackwardPrefetch = None, dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None, shapes: Any = None,
    ) -> UnshardedByUnit:  # fmt: skip
        """Return the function of shards, which gathers the leaves of each unit just before its forward and frees them.

            f(params {by specs}, buffers {I}, *args, **kwargs)      buffers are replicated

        Its numbers are as by `apply(fs.unshard(params, specs, axis, **how), fs.unshard(buffers, P(), axis), *args)`,
        `how` being `dtype`, `reduce_dtype` and `shapes`.

        `fs.defer(constructor, units=...)` chooses the units. `prefetch` of them are gathered while one computes, in
        forward those defined next, in backward those called before; gradients are summed over the ranks while the
        units before compute theirs. A leaf that several units use (a tied embedding and head) is gathered by each.
        Leaves that are not only in units are gathered once and kept: without units, all leaves. A leaf that is used
        outside of its unit's forward is an error that names both; where a number chose the units, it is kept too.

        All ranks must call the same units in the same order, and differentiate the same of them. In a compiled program,
        and under a transform of torch.func, around the call or in forward, it is this call: same numbers, without
        release. So is a unit with a leaf that is gathered along two dims. Forward may differentiate by autograd.

        Args:
            specs: of the params, or a prefix.
            release: free gathered leaves after use and gather them again in backward; if False, keep them; an axis, or
                axes, of `axis`: keep the part that a split over only these gives.
            remat: keep only the arguments of each unit (of the outermost, if units are nested), and recompute it in
                backward. A cache would be changed twice: switch it off (`use_cache=False`).
            prefetch: number of units to gather ahead; 0 gathers when needed.
            backward_prefetch: the same in backward, by default as many, from halfway in a unit; "post" gathers one
                unit ahead after the gradients of a unit are computed, while they are summed.
            dtype, reduce_dtype: as for `fs.unshard`.
            shapes: as for `fs.unshard`; by default of the module's parameters.

        Transfers, for each dtype of a unit and each of its calls: a gather in forward, one in backward if a gradient
        needs its leaves, and one sum, without the frozen leaves. A unit that is called again and again, as ALBERT's, is
        gathered for the first two calls and once in backward.

        >>> apply, tree = defer(lambda: torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), units="*")
        >>> apply.units
        {'0': ('0.weight', '0.bias'), '1': ('1.weight', '1.bias')}
        >>> mesh = make_mesh(data=2)
        >>> specs = fully_shard(P(), tree["params"], axis="data")
        >>> f = shard_map(lambda p, x: apply.unshard(specs, "data")(p, {}, x), mesh=mesh,
        ...               in_specs=(specs, P("data")), out_specs=P("data"))
        >>> f(materialize(tree["params"], specs, mesh, key=key(0)), torch.zeros(4, 8))
        f32[4@data, 8]

        Warns where there are no units and `release` is not False.
        Raises ShardingError, when the result is called, for the errors of `fs.unshard`, and inside
        torch.utils.checkpoint, which does not know that leaves are freed.
        """
        options = UnitOptions(release, prefetch, backward_prefetch, remat)
        options.check("apply.unshard", axis)
        if remat and not self.units:
            raise fail("apply.unshard: remat=True recomputes each unit, and there are none",
                       fix="fs.defer(constructor, units=...); or fs.remat around the call")  # fmt: skip
        if release and not self.units:
            warnings.warn("apply.unshard: no units: all leaves are gathered at once, and kept until backward; choose "
                          "some, fs.defer(constructor, units=...), or say release=False", stacklevel=3)  # fmt: skip
        return UnshardedByUnit(self, specs, axis, options, dtype, reduce_dtype, shapes)

    @checked
    def with_key(self, key: Tensor | None) -> Apply:
        """Return the function whose dropout, and every other draw, is by a key, the same on every mesh.

            apply.with_key(key)(params, buffers, x)     is      apply(params, buffers, x, key=key)

        Draw number j of a call, from 0, is `fs.random` under `fold_in(key, j)`, of the shape of the global tensor: the
        mask of an nn.Dropout is `fs.random.bernoulli(fs.fold_in(key, j), x.shape, p=1 - rate)`. Two calls by one key
        draw the same numbers, so fold in the step, and the name of each model. In a region, state by `draws_over` which
        axis splits the batch. `None` draws from torch's generator.

        Only the first form is available for a module whose forward has an argument `key`, as nn.MultiheadAttention's.
        A draw that a key cannot replace (by a generator, in a fused kernel) is an error. Not for compiled programs.

        >>> Apply(torch.nn.Dropout(0.5))({}, {}, torch.ones(8), key=fs.key(0))
        tensor([2., 2., 0., 0., 2., 0., 2., 0.])
        """
        if key is not None:
            check_key(f"{self!r}: key=", key)
        return self._with(_key=key)

    def split_key(self, kwargs: dict[str, Any]) -> tuple[Apply, dict[str, Any]]:
        """Return the function by the key in `kwargs`, and the others; itself, if forward has an argument `key`."""
        if "key" not in kwargs:
            return self, kwargs
        x = kwargs["key"]
        if not self._forward_has_key:
            return self.with_key(x), {name: arg for name, arg in kwargs.items() if name != "key"}
        if isinstance(x, Tensor) and x.dtype == torch.int64 and tuple(x.shape) == (2,):
            raise fail(f"{self!r}: forward has an argument 'key' of its own, and got a key of fs.random",
                       fix="apply.with_key(key)(params, buffers, ...)")  # fmt: skip
        return self, kwargs

    @checked
    def draws_over(self, axis: Axis, *, dim: int = 0, probe: bool = True) -> Apply:
        """Return the function for calls in a region, in which `axis` splits the examples of a batch.

            arguments that vary over axis: [B@axis, ...] or [T, B@axis, ...]; a draw: one for all B examples

        Draws without a dim of examples (the skip of a layer) are the same on all ranks. `None` is for arguments that
        are the same on all ranks. The spec of an argument gives the dim of its examples; `dim` is the dim in arguments
        that were computed in the region. In `fs.accumulate` a row has the same numbers in any microbatch.

        The first call for arguments of new shapes, which must be a checked one, runs forward on fake tensors to find
        the dims that have the examples. An error names the line that flattens [T, B] as [T*B], where no rank has a
        range of rows, or draws from `random` or `numpy.random`. With `probe=False` each draw that has dims is taken to
        have the examples in dim `dim`: for a forward that reads values of tensors. `fs.verify` shows if it is so.

        >>> apply = Apply(torch.nn.Dropout(0.5)).draws_over("data")
        """
        return self._with(_split_batch=SplitBatch(axis, dim, probe))

    def _with(self, **attributes: Any) -> Apply:
        other = copy.copy(self)
        vars(other).update(attributes)
        return other

    def __repr__(self) -> str:
        return f"Apply({type(self.module).__name__})"

    def run(
        self, params: Named, buffers: Named, args: tuple[Any, ...], kwargs: dict[str, Any],
        units: RunningUnits | None = None,
    ) -> tuple[Any, dict[str, Tensor], list[str]]:  # fmt: skip
        """Return the result of forward, the buffers after it, and the names of the buffers that it changed."""
        if torch.compiler.is_dynamo_compiling():
            what = "replaced modules" if self._replaced.by else \
                "adapted parameters" if any(map(is_weight, params.values())) else \
                "statistics over an axis" if self._has_norms_over and self.module.training else ""  # fmt: skip
            if what:
                raise fail(f"{self!r}: {what} cannot be compiled", fix="call it outside torch.compile")
        params, buffers = in_memory_order(params, self.orders), in_memory_order(buffers, self.orders)
        draws, named = None, in_module({**params, **(units.outside if units else {})}, self._replaced.splits)
        if self._key is not None:
            run_on_fakes = functools.partial(self._run_on_fakes, named, buffers)
            leaves_in_all = [*named.values(), *buffers.values()]
            draws = draws_of(repr(self), self._key, self._split_batch, leaves_in_all, args, kwargs, run_on_fakes,
                             self._replaced.features)  # fmt: skip
        copies = {name: x.clone() for name, x in buffers.items()}  # forward may overwrite them
        leaves: dict[str, Named] = {"params": named, "buffers": copies}
        if torch.compiler.is_dynamo_compiling():  # dynamo traces one thread, and supports functional_call
            named = {p.name: leaves[p.kind][p.leaf] for p in self._places}
            out = torch.func.functional_call(self.module, named, args, kwargs, tie_weights=False)
            return out, {**copies, **{p.leaf: named[p.name] for p in self._places if p.kind == "buffers"}}, []
        versions = {name: version_of(unwrapped(x)) for name, x in copies.items()}
        mine = self._take_copy()
        for p in mine.slots:
            p.put(leaves[p.kind][p.leaf])
        guard = None if "writes" in self._done else refusals.ParameterWrites(repr(self), params)
        stored_before = [seen.tensors() for seen in self._seen]

        def has_all_values() -> bool:
            return has_values() and not any(map(refusals.is_valueless, tree.leaves((params, buffers, args, kwargs))))

        if guard is not None and has_all_values():
            made = {name: x for name, ref in self._outside.made.items() if (x := ref()) is not None}
            guard.refuse_reads([*self._leaves.values(), made], {**params, **buffers})
        if units is not None:
            watch = contextlib.nullcontext if guard is None else guard.watch
            units = replace(units, keep=functools.partial(self._keep_unit, mine, draws, units.fill), watch=watch)
            mine.units.running = units
        is_first = self._is_first_differentiated(units, params, args, kwargs)
        refusal: Any = refusals.RefuseCheckpoint(repr(self)) if is_first else None
        nothing: Any = contextlib.nullcontext()
        try:
            with refusal or nothing, guard or nothing, draws or nothing, self._statistics(mine):
                out = mine.module(*args, **kwargs)
            if draws is not None:
                draws.check_number()
        except Exception as e:  # the state of the copy is unknown, so the copy is not used again
            self._explain(e, params, buffers, (args, kwargs))
            raise
        self._done |= {"writes"} if refusal is None else {"writes", "checkpoint"}
        for seen, before in zip(self._seen, stored_before, strict=True):
            if any(all(x is not y for y in before) for x in seen.tensors()):
                raise seen.stored(repr(self))
        after, replaced = dict(copies), [] if units is None else units.replaced
        for p in mine.places:
            x = p.value
            if p.kind == "buffers" and x is not None and x is not copies[p.leaf]:
                after[p.leaf] = x
            if p.kind == "params" and isinstance(x, nn.Parameter) and x is not leaves["params"][p.leaf]:
                replaced.append(p.leaf)
        if replaced and torch.is_grad_enabled():
            raise fail(f"{self!r}: forward replaced parameters: {', '.join(replaced)}",
                       "no gradient reaches the call's parameters, and the new ones are lost after it",
                       fix="do it in the constructor; or compute a tensor and leave the parameter")  # fmt: skip
        mine.contents.restore()
        self._give_back(mine)
        if (valueless := refusals.first_valueless(out, after)) and has_all_values():
            raise refusals.not_of_the_call(f"{self!r}: {valueless} has no values: it was computed from tensors of the "
                                           "module that the constructor made")  # fmt: skip
        state = {name: x for name, x in after.items() if name not in self.transient}
        changed = [name for name, x in state.items()
                   if x is not copies[name] or version_of(unwrapped(x)) != versions[name]]  # fmt: skip
        if not changed and "values" not in self._done:  # torch's batch_norm does not count all its writes as versions
            changed = [name for name, x in state.items() if not refusals.equal_values(x, buffers[name])]
            if not changed:
                self._done.add("values")
        return out, after, changed

    @property
    def _has_norms_over(self) -> bool:
        return self._norms_over is not UNSET and self._norms_over is not None

    def _statistics(self, mine: ModuleCopy) -> contextlib.AbstractContextManager[Any]:
        """Return the mode for operations that compute with all rows of a batch, if this call is to have it."""
        if self._has_norms_over or (in_region() and (checker() is not None or self._is_sparse)):
            return BatchStatistics(repr(self), mine.module, self._norms_over)
        return contextlib.nullcontext()

    def _is_first_differentiated(self, units: RunningUnits | None, *arguments: Any) -> bool:
        """Return whether a call may have a backward, and no call before had one."""
        if "checkpoint" in self._done or not torch.is_grad_enabled():
            return False
        if in_transform() or (units is not None and any(any(u.differentiated) for u in units.calls.units.values())):
            return True
        return any(x.requires_grad for x in tree.leaves(arguments) if isinstance(x, Tensor))

    def _run_on_fakes(self, params: Named, buffers: Named, args: Any, kwargs: Any) -> None:
        """Run forward on fake tensors with the shapes of these leaves, unsharded."""
        mine = self._take_copy()
        self._replaced.remove(mine.module)
        for p in mine.slots:
            x, split = (params if p.kind == "params" else buffers)[p.leaf], self._replaced.splits.get(p.leaf)
            p.put(fake_like(x, x.shape if split is None else split.shape))
        mine.module(*args, **kwargs)
        mine.contents.restore()
        self._give_back(mine)

    def check_names(self, params: Named, buffers: Named) -> None:
        """Raise ShardingError listing every name that is missing or unexpected, and every wrong number of dims."""
        errors: list[ShardingError] = []
        for kind, named in (("params", params), ("buffers", buffers)):
            if not isinstance(named, Mapping) or named.keys() == {"params", "buffers"}:
                got = "the tree of fs.defer" if isinstance(named, Mapping) else f"a {type(named).__name__}"
                fix = 'apply(tree["params"], tree["buffers"], *args); {} for a module without buffers'
                raise fail(f"{self!r}: {kind} is {got}, not a dict of tensors by name", fix=fix)
            expected = self._leaves[kind]
            for name in expected.keys() - named.keys():
                errors.append(fail(f"{self!r}: {kind}[{name!r}] is missing"))
            for name in named.keys() - expected.keys():
                other = "buffers" if kind == "params" else "params"
                fix = f"leave it out: it is tied to {self.ties[name]!r}" if name in self.ties else \
                    f"pass it in {other}" if name in self._leaves[other] else "leave it out"  # fmt: skip
                errors.append(fail(f"{self!r}: {kind}[{name!r}] is not a leaf of the module", fix=fix))
            for name, x in named.items():
                if not isinstance(x, (Tensor, Weight) if kind == "params" else Tensor):
                    fix = "names are flat: 'a.b', not ['a']['b']" if isinstance(x, Mapping) else \
                        "call it inside shard_map, where leaves are tensors"  # fmt: skip
                    errors.append(fail(f"{self!r}: {kind}[{name!r}] is a {type(x).__name__}, not a tensor", fix=fix))
                elif name in expected and x.ndim != expected[name].ndim:
                    what = f"{self!r}: {kind}[{name!r}] has {x.ndim} dims, not {expected[name].ndim}"
                    errors.append(fail(what, argument=describe(x), module=format_tensor(x.dtype, expected[name].shape)))
        raise_all(sorted(errors, key=str))

    def _refuse_parts(self, params: Named, dims: int, e: Exception | None = None) -> None:
        """Raise ShardingError for parameters of at least `dims` dims that are parts of the module's.

        A norm may compute with a part of its channels; a product with a part of a matrix would be a part of the result.
        """
        full = self._leaves["params"]
        parts = [(name, x, full[name].shape) for name, x in params.items()
                 if name not in self._replaced.splits and x.shape != full[name].shape and x.ndim >= dims]  # fmt: skip
        if parts:
            (name, x, shape), *others = parts
            more = f", and {len(others)} more" if others else ""
            raise fail(f"{self!r}: params[{name!r}] is {list(x.shape)}, and {list(shape)} in the module{more}",
                       f"forward failed: {type(e).__name__}: {e}" if e else "",
                       fix="apply.unshard(specs, axis)(params, buffers, *args), which gathers each unit; or "
                           "apply(fs.unshard(params, specs, axis), buffers, *args)") from e  # fmt: skip

    def _explain(self, e: Exception, params: Named, buffers: Named, arguments: Any) -> None:
        """Raise, or add to an error of forward, its cause: a tie, or leaves that were not unsharded."""
        if (refused := refusals.refused_by_torch_func(repr(self), e)) is not None:
            raise refused from e
        if isinstance(e, TypeError) and (assigned := _ASSIGNED.search(str(e))):
            raise fail(f"{self!r}: forward assigns a tensor to the parameter {assigned[1]!r}",
                       "parameters are plain tensors in a pure call, which torch does not register",
                       fix="assign it in the constructor (self.head.weight = self.embedding.weight ties them there), "
                       "not in forward") from e  # fmt: skip
        if not isinstance(e, ShardingError):
            self._refuse_parts(params, 1, e)
        types = checker()
        if types is None or not isinstance(e, ShardingError):
            return
        if self._key is not None and "random draw" in str(e):
            stated = self._split_batch.axis
            what = f"{self!r}.draws_over({stated!r}) is to name the axes that split the examples of the arguments"
            fix = "name those that split the examples; no draw of a module can be split in another dim"
            if self._replaced.by:
                fix += ",\n       but those of features that replaced modules leave split, without probe=False"
            e.args = (f"{str(e).partition('  fix: ')[0]}  {what}\n  fix: {fix}",)
        if "invariant" not in str(e):
            return
        tensors = [x for x in tree.leaves((params, buffers, arguments)) if isinstance(x, Tensor)]
        floats = {name: types.info(x).type for name, x in tensors_of(params).items() if differentiable_dtype(x)}
        for axis in sorted(set[str]().union(*(types.info(x).type.varying for x in tensors))):
            names = [name for name, type_ in floats.items() if axis in type_.invariant]
            if names and f"{axis!r}" in str(e).partition("\n")[0]:
                rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
                what = f"in {self!r}, params[{names[0]!r}]{rest} of its params are invariant over {axis!r}"
                e.args = (f'{e}\n  {what}\n  fix: params = fs.unshard(params, its specs, "{axis}")',)

    def _take_copy(self) -> ModuleCopy:
        """Return a copy of the module that no other call is using, and that no other thread has used.

        Other threads may be in backward: an operation that they do again, on a copy that a call uses, would be on the
        leaves of this call. On a copy that no call uses it is an error (`BetweenCalls`).
        """
        try:
            return self._copies_of_thread.pop()
        except IndexError:
            for name, m in self.module.named_modules():
                if m.training and getattr(m, "gradient_checkpointing", False) is True:
                    raise refusals.recomputed(f"{self!r}: gradient checkpointing is on in {name or type(m).__name__!r}",
                                              refusals.AGAIN.format("torch.utils.checkpoint")) from None  # fmt: skip
            module = copy_module(self.module, self._outside)
            without_process_group(module)
            self._replaced.install(repr(self), module)
            places = places_of(module, self.ties)
            return ModuleCopy(module, places, self.units, self._replaced.splits, self._between_calls, self._shared)

    @property
    def _copies_of_thread(self) -> list[ModuleCopy]:
        return self._free_copies.setdefault(threading.get_ident(), [])

    @functools.cached_property
    def _shared(self) -> dict[int, Any]:
        return {id(x): x for x in (*reachable(self.module), *self._outside.objects.values())}

    @functools.cached_property
    def _seen(self) -> list[Seen]:
        return list(self._outside.seen_by(self.module))

    @functools.cached_property
    def _between_calls(self) -> dict[str, Tensor]:
        return {name: BetweenCalls.like(name, x.shape, x.dtype, x.device, ", between calls", apply=repr(self))
                for named in self._leaves.values() for name, x in named.items()}  # fmt: skip

    def _give_back(self, mine: ModuleCopy) -> None:
        mine.units.running = None
        for p in mine.references:
            p.put(self._between_calls[p.leaf])
        self._copies_of_thread.append(mine)

    def _keep_unit(
        self, mine: ModuleCopy, draws: Draws | None, fill: Fill, name: str
    ) -> Callable[[Sequence[Tensor], Any, Any, Any], None]:
        """Return a function that repeats a call of a unit, once, with the present values of the other leaves in it."""
        modules = dict(mine.module.get_submodule(name).named_modules())
        holders = {id(holder) for m in modules.values() for holder in (m._parameters, m._buffers)}
        holders |= {id(p.holder) for p in mine.references}
        # What this call has changed before: attributes are arguments too.
        changed = {key: new for key, m in modules.items() if (new := mine.contents.changed_attributes(m))}
        changed = tree.map(lambda x: detached(x) if isinstance(x, Tensor) else x, changed)
        number, leaves = 0 if draws is None else draws.number, set(self.units[name])
        # Forward may update a buffer.
        now = {p.name: p.value.clone() if p.kind == "buffers" else detached(p.value)
               for p in mine.slots if id(p.holder) in holders and (p.kind == "buffers" or p.leaf not in leaves)
               }  # fmt: skip

        def repeat(leaves: Sequence[Tensor], args: Any, kwargs: Any, calls: Any) -> None:
            copy = self._take_copy()
            before = copy.unit_contents(name)
            for p in copy.slots:
                if p.name in now:
                    p.put(now[p.name])
            for key, new in changed.items():
                vars(copy.module.get_submodule(f"{name}.{key}" if key else name)).update(new)
            copy.units.running = running = RunningUnits(calls, fill)
            try:
                with contextlib.nullcontext() if draws is None else draws.resumed(number), self._statistics(copy):
                    copy.units.run(running, name, leaves, args, kwargs)
            finally:
                before.restore()
                self._give_back(copy)

        return repeat
