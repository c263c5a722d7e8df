"""A train step in one call, in which chosen matrices are updated inside the backward pass, a chunk of rows at a time.

The full gradient of such a matrix never exists, only one chunk at a time. In memory are the matrix, its moments and
the gradient of a chunk.
Its backward pass reads each row once: for the gradient of the input, for the gradient of the matrix, and for its step.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard import tree
from fshard._core.callsite import Site, site
from fshard._core.ops import Map, apply_map
from fshard._core.region import checker, device_type, is_scheduled, storage_key
from fshard._core.torch import in_backward as in_backward_pass
from fshard._core.torch import in_transform
from fshard._core.weight import Part, Weight, is_weight
from fshard.errors import ShardingError, checked, fail, must_be, raise_all
from fshard.grad import value_and_grad
from fshard.spec import P, describe

from . import Optimizer
from .formula import state_owners
from .fused import donation_test
from .partition import partition

_CHUNK = {"cpu": 1 << 20, "cuda": 1 << 24}  # elements of a chunk; on a CPU its weight, gradient and moment fit a cache

_MOST_SHAPES = 64  # chunks where nothing is computed, and an operation on shapes takes longer than one on numbers


@checked
def value_and_update(
    f: Callable[..., Any], opt: Optimizer, *, in_backward: str | Sequence[str], has_aux: bool = False
) -> Callable[..., Any]:
    """Return `(params, state, ...) -> (loss, params, state)`: `value_and_grad` of `f` and `opt.update` in one call.

        f: (params, ...) -> loss [] {I}     parameters and state keep their shapes and types

    The matrices that `in_backward` names are stepped inside the backward pass, a few MB of rows at a time, and no
    gradient of their size exists: in place where parameters and state are donated to `shard_map`, else into new ones.
    The other leaves are stepped after it. The numbers are the same as by `value_and_grad` and `opt.update`, to the
    rounding of a matrix product in parts; the steps themselves are the same bits.

    `f` uses each of these matrices at most once: by `nn.linear(x, w)`, `nn.linear(x, w.mT)` or
    `nn.cosine_logits(x, w)`, after `pvary`, `unshard` over axes that do not split it, and casts. The gradient of each
    chunk is summed over the axes of `pvary`. A matrix that is not used is stepped by a zero gradient. A step is of the
    full batch: there is no accumulation over microbatches.

    Args:
        opt: one whose step is elementwise, as `optim.sgd` and `optim.adamw`, with any schedule and mask. A clip by the
        norm, and a loss scale, need all
            gradients before the first step.
        in_backward: a glob of dotted paths, as `fs.partition` matches them, or several.
        has_aux: `f` returns `(loss, aux)`; then the result is `((loss, aux), params, state)`.

    >>> def loss_fn(p, x, targets):
    ...     return nn.cross_entropy(nn.linear(x, p["fc"]["w"].mT), targets)
    >>> params, opt = {"fc": {"w": torch.ones(3, 2)}}, optim.sgd(0.5, momentum=0.9)
    >>> step = fs.value_and_update(loss_fn, opt, in_backward="fc.w")
    >>> loss, params, state = step(params, opt.init(params), torch.tensor([[1.0, 0.0]]), torch.tensor([2]))
    >>> params["fc"]["w"]
    tensor([[0.8333, 1.0000],
            [0.8333, 1.0000],
            [1.3333, 1.0000]])

    Raises ShardingError for a glob that matches nothing, a leaf that is not a matrix or is tied to another, an
    optimizer that needs full gradients, a matrix that is used twice, by anything else or in a gradient that the loss
    computes itself, one that the result contains, and inside other gradients, vmap, jvp, `remat`, `scan` and compiled
    programs, which run the function in another way.

    Source: Lv et al., 2023, "Full parameter fine-tuning for large language models with limited resources" (LOMO).
    """
    name = getattr(f, "__name__", type(f).__name__)
    label = f"value_and_update({name})"
    globs = [in_backward] if isinstance(in_backward, str) else list(in_backward)
    if not opt.elementwise and globs:
        raise fail(f"{label}: a step of {opt.name} needs the gradients of all leaves, or of full leaves",
                   "in_backward steps each chunk of rows when its gradient appears, before the others exist",
                   fix="only optim.sgd or optim.adamw; or value_and_grad and opt.update")  # fmt: skip

    def wrapped(params: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        if not globs:
            value, grads = value_and_grad(f, has_aux=has_aux)(params, *args, **kwargs)
            return value, *opt.update(grads, state, params)
        _refuse_transforms(f"{label}: what {', '.join(map(repr, globs))} names")
        chosen, rest = _split(label, params, globs)
        leaves, treedef = tree.flatten(params)
        paths = [path for path, _ in tree.leaves_with_path(params)]
        inside = [i for i, x in enumerate(treedef.flatten_up_to(chosen)) if x is not None]
        after = [i for i in range(len(leaves)) if i not in inside]
        optimizer = _Optimizer(label, opt, params, state)
        rows = {i: [leaves[i], *optimizer.moments[i]] for i in range(len(leaves))}
        _check_matrices(label, {tree.show("params", paths[i]): rows[i] for i in inside}, leaves)
        tables = {i: _Table(tree.show("params", paths[i]), rows[i], functools.partial(optimizer.step_one, i))
                  for i in inside}  # fmt: skip

        def loss_fn(rest: Any, tokens: dict[int, Tensor], *args: Any, **kwargs: Any) -> Any:
            full = treedef.flatten_up_to(rest)
            for i, token in tokens.items():
                full[i] = _SteppedMatrix(token, tables[i])
            out = f(tree.unflatten(treedef, full), *args, **kwargs)
            for x in tree.leaves(out, is_leaf=is_weight):
                if isinstance(x, _SteppedMatrix):
                    raise fail(f"{label}: the function returns {x.table.label}, which this call is about to overwrite",
                               fix="leave it out of the result: the call returns the new parameters")  # fmt: skip
            for table in tables.values():
                table.is_loss_known = True
            return out

        loss_fn.__name__ = name
        tokens = {i: table.token() for i, table in tables.items()}
        value, (grads, _) = value_and_grad(loss_fn, (0, 1), has_aux=has_aux)(rest, tokens, *args, **kwargs)
        for table in tables.values():
            table.step_if_unused()
        flat_grads = treedef.flatten_up_to(grads)
        new, shared = optimizer.step({i: [rows[i][0], flat_grads[i], *rows[i][1:]] for i in after})
        return value, *optimizer.trees(new | {i: table.new for i, table in tables.items()}, shared)

    wrapped.__name__ = wrapped.__qualname__ = name  # without __wrapped__: its arguments differ from the arguments of f
    return wrapped


# --- the optimizer on some of the leaves ------------------------------------------------------------------------------

Row = list[Tensor]  # a parameter and its moments; with a gradient, that is second


class _Optimizer:
    """An optimizer whose steps are of some leaves, named by their numbers: the others are None, an empty subtree."""

    def __init__(self, label: str, opt: Optimizer, params: Any, state: Any) -> None:
        self._update = opt.update
        self._params = tree.structure(params)
        self._owners, self._state = state_owners(opt, params)
        state_leaves, structure = tree.flatten(state)
        if structure != self._state:
            raise fail(f"{label}: the state is not that of {opt.name} for these params",
                       fix="state = opt.init(params), and specs of both by opt.specs")  # fmt: skip
        self.moments = self._by_owner(state_leaves)

    def _by_owner(self, state_leaves: Sequence[Any]) -> dict[int | None, list[Any]]:
        """Return the leaves of the state by the number of their parameter; under None the leaves common to all."""
        out: dict[int | None, list[Any]] = defaultdict(list)
        for x, owner in zip(state_leaves, self._owners, strict=True):
            out[owner].append(x)
        return out

    def step(self, rows: dict[int, Row]) -> tuple[dict[int, Row], list[Any]]:
        """Step leaves with their gradients: their new rows, and what the state has for all leaves in common."""
        each = range(self._params.num_leaves)
        params, grads = ([rows[i][k] if i in rows else None for i in each] for k in (0, 1))
        old = self._fill({i: row[1:] for i, row in rows.items()}, self.moments[None])
        new_params, new_state = self._update(tree.unflatten(self._params, grads), old,
                                             tree.unflatten(self._params, params))  # fmt: skip
        flat, moments = self._params.flatten_up_to(new_params), self._by_owner(self._state.flatten_up_to(new_state))
        return {i: [flat[i], *moments[i]] for i in rows}, moments[None]

    def step_one(self, i: int, row: Row) -> Row:
        return self.step({i: row})[0][i]

    def trees(self, rows: dict[int, Row], shared: Sequence[Any]) -> tuple[Any, Any]:
        """Return the parameters and the state of all rows."""
        return tree.unflatten(self._params, [rows[i][0] for i in range(len(rows))]), self._fill(rows, shared)

    def _fill(self, rows: dict[int, Row], shared: Sequence[Any]) -> Any:
        """Return the state with the moments of these rows, from their second tensor on."""
        remaining: dict[int | None, Iterator[Any]] = {
            None: iter(shared),
            **{i: iter(row[1:]) for i, row in rows.items()},
        }
        return tree.unflatten(self._state, [next(remaining[o]) if o in remaining else None for o in self._owners])


# --- a matrix that is stepped by rows ---------------------------------------------------------------------------------


class _Table:
    """A matrix and its moments in one call: where it is used, its step by rows, and the tensors with the new values."""

    def __init__(self, label: str, row: Row, step: Callable[[Row], Row]) -> None:
        self.label, self.old, self._step = label, row, step
        is_donated = donation_test()
        self.new = [x if is_donated(x) else torch.empty_like(x) for x in row]
        self.use: Site | None = None
        self.is_loss_known = self._is_used = self._is_stepped = False

    @property
    def matrix(self) -> Tensor:
        return self.old[0]

    def token(self) -> Tensor:
        """Return an empty view of the matrix: it is differentiated in its place, and has its dtype, name and type."""
        return self.matrix.detach()[:0, :0]

    def chunks(self) -> Iterator[slice]:
        n, width = self.matrix.shape
        most = _CHUNK.get(device_type(self.matrix), 1 << 24)
        step = max(1, min(most, max(n * width // 8, most // 16)) // max(1, width))  # of a small table, an eighth of it
        if not is_scheduled():
            step = max(step, -(-n // _MOST_SHAPES))
        return (slice(at, min(at + step, n)) for at in range(0, n, step))

    def step(self, rows: slice, grad: Tensor) -> None:
        """Step some rows by their gradient, [rows, width]."""
        p, *moments = (x[rows] for x in self.old)
        for new, x in zip(self.new, self._step([p, grad, *moments]), strict=True):
            if storage_key(x) != storage_key(new):  # not in place
                new[rows] = x

    def step_if_unused(self) -> None:
        """Step by a zero gradient where no gradient came, as `value_and_grad` returns for an unused leaf."""
        if not self._is_stepped:
            for rows in self.chunks():
                self.step(rows, torch.zeros_like(self.matrix[rows]))

    def note_use(self) -> None:
        here = site()
        if self._is_used:
            raise fail(f"{self.label} is used twice, and its first gradient would be stepped without the second",
                       f"first   {self.use}", f"second  {here}",
                       fix="use it once, or leave it out of in_backward")  # fmt: skip
        self._is_used, self.use = True, here

    def note_step(self) -> None:
        if not self.is_loss_known:
            raise fail(f"{self.label} would be stepped by a gradient that the loss computes itself",
                       fix="leave it out of in_backward")  # fmt: skip
        if torch.is_grad_enabled():
            raise fail(f"{self.label} is stepped in this backward pass, which cannot be differentiated itself",
                       "a tensor that the loss captured requires a gradient of a caller",
                       fix="pass it in params, or detached")  # fmt: skip
        if self._is_stepped:
            raise fail(f"{self.label} is stepped by the first backward pass through it, and this is a second",
                       fix="one loss: the sum of the losses")  # fmt: skip
        self._is_stepped = True


@dataclass(frozen=True, eq=False, repr=False)
class _SteppedMatrix(Weight):
    """A matrix in the loss, stepped by the backward pass of its one `linear`.

    `token` [0, 0] is what is differentiated: it passes through pvary and casts in the place of the matrix, and its
    graph records them.
    """

    children = ("token",)

    token: Tensor
    table: _Table
    is_transposed: bool = False  # the matrix of linear is the transposed table
    row_map: Callable[[Tensor], Tensor] | None = None

    @property
    def shape(self) -> torch.Size:
        n, width = self.table.matrix.shape
        return torch.Size((width, n) if self.is_transposed else (n, width))

    @property
    def dtype(self) -> torch.dtype:
        return self.token.dtype

    def __repr__(self) -> str:
        return f"{self.table.label}, stepped in backward: {describe(self)}"

    def parts(self, spec: P | None, shape: Sequence[int] | None) -> list[Part]:
        return [(spec, None)]

    def transpose(self, first: int, second: int) -> _SteppedMatrix:
        return self if first % 2 == second % 2 else replace(self, is_transposed=not self.is_transposed)

    def map_rows(self, f: Callable[[Tensor], Tensor]) -> _SteppedMatrix:
        """Return the table with a function of each row, which is differentiated chunk by chunk."""
        if self.row_map is not None or self.is_transposed:
            raise self._refused("a function of rows")
        return replace(self, row_map=f)

    def linear(self, x: Tensor, b: Tensor | None = None) -> Tensor:
        """Compute x @ w + b, as `nn.linear`; its backward pass steps w."""
        _refuse_transforms(self.table.label)
        if x.shape[-1:] != self.shape[:1]:  # a product in parts would not see columns of x beyond the rows of w
            raise fail(f"linear: x is {list(x.shape)}, and {self.table.label} is used as {list(self.shape)}",
                       fix="x [..., D], w [D, F]; a table of classes [C, D] is used as w.mT")  # fmt: skip
        x, token, b = _autocast(x), _autocast(self.token), None if b is None else _autocast(b)
        w = replace(self, token=token)
        if not torch.is_grad_enabled():
            return _linear(x, b, w)
        self.table.note_use()
        if not token.requires_grad:  # detached by the loss: no gradient reaches it
            return _linear(x, b, w)
        transposes = _transposes(self.table, token)
        if checker() is not None:  # nothing is differentiated inside a Function: show the checker what mixes here
            F.linear(x[..., :0], token)
        y: Tensor = _Linear.apply(x, token, b, w, transposes)  # type: ignore[no-untyped-call]
        return y

    def rows(self, which: slice) -> Tensor:
        """Return rows of the table as linear uses them."""
        x = self.table.matrix[which].to(self.dtype)
        return x if self.row_map is None else self.row_map(x)

    def rows_and_pullback(self, which: slice) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Return `rows`, and the function from their gradient to the gradient of the table's rows."""
        if self.row_map is None:
            return self.rows(which), lambda grad: grad
        with torch.enable_grad():
            x = self.table.matrix[which].detach().to(self.dtype).requires_grad_()
            y = self.row_map(x)
        return y.detach(), lambda grad: torch.autograd.grad(y, x, grad)[0]


