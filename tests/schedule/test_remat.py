"""Rematerialization: the same values and gradients, and what is forgotten and computed again."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from tests.test_grad import by_autograd, close, data, held_by_graphs, loss, mlp


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


def test_compiled():
    p, x = data()
    got = fs.shard_map(fs.value_and_grad(rematted), mesh=fs.make_mesh(data=1), out_specs=P(), compile=True)(p, x)
    close(fs.device_get(got), by_autograd(p, x))


# --- by plain autograd ------------------------------------------------------------------------------------------


def chain(p, x, wrap):
    for _ in range(10):
        x = wrap(lambda p, x: mlp(p, mlp(p, x)))(p, x)
    return x.square().mean()


def test_one_block_at_a_time_is_held():
    p, x = data()
    want = by_autograd(p, x, lambda p, x: chain(p, x, lambda f: f))
    with held_by_graphs() as counts:
        close(fs.value_and_grad(lambda p: chain(p, x, lambda f: f))(p), want)
    assert max(counts) >= 60  # tanh's result and matmul's two arguments, twenty times
    with held_by_graphs() as counts:
        close(fs.value_and_grad(lambda p: chain(p, x, fs.remat))(p), want)
    # The arguments of the ten blocks, w, b and x, in a graph of one node each; the six of one block; those of the mean.
    assert max(counts) <= 3 * 10 + 6 + 1
    assert counts[-1] <= 3 + 3


def test_who_differentiates_with_torch_alone_may_do_it_twice():
    p, x = data()
    w, b, x = (t.clone().requires_grad_() for t in (p["w"], p["b"], x))
    f = lambda w, b, x: fs.remat(mlp)({"w": w, "b": b}, fs.remat(mlp)({"w": w, "b": b}, x))  # noqa: E731
    assert torch.autograd.gradcheck(f, (w, b, x))
    assert torch.autograd.gradgradcheck(f, (w, b, x))
    same = lambda w, b, x: mlp({"w": w, "b": b}, mlp({"w": w, "b": b}, x))  # noqa: E731
    rows = torch.eye(12, dtype=torch.float64).view(12, 4, 3)
    close(*(torch.autograd.grad(g(w, b, x), (w, b, x), rows, is_grads_batched=True) for g in (f, same)))


def test_what_is_frozen_stays_so_when_it_is_computed_again():
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
    assert seen[1:] == [[True, False, False, True]] * 2  # when computed again; without remat


def test_results_of_which_none_is_used_have_no_gradient():
    p, x = data()
    used = lambda p: (p["w"] * 2).sum() + 0 * fs.remat(lambda p, x: mlp(p, x).detach())(p, x).sum()  # noqa: E731
    close(fs.grad(used)(p), {"w": torch.full_like(p["w"], 2.0), "b": torch.zeros_like(p["b"])})


def test_arguments_of_which_a_body_uses_none_have_no_gradient():
    p, x = data()
    for wrap in (fs.remat, lambda f: f):
        grads = fs.grad(lambda p, wrap=wrap: wrap(lambda p, x: x @ p["w"])(p, x).sum())(p)
        close(grads, {"w": x.sum(0)[:, None].expand(3, 3), "b": torch.zeros_like(p["b"])})


def test_captured_parameters_are_refused_whoever_differentiates():
    p, x = data()
    text = "captures 'p', which is being differentiated\n  its gradient would be lost\n  fix: pass 'p' as an argument"
    f = lambda p: fs.remat(lambda x: mlp(p, x))(x).sum()  # noqa: E731
    held = {k: t.clone().requires_grad_() for k, t in p.items()}
    batched = {k: t.expand(2, *t.shape) for k, t in p.items()}
    for differentiate, at in ((fs.grad(f), p), (torch.func.grad(f), p), (f, held),
                              (torch.func.vmap(fs.grad(f)), batched)):  # fmt: skip
        with pytest.raises(ShardingError, match=text):
            differentiate(at)
    with torch.no_grad():
        close(f(held), f(p))  # nobody differentiates


def test_what_an_outer_body_makes_is_refused_where_an_inner_one_captures_it():
    p, x = data()

    def outer(p, x):
        h = mlp(p, x)
        return fs.remat(lambda x: x * h)(x)  # h is found to have a gradient when it is computed again

    with pytest.raises(ShardingError, match="captures 'h', which is being differentiated"):
        fs.grad(lambda p: fs.remat(outer)(p, x).sum())(p)
