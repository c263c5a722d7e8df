"""`defer`: a recorded constructor, replayed on any box of any leaf, gives the same values on every mesh."""

from __future__ import annotations

import copy
import functools
import inspect
import io
import math
import pickle
import random as python_random
import threading
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

import fshard as fs
from fshard import P
from fshard._core.torch import without_modes
from fshard.defer import graph
from fshard.defer.constructor import Recorded, defer
from fshard.defer.replay import POINTWISE, Replay
from fshard.spec import full_box
from tests.lib.assertions import assert_same, error_text
from tests.lib.tiers import slow_unless

CPU = torch.device("cpu")
ONE = fs.make_mesh(one=1)
MESHES = [{"a": 3}, {"a": 2, "b": 2}]


def values_on_one_device(tree, n=7):
    return fs.device_get(fs.materialize(tree, P(), ONE, key=fs.key(n)))


def specs_for(shape, axes):
    """Row, column, both, and the spec of `fully_shard`."""
    names = tuple(axes)
    specs = {P(), fs.fully_shard(P(), torch.empty(shape, device="meta"), axis="a")}
    if shape:
        specs |= {P("a"), P(..., "a"), P(..., names[::-1])}
    if len(shape) > 1 and "b" in axes:
        specs |= {P("b", ..., "a")}
    return sorted(specs, key=repr)


def check_same_on_meshes(tree, values, meshes=MESHES, most=2, every=1):
    """Assert that every shard of every leaf, by any spec on any mesh, is that slice of its value on one device.

    With `every=2` each mesh has every second spec, the second mesh those that the first one has not.
    """
    for k, axes in enumerate(meshes):
        mesh = fs.make_mesh(**axes)
        leaves = fs.tree.leaves(tree)
        options = [specs_for(x.shape, axes) for x in leaves]
        for turn in range(
            k % every, max(map(len, options), default=0) if len(leaves) < 6 else most, every
        ):  # many leaves: each turn another spec for each
            specs = iter([s[(i + turn) % len(s)] for i, s in enumerate(options)])
            specs = fs.tree.map(lambda _, specs=specs: next(specs), tree)
            placed = fs.materialize(tree, specs, mesh, key=fs.key(7))
            for (path, leaf), expected in zip(fs.tree.leaves_with_path(placed), fs.tree.leaves(values), strict=True):
                for rank, shard in zip(mesh.ranks, leaf.shards, strict=True):
                    assert_same(shard, expected[leaf.box(rank)], f"{path} {leaf.spec} on {axes}, rank {rank}")


def is_drawn(leaf):
    if isinstance(leaf.init, Recorded):
        return bool(graph.draws(leaf.init.node))
    return isinstance(leaf.init, (fs.init.Normal, fs.init.Uniform, fs.init.TruncNormal))


def check_distribution(tree, values, eager, leaves=1000):
    """Compare with the eager constructor: draws by moments and a Kolmogorov-Smirnov test, all other values exactly.

    Keys and seeds are fixed, so a test passes always or never. The level of each comparison is 0.001 / `leaves`, the
    number of leaves in all: of correct values, one set of seeds in a thousand would fail somewhere.
    """
    for kind, theirs in (("params", dict(eager.named_parameters())), ("buffers", dict(eager.named_buffers()))):
        assert list(tree[kind]) == list(theirs)
        for name, x in theirs.items():
            ours, x = values[kind][name], x.detach()
            assert (ours.dtype, ours.shape) == (x.dtype, x.shape), name
            if not is_drawn(tree[kind][name]):
                assert_same(ours, x, name)
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
            distance = (
                torch.searchsorted(a, both, right=True) - torch.searchsorted(b, both, right=True)
            ).abs().max() / n
            assert float(distance) <= math.sqrt(-math.log(0.001 / leaves / 2) / 2) * math.sqrt(2 / n), name


def construct_eagerly(constructor, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return constructor()


def without_warnings(constructor):
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
    "padding row inside": lambda: nn.Embedding(29, 7, padding_idx=17),
    "padding row -1": lambda: nn.EmbeddingBag(29, 7, padding_idx=-1),
    "half": lambda: nn.Linear(30, 21).half(),
    "bfloat16 norm": lambda: nn.Sequential(nn.Conv1d(6, 9, 3), nn.BatchNorm1d(9)).to(torch.bfloat16),
    "dtype=": lambda: nn.Linear(30, 21, dtype=torch.float64),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Conv1d(6, 9, 3)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(12, 9)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(12, 9)),
    "xavier": lambda: filled(nn.init.xavier_normal_),
    "trunc_normal_": lambda: filled(lambda w: nn.init.trunc_normal_(w, std=0.5, a=-0.7, b=0.3)),
    "orthogonal_": lambda: filled(lambda w: nn.init.orthogonal_(w, gain=2.0)),
    "orthogonal_ wide": lambda: filled(nn.init.orthogonal_, (9, 5, 4)),
    "dirac_": lambda: filled(lambda w: nn.init.dirac_(w, groups=2), (12, 5, 3)),
    "eye_": lambda: filled(nn.init.eye_),
    "sparse_": lambda: filled(lambda w: nn.init.sparse_(w, sparsity=0.3)),
    "exponential_": lambda: filled(lambda w: w.exponential_(2.0)),
    "log_normal_": lambda: filled(lambda w: w.log_normal_(0.5, 0.25)),
    "cauchy_": lambda: filled(lambda w: w.cauchy_(1.0, 0.1).clamp_(-3, 3)),
    "geometric_": lambda: filled(lambda w: w.geometric_(0.3)),
    "bernoulli_": lambda: filled(lambda w: w.bernoulli_(0.3)),
    "bernoulli of tensor": lambda: filled(lambda w: w.copy_(torch.bernoulli(torch.linspace(0, 1, 21).expand(30, 21)))),
    "randint": lambda: filled(lambda w: w.copy_(torch.randint(-3, 9, (30, 21)))),
    "random_": lambda: filled(lambda w: w.random_(5, 50)),
    "dropout": lambda: filled(lambda w: w.copy_(nn.functional.dropout(torch.ones(30, 21), 0.4))),
    "normal of tensors": lambda: filled(lambda w: w.copy_(torch.normal(torch.arange(21.0).expand(30, 21), 0.5))),
    "randperm": lambda: filled(lambda w: w.copy_(torch.randperm(630).view(30, 21))),
    "poisson": lambda: filled(lambda w: w.copy_(torch.poisson(torch.full((30, 21), 5.0)))),
    "gamma": lambda: filled(lambda w: w.copy_(torch.distributions.Gamma(torch.full((30, 21), 2.0), 1.0).sample())),
    "multinomial": lambda: filled(lambda w: w.copy_(torch.multinomial(torch.ones(30, 99), 21))),
    "inverse of drawn": lambda: filled(lambda w: w.copy_((torch.eye(30) + torch.rand(30, 30) / 60).inverse()[:, :21])),
    "lstsq": lambda: filled(lambda w: w.copy_(torch.linalg.lstsq(torch.eye(90, 30), torch.randn(90, 21)).solution)),
    "copied norm": lambda: copy.deepcopy(nn.BatchNorm1d(13)),  # its number of batches is a literal
    "weight_norm, old": lambda: nn.utils.weight_norm(nn.Conv1d(6, 9, 3)),
    "spectral_norm, old": lambda: nn.utils.spectral_norm(nn.Linear(12, 9)),
    "prune": lambda: prune.l1_unstructured(nn.Linear(12, 9), "weight", 0.3),
}


