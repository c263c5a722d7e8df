"""`verify`: results that the mesh changes are reported by leaf, axis and factor."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard import P
from tests.lib.assertions import error_text


@pytest.fixture
def mesh():
    return fs.make_mesh(data=2, model=4)


def mapped(mesh, f, in_specs, out_specs, **options):
    """Wrap `f` with check="never": the checker would find most of these mistakes before values are compared."""
    return fs.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check="never", **options)


def test_correct_program_passes_and_report_names_the_meshes(mesh):
    f = mapped(mesh, lambda x: {"sum": fs.psum(x.sum(), ("data", "model")), "x": x * 2},
               (P("data", "model"),), {"sum": P(), "x": P("data", "model")})  # fmt: skip
    verified = fs.verify(f, torch.randn(4, 8))
    assert verified.meshes == ("data=2, model=4", "data=1, model=4", "data=2, model=1", "data=1, model=1")
    assert verified.leaves == 2
    assert verified.error < 1e-5
    assert repr(verified).startswith("verified: 2 leaves the same on data=2, model=4; data=1, model=4;")


def test_donated_arguments_stay_valid(mesh):
    x = fs.device_put(torch.arange(8.0), P("model"), mesh)
    f = mapped(mesh, lambda x: x.add_(1), (P("model"),), P("model"), donate=0)
    fs.verify(f, x, bitwise=True)
    assert fs.device_get(x).tolist() == list(range(8))


def test_second_psum_is_reported_as_a_factor_of_n(mesh):
    def f(p, x):
        return {"w": p + 1, "loss": fs.psum(fs.psum((p * x).sum(), "data"), "data")}

    text = error_text(
        fs.verify, mapped(mesh, f, (P(), P("data")), {"w": P(), "loss": P()}), torch.ones(()), torch.ones(8)
    )
    assert text == (
        "verify: result['loss'] of f changes with the mesh: collapsing 'data' gives another answer\n"
        "  largest error 8, of 16 against 8\n"
        "  every value is 2 times what it should be\n"
        "  2 is the size of data: a psum of a value that is already a total, or where a mean was meant"
    )


def test_pmean_instead_of_psum_is_reported_as_a_factor_of_1_over_n(mesh):
    f = mapped(mesh, lambda x: fs.pmean(x.sum(), "model"), (P("model"),), P())
    text = error_text(fs.verify, f, torch.ones(8))
    assert "collapsing 'model'" in text
    assert "every value is 0.25 times what it should be" in text
    assert "1/4, the size of model: a psum is missing, or a mean is taken of a total" in text


def test_gradients_without_psum_are_reported(mesh):
    """Bug 1 of hand-written parallelism: no pvary where an invariant enters each rank's own computation."""

    def step(p, x):
        return fs.grad(lambda p: fs.psum((p * x).square().sum(), "data"))(p)

    f = mapped(mesh, step, (P(), P("data")), P())
    assert "result of step changes with the mesh: collapsing 'data'" in error_text(
        fs.verify, f, torch.ones(3), torch.randn(4, 3)
    )
    fs.verify(mapped(mesh, step_with_pvary, (P(), P("data")), P()), torch.ones(3), torch.randn(4, 3))


def step_with_pvary(p, x):
    return fs.grad(lambda p: fs.psum((fs.pvary(p, "data") * x).square().sum(), "data"))(p)


def test_every_axis_that_changes_a_leaf_is_named(mesh):
    f = mapped(mesh, lambda: torch.ones(()) * fs.axis_size("data") * fs.axis_size("model"), (), P())
    text = error_text(fs.verify, f)
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
def test_differences_of_shape_dtype_tree_and_finiteness(mesh, f, text):
    assert text in error_text(fs.verify, mapped(mesh, f, (), P()))


def test_rtol_atol_and_bitwise(mesh):
    f = mapped(mesh, lambda: torch.ones(2) + 1e-6 * (fs.axis_size("data") - 1), (), P())
    fs.verify(f)
    assert "2 of 2 elements differ" in error_text(fs.verify, f, bitwise=True)
    assert "largest error" in error_text(fs.verify, f, rtol=1e-8, atol=0.0)
    fs.verify(f, rtol=0.0, atol=1e-5)


