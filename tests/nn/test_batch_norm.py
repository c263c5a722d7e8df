"""Batch norm has the values, gradients and running statistics of torch's, whatever the split of batch and channels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import fshard as fs
from fshard import P, nn
from tests.lib.assertions import error_text
from tests.nn.test_nn import close, on, rand

X, W, B = 3 * rand(5, 4, 3, 2) + 2, rand(4, seed=1), rand(4, seed=2)


def new_state(channels=4, dtype=torch.float64):
    return {"mean": rand(channels, seed=3).to(dtype), "var": rand(channels, seed=4).exp().to(dtype),
            "count": torch.tensor(0)}  # fmt: skip


def loss(y):
    return (y * y.detach().sin()).sum()


def by_torch(x, state, w, b, *, train=True, momentum=0.1, eps=1e-5, steps=2):
    """Outputs, gradients and running statistics of `steps` calls of torch's module."""
    module = torch.nn.BatchNorm2d(x.shape[1], eps, momentum, affine=w is not None, dtype=x.dtype).train(train)
    state = fs.tree.map(torch.clone, state)  # torch writes it
    module.running_mean, module.running_var = state["mean"].to(x.dtype), state["var"].to(x.dtype)
    if w is not None:
        module.load_state_dict({"weight": w, "bias": b}, strict=False)
    x = x.clone().requires_grad_()
    for _ in range(steps):
        y = module(x)
    grads = torch.autograd.grad(loss(y), (x, *module.parameters()))
    new = {"mean": module.running_mean, "var": module.running_var, "count": module.num_batches_tracked}
    return y.detach(), grads, new


def by_ours(x, state, w, b, *, sizes=None, data=None, model=None, steps=2, check="first", transform=False, **options):
    """The same, by nn.batch_norm on a mesh that splits the batch over `data` and the channels over `model`."""
    leaves, axes = (x, w, b), tuple(sizes or {})
    specs, state_specs = (
        (P(data, model), P(model), P(model)),
        {"mean": P(model), "var": P(model), "count": P()} if state else P(),
    )
    if w is None:
        leaves, specs = leaves[:1], specs[:1]

    def step(leaves, state):
        def f(leaves):
            y, new = nn.batch_norm(leaves[0], state, *fs.pvary(leaves[1:], data), **options)
            return fs.psum(loss(y), axes), (y, new)

        if transform:
            grads, (y, new) = torch.func.grad(f, has_aux=True)(leaves)
        else:
            (_, (y, new)), grads = fs.value_and_grad(f, has_aux=True)(leaves)
        return y, grads, new

    for _ in range(steps):
        out_specs = (specs[0], specs, state_specs)
        y, grads, state = on(sizes, step, (leaves, state), (specs, state_specs), out_specs, check)
    return y.detach(), grads, state


@pytest.mark.parametrize(("momentum", "transform"), [(0.1, True), (0.0, False), (1.0, False), (None, True)])
def test_batch_norm_on_one_device_equals_that_of_torch(momentum, transform):
    for leaves in ((W, B), (None, None)):
        for train in (True, False):
            options = {"momentum": momentum, "eps": 1e-3, "train": train}
            got = by_ours(X, new_state(), *leaves, transform=transform, **options)
            close(got, by_torch(X, new_state(), *leaves, **options))


MESHES = {
    "batch of one rank": ({"data": 1}, "data", None),
    "batch of one rank, channels": ({"data": 1, "model": 2}, "data", "model"),
    "batch": ({"data": 2}, "data", None),
    "batch, empty ranks": ({"data": 4}, "data", None),
    "batch over two axes": ({"replica": 2, "data": 2}, ("replica", "data"), None),
    "channels": ({"model": 3}, None, "model"),
    "channels, empty ranks": ({"model": 5}, None, "model"),
    "batch and channels": ({"data": 2, "model": 2}, "data", "model"),
}


