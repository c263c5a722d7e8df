"""The few things that a script does outside `shard_map`: one process first, a barrier, signals, rows to evaluate.

with fs.main_first(mesh):
    tokens = tokenize("corpus.txt", cache="tokens.bin")      # rank 0 writes the cache, the others find it

for step in range(steps):
    batch = data.indices(None, step=step, size=size, batch=32, even=True)
    rows = fs.gather_for_metrics(evaluate(params, batch), data.counted(step=step, size=size, batch=32))
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._core.comm import handle_signals, stop_agreement, take_signal
from fshard._core.region import in_region
from fshard._core.transfers import refuse_transfer, without_others
from fshard.errors import ShardingError, checked, fail, must_be, raise_all
from fshard.mesh import Mesh
from fshard.reshard import device_get
from fshard.sharded import Sharded
from fshard.spec import describe


@contextlib.contextmanager
@checked
def main_first(mesh: Mesh, *, local: bool = False) -> Iterator[bool]:
    """Run the body of a `with` on rank 0 first, and then on the other ranks: to fill a cache that they read.

    Gives True on the rank that runs first. A simulated mesh is one process, which runs the body once. All ranks leave
    together, when the last one has run the body. Cost: two exchanges of Python objects.

    If the body raises on any rank, every rank raises: that rank its exception, the others a ShardingError that
    quotes it. If it raises on rank 0, the others do not run it. So no rank waits for one that has failed.

    What would wait for other ranks is an error in the body: `shard_map` on a process mesh, `checkpoint.save`, another
    `main_first`. The wait for rank 0 is limited by `make_mesh(timeout=)`.

    Args:
        local: the first rank of each host runs first, by the LOCAL_RANK of torchrun: for files on a host's disk.

    >>> with main_first(make_mesh(data=2)) as first:
    ...     print(first)
    True

    Raises ShardingError inside `shard_map`, for what communicates in the body, and if it has failed on another rank.

    Source: `Accelerator.main_process_first`, in which the other ranks wait forever if the first one fails.
    """
    _check_called_by_all("main_first", mesh)
    first = _is_first(mesh, local)
    if not first:
        _exchange("main_first", mesh)
    error: BaseException | None = None
    try:
        with without_others("the body of main_first", "call it after main_first"):
            yield first
    except BaseException as e:  # KeyboardInterrupt too: the other ranks must end their wait
        error = e
    try:
        if first:
            _exchange("main_first", mesh, error)
        _exchange("main_first", mesh, error)
    except ShardingError:
        if error is None:
            raise
    if error is not None:
        raise error


def _is_first(mesh: Mesh, local: bool) -> bool:
    if mesh.kind != "process" or not local:
        return mesh.is_first
    if "LOCAL_RANK" not in os.environ:
        raise fail("main_first: local=True, and this process has no LOCAL_RANK",
                   fix="start it with torchrun, which sets LOCAL_RANK")  # fmt: skip
    return os.environ["LOCAL_RANK"] == "0"


@checked
def wait(mesh: Mesh) -> None:
    """Wait until every rank of the mesh is here: a barrier. Does nothing on a mesh of one process.

    Collectives, checkpoints and `main_first` wait by themselves. It is for what the library does not see: a file that
    one rank has written and others read.

    >>> wait(make_mesh(data=2))

    Raises ShardingError inside `shard_map`, and on every rank if another one is in `main_first`.
    """
    _check_called_by_all("wait", mesh)
    _exchange("wait", mesh)


def _exchange(verb: str, mesh: Mesh, error: BaseException | None = None) -> None:
    """Wait for all ranks. Raises ShardingError on every rank if one passes an error, or is in another function."""
    if mesh.kind != "process":
        return
    text = "" if error is None else str(error) if isinstance(error, ShardingError) else repr(error)
    failed = [f"rank {rank}: {message}" for rank, message in enumerate(_texts(verb, mesh, text)) if message]
    if failed:
        raise fail(f"{verb}: the body failed on another rank", *failed)


def _texts(verb: str, mesh: Mesh, mine: str) -> list[str]:
    """Return the text of every rank. Raises ShardingError on every rank if one is in another function."""
    others = mesh.gather_objects((verb, mine), f"in {verb}")
    known = ("main_first", "wait", "preempted")
    verbs = [x[0] if isinstance(x, tuple) and x[0] in known else "another call" for x in others]
    if set(verbs) != {verb}:
        raise fail(f"{verb}: the ranks are in different functions",
                   "    ".join(f"rank {rank}: {name}" for rank, name in enumerate(verbs)),
                   fix="call it on every rank, in the same order")  # fmt: skip
    return [text for _, text in others]


@checked
def preempted(mesh: Mesh) -> bool:
    """Return whether a signal asked the program to end: True on every rank at the same call, after one on any rank.

        for step in range(begin, steps):
            state = train_step(state, batch_of(step))
            if fs.preempted(mesh):
                fs.checkpoint.save("out", state, step=step + 1)
                sys.exit(75)                              # EX_TEMPFAIL: run it again to go on

    The signals are SIGTERM and SIGUSR1, which schedulers send before they end a job, and the first Ctrl-C: a second one
    raises KeyboardInterrupt at once. From the first call on they no longer end the process, so call it in every loop
    that takes long. After a SIGTERM or a SIGUSR1 each later call returns True as well. A handler that the program
    installed before is called too; a signal that the process ignores stays ignored.

    Every rank must call it equally often. Cost: one exchange of Python objects at the first call, and a connection to
    the store that the ranks met in. Until a signal arrives, later calls send nothing and wait for nothing. Then the
    ranks agree on the first call that none of them has passed, within milliseconds and at most one step later.

    >>> preempted(make_mesh(data=2))
    False

    Raises ShardingError inside `shard_map`, for a first call outside of the main thread, where signals are handled,
    and if a rank does not answer within 20 s after a signal.
    """
    _check_called_by_all("preempted", mesh)
    try:
        handle_signals()
    except ValueError as e:
        raise fail("preempted: the first call is not in the main thread", str(e),
                   fix="call it once in the main thread, before this thread starts") from e  # fmt: skip
    if mesh.kind != "process" or mesh.size == 1:
        return take_signal()
    return stop_agreement(mesh.ranks[0], mesh.size, lambda text: _texts("preempted", mesh, text)[0]).reached()


def _check_called_by_all(verb: str, mesh: Mesh | None = None) -> None:
    """Raise ShardingError where not all ranks make this call: inside `shard_map`, and in the body of `main_first`."""
    if in_region():
        raise fail(f"{verb}: called inside shard_map, where every rank runs the same code", fix="call it outside")
    if mesh is not None and mesh.kind == "process" and mesh.size > 1:
        refuse_transfer(verb)


@checked
def gather_for_metrics(results: Any, counted: Any = None, *, rank: int | None = None) -> Any:
    """Return the rows of all ranks as CPU tensors, in the order of the data, without those that are not counted.

        tree of [B@data, *S] -> tree of [n, *S], where n rows of the global batch are counted

    Rows of the last batch that only fill it up would count twice in a metric. Batches that are uneven over the ranks
    need nothing: no row of them is a repetition. On a process mesh every rank must call it.

    A mean needs no gathered rows. Inside `shard_map`, with the batch's part of `counted`:
    `fs.psum((correct * counted).sum(), "data") / fs.psum(counted.sum(), "data")`.

    Args:
        results: a tree of placed leaves, or of tensors that all ranks have, with a row for each example in dim 0.
        counted: bool [B], placed or not: `data.counted` of the step. None counts all rows.
        rank: only this rank gets the rows (the others get None), in its host memory.

    >>> predictions = device_put(torch.tensor([3, 1, 2, 3]), P("data"), make_mesh(data=2))
    >>> gather_for_metrics({"class": predictions}, torch.tensor([True, True, True, False]))
    {'class': tensor([3, 1, 2])}

    Raises ShardingError listing every leaf that is not a tensor or has another number of rows.

    Source: `Accelerator.gather_for_metrics`, which cuts off the end of the last batch.
    """
    _check_called_by_all("gather_for_metrics")
    mask = None if counted is None else _mask(counted)
    errors = []
    rows = [] if mask is None else [("counted", len(mask))]
    for path, x in tree.leaves_with_path(results):
        at = tree.show("results", path)
        if not isinstance(x, (Sharded, Tensor)):
            errors.append(must_be(f"gather_for_metrics: {at}", "a placed leaf or a tensor", x))
        elif not x.ndim:
            errors.append(fail(f"gather_for_metrics: {at} has no dims, and no row for each example",
                               fix="return the values of the examples, not their mean"))  # fmt: skip
        else:
            rows.append((at, x.shape[0]))
    errors += [fail(f"gather_for_metrics: {at} has {n} rows, {rows[0][0]} has {rows[0][1]}",
                    fix="one row for each example of the batch")
               for at, n in rows[1:] if n != rows[0][1]]  # fmt: skip
    raise_all(errors)

    def select(x: Tensor) -> Tensor:
        return x.detach().cpu() if mask is None else x.detach().cpu()[mask]

    return tree.map(select, device_get(results, rank=rank))


def _mask(counted: Any) -> Tensor:
    """Return the mask as a CPU tensor on every rank."""
    mask = device_get(counted) if isinstance(counted, Sharded) else counted
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.ndim != 1:
        shown = describe(mask) if isinstance(mask, Tensor) else counted
        raise must_be("gather_for_metrics: counted", "bool[B]", shown, "fs.data.counted(step=, size=, batch=)")
    return mask.cpu()
