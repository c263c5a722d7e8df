"""Transfers as messages between pairs of ranks, from where tensors lie to where they belong.

Gloo's own collectives copy into buffers of theirs, and take 3 to 5 times as long over sockets. All ranks sum in the
order of the ranks: the same bits on each, and on a simulated mesh.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .gloo import Line, Mail, copy, seal, unseal
from .packing import reduce_in_order
from .protocol import PendingTransfer

_WHOLE = 1 << 14  # bytes up to which everyone sums everything: half the bytes are not worth a second round


def gather(line: Line, xs: Sequence[Tensor], into: Sequence[Sequence[Tensor]]) -> PendingTransfer:
    """Start to bring rank r's xs[i] to into[i][r]."""
    places = {r: [parts[r] for parts in into] for r in line.others}
    mail = Mail(line, dict.fromkeys(line.others, xs), places, place=True)
    copy([parts[line.me] for parts in into], xs)

    def land() -> list[Tensor]:
        mail.land()
        return []

    return land


def scatter(line: Line, xs: Sequence[Sequence[Tensor]]) -> PendingTransfer:
    """Start to sum, for each i, every rank's xs[i][me]."""
    mine = [row[line.me] for row in xs]
    sealed = seal(mine, dense=False)
    mail = Mail(line, {r: seal([row[r] for row in xs]) for r in line.others}, dict.fromkeys(line.others, sealed))

    def land() -> list[Tensor]:
        return unseal(_totals(line, mail, sealed), mine)

    return land


def reduce(line: Line, xs: Sequence[Tensor], op: str = "sum", *, fresh: bool = False) -> PendingTransfer:
    """Start to reduce over the ranks: in place, or to `fresh` tensors."""
    n, me = len(line.places), line.me
    flats = [x.view(-1) for x in seal(xs)]
    lent = {x.data_ptr() for x in xs} if fresh else set()  # the caller's, and not to be written to
    outs = [None if flat.data_ptr() in lent else flat for flat in flats]

    def results(totals: Sequence[Tensor]) -> list[Tensor]:
        found = unseal(totals, xs)
        if fresh:
            return found
        moved = [i for i, (x, y) in enumerate(zip(xs, found, strict=True)) if x.data_ptr() != y.data_ptr()]
        copy([xs[i] for i in moved], [found[i] for i in moved])
        return list(xs)

    if n == 2 or sum(x.nbytes for x in flats) <= _WHOLE:
        whole = Mail(line, dict.fromkeys(line.others, flats), dict.fromkeys(line.others, flats))
        return lambda: results(_totals(line, whole, flats, op, outs))

    cuts = [flat.tensor_split(n) for flat in flats]
    mine = [cut[me] for cut in cuts]
    pieces = Mail(line, {r: [cut[r] for cut in cuts] for r in line.others}, dict.fromkeys(line.others, mine))
    second = next(line.wires.numbers)  # now: some may land this before they start another, and some after

    def land() -> list[Tensor]:
        totals = [torch.empty_like(flat) if out is None else out for flat, out in zip(flats, outs, strict=True)]
        into = [total.tensor_split(n) for total in totals]
        done = [parts[me] for parts in into]
        _totals(line, pieces, mine, op, done)
        rest = {r: [parts[r] for parts in into] for r in line.others}
        Mail(line, dict.fromkeys(line.others, done), rest, place=True, number=second).land()
        return results(totals)

    return land


def all_reduce(line: Line, x: Tensor, op: str) -> Tensor:
    return reduce(line, [x], op, fresh=True)()[0]


def all_gather(line: Line, x: Tensor) -> Tensor:
    out = _empty(x, (len(line.places), *x.shape))
    gather(line, [x], [out.unbind()])()
    return out


def reduce_scatter(line: Line, x: Tensor) -> Tensor:
    return scatter(line, [x.unbind()])()[0]


def all_to_all(line: Line, x: Tensor) -> Tensor:
    out = _empty(x, x.shape)
    mail = Mail(line, {r: [x[r]] for r in line.others}, {r: [out[r]] for r in line.others}, place=True)
    out[line.me].copy_(x[line.me])
    mail.land()
    return out


def permute(line: Line, x: Tensor, pairs: Sequence[tuple[int, int]]) -> Tensor:
    to = {target for source, target in pairs if source == line.me}
    of = {source for source, target in pairs if target == line.me}
    out = _empty(x, x.shape) if of else torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    message = [x]
    mail = Mail(line, dict.fromkeys(to - {line.me}, message), {r: [out] for r in of - {line.me}}, place=True)
    if line.me in of:
        out.copy_(x)
    mail.land()
    return out


def _empty(like: Tensor, shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _totals(
    line: Line, mail: Mail, mine: Sequence[Tensor], op: str = "sum", outs: Sequence[Tensor | None] | None = None
) -> list[Tensor]:  # fmt: skip
    """My parts and what came like them, in the order of the ranks, reduced to `outs`; `None`: to new tensors."""
    came = mail.land()
    totals = []
    for g, (x, out) in enumerate(zip(mine, outs or [None] * len(mine), strict=True)):
        parts = [x if r == line.me else came[r][g] for r in range(len(line.places))]
        room = mail.room(g)
        into = out if out is not None else room if room is not None else _empty(x, x.shape)
        totals.append(reduce_in_order(parts, op, room, into))
    mail.close()
    return totals


__all__ = ["all_gather", "all_reduce", "all_to_all", "gather", "permute", "reduce", "reduce_scatter", "scatter"]