class Filled(nn.Module):
    def __init__(self, init, shape):
        super().__init__()
        self.w = nn.Parameter(torch.empty(shape))
        with torch.no_grad():
            init(self.w)


def filled(init, shape=(30, 21)):
    return Filled(init, shape)


@functools.cache
def deferred(name):
    return defer(without_warnings({**LAYERS, **VARIANTS}[name]))


# "Transformer" has the layers of the four; torch computes the old norm as the new one; layers of other dims, and cells,
# are initialized as their siblings.
SLOW = ["TransformerEncoder", "TransformerDecoder", "TransformerEncoderLayer", "TransformerDecoderLayer",
        "spectral_norm, old", "sparse_", "Conv1d", "Conv3d", "ConvTranspose1d", "ConvTranspose3d", "BatchNorm1d",
        "BatchNorm3d", "InstanceNorm1d", "InstanceNorm3d", "SyncBatchNorm", "RNN", "RNNBase", "RNNCell", "GRUCell",
        "BCELoss", "NLLLoss", "MultiMarginLoss", "padding row inside", "orthogonal_ wide", "log_normal_"]  # fmt: skip


@pytest.mark.parametrize("name", slow_unless([n for n in [*LAYERS, *VARIANTS] if n not in SLOW], [*LAYERS, *VARIANTS]))
def test_layer_is_equal_on_every_mesh_and_distributed_as_eager(name):
    _, tree = deferred(name)
    values = values_on_one_device(tree)
    check_same_on_meshes(tree, values, every=2)
    check_distribution(tree, values, construct_eagerly(without_warnings({**LAYERS, **VARIANTS}[name])))


def test_every_layer_of_torch_nn_is_in_the_table():
    """Each class of torch.nn is in LAYERS, has no leaves of its own, or is lazy."""
    containers = {"Module", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict", "Container"}
    tries = ((), (2,), (2, 2), (2, 2, 2), ((2, 2),), ((2, 2), 2), (2.0, 2.0), ((2, 2), (2, 2)))
    classes = {n: c for m in (nn, nn.modules.linear) for n, c in vars(m).items() if inspect.isclass(c)}
    missing = []
    for name, kind in classes.items():
        if not issubclass(kind, nn.Module) or name in LAYERS or name in containers or name.startswith("Lazy"):
            continue
        for args in tries:
            try:
                module = without_warnings(functools.partial(kind, *args))()
            except (TypeError, ValueError):
                continue
            if list(module.parameters()) or list(module.buffers()):
                missing.append(name)
            break
        else:
            missing.append(name)
    assert not missing


# --- values ---------------------------------------------------------------------------------------------------


def test_leaf_of_one_draw_equals_the_initializer():
    _, tree = defer(lambda: nn.Linear(64, 256))
    assert repr(tree["params"]["bias"]) == "f32[256] = uniform(low=-0.125, high=0.125)"
    like = {"bias": fs.init.uniform(256, low=-0.125, high=0.125)}
    assert_same(values_on_one_device(tree)["params"]["bias"], values_on_one_device(like)["bias"])
    _, tree = defer(lambda: filled(lambda w: w.normal_(0, 0.02)).to(torch.bfloat16))
    assert repr(tree["params"]["w"]) == "bf16[30, 21] = normal(std=0.02)"
    like = fs.init.normal((30, 21), std=0.02, dtype=torch.bfloat16)
    assert_same(values_on_one_device(tree["params"])["w"], values_on_one_device({"w": like})["w"])


class Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        x = torch.randn(1300, 512)
        self.large = nn.Parameter((x * 0.02).clamp(-0.04, 0.04) + x)  # x is drawn once for both
        self.small = nn.Parameter(torch.rand(64, 512).mul(2))
        self.whole = nn.Parameter(torch.linalg.qr(torch.randn(64, 64))[0])


def test_no_recorded_operation_is_split_between_threads_of_torch(monkeypatch):
    tree = defer(Clamped)[1]["params"]
    threads, evaluate = torch.get_num_threads(), Replay.evaluate
    torch.set_num_threads(1)
    one = values_on_one_device(tree)
    seen: dict[str, set] = {}

    def watched(replay, node, box):
        seen.setdefault(name, set()).add((threading.get_ident() == here, torch.get_num_threads()))
        return evaluate(replay, node, box)

    monkeypatch.setattr(Replay, "evaluate", watched)
    here = threading.get_ident()
    try:
        torch.set_num_threads(2)
        for name, leaf in tree.items():
            got = values_on_one_device({name: leaf})[name]
            assert torch.get_num_threads() == 2
            if name != "whole":  # LAPACK rounds by its number of threads
                assert_same(got, one[name])
    finally:
        torch.set_num_threads(threads)
    assert seen == {"large": {(False, 1)}, "small": {(True, 1)}, "whole": {(True, 2)}}


class Drawn(nn.Module):
    """Parameters, their copies, and buffers, some of which have the draws of a parameter."""

    def __init__(self):
        super().__init__()
        self.h = nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 3)])
        self.copy = copy.deepcopy(self.h)
        self.scale = nn.Parameter(torch.rand(5))
        self.register_buffer("noise", torch.randn(6))
        self.register_buffer("shared", self.h[0].weight.detach() * 2)


