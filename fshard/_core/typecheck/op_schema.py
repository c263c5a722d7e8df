"""Facts about operations of torch, read from their schemas: which tensors one reads and writes, and if it is random."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fshard._core.operations import tensors_in, written_arguments
from fshard._core.torch import schema_of

# The result has the shape or dtype of an argument, and none of its values.
_CONSTANT = {
    "zeros_like", "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full",
    "new_empty_strided", "_efficientzerotensor", "_new_zeros_with_same_feature_meta",
}  # fmt: skip
_LIKE = {"zeros_like", "ones_like", "empty_like", "full_like"}  # it also has a value for each of the argument's
_COMPARES = {  # the result has no gradient
    "eq", "ne", "lt", "le", "gt", "ge", "isclose", "equal", "isin", "bucketize", "searchsorted", "logical_and",
    "logical_or", "logical_xor", "is_same_size", "_has_same_storage_numel",
}  # fmt: skip
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}
_SAME_VALUES = {"_to_copy", "clone", "contiguous", "detach", "alias"}  # in the same storage or in another
_USER_NAMES = {
    "mm": "matmul", "bmm": "matmul", "addmm": "matmul", "baddbmm": "matmul", "t": "transpose",
    "native_layer_norm": "layer_norm",
}  # fmt: skip
_COMPLETED_BY = {  # the collective that completes a result where an axis splits a dim that the operation reduces
    **dict.fromkeys(("sum", "matmul", "dot", "vdot", "mv", "count_nonzero"), "psum"),
    "mean": "pmean", "mse_loss": "pmean", "nll_loss_forward": "pmean",
    "amax": "pmax", "max": "pmax", "amin": "pmin", "min": "pmin",
    **dict.fromkeys(("argmax", "argmin", "logsumexp", "softmax", "log_softmax", "topk", "sort", "argsort", "median",
                     "var", "var_mean", "std", "linalg_vector_norm", "cumsum", "prod", "all", "any"), "all_gather"),
}  # fmt: skip
_OF_SOME_VALUE = {"amax", "amin", "aminmax", "argmax", "argmin", "max", "min"}  # have no result without a value
_SHAPES = {"size", "stride", "shape", "split_sizes"}
_SHARED_SCALARS = {"lr", "state_steps", "grad_scale", "found_inf"}  # of a fused step: no gradients, used by every row

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Operation:
    """One overload of one operation. An operator that takes functions has no schema, only a name, and so has `None`."""

    def __init__(self, func: Any, name: str = "") -> None:
        is_known = func is not None and func.namespace != "higher_order"
        schema = schema_of(func) if is_known else SimpleNamespace(name=name or str(func), arguments=(), returns=())
        tags, writes = (func.tags, written_arguments(func)) if is_known else ((), [])
        schema_name, arguments = schema.name.split("::")[-1], schema.arguments
        self.func = func
        self.namespace = getattr(func, "namespace", "aten")
        self.name = name = _user_name(schema_name)  # as a user calls it
        self.constant = schema_name in _CONSTANT  # the result has no values of the arguments
        self.like = schema_name in _LIKE  # a `constant` that has a value for each of the argument's
        # The argument was made just now, by no operation: torch.tensor, torch.from_numpy.
        self.fresh = schema_name == "lift_fresh"
        self.compares = schema_name in _COMPARES
        self.pointwise = torch.Tag.pointwise in tags
        self.completed_by = _COMPLETED_BY.get(name)  # the collective that completes a result of a part of a dim
        # The result has the values of the first argument, or some of them; with `copies` in separate memory.
        aliases = [r.alias_info for r in schema.returns if r.alias_info is not None]
        self.view = schema_name in _SAME_VALUES or any(not a.is_write for a in aliases)
        self.copies = schema_name in ("clone", "_to_copy", "contiguous")
        self.writes = [(i, a.name) for i, a in writes]  # positions and names of the arguments that are written
        # It does not read the arguments that it writes.
        self.overwrites = schema_name in _OVERWRITES or (bool(writes) and all(a.kwarg_only for _, a in writes))
        self.writes_statistics = name.endswith("batch_norm")  # in training: its schema does not mark them
        # It computes row i of its results from row i of each list of tensors.
        self.on_lists = schema_name.startswith(("_foreach_", "_fused_")) and _is_list(arguments[0])
        lists_written = [a for _, a in writes if _is_list(a) and a.name not in _SHARED_SCALARS]
        self.lists_written = len(lists_written) if self.on_lists else 0
        self.of_some_value = name in _OF_SOME_VALUE  # it has no result of an argument without elements
        self.is_random = torch.Tag.nondeterministic_seeded in tags
        self._rates = ("dropout_p", "dropout", *(["p"] if "dropout" in schema_name else []))  # arguments
        # Name and default of each argument; whether it is a shape.
        self.arguments = [(a.name, a.default_value, a.name in _SHAPES) for a in arguments]

    def written(self, args: Args, kwargs: Kwargs) -> list[Tensor]:
        """Return the tensors that a call writes in place."""
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in self.writes]
        if self.writes_statistics and len(args) > 5 and args[5] is True:
            written += args[3:5]
        return tensors_in(*written)

    def lacks_a_value(self, args: Args, kwargs: Kwargs) -> bool:
        """Return whether a call has no value to choose; torch's fake tensors do not refuse a `max` or `min` of none."""
        if not self.of_some_value or args[0].numel():
            return False
        dim = self._values(args, kwargs).get("dim")
        dims = [dim] if isinstance(dim, int) else dim
        return not dims or any(args[0].shape[d] == 0 for d in dims)

    def uses_torch_generator(self, args: Args, kwargs: Kwargs) -> bool:
        """Return whether a call of a random operation draws from torch's generator."""
        values = self._values(args, kwargs)
        if values.get("generator") is not None or values.get("training") is False:
            return False
        if any(x.is_meta for x in args if isinstance(x, Tensor)):  # nothing is drawn on meta
            return False
        rate = next((name for name, *_ in self.arguments if name in self._rates), None)
        return rate is None or (values.get(rate, 0.0) > 0 and values.get("train", True) is not False)

    def completing(self, args: Args, kwargs: Kwargs) -> str:
        """Return the collective that completes the result of a call; of a loss it depends on the reduction."""
        of_sum = self.completed_by == "pmean" and self._values(args, kwargs).get("reduction") == 2
        return "psum" if of_sum else self.completed_by or ""

    def reduced_dim(self, args: Args, kwargs: Kwargs) -> int | None:
        """Return the dim that a call reduces; `None` for all or several."""
        dim = self._values(args, kwargs).get("dim")
        dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
        return dim if isinstance(dim, int) else None

    def numbers(self, args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
        """Return the Python numbers of a call, defaults included, but not the sizes of the result."""
        numbers: list[Any] = []
        given = len(args)
        for i, (name, default, is_shape) in enumerate(self.arguments):
            x = args[i] if i < given else kwargs.get(name, default)
            if x is None or type(x) is Tensor:  # the usual case, made fast
                continue
            if isinstance(x, (list, tuple)) and not is_shape:
                numbers += [y for y in x if isinstance(y, (bool, int, float, complex))]
            elif isinstance(x, (bool, int, float, complex)):
                numbers.append(x)
        return tuple(numbers)

    def _values(self, args: Args, kwargs: Kwargs) -> dict[str, Any]:
        """Return the arguments of a call by name."""
        return {**dict(zip((name for name, _, _ in self.arguments), args, strict=False)), **kwargs}

    def read(self, args: Args, kwargs: Kwargs) -> list[Tensor]:
        """Return the tensors that a call reads."""
        if self.fresh:
            return []
        if not self.overwrites:
            return tensors_in(*args, *kwargs.values()) if kwargs else tensors_in(*args)
        positions, names = {i for i, _ in self.writes}, {name for _, name in self.writes}
        positional = [x for i, x in enumerate(args) if i not in positions]
        return tensors_in(positional, {name: x for name, x in kwargs.items() if name not in names})

    def rows(self, args: Args, kwargs: Kwargs) -> list[list[Tensor]]:
        """Return the tensors of each row of the lists, those that are written first."""
        values = [x for name, x in self._values(args, kwargs).items() if name not in _SHARED_SCALARS]
        lists = [x for x in values if isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor)]
        n = len(lists[0]) if lists else 0
        in_every_row = [x for x in values if isinstance(x, Tensor)]
        return [[*(x[i] for x in lists if len(x) == n), *in_every_row] for i in range(n)]


_operations: dict[int, Operation] = {}  # by the id of an OpOverload, whose hash is a method in Python


def operation(func: Any) -> Operation:
    """Return the facts about `func`, an OpOverload or an operator that takes functions."""
    return _operations.get(id(func)) or _operations.setdefault(id(func), Operation(func))


def _is_list(argument: Any) -> bool:
    return "List[Tensor]" in str(argument.type)


def _user_name(name: str) -> str:
    if "scaled_dot_product" in name:
        return "attention" if "backward" not in name else "the backward of attention"
    return _USER_NAMES.get(name, name.strip("_"))
