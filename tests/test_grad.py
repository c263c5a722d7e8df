"""Gradients and their accumulation, against plain torch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import weakref

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from tests.lib.assertions import error_text
from tests.lib.compile_cases import by_aot_eager
from tests.lib.operations import Operations


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
         "value_and_grad(<lambda>): argnums=1, and the call has 1 positional argument\n  fix: count from 0"),
        (lambda: fs.grad(lambda x: torch.ones(()))({}),
         "value_and_grad(<lambda>): argument 0 has no leaves\n  fix: pass the parameters, or other argnums"),
        (lambda: fs.accumulate(loss, 3)(*data()),
         ("accumulate: args[1] cannot be split into 3 equal microbatches\n  shape  [4, 3]\n  4 % 3 = 1\n"
          "  fix: another number of steps, or another batch size; what is not split, by keyword")),
        (lambda: fs.accumulate(loss, 0), "accumulate: steps=0\n  fix: one or more"),
        (lambda: fs.accumulate(loss, 2, argnums=(0, 1), gather=lambda p: p),
         "accumulate: argnums=(0, 1): gather= is a function of one argument\n  fix: argnums=0"),
        (lambda: fs.accumulate(loss, 2, counted=True)(*data()),
         "accumulate(loss): counted=True, and the result is a Tensor\n  fix: return (total, count)"),
        (lambda: fs.accumulate(loss, 2, has_aux=True)(*data()),
         "accumulate(loss): has_aux=True, and the result is a Tensor\n  fix: return (loss, aux)"),
        (fs.accumulate(loss, 2),
         "accumulate(loss): argnums=0, and the call has 0 positional arguments\n  fix: count from 0"),
        (lambda: fs.accumulate(loss, 2, argnums=2, gather=lambda p: p)(*data()),
         "accumulate(loss): argnums=2, and the call has 2 positional arguments\n  fix: count from 0"),
        (lambda: fs.accumulate(loss, 2, gather=lambda p: {**p, "ids": torch.arange(3)})(*data()),
         ("accumulate(loss): the result of gather['ids'] is int64, which has no gradient\n"
          "  fix: gather only what is differentiated, and capture the rest")),
        (lambda: fs.accumulate(lambda p, x: (loss(p, x), {"n": 3}), 2, has_aux=True)(*data()),
         "accumulate(<lambda>): aux['n'] is 3, and cannot be stacked\n  fix: return tensors: torch.tensor(x)"),
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


def test_accumulate_splits_arguments_by_position_and_passes_those_by_keyword_whole():
    p, x = data()

    def draw(p, x, *, rest, key):
        return loss(p, fs.nn.dropout(x, 0.5, key=key) @ rest["w"]), fs.random.uniform(key, (1,))

    rest, key = {"w": torch.eye(3, dtype=x.dtype) * 2}, fs.key(7)
    (value, aux), grads = fs.accumulate(draw, 2, has_aux=True)(p, x, rest=rest, key=key)
    close((value, grads), fs.value_and_grad(lambda p: draw(p, x, rest=rest, key=key)[0])(p))
    assert torch.equal(aux[0], aux[1])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_microbatches_that_are_made_before_placing_have_the_same_dropout_on_every_mesh(n):
    steps, b = 2, 4
    p, x = torch.ones(3), fs.random.normal(fs.key(1), (steps, b, 3))

    def f(p, x, key):
        h = fs.nn.dropout(x[0], 0.5, key=key[0], spec=P("data"), shape=(b, 3))
        return fs.psum((fs.pvary(p, "data") * h).square().sum(), "data") / b

    step = fs.shard_map(lambda p, x: fs.accumulate(f, steps)(p, x, fs.split(fs.key(2), steps)),
                        mesh=fs.make_mesh(data=n), in_specs=(P(), P(None, "data")), out_specs=P())  # fmt: skip
    masked = [fs.nn.dropout(x[i], 0.5, key=fs.split(fs.key(2), steps)[i]) for i in range(steps)]
    want = torch.stack(masked).square().sum() / (steps * b)
    torch.testing.assert_close(fs.device_get(step(p, x)[0]), want)


def noisy(w, x, *, key):
    """Draws with the rows in dim 0, flattened with another dim, and in dim 1, recomputed; and one without rows."""
    keys = fs.split(key, 4)
    x = x + fs.random.normal(keys[0], (len(x) * fs.axis_size("data"), 1, 5), spec=P("data"), dtype=x.dtype)
    w = fs.pvary(w * fs.random.uniform(keys[1], (5, 5)), "data")

    def block(x, w):
        h = fs.nn.dropout(torch.tanh(x @ w).flatten(0, 1), 0.5, key=keys[2], spec=P("data")).view(x.shape)
        return fs.nn.dropout(h.transpose(0, 1), 0.5, key=keys[3], spec=P(None, "data"))

    return fs.pmean(fs.remat(block)(x, w).square().mean(), "data")


def by_microbatches(f, steps, w, x, *, axes, **options):
    step = fs.shard_map(lambda w, x: fs.accumulate(f, steps, **options)(w, x, key=fs.key(5)),
                        mesh=fs.make_mesh(**axes), in_specs=(P(), P(tuple(axes))), out_specs=P())  # fmt: skip
    return fs.device_get(step(w, x))


@pytest.mark.parametrize(("n", "steps"), [(1, 2), (1, 8), (2, 2), (4, 2)])
def test_draws_in_microbatches_are_those_of_the_rows_in_the_batch_on_every_mesh(n, steps):
    w, x = (fs.random.normal(fs.key(i), shape, dtype=torch.float64) for i, shape in enumerate(((5, 5), (8, 3, 5))))
    close(by_microbatches(noisy, steps, w, x, axes={"data": n}), by_microbatches(noisy, 1, w, x, axes={"data": 1}))


def test_draws_in_microbatches_of_uneven_parts_and_two_axes_are_those_of_the_rows_in_the_batch():
    def f(w, x, *, key):
        h = fs.nn.dropout(x @ fs.pvary(w, ("a", "b")), 0.5, key=key, spec=P(("a", "b")))
        return fs.psum((h.square().sum(), torch.ones_like(h[:, 0]).sum()), ("a", "b"))

    w, x = (fs.random.normal(fs.key(i), shape, dtype=torch.float64) for i, shape in enumerate(((3, 3), (14, 3))))
    run = functools.partial(by_microbatches, f, counted=True)
    want, of_12 = (run(1, w, y, axes={"a": 1, "b": 1}) for y in (x, x[:12]))
    close(run(2, w, x, axes={"a": 4, "b": 1}), want)  # 4, 4, 4 and 2 rows
    close(run(3, w, x[:12], axes={"a": 5, "b": 1}), of_12)  # 3, 3, 3, 3 and none
    close(run(3, w, x[:12], axes={"a": 2, "b": 2}), of_12)


def test_a_draw_that_may_have_the_rows_of_a_microbatch_or_not_is_an_error():
    def gathered(w, x, *, key):
        return fs.nn.dropout(fs.all_gather(x, "data"), 0.5, key=key).sum() * w.sum()

    def flat(w, x, *, key):
        return fs.random.normal(key, (24,), spec=P("data")).sum() * w.sum()

    def of_weights(w, x, *, key):
        return fs.nn.dropout(w, 0.5, key=key).sum()

    def computed(w, x, *, key):
        return fs.accumulate(of_weights, 2)(w, x / 2, key=key)[0]

    w, x = torch.ones(2, 3), torch.ones(8, 3)
    texts = [error_text(by_microbatches, f, steps, w, x, axes={"data": 2})
             for f, steps in ((gathered, 2), (flat, 2), (computed, 1))]  # fmt: skip
    named = "if it has the rows, give it one entry for each, in a dim split over data"
    want = [
        ("bernoulli", "[4, 3], dim 0 not split", "data", "gathered", named),
        ("normal", "[24], dim 0 split over data", "data", "flat", named),
        ("bernoulli", "[2, 3], dim 0 not split", "axes that are unknown, as the region computed them", "of_weights",
         "pass accumulate arguments of the region, and compute with them in its function"),
    ]  # fmt: skip
    assert [re.sub(r"grad.py:\d+", "grad.py", text) for text in texts] == [
        f"random.{verb}: accumulate cannot know whether a draw has the rows of its microbatch\n"
        f"  draw  {draw}    microbatch  2 rows on this rank, split over {axes}\n  at test_grad.py in {name}\n"
        f"  fix: {fix}; if it has not, draw before accumulate, and pass the numbers by keyword"
        for verb, draw, axes, name, fix in want
    ]


# accumulate / no_sync of Accelerate: gradients reduced in each microbatch, once, or never

ACCUMULATED = {"w": P("data"), "b": P(), "frozen": P(None, "data")}


def accumulated(mesh, mode, steps, p, x):
    """Return (loss, gradients of w and b) on a mesh: global ones, or those of each rank, stacked, in mode "never"."""
    specs, (trained, frozen) = ACCUMULATED, fs.partition(p, ["w", "b"])

    def whole(p):
        shapes = next(part for part in (PARAMS, *fs.partition(PARAMS, ["w", "b"]))
                      if fs.tree.structure(part) == fs.tree.structure(p))  # fmt: skip
        return fs.unshard(p, specs, "data", shapes=shapes)

    def local(p, x):
        return loss({"w": p["w"], "b": p["b"]}, x @ p["frozen"])

    def step(trained, frozen, x):
        if mode == "never":
            p, rest = whole(trained), whole(frozen)
            value, grads = fs.accumulate(lambda p, x: local(fs.combine(p, rest), x), steps)(p, x)
            return fs.tree.map(lambda t: t[None], (value, grads))
        if mode == "once":
            rest = whole(frozen)
            f = lambda p, x: fs.pmean(local(fs.combine(p, rest), x), "data")  # noqa: E731
            return fs.accumulate(f, steps, gather=whole)(trained, x)
        f = lambda p, x: fs.pmean(local(whole(fs.combine(p, frozen)), x), "data")  # noqa: E731
        return fs.accumulate(f, steps)(trained, x)

    out = P("data") if mode == "never" else (P(), specs)
    f = fs.shard_map(step, mesh=mesh, in_specs=(specs, specs, P("data")), out_specs=out)
    args = fs.device_put((trained, frozen), specs_of((trained, frozen)), mesh)
    with fs.recording() as log:
        got = f(*args, x)
    return fs.device_get(got), [(t.op, t.phase) for t in log if (t.op, t.bytes) != ("all_reduce", 8)]  # less the loss


def specs_of(parts):
    return tuple(fs.partition(ACCUMULATED, names)[0] for names in (["w", "b"], "frozen"))


PARAMS = {"w": torch.zeros(3, 3), "b": torch.zeros(3), "frozen": torch.zeros(3, 3)}


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_accumulate_and_no_sync_reduce_in_each_microbatch_once_or_never(n, steps):
    """Gradients of all examples, or of each rank's own; transfers of gradients: as many as microbatches, one, none."""
    g = torch.Generator().manual_seed(3)
    p = fs.tree.map(lambda t: torch.randn(t.shape, generator=g, dtype=torch.float64), PARAMS)
    x = torch.randn(12, 3, generator=g, dtype=torch.float64)
    whole_loss = lambda t, x: loss({"w": t["w"], "b": t["b"]}, x @ p["frozen"])  # noqa: E731
    trained = {"w": p["w"], "b": p["b"]}
    want = by_autograd(trained, x, whole_loss)
    for mode in ("each", "once", "never"):
        (value, grads), log = accumulated(fs.make_mesh(data=n), mode, steps, p, x)
        assert grads.pop("frozen") is None
        if mode == "never":
            for rank, part in enumerate(x.chunk(n)):
                close((value[rank], fs.tree.map(lambda t, r=rank: t[r], grads)), by_autograd(trained, part, whole_loss))
        else:
            close((value, grads), want)
        reductions = [op for op, phase in log if phase == "backward"]
        gathers = [op for op, phase in log if phase == "forward"]
        times = {"each": steps, "once": 1, "never": 0}[mode] if n > 1 else 0
        assert sorted(reductions) == sorted(["all_reduce", "reduce_scatter"] * times * n), mode
        if n > 1:  # of w and frozen in one transfer, or each of them before the microbatches
            assert gathers == ["all_gather"] * n * (steps if mode == "each" else 2), mode


