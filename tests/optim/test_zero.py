"""ZeRO-1: the state is split over axes of the data and the parameters are not.

The ranks' gradients are multiples of one gradient whose sum it is, exactly in any order of pairs: 8, -4, -2 and -1
times it on four ranks. So a step on any mesh has the bits of the plain step of one device.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import fshard as fs
from fshard import P, checkpoint, optim, tree
from fshard.models import gpt2
from tests.lib.assertions import assert_same, error_text
from tests.optim.test_optim import grads_at, pointers, train


def make_params():
    """Make leaves of even and uneven dims, with empty parts, 0-d, of no elements and of three dtypes."""
    g = torch.Generator().manual_seed(0)
    return {
        "w": torch.randn(16, 8, generator=g),
        "conv": torch.randn(6, 3, 3, 3, generator=g),
        "odd": [torch.randn(7, 5, generator=g), torch.randn(3, generator=g)],
        "half": torch.randn(5, 2, generator=g).bfloat16(),
        "wide": torch.randn(9, generator=g, dtype=torch.float64),
        "scale": torch.randn((), generator=g),
        "frozen": None,
        "empty": torch.zeros(0, 4),
        "one": torch.randn(1, 1, generator=g),
    }


# Placements of parameters, and the axes that a state is split over beside them.
PLAIN = P()
MODEL = {"w": P(None, "model"), "conv": P(), "odd": [P("model"), P()], "half": P(), "wide": P("model"), "scale": P(),
         "frozen": None, "empty": P("model"), "one": P()}  # fmt: skip
LAYOUTS = {
    "data=1": ({"data": 1}, PLAIN, "data", "data"),
    "data=3": ({"data": 3}, PLAIN, "data", "data"),
    "data=5": ({"data": 5}, PLAIN, "data", "data"),
    "2x2": ({"data": 2, "model": 2}, MODEL, "data", "data"),
    "3x2": ({"data": 3, "model": 2}, MODEL, "data", "data"),
    "hybrid": ({"replica": 2, "shard": 2}, PLAIN, ("replica", "shard"), "shard"),
    "hybrid, over both": ({"replica": 2, "shard": 3}, PLAIN, ("replica", "shard"), ("replica", "shard")),
    "an axis of one rank": ({"replica": 2, "shard": 1}, PLAIN, ("replica", "shard"), "shard"),
}
OPTIMIZERS = {
    "sgd": lambda split: optim.sgd(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "dampened": lambda split: optim.sgd(0.05, momentum=0.9, dampening=0.5),
    "adamw": lambda split: optim.adamw(
        optim.warmup(0.02, 3), weight_decay=0.1, mask=lambda p: tree.map(lambda x: x.ndim > 1, p)
    ),
}


def weights(sizes):
    """Make factors [*sizes] of a gradient whose sum over the axes is 1, exactly, one axis after the other."""
    out = torch.ones(())
    for n in sizes:
        out = out[..., None] * torch.tensor([2.0 ** (n - 1), *(-(2.0**i) for i in reversed(range(n - 1)))])
    return out


def step_on(mesh, opt, specs, axis, *, summed=False, **options):
    """Make a step of whole gradients, of which each rank of `axis` gets its multiple, or all the sum."""
    names = (axis,) if isinstance(axis, str) else axis
    state_specs = opt.specs(specs)

    @fs.shard_map(mesh=mesh, in_specs=(specs, state_specs, specs, P(*names)), out_specs=(specs, state_specs), **options)
    def step(grads, state, params, factor):
        partial = tree.map(lambda g: fs.pvary(g, names) * factor.view(()).to(g.dtype), grads)
        return opt.update(grads if summed else partial, state, params)

    factors = weights([mesh.axes[a] for a in names])
    return lambda grads, state, params: step(grads, state, params, factors)


def train_on(layout, make, *, steps=4, summed=False, donate=False, check="never", params=None):
    axes, specs, axis, over = LAYOUTS[layout]
    params, mesh = make_params() if params is None else params, fs.make_mesh(**axes)
    split = fs.fully_shard(specs, params, axis=over)
    opt = optim.zero(make(split), specs, split, axis=axis, summed=summed)
    step = step_on(mesh, opt, specs, axis, summed=summed, donate=(1, 2) if donate else (), check=check)
    placed = fs.device_put(params, specs, mesh)
    state = opt.init(placed)
    for i in range(steps):
        placed, state = step(grads_at(i, params), state, placed)
    return placed, state


# --- the law --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("adamw", layout) for layout in ("data=1", "3x2", "hybrid, over both", "an axis of one rank")),
        ("sgd", "hybrid"),
        ("dampened", "data=5"),
    ],
)
def test_no_mesh_changes_a_step(name, layout):
    want = train(OPTIMIZERS[name](P()), make_params(), 2)
    modes = [(False, True), (True, False)] + [(False, False), (True, True)] * (layout == "2x2")
    for summed, donate in modes:
        check = "first" if name == "adamw" and not summed and layout in ("2x2", "hybrid") else "never"
        assert_same(train_on(layout, OPTIMIZERS[name], summed=summed, donate=donate, check=check, steps=2), want)


def clipped(split):
    return optim.chain(optim.clip_by_global_norm(0.7, split), optim.adamw(0.02))


@pytest.mark.parametrize("layout", ["data=3", "3x2", "hybrid"])
def test_a_clip_inside_takes_the_norm_of_the_summed_gradients(layout):
    params = {**make_params(), "half": None}  # all else differs by the rounding of the norm
    got, (clip, _) = train_on(layout, clipped, params=params)
    want, (norm, _) = train(clipped(P()), params, 4)
    assert_same(got, want, rtol=1e-5, atol=1e-6)
    assert_same(clip, norm, rtol=1e-6, atol=0)


def loss_fn(p, x, y):
    """Mean over all examples, of which ranks may have different numbers: x [B@data, 6], y [B@data, 4]."""
    h = torch.relu(fs.pvary(x, "model") @ p["up"] + p["bias"])  # [B, F@model]
    out = fs.psum(h @ p["down"], "model") * p["scale"]
    total, count = fs.psum(((out - y).square().sum(), torch.tensor(1.0 * len(x))), "data")
    return total / count


SHAPES = {"up": fs.init.normal((6, 10)), "bias": fs.init.normal((10,)), "down": fs.init.normal((10, 4)),
          "scale": fs.init.ones(())}  # fmt: skip
SPECS = {"up": P(None, "model"), "bias": P("model"), "down": P("model"), "scale": P()}
SPLIT = fs.fully_shard(SPECS, SHAPES, axis="data")


def batch(n=10):
    return fs.random.normal(fs.key(1), (n, 6)), fs.random.normal(fs.key(2), (n, 4))


def trainer(mesh, opt, *, zero, accumulated=1):
    """Make a step of the loss above, of parameters that are whole over `data`."""
    state_specs = {"params": SPECS, "opt": opt.specs(SPECS)}
    gradient = fs.value_and_grad(loss_fn) if accumulated == 1 else fs.accumulate(loss_fn, accumulated)

    @fs.shard_map(mesh=mesh, in_specs=(state_specs, P("data"), P("data")), out_specs=(state_specs, P()), donate=0)
    def step(state, x, y):
        if zero:
            loss, grads = gradient(fs.pvary(state["params"], "data"), x, y)
        else:
            loss, grads = fs.value_and_grad(lambda p: loss_fn(fs.pvary(p, "data"), x, y))(state["params"])
        params, opt_state = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt_state}, loss

    return step, state_specs


def start(mesh, opt, specs):
    return fs.materialize({"params": SHAPES, "opt": opt.init(SHAPES)}, specs, mesh, key=fs.key(0))


def test_a_loss_over_examples_trains_as_with_whole_states():
    mesh, inner = fs.make_mesh(data=4, model=1), optim.adamw(0.05)
    opt = optim.zero(inner, SPECS, SPLIT, axis="data")
    (step, specs), (plain, plain_specs) = trainer(mesh, opt, zero=True), trainer(mesh, inner, zero=False)
    a, b = start(mesh, opt, specs), start(mesh, inner, plain_specs)
    for n in (10, 5, 3):  # on the fourth rank 1 example, and none
        (a, loss), (b, want) = step(a, *batch(n)), plain(b, *batch(n))
        assert_same((a, loss), fs.device_get((b, want)))  # the sums of a simulated mesh are in the order of the ranks


def test_verify_finds_nothing():
    mesh = fs.make_mesh(data=2, model=2)
    opt = optim.zero(clipped(SPLIT), SPECS, SPLIT, axis="data")
    step, specs = trainer(mesh, opt, zero=True)
    assert fs.verify(step, start(mesh, opt, specs), *batch(5), meshes=[{"data": 1, "model": 1}]).leaves > 0


def test_gradients_of_microbatches_are_scattered_once():
    mesh = fs.make_mesh(data=2, model=1)
    opt = optim.zero(optim.sgd(0.05, momentum=0.9), SPECS, SPLIT, axis="data")
    (once, specs), (thrice, _) = trainer(mesh, opt, zero=True), trainer(mesh, opt, zero=True, accumulated=3)
    a, b = start(mesh, opt, specs), start(mesh, opt, specs)
    (a, loss), want = once(a, *batch(12)), None
    with fs.recording() as log:
        b, want = thrice(b, *batch(12))
    assert_same((a, loss), fs.device_get((b, want)), rtol=1e-5, atol=1e-6)
    assert Counter(t.op for t in log)["reduce_scatter"] == mesh.size


def test_a_gradient_and_a_vmap_pass_through_a_step():
    mesh, w, g = fs.make_mesh(data=2), torch.randn(4, 5, 3), torch.randn(4, 5, 3)
    opt = optim.zero(optim.sgd(0.1, momentum=0.9), P(), P("data"), axis="data")

    def new(w, g, factor):
        state = {"count": torch.tensor(0), "m": torch.zeros_like(fs.pslice(w, "data"))}
        return opt.update(fs.pvary(g, "data") * factor.view(()), state, w)[0]

    def both(w, g, factor):
        slope = fs.grad(lambda g: new(w[0], g, factor).square().sum())(g[0])
        return torch.func.vmap(lambda w, g: new(w, g, factor))(w, g), slope

    run = fs.shard_map(both, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
    stepped = w - 0.1 * g
    assert_same(run(w, g, weights([2])), (stepped, -0.1 * 2 * stepped[0]), rtol=1e-6, atol=1e-7)


def test_leaves_that_the_loss_gathers_itself_are_stepped_as_they_are():
    """`up` is fully sharded and gathered by `unshard`, `down` is whole: one optimizer steps both."""
    mesh, x = fs.make_mesh(data=3), fs.random.normal(fs.key(1), (6, 6))
    params = {"up": torch.randn(6, 10), "down": torch.randn(10, 4)}
    specs, split = {"up": P("data"), "down": P()}, {"up": P("data"), "down": P("data")}
    opt = optim.zero(optim.adamw(0.05), specs, split, axis="data")

    @fs.shard_map(mesh=mesh, in_specs=(specs, opt.specs(specs), P("data")), out_specs=(specs, opt.specs(specs)))
    def step(p, state, x):
        def loss(p, x):
            return fs.pmean(
                (torch.relu(x @ fs.unshard(p["up"], P("data"), "data")) @ p["down"]).square().mean(), "data"
            )

        return opt.update(fs.grad(loss)({"up": p["up"], "down": fs.pvary(p["down"], "data")}, x), state, p)

    whole = lambda p: (torch.relu(x @ p["up"]) @ p["down"]).square().mean()  # noqa: E731
    placed = fs.device_put(params, specs, mesh)
    state, plain, plain_state = opt.init(placed), params, optim.adamw(0.05).init(params)
    for _ in range(3):
        placed, state = step(placed, state, x)
        plain, plain_state = optim.adamw(0.05).update(fs.grad(whole)(plain), plain_state, plain)
    assert_same((placed, state), (plain, plain_state), rtol=1e-4, atol=1e-6)


# --- transfers and memory -------------------------------------------------------------------------------------------


def blocks(dtype=torch.float32):
    """Make 29 leaves, as those of a GPT-2 of two blocks, whose first dims two ranks do not all divide."""
    block = [(8,), (8,), (8, 24), (24,), (8, 8), (8,), (8,), (8,), (8, 33), (33,), (33, 8), (8,), (3,)]
    widths = [(17, 8), (5, 8), *block, *block, (7,)]
    return [torch.randn(shape).to(dtype) for shape in widths]


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.bfloat16)])
def test_a_step_is_one_reduce_scatter_and_one_all_gather_per_dtype(dtypes):
    n = 4
    params = {str(dtype): blocks(dtype) for dtype in dtypes}
    assert len(blocks()) == 29
    mesh, specs = fs.make_mesh(data=n), tree.map(lambda _: P(), params)
    split = fs.fully_shard(specs, params, axis="data")
    opt = optim.zero(optim.adamw(0.1), specs, split, axis="data")
    step = step_on(mesh, opt, specs, "data", donate=(1, 2), check="never")
    placed = fs.device_put(params, specs, mesh)
    state, grads = opt.init(placed), fs.device_put(params, specs, mesh)
    with fs.recording() as log:
        step(grads, state, placed)
    assert Counter((t.op, t.dtype) for t in log) == {
        (op, dtype): n for op in ("reduce_scatter", "all_gather") for dtype in dtypes
    }
    whole = sum(x.nbytes for x in tree.leaves(params))
    # An argument of n parts is scattered, and one part is gathered: (n-1)/n of the bytes of the leaves each.
    assert sum(t.bytes for t in log if t.op == "reduce_scatter") == n * whole
    assert sum(t.bytes for t in log if t.op == "all_gather") == whole


def test_a_rank_stores_its_part_of_the_moments_and_donated_memory_is_used_again():
    params = {"a": torch.randn(64, 8), "b": torch.randn(8, 63), "c": torch.randn(33), "d": torch.randn(())}
    mesh, split = fs.make_mesh(data=4), fs.fully_shard(P(), params, axis="data")
    opt = optim.zero(optim.adamw(0.1), P(), split, axis="data")
    step = step_on(mesh, opt, P(), "data", donate=(1, 2))
    placed = fs.device_put(params, P(), mesh)
    state, grads = opt.init(placed), fs.device_put(params, P(), mesh)
    parts = [64 // 4 * 8 + 8 // 4 * 63 + n + 1 for n in (9, 9, 9, 6)]  # 33 over 4 is 9, 9, 9, 6
    for rank in range(4):
        assert sum(x.shards[rank].numel() for x in tree.leaves((state["m"], state["v"]))) == 2 * parts[rank]
    for i in range(3):  # the first call is checked, and takes new memory
        before = pointers((placed, state["m"], state["v"]))
        placed, state = step(grads, state, placed)
        assert i == 0 or pointers((placed, state["m"], state["v"])) == before
    assert_same(fs.device_get(grads), params)  # not donated
    kept = step_on(mesh, opt, P(), "data")
    was = fs.device_get((placed, state))
    kept(grads, state, placed)
    assert_same((placed, state), was)


# --- states ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [optim.adamw, lambda lr: fs.LossScale().guard(clipped(SPLIT), SPLIT)])
def test_states_of_every_kind_are_those_of_the_plain_optimizer(make):
    mesh, inner = fs.make_mesh(data=3, model=2), make(0.1)
    opt = optim.zero(inner, SPECS, SPLIT, axis="data")
    specs = opt.specs(SPECS)
    assert specs == inner.specs(SPLIT)
    described = opt.init(SHAPES)
    assert repr(described) == repr(inner.init(SHAPES))
    params = fs.materialize(SHAPES, SPECS, mesh, key=fs.key(0))
    want = fs.materialize(described, specs, mesh, key=fs.key(0))
    for state in (opt.init(params), fs.shard_map(opt.init, mesh=mesh, in_specs=(SPECS,), out_specs=specs)(params)):
        assert repr(state) == repr(want)
        assert_same(state, fs.device_get(want))
    assert_same(opt.init(fs.device_get(params)), fs.device_get(want))
    assert_same(fs.device_get(params), fs.device_get(fs.materialize(SHAPES, SPECS, mesh, key=fs.key(0))))


def test_zero_and_plain_runs_resume_from_checkpoints_of_each_other(tmp_path):
    inner, whole = optim.adamw(0.05), fs.make_mesh(data=4, model=1)
    few = fs.make_mesh(data=2, model=2)
    opt = optim.zero(inner, SPECS, SPLIT, axis="data")
    kinds = {"zero": (trainer(whole, opt, zero=True), trainer(few, opt, zero=True), opt),
             "plain": (trainer(whole, inner, zero=False), trainer(few, inner, zero=False), inner)}  # fmt: skip
    like = {"params": SHAPES, "opt": inner.init(SHAPES)}
    for first, second in (("zero", "plain"), ("plain", "zero")):
        (step, specs), _, of_first = kinds[first]
        state, _ = step(start(whole, of_first, specs), *batch(8))
        checkpoint.save(tmp_path / first, state, step=1)
        want, _ = step(state, *batch(8))
        _, (step, specs), _ = kinds[second]
        restored = checkpoint.restore(tmp_path / first, like, specs=specs, mesh=few, step=1)
        got, _ = step(restored, *batch(8))
        assert_same(got, fs.device_get(want), rtol=1e-5, atol=1e-6)


# --- refusals -------------------------------------------------------------------------------------------------------


def test_what_reads_the_sum_of_the_gradients_is_refused_outside():
    zero = optim.zero(optim.sgd(0.1), P(), P("data"), axis="data")
    clip = optim.clip_by_global_norm(1.0, P())
    for verb, wrap in (
        ("chain", lambda opt: optim.chain(clip, opt)),
        ("guard", lambda opt: fs.LossScale().guard(opt, P())),
    ):
        assert error_text(wrap, zero) == (
            f"{verb}: zero(sgd) sums the gradients over ranks, and before it each rank has its own\n"
            f"  fix: inside of it: zero({verb}(...), specs, split, axis=...), with the specs `split`"
        )
        assert wrap(optim.zero(optim.sgd(0.1), P(), P("data"), axis="data", summed=True))


def test_gradients_that_are_summed_twice_or_never_are_errors_of_types():
    mesh, params = fs.make_mesh(data=2), {"w": torch.ones(4, 2), "scale": torch.ones(())}
    split = {"w": P("data"), "scale": P()}
    texts = {}
    for summed in (False, True):
        opt = optim.zero(optim.sgd(0.1), P(), split, axis="data", summed=summed)

        def update(grads, state, params, opt=opt, summed=summed):
            return opt.update(fs.pvary(grads, "data") if summed else grads, state, params)

        run = fs.shard_map(update, mesh=mesh, in_specs=(P(), P(), P()), out_specs=(P(), P()))
        texts[summed] = error_text(run, params, {"count": torch.tensor(0)}, params)
    assert "psum_scatter over 'data' of a value that does not vary over it" in texts[False]
    assert texts[False].endswith(
        "already: the sum would count it 2 times\n  fix: zero(..., summed=True), or let the parameters enter the loss "
        "by fs.pvary(params, 'data') before value_and_grad, and not inside of it"
    )
    assert "pslice over 'data' of a value that varies over it already" in texts[True]
    assert texts[True].endswith("different values\n  fix: zero(..., summed=False): it sums these over 'data'")


def test_error_texts():
    make = lambda *args, **options: error_text(optim.zero, optim.sgd(0.1), *args, **options)  # noqa: E731
    fix = "\n  fix: split = fs.fully_shard(specs, tree, axis=...)"
    assert make({"a": P("model")}, {"a": P("data")}, axis="data") == (
        "zero: split['a'] is not its spec with axes of ('data',) added\n  spec  P('model')    split  P('data')" + fix
    )
    assert make(P(), {"a": P("model")}, axis="data") == (
        "zero: split['a'] is not its spec with axes of ('data',) added\n  spec  P()    split  P('model')" + fix
    )
    assert make(P(), {"a": P()}, axis="data") == (
        "zero: split adds no axis to specs, so that no state would be split\n  axis  ('data',)" + fix
    )
    assert make(P(), P("data", memory="host"), axis="data") == (
        "zero: split: parts are transferred, and so are on the device\n"
        "  spec  P()    split  P('data', memory='host')\n"
        "  fix: only the state in host memory: fs.on_host(opt.specs(specs))"
    )
    opt = optim.zero(optim.sgd(0.1), {"a": P("model")}, {"a": P(("data", "model"))}, axis="data")
    assert repr(opt) == "Optimizer(zero(sgd))"
    assert error_text(opt.specs, {"a": P()}) == (
        "zero(sgd).specs: param_specs are not the specs that it was made for\n"
        "  fix: zero(optimizer, specs, split, axis=...).specs(specs)"
    )
    mesh, params = fs.make_mesh(data=2, model=2), {"a": torch.ones(4, 2)}
    run = fs.shard_map(opt.update, mesh=mesh, in_specs=P(), out_specs=P())
    assert error_text(run, params, {"count": torch.tensor(0)}, params) == (
        "zero(sgd): params['a']: the state's part is not a part of the leaf's own\n"
        "  spec  P('model')    split  P(('data', 'model'))\n"
        "  zero adds axes to one dim of a leaf, as its minor axes" + fix
    )
    assert error_text(run, {"b": params["a"]}, {"count": torch.tensor(0)}, params).startswith(
        "zero(sgd): grads: not a tree like params"
    )
    assert error_text(opt.update, params, {}, params).startswith("zero(sgd): called outside shard_map")
    other = optim.zero(optim.sgd(0.1), P(), P("rows"), axis="rows")
    run = fs.shard_map(other.update, mesh=mesh, in_specs=P(), out_specs=P())
    assert error_text(run, params, {"count": torch.tensor(0)}, params).startswith(
        "zero(sgd): the mesh has no axis 'rows'"
    )


def test_a_state_split_by_hand_is_refused_with_the_name_of_zero():
    mesh, params = fs.make_mesh(data=2), [torch.ones(4, 2) for _ in range(27)]
    opt = optim.sgd(0.1, momentum=0.9)
    specs = opt.specs(fs.fully_shard(P(), params, axis="data"))
    run = fs.shard_map(opt.update, mesh=mesh, in_specs=(P(), specs, P()), out_specs=(P(), specs))
    assert error_text(run, params, opt.init(params), params) == (
        "sgd: state['m'][0]: is f32[2, 2], its parameter f32[4, 2]\n"
        "  fix: a state of parameters split alike; or fs.optim.zero, for a state that is split more\n"
        "  the same for state['m'][1], state['m'][2], state['m'][3], and 23 more"
    )


def test_a_model_of_parameters_that_vary_refuses_split_ones():
    cfg = gpt2.Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=1)
    described, mesh = gpt2.init(cfg), fs.make_mesh(data=2)
    layout, ids = gpt2.Layout("data", varied=True), torch.zeros(2, 4, dtype=torch.int64)
    for part in ("wte", "h"):  # the top of the tree, and the blocks
        specs = {**gpt2.specs(cfg), part: fs.fully_shard(P(), described[part], axis="data")}
        run = fs.shard_map(lambda p, ids, s=specs: gpt2.apply(cfg, p, ids, layout=layout, specs=s), mesh=mesh,
                           in_specs=(specs, P("data")), out_specs=P("data"), check="never")  # fmt: skip
        params = fs.materialize(described, specs, mesh, key=fs.key(0))
        text = error_text(run, params, ids)
        assert text.startswith("Layout(varied=True): parameters are split over data\n  layout  Layout(data='data', ")
        assert text.endswith("\n  fix: varied=False: unshard gathers them, and sums their gradients")
