"""Attention over an axis that splits the positions equals attention on one device, in value and every gradient."""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import fshard as fs
from fshard import P, nn
from fshard._core.transfers import recording
from tests.lib.assertions import assert_same, error_text
from tests.lib.model_cases import left_padding
from tests.lib.tiers import slow_unless
from tests.nn.test_nn import close, on, rand, value_and_vjp

METHODS = ("ring", "gather", "ulysses")
ORDERS = ("zigzag", "contiguous")


def dense(q, k, v, *, causal=False, mask=None, scale=None, window=None, documents=None, rate=0.0, key=None):
    """Attention and its log-sum-exp by the definition, with all scores at once."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    behind = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    allowed = (behind >= 0) if causal else torch.ones_like(behind) > 0
    if window is not None:
        allowed = allowed & (behind.abs() < window)
    if documents is not None:
        allowed = allowed & (documents[:, None, :, None] == documents[:, None, None, :])
    if mask is not None and mask.dtype == torch.bool:
        allowed, mask = allowed & mask, None
    scores = (scores if mask is None else scores + mask).masked_fill(~allowed, -math.inf)
    none = (scores == -math.inf).all(-1)
    weights = torch.softmax(scores.masked_fill(none[..., None], 0), -1).masked_fill(none[..., None], 0)
    lse = scores.masked_fill(none[..., None], 0).logsumexp(-1).masked_fill(none, -math.inf)
    return nn.dropout(weights, rate, key=key) @ v, lse


def inputs(t, heads=4, groups=2, dtype=torch.float64, k=8):
    return [rand(2, n, t, k, seed=i).to(dtype) for i, n in enumerate((heads, groups, groups))]


def packed(t, n):
    """Numbers of `n` documents in each of two rows, of unequal lengths, no rank's part a multiple of any."""
    cuts = torch.stack([torch.arange(t) * n // t, (torch.arange(t) ** 2) * n // t**2])
    return cuts if n else None


def attend(axis, documents=None, order="zigzag", mask=None, **options):
    """Return a function of q, k and v in order, with the result in order."""

    def f(q, k, v):
        moved = order == "zigzag"
        there = (lambda x, dim: nn.to_zigzag(x, axis, dim)) if moved else (lambda x, dim: x)
        of_tokens = {name: there(x, 1) for name, x in (("documents", documents), ("mask", mask)) if x is not None}
        out = nn.context_attention(*there((q, k, v), 2), axis, order=order, **of_tokens, **options)
        return nn.from_zigzag(out, axis, 2) if moved else out

    return f


def on_mesh(sizes, args, documents=None, check="never", mask=None, **options):
    """Return the result of context attention on a mesh, and its gradients by q, k and v."""
    axis = tuple(sizes) if len(sizes) > 1 else next(iter(sizes))
    spec = P(None, None, axis)

    def run(q, k, v, grad, documents, mask):
        y, pull = torch.func.vjp(attend(axis, documents, mask=mask, **options), q, k, v)
        return y, pull(grad)

    return on(sizes, run, (*args, rand(*args[0].shape, seed=50).to(args[0].dtype), documents, mask),
              (spec,) * 4 + (P(None, axis),) * 2, spec, check=check)  # fmt: skip


# --- attention with its log-sum-exp --------------------------------------------------------------------------

MASK = rand(2, 1, 5, 7, seed=9) > -0.3
MASK[0, 0, 2] = False  # attends to no position


@pytest.mark.parametrize("backend", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize(("groups", "t", "s", "options"), [
    (4, 5, 5, {"causal": True}), (2, 5, 7, {"causal": True, "scale": 0.3}), (1, 7, 5, {}), (2, 5, 7, {"mask": MASK}),
    (2, 5, 7, {"mask": rand(5, 7, seed=8)}), (2, 0, 7, {}), (2, 5, 0, {}),
])  # fmt: skip
def test_attention_lse_equals_the_definition_in_both_results_and_their_gradients(backend, groups, t, s, options):
    q, k, v = rand(2, 4, t, 8), rand(2, groups, s, 8, seed=1), rand(2, groups, s, 8, seed=2)

    def both(f):
        def run(*xs):
            out, lse = f(*xs, **options)
            return torch.cat([out, lse.masked_fill(lse == -math.inf, 0)[..., None]], -1), (out, lse)

        (y, results), pull = (lambda y, pull, aux: ((y, aux), pull))(*torch.func.vjp(run, q, k, v, has_aux=True))
        return results, pull(rand(*y.shape, seed=50))

    with sdpa_kernel(backend):
        close(both(nn.attention_lse), both(dense), tol=1e-12)
        one = torch.func.vmap(lambda q: nn.attention_lse(q, k, v, **options)[0])(torch.stack([q, -q]))
        close(one[1], dense(-q, k, v, **options)[0], tol=1e-12)


def test_parts_of_attention_merge_by_their_log_sum_exp_also_where_scores_are_large():
    """EasyContext#14: exp of the scores overflowed in the merge."""
    q, k, v = (x * scale for x, scale in zip(inputs(6, groups=4), (300, 300, 1), strict=True))

    def merged(q, k, v):
        (a, of_a), (b, of_b) = (nn.attention_lse(q, k[:, :, s], v[:, :, s]) for s in (slice(4), slice(4, 6)))
        lse = torch.logaddexp(of_a, of_b)
        return a * (of_a - lse).exp()[..., None] + b * (of_b - lse).exp()[..., None]

    close(value_and_vjp(merged, q, k, v), value_and_vjp(lambda *a: dense(*a)[0], q, k, v), tol=1e-9)
    close(on_mesh({"s": 2}, (q, k, v)), value_and_vjp(lambda *a: dense(*a, causal=True)[0], q, k, v), tol=1e-9)


def test_attention_lse_has_second_derivatives_and_jvp_by_the_plain_formula_alone():
    q, k, v = inputs(4)
    f = lambda q: nn.attention_lse(q, k, v, causal=True)[1].sum()  # noqa: E731
    with sdpa_kernel(SDPBackend.MATH):
        plain = torch.func.hessian(f)(q)
    close(plain, torch.func.hessian(lambda q: dense(q, k, v, causal=True)[1].sum())(q))
    for transform in (torch.func.hessian, lambda f: lambda q: torch.func.jvp(f, (q,), (q,))):
        assert "no jvp and no second derivative\n  fix: the plain formula" in error_text(transform(f), q)


# --- values and gradients on every mesh ----------------------------------------------------------------------


SOME = [("ring", "zigzag", 6), ("gather", "contiguous", 11)]  # every sixth case, every eleventh


@pytest.mark.parametrize(
    ("method", "order", "every"), slow_unless(SOME, [*SOME, *itertools.product(METHODS, ORDERS, [1])])
)
def test_context_attention_equals_one_device(method, order, every):
    """Also where no axis divides T, with ranks without tokens (pytorch#183968), with 22 tokens on 2 ranks and padding.

    Megatron-LM#1464: wrong dQ, dK, dV.
    """
    cases = [(n, t, causal, None, 0, 2, 0) for n in (1, 2, 3, 4, 8) for t in (16, 22, 5) for causal in (True, False)]
    cases += [(n, t, True, window, 0, 2, 0) for n in (2, 8) for t in (16, 21) for window in (1, 5)]
    cases += [(n, t, causal, window, documents, 2, 0) for n in (2, 3) for t in (16, 22) for documents in (1, 4, 7)
              for causal, window in ((True, None), (True, 4), (False, None))]  # fmt: skip
    cases += [(n, 16, True, None, 0, groups, 0) for n in (2, 3, 4) for groups in (1, 4)]
    cases += [(n, t, True, 5, 4, 2, 0.3) for n in (1, 2, 3, 8) for t in (16, 22, 5)]
    for n, t, causal, window, documents, groups, rate in cases[::every]:
        args, numbers, options = inputs(t, groups=groups), packed(t, documents), {"causal": causal, "window": window}
        options |= {"rate": rate, "key": fs.key(5)} if rate else {}
        real = left_padding(2, t).flip(0) != 0 if n == 3 else None
        got = on_mesh({"s": n}, args, numbers, method=method, order=order, mask=real, **options)
        options |= {} if real is None else {"mask": real[:, None, None]}
        want = value_and_vjp(lambda *a, n=numbers, o=options: dense(*a, documents=n, **o)[0], *args)
        close(got, want, f"{n} ranks, T {t}, G {groups}, {documents} documents, {options}", tol=1e-12)


@pytest.mark.parametrize("method", [("ring", "ulysses"), *(pytest.param(method, marks=pytest.mark.slow)
                                                          for method in ("ring", ("gather", "ulysses")))])  # fmt: skip
def test_context_attention_over_two_axes_equals_one_device(method):
    for (sizes, t), order in itertools.product((({"a": 2, "b": 2}, 16), ({"a": 3, "b": 2}, 21)), ORDERS):
        args, numbers = inputs(t), packed(t, 3)
        for options in ({}, {"rate": 0.3, "key": fs.key(5)} if sizes["a"] == 3 else {}):
            got = on_mesh(sizes, args, numbers, method=method, order=order, **options)
            want = value_and_vjp(lambda *a, n=numbers, o=options: dense(*a, causal=True, documents=n, **o)[0], *args)
            close(got, want, f"{sizes} T {t} {order} {options}", tol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_context_attention_in_lower_precision_is_exact_to_rounding_on_any_number_of_ranks(method):
    """ring-flash-attention#42: the error of merges in bfloat16 grew with the number of ranks."""
    want = value_and_vjp(lambda *a: dense(*a, causal=True)[0], *inputs(32))
    for dtype, tol, n in ((torch.float32, 1e-5, 4), (torch.bfloat16, 0.04, 8)):
        got = on_mesh({"s": n}, inputs(32, dtype=dtype), method=method)
        assert_same(fs.tree.map(lambda x: x.double(), got), want, rtol=tol, atol=tol)


def test_second_derivatives_of_the_ring_by_the_plain_formula():
    args = inputs(6)

    def squared(f):
        return lambda *a: torch.func.grad(lambda q: f(q, *a[1:]).square().sum())(a[0])

    def summed(q, k, v):  # each rank has its part of the fixed tensor
        part = rand(2, 4, 6, 8, seed=1)[:, :, fs.axis_index("s") * 2 :][:, :, :2]
        return torch.func.vjp(squared(attend("s")), q, k, v)[1](part)

    with sdpa_kernel(SDPBackend.MATH):
        got = on({"s": 3}, summed, args, (P(None, None, "s"),) * 3, P(None, None, "s"), check="never")
    want = torch.func.vjp(squared(lambda *a: dense(*a, causal=True)[0]), *args)[1](rand(2, 4, 6, 8, seed=1))
    close(got, want)


def test_a_compiled_program_computes_the_same_ring(monkeypatch):
    """A compiler that traces is imitated; tests/e2e/test_compile.py compiles a model."""
    args, numbers = inputs(12), packed(12, 3)
    want = value_and_vjp(lambda *a: dense(*a, causal=True, documents=numbers)[0], *args)
    with recording() as eager:
        on_mesh({"s": 3}, args, numbers)
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    with recording() as compiled:
        close(on_mesh({"s": 3}, args, numbers), want, tol=1e-12)
    first, second = (sorted((x.op, x.bytes) for x in log if x.rank == 0) for log in (eager, compiled))
    assert first == second


def test_a_second_call_before_the_backward_pass_of_the_first_keeps_its_keys():
    """diffusers#14265: the backward pass read the keys of a later call."""
    a, b = inputs(8), [x + 1 for x in inputs(8)]

    def both(f):
        return lambda *xs: f(*xs[:3]) + 2 * f(*xs[3:])

    def run(*xs):
        _, pull = torch.func.vjp(both(attend("s")), *xs[:6])
        return pull(xs[6])

    got = on({"s": 2}, run, (*a, *b, rand(*a[0].shape, seed=50)), (P(None, None, "s"),) * 7, P(None, None, "s"))
    close(got, value_and_vjp(both(lambda *xs: dense(*xs, causal=True)[0]), *a, *b)[1])


# --- types -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_types_of_context_attention_and_its_law(method):
    """DeepSpeed#5248: gradients were scaled by the size of the axis."""
    args = inputs(12)
    spec, w = P("data", None, "s"), rand(8, 8, seed=7)

    @fs.shard_map(mesh=fs.make_mesh(data=2, s=2), in_specs=(P(), spec, spec, spec), out_specs=P())
    def step(w, q, k, v):
        def loss(w):
            w = fs.pvary(w, ("data", "s"))
            out = attend("s", method=method)(q @ w, k, v)
            return fs.pmean(out.square().mean(), ("data", "s"))

        return fs.value_and_grad(loss)(w)

    fs.verify(step, w, *args)
    want = torch.func.grad(lambda w: dense(args[0] @ w, *args[1:], causal=True)[0].square().mean())(w)
    close(fs.device_get(step(w, *args))[1], want)

    @fs.shard_map(mesh=fs.make_mesh(data=2, s=2), in_specs=(P(None, None, "s"), spec, spec), out_specs=P())
    def without_pvary(q, k, v):
        def loss(q):
            return fs.psum(nn.context_attention(q, k, v, "s", method=method).sum(), ("data", "s"))

        return fs.grad(loss)(q)

    text = error_text(without_pvary, args[0][:1], *args[1:])
    assert "attention of an operand that is invariant (I) over 'data'" in text
    assert 'nn.context_attention(fs.pvary(q, "data"), k, v, "s", method=method)' in text


# --- bytes and work --------------------------------------------------------------------------------------------


def _sent(method, n, t=32, **options):
    """Return the bytes that each rank sends forward and backward, without the moves of the tokens."""
    args = inputs(t, dtype=torch.float32, **options)

    def run(q, k, v):
        y, pull = torch.func.vjp(lambda *a: nn.context_attention(*a, "s", method=method), q, k, v)
        return pull(y)

    step = fs.shard_map(run, mesh=fs.make_mesh(s=n), in_specs=P(None, None, "s"), out_specs=P(None, None, "s"),
                        check="never")  # fmt: skip
    with recording() as log:
        step(*args)
    return {phase: {sum(x.sent for x in log if (x.rank, x.phase) == (r, phase)) for r in range(n)}
            for phase in ("forward", "backward")}  # fmt: skip


@pytest.mark.parametrize("n", [2, 4])
def test_bytes_of_context_attention_are_those_of_the_formulas(n):
    b, h, g, t, k, s = 2, 8, 4, 32, 8, 4
    kv, qo = 2 * b * g * (t // n) * k * s, 2 * b * h * (t // n) * k * s
    sizes = {"heads": h, "groups": g}
    assert _sent("ring", n, **sizes) == {"forward": {(n - 1) * kv}, "backward": {(2 * n - 1) * kv}}
    assert _sent("gather", n, **sizes) == {"forward": {(n - 1) * kv}, "backward": {(n - 1) * kv}}
    exchanged = (n - 1) * (qo + kv) // n
    assert _sent("ulysses", n, **sizes) == {"forward": {exchanged}, "backward": {exchanged}}


class Pairs(TorchDispatchMode):
    """Counts the pairs of queries and keys that each thread's forward passes compute."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            t, s, causal = args[0].shape[2], args[1].shape[2], args[4:5] == (True,)
            self.counts[threading.get_ident()] += t * (t + 1) // 2 if causal else t * s
        return func(*args, **(kwargs or {}))


def _pairs(n, t, documents=None, **options):
    counts = Counter()

    def run(q, k, v, documents):
        with Pairs(counts):
            return attend("s", documents, **options)(q, k, v)

    spec = P(None, None, "s")
    on({"s": n}, run, (*inputs(t), documents), (*[spec] * 3, P(None, "s")), spec, check="never")
    return sorted(counts.values())


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_zigzag_order_gives_ranks_equal_work(method):
    for n in (2, 4, 8):
        pairs = _pairs(n, 64, method=method)
        assert len(pairs) == n
        assert sum(pairs) == 64 * 65 // 2
        assert max(pairs) <= 1.01 * sum(pairs) / n
        late = _pairs(n, 64, method=method, order="contiguous")
        assert sum(late) == sum(pairs)
        assert max(late) > 1.4 * sum(late) / n
    assert max(_pairs(4, 1002)) <= 1.01 * sum(_pairs(4, 1002)) / 4  # T that nothing divides


def test_blocks_without_a_common_document_or_outside_the_window_are_not_computed():
    """TransformerEngine#1930: packing dropped tokens; every value is compared above."""
    documents = torch.arange(64)[None].expand(2, 64) // 16
    assert sum(_pairs(4, 64, documents, order="contiguous")) == 4 * 16 * 17 // 2
    assert sum(_pairs(4, 64, documents)) <= 0.5 * 64 * 65 // 2
    assert sum(_pairs(8, 64, window=4)) <= 0.4 * 64 * 65 // 2


def test_planned_step_of_the_ring_has_the_transfers_and_products_of_a_run():
    args = inputs(32, dtype=torch.float32)
    spec = P(None, None, "s")

    def run(q, k, v):
        y, pull = torch.func.vjp(lambda *a: nn.context_attention(*a, "s"), q, k, v)
        return pull(y)

    step = fs.shard_map(run, mesh=fs.make_mesh(s=4), in_specs=spec, out_specs=spec, check="never")
    with recording() as log:
        step(*args)
    plan = fs.plan(step.on(fs.make_mesh(kind="abstract", s=4)), *args)
    of_rank = [x for x in log if x.rank == 0]
    assert [(x.op, x.bytes, x.phase) for x in plan.transfers] == [(x.op, x.bytes, x.phase) for x in of_rank]
    pairs = 8 * 9 // 2 + 3 * 8 * 8 // 2
    assert list(plan.flops.values()) == [2 * 4 * pairs * (2 * 8 * 2 + 2 * 8 * 5)]


# --- the order of the tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [16, 22, 7, 3])
def test_zigzag_order_is_undone_and_is_where_its_positions_say(t):
    x = torch.arange(t)[None] * torch.ones(2, 1, dtype=torch.int64)

    def f(x):
        moved = nn.to_zigzag({"x": x}, "s", size=t)["x"]
        assert torch.equal(moved[0], nn.zigzag_positions(t, "s"))
        return nn.from_zigzag(moved, "s", size=t)

    for n in (1, 2, 3, 4):
        assert torch.equal(on({"s": n}, f, (x,), (P(None, "s"),), P(None, "s")), x)
    first = lambda: nn.zigzag_positions(8, "s")  # noqa: E731
    assert on({"s": 2}, first, (), (), P("s")).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@pytest.mark.parametrize(("n", "model"), [(1, 1), (2, 1), (3, 1), (2, 3)])
def test_dropout_in_the_zigzag_order_has_the_mask_of_one_device(n, model):
    """Also of parts that another axis splits, and of T that nothing divides."""
    for t in (16, 22, 5):
        x = torch.ones(4, t, 3)

        def f(x, t=t):
            moved = nn.to_zigzag(x, "s", size=t)
            part = nn.dropout(fs.pslice(moved, "m", 1), 0.5, key=fs.key(1), spec=P(None, ("s", "m")),
                              shape=(4, t, 3), zigzag="s")  # fmt: skip
            return nn.from_zigzag(fs.all_gather(part, "m", 1, size=moved.shape[1]), "s", size=t)

        got = on({"s": n, "m": model}, f, (x,), (P(None, "s"),), P(None, "s"), check="never")
        close(got, nn.dropout(x, 0.5, key=fs.key(1)), f"T {t}", tol=0)


def test_errors_of_context_attention():
    q, k, v = inputs(8)

    def text(f, *args):
        specs = tuple(P(None, None, "s") if x.ndim == 4 else P(None, "s") for x in args)
        return error_text(on, {"s": 2}, f, args, specs, P(None, None, "s"))

    assert text(lambda q, k, v: nn.context_attention(q, k, v, "s", size=10), q, k, v).startswith(
        "context_attention: this rank has 4 positions, and its part is 5\n"
        "  size  10    axis  ('s',)\n  fix: pass the global size="
    )
    assert "the heads of k and v must divide those of q\n  q  4    k  3\n  4 % 3 = 1" in text(
        lambda q, k, v: nn.context_attention(q, k, v, "s"), *inputs(8, groups=3)
    )
    assert "method=('ring', 'ulysses') over 's'" in text(
        lambda q, k, v: nn.context_attention(q, k, v, "s", method=("ring", "ulysses")), q, k, v
    )
    assert "mask and documents need a number for each position" in text(
        lambda q, k, v, d: nn.context_attention(q, k, v, "s", documents=d[:, :1]), q, k, v, packed(8, 2)
    )
    assert "window=0" in text(lambda q, k, v: nn.context_attention(q, k, v, "s", window=0), q, k, v)
    wrong = {"rate": 0.5, "key": fs.key(0), "shape": (2, 8, 8, 8)}
    assert "the weights of these heads are not this rank's part of spec and shape" in text(
        lambda q, k, v: nn.context_attention(q, k, v, "s", **wrong), q, k, v
    )
    assert "zigzag='s' is not the first axis of a dim of spec P()" in text(
        lambda q: nn.dropout(q, 0.5, key=fs.key(0), spec=P(), zigzag="s"), q
    )
    assert "do not fit" in text(lambda q, k, v: nn.context_attention(q, k[:, :, :2], v, "s"), q, k, v)
