"""The fixture `ranks`, for tests on real processes, and the rules that keep those few."""

from __future__ import annotations

import gc
import os

if "PYTEST_XDIST_WORKER" in os.environ:  # one compute thread for each worker, set before torch counts the cores
    os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from _pytest.unraisableexception import gc_collect_iterations_key

if TYPE_CHECKING:
    from tests.lib.processes import Pool

MOST_PROCESS_TESTS = 25
_pool = pytest.StashKey["Pool"]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[gc_collect_iterations_key] = 1  # at the end, for errors of finalizers: five take seconds
    if config.getoption("numprocesses", None) and "PYTEST_XDIST_WORKER" not in os.environ:
        return  # the process that starts the workers runs no test: it needs none of what takes seconds to load
    gc.disable()  # as below
    import hypothesis

    import fshard  # noqa: F401  loaded before the ranks are forked, so that they need not load it again
    from tests.lib.processes import Pool

    gc.freeze()
    gc.enable()
    hypothesis.settings.register_profile(  # on a loaded machine any example may be slow
        "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    hypothesis.settings.load_profile("tests")
    config.stash[_pool] = Pool()  # before anything computes; a fork of some 20 ms


def pytest_unconfigure(config: pytest.Config) -> None:
    if _pool in config.stash:
        config.stash[_pool].close()
        del config.stash[_pool]


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """End all forked processes before the coverage that they save is combined."""
    try:
        return (yield)
    finally:
        pytest_unconfigure(session.config)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Keep modules and tests, a million objects that live to the end, out of all garbage collections.

    What tests import later is as large, and each full collection would visit it: they are made rare.
    """
    gc.disable()
    result = yield
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    gc.enable()
    return result


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    starting = {item for item in items if item.get_closest_marker("process")}
    if len(starting) > MOST_PROCESS_TESTS:
        listed = "\n  ".join(item.nodeid for item in items if item in starting)
        raise pytest.UsageError(
            f"{len(starting)} tests start processes, the most is {MOST_PROCESS_TESTS}: join some\n  {listed}"
        )
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    if on_gpu := [item for item in items if item.get_closest_marker("gpu")]:
        import torch

        for item in on_gpu if not torch.cuda.is_available() else []:
            item.add_marker(no_gpu)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Give a test the same random numbers whatever ran before it: on a worker that differs from run to run."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Pool:
    """`ranks(4, job, *args)`: `job(*args)` on four real ranks; their results. For tests marked `process`."""
    if request.node.get_closest_marker("process") is None:
        raise pytest.UsageError(f"{request.node.nodeid} uses ranks: mark it pytest.mark.process")
    return request.config.stash[_pool]
