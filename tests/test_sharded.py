"""Placed leaves: put, get, reshard, and no device allocates more than its parts."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fshard as fs
from fshard import P, Sharded
from fshard._core.comm import fake_tensors
from fshard.spec import box_shape, local_box
from tests.lib.assertions import error_text
from tests.lib.operations import Operations

MESHES = [
    {"a": 1},
    {"a": 2},
    {"a": 3},
    {"a": 5},
    {"a": 8},
    {"a": 2, "b": 3},
    {"b": 2, "a": 2},
    {"a": 2, "b": 2, "c": 2},
]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
ONE = fs.make_mesh(one=1)


def specs_for(ndim, axes):
    """Return every spec that gives each axis a dim or none, in both orders of the axes."""
    specs = set()
    for names in (tuple(axes), tuple(axes)[::-1]):
        for dims in itertools.product(range(-1, ndim), repeat=len(names)):
            specs.add(P(*[tuple(a for a, d in zip(names, dims, strict=True) if d == dim) for dim in range(ndim)]))
    return sorted(specs, key=repr)


def numbered(*shape, dtype=torch.float32):
    n = torch.Size(shape).numel()
    if dtype == torch.bool:
        return (torch.arange(n) % 3 == 0).view(shape)
    return (torch.arange(n) % 251).to(dtype).view(shape)


def check_placed(leaf, expected, spec, mesh):
    assert isinstance(leaf, Sharded)
    assert (leaf.shape, leaf.dtype, leaf.spec, leaf.mesh) == (tuple(expected.shape), expected.dtype, spec, mesh)
    assert len(leaf.shards) == len(mesh.ranks)
    for rank, shard in zip(mesh.ranks, leaf.shards, strict=True):
        box = local_box(expected.shape, spec, mesh.axes, mesh.coords(rank))
        assert leaf.box(rank) == box
        assert torch.equal(shard, expected[box])
        assert shard.shape == box_shape(box)
    assert torch.equal(fs.device_get(leaf), expected)


# --- put and get -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", MESHES, ids=repr)
@pytest.mark.parametrize("shape", [(), (7,), (0,), (6, 4), (3, 5, 2)], ids=repr)
def test_put_and_get_are_inverse(axes, shape):
    mesh, x = fs.make_mesh(**axes), numbered(*shape)
    for spec in specs_for(len(shape), axes):
        check_placed(fs.device_put(x, spec, mesh), x, spec, mesh)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_put_get_and_reshard_keep_every_dtype(dtype):
    mesh, x = fs.make_mesh(a=2, b=2), numbered(5, 3, dtype=dtype)
    for spec in (P(), P("a"), P(("a", "b")), P("b", "a")):
        check_placed(fs.device_put(x, spec, mesh), x, spec, mesh)
    check_placed(fs.reshard(fs.device_put(x, P("a"), mesh), P("b", "a")), x, P("b", "a"), mesh)


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("spec", [P(), P("a")], ids=repr)
def test_shards_share_no_storage_with_global_tensors(n, spec):
    x = torch.zeros(4)
    leaf = fs.device_put(x, spec, fs.make_mesh(a=n))
    assert len({s.data_ptr() for s in (x, *leaf.shards, fs.device_get(leaf))}) == n + 2
    for s in leaf.shards:
        s.add_(1)
    assert x.tolist() == [0] * 4
    got = fs.device_get(leaf)
    got.add_(1)
    assert fs.device_get(leaf).tolist() == [1] * 4


def test_shards_are_contiguous_and_do_not_require_grad():
    x = torch.randn(4, 6, requires_grad=True)
    for y in (x, x.t(), x[:, ::2], x[0].expand(4, 6)):
        leaf = fs.device_put(y, P(None, "a"), fs.make_mesh(a=2))
        assert all(s.is_contiguous() and not s.requires_grad for s in leaf.shards)
        assert torch.equal(fs.device_get(leaf), y)


def test_numbers_become_tensors():
    placed = fs.device_put({"i": 3, "j": 3, "f": 0.5, "b": True, "c": 1j}, P(), fs.make_mesh(a=2))
    assert repr(placed) == "{'i': i64[] 3, 'j': i64[] 3, 'f': f32[] 0.5, 'b': bool[] True, 'c': c64[] 1j}"
    assert placed["i"] is not placed["j"]
    assert fs.device_get(placed) == {"i": 3, "j": 3, "f": 0.5, "b": True, "c": 1j}


def test_put_and_get_take_trees_prefixes_and_other_leaves():
    tree = {"x": [torch.ones(4), (torch.ones(2, 2),)], "n": None}
    placed = fs.device_put(tree, {"x": P("a"), "n": None}, fs.make_mesh(a=2))
    assert repr(placed) == "{'x': [f32[4@a], (f32[2@a, 2],)], 'n': None}"
    got = fs.device_get({"placed": placed, "word": "as it is", "number": 3})
    assert (got["word"], got["number"], got["placed"]["n"]) == ("as it is", 3, None)
    assert torch.equal(got["placed"]["x"][0], torch.ones(4))


def test_tensor_at_two_paths_stays_one_leaf():
    x = torch.ones(4)
    placed = fs.device_put([x, x, x.clone()], P("a"), fs.make_mesh(a=2))
    assert placed[0] is placed[1]
    assert placed[0] is not placed[2]
    moved = fs.reshard(placed, P())
    assert moved[0] is moved[1]
    assert moved[0] is not placed[0]
    assert error_text(fs.device_put, [x, x], [P("a"), P()], fs.make_mesh(a=2)) == (
        "device_put: tree[1]: is tied to tree[0], which has another spec\n"
        "  spec  P()    other  P('a')\n"
        "  fix: give both one spec, or untie them"
    )


def test_error_texts_of_leaves_that_cannot_be_put():
    mesh = fs.make_mesh(a=2)
    placed = fs.device_put(torch.ones(2), P(), mesh)
    assert error_text(fs.device_put, {"p": placed, "d": fs.init.zeros(2), "s": "word"}, P(), mesh) == (
        "3 problems\n"
        "device_put: tree['d']: cannot place a Deferred\n"
        "  fix: fs.materialize places described leaves\n"
        "device_put: tree['p']: cannot place a Sharded\n"
        "  fix: fs.reshard(tree, specs) moves placed leaves\n"
        "device_put: tree['s']: cannot place a str\n"
        "  fix: make it a tensor, or a dict, a tuple or a dataclass with @fs.tree.register that has tensors"
    )


def test_error_text_of_an_unknown_rank():
    x = fs.device_put(torch.ones(2), P(), fs.make_mesh(a=2))
    assert error_text(fs.device_get, x, rank=2) == "device_get: the mesh has no rank 2\n  fix: ranks are 0 to 1"


# --- the leaf ----------------------------------------------------------------------------------------------


def test_repr_of_a_number_has_its_value_without_a_transfer_where_there_is_one():
    put = lambda x, mesh: fs.device_put({"n": x, "v": torch.ones(1)}, {"n": P(), "v": P()}, mesh)  # noqa: E731
    values = [(0.1, torch.float32, "0.1"), (0.1, torch.bfloat16, "0.100097656"), (-3, torch.int8, "-3")]
    with fs.recording() as log:
        for number, dtype, text in values:
            leaf = put(torch.tensor(number, dtype=dtype, requires_grad=dtype.is_floating_point), fs.make_mesh(a=2))["n"]
            assert repr(leaf).split(" ") == [repr(leaf).split("[")[0] + "[]", text]
            assert fs.device_get(leaf).item() == pytest.approx(float(text), rel=1e-6)
    assert log == []
    for mesh in (fs.make_mesh(kind="abstract", a=2), ONE):
        assert repr(put(torch.tensor(0.5), mesh)) == ("{'n': f32[] 0.5, 'v': f32[1]}" if mesh is ONE else
                                                      "{'n': f32[], 'v': f32[1]}")  # fmt: skip
    with fake_tensors():
        assert repr(put(torch.tensor(0.5), ONE)["n"]) == "f32[]"
    donated = put(torch.tensor(0.5), ONE)["n"]
    fs.shard_map(lambda x: x + 1, mesh=ONE, out_specs=P(), donate=0)(donated)
    assert repr(donated) == "f32[]"
    assert f"loss {put(torch.tensor(0.5), ONE)['n']}" == "loss f32[] 0.5"


def test_repr_and_sizes_of_a_leaf():
    leaf = fs.device_put(torch.zeros(6, 4, dtype=torch.bfloat16), P(None, ("a", "b")), fs.make_mesh(a=2, b=2))
    assert repr(leaf) == str(leaf) == f"{leaf}" == "bf16[6, 4@a+b]"
    assert (leaf.ndim, leaf.numel(), leaf.nbytes) == (2, 24, 48)
    assert repr(fs.device_put(torch.zeros(2, 3), P(..., "one"), ONE)) == "f32[2, 3@one]"
    assert not isinstance(leaf, torch.Tensor)
    with pytest.raises(AttributeError):
        leaf.anything = 1


@pytest.mark.parametrize("spec", [P(), P("a")], ids=repr)
def test_leaf_of_one_element_converts_to_a_number(spec):
    mesh = fs.make_mesh(a=3)
    x = fs.device_put(torch.tensor([2.5]), spec, mesh)
    assert (x.item(), float(x), int(x), bool(x)) == (2.5, 2.5, 2, True)
    assert f"{x:.3f}" == "2.500"
    assert f"{x}" == ("f32[1]" if spec == P() else "f32[1@a]")
    assert bool(fs.device_put(torch.tensor([0]), spec, mesh)) is False


def test_leaf_of_several_elements_does_not_convert_to_a_number():
    x = fs.device_put(torch.zeros(2), P(), ONE)
    expected = "item: f32[2] has 2 elements\n  fix: fs.device_get(x)"
    for f in (x.item, lambda: float(x), lambda: int(x), lambda: bool(x), lambda: f"{x:.2f}"):
        assert error_text(f) == expected
    assert "has 0 elements" in error_text(fs.device_put(torch.zeros(0), P(), ONE).item)


def test_error_text_of_a_donated_leaf():
    mesh = fs.make_mesh(a=2)
    x = fs.device_put(torch.zeros(2), P("a"), mesh)

    def step(x):
        return x + 1

    fs.shard_map(step, mesh=mesh, out_specs=P("a"), donate=0)(x)
    expected = (
        "f32[2@a] was donated to step, which may have overwritten it\n"
        "  fix: use the value that call returned, or leave the argument out of donate="
    )
    for f in (lambda: x.shards, lambda: fs.device_get(x), lambda: fs.reshard(x, P()), lambda: fs.reshard(x, P("a"))):
        assert error_text(f) == expected
    assert error_text(fs.shard_map(step, mesh=mesh, out_specs=P("a")), x) == expected
    assert repr(x) == "f32[2@a]"
    assert (x.shape, x.nbytes) == ((2,), 8)


# --- from_callback -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", MESHES, ids=repr)
@pytest.mark.parametrize("shape", [(), (7,), (5, 4)], ids=repr)
def test_callback_is_called_once_for_each_part(axes, shape):
    mesh, x = fs.make_mesh(**axes), numbered(*shape)
    for spec in specs_for(len(shape), axes):
        requested = []

        def part(box, requested=requested):
            requested.append(tuple((s.start, s.stop) for s in box))
            assert all(type(s) is slice and s.step is None for s in box)
            return x[box].clone()

        leaf = fs.from_callback(shape, spec, mesh, part)
        check_placed(leaf, x, spec, mesh)
        assert len(set(requested)) == len(requested)
        assert set(requested) == {tuple((s.start, s.stop) for s in leaf.box(rank)) for rank in mesh.ranks}
        assert len({s.data_ptr() for s in leaf.shards if s.numel()}) == len([s for s in leaf.shards if s.numel()])


def test_view_returned_by_the_callback_is_copied():
    x = torch.zeros(4, 4)
    leaf = fs.from_callback((4, 4), P("a"), fs.make_mesh(a=2), lambda box: x[box])
    leaf.shards[0].add_(1)
    assert not x.any()


def test_error_texts_of_a_wrong_callback():
    mesh = fs.make_mesh(a=2, b=2)
    assert error_text(fs.from_callback, (4, 6), P("a", "b"), mesh, lambda box: torch.zeros(4, 6)) == (
        "from_callback: the callback returned [4, 6] for rank 0\n"
        "  slices  ['0:2', '0:3']\n"
        "  fix: return the elements of the slices it is called with: [2, 3]"
    )
    last = lambda box: [1.0] if box[0].start else torch.zeros(2)  # noqa: E731
    assert error_text(fs.from_callback, (4,), P("a"), mesh, last) == (
        "from_callback: the callback returned a list for rank 2\n"
        "  slices  ['2:4']\n"
        "  fix: return the elements of the slices it is called with: [2]"
    )
    assert error_text(fs.from_callback, (4,), P("x"), mesh, last) == (
        "from_callback: the mesh has no axis 'x'\n"
        "  shape  [4]    spec  P('x')    mesh  a=2, b=2\n"
        "  fix: use one of ['a', 'b']"
    )


def test_callback_that_returns_two_dtypes_is_an_error():
    kinds = {0: torch.float32, 2: torch.float64}
    error_text(fs.from_callback, (4,), P("a"), fs.make_mesh(a=2), lambda box: torch.zeros(2, dtype=kinds[box[0].start]))


def test_exception_of_the_callback_is_raised_unchanged():
    with pytest.raises(ZeroDivisionError):
        fs.from_callback((4,), P("a"), fs.make_mesh(a=2), lambda box: 1 // 0)


# --- reshard -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7,), (5, 4)], ids=repr)
@pytest.mark.parametrize("axes", [{"a": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 2}], ids=repr)
def test_reshard_between_any_two_specs(axes, shape):
    mesh, x = fs.make_mesh(**axes), numbered(*shape)
    for before, after in itertools.product(specs_for(len(shape), axes), repeat=2):
        source = fs.device_put(x, before, mesh)
        kept = source.shards
        moved = fs.reshard(source, after)
        check_placed(moved, x, after, mesh)
        assert source.shards == kept or all(a is b for a, b in zip(source.shards, kept, strict=True))
        pointers = [s.data_ptr() for s in (*moved.shards, *source.shards) if s.numel()]
        assert len(set(pointers)) == len(pointers)  # shares storage with nothing


def choose_lengths(data, spec, shape, axes):
    """Return the spec, with lengths for some of its first axes."""
    lengths = {}
    for n, names in zip(shape, spec.parts(len(shape)), strict=True):
        if names and data.draw(st.booleans()):
            cuts = data.draw(st.lists(st.integers(0, n), min_size=axes[names[0]] - 1, max_size=axes[names[0]] - 1))
            lengths[names[0]] = [b - a for a, b in itertools.pairwise([0, *sorted(cuts), n])]
    return P(*spec, lengths=lengths)


@settings(max_examples=80)
@given(st.data(), st.lists(st.integers(0, 7), max_size=3).map(tuple), st.sampled_from(MESHES), st.sampled_from(MESHES))
def test_reshard_between_any_two_meshes_and_lengths(data, shape, from_axes, to_axes):
    before = choose_lengths(data, data.draw(st.sampled_from(specs_for(len(shape), from_axes))), shape, from_axes)
    after = choose_lengths(data, data.draw(st.sampled_from(specs_for(len(shape), to_axes))), shape, to_axes)
    source, target, x = fs.make_mesh(**from_axes), fs.make_mesh(**to_axes), numbered(*shape)
    leaf = fs.device_put(x, before, source)
    check_placed(fs.reshard(leaf, after, target), x, after, target)
    check_placed(leaf, x, before, source)
    check_placed(fs.reshard(fs.reshard(leaf, after, target), before, source), x, before, source)


def largest(seen):
    """Return the number of elements of the largest result of an operation."""
    return max(shape.numel() for shape in seen.shapes)


@pytest.mark.parametrize(
    ("before", "after"),
    [(P("a"), P(None, "a")), (P("a", "b"), P("b", "a")), (P(("a", "b")), P(None, ("b", "a"))), (P("a"), P("b"))],
    ids=repr,
)
def test_reshard_allocates_no_more_than_the_parts_of_a_device(before, after):
    mesh, other = fs.make_mesh(a=4, b=2), fs.make_mesh(a=2, b=2)
    leaf = fs.device_put(numbered(64, 64), before, mesh)
    for target in (mesh, other):
        with Operations() as seen:
            moved = fs.reshard(leaf, after, target)
        assert 0 < largest(seen) <= max(s.numel() for s in (*leaf.shards, *moved.shards)) < leaf.numel()


def test_placing_allocates_only_parts():
    x = numbered(64, 64)
    with Operations() as seen:
        fs.from_callback((64, 64), P("a"), fs.make_mesh(a=8), lambda box: torch.zeros(box_shape(box)))
        fs.materialize(fs.init.ones((64, 64)), P(None, "a"), fs.make_mesh(a=8), key=fs.key(0))
    assert largest(seen) == x.numel() // 8


def test_reshard_takes_prefix_specs_and_empty_trees():
    mesh = fs.make_mesh(a=2)
    placed = fs.device_put({"h": [torch.ones(4), torch.ones(2, 2)], "n": None}, P(), mesh)
    assert repr(fs.reshard(placed, {"h": P("a"), "n": P()})) == "{'h': [f32[4@a], f32[2@a, 2]], 'n': None}"
    assert fs.reshard({}, P()) == {}
    assert fs.reshard([None], P(), mesh) == [None]


def test_reshard_keeps_each_leaf_on_its_own_mesh():
    on_a, on_b = fs.make_mesh(a=2), fs.make_mesh(b=3)
    tree = [fs.device_put(numbered(6), P(), on_a), fs.device_put(numbered(6), P(), on_b)]
    first, second = fs.reshard(tree, [P("a"), P("b")])
    check_placed(first, numbered(6), P("a"), on_a)
    check_placed(second, numbered(6), P("b"), on_b)
    assert error_text(fs.reshard, tree, P("a")) == (
        "reshard: tree[1]: the mesh has no axis 'a'\n  shape  [6]    spec  P('a')    mesh  b=3\n  fix: use one of ['b']"
    )
    for moved in fs.reshard(tree, P("a"), on_a):
        check_placed(moved, numbered(6), P("a"), on_a)


def test_error_texts_of_leaves_that_cannot_be_resharded():
    mesh = fs.make_mesh(a=2)
    x = fs.device_put(torch.ones(2), P(), mesh)
    assert error_text(fs.reshard, {"x": x, "y": torch.ones(2)}, P()) == (
        "reshard: tree['y'] is a Tensor, not a placed leaf\n"
        "  fix: fs.device_put places tensors, fs.materialize described leaves"
    )
    assert error_text(fs.reshard, {"x": x}, {"x": P("b")}) == (
        "reshard: tree['x']: the mesh has no axis 'b'\n"
        "  shape  [2]    spec  P('b')    mesh  a=2\n"
        "  fix: use one of ['a']"
    )
    other = fs.make_mesh(kind="abstract", a=1)
    assert error_text(fs.reshard, x, P(), other) == (
        "reshard: from Mesh(a=2; simulated, 2 x cpu) to Mesh(a=1; abstract, 1 x cpu), a mesh of another kind\n"
        "  fix: fs.device_put(fs.device_get(tree), specs, mesh)"
    )
    moved = fs.reshard(fs.device_put(torch.ones(4), P(), other), P("a"))
    assert repr(moved) == "f32[4@a]"


# --- a placed leaf is no tensor ----------------------------------------------------------------------------

LEAF = fs.device_put(torch.arange(4.0), P("a"), fs.make_mesh(a=2))
ONE_ELEMENT = fs.device_put(torch.tensor(3.0), P(), fs.make_mesh(a=2))
ADVICE = "x.shards are its local parts; compute inside fs.shard_map; fs.reshard moves it"
OPERATORS = {
    "==": lambda x: x == 0, "!=": lambda x: x != x, "<": lambda x: x < 1, ">=": lambda x: x >= 1, "+": lambda x: x + 1,
    "-": lambda x: 1 - x, "*": lambda x: 2 * x, "@": lambda x: x @ x, "/": lambda x: x / 2, "**": lambda x: x**2,
    "abs": abs, "~": lambda x: ~x, "[]": lambda x: x[0], "len": len, "iteration": list, "in": lambda x: 1 in x,
    "numpy": np.asarray, "add": lambda x: torch.add(x, 1), "stack": lambda x: torch.stack([x, x]),
    "linear": lambda x: torch.nn.functional.linear(torch.ones(4), x),
}  # fmt: skip
OPERATORS_WITH_TENSORS = {
    "mul": lambda x: torch.ones(4) * x, "matmul": lambda x: torch.ones(4) @ x, "eq": lambda x: torch.ones(4) == x,
    "__getitem__": lambda x: torch.ones(4)[x],
}  # fmt: skip


@pytest.mark.parametrize("operation", [*OPERATORS, *OPERATORS_WITH_TENSORS])
def test_operations_on_a_placed_leaf_are_errors_that_say_what_to_do(operation):
    text = error_text({**OPERATORS, **OPERATORS_WITH_TENSORS}[operation], LEAF)
    assert text == (
        f"{operation}: f32[4@a] is a placed leaf, not a tensor\n  fix: fs.device_get(x) is the full tensor, {ADVICE}"
    )


@pytest.mark.parametrize("name", ["full_tensor", "to_local", "numpy", "to", "cuda", "detach", "requires_grad", "T"])
def test_attributes_of_tensors_are_errors_that_say_what_to_do(name):
    with pytest.raises(AttributeError) as e:
        getattr(LEAF, name)
    assert str(e.value) == (
        f".{name}: f32[4@a] is a placed leaf, not a tensor\n  fix: fs.device_get(x) is the full tensor, {ADVICE}"
    )
    assert not hasattr(LEAF, name)
    assert getattr(LEAF, name, None) is None


def test_a_leaf_of_one_element_has_a_value():
    assert (ONE_ELEMENT.item(), float(ONE_ELEMENT), int(ONE_ELEMENT), bool(ONE_ELEMENT)) == (3.0, 3.0, 3, True)
    assert f"{ONE_ELEMENT:.2f}" == "3.00"
    text = error_text(lambda x: x < 4, ONE_ELEMENT)
    assert text == f"<: f32[] 3.0 is a placed leaf, not a tensor\n  fix: x.item() is its value, {ADVICE}"
    assert "has 4 elements" in error_text(bool, LEAF)


def test_placed_leaves_are_keys_leaves_of_trees_and_can_be_copied():
    assert {LEAF: 1, ONE_ELEMENT: 2}[LEAF] == 1
    assert fs.tree.leaves({"x": [LEAF]}) == [LEAF]  # by identity
    assert copy.copy(LEAF) is not LEAF
    assert copy.copy(LEAF).shards[0] is LEAF.shards[0]
    twin = copy.deepcopy({"x": LEAF})["x"]
    assert (twin.placement, twin.mesh) == (LEAF.placement, LEAF.mesh)
    assert torch.equal(fs.device_get(twin), fs.device_get(LEAF))
    assert not {s.data_ptr() for s in twin.shards} & {s.data_ptr() for s in LEAF.shards}
