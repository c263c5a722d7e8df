from __future__ import annotations

import math
import random as stdlib_random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fshard as fs
from fshard import P, ShardingError
from fshard.random import draws as R  # noqa: N812
from tests.lib.assertions import assert_same, error_text
from tests.lib.tiers import slow_unless

KEY = fs.key(0)
M = 0xFFFFFFFF
# Random123, kat_vectors: philox4x32, 10 rounds.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((M, M, M, M), (M, M), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]  # fmt: skip
WORDS = R._Distribution(lambda w: w, torch.int64)
EXPONENTIAL, GUMBEL = R._exponential(torch.float64), R._gumbel(torch.float64)
COINS = R._Distribution(lambda w: w < 1 << 31, torch.bool)
DRAWS = {
    "normal": lambda key, shape, box: R.normal_box(key, shape, box, mean=0.5, std=2.0),
    "normal_bf16": lambda key, shape, box: R.normal_box(key, shape, box, dtype=torch.bfloat16),
    "normal_f64": lambda key, shape, box: R.normal_box(key, shape, box, dtype=torch.float64),
    "trunc_normal": lambda key, shape, box: R.trunc_normal_box(key, shape, box, std=0.02, a=-0.03, b=0.05),
    "uniform": lambda key, shape, box: R.uniform_box(key, shape, box, low=-1.0, high=3.0),
    "uniform_f16": lambda key, shape, box: R.uniform_box(key, shape, box, dtype=torch.float16),
    "exponential": lambda key, shape, box: R._draw("exponential", key, shape, box, EXPONENTIAL, None),
    "gumbel": lambda key, shape, box: R._draw("gumbel", key, shape, box, GUMBEL, None),
    "bits": lambda key, shape, box: R._draw("bits", key, shape, box, WORDS, None),
    "bernoulli": lambda key, shape, box: R._draw("bernoulli", key, shape, box, COINS, None),
}


def whole(shape):
    return tuple(slice(0, n) for n in shape)


def words_at(key, index):
    """The definition, one element at a time, in Python integers."""
    return [R.philox(((i >> 2) & M, i >> 34, 0, 0), key.tolist())[i & 3] for i in index]


# --- the generator


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_returns_the_published_known_answers(counter, key, answer):
    assert " ".join(f"{w:08x}" for w in R.philox(counter, key)) == answer
    lanes = R.philox([torch.tensor([c, 5]) for c in counter], [torch.tensor(k) for k in key])
    assert " ".join(f"{w[0].item():08x}" for w in lanes) == answer


@pytest.mark.parametrize("key", [(0, 0), (M, M), (0xA4093822, 0x299F31D0)])
def test_philox_in_place_equals_philox(key):
    low = torch.cat([torch.arange(100), M - torch.arange(100), 1 << torch.arange(32)])
    for high in (0, 1, M, torch.arange(len(low)) * 12345 & M):
        lanes = torch.empty(5, len(low), dtype=torch.int64)
        lanes[4] = low
        R.philox_in_place(lanes[1:], lanes[0], high, key)
        expected = torch.stack(R.philox((low, high, 0, 0), key))
        assert torch.equal(lanes[1:], expected)


# --- element addressing


def test_bits_equal_the_definition():
    assert R.bits(KEY, (3, 5)).flatten().tolist() == words_at(KEY, range(15))
    assert R.bits(fs.key(2**64 - 1), ()).tolist() == words_at(fs.key(2**64 - 1), [0])[0]


