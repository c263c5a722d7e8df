"""Parts of chosen lengths, `P("stage", lengths=(7, 8, 8, 7))`: every layout has the values of one device."""

from __future__ import annotations

import functools
import itertools
import os
import random

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.interop import hf
from tests.lib.assertions import assert_same, error_text

MESH = {"stage": 4, "model": 2}


@functools.cache
def mesh(**axes):
    return fs.make_mesh(**(axes or MESH))


def some_lengths(n, seed):
    """Return four lengths that sum to n: the last seeds give one rank all."""
    if seed < 4:
        return tuple(n * (i == seed) for i in range(4))
    cuts = sorted(random.Random(seed).choices(range(n + 1), k=3))
    return tuple(b - a for a, b in itertools.pairwise([0, *cuts, n]))


def layouts(n, seed):
    """Return specs of an [n, 6] leaf, all with the same lengths of dim 0 over the stages."""
    ns = some_lengths(n, seed)
    return [P("stage", lengths=ns), P("stage", "model", lengths={"stage": ns}),
            P(("stage", "model"), lengths={"stage": ns}), P("stage", lengths=ns, memory="host")]  # fmt: skip


# --- placement ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_leaves_have_the_parts_of_their_lengths_and_the_values_of_one_device(seed):
    n = (6, 1, 9, 30)[seed % 4]
    described = {"w": fs.init.normal((n, 6), std=0.02)}
    want = fs.device_get(fs.materialize(described, P(), mesh(), key=fs.key(3)))["w"]
    for spec in layouts(n, seed):
        placed = fs.materialize(described, spec, mesh(), key=fs.key(3))["w"]
        rows = [sum(len(x) for x in placed.shards[2 * i : 2 * i + 2]) for i in range(4)]
        copies = 2 - (spec.entries[0] == ("stage", "model"))
        assert rows == [copies * length for length in some_lengths(n, seed)]
        assert_same(fs.device_get(placed), want)
        assert_same(fs.device_get(fs.device_put(want, spec, mesh())), want)


def test_lengths_on_an_axis_of_one_rank_are_the_undivided_leaf():
    spec = P("stage", None, "model", lengths={"stage": (3, 0, 1, 2)})
    x = torch.arange(24.0).view(6, 2, 2)
    small = mesh(stage=1, model=2)
    assert [tuple(part.shape) for part in fs.device_put(x, spec, small).shards] == [(6, 2, 1)] * 2
    assert_same(fs.device_get(fs.reshard(fs.device_put(x, spec, mesh()), spec, small)), x)


def test_error_texts_of_lengths_that_do_not_fit():
    spec = P("stage", lengths=(7, 8, 8, 7))
    facts = "  shape  [{}]    spec  P('stage', lengths=(7, 8, 8, 7))    mesh  {}\n"
    assert error_text(fs.device_put, torch.zeros(31), spec, mesh()) == (
        "device_put: tree: the lengths over 'stage' do not sum to dim 0\n"
        + facts.format(31, "stage=4, model=2")
        + "  7 + 8 + 8 + 7 = 30, and dim 0 has 31\n"
        "  fix: lengths that sum to 31"
    )
    assert error_text(fs.device_put, torch.zeros(30), spec, mesh(stage=2)) == (
        "device_put: tree: lengths of 4 parts, and axis 'stage' has 2 ranks\n"
        + facts.format(30, "stage=2")
        + "  fix: a length for each of the 2 ranks, or no lengths=, for equal parts"
    )
    assert "7 + 8 + 8 + 7 = 30" in error_text(fs.device_put, torch.zeros(31), spec, mesh(stage=1))


