"""Any `nn.Module` as a pure function of its parameters and buffers: `Apply`."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fshard import tree
from fshard._comm import Axis, checker, in_region, known_axes, live_axes, region
from fshard._ops import differentiable_dtype, global_size
from fshard._torch_compat import FakeTensor, TorchDispatchMode, is_batched, storage_id, unwrapped, version_of
from fshard.collectives import psum, pvary
from fshard.errors import ShardingError, checked, fail, raise_all
from fshard.random import check_key
from fshard.schedule.units import UnitOptions
from fshard.spec import describe, names_of, part_lengths, part_range

from .aten_rules import written_tensors
from .draws import Batch, Draws, Probe
from .probe import Fake, prime_for, probe
from .units import Placeholder, UnitForwards, UnshardedByUnit, leaves_of_units, shapes_of, unwatched

Named = Mapping[str, Tensor]
Leaves = dict[str, dict[str, Tensor]]  # by kind ("params", "buffers") and name


class Apply:
    """A module's forward as a pure function: `apply(params, buffers, *args, **kwargs)`.

        params, buffers: {dotted name: tensor}, whole leaves; a tied leaf once, by the name that comes first

    The module is a skeleton: its own parameters and buffers are never read and may be on meta. All changes that
    `forward` makes to the module (an attribute, an entry of a list or dict, a hook) are undone after each call. Calls
    that run at the same time, as those of simulated ranks do, each use a copy of the module, which shares its tensors.

    A write to a parameter in `forward` (`self.weight.data.clamp_(...)`) is an error in the first call.

    A float buffer is invariant over the mesh, like a parameter, and needs `unshard` (or `pvary`) too:

        apply(fs.unshard(params, specs, "data"), fs.unshard(buffers, P(), "data"), x)

    A buffer that `forward` updates is returned by `with_buffers`; a plain call, which would lose it, is an error. A
    buffer that is not persistent is a cache (the frequencies of dynamic rope) and no state: a plain call may lose it.

    Parameters that `forward` changes in place (`nn.Embedding(max_norm=)`, RWKV in eval mode) are an error.

    Dropout and other draws are by a key, `apply(params, buffers, x, key=key)`: see `with_key`. Without a key they are
    from torch's generator, which is an error in a region; `.eval()` has none. Hugging Face's
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
        self.ties.update((name, p.leaf) for p in self._places for name in p.names if name != p.leaf)
        self.transient = transient | {p.leaf for p in self._places if p.transient}
        self._leaves = leaves_at(self._places)  # of the skeleton, for their shapes
        self.shapes = shapes_of(self._leaves["params"])
        self.frozen = frozenset(k for k, x in self._leaves["params"].items() if not x.requires_grad)
        self.units = leaves_of_units(module, units, self._places)
        self._free_copies: deque[_ModuleCopy] = deque()
        self._done: set[str] = set()  # the checks that only the first call makes; shared with copies, as the others are
        self._key: Tensor | None = None
        self._draws_over: tuple[Axis, int, bool] | None = None
        self._probes: dict[str, _Probed] = {}  # by the arguments' structure and shapes
        self._forward_has_key = "key" in inspect.signature(module.forward).parameters

    def __call__(self, params: Named, buffers: Named, /, *args: Any, **kwargs: Any) -> Any:
        """Return the result of `forward`. Raises ShardingError if it changed a buffer, which would be lost."""
        apply, kwargs = self.split_key(kwargs)
        if apply is not self:
            return apply(params, buffers, *args, **kwargs)
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
        apply, kwargs = self.split_key(kwargs)
        if apply is not self:
            return apply.with_buffers(params, buffers, *args, **kwargs)
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

    @checked
    def with_key(self, key: Tensor | None) -> Apply:
        """Return the function whose dropout, and every other draw, is by a key, the same on every mesh.

            apply.with_key(key)(params, buffers, x)     is      apply(params, buffers, x, key=key)

        Draw number j of a call, from 0, is `fs.random` under `fold_in(key, j)`, of the shape of the global tensor: the
        mask of an nn.Dropout is `fs.random.bernoulli(fs.fold_in(key, j), x.shape, p=1 - rate)`. Two calls by one key
        draw the same numbers, so fold in the step, and the name of each model. In a region say by `draws_over` which
        axis splits the batch. `None` draws from torch's generator.

        Only the first form is available for a module whose forward has an argument `key`, as nn.MultiheadAttention's.
        An operation that draws in a way that a key cannot replace (a generator of its own, a fused kernel) is an error.
        On a CPU it costs 8 microseconds for each operation of forward and half a millisecond for each draw, beyond the
        numbers themselves. Not for compiled programs.

        >>> apply = Apply(torch.nn.Dropout(0.5))
        >>> apply({}, {}, torch.ones(8), key=fs.key(0))
        tensor([2., 2., 0., 0., 2., 0., 2., 0.])
        """
        if key is not None:
            check_key(f"{self!r}: key=", key)
        other = copy.copy(self)
        other._key = key
        return other

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

        Each rank draws the numbers of its own examples, which may be fewer than those of other ranks, or none. Draws
        without a dim of examples (the skip of a whole layer) are the same on all ranks. `None` is for arguments that
        are the same on all ranks. The spec of an argument tells the dim of its examples; `dim` is that of arguments
        that were computed in the region.

        The dims that have the examples are found: the first call for arguments of new shapes, which must be a checked
        one, runs forward on fake tensors with a prime number of examples. An error names the line that flattens [T, B]
        as [T*B], of which no rank has a range of rows, or draws from `random` or `numpy.random`. With `probe=False`
        nothing is run: each draw that has dims is taken to have the examples in dim `dim`, one after the other. That is
        for a forward that reads values of tensors, which a fake tensor has not; `fs.verify` then shows if it is so.

        >>> apply = Apply(torch.nn.Dropout(0.5)).draws_over("data")
        """
        other = copy.copy(self)
        other._draws_over, other._probes = (axis, dim, probe), {}
        return other

    def _with(self, module: nn.Module) -> Apply:
        """Return the function of a changed copy of the module."""
        other = Apply(module, self.ties, self.whole, self.transient, tuple(self.units))
        other._key, other._draws_over = self._key, self._draws_over
        return other

    def __repr__(self) -> str:
        return f"Apply({type(self.module).__name__})"

    def run(
        self, params: Named, buffers: Named, args: tuple[Any, ...], kwargs: dict[str, Any], calls: Any = None,
        in_units: Named | None = None,
    ) -> tuple[Any, dict[str, Tensor], list[str]]:  # fmt: skip
        """Return the result of forward, the buffers after it, and the names of the buffers that it changed.

        With `calls` (`UnitCalls`) the units run by it, and `in_units` has placeholders for their leaves.
        """
        draws = self._draws({**params, **(in_units or {})}, buffers, args, kwargs)
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
        mine.units.calls, mine.units.keep = calls, functools.partial(self._keep_unit, mine, draws)
        guard: Any = None if "writes" in self._done else _ParameterWrites(self, params)
        if guard is not None:
            mine.units.watch = guard.watch
        try:
            with guard or contextlib.nullcontext(), draws or contextlib.nullcontext():
                out = mine.module(*args, **kwargs)
            if draws is not None:
                draws.check_number()
            if guard is not None:
                guard.check_storages()
        except Exception as e:  # the state of the copy is unknown, so the copy is not used again
            self._explain(e, params, buffers, (args, kwargs))
            raise
        self._done.add("writes")
        after, replaced = dict(copies), list(mine.units.replaced)
        for p in mine.places:
            x = p.holder.get(p.key)
            if p.kind == "buffers" and x is not None and x is not copies[p.leaf]:
                after[p.leaf] = x
            if p.kind == "params" and isinstance(x, nn.Parameter) and x is not leaves["params"][p.leaf]:
                replaced.append(p.leaf)
        if replaced and torch.is_grad_enabled():
            raise fail(f"{self!r}: forward replaced parameters: {', '.join(replaced)}",
                       "no gradient reaches those of the call, and the new ones are lost after it",
                       fix="do it in the constructor; or compute a tensor and leave the parameter")  # fmt: skip
        mine.contents.restore()
        self._give_back(mine)
        state = {name: x for name, x in after.items() if name not in self.transient}
        changed = [name for name, x in state.items() if x is not copies[name] or _version(x) != versions[name]]
        if not changed and "values" not in self._done:  # torch's batch_norm does not count all its writes as versions
            changed = [name for name, x in state.items() if not _equal(x, buffers[name])]
            if not changed:
                self._done.add("values")
        return out, after, changed

    def _draws(self, params: Named, buffers: Named, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draws | None:
        """Return the mode that makes the random numbers of a call; None without a key."""
        key = self._key
        if key is None:
            return None
        if torch.compiler.is_dynamo_compiling():
            raise fail(f"{self!r}: draws by a key cannot be compiled", fix="call it outside torch.compile")
        if is_batched(key):
            raise fail(f"{self!r}: torch.vmap over keys", "draws of a module are made below torch.vmap",
                       fix="a loop over the keys")  # fmt: skip
        name = repr(self)
        if not in_region() or not (live := live_axes(region().comm, tuple(region().sizes))):
            return Draws(name, key)
        if self._draws_over is None:
            raise fail(f"{name}: with a key a region must say which axis splits the examples of a batch",
                       fix=f'apply = apply.draws_over("{live[0]}"); apply.draws_over(None) if each rank has all of them'
                       )  # fmt: skip
        axis, dim, with_probe = self._draws_over
        axes = live_axes(region().comm, known_axes(f"{name}.draws_over", region(), axis))
        if not axes:
            return Draws(name, key)
        found, find = self._probed(key, axes, dim, params, buffers, args, kwargs)
        if with_probe and not found.probes:
            find()
        total = global_size(f"{name}.draws_over", found.count, axes)
        sizes, coords = ([values[a] for a in axes] for values in (region().sizes, region().coords))
        start, mine = part_range(total, sizes, coords)
        if mine != found.count:
            raise fail(f"{name}: this rank has {found.count} examples, and its part of {total} over {axes} is {mine}",
                       f"{total} splits into {part_lengths(total, sizes)}",
                       fix="pass the batch by a spec that names the axis")  # fmt: skip
        batch = Batch(axes, start, mine, total, dim)
        return Draws(name, key, batch, found.probes, find) if with_probe else Draws(name, key, batch)

    def _probed(
        self, key: Tensor, axes: tuple[str, ...], dim: int, params: Named, buffers: Named, args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[_Probed, Callable[[], Probe]]:  # fmt: skip
        """Return the facts about calls with such arguments, and a function that probes this one and adds the result."""
        leaves, structure = tree.flatten((args, kwargs))
        xs = [x for x in leaves if isinstance(x, Tensor)]
        rest = [type(x) if " at 0x" in repr(x) else x for x in leaves if not isinstance(x, Tensor)]
        signature = repr((axes, structure, [(x.dtype, x.shape) for x in xs], rest))
        known = self._probes.get(signature)
        if known is None or checker() is not None:
            count, dims = self._examples(axes, dim, args, kwargs)
            if known is not None and known.dims != dims:
                raise fail(f"{self!r}.draws_over: in an earlier call, of the same shapes, other dims had the examples",
                           fix="draws_over once for each of the two functions that call it")  # fmt: skip
            known = self._probes.setdefault(signature, _Probed([], count, dims))
        probed = known

        def run(prime: int, fake: Fake) -> None:
            mine = self._take_copy()
            norm: Any
            for _, norm in _batch_norms(mine.module):
                norm.forward = functools.partial(nn.BatchNorm1d.forward, norm)  # without a collective
            for p in mine.places:
                x = (params if p.kind == "params" else buffers)[p.leaf]
                p.holder[p.key] = fake(x, x.shape)
            sizes = [[prime * (n // max(1, probed.count) or 1) if probed.dims.get(i) == d else n
                      for d, n in enumerate(x.shape)] for i, x in enumerate(xs)]  # fmt: skip
            fakes = iter([fake(x, size) for x, size in zip(xs, sizes, strict=True)])
            new_args, new_kwargs = tree.unflatten(
                structure, [next(fakes) if isinstance(x, Tensor) else x for x in leaves]
            )
            mine.module(*new_args, **new_kwargs)
            mine.contents.restore()
            self._give_back(mine)

        def find() -> Probe:
            prime = prime_for(n for x in (*xs, *params.values(), *buffers.values()) for n in x.shape)
            probed.probes.append(probe(repr(self), key, prime, functools.partial(run, prime)))
            return probed.probes[-1]

        return probed, find

    def _examples(
        self, axes: tuple[str, ...], dim: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[int, Mapping[int, int]]:
        """Return the number of examples of this rank, and the dim of them by position among the arguments' tensors."""
        types, name = checker(), f"{self!r}: draws_over({axes[0] if len(axes) == 1 else axes!r})"
        if types is None:
            raise fail(f"{name}: the first call for arguments of these shapes must be a checked one",
                       "its types tell which arguments have a part of the batch", fix='shard_map(..., check="first")'
                       )  # fmt: skip
        dims: dict[int, int] = {}
        named = [(path, x) for path, x in tree.leaves_with_path((args, kwargs)) if isinstance(x, Tensor)]
        for i, (path, x) in enumerate(named):
            if not _axes_of_own_values(x) & set(axes):
                continue
            spec = types.info(x).spec
            parts = dict(enumerate(() if spec is None else spec.parts(x.ndim)))
            d = next((d for d, over in parts.items() if set(over) & set(axes)), dim)
            if not -x.ndim <= d < x.ndim or live_axes(region().comm, tuple(parts.get(d, axes))) != axes:
                raise fail(f"{name}: {_argument(path)} has no dim that {' and '.join(map(repr, axes))} alone split",
                           argument=describe(x.dtype, x.shape), **({} if spec is None else {"spec": spec}),
                           fix="name the axes that split its examples, in this order; dim= of an argument that was "
                           "computed in the region")  # fmt: skip
            dims[i] = d % x.ndim
        if not dims:
            raise fail(f"{name}: no argument has a part of the batch: none varies over {' or '.join(map(repr, axes))}",
                       fix="apply.draws_over(None), if each rank has all examples")  # fmt: skip
        count = math.gcd(*(named[i][1].shape[d] for i, d in dims.items()))
        for i, (_, x) in enumerate(named):  # made in the region from nothing
            type_ = types.info(x).type
            if not type_.varying | type_.invariant and x.ndim > dim >= -x.ndim and x.shape[dim] == count:
                dims[i] = dim % x.ndim
        return count, dims

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
        """Add to an error of forward its cause: a tie, or the names of the leaves that were not unsharded."""
        if isinstance(e, TypeError) and (assigned := _ASSIGNED.search(str(e))):
            raise fail(f"{self!r}: forward assigns a tensor to the parameter {assigned[1]!r}",
                       "parameters are plain tensors in a pure call, which torch does not register",
                       fix="assign it in the constructor (self.head.weight = self.embedding.weight ties them there), "
                       "not in forward") from e  # fmt: skip
        for name, x in params.items():
            expected = self._leaves["params"][name].shape
            if x.shape != expected:
                shapes = f"params[{name!r}] is {list(x.shape)}, and {list(expected)} in the module"
                e.add_note(f"{shapes}: fs.unshard gathers whole leaves")
        types = checker()
        if types is None or not isinstance(e, ShardingError):
            return
        if self._key is not None and "random draw" in str(e):
            stated = self._draws_over[0] if self._draws_over else None
            what = f"{self!r}.draws_over({stated!r}) is to name the axes that split the examples of the arguments"
            fix = "name those that split the examples; no draw of a module can be split in another dim"
            e.args = (f"{str(e).partition('  fix: ')[0]}  {what}\n  fix: {fix}",)
        if "invariant" not in str(e):
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
        mine.units.calls, mine.units.keep, mine.units.watch, mine.units.replaced = None, str, unwatched, []
        self._free_copies.append(mine)

    def _keep_unit(
        self, mine: _ModuleCopy, draws: Draws | None, name: str
    ) -> Callable[[Sequence[Tensor], Any, Any, Any], None]:
        """Return a function that repeats a call of a unit, once, with the present values of the other leaves in it."""
        modules = list(mine.module.get_submodule(name).modules())
        holders = {id(m._parameters) for m in modules} | {id(m._buffers) for m in modules}
        own = set(self.units[name])
        now: dict[str, Tensor] = {}
        number = 0 if draws is None else draws.number
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
                with contextlib.nullcontext() if draws is None else draws.resumed(number):
                    copy.units.run(name, leaves, args, kwargs)
            finally:
                before.restore()
                self._give_back(copy)

        return repeat