def test_a_part_of_the_tree_has_the_values_of_the_whole():
    _, tree = defer(Drawn)
    whole = values_on_one_device(tree)
    params, buffers = whole["params"], whole["buffers"]
    assert torch.equal(params["h.0.weight"], params["copy.0.weight"])
    assert torch.equal(buffers["shared"], params["h.0.weight"] * 2)
    distinct = [params["h.0.weight"], params["h.1.weight"], params["scale"], buffers["noise"]]
    assert len({x.flatten()[0].item() for x in distinct}) == 4

    for kind, leaves in tree.items():
        assert_same(values_on_one_device(leaves), whole[kind])
        for name, leaf in leaves.items():
            assert_same(values_on_one_device({name: leaf})[name], whole[kind][name])
            assert_same(values_on_one_device({kind: {name: leaf}})[kind][name], whole[kind][name])
            assert_same(values_on_one_device(leaf), whole[kind][name], "a leaf alone")
            last = name.rpartition(".")[2]
            assert_same(values_on_one_device({last: leaf})[last], whole[kind][name], "a part of its name")
    layer = {name.removeprefix("h."): leaf for name, leaf in tree["params"].items() if name.startswith("h.")}
    assert_same(values_on_one_device(layer), {name: params[f"h.{name}"] for name in layer})
    nested = {"h": [{n: tree["params"][f"h.{i}.{n}"] for n in ("weight", "bias")} for i in range(2)]}
    assert_same(values_on_one_device(nested)["h"][1]["weight"], params["h.1.weight"])
    assert_same(values_on_one_device({**tree, "step": fs.init.zeros(())})["params"], params)
    bf16 = {name: leaf.to(torch.bfloat16) for name, leaf in tree["params"].items()}
    assert_same(values_on_one_device(bf16), {name: x.bfloat16() for name, x in params.items()})


def test_modules_in_one_tree_have_draws_of_their_own():
    a, b = defer(Drawn)[1], defer(Drawn)[1]
    both = values_on_one_device({"a": a, "b": b})
    first = values_on_one_device(a)
    for kind, name in (("params", "scale"), ("params", "h.0.weight"), ("buffers", "noise"), ("buffers", "shared")):
        three = [both["a"][kind][name], both["b"][kind][name], first[kind][name]]
        assert len({x.flatten()[0].item() for x in three}) == 3
    assert_same(values_on_one_device({"a": a["params"]})["a"], both["a"]["params"])
    assert_same(values_on_one_device(a["buffers"] | a["params"])["shared"], first["buffers"]["shared"])
    for x in (both["a"], both["b"]):  # relations between the leaves of a module hold in each
        assert torch.equal(x["buffers"]["shared"], x["params"]["copy.0.weight"] * 2)
    renamed = values_on_one_device({"old": a["params"]["scale"], "new": b["params"]["scale"]})
    assert_same(renamed["old"], values_on_one_device({"old": fs.init.uniform(5)})["old"])  # by its path, as any leaf


def test_error_text_of_leaves_of_two_modules_with_one_name():
    a, b = defer(Drawn)[1], defer(Drawn)[1]
    assert error_text(values_on_one_device, {"scale": a["params"]["scale"], "params": {"scale": b["params"]["scale"]}}
                      ) == (
        "materialize: tree['scale'] and tree['params']['scale'] have one name\n"
        "  both are 'scale', and would have the same values\n"
        "  fix: put modules under paths of their own: {'a': tree_a, 'b': tree_b}"
    )  # fmt: skip
    same = a["params"]["scale"]
    tied = values_on_one_device({"scale": same, "params": {"scale": same}})
    assert torch.equal(tied["scale"], tied["params"]["scale"])


def test_leaf_apart_from_the_leaf_whose_draws_it_has_is_refused():
    _, tree = defer(Drawn)
    leaf = tree["buffers"]["shared"]
    for elsewhere in ({"x": {"shared": leaf}}, {"other": leaf}, {"x": {"y": leaf}}):
        assert "is made of the draws of other leaves" in error_text(values_on_one_device, elsewhere)


def test_repr_of_a_leaf_lists_its_steps():
    _, tree = deferred("padding row 0")
    assert repr(tree["params"]["weight"]) == "f32[29, 7] = recorded(normal, write)"
    _, tree = deferred("half")
    assert repr(tree["params"]["bias"]) == "f16[21] = recorded(uniform, cast)"
    apply, tree = deferred("weight_norm")
    v, g = "parametrizations.weight.original1", "parametrizations.weight.original0"
    assert repr(tree["params"][g]) == "f32[9, 1, 1] = recorded(uniform, reshape, norm), 684 bytes in full"
    assert repr(tree["params"][v]).endswith(f" of {g}")
    assert apply.whole == {g: 684}


def test_copied_layers_are_equal_and_separately_built_layers_differ():
    values = values_on_one_device(deferred("TransformerEncoder")[1])["params"]
    for name, x in values.items():
        if name.startswith("layers.0."):
            assert_same(x, values[name.replace("layers.0.", "layers.1.")])
    values = values_on_one_device(defer(lambda: nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))[1])["params"]
    assert not torch.equal(values["0.weight"], values["1.weight"])


def test_adding_a_leaf_changes_no_other_leaf():
    trees = {name: defer(lambda: nn.Sequential(nn.Linear(4, 4)))[1] for name in "ab"}
    values = values_on_one_device(trees)
    assert not torch.equal(values["a"]["params"]["0.weight"], values["b"]["params"]["0.weight"])
    more = defer(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))[1]
    assert_same(values_on_one_device({"a": more})["a"]["params"]["0.weight"], values["a"]["params"]["0.weight"])


