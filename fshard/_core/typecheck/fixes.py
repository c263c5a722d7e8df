"""Fixes that errors suggest: lines of the user's code, rewritten; and the line that is executing, with its operands."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NamedTuple

from torch import Tensor

from fshard._core import callsite
from fshard._core.torch import unwrapped

from .suggestion import Expression, called_at, qualified_name, rewritten
from .types import Facts, Operand, Partial, Reduction, TensorInfo, show_type

CAPTURED = "a captured tensor"
IS_SUM = "each rank has a part of a sum"
IS_MEAN = "each rank has the mean over an equal count"
_WHOLE = {
    "pmean": IS_MEAN,
    "psum": IS_SUM,
    "pmax": "the result is the largest value of all ranks",
    "pmin": "the result is the smallest value of all ranks",
}
# Functions that end in the operation that reduces; the sum of Python ends in the addition of two parts.
_REDUCES = ("linear", "einsum", "cross_entropy", "nll_loss", "sum")


class Scene:
    """The user's line that is executing, and the names that it has for operands; these are in the operator's order."""

    def __init__(
        self, checker: Facts, operands: Sequence[Operand] = (), op: str = "", frame: FrameType | None = None
    ) -> None:
        self.checker, self._op = checker, op
        self.frame = callsite.caller_of_models(frame or callsite.user_frame())
        self.site = callsite.site(self.frame)
        self.expression = Expression(self.site, self.frame)
        self._positions = {id(o.tensor): i for i, o in reversed(list(enumerate(operands)))}
        self._nodes: dict[int, Any] = {}  # by the id of the tensor of an operand, which lives as long as its line runs

    def call(self, verb: str, *args: str) -> str:
        """Return the source of a call, as the user's imports spell it: `fs.pvary(x, "data")`."""
        return f"{qualified_name(self.frame, verb)}({', '.join(args)})"

    def node(self, o: Operand) -> Any:
        """Return the part of the executing expression that is an operand, or a view of it; `None` if unknown."""

        def is_operand(x: object) -> bool:
            return isinstance(x, Tensor) and (unwrapped(x) is o.tensor or self.checker.info(x).root == o.info.root > 0)

        if (key := id(o.tensor)) not in self._nodes:
            self._nodes[key] = self.expression.find(is_operand, self._positions.get(key, -1), self._op)
        return self._nodes[key]

    def known_name(self, o: Operand) -> str | None:
        """Return the source text of an operand, or its path among the arguments."""
        node = self.node(o)
        return self.expression.source(node) if node else o.info.name

    def name(self, o: Operand) -> str:
        """Return the source text of an operand, else its path, else the operation that made it."""
        made = f"a result of {o.info.op}" if o.info.op else CAPTURED if o.info.is_captured else "a tensor"
        return self.known_name(o) or made

    def row(self, o: Operand, name: str = "") -> tuple[str, str]:
        """Return an operand's name, and its type, with the shape that the user's tensor has, and path."""
        name, path, node = name or self.name(o), o.info.name, self.node(o)
        if o.info.is_captured and name != CAPTURED:
            path = "captured"
        tensor = self.expression.value(node)
        text = show_type(o, tensor.shape if isinstance(tensor, Tensor) else None)
        return name, text if path is None or path.replace("'", '"') == name.replace("'", '"') else f"{text}    {path}"

    def is_batched(self, o: Operand, other: Operand) -> bool:
        """Return whether an operand has a dim in front that the user's code does not see, and another has none."""

        def hidden_dims(x: Operand) -> int:
            value = self.expression.value(self.node(x))
            return x.tensor.ndim - value.ndim if isinstance(value, Tensor) else 0

        return hidden_dims(o) == 0 < hidden_dims(other)

    def without_pvary(self, o: Operand) -> str | None:
        """Return the line without the pvary that made an operand; `None` if it is elsewhere."""
        node = self.node(o) if o.info.op == "pvary" else None
        return self.expression.without_call(node=node) if node else None

    def with_calls(self, verb: str, *operands: tuple[Operand, str]) -> str | None:
        """Return the line with a call around each operand, over its axes; `None` where it cannot be rewritten."""
        nodes = [(self.node(o), axes) for o, axes in operands]
        calls = [(node, self.call(verb, self.expression.source(node), axes)) for node, axes in nodes if node]
        return self.expression.replaced(*calls) if len(calls) == len(nodes) else None

    def line_with(self, verb: str, *operands: tuple[Operand, str]) -> str:
        """Return the line `with_calls`, or else the advice to make the calls before it."""
        which = "invariant operand" if verb == "pvary" else "varying operand"
        calls = [self.call(verb, self.known_name(o) or "...", axes) for o, axes in operands]
        advice = ", and ".join(f"apply {call} to the {which} before this line" for call in calls)
        return self.with_calls(verb, *operands) or advice


