from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import fshard as fs
from fshard import P, ShardingError
from fshard._core.region import has_values
from tests.lib.assertions import error_text
from tests.lib.collective_cases import check_all, check_values, check_vmap_is_one_transfer

MESHES = [
    ({"a": 1}, ("a",)),
    ({"a": 2}, ("a",)),
    ({"a": 3}, ("a",)),
    ({"a": 4}, ("a",)),
    ({"a": 2, "b": 2}, ("a",)),
    ({"a": 2, "b": 2}, ("b",)),
    ({"a": 2, "b": 2}, ("a", "b")),
    ({"a": 2, "b": 3}, ("b", "a")),
    ({"a": 2, "b": 1, "c": 2, "d": 2}, ("a", "d")),
]


def test_adjoint_double_transpose_jvp_vmap():
    check_all(fs.make_mesh(a=2), ("a",), "first")


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "axes"), [MESHES[i] for i in (0, 2, 5, 6, 7, 8)])
def test_adjoint_double_transpose_jvp_vmap_on_more_meshes(mesh, axes):
    check_all(fs.make_mesh(**mesh), axes, "never")  # types do not depend on sizes: they are those of the test above


@pytest.mark.parametrize(("mesh", "axes"), [MESHES[i] for i in (0, 2, 5, 7, 8)])
def test_known_answers(mesh, axes):
    check_values(fs.make_mesh(**mesh), axes, "first" if len(mesh) == 2 and axes == ("b",) else "never")


@pytest.mark.parametrize(("mesh", "axes"), [MESHES[6]])
def test_vmap_is_one_transfer(mesh, axes):
    check_vmap_is_one_transfer(fs.make_mesh(**mesh), axes)


OVER_A = P("a")


def each_rank(mesh, f, *args, specs=None, out=OVER_A):
    return fs.device_get(fs.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out)(*args))


def test_collectives_over_axis_none_return_their_argument():
    x = torch.randn(4)
    mesh = fs.make_mesh(a=2)

    def f(x):
        for op in (fs.psum, fs.pmean, fs.pvary, fs.pmax, fs.pmin, fs.all_gather, fs.psum_scatter, fs.pslice):
            assert op(x, None) is x
        assert fs.axis_size(None) == 1
        return x

    torch.testing.assert_close(each_rank(mesh, f, x, out=P()), x)


def test_pmax_and_pmin_without_tied_have_no_gradient():
    mesh = fs.make_mesh(a=2)
    for op in (fs.pmax, fs.pmin):
        grad = fs.grad(lambda x, op=op: op(x, "a").sum())
        with pytest.raises(ShardingError, match="detach the argument"):
            each_rank(mesh, grad, torch.randn(4), specs=(P("a"),))
        # a detached argument is a constant
        constant = fs.grad(lambda x, op=op: fs.psum((x * fs.pvary(op(x.detach(), "a"), "a")).sum(), "a"))
        assert each_rank(mesh, constant, torch.randn(4), specs=(P("a"),)).shape == (4,)


def test_tied_pmax_splits_its_gradient_among_ties():
    mesh = fs.make_mesh(a=3)
    x = torch.tensor([[1.0, 5.0], [4.0, 5.0], [4.0, 2.0]])  # a tie in both columns

    def f(x):
        value, grad = fs.value_and_grad(lambda x: fs.pmax(x, "a", grad="tied").sum())(x)
        tangent = torch.ones_like(x) * fs.axis_index("a")
        _, rate = torch.func.jvp(lambda x: fs.pmax(x, "a", grad="tied"), (x,), (tangent,))
        return grad, rate, value

    grad, rate, value = each_rank(mesh, f, x, specs=(P("a"),), out=(P("a"), P(), P()))
    torch.testing.assert_close(grad, torch.tensor([[0, 0.5], [0.5, 0.5], [0.5, 0]]))
    torch.testing.assert_close(rate, torch.tensor([[1.5, 0.5]]))
    assert value == 9
    # against the dense derivative of the same function
    dense = torch.func.grad(lambda x: x.amax(0).sum())(x)
    torch.testing.assert_close(grad, dense)


@pytest.mark.parametrize("n", [1, 2])
def test_second_derivative_of_tied_pmax_by_forward_mode(n):
    def f(x):
        curve = lambda x: fs.pmax(x.sin().amax(0), "a", grad="tied").sum()  # noqa: E731
        return torch.func.jvp(lambda x: torch.func.jvp(curve, (x,), (x,))[1], (x,), (torch.ones_like(x),))[1]

    got = each_rank(fs.make_mesh(a=n), f, torch.tensor([[0.2, 0.9], [1.1, 0.4]]), specs=(P("a"),), out=P())
    x = torch.tensor([1.1, 0.9])
    torch.testing.assert_close(got, (x.cos() - x * x.sin()).sum())