def test_tied_parameters_are_one_leaf():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.wte = nn.Embedding(11, 4)
            self.head = nn.Linear(4, 11, bias=False)
            self.head.weight = self.wte.weight

    apply, tree = defer(Tied)
    assert list(tree["params"]) == ["wte.weight"]
    assert apply.ties == {"head.weight": "wte.weight"}


def test_module_under_two_names_is_recorded_once():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = self.a

        def forward(self, x):
            return self.b(self.a(x))

    apply, tree = defer(Shared)
    assert list(tree["params"]) == ["a.weight", "a.bias"]
    assert apply.ties == {"b.weight": "a.weight", "b.bias": "a.bias"}
    params = values_on_one_device(tree)["params"]
    x = torch.ones(2, 3)
    linear = functools.partial(nn.functional.linear, weight=params["a.weight"], bias=params["a.bias"])
    assert_same(apply(params, {}, x), linear(linear(x)))


def test_buffers_are_recorded_persistent_or_not():
    class Buffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.tril(torch.ones(9, 9, dtype=torch.bool)).view(1, 1, 9, 9))
            self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, 8, 2).float() / 8), persistent=False)
            self.register_buffer("ids", torch.arange(9).expand(1, -1), persistent=False)
            self.register_buffer("none", None)

    apply, tree = defer(Buffers)
    assert apply.transient == {"inv_freq", "ids"}
    values = values_on_one_device(tree)
    check_same_on_meshes(tree, values)
    check_distribution(tree, values, Buffers())


class AnyStrides(nn.Module):
    """Views that are no strided ranges of their base, storages that are not row-major, other dtypes in a storage."""

    def __init__(self):
        super().__init__()
        x = torch.arange(48.0).view(12, 4)
        x.view(3, 4, 4).transpose(1, 2)[1].neg_()
        x.view(-1)[5:9].zero_()
        self.register_buffer("split_dim", x)
        self.register_buffer("overlapping", torch.arange(10.0).unfold(0, 4, 2))
        diagonal = torch.zeros(3, 3)
        diagonal.diagonal().copy_(torch.arange(3.0))
        self.register_buffer("diagonal", diagonal)
        columns = torch.empty_strided((3, 4), (1, 3))
        columns.copy_(torch.arange(12.0).view(3, 4))
        columns[:, 2].zero_()
        self.register_buffer("column_major", columns)
        self.register_buffer("channels_last", torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last) * 2)
        literal = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        literal[0] = torch.ones(3).mul(7)
        literal.t_()[1] = 8
        self.register_buffer("transposed_literal", literal)
        pairs = torch.zeros(3, dtype=torch.complex64)
        torch.view_as_real(pairs)[:, 1] = torch.arange(3.0)
        self.register_buffer("complex", pairs)
        bits = torch.arange(4.0)
        bits.view(torch.int32)[2:] = 0
        self.register_buffer("bits", bits)
        self.register_buffer("tiled", torch.arange(1, 5).repeat(2).reshape(2, -1).transpose(1, 0).reshape(-1))
        self.register_buffer("cat_with_empty", torch.cat([torch.zeros(0), torch.ones(2, 3), torch.zeros(0, 3)]))


def test_two_hundred_partial_writes_are_the_same_on_every_mesh():
    def experts(w):
        for part in w:
            nn.init.xavier_uniform_(part)
            part.mul_(0.5)

    apply, tree = defer(lambda: filled(experts, (100, 3, 2)))
    assert not apply.whole
    check_same_on_meshes(tree, values_on_one_device(tree), [{"a": 3}])


