"""The block loop: every schedule has the numbers of the plain loop, the fewest transfers, and a bounded memory."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard._core.region import region
from fshard.schedule.buckets import buffer_pool
from tests.lib.assertions import assert_same
from tests.lib.operations import Operations

D, F, BLOCKS, BATCH = 6, 10, 4, 12

SCHEDULES = [
    {"release": release, "remat": remat, "prefetch": prefetch}
    for release, remat, prefetch in itertools.product((True, False), (True, False), (0, 9))
]
FEW = [  # each pair of values of two options, once
    {"release": True, "remat": False, "prefetch": 1},
    {"release": True, "remat": True, "prefetch": 2},
    {"release": False, "remat": True, "prefetch": 0},
    {"release": False, "remat": False, "prefetch": 9},
    {"release": True, "remat": False, "prefetch": 0},
]
MESHES = [{"data": a, "model": b} for a, b in ((1, 2), (2, 2), (4, 1))]


def described(d: int = D, f: int = F, blocks: int = BLOCKS) -> Any:
    def block() -> Any:
        return {
            "norm": fs.init.normal((d,), std=0.5),
            "up": fs.init.normal((d, f), std=0.4),
            "down": fs.init.normal((f, d), std=0.4),
            "bias": fs.init.normal((d,), std=0.1),
        }

    return [block() for _ in range(blocks)]


TENSOR = {"norm": P(), "up": P(None, "model"), "down": P("model"), "bias": P()}


def block(p: Any, x: Tensor) -> Tensor:
    """Add to x a feed-forward of two matrices, split over model."""
    h = torch.tanh(fs.pvary(x * p["norm"], "model") @ p["up"])
    return x + fs.psum(h @ p["down"], "model") + p["bias"]


def dense(params: Any, x: Tensor) -> Tensor:
    for p in params:
        x = x + torch.tanh(x * p["norm"] @ p["up"]) @ p["down"] + p["bias"]
    return x


def specs_for(kind: str, tree: Any) -> Any:
    specs = [TENSOR] * len(tree)
    return specs if kind == "replicated" else fs.fully_shard(specs, tree, axis="data")


def step_of(loop: Any, mesh: fs.Mesh, specs: Any, check: str = "never") -> Any:
    """Return a step (params, x) -> (loss, gradients) of a loop (params, x) -> x."""

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return fs.pmean(loop(p, x).square().mean(), "data")

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs), check=check)
    def step(p: Any, x: Tensor) -> Any:
        return fs.value_and_grad(loss_fn)(p, x)

    return step


def plain(tree: Any, specs: Any) -> Any:
    def loop(params: Any, x: Tensor) -> Tensor:
        for p, s, d in zip(params, specs, tree, strict=True):
            x = block(fs.unshard(p, s, "data", shapes=d), x)
        return x

    return loop


def scanned(tree: Any, specs: Any, **how: Any) -> Any:
    return lambda params, x: fs.scan(block, params, x, specs=specs, axis="data", shapes=tree, **how)


def assert_close(got: Any, want: Any, tolerance: float) -> None:
    """Compare leaf by leaf, within a tolerance relative to each leaf's largest entry."""
    for (path, a), b in zip(fs.tree.leaves_with_path(got), fs.tree.leaves(want), strict=True):
        a, b = fs.device_get([a, b])
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()), msg=f"{path}")


def place(mesh: fs.Mesh, tree: Any, specs: Any) -> Any:
    return fs.materialize(tree, specs, mesh, key=fs.key(0))


