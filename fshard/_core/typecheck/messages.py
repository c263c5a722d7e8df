"""The texts of the checker's errors: the line, the operands as the user's code names them, the reasons, the fix."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fshard._core import callsite
from fshard._core.ops import differentiable_dtype
from fshard._core.protocol import size_of
from fshard.errors import ShardingError, fail
from fshard.spec import P, format_axes

from .fixes import (
    CAPTURED,
    IS_MEAN,
    IS_SUM,
    Fix,
    Scene,
    axes_source,
    axes_text,
    call_at,
    fix_before_vmap,
    fix_lines,
    fix_of_gather,
    fix_of_partial,
    fix_of_whole_tree,
    fixes_of_partials,
    fixes_of_superfluous_sums,
    mixed_axes,
    reduced_over_another_axis,
)
from .suggestion import Expression, called_at, qualified_name, rewritten
from .types import Facts, GlobalShape, History, Mixture, MixtureText, Operand, TensorInfo, show_type

_SHOWN_RESULTS = 4
_SHARED = "processes would each change a copy of their own, and simulated ranks, which are threads, share one"
_GATHERED = "all_gather gives every rank the whole value, and types it as varying"
_EQUAL = "the value is the same on each of the {n} ranks already: "
_PICKS = ("slice", "select")  # operations that pick a part of their operand by a number
_WRONG_COLLECTIVE = {
    "psum": _EQUAL + "the sum would count it {n} times",
    "pmean": _EQUAL + "the mean would not change it, and would scale its gradient by 1/{n}",
    "psum_scatter": _EQUAL + "the sum would count it {n} times",
    "all_gather": _EQUAL + "the result would be {n} copies of it",
    "all_to_all": _EQUAL + "they would exchange pieces of one value",
    "all_to_all_rows": _EQUAL + "they would exchange rows of one value",
    "ppermute": _EQUAL + "they would send each other what they have",
    "pmax": _EQUAL + "the maximum is that value",
    "pmin": _EQUAL + "the minimum is that value",
    "pvary": "each of the {n} ranks has its own value already: their gradients are not to be summed",
    "pslice": "each of the {n} ranks has its own value: they would keep pieces of different values",
}


# --- operations -----------------------------------------------------------------------------------------------


def invariant_mixed_with_varying(
    checker: Facts, op: str, axis: str, invariant: Operand, varying: Operand, operands: Sequence[Operand]
) -> ShardingError:
    """Word the error of an operation with one operand that is invariant over an axis and one that varies over it."""
    scene, axes = Scene(checker, operands, op), mixed_axes(invariant.info, varying.info)
    if axis in invariant.info.type.drawn | varying.info.type.drawn:
        return _random_draw_mixed(scene, axis, op, invariant, varying)
    is_bias = op in ("add", "sub") or (op == "matmul" and len(operands) == 3 and invariant.tensor is operands[0].tensor)
    if is_bias and scene.expression.reduced_by().startswith("psum"):
        n, name = size_of(axes, checker.sizes), scene.name(invariant)
        notes = [f"each of the {n} ranks of {axes_text(axes)} adds {name} to its part, so the sum has it {n} times"]
        fix = scene.expression.moved_out_of_sum(scene.node(invariant)) or f"add {name} after the sum, and not before it"
    elif sizes := _sizes_of_full_and_part(op, invariant.tensor, varying.tensor, size_of(axes, checker.sizes)):
        (dim, size, n), name = sizes, scene.name(invariant)
        notes = [f"{name} has {size} elements where {scene.name(varying)} has {size} / {n} = {size // n}"]
        fix = f"{name} is to be split in the same way: in spec P({', '.join([*['None'] * dim, axes_source(axes)])})"
    else:
        notes, fix = _reason_and_fix(scene, axes, op, invariant, varying, _to_vary(checker, operands))
    return _error(scene.site, _mix_of(op, axes), [scene.row(invariant), scene.row(varying)], *notes, fix=fix)


def _sizes_of_full_and_part(op: str, full: Tensor, part: Tensor, n: int) -> tuple[int, int, int] | None:
    """Return the dim of an operand that has `n` times the size of another one's, with its size and `n`, or None."""
    dims = zip(range(1, full.ndim + 1), full.shape[::-1], part.shape[::-1], strict=False)
    found = [(full.ndim - i, size, n) for i, size, of_part in dims if size == n * of_part > n]
    return found[0] if found and op in ("add", "sub", "mul", "div") else None


def _to_vary(checker: Facts, operands: Sequence[Operand]) -> list[tuple[Operand, list[str]]]:
    """Return each operand that has a gradient, with the axes over which it is invariant and another one varies."""
    varying = frozenset[str]().union(*(o.info.type.varying for o in operands))
    found = {id(o.tensor): (o, sorted(varying & o.info.type.invariant)) for o in operands}
    return [(o, axes) for o, axes in found.values()
            if axes and differentiable_dtype(o.tensor) and checker.differentiated(o.tensor)]  # fmt: skip


def _mix_of(op: str, axes: Sequence[str]) -> str:
    over, it = axes_text(axes), "it" if len(axes) == 1 else "them"
    return f"{op} of an operand that is invariant (I) over {over} with one that varies (V) over {it}"