class Data(nn.Module):
    """Assignments to `.data`, and writes to what is there then."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4, 3))
        self.b = nn.Parameter(torch.zeros(5))
        self.a.data = torch.arange(12.0).view(3, 4).t()
        self.b.data.fill_(2.0)
        self.a.data[1:3, 0] = 7


class Literals(nn.Module):
    """Parameters whose data is set to tensors that no operation made: of numpy, lists, files."""

    def __init__(self):
        super().__init__()
        table = np.arange(12, dtype=np.float32).reshape(3, 4)
        for name in ("numpy", "view", "list", "file", "drawn", "twice", "of_literal"):
            setattr(self, name, nn.Parameter(torch.zeros(3, 4)))
        self.numpy.data = torch.from_numpy(table.copy())
        self.numpy.data[1] *= 2
        rows = torch.as_tensor(np.stack([table, table + 100], -1))
        self.view.data = rows[..., 1].t()[1:3]
        rows[0, 1, 1] = -5  # in the memory of the parameter
        self.list.data = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 3)
        self.list.data = self.list.data.half()
        file = io.BytesIO()
        torch.save({"x": torch.tensor([[1.0, 2.0]])}, file)
        file.seek(0)
        self.file.data = torch.load(file)["x"]
        self.drawn.data = torch.tensor(table)
        nn.init.constant_(self.drawn, 3.0)
        self.twice.data = self.list.data
        self.of_literal = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.of_literal.data = torch.full((2,), 7.0)
        self.register_buffer("scalars", torch.tensor([torch.ones(()) * 2, torch.zeros(())]))
        self.register_buffer("shared", torch.arange(3.0).share_memory_())
        self.register_buffer("pickled", pickle.loads(pickle.dumps(torch.arange(3.0))))
        angle = torch.polar(torch.arange(5.0), torch.arange(5.0))
        self.register_buffer("conj", angle.conj())
        self.register_buffer("imag", angle.conj().imag)
        angle.conj().mul_(1j)
        self.register_buffer("angle", angle)


def test_literals_and_lazy_conjugates_equal_eager():
    tree = defer(Literals)[1]
    values, eager = values_on_one_device(tree), Literals()
    for name, x in [*eager.named_parameters(), *eager.named_buffers()]:
        x = x.detach().resolve_conj().resolve_neg()
        assert_same({**values["params"], **values["buffers"]}[name], x, name)
    check_same_on_meshes(tree, values)


NAMES = [torch.ones(2)]  # of the program, not of the module


class ViewsAndWrites(nn.Module):
    """Views of views, in-place arithmetic, writes to literals, and values that the constructor reads."""

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
        self.object = types.SimpleNamespace(table=torch.arange(3.0), names=NAMES)


def test_views_and_writes_equal_eager():
    apply, tree = defer(ViewsAndWrites)
    values, eager = values_on_one_device(tree), ViewsAndWrites()
    check_distribution(tree, values, eager)
    check_same_on_meshes(tree, values)
    module = apply.module
    assert (module.steps, module.total, module.array.tolist()) == (eager.steps, eager.total, [0, 1, 2, 3])
    assert_same(module.plain[0], eager.plain[0])
    assert_same(module.plain[1]["one"], eager.plain[1]["one"])
    assert_same(module.object.table, eager.object.table)
    assert module.object.names is NAMES


def random_program(steps):
    """Return a constructor whose buffer goes through random views, writes and arithmetic: one program for each seed."""
    r = python_random.Random(steps)

    def random_view(x):
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
            v = random_view(x)
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
        module.register_buffer("v", random_view(x))
        return module

    return build


@pytest.mark.parametrize("start", slow_unless([0], range(0, 60, 12)))
def test_random_program_of_views_and_writes_equals_eager(start):
    for steps in range(start, start + 12):
        tree = defer(random_program(steps))[1]
        values = values_on_one_device(tree)
        for name, x in random_program(steps)().named_buffers():
            assert_same(values["buffers"][name], x, f"program {steps}: {name}")
        check_same_on_meshes(tree, values, [{"a": 3}, {"a": 2, "b": 2}], most=1)


class RunsBatchNorm(nn.Module):
    """A constructor that runs its own layers, whose results and writes are recorded too."""

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


class Functional(nn.Module):
    """As modules of tensordict: a skeleton on meta, run with parameters whose names in their dict have dots."""

    def __init__(self):
        super().__init__()
        self.values = nn.Identity()
        self.values._parameters.update({f"0.{k}": nn.Parameter(x) for k, x in nn.Linear(3, 2).named_parameters()})
        with torch.device("meta"):
            self.skeleton = nn.Linear(3, 2)
        for name, x in list(self.skeleton.named_parameters()):
            delattr(self.skeleton, name)
            setattr(self.skeleton, name, x.data.to("meta"))

    def forward(self, x):
        named = {name.rpartition(".")[2]: p for name, p in self.values.named_parameters()}
        vars(self.skeleton).update(named)
        return self.skeleton(x)


def test_a_skeleton_on_meta_runs_with_leaves_whose_names_have_dots():
    apply, tree = defer(Functional, units="Identity")
    assert apply.units == {"values": ("values.0.weight", "values.0.bias")}
    assert apply.module.skeleton.weight.is_meta
    values, x = values_on_one_device(tree["params"]), torch.ones(4, 3)
    assert_same(apply(values, {}, x), nn.functional.linear(x, *values.values()))


@pytest.mark.parametrize("module", [AnyStrides, Data, RunsBatchNorm])
def test_whatever_a_constructor_writes_equals_eager(module):
    _, tree = defer(module)
    values = values_on_one_device(tree)
    check_distribution(tree, values, module())
    check_same_on_meshes(tree, values)


def test_apply_equals_the_module():
    apply, tree = defer(lambda: nn.LSTM(3, 4, batch_first=True))
    values, x = values_on_one_device(tree), torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    eager = nn.LSTM(3, 4, batch_first=True)
    eager.load_state_dict(values["params"])
    assert_same(apply(values["params"], values["buffers"], x)[0], eager(x)[0])


def test_default_dtype_of_the_constructor_is_recorded():
    def half():
        torch.set_default_dtype(torch.bfloat16)
        try:
            return Filled(lambda w: w.copy_(torch.arange(630).view(30, 21) / 7), (30, 21))
        finally:
            torch.set_default_dtype(torch.float32)

    _, tree = defer(half)
    check_distribution(tree, values_on_one_device(tree), half())


def test_each_draw_of_a_leaf_has_its_own_key():
    def two(w):
        w[:15].normal_()
        w[15:].normal_()

    def added(w):
        w.normal_().add_(torch.randn(30, 21))

    tree = defer(lambda: filled(two))[1]
    values = values_on_one_device(tree)
    check_same_on_meshes(tree, values)
    assert not torch.equal(values["params"]["w"][:15], values["params"]["w"][15:])
    tree = defer(lambda: filled(added))[1]
    check_same_on_meshes(tree, values_on_one_device(tree))
    assert float(values_on_one_device(tree)["params"]["w"].std()) == pytest.approx(math.sqrt(2), rel=0.1)


def test_overwritten_values_are_not_computed(monkeypatch):
    def often(w):
        for _ in range(5):
            nn.init.kaiming_uniform_(w)
            w.mul_(2)
        w.uniform_(-1, 1)
        w[3].zero_()

    leaf = defer(lambda: filled(often))[1]["params"]["w"]
    computed = []
    compute = Replay._compute
    monkeypatch.setattr(Replay, "_compute", lambda *args: (computed.append(type(args[1]).__name__), compute(*args))[1])
    leaf.init.fill(fs.key(0), leaf.shape, full_box(leaf.shape), leaf.dtype, CPU)
    assert sorted(computed) == ["Draw", "Full", "Write"]
    computed.clear()
    leaf.init.fill(fs.key(0), leaf.shape, (slice(10, 20), slice(0, 21)), leaf.dtype, CPU)
    assert sorted(computed) == ["Draw", "Write"]  # the row that is written is not in the box
    # a write to the whole tensor replaces its value: the draw alone remains
    leaf = defer(lambda: filled(lambda w: (w.zero_(), w[:].normal_())))[1]["params"]["w"]
    assert repr(leaf) == "f32[30, 21] = normal()"


def test_large_boxes_are_filled_in_chunks():
    big = (1500, 1 << 10)
    leaf = defer(lambda: filled(lambda w: w.normal_().mul_(0.5), big))[1]["params"]["w"].to(torch.bfloat16)
    full = leaf.init.fill(fs.key(0), leaf.shape, full_box(big), torch.bfloat16, CPU)
    part = leaf.init.fill(fs.key(0), leaf.shape, (slice(1000, 1100), slice(7, 900)), torch.bfloat16, CPU)
    assert_same(part, full[1000:1100, 7:900])


def test_uninitialized_memory_is_nan():
    values = values_on_one_device(defer(lambda: filled(lambda w: w[:7].zero_()))[1])["params"]["w"]
    assert torch.equal(values.isnan().all(1), torch.arange(30) >= 7)
    assert values_on_one_device(defer(lambda: nn.utils.skip_init(nn.Linear, 2, 2))[1])["params"]["weight"].isnan().all()


def test_reference_equals_eager_construction_bitwise():
    state = torch.get_rng_state()
    apply, tree = defer(lambda: nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)), reference=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert repr(tree["params"]["0.weight"]) == "f32[7, 5] = reference(seed=3)"
    torch.random.manual_seed(3)
    eager = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    torch.set_rng_state(state)
    values = values_on_one_device(tree)
    check_same_on_meshes(tree, values)
    for name, x in [*eager.named_parameters(), *eager.named_buffers()]:
        assert_same({**values["params"], **values["buffers"]}[name], x.detach())
    assert all(x.is_meta for x in apply.module.parameters())


def draws_of_other_generators():
    module = filled(lambda w: w.copy_(torch.from_numpy(np.random.randn(30, 21))))  # noqa: NPY002
    module.register_buffer("python", torch.tensor([python_random.random() for _ in range(3)]))
    with ThreadPoolExecutor(1) as pool:  # whose operations are not recorded
        module.register_buffer("in_thread", pool.submit(torch.randn, 3).result())
    return module


@pytest.mark.parametrize("reference", [None, 5])
def test_numpy_and_python_draw_the_same_in_every_process(reference):
    def in_process(n):
        python_random.seed(n)
        np.random.seed(n)  # noqa: NPY002
        torch.manual_seed(n)
        tree = defer(draws_of_other_generators, reference=reference)[1]
        after = python_random.random(), np.random.random()  # noqa: NPY002
        python_random.seed(n)
        np.random.seed(n)  # noqa: NPY002
        assert after == (python_random.random(), np.random.random())  # noqa: NPY002
        return values_on_one_device(tree)

    before = python_random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    try:
        one, two = in_process(1), in_process(2)
    finally:
        python_random.setstate(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        torch.set_rng_state(before[2])
    assert_same(one["params"]["w"], two["params"]["w"])
    assert_same(one["buffers"]["python"], two["buffers"]["python"])
    assert_same(one["buffers"]["in_thread"], two["buffers"]["in_thread"])
    rng = np.random.RandomState(reference or 0)
    assert_same(one["params"]["w"], torch.from_numpy(rng.randn(30, 21)).float())


class OfGenerator(nn.Module):
    """Draws of a generator that the constructor seeds, read and unread, whole and partial."""

    def __init__(self):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.order = torch.randperm(9, generator=g)
        self.first = int(torch.randint(0, 99, (1,), generator=g))
        self.w = nn.Parameter(torch.randn(20, 21, generator=g))
        with torch.no_grad():
            self.w[3:7].t().uniform_(generator=g)
            nn.init.trunc_normal_(self.w[10:], std=0.5, a=-0.7, b=0.3, generator=g)
        self.register_buffer("kept", torch.arange(9.0)[torch.rand(9, generator=g) > 0.5])
        self.register_buffer("coins", torch.bernoulli(torch.linspace(0, 1, 50), generator=g))
        self.register_buffer("mean", torch.normal(torch.arange(5.0), 2.0, generator=g))
        self.register_buffer("some", torch.multinomial(torch.arange(1.0, 9.0), 3, generator=g).double())
        self.register_buffer("last", torch.rand(3, generator=g))


def test_draws_of_a_generator_are_exactly_its_numbers():
    apply, tree = defer(OfGenerator)
    values, eager = values_on_one_device(tree), OfGenerator()
    for name, x in [*eager.named_parameters(), *eager.named_buffers()]:
        assert_same({**values["params"], **values["buffers"]}[name], x.detach(), name)
    assert_same(apply.module.order, eager.order)
    assert apply.module.first == eager.first
    check_same_on_meshes(tree, values)
    assert apply.whole["last"] == 3 * 4 + torch.Generator().get_state().numel()
    drawn = defer(lambda: filled(lambda w: w.normal_(generator=torch.default_generator)))[1]["params"]["w"]
    assert repr(drawn) == "f32[30, 21] = normal()"  # by key, as without it


def patched_functions():
    return nn.init._no_grad_trunc_normal_, torch.utils.swap_tensors, torch.load, np.random.default_rng


def test_recording_restores_random_states_and_patched_functions():
    before = (torch.get_rng_state(), *patched_functions())
    python, numbers = python_random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    defer(lambda: filled(nn.init.trunc_normal_).half())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert patched_functions() == before[1:]
    assert (python_random.getstate(), np.random.get_state()[1].tolist()) == (python, numbers)  # noqa: NPY002
    assert not torch.nn.init.trunc_normal_(torch.empty(3)).isnan().any()


def test_trunc_normal_of_another_thread_is_not_recorded():
    drawn = []

    def constructor():
        other = threading.Thread(target=lambda: drawn.append(nn.init.trunc_normal_(torch.empty(50), a=-0.1, b=0.1)))
        other.start()
        other.join()
        return filled(nn.init.trunc_normal_)

    defer(constructor)
    assert type(drawn[0]) is torch.Tensor
    assert drawn[0].abs().max() <= 0.1


def test_optimizers_casts_and_show_accept_the_tree():
    _, tree = deferred("TransformerEncoder")
    state = fs.optim.adamw(0.1).init(tree["params"])
    assert fs.tree.leaves(values_on_one_device(state))
    half = fs.tree.map(lambda x: x.to(torch.bfloat16), tree)
    values = values_on_one_device(half)["params"]
    assert values["layers.1.linear1.weight"].dtype == torch.bfloat16
    assert_same(
        values["layers.1.linear1.weight"], values_on_one_device(tree)["params"]["layers.0.linear1.weight"].bfloat16()
    )
    specs = fs.tree.map(lambda x: P("a") if x.ndim else P(), tree)
    assert "uniform" in str(fs.show(tree, mesh={"a": 2}, specs=specs))


def test_device_argument_of_the_constructor_is_ignored():
    expected = values_on_one_device(defer(lambda: nn.Linear(4, 4))[1])
    for build in (lambda: nn.Linear(4, 4, device="meta"), lambda: nn.Linear(4, 4, device="cuda")):
        assert_same(values_on_one_device(defer(build)[1]), expected)

    def with_default_device():
        torch.set_default_device("meta")
        try:
            return nn.BatchNorm1d(4)
        finally:
            torch.set_default_device(None)

    def in_context():
        with torch.device("meta"):
            return nn.BatchNorm1d(4)

    expected = values_on_one_device(defer(lambda: nn.BatchNorm1d(4))[1])
    for build in (with_default_device, in_context, lambda: nn.BatchNorm1d(4, device="meta")):
        assert_same(values_on_one_device(defer(build)[1]), expected)


# --- pointwise operations ------------------------------------------------------------------------------------

ONE_ARGUMENT = {"abs", "ceil", "conj_physical", "cos", "erfinv", "exp", "floor", "log", "neg", "reciprocal", "round",
                "rsqrt", "sgn", "sign", "sin", "sqrt", "trunc"}  # fmt: skip
ON_BITS = ("bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor")
ON_BOOLS = ("logical_and", "logical_not", "logical_or", "logical_xor")


def calls(name):
    """Return functions of (x, y, mask) that call an operation: with tensors, with numbers, and in place."""
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
    functions = [lambda x, y, m: aten(x, y)]
    if name not in (*ON_BOOLS, "maximum", "minimum"):
        functions.append(lambda x, y, m: aten(x, 0.3))
    if name == "div":
        functions += [lambda x, y, m: torch.div(x, y, rounding_mode="floor"), lambda x, y, m: x.clone().div_(0.3)]
    return functions


@pytest.mark.parametrize("name", sorted(POINTWISE))
def test_pointwise_result_has_the_same_bits_at_any_position(name):
    """Slices that end, start and step anywhere in a vector: `Replay` relies on it to compute a box alone."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)[: 2 if name == "rsqrt" else 4]:
        x, y = (torch.empty(1037).uniform_(-2, 2, generator=generator).to(dtype) for _ in range(2))
        if name == "erfinv":
            x = x / 2.0001
        mask = torch.empty(1037).bernoulli_(0.5, generator=generator).bool()
        for f in calls(name):
            full = f(x, y, mask)
            for cut in (slice(0, 1), slice(1, 2), slice(3, 4), slice(1, 9), slice(5, 36), slice(13, 1037),
                        slice(1030, 1037), slice(2, 900, 3), slice(1, None, 7)):  # fmt: skip
                assert_same(f(x[cut], y[cut], mask[cut]), full[cut], f"{name} {dtype} {cut}")
                packed = f(x[cut].clone(), y[cut].clone(), mask[cut].clone())
                assert_same(packed, full[cut], f"{name} {dtype} {cut} packed")
                if full.shape == f(x, y[:1], mask).shape:  # one broadcast number, and as many copies
                    one = f(x[cut], y[:1].expand(x[cut].shape).clone(), mask[cut])
                    assert_same(one, f(x, y[:1], mask)[cut], f"{name} {dtype} {cut} broadcast")
                    assert_same(x[cut].to(torch.bfloat16), x.to(torch.bfloat16)[cut], f"{dtype} to bf16")


