"""A mesh: devices in a grid with named axes. `data=2, model=4` are eight ranks; the last axis varies fastest."""

from __future__ import annotations

import contextlib
import datetime
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ._core.comm import (
    OTHER_PORT,
    SLOW,
    AbstractComm,
    GlooConnections,
    ProcessComm,
    TimedComm,
    Wait,
    Watch,
    Watchdog,
    call_at_exit,
    call_distributed,
    fake_tensors,
    simulate,
    start_watchdog,
)
from ._core.display import Cell, View, grid
from ._core.host_memory import HOST
from ._core.protocol import Comm, coords_of
from ._core.region import refuse_nesting
from ._core.transfers import Transfer, refuse_transfer
from .errors import checked, fail, no_attribute
from .spec import format_axes

T = TypeVar("T")

_NOTHING = contextlib.nullcontext()
_LEAST_TIMEOUT, _MOST_TIMEOUT = 0.001, 10**8  # seconds: torch counts milliseconds, and C++ nanoseconds in 64 bits
# Attributes of the meshes of JAX and of torch, and the expressions here.
_NAMES_ELSEWHERE = {
    "shape": "mesh.axes, sizes by name", "axis_names": "mesh.axes, whose keys are the names",
    "axis_sizes": "mesh.axes, sizes by name",
    "mesh_dim_names": "mesh.axes, whose keys are the names", "ndim": "mesh.axes, by len(mesh.axes)",
    "devices": "mesh.ranks, of this process, and mesh.device", "device_type": "mesh.device.type",
    "get_coordinate": "mesh.coords(rank)", "get_rank": "mesh.ranks, of this process",
}  # fmt: skip
_MOST_SIMULATED = 4096  # ranks, each a thread


@checked
class Mesh:
    """A grid of ranks. Made by `make_mesh`; two meshes are equal if their axes, kind, device and ranks are.

    Attributes: `axes` (name -> size, in order), `kind` ("process", "simulated" or "abstract"), `device`,
    `size` (ranks in all), `ranks` (those this process runs; of an abstract mesh `rank`, the first by default),
    `is_first` (whether this process has rank 0, and so prints and logs; True on meshes of one process),
    `transfers` (what an abstract mesh would have transferred, since it was made).

    >>> mesh.axes, mesh.size
    ({'data': 2, 'model': 4}, 8)
    >>> mesh.coords(6)
    {'data': 1, 'model': 2}
    """

    def __init__(
        self, axes: Mapping[str, int], kind: str, device: torch.device, *, rank: int = 0,
        timeout: datetime.timedelta | None = None,
    ) -> None:  # fmt: skip
        self.axes = dict(axes)
        self.kind, self.device = kind, device
        self.size = math.prod(self.axes.values())
        one = dist.get_rank() if kind == "process" else rank
        self.ranks = tuple(range(self.size)) if kind == "simulated" else (one,)
        self.is_first = kind != "process" or one == 0
        self._identity = tuple(self.axes.items()), kind, device, self.ranks[0]  # equal for equal meshes
        self.transfers: list[Transfer] = []
        self.host = HOST  # the device of host memory; in a plan another one than the device, which is fake
        self._fakes: Any = None  # of an abstract mesh: buffers that calls share are of one mode
        self._comm: Comm | None = None  # simulated ranks have one for each run
        if kind == "abstract":
            self._comm = AbstractComm(self.axes, self.coords(rank), self.transfers)
        elif kind == "process" or self.size == 1:
            self._comm = ProcessComm(self.axes, self.coords(self.ranks[0]), timeout)

    def coords(self, rank: int) -> dict[str, int]:
        """Position of a rank along each axis."""
        return dict(zip(self.axes, coords_of(rank, list(self.axes.values())), strict=True))

    def run(self, f: Callable[[Comm, int], T]) -> list[T]:
        """Call `f(comm, rank)` for every rank of this process, and return the results in the order of `ranks`.

        One rank runs in the caller's thread; simulated ranks run on a thread each, and take turns. The one rank of an
        abstract mesh runs on fake tensors.
        """
        refuse_nesting()
        if self.kind == "process" and self.size > 1:
            refuse_transfer("shard_map")
        if self._comm is not None:
            if self.kind == "abstract" and self._fakes is None:
                self._fakes = fake_tensors()
            with self._fakes or _NOTHING:
                return [f(self._comm, self.ranks[0])]
        return simulate(self.axes, f)

    def gather_objects(self, mine: Any, purpose: str = "to exchange Python objects") -> list[Any]:
        """Return the object of each process of the mesh, by rank; there is one process if the ranks are threads.

        `purpose` appears in the report of a long wait.
        """
        objects = [mine] * (self.size if self.kind == "process" else 1)
        if len(objects) > 1:
            refuse_transfer(f"a transfer {purpose}")
            with Wait(lambda: (f"for other ranks {purpose}", f"one of them {SLOW}")):
                call_distributed(dist.all_gather_object, objects, mine)
        return objects

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __getattr__(self, name: str) -> Any:
        raise no_attribute("a Mesh", name, self, _NAMES_ELSEWHERE)

    def __repr__(self) -> str:
        axes = format_axes(self.axes)
        return f"Mesh({axes}; {self.kind}, {self.size} x {self.device.type})"

    def _repr_html_(self) -> str:
        return mesh_grid(self)._repr_html_()

    def __reduce__(self) -> Any:
        raise TypeError("a Mesh refers to live devices and cannot be pickled: make it again with fs.make_mesh")


