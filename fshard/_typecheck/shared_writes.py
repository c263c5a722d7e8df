"""Writes of several ranks, which are threads, to one tensor that the function captured."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fshard._callsite import Site
from fshard.errors import ShardingError, fail, raise_all
from fshard.spec import describe

from .checker import Checker


def no_shared_writes(checkers: Sequence[Checker]) -> None:
    """Raise where several ranks wrote to one tensor from outside their regions. `checkers` are those of all ranks."""
    writers: dict[int, list[int]] = {}
    for rank, checker in enumerate(checkers):
        for key in checker.captured_writes():
            writers.setdefault(key, []).append(rank)
    raise_all([
        _error(*checkers[ranks[0]].captured_writes()[key], len(ranks))
        for key, ranks in writers.items() if len(ranks) > 1
    ])  # fmt: skip


def _error(x: Tensor, site: Site | None, ranks: int) -> ShardingError:
    return fail(f"{site or 'the function'}: writes to a tensor that was made outside of shard_map",
                f"the {ranks} ranks that wrote to it are threads and share it; processes would have one each",
                tensor=describe(x.dtype, x.shape),
                fix="pass it as an argument, and return its new value (of a module's buffers: fs.defer(...) and "
                    "apply.with_buffers), or make it inside")  # fmt: skip
