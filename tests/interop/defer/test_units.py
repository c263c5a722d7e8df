"""`Apply.unshard`: every schedule has the numbers of its definition and of one device, for any way to use units."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P
from fshard.interop.defer.constructor import defer
from tests.lib.assertions import assert_same, error_text
from tests.lib.operations import Operations

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
    """Blocks that share a weight, which no unit has alone."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight


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


@dataclasses.dataclass
class Opaque:
    """An output that no pytree knows, and a cache that keeps tensors of every block."""

    hidden: Tensor
    seen: list[Tensor]


class Hidden(Stack):
    """Tensors that pass between blocks inside opaque objects, and a sum of all that the blocks have seen."""

    class Block(Block):
        def forward(self, state: Opaque) -> Opaque:  # type: ignore[override]
            y, _ = super().forward(state.hidden)
            return Opaque(y, [*state.seen, self.down.weight.sum() * y.mean()])

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Hidden.Block() for _ in range(3)])

    def forward(self, ids: Tensor) -> Tensor:
        state = Opaque(self.embed(ids), [])
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


# name -> (constructor, units)
MODULES: dict[str, tuple[Any, Any]] = {
    "in order": (Stack, "Block"),
    "called twice, skipped, backwards": (lambda: Stack((3, 2, 2, 0, 3), 4), "blocks.*"),
    "by size, of leaves": (Stack, F),
    "shared between units": (Universal, "Block"),
    "nested": (Nested, ("Block", "Outer", "blocks.*.inner.up")),
    "opaque": (Hidden, lambda name, m: type(m).__name__ == "Block"),
    "captured": (Captured, "Block"),
    "partial": (Partial, "Block"),
}
MESHES = [{"data": 1}, {"data": 2}, {"data": 4}]  # of 4, the last rank has none of a dim of 6 or 10 rows
IDS = torch.arange(12).view(4, 3) % 7


def step_of(f: Any, mesh: fs.Mesh, specs: Any, axis: Any = "data", check: str = "never") -> Any:
    """Return a step (params, ids) -> (loss, gradients) of a function (params, ids) -> output."""

    def loss(p: Any, ids: Tensor) -> Tensor:
        return fs.pmean(f(p, ids).float().square().mean(), axis)

    def step(p: Any, ids: Tensor) -> Any:
        return fs.value_and_grad(loss)(p, ids)

    return fs.shard_map(step, mesh=mesh, in_specs=(specs, P(axis)), out_specs=(P(), specs), check=check)


def plain(apply: Any, specs: Any, tree: Any, axis: Any = "data", **how: Any) -> Any:
    return lambda p, ids: apply(fs.unshard(p, specs, axis, shapes=tree["params"], **how), {}, ids)


def by_unit(apply: Any, specs: Any, tree: Any, axis: Any = "data", **how: Any) -> Any:
    f = apply.unshard(specs, axis, shapes=tree["params"], **how)
    return lambda p, ids: f(p, {}, ids)


def placed(constructor: Any, units: Any, mesh: fs.Mesh, axis: Any = "data", **how: Any) -> Any:
    """Return a module's function, its tree, specs that split each leaf, if unevenly, and its leaves."""
    apply, tree = defer(constructor, units=units, reference=0)
    specs = {name: P(axis, **how) for name in tree["params"]}
    return apply, tree, specs, fs.materialize(tree["params"], specs, mesh, key=fs.key(0))


def dense(constructor: Any, batches: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss of some batches and its gradients, of torch's own module."""
    torch.manual_seed(0)
    module = constructor()
    loss = torch.stack([module(ids).square().mean() for ids in batches]).mean()
    named = dict(module.named_parameters())
    grads = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    return loss.detach(), dict(zip(named, grads, strict=True))


@pytest.mark.parametrize("name", MODULES)
def test_every_schedule_has_the_numbers_of_the_definition_and_of_one_device(name: str) -> None:
    for axes in MESHES:
        mesh = fs.make_mesh(**axes)
        apply, tree, specs, params = placed(*MODULES[name], mesh)
        want = step_of(plain(apply, specs, tree), mesh, specs)(params, IDS)
        assert_same(want, dense(MODULES[name][0], list(IDS.chunk(mesh.axes["data"]))), rtol=2e-5, atol=1e-7)
        # The sums of a unit that is called twice are added after the ranks' sum, not before it.
        tolerance = {"rtol": 2e-6, "atol": 1e-7} if "twice" in name or name in ("nested", "partial") else {}
        for how in HOWS if axes == {"data": 2} else HOWS[:2]:
            step = step_of(by_unit(apply, specs, tree, **how), mesh, specs)
            got = step(params, IDS)
            assert_same(got, want, f"{axes} {how}", **tolerance)
            assert_same(step(params, IDS), got)
        for how in HOWS[:2]:
            checked = step_of(by_unit(apply, specs, tree, **how), mesh, specs, check="always")
            assert_same(checked(params, IDS), want, f"checked {axes} {how}", **tolerance)
