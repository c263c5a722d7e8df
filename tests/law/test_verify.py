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


def test_a_step_that_changes_nothing_is_refused(mesh):
    opt = fs.optim.adamw(fs.optim.warmup(1e-2, 10))

    def step(p, state, x):
        grads = fs.grad(lambda p: fs.pmean((x @ fs.pvary(p["w"], "data")).square().mean(), "data"))(p)
        return opt.update(grads, state, p)

    p, f = {"w": torch.randn(4, 2)}, mapped(mesh, step, (P(), P(), P("data")), P())
    assert error_text(fs.verify, f, p, opt.init(p), torch.randn(8, 4)) == (
        "verify: step returns args[0] unchanged, bit for bit\n"
        "  a step that changes nothing gives the same answer on every mesh, also with wrong gradients\n"
        "  fix: verify a later step, as a warmup from 0 has learning rate 0 at first; or scale the gradients up, if "
        "the update is less than a rounding"
    )
    fs.verify(f, p, {**opt.init(p), "count": torch.tensor(5)}, torch.randn(8, 4))


def test_leaves_that_are_computed_and_unchanged_are_not_counted_as_verified(mesh):
    """Others are: an argument that is returned, and a copy of it."""
    f = mapped(mesh, lambda p: {"up": p["up"] * 2, "w": p["w"] - 0.0 * p["w"], "frozen": p["frozen"], "buffer":
               p["buffer"].clone().view(-1)}, P("data"), P("data"))  # fmt: skip
    verified = fs.verify(f, {name: torch.randn(3) for name in ("up", "w", "frozen", "buffer")})
    assert (verified.leaves, verified.unchanged) == (3, ("result['w']",))
    assert repr(verified).startswith("not verified, as unchanged: result['w']; verified: 3 leaves the same on data=2,")
    assert "not verified, as unchanged" in verified._repr_html_()


def test_donated_arguments_stay_valid(mesh):
    x = fs.device_put(torch.arange(8.0), P("model"), mesh)
    f = mapped(mesh, lambda x: x.add_(1), (P("model"),), P("model"), donate=0)
    fs.verify(f, x, bitwise=True)
    assert fs.device_get(x).tolist() == list(range(8))


def test_second_psum_is_reported_as_a_factor_of_n(mesh):
    def f(p, x):
        return {"w": p + 1, "loss": fs.psum(fs.psum((p * x).sum(), "data"), "data")}

    g = mapped(mesh, f, (P(), P("data")), {"w": P(), "loss": P()})
    assert error_text(fs.verify, g, torch.ones(()), torch.ones(8), locate=False) == (
        "verify: result['loss'] of f changes with the mesh: collapsing 'data' gives a different answer\n"
        "  largest error 8: 16 should be 8\n"
        "  every value is 2 times what it should be\n"
        "  2 is the size of data: a psum of a value that is already a total, or where a mean was meant"
    )


def test_pmean_instead_of_psum_is_reported_as_a_factor_of_1_over_n(mesh):
    f = mapped(mesh, lambda x: fs.pmean(x.sum(), "model"), (P("model"),), P())
    text = error_text(fs.verify, f, torch.ones(8))
    assert "collapsing 'model'" in text
    assert "every value is 0.25 times what it should be" in text
    assert "1/4 is 1 / (the size of model): a psum is missing, or a pmean is used in place of a psum" in text


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

    x = torch.arange(1, 9.0).view(4, 2) / 8
    assert error_text(fs.verify, mapped(mesh, f, (P("data"),), P()), x, locate=False) == (
        "verify: 7 of 8 leaves of f change with the mesh: collapsing 'data' gives a different answer\n"
        "  result['w1']\n"
        "    largest error 2.5: 5 should be 2.5, at [1]\n"
        "    every value is 2 times what it should be\n"
        "    2 is the size of data: a psum of a value that is already a total, or where a mean was meant\n"
        "  result['w2']\n"
        "    largest error 5: 10 should be 5, at [1]\n"
        "    every value is 2 times what it should be\n"
        "    2 is the size of data: a psum of a value that is already a total, or where a mean was meant\n"
        "  result['w3']\n"
        "    largest error 7.5: 15 should be 7.5, at [1]\n"
        "    every value is 2 times what it should be\n"
        "    2 is the size of data: a psum of a value that is already a total, or where a mean was meant\n"
        "  result['z4']\n"
        "    largest error 6.9: 6.95534 should be 13.8384, at [1]\n"
        "    no constant ratio\n"
        "  and 3 more: result['z3'], result['z2'], result['z1']\n"
        "  usual causes: a nonlinearity or a statistic of one rank's part; a mean of unequal counts; positions, "
        "targets or\n"
        "  masks counted from 0 on each rank; a gradient that is not summed, for want of a pvary"
    )