def test_pmax_under_vmap_and_pmin_of_nan():
    mesh = fs.make_mesh(a=2)
    x = torch.randn(2, 5, 3)
    batched = torch.func.vmap(lambda v: fs.pmax(v, "a"), in_dims=1)
    got = each_rank(mesh, batched, x, specs=(P("a"),), out=P())
    torch.testing.assert_close(got, x.amax(0).unsqueeze(1))
    x[1, 0, 0] = float("nan")
    assert each_rank(mesh, lambda x: fs.pmin(x, "a"), x, specs=(P("a"),), out=P())[0, 0, 0].isnan()


def _in_a_module(f, x):
    class Module(torch.nn.Module):
        def forward(self, x):
            return f(x)

    return torch.export.export(Module(), (x,)).module()(x)


TRANSFORMS_WITHOUT_A_RULE = {
    "linearize": (lambda f, x: torch.func.linearize(f, x)[1](x), "torch.func.jvp"),
    "make_fx": (lambda f, x: make_fx(f)(x)(x), "compile=True"),
    "make_fx of a gradient": (lambda f, x: make_fx(torch.func.grad(lambda x: f(x).sum()))(x)(x), "compile=True"),
    "export": (_in_a_module, "compile=True"),
    "jit.trace": (lambda f, x: torch.jit.trace(f, (x,))(x), "compile=True"),
    "functionalize": (lambda f, x: torch.func.functionalize(f)(x), "leave functionalize out"),
    "forward-mode jacobian": (
        lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True, strategy="forward-mode"),
        "jacfwd",
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS_WITHOUT_A_RULE)
def test_transform_without_a_rule_is_an_error_in_a_region_and_around_it(name):
    transform, fix = TRANSFORMS_WITHOUT_A_RULE[name]
    collectives = [
        lambda x: fs.psum(fs.pvary(x, "a"), "a"), lambda x: fs.pmax(fs.pvary(x, "a"), "a", grad="tied"),
        lambda x: fs.all_gather(fs.pslice(x, "a"), "a", to="invariant"),
        fs.remat(lambda x: fs.psum(fs.pvary(x, "a"), "a")),
        lambda x: fs.psum(fs.scan(torch.mul, [fs.pslice(x, "a")], x, specs=P("a"), axis="a"), "a"),
    ]  # fmt: skip
    x, mesh = torch.ones(2), fs.make_mesh(a=2)
    for f in collectives:
        for run in (
            fs.shard_map(lambda x, f=f: transform(f, x), mesh=mesh, out_specs=P(), check="never"),
            fs.shard_map(lambda x, f=f: transform(f, x), mesh=mesh, out_specs=P(), check="always"),
            lambda x, f=f: transform(fs.shard_map(f, mesh=mesh, out_specs=P()), x),
        ):
            text = error_text(run, x)
            assert fix in text or "transform inside" in text, text
    abstract = fs.shard_map(lambda x: transform(collectives[0], x), out_specs=P(),
                            mesh=fs.make_mesh(kind="abstract", a=2))  # fmt: skip
    assert fix in error_text(fs.check, abstract, x)


def test_jacobians_of_autograd_through_layers_and_schedules():
    """Check the row by row, the vectorized and the forward-mode Jacobian of torch.func, or the error that names it."""
    x = torch.tensor([0.3, -0.7, 1.1, 0.5], dtype=torch.float64)

    def remat(w):
        return fs.remat(lambda w: fs.psum(fs.pvary(w, "a").sin(), "a"))(w)

    def scan(w):
        return fs.psum(
            fs.scan(lambda p, h: (p * h).sin(), [fs.pslice(w, "a")], fs.pvary(w, "a"), specs=P("a"), axis="a"), "a"
        )

    def mlp(w):
        up, down = fs.pslice(torch.outer(w, w), "a", 1), fs.pslice(torch.outer(w.cos(), w), "a", 0)
        return fs.nn.mlp(w[None], up, down, activation=torch.tanh, axis="a")[0]

    functional = torch.autograd.functional
    ways = [functional.jacobian, lambda f, w: functional.jacobian(f, w, vectorize=True), _jacobian_by_dual_levels]
    for f in (remat, scan, mlp):
        want = each_rank(fs.make_mesh(a=2), lambda w, f=f: torch.func.jacrev(f)(w), x, out=P())
        for jacobian in ways:
            run = fs.shard_map(
                lambda w, f=f, j=jacobian: j(f, w), mesh=fs.make_mesh(a=2), out_specs=P(), check="always"
            )
            if f is scan and jacobian is not _jacobian_by_dual_levels:
                assert "torch.func" in error_text(run, x) or "one backward pass" in error_text(run, x)
            else:
                torch.testing.assert_close(fs.device_get(run(x)), want)


def _jacobian_by_dual_levels(f, w):
    columns = []
    for tangent in torch.eye(len(w), dtype=w.dtype):
        with forward_ad.dual_level():
            columns.append(forward_ad.unpack_dual(f(forward_ad.make_dual(w, tangent))).tangent.clone())
    return torch.stack(columns, 1)