def _reason_and_fix(
    scene: Scene, axes: Sequence[str], op: str, invariant: Operand, varying: Operand,
    to_vary: Sequence[tuple[Operand, list[str]]],
) -> tuple[list[str], str]:  # fmt: skip
    n, source = size_of(axes, scene.checker.sizes), axes_source(axes)
    one, many = scene.name(invariant), scene.name(varying)
    if scene.is_batched(invariant, varying):
        why = f"each of the {n} ranks of {axes_text(axes)} has different examples, with a gradient for each of them"
        return [why], fix_before_vmap(scene.checker, invariant, source)
    gathered = fix_of_gather(varying.info, axes, scene.site)
    if gathered and not scene.checker.differentiated(varying.tensor):
        choices = [
            gathered._replace(condition=f"{many} is the same on every rank"),
            Fix(scene.line_with("pvary", (invariant, source)), f"each rank is to use {one} in its own way"),
        ]
        return [_GATHERED], fix_lines(choices)
    notes = _reason_for_pvary(n, axes, f"combines {one} with different values")
    if made := invariant.info.origin == "made":
        notes += [f"{one} was made here, from nothing: where it is differentiated it is one value for all ranks"]
    notes += [f"the same is true of {scene.name(o)} and the ranks of {axes_text(more)}" for o, all_axes in to_vary
              if (more := [a for a in all_axes if o is not invariant or a not in axes])]  # fmt: skip
    choices = [Fix(scene.line_with("pvary", *((o, axes_source(all_axes)) for o, all_axes in to_vary)))]
    partials = fixes_of_partials(varying.info, axes, scene.site)
    reduced = any(r.axis in axes for r in invariant.info.history.reductions)
    if op in ("add", "sub") and partials and (reduced or partials[0].site is None):
        choices = [*partials[:1], Fix(choices[0].text, f"each rank is to keep its own {many}")]
    elif partials and varying.info.op in ("mean", "sum"):
        choices = [Fix(choices[0].text, f"each rank is to use {one} in its own way"), *partials[:1]]
    if line := scene.without_pvary(varying):
        choices = [Fix(choices[0].text, f"each rank is to use {one} in its own way"),
                   Fix(line, "both operands are the same on every rank")]  # fmt: skip
    if made:
        choices = [Fix(choices[0].text, f"{one} is one value"),
                   Fix(_with_pvary_of_leaf(invariant.info.site, axes), f"each rank is to have a {one} of its own",
                       invariant.info.site)]  # fmt: skip
    reductions: list[Fix] = []
    for o, other in ((invariant, varying), (varying, invariant)):  # each varies over an axis of the other's
        others = sorted(o.info.type.varying & other.info.type.invariant)
        reductions += [reduced_over_another_axis(r, others) for r in o.info.history.reductions
                       if others and r.axis in other.info.type.varying]  # fmt: skip
    reductions = reductions or fixes_of_superfluous_sums(invariant.info, axes)
    if reductions and not choices[0].condition:
        choices[0] = choices[0]._replace(condition=f"each rank is to use {one} in its own way")
    choices = [*reductions, *choices]
    return notes, fix_lines(choices) + fix_of_whole_tree(scene, axes, invariant)


def _with_pvary_of_leaf(site: callsite.Site | None, axes: Sequence[str]) -> str:
    """Return a line that makes a tensor with a pvary of it, which leaves it a leaf."""
    pvary = f"{qualified_name(callsite.user_frame(), 'pvary')}({{}}, {axes_source(axes)})"

    def rewrite(at: Expression) -> str | None:
        plain = at.text.replace(", requires_grad=True", "")
        return at.with_text(pvary.format(plain) + (".requires_grad_()" if plain != at.text else ""))

    return rewritten(site, rewrite) or f"{pvary.format('...')} where it is made"


def _random_draw_mixed(scene: Scene, axis: str, op: str, invariant: Operand, varying: Operand) -> ShardingError:
    draw, other = (invariant, varying) if axis in invariant.info.type.drawn else (varying, invariant)
    axes = sorted(draw.info.type.drawn.intersection(mixed_axes(invariant.info, varying.info)))
    over, source = axes_text(axes), axes_source(axes)
    n, name = size_of(axes, scene.checker.sizes), scene.known_name(draw) or "the draw"
    rows = [scene.row(draw, name), scene.row(other, scene.known_name(other) or "the other operand")]
    known = scene.known_name(other)
    if draw is invariant:
        what = f"{op} of a random draw that is the same on every rank of {over} with a varying operand"
        why = f"the {n} ranks hold different parts, and would all use the same random numbers"
        fixes = [
            Fix(f"name {over} in the spec of the draw, and pass its global shape, fs.global_shape(x, spec)",
                "each rank is to have numbers of its own"),
            Fix(scene.line_with("pvary", (draw, source)), "all ranks are to use the same numbers"),
        ]  # fmt: skip
        if op in ("add", "sub") and draw.tensor.shape == other.tensor.shape:
            why, fixes = _reason_and_fixes_of_noise(scene, axes, op, draw, name, other, rows[1][0])
        elif (called_at(scene.site) or "").endswith("dropout"):
            spec = f"P({source}) if {over} splits dim 0"
            if len(other.info.type.varying) > 1:
                spec = f"P(...), with {axes_text(sorted(other.info.type.varying))} at the dims that they split"
            fixes = [Fix(f"give dropout the spec of its argument: spec={other.info.spec or spec}")]
    else:
        what = f"{op} of a random draw that differs between the ranks of {over} with an invariant operand"
        why = f"the {n} ranks hold the same value, and each would change it by its own random numbers"
        fixes = [
            Fix(f"draw with a spec that does not name {over}, by a key without fold_in of axis_index({source})",
                f"{known or 'the other operand'} is to stay the same on every rank"),
            Fix(scene.line_with("pvary", (other, source)), "each rank is to have its own random value"),
        ]  # fmt: skip
    return _error(scene.site, what, rows, why, *_drawn_at(scene, draw, name), fix=fix_lines(fixes))