def test_axes_with_the_same_description_share_a_paragraph(mesh):
    text = error_text(fs.verify, mapped(mesh, lambda: torch.full((2,), float("nan")), (), P()), locate=False)
    assert text == (
        "verify: result of <lambda> changes with the mesh: collapsing 'data' or 'model' gives a different answer\n"
        "  2 of 2 elements are not finite numbers: nan should be nan, at [0]"
    )


def size(a):
    return fs.axis_size(a)


@pytest.mark.parametrize(
    ("f", "lines"),
    [
        (lambda x: x * size("model") ** 2, ["every value is 16 times", "16 is the square of 4, the size of model"]),
        (lambda x: x / size("model") ** 2,
         ["every value is 0.0625 times", "1/16 is 1 / (the square of 4, the size of model)"]),
        (lambda x: fs.psum(x.square().sum(), "data").sqrt(), ["every value is 1.414 times", "the square root of 2"]),
        (lambda x: x * size("model") ** 0.5, ["the square root of 4", "; or each rank adjusts a scale"]),
        (lambda x: x * (size("data") == 1), ["every value is 0 times", "is missing"]),
        (lambda x: x * (size("data") > 1), ["every value should be 0"]),
        (lambda x: x * (1 + 0.3 * (size("data") > 1)), ["every value is 1.3 times what it should be"]),
        (lambda x: torch.cat([x[:3], x[3:] * size("data")]),
         ["15 of 24 elements are wrong in [3:8, :], each 2 times what it should be", "2 is the size of data"]),
        (lambda x: x + x[:1] * size("model"), ["the error is the same all along dim 0"]),
        (lambda x: x[:2] * (1 + (size("data") > 1) * torch.arange(6.0).view(2, 3)), ["no constant ratio"]),
        (lambda x: x.sum() * (1 + 0.3 * (size("data") > 1)), ["largest error"]),
        (lambda x: x.to(torch.complex64) * 1j * size("data"), ["every value is 2 times what it should be"]),
        (lambda x: x.to(torch.bfloat16) / size("model"),
         ["every value is 0.25 times", "1/4 is 1 / (the size of model)"]),
    ],
)  # fmt: skip
def test_likely_causes_by_the_errors(mesh, f, lines):
    text = error_text(
        fs.verify, mapped(mesh, f, (P(),), P()), torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    )
    for line in lines:
        assert line in text.partition("first different line")[0]  # which quotes this table


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
    assert text.startswith(
        "verify: result of <lambda>: another run on the same mesh gives a different answer\n  fix: draw"
    )


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
    assert "2 of 2 elements are not finite numbers: inf should be 1, at [0]" in error_text(fs.verify, f, torch.ones(2))
    f = mapped(mesh, lambda x: x / (size("data") > 1), (P(),), P())
    assert "2 of 2 elements are not finite numbers: 1 should be inf, at [0]" in error_text(fs.verify, f, torch.ones(2))


# --- meshes to compare with ---------------------------------------------------------------------------------------


def equal_sizes(x):
    """Return the total, on a square mesh only: rank (i, j) sends its part to rank (j, i)."""
    assert fs.axis_size("row") == fs.axis_size("col")
    return fs.psum(x.sum(), ("row", "col"))


def test_meshes_names_those_to_compare_with():
    f = mapped(fs.make_mesh(row=2, col=2), equal_sizes, (P("row", "col"),), P())
    assert "raises on row=1, col=2" in error_text(fs.verify, f, torch.ones(4, 4))
    assert fs.verify(f, torch.ones(4, 4), meshes=[{"row": 1, "col": 1}]).meshes == ("row=2, col=2", "row=1, col=1")


def test_meshes_of_other_sizes_keep_axes_that_they_leave_out(mesh):
    right = mapped(mesh, lambda x: fs.psum(x.sum(), "data"), (P("data"),), P())
    found = fs.verify(right, torch.ones(8), meshes=[{"data": 4}, {"model": 2}]).meshes
    assert found == ("data=2, model=4", "data=4, model=4", "data=2, model=2")
    wrong = mapped(mesh, lambda x: x * fs.axis_size("model"), (P(),), P())
    fs.verify(wrong, torch.ones(8), meshes=[{"data": 1}])
    assert error_text(fs.verify, wrong, torch.ones(8), meshes=[{"model": 8}], locate=False) == (
        "verify: result of <lambda> changes with the mesh: changing 'model' from 4 to 8 gives a different answer\n"
        "  largest error 4: 4 should be 8, at [0]\n"
        "  every value is 0.5 times what it should be\n"
        "  1/2 is the ratio of the sizes of model: a psum of a value that is already a total, or where a mean was meant"
    )
    text = error_text(fs.verify, wrong, torch.ones(8), meshes=[{"data": 1, "model": 2}])
    assert "changing 'data' from 2 to 1 and 'model' from 4 to 2 gives a different answer" in text
    assert "2 is the size of data or the ratio of the sizes of model: a psum" in text


