"""Digests of different tensors differ, and errors name the ranks whose replicas differ."""

from __future__ import annotations

import hashlib
import itertools
import struct
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard._core.compare import check_replicas
from fshard._core.compare.digest import digest
from tests.lib.assertions import error_text
from tests.lib.operations import Operations
from tests.lib.processes import Pool

CHUNK = 1 << 15  # words of 4 bytes
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.complex64, torch.complex128,
]  # fmt: skip


def words(x: Tensor) -> tuple[int, int]:
    first, second = digest(x).tolist()
    return first, second


def from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    return bits % 2 == 1 if dtype == torch.bool else bits.view(dtype)


def noise(n: int, dtype: torch.dtype) -> Tensor:
    """Return `n` elements of random bits: NaN, infinities and denormals among them."""
    size = n if dtype == torch.bool else n * dtype.itemsize
    bits = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(n))
    return from_bits(bits, dtype)


# --- equal tensors ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digests_of_bitwise_equal_tensors_are_equal_for_any_strides(dtype):
    for n, m in ((3, 5), (1, 1), (0, 4), (257, 1031)):
        whole = noise(n * m, dtype).view(n, m)
        want = words(whole)
        column_major = whole.T.contiguous().T
        padded = torch.zeros(n + 2, 2 * m + 1, dtype=dtype)
        padded[1:-1, 1::2] = whole
        shifted = torch.cat([whole.new_zeros(1), whole.flatten()])[1:].view(n, m)
        for same in (whole.clone(), column_major, padded[1:-1, 1::2], shifted):
            assert words(same) == want
    row = noise(3, dtype)
    assert words(row.expand(5, 3)) == words(row.expand(5, 3).clone())
    cube = noise(24 * 4001, dtype).view(2, 3, 4, 4001)
    assert words(cube.permute(3, 1, 0, 2)) == words(cube.permute(3, 1, 0, 2).contiguous())


def test_digest_of_lazy_conjugate_is_that_of_its_values():
    x = noise(40, torch.complex64)
    assert x.conj().is_conj()
    assert words(x.conj()) == words(x.conj().resolve_conj()) != words(x)
    imaginary = x.conj().imag
    assert imaginary.is_neg()
    assert words(imaginary) == words(imaginary.resolve_neg())


def test_digest_is_the_documented_sums():
    """Computed with Python's integers, which do not overflow: torch's sums must wrap, not saturate."""
    x = noise(3 * CHUNK + 7, torch.uint8)
    x = torch.cat([x, noise(4 * CHUNK, torch.uint8)])
    got = words(x)

    def sums(raw: bytes, level: int) -> list[int]:
        a, b = np.random.Philox(key=level).random_raw(2 * CHUNK).astype(object).reshape(2, -1)
        raw += bytes(-len(raw) % 4)
        v = np.frombuffer(raw, "<i4").astype(object)
        return [int(s) for at in range(0, len(v), CHUNK) for part in [v[at : at + CHUNK]]
                for s in ((a[: len(part)] * part).sum(), (b[: len(part)] * part).sum())]  # fmt: skip

    first = sums(x.numpy().tobytes(), 0)
    assert len(first) == 4
    last = sums(b"".join(struct.pack("<Q", s % 2**64) for s in first), 1)
    label = struct.unpack("<2q", hashlib.blake2b(f"torch.uint8 [{len(x)}]".encode(), digest_size=16).digest())
    assert [g % 2**64 for g in got] == [(s + t) % 2**64 for s, t in zip(last, label, strict=True)]


def test_digest_allocates_at_most_one_chunk():
    x = torch.zeros(600, 600)
    for view in (x, x.T, x[:, 1:], x.view(torch.complex64).conj()):
        with Operations() as seen:
            digest(view)
        assert 0 < seen.largest <= 1 << 20


# --- different tensors --------------------------------------------------------------------------------------


