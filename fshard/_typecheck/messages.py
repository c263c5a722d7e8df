"""The texts of the checker's errors: the line, the operands as the user's code names them, the reasons, the fix."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fshard import _callsite
from fshard._torch_compat import in_backward, unwrapped
from fshard.errors import ShardingError, fail
from fshard.spec import P

from .suggestion import executing, qualified_name
from .types import IndexMix, Operand, show_type

if TYPE_CHECKING:
    from .checker import Checker

_SHOWN_RESULTS = 4
_GIVES_PARTIAL_SUM = ("matmul", "sum", "dot")  # of a dim that is split
_EQUAL = "the value is the same on each of the {n} ranks already: "
_WRONG_COLLECTIVE = {
    "psum": _EQUAL + "the sum would count it {n} times",
    "pmean": _EQUAL + "the mean would not change it, and would scale its gradient by 1/{n}",
    "psum_scatter": _EQUAL + "the sum would count it {n} times",
    "all_gather": _EQUAL + "the result would be {n} copies of it",
    "all_to_all": _EQUAL + "they would exchange pieces of one value",
    "ppermute": _EQUAL + "they would send each other what they have",
    "pmax": _EQUAL + "the maximum is that value",
    "pmin": _EQUAL + "the minimum is that value",
    "pvary": "each of the {n} ranks has its own value already: their gradients are not to be summed",
    "pslice": "each of the {n} ranks has its own value: they would keep pieces of different values",
}


class Scene:
    """The user's line that is executing, and the names that it has for operands; these are in the operator's order."""

    def __init__(self, checker: Checker, operands: Sequence[Operand] = ()) -> None:
        self.checker, self.frame, self.site = checker, _callsite.user_frame(), _callsite.site()
        self.expression = executing(self.frame)
        self._positions = {id(o.tensor): i for i, o in reversed(list(enumerate(operands)))}

    def call(self, verb: str, *args: str) -> str:
        """Return the source of a call, as the user's imports spell it: `fs.pvary(x, "data")`."""
        return f"{qualified_name(self.frame, verb)}({', '.join(args)})"

    def node(self, o: Operand) -> Any:
        """Return the part of the executing expression that is an operand, or a view of it; `None` if unknown."""

        def is_operand(x: object) -> bool:
            return isinstance(x, Tensor) and (unwrapped(x) is o.tensor or self.checker.info(x).root == o.info.root > 0)

        return self.expression and self.expression.find(is_operand, self._positions.get(id(o.tensor), -1))

    def known_name(self, o: Operand) -> str | None:
        """Return the source text of an operand, or its path among the arguments."""
        node = self.node(o)
        return self.expression.source(node) if self.expression and node else o.info.name

    def name(self, o: Operand) -> str:
        """Return the source text of an operand, else its path, else the operation that made it."""
        return self.known_name(o) or (f"a result of {o.info.op}" if o.info.op else "a tensor")

    def row(self, o: Operand, name: str = "") -> tuple[str, str]:
        """Return an operand's name, and its type, with the shape that the user's tensor has, and path."""
        name, path, node = name or self.name(o), o.info.name, self.node(o)
        tensor = self.expression.value(node) if self.expression and node else None
        text = show_type(o, tensor.shape if isinstance(tensor, Tensor) else None)
        return name, text if path is None or path.replace("'", '"') == name.replace("'", '"') else f"{text}    {path}"

    def line_with(self, verb: str, o: Operand, axes: str) -> str:
        """Return the line with a call around an operand; else the call, and that it belongs before the line."""
        node = self.node(o)
        if self.expression and node:
            line = self.expression.replaced(node, self.call(verb, self.expression.source(node), axes))
            if line:
                return line
        which = "invariant operand" if verb == "pvary" else "varying operand"
        return f"apply {self.call(verb, self.known_name(o) or '...', axes)} to the {which} before this line"


# --- operations -----------------------------------------------------------------------------------------------