def _reason_and_fixes_of_noise(
    scene: Scene, axes: Sequence[str], op: str, draw: Operand, name: str, other: Operand, to: str
) -> tuple[str, list[Fix]]:
    """Return why a draw that is the same on every rank is not to be added to a value that varies, and the fixes.

    A pvary is never right here: the sum over ranks would have the numbers n times, and parts would all use the same.
    """
    over, add = axes_text(axes), "subtract" if op == "sub" else "add"
    verb = scene.expression.reduced_by()
    if verb in ("psum", "pmean"):
        n = size_of(axes, scene.checker.sizes)
        times = f", so the sum has it {n} times" if verb == "psum" else ""
        moved = scene.expression.moved_out_of_sum(scene.node(draw))
        return (f"each of the {n} ranks of {over} adds {name} to its part{times}",
                [Fix(moved or f"{add} {name} after the {verb}, and not before it")])  # fmt: skip
    parts = f"different parts of {to}{'' if other.info.name else ', or parts of a sum'}"
    spec_fix = f"name {over} in the spec of the draw, and pass its global shape"
    fixes = [Fix(f"{add} {name} after the psum of {to}, and not before it", IS_SUM),
             Fix(spec_fix, f"each rank has other elements of {to}")]  # fmt: skip
    if verb:  # psum_scatter
        fixes = [Fix(f"{spec_fix}; and {add} {name} after the {verb}, and not before it")]
    elif other.info.name:
        fixes = fixes[1:]
    why = f"the ranks hold {parts}, and would all use the same random numbers"
    return why, fixes if other.info.history.partials else fixes[::-1]


def _drawn_at(scene: Scene, draw: Operand, name: str) -> list[str]:
    site = draw.info.site
    return [f"{name} was drawn at {site}"] if site and str(site) != str(scene.site) else []


def mixture_text(
    checker: Facts, op: str, operands: Sequence[Operand], invariant: Operand, varying: Operand
) -> MixtureText:
    """Return the texts of the operation that is executing, for an error that comes later."""
    scene = Scene(checker, operands, op)
    axes = axes_source(mixed_axes(invariant.info, varying.info))
    rows = scene.row(invariant), scene.row(varying)
    lines = {"pvary": scene.line_with("pvary", (invariant, axes))}
    lines |= {verb: scene.line_with(verb, (varying, axes)) for verb in ("pmean", "psum")}
    return MixtureText(rows, **lines, without_pvary=scene.without_pvary(varying))


def update_of(x: Operand, axes: Sequence[str]) -> Mixture | None:
    """Return the mixture that made a value, which varies over one of the axes, of an argument of its shape."""
    mixtures = [m for m in x.info.history.mixtures if m.axis in axes and m.is_update]
    return next((m for m in mixtures if m.shape == tuple(x.tensor.shape)), None)


def argument_overwritten(
    checker: Facts, op: str, x: Operand, varying: Operand, operands: Sequence[Operand], history: History,
    axes: Sequence[str],
) -> ShardingError:  # fmt: skip
    """Word the error of an operation that writes values that vary over `axes` into an argument that does not."""
    scene = Scene(checker, operands, op)
    name, n, over = scene.name(x), size_of(axes, checker.sizes), axes_source(axes)
    what = f"{op} in place writes values that vary over {axes_text(axes)} into {name}, which does not"
    if parted := _parted(varying.info.history, axes):
        return _error(scene.site, what, [scene.row(x, name), scene.row(varying)], parted[0], fix=parted[1])
    earlier = [f"they vary since {m.site}: {m.op} of {m.text.rows[0][0]} with {m.text.rows[1][0]}"
               for m in history.mixtures if m.axis in axes and m.site != scene.site]  # fmt: skip
    return _error(scene.site, what, [scene.row(x, name), scene.row(varying)], *earlier,
                  f"the {n} copies of {name} would drift apart",
                  fix=fix_lines([Fix(scene.line_with("pmean", (varying, over)), IS_MEAN),
                                Fix(scene.line_with("psum", (varying, over)), IS_SUM)]))  # fmt: skip


def captured_written(checker: Facts, op: str, x: Operand, operands: Sequence[Operand]) -> ShardingError:
    """Word the error of an operation that writes to a tensor from outside the region."""
    scene = Scene(checker, [x, *operands], op)
    return _error(scene.site, f"{op} writes to a tensor that was made outside of shard_map", [scene.row(x)],
                  _SHARED,
                  fix="pass it as an argument, and return its new value (of a module's buffers: fs.defer(...) and "
                      "apply.with_buffers), or make it inside")  # fmt: skip


def captured_rows(checker: Facts, op: str, x: Operand, row: Operand, operands: Sequence[Operand]) -> ShardingError:
    """Word the error of a captured batch that meets the one row of a rank."""
    scene = Scene(checker, operands, op)
    what = f"{op} of all {len(x.tensor)} rows of {scene.name(x)} with the one row that each rank has"
    why = "one device uses row i with row i, and a rank its row with all rows"
    fix = "pass it as an argument, which in_specs splits"
    return _error(scene.site, what, [scene.row(x), scene.row(row)], why, fix=fix)


def placed_written(checker: Facts, op: str, x: Operand, operands: Sequence[Operand]) -> ShardingError:
    """Word the error of an operation that writes to a placed leaf of the caller, which is not donated."""
    scene = Scene(checker, [x, *operands], op)
    name = scene.name(x)
    fixes = [Fix(scene.expression.out_of_place() or f"{name} = {name}.clone() before this line"),
             Fix("fs.shard_map(..., donate=the argument's position)", f"the caller needs {name} no more")]  # fmt: skip
    return _error(scene.site, f"{op} writes to {name}, a placed leaf that the caller keeps", [scene.row(x)],
                  "an argument is not written to unless it is donated", fix=fix_lines(fixes))  # fmt: skip


