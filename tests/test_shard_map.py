"""`shard_map`: arguments, results, donation and errors."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections import UserDict

import numpy as np
import pytest
import torch

import fshard as fs
from fshard import P, Sharded, ShardingError
from fshard._core.region import checker
from fshard._core.torch import FakeTensorMode
from tests.lib.assertions import error_text

TWO = fs.make_mesh(a=2)
FOUR = fs.make_mesh(a=2, b=2)


def put(x, spec=P("a"), mesh=TWO):  # noqa: B008
    return fs.device_put(torch.as_tensor(x, dtype=torch.float32), spec, mesh)


def mapped(f, *, mesh=TWO, ins=None, out=P("a"), **kwargs):  # noqa: B008
    return fs.shard_map(f, mesh=mesh, in_specs=ins, out_specs=out, **kwargs)


# --- arguments ---------------------------------------------------------------------------------------------


def test_each_rank_is_passed_its_part_as_a_plain_tensor():
    x = torch.arange(24.0).view(6, 4)
    specs = [P(), P("a"), P(None, "b"), P("b", "a"), P(("a", "b")), P(None, ("b", "a"))]
    for spec in specs:
        seen = {}

        def f(x, seen=seen):
            assert type(x) is torch.Tensor
            seen[int(fs.axis_index(("a", "b")))] = x.clone()
            return x

        placed = fs.device_put(x, spec, FOUR)
        for arg in (x, placed):
            out = mapped(f, mesh=FOUR, ins=spec, out=spec)(arg)
            for rank in FOUR.ranks:
                assert torch.equal(seen[rank], x[placed.box(rank)])
            assert (out.shape, out.spec, out.mesh) == ((6, 4), spec, FOUR)
            assert torch.equal(fs.device_get(out), x)


READ_ONLY = np.arange(7.0)
READ_ONLY.flags.writeable = False
ARRAYS = {
    "writable": np.arange(21, dtype=np.int32).reshape(7, 3), "read-only": READ_ONLY, "reversed": np.arange(7)[::-1],
    "swapped bytes": np.arange(7, dtype=">f4"), "transposed": np.arange(14.0).reshape(2, 7).T, "0-d": np.array(3.0),
    "field": np.ones(7, [("a", "i1"), ("b", "<f8")])["b"], "bools": np.arange(7) > 2, "empty": np.ones((0, 2)),
    "uint16": np.arange(7, dtype=np.uint16), "half": np.ones(7, np.float16), "complex": np.arange(7) * 1j,
    "repeated": np.broadcast_to(np.arange(7.0), (3, 7)).T,
}  # fmt: skip


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("mesh", [fs.make_mesh(a=1), TWO], ids=repr)
def test_numpy_arrays_are_split_and_returned_as_tensors_are(mesh):
    specs = {name: P("a") if array.ndim else P() for name, array in ARRAYS.items()}
    seen = []

    def f(x):
        seen.extend(x.values())
        return {"tensors": x, "arrays": {name: y.numpy() for name, y in x.items()}}

    f = mapped(f, mesh=mesh, ins=(specs,), out={"tensors": specs, "arrays": specs})
    copies = {name: np.array(array) for name, array in ARRAYS.items()}
    placed = fs.device_put(ARRAYS, specs, mesh), fs.materialize(ARRAYS, specs, mesh, key=fs.key(0))
    for out in [*f(ARRAYS).values(), *f(copies).values(), *placed]:
        for name, array in ARRAYS.items():
            assert (out[name].shape, out[name].spec) == (array.shape, specs[name])
            assert np.array_equal(fs.device_get(out[name]).numpy(), array)
    assert all(type(x) is torch.Tensor for x in seen)
    checked = fs.check(mapped(lambda x: x, mesh=mesh, ins=(specs,), out=specs), ARRAYS)
    assert [x.shape for x in fs.tree.leaves(checked.result)] == [ARRAYS[name].shape for name in sorted(ARRAYS)]


def test_numpy_arrays_have_the_types_of_tensors_and_are_not_shared_by_ranks():
    w, x = np.ones(3), np.arange(12.0).reshape(4, 3)

    def gradient(w, x, enter):
        return fs.value_and_grad(lambda w: fs.psum((enter(w) * x).sum(), "a"))(w)

    f = mapped(lambda w, x: gradient(w, x, lambda w: fs.pvary(w, "a")), ins=(P(), P("a")), out=P())
    assert f(w, x)[1].shards[0].tolist() == x.sum(0).tolist()
    assert fs.verify(f, w, x, examples=1).orders == 4
    wrong = mapped(lambda w, x: gradient(w, x, lambda w: w), ins=(P(), P("a")), out=P())
    assert "mul of an operand that is invariant (I) over 'a'" in error_text(wrong, w, x)
    mapped(lambda w: w.add_(1), ins=(P(),), out=P())(w)
    assert w.tolist() == [1, 1, 1]
    step = mapped(lambda: np.add(w, 1, out=w), mesh=fs.make_mesh(a=1), out=P())
    results = [step(), step()]
    assert [x.shards[0].tolist() for x in results] == [[2, 2, 2], [3, 3, 3]]


def test_file_mapped_arrays_are_read_by_parts(tmp_path, monkeypatch):
    np.arange(8.0).tofile(tmp_path / "x")
    array, copied = np.memmap(tmp_path / "x", np.float64, "r"), []
    copy = np.array

    def recorded(x, *args, **kwargs):
        if isinstance(x, np.memmap):  # and not what modules of numpy make as they are imported
            copied.append(x.shape)
        return copy(x, *args, **kwargs)

    monkeypatch.setattr(np, "array", recorded)
    out = mapped(lambda x: 2 * x, ins=(P("a"),))(array)
    assert copied == [(4,), (4,)]
    assert fs.device_get(out).equal(2 * torch.arange(8.0).double())


@dataclasses.dataclass
class Opaque:
    x: object


def test_error_texts_of_leaves_that_have_no_parts():
    has_none, passes = "not a tensor: it has no parts for P('a') to place", "give it P(), which passes it on unchanged"
    register = "register its class, so that its fields are leaves: @fs.tree.register above @dataclass of Opaque"
    other = "make it a tensor, or a dict, a tuple or a dataclass with @fs.tree.register that has tensors"
    texts = {
        "an int": (3, other), "a float32": (np.float32(3), other), "a str": ("abcd", other),
        "an object": (object(), other), "an Opaque": (Opaque(torch.ones(4)), register),
        "a UserDict": (UserDict(x=torch.ones(4)), "make it a dict: dict(x)"),
        "a ndarray": (np.array(["a", "b"]), "make it an array of numbers or bools without a mask: this one is of <U1"),
        "a MaskedArray": (np.ma.array([1, 2], mask=[0, 1]),
                          "make it an array of numbers or bools without a mask: this one is of int64"),
    }  # fmt: skip
    for mesh in (fs.make_mesh(a=1), TWO):
        for kind, (leaf, fix) in texts.items():
            wrong = [
                f"{where}: is {kind}, {has_none}\n  fix: {passes}; or {fix}"
                for where in ("f: args[0]['x']", "f: result")
            ]

            def f(x, leaf=leaf):
                return leaf

            assert error_text(mapped(f, mesh=mesh, ins=(P("a"),), out=P()), {"x": leaf}) == wrong[0]
            assert error_text(mapped(f, mesh=mesh, ins=(P(),), out=P("a")), leaf) == wrong[1]
            assert mapped(lambda x: x, mesh=mesh, ins=(P(),), out=P())(leaf) is leaf
    text = error_text(mapped(lambda x: x, ins=(P("a"),)), {"x": [1, 2, 3], "y": "name"})
    assert text.startswith("2 problems\n<lambda>: args[0]['x'][0]: is an int")
    assert "\n  the same for args[0]['x'][1], args[0]['x'][2]\n<lambda>: args[0]['y']: is a str" in text


def test_in_specs_are_a_prefix_of_the_arguments():
    def f(tree, x, n):
        assert (tree["w"][0].shape, tree["w"][1].shape, tree["n"], x.shape, n) == ((2, 3), (1,), None, (2,), 7)
        return x

    args = ({"w": [torch.ones(4, 3), torch.ones(2)], "n": None}, torch.ones(2), 7)
    for ins in [
        ({"w": P("a"), "n": P()}, P(), P()),
        ({"w": [P("a"), P("a")], "n": None}, P(), None),
        [{"w": (P("a", None), P("a")), "n": None}, None, None],
    ]:
        assert mapped(f, ins=ins, out=P())(*args).shape == (2,)
    assert mapped(lambda *xs: sum(x.sum() for x in xs)[None], ins=P("a"))(torch.ones(4), torch.ones(2)).shape == (2,)


def test_without_in_specs_placed_leaves_keep_their_spec_and_tensors_are_unsplit():
    def f(x, y, tree):
        assert (x.shape, y.shape, tree["z"].shape) == ((2,), (4,), (1, 3))
        return x

    args = (put(torch.ones(4)), torch.ones(4), {"z": put(torch.ones(2, 3))})
    assert mapped(f)(*args).shape == (4,)
    assert mapped(f, ins=(None, None, None))(*args).shape == (4,)
    assert mapped(f, ins=(P("a"), None, {"z": None}))(*args).shape == (4,)


def test_arguments_that_are_not_tensors_are_passed_unchanged():
    marker = object()

    def f(x, *rest):
        assert rest == (3, "word", None, marker, {"k": 2.5})
        return x

    assert mapped(f)(put([1, 2]), 3, "word", None, marker, {"k": 2.5}).shape == (2,)


def test_global_arguments_of_int_bool_and_0d():
    out = mapped(lambda i, m: torch.where(m, i, -i), ins=P("a"))(torch.arange(3), torch.tensor([True, False, True]))
    assert fs.device_get(out).tolist() == [0, -1, 2]
    assert mapped(lambda x: x + 1, out=P())(torch.tensor(2.0)).item() == 3


def test_in_spec_may_be_written_differently_from_the_placement():
    x = put(torch.ones(2, 4), P(None, "a"))
    assert mapped(lambda x: x, ins=P(..., "a"), out=P(..., "a"))(x).shape == (2, 4)


def test_error_text_of_in_specs_that_are_not_a_prefix():
    assert error_text(mapped(lambda x, y: x, ins=(P("a"),)), torch.ones(2), torch.ones(2)) == (
        "<lambda>: in_specs: not a prefix of the tree it describes\n"
        "  got  tuple of 1    expected  tuple of 2\n"
        "  missing [1]    extra []\n"
        "  fix: give every key a P, or one P for the whole subtree"
    )
    assert error_text(mapped, lambda x: x, ins=({"w": "a"},)) == (
        "shard_map: in_specs[0]['w'] must be a P, got 'a'\n  fix: fs.P('data'); fs.P() for a leaf that is not split"
    )


def test_error_lists_every_wrong_argument():
    def step(p, x):
        return x

    p = {
        "fine": put(torch.ones(4)),
        "elsewhere": put(torch.ones(4), P("a"), fs.make_mesh(a=4)),
        "moved": put(torch.ones(4), P()),
        "wide": torch.ones(4),
    }
    specs = {"fine": P("a"), "elsewhere": P("a"), "moved": P("a"), "wide": P(None, "a")}
    assert error_text(mapped(step, ins=(specs, P("model"))), p, torch.ones(3)) == (
        "4 problems\n"
        "step: args[0]['elsewhere']: is on another mesh\n"
        "  leaf  Mesh(a=4; simulated, 4 x cpu)    function  Mesh(a=2; simulated, 2 x cpu)\n"
        "  fix: fs.reshard(x, specs, mesh), or f.on(mesh)\n"
        "step: args[0]['moved']: is placed as P(), in_specs says P('a')\n"
        "  leaf  f32[4]\n"
        "  fix: fs.reshard(x, P('a'))\n"
        "step: args[0]['wide']: the spec is longer than the shape\n"
        "  shape  [4]    spec  P(None, 'a')    mesh  a=2\n"
        "  2 > 1 dims\n"
        "  fix: drop 1 of its entries\n"
        "step: args[1]: the mesh has no axis 'model'\n"
        "  shape  [3]    spec  P('model')    mesh  a=2\n"
        "  fix: use one of ['a']"
    )


def test_argument_that_requires_grad_is_an_error():
    f = mapped(lambda x: 2 * x, ins=P("a"))
    x = torch.ones(2, requires_grad=True)
    expected = (
        "<lambda>: args[0]: requires grad, and no gradient flows out of shard_map\n"
        "  fix: differentiate inside, as fs.shard_map(fs.value_and_grad(loss), ...) does; x.detach() if no gradient is "
        "wanted"
    )
    assert error_text(f, x) == expected
    with torch.no_grad():
        assert fs.device_get(f(x)).tolist() == [2, 2]
    assert error_text(f, x) == expected  # also after a successful call
    assert fs.device_get(f(x.detach())).tolist() == [2, 2]


@pytest.mark.parametrize("mesh", [fs.make_mesh(a=1), TWO], ids=repr)
def test_vmap_over_shard_map_is_an_error(mesh):
    f = mapped(lambda x: 2 * x, mesh=mesh, out=P())
    error_text(torch.vmap(lambda x: f(x).shards[0]), torch.ones(3, 2))


# --- results -----------------------------------------------------------------------------------------------


def test_results_are_placed_by_a_prefix_of_specs():
    def f(x):
        return {"p": {"w": x, "b": [x[:, 0], None]}, "loss": fs.psum(x.sum(), "a")}, ()

    out, empty = mapped(f, ins=P("a"), out=({"p": P("a"), "loss": P()}, P()))(torch.ones(4, 3))
    assert repr(out) == "{'p': {'w': f32[4@a, 3], 'b': [f32[4@a], None]}, 'loss': f32[] 12.0}"
    assert empty == ()
    assert out["loss"].item() == 12


def test_results_may_be_none_or_empty():
    assert mapped(lambda x: None, ins=P("a"), out=P())(torch.ones(2)) is None
    assert mapped(dict, ins=P("a"), out=P())() == {}


def test_results_do_not_require_grad():
    out = mapped(lambda x: x.clone().requires_grad_() * 2, ins=P("a"))(torch.ones(2))
    assert not any(s.requires_grad for s in out.shards)


@pytest.mark.parametrize("n", [0, 1, 3, 5, 7, 8])
def test_results_of_uneven_parts(n):
    x = torch.arange(float(n))
    for mesh, spec in [(TWO, P("a")), (FOUR, P(("a", "b"))), (FOUR, P(("b", "a"))), (fs.make_mesh(a=5), P("a"))]:
        out = mapped(lambda x: 2 * x, mesh=mesh, ins=spec, out=spec)(x)
        assert out.shape == (n,)
        assert torch.equal(fs.device_get(out), 2 * x)


def test_error_text_of_parts_that_make_up_no_dim():
    def f(x):
        return x[: 1 if int(fs.axis_index("a")) == 0 else 2]

    assert error_text(mapped(f, ins=P("a")), torch.ones(4)) == (
        "f: result: the parts do not make up dim 0 split by ('a',)\n"
        "  the ranks hold [1, 2]\n"
        "  a dim of 3 splits into [2, 1]\n"
        "  fix: return equal parts, or parts of ceil(n / ranks) with the short ones last, or name the lengths: "
        "P('a', lengths=(1, 2))"
    )


def test_error_text_of_a_part_that_does_not_fit_the_others():
    def f(x):
        return x[: 1 if int(fs.axis_index("a")) else 2]

    assert error_text(mapped(f, out=P()), torch.ones(4)) == (
        "f: result: rank 1 returned [1], its part of [2] is [2]\n  spec  P()"
    )


def test_error_lists_every_wrong_result():
    def step(x):
        return {"long": x, "odd": x, "fine": x, "number": int(fs.axis_index("a"))}

    out = {"long": P(None, "a"), "odd": P("model"), "fine": P("a"), "number": P()}
    assert error_text(mapped(step, ins=P("a"), out=out), torch.ones(4)) == (
        "3 problems\n"
        "step: result['long']: the spec is longer than the shape\n"
        "  shape  [2]    spec  P(None, 'a')    mesh  a=2\n"
        "  2 > 1 dims\n"
        "  fix: drop 1 of its entries\n"
        "step: result['number']: is not a tensor and differs between ranks\n"
        "  [0, 1]\n"
        "  fix: return a tensor with a spec, or a pytree of them\n"
        "step: result['odd']: the mesh has no axis 'model'\n"
        "  shape  [2]    spec  P('model')    mesh  a=2\n"
        "  fix: use one of ['a']"
    )


def test_error_text_of_out_specs_that_are_not_a_prefix():
    assert error_text(mapped(lambda x: (x, x), out=(P("a"),)), put([1, 2])) == (
        "<lambda>: out_specs: not a prefix of the tree it describes\n"
        "  got  tuple of 1    expected  tuple of 2\n"
        "  missing [1]    extra []\n"
        "  fix: give every key a P, or one P for the whole subtree"
    )


def test_error_text_of_ranks_that_return_different_trees():
    def f(x):
        return [x] if int(fs.axis_index("a")) else {"x": x}

    expected = error_text(mapped(f), put([1, 2]))
    assert expected.startswith("f: rank 1 returned another tree than rank 0\n  rank_0  PyTreeSpec({'x': *})")
    assert "other  PyTreeSpec([*])" in expected


@pytest.mark.parametrize("check", ["first", "never", "values"])
def test_results_without_values_are_refused(check):
    """Also in a later call of the same types. In a dry run no result has values."""
    with FakeTensorMode():
        fake = torch.ones(3)
    one_of = [torch.ones(3)]
    f = mapped(lambda x: {"x": x, "y": [one_of[0] * 2]}, ins=P("a"), out={"x": P("a"), "y": P()}, check=check)
    f(torch.ones(2))
    for one_of[0] in (fake, torch.ones(4, device="meta")):
        assert error_text(f, torch.ones(2)) == (
            f"<lambda>: result['y'][0] has a shape and no values: f32[{len(one_of[0])}]\n"
            "  it was computed from a tensor without values (fake, or on meta), which the function captured\n"
            "  fix: pass tensors as arguments"
        )
    assert f.on(fs.make_mesh(a=2, kind="abstract"))(torch.ones(2))["y"][0].shape == (4,)


@pytest.mark.parametrize("first", [True, False])
def test_tensor_on_one_rank_and_number_on_another_is_an_error(first):
    def f():
        return torch.ones(2) if (int(fs.axis_index("a")) == 0) == first else 1.0

    expected = error_text(mapped(f, out=P()))
    assert expected.startswith("f: result: ")


def test_error_text_of_ranks_that_return_different_dims():
    assert error_text(mapped(lambda: torch.ones([2] * (1 + int(fs.axis_index("a")))), out=P())) == (
        "<lambda>: result: the ranks returned [1, 2] dims"
    )


def test_ranks_that_return_different_dtypes_are_an_error():
    kinds = [torch.float32, torch.float64]
    error_text(mapped(lambda: torch.ones(2, dtype=kinds[int(fs.axis_index("a"))])))


@pytest.mark.parametrize(
    "value", [3, 2.5, "word", True, math.nan, object()], ids=["int", "float", "str", "bool", "nan", "object"]
)
def test_results_that_are_not_tensors_are_returned_unchanged(value):
    got, x = mapped(lambda x: (value, x), ins=P("a"), out=(P(), P("a")))(torch.ones(2))
    assert got is value
    assert isinstance(x, Sharded)


def test_results_that_are_not_tensors_must_be_equal_on_all_ranks():
    for f in (object, lambda: str(fs.axis_index("a"))):
        assert "is not a tensor and differs between ranks" in error_text(mapped(f, out=P()))


# --- storage -----------------------------------------------------------------------------------------------


def storages(*leaves):
    return [s.untyped_storage().data_ptr() for x in leaves for s in (x.shards if isinstance(x, Sharded) else (x,))]


@pytest.mark.parametrize("mesh", [fs.make_mesh(a=1), TWO], ids=repr)
@pytest.mark.parametrize("spec", [P(), P("a")], ids=repr)
def test_results_share_no_storage_with_arguments_or_each_other(mesh, spec):
    placed, plain = put(torch.ones(4), spec, mesh), torch.ones(4)

    def f(x, y):
        z = x + 1
        return {"arg": x, "view": x[:1], "plain": y, "twice": [z, z], "of it": z.view(-1)}

    out = mapped(f, mesh=mesh, ins=spec, out=spec)(placed, plain)
    pointers = storages(placed, plain, *fs.tree.leaves(out))
    assert len(set(pointers)) == len(pointers)


def test_ranks_share_no_storage_of_a_captured_result():
    constant = torch.ones(4)
    out = mapped(lambda: [constant, constant.view(2, 2)], out=P())()
    pointers = [at for x in out for at in storages(x)]
    assert len(set(pointers)) == len(pointers)


def test_donated_argument_is_overwritten_in_place():
    x, kept = put(torch.ones(4)), put(torch.ones(4))
    before = storages(x)
    out, other = mapped(lambda x, y: (x.add_(1), y), donate=0)(x, kept)
    assert storages(out) == before
    assert not any(vars(x) for x in out.shards)  # torch.save would keep it
    assert not set(storages(other)) & set(storages(kept))
    assert fs.device_get(out).tolist() == [2] * 4
    assert fs.device_get(kept).tolist() == [1] * 4


def _double(x):
    x.mul_(2)
    return x


def _backward(x):
    x.requires_grad_().sum().backward()
    return x.grad


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("f", "what"), [(_double, "writes.* to x, "), (_backward, r"writes.* to the \.grad of ")])
def test_the_callers_placed_leaf_is_not_written_to(f, what, devices):
    """On one device, too, where no operation is checked. A plain tensor is copied on every mesh."""
    mesh = fs.make_mesh(data=devices)
    with pytest.raises(fs.ShardingError, match=what):
        mapped(f, mesh=mesh, out=P())(fs.device_put(torch.ones(4), P(), mesh))
    kept = torch.ones(4)
    f = mapped(f, mesh=mesh, out=P())
    assert fs.device_get(f(kept)).tolist() == fs.device_get(f(kept)).tolist()
    assert kept.tolist() == [1] * 4
    assert kept.grad is None


def test_gradients_that_an_optimizer_reads_are_not_written_to():
    opt, mesh, ones = fs.optim.adamw(1e-3), fs.make_mesh(data=2), {"w": torch.ones(64)}  # large enough for the kernel
    params, grads = fs.device_put(ones, P(), mesh), fs.device_put(ones, P(), mesh)
    f = fs.shard_map(lambda p, s, g: opt.update(g, s, p), mesh=mesh, in_specs=P(), out_specs=P(), donate=(0, 1))
    f(params, fs.device_put(opt.init(ones), P(), mesh), grads)
    assert fs.device_get(grads)["w"].tolist() == [1] * 64


def test_two_results_do_not_share_a_donated_storage():
    x = put(torch.ones(4))
    before = set(storages(x))
    one, two = mapped(lambda x: (x, x.view(-1)), donate=(0,))(x)
    assert not set(storages(one)) & set(storages(two))
    assert set(storages(one)) == before


def test_donated_argument_cannot_be_used_again():
    def step(p, n, x):
        return fs.tree.map(lambda w: w + 1, p)

    f = mapped(step, donate=[0])
    p, x = {"w": put(torch.ones(4)), "b": put(torch.ones(2))}, put(torch.ones(2))
    f(p, 3, x)
    for leaf in p.values():
        assert "was donated to step, which may have overwritten it" in error_text(lambda leaf=leaf: leaf.shards)
    assert x.shards
    assert error_text(f, p, 3, x) == (
        "f32[2@a] was donated to step, which may have overwritten it\n"
        "  fix: use the value that call returned, or leave the argument out of donate="
    )


def test_refused_call_donates_nothing_and_failed_call_does():
    x = put(torch.ones(4))
    error_text(mapped(lambda x: x, ins=P(), donate=0), x)
    assert x.shards
    with pytest.raises(ZeroDivisionError):
        mapped(lambda x: 1 // 0, donate=0)(x)
    assert "was donated" in error_text(lambda: x.shards)


def test_error_texts_of_wrong_donations():
    x = put(torch.ones(4))

    def step(p, y):
        return y

    fix = "fix: keep a tied leaf once in the tree; materialize with the same key makes a copy; or do not donate it"
    for donated, state, name, other in (
        (0, {"wte": x, "head": [x]}, "p['wte']", "p['head'][0]"),
        ((0, 1), {"w": x}, "y", "p['w']"),
    ):
        text = error_text(mapped(step, donate=donated), state, x)
        assert text == f"step: {name} is donated twice\n  it is {other}, too\n  {fix}"
    assert error_text(mapped(step, donate=2), {"w": x}, x) == (
        "step: donate=2, and the call has 2 arguments\n  fix: count from 0"
    )
    assert x.shards


def test_plain_tensors_and_numbers_in_a_donated_argument_are_not_overwritten():
    x = torch.ones(4)
    mapped(lambda t: t["x"] + 1, ins=({"x": P("a"), "n": P()},), donate=0)({"x": x, "n": 3})
    assert x.tolist() == [1] * 4


# --- the mapped function -----------------------------------------------------------------------------------


def test_decorator_keeps_name_and_docstring():
    @fs.shard_map(mesh=TWO, in_specs=(P("a"),), out_specs=P())
    def total(x):
        """The sum."""
        return fs.psum(x.sum(), "a")

    assert total(torch.ones(4)).item() == 4
    assert (total.__name__, total.__doc__) == ("total", "The sum.")
    assert repr(total) == "shard_map(total, Mesh(a=2; simulated, 2 x cpu))"


def test_on_returns_the_same_function_on_another_mesh():
    f = mapped(lambda x: fs.psum(x.sum(), "a"), ins=P("a"), out=P(), donate=0)
    x = torch.arange(7.0)
    for n in (1, 2, 3, 8):
        g = f.on(fs.make_mesh(a=n))
        assert g(x).item() == 21
        assert g.mesh.size == n
        placed = put(x, P("a"), g.mesh)
        g(placed)
        assert "was donated" in error_text(lambda placed=placed: placed.shards)
    assert f.mesh == TWO
    assert f(x).item() == 21


def test_error_text_of_compiling_simulated_ranks():
    assert error_text(mapped, lambda x: x, compile=True) == (
        "shard_map: compile=True on Mesh(a=2; simulated, 2 x cpu)\n"
        "  simulated ranks are threads, and one compiler serves them all\n"
        "  fix: compile on a process mesh or on a mesh of one rank"
    )
    one = mapped(lambda x: x, mesh=fs.make_mesh(a=1), compile=True)
    assert error_text(one.on, TWO).startswith("shard_map: compile=True on Mesh(a=2;")


@pytest.mark.parametrize("mesh", [fs.make_mesh(a=1), TWO], ids=repr)
@pytest.mark.parametrize("error", [KeyError, RuntimeError, KeyboardInterrupt])
def test_exception_of_the_function_is_raised_unchanged(mesh, error):
    def culprit(x):
        raise error("cause")

    with pytest.raises(error, match="cause") as caught:
        mapped(culprit, mesh=mesh)(torch.ones(2))
    assert type(caught.value) is error
    assert caught.traceback[-1].name == "culprit"


def test_calls_with_other_shapes_specs_or_types_are_planned_again():
    f = mapped(lambda x, n=1: x * n)
    for n in (4, 6, 4, 5, 0):
        assert f(put(torch.ones(n))).shape == (n,)
    for spec in (P("a"), P(), P("a")):
        x = torch.arange(6.0).view(2, 3)
        out = mapped(lambda x: x, out=spec)(put(x, spec))
        assert torch.equal(fs.device_get(out), x)
    g = mapped(lambda x, n: x * n, out=P())
    for n, total in [(2, 2), (3.0, 3), (True, 1), (torch.tensor(5.0), 5), (put(7.0, P()), 7), (2, 2)]:
        assert fs.device_get(g(torch.ones(3), n)).tolist() == [total] * 3
    h = mapped(lambda x: x, ins=P("a"))
    for x in (torch.arange(6), torch.arange(4), torch.arange(4).view(2, 2), torch.arange(6).double()):
        assert torch.equal(fs.device_get(h(x)), x)
    k = mapped(lambda t: fs.tree.leaves(t)[0], ins=P("a"))
    for t in ({"x": torch.ones(4)}, [torch.ones(4)], torch.ones(4), {"y": torch.ones(4)}):
        assert k(t).shape == (4,)
    # a successful call does not make a later one valid
    pair = mapped(lambda t: t["x"], ins=({"x": P("a"), "y": P()},))
    assert pair({"x": torch.ones(2), "y": torch.ones(2)}).shape == (2,)
    assert "missing ['z']    extra ['y']" in error_text(pair, {"x": torch.ones(2), "z": torch.ones(2)})
    assert "is on another mesh" in error_text(f, put(torch.ones(4), P("a"), fs.make_mesh(a=4)))
    assert error_text(mapped(lambda x: x, ins=P("a")), put(torch.ones(4), P())).count("in_specs says P('a')") == 1


@pytest.mark.parametrize("mesh", [fs.make_mesh(data=1), fs.make_mesh(data=2)], ids=repr)
def test_only_the_last_used_signatures_are_kept_and_a_dropped_one_is_checked_again(mesh, monkeypatch):
    monkeypatch.setattr(sys.modules["fshard.shard_map"], "_MOST_PLANS", 3)
    rows_of_checks = []

    @fs.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def f(x):
        if checker() is not None and fs.axis_index("data") == 0:
            rows_of_checks.append(len(x) * mesh.size)
        return 2 * x

    for rows in (2, 4, 6, 2, 8, 2, 6, 4, 8, 4):  # 8 drops 4, which drops 8
        assert fs.device_get(f(torch.ones(rows))).tolist() == [2.0] * rows
        assert len(f._plans) <= 3
    assert rows_of_checks == ([] if mesh.size == 1 else [2, 4, 6, 8, 4, 8])
    for rows in range(2, 100, 2):
        f(torch.ones(rows))
    assert [plan.signature[0][0] for plan in f._plans] == [(98,), (96,), (94,)]


def test_uneven_parts_of_equal_shapes_are_planned_separately():
    """A gather exchanges sizes if the specs of its own call are uneven."""
    f = mapped(lambda x: fs.all_gather(x, "a", to="invariant"), mesh=TWO, ins=P("a"), out=P())
    for n in (4, 3, 4, 1, 5):
        x = torch.arange(float(n))
        assert torch.equal(fs.device_get(f(x)), x)


def test_training_step_is_the_same_on_every_mesh():
    def step(p, x):
        loss = lambda p: fs.pmean((torch.relu(x @ fs.pvary(p, "a")) ** 2).mean(), "a")  # noqa: E731
        value, grad = fs.value_and_grad(loss)(p)
        return p - 0.1 * grad, value

    p, x = torch.randn(5, 3, dtype=torch.float64), torch.randn(12, 5, dtype=torch.float64)
    results = []
    for n in (1, 2, 3, 4):
        f = mapped(step, mesh=fs.make_mesh(a=n), ins=(P(), P("a")), out=P())
        results.append(fs.device_get(f(p, x)))
    for out in results[1:]:
        torch.testing.assert_close(out, results[0])


def test_result_in_an_arguments_memory_with_another_storage_object_is_copied():
    one = fs.make_mesh(a=1)
    f = mapped(lambda x: torch.from_numpy(x.numpy()), mesh=one, ins=P(), out=P())
    x = fs.device_put(torch.ones(3), P(), one)
    y = f(x)
    assert y.shards[0].data_ptr() != x.shards[0].data_ptr()


def test_arguments_without_values_or_strides_are_refused():
    f = mapped(lambda x: x, mesh=TWO, ins=P(), out=P())
    with pytest.raises(ShardingError, match="is on the meta device, and has no values"):
        f(torch.ones(3, device="meta"))
    with pytest.raises(ShardingError, match="is not strided"):
        f(torch.eye(3).to_sparse())


# --- errors about shapes -----------------------------------------------------------------------------------

GRID = fs.make_mesh(data=2, model=2)
PARAMS = {"up": torch.ones(6, 8), "down": torch.ones(8, 6), "b": torch.ones(8)}
PARAM_SPECS = {"up": fs.column("model"), "down": fs.row("model"), "b": P()}


def raised(f, *args, specs=(PARAM_SPECS, P("data"))):  # noqa: B008
    """Return the error of a call, and the notes that are shown after it, without the rank."""
    with pytest.raises(Exception) as e:  # noqa: PT011
        fs.shard_map(f, mesh=GRID, in_specs=specs, out_specs=P(), check="never")(*args)
    return e.value, [note for note in getattr(e.value, "__notes__", []) if note != "on rank 0: data=0, model=0"]


def test_error_about_shapes_shows_the_arguments_of_a_rank():
    def step(p, x):
        h = x @ p["up"]
        return h + p["b"]

    error, notes = raised(step, PARAMS, torch.ones(3, 6))
    assert type(error) is RuntimeError
    assert str(error).startswith("The size of tensor a (4) must match the size of tensor b (8)")
    line = step.__code__.co_firstlineno + 2
    assert notes == [
        f"""test_shard_map.py:{line} in step:
    return h + p["b"]
           ~~~~~~~~~~