def test_pictures_and_tables_show_the_lengths():
    spec = P("stage", lengths=(3, 0, 4, 1))
    assert str(fs.show(spec, (8,), mesh={"stage": 4})).splitlines() == [
        "P('stage', lengths=(3, 0, 4, 1)): [8@stage(3+0+4+1)] on stage=4",
        "      0:3       3:7       7:8",
        "  ┌─────────┬─────────┬─────────┐",
        "  │  rank 0 │  rank 2 │  rank 3 │",
        "  │  0 1 2  │ 3 4 5 6 │    7    │",
        "  └─────────┴─────────┴─────────┘",
        "empty on 1",
        "dim 0 is split over stage",
    ]
    described = {"w": fs.init.zeros((8, 2))}
    shown = fs.show(described, specs=spec, mesh={"stage": 4})
    assert "f32[8@stage(3+0+4+1), 2]" in str(shown)
    assert shown.per_device == 4 * 2 * 4
    moved = str(fs.show(described, specs=spec, against=P("stage"), mesh={"stage": 4}))
    assert "exchange stage" in moved  # to ranks 1 and 3 go 2 rows and 1
    assert "moves  24 B" in moved
    assert "stays" in str(fs.show(described, specs=spec, against=spec, mesh={"stage": 4}))
    assert (
        "split over stage(3+0+4+1), then over model"
        in P(("stage", "model"), lengths={"stage": (3, 0, 4, 1)})._repr_html_()
    )


# --- programs ----------------------------------------------------------------------------------------------


def loss(params, x, specs, shapes):
    full = fs.unshard(params, specs, ("stage", "model"), shapes=shapes)
    return fs.psum((full["w"] * x).sum().square(), ("stage", "model"))


@pytest.mark.parametrize("seed", [0, 4, 5])
def test_unshard_gathers_chosen_parts_and_its_transpose_scatters_them(seed):
    x, w = torch.randn(2, 9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    want, grad = torch.func.grad_and_value(lambda w: 8 * (w * x).sum().square())(w)[::-1]
    for spec in layouts(9, seed)[seed % 3 : seed % 3 + 1]:
        for shapes in (None, {"w": fs.init.zeros((9, 6))}):
            f = functools.partial(loss, specs={"w": spec}, shapes=shapes)
            step = fs.shard_map(fs.value_and_grad(f), mesh=mesh(), in_specs=({"w": spec}, P()),
                                out_specs=(P(), {"w": spec}))  # fmt: skip
            value, grads = step({"w": w}, x)
            assert_same(fs.device_get(value), want, rtol=1e-12, atol=1e-12)
            assert grads["w"].spec == spec
            assert_same(fs.device_get(grads)["w"], grad, rtol=1e-12, atol=1e-12)
            described = {"w": fs.init.zeros((9, 6), dtype=torch.float64)}
            checked = fs.check(step, described, fs.init.zeros((9, 6), dtype=torch.float64))
            assert checked.result[1]["w"].shape == (9, 6)


def test_results_must_have_the_parts_of_their_lengths():
    spec = P("stage", lengths=(2, 1, 4, 1))
    right = fs.shard_map(lambda x: fs.pslice(x, "stage", lengths=(2, 1, 4, 1)), mesh=mesh(stage=4), out_specs=spec)
    assert_same(fs.device_get(right(torch.arange(8))), torch.arange(8))
    wrong = fs.shard_map(lambda x: fs.pslice(x, "stage"), mesh=mesh(stage=4), out_specs=spec)
    assert "the ranks hold [2, 2, 2, 2]\n  a dim of 8 splits into [2, 1, 4, 1]" in error_text(wrong, torch.arange(8))
    assert "rank 2 returned [2], its part is [4]" in error_text(fs.check, wrong, fs.init.zeros(8))
    even = fs.shard_map(lambda x: x, mesh=mesh(stage=4), in_specs=spec, out_specs=P("stage"))
    assert "P('stage', lengths=(2, 1, 4, 1))" in error_text(even, torch.arange(8))


@pytest.mark.parametrize(("lengths", "axis", "is_known"), [
    ((5, 0, 6, 1), "stage", False), ((5, 0, 6, 1), ("stage", "model"), True), ((12, 0, 0, 0), "stage", True),
    ((0, 0, 0, 12), ("stage", "model"), True),
])  # fmt: skip
def test_vocabulary_in_chosen_parts_has_the_loss_and_gradients_of_one_device(lengths, axis, is_known):
    spec = P(axis, lengths={"stage": lengths})
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))  # noqa: E731
    table, ids = make(12, 4), torch.arange(10).view(2, 5) % 12

    def f(table, ids, axis=axis, size=lengths if is_known else None):
        h = fs.nn.embedding(ids, table, axis=axis, size=size, padding_idx=3, out="whole")
        logits = fs.pvary(h, axis) @ table.T
        loss = fs.nn.cross_entropy(logits, ids.roll(1, 1), axis=axis, size=size, label_smoothing=0.1)
        return loss, fs.nn.accuracy(logits, ids, axis=axis, size=size)

    grad, (want, right) = torch.func.grad_and_value(lambda t: f(t, ids, None, 12), has_aux=True)(table)
    step = fs.shard_map(fs.value_and_grad(f, has_aux=True), mesh=mesh(), in_specs=(spec, P()),
                        out_specs=((P(), P()), spec))  # fmt: skip
    (value, hits), grads = step(table, ids)
    assert_same(fs.device_get(hits), right)
    assert_same(fs.device_get(value), want, rtol=1e-12, atol=1e-12)
    assert_same(fs.device_get(grads), grad, rtol=1e-12, atol=1e-12)
    fs.verify(step, table, ids)


