"""Options of a schedule of gathers: when gathered weights are freed, and how many are gathered ahead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fshard.errors import fail
from fshard.spec import Axis, names_of

Release = bool | str | tuple[str, ...]
BackwardPrefetch = int | Literal["post"] | None


@dataclass(frozen=True)
class GatherOptions:
    """Options that `scan`, `Apply.unshard`, `Layout` and `Strategy` share; `scan` documents them."""

    release: Release = True
    prefetch: int = 1
    backward_prefetch: BackwardPrefetch = None

    def check(self, verb: str, axis: Axis) -> None:
        """Raise ShardingError for a number out of range, or a `release` that is not among the axes of the gather."""
        if self.prefetch < 0:
            raise fail(f"{verb}: prefetch={self.prefetch}", fix="0 or more")
        if isinstance(self.backward_prefetch, int) and self.backward_prefetch < 0:
            raise fail(f"{verb}: backward_prefetch={self.backward_prefetch}", fix="0 or more, 'post' or None")
        other = [a for a in self.kept_axes if a not in names_of(axis)]
        if other or self.release == ():
            raise fail(f"{verb}: release={self.release!r}", f"weights are gathered over {axis!r}",
                       fix="one or more of these axes, over which weights stay split; True or False")  # fmt: skip

    @property
    def kept_axes(self) -> tuple[str, ...]:
        """Return the axes over which released weights stay split; none if they are released to shards, or kept."""
        return () if isinstance(self.release, bool) else names_of(self.release)

    @property
    def ahead(self) -> int:
        """Return the number of blocks to gather ahead in backward, before the gradients of a block are computed."""
        if self.backward_prefetch == "post":
            return 0
        return self.prefetch if self.backward_prefetch is None else self.backward_prefetch

    @property
    def pending_sums(self) -> int:
        """Return the number of blocks whose gradients may still be in transfer when the next block's are computed."""
        return 1 if self.backward_prefetch == "post" else self.ahead
