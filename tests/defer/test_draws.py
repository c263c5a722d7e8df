"""Draws of a foreign module by a key: the same on every mesh, and known."""

from __future__ import annotations

import copy
import functools
import itertools
import math
import os
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import fshard as fs
from fshard import P
from fshard.defer import Apply
from fshard.defer.draws import Draws
from tests.lib.assertions import error_text
from tests.lib.tiers import slow_unless

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


class Experts(nn.Linear):
    """As a mixture of experts: tokens are sorted and sorted back, and added to those that were not."""

    def forward(self, x):
        tokens = x.reshape(-1, 8)
        order = tokens[:, 0].argsort()
        x = x + self.weight[0] * tokens[order][order.argsort()].view(x.shape)
        picked = x[torch.arange(len(x)), x[:, :, 0].argmax(1)]
        return F.dropout(x, 0.5) + F.dropout(picked, 0.5)[:, None]


def fractional_max_pool(x):
    return F.fractional_max_pool2d(x.unsqueeze(1), 2, output_size=(3, 5))


OPERATIONS = {  # of [B, 4, 8], with a result of B rows
    "on a GPU": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "in place": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "dropout2d": lambda x: F.dropout2d(x.unsqueeze(-1), 0.3),
    "dropout3d": lambda x: F.dropout3d(x[..., None, None], 0.3),
    "rrelu in place": lambda x: F.rrelu(x * 1, training=True, inplace=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True) + F.gumbel_softmax(x),
    "rand": lambda x: x * torch.rand(x.shape[0], 1, 1),
    "rand_like": lambda x: x + torch.rand_like(x),
    "randn": lambda x: x + torch.randn(x.shape),
    "randn_like": lambda x: x + torch.randn_like(x),
    "randint": lambda x: x + torch.randint(3, 9, x.shape) + torch.randint(5, (8,)),
    "randint_like": lambda x: x + torch.randint_like(x, 5),
    "randperm": lambda x: x[:, :, torch.randperm(8)],
    "random_": lambda x: x + torch.empty_like(x).random_(4) + torch.empty_like(x).random_(),
    "normal": lambda x: torch.normal(x, 0.1) + torch.normal(0.0, x.abs()) + torch.normal(x, x.abs()),
    "normal of a size": lambda x: x + torch.normal(1.0, 2.0, x.shape),
    "bernoulli of probabilities": lambda x: x.sigmoid().bernoulli() + x.clone().bernoulli_(x.sigmoid()),
    "bernoulli of a number": lambda x: torch.bernoulli(x, 0.3),
    "exponential": lambda x: x + torch.empty_like(x).exponential_(2.0),
    "cauchy": lambda x: x + torch.empty_like(x).cauchy_().sign(),
    "log_normal": lambda x: x + torch.empty_like(x).log_normal_(),
    "geometric": lambda x: x + torch.empty_like(x).geometric_(0.5),
    "uniform": lambda x: x + torch.empty_like(x).uniform_(-1, 3),
    "multinomial": lambda x: torch.multinomial(x.flatten(1).abs(), 3),
    "multinomial, replacement": lambda x: torch.multinomial(x.flatten(1).abs(), 20, replacement=True),
    "fractional max pool": fractional_max_pool,
}  # fmt: skip
KINDS = {
    "sdpa": lambda: Function(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4, is_causal=True)),
    "dropout": lambda: nn.Dropout(0.3),
    "dropout of the whole": lambda: nn.Dropout(1.0),
    "dropout of nothing": lambda: nn.Dropout(0.0),
    "dropout1d": lambda: nn.Dropout1d(0.3),
    "alpha_dropout": lambda: nn.AlphaDropout(0.3),
    "feature_alpha_dropout": lambda: nn.FeatureAlphaDropout(0.3),
    "rrelu": nn.RReLU,
    "attention": lambda: Attention(need_weights=False),
    "attention with weights": lambda: Attention(need_weights=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, batch_first=True),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "drop path": DropPath,
    "layer drop": LayerDrop,
    "windows": Windows,
    "time-major": TimeMajor,
    "experts": lambda: Experts(8, 8),
    "drop connect": lambda: DropConnect(8, 8),
    "shared mask": SharedMask,
    "heads as rows": lambda: Function(lambda x: F.dropout(x.view(-1, 8), 0.5).view(x.shape)),
}  # fmt: skip
MESHES = {
    "two axes": ({"replica": 2, "shard": 2}, ("replica", "shard"), 8),
    "empty part": ({"data": 4}, "data", 6),  # 2, 2, 2, 0
    "uneven parts": ({"data": 4}, "data", 7),  # 2, 2, 2, 1
    "an unused axis": ({"data": 2, "model": 2}, "data", 8),
}


