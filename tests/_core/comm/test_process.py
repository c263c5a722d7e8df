"""Real ranks over gloo: the same results as a simulated mesh, and every rank ends when one fails."""

from __future__ import annotations

import contextlib
import datetime
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.planning.rates import transfer_seconds
from tests.benchmarks.step_cost import measure_step
from tests.lib.assertions import assert_same, error_text
from tests.lib.collective_cases import (
    EVERY_DTYPE,
    check_all,
    check_pending_transfers,
    check_transfer_records,
    check_values,
    verbs_with_bytes,
)
from tests.lib.compile_cases import meshes_made_again
from tests.lib.examples import example
from tests.lib.forked import free_port
from tests.lib.processes import TIMEOUT, Pool, RanksError
from tests.schedule.test_pipeline import pipelines_on_two_processes

pytestmark = pytest.mark.process
CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # of sums in another order


# --- the opening example ------------------------------------------------------------------------------------


def opening_example(mesh: fs.Mesh, steps: int = 3) -> Any:
    """Train the example of the design; return the initial values, and the parameters and loss of every step."""

    def init() -> Any:
        return {"up": fs.init.normal((64, 256), std=0.02), "down": fs.init.normal((256, 64), std=0.02)}

    specs = {"up": fs.column("model"), "down": fs.row("model")}
    params = fs.materialize(init(), specs, mesh, key=fs.key(0))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        p = fs.pvary(p, "data")
        h = torch.relu(fs.pvary(x, "model") @ p["up"])
        y = fs.psum(h @ p["down"], "model")
        return fs.pmean((y - x).square().mean(), "data")

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()))
    def step(p: Any, x: Tensor) -> Any:
        loss, grads = fs.value_and_grad(loss_fn)(p, x)
        return fs.tree.map(lambda w, g: w - 10 * g, p, grads), loss

    history = [fs.device_get(params)]
    for i in range(steps):
        params, loss = step(params, torch.randn(32, 64, generator=torch.Generator().manual_seed(i)))
        history.append(fs.device_get((params, loss)))
    assert repr(params) == "{'up': f32[64, 256@model], 'down': f32[256@model, 64]}"
    return history


def classifier(mesh: fs.Mesh) -> Any:
    """Layers split by rows and by columns, their gradients, the best classes and the accuracy, of uneven classes.

    And the loss and gradients of dropped rows, on more than one rank in two microbatches.
    """
    words, head, bias = (
        torch.arange(n).float().sin().view(shape) for n, shape in ((35, (7, 5)), (15, (3, 5)), (3, (3,)))
    )
    ids, targets = torch.arange(7), torch.tensor([0, 2, -100, 1, 1, 0, 2])

    @fs.shard_map(mesh=mesh, in_specs=(P("model"), P("model"), P("model"), P("data"), P("data"), P("data")),
                  out_specs=(P(), P("model"), P("data"), P(), (P(), P("model"))))  # fmt: skip
    def run(words: Tensor, head: Tensor, bias: Tensor, ids: Tensor, targets: Tensor, rows: Tensor) -> Any:
        def dropped(bias: Tensor, rows: Tensor) -> Tensor:
            x = fs.nn.dropout(rows, 0.5, key=fs.key(5), spec=P("data"))
            out: Tensor = fs.pmean(x.square().mean() * fs.psum(fs.pvary(bias, "data").exp().sum(), "model"), "data")
            return out

        def loss(words: Tensor) -> Any:
            x = fs.nn.embedding(ids, fs.pvary(words, "data"), axis="model", size=7, padding_idx=2, out="whole")
            logits = fs.nn.linear(x, fs.pvary(head, "data").mT, fs.pvary(bias, "data"), axis="model")
            return fs.nn.cross_entropy(logits, targets, axis="model", size=3, over="data"), logits

        (value, logits), grads = fs.value_and_grad(loss, has_aux=True)(words)
        best = fs.nn.top_k(logits.round(), 2, axis="model", size=3)[1]  # rounded: with ties
        accuracy = fs.nn.accuracy(logits, targets, (1, 2), axis="model", size=3, over="data")
        return value, grads, best, accuracy, fs.accumulate(dropped, min(mesh.size, 2))(bias, rows)

    return fs.device_get(run(words, head, bias, ids, targets, torch.arange(40.0).cos().view(8, 5)))