class Fix(NamedTuple):
    """A line of code that makes a program right, or an advice."""

    text: str
    condition: str = ""  # if there are several, the one under which it is right
    site: callsite.Site | None = None  # if it is not the line of the error


def fix_lines(fixes: Sequence[Fix]) -> str:
    """Return the fixes of an error, one on each line."""
    lines = []
    for x in fixes:
        when = [f"at {str(x.site).partition(' in ')[0]}"] if x.site else []
        when += [f"if {x.condition}"] if x.condition else []
        lines.append(f"{', '.join(when)}:  {x.text}" if when else x.text)
    return "\n  or, ".join(lines)


# --- fixes of an operand --------------------------------------------------------------------------------------


def fix_of_whole_tree(scene: Scene, axes: Sequence[str], leaf: Operand) -> str:
    """Return the fix of all leaves of an argument, if the operand is one of them."""
    root, (tree, is_item, _) = (leaf.info.name or "").partition("[")[0], scene.name(leaf).partition("[")
    leaves = [info for info in scene.checker.arguments if (info.name or "").startswith(f"{root}[")]
    if not is_item or len(leaves) < 2:
        return ""
    line = f"{tree} = {scene.call('unshard', tree, 'its specs', axes_source(axes))}"
    if all(info.type.invariant.issuperset(axes) for info in leaves):
        line = f"{tree} = {scene.call('pvary', tree, axes_source(axes))}, before its first use"
    inside = " in the function that is differentiated" if scene.checker.differentiated(leaf.tensor) else ""
    return f"\n  or, for all of {tree}:  {line}{inside}"


def fix_before_vmap(checker: Facts, leaf: Operand, axes: str) -> str:
    """Return the fix of per-example gradients of a leaf: a pvary in the arguments of the call of torch.func.vmap."""
    frame: Any = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.endswith("_functorch/vmap.py"):
        frame = frame.f_back
    frame = frame and callsite.user_frame(frame)
    scene = Scene(checker, frame=frame)
    line = scene.with_calls("pvary", (leaf, axes))
    advice = f"{scene.call('pvary', leaf.info.name or '...', axes)} before torch.func.vmap, and not inside it"
    return fix_lines([Fix(line, "", scene.site) if line else Fix(advice)])


def reduced_over_another_axis(r: Reduction, axes: Sequence[str]) -> Fix:
    """Return the fix of an earlier reduction that was meant to be over other axes."""
    line = rewritten(r.site, lambda at: at.with_axis(axes_source([r.axis]), axes_source(axes)))
    return Fix(line or f"name {axes_text(axes)} there", f"the {r.verb} there is to be over {axes_text(axes)}", r.site)


