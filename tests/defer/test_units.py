"""`Apply.unshard`: every schedule has the numbers of its definition and of one device, for any way to use units."""

from __future__ import annotations

import dataclasses
import functools
import gc
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P, ShardingError
from fshard.defer.constructor import defer
from fshard.defer.references import reachable
from tests.lib.assertions import assert_same, error_text
from tests.lib.operations import Operations
from tests.lib.tiers import slow_unless

D, F = 6, 10  # width of a block, and of its feed-forward
HOWS = [  # each pair of values of two options, once
    {},
    {"remat": True},
    {"release": False, "prefetch": 0},
    {"release": False, "remat": True, "prefetch": 3},
    {"prefetch": 2},
    {"remat": True, "prefetch": 0},
]


class Block(nn.Module):
    """x + f(x), in half the forms that a library's block has: keyword arguments, a tuple with a None in it."""

    def __init__(self, d: int = D, f: int = F) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, f), nn.Linear(f, d)

    def forward(self, x: Tensor, scale: Tensor | None = None, flag: bool = True) -> tuple[Tensor, None]:
        h = torch.tanh(self.up(self.norm(x)))
        return x + self.down(h if scale is None else h * scale), None


class Stack(nn.Module):
    """Embedding, blocks that are called in `order`, and a head tied to the embedding."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2), blocks: int = 3) -> None:
        super().__init__()
        self.embed, self.order = nn.Embedding(7, D), order
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.scale = nn.Parameter(torch.ones(F))
        self.head = nn.Linear(D, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i in self.order:
            x, _ = self.blocks[i](x, scale=self.scale)
        return self.head(x)


class Universal(Stack):
    """Blocks that share a weight and a module, which no unit has alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight
        self.blocks[2].down = self.blocks[0].down


class Nested(Stack):
    """Blocks with a block in them, called between uses of their own leaves; the second time without the outer one."""

    class Outer(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Tensor, scale: Tensor | None = None, flag: bool = True) -> tuple[Tensor, None]:
            h = self.up(x)
            y, _ = self.inner(x)
            return y + self.down(torch.tanh(h) * scale), None

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Nested.Outer()

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) + self.head(self.blocks[1].inner(self.embed(ids))[0])


class Sliced(Stack):
    """Parts of a weight, one of them transposed."""

    class Block(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None, flag: bool = True) -> tuple[Tensor, None]:
            first, second = self.up.weight.split([3, F - 3])
            h = torch.cat([x @ first.T, torch.sin(x[..., 1:] @ second[:, 1:].T)], -1)
            return x + self.down(torch.tanh(h)), None

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([type(self).Block() for _ in range(3)])


@dataclasses.dataclass
class Opaque:
    """An output that no pytree knows, and a cache that keeps tensors of every block."""

    hidden: Tensor
    seen: list[Tensor]


class Hidden(Stack):
    """Tensors that pass between blocks in opaque objects, under autocast, and a sum of what the blocks have seen."""

    class Block(Block):
        def forward(self, state: Opaque) -> Opaque:  # type: ignore[override]
            y, _ = super().forward(state.hidden)
            return Opaque(y, [*state.seen, self.down.weight.sum() * y.mean()])

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Hidden.Block() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        state = Opaque(self.embed(ids), [])
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                state = block(state)
        return self.head(state.hidden) * sum(state.seen)


class Captured(Stack):
    """A block's weight that is kept on the side and used by the module after the block has run."""

    class Block(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None, flag: bool = True) -> tuple[Tensor, None]:
            self.kept = self.up.weight.mul(2), self.down.weight
            return super().forward(x, scale)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Captured.Block() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        y = super().forward(ids)
        kept = [w for block in self.blocks for w in block.kept]
        return y * torch.stack([w.square().mean() for w in kept]).sum()


class Partial(Stack):
    """A block that uses some of its leaves, detaches one, and is followed by one that gets no gradient."""

    class Block(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None, flag: bool = True) -> tuple[Tensor, None]:
            return x + torch.tanh(x @ self.down.weight.detach()) @ self.up.weight.detach().sin(), None

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0] = Partial.Block()

    def forward(self, ids: Tensor) -> Tensor:
        y = super().forward(ids)
        with torch.no_grad():
            z, _ = self.blocks[2](self.embed(ids))
        return y + self.head(z)


