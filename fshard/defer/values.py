"""Results of a forward that have no values: they were computed from a module other than the call's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fshard._core.torch import FakeTensor, unwrapped
from fshard.errors import ShardingError, fail


def is_valueless(x: object) -> bool:
    """Return whether an object is a tensor without values."""
    return isinstance(x, Tensor) and ((y := unwrapped(x)).is_meta or isinstance(y, FakeTensor))


def not_of_the_call(*what: str) -> ShardingError:
    """Return the error of a forward that reads tensors of another module than the call's."""
    return fail(*what, "a function, a hook or an object refers to that module, and was not copied with it",
                fix="read it from a module's attribute in forward: self.emb.weight; register modules, parameters and "
                "buffers")  # fmt: skip


def first_valueless(out: Any, buffers: Mapping[str, Tensor]) -> str | None:
    """Return the name of a result, or of a buffer, that has no values, also in containers and attributes of results."""
    pending: list[tuple[str, Any]] = [("buffers", buffers), ("its result", out)]
    seen: set[int] = set()
    while pending:
        name, x = pending.pop()
        if isinstance(x, Tensor):
            if is_valueless(x):
                return name
        elif id(x) not in seen and not isinstance(x, (str, int, float, type, nn.Module, type(None))):
            seen.add(id(x))
            if isinstance(x, (Mapping, list, tuple)):
                items = x.items() if isinstance(x, Mapping) else enumerate(x)
                pending += [(f"{name}[{key!r}]", y) for key, y in items]
            pending += [(f"{name}.{key}", y) for key, y in getattr(x, "__dict__", {}).items()]
    return None