def gradient_accumulated(leaves: Sequence[Operand]) -> ShardingError:
    """Word the error of a write to the `.grad` of tensors that the caller has."""
    site, n = callsite.site(), len(leaves)
    rows = [(o.info.name or CAPTURED, show_type(o)) for o in leaves[:_SHOWN_RESULTS]]
    rows += [("...", f"and {n - _SHOWN_RESULTS} more")] if n > _SHOWN_RESULTS else []
    made = "made" if any(o.info.is_captured for o in leaves) else "placed"
    what = f"writes to the .grad of {'a tensor' if n == 1 else f'{n} tensors'} {made} outside of shard_map"
    why = _SHARED if made == "made" else "it would stay on the placed leaf, and each backward pass would add to it"
    passed = "pass what is trained as an argument, and " if made == "made" else ""
    return _error(site, what, rows, why,
                  fix=f"{passed}take its gradient by fs.value_and_grad or torch.autograd.grad, for an optimizer of "
                      "fs.optim")  # fmt: skip


def made_by_another_rank(x: Operand, coords: Mapping[str, int], axes: Sequence[str]) -> ShardingError:
    """Word the error of a tensor that the rank at `coords` made, whose value differs from this rank's over `axes`."""
    made = [f"it was made by {x.info.op} at {x.info.site}"] if x.info.site else []
    return _error(callsite.site(), f"uses a tensor that another rank made, and that varies over {axes_text(axes)}",
                  [("tensor", show_type(x)), ("made by the rank at", format_axes({a: coords[a] for a in axes}))], *made,
                  "simulated ranks are threads, and share what a program keeps (functools.cache, a global)",
                  fix="make it in each call, on each rank; keep only what is the same on every rank")  # fmt: skip


def copies_differ(
    checker: Facts, m: Mixture, axes: Sequence[str], what: str, rows: Sequence[tuple[str, str]]
) -> ShardingError:
    """Word the error of an argument's new value, which varies over `axes`; the argument does not over some of them."""
    axes = [a for a in mixed_axes(m.invariant, m.varying) if a in axes]
    if parted := _parted(m.varying.history, axes):
        why, fix = parted
        return _error(m.site, what, [*m.text.rows, *rows], why, fix=fix)
    name, n, over = m.text.rows[0][0], size_of(axes, checker.sizes), axes_text(axes)
    cause = (m.earlier or m).varying
    if cause.type.differentiable or cause.history.partials:
        fixes = fixes_of_partials(m.varying, axes, m.site)
        fixes = fixes or [Fix(m.text.pmean, IS_MEAN), Fix(m.text.psum, IS_SUM)]
        fixes += [reduced_over_another_axis(r, axes) for r in m.varying.history.reductions
                  if r.axis in m.invariant.type.varying]  # fmt: skip
        fix = fix_lines(fixes)
    else:
        fix = f"use the same number on every rank of {over}"
    why = f"{name} is one value, and the {n} ranks of {over} would make {n} different values of it"
    what = f"{m.op} of an operand that is invariant (I) over {over} with one that varies (V): {what}"
    return _error(m.site, what, [*m.text.rows, *rows], why, fix=fix)


def indexed_by_varying(checker: Facts, m: Mixture) -> ShardingError:
    """Word the error of an invariant operand with a gradient that was indexed by an integer that varies."""
    name, axes = m.text.rows[0][0], mixed_axes(m.invariant, m.varying)
    it = "it" if len(axes) == 1 else "them"
    what = f"{m.op} of a value that is invariant over {axes_text(axes)}, by an integer or bool that varies over {it}"
    notes = _reason_for_pvary(size_of(axes, checker.sizes), axes, f"picks its own elements of {name}")
    return _error(m.site, what, m.text.rows, *notes, fix=m.text.pvary)


def mixed_before(checker: Facts, m: Mixture) -> ShardingError:
    """Word the error of a mixture that only the gradient shows: of a captured tensor, or in an autograd.Function."""
    name, axes = m.text.rows[0][0], mixed_axes(m.invariant, m.varying)
    call = f"fs.pvary({m.invariant.name or name}, {axes_source(axes)})"
    notes = _reason_for_pvary(size_of(axes, checker.sizes), axes, f"combines {name} with different values")
    fix = f"pass {call} to the function that this line is in"
    if name == CAPTURED:  # of a module
        params = f"fs.pvary(dict(module.named_parameters()), {axes_source(axes)})"
        fix = f"call the module by torch.func.functional_call(module, {params}, arguments)"
    elif m.invariant.is_captured:
        fix = m.text.pvary
    return _error(m.site, _mix_of(m.op, axes), m.text.rows, *notes, fix=fix)


def draw_from_torch_generator(op: str) -> ShardingError:
    """Word the error of a draw from torch's generator."""
    fixes = [
        Fix("use fs.random.* or fs.nn.dropout, with a key: element i is a function of the key and i"),
        Fix("apply(params, buffers, ..., key=key), or apply.eval()", "a module of fs.defer draws"),
    ]
    if callsite.package_of(callsite.site()):
        fixes = [Fix("apply(params, buffers, ..., key=key); without dropout, apply.eval()")]
    return _error(callsite.site(), f"{op} draws from torch's own generator", [],
                  "its numbers depend on the process and on earlier draws, so another mesh would give another answer",
                  fix=fix_lines(fixes))  # fmt: skip


