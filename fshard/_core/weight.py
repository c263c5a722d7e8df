"""A parameter used in place of a matrix, and made of several tensors: adapted, or quantized.

A `Weight` is a node of the tree: all that flattens trees (`unshard`, `scan`, `remat`, gradients) sees its tensors.
Models use a matrix by `nn.linear`, `nn.embedding`, `flatten` and `transpose` only, and so take a Weight in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fshard.errors import ShardingError, fail
from fshard.spec import Axis, P
from fshard.tree import Node, leaves

Part = tuple[P | None, tuple[int, ...] | None]  # the spec and the global shape of a tensor, if known


class Weight(Node):
    """Base of parameters of several tensors. A subclass is a frozen dataclass that names its `children`.

    In a tree of specs, or of described leaves, one `P` and one shape describe a Weight: the matrix's, which it
    replaces. `parts` makes the specs and the shapes of its tensors from them.
    """

    @property
    def shape(self) -> torch.Size:
        """The shape of the matrix: local, inside `shard_map`."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the matrix."""
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def parts(self, spec: P | None, shape: Sequence[int] | None) -> list[Part]:
        """Return the spec and the global shape of each tensor, from the matrix's, in the order of the leaves.

        `unshard` and `scan` leave a tensor without a spec unchanged: a key.
        """
        raise NotImplementedError

    def dense(self) -> Tensor:
        """Return the matrix as one tensor."""
        raise self._refused("dense")

    def linear(self, x: Tensor, b: Tensor | None = None) -> Tensor:
        """Compute x @ w + b, as `nn.linear`."""
        raise self._refused("linear")

    def embed(
        self, ids: Tensor, *, axis: Axis = None, size: int | None = None, padding_idx: int | None = None
    ) -> Tensor:
        """Look up rows, as `nn.embedding`."""
        raise self._refused("embedding")

    def flattened(self, inputs: int, start: int, end: int) -> tuple[int, int, int]:
        """Return the first and the last dim of a `flatten`, and the number of input dims, now `inputs`, after it.

        Raises ShardingError for dims that are partly inputs and partly outputs.
        """
        end = end + self.ndim if end < 0 else end
        if start < inputs <= end:
            raise fail(f"flatten: dims {start} to {end} of {list(self.shape)} are inputs and outputs",
                       fix="flatten the inputs, or the outputs", inputs=inputs)  # fmt: skip
        return start, end, inputs - (end - start if end < inputs else 0)

    def flatten(self, start: int = 0, end: int = -1) -> Any:
        """Return the Weight of the matrix with some of its dims as one, as `Tensor.flatten`."""
        raise self._refused("flatten")

    def transpose(self, first: int, second: int) -> Any:
        """Return the transposed matrix, for a head that is tied to a table of embeddings."""
        raise self._refused("transpose")

    @property
    def mT(self) -> Any:  # noqa: N802  torch's name
        """The transposed matrix, as `Tensor.mT`."""
        return self.transpose(-2, -1)

    def map_rows(self, f: Callable[[Tensor], Tensor]) -> Any:
        """Return the Weight of the matrix after a function of each row."""
        raise self._refused("a function of the rows")

    def __getitem__(self, index: Any) -> Any:
        raise self._refused("[]")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a protocol that Python or a library asks for
            raise AttributeError(name)
        raise AttributeError(str(self._refused(f".{name}")))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        used = next(x for x in leaves((args, kwargs), is_weight) if isinstance(x, Weight))
        raise used._refused(getattr(func, "__name__", "a function of torch"))

    def _refused(self, operation: str) -> ShardingError:
        name = f"{type(self).__name__}{list(self.shape)}"
        return fail(f"{operation}: {name} is not a tensor", "only nn.linear, nn.embedding and flatten accept it",
                    fix="a model that uses it by these; or leave this parameter unchanged")  # fmt: skip


def is_weight(x: object) -> bool:
    """Return whether an object is a Weight: the `is_leaf` of trees in which each is one leaf."""
    return isinstance(x, Weight)


@dataclass(frozen=True)
class Leaf:
    """A leaf as adapters see it: its module, its name there, and, of a matrix, its layout.

    Attributes:
        module: the dotted name of the module, which targets are matched with.
        part: "weight", "bias", or another name.
        layout: "io" for a matrix [in.., out..], "oi" for one [out, in], "table" for embeddings [in, out] that are
            looked up; "sum_io", "sum_oi" for [in, out] and [out, in], or a stack of them, that a module may use in any
            way, and which an adapter is added to; None for a leaf that is not a matrix.
        inputs: the number of input dims.
        why: the reason why it is not a matrix.

    >>> Leaf("layers.0.mlp.down", "w", "io")
    Leaf(module='layers.0.mlp.down', part='w', layout='io', inputs=1, why='')
    """

    module: str
    part: str
    layout: Literal["io", "oi", "table", "sum_io", "sum_oi"] | None = None
    inputs: int = 1
    why: str = ""

    def split(self, entries: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Split one entry for each dim of the leaf into entries of inputs and of outputs; both have a stack's dim."""
        if self.is_summed:
            stack, (ins, outs) = entries[:-2], split_dims(entries[-2:], 1, str(self.layout)[-2:])
            return (*stack, *ins), (*stack, *outs)
        return split_dims(entries, self.inputs, self.layout)

    @property
    def is_summed(self) -> bool:
        """Tell whether the sum of the leaf and its adapter is built."""
        return str(self.layout).startswith("sum")


def split_dims(entries: tuple[Any, ...], inputs: int, layout: str | None) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split one entry for each dim of a matrix into entries of its input dims and of its output dims."""
    first, second = entries[:inputs], entries[inputs:]
    return (second, first) if layout == "oi" else (first, second)