def input_of(rows):
    return fs.random.normal(fs.key(1), (rows, 4, 8))


def alone(module, x, key=KEY):
    """The result of a module on one device."""
    return Apply(module)(*leaves(module), x.clone(), key=key).detach()


def test_every_operation_draws_the_same_on_every_mesh():
    """The operations are one forward, since a call of a mesh costs more than they all."""
    x = input_of(5)  # 3 rows and 2
    results = Function(lambda x: torch.cat([f(x).flatten(1).float() for f in OPERATIONS.values()], 1))
    width = [f(x).flatten(1).shape[1] for f in OPERATIONS.values()]
    mesh, one, other_key = on_mesh(results, x), alone(results, x), alone(results, x, fs.key(8))
    for name, a, b, c in zip(OPERATIONS, *(y.split(width, 1) for y in (mesh, one, other_key)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")
        assert not torch.equal(c, b), name


# The others are drawn by the operations above, or in the next tests.
OF_MODULES = ("dropout of the whole", "encoder layer", "gru", "drop connect", "heads as rows")


@pytest.mark.parametrize("kind", slow_unless(OF_MODULES, KINDS))
def test_module_draws_the_same_on_every_mesh(kind):
    module, x = KINDS[kind](), input_of(5)
    expected = alone(module, x)
    torch.testing.assert_close(on_mesh(module, x), expected, rtol=1e-5, atol=1e-6)
    if kind not in ("dropout of nothing", "dropout of the whole"):
        assert not torch.equal(alone(module, x, fs.key(8)), expected)


@pytest.mark.parametrize(("kind", "mesh"), [
    *(("dropout", mesh) for mesh in MESHES), ("sdpa", "two axes"), ("layer drop", "empty part"),
    ("windows", "uneven parts"), ("time-major", "empty part"), ("shared mask", "an unused axis"),
])  # fmt: skip
def test_draw_is_the_same_where_parts_are_uneven_or_of_several_axes(kind, mesh):
    sizes, axes, rows = MESHES[mesh]
    module, x = KINDS[kind](), input_of(rows)
    torch.testing.assert_close(on_mesh(module, x, over=axes, **sizes), alone(module, x), rtol=1e-5, atol=1e-6)


def test_spec_of_an_argument_tells_the_dim_of_its_examples():
    module, x = nn.LSTM(8, 8, 2, dropout=0.5), input_of(4).transpose(0, 1).contiguous()  # [T, B, D]
    first = Function(lambda *x: module(*x)[0])
    first.lstm = module
    torch.testing.assert_close(on_mesh(first, x, dim=1), alone(first, x), rtol=1e-5, atol=1e-6)
    apply, key_padding = Apply(Function(lambda x, pad: F.dropout(x, 0.5) * ~pad.T[..., None])), torch.rand(4, 4) < 0.2
    run = fs.shard_map(lambda x, pad: apply.draws_over("data")({}, {}, x, pad, key=KEY), mesh=fs.make_mesh(data=2),
                       in_specs=(P(None, "data"), P("data")), out_specs=P(None, "data"))  # fmt: skip
    assert torch.equal(fs.device_get(run(x, key_padding)), apply({}, {}, x, key_padding, key=KEY))


def test_dim_is_that_of_arguments_computed_in_the_region():
    apply, x = Apply(nn.Dropout(0.5)), input_of(4)

    def run(dim):
        f = lambda x: apply.draws_over("data", dim=dim)({}, {}, (2 * x).transpose(0, 1), key=KEY)  # noqa: E731
        specs = {"in_specs": P("data"), "out_specs": P(None, "data")}
        return fs.device_get(fs.shard_map(f, mesh=fs.make_mesh(data=2), **specs)(x))

    assert torch.equal(run(1), apply({}, {}, (2 * x).transpose(0, 1), key=KEY))
    assert not torch.equal(run(0), run(1))
    assert "args[0] has no dim that 'data' alone split" in error_text(run, 3)


# --- known answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_mask_is_a_bernoulli_draw_by_the_number_of_the_draw(dtype):
    x = input_of(4).to(dtype)
    module = nn.Sequential(nn.Dropout(0.3), nn.Dropout(0.0), nn.Dropout1d(0.5))
    kept = [fs.random.bernoulli(fs.fold_in(KEY, j), shape, p=p).to(dtype) / p
            for j, (shape, p) in enumerate([(x.shape, 0.7), ((4, 4, 1), 0.5)])]  # fmt: skip
    expected = x * kept[0] * kept[1]
    y = Apply(module)({}, {}, x, key=KEY)
    assert y.dtype == dtype
    torch.testing.assert_close(y, expected, rtol=2 * torch.finfo(dtype).eps, atol=0.0)  # 1 / 0.7, rounded once or twice


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_dropout_keeps_as_many_and_scales_as_torch(rate):
    n = 1 << 16
    y = Apply(nn.Dropout(rate))({}, {}, torch.ones(n), key=KEY)
    kept = y[y != 0]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - rate)))
    assert abs(len(kept) / n - (1 - rate)) < 5 * math.sqrt(rate * (1 - rate) / n)  # 5 standard deviations