@dataclass(frozen=True)
class _Probed:
    """The probes, the number of examples of this rank, and the dim of them by position among the arguments' tensors."""

    probes: list[Probe]
    count: int
    dims: Mapping[int, int]


def _argument(path: tree.Path) -> str:
    """Return the name of an argument of a call, from its path in (args, kwargs)."""
    return tree.show("args" if path[0] == 0 else "kwargs", path[1:])


# --- leaves of a module ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """One entry of a module's parameters or buffers: its dotted names, and the name of the leaf it uses.

    A module that stands in its parents more than once (`Sequential(a, relu, a)`) gives each of its entries more names.
    """

    holder: dict[str, Any]
    key: str
    names: tuple[str, ...]
    leaf: str
    kind: str  # "params" or "buffers"
    transient: bool

    @property
    def name(self) -> str:
        return self.names[0]


def places_of(module: nn.Module, ties: Mapping[str, str] | None = None) -> list[Place]:
    """Return the places of parameters and buffers, once each. Those of one tensor use one leaf, by the first name."""
    ties = ties or {}
    first: dict[int, str] = {}
    places: dict[tuple[int, str], Place] = {}
    for prefix, m in _named_modules(module):
        for kind, holder in (("params", m._parameters), ("buffers", m._buffers)):
            for key, x in holder.items():
                if x is None:
                    continue
                name = f"{prefix}{key}"
                own = first.setdefault(id(x), name)
                leaf = ties.get(name, ties.get(own, own))
                place = Place(holder, key, (name,), leaf, kind, key in m._non_persistent_buffers_set)
                if known := places.get((id(holder), key)):
                    place = replace(known, names=(*known.names, name), leaf=leaf if name in ties else known.leaf)
                places[id(holder), key] = place
    return list(places.values())


def _named_modules(
    module: nn.Module, prefix: str = "", parents: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with their prefixes, a shared one under each; one that contains itself has no further names."""
    yield prefix, module
    for key, m in module._modules.items():
        if m is not None and m is not module and m not in parents:
            yield from _named_modules(m, f"{prefix}{key}.", (*parents, module))


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
        containers: list[Any] = [x for x in reachable(module) if isinstance(x, (dict, list, set))]
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
    memo = {id(x): x for x in reachable(module) if isinstance(x, Tensor)}
    try:
        return copy.deepcopy(module, memo)
    except Exception as e:
        raise fail(
            f"{type(module).__name__}: cannot be copied, and each rank of a simulated mesh needs its own",
            f"{type(e).__name__}: {e}",
            fix="keep objects that copy.deepcopy refuses out of the module",
        ) from e


