"""Warnings of plans are in each form of them, and a warning is absent where its subject is."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.planning import search
from fshard.planning.devices import H100
from fshard.planning.trust import _ERRORS
from tests.benchmarks import trust

FITTED = dataclasses.replace(H100, efficiency=0.5)
DATA = P("data")


def subjects(got: Any) -> list[str]:
    return [text.split()[0] for text in got.warnings]


def warnings_of_leaves(mesh: Any, leaves: dict[str, tuple[int, int]], specs: dict[str, P]) -> tuple[Any, list[str]]:
    """Return the kinds of the axes and the warnings of the gradients of these parameters, with a split batch."""
    loss = lambda w, x: sum(m.square().sum() for m in w.values()) + x.sum()  # noqa: E731
    f = fs.shard_map(fs.grad(loss), mesh=mesh, in_specs=(specs, P("data")), out_specs=specs)
    got = fs.plan(f, {name: fs.init.zeros(shape) for name, shape in leaves.items()}, fs.init.zeros((512, 4)))
    return got.splits.kinds, [text for text in got.warnings if text.startswith("leaf")]


def test_a_bound_is_marked_in_every_form_and_a_fitted_device_is_not() -> None:
    mesh = fs.make_mesh(kind="abstract", data=2)
    step, args = fs.shard_map(lambda x: x @ x, mesh=mesh, in_specs=P(), out_specs=P()), (fs.init.zeros((64, 64)),)
    for device, marked in ((H100, True), (FITTED, False), (dataclasses.replace(H100, launch=1e-6), False)):
        got = fs.plan(step, *args, device=device)
        table = fs.plan_table(lambda: (step, args), [{}], device=device)
        assert ("seconds are a lower bound" in repr(got)) is marked
        assert ("seconds are a lower bound" in got._repr_html_()) is marked
        assert ("at least" in repr(got.time)) is marked
        assert ("≥" in repr(table)) is ("≥" in table._repr_html_()) is marked
        bars = "error bars: speed within 8%, bytes within 3% of the measured, in all published steps of language models"
        (text,) = table.as_dict()["rows"][0]["warnings"]
        assert text.startswith(bars) is not marked
        assert text in repr(got)
        assert text in repr(table)
    assert fs.plan(step, *args).warnings == ()


def test_leaves_that_an_axis_leaves_full_or_uneven_are_named_with_their_bytes() -> None:
    mesh = fs.make_mesh(kind="abstract", data=512)
    columns, even = P(None, "data"), {"even": (4096, 512)}
    kinds, texts = warnings_of_leaves(mesh, {**even, "full": (4096, 256)}, {"even": columns, "full": P()})
    assert kinds == {"data": "FSDP"}
    assert texts == ["leaf full [4096, 256]: full on each rank over data=512, 4.0 MiB more than in even parts"]
    kinds, texts = warnings_of_leaves(mesh, {**even, "odd": (2**20, 513)}, {"even": columns, "odd": columns})
    assert texts == ["leaf odd [1048576, 513]: parts differ in size over data=512, 4.0 MiB more than in even parts"]
    assert warnings_of_leaves(mesh, even, {"even": columns}) == ({"data": "FSDP"}, [])
    assert warnings_of_leaves(mesh, {"full": (4096, 512)}, {"full": P()}) == ({"data": "data"}, [])
    mesh = fs.make_mesh(kind="abstract", data=2, model=4)
    assert warnings_of_leaves(mesh, even, {"even": P(None, "model")}) == ({"data": "data", "model": "tensor"}, [])


def test_long_rings_and_balanced_experts() -> None:
    def exchange(x: Tensor) -> Tensor:
        n = fs.axis_size("data")
        return fs.all_to_all_rows(x, "data", [len(x) // n] * n)

    for n, want in ((1024, ["error"]), (2048, ["ring", "error"])):
        mesh = fs.make_mesh(kind="abstract", data=n)
        step = fs.shard_map(lambda x: fs.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
        assert subjects(fs.plan(step, fs.init.zeros((n,)), device=FITTED)) == want
    mesh = fs.make_mesh(kind="abstract", data=4)
    step = fs.shard_map(exchange, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    assert subjects(fs.plan(step, fs.init.zeros((16, 8)))) == ["experts"]


def test_kernels_that_choose_their_workspace_are_counted_in_plans_and_searches() -> None:
    def step_of(data: int, blocks: int = 9) -> Any:
        def f(w: Tensor, x: Tensor) -> Tensor:
            for _ in range(blocks):
                x = torch.conv2d(x, w, padding=1)
            return fs.psum(x.sum(), "data")

        mesh = fs.make_mesh(kind="abstract", data=data)
        f = fs.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        return f, (fs.init.zeros((4, 4, 3, 3)), fs.init.zeros((4, 4, 8, 8)))

    table = search(step_of, [{"data": 2}, {"data": 4}], device=FITTED, best=1, blocks=9)
    for row in table:
        assert row.warnings[0] == "workspace unknown: aten.convolution, 9 calls"
        assert row.warnings[1].endswith(" (1 with data parallelism), without unknown workspaces")
    assert "\nworkspace unknown: aten.convolution\n" in repr(table)


def bars_of(spec: P, device: Any = FITTED, batch: P = DATA, tokens: int = 4, **sizes: int) -> str:
    """Return the warning of a step of gradients, by the specs of its weights and of its batch."""
    mesh = fs.make_mesh(kind="abstract", **(sizes or {"data": 2, "model": 2}))
    loss = lambda w, x: (w * x.sum()).sum()  # noqa: E731
    f = fs.shard_map(fs.grad(loss), mesh=mesh, in_specs=(spec, batch), out_specs=spec)
    ids = fs.init.zeros((4, tokens), dtype=torch.int64)
    (text,) = fs.plan(f, fs.init.zeros((8,)), ids, device=device).warnings
    assert text.startswith("error bars")
    return text.removeprefix("error bars")  # type: ignore[no-any-return]


def test_error_bars_are_the_largest_of_the_kinds_of_parallelism() -> None:
    of = "of the measured, in 9 of 10 published steps of language models on GPUs"
    fsdp, tensor = _ERRORS["FSDP"][1:], _ERRORS["tensor"][1:]
    assert fsdp[0] is not None
    assert tensor[0] is not None
    assert tensor[1] is not None
    both = f"bytes within {max(fsdp[2], tensor[2]):.0%} {of}"
    speed = max(fsdp[0][0], tensor[0][0])
    text = f": speed within {speed:.0%}, {both} ({fsdp[0][1]} with FSDP, {tensor[0][1]} with tensor parallelism)"
    assert bars_of(P(("data", "model"))) == text
    ours, cpu = dataclasses.replace(FITTED, calibrated=True), dataclasses.replace(FITTED, queued=False)
    share, n = tensor[1]
    text = f", calibrated by one step: speed within {share:.0%}, bytes within {tensor[2]:.0%} {of} ({n} with tensor"
    assert bars_of(P("model"), ours).startswith(text)
    assert (
        bars_of(P("model"), cpu) == ": speed not compared with published steps on CPUs, bytes within 3% of the measured"
    )


def test_error_bars_say_what_they_are_of() -> None:
    """HSDP has the bars of FSDP; long sequences and one device have their own."""
    assert bars_of(P("model")).endswith("(34 with tensor parallelism)")
    hybrid = bars_of(P("data"), batch=P(("replica", "data")), replica=2, data=2)
    assert hybrid == bars_of(P("data"), data=2) == bars_of(P("data"), tokens=8192, data=2)
    assert hybrid.endswith(" with FSDP)")
    assert bars_of(P("data"), tokens=8193, data=2).endswith(" with FSDP on more than 8,192 tokens)")
    ending = " in all published steps of language models on GPUs "
    assert bars_of(P(), data=2).endswith(f"{ending}(1 with data parallelism)")
    assert bars_of(P(), data=1).endswith(f"{ending}(1 on one device)")
    ours = dataclasses.replace(FITTED, calibrated=True)
    assert "speed not compared on one device" in bars_of(P(), ours, data=1)


def test_error_bars_are_those_of_the_published_rows() -> None:
    rows = trust.rows()
    bars = trust.bars(rows)
    for kind in {*_ERRORS} & {*bars}:
        assert _ERRORS[kind][1:] == (*bars[kind][:2], bars[kind][2] or 0.03), kind
    assert len([r for r in rows if r.use == "blind" and r.error is not None]) >= 10


@pytest.mark.slow
def test_a_published_row_is_planned_as_its_table_says() -> None:
    row = next(r for r in trust.rows() if r.model == "MPT 1B")
    got = trust.planned(row, {}).planned
    assert got is not None
    assert row.planned is not None
    assert abs(got / row.planned - 1) < 0.01
