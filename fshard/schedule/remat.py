"""Rematerialization (activation checkpointing) of a function: recompute it in backward instead of saving tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from fshard import tree
from fshard._core.microbatch import Microbatch, in_microbatch, microbatch
from fshard._core.ops import apply_function, differentiable_dtype
from fshard._core.region import checker, is_scheduled
from fshard._core.torch import any_tangent, in_transform, is_batched, is_grad_tracking, is_wrapped, named_as
from fshard._core.transfers import recomputing
from fshard.errors import api_boundary, checked, fail
from fshard.grad import fill_tensors, split_tensors

from .recompute import DiscardedTensors, UnderHooksError, autocast_of, needs_saved_tensors, under_saved_tensor_hooks


@checked
def remat(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` with only its arguments kept for backward, which recomputes `f` (as `jax.checkpoint` does).

    Same values and gradients, less memory, up to one more forward: the recomputation stops at the last tensor that the
    gradient needs. Tensors saved after the last transfer of `f` are kept, so that this transfer is not repeated; a
    transform of torch.func, a checked call and a compiled program recompute all of `f`. Can be nested; works under
    grad, vjp, vmap and jvp. Tensors that are differentiated must be arguments of `f`: capturing one is an error. In a
    compiled program `f` must return a tensor or a tuple of two or more tensors.

    >>> h = remat(block)(params, h)

    Source: Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost".
    """

    @named_as(f)
    @api_boundary
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        check_captured("remat", f)
        tensors, rest = split_tensors((args, kwargs))
        result_rest: list[Any] = []  # the result without its tensors: only tensors leave the Function

        def of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
            full_args, full_kwargs = fill_tensors(rest, tensors)
            result = f(*full_args, **full_kwargs)
            if torch.compiler.is_dynamo_compiling():
                return _as_tuple(f, result)  # under dynamo `result_rest` cannot be set here
            results, result_rest[:] = split_tensors(result)
            return results

        if torch.compiler.is_dynamo_compiling():
            views = [x.view_as(x) for x in tensors]  # see apply_map
            results = _RematCompiled.apply(_Body(of_tensors), *views)  # type: ignore[no-untyped-call]
            return results[0] if len(results) == 1 else results
        if not in_transform() and any_tangent(tensors):  # of forward_ad: nothing is kept for a backward
            return f(*args, **kwargs)
        differentiated = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        function = _RematDiscarded if differentiated and _can_discard(tensors) else _Remat
        results = apply_function("remat", function, _Body(of_tensors), *tensors)
        return fill_tensors(result_rest, results)

    return wrapped


def _as_tuple(f: Callable[..., Any], result: Any) -> tuple[Tensor, ...]:
    """Return a tensor or several as a tuple. Raises ShardingError for results of another structure."""
    if isinstance(result, Tensor):
        return (result,)
    if not isinstance(result, tuple) or len(result) < 2 or not all(isinstance(x, Tensor) for x in result):
        raise fail(f"remat({getattr(f, '__name__', f)}): returns a {type(result).__name__}",
                   fix="in a compiled program return a tensor, or a tuple of two or more")  # fmt: skip
    return result