def batch(n: int = BATCH) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        *(("sharded", axes) for axes in MESHES if axes["data"] != 2),
        ("replicated", {"data": 2, "model": 2}),
        pytest.param("sharded", {"data": 2, "model": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_schedule_has_the_numbers_of_the_plain_loop_and_of_one_device(axes: dict[str, int], kind: str) -> None:
    tree, mesh = described(), fs.make_mesh(**axes)
    specs = specs_for(kind, tree)
    params, x = place(mesh, tree, specs), batch()
    want = step_of(plain(tree, specs), mesh, specs)(params, x)
    whole = [{k: v.requires_grad_() for k, v in p.items()} for p in fs.device_get(params)]
    loss = dense(whole, x).square().mean()
    grads = torch.autograd.grad(loss, fs.tree.leaves(whole))
    assert_close(want, [loss.detach(), *grads], 2e-6)
    for how in SCHEDULES if (kind, axes) == ("sharded", {"data": 2, "model": 2}) else FEW:
        step = step_of(scanned(tree, specs, **how), mesh, specs)
        assert_same(step(params, x), want)
        if axes == {"data": 2, "model": 2}:
            assert_same(step(params, x), want)  # in the buffers of the first call


@pytest.mark.parametrize("how", FEW[1:4:2], ids=str)
def test_checked_call_has_the_numbers_of_the_plain_loop(how: dict[str, Any]) -> None:
    tree, mesh = described(), fs.make_mesh(data=2, model=2)
    specs = specs_for("sharded", tree)
    params, x = place(mesh, tree, specs), batch()
    want = step_of(plain(tree, specs), mesh, specs)(params, x)
    assert_same(step_of(scanned(tree, specs, **how), mesh, specs, "always")(params, x), want)


def test_hybrid_uneven_frozen_tied_and_half_precision_leaves_at_once() -> None:
    mesh = fs.make_mesh(replica=2, shard=2, model=2)
    axis, sizes = ("replica", "shard"), (7, 10)
    tree = described(*sizes, blocks=3)
    tree[1]["bias"] = tree[0]["bias"]  # tied
    for b in tree:
        b["gain"] = fs.init.normal((5, 7), std=0.1, dtype=torch.bfloat16)
        b["frozen"] = fs.init.normal((7, 3), std=0.5)
    split = {"norm": P("shard"), "up": P("shard", "model"), "down": P("model", "shard"), "bias": P()}
    specs = [{**split, "gain": P("shard"), "frozen": P("shard")}] * 3
    trained = [{k: v for k, v in s.items() if k != "frozen"} for s in specs]

    def body(p: Any, x: Tensor) -> Tensor:
        x = block(p, x)
        return x + torch.tanh(x @ p["frozen"]) @ p["frozen"].T + (x.bfloat16() @ p["gain"].T @ p["gain"]).float()

    def step_by(loop: Any) -> Any:
        @fs.shard_map(mesh=mesh, in_specs=(specs, P(axis)), out_specs=(P(), trained), check="never")
        def step(p: Any, x: Tensor) -> Any:
            def loss_fn(trained: Any) -> Tensor:
                both = [{**m, "frozen": b["frozen"]} for m, b in zip(trained, p, strict=True)]
                return fs.pmean(loop(both, x).square().mean(), axis)

            return fs.value_and_grad(loss_fn)([{k: v for k, v in b.items() if k != "frozen"} for b in p])

        return step

    def plain_loop(params: Any, x: Tensor) -> Tensor:
        for p, s, d in zip(params, specs, tree, strict=True):
            x = body(fs.unshard(p, s, axis, shapes=d), x)
        return x

    params, x = place(mesh, tree, specs), torch.randn(8, 7)
    want = step_by(plain_loop)(params, x)
    for how in FEW:
        step = step_by(lambda p, x, how=how: fs.scan(body, p, x, specs=specs, axis=axis, shapes=tree, **how))
        with fs.recording() as log:
            got = step(params, x)
        assert_same(got, want)
        sums = [t for t in log if t.op == "reduce_scatter"]
        assert len(sums) == 8 * 3 * 2  # one for each rank, block and dtype
        each = (7 + 7 * 5 + 5 * 7) * 4 + 5 * 7 * 2  # norm, half of up and down, gain; no frozen leaf
        assert sum(t.bytes for t in sums) == 8 * 3 * each


@pytest.mark.parametrize(("kind", "summed"), [("replicated", torch.float32), ("sharded", None)])
def test_mixed_precision_equals_the_plain_loop_and_approximates_one_device(kind: str, summed: Any) -> None:
    tree, axes = described(), [{"data": 2, "model": 1}, {"data": 2, "model": 2}]
    how = {"dtype": torch.bfloat16, "reduce_dtype": summed}
    specs, x = specs_for(kind, tree), batch()

    def unsharded(params: Any, x: Tensor) -> Tensor:
        for p, s, d in zip(params, specs, tree, strict=True):
            x = block(fs.unshard(p, s, "data", shapes=d, **how), x.bfloat16())
        return x.float()

    def rounded(params: Any, x: Tensor) -> Tensor:
        return dense(fs.cast(params, torch.bfloat16), x.bfloat16()).float()

    one = fs.device_get(place(fs.make_mesh(data=1), tree, P()))
    whole = [{k: v.requires_grad_() for k, v in p.items()} for p in one]
    for mesh, schedules in zip([fs.make_mesh(**a) for a in axes], (FEW[:1], FEW[1::2]), strict=True):
        params = place(mesh, tree, specs)
        want = step_of(unsharded, mesh, specs)(params, x)
        assert {g.dtype for g in fs.tree.leaves(want[1])} == {torch.float32}
        parts = x.chunk(mesh.axes["data"])  # parts of each rank, summed in float32
        ones = [torch.autograd.grad(rounded(whole, part).square().mean(), fs.tree.leaves(whole)) for part in parts]
        # Without a model axis ranks round as one device does; their sum is rounded once, to 2^-9, or not at all. With
        # one, each block adds two products that were rounded where one device rounds one: 8 roundings of 2^-9 in all.
        tolerance = 2 * 2**-9 if mesh.axes["model"] == 1 else 10 * 2**-9
        tolerance = 1e-6 if mesh.axes["model"] == 1 and summed else tolerance
        assert_close(want[1], [torch.stack(gs).mean(0) for gs in zip(*ones, strict=True)], tolerance)
        for schedule in schedules:
            looped = scanned(tree, specs, **schedule, **how)
            assert_same(step_of(lambda p, x, f=looped: f(p, x.bfloat16()).float(), mesh, specs)(params, x), want)
            if schedule is FEW[1]:
                checked = step_of(lambda p, x, f=looped: f(p, x.bfloat16()).float(), mesh, specs, "always")
                assert_same(checked(params, x), want)


def test_gradients_summed_in_float32_are_not_rounded() -> None:
    mesh, n = fs.make_mesh(data=2), 64
    x = torch.stack([torch.ones(n), torch.full((n,), 2.0**-9)]).view(2, n)  # bfloat16 cannot represent 1 + 2^-9
    body = lambda p, x: x + p["w"]  # noqa: E731

    def summed(dtype: Any, specs: P) -> Tensor:
        def loss(p: Any, x: Tensor) -> Tensor:
            y = fs.scan(body, [p], torch.zeros_like(x[0], dtype=torch.bfloat16), specs=[{"w": specs}], axis="data",
                        dtype=torch.bfloat16, reduce_dtype=dtype)  # fmt: skip
            return fs.psum((y.float() * x[0]).sum(), "data")

        f = fs.shard_map(fs.grad(loss), mesh=mesh, in_specs=({"w": specs}, P("data")), out_specs={"w": specs})
        return fs.device_get(f(fs.device_put({"w": torch.zeros(n)}, specs, mesh), x))["w"]

    for specs in (P(), P("data")):
        assert torch.equal(summed(torch.float32, specs), torch.full((n,), 1 + 2.0**-9))
        assert torch.equal(summed(None, specs), torch.ones(n))


def test_has_aux_and_each() -> None:
    tree, mesh = described(), fs.make_mesh(data=2, model=2)
    specs = specs_for("sharded", tree)

    def body(p: Any, x: Any, own: Any) -> Any:
        y = block(p, x["h"]) * own["scale"]
        return {"h": y, "n": x["n"] + 1}, {"norm": y.square().mean(), "n": x["n"], "key": own["key"]}

    def loss_of(loop: Any) -> Any:
        def loss_fn(p: Any, scales: Tensor, x: Tensor) -> Any:
            each = [{"scale": s, "key": fs.fold_in(fs.key(1), i)} for i, s in enumerate(scales.unbind())]
            last, outs = loop(p, {"h": x, "n": torch.zeros((), dtype=torch.int64)}, each)
            extra = sum(o["norm"] for o in outs[1:])  # without the first block
            loss = fs.pmean(last["h"].square().mean() + 0.1 * extra, "data")
            return loss, {"n": last["n"], "each": torch.stack([o["n"] for o in outs]), "keys": [o["key"] for o in outs]}

        return loss_fn

    def step_by(loop: Any) -> Any:
        @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P("data")), out_specs=(P(), P(), specs, P()), check="never")
        def step(p: Any, scales: Tensor, x: Tensor) -> Any:
            scales = fs.pvary(scales, "data")
            (loss, aux), (gp, gs) = fs.value_and_grad(loss_of(loop), (0, 1), has_aux=True)(p, scales, x)
            return loss, aux, gp, fs.psum(gs, "data")

        return step

    def plain_loop(p: Any, x: Any, each: Any) -> Any:
        outs = []
        for one, s, d, own in zip(p, specs, tree, each, strict=True):
            x, out = body(fs.unshard(one, s, "data", shapes=d), x, own)
            outs.append(out)
        return x, outs

    params, scales = place(mesh, tree, specs), torch.linspace(0.5, 1.5, BLOCKS)
    want = step_by(plain_loop)(params, scales, batch())
    for how in FEW:
        options = {"specs": specs, "axis": "data", "has_aux": True, "shapes": tree, **how}
        loop = lambda p, x, each, options=options: fs.scan(body, p, x, each=each, **options)  # noqa: E731
        assert_same(step_by(loop)(params, scales, batch()), want)