def test_add_with_alpha_is_computed_in_full():
    """In a vector a multiply-add rounds once, after its end twice: such a sum depends on the position."""
    apply, tree = defer(lambda: filled(lambda w: w.normal_().add_(torch.randn(30, 21), alpha=0.3)))
    assert apply.whole == {"w": 3 * 30 * 21 * 4}
    check_same_on_meshes(tree, values_on_one_device(tree))


# --- errors ---------------------------------------------------------------------------------------------------


class ReadsDraw(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 3))
        self.scale = self.w.std().item()


EAGER = "fs.defer(constructor, reference=0), which builds it eagerly"


def line_of(text):
    lines = inspect.getsource(inspect.getmodule(line_of)).split("\n")
    return next(i for i, line in enumerate(lines, 1) if text in line)


def test_error_text_of_reading_a_draw():
    assert error_text(defer, ReadsDraw) == (
        "defer: .item() needs numbers that are drawn only when a leaf is placed, by its key\n"
        f"  test_defer.py:{line_of('self.scale = self.w.std()')} in __init__\n"
        "    self.scale = self.w.std().item()\n"
        "                 ^^^^^^^^^^^^^^^^^^^\n"
        f"  fix: compute it from the configuration; or {EAGER}"
    )


def draws_two():
    return torch.native_dropout(torch.ones(3), 0.5, True)


