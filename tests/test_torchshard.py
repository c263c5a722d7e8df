"""Fifteen properties that TorchShard 0.1.0 lacks: for each of its bugs a test that passes here.

Each test compares with one device and plain torch. Where the mistake behind the bug is a line of a program, the test
writes that line too and asserts that fshard refuses it, or that it has another number. The classifier is a layer of
features `up` [D, F] and a head of C classes `fc` = {"w": [C, F], "b": [C]}, which no mesh here divides evenly.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import fshard as fs
from fshard import P, ShardingError, nn, optim
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


def dense_steps(steps, optimizer, **options):
    """Parameters, and both moments of Adam, after steps of an optimizer of torch."""
    p = fs.tree.map(lambda x: x.clone().requires_grad_(), make_params())
    opt = optimizer(fs.tree.leaves(p), **options)
    for i in range(steps):
        opt.zero_grad()
        dense_loss(p, *batch(i)).backward()
        opt.step()
    moments = [fs.tree.map(lambda x, name=name: opt.state[x].get(name), p) for name in ("exp_avg", "exp_avg_sq")]
    return fs.tree.map(torch.Tensor.detach, p), *moments


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


def trained(sizes, opt, state_specs, steps=3, start=None, first=0, loss=loss, specs=SPECS):
    """Placed parameters and state after some steps, of `start`, or of new ones."""
    mesh = fs.make_mesh(**sizes)
    new = make_params(), opt.init(make_params())
    p, state = start or fs.device_put(new, (specs, state_specs), mesh)

    @fs.shard_map(mesh=mesh, in_specs=(specs, state_specs, P("data"), P("data")), out_specs=(specs, state_specs))
    def step(p, state, x, targets):
        return opt.update(fs.grad(loss)(p, x, targets), state, p)

    for i in range(first, first + steps):
        p, state = step(p, state, *batch(i))
    return p, state


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


# --- 2: ZeRO overwrote every shard with one rank's ----------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES[1:], ids=str)
def test_02_zero_keeps_the_shard_of_each_rank(sizes):
    described = fs.tree.map(lambda x: fs.init.zeros(x.shape, dtype=x.dtype), make_params())
    split = fs.fully_shard({"up": P(), "fc": {"w": P("model"), "b": P("model")}}, described, axis="data")
    opt = optim.zero(optim.adamw(0.1, weight_decay=0.1), SPECS, split, axis="data", summed=True)
    p, state = trained(sizes, opt, opt.specs(SPECS))
    want, m, _ = dense_steps(3, torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    assert_same(fs.device_get(p), want, **CLOSE)
    assert_same(fs.device_get(state["m"]), m, **CLOSE)


# --- 3: no mesh of data x model -----------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [{"data": 2, "model": 2}, {"model": 3, "data": 2}, {"data": 3, "model": 1}], ids=str)
def test_03_groups_of_model_ranks_train_on_parts_of_one_batch(sizes):
    opt = optim.sgd(0.1, momentum=0.9)
    p, _ = trained(sizes, opt, opt.specs(SPECS))
    assert_same(fs.device_get(p), dense_steps(3, torch.optim.SGD, lr=0.1, momentum=0.9)[0], **CLOSE)


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
    opt = optim.sgd(0.1, momentum=0.9)
    p, _ = trained(sizes, opt, opt.specs(ROW), loss=row_loss, specs=ROW)
    assert_same(fs.device_get(p), dense_steps(3, torch.optim.SGD, lr=0.1, momentum=0.9)[0], **CLOSE)
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


# --- 5 and 9: modules made parallel -------------------------------------------------------------------------


class Words(torch.nn.Module):
    """A table with a padding row, and a head two modules deep."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(C, H, padding_idx=2, dtype=torch.float64)
        self.net = torch.nn.ModuleDict({"head": torch.nn.Sequential(torch.nn.Linear(H, C, dtype=torch.float64))})

    def forward(self, ids):
        return self.net["head"](torch.tanh(self.table(ids)))


REPLACE = {
    "column": {"net.head.0": nn.column_linear("model"), "table": nn.row_embedding("model")},
    "row": {"net.head.0": nn.row_linear("model"), "table": nn.column_embedding("model")},
}


