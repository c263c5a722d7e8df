"""Each optimizer is its reference: on one device torch.optim, or a dense form in float64; on a mesh the one device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import fshard as fs
from fshard import P, init, optim, tree
from fshard.optim import fused
from tests.lib.assertions import assert_same, error_text
from tests.optim.test_optim import (
    CLOSE,
    OPTIMIZERS,
    SPECS,
    STEPS,
    grads_at,
    make_params,
    on,
    train,
    train_on,
    train_torch,
)  # fmt: skip

MATRICES = lambda p: tree.map(lambda x: x.ndim > 1, p)  # noqa: E731
ELEMENTWISE = OPTIMIZERS | {
    "adam": lambda s: optim.adam(0.02),
    "nadam": lambda s: optim.nadam(0.02),
    "lion": lambda s: optim.lion(0.01, weight_decay=0.1, mask=MATRICES),
    "adagrad": lambda s: optim.adagrad(0.1),
    "rmsprop": lambda s: optim.rmsprop(optim.warmup(0.02, 3), alpha=0.9, momentum=0.9),
    "schedule_free": lambda s: optim.schedule_free(0.02, warmup=3, weight_decay=0.1, mask=MATRICES),
}
BY_LEAF = {
    "adafactor": lambda s: optim.adafactor(0.05, s, weight_decay=0.1, mask=MATRICES),
    "muon": lambda s: optim.muon(optim.warmup(0.05, 3), s),
}
ALL = ELEMENTWISE | BY_LEAF


def params_of(name):
    """Make leaves for an optimizer, and their specs: of muon the matrices, one of them uneven over two axes."""
    if name != "muon":
        specs = {**SPECS, "stack": P("data", None, "model")}
        return make_params() | {"stack": torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(3))}, specs
    g = torch.Generator().manual_seed(0)
    made = {name: torch.randn(*shape, generator=g) for name, shape in (("w", (16, 8)), ("u", (7, 9)), ("v", (3, 12)))}
    return made, {"w": P("data", "model"), "u": P(("data", "model")), "v": P(None, "model")}


# --- against references on one device -------------------------------------------------------------------------------

REFERENCES = {
    "adam": (lambda: optim.adam(0.01, b1=0.8), lambda ps: torch.optim.Adam(ps, 0.01, (0.8, 0.999), foreach=False)),
    "nadam": (lambda: optim.nadam(0.01), lambda ps: torch.optim.NAdam(ps, 0.01, foreach=False)),
    "nadam without decay": (
        lambda: optim.nadam(0.01, b1=0.5, momentum_decay=0.0),
        lambda ps: torch.optim.NAdam(ps, 0.01, (0.5, 0.999), momentum_decay=0.0, foreach=False),
    ),
    "adagrad": (lambda: optim.adagrad(0.1), lambda ps: torch.optim.Adagrad(ps, 0.1, foreach=False)),
    "rmsprop": (lambda: optim.rmsprop(0.01), lambda ps: torch.optim.RMSprop(ps, 0.01, foreach=False)),
    "rmsprop with momentum": (
        lambda: optim.rmsprop(0.01, alpha=0.9, momentum=0.8),
        lambda ps: torch.optim.RMSprop(ps, 0.01, alpha=0.9, momentum=0.8, foreach=False),
    ),
    "adafactor": (
        lambda: optim.adafactor(0.05, P(), decay=0.6, min_scale=0.02, weight_decay=0.1),
        lambda ps: torch.optim.Adafactor(ps, 0.05, -0.6, (None, 0.02), 1.0, 0.1, foreach=False),
    ),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_steps_equal_those_of_torch(name):
    make, reference = REFERENCES[name]
    params, _ = params_of(name)
    del params["empty"]  # torch's Adafactor divides by its size
    assert_same(train(make(), params)[0], train_torch(reference, params)[0], **CLOSE)


def test_muon_equals_that_of_torch():
    params, _ = params_of("muon")
    got, state = train(optim.muon(0.05, P(), momentum=0.9, weight_decay=0.2), params)
    make = lambda ps: torch.optim.Muon(ps, 0.05, 0.2, 0.9, adjust_lr_fn="match_rms_adamw")  # noqa: E731
    want, _, _ = train_torch(make, params)
    for name, p in got.items():
        # An element of bfloat16 with 8 bits may round to its neighbour in any of the iterations of a step.
        largest = 0.05 * 0.2 * max(p.shape) ** 0.5
        torch.testing.assert_close(p, want[name], rtol=0, atol=largest * 2**-6, msg=name)
        assert (p - params[name]).abs().max() > 5 * largest * 2**-6, name
    assert state.keys() == {"count", "m"}


def dense(name, x):
    """Train one leaf by the formulas of the papers, in float64: (parameter, what its state tells of it)."""
    p, m, v = x.double(), torch.zeros_like(x).double(), torch.zeros_like(x).double()
    y, z, average, total = p, p, p, 0.0
    for i in range(STEPS):
        t, g = i + 1, grads_at(i, x).double()
        if name == "lion":
            p = p - 0.01 * ((0.9 * m + 0.1 * g).sign() + 0.3 * p)
            m = 0.99 * m + 0.01 * g
            continue
        rate = 0.05 * min(1, t / 6)
        total += rate**2
        v = 0.99 * v + 0.01 * g * g
        z = z - rate * (g / ((v / (1 - 0.99**t)).sqrt() + 1e-8) + 0.3 * y)
        average = average + (z - average) * rate**2 / total
        y = 0.1 * z + 0.9 * average
    return (p, m) if name == "lion" else (y, average)


@pytest.mark.parametrize("name", ["lion", "schedule_free"])
def test_steps_equal_a_dense_form_of_the_paper(name):
    opt = optim.lion(0.01, weight_decay=0.3) if name == "lion" else \
        optim.schedule_free(0.05, warmup=6, b2=0.99, weight_decay=0.3)  # fmt: skip
    x = make_params()["w"]
    got, state = train(opt, x)
    want, other = dense(name, x)
    torch.testing.assert_close(got.double(), want, **CLOSE)
    second = state["m"] if name == "lion" else got + state["offset"]
    torch.testing.assert_close(second.double(), other, **CLOSE)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_kernel_and_formula_of_an_optimizer_are_one_step(name, monkeypatch):
    make = {"adam": optim.adam, "adamw": optim.adamw, "sgd": lambda lr: optim.sgd(lr, momentum=0.9)}[name]
    params, calls = {"w": make_params()["w"]}, []
    kernel = fused._KERNELS[name]
    monkeypatch.setitem(fused._KERNELS, name, lambda *args: calls.append(name) or kernel(*args))
    by_kernel = train(make(0.01), params)
    assert len(calls) == STEPS
    monkeypatch.setattr("fshard.optim.formula.has_fused_step", lambda columns: [False])
    assert_same(train(make(0.01), params), by_kernel, **CLOSE)
    assert len(calls) == STEPS
    if name == "adam":
        monkeypatch.undo()
        plain = train(optim.adamw(0.01, weight_decay=0.0), params)
        assert_same(train(make(0.01), params), plain)  # bit for bit


# --- on meshes ------------------------------------------------------------------------------------------------------

MESH = {"data": 2, "model": 2}


KINDS = {"tensor": MESH, "fully_shard": {"data": 3}, "replicated": MESH, "uneven": {"model": 5}}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, "tensor") for name in ALL]
    + [(name, "fully_shard") for name in BY_LEAF]
    + [("adamw", kind) for kind in ("fully_shard", "replicated", "uneven")],
)
def test_no_mesh_changes_a_step(name, kind):
    params, specs = params_of(name)
    mesh = fs.make_mesh(**KINDS[kind])
    specs = P() if kind == "replicated" else on(mesh, specs)
    if kind == "fully_shard":
        specs = fs.fully_shard(specs, params, axis="data")
    got = train_on(mesh, ALL[name], params, specs, check="first" if mesh.size == 4 else "never")
    # The sums of adafactor are in another order.
    assert_same(got, train(ALL[name](P()), params, 5), **(CLOSE if name == "adafactor" else {}))


@pytest.mark.parametrize("n", [1, 17, 1027])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_step_of_an_element_does_not_depend_on_its_place_in_the_leaf(name, n):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    opt, size = ELEMENTWISE[name](P()), 1 if n < 200 else 13
    pieces = list(x.split(size))
    state = opt.init(pieces)
    for i in range(3):
        pieces, state = opt.update(list(grads_at(i, x).split(size)), state, pieces)
    joined = {k: s if k == "count" else torch.cat(s) for k, s in state.items()}
    assert_same((torch.cat(pieces), joined), train(opt, x, 3))


STATES = ALL | {
    "plain": lambda s: optim.sgd(0.1),
    "chain": lambda s: optim.chain(optim.clip_by_global_norm(1.0, s), optim.adamw(0.1)),
}


@pytest.mark.parametrize("name", STATES)
def test_states_of_described_placed_and_local_leaves_are_the_same(name):
    mesh = fs.make_mesh(**MESH)
    shapes, specs = params_of(name)
    described, opt = tree.map(lambda x: init.normal(tuple(x.shape)), shapes), STATES[name](specs)
    if "stack" in described:
        described["stack"] = replace(described["stack"], dtype=torch.bfloat16)
    tree_of, specs_of = (
        {"params": described, "state": opt.init(described)},
        {"params": specs, "state": opt.specs(specs)},
    )
    assert all(isinstance(x, fs.Deferred) for x in tree.leaves(tree_of["state"]))
    placed = fs.materialize(tree_of, specs_of, mesh, key=fs.key(0))
    inside = fs.shard_map(opt.init, mesh=mesh, out_specs=opt.specs(specs))(placed["params"])
    want = fs.device_get(placed["state"])
    assert all(not x.any() for x in tree.leaves(want))
    for state in (opt.init(placed["params"]), inside):
        assert repr(state) == repr(placed["state"])
        assert_same(fs.device_get(state), want)
    assert_same(opt.init(fs.device_get(placed["params"])), want)
    assert fs.materialize(tree_of["state"], opt.specs(P()), mesh, key=fs.key(0))  # a prefix gives a prefix


@pytest.mark.parametrize("name", ["lion", "schedule_free", *BY_LEAF])
def test_a_clip_and_a_split_state_are_those_of_one_device(name):
    params, _ = params_of(name)
    split = fs.fully_shard(P(), params, axis="data")
    make = lambda specs: optim.chain(optim.clip_by_global_norm(0.5, specs), ALL[name](specs))  # noqa: E731
    zero = optim.zero(make(split), P(), split, axis="data")
    mesh = fs.make_mesh(data=2)
    out = (P(), zero.specs(P()))
    step = fs.shard_map(lambda g, s, p: zero.update(fs.pvary(g, "data"), s, p), mesh=mesh, in_specs=(P(), out[1], P()),
                        out_specs=out, donate=(1, 2))  # fmt: skip
    placed = fs.device_put(params, P(), mesh)
    state = zero.init(placed)
    for i in range(3):
        half = tree.map(lambda g: g / 2, grads_at(i, params))  # of each of the two ranks
        placed, state = step(half, state, placed)
    # The norm is summed in another order, and its error may round an element of bfloat16 to its neighbour.
    close = {"rtol": 0, "atol": 0.05 * 2**-7} if name == "muon" else {"rtol": 1e-4, "atol": 1e-5}
    assert_same(fs.device_get((placed, state)), train(make(P()), params, 3), **close)


@pytest.mark.parametrize("name", BY_LEAF)
def test_a_state_is_saved_and_restored_on_another_mesh(name, tmp_path):
    params, specs = params_of(name)
    mesh, other = fs.make_mesh(**MESH), fs.make_mesh(data=3)
    opt = ALL[name](specs)
    step = fs.shard_map(opt.update, mesh=mesh, out_specs=(specs, opt.specs(specs)), check="never")
    placed = fs.device_put(params, specs, mesh)
    placed, state = step(fs.device_put(grads_at(0, params), specs, mesh), opt.init(placed), placed)
    fs.checkpoint.save(tmp_path / "step", {"params": placed, "opt": state})
    specs = on(other, specs)
    opt = ALL[name](specs)
    described = tree.map(lambda x: init.zeros(tuple(x.shape)), params)
    like = {"params": described, "opt": opt.init(described)}
    back = fs.checkpoint.restore(tmp_path / "step", like, specs={"params": specs, "opt": opt.specs(specs)}, mesh=other)
    assert_same(fs.device_get(back), fs.device_get({"params": placed, "opt": state}))
    step = fs.shard_map(opt.update, mesh=other, out_specs=(specs, opt.specs(specs)), check="never")
    got = step(fs.device_put(grads_at(1, params), specs, other), back["opt"], back["params"])
    assert_same(fs.device_get(got), train(ALL[name](P()), params, 2), **(CLOSE if name == "adafactor" else {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALL)
def test_half_precision_is_rounded_once(name, dtype):
    # Against a float32 step from the same half precision values. (torch's fused SGD is wrong here.)
    params, opt = tree.map(lambda x: x.to(dtype), params_of(name)[0]), ALL[name](P())
    state = opt.init(params)
    for i in range(3):
        grads = grads_at(i, params)
        wide = tree.map(lambda x: x.float() if x.is_floating_point() else x, (grads, state, params))
        want = tree.map(lambda x, old: x.to(old.dtype), opt.update(*wide), (params, state))
        params, state = opt.update(grads, state, params)
        # A fused and a plain float32 step may round to two neighbours: one part in 2**8 (bfloat16) or 2**11.
        assert_same((params, state), want, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    moments = state["row"] if name == "adafactor" else params  # of another shape than the leaves: in float32
    assert {x.dtype for x in tree.leaves(moments)} == {torch.float32 if name == "adafactor" else dtype}


# --- formulas of one's own, and errors ------------------------------------------------------------------------------


def test_a_formula_with_a_spec_reads_the_full_leaf_on_any_mesh():
    def normalized(p, g, *, lr, count, spec):
        square = fs.psum((g * g).sum(), spec.axes or None)
        return (p - lr.to(p.dtype) * g / square.sqrt(),)

    make = lambda s: optim.from_formula("normalized", (), normalized, lr=0.1, specs=s)  # noqa: E731
    params = {"w": make_params()["w"]}
    got = train_on(fs.make_mesh(**MESH), make, params, {"w": P("data", "model")})
    assert_same(got, train(make(P()), params, 5), **CLOSE)


def test_error_texts_of_formulas():
    def plain(p, g, *, lr, count):
        return p

    def short(p, g, m, *, lr, count):
        return p, m[:1]

    x = torch.ones(3)
    opt = optim.from_formula("mine", (), plain, lr=0.1)
    assert error_text(opt.update, x, opt.init(x), x) == (
        "mine: the formula returned a Tensor\n  fix: a tuple of tensors (p,)"
    )
    opt = optim.from_formula("mine", ["m"], short, lr=0.1)
    assert error_text(opt.update, x, opt.init(x), x) == (
        "mine: the formula returned f32[1] for m, which is f32[3]\n"
        "  fix: tensors (p, m) of the shapes that it was passed"
    )
    assert error_text(optim.from_formula, "sgd", (), plain, lr=0.1).startswith(
        "from_formula: 'sgd' is the name of a fused kernel"
    )
    assert error_text(optim.from_formula, "mine", ["count"], plain, lr=0.1).startswith("from_formula: the state has")
    assert error_text(optim.from_formula, "mine", (), plain, lr=-1.0) == "mine: lr=-1.0\n  fix: 0 or more"
    assert error_text(optim.from_formula, "mine", (), plain, lr=1.0, mask=True).startswith(
        "from_formula: mine has a mask and no weight_decay"
    )


def test_error_texts_of_options():
    assert error_text(optim.adamw, math.nan) == "adamw: lr=nan\n  fix: 0 or more"
    assert error_text(optim.clip_by_global_norm, -1.0, P()) == "clip_by_global_norm: max_norm=-1.0\n  fix: 0 or more"
    assert error_text(optim.cosine, 1.0, -5) == "cosine: steps=-5\n  fix: 0 or more"
    nesterov = "sgd: nesterov needs a momentum and no dampening\n  momentum  0.0    dampening  0.0\n"
    for make, options, text in (
        (optim.sgd, {"nesterov": True}, f"{nesterov}  fix: momentum=0.9, dampening=0.0"),
        (optim.adamw, {"b2": 1.0}, "adamw: b1=0.9, b2=1.0\n  fix: less than 1"),
        (optim.adamw, {"weight_decay": -1}, "adamw: weight_decay=-1\n  fix: 0 or more"),
        (optim.adam, {"b1": 1.0}, "adam: b1=1.0, b2=0.999\n  fix: less than 1"),
        (optim.nadam, {"momentum_decay": -1.0}, "nadam: momentum_decay=-1.0\n  fix: 0 or more"),
        (optim.lion, {"b2": -0.1}, "lion: b2=-0.1\n  fix: 0 or more"),
        (optim.adagrad, {"eps": -1.0}, "adagrad: eps=-1.0\n  fix: 0 or more"),
        (optim.rmsprop, {"alpha": 1.0}, "rmsprop: alpha=1.0\n  fix: less than 1"),
        (optim.schedule_free, {"warmup": -1}, "schedule_free: warmup=-1\n  fix: 0 or more"),
        (optim.adafactor, {"specs": P(), "clip": 0.0}, "adafactor: clip=0.0\n  fix: above 0"),
        (optim.muon, {"specs": P(), "momentum": 1.0}, "muon: momentum=1.0\n  fix: less than 1"),
    ):
        assert error_text(make, 0.1, **options) == text
        required = {"specs": P()} if "specs" in options else {}
        name = text.partition(":")[0]
        assert error_text(make, -0.1, **required) == f"{name}: lr=-0.1\n  fix: 0 or more"


def test_error_texts_of_leaves_and_states_of_other_shapes():
    opt, params = optim.muon(0.1, P()), {"w": torch.ones(2, 2), "b": torch.ones(2)}
    fix = "not a matrix\n  fix: fs.partition: muon for the matrices, adamw for the other leaves"
    assert error_text(opt.init, params) == f"muon: params['b'] is f32[2], {fix}"
    opt = optim.adafactor(0.1, P())
    state = opt.init(params)
    rows = (torch.tensor([0]), {"w": torch.ones(1, 2)}, opt.init({"w": params["w"]}), {"w": params["w"]})
    assert error_text(optim.update_rows, opt, *rows).startswith("update_rows: a step of adafactor needs full leaves")
    assert error_text(opt.update, params, {**state, "row": state["row"]["w"]}, params) == (
        "adafactor: state['row']: not a tree like params\n  fix: state = opt.init(params)"
    )