def test_stacked_parameters_equal_a_list() -> None:
    tree, mesh = described(), fs.make_mesh(data=2, model=2)
    specs = specs_for("sharded", tree)
    params, x = place(mesh, tree, specs), batch()
    want_loss, want = step_of(scanned(tree, specs), mesh, specs)(params, x)
    stack = lambda rows: {k: torch.stack([fs.device_get(r[k]) for r in rows]) for k in rows[0]}  # noqa: E731
    stacked_specs = {k: P(None, *s.entries) for k, s in specs[0].items()}
    loop = lambda p, x: fs.scan(block, p, x, specs=stacked_specs, axis="data")  # noqa: E731
    placed = fs.device_put(stack(params), stacked_specs, mesh)
    loss, grads = step_of(loop, mesh, stacked_specs, "always")(placed, x)
    assert_same((loss, grads), (want_loss, stack(want)))


def test_scan_inside_a_block_has_its_own_buffers() -> None:
    tree = [{"outer": o, "inner": described(blocks=3)} for o in described(blocks=2)]
    mesh = fs.make_mesh(data=2, model=1)
    specs = fs.fully_shard([{"outer": TENSOR, "inner": [TENSOR] * 3}] * 2, tree, axis="data")
    inner = specs[0]["inner"]

    def loop_by(kind: str, **how: Any) -> Any:
        def body(p: Any, x: Tensor, own: Any) -> Tensor:
            x = block(p, x)
            if kind == "scan":
                return fs.scan(block, own, x, specs=inner, axis="data", shapes=tree[0]["inner"], **how) * 1.1
            for q, s, d in zip(own, inner, tree[0]["inner"], strict=True):
                x = block(fs.unshard(q, s, "data", shapes=d), x)
            return x * 1.1

        def loop(params: Any, x: Tensor) -> Tensor:
            if kind == "scan":
                return fs.scan(body, [p["outer"] for p in params], x, specs=[s["outer"] for s in specs], axis="data",
                               shapes=[t["outer"] for t in tree], each=[p["inner"] for p in params], **how)  # fmt: skip
            for p, s, d in zip(params, specs, tree, strict=True):
                x = body(fs.unshard(p["outer"], s["outer"], "data", shapes=d["outer"]), x, p["inner"])
            return x

        return loop

    params, x = place(mesh, tree, specs), batch()
    want = step_of(loop_by("plain"), mesh, specs)(params, x)
    for how in FEW:
        step = step_of(loop_by("scan", **how), mesh, specs)
        assert_same(step(params, x), want)
        assert_same(step(params, x), want)


