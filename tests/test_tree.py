"""Paths, prefix trees and their errors, for every container that optree knows."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, deque
from typing import NamedTuple

import optree
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P, tree
from fshard.spec import is_spec
from tests.lib.assertions import error_text


class Pair(NamedTuple):
    left: object
    right: object


def prefix(specs, t, **kwargs):
    return tree.broadcast(specs, t, name="specs", leaf=is_spec, **kwargs)


TREES = [
    1,
    None,
    {},
    [],
    (),
    {"b": 1, "a": 2},
    {"b": [1, (2, None, {})], "a": {"z": 3, "y": {}}, "c": ()},
    Pair(1, {"x": [2, 3]}),
    [Pair(None, 1), Pair({"k": 2}, [])],
    OrderedDict(b=1, a=2),
    {"o": OrderedDict(z=1, a=OrderedDict(q=2, b=3))},
    defaultdict(int, {"b": 1, "a": 2}),
    {2: "x", 10: "y"},
    {2: "x", "a": "y"},
    deque([1, 2]),
]


@tree.register
@dataclasses.dataclass
class Registered:
    x: object
    name: str = dataclasses.field(default="a", metadata={"static": True})
    size: int = dataclasses.field(default=0, init=False)  # computed, and not passed


def test_a_registered_dataclass_has_leaves_with_paths_and_static_fields():
    t = Registered({"w": 1, "v": [2]}, "b")
    assert tree.leaves_with_path(t) == [(("x", "v", 0), 2), (("x", "w"), 1)]
    assert tree.map(lambda a, b: a + b, t, t) == Registered({"w": 2, "v": [4]}, "b")
    assert tree.structure(t) != tree.structure(Registered(t.x, "c"))
    assert prefix(Registered(P("a"), "b"), t) == [P("a"), P("a")]
    out = []
    treedef = tree._flatten_traced(t, out)
    assert (out, tree._unflatten_traced(treedef, iter(out))) == ([2, 1], t)
    assert tree.register(Registered) is Registered
    assert t.replace(x=3) == Registered(3, "b")

    @dataclasses.dataclass
    class Known(tree.Node):
        children = ("x",)
        x: object

    assert error_text(tree.register, Known) == "register: Known is a container already, by optree or as a Node"
    assert error_text(tree.register, Pair).startswith("register: cls must be a dataclass, got ")


@pytest.mark.parametrize("t", TREES, ids=repr)
def test_flatten_equals_optree_and_unflatten_inverts_it(t):
    leaves, treedef = tree.flatten(t)
    assert leaves == optree.tree_leaves(t)
    assert treedef == tree.structure(t)
    assert tree.unflatten(treedef, leaves) == t
    assert tree.leaves(t) == leaves
    assert [x for _, x in tree.leaves_with_path(t)] == leaves
    assert tree.map(lambda x: x, t) == t


@pytest.mark.parametrize("t", TREES, ids=repr)
def test_indexing_by_a_path_gives_its_leaf(t):
    for path, leaf in tree.leaves_with_path(t):
        at = t
        for entry in path:
            at = at[entry]
        assert at is leaf


# traced programs do not support deques and dicts with keys of several types
@pytest.mark.parametrize("t", [t for t in TREES if not isinstance(t, deque) and t != {2: "x", "a": "y"}], ids=repr)
def test_traced_flatten_has_the_order_of_optree(t):
    out: list[object] = []
    treedef = tree._flatten_traced(t, out)
    assert out == tree.leaves(t)
    back = tree._unflatten_traced(treedef, iter(out))
    assert back == t
    assert [x for _, x in tree.leaves_with_path(back)] == tree.leaves(t)
    if isinstance(t, dict):
        assert list(back) == list(t)


containers = st.recursive(
    st.none() | st.integers(0, 9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("cab"), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


@settings(max_examples=40)
@given(containers, st.booleans())
def test_traced_and_eager_flatten_agree_on_any_tree(t, none_is_leaf):
    out: list[object] = []
    is_leaf = (lambda x: x is None) if none_is_leaf else None
    treedef = tree._flatten_traced(t, out, is_leaf)
    assert out == tree.leaves(t, is_leaf)
    assert tree._unflatten_traced(treedef, iter(out)) == t


@settings(max_examples=40)
@given(containers)
def test_a_tree_of_specs_is_its_own_prefix(t):
    specs = tree.map(lambda n: P(f"axis{n}"), t)
    assert prefix(specs, t) == tree.leaves(specs)
    assert prefix(P("a"), t) == [P("a")] * len(tree.leaves(t))


def test_show_and_dotted_format_paths():
    path = ("h", 3, "up")
    assert tree.show("params", path) == "params['h'][3]['up']"
    assert tree.dotted(path) == "h.3.up"
    assert tree.show("params", ()) == "params"
    assert tree.dotted(()) == ""


def test_map_with_path_passes_the_path_and_leaves_of_all_trees():
    t = {"h": [1, Pair(2, None)], "e": {}}
    rest = {"h": [10, Pair(20, None)], "e": {}}
    got = tree.map_with_path(lambda path, x, y: (tree.dotted(path), x, y), t, rest)
    assert got == {"h": [("h.0", 1, 10), Pair(("h.1.0", 2, 20), None)], "e": {}}


def test_map_passes_subtrees_of_the_other_trees():
    assert tree.map(lambda a, b: (a, b), {"x": 1}, {"x": [2, 3]}) == {"x": (1, [2, 3])}


def test_specs_deferred_and_sharded_are_leaves():
    mesh = fs.make_mesh(a=1)
    placed = fs.device_put(torch.zeros(2), P(), mesh)
    described = fs.init.zeros(2)
    assert tree.leaves([P("a"), described, placed]) == [P("a"), described, placed]


def test_a_prefix_covers_whole_subtrees_and_empty_ones():
    t = {"a": [1, 2, None], "b": {"c": 3, "d": {}}, "e": None, "f": Pair(4, (5,))}
    specs = {"a": P("x"), "b": {"c": P("y"), "d": P("z")}, "e": P("w"), "f": Pair(P("u"), P("v"))}
    assert prefix(specs, t) == [P("x"), P("x"), P("y"), P("u"), P("v")]
    # an empty subtree needs no spec
    assert prefix({**specs, "e": None, "b": {"c": P("y"), "d": {}}}, t) == prefix(specs, t)


def test_lists_and_tuples_match_each_other():
    assert prefix((P("x"), P("y")), [1, 2]) == [P("x"), P("y")]
    assert prefix([P("x"), P("y")], (1, [2, 3])) == [P("x"), P("y"), P("y")]


def test_ordered_dicts_keep_the_order_of_their_leaves():
    t = OrderedDict(b=1, a=2)
    assert tree.leaves(t) == [1, 2]
    assert prefix(OrderedDict(b=P("for b"), a=P("for a")), t) == [P("for b"), P("for a")]


def test_prefix_of_dict_with_keys_of_several_types():
    t = {2: "x", "a": "y"}
    assert prefix({2: P("two"), "a": P("a")}, t) == [P("two") if x == "x" else P("a") for x in tree.leaves(t)]


def test_error_text_of_missing_and_extra_keys():
    assert error_text(prefix, {"h": {"a": P(), "c": P()}}, {"h": {"a": 1, "b": 2}}) == (
        "specs['h']: not a prefix of the tree it describes\n"
        "  missing ['b']    extra ['c']\n"
        "  fix: give every key a P, or one P for the whole subtree"
    )


def test_error_text_of_another_length():
    assert error_text(prefix, [P()], [1, 2]) == (
        "specs: not a prefix of the tree it describes\n"
        "  got  list of 1    expected  list of 2\n"
        "  fix: [spec] * 2, or one P for the whole subtree"
    )
    assert error_text(prefix, (P(), P()), (1, 2, 3)) == (
        "specs: not a prefix of the tree it describes\n"
        "  got  tuple of 2    expected  tuple of 3\n"
        "  missing [2]    extra []\n"
        "  fix: give every key a P, or one P for the whole subtree"
    )


def test_error_text_of_one_spec_for_a_list_of_blocks():
    block, blocks = {"w": P("x"), "b": P()}, [{"w": 1, "b": 2}] * 24
    for one, got in ((block, "dict"), ([block], "list of 1")):
        assert error_text(prefix, {"blocks": one}, {"blocks": blocks}) == (
            "specs['blocks']: not a prefix of the tree it describes\n"
            f"  got  {got}    expected  list of 24\n"
            "  fix: [spec] * 24, or one P for the whole subtree"
        )
    assert len(prefix({"blocks": [block] * 24}, {"blocks": blocks})) == 48
    assert "  missing [23]    extra []\n" in error_text(prefix, [block] * 23, blocks)
    many = {f"w{i}": i for i in range(10)}
    assert "  missing ['w0', 'w1', 'w2', 'w3', 'w4', 'w5', and 4 more]    extra ['w']\n" in error_text(
        prefix, {"w": P()}, many
    )


def test_error_text_of_specs_that_are_not_those_of_the_state():
    params, opt = {"w": torch.ones(2), "b": torch.ones(2)}, fs.optim.adamw(0.1)
    specs = {"w": P("x"), "b": P()}
    assert error_text(prefix, specs, opt.init(params)) == (
        "specs: not a prefix of the tree it describes\n"
        "  missing ['count', 'm', 'v']    extra ['b', 'w']\n"
        "  its keys are those of the tree at ['m'], ['v']\n"
        "  fix: give every key a P; opt.specs(specs) makes those of an optimizer's state"
    )
    assert len(prefix(opt.specs(specs), opt.init(params))) == 5


def test_error_text_of_a_prefix_deeper_than_the_tree():
    assert error_text(prefix, {"w": {"deep": P()}}, {"w": 1}) == (
        "specs['w']: not a prefix of the tree it describes\n"
        "  got  dict    expected  int\n"
        "  the tree has a leaf at this path\n"
        "  fix: give the leaf a P"
    )

    def init():
        return {"w": 1}

    described = "  got  dict    expected  function\n  the tree has a leaf at this path\n  fix: pass its result, init()"
    assert error_text(prefix, {"w": P()}, init).endswith(described)
    assert error_text(fs.materialize, init, P(), fs.make_mesh(a=1), key=fs.key(0)) == (
        "materialize: tree: cannot place the function init\n  fix: init()"
    )
    assert fs.materialize({"w": fs.init.zeros(2)}, {"w": P()}, fs.make_mesh(a=1), key=fs.key(0))["w"].shape == (2,)


def test_error_text_of_another_container():
    assert "got  list of 1    expected  dict" in error_text(prefix, {"w": [P()]}, {"w": {"a": 1}})
    assert "got  Pair    expected  tuple" not in (error_text(prefix, {"w": {"a": P()}}, {"w": Pair(1, 2)}))
    assert "got  dict    expected  Pair" in error_text(prefix, {"w": {"a": P()}}, {"w": Pair(1, 2)})


def test_error_text_of_a_leaf_that_is_not_a_spec():
    assert error_text(prefix, {"w": [P(), "model"]}, {"w": [1, 2]}) == (
        "specs['w'][1]: 'model' is a str, not a P\n  fix: use a P: P('model')"
    )
    assert error_text(prefix, 3, 1, kind="policy") == "specs: 3 is an int, not a policy\n  fix: use a policy"


def test_missing_spec_of_a_leaf_is_an_error():
    assert "the tree has a leaf at this path" in error_text(prefix, {"w": None}, {"w": 1})