def invariant_mixed_with_varying(
    checker: Checker, op: str, axis: str, invariant: Operand, varying: Operand, operands: Sequence[Operand]
) -> ShardingError:
    """Word the error of an operation with one operand that is invariant over an axis and one that varies over it."""
    scene = Scene(checker, operands)
    if invariant.info.type.random or varying.info.type.random:
        return _random_draw_mixed(scene, axis, op, invariant, varying)
    mixes = [m for m in checker.index_mixes if m.axis == axis]
    if mixes and in_backward():  # the mistake is in the forward pass
        return indexed_by_varying(checker, mixes[0])
    is_bias = op in ("add", "sub") or (op == "matmul" and len(operands) == 3 and invariant.tensor is operands[0].tensor)
    if is_bias and scene.expression and scene.expression.is_summed():
        n, name = checker.sizes[axis], scene.name(invariant)
        notes = [f"each of the {n} ranks of {axis!r} adds {name} to its part, so the sum has it {n} times"]
        fix = scene.expression.moved_out_of_sum(scene.node(invariant)) or f"add {name} after the sum, and not before it"
    else:
        notes, fix = _reason_and_fix(scene, axis, op, invariant, varying)
    what = f"{op} of an operand that is invariant (I) over {axis!r} with one that varies (V) over it"
    return _error(scene.site, what, [scene.row(invariant), scene.row(varying)], *notes, fix=fix)


def _reason_and_fix(scene: Scene, axis: str, op: str, invariant: Operand, varying: Operand) -> tuple[list[str], str]:
    n, axes = scene.checker.sizes[axis], _quoted(sorted(invariant.info.type.invariant & varying.info.type.varying))
    one, many, added = scene.name(invariant), scene.name(varying), op in ("add", "sub")
    if not _differentiating():  # an optimizer step, say
        if not varying.info.type.differentiable:
            return [f"{many} was computed from numbers that differ between ranks: {one} would get {n} different values",
                    ], f"use the same number on every rank of {axis!r}"  # fmt: skip
        if added and invariant.info.name and not varying.info.name:
            return [f"{many} differs between the {n} ranks of {axis!r}, and {one} does not: its copies would diverge",
                    ], scene.line_with("psum", varying, axes)  # fmt: skip
        same_shape = invariant.tensor.shape == varying.tensor.shape
        if added and varying.info.name and not invariant.info.name and same_shape:
            return [f"{many} is a different part on each of the {n} ranks of {axis!r}, and {one} is the same on all",
                    ], f"look for a superfluous psum or pmean where {one} was computed"  # fmt: skip
    notes = _reason_for_pvary(n, axis, f"uses {one} with its own values")
    fix = scene.line_with("pvary", invariant, axes)
    if added and varying.info.op in _GIVES_PARTIAL_SUM:
        return notes, f"{scene.line_with('psum', varying, axes)}\n  or, if {many} is not part of a sum:  {fix}"
    return notes, fix + _fix_of_whole_tree(scene, axis, axes, invariant)


def _fix_of_whole_tree(scene: Scene, axis: str, axes: str, leaf: Operand) -> str:
    root, (tree, is_item, _) = (leaf.info.name or "").partition("[")[0], scene.name(leaf).partition("[")
    leaves = [info for info in scene.checker.arguments if (info.name or "").startswith(f"{root}[")]
    if not is_item or len(leaves) < 2:
        return ""
    if all(axis in info.type.invariant for info in leaves):
        return f"\n  or, for all of {tree}:  {tree} = {scene.call('pvary', tree, axes)}, before its first use"
    return f"\n  or, for all of {tree}:  {tree} = {scene.call('unshard', tree, 'its specs', axes)}"


