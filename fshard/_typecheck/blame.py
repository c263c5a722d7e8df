"""What the checker says of an operation or a collective whose operands do not go together."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from fshard import _callsite
from fshard._torch_compat import in_backward
from fshard.errors import ShardingError

from . import suggestion
from .types import CheckerView, IndexMix, Operand, typed
from .wording import Scene, differentiating, error, over, quoted

_SUMS = ("psum", "psum_scatter")
_PARTIAL = ("matmul", "sum", "dot")  # what gives, of a dim that is split, a part of a sum
_COUNTED = "it is one value already, the same on each of the {n} ranks: "
_TAKEN = {
    "psum": _COUNTED + "the sum counts it {n} times",
    "pmean": _COUNTED + "so is its mean, and a gradient comes out of it at 1/{n}",
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
    checker: CheckerView, op: str, axis: str, still: Operand, moving: Operand, operands: Sequence[Operand]
) -> ShardingError:
    """One operand is invariant over an axis, and another varies over it."""
    scene = Scene(checker, operands)
    if still.fact.type.drawn or moving.fact.type.drawn:
        return _drawn(scene, axis, op, still, moving)
    picked = [m for m in checker.met if m.axis == axis and m.site is not None]
    if picked and in_backward():  # in a backward pass: the forward one went wrong there
        return picked_by(checker, picked[0])
    notes, fix = _advice(scene, axis, op, still, moving, operands)
    what = f"{op} of what is invariant (I) over {axis!r} and what varies (V) over it"
    return error(scene.site, what, [scene.row(still), scene.row(moving)], *notes, fix=fix)


def _advice(
    scene: Scene, axis: str, op: str, still: Operand, moving: Operand, operands: Sequence[Operand]
) -> tuple[list[str], str]:
    """Why it is wrong, and the line that is right."""
    n, axes = scene.checker.sizes[axis], quoted(sorted(still.fact.type.fixed & moving.fact.type.varies))
    one, many = scene.name(still), scene.name(moving)

    def repaired(verb: str, o: Operand) -> str:
        line = scene.repaired(o, lambda text: f"{scene.verb(verb)}({text}, {axes})")
        return line or f"{scene.verb(verb)} what varies not, over {axis!r}, before it gets here"

    smooth, added, grads = moving.fact.type.smooth, op in ("add", "sub"), differentiating()
    if scene.frame is not None and _is_bias(op, still, operands) and suggestion.summed_in(scene.frame, _SUMS):
        moved = suggestion.move_out(scene.frame, scene.matches(still), _SUMS, scene.place(still))
        return [f"each of the {n} ranks of {axis!r} adds {one} to its part, so the sum has it {n} times"], (
            moved or f"add {one} to the sum, and not to the parts")  # fmt: skip
    if not grads and not smooth:
        return [f"{many} is made of numbers of each rank's own: {one}, one value, would become {n} different ones"], (
            f"use the same number on every rank of {axis!r}")  # fmt: skip
    if not grads and added and still.fact.name and not moving.fact.name:
        return [f"{many} differs between the {n} ranks of {axis!r}, and {one} does not: its copies would drift apart",
                ], repaired("psum", moving)  # fmt: skip
    if not grads and added and moving.fact.name and not still.fact.name and still.tensor.shape == moving.tensor.shape:
        return [f"{many} is another part on each of the {n} ranks of {axis!r}, and {one} is the same on all of them",
                ], f"look for a psum or pmean too many in what made {one}"  # fmt: skip
    notes = [f"the {n} ranks of {axis!r} each use {one} in their own way: its gradient is the sum over them",
             "pvary changes no value and takes that sum; without it the gradient is one rank's part of it",
             ] if grads else [
             f"pvary changes no value: it says that each of the {n} ranks of {axis!r} uses {one} in its own way,",
             "which its gradient, if there is one, must know"]  # fmt: skip
    fix = repaired("pvary", still)
    if added and moving.fact.op in _PARTIAL:
        return notes, f"{repaired('psum', moving)}\n  or, if {many} is no part of a sum:  {fix}"
    whole = _whole_tree(scene, axis, axes, still)
    return notes, f"{fix}\n  or, for all of them:  {whole}" if whole else fix


def _whole_tree(scene: Scene, axis: str, axes: str, still: Operand) -> str:
    """The fix of a whole tree of parameters, of which this is a leaf."""
    root, words = (still.fact.name or "").partition("[")[0], scene.name(still).partition("[")
    leaves = [f for f in scene.checker.arguments if (f.name or "").startswith(f"{root}[")]
    if not words[1] or len(leaves) < 2:
        return ""
    if all(axis in f.type.fixed for f in leaves):
        return f"{words[0]} = {scene.verb('pvary')}({words[0]}, {axes}), first of all"
    return f"{words[0]} = {scene.verb('unshard')}({words[0]}, its specs, {axes}), which gathers what is split"


def _is_bias(op: str, still: Operand, operands: Sequence[Operand]) -> bool:
    return op in ("add", "sub") or (op == "matmul" and len(operands) == 3 and still.tensor is operands[0].tensor)


def picked_by(checker: CheckerView, m: IndexMix) -> ShardingError:
    """An integer that varies chose from a value that is invariant, which has a gradient, as the backward pass shows."""
    name, n, axes = m.still.name or "it", checker.sizes[m.axis], quoted([m.axis])
    what = f"{m.op} of what is invariant over {m.axis!r}, by an integer or bool that varies over it"
    return error(m.site, what, [],
                 f"the {n} ranks of {m.axis!r} each take something else from {name}: its gradient is the sum over them",
                 fix=f"take from fs.pvary({m.still.name}, {axes}), which takes that sum" if m.still.name else
                     f"fs.pvary over {m.axis!r}, which takes that sum, what is taken from")  # fmt: skip


def _drawn(scene: Scene, axis: str, op: str, still: Operand, moving: Operand) -> ShardingError:
    draw, other = (still, moving) if still.fact.type.drawn else (moving, still)
    n, name = scene.checker.sizes[axis], scene.known(draw) or "the draw"
    rows = [scene.row(draw, name), scene.row(other, scene.known(other) or "what it meets")]
    if draw is still:
        what = f"{op} of a draw that is the same on every rank of {axis!r} and what varies over it"
        why = f"the {n} ranks hold different parts, and would all get the same numbers"
        shared = f'{scene.verb("pvary")}({name}, "{axis}")'
        fix = (f"name {axis!r} in the spec of the draw, at the dim that it splits (fs.random takes the global shape);\n"
               f"       or, if all ranks are to share it, {shared}")  # fmt: skip
    else:
        what = f"{op} of a draw that differs between the ranks of {axis!r} and what is invariant over it"
        why = f"the {n} ranks hold one and the same value, and would each make something else of it"
        fix = f"draw with a spec that does not name {axis!r}, by a key into which no axis_index({axis!r}) is folded"
    site = draw.fact.site
    made = [f"{name} was drawn at {site}"] if site and str(site) != str(scene.site) else []
    return error(scene.site, what, rows, why, *made, fix=fix)


def taken(checker: CheckerView, m: Any, x: Operand, axes: Sequence[str]) -> ShardingError:
    """A collective over axes of which its argument has another type than it takes."""
    verb, n = m.verb, math.prod(checker.sizes[a] for a in axes)
    why = _TAKEN[verb].format(n=n)
    if m.origin is not None:
        state = f"does not vary over {over(axes)}" if m.takes == "V" else f"varies over {over(axes)} already"
        return error(m.origin, f"the gradient that comes back here {state}", [("gradient", typed(x))],
                     *meetings(checker, axes), f"the transpose of this collective is a {verb}: {why}")  # fmt: skip
    scene = Scene(checker)
    given: list[str] = []
    rest = [a for a in m.axes if a not in axes]

    def without(texts: list[str]) -> str:
        given.extend(texts)
        return f"{scene.verb(verb)}({texts[0]}, {quoted(rest)})" if rest else texts[0]

    line = suggestion.replace_call(scene.frame, without) if scene.frame is not None else None
    if line and re.fullmatch(r"(.+?)\s*=\s*\1", line):
        line = "delete this line"
    fix = line or f"leave the {verb} over {over(axes)} out"
    if verb in ("pslice", "ppermute") or len(given) > 2:  # the call does more than that
        fix = f"leave the {verb} out, if this rank's part is here already" if verb == "pslice" else \
            f"leave the {verb} over {over(axes)} out"  # fmt: skip
    name = scene.known(x) or (given[0] if given else scene.name(x))
    made = [f"it was made by {x.fact.op} at {x.fact.site}"] if x.fact.site and x.fact.op else []
    state = f"does not vary over {_it(axes)}" if m.takes == "V" else f"varies over {_it(axes)} already"
    return error(scene.site, f"{verb} over {over(axes)} of what {state}", [scene.row(x, name)], *made, why, fix=fix)


def _it(axes: Sequence[str]) -> str:
    return "it" if len(axes) == 1 else "them"


def meetings(checker: CheckerView, axes: Sequence[str]) -> list[str]:
    """Where integers that vary picked from what is invariant: the likely cause of a gradient that varies."""
    lines = [f"{m.op} at {m.site}: {m.still.name or 'a value'} is invariant over {m.axis!r}, "
             f"{m.moving.name or 'an integer'} varies over it"
             for m in checker.met if m.axis in axes and m.site is not None]  # fmt: skip
    return list(dict.fromkeys(lines))[:3]


def torch_generator(op: str) -> ShardingError:
    """A draw from the generator of torch."""
    return error(_callsite.site(), f"{op} draws from torch's own generator", [],
                 "its numbers depend on the process and on what was drawn before: another mesh, another answer",
                 fix="fs.random.* or fs.nn.dropout, with a key: element i is a function of the key and i; "
                     "for an nn.Module, apply.eval() or rates of 0")  # fmt: skip


__all__ = ["meetings", "mixed", "picked_by", "taken", "torch_generator"]
