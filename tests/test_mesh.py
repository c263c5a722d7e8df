"""Meshes: sizes, coordinates, identity, runs and messages of errors."""

from __future__ import annotations

import copy
import pickle
import threading
import time

import numpy as np
import pytest
import torch

import fshard as fs
from fshard import P
from tests.lib.assertions import error_text

SIZES = [
    {"a": 1},
    {"a": 3},
    {"a": 8},
    {"a": 2, "b": 3},
    {"b": 3, "a": 2},
    {"a": 2, "b": 1, "c": 2},
    {"a": 2, "b": 2, "c": 1, "d": 2},
]


@pytest.mark.parametrize("axes", SIZES, ids=repr)
def test_coordinates_are_row_major(axes):
    mesh = fs.make_mesh(**axes)
    assert mesh.axes == axes
    assert list(mesh.axes) == list(axes)
    assert mesh.size == np.prod(list(axes.values()))
    assert mesh.ranks == tuple(range(mesh.size))
    for rank in mesh.ranks:
        coords = mesh.coords(rank)
        assert list(coords) == list(axes)
        assert tuple(coords.values()) == np.unravel_index(rank, tuple(axes.values()))


@pytest.mark.parametrize("axes", SIZES, ids=repr)
def test_run_passes_each_rank_its_comm_and_returns_in_rank_order(axes):
    mesh = fs.make_mesh(**axes)
    out = mesh.run(lambda comm, rank: (rank, dict(comm.coords), dict(comm.sizes)))
    assert out == [(rank, mesh.coords(rank), axes) for rank in range(mesh.size)]


def test_simulated_ranks_take_turns_on_threads_of_their_own():
    mesh, log = fs.make_mesh(a=2, b=2), []

    def f(comm, rank):
        for i in range(2):
            log.append((i, rank))
            time.sleep(0.001)  # lets another thread run
            log.append((i, rank))
            comm.all_reduce(torch.ones(1), "sum", ("a", "b"))
        return threading.get_ident()

    idents = mesh.run(f)
    assert len(set(idents)) == 4
    assert threading.get_ident() not in idents
    assert log == [(0, 0), (0, 0), (0, 1), (0, 1), (0, 2), (0, 2), (0, 3), (0, 3), (1, 3), (1, 3),
                   (1, 0), (1, 0), (1, 1), (1, 1), (1, 2), (1, 2)]  # fmt: skip


@pytest.mark.parametrize("axes", [{"a": 1}, {"a": 1, "b": 1}], ids=repr)
def test_one_rank_runs_in_the_callers_thread(axes):
    assert fs.make_mesh(**axes).run(lambda comm, rank: threading.get_ident()) == [threading.get_ident()]


def test_ranks_have_the_compute_threads_of_the_caller():
    before = torch.get_num_threads()
    try:
        for n in (3, 1, 2):
            torch.set_num_threads(n)
            mesh = fs.make_mesh(a=2)
            for _ in range(2):
                assert mesh.run(lambda comm, rank: torch.get_num_threads()) == [n, n]
                assert torch.get_num_threads() == n
            with pytest.raises(ZeroDivisionError):
                mesh.run(lambda comm, rank: 1 // 0)
            assert torch.get_num_threads() == n
            assert fs.make_mesh(a=200).run(lambda comm, rank: torch.get_num_threads()) == [1] * 200  # of 256 in all
            fs.make_mesh(a=1).run(lambda comm, rank: None)
            assert torch.get_num_threads() == n
            seen = []
            other = threading.Thread(target=lambda seen=seen: seen.append(torch.get_num_threads()))
            other.start()
            other.join()
            assert seen == [n]  # of a thread that the caller starts later, too
    finally:
        torch.set_num_threads(before)


def test_meshes_are_equal_if_axes_kind_and_device_are():
    assert fs.make_mesh(a=2, b=2) == fs.make_mesh(a=2, b=2)
    assert hash(fs.make_mesh(a=2, b=2)) == hash(fs.make_mesh(a=2, b=2))
    others = [fs.make_mesh(b=2, a=2), fs.make_mesh(a=4), fs.make_mesh(a=2, c=2), fs.make_mesh(a=2, b=2, device="meta")]
    assert all(fs.make_mesh(a=2, b=2) != other for other in others)
    assert len({fs.make_mesh(a=2, b=2), fs.make_mesh(a=2, b=2), *others}) == 1 + len(others)
    assert fs.make_mesh(a=2) != "Mesh"


def test_leaves_of_one_mesh_are_accepted_on_an_equal_one():
    x = fs.device_put(torch.arange(4.0), P("a"), fs.make_mesh(a=2))
    double = fs.shard_map(lambda x: 2 * x, mesh=fs.make_mesh(a=2), in_specs=P("a"), out_specs=P("a"))
    assert fs.device_get(double(x)).tolist() == [0, 2, 4, 6]


def test_repr_of_mesh():
    assert repr(fs.make_mesh(data=2, model=4)) == "Mesh(data=2, model=4; simulated, 8 x cpu)"


def test_attributes_of_meshes_of_other_libraries_name_those_of_this_one():
    mesh = fs.make_mesh(data=2)
    with pytest.raises(AttributeError, match=r"a Mesh has no attribute 'shape': it is mesh.axes, sizes by name"):
        _ = mesh.shape
    with pytest.raises(AttributeError, match=r"a Mesh has no attribute 'sizes'$"):
        _ = mesh.sizes
    assert not hasattr(mesh, "__array__")


def test_mesh_cannot_be_pickled_or_copied():
    message = "a Mesh refers to live devices and cannot be pickled: make it again with fs.make_mesh"
    for f in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError) as caught:
            f(fs.make_mesh(a=2))
        assert str(caught.value) == message


