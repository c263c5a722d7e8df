"""Pure functions in the place of submodules of any `nn.Module`, for `fs.defer(replace=)`.

Legend: D inputs, F outputs, V vocabulary; [F@axis] is a dim split over an axis; {V} varies over it, {I} does not.
torch's Linear stores [F, D], and transformers' Conv1D [D, F]: each split is along the dim of that layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard.collectives import pslice
from fshard.errors import checked, fail
from fshard.spec import P

from .layers import Product, add_bias, column_product, embedding, row_product

Axes = str | tuple[str, ...]
Form = Literal["whole", "split"]


@checked
@dataclass(frozen=True)
class Replacement:
    """A pure function in the place of the forward of submodules, and the specs of their parameters.

    `fs.defer(constructor, replace={glob: replacement})` uses it; `column_linear` and others make one. To write another:

        def forward(leaves, x, *, of):          # inside shard_map
            h = nn.layer_norm(x, leaves["weight"], leaves["bias"], eps=of.eps)
            return h

    Attributes:
        name: as errors show it.
        takes: the classes of the modules that it may replace; of a library that may not be installed, their names. A
            subclass takes part if it has the forward of the class.
        specs: from the module to the spec of each parameter that is split, by its name in the module; P() of the
            others. It raises ShardingError for a module that the function cannot replace. The values of parameters are
            not known to it.
        forward: from `(leaves, *args, of=module, **kwargs)` to the result. `leaves` are the parameters of the module
            and of its submodules, by name, as this rank has them; `of` is the module, for its attributes, its buffers,
            and the global shapes of its parameters (`of.weight.shape`). Its result has the type that the modules after
            it need: as a rule the same on all ranks of the axes that split its parameters.
        input: "whole" if its arguments are the same on all of these ranks, which a checked call makes sure of; "split"
            if each rank has a part.

    >>> halves = nn.Replacement("halves", (torch.nn.PReLU,), lambda of: {"weight": P("model")},
    ...                         lambda leaves, x, *, of: torch.nn.functional.prelu(x, leaves["weight"]))
    """

    name: str
    takes: tuple[type[torch.nn.Module] | str, ...]
    specs: Callable[[torch.nn.Module], Mapping[str, P]]
    forward: Callable[..., Any]
    input: Form = "whole"

    def __repr__(self) -> str:
        return self.name


@checked
def column_linear(axis: Axes, *, out: Form = "whole") -> Replacement:
    """Replace linear layers by one whose outputs are split: x [..., D]{I} -> [..., F]{I}.

        torch.nn.Linear: weight [F@axis, D], bias [F@axis]      transformers' Conv1D: weight [D, F@axis], bias [F@axis]
        cost: all_gather of the outputs; backward, psum of the gradient of x

    With `out="split"` the outputs stay split, [..., F@axis]{V}, without the gather: for a loss with `axis=`, or where
    the modules that follow work element by element, or by head, until a `row_linear(axis, input="split")`.

    >>> apply, tree = fs.defer(lambda: torch.nn.Sequential(torch.nn.Linear(4, 10)),
    ...                        replace={"0": nn.column_linear("model")})
    >>> apply.specs["params"]
    {'0.weight': P('model'), '0.bias': P('model')}
    """
    return _built_in("column_linear", _LINEAR, _column_specs, _column_linear, axis, out=out)


@checked
def row_linear(axis: Axes, *, input: Form = "whole") -> Replacement:
    """Replace linear layers by one whose inputs are split: x [..., D]{I} -> [..., F]{I}.

        torch.nn.Linear: weight [F, D@axis], bias [F]      transformers' Conv1D: weight [D@axis, F], bias [F]
        cost: psum of the outputs; backward, all_gather of the gradient of x

    Each rank takes its part of x. With `input="split"` it has that part already, x [..., D@axis]{V}: of a
    `column_linear(axis, out="split")` before. Then backward needs no communication. The bias is added once, to the sum.

    >>> up, down = nn.column_linear("model", out="split"), nn.row_linear("model", input="split")
    >>> mlp = lambda: torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    >>> apply, tree = fs.defer(mlp, replace={"0": up, "2": down})
    >>> apply.specs["params"]
    {'0.weight': P('model'), '0.bias': P('model'), '2.weight': P(None, 'model'), '2.bias': P()}

    Source: Shoeybi et al., 2019, "Megatron-LM".
    """
    forward = _row_linear if input == "whole" else _row_linear_of_parts
    return _built_in("row_linear", _LINEAR, _row_specs, forward, axis, input)


@checked
def row_embedding(axis: Axes) -> Replacement:
    """Replace tables of embeddings by one whose rows are split: ids [...]{I} -> [..., D]{I}, table [V@axis, D].

        cost: psum of the result; backward none

    The row of `padding_idx` gets no gradient, as in torch. An id outside of the table gives NaN. A linear head that
    shares the table has the same spec by `column_linear`: replace both.

    >>> apply, tree = fs.defer(lambda: torch.nn.Sequential(torch.nn.Embedding(10, 4)),
    ...                        replace={"**": nn.row_embedding("model")})
    >>> apply.specs["params"]
    {'0.weight': P('model')}

    Raises ShardingError, in `fs.defer`, for a table with `max_norm`, `scale_grad_by_freq` or `sparse`.
    """
    return _built_in("row_embedding", _TABLE, *_ROWS, axis)


@checked
def column_embedding(axis: Axes, *, out: Form = "whole") -> Replacement:
    """Replace tables of embeddings by one whose columns are split: ids [...]{I} -> [..., D]{I}, table [V, D@axis].

        cost: all_gather of the result; backward none

    With `out="split"` the result stays split, [..., D@axis]{V}.

    >>> apply, tree = fs.defer(lambda: torch.nn.Sequential(torch.nn.Embedding(10, 4)),
    ...                        replace={"**": nn.column_embedding("model")})
    >>> apply.specs["params"]
    {'0.weight': P(None, 'model')}

    Raises ShardingError, in `fs.defer`, for a table with `max_norm`, `scale_grad_by_freq` or `sparse`.
    """
    return _built_in("column_embedding", _TABLE, *_COLUMNS, axis, out=out)


_LINEAR: Any = (torch.nn.Linear, "Conv1D")
_TABLE: Any = (torch.nn.Embedding,)


@functools.cache  # equal arguments give equal replacements
def _built_in(
    name: str, takes: Any, specs: Callable[..., Any], forward: Callable[..., Any], axis: Axes, input: Form = "whole",
    **out: Form,
) -> Replacement:  # fmt: skip
    P(axis)  # its errors
    forms = {"input": input, **out}
    shown = ", ".join([repr(axis), *(f"{key}={value!r}" for key, value in forms.items() if value != "whole")])
    return Replacement(f"{name}({shown})", takes, functools.partial(specs, axis=axis),
                       functools.partial(forward, axis=axis, **out), input)  # fmt: skip


# --- linear layers ----------------------------------------------------------------------------------------------


def _dims(of: Any) -> tuple[int, int]:
    """Return the dims of inputs and of outputs in the weight of a linear layer: torch's is [F, D], Conv1D's [D, F]."""
    return (1, 0) if isinstance(of, torch.nn.Linear) else (0, 1)


def _column_specs(of: Any, *, axis: Axes) -> dict[str, P]:
    weight = _split(_dims(of)[1], axis)
    return {"weight": weight} if of.bias is None else {"weight": weight, "bias": P(axis)}


def _row_specs(of: Any, *, axis: Axes) -> dict[str, P]:
    return {"weight": _split(_dims(of)[0], axis)}


def _split(dim: int, axis: Axes) -> P:
    return P(*[None] * dim, axis)


def _product(leaves: Mapping[str, Tensor], of: Any) -> Product:
    w = leaves["weight"]
    return lambda x, b: F.linear(x, w, b) if isinstance(of, torch.nn.Linear) else add_bias(torch.matmul(x, w), b)


def _check_inputs(x: Tensor, expected: int, fix: str) -> None:
    if x.shape[-1] != expected:
        raise fail(f"its input has {x.shape[-1]} features here, not {expected}", input=list(x.shape), fix=fix)


def _column_linear(leaves: Mapping[str, Tensor], input: Tensor, *, of: Any, axis: Axes, out: Form) -> Tensor:
    inputs, outputs = (of.weight.shape[d] for d in _dims(of))
    _check_inputs(input, inputs, "features that an axis splits are the input of row_linear(axis, input='split')")
    return column_product(_product(leaves, of), input, leaves.get("bias"), axis, out=out, size=outputs)


def _row_linear(leaves: Mapping[str, Tensor], input: Tensor, *, of: Any, axis: Axes) -> Tensor:
    _check_inputs(input, of.weight.shape[_dims(of)[0]], "input='split', if the layer before has out='split'")
    return row_product(_product(leaves, of), pslice(input, axis, -1), leaves.get("bias"), axis, out="whole")


def _row_linear_of_parts(leaves: Mapping[str, Tensor], input: Tensor, *, of: Any, axis: Axes) -> Tensor:
    inputs = leaves["weight"].shape[_dims(of)[0]]
    _check_inputs(input, inputs, "out='split' for the layer before, or leave input= out")
    return row_product(_product(leaves, of), input, leaves.get("bias"), axis, out="whole")


# --- tables -----------------------------------------------------------------------------------------------------


def _table_specs(of: Any, *, dim: int, axis: Axes) -> dict[str, P]:
    for name, value, why in (
        ("max_norm", of.max_norm, "forward writes the scaled rows to the table: no pure function does"),
        ("scale_grad_by_freq", of.scale_grad_by_freq, "it divides gradients by the counts of one rank's batch"),
        ("sparse", of.sparse, "gradients of leaves are dense"),
    ):
        if value is not None and value is not False:
            raise fail(f"it has {name}={value}", why, fix=f"construct it without {name}")
    return {"weight": _split(dim, axis)}


def _embedding(
    leaves: Mapping[str, Tensor], input: Tensor, *, of: Any, dim: int, axis: Axes, out: Form = "whole"
) -> Tensor:
    return embedding(input, leaves["weight"], axis=axis, size=of.weight.shape[dim], padding_idx=of.padding_idx,
                     split="column" if dim else "row", out=out)  # fmt: skip


_ROWS, _COLUMNS = ([functools.partial(f, dim=dim) for f in (_table_specs, _embedding)] for dim in (0, 1))
