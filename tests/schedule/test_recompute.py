"""Remat of the scheduled loop: the numbers of the plain loop, and no more operations than backward needs."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P, ShardingError
from fshard._core.transfers import recording
from fshard.schedule.recompute import DiscardedTensors
from tests.lib.assertions import assert_same
from tests.lib.operations import Operations

D, BLOCKS, ROWS = 8, 3, 4
SPECS = [{"up": P("data", "model"), "down": P("model", "data")}] * BLOCKS


def block(p: Any, x: Tensor) -> Tensor:
    h = torch.nn.functional.gelu(fs.pvary(x, "model") @ p["up"])
    return x + fs.psum(h @ p["down"], "model")


def block_with_inner_fs_grad(p: Any, x: Tensor) -> Tensor:
    return block(p, x) + fs.grad(lambda y: fs.psum(torch.sin(y).sum(), "data"))(x)


def block_with_inner_autograd(p: Any, x: Tensor) -> Tensor:
    z = block(p, x)
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(torch.sin(y).sum(), y)
    return z * g


def block_with_inner_scan(p: Any, x: Tensor) -> Tensor:
    """Split the weights over data again and scan over them."""
    shards = {k: v.chunk(2, SPECS[0][k].entries.index("data"))[int(fs.axis_index("data"))] for k, v in p.items()}
    inner = [{k: v * (i + 1) for k, v in shards.items()} for i in range(3)]
    return fs.scan(block, inner, x, specs=SPECS, axis="data")


def block_that_saves_its_arguments(p: Any, x: Tensor) -> Tensor:
    x = x * x
    return x.sin() * fs.psum((fs.pvary(x, "model") @ p["up"]).sum() * p["up"].square().sum(), "model").tanh()


def step(body: Any, how: dict[str, Any], mesh: fs.Mesh) -> Any:
    draw = lambda seed, *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    params = [{k: 0.3 * draw(10 * i + len(k), D, D) for k in s} for i, s in enumerate(SPECS)]
    x = draw(99, ROWS, D)

    @fs.shard_map(mesh=mesh, in_specs=(SPECS, P("data")), out_specs=(P(), SPECS), check="never")
    def f(params: Any, x: Tensor) -> Any:
        loss_fn = lambda p: fs.pmean(fs.scan(body, p, x, specs=SPECS, axis="data", **how).square().mean(), "data")  # noqa: E731
        return fs.value_and_grad(loss_fn)(params)

    with recording() as log:
        out = f(fs.device_put(params, SPECS, mesh), x)
    transfers = Counter((t.op, t.axes, t.phase) for t in log)
    return fs.device_get(out), {k: n // mesh.size for k, n in transfers.items()}


def block_that_uses_weights_after_its_last_transfer(p: Any, x: Tensor) -> Tensor:
    return torch.cat([block(p, x) @ p["up"]] * 2, 1).tanh()


BODIES = [
    block, block_with_inner_fs_grad, block_with_inner_autograd, block_with_inner_scan, block_that_saves_its_arguments,
    block_that_uses_weights_after_its_last_transfer,
]  # fmt: skip


@pytest.mark.parametrize(("body", "release"), [(block, False), *((body, True) for body in BODIES)])
def test_remat_has_the_numbers_of_the_loop_without_remat(body: Any, release: bool) -> None:
    mesh = fs.make_mesh(data=2, model=2)
    want, _ = step(body, {}, mesh)
    got, _ = step(body, {"remat": True, "release": release}, mesh)
    assert_same(got, want, rtol=1e-6, atol=1e-7)
    assert all(g["up"].abs().sum() > 0 for g in got[1])


@pytest.mark.parametrize("sums", [0, 1, 2])
def test_recomputation_skips_the_last_product_and_the_last_transfer(sums: int) -> None:
    runs: list[Operations] = []

    def counted(p: Any, x: Tensor) -> Tensor:
        h = fs.pvary(x, "model")
        seen = Operations()
        runs.append(seen)
        with seen:
            h = torch.tanh(h @ p["up"])
            for _ in range(sums - 1):
                h = torch.tanh(fs.psum(h, "model"))
            y = h.cos() @ p["down"]
            return x + (fs.psum(y, "model") if sums else y)

    mesh = fs.make_mesh(data=2, model=2)
    names = ("all_reduce", ("model",), "forward"), ("all_reduce", ("model",), "backward")
    plain: list[int] = []
    for how, products, repeated in (({}, 2, 0), ({"remat": True}, 3, max(0, sums - 1))):
        runs.clear()
        _, transfers = step(counted, how, mesh)
        assert sum(seen.counts[torch.ops.aten.mm.default] for seen in runs) == mesh.size * BLOCKS * products
        done = [transfers.get(name, 0) for name in names]
        plain = plain or done
        assert done == [BLOCKS * sums, plain[1] + BLOCKS * repeated]


@pytest.mark.parametrize("place", ["before the first transfer", "before the last", "in turn"])
def test_ranks_that_save_different_tensors_recompute_the_same_transfers(place: str) -> None:
    def uneven(p: Any, x: Tensor) -> Tensor:
        first = int(fs.axis_index("data")) == 0
        h = x @ p["up"]
        if place == "before the first transfer" and first:
            h = torch.tanh(h)
        h = fs.all_to_all(h, "data", split=1, concat=0)
        if (place == "before the last" and first) or (place == "in turn" and not first):
            h = torch.tanh(h)  # the only operation after the first transfer that saves a tensor
        h = fs.all_to_all(h, "data", split=0, concat=1)
        if place in ("after the last", "in turn") and first:
            h = torch.tanh(h)
        return x + h.repeat(1, 2) * 0.5

    mesh = fs.make_mesh(data=2, model=2)
    want, _ = step(uneven, {}, mesh)
    got, _ = step(uneven, {"remat": True}, mesh)
    assert_same(got, want, rtol=1e-6, atol=1e-7)


def test_saved_tensor_modified_in_place_is_an_error() -> None:
    def modified(p: Any, x: Tensor) -> Tensor:
        h = torch.exp(x @ p["up"])
        h.mul_(0.5)
        return x + (h @ p["down"]).sin() * h.mean()

    def modified_after_the_last_transfer(p: Any, x: Tensor) -> Tensor:
        h = torch.exp(fs.psum(x @ p["up"], "model"))  # [ROWS, D@model]
        y = x + (h @ p["down"]).sin()
        h.mul_(0.5)
        return y

    for body, model in ((modified, 1), (modified_after_the_last_transfer, 2)):
        for how, kind in (({}, RuntimeError), ({"remat": True}, ShardingError)):
            with pytest.raises(kind, match="modified by an inplace operation"):
                step(body, how, fs.make_mesh(data=2, model=model))


def test_error_of_a_block_is_raised_by_its_first_run() -> None:
    """A second run would start transfers again, with ranks that had no error and wait for others."""
    runs: list[int] = []

    def failing(p: Any, x: Tensor) -> Tensor:
        rank = int(fs.axis_index("data"))
        y = block(p, x)
        if rank == 1:
            runs.append(rank)
            raise RuntimeError("an error of the block")
        return y

    with pytest.raises(RuntimeError, match="an error of the block"):
        step(failing, {"remat": True}, fs.make_mesh(data=2, model=1))
    assert runs == [1]


def test_recomputation_runs_under_the_autocast_of_forward() -> None:
    mesh = fs.make_mesh(data=2, model=1)

    def cast(how: dict[str, Any]) -> Any:
        def scanned(p: Any, x: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                y = fs.scan(block, p, x, specs=SPECS, axis="data", **how)
            return fs.pmean(y.float().square().mean(), "data")

        params = [{k: torch.linspace(-1, 1, D * D).view(D, D) for k in s} for s in SPECS]
        f = lambda p, x: fs.value_and_grad(lambda p: scanned(p, x))(p)  # noqa: E731
        f = fs.shard_map(f, mesh=mesh, in_specs=(SPECS, P("data")), out_specs=(P(), SPECS), check="never")
        return fs.device_get(f(fs.device_put(params, SPECS, mesh), torch.linspace(-1, 1, ROWS * D).view(ROWS, D)))

    want, got = cast({}), cast({"remat": True})
    assert_same(got, want)


def test_discarded_tensors_are_freed_and_recomputed_ones_after_their_use() -> None:
    w = torch.randn(4, 4, requires_grad=True)
    storages: list[weakref.ref[Tensor]] = []

    def f(x: Tensor) -> Tensor:
        for _ in range(3):
            x = (x @ w).sin()
            storages.append(weakref.ref(x.untyped_storage()))
        return x.sum()

    x = torch.randn(2, 4)
    want = torch.autograd.grad(f(x), w)
    storages.clear()
    discarded = DiscardedTensors()
    with discarded.discard():
        y = f(x)
    assert [s() for s in storages] == [None] * 3
    storages.clear()
    discarded.recompute(lambda: f(x))
    assert len(storages) == 2  # it stopped at the saved tensor of the last sine
    assert torch.equal(torch.autograd.grad(y, w)[0], want[0])
    assert [s() for s in storages] == [None] * 2


def test_recomputation_that_differs_is_an_error() -> None:
    x = torch.ones(3, requires_grad=True)
    shape, times = [2], [2]

    def f() -> Tensor:
        y = x.expand(shape[0], 3) * 1.5
        for _ in range(times[0]):
            y = y.exp()
        return y.sum()

    differs = "a recomputed block differs from its forward pass: f32.2, 3. in forward, f32.3, 3. in backward"
    for change, message in ((shape, differs), (times, "it saved 1 tensors fewer than in forward")):
        discarded = DiscardedTensors()
        with discarded.discard():
            y = f()
        change[0] = 3 if change is shape else 1
        with pytest.raises(ShardingError, match=message):
            discarded.recompute(f)
        change[0] = 2
        del y


def test_scan_inside_torch_checkpoint_is_an_error() -> None:
    """Check the error: torch would recompute with freed weights."""
    mesh = fs.make_mesh(data=2, model=2)

    def f(p: Any, x: Tensor) -> Tensor:
        run = lambda x: fs.scan(block, p, x, specs=SPECS, axis="data")  # noqa: E731
        return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)

    params = [{k: torch.ones(D, D) for k in s} for s in SPECS]

    @fs.shard_map(mesh=mesh, in_specs=(SPECS, P("data")), out_specs=SPECS, check="never")
    def step(params: Any, x: Tensor) -> Any:
        return fs.grad(lambda p: fs.pmean(f(p, x).mean(), "data"))(params)

    with pytest.raises(ShardingError, match="scan: called where saved tensor hooks are set") as e:
        step(fs.device_put(params, SPECS, mesh), torch.ones(ROWS, D))
    assert "fix: use scan(..., remat=True) instead" in str(e.value)