def test_error_text_of_a_draw_without_a_rule():
    assert error_text(defer, draws_two) == (
        "defer: there is no rule for the draws of aten.native_dropout.default\n"
        f"  test_defer.py:{line_of('return torch.native_dropout')} in draws_two\n"
        "    return torch.native_dropout(torch.ones(3), 0.5, True)\n"
        "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        f"  fix: draw with torch.nn.init or torch.randn; or {EAGER}"
    )


@pytest.mark.parametrize(
    ("constructor", "start_of_text"),
    [
        pytest.param(lambda: torch.randn(3).numpy(), ".numpy() needs numbers that are drawn", id="numpy"),
        pytest.param(lambda: torch.randn(3).tolist(), ".item() needs numbers that are drawn", id="tolist"),
        pytest.param(lambda: bool(torch.rand(()) > 0.5), ".item() needs numbers that are drawn", id="bool"),
        pytest.param(lambda: torch.randn(3).nonzero(), "nonzero() needs numbers that are drawn", id="nonzero"),
        pytest.param(lambda: torch.equal(torch.randn(3), torch.ones(3)), "torch.equal() needs numbers", id="equal"),
        pytest.param(lambda: torch.empty(3).sum().item(), ".item() reads memory of torch.empty", id="empty"),
        pytest.param(lambda: torch.zeros(3).data_ptr(), "data_ptr() asks for the address of a tensor", id="data_ptr"),
        pytest.param(lambda: torch.from_dlpack(torch.zeros(3)), "DLPack asks for the memory of a tensor", id="dlpack"),
        pytest.param(lambda: pickle.dumps(torch.randn(3)), "pickling needs numbers that are drawn", id="pickle"),
        pytest.param(lambda: [np.random.default_rng()], "numpy.random.default_rng() without a seed", id="default_rng"),
        pytest.param(lambda: torch.zeros(3).resize_(5), "resize_ changes the storage of a tensor", id="resize"),
        pytest.param(lambda: torch.zeros(3).to_sparse(), "_to_sparse returns a tensor of layout", id="sparse"),
        pytest.param(
            lambda: parametrizations.orthogonal(nn.Linear(3, 3)), "allclose() needs numbers that are drawn", id="branch"
        ),
        pytest.param(lambda: nn.LazyLinear(3), "the shape of a lazy layer is decided by its first call", id="lazy"),
        *[
            pytest.param(
                lambda layout=layout: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout),
                "a tensor here is a nested tensor, whose rows have different sizes",
                id=f"nested, {layout}",
            )
            for layout in (torch.jagged, torch.strided)
        ],
        pytest.param(lambda: 3, "the constructor returned 3", id="not a module"),
    ],
)
def test_unrecordable_operation_is_an_error_with_its_line(constructor, start_of_text):
    text = error_text(defer, constructor)
    assert text.startswith(f"defer: {start_of_text}")
    if "constructor returned" not in start_of_text:
        assert "test_defer.py" in text
        assert "^" in text


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_error_text_of_leaves_without_values():
    rows = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)

    def valueless():
        module = nn.Module()
        module.register_buffer(
            "graph", torch.sparse_coo_tensor([[0, 1], [1, 0]], [1.0, 2.0], (3, 3), check_invariants=True)
        )
        with without_modes():  # as by a library with operations of its own
            module.register_buffer("table", torch.ones(2).to("meta"))
            module.register_buffer("bytes", torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8))
            module.register_buffer("rows", rows)
        return module

    expected = (
        "4 problems\n"
        "defer: graph: has the layout torch.sparse_coo\n"
        "  fix: keep the dense tensor, or indices and values; make the other in forward\n"
        "defer: table: is on the meta device, without values\n"
        "  fix: construct it on the CPU: fs.defer allocates no parameters\n"
        "defer: bytes: is quantized, as torch.qint8\n"
        "  fix: keep the integers and the scale; quantize in forward\n"
        "defer: rows: is a nested tensor, whose rows have different sizes\n"
        "  fix: keep its values and offsets; in forward, torch.nested.nested_tensor_from_jagged(values, offsets)"
    )
    assert error_text(defer, valueless) == expected
    assert error_text(defer, valueless, reference=0) == expected
    lazy = "defer: weight: is lazy: the first call of its module decides the shape\n"
    assert lazy in error_text(defer, lambda: nn.LazyLinear(3), reference=0)


