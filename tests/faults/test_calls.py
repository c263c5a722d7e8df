"""Random calls of every public function end with a result or a clear error; `tests.faults.calls` has the rule."""

from __future__ import annotations

import itertools

import pytest
import torch

import fshard as fs
from tests.faults import calls as random_calls
from tests.lib.assertions import error_text
from tests.test_wrong_arguments import Call, Thing, outside


@pytest.fixture(scope="module")
def calls():
    with random_calls.prepared() as calls:
        yield calls


def loads_much(made):
    """Return whether a call may be the first to load parts of torch that take seconds: fake tensors, transforms."""
    return made.mesh == "abstract" or bool(made.transform) or made.call.name == "check"


@pytest.mark.parametrize(("runs", "most"), [(50, 1), pytest.param(1000, 6, marks=pytest.mark.slow)])
def test_random_calls_end_clearly(calls, runs, most):
    """At most 40 in 10,000 are unclear; of fewer calls, a few more by chance."""
    drawn = (i for i in range(2 * runs) if runs > 50 or not loads_much(random_calls.drawn(7, i, calls)))
    outcomes = [random_calls.attempt(7, i, calls)[0] for i in itertools.islice(drawn, runs)]
    unclear = [f"{o.call}\n  {o.text}" for o in outcomes if o.kind == "unclear"]
    assert len(unclear) <= most, "\n".join(unclear)
    # Of 1,000 calls 39% return, and 75% change one argument at most; by chance up to three deviations fewer.
    for found, share in ((o.kind == "returned" for o in outcomes), 0.39), ((o.changes <= 1 for o in outcomes), 0.75):
        assert sum(found) > share * runs - 3 * (share * (1 - share) * runs) ** 0.5  # else they prove little


def test_every_public_function_is_called_and_its_correct_call_returns(calls):
    missing = random_calls.public_functions().keys() - calls.keys() - set(random_calls.NOT_MADE)
    assert missing <= {"Deferred", "optim.Schedule"}, missing  # under another name; an alias
    for name in calls:
        if name.startswith(("models.", "tree.", "hf.")):
            for call in calls[name]:
                call.run()


def raising(error):
    def f(x):
        raise error

    return f


def no_key(x):
    return {}["no_such"]


def deep(x):
    return deep(x)


@pytest.mark.parametrize(
    ("call", "changes", "kind"),
    [
        (Call("f", lambda x: x, {"x": 1}), (), "returned"),
        (outside(fs.nn.linear, x=Thing(), w=torch.ones(2, 2)), ("x",), "named"),
        (outside(fs.nn.linear, x=torch.ones(2, 3), w=torch.ones(2, 2)), ("x",), "torch"),
        (outside(fs.nn.linear, x=torch.ones(2, 2)), ("arity",), "named"),
        (outside(fs.tree.map, f=random_calls._raises, tree={"a": 1}), ("f",), "users"),
        (Call("f", raising(fs.ShardingError("it is wrong")), {"x": 1}), ("x",), "unclear"),  # no name, no value
        (Call("f", raising(ValueError("x is 3")), {"x": 1}), ("x",), "unclear"),  # not of fshard
        (Call("f", raising(RuntimeError("shapes 3 and 4")), {"x": 1}), ("x",), "unclear"),
        (Call("f", no_key, {"x": 1}), ("x",), "unclear"),
        (Call("f", deep, {"x": 1}), ("x",), "unclear"),
        (Call("f", raising(SystemError("x is 3")), {"x": 1}), ("x",), "unclear"),
    ],
)
def test_rule_of_outcomes(call, changes, kind):
    made = random_calls.Made(call, call.args, changes, "", "never", "", False)
    try:
        random_calls.run(made)
        found = "returned"
    except Exception as e:
        found, _ = random_calls.classify(made, e)
    assert found == kind


def test_call_that_does_not_end_is_unclear(monkeypatch):
    def endless(x):
        while True:
            pass

    monkeypatch.setattr(random_calls, "_limit", lambda _: _fails_at_once())
    made = {"f": [Call("f", endless, {"x": 1})]}
    assert random_calls.attempt(0, 0, made)[0].where == "hang, _TooLong at the call"


def _fails_at_once():
    raise random_calls._TooLong


def test_error_of_torch_in_a_checked_function_names_the_call():
    with pytest.raises(RuntimeError, match="cannot be multiplied") as e:
        fs.nn.linear(torch.ones(2, 3), torch.ones(4, 5))
    assert e.value.__notes__ == ["in linear(x=float32[2, 3], w=float32[4, 5])"]


def test_error_texts():
    tree = fs.tree
    assert (
        error_text(tree.unflatten, 3, [])
        == "unflatten: treedef must be a PyTreeSpec, got 3\n  fix: what flatten returned"
    )
    assert error_text(tree.unflatten, tree.structure([1, 2]), [1]).startswith(
        "unflatten: leaves: Too few leaves for PyTreeSpec; expected: 2, got: 1.\n  fix: "
    )
    assert error_text(tree.map, lambda a, b: a, {"a": 1}, [2]).startswith(
        "map: rest[0] has another structure than the tree\n  tree  PyTreeSpec({'a': *})    other  PyTreeSpec([*])\n"
    )
    assert error_text(tree.all, {"a": torch.ones(2)}).startswith(
        "all: tree['a']: a tensor of 2 elements is neither true nor false\n"
    )
    assert error_text(tree.reduce, max, []).startswith("reduce: the tree has no leaves\n")
    text = error_text(lambda: fs.make_mesh(kind="simulated", data=10**9))
    assert text == (
        "make_mesh(data=1000000000): 1000000000 simulated ranks, each of them a thread of this process\n"
        "  fix: at most 4096; kind='abstract' has no limit"
    )
