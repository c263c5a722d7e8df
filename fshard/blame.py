"""The checker's words: the line, the operands with their types, why it is wrong, and the line that would be right."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import repair, source
from .errors import ShardingError, fail
from .facts import Known, Meeting, Operand, base, typed
from .spec import P

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


def mixed(
    checker: Known, op: str, axis: str, still: Operand, moving: Operand, operands: Sequence[Operand]
) -> ShardingError:
    """One operand is invariant over an axis, and another varies over it."""
    frame = source.user_frame()
    if still.fact.type.drawn or moving.fact.type.drawn:
        return _drawn(checker, op, axis, still, moving, frame)
    picked = [m for m in checker.met if m.axis == axis and m.site is not None]
    if picked and torch._C._current_graph_task_id() != -1:  # in a backward pass: the forward one went wrong there
        return _picked(checker, picked[0])
    n, axes = checker.sizes[axis], _axes(sorted(still.fact.type.fixed & moving.fact.type.varies))
    places = {id(o.tensor): i for i, o in reversed(list(enumerate(operands)))}

    def repaired(verb: str, o: Operand) -> str:
        name = repair.name_of(frame, verb) if frame else f"fs.{verb}"
        return _repair(checker, frame, o, lambda text: f"{name}({text}, {axes})", places[id(o.tensor)])

    words = _name(checker, frame, still, places[id(still.tensor)])
    notes = [f"the {n} ranks of {axis!r} each use {words} in their own way: its gradient is the sum over them",
             "pvary changes no value and takes that sum; without it the gradient is one rank's part of it"]  # fmt: skip
    fix = repaired("pvary", still)
    if _is_bias(op, still, operands) and frame is not None and repair.summed_in(frame, _SUMS):
        notes = [f"each of the {n} ranks of {axis!r} adds {words} to its part, so the sum has it {n} times"]
        moved = repair.move_out(frame, _is(checker, still), _SUMS, places[id(still.tensor)])
        fix = moved or f"add {words} to the sum, and not to the parts"
    elif op in ("add", "sub") and moving.fact.op in _PARTIAL:
        other = _name(checker, frame, moving, places[id(moving.tensor)])
        notes = [f"if {other} is one rank's part of a sum, complete it first; if it is not,", *notes]
        fix = f"{repaired('psum', moving)}\n  or:  {fix}"
    elif "[" in (still.fact.name or ""):
        of = str(still.fact.name).partition("[")[0]
        notes.append(f"(for all of {of} at once, if all is used so: {of} = fs.unshard({of}, specs, {axes}))")
    return _error(source.site(), f"{op} of what is invariant over {axis!r} and what varies over it",
                  _operands(checker, frame, [still, moving], places), *notes, fix=fix)  # fmt: skip


_SUMS = ("psum", "psum_scatter")
_PARTIAL = ("matmul", "sum", "dot")  # what gives, of a dim that is split, a part of a sum


def _is_bias(op: str, still: Operand, operands: Sequence[Operand]) -> bool:
    return op in ("add", "sub") or (op == "matmul" and len(operands) == 3 and still.tensor is operands[0].tensor)


def _picked(checker: Known, m: Meeting) -> ShardingError:
    """An integer that varies chose from a value that is invariant, which has a gradient, as the backward pass shows."""
    name, n, axes = m.still.name or "it", checker.sizes[m.axis], _axes([m.axis])
    return _error(m.site, f"{m.op} of what is invariant over {m.axis!r}, by an integer or bool that varies over it", [],
                  f"the {n} ranks of {m.axis!r} each take something else from {name}: its gradient is a sum over them",
                  fix=f"take from fs.pvary({m.still.name or '...'}, {axes}), which takes that sum")  # fmt: skip


def _drawn(checker: Known, op: str, axis: str, still: Operand, moving: Operand, frame: Any) -> ShardingError:
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


def taken(checker: Known, m: Any, x: Operand, axes: Sequence[str]) -> ShardingError:
    """A collective over axes of which its argument has another type than it takes."""
    verb = m.verb
    n = math.prod(checker.sizes[a] for a in axes)
    over, it = _over(axes), "it" if len(axes) == 1 else "them"
    if m.origin is not None:
        state = f"does not vary over {over}" if m.takes == "V" else f"varies over {over} already"
        rows = [f"gradient  {typed(x)}"]
        return _error(m.origin, f"the gradient that comes back here {state}", rows, *_meetings(checker, axes),
                      f"the transpose of this collective is a {verb}: " + _TAKEN[verb].format(n=n))  # fmt: skip
    frame = source.user_frame()
    given: list[str] = []

    def first(texts: list[str]) -> str:
        given.extend(texts)
        return texts[0]

    without = repair.replace_call(frame, first) if frame else None
    if set(axes) != set(m.axes):  # what is left of it is right
        without = None
    if without and re.fullmatch(r"(\w+)\s*=\s*\1", without):
        without = "delete this line"
    fix = without or f"leave the {verb} over {over} out"
    if verb == "pslice":
        fix = f"slice what is invariant over {over}, or leave the pslice out: this rank's part may be here already"
    name = _name(checker, frame, x)
    rows = _rows([(given[0] if given and x.fact.op and name.startswith("a result") else name, typed(x))])
    made = [f"it was made by {x.fact.op} at {x.fact.site}"] if x.fact.site and x.fact.op else []
    state = f"does not vary over {it}" if m.takes == "V" else f"varies over {it} already"
    return _error(source.site(), f"{verb} over {over} of what {state}", rows, *made, _TAKEN[verb].format(n=n), fix=fix)


def loss_varies(checker: Known, name: str, x: Operand, leaf: Operand, axes: Sequence[str]) -> ShardingError:
    """value_and_grad of a loss that differs between ranks, by parameters that do not."""
    of, n = leaf.fact.name or "a parameter", math.prod(checker.sizes[a] for a in axes)
    return _error(x.fact.site or source.site(), f"value_and_grad({name}): the loss varies over {_over(axes)}",
                  _rows([("loss", typed(x)), (of, typed(leaf))]),
                  f"each of the {n} ranks would differentiate a loss of its own, and {of} has one gradient",
                  fix=f"return fs.pmean(loss, {_axes(axes)}), or fs.psum of sums: one loss for all ranks")  # fmt: skip


def gradient_varies(checker: Known, where: str, x: Operand, grad: Operand, axes: Sequence[str]) -> ShardingError:
    """A gradient that is not of its parameter's type."""
    name, n, over = x.fact.name or "a parameter", math.prod(checker.sizes[a] for a in axes), _over(axes)
    rows = _rows([(name, typed(x)), ("gradient", typed(grad))])
    if grad.fact.type.varies & set(axes):
        what = f"{where}: the gradient of {name} varies over {over}, and {name} does not: it was never summed"
        why = f"{name} is one value on the {n} ranks of {over}, and each has its own part of the gradient"
        fix = f"fs.pvary({name}, {_axes(axes)}), before each rank uses it in its own way"
    else:
        what = f"{where}: the gradient of {name} is the same on every rank of {over}, and {name} is not"
        why = f"the {n} ranks of {over} have parameters of their own"
        fix = "see where they were taken for one"
    return _error(source.site(), what, rows, *_meetings(checker, axes), why, fix=fix)