# --- optimizers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["clipped adamw", "adafactor", "muon", "zero"])
def test_optimizers_step_chosen_parts_as_one_device_does(kind):
    described = {"w": fs.init.normal((8, 6), std=0.3), "v": fs.init.normal((16, 4), std=0.3)}
    specs = {"w": P(None, "stage", lengths=(3, 0, 2, 1)), "v": P(("stage", "model"), lengths={"stage": (0, 16, 0, 0)})}

    def run(mesh):
        opt = {
            "clipped adamw": lambda: fs.optim.chain(fs.optim.clip_by_global_norm(0.1, specs), fs.optim.adamw(0.1)),
            "adafactor": lambda: fs.optim.adafactor(0.1, specs=specs),
            "muon": lambda: fs.optim.muon(0.1, specs=specs),
            "zero": lambda: fs.optim.zero(fs.optim.adamw(0.1), P(), specs, axis=("stage", "model"), summed=True),
        }[kind]()
        mine = P() if kind == "zero" else specs
        params = fs.materialize(described, mine, mesh, key=fs.key(1))
        state_specs = opt.specs(mine)
        init = fs.shard_map(opt.init, mesh=mesh, in_specs=(mine,), out_specs=state_specs)
        step = fs.shard_map(opt.update, mesh=mesh, in_specs=(mine, state_specs, mine), out_specs=(mine, state_specs))
        state = init(params)
        for i in range(2):
            params, state = step(fs.materialize(described, mine, mesh, key=fs.key(5 + i)), state, params)
        return fs.device_get((params, state))

    assert_same(run(mesh()), run(mesh(stage=1, model=1)), rtol=2e-6, atol=1e-7)


# --- files -------------------------------------------------------------------------------------------------

FILES = {"wte": P(("stage", "model"), lengths={"stage": (0, 0, 0, 17)}),
         "h": P(None, "stage", lengths=(5, 1, 0, 2)), "b": P("stage", lengths=(0, 0, 4, 0))}  # fmt: skip


def saved_leaves():
    return {"wte": fs.init.normal((17, 4)), "h": fs.init.normal((3, 8)), "b": fs.init.normal((4,))}


