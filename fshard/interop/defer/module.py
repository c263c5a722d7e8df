"""`defer`: any `nn.Module` constructor as a pure function and a tree of described leaves."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fshard._callsite import user_frame
from fshard._comm import in_region
from fshard.errors import ShardingError, fail, raise_all
from fshard.init import (
    Arange,
    Deferred,
    Eye,
    Full,
    Initializer,
    Normal,
    Scope,
    TruncNormal,
    Uniform,
    describe_initializer,
)
from fshard.random import fold_in
from fshard.spec import Box, describe

from . import graph
from .evaluate import fill, filling, is_local, whole_bytes
from .functional import Apply
from .graph import Draw, Node, draws, named, order
from .record import EAGER, Recorder, refuse
from .recording import recording

Tree = dict[str, dict[str, Deferred]]
Source = tuple[int, int]  # (which of the owners' keys, which of its draws)


def defer(
    constructor: Callable[[], nn.Module], *, budget: int = 1 << 30, reference: int | None = None
) -> tuple[Apply, Tree]:
    """Run a constructor without making its parameters: a pure function, and a tree of their descriptions.

    What the constructor does to its parameters and buffers is recorded. `materialize` replays it, for each device on
    its own part alone, with draws by its key: the same values on every mesh, of the distributions the constructor
    draws from (but not the numbers of `torch.manual_seed`; its `generator=` is ignored). Operations that need a whole
    tensor (a QR) compute it in full, one leaf at a time, and keep the part: `apply.whole` says which.

    The tree is `{"params": {name: Deferred}, "buffers": {name: Deferred}}`. A tied leaf stands once, by its first name.
    Copies of a drawn leaf (`nn.TransformerEncoder` copies its layer) are equal. Python's and numpy's random numbers
    are drawn when it is recorded, once.

    Args:
        budget: the most bytes that may be computed in full for one leaf.
        reference: a seed: build eagerly under `torch.manual_seed(reference)` instead, and cut. The leaves are then
            bitwise those of the constructor, on every mesh, and take its memory.

    >>> apply, tree = defer(lambda: torch.nn.Embedding(1000, 64, padding_idx=0))
    >>> tree
    {'params': {'weight': f32[1000, 64] = recorded(normal, write)}, 'buffers': {}}
    >>> materialize(tree["params"], row("model"), make_mesh(model=4), key=key(0))
    {'weight': f32[1000@model, 64]}

    Raises ShardingError for what cannot be recorded, naming the line of the constructor, and listing every leaf that
    needs more than `budget`.
    """
    if in_region():
        raise fail("defer: called inside shard_map, where leaves are local parts", fix="call it outside")
    if reference is not None:
        return _eager(constructor, reference)
    with recording(budget) as recorder:
        module = _built(constructor)
        found = _Leaves.of(module)
        nodes = {name: recorder.node(x) for name, x in found.named()}
        _empty(module, found, recorder)
    tree, whole = _described(found, nodes, budget)
    return Apply(module, found.ties, whole, found.transient), tree


def _built(constructor: Callable[[], nn.Module]) -> nn.Module:
    try:
        module = constructor()
    except RuntimeError as e:  # of torch: what it will not do with a FakeTensor
        if "FakeTensor" not in str(e):
            raise
        lazy = "Uninitialized" in str(e)
        what = "the shape of a lazy layer is decided by its first call" if lazy else \
            "this cannot be done with a tensor that has no storage yet"  # fmt: skip
        frames = [frame for frame, _ in traceback.walk_tb(e.__traceback__)]
        fix = "give the constructor the sizes: Linear for LazyLinear" if lazy else EAGER
        raise refuse(what, fix=fix, frame=user_frame(frames[-1])) from e
    if not isinstance(module, nn.Module):
        raise fail(f"defer: the constructor gave {module!r}", fix="return the nn.Module")
    return module


# --- the leaves of a module -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Leaves:
    """Parameters and buffers by their first names, the other names of each, and where a module holds them."""

    params: dict[str, Tensor]
    buffers: dict[str, Tensor]
    ties: dict[str, str]
    transient: frozenset[str]
    places: tuple[tuple[dict[str, Any], str], ...]

    @staticmethod
    def of(module: nn.Module) -> _Leaves:
        kinds: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        ties: dict[str, str] = {}
        transient: set[str] = set()
        places: list[tuple[dict[str, Any], str]] = []
        first: dict[int, str] = {}
        for path, part in module.named_modules(remove_duplicate=False):
            for held, into in ((part._parameters, kinds[0]), (part._buffers, kinds[1])):
                for key, x in held.items():
                    if x is None:
                        continue
                    name = f"{path}.{key}" if path else key
                    canonical = first.setdefault(id(x), name)
                    places.append((held, key))
                    if canonical != name:
                        ties[name] = canonical
                        continue
                    into[name] = x
                    if held is part._buffers and key in part._non_persistent_buffers_set:
                        transient.add(name)
        return _Leaves(*kinds, ties, frozenset(transient), tuple(places))

    def named(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.params.items()
        yield from self.buffers.items()


def _empty(module: nn.Module, leaves: _Leaves, recorder: Recorder | None) -> None:
    """Put tensors of the meta device in the place of the leaves, and real ones in that of recorded attributes."""
    twins: dict[int, Tensor] = {}
    errors: list[ShardingError] = []
    for _, x in leaves.named():
        y: Tensor = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        twins[id(x)] = nn.Parameter(y, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else y

    def real(x: Any, where: str) -> Any:
        if isinstance(x, Tensor):
            if id(x) in twins:
                return twins[id(x)]
            if recorder is None or recorder.find(x) is None:
                return x
            if draws(recorder.node(x)):
                errors.append(
                    fail(
                        f"defer: {where}: is drawn, and neither a parameter nor a buffer",
                        fix=f"register_buffer({where.rpartition('.')[2]!r}, ..., persistent=False)",
                    )
                )
                return x
            return recorder.value(x, where)
        if type(x) in (list, tuple):
            return type(x)(real(y, f"{where}[{i}]") for i, y in enumerate(x))
        return {k: real(y, f"{where}[{k!r}]") for k, y in x.items()} if type(x) is dict else x

    for path, part in module.named_modules():
        for key, x in list(vars(part).items()):
            if key not in _TORCHS and any(isinstance(y, Tensor) for y in graph.flat(x)):
                part.__dict__[key] = real(x, f"{path}.{key}" if path else key)
    raise_all(errors)
    for held, key in leaves.places:
        held[key] = twins[id(held[key])]


_TORCHS = frozenset(vars(nn.Module()))  # the attributes of every module


# --- descriptions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Recorded:
    """A value that a constructor made in several steps, or of the draws of other leaves, replayed on any box."""

    node: Node
    sources: Mapping[int, Source]  # id of a draw -> whose it is
    owners: tuple[str, ...] = ()  # of other leaves' draws
    name: str = ""

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        keys = key if self.owners else key[None]

        def of(draw: Draw) -> Tensor:
            owner, number = self.sources[id(draw)]
            return fold_in(keys[owner], number) if number else keys[owner]

        try:
            return fill(self.node, box, dtype, filling(self.node, of, device))
        except ShardingError as e:
            raise ShardingError(f"{self.name}: {e}") from None

    def describe(self) -> str:
        """`recorded(normal, write)`: the steps, each kind once; what is computed in full; whose draws they are."""
        steps = dict.fromkeys(named(n) for n in order(self.node) if not isinstance(n, (graph.Full, graph.View)))
        plain = _plain(self.node)
        text = describe_initializer(plain) if plain is not None else f"recorded({', '.join(steps) or 'full'})"
        others = [o for o in self.owners if o != self.name]
        text += f" of {', '.join(others)}" if others else ""
        size = whole_bytes(self.node)
        return text + (f", {size:,} bytes in full" if size else "")


@dataclass(frozen=True, eq=False)
class Reference:
    """A tensor that was made eagerly under a seed."""

    tensor: Tensor
    seed: int

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.tensor[box].to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)

    def describe(self) -> str:
        return f"reference(seed={self.seed})"


def _described(found: _Leaves, nodes: Mapping[str, Node], budget: int) -> tuple[Tree, dict[str, int]]:
    owner: dict[int, tuple[str, int]] = {}  # id of a draw -> (the first leaf that is made of it, its number there)
    tree: Tree = {"params": {}, "buffers": {}}
    whole: dict[str, int] = {}
    errors: list[ShardingError] = []
    for kind, leaves in (("params", found.params), ("buffers", found.buffers)):
        for name in leaves:
            node, own = nodes[name], 0
            drawn = draws(node)
            for draw in drawn:
                if id(draw) not in owner:
                    owner[id(draw)] = (f"{kind}.{name}", own)
                    own += 1
            tree[kind][name] = _leaf(kind, name, node, drawn, owner)
            if size := whole_bytes(node):
                whole[name] = size
            if size > budget:
                ops = sorted({named(n) for n in order(node) if not is_local(n)})
                what = f"defer: {name}: {describe(node.dtype, node.shape)} is computed in full, beyond budget="
                errors.append(fail(what,
                                   f"{size:,} bytes > {budget:,}", operations=", ".join(ops),
                                   fix=f"budget={size}, of each device; or {EAGER}"))  # fmt: skip
    raise_all(errors)
    return tree, whole


def _leaf(kind: str, name: str, node: Node, drawn: Sequence[Draw], owner: Mapping[int, tuple[str, int]]) -> Deferred:
    mine = f"{kind}.{name}"
    owners = tuple(dict.fromkeys(owner[id(d)][0] for d in drawn))
    shared = any(o != mine for o in owners)
    plain = None if shared else _plain(node)
    if plain is not None:
        return Deferred(node.shape, node.dtype, plain)
    sources = {id(d): (owners.index(owner[id(d)][0]), owner[id(d)][1]) for d in drawn}
    if not shared:
        return Deferred(node.shape, node.dtype, Recorded(node, sources, (), name))
    inside = all(o.startswith(f"{kind}.") for o in owners)  # else params and buffers must stay together
    cut = len(kind) + 1 if inside else 0
    scope = Scope(mine[cut:], tuple(o[cut:] for o in owners))
    return Deferred(node.shape, node.dtype, Recorded(node, sources, scope.owners, scope.name), scope)


_LAWS: dict[str, Callable[..., Initializer]] = {"normal": Normal, "uniform": Uniform, "trunc_normal": TruncNormal}


def _plain(node: Node) -> Initializer | None:
    """The initializer of `fs.init` that is all a value is; None if there is none."""
    match node:
        case graph.Full() if not node.dtype.is_complex:
            return Full(node.value)
        case Draw() if node.law in _LAWS:
            return _LAWS[node.law](*node.args)
        case graph.Cast() if isinstance(node.source, Draw) and node.source.law == "normal":
            # A draw is rounded to float32, then to its dtype: that is this cast.
            return Normal(*node.source.args) if node.source.dtype == torch.float32 and node.dtype.itemsize < 4 else None
        case graph.Op() if node.call.name == "eye" and node.dtype.is_floating_point:
            return Eye()
        case graph.Op() if node.call.name == "arange" and node.dtype == torch.int64:
            start, end, step = (*node.call.args, 1)[:3] if len(node.call.args) > 1 else (0, node.call.args[0], 1)
            return Arange(start, step) if all(isinstance(n, int) for n in (start, end, step)) else None
    return None


# --- reference mode -------------------------------------------------------------------------------------------


def _eager(constructor: Callable[[], nn.Module], seed: int) -> tuple[Apply, Tree]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = _built(constructor)
    found = _Leaves.of(module)
    kinds = (("params", found.params), ("buffers", found.buffers))
    tree = {
        kind: {name: Deferred(tuple(x.shape), x.dtype, Reference(x.detach(), seed)) for name, x in leaves.items()}
        for kind, leaves in kinds
    }
    _empty(module, found, None)
    return Apply(module, found.ties, {}, found.transient), tree


__all__ = ["Recorded", "Reference", "defer"]