@pytest.mark.parametrize(  # tiles of 16 blocks cut runs and rows often
    ("draw", "tile_blocks"),
    [
        ("normal", 1 << 15),
        ("bernoulli", 1 << 15),
        *slow_unless([(d, 16) for d in ("normal", "bits", "bernoulli", "gumbel")], [(d, 16) for d in DRAWS]),
    ],
)
def test_any_box_equals_that_part_of_the_whole_bitwise(draw, tile_blocks, monkeypatch):
    monkeypatch.setattr(R, "_TILE_BLOCKS", tile_blocks)
    rng = stdlib_random.Random(draw)
    shapes = [(1000,), (37, 53), (5, 7, 9), (4, 6, 8, 4), (3, 2, 1, 5), (2, 301), (70, 1)]
    for shape in shapes:
        full = DRAWS[draw](KEY, shape, whole(shape))
        boxes = [[sorted(rng.choices(range(n + 1), k=2)) for n in shape] for _ in range(2)]
        boxes += [[(0 if d == full_dim else n // 3, n) for d, n in enumerate(shape)] for full_dim in range(4)]
        for box in ([slice(*ends) for ends in b] for b in boxes):
            part = DRAWS[draw](KEY, shape, tuple(box))
            assert part.is_contiguous()
            assert torch.equal(part, full[tuple(box)]), (shape, box)


@pytest.mark.parametrize("draw", ["normal", "trunc_normal", "uniform"])
def test_large_parts_are_bitwise_equal_for_any_number_of_threads(draw):
    shape = (151, 1031)  # more than 2^15 blocks: two tiles on one thread, two threads on one tile
    full = DRAWS[draw](KEY, shape, whole(shape))
    for box in [(slice(1, 150), slice(0, 1031)), (slice(0, 151), slice(3, 515)), (slice(7, 140), slice(514, 1031))]:
        assert torch.equal(DRAWS[draw](KEY, shape, box), full[box])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(DRAWS[draw](KEY, shape, whole(shape)), full)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("first", [2**32 - 3, 2**34 - 5, 2**34 - 7, 2**50 + 1])
def test_element_indices_beyond_32_bits(first):
    traced = torch.vmap(lambda k: R._draw("bits", k, (2**60,), (slice(first, first + 17),), WORDS, None))
    assert traced(KEY[None])[0].tolist() == words_at(KEY, range(first, first + 17))
    row = R._draw("bits", KEY, (2**60,), (slice(first, first + 17),), WORDS, None)
    assert row.tolist() == words_at(KEY, range(first, first + 17))
    shape, width = (2**40, 2**20 + 1), 2**20 + 1  # rows at every offset in a block, across 2^34 blocks
    top = (1 << 36) // width - 2
    box = (slice(top, top + 5), slice(4, 9))
    part = R._draw("bits", KEY, shape, box, WORDS, None)
    index = [r * width + c for r in range(top, top + 5) for c in range(4, 9)]
    assert part.flatten().tolist() == words_at(KEY, index)


def test_empty_and_0d_draws():
    assert R.normal(KEY, (0, 3)).shape == (0, 3)
    assert R.normal_box(KEY, (4, 3), (slice(4, 4), slice(0, 3))).shape == (0, 3)
    assert R.normal(KEY, ()).shape == ()
    assert R.normal(KEY, ()) == R.normal(KEY, (9,))[0]
    assert R.bernoulli(KEY, (2, 0)).dtype == torch.bool


# --- on a mesh


@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "b"), P("a", "b"), P(("a", "b")), P("b", "a")])
def test_each_rank_draws_its_part_of_the_global_draw(spec):
    def draw():
        return R.normal(KEY, (7, 10), spec=spec), R.bernoulli(KEY, (7, 10), p=0.3, spec=spec)

    normal, mask = fs.shard_map(draw, mesh=fs.make_mesh(a=2, b=3), in_specs=(), out_specs=(spec, spec))()
    assert torch.equal(fs.device_get(normal), R.normal(KEY, (7, 10)))
    assert torch.equal(fs.device_get(mask), R.bernoulli(KEY, (7, 10), p=0.3))


def test_a_sharded_draw_outside_shard_map_is_an_error():
    with pytest.raises(ShardingError, match=r"random.normal with spec=P\('a'\): called outside shard_map"):
        R.normal(KEY, (4,), spec=P("a"))
    with pytest.raises(ShardingError, match=r"random.bits: the mesh has no axis 'z'"):
        fs.shard_map(lambda: R.bits(KEY, (4,), spec=P("z")), mesh=fs.make_mesh(a=2), in_specs=(), out_specs=P("a"))()