def test_two_scans_in_sequence_share_buffers_without_changing_numbers() -> None:
    tree, mesh = described(), fs.make_mesh(data=2, model=1)
    specs = specs_for("sharded", tree)
    twice = lambda loop: lambda p, x: loop(p, torch.sin(loop(p, x)))  # noqa: E731
    params, x = place(mesh, tree, specs), batch()
    want = step_of(twice(plain(tree, specs)), mesh, specs)(params, x)
    for how in FEW:
        assert_same(step_of(twice(scanned(tree, specs, **how)), mesh, specs)(params, x), want)


def test_scans_over_blocks_of_two_sizes_share_buffers_of_the_larger() -> None:
    """As an encoder and a decoder: forward small, large; backward large, small."""
    trees, mesh = [described(f=4), described(f=F + 3)], fs.make_mesh(data=2, model=1)
    specs = [specs_for("sharded", tree) for tree in trees]
    params, x = [place(mesh, *pair) for pair in zip(trees, specs, strict=True)], batch()
    largest = max(x.numel() for x in fs.tree.leaves(trees[1][0])) * 4

    def step_by(loop: Any) -> Any:
        def both(p: Any, x: Tensor) -> Tensor:
            for one, tree, own in zip(p, trees, specs, strict=True):
                x = loop(tree, own)(one, x)
            return x

        return step_of(both, mesh, specs)

    want = step_by(plain)(params, x)
    for how in FEW:
        sizes: list[list[int]] = []

        def sized(tree: Any, own: Any, how: Any = how, sizes: Any = sizes) -> Any:
            def loop(p: Any, x: Tensor) -> Tensor:
                out = scanned(tree, own, **how)(p, x)
                sizes.append([b.write.numel() for b in buffer_pool(region("test")).free])
                return out

            return loop

        step = step_by(sized)
        assert_same(step(params, x), want)
        assert_same(step(params, x), want)
        assert len(sizes[-1]) == len(sizes[0])  # in the second step; the buffers of the first are of both sizes
        assert min(sizes[-1]) >= largest


