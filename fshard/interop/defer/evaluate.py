"""A recorded value on a box: only what the box needs is computed, and every element comes out as in the whole.

Operations of `POINTWISE` give each element the same bits wherever it lies in memory (a test shows it for each), so they
run on the box alone. So do draws, views, casts, writes, and what an index says (`eye`, `tril`, `cat`). Any
other operation is computed in full, once for each leaf, on the CPU, and the box cut out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fshard.errors import fail
from fshard.spec import Box, box_shape, full_box, relative_box

from .graph import Cast, Constant, Draw, Full, Node, Op, Reshape, Unwritten, View, Write, inputs, order
from .laws import LAWS

POINTWISE = frozenset([
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "clamp", "clamp_max", "clamp_min",
    "cos", "div", "eq", "erfinv", "exp", "floor", "ge", "gt", "le", "log", "logical_and", "logical_not", "logical_or",
    "logical_xor", "lt", "masked_fill", "maximum", "minimum", "mul", "ne", "neg", "reciprocal", "round", "rsqrt",
    "rsub", "sgn", "sign", "sin", "sqrt", "sub", "trunc", "where",
])  # fmt: skip
INDEXED = frozenset(["cat", "eye", "stack", "tril", "triu"])
_CHUNK = 1 << 20  # elements at a time, where a result is computed in steps


def is_pointwise(node: Node) -> bool:
    """Whether each element is the same wherever it lies in memory."""
    name = node.call.name.rstrip("_") if isinstance(node, Op) else ""
    if not isinstance(node, Op) or name not in POINTWISE:
        return False
    if name in ("add", "sub", "rsub"):  # alpha: a vector multiplies and adds without rounding between
        return node.call.kwargs.get("alpha", 1) == 1 and len(node.call.args) <= 2
    return name != "rsqrt" or node.dtype.itemsize >= 4  # rounded once in a vector, twice beside it


def is_local(node: Node) -> bool:
    """Whether a box of the value needs only boxes of what it is made of."""
    if isinstance(node, Op):
        return is_pointwise(node) or node.call.name in INDEXED
    return not (isinstance(node, Draw) and node.law == "randperm")


def whole_nodes(root: Node) -> list[Node]:
    """The nodes that any box of the root needs in full."""
    heads = [n for node in order(root) if not is_local(node) for n in (node, *inputs(node))]
    return order(*heads)


def whole_bytes(root: Node) -> int:
    """The bytes that are computed in full for any box of the root, views and ranges aside."""
    small = ("arange", "linspace")
    nodes = [n for n in whole_nodes(root) if not isinstance(n, (View, Reshape, Full))]
    if all(isinstance(n, Cast) or (isinstance(n, Op) and n.call.name in small) for n in nodes):
        return 0
    return sum(n.nbytes for n in nodes)


@dataclass
class Filling:
    """One evaluation: the keys of the draws, the device, and what has been computed already."""

    key: Callable[[Draw], Tensor]
    device: torch.device
    shared: frozenset[int]  # the nodes that several others use
    chunk: dict[int, tuple[Box, Tensor]] = field(default_factory=dict)
    full: dict[int, list[Tensor]] = field(default_factory=dict)
    evaluated: Counter[str] = field(default_factory=Counter)  # for tests: how many nodes of each kind
    on_cpu: Filling | None = None

    def cpu(self) -> Filling:
        """The same on the CPU, for what is computed in full."""
        if self.device.type == "cpu":
            return self
        if self.on_cpu is None:
            self.on_cpu = Filling(self.key, torch.device("cpu"), self.shared)
        return self.on_cpu


def filling(root: Node, key: Callable[[Draw], Tensor], device: torch.device) -> Filling:
    """What an evaluation of `root` starts with."""
    uses = Counter(id(n) for node in order(root) for n in inputs(node))
    return Filling(key, device, frozenset(i for i, n in uses.items() if n > 1))


def fill(root: Node, box: Box, dtype: torch.dtype, now: Filling) -> Tensor:
    """The box of a value in a dtype, computed in steps along one dim into memory of that size."""
    sizes = box_shape(box)
    with torch.no_grad():
        if math.prod(sizes) <= _CHUNK or isinstance(root, (Draw, Full)):
            return evaluate(root, box, now).to(dtype).contiguous()
        out = torch.empty(sizes, dtype=dtype, device=now.device)
        dim = next(d for d, n in enumerate(sizes) if n > 1)
        step = max(1, _CHUNK * sizes[dim] // math.prod(sizes))
        for at in range(0, sizes[dim], step):
            n = min(step, sizes[dim] - at)
            part = slice(box[dim].start + at, box[dim].start + at + n)
            now.chunk.clear()
            out.narrow(dim, at, n).copy_(evaluate(root, (*box[:dim], part, *box[dim + 1 :]), now))
        return out


def evaluate(node: Node, box: Box, now: Filling) -> Tensor:
    """The box of a value. The tensor is the caller's own: nothing else refers to its elements."""
    if id(node) not in now.shared or isinstance(node, (Full, Constant)):
        return _compute(node, box, now)
    held = now.chunk.get(id(node))
    if held is None or not _holds(held[0], box):
        held = now.chunk[id(node)] = (box, _compute(node, box, now))
    return held[1][relative_box(box, held[0])].clone()


