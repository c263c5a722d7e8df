"""`defer`: what a constructor does, replayed on any box of any leaf, gives the same values on every mesh."""

from __future__ import annotations

import functools
import inspect
import math
import random as python_random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fshard as fs
from fshard import P, ShardingError
from fshard.interop.defer import graph
from fshard.interop.defer.constructor import Recorded, defer
from fshard.interop.defer.replay import POINTWISE, Replay
from fshard.spec import full_box

CPU = torch.device("cpu")
ONE = fs.make_mesh(one=1)
MESHES = [{"a": 2}, {"a": 3}, {"a": 2, "b": 2}]


def same_bits(a, b, where=""):
    assert (a.dtype, a.shape) == (b.dtype, b.shape), where
    as_bytes = lambda x: x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)  # noqa: E731
    assert torch.equal(as_bytes(a), as_bytes(b)), where


def on_one(tree, n=7):
    return fs.device_get(fs.materialize(tree, P(), ONE, key=fs.key(n)))


def specs_for(shape, axes):
    """Row, column, both, and what `fully_shard` adds."""
    names = tuple(axes)
    found = {P(), fs.fully_shard(P(), torch.empty(shape, device="meta"), axis="a")}
    if shape:
        found |= {P("a"), P(..., "a"), P(..., names[::-1])}
    if len(shape) > 1 and "b" in axes:
        found |= {P("b", ..., "a")}
    return sorted(found, key=repr)


def check_law(tree, values, meshes=MESHES, most=2):
    """Every part of every leaf, placed by any spec on any mesh, is that part of its value on no mesh."""
    for axes in meshes:
        mesh = fs.make_mesh(**axes)
        leaves = fs.tree.leaves(tree)
        options = [specs_for(x.shape, axes) for x in leaves]
        for turn in range(max(map(len, options), default=0) if len(leaves) < 6 else most):  # many leaves take turns
            specs = iter([s[(i + turn) % len(s)] for i, s in enumerate(options)])
            specs = fs.tree.map(lambda _, specs=specs: next(specs), tree)
            placed = fs.materialize(tree, specs, mesh, key=fs.key(7))
            for (path, leaf), expected in zip(fs.tree.leaves_with_path(placed), fs.tree.leaves(values), strict=True):
                for rank, shard in zip(mesh.ranks, leaf.shards, strict=True):
                    same_bits(shard, expected[leaf.box(rank)], f"{path} {leaf.spec} on {axes}, rank {rank}")


def is_drawn(leaf):
    if isinstance(leaf.init, Recorded):
        return bool(graph.draws(leaf.init.node))
    return isinstance(leaf.init, (fs.init.Normal, fs.init.Uniform, fs.init.TruncNormal))


def check_distribution(tree, values, eager, leaves=1000):
    """As the eager constructor: what is not drawn exactly, what is drawn by moments and by Kolmogorov and Smirnov.

    Keys and seeds are fixed, so a test passes always or never. The level of each comparison is 0.001 / `leaves`, the
    number of leaves in all: were both sides right, one set of seeds in a thousand would fail somewhere.
    """
    for kind, theirs in (("params", dict(eager.named_parameters())), ("buffers", dict(eager.named_buffers()))):
        assert list(tree[kind]) == list(theirs)
        for name, x in theirs.items():
            ours, x = values[kind][name], x.detach()
            assert (ours.dtype, ours.shape) == (x.dtype, x.shape), name
            if not is_drawn(tree[kind][name]):
                same_bits(ours, x, name)
                continue
            assert torch.isfinite(ours).all(), name
            if x.ndim > 1:  # padding rows
                assert torch.equal((ours == 0).flatten(1).all(1), (x == 0).flatten(1).all(1)), name
            a, b = ours.double().flatten().sort()[0], x.double().flatten().sort()[0]
            n = a.numel()
            scale = float(torch.stack([a, b]).std(correction=0)) if n > 1 else float(torch.stack([a, b]).abs().max())
            sigmas = math.sqrt(2 * math.log(2 * leaves / 0.001))  # of a normal, at this level
            assert abs(float(a.mean() - b.mean())) <= sigmas * scale * math.sqrt(2 / n) + 1e-12, name
            if n > 50:
                ratio = float(a.std() / b.std())
                assert abs(math.log(ratio)) <= sigmas * math.sqrt(1 / n), (name, ratio)
            both = torch.cat([a, b])
            apart = (torch.searchsorted(a, both, right=True) - torch.searchsorted(b, both, right=True)).abs().max() / n
            assert float(apart) <= math.sqrt(-math.log(0.001 / leaves / 2) / 2) * math.sqrt(2 / n), name


