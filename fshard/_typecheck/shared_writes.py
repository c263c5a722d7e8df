"""Writes of several ranks, which are threads, to one tensor that the function captured."""

from __future__ import annotations

from collections.abc import Sequence

from torch import UntypedStorage

from fshard._callsite import Site
from fshard.errors import ShardingError, fail, raise_all

from .checker import Checker


def no_shared_writes(checkers: Sequence[Checker]) -> None:
    """Raise where several ranks wrote to one tensor from outside their regions. `checkers` are those of all ranks."""
    writes: dict[UntypedStorage, list[tuple[str, Site | None]]] = {}
    for checker in checkers:
        for storage, write in checker.captured_writes().items():
            writes.setdefault(storage, []).append(write)
    raise_all([_error(*of_ranks[0], len(of_ranks)) for of_ranks in writes.values() if len(of_ranks) > 1])


def _error(tensor: str, site: Site | None, ranks: int) -> ShardingError:
    return fail(f"{site or 'the function'}: writes to a tensor that was made outside of shard_map",
                f"the {ranks} ranks that wrote to it are threads and share it; processes would have one each",
                tensor=tensor,
                fix="pass it as an argument, and return its new value (of a module's buffers: fs.defer(...) and "
                    "apply.with_buffers), or make it inside")  # fmt: skip