def _random_draw_mixed(scene: Scene, axis: str, op: str, invariant: Operand, varying: Operand) -> ShardingError:
    draw, other = (invariant, varying) if invariant.info.type.random else (varying, invariant)
    n, name = scene.checker.sizes[axis], scene.known_name(draw) or "the draw"
    rows = [scene.row(draw, name), scene.row(other, scene.known_name(other) or "the other operand")]
    if draw is invariant:
        what = f"{op} of a random draw that is the same on every rank of {axis!r} with a varying operand"
        why = f"the {n} ranks hold different parts, and would all use the same random numbers"
        shared = scene.call("pvary", name, _quoted([axis]))
        fix = (f"name {axis!r} in the spec of the draw, at the dim that it splits (fs.random takes the global shape);\n"
               f"       or, if all ranks are to use the same numbers, {shared}")  # fmt: skip
    else:
        what = f"{op} of a random draw that differs between the ranks of {axis!r} with an invariant operand"
        why = f"the {n} ranks hold the same value, and each would change it by its own random numbers"
        fix = f"draw with a spec that does not name {axis!r}, by a key without fold_in of axis_index({axis!r})"
    site = draw.info.site
    drawn = [f"{name} was drawn at {site}"] if site and str(site) != str(scene.site) else []
    return _error(scene.site, what, rows, why, *drawn, fix=fix)


def indexed_by_varying(checker: Checker, m: IndexMix) -> ShardingError:
    """Word the error of an invariant operand with a gradient that was indexed by an integer that varies."""
    name, n, axes = m.invariant.name or "the operand", checker.sizes[m.axis], _quoted([m.axis])
    what = f"{m.op} of a value that is invariant over {m.axis!r}, by an integer or bool that varies over it"
    notes = _reason_for_pvary(n, m.axis, f"picks its own elements of {name}")
    return _error(m.site, what, [], *notes, fix=f"index fs.pvary({m.invariant.name or '...'}, {axes})")


def draw_from_torch_generator(op: str) -> ShardingError:
    """Word the error of a draw from torch's own generator."""
    return _error(_callsite.site(), f"{op} draws from torch's own generator", [],
                  "its numbers depend on the process and on earlier draws, so another mesh would give another answer",
                  fix="use fs.random.* or fs.nn.dropout, with a key: element i is a function of the key and i; "
                      "for an nn.Module, apply.eval() or rates of 0")  # fmt: skip


def number_differs(
    op: str, site: _callsite.Site | str | None, axis: str, numbers: Sequence[tuple[str, tuple[Any, ...]]]
) -> ShardingError:
    """Word the error of an invariant value computed from a Python number that differs between ranks."""
    if op in ("pvary", "pslice"):  # of a tensor that starts at another element on each rank
        rows = [(rank, f"from element {offsets[0]}") for rank, offsets in numbers]
        return _error(site, f"{op} of a different part, on each rank of {axis!r}, of an invariant value", rows,
                      "types do not cover Python numbers: a part picked by a number is typed as the same on all ranks",
                      fix=f'fs.pslice(x, "{axis}") takes the part of each rank')  # fmt: skip
    rows = [(rank, ", ".join(map(repr, values))) for rank, values in numbers]
    return _error(site, f"{op} of a value that is invariant over {axis!r} with a number that differs between its ranks",
                  rows, "types do not cover Python numbers: the result is typed as invariant and is not",
                  fix=f"use the same number on every rank of {axis!r}; or, if the ranks are to differ, use a tensor\n"
                      "       (fs.axis_index is one) and fs.pvary of the other operand; or take parts with fs.pslice",
                  )  # fmt: skip


# --- collectives ----------------------------------------------------------------------------------------------