def test_masks_of_layers_and_of_keys_are_independent():
    n = 1 << 14
    twice = Function(lambda x: torch.stack([F.dropout(x, 0.5), F.dropout(x, 0.5)]))
    masks = torch.cat([Apply(twice)({}, {}, torch.ones(n), key=fs.key(k)) for k in range(3)]) != 0
    agree = (masks[:, None] == masks).double().mean(-1)
    assert ((agree - 0.5).abs() < 5 * 0.5 / math.sqrt(n)).logical_or(torch.eye(6, dtype=torch.bool)).all()


def test_key_replaces_torchs_generator_in_the_call_alone():
    apply, x, state = Apply(nn.Dropout(0.5)), input_of(4), torch.get_rng_state()
    assert torch.equal(apply({}, {}, x, key=KEY), apply.with_key(KEY)({}, {}, x))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(apply({}, {}, x), apply({}, {}, x))
    assert not torch.equal(apply({}, {}, x, key=None), apply.with_key(KEY).with_key(None)({}, {}, x))
    assert not torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("n", "steps"), slow_unless([(2, 2)], [(2, 2), (4, 1), (4, 2)]))
def test_rows_of_microbatches_have_the_draws_that_they_have_in_the_batch(n, steps):
    """In the first dim or not, by a probe or not, recomputed, and next to draws that no example has a part of."""

    def columns(x):
        return F.dropout(x.transpose(0, 1), 0.5) * torch.rand(()) * torch.rand(4)

    module, x = nn.Sequential(DropPath(), nn.Linear(4, 4), Function(columns)), fs.random.normal(KEY, (8, 3, 4))
    rows = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    for apply, (params, _), in_region in (
        (Apply(module), leaves(module), Apply(module).draws_over("data")),
        (Apply(rows), leaves(rows), Apply(rows).draws_over("data", probe=False)),
    ):

        def f(p, x, of=apply):
            return of(p, {}, x, key=KEY).square().sum()

        def split(p, x, of=in_region):
            return fs.psum(fs.remat(functools.partial(f, of=of))(fs.pvary(p, "data"), x), "data")

        value, grads = fs.value_and_grad(f)(params, x)
        step = fs.shard_map(fs.accumulate(split, steps), mesh=fs.make_mesh(data=n),
                            in_specs=(P(), P("data")), out_specs=P())  # fmt: skip
        for got in (fs.device_get(step(params, x)), fs.accumulate(f, steps)(params, x)):
            for a, b in zip(fs.tree.leaves(got), fs.tree.leaves((value, grads)), strict=True):
                torch.testing.assert_close(a * steps, b)


