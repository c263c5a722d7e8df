"""`validate`: every leaf that is not initialized is named with its reason, and initialized trees pass."""

from __future__ import annotations

import itertools
import sys
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P, ShardingError
from fshard._core.compare.digest import digest
from fshard.law.validate import Validated, validate
from tests.lib.assertions import error_text
from tests.lib.operations import Operations
from tests.lib.processes import Pool

NAN, INF = float("nan"), float("inf")
MESHES = [{"one": 1}, {"data": 2}, {"data": 2, "model": 3}, {"a": 2, "b": 1, "c": 2}]


def described() -> Any:
    return {
        "h": [{"w": fs.init.normal((5, 7)), "b": fs.init.zeros(3)} for _ in range(2)],
        "ids": fs.init.arange(4),
        "empty": fs.init.ones((0, 3)),
        "t": fs.init.ones(()),
    }


def placed(axes: dict[str, int], kind: str = "simulated") -> Any:
    """Materialize `described()`, its matrices split over every axis, into uneven and empty parts of 5 and 7."""
    first, *rest = axes
    w = P(first, tuple(rest) or None)
    specs = {"h": [{"w": w, "b": P()}] * 2, "ids": P(first), "empty": P(), "t": P()}
    return fs.materialize(described(), specs, fs.make_mesh(kind=kind, **axes), key=fs.key(0))


def text(block: str) -> str:
    return dedent(block).strip("\n")


def digest_text(x: Tensor) -> str:
    """Return a digest as errors show it."""
    return f"{int(digest(x)[0]) & 0xFFFFFFFF:08x}"


# --- valid trees --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_materialized_tree_is_valid_on_every_mesh(axes):
    for like in (None, described()):
        got = validate(placed(axes), like)
        assert (got.leaves, got.finite, got.infinite) == (7, 7, ())
        assert got.nbytes == sum(x.nbytes for x in fs.tree.leaves(described()))
        several = [a for a, n in axes.items() if n > 1]
        assert set(got.axes) == set(several)
        # all leaves but the matrices have replicas over some axis; `ids` unless it is split over the only one
        assert got.replicated == (0 if not several else 4 if len(several) == 1 else 5)
        assert got.ties == (None if like is None else 0)


def test_repr_of_the_result():
    params = placed({"data": 2, "model": 3})
    params["mask"] = torch.tensor([0.0, -INF])
    assert repr(validate(params, allow_inf="mask")) == text("""
        valid: 8 leaves, 348 B
          finite        7, and infinities in mask
          replicated    5, equal over data, model
    """)
    del params["mask"]
    params["h"][1] = params["h"][0]
    like = described()
    like["h"][1] = like["h"][0]
    got = validate(params, like)
    assert repr(got) == text("""
        valid: 5 leaves, 188 B
          finite        5
          replicated    4, equal over data, model
          as described  5, with 2 ties
    """)
    assert isinstance(got, Validated)


def test_tensors_numbers_and_strings_are_leaves_and_an_empty_tree_has_none():
    state = {"step": 3, "lr": 0.1, "on": True, "name": "run", "key": fs.key(0), "w": torch.ones(2, dtype=torch.bool)}
    assert validate(state).leaves == 6
    assert validate({"a": 1, "b": 1}).leaves == 2  # one object in CPython, but not a tie
    assert validate({"a": None}).leaves == 0


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.uint16])
def test_integers_and_bools_are_finite(dtype):
    x = torch.empty(100, dtype=dtype)
    assert validate({"x": x, "y": fs.device_put(x, P(), fs.make_mesh(data=2))}).finite == 2


def test_leaf_cast_to_another_floating_dtype_is_as_described():
    like = described()
    specs, mesh = P(), fs.make_mesh(data=2)
    assert validate(fs.materialize(like, specs, mesh, key=fs.key(0), dtype=torch.bfloat16), like).ties == 0


# --- elements that were never written --------------------------------------------------------------------------