def eagerly(constructor, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return constructor()


def quietly(constructor):
    def built():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return constructor()

    return built


# --- every layer of torch.nn that has leaves -----------------------------------------------------------------

LAYERS = {
    "Linear": lambda: nn.Linear(30, 21),
    "Bilinear": lambda: nn.Bilinear(5, 7, 6),
    "NonDynamicallyQuantizableLinear": lambda: nn.modules.linear.NonDynamicallyQuantizableLinear(9, 7),
    **{
        f"{kind}{d}d": functools.partial(getattr(nn, f"{kind}{d}d"), 6, 9, 3)
        for kind in ("Conv", "ConvTranspose")
        for d in (1, 2, 3)
    },
    "Embedding": lambda: nn.Embedding(29, 7),
    "EmbeddingBag": lambda: nn.EmbeddingBag(29, 7),
    **{f"BatchNorm{d}d": functools.partial(getattr(nn, f"BatchNorm{d}d"), 13) for d in (1, 2, 3)},
    "SyncBatchNorm": lambda: nn.SyncBatchNorm(13),
    **{
        f"InstanceNorm{d}d": functools.partial(
            getattr(nn, f"InstanceNorm{d}d"), 13, affine=True, track_running_stats=True
        )
        for d in (1, 2, 3)
    },
    "GroupNorm": lambda: nn.GroupNorm(3, 12),
    "LayerNorm": lambda: nn.LayerNorm((3, 13)),
    "RMSNorm": lambda: nn.RMSNorm(13),
    "PReLU": lambda: nn.PReLU(13),
    "RNN": lambda: nn.RNN(7, 9, 2),
    "LSTM": lambda: nn.LSTM(7, 9, 2, bidirectional=True, proj_size=3),
    "GRU": lambda: nn.GRU(7, 9, bias=False),
    "RNNBase": lambda: nn.RNNBase("GRU", 7, 9),
    "RNNCell": lambda: nn.RNNCell(7, 9),
    "LSTMCell": lambda: nn.LSTMCell(7, 9),
    "GRUCell": lambda: nn.GRUCell(7, 9),
    "RNNCellBase": lambda: nn.RNNCellBase(7, 9, True, 3),
    "MultiheadAttention": lambda: nn.MultiheadAttention(12, 3, add_bias_kv=True, kdim=5, vdim=7),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(12, 3, 10),
    "TransformerDecoderLayer": lambda: nn.TransformerDecoderLayer(12, 3, 10),
    "TransformerEncoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 3, 10), 2),
    "TransformerDecoder": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 3, 10), 2),
    "Transformer": lambda: nn.Transformer(12, 3, 1, 1, 10),
    "AdaptiveLogSoftmaxWithLoss": lambda: nn.AdaptiveLogSoftmaxWithLoss(12, 30, [5, 11]),
    "BCEWithLogitsLoss": lambda: nn.BCEWithLogitsLoss(weight=torch.arange(4.0), pos_weight=torch.tensor([2.0, 3.0])),
    "LinearCrossEntropyLoss": lambda: nn.LinearCrossEntropyLoss(12, 7),  # new in torch 2.13
    "BCELoss": lambda: nn.BCELoss(weight=torch.tensor([1.0, 2.0])),
    "CrossEntropyLoss": lambda: nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 0.5])),
    "NLLLoss": lambda: nn.NLLLoss(torch.tensor([1.0, 2.0, 0.5])),
    "MultiMarginLoss": lambda: nn.MultiMarginLoss(weight=torch.tensor([1.0, 2.0])),
    "MultiLabelSoftMarginLoss": lambda: nn.MultiLabelSoftMarginLoss(weight=torch.tensor([1.0, 2.0])),
}
VARIANTS = {
    "padding row 0": lambda: nn.Embedding(29, 7, padding_idx=0),
    "padding row mid": lambda: nn.Embedding(29, 7, padding_idx=17),
    "padding row -1": lambda: nn.EmbeddingBag(29, 7, padding_idx=-1),
    "half": lambda: nn.Linear(30, 21).half(),
    "bfloat16 norm": lambda: nn.Sequential(nn.Conv1d(6, 9, 3), nn.BatchNorm1d(9)).to(torch.bfloat16),
    "dtype=": lambda: nn.Linear(30, 21, dtype=torch.float64),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Conv1d(6, 9, 3)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(12, 9)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(12, 9)),
    "xavier": lambda: made(nn.init.xavier_normal_),
    "trunc_normal_": lambda: made(lambda w: nn.init.trunc_normal_(w, std=0.5, a=-0.7, b=0.3)),
    "orthogonal_": lambda: made(lambda w: nn.init.orthogonal_(w, gain=2.0)),
    "orthogonal_ wide": lambda: made(nn.init.orthogonal_, (9, 5, 4)),
    "dirac_": lambda: made(lambda w: nn.init.dirac_(w, groups=2), (12, 5, 3)),
    "eye_": lambda: made(nn.init.eye_),
    "sparse_": lambda: made(lambda w: nn.init.sparse_(w, sparsity=0.3)),
    "exponential_": lambda: made(lambda w: w.exponential_(2.0)),
    "log_normal_": lambda: made(lambda w: w.log_normal_(0.5, 0.25)),
    "cauchy_": lambda: made(lambda w: w.cauchy_(1.0, 0.1).clamp_(-3, 3)),
    "geometric_": lambda: made(lambda w: w.geometric_(0.3)),
    "bernoulli_": lambda: made(lambda w: w.bernoulli_(0.3)),
    "bernoulli of tensor": lambda: made(lambda w: w.copy_(torch.bernoulli(torch.linspace(0, 1, 21).expand(30, 21)))),
    "randint": lambda: made(lambda w: w.copy_(torch.randint(-3, 9, (30, 21)))),
    "random_": lambda: made(lambda w: w.random_(5, 50)),
    "dropout": lambda: made(lambda w: w.copy_(nn.functional.dropout(torch.ones(30, 21), 0.4))),
    "normal of tensors": lambda: made(lambda w: w.copy_(torch.normal(torch.arange(21.0).expand(30, 21), 0.5))),
    "randperm": lambda: made(lambda w: w.copy_(torch.randperm(630).view(30, 21))),
}