@pytest.mark.parametrize(
    ("meshes", "text"),
    [
        ([], "verify: meshes=[]\n  not a list of sizes"),
        ({"data": 1}, "verify: meshes must be a Sequence of Mapping of int or None, got {'data': 1}"),
        (
            [{"date": 1}],
            "verify: meshes[0]={'date': 1}: the mesh of the function has no axis 'date'\n  the axes are data=",
        ),
        ([{"data": 1}, {"data": 0}], "verify: meshes[1]={'data': 0}\n  not sizes of axes, integers of 1 or more"),
        (["data"], "verify: meshes must be a Sequence of Mapping of int or None, got ['data']"),
        ([{"data": 2}], "verify: meshes[0]={'data': 2}: is the mesh of the function"),
    ],
)
def test_error_text_of_wrong_meshes(mesh, meshes, text):
    assert text in error_text(fs.verify, mapped(mesh, lambda x: x, (P(),), P()), torch.ones(1), meshes=meshes)


def test_rtol_and_atol_may_be_prefixes_of_the_results(mesh):
    def f():
        off = 1 + 1e-2 * (fs.axis_size("data") - 1)
        return {"a": torch.ones(2) * off, "b": [torch.ones(2) * off, torch.ones(2)]}

    f = mapped(mesh, f, (), P())
    assert "2 of 3 leaves of f change" in error_text(fs.verify, f)
    assert "result['b'][0] of f changes" in error_text(fs.verify, f, rtol={"a": 0.1, "b": None})
    fs.verify(f, rtol={"a": 0.1, "b": [0.1, None]})
    fs.verify(f, atol={"a": 0.1, "b": 0.1})
    assert "verify: rtol['b']: -1 is an int, not a number of 0 or more" in error_text(
        fs.verify, f, rtol={"a": 1, "b": -1}
    )
    assert "verify: atol: not a prefix of the tree" in error_text(fs.verify, f, atol={"a": 0.1})


# --- examples -----------------------------------------------------------------------------------------------------


def mean_of_kept(x, kept):
    """Return the mean of the examples that a mask keeps."""
    return fs.psum((x * kept).sum(), "data") / fs.psum(kept.sum(), "data")


def mean_of_means(x, kept):
    return fs.pmean((x * kept).sum() / kept.sum(), "data")


def test_other_orders_of_examples_show_a_mean_of_means_whose_counts_are_equal(mesh):
    x, kept = torch.arange(8.0) ** 2, torch.tensor([1.0, 1, 1, 0, 0, 1, 1, 1])
    specs = (P("data"), P("data"))
    fs.verify(mapped(mesh, mean_of_means, specs, P()), x, kept)  # three examples on each rank
    text = error_text(fs.verify, mapped(mesh, mean_of_means, specs, P()), x, kept, examples=(0, 1))
    assert text.startswith(
        "verify: result of mean_of_means (with the examples in another order) changes with the mesh: collapsing 'data'"
    )
    verified = fs.verify(mapped(mesh, mean_of_kept, specs, P()), x, kept, examples=(0, 1))
    assert "data=1, model=1; in 4 orders of the examples (largest" in repr(verified)


def test_examples_of_trees_and_placed_arguments_are_ordered_alike(mesh):
    x = torch.arange(8.0)
    batch = {"a": fs.device_put(x, P("data"), mesh), "b": x, "scale": torch.tensor(2.0), "name": "text"}
    specs = {"a": P("data"), "b": P("data"), "scale": P(), "name": P()}
    seen = set()

    def f(batch):
        assert torch.equal(batch["a"], batch["b"])
        seen.add(tuple(batch["a"].tolist()))
        return batch["b"] * batch["scale"]

    assert fs.verify(mapped(mesh, f, (specs,), P("data")), batch, examples=0, bitwise=True).orders == 4
    assert len({part for part in seen if len(part) == 8}) == 4
    assert fs.device_get(batch["a"]).tolist() == x.tolist()