def collective_of_wrong_type(checker: Checker, m: Any, x: Operand, axes: Sequence[str]) -> ShardingError:
    """Word the error of a collective whose operand has the wrong type over `axes`."""
    verb, scene = m.verb, Scene(checker)
    why = _WRONG_COLLECTIVE[verb].format(n=math.prod(checker.sizes[a] for a in axes))
    if m.origin is not None:
        state = f"does not vary over {_over(axes)}" if m.takes == "V" else f"varies over {_over(axes)} already"
        return _error(m.origin, f"the gradient of this collective's result {state}", [("gradient", show_type(x))],
                      *_index_notes(checker, axes), f"the transpose of this collective is {verb}: {why}")  # fmt: skip
    args: list[str] = []
    other_axes = [a for a in m.axes if a not in axes]

    def narrowed(sources: list[str]) -> str:
        args.extend(sources)
        return scene.call(verb, sources[0], _quoted(other_axes)) if other_axes else sources[0]

    line = scene.expression.without_call(narrowed) if scene.expression else None
    if verb == "pslice":
        fix = "leave the pslice out, if this is the rank's part already"
    elif not line or verb == "ppermute" or len(args) > 2:  # the call has more effects than its collective
        fix = f"leave the {verb} over {_over(axes)} out"
    else:
        fix = "delete this line" if re.fullmatch(r"(.+?)\s*=\s*\1", line) else line
    name = scene.known_name(x) or (args[0] if args else scene.name(x))
    made = [f"it was made by {x.info.op} at {x.info.site}"] if x.info.site and x.info.op else []
    it = "it" if len(axes) == 1 else "them"
    state = f"does not vary over {it}" if m.takes == "V" else f"varies over {it} already"
    what = f"{verb} over {_over(axes)} of a value that {state}"
    return _error(scene.site, what, [scene.row(x, name)], *made, why, fix=fix)


def _index_notes(checker: Checker, axes: Sequence[str]) -> list[str]:
    """Return the likely causes of a gradient that varies: lines that indexed an invariant operand."""
    lines = [f"{m.op} at {m.site}: {m.invariant.name or 'a value'} is invariant over {m.axis!r}, "
             f"{m.indices.name or 'an integer'} varies over it"
             for m in checker.index_mixes if m.axis in axes]  # fmt: skip
    return list(dict.fromkeys(lines))[:3]


# --- losses, gradients, results -------------------------------------------------------------------------------


def loss_varies(checker: Checker, name: str, loss: Operand, leaf: Operand, axes: Sequence[str]) -> ShardingError:
    """Word the error of a loss that varies over `axes`, over which a parameter is invariant."""
    parameter, n = leaf.info.name or "a parameter", math.prod(checker.sizes[a] for a in axes)
    return _error(loss.info.site or _callsite.site(), f"value_and_grad({name}): the loss varies over {_over(axes)}",
                  [("loss", show_type(loss)), (parameter, show_type(leaf))],
                  f"each of the {n} ranks would differentiate its own loss, and {parameter} has one gradient",
                  fix=f"return fs.pmean(loss, {_quoted(axes)}) of a mean, fs.psum of a sum: one loss for all ranks;\n"
                      f"       but if {_over(axes)} splits what the loss sums, a psum is missing before this",
                  )  # fmt: skip


def gradient_has_wrong_type(
    checker: Checker, name: str, leaf: Operand, grad: Operand, axes: Sequence[str]
) -> ShardingError:
    """Word the error of a gradient that has another type than its parameter."""
    mixes = {m.site: m for m in checker.index_mixes if m.axis in axes}
    if len(mixes) == 1:
        return indexed_by_varying(checker, next(iter(mixes.values())))
    parameter, n, over = leaf.info.name or "a parameter", math.prod(checker.sizes[a] for a in axes), _over(axes)
    rows = [(parameter, show_type(leaf)), ("gradient", show_type(grad))]
    if grad.info.type.varying & set(axes):
        state, opposite = f"varies over {over}", "does not"
        why = (
            f"{parameter} is the same on the {n} ranks of {over}, and each has a part of its gradient: a sum is missing"
        )
        fix = f"apply fs.pvary({parameter}, {_quoted(axes)}) before the ranks use it with values of their own"
    else:
        state, opposite = f"is the same on every rank of {over}", "is not"
        why = f"the {n} ranks of {over} have different values of {parameter}"
        fix = f"look for a superfluous psum or pmean over {over} in the loss"
    what = f"value_and_grad({name}): the gradient of {parameter} {state}, and {parameter} {opposite}"
    return _error(_callsite.site(), what, rows, *_index_notes(checker, axes), why, fix=fix)