def replaced_submodules(mesh: fs.Mesh) -> Any:
    """Return the loss and gradients of a deferred module with tied, split tables, and an odd number of each feature."""

    def make() -> torch.nn.Module:
        embed, head = torch.nn.Embedding(11, 8), torch.nn.Linear(8, 11, bias=False)
        head.weight = embed.weight
        return torch.nn.Sequential(embed, torch.nn.Linear(8, 7), torch.nn.Tanh(), torch.nn.Linear(7, 8), head)

    table, up = fs.nn.row_embedding("model"), fs.nn.column_linear("model", out="split")
    down = fs.nn.row_linear("model", input="split")
    replace = {"0": table, "1": up, "3": down, "4": up}
    apply, tree = fs.defer(make, replace=replace, reference=0)  # a recording would import torch.compile: 1.5 s a rank
    specs = fs.fully_shard(apply.specs["params"], tree["params"], axis="data")

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs))
    def step(p: Any, ids: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            logits = apply(fs.unshard(p, specs, "data", shapes=tree["params"]), {}, ids)
            out: Tensor = fs.nn.cross_entropy(logits, ids, axis="model", size=11, over="data")
            return out

        return fs.value_and_grad(loss)(p)

    return fs.device_get(step(fs.materialize(tree["params"], specs, mesh, key=fs.key(0)), torch.arange(11)))


def traced_on_ranks(mesh: fs.Mesh) -> Any:
    """Return the file of a trace, as rank 0 has written it; a file that cannot be is an error of every rank."""
    double = fs.shard_map(lambda x: fs.psum(x.sum(), "data"), mesh=mesh, in_specs=(P("data"),), out_specs=P())
    wrong = ["/nowhere/step.json", f"step-{mesh.ranks[0]}.json"]
    errors = [error_text(lambda path=path: fs.trace(double, torch.ones(4), path=path)) for path in wrong]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(mesh.gather_objects(folder)[0]) / "step.json"
        run = fs.trace(double, torch.ones(4), path=file)
        events = json.loads(file.read_text())["traceEvents"]
        mesh.gather_objects(None)
    transfers = {e["pid"]: (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["tid"] > 0}
    return errors, [t.rank for t in run.timelines], transfers, fs.device_get(run.result)


def opening_example_on_ranks(axes: dict[str, int]) -> Any:
    mesh = fs.make_mesh(**axes)
    if axes == {"data": 4, "model": 1}:
        errors, ranks, transfers, total = traced_on_ranks(mesh)
        assert "there is no folder /nowhere" in errors[0]
        assert "rank 1  path='step-1.json', device=None" in errors[1]
        assert ranks == ([0, 1, 2, 3] if mesh.ranks == (0,) else list(mesh.ranks))
        assert total == 4
        assert transfers.keys() == {0, 1, 2, 3}
        begin, end = (max(t[0] for t in transfers.values()), min(t[1] for t in transfers.values()))
        assert begin <= end  # every rank takes part in the sum at some one time
        assert transfer_seconds(mesh, "all_reduce", ("data",), 1024, 0.1) > 0  # each rank has a clock of its own
    if axes["data"] < 2 or axes["model"] < 2:
        return opening_example(mesh), classifier(mesh), None
    return opening_example(mesh), classifier(mesh), (replaced_submodules(mesh), example("sequence")["train"](mesh))


def test_opening_example_and_split_layers_equal_the_simulated_mesh(ranks: Pool) -> None:
    one, classified = (f(fs.make_mesh(data=1, model=1)) for f in (opening_example, classifier))
    assert not torch.equal(one[0]["up"], one[-1][0]["up"])  # it is trained
    for axes in ({"data": 2, "model": 2}, {"data": 4, "model": 1}, {"model": 4, "data": 1}):
        want = opening_example(fs.make_mesh(kind="simulated", **axes))
        assert_same(want, one, **CLOSE)
        assert_same(classifier(fs.make_mesh(kind="simulated", **axes)), classified, **CLOSE)
        mesh = fs.make_mesh(kind="simulated", **axes)
        of_module = (replaced_submodules(mesh), example("sequence")["train"](mesh)) if axes["data"] == 2 else None
        for got, layers, got_of_module in ranks(4, opening_example_on_ranks, axes):
            assert_same(got[0], want[0])  # initial values: bitwise
            assert_same(got, want, **CLOSE)
            assert_same(layers, classified, **CLOSE)
            assert_same(got_of_module, of_module, **CLOSE)


# --- device_put, reshard, device_get ------------------------------------------------------------------------------

SPECS = [
    P(), P("a"), P("b"), P(None, "a"), P("a", "b"), P("b", "a"), P(("a", "b")), P(("b", "a")),
    P(None, ("a", "b")), P(..., "b"),
]  # fmt: skip
SHAPES = [(8, 4), (5, 3), (2, 3), (1, 7), (0, 3)]  # even; uneven; one empty part; three empty parts; no elements
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int8, torch.uint8,
    torch.int64, torch.complex64,
]  # fmt: skip


def values(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 7 - 2).view(shape).to(dtype)


def assert_placed(x: fs.Sharded, whole: Tensor, spec: P) -> None:
    rank = dist.get_rank()
    assert x.shape == tuple(whole.shape)
    assert x.spec.parts(x.ndim) == spec.parts(x.ndim)
    (part,) = x.shards
    assert part.dtype == whole.dtype
    assert part.is_contiguous()
    assert torch.equal(part, whole[x.box(rank)])


def put_reshard_get() -> None:
    mesh = fs.make_mesh(a=2, b=2)
    other = fs.make_mesh(b=4)
    rank = dist.get_rank()
    pairs = [(SHAPES[1], torch.float32, a, b) for a, b in itertools.product(SPECS, SPECS)]
    pairs += [(s, torch.float32, a, b) for s in SHAPES for a, b in itertools.pairwise(SPECS)]
    pairs += [((5, 3), d, a, b) for d in DTYPES for a, b in itertools.pairwise(SPECS[1::3])]
    pairs += [((), d, P(), P()) for d in DTYPES]
    for shape, dtype, before, after in pairs:
        whole = values(shape, dtype)
        x = fs.device_put(whole, before, mesh)
        assert_placed(x, whole, before)
        assert_placed(fs.reshard(x, after), whole, after)
        assert_placed(x, whole, before)  # the argument is unchanged
    placed = [*itertools.product(SHAPES, DTYPES[:1], SPECS), *itertools.product(SHAPES[1:2], DTYPES[1:], SPECS[1::3])]
    for shape, dtype, spec in [*placed, *(((), d, P()) for d in DTYPES)]:
        whole = values(shape, dtype)
        x = fs.device_put({"x": whole}, spec, mesh)
        assert torch.equal(fs.device_get(x)["x"], whole)
        for to in (0, 3):
            got = fs.device_get(x, rank=to)["x"]
            assert torch.equal(got, whole) if rank == to else got is None
    # another grid of the same ranks, and back
    for shape, spec, new_spec in itertools.product(SHAPES, SPECS, (P(), P("b"), P(None, "b"))):
        whole = values(shape, torch.bfloat16)
        x = fs.reshard(fs.device_put(whole, spec, mesh), new_spec, other)
        assert x.mesh == other
        assert_placed(x, whole, new_spec)
        assert_placed(fs.reshard(x, spec, mesh), whole, spec)


def test_put_reshard_and_get_keep_every_element(ranks: Pool) -> None:
    ranks(4, put_reshard_get)


def described() -> Any:
    return {
        "table": fs.init.normal((10, 6)),
        "h": [{"w": fs.init.trunc_normal((6, 5), std=0.5), "b": fs.init.uniform(5)} for _ in range(2)],
        "half": fs.init.normal((3, 4), dtype=torch.bfloat16),
        "q": fs.init.orthogonal((6, 4)),
        "eye": fs.init.eye(5, 3),
        "steps": fs.init.arange(7),
        "scale": fs.init.ones(()),
    }


PLACES = [
    ("a", "b", P()),
    (P(("a", "b")), {"w": P("a", "b"), "b": P("b")}, P("b", "a")),
    (P(None, "a"), {"w": P(None, ("b", "a")), "b": P(("b", "a"))}, P(..., "b")),
]


def placed(mesh: fs.Mesh) -> list[Any]:
    out = []
    for table, block, half in PLACES[1:]:
        specs = {
            "table": table,
            "h": [block, block],
            "half": half,
            "q": half,
            "eye": P("a"),
            "steps": P("b"),
            "scale": P(),
        }
        out.append(fs.materialize(described(), specs, mesh, key=fs.key(7)))
    return out


def placed_on_ranks() -> list[Any]:
    trees = placed(fs.make_mesh(a=2, b=2))
    return [fs.device_get(trees), fs.tree.map(lambda x: x.shards[0], trees)]


def test_materialize_gives_the_bits_of_the_simulated_mesh(ranks: Pool) -> None:
    simulated = placed(fs.make_mesh(a=2, b=2, kind="simulated"))
    one = fs.materialize(described(), P(), fs.make_mesh(a=1), key=fs.key(7))
    for rank, (whole, shards) in enumerate(ranks(4, placed_on_ranks)):
        assert_same(whole, fs.device_get([one, one]))
        assert_same(shards, fs.tree.map(lambda x, r=rank: x.shards[r], simulated))


# --- meshes and groups --------------------------------------------------------------------------------------


def meshes() -> None:
    assert repr(fs.make_mesh(data=2, model=2)) == "Mesh(data=2, model=2; process, 4 x cpu)"
    assert fs.make_mesh(data=-1, model=2).axes == {"data": 2, "model": 2}
    assert fs.make_mesh(data=-1).axes == {"data": 4}
    assert fs.make_mesh(data=4, model=-1).axes == {"data": 4, "model": 1}
    assert fs.make_mesh(data=2, model=2).ranks == (dist.get_rank(),)
    for axes, why in (
        ({"data": 3}, "3 = 3, not 4\n  fix: choose sizes whose product is 4, or start 3 processes"),
        ({"data": 4, "model": 2}, "4 x 2 = 8, not 4\n  fix: choose sizes whose product is 4, or start 8 processes"),
        ({"data": -1, "model": 3}, "4 % 3 = 1\n  fix: choose sizes whose product is 4, or start 3 processes"),
    ):
        sizes = ", ".join(f"{a}={n}" for a, n in axes.items())
        assert (
            error_text(fs.make_mesh, **axes)
            == f"make_mesh({sizes}): the axes do not make up the world size\n  world  4\n  {why}"
        )
    for axes in ({"data": -1, "model": -1}, {"data": 0}, {}, {"data": -2}):
        with pytest.raises(fs.ShardingError, match="not the sizes of a mesh"):
            fs.make_mesh(**axes)
    with pytest.raises(fs.ShardingError, match="compile=True"):
        fs.shard_map(lambda: None, mesh=fs.make_mesh(data=2, kind="simulated"), out_specs=P(), compile=True)
    # a simulated mesh can be made while torch.distributed runs
    assert fs.make_mesh(kind="simulated", data=3).size == 3


def groups() -> None:
    mesh = fs.make_mesh(x=2, one=1, y=2)
    names = ("x", "one", "y")
    for k in (1, 2, 3):
        for axes in itertools.permutations(names, k):  # every subset, in every order
            n = sum(1 for _ in itertools.product(*(range(mesh.axes[a]) for a in axes)))
            index = fs.shard_map(lambda a=axes: fs.axis_index(a)[None], mesh=mesh, out_specs=P(axes))()
            assert torch.equal(fs.device_get(index), torch.arange(n)), axes
            check_values(mesh, axes, "never")
    for axes in (("x",), ("y", "one", "x")):
        check_all(mesh, axes, "never")
        check_pending_transfers(mesh.run, mesh.axes, tuple(a for a in axes if a != "one"), EVERY_DTYPE[2::3])


def single_axis() -> None:
    mesh = fs.make_mesh(x=4)
    check_values(mesh, ("x",))
    check_all(mesh, ("x",))


def check_bytes_on_the_wire(verb: Callable[[], Any], n: int) -> None:
    """Check that gloo sends the bytes of the record, and a header of 256 to each other rank.

    A sum of at most 16 KiB is sent whole to each of the others.
    """
    with fs.recording() as log:
        cost = measure_step(lambda: verb, warmup=0)
    small = log[0].op.startswith("all_reduce") and log[0].bytes <= 1 << 14
    sends = [nbytes for op, nbytes in cost.transfers if op == "send"]
    assert len(sends) == len(cost.transfers)
    assert sum(sends) - 256 * (n - 1) == (log[0].bytes * (n - 1) if small else log[0].sent), log


def pending_transfers(n: int) -> None:
    mesh = fs.make_mesh(x=n)
    check_pending_transfers(mesh.run, mesh.axes, ("x",), EVERY_DTYPE if n == 2 else EVERY_DTYPE[::3])
    check_transfer_records(mesh.run, mesh.axes, ("x",), here=1)
    mesh.run(lambda comm, rank: [check_bytes_on_the_wire(verb, n) for verb, _ in verbs_with_bytes(comm, ("x",))])
    for _ in range(3):  # transfers that every rank drops do not block others
        mesh.run(lambda comm, rank: comm.gather([torch.ones(9)], [torch.empty(9 * n)], [0], ("x",)) and None)
        mesh.run(lambda comm, rank: comm.reduce([torch.ones(50_000)], ("x",)) and None)
    check_pending_transfers(mesh.run, mesh.axes, ("x",), EVERY_DTYPE[:1])
    mesh.run(
        lambda comm, rank: setattr(comm, "_connections", None)
    )  # leaves the collectives that CUDA and compilers use
    check_pending_transfers(mesh.run, mesh.axes, ("x",), (torch.float32, torch.int64))
    check_transfer_records(mesh.run, mesh.axes, ("x",), here=1)
    check_values(mesh, ("x",))


@pytest.mark.slow
def test_collectives_over_every_set_of_axes_in_every_order(ranks: Pool) -> None:
    ranks(4, groups)
    ranks(4, single_axis)
    ranks(4, pending_transfers, 4)
    ranks(2, pending_transfers, 2)


# --- uneven dims -----------------------------------------------------------------------------------


def uneven_training(mesh: fs.Mesh) -> Any:
    """Train on 5 rows, 7 columns and 3 experts over 4 ranks, with uneven results and a gather that exchanges sizes."""
    specs = {"w": P(None, "data"), "b": P("data"), "scale": P()}
    described = {"w": fs.init.normal((3, 7)), "b": fs.init.zeros(7), "scale": fs.init.ones(())}
    specs, described = {"experts": P("data"), **specs}, {"experts": fs.init.normal((3, 7, 7)), **described}
    params = fs.materialize(described, specs, mesh, key=fs.key(1))

    def loss_fn(p: Any, x: Tensor) -> Any:
        experts, rest = p["experts"], {name: w for name, w in p.items() if name != "experts"}
        p = fs.unshard(rest, {name: specs[name] for name in rest}, "data")
        y = torch.tanh(x @ p["w"] + p["b"]) * p["scale"]
        run = lambda w, rows, counts: fs.nn.grouped_linear(rows, w, counts)  # noqa: E731
        y = y + fs.nn.mixture(y, fs.nn.route(y[:, :3], 2), experts, run, axis="data")
        count = fs.psum(torch.tensor(float(len(x))), "data")
        return fs.psum(y.square().sum(), "data") / count, y

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P(), P("data"), P("data"), P()))
    def step(p: Any, x: Tensor) -> Any:
        (loss, y), grads = fs.value_and_grad(loss_fn, has_aux=True)(p, x)
        p = fs.tree.map(lambda w, g: w - 0.05 * g, p, grads)
        whole = fs.all_gather(y, "data", to="invariant")  # exchanges sizes
        return p, loss, y, torch.full((len(x),), len(x)), whole

    history = []
    for rows in (5, 1, 6, 8):
        x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows))
        params, *rest = step(params, x)
        assert [tuple(r.shape) for r in rest] == [(), (rows, 7), (rows,), (rows, 7)]
        history.append(fs.device_get((params, rest)))
    return history