def test_nonfinite_elements_are_counted_once_and_the_first_is_named():
    params = placed({"data": 2, "model": 3})
    for rank in range(6):  # rows 0:3 and 3:5, columns 0:3, 3:6, 6:7
        box = params["h"][1]["w"].box(rank)
        for i, j in ((1, 6), (2, 0), (4, 3), (4, 4)):
            if i in range(box[0].start, box[0].stop) and j in range(box[1].start, box[1].stop):
                params["h"][1]["w"].shards[rank][i - box[0].start, j - box[1].start] = INF if i == 2 else NAN
        params["h"][0]["b"].shards[rank][1] = NAN  # the same elements on every replica
    assert error_text(validate, params) == text("""
        2 problems
        validate: tree['h'][0]['b'] is not finite in 1 of 3 elements
          leaf  f32[3]    mesh  data=2, model=3
          1 NaN, the first at [1], on rank 0, 1, 2, 3, 4, 5, as in memory that was never written
          fix: write every element in the constructor, or repair the file it was read from
        validate: tree['h'][1]['w'] is not finite in 4 of 35 elements
          leaf  f32[5@data, 7@model]    mesh  data=2, model=3
          3 NaN, the first at [1, 6], on rank 2, 4, as in memory that was never written
          1 infinite, the first at [2, 0], on rank 0
          fix: write every element in the constructor, or repair the file it was read from
               correct what made it; or, if infinities are meant here: allow_inf='h.*.w'
    """)
    assert "leaf  f32[3]    described as  zeros    mesh" in error_text(validate, params, described())


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64],
    ids=str,
)
def test_nan_is_found_in_every_floating_dtype(dtype):
    for at in itertools.product(range(2), range(3)):
        x = torch.ones(2, 3)
        x[at] = NAN
        assert f"1 NaN, the first at {list(at)}, as in" in error_text(validate, {"x": x.to(dtype)})
        assert f"1 NaN, the first at {[at[1], at[0]]}, as in" in error_text(validate, {"x": x.to(dtype).T})
    assert validate({"x": torch.ones(2, 3).to(dtype)}).finite == 1


def test_nan_and_infinity_are_found_in_both_parts_of_a_complex_number():
    assert "1 infinite, the first at [1]" in error_text(validate, torch.tensor([1, complex(0, INF)]))
    message = error_text(validate, torch.tensor([complex(INF, NAN), 1]))
    assert "1 NaN" in message
    assert "infinite" not in message


def test_large_leaves_are_read_in_chunks(monkeypatch):
    monkeypatch.setattr(sys.modules["fshard.law.validate"], "CHUNK", 8)
    for at in (0, 7, 8, 29):
        x = torch.zeros(5, 6)
        x.view(-1)[at] = x.view(-1)[29] = NAN
        n = 1 + (at != 29)
        assert f"{n} NaN, the first at {[at // 6, at % 6]}, as in" in error_text(validate, x)
        assert f"{n} NaN, the first at {min([at % 6, at // 6], [5, 4])}, as in" in error_text(validate, x.T)
    x = torch.zeros(100, 30)
    with Operations() as seen:
        validate({"x": x, "y": x.T})
    assert 0 < seen.largest <= 64


def test_infinities_are_allowed_by_glob_and_nan_is_not():
    mask = torch.full((3, 3), -INF).triu(1)
    tree = {"h": [{"mask": mask}, {"mask": mask.clone()}], "w": torch.ones(2)}
    assert "if infinities are meant here: allow_inf='h.*.mask'" in error_text(validate, tree)
    assert validate(tree, allow_inf="**.mask").infinite == ("h.0.mask", "h.1.mask")
    assert validate(tree, allow_inf=["h.0.*", "h.1.mask"]).finite == 1
    assert "tree['h'][0]" in error_text(validate, tree, allow_inf="h.1.mask")
    assert validate(mask, allow_inf="**").infinite == ("",)
    mask[2, 0] = NAN  # as if a constructor wrote half of it
    assert error_text(validate, tree, allow_inf="**.mask") == text("""
        validate: tree['h'][0]['mask'] is not finite in 1 of 9 elements
          leaf  f32[3, 3]
          1 NaN, the first at [2, 0], as in memory that was never written
          fix: write every element in the constructor, or repair the file it was read from
    """)
    assert error_text(validate, {"w": torch.ones(2)}, allow_inf=["**", "*.mask"]) == text("""
        validate: allow_inf='*.mask' matches no leaf
          fix: remove or correct it
    """)


def test_error_text_of_nonfinite_numbers():
    assert error_text(validate, {"lr": NAN, "x": -INF, "n": 10**400}) == text("""
        2 problems
        validate: tree['lr'] is nan
          fix: give it a finite value
        validate: tree['x'] is -inf
          fix: give it a finite value
    """)
    assert validate({"x": INF}, allow_inf="x").infinite == ("x",)


# --- leaves without values ----------------------------------------------------------------------------------


