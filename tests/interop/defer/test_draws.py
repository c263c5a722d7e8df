"""Draws of a foreign module by a key: the same on every mesh, and known."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import fshard as fs
from fshard import P
from fshard.interop.defer import Apply

os.environ["HF_HUB_OFFLINE"] = "1"

KEY = fs.key(7)


class Function(nn.Module):
    """A module of one function, so that its draws are in a forward."""

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, *args):
        return self.f(*args)


def leaves(module):
    return {n: p.detach() for n, p in module.named_parameters()}, dict(module.named_buffers())


def on_mesh(module, x, *, key=KEY, over="data", dim=0, check="first", calls=1, **sizes):
    """The result of a module, in train mode, on a mesh whose axes `over` split dim `dim` of x."""
    sizes = sizes or {"data": 2}
    apply = Apply(module).draws_over(over, dim=dim)
    params, buffers = leaves(module)
    spec = P(*[None] * dim, over)

    @fs.shard_map(mesh=fs.make_mesh(**sizes), in_specs=(P(), P(), spec), out_specs=spec, check=check)
    def run(p, b, x):
        return apply(fs.pvary(p, over), fs.pvary(b, over), x, key=key)

    for _ in range(calls):
        out = run(params, buffers, x)
    return fs.device_get(out).detach()


# --- every kind of draw ---------------------------------------------------------------------------------------


class DropPath(nn.Module):
    """As timm's: a number for each example."""

    def forward(self, x):
        return x * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.6).div_(0.6)


