"""The checker types every operation, names the line of a wrong program, and changes no result of a correct one."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import numpy as np
import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from fshard._core import region as of_call
from tests.corpus import refused
from tests.lib.assertions import error_text

MESH = fs.make_mesh(data=2, model=2)
BOTH = {"data", "model"}


def mapped(f, ins, out, mesh=MESH, **options):
    return fs.shard_map(f, mesh=mesh, in_specs=ins, out_specs=out, **options)


def types(f, specs, *args):
    """Return the axes that each result of `f` varies over, and those it is invariant over."""
    by_rank = {}

    def record_types(*local):
        infos = [of_call.checker().info(x) for x in fs.tree.leaves(f(*local))]
        by_rank[of_call.region().rank] = [(set(i.type.varying), set(i.type.invariant)) for i in infos]
        return ()

    fs.shard_map(record_types, mesh=MESH, in_specs=specs, out_specs=P(), check="always")(*args)
    first, *others = by_rank.values()
    assert others == [first] * (MESH.size - 1)
    return first


def error_of(f, ins, out, *args, **options):
    return error_text(mapped(f, ins, out, check="always", **options), *args)


X, W = torch.randn(4, 8), torch.randn(8, 4)
ROWS, COLUMNS = P("data"), fs.column("model")


# --- types of results -----------------------------------------------------------------------------------------

V_DATA, V_BOTH, V_NONE, FREE = ({"data"}, {"model"}), (BOTH, set()), (set(), BOTH), (set(), set())
CONSTANT, INTEGERS, LAYER = torch.linspace(0, 1, 8), torch.arange(8), torch.nn.Linear(8, 8)

RESULT_TYPES = {
    "argument": (lambda x, w: x, V_DATA),
    "arithmetic": (lambda x, w: x * 2 + 1, V_DATA),
    "product of two that vary over the same axis": (lambda x, w: x * x.sum(), V_DATA),
    "pvary, then a product": (lambda x, w: fs.pvary(x, "model") @ fs.pvary(w, "data"), V_BOTH),
    "psum of one axis": (lambda x, w: fs.psum(fs.pvary(x, "model"), "model"), V_DATA),
    "psum of a tree": (lambda x, w: fs.psum({"x": x}, "data")["x"], V_NONE),
    "psum of both": (lambda x, w: fs.psum(fs.pvary(x, "model"), ("data", "model")), V_NONE),
    "pmax": (lambda x, w: fs.pmax(x, "data"), V_NONE),
    "all_gather": (lambda x, w: fs.all_gather(x, "data"), V_DATA),
    "all_gather to invariant": (lambda x, w: fs.all_gather(x, "data", to="invariant"), V_NONE),
    "psum_scatter": (lambda x, w: fs.psum_scatter(x, "data"), V_DATA),
    "pslice": (lambda x, w: fs.pslice(x, "model"), V_BOTH),
    "all_to_all": (lambda x, w: fs.all_to_all(x, "data", split=1, concat=0), V_DATA),
    "all_to_all_rows": (lambda x, w: fs.all_to_all_rows(x, "data", (x[0, :2] > 9).long() + 1), V_DATA),
    "take_rows": (lambda x, w: fs.take_rows(x, "data", (x[0] > 9).long()), V_DATA),
    "ppermute": (lambda x, w: fs.ppermute(x, "data", [(0, 1)]), V_DATA),
    "ppermute, to a rank that passes zeros": (lambda x, w: fs.ppermute(
        torch.zeros(2, 8) if of_call.region().coords["model"] else fs.pvary(x, "model"), "model", [(0, 1)]), V_BOTH),
    "axis_index": (lambda x, w: fs.axis_index("model"), ({"model"}, set())),
    "made from nothing": (lambda x, w: torch.arange(3.0), (set(), set())),
    "zeros like": (lambda x, w: torch.zeros_like(x), (set(), set())),
    "zeros plus a varying tensor": (lambda x, w: torch.zeros_like(x) + w.sum(), ({"model"}, {"data"})),
    "comparison": (lambda x, w: x > w.sum(), V_BOTH),
    "argmax": (lambda x, w: x.argmax(-1), V_DATA),
    "view": (lambda x, w: x[0].view(2, 4).T, V_DATA),
    "in place": (lambda x, w: x.clone().mul_(2), V_DATA),
    "write through a view": (lambda x, w: _written(x), V_DATA),
    "out argument": (lambda x, w: torch.exp(x, out=torch.empty(2, 8)), V_DATA),
    "overwritten": (lambda x, w: torch.zeros(2, 8).copy_(x), V_DATA),
    "operation with several results": (lambda x, w: x.max(-1).values, V_DATA),
    "operation on a list": (lambda x, w: torch.stack([x, 2 * x]), V_DATA),
    "foreach": (lambda x, w: torch._foreach_mul([x], 2.0)[0], V_DATA),
    "gradient": (lambda x, w: fs.grad(lambda w: _loss(w, x))(w), ({"model"}, {"data"})),
    "vjp": (lambda x, w: torch.func.vjp(lambda x: x * x, x)[1](x)[0], V_DATA),
    "jvp": (lambda x, w: torch.func.jvp(lambda x: x * x, (x,), (x,))[1], V_DATA),
    "vmap of grad": (lambda x, w: torch.func.vmap(torch.func.grad(lambda r: (r * r).sum()))(x), V_DATA),
    "hessian": (lambda x, w: torch.func.hessian(lambda r: (r**3).sum())(x[0]), V_DATA),
    "remat": (lambda x, w: fs.grad(lambda w: _loss(w, x, fs.remat))(w), ({"model"}, {"data"})),
    "nested grad": (
        lambda x, w: fs.grad(lambda w: fs.psum(fs.grad(lambda w: _loss(w, x))(w).sum(), "model"))(w),
        ({"model"}, {"data"}),
    ),
    "draw with a spec": (lambda x, w: fs.random.normal(fs.key(0), (4, 8), spec=ROWS), V_DATA),
    "draw with a key that varies": (lambda x, w: fs.random.normal(_key_of("data"), (4, 8)), V_DATA),
    "draw with a split key that varies": (lambda x, w: fs.random.bits(fs.split(_key_of("data"))[0], (3,)), V_DATA),
    "dropout with the spec of its operand": (
        lambda x, w: fs.nn.dropout(x, 0.5, key=fs.key(0), spec=ROWS), V_DATA),
    "captured": (lambda x, w: CONSTANT[:2] * 2, V_NONE),
    "captured integers": (lambda x, w: INTEGERS + 1, FREE),
    "captured with a varying tensor": (lambda x, w: x * CONSTANT, V_DATA),
    "numpy array": (lambda x, w: torch.from_numpy(x.numpy().copy()) + torch.as_tensor(np.ones(8)), FREE),
    "Python list": (lambda x, w: torch.tensor([1.0]) + torch.Tensor([2.0]), FREE),
    "differentiated zeros": (lambda x, w: fs.grad(lambda d: (d * d).sum())(torch.zeros(3)), V_NONE),
    "zeros that require a gradient": (lambda x, w: torch.zeros(3, requires_grad=True) * 1, V_NONE),
    "a parameter": (lambda x, w: torch.nn.Parameter(torch.zeros(3)) * 1, V_NONE),
    "wrapped zeros": (lambda x, w: torch.func.grad(lambda d: (d * d).sum())(torch.zeros(3)), V_NONE),
    "differentiated zeros like": (lambda x, w: (0.1 * torch.ones_like(x)).requires_grad_() * 1, V_DATA),
    "differentiated copy of zeros in its place": (lambda x, w: x.clone().zero_().requires_grad_() * 1, V_DATA),
    "zeros with other data": (lambda x, w: setattr(z := torch.zeros(2, 8), "data", x) or z * 1, V_DATA),
    "differentiated new_zeros": (lambda x, w: x.new_zeros(3).requires_grad_() * 1, V_NONE),
}  # fmt: skip


def _written(x):
    buffer = torch.zeros(4, 8)
    buffer[:2] = x
    return buffer


def _loss(w, x, wrap=lambda f: f):
    block = wrap(lambda w, x: torch.tanh(x @ w).square().sum())
    return fs.psum(block(fs.pvary(w, "data"), fs.pvary(x, "model")), ("data", "model"))


def _key_of(axis):
    return fs.fold_in(fs.key(0), fs.axis_index(axis))


@pytest.mark.parametrize("name", RESULT_TYPES)
def test_type_of_result(name):
    f, expected = RESULT_TYPES[name]
    assert types(f, (ROWS, COLUMNS), X, W) == [expected]


def test_write_through_a_view_types_overlapping_views():
    def f(x, w):
        buffer = torch.zeros(4, 8)
        row = buffer[0]
        buffer[1].copy_(x[0])
        return row, buffer

    assert types(f, (ROWS, COLUMNS), X, W) == [(set(), set()), V_DATA]  # row 0 does not overlap


def test_write_through_an_alias_types_the_storage():
    def f(x, w):
        v = fs.pvary(w, "data")
        v.add_(fs.axis_index("data"))
        return w * 1, torch.nn.Parameter(x) * 2

    assert types(f, (ROWS, COLUMNS), X, W) == [V_BOTH, V_DATA]


def test_write_to_one_leaf_of_a_transfer_does_not_type_the_others():
    def f(x, w):
        a, b = fs.psum((x.sum(0), 2 * x.sum(0)), "data")
        a.mul_(fs.axis_index("model") + 1)
        return a, b

    assert types(f, (ROWS, COLUMNS), X, W) == [({"model"}, {"data"}), V_NONE]


def test_batch_norm_types_its_running_statistics():
    def f(x, w):
        mean, var = torch.zeros(8), torch.ones(8)
        y = torch.nn.functional.batch_norm(x, mean, var, training=True)
        return y, mean, var

    assert types(f, (ROWS, COLUMNS), X, W) == [V_DATA] * 3


def test_fused_step_types_each_row_of_its_lists():
    def f(x, w):
        params, grads = [x.clone(), w.clone()], [x, w]
        m, v = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
        steps = [torch.ones(())] * 2
        torch._fused_adamw_(params, grads, m, v, [], steps, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0,
                            amsgrad=False, maximize=False)  # fmt: skip
        return *params, *m

    assert types(f, (ROWS, COLUMNS), X, W) == [V_DATA, ({"model"}, {"data"})] * 2


def test_axis_of_one_rank_has_no_types():
    mesh = fs.make_mesh(data=1, model=2)
    f = mapped(lambda x: fs.psum(fs.psum(x, "data"), "data"), (P("data"),), P(), mesh=mesh, check="always")
    torch.testing.assert_close(fs.device_get(f(X)), X)


# --- operands that may mix ------------------------------------------------------------------------------------

MIXES = {
    "integers with floats": lambda x, w, i: x * i.sum(),
    "cast mask": lambda x, w, i: x * (i > 0).float().sum(),
    "tensors made in the region": lambda x, w, i: x * torch.linspace(0, 1, 8) + torch.ones(2, 8),
    "Python numbers": lambda x, w, i: x * 3 + 0.5,
    "axis_index": lambda x, w, i: x * fs.axis_index("data"),
    "varying index": lambda x, w, i: fs.pvary(w, "data")[:, fs.axis_index("data")],
    "comparison of invariant and varying": lambda x, w, i: x * (fs.psum(x, "data").sum() > x.sum()),
    "draw from an explicit generator": lambda x, w, i: x + torch.randn(8, generator=torch.Generator().manual_seed(0)),
    "dropout with rate 0": lambda x, w, i: torch.nn.functional.dropout(x, 0.0),
    "attention": lambda x, w, i: torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "captured parameters that nothing differentiates": lambda x, w, i: LAYER(x),
    "captured parameters on the way to a gradient": lambda x, w, i: fs.grad(lambda x: LAYER(x).sum())(x),
    "drawn index": lambda x, w, i: x[:, fs.random.randint(fs.key(0), (2,), high=8)],
}  # fmt: skip


def line_of(text):
    """Return the number of the first line of this file that contains `text`."""
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("name", MIXES)
def test_operands_mix_without_an_error(name):
    types(MIXES[name], (ROWS, COLUMNS, P()), X, W, torch.arange(3))


def test_offset_in_a_transfer_buffer_may_differ_between_ranks():
    """The offset of b differs between ranks, since a leaf split unevenly over model precedes it in the buffer."""
    mesh = fs.make_mesh(data=2, model=2)

    def f(a, b):
        a, b = fs.psum((a, b), "data")
        return fs.psum(fs.pvary(b, "model").sum() + a.sum(), "model")

    a, b = torch.ones(2, 3), torch.ones(2, 4)
    step = mapped(f, (P("data", "model"), P("data")), P(), mesh=mesh, check="always")
    assert float(step(a, b)) == 2 * 8 + 6


def test_ranks_may_run_a_line_for_different_leaves_that_are_split_unevenly():
    """The optimizer slices leaves that end inside a vector register: `a` on the first rank, `d` on the second."""
    opt = fs.optim.sgd(0.1)
    specs = {"a": P("model"), "b": P(), "c": P(), "d": P("model")}
    params = {name: torch.ones(n) for name, n in (("a", 33), ("b", 20), ("c", 40), ("d", 31))}

    def step(params, grads):
        return opt.update(grads, opt.init(params), params)[0]

    out = mapped(step, (specs, specs), specs, check="always")(params, params)
    assert all(torch.equal(fs.device_get(out[name]), params[name] - 0.1) for name in params)


# --- full texts of errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", refused.CASES)
def test_error_text_of_refused_program(name):
    assert refused.text_of(name) == refused.texts()[name]


def test_refused_texts_are_those_of_the_programs():
    assert list(refused.texts()) == list(refused.CASES)


# --- operands that a gradient can reach -----------------------------------------------------------------------


def gradient_by_func(f, w):
    return torch.func.grad(f)(w)


def gradient_by_backward(f, w):
    w = w.detach().requires_grad_()
    f(w).backward()
    return w.grad


def gradient_by_autograd(f, w):
    w = w.detach().requires_grad_()
    return torch.autograd.grad(f(w), w)[0]


GRADIENTS = {f.__name__: f for f in (fs.grad, gradient_by_func, gradient_by_backward, gradient_by_autograd)}
GRADIENTS["under vmap"] = lambda f, w: torch.func.vmap(torch.func.grad(f))(w[None])[0]
GRADIENTS["of a gradient"] = lambda f, w: fs.grad(lambda w: torch.func.grad(f)(w).square().sum())(w)
GRADIENTS["recomputed"] = lambda f, w: fs.grad(fs.remat(f))(w)


def gradient(name, f, w):
    return fs.grad(f)(w) if name == "grad" else GRADIENTS[name](f, w)


@pytest.mark.parametrize("name", GRADIENTS)
def test_invariant_operand_must_not_mix_where_a_gradient_reaches_it(name):
    def step(w, x):
        def loss(w):
            return fs.pmean((x * w).square().mean(), "data")  # the mixture

        return gradient(name, loss, w)

    text = error_of(step, (P(), ROWS), P(), X[0], X)
    assert text.startswith(
        f"test_checker.py:{line_of('# the mix' + 'ture')} in loss: mul of an operand that is invariant"
    )


@pytest.mark.parametrize("name", GRADIENTS)
def test_invariant_operand_mixes_where_no_gradient_reaches_it(name):
    def step(w, x, frozen, teacher):
        def loss(w):
            with torch.no_grad():
                target = x * w * frozen
            p = fs.pvary(w, "data")
            out = x * p * (frozen + 1) + x * w.detach()
            return fs.pmean(((out - target).square() * teacher).mean(), "data")

        w = w - 0.1 * gradient(name, loss, w)
        return (x * w - frozen) / teacher.sqrt()

    x, frozen, teacher = X.abs(), X[1], torch.tensor(2.0)
    f = mapped(step, (P(), ROWS, P(), P()), ROWS, check="always")
    fs.verify(f, X[0], x, frozen, teacher)


@pytest.mark.parametrize("name", GRADIENTS)
def test_loss_that_varies_is_an_error_however_it_is_differentiated(name):
    def step(w, x):
        def loss(w):
            return (x * fs.pvary(w, "data")).square().mean()  # the local loss

        return gradient(name, loss, w)

    text = error_of(step, (P(), ROWS), P(), X[0], X)
    assert text.startswith(f"test_checker.py:{line_of('# the lo' + 'cal loss')} in loss: the loss that is")


def test_error_of_a_result_names_the_mixture():
    def step(w, x):
        total = x.sum() / w.sum()
        return total.sqrt()

    text = error_of(step, (P(), ROWS), P(), X[0].abs(), X.abs())
    assert f"result varies since test_checker.py:{line_of('total = x.sum() / w' + '.sum()')} in step" in text
    assert 'if each rank has a part of a sum:  total = fs.psum(x.sum(), "data") / w.sum()' in text


def test_argument_must_not_be_overwritten_by_values_that_vary():
    def step(w, x):
        w.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return w

    text = error_of(step, (P(), ROWS), P(), X[0], X)
    assert "add in place writes values that vary over 'data' into" in text
    assert 'w.mul_(0.9).add_(fs.pmean(x.mean(0), "data"), alpha=0.1)' in text
    f = mapped(lambda w, x: w.clone().add_(x.mean(0)), (P(), ROWS), P("data"), check="always")
    f(X[0], X)  # a copy may vary


def test_pvary_of_a_frozen_value_that_varies_changes_nothing():
    def features(p, x):
        return torch.tanh(x * fs.pvary(p, "data"))

    def step(student, teacher, x):
        def loss(p):
            return fs.pmean((features(p, x) - features(teacher, x)).square().mean(), "data")

        teacher = fs.pvary(teacher, "data")
        return fs.grad(loss)(student)

    fs.verify(mapped(step, (P(), P(), ROWS), P(), check="always"), X[0], X[1], X)


def test_parts_of_a_draw_mix_with_invariant_values():
    def step(mean, std):
        samples = mean + std * fs.random.normal(fs.key(0), (4, 8), spec=ROWS)
        return fs.pmean(samples.mean(0), "data")

    fs.verify(mapped(step, (P(), P()), P(), check="always"), X[0], torch.tensor(2.0))


def test_specs_that_were_not_passed_to_a_model_are_told_at_the_users_call():
    cfg = fs.models.llama.Config(vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1,
                                 num_attention_heads=2)  # fmt: skip
    described = fs.models.llama.init(cfg)
    specs = fs.fully_shard(fs.models.llama.specs(cfg), described, axis="data", min_size=1)

    def loss(p, ids):
        return fs.models.llama.loss(cfg, p, ids, ids, layout=fs.models.llama.Layout("data"))  # without specs

    f = fs.shard_map(fs.grad(loss), mesh=MESH, in_specs=(specs, ROWS), out_specs=specs)
    text = error_text(fs.check, f, described, torch.zeros(4, 4, dtype=torch.int64))
    assert text.startswith(f"test_checker.py:{line_of('# with' + 'out specs')} in loss: ")
    assert text.endswith("fix: pass loss the spec of p['head']['w'], which names 'data'")


def test_features_that_vary_before_a_head_over_all_ranks_are_to_be_gathered_as_one_value():
    def step(gather):
        def loss(w, x):
            x = x.exp()
            if gather:
                x = fs.all_gather(x, "data")
            return fs.nn.linear(x, w.mT, axis=("data", "model")).sum()

        f = fs.shard_map(fs.grad(loss, 1), mesh=MESH, in_specs=(P(("data", "model")), ROWS), out_specs=ROWS)
        return error_text(fs.check, f, torch.zeros(8, 3), torch.zeros(4, 3))

    line = line_of('x = fs.all_gather(x, "data")')
    assert f'fix: at test_checker.py:{line}:  x = fs.all_gather(x, "data", to="invariant")\n' in step(True)
    assert step(False).endswith("or x = fs.all_gather(x, 'data', to='invariant')")


# --- tensors that the function captures -----------------------------------------------------------------------


def test_gradient_of_a_captured_module_is_right_on_every_mesh_with_pvary():
    def step(x):
        varying = fs.pvary(dict(LAYER.named_parameters()), "data")
        loss = fs.pmean(torch.func.functional_call(LAYER, varying, (x,)).square().mean(), "data")
        return torch.autograd.grad(loss, tuple(LAYER.parameters()))

    fs.verify(mapped(step, (ROWS,), P(), check="always"), X)


def test_copy_of_a_captured_module_trains_inside():
    def step(x):
        layer = copy.deepcopy(LAYER)
        optimizer = torch.optim.Adam(layer.parameters(), 0.1)
        for _ in range(2):
            varying = fs.pvary(dict(layer.named_parameters()), "data")
            optimizer.zero_grad()
            fs.pmean(torch.func.functional_call(layer, varying, (x,)).square().mean(), "data").backward()
            optimizer.step()
        return [p.detach() for p in layer.parameters()]

    fs.verify(mapped(step, (ROWS,), P(), check="always"), X)


def _loss_of_layer(x):
    return fs.pmean(LAYER(x).square().mean(), "data")


WRITES_TO_GRAD = {
    "backward": lambda x: _loss_of_layer(x).backward(),
    "backward of inputs": lambda x: _loss_of_layer(x).backward(inputs=[LAYER.weight, LAYER.bias]),
    "backward of several losses": lambda x: torch.autograd.backward([_loss_of_layer(x), _loss_of_layer(x)]),
    "assignment": lambda x: [setattr(p, "grad", torch.ones_like(p)) for p in LAYER.parameters()],
}


@pytest.mark.parametrize("name", WRITES_TO_GRAD)
@pytest.mark.parametrize("kind", ["simulated", "abstract"])
def test_write_to_the_grad_of_a_captured_tensor_is_an_error(name, kind):
    f = mapped(WRITES_TO_GRAD[name], (ROWS,), P(), mesh=fs.make_mesh(kind=kind, data=2))
    text = error_text(f if kind == "simulated" else functools.partial(fs.check, f), X)
    assert text.startswith(f"test_checker.py:{line_of(f'    {chr(34)}{name}{chr(34)}: ')} in ")
    assert "writes to the .grad of " in text
    assert all(p.grad is None for p in LAYER.parameters())


def test_value_of_another_rank_is_an_error_also_at_the_next_call():
    kept = functools.cache(lambda: fs.axis_index("data") + torch.ones(8))  # the cached value
    f = mapped(lambda x: fs.pmean((x * kept()).mean(), "data"), (ROWS,), P())
    for _ in range(2):
        text = error_of(lambda x: fs.pmean((x * kept()).mean(), "data"), (ROWS,), P(), X)  # its use
        assert text.startswith(
            f"test_checker.py:{line_of('# its' + ' use')} in <lambda>: uses a tensor that another rank"
        )
        assert f"it was made by add at test_checker.py:{line_of('# the cached' + ' value')}" in text
    kept.cache_clear()
    with pytest.raises(ShardingError, match="another rank made"):
        f(X)


def test_rows_and_columns_that_one_axis_splits_are_accepted_where_the_rows_go_around():
    def grads(w, x):
        def loss(w):
            n = fs.axis_size("data")
            rounds = [fs.ppermute(x, "data", [(i, (i + k) % n) for i in range(n)]) for k in range(1, n)]
            return fs.psum(sum((rows @ w).square().sum() for rows in (x, *rounds)), "data")

        return fs.grad(loss)(w)

    w, x = torch.ones(4, 8), torch.arange(16.0).reshape(4, 4)
    f = fs.shard_map(grads, mesh=MESH, in_specs=(fs.column("data"), ROWS), out_specs=fs.column("data"))
    assert fs.verify(f, w, x)


def test_gradients_of_gathered_leaves_are_accepted_where_a_scatter_sums_them():
    def grads(w, x):
        full = fs.all_gather(w, "data", 1)
        g = fs.grad(lambda full: fs.pmean((x @ full).square().mean(), "data"))(full)
        return w - 0.1 * fs.psum_scatter(g, "data", 1)

    w, x = torch.ones(4, 8), torch.arange(16.0).reshape(4, 4)
    f = fs.shard_map(grads, mesh=MESH, in_specs=(fs.column("data"), ROWS), out_specs=fs.column("data"))
    assert fs.verify(f, w, x)


def test_cached_value_that_is_the_same_on_the_ranks_is_accepted():
    table = functools.cache(lambda: torch.cos(torch.arange(8.0)))
    of_model = functools.cache(lambda at: fs.axis_index("model") + torch.ones(8))

    def f(x, scale):
        kept = mean(x) * of_model(int(fs.axis_index("model")))
        return fs.psum((x * table() * scale).sum() * kept.sum(), ("data", "model"))

    def mean(x, kept={}):  # noqa: B006
        return kept.setdefault("x", fs.pmean(x.mean(0), "data"))

    mapped(f, (ROWS, P()), P(), check="always")(X, torch.tensor(2.0))


# --- fixes of errors ------------------------------------------------------------------------------------------


def test_fix_of_a_line_that_cannot_be_rewritten_is_a_call_before_it():
    def several_lines(x, w):
        return torch.add(
            torch.tanh(x)[0, 0],  # a comment keeps this expression on several lines
            w,
        )

    def augmented_assignment(x, w):
        total = w * 2
        total += torch.tanh(x)[0, 0]
        return total

    def unnamed_operand(x, w):
        return torch.stack([torch.tanh(x)[0, 0].expand(8, 2), w * 2])

    for f, call in [
        (several_lines, 'fs.pvary(w, "data")'),
        (augmented_assignment, 'fs.pvary(total, "data")'),
        (unnamed_operand, 'fs.pvary(..., "data")'),
    ]:
        differentiated = lambda x, w, f=f: fs.grad(lambda w: fs.psum(f(x, w).sum(), ("data", "model")))(w)  # noqa: E731
        text = error_of(differentiated, (ROWS, COLUMNS), P(), X, W)
        assert text.endswith(f"fix: apply {call} to the invariant operand before this line")


def test_fix_of_an_entry_that_is_assigned_is_code():
    def assigns(x):
        totals = torch.zeros(2)
        totals[0] = x.sum()
        return totals

    text = error_of(assigns, ROWS, P(), X)
    assert 'totals[0] = fs.psum(x.sum(), "data")' in text
    assert text.endswith('if each rank has some rows:  fs.all_gather(..., "data", to="invariant")')


def test_fix_without_a_pvary_keeps_the_sum_in_it_together():
    def f(w, v):
        return fs.grad(lambda w: (w * fs.pvary(v + v, "data")).sum())(w)

    assert "(w * (v + v)).sum()" in error_of(f, (P(), P()), P(), torch.ones(4), torch.ones(4))


# --- calls that are checked -----------------------------------------------------------------------------------


def wrong(x):
    return x.sum()


def test_check_first_checks_one_call_of_each_signature():
    calls = []

    def f(x):
        calls.append(of_call.checker() is not None)
        return x * 2

    step = mapped(f, (ROWS,), ROWS)
    for x in (X, X, torch.randn(8, 8), X, X.double()):
        step(x)
    n = MESH.size
    assert [calls[i * n] for i in range(5)] == [True, False, True, False, True]


def test_failed_call_is_checked_again():
    step = mapped(wrong, (ROWS,), P())
    for _ in range(2):
        with pytest.raises(ShardingError, match="varies over 'data'"):
            step(X)


def test_check_never_and_check_always():
    mapped(wrong, (ROWS,), P(), check="never")(X)
    calls = []

    def f(x):
        calls.append(of_call.checker() is not None)
        return x

    step = mapped(f, (ROWS,), ROWS, check="always")
    step(X), step(X)
    assert all(calls)
    with pytest.raises(ShardingError, match="check must be 'first'"):
        mapped(f, (ROWS,), ROWS, check="sometimes")


def test_on_keeps_the_check_option():
    other = fs.make_mesh(data=4, model=1)
    mapped(wrong, (ROWS,), P(), check="never").on(other)(X)
    with pytest.raises(ShardingError, match="varies over 'data'"):
        mapped(wrong, (ROWS,), P()).on(other)(X)


NUMBERS = {
    "alpha of add": lambda w, r: torch.add(w, w, alpha=r),
    "shifts of roll": lambda w, r: torch.roll(w, [r], [0]),
    "foreach": lambda w, r: torch._foreach_mul([w], float(r))[0],
    "fill_": lambda w, r: w.clone().fill_(float(r)),
    "complex number": lambda w, r: (w * complex(r, 0)).real,
    "key": lambda w, r: w + fs.random.normal(fs.key(r), w.shape),
    "index of a Python list": lambda w, r: w.unbind()[r] * 1,
    "Python branch": lambda w, r: w.sin() if r else w.cos(),
    "torch.tensor of a number": lambda w, r: w * torch.tensor(float(r)),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_python_number_that_differs_between_ranks_is_an_error(name):
    f = NUMBERS[name]
    with pytest.raises(
        ShardingError, match=r"a number that differs between its ranks|is not one value|a different part"
    ):
        mapped(lambda w: f(w, int(fs.axis_index("data"))), (P(),), P())(X)


MIXED_DRAWS = {
    "scheduled rate": lambda x, s: x * (fs.random.uniform(fs.key(0), x.shape) < 0.9 - 0.001 * s),
    "noise schedule": lambda x, s: x + fs.random.normal(fs.key(0), x.shape) * (s > 10),
    "drawn integer": lambda x, s: x * fs.random.randint(fs.key(0), x.shape, high=10),
}


@pytest.mark.parametrize("name", MIXED_DRAWS)
def test_value_computed_from_a_draw_must_not_mix_until_it_has_a_gradient(name):
    text = error_of(MIXED_DRAWS[name], (ROWS, P()), ROWS, X, torch.tensor(3))
    assert "of a random draw that is the same on every rank of 'data' with a varying operand" in text


def test_check_values_compares_replicas_on_every_call():
    calls = []

    def f(x):
        calls.append(0)
        number = int(fs.axis_index("model")) if len(calls) > MESH.size else 0
        return {"x": x, "n": torch.tensor(float(number))}

    step = mapped(f, (ROWS,), {"x": ROWS, "n": P()})
    step(X), step(X)  # only the first call is checked
    step = mapped(f, (ROWS,), {"x": ROWS, "n": P()}, check="values")
    for _ in range(2):
        with pytest.raises(ShardingError, match=r"result\['n'\] differs between ranks of 'model'"):
            step(X)


def test_results_are_bitwise_equal_with_and_without_checks():
    cfg = fs.models.gpt2.Config(vocab_size=13, n_positions=6, n_embd=8, n_layer=1, n_head=2, resid_pdrop=0.1,
                                attn_pdrop=0.1, embd_pdrop=0.1)  # fmt: skip
    described, specs = fs.models.gpt2.init(cfg), fs.models.gpt2.specs(cfg, model="model")
    specs = fs.fully_shard(specs, described, axis="data")
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(0.1, specs), fs.optim.adamw(1e-2))
    layout = fs.models.gpt2.Layout("data", "model", True)
    state = {"params": described, "opt": opt.init(described)}
    state_specs = {"params": specs, "opt": opt.specs(specs)}

    def step(state, ids, key):
        def loss(p):
            return fs.models.gpt2.loss(cfg, p, ids[:, :-1], ids[:, 1:], layout=layout, specs=specs, key=key, remat=True)

        value, grads = fs.value_and_grad(loss)(state["params"])
        params, new = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": new}, value

    ids = torch.randint(0, 13, (4, 7), generator=torch.Generator().manual_seed(0))
    results = []
    for check in ("always", "never"):
        f = mapped(step, (state_specs, ROWS, P()), (state_specs, P()), check=check, donate=0)
        placed = fs.materialize(state, state_specs, MESH, key=fs.key(0))
        placed, loss = f(placed, ids, fs.key(1))
        results.append(fs.device_get((placed, loss)))
    for a, b in zip(fs.tree.leaves(results[0]), fs.tree.leaves(results[1]), strict=True):
        assert torch.equal(a, b)


def test_zero_gradient_has_the_type_of_its_parameter():
    def f(p, x):
        grads = fs.grad(lambda p: fs.pmean((fs.pvary(p["used"], "data") * x).mean(), "data"))(p)
        return fs.tree.map(lambda a, b: a - b, p, grads)

    mapped(f, (P(), ROWS), P(), check="always")({"used": X[0], "unused": X[0]}, X)


def test_error_names_the_users_line_and_not_the_library():
    def loss(w, x):
        return fs.psum(fs.nn.linear(x, w).sum(), ("data", "model"))  # the user's line

    text = error_of(fs.grad(loss), (COLUMNS, ROWS), COLUMNS, W, X)
    assert text.startswith(f"test_checker.py:{line_of('# the user' + chr(39) + 's line')} in loss: ")