def test_error_texts_of_leaves_without_values():
    mesh = fs.make_mesh(data=2)
    gone = fs.device_put(torch.ones(3), P(), mesh)
    gone.donate_to("step")
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    abstract = fs.materialize(fs.init.ones(3), P(), fs.make_mesh(kind="abstract", data=4), key=fs.key(0))
    wrong = fs.Sharded((4,), P("data"), mesh, [torch.ones(2), torch.ones(3)])
    tree = [fs.init.ones(2), torch.empty(3, device="meta"), abstract, gone, freed, P(), wrong,
            torch.nn.UninitializedParameter(), fs.device_put(torch.ones(3), P(), mesh)]  # fmt: skip
    assert error_text(validate, tree) == text("""
        8 problems
        validate: tree[0] is only described
          leaf  f32[2] = ones
          fix: fs.materialize(tree, specs, mesh, key=key)
        validate: tree[1] is on the meta device: it has a shape and no values
          leaf  f32[3]
          fix: fs.materialize its description
        validate: tree[2] is on an abstract mesh, where leaves have no values
          leaf  f32[3]    mesh  data=4
          fix: fs.materialize its description on a mesh with ranks
        validate: tree[3]: f32[3] was donated to step, which may have overwritten it
          fix: use the value that call returned, or leave the argument out of donate=
        validate: tree[4] has no storage: something has freed it
          leaf  f32[4]
          fix: fs.materialize its description, or do not free its storage
        validate: tree[5] is a P, not a leaf
          fix: a Sharded, a tensor or a number
        validate: tree[6] is not placed by its spec
          leaf  f32[4@data]    mesh  data=2
          rank 1 has f32[3], and its part is f32[2]
          fix: make it with fs.materialize, fs.device_put or fs.from_callback
        validate: tree[7] is a lazy parameter: it has no shape yet
          fix: give its module all its sizes
    """)
    with torch._subclasses.FakeTensorMode():
        fake = torch.ones(2)
    assert "validate: tree is on the meta device" in error_text(validate, fake)


def test_sparse_tensor_is_an_error():
    message = error_text(validate, {"w": torch.eye(3).to_sparse()})
    assert message.startswith("validate: tree['w'] is torch.sparse_coo, and a leaf must be strided\n")


def test_calling_inside_shard_map_is_an_error():
    mesh = fs.make_mesh(data=2)

    def f(x: Tensor) -> Tensor:
        validate(x)
        return x

    with pytest.raises(ShardingError, match="called inside shard_map, where every leaf is a local part"):
        fs.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(torch.ones(2))


# --- as described -------------------------------------------------------------------------------------------


def test_error_texts_of_missing_extra_and_mismatched_leaves():
    params = placed({"data": 2})
    del params["t"]
    params["h"].append({"w": torch.ones(2)})
    params["ids"] = torch.ones(4)
    params["empty"] = torch.ones(3, 0)
    assert error_text(validate, params, described()) == text("""
        4 problems
        validate: tree['t'] is missing
          described  f32[] = ones
          fix: materialize the full tree
        validate: tree['h'][2]['w'] is not described
          fix: remove it, or describe it too
        validate: tree['empty'] is f32[3, 0], and is described as f32[0, 3]
          fix: materialize it from its description
        validate: tree['ids'] is f32[4], and is described as i64[4]
          fix: materialize it from its description
    """)


def test_error_texts_of_lost_and_new_ties():
    w, v = fs.init.ones((2, 2)), fs.init.ones((2, 2))
    like = {"a": w, "b": w, "c": v, "d": w}
    tied = fs.materialize(like, P(), fs.make_mesh(data=2), key=fs.key(0))
    assert validate(tied, like).ties == 2
    copies = {**tied, "d": fs.reshard({"d": tied["d"]}, P())["d"]}
    copies["d"] = fs.device_put(torch.ones(2, 2), P(), fs.make_mesh(data=2))
    assert error_text(validate, copies, like) == text("""
        validate: tree['d'] is another leaf than tree['a'], and is described as tied to it
          two leaves, even of equal values, are updated and saved separately
          fix: put one object at both paths: tree['d'] = tree['a']
    """)
    assert error_text(validate, {**tied, "c": tied["a"]}, like) == text("""
        validate: tree['c'] is one leaf with tree['a'], and is described as another
          an update of one of them changes both
          fix: place a copy of it
    """)
    plain = torch.ones(2, 2)
    assert validate(dict.fromkeys("ab", plain), {"a": w, "b": w}).ties == 1
    assert "is another leaf" in error_text(validate, {"a": plain, "b": plain.clone()}, {"a": w, "b": w})


