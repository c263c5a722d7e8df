"""Transforms of functions, for use inside `shard_map`: gradients, and their accumulation over microbatches.

A gradient that no other transform surrounds is computed by plain autograd, which frees each node of the graph and its
saved tensors as backward passes it. Inside another gradient, vmap or jvp, and in a compiled program, it is computed by
torch.func, whose results can be transformed again. Both give the same numbers.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import tree
from ._core.microbatch import in_microbatch, microbatches
from ._core.ops import differentiable_dtype, keep_placed
from ._core.region import set_within
from ._core.torch import any_tangent, in_transform, is_wrapped, named_as
from .errors import ShardingError, api_boundary, checked, fail, number_of, shown


@checked
def value_and_grad(
    f: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Return a function that computes the value of `f` and its gradient, as `jax.value_and_grad` does.

        f: (params, ...) -> loss [] {I}     returns (loss, grads); a gradient has its parameter's shape and type
        (the loss may vary over an axis over which all differentiated leaves vary: each rank solves a separate problem)

    Args:
        argnums: positions of the arguments to differentiate, all of their leaves; for a tuple, grads is a tuple.
        has_aux: `f` returns `(loss, aux)`; then the result is `((loss, aux), grads)`.

    >>> value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": torch.tensor([3.0])})
    (tensor(9.), {'w': tensor([6.])})

    Raises ShardingError for a loss that is not one floating number, and for leaves that cannot be differentiated.
    """
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    label = f"value_and_grad({getattr(f, '__name__', type(f).__name__)})"

    @named_as(f)
    @api_boundary
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _check_argnums(label, numbers, args)
        leaves, treedef = tree.flatten(tuple(args[i] for i in numbers))
        if not leaves:
            raise fail(f"{label}: argument {argnums} has no leaves", fix="pass the parameters, or other argnums")
        _check_differentiable(label, numbers, args, leaves)
        compiling = torch.compiler.is_dynamo_compiling()
        aux_rest: list[Any] = []  # aux without its tensors: torch.func returns only tensors

        def of_leaves(*flat: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            full = list(args)
            for i, arg in zip(numbers, tree.unflatten(treedef, flat), strict=True):
                full[i] = arg
            out = f(*full, **kwargs)
            if has_aux and not (isinstance(out, tuple) and len(out) == 2):
                raise fail(f"{label}: has_aux=True, and the result is {shown(out)}", fix="return (loss, aux)")
            loss, aux = out if has_aux else (out, None)
            check_loss(label, loss)
            tensors, aux_rest[:] = split_tensors(aux)
            return loss, tensors

        inputs = [] if compiling else [x for x in tree.leaves((args, kwargs)) if isinstance(x, Tensor)]
        if compiling or needs_torch_func(inputs):
            transform = torch.func.grad_and_value(of_leaves, argnums=tuple(range(len(leaves))), has_aux=True)
            flat_grads, (loss, tensors) = transform(*leaves)
        else:
            constant = [x for x in inputs if not x.requires_grad]
            flat_grads, (loss, tensors) = _grad_by_autograd(of_leaves, leaves)
            if any(x.requires_grad for x in constant):
                raise _modified(label, args, {id(x) for x in constant})
        grads = tree.unflatten(treedef, flat_grads)
        aux = fill_tensors(aux_rest, tensors)
        return (loss, aux) if has_aux else loss, grads[0] if isinstance(argnums, int) else grads

    return wrapped


@checked
def grad(f: Callable[..., Any], argnums: int | Sequence[int] = 0, *, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes the gradient of `f`; with `has_aux`, `(grads, aux)`. See `value_and_grad`.

    >>> grad(lambda w: (w**2).sum())(torch.tensor([3.0]))
    tensor([6.])
    """

    @named_as(f)
    @api_boundary
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, grads = value_and_grad(f, argnums, has_aux=has_aux)(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return wrapped


# --- by plain autograd ---

_state = threading.local()  # `differentiating`: whether a gradient is being computed by autograd on this thread


def differentiating() -> contextlib.AbstractContextManager[None]:
    """Context in which autograd records the user's function, for a gradient that no other transform surrounds."""
    return set_within(_state, differentiating=True)


def is_differentiated(x: Tensor) -> bool:
    """Return whether a surrounding gradient passes through this tensor: then only differentiable kernels may use it."""
    if torch.compiler.is_dynamo_compiling():  # dynamo cannot trace the question whether a tensor is wrapped
        return x.requires_grad
    wrapped: bool = is_wrapped(x)
    return wrapped or (getattr(_state, "differentiating", False) and x.requires_grad)


def needs_torch_func(inputs: Sequence[Tensor]) -> bool:
    """Return whether a caller may differentiate or batch this gradient, or autograd would refuse its inputs."""
    recorded = torch.is_grad_enabled()
    return (
        getattr(_state, "differentiating", False)
        or in_transform()
        or torch.is_inference_mode_enabled()
        or any((recorded and x.requires_grad) or x.is_inference() for x in inputs)
        or any_tangent(inputs)
    )


def _grad_by_autograd(
    f: Callable[..., tuple[Tensor, tuple[Tensor, ...]]], leaves: Sequence[Tensor]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, tuple[Tensor, ...]]]:
    """Return (grads, (loss, aux)), as `torch.func.grad_and_value` of all arguments does."""
    recorded = torch.is_grad_enabled()
    inputs = [x.detach().requires_grad_() for x in leaves]  # a tensor that is two leaves has two gradients
    keep_placed(inputs, leaves)
    _state.differentiating = True  # as `differentiating`, which would be six more Python calls of each step
    try:
        with torch.enable_grad():
            loss, aux = f(*inputs)
        if recorded and _depends_on_others((loss, *aux), inputs):  # the caller may differentiate tensors f captured
            return torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True), (loss, aux)
        if loss.requires_grad:
            grads = torch.autograd.grad(loss, inputs, materialize_grads=True)
        else:
            grads = tuple(map(torch.zeros_like, leaves))
        return grads, (loss.detach(), tuple(x.detach() if x.requires_grad else x for x in aux))
    finally:
        _state.differentiating = False