def _autocast(x: Tensor) -> Tensor:
    """Cast an operand as `torch.autocast` does, if it is on: the backward pass has the casts, and runs without it."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def _linear(x: Tensor, b: Tensor | None, w: _SteppedMatrix) -> Tensor:
    """Compute x @ w + b: x [..., D], w [D, F] -> [..., F]."""
    matrix = w.table.matrix
    if w.row_map is None and w.dtype == matrix.dtype:
        return F.linear(x, matrix if w.is_transposed else matrix.mT, b)
    chunks = list(w.table.chunks()) or [slice(0)]  # of an empty table too: the result varies as the others' does
    if w.is_transposed:
        # Into one tensor: parts kept for a `cat` would lie between the rows made for each chunk, and malloc could not
        # reuse that memory: the process would grow by a full table.
        out = x.new_empty(*x.shape[:-1], w.shape[1])
        for rows in chunks:
            out[..., rows] = F.linear(x, w.rows(rows), None if b is None else b[rows])
        return out
    sums = x.new_zeros(*x.shape[:-1], w.shape[1], dtype=_wide(x))
    for rows in chunks:
        sums = sums + x[..., rows] @ w.rows(rows)
    return (sums if b is None else sums + b).to(x.dtype)


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype in which sums of products of chunks are kept."""
    return torch.promote_types(x.dtype, torch.float32)