# --- replicas -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 2, "model": 3}, {"a": 2, "b": 1, "c": 2}], ids=str)
def test_replica_that_differs_in_one_bit_is_named_on_every_mesh(axes):
    sound = placed(axes)
    for rank, (name, x) in itertools.product(
        range(fs.make_mesh(**axes).size), [("['h'][0]['b']", lambda p: p["h"][0]["b"]), ("['t']", lambda p: p["t"])]
    ):
        params = placed(axes)
        bits = x(params).shards[rank].view(-1).view(torch.int32)
        bits[-1] ^= 1 << 31 if name == "['h'][0]['b']" else 1  # 0.0 becomes -0.0, and 1 the next number
        message = error_text(validate, params)
        assert message.startswith(f"validate: tree{name} is not one value: it differs between ranks of "), message
        assert message.count("validate:") == 1
    assert validate(sound).leaves == 7


def test_error_text_shows_replicas_by_rank():
    params = placed({"data": 2, "model": 3})
    params["t"].shards[4].add_(0.5)
    params["ids"].shards[5].zero_()  # split over data, replicated over model
    zero, ids = digest_text(torch.zeros(2, dtype=torch.int64)), digest_text(torch.tensor([2, 3]))
    assert error_text(validate, params) == text(f"""
        2 problems
        validate: tree['ids'] is not one value: it differs between ranks of 'model'
          leaf  i64[4@data]    mesh  data=2, model=3
          model=0,1: digest {ids}    model=2: digest {zero}    (at data=1)
          fix: make it from one key or file on every rank, or name the axis in its spec
        validate: tree['t'] is not one value: it differs between ranks of 'data' and 'model'
          leaf  f32[]    mesh  data=2, model=3
          data=0: 1    data=1: 1.5    (at model=1)
          model=0,2: 1    model=1: 1.5    (at data=1)
          fix: make it from one key or file on every rank, or name the axis in its spec
    """)


# --- processes ----------------------------------------------------------------------------------------------


def on_ranks() -> list[str]:
    """Return the messages on one of two processes, for trees of which one process has wrong parts."""
    params = placed({"data": 2}, "process")
    mesh = params["t"].mesh
    (rank,) = mesh.ranks
    params["key"] = fs.key(0)
    messages = [repr(validate(params, {**described(), "key": fs.key(0)}))]
    if rank == 1:
        params["h"][0]["w"].shards[0][1, 2] = NAN  # global row 3 + 1
        params["h"][1]["b"].shards[0][0] = -0.0
        params["key"] = fs.key(1)
        params["ids"].donate_to("step")
    params["step"] = rank
    messages.append(error_text(validate, params))
    del params["step"]
    messages.append(error_text(validate, params))
    messages.append(error_text(validate, {"a": torch.ones(2)} if rank else {"a": torch.ones(2), "b": fs.init.ones(1)}))
    return messages


@pytest.mark.process
def test_every_process_raises_the_errors_of_all(ranks: Pool) -> None:
    first, second = ranks(2, on_ranks)
    assert first == second
    sound, number, differing, other_trees = first
    assert sound == text("""
        valid: 8 leaves, 356 B
          finite        8
          replicated    5, equal over data
          as described  8, with 0 ties
    """)
    assert number.splitlines()[-4:] == [
        "validate: tree['step'] is not the same on every rank", "  rank 0: 0", "  rank 1: 1",
        "  fix: make the same tree on every rank"]  # fmt: skip
    a, b, k0, k1 = map(digest_text, (torch.zeros(3), torch.tensor([-0.0, 0, 0]), fs.key(0), fs.key(1)))
    assert differing == text(f"""
        4 problems
        validate: tree['h'][0]['w'] is not finite in 1 of 35 elements
          leaf  f32[5@data, 7]    mesh  data=2
          1 NaN, the first at [4, 2], on rank 1, as in memory that was never written
          fix: write every element in the constructor, or repair the file it was read from
        validate: tree['h'][1]['b'] is not one value: it differs between ranks of 'data'
          leaf  f32[3]    mesh  data=2
          data=0: digest {a}    data=1: digest {b}
          fix: make it from one key or file on every rank, or name the axis in its spec
        validate: tree['ids']: i64[4@data] was donated to step, which may have overwritten it, on rank 1
          fix: use the value that call returned, or leave the argument out of donate=
        validate: tree['key'] is not one value: it differs between ranks of 'data'
          leaf  i64[2]    mesh  data=2
          data=0: digest {k0}    data=1: digest {k1}
          fix: make it from one key or file on every rank, or name the axis in its spec
    """)
    assert other_trees == text("""
        2 problems
        validate: tree['b'] is only described, on rank 0
          leaf  f32[1] = ones
          fix: fs.materialize(tree, specs, mesh, key=key)
        validate: tree['b'] is not the same on every rank
          rank 0: f32[1] = ones
          rank 1: nothing
          fix: make the same tree on every rank
    """)