def fixes_of_superfluous_sums(info: TensorInfo, axes: Sequence[str]) -> list[Fix]:
    """Return the fixes of sums by which a value is invariant over `axes`, if they seem to be one axis too many.

    That is a psum over other axes too, and one of a product whose contracted dim the axis does not split.
    """
    fixes = []
    for r in info.history.reductions:
        others = [x.axis for x in info.history.reductions if x.site == r.site and x.axis not in axes]
        product = next((p for p in info.history.partials[:1] if p.op == "matmul" and r.axis not in p.axes), None)
        if r.axis not in axes or r.verb != "psum" or not (called_at(r.site) or "").endswith("psum"):
            continue
        if others:
            old = axes_source([x.axis for x in info.history.reductions if x.site == r.site])
            line = rewritten(r.site, functools.partial(Expression.with_axis, old=old, new=axes_source(others)))
            fixes.append(Fix(line or f"leave {r.axis!r} out there", f"the psum there is not over {r.axis!r}", r.site))
        elif product:
            line = rewritten(r.site, Expression.without_call_of_statement)
            fixes.append(Fix(line or "leave it out", "the psum there is one too many", r.site))
    return fixes


# --- fixes of a value that varies -----------------------------------------------------------------------------


def fix_of_partial(checker: Facts, x: Operand, axes: Sequence[str]) -> str:
    """Return the fixes of a value that varies over `axes` and must not."""
    here = x.info.site
    if package := callsite.package_of(here):
        name = qualified_name(callsite.user_frame(), "pmean")
        loss = f"{name.removesuffix('pmean')}nn.cross_entropy(logits, targets, over={axes_source(axes)})"
        return fix_lines([Fix(f"{name}(..., {axes_source(axes)}) of what {package} returns to your code", IS_MEAN),
                          Fix(f"{loss} in your code", "counts differ, as with padding")])  # fmt: skip
    if fix := fix_of_gather(x.info, axes, here) or _fix_of_cross_entropy(checker, x, axes):
        return fix_lines([fix])
    fixes = fixes_of_partials(x.info, axes, here)
    if (called_at(here) or "").endswith(".update"):  # of an optimizer: a mean of weights is another training
        return fix_lines(fixes) or f"sum the gradients over {axes_text(axes)} before the update"
    if not fixes:
        fixes = [Fix(call_at(here, verb, axes), _WHOLE[verb]) for verb in ("pmean", "psum")]
    if x.tensor.ndim:
        fixes += [Fix(f"name {axes_text(axes)} in its out spec", "each rank is to return its part"),
                  Fix(call_at(here, "all_gather", axes, 'to="invariant"'), "each rank has some rows")]  # fmt: skip
    return fix_lines(fixes)


def _fix_of_cross_entropy(checker: Facts, x: Operand, axes: Sequence[str]) -> Fix | None:
    """Return the fix of a cross-entropy that lacks `axis=`, or `over=`; None for another value.

    An axis that splits the targets splits the examples. Where the targets are the same on its ranks, it splits classes.
    """
    sites = [x.info.site, *(p.site for p in x.info.history.partials)]
    site, called = next(((s, c) for s in sites if (c := called_at(s)) and c.endswith("cross_entropy")), (None, ""))
    mixed = {a for (s, a), m in checker.mixtures.items() if s == site and m.op in ("gather", "nll_loss_forward")}
    is_ours = called.rpartition(".")[0].endswith("nn")  # and not torch.nn.functional, or F
    name = "axis" if mixed.issuperset(axes) else "over" if is_ours else ""
    if not (called and name) or (mixed.intersection(axes) and name != "axis"):
        return None

    def rewrite(at: Expression) -> str | None:
        if f"{name}=" in at.text:
            return None
        ours = qualified_name(callsite.user_frame(), "nn") + ".cross_entropy"
        text = at.text if is_ours else at.text.replace(called, ours, 1)
        return at.with_text(f"{text.removesuffix(')')}, {name}={axes_source(axes)})")

    line = rewritten(site, rewrite)
    return Fix(line, "", _elsewhere(site, x.info.site)) if line else None