def test_kept_weights_of_blocks_of_other_sizes_take_the_bytes_of_each() -> None:
    tree, mesh = [described(f=f)[0] for f in (4, F + 3, 2)], fs.make_mesh(data=2, model=1)
    specs = fs.tree.map(lambda leaf: P("data"), tree)
    sizes: list[int] = []

    def loop(p: Any, x: Tensor) -> Tensor:
        out = scanned(tree, specs, release=False)(p, x)
        sizes[:] = [b.write.numel() for b in buffer_pool(region("test")).free]
        return out

    step, params, x = step_of(loop, mesh, specs), place(mesh, tree, specs), batch()
    want = step_of(plain(tree, specs), mesh, specs)(params, x)
    for _ in range(2):
        assert_same(step(params, x), want)
        needed = sorted((sum(w.numel() * 4 for w in fs.tree.leaves(one)) for one in tree), reverse=True)
        assert all(n <= got < n + 4 * 64 for n, got in zip(needed, sizes, strict=True))  # each leaf is aligned to 64


def test_weights_returned_by_a_block_are_copies() -> None:
    """Overwrite their buffer by later blocks and by the next call."""
    tree, mesh = described(D, D), fs.make_mesh(data=2, model=1)
    specs = specs_for("sharded", tree)
    body = lambda p, x: (p["up"], p["down"].T)  # noqa: E731
    params, x = place(mesh, tree, specs), batch()
    for how in FEW:
        options = {"specs": specs, "axis": "data", "shapes": tree, "has_aux": True, **how}
        run = fs.shard_map(lambda p, x, options=options: fs.pmean(fs.scan(body, p, x, **options), "data"), mesh=mesh,
                           in_specs=(specs, P("data")), out_specs=P(), check="never")  # fmt: skip
        first = run(params, x)
        run(fs.materialize(tree, specs, mesh, key=fs.key(9)), x)
        last, outs = first
        assert torch.equal(fs.device_get(last), fs.device_get(params[-1]["up"]))
        for out, p in zip(outs, params, strict=True):
            torch.testing.assert_close(fs.device_get(out), fs.device_get(p["down"]).T, rtol=1e-6, atol=0)


