"""Leaves in host memory: they are copied to the device for their use, and the numbers are those of device leaves.

A CPU has no second memory. So the memory of each tensor is tested with fake tensors of another device on an abstract
mesh, where no operation takes tensors of two devices; values are tested on CPUs, where leaves are copied too.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fshard as fs
from fshard import P, ShardingError, on_host, optim
from fshard._core.ops import dim_sizes as sizes
from fshard._core.region import region
from fshard.models import gpt2
from fshard.optim import fused
from fshard.schedule import block_loop, buckets
from tests.lib.assertions import assert_same
from tests.lib.operations import Operations
from tests.lib.tiers import slow_unless

DEVICE = torch.device("meta")
CFG = gpt2.Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=4)
ROWS = 4

# (parameters, optimizer's state) in host memory; "h": the parameters of the blocks alone.
IN_HOST_MEMORY = [(True, False), (False, True), ("h", True)]


def layout_of(kind: str, **how: Any) -> gpt2.Layout:
    data = None if kind in ("one", "tensor") else "data"
    return gpt2.Layout(data, "model" if kind in ("tensor", "both") else None, batch=ROWS if data else None, **how)


def specs_of(kind: str) -> Any:
    specs = gpt2.specs(CFG, model="model" if kind in ("tensor", "both") else None)
    return fs.fully_shard(specs, gpt2.init(CFG), axis="data") if kind in ("full", "both") else specs


def placed_specs(opt: Any, specs: Any, params: bool | str, state: bool) -> Any:
    own = {name: on_host(spec) if params in (True, name) else spec for name, spec in specs.items()}
    return {"params": own, "opt": on_host(opt.specs(specs)) if state else opt.specs(specs)}


def train_step(mesh: fs.Mesh, kind: str, params: bool | str, state: bool, *, inspect: Any = None, **how: Any) -> Any:
    """Return (step, specs of its state, described state) of GPT-2 with clipping and AdamW; the state is donated."""
    options = {k: how.pop(k) for k in ("dtype", "reduce_dtype") if k in how}
    layout, specs, described = layout_of(kind, **options), specs_of(kind), gpt2.init(CFG)
    mask = fs.tree.map(lambda x: x.ndim > 1, described)
    rate = optim.warmup(optim.cosine(1e-2, 10), 3, start=1e-3)
    opt = optim.chain(optim.clip_by_global_norm(0.3, specs), optim.adamw(rate, weight_decay=0.1, mask=mask))
    placed = placed_specs(opt, specs, params, state)
    own = placed["params"]

    def loss_fn(p: Any, ids: Tensor) -> Tensor:
        return gpt2.loss(CFG, p, ids[:, :-1], ids[:, 1:], layout=layout, specs=own, **how)

    @fs.shard_map(mesh=mesh, in_specs=(placed, P(layout.data)), out_specs=(placed, P()), donate=0, check="never")
    def step(old: Any, ids: Tensor) -> Any:
        loss, grads = fs.value_and_grad(loss_fn)(old["params"], ids)
        p, s = opt.update(grads, old["opt"], old["params"])
        if inspect is not None:
            inspect(old, grads, p, s)
        return {"params": p, "opt": s}, loss

    return step, placed, {"params": described, "opt": opt.init(described)}


def train(mesh: fs.Mesh, kind: str, params: bool | str, state: bool, **how: Any) -> list[Any]:
    step, placed, described = train_step(mesh, kind, params, state, **how)
    train_state, history = fs.materialize(described, placed, mesh, key=fs.key(0)), []
    for i in range(2):
        ids = torch.randint(CFG.vocab_size, (ROWS, 9), generator=torch.Generator().manual_seed(i))
        train_state, loss = step(train_state, ids)
        history.append(fs.device_get((train_state, loss)))
    assert train_state["params"]["h"][0]["ln_1"]["w"].spec.memory == ("host" if params else "device")
    return history


# --- values ---


@pytest.mark.parametrize(("kind", "remat"), [("full", False), ("both", True)])
def test_training_with_host_leaves_has_the_numbers_of_device_leaves(kind: str, remat: bool) -> None:
    mesh = fs.make_mesh(data=2, model=2 if kind == "both" else 1)
    want = train(mesh, kind, False, False, remat=remat)
    assert not torch.equal(want[0][0]["params"]["wte"], want[-1][0]["params"]["wte"])
    for params, state in IN_HOST_MEMORY if kind == "full" else [(True, True)]:
        assert_same(train(mesh, kind, params, state, remat=remat), want)


def test_mixed_precision_with_host_leaves() -> None:
    mesh, how = fs.make_mesh(data=2, model=1), {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    assert_same(train(mesh, "full", True, True, **how), train(mesh, "full", False, False, **how))


# --- the memory of each tensor ---


def devices(x: Any) -> set[str]:
    return {leaf.device.type for leaf in fs.tree.leaves(x)}


CASES = [("both", "h", True, {}), ("one", True, False, {}),
         ("both", True, True, {"remat": True, "dtype": torch.bfloat16})]  # fmt: skip


@pytest.mark.parametrize(("kind", "params", "state", "how"), slow_unless(CASES[:1], CASES), ids=str)
def test_no_operation_takes_tensors_of_two_memories(kind: str, params: bool | str, state: bool, how: Any) -> None:
    mesh = fs.make_mesh(kind="abstract", device=DEVICE, data=1 if kind == "one" else 2, model=2)
    inspected = []

    def inspect(old: Any, grads: Any, new: Any, new_state: Any) -> None:
        expected = {True: {"cpu"}, False: {"meta"}, "h": {"cpu", "meta"}}
        assert devices(old["params"]) == devices(grads) == devices(new) == expected[params]
        assert fs.tree.map(lambda x: x.device, new) == fs.tree.map(lambda x: x.device, grads)
        assert devices(new_state[0]["norm"]) == {"meta"}
        assert devices([old["opt"][1]["m"], new_state[1]["m"], new_state[1]["v"]]) == expected[state]
        inspected.append(True)

    step, placed, described = train_step(mesh, kind, params, state, inspect=inspect, **how)
    train_state = fs.materialize(described, placed, mesh, key=fs.key(0))
    check = "always" if (kind, params) == ("both", "h") else "never"
    out, _ = step.on(mesh, check=check)(train_state, torch.zeros(ROWS, 9, dtype=torch.int64))
    assert fs.tree.map(lambda x: x.placement, out) == fs.tree.map(lambda x: x.placement, train_state)
    assert inspected == [True]


def test_unused_host_leaf_has_a_gradient_in_host_memory(monkeypatch: Any) -> None:
    def start(m: Any, xs: list[Tensor], start: Any = buckets.start_map) -> Any:
        assert devices(xs) == {"meta"}
        return start(m, xs)

    monkeypatch.setattr(buckets, "start_map", start)
    mesh = fs.make_mesh(kind="abstract", device=DEVICE, data=2)
    specs = [on_host({"used": P("data"), "not": P(None, "data")})] * 3
    p = fs.materialize([{"used": fs.init.ones((4, 4)), "not": fs.init.ones((2, 6))}] * 3, specs, mesh, key=fs.key(0))

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        return fs.psum(fs.scan(lambda p, x: torch.tanh(x @ p["used"]), p, x, specs=specs, axis="data").sum(), "data")

    f = fs.shard_map(fs.grad(loss_fn), mesh=mesh, in_specs=(specs, P("data")), out_specs=specs, check="never")
    assert repr(f(p, torch.ones(2, 4))[0]) == "{'used': f32<host>[4@data, 4], 'not': f32<host>[2, 6@data]}"


def test_user_code_copies_host_leaves_by_to_device() -> None:
    mesh = fs.make_mesh(kind="abstract", device=DEVICE, data=2)
    specs = on_host(P("data"))
    w = fs.materialize(fs.init.normal((4, 4)), specs, mesh, key=fs.key(0))

    def apply(copy: Any) -> Any:
        f = lambda w, x: fs.psum((fs.pvary(x, "data") @ copy(w)).sum(), "data")  # noqa: E731
        out = (P(), specs)
        return fs.shard_map(fs.value_and_grad(f), mesh=mesh, in_specs=(specs, P()), out_specs=out)(w, torch.ones(4, 2))

    with pytest.raises(RuntimeError, match="on the same device"):
        apply(lambda w: w)
    with pytest.raises(ShardingError, match=r"params is in host memory, its spec is P\('data'\)"):
        apply(lambda w: fs.unshard(w, P("data"), "data"))
    loss, grad = apply(lambda w: fs.to_device([w, 3])[0])
    assert repr((loss, grad)) == "(f32[], f32<host>[4@data, 4])"


class FakeCuda(TorchFunctionMode):
    """Report that some tensors, and results computed from them, are on CUDA; `to` copies between the two memories."""

    def __init__(self, *on_cuda: Tensor) -> None:
        super().__init__()
        self.storages = {x.data_ptr(): x.untyped_storage() for x in on_cuda}  # kept alive: no address is used twice
        self.copied: list[int] = []
        self.copies: list[Any] = []
        self.peak = 0  # elements of copies on CUDA at once
        self.kernels = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == Tensor.device.__get__:
            return torch.device("cuda:0" if self.is_on_cuda(args[0]) else "cpu")
        if func is Tensor.to and isinstance(args[1], torch.device):
            if args[2:] in ((), (args[0].dtype,)) and self.is_on_cuda(args[0]) == (args[1].type == "cuda"):
                return args[0]
            x = args[0].clone() if len(args) == 2 else args[0].to(args[2], copy=True)
            if args[1].type == "cuda":
                self.storages[x.data_ptr()] = x.untyped_storage()
                self.copied.append(x.numel())
                self.copies.append(weakref.ref(x))
                alive = [ref() for ref in self.copies]
                self.peak = max(self.peak, sum(x.numel() for x in alive if x is not None))
            return x
        tensors = [x for x in fs.tree.leaves([args, kwargs]) if isinstance(x, Tensor)]
        kinds = {self.is_on_cuda(x) for x in tensors if x.ndim}
        assert func is Tensor.copy_ or len(kinds) < 2, f"{func} mixes memories"
        out = func(
            *args, **{k: v for k, v in (kwargs or {}).items() if k != "device"}
        )  # the device argument of a number
        self.kernels += func.__name__.startswith("_fused")
        old = {x.data_ptr() for x in tensors}
        for x in fs.tree.leaves(out):
            if isinstance(x, Tensor) and kinds == {True} and x.data_ptr() not in old:
                self.storages[x.data_ptr()] = x.untyped_storage()
        return out

    def is_on_cuda(self, x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in self.storages


@pytest.mark.parametrize("donated", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd", "damped"])  # the last has no kernel
def test_host_moments_are_copied_to_the_device_a_group_at_a_time(name: str, donated: bool, monkeypatch: Any) -> None:
    damped = optim.sgd(1e-2, momentum=0.9, weight_decay=0.1, dampening=0.2 if name == "damped" else 0.0)
    opt = optim.adamw(1e-2) if name == "adamw" else damped
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(n, generator=draw) for n in (5, 40, 64, 64, 1)]
    grads = [torch.randn(p.shape, generator=draw) for p in params]
    _, state = opt.update(grads, opt.init(params), params)
    want = opt.update(grads, state, params)
    monkeypatch.setattr(fused, "_GROUP_BYTES", 250)
    monkeypatch.setattr("fshard.optim.formula.donation_test", lambda: lambda x: donated)
    before = copy.deepcopy((state, params))
    with FakeCuda(*params, *grads) as fake:
        new, own = opt.update(grads, state, params)
        assert {x.device.type for x in new} == {"cuda"}
        assert {x.device.type for k in ("m", "v") if k in own for x in own[k]} == {"cpu"}
    torch.testing.assert_close((new, own), want)
    if donated:
        assert all(a is b for k in ("m", "v") if k in own for a, b in zip(own[k], state[k], strict=True))
    else:
        torch.testing.assert_close((state, params), before, rtol=0, atol=0)
    kinds = 2 if name == "adamw" else 1
    assert fake.copied.count(64) == 2 * kinds
    assert fake.kernels == {"adamw": 5, "sgd": 4, "damped": 0}[name]  # groups of 250 bytes, or of one leaf
    assert fake.peak <= kinds * 64 + 64 + 1  # one group of moments, the last moment copied back, and the count


def test_scan_with_host_leaves_has_a_buffer_for_each_prefetched_block() -> None:
    """Compare the peak bytes with those of a loop over device leaves, which needs no buffers."""
    mesh, blocks, d = fs.make_mesh(data=1), 6, 64
    described = [fs.init.normal((d, d), std=0.1) for _ in range(blocks)]

    def peak(specs: Any, **how: Any) -> int:
        def loss_fn(p: Any, x: Tensor) -> Tensor:
            return fs.scan(lambda w, x: torch.tanh(x @ w), p, x, specs=specs, axis="data", **how).sum()

        def f(p: Any, x: Tensor) -> Any:
            with Operations() as seen:
                fs.value_and_grad(loss_fn)(p, x)
            return seen.peak

        p = fs.materialize(described, specs, mesh, key=fs.key(0))
        mapped = fs.shard_map(f, mesh=mesh, out_specs=P(), check="never")
        return mapped(p, torch.ones(2, d))

    block, base = d * d * 4, peak(P())
    grads = blocks * block
    for ahead in (0, 1, 2):
        used = peak(on_host(P()), prefetch=ahead) - grads  # gradients are in host memory on a real device
        assert (ahead + 1) * block <= used <= (ahead + 2) * block + (base - grads)


@pytest.mark.parametrize("prefetch", slow_unless([3], [0, 3]))
def test_scan_offloads_x_before_each_block(prefetch: int, monkeypatch: Any) -> None:
    """Check the numbers, and that x before each block is in host memory, except for the one in use and the next."""
    blocks, d, rows = 10, 8, 2048
    described = [fs.init.normal((d, d), std=0.3) for _ in range(blocks)]

    def grads(mesh: fs.Mesh, offload: bool, count: Operations | None = None, check: str = "never") -> Any:
        def loss_fn(p: Any, x: Any) -> Tensor:
            def block(w: Tensor, x: Any) -> Any:
                return {"x": torch.tanh(x["x"] @ w), "ids": x["ids"]}

            how = {"remat": True, "offload": offload, "prefetch": prefetch}
            out = fs.scan(block, p, {"x": x, "ids": fs.axis_index("data")}, specs=P("data"), axis="data", **how)
            return fs.psum(out["x"].sum(), "data")

        def f(p: Any, x: Tensor) -> Any:
            with count or contextlib.nullcontext():
                return fs.grad(loss_fn, argnums=(0, 1))(p, x)

        p = fs.materialize(described, P("data"), mesh, key=fs.key(0))
        out = P("data")
        mapped = fs.shard_map(f, mesh=mesh, in_specs=(P("data"), out), out_specs=out, check=check)
        return mapped(p, torch.linspace(-1, 1, 2 * rows * d).view(2 * rows, d))

    mesh = fs.make_mesh(data=2)
    want = fs.device_get(grads(mesh, False))
    assert_same(fs.device_get(grads(mesh, True)), want)
    assert_same(fs.device_get(grads(mesh, True, check="always")), want)

    def peak(mesh: fs.Mesh, offload: bool, device: torch.device | None = None) -> int:
        seen = Operations(device, fake=device is not None)
        grads(mesh, offload, seen)
        return seen.peak

    mesh = fs.make_mesh(data=1)
    base = peak(mesh, False)
    with monkeypatch.context() as m:
        m.setattr(block_loop, "start_copy_to_host", torch.clone)  # a copy in another memory
        # One x more than in `base`: with offload a block is recomputed as a whole, with its result.
        assert peak(mesh, True) < base + 2 * (2 * rows * d * 4)
    mesh = fs.make_mesh(kind="abstract", device=DEVICE, data=2)
    peaks = {offload: peak(mesh, offload, DEVICE) for offload in (False, True)}
    saved = (peaks[False] - peaks[True]) / (rows * d * 4)
    assert round(saved) == blocks - 4, peaks  # not the first (an argument), two on the device, the last (a result)
    with pytest.raises(ShardingError, match="fix: remat=True"):
        fs.scan(lambda p, x: x, [], 0, specs=None, axis=None, offload=True)


def test_dry_run_for_cuda_needs_no_cuda() -> None:
    mesh = fs.make_mesh(kind="abstract", device="cuda", data=2)
    assert mesh.device == torch.device("cuda:0")
    described = [fs.init.ones((4, 4))] * 3
    for specs in (P("data"), on_host(P("data")), on_host(P())):
        p = fs.materialize(described, specs, mesh, key=fs.key(0))
        f = lambda p, x, s=specs: fs.scan(lambda w, x: x @ w, p, x, specs=s, axis="data")  # noqa: E731
        for check in ("never", "always"):
            step = fs.shard_map(f, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"), check=check)
            assert repr(step(p, torch.ones(4, 4))) == "f32[4@data, 4]"


def test_sizes_are_exchanged_by_tensors_of_the_device(monkeypatch: Any) -> None:
    """Gather uneven host leaves other than arguments: CUDA cannot transfer tensors of host memory."""
    mesh, used_devices = fs.make_mesh(data=2), []

    class Torch:  # as the module of the exchange sees it
        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def tensor(self, *args: Any, device: torch.device, **options: Any) -> Tensor:
            used_devices.append(device)
            return torch.tensor(*args, device=device, **options)

    monkeypatch.setattr(sizes, "torch", Torch())
    specs = on_host(P("data"))
    p = fs.materialize([fs.init.ones((5, 3))], specs, mesh, key=fs.key(0))

    def f(p: Any, x: Tensor) -> Tensor:
        monkeypatch.setattr(region(), "device", torch.device("cpu", 0))
        return fs.scan(lambda w, x: x + w.sum(), [w.clone() for w in p], x, specs=specs, axis="data")

    fs.shard_map(f, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"), check="never")(p, torch.ones(4))
    assert used_devices == [torch.device("cpu", 0)] * 2


# --- specs and placement ---


def test_spec_has_a_memory() -> None:
    spec = P("data", None, memory="host")
    assert repr(spec) == "P('data', memory='host')"
    assert repr(on_host({"a": P(), "b": P(..., "m")})) == "{'a': P(memory='host'), 'b': P(..., 'm', memory='host')}"
    assert spec != P("data")
    assert spec == on_host(P("data")) == pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec)
    assert len({spec, P("data"), on_host(spec)}) == 2
    assert fs.fully_shard(on_host(P()), torch.empty(4, 8), axis="data") == P(None, "data", memory="host")
    with pytest.raises(ShardingError, match="'device' or 'host'"):
        P("data", memory="disk")
    with pytest.raises(ShardingError, match=r"specs\['b'\] must be a P, got 3"):
        on_host({"a": P(), "b": 3})


def test_arguments_and_results_are_in_the_memory_of_their_specs() -> None:
    mesh = fs.make_mesh(data=2)
    x = fs.device_put(torch.arange(4.0), on_host(P("data")), mesh)
    assert repr(x) == "f32<host>[4@data]"
    with pytest.raises(ShardingError, match=r"is placed as P\('data', memory='host'\), in_specs says P\('data'\)"):
        fs.shard_map(lambda x: x, mesh=mesh, in_specs=(P("data"),), out_specs=P("data"))(x)
    y = fs.shard_map(fs.to_device, mesh=mesh, out_specs=P("data"))(x)
    assert repr(y) == "f32[4@data]"
    assert torch.equal(fs.device_get(y), torch.arange(4.0))
    z = fs.reshard(y, on_host(P()))
    assert repr(z) == "f32<host>[4]"
    assert torch.equal(fs.device_get(fs.reshard(z, P("data"))), torch.arange(4.0))
    assert repr(fs.reshard(z, P())) == "f32[4]"  # to the other memory of the same rank
    assert fs.shard_map(lambda x: x * 2, mesh=mesh, out_specs=on_host(P()))(torch.ones(3)).spec.memory == "host"


def test_optimizer_state_is_in_the_memory_of_its_parameters_and_restored_to_that_of_its_specs(tmp_path: Any) -> None:
    mesh, specs = fs.make_mesh(data=2), {"w": on_host(P("data"))}
    params = fs.materialize({"w": fs.init.normal((6, 2))}, specs, mesh, key=fs.key(0))
    state = optim.adamw(1e-3).init(params)
    assert repr(state["m"]) == "{'w': f32<host>[6@data, 2]}"
    fs.checkpoint.save(tmp_path, params)
    back = fs.checkpoint.restore(tmp_path, params)
    assert repr(back) == "{'w': f32<host>[6@data, 2]}"
    back = fs.checkpoint.restore(tmp_path, params, specs={"w": P()})
    assert repr(back) == "{'w': f32[6, 2]}"
    assert torch.equal(fs.device_get(back["w"]), fs.device_get(params["w"]))


def test_show_distinguishes_the_memories() -> None:
    specs = {"a": P("data"), "b": on_host(P("data"))}
    shown = str(fs.show({"a": fs.init.ones(512), "b": fs.init.ones((512, 4))}, specs=specs, mesh={"data": 2}))
    assert shown.splitlines()[-1].endswith("1.0 KiB on each of 2 devices (data=2), and 4.0 KiB of its host's memory")
    assert "f32<host>[512@data, 4]" in shown