def result(
    checker: Known, where: str, x: Operand, spec: P, extra: Sequence[str], missing: Sequence[str]
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


def torch_generator(checker: Known, op: str) -> ShardingError:
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


def _error(
    site: source.Site | str | None, what: str, rows: Sequence[str] = (), *notes: str, fix: str = ""
) -> ShardingError:
    quoted = source.quote(site) if isinstance(site, source.Site) else ""
    code = ["  " + line for line in quoted.splitlines()]
    return fail(f"{site}: {what}" if site else what, *code, *rows, *notes, fix=fix)


def _rows(pairs: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(name) for name, _ in pairs)
    return [f"{name:<{width}}  {text}" for name, text in pairs]


def _operands(
    checker: Known, frame: Any, operands: Sequence[Operand], places: Mapping[int, int] | None = None
) -> list[str]:
    rows = []
    for o in operands:
        name, path = _name(checker, frame, o, (places or {}).get(id(o.tensor))), o.fact.name
        known = path is None or path.replace("'", '"') == name.replace("'", '"')
        rows.append((name, typed(o) if known else f"{typed(o)}    {path}"))
    return _rows(rows)


def _name(checker: Known, frame: Any, o: Operand, place: int | None = None) -> str:
    """The user's own word for an operand, the `place`-th of an operator; else its path, or what made it."""
    said = repair.operand(frame, _is(checker, o), place) if frame is not None else None
    return said or o.fact.name or (f"a result of {o.fact.op}" if o.fact.op else "a tensor")


def _is(checker: Known, o: Operand) -> Callable[[object], bool]:
    """Whether an object of the user's is this operand, or a view of it."""

    def it(x: object) -> bool:
        return isinstance(x, Tensor) and (base(x) is o.tensor or checker.fact(x).root == o.fact.root > 0)

    return it


def _repair(checker: Known, frame: Any, o: Operand, wrap: Callable[[str], str], position: int | None) -> str:
    line = repair.repair(frame, _is(checker, o), wrap, position) if frame is not None else None
    name = _name(checker, frame, o)
    return line or wrap("..." if name.startswith("a result of") else name)


def _meetings(checker: Known, axes: Sequence[str]) -> list[str]:
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
