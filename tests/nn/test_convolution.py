"""Convolutions and pools have the values and gradients of torch's, with batch or channels split over an axis."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import fshard as fs
from fshard import P, nn
from tests.lib.assertions import error_text
from tests.nn.test_nn import close, on, rand, value_and_vjp

X, W, B = rand(5, 4, 7, 6), rand(6, 4, 3, 3, seed=1), rand(6, seed=2)
CONVOLUTIONS = {
    "plain": {},
    "stride and padding": {"stride": 2, "padding": 1},
    "pairs": {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
    "same": {"padding": "same"},
    "groups": {"padding": 1, "groups": 2},
}


def weight(options):
    return W[:, : 4 // options.get("groups", 1)]


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolution_equals_that_of_torch(name):
    options = CONVOLUTIONS[name]
    for bias in ((), (B,)):
        close(value_and_vjp(lambda *a: nn.conv2d(*a, **options), X, weight(options), *bias),
              value_and_vjp(lambda *a: F.conv2d(*a, **options), X, weight(options), *bias))  # fmt: skip


def loss(y):
    return (y * y.detach().sin()).sum()


@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 6}, {"model": 4}, {"model": 7}, {"data": 2, "model": 2}])
@pytest.mark.parametrize("name", ["plain", "stride and padding"])
def test_convolution_split_by_batch_and_output_channels_equals_that_of_one_device(name, sizes):
    """6 channels over 4 and 7 ranks, and 5 examples over 2 and 6: parts are uneven, and the last one empty."""
    options, data, model = (
        CONVOLUTIONS[name],
        "data" if "data" in sizes else None,
        "model" if "model" in sizes else None,
    )

    def step(x, w, b):
        def f(args):
            x, w, b = args
            y = nn.conv2d(fs.pvary(x, model), fs.pvary(w, data), fs.pvary(b, data), **options)
            return fs.psum(loss(y), tuple(sizes)), y

        (_, y), grads = fs.value_and_grad(f, has_aux=True)((x, w, b))
        return y, grads

    specs = (P(data), P(model), P(model))
    y, grads = on(sizes, step, (X, W, B), specs, (P(data, model), specs))
    want, pull = torch.func.vjp(lambda *a: F.conv2d(*a, **options), X, W, B)
    close((y, grads), (want, pull(want.sin())))


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_convolution_split_by_input_channels_equals_that_of_one_device(ranks):
    def step(x, w, b):
        def f(args):
            x, w, b = args
            y = fs.psum(nn.conv2d(x, w, padding=1), "model") + b[:, None, None]
            return loss(y), y

        (_, y), grads = fs.value_and_grad(f, has_aux=True)((x, w, b))
        return y, grads

    specs = (P(None, "model"), P(None, "model"), P())
    y, grads = on({"model": ranks}, step, (X, W, B), specs, (P(), specs))
    want, pull = torch.func.vjp(lambda *a: F.conv2d(*a, padding=1), X, W, B)
    close((y, grads), (want, pull(want.sin())))


def test_convolution_without_channels_has_no_values_or_zeros():
    for groups in (1, 2):
        for i, o in ((0, 6), (4, 0), (0, 0)):
            x, w = rand(5, i, 7, 6).requires_grad_(), rand(o, i // groups, 3, 3).requires_grad_()
            b = rand(o).requires_grad_()
            y = nn.conv2d(x, w, b, stride=2, padding=1, groups=groups)
            assert torch.equal(y, b.view(-1, 1, 1).expand(5, o, 4, 3))
            gx, gw, gb = torch.autograd.grad(y.sum(), (x, w, b))
            close((gx, gw, gb), (torch.zeros_like(x), torch.zeros_like(w), torch.full((o,), 60.0, dtype=x.dtype)))


POOLS = {
    "max": (lambda x: nn.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 2)),
    "max, overlapping": (lambda x: nn.max_pool2d(x, (3, 2), stride=2, padding=1, dilation=1, ceil_mode=True),
                         lambda x: F.max_pool2d(x, (3, 2), stride=2, padding=1, ceil_mode=True)),
    "max, dilated": (lambda x: nn.max_pool2d(x, 2, stride=1, dilation=2), lambda x: F.max_pool2d(x, 2, 1, dilation=2)),
    "average": (lambda x: nn.avg_pool2d(x, 2), lambda x: F.avg_pool2d(x, 2)),
    "average, padded": (lambda x: nn.avg_pool2d(x, 3, stride=2, padding=1, ceil_mode=True, count_include_pad=False),
                        lambda x: F.avg_pool2d(x, 3, 2, 1, True, False)),
    "average, zeros": (lambda x: nn.avg_pool2d(x, (3, 1), stride=(2, 1), padding=(1, 0)),
                       lambda x: F.avg_pool2d(x, (3, 1), (2, 1), (1, 0))),
}  # fmt: skip


@pytest.mark.parametrize("name", POOLS)
def test_pools_equal_those_of_torch_with_the_batch_and_the_channels_split(name):
    ours, theirs = POOLS[name]
    x = X.mul(2).round()  # with ties
    want, pull = torch.func.vjp(theirs, x)
    close(value_and_vjp(ours, x), value_and_vjp(theirs, x))

    def step(x):
        y, pull = torch.func.vjp(ours, x)
        return y, pull(y.sin())[0]

    spec = P("data", "model")  # 5 examples on 4 ranks, 4 channels on 3: empty parts of both
    close(on({"data": 4, "model": 3}, step, (x,), (spec,), (spec, spec)), (want, *pull(want.sin())))
    close(torch.func.vmap(ours)(torch.stack([x, -x])), torch.stack([want, theirs(-x)]))


@pytest.mark.parametrize(("call", "words"), [
    (lambda: nn.conv2d(X[0], W), "conv2d: x and w must have 4 dims"),
    (lambda: nn.conv2d(X, W[:, :3]), "conv2d: the channels of w do not fit those of x"),
    (lambda: nn.conv2d(X, W[:5, :2], groups=2), "groups  2"),
    (lambda: nn.conv2d(X, W[:, :0], groups=0), "groups  0"),
    (lambda: nn.conv2d(X, W, B[:1]), "conv2d: b must be one number for each output channel here"),
    (lambda: nn.conv2d(X, W, padding="full"), 'fix: a number of zeros, "valid" or "same"'),
    (lambda: nn.conv2d(X, W, padding="same", stride=2), 'padding="same" and stride=2'),
    (lambda: nn.conv2d(X, W, stride=(1, 0)), "kernel=3, stride=0, padding=0, dilation=1 along W\n  fix: padding 0 or"),
    (lambda: nn.conv2d(X, W, dilation=3), "along W: the kernel does not fit\n  x  f64[5, 4, 7, 6]\n  6 + 2 * 0 < 7\n"),
    (lambda: nn.max_pool2d(X, 2, padding=-1), "padding=-1, dilation=1 along H"),
    (lambda: nn.avg_pool2d(X, (2, 3), padding=(1, 2)), "along W: windows of padding alone\n  2 * 2 > 3\n"),
    (lambda: nn.max_pool2d(X[0], 2), "max_pool2d: x must have 4 dims"),
    (lambda: nn.avg_pool2d(X[0], 2), "avg_pool2d: x must have 4 dims"),
])  # fmt: skip
def test_wrong_arguments_are_named(call, words):
    assert words in error_text(call)
