"""Patterns locate every box of a leaf in the file, by exact runs, for any grouping and order of the dims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fshard.interop.hf.pattern import Pattern, identity
from fshard.interop.hf.places import Places
from fshard.spec import Box, box_shape, full_box
from tests.lib.assertions import error_text


def read_box(pattern: Pattern, in_file: Tensor, shape: tuple[int, ...], box: Box, max_elements: int) -> Tensor:
    """Read a box by the runs of its chunks, and check that these are exact."""
    out = torch.full(box_shape(box), -1)
    flat, read = in_file.flatten(), []
    for inside, places in pattern.places(shape).boxes(box):
        before = -1
        for target, offsets, run in places.chunks(out[inside], max_elements):
            assert 0 < target.numel() <= max_elements or target.numel() == 1
            assert target.numel() == len(offsets) * run
            assert offsets[0] > before  # in the order of the file
            assert all(b > a + run for a, b in itertools.pairwise(offsets))  # adjacent runs are one
            before = offsets[-1] + run - 1
            target.copy_(torch.cat([flat[s : s + run] for s in offsets]).view(target.shape))
            read += [i for s in offsets for i in range(s, s + run)]
    assert sorted(read) == sorted(out.flatten().tolist())  # each element is its own offset: each is read once
    return out


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).view(shape)


Case = tuple[str, dict[str, int], tuple[int, ...], Box, Tensor, int]


@st.composite
def cases(draw: Any) -> Case:
    """A pattern, a box of a leaf, the leaf by plain torch, and the size of a chunk."""
    names = list("abcde"[: draw(st.integers(0, 5))])
    sizes = {n: draw(st.integers(1, 4)) for n in names}
    left = draw(st.permutations(names))
    at = {n: draw(st.integers(0, sizes[n] - 1)) for n in names if draw(st.integers(0, 4)) == 0}
    right = draw(st.permutations([n for n in names if n not in at]))

    def grouped(order: list[str]) -> list[list[str]]:
        groups: list[list[str]] = []
        for n in order:
            if groups and draw(st.booleans()):
                groups[-1].append(n)
            else:
                groups.append([n])
        return groups

    def side(groups: list[list[str]], known: set[str]) -> str:
        word = lambda n: f"{n}={sizes[n]}" if n in known else n  # noqa: E731
        return " ".join(word(g[0]) if len(g) == 1 else f"({' '.join(map(word, g))})" for g in groups)

    file_groups, leaf_groups = grouped(left), grouped(right)
    known = set(at) | {n for g in leaf_groups for n in g[1:]}
    text = f"{side(file_groups, known)} -> {side(leaf_groups, set())}"
    x = numbered(tuple(sizes[n] for n in left))
    index = tuple(at[n] if n in at else slice(None) for n in left)
    kept = [n for n in left if n not in at]
    x = x[index].permute([kept.index(n) for n in right]).reshape([math.prod(sizes[n] for n in g) for g in leaf_groups])
    box = []
    for n in x.shape:
        start = draw(st.integers(0, n))
        box.append(slice(start, draw(st.integers(start, n))))
    return text, at, tuple(x.shape), tuple(box), x, draw(st.integers(1, 30))


@settings(max_examples=120)
@given(cases())
def test_every_box_equals_slicing_by_plain_torch(case: Case) -> None:
    text, at, shape, box, want, max_elements = case
    pattern = Pattern(text, at)
    in_file = numbered(pattern.file_shape(shape))
    assert torch.equal(read_box(pattern, in_file, shape, box, max_elements), want[box])


KNOWN: dict[str, tuple[str, Mapping[str, int] | None, tuple[int, ...], Any]] = {
    "linear": ("o i -> i o", None, (3, 5), lambda x: x.T),
    "gpt2": ("d (c h k) -> d c h k", None, (6, 3, 2, 4), lambda x: x.view(6, 3, 2, 4)),
    "llama": ("(v g k) d -> d v g k", None, (6, 2, 3, 4), lambda x: x.view(2, 3, 4, 6).permute(3, 0, 1, 2)),
    "neox": ("(h c k) d -> d c h k", None, (6, 3, 2, 4), lambda x: x.view(2, 3, 4, 6).permute(3, 1, 0, 2)),
    "gate": ("(two=2 f) d -> d f", {"two": 0}, (5, 4), lambda x: x[:4].T),
    "up": ("(two=2 f) d -> d f", {"two": 1}, (5, 4), lambda x: x[4:].T),
    "convolution": ("d 1 k -> k d", None, (4, 7), lambda x: x[:, 0].T),
    "joined in the leaf": (
        "(h k) d -> d (k h=2)",
        None,
        (3, 8),
        lambda x: x.view(2, 4, 3).permute(2, 1, 0).reshape(3, 8),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_layouts_of_known_models(name: str) -> None:
    text, at, shape, by_hand = KNOWN[name]
    pattern = Pattern(text, at)
    in_file = numbered(pattern.file_shape(shape))
    assert torch.equal(read_box(pattern, in_file, shape, full_box(shape), 1 << 20), by_hand(in_file))


def chunks_of(places: Places, box: Box, max_elements: int) -> list[tuple[tuple[int, ...], list[int], int]]:
    """Return the shape, the offsets and the length of runs of each chunk of a box that is one part."""
    ((inside, part),) = places.boxes(box)
    x = torch.empty(box_shape(box), device="meta")[inside]
    return [(tuple(chunk.shape), offsets, run) for chunk, offsets, run in part.chunks(x, max_elements)]


def test_contiguous_elements_are_one_run() -> None:
    heads = Pattern("(h c k) d -> d c h k").places((8, 3, 4, 5))
    box = (slice(0, 8), slice(0, 3), slice(2, 4), slice(0, 5))
    assert chunks_of(heads, box, 10**6) == [((2, 3, 5, 8), [240], 240)]
    inner = (slice(1, 3), slice(1, 3), slice(0, 6))
    assert chunks_of(identity(3).places((4, 5, 6)), inner, 10**6) == [((2, 2, 6), [36, 66], 12)]
    assert [offsets for _, offsets, _ in chunks_of(identity(1).places((10,)), (slice(2, 9),), 3)] == [[2], [5], [8]]


def test_chunk_of_short_runs_has_a_limited_number_of_them() -> None:
    column = (slice(0, 200_000), slice(0, 1))
    chunks = chunks_of(identity(2).places((200_000, 2)), column, 1 << 22)
    assert max(len(offsets) for _, offsets, _ in chunks) == 1 << 16


def test_leaf_without_dims_and_empty_box() -> None:
    assert chunks_of(identity(0).places(()), (), 8) == [((), [0], 1)]
    assert identity(2).places((3, 0)).boxes(full_box((3, 0))) == []
    assert Pattern("(h k) d -> d h k").file_shape((0, 2, 3)) == (6, 0)


WRONG = {
    "a b": "no '->'\n  a b\n     ^",
    "a -> a -> a": "one '->' separates the two sides, outside parentheses\n  a -> a -> a\n         ^",
    "(a b -> a b": "one '->' separates the two sides, outside parentheses\n  (a b -> a b\n       ^",
    "a -> (a": "a parenthesis is not closed\n  a -> (a\n         ^",
    "a) -> a": "no parenthesis is open here\n  a) -> a\n   ^",
    "a (b (c)) -> a b c": "parentheses do not nest\n  a (b (c)) -> a b c\n       ^",
    "a a -> a": "'a' appears twice on one side\n  a a -> a\n    ^",
    "(a a) -> a": "'a' appears twice on one side\n  (a a) -> a\n     ^",
    "a -> b": "'b' is not on the left\n  a -> b\n       ^",
    "a -> 1 a": "a 1 may be on the left only\n  a -> 1 a\n       ^",
    "a * -> a": "neither a name, a parenthesis nor '->'\n  a * -> a\n    ^",
    "a=2x -> a": "neither a name, a parenthesis nor '->'\n  a=2x -> a\n   ^",
    "a=2 -> a=3": "'a' has two sizes, 2 and 3\n  a=2 -> a=3\n         ^",
}


@pytest.mark.parametrize("text", WRONG)
def test_syntax_error_marks_its_position(text: str) -> None:
    assert (
        error_text(Pattern, text) == f'Pattern: {WRONG[text]}\n  fix: e.g. "(h three k) d -> d three h k", file -> leaf'
    )


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("(two=2 f) -> f", None,
         "'two' is not on the right\n  {}\n  fix: say which part the leaf is: at={'two': 0}"),
        ("(two f) -> f", {"two": 0}, "the size of 'two' is not known\n  {}\n  fix: write it after the name: two=2"),
        ("(two=2 f) -> f", {"two": 2}, "two=2 is outside its size, 2\n  {}\n  fix: an index of 0 to 1"),
        ("f -> f", {"f": 0}, "at={'f': 0} selects nothing\n  {}\n  fix: at= names a dim of the left side alone"),
        ("f -> f", {"g": 0}, "at={'g': 0} selects nothing\n  {}\n  fix: at= names a dim of the left side alone"),
        ("h k -> (h k)", None,
         "the sizes in (h k) are not known\n  {}\n  fix: write all but one after their names: h=4"),
    ],
)  # fmt: skip
def test_error_names_the_size_or_index_that_is_missing(text: str, at: dict[str, int] | None, message: str) -> None:
    assert error_text(Pattern, text, at) == "Pattern: " + message.replace("{}", text)


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("a b -> b a", (3,),
         "[3] has 1 dims, the right side has 2\n  {}\n  fix: one name, or one (group), for each dim of the leaf"),
        ("(h=4 k) -> (h k)", (6,), "[6] does not fit (h k)\n  {}\n  fix: other sizes: 6 % 4 = 2"),
        ("h=4 -> h", (6,), "[6] does not fit (h)\n  {}\n  fix: other sizes: 4 != 6"),
    ],
)  # fmt: skip
def test_error_of_unfitting_shape_shows_the_arithmetic(text: str, shape: tuple[int, ...], message: str) -> None:
    assert error_text(Pattern(text).file_shape, shape) == "Pattern: " + message.replace("{}", text)