def uneven_on_ranks() -> Any:
    return uneven_training(fs.make_mesh(data=4))


def test_pipelines_and_training_with_uneven_dims_equal_other_meshes(ranks: Pool) -> None:
    want = uneven_training(fs.make_mesh(data=4, kind="simulated"))
    one = uneven_training(fs.make_mesh(data=1))
    counts = [h[1][2].tolist() for h in want]
    assert counts == [[2, 2, 2, 2, 1], [1], [2, 2, 2, 2, 2, 2], [2] * 8]
    ranks(2, pipelines_on_two_processes)
    for history in (want, *ranks(4, uneven_on_ranks)):
        assert [h[1][2].tolist() for h in history] == counts
        for (params, rest), (params_1, rest_1) in zip(history, one, strict=True):
            assert_same([params, rest[:2], rest[3]], [params_1, rest_1[:2], rest_1[3]], **CLOSE)


def bad_results() -> None:
    mesh = fs.make_mesh(data=2)
    with pytest.raises(fs.ShardingError, match="do not make up dim 0"):
        fs.shard_map(lambda: torch.ones(1 + 2 * dist.get_rank()), mesh=mesh, out_specs=P("data"))()
    with pytest.raises(fs.ShardingError, match=r"rank 1 returned \[3\]"):
        fs.shard_map(lambda: torch.ones(1 + 2 * dist.get_rank()), mesh=mesh, out_specs=P(), check="never")()
    with pytest.raises(fs.ShardingError, match="the mesh has no axis 'model'"):
        fs.shard_map(lambda: torch.ones(2), mesh=mesh, out_specs=P("model"))()


