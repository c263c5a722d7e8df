"""verify finds what the mesh changes, and says which leaf, on which axis, and by what factor."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError


@pytest.fixture
def mesh():
    return fs.make_mesh(data=2, model=4)


def mapped(mesh, f, in_specs, out_specs, **options):
    return fs.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def told(f, *args, **options):
    with pytest.raises(ShardingError) as e:
        fs.verify(f, *args, **options)
    return str(e.value)


def test_a_right_program_passes_and_says_where(mesh):
    f = mapped(mesh, lambda x: {"sum": fs.psum(x.sum(), ("data", "model")), "x": x * 2},
               (P("data", "model"),), {"sum": P(), "x": P("data", "model")})  # fmt: skip
    found = fs.verify(f, torch.randn(4, 8))
    assert found.meshes == ("data=2, model=4", "data=1, model=4", "data=2, model=1", "data=1, model=1")
    assert found.leaves == 2
    assert found.error < 1e-5
    assert repr(found).startswith("verified: 2 leaves the same on data=2, model=4; data=1, model=4;")


def test_placed_and_donated_arguments_are_not_lost(mesh):
    x = fs.device_put(torch.arange(8.0), P("model"), mesh)
    f = mapped(mesh, lambda x: x.add_(1), (P("model"),), P("model"), donate=0)
    fs.verify(f, x, bitwise=True)
    assert fs.device_get(x).tolist() == list(range(8))


def test_a_total_summed_again_is_n_times_too_large(mesh):
    def f(p, x):
        return {"w": p + 1, "loss": fs.psum(fs.psum((p * x).sum(), "data"), "data")}

    text = told(mapped(mesh, f, (P(), P("data")), {"w": P(), "loss": P()}), torch.ones(()), torch.ones(8))
    assert text == (
        "verify: result['loss'] of f changes with the mesh: collapsing 'data' gives another answer\n"
        "  largest error 8, of 16 against 8\n"
        "  every value is 2 times what it should be\n"
        "  2 is the size of data: a psum of what is a total already, or of what does not vary"
    )


def test_a_mean_where_a_sum_is_meant_is_too_small(mesh):
    f = mapped(mesh, lambda x: fs.pmean(x.sum(), "model"), (P("model"),), P())
    text = told(f, torch.ones(8))
    assert "collapsing 'model'" in text
    assert "every value is 0.25 times what it should be" in text
    assert "1/4, the size of model: a psum is missing, or a mean is taken of a total" in text


def test_gradients_that_are_never_summed(mesh):
    """Bug 1 of hand-written parallelism: no pvary where an invariant enters each rank's own computation."""

    def step(p, x):
        return fs.grad(lambda p: fs.psum((p * x).square().sum(), "data"))(p)

    f = mapped(mesh, step, (P(), P("data")), P())
    assert "result of step changes with the mesh: collapsing 'data'" in told(f, torch.ones(3), torch.randn(4, 3))
    fs.verify(mapped(mesh, step_with_pvary, (P(), P("data")), P()), torch.ones(3), torch.randn(4, 3))


def step_with_pvary(p, x):
    return fs.grad(lambda p: fs.psum((fs.pvary(p, "data") * x).square().sum(), "data"))(p)


def test_every_axis_to_blame_is_named(mesh):
    f = mapped(mesh, lambda: torch.ones(()) * fs.axis_size("data") * fs.axis_size("model"), (), P())
    text = told(f)
    assert "collapsing 'data' gives" in text
    assert "collapsing 'model' gives" in text
    assert "every value is 4 times" in text


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda: torch.full((2,), float("nan")), "2 of 2 elements are not finite numbers"),
        (lambda: torch.zeros(fs.axis_size("data")), "f32[2] is not f32[1]"),
        (lambda: torch.zeros(1, dtype=(torch.float32, torch.double)[fs.axis_size("data") - 1]), "f64[1] is not f32[1]"),
        (lambda: torch.arange(3) * fs.axis_size("data"), "2 of 3 elements differ"),
        (lambda: {"n": fs.axis_size("data")}, "result['n'] of <lambda> changes with the mesh"),
        (lambda: [torch.zeros(1)] * fs.axis_size("data"), "the tree of results"),
    ],
)
def test_other_differences(mesh, f, text):
    assert text in told(mapped(mesh, f, (), P()))


def test_tolerances(mesh):
    f = mapped(mesh, lambda: torch.ones(2) + 1e-6 * (fs.axis_size("data") - 1), (), P())
    fs.verify(f)
    assert "2 of 2 elements differ" in told(f, bitwise=True)
    assert "largest error" in told(f, rtol=1e-8, atol=0.0)
    fs.verify(f, rtol=0.0, atol=1e-5)


def test_only_what_shard_map_gives(mesh):
    assert told(torch.sum, torch.ones(1)).endswith("fix: verify what fs.shard_map gives")


def test_a_mesh_of_one_rank_has_nothing_to_collapse():
    f = mapped(fs.make_mesh(a=1), lambda x: x, (P(),), P())
    assert fs.verify(f, torch.ones(1)).meshes == ("a=1",)


def test_the_models_step_is_verified(mesh):
    gpt2 = fs.models.gpt2
    cfg = gpt2.Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=4)
    specs = fs.fully_shard(gpt2.specs(cfg, model="model"), gpt2.init(cfg), axis="data")
    params = fs.materialize(gpt2.init(cfg), specs, mesh, key=fs.key(0))
    layout = gpt2.Layout("data", "model", sequence=True)
    ids = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(0))

    def step(p, ids):
        loss = lambda p: gpt2.loss(cfg, p, ids[:, :-1], ids[:, 1:], layout=layout, specs=specs)  # noqa: E731
        return fs.value_and_grad(loss)(p)

    fs.verify(mapped(mesh, step, (specs, P("data")), (P(), specs)), params, ids)