def test_calls_that_are_not_checked_draw_by_their_own_keys():
    apply, x = Apply(nn.Dropout(0.5)).draws_over("data"), input_of(5)
    run = fs.shard_map(lambda x, key: apply({}, {}, x, key=key), mesh=fs.make_mesh(data=2), in_specs=(P("data"), P()),
                       out_specs=P("data"))  # fmt: skip
    for k in range(3):
        assert torch.equal(fs.device_get(run(x, fs.key(k))), apply({}, {}, x, key=fs.key(k)))


def test_forward_is_probed_again_only_after_it_read_other_numbers():
    module, x = LayerDrop(), input_of(5)
    apply = Apply(module).draws_over("data")
    run = fs.shard_map(lambda x, key: apply({}, {}, x, key=key), mesh=fs.make_mesh(data=2), in_specs=(P("data"), P()),
                       out_specs=P("data"))  # fmt: skip
    for _ in range(2):
        for k in range(3):
            assert torch.equal(fs.device_get(run(x, fs.key(k))), alone(module, x, fs.key(k)))
        found = [probe for _, probes in apply._split_batch.probed.values() for probe in probes]
        probed = apply._split_batch.probed
        read = {(known, tuple(probe.read)) for known in probed for probe in probed[known][1]}
        assert 2 * 2 < len(found) == len(read) <= 2 * 3  # for 3 rows and for 2; some of 2^6 combinations of layers


def test_one_apply_has_one_dim_of_examples_for_given_shapes():
    apply = Apply(nn.Dropout(0.5)).draws_over("data")
    f = lambda x: apply({}, {}, x, key=KEY)  # noqa: E731
    rows, columns = torch.ones(4, 2), torch.ones(2, 4)  # [2, 2] on each rank
    fs.shard_map(f, mesh=fs.make_mesh(data=2), in_specs=P("data"), out_specs=P("data"))(rows)
    other = fs.shard_map(f, mesh=fs.make_mesh(data=2), in_specs=P(None, "data"), out_specs=P(None, "data"))
    assert "in an earlier call, of the same shapes, other dims had the examples" in error_text(other, columns)


def test_values_of_buffers_are_compared_in_the_first_call_alone():
    module = nn.BatchNorm1d(4).eval()
    apply, (params, buffers) = Apply(module), leaves(module)
    for k in range(3):
        apply(params, buffers, input_of(2), key=fs.key(k))
    assert apply._done == {"writes", "values"}


def test_with_buffers_and_modes_keep_the_key_and_the_axis():
    module, x = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(4)), input_of(6)
    params, buffers = leaves(module)
    keyed = Apply(module).draws_over("data").with_key(KEY).batch_norm_over("data")
    f = lambda p, b, x, of=keyed: of.with_buffers(fs.pvary(p, "data"), b, x)  # noqa: E731
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": (P("data"), P())}
    got = fs.device_get(fs.shard_map(f, mesh=fs.make_mesh(data=2), **specs)(params, buffers, x))
    torch.testing.assert_close(got, Apply(module).with_buffers(params, buffers, x, key=KEY), rtol=1e-4, atol=1e-5)
    in_eval = functools.partial(f, of=keyed.eval())  # which makes none of the draws of the call before
    got = fs.device_get(fs.shard_map(in_eval, mesh=fs.make_mesh(data=2), **specs)(params, buffers, x))
    torch.testing.assert_close(got, Apply(module).eval().with_buffers(params, buffers, x))
    assert torch.equal(keyed.eval().train(False)(params, buffers, x), copy.deepcopy(module).eval()(x))


