"""Fifteen properties that TorchShard 0.1.0 lacks: for each of its bugs a test that passes here, or one named below.

Each test compares with one device and plain torch. Where the mistake behind the bug is a line of a program, the test
writes that line too and asserts that fshard refuses it, or that it has another number. The classifier is a layer of
features `up` [D, F] and a head of C classes `fc` = {"w": [C, F], "b": [C]}, which no mesh here divides evenly.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import fshard as fs
from fshard import P, ShardingError, nn
from tests.lib.assertions import assert_same
from tests.lib.operations import Operations

B, D, H, C = 8, 4, 6, 7
MESHES = [{"data": 1, "model": 1}, {"data": 1, "model": 3}, {"data": 2, "model": 2}]
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_params():
    return {"up": rand(D, H), "fc": {"w": rand(C, H, seed=1), "b": rand(C, seed=2)}}


def batch(step=0):
    targets = torch.randint(0, C, (B,), generator=torch.Generator().manual_seed(step))
    return rand(B, D, seed=10 + step), targets


def dense_loss(p, x, targets):
    return F.cross_entropy(torch.tanh(x @ p["up"]) @ p["fc"]["w"].T + p["fc"]["b"], targets)


def dense_grads(p, x, targets):
    return torch.func.grad(dense_loss)(p, x, targets)


SPECS = {"up": P(), "fc": P("model")}


def logits_of(p, x):
    """Return logits [B@data, C@model] of features that are the same on all ranks of the model axis."""
    return nn.linear(torch.tanh(x @ p["up"]), p["fc"]["w"].mT, p["fc"]["b"], axis="model")


def loss(p, x, targets):
    logits = logits_of(fs.pvary(p, "data"), x)
    return nn.cross_entropy(logits, targets, axis="model", size=C, over="data")


def on(sizes, f, args, in_specs, out_specs, check="first"):
    mesh = fs.make_mesh(**sizes)
    return fs.device_get(fs.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check)(*args))


IN = (SPECS, P("data"), P("data"))


# The other bugs, and the tests that find them in any form.
ELSEWHERE = {
    "2: ZeRO overwrote every shard with one rank's": "optim/test_zero.py::test_no_mesh_changes_a_step",
    "3: no mesh of data x model": "optim/test_formulas.py::test_no_mesh_changes_a_step",
    "5, 9: names of nested modules, and tables made parallel":
        "defer/test_replace.py::test_module_with_split_submodules_trains_as_the_dense_one",
    "6: found_inf was that of one rank": "optim/test_precision.py::test_one_element_on_one_rank_decides_for_all_ranks",
    "6: the norm of a clip was that of one rank": "optim/test_optim.py::test_no_mesh_changes_a_clipped_step",
    "8: one seed made all shards alike":
        "init/test_deferred.py::test_values_are_the_same_on_every_mesh_and_for_every_spec",
    "10: every rank resumed with the optimizer shard of rank 0":
        "checkpoint/test_checkpoint.py::test_train_state_with_scalars_restores_on_another_mesh",
    "11: the number of classes had to divide":
        "nn/test_nn.py::test_cross_entropy_of_an_uneven_vocabulary_of_50257",
    "12: the loss ignored weight and ignore_index":
        "nn/test_nn.py::test_cross_entropy_equals_that_of_torch_on_every_mesh",
    "13: torch.func could not differentiate it": "nn/test_nn.py::test_cross_entropy_under_transforms",
}  # fmt: skip


@pytest.mark.parametrize("bug", ELSEWHERE)
def test_test_of_a_bug_that_is_tested_elsewhere_exists(bug):
    file, _, name = ELSEWHERE[bug].partition("::")
    assert f"\ndef {name}(" in (Path(__file__).parent / file).read_text()


# --- 1: the backbone's gradients under DDP were W times too small -------------------------------------------


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_01_gradients_of_the_backbone_do_not_depend_on_the_number_of_ranks(sizes):
    """For a head over the model axis, and for TorchShard's flow: features and targets gathered, classes over all."""
    every = ("data", "model")

    def gathered(p, x, targets):
        features = torch.tanh(x @ fs.pvary(p["up"], "data"))
        features, targets = fs.all_gather((features, targets), "data", to="invariant")
        logits = nn.linear(features, p["fc"]["w"].mT, p["fc"]["b"], axis=every)
        return nn.cross_entropy(logits, targets, axis=every, size=C)

    want = dense_grads(make_params(), *batch())
    for f, specs in ((loss, SPECS), (gathered, {"up": P(), "fc": P(every)})):
        got = on(sizes, fs.grad(f), (make_params(), *batch()), (specs, P("data"), P("data")), specs)
        assert_same(got, want, **CLOSE)


def test_01_an_average_of_gradients_that_are_summed_already_is_refused():
    """As DDP takes it."""

    def averaged(p, x, targets):
        return fs.pmean(fs.grad(loss)(p, x, targets), "data")

    with pytest.raises(ShardingError, match="pmean"):
        on({"data": 4, "model": 1}, averaged, (make_params(), *batch()), IN, SPECS)


# --- 4: the biases of row layers drifted apart --------------------------------------------------------------

ROW = {"up": P("model"), "fc": P()}


