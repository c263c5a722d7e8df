"""Tables of pipeline schedules: their order is possible, their bubble and memory are those of the formulas."""

from __future__ import annotations

import itertools

import pytest

import fshard as fs
from tests.lib.assertions import error_text

KINDS = [("gpipe", 1), ("gpipe", 2), ("1f1b", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 3),
         ("zero_bubble", 1)]  # fmt: skip


@pytest.mark.parametrize(("kind", "v"), KINDS)
def test_each_stage_computes_each_microbatch_once_and_in_a_possible_order(kind, v):
    for n in range(1, 6):
        for m in range(1, 13):
            table = fs.schedule_table(kind, n, m, v)
            backward = "DW" if kind == "zero_bubble" else "B"
            every = {(k, i, c) for k in f"F{backward}" for i in range(m) for c in range(v)}
            assert all(len(order) == len(every) and set(order) == every for order in table.orders)
            rows = table.times(1, 2, 3)  # raises if stages wait for each other
            ends = {(op.kind.replace("D", "B"), op.microbatch, op.chunk * n + s): end
                    for s, row in enumerate(rows) for _, end, op in row}  # fmt: skip
            for s, row in enumerate(rows):
                assert all(a.end <= b.start for a, b in itertools.pairwise(row))
                for start, end, op in row:
                    place, final = op.chunk * n + s, n * v - 1
                    assert end - start == {"F": 1, "B": 5, "D": 2, "W": 3}[op.kind]
                    needs = {"F": ("F", place - 1), "W": ("B", place)}.get(op.kind, ("B", place + 1))
                    needs = ("F", place) if op.kind in "BD" and place == final else needs
                    assert needs[1] < 0 or ends[needs[0], op.microbatch, needs[1]] <= start


def test_the_last_stages_gradients_come_in_the_order_of_the_microbatches():
    """`pipelined` adds losses in this order, as `accumulate` does."""
    for kind, v in KINDS:
        forward = [
            op.microbatch for op in fs.schedule_table(kind, 3, 7, v).orders[-1] if op[0] == "F" and op[2] == v - 1
        ]
        assert forward == list(range(7))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_kept_activations_are_the_formulas(n):
    for m in range(1, 25):
        assert fs.schedule_table("gpipe", n, m).in_flight == (m,) * n
        assert fs.schedule_table("1f1b", n, m).in_flight == tuple(min(m, n - s) for s in range(n))
        assert fs.schedule_table("zero_bubble", n, m).in_flight == (min(m, n),) * n
        for v in (2, 3) if m % n == 0 else ():
            want = tuple(min(m * v, (v - 1) * n + 2 * (n - s - 1) + 1) for s in range(n))
            assert fs.schedule_table("interleaved", n, m, v).in_flight == want


@pytest.mark.parametrize("n", [1, 2, 3, 4, 6])
def test_bubbles_are_the_formulas(n):
    for m in range(n, 25):
        each = 3 * (n - 1)
        for kind in ("gpipe", "1f1b", "interleaved"):
            assert fs.schedule_table(kind, n, m).bubble() == pytest.approx(each / (3 * m + each))
        assert fs.schedule_table("zero_bubble", n, m).bubble() == pytest.approx((n - 1) / (3 * m + n - 1))
        for v in (2, 3) if m % n == 0 else ():
            assert fs.schedule_table("interleaved", n, m, v).bubble() == pytest.approx(each / (3 * m * v + each))


def test_bubbles_of_four_stages_and_sixteen_microbatches_are_the_published_ones():
    bubble = lambda kind, v=1: round(fs.schedule_table(kind, 4, 16, v).bubble(), 3)  # noqa: E731
    assert [bubble("1f1b"), bubble("interleaved", 2), bubble("interleaved", 4)] == [0.158, 0.086, 0.045]
    assert bubble("zero_bubble") == 0.059  # ZB-H1, and its memory: four microbatches
    assert fs.schedule_table("zero_bubble", 4, 16).in_flight == (4, 4, 4, 4)
    slow_weights = fs.schedule_table("zero_bubble", 4, 16).bubble(f=1, b=1, w=2)
    assert slow_weights < fs.schedule_table("1f1b", 4, 16).bubble(f=1, b=1, w=2)


def test_an_interleaved_schedule_of_any_number_of_microbatches_keeps_no_more_than_the_next_multiple():
    for n, m, v in [(4, 5, 3), (3, 1, 2), (4, 13, 2)]:
        more = fs.schedule_table("interleaved", n, -(-m // n) * n, v).in_flight
        assert all(a <= b for a, b in zip(fs.schedule_table("interleaved", n, m, v).in_flight, more, strict=True))


def test_the_repr_is_a_picture():
    assert (
        repr(fs.schedule_table("zero_bubble", 3, 4))
        == """\
zero_bubble: 3 stages, microbatches 0 to 3
  stage 0  F0 F1 F2 .  .  D0 W0 F3 D1 W1 D2 W2 D3 W3
  stage 1  .  F0 F1 .  D0 F2 D1 W0 F3 D2 W1 D3 W2 W3
  stage 2  .  .  F0 D0 F1 D1 F2 D2 W0 F3 D3 W1 W2 W3
  stages wait 14.3% of the time
  microbatches whose activations a stage keeps: 3, 3, 3"""
    )
    assert (
        repr(fs.schedule_table("interleaved", 2, 2, 2))
        == """\
interleaved: 2 stages, microbatches 0 to 1, 2 chunks in each stage
  stage 0  F0a F1a F0b F1b .   .   B0b B0b .   B1b B1b B0a B0a B1a B1a
  stage 1  .   F0a F1a F0b B0b B0b F1b B1b B1b B0a B0a B1a B1a .   .
  stages wait 20.0% of the time
  chunks whose activations a stage keeps: 4, 3"""
    )
    assert all(len(line) <= 122 for line in repr(fs.schedule_table("1f1b", 4, 64)).splitlines())


def test_wrong_arguments_of_a_table_are_named():
    assert error_text(fs.schedule_table, "1f1b", 2, 0) == "schedule_table: n=2, m=0, chunks=1\n  fix: 1 or more of each"
    text = error_text(fs.schedule_table, "1f1b", 2, 4, 2)
    assert text == "schedule_table: chunks=2, and a stage of '1f1b' has one\n  fix: \"interleaved\""
    assert "'1f1b'" in error_text(fs.schedule_table, "1f1", 2, 4)