# --- keys


def test_keys_are_int64_tensors_of_two_words():
    assert fs.key(2**64 - 2).tolist() == [M - 1, M]
    assert fs.key(7).dtype == torch.int64
    made = [KEY, *fs.split(KEY, 3), *(fs.fold_in(KEY, d) for d in (0, 1, -1, 2**32, "0", "1", "h.3.up"))]
    assert len({tuple(k.tolist()) for k in made}) == len(made)
    assert all(0 <= w <= M for k in made for w in k.tolist())
    assert torch.equal(fs.split(KEY, 100)[:3], fs.split(KEY, 3))  # small and large n are computed differently
    assert fs.split(KEY, 0).shape == (0, 2)
    for n in (5, -5, 2**40):
        assert torch.equal(fs.fold_in(KEY, n), fs.fold_in(KEY, torch.tensor(n)))


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: fs.key(-1), "key: cannot make a key of -1\n  needed  an int, 0 <= n < 2^64\n  fix: fs.key(0)"),
        (
            lambda: fs.key(2**64),
            f"key: cannot make a key of {2**64}\n  needed  an int, 0 <= n < 2^64\n  fix: fs.key(0)",
        ),
        (lambda: R.normal(3, (2,)), "normal: key must be a Tensor, got 3\n  fix: fs.key(0)"),
        (
            lambda: R.bits(torch.zeros(2), (2,)),
            "random.bits: not a key\n  got  f32[2]    needed  i64[2]\n  fix: fs.key(0)",
        ),
        (
            lambda: fs.split(fs.split(KEY, 3)),
            (
                "split: not a key\n  got  i64[3, 2]    needed  i64[2]\n"
                "  fix: pass one of these keys, keys[0], or map over them with torch.vmap"
            ),
        ),
        (lambda: fs.fold_in(KEY, 0.5), "fold_in: data must be an int, a str or a Tensor, got 0.5"),
        (
            lambda: fs.fold_in(KEY, torch.zeros(2)),
            (
                "fold_in: data of the wrong type\n"
                "  got  f32[2]    needed  a str, an int of 64 bits, i64[], i32[]\n  fix: fs.fold_in(key, step)"
            ),
        ),
        (
            lambda: R.trunc_normal(KEY, (2,), std=0.02, a=2.0, b=3.0),
            (
                "random.trunc_normal: [a, b] has almost no probability\n"
                "  mean  0.0    std  0.02    a  2.0    b  3.0\n"
                "  fix: std > 0 and a < b, which are values, not multiples of std"
            ),
        ),
        (
            lambda: R.uniform(KEY, (2,), low=1.0, high=1.0),
            "random.uniform: [low, high) is empty\n  low  1.0    high  1.0\n  fix: low < high",
        ),
        (
            lambda: R.randint(KEY, (2,), high=2**31 + 1),
            (
                "random.randint: the range is empty or too large\n"
                f"  low  0    high  {2**31 + 1}    needed  0 < high - low <= 2^31\n"
                "  fix: low < high; for more bits, random.bits"
            ),
        ),
        (
            lambda: R.bernoulli(KEY, (2,), p=1.5),
            "random.bernoulli: p is not a probability\n  p  1.5\n  fix: 0 <= p <= 1",
        ),
    ],
)
def test_error_texts(call, text):
    assert error_text(call) == text


@pytest.mark.gpu
@pytest.mark.parametrize("draw", DRAWS)
def test_on_cuda_any_box_equals_that_part_and_words_equal_those_of_the_cpu(draw):
    for shape in [(512, 640), (509, 1031)]:
        with torch.device("cuda"):
            full = DRAWS[draw](KEY, shape, whole(shape))
            for box in [(slice(1, 508), slice(0, shape[1])), (slice(0, 500), slice(3, 515))]:
                assert torch.equal(DRAWS[draw](KEY, shape, box), full[box])
        if not full.dtype.is_floating_point:
            assert torch.equal(full.cpu(), DRAWS[draw](KEY, shape, whole(shape)))