def test_tree_moves_in_one_transfer_per_dtype():
    mesh = fs.make_mesh(a=2)
    leaves = {"w": torch.randn(4, 3), "b": torch.randn(2), "h": torch.randn(5).bfloat16(), "i": torch.arange(3)}
    for op, out in ((fs.psum, P()), (fs.all_gather, P("a")), (lambda t, a: fs.ppermute(t, a, [(0, 1)]), P("a"))):
        with fs.recording() as log:
            fs.shard_map(lambda t, op=op: op(fs.pvary(t, "a"), "a"), mesh=mesh, out_specs=out)(leaves)
        assert len(log) == 3 * mesh.size
        assert {t.dtype for t in log} == {torch.float32, torch.bfloat16, torch.int64}


@pytest.mark.parametrize("mesh", [{"data": 1}, {"data": 2}, {"data": 3, "model": 2}, {"replica": 2, "data": 2}])
def test_unshard_is_ddp_fsdp_and_hsdp(mesh):
    """Check that gradients of a batch loss equal the dense ones leaf by leaf, for replicated and split parameters."""
    mesh = fs.make_mesh(**mesh)
    shapes = {"w": (5, 3), "v": (3, 4), "b": (4,), "s": ()}
    generator = torch.Generator().manual_seed(0)
    params = {k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()}
    x = torch.randn(12, 5, generator=generator, dtype=torch.float64)

    def local_loss(p, x):
        return ((x @ p["w"]).tanh() @ p["v"] + p["b"]).square().sum() * p["s"]

    want_loss, want = fs.value_and_grad(local_loss)(params, x)
    batch_axes = tuple(a for a in mesh.axes if a != "model")
    replicated = dict.fromkeys(shapes, P())
    split = {"w": P("data"), "v": P(None, "data"), "b": P("data"), "s": P()}
    for specs in (replicated, split):

        @fs.shard_map(mesh=mesh, in_specs=(specs, P(batch_axes)), out_specs=(P(), specs))
        def step(p, x, specs=specs):
            def total(p, x):
                full = fs.unshard(p, specs, batch_axes, shapes=params)
                assert all(full[k].shape == shapes[k] for k in shapes)
                return fs.psum(local_loss(full, x), batch_axes)

            return fs.value_and_grad(total)(p, x)

        loss, grads = fs.device_get(step(fs.device_put(params, specs, mesh), x))
        torch.testing.assert_close(loss, want_loss)
        for k in shapes:
            torch.testing.assert_close(grads[k], want[k], rtol=1e-12, atol=1e-12)


def test_unshard_gathers_the_minor_axis_of_a_dim_split_over_two():
    mesh = fs.make_mesh(model=2, data=2)
    x = torch.arange(10.0)
    specs = P(("model", "data"))
    placed = fs.device_put(x, specs, mesh)
    got = each_rank(mesh, lambda p: fs.unshard(p, specs, "data", shapes=x)[None], placed, out=P("data", "model"))
    torch.testing.assert_close(got, x.expand(2, 10))
    axes = ("model", "data")
    both = each_rank(mesh, lambda p: fs.unshard(p, specs, axes, shapes=x)[None], placed, out=P(axes))
    torch.testing.assert_close(both, x.expand(4, 10))
    with pytest.raises(ShardingError, match=r"make \('model',\) the minor axes"):
        each_rank(mesh, lambda p: fs.unshard(p, specs, "model"), placed, out=P())


def test_unshard_gathers_two_dims_and_shares_transfers():
    mesh = fs.make_mesh(a=2, b=2)
    tree = {"x": torch.randn(4, 6), "y": torch.randn(8, 2), "z": torch.randn(3)}
    specs = {"x": P("a", "b"), "y": P("a"), "z": P()}
    placed = fs.device_put(tree, specs, mesh)
    copies = lambda p, axes: {k: v[None] for k, v in fs.unshard(p, specs, axes).items()}  # noqa: E731
    got = each_rank(mesh, lambda p: copies(p, ("a", "b")), placed, out=P(("a", "b")))
    for k, v in tree.items():
        torch.testing.assert_close(got[k], v.expand(4, *v.shape))
    with fs.recording() as log:
        each_rank(mesh, lambda p: copies(p, "a"), placed, out={"x": P("a", None, "b"), "y": P("a"), "z": P("a")})
    assert len(log) == mesh.size  # one gather for both split leaves, no transfer for the varied leaf


def test_all_gather_without_size_exchanges_sizes_only_if_uneven():
    mesh = fs.make_mesh(a=4)
    x = torch.arange(6.0)
    with fs.recording() as log:
        got = each_rank(mesh, lambda x: fs.all_gather(x, "a", to="invariant"), x, specs=(P("a"),), out=P())
    torch.testing.assert_close(got, x)
    assert len(log) == 2 * mesh.size
    with fs.recording() as log:
        each_rank(mesh, lambda x: fs.all_gather(x, "a"), torch.arange(8.0), specs=(P("a"),))
    assert len(log) == mesh.size