class Made(nn.Module):
    def __init__(self, init, shape):
        super().__init__()
        self.w = nn.Parameter(torch.empty(shape))
        with torch.no_grad():
            init(self.w)


def made(init, shape=(30, 21)):
    return Made(init, shape)


@functools.cache
def deferred(name):
    return defer(quietly({**LAYERS, **VARIANTS}[name]))


@pytest.mark.parametrize("name", [*LAYERS, *VARIANTS])
def test_a_layer_is_the_same_on_every_mesh_and_distributed_as_eager(name):
    _, tree = deferred(name)
    values = on_one(tree)
    check_law(tree, values)
    check_distribution(tree, values, eagerly(quietly({**LAYERS, **VARIANTS}[name])))


def test_no_layer_of_torch_is_missing():
    """Each class of torch.nn is in LAYERS, or is made without leaves, or holds other modules, or is lazy."""
    holders = {"Module", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict", "Container"}
    tries = ((), (2,), (2, 2), (2, 2, 2), ((2, 2),), ((2, 2), 2), (2.0, 2.0), ((2, 2), (2, 2)))
    found = {n: c for m in (nn, nn.modules.linear) for n, c in vars(m).items() if inspect.isclass(c)}
    missing = []
    for name, kind in found.items():
        if not issubclass(kind, nn.Module) or name in LAYERS or name in holders or name.startswith("Lazy"):
            continue
        for args in tries:
            try:
                module = quietly(functools.partial(kind, *args))()
            except (TypeError, ValueError):
                continue
            if list(module.parameters()) or list(module.buffers()):
                missing.append(name)
            break
        else:
            missing.append(name)
    assert not missing


# --- values ---------------------------------------------------------------------------------------------------


def test_a_plain_draw_is_the_initializer_and_has_its_values():
    _, tree = defer(lambda: nn.Linear(64, 256))
    assert repr(tree["params"]["bias"]) == "f32[256] = uniform(low=-0.125, high=0.125)"
    like = {"params": {"bias": fs.init.uniform(256, low=-0.125, high=0.125)}}
    same_bits(on_one(tree)["params"]["bias"], on_one(like)["params"]["bias"])
    _, tree = defer(lambda: made(lambda w: w.normal_(0, 0.02)).to(torch.bfloat16))
    assert repr(tree["params"]["w"]) == "bf16[30, 21] = normal(std=0.02)"
    like = fs.init.normal((30, 21), std=0.02, dtype=torch.bfloat16)
    same_bits(on_one(tree["params"])["w"], on_one({"w": like})["w"])


def test_a_leaf_says_how_it_is_made():
    _, tree = deferred("padding row 0")
    assert repr(tree["params"]["weight"]) == "f32[29, 7] = recorded(normal, write)"
    _, tree = deferred("half")
    assert repr(tree["params"]["bias"]) == "f16[21] = recorded(uniform, cast)"
    apply, tree = deferred("weight_norm")
    v, g = "parametrizations.weight.original1", "parametrizations.weight.original0"
    assert repr(tree["params"][g]) == "f32[9, 1, 1] = recorded(uniform, reshape, norm), 684 bytes in full"
    assert repr(tree["params"][v]).endswith(f" of {g}")
    assert apply.whole == {g: 684}


def test_copies_are_equal_and_layers_made_one_by_one_are_not():
    values = on_one(deferred("TransformerEncoder")[1])["params"]
    for name, x in values.items():
        if name.startswith("layers.0."):
            same_bits(x, values[name.replace("layers.0.", "layers.1.")])
    values = on_one(defer(lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))[1])["params"]
    assert not torch.equal(values["0.weight"], values["1.weight"])


