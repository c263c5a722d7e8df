"""Gradients and their accumulation, against plain torch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import weakref

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from tests.lib.assertions import error_text


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


def by_autograd(p, x, loss=loss):
    p = fs.tree.map(lambda t: t.clone().requires_grad_(), p)
    value = loss(p, x)
    value.backward()
    return value.detach(), fs.tree.map(lambda t: t.grad, p)


def test_value_and_grad_equals_autograd():
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
          "  fix: pass leaves that are not trained in another argument")),
        (lambda: fs.grad(lambda x: x, 1)(torch.ones(2)),
         "value_and_grad(<lambda>): argnums=1, but there are 1 positional arguments"),
        (lambda: fs.grad(lambda x: torch.ones(()))({}),
         "value_and_grad(<lambda>): argument 0 has no leaves\n  fix: pass the parameters, or other argnums"),
        (lambda: fs.accumulate(loss, 3)(*data()),
         ("accumulate: args[1] cannot be split into 3 equal microbatches\n  shape  [4, 3]\n  4 % 3 = 1\n"
          "  fix: another number of steps, or another batch size")),
        (lambda: fs.accumulate(loss, 0), "accumulate: steps=0\n  fix: one or more"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_errors(call, text):
    assert error_text(call) == text


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_accumulate_equals_the_whole_batch(steps):
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


# --- by plain autograd ---


class Saved:
    """A tensor that a graph saves for its backward pass."""

    def __init__(self, x):
        self.x = x


@contextlib.contextmanager
def saved_tensor_counts():
    """Collect the number of saved tensors at each use of one. Inside, torch.func is an error."""
    alive, counts = weakref.WeakSet(), []

    def pack(x):
        alive.add(saved := Saved(x))
        return saved

    def unpack(saved):
        counts.append(len(alive))
        return saved.x

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield counts


def test_backward_frees_saved_tensors_after_their_use():
    p, x = data()

    def deep(p, x):
        for _ in range(10):
            x = mlp(p, x)
        return x.square().mean()

    want = by_autograd(p, x, deep)
    with saved_tensor_counts() as counts:
        close(fs.value_and_grad(deep)(p, x), want)
    assert counts[0] >= 30  # tanh's result and matmul's two arguments, ten times
    assert counts[-1] <= 3
    assert all(b <= a for a, b in itertools.pairwise(counts))


def test_gradient_after_a_failed_gradient_is_by_plain_autograd():
    p, x = data()
    with pytest.raises(ZeroDivisionError):
        fs.grad(lambda p: 1 / 0)(p)
    with saved_tensor_counts() as counts:  # torch.func would fail under hooks
        fs.grad(loss)(p, x)
    assert counts


def test_tensor_used_as_two_leaves_has_two_gradients():
    w = torch.randn(3, dtype=torch.float64)
    got = fs.grad(lambda p: (p[0].sin() * p[1]["x"]).sum())([w, {"x": w}])
    close(got, [w.cos() * w, {"x": w.sin()}])


def test_constant_loss_has_zero_gradients():
    p, _ = data()
    value, grads = fs.value_and_grad(lambda p: torch.tensor(2.0))(p)
    assert (float(value), value.requires_grad) == (2.0, False)
    close(grads, fs.tree.map(torch.zeros_like, p))
    close(fs.grad(lambda p: p["w"].sum())(p), {"w": torch.ones_like(p["w"]), "b": torch.zeros_like(p["b"])})


def test_complex_leaves_have_the_gradients_of_torch_func():
    z = torch.randn(4, dtype=torch.complex128)
    f = lambda z: (z * z.conj() * 1j + z.sin()).abs().sum()  # noqa: E731
    close(fs.grad(f)(z), torch.func.grad(f)(z))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_surrounding_grad_modes_change_no_gradient(around):
    p, x = data()
    want = by_autograd(p, x)
    with around():
        close(fs.grad(lambda p: p["w"].square().sum())(p), {"w": p["w"] * 2, "b": torch.zeros_like(p["b"])})
        x = x * 1
        got = fs.value_and_grad(loss)(p, x)
        assert not any(t.requires_grad for t in fs.tree.leaves(got))
        assert fs.grad(lambda p: loss(p, x).detach())(p)["w"].count_nonzero() == 0
    close(got, want)
    close(fs.value_and_grad(loss)(p, x), want)  # autograd cannot save an x that was made in inference mode
    with torch.no_grad():
        leaves = fs.tree.map(lambda t: t.clone().requires_grad_(), p)
    with around():
        close(fs.value_and_grad(loss)(leaves, x), want)


def twice_by_torch(f, *xs):
    """Return the gradient, by the second argument, of a function of the gradient by the first, with torch alone."""
    xs = [x.clone().requires_grad_() for x in xs]
    value = f(*xs)
    (first,) = torch.autograd.grad(value, xs[0], create_graph=True)
    return torch.autograd.grad(first.square().sum() + value, xs[1])[0]


CAPTURED = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64, requires_grad=True)


def by_a_global(p):
    return (p * CAPTURED).exp().sum()


@pytest.mark.parametrize("how", ["argument", "keyword", "closure", "deep closure", "global", "rematted"])
def test_outer_autograd_differentiates_captured_tensors_and_arguments(how):
    p, w = torch.randn(3, dtype=torch.float64), CAPTURED
    inner = lambda p: (p * w).exp().sum()  # noqa: E731
    keyword = functools.partial(lambda p, *, w: (p * w).exp().sum(), w=w)
    rematted = lambda p: fs.remat(lambda p, w: (p * w).exp())(p, w).sum()  # noqa: E731
    functions = {"closure": inner, "deep closure": lambda p: inner(p) * 1, "global": by_a_global, "rematted": rematted}
    if how == "argument":
        value, grads = fs.value_and_grad(lambda p, w: (p * w).exp().sum())(p, w)
    else:
        value, grads = fs.value_and_grad(functions.get(how, keyword))(p)
    got = torch.autograd.grad(grads.square().sum() + value, w)[0]
    close(got, twice_by_torch(lambda p, w: (p * w).exp().sum(), p, w.detach()))


def test_outer_autograd_differentiates_the_same_leaves():
    p = torch.randn(3, dtype=torch.float64, requires_grad=True)
    value, grads = fs.value_and_grad(lambda p: p.exp().sum())(p)
    close(torch.autograd.grad(grads.square().sum() + value, p)[0], 2 * (2 * p).exp() + p.exp())


def test_no_graph_is_returned_under_no_grad():
    w = torch.randn(3, requires_grad=True)
    with torch.no_grad():
        got = fs.value_and_grad(lambda p: ((p * w).sum(), p * w), has_aux=True)(torch.ones(3))
    close(got, ((w.sum(), w), w))
    assert not any(t.requires_grad for t in fs.tree.leaves(got))


def test_aux_is_detached_from_its_leaves_but_not_from_captured_tensors():
    p, w = torch.randn(3), torch.randn(3, requires_grad=True)
    for f in (lambda w: w * 3, lambda w: w):
        (_, aux), _ = fs.value_and_grad(lambda p, f=f: (p.sum(), [p * 2, p, f(w)]), has_aux=True)(p)
        close(torch.autograd.grad(aux[2].sum(), w)[0], torch.ones(3) * f(1.0))
    (_, aux), _ = fs.value_and_grad(lambda p: (p.sum(), [p * 2, p]), has_aux=True)(p)
    assert not any(x.requires_grad for x in aux)
    close(aux, [p * 2, p])


def test_jvp_of_a_gradient():
    p, x = data()
    step = fs.tree.map(torch.ones_like, p)
    f = lambda p: fs.grad(loss)(p, x)  # noqa: E731
    want = torch.func.jvp(torch.func.grad(lambda p: loss(p, x)), (p,), (step,))[1]
    close(torch.func.jvp(f, (p,), (step,))[1], want)
    with torch.autograd.forward_ad.dual_level():
        got = f(fs.tree.map(torch.autograd.forward_ad.make_dual, p, step))
        close(fs.tree.map(lambda t: torch.autograd.forward_ad.unpack_dual(t).tangent, got), want)


def test_gradient_through_an_optimizer_step():
    """Check that differentiated tensors are not passed to the fused kernel, which has no gradient."""
    opt, p = fs.optim.sgd(0.1, momentum=0.9), torch.randn(16)
    close(fs.grad(lambda g: opt.update(g, opt.init(p), p)[0].sum())(torch.randn(16)), torch.full((16,), -0.1))


def test_writing_a_differentiated_value_into_an_argument_is_an_error():
    def f(p, cache):
        cache["x"][0].add_(p)
        return cache["x"][0].sum()

    text = re.escape("value_and_grad(f): args[1]['x'][0] was modified in place by a value that is being "
                     "differentiated\n  fix: return the new value, with has_aux=True")  # fmt: skip
    with pytest.raises(ShardingError, match=text):
        fs.grad(f)(torch.ones(3), {"x": [torch.ones(3)], "y": torch.ones(3)})


# --- compiled, on a mesh of one rank ---


def test_compiled_with_aux():
    p, x = data()
    mesh = fs.make_mesh(data=1)

    def step(p, x):
        return fs.value_and_grad(lambda p: (loss(p, x), {"x": x * 2}), has_aux=True)(p)

    got = fs.shard_map(step, mesh=mesh, out_specs=P(), compile=True)(p, x)
    (value, aux), grads = fs.device_get(got)
    close((value, grads), by_autograd(p, x))
    close(aux["x"], x * 2)


# --- frozen leaves ---

SPLIT = {"w": P("data"), "f": P("data"), "r": P(), "g": P()}  # sharded, sharded, replicated, replicated


def frozen_program(mesh, train, transform, remat=False):
    """Return a step that differentiates a loss by the leaves in `train`, with `transform`."""

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
def test_frozen_leaves_share_the_forward_transfer_and_have_no_backward_transfer(train, remat):
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
    assert moved.pop(("all_gather", "forward")) == 2 * 8 * 4  # both parts in one transfer, trained or frozen
    expected = {("reduce_scatter", "backward"): sharded * 64, ("all_reduce", "backward"): replicated * 64}
    assert moved == {k: n for k, n in expected.items() if n}


def test_frozen_leaves_in_jvp_and_second_derivatives():
    """Differentiate, around a gradient, by a leaf that is frozen in it."""
    mesh, one = fs.make_mesh(data=2), fs.make_mesh(data=1)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    described = {k: fs.init.normal((4, 4)) for k in SPLIT}

    def mixed(p, x):
        def loss(w, f):
            full = fs.unshard({**p, "w": w, "f": f}, SPLIT, "data")
            return fs.pmean((((x @ full["w"]).sin() @ full["f"]) * (x @ full["r"])).square().mean(), "data")

        def of_f(f):  # a function of the gradient by w alone
            return fs.psum(fs.grad(lambda w: loss(w, f))(p["w"]).square().sum(), "data")

        return fs.grad(of_f)(p["f"]), torch.func.jvp(lambda f: loss(p["w"], f), (p["f"],), (p["w"],))[1]

    got, want = (
        fs.device_get(fs.shard_map(mixed, mesh=m, in_specs=(SPLIT, P("data")), out_specs=(P("data"), P()))(
            fs.materialize(described, SPLIT, m, key=fs.key(0)), x)) for m in (mesh, one))  # fmt: skip
    torch.testing.assert_close(got, want)
