"""Fused optimizer steps: torch's kernels for many leaves at once, in place, with the same bits on every mesh.

    step(rule, params, grads, moments, factors, lr, fixed_lr, count, options)

`rule` is the name of an optimizer, and `options` are the numbers of its kernel. `moments` holds one list after another,
each as long as `params`. `factors` multiply the gradients, one per leaf, or the list is empty. A compiled program
records a step as a single operation, `torch.ops.fshard.step`, that writes to its arguments.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim.sgd import sgd

from fshard._core.host_memory import host_device, start_copy_to_device, start_copy_to_host, wait_for_copies_to_host
from fshard._core.region import device_type, in_region, is_scheduled, region, storage_key
from fshard._core.torch import fused_adamw_, in_transform, is_batched
from fshard.errors import fail
from fshard.grad import is_differentiated

T = TypeVar("T")
Columns = list[list[Tensor]]  # parameters, gradients, then each kind of moment: one list each, leaves in one order
GRADS = 1  # the column of gradients, which are only read

# Elements of gradient that are scaled, or made contiguous, at a time; on a CPU per thread, so that they fit its cache.
_PIECE_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 24}

_GROUP_BYTES = 1 << 28  # bytes that are copied to the device of the parameters at a time


def has_fused_step(columns: Columns) -> list[bool]:
    """Return, for each leaf, whether a kernel may step it: no gradient and no vmap passes through a kernel."""
    supported = list(map(_is_supported, columns[0]))
    traced = torch.compiler.is_dynamo_compiling()  # dynamo does not show that a gradient is taken: `step` refuses that
    if not traced and not in_transform() and not any(x.requires_grad for column in columns for x in column):
        return supported
    passes_through = is_batched if traced else is_differentiated
    rows = zip(supported, *columns, strict=True)
    return [is_supported and not any(map(passes_through, row)) for is_supported, *row in rows]


def _is_supported(p: Tensor) -> bool:
    # On the CPU, up to torch 2.13, the kernel of SGD skips most of a half precision leaf: pytorch issue 191763.
    return p.device.type == "cuda" or (p.device.type == "cpu" and p.dtype.itemsize >= 4)


def donation_test() -> Callable[[Tensor], bool]:
    """Return a function that returns whether this call may overwrite a tensor: whether shard_map has it as donated."""
    if torch.compiler.is_dynamo_compiling():
        return lambda x: getattr(x, "donated", False)  # shard_map sets it, as traced storages have no address
    storages = region().donated if in_region() else frozenset()
    return (lambda x: storage_key(x) in storages) if storages else (lambda x: False)


# --- leaves and moments in another memory than the parameters ------------------------------------------------------


def groups_on_device(
    columns: Columns, leaves: Sequence[int], is_donated: Callable[[Tensor], bool]
) -> Iterator[tuple[Sequence[int], Columns]]:
    """Yield leaves in groups (indices, columns), every tensor on the device of its parameter.

    All tensors but the gradients may be written to: they are donated or copies. Tensors in another memory (moments in
    host memory) are copied a group at a time, and the next group's copies start before this group is yielded. Call
    `copy_back` on the results of a group before taking the next.
    """
    device = columns[0][leaves[0]].device
    remote = {(k, i) for k, column in enumerate(columns) for i in leaves if column[i].device != device}

    def nbytes(i: int) -> int:
        return sum(column[i].nbytes for k, column in enumerate(columns) if (k, i) in remote)

    groups = [*_groups(leaves, nbytes, _GROUP_BYTES)] if remote else [leaves]
    pending = _start_copies(columns, groups[0], remote, is_donated)
    for at, group in enumerate(groups):
        ready = pending()
        if at + 1 < len(groups):
            pending = _start_copies(columns, groups[at + 1], remote, is_donated)
        yield group, ready
        for column in ready:  # free the copies: the caller's loop variables refer to these lists
            column.clear()
    if remote:
        wait_for_copies_to_host(device)


def copy_back(x: Tensor, old: Tensor, is_donated: Callable[[Tensor], bool]) -> Tensor:
    """Copy a new value to the memory of the old one, and into the old tensor itself where that is donated."""
    if is_donated(old):
        return old.copy_(x, non_blocking=not torch.compiler.is_compiling())
    return start_copy_to_host(x) if old.device == host_device() else x.to(old.device)


def _groups(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Cut items into groups of neighbours: of one item, or of at most `most` by the sum of their sizes."""
    group: list[T] = []
    total = 0
    for item in items:
        n = size(item)
        if group and total + n > most:
            yield group
            group, total = [], 0
        group.append(item)
        total += n
    yield group