def digests_differ(*tensors: Tensor) -> bool:
    """Return whether each of the two words alone differs between all tensors."""
    first, second = zip(*map(words, tensors), strict=True)
    return len(set(first)) == len(set(second)) == len(tensors)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_digest_depends_on_every_bit(dtype):
    for n in (1, 3, 2 * CHUNK + 3):
        x = noise(n, dtype)
        size = n if dtype == torch.bool else n * dtype.itemsize
        flipped = []
        for at in {0, 1, size // 2, size - 1} & set(range(size)):
            for bit in range(1 if dtype == torch.bool else 8):
                y = x.clone()
                raw = y.view(torch.uint8)
                raw[at] ^= 1 << bit
                flipped.append(y)
        assert digests_differ(x, *flipped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("n", [2, 64, 4 * CHUNK])
def test_digest_depends_on_flipped_signs(dtype, n):
    x = torch.ones(n, dtype=dtype)
    half = torch.cat([-x[: n // 2], x[n // 2 :]])
    alternating = torch.where(torch.arange(n) % 2 == 0, -x, x)
    zeros = torch.zeros(n, dtype=dtype)
    assert digests_differ(x, -x, -half) if n == 2 else digests_differ(x, -x, half, alternating)
    assert digests_differ(zeros, -zeros)


def test_digest_depends_on_order():
    x = noise(16 * CHUNK, torch.uint8)
    rows = x.view(4, -1)  # one chunk each
    assert digests_differ(
        x, x.flip(0), x.roll(1), x.roll(4), rows[[1, 0, 2, 3]].flatten(), rows[[0, 2, 1, 3]].flatten()
    )
    assert digests_differ(*(torch.tensor(p, dtype=torch.float32) for p in itertools.permutations(range(5))))


def test_digests_of_all_patterns_of_two_bits_differ():
    """Patterns of one or two set bits: weak weights would give equal sums."""
    bits = torch.zeros(16, dtype=torch.int64)
    patterns = [bits]
    for i, j in itertools.combinations_with_replacement(range(0, 1024, 13), 2):
        y = bits.clone()
        for k in {i, j}:
            y[k // 64] |= -(1 << 63) if k % 64 == 63 else 1 << (k % 64)
        patterns.append(y)
    assert len(patterns) > 3000
    assert digests_differ(*patterns)


def test_digest_depends_on_shape_and_dtype():
    x = torch.zeros(12)
    assert digests_differ(x, x.view(3, 4), x.view(4, 3), x.view(1, 12), x.view(torch.int32), x.view(torch.uint8),
                          x[:11], x.view(torch.bfloat16), torch.zeros(()), torch.zeros(1), torch.zeros(0),
                          torch.zeros(0, 2), torch.zeros(0, dtype=torch.bool), torch.zeros(2 * CHUNK),
                          torch.zeros(2 * CHUNK + 1))  # fmt: skip


def test_digest_depends_on_nan_payload_and_nan_equals_itself():
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert quiet.isnan()
    assert other.isnan()
    assert words(quiet) == words(quiet.clone())
    assert digests_differ(quiet, other)


# --- comparison ---------------------------------------------------------------------------------------------


def run(axes: dict[str, int], f: Any, specs: Any, kind: str = "simulated") -> Any:
    """Run `check_replicas` on the result of `f()` on each rank."""

    def checked() -> Tensor:
        check_replicas("step", f(), specs)
        return torch.zeros(())

    return fs.shard_map(checked, mesh=fs.make_mesh(kind=kind, **axes), in_specs=(), out_specs=P())()


def at(*axes: str) -> int:
    return int(fs.axis_index(axes))


CAUSE = (
    "  usual causes: a Python number that depends on the rank, a kernel that is not deterministic, a draw from "
    "torch's own generator\n"
)


def test_error_shows_scalars_by_rank():
    text = error_text(run, {"data": 4, "model": 2}, lambda: {"loss": torch.tensor(1.5 + at("data") % 2), "n": 3}, P())
    assert text == (
        "step: result['loss'] differs between ranks of 'data', over which its spec says it is one value\n"
        "  leaf  f32[]    spec  P()    mesh  data=4, model=2\n"
        "  data=0,2: 1.5    data=1,3: 2.5    (at model=0)\n" + CAUSE +
        "  fix: psum or pmean it, draw with fs.random and a key, or name 'data' in its out spec"
    )  # fmt: skip


def test_error_names_every_axis_and_the_coordinates_of_the_difference():
    def f() -> Any:
        return {"a": torch.ones(3), "w": [torch.ones(2, 4), torch.ones(2, 4) * (at("data", "model") == 5)]}

    text = error_text(run, {"data": 2, "model": 4}, f, {"a": P(), "w": P()})
    same, other = (f"{words(torch.ones(2, 4) * k)[0] & 0xFFFFFFFF:08x}" for k in (0, 1))
    assert text == (
        "step: result['w'][1] differs between ranks of 'data' and 'model', over which its spec says it is one value\n"
        "  leaf  f32[2, 4]    spec  P()    mesh  data=2, model=4\n"
        f"  data=0: digest {same}    data=1: digest {other}    (at model=1)\n"
        f"  model=0,2,3: digest {same}    model=1: digest {other}    (at data=1)\n" + CAUSE +
        "  fix: psum or pmean it, draw with fs.random and a key, or name 'data' and 'model' in its out spec"
    )  # fmt: skip


def test_values_may_differ_over_axes_in_the_spec():
    parts = lambda: torch.tensor([float(at("model"))])  # noqa: E731
    run({"data": 2, "model": 3}, parts, P("model"))
    run({"data": 2, "model": 3}, lambda: (parts(), torch.ones(2)), (P("model"), P()))
    assert "ranks of 'model', over" in error_text(run, {"data": 2, "model": 3}, parts, P("data"))
    assert "ranks of 'data', over" in error_text(
        run, {"data": 2, "model": 3}, lambda: torch.tensor([at("data")]), P("model")
    )
    three = {"a": 2, "b": 2, "c": 2}
    text = error_text(run, three, lambda: torch.tensor(at("b") * at("c")), P())
    assert "'b' and 'c'" in text
    assert "b=0: 0    b=1: 1    (at a=0, c=1)" in text
    assert "c=0: 0    c=1: 1    (at a=0, b=1)" in text


def test_error_lists_other_leaves_and_truncates_long_lists():
    text = error_text(run, {"data": 10}, lambda: [torch.tensor(at("data") % 7)] * 8, P())
    assert "result[0] differs" in text
    assert "  data=0,7: 0    data=1,8: 1    data=2,9: 2    data=3: 3    data=4: 4    data=5: 5    and 1 more\n" in text
    assert "so do result[1], result[2], result[3], result[4], and 3 more\n" in text
    text = error_text(run, {"data": 10}, lambda: (torch.tensor(at("data") == 9), torch.tensor(at("data"))), P())
    assert "data=0,1,2,3,4,5,6,7, and 1 more: False    data=9: True" in text
    assert "so does result[1]\n" in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (lambda i: torch.tensor(1.5 + i * 2**-52, dtype=torch.float64), "data=0: 1.5    data=1: 1.5000000000000002"),
        (lambda i: torch.tensor(-0.0 if i else 0.0), "data=0: 0    data=1: -0"),
        (lambda i: torch.tensor((2**62, 2**62 + 1)[i]), "data=0: 4611686018427387904    data=1: 4611686018427387905"),
        (lambda i: torch.tensor(1.0 + i, dtype=torch.bfloat16), "data=0: 1    data=1: 2"),
        (lambda i: torch.tensor(bool(i)), "data=0: False    data=1: True"),
        (lambda i: torch.tensor(1j + i), "data=0: digest 4f9afb18    data=1: digest "),
        (lambda i: torch.tensor(1.0, dtype=(torch.float32, torch.float64)[i]), "data=0: digest "),
    ],
)  # fmt: skip
def test_error_shows_values_with_enough_digits_to_differ(value, shown):
    assert shown in error_text(run, {"data": 2}, lambda: value(at("data")), P())


def test_check_replicas_costs_one_all_gather_of_24_bytes_per_leaf():
    def f() -> Any:
        b = [torch.ones(()), torch.ones(3)]
        return {"a": torch.ones(100, 100), "b": b, "none": None, "n": 1, "s": torch.ones(2)}

    specs = {"a": P(), "b": P("data"), "none": P(), "n": P(), "s": P(("data", "model"))}
    with fs.recording() as log:
        run({"data": 2, "model": 2, "one": 1}, f, {**specs, "b": [P(), P("data")]})
    assert [(t.op, t.axes, t.bytes) for t in log] == [("all_gather", ("data", "model"), 3 * 3 * 8)] * 4
    for axes, out, spec in (({"one": 1}, f, P()), ({"data": 2}, f, P("data")), ({"data": 2}, lambda: {"n": 1}, P())):
        with fs.recording() as log:
            run(axes, out, spec)
        assert log == []


def on_ranks() -> str:
    run({"data": 2, "model": 2}, lambda: {"w": torch.ones(5, 2), "x": torch.ones(2) * at("model")},
        {"w": P(), "x": P("model")}, "process")  # fmt: skip
    return error_text(run, {"model": 2, "data": 2}, rank_dependent_results, {"w": P(), "x": P("model")}, "process")


def rank_dependent_results() -> Any:
    return {"w": torch.ones(5, 2) + at("data"), "x": torch.ones(2) * at("model")}


@pytest.mark.process
def test_every_process_raises_the_same_error(ranks: Pool) -> None:
    want = error_text(run, {"model": 2, "data": 2}, rank_dependent_results, {"w": P(), "x": P("model")})
    assert "result['w'] differs between ranks of 'data'" in want
    assert ranks(4, on_ranks) == [want] * 4