# --- vmap, fake tensors, compiled


def step(key, number):
    """Use a key in every way that a compiled step may, with boxes that start and end inside blocks."""
    key = fs.fold_in(fs.fold_in(key, "drop"), number)
    first, second = fs.split(key)
    box = (slice(1, 5), slice(3, 30), slice(2, 9))
    return (
        R.normal_box(first, (6, 37, 10), box),
        R.uniform_box(second, (6, 37, 10), box, dtype=torch.bfloat16),
        R.trunc_normal_box(first, (6, 37, 10), box, std=0.5, a=-1, b=1, dtype=torch.float16),
        R.bernoulli(second, (16, 33), p=0.9),
        R.randint(first, (50,), high=50257),
    )


def test_vmap_over_keys():
    keys = fs.split(KEY, 3)
    mapped = torch.vmap(lambda k: step(k, 7))(keys)
    for i, k in enumerate(keys):
        assert_same(step(k, 7), tuple(x[i] for x in mapped))
    wide = torch.tensor([-1, 1 << 40])  # only the low 32 bits of a key's words count
    assert_same([torch.vmap(fs.split)(wide[None])[0]], [fs.split(wide)])
    numbers = torch.arange(3)
    assert torch.equal(torch.vmap(lambda n: fs.fold_in(KEY, n))(numbers)[2], fs.fold_in(KEY, 2))