def test_copies_stay_equal_wherever_the_tree_is():
    _, tree = deferred("TransformerEncoder")
    alone, deep = on_one(tree["params"]), on_one({"encoders": [{"x": tree}, {"x": tree["params"]}]})["encoders"]
    for values in (alone, deep[0]["x"]["params"], deep[1]["x"]):
        same_bits(values["layers.0.linear1.weight"], values["layers.1.linear1.weight"])


def test_two_modules_in_one_tree_differ_and_leaves_do_not_disturb_each_other():
    trees = {name: defer(lambda: nn.Sequential(nn.Linear(4, 4)))[1] for name in "ab"}
    values = on_one(trees)
    assert not torch.equal(values["a"]["params"]["0.weight"], values["b"]["params"]["0.weight"])
    more = defer(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))[1]
    same_bits(on_one({"a": more})["a"]["params"]["0.weight"], values["a"]["params"]["0.weight"])


def test_a_tie_is_one_leaf():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(11, 4)
            self.head = nn.Linear(4, 11, bias=False)
            self.head.weight = self.wte.weight

    apply, tree = defer(Tied)
    assert list(tree["params"]) == ["wte.weight"]
    assert apply.ties == {"head.weight": "wte.weight"}


def test_buffers_persistent_or_not():
    class Buffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tril(torch.ones(9, 9, dtype=torch.bool)).view(1, 1, 9, 9))
            self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, 8, 2).float() / 8), persistent=False)
            self.register_buffer("ids", torch.arange(9).expand(1, -1), persistent=False)
            self.register_buffer("none", None)

    apply, tree = defer(Buffers)
    assert apply.transient == {"inv_freq", "ids"}
    values = on_one(tree)
    check_law(tree, values)
    check_distribution(tree, values, Buffers())


def test_param_data_is_followed():
    class Data(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.zeros(4, 3))
            self.b = nn.Parameter(torch.zeros(5))
            self.a.data = torch.arange(12.0).view(3, 4).t()
            self.b.data.fill_(2.0)
            self.a.data[1:3, 0] = 7

    _, tree = defer(Data)
    check_distribution(tree, on_one(tree), Data())
    check_law(tree, on_one(tree))


class Odd(nn.Module):
    """Views of views, in-place arithmetic, literals that are written to, and values that are looked at."""

    def __init__(self):
        super().__init__()
        y = torch.arange(24.0).reshape(4, 6)
        y[1] += 1
        y[:, ::2] *= 3
        y.t()[-1] = y[:, 0]
        y[1:, 1:5].view(3, 4)[:, 1].neg_()
        y[:, ::2][:, 1:].mul_(5)
        self.register_buffer("y", y)
        self.register_buffer("strided", y[::2, 1::2][1:, 1::2])
        x = torch.empty(7, dtype=torch.long)
        x[::2], x[1::2] = 7, torch.arange(3)
        self.register_buffer("x", x)
        for _ in range(40):
            y[0] += y[1]
        r = torch.tensor([1.0, 2.0, 3.0])
        r[1:] = torch.ones(2).mul(5)
        self.register_buffer("r", r)
        literal = torch.tensor([1.0, 2.0])
        self.register_buffer("before", torch.ones(2) + literal)
        literal.mul_(3)
        self.register_buffer("after", torch.ones(2) + literal)
        self.register_buffer("z", torch.zeros(5, 5).fill_diagonal_(2))
        self.register_buffer("cat", torch.cat([torch.zeros(2, 3), torch.arange(9.0).view(3, 3)]))
        self.register_buffer("stack", torch.stack([torch.zeros(5), torch.arange(5.0)], 1))
        self.register_buffer("some", torch.arange(6.0)[torch.arange(6) % 2 == 0])
        self.register_buffer("fused", torch.ones(3, 4, 5).permute(2, 0, 1).reshape(5, 12).contiguous())
        w = torch.zeros(12, 4)
        w.view(3, 4, 4)[1].fill_(2.0)
        w.chunk(3)[2].copy_(torch.arange(4.0))
        self.register_buffer("w", w)
        t = torch.ones(2, 3).t_()
        t[0] = 4
        self.register_buffer("t", t)
        self.register_buffer("tri", torch.triu(torch.full((6, 7), -math.inf), diagonal=1))
        self.steps = torch.linspace(0, 1, 5).tolist()
        self.total = torch.arange(5).sum().item() if torch.ones(2).any() else None
        self.array = torch.arange(4).numpy()
        self.plain = [torch.arange(3.0), {"one": torch.ones(())}]


