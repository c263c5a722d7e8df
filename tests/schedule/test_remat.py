"""Rematerialization: the values and gradients of the plain function, and the tensors that are saved and recomputed."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from tests.lib.compile_cases import by_aot_eager
from tests.test_grad import by_autograd, close, data, loss, mlp, saved_tensor_counts


def rematted(p, x):
    return fs.remat(mlp)(p, fs.remat(mlp)(p, x)).square().mean()


def test_remat_has_the_values_and_gradients_of_the_function():
    p, x = data()
    close(fs.value_and_grad(rematted)(p, x), by_autograd(p, x))
    close(fs.grad(rematted, 1)(p, x), fs.grad(loss, 1)(p, x))


def test_nested_remat_recomputes_each_body():
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


@pytest.mark.slow
def test_compiled_remat():
    p, x = data()
    with by_aot_eager():
        got = fs.shard_map(fs.value_and_grad(rematted), mesh=fs.make_mesh(data=1), out_specs=P(), compile=True)(p, x)
    close(fs.device_get(got), by_autograd(p, x))


# --- by plain autograd ---


def chain(p, x, wrap):
    for _ in range(10):
        x = wrap(lambda p, x: mlp(p, mlp(p, x)))(p, x)
    return x.square().mean()


def test_saved_tensors_are_those_of_one_block_at_a_time():
    p, x = data()
    want = by_autograd(p, x, lambda p, x: chain(p, x, lambda f: f))
    with saved_tensor_counts() as counts:
        close(fs.value_and_grad(lambda p: chain(p, x, lambda f: f))(p), want)
    assert max(counts) >= 60  # tanh's result and matmul's two arguments, twenty times
    with saved_tensor_counts() as counts:
        close(fs.value_and_grad(lambda p: chain(p, x, fs.remat))(p), want)
    # The arguments of the ten blocks, w, b and x, in a graph of one node each; the six of one block; those of the mean.
    assert max(counts) <= 3 * 10 + 6 + 1
    assert counts[-1] <= 3 + 3


def test_remat_is_twice_differentiable_by_torch_autograd():
    p, x = data()
    w, b, x = (t.clone().requires_grad_() for t in (p["w"], p["b"], x))
    f = lambda w, b, x: fs.remat(mlp)({"w": w, "b": b}, fs.remat(mlp)({"w": w, "b": b}, x))  # noqa: E731
    assert torch.autograd.gradcheck(f, (w, b, x))
    assert torch.autograd.gradgradcheck(f, (w, b, x))
    same = lambda w, b, x: mlp({"w": w, "b": b}, mlp({"w": w, "b": b}, x))  # noqa: E731
    rows = torch.eye(12, dtype=torch.float64).view(12, 4, 3)
    close(*(torch.autograd.grad(g(w, b, x), (w, b, x), rows, is_grads_batched=True) for g in (f, same)))


def test_frozen_arguments_stay_frozen_in_recomputation():
    p, x = data()
    seen = []

    def block(p, x, i):
        h = mlp(p, x)
        seen.append([t.requires_grad for t in (p["w"], p["b"], x, h)])
        return h, x, (h * 2).argmax(-1), i + 1, h.exp()  # the last and the integers are not used

    def f(w, wrap):
        h, same, top, i, _ = wrap(block)({"w": w, "b": p["b"]}, x, torch.tensor(2))
        assert (top.dtype, int(i)) == (torch.int64, 3)
        return (h * same).square().sum()

    close(fs.value_and_grad(lambda w: f(w, fs.remat))(p["w"]), fs.value_and_grad(lambda w: f(w, lambda g: g))(p["w"]))
    assert seen[1:] == [[True, False, False, True]] * 2  # recomputed; without remat


def test_unused_results_have_no_gradient():
    p, x = data()
    used = lambda p: (p["w"] * 2).sum() + 0 * fs.remat(lambda p, x: mlp(p, x).detach())(p, x).sum()  # noqa: E731
    close(fs.grad(used)(p), {"w": torch.full_like(p["w"], 2.0), "b": torch.zeros_like(p["b"])})


def test_unused_arguments_have_zero_gradient():
    p, x = data()
    for wrap in (fs.remat, lambda f: f):
        grads = fs.grad(lambda p, wrap=wrap: wrap(lambda p, x: x @ p["w"])(p, x).sum())(p)
        close(grads, {"w": x.sum(0)[:, None].expand(3, 3), "b": torch.zeros_like(p["b"])})


def test_captured_parameters_are_an_error_under_each_transform():
    p, x = data()
    text = "captures 'p', which is being differentiated\n  its gradient would be lost\n  fix: pass 'p' as an argument"
    f = lambda p: fs.remat(lambda x: mlp(p, x))(x).sum()  # noqa: E731
    leaves = {k: t.clone().requires_grad_() for k, t in p.items()}
    batched = {k: t.expand(2, *t.shape) for k, t in p.items()}
    for differentiate, at in ((fs.grad(f), p), (torch.func.grad(f), p), (f, leaves),
                              (torch.func.vmap(fs.grad(f)), batched)):  # fmt: skip
        with pytest.raises(ShardingError, match=text):
            differentiate(at)
    with torch.no_grad():
        close(f(leaves), f(p))  # nothing is differentiated


def test_inner_remat_that_captures_a_tensor_of_the_outer_body_is_an_error():
    p, x = data()

    def outer(p, x):
        h = mlp(p, x)
        return fs.remat(lambda x: x * h)(x)  # h requires a gradient in the recomputation

    with pytest.raises(ShardingError, match="captures 'h', which is being differentiated"):
        fs.grad(lambda p: fs.remat(outer)(p, x).sum())(p)


def test_gradient_of_a_remat_is_computed_twice_and_differentiated():
    p, x = data()
    x = x.detach().requires_grad_()

    def grads(f):
        y = f(p, x).square().mean()
        (again,) = torch.autograd.grad(y, x, retain_graph=True)
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return again, g, torch.autograd.grad(g.square().sum(), x)[0]

    close(grads(fs.remat(mlp)), grads(mlp))


def test_recomputation_of_a_remat_runs_under_the_autocast_of_forward():
    p, x = data()
    x = x.detach().requires_grad_()

    def grad(f):
        with torch.autocast("cpu", torch.bfloat16):
            y = f(p, x).float().square().mean()
        return torch.autograd.grad(y, x)[0]

    assert torch.equal(grad(fs.remat(mlp)), grad(mlp))


def test_scan_with_remat_and_without_an_axis_refuses_a_captured_tensor_that_is_differentiated():
    p, x = data()

    def loss(w):
        return fs.scan(lambda p, x: mlp(p, x) * w, [p], x, specs=None, axis=None, remat=True).sum()

    with pytest.raises(ShardingError, match="captures 'w', which is being differentiated"):
        fs.grad(loss)(torch.ones(()))