def _depends_on_others(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
    """Return whether the graph of some results has other leaves than `inputs`: half a microsecond for each node."""
    known = {id(x) for x in inputs}
    differentiable = [x for x in results if x.requires_grad]
    if any(x.grad_fn is None and id(x) not in known for x in differentiable):
        return True
    seen = {x.grad_fn for x in differentiable}
    stack = list(seen)
    while stack:
        node = stack.pop()
        following = getattr(node, "next_functions", ())
        if not following and id(getattr(node, "variable", inputs[0])) not in known:
            return True
        for n, _ in following:
            if n not in seen:
                seen.add(n)
                stack.append(n)
    return False


# --- trees without their tensors ---

Rest = tuple[Any, list[Any]]  # a tree without its tensors: its structure, and its leaves with None for each tensor


def split_tensors(x: Any) -> tuple[tuple[Tensor, ...], Rest]:
    """Split a tree into its tensors and the rest of it, for `fill_tensors`."""
    leaves, treedef = tree.flatten(x)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    return tensors, (treedef, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def fill_tensors(rest: Sequence[Any], tensors: Sequence[Tensor]) -> Any:
    """Return the tree that `split_tensors` split, with these tensors."""
    treedef, leaves = rest
    remaining = iter(tensors)
    return tree.unflatten(treedef, [next(remaining) if leaf is None else leaf for leaf in leaves])


# --- errors ---


def _check_argnums(label: str, numbers: Sequence[int], args: Sequence[Any]) -> None:
    if any(not -len(args) <= i < len(args) for i in numbers):
        shown_ = numbers[0] if len(numbers) == 1 else numbers
        count = number_of(len(args), "positional argument")
        raise fail(f"{label}: argnums={shown_}, and the call has {count}", fix="count from 0")


def check_loss(label: str, loss: Any) -> None:
    """Raise ShardingError for a loss that is not one floating number."""
    if not isinstance(loss, Tensor):
        more = "" if label.startswith("value_and_grad(") else ", or (total, count) with counted=True"
        fix = f"return (loss, aux) with has_aux=True{more}" if isinstance(loss, tuple) else "return a 0-d tensor"
        fix = f"end {label[15:-1]} with `return loss`" if loss is None and label.startswith("value_and_grad(") else fix
        raise fail(f"{label}: the loss is a {type(loss).__name__}, not a tensor", fix=fix)
    if loss.ndim or not loss.is_floating_point():
        kind = f"{str(loss.dtype)[6:]}{list(loss.shape)}"
        raise fail(f"{label}: the loss must be one floating number, not {kind}",
                   fix="reduce it: loss.mean() or loss.sum()")  # fmt: skip


def _leaves_by_path(args: Sequence[Any], numbers: Sequence[int]) -> list[tuple[str, Any]]:
    """Return (path, leaf) of each leaf of some arguments."""
    return [(tree.show(f"args[{i}]", path), leaf) for i in numbers for path, leaf in tree.leaves_with_path(args[i])]


def _check_differentiable(label: str, numbers: Sequence[int], args: Sequence[Any], leaves: Sequence[Any]) -> None:
    dtypes = {x.dtype if isinstance(x, Tensor) else None for x in leaves}
    if all(dtype is not None and (dtype.is_floating_point or dtype.is_complex) for dtype in dtypes):
        return  # without the paths, which take longer
    for path, leaf in _leaves_by_path(args, numbers):
        check_leaf(f"{label}: {path}", leaf, "pass leaves that are not trained in another argument")


def check_leaf(label: str, leaf: Any, fix: str) -> None:
    """Raise ShardingError for a leaf that has no gradient."""
    if not isinstance(leaf, Tensor) or not differentiable_dtype(leaf):
        kind = str(leaf.dtype)[6:] if isinstance(leaf, Tensor) else type(leaf).__name__
        if kind == "Sharded":
            fix = "differentiate inside: fs.shard_map(fs.value_and_grad(loss), ...), where leaves are tensors"
        raise fail(f"{label} is {kind}, which has no gradient", fix=fix)


def _modified(label: str, args: Sequence[Any], constant: set[int]) -> ShardingError:
    """Error for arguments that were constant, and into which `f` has written a differentiated value."""
    leaves = _leaves_by_path(args, range(len(args)))
    paths = [path for path, x in leaves if id(x) in constant and x.requires_grad]
    return fail(f"{label}: {', '.join(paths) or 'an argument'} was modified in place by a value that is being "
                "differentiated", fix="return the new value, with has_aux=True")  # fmt: skip


# --- microbatches ---


@checked
def accumulate(
    f: Callable[..., Any], steps: int, *, argnums: int | Sequence[int] = 0, has_aux: bool = False,
    counted: bool = False, gather: Callable[..., Any] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return `value_and_grad` over `steps` microbatches in sequence: the mean of their values and gradients.

    Every positional argument that is not differentiated is split along dim 0 into `steps` equal parts (leaf by leaf;
    0-d leaves and numbers are passed unsplit). Keyword arguments are passed unsplit: frozen parameters, a key. Only the
    activations of one microbatch exist at a time. With `has_aux`, aux leaves are stacked, [steps, ...].

    The gradients of all ranks are added in one of three ways:

    - in each microbatch, where `f` itself gathers the parameters, by `unshard` or `scan`. Gradients take twice the
      memory of a rank's part of the parameters.
    - once, with `gather`, which gathers the parameters before the microbatches: the fewest transfers. The parameters
      and two copies of their gradients are unsharded on each rank.
    - never, where the parameters and the loss vary over the axis: each rank has the gradients of its examples, as
      in `accumulate(loss, 4)(pvary(params, "data"), x)` of a loss without `pmean`.

    Args:
        counted: `f` returns `(total, count)`: a sum over what it counts, as the tokens that have a target, and their
            number, each of all ranks. The value is the sum of the totals divided by the sum of the counts: the mean
            over the full batch, also if the microbatches count different numbers. With `has_aux`,
            `((total, count), aux)`.
        gather: a function of the differentiated argument, called once; `f` gets its result. Its transpose reduces the
            sum of the gradients.

    >>> loss, grads = accumulate(loss_fn, 4)(params, x, y)       # x [4 * b, D], y [4 * b]
    >>> loss, grads = accumulate(loss_fn, 4, gather=lambda p: pvary(p, "data"))(params, x, y)

    Loss and gradients equal those with `steps=1`, on every mesh, also with dropout: by a key that `f` captures or gets
    by keyword, a draw that has the rows of the microbatch has the numbers that these rows have in the draw for the full
    batch. Such a draw has as many entries in dim 0 (or in the dim that the same axes split) as the microbatch has rows;
    in `nn.dropout`, also several for each row, as in [B*T, D]. Any other draw (one number for each layer, noise on a
    parameter) is the same in all microbatches. Which rows a microbatch has depends on the mesh, so that its aux does.

    Raises ShardingError if `steps` does not divide a leaf's dim 0, and for a draw that may have the rows or not: one
    for gathered rows, or by a spec without axes where `f` gets tensors that the region computed.
    """
    if steps < 1:
        raise fail(f"accumulate: steps={steps}", fix="one or more")
    numbers = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    if gather is not None and len(numbers) != 1:
        raise fail(f"accumulate: argnums={argnums}: gather= is a function of one argument", fix="argnums=0")
    name = getattr(f, "__name__", type(f).__name__)
    label = f"accumulate({name})"

    @named_as(f)
    def total_and_rest(*args: Any, **kwargs: Any) -> Any:
        """Return (total, (count, aux)), where a mean is the total of one."""
        total, count, aux = loss_count_aux(label, f(*args, **kwargs), counted, has_aux)
        return total, (count, aux)

    one = value_and_grad(total_and_rest, argnums, has_aux=True)

    @named_as(f)
    @api_boundary
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        _check_argnums(label, numbers, args)
        differentiated = {i % len(args) for i in numbers}
        full, reduce = list(args), None
        if gather is not None:
            differentiable = tree.leaves([args[i] for i in numbers])
            _check_differentiable(f"value_and_grad({name})", numbers, args, differentiable)
            full[numbers[0]], reduce = gathered_with_transpose(label, gather, args[numbers[0]])
        sums: list[Any] = []
        count: Any = 0
        auxes = []
        split = [x for i, a in enumerate(args) if i not in differentiated for x in tree.leaves(a)]
        for step, of_batch in enumerate(microbatches(split, steps)):
            part = [
                a if i in differentiated else split_rows(f"accumulate: args[{i}]", a, step, steps)
                for i, a in enumerate(full)
            ]
            with in_microbatch(of_batch):
                (total, (n, aux)), grads = one(*part, **kwargs)
            count = count + n
            auxes.append(aux)
            flat, treedef = tree.flatten((total, grads))
            del total, grads
            for i, x in enumerate(flat):  # leaf by leaf: two copies of the gradients and one leaf exist, and not three
                sums[i : i + 1] = [sums[i] + x if step else x]
            del flat, x
        loss, grads = tree.unflatten(treedef, sums)
        del sums
        if reduce is not None:
            grads = reduce(grads)
        if counted or steps > 1:
            loss, grads = tree.map(lambda x: divided(x, count), (loss, grads))
        return ((loss, stacked(label, auxes)) if has_aux else loss), grads

    return wrapped


def stacked(label: str, auxes: Sequence[Any]) -> Any:
    """Stack the aux of the microbatches, leaf by leaf."""
    for path, x in tree.leaves_with_path(auxes[0]):
        if not isinstance(x, Tensor):
            raise fail(f"{label}: {tree.show('aux', path)} is {shown(x)}, and cannot be stacked",
                       fix="return tensors: torch.tensor(x)")  # fmt: skip
    return tree.map(lambda *xs: torch.stack(xs), *auxes)


def loss_count_aux(label: str, out: Any, counted: bool, has_aux: bool) -> tuple[Any, Any, Any]:
    """Return the loss, its count, 1 for a mean, and aux, of a result. Raises ShardingError for one of another form."""
    loss, aux = _pair(label, "has_aux", out, "(loss, aux)") if has_aux else (out, None)
    total, count = _pair(label, "counted", loss, "(total, count)") if counted else (loss, 1)
    return total, count, aux


def _pair(label: str, option: str, x: Any, words: str) -> tuple[Any, Any]:
    if not (isinstance(x, tuple) and len(x) == 2):
        raise fail(f"{label}: {option}=True, and the result is {shown(x)}", fix=f"return {words}")
    return x[0], x[1]


def divided(x: Tensor, count: Any) -> Tensor:
    """Return x / count in the dtype of x."""
    # CUDA casts a count on the device to the dtype of x first, and half precision has not all integers.
    wide = x.to(torch.promote_types(x.dtype, torch.float32)) if isinstance(count, Tensor) else x
    out: Tensor = wide / count
    return out.to(x.dtype)


def gathered_with_transpose(label: str, gather: Callable[..., Any], x: Any) -> tuple[Any, Callable[..., Any]]:
    """Return gather(x), and its transposed derivative: `torch.func.vjp`, of any tree."""
    leaves, treedef = tree.flatten(x)
    if not leaves:
        return x, lambda y: y
    treedefs = []

    def of_leaves(*flat: Tensor) -> tuple[Tensor, ...]:
        result = gather(tree.unflatten(treedef, flat))
        out, of_out = tree.flatten(result)
        treedefs.append(of_out)
        if not out:
            raise fail(f"{label}: gather= returned no leaves", fix="return the gathered parameters")
        for path, leaf in tree.leaves_with_path(result):
            check_leaf(f"{label}: {tree.show('the result of gather', path)}", leaf,
                        "gather only what is differentiated, and capture the rest")  # fmt: skip
        return tuple(out)

    vjp: Any = torch.func.vjp  # its result has two types
    out, transposed = vjp(of_leaves, *leaves)
    return tree.unflatten(treedefs[0], out), lambda y: tree.unflatten(treedef, transposed(tuple(tree.leaves(y))))


def split_rows(label: str, arg: Any, step: int, steps: int, others: str = "by keyword") -> Any:
    """Return the part of an argument for one step."""

    def part(path: tree.Path, x: Any) -> Any:
        if not isinstance(x, Tensor) or x.ndim == 0:
            return x
        if x.shape[0] % steps:
            raise fail(f"{tree.show(label, path)} cannot be split into {steps} equal microbatches",
                       f"{x.shape[0]} % {steps} = {x.shape[0] % steps}", shape=list(x.shape),
                       fix=f"another number of steps, or another batch size; what is not split, {others}")  # fmt: skip
        size = x.shape[0] // steps
        return x.narrow(0, step * size, size)

    return tree.map_with_path(part, arg)