def test_odd_constructors_come_out_as_eager():
    apply, tree = defer(Odd)
    values, eager = on_one(tree), Odd()
    check_distribution(tree, values, eager)
    check_law(tree, values)
    module = apply.module
    assert (module.steps, module.total, module.array.tolist()) == (eager.steps, eager.total, [0, 1, 2, 3])
    same_bits(module.plain[0], eager.plain[0])
    same_bits(module.plain[1]["one"], eager.plain[1]["one"])


def shuffled(steps):
    """A buffer after random views, writes through them, casts and arithmetic: the same program for one seed."""
    r = python_random.Random(steps)

    def some_view(x):
        for _ in range(r.randrange(4)):
            d = r.randrange(x.ndim) if x.ndim else None
            kind = r.choice(["slice", "slice", "select", "t", "unsqueeze", "squeeze", "view", "permute", "split"])
            if kind == "unsqueeze":
                x = x.unsqueeze(r.randrange(x.ndim + 1))
            elif d is None or x.shape[d] == 0:
                continue
            elif kind == "slice":
                a = r.randrange(x.shape[d])
                x = x[(slice(None),) * d + (slice(a, r.randint(a + 1, x.shape[d]), r.choice([1, 1, 2, 3])),)]
            elif kind == "select":
                x = x.select(d, r.randrange(-x.shape[d], x.shape[d]))
            elif kind == "t":
                x = x.transpose(d, r.randrange(x.ndim))
            elif kind == "squeeze":
                x = x.squeeze(d)
            elif kind == "permute":
                x = x.permute(r.sample(range(x.ndim), x.ndim))
            elif kind == "split":
                x = r.choice(x.split(r.randint(1, x.shape[d]), d))
            elif x.is_contiguous():
                x = x.view(-1) if r.random() < 0.5 else x.view(1, *x.shape)
        return x

    def build():
        r.seed(steps)
        module = nn.Module()
        x = torch.arange(4.0 * 6 * 5).view(4, 6, 5)
        for i in range(steps % 9 + 1):
            v = some_view(x)
            what = r.choice(["fill", "add", "mul", "copy", "self", "neg", "clone", "literal", "where"])
            if what == "fill":
                v.fill_(i)
            elif what == "add":
                v += 0.5 * v.abs()
            elif what == "mul":
                v.mul_(torch.tensor(1.25))
            elif what == "copy":
                v.copy_(torch.arange(float(v.numel())).view(v.shape))
            elif what == "self" and v.ndim:
                v.copy_(v.flip(0) if r.random() < 0.3 else v.clone().add_(v[:1].clone()))
            elif what == "neg":
                v.neg_()
            elif what == "clone":
                x = x.clone()
            elif what == "literal" and v.ndim:
                literal = torch.ones(v.shape[-1]) * 3
                literal[:1] = v.sum()
                v.sub_(literal)
            else:
                v.copy_(torch.where(v > 9, v, torch.zeros(())))
        module.register_buffer("x", x)
        module.register_buffer("v", some_view(x))
        return module

    return build


@pytest.mark.parametrize("start", [0, 20, 40])
def test_any_program_of_views_and_writes_comes_out_as_eager(start):
    for steps in range(start, start + 20):
        tree = defer(shuffled(steps))[1]
        values = on_one(tree)
        for name, x in shuffled(steps)().named_buffers():
            same_bits(values["buffers"][name], x, f"program {steps}: {name}")
        check_law(tree, values, [{"a": 3}, {"a": 2, "b": 2}], most=1)