def planned_mesh(axes: Mapping[str, int], rank: int, watch: Watch, *, accelerator: bool) -> Mesh:
    """Return an abstract mesh whose rank runs what a real rank runs; `watch` receives its transfers.

    On CPUs these are messages between pairs of ranks, and host memory is the device's. On an accelerator they are
    collectives of torch. Its tensors are fake ones of a CPU (autograd has no fake CUDA), so those in host memory are on
    the meta device.
    """
    mesh = Mesh(axes, "abstract", torch.device("cpu"), rank=rank)
    mesh.host = torch.device("meta") if accelerator else HOST
    comm = AbstractComm(mesh.axes, mesh.coords(rank), [], is_scheduled=True, peers=not accelerator)
    mesh._comm = TimedComm(comm, watch)
    return mesh


def mesh_grid(mesh: Mesh) -> View:
    """Draw the ranks of a mesh: the last axis runs across, all others down. The rank of this process is marked."""
    *rest, last = mesh.axes
    n = mesh.axes[last]

    def cell(rank: int) -> Cell:
        coords = mesh.coords(rank)
        is_here = mesh.kind == "process" and rank in mesh.ranks
        return Cell([rank], [f"rank {rank}: {format_axes(coords)}{', this process' * is_here}"], rank, is_here)

    down = [format_axes({a: mesh.coords(r)[a] for a in rest}) for r in range(0, mesh.size, n)]
    cells = [[cell(r + i) for i in range(n)] for r in range(0, mesh.size, n)]
    return grid(repr(mesh), down, [f"{last}={i}" for i in range(n)], cells)