class Again(Stack):
    """A block called again and again, with one tensor twice; it has state in attributes, which its parent sets too."""

    class Block(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []
            self.count, self.shift = 0, torch.zeros(())

        def forward(self, x: Tensor, other: Tensor | None = None, flag: bool = True) -> tuple[Tensor, None]:
            self.count += 1
            self.seen.append(x.mean())
            y, _ = super().forward(x * self.count + sum(self.seen) + self.shift)
            return (y if other is x else y + other.sin()), None

    def __init__(self) -> None:
        super().__init__((0, 0, 0, 0), 0)
        self.blocks.append(Again.Block())

    def forward(self, ids: Tensor) -> Tensor:
        x, block = self.embed(ids), self.blocks[0]
        block.count = 1
        block.seen.clear()
        for _ in self.order:
            block.shift = x.square().mean() * self.scale.mean()
            x, _ = block(x, x)
        return self.head(x)


# name -> (constructor, units)
MODULES: dict[str, tuple[Any, Any]] = {
    "in order": (Stack, "Block"),
    "called twice, skipped, backwards": (lambda: Stack((3, 2, 2, 0, 3), 4), "blocks.*"),
    "again and again": (Again, "Block"),
    "by size, of leaves": (Stack, F),
    "shared between units": (Universal, "Block"),
    "tied embedding and head, each a unit": (Stack, ("embed", "Block", "head")),
    "sliced": (Sliced, "Block"),
    "nested": (Nested, ("Block", "Outer", "blocks.*.inner.up")),
    "opaque": (Hidden, lambda name, m: type(m).__name__ == "Block"),
    "captured": (Captured, "Block"),
    "partial": (Partial, "Block"),
}
MESHES = [{"data": 1}, {"data": 2}, {"data": 4}]  # of 4, the last rank has none of a dim of 6 or 10 rows
EMPTY_PARTS = ("shared between units", "sliced", "nested")  # modules that run on the mesh of 4, and checked
IDS = torch.arange(12).view(4, 3) % 7


def step_of(f: Any, mesh: fs.Mesh, specs: Any, axis: Any = "data", check: str = "never") -> Any:
    """Return a step (params, ids) -> (loss, gradients) of a function (params, ids) -> output."""

    def loss(p: Any, ids: Tensor) -> Tensor:
        return fs.pmean(f(p, ids).float().square().mean(), axis)

    def step(p: Any, ids: Tensor) -> Any:
        return fs.value_and_grad(loss)(p, ids)

    return fs.shard_map(step, mesh=mesh, in_specs=(specs, P(axis)), out_specs=(P(), specs), check=check)


def plain(apply: Any, specs: Any, axis: Any = "data", **how: Any) -> Any:
    return lambda p, ids: apply(fs.unshard(p, specs, axis, shapes=apply.shapes, **how), {}, ids)


def by_unit(apply: Any, specs: Any, axis: Any = "data", **how: Any) -> Any:
    f = apply.unshard(specs, axis, **how)
    return lambda p, ids: f(p, {}, ids)


@functools.cache
def deferred(constructor: Any, units: Any) -> Any:
    return defer(constructor, units=units, reference=0)


def placed(constructor: Any, units: Any, mesh: fs.Mesh, axis: Any = "data", **how: Any) -> Any:
    """Return a module's function, specs that split each leaf, if unevenly, and its leaves."""
    apply, tree = deferred(constructor, units)
    specs = {name: P(axis, **how) for name in tree["params"]}
    return apply, specs, fs.materialize(tree["params"], specs, mesh, key=fs.key(0))


def dense(constructor: Any, batches: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of some batches and its gradients, of torch's own module."""
    torch.manual_seed(0)
    module = constructor()
    named = dict(module.named_parameters())
    losses, grads = [], []
    for ids in batches:
        losses.append(module(ids).square().mean())
        grads.append(torch.autograd.grad(losses[-1], list(named.values()), materialize_grads=True))
    means = [torch.stack(gs).mean(0) for gs in zip(*grads, strict=True)]
    return torch.stack(losses).mean().detach(), dict(zip(named, means, strict=True))


@pytest.mark.parametrize(
    "name",
    slow_unless([n for n in MODULES if n not in ("by size, of leaves", "in order", "partial", "nested")], MODULES),
)
def test_every_schedule_has_the_numbers_of_the_definition_and_of_one_device(name: str) -> None:
    constructor, units = MODULES[name]
    apply, tree = deferred(constructor, units)
    specs = {leaf: P("data") for leaf in tree["params"]}  # if unevenly
    for axes in MESHES if name == "in order" else MESHES[1:] if name in EMPTY_PARTS else MESHES[1:2]:
        mesh = fs.make_mesh(**axes)
        params = fs.materialize(tree["params"], specs, mesh, key=fs.key(0))
        want = step_of(plain(apply, specs), mesh, specs)(params, IDS)
        assert_same(want, dense(constructor, list(IDS.chunk(mesh.axes["data"]))), rtol=2e-5, atol=1e-7)
        # Sums of a unit that is called twice, or of two that share a leaf, are added after the ranks' sum, not before.
        added = ("again", "called twice", "nested", "partial", "shared", "tied")
        tolerance = {"rtol": 2e-6, "atol": 1e-7} if any(word in name for word in added) else {}
        own = 2 + list(MODULES).index(name) % 4  # one of the other options
        for how in {1: HOWS[1:2], 2: [*HOWS[:2], HOWS[own]], 4: HOWS[:1]}[axes["data"]]:
            step = step_of(by_unit(apply, specs, **how), mesh, specs)
            got = step(params, IDS)
            assert_same(got, want, f"{axes} {how}", **tolerance)
            if axes == {"data": 2} and how == HOWS[1]:
                assert_same(step(params, IDS), got)
        if axes == {"data": 2} and name in EMPTY_PARTS:
            checked = step_of(by_unit(apply, specs, remat=True), mesh, specs, check="always")
            assert_same(checked(params, IDS), want, "checked", **tolerance)


def test_hybrid_mixed_precision_host_memory_and_frozen_leaves() -> None:
    mesh, axis = fs.make_mesh(replica=2, shard=2), ("replica", "shard")
    apply, tree = deferred(Stack, "Block")
    specs = {name: P("shard") for name in tree["params"]}
    specs["blocks.0.norm.weight"] = P()  # data parallel
    specs["blocks.1.up.weight"] = P(None, "shard")
    specs["blocks.2.up.weight"] = P("replica", "shard")  # gathered along two dims: its unit is as in the definition
    specs = {name: fs.on_host(s) if name.startswith("blocks.1") else s for name, s in specs.items()}
    params = fs.materialize(tree["params"], specs, mesh, key=fs.key(0))
    frozen = {name for name in specs if "norm" in name or name.startswith("blocks.0.up")}
    trained = {name: s for name, s in specs.items() if name not in frozen}
    half, mixed = {"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    for precision, hows in (({}, HOWS[:4]), (half, HOWS[:1]), (mixed, HOWS[1:3])):

        def step_by(f: Any) -> Any:
            def step(p: Any, ids: Tensor) -> Any:
                rest = {name: p[name] for name in frozen}
                loss = lambda q: fs.pmean(f({**q, **rest}, ids).float().square().mean(), axis)  # noqa: E731
                return fs.value_and_grad(loss)({name: p[name] for name in trained})

            out = (P(), trained)
            return fs.shard_map(step, mesh=mesh, in_specs=(specs, P(axis)), out_specs=out, check="never")

        want = step_by(plain(apply, specs, axis, **precision))(params, IDS)
        assert {g.dtype for g in want[1].values()} == {torch.float32}
        for how in hows:
            with fs.recording() as log:
                got = step_by(by_unit(apply, specs, axis, **precision, **how))(params, IDS)
            assert_same(got, want, f"{precision} {how}")
            scattered = sum(t.bytes for t in log if t.op == "reduce_scatter")
            sizes = [tree["params"][name].numel() for name in trained]
            itemsize = 2 if precision == half else 4
            twice = 2 * tree["params"]["blocks.2.up.weight"].numel()  # once for each of two dims, the second of half
            assert 4 * sum(sizes) * itemsize <= scattered <= 4 * (sum(sizes) + twice) * itemsize


class Norms(nn.Module):
    """Blocks with a batch norm, and a buffer that is read, then updated."""

    class Norm(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    class Block(nn.Module):
        def __init__(self, kind: Any) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(D, D), kind(D, momentum=0.3)
            self.register_buffer("scale", torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            scale = self.scale.clone()
            self.scale.mul_(1.5)
            return x + torch.tanh(self.norm(self.linear(x))) * scale

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Norms.Block(nn.BatchNorm1d), Norms.Block(Norms.Norm))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@pytest.mark.parametrize("how", HOWS[:2], ids=str)
def test_buffers_that_forward_updates_are_updated_once(how: dict[str, Any]) -> None:
    mesh, x = fs.make_mesh(data=2), torch.randn(8, D, generator=torch.Generator().manual_seed(0))
    apply, tree = deferred(Norms, "Block")
    apply = apply.batch_norm_over("data")
    assert list(apply.units) == ["blocks.0", "blocks.1"]  # kept by batch_norm_over, eval and train
    specs = {name: P("data") for name in tree["params"]}
    params = fs.materialize(tree["params"], specs, mesh, key=fs.key(0))
    buffers = fs.materialize(tree["buffers"], P(), mesh, key=fs.key(0))

    def step_by(f: Any) -> Any:
        @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P("data")), out_specs=(P(), P(), specs), check="never")
        def step(p: Any, b: Any, x: Tensor) -> Any:
            def loss(p: Any) -> Any:
                y, new = f(p, b, x)
                return fs.pmean(y.square().mean(), "data"), new

            (loss_, new), grads = fs.value_and_grad(loss, has_aux=True)(p)
            return loss_, new, grads

        return step(params, buffers, x)

    sharded = apply.unshard(specs, "data", **how)
    want = step_by(lambda p, b, x: apply.with_buffers(fs.unshard(p, specs, "data"), fs.unshard(b, P(), "data"), x))
    assert_same(step_by(sharded.with_buffers), want)
    assert "forward changed buffers" in error_text(step_by, lambda p, b, x: (sharded(p, b, x), b))


def test_leaf_that_is_shared_with_a_unit_that_has_no_schedule() -> None:
    mesh, axis = fs.make_mesh(replica=2, shard=2), ("replica", "shard")
    apply, specs, params = placed(Universal, "Block", mesh, "shard")
    specs["blocks.1.down.weight"] = P("replica", "shard")  # along two dims: unit blocks.1 is as in the definition
    params = fs.reshard(params, specs)
    want = step_of(plain(apply, specs, axis), mesh, specs, axis)(params, IDS)
    got = step_of(by_unit(apply, specs, axis), mesh, specs, axis)(params, IDS)
    assert_same(got, want, rtol=2e-6, atol=1e-7)  # the leaf's two gradients are added after their sums over the ranks


def test_without_gradients_and_in_evaluation_each_unit_is_gathered_once() -> None:
    mesh = fs.make_mesh(data=2)
    apply, specs, params = placed(Stack, "Block", mesh)
    torch.manual_seed(0)
    want = Stack()(IDS).detach()
    for how in HOWS[:4]:
        f = by_unit(apply.eval(), specs, **how)
        run = fs.shard_map(f, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"), check="never")
        with fs.recording() as log:
            got = run(params, IDS)
        torch.testing.assert_close(fs.device_get(got), want)
        assert [t.op for t in log] == ["all_gather"] * 2 * (1 + 3)
        with torch.no_grad():
            assert_same(run(params, IDS), got)


def test_transfers_are_a_gather_in_forward_and_in_backward_and_a_sum() -> None:
    mesh = fs.make_mesh(data=2)

    built = functools.cache(lambda name: placed(*MODULES[name], mesh))

    def count(name: str, how: dict[str, Any], frozen: bool = False) -> dict[str, int]:
        apply, specs, params = built(name)
        step = step_of(by_unit(apply, specs, **how), mesh, specs)
        if frozen:
            loss = lambda p, ids: by_unit(apply, specs, **how)(p, ids).square().mean()  # noqa: E731
            only = lambda p, ids: fs.grad(lambda w: fs.pmean(loss({**p, "scale": w}, ids), "data"))(p["scale"])  # noqa: E731
            step = fs.shard_map(only, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs["scale"], check="never")
        with fs.recording() as log:
            step(params, IDS)
        return {op: sum(t.op == op for t in log) // 2 for op in ("all_gather", "reduce_scatter")}

    blocks, root = 3, 1
    for how in HOWS[:4]:
        again = blocks if how.get("release", True) else 0
        assert count("in order", how) == {"all_gather": root + blocks + again, "reduce_scatter": root + blocks}
        if "remat" not in how:
            assert count("in order", how, True) == {"all_gather": root + blocks + again, "reduce_scatter": root}
    # The order 3 2 2 0 3. Backward, 2 is gathered once for both calls if it is gathered ahead for the first. In forward
    # what is defined next is a guess: 0 at the start, 3 after each 2, 1 after 0.
    twice = "called twice, skipped, backwards"
    assert count(twice, {"prefetch": 0}) == {"all_gather": root + 5 + 5, "reduce_scatter": root + 5}
    assert count(twice, {"prefetch": 1}) == {"all_gather": root + 5 + 3 + 4, "reduce_scatter": root + 5}
    # One unit that is called four times, as in ALBERT.
    again = {"all_gather": root + 2 + 1, "reduce_scatter": root + 4}
    assert count("again and again", {}) == count("again and again", {"remat": True}) == again


@functools.cache
def peak(blocks: int, rows: int, d: int, **how: Any) -> int:
    """Return the peak bytes of a rank of two in a step, without its parameters."""

    class Stacked(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                x, _ = block(x)
            return x

    mesh, most = fs.make_mesh(data=2), {}
    apply, tree = defer(lambda: Stacked(*[Block(d, d) for _ in range(blocks)]), units="Block")
    specs = {name: P("data") for name in tree["params"]}
    f = apply.unshard(specs, "data", **how)

    def step(p: Any, x: Tensor) -> Any:
        with Operations() as seen:
            out = fs.grad(lambda p: fs.pmean(f(p, {}, x).square().mean(), "data"))(p)
        most[int(fs.axis_index("data"))] = seen.peak
        return out

    run = fs.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs, check="never")
    run(fs.materialize(tree["params"], specs, mesh, key=fs.key(0)), torch.randn(2 * rows, d))
    return most[0]


def test_memory_is_two_units_and_the_activations() -> None:
    d, blocks, more = 64, 3, 2
    whole = 4 * sum(x.numel() for x in Block(d, d).parameters())

    # Few rows: weights. Two gathered units, the gradient of one and of the one before it, whose sum is pending, with a
    # copy of it in each rank's half of the sum, and the shards of all gradients, of both ranks: the last thread at a
    # barrier makes the results of both.
    few = 2 * whole + 2 * (whole + whole) + blocks * whole + 20_000
    assert peak(blocks, 2, d) <= few
    kept = more * 5 * 4 * 2 * d  # activations, as below
    assert peak(blocks + more, 2, d) - peak(blocks, 2, d) <= more * whole + kept  # gradients of both ranks
    assert peak(blocks + more, 2, d, release=False) - peak(blocks, 2, d, release=False) >= more * whole
    # Many rows: activations. A block saves x, the results of its norm, of two products and of tanh: 5 x; remat keeps x.
    x = 4 * 512 * d
    assert peak(blocks, 512, d) <= 5 * x * blocks + few + 4 * x
    assert peak(blocks, 512, d, remat=True) <= x * blocks + few + 9 * x


def test_step_leaves_no_reference_cycle_and_no_gathered_leaf() -> None:
    gc.freeze()  # the objects of other tests are in no collection
    mesh = fs.make_mesh(data=2)
    apply, specs, params = placed(Stack, "Block", mesh)
    for how in HOWS[:2]:
        step = step_of(by_unit(apply, specs, **how), mesh, specs)
        step(params, IDS)
        gc.collect()
        gc.disable()
        try:
            step(params, IDS)
            assert gc.collect() == 0, how
        finally:
            gc.enable()


def test_unit_is_restored_without_the_other_units() -> None:
    module = deferred(Stack, "Block")[0]._take_copy().module
    found = {id(x) for x in reachable(module.blocks[0])}
    assert id(vars(module.blocks[0])) in found
    assert id(vars(module.blocks[1])) not in found


def test_module_of_the_user_is_not_changed() -> None:
    mesh, modules = fs.make_mesh(data=2), []

    def constructor() -> nn.Module:
        modules.append(Stack())
        return modules[-1]

    apply, tree = defer(constructor, units="Block")
    specs = {name: P("data") for name in tree["params"]}
    params = fs.materialize(tree["params"], specs, mesh, key=fs.key(0))
    before = list(modules[0].parameters())
    step_of(by_unit(apply, specs, remat=True), mesh, specs)(params, IDS)
    for m in modules[0].modules():
        assert "forward" not in vars(m)
        assert not any(hooks for name, hooks in vars(m).items() if name.endswith("_hooks"))
    assert all(x is y for x, y in zip(modules[0].parameters(), before, strict=True))


def test_plain_call_of_an_apply_with_units_takes_whole_leaves() -> None:
    torch.manual_seed(0)
    module = Stack()
    apply, _ = deferred(Stack, "Block")
    named = dict(module.named_parameters())
    assert torch.equal(apply({k: x.detach() for k, x in named.items()}, {}, IDS), module(IDS))


def test_second_derivative_vmap_and_functional_calls_are_those_of_the_definition() -> None:
    mesh = fs.make_mesh(data=2)
    apply, specs, params = placed(Stack, "Block", mesh)

    def run(f: Any, of: Any) -> Any:
        body = of(lambda p, ids: fs.pmean(f(p, ids).square().mean(), "data"))
        return fs.shard_map(body, mesh=mesh, in_specs=(specs, P("data")), out_specs=specs, check="never")(params, IDS)

    def second(loss: Any) -> Any:
        return lambda p, ids: fs.grad(lambda q: sum(g.square().sum() for g in fs.grad(loss)(q, ids).values()))(p)

    def mapped(loss: Any) -> Any:
        def mean(p: Any, ids: Tensor) -> Any:
            grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(p, ids.unsqueeze(1))
            return {name: g.mean(0) for name, g in grads.items()}

        return mean

    for of in (second, mapped):
        assert_same(run(by_unit(apply, specs, remat=True), of), run(plain(apply, specs), of))


@pytest.mark.slow
def test_compiled_program_is_the_definition() -> None:
    mesh = fs.make_mesh(data=1)
    apply, specs, params = placed(Stack, "Block", mesh)
    loss = lambda p, ids: fs.pmean(apply.unshard(specs, "data")(p, {}, ids).square().mean(), "data")  # noqa: E731
    step = fs.shard_map(fs.value_and_grad(loss), mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs),
                        compile=True)  # fmt: skip
    want = step_of(plain(apply, specs), mesh, specs)(params, IDS)
    assert_same(step(params, IDS), want, rtol=1e-5, atol=1e-6)  # the compiler reorders sums


def test_check_and_verify_take_units() -> None:
    apply, tree = deferred(Stack, "Block")
    specs = {name: P("data") for name in tree["params"]}
    for how in HOWS[:2]:
        step = step_of(by_unit(apply, specs, **how), fs.make_mesh(data=2), specs)
        fs.check(step.on(fs.make_mesh(kind="abstract", data=64)), tree["params"], torch.zeros(64, 3, dtype=torch.int64))
    mesh = fs.make_mesh(data=2)
    step = step_of(by_unit(apply, specs, remat=True), mesh, specs, check="first")
    fs.verify(step, fs.materialize(tree["params"], specs, mesh, key=fs.key(0)), IDS)


def test_missing_pvary_inside_a_unit_is_found() -> None:
    """Pass leaves that are not unsharded over one of the axes, as in a plain call."""
    mesh = fs.make_mesh(data=2, other=2)
    apply, specs, params = placed(Stack, "Block", mesh)
    step = step_of(by_unit(apply, specs), mesh, specs, ("data", "other"), check="always")
    text = error_text(step, params, IDS)
    assert "invariant over 'other'" in text, text


# --- the choice of units ----------------------------------------------------------------------------------------------


def test_choice_of_units() -> None:
    units = lambda how, module=Stack: list(defer(module, units=how)[0].units)  # noqa: E731
    assert units(None) == []
    assert units("Block") == units(["Block"]) == units("blocks.*") == [f"blocks.{i}" for i in range(3)]
    assert units("**.up") == units(lambda name, _: name.endswith("up")) == [f"blocks.{i}.up" for i in range(3)]
    assert units(("blocks.2", "Embedding")) == ["embed", "blocks.2"]
    norm, up, down = 2 * D, F * D + F, D * F + D
    # What is left of a block is large enough, too.
    assert units(up) == [name for i in range(3) for name in (f"blocks.{i}", f"blocks.{i}.up")]
    assert units(norm + down + 1) == [f"blocks.{i}" for i in range(3)]
    assert units(norm + up + down) == [f"blocks.{i}" for i in range(3)]
    assert units(3 * (norm + up + down)) == []  # `blocks` has no forward, and all others are the module's own
    # A leaf that two units share is in both, unless a place of it is in none; or in the unit around both.
    apply, _ = defer(Universal, units="Block")
    assert all("blocks.0.up.weight" in apply.units[name] for name in ("blocks.0", "blocks.1"))
    assert defer(Universal, units="blocks.1")[0].units["blocks.1"][-3:] == tuple(
        f"blocks.1.{name}" for name in ("up.bias", "down.weight", "down.bias")
    )
    assert defer(Stack, units="head")[0].units == {"head": ()}
    around = defer(lambda: nn.Sequential(Stack()), units=("0", "**.head", "**.embed"))[0].units
    assert around["0.head"] == ()
    assert "0.embed.weight" in around["0"]
    apply, _ = defer(Nested, units=("Block", "Outer"))
    assert len(apply.units["blocks.1"]) == len(apply.units["blocks.1.inner"]) == 6


def test_invalid_units_are_errors() -> None:
    assert error_text(defer, Stack, units="T5Block") == (
        "defer: units='T5Block' matches no submodule\n"
        "  classes  Block (3), Embedding (1), LayerNorm (3), Linear (7), ModuleList (1)\n"
        "  fix: the name of a class, or a glob of paths: 'encoder.block.*'"
    )
    assert "defer: units=['Block', 'h.*']" not in error_text(defer, Stack, units=["Block", "h.*"])
    assert "units='h.*' matches no submodule" in error_text(defer, Stack, units=["Block", "h.*"])
    assert "chooses none of 15 submodules" in error_text(defer, Stack, units=lambda name, m: False)
    assert error_text(defer, Stack, units="blocks") == (
        "defer: unit 'blocks' is a ModuleList, which has no forward of its own\n"
        "  its leaves are used in its children's\n"
        "  fix: units='blocks.*'"
    )
    assert "defer: units must be" in error_text(defer, Stack, units=0)


def test_invalid_calls_are_errors() -> None:
    mesh = fs.make_mesh(data=2)
    apply, specs, params = placed(Stack, "Block", mesh)
    assert "prefetch=-1" in error_text(apply.unshard, specs, "data", prefetch=-1)
    assert "there are none" in error_text(defer(Stack)[0].unshard, specs, "data", remat=True)
    assert "called outside shard_map" in error_text(apply.unshard(specs, "data"), {}, {}, IDS)

    def run(f: Any, specs: Any = specs, params: Any = params) -> str:
        body = fs.shard_map(f, mesh=mesh, in_specs=(specs, P("data")), out_specs=P(), check="never")
        return error_text(body, params, IDS)

    f = apply.unshard(specs, "data")
    wrong = {**apply.shapes, "blocks.0.up.weight": torch.empty(F + 5, D, device="meta")}
    text = run(lambda p, ids: apply.unshard(specs, "data", shapes=wrong)(p, {}, ids))
    assert "has the wrong size for a dim of global size 15" in text
    assert "shapes must be a dict of the 20 params" in error_text(apply.unshard, specs, "data", shapes={})
    assert "params['scale'] is missing" in run(lambda p, ids: f({k: x for k, x in p.items() if k != "scale"}, {}, ids))
    assert "the mesh has no axis 'rows'" in run(lambda p, ids: apply.unshard(specs, "rows")(p, {}, ids))

    def twice(p: Any, ids: Tensor) -> Any:
        with torch.enable_grad():
            x = {name: w.detach().requires_grad_() for name, w in p.items()}
            y = f(x, {}, ids).square().sum()
            g = torch.autograd.grad(y, x["blocks.0.up.weight"], create_graph=True)[0]
            return torch.autograd.grad(g.sum(), x["blocks.0.up.weight"])

    assert "cannot be differentiated by torch.autograd" in run(twice)
    saved = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)

    def hooked(p: Any, ids: Tensor) -> Any:
        with saved:
            return f(p, {}, ids)

    assert "called where saved tensor hooks are set" in run(hooked)


def test_leaf_that_is_used_outside_of_its_unit_is_an_error_that_names_both() -> None:
    class Reads(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            up = self.blocks[1].up
            assert (up.weight.dtype, up.weight.shape, up.weight.device.type) == (torch.float32, (F, D), "cpu")
            assert (up.weight.ndim, len(up.bias)) == (2, F)
            assert "bias" in repr(up.bias)
            return super().forward(ids) + up.weight.mean()

    mesh = fs.make_mesh(data=2)
    apply, specs, params = placed(Reads, "Block", mesh)
    text = error_text(step_of(by_unit(apply, specs), mesh, specs), params, IDS)
    assert text.startswith("'blocks.1.up.weight' of unit 'blocks.1' is used outside of the unit's forward, by mean\n"
                           "  it is gathered only while the unit runs\n"
                           "  fix: leave 'blocks.1' out of units=, or choose the module that uses ")  # fmt: skip


class Hooked(nn.Sequential):
    """A weight that a hook computes before forward, and hooks that read leaves before and after it."""

    def __init__(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(nn.utils.spectral_norm(nn.Linear(D, D)), nn.utils.weight_norm(nn.Linear(D, D)), Tower())
        self[2].register_forward_pre_hook(lambda m, args: (args[0] * m.a.weight.sum(),))
        self[2].register_forward_hook(lambda m, args, out: out + m.b.bias)


class Tower(nn.Module):
    """Two layers, called in the form that `how` names."""

    def __init__(self, how: str = "forward") -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(D, D), nn.Linear(D, D), how

    def layers(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).sin()

    def forward(self, x: Tensor) -> Tensor:
        match self.how:
            case "never called":
                return self.b(torch.tanh(torch.nn.functional.linear(x, self.a.weight, self.a.bias)))
            case "read by its parent":
                return self.layers(x) + self.a.weight.sum()
            case "forces" | "forces alone":
                with torch.enable_grad():
                    x = x.detach().requires_grad_()
                    y = self.layers(x)
                    force = torch.autograd.grad(y.sum(), x, create_graph=True)[0]
                    return force if self.how == "forces alone" else y + force
            case "vmap(grad)":
                return torch.func.vmap(torch.func.grad(lambda x: self.layers(x).sum()))(x)
            case "jacrev":
                return torch.func.vmap(torch.func.jacrev(self.layers))(x).sum(-1)
            case "jvp":
                return torch.func.jvp(self.layers, (x,), (torch.ones_like(x),))[1]
            case "of a leaf":
                return x @ torch.autograd.grad(self.layers(x).sum(), self.a.weight, create_graph=True)[0]
        return self.layers(x)


ROWS = torch.linspace(-1, 1, 4 * D).view(4, D)


def values_by_units(constructor: Any, units: Any, check: Any = "never", calls: int = 2, **how: Any) -> Any:
    """Return the loss and gradients by units of the last of some calls of one step, and those of the definition."""
    mesh = fs.make_mesh(data=2)
    apply, tree = defer(constructor, units=units)
    specs = {name: P("data") for name in tree["params"]}
    params = fs.materialize(tree["params"], specs, mesh, key=fs.key(0))
    buffers = fs.materialize(tree["buffers"], P(), mesh, key=fs.key(0))

    def step_by(f: Any) -> Any:
        def step(p: Any, b: Any, x: Tensor) -> Any:
            return fs.value_and_grad(lambda p: fs.pmean(f(p, b, x)[0].square().mean(), "data"))(p)

        return fs.shard_map(step, mesh=mesh, in_specs=(specs, P(), P("data")), out_specs=(P(), specs), check=check)

    plain = lambda p, b, x: apply.with_buffers(fs.unshard(p, specs, "data"), fs.unshard(b, P(), "data"), x)  # noqa: E731
    step = step_by(apply.unshard(specs, "data", **how).with_buffers)
    return [step(params, buffers, ROWS) for _ in range(calls)][-1], step_by(plain)(params, buffers, ROWS)


@pytest.mark.parametrize("remat", [False, True])
def test_units_by_number_that_another_module_reads_or_that_are_never_called_are_gathered_once(remat: bool) -> None:
    for how in ("never called", "read by its parent"):
        for calls in (1, 2):  # the second leaves the unit out
            assert_same(*values_by_units(lambda how=how: Tower(how), 1, calls=calls, remat=remat), rtol=2e-6, atol=1e-7)
        if remat:
            continue
        assert_same(*values_by_units(lambda how=how: Tower(how), 1, "always"), rtol=2e-6, atol=1e-7)
        text = error_text(values_by_units, lambda how=how: Tower(how), "*")
        assert text.startswith("'a.weight' of unit 'a' is used outside of the unit's forward")
    assert "by grad" in error_text(values_by_units, lambda: Tower("of a leaf"), 1)


@pytest.mark.parametrize("remat", [False, True])
def test_hooks_of_a_unit_run_with_its_leaves(remat: bool) -> None:
    assert_same(*values_by_units(Hooked, "*", remat=remat))


INSIDE = ["forces", "forces alone", "vmap(grad)", "jacrev", "jvp"]


@pytest.mark.parametrize("how", slow_unless(["forces", "vmap(grad)", "jvp"], INSIDE))
def test_units_of_a_forward_that_differentiates_inside_have_the_numbers_of_the_definition(how: str) -> None:
    for remat in (False, True):
        assert_same(*values_by_units(lambda: Tower(how), "*", "always" if remat else "never", remat=remat))
    if "forces" not in how:
        text = error_text(values_by_units, lambda: nn.Sequential(Tower(how)), "0")
        assert text.startswith("unit '0' calls a transform of torch.func inside its forward")
    else:
        assert_same(*values_by_units(lambda: nn.Sequential(Tower(how)), "0"))
        text = error_text(values_by_units, lambda: nn.Sequential(Tower(how)), "0", remat=True)
        assert text.startswith("apply.unshard: unit '0' differentiates inside its forward, and remat=True")


class Adjoint(torch.autograd.Function):
    """An adjoint method, as of torchdiffeq: backward runs `f` again, and returns gradients of its parameters."""

    @staticmethod
    def forward(ctx: Any, f: Any, x: Tensor, *params: Tensor) -> Tensor:
        ctx.f = f
        ctx.save_for_backward(x, *params)
        return f(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        x, *params = ctx.saved_tensors
        if ctx.f is torch.tanh:
            return None, None, *(torch.empty(p.shape, device="meta") for p in params)
        with torch.enable_grad():
            return None, None, *torch.autograd.grad(ctx.f(x), params, g, allow_unused=True)


class Solved(nn.Module):
    def __init__(self, again: bool) -> None:
        super().__init__()
        self.f, self.again = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 3)), again

    def forward(self, x: Tensor) -> Tensor:
        f = self.f if self.again else torch.tanh
        return Adjoint.apply(f, x, *self.f.parameters())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("again", "error"),
    [(True, "'f.0.weight' is used by linear after forward has ended"), (False, "leaves of units are passed to an")],
)
def test_parameters_of_units_in_an_adjoint_method_are_an_error(again: bool, error: str) -> None:
    apply, tree = defer(lambda: Solved(again), units="Linear")
    specs, mesh = {name: P("data") for name in tree["params"]}, fs.make_mesh(data=2)
    params = fs.materialize(tree["params"], specs, mesh, key=fs.key(0))
    step = step_of(by_unit(apply, specs), mesh, specs)
    with pytest.raises(ShardingError, match=error):
        step(params, torch.ones(4, 3))


def test_recomputation_that_differs_is_an_error() -> None:
    class Counts(Block):
        def forward(self, x: Tensor, seen: list[Tensor] | None = None) -> Tensor:  # type: ignore[override]
            seen.append(x)
            return super().forward(torch.cat(seen))[0][: len(x)]

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Counts(), Counts()])

        def forward(self, x: Tensor) -> Tensor:
            seen = Cache()
            for block in self.blocks:
                x = block(x, seen)
            return x

    class Cache(list[Tensor]):
        pass

    mesh = fs.make_mesh(data=2)
    apply, specs, params = placed(Cached, "Counts", mesh)
    step = step_of(by_unit(apply, specs, remat=True), mesh, specs)
    assert "a recomputed block differs from its forward pass" in error_text(step, params, torch.randn(4, D))
    want = step_of(plain(apply, specs), mesh, specs)(params, x := torch.randn(4, D))
    assert_same(step_of(by_unit(apply, specs), mesh, specs)(params, x), want)


