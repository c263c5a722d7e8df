"""The memories that leaves lie in, a device's and its host's, and the ways between them.

What lies in host memory visits the device while it is needed there. On CPUs the two are one, and nothing moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._torch_compat import FakeTensor, foreach_copy_
from fshard.spec import P

from .protocol import PendingTransfer
from .region import Region, checker, in_region, region

HOST = torch.device("cpu")


def memory_device(spec: P, device: torch.device) -> torch.device:
    """Where a device keeps its part of a leaf."""
    return HOST if spec.memory == "host" else device


def to_spec_memory(x: Tensor, spec: P, device: torch.device, *, copy: bool = False) -> Tensor:
    """A part of a leaf in the memory that its spec says: of a CUDA device's host page-locked, so that copies queue."""
    there = memory_device(spec, device)
    if there == device or device.type != "cuda":
        return x.to(there, copy=copy)
    return x if x.is_pinned() and not copy else empty_part(x.shape, x.dtype, spec, device).copy_(x)


def empty_part(shape: Sequence[int], dtype: torch.dtype, spec: P, device: torch.device) -> Tensor:
    """An empty part of a leaf, in the memory that its spec says: for `settle` to keep as it is."""
    there = memory_device(spec, device)
    return torch.empty(shape, dtype=dtype, device=there, pin_memory=there != device and device.type == "cuda")


def common_device(xs: Sequence[Tensor]) -> torch.device | None:
    """Where what is found of tensors in several memories comes together: this rank's device, or that of the first."""
    return region().device if in_region() else xs[0].device if xs else None


def to_device(x: Any) -> Any:
    """Tensors in the memory of this rank's device, where those of `memory="host"` arrive in the host's.

        [*S] in host memory -> [*S] on the device     transpose: the cotangent goes to host memory

    Takes a tree. What is on the device already, and what is no tensor, stays as it is. On CUDA the copy is queued: do
    not write to its source in the same call. `scan`, `unshard` and the optimizers bring leaves over by themselves.

    >>> double = shard_map(lambda w: 2 * to_device(w), mesh=mesh, out_specs=P("data"))
    >>> double(device_put(torch.ones(8), P("data", memory="host"), mesh))
    f32[8@data]
    """
    device = region("to_device").device
    return tree.map(lambda leaf: copy_to_device(leaf, device) if isinstance(leaf, Tensor) else leaf, x)


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, which work that is queued there after it will find; what is there, as it is."""
    return x.to(device, non_blocking=True)


def start_copy_to_device(where: Region, xs: Sequence[Tensor], into: Sequence[Tensor] | None = None) -> PendingTransfer:
    """Start to copy to the device, beside what it computes; lands as those copies, which lie `into` if that is given.

    Work that was queued before may still use that memory: the copies wait for it.
    """
    if not xs:
        return list
    real = not isinstance(xs[0], FakeTensor) and not torch.compiler.is_compiling()
    queued = where.device.type == "cuda" and real and checker() is None
    if not queued and into is None:
        there = [copy_to_device(x, where.device) for x in xs]
        return lambda: there
    there = list(into or [torch.empty_like(x, device=where.device) for x in xs])
    if not queued:
        foreach_copy_(there, list(xs))
        return lambda: there
    beside = where.scratch.get("beside") or torch.cuda.Stream(where.device)  # type: ignore[no-untyped-call]
    where.scratch["beside"] = beside
    beside.wait_stream(torch.cuda.current_stream(where.device))
    with torch.cuda.stream(beside):
        for x, y in zip(xs, there, strict=True):
            y.copy_(x, non_blocking=True)
            y.record_stream(beside)  # if it is let go of before it has landed
        done = beside.record_event()

    def land() -> list[Tensor]:
        torch.cuda.current_stream(where.device).wait_event(done)
        return there

    return land


def start_copy_to_host(x: Tensor) -> Tensor:
    """A copy in host memory, whose values are there once the device is `awaited`; what is there, as it is."""
    if not x.is_cuda or isinstance(x, FakeTensor) or torch.compiler.is_compiling():
        return x.to(HOST)
    return torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=True).copy_(x, non_blocking=True)


def wait_for_copies_to_host(device: torch.device) -> None:
    """Wait for what is on its way down."""
    if device.type == "cuda" and torch.cuda.is_available() and not torch.compiler.is_compiling():
        torch.cuda.current_stream(device).synchronize()


def wait_before_writing(xs: Sequence[Tensor]) -> None:
    """Wait for copies up of tensors in host memory that are about to be written, if any of these are."""
    if in_region() and region().device.type == "cuda" and any(x.device == HOST for x in xs):
        wait_for_copies_to_host(region().device)


__all__ = [
    "HOST",
    "common_device",
    "copy_to_device",
    "empty_part",
    "memory_device",
    "start_copy_to_device",
    "start_copy_to_host",
    "to_device",
    "to_spec_memory",
    "wait_before_writing",
    "wait_for_copies_to_host",
]  # fmt: skip
