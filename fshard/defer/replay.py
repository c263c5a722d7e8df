"""Compute a box of a recorded value, bitwise equal to that box of the full value.

Operations of `POINTWISE` compute an element with the same bits at any position in memory (a test shows it for each), so
they run on only the box, as do draws, views, casts and writes. Every other operation is computed in full, once for
each leaf, on the CPU, and the box is cut out.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fshard.errors import ShardingError, fail
from fshard.random.threads import fill_parts, one_compute_thread, threads_to_fill
from fshard.spec import Box, box_bounds, box_shape, full_box, relative_box

from . import graph
from .distributions import draw_box
from .strided_view import row_major_strides

POINTWISE = frozenset([
    "abs", "add", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "clamp", "clamp_max", "clamp_min",
    "conj_physical", "cos", "div", "eq", "erfinv", "exp", "floor", "ge", "gt", "le", "log", "logical_and",
    "logical_not", "logical_or", "logical_xor", "lt", "masked_fill", "maximum", "minimum", "mul", "ne", "neg",
    "reciprocal", "round", "rsqrt", "rsub", "sgn", "sign", "sin", "sqrt", "sub", "trunc", "where",
])  # fmt: skip
_CHUNK = 1 << 20  # most elements that are computed at a time


def is_pointwise(node: graph.Op) -> bool:
    """Return whether each element has the same bits at any position in memory."""
    name = node.call.name.rstrip("_")
    if name in ("add", "sub", "rsub"):  # with alpha, vector instructions do not round the product
        return node.call.kwargs.get("alpha", 1) == 1 and len(node.call.args) <= 2
    if name == "rsqrt":  # a 16-bit result is rounded once in a vector, twice in the remainder
        return node.dtype.itemsize >= 4
    return name in POINTWISE


def is_local(node: graph.Node) -> bool:
    """Return whether a box of the value needs only boxes of its inputs."""
    if isinstance(node, graph.Op):
        return is_pointwise(node)
    return not (isinstance(node, graph.Draw) and node.distribution == "randperm")


def bytes_in_full(root: graph.Node) -> int:
    """Return the bytes that are computed in full for any box of the root, except views and ranges."""
    heads = [n for node in graph.topological_order(root) if not is_local(node) for n in (node, *graph.inputs(node))]
    nodes = [n for n in graph.topological_order(*heads) if not isinstance(n, (graph.View, graph.Reshape, graph.Full))]
    if all(graph.step_name(n) in ("cast", "arange", "linspace") for n in nodes):
        return 0
    return sum(n.nbytes for n in nodes)


class Replay:
    """One evaluation of a graph, with the keys of its draws, on a device."""

    def __init__(self, root: graph.Node, key_of: Callable[[graph.Draw], Tensor], device: torch.device) -> None:
        self.root, self.key_of, self.device = root, key_of, device
        uses = Counter(id(n) for node in graph.topological_order(root) for n in graph.inputs(node))
        self._shared = {i for i, n in uses.items() if n > 1}
        self._cached: dict[tuple[int, tuple[tuple[int, int], ...]], Tensor] = {}  # boxes of shared nodes
        self._partial: dict[int, tuple[Box, Tensor]] = {}  # sources of the writes in progress
        self._results: dict[int, list[Tensor]] = {}  # of calls computed in full
        self._on_cpu = self if device.type == "cpu" else Replay(root, key_of, torch.device("cpu"))

    def fill(self, box: Box, dtype: torch.dtype) -> Tensor:
        """Return a box of the root in a dtype, computed in steps along one dim into memory of that size.

        On a CPU the steps are divided between threads, unless a value is computed in full, once for all of them.
        """
        sizes = box_shape(box)
        nodes = graph.topological_order(self.root)
        in_steps = not isinstance(self.root, (graph.Draw, graph.Full)) and all(map(is_local, nodes))
        threads = threads_to_fill(math.prod(sizes), self.device) if in_steps else 0
        chunk = _CHUNK // max(1, threads)
        if math.prod(sizes) <= chunk or isinstance(self.root, (graph.Draw, graph.Full)):
            one_thread = one_compute_thread(then=torch.get_num_threads()) if threads else contextlib.nullcontext()
            with one_thread, torch.no_grad():
                return self.evaluate(self.root, box).to(dtype).contiguous()
        out = torch.empty(sizes, dtype=dtype, device=self.device)
        dim = next(d for d, n in enumerate(sizes) if n > 1)
        step = max(1, chunk * sizes[dim] // math.prod(sizes))

        def filler() -> Callable[[int], None]:
            # Each thread has its boxes of shared nodes.
            replay = Replay(self.root, self.key_of, self.device) if threads else self

            def fill(start: int) -> None:
                n = min(step, sizes[dim] - start)
                part = slice(box[dim].start + start, box[dim].start + start + n)
                replay._cached.clear()
                with torch.no_grad():
                    x = replay.evaluate(self.root, (*box[:dim], part, *box[dim + 1 :]))
                    out.narrow(dim, start, n).copy_(x)

            return fill

        fill_parts(range(0, sizes[dim], step), filler, threads)
        return out

    def evaluate(self, node: graph.Node, box: Box) -> Tensor:
        """Return a box of a value, in memory that the caller may overwrite."""
        if id(node) not in self._shared or isinstance(node, (graph.Full, graph.Constant)):
            return self._compute(node, box)
        if id(node) in self._partial:
            outer, x = self._partial[id(node)]
            if all(o.start <= i.start and i.stop <= o.stop for o, i in zip(outer, box, strict=True)):
                return x[relative_box(box, outer)].clone()
        key = id(node), box_bounds(box)
        if key not in self._cached:
            self._cached[key] = self._compute(node, box)
        return self._cached[key].clone()

    def _compute(self, node: graph.Node, box: Box) -> Tensor:
        sizes = box_shape(box)
        if 0 in sizes:
            return torch.empty(sizes, dtype=node.dtype, device=self.device)
        match node:
            case graph.Full():
                return torch.full(sizes, node.value, dtype=node.dtype, device=self.device)
            case graph.Uninitialized():
                if not _has_nan(node.dtype):
                    raise _read_before_write(node)
                return torch.full(sizes, math.nan, dtype=node.dtype, device=self.device)  # `validate` finds it
            case graph.Constant():
                return node.tensor[box].to(self.device, copy=True)
            case graph.Draw():
                key = self.key_of(node)
                return draw_box(node.distribution, node.args, key, node.shape, box, node.dtype, self.device)
            case graph.Cast():
                return self.evaluate(node.source, box).to(node.dtype)
            case graph.View():
                hull, steps = node.region.in_base(box)
                x = node.region.arrange(self.evaluate(node.source, hull)[steps], sizes)
                return x.contiguous() if 0 in x.stride() else x
            case graph.Reshape():
                return self._reshape(node, box)
            case graph.Write():
                return self._write(node, box)
            case graph.Op() if is_pointwise(node):
                parts = [self.evaluate(n, _broadcast(n.shape, box)) for n in node.call.inputs]
                # An operation in place overwrites its first argument, which has the shape of the result.
                return node.call.run(parts)[node.output]
            case graph.Op():
                return self._on_cpu._run_in_full(node.call)[node.output][box].to(self.device, copy=True)
        raise AssertionError(node)

    def _run_in_full(self, call: graph.Call) -> list[Tensor]:
        if id(call) not in self._results:
            self._results[id(call)] = call.run([self.evaluate(n, full_box(n.shape)).contiguous() for n in call.inputs])
        return self._results[id(call)]

    def _reshape(self, node: graph.Reshape, box: Box) -> Tensor:
        """Evaluate the rows of the source that overlap the box, and cut the box out."""
        strides = row_major_strides(node.shape)
        first = sum(s.start * stride for s, stride in zip(box, strides, strict=True))
        last = sum((s.stop - 1) * stride for s, stride in zip(box, strides, strict=True))
        source = node.source
        if not source.shape:
            return self.evaluate(source, ()).reshape(box_shape(box))
        row = math.prod(source.shape[1:])
        rows = slice(first // row, last // row + 1)
        flat = self.evaluate(source, (rows, *full_box(source.shape[1:]))).contiguous().view(-1)
        return flat.as_strided(box_shape(box), strides, flat.storage_offset() + first - rows.start * row)

    def _write(self, node: graph.Write, box: Box) -> Tensor:
        """Evaluate the base, then each write whose region overlaps the box.

        This is a loop, not a recursion: a constructor that fills 256 experts one by one makes a chain of 256 writes.
        """
        writes: list[graph.Write] = []
        base: graph.Node = node
        bounds = box_bounds(box)
        while isinstance(base, graph.Write) and (base is node or (id(base), bounds) not in self._cached):
            writes.append(base)
            base = base.source
        # Integers have no NaN to mark memory of torch.empty: a mask marks the elements that are not written yet.
        missing = None
        if isinstance(base, graph.Uninitialized) and not _has_nan(base.dtype):
            missing = torch.ones(box_shape(box), dtype=torch.bool, device=self.device)
            out = torch.zeros(box_shape(box), dtype=base.dtype, device=self.device)
        else:
            out = self.evaluate(base, box).contiguous()
        for w in reversed(writes):
            part = w.region.in_view(box)
            if part is None:
                continue
            view, slices = part
            if id(w.source) in self._shared and missing is None:
                self._partial[id(w.source)] = (box, out)  # the value may be computed from it
            value = self.evaluate(w.value, view)
            self._partial.pop(id(w.source), None)
            w.region.arrange(out[slices], value.shape).copy_(value)
            if missing is not None:
                missing[slices] = False
        if missing is not None and missing.any():
            raise _read_before_write(base)
        return out


def _has_nan(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _read_before_write(node: graph.Node) -> ShardingError:
    return fail("memory of torch.empty is used before it is written", "integers have no NaN to mark it with",
                fix="torch.zeros in the constructor", shape=list(node.shape), dtype=node.dtype)  # fmt: skip


def _broadcast(shape: Sequence[int], box: Box) -> Box:
    """Return the box of an operand that a box of the result needs."""
    return tuple(slice(0, 1) if n == 1 else s for n, s in zip(shape, box[len(box) - len(shape) :], strict=True))