def reduction_of_no_value(op: str, x: Tensor) -> ShardingError:
    """Word the error of a maximum or minimum of no elements, as of an empty part."""
    return _error(callsite.site(), f"{op} of no elements, of a tensor of shape {list(x.shape)}", [],
                  fix="give each rank a part, or add an element first: torch.cat, with the least value for a maximum"
                  )  # fmt: skip


def number_differs(
    op: str, site: callsite.Site | str | None, axis: str, numbers: Sequence[tuple[str, tuple[Any, ...]]]
) -> ShardingError:
    """Word the error of an invariant value computed from a Python number that differs between ranks."""
    rows, parts = [(rank, ", ".join(map(repr, values))) for rank, values in numbers], [values for _, values in numbers]
    what = f"{op} of a value that is invariant over {axis!r} with a number that differs between its ranks"
    why = "types do not cover Python numbers: the result is typed as invariant and is not"
    same = Fix(f"use the same number on every rank of {axis!r}", "the result is to be one value")
    if op in ("pvary", "pslice"):  # of a tensor that starts at another element on each rank
        rows = [(rank, f"from element {offsets[0]}") for rank, offsets in numbers]
        what = f"{op} of a different part, on each rank of {axis!r}, of an invariant value"
        why = "types do not cover Python numbers: a part picked by a number is typed as the same on all ranks"
        fixes = [Fix(f'fs.pslice(x, "{axis}")', "it picks the part of each rank"),
                 Fix("pick the same part on every rank", "the result is to be one value")]  # fmt: skip
    elif op == "pmean of a mean":
        what = f"{op} over {axis!r}, of different counts of values"
        why = "a mean of means is the mean only of equal counts"
        line = rewritten(site, Expression.mean_of_all) if isinstance(site, callsite.Site) else None
        fixes = [Fix(line or f"divide the sum of all values by their number, each of them a psum over {axis!r}")]
    elif isinstance(parts[0][0], GlobalShape):
        which = "shape" if op.startswith("random.") else "size"
        what = f"{op} with a global {which} that differs between ranks of {axis!r}"
        why = ("each takes its part of another array: a local size times fs.axis_size is the global size only "
               "where the axis divides it")  # fmt: skip
        fixes = [Fix(f'fs.global_shape(x, P("{axis}"))', f"x is a tensor that {axis!r} splits"),
                 Fix("use the same one on every rank", "it is of another array")]  # fmt: skip
    elif op in _PICKS:
        first = parts[0]
        size = first[2] - first[1] if op == "slice" else 0
        equal = size > 0 and all(x == (first[0], i * size, (i + 1) * size, 1) for i, x in enumerate(parts))
        fixes = [_fix_of_picked_part(site, [axis], first[0] if equal else None)._replace(site=None), same]
    else:
        fixes = [same, Fix(f'apply fs.pvary(..., "{axis}") to the operand of {op}', "the ranks are to differ")]
    return _error(site, what, rows, why, fix=fix_lines(fixes))


def _fixes_of_picks(checker: Facts, axes: Sequence[str], here: callsite.Site | None) -> list[Fix]:
    """Return the fix of the last part of an invariant value that a name picks, if that may be a number of the rank."""
    if not checker.asked.issuperset(axes):
        return []
    picks = [site for op, site, invariant, _ in checker.numbers if op in _PICKS and invariant.issuperset(axes)]
    fixes = [_fix_of_picked_part(site, axes) for site in picks[-1:]]
    return [x._replace(site=None) if here and x.site.line == here.line else x for x in fixes if x.site]


def _fix_of_picked_part(site: callsite.Site | str | None, axes: Sequence[str], dim: int | None = None) -> Fix:
    """Return the fix of a part of an invariant value that is picked by a number of the rank, as of local_range.

    It has a place if it is a line of code. The ranks are known to pick equal parts of `dim`, in order, if it is given.
    """
    source = axes_source(axes)

    def pick(at: Expression) -> str | None:
        if dim is not None and (x := at.sliced_operand(dim)):
            return at.with_text(f"fs.pslice({x}, {source}{f', {dim}' if dim else ''})")
        return at.with_picked_operand(lambda x: f"fs.pvary({x}, {source})")

    site = site if isinstance(site, callsite.Site) else None  # a str is from another process
    line = rewritten(site, pick)
    return Fix(line or f"apply fs.pvary(..., {source}) to the value before the part is picked",
               "the number there picks the part of each rank", site if line else None)  # fmt: skip


# --- collectives ----------------------------------------------------------------------------------------------


