"""Deferred leaves, their initializers and `materialize`: every mesh gives the values of a single device."""

from __future__ import annotations

import itertools
import math
import tracemalloc

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from fshard.spec import box_shape, full_box
from tests.lib.assertions import assert_same, error_text
from tests.lib.operations import Operations
from tests.lib.tiers import slow_unless

MIB = 1 << 20
CPU = torch.device("cpu")
ONE = fs.make_mesh(one=1)


def on_one(tree, **kwargs):
    return fs.device_get(fs.materialize(tree, P(), ONE, key=fs.key(7), **kwargs))


# --- every initializer, every placement --------------------------------------------------------------------

MAKERS = {
    "normal": lambda shape, dtype: fs.init.normal(shape, mean=0.5, std=0.02, dtype=dtype),
    "uniform": lambda shape, dtype: fs.init.uniform(shape, low=-2, high=0.5, dtype=dtype),
    "trunc_normal": lambda shape, dtype: fs.init.trunc_normal(shape, std=0.5, a=-0.75, b=0.25, dtype=dtype),
    "zeros": lambda shape, dtype: fs.init.zeros(shape, dtype=dtype),
    "ones": lambda shape, dtype: fs.init.ones(shape, dtype=dtype),
    "full": lambda shape, dtype: fs.init.full(shape, 3.0, dtype=dtype),
    "eye": lambda shape, dtype: fs.init.eye(*shape, gain=2.0, dtype=dtype),
    "arange": lambda shape, dtype: fs.init.arange(*shape, start=-2, step=3, dtype=dtype),
    "orthogonal": lambda shape, dtype: fs.init.orthogonal(shape, gain=0.5, dtype=dtype),
    "kaiming_uniform": lambda shape, dtype: fs.init.kaiming_uniform(shape, a=math.sqrt(5), dtype=dtype),
    "kaiming_normal": lambda shape, dtype: fs.init.kaiming_normal(shape, mode="fan_out", dtype=dtype),
    "xavier_uniform": lambda shape, dtype: fs.init.xavier_uniform(shape, gain=2.0, dtype=dtype),
    "xavier_normal": lambda shape, dtype: fs.init.xavier_normal(shape, dtype=dtype),
}
RANDOM = [n for n in MAKERS if n not in ("zeros", "ones", "full", "eye", "arange")]
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTS = (torch.int64, torch.int32, torch.int8)
SHAPES = [(), (7,), (64,), (8, 12), (5, 3), (1, 13), (0, 4), (4, 6, 5), (3, 1, 2, 9)]
MESHES = [{"a": 2}, {"a": 3}, {"a": 8}, {"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2}]


def shapes_for(name):
    dims = {"eye": (2, 2), "arange": (1, 1)}.get(name, (0, 9) if "_" not in name or name == "trunc_normal" else (2, 9))
    dims = (2, 9) if name == "orthogonal" else dims
    return [s for s in SHAPES if dims[0] <= len(s) <= dims[1]]


def placements(ndim, axes):
    """Row, column, replicated, both, and nested: all axes on one dim, in both orders."""
    names = tuple(axes)
    found = {P()}
    if ndim:
        found |= {P("a"), P(..., "a"), P(names), P(..., names[::-1])}
    if ndim > 1 and "b" in axes:
        found |= {P("a", "b"), P("b", ..., "a"), P(names[1:], names[0])}
    if ndim > 2:
        found |= {P(None, "a"), P(None, names)}
    return sorted(found, key=repr)


@pytest.mark.parametrize("name", slow_unless(["trunc_normal", "orthogonal", "eye"], MAKERS))
def test_values_are_the_same_on_every_mesh_and_for_every_spec(name):
    # The others are filled as these.
    meshes = MESHES[2:] if name in ("normal", "orthogonal", "eye", "arange") else MESHES[-2:]
    kinds = FLOATS + (INTS if name in ("eye", "arange", "full", "zeros", "ones") else ())
    for i, shape in enumerate(shapes_for(name)):
        for dtype in kinds if i < 3 else kinds[:2]:
            described = MAKERS[name](shape, dtype)
            assert described.shape == shape
            assert described.dtype == dtype
            expected = on_one({"w": described})["w"]
            assert expected.dtype == dtype
            assert expected.shape == shape
            for axes in meshes if dtype == torch.float32 else MESHES[-1:]:
                mesh = fs.make_mesh(**axes)
                for spec in placements(len(shape), axes):
                    placed = fs.materialize({"w": described}, spec, mesh, key=fs.key(7))["w"]
                    assert (placed.shape, placed.dtype, placed.spec, placed.mesh) == (shape, dtype, spec, mesh)
                    for rank, shard in zip(mesh.ranks, placed.shards, strict=True):
                        assert_same(shard, expected[placed.box(rank)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", [n for n in MAKERS if n != "arange"])
def test_shards_are_contiguous(name, dtype):
    for shape, spec in itertools.product([(4, 6), (6, 4)], [P(), P("a"), P(..., "a")]):
        placed = fs.materialize(MAKERS[name](shape, dtype), spec, fs.make_mesh(a=2), key=fs.key(0))
        assert all(s.is_contiguous() for s in placed.shards)


def test_replicas_do_not_share_memory():
    placed = fs.materialize(fs.init.normal((3,)), P(), fs.make_mesh(a=3), key=fs.key(0))
    assert len({s.data_ptr() for s in placed.shards}) == 3


@pytest.mark.parametrize("name", ["normal", "uniform", "trunc_normal", "full", "eye"])
def test_elements_with_an_index_beyond_32_bits(name):
    """Compare two overlapping boxes, and single elements, of a leaf of 2^40 elements."""
    leaf = MAKERS[name]((1 << 20, 1 << 20), torch.float32)
    n = 1 << 20
    fill = lambda *box: leaf.init.fill(fs.key(3), leaf.shape, box, torch.float32, CPU)  # noqa: E731
    right = fill(slice(n - 40, n), slice(n - 9, n))
    left = fill(slice(n - 60, n - 8), slice(n - 21, n - 4))
    assert_same(right[:32, :5].clone(), left[20:, 12:].clone())
    for i, j in [(0, 0), (7, 3), (39, 8)]:
        row, column = n - 40 + i, n - 9 + j
        assert_same(fill(slice(row, row + 1), slice(column, column + 1)), right[i : i + 1, j : j + 1])
    if name not in ("full", "eye"):  # the index does not wrap after 2^32 elements, which are 4096 rows
        first, later = fill(slice(0, 1), slice(0, 9)), fill(slice(4096, 4097), slice(0, 9))
        assert not torch.isin(first, later).any()


@pytest.mark.parametrize("name", RANDOM)
def test_values_depend_on_the_key_and_the_path(name):
    described = MAKERS[name]((8, 8), torch.float32)
    again = MAKERS[name]((8, 8), torch.float32)
    tree = on_one({"a": described, "b": again})
    assert not torch.equal(tree["a"], tree["b"])
    other = fs.device_get(fs.materialize({"a": described}, P(), ONE, key=fs.key(8)))
    assert not torch.equal(tree["a"], other["a"])


# --- the tree ----------------------------------------------------------------------------------------------


def test_adding_a_leaf_changes_no_other_leaf():
    before = on_one({"h": [fs.init.normal((4, 4)), fs.init.uniform(5)], "z": fs.init.normal(3)})
    after = on_one(
        {
            "a": fs.init.normal(9),
            "h": [fs.init.normal((4, 4)), fs.init.uniform(5), fs.init.normal(1)],
            "z": fs.init.normal(3),
        }
    )
    assert_same(before["h"][0], after["h"][0])
    assert_same(before["h"][1], after["h"][1])
    assert_same(before["z"], after["z"])


def test_leaves_with_different_paths_have_different_values():
    """A dict key that contains a dot is refused, or its leaf has values of its own."""
    for tree in (
        {"a": {"b": fs.init.normal(8)}, "a.b": fs.init.normal(8)},
        {"x": {1: fs.init.normal(8)}, "x.1": fs.init.normal(8)},
    ):
        try:
            first, second = fs.tree.leaves(on_one(tree))
        except ShardingError:
            continue
        assert not torch.equal(first, second)


def test_tied_leaves_are_one_leaf():
    shared = fs.init.normal((4, 6))
    mesh = fs.make_mesh(m=2)
    specs = {"wte": P("m"), "head": P("m")}
    tied = fs.materialize({"wte": shared, "head": shared}, specs, mesh, key=fs.key(7))
    assert tied["wte"] is tied["head"]
    assert_same(
        fs.device_get(tied["head"]), on_one({"head": fs.init.normal((4, 6))})["head"]
    )  # the values of its first path
    # equal descriptions are not tied
    untied = fs.materialize({"wte": fs.init.normal((4, 6)), "head": fs.init.normal((4, 6))}, specs, mesh, key=fs.key(7))
    assert untied["wte"] is not untied["head"]
    # equal specs may be written differently
    both = fs.materialize({"wte": shared, "head": shared}, {"wte": P("m"), "head": P("m", ...)}, mesh, key=fs.key(7))
    assert both["wte"] is both["head"]


def test_error_text_of_tied_leaves_with_different_specs():
    shared = fs.init.normal((4, 6))
    tree, specs = {"head": shared, "h": [shared]}, {"head": P(None, "m"), "h": P("m")}
    assert error_text(fs.materialize, tree, specs, fs.make_mesh(m=2), key=fs.key(0)) == (
        "materialize: tree['head']: is tied to tree['h'][0], which has another spec\n"
        "  spec  P(None, 'm')    other  P('m')\n"
        "  fix: give both one spec, or untie them"
    )


def test_tensors_in_the_tree_are_placed_with_their_values_and_dtype():
    mesh = fs.make_mesh(a=2)
    table = torch.arange(5, dtype=torch.float64)
    placed = fs.materialize({"t": table, "w": fs.init.zeros(5)}, P("a"), mesh, key=fs.key(0), dtype=torch.bfloat16)
    assert (placed["t"].dtype, placed["w"].dtype) == (torch.float64, torch.bfloat16)
    assert_same(fs.device_get(placed["t"]), table)
    placed["t"].shards[0].add_(1)
    assert table.tolist() == [0, 1, 2, 3, 4]


def test_a_tree_of_any_shape_and_prefix_specs():
    tree = {"h": [{"up": fs.init.normal((4, 4)), "b": fs.init.zeros(4)}, None], "e": {}, "w": (fs.init.ones(4),)}
    placed = fs.materialize(tree, {"h": P("a"), "e": P(), "w": P()}, fs.make_mesh(a=2), key=fs.key(0))
    assert repr(placed) == "{'h': [{'up': f32[4@a, 4], 'b': f32[4@a]}, None], 'e': {}, 'w': (f32[4],)}"
    assert fs.materialize({}, P(), ONE, key=fs.key(0)) == {}


def test_dtype_applies_to_floating_leaves_only_and_rounds_once():
    tree = {"w": fs.init.normal(50), "d": fs.init.normal(50, dtype=torch.float64), "i": fs.init.arange(5)}
    made = on_one(tree, dtype=torch.bfloat16)
    assert [made[k].dtype for k in "wdi"] == [torch.bfloat16, torch.bfloat16, torch.int64]
    assert_same(made["w"], on_one(tree)["w"].bfloat16())
    assert_same(made["w"], on_one({"w": tree["w"].to(torch.bfloat16)})["w"])


def test_default_dtype_is_that_of_torch():
    try:
        torch.set_default_dtype(torch.float64)
        assert fs.init.normal(2).dtype == torch.float64
        assert fs.init.arange(2).dtype == torch.int64
        assert fs.init.arange(2, step=0.5).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("key", "got", "fix"),
    [
        (torch.tensor([1, 2], dtype=torch.int32), "i32[2]", "fs.key(0)"),
        (torch.tensor([1.0, 2.0]), "f32[2]", "fs.key(0)"),
        (torch.tensor([1, 2, 3]), "i64[3]", "fs.key(0)"),
        (torch.tensor(3), "i64[]", "fs.key(0)"),
        (fs.split(fs.key(0), 3), "i64[3, 2]", "pass one of these keys, keys[0], or map over them with torch.vmap"),
    ],
)
def test_error_text_of_an_invalid_key(key, got, fix):
    text = error_text(fs.materialize, {"w": fs.init.normal(2)}, P(), ONE, key=key)
    assert text == f"materialize: not a key\n  got  {got}    needed  i64[2]\n  fix: {fix}"


def test_error_text_of_a_seed_in_place_of_a_key():
    text = error_text(fs.materialize, {"w": fs.init.normal(2)}, P(), ONE, key=42)
    assert text == "materialize: key must be a Tensor, got 42\n  fix: fs.key(0)"


def test_error_text_of_leaves_that_cannot_be_placed():
    tree = {"a": fs.init.normal((4,)), "b": {3.0}, "c": fs.device_put(torch.zeros(2), P(), ONE), "d": fs.init.zeros(2)}
    specs = {"a": P(None, "one"), "b": P(), "c": P(), "d": P("two")}
    assert error_text(fs.materialize, tree, specs, ONE, key=fs.key(0)) == (
        "4 problems\n"
        "materialize: tree['a']: the spec is longer than the shape\n"
        "  shape  [4]    spec  P(None, 'one')    mesh  one=1\n"
        "  2 > 1 dims\n"
        "  fix: drop 1 of its entries\n"
        "materialize: tree['b']: cannot place a set\n"
        "  fix: make it a tensor, or a dict, a tuple or a dataclass with @fs.tree.register that has tensors\n"
        "materialize: tree['c']: cannot place a Sharded\n"
        "  fix: fs.reshard(tree, specs) moves placed leaves\n"
        "materialize: tree['d']: the mesh has no axis 'two'\n"
        "  shape  [2]    spec  P('two')    mesh  one=1\n"
        "  fix: use one of ['one']"
    )


# --- descriptions ------------------------------------------------------------------------------------------


def test_a_description_has_no_storage_and_a_readable_repr():
    leaf = fs.init.normal((1 << 30, 1 << 30), std=0.02, dtype=torch.bfloat16)
    assert (leaf.ndim, leaf.numel(), leaf.nbytes) == (2, 1 << 60, 1 << 61)
    assert repr(leaf) == "bf16[1073741824, 1073741824] = normal(std=0.02)"
    assert repr(fs.init.trunc_normal(3, b=1.0)) == "f32[3] = trunc_normal(b=1)"
    assert repr(fs.init.zeros(())) == "f32[] = zeros"
    assert repr(fs.init.arange(3)) == "i64[3] = arange()"
    assert fs.init.normal(3) == fs.init.normal((3,))
    assert fs.init.normal(3) != fs.init.normal(3, std=2.0)
    assert leaf.to(torch.float32) == fs.init.normal((1 << 30, 1 << 30), std=0.02)


SIZES_FIX = "\n  fix: sizes are integers of 0 or more"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: fs.init.normal((3, -1)), f"Deferred: [3, -1] is not a shape{SIZES_FIX}"),
        (
            lambda: fs.init.zeros((2.0,)),
            "zeros: shape must be an int or a Sequence of int, got (2.0,)\n  fix: (64, 256), a tuple of sizes",
        ),
        (
            lambda: fs.init.trunc_normal(3, a=1, b=1),
            "trunc_normal: the range from a=1 to b=1 is empty\n  fix: a < b",
        ),
        (lambda: fs.init.orthogonal((3,)), "orthogonal: shape [3] is not a matrix\n  fix: two dims or more"),
        (
            lambda: fs.init.xavier_normal((3,)),
            "a leaf of shape [3] has no fans\n  fix: two dims or more, or normal(std=...)",
        ),
        (
            lambda: fs.init.kaiming_normal((3, 3), mode="fan"),
            "kaiming_normal: mode must be 'fan_in' or 'fan_out', got 'fan'",
        ),
    ],
)  # fmt: skip
def test_error_texts_of_invalid_descriptions(make, text):
    assert error_text(make) == text