class Normed(nn.Module):
    """A constructor that runs its own layers: what they write and give is recorded as well."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, momentum=0.5)
        out = self.norm(torch.arange(12.0).view(4, 3))
        self.register_buffer("out", out.detach())
        a = torch.ones(2, 2)
        b = a.clone()
        torch._foreach_add_([a, b], [b, a])
        self.register_buffer("a", a)
        self.register_buffer("b", b)
        self.register_buffer("outer", torch.mul(a, 3, out=torch.empty(2, 2)))


def test_operations_that_write_to_several_tensors():
    _, tree = defer(Normed)
    check_distribution(tree, on_one(tree), Normed())
    check_law(tree, on_one(tree))


def test_apply_runs_the_module():
    apply, tree = defer(lambda: nn.LSTM(3, 4, batch_first=True))
    values, x = on_one(tree), torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    eager = nn.LSTM(3, 4, batch_first=True)
    eager.load_state_dict(values["params"])
    same_bits(apply(values["params"], values["buffers"], x)[0], eager(x)[0])


def test_the_default_dtype_of_the_constructor_is_kept():
    def half():
        torch.set_default_dtype(torch.bfloat16)
        try:
            return Made(lambda w: w.copy_(torch.arange(630).view(30, 21) / 7), (30, 21))
        finally:
            torch.set_default_dtype(torch.float32)

    _, tree = defer(half)
    check_distribution(tree, on_one(tree), half())


def test_several_draws_of_a_leaf_have_keys_of_their_own():
    def two(w):
        w[:15].normal_()
        w[15:].normal_()

    def added(w):
        w.normal_().add_(torch.randn(30, 21))

    tree = defer(lambda: made(two))[1]
    values = on_one(tree)
    check_law(tree, values)
    assert not torch.equal(values["params"]["w"][:15], values["params"]["w"][15:])
    tree = defer(lambda: made(added))[1]
    check_law(tree, on_one(tree))
    assert float(on_one(tree)["params"]["w"].std()) == pytest.approx(math.sqrt(2), rel=0.1)


def test_overwritten_values_are_not_computed(monkeypatch):
    def often(w):
        for _ in range(5):
            nn.init.kaiming_uniform_(w)
            w.mul_(2)
        w.uniform_(-1, 1)
        w[3].zero_()

    leaf = defer(lambda: made(often))[1]["params"]["w"]
    computed = []
    compute = Replay._compute
    monkeypatch.setattr(Replay, "_compute", lambda *args: (computed.append(type(args[1]).__name__), compute(*args))[1])
    leaf.init.fill(fs.key(0), leaf.shape, full_box(leaf.shape), leaf.dtype, CPU)
    assert sorted(computed) == ["Draw", "Full", "Write"]
    computed.clear()
    leaf.init.fill(fs.key(0), leaf.shape, (slice(10, 20), slice(0, 21)), leaf.dtype, CPU)
    assert sorted(computed) == ["Draw", "Write"]  # the row that is written is not in the box
    # a write over everything is not a write: the draw is all there is
    leaf = defer(lambda: made(lambda w: (w.zero_(), w[:].normal_())))[1]["params"]["w"]
    assert repr(leaf) == "f32[30, 21] = normal()"


def test_large_boxes_are_made_in_steps_of_bounded_size():
    big = (1500, 1 << 10)
    leaf = defer(lambda: made(lambda w: w.normal_().mul_(0.5), big))[1]["params"]["w"].to(torch.bfloat16)
    made_ = leaf.init.fill(fs.key(0), leaf.shape, full_box(big), torch.bfloat16, CPU)
    part = leaf.init.fill(fs.key(0), leaf.shape, (slice(1000, 1100), slice(7, 900)), torch.bfloat16, CPU)
    same_bits(part, made_[1000:1100, 7:900])


def test_memory_that_is_never_written_is_not_a_number():
    values = on_one(defer(lambda: made(lambda w: w[:7].zero_()))[1])["params"]["w"]
    assert torch.equal(values.isnan().all(1), torch.arange(30) >= 7)
    assert on_one(defer(lambda: nn.utils.skip_init(nn.Linear, 2, 2))[1])["params"]["weight"].isnan().all()


def test_the_reference_is_eager_construction_bit_by_bit():
    state = torch.get_rng_state()
    apply, tree = defer(lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)), reference=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert repr(tree["params"]["0.weight"]) == "f32[7, 5] = reference(seed=3)"
    torch.random.manual_seed(3)
    eager = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    torch.set_rng_state(state)
    values = on_one(tree)
    check_law(tree, values)
    for name, x in [*eager.named_parameters(), *eager.named_buffers()]:
        same_bits({**values["params"], **values["buffers"]}[name], x.detach())
    assert all(x.is_meta for x in apply.module.parameters())


def test_recording_leaves_no_trace():
    before = (torch.get_rng_state(), nn.init._no_grad_trunc_normal_, torch.utils.swap_tensors)
    python, numbers = python_random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    defer(lambda: made(nn.init.trunc_normal_).half())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (nn.init._no_grad_trunc_normal_, torch.utils.swap_tensors) == before[1:]
    assert (python_random.getstate(), np.random.get_state()[1].tolist()) == (python, numbers)  # noqa: NPY002
    assert not torch.nn.init.trunc_normal_(torch.empty(3)).isnan().any()


def test_a_truncated_normal_of_another_thread_is_torchs_own():
    seen = []

    def constructor():
        other = threading.Thread(target=lambda: seen.append(nn.init.trunc_normal_(torch.empty(50), a=-0.1, b=0.1)))
        other.start()
        other.join()
        return made(nn.init.trunc_normal_)

    defer(constructor)
    assert type(seen[0]) is torch.Tensor
    assert seen[0].abs().max() <= 0.1


def test_other_parts_of_the_library_take_the_tree():
    _, tree = deferred("TransformerEncoder")
    state = fs.optim.adamw(0.1).init(tree["params"])
    assert fs.tree.leaves(on_one(state))
    half = fs.tree.map(lambda x: x.to(torch.bfloat16), tree)
    values = on_one(half)["params"]
    assert values["layers.1.linear1.weight"].dtype == torch.bfloat16
    same_bits(values["layers.1.linear1.weight"], on_one(tree)["params"]["layers.0.linear1.weight"].bfloat16())
    specs = fs.tree.map(lambda x: P("a") if x.ndim else P(), tree)
    assert "uniform" in str(fs.show(tree, mesh={"a": 2}, specs=specs))


def test_a_constructor_may_ask_for_any_device():
    expected = on_one(defer(lambda: nn.Linear(4, 4))[1])
    for build in (lambda: nn.Linear(4, 4, device="meta"), lambda: nn.Linear(4, 4, device="cuda")):
        fs.tree.map(same_bits, on_one(defer(build)[1]), expected)


# --- pointwise operations ------------------------------------------------------------------------------------

ONE_ARGUMENT = {"abs", "ceil", "cos", "erfinv", "exp", "floor", "log", "neg", "reciprocal", "round", "rsqrt", "sgn",
                "sign", "sin", "sqrt", "trunc"}  # fmt: skip
ON_BITS = ("bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor")
ON_BOOLS = ("logical_and", "logical_not", "logical_or", "logical_xor")


def calls(name):
    """Ways to call an operation on (x, y, mask): tensors, numbers, and in place."""
    aten = getattr(torch, name, None) or getattr(torch.ops.aten, name)
    if name in ONE_ARGUMENT:
        return [lambda x, y, m: aten(x), lambda x, y, m: getattr(x.clone(), f"{name}_")()]
    if name == "where":
        return [lambda x, y, m: torch.where(m, x, y), lambda x, y, m: torch.where(m, x, 0.3)]
    if name == "masked_fill":
        return [lambda x, y, m: x.masked_fill(m, 0.3)]
    if name.startswith("clamp"):
        bounds = {"clamp": (-0.3, 0.3)}.get(name, (0.3,))
        return [lambda x, y, m: aten(x, *bounds), lambda x, y, m: aten(x, *([y] * len(bounds)))]
    if name in ON_BITS or name == "logical_not":
        b = (lambda x: x.float().view(torch.int32)) if name in ON_BITS else (lambda x: x)
        return [(lambda x, y, m: aten(b(x))) if name.endswith("not") else (lambda x, y, m: aten(b(x), b(y)))]
    ways = [lambda x, y, m: aten(x, y)]
    if name not in (*ON_BOOLS, "maximum", "minimum"):
        ways.append(lambda x, y, m: aten(x, 0.3))
    if name == "div":
        ways += [lambda x, y, m: torch.div(x, y, rounding_mode="floor"), lambda x, y, m: x.clone().div_(0.3)]
    return ways


@pytest.mark.parametrize("name", sorted(POINTWISE))
def test_an_element_has_the_same_bits_wherever_it_lies(name):
    """Vectors, their ends, strides and unaligned starts: what `evaluate` relies on to compute on a box alone."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)[: 2 if name == "rsqrt" else 4]:
        x, y = (torch.empty(1037).uniform_(-2, 2, generator=generator).to(dtype) for _ in range(2))
        if name == "erfinv":
            x = x / 2.0001
        mask = torch.empty(1037).bernoulli_(0.5, generator=generator).bool()
        for way in calls(name):
            full = way(x, y, mask)
            for cut in (slice(0, 1), slice(1, 2), slice(3, 4), slice(1, 9), slice(5, 36), slice(13, 1037),
                        slice(1030, 1037), slice(2, 900, 3), slice(1, None, 7)):  # fmt: skip
                same_bits(way(x[cut], y[cut], mask[cut]), full[cut], f"{name} {dtype} {cut}")
                packed = way(x[cut].clone(), y[cut].clone(), mask[cut].clone())
                same_bits(packed, full[cut], f"{name} {dtype} {cut} packed")
                if full.shape == way(x, y[:1], mask).shape:  # one number against many, and written out
                    one = way(x[cut], y[:1].expand(x[cut].shape).clone(), mask[cut])
                    same_bits(one, way(x, y[:1], mask)[cut], f"{name} {dtype} {cut} broadcast")
                    same_bits(x[cut].to(torch.bfloat16), x.to(torch.bfloat16)[cut], f"{dtype} to bf16")


