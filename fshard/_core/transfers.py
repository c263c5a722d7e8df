"""A record of the transfers that ranks start: `recording`, and the bytes that each of them sends."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fshard.errors import checked, fail, number_of
from fshard.spec import size

from . import callsite
from .display import Html, bar, page, table
from .packing import part_shape
from .protocol import Axes, Place, coords_of, index_of, ranks_over
from .region import checker, set_within, user_line
from .torch import in_backward, is_traced

Split = Sequence[Any]


class Message(NamedTuple):
    """A permute that only the ranks of its pairs enter: these, as positions on the axes, and the shapes of tensors."""

    pairs: tuple[tuple[int, int], ...]  # (source, target)
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Transfer:
    """One collective of one rank. `bytes` is the size of its argument on that rank; `where` the line that called it.

    `ranks` is the number of ranks over its axes, and `rank` the one that called it, in the mesh. `kept` are the bytes
    of the argument that stay on this rank: its part of a sum that is scattered, its rows of an exchange, and all
    that a rank without a target has in a permute. In the backward pass, `where` is the line of the forward collective
    whose transpose it is. `message`: of a permute that only some ranks enter, what these must agree on.
    """

    op: str
    axes: Axes
    dtype: torch.dtype
    bytes: int
    where: callsite.Site | None = None
    phase: str = "forward"
    ranks: int = field(kw_only=True)
    rank: int = field(default=0, kw_only=True, compare=False)
    kept: int = field(default=0, kw_only=True)
    message: Message | None = field(default=None, kw_only=True)

    @property
    def sent(self) -> int:
        """Bytes that the rank sends by the cost formula of the collective, as NCCL's rings and pairs do.

            all_reduce      2 (n-1)/n b     all_gather  (n-1) b
            reduce_scatter  b - kept        all_to_all  b - kept        permute  b - kept
            all_to_all_rows  b - kept

        `b` is `bytes`, n is `ranks`. Where the axes divide the dim, `b - kept` is (n-1)/n b. Rounded up to full bytes.
        A sum of at most 16 KiB takes one round on gloo instead of two, in which a rank sends (n-1) b.
        """
        if self.op == "all_gather":
            return (self.ranks - 1) * self.bytes
        if self.op.startswith("all_reduce"):
            return -(-2 * (self.ranks - 1) * self.bytes // self.ranks)
        return self.bytes - self.kept


def groups_of(t: Transfer, rank: int, mesh: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Return the ranks that make a transfer of `rank` together: of messages, the source and the target of each."""
    over = _ranks_with(rank, t.axes, tuple(mesh.items()))
    pairs = [over] if t.message is None else [(over[source], over[target]) for source, target in t.message.pairs]
    return [group for group in pairs if rank in group]