def _start_copies(
    columns: Columns, group: Sequence[int], remote: set[tuple[int, int]], is_donated: Callable[[Tensor], bool]
) -> Callable[[], Columns]:
    """Start to copy a group's remote tensors; the function that is returned waits and gives the group's columns."""
    device = columns[0][group[0]].device
    keys = [(k, i) for k in range(len(columns)) for i in group if (k, i) in remote]
    xs = [columns[k][i].contiguous() for k, i in keys]
    queued = xs and in_region() and region().device == device
    wait = start_copy_to_device(region(), xs) if queued else lambda: [x.to(device) for x in xs]

    def ready() -> Columns:
        copies = dict(zip(keys, wait(), strict=True))
        return [
            [copies[k, i] if (k, i) in copies else x if k == GRADS else _writable(x, is_donated)
             for i, x in ((i, column[i]) for i in group)]
            for k, column in enumerate(columns)
        ]  # fmt: skip

    return ready


def _writable(x: Tensor, is_donated: Callable[[Tensor], bool]) -> Tensor:
    """Return a contiguous tensor to overwrite: `x` itself where it is donated, else a copy."""
    if is_donated(x) and x.is_contiguous():
        return x.detach() if x.requires_grad else x
    return x.detach().clone(memory_format=torch.contiguous_format)


# --- a step ---------------------------------------------------------------------------------------------------------


def step(
    rule: str, params: list[Tensor], grads: list[Tensor], moments: list[Tensor], factors: Sequence[Tensor],
    lr: Tensor | None, fixed_lr: float, count: Tensor, options: Sequence[float],
) -> None:  # fmt: skip
    """Step the parameters and moments of one device and dtype in place; gradients are only read. See the module.

    The rate is `lr`, or `fixed_lr` where that is None. Apart from a few small tensors per leaf this allocates one piece
    of the gradient, and that only where there are factors or a gradient is not contiguous.
    """
    if torch.compiler.is_dynamo_compiling():
        torch.ops.fshard.step(rule, params, grads, moments, list(factors), lr, fixed_lr, count, list(options))
        return
    n, device = len(params), params[0].device
    columns = [params, grads, *[moments[i : i + n] for i in range(0, len(moments), n)]]
    rate = fixed_lr if lr is None else _kernel_rate(lr, device)
    for piece, scales in _pieces(columns, factors):
        _step_piece(rule, piece, scales, rate, count, options)


def _step_piece(
    rule: str, columns: Columns, factors: Sequence[Tensor], rate: Any, count: Tensor, options: Sequence[float]
) -> None:
    grads = columns[GRADS]
    scaled = list(map(_scaled, grads, factors)) if factors else [g.contiguous() for g in grads]
    columns = [columns[0], scaled, *columns[GRADS + 1 :]]  # the caller's list would keep what is scaled
    padded, tails = _pad_to_registers(columns) if device_type(columns[0][0]) == "cpu" else (columns, [])
    if not is_scheduled():
        # SGD's kernel has no rule for shapes, so torch would run it on zeros of the sizes of these fake tensors.
        padded = [[x.flatten()[:1] for x in column] for column in padded]
    if padded[0]:
        _KERNELS[rule](padded, rate, count, *options)
    for tail, new in tails:
        tail.copy_(new)


def _sgd(columns: Columns, lr: Any, count: Tensor, momentum: float, nesterov: float, weight_decay: float) -> None:
    p, g, *m = columns
    buffers: list[Tensor | None] = [*m[0]] if m else [None] * len(p)
    sgd(p, g, buffers, fused=True, lr=lr, momentum=momentum, dampening=0.0, nesterov=bool(nesterov),
        weight_decay=weight_decay, maximize=False)  # fmt: skip


def _adamw(columns: Columns, lr: Any, count: Tensor, b1: float, b2: float, eps: float, weight_decay: float) -> None:
    p, g, m, v = columns
    steps = [count.to(p[0].device, torch.float32)] * len(p)  # which the kernel only reads
    fused_adamw_(p, g, m, v, [], steps, lr=lr, beta1=b1, beta2=b2, eps=eps, weight_decay=weight_decay, amsgrad=False,
                 maximize=False)  # fmt: skip


_KERNELS: dict[str, Callable[..., None]] = {"sgd": _sgd, "adam": _adamw, "adamw": _adamw}
_NUMBERS = {rule: tuple(inspect.signature(kernel).parameters)[3:] for rule, kernel in _KERNELS.items()}


def has_kernel(rule: str) -> bool:
    """Return whether an optimizer of this name has a kernel."""
    return rule in _KERNELS


