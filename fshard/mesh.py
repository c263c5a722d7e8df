"""A mesh: devices in a grid with named axes. `data=2, model=4` are eight ranks; the last axis varies fastest."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ._comm import AbstractComm, Comm, ProcessComm, Transfer, refuse_nesting, simulate
from ._torch_compat import FakeTensorMode, default_store
from .errors import fail
from .spec import format_axes

T = TypeVar("T")


class Mesh:
    """A grid of ranks. Made by `make_mesh`; two meshes are equal if their axes, kind and device are.

    Attributes: `axes` (name -> size, in order), `kind` ("process", "simulated" or "abstract"), `device`,
    `size` (ranks in all), `ranks` (those this process runs; of an abstract mesh the first).
    """

    def __init__(self, axes: Mapping[str, int], kind: str, device: torch.device) -> None:
        self.axes = dict(axes)
        self.kind, self.device = kind, device
        self.size = math.prod(self.axes.values())
        self.ranks = (dist.get_rank(),) if kind == "process" else tuple(range(self.size if kind != "abstract" else 1))
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._comm: Comm | None = None
        if kind == "abstract":
            self._comm = AbstractComm(self.axes)
        elif kind == "process" or self.size == 1:
            self._comm = ProcessComm(self.axes, self.coords(self.ranks[0]))

    def coords(self, rank: int) -> dict[str, int]:
        """The position of a rank along each axis."""
        out = {}
        for axis, n in reversed(self.axes.items()):
            rank, out[axis] = divmod(rank, n)
        return {axis: out[axis] for axis in self.axes}

    def run(self, f: Callable[[Comm, int], T]) -> list[T]:
        """`f(comm, rank)` for every rank of this process, all at once; the results in the order of `ranks`.

        One rank runs in the caller's thread; simulated ranks run on a thread each, with one compute thread each. The
        one rank of an abstract mesh runs on fake tensors.
        """
        refuse_nesting()  # before the lock, which the outer run holds
        if self.kind == "abstract":
            assert self._comm is not None
            with FakeTensorMode(allow_non_fake_inputs=True):
                return [f(self._comm, 0)]
        if self._comm is not None:
            return [f(self._comm, self.ranks[0])]
        with self._lock:
            if self._pool is None:
                self._pool = _one_compute_thread_each(self.size)
            return simulate(self.axes, self._pool, f)

    @property
    def transfers(self) -> list[Transfer]:
        """What would have moved on an abstract mesh, since it was made."""
        return self._comm.transfers if isinstance(self._comm, AbstractComm) else []

    def gather_objects(self, mine: Any) -> list[Any]:
        """What each process of the mesh says, by rank; alone, or with ranks that are threads, just this."""
        everyone = [mine] * (self.size if self.kind == "process" else 1)
        if len(everyone) > 1:
            dist.all_gather_object(everyone, mine)
        return everyone

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and _identity(self) == _identity(other)

    def __hash__(self) -> int:
        return hash(_identity(self))

    def __repr__(self) -> str:
        axes = format_axes(self.axes)
        return f"Mesh({axes}; {self.kind}, {self.size} x {self.device.type})"

    def __reduce__(self) -> Any:
        raise TypeError("a Mesh stands for live devices and cannot be pickled: make it again with fs.make_mesh")


def _identity(mesh: Mesh) -> tuple[Any, ...]:
    return tuple(mesh.axes.items()), mesh.kind, mesh.device


def _one_compute_thread_each(n: int) -> ThreadPoolExecutor:
    before = torch.get_num_threads()

    def one() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # torch settles a thread's count at its first use: before the caller's is restored

    pool = ThreadPoolExecutor(n, "fshard-rank", initializer=one)
    gate = threading.Barrier(n)
    for future in [pool.submit(gate.wait) for _ in range(n)]:  # start all of them, then restore the caller's count
        future.result()
    torch.set_num_threads(before)
    return pool


def make_mesh(*, kind: str | None = None, device: str | torch.device | None = None, **axes: int) -> Mesh:
    """A mesh with the named axes, `data=2, model=4`, the last one varying fastest.

    `kind`: "process" is one rank per process over torch.distributed, which is started if needed (nccl on CUDA,
    gloo on CPU); it is the default under torchrun and wherever torch.distributed is initialized. "simulated" is
    the default elsewhere: every rank is a thread of this process. "abstract" has no ranks: for dry runs, of any size.
    In a process mesh one axis may be -1: whatever is left of the world size.

    >>> make_mesh(data=2, model=4)
    Mesh(data=2, model=4; simulated, 8 x cpu)

    Raises ShardingError for sizes that are not positive, and where the sizes do not multiply to the world size.
    """
    launched = dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    kind = kind or ("process" if launched else "simulated")
    if kind not in ("process", "simulated", "abstract"):
        fix = "kind='process', kind='simulated' or kind='abstract'"
        raise fail(f"make_mesh: no kind of mesh is called {kind!r}", fix=fix)
    given = format_axes(axes)
    wild = [a for a, n in axes.items() if n == -1]
    if not axes or len(wild) > 1 or any(type(n) is not int or n < 1 for a, n in axes.items() if a not in wild):
        raise fail(f"make_mesh({given}): not the sizes of a mesh", fix="name at least one axis, each with a size of 1 "
                   "or more, e.g. data=2, model=4; in a process mesh one may be -1")  # fmt: skip
    if kind != "process":
        if wild:
            raise fail(f"make_mesh({given}): a{'n' * (kind == 'abstract')} {kind} mesh has no world size to take "
                       f"{wild[0]!r} from",
                       fix=f"say how many ranks it has: {wild[0]}=2")  # fmt: skip
        where = torch.device(device) if device is not None else torch.get_default_device()
        if where.type == "cuda" and where.index is None:
            where = torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)
        return Mesh(axes, kind, where)
    return _process_mesh(axes, wild, given, device)


def _leave() -> None:
    """End together: gloo aborts a process, now and then, that another one leaves behind.

    A rank that fails does not wait, and none waits long for one that will not come.
    """
    if not dist.is_initialized():
        return
    end = time.monotonic() + (0 if hasattr(sys, "last_value") else 5)
    with contextlib.suppress(RuntimeError):  # raised once the rank that holds the store has left
        store = default_store()
        left = store.add("fshard/left", 1)
        while left < dist.get_world_size() and time.monotonic() < end:
            time.sleep(0.01)
            left = store.add("fshard/left", 0)
    dist.destroy_process_group()


def _process_mesh(axes: dict[str, int], wild: list[str], given: str, device: str | torch.device | None) -> Mesh:
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cuda":
        where = torch.device("cuda", where.index if where.index is not None else int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(where)
    if not dist.is_initialized():
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise fail(f"make_mesh({given}, kind='process'): this process was not launched as a rank",
                       fix="start it with torchrun --nproc-per-node N, or use kind='simulated'")  # fmt: skip
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
        if where.type == "cpu":
            atexit.register(_leave)
    world = dist.get_world_size()
    known = math.prod(n for n in axes.values() if n != -1)
    if wild and world % known == 0:
        axes = {a: world // known if n == -1 else n for a, n in axes.items()}
    if math.prod(axes.values()) != world:
        sizes = " x ".join(str(n) for n in axes.values() if n != -1)
        why = f"{world} % {known} = {world % known}" if wild else f"{sizes} = {known}, not {world}"
        raise fail(f"make_mesh({given}): the axes do not make up the world size", why, world=world,
                   fix=f"choose sizes whose product is {world}, or start {known} processes")  # fmt: skip
    return Mesh(axes, "process", where)
