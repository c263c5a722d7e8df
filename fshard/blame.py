"""The checker's words: the line, the operands with their types, why it is wrong, and the line that would be right."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from . import source
from .errors import ShardingError, fail
from .facts import Fact, Operand, base, typed
from .spec import P

if TYPE_CHECKING:  # the checker words its findings here
    from .vma import Checker

_COUNTED = "it is one value already, the same on each of the {n} ranks: "
_TAKEN = {
    "psum": _COUNTED + "the sum counts it {n} times",
    "pmean": _COUNTED + "the mean is the value itself, and its gradient comes out at 1/{n}",
    "psum_scatter": _COUNTED + "the sum counts it {n} times",
    "all_gather": "the {n} ranks hold equal values: the result would be {n} copies",
    "all_to_all": "the {n} ranks hold equal values: they would exchange pieces of one and the same",
    "ppermute": "the {n} ranks hold equal values, and would send each other the same",
    "pmax": "it is the same on each of the {n} ranks already",
    "pmin": "it is the same on each of the {n} ranks already",
    "pvary": "each of the {n} ranks has a value of its own already: their gradients are not to be summed",
    "pslice": "each of the {n} ranks has a value of its own: they would keep pieces of different things",
}


class Meeting(NamedTuple):
    """Where an integer or bool that varies over `axis` met what is invariant over it, which is no error by itself."""

    axis: str
    op: str
    site: source.Site | None
    still: Fact
    moving: Fact


def mixed(
    checker: Checker, op: str, axis: str, still: Operand, moving: Operand, operands: Sequence[Operand]
) -> ShardingError:
    """One operand is invariant over an axis, and another varies over it."""
    frame = source.user_frame()
    verb = source.name_of(frame, "pvary") if frame else "fs.pvary"
    n, axes = checker.sizes[axis], _axes(sorted(still.fact.type.fixed & moving.fact.type.varies))
    if still.fact.type.drawn or moving.fact.type.drawn:
        return _drawn(checker, op, axis, still, moving, frame)
    words = _name(checker, frame, still)
    notes = [f"the {n} ranks of {axis!r} each use {words} in their own way: its gradient is the sum over them",
             "pvary changes no value and takes that sum; without it the gradient is one rank's part of it"]  # fmt: skip
    position = next((i for i, o in enumerate(operands) if o.tensor is still.tensor), None)
    fix = _repair(checker, frame, still, lambda text: f"{verb}({text}, {axes})", position)
    if op in ("add", "sub") and frame:
        psum = source.name_of(frame, "psum")
        other = next((i for i, o in enumerate(operands) if o.tensor is moving.tensor), None)
        summed = _repair(checker, frame, moving, lambda text: f"{psum}({text}, {axes})", other)
        notes.append(f"if the other one is a sum of which each rank has a part, complete it first: {summed}")
    return _error(source.site(), f"{op} of what is invariant over {axis!r} and what varies over it",
                  _operands(checker, frame, [still, moving]), *notes, fix=fix)  # fmt: skip


def _drawn(checker: Checker, op: str, axis: str, still: Operand, moving: Operand, frame: Any) -> ShardingError:
    rows = _operands(checker, frame, [still, moving])
    if still.fact.type.drawn:
        what = f"{op} of a draw that is the same on every rank of {axis!r} and what varies over it"
        why = f"the {checker.sizes[axis]} ranks hold different parts, and would all get the same numbers"
        fix = f"draw with a spec that names {axis!r}, and the global shape: each rank then gets its own part"
    else:
        what = f"{op} of a draw that differs between the ranks of {axis!r} and what is invariant over it"
        why = f"the {checker.sizes[axis]} ranks hold one and the same value, and would each make another of it"
        fix = f"draw with a spec that does not name {axis!r}, by a key into which no axis_index({axis!r}) is folded"
    made = f"{_name(checker, frame, still if still.fact.type.drawn else moving)} was drawn at "
    site = (still if still.fact.type.drawn else moving).fact.site
    return _error(source.site(), what, rows, why, *([made + str(site)] if site else []), fix=fix)


def taken(checker: Checker, m: Any, x: Operand, axes: Sequence[str]) -> ShardingError:
    """A collective over axes of which its argument has another type than it takes."""
    verb = m.verb
    n = math.prod(checker.sizes[a] for a in axes)
    over = " and ".join(map(repr, axes))
    state = f"does not vary over {over}" if m.takes == "V" else f"varies over {over} already"
    if m.origin is not None:
        rows = [f"gradient  {typed(x)}"]
        return _error(m.origin, f"the gradient that comes back here {state}", rows, *_meetings(checker, axes),
                      f"the transpose of this collective is a {verb}: " + _TAKEN[verb].format(n=n))  # fmt: skip
    frame = source.user_frame()
    fix = ""
    if frame is not None and set(axes) == set(m.axes):
        fix = source.replace_call(frame, lambda given: given[0] if given else "") or ""
    fix = fix or f"leave the {verb} over {over} out"
    if verb == "pslice":
        fix = f"slice what is invariant over {over}, or leave the pslice out: this rank's part may be here already"
    rows = _operands(checker, frame, [x])
    made = [f"it was made by {x.fact.op} at {x.fact.site}"] if x.fact.site and x.fact.op else []
    return _error(source.site(), f"{verb} over {over} of what {state}", rows, *made, _TAKEN[verb].format(n=n), fix=fix)


def loss_varies(checker: Checker, name: str, x: Operand) -> ShardingError:
    """value_and_grad of a loss that differs between ranks."""
    axes = sorted(x.fact.type.varies)
    fix = f"return fs.pmean(loss, {_axes(axes)}), or fs.psum of sums: one loss for all ranks"
    return _error(x.fact.site or source.site(), f"value_and_grad({name}): the loss varies over {_over(axes)}",
                  [f"loss  {typed(x)}"], "each rank would differentiate a loss of its own: there is no one gradient",
                  fix=fix)  # fmt: skip


def gradient_varies(checker: Checker, where: str, x: Operand, grad: Operand, axes: Sequence[str]) -> ShardingError:
    """A gradient that is not of its parameter's type."""
    rows = _rows([("parameter", typed(x)), ("gradient", typed(grad))])
    n = math.prod(checker.sizes[a] for a in axes)
    if grad.fact.type.varies & set(axes):
        name = x.fact.name or "the parameter"
        why = f"the parameter is one value on the {n} ranks of {_over(axes)}; each has its own part of the gradient"
        fix = f"fs.pvary({name}, {_axes(axes)}) before each rank uses it in its own way"
    else:
        why = f"the {n} ranks of {_over(axes)} have parameters of their own, and one gradient"
        fix = "see where the parameters' sum was taken"
    return _error(source.site(), f"{where}: its gradient varies over other axes than it does", rows,
                  *_meetings(checker, axes), why, fix=fix)  # fmt: skip