# --- models of transformers ------------------------------------------------------------------------------------

B, T, V = 8, 5, 61
MODELS = {  # name -> (class, config); in train mode, with the rates of dropout that transformers has by default
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": V, "n_positions": 8, "n_embd": 12, "n_layer": 1, "n_head": 2,
                                 "bos_token_id": 0, "eos_token_id": 0}),
    "bert": ("BertForMaskedLM", {"vocab_size": V, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1,
                                 "num_attention_heads": 2, "max_position_embeddings": 8}),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": V, "d_model": 12, "d_kv": 6, "d_ff": 20, "num_layers": 1,
                                          "num_heads": 2, "decoder_start_token_id": 0}),
}  # fmt: skip
LAYOUTS = {  # name -> (mesh, the axes of the batch, the axis that shards the leaves)
    "data=1": ({"data": 1}, "data", None),
    "data=2": ({"data": 2}, "data", "data"),
    "data=4": ({"data": 4}, "data", None),
    "data=2, model=2": ({"data": 2, "model": 2}, "data", "model"),
    "replica=2, shard=2": ({"replica": 2, "shard": 2}, ("replica", "shard"), "shard"),
    "data=3": ({"data": 3}, "data", "data"),  # 3, 3, 2 examples
}


@functools.cache
def model(name):
    """A model in train mode, its inputs, and its loss and gradients by the masks of KEY, each injected by hand."""
    hf = pytest.importorskip("transformers")
    cls = getattr(hf, MODELS[name][0])
    torch.manual_seed(0)
    module = cls(cls.config_class(**MODELS[name][1])).train()
    batch = {n: torch.randint(1, V, (B, T), generator=torch.Generator().manual_seed(i))
             for i, n in enumerate(("input_ids", "labels"))}  # fmt: skip
    dense = copy.deepcopy(module)
    dense.set_attn_implementation("eager")  # whose dropout is F.dropout
    numbers = itertools.count()

    def dropout(x, p=0.5, training=True, inplace=False):
        if not training or p == 0:
            return x
        return x * fs.random.bernoulli(fs.fold_in(KEY, next(numbers)), x.shape, p=1 - p) / (1 - p)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", dropout)
        loss = dense(**batch).loss
    loss.backward()
    grads = {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in dense.named_parameters()}
    assert next(numbers) >= 4
    return module, batch, loss.detach(), grads


TWO_AXES = "data=2, model=2"


@pytest.mark.parametrize(("name", "layout"), [
    *slow_unless([("gpt2", TWO_AXES)], [(name, TWO_AXES) for name in MODELS]),
    *(pytest.param("gpt2", name, marks=pytest.mark.slow) for name in LAYOUTS if name != TWO_AXES),
    pytest.param("bert", "replica=2, shard=2", marks=pytest.mark.slow),
    pytest.param("t5", "data=3", marks=pytest.mark.slow),
])  # fmt: skip
def test_loss_and_gradients_in_train_mode_equal_the_dense_model_with_the_same_masks(name, layout):
    module, batch, expected_loss, expected_grads = model(name)
    sizes, over, shard = LAYOUTS[layout]
    params, buffers = leaves(module)
    axes = tuple(sizes)
    specs = fs.fully_shard({n: P() for n in params}, params, axis=shard) if shard else {n: P() for n in params}
    apply = Apply(module).draws_over(over)

    @fs.shard_map(mesh=fs.make_mesh(**sizes), in_specs=(specs, P(), P(over), P()), out_specs=(P(), specs))
    def step(p, b, batch, key):
        def loss_fn(p):
            whole = fs.unshard(p, specs, axes, shapes=params)
            loss = apply(whole, fs.pvary(b, axes), **batch, key=key).loss  # the mean of this rank's tokens
            total = fs.psum(loss * batch["labels"].shape[0] / B, over)
            return fs.pmean(total, "model") if "model" in sizes else total

        return fs.value_and_grad(loss_fn)(p)

    for _ in range(2):  # checked, and not
        loss, grads = fs.device_get(step(params, buffers, batch, KEY))
        torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0.0)
        size = max(float(x.abs().max()) for x in expected_grads.values())
        for n, x in expected_grads.items():  # a gradient that is 0 in exact arithmetic is a sum of larger terms
            torch.testing.assert_close(grads[n], x, rtol=1e-4, atol=1e-6 * size, msg=lambda m, n=n: f"{n}: {m}")