def different_collectives() -> None:
    """Run unchecked calls in which rank 1 does another collective: both ranks raise, and their mesh is still usable."""
    mesh = fs.make_mesh(data=2)
    rank = dist.get_rank()
    for n in (4, 100_000):
        x = torch.ones(2 * n)
        for f in (
            lambda x: fs.psum(x, "data") if rank else fs.pmax(x, "data"),
            lambda x: fs.psum(x if rank else x[1:], "data"),  # gloo would abort rank 0, and rank 1 use what it has
            lambda x: fs.psum(x[1:] if rank else x, "data"),
            lambda x: fs.ppermute(x, "data", [(rank, 1 - rank)]),
        ):
            with pytest.raises(fs.ShardingError, match=r"disagree on a collective\n  data=0  .*\n  data=1  .*") as e:
                fs.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check="never")(x)
            assert str(e.value).count(f"test_process.py:{f.__code__.co_firstlineno} in ") == 1
            total = fs.shard_map(lambda x: fs.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
            assert fs.device_get(total(x)).tolist() == [2.0] * n
    check_values(mesh, ("data",))


def printing() -> None:
    """Print by messages, and by the collectives of CUDA: rank 0 does for all, and names a rank that does not print."""
    mesh, rank = fs.make_mesh(a=2, b=2), dist.get_rank()

    def say(x: Tensor | str) -> None:
        fs.print("b is", fs.axis_index("b"), x)
        fs.print("again")
        if rank == 3 and mesh._comm._connections is not None:
            fs.psum(torch.ones(2), ("a", "b"))
        else:
            fs.print()

    step = fs.shard_map(say, mesh=mesh, out_specs=P(), check="never")
    x, lines = (torch.eye(2) if rank == 3 else "é"), ["[a=0..1, b=0] b is 0 é", "[a=0, b=1] b is 1 é"]
    lines += ["[a=1, b=1] b is 1 tensor([[1., 0.],", "                          [0., 1.]])", "[a=0..1, b=0..1] again"]
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(fs.ShardingError, match="=0  print") as e:
        step(x)
    assert "=3  all_reduce" in str(e.value)
    assert out.getvalue().splitlines() == (lines if rank == 0 else [])
    mesh._comm._connections = None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        step(x)
    assert out.getvalue().splitlines() == ([*lines, "[a=0..1, b=0..1] "] if rank == 0 else [])


def process_groups() -> None:
    """Count the process groups that are made: none for messages, else those of the axes of a collective, once."""
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
        mesh = fs.make_mesh(a=2, b=2)
        run = lambda axes: mesh.run(lambda comm, _: comm.all_reduce(torch.ones(3), "sum", axes))  # noqa: E731
        for axes in (("a",), ("b",), ("a", "b"), ("b", "a")):
            assert run(axes)[0].tolist() == [float(2 ** len(axes))] * 3
        assert new_group.call_count == 0
        mesh._comm._connections = None  # leaves the collectives that CUDA and compilers use
        for axes, count in ((("b", "a"), 0), (("b",), 1), (("a", "b"), 1), (("b",), 1)):
            assert run(axes)[0].tolist() == [float(2 ** len(axes))] * 3
            assert new_group.call_count == count, axes
    assert new_group.call_args == mock.call(
        [2 * (dist.get_rank() // 2), 2 * (dist.get_rank() // 2) + 1], timeout=datetime.timedelta(seconds=TIMEOUT),
        use_local_synchronization=True,
    )  # fmt: skip


def test_wrong_meshes_results_and_collectives_are_errors_on_every_rank(ranks: Pool) -> None:
    ranks(4, meshes)
    ranks(4, process_groups)
    ranks(4, printing)
    ranks(2, bad_results)
    ranks(2, different_collectives)


# --- compiled -----------------------------------------------------------------------------------------------


def train(mesh: fs.Mesh, compile: bool) -> Any:
    described = {
        "up": fs.init.normal((8, 16), std=0.3),
        "b": fs.init.zeros(16),
        "down": fs.init.normal((16, 8), std=0.3),
    }
    specs = fs.fully_shard(P(), described, axis="data")
    params = fs.materialize(described, specs, mesh, key=fs.key(3))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        p = fs.unshard(p, specs, "data")
        h = torch.relu(x @ p["up"] + p["b"])
        return fs.pmean((h @ p["down"] - x).square().mean(), "data")

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=(specs, P()), compile=compile)
    def step(p: Any, x: Tensor) -> Any:
        loss, grads = fs.value_and_grad(loss_fn)(p, x)
        return fs.tree.map(lambda w, g: w - 0.5 * g, p, grads), loss

    history = []
    for i in range(5):
        params, loss = step(params, torch.randn(6, 8, generator=torch.Generator().manual_seed(i)))
        history.append(fs.device_get((params, loss)))
    return history


def compiled_and_eager() -> None:
    """By the default backend, which compiles C++: whole steps by another one are those of tests/e2e/test_compile.py."""
    mesh = fs.make_mesh(data=2)
    counters = torch._dynamo.utils.counters
    torch._dynamo.reset()
    counters.clear()
    got = train(mesh, compile=True)
    assert counters["stats"]["unique_graphs"] == 1, dict(counters["stats"])
    assert not counters["graph_break"]
    assert_same(got, train(mesh, compile=False), **CLOSE)


def checked_before_it_is_compiled() -> str:
    f = fs.shard_map(lambda x: x.sum(), mesh=fs.make_mesh(data=2), in_specs=(P("data"),), out_specs=P(), compile=True)
    return error_text(f, torch.ones(4, 3))


@pytest.mark.slow
def test_compiled_steps_equal_eager_steps_and_compile_once(ranks: Pool) -> None:
    ranks(2, compiled_and_eager)
    for text in ranks(2, checked_before_it_is_compiled):
        assert "result varies over 'data', which its out spec does not name" in text
    assert ranks(2, meshes_made_again) == [[[6.0, 10.0, 14.0]] * 3] * 2


# --- failure ------------------------------------------------------------------------------------------------

SCRIPT = """
import os
import sys
import tempfile
import time
import torch
import fshard as fs
from fshard import P

how, axes = sys.argv[1], eval(sys.argv[2])
mesh = fs.make_mesh(**axes)
rank = mesh.ranks[0]

@fs.shard_map(mesh=mesh, in_specs=(P("model"),), out_specs=P())
def step(x):
    if rank == 1 and steps == 2:
        if how == "raises":
            raise ArithmeticError("an error of rank 1")
        if how == "leaves":
            sys.exit(0)
        os.kill(os.getpid(), 9)
    return fs.psum(x.sum(), "model")

print(f"rank {rank} is up", flush=True)
for steps in range(3 if rank < 2 else 3000):  # ranks 2 and 3 never need rank 1
    step(torch.ones(4))
    time.sleep(0.02)
print(f"rank {rank} has finished", flush=True)
"""


def environment() -> dict[str, str]:
    """Environment of a user's shell: fshard importable, one compute thread, no variables of these tests' ranks."""
    removed = ("RANK", "WORLD", "LOCAL_", "MASTER_", "COV_", "PYTEST")
    mine = {k: v for k, v in os.environ.items() if not k.startswith(removed)}
    home = str(Path(fs.__file__).parents[1])
    return mine | {"PYTHONPATH": home, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


MESH = "{'data': 2, 'model': 2}"


def start_ranks(script: Path, how: str) -> list[tuple[int, str, float]]:
    """Run four processes without an agent; return the exit code, the output and the time of the end of each."""
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "4"}
    logs = [script.with_name(f"{how}-{r}.log") for r in range(4)]
    started = []
    for r, log in enumerate(logs):
        env = environment() | here | {"RANK": str(r)}
        with log.open("w") as out:
            started.append(subprocess.Popen([sys.executable, str(script), how, MESH], env=env, stdout=out, stderr=out))
    ended: dict[int, float] = {}
    limit = time.monotonic() + TIMEOUT
    try:
        while len(ended) < 4 and time.monotonic() < limit:
            ended |= {r: time.monotonic() for r, p in enumerate(started) if r not in ended and p.poll() is not None}
            time.sleep(0.02)
    finally:
        for p in started:
            p.kill()
            p.wait()
    assert len(ended) == 4, [log.read_text() for log in logs]
    first = min(ended.values())
    return [(started[r].returncode, logs[r].read_text(), ended[r] - first) for r in range(4)]


@pytest.mark.slow
def test_end_of_one_rank_ends_the_others_without_an_agent(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for how, exits in (("is killed", -9), ("leaves", 0)):
        (code, waits, delay), (own_code, own, _), *unconnected = start_ranks(script, how)
        assert code == 1, waits
        assert own_code == exits, own
        assert delay < 120, f"the waiting rank took {delay:.1f} s to end"
        if how == "leaves":  # the error of one that waits for a process that is killed may come after the grace
            assert "rank 0: a collective failed: another rank has failed, or has left the program" in waits
        failed = "[01]" if how == "is killed" else 0  # rank 0 fails because of rank 1
        told = f"fshard: rank [23] ends, since rank {failed} has failed"
        left = "rank [23]: a collective failed: another rank has failed, or has left the program"
        # Of the two, one may end while the other waits for it, which then fails in its collective.
        assert any(re.search(told, other) for _, other, _ in unconnected), unconnected
        for other_code, other, other_delay in unconnected:
            assert other_code == 1, other
            assert re.search(f"{told}|{left}", other), other
            assert other_delay < 120, f"a rank that does not need the one that ended took {other_delay:.1f} s to end"
        assert "has finished" not in "".join([waits, own, *(other for _, other, _ in unconnected)])


@pytest.mark.slow
def test_exception_of_one_rank_ends_a_job_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(script),
        "raises",
        "{'model': 2}",
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode != 0
    assert "rank 0 is up" in done.stdout
    assert "ArithmeticError: an error of rank 1" in done.stderr
    assert "has finished" not in done.stdout


def wait_with_timeout(done: str) -> float:
    """Leave rank 3 out of a collective: rank 1, which waits for it, fails after the timeout of the mesh."""
    rank = dist.get_rank()
    run = fs.shard_map(lambda x: fs.psum(x.sum(), "data"), mesh=fs.make_mesh(data=2, model=2),
                       in_specs=(P("data"),), out_specs=P())  # fmt: skip
    run(torch.ones(4))  # the first call is slow on a loaded machine: not with the short timeout
    run = run.on(fs.make_mesh(data=2, model=2, timeout=6), check="never")
    dist.barrier()  # the ranks begin to wait at one time
    start = time.monotonic()
    if rank == 1:  # waits for rank 3
        with pytest.raises(fs.ShardingError, match="a collective failed"):
            run(torch.ones(4))
        Path(done).touch()
    while rank == 3 and not Path(done).exists() and time.monotonic() < start + TIMEOUT / 2:
        time.sleep(0.05)
    return time.monotonic() - start


def test_wait_for_a_rank_that_hangs_ends_after_the_timeout_of_the_mesh(ranks: Pool, tmp_path: Path) -> None:
    try:
        waited = ranks(4, wait_with_timeout, str(tmp_path / "done"))[1]
    finally:
        ranks.end_teams()  # after a timeout no rank can send to the others
    assert 1 < waited < TIMEOUT


def crash(transfers_pending: bool) -> None:
    mesh = fs.make_mesh(data=2)

    @fs.shard_map(mesh=mesh, in_specs=(P("data"),), out_specs=P())
    def step(x: Tensor) -> Tensor:
        if fs.axis_index("data") == 1:
            os._exit(7)
        return fs.psum(x.sum(), "data")

    def start_or_crash(comm: Any, rank: int) -> None:
        if rank == 1:  # before it sends: of a message that is half received when its sender ends, gloo reports nothing
            os._exit(7)
        for wait in [comm.reduce([torch.ones(n)], ("data",)) for n in (10, 1_000)]:
            wait()

    if transfers_pending:
        mesh.run(start_or_crash)
    step(torch.ones(4))


def end_late(mark: str) -> None:
    exit_ = os._exit
    os._exit = lambda status: (time.sleep(0.5), Path(mark).touch(), exit_(status))  # type: ignore[assignment,return-value]


def test_crash_of_one_rank_ends_the_others_and_a_pool_waits_for_other_ends(ranks: Pool, tmp_path: Path) -> None:
    """Each process saves its coverage at its end: a file that is cut short, or being written, may fail the run."""
    for transfers_pending in (False, True):
        start = time.monotonic()
        with pytest.raises(RanksError) as e:
            ranks(2, crash, transfers_pending)
        assert "rank 0: a collective failed: another rank has failed, or has left the program" in str(e.value)
        assert "rank 1 of 2: the process is gone" in str(e.value)
        assert time.monotonic() - start < TIMEOUT / 2
    ranks(2, end_late, str(tmp_path / "ended"))
    ranks.end_teams()
    assert (tmp_path / "ended").exists()