@pytest.mark.parametrize(
    ("name", "train"),
    [
        *((name, True) for name in MESHES if name not in ("batch", "channels", "batch of one rank")),
        ("batch and channels", False),
    ],
)
def test_batch_norm_on_a_mesh_equals_that_of_one_device(name, train):
    """5 examples over 2 and 4 ranks: some have fewer, or none."""
    sizes, data, model = MESHES[name]
    split = {"sizes": sizes, "data": data, "model": model, "over": data}
    check = "first" if train else "never"  # the types of the other calls are among these
    close(by_ours(X, new_state(), W, B, train=train, check=check, **split), by_torch(X, new_state(), W, B, train=train))
    got = by_ours(X, new_state(), None, None, train=train, momentum=None, transform=True, check="never", **split)
    close(got, by_torch(X, new_state(), None, None, train=train, momentum=None))


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 3), (6, 4, 3, 2, 2)])
def test_batch_norm_of_any_number_of_dims(shape):
    x = rand(*shape)
    want = F.batch_norm(x, None, None, W, B, True)
    assert nn.batch_norm(x, None, W, B, train=True)[1] is None
    close(nn.batch_norm(x, None, W, B, train=True)[0], want)
    over = on({"data": 4}, lambda x: nn.batch_norm(x, None, *fs.pvary((W, B), "data"), train=True, over="data")[0],
              (x,), P("data"), P("data"))  # fmt: skip
    close(over, want)


def test_variance_of_values_far_from_zero_does_not_cancel():
    x = 1e4 + rand(6, 4, 3, 2, dtype=torch.float32)
    want = F.batch_norm(x.double(), None, None, training=True)
    f = lambda x: nn.batch_norm(x, None, train=True, over="data")[0]  # noqa: E731
    # One float32 rounding of x is 2^-10 / 2, of which the variance is 1: a formula E[x^2] - E[x]^2 is off by 8.
    close(on({"data": 3}, f, (x,), P("data"), P("data")).double(), want, tol=5e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", [None, {"data": 3}])
def test_half_precision_is_rounded_once(dtype, sizes):
    x, w, b = X.to(dtype), W.to(dtype), B.to(dtype)
    data = "data" if sizes else None
    y, grads, state = by_ours(x, new_state(dtype=torch.float32), w, b, train=True, sizes=sizes, data=data, over=data)
    assert y.dtype == dtype
    assert {g.dtype for g in grads} == {dtype}
    assert state["mean"].dtype == torch.float32
    wide = (t.double() for t in (x, w, b))
    want, (gx, gw, gb), state_want = by_torch(next(wide), new_state(dtype=torch.float32), *wide)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), want, rtol=eps, atol=1e-5)
    torch.testing.assert_close(state["var"].double(), state_want["var"].double(), rtol=1e-5, atol=1e-6)
    # The gradient of y is rounded too: each of 30 products of a sum of 30 values of a size of 4.
    for got, expected in zip(grads, (gx, gw, gb), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=2 * eps, atol=30 * eps)


def test_batch_norm_under_vmap_jvp_and_second_derivatives():
    xs, states = torch.stack([X, -X]), fs.tree.map(lambda s: torch.stack([s, s]), new_state())
    got = torch.func.vmap(lambda x, s: nn.batch_norm(x, s, W, B, train=True))(xs, states)
    for i, x in enumerate(xs):
        close(fs.tree.map(lambda t, i=i: t[i], got), nn.batch_norm(x, new_state(), W, B, train=True))
    tangent = rand(*X.shape, seed=9)
    f = lambda x: nn.batch_norm(x, None, W, B, train=True)[0].pow(3).sum()  # noqa: E731
    second = torch.func.jvp(torch.func.grad(f), (X,), (tangent,))[1]
    close(second, (torch.func.grad(f)(X + 1e-5 * tangent) - torch.func.grad(f)(X - 1e-5 * tangent)) / 2e-5, tol=1e-5)


def test_batch_statistics_of_one_ranks_examples_are_refused():
    text = error_text(by_ours, X, new_state(), W, B, train=True, sizes={"data": 2}, data="data")
    assert text == (
        "batch_norm: x varies over 'data', and over=None\n"
        "  the statistics of each rank's own examples change with the mesh\n"
        "  fix: over='data': those of all examples; or train=False; or a state that varies too, if each rank has "
        "channels or a model of its own"
    )
    two = {"sizes": {"replica": 2, "data": 2}, "data": ("replica", "data")}
    text = error_text(by_ours, X, new_state(), W, B, train=True, over="data", **two)
    assert "x varies over 'replica', and over='data'\n" in text
    assert "fix: over=('data', 'replica'): those" in text
    text = error_text(by_ours, X, None, W, B, train=True, sizes={"data": 2}, data="data", steps=1)
    assert "x varies over 'data'" in text
    text = error_text(by_ours, X, new_state(), W, B, train=True, sizes={"data": 2, "model": 2}, data="data",
                      model="model", over=("data", "model"))  # fmt: skip
    assert "over=('data', 'model'), and the state varies over 'model': that is the mean over different channels" in text
    text = error_text(on, {"data": 2}, lambda x: nn.batch_norm(fs.pvary(x, "data"), None, train=True)[0], (X,),
                      P("data"), P("data"))  # fmt: skip
    assert "x varies over 'data'" in text, "a pvary makes no copies of what varies"


