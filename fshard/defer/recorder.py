"""Record a constructor: its operations run on fake tensors, and a graph of their values is built.

Each storage has one current value. A tensor is a part of it, by sizes, strides and offset, so that views, detached
parameters and `param.data = x` need no records. A write through a view replaces the storage's value.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from fshard import tree
from fshard._core.callsite import place_and_source, site
from fshard._core.operations import OperationMode, tensors_in
from fshard._core.torch import FakeTensor, FakeTensorMode, replace_trunc_normal, schema_of, storage_id, without_modes
from fshard.errors import ShardingError, fail
from fshard.spec import full_box

from . import aten_rules, graph
from .aten_rules import AtenCall
from .replay import Replay, bytes_in_full
from .strided_view import Shape, StridedView, refined_shape, row_major_strides, strided_view

EAGER = "fs.defer(constructor, reference=0), which builds it eagerly"
NESTED = "is a nested tensor, whose rows have different sizes", ("keep its values and offsets; in forward, "
          "torch.nested.nested_tensor_from_jagged(values, offsets)")  # fmt: skip


def recording_error(
    what: str, *notes: str, fix: str = EAGER, frame: FrameType | None = None, **facts: object
) -> ShardingError:
    """Return an error that names the line of the constructor."""
    return fail(f"defer: {what}", *place_and_source(site(frame)), *notes, fix=fix, **facts)


def why_valueless(x: Tensor) -> tuple[str, str] | None:
    """Return the reason for which a real tensor has no values that can be sliced, and a fix; None if it has them."""
    if is_lazy(x):
        return "is lazy: the first call of its module decides the shape", "call the module once in the constructor"
    if x.is_nested:
        return NESTED
    if x.layout is not torch.strided:
        return f"has the layout {x.layout}", "keep the dense tensor, or indices and values; make the other in forward"
    if x.is_quantized:
        return f"is quantized, as {x.dtype}", "keep the integers and the scale; quantize in forward"
    if x.is_meta:
        return "is on the meta device, without values", "construct it on the CPU: fs.defer allocates no parameters"
    return None


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Record the operations of this thread."""
    fake: Any = FakeTensorMode(allow_non_fake_inputs=True)
    reads: Any = MemoryAccess(recorder)
    with _patched(recorder), fake, recorder, reads:
        yield


