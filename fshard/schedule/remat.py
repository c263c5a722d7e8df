"""Rematerialization: memory for time. What a call computes is forgotten, and computed again in the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._ops import differentiable_dtype
from fshard._torch_compat import in_transform, is_batched, is_grad_tracking, is_wrapped
from fshard.errors import fail
from fshard.grad import fill_tensors, split_tensors


def remat(f: Callable[..., Any]) -> Callable[..., Any]:
    """Keep only the arguments of `f`; compute the rest again in the backward pass (as `jax.checkpoint` does).

    Same values and gradients, less memory, one more forward. Nests; works under grad, vjp, vmap and jvp. Tensors that
    are to be differentiated must be arguments of `f`, not captured by it: that is an error. In a compiled program `f`
    must give a tensor or a tuple of several tensors.

    >>> h = remat(block)(params, h)

    Source: Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".
    """

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # dynamo cannot look into closures
            check_captured("remat", f)
        leaves, treedef = tree.flatten((args, kwargs))
        where = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]
        seen: list[Any] = []

        def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
            full = list(leaves)
            for i, x in zip(where, tensors, strict=True):
                full[i] = x
            a, k = tree.unflatten(treedef, full)
            out = f(*a, **k)
            if torch.compiler.is_dynamo_compiling():
                return _plain(f, out)  # dynamo lets nothing but tensors out of here
            found, seen[:] = split_tensors(out)
            return found

        xs = [leaves[i] for i in where]
        if torch.compiler.is_dynamo_compiling():
            xs = [x.view_as(x) for x in xs]  # see linear.apply
            got = _RematCompiled.apply(_Body(of_tensors), *xs)  # type: ignore[no-untyped-call]
            return got[0] if len(got) == 1 else got
        got = _Remat.apply(_Body(of_tensors), *xs)  # type: ignore[no-untyped-call]
        return fill_tensors(seen, got)

    return wrapped


def _plain(f: Callable[..., Any], out: Any) -> tuple[Tensor, ...]:
    """A tensor or several as a tuple: the results whose form a compiled program knows without being told."""
    if isinstance(out, Tensor):
        return (out,)
    if not isinstance(out, tuple) or len(out) < 2 or not all(isinstance(x, Tensor) for x in out):
        raise fail(f"remat({getattr(f, '__name__', f)}): gives a {type(out).__name__}",
                   fix="in a compiled program give a tensor, or a tuple of two or more")  # fmt: skip
    return out


@dataclass(frozen=True)
class _Body:
    """A function of tensors, in an object: dynamo lets no bare callable be kept between forward and backward."""

    f: Callable[..., tuple[Tensor, ...]]

    def pull(self, xs: Sequence[Tensor], live: Sequence[bool], grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The vjp of `f` at `xs`, made anew; `None` for what has no gradient, or is not marked in `live`.

        It is the gradient of <f(xs), grads>, and not torch.func.vjp, whose pullback runs after its level has ended:
        a remat inside `f` would then begin a level under tensors of the old one.
        """
        smooth = [i for i, x in enumerate(xs) if differentiable_dtype(x) and (live[i] or not any(live))]

        def pairing(*chosen: Tensor) -> Tensor:
            return sum(_inner(y, g) for y, g in _pairs(self.f(*_replace(xs, smooth, chosen)), grads))  # type: ignore[return-value]

        found = torch.func.grad(pairing, tuple(range(len(smooth))))(*[xs[i] for i in smooth])
        return tuple(_replace([None] * len(xs), smooth, found))

    def pull_once(self, xs: Sequence[Tensor], live: Sequence[bool], grads: Sequence[Any]) -> tuple[Tensor | None, ...]:
        """The same where nobody differentiates or batches it: by plain autograd, which frees as it goes."""
        smooth = [i for i, x in enumerate(xs) if live[i]]
        own = [xs[i].detach().requires_grad_() for i in smooth]
        with torch.enable_grad():
            out = _pairs(self.f(*_replace([x.detach() for x in xs], smooth, own)), grads)
        out = [(y, g) for y, g in out if y.requires_grad]
        found = torch.autograd.grad([y for y, _ in out], own, [g for _, g in out], allow_unused=True)
        return tuple(_replace([None] * len(xs), smooth, found))

    def push(self, xs: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The jvp of `f` at `xs`."""
        moving = [i for i, t in enumerate(tangents) if t is not None]
        at, rates = tuple(xs[i] for i in moving), tuple(tangents[i] for i in moving)
        body = lambda *chosen: self.f(*_replace(xs, moving, chosen))  # noqa: E731
        out, pushed = torch.func.jvp(body, at, rates)  # type: ignore[misc]  # without has_aux it gives two
        return tuple(t if differentiable_dtype(y) else None for y, t in zip(out, pushed, strict=True))


def _pairs(out: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """The results that count, each with its gradient."""
    return [(y, g) for y, g in zip(out, grads, strict=True) if g is not None and differentiable_dtype(y)]


def _replace(xs: Sequence[Any], at: Sequence[int], by: Sequence[Any]) -> list[Any]:
    given = dict(zip(at, by, strict=True))
    return [given.get(i, x) for i, x in enumerate(xs)]


class _RematCompiled(torch.autograd.Function):
    """Runs a body forward and keeps its arguments; backward runs it again. Dynamo refuses one with a jvp or vmap."""

    @staticmethod
    def forward(body: _Body, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(y.view_as(y) if any(y is x for x in xs) else y for y in body.f(*xs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.body, ctx.live = inputs[0], [True] * len(inputs[1:])
        ctx.save_for_backward(*inputs[1:])
        ctx.mark_non_differentiable(*[y for y in output if not differentiable_dtype(y)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.body.pull(ctx.saved_tensors, ctx.live, grads)


class _Remat(_RematCompiled):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _RematCompiled.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[1:])
        if not any(is_batched(x) for x in inputs[1:]):  # which do not tell
            ctx.live = [x.requires_grad for x in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        xs = ctx.saved_tensors
        # With create_graph, as in torch.func, autograd records what a backward does.
        once = not torch.is_grad_enabled() and not in_transform()
        if once and not any(map(is_wrapped, (*xs, *grads))):
            return None, *ctx.body.pull_once(xs, ctx.needs_input_grad[1:], grads)
        return None, *ctx.body.pull(xs, ctx.live, grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return ctx.body.push(ctx.saved_tensors, tangents)  # type: ignore[no-any-return]


def _inner(y: Tensor, g: Tensor) -> Tensor:
    return torch.real(y * g.conj()).sum() if y.is_complex() else (y * g).sum()


def check_captured(verb: str, f: Callable[..., Any]) -> None:
    """Raise where `f` captures a tensor under differentiation: it would silently lose its gradient."""
    tracked = torch.is_grad_enabled()
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True) if hasattr(f, "__code__") else ():
        try:
            held = tree.leaves(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
        tensors = [x for x in held if isinstance(x, Tensor)]
        if any(is_grad_tracking(x) or (tracked and x.requires_grad) for x in tensors):
            raise fail(f"{verb}({getattr(f, '__name__', f)}): captures {name!r}, which is being differentiated",
                       "its gradient would be lost", fix=f"pass {name!r} as an argument")  # fmt: skip


__all__ = ["check_captured", "remat"]
