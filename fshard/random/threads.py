"""Threads that fill parts of a leaf on the CPU. In each of them torch computes with one thread.

Threads of torch that share an operation wait for each other at its end by spinning. On a busy machine, where one of
them is suspended, that takes many times the CPU time of the operation.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

import torch

from fshard._core.region import in_region

T = TypeVar("T")
_LEAST_ELEMENTS = 1 << 16  # for each thread that is started, which takes 0.1 ms: fills of 1 ms


def threads_to_fill(n: int, device: torch.device) -> int:
    """Return the number of threads that fill n elements: 1 is the caller's thread, 0 leaves the threads to torch.

    It is 0 on other devices than CPUs, and inside `shard_map`, where torch's modes would not see operations in another
    thread.
    """
    if device.type != "cpu" or in_region():
        return 0
    return max(1, min(torch.get_num_threads(), n // _LEAST_ELEMENTS))


def fill_parts(parts: Iterable[T], filler: Callable[[], Callable[[T], object]], threads: int) -> None:
    """Fill parts in several threads, which each take the next part; 1 is the caller's thread, 0 leaves them to torch.

    Each thread calls `filler` to get the function that fills its parts. After an error or an interrupt the threads only
    end the parts that they have begun.
    """
    rest = deque(parts)
    compute_threads, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()

    def run() -> None:
        fill = filler()
        while rest:
            try:
                part = rest.popleft()
            except IndexError:  # another thread has taken the last one
                return
            fill(part)

    def run_here() -> None:
        with one_compute_thread(then=compute_threads), torch.inference_mode(inference):
            run()

    if threads == 0:
        run()
    elif threads == 1:
        run_here()
    else:
        with ThreadPoolExecutor(threads, "fshard-fill") as pool:
            try:
                for done in as_completed([pool.submit(run_here) for _ in range(threads)]):
                    done.result()
            except BaseException:
                rest.clear()
                raise


@contextlib.contextmanager
def one_compute_thread(*, then: int) -> Iterator[None]:
    """Compute with one thread of torch in this context, then restore `then` threads.

    `torch.set_num_threads` sets the number for the calling thread and for all threads that begin later: both are
    restored. A thread of the user that begins meanwhile keeps one.
    """
    if then == 1:
        yield
        return
    torch.get_num_threads()  # or torch asks later, in this thread's first operation, for what another one has restored
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(then)