def _holds(outer: Box, inner: Box) -> bool:
    return all(o.start <= i.start and i.stop <= o.stop for o, i in zip(outer, inner, strict=True))


def _compute(node: Node, box: Box, now: Filling) -> Tensor:
    now.evaluated[type(node).__name__.lower()] += 1
    sizes = box_shape(box)
    if 0 in sizes:
        return torch.empty(sizes, dtype=node.dtype, device=now.device)
    match node:
        case Full():
            return torch.full(sizes, node.value, dtype=node.dtype, device=now.device)
        case Unwritten():
            return _poison(node, sizes, now)
        case Constant():
            return node.tensor[box].to(now.device, copy=True)
        case Draw():
            return LAWS[node.law](now.key(node), node.shape, box, node.dtype, now.device, *node.args)
        case Cast():
            return evaluate(node.source, box, now).to(node.dtype)
        case View():
            hull, steps = node.window.source(box)
            seen = node.window.arrange(evaluate(node.source, hull, now)[steps], sizes)
            return seen.contiguous() if 0 in seen.stride() else seen
        case Reshape():
            return _reshaped(node, box, now)
        case Write():
            return _written(node, box, now)
        case Op():
            return _operated(node, box, now)
    raise AssertionError(node)


def _poison(node: Node, sizes: Sequence[int], now: Filling) -> Tensor:
    """NaN, which `validate` finds; integers have none."""
    if not (node.dtype.is_floating_point or node.dtype.is_complex):
        raise unwritten(node)
    return torch.full(sizes, math.nan, dtype=node.dtype, device=now.device)


def unwritten(node: Node) -> Exception:
    return fail("memory of torch.empty is used before it is written", "it holds no numbers, and integers have no NaN",
                fix="torch.zeros in the constructor", shape=list(node.shape), dtype=node.dtype)  # fmt: skip


def _reshaped(node: Reshape, box: Box, now: Filling) -> Tensor:
    """The rows of the source that the box lies in, then the box of them."""
    strides = _strides(node.shape)
    first = sum(s.start * stride for s, stride in zip(box, strides, strict=True))
    last = sum((s.stop - 1) * stride for s, stride in zip(box, strides, strict=True))
    source = node.source
    if not source.shape:
        return evaluate(source, (), now).reshape(box_shape(box))
    row = math.prod(source.shape[1:])
    rows = slice(first // row, last // row + 1)
    flat = evaluate(source, (rows, *full_box(source.shape[1:])), now).reshape(-1)
    return flat.as_strided(box_shape(box), strides, flat.storage_offset() + first - rows.start * row)


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[d + 1 :]) for d in range(len(shape))]