@dataclass(frozen=True)
class _Body:
    """A function of tensors, in an object, because dynamo cannot keep a bare callable between forward and backward."""

    f: Callable[..., tuple[Tensor, ...]]
    part: Microbatch | None = field(default_factory=microbatch)  # of the first run: backward may come after its end

    def repeat(self, *xs: Tensor) -> tuple[Tensor, ...]:
        """Compute `f` again."""
        if torch.compiler.is_dynamo_compiling():
            return self.f(*xs)
        with recomputing(), in_microbatch(self.part):
            return self.f(*xs)

    def vjp(self, xs: Sequence[Tensor], wanted: Sequence[bool], grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the vjp of `f` at `xs`, recomputed; `None` for dtypes without gradients, and if not `wanted`.

        It computes the gradient of <f(xs), grads>. The pullback of torch.func.vjp would run after its level of
        torch.func has ended, and a remat inside `f` would begin a new level under tensors of the old level.
        """
        which = [i for i, x in enumerate(xs) if differentiable_dtype(x) and (wanted[i] or not any(wanted))]

        def product(*chosen: Tensor) -> Tensor:
            pairs = _differentiable_pairs(self.repeat(*_replace(xs, which, chosen)), grads)
            return sum(torch.real(y * g.conj()).sum() for y, g in pairs)  # type: ignore[return-value]

        chosen_grads = torch.func.grad(product, tuple(range(len(which))))(*[xs[i] for i in which])
        return tuple(_replace([None] * len(xs), which, chosen_grads))

    def vjp_by_autograd(
        self, xs: Sequence[Tensor], wanted: Sequence[bool], grads: Sequence[Any]
    ) -> tuple[Tensor | None, ...]:
        """Return the vjp by plain autograd, which frees saved tensors as backward passes them, and works only once."""
        which = [i for i, x in enumerate(xs) if wanted[i]]
        inputs = [xs[i].detach().requires_grad_() for i in which]
        with torch.enable_grad():
            results = self.repeat(*_replace([x.detach() for x in xs], which, inputs))
        pairs = [(y, g) for y, g in _differentiable_pairs(results, grads) if y.requires_grad]
        del results
        input_grads = torch.autograd.grad([y for y, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
        return tuple(_replace([None] * len(xs), which, input_grads))

    def jvp(self, xs: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Return the jvp of `f` at `xs`."""
        which = [i for i, t in enumerate(tangents) if t is not None]
        primals, known = tuple(xs[i] for i in which), tuple(tangents[i] for i in which)
        body = lambda *chosen: self.repeat(*_replace(xs, which, chosen))  # noqa: E731
        results, rates = torch.func.jvp(body, primals, known)  # type: ignore[misc]  # a pair without has_aux
        return tuple(t if differentiable_dtype(y) else None for y, t in zip(results, rates, strict=True))


def _differentiable_pairs(results: Sequence[Tensor], grads: Sequence[Tensor | None]) -> list[tuple[Tensor, Tensor]]:
    """Return (result, gradient) of each result that has one."""
    return [(y, g) for y, g in zip(results, grads, strict=True) if g is not None and differentiable_dtype(y)]


def _replace(xs: Sequence[Any], which: Sequence[int], new: Sequence[Any]) -> list[Any]:
    """Return `xs` with `new` at the positions `which`."""
    by_position = dict(zip(which, new, strict=True))
    return [by_position.get(i, x) for i, x in enumerate(xs)]


class _RematCompiled(torch.autograd.Function):
    """A body that backward runs again, without the jvp and the vmap that dynamo refuses."""

    @staticmethod
    def forward(body: _Body, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(y.view_as(y) if any(y is x for x in xs) else y for y in body.f(*xs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.body, ctx.wanted = inputs[0], [True] * len(inputs[1:])
        ctx.save_for_backward(*inputs[1:])
        ctx.mark_non_differentiable(*[y for y in output if not differentiable_dtype(y)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.body.vjp(ctx.saved_tensors, ctx.wanted, grads)


class _Remat(_RematCompiled):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _RematCompiled.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[1:])
        if not any(is_batched(x) for x in inputs[1:]):  # a batched tensor does not show whether it requires a gradient
            ctx.wanted = [x.requires_grad for x in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        xs = ctx.saved_tensors
        # Under create_graph, which torch.func sets, autograd records the operations of a backward.
        recorded = torch.is_grad_enabled() or in_transform() or any(map(is_wrapped, (*xs, *grads)))
        if recorded:
            return None, *ctx.body.vjp(xs, ctx.wanted, grads)
        return None, *ctx.body.vjp_by_autograd(xs, ctx.needs_input_grad[1:], grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return ctx.body.jvp(ctx.saved_tensors, tangents)  # type: ignore[no-any-return]


class _RematDiscarded(torch.autograd.Function):
    """A body whose graph is made in forward, without saved tensors; backward recomputes only these."""

    @staticmethod
    def forward(ctx: Any, body: _Body, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*xs)
        ctx.body, ctx.wanted, ctx.graph = body, [x.requires_grad for x in xs], None
        leaves, discarded = [x.detach().requires_grad_(x.requires_grad) for x in xs], DiscardedTensors()
        try:
            with torch.enable_grad(), discarded.discard():
                results = body.f(*leaves)
            edges = [get_gradient_edge(y) if y.requires_grad else None for y in results]
            ctx.graph = leaves, edges, discarded, autocast_of(xs[0].device.type)
        except (UnderHooksError, RuntimeError) as e:
            if not needs_saved_tensors(e):
                raise
            results = body.f(*xs)
        ctx.mark_non_differentiable(*[y for y in results if not differentiable_dtype(y)])
        return tuple(y.detach() for y in results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        graph, ctx.graph = ctx.graph, None
        recorded = torch.is_grad_enabled() or in_transform() or any(map(is_wrapped, grads))
        if recorded or graph is None:
            return _Remat.backward(ctx, *grads)
        leaves, edges, discarded, autocast = graph
        repeated = [x.detach().requires_grad_(x.requires_grad) for x in leaves]
        with torch.enable_grad(), autocast():
            discarded.recompute(lambda: ctx.body.f(*repeated))
        pairs = [(y, g) for y, g in zip(edges, grads, strict=True) if y is not None and g is not None]
        which = [i for i, x in enumerate(leaves) if ctx.needs_input_grad[i + 1]]
        inputs = [leaves[i] for i in which]
        input_grads = torch.autograd.grad([y for y, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True)
        return None, *_replace([None] * len(leaves), which, input_grads)


def _can_discard(xs: Sequence[Tensor]) -> bool:
    """Return whether saved tensors can be discarded: no transform, checker, dry run or other hooks look on."""
    if in_transform() or any(map(is_wrapped, xs)) or checker() is not None or under_saved_tensor_hooks():
        return False
    return is_scheduled()


def check_captured(verb: str, f: Callable[..., Any], fix: str = "pass {!r} as an argument") -> None:
    """Raise if `f` captures a tensor that is being differentiated: its gradient would be lost silently."""
    if torch.compiler.is_dynamo_compiling():  # which cannot look into closures
        return
    recorded = torch.is_grad_enabled()
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True) if hasattr(f, "__code__") else ():
        try:
            captured = tree.leaves(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
        tensors = [x for x in captured if isinstance(x, Tensor)]
        if any(is_grad_tracking(x) or (recorded and x.requires_grad) for x in tensors):
            raise fail(f"{verb}({getattr(f, '__name__', f)}): captures {name!r}, which is being differentiated",
                       "its gradient would be lost", fix=fix.format(name))  # fmt: skip
