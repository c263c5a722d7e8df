"""The memories of leaves, on a device and on its host, and the copies between them.

A leaf in host memory is copied to the device while it is needed there. On CPUs both are one memory, without copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard.errors import checked
from fshard.spec import P

from .protocol import PendingTransfer
from .region import Region, checker, in_region, region
from .torch import FakeTensor, foreach_copy_

HOST = torch.device("cpu")


def memory_device(spec: P, device: torch.device) -> torch.device:
    """Return the device, or the CPU, in whose memory the spec keeps a part of a leaf."""
    return HOST if spec.memory == "host" else device


def host_device() -> torch.device:
    """Return the device of host memory: the CPU, or in a plan for an accelerator the device that represents it."""
    return region().host if in_region() else HOST


def to_spec_memory(x: Tensor, spec: P, device: torch.device, *, copy: bool = False) -> Tensor:
    """Copy a part of a leaf to the memory of its spec: page-locked host memory on CUDA, so that copies can queue."""
    memory = memory_device(spec, device)
    if memory == device or device.type != "cuda":
        return x.to(memory, copy=copy)
    return x if x.is_pinned() and not copy else empty_part(x.shape, x.dtype, spec, device).copy_(x)


def empty_part(shape: Sequence[int], dtype: torch.dtype, spec: P, device: torch.device) -> Tensor:
    """Empty part of a leaf in the memory of its spec, which `to_spec_memory` returns without a copy."""
    memory = memory_device(spec, device)
    return torch.empty(shape, dtype=dtype, device=memory, pin_memory=memory != device and device.type == "cuda")


def common_device(xs: Sequence[Tensor]) -> torch.device | None:
    """Return the device for results of tensors in several memories: this rank's; outside a region the first one's."""
    return region().device if in_region() else xs[0].device if xs else None


@checked
def to_device(x: Any) -> Any:
    """Copy tensors of `memory="host"`, which a region gets in host memory, to this rank's device.

        [*S] in host memory -> [*S] on the device     transpose: the cotangent goes to host memory

    Takes a tree. Tensors on the device, and leaves that are not tensors, are returned unchanged. On CUDA the copy is
    queued: do not write to its source in the same call. `scan`, `unshard` and the optimizers copy leaves themselves.

    >>> double = shard_map(lambda w: 2 * to_device(w), mesh=mesh, out_specs=P("data"))
    >>> double(device_put(torch.ones(8), P("data", memory="host"), mesh))
    f32[8@data]
    """
    device = region("to_device").device
    return tree.map(lambda leaf: copy_to_device(leaf, device) if isinstance(leaf, Tensor) else leaf, x)


def copy_to_device(x: Tensor, device: torch.device) -> Tensor:
    """Queue a copy to the device before its later work; a tensor on the device is returned itself."""
    return x.to(device, non_blocking=True)


def start_copy_to_device(
    region: Region, xs: Sequence[Tensor], into: Sequence[Tensor] | None = None
) -> PendingTransfer:  # fmt: skip
    """Start to copy to the device while it computes; the results are the copies, written to `into` if it is passed.

    Work that was queued before may use the memory of `into`: the copies wait for it.
    """
    if not xs:
        return list
    real = not isinstance(xs[0], FakeTensor) and not torch.compiler.is_compiling()
    queued = region.device.type == "cuda" and real and checker() is None
    if not queued and into is None:
        moved = [copy_to_device(x, region.device) for x in xs]
        return lambda: moved
    copies = list(into or [torch.empty_like(x, device=region.device) for x in xs])
    if not queued:
        foreach_copy_(copies, list(xs))
        return lambda: copies
    stream = region.scratch.get("copy stream") or torch.cuda.Stream(region.device)  # type: ignore[no-untyped-call]
    region.scratch["copy stream"] = stream
    stream.wait_stream(torch.cuda.current_stream(region.device))
    with torch.cuda.stream(stream):
        for x, y in zip(xs, copies, strict=True):
            y.copy_(x, non_blocking=True)
            y.record_stream(stream)  # in case it is freed before anything waits for the copy
        done = stream.record_event()

    def wait() -> list[Tensor]:
        torch.cuda.current_stream(region.device).wait_event(done)
        return copies

    return wait


def start_copy_to_host(x: Tensor) -> Tensor:
    """Queue a copy to host memory, complete after `wait_for_copies_to_host`; a host tensor is returned itself."""
    if not x.is_cuda or isinstance(x, FakeTensor) or torch.compiler.is_compiling():
        return x.to(host_device())
    return torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=True).copy_(x, non_blocking=True)


def wait_for_copies_to_host(device: torch.device) -> None:
    """Wait for the queued copies of a device to its host."""
    if device.type == "cuda" and torch.cuda.is_available() and not torch.compiler.is_compiling():
        torch.cuda.current_stream(device).synchronize()


def wait_before_writing(xs: Sequence[Tensor]) -> None:
    """Wait for queued copies to the device if any of these tensors, about to be written, is in host memory."""
    if in_region() and region().device.type == "cuda" and any(x.device == HOST for x in xs):
        wait_for_copies_to_host(region().device)