@dataclass
class RecordedStorage:
    """The current value of a storage, as the tensor that was allocated with it."""

    alive: list[Any]  # the storage, kept so that no other storage gets its id, and others that share its memory
    value: graph.Node
    strides: tuple[int, ...]
    offset: int

    def region_of(self, x: Tensor) -> tuple[Shape, StridedView] | None:
        """Return a shape of the value, and the tensor as a strided view of that shape, or None."""
        shape, strides, offset = tuple(x.shape), x.stride(), int(x.storage_offset()) - self.offset
        base = self.value.shape
        if x.dtype != self.value.dtype or offset < 0:
            return None
        region = strided_view(base, self.strides, shape, strides, offset)
        if region is None and self.strides == row_major_strides(base):
            finer = refined_shape(self.value.nbytes // x.itemsize, shape, strides)
            if finer is not None:
                base, region = finer, strided_view(finer, row_major_strides(finer), shape, strides, offset)
        return None if region is None else (base, region)

    def read(self, x: Tensor) -> graph.Node:
        shape = tuple(x.shape)
        if x.numel() == 0:
            return graph.Full(shape, x.dtype, 0)
        found = self.region_of(x)
        if found is not None:
            return graph.view(graph.reshape(self.value, found[0]), found[1])
        alias = self._alias(x)
        return graph.computed("as_strided", lambda base: alias(base)[1], shape, x.dtype, self.value)

    def write(self, x: Tensor, value: graph.Node) -> None:
        if x.numel() == 0:
            return
        old, found = self.value, self.region_of(x)
        if found is not None:
            self.value = graph.reshape(graph.write(graph.reshape(old, found[0]), found[1], value), old.shape)
            return
        alias = self._alias(x)

        def put(base: Tensor, new: Tensor) -> Tensor:
            base, part = alias(base)
            part.copy_(new)
            return base

        self.value = graph.computed("write as_strided", put, old.shape, old.dtype, old, value)

    def _alias(self, x: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return a function from the full value to (a copy of it, the view of this copy with the place of `x`)."""
        dtype, shape, strides = x.dtype, tuple(x.shape), x.stride()
        base_dtype, base_shape, base_strides = self.value.dtype, self.value.shape, self.strides
        offset = int(x.storage_offset()) - self.offset * base_dtype.itemsize // dtype.itemsize

        def alias(base: Tensor) -> tuple[Tensor, Tensor]:
            copied = torch.empty_strided(base_shape, base_strides, dtype=base_dtype).copy_(base)
            return copied, torch.empty(0, dtype=dtype).set_(copied.untyped_storage(), offset, shape, strides)

        return alias


class Recorder(OperationMode):  # type: ignore[no-untyped-call]
    """Record operations. Tensors made outside are literals: operations on only literals run and are not recorded."""

    def __init__(self, budget: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.budget = budget
        self.on_meta: set[int] = set()  # storages that the constructor asked for on the meta device: without values
        self._storages: dict[int, RecordedStorage] = {}

    # --- values of tensors ------------------------------------------------------------------------------------

    def is_recorded(self, x: Tensor) -> bool:
        """Return whether the tensor's value is a node of the graph; False for a literal."""
        return self._storage_of(x) is not None

    def _storage_of(self, x: Tensor) -> RecordedStorage | None:
        return self._storages.get(storage_id(x)) if x.layout is torch.strided and not is_lazy(x) else None

    def node(self, x: Tensor) -> graph.Node:
        """Return the current value of a tensor. Raises ShardingError if it has none, with the line that executes."""
        storage = self._storage_of(x)
        if storage is not None:
            return _lazily_negated(x, storage.read(x))
        if reason := self.why_unrecorded(x):
            raise recording_error(f"a tensor here {reason[0]}", fix=reason[1])
        with without_modes(), torch.no_grad():
            return graph.constant(x.detach().clone())

    def why_unrecorded(self, x: Tensor) -> tuple[str, str] | None:
        """Return the reason for which a tensor has no value in the record, and a fix; None if it has one."""
        if self.is_recorded(x):
            return None
        if isinstance(x, FakeTensor) and x.layout is torch.strided:
            return "was made without an operation of torch, as by an extension in C++", EAGER
        return why_valueless(x)

    def write(self, x: Tensor, value: graph.Node) -> None:
        self._storage_of_literal(x).write(x, _lazily_negated(x, graph.cast(value, x.dtype)))

    def _storage_of_literal(self, x: Tensor) -> RecordedStorage:
        """Return the record of a tensor's storage; begin one of a literal, as one row of numbers."""
        storage = self._storage_of(x)
        if storage is None:
            memory = x.untyped_storage()
            with without_modes(), torch.no_grad():
                row = x.detach().as_strided((memory.nbytes() // x.itemsize,), (1,), 0).clone()
            node = graph.Constant(tuple(row.shape), row.dtype, row)
            storage = self._storages[storage_id(x)] = RecordedStorage([memory], node, (1,), 0)
        return storage

    def recorded(self, x: Tensor) -> Tensor:
        """Return a recorded tensor with the storage of a literal: a write to one of them is a write to both."""
        storage = self._storage_of_literal(x)
        with torch.no_grad():
            row = torch.empty(x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype)
            storage.alive.append(row.untyped_storage())
            self._storages[storage_id(row)] = storage
            return row.as_strided(x.shape, x.stride(), x.storage_offset())

    def _new(self, x: Tensor, value: graph.Node) -> None:
        """Record the value of a tensor with a new storage."""
        storage = RecordedStorage([x.untyped_storage()], value, x.stride(), int(x.storage_offset()))
        self._storages[storage_id(x)] = storage

    def value(self, x: Tensor, what: str) -> Tensor:
        """Compute a tensor's value now. Raises ShardingError if it depends on draws or on memory of torch.empty."""
        return self._compute(self.node(x), what)

    def _compute(self, node: graph.Node, what: str) -> Tensor:
        if graph.draws(node):
            raise recording_error(f"{what} needs numbers that are drawn only when a leaf is placed, by its key",
                                  fix=f"compute it from the configuration; or {EAGER}")  # fmt: skip
        if any(isinstance(n, graph.Uninitialized) for n in graph.topological_order(node)):
            raise recording_error(f"{what} reads memory of torch.empty that nothing was written to", fix="torch.zeros")
        if max(node.nbytes, bytes_in_full(node)) > self.budget:
            raise recording_error(f"{what} computes more than budget= in full", bytes=node.nbytes, budget=self.budget,
                                  fix="a larger budget=")  # fmt: skip
        with without_modes():
            return Replay(node, _no_key, torch.device("cpu")).fill(full_box(node.shape), node.dtype)

    # --- operations -------------------------------------------------------------------------------------------

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kwargs = dict(kwargs)
        if func.namespace == "prim":
            return func(*args, **kwargs)
        tensors = tensors_in(args, kwargs)
        is_draw = torch.Tag.nondeterministic_seeded in func.tags
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")  # the mesh decides the device
        if tensors and not is_draw and not any(self.is_recorded(x) or isinstance(x, FakeTensor) for x in tensors):
            with without_modes():
                return func(*args, **kwargs)
        op = AtenCall(func, args, kwargs, self.node)
        if torch.Tag.inplace_view in func.tags:
            if op.name == "set" and isinstance(args[0], FakeTensor):
                op.args = (args[0], *self._recorded_source(args[0].dtype, *args[1:]))
            elif op.name == "set" or op.name.startswith("resize"):
                raise recording_error(f"{op.full_name} changes the storage of a tensor", fix="make a new tensor")
            return self._run_view(op, tensors[0])
        targets = aten_rules.written_tensors(func, args, kwargs)
        if targets:
            return self._record_write(op, targets, is_draw)
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema_of(func).returns):
            return self._run_view(op, tensors[0])
        return self._record_new(op, is_draw)

    def _recorded_source(self, dtype: torch.dtype, *source: Any) -> tuple[Any, ...]:
        """Return the arguments of `x.set_`, with a tensor or storage that is a literal recorded."""
        first, rest = source[0], source[1:]
        if isinstance(first, torch.UntypedStorage) and first.device.type != "meta":  # as unpickling does
            with without_modes():
                literal = torch.empty(0, dtype=dtype).set_(first, 0, (first.nbytes() // dtype.itemsize,))  # type: ignore[call-overload]
            return self.recorded(literal).untyped_storage(), *rest
        if isinstance(first, Tensor) and not isinstance(first, FakeTensor):
            return self.recorded(first), *rest
        return source

    def _run_view(self, op: AtenCall, source: Tensor) -> Any:
        if isinstance(source, FakeTensor):
            return _run(op)
        with without_modes():  # a literal that was written to: its views are real, in the same storage
            return op.func(*op.args, **op.kwargs)

    def _record_write(self, op: AtenCall, targets: Sequence[Tensor], is_draw: bool) -> Any:
        target = targets[0]
        value = None
        if is_draw and op.inplace:
            value = self._drawn(op, tuple(target.shape), target.dtype)
        elif op.inplace or op.name == "eye":
            value = aten_rules.overwriting_value(op, target)
        if value is not None:
            self.write(target, value)
            return target
        if is_draw:
            raise _no_distribution(op)
        call, inputs = op.call(), [id(x) for x in op.inputs]
        results = tensors_in(out := _run(op))
        remaining, returned = iter(targets), list[Tensor]()
        for i, (x, returns) in enumerate(zip(results, schema_of(op.func).returns, strict=False)):
            if returns.alias_info is None:  # batch norm returns new tensors too
                self._new(x, graph.Op(tuple(x.shape), x.dtype, call, i))
            returned.append(x if returns.alias_info is None else next(remaining))
        for x in targets:
            output = len(results) + inputs.index(id(x))
            self.write(x, aten_rules.fold_constant(graph.Op(tuple(x.shape), x.dtype, call, output)))
        return returned[0] if isinstance(out, Tensor) else type(out)(returned) if results else out

    def _record_new(self, op: AtenCall, is_draw: bool) -> Any:
        if not any("Tensor" in str(r.type) for r in schema_of(op.func).returns):
            return self._run_on_values(op)
        if op.name == "linalg_lstsq" and op.kwargs.get("driver") in (None, "gelsy"):
            op.kwargs["driver"] = "gelsd"  # torch's gelsy rounds by what its memory had before
        try:
            out = _run(op)
        except _ValueNeededError:
            if op.name != "linalg_lstsq" or not any(graph.draws(self.node(x)) for x in op.args[:2]):
                return self._run_on_values(op)
            a, b = op.args[:2]  # the shapes of the results are those for a matrix of full rank, as a drawn one is
            with without_modes():
                full = torch.eye(*a.shape[-2:], dtype=a.dtype).expand(a.shape), torch.zeros(b.shape, dtype=b.dtype)
                found = op.func(*full, *op.args[2:], **op.kwargs)
            out = tuple(torch.empty(x.shape, dtype=x.dtype) for x in found)
        results = tensors_in(out)
        for x in results:
            if x.layout is not torch.strided:
                raise recording_error(f"{op.name} returns a tensor of layout {x.layout}",
                                      fix="dense tensors in the constructor; make the other in forward")  # fmt: skip
        if len(results) != 1:
            if is_draw:
                raise _no_distribution(op)
            call = op.call()
            for i, x in enumerate(results):
                self._new(x, graph.Op(tuple(x.shape), x.dtype, call, i))
        elif is_draw or not self.is_recorded(results[0]):  # else the result is an argument, or a view of one
            x = results[0]
            value = (self._drawn if is_draw else aten_rules.new_value)(op, tuple(x.shape), x.dtype)
            self._new(x, value)
        return out

    def _drawn(self, op: AtenCall, shape: Shape, dtype: torch.dtype) -> graph.Node:
        """Return the value that an operation draws: by the leaf's key, or exactly as a generator that it is passed."""
        if op.generator is None and (drawn := aten_rules.drawn_by_position(op, shape, dtype)) is not None:
            return drawn
        seed = (graph.Draw((), torch.int64, "randint", aten_rules.SEEDS) if op.generator is None else
                graph.constant(op.generator.get_state()))  # fmt: skip
        value = aten_rules.generated_value(op, shape, dtype, seed)
        if value is None:
            raise _no_distribution(op)
        if op.generator is not None:
            self.advance(op.generator, value, f"{op.name}(generator=)")
        return value

    def advance(self, generator: torch.Generator, value: graph.Op, what: str) -> None:
        """Set a generator to its state after the draw of a value that `generated` returned."""
        state = generator.get_state()
        after = graph.Op(tuple(state.shape), state.dtype, value.call, 1)
        generator.set_state(self._compute(after, what))

    def _run_on_values(self, op: AtenCall) -> Any:
        """Run an operation whose result the constructor reads, on values that do not depend on draws."""
        if not schema_of(op.func).returns and any(graph.draws(self.node(x)) for x in op.inputs):
            return None  # a check of numbers, as of the result of a matrix inverse: `fs.validate` checks leaves
        what = {"_local_scalar_dense": ".item()", "equal": "torch.equal()"}.get(op.name, f"{op.name}()")
        values = {id(x): self.value(x, what) for x in op.inputs}
        replace = lambda x: values[id(x)] if isinstance(x, Tensor) else x  # noqa: E731
        with without_modes():
            return op.func(*tree.map(replace, op.args), **tree.map(replace, op.kwargs))


class _ValueNeededError(Exception):
    """The shape or the result of an operation depends on numbers."""


def _run(op: AtenCall) -> Any:
    """Run an operation on fake tensors."""
    try:
        return op.func(*op.args, **op.kwargs)
    except RuntimeError as e:
        cause = getattr(e, "func", None)  # set by FakeTensorMode: the operation that has no fake result
        if cause is None:
            raise
        if {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(cause.tags):
            raise _ValueNeededError from e
        raise recording_error(f"{cause} has no shape rule, so it cannot be recorded") from e


def _no_distribution(op: AtenCall) -> ShardingError:
    return recording_error(f"there is no rule for the draws of {op.func}",
                           fix=f"draw with torch.nn.init or torch.randn; or {EAGER}")  # fmt: skip


def _lazily_negated(x: Tensor, value: graph.Node) -> graph.Node:
    """Turn the value of memory into the value of a tensor, or the reverse: torch conjugates and negates lazily."""
    for lazy, op in ((x.is_conj(), torch.ops.aten.conj_physical), (x.is_neg(), torch.ops.aten.neg)):
        if lazy:
            value = graph.computed(op.__name__, op.default, value.shape, value.dtype, value)
            value = aten_rules.fold_constant(value)
    return value


def _no_key(draw: graph.Draw) -> Tensor:
    raise AssertionError(draw)


# --- access to memory without an operation --------------------------------------------------------------------


class MemoryAccess(TorchFunctionMode):
    """Applies the rules for `numpy`, `data_ptr`, `x.data = y` and `deepcopy` to recorded tensors."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("generator") is torch.default_generator:  # operations receive another object for it
            kwargs["generator"] = None
        to_meta = any(x in ("meta", _META) for x in (*args, kwargs.get("device")) if isinstance(x, (str, torch.device)))
        if kwargs.get("device") is not None or func in _UNSEEN_MOVES:  # to the default device, or another
            kwargs["device"] = torch.device("cpu")
        rule = _MEMORY_RULES.get(func)
        is_recorded = self.recorder.is_recorded
        if rule is not None and args and (rule is _deepcopy or any(map(is_recorded, tensors_in(args[0])))):
            return rule(self.recorder, *args, **kwargs)
        out = func(*args, **kwargs)
        if to_meta:
            self.recorder.on_meta.update(map(storage_id, tensors_in(out)))
        return out


class GradientHooks(TorchFunctionMode):
    """Refuses hooks on the gradients of parameters."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        hooks = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook)
        if func in hooks and isinstance(args[0], nn.Parameter):
            raise recording_error("a hook on the gradient of a parameter would never be called",
                                  "parameters are arguments of a pure function, which has no hooks",
                                  fix="change the gradients that fs.value_and_grad returns")  # fmt: skip
        return func(*args, **(kwargs or {}))


def _numpy(recorder: Recorder, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    out = recorder.value(x, ".numpy()").numpy()
    out.flags.writeable = False  # a write to it would not reach the tensor
    return out if not args else out.astype(args[0])


def _no_memory(what: str, *_: Any, **__: Any) -> Any:
    raise recording_error(what)


def _tensor(recorder: Recorder, data: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Run `torch.tensor` on nested lists of recorded scalars, whose numbers it reads without an operation."""
    if not isinstance(data, Tensor):
        data = tree.map(lambda x: recorder.value(x, "torch.tensor()") if isinstance(x, Tensor) else x, data)
    return torch.tensor(data, *args, **kwargs)


def _set_data(recorder: Recorder, x: Tensor, new: Tensor) -> None:
    """Run `x.data = new`: a recorded tensor cannot have the memory of a literal, so the literal is recorded."""
    if reason := recorder.why_unrecorded(new):
        raise recording_error(f"the tensor that .data is set to {reason[0]}", fix=reason[1])
    _data.__set__(x, new if isinstance(new, FakeTensor) else recorder.recorded(new))


def _deepcopy(recorder: Recorder, x: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy by operations, which are recorded: `Tensor.__deepcopy__` copies a storage without one."""
    if id(x) not in memo:
        with torch.no_grad():
            out = x.detach().clone(memory_format=torch.preserve_format)
        if isinstance(x, nn.Parameter):
            out = nn.Parameter(out, requires_grad=x.requires_grad)
        attributes = {k: v for k, v in vars(x).items() if k not in vars(out)}
        vars(out).update(copy.deepcopy(attributes, memo))
        memo[id(x)] = out.requires_grad_(x.requires_grad)
    copied: Tensor = memo[id(x)]
    return copied


_META = torch.device("meta")
_UNSEEN_MOVES = frozenset([torch.tensor, torch.as_tensor])  # they move their result to a device without an operation
_data: Any = Tensor.data
_MEMORY_RULES: dict[Any, Callable[..., Any]] = {
    Tensor.numpy: _numpy, Tensor.__array__: _numpy,
    Tensor.data_ptr: partial(_no_memory, "data_ptr() asks for the address of a tensor that has no memory yet"),
    Tensor.__dlpack__: partial(_no_memory, "DLPack asks for the memory of a tensor that has none yet"),
    Tensor.__reduce_ex__: lambda recorder, x, protocol: recorder.value(x, "pickling").__reduce_ex__(protocol),
    Tensor.__deepcopy__: _deepcopy, Tensor.share_memory_: lambda recorder, x: x,
    torch.tensor: _tensor, _data.__set__: _set_data,
}  # fmt: skip

_patch_lock = threading.RLock()  # one recording at a time patches torch; a constructor may call `defer` itself


@contextlib.contextmanager
def _patched(recorder: Recorder) -> Iterator[None]:
    """Replace functions that no mode can intercept: only for this recorder's tensors, or on its thread.

    torch's truncated normal rejects draws by their values: here it is one draw, by inverse CDF. `module.half()` calls
    torch's `swap_tensors`, which fake tensors do not support: exchanging their data is enough. `torch.load` makes
    tensors without operations: they are literals. numpy's `default_rng()` differs in each process.
    """
    thread = threading.get_ident()

    def recorded_trunc_normal_(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Tensor:
        if not recorder.is_recorded(tensor):
            return trunc_normal(tensor, mean, std, a, b, generator=generator)
        shape, strides, dtype, value = tuple(tensor.shape), tensor.stride(), tensor.dtype, None
        if (exact := aten_rules.explicit_generator(generator)) is not None:

            def draw(generator: torch.Generator) -> Tensor:
                memory = torch.empty_strided(shape, strides, dtype=dtype)
                return trunc_normal(memory, mean, std, a, b, generator=generator)

            value = aten_rules.generated("trunc_normal", draw, shape, dtype, (), graph.constant(exact.get_state()))
            recorder.advance(exact, value, "trunc_normal_(generator=)")
        numbers = float(mean), float(std), float(a), float(b)
        recorder.write(tensor, value or graph.Draw(shape, dtype, "trunc_normal", numbers))
        return tensor

    def recorded_swap_tensors(x: Tensor, y: Tensor) -> None:
        if not recorder.is_recorded(x) or not recorder.is_recorded(y):
            swap_tensors(x, y)
            return
        requires_grad = x.requires_grad
        with torch.no_grad():
            x.data, y.data = y.data, x.data
        x.requires_grad_(requires_grad)

    def load(*args: Any, **kwargs: Any) -> Any:
        with without_modes() if threading.get_ident() == thread else contextlib.nullcontext():
            return torch_load(*args, **kwargs)

    def default_rng(seed: Any = None) -> Any:
        if seed is None and threading.get_ident() == thread:
            raise recording_error("numpy.random.default_rng() without a seed draws other numbers in each process",
                                  fix="numpy.random.default_rng(0)")  # fmt: skip
        return numpy_rng(seed)

    with _patch_lock:
        swap_tensors: Any = torch.utils.swap_tensors
        torch_load, numpy_rng = torch.load, np.random.default_rng
        trunc_normal = replace_trunc_normal(recorded_trunc_normal_)
        torch.utils.swap_tensors = recorded_swap_tensors
        torch.load, np.random.default_rng = load, default_rng
        try:
            yield
        finally:
            replace_trunc_normal(trunc_normal)
            torch.utils.swap_tensors = swap_tensors
            torch.load, np.random.default_rng = torch_load, numpy_rng
