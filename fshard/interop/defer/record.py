"""Recording a constructor: its operations run on tensors without storage, and what they mean becomes a graph.

A tensor is known by where it lies: its storage, and there its sizes, strides and offset. So a view, a detached
parameter or `param.data = x` needs no bookkeeping of its own: each storage has one current value, and each way to
look at it a chain of views. Writing through a view replaces the storage's value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fshard._callsite import quote, site
from fshard._torch_compat import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    UnsupportedOperatorException,
    storage_id,
    version_of,
    without_dispatch,
)
from fshard.errors import ShardingError, fail

from .evaluate import evaluate, filling, whole_bytes
from .graph import (
    Constant,
    Flat,
    Node,
    Op,
    Other,
    Slot,
    Step,
    Unwritten,
    cast,
    constant,
    draws,
    extend,
    flat,
    order,
    read,
    swap,
)
from .graph import write as written
from .meaning import Meaning, drawn, folded, made, overwritten
from .window import identity, window_of

Place = tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int]
EAGER = "fs.defer(constructor, reference=0), which builds it eagerly"


def place_of(x: Tensor) -> Place:
    """How a tensor lies in its storage."""
    return x.dtype, tuple(x.shape), x.stride(), int(x.storage_offset())


def refuse(what: str, *notes: str, fix: str = EAGER, frame: FrameType | None = None, **facts: object) -> ShardingError:
    """An error that names the line of the constructor."""
    at = site(frame)
    where = () if at is None else (f"{at}", *(f"  {line}" for line in quote(at).splitlines()))
    return fail(f"defer: {what}", *where, *notes, fix=fix, **facts)


@dataclass
class Buffer:
    """A storage: its value now, as a tensor of the shape it was made with, and the views of it that are known."""

    storage: Any  # kept: as long as it lives, nothing else has its address
    current: Node
    views: dict[Place, tuple[Step, ...]] = field(default_factory=dict)
    literal: bool = False  # it was made outside, and is kept as one line of numbers


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records what every operation means. Tensors it has not made are literals: operations on them alone just run."""

    def __init__(self, budget: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.budget = budget
        self.buffers: dict[int, Buffer] = {}
        self.constants: dict[int, tuple[Tensor, int, Node]] = {}

    # --- what is known of a tensor ----------------------------------------------------------------------------

    def find(self, x: Tensor) -> Buffer | None:
        """The buffer a tensor lies in; None for a literal."""
        if x.layout is not torch.strided:
            return None
        return self.buffers.get(storage_id(x))

    def steps(self, x: Tensor, buffer: Buffer) -> tuple[Step, ...]:
        """The chain of views that a tensor is of its buffer."""
        found = buffer.views.get(place_of(x))
        if found is None and buffer.literal and x.dtype == buffer.current.dtype:
            found = buffer.views[place_of(x)] = _in_line(buffer.current.shape[0], x)
        if found is None:
            raise refuse("this view of a tensor is none that was made by an operation",
                         shape=list(x.shape), strides=list(x.stride()))  # fmt: skip
        return found

    def node(self, x: Tensor) -> Node:
        """The value of a tensor now."""
        buffer = self.find(x)
        if buffer is not None:
            return read(buffer.current, self.steps(x, buffer))
        if isinstance(x, FakeTensor) or x.layout is not torch.strided or x.is_meta:
            raise refuse("a literal that is on the meta device, sparse, or of an operation that was not seen",
                         fix=f"dense tensors that have values; or {EAGER}")  # fmt: skip
        held = self.constants.get(id(x))
        if held is None or held[1] != version_of(x):
            with without_dispatch(), torch.no_grad():
                held = x, version_of(x), constant(x.detach().clone())
            self.constants[id(x)] = held
        return held[2]

    def new(self, x: Tensor, value: Node) -> None:
        """A tensor with a storage of its own has this value."""
        storage = x.untyped_storage()
        self.buffers[storage_id(x)] = Buffer(storage, value, {place_of(x): ()})

    def write(self, x: Tensor, value: Node) -> None:
        """A tensor is overwritten with a value."""
        buffer = self.find(x)
        if buffer is None:  # a literal no longer: its storage, as a line of numbers
            storage = x.untyped_storage()
            with without_dispatch(), torch.no_grad():
                line = x.detach().as_strided((storage.nbytes() // x.itemsize,), (1,), 0)
                value_before = Constant(tuple(line.shape), line.dtype, line.clone())
            buffer = self.buffers[storage_id(x)] = Buffer(storage, value_before, literal=True)
        value = cast(value, x.dtype)
        buffer.current = written(buffer.current, self.steps(x, buffer), value)

    # --- operations -------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "prim":
            return func(*args, **kwargs)
        tensors = [x for x in flat((args, kwargs)) if isinstance(x, Tensor)]
        known = [self.find(x) is not None or isinstance(x, FakeTensor) for x in tensors]
        random = torch.Tag.nondeterministic_seeded in func.tags
        if tensors and not any(known) and not random:
            with without_dispatch():
                return func(*args, **kwargs)
        if kwargs.get("generator") is not None:
            kwargs["generator"] = None  # keys decide
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")  # the mesh decides
        if torch.Tag.inplace_view in func.tags:
            return self._moved(func, args, kwargs)
        targets = _targets(func, args, kwargs)
        meaning = Meaning(func, args, kwargs, self.node)
        if targets:
            return self._write(meaning, targets, random)
        if _is_view(func):
            return self._view(func, args, kwargs, tensors)
        return self._make(meaning, tensors, random)

    def _write(self, op: Meaning, targets: list[Tensor], random: bool) -> Any:
        target = targets[0]
        if op.inplace:
            value = drawn(op, tuple(target.shape), target.dtype) if random else overwritten(op, target)
            if value is not None:
                self.write(target, value)
                return target
        if op.name == "eye":  # eye(n, out=tensor)
            self.write(target, op.op(tuple(target.shape), target.dtype))
            return target
        if random:
            raise self._no_rule(op)
        call = op.call()
        slot = {id(x): y.at for x, y in zip(flat((op.args, op.kwargs)), flat((call.args, call.kwargs)), strict=False)
                if isinstance(y, Slot)}  # fmt: skip
        with _recordable():
            out = op.func(*op.args, **op.kwargs)
        results = [x for x in flat(out) if isinstance(x, Tensor)]
        written_ = [r.alias_info is not None for r in op.func._schema.returns]
        for x, same in zip(results, written_, strict=False):  # batch norm gives new tensors beside
            if not same:
                self.new(x, Op(tuple(x.shape), x.dtype, call, next(i for i, y in enumerate(results) if y is x)))
        for t in targets:
            at = 0 if op.inplace and len(targets) == 1 else len(results) + slot[id(t)]
            self.write(t, folded(Op(tuple(t.shape), t.dtype, call, at)))
        again = iter(targets)
        back = [next(again) if same else x for x, same in zip(results, written_, strict=False)]
        return back[0] if isinstance(out, Tensor) else type(out)(back) if results else out

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`t_()` and its kind: another view, by the same tensor object."""
        x = args[0]
        name = func._schema.name.split("::")[-1]
        if name == "set_" and isinstance(x, FakeTensor) and isinstance(args[1], FakeTensor):
            return func(*args, **kwargs)  # it lies elsewhere now, and is known by that
        same = getattr(torch.ops.aten, name.rstrip("_"), None)
        buffer = self.find(x)
        if same is None or buffer is None or name in ("set_", "resize_", "resize_as_"):
            raise refuse(f"{name} gives a tensor another storage", fix="make a new tensor")
        shape, steps = tuple(x.shape), self.steps(x, buffer)
        out = func(*args, **kwargs)
        step = self._step(getattr(same, func._overloadname), args[1:], kwargs, shape, x.dtype, out, 0)
        buffer.views[place_of(out)] = extend(steps, step)
        return out

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
        source = tensors[0]
        if isinstance(source, FakeTensor):
            with _recordable():
                out = func(*args, **kwargs)
        else:  # a literal that has been written to: its views lie in its own storage
            with without_dispatch():
                out = func(*args, **kwargs)
        self._viewed(func, args, kwargs, source, out)
        return out

    def _viewed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: Tensor, out: Any) -> None:
        buffer = self.find(source)
        if buffer is None:
            self.node(source)  # raises
            return
        steps = self.steps(source, buffer)
        for at, x in enumerate(y for y in flat(out) if isinstance(y, Tensor)):
            place = place_of(x)
            if place not in buffer.views:
                step = self._step(func, args[1:], kwargs, tuple(source.shape), source.dtype, x, at)
                buffer.views[place] = extend(steps, step)

    def _step(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype,
        out: Tensor, at: int,
    ) -> Step:  # fmt: skip
        name, to = func._schema.name.split("::")[-1], tuple(out.shape)
        if dtype == out.dtype:
            window = window_of(name, shape, to, at, args, kwargs)
            if window is not None:
                return window
            if name in ("view", "_unsafe_view", "_reshape_alias", "unflatten", "flatten"):
                return Flat(to)
            if shape == to and name in ("detach", "alias"):
                return identity(to)
        return Other(name, func, args, kwargs, at, to, out.dtype)

    def _make(self, op: Meaning, tensors: list[Tensor], random: bool) -> Any:
        if not op.gives_tensors:
            return self._now(op)
        try:
            with _recordable():
                out = op.func(*op.args, **op.kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException):
            return self._now(op)
        made_ = [x for x in flat(out) if isinstance(x, Tensor)]
        for x in made_:
            if x.layout is not torch.strided:
                raise refuse(f"{op.name} gives a tensor of layout {x.layout}", fix="dense tensors")
        if random:
            value = drawn(op, tuple(made_[0].shape), made_[0].dtype) if len(made_) == 1 else None
            if value is None:
                raise self._no_rule(op)
            self.new(made_[0], value)
            return out
        if len(made_) == 1:
            storage = storage_id(made_[0])
            if storage in self.buffers:  # it gave its argument, or a view its schema does not tell of
                source = next((x for x in tensors if storage_id(x) == storage), None)
                if source is not None:
                    self._viewed(op.func, op.args, op.kwargs, source, out)
                    return out
            self.new(made_[0], made(op, tuple(made_[0].shape), made_[0].dtype))
            return out
        call = op.call()
        for at, x in enumerate(made_):
            self.new(x, Op(tuple(x.shape), x.dtype, call, at))
        return out

    # --- values that are needed at once -----------------------------------------------------------------------

    def _now(self, op: Meaning) -> Any:
        """Run an operation whose result the constructor looks at, if no draw decides it."""
        what = {"_local_scalar_dense": ".item()", "equal": "torch.equal()"}.get(op.name, f"{op.name}()")
        tensors = {id(x): self.value(x, what) for x in flat((op.args, op.kwargs)) if isinstance(x, Tensor)}
        put = lambda x: tensors[id(x)] if isinstance(x, Tensor) else x  # noqa: E731
        with without_dispatch():
            return op.func(*swap(op.args, put), **swap(op.kwargs, put))

    def value(self, x: Tensor, what: str) -> Tensor:
        """The numbers a recorded tensor has. Raises ShardingError where they are not decided."""
        node = self.node(x)
        if draws(node):
            raise refuse(f"{what} needs numbers that are drawn only when a leaf is placed, by its key",
                         fix=f"compute it from the configuration; or {EAGER}")  # fmt: skip
        if any(isinstance(n, Unwritten) for n in order(node)):
            raise refuse(f"{what} reads memory of torch.empty that nothing was written to", fix="torch.zeros")
        if max(node.nbytes, whole_bytes(node)) > self.budget:
            raise refuse(f"{what} computes more than budget= in full", bytes=node.nbytes, budget=self.budget,
                         fix="a larger budget=")  # fmt: skip
        with without_dispatch(), torch.no_grad():
            now = filling(node, _no_key, torch.device("cpu"))
            return evaluate(node, tuple(slice(0, n) for n in node.shape), now).contiguous()

    def _no_rule(self, op: Meaning) -> ShardingError:
        return refuse(f"there is no rule for the draws of {op.func}",
                      fix=f"draw with torch.nn.init or torch.randn; or {EAGER}")  # fmt: skip


def _in_line(length: int, x: Tensor) -> tuple[Step, ...]:
    """A tensor as a view of the line of numbers its storage is."""
    shape, first = tuple(x.shape), int(x.storage_offset())
    if x.is_contiguous():
        at = window_of("slice", (length,), (x.numel(),), 0, (0, first, first + x.numel()), {})
        return (at or identity((length,)), Flat(shape))
    args = (shape, x.stride(), first)
    return (Other("as_strided", torch.as_strided, args, {}, 0, shape, x.dtype),)


def _no_key(draw: Any) -> Tensor:
    raise AssertionError(draw)


@contextmanager
def _recordable() -> Iterator[None]:
    try:
        yield
    except UnsupportedOperatorException as e:
        raise refuse(f"{e} has no shape rule, so it cannot be recorded") from e


def _targets(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors an operation writes to, by its schema."""
    if func._schema.name == "aten::native_batch_norm":  # whose schema does not say it
        return [x for x in args[3:5] if isinstance(x, Tensor) and args[5]]
    found: list[Tensor] = []
    for at, a in enumerate(func._schema.arguments):
        if a.alias_info is not None and a.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(a.name)
            found += [x for x in flat(value) if isinstance(x, Tensor)]
    return found


def _is_view(func: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
