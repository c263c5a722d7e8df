"""Every layer has the values and gradients of torch's, on every mesh."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import fshard as fs
from fshard import P, ShardingError, nn
from fshard.nn import loss
from tests.lib.assertions import assert_same, error_text
from tests.lib.operations import Operations

INF = math.inf


def rand(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def ints(high, *shape, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def close(got, want, msg="", tol=1e-11):
    for (path, a), b in zip(fs.tree.leaves_with_path(got), fs.tree.leaves(want), strict=True):
        torch.testing.assert_close(
            a, b, rtol=tol, atol=tol, equal_nan=True, msg=lambda m, path=path: f"{msg} {path}: {m}"
        )


def on(sizes, f, args, in_specs, out_specs, check="first", **options):
    """Call `f` on a mesh of these sizes, or as it is if there are none."""
    if not sizes:
        return f(*args)
    step = fs.shard_map(f, mesh=fs.make_mesh(**sizes), in_specs=in_specs, out_specs=out_specs, check=check, **options)
    return fs.device_get(step(*args))


def value_and_vjp(f, *args, seed=50):
    """Compute `f`, and the gradients of <f, a fixed random tensor> with respect to every argument."""
    y, pull = torch.func.vjp(f, *args)
    return y, pull(rand(*y.shape, seed=seed, dtype=y.dtype))


@pytest.fixture(params=["plain", "row blocks"])
def kernel(request, monkeypatch):
    """Plain formula, or row blocks, which are for large logits, for all sizes."""
    if request.param == "row blocks":
        monkeypatch.setattr(loss, "_PLAIN_UP_TO", -1)
    return request.param


# --- dense layers, against torch ----------------------------------------------------------------------------


def _rms(x, w=None, eps=1e-6):
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if w is None else y * w


X, W, B = rand(2, 5, 4), rand(4, 3, seed=1), rand(3, seed=2)
Q, K, V = rand(2, 3, 5, 4), rand(2, 3, 5, 4, seed=1), rand(2, 3, 5, 4, seed=2)
LONG_K, LONG_V = rand(2, 3, 7, 4, seed=1), rand(2, 3, 7, 4, seed=2)
BOOL = rand(5, 7, seed=3) > 0
BOOL[0] = False  # attends to no position
BOOL[1] = True


def _by_hand(q, k, v, mask=None, scale=None):
    scores = q @ k.transpose(-2, -1) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return torch.softmax(scores if mask is None else scores + mask.to(q.dtype), -1) @ v


def _added(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e30)


DENSE = {
    "linear": (nn.linear, lambda x, w, b: x @ w + b, (X, W, B)),
    "linear, no bias": (nn.linear, lambda x, w: x @ w, (X, W)),
    "linear, a vector": (nn.linear, lambda x, w: x @ w, (X[0, 0], W)),
    "mlp": (lambda x, u, d, ub, db: nn.mlp(x, u, d, up_b=ub, down_b=db, activation=nn.gelu),
            lambda x, u, d, ub, db: F.gelu(x @ u + ub, approximate="tanh") @ d + db,
            (X, W, rand(3, 4), B, rand(4))),
    "mlp, no bias": (nn.mlp, lambda x, u, d: torch.relu(x @ u) @ d, (X, W, rand(3, 4))),
    "layer_norm": (nn.layer_norm, lambda x, w, b: F.layer_norm(x, (4,), w, b), (X, rand(4), rand(4, seed=1))),
    "layer_norm, bare": (lambda x: nn.layer_norm(x, eps=0.1), lambda x: F.layer_norm(x, (4,), eps=0.1), (X,)),
    "layer_norm, no bias": (nn.layer_norm, lambda x, w: F.layer_norm(x, (4,), w), (X, rand(4))),
    "rms_norm": (nn.rms_norm, _rms, (X, rand(4))),
    "rms_norm, bare": (lambda x: nn.rms_norm(x, eps=0.1), lambda x: _rms(x, eps=0.1), (X,)),
    "gelu": (nn.gelu, lambda x: F.gelu(x, approximate="tanh"), (X,)),
    "attention": (nn.attention, _by_hand, (Q, K, V)),
    "attention, scale": (lambda *a: nn.attention(*a, scale=0.3), lambda *a: _by_hand(*a, scale=0.3), (Q, K, V)),
    "attention, causal": (lambda *a: nn.attention(*a, causal=True),
                          lambda *a: _by_hand(*a, _added(nn.causal_mask(5, 5))), (Q, K, V)),
    "attention, causal, long": (lambda *a: nn.attention(*a, causal=True),
                                lambda *a: _by_hand(*a, _added(nn.causal_mask(5, 7))), (Q, LONG_K, LONG_V)),
    "attention, the last token": (lambda *a: nn.attention(*a, causal=True), _by_hand, (Q[:, :, -1:], K, V)),
    "attention, bool": (lambda *a: nn.attention(*a, mask=BOOL[1:]), lambda *a: _by_hand(*a, _added(BOOL[1:])),
                        (Q[:, :, 1:], LONG_K, LONG_V)),
    "attention, float": (lambda q, k, v, m: nn.attention(q, k, v, mask=m), _by_hand,
                         (Q, LONG_K, LONG_V, rand(5, 7))),
}  # fmt: skip


@pytest.mark.parametrize("name", DENSE)
def test_dense_layers_equal_those_of_torch(name):
    ours, theirs, args = DENSE[name]
    close(value_and_vjp(ours, *args), value_and_vjp(theirs, *args))
    single = [a.float() for a in args]
    close(value_and_vjp(ours, *single), value_and_vjp(theirs, *single), tol=2e-5)


@pytest.mark.parametrize("layer", [nn.rms_norm, nn.layer_norm])
def test_norms_of_bfloat16_are_rounded_once(layer):
    x, w = rand(32, 64, dtype=torch.float32).bfloat16(), rand(64, dtype=torch.float32).bfloat16()
    y, (gx, gw) = value_and_vjp(layer, x, w)
    want = layer(x.double(), w.double())
    assert y.dtype == gx.dtype == gw.dtype == torch.bfloat16
    torch.testing.assert_close(y.double(), want, rtol=2**-8, atol=1e-6)
    y, pull = torch.func.vjp(layer, x, w)
    g = rand(*y.shape, seed=50).bfloat16()
    _, wide = torch.func.vjp(layer, x.double(), w.double())
    close([t.double() for t in pull(g)], wide(g.double()), tol=0.05)


def test_norms_and_attention_under_vmap_jvp_and_second_derivatives():
    w = rand(4)
    for layer in (nn.rms_norm, nn.layer_norm):
        close(torch.func.vmap(layer, (0, None))(X, w), layer(X, w))
        f = lambda x, layer=layer: layer(x, w).pow(3).sum()  # noqa: E731
        x, t = X[0, :2], rand(2, 4, seed=9)
        second = torch.func.jvp(torch.func.grad(f), (x,), (t,))[1]
        close(second, (torch.func.grad(f)(x + 1e-5 * t) - torch.func.grad(f)(x - 1e-5 * t)) / 2e-5, tol=1e-6)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        f = lambda q: nn.attention(q, LONG_K, LONG_V, causal=True).pow(2).sum()  # noqa: E731
        second = torch.func.jvp(torch.func.grad(f), (Q,), (V,))[1]
        close(second, (torch.func.grad(f)(Q + 1e-5 * V) - torch.func.grad(f)(Q - 1e-5 * V)) / 2e-5, tol=1e-6)


def test_layers_without_axis_need_no_region():
    t = ints(4, 2, 5)
    assert torch.equal(nn.mlp(X, W, W.T), torch.relu(X @ W) @ W.T)
    assert torch.equal(nn.embedding(t, W), W[t])
    assert nn.dropout(X, 0.5, key=KEY).shape == X.shape
    assert torch.equal(nn.cross_entropy(X, t), nn.cross_entropy(X, t, axis=(), over=()))


# --- parallel layers ----------------------------------------------------------------------------------------

AXES = {
    "1": {"m": 1},
    "2": {"m": 2},
    "3": {"m": 3},
    "4": {"m": 4},
    "two axes": {"a": 2, "b": 2},
    "3x2": {"a": 3, "b": 2},
}


def axis_of(sizes):
    return "m" if "m" in sizes else ("a", "b")


@pytest.mark.parametrize("name", ["1", "3x2"])
def test_parallel_mlp(name):
    sizes, a = AXES[name], axis_of(AXES[name])
    args = (X, rand(4, 7), rand(7, 4, seed=1), rand(7, seed=2), rand(4, seed=3))
    f = lambda x, u, d, ub, db, axis=None: nn.mlp(x, u, d, up_b=ub, down_b=db, axis=axis)  # noqa: E731
    specs = (P(), P(None, a), P(a), P(a), P())
    run = lambda *args: value_and_vjp(lambda *args: f(*args, axis=a), *args)  # noqa: E731
    with fs.recording() as log:
        got = on(sizes, run, args, specs, (P(), specs))
    close(got, value_and_vjp(f, *args))
    n = math.prod(sizes.values())
    assert len(log) == (2 * n if n > 1 else 0)


def embed(sizes, ids, table, size=None):
    """The rows, and the gradient of the table."""
    a = axis_of(sizes)

    def run(ids, table):
        y, pull = torch.func.vjp(lambda t: fs.psum(nn.embedding(ids, t, axis=a, size=size), a), table)
        return y, pull(rand(*y.shape, seed=50, dtype=y.dtype))[0]

    return on(sizes, run, (ids, table), (P(), P(a)), (P(), P(a)))


def test_embedding_of_an_uneven_vocabulary_of_50257():
    table = rand(50257, 2)
    ids = torch.tensor([[0, 50256, 12564], [12565, 12565, 37695]])  # 50257 over 4: 12565, 12565, 12565, 12562
    y, pull = torch.func.vjp(lambda t: F.embedding(ids, t), table)
    close(embed({"m": 4}, ids, table, 50257), (y, pull(rand(*y.shape, seed=50))[0]))


def test_embedding_reads_no_other_row_and_gives_nan_for_ids_outside_the_table(monkeypatch):
    """A NaN in row 0 of a part, which other ids read and discard, does not spread."""
    table = rand(6, 2)
    table[[0, 3]] = math.nan
    monkeypatch.setattr("fshard.nn.layers.check_range", lambda *_, **__: None)  # as on a GPU
    got, _ = embed({"m": 2}, torch.tensor([1, 4, 0, 6, -1]), table)
    assert got.isnan().any(-1).tolist() == [False, False, True, True, True]
    assert nn.embedding(torch.tensor([1]), table.bfloat16()).dtype == torch.bfloat16
    assert embed({"m": 2}, torch.tensor([1]), table.bfloat16())[0].dtype == torch.bfloat16


def test_embedding_under_vmap_and_jvp():
    table, ids = rand(7, 3), ints(7, 4, 2)
    f = lambda ids, t: fs.psum(nn.embedding(ids, t, axis="m", size=7), "m")  # noqa: E731
    tables = torch.stack([table, 2 * table])

    def run(table, tables):
        jvp = torch.func.jvp(lambda t: f(ids, t), (table,), (2 * table,))[1]
        grads = torch.func.vmap(torch.func.grad(lambda t, i: f(i, t).square().sum()), (None, 0))(table, ids)
        return (torch.func.vmap(f, (0, None))(ids, table), torch.func.vmap(f, (None, 0))(ids, tables), jvp, grads)

    got = on({"m": 4}, run, (table, tables), (P("m"), P(None, "m")), (P(), P(), P(), P(None, "m")))
    y = F.embedding(ids, table)
    grads = torch.func.vmap(torch.func.grad(lambda t, i: F.embedding(i, t).square().sum()), (None, 0))(table, ids)
    close(got, (y, torch.stack([y, 2 * y]), 2 * y, grads))


# --- attention on meshes and with dropout -------------------------------------------------------------------

KEY = fs.key(5)


@pytest.mark.parametrize("sizes", [{"d": 1, "m": 4}, {"d": 3, "m": 2}])
@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_attention_on_meshes(sizes, rate):
    """Three heads over two and four ranks (one rank has none), two examples over three."""
    spec, shape = P("d", "m"), (2, 3, 5, 7)

    def f(q, k, v, spec=None):
        return nn.attention(q, k, v, causal=True, rate=rate, key=KEY, spec=spec, shape=shape)

    def run(*args):
        y, pull = torch.func.vjp(lambda *args: f(*args, spec=spec), *args)
        return y, pull(y)

    y, pull = torch.func.vjp(f, Q, LONG_K, LONG_V)
    close(on(sizes, run, (Q, LONG_K, LONG_V), (spec,) * 3, (spec, (spec,) * 3)), (y, pull(y)))


@pytest.mark.parametrize("kind", ["none", "causal", "long", "bool", "float"])
def test_attention_drops_weights_with_one_mask(kind):
    k, v = (K, V) if kind == "causal" else (LONG_K, LONG_V)
    mask = {"bool": BOOL, "float": rand(5, 7)}.get(kind)
    causal = kind in ("causal", "long")
    attended = nn.causal_mask(5, k.shape[2]) if causal else mask
    keep = fs.random.bernoulli(KEY, (2, 3, 5, k.shape[2]), p=0.6)

    def by_hand(q, k, v):
        scores = q @ k.transpose(-2, -1) * 0.3
        if attended is not None:
            scores = scores.masked_fill(~attended, -1e30) if attended.dtype == torch.bool else scores + attended
        weights = torch.softmax(scores, -1)
        if kind == "bool":
            weights = weights * BOOL.any(-1, keepdim=True)
        return (weights * keep / 0.6) @ v

    f = lambda *a: nn.attention(*a, causal=causal, mask=mask, scale=0.3, rate=0.4, key=KEY)  # noqa: E731
    close(value_and_vjp(f, Q, k, v), value_and_vjp(by_hand, Q, k, v), tol=1e-6)  # the softmax is in float64 all along
    almost = lambda *a: nn.attention(*a, causal=causal, mask=mask, rate=1e-12, key=KEY)  # noqa: E731
    fused = lambda *a: nn.attention(*a, causal=causal, mask=mask)  # noqa: E731
    close(value_and_vjp(almost, Q, k, v), value_and_vjp(fused, Q, k, v), tol=1e-9)


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_queries_that_attend_to_no_position_get_zero(rate):
    for mask in (BOOL, torch.zeros(5, 7, dtype=torch.float64).masked_fill(~BOOL, -INF)):
        f = lambda q, k, v, mask=mask: nn.attention(q, k, v, mask=mask, rate=rate, key=KEY)  # noqa: E731
        y, grads = value_and_vjp(f, Q, LONG_K, LONG_V)
        assert not y[:, :, 0].any()
        assert not grads[0][:, :, 0].any()
        assert all(g.isfinite().all() for g in grads)
    y = nn.attention(LONG_K, Q, V, causal=True, rate=rate, key=KEY)  # seven queries, the last of five positions
    assert not y[:, :, :2].any()
    assert (y[:, :, 2:] != 0).any(-1).all() or rate


def test_attention_in_bfloat16():
    q, k, v = (t.bfloat16() for t in (Q, LONG_K, LONG_V))
    want = nn.attention(q.double(), k.double(), v.double(), causal=True)
    for rate in (0.0, 1e-12):
        got = nn.attention(q, k, v, causal=True, rate=rate, key=KEY)
        assert got.dtype == torch.bfloat16
        close(got.double(), want, tol=0.03)


# --- dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", [P(), P("d"), P(None, "m"), P("d", "m"), P(("d", "m")), P(("m", "d")), P(None, None, "m")]
)
def test_dropout_is_the_same_on_every_mesh(spec):
    x = rand(5, 7, 3)
    want = value_and_vjp(lambda x: nn.dropout(x, 0.3, key=KEY), x)
    g = rand(5, 7, 3, seed=50)
    for shape in ((5, 7, 3), None):

        def run(x, g, shape=shape):
            y, pull = torch.func.vjp(lambda x: nn.dropout(x, 0.3, key=KEY, spec=spec, shape=shape), x)
            return y, pull(g)

        got = on({"d": 4, "m": 2}, run, (x, g), (spec, spec), (spec, (spec,)))
        close(got, want, tol=0)


def test_dropout_keeps_the_expectation_and_scales_value_and_gradient_equally():
    x = torch.ones(200, 500)
    y = nn.dropout(x, 0.2, key=KEY)
    assert set(y.unique().tolist()) == {0.0, 1.25}
    assert abs(y.mean() - 1) < 4 * 0.5 / math.sqrt(x.numel())  # the standard deviation of an element is 0.5
    assert torch.equal(torch.func.grad(lambda x: nn.dropout(x, 0.2, key=KEY).sum())(x), y)
    assert not torch.equal(nn.dropout(x, 0.2, key=fs.key(6)), y)
    assert nn.dropout(x, 0.2, key=None) is x
    assert nn.dropout(x, 0, key=KEY) is x
    assert nn.dropout(x.bfloat16(), 0.2, key=KEY).dtype == torch.bfloat16


def test_dropout_under_transforms():
    x = rand(4, 6)
    f = lambda x: nn.dropout(torch.sin(x), 0.5, key=KEY).square().sum()  # noqa: E731
    close(torch.func.grad(fs.remat(f))(x), torch.func.grad(f)(x), tol=0)
    mask = nn.dropout(torch.ones(6), 0.5, key=KEY)
    each = lambda row: nn.dropout(row, 0.5, key=KEY)  # noqa: E731
    close(torch.func.vmap(each)(x.float()), x.float() * mask)  # one key, one mask
    keys = fs.split(KEY, 4)
    want = torch.stack([nn.dropout(r, 0.5, key=k) for r, k in zip(x, keys, strict=True)])
    close(torch.func.vmap(lambda r, k: nn.dropout(r, 0.5, key=k))(x, keys), want)
    close(torch.func.jvp(lambda x: nn.dropout(x, 0.5, key=KEY), (x,), (2 * x,))[1], 2 * nn.dropout(x, 0.5, key=KEY))


# --- cross entropy ------------------------------------------------------------------------------------------

LOSSES = {
    "dense": ({}, None, None),
    "1": ({"m": 1}, "m", None),
    "2": ({"m": 2}, "m", None),
    "3": ({"m": 3}, "m", None),
    "4": ({"m": 4}, "m", None),
    "two axes": ({"a": 2, "b": 2}, ("a", "b"), None),
    "minor, major": ({"a": 2, "b": 3}, ("b", "a"), None),
    "data": ({"d": 4}, None, "d"),
    "data, model": ({"d": 2, "m": 3}, "m", "d"),
    "three axes": ({"d": 2, "a": 2, "b": 2}, ("a", "b"), "d"),
    "two data axes": ({"d": 2, "e": 2}, None, ("d", "e")),
}
TABLE = [
    dict(zip(("reduction", "weighted", "ignore_index", "label_smoothing"), row, strict=True))
    for row in itertools.product(("none", "mean", "sum"), (False, True), (-100, 2), (0.0, 0.1))
]
PAIRS = [TABLE[i] for i in (1, 6, 8, 15, 18, 21)]  # every value of an option with every value of every other one
WITH_THE_TABLE = ("dense", "data")  # other layouts take the pairs; all combinations in two of them are slow


def theirs(x, t, w, *, ignore_index=-100, label_smoothing=0.0, reduction="mean"):
    x = x.double() if x.dtype != torch.float64 else x
    y = F.cross_entropy(x.flatten(0, -2), t.flatten(), w, ignore_index=ignore_index,
                        label_smoothing=label_smoothing, reduction=reduction)  # fmt: skip
    return y.view(t.shape) if reduction == "none" else y


def want_loss(x, t, w, **kw):
    y, pull = torch.func.vjp(lambda x: theirs(x, t, w, **kw), x)
    return y, pull(rand(*y.shape, seed=50))[0]


def our_losses(layout, x, cases, size=None):
    """Compute, for each (targets, weight, keywords), value and gradient of the loss or of <losses, a fixed tensor>."""
    sizes, axis, over = LOSSES[layout]
    keywords = [kw for *_, kw in cases]
    tensors = [(t, w, rand(*t.shape if kw.get("reduction") == "none" else (), seed=50)) for t, w, kw in cases]

    def run(x, tensors):
        out = []
        for (t, w, c), kw in zip(tensors, keywords, strict=True):

            def f(x, t=t, w=w, c=c, kw=kw):
                y = nn.cross_entropy(x, t, axis=axis, size=size, over=over, weight=w, **kw)
                return (y * c.to(y.dtype)).sum(), y

            (_, y), gradient = fs.value_and_grad(f, has_aux=True)(x)
            out.append((y, gradient))
        return out

    if not sizes:
        return run(x, tensors)
    x_spec = P(over, *[None] * (x.ndim - 2), axis)
    values = [P(over) if kw.get("reduction") == "none" else P() for kw in keywords]
    specs = (x_spec, [(P(over), P(axis), v) for v in values])
    return on(sizes, run, (x, tensors), specs, [(v, x_spec) for v in values], check_of(layout))


def check_of(layout):
    """`check=` on a layout: types do not depend on sizes; with and without a split vocabulary these have them all."""
    return "first" if layout in ("data", "data, model") else "never"


def our_loss(layout, x, t, w, size=None, **kw):
    return our_losses(layout, x, [(t, w, kw)], size)[0]


each_layout = pytest.mark.parametrize(
    ("layout", "kernel"),
    [(layout, "plain") for layout in LOSSES if layout not in ("1", "2", "3", "4", "two axes")]  # parts of the others
    + [(layout, "row blocks") for layout in ("dense", "data, model")],
    indirect=["kernel"],
)
some_layouts = pytest.mark.parametrize(
    ("layout", "kernel"),
    [(layout, "plain") for layout in ("dense", "4", "three axes")] + [("data, model", "row blocks")],
    indirect=["kernel"],
)


def check_options(layout, table):
    x, t, w = rand(12, 7), ints(7, 12, seed=1), rand(7, seed=2).abs()
    t[:5] = -100  # the ranks along `over` count different numbers of targets, one of them none
    t[6] = -100
    cases = []
    for row in table:
        kw = dict(row)
        weight = w if kw.pop("weighted") else None
        cases.append((t.where(t >= 0, kw["ignore_index"]), weight, kw))
    for got, (targets, weight, kw) in zip(our_losses(layout, x, cases, 7), cases, strict=True):
        close(got, want_loss(x, targets, weight, **kw), str(kw))


@each_layout
def test_cross_entropy_equals_that_of_torch_on_every_mesh(layout, kernel):
    check_options(layout, TABLE if layout in WITH_THE_TABLE else PAIRS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["minor, major", "data, model"])  # every layout has the pairs
def test_all_options_of_cross_entropy_on_larger_meshes(layout, kernel):
    check_options(layout, TABLE)


def test_pairs_of_options_are_all_pairs():
    pairs = lambda rows: {p for row in rows for p in itertools.combinations(row.items(), 2)}  # noqa: E731
    assert pairs(PAIRS) == pairs(TABLE)


@pytest.mark.parametrize("axis", [None, "m"])
def test_classes_and_ids_of_one_byte_are_those_of_eight(axis):
    """-100 and the sizes are no bytes: torch compares a byte with such a number as the byte that they wrap to."""
    x, t, table = rand(6, 1000), torch.tensor([0, 44, 156, 231, 232, 255]), rand(1000, 2)

    def run(x, t, table):
        embed = lambda w: nn.embedding(t, w, axis=axis, size=1000, out=axis and "whole", padding_idx=300)  # noqa: E731
        losses = nn.cross_entropy(x, t, axis=axis, size=1000, label_smoothing=0.1, reduction="none")
        logits = nn.arcface(x.tanh(), t, axis=axis, size=1000)
        margins = nn.cross_entropy(logits, t, axis=axis, size=1000, label_smoothing=0.1)
        return losses, margins, nn.accuracy(x, t, (200, 500), axis=axis, size=1000), *value_and_vjp(embed, table)

    specs, out = (P(None, axis), P(), P(axis)), (P(), P(), P(), P(), (P(axis),))
    got, want = (on({"m": 2}, run, (x, t, table), specs, out) for t in (t.to(torch.uint8), t))
    assert_same(got, want)


@some_layouts
def test_cross_entropy_of_any_shape(layout, kernel):
    for shape in [(12, 1, 2), (12,)]:
        x, t = rand(*shape, 5), ints(5, *shape, seed=1)
        want = [want_loss(x, t, None, **kw) for kw in ({}, {"reduction": "none"})]
        close(our_losses(layout, x, [(t, None, {}), (t.int(), None, {"reduction": "none"})], 5), want)
        close(our_losses(layout, x, [(t.int(), None, {}), (t, None, {"reduction": "none"})]), want)  # ranks exchange V
    x = rand(5)
    close(nn.cross_entropy(x, torch.tensor(3)), F.cross_entropy(x, torch.tensor(3)))
    assert nn.cross_entropy(rand(0, 5), ints(5, 0)).isnan()
    assert nn.cross_entropy(rand(0, 5), ints(5, 0), reduction="sum") == 0


@pytest.mark.parametrize("layout", ["4", "three axes"])
@pytest.mark.parametrize("vocabulary", [1, 3])
def test_cross_entropy_with_empty_parts(layout, vocabulary, kernel):
    x, t, w = rand(6, vocabulary), ints(vocabulary, 6, seed=1), rand(vocabulary, seed=2).abs()
    cases = [(t, None, {}), (t, w, {"label_smoothing": 0.2})]
    for got, (_, weight, kw) in zip(our_losses(layout, x, cases, vocabulary), cases, strict=True):
        close(got, want_loss(x, t, weight, **kw))


@pytest.mark.parametrize(("layout", "kernel"), [("4", "row blocks"), ("data, model", "plain")], indirect=["kernel"])
def test_cross_entropy_of_an_uneven_vocabulary_of_50257(layout, kernel):
    x, t = rand(4, 50257), torch.tensor([0, 50256, 12565, -100])
    close(our_loss(layout, x, t, None, 50257), want_loss(x, t, None))
    got, want = (
        our_loss(layout, x.float(), t, None, 50257, label_smoothing=0.1),
        want_loss(x, t, None, label_smoothing=0.1),
    )
    close([y.double() for y in got], want, tol=1e-6)


@some_layouts
def test_cross_entropy_of_no_targets(layout, kernel):
    x, t = rand(12, 7), torch.full((12,), -100)
    kinds = (("none", 0.1), ("mean", 0.0), ("mean", 0.1), ("sum", 0.0))
    cases = [(t, None, {"reduction": r, "label_smoothing": s}) for r, s in kinds]
    for got, (*_, kw) in zip(our_losses(layout, x, cases, 7), cases, strict=True):
        close(got, want_loss(x, t, None, **kw), str(kw))
        if kw["reduction"] != "mean":
            assert not got[0].any()
            assert not got[1].any()


@pytest.mark.parametrize("layout", ["dense", "2"])
def test_cross_entropy_of_extreme_logits(layout, kernel):
    """Huge logits, masked classes, a part of which all classes are masked, and a masked target."""
    x, t = rand(12, 8) * 1e4, ints(4, 12, seed=1)
    x[0] = 1e4
    x[1], x[1, 3] = -1e4, 1e4
    x[2:6, 4:] = -INF  # rank 1 of 2 has nothing but -inf
    x[6, 1:] = -INF
    x[7, :4], t[7] = -INF, 6
    x[8, 0], t[8] = -INF, 0
    t[6] = 0
    for dtype, tol in ((torch.float64, 1e-11), (torch.float32, 1e-6)):
        for reduction in ("none", "sum"):
            cast = x.to(dtype)
            want = want_loss(cast.double(), t, None, reduction=reduction)
            assert want[1].isfinite().all()
            close([y.double() for y in our_loss(layout, cast, t, None, 8, reduction=reduction)], want, tol=tol)
    assert our_loss(layout, x, t, None, 8, reduction="none")[0][8] == INF
    x[3, 5] = math.nan
    assert our_loss(layout, x, t, None, 8)[0].isnan()


@pytest.mark.parametrize("layout", ["dense", "3"])
def test_cross_entropy_of_bfloat16(layout, kernel):
    x, t = rand(12, 7).bfloat16(), ints(7, 12, seed=1)
    for kw in ({}, {"label_smoothing": 0.1, "reduction": "none"}):
        value, grad = our_loss(layout, x, t, None, 7, **kw)
        want, want_grad = want_loss(x.double(), t, None, **kw)
        assert (value.dtype, grad.dtype) == (torch.float32, torch.bfloat16)
        close(value.double(), want, tol=1e-6)
        tol = 0.01 if kw else 1e-6  # smoothing is a second rounded term
        torch.testing.assert_close(grad.double(), want_grad, rtol=2**-8, atol=tol)


def test_a_target_outside_the_classes_is_one_error_on_every_mesh(monkeypatch):
    x = rand(6, 7)
    for bad in (7, -1, 10**9):
        t = torch.tensor([1, 2, bad, -100, 0, 3])
        for layout, kw in (
            ("dense", {}),
            ("dense", {"label_smoothing": 0.1}),
            ("1", {}),
            ("2", {}),
            ("data, model", {}),
        ):
            text = error_text(our_loss, layout, x, t, None, 7, reduction="sum", **kw)
            assert text.startswith(f"cross_entropy: target {bad} is out of range, of 7 classes\n  so are 1 of ")
            assert text.endswith("fix: 0 to 6, or ignore_index=-100")
        want = theirs(x, t.where(t != bad, -100), None, reduction="sum")
        for layout in ("dense", "2"):  # the fix
            close(our_loss(layout, x, t.where(t != -100, bad), None, 7, ignore_index=bad, reduction="sum")[0], want)
    table, ids = rand(7, 3), torch.tensor([[0, 6], [7, 1]])
    for sizes, axis in (({}, None), ({"m": 2}, "m")):

        def look_up(ids, table, axis=axis):
            return nn.embedding(ids, table, axis=axis, size=7, out=axis and "whole")

        assert "embedding: id 7 is out of range, of 7 rows of table\n  so are 1 of 4" in error_text(
            on, sizes, look_up, (ids, table), (P(), P(axis)), P()
        )
        close(on(sizes, look_up, (ids.clamp(max=6), table), (P(), P(axis)), P()), table[ids.clamp(max=6)])
    # Where the host would have to wait for the device, a wrong target is NaN; this stands for a GPU.
    monkeypatch.setattr("fshard.nn.loss.check_range", lambda *_, **__: None)
    for layout in ("1", "2", "4"):
        got, _ = our_loss(layout, x, torch.tensor([1, 2, 7, -100, 0, 3]), None, 7, reduction="none")
        assert got.isnan().tolist() == [False, False, True, False, False, False]


@pytest.mark.parametrize("layout", ["dense", "3", pytest.param("data", marks=pytest.mark.slow)])
def test_cross_entropy_under_transforms(layout, kernel):
    """Compare jvp, second derivatives in every order, and vmap over each argument."""
    sizes, axis, over = LOSSES[layout]
    x, t, rate, w = rand(4, 5), torch.tensor([0, 4, -100, 2]), rand(4, 5, seed=3), rand(5, seed=4).abs()
    xs, ts = rand(4, 3, 5), ints(5, 4, 3)

    def run(x, t, rate, w, xs, ts, ours=True):
        def f(x, t=t):
            if not ours:
                return theirs(x, t, w, label_smoothing=0.1).square()
            y = nn.cross_entropy(x, t, axis=axis, size=5, over=over, weight=w, label_smoothing=0.1)
            return y.square()  # so that the gradient of the loss depends on x, too

        def one_by_one(f, in_dims, out_dim=0):  # torch cannot vmap its own label smoothing
            pick = lambda x, d, i: x if d is None else x.select(d, i)  # noqa: E731
            return lambda x, t: torch.stack(
                [f(pick(x, in_dims[0], i), pick(t, in_dims[1], i)) for i in range(3)], out_dim
            )

        over_each = torch.func.vmap if ours else one_by_one
        g = torch.func.grad(f)
        along = lambda x: fs.psum((g(x) * rate).sum(), over_all) if ours and sizes else (g(x) * rate).sum()  # noqa: E731
        return {
            "jvp": torch.func.jvp(f, (x,), (rate,))[1],
            "forward over reverse": torch.func.jvp(g, (x,), (rate,))[1],
            "reverse over reverse": torch.func.grad(along)(x),
            "vmap": over_each(f, (1, 1))(xs, ts),
            "vmap of x": over_each(f, (1, None))(xs, t),
            "vmap of targets": over_each(f, (None, 1))(x, ts),
            "vmap of grad": over_each(g, (1, 1), 1)(xs, ts),
            "jacobian": torch.func.jacrev(lambda x: f(x) * torch.arange(3.0))(x),  # one x, several cotangents
        }

    want = run(x, t, rate, w, xs, ts, ours=False)
    if not sizes:
        close(run(x, t, rate, w, xs, ts), want)
        return
    over_all = tuple(sizes)
    x_spec = P(over, axis)
    specs = dict.fromkeys(want, P()) | {"forward over reverse": x_spec, "reverse over reverse": x_spec}
    specs |= {"vmap of grad": P(over, None, axis), "jacobian": P(None, over, axis)}
    args = (x_spec, P(over), x_spec, P(axis), P(over, None, axis), P(over))
    close(on(sizes, run, (x, t, rate, w, xs, ts), args, specs, check_of(layout)), want)


def test_cross_entropy_communicates_three_numbers_per_target(kernel):
    x, t = rand(12, 8, dtype=torch.float32), ints(8, 12)

    def log_of(layout, f, out=None, **kw):
        sizes, axis, over = LOSSES[layout]
        with fs.recording() as log:
            loss = lambda x, t: nn.cross_entropy(x, t, axis=axis, size=8, over=over, **kw)  # noqa: E731
            on(sizes, lambda x, t: f(lambda x: loss(x, t), x), (x, t), (P(over, axis), P(over)), out or P())
        n = math.prod(sizes.values())
        assert len(log) % n == 0
        return [(m.op, m.axes, m.bytes // 4) for m in log], len(log) // n

    for f in (lambda f, x: f(x), lambda f, x: fs.value_and_grad(f)(x)[0]):  # backward communicates nothing
        transfers, number = log_of("2", f)
        assert number == 2
        assert sorted(set(transfers)) == [("all_reduce", ("m",), 24), ("all_reduce max", ("m",), 12)]
        transfers, number = log_of("data", f)
        assert (number, set(transfers)) == (1, {("all_reduce", ("d",), 2)})
        transfers, number = log_of("data, model", f)
        assert number == 3
        assert log_of("1", f)[1] == 0
    transfers, number = log_of("2", lambda f, x: f(x), label_smoothing=0.1)
    assert number == 2
    assert ("all_reduce", ("m",), 36) in transfers
    second = lambda f, x: torch.func.grad(lambda x: torch.func.grad(f)(x).square().sum())(x)  # noqa: E731
    # The derivative of the softmax's denominator: pvary's transpose, a psum.
    transfers, number = log_of("2", second, P(None, "m"))
    assert number <= 4


def test_cross_entropy_of_large_logits_makes_no_array_of_their_size_but_the_gradient(monkeypatch):
    monkeypatch.setattr(loss, "_PLAIN_UP_TO", 1 << 20)
    x, t = rand(2048, 1203, dtype=torch.float32), ints(1203, 2048)

    def run(x, t):
        for donate in (False, True):
            with Operations() as seen:
                # The product stands for a model: its logits are the first array, the gradient of x the last.
                fs.value_and_grad(lambda x: nn.cross_entropy(2 * x, t, axis="m", size=1203, donate=donate))(x)  # noqa: B023
            assert sum(a.numel >= x.numel() for a in seen.allocated) == 3 - donate, "and the gradient of the logits"
        sizes = {n for shape in seen.shapes for n in (*shape, shape.numel())}
        assert not sizes & {1203, 1203 * 2048}, "no rank has the whole vocabulary"
        return t.new_zeros(())

    assert x.numel() // 2 > loss._PLAIN_UP_TO
    mesh = fs.make_mesh(m=2)
    fs.shard_map(run, mesh=mesh, in_specs=(P(None, "m"), P()), out_specs=P())(x, t)
    with Operations() as seen:
        fs.value_and_grad(nn.cross_entropy)(x, t)
    assert sum(a.numel >= x.numel() for a in seen.allocated) == 1


def test_large_and_small_logits_agree(monkeypatch):
    x, t = rand(300, 4001, dtype=torch.float32), ints(4001, 300)  # ten blocks, of 32 rows and 12
    monkeypatch.setattr(loss, "_PLAIN_UP_TO", -1)
    large = fs.value_and_grad(nn.cross_entropy)(x, t)
    monkeypatch.setattr(loss, "_PLAIN_UP_TO", 1 << 30)
    close(large, fs.value_and_grad(nn.cross_entropy)(x, t), tol=1e-6)
    view = rand(4001, 300, dtype=torch.float32).T
    small = fs.value_and_grad(nn.cross_entropy)(view, t)
    monkeypatch.setattr(loss, "_PLAIN_UP_TO", -1)
    close(fs.value_and_grad(nn.cross_entropy)(view, t), small, tol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_over_donated_logits_are_those_beside_them(monkeypatch, dtype):
    monkeypatch.setattr(loss, "_PLAIN_UP_TO", -1)
    monkeypatch.setattr(loss, "_BLOCK", {"cpu": 40})
    x, w, t = rand(2, 7, 5, dtype=dtype), rand(5, 12, dtype=dtype), ints(12, 2, 7)
    t[1, 3:] = -100
    logits = {"row by row": lambda x: x @ w, "not contiguous": lambda x: (x.transpose(0, 1) @ w).transpose(0, 1)}
    for name, f in logits.items():
        for smooth in (0.0, 0.1):
            run = lambda x, donate, f=f, smooth=smooth: nn.cross_entropy(  # noqa: E731
                f(x), t, over="d", label_smoothing=smooth, donate=donate)  # fmt: skip
            got, want = ((fs.shard_map(lambda x, donate=donate, run=run: fs.value_and_grad(lambda x: run(x, donate))(x),
                                       mesh=fs.make_mesh(d=1), in_specs=P(), out_specs=P(), check="always")(x))
                         for donate in (True, False))  # fmt: skip
            assert_same(got, want, f"{name} {smooth}")


def test_donated_logits_are_used_once(monkeypatch):
    monkeypatch.setattr(loss, "_PLAIN_UP_TO", -1)
    x, t = rand(6, 5, dtype=torch.float32).requires_grad_(), ints(5, 6)
    out = nn.cross_entropy(2 * x, t, donate=True)
    (first,) = torch.autograd.grad(out, x, retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, x)
    out = nn.cross_entropy(2 * x, t, donate=True)
    (g,) = torch.autograd.grad(out, x, create_graph=True)  # writes nothing
    assert torch.autograd.grad(g.square().sum(), x)[0].abs().sum() > 0
    close(g.detach(), first)
    exps = (2 * x).exp()  # of which the backward pass needs the values
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        nn.cross_entropy(exps, t, donate=True).backward()


def test_second_derivatives_of_row_blocks_by_plain_autograd(monkeypatch):
    """With create_graph the backward pass of row blocks is itself differentiable; forward mode works without vmap."""
    x, t, rate = rand(6, 5), ints(5, 6), rand(6, 5, seed=3)

    def derivatives(f):
        own = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(f(own, t).square(), own, create_graph=True)
        (h,) = torch.autograd.grad((g * rate).sum(), own)
        with torch.autograd.forward_ad.dual_level():
            out = f(torch.autograd.forward_ad.make_dual(x, rate), t)
            return g.detach(), h, torch.autograd.forward_ad.unpack_dual(out).tangent

    monkeypatch.setattr(loss, "_PLAIN_UP_TO", -1)
    close(derivatives(nn.cross_entropy), derivatives(F.cross_entropy))


# --- compiled -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_compiled_program_of_all_layers_equals_the_eager_one():
    p = {
        "wte": rand(11, 8, dtype=torch.float32),
        "up": rand(8, 12, dtype=torch.float32),
        "down": rand(12, 8, dtype=torch.float32),
    }
    ids, targets = ints(11, 2, 6), ints(11, 2, 6, seed=1)

    def loss(p, ids, targets, key):
        x = fs.psum(nn.embedding(ids, p["wte"], axis="m", size=11), "m")
        h = nn.rms_norm(x).unflatten(-1, (2, 4)).transpose(1, 2)
        h = nn.attention(h, h, h, causal=True, rate=0.1, key=fs.fold_in(key, "attn"), spec=P(None, "m"))
        h = nn.layer_norm(nn.attention(h, h, h, causal=True).transpose(1, 2).flatten(2))
        h = nn.dropout(h, 0.2, key=key) + nn.mlp(x, p["up"], p["down"], axis="m")
        cosines = nn.cosine_logits(h, p["wte"])
        logits = nn.linear(h, p["wte"].T) + nn.arcface(cosines, targets, axis="m", size=11, scale=4.0)
        return nn.cross_entropy(logits, targets, axis="m", size=11, label_smoothing=0.1)

    def run(p, ids, targets, key):
        up, t = p["up"], targets.flatten()[:8]  # stand for logits, which are ranked by operations of their own
        ranked = nn.top_k(up, 3, axis="m"), nn.accuracy(up, t, axis="m")
        return fs.value_and_grad(loss)(p, ids, targets, key), ranked

    mesh = fs.make_mesh(m=1)
    plain, compiled = (fs.shard_map(run, mesh=mesh, out_specs=P(), compile=c) for c in (False, True))
    close(fs.device_get(compiled(p, ids, targets, KEY)), fs.device_get(plain(p, ids, targets, KEY)), tol=1e-5)
    ids, targets = ints(11, 3, 6), ints(11, 3, 6, seed=1)  # a second size makes dynamo trace it as unknown
    close(fs.device_get(compiled(p, ids, targets, KEY)), fs.device_get(plain(p, ids, targets, KEY)), tol=1e-5)


# --- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: nn.dropout(X, 1.0, key=KEY), "dropout: rate=1.0\n  fix: 0 <= rate < 1"),
        (lambda: nn.dropout(X, -0.1, key=None), "dropout: rate=-0.1\n  fix: 0 <= rate < 1"),
        (lambda: nn.attention(Q, K, V, rate=math.nan),
         "attention: rate=nan\n  fix: 0 <= rate < 1"),
        (lambda: nn.dropout(X, 0.1, key=KEY, shape=(2, 5, 3)),
         ("dropout: x is not this rank's part of the global array\n"
         "  shape  [2, 5, 3]    spec  P()    part  [2, 5, 3]    x  [2, 5, 4]\n  fix: pass the global shape=")),
        (lambda: nn.attention(Q, K, V, causal=True, mask=BOOL),
         "attention: causal=True and a mask\n  fix: combine the mask with nn.causal_mask(T, S)"),
        (lambda: nn.cross_entropy(X, ints(4, 2, 5), reduction="avg"),
         "cross_entropy: reduction must be 'none', 'mean' or 'sum', got 'avg'"),
        (lambda: nn.cross_entropy(X, ints(4, 2, 5), label_smoothing=1.5),
         "cross_entropy: label_smoothing=1.5\n  fix: 0 <= label_smoothing <= 1"),
        (lambda: nn.cross_entropy(X, X),
         ("cross_entropy: targets must be one integer class for each row of logits\n"
         "  logits  f64[2, 5, 4]    targets  f64[2, 5, 4]\n"
         "  fix: gather targets where features are gathered; .long() makes integers")),
        (lambda: nn.cross_entropy(torch.ones(()), torch.tensor(0)),
         ("cross_entropy: targets must be one integer class for each row of logits\n"
         "  logits  f32[]    targets  i64[]\n"
         "  fix: gather targets where features are gathered; .long() makes integers")),
        (lambda: nn.cross_entropy(X, ints(4, 5)),
         ("cross_entropy: targets must be one integer class for each row of logits\n"
         "  logits  f64[2, 5, 4]    targets  i64[5]\n"
         "  fix: gather targets where features are gathered; .long() makes integers")),
        (lambda: nn.cross_entropy(X, ints(4, 2, 5), weight=B),
         "cross_entropy: weight must be one number for each class here\n  logits  f64[2, 5, 4]    weight  f64[3]"),
        (lambda: nn.cross_entropy(X, ints(4, 2, 5), axis="m"),
         ("cross_entropy: called outside shard_map, where no mesh axis is bound\n"
         "  fix: call it inside a function wrapped by fs.shard_map(f, mesh=..., ...)")),
        (lambda: nn.embedding(ints(4, 2), W, axis="m", size=4),
         ("embedding: called outside shard_map, where no mesh axis is bound\n"
         "  fix: call it inside a function wrapped by fs.shard_map(f, mesh=..., ...)")),
    ],
)  # fmt: skip
def test_error_texts(call, text):
    assert error_text(call) == text


def test_error_texts_of_local_parts():
    assert error_text(embed, {"m": 2}, ints(4, 3), rand(6, 2), size=7) == (
        "embedding: this rank holds 3 of the vocabulary, its part is 4\n"
        "  7 over 'm' splits into [4, 3]\n  fix: pass size=, of all ranks, or the lengths of their parts"
    )
    with pytest.raises(ShardingError, match="this rank holds 4 of the vocabulary, its part is 3"):
        our_loss("2", rand(6, 8), ints(8, 6), None, 6)
    with pytest.raises(ShardingError, match="the mesh has no axis 'x'"):
        on({"m": 2}, lambda i, t: nn.embedding(i, t, axis="x", size=4), (ints(4, 3), rand(4, 2)), (P(), P()), P())
    with pytest.raises(ShardingError, match="dropout: x is not this rank's part"):
        on({"m": 2}, lambda x: nn.dropout(x, 0.5, key=KEY, spec=P("m"), shape=(4, 3)), (rand(6, 3),), (P("m"),), P("m"))


@pytest.mark.parametrize("causal", [False, True])
def test_grouped_query_attention_equals_attention_of_each_group(causal):
    q, k, v = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)
    want = torch.cat([nn.attention(q[:, 3 * i : 3 * i + 3], k[:, i : i + 1].expand(2, 3, 5, 4),
                                   v[:, i : i + 1].expand(2, 3, 5, 4), causal=causal) for i in (0, 1)], 1)  # fmt: skip
    torch.testing.assert_close(nn.attention(q, k, v, causal=causal), want)
    none = nn.attention(q[:, :0], k[:, :0], v[:, :0], causal=causal)  # a rank without heads
    assert none.shape == (2, 0, 5, 4)
    with pytest.raises(ShardingError, match="must divide those of q\n  q  5    k  2\n  5 % 2 = 1"):
        nn.attention(q[:, :5], k, v)
    with pytest.raises(ShardingError, match="must divide those of q\n  q  5    k  0\n  there are none"):
        nn.attention(q[:, :5], k[:, :0], v[:, :0])