def reachable(module: nn.Module) -> Iterator[Any]:
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


_ASSIGNED = re.compile(r"cannot assign '.*' as parameter '(\w+)'")  # torch's error


class _ParameterWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses writes to the memory of parameters: they reach the caller's leaf on some meshes and not on others."""

    def __init__(self, apply: Apply, params: Named) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.apply = apply
        self.before: dict[str, tuple[Tensor, Tensor, Any]] = {}
        self.names: dict[Any, str] = {}
        self._add(params)

    def _add(self, params: Named) -> None:
        plain = {name: unwrapped(x) for name, x in params.items()}
        new = {k: (x, x.detach(), storage_id(x)) for k, x in plain.items() if x.layout is torch.strided}
        self.before = self.before | new
        self.names = self.names | {n: name for name, (x, _, n) in new.items() if x.numel()}

    @contextlib.contextmanager
    def watch(self, params: Named) -> Iterator[None]:
        """Refuse writes to these too: gathered leaves of a unit, while it runs. Their memory is used again later."""
        before = self.before, self.names
        self._add(params)
        yield
        self.check_storages()
        self.before, self.names = before

    def _dispatch(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for x in written_tensors(func, args, kwargs or {}):
            if x.layout is torch.strided and (name := self.names.get(storage_id(x))):
                raise self._error(name, str(func))
        return func(*args, **(kwargs or {}))

    def check_storages(self) -> None:
        """Raise ShardingError if forward has set the `.data` of a parameter, which is no operation."""
        for name, (x, data, n) in self.before.items():
            if storage_id(x) != n:
                x.data = data
                raise self._error(name, "params.data = ...")

    def _error(self, name: str, how: str) -> ShardingError:
        return fail(f"{self.apply!r}: forward writes to params[{name!r}]: {how}",
                    "a pure function leaves its arguments as they are",
                    fix="write in the train step, to the new parameters; or switch it off in the module's "
                    "configuration; or apply.eval(), if it is done in training alone")  # fmt: skip


# A __torch_dispatch__ in the class body would be wrapped by torch: the first operation would import dynamo for seconds.
_ParameterWrites.__torch_dispatch__ = _ParameterWrites._dispatch  # type: ignore[assignment]


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