@checked
def make_mesh(
    *, kind: str | None = None, device: str | torch.device | None = None, timeout: float | None = None, **axes: int
) -> Mesh:  # fmt: skip
    """Return a mesh with the named axes, `data=2, model=4`, the last one varying fastest.

    `kind`: "process" is one rank per process over torch.distributed, which is started if needed (nccl on CUDA,
    gloo on CPU); it is the default under torchrun and wherever torch.distributed is initialized. "simulated" is
    the default elsewhere: every rank is a thread of this process. "abstract" has no ranks: for dry runs, of any size.
    In a process mesh one axis may be -1: the rest of the world size.

    `timeout`: seconds that a collective of a process mesh waits for another rank before it fails; the default of
    torch.distributed is 30 minutes with gloo and 10 with nccl. If torch.distributed is initialized already, its group
    of all ranks keeps its timeout: in collectives over all axes that are compiled or on CUDA, and where ranks
    exchange Python objects (in a checked call, a checkpoint). It has no effect on other kinds of mesh, which find a
    deadlock at once.
    Where torch.distributed is started here, a rank that raises, is killed or loses its host ends every other one, with
    a status that is not 0: by the error of its collective, or else after 10 s, without its `finally` blocks. A rank
    under torchrun ends when its agent does. In every process mesh a rank that has waited for another one for 30 s
    prints which, in which collective and at which line, once for each wait (not on CUDA, where only NCCL knows).

    >>> make_mesh(data=2, model=4)
    Mesh(data=2, model=4; simulated, 8 x cpu)

    With gloo every transfer is checked: ranks that disagree on the operation, axes, dtype or sizes raise ShardingError.
    With nccl only transfers of checked calls are (`shard_map(check="always")`), and all ranks must reach the first
    collective over each set of axes: it makes a process group.

    Raises ShardingError for sizes that are not positive or do not multiply to the world size, and where another job
    uses the port at which the ranks meet.
    """
    launched = dist.is_initialized() or {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
    kind = kind or ("process" if launched else "simulated")
    if kind not in ("process", "simulated", "abstract"):
        fix = "kind='process', kind='simulated' or kind='abstract'"
        raise fail(f"make_mesh: no kind of mesh is called {kind!r}", fix=fix)
    sizes = format_axes(axes)
    inferred = [a for a, n in axes.items() if n == -1]
    if not axes or len(inferred) > 1 or any(type(n) is not int or n < 1 for a, n in axes.items() if a not in inferred):
        raise fail(f"make_mesh({sizes}): not the sizes of a mesh", fix="name at least one axis, each with a size of 1 "
                   "or more, e.g. data=2, model=4; in a process mesh one may be -1")  # fmt: skip
    if kind != "process" and inferred:
        raise fail(f"make_mesh({sizes}): a{'n' * (kind == 'abstract')} {kind} mesh has no world size to infer "
                   f"{inferred[0]!r} from",
                   fix=f"state how many ranks it has: {inferred[0]}=2")  # fmt: skip
    if timeout is not None and not _LEAST_TIMEOUT <= timeout <= _MOST_TIMEOUT:
        limits = f"{_LEAST_TIMEOUT} to {_MOST_TIMEOUT:,}"
        raise fail(f"make_mesh: timeout={timeout!r}: not a number of seconds from {limits}",
                   fix="timeout=600 waits ten minutes; None is the default of torch.distributed")  # fmt: skip
    ranks = math.prod(axes.values())
    if kind == "simulated" and ranks > _MOST_SIMULATED:
        raise fail(f"make_mesh({sizes}): {ranks} simulated ranks, each of them a thread of this process",
                   fix=f"at most {_MOST_SIMULATED}; kind='abstract' has no limit")  # fmt: skip
    if device is None:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        device = torch.device(default) if kind == "process" else torch.get_default_device()
    try:
        device = _with_index(torch.device(device))
    except RuntimeError as e:
        raise fail(f"make_mesh: device is {device!r}", str(e), fix="device='cpu' or device='cuda'") from None
    duration = None if timeout is None else datetime.timedelta(seconds=timeout)
    if kind == "process":
        _start_process(sizes, device, duration)
        axes = _fit_world_size(axes, inferred, sizes)
    return Mesh(axes, kind, device, timeout=duration)


def _with_index(device: torch.device) -> torch.device:
    """Add to "cuda" the index that the launcher gave this process, or else the index of the current device."""
    if device.type != "cuda" or device.index is not None:
        return device
    current = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", current)))


def _start_process(sizes: str, device: torch.device, timeout: datetime.timedelta | None) -> None:
    """Make the device current, and start torch.distributed if it is not initialized."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            raise fail(f"make_mesh({sizes}, kind='process'): this process was not launched as a rank",
                       fix="start it with torchrun --nproc-per-node N, or use kind='simulated'")  # fmt: skip
        host, port, ranks = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"))
        with Wait(lambda: (f"for all of {ranks} ranks to start", f"they meet at {host}:{port}")):
            watch = start_watchdog(int(os.environ["RANK"]), int(ranks))
            try:
                options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
                store, rank, world = next(rendezvous("env://", **options))
            except RuntimeError as e:
                if "EADDRINUSE" not in str(e):
                    raise
                raise fail(f"make_mesh: another job or program uses port {port} of {host}", fix=OTHER_PORT) from None
            store = watch.meet(store, host, port)  # first: if a rank fails to start, the others end
            call_at_exit(lambda failed: _leave(watch, failed), lambda: watch.leave(failed=True))
            cuda = device.type == "cuda"
            dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=world,
                                    timeout=timeout, device_id=device if cuda else None)  # fmt: skip
    start_watchdog(dist.get_rank(), dist.get_world_size())


def _leave(watch: Watchdog, failed: bool) -> None:
    """End the program of this rank: with the others, since gloo sometimes aborts a process when another has left."""
    watch.leave(failed=failed)
    if dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()
        GlooConnections.close_all()  # of a rank 0 that ends first, and that others may wait for
    watch.close()


def _fit_world_size(axes: dict[str, int], inferred: list[str], sizes: str) -> dict[str, int]:
    """Replace a size of -1. Raises ShardingError unless the sizes multiply to the world size."""
    world = dist.get_world_size()
    known = math.prod(n for n in axes.values() if n != -1)
    if inferred and world % known == 0:
        axes = {a: world // known if n == -1 else n for a, n in axes.items()}
    if math.prod(axes.values()) != world:
        product = " x ".join(str(n) for n in axes.values() if n != -1)
        why = f"{world} % {known} = {world % known}" if inferred else f"{product} = {known}, not {world}"
        raise fail(f"make_mesh({sizes}): the axes do not make up the world size", why, world=world,
                   fix=f"choose sizes whose product is {world}, or start {known} processes")  # fmt: skip
    return axes