@functools.lru_cache(maxsize=4096)  # asked for each transfer
def _ranks_with(rank: int, axes: Axes, mesh: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    sizes = dict(mesh)
    coords = dict(zip(sizes, coords_of(rank, list(sizes.values())), strict=True))
    return tuple(ranks_over(axes, sizes, coords))


class Recording(list[Transfer]):
    """The transfers of a `recording`. Its repr is a table by line, operation, axes and phase."""

    def __repr__(self) -> str:
        return "\n".join([self._title(), *transfer_rows(self)])

    def _repr_html_(self) -> str:
        return page(self._title(), transfer_table(self))

    def _title(self) -> str:
        ranks = len({t.rank for t in self})
        count = f"{number_of(len(self), 'transfer')} of {number_of(ranks, 'rank')}"
        return f"{count}, {size(sum(t.sent for t in self))} sent in all"


_MOST_ROWS = 20


def transfer_rows(transfers: Sequence[Transfer]) -> list[str]:
    """Return a row for each line, operation, axes and phase, in the order of the program: count, these, bytes sent.

    Below the user's line is the line of fshard.models that it called, if the transfer is there. Of more than 20 rows
    those that send most are listed, and the others counted.
    """
    listed, rest = _grouped(transfers)
    texts = []
    for count, op, axes, phase, lines, sent in listed:
        line, *below = lines.split("\n")
        texts += [(f"{count:5d}", op, axes, phase, f"{size(sent):>10}", line), *(("",) * 5 + (text,) for text in below)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    rows = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in texts]
    return [*rows, *[f"  {count:5d}  {text}, {size(sent)}" for count, text, _, _, _, sent in rest]]


def transfer_table(transfers: Sequence[Transfer]) -> Html:
    """Return the rows of `transfer_rows` as a table, with bars of the bytes sent."""
    listed, rest = _grouped(transfers)
    total = max(1, sum(t.sent for t in transfers))
    rows = [(f"{count}", op, axes, phase, size(sent), bar(sent / total, f"{100 * sent / total:.3g} %"), lines)
            for count, op, axes, phase, lines, sent in [*listed, *rest]]  # fmt: skip
    return table(rows, head=("transfers", "operation", "axes", "", "bytes sent", "", "line"), align="rlllrll")


_Grouped = list[tuple[int, str, str, str, str, int]]  # count, operation, axes, phase, lines, bytes sent


def _grouped(transfers: Sequence[Transfer]) -> tuple[_Grouped, _Grouped]:
    """Return the rows to list, and at most one for all others, whose operation is a text about them."""
    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for t in transfers:
        groups.setdefault((t.op, "+".join(t.axes), t.phase, t.where.lines if t.where else ""), []).append(t.sent)
    listed = set(sorted(groups, key=lambda key: -sum(groups[key]))[:_MOST_ROWS])
    rows = [(len(sent), *key, sum(sent)) for key, sent in groups.items() if key in listed]
    rest = [sent for key, sent in groups.items() if key not in listed]
    others = (sum(map(len, rest)), f"of {len(rest)} other rows", "", "", "", sum(map(sum, rest)))
    return rows, [others][: len(rest)]


_record: Recording | None = None
_thread = threading.local()  # of a rank: see `transfer_count`, `transposing`, `stop_after_transfers`


@checked
@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Collect every transfer of every rank this process runs: a list of `Transfer`, whose repr is a table.

    The bytes in the table are those that the ranks send by the cost formula of each collective, `Transfer.sent`:
    a gather of parts of b bytes over n ranks sends (n-1) b from each, where its argument has only b.

    >>> double = shard_map(lambda x: psum(x, "data"), mesh=make_mesh(data=4), in_specs=(P("data"),), out_specs=P())
    >>> with recording() as log:
    ...     total = double(torch.ones(4, 3))
    >>> len(log), log[0].bytes, log[0].sent
    (4, 12, 18)
    >>> log
    4 transfers of 4 ranks, 72 B sent in all
          4  all_reduce  data  forward        72 B  ...:1 in <lambda>
    """
    global _record  # noqa: PLW0603 - one record for the ranks of all threads
    before, _record = _record, Recording()
    try:
        yield _record
    finally:
        _record = before


def note(place: Place, op: str, xs: Sequence[Tensor], axes: Axes, split: Split = ()) -> None:
    """Count a transfer, and add it to the record if there is one; for `split` see `transfer`."""
    if not torch.compiler.is_dynamo_compiling():
        if is_traced():
            refuse_tracing(op)
        if op != "send" and getattr(_thread, "without_others", None):
            refuse_transfer(op, axes)
        limit: tuple[int, type[BaseException]] | None = getattr(_thread, "limit", None)
        if limit is not None and transfer_count() == limit[0]:
            raise limit[1]
        _thread.count = transfer_count() + 1
    if _record is not None:
        _record.append(transfer(place, op, xs, axes, split))


def refuse_tracing(verb: str) -> None:
    """Raise where torch records its operations, to repeat them later: it would leave the transfers out."""
    if not torch.compiler.is_dynamo_compiling() and is_traced():
        raise fail(f"{verb}: make_fx, linearize, torch.export and torch.jit.trace do not record transfers",
                   f"at {call_site()}", fix="torch.func.jvp for linearize; fs.shard_map(..., compile=True) for a graph"
                   )  # fmt: skip


def transfer_count(*, transposes: bool = False) -> int:
    """Return the number of transfers that this rank has started; with `transposes` `note_transpose` counts too."""
    count: int = getattr(_thread, "count", 0)
    return count + (getattr(_thread, "transposes", 0) if transposes else 0)


def note_transpose() -> None:
    """Count a map that starts no transfer, and whose transpose starts one."""
    _thread.transposes = getattr(_thread, "transposes", 0) + 1


@contextlib.contextmanager
def stop_after_transfers(n: int, stop: type[BaseException]) -> Iterator[None]:
    """Let this rank start `n` transfers within, and raise `stop` before one more; a `stop` ends the block."""
    with set_within(_thread, limit=(transfer_count() + n, stop)), contextlib.suppress(stop):
        yield


def without_others(
    body: str, fix: str, axes: tuple[str, ...] = ()
) -> contextlib.AbstractContextManager[None]:  # fmt: skip
    """Context in which other ranks do not run the same code, or those over `axes` do not: a collective would hang."""
    return set_within(_thread, without_others=(body, fix, axes))


def refuse_transfer(what: str, axes: tuple[str, ...] | None = None) -> None:
    """Raise ShardingError in the context `without_others`, for a collective of a region if it is over its axes."""
    body, fix, apart = getattr(_thread, "without_others", None) or ("", "", ())
    if body and (axes is None or set(axes) & set(apart)):
        where = [] if axes is None else [f"over {', '.join(axes)}, {' '.join(user_line())}"]
        raise fail(f"{what}: called in {body}, which the ranks do not run together", *where, "it would not end",
                   fix=fix)  # fmt: skip


def transfer(place: Place, op: str, xs: Sequence[Tensor], axes: Axes, split: Split = ()) -> Transfer:
    """Return the record of a collective of these tensors, of one dtype, called at the current line.

    `split`: the dim of each tensor that a reduce_scatter splits, the (source, target) pairs of a permute, or
    the number of rows to each rank. A "send" is a permute that only the ranks of its pairs enter.
    """
    message = None
    if op == "send":
        op, message = "permute", Message(tuple(sorted(split)), tuple([tuple(x.shape) for x in xs]))
    sizes, coords = [place.sizes[a] for a in axes], [place.coords[a] for a in axes]
    count, itemsize = sum(x.numel() for x in xs), xs[0].element_size()
    if op == "permute":
        me = index_of(axes, place.sizes, place.coords)
        kept = 0 if any(source == me != target for source, target in split) else count
    elif op == "all_to_all_rows":
        kept = count // max(1, sum(split)) * split[index_of(axes, place.sizes, place.coords)]
    elif op == "reduce_scatter" and split:
        kept = sum(math.prod(part_shape(x, dim, sizes, coords)) for x, dim in zip(xs, split, strict=True))
    else:  # rows, one for each rank
        kept = count // math.prod(sizes) if op in ("reduce_scatter", "all_to_all") else 0
    is_backward = getattr(_thread, "transposing", False) or (in_backward() and not is_recomputing())
    return Transfer(op, axes, xs[0].dtype, count * itemsize, call_site(),
                    "backward" if is_backward else "forward", ranks=math.prod(sizes),
                    rank=index_of(tuple(place.sizes), place.sizes, place.coords), kept=kept * itemsize,
                    message=message)  # fmt: skip


def call_site() -> callsite.Site | None:
    """Return the line of the current collective; in a recorded backward pass, the line of the forward collective."""
    return getattr(_thread, "origin", None) or callsite.site()


def reduction(op: str) -> str:
    """Name of an all_reduce in records: the sum has no suffix."""
    return "all_reduce" if op == "sum" else f"all_reduce {op}"


def is_observed() -> bool:
    """Return whether a record or a checker needs the line of each collective."""
    return _record is not None or checker() is not None


def recomputing() -> contextlib.AbstractContextManager[None]:
    """Repeat a computation of the program within, whose results it has already had: it prints nothing again."""
    return set_within(_thread, recomputing=True)


def is_recomputing() -> bool:
    """Return whether this rank repeats a computation."""
    return bool(getattr(_thread, "recomputing", False))


def transposing(origin: callsite.Site | None) -> contextlib.AbstractContextManager[None]:
    """Record transfers within as backward: the transpose of the collective called at `origin`, if that is known."""
    return set_within(_thread, origin=origin, transposing=True)
