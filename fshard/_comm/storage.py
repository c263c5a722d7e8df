"""Identity of the memory that tensors lie in, and the mark of those that a compiled call may overwrite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from fshard._torch_compat import storage_id


def storage_key(x: Tensor) -> int:
    """What two tensors have in common that share memory; empty ones share none."""
    storage = x.untyped_storage()
    return (storage.data_ptr() if storage.device.type != "meta" else 0) or storage_id(x)


@contextlib.contextmanager
def mark_donated(xs: Sequence[Tensor]) -> Iterator[None]:
    """Within, these tensors say that they are donated: a compiler knows no storage, but it sees attributes."""
    for x in xs:
        x.donated = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for x in xs:
            del x.donated  # type: ignore[attr-defined]


__all__ = ["mark_donated", "storage_key"]