def test_plain_function_is_an_error(mesh):
    assert error_text(fs.verify, torch.sum, torch.ones(1)).endswith("fix: pass what fs.shard_map returns")


def test_a_mesh_of_one_rank_has_nothing_to_collapse():
    f = mapped(fs.make_mesh(a=1), lambda x: x, (P(),), P())
    assert fs.verify(f, torch.ones(1)).meshes == ("a=1",)


def test_gpt2_step_verifies(mesh):
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


# --- reports ------------------------------------------------------------------------------------------------


def test_many_leaves_are_sorted_by_ratio_then_error_and_the_rest_named(mesh):
    def f(x):
        total = fs.psum(x.sum(0), "data")
        out = {f"w{i}": fs.psum(total * i, "data") for i in range(1, 4)}  # 2 times
        bent = {f"z{i}": fs.psum(torch.tanh(x * i).sum(0).square(), "data") for i in range(1, 5)}
        return {"right": total, **bent, **out}

    assert error_text(fs.verify, mapped(mesh, f, (P("data"),), P()), torch.arange(1, 9.0).view(4, 2) / 8) == (
        "verify: 7 of 8 leaves of f change with the mesh: collapsing 'data' gives another answer\n"
        "  result['w1']\n"
        "    largest error 2.5, of 5 against 2.5, at [1]\n"
        "    every value is 2 times what it should be\n"
        "    2 is the size of data: a psum of a value that is already a total, or where a mean was meant\n"
        "  result['w2']\n"
        "    largest error 5, of 10 against 5, at [1]\n"
        "    every value is 2 times what it should be\n"
        "    2 is the size of data: a psum of a value that is already a total, or where a mean was meant\n"
        "  result['w3']\n"
        "    largest error 7.5, of 15 against 7.5, at [1]\n"
        "    every value is 2 times what it should be\n"
        "    2 is the size of data: a psum of a value that is already a total, or where a mean was meant\n"
        "  result['z4']\n"
        "    largest error 6.9, of 6.95534 against 13.8384, at [1]\n"
        "    no constant ratio\n"
        "  and 3 more: result['z3'], result['z2'], result['z1']\n"
        "  usual causes: a nonlinearity or a statistic of one rank's part; a mean of unequal counts; positions, "
        "targets or\n"
        "  masks counted from 0 on each rank; a pvary or psum that is missing"
    )


def test_axes_with_the_same_description_share_a_paragraph(mesh):
    text = error_text(fs.verify, mapped(mesh, lambda: torch.full((2,), float("nan")), (), P()))
    assert text == (
        "verify: result of <lambda> changes with the mesh: collapsing 'data' or 'model' gives another answer\n"
        "  2 of 2 elements are not finite numbers: nan against nan, at [0]"
    )


def size(a):
    return fs.axis_size(a)


@pytest.mark.parametrize(
    ("f", "lines"),
    [
        (lambda x: x * size("model") ** 2, ["every value is 16 times", "16 is the square of 4, the size of model"]),
        (lambda x: x / size("model") ** 2, ["every value is 0.0625 times", "1/16, the square of 4"]),
        (lambda x: fs.psum(x.square().sum(), "data").sqrt(), ["every value is 1.414 times", "the square root of 2"]),
        (lambda x: x * (size("data") == 1), ["every value is 0 times", "is missing"]),
        (lambda x: x * (size("data") > 1), ["every value should be 0"]),
        (lambda x: x * (1 + 0.3 * (size("data") > 1)), ["every value is 1.3 times what it should be"]),
        (lambda x: torch.cat([x[:3], x[3:] * size("data")]),
         ["15 of 24 elements are wrong in [3:8, :], each 2 times what it should be", "2 is the size of data"]),
        (lambda x: x + x[:1] * size("model"), ["the error is the same all along dim 0"]),
        (lambda x: x[:2] * (1 + (size("data") > 1) * torch.arange(6.0).view(2, 3)), ["no constant ratio"]),
        (lambda x: x.sum() * (1 + 0.3 * (size("data") > 1)), ["largest error"]),
        (lambda x: x.to(torch.complex64) * 1j * size("data"), ["every value is 2 times what it should be"]),
        (lambda x: x.to(torch.bfloat16) / size("model"), ["every value is 0.25 times", "1/4, the size of model"]),
    ],
)  # fmt: skip
def test_likely_causes_by_the_errors(mesh, f, lines):
    text = error_text(
        fs.verify, mapped(mesh, f, (P(),), P()), torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    )
    for line in lines:
        assert line in text


