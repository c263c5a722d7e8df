"""Contexts in which the ranks of a call run: eagerly while it is checked, and with more to say about their errors."""

from __future__ import annotations

import ast
import contextlib
import functools
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fshard._core import callsite
from fshard._core.torch import FakeTensor
from fshard.errors import ShardingError, fail, users_frames
from fshard.spec import box_shape, format_tensor, local_box

from .plan import CallPlan


class _ForceEager:
    """A context that any thread may enter: `torch.compile` does nothing while at least one thread is inside.

    The compiler's stance belongs to the process, and leaving it restores the stance found on entering it. Calls
    that overlap would restore each other's, so the first to enter sets the stance and the last to leave restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._stance is None and "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")
            self._calls += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls == 0 and self._stance is not None:
                stance, self._stance = self._stance, None
                stance.__exit__(None, None, None)


force_eager = _ForceEager()

_log_of_fake_tensors = logging.getLogger(FakeTensor.__module__)


def _is_no_failure(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith("failed while attempting to run meta")


_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@contextlib.contextmanager
def explain_missing_values(
    why: str = "an abstract mesh has no data",
    instead: str = '; or check with data, by fs.shard_map(..., check="always")',
) -> Iterator[None]:
    """Replace the error of an operation that needs values, on a fake tensor, by one that names the user's line.

    Torch logs the traceback of each failed operation, too, before its error: that log is left out.
    """
    is_outermost = _is_no_failure not in _log_of_fake_tensors.filters
    _log_of_fake_tensors.addFilter(_is_no_failure)
    try:
        yield
    except RuntimeError as e:
        tags = getattr(getattr(e, "func", None), "tags", ())  # of the operation that a fake tensor refused
        if _NEEDS_VALUES.isdisjoint(tags):
            raise
        site = _user_site(e)
        line = f"{site}: " if site is not None else ""
        raise fail(
            f"{line}{why}, and this operation needs the value of a tensor: {e}",
            fix=f"keep it a tensor (torch.where, indexing by tensors){instead}",
        ) from e
    finally:
        if is_outermost:
            _log_of_fake_tensors.removeFilter(_is_no_failure)


_ABOUT_SHAPES = re.compile(r"shape|size|dim|broadcast|element|\dd\b|index out of range in self", re.IGNORECASE)
_MOST_LEAVES = 6


def explain_shapes(plan: CallPlan, e: Exception) -> None:
    """Add to an error about shapes the arguments that may be involved: their global shapes, specs and local shapes.

    The error stays what it is, with its type and traceback; the note comes after its text. Without an argument that is
    split there is no note: the function raises the same error on one device.
    """
    if isinstance(e, RuntimeError) and "does not require grad and does not have a grad_fn" in str(e):
        raise fail(f"{_user_site(e)}: backward() of a result of tensors that require no gradient",
                   f"the arguments of {plan.name} are parts of leaves, without one",
                   fix="compute the loss in a function of the parameters, and differentiate that by "
                       "fs.value_and_grad, which returns (loss, grads)") from e  # fmt: skip
    if isinstance(e, IndexError) and re.fullmatch(r"Target -?\d+ is out of bounds.", str(e)):
        raise fail(
            f"{_user_site(e)}: {str(e).rstrip('.').lower()}, of the classes that this rank has",
            fix="if an axis splits the classes: fs.nn.cross_entropy(logits, targets, axis=...)",
        ) from e
    rows = [] if isinstance(e, ShardingError) or not _ABOUT_SHAPES.search(str(e)) else _arguments(plan)
    if any(row.is_split for row in rows):
        if captured := _captured(e, {n for row in rows if row.is_split for n in row.shape}):
            raise fail(f"{_user_site(e)}: {captured[0]} is captured: each rank has all of it, and a part of each "
                       "argument", f"{type(e).__name__}: {e}",
                       fix="pass it as an argument, which in_specs splits") from e  # fmt: skip
        e.add_note(_shapes_note(plan, e, rows))


class _Argument(NamedTuple):
    """An argument that is a tensor: its name, its type and spec, and its different local shapes."""

    name: str
    text: str
    shape: tuple[int, ...]
    local: list[tuple[int, ...]]
    is_split: bool


def _arguments(plan: CallPlan) -> list[_Argument]:
    rows, mesh = [], plan.mesh
    for name, spec, kind in zip(plan.names, plan.specs, plan.signature, strict=True):
        if isinstance(kind, tuple) and len(kind) > 1 and isinstance(kind[1], torch.dtype):
            shape, dtype = kind[:2]
            boxes = (local_box(shape, spec, mesh.axes, mesh.coords(rank)) for rank in range(mesh.size))
            local = list(dict.fromkeys(map(box_shape, boxes)))
            rows.append(_Argument(name, format_tensor(dtype, shape, spec), shape, local, local != [shape]))
    return rows


def _captured(e: Exception, sizes: set[int]) -> list[str]:
    """Return the tensors that the failing function has from outside of the call, with a size that `e` names."""
    frames = [tb.tb_frame for tb in users_frames(e.__traceback__)]
    inside = {id(x) for frame in frames for name, x in frame.f_locals.items() if name not in frame.f_code.co_freevars}
    named = sizes & {int(n) for n in re.findall(r"\d+", str(e))}
    found = {name: {**frame.f_globals, **frame.f_locals}.get(name)
             for frame in frames[-1:] for name in (*frame.f_code.co_freevars, *frame.f_code.co_names)}  # fmt: skip
    return [f"{name}, {format_tensor(x.dtype, x.shape)}," for name, x in found.items()
            if isinstance(x, torch.Tensor) and id(x) not in inside and not named.isdisjoint(x.shape)]  # fmt: skip


def _shapes_note(plan: CallPlan, e: Exception, rows: Sequence[_Argument]) -> str:
    """Return the note, with those arguments first whose local shape, or a size of it, occurs in the error."""
    numbers = {int(n) for n in re.findall(r"\d+", str(e))}
    shapes = {tuple(map(int, re.findall(r"\d+", t))) for t in re.findall(r"\[[\d, ]+\]|\d+(?:x\d+)+", str(e))}

    def order(row: _Argument) -> tuple[bool, bool, bool]:
        sizes = {n for shape in row.local for n in shape}
        return shapes.isdisjoint(row.local), numbers.isdisjoint(sizes), not row.is_split

    chosen = sorted(rows, key=order)
    widths = [max(len(getattr(row, column)) for row in chosen[:_MOST_LEAVES]) for column in ("name", "text")]
    lines = [f"  {row.name:{widths[0]}}  {row.text:{widths[1]}}  here {' or '.join(str(list(s)) for s in row.local)}"
             for row in chosen[:_MOST_LEAVES]]  # fmt: skip
    if len(chosen) > _MOST_LEAVES:
        lines.append(f"  and {len(chosen) - _MOST_LEAVES} more")
    site = _user_site(e)
    where = [f"{site}:", *(f"    {line}" for line in callsite.quote(site).splitlines())] if site is not None else []
    return "\n".join([*where, f"in {plan.name}, each rank of {plan.mesh!r} has a part of the arguments:", *lines])


def _user_site(e: BaseException) -> callsite.Site | None:
    """Return the innermost line of the user's code in the traceback of an error."""
    frames = users_frames(e.__traceback__)
    return callsite.Site(frames[-1].tb_frame.f_code, frames[-1].tb_lasti) if frames else None


# The error that dynamo makes of one that it meets in a program: its cause has the first one as a text.
_REFUSAL = re.compile(r"raised exception ShardingError\(('.*'|\".*\")\)", re.DOTALL)


def compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function. A ShardingError that ends the compilation is raised as one, from dynamo's error."""
    body = torch.compile(f, fullgraph=True)

    @functools.wraps(f)
    def run(*inputs: Any) -> Any:
        try:
            return body(*inputs)
        except RuntimeError as e:
            found = _REFUSAL.fullmatch(str(e.__cause__))
            if found is None:
                raise
            raise ShardingError(ast.literal_eval(found[1])) from e

    return run
