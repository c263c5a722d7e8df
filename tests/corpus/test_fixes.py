"""The fixes that errors print are right: applied to the source of a wrong program, they make it a correct one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import fshard as fs
from fshard import ShardingError
from tests.corpus import bugs_mlp, bugs_optim, fixes, refused
from tests.corpus.wrong import reported
from tests.corpus.wrong.test_wrong import MODULES, wrong
from tests.lib.tiers import slow_unless

Call = tuple[Any, tuple[Any, ...]]  # the mapped function and its arguments


def _bug(name: str) -> Callable[[Any], Call]:
    def build(module: Any) -> Call:
        bug = next(bug for bug in module.BUGS if str(bug) == name)
        return bug.build(bug.wrong, check="always")

    return build


def _refused(name: str) -> Callable[[Any], Call]:
    def build(module: Any) -> Call:
        f, ins, out, args = module.CASES[name]
        return fs.shard_map(f, mesh=module.MESH, in_specs=ins, out_specs=out, check="always"), args

    return build


def _wrong(name: str) -> Callable[[Any], Call]:
    def build(module: Any) -> Call:
        program = next(program for program in module.PROGRAMS if str(program) == name)
        return program.mapped(program.correct), program.args  # its source is that of the wrong one

    return build


class Wrong(NamedTuple):
    """A wrong program: its module, the source with the mistake, and how to make it from a module of such a source."""

    module: Any
    source: Callable[[], str]
    build: Callable[[Any], Call]


def _source_of(module: Any) -> Callable[[], str]:
    return lambda: Path(module.__file__).read_text()


PROGRAMS: dict[str, Wrong] = {
    **{f"bug {bug}": Wrong(m, _source_of(m), _bug(str(bug))) for m in (bugs_mlp, bugs_optim)
       for bug in m.BUGS if bug.caught_by == "types"},
    **{f"refused {name}": Wrong(refused, _source_of(refused), _refused(name)) for name in refused.CASES},
    **{f"wrong {p}": Wrong(m, lambda p=p: p.source, _wrong(str(p)))
       for m in (sys.modules[f"{wrong.__name__}.{name}"] for name in MODULES)
       for p in m.PROGRAMS if p.caught_by == "types"},
}  # fmt: skip


def end(module: Any, source: str, build: Callable[[Any], Call], steps: int = 3) -> str:
    """Return the end of a sequence of at most `steps` fixes.

    "right": a program that the types and `verify` accept. Where a message offers several fixes, one that leads there is
    enough: the message says under which condition each is right.
    "choice": a message that offers several fixes, of which the right one is an advice and no line of code.
    "wrong": a program that the types accept and `verify` does not, after messages that offered one fix each.
    Anything else is the message of the last error, if no line of it could be applied, or after too many steps.
    """
    f, args = build(fixes.loaded(module, source))
    try:
        f(*args)
    except Exception as e:
        message = str(e) if isinstance(e, ShardingError) else f"{type(e).__name__}: {e}"
        found = [new for option in fixes.options(message) if (new := fixes.applied(source, option)) is not None]
        ends = set()
        for new in found if steps else []:
            ends.add(end(module, new, build, steps - 1))
            if "right" in ends:
                return "right"
        return "choice" if "\n  or, " in message else ends.pop() if len(ends) == 1 else message
    try:
        fs.verify(f, *args)
    except ShardingError:
        return "wrong"
    return "right"


ADVICE = {  # messages with one fix that is right, and that is no line of code
    "bug 11-optimizer-tensor": "fix: use the same number on every rank of 'data'",
    "refused captured_module": "fix: call the module by torch.func.functional_call(module, ",
    "refused training_of_a_captured_module": "fix: pass what is trained as an argument, and take its gradient by",
    "refused running_mean_in_a_captured_tensor": "fix: pass it as an argument, and return its new value",
    "refused gradient_of_a_placed_leaf": "fix: take its gradient by fs.value_and_grad or torch.autograd.grad",
    "refused update_by_gradients_that_vary": "fix: sum the gradients over 'data' before the update",
    "refused columns_not_gathered": 'fix: p = fs.unshard(p, its specs, "data"), before its first use, in the function',
    "refused dropout_without_a_spec": "fix: give dropout the spec of its argument: spec=P(",
    "wrong sampled_by_local_draws": "name 'data' in the spec of the draw, and pass its global shape",
    "wrong cross_entropy_over_the_wrong_axis": "fix: leave 'model' out of the axes of cross_entropy",
    "wrong norm_by_specs_of_whole_leaves": "fix: pass the specs by which these leaves are placed",
    "wrong unshard_by_specs_of_whole_leaves": "fix: pass unshard the spec of p['w'], which names 'data'",
    "wrong first_state_without_pvary": 'fix: state = fs.pvary(state, "data") before the loop, and state alone in it',
    "wrong function_of_the_user": 'fix: pass fs.pvary(w, "data") to the function that this line is in',
}


# Plain pytest follows the fixes of every second small program with a text of its own; the slow tests follow all.
REPORTED = {f"wrong {p}" for p in reported.PROGRAMS}
FAST = [name for name in PROGRAMS if name.startswith("refused")][::2] + [n for n in PROGRAMS if n in REPORTED]


@pytest.mark.parametrize("name", slow_unless(FAST, PROGRAMS))
def test_fixes_lead_to_a_correct_program(name):
    module, source, build = PROGRAMS[name]
    found = end(module, source(), build)
    assert ADVICE[name] in found if name in ADVICE else found in ("right", "choice")


FIRST = ("noise_before_the_sum", "sum_of_products", "sum_of_sums", "cosine", "part_by_local_range",
         "returned_part_by_local_range", "parts_of_columns", "sum_over_the_axis_of_rows", "sum_over_both_axes",
         "sum_of_the_sum", "sum_before_relu", "mean_over_both_axes", "means_of_unequal_counts")  # fmt: skip


@pytest.mark.parametrize("name", FIRST)
def test_first_fix_that_each_error_prints_leads_to_a_correct_program(name):
    module, read, build = PROGRAMS[f"refused {name}"]
    source = read()
    for _ in range(3):
        f, args = build(module)
        try:
            f(*args)
        except ShardingError as e:
            source = fixes.applied(source, fixes.options(str(e))[0])
            module = fixes.loaded(refused, source)
        else:
            break
    fs.verify(f, *args)


def test_noise_that_is_added_to_parts_of_a_sum_is_never_to_be_added_on_every_rank():
    for name in ("noise_before_the_sum", "noise_on_a_part_of_a_sum"):
        assert "pvary" not in refused.text_of(name).partition("fix: ")[2]
    assert "after the psum of g, and not before it" in refused.text_of("noise_on_a_part_of_a_sum")