def test_a_sum_with_a_factor_is_computed_in_full():
    """In a vector a multiply-add rounds once, beside it twice: such a sum depends on its place."""
    apply, tree = defer(lambda: made(lambda w: w.normal_().add_(torch.randn(30, 21), alpha=0.3)))
    assert apply.whole == {"w": 3 * 30 * 21 * 4}
    check_law(tree, on_one(tree))


# --- errors ---------------------------------------------------------------------------------------------------


def failing(constructor, **kwargs):
    with pytest.raises(ShardingError) as caught:
        defer(constructor, **kwargs)
    return str(caught.value)


class Looks(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))
        self.scale = self.w.std().item()


EAGER = "fs.defer(constructor, reference=0), which builds it eagerly"


def line_of(text):
    lines = inspect.getsource(inspect.getmodule(failing)).split("\n")
    return next(i for i, line in enumerate(lines, 1) if text in line)


def test_text_of_a_draw_that_is_looked_at():
    assert failing(Looks) == (
        "defer: .item() needs numbers that are drawn only when a leaf is placed, by its key\n"
        f"  test_defer.py:{line_of('self.scale = self.w.std()')} in __init__\n"
        "    self.scale = self.w.std().item()\n"
        "                 ^^^^^^^^^^^^^^^^^^^\n"
        f"  fix: compute it from the configuration; or {EAGER}"
    )