def collective_of_wrong_type(checker: Facts, m: Any, x: Operand, axes: Sequence[str]) -> ShardingError:
    """Word the error of a collective whose operand has the wrong type over `axes`."""
    verb, scene = m.verb, Scene(checker)
    why = _WRONG_COLLECTIVE[verb].format(n=size_of(axes, checker.sizes))
    if m.origin is not None:
        state = f"does not vary over {axes_text(axes)}" if m.takes == "V" else f"varies over {axes_text(axes)} already"
        gathers = [fix_of_gather(mixture.varying, axes, m.origin) for mixture in _index_mixtures(checker, axes)]
        fixes = list(dict.fromkeys(filter(None, gathers)))
        return _error(m.origin, f"the gradient of this collective's result {state}", [("gradient", show_type(x))],
                      *_index_notes(checker, axes), f"the transpose of this collective is {verb}: {why}",
                      *[_GATHERED][: len(fixes)], fix=fix_lines(fixes))  # fmt: skip
    update = next((m for m in x.info.history.mixtures if m.axis in axes and m.is_update), None)
    if verb in ("pvary", "pslice") and update is not None:
        return copies_differ(checker, update, axes, f"{scene.name(x)} varies at the {verb} of {scene.site}", [])
    drop, operand = _fix_of_superfluous(scene, m, x, axes)
    other_axes = [a for a in m.axes if a not in axes]
    called = scene.expression.called()
    meant = sorted(x.info.type.varying if m.takes == "V" else x.info.type.invariant)
    choices = []
    is_twice = x.info.op == verb and x.tensor.ndim > 0
    if not other_axes and meant and len(axes) == 1 and called == verb and not is_twice:
        moved = scene.expression.with_axis(axes_source(axes), axes_source(meant))
        state = "varies" if m.takes == "V" else "does not"
        choices += [Fix(moved, f"{axes_text(meant)} is meant, over which the value {state}")] if moved else []
        choices += [reduced_over_another_axis(r, meant) for r in x.info.history.reductions
                    if m.takes == "V" and r.axis in axes]  # fmt: skip
    for r in x.info.history.reductions if verb == "pmean" else ():
        is_written = (called_at(r.site) or "psum").endswith("psum")  # and not in a batch norm
        of_products = any(p.op == "matmul" and r.axis in p.axes for p in x.info.history.partials)
        if r.verb == "psum" and r.axis in axes and is_written and not of_products:
            line = rewritten(r.site, lambda at: at.with_text(at.text.replace("psum(", "pmean(", 1)))
            choices.append(Fix(line or "use pmean there", "the psum there is to be a mean", r.site))
    if verb == "pvary" and scene.site in checker.pvaried:
        why = f"{why}\nat an earlier run of this line the value did not vary over {axes_text(axes)}"
    if x.info.origin == "made" and m.takes == "V":
        choices.append(Fix(_with_pvary_of_leaf(x.info.site, axes), "each rank made a different value", x.info.site))
    if m.takes == "V" and not x.info.type.differentiable and differentiable_dtype(x.tensor):  # of a captured constant
        line = scene.line_with("pvary", (x, axes_source(axes)))
        choices.append(Fix(line, "a number of each rank, which types do not cover, picked or made its value"))
    if set(axes) & x.info.type.drawn:
        choices.append(Fix(f"name {axes_text(axes)} in the spec of the draw", "each rank is to draw its part"))
    if verb == "pvary" and (gather := fix_of_gather(x.info, axes, scene.site)):
        choices.append(gather)
    choices = (_fixes_of_picks(checker, axes, scene.site) if m.takes == "V" else []) + choices
    superfluous = Fix(drop, f"the {verb} is one too many" if choices else "")
    is_first = x.info.op == verb or (other_axes and verb in ("psum", "pmean"))
    is_first = is_first or (verb == called == "pvary" and bool(x.info.history.gathers))
    choices = [superfluous, *choices] if is_first else [*choices, superfluous]
    if verb == "pvary" and called in (None, verb) and x.info.name and x.info.spec:
        tree = operand or x.info.name.partition("[")[0]
        gather = Fix(f"{scene.call('unshard', tree, 'its specs', axes_source(axes))} in place of the pvary",
                     f"each rank is to compute with all of {tree}")  # fmt: skip
        choices = [gather, superfluous._replace(condition=f"the {verb} is one too many")]
    name = scene.known_name(x) or operand or scene.name(x)
    made = [f"it was made by {x.info.op} at {x.info.site}"] if x.info.site and x.info.op else []
    it = "it" if len(axes) == 1 else "them"
    state = f"does not vary over {it}" if m.takes == "V" else f"varies over {it} already"
    what = f"{verb} over {axes_text(axes)} of a value that {state}"
    return _error(scene.site, what, [scene.row(x, name)], *made, why, fix=fix_lines(choices))


def parts_of_gradient_reduced(
    checker: Facts, verb: str, x: Operand, dim: int, axes: Sequence[str]
) -> ShardingError:  # fmt: skip
    """Word the error of a psum or pmean of a gradient that the axes split."""
    scene, over = Scene(checker), axes_text(axes)
    line = scene.expression.without_call() if scene.expression.called() == verb else None
    return _error(scene.site, f"{verb} over {over} of a gradient whose dim {dim} is split over {over}", [scene.row(x)],
                  f"each rank has other elements of it, and the {verb} would mix them: the gradient of a split leaf is "
                  "complete", f"of a mean over the ranks the loss is fs.pmean(loss, {axes_source(axes)})",
                  fix=_or_delete(line) if line else f"leave the {verb} out")  # fmt: skip


def _fix_of_superfluous(scene: Scene, m: Any, x: Operand, axes: Sequence[str]) -> tuple[str, str | None]:
    """Return the fix of a collective that is one too many over `axes`, and its operand as the line has it."""
    verb, over = m.verb, axes_text(axes)
    called = scene.expression.called()
    arguments: list[str] = []

    def narrowed(sources: list[str]) -> str:
        arguments.extend(sources)
        other_axes = [a for a in m.axes if a not in axes]
        return scene.call(verb, sources[0], axes_source(other_axes)) if other_axes else sources[0]

    line = scene.expression.without_call(narrowed) if called == verb else None
    operand = arguments[0] if arguments else None
    if called not in (None, verb):
        if verb == "pvary" and (x.info.name or called.rpartition(".")[2] in ("unshard", "scan")):
            return f"pass {called} the spec of {x.info.name or 'each leaf'}, which names {over}", operand
        left_out = f"leave {over} out of the axes of {called}"
        if verb == "pvary" and not x.info.history.gathers:
            return f'fs.all_gather(..., {axes_source(axes)}, to="invariant") of the value first; or {left_out}', operand
        return left_out, operand
    if verb == "pvary" and scene.site in scene.checker.pvaried:
        name = operand or scene.name(x)
        return f"{name} = {scene.call(verb, name, axes_source(axes))} before the loop, and {name} alone in it", operand
    if verb == "pslice":
        return "leave the pslice out, if this is the rank's part already", operand
    if not line or verb == "ppermute" or len(arguments) > 2:  # the call has more effects than its collective
        return f"leave the {verb} over {over} out", operand
    return _or_delete(line), operand