def llama_70b():
    """Describe a Llama 70B: 80 layers, d 8192, ffn 28672, 8 kv heads of 128, vocabulary 128256."""
    d, ffn, kv, vocab = 8192, 28672, 1024, 128256

    def normal(*shape):
        return fs.init.normal(shape, std=0.02, dtype=torch.bfloat16)

    def block():
        return {
            "attn": {"q": normal(d, d), "k": normal(d, kv), "v": normal(d, kv), "o": normal(d, d)},
            "mlp": {"gate": normal(d, ffn), "up": normal(d, ffn), "down": normal(ffn, d)},
            "norms": [fs.init.ones(d), fs.init.ones(d)],
        }

    return {
        "wte": normal(vocab, d),
        "h": [block() for _ in range(80)],
        "norm": fs.init.ones(d),
        "head": normal(d, vocab),
    }


def test_describing_70_billion_parameters_takes_less_than_50_mib():
    tracemalloc.start()
    try:
        tree = llama_70b()
        specs = fs.fully_shard(P(), tree, axis="data")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(x.numel() for x in fs.tree.leaves(tree)) == 70_553_706_496
    assert len(fs.tree.leaves(specs)) == len(fs.tree.leaves(tree)) == 723
    assert peak < 50 * MIB


# --- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "part", "dtype"), [("trunc_normal", "row", torch.float32), ("eye", "column", torch.bfloat16)]
)  # drawn, and computed by index
def test_filling_a_part_takes_16_mib_more_than_the_part(name, part, dtype):
    leaf = MAKERS[name]((4096, 4096), dtype)
    box = (slice(2048, 4096), slice(0, 4096)) if part == "row" else (slice(0, 4096), slice(1024, 3072))
    with Operations() as seen:
        made = leaf.init.fill(fs.key(0), leaf.shape, box, dtype, CPU)
    assert made.shape == box_shape(box)
    assert made.nbytes <= seen.peak <= made.nbytes + 16 * MIB


