"""The work of the host does not grow with the number of ranks: the same operations at 8 and 2,048."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import fshard as fs
from fshard import P
from fshard._core.comm import ProcessComm, process
from fshard._core.ops.linear_maps import AllToAll, Gather, Slice, Sum
from fshard.spec import part_lengths
from tests.lib.tiers import slow_unless

RANKS = (8, 2048)
PACKAGE = os.path.dirname(fs.__file__)


@contextlib.contextmanager
def rank_of(n: int) -> Iterator[None]:
    """Make this process one rank of `n`; the others do not exist, and its collectives send nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=n // 2, world_size=n)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(process, "timeout_of", lambda *_: datetime.timedelta(1))  # the fake backend has none
            yield
    finally:
        dist.destroy_process_group()


class _Calls(TorchFunctionMode):
    """Number of calls of torch, and of the tensors that they take and return, in lists too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.tensors = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        self.tensors += sum(isinstance(x, Tensor) for x in fs.tree.leaves([args, kwargs, out]))
        return out


def work_of(f: Callable[[], Any]) -> dict[str, int]:
    """Count the calls of torch, their tensors, and the instructions of the package's own code."""
    instructions = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal instructions
        if event == "call":
            frame.f_trace_opcodes = frame.f_code.co_filename.startswith(PACKAGE)
            return trace if frame.f_trace_opcodes else None
        instructions += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    with _Calls() as seen:
        gc.disable()  # a collection would run, and count, the finalizers of what earlier tests have left
        sys.settrace(trace)
        try:
            f()
        finally:
            sys.settrace(before)
            if collects:
                gc.enable()
    return {"calls": seen.calls, "tensors": seen.tensors, "instructions": instructions}


def test_loops_over_ranks_are_counted_in_our_code_in_calls_and_in_lists_of_tensors():
    few, many = (work_of(lambda n=n: part_lengths(n + 1, [n])) for n in (8, 64))
    assert many["instructions"] > few["instructions"] + 8 * 56
    x = torch.zeros(64)
    few, many = (work_of(lambda n=n: torch.cat(x[:n].split(1))) for n in (8, 64))
    assert many["tensors"] == few["tensors"] + 2 * 56
    assert many["calls"] == few["calls"]
    few, many = (work_of(lambda n=n: [x[i] for i in range(n)]) for n in (8, 64))
    assert many["calls"] == few["calls"] + 56


# --- one map --------------------------------------------------------------------------------------------------

LEAVES = {  # (shape, dim that is split), for `n` ranks
    "even": lambda n: [((2 * n, 1), 0), ((1, 2 * n), 1), ((1, n, 3), 1)],
    "uneven": lambda n: [((2 * n - 1, 1), 0), ((1, 2 * n), 1), ((1, 2 * n - 1, 3), 1)],
    "empty parts": lambda n: [((1, 1), 0), ((1, n // 2), 1)],
}
AXES = {"one axis": lambda n: {"a": n}, "two axes": lambda n: {"a": n // 4, "b": 4},
        "three axes": lambda n: {"a": 2, "b": n // 4, "c": 2}}  # fmt: skip


@pytest.mark.parametrize(("kind", "traced"), slow_unless([*((kind, False) for kind in AXES), ("two axes", True)],
                                                         itertools.product(AXES, (False, True))))  # fmt: skip
def test_collectives_call_the_same_operations_for_any_number_of_ranks(kind, traced, monkeypatch):
    """Over axes in their order and in the reverse one; eager, and in the form that dynamo traces."""
    monkeypatch.setattr(ProcessComm, "direct", not traced)
    found = {}
    for n in RANKS:
        with rank_of(n):
            mesh = fs.make_mesh(kind="process", device="cpu", **AXES[kind](n))
            for axes in {tuple(mesh.axes), tuple(reversed(mesh.axes))}:
                for name, leaves in LEAVES.items():
                    works = found.setdefault((axes, name), {})
                    (works[n],) = mesh.run(functools.partial(work_of_maps, axes, leaves(n)))
    for case, works in found.items():
        assert works[8] == works[2048], case


def work_of_maps(axes: tuple[str, ...], leaves: list[tuple[tuple[int, ...], int]], comm: Any, rank: int) -> Any:
    whole = [torch.zeros(shape) for shape, _ in leaves]
    layout = tuple((dim, shape[dim]) for shape, dim in leaves)
    other = tuple((0 if dim else 1, whole[i].shape[0 if dim else 1]) for i, (_, dim) in enumerate(leaves))
    gather, own = Gather(comm, axes, layout), Slice(comm, axes, layout)
    exchange = AllToAll(comm, axes, other, layout)
    parts = own.run(whole)
    runs: dict[str, Callable[[], list[Tensor]]] = {
        "pslice": lambda: own.run(whole), "all_gather": lambda: gather.run(parts),
        "psum_scatter": lambda: gather.transpose.run(whole), "psum": lambda: Sum(comm, axes).run(whole),
        "all_to_all": lambda: exchange.run(parts),
    }  # fmt: skip
    return {verb: work_of(run) for verb, run in runs.items()}


# --- a training step ------------------------------------------------------------------------------------------


def test_training_step_calls_the_same_operations_for_any_number_of_ranks():
    """Fully sharded blocks, two leaves of each uneven; a sharded head; clipping, AdamW and a mean over the ranks."""
    found = {n: work_of_step(n) for n in RANKS}
    assert found[8] == found[2048]
    assert found[8]["instructions"] > 10_000  # the package's code is counted


def work_of_step(n: int) -> dict[str, int]:
    described = {"h": {"up": fs.init.normal((2, 3, 2 * n)), "bias": fs.init.zeros((2, 2 * n - 1)),
                       "down": fs.init.normal((2, 2 * n - 1, 3)), "scale": fs.init.ones((2, 3))},
                 "head": fs.init.normal((2 * n, 3))}  # fmt: skip
    specs = {"h": {"up": P(None, None, "data"), "bias": P(None, "data"), "down": P(None, "data"), "scale": P()},
             "head": P("data")}  # fmt: skip
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0, specs), fs.optim.adamw(1e-3))

    def block(p: Any, x: Tensor) -> Tensor:
        return x + (torch.tanh(x @ p["up"])[:, 1:] + p["bias"]) @ p["down"] * p["scale"]

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        x = fs.scan(block, p["h"], x, specs=specs["h"], axis="data", shapes=described["h"])
        head = fs.unshard(p["head"], specs["head"], "data")
        return fs.pmean((x @ head.t()).square().mean(), "data")

    def step(p: Any, state: Any, x: Tensor) -> Any:
        loss, grads = fs.value_and_grad(loss_fn)(p, x)
        p, state = opt.update(grads, state, p)
        return p, state, loss

    with rank_of(n):
        mesh = fs.make_mesh(kind="process", device="cpu", data=n)
        params = fs.materialize(described, specs, mesh, key=fs.key(0))
        state = opt.init(params)
        run = fs.shard_map(step, mesh=mesh, in_specs=(specs, None, P("data")),
                           out_specs=(specs, opt.specs(specs), P()), check="never")  # fmt: skip
        args = params, state, torch.ones(n, 3)
        run(*args)  # plans the call
        return work_of(lambda: run(*args))