def test_error_text_of_a_module_compiled_by_jit():
    assert error_text(defer, lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2)))) == (
        "defer: '0' is compiled by torch.jit\n"
        "  its parameters are in C++, where no pure function can replace them\n"
        "  fix: construct the plain module"
    )


def test_error_of_the_constructor_says_that_it_was_recorded():
    with pytest.raises(ZeroDivisionError) as e:
        defer(lambda: 1 // 0)
    assert e.value.__notes__ == [f"while fs.defer ran the constructor; if it runs alone: {EAGER}"]


def test_error_text_of_leaves_beyond_the_budget():
    def both():
        module = nn.ModuleList([nn.Linear(64, 64, bias=False), nn.Linear(32, 64, bias=False)])
        for part in module:
            nn.init.orthogonal_(part.weight)
        return module

    text = error_text(defer, both, budget=1000)
    assert text.startswith(
        "2 problems\ndefer: 0.weight: f32[64, 64] is computed in full, beyond budget=\n  operations  diag"
    )
    assert "bytes > 1,000\n  fix: budget=" in text
    needed = max(defer(both)[0].whole.values())
    defer(both, budget=needed)


class DrawnAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.noise = torch.randn(3)


def test_error_text_of_a_drawn_attribute_that_is_not_a_leaf():
    assert error_text(defer, DrawnAttribute) == (
        "defer: noise: is drawn, and neither a parameter nor a buffer\n"
        f"  fix: make it a buffer, with persistent=False; or {EAGER}"
    )


def test_error_text_of_integers_that_were_never_written():
    class Ints(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("i", torch.empty(3, dtype=torch.long))

    assert error_text(values_on_one_device, defer(Ints)[1]) == (
        "i: memory of torch.empty is used before it is written\n  shape  [3]    dtype  torch.int64\n"
        "  integers have no NaN to mark it with\n  fix: torch.zeros in the constructor"
    )


def test_error_text_of_a_copy_under_another_name():
    _, tree = deferred("weight_norm")
    name = "parametrizations.weight.original1"
    assert error_text(values_on_one_device, {"v": tree["params"][name]}) == (
        "materialize: tree['v']: is made of the draws of other leaves, found by its name\n"
        "  draws  params.parametrizations.weight.original0\n"
        f"  'v' is not 'params.{name}', nor a part of it\n"
        "  fix: keep the tree that fs.defer returned, or a part of it"
    )


def test_a_module_that_is_parallel_by_itself_is_an_error():
    text = error_text(defer, lambda: nn.Sequential(nn.Identity(), nn.DataParallel(nn.Linear(2, 2))))
    assert text.startswith("defer: '1' is a DataParallel\n")
    assert text.endswith("fix: construct the plain module; specs and fs.unshard do the same on every mesh")