def test_step_leaves_no_reference_cycle() -> None:
    tree, mesh = described(), fs.make_mesh(data=2, model=1)
    specs = specs_for("sharded", tree)
    gc.freeze()  # a collection visits what this test makes, not the million objects of the tests before
    step, params, x = step_of(scanned(tree, specs), mesh, specs), place(mesh, tree, specs), batch()
    step(params, x)
    gc.collect()
    gc.disable()
    try:
        step(params, x)
        assert gc.collect() == 0
    finally:
        gc.enable()


def test_unused_leaves_have_zero_gradients() -> None:
    tree, mesh = described(), fs.make_mesh(data=2, model=1)
    specs = specs_for("sharded", tree)
    loop = lambda p, x: fs.scan(lambda p, x: x * p["norm"], p, x, specs=specs, axis="data", shapes=tree)  # noqa: E731
    _, grads = step_of(loop, mesh, specs)(place(mesh, tree, specs), batch())
    assert all(float(fs.device_get(g["up"]).abs().max()) == 0 for g in grads)
    assert all(float(fs.device_get(g["norm"]).abs().max()) > 0 for g in grads)


def test_gradients_that_share_a_tensor_are_each_summed_once() -> None:
    """Differentiate an addition of two biases, which gives both the same gradient tensor."""
    mesh, n = fs.make_mesh(data=2), 3
    tree = [{"a": fs.init.normal((6, 4)), "b": fs.init.normal((6, 4))} for _ in range(n)]
    body = lambda p, x: x + p["a"] + p["b"]  # noqa: E731
    loop = lambda p, x: fs.scan(body, p, x, specs=P(), axis="data")  # noqa: E731

    @fs.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check="never")
    def grads(p: Any, x: Tensor) -> Any:
        return fs.grad(lambda p: fs.psum((loop(p, x[0]) * x[0]).sum(), "data"))(p)

    x = torch.arange(48.0).view(2, 6, 4)
    result = grads(place(mesh, tree, P()), x)
    assert all(torch.equal(fs.device_get(g), x.sum(0)) for g in fs.tree.leaves(result))


