"""Print values of all ranks from inside a region: `print`, a line for each different text."""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard import tree
from fshard._core.display import format_runs
from fshard._core.protocol import coords_of
from fshard._core.region import in_region, live_axes, region
from fshard._core.torch import in_transform, without_functorch, without_modes
from fshard._core.transfers import is_recomputing
from fshard.errors import checked, fail
from fshard.spec import describe, format_number

Coords = tuple[int, ...]


@checked
def print(*values: Any, sep: str = " ") -> None:
    """Print the values of every rank of a region, as a line for each different text, in the order of the ranks.

    Values are texts, tensors of any dtype, or trees of them. A 0-d tensor is printed as a number with all its digits,
    other tensors as torch prints them. Ranks with equal texts share a line, which begins with their coordinates on the
    axes of more than one rank. On processes rank 0 prints for all. An abstract mesh has no values: it prints dtypes and
    shapes, once.

    Every rank must call it, since the texts are gathered (without being in a `recording`): if only some ranks call it,
    that is an error as with any collective, on simulated ranks at once. A recomputation in backward (`remat`, `scan`)
    prints nothing. Under vmap the values of all examples are printed once, with their dim in front. Outside a region it
    prints the values once, as Python's `print` does.

    >>> def total(x):
    ...     fs.print("here", x.sum(), "rows", len(x))
    ...     out = psum(x.sum(), "data")
    ...     fs.print("total", out)
    ...     return out
    >>> f = shard_map(total, mesh=make_mesh(data=4), in_specs=(P("data"),), out_specs=P())
    >>> _ = f(torch.tensor([0.1, 0.1, 0.25, 0.1]))
    [data=0..1,3] here 0.1 rows 1
    [data=2] here 0.25 rows 1
    [data=0..3] total 0.55

    Raises ShardingError in a compiled program, which cannot print.
    """
    if torch.compiler.is_dynamo_compiling():
        raise fail("print: a compiled program cannot print", fix="leave out compile=True, or the fs.print")
    if is_recomputing():
        return
    leaves, treedef = tree.flatten(values)
    tensors = [i for i, x in enumerate(leaves) if isinstance(x, Tensor)]

    def show(*xs: Tensor) -> None:
        texts = dict(zip(tensors, map(_text, xs), strict=True))
        shown = tree.unflatten(treedef, [_Text(texts[i]) if i in texts else x for i, x in enumerate(leaves)])
        text = ""
        for i, x in enumerate(shown):
            text += sep if i else ""
            text += x if type(x) is str else _indented(str(x), len(text.rpartition("\n")[2]))
        _print_by_rank(text)

    with torch.no_grad():
        if tensors and in_transform():
            _Show.apply(show, *[leaves[i] for i in tensors])  # type: ignore[no-untyped-call]
        else:
            show(*[leaves[i] for i in tensors])


class _Text(str):
    """A text in the place of a leaf, with itself as its repr."""

    __repr__ = str.__str__


class _Show(torch.autograd.Function):
    """Call a function with the plain tensors inside the wrappers of torch.func, batch dims in front."""

    @staticmethod
    def forward(show: Callable[..., None], *xs: Tensor) -> Tensor:
        show(*xs)
        return xs[0].new_empty(0, dtype=torch.bool)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> None:
        return None

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], show: Callable[..., None], *xs: Tensor) -> tuple[Any, Any]:
        front = [x if d is None else x.movedim(d, 0) for x, d in zip(xs, in_dims[1:], strict=True)]
        return _Show.apply(show, *front), None  # type: ignore[no-untyped-call]


def _text(x: Tensor) -> str:
    """Format a tensor; a 0-d one as a number, with the digits that its dtype can distinguish."""
    if x.is_meta or (in_region() and not region().comm.has_values):
        return describe(x)
    with without_modes(), without_functorch():  # the checker is a mode, and this is not part of the program
        return str(x.detach()) if x.ndim else format_number(x)


def _print_by_rank(text: str) -> None:
    if not in_region():
        _write([text])
        return
    here = region()
    axes = live_axes(here.comm, tuple(here.sizes)) or tuple(here.sizes)

    def write(texts: Mapping[int, str]) -> None:
        ranks: dict[str, list[Coords]] = {}
        for rank, shown in sorted(texts.items()):
            at = dict(zip(here.sizes, coords_of(rank, list(here.sizes.values())), strict=True))
            ranks.setdefault(shown, []).append(tuple(at[a] for a in axes))
        prefixes = {shown: f"[{'; '.join(_boxes(found, axes))}] " for shown, found in ranks.items()}
        _write([prefix + _indented(shown, len(prefix)) for shown, prefix in prefixes.items()])

    with without_modes(), without_functorch():
        here.comm.with_all_texts(text, "print", here.device, write)


def _indented(text: str, width: int) -> str:
    """Put spaces before the lines of a text but the first."""
    return text.replace("\n", "\n" + " " * width)


def _boxes(found: Iterable[Coords], axes: Sequence[str]) -> list[str]:
    """Describe a set of ranks by their coordinates, as products of sets.

    >>> _boxes([(0, 0), (0, 1), (1, 0), (1, 1), (2, 1)], ["data", "model"])
    ['data=0..1, model=0..1', 'data=2, model=1']
    """
    if not axes:
        return [""]
    firsts: dict[tuple[Coords, ...], list[int]] = {}  # by all that follow them
    for first, group in itertools.groupby(sorted(found), key=operator.itemgetter(0)):
        firsts.setdefault(tuple(coords[1:] for coords in group), []).append(first)
    names = {coords: f"{axes[0]}={format_runs(at, separator=',', dash='..')}" for coords, at in firsts.items()}
    return [", ".join(filter(None, (names[coords], box))) for coords in firsts for box in _boxes(coords, axes[1:])]


def _write(lines: Sequence[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
