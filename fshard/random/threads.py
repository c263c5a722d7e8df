"""Threads that fill parts of a leaf on the CPU, in each of which torch computes with one thread.

Threads of torch that share one operation wait for each other at its end by spinning. On a busy machine, where one of
them is suspended, that takes many times the CPU time of the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from fshard._comm import in_region

T = TypeVar("T")
_LEAST_ELEMENTS = 1 << 16  # for each thread that is started, which takes 0.1 ms: fills of 1 ms


def threads_to_fill(n: int, device: torch.device) -> int:
    """Number of threads to fill n elements in: 1 is the caller's; 0 if torch is to use its own threads.

    It is 0 on other devices, and inside `shard_map`, where operations in another thread would be hidden from torch's
    modes.
    """
    if device.type != "cpu" or in_region():
        return 0
    return max(1, min(torch.get_num_threads(), n // _LEAST_ELEMENTS))


def run_in_threads(job: Callable[[], T], threads: int) -> list[T]:
    """Run `job` in each of several threads, or in the caller's if it is one, with one compute thread of torch each.

    `torch.set_num_threads` sets the number of the calling thread, and that of all threads that begin later: both are
    restored.
    """
    compute_threads, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()

    def run() -> T:
        torch.set_num_threads(1)
        try:
            with torch.inference_mode(inference):
                return job()
        finally:
            torch.set_num_threads(compute_threads)

    if threads == 1:
        return [job() if compute_threads == 1 else run()]
    with ThreadPoolExecutor(threads, "fshard-fill") as pool:
        return [done.result() for done in [pool.submit(run) for _ in range(threads)]]