def results_have_wrong_type(
    checker: Checker, name: str, rows: Sequence[tuple[str, Operand, P]], extra: Sequence[str], missing: Sequence[str]
) -> ShardingError:
    """Word the error of results of one line that vary over `extra` axes, or do not vary over `missing` ones."""
    path, x, _ = rows[0]
    axes, many = extra or missing, len(rows) > 1
    n, over = math.prod(checker.sizes[a] for a in axes), _over(axes)
    subject, vary, are = (f"{len(rows)} results", "vary", "are") if many else (path, "varies", "is")
    table = [(path, f"{show_type(o)}    out spec {spec}") for path, o, spec in rows[:_SHOWN_RESULTS]]
    if len(rows) > _SHOWN_RESULTS:
        table.append(("...", f"and {len(rows) - _SHOWN_RESULTS} more"))
    if extra:
        what = f"{subject} {vary} over {over}, which {'their out specs do' if many else 'its out spec does'} not name"
        why, fix = _reason_and_fix_of_varying_result(x, n, axes)
    else:
        named = "their out specs name" if many else "its out spec names"
        what = f"{subject} {are} invariant over {over}, which {named}"
        why = f"the result would be {n} equal copies, and would have another size on another mesh"
        fix = f"leave {over} out of the out spec, or take this rank's part: fs.pslice(..., {_quoted(axes)})"
    return _error(x.info.site or name, what, table, why, fix=fix)


def _reason_and_fix_of_varying_result(x: Operand, n: int, axes: Sequence[str]) -> tuple[str, str]:
    if x.info.op == "all_gather":
        return "all_gather gives every rank the whole value, and types it as varying", \
            'fs.all_gather(..., to="invariant"), where the result is used as one value'  # fmt: skip
    why = f"the {n} ranks would return different values, and the out spec declares one value"
    or_spec = f", or name {_over(axes)} in its out spec" if x.tensor.ndim else ""
    if x.info.op in _GIVES_PARTIAL_SUM:
        return why, f"fs.psum(..., {_quoted(axes)}), if each rank has a part of the sum{or_spec}"
    if x.info.op == "mean":
        return why, f"fs.pmean(..., {_quoted(axes)}), if the ranks have means of equal counts{or_spec}"
    return why, f"look for a missing sum or gather over {_over(axes)}{or_spec}"


# --- parts of a message ---------------------------------------------------------------------------------------


def _reason_for_pvary(n: int, axis: str, use: str) -> list[str]:
    return [f"each of the {n} ranks of {axis!r} {use}, so the gradient is a sum over the ranks;",
            "pvary changes no value, and its transpose takes that sum"]  # fmt: skip


def _differentiating() -> bool:
    """Return whether a gradient is being taken: a backward pass runs, or a transform is on the stack."""
    if in_backward():
        return True
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(("eager_transforms.py", "fshard/grad.py")):
            return True
        frame = frame.f_back
    return False


def _error(
    site: _callsite.Site | str | None, what: str, rows: Sequence[tuple[str, str]], *notes: str, fix: str = ""
) -> ShardingError:
    """Word one error: the place and the problem, the line, the operands, the reasons, the fix."""
    line = _callsite.quote(site) if isinstance(site, _callsite.Site) else ""
    width = max([len(name) for name, _ in rows], default=0)
    facts = [*("  " + x for x in line.splitlines()), *(f"{name:<{width}}  {text}" for name, text in rows)]
    return fail(f"{site}: {what}" if site else what, *facts, *notes, fix=fix)


def _quoted(axes: Sequence[str]) -> str:
    """Return axes as an argument: `"data"`, `("data", "model")`."""
    return f'"{axes[0]}"' if len(axes) == 1 else "(" + ", ".join(f'"{a}"' for a in axes) + ")"


def _over(axes: Sequence[str]) -> str:
    """Return axes in a sentence: `'data' and 'model'`."""
    return " and ".join(map(repr, axes))