in step, each rank of Mesh(data=2, model=2; simulated, 4 x cpu) has a part of the arguments:
  p['down']  f32[8@model, 6]  here [4, 6]
  p['up']    f32[6, 8@model]  here [6, 4]
  x          f32[3@data, 6]   here [2, 6] or [1, 6]
  p['b']     f32[8]           here [8]""".replace("~", "^")
    ]


SHAPE_ERRORS = {
    "matmul": (lambda p, x: x @ p["down"], RuntimeError),
    "cat": (lambda p, x: torch.cat([x, p["b"][None]]), RuntimeError),
    "view of a part": (lambda p, x: p["up"].view(6, 8), RuntimeError),
    "view": (lambda p, x: x.view(-1, 5), RuntimeError),
    "index of a vector": (lambda p, x: p["b"][:, 5], IndexError),
    "index of a part": (lambda p, x: p["up"][:, 5], IndexError),
    "sum": (lambda p, x: x.sum(5), IndexError),
    "permute": (lambda p, x: x.permute(0), RuntimeError),
    "embedding": (lambda p, x: torch.nn.functional.embedding(torch.tensor([7]), p["down"]), IndexError),
    "einsum": (lambda p, x: torch.einsum("ij,jk->ik", x, p["down"]), RuntimeError),
    "grad": (lambda p, x: fs.grad(lambda p: (x @ p["down"]).sum())(p), RuntimeError),
    "vmap": (lambda p, x: torch.vmap(lambda row: row @ p["down"])(x), RuntimeError),
    "remat": (lambda p, x: fs.remat(lambda w: x @ w)(p["down"]), RuntimeError),
    "linear": (lambda p, x: fs.nn.linear(x, p["down"]), RuntimeError),
    "expand": (lambda p, x: torch.ones(2, 2).expand(8, 8) + p["up"], RuntimeError),
}


@pytest.mark.parametrize("name", SHAPE_ERRORS)
def test_every_error_about_shapes_has_the_arguments(name):
    f, kind = SHAPE_ERRORS[name]
    p = fs.tree.map(lambda w, s: fs.device_put(w, s, GRID), PARAMS, PARAM_SPECS)
    error, notes = raised(f, p, torch.ones(4, 6))
    note = notes[-1]  # after that of fs.nn.linear, which names its own arguments
    assert isinstance(error, kind)
    assert not isinstance(error, fs.ShardingError)
    assert note.startswith("test_shard_map.py:")
    assert "  p['down']  f32[8@model, 6]  here [4, 6]\n" in note + "\n"


def test_other_errors_are_not_explained():
    def fails(e):
        raise e

    for error in (ValueError("no such option"), KeyError("size"), fs.ShardingError("shape"), ZeroDivisionError()):
        assert raised(lambda p, x, e=error: fails(e), PARAMS, torch.ones(4, 6)) == (error, [])


def test_error_without_a_split_argument_is_that_of_the_function_alone():
    _, notes = raised(lambda p, x: x @ p["down"], PARAMS, torch.ones(4, 6), specs=P())
    assert notes == []


def test_many_arguments_are_shown_by_the_sizes_in_the_error():
    def add(xs):
        return xs[7] + xs[9]

    xs = [torch.ones(2 * i + 2) for i in range(12)]
    _, (note,) = raised(add, xs, specs=P("data"))
    assert note.splitlines()[4:] == [
        "  xs[7]  f32[16@data]  here [8]",
        "  xs[9]  f32[20@data]  here [10]",
        "  xs[0]  f32[2@data]   here [1]",
        "  xs[1]  f32[4@data]   here [2]",
        "  xs[2]  f32[6@data]   here [3]",
        "  xs[3]  f32[8@data]   here [4]",
        "  and 6 more",
    ]


def test_error_texts_of_arguments_that_are_missing_or_passed_by_name():
    def step(p, x):
        return x

    f = fs.shard_map(step, mesh=GRID, in_specs=(P(), P("data")), out_specs=P("data"))
    assert error_text(f, PARAMS) == (
        "step: missing a required argument: 'x'\n  1 argument was passed\n  fix: step(p, x)"
    )
    assert error_text(f, 1, 2, 3) == (
        "step: too many positional arguments\n  3 arguments were passed\n  fix: step(p, x)"
    )
    assert error_text(f, 1, x=2) == "step: x passed by name\n  fix: pass arguments by position, as in_specs"