def test_scalar_ratio_is_reported_only_if_it_is_a_factor_of_the_mesh(mesh):
    assert "times" not in error_text(
        fs.verify, mapped(mesh, lambda: torch.ones(()) * (1 + 0.3 * (size("data") > 1)), (), P())
    )


def test_error_text_of_a_program_that_raises_on_a_smaller_mesh(mesh):
    f = mapped(mesh, lambda x: x if size("model") > 1 else {}["k"], (P(),), P())
    text = "verify: <lambda> runs on data=2, model=4, and raises on data=2, model=1\n  KeyError: 'k'"
    assert error_text(fs.verify, f, torch.ones(1)) == text


def test_error_text_of_a_program_that_is_not_deterministic(mesh):
    text = error_text(fs.verify, mapped(mesh, lambda x: fs.psum(x + torch.rand(8), "data"), (P(),), P()), torch.ones(8))
    assert text.startswith("verify: result of <lambda>: another run on the same mesh gives another answer\n  fix: draw")


def test_leaf_that_differs_only_when_all_axes_are_collapsed(mesh):
    f = mapped(mesh, lambda: torch.ones(3) * (1 + (size("data") * size("model") > 1)), (), P())
    assert "collapsing 'data' and 'model' gives" in error_text(fs.verify, f)


# --- arguments and results ----------------------------------------------------------------------------------------


def test_arguments_may_be_uneven_tied_keys_numbers_and_none(mesh):
    def f(args):
        x, y = args["x"], args["tied"]
        noise = fs.random.normal(args["key"], (7,), spec=P("model"))
        return {"x": x * args["n"] + y + noise, "n": args["n"], "none": args["none"], "word": "same"}

    x = fs.device_put(torch.randn(7), P("model"), mesh)
    args = {"x": x, "tied": x, "key": fs.key(3), "n": 2, "none": None}
    specs = {"x": P("model"), "tied": P("model"), "key": P(), "n": P(), "none": P()}
    out = {"x": P("model"), "n": P(), "none": P(), "word": P()}
    assert fs.verify(mapped(mesh, f, (specs,), out), args, bitwise=True).leaves == 3


def test_equal_infinities_are_equal(mesh):
    f = mapped(mesh, lambda x: x.log() * size("data"), (P("data"),), P("data"))
    assert "every value is 2 times" in error_text(fs.verify, f, torch.tensor([0.0, 2.0, 3.0, 4.0]))
    fs.verify(mapped(mesh, lambda x: x.log(), (P("data"),), P("data")), torch.tensor([0.0, 1.0, 2.0, 3.0]))
    f = mapped(mesh, lambda x: x / (size("data") == 1), (P(),), P())
    assert "2 of 2 elements are not finite numbers: inf against 1, at [0]" in error_text(fs.verify, f, torch.ones(2))
    f = mapped(mesh, lambda x: x / (size("data") > 1), (P(),), P())
    assert "2 of 2 elements are not finite numbers: 1 against inf, at [0]" in error_text(fs.verify, f, torch.ones(2))


# --- noise --------------------------------------------------------------------------------------------------------


def cancelling_sums(scale):
    """Return a function whose `zero` is 0 but for rounding, about 1e-6, and whose `tiny` depends on `scale()`."""

    def f(x):
        total = fs.psum(x.sum(), "data")
        small = fs.psum((x - fs.pvary(total, "data") / 64).sum(), "data")
        return {"total": total, "zero": small, "tiny": total * 1e-9 * scale()}

    return f


