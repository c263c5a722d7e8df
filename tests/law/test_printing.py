"""`fs.print`: a line for each different text, by rank, once, inside every transform and schedule; never a hang."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
import torch

import fshard as fs
from fshard import P
from fshard._core.region import region
from tests.lib.assertions import error_text
from tests.lib.operations import Operations

MESH = fs.make_mesh(data=2, model=3)


def printed(f, *args, mesh=MESH, check="never"):
    """Return the lines that a region prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        fs.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P(), check=check)(*args)
    return out.getvalue().splitlines()


def test_a_value_that_only_one_axis_splits_is_one_line_for_each_of_its_parts_in_rank_order():
    def f(x):
        fs.print("rows", fs.pslice(x, "data"))
        fs.print("columns", fs.pslice(x, "model").tolist(), sep=": ")
        fs.print("all", x.sum())

    assert printed(f, torch.arange(6), check="first") == [
        "[data=0, model=0..2] rows tensor([0, 1, 2])",
        "[data=1, model=0..2] rows tensor([3, 4, 5])",
        "[data=0..1, model=0] columns: [0, 1]",
        "[data=0..1, model=1] columns: [2, 3]",
        "[data=0..1, model=2] columns: [4, 5]",
        "[data=0..1, model=0..2] all 15",
    ]


@pytest.mark.parametrize(
    ("ones", "want"),
    [
        ({0, 1, 3, 4}, ["[data=0..1, model=0..1] 1", "[data=0..1, model=2] 0"]),
        ({0, 2, 5}, ["[data=0, model=0,2; data=1, model=2] 1", "[data=0, model=1; data=1, model=0..1] 0"]),
        ({5}, ["[data=0, model=0..2; data=1, model=0..1] 0", "[data=1, model=2] 1"]),
    ],
)
def test_ranks_with_equal_texts_are_described_as_boxes(ones, want):
    assert printed(lambda: fs.print(int(region().rank in ones))) == want


def test_axes_of_one_rank_are_named_only_where_there_is_no_other():
    assert printed(lambda: fs.print("x"), mesh=fs.make_mesh(data=1, model=2)) == ["[model=0..1] x"]
    assert printed(lambda: fs.print("x"), mesh=fs.make_mesh(data=1)) == ["[data=0] x"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        fs.print("x", torch.tensor(1.2), {"y": torch.ones(2)})
    assert out.getvalue() == "x 1.2 {'y': tensor([1., 1.])}\n"


def test_numbers_have_the_digits_that_their_dtype_tells_apart_and_further_lines_are_indented():
    def f():
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn):
            fs.print(torch.tensor(0.1, requires_grad=True).to(dtype))
        fs.print({"b": [torch.tensor(True), None, torch.tensor(7, dtype=torch.int8)], "a": torch.tensor(1 - 2j)})
        fs.print("w", torch.eye(2))
        fs.print()

    lines = printed(f, mesh=fs.make_mesh(data=2))
    assert [line.removeprefix("[data=0..1] ") for line in lines] == [
        "0.10000000149011612",
        "0.1",
        "0.1",
        "0.100097656",
        "0.1015625",
        "{'b': [True, None, 7], 'a': (1-2j)}",
        "w tensor([[1., 0.],",
        "                      [0., 1.]])",
        "",
    ]


def test_an_abstract_mesh_prints_dtypes_and_shapes_as_each_rank_that_is_checked():
    def f(x):
        fs.print("x", x, x.sum())
        return fs.psum(x.sum(), "data")

    with contextlib.redirect_stdout(io.StringIO()) as out:
        fs.check(fs.shard_map(f, mesh=fs.make_mesh(data=4), in_specs=P("data"), out_specs=P()), fs.init.zeros((6, 2)))
    assert out.getvalue() == "[data=0] x f32[2, 2] f32[]\n[data=3] x f32[0, 2] f32[]\n"


def test_a_transform_prints_plain_values_once_with_the_examples_of_vmap_in_front():
    x = torch.arange(6.0).view(3, 2)

    def f(x):
        say = lambda name, y: fs.print(name, y) or (y * y).sum()  # noqa: E731
        torch.func.vmap(lambda y: fs.print("vmap", y) or y, in_dims=1)(x)
        torch.func.vmap(torch.func.vmap(lambda y: fs.print("nested", y, x[0]) or y, in_dims=1))(x.view(3, 1, 2))
        torch.func.vmap(lambda y: fs.print("text") or y)(x)
        fs.grad(lambda y: say("grad", y))(x[0])
        torch.func.grad(lambda y: say("func", y))(x[0])
        torch.func.vmap(torch.func.grad(lambda y: say("vmap of grad", y)))(x)
        torch.func.jvp(lambda y: say("jvp", y), (x[0],), (x[1],))
        torch.func.hessian(lambda y: say("hessian", y))(x[0])
        fs.accumulate(lambda p, y: (fs.print("half", y.sum()), (p * y).sum())[1], 2)(x[0, 0], x[:2])

    want = """
vmap tensor([[0., 2., 4.],
             [1., 3., 5.]])
nested tensor([[[0.],
                [1.]],

               [[2.],
                [3.]],

               [[4.],
                [5.]]]) tensor([0., 1.])
text
grad tensor([0., 1.])
func tensor([0., 1.])
vmap of grad tensor([[0., 1.],
                     [2., 3.],
                     [4., 5.]])
jvp tensor([0., 1.])
hessian tensor([0., 1.])
half 1.0
half 5.0"""
    for check in ("never", "always"):
        lines = printed(f, x, mesh=fs.make_mesh(data=2), check=check)
        shown = [line[12:] if line.startswith("[data=0..1] ") else line.strip() for line in lines]
        assert shown == [line if line[:1].isalpha() else line.strip() for line in want.splitlines()[1:]]