class _Linear(torch.autograd.Function):
    """x @ w + b, whose backward pass computes the gradient of x and steps w, in one pass over the rows of its table.

    Legend: N rows of x, D its width, F the outputs, C a chunk of the table's rows.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, token: Tensor, b: Tensor | None, w: _SteppedMatrix,
        transposes: Sequence[Callable[[Tensor], Tensor]],
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x)
        ctx.w, ctx.transposes = w, transposes
        return _linear(x, b, w)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        (x,), w = ctx.saved_tensors, ctx.w
        w.table.note_step()
        n = math.prod(x.shape[:-1])
        x2, dy2 = x.reshape(n, x.shape[-1]), dy.reshape(n, dy.shape[-1])  # [N, D], [N, F]
        needs_dx, _, needs_db, *_ = ctx.needs_input_grad
        dx = x2.new_zeros(x2.shape, dtype=_wide(x)) if needs_dx else None
        for rows in w.table.chunks():
            part, pullback = w.rows_and_pullback(rows)  # [C, D] of a transposed table, else [C, F]
            if w.is_transposed:
                if dx is not None and dx.dtype == part.dtype:
                    dx.addmm_(dy2[:, rows], part)
                elif dx is not None:
                    dx += dy2[:, rows] @ part
                grad = dy2[:, rows].mT @ x2
            else:
                if dx is not None:
                    dx[:, rows] = (dy2 @ part.mT).to(dx.dtype)
                grad = x2[:, rows].mT @ dy2
            grad = pullback(grad)
            for transpose in ctx.transposes:
                grad = transpose(grad)
            w.table.step(rows, grad.to(w.table.matrix.dtype))
            del part, pullback, grad  # before the next chunk is made
        dx = None if dx is None else dx.to(x.dtype).view(x.shape)
        return dx, None, dy2.sum(0) if needs_db else None, None, None


def _transposes(table: _Table, token: Tensor) -> list[Callable[[Tensor], Tensor]]:
    """Return the transposes of the maps through which a token was passed, the last map's first."""
    out: list[Callable[[Tensor], Tensor]] = []
    node: Any = token.grad_fn
    at = token.output_nr
    while node is not None and not hasattr(node, "variable"):
        m = getattr(node, "map", None)
        if isinstance(m, Map) and m.verb == "pvary":
            out.append(functools.partial(_apply_one, replace(m.transpose.only([at]), origin=node.origin)))
        elif node.name() == "ToCopyBackward0":
            out.append(lambda grad: grad.to(table.matrix.dtype))
        else:
            verb = m.verb if isinstance(m, Map) else node.name()
            raise fail(f"{table.label} passes through {verb} before nn.linear",
                       "a step in chunks of rows follows only pvary and casts: all else needs the full gradient",
                       fix="leave it out of in_backward; or split it over other axes")  # fmt: skip
        node, at = node.next_functions[at]
    return out


