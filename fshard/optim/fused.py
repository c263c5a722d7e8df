"""Optimizers' kernels: a step of many leaves at once, in place, in pieces that neither memory nor the mesh notices.

    step(rule, params, grads, moments, factors, lr, fixed, count, options)

`rule` names the kernel, `options` are its numbers; `moments` is one list after the other, as long as `params` each.
`factors` multiply the gradients, one a leaf, or there are none. Eager programs call it; in a compiled one it is a
single operation, `torch.ops.fshard.step`, that writes its arguments where they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard._comm import (
    HOST,
    checker,
    in_region,
    region,
    start_copy_to_device,
    start_copy_to_host,
    storage_key,
    wait_for_copies_to_host,
)
from fshard._torch_compat import below_autograd, fused_adamw_, fused_sgd_, in_transform, is_batched
from fshard.errors import fail
from fshard.grad import is_differentiated

Columns = list[list[Tensor]]  # parameters, gradients, moments...: a list each, in one order

# Elements of gradient that are scaled, or made contiguous, at a time; for each thread of a CPU, whose cache they fit.
_PIECE = {"cpu": 1 << 19, "cuda": 1 << 24}

_VISIT = 1 << 28  # bytes of gradients and moments that visit their parameters at a time


def fits(columns: Columns) -> list[bool]:
    """Of each leaf, whether torch has a fused step for it, which neither a gradient nor a vmap can look into."""
    if torch.compiler.is_dynamo_compiling():  # which does not tell of a gradient: `step` refuses it there
        rows = zip(*columns, strict=True)
        return [_known(row[0]) and not any(map(is_batched, row)) for row in rows]
    inside = in_transform()
    watched = [
        any((inside or x.requires_grad) and is_differentiated(x) for x in row) for row in zip(*columns, strict=True)
    ]
    return [not seen and _known(p) for seen, p in zip(watched, columns[0], strict=True)]


def _known(p: Tensor) -> bool:
    # On the CPU, up to torch 2.13, the one of SGD skips most of a half precision leaf: pytorch issue 191763.
    kind = p.device.type
    return kind == "cuda" or (kind == "cpu" and p.dtype.itemsize >= 4)


def given() -> Callable[[Tensor], bool]:
    """A function that tells whether this call may overwrite a tensor: whether shard_map was given it as donated."""
    if torch.compiler.is_dynamo_compiling():
        return lambda x: getattr(x, "donated", False)  # shard_map marks them: storages have no address here
    storages = region().donated if in_region() else frozenset()
    return (lambda x: storage_key(x) in storages) if storages else (lambda x: False)


def lent(
    columns: Columns, which: Sequence[int], donated: Callable[[Tensor], bool]
) -> Iterator[tuple[Sequence[int], Columns]]:  # fmt: skip
    """Leaves with all that belongs to them, where they lie: all at once if it lies there, else lot by lot.

    While one lot is stepped the next is on its way. All of it may be written, but for the gradients: it is donated, or
    a copy. What visits is to be given `back` before the next lot.
    """
    device = columns[0][which[0]].device
    guests = {(k, i) for k, column in enumerate(columns) for i in which if column[i].device != device}
    lots = _lots(columns, which, guests) if guests else [which]
    coming = _lend(columns, lots[0], guests, donated)
    for at, lot in enumerate(lots):
        here = coming()
        if at + 1 < len(lots):
            coming = _lend(columns, lots[at + 1], guests, donated)
        yield lot, here
        for row in here:  # or the caller's loop would hold them until the next
            row.clear()
    if guests:
        wait_for_copies_to_host(device)


def back(x: Tensor, old: Tensor, donated: Callable[[Tensor], bool]) -> Tensor:
    """What was computed for a leaf, in the memory where that lies: where it may be written, in its own."""
    if x.device == old.device:
        return x
    if donated(old):
        return old.copy_(x, non_blocking=not torch.compiler.is_compiling())
    return start_copy_to_host(x) if old.device == HOST else x.to(old.device)


def _lots(columns: Columns, which: Sequence[int], guests: set[tuple[int, int]]) -> list[list[int]]:
    """The leaves in lots of which the guests fill at most `_VISIT` bytes, or one leaf."""
    lots: list[list[int]] = [[]]
    filled = 0
    for i in which:
        nbytes = sum(column[i].nbytes for k, column in enumerate(columns) if (k, i) in guests)
        if lots[-1] and filled + nbytes > _VISIT:
            lots.append([])
            filled = 0
        lots[-1].append(i)
        filled += nbytes
    return lots


def _lend(
    columns: Columns, lot: Sequence[int], guests: set[tuple[int, int]], donated: Callable[[Tensor], bool]
) -> Callable[[], Columns]:  # fmt: skip
    device = columns[0][lot[0]].device
    away = [(k, i) for k in range(len(columns)) for i in lot if (k, i) in guests]
    xs = [columns[k][i].contiguous() for k, i in away]
    queued = xs and in_region() and region().device == device
    flight = start_copy_to_device(region(), xs) if queued else lambda: [x.to(device) for x in xs]

    def land() -> Columns:
        found = dict(zip(away, flight(), strict=True))
        return [[found[k, i] if (k, i) in found else column[i] if k == 1 else _own(column[i], donated) for i in lot]
                for k, column in enumerate(columns)]  # fmt: skip

    return land


def _own(x: Tensor, donated: Callable[[Tensor], bool]) -> Tensor:
    if donated(x) and x.is_contiguous():
        return x.detach() if x.requires_grad else x
    return x.detach().clone(memory_format=torch.contiguous_format)


def step(
    rule: str, params: list[Tensor], grads: list[Tensor], moments: list[Tensor], factors: Sequence[Tensor],
    lr: Tensor | None, fixed: float, count: Tensor, options: Sequence[float],
) -> None:  # fmt: skip
    """Step the parameters and moments of one device and dtype in place; gradients are only read. See the module.

    The rate is `lr`, or `fixed` where that is None. Beside a few small tensors for each leaf it takes the memory of one
    piece of the gradient: where there are factors, or gradients are not contiguous, leaves are done in pieces.
    """
    if torch.compiler.is_dynamo_compiling():
        torch.ops.fshard.step(rule, params, grads, moments, list(factors), lr, fixed, count, list(options))
        return
    n, device = len(params), params[0].device
    columns = [params, grads, *[moments[i : i + n] for i in range(0, len(moments), n)]]
    rate = fixed if lr is None else _readable(lr, device)
    for part in _parts(columns, factors):
        pieces, ends = _full_registers(part) if device.type == "cpu" else (part, [])
        if pieces[0]:
            _KERNELS[rule](pieces, rate, count, *options)
        for end, done in ends:
            end.copy_(done)


_library: Any = torch.library.Library("fshard", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("step(str rule, Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] moments, Tensor[] factors, "
                "Tensor? lr, float fixed, Tensor count, float[] options) -> ()")  # fmt: skip


def _step_here(rule: str, params: list[Tensor], grads: list[Tensor], moments: list[Tensor], *rest: Any) -> None:
    """`step`, for a compiler, which does not look whether a gradient lies in what is written."""
    written = set(map(storage_key, [*params, *moments]))
    step(rule, params, [g.clone() if storage_key(g) in written else g for g in grads], moments, *rest)


_library.impl("step", _step_here, "CompositeExplicitAutograd")
torch.library.register_fake("fshard::step", lambda *_: None, lib=_library)


def _step_without_gradient(rule: str, *given: Any) -> None:
    """Refuse to lose a gradient, which eager programs take by the rule that is not fused."""
    leaves = [x for group in given for x in (group if isinstance(group, list) else [group]) if isinstance(x, Tensor)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in leaves):
        raise fail(f"{rule}: a compiled program takes no gradient through a step", fix="take that gradient eagerly")
    with below_autograd():
        torch.ops.fshard.step(rule, *given)


_library.impl("step", _step_without_gradient, "Autograd")


def _sgd(columns: Columns, lr: Any, count: Tensor, momentum: float, nesterov: float, weight_decay: float) -> None:
    p, g, *m = columns
    fused_sgd_(p, g, m[0] if m else [], lr=lr, momentum=momentum, dampening=0.0, nesterov=bool(nesterov),
                      weight_decay=weight_decay, maximize=False, is_first_step=False)  # fmt: skip


def _adamw(columns: Columns, lr: Any, count: Tensor, b1: float, b2: float, eps: float, weight_decay: float) -> None:
    p, g, m, v = columns
    steps = [count.to(p[0].device, torch.float32)] * len(p)
    fused_adamw_(p, g, m, v, [], steps, lr=lr, beta1=b1, beta2=b2, eps=eps, weight_decay=weight_decay,
                        amsgrad=False, maximize=False)  # fmt: skip


_KERNELS: dict[str, Any] = {"sgd": _sgd, "adamw": _adamw}


def _readable(rate: Tensor, device: torch.device) -> Tensor:
    """A rate that CUDA's kernels (they read a float32) or the CPU's can read."""
    return rate.detach().to(device, torch.float64 if device.type == "cpu" else torch.float32)


def _parts(columns: Columns, factors: Sequence[Tensor]) -> Iterator[Columns]:
    """Leaves, their gradients scaled and contiguous: all at once where that copies nothing, else a piece at a time."""
    if not factors and all(g.is_contiguous() for g in columns[1]):
        yield columns
        return
    kind = columns[0][0].device.type
    most = _PIECE[kind] * (torch.get_num_threads() if kind == "cpu" else 1)
    buffer = columns[1][0].new_empty(min(most, sum(g.numel() for g in columns[1])))
    part: Columns = [[] for _ in columns]
    used = 0
    for i in range(len(columns[0])):
        for row in _pieces([column[i] for column in columns], most):
            g = row[1]
            if used + g.numel() > most and part[0]:
                yield part
                part, used = [[] for _ in columns], 0
            end = used + g.numel()
            # Of a checked call every piece has a type of its own, and so its own memory.
            own = end <= len(buffer) and checker() is None
            to = buffer[used:end].view(g.shape) if own else torch.empty_like(g, memory_format=torch.contiguous_format)
            row[1] = torch.mul(g, factors[i], out=to) if factors else to.copy_(g)
            for column, x in zip(part, row, strict=True):
                column.append(x)
            used = end
    yield part


def _pieces(row: list[Tensor], most: int) -> Iterator[list[Tensor]]:
    """A leaf in pieces of at most, or about, `most` elements, which fill vector registers but for the last one."""
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


def _full_registers(columns: Columns) -> tuple[Columns, list[tuple[Tensor, Tensor]]]:
    """Cut each leaf after its last full vector register, and fill others with the ends: (pieces, [(end, copy)]).

    The CPU kernels round elements that fill no register in another way (multiply-add as one operation or as two), so
    that without this a new value would depend on its place in the shard: on the mesh.
    """
    size = 64 // columns[0][0].element_size()
    rests = [x.numel() % size for x in columns[0]]
    if not any(rests):
        return [[x for x in column if x.numel()] for column in columns], []
    # All ends together, but each alone in a checked call, where they may differ in type.
    ended = [i for i, rest in enumerate(rests) if rest]
    bunches = [ended] if checker() is None else [[i] for i in ended]
    pieces: Columns = []
    ends: list[tuple[Tensor, Tensor]] = []
    for k, column in enumerate(columns):
        flat = [x.view(-1) for x in column]
        cut = [x[: len(x) - rest] if rest else x for x, rest in zip(flat, rests, strict=True) if len(x) > rest]
        for bunch in bunches:
            tails = [flat[i][-rests[i] :] for i in bunch]
            missing = -sum(rests[i] for i in bunch) % size
            cut.append(torch.constant_pad_nd(torch.cat(tails) if len(tails) > 1 else tails[0], (0, missing)))
            if k != 1:  # gradients are only read
                ends += zip(tails, torch.split(cut[-1], [*[rests[i] for i in bunch], missing]), strict=False)
        pieces.append(cut)
    return pieces, ends


__all__ = ["Columns", "back", "fits", "given", "lent", "step"]