SCHEDULES = [{}, {"remat": True}, {"remat": True, "offload": True}, {"release": False}, {"prefetch": 0}]


@pytest.mark.parametrize("check", ["never", "always"])
def test_a_recomputation_prints_nothing_again(check):
    layers, x = [{"w": torch.full((4, 4), 0.1 * i)} for i in range(3)], torch.ones(2, 4)

    def block(p, x):
        y = torch.relu(fs.pmean(x @ p["w"], "data"))
        fs.print("block", p["w"][0, 0])
        return fs.pvary(y.sin(), "data")

    def loops(p, x):
        specs = [P("data")] * 3
        for how in SCHEDULES:

            def loss(p, how=how):
                return fs.pmean(fs.scan(block, p, x, specs=specs, axis="data", **how).square().mean(), "data")

            fs.grad(loss)(p)
            if not how.get("offload"):
                torch.func.grad(lambda p, loss=loss: loss(p))(p)
        again = fs.remat(fs.remat(lambda y: fs.print("remat", y[0, 0]) or fs.pmean(y.sin().square(), "data").sum()))
        fs.grad(fs.remat(lambda y: fs.print("plain", y[0, 0]) or fs.pmean(y.sin().sin().sum(), "data")))(x)
        fs.grad(again)(x)
        torch.func.grad(again)(x)
        torch.func.jvp(again, (x,), (x,))

    with contextlib.redirect_stdout(io.StringIO()) as out:
        mesh = fs.make_mesh(data=2)
        fs.shard_map(loops, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=None, check=check)(layers, x)
    block_lines = ["[data=0..1] block 0.0", "[data=0..1] block 0.1", "[data=0..1] block 0.2"]
    assert out.getvalue().splitlines() == block_lines * 9 + ["[data=0..1] plain 1.0"] + ["[data=0..1] remat 1.0"] * 3


def test_a_print_is_no_transfer_and_changes_no_result():
    def f(x, say):
        g = fs.grad(lambda x: (say("x", x, fs.psum(x, "data")), fs.pmean(x.exp().sum(), "data"))[1])(x)
        return fs.psum(g.exp(), "data")

    results, logs = [], []
    for say in (fs.print, lambda *xs: None):
        step = fs.shard_map(lambda x, say=say: f(x, say), mesh=MESH, in_specs=P("data"), out_specs=P(), check="always")
        with fs.recording() as log:
            results.append(fs.device_get(step(torch.arange(4.0))))
        logs.append(sorted((t.op, t.axes, t.bytes, t.phase) for t in log))
    assert torch.equal(*results)
    assert logs[0] == logs[1]
    counts = []
    for say in (fs.print, lambda *xs: None):  # one rank runs in this thread, and its operations are seen
        with Operations() as seen:
            fs.shard_map(lambda x, say=say: say(x, x[0]) or x.exp(), mesh=fs.make_mesh(data=1), out_specs=P())(
                results[0]
            )
        counts.append(dict(seen.counts))
    assert counts[0] == counts[1]


def test_ranks_of_which_only_some_print_are_an_error_that_names_them():
    mesh = fs.make_mesh(data=2)
    for other, of_0, of_1 in (
        (lambda: None, "has returned", "waits in print over 'data'"),
        (lambda: fs.psum(torch.ones(3), "data"), "all_reduce over 'data' of float32[3]", "print over 'data'"),
    ):
        f = lambda other=other: fs.print("x") if region().rank else other()  # noqa: E731
        text = error_text(fs.shard_map(f, mesh=mesh, out_specs=P(), check="never"))
        for rank, of in enumerate((of_0, of_1)):
            line = "" if of == "has returned" else r", at test_printing\.py:\d+ in <lambda>"
            assert re.search(rf"rank {rank}  {re.escape(of)}{line}\n", text), text


@pytest.mark.slow  # imports dynamo
def test_a_compiled_program_cannot_print():
    step = fs.shard_map(lambda x: fs.print(x) or x, mesh=fs.make_mesh(data=1), out_specs=P(), compile=True)
    assert error_text(step, torch.ones(2)) == (
        "print: a compiled program cannot print\n  fix: leave out compile=True, or the fs.print")  # fmt: skip
    broken = fs.shard_map(lambda x: x.view(3), mesh=fs.make_mesh(data=1), out_specs=P(), compile=True)
    with pytest.raises(RuntimeError, match="view"):  # an error of torch stays as it is
        broken(torch.ones(2))