def test_copies_and_models_of_ones_own_keep_their_statistics():
    """An input that was invariant has the statistics of one device; a model for each rank has those of its rank."""
    same = on({"data": 2}, lambda x: nn.batch_norm(fs.pvary(x, "data"), None, train=True)[0].sum().reshape(1), (X,),
              P(), P("data"))  # fmt: skip
    close(same, F.batch_norm(X, None, None, training=True).sum().expand(2))
    xs, states = torch.stack([X, 2 * X]), fs.tree.map(lambda s: torch.stack([s, s]), new_state())

    def each(x, state):
        y, new = nn.batch_norm(x[0], fs.tree.map(lambda s: s[0], state), train=True)
        return fs.tree.map(lambda t: t[None], (y, new))

    got = on({"data": 2}, each, (xs, states), (P("data"), P("data")), P("data"))
    for i, x in enumerate(xs):
        close(fs.tree.map(lambda t, i=i: t[i], got), nn.batch_norm(x, new_state(), train=True))


@pytest.mark.parametrize(("options", "words"), [
    ({"train": False, "state": None}, "batch_norm: train=False without a state"),
    ({"momentum": 1.5}, "batch_norm: momentum=1.5, eps=1e-05\n  fix: 0 <= momentum <= 1, or None; eps above 0"),
    ({"eps": 0.0}, "eps=0.0"),
    ({"w": W[:3]}, "batch_norm: w must have one number for each channel here\n  x  f64[5, 4, 3, 2]    w  f64[3]"),
    ({"state": new_state(3)}, "batch_norm: state['mean'] must have one number for each channel here"),
    ({"state": {**new_state(), "var": W.long()}}, "batch_norm: state['var'] must be floating\n  state['var']  i64[4]"),
    ({"state": {"mean": B}}, 'state must be None, or a dict of tensors "mean", "var" and "count"'),
    ({"state": {**new_state(), "count": B}}, "batch_norm: state['count'] must be one number"),
    ({"x": B}, "batch_norm: x must be floating, with channels in dim 1"),
    ({"x": X.long()}, "batch_norm: x must be floating"),
    ({"x": X[:1, :, :1, :1]}, "batch_norm: x has one value of each channel: it has no variance"),
    ({"x": X[:0]}, "batch_norm: x has no value of a channel"),
])  # fmt: skip
def test_wrong_arguments_are_named(options, words):
    arguments = {"x": X, "state": new_state(), "train": True} | options
    x, state = arguments.pop("x"), arguments.pop("state")
    assert words in error_text(nn.batch_norm, x, state, **arguments)


def test_weights_that_do_not_vary_as_the_batch_are_refused_where_they_are_used():
    def step(x, w):
        return fs.grad(lambda w: fs.psum(loss(nn.batch_norm(x, None, w, train=True, over="data")[0]), "data"))(w)

    text = error_text(on, {"data": 2}, step, (X, W), (P("data"), P()), P())
    assert "native_batch_norm of an operand that is invariant (I) over 'data' with one that varies (V)" in text
    assert 'fix: pass fs.pvary(w, "data")' in text


def test_one_value_on_all_ranks_is_refused():
    text = error_text(by_ours, X[:1, :, :1, :1], None, W, B, train=True, sizes={"data": 2}, data="data", over="data")
    assert "all ranks of 'data' together have one value of each channel: it has no variance" in text


@pytest.mark.parametrize("affine", [True, False])
def test_kernels_of_the_global_batch_have_first_and_second_derivatives(affine):
    from fshard.nn.batch_norm import _Moments, _Normalize

    def f(x, w=None, b=None):
        mean, squares = _Moments.apply(x)
        return _Normalize.apply(x, mean, squares / 10, w, b, 0.1), mean, squares

    leaves = [rand(2, 2, 5), *([rand(2, seed=1), rand(2, seed=2)] if affine else [])]
    leaves = [t.requires_grad_() for t in leaves]
    torch.autograd.gradcheck(f, leaves)
    torch.autograd.gradgradcheck(f, leaves)
