"""Functions of functions, for use inside `shard_map`: gradients, accumulation, rematerialization, precision."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import tree
from .comm import checker
from .errors import fail


def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """A function that gives the value of `f` and its gradient, as `jax.value_and_grad` does.

        f: (params, ...) -> loss [] {I}          gives (loss, grads); a gradient has its parameter's shape and type
        (the loss may vary over an axis over which all that is differentiated does: each rank has its own problem)

    Args:
        argnums: which arguments to differentiate, all of their leaves; a tuple gives a tuple of gradients.
        has_aux: `f` gives `(loss, aux)`; then the result is `((loss, aux), grads)`.

    >>> value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([3.0])})
    (tensor(9.), {'w': tensor([6.])})

    Raises ShardingError for a loss that is not one floating number, and for leaves that cannot be differentiated.
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    name = getattr(f, "__name__", type(f).__name__)

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for i in numbers:
            if not -len(args) <= i < len(args):
                raise fail(f"value_and_grad({name}): argnums={argnums}, but there are {len(args)} positional arguments")
        chosen = tuple(args[i] for i in numbers)
        leaves, treedef = tree.flatten(chosen)
        _check_differentiable(name, numbers, args)

        checks = None if torch.compiler.is_dynamo_compiling() else checker()
        kept: list[Any] = []  # the aux tree, its tensors replaced by None: torch.func lets only tensors out

        def of_leaves(*flat: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            full = list(args)
            for i, arg in zip(numbers, tree.unflatten(treedef, flat), strict=True):
                full[i] = arg
            out = f(*full, **kwargs)
            loss, aux = out if has_aux else (out, None)
            _check_loss(name, loss)
            if checks is not None:
                checks.loss(name, loss, leaves)
            aux_leaves, aux_def = tree.flatten(aux)
            kept[:] = [aux_def, [None if isinstance(x, Tensor) else x for x in aux_leaves]]
            return loss, tuple(x for x in aux_leaves if isinstance(x, Tensor))

        if not leaves:
            raise fail(f"value_and_grad({name}): argument {argnums} has no leaves",
                       fix="pass the parameters, or other argnums")  # fmt: skip
        transform = torch.func.grad_and_value(of_leaves, argnums=tuple(range(len(leaves))), has_aux=True)
        flat_grads, (loss, tensors) = transform(*leaves)
        if checks is not None:
            for x, gradient in zip(leaves, flat_grads, strict=True):
                checks.gradient(name, x, gradient)
        grads = tree.unflatten(treedef, flat_grads)
        aux_def, others = kept
        aux = _fill_in(aux_def, others, tensors)
        return (loss, aux) if has_aux else loss, grads[0] if isinstance(argnums, int) else grads

    return wrapped


def grad(f: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """The gradient part of `value_and_grad`; with `has_aux`, `(grads, aux)`.

    >>> grad(lambda w: (w**2).sum())(torch.tensor([3.0]))
    tensor([6.])
    """

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, grads = value_and_grad(f, argnums, has_aux=has_aux)(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


def _fill_in(treedef: Any, leaves: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
    """Put tensors back where `None` stands among the leaves of a tree."""
    rest = iter(tensors)
    return tree.unflatten(treedef, [next(rest) if x is None else x for x in leaves])


def _check_loss(name: str, loss: Any) -> None:
    if not isinstance(loss, Tensor):
        fix = "return (loss, aux) with has_aux=True" if isinstance(loss, tuple) else "return a 0-d tensor"
        raise fail(f"value_and_grad({name}): the loss is a {type(loss).__name__}, not a tensor", fix=fix)
    if loss.ndim or not loss.is_floating_point():
        kind = f"{str(loss.dtype)[6:]}{list(loss.shape)}"
        raise fail(f"value_and_grad({name}): the loss must be one floating number, not {kind}",
                   fix="reduce it: loss.mean() or loss.sum()")  # fmt: skip


def _named(args: Sequence[Any], numbers: Sequence[int]) -> list[tuple[str, Any]]:
    """The leaves of some arguments, each with its path."""
    return [(tree.show(f"args[{i}]", path), leaf) for i in numbers for path, leaf in tree.leaves_with_path(args[i])]


def _check_differentiable(name: str, numbers: Sequence[int], args: Sequence[Any]) -> None:
    for path, leaf in _named(args, numbers):
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            kind = str(leaf.dtype)[6:] if isinstance(leaf, Tensor) else type(leaf).__name__
            raise fail(f"value_and_grad({name}): {path} is {kind}, which has no gradient",
                       fix="keep what is not trained in another argument")  # fmt: skip


def accumulate(
    f: Callable[..., Any], steps: int, *, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """`value_and_grad` over `steps` microbatches, one after the other: the mean of their values and gradients.

    Every argument that is not differentiated is cut along dim 0 into `steps` equal parts (leaf by leaf; 0-d leaves and
    numbers go to each whole). Activations of one microbatch live at a time. With `has_aux`, aux leaves come stacked,
    [steps, ...]. To reduce gradients over an axis once and not once per microbatch, `pvary` the parameters before and
    `psum` the gradients after.

    >>> loss, grads = accumulate(loss_fn, 4)(params, x, y)       # x [4 * b, D], y [4 * b]

    Raises ShardingError where `steps` does not divide a leaf's dim 0.
    """
    if steps < 1:
        raise fail(f"accumulate: steps={steps}", fix="one or more")
    one = value_and_grad(f, argnums, has_aux=has_aux)
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    @functools.wraps(f)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        kept = {i % len(args) for i in numbers}
        total: Any = None
        auxes = []
        for step in range(steps):
            part = [a if i in kept else _micro(i, a, step, steps) for i, a in enumerate(args)]
            value, grads = one(*part, **kwargs)
            loss, aux = value if has_aux else (value, None)
            auxes.append(aux)
            new = (loss, grads)
            total = new if total is None else tree.map(torch.add, total, new)
        loss, grads = tree.map(lambda t: t / steps, total) if steps > 1 else total
        return ((loss, tree.map(lambda *xs: torch.stack(xs), *auxes)) if has_aux else loss), grads

    return wrapped


def _micro(i: int, arg: Any, step: int, steps: int) -> Any:
    def part(path: tree.Path, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.ndim == 0:
            return x
        if x.shape[0] % steps:
            raise fail(f"accumulate: {tree.show(f'args[{i}]', path)} does not cut into {steps} equal microbatches",
                       f"{x.shape[0]} % {steps} = {x.shape[0] % steps}", shape=list(x.shape),
                       fix="another number of steps, or another batch size")  # fmt: skip
        size = x.shape[0] // steps
        return x.narrow(0, step * size, size)

    return tree.map_with_path(part, arg)


# --- rematerialization ----------------------------------------------------------------------------------------


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
            _check_captured(f)
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
            out_leaves, out_def = tree.flatten(out)
            seen[:] = [out_def, [None if isinstance(x, Tensor) else x for x in out_leaves]]
            return tuple(x for x in out_leaves if isinstance(x, Tensor))

        xs = [leaves[i] for i in where]
        if torch.compiler.is_dynamo_compiling():
            xs = [x.view_as(x) for x in xs]  # see linear.apply
            got = _RematCompiled.apply(_Body(of_tensors), *xs)  # type: ignore[no-untyped-call]
            return got[0] if len(got) == 1 else got
        got = _Remat.apply(_Body(of_tensors), *xs)  # type: ignore[no-untyped-call]
        out_def, others = seen
        return _fill_in(out_def, others, got)

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
        smooth = [i for i, x in enumerate(xs) if _smooth(x) and (live[i] or not any(live))]

        def pairing(*chosen: Tensor) -> Tensor:
            out = [y for y in self.f(*_replace(xs, smooth, chosen)) if _smooth(y)]
            wanted = [g for g in grads if g is not None and _smooth(g)]
            return sum(_inner(y, g) for y, g in zip(out, wanted, strict=True))  # type: ignore[return-value]

        found = torch.func.grad(pairing, tuple(range(len(smooth))))(*[xs[i] for i in smooth])
        return tuple(_replace([None] * len(xs), smooth, found))

    def push(self, xs: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The jvp of `f` at `xs`."""
        moving = [i for i, t in enumerate(tangents) if t is not None]
        at, rates = tuple(xs[i] for i in moving), tuple(tangents[i] for i in moving)
        body = lambda *chosen: self.f(*_replace(xs, moving, chosen))  # noqa: E731
        out, pushed = torch.func.jvp(body, at, rates)  # type: ignore[misc]  # without has_aux it gives two
        return tuple(t if _smooth(y) else None for y, t in zip(out, pushed, strict=True))


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
        ctx.mark_non_differentiable(*[y for y in output if not _smooth(y)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.body.pull(ctx.saved_tensors, ctx.live, grads)


class _Remat(_RematCompiled):
    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _RematCompiled.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[1:])
        if not any(torch._C._functorch.is_batchedtensor(x) for x in inputs[1:]):  # which do not tell
            ctx.live = [x.requires_grad for x in inputs[1:]]

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return ctx.body.push(ctx.saved_tensors, tangents)  # type: ignore[no-any-return]


def _inner(y: Tensor, g: Tensor) -> Tensor:
    return torch.real(y * g.conj()).sum() if y.is_complex() else (y * g).sum()


def _smooth(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _check_captured(f: Callable[..., Any]) -> None:
    """A tensor under differentiation that `f` captures would silently lose its gradient."""
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True) if hasattr(f, "__code__") else ():
        try:
            held = tree.leaves(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
        if any(isinstance(x, Tensor) and torch._C._functorch.is_gradtrackingtensor(x) for x in held):
            raise fail(f"remat({getattr(f, '__name__', f)}): captures {name!r}, which is being differentiated",
                       "its gradient would be lost", fix=f"pass {name!r} as an argument")  # fmt: skip


# --- precision ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Policy:
    """Which dtype parameters are kept in, the model computes in, and results come out in.

    >>> policy = Policy(compute=torch.bfloat16)
    >>> logits = policy.to_output(apply(policy.to_compute(params), policy.to_compute(x)))

    Only floating leaves are cast. Source: the idea and the three roles are those of DeepMind's jmp.
    """

    param: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    output: torch.dtype = torch.float32

    def to_param(self, x: Any) -> Any:
        return cast(x, self.param)

    def to_compute(self, x: Any) -> Any:
        return cast(x, self.compute)

    def to_output(self, x: Any) -> Any:
        return cast(x, self.output)


def cast(x: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor of a tree in `dtype`; other leaves as they are. Transpose: cast back."""
    return tree.map(lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t, x)