def _written(node: Write, box: Box, now: Filling) -> Tensor:
    """The base, then each write in turn, where it meets the box."""
    writes: list[Write] = []
    base: Node = node
    while isinstance(base, Write) and (base is node or id(base) not in now.chunk):
        writes.append(base)
        base = base.source
    poisonless = isinstance(base, Unwritten) and not (base.dtype.is_floating_point or base.dtype.is_complex)
    if poisonless:  # every element must come from a write
        out = torch.zeros(box_shape(box), dtype=base.dtype, device=now.device)
        missing = torch.ones(box_shape(box), dtype=torch.bool, device=now.device)
    else:
        out = evaluate(base, box, now)
        out = out if out.is_contiguous() else out.contiguous()
    for w in reversed(writes):
        met = w.window.meets(box)
        if met is None:
            continue
        view, inside = met
        before = now.chunk.get(id(w.source))
        if id(w.source) in now.shared and not poisonless:
            now.chunk[id(w.source)] = (box, out)  # the value may be made of what is there
        value = evaluate(w.value, view, now)
        if before is None:
            now.chunk.pop(id(w.source), None)
        else:
            now.chunk[id(w.source)] = before
        target = out[inside]
        w.window.arrange(target, value.shape).copy_(value)
        if poisonless:
            missing[inside] = False
    if poisonless and missing.any():
        raise unwritten(base)
    return out


def _operated(node: Op, box: Box, now: Filling) -> Tensor:
    call = node.call
    if is_pointwise(node):
        # In place, the first argument has the shape of the result and is ours to overwrite.
        parts = [evaluate(n, _broadcast(n.shape, node.shape, box), now) for n in call.inputs]
        return call.run(parts)[node.out]
    if call.name in INDEXED:
        return _indexed(node, box, now)
    if id(call) not in now.full:
        at = now.cpu()
        if id(call) not in at.full:
            at.full[id(call)] = call.run([evaluate(n, full_box(n.shape), at).contiguous() for n in call.inputs])
        now.full[id(call)] = at.full[id(call)]
    return now.full[id(call)][node.out][box].to(now.device, copy=True)


def _broadcast(shape: Sequence[int], out: Sequence[int], box: Box) -> Box:
    """The box of an operand that a box of the result needs."""
    under = box[len(out) - len(shape) :]
    return tuple(slice(0, 1) if n == 1 else s for n, s in zip(shape, under, strict=True))


def _indexed(node: Op, box: Box, now: Filling) -> Tensor:
    """Where each element comes from is told by its index."""
    call, sizes = node.call, box_shape(box)
    if call.name in ("cat", "stack"):
        dim = int(call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)) % len(node.shape)
        return torch.cat(list(_pieces(node, dim, box, now)), dim)
    at = [torch.arange(s.start, s.stop, device=now.device) for s in box[-2:]]
    if call.name == "eye":
        return (at[0][:, None] == at[1]).to(node.dtype)
    diagonal = int(call.args[1] if len(call.args) > 1 else call.kwargs.get("diagonal", 0))
    beyond = at[1] - at[0][:, None]
    out = evaluate(call.inputs[0], box, now)
    lost = beyond > diagonal if call.name == "tril" else beyond < diagonal
    return out.masked_fill_(lost.expand(sizes), 0)


def _pieces(node: Op, dim: int, box: Box, now: Filling) -> Iterable[Tensor]:
    start = 0
    stacked = node.call.name == "stack"
    for part in (node.call.inputs[slot.at] for slot in node.call.args[0]):
        if not stacked and len(part.shape) != len(node.shape):
            continue  # torch lets an empty tensor of one dim stand among any
        n = 1 if stacked else part.shape[dim]
        low, high = max(box[dim].start, start) - start, min(box[dim].stop, start + n) - start
        if low < high:
            if stacked:
                yield evaluate(part, (*box[:dim], *box[dim + 1 :]), now).unsqueeze(dim).to(node.dtype)
            else:
                yield evaluate(part, (*box[:dim], slice(low, high), *box[dim + 1 :]), now).to(node.dtype)
        start += n
