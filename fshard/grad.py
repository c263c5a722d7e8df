"""Functions of functions, for use inside `shard_map`: gradients, and their accumulation over microbatches.

Where nothing else differentiates, a gradient is plain autograd's: each part of the graph, and what it holds, is freed
as the backward pass leaves it, and no operation goes through torch.func. Inside another gradient, vmap or jvp, and in a
compiled program, it is torch.func's, which can itself be transformed. The results are the same.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import tree
from ._comm import checker
from ._ops import differentiable_dtype
from ._torch_compat import in_transform, is_wrapped
from .errors import ShardingError, fail


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

        compiling = torch.compiler.is_dynamo_compiling()
        checks = None if compiling else checker()
        kept: list[Any] = []  # how to make the aux tree of its tensors: torch.func lets only tensors out

        def of_leaves(*flat: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            full = list(args)
            for i, arg in zip(numbers, tree.unflatten(treedef, flat), strict=True):
                full[i] = arg
            out = f(*full, **kwargs)
            loss, aux = out if has_aux else (out, None)
            _check_loss(name, loss)
            if checks is not None:
                checks.check_loss(name, loss, leaves)
            tensors, kept[:] = split_tensors(aux)
            return loss, tensors

        if not leaves:
            raise fail(f"value_and_grad({name}): argument {argnums} has no leaves",
                       fix="pass the parameters, or other argnums")  # fmt: skip
        given = [] if compiling else [x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        if compiling or _inside_another(given):
            transform = torch.func.grad_and_value(of_leaves, argnums=tuple(range(len(leaves))), has_aux=True)
            flat_grads, (loss, tensors) = transform(*leaves)
        else:
            constant = [x for x in given if not x.requires_grad]
            flat_grads, (loss, tensors) = _by_autograd(of_leaves, leaves)
            if any(x.requires_grad for x in constant):
                raise _overwritten(name, args, {id(x) for x in constant})
        if checks is not None:
            for x, gradient in zip(leaves, flat_grads, strict=True):
                checks.check_gradient(name, x, gradient)
        grads = tree.unflatten(treedef, flat_grads)
        aux = fill_tensors(kept, tensors)
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


# --- by plain autograd, where that will do --------------------------------------------------------------------

_running = threading.local()


def is_differentiated(x: Tensor) -> bool:
    """Whether a gradient that is being taken here goes through this tensor: then no kernel may be blind to it."""
    if torch.compiler.is_dynamo_compiling():  # which cannot look at levels
        return x.requires_grad
    wrapped: bool = is_wrapped(x)
    return wrapped or (getattr(_running, "gradient", False) and x.requires_grad)


def _inside_another(given: Sequence[Tensor]) -> bool:
    """Whether something around may differentiate or batch this gradient, or these are tensors that autograd refuses."""
    recorded = torch.is_grad_enabled()
    return (
        getattr(_running, "gradient", False)
        or in_transform()
        or _has_tangents(given)
        or torch.is_inference_mode_enabled()
        or any((recorded and x.requires_grad) or x.is_inference() for x in given)
    )


def _has_tangents(given: Sequence[Tensor]) -> bool:
    # The level alone tells nothing: on a simulated mesh one is always open (see simulated._DualLevel).
    unpack: Any = forward_ad.unpack_dual
    return forward_ad._current_level >= 0 and any(unpack(x).tangent is not None for x in given)


def _by_autograd(
    f: Callable[..., tuple[Tensor, tuple[Tensor, ...]]], leaves: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, tuple[Tensor, ...]]]:
    """What `torch.func.grad_and_value` of all arguments, with aux, gives: (grads, (loss, aux))."""
    recorded = torch.is_grad_enabled()
    own = [x.detach().requires_grad_() for x in leaves]  # a tensor that is two leaves has two gradients
    _running.gradient = True
    try:
        with torch.enable_grad():
            loss, aux = f(*own)
        if recorded and _reaches_others((loss, *aux), own):  # the caller differentiates what f captured
            return torch.autograd.grad(loss, own, create_graph=True, materialize_grads=True), (loss, aux)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, own, materialize_grads=True)
        else:
            grads = tuple(map(torch.zeros_like, leaves))
        return grads, (loss.detach(), tuple(x.detach() if x.requires_grad else x for x in aux))
    finally:
        _running.gradient = False


def _reaches_others(results: Sequence[Tensor], own: Sequence[Tensor]) -> bool:
    """Whether a graph ends in more than these leaves: half a microsecond a node, where making one takes ten."""
    known = {id(x) for x in own}
    live = [x for x in results if x.requires_grad]
    seen = {x.grad_fn for x in live}
    if any(x.grad_fn is None and id(x) not in known for x in live):
        return True
    ahead = list(seen)
    while ahead:
        node = ahead.pop()
        following = getattr(node, "next_functions", ())
        if not following and id(getattr(node, "variable", own[0])) not in known:
            return True
        new = {n for n, _ in following} - seen
        seen |= new
        ahead += new
    return False


# --- shared by the transforms ---------------------------------------------------------------------------------


def split_tensors(x: Any) -> tuple[tuple[Tensor, ...], tuple[Any, list[Any]]]:
    """The tensors of a tree, and the rest of it for `fill_in`."""
    leaves, treedef = tree.flatten(x)
    return tuple(t for t in leaves if isinstance(t, Tensor)), (
        treedef, [None if isinstance(t, Tensor) else t for t in leaves])  # fmt: skip


def fill_tensors(rest: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
    """The tree of `tensors_of` again, with other tensors."""
    treedef, leaves = rest
    given = iter(tensors)
    return tree.unflatten(treedef, [next(given) if x is None else x for x in leaves])


# --- errors ---------------------------------------------------------------------------------------------------


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
        if not isinstance(leaf, Tensor) or not differentiable_dtype(leaf):
            kind = str(leaf.dtype)[6:] if isinstance(leaf, Tensor) else type(leaf).__name__
            raise fail(f"value_and_grad({name}): {path} is {kind}, which has no gradient",
                       fix="keep what is not trained in another argument")  # fmt: skip


def _overwritten(name: str, args: Sequence[Any], constant: set[int]) -> ShardingError:
    found = [path for path, x in _named(args, range(len(args))) if id(x) in constant and x.requires_grad]
    return fail(f"value_and_grad({name}): {', '.join(found) or 'an argument'} was written in place with what is being "
                "differentiated", fix="give the new value back, with has_aux=True")  # fmt: skip


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


__all__ = ["accumulate", "fill_tensors", "grad", "is_differentiated", "split_tensors", "value_and_grad"]