class LayerDrop(nn.Module):
    """As Bart's: forward skips a layer by a drawn number; the draws that follow have other numbers."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Dropout(0.5) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            if torch.rand([]) < 0.5:
                continue
            x = layer(x) + 1
        return x


class Windows(nn.Module):
    """As Swin's: windows of an example are rows of one dim."""

    def forward(self, x):  # [B, T, D]
        b, t, d = x.shape
        y = x.view(b, t // 2, 2, d).transpose(1, 2).reshape(b * 2, t // 2, d)
        return F.dropout(y, 0.5).view(b, 2, t // 2, d).transpose(1, 2).reshape(b, t, d)


class TimeMajor(nn.Module):
    """As XLNet's: examples are in dim 1."""

    def forward(self, x):
        return F.dropout(x.transpose(0, 1), 0.5).transpose(0, 1)


class DropConnect(nn.Linear):
    """A mask of the weight, which no example has a part of."""

    def forward(self, x):
        return F.linear(x, F.dropout(self.weight, 0.5), self.bias)


class SharedMask(nn.Module):
    """A mask for all examples, as in variational dropout."""

    def forward(self, x):
        return x * x.new_empty(1, *x.shape[1:]).bernoulli_(0.5)


class Attention(nn.MultiheadAttention):
    def __init__(self, need_weights):
        super().__init__(8, 2, dropout=0.4, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x):
        return super().forward(x, x, x, need_weights=self.need_weights)[0]


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(8, 8, 3, dropout=0.5, batch_first=True)

    def forward(self, x):
        return self.rnn(x)[0]


def fractional_max_pool(x):
    return F.fractional_max_pool2d(x.unsqueeze(1), 2, output_size=(3, 5))


KINDS = {
    "dropout": lambda: nn.Dropout(0.3),
    "dropout of the whole": lambda: nn.Dropout(1.0),
    "dropout of nothing": lambda: nn.Dropout(0.0),
    "in place": lambda: Function(lambda x: F.dropout(x * 1, 0.3, inplace=True)),
    "dropout1d": lambda: nn.Dropout1d(0.3),
    "dropout2d": lambda: Function(lambda x: F.dropout2d(x.unsqueeze(-1), 0.3)),
    "dropout3d": lambda: Function(lambda x: F.dropout3d(x[..., None, None], 0.3)),
    "alpha_dropout": lambda: nn.AlphaDropout(0.3),
    "feature_alpha_dropout": lambda: nn.FeatureAlphaDropout(0.3),
    "rrelu": nn.RReLU,
    "rrelu in place": lambda: Function(lambda x: F.rrelu(x * 1, training=True, inplace=True)),
    "gumbel_softmax": lambda: Function(lambda x: F.gumbel_softmax(x, hard=True) + F.gumbel_softmax(x)),
    "sdpa": lambda: Function(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4, is_causal=True)),
    "attention": lambda: Attention(need_weights=False),
    "attention with weights": lambda: Attention(need_weights=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=True),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "drop path": DropPath,
    "layer drop": LayerDrop,
    "windows": Windows,
    "time-major": TimeMajor,
    "drop connect": lambda: DropConnect(8, 8),
    "shared mask": SharedMask,
    "heads as rows": lambda: Function(lambda x: F.dropout(x.view(-1, 8), 0.5).view(x.shape)),
    "rand": lambda: Function(lambda x: x * torch.rand(x.shape[0], 1, 1)),
    "rand_like": lambda: Function(lambda x: x + torch.rand_like(x)),
    "randn": lambda: Function(lambda x: x + torch.randn(x.shape)),
    "randn_like": lambda: Function(lambda x: x + torch.randn_like(x)),
    "randint": lambda: Function(lambda x: x + torch.randint(3, 9, x.shape) + torch.randint(5, (8,))),
    "randint_like": lambda: Function(lambda x: x + torch.randint_like(x, 5)),
    "randperm": lambda: Function(lambda x: x[:, :, torch.randperm(8)]),
    "random_": lambda: Function(lambda x: x + torch.empty_like(x).random_(4) + torch.empty_like(x).random_()),
    "normal": lambda: Function(lambda x: torch.normal(x, 0.1) + torch.normal(0.0, x.abs()) + torch.normal(x, x.abs())),
    "normal of a size": lambda: Function(lambda x: x + torch.normal(1.0, 2.0, x.shape)),
    "bernoulli of probabilities": lambda: Function(lambda x: torch.bernoulli(x.sigmoid()) + torch.zeros_like(x).bernoulli_(x.sigmoid())),
    "bernoulli of a number": lambda: Function(lambda x: torch.bernoulli(x, 0.3)),
    "exponential": lambda: Function(lambda x: x + torch.empty_like(x).exponential_(2.0)),
    "cauchy": lambda: Function(lambda x: x + torch.empty_like(x).cauchy_().sign()),
    "log_normal": lambda: Function(lambda x: x + torch.empty_like(x).log_normal_()),
    "geometric": lambda: Function(lambda x: x + torch.empty_like(x).geometric_(0.5)),
    "uniform": lambda: Function(lambda x: x + torch.empty_like(x).uniform_(-1, 3)),
    "multinomial": lambda: Function(lambda x: torch.multinomial(x.flatten(1).abs(), 3)),
    "multinomial, replacement": lambda: Function(lambda x: torch.multinomial(x.flatten(1).abs(), 20, replacement=True)),
    "fractional max pool": lambda: Function(fractional_max_pool),
}  # fmt: skip
MESHES = {
    "data": ({"data": 2}, "data"),
    "two axes": ({"replica": 2, "shard": 2}, ("replica", "shard")),
    "uneven": ({"data": 4}, "data"),  # 6 rows: 2, 2, 2, 0
    "uneven 3": ({"data": 4}, "data"),  # 7 rows: 2, 2, 2, 1
    "with an unused axis": ({"data": 2, "model": 2}, "data"),
}
NOT_EMPTY = ("attention", "attention with weights", "encoder layer", "heads as rows")  # view(-1) of none, as torch's


@pytest.mark.parametrize("kind", KINDS)
def test_draw_by_a_key_is_the_same_on_every_mesh(kind):
    torch.manual_seed(0)
    module = KINDS[kind]()
    for name, (sizes, axes) in MESHES.items():
        rows = {"uneven": 6, "uneven 3": 7}.get(name, 8)
        if name == "uneven" and kind in NOT_EMPTY:
            continue
        x = fs.random.normal(fs.key(1), (rows, 4, 8))
        want = Apply(module)(*leaves(module), x.clone(), key=KEY).detach()
        got = on_mesh(module, x, over=axes, **sizes)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
    if "nothing" not in kind and "whole" not in kind:
        assert not torch.equal(Apply(module)(*leaves(module), x.clone(), key=fs.key(8)), want)
