"""One process first, a barrier, and the rows of an evaluation: on simulated meshes and real ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P, data
from tests.lib.assertions import assert_same, error_text
from tests.lib.processes import Pool
from tests.lib.signals import default_signals

MESHES: list[dict[str, int]] = [{"data": 1}, {"data": 2}, {"data": 3}, {"data": 2, "model": 2}, {"model": 3, "data": 4}]

# --- main_process_first, wait_for_everyone --------------------------------------------------------------------


def test_main_first_and_wait_on_a_mesh_of_one_process() -> None:
    for kind in ("simulated", "abstract"):
        mesh = fs.make_mesh(kind=kind, data=2)
        for local in (False, True):
            with fs.main_first(mesh, local=local) as first:
                assert first is True
        fs.wait(mesh)
    error = KeyError("mine")
    with pytest.raises(KeyError) as e, fs.main_first(mesh):
        raise error
    assert e.value is error


def test_main_first_and_wait_are_refused_in_a_region() -> None:
    mesh = fs.make_mesh(data=2)

    def inside(verb: str) -> Any:
        def f() -> None:
            fs.wait(mesh) if verb == "wait" else fs.main_first(mesh).__enter__()

        return fs.shard_map(f, mesh=mesh, out_specs=P())

    for verb in ("wait", "main_first"):
        assert error_text(inside(verb)).startswith(
            f"{verb}: called inside shard_map, where every rank runs the same code\n  fix: call it outside"
        )


def fill_a_cache(folder: Path) -> tuple[Any, ...]:
    """Run every case of `main_first` and `wait` on a rank; return what this rank saw."""
    mesh = fs.make_mesh(data=2, model=2)
    rank, out = mesh.ranks[0], []

    # 1. The first rank writes, the others read.
    with fs.main_first(mesh) as first:
        assert first is mesh.is_first is (rank == 0)
        if not (folder / "cache").exists():
            (folder / f"written by {rank}").touch()
            (folder / "cache").write_text("tokens")
        assert (folder / "cache").read_text() == "tokens"
    # 2. The first rank of each host of two ranks: both write, and none of the others does.
    os.environ["LOCAL_RANK"] = str(rank % 2)
    with fs.main_first(mesh, local=True) as first:
        assert first is (rank in (0, 2))
        if not (folder / f"host{rank // 2}").exists():
            (folder / f"host{rank // 2}").touch()
            (folder / f"host written by {rank}").touch()
    del os.environ["LOCAL_RANK"]
    out.append(error_text(fs.main_first(mesh, local=True).__enter__))
    # 3. A barrier: after it each rank sees the files of all.
    (folder / f"rank{rank}").touch()
    fs.wait(mesh)
    assert all((folder / f"rank{r}").exists() for r in range(4))
    # 4. A failure on some ranks is one on every rank: of the first, of another, of several, by any exception.
    for failing in ((0,), (2,), (1, 3), (0, 1)):
        ran = False
        try:
            with fs.main_first(mesh):
                ran = True
                if rank in failing:
                    raise (KeyboardInterrupt if rank == 2 else OSError)(f"no space, {rank}")
        except BaseException as e:
            out.append((type(e).__name__, str(e), ran))
        else:
            out.append(None)
    # 5. Ranks in different functions.
    out.append(error_text(fs.main_first(mesh).__enter__ if rank == 1 else lambda: fs.wait(mesh)))
    fs.wait(mesh)  # still in step
    x = fs.device_put(X, P("data"), mesh)
    with fs.main_first(mesh):  # what would wait for ranks that are not there is refused
        own = fs.make_mesh(kind="simulated", data=2)
        assert evaluate(own)
        transfers = {
            "shard_map": fs.shard_map(lambda: fs.psum(torch.ones(1), "data"), mesh=mesh, out_specs=P()),
            "main_first": fs.main_first(mesh).__enter__,
            "wait": lambda: fs.wait(mesh),
            "save": lambda: fs.checkpoint.save(folder / "c", x),
            "device_get": lambda: fs.device_get(x),
            "reshard": lambda: fs.reshard(x, P("model")),
        }
        for verb, f in transfers.items():
            assert error_text(f).startswith(
                f"{verb}: called in the body of main_first, which the ranks do not run together\n  it would not end\n"
            )
    fs.wait(mesh)
    # 6. Results of an evaluation, of uneven batches and with a mask.
    out.append([evaluate(mesh, rank=at) for at in (None, 2)])
    # 7. A signal on one rank stops all of them, at one call; a rank in another function is an error before that.
    with default_signals():
        text = error_text(fs.preempted if rank else fs.wait, mesh)
        assert text.startswith("preempted: " if rank else "wait: ")
        assert text.endswith("rank 1: preempted    rank 2: preempted    rank 3: preempted\n"
                             "  fix: call it on every rank, in the same order")  # fmt: skip
        for sender in (2, 0):
            with default_signals():
                calls = 0
                while not fs.preempted(mesh):
                    calls += 1
                    if calls == 5 and rank == sender:
                        signal.raise_signal(signal.SIGTERM)
                    time.sleep(0.001 * rank)
                assert fs.preempted(mesh)
                assert len(set(mesh.gather_objects(calls))) == 1
                assert calls >= 5 - 1
    return tuple(out)


@pytest.mark.process
def test_main_process_first_and_wait_for_everyone_on_real_ranks(ranks: Pool, tmp_path: Path) -> None:
    results = ranks(4, fill_a_cache, tmp_path)
    assert sorted(f.name for f in tmp_path.glob("*written*")) == [
        "host written by 0", "host written by 2", "written by 0"]  # fmt: skip
    for rank, (local, of_0, of_2, of_1_and_3, of_0_and_1, different, rows) in enumerate(results):
        assert local.startswith("main_first: local=True, and this process has no LOCAL_RANK")
        failed = "main_first: the body failed on another rank\n"
        text = failed + "  rank 0: OSError('no space, 0')"
        assert of_0 == (("OSError", "no space, 0", True) if rank == 0 else ("ShardingError", text, False))
        text = failed + "  rank 2: KeyboardInterrupt('no space, 2')"
        assert of_2 == (("KeyboardInterrupt", "no space, 2", True) if rank == 2 else ("ShardingError", text, True))
        text = failed + "  rank 1: OSError('no space, 1')\n  rank 3: OSError('no space, 3')"
        own = ("OSError", f"no space, {rank}", True)
        assert of_1_and_3 == (own if rank in (1, 3) else ("ShardingError", text, True))
        text = failed + "  rank 0: OSError('no space, 0')"  # the others have not run
        assert of_0_and_1 == (own if rank == 0 else ("ShardingError", text, False))
        verb = "main_first" if rank == 1 else "wait"
        assert different == (
            f"{verb}: the ranks are in different functions\n"
            "  rank 0: wait    rank 1: main_first    rank 2: wait    rank 3: wait\n"
            "  fix: call it on every rank, in the same order"
        )
        assert_same(rows[0], evaluate(fs.make_mesh(kind="simulated", data=1)))
        assert_same(rows[1], rows[0] if rank == 2 else fs.tree.map(lambda x: None, rows[0]))


# --- gather_for_metrics ---------------------------------------------------------------------------------------

X = torch.arange(22.0).view(11, 2)


def evaluate(mesh: fs.Mesh, batch: int = 4, even: bool = True, rank: int | None = None) -> list[Any]:
    """Return the rows of each batch of 11 examples, the last of which is completed."""
    out = []
    for step in range(data.steps_per_epoch(11, batch, drop_last=False)):
        rows = data.indices(None, step=step, size=11, batch=batch, drop_last=False, even=even)
        x = data.load(lambda i: X[i], rows, mesh=mesh)
        f = fs.shard_map(lambda x: {"y": 2 * x, "n": (x.sum(1), None)}, mesh=mesh, out_specs=P("data"))
        counted = data.counted(step=step, size=11, batch=batch) if even else None
        out.append(fs.gather_for_metrics(f(x), counted, rank=rank))
    return out


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("batch", [4, 5, 11, 16])
def test_gather_for_metrics_has_each_row_once_in_order(axes: dict[str, int], batch: int) -> None:
    mesh = fs.make_mesh(**axes)
    for even in (True, False):
        got = evaluate(mesh, batch, even)
        assert torch.equal(torch.cat([out["y"] for out in got]), 2 * X)
        assert torch.equal(torch.cat([out["n"][0] for out in got]), X.sum(1))
        assert all(out["n"][1] is None for out in got)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_mean_of_the_counted_rows_inside_equals_that_of_the_gathered_rows(axes: dict[str, int]) -> None:
    mesh, batch = fs.make_mesh(**axes), 4

    @fs.shard_map(mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P())
    def totals(x: Tensor, counted: Tensor) -> Any:
        return fs.psum(((x.sum(1) > 15) * counted).sum(), "data"), fs.psum(counted.sum(), "data")

    right = number = 0
    for step in range(3):
        rows = data.indices(None, step=step, size=11, batch=batch, even=True)
        r, n = totals(data.load(lambda i: X[i], rows, mesh=mesh), data.counted(step=step, size=11, batch=batch))
        right, number = right + int(r), number + int(n)
    assert (right, number) == (int((X.sum(1) > 15).sum()), 11)


def test_gather_for_metrics_takes_any_mask_and_plain_tensors() -> None:
    mesh = fs.make_mesh(data=3)
    x, mask = fs.device_put(X, P("data"), mesh), torch.arange(11) % 3 == 0
    assert torch.equal(fs.gather_for_metrics(x, mask), X[mask])
    assert torch.equal(fs.gather_for_metrics(x, fs.device_put(mask, P("data"), mesh)), X[mask])
    assert torch.equal(fs.gather_for_metrics(X.requires_grad_(False), mask), X[mask])
    assert fs.gather_for_metrics(x, torch.zeros(11, dtype=torch.bool)).shape == (0, 2)


def test_errors_of_gather_for_metrics() -> None:
    mesh = fs.make_mesh(data=3)
    x = fs.device_put({"x": X, "loss": torch.tensor(1.0), "y": X[:5]}, {"x": P("data"), "loss": P(), "y": P()}, mesh)
    assert error_text(fs.gather_for_metrics, [x, "text"], torch.ones(11, dtype=torch.bool)) == (
        "3 problems\n"
        "gather_for_metrics: results[0]['loss'] has no dims, and no row for each example\n"
        "  fix: return the values of the examples, not their mean\n"
        "gather_for_metrics: results[1] must be a placed leaf or a tensor, got 'text'\n"
        "gather_for_metrics: results[0]['y'] has 5 rows, counted has 11\n"
        "  fix: one row for each example of the batch"
    )
    assert "results['y'] has 5 rows, results['x'] has 11" in error_text(
        fs.gather_for_metrics, {k: x[k] for k in ("x", "y")}
    )
    assert error_text(fs.gather_for_metrics, x["x"], torch.ones(11)) == (
        "gather_for_metrics: counted must be bool[B], got 'f32[11]'\n  fix: fs.data.counted(step=, size=, batch=)"
    )