SIZES_FIX = (
    "\n  fix: name at least one axis, each with a size of 1 or more, e.g. data=2, model=4; "
    "in a process mesh one may be -1"
)


@pytest.mark.parametrize(
    ("axes", "shown"),
    [
        ({}, ""),
        ({"data": 0}, "data=0"),
        ({"data": 2, "model": -2}, "data=2, model=-2"),
        ({"a": -1, "b": -1}, "a=-1, b=-1"),
    ],
)
def test_error_text_of_sizes_that_are_not_positive_integers(axes, shown):
    assert error_text(fs.make_mesh, **axes) == f"make_mesh({shown}): not the sizes of a mesh" + SIZES_FIX


@pytest.mark.parametrize("size", [2.0, "2"])
def test_error_text_of_a_size_of_another_kind(size):
    assert error_text(fs.make_mesh, data=size) == f"make_mesh: data must be an int, got {size!r}"


def test_error_text_of_axes_passed_by_position():
    assert error_text(fs.make_mesh, (2, 4), ("data", "model")) == (
        "make_mesh: 2 arguments by position, and it takes 0\n  fix: make_mesh(data=2, model=4)"
    )


def test_error_text_of_a_device_that_torch_does_not_know():
    text = error_text(fs.make_mesh, device="gpu", data=2)
    assert text.startswith("make_mesh: device is 'gpu'\n")
    assert text.endswith("\n  fix: device='cpu' or device='cuda'")


def test_error_text_of_inferred_size_without_a_world_size():
    assert error_text(fs.make_mesh, kind="simulated", data=-1, model=2) == (
        "make_mesh(data=-1, model=2): a simulated mesh has no world size to infer 'data' from\n"
        "  fix: state how many ranks it has: data=2"
    )


@pytest.mark.parametrize("timeout", [0, -1, 0.0001, float("inf"), float("nan"), 1e12])
def test_error_text_of_a_timeout_that_cannot_be_waited_for(timeout):
    assert error_text(fs.make_mesh, data=2, timeout=timeout) == (
        f"make_mesh: timeout={timeout!r}: not a number of seconds from 0.001 to 100,000,000\n"
        "  fix: timeout=600 waits ten minutes; None is the default of torch.distributed"
    )
    assert error_text(fs.make_mesh, data=2, timeout="600") == "make_mesh: timeout must be a float or None, got '600'"


@pytest.mark.parametrize("kind", ["simulated", "abstract"])
def test_timeout_has_no_effect_on_meshes_without_processes(kind):
    mesh = fs.make_mesh(kind=kind, data=2, timeout=60)
    assert mesh == fs.make_mesh(kind=kind, data=2)
    assert hash(mesh) == hash(fs.make_mesh(kind=kind, data=2, timeout=0.5))


def test_error_text_of_unknown_kind():
    assert error_text(fs.make_mesh, kind="real", data=2).startswith(
        "make_mesh: no kind of mesh is called 'real'\n  fix: kind="
    )


def test_error_text_of_process_mesh_outside_a_launch(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert error_text(fs.make_mesh, kind="process", device="cpu", data=2) == (
        "make_mesh(data=2, kind='process'): this process was not launched as a rank\n"
        "  fix: start it with torchrun --nproc-per-node N, or use kind='simulated'"
    )