def fix_of_gather(x: TensorInfo, axes: Sequence[str], here: callsite.Site | None = None) -> Fix | None:
    """Return the fix of a value that varies over the axes only by an all_gather, and must not: at the all_gather."""
    sites = {r.site for r in x.history.gathers if r.axis in axes}
    if len(sites) != 1 or not set(axes) <= {r.axis for r in x.history.gathers}:
        return None
    (site,) = sites
    called = called_at(site)
    if called is not None and called.rpartition(".")[2] != "all_gather":  # of unshard, which gathers on the way
        return None
    text = rewritten(site, lambda at: at.with_text(f'{at.text.removesuffix(")")}, to="invariant")'))
    return Fix(text or 'fs.all_gather(..., to="invariant")', "", _elsewhere(site, here))


def fixes_of_partials(x: TensorInfo, axes: Sequence[str], here: callsite.Site | None) -> list[Fix]:
    """Return the fixes of operations that reduced a dim on the way to a value, if the axes may split it."""
    partials = [p for p in x.history.partials if p.axes & set(axes)]
    if [p.verb for p in partials] == ["pmean", "psum"]:  # the mean of a sum that has a part on each rank
        partials.reverse()
    sums = [p.axes for p in partials if p.verb == "psum" and p.op == "matmul"]
    if sums and set(axes) <= sums[0]:
        partials = [p for p in partials if p.verb != "pmean"]
    if any(r.verb == "pmean" for r in x.history.reductions):  # an accuracy: the other axis splits what argmax reduces
        partials.sort(key=lambda p: p.verb != "all_gather")
    fixes = [_fix_of_reduction(p, axes, _elsewhere(p.site, here)) for p in partials]
    return list(dict.fromkeys(fixes))


def _elsewhere(site: callsite.Site | None, here: callsite.Site | None) -> callsite.Site | None:
    """Return a place, if it is not on the line of the error."""
    return site if site and (here is None or site.line != here.line) else None


def _fix_of_reduction(p: Partial, axes: Sequence[str], site: callsite.Site | None) -> Fix:
    """Return the fix of an operation that reduced a dim that is split over the ranks."""
    called = called_at(p.site)
    name = called.rpartition(".")[2] if called else p.op
    if not (name in p.op or p.op in name or name in _REDUCES):  # a function that also does other things
        return Fix(f"pass {called} the axes, or the specs, that split its arguments", _WHOLE.get(p.verb, ""), site)
    if p.verb != "all_gather":
        return Fix(call_at(p.site, p.verb, axes), _WHOLE[p.verb], site)
    name = qualified_name(callsite.user_frame(), "all_gather")
    arguments = f'{axes_source(axes)}, {-1 if p.dim is None else p.dim}, to="invariant"'
    line = rewritten(p.site, lambda at: at.with_first_operand(lambda x: f"{name}({x}, {arguments})"))
    text = line or f"{name}(..., {arguments}) before this line"
    return Fix(text, f"{axes_text(axes)} splits what {p.op} reduces", site)


# --- axes, and parts of a line ---------------------------------------------------------------------------------


def call_at(site: callsite.Site | None, verb: str, axes: Sequence[str], *more: str) -> str:
    """Return a line with a call around the expression that is at a place."""
    name = qualified_name(callsite.user_frame(), verb)
    arguments = ", ".join((axes_source(axes), *more))
    return rewritten(site, lambda at: at.with_text(f"{name}({at.text}, {arguments})")) or f"{name}(..., {arguments})"


def mixed_axes(invariant: TensorInfo, varying: TensorInfo) -> list[str]:
    """Return the axes over which one operand is invariant and the other varies."""
    return sorted(invariant.type.invariant & varying.type.varying)


def axes_source(axes: Sequence[str]) -> str:
    """Return axes as an argument: `"data"`, `("data", "model")`."""
    return f'"{axes[0]}"' if len(axes) == 1 else "(" + ", ".join(f'"{a}"' for a in axes) + ")"


def axes_text(axes: Sequence[str]) -> str:
    """Return axes in a sentence: `'data' and 'model'`."""
    return " and ".join(map(repr, axes))