@pytest.mark.parametrize("sizes", MESHES[1:], ids=str)
@pytest.mark.parametrize("how", REPLACE)
def test_05_and_09_nested_layers_and_tables_made_parallel_train_as_the_dense_module(how, sizes):
    """Conversion keeps every value, padding has no gradient, and each rank's shard stays its own beside data ranks."""
    torch.manual_seed(0)
    module = Words()
    apply, _ = fs.defer(Words, replace=REPLACE[how])
    values = {name: x.detach().clone() for name, x in module.named_parameters()}
    specs = apply.specs["params"]
    assert {name for name, spec in specs.items() if not spec.axes} == ({"net.head.0.bias"} if how == "row" else set())
    opt, ids, targets = torch.optim.SGD(module.parameters(), lr=0.1), torch.tensor([0, 2, 6, 2, 5, 1, 3, 4]), batch()[1]
    steps, mesh = optim.sgd(0.1), fs.make_mesh(**sizes)
    placed = fs.device_put(values, specs, mesh)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=(specs, specs))
    def step(p, x, t):
        def f(p):
            return nn.cross_entropy(apply(fs.pvary(p, "data"), {}, x), t, over="data")

        grads = fs.grad(f)(p)
        return steps.update(grads, steps.init(p), p)[0], grads

    for _ in range(3):
        opt.zero_grad()
        F.cross_entropy(module(ids), targets).backward()
        placed, grads = step(placed, ids, targets)
        assert_same(grads, {name: x.grad for name, x in module.named_parameters()}, **CLOSE)
        assert not fs.device_get(grads)["table.weight"][2].any()
        opt.step()
        assert_same(placed, {name: x.detach() for name, x in module.named_parameters()}, **CLOSE)


def test_05_a_name_that_matches_no_module_is_an_error():
    with pytest.raises(ShardingError, match=r"head\.1"):
        fs.defer(Words, replace={"net.head.1": nn.column_linear("model")})


# --- 6: found_inf and the norm of a clip were those of one rank ---------------------------------------------


def test_06_all_ranks_skip_a_step_if_one_has_an_infinite_gradient():
    scale = fs.LossScale(initial=8.0)
    opt = scale.guard(optim.sgd(0.1, momentum=0.9), SPECS)
    p = make_params()
    grads = fs.tree.map(torch.ones_like, p)
    grads["fc"]["w"][-1, 0] = math.inf  # on the last of the model ranks
    specs = SPECS, opt.specs(SPECS)
    got, state = on({"data": 2, "model": 2}, opt.update, (grads, opt.init(p), p),
                    (SPECS, specs[1], SPECS), specs)  # fmt: skip
    assert_same(got, p)
    assert state["scale"]["scale"] == 4.0
    assert state["opt"]["count"] == 0


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_06_gradients_are_clipped_by_the_norm_of_all_shards(sizes):
    opt = optim.chain(optim.clip_by_global_norm(0.01, SPECS), optim.sgd(1.0))
    p, grads = make_params(), dense_grads(make_params(), *batch())
    got, _ = on(sizes, opt.update, (grads, opt.init(p), p),
                (SPECS, opt.specs(SPECS), SPECS), (SPECS, opt.specs(SPECS)))  # fmt: skip
    norm = math.sqrt(sum(float(g.square().sum()) for g in fs.tree.leaves(grads)))
    # torch divides by the norm plus 1e-6, as clip_grad_norm_ does.
    assert_same(got, fs.tree.map(lambda p, g: p - g * 0.01 / (norm + 1e-6), p, grads), rtol=1e-6, atol=1e-9)


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


# --- 8: one seed made all shards alike ----------------------------------------------------------------------


def test_08_shards_of_one_key_are_parts_of_one_table():
    table = {"w": fs.init.normal((C, H))}
    whole = fs.device_get(fs.materialize(table, P(), fs.make_mesh(model=1), key=fs.key(0)))["w"]
    for spec, n in ((P("model"), 2), (P("model"), 5), (P(None, "model"), 3)):
        placed = fs.materialize(table, spec, fs.make_mesh(model=n), key=fs.key(0))["w"]
        assert torch.equal(torch.cat(placed.shards, 1 if spec == P(None, "model") else 0), whole)
    assert len(set(whole.flatten().tolist())) == whole.numel()