def _or_delete(line: str) -> str:
    return "delete this line" if re.fullmatch(r"(.+?)\s*=\s*\1", line) else line


def _index_notes(checker: Facts, axes: Sequence[str]) -> list[str]:
    """Return the likely causes of a gradient that varies: lines that indexed an invariant operand."""
    return [f"{m.op} at {m.site}: {m.text.rows[0][0]} is invariant over {m.axis!r}, {m.text.rows[1][0]} varies over it"
            for m in _index_mixtures(checker, axes)][:3]  # fmt: skip


def _index_mixtures(checker: Facts, axes: Sequence[str]) -> list[Mixture]:
    return [m for m in checker.mixtures.values() if m.axis in axes and m.differentiated]


# --- losses, gradients, results -------------------------------------------------------------------------------


def loss_varies(checker: Facts, x: Tensor, loss: Operand, leaf: Operand, axes: Sequence[str]) -> ShardingError:
    """Word the error of a loss that varies over `axes`, over which a tensor that it is differentiated by does not."""
    parameter, n = _parameter(leaf.info), size_of(axes, checker.sizes)
    rows = [("loss", show_type(loss, x.shape)), (parameter, show_type(leaf))]
    if x.ndim < loss.tensor.ndim:
        why = f"each of the {n} ranks has different examples, and {parameter} has one gradient for each example of all"
        fix = fix_before_vmap(checker, leaf, axes_source(axes))
    else:
        why = f"each of the {n} ranks would differentiate its own loss, and {parameter} has one gradient"
        fix = fix_of_partial(checker, loss, axes)
    where, made = _place_of("the loss", loss.info.site, callsite.site())
    what = f"the loss that is differentiated varies over {axes_text(axes)}"
    return _error(where, what, rows, *made, why, fix=fix)


def loss_of_gathered_varies(checker: Facts, loss: Operand, leaf: Operand, axes: Sequence[str]) -> ShardingError:
    """Word the error of a mean of each rank that is differentiated by a gathered tensor."""
    parameter, n = _parameter(leaf.info), size_of(axes, checker.sizes)
    rows = [("loss", show_type(loss)), (parameter, show_type(leaf))]
    why = f"{parameter} was gathered: its gradient is the sum of the {n} ranks' gradients, {n} times the mean's"
    what, site = f"the loss that is differentiated is a mean of each rank of {axes_text(axes)}", loss.info.site
    if callsite.package_of(site):
        return _error(callsite.site(), what, rows, why, fix=fix_of_partial(checker, loss, axes))
    return _error(site, what, rows, why, fix=fix_lines([Fix(call_at(site, "pmean", axes), IS_MEAN)]))


def gradient_has_wrong_type(checker: Facts, leaf: Operand, grad: Operand, axes: Sequence[str]) -> ShardingError:
    """Word the error of a gradient that has another type than its parameter."""
    mixtures = {m.site: m for m in _index_mixtures(checker, axes)}
    if len(mixtures) == 1:
        return indexed_by_varying(checker, next(iter(mixtures.values())))
    known = (*checker.mixtures.values(), *(checker.mixtures_of_captured.get((leaf.info.root, a)) for a in axes))
    mixture = next((m for m in known if m and m.axis in axes and leaf.info.root in m.roots), None)
    if mixture is not None:
        return mixed_before(checker, mixture)
    parameter, n, over = _parameter(leaf.info), size_of(axes, checker.sizes), axes_text(axes)
    rows = [(parameter, show_type(leaf)), ("gradient", show_type(grad))]
    if grad.info.type.varying & set(axes):
        state, opposite = f"varies over {over}", "does not"
        same = f"{parameter} is the same on the {n} ranks of {over}"
        why = f"{same}, and each has a part of its gradient: a sum is missing"
        fix = f"apply fs.pvary({parameter}, {axes_source(axes)}) before the ranks use it with different values"
    else:
        state, opposite = f"is the same on every rank of {over}", "is not"
        why = f"the {n} ranks of {over} have different values of {parameter}"
        fix = f"look for a superfluous psum or pmean over {over} in the loss"
    what = f"the gradient of {parameter} {state}, and {parameter} {opposite}"
    return _error(callsite.site(), what, rows, *_index_notes(checker, axes), why, fix=fix)


def _parted(history: History, axes: Sequence[str]) -> tuple[str, str] | None:
    """Return the reason and the fix of a value that was computed from each rank's part of a gradient."""
    parted = {verb: sorted(a for a, v in history.parted if v == verb and a in axes) for verb in ("all_gather", "pvary")}
    verb = next((verb for verb in parted if parted[verb]), None)
    if verb is None:
        return None
    called, specs = ("fs.unshard", "their specs, ") if verb == "all_gather" else ("fs.pvary", "")
    why = f"{called} came before the function that is differentiated: each rank has a part of a gradient"
    call = f"{called}(parameters, {specs}{axes_source(parted[verb])})"
    return why, (
        f"call {call} in that function, and its transpose sums the parts\n"
        f"  or, reduce the gradients over {axes_text(axes)} before they are used: psum for a sum, pmean for a mean"
    )