def _apply_one(m: Map, x: Tensor) -> Tensor:
    return apply_map(m, [x])[0]


# --- checks -----------------------------------------------------------------------------------------------------------


def _split(label: str, params: Any, globs: Sequence[str]) -> tuple[Any, Any]:
    try:
        return partition(params, globs)
    except ShardingError as e:
        text = str(e).replace("partition: rules", f"{label}: in_backward").replace("partition: ", f"{label}: ")
        raise ShardingError(text.replace("leaf of the tree", "leaf of params")) from None


def _refuse_transforms(what: str) -> None:
    if torch.compiler.is_dynamo_compiling() or in_transform() or in_backward_pass():
        raise fail(f"{what} cannot be stepped in the backward pass of a compiled program, of another gradient, of vmap "
                   "or jvp, or inside remat and scan, which run the function in another way",
                   fix="leave it out of in_backward, or use value_and_grad and opt.update")  # fmt: skip


def _check_matrices(label: str, rows: dict[str, Row], leaves: Sequence[Any]) -> None:
    """Raise for leaves that cannot be stepped by rows, all at once."""
    shared = Counter(storage_key(x) for x in leaves if isinstance(x, Tensor) and x.numel())
    errors = []
    for path, (x, *moments) in rows.items():
        if not isinstance(x, Tensor):
            errors.append(must_be(f"{label}: in_backward: {path}", "a tensor", x, "a call inside shard_map"))
            continue
        if not x.is_floating_point() or x.ndim != 2:
            errors.append(fail(f"{label}: in_backward: {path} is {describe(x)}, and no matrix of real numbers",
                               fix="name only matrices: others are stepped after the backward pass"))  # fmt: skip
            continue
        errors += [fail(f"{label}: in_backward: {path} is {describe(x)}, and a moment of it {describe(m)}, "
                        "which has not its rows",
                        fix="moments placed as their parameter, by opt.specs; or leave it out of in_backward")
                   for m in moments if m.shape != x.shape]  # fmt: skip
        if shared[storage_key(x)] > 1:
            errors.append(fail(f"{label}: in_backward: {path} shares its memory with another leaf of params",
                               fix="untie them, or leave both out of in_backward"))  # fmt: skip
    raise_all(errors)