# --- transforms -----------------------------------------------------------------------------------------------


def test_draws_are_the_same_under_transforms():
    apply, x = Apply(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))), input_of(2)
    params, _ = leaves(apply.module)

    def loss(x):
        return apply(params, {}, x, key=KEY).square().sum()

    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    for grad in (fs.grad(loss), torch.func.grad(loss), fs.grad(fs.remat(loss)), torch.func.grad(fs.remat(loss))):
        torch.testing.assert_close(grad(x), leaf.grad)
    torch.testing.assert_close(torch.func.jvp(loss, (x,), (x,))[1], (leaf.grad * x).sum())
    rows = torch.func.vmap(lambda row: apply(params, {}, row, key=KEY), randomness="same")(x)
    torch.testing.assert_close(rows, torch.stack([apply(params, {}, row, key=KEY) for row in x]))


@pytest.mark.parametrize("kind", ["attention", "lstm"])
def test_draws_are_the_same_in_inference_mode(kind):
    module = KINDS[kind]()
    apply, (params, buffers), x = Apply(module).draws_over("data"), leaves(module), input_of(5)

    @fs.shard_map(mesh=fs.make_mesh(data=2), in_specs=(P(), P("data")), out_specs=P("data"))
    def run(p, x):
        with torch.inference_mode():
            out = apply(fs.pvary(p, "data"), buffers, x, key=KEY)
        return out.clone()

    with torch.inference_mode():  # which runs another kernel of the LSTM
        expected = alone(module, x)
    torch.testing.assert_close(fs.device_get(run(params, x)), expected, rtol=1e-5, atol=1e-6)


def test_part_of_a_call_that_is_run_again_draws_the_same():
    draws = Draws("it", KEY)
    with draws:
        torch.rand(2)
        start = draws.number
        first = torch.rand(3), F.dropout(torch.ones(5), 0.5)
        torch.rand(4)
    with draws.resumed(start) as again:
        second = torch.rand(3), F.dropout(torch.ones(5), 0.5)
    assert all(map(torch.equal, first, second))
    assert (start, again.number, draws.number) == (1, 3, 4)


def test_forward_with_an_argument_key_takes_it():
    module = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    apply, (params, _), x = Apply(module), leaves(module), input_of(2)
    call = functools.partial(apply.with_key(KEY), params, {}, x, key=2 * x, value=x)
    torch.testing.assert_close(call(), call())
    torch.testing.assert_close(call()[0], apply.with_key(KEY)(params, {}, x, 2 * x, x)[0])
    assert not torch.equal(call()[0], apply(params, {}, x, key=2 * x, value=x)[0])
    assert error_text(apply, params, {}, x, value=x, key=KEY) == (
        "Apply(MultiheadAttention): forward has an argument 'key' of its own, and got a key of fs.random\n"
        "  fix: apply.with_key(key)(params, buffers, ...)"
    )


def test_forward_on_values_runs_with_the_dim_that_is_stated():
    module, x = Function(lambda x: F.dropout(x, 0.5) + torch.rand([]) if x.sum() != 0 else x), input_of(5)
    apply = Apply(module).draws_over("data", probe=False)
    f = lambda x: apply({}, {}, x, key=KEY)  # noqa: E731
    run = fs.shard_map(f, mesh=fs.make_mesh(data=2), in_specs=P("data"), out_specs=P("data"))
    assert torch.equal(fs.device_get(run(x)), alone(module, x))
    wrong = Apply(Function(lambda x: x * torch.rand(7, 1, 1)[:1])).draws_over("data", probe=False)
    assert "draw 0 is rand of [7, 1, 1], whose dim 0 has 7 entries, of 2 examples" in error_text(
        fs.shard_map(lambda x: wrong({}, {}, x, key=KEY), mesh=fs.make_mesh(data=2), in_specs=P("data"),
                     out_specs=P("data")), input_of(4))  # fmt: skip