def result(
    checker: Checker, where: str, x: Operand, spec: P, extra: Sequence[str], missing: Sequence[str]
) -> ShardingError:
    """A result that its out spec does not fit."""
    rows = _rows([("result", typed(x)), ("out spec", str(spec))])
    if extra:
        n = math.prod(checker.sizes[a] for a in extra)
        return _error(x.fact.site, f"{where} varies over {_over(extra)}, which its out spec does not name", rows,
                      f"the {n} ranks would return different values for what is declared to be one",
                      fix=f"sum or average it, fs.psum(..., {_axes(extra)}), or name {_over(extra)} in its out spec")
    n = math.prod(checker.sizes[a] for a in missing)
    return _error(x.fact.site, f"{where} is invariant over {_over(missing)}, which its out spec splits it by", rows,
                  f"the result would be {n} equal copies, and another size on another mesh",
                  fix=f"leave {_over(missing)} out of its out spec, or take this rank's part: "
                      f"fs.pslice(..., {_axes(missing)})")  # fmt: skip


def torch_generator(checker: Checker, op: str) -> ShardingError:
    """A draw from the generator of torch."""
    return _error(source.site(), f"{op} draws from torch's own generator", [],
                  "its numbers depend on the process and on what was drawn before: another mesh, another answer",
                  fix="fs.random.* or fs.nn.dropout, with a key: element i is a function of the key and i")


def number_differs(
    op: str, site: source.Site | str | None, axis: str, numbers: Sequence[tuple[str, tuple[Any, ...]]]
) -> ShardingError:
    """A Python number that is not the same on every rank went into a value that is."""
    rows = _rows([(where, ", ".join(map(repr, given))) for where, given in numbers])
    return _error(site, f"{op} of what is invariant over {axis!r} with a number that differs between its ranks", rows,
                  "no type follows a Python number, so the result counts as one value, and is not",
                  fix=f"keep the number a tensor, as fs.axis_index is, and pvary the operand over {axis!r};\n"
                      "       to take this rank's part of a dim, fs.pslice")  # fmt: skip


# --- pieces ---------------------------------------------------------------------------------------------------


def _error(site: source.Site | str | None, what: str, rows: Sequence[str], *notes: str, fix: str = "") -> ShardingError:
    quoted = source.quote(site) if isinstance(site, source.Site) else ""
    code = ["  " + line for line in quoted.splitlines()]
    return fail(f"{site}: {what}" if site else what, *code, *rows, *notes, fix=fix)


def _rows(pairs: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in pairs)
    return [f"{name:<{width}}  {text}" for name, text in pairs]


def _operands(checker: Checker, frame: Any, operands: Sequence[Operand]) -> list[str]:
    rows = []
    for o in operands:
        name, path = _name(checker, frame, o), o.fact.name
        rows.append((name, typed(o) + (f"    {path}" if path and path != name else "")))
    return _rows(rows)


def _name(checker: Checker, frame: Any, o: Operand) -> str:
    """The user's own word for an operand; else its path, or what made it."""
    said = source.operand(frame, _is(checker, o)) if frame is not None else None
    return said or o.fact.name or (f"a result of {o.fact.op}" if o.fact.op else "a tensor")


def _is(checker: Checker, o: Operand) -> Callable[[object], bool]:
    """Whether an object of the user's is this operand, or a view of it."""

    def it(x: object) -> bool:
        return isinstance(x, Tensor) and (base(x) is o.tensor or checker.fact(x).root == o.fact.root > 0)

    return it


def _repair(checker: Checker, frame: Any, o: Operand, wrap: Callable[[str], str], position: int | None) -> str:
    line = source.repair(frame, _is(checker, o), wrap, position) if frame is not None else None
    return line or wrap(_name(checker, frame, o))


def _meetings(checker: Checker, axes: Sequence[str]) -> list[str]:
    """Where integers that vary picked from what is invariant: the likely cause of a gradient that varies."""
    lines = []
    for m in checker.met:
        if m.axis in axes and m.site is not None:
            lines.append(f"{m.op} at {m.site}: {m.still.name or 'a value'} is invariant over {m.axis!r}, "
                         f"{m.moving.name or 'an integer'} varies over it")  # fmt: skip
    return list(dict.fromkeys(lines))[:3]


def _axes(axes: Sequence[str]) -> str:
    return f'"{axes[0]}"' if len(axes) == 1 else "(" + ", ".join(f'"{a}"' for a in axes) + ")"


def _over(axes: Sequence[str]) -> str:
    return " and ".join(map(repr, axes))