@pytest.mark.parametrize("examples", [0, 3, [1, 2], (1, 3)])
def test_error_text_of_arguments_that_hold_no_examples(mesh, examples):
    f = mapped(mesh, lambda w, x, y: w, (P(), P("data"), P("data")), P())
    text = error_text(fs.verify, f, torch.ones(3), torch.ones(8), torch.ones(4), examples=examples)
    assert "these arguments do not hold one number of examples\n  lengths of dim 0 where it is split\n  args[" in text
    assert text.endswith("fix: name the positions of the arguments that hold examples, counted from 0")


# --- updates ------------------------------------------------------------------------------------------------------


def update(lr, line):
    """Return a step of gradient descent whose gradient one line completes."""

    def step(params, x):
        grads = fs.grad(lambda p: fs.psum((p["w"] * x).square().sum(), "data"))(params)
        return {"v": params["v"], "w": params["w"] - lr * line(grads["w"])}

    return step


@pytest.mark.parametrize(
    ("lr", "line", "lines"),
    [
        (0.1, lambda g: fs.psum(fs.psum(g, "data"), "data"),
         ["its change from args[0]['w'] is 2 times what it should be", "2 is the size of data: a psum of a value"]),
        (0.1, lambda g: fs.pmean(g, "data"),
         ["its change from args[0]['w'] is 0.5 times", "1/2 is 1 / (the size of data)"]),
        (0.1, lambda g: g, ["the sum of the changes from args[0]['w'] on the ranks of 'data' is right: a psum is"]),
        (1e-6, lambda g: fs.psum(fs.psum(g, "data"), "data"), ["its change from args[0]['w'] is 2 times"]),
        (1e-6, lambda g: 1.02 * g + 0.1 * fs.axis_index("data"), ["changes with the mesh"]),
    ],
)  # fmt: skip
def test_change_of_a_leaf_that_updates_an_argument(mesh, lr, line, lines):
    w, x = torch.linspace(1, 2, 5), torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    f = mapped(mesh, update(lr, line), (P(), P("data")), P())
    params = {"v": 2 * w, "w": w}
    text = error_text(fs.verify, f, params, x)
    for expected in lines:
        assert expected in text
    right = mapped(mesh, update(lr, lambda g: fs.psum(g, "data")), (P(), P("data")), P())
    assert fs.verify(right, params, x).error < 1e-6


@pytest.mark.parametrize("n", [1, 3, 20])
def test_change_of_the_other_sign_is_named(mesh, n):
    """In few elements it may be the rounding of gradients near 0, of which Adam's first step has the sign alone."""

    def step(p):
        grad = torch.tensor([1.0, -1.0]).repeat(10)
        grad[:n] *= 1e-9 * (1.5 - fs.axis_size("data"))
        return {"b": p["b"] - 0.1 * grad.sign()}

    text = error_text(fs.verify, mapped(mesh, step, (P(),), P()), {"b": torch.linspace(0, 2, 20)})
    where = f" in [0:{n}]" if n < 20 else ""
    assert f"\n  the change of {n} of 20 elements from args[0]['b'] has the other sign{where}" in text
    assert ("or verify in float32" in text) == (n == 1)
    assert "usual causes" not in text


def test_missing_sum_is_named_only_where_the_sum_is_right(mesh):
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    for f, expected in (
        (lambda x: x.sum(0), "the sum of the values on the ranks of 'data' is right: a psum is missing"),
        (lambda x: x.mean(0), "the mean of the values on the ranks of 'data' is right: a pmean is missing"),
        (lambda x: x.tanh().sum(0).square(), "no constant ratio"),
    ):
        text = error_text(fs.verify, mapped(mesh, f, (P("data"),), P()), x)
        assert expected in text
        assert ("psum is missing" in text) == ("psum is missing" in expected)


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
    half = mapped(mesh, lambda x: fs.psum((x / 3).sum(0).bfloat16(), "data").float() / 7, (P("data"),), P())
    assert fs.verify(half, torch.arange(99.0).sin().view(9, 11)).noise == ("result",)
    return repr(fs.verify(right, x)), fs.device_get(x).tolist(), error_text(fs.verify, wrong, x)


@pytest.mark.process
def test_all_processes_report_the_same(ranks):
    (first, values, text), other = ranks(2, verify_on_ranks)
    assert other == (first, values, text)
    assert first.startswith("verified: 1 leaf the same on data=2; data=1 (largest relative error")
    assert values == list(range(7))
    assert "result of <lambda> changes with the mesh: collapsing 'data'" in text
    assert "first different line: test_verify.py" in text


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