def row_loss(p, x, targets):
    p = fs.pvary(p, "data")
    features = nn.linear(fs.pslice(x, "model", -1), p["up"], axis="model", split="row")
    w, b = fs.pslice(p["fc"]["w"], "model", 1), p["fc"]["b"]
    logits = nn.linear(fs.pslice(torch.tanh(features), "model", -1), w.mT, b, axis="model", split="row")
    return nn.cross_entropy(logits, targets, over="data")


@pytest.mark.parametrize("sizes", MESHES[1:], ids=str)
def test_04_the_bias_of_a_layer_split_by_rows_stays_one_value(sizes):
    @fs.shard_map(mesh=fs.make_mesh(**sizes), in_specs=(ROW, P("data"), P("data")), out_specs=ROW)
    def step(p, x, targets):
        return fs.tree.map(lambda w, g: w - 0.1 * g, p, fs.grad(row_loss)(p, x, targets))

    p, want = fs.device_put(make_params(), ROW, step.mesh), make_params()
    for i in range(3):
        p = step(p, *batch(i))
        want = fs.tree.map(lambda w, g: w - 0.1 * g, want, dense_grads(want, *batch(i)))
    assert_same(fs.device_get(p), want, **CLOSE)
    first, *others = p["fc"]["b"].shards
    assert others
    assert all(torch.equal(x, first) for x in others)


def test_04_a_bias_that_each_rank_adds_to_its_part_is_refused():
    def wrong(p, x, targets):
        p = fs.pvary(p, "data")
        w, b = fs.pslice(p["fc"]["w"], "model", 1), p["fc"]["b"]
        logits = fs.psum(fs.pslice(torch.tanh(x @ p["up"]), "model", -1) @ w.mT + b, "model")
        return nn.cross_entropy(logits, targets, over="data")

    with pytest.raises(ShardingError, match="add of an operand that is invariant"):
        on({"data": 1, "model": 2}, fs.grad(wrong), (make_params(), *batch()), (P(), P("data"), P("data")), P())


# --- 7: placement was lost by view and reshape --------------------------------------------------------------


def test_07_views_of_split_logits_have_the_loss_of_all_classes():
    def viewed(p, x, targets):
        logits = logits_of(fs.pvary(p, "data"), x)
        logits = logits.view(2, -1, logits.shape[-1]).transpose(0, 1).reshape(-1, logits.shape[-1]).clone()
        targets = targets.view(2, -1).T.reshape(-1)
        return nn.cross_entropy(logits, targets, axis="model", size=C, over="data")

    for sizes in MESHES:
        got = on(sizes, fs.value_and_grad(viewed), (make_params(), *batch()), IN, (P(), SPECS))
        assert_same(got[0], dense_loss(make_params(), *batch()), **CLOSE)
        assert_same(got[1], dense_grads(make_params(), *batch()), **CLOSE)


def test_07_the_loss_of_one_shard_is_refused():
    """Without axis= the loss is that of the classes of each rank: it varies, and is no loss of the whole."""

    def local(p, x, targets):
        return nn.cross_entropy(logits_of(fs.pvary(p, "data"), x), targets % 3, over="data")

    with pytest.raises(ShardingError, match="varies over 'model'"):
        on({"data": 1, "model": 2}, fs.grad(local), (make_params(), *batch()), IN, SPECS)


# --- 14: a checkpoint gathered everything onto every rank ---------------------------------------------------


def test_14_a_checkpoint_is_written_and_read_by_parts(tmp_path):
    """No transfer between ranks, and no tensor of more than the largest part."""
    params = {f"w{i}": rand(12, 500, seed=i) for i in range(4)}
    mesh, other = fs.make_mesh(model=4), fs.make_mesh(model=6)
    placed = fs.device_put(params, P("model"), mesh)
    with fs.recording() as log, Operations() as seen:
        fs.checkpoint.save(tmp_path / "c", placed)
    assert not log
    assert seen.largest <= 3 * 500 * 8
    described = fs.tree.map(lambda x: fs.init.zeros(x.shape, dtype=x.dtype), params)
    with fs.recording() as log, Operations() as seen:
        got = fs.checkpoint.restore(tmp_path / "c", described, specs=P("model"), mesh=other)
    assert not log
    assert 0 < seen.largest <= 3 * 500 * 8
    assert_same(got, params)


# --- 15: the backward pass of gather was a slice ------------------------------------------------------------


def test_15_the_gradient_of_a_gather_is_summed_over_ranks_that_use_it_differently():
    x, weights = rand(6, 3), rand(4, 6, 3, seed=1)

    def f(x, weights):
        whole = fs.all_gather(x, "m", size=6)
        return fs.psum((whole * weights[0] * (fs.axis_index("m") + 1)).square().sum(), "m")

    got = on({"m": 4}, fs.value_and_grad(f, (0, 1)), (x, weights), (P("m"), P("m")), (P(), (P("m"), P("m"))))
    dense = lambda x, w: (x * w * torch.arange(1, 5).view(4, 1, 1)).square().sum()  # noqa: E731
    (dx, dw), value = torch.func.grad_and_value(dense, (0, 1))(x, weights)
    assert_same(got, (value, (dx, dw)), **CLOSE)
    own_slice = torch.func.grad(lambda x: (x * weights[:1]).square().sum())(x)  # the bug: rank 0's use alone
    assert not torch.allclose(own_slice, dx)