# --- refused ----------------------------------------------------------------------------------------------------


def fused_attention(x):
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x[None], x[None], x[None], 0.3)[0][0]


def flat_time_major(x):
    return x.transpose(0, 1).reshape(-1, 8)


NOT_TOGETHER = "in which the entries of one example are not together"
REFUSED = {
    "dropout of [T*B]": (lambda x: F.dropout(flat_time_major(x), 0.5), f"bernoulli_ of f32[4*B, 8], {NOT_TOGETHER}"),
    "numbers for [T*B]": (lambda x: flat_time_major(x) * torch.rand(4 * len(x), 1),
                          f"mul of f32[4*B, 8], {NOT_TOGETHER}"),
    "two views": (lambda x: F.dropout(torch.cat([x, x]), 0.5), f"bernoulli_ of f32[2*B, 4, 8], {NOT_TOGETHER}"),
    "repeated": (lambda x: F.dropout(x.repeat(2, 1, 1), 0.5), f"bernoulli_ of f32[2*B, 4, 8], {NOT_TOGETHER}"),
    "pairs": (lambda x: F.dropout(x[:, 0] @ x[:, 0].T, 0.5), "of bool[B, B] draws a number for each pair of examples"),
    "shuffled": (lambda x: x[torch.randperm(len(x))], "randperm draws positions among all examples"),
    "resampled": (lambda x: x[torch.randint(len(x), (len(x),))], "randint draws positions among all examples"),
    "one by one": (lambda x: torch.stack([F.dropout(row, 0.5) for row in x]), "2 draws were made, and 1009 in a run"),
    "all but one": (lambda x: F.dropout(x[1:], 0.5), "is bernoulli_ of [1, 4, 8], and bernoulli_ of [1008, 4, 8] in"),
    "by a value": (lambda x: F.dropout(x, 0.5) if x.sum() else x, "forward failed on tensors without values"),
    "sorted": (lambda x: F.dropout(x[x[:, 0, 0].argsort()], 0.5), f"bernoulli_ of f32[B, 4, 8], {NOT_TOGETHER}"),
    "some": (lambda x: F.dropout(x[x > 0], 0.5).sum() + x, "DynamicOutputShapeException: aten.nonzero.default"),
    "numpy": (lambda x: x * np.random.rand(), "forward draws from numpy.random"),  # noqa: NPY002
    "random": (lambda x: x * random.randint(0, 3), "forward draws from random"),
    "a generator": (lambda x: x + torch.rand(8, generator=torch.Generator()), "rand draws from a generator of its own"),
    "fused attention": (fused_attention, "draws its dropout inside a fused kernel, where key= cannot reach it"),
    "poisson": (lambda x: torch.poisson(x.abs()), "poisson draws in a way that key= cannot replace"),
    "gamma": (lambda x: x * torch.distributions.Gamma(1.0, 1.0).sample(), "_standard_gamma draws in a way that"),
    "out": (lambda x: torch.rand(8, out=torch.empty(8)) + x, "rand draws in a way that key= cannot replace"),
    "all integers": (lambda x: x + torch.empty(8, dtype=torch.int64).random_(), f"random_ of range(0, {1 << 63})"),
}  # fmt: skip


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=pytest.mark.slow if name == "one by one" else ()) for name in REFUSED
])  # fmt: skip
def test_draw_that_would_differ_between_meshes_is_refused_at_its_line(name):
    f, text = REFUSED[name]
    message = error_text(on_mesh, Function(f), input_of(4))
    assert text in message
    assert "  fix: " in message
    assert "test_draws.py:" in message
    if name != "one by one":  # which is found at the end of the call
        assert " in <lambda>\n" in message or " in fused_attention\n" in message


