"""A pipeline of one microbatch, written by hand: each position of "stage" has layers, and the last one has the loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard._core.region import region, unchecked

SPECS = (P("stage"), P(), P(None, "data"))


def message(x: Tensor, source: int, target: int) -> Tensor:
    """Return what `target` receives from `source`, both of which call it: [*S]{V stage} -> [*S]{V stage}."""
    out = x + fs.pvary(torch.zeros(x.shape), "stage")
    with unchecked(), torch.no_grad():
        return out.detach().copy_(region("message").comm.send([x], [(source, target)], ("stage",))()[0])


def layers(
    *, enter: Callable[[Tensor], Tensor] = lambda scale: fs.pvary(scale, ("data", "stage")),
    back: Callable[[Tensor, int], Tensor] = lambda g, stage: g, expects: Callable[[int], bool] = lambda stage: True,
) -> Callable[..., Any]:  # fmt: skip
    """Return a step: (layers [L@stage, D, D], scale [D], x [1, B@data, D]) -> (loss, their gradients).

    On the last stage `scale` goes through `enter`; gradients go through `back` before they are sent; and a stage for
    which `expects` is False does not wait for them.
    """

    def step(w: Tensor, scale: Tensor, x: Tensor) -> Any:
        s, last = fs.axis_position("stage"), fs.axis_size("stage") - 1
        local = fs.pvary(w, "data").detach().requires_grad_()
        head = (enter(scale) if s == last else fs.pvary(scale, ("data", "stage"))).detach().requires_grad_()
        h = fs.pvary(x[0], "stage")
        if s > 0:
            h = message(h, s - 1, s)
        h = h.detach().requires_grad_()
        y = h
        for layer in local:
            y = torch.tanh(y @ layer)
        loss = fs.pvary(torch.zeros(()), ("data", "stage"))
        d_head = torch.zeros_like(head)
        if s < last:
            message(y, s, s + 1)
            g = message(y, s + 1, s) if expects(s) else y
            dw, dh = torch.autograd.grad(y, [local, h], g.detach())
        else:
            loss = (y * head).sum()
            dw, dh, d_head = torch.autograd.grad(loss, [local, h, head])
        if s > 0:
            message(back(dh, s), s, s - 1)
        return fs.psum(loss.detach(), ("data", "stage")), fs.psum(dw, "data"), fs.psum(d_head, ("data", "stage"))

    return step


def mapped(step: Callable[..., Any] | None = None, **axes: int) -> Any:
    """Return a step on a mesh of axes "data" and "stage"."""
    mesh = fs.make_mesh(**{"data": 1, **axes})
    return fs.shard_map(step or layers(), mesh=mesh, in_specs=SPECS, out_specs=(P(), P("stage"), P()))


def listed(n: int, d: int = 8) -> tuple[Any, Any]:
    """Return a pipeline of n + 1 listed layers on n stages, sharded over data=2 (FSDP), and its arguments."""
    layers = [{"w": fs.init.zeros((d, d))} for _ in range(n + 1)]
    specs = P(), fs.on_stages([P("data")] * len(layers), layers, "stage", n)

    def layer(p: Any, h: Tensor, batch: Tensor) -> Tensor:
        return torch.relu(h @ fs.unshard(p, P("data"), "data", shapes=layers[0])["w"])

    f = fs.pipelined(lambda ends, x: x * fs.pvary(ends, "data"), layer, lambda ends, h, x: fs.pmean(h.mean(), "data"),
                     axis="stage", microbatches=2)  # fmt: skip
    mesh = fs.make_mesh(kind="abstract", data=2, stage=n)
    step = fs.shard_map(f, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs))
    return step, ((fs.init.zeros((d,)), layers), fs.init.zeros((8, d)))


def arguments(n: int = 4, rows: int = 4, d: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Return `n` layers, the scale and the batch."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(n, d, d, generator=g), torch.randn(d, generator=g), torch.randn(1, rows, d, generator=g)