def test_materialize_takes_16_mib_more_than_the_parts():
    mesh = fs.make_mesh(a=2, b=2)
    with Operations() as seen:
        placed = fs.materialize(fs.init.normal((2048, 2048)), P("a", "b"), mesh, key=fs.key(0))
    assert placed.nbytes <= seen.peak <= placed.nbytes + 16 * MIB


# --- values ----------------------------------------------------------------------------------------------


def test_exact_values():
    assert on_one(fs.init.zeros((2, 2))).tolist() == [[0, 0], [0, 0]]
    assert on_one(fs.init.ones(2, dtype=torch.int32)).tolist() == [1, 1]
    assert on_one(fs.init.full((), 2.5)).item() == 2.5
    assert on_one(fs.init.full(2, True, dtype=torch.bool)).tolist() == [True, True]
    assert on_one(fs.init.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert on_one(fs.init.arange(4, start=10, step=-3)).tolist() == [10, 7, 4, 1]
    assert on_one(fs.init.arange(3, start=0.5, step=0.25, dtype=torch.float64)).tolist() == [0.5, 0.75, 1.0]
    assert on_one(fs.init.eye(2, 3)).tolist() == [[1, 0, 0], [0, 1, 0]]
    assert on_one(fs.init.eye(3, 2, dtype=torch.int64)).tolist() == [[1, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("value", [0.1, 1 / 3, -1e-3])
def test_constants_are_rounded_once(value, dtype):
    expected = torch.tensor(value, dtype=torch.float64).to(dtype)
    for default in (torch.float32, torch.bfloat16):
        torch.set_default_dtype(default)
        try:
            assert torch.equal(on_one(fs.init.full(2, value, dtype=dtype)), expected.expand(2))
            assert torch.equal(on_one(fs.init.arange(2, start=value, dtype=dtype))[0], expected)
        finally:
            torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_eye_rounds_its_gain_once_and_is_zero_off_the_diagonal(dtype):
    try:
        for value, default in [(0.1, torch.float32), (1 / 3, torch.bfloat16), (math.inf, torch.float32)]:
            torch.set_default_dtype(default)
            x = on_one(fs.init.eye(2, gain=value, dtype=dtype))
            assert x[0, 0] == x[1, 1] == torch.tensor(value, dtype=dtype)
            assert x[0, 1] == x[1, 0] == 0
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("shape", [(6, 6), (7, 4), (4, 7), (2, 3, 4), (2, 2, 9)])
def test_orthogonal(shape):
    q = on_one(fs.init.orthogonal(shape, gain=2.0, dtype=torch.float64)).reshape(-1, shape[-1])
    gram = q.T @ q if q.shape[0] >= q.shape[1] else q @ q.T
    torch.testing.assert_close(gram, 4 * torch.eye(len(gram), dtype=torch.float64))


def test_moments_and_bounds():
    n = 1 << 16
    x = on_one(fs.init.normal(n, mean=1.0, std=3.0))
    assert abs(x.mean() - 1) < 0.05
    assert abs(x.std() / 3 - 1) < 0.02
    x = on_one(fs.init.uniform(n, low=-1.0, high=3.0))
    assert -1 <= x.min() < -0.999
    assert 2.999 < x.max() < 3
    assert abs(x.mean() - 1) < 0.03
    x = on_one(fs.init.trunc_normal(n, std=0.02))  # bounds are values, as in torch
    assert abs(x.std() / 0.02 - 1) < 0.02
    x = on_one(fs.init.trunc_normal(n, std=2.0, a=-1.0, b=0.5))
    assert -1 <= x.min() < -0.999
    assert 0.499 < x.max() <= 0.5
    reference = torch.nn.init.trunc_normal_(torch.empty(n), std=2.0, a=-1.0, b=0.5)
    assert abs(x.mean() - reference.mean()) < 0.01
    assert abs(x.std() - reference.std()) < 0.01


TORCHS = {
    "kaiming_uniform": torch.nn.init.kaiming_uniform_,
    "kaiming_normal": torch.nn.init.kaiming_normal_,
    "xavier_uniform": torch.nn.init.xavier_uniform_,
    "xavier_normal": torch.nn.init.xavier_normal_,
}
FAN_CASES = [
    *[(name, kw) for name in TORCHS if "xavier" in name for kw in ({}, {"gain": 2.5})],
    *[
        (name, {"mode": mode, **more})
        for name in TORCHS
        if "kaiming" in name
        for mode in ("fan_in", "fan_out")
        for more in ({"nonlinearity": "relu"}, {"a": math.sqrt(5)}, {"nonlinearity": "tanh"})
    ],
]


@pytest.mark.parametrize(("name", "kwargs"), FAN_CASES, ids=str)
def test_fans_equal_those_of_torch_for_the_transposed_weight(name, kwargs):
    """`x @ w` with w [in, out] is a torch Linear with weight [out, in]; a convolution keeps torch's layout."""
    weight = torch.empty(400, 90)
    TORCHS[name](weight, **kwargs)
    conv = torch.empty(64, 24, 5, 5)
    TORCHS[name](conv, **kwargs)
    cases = [
        (weight, getattr(fs.init, name)((90, 400), **kwargs)),
        (weight, getattr(fs.init, name)((400, 90), in_dim=1, out_dim=0, **kwargs)),
        (conv, getattr(fs.init, name)((64, 24, 5, 5), in_dim=1, out_dim=0, **kwargs)),
        (conv, getattr(fs.init, name)((5, 5, 24, 64), **kwargs)),
    ]
    for reference, described in cases:
        x = on_one(described)
        assert abs(x.std() / reference.std() - 1) < 0.03
        if "uniform" in name:
            assert abs(x.abs().max() / reference.abs().max() - 1) < 2e-3
            assert x.abs().max() <= described.init.high


def test_full_box_of_a_shape():
    assert full_box((2, 3)) == (slice(0, 2), slice(0, 3))
    assert full_box(()) == ()


def test_stacked_layers_have_the_scale_of_one_layer_and_different_values_on_every_mesh():
    layer = {
        "up": fs.init.kaiming_normal((64, 48)), "q": fs.init.orthogonal((12, 12)), "one": fs.init.eye(3, gain=2.0),
        "pad": fs.init.zero_row(fs.init.normal((5, 4)), 1),
    }  # fmt: skip
    leaves = fs.init.stacked(layer, 3)
    assert repr(leaves["up"]) == "f32[3, 64, 48] = normal(std=0.1768)"
    assert repr(leaves["q"]) == "f32[3, 12, 12] = stacked orthogonal()"
    want = on_one(leaves)
    for got in want["up"]:
        assert got.std().item() == pytest.approx(0.1768, rel=0.05)  # fan_in 64, and not 3 * 64
    assert torch.allclose(want["q"] @ want["q"].mT, torch.eye(12).expand(3, 12, 12), atol=1e-5)
    assert torch.equal(want["one"], 2 * torch.eye(3).expand(3, 3, 3))
    assert not want["pad"][:, 1].any()
    assert all(len(want[k].unique(dim=0)) == 3 for k in ("up", "q", "pad"))
    for spec in (P("a"), P(None, "a"), P("a", None, "b"), P(None, ("b", "a"))):
        assert_same(fs.device_get(fs.materialize(leaves, spec, fs.make_mesh(a=2, b=3), key=fs.key(7))), want)
    assert error_text(fs.init.stacked, {"w": torch.ones(2)}, 3) == (
        "stacked: layer['w'] must be a Deferred, got tensor([1., 1.])"
    )


@pytest.mark.parametrize("row", [0, 5, 10])
def test_zero_row_is_zero_on_the_rank_that_has_it(row):
    plain = fs.init.normal((11, 6), std=0.3)
    leaf = fs.init.zero_row(plain, row)
    want = fs.device_get(fs.materialize({"w": plain}, P(), fs.make_mesh(a=1), key=fs.key(0)))["w"]
    want[row] = 0
    for spec in (P(), P("a"), P("b", "a"), P(None, ("a", "b"))):
        got = fs.materialize({"w": leaf}, spec, fs.make_mesh(a=2, b=3), key=fs.key(0))
        assert torch.equal(fs.device_get(got)["w"], want)
    assert repr(leaf) == f"f32[11, 6] = normal(std=0.3), row {row} zero"
    with pytest.raises(ShardingError, match=r"zero_row: \[11, 6\] has no row 11"):
        fs.init.zero_row(plain, 11)
