"""Saves in the background: a thread writes copies of the leaves while the program goes on.

Its transfers are over a group of ranks that only these threads use, so that they never mix with the program's.
A failure is raised by the next `save` or by `wait`; at the end of the program it is printed, and the status is 1.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # noqa: F401
import multiprocessing.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fshard._core.comm import call_distributed
from fshard._core.files.url import AnyPath
from fshard._core.host_memory import HOST
from fshard.errors import ShardingError, checked, fail


@dataclass
class _Save:
    final: AnyPath
    job: Callable[[], object]
    pid: int
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, name=f"save of {self.final}")
        self.thread.start()

    def _run(self) -> None:
        try:
            self.job()
        except Exception as e:
            self.error = e
        del self.job  # and with it the copies

    def failure(self) -> ShardingError:
        assert self.error is not None
        problem = str(self.error) if isinstance(self.error, ShardingError) else repr(self.error)
        return fail(f"save: the save of {self.final} in the background has failed", problem)


_saves: list[_Save] = []
_buffers: list[Tensor] = []  # copies of the last save
_groups: dict[Any, Any] = {}  # group of all ranks -> group of the threads


def start(final: AnyPath, job: Callable[[], object]) -> None:
    """Run a job in a thread. The end of the program waits for it."""
    if not _saves and multiprocessing.parent_process() is not None:  # such a process ends without `atexit`
        multiprocessing.util.Finalize(None, _end, exitpriority=1)  # before a mesh leaves the others, which has 0
    _saves.append(_Save(final, job, os.getpid()))


def group_of_ranks() -> Any:
    """Return the group of all ranks for transfers in these threads. At the first call every rank calls this."""
    world = dist.group.WORLD
    if world not in _groups:
        _groups.clear()  # the group of an earlier `init_process_group` is not used any more
        _groups[world] = call_distributed(dist.new_group, None, None, "gloo")
    return _groups[world]


def copy_to_host(xs: Sequence[Tensor]) -> tuple[list[Tensor], list[torch.cuda.Event]]:
    """Copy tensors to host memory; return the copies, and events after which those from CUDA devices are complete.

    The latter are queued: what the program queues later may overwrite the tensors. The memory of the last copies is
    used again where these had the same shapes: new memory costs several times as much as the copy, for its page faults.
    """
    free: dict[Any, list[Tensor]] = {}
    for x in _buffers:
        free.setdefault((x.shape, x.dtype, x.is_pinned()), []).append(x)
    _buffers.clear()
    for x in xs:
        same = free.get((x.shape, x.dtype, x.is_cuda))
        out = same.pop() if same else torch.empty(x.shape, dtype=x.dtype, device=HOST, pin_memory=x.is_cuda)
        _buffers.append(out.copy_(x.detach(), non_blocking=x.is_cuda))
    devices = {x.device for x in xs if x.is_cuda}
    return list(_buffers), [torch.cuda.current_stream(device).record_event() for device in devices]


def join() -> None:
    """Wait until no save runs in the background."""
    for save in list(_saves):
        save.thread.join()


def raise_failure() -> None:
    """Wait until no save runs in the background. Raises ShardingError if one has failed."""
    join()
    failed = [save for save in _saves if save.error is not None]
    _saves.clear()
    if failed:
        raise failed[0].failure() from failed[0].error


@checked
def wait() -> None:
    """Wait until the save in the background has ended, if there is one, and free the memory of its copy.

    The next `save` and the end of the program wait, too.

    >>> save("out", {"x": torch.ones(2)}, step=50, background=True)
    PosixPath('out/step_000050')
    >>> wait()
    >>> latest("out")
    50

    Raises ShardingError if that save has failed; on a process mesh on every rank.
    """
    join()
    _buffers.clear()
    raise_failure()


def _end() -> None:
    """Wait at the end of the program; if a save has failed, print why, and end the program with status 1."""
    join()
    failed = [save for save in _saves if save.error is not None and save.pid == os.getpid()]
    if failed:
        sys.stdout.flush()
        sys.stderr.write(f"fshard: {failed[0].failure()}\n")
        sys.stderr.flush()
        os._exit(1)  # Python has no other way to change the status here


atexit.register(_end)  # at the import: it runs after the handlers that are registered later
# Earlier than that, and than Python ends the executors, without which a storage cannot connect: the last that is
# registered is the first that runs, and the one of the module imported above follows.
threading._register_atexit(join)  # type: ignore[attr-defined]