def test_accumulation_holds_two_copies_of_the_gradients_and_one_leaf():
    leaves, n, rows = 8, 10_000, 2
    params, x = [torch.ones(n) for _ in range(leaves)], torch.ones(4 * rows, 1)

    def local(ps, x):
        return sum((p.square().sum() * x).sum() for p in ps)

    for steps in (1, 2, 4):
        with Operations() as seen:
            fs.accumulate(local, steps)(params, x)
        copies = 1 if steps == 1 else 2
        assert seen.peak <= (copies * leaves + 2.1) * n * 4  # and what one leaf has in backward


def peak_of_accumulation(gather, width=128, blocks=8):
    """Return the most bytes that a rank of two has allocated at a time in a step, for each parameter of a block."""
    specs, mesh, most = [P("data")] * blocks, fs.make_mesh(data=2), {}
    params = fs.materialize([fs.init.zeros((width, width)) for _ in specs], P("data"), mesh, key=fs.key(0))

    def loss(ps, x):
        for w in ps if gather else ():
            x = x + x @ w
        if not gather:
            x = fs.scan(lambda w, x: x + x @ w, ps, x, specs=P("data"), axis="data")
        return fs.pmean(x.sum(), "data")

    def step(ps, x):
        how = {"gather": lambda p: fs.unshard(p, specs, "data")} if gather else {}
        with Operations() as seen:
            out = fs.accumulate(loss, 4, **how)(ps, x)
        most[int(fs.axis_index("data"))] = seen.peak
        return out

    f = fs.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs), check="never")
    f(params, torch.zeros(8, width))
    return max(most.values()) / width**2


