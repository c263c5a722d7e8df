"""Policies with float32 master parameters, and the loss scale against `torch.amp.GradScaler`."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError, checkpoint, optim
from tests.lib.assertions import assert_same, error_text
from tests.lib.compile_cases import by_aot_eager

# up [D, F@model], down [F@model, D]; `wide` the same over data too, uneven where 3 ranks share 10 or 4
SHAPES = {"up": fs.init.normal((6, 10)), "bias": fs.init.normal((10,)), "down": fs.init.normal((10, 4))}
SPECS = {"up": P(None, "model"), "bias": P("model"), "down": P("model")}
LAYOUTS = {
    "one device": ({}, False), "data=2": ({"data": 2}, False), "model=2": ({"model": 2}, False),
    "2x2": ({"data": 2, "model": 2}, False), "data=2 sharded": ({"data": 2}, True),
    "2x2 sharded": ({"data": 2, "model": 2}, True), "uneven": ({"data": 3, "model": 3}, False),
    "uneven sharded": ({"data": 3}, True),
    "2x2 zero": ({"data": 2, "model": 2}, "zero"), "uneven zero": ({"data": 3, "model": 3}, "zero"),
}  # fmt: skip
POWERS = {"initial": 2.0**14, "growth": 4.0, "backoff": 0.25, "interval": 2}


def whole(seed=0):
    g = torch.Generator().manual_seed(seed)
    params = fs.tree.map(lambda leaf: torch.randn(leaf.shape, generator=g) / 2, SHAPES)
    params["up"][5] = 0  # the last feature is 0 in good batches
    return params


def batches(n, bad=()):
    """Make n batches; the gradient of those in `bad` is not finite, in one row of `up` only or everywhere."""
    g = torch.Generator().manual_seed(1)
    out = []
    for i in range(n):
        x, y = torch.randn(8, 6, generator=g), torch.randn(8, 4, generator=g)
        x[:, 5] = 0
        if i in bad:
            x[3, 5 if i % 2 else 0] = 1e38 if i % 2 else torch.nan
        out.append((x, y))
    return out


def on_a_mesh(layout, policy, optimizer, data, *, scale=None, check=None, donate=True, steps=1,
              weight=1.0):  # fmt: skip
    """Train on batches: after each, (parameters, optimizer state, loss). Types are those of "2x2", however uneven."""
    check = check or ("first" if layout in ("2x2 sharded", "2x2 zero") else "never")
    axes, sharded = LAYOUTS[layout]
    mesh = fs.make_mesh(**{"data": 1, "model": 1, **axes})
    split = fs.fully_shard(SPECS, SHAPES, axis="data") if sharded else SPECS
    opt = optimizer(split) if scale is None else scale.guard(optimizer(split), split)
    zero = sharded == "zero"
    specs = SPECS if zero else split
    if zero:
        opt = optim.zero(opt, specs, split, axis="data")
    state = {"params": whole(), "opt": opt.init(SHAPES)}
    state_specs = {"params": specs, "opt": opt.specs(specs)}

    @fs.shard_map(mesh=mesh, in_specs=(state_specs, P("data"), P("data")), out_specs=(state_specs, P()), check=check,
                  donate=0 if donate else ())  # fmt: skip
    def step(state, x, y):
        def loss_fn(params, x, y):
            low = policy.to_compute(params)
            low = low if zero else fs.unshard(low, specs, "data", shapes=SHAPES)
            h = torch.relu(fs.pvary(policy.to_compute(x), "model") @ low["up"] + low["bias"])
            out = policy.to_output(fs.psum(h @ low["down"], "model"))
            loss = fs.psum((out - y).square().sum(), "data") / 32 * steps * weight
            return loss if scale is None else scale.scale(loss, state["opt"]["scale"])

        gradient = fs.accumulate(loss_fn, steps) if steps > 1 else fs.value_and_grad(loss_fn)
        loss, grads = gradient(fs.pvary(state["params"], "data") if zero else state["params"], x, y)
        params, new = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": new}, loss

    state = fs.materialize(state, state_specs, mesh, key=fs.key(0))
    rows = []
    for x, y in data:
        state, loss = step(state, x, y)
        rows.append(fs.device_get((state["params"], state["opt"], loss)))
    return rows


def by_torch(make, data, *, dtype=torch.float32, scaler=None, weight=1.0):
    """Train the same with torch.optim and GradScaler: after each batch, (parameters, scale, tracker, loss)."""
    params = {k: p.requires_grad_() for k, p in whole().items()}
    opt = make(list(params.values()))
    rows = []
    for x, y in data:
        low = {k: p.to(dtype) for k, p in params.items()}
        out = (torch.relu(x.to(dtype) @ low["up"] + low["bias"]) @ low["down"]).float()
        loss = (out - y).square().sum() / 32 * weight
        opt.zero_grad()
        (scaler.scale(loss) if scaler else loss).backward()
        scaler.step(opt) if scaler else opt.step()
        if scaler:
            scaler.update()
        scale = (scaler.get_scale(), scaler.state_dict()["_growth_tracker"]) if scaler else (1.0, 0)
        rows.append(({k: p.detach().clone() for k, p in params.items()}, *scale, loss.detach()))
    return rows


def grad_scaler(s):
    return torch.amp.GradScaler("cpu", init_scale=s.initial, growth_factor=s.growth, backoff_factor=s.backoff,
                                growth_interval=s.interval)  # fmt: skip


# --- policies -------------------------------------------------------------------------------------------------


def test_policy_casts_floating_leaves_only():
    policy = fs.Policy(compute=torch.bfloat16)
    tree = {"w": torch.ones(2), "i": torch.arange(2), "n": 3, "s": "x"}
    low = policy.to_compute(tree)
    assert (low["w"].dtype, low["i"].dtype, low["n"]) == (torch.bfloat16, torch.int64, 3)
    assert policy.to_output(low)["w"].dtype == policy.to_param(low)["w"].dtype == torch.float32


def test_dtypes_of_no_floats_are_refused():
    with pytest.raises(fs.ShardingError, match="Policy: reduce must be a floating-point dtype"):
        fs.Policy(reduce=torch.int64)


def test_policy_keeps_float32_gradients():
    policy, p = fs.Policy(compute=torch.bfloat16), whole()
    grads = fs.grad(lambda p: policy.to_output(policy.to_compute(p)["up"].sin()).square().mean())(p)
    assert all(g.dtype == torch.float32 for g in fs.tree.leaves(grads))


@pytest.mark.parametrize("layout", ["one device", "model=2", "2x2 sharded", "uneven sharded", "uneven zero"])
def test_bfloat16_computation_with_float32_masters_trains_as_on_one_device(layout):
    policy, data = fs.Policy(compute=torch.bfloat16), batches(4)
    got = on_a_mesh(layout, policy, lambda specs: optim.sgd(1e-3, momentum=0.9), data)
    want = by_torch(lambda ps: torch.optim.SGD(ps, 1e-3, momentum=0.9), data, dtype=torch.bfloat16)
    start = whole()
    for (params, state, loss), (right, _, _, right_loss) in zip(got, want, strict=True):
        torch.testing.assert_close(loss, right_loss, rtol=2**-6, atol=0.0)
        for k, p in params.items():
            assert p.dtype == state["m"][k].dtype == torch.float32
            # A gradient is a sum of bfloat16 products (eps 2^-8) whose parts ranks round before they add them: it may
            # differ by some eps of its leaf's largest entry. So may the sum of a few steps, and here it is that, which
            # is compared, and not the parameter: that hides a step of lr * g = 1e-3, less than its own bfloat16 eps.
            moved, right_moved = p - start[k], right[k] - start[k]
            assert (moved - right_moved).abs().max() <= 4 * 2**-8 * right_moved.abs().max()


def test_exact_bfloat16_sums_are_equal_on_every_mesh():
    """Small integers are not rounded, so that a leaf that is cast or summed in a wrong dtype has another value."""
    policy, x = fs.Policy(compute=torch.bfloat16), torch.randint(-3, 4, (8, 6)).float()
    specs = {"w": P("data")}
    for n in (1, 2, 3):

        @fs.shard_map(mesh=fs.make_mesh(data=n), in_specs=(specs, P("data")), out_specs=specs,
                      check="first" if n == 2 else "never")  # fmt: skip
        def step(p, x):
            def loss(p):
                w = fs.unshard(policy.to_compute(p), specs, "data", shapes={"w": torch.empty(6, 2)})["w"]
                return fs.psum(policy.to_output(policy.to_compute(x) @ w).sum(), "data")

            return optim.sgd(2.0**-12).update(fs.grad(loss)(p), {"count": torch.tensor(0)}, p)[0]

        got = fs.device_get(step({"w": torch.ones(6, 2)}, x))["w"]
        want = 1 - x.sum(0)[:, None].expand(6, 2) * 2.0**-12  # which bfloat16 would round to 1
        torch.testing.assert_close(got, want, rtol=0, atol=0)


# --- the loss scale, against GradScaler -------------------------------------------------------------------------

ENDINGS = [
    ("growth", POWERS, "......x..nn....i...."),
    ("not powers of two", {"initial": 3000.0, "growth": 1.7, "backoff": 0.3, "interval": 1}, "..x...n......xxi....."),
    ("default numbers", {}, ".x..n..i"),
    ("out of float32", {"initial": 2.0**124, "interval": 1}, "........x.."),
]


@pytest.mark.parametrize(("numbers", "steps"), [e[1:] for e in ENDINGS], ids=[e[0] for e in ENDINGS])
def test_scale_equals_that_of_grad_scaler(numbers, steps):
    scale = fs.LossScale(**numbers)
    state, scaler = scale.init(), grad_scaler(scale)
    assert state["scale"].dtype == torch.float32
    p = torch.nn.Parameter(torch.zeros(3))
    opt = torch.optim.SGD([p], 0.5)
    scaler.scale(p.sum())  # it makes its state now
    for kind in steps:
        g = torch.tensor([1.0, {".": 2.0, "x": torch.inf, "n": torch.nan, "i": -torch.inf}[kind], 3.0])
        before, p.grad = p.detach().clone(), g * float(state["scale"]) if scale.initial < 2.0**100 else g.clone()
        given = {"a": p.grad.clone()[:2], "b": [p.grad.clone()[2:]]}
        grads, finite = scale.unscale(given, state, P())
        scaler.unscale_(opt)
        assert (finite.dtype, finite.shape, bool(finite)) == (torch.bool, (), kind == ".")
        got = torch.cat([grads["a"], grads["b"][0]])
        if kind == ".":
            torch.testing.assert_close(got, p.grad, rtol=0, atol=0)
        scaler.step(opt)
        scaler.update()
        assert torch.equal(p, before) == (kind != ".") or scale.initial > 2.0**100  # where a step is 1e-37
        state = scale.adjust(state, finite)
        assert float(state["scale"]) == scaler.get_scale()
        assert int(state["good"]) == scaler.state_dict()["_growth_tracker"]


def test_scale_stays_above_its_floor():
    scale = fs.LossScale(initial=2.0, floor=0.75)
    state, seen = scale.init(), []
    for _ in range(4):
        state = scale.adjust(state, torch.tensor(False))
        seen.append(float(state["scale"]))
    assert seen == [1.0, 0.75, 0.75, 0.75]
    scale = fs.LossScale(initial=2.0**-125)
    state = scale.init()
    for _ in range(4):
        state = scale.adjust(state, torch.tensor(False))
    grads, finite = scale.unscale(torch.tensor([1e-3, 1.0]) * state["scale"], state, P())
    assert state["scale"] == torch.finfo(torch.float32).tiny
    assert bool(finite)
    torch.testing.assert_close(grads, torch.tensor([1e-3, 1.0]))


# --- the loss scale, on meshes ----------------------------------------------------------------------------------

OPTIMIZERS = {
    "adamw": (lambda specs: optim.adamw(0.05, weight_decay=0.1),
              lambda ps: torch.optim.AdamW(ps, 0.05, weight_decay=0.1, foreach=False)),
    "sgd": (lambda specs: optim.sgd(0.05, momentum=0.9), lambda ps: torch.optim.SGD(ps, 0.05, momentum=0.9)),
}  # fmt: skip
BAD = (0, 1, 4, 7)  # the first, two in a row, of each kind; 4 and 7 come after a growth


@pytest.mark.parametrize(("name", "layout"), [("adamw", "2x2 sharded"), ("sgd", "uneven zero")])
def test_all_ranks_skip_the_steps_that_grad_scaler_skips(name, layout):
    """In float32, so that all else is exact; a gradient overflows on the ranks with one row of `up`, or on all."""
    scale, data = fs.LossScale(**POWERS), batches(9, BAD)
    ours, theirs = OPTIMIZERS[name]
    got = on_a_mesh(layout, fs.Policy(), ours, data, scale=scale)
    want = by_torch(theirs, data, scaler=grad_scaler(scale))
    before = (whole(), None)
    for i, ((params, state, loss), (right, factor, tracker, right_loss)) in enumerate(zip(got, want, strict=True)):
        assert float(state["scale"]["scale"]) == factor
        assert int(state["scale"]["good"]) == tracker
        assert int(state["opt"]["count"]) == i + 1 - sum(b <= i for b in BAD)
        for k, p in params.items():
            torch.testing.assert_close(p, right[k], rtol=1e-5, atol=1e-6)
        if i in BAD:
            assert_same((params, state["opt"]), (before[0], before[1] or fs.tree.map(torch.zeros_like, state["opt"])))
        else:
            torch.testing.assert_close(loss / got[i - 1][1]["scale"]["scale"], right_loss, rtol=1e-5, atol=0.0)
        before = (params, state["opt"])


def test_a_finite_step_equals_the_optimizers_own():
    data, scale = batches(3), fs.LossScale(initial=2.0**10, interval=2)
    clipped = lambda specs: optim.chain(optim.clip_by_global_norm(0.5, specs), optim.adamw(0.05))  # noqa: E731
    for layout in ("2x2 sharded", "2x2 zero"):
        for donate in (True, False)[: 2 if layout == "2x2 zero" else 1]:
            rows = (on_a_mesh(layout, fs.Policy(), clipped, data, scale=s, donate=donate) for s in (scale, None))
            for (params, state, _), (right, right_state, _) in zip(*rows, strict=True):  # powers of two round nothing
                assert_same((params, state["opt"]), (right, right_state))


@pytest.mark.parametrize("layout", ["2x2 sharded", "2x2 zero"])
def test_one_bad_microbatch_skips_the_whole_step(layout):
    scale, data = fs.LossScale(**POWERS), batches(6, (1, 2))
    adamw = OPTIMIZERS["adamw"][0]
    got = on_a_mesh(layout, fs.Policy(), adamw, data, scale=scale, steps=2)
    for (params, state, _), (right, right_state, _) in zip(
        got, on_a_mesh("one device", fs.Policy(), adamw, data, scale=scale), strict=True
    ):
        assert state["scale"] == right_state["scale"]
        for k, p in params.items():
            torch.testing.assert_close(p, right[k], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", [pytest.param("2x2 sharded", marks=pytest.mark.slow), "uneven zero"])
def test_float16_trains_with_gradients_that_underflow_without_a_scale(layout):
    policy, weight = fs.Policy(compute=torch.float16), 2.0**-30
    sgd, data = (lambda specs: optim.sgd(2.0**23, momentum=0.9)), batches(12)
    lost = on_a_mesh(layout, policy, sgd, data[:1], weight=weight)[0][0]
    torch.testing.assert_close(lost["up"], whole()["up"], rtol=0, atol=0)
    got = on_a_mesh(layout, policy, sgd, data, scale=fs.LossScale(initial=2.0**48), weight=weight)
    taken = [bool(state["scale"]["good"]) for _, state, _ in got]
    assert not taken[0]  # the scale decreases until each rank's gradients fit into float16
    assert sum(taken) >= 6
    fit = [batch for batch, good in zip(data, taken, strict=True) if good]
    right = by_torch(lambda ps: torch.optim.SGD(ps, 2.0**23, momentum=0.9), fit, weight=weight)
    for (params, _, _), want in zip([row for row, good in zip(got, taken, strict=True) if good], right, strict=True):
        for k, p in params.items():
            # As for bfloat16 above, and here against float32, of which each product is rounded with an eps of 2^-11.
            moved, right_moved = p - whole()[k], want[0][k] - whole()[k]
            assert (moved - right_moved).abs().max() <= 8 * 2**-11 * right_moved.abs().max()


@pytest.mark.parametrize("leaf", ["both", "data", "model", "none", "empty", "complex"])
def test_one_element_on_one_rank_decides_for_all_ranks(leaf):
    specs = {"both": P("model", "data"), "data": P("data"), "model": P(None, "model"), "none": P(),
             "empty": P(("data", "model")), "complex": P("data")}  # fmt: skip
    g = torch.Generator().manual_seed(0)
    shapes = {"both": (3, 5), "data": (3,), "model": (2, 5), "none": (), "empty": (1, 3), "complex": (3, 2)}
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float32, torch.complex64]
    grads = {k: torch.randn(s, generator=g).to(d) for (k, s), d in zip(shapes.items(), dtypes, strict=True)}
    scale = fs.LossScale(initial=48.0)
    mesh = fs.make_mesh(data=2, model=2)
    shares = fs.shard_map(lambda g, state: (*scale.unscale(g, state, specs),), mesh=mesh, in_specs=(specs, P()),
                          out_specs=(specs, P()), check="values")  # fmt: skip
    new, finite = fs.device_get(shares(grads, scale.init()))
    assert bool(finite)
    for k, x in new.items():
        assert x.dtype == grads[k].dtype
        want = (grads[k].to(torch.complex128 if x.is_complex() else torch.float64) / 48).to(x.dtype)
        torch.testing.assert_close(x, want, **({"rtol": 1e-15, "atol": 0.0} if x.dtype == torch.float64 else {}))
    for at in range(0, grads[leaf].numel(), 2):  # one on each rank, and more
        worse = {**grads, leaf: grads[leaf].clone()}
        worse[leaf].view(-1)[at] = (torch.nan, -torch.inf)[at % 4 // 2]
        placed = fs.device_put(worse, specs, mesh)
        with fs.recording() as log:
            new, finite = shares(placed, scale.init())
        assert [bool(s) for s in finite.shards] == [False] * 4
        assert [t.bytes for t in log if t.op == "all_reduce"] == [4] * 4  # one number, on four ranks


def test_unscale_with_replicated_specs_needs_no_region():
    scale = fs.LossScale()
    grads, finite = scale.unscale({"a": torch.ones(3), "none": torch.ones(0)}, scale.init(), P())
    torch.testing.assert_close(grads["a"], torch.full((3,), 2.0**-16))
    assert bool(finite)
    assert bool(scale.unscale({}, scale.init(), P())[1])


def test_a_gradient_that_overflows_when_unscaled_is_not_finite():
    scale = fs.LossScale(initial=2.0**-4)
    grads, finite = scale.unscale(torch.tensor([6e4], dtype=torch.float16), scale.init(), P())
    assert grads.isinf().all()
    assert not finite


def test_frozen_leaves_may_be_infinite():
    scale, params = fs.LossScale(initial=4.0), whole()
    frozen = {"down": params["down"] * torch.inf}
    trained = {k: params[k] for k in ("up", "bias")}
    opt = scale.guard(optim.sgd(0.5), P())
    state = opt.init(trained)
    f = lambda t: scale.scale(t["up"].sum() + frozen["down"].isinf().sum() * t["bias"].sum(), state["scale"])  # noqa: E731
    new, _ = opt.update(fs.grad(f)(trained), state, trained)
    torch.testing.assert_close(new, {"up": params["up"] - 0.5, "bias": params["bias"] - 20})


# --- in a train state -------------------------------------------------------------------------------------------


def test_guarded_state_is_deferred_placed_saved_and_restored(tmp_path):
    scale = fs.LossScale(initial=2.0**9)
    opt = scale.guard(optim.adamw(1e-3), SPECS)
    like, specs = opt.init(SHAPES), opt.specs(SPECS)
    mesh = fs.make_mesh(model=2)
    assert isinstance(like["scale"]["scale"], fs.Deferred)
    placed = fs.materialize(like, specs, mesh, key=fs.key(0))
    assert fs.tree.map(float, fs.device_get(placed["scale"])) == {"scale": 2.0**9, "good": 0.0}
    params = fs.materialize(SHAPES, SPECS, mesh, key=fs.key(0))
    assert fs.tree.map(float, fs.device_get(opt.init(params)["scale"])) == {"scale": 2.0**9, "good": 0.0}
    moved = {**placed, "scale": fs.device_put({"scale": torch.tensor(3.0), "good": torch.tensor(7)}, P(), mesh)}
    checkpoint.save(tmp_path, moved, step=1)
    back = checkpoint.restore(tmp_path, like, specs=specs, mesh=fs.make_mesh(model=3), step=1)
    assert fs.tree.map(float, fs.device_get(back["scale"])) == {"scale": 3.0, "good": 7.0}


def test_the_first_call_is_type_checked_although_its_step_is_skipped():
    mesh = fs.make_mesh(data=2)

    def wrong(grads, state, params):  # a rank's index is added to an invariant parameter
        return params - grads * fs.axis_index("data").to(grads.dtype), state

    bad = optim.Optimizer(lambda params: (), wrong, lambda specs: (), "wrong")
    scale = fs.LossScale()
    opt = scale.guard(bad, P())
    step = fs.shard_map(opt.update, mesh=mesh, in_specs=(P(), P(), P()), out_specs=(P(), P()))
    params = torch.ones(3)
    with pytest.raises(ShardingError, match="would make 2 different values of it"):
        step(params * torch.inf, opt.init(params), params)


def test_guarded_step_runs_on_an_abstract_mesh():
    opt = fs.LossScale().guard(optim.adamw(1e-3), SPECS)
    step = fs.shard_map(opt.update, mesh=fs.make_mesh(kind="abstract", model=2), out_specs=(SPECS, opt.specs(SPECS)),
                        in_specs=(SPECS, opt.specs(SPECS), SPECS))  # fmt: skip
    params, _ = step(SHAPES, opt.init(SHAPES), SHAPES)
    assert params["up"].shape == (6, 10)


@pytest.mark.slow
def test_compiled_and_under_vmap_a_guarded_step_equals_the_eager_one():
    scale, params = fs.LossScale(**POWERS), whole()
    opt = scale.guard(optim.adamw(0.05), P())
    compiled = fs.shard_map(opt.update, mesh=fs.make_mesh(data=1), out_specs=P(), compile=True, donate=(1, 2))
    good, worse = (fs.tree.map(lambda p, f=f: p * f, params) for f in (100.0, torch.nan))
    mesh = fs.make_mesh(data=1)
    placed = fs.device_put((opt.init(params), params), P(), mesh)
    state = opt.init(params)
    for grads in (worse, good, good, worse, good):
        params, state = opt.update(grads, state, params)
        with by_aot_eager():
            new, new_state = compiled(fs.device_put(grads, P(), mesh), *placed)
        placed = new_state, new
        for a, b in zip(fs.tree.leaves(fs.device_get(placed)), fs.tree.leaves((state, params)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)  # inductor rounds multiply-add once
    both = fs.tree.map(lambda g, w: torch.stack([g, w]), good, worse)
    got = torch.func.vmap(opt.update, (0, None, None))(both, state, params)
    for i, grads in enumerate((good, worse)):
        want = opt.update(grads, state, params)
        for a, b in zip(fs.tree.leaves(got), fs.tree.leaves(want), strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-5, atol=1e-7)


def test_error_texts_of_numbers_out_of_range():
    assert error_text(fs.LossScale, initial=0.0, growth=1.0, backoff=1.5, interval=0, floor=0.0) == (
        "LossScale: growth=1.0, backoff=1.5, interval=0, floor=0.0\n"
        "  fix: growth > 1, 0 < backoff < 1, interval >= 1, 0 < floor <= initial, in float32"
    )
    opt = fs.LossScale().guard(optim.sgd(0.1), P())
    text = r"guarded sgd: the state is not its state\n  fix: state = opt.init\(params\)"
    with pytest.raises(ShardingError, match=text):
        opt.update(torch.ones(2), optim.sgd(0.1).init(torch.ones(2)), torch.ones(2))
    split = {"w": P("data")}
    for guarded in (opt, optim.zero(opt, P(), split, axis="data", summed=True)):
        assert error_text(optim.chain, optim.clip_by_global_norm(1.0, P()), guarded) == (
            f"chain: {guarded.name} takes scaled gradients, and clip_by_global_norm before it would read those\n"
            "  fix: inside of it: scale.guard(chain(...), specs)"
        )


def test_ranks_with_only_empty_parts_take_part_in_the_decision():
    mesh, scale, specs = fs.make_mesh(data=4), fs.LossScale(), {"w": P("data"), "b": P()}
    for value, finite in ((1.0, True), (float("inf"), False)):
        f = lambda g: scale.unscale(g, {"scale": torch.tensor(2.0)}, specs)  # noqa: E731
        step = fs.shard_map(f, mesh=mesh, in_specs=(specs,), out_specs=(specs, P()), check="always")
        g, good = step({"w": torch.full((6,), value), "b": torch.ones(2)})  # of w 2, 2, 2 and none
        assert fs.device_get(g["w"]).tolist() == [value / 2] * 6
        assert bool(good) == finite