def test_fake_tensors():
    with FakeTensorMode():
        fake = step(KEY, 7)
    for x, y in zip(fake, step(KEY, 7), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


def test_check_computes_no_random_words(monkeypatch):
    def product(m, x):
        assert not isinstance(x, torch.Tensor)
        return (m * x) >> 32, m * x & 0xFFFFFFFF

    monkeypatch.setattr("fshard.random.philox._product", product)

    def draws(key, x):
        a, b = fs.split(key)
        mapped = torch.vmap(lambda k: fs.random.normal(k, (8,), spec=P("data")))(fs.split(a, 3))
        return mapped.sum(0) + fs.random.uniform(fs.fold_in(b, "u"), (8,), spec=P("data")) + x

    f = fs.shard_map(draws, mesh=fs.make_mesh(data=2), in_specs=(P(), P("data")), out_specs=P("data"))
    checked = fs.check(f, KEY, torch.zeros(8)).result
    assert (tuple(checked.shape), checked.dtype, checked.spec) == ((8,), torch.float32, P("data"))


@pytest.mark.slow
def test_compiled_draws_have_the_same_bits_and_compile_once():
    """A float and an integer draw, of keys in every way: the other distributions take the same words."""

    def two(key, number):
        first, second = fs.split(fs.fold_in(fs.fold_in(key, "drop"), number))
        box = (slice(1, 5), slice(3, 30), slice(2, 9))
        drawn = R.trunc_normal_box(first, (6, 37, 10), box, std=0.5, a=-1, b=1, dtype=torch.float16)
        return drawn, R.randint(second, (50,), high=50257)

    compiled = torch.compile(two, fullgraph=True, backend="aot_eager")
    assert_same(compiled(KEY, torch.tensor(3)), two(KEY, 3))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_same(compiled(fs.key(9), torch.tensor(4)), two(fs.key(9), 4))


# --- distributions


def test_bounds_hold_after_rounding():
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = R.uniform(KEY, (1 << 16,), dtype=dtype)
        assert x.min() >= 0
        assert x.max() < 1
        x = R.uniform(KEY, (1 << 14,), low=-0.3, high=0.7, dtype=dtype).double()
        assert -0.3 <= x.min() < -0.29
        assert 0.69 < x.max() < 0.7
        x = R.trunc_normal(KEY, (1 << 14,), a=-0.3, b=0.7, dtype=dtype).double()
        assert -0.3 <= x.min() < -0.29
        assert 0.69 < x.max() <= 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("x", [0.0, 1.0, -1.0, 0.3, -0.3, 1000.1, -7e-6, 3.5])
def test_round_down_returns_the_next_lower_value(x, dtype):
    down = R._round_down(x, dtype)
    assert down <= x
    near = torch.tensor(x, dtype=dtype).double().item()  # rounded to nearest: x itself or a neighbour of it
    assert torch.tensor(down, dtype=dtype).double().item() == down
    assert down == near or near > x
    assert x - down <= abs(x) * torch.finfo(dtype).eps + torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def test_extreme_words_give_finite_values_within_the_bounds(monkeypatch):
    extremes = torch.tensor([[0], [M], [1 << 31], [M - 1]])
    monkeypatch.setattr(R, "philox_in_place", lambda words, *_: words.copy_(extremes))
    x = R.normal(KEY, (4,), dtype=torch.float64)
    assert x[1] == -x[0]
    assert 6.33 < x[1] < 6.34
    assert abs(x[2]) < 1e-9
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert R.uniform(KEY, (4,), dtype=dtype)[1] == 1 - torch.finfo(dtype).eps / 2
        assert R.uniform(KEY, (4,), dtype=dtype)[0] == 0
    assert R.trunc_normal(KEY, (4,), a=-math.inf, b=math.inf).isfinite().all()
    assert R.randint(KEY, (4,), low=-5, high=2**31 - 5)[:2].tolist() == [-5, 2**31 - 6]
    assert R.bernoulli(KEY, (4,), p=1.0).all()
    assert not R.bernoulli(KEY, (4,), p=0.0).any()


def test_half_precision_draws_are_rounded_float32_draws():
    x = R.normal(KEY, (5000,), std=0.02)
    assert torch.equal(R.normal(KEY, (5000,), std=0.02, dtype=torch.bfloat16), x.bfloat16())
    assert torch.equal(R.normal(KEY, (5000,), std=0.02, dtype=torch.float16), x.half())


def cdf(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def test_distributions():
    n = 1 << 19
    lo, hi = (cdf(torch.tensor(x, dtype=torch.float64)) for x in (-1.0, 2.0))
    draws = [
        (R.normal(KEY, (n,), mean=3.0, std=0.5), lambda x: cdf((x - 3) / 0.5)),
        (R.uniform(KEY, (n,), low=-1.0, high=3.0), lambda x: (x + 1) / 4),
        (R.trunc_normal(KEY, (n,), a=-1.0, b=2.0), lambda x: (cdf(x) - lo) / (hi - lo)),
        (R.exponential(KEY, (n,)), lambda x: 1 - (-x).exp()),
        (R.gumbel(KEY, (n,)), lambda x: (-(-x).exp()).exp()),
    ]
    for values, distribution in draws:
        u = distribution(values.double().sort().values)
        # Kolmogorov-Smirnov: sqrt(n) D exceeds 1.95 once in a thousand. The key is fixed: no flicker.
        assert (u - (torch.arange(n) + 0.5) / n).abs().max() * math.sqrt(n) < 1.95
    x = R.normal(KEY, (n,))
    # 4 standard errors: of a mean 1 / sqrt(n), of a variance sqrt(2 / n), of a fourth moment sqrt(96 / n).
    assert abs(x.mean()) < 4 / math.sqrt(n)
    assert abs(x.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96 / n)
    # Of a share p it is sqrt(p (1 - p) / n).
    assert abs(R.bernoulli(KEY, (n,), p=0.1).double().mean() - 0.1) < 4 * math.sqrt(0.09 / n)
    # A chi-squared of 9 degrees has mean 9 and a standard deviation of sqrt(18).
    counts = R.randint(KEY, (n,), low=5, high=15).sub(5).bincount(minlength=10).double()
    assert len(counts) == 10
    assert ((counts - n / 10) ** 2 / (n / 10)).sum() < 9 + 4 * math.sqrt(18)


def test_categorical_draws_by_the_probabilities_of_its_logits():
    n, p = 1 << 16, torch.tensor([0.1, 0.2, 0.0, 0.7])
    counts = R.categorical(KEY, p.log().expand(n, 4)).bincount(minlength=4)
    assert counts[2] == 0
    assert ((counts / n - p).abs() < 4 * (p * (1 - p) / n).sqrt() + 1e-9).all()
    assert torch.equal(R.categorical(KEY, p.log()[:, None].expand(4, 3), dim=0), R.categorical(
        KEY, p.log()[:, None].expand(4, 3), dim=-2))  # fmt: skip


@pytest.mark.parametrize("rows", [8, 7])  # 7 over 4: uneven parts
def test_categorical_and_permutation_are_the_same_on_every_mesh(rows):
    logits = R.normal(KEY, (rows, 5), std=3.0)

    @fs.shard_map(mesh=fs.make_mesh(a=4), in_specs=P("a"), out_specs=(P("a"), P()))
    def draw(x):
        drawn = fs.random.categorical(KEY, x, spec=P("a"), shape=fs.global_shape(x, P("a")))
        return drawn, fs.random.permutation(KEY, rows)

    drawn, order = fs.device_get(draw(logits))
    assert torch.equal(drawn, fs.random.categorical(KEY, logits))
    assert torch.equal(order, fs.random.permutation(KEY, rows))
    assert sorted(order.tolist()) == list(range(rows))
    assert torch.equal(fs.random.permutation(KEY, logits), logits[order])
    assert torch.equal(fs.random.permutation(KEY, logits.T, dim=1), logits.T[:, order])
    assert fs.random.permutation(KEY, 0).tolist() == []
    with pytest.raises(MemoryError, match="EiB"):  # at once: nothing looks at each position
        fs.random.permutation(KEY, 10**18)


def test_error_texts_of_categorical():
    draw = fs.shard_map(lambda x: fs.random.categorical(KEY, x), mesh=fs.make_mesh(a=2), in_specs=P("a"),
                        out_specs=P("a"))  # fmt: skip
    assert error_text(draw, torch.zeros(4, 3)) == (
        "random.categorical: the logits vary over 'a', which spec=P() does not name\n"
        "  all ranks would draw the same numbers for different rows\n"
        "  fix: spec=P('a'), shape=fs.global_shape(logits, spec), if 'a' splits the rows; or logits = "
        'fs.all_gather(logits, "a", -1, to="invariant"), if it splits dim -1, which is drawn'
    )
    assert error_text(fs.random.categorical, KEY, torch.zeros(4, 3), spec=P(None, "a")) == (
        "random.categorical: spec=P(None, 'a') splits dim -1, whose indices are drawn\n"
        '  fix: logits = fs.all_gather(logits, "a", -1, to="invariant")'
    )
    gathered = fs.shard_map(lambda x: fs.random.categorical(KEY, fs.all_gather(x, "a", 1)), mesh=fs.make_mesh(a=2),
                            in_specs=P(None, "a"), out_specs=P())  # fmt: skip
    assert error_text(gathered, torch.zeros(4, 4)).endswith('fix: to="invariant" in the all_gather of the logits')
    assert "without the global shape" in error_text(fs.random.categorical, KEY, torch.zeros(4, 3), spec=P("a"))
    assert "one of their dims" in error_text(fs.random.categorical, KEY, torch.zeros(4), dim=1)
    assert "x=-1" in error_text(fs.random.permutation, KEY, -1)
    assert "one of its dims" in error_text(fs.random.permutation, KEY, torch.zeros(4), dim=1)


def test_draws_of_different_keys_are_independent():
    n = 1 << 16
    keys = [KEY, fs.key(1), fs.key(1 << 32), *fs.split(KEY)]
    keys += [fs.fold_in(KEY, data) for data in (0, 1, 2, 3, "a")]
    x = torch.stack([R.normal(k, (n,)) for k in keys])
    x = torch.cat([x, x[:1].roll(1, 1), x[:1].roll(2, 1), x[:1].roll(4, 1)])  # and neighbours within one
    # A correlation of independent values is N(0, 1 / n); 78 pairs, 4.5 standard errors.
    off = torch.corrcoef(x) - torch.eye(len(x))
    assert off.abs().max() < 4.5 / math.sqrt(n)
    assert torch.corrcoef(x.abs()).sub(torch.eye(len(x))).abs().max() < 4.5 / math.sqrt(n)
    # Each of the 32 bits is one half the time: its share is N(1/2, 1/4n).
    shares = torch.stack([(R.bits(KEY, (n,)) >> b & 1).double().mean() for b in range(32)])
    assert (shares - 0.5).abs().max() < 4 * 0.5 / math.sqrt(n)


# --- golden values: when one changes, R.VERSION must too. Floats are float64 results rounded to 24 bits or
# fewer, so another build's last bit of erfinv does not show.

GOLDEN = {
    "normal": (R.normal_box, {}, "0x1.f577c6p+0 -0x1.430d3p-5 0x1.fdaadep-2"),
    "normal_bf16": (R.normal_box, {"std": 0.02, "dtype": torch.bfloat16}, "0x1.4p-5 -0x1.9ep-11 0x1.46p-7"),
    "uniform": (R.uniform_box, {"low": -1.0, "high": 2.0}, "0x1.ecc016p+0 0x1.cfaed4p-2 0x1.126d4ap+0"),
    "exponential": (
        lambda key, shape, box: R.exponential(key, shape)[box], {}, "0x1.9fe4bep-6 0x1.73417cp-1 0x1.7afd7ap-2",
    ),
    "gumbel": (
        lambda key, shape, box: R.gumbel(key, shape)[box], {}, "0x1.d6398cp+1 0x1.4925dp-2 0x1.fce88ap-1",
    ),
    "uniform_bf16": (R.uniform_box, {"dtype": torch.bfloat16}, "0x1.f4p-1 0x1.fp-2 0x1.62p-1"),
    "trunc_normal": (R.trunc_normal_box, {}, "0x1.ad90ep+0 -0x1.345872p-5 0x1.e49d64p-2"),
    "trunc_normal_bf16": (
        R.trunc_normal_box, {"std": 0.02, "a": -0.04, "b": 0.04, "dtype": torch.bfloat16},
        "0x1.12p-5 -0x1.8ap-11 0x1.36p-7",
    ),
}  # fmt: skip


def test_layout_version():
    assert R.VERSION == 1


@pytest.mark.parametrize("draw", GOLDEN)
def test_golden_floats(draw):
    function, params, values = GOLDEN[draw]
    key = fs.fold_in(fs.key(42), "golden")
    assert function(key, (9,), (slice(3, 6),), **params).tolist() == [float.fromhex(x) for x in values.split()]


def test_golden_integers():
    key = fs.fold_in(fs.key(42), "golden")
    words = [444352993, 3741740897, 1348980441, 4187315405, 2079931490, 2966362281]
    assert R.bits(key, (6,)).tolist() == words
    assert R.bernoulli(key, (6,), p=0.4).tolist() == [True, False, True, False, False, False]
    assert R.randint(key, (6,), high=1000).tolist() == [103, 871, 314, 974, 484, 690]


def test_golden_keys():
    assert fs.fold_in(KEY, 0).tolist() == [768504805, 323543615]
    assert fs.fold_in(KEY, "h.3.up").tolist() == [653087669, 2847397680]
    assert fs.fold_in(fs.key(2**40 + 3), -1).tolist() == [1260802874, 3272340998]
    assert fs.split(KEY).tolist() == [[3710895380, 2918555867], [3130575500, 1684424915]]