def test_accumulation_of_sharded_gradients_never_holds_whole_ones():
    # Bytes for each parameter of a block: 4 whole, 2 of a part. At a time there are two gathered blocks, one whole
    # gradient and its buffer, 16; activations of a row, 1; the sums, 8 * 2; and the new gradients of both ranks, which
    # one thread makes, 8 * 4. Whole gradients would be 8 * 2 more, and the sums of whole ones 8 * 2.
    assert peak_of_accumulation(gather=False) <= 16 + 1 + 8 * 2 + 8 * 4
    assert peak_of_accumulation(gather=True) >= 8 * 4 * 3  # the parameters, the sums and the new gradients, whole


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("axes", [{"data": 1}, {"data": 2}, {"data": 3}], ids=str)
def test_counted_losses_are_divided_by_the_tokens_of_all_microbatches(axes, dtype):
    """The mean over all tokens with a target, though ranks and microbatches have different numbers of them, or none."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(4, 7, generator=g).to(dtype)
    x, y = torch.randn(12, 5, 4, generator=g).to(dtype), torch.randint(7, (12, 5), generator=g)
    y[torch.rand(12, 5, generator=g) < 0.5] = -100
    y[6:8] = -100

    def total_and_count(w, x, y):
        total = fs.nn.cross_entropy(x @ fs.pvary(w, "data"), y, reduction="sum")
        return fs.psum((total, (y != -100).sum()), "data")

    def step(w, x, y):
        return fs.accumulate(total_and_count, 2, counted=True)(w, x, y)

    f = fs.shard_map(step, mesh=fs.make_mesh(**axes), in_specs=(P(), P("data"), P("data")), out_specs=P())
    got = fs.device_get(f(w, x, y))
    want = by_autograd(w, x, lambda w, x: torch.nn.functional.cross_entropy((x @ w).flatten(0, 1), y.flatten()))
    if dtype == torch.float64:
        close(got, want)
    else:  # totals are rounded to 8 bits in each microbatch
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.01, check_dtype=False)


def test_counted_with_aux_and_gather_and_large_counts():
    def f(w, x):
        return ((x * w).sum(), len(x) * 4097), x.sum()

    x = torch.arange(6.0)
    (value, aux), grads = fs.accumulate(f, 3, has_aux=True, counted=True, gather=lambda w: 2 * w)(torch.tensor(1.0), x)
    assert (value.item(), grads.item()) == pytest.approx((30 / (6 * 4097),) * 2)
    assert aux.tolist() == [1, 5, 9]
    for count in (torch.tensor(257), torch.tensor(257.0)):  # 256 in bfloat16
        for shape in ((), (2,)):
            w = torch.ones(shape, dtype=torch.bfloat16)
            _, grads = fs.accumulate(lambda w, n=count: (w.sum() * 256, n), 1, counted=True)(w)
            assert torch.equal(grads, torch.full(shape, 256 / 257).bfloat16())
            assert grads.dtype == torch.bfloat16


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


@fs.tree.register
@dataclasses.dataclass
class Doubled:
    x: torch.Tensor
    name: str = dataclasses.field(metadata={"static": True})


@pytest.mark.slow
def test_compiled_with_a_dataclass_as_aux_and_with_dropout_in_microbatches():
    p, x = data()
    mesh = fs.make_mesh(data=1)

    def step(p, x):
        dropped = fs.accumulate(drop, 2)(p, x, key=fs.key(7))
        return fs.value_and_grad(lambda p: (loss(p, x), Doubled(x * 2, "aux")), has_aux=True)(p), dropped

    def drop(p, x, *, key):
        return loss(p, fs.nn.dropout(x, 0.5, key=key))

    with by_aot_eager():
        got = fs.shard_map(step, mesh=mesh, out_specs=P(), compile=True)(p, x)
    ((value, aux), grads), dropped = fs.device_get(got)
    close((value, grads), by_autograd(p, x))
    close(dropped, fs.value_and_grad(drop)(p, x, key=fs.key(7)))
    close(aux, Doubled(x * 2, "aux"))


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