def test_forward_without_gradients_and_without_blocks() -> None:
    tree, mesh = described(), fs.make_mesh(data=2, model=1)
    specs = specs_for("sharded", tree)
    params, x = place(mesh, tree, specs), batch()
    loop = scanned(tree, specs)
    run = fs.shard_map(loop, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"))
    whole = fs.device_get(params)
    torch.testing.assert_close(fs.device_get(run(params, x)), dense(whole, x))
    none = fs.shard_map(lambda x: fs.scan(block, [], x, specs=[], axis="data"), mesh=mesh, in_specs=(P("data"),),
                        out_specs=P("data"))  # fmt: skip
    assert torch.equal(fs.device_get(none(x)), x)


@pytest.mark.parametrize(("kind", "frozen"), [("sharded", False), ("replicated", False), ("sharded", True)])
def test_each_schedule_has_the_fewest_transfers(kind: str, frozen: bool) -> None:
    """Count a gather in forward, one in backward for each released block, and a sum of each trained leaf."""
    tree, mesh, n = described(8, 16), fs.make_mesh(data=2, model=1), 2
    specs = specs_for(kind, tree)
    size = sum(t.numel() for t in tree[0].values()) * 4
    params, x = place(mesh, tree, specs), torch.randn(4, 8)
    for how in SCHEDULES:
        loop = scanned(tree, specs, **how)
        f = lambda p, x, loop=loop: fs.pmean(loop(p, x).square().mean(), "data")  # noqa: E731
        g = (lambda p, x, f=f: fs.grad(f, 1)(p, x)) if frozen else (lambda p, x, f=f: fs.grad(f)(p, x))
        out = P("data") if frozen else specs
        step = fs.shard_map(g, mesh=mesh, in_specs=(specs, P("data")), out_specs=out, check="never")
        with fs.recording() as log:
            step(params, x)
        gathered = min(how["prefetch"] + 1, BLOCKS) if how["release"] else BLOCKS
        gathers = (2 * BLOCKS - gathered) if kind == "sharded" else 0
        got = {op: (sum(t.op == op for t in log), sum(t.bytes for t in log if t.op == op)) for op in
               ("all_gather", "reduce_scatter", "all_reduce")}  # fmt: skip
        sums = 0 if frozen else BLOCKS
        assert got["all_gather"] == (n * gathers, n * gathers * size // 2)
        whole = (n * sums, n * sums * size)
        assert got["reduce_scatter"] == (whole if kind == "sharded" else (0, 0))
        loss = (n, n * 4)  # the mean of the loss, forward; backward moves nothing
        assert got["all_reduce"] == (loss if kind == "sharded" else (whole[0] + loss[0], whole[1] + loss[1]))


def peak(blocks: int, rows: int, d: int, **how: Any) -> int:
    """Return the peak bytes of a rank of two in a step, without its parameters and its batch [rows, d].

    They may include the gradient shards of both ranks: the last thread at a barrier makes the results of both.
    """
    tree, mesh, most = described(d, d, blocks), fs.make_mesh(data=2, model=1), {}
    specs = specs_for("sharded", tree)

    def step(p: Any, x: Tensor) -> Any:
        with Operations() as seen:
            out = fs.grad(lambda p: fs.pmean(scanned(tree, specs, **how)(p, x).square().mean(), "data"))(p)
        most[int(fs.axis_index("data"))] = seen.peak
        return out

    f = fs.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs, check="never")
    f(place(mesh, tree, specs), torch.randn(2 * rows, d))
    return most[0]


def saved(blocks: int, rows: int, d: int) -> int:
    """Return the bytes that autograd saves for backward of the same blocks on one device, without their weights."""
    params = fs.device_get(place(fs.make_mesh(data=1), described(d, d, blocks), P()))
    leaves = [x.requires_grad_() for x in fs.tree.leaves(params)]
    weights = {x.untyped_storage().data_ptr() for x in leaves}
    alive: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in weights:
            alive[t.untyped_storage().data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        dense(params, torch.randn(rows, d)).square().mean()
    return sum(t.untyped_storage().nbytes() for t in alive.values())


def test_release_keeps_two_whole_blocks_and_the_activations() -> None:
    d, blocks, rows = 64, 6, 256
    whole = sum(t.numel() for t in described(d, d)[0].values()) * 4
    x, kept = 4 * d * rows, saved(blocks, rows, d) + 64  # x: one activation; 64: the scalars of the loss
    # The peak is at the end of forward: backward frees more than the gradients it makes.
    assert peak(blocks, rows, d) <= 2 * whole + kept + 3 * x
    assert peak(blocks, rows, d, prefetch=0) <= whole + kept + 3 * x
    assert peak(blocks, rows, d, release=False) >= blocks * whole + kept
    assert peak(blocks, rows, d, remat=True) <= 2 * whole + 2 * whole + kept // blocks + (blocks + 4) * x


@pytest.mark.slow
def test_memory_of_release_grows_with_blocks_only_by_gradient_shards() -> None:
    d, rows, more = 64, 2, 24
    whole = sum(t.numel() for t in described(d, d)[0].values()) * 4
    # The last thread at a barrier makes the results of both, which then count as its own.
    results_of_both = more * whole // 2 + 8 * whole
    shards, kept = more * whole // 2, saved(6 + more, rows, d) - saved(6, rows, d)
    assert peak(6 + more, rows, d) - peak(6, rows, d) <= shards + kept + results_of_both
    assert peak(6 + more, rows, d, release=False) - peak(6, rows, d, release=False) >= more * whole


def test_second_derivative_jvp_and_vmap_equal_the_plain_loop() -> None:
    tree, mesh = described(blocks=2), fs.make_mesh(data=2, model=1)
    specs = specs_for("sharded", tree)
    params, x = place(mesh, tree, specs), batch(8)

    def run(loop: Any, of: Any) -> Any:
        g = of(lambda p, x: fs.pmean(loop(p, x).square().mean(), "data"))
        f = fs.shard_map(g, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"), check="never")
        return f(params, x)

    def second(loss: Any) -> Any:
        return lambda p, x: fs.grad(lambda x: sum(g.square().sum() for g in fs.tree.leaves(fs.grad(loss)(p, x))))(x)

    def pushed(loss: Any) -> Any:
        return lambda p, x: torch.func.jvp(lambda x: fs.grad(loss, 1)(p, x), (x,), (torch.ones_like(x),))[1]

    def mapped(loss: Any) -> Any:
        return lambda p, x: torch.func.vmap(fs.grad(lambda x: loss(p, x)))(x.view(-1, 2, D)).view(-1, D)

    for of in (second, pushed, mapped):
        assert_same(run(scanned(tree, specs), of), run(plain(tree, specs), of))


def test_create_graph_and_a_second_backward_pass_are_errors() -> None:
    tree, mesh = described(blocks=2), fs.make_mesh(data=2, model=1)
    specs = specs_for("sharded", tree)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"), check="never")
    def twice(p: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            y = scanned(tree, specs)(p, x).square().sum()
            (g,) = torch.autograd.grad(y, x, create_graph=True)
            return torch.autograd.grad(g.sum(), x)[0]

    with pytest.raises(
        fs.ShardingError, match=r"scan: the gradient of a schedule cannot be differentiated by torch\.autograd"
    ):
        twice(place(mesh, tree, specs), batch())

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"), check="never")
    def again(p: Any, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        with torch.enable_grad():
            y = scanned(tree, specs)(p, x).square().sum()
            y.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            y.backward()  # type: ignore[no-untyped-call]
        return x

    with pytest.raises(fs.ShardingError, match="scan: a second backward pass through it"):
        again(place(mesh, tree, specs), batch())


def test_invalid_arguments_are_errors() -> None:
    tree, mesh = described(), fs.make_mesh(data=2, model=1)
    specs = specs_for("sharded", tree)
    params, x = place(mesh, tree, specs), batch()

    def refused(match: str, f: Any) -> None:
        with pytest.raises(fs.ShardingError, match=match):
            fs.shard_map(f, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"))(params, x)

    def captured(p: Any, x: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            return fs.scan(lambda p, x: x * w, p, x, specs=specs, axis="data").square().sum()

        return fs.grad(loss)(x[0])

    scan = lambda *args, **how: fs.scan(block, *args, **{"specs": specs, "axis": "data", **how})  # noqa: E731
    refused(r"scan\(<lambda>\): captures 'w', which is being differentiated", captured)
    refused("scan: prefetch=-1", lambda p, x: scan(p, x, prefetch=-1))
    refused("scan: each has 1 trees for 4 blocks", lambda p, x: scan(p, x, each=[0]))
    refused("scan: specs has 1 trees for 4 blocks", lambda p, x: scan(p, x, specs=[P()]))
    refused("scan: shapes has 3 trees for 4 blocks", lambda p, x: scan(p, x, shapes=tree[1:]))
    refused(
        "scan: has_aux=True, and the block returned a Tensor", lambda p, x: scan(p, x, has_aux=True, shapes=tree)[0]
    )
    refused(
        "scan: stacked parameters must all have the number of blocks as dim 0", lambda p, x: scan(p[0], x, specs=P())
    )
    refused(
        r"dim 0 of stacked leaves, is split\n  params\['w'\]  P\('data'\)\n  fix",
        lambda p, x: scan({"w": p[0]["up"], "b": x[0]}, x, specs={"w": P("data"), "b": P()}),
    )
    refused("scan: the mesh has no axis 'rows'", lambda p, x: scan(p, x, axis="rows"))
