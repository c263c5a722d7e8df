"""Routers, mixtures of experts and their balance: equal to the dense form on every mesh."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import fshard as fs
from fshard import P, ShardingError, nn
from tests.lib.assertions import assert_same
from tests.lib.compile_cases import by_backend
from tests.lib.tiers import slow_unless

DOUBLE = {"dtype": torch.float64}
D, H = 5, 4


def numbers(*shape, salt=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(salt), **DOUBLE)


def weights(e):
    return {"router": numbers(D, e, salt=1), "up": numbers(e, D, H, salt=2), "down": numbers(e, H, D, salt=3)}


def run(p, rows, counts):
    return nn.grouped_linear(F.silu(nn.grouped_linear(rows, p["up"], counts)), p["down"], counts)


def dense(p, x, k, skew=None, **options):
    """Every expert for every token, with a weight of 0 where it is not chosen: no sort, no rows."""
    logits = x @ p["router"] + (0 if skew is None else skew)
    r = nn.route(logits, k, **options)
    each = torch.stack([F.silu(x @ u) @ d for u, d in zip(p["up"], p["down"], strict=True)], 1)  # [N, E, D]
    chosen = torch.zeros_like(logits).scatter(1, r.experts, r.weights)
    share = F.one_hot(r.experts, logits.shape[1]).sum(1).double().mean(0)
    aux = logits.shape[1] * (share * r.probabilities.mean(0)).sum() + logits.logsumexp(-1).square().mean()
    return (chosen.unsqueeze(-1) * each).sum(1), aux


def program(mesh, axis, data, k, method, skew, **options):
    """Return the loss, its gradients and the results of a mixture: tokens split over `data` and `axis`."""
    tokens = None if method == "partial" else axis
    rows = tuple(a for name in (data, tokens) if name for a in ((name,) if isinstance(name, str) else name)) or None
    specs = {"router": P(), "up": P(axis), "down": P(axis)}

    def f(p, x, target):
        def loss(p, x):
            router = fs.pvary(p["router"], rows)
            own = fs.pvary({"up": p["up"], "down": p["down"]}, data)
            r = nn.route(x @ router + (0 if skew is None else skew), k, **options)
            h = x if tokens else fs.pvary(x, axis)
            entered = r if tokens else fs.pvary(r, axis)
            y = nn.mixture(h, entered, own, run, axis=axis, method=method)
            y = y if tokens else fs.psum(y, axis)
            b = nn.balance(r, rows)
            return fs.psum((y * target).sum(), rows) + b.loss + b.z, (y, b.counts)

        (value, (y, counts)), grads = fs.value_and_grad(loss, argnums=(0, 1), has_aux=True)(p, x)
        return value, grads, y, counts

    return fs.shard_map(
        f, mesh=mesh, in_specs=(specs, P(rows), P(rows)), out_specs=(P(), (specs, P(rows)), P(rows), P())
    )


def oracle(p, x, target, k, skew, **options):
    def loss(p, x):
        y, aux = dense(p, x, k, skew, **options)
        return (y * target).sum() + aux, y

    grads, (value, y) = torch.func.grad_and_value(loss, argnums=(0, 1), has_aux=True)(p, x)
    return value, grads, y


def check(mesh, axis, data, e, k, n, method="rows", skew=None, **options):
    p, x, target = weights(e), numbers(n, D, salt=4), numbers(n, D, salt=5)
    value, grads, y, counts = fs.device_get(program(mesh, axis, data, k, method, skew, **options)(p, x, target))
    want = oracle(p, x, target, k, skew, **options)
    torch.testing.assert_close((value, grads, y), want, rtol=1e-12, atol=1e-12)
    chosen = nn.route(x @ p["router"] + (0 if skew is None else skew), k, **options).experts
    assert torch.equal(counts, chosen.flatten().bincount(minlength=e))
    return y, grads


def hot(e, *experts):
    return torch.full((e,), -50.0, **DOUBLE).index_fill(0, torch.tensor(experts), 50.0)


@pytest.mark.parametrize("method", ["rows", "gather", "partial"])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_mixture_equals_the_dense_form(n, method):
    """pytorch#160285: gradients were doubled on two ranks."""
    check(fs.make_mesh(e=n), "e", None, 8, 2, 24, method)