def columns_of_a_part(checker: Facts, site: callsite.Site | None, axis: str, x: Operand, w: Operand) -> ShardingError:
    """Word the error of a product of the rows of an argument by the columns of a leaf, where one axis splits both."""
    infos = [checker.split_arguments[o.info.root] for o in (x, w)]
    rows = [(info.name or "", f"{show_type(o)}    in spec {info.spec}") for o, info in zip((x, w), infos, strict=True)]
    root, _, item = rows[1][0].partition("[")
    qualified = qualified_name(callsite.user_frame(), "unshard")
    fix = f"{root} = {qualified}({root}, its specs, {axes_source([axis])}){', before its first use,' if item else ''}"
    why = f"each of the {checker.sizes[axis]} ranks computes its rows with its columns, and not with the others'"
    what = f"matmul of rows and columns that {axis!r} splits"
    return _error(site, what, rows, why, fix=f"{fix} in the function that is differentiated")


def results_have_wrong_type(
    checker: Facts, name: str, rows: Sequence[tuple[str, Operand, P]], extra: Sequence[str], missing: Sequence[str],
    kept: Sequence[str] = (),
) -> ShardingError:  # fmt: skip
    """Word the error of results of one line that vary over `extra` axes, or do not vary over `missing` ones."""
    path, x, _ = rows[0]
    axes, many = extra or missing or kept, len(rows) > 1
    n, over = size_of(axes, checker.sizes), axes_text(axes)
    subject, vary, are = (f"{len(rows)} results", "vary", "are") if many else (path, "varies", "is")
    table = [(path, f"{show_type(o)}    out spec {spec}") for path, o, spec in rows[:_SHOWN_RESULTS]]
    if len(rows) > _SHOWN_RESULTS:
        table.append(("...", f"and {len(rows) - _SHOWN_RESULTS} more"))
    where, made = _place_of(path, x.info.site, name)
    if parted := _parted(x.info.history, axes):
        what = f"{subject} {'were' if many else 'was'} computed from a part of a gradient on each rank of {over}"
        why, fix = parted
        return _error(where, what, table, why, fix=fix)
    if extra:
        what = f"{subject} {vary} over {over}, which {'their out specs do' if many else 'its out spec does'} not name"
        update = update_of(x, extra)
        if update is not None:
            return copies_differ(checker, update, extra, what, table)
        notes = [f"{path} varies since {m.site}: {m.op} of {m.text.rows[0][0]} with {m.text.rows[1][0]}"
                 for m in x.info.history.mixtures if m.axis in extra]  # fmt: skip
        differ = f"the {n} ranks would return different values, and the out spec declares one value"
        why, fix = _GATHERED if fix_of_gather(x.info, axes) else differ, fix_of_partial(checker, x, axes)
        if any(o.info.op.endswith("batch_norm") for _, o, _ in rows):
            fix = f"apply.batch_norm_over({axes_source(extra)}), of all rows; or fs.pmean of the returned buffers"
        without = [Fix(m.text.without_pvary, "both operands are the same on every rank", m.site)
                   for m in x.info.history.mixtures if m.axis in extra and m.text.without_pvary]  # fmt: skip
        fix = "\n  or, ".join(filter(None, (fix, fix_lines(without))))
        return _error(where, what, table, *made, why, *notes, fix=fix)
    named = "their out specs name" if many else "its out spec names"
    what = f"{subject} {are} invariant over {over}, which {named}"
    why = f"the result would be {n} equal copies, and would have another size on another mesh"
    dim = next((d for d, names in enumerate(rows[0][2].parts(x.tensor.ndim)) if set(names) & set(axes)), 0)
    fix = fix_lines([
        *_fixes_of_picks(checker, axes, x.info.site),
        Fix(f"leave {over} out of the out spec", "the result is one value"),
        Fix(call_at(x.info.site, "pslice", axes, *([str(dim)] if dim else [])), "each rank is to return its part"),
    ])  # fmt: skip
    return _error(x.info.site or name, what, table, why, fix=fix)


# --- parts of a message ---------------------------------------------------------------------------------------


def _parameter(info: TensorInfo) -> str:
    return info.name or (CAPTURED if info.is_captured else "a parameter")


def _place_of(
    subject: str, site: callsite.Site | None, default: callsite.Site | str | None
) -> tuple[callsite.Site | str | None, list[str]]:
    """Return the place of an error about a value made at `site`; of one made in an installed package, also a note."""
    if callsite.package_of(site):
        return default, [f"{subject} was made at {site}"]
    return site or default, []


def _reason_for_pvary(n: int, axes: Sequence[str], use: str) -> list[str]:
    return [f"each of the {n} ranks of {axes_text(axes)} {use}, so the gradient is a sum over the ranks;",
            "pvary changes no value, and its transpose takes that sum"]  # fmt: skip


def _error(
    site: callsite.Site | str | None, what: str, rows: Sequence[tuple[str, str]], *notes: str, fix: str = ""
) -> ShardingError:
    """Word one error: the place and the problem, the line, the operands, the reasons, the fix."""
    line = callsite.quote(site) if isinstance(site, callsite.Site) else ""
    width = max([len(name) for name, _ in rows], default=0)
    facts = [*("  " + x for x in line.splitlines()), *(f"{name:<{width}}  {text}" for name, text in rows)]
    return fail(f"{site}: {what}" if site else what, *facts, *notes, fix=fix)