def test_noise_is_distinguished_from_small_wrong_values(mesh):
    x = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 10
    verified = fs.verify(mapped(mesh, cancelling_sums(lambda: 1), (P("data"),), P()), x)
    assert verified.noise == ("result['zero']",)
    assert repr(verified).endswith("; only noise: result['zero'])")
    assert verified.error < 1e-5
    text = error_text(fs.verify, mapped(mesh, cancelling_sums(lambda: size("data")), (P("data"),), P()), x)
    assert text.startswith("verify: result['tiny'] of f changes with the mesh: collapsing 'data'")
    assert "every value is 2 times" in text
    exact = mapped(mesh, cancelling_sums(lambda: 1), (P("data"),), P())
    assert "result['zero']" in error_text(
        fs.verify, exact, x, atol=0.0
    )  # noise is measured only for the default tolerance
    assert "result['zero']" in error_text(fs.verify, exact, x, bitwise=True)


def test_first_adam_step_of_a_zero_gradient_is_noise(mesh):
    """The step divides noise by noise: anything between -lr and lr. A wrong gradient is reported all the same."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(1)) * 10

    def step(wrong):
        def f(x):
            g = cancelling_sums(lambda: 1)(x)["zero"] + wrong * (size("data") - 1)
            return {"g": g, "step": 1e-3 * g / (g.abs() + 1e-8)}

        return mapped(mesh, f, (P("data"),), P())

    assert fs.verify(step(0.0), x).noise == ("result['g']", "result['step']")
    assert "result['g']" in error_text(fs.verify, step(1e-2), x)


def test_default_tolerance_depends_on_the_dtype(mesh):
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(8, 512, generator=g), torch.randn(512, 4, generator=g)
    f = mapped(mesh, lambda x, w: fs.psum(x @ w, "model"), (P(None, "model"), P("model")), P())
    for dtype, error, mistake in ((torch.bfloat16, 2**-7, 2**-3), (torch.float16, 2**-10, 2**-6),
                                  (torch.float64, 2**-48, 2**-41)):  # fmt: skip
        assert fs.verify(f, x.to(dtype), w.to(dtype)).error < error
        off = mapped(mesh, lambda x: x * (1 + (size("data") - 1) * mistake), (P(),), P())  # noqa: B023
        assert "every value is" in error_text(fs.verify, off, x.to(dtype))


# --- real ranks ---------------------------------------------------------------------------------------------------


def verify_on_ranks():
    mesh = fs.make_mesh(data=2)
    x = fs.device_put(torch.arange(7.0), P("data"), mesh)
    right = mapped(mesh, lambda x: fs.psum(x.sum(), "data"), (P("data"),), P(), donate=0)
    wrong = mapped(mesh, lambda x: x.sum(), (P("data"),), P())
    return repr(fs.verify(right, x)), fs.device_get(x).tolist(), error_text(fs.verify, wrong, x)


@pytest.mark.process
def test_all_processes_report_the_same(ranks):
    (first, values, text), other = ranks(2, verify_on_ranks)
    assert other == (first, values, text)
    assert first.startswith("verified: 1 leaf the same on data=2; data=1 (largest relative error")
    assert values == list(range(7))
    assert "result of <lambda> changes with the mesh: collapsing 'data'" in text


def test_error_text_of_replicas_that_differ(mesh):
    """Replicas that differ are reported even if the one that is read is right."""

    def f(x):
        return {"x": x, "n": torch.ones(2) + (fs.axis_index("model") == 1)}

    text = error_text(fs.verify, mapped(mesh, f, (P("data"),), {"x": P("data"), "n": P()}), torch.ones(4))
    assert text == (
        "verify: f: result['n'] is not one value: it differs between ranks of 'model'\n"
        "  spec  P()\n"
        "  they differ by up to 1\n"
        "  fix: psum or pmean it over 'model', or name 'model' in its out spec; look for a Python number\n"
        "       or a branch that depends on the rank, which the checker cannot see"
    )


def test_replicas_may_differ_by_rounding(mesh):
    def f(x):
        return x.sum() * (1 + 1e-7 * fs.axis_index("model"))

    fs.verify(mapped(mesh, f, (P(),), P()), torch.ones(4))
    assert "of f changes with the mesh" in error_text(
        fs.verify, mapped(mesh, f, (P(),), P()), torch.ones(4), bitwise=True
    )