MIXTURES = {
    "one hot expert": ({"e": 4}, "e", None, 8, 1, 8, {"skew": hot(8, 5)}),
    "two hot experts of one rank": ({"e": 4}, "e", None, 8, 2, 8, {"skew": hot(8, 4, 5)}),
    "uneven experts": ({"e": 4}, "e", None, 6, 3, 8, {}),
    "ranks without experts": ({"e": 4}, "e", None, 3, 2, 8, {}),  # torchtitan#1541
    "fewer tokens than ranks": ({"e": 4}, "e", None, 8, 2, 2, {}),
    "all experts of every token": ({"e": 2}, "e", None, 4, 4, 6, {}),
    "with data": ({"data": 2, "e": 2}, "e", "data", 4, 2, 12, {}),
    "over two axes": ({"a": 2, "b": 2, "data": 2}, ("b", "a"), "data", 8, 2, 16, {}),
    "over the data axis": ({"data": 2, "model": 2}, "data", None, 4, 2, 8, {}),
    "sigmoid, bias and groups": ({"e": 4}, "e", None, 8, 3, 12, {
        "score": "sigmoid", "groups": (4, 2), "bias": torch.linspace(-1, 1, 8, **DOUBLE)}),
    "without renormalization": ({"e": 3}, "e", None, 6, 2, 9, {"renormalize": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_mixture_by_rows(name):
    mesh, *case, options = MIXTURES[name]
    check(fs.make_mesh(**mesh), *case, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_results_and_gradients_of_experts_have_the_same_bits_on_every_mesh(dtype):
    """An expert has the same rows in the same order, and the sum over K one order. MKL's products read alignments."""
    w, x, logits = (numbers(*shape).to(dtype) for shape in ((8, D), (24, D), (24, 8)))

    def scale(w, rows, counts):
        return torch.cat([part * v for part, v in zip(rows.split(counts), w.unbind(), strict=True)])

    def f(w, x, logits):
        def loss(w, x):
            y = nn.mixture(x, nn.route(logits, 3), w, scale, axis="e")
            return fs.psum((y * y).sum(), "e"), y

        (_, y), grads = fs.value_and_grad(loss, argnums=(0, 1), has_aux=True)(w, x)
        return y, grads

    split = P("e")
    first, *others = [
        fs.device_get(fs.shard_map(f, mesh=fs.make_mesh(e=n), in_specs=split, out_specs=split)(w, x, logits))
        for n in (1, 2, 4, 8)
    ]
    for got in others:
        assert_same(got, first)


def test_verify_passes_for_every_method():
    p, x, target = weights(4), numbers(8, D, salt=4), numbers(8, D, salt=5)
    for method in ("rows", "gather", "partial"):
        fs.verify(program(fs.make_mesh(e=2), "e", None, 4, method, None), p, x, target)


def test_bytes_are_those_of_rows_that_leave_their_rank_and_of_the_formula_where_balanced():
    n, e, k, tokens = 8, 16, 2, 64
    p, x, target = weights(e), numbers(tokens, D, salt=4), numbers(tokens, D, salt=5)
    skew = hot(e, 3).clamp(min=0) / 10  # most tokens choose expert 3
    step = program(fs.make_mesh(e=n), "e", None, k, "rows", skew)
    with fs.recording() as log:
        step(p, x, target)
    sent = sum(t.sent for t in log if t.op == "all_to_all_rows")
    experts = nn.route(x @ p["router"] + skew, k).experts.reshape(n, -1)
    rank = experts // (e // n)
    assert sent == 4 * int((rank != torch.arange(n)[:, None]).sum()) * D * 8
    most = max(int(row.bincount(minlength=n).max()) for row in rank)  # rows in each of n - 1 buffers, if padded
    assert sent / (4 * n * (n - 1) * most * D * 8) <= 0.25
    dry = fs.plan(step.on(fs.make_mesh(kind="abstract", e=n)), p, x, target).transfers
    moved = [t.sent for t in dry if t.op == "all_to_all_rows"]
    assert sum(moved) == 4 * (tokens // n) * k * D * 8 * (n - 1) // n
    fs.check(step.on(fs.make_mesh(kind="abstract", e=n)), p, x, target)
    by_gather = program(fs.make_mesh(e=n), "e", None, k, "gather", skew)
    with fs.recording() as log:
        by_gather(p, x, target)
    of_x = [
        t.sent for t in log if t.rank == 0 and t.dtype == torch.float64 and t.op in ("all_gather", "reduce_scatter")
    ]
    assert sum(of_x) == 4 * (n - 1) * (tokens // n) * (D + k / 2) * 8  # of tokens; weights are gathered, too


def test_a_compiled_program_computes_the_same_mixture(monkeypatch):
    """A compiler that traces is imitated: a compiled model takes minutes."""
    p, x = weights(5), numbers(7, D, salt=4)
    for method in ("rows", "gather", "partial"):
        mixture = lambda: nn.mixture(x, nn.route(x @ p["router"], 3), {k: p[k] for k in ("up", "down")}, run,  # noqa: E731
                                     axis=None, method=method)  # fmt: skip  # noqa: B023
        want = mixture()
        with monkeypatch.context() as patch:
            patch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
            torch.testing.assert_close(mixture(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", slow_unless(["rows"], ["rows", "gather", "partial"]))
@pytest.mark.parametrize("backend", [None, pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_a_compiled_program_computes_only_the_rows_that_are_chosen_in_bfloat16(backend, method, monkeypatch):
    """The kernel leaves the other rows undefined, in both directions. `None` imitates the compiler."""
    shapes = {"router": (16, 6), "up": (6, 16, 24), "down": (6, 24, 16), "x": (20, 16)}
    p, made = {name: numbers(*shape, salt=len(name)).bfloat16() for name, shape in shapes.items()}, Counter()

    def f(p):
        def rows(p, rows, counts):
            made[type(counts)] += len(rows)
            return run(p, rows, counts)

        def loss(p):
            routing = nn.route((p["x"] @ p["router"]).float(), 3)
            y = nn.mixture(p["x"], routing, {k: p[k] for k in ("up", "down")}, rows, axis=None, method=method)
            return y.float().square().sum()

        return fs.value_and_grad(loss)(p)

    want = f(p)
    if backend is None:
        with monkeypatch.context() as patch:
            patch.setattr(nn.experts.torch.compiler, "is_dynamo_compiling", lambda: True)
            got = f(p)
        assert made == {list: 60, torch.Tensor: 60}
    else:
        with by_backend(backend):
            got = fs.shard_map(f, mesh=fs.make_mesh(one=1), out_specs=P(), compile=True, check="never")(p)
    for a, b in zip(fs.tree.leaves(fs.device_get(got)), fs.tree.leaves(want), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=0.03 * float(b.abs().max()))  # of 8 bits


def test_grouped_products_have_the_values_and_gradients_of_single_ones(monkeypatch):
    """CUDA's kernel, which torch also has for CPUs, with empty groups."""
    x, w = (numbers(*shape).bfloat16() for shape in ((24, 16), (4, 16, 32)))

    def f(x, w):
        loss = lambda x, w: nn.grouped_linear(x, w, [5, 0, 19, 0]).float().square().sum()  # noqa: E731
        return fs.value_and_grad(loss, argnums=(0, 1))(x, w)

    want = f(x, w)
    monkeypatch.setattr(nn.experts, "device_type", lambda x: "cuda")
    with torch.profiler.profile() as profile:
        got = fs.shard_map(f, mesh=fs.make_mesh(one=1), out_specs=P())(x, w)
    assert "aten::_grouped_mm" in {e.key for e in profile.key_averages()}
    assert_same(fs.device_get(got), want)


def test_balance_is_the_same_on_every_mesh_and_leaves_tokens_out():
    logits, counted = numbers(12, 4), torch.arange(12) % 3 > 0

    def f(logits, counted):
        return nn.balance(nn.route(logits, 2), "e", counted=counted)

    want = nn.balance(nn.route(logits[counted], 2), None)
    for n in (1, 2, 4, 8):  # of 8 ranks two have no tokens
        got = fs.device_get(fs.shard_map(f, mesh=fs.make_mesh(e=n), in_specs=P("e"), out_specs=P())(logits, counted))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)  # Megatron-LM#3672, megablocks#85
    even = nn.balance(nn.route(torch.eye(4).repeat(3, 1), 1), None)
    assert even.counts.tolist() == [3, 3, 3, 3]
    torch.testing.assert_close(even.loss, torch.tensor(1.0))
    nothing = nn.balance(nn.route(logits, 2), None, counted=torch.zeros(12))
    assert (nothing.loss, nothing.z, int(nothing.counts.sum())) == (0, 0, 0)


def test_a_bias_balances_without_a_loss():
    logits, bias = numbers(512, 8) + torch.linspace(0, 3, 8), torch.zeros(8)
    first = nn.balance(nn.route(logits, 2, score="sigmoid"), None).counts
    for _ in range(600):
        counts = nn.balance(nn.route(logits, 2, score="sigmoid", bias=bias), None).counts
        bias = bias + 0.002 * (counts.float().mean() - counts).sign()
    assert first.max() > 3 * first.min().clamp(min=1)
    assert counts.max() < 1.1 * counts.min()


def test_equal_scores_choose_the_first_experts_and_groups_the_best_two_scores():
    assert nn.route(torch.zeros(3, 4), 2).experts.tolist() == [[0, 1]] * 3
    logits = torch.tensor([[3.0, -9.0, 1.0, 1.1]])  # groups of two: sums of sigmoids 0.95 and 1.48
    assert nn.route(logits, 1, score="sigmoid", groups=(2, 1)).experts.tolist() == [[3]]


WRONG = [
    (lambda x, w: nn.grouped_linear(x, w, torch.tensor([2, 0, 0, 0])), "counts in a tensor need the kernel"),
    (lambda x, w: nn.route(x, 5), r"nn.route: k=5 experts cannot be chosen by groups=None\n"),
    (lambda x, w: nn.route(x, 3, groups=(2, 1)), r"nn.route: k=3 experts cannot be chosen by groups=\(2, 1\)"),
    (lambda x, w: nn.route(x, 1, groups=(3, 1)), "fix: logits .* groups that divide E"),
    (lambda x, w: nn.mixture(x[:1], nn.route(x, 1), w, run, axis=None), r"x \[1, 4\], 2 tokens of routing, params "),
    (
        lambda x, w: nn.mixture(x, nn.route(x, 1), w[:3], run, axis=None),
        "nn.mixture: params have 3 experts, and this rank",
    ),
]


@pytest.mark.parametrize(("f", "text"), WRONG)
def test_wrong_routings_are_errors(f, text):
    with pytest.raises(ShardingError, match=text):
        fs.shard_map(f, mesh=fs.make_mesh(e=1), out_specs=P())(torch.zeros(2, 4), torch.zeros(4, 2, 2))
