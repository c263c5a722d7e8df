"""Processes pass the same global values to a call: anything else is an error that names the argument."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import P
from fshard._core.compare import check_same_arguments
from tests.lib.processes import Pool

TWO = fs.make_mesh(kind="simulated", a=2)


def compare(*by_rank: Any) -> str:
    """Return the text of the error for these arguments of the ranks, "" for none; the same on every rank."""
    flat = [fs.tree.leaves_with_path(args) for args in by_rank]
    calls = [([fs.tree.show("x", path) for path, _ in leaves], [leaf for _, leaf in leaves]) for leaves in flat]
    alone: Any = mock.Mock(kind="process", size=len(by_rank))
    sent = []
    for call in calls:
        alone.gather_objects = mock.Mock(side_effect=lambda mine: [mine])
        check_same_arguments("f", alone, *call)
        sent.append(alone.gather_objects.call_args.args[0])
    together: Any = mock.Mock(kind="process", size=len(by_rank), gather_objects=mock.Mock(return_value=sent))
    texts = set()
    for call in calls:
        try:
            check_same_arguments("f", together, *call)
            texts.add("")
        except fs.ShardingError as e:
            texts.add(str(e))
    (text,) = texts
    return text


def bits(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32).view(torch.float32)


ones = torch.ones(4, 3)
SAME = {
    "equal tensors": [ones, ones.clone()],
    "views of other strides": [ones, torch.ones(3, 4).T],
    "NaN": [torch.tensor([math.nan]), torch.tensor([math.nan])],
    "NaN of Python": [math.nan, float("nan")],
    "no elements": [torch.ones(0, 3), torch.ones(0, 3)],
    "half precision of odd length": [torch.ones(3).bfloat16(), torch.ones(3).bfloat16()],
    "complex and conjugate": [torch.tensor([1 - 2j]), torch.tensor([1 + 2j]).conj()],
    "parameter": [torch.nn.Parameter(ones), ones],
    "arrays": [np.ones(3), np.ones((3, 2))[:, 0]],
    "objects of no value": [object(), object()],
    "a logger on one rank": [{"x": ones, "log": object()}, {"x": ones, "log": None}],
    "parts of a placed leaf": [fs.device_put(x, P("a"), TWO) for x in (torch.ones(4), torch.zeros(4))],
    "another order of keys": [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
    "tuple and list": [(1, 2), [1, 2]],
}
OTHER: dict[str, list[Any]] = {
    "one element": [ones, torch.ones(4, 3).index_fill(0, torch.tensor(2), 2)],
    "one bit": [ones[:1], ones[:1] * (1 + 2**-23)],
    "sign of zero": [torch.zeros(1), -torch.zeros(1)],
    "payload of NaN": [bits(0x7FC00000), bits(0x7FC00001)],
    "order of the elements": [torch.tensor([0, 1]), torch.tensor([1, 0])],
    "shape": [ones, ones.T],
    "size": [torch.ones(4), torch.ones(5)],
    "dtype": [ones, ones.double()],
    "number": [0.1, 0.2],
    "number's type": [1, 1.0],
    "bool": [True, False],
    "bool and number": [True, 1],
    "sign of zero in Python": [0.0, -0.0],
    "string": ["a", "b"],
    "tensor and number": [torch.tensor(1.0), 1.0],
    "array": [np.ones(3), np.zeros(3)],
    "array's dtype": [np.ones(3), np.ones(3, np.float32)],
    "numpy number": [np.float32(1), np.float32(2)],
    "None": [{"x": ones}, {"x": None}],
    "placement": [fs.device_put(torch.ones(4), spec, TWO) for spec in (P(), P("a"))],
    "placed and plain": [fs.device_put(torch.ones(4), P(), TWO), torch.ones(4)],
    "sparse and dense": [torch.eye(2), torch.eye(3).to_sparse()],
}


@pytest.mark.parametrize("name", SAME)
def test_equal_arguments_pass(name: str) -> None:
    assert compare(*SAME[name]) == ""


@pytest.mark.parametrize("name", OTHER)
def test_arguments_that_differ_are_an_error_on_every_rank(name: str) -> None:
    first, second = OTHER[name]
    text = compare(first, first, second)
    assert " differs between rank 0 and rank 2\n" in text
    _, shown, other, *_ = text.splitlines()
    assert shown.removeprefix("  rank 0,1") != other.removeprefix("  rank 2")
    assert " differs between rank 0 and rank 1\n" in compare(second, first, first)


def test_error_texts() -> None:
    assert compare({"lr": 0.1}, {"lr": 0.2}, {"lr": 0.1}) == (
        "f: x['lr'] differs between rank 0 and rank 1\n"
        "  rank 0,2  0.1\n"
        "  rank 1    0.2\n"
        "  a value that is not placed is global: every process must pass the same one\n"
        "  fix: pass one value on every rank; inside the function, fs.axis_index(axis) tells the ranks apart"
    )
    scalars = compare(*[{"t": torch.tensor(float(i)), "u": i, "v": i} for i in range(8)])
    assert scalars == (
        "f: x['t'] differs between rank 0 and rank 1\n"
        + "".join(f"  rank {i}  f32[]  {i}\n" for i in range(6))
        + "  and 2 more values\n"
        "  so do x['u'], x['v']\n"
        "  a value that is not placed is global: every process must pass the same one\n"
        "  fix: draw it by fs.random and a key, or after torch.manual_seed(0) on every rank; place the rows that\n"
        "       each rank loads for itself with fs.from_callback or fs.data.load"
    )
    assert compare([torch.tensor(2.5)], []) == (
        "f: x[0] differs between rank 0 and rank 1\n"
        "  rank 0  f32[]  2.5\n"
        "  rank 1  nothing\n"
        "  a value that is not placed is global: every process must pass the same one\n"
        "  fix: pass the same tree of arguments on every rank"
    )
    assert compare(*OTHER["placement"]) == (
        "f: x differs between rank 0 and rank 1\n"
        "  rank 0  f32[4]\n"
        "  rank 1  f32[4@a]\n"
        "  fix: place it alike on every rank"
    )


# --- on processes -------------------------------------------------------------------------------------------


def on_ranks() -> dict[str, str]:
    """Return the text of the error of each program, "passed" for none."""
    mesh, rank = fs.make_mesh(data=2, model=dist.get_world_size() // 2), dist.get_rank()
    torch.manual_seed(rank)  # as processes that seed nothing
    outcomes = {}

    def total(x: Any, n: Any = 1) -> Any:
        return fs.psum(x.sum(), "data") * n

    def step(f: Any = total, spec: Any = P("data"), **options: Any) -> Any:  # noqa: B008
        return fs.shard_map(f, mesh=mesh, in_specs=spec, out_specs=P(), **options)

    def note(name: str, f: Any, *args: Any, **kwargs: Any) -> None:
        try:
            f(*args, **kwargs)
            outcomes[name] = "passed"
        except fs.ShardingError as e:
            outcomes[name] = str(e)

    x, unseeded = torch.ones(8), torch.randn(8)

    def again(kind: str) -> None:  # what is compiled does not matter here: only when a call is checked
        enter, total_of = lambda w: fs.pvary(w, "data"), torch.sum

        def gradient(w: Any, x: Any) -> Any:
            grad = fs.grad(lambda w: fs.pmean((x * enter(w)).mean(), "data"))(w)
            return grad, fs.psum(total_of(x), "data")

        with mock.patch.object(torch, "compile", lambda f, **_: f):
            f = step(gradient, (P(), P("data")), compile=kind == "compiled")
        note(f"{kind}, unseeded", f, torch.ones(1), unseeded)
        note(f"{kind}, same", f, torch.ones(1), x)
        total_of = lambda x: x.sum()[None].double()  # noqa: E731
        note(f"{kind}, another shape", f, torch.ones(1), x)
        enter = torch.clone
        note(f"{kind}, helper changed", f, torch.ones(1), x)

    if mesh.size == 2:  # and not on four: each loads the compiler, which takes a second
        again("compiled")
        return outcomes
    for check in ("first", "always", "values", "never"):
        note(f"unseeded, {check}", step(check=check), unseeded)
    note("number", step(), x, 0.1 * rank)
    note("shape", step(), torch.ones(8 + 2 * rank))
    note("tree", step(lambda t: fs.psum(t["x"].sum(), "data")), {"x": x, "y": x} if rank else {"x": x})
    note("one rank's argument does not fit", step(spec=P(None, "data")), torch.ones(8, *[2] * rank))
    note("logger", step(lambda t: total(t["x"]), ({"x": P("data"), "log": P()},)),
         {"x": x, "log": object() if rank else None})  # fmt: skip
    note("another function", step() if rank else step(lambda x: total(x)), x)  # noqa: PLW0108
    known = step()
    note("same", known, x)
    note("later values are not compared", known, unseeded)
    note("verified", fs.verify, known, unseeded)
    note("same again", known, x)
    note("captured number", step(lambda w, x: fs.grad(lambda w: fs.pmean((x * fs.pvary(w, "data")).mean(), "data"))(w)
                                 * (1 + rank), spec=(P(), P("data"))), torch.ones(1), x)  # fmt: skip
    note("replicas", step(lambda x: fs.psum(x.sum(), "data") + torch.from_numpy(np.array([rank], np.float32))), x)
    local = lambda x: fs.random.normal(fs.key(0), (len(x) * fs.axis_size("data"),), spec=P("data"))  # noqa: E731
    globally = lambda x: fs.random.normal(fs.key(0), fs.global_shape(x, P("data")), spec=P("data"))  # noqa: E731
    seven = torch.ones(7)
    note("draws of other shapes", step(lambda x: fs.psum(local(x).sum(), "data")), seven)
    gathered = step(lambda x: fs.all_gather(globally(x), "data", size=7, to="invariant"))(seven)
    outcomes["draw"] = str(fs.device_get(gathered).equal(fs.random.normal(fs.key(0), (7,))))
    outcomes["sum of an array"] = str(step()(np.arange(8)).item())
    note("list", step(), [1, 2, 3, 4])
    note("sum of bools", step(lambda x: fs.psum(x.sum() > 0, "data")), x)
    for only in (0, 1, None):  # the position that has False

        def agreement(x: Any, only: Any = only) -> Any:
            ok = fs.axis_index("data") != (9 if only is None else only)
            return fs.pmin(ok, "data"), fs.pmax(ok, "data"), fs.pmax(~ok, "data")

        outcomes[f"agreement but for {only}"] = str([y.item() for y in step(agreement)(x)])
    again("eager")
    return outcomes


@pytest.mark.process
def test_every_process_names_the_argument_that_differs(ranks: Pool) -> None:
    (first, *others), (compiled, other) = ranks(4, on_ranks), ranks(2, on_ranks)
    assert others == [first] * 3
    assert other == compiled
    first |= compiled
    of_x = "x differs between rank 0 and rank 1\n  rank 0  f32[8]  digest"
    for check in ("first", "always", "values"):
        assert first[f"unseeded, {check}"].startswith(f"total: {of_x}")
    assert first["number"].startswith("total: n differs between rank 0 and rank 1\n  rank 0  0.0\n  rank 1  0.1\n")
    assert first["shape"].startswith("total: x differs between rank 0 and rank 1\n  rank 0  f32[8]  digest")
    assert first["tree"].startswith("<lambda>: t['y'] differs between rank 0 and rank 1\n  rank 0      nothing\n")
    assert first["one rank's argument does not fit"].startswith("total: x differs between rank 0 and rank 1\n")
    assert first["verified"].startswith(f"total: {of_x}")
    assert "a number that differs between its ranks" in first["captured number"]
    assert first["replicas"].startswith("<lambda>: result differs between ranks of 'data'")
    assert first["another function"] == (
        "the ranks call different functions\n"
        "  rank 0  <lambda>\n  rank 1  total\n  rank 2  total\n  rank 3  total\n"
        "  fix: every rank must call the same functions in the same order"
    )
    assert "random.normal with a global shape that differs between ranks of 'data'\n" in first["draws of other shapes"]
    assert "  data=0  (8,)\n  data=1  (6,)\n" in first["draws of other shapes"]
    assert (first["draw"], first["sum of an array"]) == ("True", "28")
    assert first["list"].startswith(
        "total: args[0][0]: is an int, not a tensor: it has no parts for P('data') to place"
    )
    assert first["sum of bools"].startswith("psum: x is bool, and its sum would be a logical or\n")
    for only in (0, 1, None):
        assert first[f"agreement but for {only}"] == str([only is None, True, only is not None])
    for kind in ("eager", "compiled"):
        assert first[f"{kind}, unseeded"].startswith(f"gradient: {of_x}")
        assert "mul of an operand that is invariant (I) over 'data'" in first[f"{kind}, helper changed"]
    for name in ("unseeded, never", "logger", "same", "later values are not compared", "same again",
                 "eager, same", "compiled, same", "eager, another shape", "compiled, another shape"):  # fmt: skip
        assert first[name] == "passed"


def test_ranks_of_one_process_are_not_compared() -> None:
    with mock.patch("torch.distributed.all_gather_object", side_effect=AssertionError):
        for n in (1, 2):
            f = fs.shard_map(lambda x: fs.psum(x.sum(), "a"), mesh=fs.make_mesh(kind="simulated", a=n), in_specs=P("a"),
                             out_specs=P())  # fmt: skip
            assert f(torch.ones(4)).item() == 4