def kernel_options(rule: str, numbers: Mapping[str, float]) -> list[float] | None:
    """Return the numbers of an optimizer as its kernel takes them; None if no kernel takes exactly these."""
    names = _NUMBERS.get(rule, ())
    return [float(numbers[name]) for name in names] if has_kernel(rule) and set(names) == set(numbers) else None


def _kernel_rate(rate: Tensor, device: torch.device) -> Tensor:
    """Return the rate in the dtype that the kernels read: float32 on CUDA, float64 on the CPU."""
    return rate.detach().to(device, torch.float64 if device.type == "cpu" else torch.float32)


def _scaled(g: Tensor, factor: Tensor) -> Tensor:
    """Return g * factor in the dtype of g, contiguous, without a third tensor."""
    return (g * factor).to(g.dtype) if g.is_contiguous() else g.contiguous().mul_(factor)


def _pieces(columns: Columns, factors: Sequence[Tensor]) -> Iterator[tuple[Columns, Sequence[Tensor]]]:
    """Yield leaves and their factors: all at once where no gradient is copied, else piece by piece."""
    sizes = [g.numel() for g in columns[GRADS]]
    kind = device_type(columns[0][0])
    most = _PIECE_ELEMENTS[kind] * (torch.get_num_threads() if kind == "cpu" else 1)
    if sum(sizes) <= most or (not factors and all(g.is_contiguous() for g in columns[GRADS])):
        yield columns, factors
        return
    rows = ((row, factors[i : i + 1]) for i, leaf in enumerate(zip(*columns, strict=True))
            for row in _split_leaf(list(leaf), most))  # fmt: skip
    for group in _groups(rows, lambda piece: piece[0][GRADS].numel(), most):
        yield list(map(list, zip(*[row for row, _ in group], strict=True))), [f for _, scale in group for f in scale]


def _split_leaf(row: list[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Split a leaf into pieces of about `most` elements that end where a vector register does, but for the last."""
    p, g, *_ = row
    if p.numel() <= most:
        yield row
        return
    if g.is_contiguous():
        row = [x.view(-1) for x in row]
    line = row[0].numel() // len(row[0])
    least = 16 // math.gcd(16, line)
    lines = max(1, most // line // least) * least
    yield from map(list, zip(*[torch.split(x, lines) for x in row], strict=True))


def _pad_to_registers(columns: Columns) -> tuple[Columns, list[tuple[Tensor, Tensor]]]:
    """Cut each leaf after its last full vector register and pad the rest to one: (columns, [(tail, padded copy)]).

    The CPU kernels round elements outside a full register differently (multiply-add as two operations and not one), so
    without this the new value of an element would depend on its place in the shard, and so on the mesh.
    """
    size = 64 // columns[0][0].element_size()
    out: Columns = [[] for _ in columns]
    tails: list[tuple[Tensor, Tensor]] = []
    for k, column in enumerate(columns):
        for x in column:
            rest = x.numel() % size
            if not rest:
                out[k] += [x] if x.numel() else []
                continue
            full, tail = x.view(-1).tensor_split([x.numel() - rest])
            padded = pad(tail, (0, size - rest))
            out[k] += [full, padded] if len(full) else [padded]
            if k != GRADS:
                tails.append((tail, padded[:rest]))
    return out, tails


# --- the operation of compiled programs -----------------------------------------------------------------------------

_SCHEMA = (
    "(str rule, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] moments, Tensor[] factors, Tensor? lr, "
    "float fixed_lr, Tensor count, float[] options) -> ()"
)
_library: Any = torch.library.Library("fshard", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("step" + _SCHEMA)  # what dynamo records
_library.define("step_no_grad" + _SCHEMA)  # what the backend of the compiler sees


def _refuse_gradient(rule: str, *args: Any) -> None:
    """Raise where a gradient would be lost in the kernel; eager programs take it through the formula."""
    tensors = [x for arg in args for x in (arg if isinstance(arg, list) else [arg]) if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        raise fail(f"{rule}: a compiled program takes no gradient through a step", fix="take that gradient eagerly")
    with torch.no_grad():
        torch.ops.fshard.step_no_grad(rule, *args)


def _step_no_grad(rule: str, params: list[Tensor], grads: list[Tensor], moments: list[Tensor], *rest: Any) -> None:
    """Run `step` after copying gradients that share storage with what is written, which the compiler does not check."""
    written = set(map(storage_key, [*params, *moments]))
    step(rule, params, [g.clone() if storage_key(g) in written else g for g in grads], moments, *rest)


_library.impl("step", _refuse_gradient, "CompositeImplicitAutograd")
_library.impl("step_no_grad", _step_no_grad, "CompositeExplicitAutograd")
torch.library.register_fake("fshard::step_no_grad", lambda *_: None, lib=_library)
