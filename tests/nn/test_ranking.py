"""The k largest logits and the accuracy are those of the dense row, on every mesh, with ties, NaN and empty shards."""

from __future__ import annotations

import math

import pytest
import torch

import fshard as fs
from fshard import P, nn
from tests.lib.assertions import assert_same, error_text
from tests.lib.operations import Operations
from tests.nn.test_nn import AXES, axis_of, close, ints, on, rand

INF, NAN = math.inf, math.nan
MESHES = {**{name: AXES[name] for name in ("1", "two axes")}, "5": {"m": 5}}
CLASSES = (1, 2, 7, 13)


def by_hand(row, k):
    """Return the classes of the k first of a list of numbers: NaN, then larger ones, then lower classes."""
    return sorted(range(len(row)), key=lambda i: (not math.isnan(row[i]), -row[i] if row[i] == row[i] else 0, i))[:k]


def rows(c, dtype=torch.float64):
    """Make rows of c logits of every kind: distinct, many ties, all equal, infinite, NaN, zeros of both signs."""
    x = torch.stack([rand(c), rand(c).round(), torch.zeros(c), rand(c, seed=1).sign() * INF, torch.full((c,), NAN),
                     torch.full((c,), -INF), rand(c, seed=2), rand(c, seed=3).sign() * 0.0])  # fmt: skip
    x[6, ::3] = NAN
    x[6, 1::3] = -INF
    return x.to(dtype)