def run_on(apply, spec, check="first", key=KEY, **sizes):
    f = lambda x: apply({}, {}, x, key=key)  # noqa: E731
    run = fs.shard_map(f, mesh=fs.make_mesh(**sizes), in_specs=spec, out_specs=spec, check=check)
    return fs.device_get(run(input_of(4)))


DROPOUT = Apply(nn.Dropout(0.5))
WRONG = {
    "not stated": (lambda: run_on(DROPOUT, P("data"), data=2),
        ("Apply(Dropout): with a key a region must say which axis splits the examples of a batch\n"
         '  fix: apply = apply.draws_over("data"); apply.draws_over(None) if each rank has all of them')),
    "no such axis": (lambda: run_on(DROPOUT.draws_over("date"), P("data"), data=2),
        "Apply(Dropout).draws_over: the mesh has no axis 'date'"),
    "the same on all ranks": (lambda: run_on(DROPOUT.draws_over("data"), P(), data=2),
        ("Apply(Dropout): draws_over('data'): no argument has a part of the batch: none varies over 'data'\n"
         "  fix: apply.draws_over(None), if each rank has all examples")),
    "stated as the same": (lambda: run_on(DROPOUT.draws_over(None), P("data"), data=2),
        ("Apply(Dropout).draws_over(None) is to name the axes that split the examples of the arguments\n"
         "  fix: name those that split the examples; no draw of a module can be split in another dim")),
    "an axis too few": (lambda: run_on(DROPOUT.draws_over("data"), P(("data", "model")), data=2, model=2),
        ("Apply(Dropout): draws_over('data'): args[0] has no dim that 'data' alone split\n"
         "  argument  f32[1, 4, 8]    spec  P(('data', 'model'))\n")),
    "another order": (lambda: run_on(DROPOUT.draws_over(("b", "a")), P(("a", "b")), a=2, b=2),
        "args[0] has no dim that 'b' and 'a' alone split"),
    "two dims": (lambda: run_on(DROPOUT.draws_over(("a", "b")), P("a", "b"), a=2, b=2),
        "args[0] has no dim that 'a' and 'b' alone split"),
    "another axis": (lambda: run_on(DROPOUT.draws_over("data"), P("data", None, "model"), data=2, model=2),
        "mul of a random draw that is the same on every rank of 'model' with a varying operand"),
    "never checked": (lambda: run_on(DROPOUT.draws_over("data"), P("data"), check="never", data=2),
        "the first call for arguments of these shapes must be a checked one"),
    "no key": (lambda: run_on(DROPOUT, P("data"), key=None, data=2), "bernoulli draws from torch's own generator"),
    "an int": (lambda: DROPOUT({}, {}, input_of(4), key=3), "with_key: key must be a Tensor or None, got 3"),
    "floats": (lambda: DROPOUT({}, {}, input_of(4), key=torch.ones(2)), "Apply(Dropout): key=: not a key"),
    "vmap": (lambda: torch.func.vmap(lambda k: DROPOUT({}, {}, input_of(4), key=k))(fs.split(KEY)),
        "Apply(Dropout): torch.vmap over keys"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_error_text_of_a_wrong_call(name):
    call, text = WRONG[name]
    assert text in error_text(call)


def test_draw_for_a_value_of_which_each_rank_has_a_copy_is_the_same():
    apply, x = Apply(Function(lambda x: F.dropout(x, 0.5))).draws_over("data"), input_of(4)
    f = lambda x: fs.pmean(apply({}, {}, fs.pvary(x, "model"), key=KEY), "model")  # noqa: E731
    run = fs.shard_map(f, mesh=fs.make_mesh(data=2, model=2), in_specs=P("data"), out_specs=P("data"))
    torch.testing.assert_close(fs.device_get(run(x)), alone(apply.module, x))
