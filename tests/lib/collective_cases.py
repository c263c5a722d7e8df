"""Each collective, and the properties that it must have on any mesh, simulated or of processes."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

import fshard as fs
from fshard import P
from fshard._core.protocol import index_of
from fshard._core.region import region
from fshard._core.transfers import recording
from fshard.spec import part_lengths, part_range
from tests.lib.assertions import assert_same


@dataclass(frozen=True)
class Case:
    """A linear collective: `f(x, axis)`, the types of argument and result, and the argument's shape on a rank.

    `shape(n)` is the global shape (n: ranks along the axis); `dim` is the dim the axis splits in the argument, if any:
    in parts of `chosen_lengths` for a `chosen` case.
    """

    name: str
    f: Callable[[Any, Any], Any]
    source: str  # "V" or "I"
    target: str
    shape: Callable[[int], tuple[int, ...]]
    dim: int | None = None
    chosen: bool = False


def chosen_lengths(n: int) -> tuple[int, ...]:
    """Return lengths of parts that sum to 7: 2, 0, 4, 1 for four ranks."""
    first = [2, 0, 4, *[0] * n][: n - 1]
    return (*first, 7 - sum(first))


def _lengths(axis: Any) -> tuple[int, ...]:
    return chosen_lengths(fs.axis_size(axis if isinstance(axis, str) else axis[0]))


def _shift(x: Any, axis: Any) -> Any:
    n = fs.axis_size(axis)
    return fs.ppermute(x, axis, [(i, i + 1) for i in range(n - 1)])


def _rotate(x: Any, axis: Any) -> Any:
    n = fs.axis_size(axis)
    return fs.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)])


def rows_between(source: int, target: int, n: int) -> int:
    """Return the rows that a rank sends to another: 0 to 3, 6 in all for 4 ranks."""
    return (source + 2 * target) % 4


def _rows(x: Any, axis: Any) -> Any:
    n, me = fs.axis_size(axis), int(fs.axis_index(axis))
    return fs.all_to_all_rows(x, axis, [rows_between(me, j, n) for j in range(n)],
                              torch.tensor([rows_between(i, me, n) for i in range(n)]))  # fmt: skip


def _hot(x: Any, axis: Any) -> Any:  # all rows of rank i to rank i^2, and none to others
    n, me = fs.axis_size(axis), int(fs.axis_index(axis))
    return fs.all_to_all_rows(x, axis, torch.tensor([2 * (j == me * me % n) for j in range(n)]))


def _padded(x: Any, axis: Any) -> Any:
    n, me = fs.axis_size(axis), int(fs.axis_index(axis))
    return fs.all_to_all_rows(x, axis, [min(1, (me + j + 1) % 3) for j in range(n)], most=2)


def _taken(x: Any, axis: Any) -> Any:
    n, me = fs.axis_size(axis), fs.axis_index(axis)
    return fs.take_rows(x, axis, torch.arange(3) * (me + 1) % (2 * n))


CASES = [
    Case("psum", fs.psum, "V", "I", lambda n: (3, 2)),
    Case("pmean", fs.pmean, "V", "I", lambda n: (3, 2)),
    Case("pvary", fs.pvary, "I", "V", lambda n: (3, 2)),
    Case("all_gather", fs.all_gather, "V", "V", lambda n: (2 * n, 3), 0),
    Case("all_gather dim 1", lambda x, a: fs.all_gather(x, a, 1), "V", "V", lambda n: (3, 2 * n), 1),
    Case("all_gather dim -1", lambda x, a: fs.all_gather(x, a, -1), "V", "V", lambda n: (3, 4, n), 2),
    Case("all_gather uneven", lambda x, a: fs.all_gather(x, a, 1, size=5), "V", "V", lambda n: (3, 5), 1),
    Case("all_gather empty", lambda x, a: fs.all_gather(x, a, size=1), "V", "V", lambda n: (1, 2), 0),
    Case("all_gather invariant", lambda x, a: fs.all_gather(x, a, to="invariant"), "V", "I", lambda n: (2 * n, 3), 0),
    Case("all_gather invariant uneven", lambda x, a: fs.all_gather(x, a, 1, size=7, to="invariant"), "V", "I",
         lambda n: (2, 7), 1),
    Case("all_gather lengths", lambda x, a: fs.all_gather(x, a, 1, size=_lengths(a)), "V", "V",
         lambda n: (3, 7), 1, chosen=True),
    Case("all_gather invariant lengths",
         lambda x, a: fs.all_gather(x, a, size=_lengths(a), to="invariant"), "V", "I",
         lambda n: (7, 2), 0, chosen=True),
    Case("psum_scatter lengths", lambda x, a: fs.psum_scatter(x, a, lengths=_lengths(a)), "V", "V",
         lambda n: (7, 2)),
    Case("pslice lengths", lambda x, a: fs.pslice(x, a, -1, lengths=_lengths(a)), "I", "V",
         lambda n: (2, 7)),
    Case("all_to_all lengths",
         lambda x, a: fs.all_to_all(x, a, split=1, concat=0, size=_lengths(a)), "V", "V",
         lambda n: (7, 5), 0, chosen=True),
    Case("psum_scatter", fs.psum_scatter, "V", "V", lambda n: (2 * n, 3)),
    Case("psum_scatter dim 1", lambda x, a: fs.psum_scatter(x, a, 1), "V", "V", lambda n: (3, n)),
    Case("psum_scatter uneven", lambda x, a: fs.psum_scatter(x, a, -1), "V", "V", lambda n: (2, 5)),
    Case("pslice", fs.pslice, "I", "V", lambda n: (2 * n, 3)),
    Case("pslice uneven", lambda x, a: fs.pslice(x, a, 1), "I", "V", lambda n: (3, 5)),
    Case("all_to_all", lambda x, a: fs.all_to_all(x, a, split=0, concat=1), "V", "V", lambda n: (2 * n, 3 * n), 1),
    Case("all_to_all uneven", lambda x, a: fs.all_to_all(x, a, split=1, concat=0, size=5), "V", "V",
         lambda n: (5, 7), 0),
    Case("all_to_all_rows", _rows, "V", "V", lambda n: (n, 3)),
    Case("all_to_all_rows hot", _hot, "V", "V", lambda n: (2 * n, 3), 0),
    Case("all_to_all_rows padded", _padded, "V", "V", lambda n: (n, 2)),
    Case("take_rows", _taken, "V", "V", lambda n: (2 * n, 2), 0),
    Case("ppermute shift", _shift, "V", "V", lambda n: (3, 2)),
    Case("ppermute rotate", _rotate, "V", "V", lambda n: (4,)),
]  # fmt: skip


def _draw(case: Case, kind: str, shape: tuple[int, ...], axes: tuple[str, ...], salt: int) -> Tensor:
    """Return a tensor that differs between ranks; an invariant one is equal along `axes`."""
    coords = {a: (0 if kind == "I" and a in axes else c) for a, c in region().coords.items()}
    seed = salt
    for c in coords.values():
        seed = seed * 31 + c + 1
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return fs.pvary(x, tuple(a for a in coords if kind == "V" or a not in axes))  # before anything differentiates it


def _local_shape(case: Case, axes: tuple[str, ...]) -> tuple[int, ...]:
    sizes, coords = [region().sizes[a] for a in axes], [region().coords[a] for a in axes]
    n = math.prod(sizes)
    shape = list(case.shape(n))
    if case.f is _rows:
        me = index_of(axes, region().sizes, region().coords)
        shape[0] = sum(rows_between(me, j, n) for j in range(n))
    if case.dim is not None:
        shape[case.dim] = part_range(chosen_lengths(sizes[0]) if case.chosen else shape[case.dim], sizes, coords)[1]
    return tuple(shape)


def _pair(a: Tensor, b: Tensor, kind: str, axes: tuple[str, ...]) -> Tensor:
    """Return <a, b> summed over all ranks; an invariant pair counts once along `axes`."""
    over = region().sizes if kind == "V" else [a for a in region().sizes if a not in axes]
    return fs.psum((a * b).sum(), tuple(over))


def check_case(case: Case, axes: tuple[str, ...]) -> None:
    """Check the adjoint identity, double transposition, jvp, vmap and gradients, inside a region."""
    axis = axes if len(axes) > 1 else axes[0]

    def f(x: Any) -> Any:
        return case.f(x, axis)

    x = _draw(case, case.source, _local_shape(case, axes), axes, 1)
    y, pull = torch.func.vjp(f, x)
    g = _draw(case, case.target, tuple(y.shape), axes, 2)
    (back,) = pull(g)
    assert back.shape == x.shape
    left, right = _pair(y, g, case.target, axes), _pair(x, back, case.source, axes)
    torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)
    assert (
        left.abs() > 1e-6
        or y.numel() == 0
        or "empty" in case.name
        or math.prod(x.shape) == 0
        or _sends_nothing(case, axes)
    )
    # the transpose of the transpose is the map
    _, again = torch.func.vjp(lambda c: pull(c)[0], g)
    torch.testing.assert_close(again(x)[0], y, rtol=1e-12, atol=1e-12)
    # the jvp of a linear map is the map
    t = _draw(case, case.source, tuple(x.shape), axes, 3)
    primal, rate = torch.func.jvp(f, (x,), (t,))
    torch.testing.assert_close(primal, y, rtol=0, atol=0)
    torch.testing.assert_close(rate, f(t), rtol=1e-12, atol=1e-12)
    # vmap equals a loop over the examples, for each batch dim
    batch = torch.stack([_draw(case, case.source, tuple(x.shape), axes, 10 + i) for i in range(3)])
    want = torch.stack([f(b) for b in batch])
    for dim in range(batch.ndim):
        moved = batch.movedim(0, dim)
        got = torch.func.vmap(f, in_dims=dim)(moved)
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    # a gradient under vmap
    weights = torch.stack([_draw(case, case.target, tuple(y.shape), axes, 20 + i) for i in range(3)])
    grads = torch.func.vmap(lambda b, w: torch.func.vjp(f, b)[1](w)[0])(batch, weights)
    for i in range(3):
        torch.testing.assert_close(grads[i], pull(weights[i])[0], rtol=1e-12, atol=1e-12)
    # autograd's batch of gradients, and a gradient through it
    leaf = x.clone().requires_grad_()
    if not _sends_nothing(case, axes):  # where no gradient flows
        w = weights[:2]
        (rows,) = torch.autograd.grad(f(leaf), leaf, w, is_grads_batched=True)
        torch.testing.assert_close(rows, torch.stack([pull(v)[0] for v in w]), rtol=1e-12, atol=1e-12)
        (rows,) = torch.autograd.grad(f(leaf).square(), leaf, w, is_grads_batched=True, create_graph=True)
        squares = lambda b: sum(torch.func.vjp(lambda b: f(b).square(), b)[1](v)[0].square().sum() for v in w)  # noqa: E731
        (again,) = torch.autograd.grad(rows.square().sum(), leaf)
        torch.testing.assert_close(again, torch.func.grad(squares)(x), rtol=1e-12, atol=1e-12)
    # a tangent of autograd's forward mode; with another tensor, which a gradient flows to
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t)
        rate = forward_ad.unpack_dual(f([leaf, dual])[1]).tangent
    torch.testing.assert_close(torch.zeros_like(y) if rate is None else rate, f(t), rtol=1e-12, atol=1e-12)
    # a tree with two floating dtypes and an integer leaf equals leaf by leaf
    leaves = {"a": x, "b": [x.float(), (x * 10).long()]}
    if case.name != "pmean":
        for got_leaf, leaf in zip(fs.tree.leaves(f(leaves)), fs.tree.leaves(leaves), strict=True):
            torch.testing.assert_close(got_leaf, f(leaf), rtol=0, atol=0)


def _sends_nothing(case: Case, axes: tuple[str, ...]) -> bool:
    """Return whether this is a shift over one rank."""
    return case.name == "ppermute shift" and math.prod(region().sizes[a] for a in axes) == 1


def check_vmap_is_one_transfer(mesh: fs.Mesh, axes: tuple[str, ...]) -> None:
    """Check that a batch of examples moves in as many transfers as one example."""
    axis = axes if len(axes) > 1 else axes[0]
    for case in CASES:

        def single(case: Case = case) -> Tensor:
            case.f(torch.ones(_local_shape(case, axes)), axis)
            return torch.zeros(())

        def batch(case: Case = case) -> Tensor:
            torch.func.vmap(lambda x: case.f(x, axis))(torch.ones(5, *_local_shape(case, axes)))
            return torch.zeros(())

        logs = []
        for f in (single, batch):
            with recording() as log:
                fs.shard_map(f, mesh=mesh, out_specs=P(), check="never")()
            logs.append([t.op for t in log])
        assert logs[0] == logs[1], case.name


def check_all(mesh: fs.Mesh, axes: tuple[str, ...], check: str = "first") -> None:
    """Check every case on every rank of `mesh`; `check` is that of the types."""

    @fs.shard_map(mesh=mesh, out_specs=P(), check=check)
    def run() -> Tensor:
        for case in CASES:
            try:
                check_case(case, axes)
            except AssertionError as e:
                raise AssertionError(f"{case.name} over {axes} on {mesh}: {e}") from e
        return torch.zeros(())

    run()


def check_values(mesh: fs.Mesh, axes: tuple[str, ...], check: str = "first") -> None:
    """Check known answers against dense arithmetic; `check` is that of the types."""
    axis = axes if len(axes) > 1 else axes[0]
    sizes = [mesh.axes[a] for a in axes]
    n = math.prod(sizes)
    whole = torch.arange(float(n * 2 * 6)).view(n * 2, 6)
    spec = P(axis)
    parts = whole.view(n, 2, 6)

    def run(f: Callable[..., Any], out: Any, *args: Any, specs: Any = (spec,)) -> Any:
        return fs.device_get(fs.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check=check)(*args))

    assert_same(run(lambda x: fs.psum(x, axis), P(), whole), parts.sum(0))
    assert_same(run(lambda x: fs.pmean(x, axis), P(), whole), parts.mean(0))
    assert_same(run(lambda x: fs.pmax(x, axis), P(), whole), parts.amax(0))
    assert_same(run(lambda x: fs.pmin(x, axis), P(), whole), parts.amin(0))
    assert_same(run(lambda x: fs.all_gather(x, axis, to="invariant"), P(), whole), whole)
    assert_same(run(lambda x: fs.psum_scatter(fs.pvary(x, axis), axis), spec, whole, specs=(P(),)), whole * n)
    assert_same(run(lambda x: fs.pslice(x, axis), spec, whole, specs=(P(),)), whole)
    assert_same(run(lambda x: fs.pslice(x, axis, 1), P(None, axis), whole, specs=(P(),)), whole)
    wide = torch.arange(float(2 * n * 3 * n)).view(2 * n, 3 * n)
    assert_same(run(lambda x: fs.all_to_all(x, axis, split=1, concat=0), P(None, axis), wide), wide)
    rotated = run(lambda x: fs.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]), spec, whole)
    assert_same(rotated, parts.roll(1, 0).reshape(whole.shape))
    uneven = torch.arange(10.0).view(5, 2)
    assert_same(run(lambda x: fs.all_gather(x, axis, to="invariant"), P(), uneven), uneven)
    assert_same(run(lambda x: fs.psum_scatter(fs.pvary(x, axis), axis), spec, uneven, specs=(P(),)), uneven * n)
    assert_same(run(lambda x: fs.all_to_all(x, axis, split=1, concat=0), P(None, axis), uneven), uneven)
    index = fs.shard_map(lambda: fs.axis_index(axis)[None], mesh=mesh, out_specs=spec)()
    assert_same(fs.device_get(index), torch.arange(n))
    assert sum(part_lengths(5, sizes)) == 5


# --- pending transfers ---

Run = Callable[[Callable[[Any, int], Any]], Any]  # a mesh's `run`: f(comm, rank) on every rank of this process
EVERY_DTYPE = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool,
               torch.complex64)  # fmt: skip


def _small_numbers(shape: tuple[int, ...], dtype: torch.dtype, rank: int, salt: int) -> Tensor:
    """Return small numbers that differ between ranks, with sums that are exact in every dtype."""
    x = torch.arange(math.prod(shape)).mul(7 + rank).add(salt + 3 * rank).remainder(5)
    return (x > 2 if dtype == torch.bool else x.to(dtype) * (1j if dtype.is_complex else 1)).view(shape)


def _summed(xs: list[Tensor]) -> Tensor:
    total = xs[0].clone()
    for x in xs[1:]:
        total = total | x if x.dtype == torch.bool else total + x
    return total


def check_pending_transfers(run: Run, sizes: dict[str, int], axes: tuple[str, ...], dtypes: Any = EVERY_DTYPE) -> None:
    """Check gather, scatter and reduce of even, uneven, empty, strided, small and large parts; several pending."""
    n = math.prod(sizes[a] for a in axes)
    of_axes = [sizes[a] for a in axes]
    # Shape of each whole tensor, and the dim that is split over the ranks: even; a short part, if n > 1; columns, some
    # empty if n > 2; one part that is not empty, or none; large; large columns; two of chosen lengths.
    cases = [((2 * n, 3), 0), ((3, 2 * n - 1, 2), 1), ((4, n + 1), 1), ((1, 3), 0), ((0, 2), 0), ((2 * n, 0), 0),
             ((17_001 * n + 2,), 0), ((2, 8_201 * n + 1), 1), ((7, 2), 0),
             ((3, sum(range(n))), 1)]  # fmt: skip
    whole = [(5, 3), (0, 2), (), (4 * n + 1, 3), (20_001,)]
    dims = [dim for _, dim in cases[:-2]] + [(0, chosen_lengths(n)), (1, tuple(range(n)))]
    numbers = functools.cache(_small_numbers)  # once for all ranks of this process, which do not write to them
    total = functools.cache(lambda *at: _summed([numbers(*at[:2], rank, *at[2:]) for rank in range(n)]))

    def parts(x: Tensor, at: Any) -> tuple[Tensor, ...]:
        dim, size = at if isinstance(at, tuple) else (at, x.shape[at])
        return x.split(part_lengths(size, of_axes), dim)

    def gathering(comm: Any, me: int, dtype: torch.dtype, salt: int) -> Any:
        want = [numbers(shape, dtype, 0, salt + i) for i, (shape, _) in enumerate(cases)]
        xs = [parts(x, dim)[me].clone() for x, dim in zip(want, dims, strict=True)]
        xs[2] = xs[2].t().contiguous().t()  # not contiguous: it cannot be sent without a copy
        buffers = [torch.zeros_like(x) for x in want]
        pending = comm.gather(xs, buffers, dims, axes)

        def wait() -> None:
            assert pending() == []
            for i in range(len(cases)):
                assert_same(buffers[i], want[i], f"gather {i} of {dtype}")

        return wait

    def scattering(comm: Any, me: int, dtype: torch.dtype, salt: int) -> Any:
        mine = [numbers(shape, dtype, me, salt + i).clone() for i, (shape, _) in enumerate(cases)]
        mine[2] = mine[2].t().contiguous().t()
        pending = comm.scatter(mine, dims, axes)

        def wait() -> None:
            got = pending()
            for i, (y, (shape, _)) in enumerate(zip(got, cases, strict=True)):
                assert y.is_contiguous()
                assert_same(y, parts(total(shape, dtype, salt + i), dims[i])[me], f"scatter {i} of {dtype}")
            for y in got:  # nothing else may use these tensors
                y.fill_(1)

        return wait

    def reducing(comm: Any, me: int, dtype: torch.dtype, salt: int, fresh: bool) -> Any:
        xs = [numbers(shape, dtype, me, salt + i).clone() for i, shape in enumerate(whole)]
        before = [x.clone() for x in xs]
        pending = comm.reduce(xs, axes, fresh=fresh)

        def wait() -> None:
            got = pending()
            assert len(got) == len(xs)
            for i, (x, y) in enumerate(zip(xs, got, strict=True)):
                assert (y is x) != fresh
                assert_same(y, total(whole[i], dtype, salt + i), f"reduce {i} of {dtype}")
                if fresh:
                    assert_same(x, before[i], "the argument")
                    assert x.numel() == 0 or x.data_ptr() != y.data_ptr()

        return wait

    def check(comm: Any, rank: int) -> None:
        me = index_of(axes, comm.sizes, comm.coords)
        for i, dtype in enumerate(dtypes):
            waits = [gathering(comm, me, dtype, i), scattering(comm, me, dtype, i + 1)]
            waits += [reducing(comm, me, dtype, i, fresh) for fresh in (True, False)]
            waits += [gathering(comm, me, dtype, i + 2)]
            for k in (3, 0, 4, 1, 2):  # in another order than they were started
                waits[k]()
        # several of one kind and size, waited for in reverse order; and empty tensors
        rows = [torch.zeros(n, 4) for _ in range(3)]
        waits = [comm.gather([torch.full((1, 4), float(me + 10 * k))], [row], [0], axes) for k, row in enumerate(rows)]
        for k in (2, 1, 0):
            waits[k]()
            assert_same(rows[k], (torch.arange(n) + 10.0 * k)[:, None].expand(n, 4), "transfers of one size")
        nothing = torch.zeros(0)
        comm.gather([nothing], [nothing], [0], axes)()
        assert comm.scatter([nothing], [0], axes)()[0].shape == (0,)

    run(check)


def check_transfer_records(run: Run, sizes: dict[str, int], axes: tuple[str, ...], here: int) -> None:
    """Check that each is recorded as one transfer with its bytes; `here` ranks run in this process."""
    n = math.prod(sizes[a] for a in axes)

    def f(comm: Any, rank: int) -> None:
        x = torch.ones(5, dtype=torch.float32)
        waits = [
            comm.gather([x, x[:2]], [torch.empty(5 * n), torch.empty(2 * n)], [0, 0], axes),
            comm.scatter([torch.ones(2 * n + 1)], [0], axes),
            comm.reduce([x.clone(), x[:3].clone()], axes),
        ]
        for wait in waits:
            wait()

    with recording() as log:
        run(f)
    each = [("all_gather", 28), ("reduce_scatter", 4 * (2 * n + 1)), ("all_reduce", 32)]
    assert Counter((t.op, t.bytes) for t in log) == Counter(each * here)


def verbs_with_bytes(comm: Any, axes: tuple[str, ...]) -> list[tuple[Callable[[], Any], int]]:
    """Return each verb as a call without arguments, and the bytes that all ranks of `axes` together must send.

    These are the bytes that the ranks receive: of a gather all other parts; of a sum, each part from n-1 ranks.
    """
    n = math.prod(comm.sizes[a] for a in axes)
    part = part_range(2 * n - 3, [comm.sizes[a] for a in axes], [comm.coords[a] for a in axes])[1]  # of 5: 2, 2, 1, 0
    me = index_of(axes, comm.sizes, comm.coords)
    send, receive = zip(*[(rows_between(me, r, n), rows_between(r, me, n)) for r in range(n)], strict=True)
    pairs = [(i, i + 1) for i in range(n - 1)] if n > 2 else [(0, 1), (1, 1)]
    return [
        (lambda: comm.all_reduce(torch.ones(4000 * n), "sum", axes), 2 * (n - 1) * 16_000 * n),
        (lambda: comm.all_reduce(torch.ones(n, dtype=torch.float64), "max", axes), 2 * (n - 1) * 8 * n),
        (lambda: [comm.reduce([torch.ones(4000, n), torch.ones(n)], axes)()], 2 * (n - 1) * 4 * 4001 * n),
        (lambda: comm.all_gather(torch.ones(3), axes), n * (n - 1) * 12),
        (lambda: [comm.gather([torch.ones(part, 2)], [torch.empty(2 * n - 3, 2)], [0], axes)()],
         (n - 1) * 8 * (2 * n - 3)),
        (lambda: comm.reduce_scatter(torch.ones(n, 3), axes), (n - 1) * 12 * n),
        (lambda: [comm.scatter([torch.ones(2 * n - 3, 2), torch.ones(3, n)], [0, 1], axes)()],
         (n - 1) * (8 * (2 * n - 3) + 12 * n)),
        (lambda: comm.all_to_all(torch.ones(n, 5), axes), n * (n - 1) * 20),
        (lambda: comm.all_to_all_rows(torch.ones(sum(send), 3), send, receive, axes, exchanged=False),
         12 * sum(rows_between(i, j, n) for i in range(n) for j in range(n) if i != j)),
        (lambda: comm.permute(torch.ones(7), pairs, axes), 28 * sum(a != b for a, b in pairs)),
        (lambda: comm.permute(torch.ones(7), [(0, 0)], axes), 0),
    ]  # fmt: skip