@pytest.mark.parametrize("name", MESHES)
def test_top_k_is_that_of_the_whole_row(name):
    """Ranks with fewer classes than k, and with none; of equal logits the lowest class on every mesh."""
    sizes, a = MESHES[name], axis_of(MESHES[name])
    ks = {c: sorted({1, min(3, c), c}) for c in CLASSES}

    def run(*given):
        return [nn.top_k(x.view(2, 4, -1), k, axis=a, size=size) for c, x in zip(CLASSES, given, strict=True)
                for k in ks[c] for size in (c, None)]  # fmt: skip

    given = [rows(c) for c in CLASSES]
    got = iter(on(sizes, run, given, (P(None, a),) * 4, P(), "first" if name == "two axes" else "never"))
    for c, x in zip(CLASSES, given, strict=True):
        for k in (k for k in ks[c] for _ in range(2)):
            values, indices = next(got)
            want = torch.tensor([by_hand(row, k) for row in x.tolist()])
            assert torch.equal(indices.view(8, k), want)
            close(values.reshape(8, k), x.gather(-1, want), tol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_top_k_without_an_axis_has_the_values_of_torch(dtype):
    x = rows(13, dtype)
    for k in (1, 5, 13):
        values, indices = nn.top_k(x, k)
        close(values, x.topk(k).values, tol=0)
        assert torch.equal(indices, torch.tensor([by_hand(row, k) for row in x.tolist()]))
        close(nn.top_k(x[0], k), (values[0], indices[0]), tol=0)  # one row
    assert [t.shape for t in nn.top_k(x[:0], 2)] == [(0, 2)] * 2


def test_top_k_of_rows_of_few_values_is_in_the_order_of_the_classes():
    """Long rows, whose chunks are not in the order of their largest entries, full of ties across chunks and ranks."""
    x, ks = ints(6, 5, 211).double(), (1, 2, 7, 50, 211)
    x[1] = x[1].sort().values
    x[2, 100:] = -INF
    x[3] = torch.arange(211)  # the largest in a chunk that is shorter than the others
    want = [torch.tensor([by_hand(row, k) for row in x.tolist()]) for k in ks]
    run = lambda x: [nn.top_k(x, k, axis="m", size=211)[1] for k in ks]  # noqa: E731
    assert_same([nn.top_k(x, k)[1] for k in ks], want)
    assert_same(on({"m": 3}, run, (x,), (P(None, "m"),), P(), "never"), want)


@pytest.mark.parametrize("name", ["1", "5", "two axes"])
def test_top_k_of_a_sample_gives_the_numbers_of_its_classes(name):
    """`classes` are ascending numbers of the columns, of which ranks have different numbers."""
    sizes, a, c = MESHES[name], axis_of(MESHES[name]), 7
    x, classes = rows(c), torch.tensor([2, 3, 11, 12, 40, 41, 99])

    def run(x, classes):
        return [nn.top_k(x, k, axis=a, classes=classes) for k in (3, 9)]

    first, more = on(sizes, run, (x, classes), (P(None, a), P(a)), P())
    want = [by_hand(row, 9) for row in x.tolist()]
    assert first[1].tolist() == [classes[w[:3]].tolist() for w in want]
    assert more[1].tolist() == [[*classes[w].tolist(), -1, -1] for w in want], "there are seven: two are absent"
    close(more[0][:, 7:], x.new_full((8, 2), -INF))


def test_top_k_gives_gradients_to_the_logits_that_it_returns():
    x, g = rand(4, 7), rand(4, 3, seed=1)

    def run(x, a=None, c=None):
        f = lambda x: nn.top_k(x, 3, axis=a, size=c)[0]  # noqa: E731
        y, pull = torch.func.vjp(f, x)
        each = torch.func.vmap(torch.func.grad(lambda row: f(row).square().sum()))(x)
        return pull(g)[0], torch.func.jvp(f, (x,), (x,))[1], each, torch.func.vmap(f)(x), y

    top = x >= x.topk(3).values[:, -1:]
    want = torch.zeros(4, 7, dtype=torch.float64).scatter(1, x.topk(3).indices, g)
    want = want, x.topk(3).values, 2 * x * top, x.topk(3).values, x.topk(3).values
    close(run(x), want)
    spec = P(None, "m")
    close(on({"m": 4}, lambda x: run(x, "m", 7), (x,), (spec,), (spec, P(), spec, P(), P())), want)


def test_top_k_and_accuracy_move_no_logits():
    """B rows, C classes, n ranks: B k logits and as many classes of each rank, in the place of B C / n logits."""
    b, c, k, n = 6, 4000, 5, 4
    x, t = rand(b, c, dtype=torch.float32), ints(c, b)

    def moved(f, over=None):
        with fs.recording() as log:
            on({"m": n, "d": 2}, f, (x, t), (P(over, "m"), P(over)), P())
        transfers = {(m.op, m.axes, m.bytes) for m in log}
        assert len(log) == 2 * n * len(transfers), "each rank takes part in each once"
        return sorted(transfers)

    gathered = moved(lambda x, t: nn.top_k(x, k, axis="m", size=c))
    assert [(op, axes) for op, axes, _ in gathered] == [("all_gather", ("m",))] * 2
    assert sum(size for *_, size in gathered) <= n * b * k * (4 + 8)
    summed = moved(lambda x, t: nn.accuracy(x, t, (1, k), axis="m", size=c, over="d"), "d")
    assert [(op, axes) for op, axes, _ in summed] == [("all_gather", ("m",))] * 2 + [("all_reduce", ("d",))]
    assert sum(size for *_, size in summed) <= n * b // 2 * k * (4 + 8) + 4 * 8


def test_top_k_and_accuracy_of_large_logits_make_no_array_of_their_size():
    x, t = rand(64, 12_007, dtype=torch.float32), ints(12_007, 64)
    with Operations() as seen:
        nn.top_k(x, 5)
        nn.accuracy(x, t)
    assert max(a.numel for a in seen.allocated) <= x.numel() / 30


# --- accuracy -----------------------------------------------------------------------------------------------


def shares_by_hand(x, targets, k, ignored=-100):
    kept = [(row, t) for row, t in zip(x.tolist(), targets.tolist(), strict=True) if t != ignored]
    return torch.tensor([sum(t in by_hand(row, i) for row, t in kept) / len(kept) for i in k])


@pytest.mark.parametrize("name", MESHES)
def test_accuracy_is_that_of_the_whole_row(name):
    sizes, a, k = MESHES[name], axis_of(MESHES[name]), (1, 2, 5, 99)
    given = [(rows(c).repeat(4, 1), ints(c, 32)) for c in CLASSES]
    for _, targets in given:
        targets[::5] = -100

    def run(given):
        return [[nn.accuracy(x, t, k, axis=a, size=size) for size in (c, None)]
                for c, (x, t) in zip(CLASSES, given, strict=True)]  # fmt: skip

    specs = ([(P(None, a), P())] * len(given),)
    got = on(sizes, run, (given,), specs, P(), "first" if name == "two axes" else "never")
    for (x, targets), shares in zip(given, got, strict=True):
        want = shares_by_hand(x, targets, k)
        close(shares, [want, want], tol=1e-6)
        close(nn.accuracy(x.view(4, 8, -1), targets.view(4, 8), k), want, tol=1e-6)


@pytest.mark.parametrize("sizes", [{"d": 1, "m": 1}, {"d": 2, "m": 1}, {"d": 4, "m": 2}, {"d": 3, "m": 3}])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_accuracy_counts_every_target_of_the_global_batch_once(sizes, n):
    """One target over three ranks, seven over four: a mean of the ranks' accuracies is another number, or NaN."""
    x, targets = rand(n, 5).round(), ints(5, n)
    targets[1:2] = 9
    run = lambda x, t: nn.accuracy(x, t, (1, 3), axis="m", size=5, over="d", ignore_index=9)  # noqa: E731
    got = on(sizes, run, (x, targets), (P("d", "m"), P("d")), P())
    close(got, shares_by_hand(x, targets, (1, 3), ignored=9), tol=1e-6)


def test_a_head_over_all_ranks_counts_gathered_targets():
    """Features and targets of all ranks, classes over data and model: nothing is summed over the data axis twice."""
    x, w, targets = rand(6, 4), rand(11, 4, seed=1), ints(11, 6)

    def run(x, w, targets):
        x, targets = fs.all_gather((x, targets), "data", to="invariant")
        logits = nn.linear(x, w.mT, axis=("data", "model"))
        return nn.accuracy(logits, targets, (1, 3), axis=("data", "model"), size=11)

    got = on({"data": 2, "model": 2}, run, (x, w, targets), (P("data"), P(("data", "model")), P("data")), P())
    close(got, shares_by_hand(x @ w.T, targets, (1, 3)), tol=1e-6)


def test_the_share_of_no_targets_and_of_wrong_ones_is_nan():
    x = rand(3, 5)
    first = x.argmax(1)  # all are found; the first is a class that is ignored
    close(nn.accuracy(x, first, (1, 9), ignore_index=int(first[0])), torch.ones(2))
    none = torch.full((3,), -100)
    for targets in (none, torch.tensor([0, 5, 1]), torch.tensor([0, -1, 1])):
        assert nn.accuracy(x, targets).isnan().all()
        run = lambda x, t: nn.accuracy(x, t, axis="m", size=5, over="d")  # noqa: E731
        assert on({"d": 2, "m": 2}, run, (x, targets), (P("d", "m"), P("d")), P()).isnan().all()


def test_a_model_that_says_nothing_is_right_for_the_first_class_alone():
    """Equal logits, all NaN too: counting only larger logits would call every target right."""
    for x in (torch.zeros(4, 4), torch.full((4, 4), NAN)):
        run = lambda x, t: nn.accuracy(x, t, (1, 2), axis="m", size=4)  # noqa: E731
        assert on({"m": 2}, run, (x, torch.arange(4)), (P(None, "m"), P()), P()).tolist() == [0.25, 0.5]


def test_top_k_and_accuracy_on_an_abstract_mesh():
    def run(x, t):
        return *nn.top_k(x, 5, axis="m", size=1203), nn.accuracy(x, t, axis="m", size=1203, over="d")

    mesh = fs.make_mesh(kind="abstract", d=2, m=64)
    mapped = fs.shard_map(run, mesh=mesh, in_specs=(P("d", "m"), P("d")), out_specs=(P("d"), P("d"), P()))
    fs.check(mapped, rand(512, 1203), ints(1203, 512))


# --- errors -------------------------------------------------------------------------------------------------

X, T = torch.ones(2, 4), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: nn.top_k(X, 5), "top_k: k=5 of 4 classes\n  fix: 1 <= k <= 4"),
        (lambda: nn.top_k(X, 0), "top_k: k=0 of 4 classes\n  fix: 1 <= k <= 4"),
        (lambda: nn.top_k(X, 0, classes=torch.arange(4)), "top_k: k=0\n  fix: 1 <= k"),
        (lambda: nn.top_k(X.long(), 1), "top_k: logits are i64[2, 4]\n  fix: floating logits [..., C]"),
        (lambda: nn.top_k(X, 1, classes=torch.arange(3)),
         "top_k: classes must be one int64 number for each column\n  logits  f32[2, 4]    classes  i64[3]"),
        (lambda: on({"m": 2}, lambda x: nn.top_k(x, 1, axis="m", size=9), (X,), (P(None, "m"),), P()),
         ("top_k: this rank holds 2 of the vocabulary, its part is 5\n  9 over 'm' splits into [5, 4]\n"
          "  fix: pass size=, of all ranks, or the lengths of their parts")),
        (lambda: nn.accuracy(X, T, ()), "accuracy: k=()\n  fix: k=(1, 5): each is 1 or more"),
        (lambda: nn.accuracy(X, T, (1, 0)), "accuracy: k=(1, 0)\n  fix: k=(1, 5): each is 1 or more"),
        (lambda: nn.accuracy(X, T[:1]),
         ("accuracy: targets must be one integer class for each row of logits\n"
          "  logits  f32[2, 4]    targets  i64[1]\n"
          "  fix: gather targets where features are gathered; .long() makes integers")),
        (lambda: nn.accuracy(X[0, 0], T), "accuracy: logits are f32[]\n  fix: floating logits [..., C]"),
    ],
)  # fmt: skip
def test_error_texts(call, text):
    assert error_text(call) == text
