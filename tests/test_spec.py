"""Specs: their normal form, the parts that they define, and spec trees."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P
from fshard.spec import (
    as_size,
    box_shape,
    describe,
    format_tensor,
    local_box,
    names_of,
    part_lengths,
    part_range,
    same_placement,
    spec_errors,
    total,
)
from tests.lib.assertions import error_text

# --- P -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (P(), P(None)),
        (P(), P(None, None, None)),
        (P(), P(...)),
        (P(), P(None, ...)),
        (P(), P(())),
        (P("a"), P("a", None)),
        (P("a"), P(("a",))),
        (P("a"), P("a", ...)),
        (P("a"), P("a", None, ..., )),
        (P(None, "a"), P((), "a", ())),
        (P(..., "a"), P(..., ("a",))),
        (P(("a", "b")), P(("a", "b"), None)),
    ],
)  # fmt: skip
def test_specs_with_the_same_meaning_are_equal(a, b):
    assert a == b
    assert hash(a) == hash(b)
    assert repr(a) == repr(b)
    assert all(a.parts(n) == b.parts(n) for n in range(2, 5))


def test_entries_of_a_spec_go_into_another():
    spec = P("data", None, ("a", "b"))
    assert P(None, *spec) == P(None, "data", None, ("a", "b"))
    assert P(*spec[1:]) == P(None, ("a", "b"))


def test_specs_with_different_meanings_are_not_equal():
    specs = [
        P(),
        P("a"),
        P(None, "a"),
        P(..., "a"),
        P(("a", "b")),
        P(("b", "a")),
        P("a", "b"),
        P("a", ..., "b"),
        P(..., "a", None),
    ]
    assert len(set(specs)) == len(specs)
    for a, b in itertools.combinations(specs, 2):
        assert a != b
    assert P("a") != ("a",)
    assert P("a") != "a"


@pytest.mark.parametrize(
    ("spec", "shown"),
    [
        (P(), "P()"),
        (P("a", None), "P('a')"),
        (P(None, "a"), "P(None, 'a')"),
        (P(..., "a"), "P(..., 'a')"),
        (P(("a", "b"), ..., "c"), "P(('a', 'b'), ..., 'c')"),
    ],
)
def test_repr_pickle_and_copies(spec, shown):
    assert repr(spec) == shown
    assert eval(shown, {"P": P}) == spec
    for other in (pickle.loads(pickle.dumps(spec)), copy.copy(spec), copy.deepcopy(spec)):
        assert other == spec
        assert type(other) is P


def test_lengths_are_part_of_a_spec():
    spec = P("a", None, "b", lengths={"a": [7, 8]})
    assert repr(spec) == "P('a', None, 'b', lengths={'a': (7, 8)})"
    assert spec.lengths == {"a": (7, 8)}
    assert repr(P("a", lengths=(0, 1))) == "P('a', lengths=(0, 1))"
    assert len({spec, P("a", None, "b"), P("a", None, "b", lengths={"a": (8, 7)}), P("a", lengths=(7, 8))}) == 4
    assert P("a", "b", lengths={"b": (1,), "a": (2,)}) == P("a", "b", lengths={"a": (2,), "b": (1,)})
    for other in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec), eval(repr(spec), {"P": P})):
        assert other == spec
        assert hash(other) == hash(spec)
    assert not same_placement(P("a", lengths=(7, 8)), P("a"), 1)
    assert spec.with_entries(None, *spec) == P(None, "a", None, "b", lengths={"a": (7, 8)})
    assert spec.with_entries(*spec[1:], memory="host") == P(None, "b", memory="host")
    assert fs.on_host(spec).lengths == spec.lengths
    wide = torch.empty(15, 64)
    assert fs.fully_shard(P("a", lengths=(7, 8)), wide, axis="d") == P("a", "d", lengths={"a": (7, 8)})


@pytest.mark.parametrize(
    ("entries", "lengths", "text"),
    [
        (("a", "b"), (1, 2), "lengths of the parts over one axis, and the spec names 2\n  fix: lengths={'a': (1, 2)}"),
        ((), (1, 2), "lengths of the parts over one axis, and the spec names 0\n  fix: name the axis that splits it"),
        ((("a", "b"),), {"b": (1, 2)}, "'b' is not the first axis of a dim\n  fix: one of ['a']"),
        (("a",), {"c": (1, 2)}, "'c' is not the first axis of a dim\n  fix: one of ['a']"),
        *((("a",), wrong, "not lengths\n  fix: one int of at least 0 for each rank over 'a': (7, 8, 8, 7)")
          for wrong in ((), (1, -1), (1.0, 2), (True, 2), 3, "ab")),
    ],
)  # fmt: skip
def test_error_texts_of_lengths_that_are_for_no_axis(entries, lengths, text):
    assert error_text(P, *entries, lengths=lengths) == f"{P(*entries)} with lengths={lengths}: {text}"


def test_specs_are_immutable():
    with pytest.raises(AttributeError, match="a P is immutable: make another"):
        P("a").entries = ()
    with pytest.raises(AttributeError):
        P("a").more = 1


def test_parts_returns_the_axes_of_each_dim():
    assert P().parts(0) == ()
    assert P("a").parts(3) == (("a",), (), ())
    assert P(..., "a").parts(3) == ((), (), ("a",))
    assert P(..., "a").parts(1) == (("a",),)
    assert P(("a", "b"), ..., None, "c").parts(4) == (("a", "b"), (), (), ("c",))
    assert P("a", ..., "b").parts(2) == (("a",), ("b",))
    assert P("x", ("a", "b")).axes == ("x", "a", "b")
    assert P(..., "a").axes == ("a",)
    assert P().axes == ()


def test_same_placement_compares_meanings():
    assert same_placement(P(..., "a"), P(None, "a"), 2)
    assert not same_placement(P(..., "a"), P(None, "a"), 3)
    assert same_placement(P(..., None), P(), 2)
    assert not same_placement(P(("a", "b")), P(("b", "a")), 1)


def test_row_column_and_replicated():
    assert fs.row("a") == P("a")
    assert fs.column("a") == P(..., "a")
    assert fs.replicated() == P()
    assert fs.row(("a", "b")).parts(2) == (("a", "b"), ())
    assert fs.column(("a", "b")).parts(2) == ((), ("a", "b"))
    assert names_of(None) == ()
    assert names_of("ab") == ("ab",)
    assert names_of(("a", "b")) == ("a", "b")


def test_error_text_of_a_repeated_axis():
    assert error_text(P, "a", ..., ("b", "a")) == (
        "P('a', ..., ('b', 'a')): axis 'a' is used 2 times\n"
        "  an axis splits a leaf once\n"
        "  fix: name 'a' for one dim only"
    )
    assert "axis 'a' is used 2 times" in error_text(P, ("a", "a"))


@pytest.mark.parametrize("entry", [3, "", ("a", None), ("a", ""), (("a",),), ["a"], 1.5, True])
def test_error_text_of_an_entry_that_is_not_an_axis(entry):
    assert error_text(P, None, entry) == (
        f"P: {entry!r} names no axis\n  fix: use None, ..., an axis name or a tuple of names"
    )


def test_error_text_of_two_ellipses():
    assert error_text(P, ..., "a", ...) == "P: '...' may be used once\n  fix: keep one '...'"


def test_error_text_of_a_spec_with_too_many_dims():
    assert error_text(P(None, "a", ..., "b").parts, 1) == (
        "P(None, 'a', ..., 'b') describes 3 dims, the leaf has 1\n  fix: drop 2"
    )


# --- parts -------------------------------------------------------------------------------------------------

some_sizes = st.lists(st.integers(1, 5), min_size=0, max_size=3)


def part_ranges(n, sizes):
    return [part_range(n, sizes, at) for at in itertools.product(*(range(k) for k in sizes))]


@settings(max_examples=60)
@given(st.integers(0, 40) | st.lists(st.integers(0, 9), min_size=1, max_size=6).map(tuple), some_sizes)
def test_parts_cover_the_range_once_and_in_order(n, sizes):
    sizes = [len(n), *sizes] if isinstance(n, tuple) else sizes
    cut = part_ranges(n, sizes)
    assert [length for _, length in cut] == part_lengths(n, sizes)
    assert [i for start, length in cut for i in range(start, start + length)] == list(range(total(n)))
    assert all(0 <= start <= total(n) and length >= 0 for start, length in cut)


@given(st.lists(st.integers(0, 9), min_size=6, max_size=6))
def test_lengths_over_the_first_axis_or_over_all_axes_are_one_split(lengths):
    halves = (sum(lengths[:3]), sum(lengths[3:]))
    assert part_ranges(halves, [2]) == [(0, halves[0]), (halves[0], halves[1])]
    assert part_lengths(tuple(lengths), [2, 3]) == lengths
    assert part_lengths(halves, [2, 3]) == [m for half in halves for m in part_lengths(half, [3])]
    assert part_ranges(as_size(part_lengths(halves, [2, 3]), [2, 3]), [2, 3]) == part_ranges(halves, [2, 3])


@settings(max_examples=60)
@given(st.integers(0, 40), st.integers(1, 9))
def test_one_axis_splits_as_torch_chunk(n, k):
    chunks = [c.tolist() for c in torch.arange(n).chunk(k)] if n else []
    chunks += [[]] * (k - len(chunks))
    assert [list(range(s, s + m)) for s, m in part_ranges(n, [k])] == chunks


@settings(max_examples=60)
@given(st.integers(0, 40), st.lists(st.integers(1, 5), min_size=1, max_size=3))
def test_joining_parts_of_the_minor_axis_gives_parts_of_the_major(n, sizes):
    minor = sizes[-1]
    fine, coarse = part_ranges(n, sizes), part_ranges(n, sizes[:-1])
    for i, (start, length) in enumerate(coarse):
        parts = fine[i * minor : (i + 1) * minor]
        assert [x for s, m in parts for x in range(s, s + m)] == list(range(start, start + length))


@settings(max_examples=30)
@given(st.integers(0, 40), some_sizes)
def test_parts_are_those_of_dtensor(n, sizes):
    shard = pytest.importorskip("torch.distributed.tensor.placement_types").Shard(0)
    for at, mine in zip(itertools.product(*(range(k) for k in sizes)), part_ranges(n, sizes), strict=True):
        start, length = 0, n
        for k, i in zip(sizes, at, strict=True):
            length, offset = shard.local_shard_size_and_offset(length, k, i)
            start += offset
        assert mine[1] == length
        assert mine[0] == start or not length  # DTensor puts empty parts elsewhere


axes_of = {"a": 2, "b": 3, "c": 2}


@st.composite
def specs(draw, ndim):
    dims = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(sorted(axes_of))):
        dim = draw(st.integers(-1, ndim - 1))
        if dim >= 0:
            dims[dim].append(axis)
    return P(*map(tuple, dims))


@settings(max_examples=50)
@given(st.data(), st.lists(st.integers(0, 9), min_size=0, max_size=3))
def test_boxes_of_a_mesh_contain_every_element_once_per_replica(data, shape):
    spec = data.draw(specs(len(shape)))
    count = torch.zeros(shape, dtype=torch.int64)
    shapes = set()
    for at in itertools.product(*(range(n) for n in axes_of.values())):
        box = local_box(shape, spec, axes_of, dict(zip(axes_of, at, strict=True)))
        count[box] += 1
        shapes.add(box_shape(box))
        assert count[box].shape == box_shape(box)
    replicas = math.prod(n for a, n in axes_of.items() if a not in spec.axes)
    assert bool((count == replicas).all())
    parts = zip(shape, spec.parts(len(shape)), strict=True)
    uneven = any(n % math.prod(axes_of[a] for a in axes) for n, axes in parts)
    assert (len(shapes) > 1) is uneven


def test_known_parts():
    assert part_lengths(10, [4]) == [3, 3, 3, 1]
    assert part_lengths(3, [4]) == [1, 1, 1, 0]
    assert part_lengths(5, [2, 2]) == [2, 1, 1, 1]
    assert part_lengths(9, [4, 2]) == [2, 1, 2, 1, 2, 1, 0, 0]
    assert part_range(50257, [4], [3]) == (37695, 12562)
    assert part_range(7, [], []) == (0, 7)


# --- spec_errors -------------------------------------------------------------------------------------------


def test_spec_errors_is_empty_for_a_spec_that_fits():
    assert spec_errors("w", (3, 5), P("a", ..., "b"), axes_of) == []
    assert spec_errors("w", (), P(), axes_of) == []


def test_error_text_of_an_unknown_axis_and_of_a_long_spec():
    texts = [str(e) for e in spec_errors("params['w']", (4,), P("x", ("a", "y")), axes_of)]
    facts = "  shape  [4]    spec  P('x', ('a', 'y'))    mesh  a=2, b=3, c=2\n"
    assert texts == [
        f"params['w']: the mesh has no axis 'x'\n{facts}  fix: use one of ['a', 'b', 'c']",
        f"params['w']: the mesh has no axis 'y'\n{facts}  fix: use one of ['a', 'b', 'c']",
        f"params['w']: the spec is longer than the shape\n{facts}  2 > 1 dims\n  fix: drop 1 of its entries",
    ]


def test_raise_all_lists_every_failing_leaf():
    tree = {"fine": torch.zeros(2), "long": torch.zeros(2), "odd": [torch.zeros(2)]}
    got = error_text(fs.device_put, tree, {"fine": P("a"), "long": P(None, "a"), "odd": P("model")}, fs.make_mesh(a=2))
    assert got == (
        "2 problems\n"
        "device_put: tree['long']: the spec is longer than the shape\n"
        "  shape  [2]    spec  P(None, 'a')    mesh  a=2\n"
        "  2 > 1 dims\n"
        "  fix: drop 1 of its entries\n"
        "device_put: tree['odd'][0]: the mesh has no axis 'model'\n"
        "  shape  [2]    spec  P('model')    mesh  a=2\n"
        "  fix: use one of ['a']"
    )


def test_describe_formats_dtype_shape_and_axes():
    assert format_tensor(torch.float32, (768, 3072), P(None, "model")) == "f32[768, 3072@model]"
    assert format_tensor(torch.bfloat16, (4, 2), P(("a", "b"))) == "bf16[4@a+b, 2]"
    assert format_tensor(torch.bool, ()) == "bool[]"
    names = {torch.float64: "f64", torch.int64: "i64", torch.uint8: "u8", torch.complex64: "c64", torch.float16: "f16"}
    assert describe(torch.ones(2, 3), P("a")) == "f32[2@a, 3]"
    assert {d: format_tensor(d, (3,)) for d in names} == {d: f"{n}[3]" for d, n in names.items()}


# --- spec trees --------------------------------------------------------------------------------------------

TREE = {"h": [{"up": 1, "down": 2}, {"up": 3, "down": 4}], "wte": 5, "ln": {"scale": 6}}


def test_first_matching_rule_wins():
    specs = fs.rules({"h.1.up": P("first"), "h.*.up": P("second"), "**": P()})(TREE)
    assert specs == {
        "h": [{"up": P("second"), "down": P()}, {"up": P("first"), "down": P()}],
        "wte": P(),
        "ln": {"scale": P()},
    }


@pytest.mark.parametrize(
    ("glob", "matched"),
    [
        ("*", ["wte"]),
        ("**", ["h.0.down", "h.0.up", "h.1.down", "h.1.up", "ln.scale", "wte"]),
        ("h.*", []),
        ("h.**", ["h.0.down", "h.0.up", "h.1.down", "h.1.up"]),
        ("h.*.*", ["h.0.down", "h.0.up", "h.1.down", "h.1.up"]),
        ("**.up", ["h.0.up", "h.1.up"]),
        ("**.wte", ["wte"]),
        ("w?e", ["wte"]),
        ("h.[0-0].up", ["h.0.up"]),
        ("H.**", []),
        ("h.**.**.up", ["h.0.up", "h.1.up"]),
        ("scale", []),
    ],
)
def test_globs_match_paths(glob, matched):
    specs = fs.rules({glob: P("yes")} if glob == "**" else {glob: P("yes"), "**": P()})
    if not matched:
        assert error_text(specs, TREE).startswith(f"rules: {glob!r} matches no leaf")
        return
    paths = [fs.tree.dotted(path) for path, spec in fs.tree.leaves_with_path(specs(TREE)) if spec == P("yes")]
    assert sorted(paths) == matched


def test_rules_can_be_applied_to_several_trees():
    specs = fs.rules({"**": P("a")})
    assert specs({"x": 1}) == {"x": P("a")}
    assert specs([1, 2]) == [P("a"), P("a")]


def test_rules_match_dots_inside_keys():
    # the flat names of a state_dict contain dots
    assert fs.rules({"h.*.w": P("a")})({"h.0.w": 1, "h.1.w": 2}) == {"h.0.w": P("a"), "h.1.w": P("a")}


def test_error_text_of_unmatched_leaves_and_unused_rules():
    assert error_text(fs.rules({"wte": P("a"), "h.*.up": P(), "h.0.up": P()}), TREE) == (
        "3 problems\n"
        "rules: no rule matches 'h.0.down'\n"
        "  fix: add a rule, or '**': P() at the end\n"
        "  the same for 'h.1.down'\n"
        "rules: no rule matches 'ln.scale'\n"
        "  fix: add a rule, or '**': P() at the end\n"
        "rules: 'h.0.up' matches no leaf\n"
        "  (an earlier rule may match all of its leaves)\n"
        "  fix: remove or correct it"
    )


def fully_sharded(spec, shape, **kwargs):
    return fs.fully_shard({"w": spec}, {"w": torch.empty(shape, device="meta")}, axis="z", **kwargs)["w"]


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (P(), (64,), P("z")),
        (P(), (), P()),
        (P(), (6, 64), P(None, "z")),  # the dim with the largest power of two
        (P(), (64, 6), P("z")),
        (P(), (64, 64), P("z")),  # of equal dims the first
        (P(), (256, 1024), P("z")),  # equal up to 256
        (P(), (50257, 768), P(None, "z")),
        (P(None, "m"), (64, 8), P("z", "m")),
        (P("m"), (64, 8), P("m", "z")),
        (P(..., "m"), (64, 8), P("z", "m")),
        (P("m"), (64,), P(("m", "z"))),  # no free dim: the minor axis of the split dim
        (P("m", "n"), (64, 128), P("m", ("n", "z"))),  # of the largest one
        (P("m"), (8, 1), P(("m", "z"))),  # a dim of size 1 is not split
        (P(("z", "m")), (8, 8), P(("z", "m"))),  # already there
        (P(), (7, 5), P("z")),
    ],
)
def test_fully_shard_splits_the_best_free_dim(spec, shape, expected):
    got = fully_sharded(spec, shape)
    assert same_placement(got, expected, len(shape))
    assert got == expected or "..." in repr(spec)


def test_fully_shard_does_not_split_small_leaves():
    assert fully_sharded(P("m"), (10, 10), min_size=101) == P("m")
    assert fully_sharded(P("m"), (10, 10), min_size=100) == P("m", "z")


def test_fully_shard_keeps_the_dim_of_stacked_blocks():
    tree = {"blocks": {"w": torch.empty(64, 6, 6), "b": torch.empty(64)}, "head": torch.empty(64, 6)}
    kept = fs.fully_shard({"blocks": P(), "head": P()}, tree, axis="z", stacked="blocks.**")
    assert kept == {"blocks": {"w": P(None, "z"), "b": P()}, "head": P("z")}
    assert kept == fs.strategy("FULL_SHARD", axis="z").param_specs(tree, stacked=["blocks.w", "blocks.*"])
    with pytest.raises(fs.ShardingError, match=r"stacked='layers\.\*\*' matches no leaf"):
        fs.fully_shard(P(), tree, axis="z", stacked="layers.**")


def test_fully_shard_takes_prefix_specs_and_described_trees():
    tree = {"h": [fs.init.zeros((4, 8)), fs.init.zeros(4)], "n": None}
    assert fs.fully_shard(P(), tree, axis="z") == {"h": [P(None, "z"), P("z")], "n": None}
    assert fs.fully_shard({"h": P("m"), "n": P()}, tree, axis="z") == {"h": [P("m", "z"), P(("m", "z"))], "n": None}


@settings(max_examples=40)
@given(st.data(), st.lists(st.integers(2, 9), min_size=1, max_size=3))
def test_fully_shard_only_adds_the_axis(data, shape):
    before = data.draw(specs(len(shape)))
    after = fully_sharded(before, tuple(shape))
    changed = [(a, b) for a, b in zip(before.parts(len(shape)), after.parts(len(shape)), strict=True) if a != b]
    assert len(changed) == 1
    assert changed[0][1] == (*changed[0][0], "z")