def test_all_gather_of_an_uneven_pslice_exchanges_sizes():
    """Split an argument evenly, and slice it unevenly inside the region."""
    mesh = fs.make_mesh(a=4)
    x = torch.arange(8.0)
    slice_and_gather = lambda x: fs.all_gather(fs.pslice(x[:7], "a"), "a", to="invariant")  # noqa: E731
    torch.testing.assert_close(each_rank(mesh, slice_and_gather, x, out=P()), x[:7])


def test_axis_none_needs_no_region():
    x = torch.ones(2)
    assert fs.psum(x, None) is x
    assert fs.pvary(x, ()) is x
    assert fs.axis_size(None) == 1
    assert fs.axis_position(None) == 0


def test_psum_of_bfloat16_rounds_once():
    mesh = fs.make_mesh(a=4)
    x = torch.full((4, 1), 1.0 / 3).bfloat16() * torch.tensor([[1.0], [256], [1], [1]]).bfloat16()
    got = each_rank(mesh, lambda x: fs.psum(x, "a"), x, specs=(P("a"),), out=P())
    assert got.item() == x.float().sum().bfloat16().item()


@pytest.mark.parametrize(
    ("f", "text"),
    [
        (lambda x: fs.psum(x, "b"),
         ("psum: the mesh has no axis 'b'\n  mesh  a=2\n  at test_collectives.py:LINE in <lambda>\n"
          "  fix: use one of ['a'], or None")),
        (lambda x: fs.psum(x, ("a", "a")), "psum: an axis is named twice in ('a', 'a')\n  fix: name each axis once"),
        (lambda x: fs.psum("3", "a"), "psum: x must be a Tensor or a number, got '3'"),
        (lambda x: fs.all_gather({"n": 3}, "a"),
         "all_gather: x['n'] must be a Tensor, got 3\n  fix: torch.as_tensor(x)"),
        (lambda x: fs.all_gather(x, "a", 2), "all_gather: x: a 1-d tensor has no dim 2\n  shape  [1]"),
        (lambda x: fs.all_gather(x, "a", to="V"), "all_gather: to must be 'varying' or 'invariant', got 'V'"),
        (lambda x: fs.all_gather(x, "a", size=5),
         ("all_gather: the part of rank 0 has the wrong size for a dim of global size 5\n"
          "  5 over ('a',) splits into [3, 2]; rank 0 has 1\n"
          "  at test_collectives.py:LINE in <lambda>\n"
          "  fix: pass the global size of the gathered dim")),
        (lambda x: fs.all_to_all(x, "a", split=0, concat=0),
         "all_to_all: split and concat are both dim 0\n  fix: name two different dims"),
        (lambda x: fs.ppermute(x, "a", [(0, 1), (1, 1)]),
         ("ppermute: targets [1, 1] are not distinct positions of axis 'a'\n  positions are 0 to 1\n"
          "  fix: name every source and every target once")),
        (lambda x: fs.pmean(x.long(), "a"),
         ("pmean: x is int64, and its mean is not\n  at test_collectives.py:LINE in <lambda>\n"
          "  fix: cast to a floating dtype first")),
        (lambda x: fs.pmax(x, "a", grad="x"), "pmax: grad must be 'tied' or None, got 'x'"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_errors(f, text):
    def only_rank_0_fails(x):  # so that the message is that of rank 0
        return f(x) if fs.axis_index("a") == 0 else fs.psum(x, "a")

    found = error_text(each_rank, fs.make_mesh(a=2), only_rank_0_fails, torch.zeros(2), specs=(P("a"),), out=P())
    assert found == text.replace("LINE", str(f.__code__.co_firstlineno))


def test_recording_lists_transfers_with_their_bytes():
    mesh = fs.make_mesh(a=2)
    with fs.recording() as log:
        fs.shard_map(lambda x: fs.psum(fs.pvary(x, "a"), "a"), mesh=mesh, out_specs=P())(torch.zeros(10))
    assert [(t.op, t.axes, t.bytes) for t in log] == [("all_reduce", ("a",), 40)] * 2
    assert math.prod(mesh.axes.values()) == 2


# --- Python numbers ----------------------------------------------------------------------------------------

NUMBERS = (3, True, 0.1, 2 - 1j)
TAKES_NUMBERS = {
    "psum": lambda number, n: number * n, "pmean": lambda number, n: number / 1, "pmax": lambda number, n: number,
    "pmin": lambda number, n: number, "pvary": lambda number, n: number,
}  # fmt: skip
TAKES_TENSORS = {
    "all_gather": lambda x: fs.all_gather(x, "a"), "psum_scatter": lambda x: fs.psum_scatter(x, "a"),
    "pslice": lambda x: fs.pslice(x, "a"), "ppermute": lambda x: fs.ppermute(x, "a", []),
    "all_to_all": lambda x: fs.all_to_all(x, "a", split=0, concat=1),
    "all_to_all_rows": lambda x: fs.all_to_all_rows(x, "a", [1] * fs.axis_size("a")),
}  # fmt: skip


@pytest.mark.parametrize("verb", TAKES_NUMBERS)
@pytest.mark.parametrize("axes", [{"a": 1, "b": 1}, {"a": 3, "b": 1}, {"a": 2, "b": 2}], ids=repr)
def test_number_is_the_same_on_every_rank(verb, axes):
    mesh, f = fs.make_mesh(**axes), getattr(fs, verb)
    for axis, n in (("a", mesh.axes["a"]), (("a", "b"), mesh.size)):
        with fs.recording() as log:
            got = fs.shard_map(lambda: [f(x, axis) for x in NUMBERS], mesh=mesh, out_specs=P(), check="always")()  # noqa: B023
        want = [TAKES_NUMBERS[verb](x, n) for x in NUMBERS]
        assert got == want
        assert list(map(type, got)) == list(map(type, want))  # on a mesh of one rank too
        assert not log
    assert fs.shard_map(lambda: f(3, None), mesh=mesh, out_specs=P())() == 3


def test_numbers_and_tensors_of_one_tree():
    def f(x):
        return fs.psum({"x": x, "n": 1, "none": None, "more": [2.5, x.long()]}, "a")

    got = each_rank(fs.make_mesh(a=2), f, torch.tensor([1.0, 2.0]), specs=(P("a"),), out=P())
    assert fs.device_get(got) == {"x": 3.0, "n": 2, "none": None, "more": [5.0, 3]}


@pytest.mark.parametrize("n", [1, 2])
def test_count_of_ranks_scales_a_loss_under_grad_and_vmap(n):
    def f(w, x):
        rows = fs.psum(len(x), "a")
        mean = lambda w: fs.psum((fs.pvary(w, "a") * x).sum(), "a") / rows  # noqa: E731
        return fs.value_and_grad(mean)(w), torch.vmap(lambda t: t * fs.psum(1, "a"))(x)

    x = torch.arange(4.0)
    run = fs.shard_map(f, mesh=fs.make_mesh(a=n), in_specs=(P(), P("a")), out_specs=(P(), P("a")), check="always")
    (loss, grad), scaled = fs.device_get(run(torch.tensor(2.0), x))
    assert (loss, grad) == (2 * x.mean(), x.mean())
    assert torch.equal(scaled, n * x)
    abstract = run.on(fs.make_mesh(kind="abstract", a=2 * n))
    assert fs.check(abstract, torch.tensor(2.0), x).transfers


@pytest.mark.parametrize("verb", ["psum", "pmean", "pmax", "pmin"])
def test_number_that_differs_between_ranks_is_an_error(verb):
    def scaled(x):
        return x * getattr(fs, verb)(len(x), "a")

    run = fs.shard_map(scaled, mesh=fs.make_mesh(a=2), in_specs=P("a"), out_specs=P("a"))
    assert fs.device_get(run(torch.ones(4))).tolist() == [4.0 if verb == "psum" else 2.0] * 4
    text = error_text(run, torch.ones(3))
    assert f": {verb} of a value that is invariant over 'a' with a number that differs between its ranks" in text
    assert "  a=0  2\n  a=1  1\n" in text


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("verb", TAKES_TENSORS)
def test_error_of_other_collectives_names_the_leaf_that_is_a_number(verb, n):
    text = error_text(each_rank, fs.make_mesh(a=n), lambda x: TAKES_TENSORS[verb]({"x": x, "n": [1, 2.5]}),
                      torch.ones(2, 2), specs=(P(),), out=P())  # fmt: skip
    fix = "\n  fix: torch.as_tensor(x)"
    assert text == (
        f"2 problems\n{verb}: x['n'][0] must be a Tensor, got 1{fix}\n{verb}: x['n'][1] must be a Tensor, got 2.5{fix}"
    )


@pytest.mark.parametrize("n", [1, 2])
def test_a_dim_that_a_leaf_lacks_is_an_error_on_every_mesh(n):
    text = error_text(each_rank, fs.make_mesh(a=n), lambda x: fs.all_gather({"x": x, "s": x.sum()}, "a"),
                      torch.ones(2), specs=(P(),), out=P())  # fmt: skip
    assert text == "all_gather: x['s']: a 0-d tensor has no dim 0\n  shape  []"


@pytest.mark.parametrize("verb", ["pmax", "pmin"])
def test_complex_tensors_have_no_maximum(verb):
    text = error_text(each_rank, fs.make_mesh(a=2), lambda x: getattr(fs, verb)(x, "a"), torch.ones(2) * 1j,
                      specs=(P("a"),), out=P())  # fmt: skip
    assert text == f"{verb}: x is complex, and complex numbers have no order\n  fix: x.abs()"


def test_axis_position_is_the_number_that_axis_index_has():
    mesh = fs.make_mesh(a=2, b=3)
    asked = [("a", "b"), ("b", "a"), ("b",), "a", "b"]
    f = lambda x: torch.stack([x.sum() * 0 + fs.axis_position(axis) for axis in asked])[:, None, None]  # noqa: E731
    g = lambda x: torch.stack([fs.axis_index(axis) for axis in asked])[:, None, None]  # noqa: E731
    got, want = (each_rank(mesh, h, torch.ones(2, 3), specs=(P("a", "b"),), out=P(None, "a", "b")) for h in (f, g))
    assert got.tolist() == want.tolist()
    assert got[0].flatten().tolist() == list(range(6))
    one = fs.shard_map(lambda x: x + fs.axis_position("a"), mesh=fs.make_mesh(a=1), in_specs=(P(),), out_specs=P())
    assert fs.device_get(one(torch.zeros(()))) == 0
    text = error_text(fs.axis_position, "a")
    assert text.startswith("axis_position: called outside shard_map")


def test_the_empty_string_is_not_an_axis():
    for f in (lambda x: fs.psum(x, ""), lambda x: fs.axis_size(""), lambda x: fs.axis_position("")):
        assert "the mesh has no axis ''" in error_text(each_rank, fs.make_mesh(a=2), f, torch.ones(2), specs=(P("a"),),
                                                       out=P())  # fmt: skip


# --- bools, and global shapes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2])
def test_bools_have_no_sum_or_mean_on_any_mesh(n):
    mesh = fs.make_mesh(a=n)
    counts = "counts; pmin(x, axis) is whether all ranks have True, pmax(x, axis) whether any has"

    def error(f):
        return error_text(each_rank, mesh, f, torch.ones(2 * n), specs=(OVER_A,), out=P())

    for f in (lambda x: fs.psum({"n": x, "ok": [x > 0]}, "a"), lambda x: fs.psum_scatter({"ok": [x > 0]}, "a")):
        verb = f.__code__.co_names[1]
        assert error(f) == (
            f"{verb}: x['ok'][0] is bool, and its sum would be a logical or\n"
            f"  at test_collectives.py:{f.__code__.co_firstlineno} in <lambda>\n  fix: {verb}(x.int(), axis) {counts}"
        )
    assert error(lambda x: fs.pmean(x > 0, "a")).startswith("pmean: x is bool, and its mean is not\n")
    tree = each_rank(mesh, lambda x: fs.psum({"n": x.sum(), "ok": (x > 0).all().int()}, "a"), torch.ones(2 * n),
                     specs=(OVER_A,), out=P())  # fmt: skip
    assert (tree["n"].item(), tree["ok"].item()) == (2 * n, n)


SPLITS = [({"a": 2}, (7, 3), P("a")), ({"a": 4}, (2, 3), P("a")), ({"a": 2, "b": 2}, (7, 5), P("b", "a")),
          ({"a": 2, "b": 3}, (5, 4), P(None, ("b", "a"))), ({"a": 2}, (6, 3), P("a")),
          ({"a": 1}, (7, 3), P("a"))]  # fmt: skip


@pytest.mark.parametrize(("axes", "shape", "spec"), SPLITS)
def test_the_global_shape_of_a_part_is_the_same_on_every_rank(axes, shape, spec):
    def draw(x, other):
        assert fs.global_shape(x, spec) == shape
        assert torch.func.vmap(lambda row: row + math.prod(fs.global_shape(row, P())))(x).shape == x.shape
        return fs.random.normal(fs.key(0), fs.global_shape(x, spec), spec=spec)

    # `other` has parts as long as those of x on some ranks: an abstract mesh finds the size of x by x itself.
    x, other = torch.zeros(shape), torch.zeros([n + 1 for n in shape])
    f = fs.shard_map(draw, mesh=fs.make_mesh(**axes), in_specs=(spec, spec), out_specs=spec, check="always")
    assert fs.device_get(f(x, other)).equal(fs.random.normal(fs.key(0), shape))
    checked = fs.check(f, x, other)
    assert (checked.result.shape, checked.transfers) == (shape, ())
    with fs.recording() as moved:
        f(x, other)
    uneven = any(n % math.prod(axes[a] for a in over) for n, over in zip(shape, spec.parts(2), strict=True))
    assert bool(moved) is (uneven or shape == (6, 3))  # `other` is uneven there


def test_sizes_that_an_abstract_mesh_can_only_have_from_arguments():
    def dropout(x, w):
        assert fs.global_shape(x + 1, P("a")) == (7, 3)
        return fs.nn.dropout(x + 1, 0.5, key=fs.key(0), spec=P("a")), fs.global_shape(fs.pslice(w, "a"), P("a"))[0]

    f = fs.shard_map(dropout, mesh=fs.make_mesh(a=2), in_specs=(OVER_A, P()), out_specs=(OVER_A, P()))
    result = fs.check(f, torch.zeros(7, 3), torch.zeros(5)).result
    assert (result[0].shape, result[1]) == ((7, 3), 5)
    unknown = fs.shard_map(
        lambda x: x * fs.global_shape(x[:2], P("a"))[0], mesh=f.mesh, in_specs=OVER_A, out_specs=OVER_A
    )
    assert "must be known to an abstract mesh" in error_text(fs.check, unknown, torch.zeros(7, 3))


@pytest.mark.parametrize("check", ["call", "fs.check"])
def test_error_texts_of_global_shapes_that_differ_between_ranks(check):
    def by_product(x):
        return x + fs.random.normal(fs.key(0), (len(x) * fs.axis_size("a"), 2), spec=P("a"))

    mesh = fs.make_mesh(a=2)
    call = (lambda f, x: f(x)) if check == "call" else fs.check

    def error(f):
        return error_text(call, fs.shard_map(f, mesh=mesh, in_specs=OVER_A, out_specs=OVER_A), torch.ones(7, 2))

    line = by_product.__code__.co_firstlineno + 1
    assert error(by_product) == (
        f"test_collectives.py:{line} in by_product: "
        "random.normal with a global shape that differs between ranks of 'a'\n"
        '    return x + fs.random.normal(fs.key(0), (len(x) * fs.axis_size("a"), 2), spec=P("a"))\n'
        "               ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^\n"
        "  a=0  (8, 2)\n  a=1  (6, 2)\n"
        "  each takes its part of another array: "
        "a local size times fs.axis_size is the global size only where the axis divides it\n"
        "  fix: if x is a tensor that 'a' splits:  fs.global_shape(x, P(\"a\"))\n"
        "  or, if it is of another array:  use the same one on every rank"
    )
    assert "local_range with a global size" in error(
        lambda x: x + fs.local_range(len(x), "a", size=len(x) * fs.axis_size("a"))[0]
    )
    # Each rank's draw by a key of its own is not a part of one: its shape may differ.
    mine = lambda x: x + fs.random.normal(fs.fold_in(fs.key(0), fs.axis_index("a")), tuple(x.shape))  # noqa: E731
    call(fs.shard_map(mine, mesh=mesh, in_specs=OVER_A, out_specs=OVER_A), torch.ones(7, 2))


def test_a_global_shape_of_what_is_not_a_part_is_an_error():
    def f(x):
        return x + fs.global_shape(x[: 1 + fs.axis_index("a")], P("a"))[0]

    text = error_text(each_rank, fs.make_mesh(a=2), f, torch.ones(7), specs=(OVER_A,))  # of either rank
    assert text.startswith("global_shape: x is not this rank's part of an array with spec P('a')\n  shape  [")
    assert "\n  3 over ('a',) splits into [2, 1]; this rank has " in text


# --- rows whose numbers are values ---------------------------------------------------------------------------


def _counted(n):
    return torch.tensor([[(i + 2 * j) % 4 for j in range(n)] for i in range(n)])  # of rows from i to j, some 0


@pytest.mark.parametrize("n", [1, 3, 8])
def test_rows_arrive_in_the_order_of_the_ranks_and_padded_ones_first(n):
    counts = _counted(n)

    def f(send):
        me = int(fs.axis_index("a"))
        x = 100.0 * me + torch.arange(float(send.sum()))[:, None].expand(-1, 2)
        got = fs.all_to_all_rows({"x": x, "half": x[:, 0].half(), "flag": x[:, :1] > 100 * me}, "a", send[0])
        padded = fs.all_to_all_rows(x, "a", send[0], counts[:, me], most=4)
        back = fs.all_to_all_rows(padded, "a", counts[:, me], most=4)
        assert torch.equal(back[: len(x)], x)
        assert padded.shape == back.shape == (4 * n, 2)
        assert not padded[len(got["x"]) :].any()
        assert torch.equal(padded[: len(got["x"])], got["x"])
        assert torch.equal(got["half"], got["x"][:, 0].half())
        assert len(got["flag"]) == len(got["x"])
        return torch.cat([got["x"][:, 0], got["x"].new_full((6 * n - len(got["x"]),), -1.0)])

    got = each_rank(fs.make_mesh(a=n), f, counts, specs=(P("a"),)).view(n, -1)
    starts = counts.cumsum(1) - counts
    for j in range(n):
        want = torch.cat([100.0 * i + starts[i, j] + torch.arange(float(counts[i, j])) for i in range(n)])
        assert torch.equal(got[j, : len(want)], want)


@pytest.mark.parametrize(("mesh", "axis"), [({"a": 1}, "a"), ({"a": 4}, "a"), ({"a": 2, "b": 3}, ("b", "a"))])
def test_take_rows_equals_indexing_the_gathered_rows(mesh, axis):
    x = torch.randn(7, 2, dtype=torch.float64)  # some ranks have fewer rows, or none

    def f(x):
        me, k = fs.axis_index(axis), int(fs.axis_index(axis))
        rows = (torch.arange(3 * k) * (me + 2)) % 7  # none on the first rank, and some twice
        full = fs.all_gather(x, axis, size=7)
        total = lambda take: fs.grad(lambda x: fs.psum((take(x) ** 2 * (1 + me)).sum(), axis))(x)  # noqa: E731
        assert torch.equal(fs.take_rows(x, axis, rows), full[rows])
        want = total(lambda x: fs.all_gather(x, axis, size=7)[rows])
        torch.testing.assert_close(total(lambda x: fs.take_rows(x, axis, rows)), want, rtol=1e-12, atol=1e-12)
        return fs.psum(full.sum() * 0, axis)

    fs.shard_map(f, mesh=fs.make_mesh(**mesh), in_specs=(P(axis),), out_specs=P())(x)


ROW_ERRORS = [
    (lambda x: fs.all_to_all_rows(x, "a", [1, 2]), "all_to_all_rows: x has 2 rows, and send has 3\n"),
    (lambda x: fs.all_to_all_rows(x, "a", [3, -1]), "all_to_all_rows: x has 2 rows, and send has 2\n"),
    (lambda x: fs.all_to_all_rows(x, "a", [1, 1], [2, 1]), "rank [01] sends 1 row to rank 0, which expects 2\n"),
    (lambda x: fs.all_to_all_rows(x, "a", [2]), "all_to_all_rows: send must have a number of rows for each of 2 ranks"),
    (lambda x: fs.all_to_all_rows(x, "a", torch.ones(2)), "all_to_all_rows: send must be integers"),
    (lambda x: fs.all_to_all_rows(x, "a", [2, 0], most=1), "send = \\[2, 0\\], most = 1"),
    (lambda x: fs.all_to_all_rows(x.sum(), "a", [1, 1]), "all_to_all_rows: x: a 0-d tensor has no dim 0"),
    (lambda x: fs.all_to_all_rows(W_INVARIANT[:2], "a", x.long().flatten()[:2] * 0 + 1), "all_to_all_rows"),
    (lambda x: fs.take_rows(x, "a", torch.tensor([4])), "take_rows: indices are 4 to 4, and x has 4 rows\n"),
    (lambda x: fs.take_rows({"x": x, "y": x[:1]}, "a", torch.tensor([0])), "take_rows: rows must be 1-d, and x have"),
]
W_INVARIANT = torch.ones(3, 1)


@pytest.mark.parametrize(("f", "text"), ROW_ERRORS)
def test_wrong_counts_of_rows_are_errors(f, text):
    with pytest.raises(ShardingError, match=text):
        each_rank(fs.make_mesh(a=2), f, torch.ones(4, 2), specs=(P("a"),))


def test_more_rows_than_most_are_an_error_of_the_device_where_the_host_reads_nothing(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    f = lambda x: fs.all_to_all_rows(x, "a", torch.tensor([2, 0]), most=1)  # noqa: E731
    with pytest.raises(IndexError, match="out of bounds"):
        each_rank(fs.make_mesh(a=2), f, torch.ones(4, 2), specs=(P("a"),))


def test_counts_that_vary_over_an_axis_over_which_the_rows_do_not():
    def f(x):
        return fs.all_to_all_rows(x, "a", 1 + 0 * fs.axis_index("b").expand(2))

    want = "send varies over 'b', and x does not\\n.*\\n  fix: fs.pvary\\(x, 'b'\\)"
    with pytest.raises(ShardingError, match=want):
        each_rank(fs.make_mesh(a=2, b=2), f, torch.ones(4, 2), specs=(P("a"),))


def test_rows_are_recorded_with_their_bytes_and_are_balanced_without_values():
    counts = _counted(4)

    def f(x, send):
        rows = int(send.sum()) if has_values() else 6
        loss = lambda x: fs.psum(fs.all_to_all_rows(x[:rows], "a", send[0]).square().sum(), "a")  # noqa: E731
        return fs.grad(loss)(x)

    args = torch.ones(4 * 8, 3), counts
    mapped = fs.shard_map(f, mesh=fs.make_mesh(a=4), in_specs=(P("a"), P("a")), out_specs=P("a"))
    with fs.recording() as log:
        mapped(*args)
    sent = {(t.rank, t.phase): t.sent for t in log if t.op == "all_to_all_rows"}
    others = counts * (1 - torch.eye(4, dtype=torch.int64))
    assert sent == {(r, phase): int(n) * 12 for phase, sums in (("forward", others.sum(1)), ("backward", others.sum(0)))
                    for r, n in enumerate(sums)}  # fmt: skip
    dry = fs.plan(mapped.on(fs.make_mesh(kind="abstract", a=4)), *args).transfers
    assert [(t.sent, t.phase) for t in dry if t.op == "all_to_all_rows"] == [(48, "forward"), (48, "backward")]
    fs.check(mapped.on(fs.make_mesh(kind="abstract", a=4)), *args)
