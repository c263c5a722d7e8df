"""Losses with a margin, and sampled classes, have the values and gradients of a dense program, on every mesh."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import fshard as fs
from fshard import P, ShardingError, nn
from fshard.nn import loss, margins
from tests.lib.assertions import assert_same, error_text
from tests.lib.operations import Operations
from tests.lib.tiers import slow_unless
from tests.nn.test_nn import ints, on, rand

KEY = fs.key(3)
CLOSE = {"rtol": 1e-11, "atol": 1e-11}  # float64: sums of a few terms in another order


@pytest.fixture(params=["plain", "large"])
def kernel(request, monkeypatch):
    """Formulas as torch differentiates them, or those for large arrays, in blocks of two rows, for all sizes."""
    if request.param == "large":
        monkeypatch.setattr(margins, "_PLAIN_UP_TO", -1)
        monkeypatch.setattr(margins, "_BLOCK", {"cpu": 8})
        monkeypatch.setattr(loss, "_PLAIN_UP_TO", -1)
    return request.param


# --- margins, against a dense formula -------------------------------------------------------------------------------

FORMULAS = {
    "margin": (lambda *a, **kw: nn.margin(*a, m1=1.2, m2=0.3, m3=0.1, **kw), lambda a: (1.2 * a + 0.3).cos() - 0.1),
    "sphere": (lambda *a, **kw: nn.margin(*a, m1=2.0, **kw), lambda a: (2 * a).cos()),
    "none": (nn.margin, torch.cos),
    "arcface": (nn.arcface, lambda a: (a + 0.5).cos()),
    "arcface, monotone": (lambda *a, **kw: nn.arcface(*a, easy_margin=False, **kw),
                lambda a: torch.where(a < math.pi - 0.5, (a + 0.5).cos(), a.cos() - 0.5 * math.sin(0.5))),
    "arcface, easy": (lambda *a, **kw: nn.arcface(*a, easy_margin=True, **kw),
             lambda a: torch.where(a < math.pi / 2, (a + 0.5).cos(), a.cos())),
    "cosface": (lambda *a, **kw: nn.cosface(*a, m=0.2, **kw), lambda a: a.cos() - 0.2),
}  # fmt: skip


def test_cosines_have_the_dtype_of_the_features_under_autocast(kernel):
    x, w = rand(3, 4, dtype=torch.float32), rand(5, 4, seed=1, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert nn.cosine_logits(x, w).dtype == torch.float32


LAYOUTS = {  # mesh, axes of the classes and of the batch: 7 classes over 4 ranks leave one with 1, over 6 one with none
    "dense": ({}, None, None),
    "2": ({"m": 2}, "m", None),
    "4": ({"m": 4}, "m", None),
    "data, model": ({"d": 2, "m": 3}, "m", "d"),
    "two axes": ({"a": 3, "b": 2}, ("b", "a"), None),
    "all axes": ({"d": 2, "m": 3}, ("d", "m"), None),
    "data": ({"d": 3}, None, "d"),
    "many": ({"m": 8}, "m", None),  # ranks without a class, or without a sampled one
}


def check_of(layout):
    """`check=` on a layout: types do not depend on sizes, and one layout has them all."""
    return "first" if layout == "data, model" else "never"


X, W, TARGETS = rand(5, 2, 4), rand(7, 4, seed=1), ints(7, 5, 2, seed=2)  # 5 rows over 2: 3 and 2
TARGETS[0, 0], TARGETS[1, 0], TARGETS[2, 1] = -100, 3, 6
W[3], W[6] = -5 * X[1, 0] + rand(4, seed=5), X[2, 1] + 0.01 * rand(4, seed=6)  # angles near pi and 0


def dense(x, w, targets, formula, scale):
    """Logits by the words of the papers: one angle for each class, one-hot targets."""
    angles = torch.acos(F.linear(F.normalize(x, dim=-1), F.normalize(w, dim=-1)))
    hot = targets.unsqueeze(-1) == torch.arange(len(w))
    return scale * torch.where(hot, formula(angles), angles.cos())


def dense_loss(x, w, targets, formula, scale=6.0):
    return F.cross_entropy(dense(x, w, targets, formula, scale).flatten(0, -2), targets.flatten())


@pytest.mark.parametrize(
    ("layout", "kernel"),
    [(layout, "plain") for layout in LAYOUTS if layout not in ("2", "4")]
    + [("dense", "large"), ("data, model", "large")],
    indirect=["kernel"],
)
def test_margins_equal_a_dense_formula_in_value_and_gradients(layout, kernel):
    sizes, axis, over = LAYOUTS[layout]
    formulas = FORMULAS if not sizes else {"margin": FORMULAS["margin"]}  # a formula sees one cosine of each row

    def run(x, w, targets):
        def loss_of(x, w, margin):
            x, w = fs.pvary(x, axis), fs.pvary(w, over)
            logits = margin(nn.cosine_logits(x, w), targets, scale=6.0, axis=axis, size=7)
            return nn.cross_entropy(logits, targets, axis=axis, size=7, over=over)

        return [fs.value_and_grad(loss_of, (0, 1))(x, w, margin) for margin, _ in formulas.values()]

    specs = (P(over), P(axis), P(over))
    got = on(sizes, run, (X, W, TARGETS), specs, [(P(), specs[:2])] * len(formulas), check_of(layout))
    for name, result, (_, formula) in zip(formulas, got, formulas.values(), strict=True):
        want = fs.value_and_grad(lambda x, w, f=formula: dense_loss(x, w, TARGETS, f), (0, 1))(X, W)
        assert_same(result, want, name, rtol=1e-9, atol=1e-9)  # acos of a cosine near 1 loses digits: 1e-16 / 1e-4


def test_only_the_targets_change():
    cosines, targets = rand(4, 7).tanh(), torch.tensor([0, 6, -100, -1])
    got = nn.margin(cosines, targets, m2=0.5, scale=2.0)
    changed = got != 2 * cosines
    assert changed.nonzero().tolist() == [[0, 0], [1, 6]]
    assert_same(nn.margin(cosines[0], targets[0].int(), m2=0.5, scale=2.0), got[0])


@pytest.mark.parametrize("layout", ["dense", "4"])
def test_classes_masked_by_infinity_have_a_gradient_of_zero(layout, kernel):
    """The first class of a rank too, which stands for the target where another rank has it, or none."""
    sizes, axis, _ = LAYOUTS[layout]
    cosines, targets = rand(4, 7).tanh(), torch.tensor([1, 3, -100, 5])
    mask = torch.tensor([-math.inf, 0, -math.inf, 0, -math.inf, 0, -math.inf], dtype=torch.float64)

    def run(cosines, mask):
        def loss_of(c):
            logits = nn.margin(c + mask, targets, m1=1.2, m2=0.3, scale=4.0, axis=axis, size=7)
            return nn.cross_entropy(logits, targets, axis=axis, size=7)

        return fs.value_and_grad(loss_of)(cosines)

    value, got = on(sizes, run, (cosines, mask), (P(None, axis), P(axis)), (P(), P(None, axis)), "never")
    kept = nn.margin(cosines[:, 1::2], (targets - 1) // 2, m1=1.2, m2=0.3, scale=4.0)
    assert_same(value, F.cross_entropy(kept, ((targets - 1) // 2).where(targets >= 0, -100)), **CLOSE)
    assert got.isfinite().all()
    assert (got[:, ::2] == 0).all()


def test_angles_that_rounding_hides_have_finite_derivatives(kernel):
    """Cosines of 1 and -1, and beyond: a margin of an angle has an infinite derivative there."""
    one = torch.tensor([1.0, 1 + 1e-6, 1 - 1e-7, -1.0, -1 - 1e-6])
    cosines = torch.stack([one, torch.zeros(5)], 1)
    for name, (margin, formula) in FORMULAS.items():
        y, g = fs.value_and_grad(lambda c, m=margin: m(c, torch.zeros(5, dtype=int), scale=1.0)[:, 0].sum())(cosines)
        assert g.isfinite().all(), name
        want = formula(one.double().clamp(-1, 1).acos()).sum()
        # cos θ of eps less than 1 has an angle of sqrt(2 eps) = 5e-4, by which the formula may differ for each of five.
        torch.testing.assert_close(y.double(), want, rtol=0, atol=5 * 5e-4)
    derivative = lambda c, **m: torch.func.grad(lambda c: nn.margin(c, torch.tensor(0), scale=1.0, **m)[0])(c)[0]  # noqa: E731
    assert derivative(torch.tensor([1.0, 0.0]), m3=0.2) == 1
    torch.testing.assert_close(
        derivative(torch.tensor([1.0, 0.0]), m1=2.0), torch.tensor(4.0)
    )  # the limit of 2 sin 2θ / sin θ
    angle = torch.tensor(0.02, dtype=torch.float64)
    got = derivative(torch.stack([angle.cos(), angle]).float(), m2=0.5)
    # The float32 cosine of 0.02 is known to 6e-8, so its angle to 3e-6, or 1.5e-4 of itself.
    torch.testing.assert_close(got.double(), (angle + 0.5).sin() / angle.sin(), rtol=2e-4, atol=0)


def test_a_feature_in_the_direction_of_its_class_is_pushed_nowhere(kernel):
    """The infinite derivative of the angle meets a tangent of zero: the gradient of the feature is finite and small."""
    x = rand(3, 8, dtype=torch.float32)
    f = lambda x, w: nn.arcface(nn.cosine_logits(x, w), torch.arange(3), scale=1.0).diagonal().sum()  # noqa: E731
    for grad in fs.grad(f, (0, 1))(x, 3 * x):
        assert grad.isfinite().all()
        assert grad.abs().max() < 1  # of sin(0.5) / |x| in a direction that rounding decides


def test_without_a_threshold_large_angles_are_rewarded_and_with_it_never():
    cosines = torch.linspace(-1, 1, 101, dtype=torch.float64)[1:-1]
    targets = torch.zeros(99, dtype=torch.int64)
    rising = {}
    for name, (margin, _) in FORMULAS.items():
        logits = margin(cosines.unsqueeze(-1), targets, scale=1.0)[:, 0]
        rising[name] = bool((logits.diff() > 0).all())
    assert rising == {"margin": False, "sphere": False, "none": True, "arcface": False, "arcface, monotone": True,
                      "arcface, easy": False, "cosface": True}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_and_rounded_once(dtype, kernel):
    cosines, targets = rand(64, 5).tanh().to(dtype), ints(5, 64)
    got = nn.arcface(cosines, targets, scale=64.0)
    assert got.dtype == dtype
    c = cosines.double().gather(1, targets[:, None])
    want = (64 * cosines.double()).scatter(1, targets[:, None], 64 * (c.acos() + 0.5).cos()).to(dtype)
    assert (got != want).sum() <= 1  # a float32 rounding that crosses the middle of two half precision values
    x, w = rand(6, 40, seed=1).to(dtype), rand(5, 40, seed=2).to(dtype)
    y, grads = fs.value_and_grad(lambda x, w: nn.cosine_logits(x, w).square().sum(), (0, 1))(x, w)
    theirs = lambda x, w: F.linear(F.normalize(x), F.normalize(w)).square().sum()  # noqa: E731
    want_y, want_grads = fs.value_and_grad(theirs, (0, 1))(x.double(), w.double())
    assert [g.dtype for g in (y, *grads)] == [dtype] * 3
    # Some roundings of normalized elements, of a product, and of the gradient of each.
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), want_y, rtol=tolerance, atol=0)
    for g, want_g in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(g.double(), want_g, rtol=tolerance, atol=tolerance * want_g.abs().max().item())


def test_under_autocast_the_product_alone_is_in_half_precision(kernel):
    x, w = rand(6, 40, seed=1).float(), rand(5, 40, seed=2).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = nn.cosine_logits(x, w)
    assert_same(y, F.cosine_similarity(x[:, None], w[None], dim=-1), rtol=0, atol=2**-8)


def test_rows_of_zeros_and_short_rows_are_those_of_normalize(kernel):
    x, w = rand(3, 4), rand(5, 4, seed=1)
    x[0], w[1], w[2] = 0, 0, 1e-14 * w[2]
    rate = rand(3, 5, seed=2)
    got = fs.grad(lambda x, w: (nn.cosine_logits(x, w) * rate).sum(), (0, 1))(x, w)
    want = fs.grad(lambda x, w: (F.linear(F.normalize(x), F.normalize(w)) * rate).sum(), (0, 1))(x, w)
    assert_same(got, want, rtol=1e-11, atol=1e-11)


def test_margins_under_transforms_and_second_derivatives(kernel):
    x, w, targets = rand(3, 4), rand(5, 4, seed=1), ints(5, 3)
    ours = lambda x, w, t=targets: nn.cross_entropy(nn.margin(nn.cosine_logits(x, w), t, m2=0.3, scale=4.0), t)  # noqa: E731
    theirs = lambda x, w, t=targets: dense_loss(x, w, t, lambda a: (a + 0.3).cos(), 4.0)  # noqa: E731

    def derivatives(f):
        own = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        grads = torch.autograd.grad(f(*own), own, create_graph=True)
        second = torch.autograd.grad(sum((g * rand(*g.shape, seed=7)).sum() for g in grads), own)
        jvp = torch.func.jvp(f, (x, w), (rand(3, 4, seed=8), rand(5, 4, seed=9)))
        tables = torch.stack([w, 2 * w + x[0]])
        mapped = torch.func.vmap(torch.func.grad(f, 1), (None, 0))(x, tables)
        by_example = torch.func.vmap(torch.func.grad(lambda w, x, t: f(x[None], w, t[None])), (None, 0, 0))(
            w, x, targets
        )
        return [g.detach() for g in grads], second, jvp, mapped, by_example, torch.func.hessian(f)(x, w)

    assert_same(derivatives(ours), derivatives(theirs), rtol=1e-9, atol=1e-9)
    frozen = x.clone().requires_grad_()  # of a table that is not trained
    (g,) = torch.autograd.grad(ours(frozen, w), frozen, create_graph=True)
    assert_same(g.detach(), fs.grad(theirs)(x, w), rtol=1e-9, atol=1e-9)
    assert torch.autograd.grad(g.sum(), frozen)[0].abs().sum() > 0


def test_types_of_a_forgotten_pvary_are_refused(kernel):
    def run(x, w):
        return fs.grad(lambda x, w: fs.psum(nn.cosine_logits(x, w).sum(), "d"), (0, 1))(x, w)

    for specs in ((P("d"), P()), (P(), P("d"))):
        with pytest.raises(ShardingError, match=r"an operand that is invariant \(I\) over 'd' with one that varies"):
            on({"d": 2}, run, (X[:4], W[:6]), specs, specs)


@pytest.mark.parametrize("axis", [None, "m"])
def test_an_axis_that_is_not_named_is_refused(axis):
    """The loss names both axes, so that its result alone would not show it."""
    cosines, targets, both = rand(3, 12), torch.tensor([0, 11, 4]), ("d", "m")
    run = lambda c, t: nn.cross_entropy(nn.arcface(c, t, axis=axis), t, axis=both)  # noqa: E731
    with pytest.raises(ShardingError) as e:
        on({"d": 2, "m": 2}, run, (cosines, targets), (P(None, both), P()), P())
    missing = "'d' and 'm'" if axis is None else "'d'"
    assert str(e.value) == (
        f"arcface: cosines vary over {missing}, targets do not, and axis={axis!r}\n"
        "  each rank would take its part of the classes for all of them\n"
        "  fix: axis=('d', 'm'), in the order of the table's spec; or fs.pvary(targets, ('d', 'm')), "
        "if each rank has all classes"
    )


def test_large_margins_make_no_array_of_the_classes_but_logits_and_the_gradients(monkeypatch):
    """Of the table's size: its gradient. Of the logits' size: cosines, logits and two gradients. No one-hot."""
    monkeypatch.setattr(margins, "_PLAIN_UP_TO", 1 << 12)
    monkeypatch.setattr(margins, "_BLOCK", {"cpu": 1 << 12})
    monkeypatch.setattr(loss, "_PLAIN_UP_TO", 1 << 12)
    monkeypatch.setattr(loss, "_BLOCK", {"cpu": 1 << 12})
    n, d, c = 48, 64, 2006
    x, w, targets = rand(n, d, dtype=torch.float32), rand(c, d, dtype=torch.float32), ints(c, n)

    def run(x, w, targets):
        def loss_of(w, x):
            logits = nn.arcface(nn.cosine_logits(fs.pvary(x, "m"), w), targets, axis="m", size=c)
            return nn.cross_entropy(logits, targets, axis="m", size=c)

        with Operations() as seen:
            fs.value_and_grad(loss_of, (0, 1))(w, x)
        assert sum(a.numel == w.numel() for a in seen.allocated) == 1
        assert sum(a.numel == n * len(w) for a in seen.allocated) == 4
        assert sum(a.numel > 1 << 13 for a in seen.allocated) == 5
        assert seen.peak < 4 * (w.numel() + 3.3 * n * len(w))  # the cosines are freed, of logits three live at once
        assert not {n for shape in seen.shapes for n in (*shape, shape.numel())} & {c, c * n, c * d}
        return targets.new_zeros(())

    with fs.recording() as log:
        on({"m": 2}, run, (x, w, targets), (P(), P("m"), P()), P(), "never")
    assert {(m.op, m.bytes // 4) for m in log} == {("all_reduce max", n), ("all_reduce", 2 * n), ("all_reduce", n * d)}


# --- sampled classes --------------------------------------------------------------------------------------------------


def sample(layout, targets, key=KEY, *, size, count):
    """The classes of each rank, as a list over the ranks of the axis, after a check that replicas agree."""
    sizes, axis, over = LAYOUTS[layout]
    found = {}

    def run(targets):
        classes = nn.sample_classes(key, targets, size=size, count=count, axis=axis, over=over)
        at = int(fs.axis_index(axis)) if axis else 0
        assert_same(found.setdefault(at, classes), classes)

    on(sizes, run, (targets,), (P(over),), P())
    return [found[at] for at in sorted(found)]


@pytest.mark.parametrize(
    ("layout", "size", "count"),
    [("2", 40, 9), ("4", 7, 3), ("4", 40, 39), ("4", 40, 100), ("data", 40, 9), ("data, model", 40, 9),
     ("data, model", 7, 7), ("two axes", 40, 9), ("all axes", 2, 1), ("many", 1, 1), ("many", 30, 2)],
)  # fmt: skip
def test_the_sample_is_the_same_set_on_every_mesh(layout, size, count):
    _, axis, _ = LAYOUTS[layout]
    targets = ints(size, 5, 2, seed=size)
    targets[1:3] = -100
    whole = nn.sample_classes(KEY, targets, size=size, count=count)
    parts = sample(layout, targets, size=size, count=count)
    assert_same(torch.cat(parts), whole)
    lengths = fs.spec.part_lengths(size, [LAYOUTS[layout][0][a] for a in fs.spec.names_of(axis)])
    stops = torch.tensor(lengths).cumsum(0).tolist()
    for part, start, stop in zip(parts, [0, *stops], stops, strict=False):
        assert ((part >= start) & (part < stop)).all()
    known = set(targets[targets >= 0].tolist())
    assert known <= set(whole.tolist())
    assert len(whole) == min(size, max(count, len(known)))
    assert whole.tolist() == sorted(set(whole.tolist()))


def test_classes_that_are_no_targets_are_drawn_alike_and_anew_for_each_key():
    targets, counts = torch.tensor([3, 3, 11]), torch.zeros(12)
    for step in range(100):
        classes = nn.sample_classes(fs.fold_in(KEY, step), targets, size=12, count=4)
        assert len(classes) == 4
        counts[classes] += 1
    assert counts[3] == counts[11] == 100
    others = counts[[i for i in range(12) if i not in (3, 11)]]
    # 2 of 10 at each step: 20 of 100, with a deviation of sqrt(100 * 0.2 * 0.8) = 4. Keys are fixed, so this is too.
    assert others.min() > 20 - 4 * 4
    assert others.max() < 20 + 4 * 4
    assert_same(
        nn.sample_classes(KEY, targets, size=12, count=4), nn.sample_classes(KEY, targets.int(), size=12, count=4)
    )


def test_samples_of_no_targets_and_of_more_targets_than_asked_for():
    none = nn.sample_classes(KEY, torch.tensor([-100, -1]), size=10, count=3)
    assert len(none) == 3
    assert_same(nn.sample_classes(KEY, torch.zeros(0, dtype=torch.int64), size=10, count=3), none)
    assert nn.sample_classes(KEY, torch.tensor([[9, 0], [4, 9]]), size=10, count=2).tolist() == [0, 4, 9]


def test_a_dry_run_has_about_as_many_classes_on_each_rank_and_one_block_of_them(monkeypatch):
    mesh = fs.make_mesh(kind="abstract", d=2, m=4)
    monkeypatch.setattr(margins, "_PLAIN_UP_TO", -1)
    monkeypatch.setattr(margins, "_BLOCK", {"cpu": 4})
    blocks, tangent = [], margins._tangent
    monkeypatch.setattr(margins, "_tangent", lambda d, x, eps: (blocks.append(len(x)), tangent(d, x, eps))[1])
    grad = fs.shard_map(fs.grad(lambda w, x: nn.cosine_logits(fs.pvary(x, "m"), w).sum()), mesh=mesh,
                        in_specs=(P("m"), P()), out_specs=P("m"))  # fmt: skip
    fs.check(grad, rand(40, 4), rand(3, 4))
    assert blocks == [10, 3], "the table's rows, and those of x"
    f = fs.shard_map(lambda t: nn.sample_classes(KEY, t, size=40, count=8, axis="m", over="d"), mesh=mesh,
                     in_specs=P("d"), out_specs=P("m"))  # fmt: skip
    assert f(ints(40, 8)).shape == (8,)


SAMPLED = torch.tensor([0, 1, 4, 5, 9])  # of 13 classes, over 4 ranks: 4, 4, 4 and 1, of which the last has no sample


def part_of_sample(start, length):
    return torch.stack([c for c in SAMPLED if start <= c < start + length] or [SAMPLED[:0]]).view(-1)


@pytest.mark.parametrize("layout", ["dense", "4", "data, model"])
def test_cross_entropy_over_sampled_classes_is_that_of_their_columns(layout, kernel):
    sizes, axis, over = LAYOUTS[layout]
    columns = rand(6, 5)
    targets = SAMPLED[ints(5, 6)]
    targets[:2] = -100
    weight = rand(5, seed=4).abs()
    ns = [sizes[a] for a in fs.spec.names_of(axis)]
    options = [{}, {"label_smoothing": 0.1}, {"weight": True, "label_smoothing": 0.1, "reduction": "sum"},
               {"reduction": "none", "weight": True}, {"ignore_index": 4}]  # fmt: skip

    def run(rate, targets):
        start, length = fs.spec.part_range(13, ns, [int(fs.axis_index(a)) for a in fs.spec.names_of(axis)])
        if axis:  # a value that varies over the axis
            start = start + 0 * fs.axis_index(axis)
        mine = part_of_sample(start, length)
        at = torch.searchsorted(SAMPLED, mine)

        def one(rate, kw):
            kw = {**kw, "weight": fs.pvary(weight[at], axis) if "weight" in kw else None}
            t = targets.where(targets >= 0, kw["ignore_index"])
            logits = fs.pvary(rate, axis)[:, at]
            y = nn.cross_entropy(logits, t, axis=axis, over=over, classes=mine, **kw)
            return y if y.ndim == 0 else fs.psum((y * torch.arange(1, 1 + len(y))).sum(), over)

        return [fs.value_and_grad(one)(rate, {**kw, "ignore_index": kw.get("ignore_index", -100)}) for kw in options]

    specs = (P(over), P(over))
    got = on(sizes, run, (columns, targets), specs, [(P(), P(over))] * len(options), check_of(layout))
    dense_targets = torch.searchsorted(SAMPLED, targets.clamp(min=0)).where(targets >= 0, -100)
    rows = 6 // sizes.get(over, 1)
    for result, kw in zip(got, options, strict=True):
        kw = {**kw, "weight": weight if "weight" in kw else None}
        ignored = dense_targets.where(targets != kw.pop("ignore_index", -100), -100)

        def want(x, kw=kw, ignored=ignored):
            y = F.cross_entropy(x, ignored, **kw)
            return y if y.ndim == 0 else (y * (torch.arange(6) % rows + 1)).sum()

        assert_same(result, fs.value_and_grad(want)(columns), str(kw), **CLOSE)


def test_targets_that_are_not_sampled_give_nan(kernel):
    targets = torch.tensor([4, 2, -100, 12, -1])
    for sizes, axis in (({}, None), ({"m": 4}, "m")):

        def run(x, axis=axis):
            start = 4 * fs.axis_index("m") if axis else 0
            mine = part_of_sample(start, (4 if axis else 13))
            logits = fs.pvary(x, axis)[:, : len(mine)]
            return nn.cross_entropy(logits, targets, axis=axis, classes=mine, reduction="none")

        got = on(sizes, run, (rand(5, 5),), (P(),), P())
        assert got.isnan().tolist() == [False, True, False, True, True]
        assert got[2] == 0


def test_classes_that_every_rank_has_are_refused():
    """A softmax over ranks with the same columns would count each class once for each rank."""

    def run(x, targets):
        classes = nn.sample_classes(KEY, targets, size=8, count=4)  # axis= is missing
        return nn.cross_entropy(fs.pvary(x, "m"), targets, axis="m", classes=classes)

    with pytest.raises(ShardingError, match="psum over 'm' of a value that does not vary over it"):
        on({"m": 2}, run, (rand(2, 4), torch.tensor([1, 2])), (P(), P()), P())


# --- train steps: sampled classes and an update of their rows ---------------------------------------------------------

SIZE, COUNT, WIDTH, BATCH, STEPS = 23, 7, 4, 6, 4
OPTIMIZERS = {
    "sgd": lambda specs: fs.optim.sgd(0.2),
    "momentum": lambda specs: fs.optim.sgd(0.2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda specs: fs.optim.adamw(0.05, weight_decay=0.1),
    "clipped": lambda specs: fs.optim.chain(fs.optim.clip_by_global_norm(0.3, specs), fs.optim.sgd(0.2, momentum=0.9)),
}


def targets_at(step):
    targets = ints(SIZE, BATCH, seed=step)
    targets[0] = -100
    return targets


def train(layout, name):
    """Partial FC on a mesh: (loss and gradient of the features at each step, the table, the state)."""
    sizes, axis, over = LAYOUTS[layout]
    specs = {"w": P(axis)}
    opt = OPTIMIZERS[name](specs)
    ns = [sizes[a] for a in fs.spec.names_of(axis)]

    def step(params, state, x, targets, key):
        classes = nn.sample_classes(key, targets, size=SIZE, count=COUNT, axis=axis, over=over)
        rows = classes - fs.spec.part_range(SIZE, ns, [int(fs.axis_index(a)) for a in fs.spec.names_of(axis)])[0]

        def loss_fn(sampled, x):
            cosines = nn.cosine_logits(fs.pvary(x, axis), fs.pvary(sampled["w"], over))
            logits = nn.margin(cosines, targets, m2=0.3, m3=0.1, scale=4.0, axis=axis, classes=classes)
            return nn.cross_entropy(logits, targets, axis=axis, classes=classes, over=over)

        sampled = fs.tree.map(lambda w: w[rows], params)
        loss, (grads, dx) = fs.value_and_grad(loss_fn, (0, 1))(sampled, x)
        return (loss, dx), *fs.optim.update_rows(opt, rows, grads, state, params)

    mesh = fs.make_mesh(**sizes)
    params = fs.device_put({"w": rand(SIZE, WIDTH)}, specs, mesh)
    state = opt.init(params)
    mapped = fs.shard_map(step, mesh=mesh, in_specs=(specs, opt.specs(specs), P(over), P(over), P()),
                          out_specs=((P(), P(over)), specs, opt.specs(specs)), donate=(0, 1),
                          check=check_of(layout))  # fmt: skip
    seen = []
    for i in range(STEPS):
        out, params, state = mapped(params, state, rand(BATCH, WIDTH, seed=9 + i), targets_at(i), fs.fold_in(KEY, i))
        seen.append(out)
    return fs.device_get((seen, params, state))


def train_densely(name):
    """The same on one device: gradients of the whole table, through a softmax over the sampled columns of it."""
    params, opt = {"w": rand(SIZE, WIDTH)}, OPTIMIZERS[name](P())
    state, seen = opt.init(params), []
    for i in range(STEPS):
        x, targets = rand(BATCH, WIDTH, seed=9 + i), targets_at(i)
        known = set(targets[1:].tolist())
        order = [c for c in fs.data.permute(fs.fold_in(KEY, i), range(SIZE), size=SIZE).tolist() if c not in known]
        chosen = torch.tensor(sorted([*known, *order[: COUNT - len(known)]]))

        def loss_fn(w, x, targets=targets, chosen=chosen):
            logits = dense(x, w, targets, lambda a: (a + 0.3).cos() - 0.1, 4.0)
            columns = torch.searchsorted(chosen, targets.clamp(min=0)).where(targets >= 0, -100)
            return F.cross_entropy(logits[:, chosen], columns)

        loss, (dw, dx) = fs.value_and_grad(loss_fn, (0, 1))(params["w"], x)
        seen.append((loss, dx))
        rows = lambda t, chosen=chosen: t[chosen] if t.ndim else t  # noqa: E731
        new, new_state = opt.update({"w": dw[chosen]}, fs.tree.map(rows, state), fs.tree.map(rows, params))
        put = lambda old, new, chosen=chosen: old.index_copy(0, chosen, new) if old.ndim else new  # noqa: E731
        params, state = fs.tree.map(put, params, new), fs.tree.map(put, state, new_state)
    return seen, params, state


@pytest.mark.parametrize("name", slow_unless(["adamw", "clipped"], OPTIMIZERS))
def test_steps_of_sampled_classes_are_the_same_on_every_mesh(name):
    want = train_densely(name)
    for layout in ("4", "data, model", "all axes", "many") if name == "momentum" else ("data, model",):
        assert_same(train(layout, name), want, layout, rtol=1e-8, atol=1e-9)


# --- errors -----------------------------------------------------------------------------------------------------------

C, T = torch.zeros(2, 5), torch.tensor([0, 4])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: nn.margin(C, T, m2=28.6),
         ("margin: m1 and scale are more than 0, m2 is an angle in radians, and all are finite\n"
         "  m1  1.0    m2  28.6    m3  0.0    scale  64.0")),
        (lambda: nn.arcface(C, T, m=28.6),
         ("arcface: m is an angle in radians, 0 <= m <= pi, and scale finite and more than 0\n"
         "  m  28.6    scale  64.0")),
        (lambda: nn.cosface(C, T, m=math.nan),
         "cosface: m is finite, and scale finite and more than 0\n  m  nan    scale  64.0"),
        (lambda: nn.cosface(C, T[:1]),
         ("cosface: targets must be one integer class for each row of logits\n  logits  f32[2, 5]    targets  i64[1]\n"
          "  fix: gather targets where features are gathered; .long() makes integers")),
        (lambda: nn.arcface(C, T, classes=T),
         ("arcface: classes must be the class of each column of logits, ascending\n"
         "  logits  f32[2, 5]    classes  i64[2]\n  fix: classes = nn.sample_classes(...)")),
        (lambda: nn.margin(C.long(), T), "margin: cosines are i64[2, 5]\n  fix: floats [..., C]"),
        (lambda: nn.margin(C, T, axis="m"),
         ("margin: called outside shard_map, where no mesh axis is bound\n"
         "  fix: call it inside a function wrapped by fs.shard_map(f, mesh=..., ...)")),
        (lambda: nn.cosine_logits(C, C.double()),
         "cosine_logits: x is not [..., D] for a table [C, D] of one floating dtype\n  x  f32[2, 5]    w  f64[2, 5]"),
        (lambda: nn.cosine_logits(C, C, eps=0.0), "cosine_logits: eps=0.0\n  fix: more than 0"),
        (lambda: nn.sample_classes(KEY, T, size=4, count=2),
         "sample_classes: target 4 is not a class\n  classes are 0 to 3"),
        (lambda: nn.sample_classes(KEY, T, size=5, count=0),
         "sample_classes: size=5, count=0\n  fix: both are 1 or more"),
        (lambda: nn.sample_classes(KEY, C, size=5, count=1),
         "sample_classes: targets are f32[2, 5]\n  fix: integer classes"),
    ],
)  # fmt: skip
def test_error_texts(call, text):
    assert error_text(call) == text


def test_a_class_too_large_on_one_rank_is_an_error_on_all():
    targets = torch.tensor([0, 1, 2, 9])
    with pytest.raises(ShardingError, match="target 9 is not a class"):
        sample("data, model", targets, size=8, count=2)
