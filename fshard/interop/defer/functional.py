"""Any `nn.Module` as a pure function of its parameters and buffers: `Apply`."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fshard import tree
from fshard._comm import checker
from fshard._ops import differentiable_dtype
from fshard._torch_compat import FakeTensor, version_of
from fshard._torch_compat import unwrapped as base
from fshard.errors import ShardingError, fail, raise_all
from fshard.spec import describe

Named = Mapping[str, Tensor]


class Apply:
    """A module's forward as a pure function: `apply(params, buffers, *args, **kwargs)`.

        params, buffers: {dotted name: tensor}, whole leaves; a tied leaf once, by the name that comes first

    The module is a skeleton: tensors it holds as parameters and buffers are never read and may be on meta. Whatever
    `forward` sets in it (an attribute, an entry of a list or dict, a hook) is put back, so each call starts from what
    the constructor made. Calls that run at the same time, as those of simulated ranks do, each have a copy of the
    module, without its tensors, for themselves.

    A float buffer is invariant over the mesh, as a parameter is, and goes through `unshard` (or `pvary`) like them:

        apply(fs.unshard(params, specs, "data"), fs.unshard(buffers, P(), "data"), x)

    A buffer that `forward` updates is returned by `with_buffers`; a plain call, which would lose it, is an error. One
    that is not persistent is a cache (the frequencies of dynamic rope) and no state: a plain call may lose its changes.

    Dropout draws from torch's generator, which a region refuses: use `.eval()`, or rates of 0 and train mode.
    `torch.utils.checkpoint` fails under torch.func, and outside would compute again with the skeleton's own tensors: a
    module with Hugging Face's `gradient_checkpointing` switched on is refused. `fs.remat` computes a call again. An
    autograd.Function of the module's own needs a `setup_context`, or torch.func refuses it (as Bloom's GeLU).

    Args:
        ties: tied name -> the name whose tensor it is; those that are one tensor in `module` are found.
        whole: leaves whose initial values are computed in full, and their bytes; for information.
        transient: names of buffers that are not persistent; those that `module` says are so are found.

    >>> apply = Apply(torch.nn.Linear(2, 3, device="meta"))
    >>> apply({"weight": torch.ones(3, 2), "bias": torch.zeros(3)}, {}, torch.ones(1, 2))
    tensor([[2., 2., 2.]])

    `frozen` names the leaves whose `requires_grad` the constructor switched off: differentiate the others.

    Raises ShardingError listing every name that is missing or unexpected and every leaf with a wrong number of dims.
    """

    def __init__(
        self, module: nn.Module, ties: Mapping[str, str] | None = None, whole: Mapping[str, int] | None = None,
        transient: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        self.module, self.ties, self.whole = module, dict(ties or {}), dict(whole or {})
        self._places = _places(module, self.ties)
        self.ties.update((p.name, p.leaf) for p in self._places if p.name != p.leaf)
        self.transient = transient | {p.leaf for p in self._places if p.transient}
        # name -> the tensor of the skeleton, for its shape
        self._leaves: dict[str, dict[str, Tensor]] = {"params": {}, "buffers": {}}
        for p in self._places:
            self._leaves[p.kind].setdefault(p.leaf, p.held[p.key])
        self.frozen = frozenset(k for k, x in self._leaves["params"].items() if not x.requires_grad)
        self._idle: deque[_Copy] = deque()  # of threads that call at once, each takes a copy and puts it back
        self._compared = False

    def __call__(self, params: Named, buffers: Named, /, *args: Any, **kwargs: Any) -> Any:
        """What `forward` gives. Raises ShardingError where it changed a buffer, which would be lost."""
        out, _, changed = self._call(params, buffers, args, kwargs)
        if changed:
            raise fail(f"{self!r}: forward changed buffers, and a plain call returns none: {', '.join(changed)}",
                       fix="out, buffers = apply.with_buffers(params, buffers, ...), or apply.eval()")  # fmt: skip
        return out

    def with_buffers(
        self, params: Named, buffers: Named, /, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Tensor]]:
        """`(out, new buffers)`: what `forward` gives, and the buffers as it left them; those given stay as they are.

        On a mesh each rank updates them by its own batch: they vary. A batch norm in train mode normalizes by the
        statistics of the rank's own examples: there the mesh does change the answer, as `verify` will say, and as it
        does in torch's DistributedDataParallel. One value for all ranks is their mean, and of counters, which are alike
        everywhere, the maximum:

            fs.tree.map(lambda b: fs.pmean(b, "data") if b.is_floating_point() else fs.pmax(b, "data"), new)

        >>> norm = torch.nn.BatchNorm1d(1, affine=False, momentum=0.5)
        >>> before = dict(norm.named_buffers())
        >>> _, after = Apply(norm).with_buffers({}, before, torch.tensor([[1.0], [3.0]]))
        >>> after["running_mean"], before["running_mean"]
        (tensor([1.]), tensor([0.]))
        """
        out, after, _ = self._call(params, buffers, args, kwargs)
        return out, after

    def eval(self) -> Apply:
        """The same function in evaluation mode: no dropout, batch norms by their running statistics."""
        return self.train(False)

    def train(self, mode: bool = True) -> Apply:
        """The same function in training mode, which is how constructors leave modules."""
        return Apply(_copied(self.module).train(mode), self.ties, self.whole, self.transient)

    def __repr__(self) -> str:
        return f"Apply({type(self.module).__name__})"

    def _call(
        self, params: Named, buffers: Named, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Tensor], list[str]]:
        """What forward gives, the buffers after it, and the names of those it changed."""
        self._check(params, buffers)
        fed = {name: x.clone() for name, x in buffers.items()}  # what forward writes, it writes into these
        given = {"params": params, "buffers": fed}
        if torch.compiler.is_dynamo_compiling():  # which traces one thread, and knows functional_call
            named = {p.name: given[p.kind][p.leaf] for p in self._places}
            out = torch.func.functional_call(self.module, named, args, kwargs, tie_weights=False)
            return out, {**fed, **{p.leaf: named[p.name] for p in self._places if p.kind == "buffers"}}, []
        versions = {name: version_of(base(x)) for name, x in fed.items()}
        mine = self._borrow()
        for p in mine.places:
            p.held[p.key] = given[p.kind][p.leaf]
        try:
            out = mine.module(*args, **kwargs)
        except Exception as e:  # the copy is dropped: it is in no known state
            self._explain(e, params, buffers, (args, kwargs))
            raise
        after = dict(fed)
        for p in mine.places:
            x = p.held.get(p.key)
            if p.kind == "buffers" and x is not None and x is not fed[p.leaf]:
                after[p.leaf] = x
        mine.put_back()
        self._idle.append(mine)
        state = {name: x for name, x in after.items() if name not in self.transient}
        changed = [name for name, x in state.items() if x is not fed[name] or version_of(base(x)) != versions[name]]
        if not changed and not self._compared:  # torch's batch_norm writes what its schema does not say
            changed = [name for name, x in state.items() if not _equal(x, buffers[name])]
            self._compared = not changed
        return out, after, changed

    def _check(self, params: Named, buffers: Named) -> None:
        errors: list[ShardingError] = []
        for kind, given in (("params", params), ("buffers", buffers)):
            wanted = self._leaves[kind]
            for name in wanted.keys() - given.keys():
                errors.append(fail(f"{self!r}: {kind}[{name!r}] is missing"))
            for name in given.keys() - wanted.keys():
                other = "buffers" if kind == "params" else "params"
                fix = f"leave it out: it is tied to {self.ties[name]!r}" if name in self.ties else \
                    f"pass it in {other}" if name in self._leaves[other] else "leave it out"  # fmt: skip
                errors.append(fail(f"{self!r}: {kind}[{name!r}] is no leaf of the module", fix=fix))
            for name, x in given.items():
                if not isinstance(x, Tensor):
                    fix = "names are flat: 'a.b', not ['a']['b']" if isinstance(x, Mapping) else \
                        "call it inside shard_map, where leaves are tensors"  # fmt: skip
                    errors.append(fail(f"{self!r}: {kind}[{name!r}] is a {type(x).__name__}, not a tensor", fix=fix))
                elif name in wanted and x.ndim != wanted[name].ndim:
                    shape = tuple(wanted[name].shape)
                    errors.append(fail(f"{self!r}: {kind}[{name!r}] has {x.ndim} dims, not {wanted[name].ndim}",
                                       given=describe(x.dtype, x.shape), module=describe(x.dtype, shape)))  # fmt: skip
        raise_all(sorted(errors, key=str))

    def _explain(self, e: Exception, params: Named, buffers: Named, given: Any) -> None:
        """Add to an error out of forward what a line of the module cannot tell: which leaves were not unsharded."""
        for name, x in params.items():
            want = self._leaves["params"][name].shape
            if x.shape != want:
                e.add_note(f"params[{name!r}] is {list(x.shape)}, in the module {list(want)}: fs.unshard makes it so")
        watch = checker()
        if watch is None or not isinstance(e, ShardingError) or "invariant" not in str(e):
            return
        leaves = {"params": params, "buffers": buffers}
        varied = set[str]().union(*(watch.info(x).type.varying for x in tree.leaves((leaves, given))
                                    if isinstance(x, Tensor)))  # fmt: skip
        for kind, xs in leaves.items():
            for axis in sorted(varied):
                still = [name for name, x in xs.items()
                         if differentiable_dtype(x) and axis in watch.info(x).type.invariant]  # fmt: skip
                if still:
                    rest = f" and {len(still) - 1} more" if len(still) > 1 else ""
                    what = f"in {self!r}, {kind}[{still[0]!r}]{rest} of its {kind} are invariant over {axis!r}"
                    e.args = (f'{e}\n  {what}\n  fix: {kind} = fs.unshard({kind}, its specs, "{axis}")',)

    def _borrow(self) -> _Copy:
        try:
            return self._idle.pop()
        except IndexError:
            for name, m in self.module.named_modules():
                if m.training and getattr(m, "gradient_checkpointing", False) is True:
                    raise fail(f"{self!r}: gradient checkpointing is on in {name or type(m).__name__!r}",
                               "torch.utils.checkpoint runs forward again when the module has its tensors back",
                               fix="leave it off, and wrap what is computed again in fs.remat") from None  # fmt: skip
            module = _copied(self.module)
            return _Copy(module, _places(module, self.ties))


# --- copies ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Place:
    """Where a module keeps one tensor: its own name, and that of the leaf it gets."""

    held: dict[str, Any]
    key: str
    name: str
    leaf: str
    kind: str  # "params" or "buffers"
    transient: bool


def _places(module: nn.Module, ties: Mapping[str, str]) -> list[_Place]:
    first: dict[int, str] = {}
    out = []
    for prefix, m in module.named_modules():
        for kind, held in (("params", m._parameters), ("buffers", m._buffers)):
            for key, x in held.items():
                if x is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    own = first.setdefault(id(x), name)
                    leaf = ties.get(name, ties.get(own, own))
                    out.append(_Place(held, key, name, leaf, kind, key in m._non_persistent_buffers_set))
    return out


class _Copy:
    """A copy of a module, lent to one call at a time, and what all that can change in it was."""

    def __init__(self, module: nn.Module, places: list[_Place]) -> None:
        self.module, self.places = module, places
        held: list[Any] = [x for x in _reached(module) if isinstance(x, (dict, list, set))]
        self._empty = [x for x in held if not x]  # nearly all: of hooks
        self._full = [(x, copy.copy(x)) for x in held if x]

    def put_back(self) -> None:
        if any(map(len, self._empty)):
            for x in self._empty:
                x.clear()
        for x, was in self._full:
            if not _same(x, was):
                x.clear()
                x.extend(was) if isinstance(x, list) else x.update(was)


def _same(x: Any, was: Any) -> bool:
    """Whether a container still holds the same objects."""
    if isinstance(x, set):
        return bool(x == was)
    pair = (x.values(), was.values()) if isinstance(x, dict) else (x, was)
    return len(x) == len(was) and all(map(is_, *pair))


def _copied(module: nn.Module) -> Any:
    """A module of the same structure and of the same tensors."""
    memo = {id(x): x for x in _reached(module) if isinstance(x, Tensor)}
    try:
        return copy.deepcopy(module, memo)
    except Exception as e:
        raise fail(
            f"{type(module).__name__}: cannot be copied, and each rank of a simulated mesh needs its own",
            f"{type(e).__name__}: {e}",
            fix="keep what copy.deepcopy refuses out of the module",
        ) from e


def _reached(module: nn.Module) -> Iterator[Any]:
    """What a module holds, and what that holds: objects, their attributes, containers, tensors."""
    todo: list[Any] = [module]
    seen: dict[int, Any] = {}
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, (str, int, float, type, FunctionType, ModuleType)):
            continue
        seen[id(x)] = x
        yield x
        if isinstance(x, Tensor):
            continue
        if isinstance(x, Mapping):
            todo += x.values()
        elif isinstance(x, (list, tuple, set, frozenset, deque)):
            todo += x
        elif isinstance(x, MethodType):
            todo.append(x.__self__)
        elif isinstance(x, functools.partial):
            todo += [x.func, *x.args, x.keywords]
        if hasattr(x, "__dict__"):
            todo.append(x.__dict__)


def _equal(x: Tensor, y: Tensor) -> bool:
    """Whether two buffers have the same values, where they have values."""
    x, y = base(x.detach()), base(y.detach())
    if x is y or x.is_meta or isinstance(x, FakeTensor):
        return True
    return x.shape == y.shape and bool(((x == y) | ((x != x) & (y != y))).all())  # NaN is NaN


__all__ = ["Apply"]
