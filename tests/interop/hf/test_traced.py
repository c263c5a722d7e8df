"""Traced tensors know the place of every element after the operations that a conversion may have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fshard.interop.hf import export
from fshard.interop.hf.places import FilePart, Places
from fshard.interop.hf.traced import Traced, trace
from fshard.interop.hf.weights import rest_error
from fshard.spec import full_box
from tests.lib.assertions import error_text

A, B = (4, 6), (2, 6)


def values(x: Traced, files: Mapping[str, Tensor]) -> Tensor:
    """Return the values of a traced tensor, read by the chunks of its parts from the tensors in files."""
    out = torch.full(x.shape, -1)
    for part in x.parts:
        assert part.shape == files[part.name].shape
        box = out[part.box]
        assert bool((box == -1).all())  # no element is in two parts
        for inside, places in part.places.boxes(full_box(box.shape)):
            flat = files[part.name].flatten()
            for chunk, offsets, run in places.chunks(box[inside], 1 << 20):
                chunk.copy_(torch.cat([flat[i : i + run] for i in offsets]).view(chunk.shape))
    return out


def numbered(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    starts = iter(range(0, 10**6, 10**4))
    return {name: next(starts) + torch.arange(math.prod(shape)).view(shape) for name, shape in shapes.items()}


def interleave(x: Tensor, dim: int) -> Tensor:
    split = [*x.shape[:dim], x.shape[dim] // 2, 2, *x.shape[dim + 1 :]]
    return x.reshape(split).transpose(dim, dim + 1).reshape(x.shape).contiguous()


CHAINS: dict[str, Callable[[Any, Any], Any]] = {
    "experts": lambda a, b: torch.cat([torch.stack([a, a.clone()]), torch.stack([b, b.detach()])], dim=1),
    "equal parts": lambda a, b: torch.cat([a, b], 0).chunk(3, dim=0)[1],
    "uneven parts": lambda a, b: torch.split(torch.cat([a, b], 0), [1, 3, 2], dim=0)[1],
    "interleaved": lambda a, b: interleave(a, 1),
    "interleaved parts": lambda a, b: interleave(torch.cat([a, b, b], 0), 0),
    "interleaved, then split": lambda a, b: interleave(a, 0).chunk(2, 0)[1],
    "rope": lambda a, b: a.view(1, 2, 2, 6).transpose(1, 2).reshape(4, 6),
    "experts in one dim": lambda a, b: torch.stack([a, a]).reshape(8, 6).unbind(0)[5],
    "flat and back": lambda a, b: torch.cat([a, b]).flatten().reshape(2, 3, 6).permute(2, 0, 1),
    "dims of size 1": lambda a, b: torch.cat([a.unsqueeze(1)] * 2, 2).squeeze(1).transpose(-1, 0),
    "split experts, again stacked": lambda a, b: torch.cat([torch.stack(torch.stack([a, a]).unbind(0))], 1),
}


@pytest.mark.parametrize("name", CHAINS)
def test_places_of_a_chain_of_operations_are_those_of_torch(name: str) -> None:
    files = numbered(a=A, b=B)
    traced = CHAINS[name](*(trace(n, x.shape, x.dtype) for n, x in files.items()))
    want = CHAINS[name](*files.values())
    assert traced.shape == want.shape
    assert torch.equal(values(traced, files), want)


@given(st.data())
@settings(max_examples=60)
def test_random_views_of_several_parts_keep_every_place(data: Any) -> None:
    files = numbered(a=(2, 6, 4), b=(2, 2, 4))
    traced = torch.cat([trace(n, x.shape, x.dtype) for n, x in files.items()], 1)
    pair: list[Any] = [traced, torch.cat([*files.values()], 1)]
    for _ in range(data.draw(st.integers(1, 4))):
        shape = pair[1].shape
        match data.draw(st.sampled_from(["reshape", "permute", "chunk", "interleave"])):
            case "reshape":
                n = pair[1].numel()
                first = data.draw(st.sampled_from([d for d in (1, 2, 4, 8, n) if n % d == 0]))
                second = data.draw(st.sampled_from([d for d in (1, 2, 4) if n // first % d == 0]))
                pair = [x.reshape(first, second, n // first // second) for x in pair]
            case "permute":
                order = data.draw(st.permutations(range(len(shape))))
                pair = [x.permute(order) for x in pair]
            case "chunk":
                dim = data.draw(st.sampled_from(range(len(shape))))
                pair = [x.chunk(2, dim)[0] for x in pair]
            case _:
                dims = [d for d, n in enumerate(shape) if n % 2 == 0]
                if dims:
                    dim = data.draw(st.sampled_from(dims))
                    pair = [interleave(x, dim) for x in pair]
    assert torch.equal(values(pair[0], files), pair[1])


@pytest.mark.parametrize("name", ["exp", "sum", "half", "flip"])
def test_operation_without_a_rule_is_refused(name: str) -> None:
    x = trace("w", A, torch.float32)
    text = error_text(lambda: getattr(x, name)(*[0] * (name == "flip")))
    assert text == (f"{name}: the places of its result in files are not known\n  operations that are followed: cat, "
                    "chunk, clone, contiguous, detach, flatten, permute, reshape, split, squeeze, stack, transpose, "
                    "unbind, unsqueeze, view")  # fmt: skip


def test_reshape_that_no_factors_have_is_refused() -> None:
    columns = Places.of((4, 6)).permute((1, 0))
    assert columns.reshape((3, 8)).dims == (((3, 2),), ((2, 1), (4, 6)))
    assert Places.of((3, 4)).reshape((2, 6)) == Places.of((2, 6))  # factors in a row are one
    assert error_text(columns.reshape, (4, 6)) == "[6, 4] cannot be read as [4, 6]\n  4 % 6 = 4"


def test_parts_that_do_not_fill_a_tensor_once_are_not_written(tmp_path: Path) -> None:
    halves = torch.cat([trace("w", A, torch.float32)] * 2).parts

    def write(*parts: FilePart) -> None:
        export.write(tmp_path / "folder", {"x": torch.zeros(8, 6)}, lambda _: parts, config={})

    write(halves[0])
    text = "write: 'w' would be written twice\n  tree['x'] give 48 of its 24 elements\n  fix: give one "
    assert error_text(write, *halves) == text + "leaf for each part"
    row = trace("w", A, torch.float32).unbind(0)[1].unsqueeze(0).parts
    assert "write: 'w' lacks a part\n  tree['x'] give 6 of its 24 elements" in error_text(write, *row)


def test_tensor_of_which_the_leaves_are_a_part_is_an_error() -> None:
    q, k, v = (x.parts[0] for x in trace("qkv", (6, 2), torch.float32).chunk(3))
    assert rest_error(Path("folder"), "qkv", [q, k, v]) is None
    error = rest_error(Path("folder"), "qkv", [q, k])
    assert str(error) == "folder: no leaf is the rest of 'qkv'\n  8 of its 12 elements are used"