def draws_oddly():
    return torch.multinomial(torch.ones(3), 2)


def test_text_of_a_draw_without_a_rule():
    assert failing(draws_oddly) == (
        "defer: there is no rule for the draws of aten.multinomial.default\n"
        f"  test_defer.py:{line_of('return torch.multinomial')} in draws_oddly\n"
        "    return torch.multinomial(torch.ones(3), 2)\n"
        "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        f"  fix: draw with torch.nn.init or torch.randn; or {EAGER}"
    )


@pytest.mark.parametrize(
    ("constructor", "said"),
    [
        pytest.param(lambda: torch.randn(3).numpy(), ".numpy() needs numbers that are drawn", id="numpy"),
        pytest.param(lambda: torch.randn(3).tolist(), ".item() needs numbers that are drawn", id="tolist"),
        pytest.param(lambda: bool(torch.rand(()) > 0.5), ".item() needs numbers that are drawn", id="bool"),
        pytest.param(lambda: torch.randn(3).nonzero(), "nonzero() needs numbers that are drawn", id="nonzero"),
        pytest.param(lambda: torch.equal(torch.randn(3), torch.ones(3)), "torch.equal() needs numbers", id="equal"),
        pytest.param(lambda: torch.empty(3).sum().item(), ".item() reads memory of torch.empty", id="empty"),
        pytest.param(lambda: torch.zeros(3).data_ptr(), "data_ptr() asks for the address of a tensor", id="data_ptr"),
        pytest.param(lambda: torch.zeros(3).resize_(5), "resize_ changes the storage of a tensor", id="resize"),
        pytest.param(lambda: torch.zeros(3).to_sparse(), "_to_sparse returns a tensor of layout", id="sparse"),
        pytest.param(lambda: nn.LazyLinear(3), "the shape of a lazy layer is decided by its first call", id="lazy"),
        pytest.param(lambda: 3, "the constructor returned 3", id="not a module"),
    ],
)
def test_what_cannot_be_recorded_is_an_error_with_its_line(constructor, said):
    text = failing(constructor)
    assert text.startswith(f"defer: {said}")
    if "constructor returned" not in said:
        assert "test_defer.py" in text
        assert "^" in text


def test_text_of_leaves_beyond_the_budget():
    def both():
        module = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(32, 64, bias=False)])
        for part in module:
            nn.init.orthogonal_(part.weight)
        return module

    text = failing(both, budget=1000)
    assert text.startswith(
        "2 problems\ndefer: 0.weight: f32[64, 64] is computed in full, beyond budget=\n  operations  diag"
    )
    assert "bytes > 1,000\n  fix: budget=" in text
    needed = max(defer(both)[0].whole.values())
    defer(both, budget=needed)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.noise = torch.randn(3)


def test_text_of_a_drawn_attribute_that_is_no_leaf():
    assert failing(Plain) == (
        "defer: noise: is drawn, and neither a parameter nor a buffer\n"
        "  fix: register_buffer('noise', ..., persistent=False)"
    )


def test_text_of_integers_that_are_never_written():
    class Ints(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("i", torch.empty(3, dtype=torch.long))

    with pytest.raises(ShardingError) as caught:
        on_one(defer(Ints)[1])
    assert str(caught.value) == (
        "i: memory of torch.empty is used before it is written\n  shape  [3]    dtype  torch.int64\n"
        "  integers have no NaN to mark it with\n  fix: torch.zeros in the constructor"
    )


def test_text_of_a_copy_that_lost_its_name():
    _, tree = deferred("weight_norm")
    name = "parametrizations.weight.original1"
    with pytest.raises(ShardingError) as caught:
        on_one({"v": tree["params"][name]})
    assert str(caught.value) == (
        "materialize: tree['v']: is made of the draws of other leaves, found by its name\n"
        "  draws  parametrizations.weight.original0\n"
        f"  'v' does not end with '{name}'\n"
        "  fix: keep the tree that fs.defer returned, or a part of it"
    )