def _writes(m: nn.Module) -> None:
    with torch.no_grad():
        m.down.weight.clamp_(-0.05, 0.05)


def _sets_data(m: nn.Module) -> None:
    m.down.weight.data = m.down.weight.data.clamp(-0.05, 0.05)


def _replaces(m: nn.Module) -> None:
    m.down.weight = nn.Parameter(m.down.weight.detach().clamp(-0.05, 0.05))


@pytest.mark.parametrize(("change", "error"), [
    (_writes, "forward writes to params['blocks.0.down.weight']: aten.clamp_.default"),
    (_sets_data, "forward writes to params['blocks.0.down.weight']: params.data = ..."),
    (_replaces, "forward replaced parameters: blocks.0.down.weight"),
])  # fmt: skip
def test_forward_of_a_unit_that_changes_its_leaves_is_an_error(change: Any, error: str) -> None:
    """It would change a gathered copy, and on one device the caller's tensor."""

    class Changed(Stack):
        class Block(Block):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                change(self)
                return super().forward(*args, **kwargs)

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([type(self).Block() for _ in range(3)])

    apply, tree = defer(Changed, units="Block", reference=0)
    mesh = fs.make_mesh(data=2)
    specs = fs.fully_shard(P(), tree["params"], axis="data")
    params = fs.materialize(tree["params"], specs, mesh, key=fs.key(0))
    step = step_of(lambda p, ids: apply.unshard(specs, "data")(p, {}, ids), mesh, specs, check="first")
    with pytest.raises(ShardingError, match=re.escape(error)):
        step(params, IDS)