def test_checkpoint_of_chosen_parts_restores_under_any_other_parts_bit_for_bit(tmp_path):
    even = {"wte": P("data"), "h": P("data", "stage"), "b": P()}
    other = {"wte": P("stage", lengths=(1, 2, 3, 11)), "h": P("stage", lengths=(3, 0, 0, 0)), "b": P("stage")}
    places = [(FILES, mesh()), (even, mesh(data=3, stage=2)), (other, mesh(stage=4)), (P(), mesh(stage=1))]
    for (specs, here), (new, there) in itertools.pairwise([*places, places[0]]):
        placed = fs.materialize(saved_leaves(), specs, here, key=fs.key(2))
        fs.checkpoint.save(tmp_path / "c", placed, overwrite=True)
        got = fs.checkpoint.restore(tmp_path / "c", saved_leaves(), specs=new, mesh=there)
        want = fs.materialize(saved_leaves(), new, there, key=fs.key(2))
        for x, y in zip(fs.tree.leaves(got), fs.tree.leaves(want), strict=True):
            assert x.spec == y.spec
            assert_same(list(x.shards), list(y.shards))


def test_folder_is_read_into_chosen_parts_and_written_back(tmp_path, monkeypatch):
    names = lambda path: hf.FileTensor(path[0])  # noqa: E731
    want = fs.materialize(saved_leaves(), P(), mesh(stage=1), key=fs.key(2))
    hf.write(tmp_path / "a", want, names, config={})
    reads = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: reads.append(preadv(*args)) or reads[-1])
    stored = hf.read(tmp_path / "a", saved_leaves(), names)
    reads.clear()
    placed = fs.materialize(stored, FILES, mesh(), key=fs.key(0))
    assert sum(reads) == sum(x.nbytes for x in placed.values())  # each element by one rank: replicas are copies
    assert_same(fs.device_get(placed), fs.device_get(want))
    hf.write(tmp_path / "b", placed, names, config={})
    file = "model.safetensors"
    assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


# --- batches -----------------------------------------------------------------------------------------------


def test_a_batch_is_loaded_in_chosen_parts():
    rows, spec = torch.arange(24.0).view(12, 2), P("stage", lengths=(3, 0, 2, 1))
    indices = fs.data.indices(fs.key(0), step=0, size=12, batch=6)
    batch = fs.data.load(lambda i: {"x": rows[i]}, indices, mesh=mesh(stage=4), spec=spec)
    assert [len(x) for x in batch["x"].shards] == [3, 0, 2, 1]
    assert_same(fs.device_get(batch["x"]), rows[indices])
    sampler = fs.data.sampler(fs.key(0), 12, 6, mesh(stage=4), axis="stage", epoch=0)
    loader = torch.utils.data.DataLoader(rows, batch_sampler=sampler)
    assert "splits dim 0 by other axes than the sampler" in error_text(fs.data.batches, loader, spec=spec)


def test_zero_refuses_other_lengths_of_a_leaf():
    specs, split = P("stage", lengths=(3, 0, 2, 1)), P("stage", "model")
    opt = fs.optim.zero(fs.optim.adamw(0.1), specs, split, axis="model")
    init = fs.shard_map(opt.init, mesh=mesh(), in_specs=(specs,), out_specs=opt.specs(specs))
    assert "the state's part is not a part of the leaf's own" in error_text(init, torch.zeros(6, 4))


# --- blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [True, False, "model"])
def test_scan_gathers_blocks_from_chosen_parts(release):
    described = {"w": fs.init.normal((3, 8, 8), std=0.3), "b": fs.init.normal((3, 8), std=0.3)}
    specs = {"w": P(None, ("stage", "model"), lengths={"stage": (4, 0, 3, 1)}),
             "b": P(None, "stage", lengths=(0, 0, 8, 0))}  # fmt: skip

    def loss(p, x):
        y = fs.scan(lambda p, x: torch.tanh(x @ p["w"] + p["b"]), p, fs.pvary(x, "model"), specs=specs,
                    axis=("stage", "model"), release=release)  # fmt: skip
        return fs.pmean(y.square().mean(), ("stage", "model"))

    step = fs.shard_map(fs.value_and_grad(loss), mesh=mesh(), in_specs=(specs, P("stage")), out_specs=(P(), specs))
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    params = fs.materialize(described, specs, mesh(), key=fs.key(0))
    assert fs.verify(step, params, x, meshes=[{"stage": 1, "model": 1}]).error < 1e-6