# --- 10: every rank resumed with the optimizer shard of rank 0 ----------------------------------------------


@pytest.mark.parametrize("to", MESHES, ids=str)
def test_10_each_rank_resumes_with_its_part_of_the_optimizer_state(to, tmp_path):
    opt = optim.adamw(0.1, weight_decay=0.1)
    p, state = trained({"data": 1, "model": 4}, opt, opt.specs(SPECS), steps=2)
    fs.checkpoint.save(tmp_path / "c", {"params": p, "state": state})
    described = fs.tree.map(lambda x: fs.init.zeros(x.shape, dtype=x.dtype), make_params())
    like = {"params": described, "state": opt.init(described)}
    specs = {"params": SPECS, "state": opt.specs(SPECS)}
    got = fs.checkpoint.restore(tmp_path / "c", like, specs=specs, mesh=fs.make_mesh(**to))
    assert_same(got["state"], state)
    p, state = trained(to, opt, opt.specs(SPECS), steps=2, start=(got["params"], got["state"]), first=2)
    want, _, v = dense_steps(4, torch.optim.AdamW, lr=0.1, weight_decay=0.1)
    assert_same(fs.device_get(p), want, **CLOSE)
    assert_same(fs.device_get(state["v"]), v, **CLOSE)


# --- 11: the number of classes had to divide ----------------------------------------------------------------


def test_11_classes_need_not_divide_over_the_ranks():
    """85,742 classes over eight ranks, and three over five of which two have none: as they are, without padding."""
    for c, n in ((85_742, 8), (3, 5)):
        w, x, t = rand(c, 2), rand(4, 2, seed=1), torch.tensor([0, c - 1, c // 2, 1])
        f = lambda w, x, t, c=c: nn.cross_entropy(nn.linear(x, w.mT, axis="m"), t, axis="m", size=c)  # noqa: E731
        got = on({"m": n}, fs.value_and_grad(f, (0, 1)), (w, x, t), (P("m"), P(), P()), (P(), (P("m"), P())))
        want = torch.func.grad_and_value(lambda w, x: F.cross_entropy(x @ w.T, t), (0, 1))(w, x)  # noqa: B023
        assert_same(got, want[::-1], **CLOSE)


# --- 12: the loss ignored weight and ignore_index, and "none" had a dim too many ----------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_12_the_parallel_loss_has_every_option_of_torch(reduction):
    x, w, (_, targets) = rand(B, C, seed=3), rand(C, seed=4).abs(), batch()
    targets[[1, 4]] = -100
    for options in ({}, {"weight": w}, {"label_smoothing": 0.1}, {"weight": w, "label_smoothing": 0.1}):
        want = F.cross_entropy(x, targets, reduction=reduction, **options)

        def f(x, t, w, options=options):
            given = {"weight": w} if "weight" in options else {}
            return nn.cross_entropy(x, t, axis="model", size=C, reduction=reduction, **{**options, **given})

        got = on({"model": 4}, f, (x, targets, w), (P(None, "model"), P(), P("model")), P())
        assert_same(got, want, **CLOSE)


# --- 13: torch.func could not differentiate it --------------------------------------------------------------


def test_13_torch_func_differentiates_the_parallel_head():
    """grad, vmap of grad (one gradient for each example) and forward mode over reverse, equal to the dense ones."""

    def head(w, x, t, axis=None):
        logits = nn.linear(x, w.mT, axis=axis)
        return nn.cross_entropy(logits, t, axis=axis, size=C if axis else None)

    def run(w, x, t, axis=None):
        g = torch.func.grad(head)
        each = torch.func.vmap(lambda x, t: g(w, x[None], t[None], axis))(x, t)
        return g(w, x, t, axis), each, torch.func.jvp(lambda w: g(w, x, t, axis), (w,), (w,))[1]

    w, x, t = rand(C, H), rand(B, H, seed=1), batch()[1]
    spec = P("model")
    got = on(
        {"model": 3}, lambda *args: run(*args, "model"), (w, x, t), (spec, P(), P()), (spec, P(None, "model"), spec)
    )
    assert_same(got, run(w, x, t), **CLOSE)


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
