"""The overlapped backward pass has the numbers and the transfers of the plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

import fshard as fs
from fshard import P
from fshard._core.ops.autograd import apply_map
from fshard._core.ops.linear_maps import Gather, Vary
from fshard._core.region import region
from fshard.schedule.overlap import apply_then_compute

MESHES = [{"data": 2, "model": 2}, {"data": 1, "model": 4}]
X, W = (4, 7, 6), (6, 10)  # neither 7 nor 10 divides


def layer(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(h, w.transpose(0, 1), b)


def map_of(kind: str) -> Any:
    comm = region().comm
    return Vary(comm, ("model",)) if kind == "vary" else Gather(comm, ("model",), ((1, X[1]),))


def without_overlap(m: Any, f: Any, x: Tensor, *weights: Tensor) -> Tensor:
    return f(apply_map(m, [x])[0], *weights)


def gradients(by: Any, kind: str, axes: dict[str, int], of: tuple[int, ...], f: Any = layer, **how: Any) -> Any:
    """Return the gradients of x, w and b at the positions `of`, and the transfers."""
    x_spec = P("data") if kind == "vary" else P("data", "model")
    specs = [x_spec, P(None, "model"), P("model")]
    generator = torch.Generator().manual_seed(0)
    args = [torch.randn(*shape, generator=generator) for shape in (X, W, W[1:])]

    def step(*args: Tensor) -> Any:
        def loss(*args: Tensor) -> Tensor:
            x, w, b = fs.pvary(args[0], ()), *fs.pvary(args[1:], "data")
            y = by(map_of(kind), f, torch.sin(x), w, b)
            return fs.psum(torch.tanh(y).square().sum(), ("data", "model"))

        return fs.grad(loss, of)(*args)

    out = tuple(specs[i] for i in of)
    mapped = fs.shard_map(step, mesh=fs.make_mesh(**axes), in_specs=tuple(specs), out_specs=out, **how)
    with fs.recording() as log:
        grads = mapped(*args)
    return fs.device_get(grads), sorted((t.op, t.axes, t.bytes) for t in log)


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("kind", ["vary", "gather"])
@pytest.mark.parametrize("of", [(0, 1, 2), (0, 2), (0,), (1, 2)], ids=str)
def test_overlap_has_the_numbers_and_transfers_of_one_pass(
    axes: dict[str, int], kind: str, of: tuple[int, ...]
) -> None:
    want, moved = gradients(without_overlap, kind, axes, of, check="never")
    for check in ("never", "always") if axes == MESHES[0] else ("never",):
        got, log = gradients(apply_then_compute, kind, axes, of, check=check)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert check == "always" or log == moved


def test_gradient_shared_by_x_and_bias_is_not_overwritten() -> None:
    """Differentiate an addition, which gives x and the bias one gradient tensor; x's is summed in place."""
    mesh, x, b = fs.make_mesh(model=2), torch.ones(3, 4), torch.arange(24.0).view(2, 3, 4)

    def step(x: Tensor, b: Tensor) -> Any:
        def loss(x: Tensor, b: Tensor) -> Tensor:
            y = apply_then_compute(Vary(region().comm, ("model",)), torch.add, x, b[0])
            return fs.psum((y * (1 + b[0].detach())).sum(), "model")

        return fs.grad(loss, (0, 1))(x, b)

    f = fs.shard_map(step, mesh=mesh, in_specs=(P(), P("model")), out_specs=(P(), P("model")), check="never")
    dx, db = fs.device_get(f(x, b))
    assert torch.equal(dx, (1 + b).sum(0))
    assert torch.equal(db, 1 + b)


def test_nested_grad_differentiates_twice_and_create_graph_is_an_error() -> None:
    mesh, w = fs.make_mesh(model=2), torch.linspace(-1, 1, 40).view(4, 10)

    def run(by: Any, of: Any) -> Tensor:
        def loss(x: Tensor, w: Tensor) -> Tensor:
            y = by(Vary(region().comm, ("model",)), lambda h, w: h @ w, x, w)
            return fs.psum(torch.tanh(y).sum(), "model")

        f = fs.shard_map(lambda x, w: of(loss, x, w), mesh=mesh, in_specs=(P(), P(None, "model")), out_specs=P(),
                         check="never")  # fmt: skip
        return fs.device_get(f(torch.ones(3, 4), w))

    def second(loss: Any, x: Tensor, w: Tensor) -> Tensor:
        return fs.grad(lambda x: fs.grad(loss)(x, w).square().sum())(x)

    def again(loss: Any, x: Tensor, w: Tensor) -> Tensor:
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(x, w), x, create_graph=True)
        return torch.autograd.grad(g.sum(), x)[0]

    assert torch.equal(run(apply_then_compute, second), run(without_overlap, second))
    with pytest.raises(fs.ShardingError, match="the gradient of a column parallel layer cannot be differentiated by"):
        run(apply_then_compute, again)
