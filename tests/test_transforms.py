"""Gradients, accumulation, rematerialization and precision, against plain torch."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError


def mlp(p, x):
    return torch.tanh(x @ p["w"] + p["b"])


def data(seed=0):
    g = torch.Generator().manual_seed(seed)
    w, b, x = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((3, 3), (3,), (4, 3)))
    return {"w": w, "b": b}, x


def loss(p, x):
    return mlp(p, mlp(p, x)).square().mean()


def close(a, b):
    for x, y in zip(fs.tree.leaves(a), fs.tree.leaves(b), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def by_autograd(p, x):
    p = fs.tree.map(lambda t: t.clone().requires_grad_(), p)
    value = loss(p, x)
    value.backward()
    return value.detach(), fs.tree.map(lambda t: t.grad, p)


def test_value_and_grad_is_autograds():
    p, x = data()
    close(fs.value_and_grad(loss)(p, x), by_autograd(p, x))
    close(fs.grad(loss)(p, x), by_autograd(p, x)[1])


def test_argnums_and_aux():
    p, x = data()
    value, (gp, gx) = fs.value_and_grad(loss, (0, 1))(p, x)
    close(gx, torch.func.grad(loss, 1)(p, x))
    close((value, gp), by_autograd(p, x))
    close(fs.grad(loss, 1)(p, x), gx)

    def with_aux(p, x):
        return loss(p, x), {"h": mlp(p, x), "n": 3, "name": "aux", "none": None}

    (value, aux), grads = fs.value_and_grad(with_aux, has_aux=True)(p, x)
    close((value, grads), by_autograd(p, x))
    assert {k: aux[k] for k in ("n", "name", "none")} == {"n": 3, "name": "aux", "none": None}
    close(aux["h"], mlp(p, x))
    assert not aux["h"].requires_grad
    grads, aux = fs.grad(with_aux, has_aux=True)(p, x)
    close(grads, by_autograd(p, x)[1])


def test_second_derivatives():
    p, x = data()
    h = fs.grad(lambda x: fs.grad(loss, 1)(p, x).square().sum())(x)
    close(h, torch.func.grad(lambda x: torch.func.grad(loss, 1)(p, x).square().sum())(x))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: fs.value_and_grad(lambda x: x)(torch.ones(2)),
         ("value_and_grad(<lambda>): the loss must be one floating number, not float32[2]\n"
          "  fix: reduce it: loss.mean() or loss.sum()")),
        (lambda: fs.grad(lambda x: x.sum().long())(torch.ones(2)),
         ("value_and_grad(<lambda>): the loss must be one floating number, not int64[]\n"
          "  fix: reduce it: loss.mean() or loss.sum()")),
        (lambda: fs.grad(lambda x: (x.sum(), 1))(torch.ones(2)),
         "value_and_grad(<lambda>): the loss is a tuple, not a tensor\n  fix: return (loss, aux) with has_aux=True"),
        (lambda: fs.grad(lambda p: p["w"].sum())({"w": torch.ones(2), "i": [torch.arange(3)]}),
         ("value_and_grad(<lambda>): args[0]['i'][0] is int64, which has no gradient\n"
          "  fix: keep what is not trained in another argument")),
        (lambda: fs.grad(lambda x: x, 1)(torch.ones(2)),
         "value_and_grad(<lambda>): argnums=1, but there are 1 positional arguments"),
        (lambda: fs.grad(lambda x: torch.ones(()))({}),
         "value_and_grad(<lambda>): argument 0 has no leaves\n  fix: pass the parameters, or other argnums"),
        (lambda: fs.accumulate(loss, 3)(*data()),
         ("accumulate: args[1] does not cut into 3 equal microbatches\n  shape  [4, 3]\n  4 % 3 = 1\n"
          "  fix: another number of steps, or another batch size")),
        (lambda: fs.accumulate(loss, 0), "accumulate: steps=0\n  fix: one or more"),
    ],
)  # fmt: skip
def test_bad_input(call, text):
    with pytest.raises(ShardingError) as e:
        call()
    assert str(e.value) == text


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_accumulate_is_the_whole_batch(steps):
    p, x = data()
    close(fs.accumulate(loss, steps)(p, x), fs.value_and_grad(loss)(p, x))
    (value, aux), grads = fs.accumulate(lambda p, x: (loss(p, x), x.sum()), steps, has_aux=True)(p, x)
    close((value, grads), by_autograd(p, x))
    assert aux.shape == (steps,)
    torch.testing.assert_close(aux.sum(), x.sum())


def test_accumulate_with_one_reduction_on_a_mesh():
    p, x = data()
    mesh = fs.make_mesh(data=2)

    @fs.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    def step(p, x):
        p = fs.pvary(p, "data")
        value, grads = fs.accumulate(lambda p, x: fs.pmean(loss(p, x), "data"), 2)(p, x)
        return value, fs.psum(grads, "data")

    with fs.recording() as log:
        got = step(p, x)
    close(fs.device_get(got), by_autograd(p, x))
    assert sorted(t.bytes for t in log) == [8, 8, 8, 8, 96, 96]  # two losses, one gradient, on two ranks


# --- remat ----------------------------------------------------------------------------------------------------


def rematted(p, x):
    return fs.remat(mlp)(p, fs.remat(mlp)(p, x)).square().mean()


def test_remat_changes_nothing():
    p, x = data()
    close(fs.value_and_grad(rematted)(p, x), by_autograd(p, x))
    close(fs.grad(rematted, 1)(p, x), fs.grad(loss, 1)(p, x))


def test_remat_nested_and_recomputed():
    calls = []

    def counted(p, x):
        calls.append(1)
        return mlp(p, x)

    def outer(p, x):
        return fs.remat(counted)(p, fs.remat(counted)(p, x))

    p, x = data()
    close(fs.value_and_grad(lambda p: fs.remat(outer)(p, x).square().mean())(p), by_autograd(p, x))
    assert len(calls) == 2 + 2 + 2  # forward; the outer body again; each inner body again


def test_remat_under_vmap_jvp_and_twice():
    p, x = data()
    xs = torch.stack([x, x + 1, x * 2])
    close(torch.func.vmap(fs.grad(rematted), (None, 0))(p, xs), torch.func.vmap(fs.grad(loss), (None, 0))(p, xs))
    close(fs.grad(lambda p: torch.func.vmap(lambda x: rematted(p, x))(xs).sum())(p),
          fs.grad(lambda p: torch.func.vmap(lambda x: loss(p, x))(xs).sum())(p))  # fmt: skip
    close(torch.func.jvp(lambda x: rematted(p, x), (x,), (x,)), torch.func.jvp(lambda x: loss(p, x), (x,), (x,)))
    twice = lambda f: fs.grad(lambda x: fs.grad(f, 1)(p, x).square().sum())(x)  # noqa: E731
    close(twice(rematted), twice(loss))
    close(torch.func.jacrev(lambda x: fs.remat(mlp)(p, x))(x), torch.func.jacrev(lambda x: mlp(p, x))(x))


def test_remat_with_aux_outputs_integers_and_statics():
    def block(p, x, i, scale, *, flag):
        h = mlp(p, x) * scale
        return {"h": h, "i": i + 1, "top": h.argmax(-1), "flag": flag, "same": x}

    def f(p, x, wrap):
        out = wrap(block)(p, x, torch.tensor(2), 3.0, flag="on")
        assert (int(out["i"]), out["flag"], out["top"].dtype) == (3, "on", torch.int64)
        return (out["h"] + out["same"]).square().sum()

    p, x = data()
    for argnum in (0, 1):
        close(fs.value_and_grad(f, argnum)(p, x, fs.remat), fs.value_and_grad(f, argnum)(p, x, lambda g: g))


def test_remat_refuses_a_captured_parameter():
    p, x = data()

    def f(p):
        return fs.remat(lambda x: mlp(p, x))(x).sum()

    text = "captures 'p', which is being differentiated\n  its gradient would be lost"
    with pytest.raises(ShardingError, match=text):
        fs.grad(f)(p)


def test_remat_with_collectives_inside():
    p, x = data()
    want = by_autograd(p, x)
    mesh = fs.make_mesh(model=3)
    specs = {"w": P(None, "model"), "b": P("model")}

    def layer(p, x):
        return fs.all_gather(mlp(p, fs.pvary(x, "model")), "model", 1, to="invariant")

    for wrap in (fs.remat, lambda f: f):

        @fs.shard_map(mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs))
        def step(p, x, wrap=wrap):
            return fs.value_and_grad(lambda p: wrap(layer)(p, wrap(layer)(p, x)).square().mean())(p)

        close(fs.device_get(step(fs.device_put(p, specs, mesh), x)), want)


# --- precision ------------------------------------------------------------------------------------------------


def test_policy_casts_floating_leaves_only():
    policy = fs.Policy(compute=torch.bfloat16)
    tree = {"w": torch.ones(2), "i": torch.arange(2), "n": 3, "s": "x"}
    low = policy.to_compute(tree)
    assert (low["w"].dtype, low["i"].dtype, low["n"]) == (torch.bfloat16, torch.int64, 3)
    assert policy.to_output(low)["w"].dtype == policy.to_param(low)["w"].dtype == torch.float32


def test_policy_keeps_float32_gradients():
    p, x = data()
    p, x = fs.cast(p, torch.float32), x.float()
    policy = fs.Policy(compute=torch.bfloat16)
    grads = fs.grad(lambda p: policy.to_output(mlp(policy.to_compute(p), policy.to_compute(x))).square().mean())(p)
    assert all(g.dtype == torch.float32 for g in fs.tree.leaves(grads))


# --- compiled, on a mesh of one rank ----------------------------------------------------------------------------


def test_compiled_with_remat_and_aux():
    p, x = data()
    mesh = fs.make_mesh(data=1)

    def step(p, x):
        return fs.value_and_grad(lambda p: (rematted(p, x), {"x": x * 2}), has_aux=True)(p)

    got = fs.shard_map(step, mesh=mesh, out_specs=P(), compile=True)(p, x)
    (value, aux), grads = fs.device_get(got)
    close((value, grads), by_autograd(p, x))
    close(aux["x"], x * 2)


# --- frozen leaves --------------------------------------------------------------------------------------------

SPLIT = {"w": P("data"), "f": P("data"), "r": P(), "g": P()}  # sharded, sharded, replicated, replicated


def frozen_program(mesh, train, transform, remat=False):
    """loss(x, unsharded leaves), of which `transform` differentiates those in `train`."""

    @fs.shard_map(mesh=mesh, in_specs=(SPLIT, P("data")), out_specs=(P(), {k: SPLIT[k] for k in train}))
    def step(p, x):
        def hidden(p, x):
            full = fs.unshard(p, SPLIT, "data")
            return (x @ full["w"]).sin() @ full["f"] + (x @ full["r"]).sin() @ full["g"]

        def loss(trained):
            h = (fs.remat(hidden) if remat else hidden)({**p, **trained}, x)
            return fs.pmean(h.square().mean(), "data")

        return transform(loss)({k: p[k] for k in train})

    return step


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("train", [["w"], ["g"], ["w", "r"], ["f", "g"], ["f", "g", "r", "w"]])
def test_frozen_leaves_share_the_transfer_forward_and_have_none_backward(train, remat):
    mesh = fs.make_mesh(data=2)
    params = fs.materialize({k: fs.init.normal((4, 4)) for k in SPLIT}, SPLIT, mesh, key=fs.key(0))
    full, x = fs.device_get(params), torch.randn(6, 4, generator=torch.Generator().manual_seed(0))

    def dense(trained):
        p = {**full, **trained}
        return ((x @ p["w"]).sin() @ p["f"] + (x @ p["r"]).sin() @ p["g"]).square().mean()

    step = frozen_program(mesh, train, fs.value_and_grad, remat)
    step(params, x)
    with fs.recording() as log:
        loss, grads = fs.device_get(step(params, x))
    want, want_grads = torch.func.grad_and_value(dense)({k: full[k] for k in train})[::-1]
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(grads, want_grads)
    sharded, replicated = (sum(k in train for k in kind) for kind in (("w", "f"), ("r", "g")))
    moved = {(t.op, t.phase): t.bytes for t in log if t.bytes > 4}
    assert moved.pop(("all_gather", "forward")) == 2 * 8 * 4  # both parts at once, whoever trains
    expected = {("reduce_scatter", "backward"): sharded * 64, ("all_reduce", "backward"): replicated * 64}
    assert moved == {k: n for k, n in expected.items() if n}


def test_frozen_leaves_have_their_part_in_other_modes():
    """Rates of change and second derivatives go through what the inner gradient leaves alone."""
    mesh, one = fs.make_mesh(data=2), fs.make_mesh(data=1)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    described = {k: fs.init.normal((4, 4)) for k in SPLIT}

    def mixed(p, x):
        def loss(w, f):
            full = fs.unshard({**p, "w": w, "f": f}, SPLIT, "data")
            return fs.pmean((((x @ full["w"]).sin() @ full["f"]) * (x @ full["r"])).square().mean(), "data")

        def of_f(f):  # the gradient by w alone, where f varies around it
            return fs.psum(fs.grad(lambda w: loss(w, f))(p["w"]).square().sum(), "data")

        return fs.grad(of_f)(p["f"]), torch.func.jvp(lambda f: loss(p["w"], f), (p["f"],), (p["w"],))[1]

    got, want = (
        fs.device_get(fs.shard_map(mixed, mesh=m, in_specs=(SPLIT, P("data")), out_specs=(P("data"), P()))(
            fs.materialize(described, SPLIT, m, key=fs.key(0)), x)) for m in (mesh, one))  # fmt: skip
    torch.testing.assert_close(got, want)
