"""`value_and_update`: the numbers of `value_and_grad` and `opt.update`, with no gradient of a chosen matrix's size."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import fshard as fs
from fshard import P, nn, optim
from fshard.optim import update
from tests.lib.assertions import assert_same, error_text
from tests.lib.operations import Operations

D = 5  # width of the table
CHOSEN = ("fc.w", "up", "down")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Two rows of a table in a chunk."""
    monkeypatch.setattr(update, "_CHUNK", {"cpu": 2 * D})


def values(classes=7, dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    shapes = {"body": [D, D], "up": [D, 6], "down": [6, D], "w": [classes, D], "b": [classes]}
    made = {name: torch.randn(shape, generator=g, dtype=dtype) for name, shape in shapes.items()}
    params = {"fc": {"w": made.pop("w"), "b": made.pop("b")}, "frozen": None, **made}
    return params, torch.randn(4, 3, D, generator=g, dtype=dtype), torch.randint(classes, (4, 3), generator=g)


def specs_on(classes_over):
    return {"fc": {"w": P(classes_over), "b": P(classes_over)}, "frozen": None, "body": P(), "up": P(None, "model"),
            "down": P("model")}  # fmt: skip


def loss_of(classes, *, over="model", compute=None):
    """A loss of data split over "data": a plain matrix, a block of columns and rows, a table of classes."""
    specs = specs_on(over)

    def loss_fn(p, x, targets):
        p = fs.unshard(p, specs, "data") if over == "model" else {**fs.pvary({**p, "fc": None}, "data"), "fc": p["fc"]}
        if compute is not None:
            p, x = fs.cast((p, x), compute)
        h = torch.tanh(nn.linear(x, p["body"]))
        up = torch.relu(nn.linear(h, p["up"], axis="model"))
        h = h + nn.linear(up, p["down"], axis="model", split="row")
        if over != "model":
            h, targets = (fs.all_gather(y, "data", dim=0) for y in (h, targets))
            targets = fs.pmax(targets, "data")
        logits = nn.linear(h, p["fc"]["w"].mT, p["fc"]["b"], axis="model")
        return nn.cross_entropy(logits, targets, axis=over, size=classes, over="data" if over == "model" else None)

    return loss_fn


def train(
    mesh, opt, loss_fn, params, x, targets, *, over="model", in_backward=CHOSEN, donate=0, steps=2, check="first"
):
    """Some steps: the state after each. Without `in_backward`, by value_and_grad and opt.update."""
    specs = specs_on(over)
    placed = {"params": specs, "opt": opt.specs(specs)}

    @fs.shard_map(mesh=mesh, in_specs=(placed, P("data"), P("data")), out_specs=(placed, P()), donate=donate,
                  check=check)  # fmt: skip
    def step(state, x, targets):
        if in_backward:
            loss, p, own = fs.value_and_update(loss_fn, opt, in_backward=in_backward)(
                state["params"], state["opt"], x, targets)  # fmt: skip
        else:
            loss, grads = fs.value_and_grad(loss_fn)(state["params"], x, targets)
            p, own = opt.update(grads, state["opt"], state["params"])
        return {"params": p, "opt": own}, loss

    state = fs.device_put(fs.tree.map(torch.clone, {"params": params, "opt": opt.init(params)}), placed, mesh)
    history = []
    for _ in range(steps):
        state, loss = step(state, x, targets)
        history.append(fs.device_get((state, loss)))
    return history


def curve_on_ranks():
    """Train on two real ranks, with uneven classes: the job of a test of optimizers."""
    mesh, (params, *batch) = fs.make_mesh(data=1, model=2), values()
    with mock.patch.dict(update._CHUNK, {"cpu": 2 * D}):
        return train(mesh, OPTIMIZERS["momentum"], loss_of(7), params, *batch)


def one():
    return fs.make_mesh(kind="simulated", data=1, model=1)


OPTIMIZERS = {
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(optim.cosine(0.1, 5), momentum=0.9, nesterov=True, weight_decay=0.1),
    "dampening": optim.sgd(0.1, momentum=0.9, dampening=0.5),  # has no fused kernel
    "adamw": optim.adamw(optim.warmup(0.1, 3), weight_decay=0.3, mask=lambda p: fs.tree.map(lambda x: x.ndim > 1, p)),
    "masked": optim.adamw(0.1, weight_decay=0.3, mask={"fc": {"w": False, "b": True}, "frozen": None, "body": True,
                                                      "up": True, "down": False}),
    "schedule_free": optim.schedule_free(0.1, warmup=2),
}  # fmt: skip
BOTH = ("data", "model")
CASES = [
    ("dampening", {"data": 2, "model": 2}, "model", 7),
    ("momentum", {"data": 1, "model": 4}, "model", 3),  # an empty part of the classes
    ("adamw", {"data": 2, "model": 2}, BOTH, 1),  # three empty parts
]


@functools.cache
def whole_steps(name, classes):
    params, *batch = values(classes)
    return train(one(), OPTIMIZERS[name], loss_of(classes), params, *batch, in_backward=())


@pytest.mark.parametrize(("name", "axes", "over", "classes"), CASES, ids=str)
def test_steps_on_any_mesh(name, axes, over, classes):
    params, *batch = values(classes)
    mesh = fs.make_mesh(kind="simulated", **axes)
    donate = () if name == "dampening" else 0
    check = "never" if axes["data"] == 1 else "first"  # types do not depend on sizes
    got = train(mesh, OPTIMIZERS[name], loss_of(classes, over=over), params, *batch, over=over, donate=donate,
                check=check)  # fmt: skip
    assert_same(got, whole_steps(name, classes), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_value_and_grad_and_update(name):
    params, *batch = values()
    got = train(one(), OPTIMIZERS[name], loss_of(7), params, *batch)
    assert_same(got, whole_steps(name, 7), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chosen", ["**.w", "up", ["down", "body"], "*"], ids=str)
def test_any_of_the_matrices(chosen):
    opt, (params, x, targets) = optim.adamw(0.1), values()
    params = {**params, "fc": {"w": params["fc"]["w"], "b": None}}

    def loss_fn(p, x, targets):
        h = nn.linear(torch.tanh(nn.linear(x, p["body"])) @ torch.ones(D, D, dtype=x.dtype), p["up"])
        return F.cross_entropy(nn.linear(nn.linear(h, p["down"]), p["fc"]["w"].mT).flatten(0, 1), targets.flatten())

    state = opt.init(params)
    loss, grads = fs.value_and_grad(loss_fn)(params, x, targets)
    want = (loss, *opt.update(grads, state, params))
    before = fs.tree.map(torch.clone, (params, state))
    got = fs.value_and_update(loss_fn, opt, in_backward=chosen)(params, state, x, targets)
    assert_same(got, want, rtol=1e-11, atol=1e-12)
    assert_same((params, state), before)  # nothing was donated


def test_chunks_have_the_bits_of_a_whole_step():
    """The gradient is exact in integers, so the bits of the step alone are compared."""
    g = torch.Generator().manual_seed(0)
    x, c = (torch.randint(-3, 4, shape, generator=g).float() for shape in ((6, 37), (6, 53)))
    params = {"w": torch.randn(53, 37, generator=g)}

    def loss_fn(p):
        return (nn.linear(x, p["w"].mT) * c).sum()

    for opt in (optim.sgd(0.1, momentum=0.9, weight_decay=0.01), optim.adamw(0.1)):
        a = b = (params, opt.init(params))
        for _ in range(3):
            _, grads = fs.value_and_grad(loss_fn)(a[0])
            a = opt.update(grads, *reversed(a))
            b = fs.value_and_update(loss_fn, opt, in_backward="w")(*b)[1:]
        assert_same(b, a)


def test_no_tensor_of_the_size_of_the_matrix_is_made_of_donated_leaves(monkeypatch):
    rows, width = 128, 8
    monkeypatch.setattr(update, "_CHUNK", {"cpu": 16 * width})
    mesh, opt = fs.make_mesh(kind="simulated", data=1, model=1), optim.adamw(0.1)
    params = {"w": torch.randn(rows, width)}
    seen = []

    def loss_fn(p, x):
        return nn.linear(x, p["w"].mT).square().mean()

    for in_backward in ("w", ()):

        @fs.shard_map(mesh=mesh, in_specs=None, out_specs=P(), donate=(0, 1), check="never")
        def step(params, state, x, in_backward=in_backward):
            with Operations() as ops:
                out = fs.value_and_update(loss_fn, opt, in_backward=in_backward)(params, state, x)
            seen.append((ops.largest, [leaf.data_ptr() for leaf in fs.tree.leaves((params["w"], state["m"]))]
                         == [leaf.data_ptr() for leaf in fs.tree.leaves((out[1]["w"], out[2]["m"]))]))  # fmt: skip
            return out

        placed = fs.device_put(fs.tree.map(torch.clone, (params, opt.init(params))), P(), mesh)
        step(*placed, fs.device_put(torch.randn(2, width), P(), mesh))
    (chunked, in_place), (whole, _) = seen
    assert in_place
    assert whole == 4 * rows * width
    assert chunked <= 4 * 2 * rows  # the logits; a chunk is half of that


def test_shapes_alone_are_stepped_in_few_chunks(monkeypatch):
    """An operation on shapes takes longer than one on numbers: a check of a million classes should take seconds."""
    stepped = []
    monkeypatch.setattr(update._Table, "step", lambda table, rows, grad: stepped.append(rows))
    opt, params = optim.sgd(0.1), {"fc": {"w": fs.init.zeros((1001, D))}}
    step = fs.shard_map(fs.value_and_update(linear_loss, opt, in_backward="fc.w"), in_specs=P(), out_specs=P(),
                        mesh=fs.make_mesh(kind="abstract", data=2))  # fmt: skip
    fs.check(step, params, opt.init(params), fs.init.zeros((4, D)))
    assert [rows.start for rows in stepped[1:]] == [rows.stop for rows in stepped[:-1]]
    assert (stepped[0].start, stepped[-1].stop, len(stepped)) == (0, 1001, 63)


def test_half_precision_compute_of_a_float32_master():
    params, *batch = values(dtype=torch.float32)
    opt, loss_fn = optim.sgd(0.1, momentum=0.9), loss_of(7, compute=torch.bfloat16)
    want, some, most = (train(one(), opt, loss_fn, params, *batch, in_backward=chosen, steps=1)[0][0]["params"]
                        for chosen in ((), "fc.w", CHOSEN))  # fmt: skip
    assert_same(some["fc"], want["fc"], rtol=1e-6, atol=1e-7)  # the same products in bfloat16
    # Sums over chunks are kept in float32, where a product of bfloat16 in one part is rounded once: 2^-8 of each.
    assert_same(most, want, rtol=2**-7, atol=2**-9)
    assert {leaf.dtype for leaf in fs.tree.leaves(most)} == {torch.float32}


@pytest.mark.parametrize("around", ["loss", "step"])
def test_autocast(around):
    params, *batch = values(dtype=torch.float32)
    opt, on = optim.sgd(0.1, momentum=0.9), functools.partial(torch.autocast, "cpu", torch.bfloat16)

    def loss_fn(p, x, targets):
        with on(enabled=torch.is_autocast_enabled("cpu") or around == "loss"):
            w = p["fc"]["w"]
            cosines = nn.cosine_logits(x, p["body"])
            return nn.cross_entropy(nn.linear(x, w.mT, p["fc"]["b"]), targets) + cosines.mean()

    state = opt.init(params)
    with on(enabled=around == "step"):
        loss, grads = fs.value_and_grad(loss_fn)(params, *batch)
        want = loss, *opt.update(grads, state, params)
        got = fs.value_and_update(loss_fn, opt, in_backward=["fc.w", "body"])(params, state, *batch)
    assert_same(got[1]["fc"], want[1]["fc"], rtol=1e-6, atol=1e-7)  # the same products in bfloat16
    assert_same(got, want, rtol=2**-7, atol=2**-9)  # of cosines, rows are rounded after they are normalized


def test_sums_over_ranks_are_in_the_dtype_that_unshard_is_asked_for():
    opt, (params, x, _) = optim.sgd(1.0), values(dtype=torch.float32)
    params, specs = {"w": params["fc"]["w"]}, {"w": P()}
    mesh = fs.make_mesh(kind="simulated", data=2)

    def steps(in_backward, cast=None, **options):
        def loss_fn(p, x):
            p = fs.unshard(p, specs, "data", **options)
            p = p if cast is None else fs.cast(p, cast)
            y = nn.linear(x.to(p["w"].dtype), p["w"].mT).float()
            return fs.psum(y.square().sum(), "data")

        @fs.shard_map(mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(),
                      check="first" if in_backward else "never")  # fmt: skip
        def step(p, s, x):
            return fs.value_and_update(loss_fn, opt, in_backward=in_backward)(p, s, x)[1:]

        return fs.device_get(step(params, opt.init(params), x))

    half = {"dtype": torch.bfloat16}
    for options in (half, {**half, "reduce_dtype": torch.float32}, {}, {"cast": torch.bfloat16}):
        assert_same(steps("w", **options), steps((), **options), rtol=1e-6, atol=1e-6)
    differ = [steps("w", **half, **more)[0]["w"] for more in ({}, {"reduce_dtype": torch.float32})]
    assert not torch.equal(*differ)


@pytest.mark.parametrize("use", ["none", "no_grad", "aux", "detached"])
def test_a_matrix_that_no_gradient_reaches_is_stepped_by_zero(use):
    params, x, _ = values()
    opt = optim.adamw(0.1, weight_decay=0.5)

    def loss_fn(p, x):
        loss = nn.linear(x, p["body"]).square().mean()
        if use == "none":
            return loss, loss.detach()
        w = fs.tree.map(torch.Tensor.detach, p["fc"]["w"]) if use == "detached" else p["fc"]["w"]
        with torch.set_grad_enabled(use != "no_grad"):
            return loss, nn.linear(x, w.mT).sum()

    (loss, aux), grads = fs.value_and_grad(loss_fn, has_aux=True)(params, x)
    want = ((loss, aux), *opt.update(grads, opt.init(params), params))
    got = fs.value_and_update(loss_fn, opt, in_backward="fc.w", has_aux=True)(params, opt.init(params), x)
    assert_same(got, want, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("axes", [{"data": 1, "model": 5}, {"data": 2, "model": 2}], ids=str)  # 5: a part of no class
def test_cosines_with_a_margin(axes):
    params, x, targets = values()
    params, specs, opt = {"w": params["fc"]["w"]}, {"w": P("model")}, optim.sgd(0.1, momentum=0.9)

    def loss_fn(p, x, targets):
        cosines = nn.cosine_logits(fs.pvary(x, "model"), fs.pvary(p, "data")["w"])
        logits = nn.arcface(cosines, targets, scale=4.0, axis="model", size=7)
        return nn.cross_entropy(logits, targets, axis="model", size=7, over="data")

    def step(mesh, in_backward):
        placed = (specs, opt.specs(specs))
        update = fs.value_and_update(loss_fn, opt, in_backward=in_backward)
        step = fs.shard_map(update, mesh=mesh, in_specs=(*placed, P("data"), P("data")), out_specs=(P(), *placed))
        return fs.device_get(step(params, opt.init(params), x, targets))

    assert_same(step(fs.make_mesh(kind="simulated", **axes), "w"), step(one(), ()), rtol=1e-11, atol=1e-12)


# --- refused ----------------------------------------------------------------------------------------------------------


def linear_loss(p, x):
    return nn.linear(x, p["fc"]["w"].mT).square().mean()


def run(loss_fn=linear_loss, in_backward="fc.w", opt=None, change=None, **options):
    params, x, _ = values()
    opt = opt or optim.sgd(0.1, momentum=0.9)
    state = opt.init(params)
    params = params if change is None else change(params)
    return fs.value_and_update(loss_fn, opt, in_backward=in_backward, **options)(params, state, x)


def twice(p, x):
    return linear_loss(p, x) + linear_loss(p, x)


def scaled(p, x):
    return linear_loss(fs.tree.map(lambda w: 2 * w, p), x)


def in_remat(p, x):
    return fs.remat(linear_loss)(p, x)


def differentiated(p, x):
    (slope,) = torch.autograd.grad(linear_loss(p, x @ p["body"]), p["body"])
    return (p["body"] * slope).sum()


def too_wide(p, x):
    return nn.linear(F.pad(x, (0, 3)).bfloat16(), fs.cast(p, torch.bfloat16)["up"]).sum()


def captured(scale):
    return lambda p, x: linear_loss(p, x) * scale


ZERO = optim.zero(optim.sgd(0.1), P(), P("data"), axis="data")
GUARD = fs.LossScale().guard(optim.sgd(0.1), P())
CLIP = optim.chain(optim.clip_by_global_norm(1.0, P()), optim.adamw(0.1))
REFUSED = {
    "glob": (lambda: run(in_backward="fc.weight"),
             ["in_backward: 'fc.weight' matches no leaf", "its leaves are body, down, fc.b, fc.w"]),
    "wider": (lambda: run(in_backward="w"), ["'**.w' matches it at any depth"]),
    "vector": (lambda: run(in_backward="fc.**"), ["params['fc']['b'] is f64[7], and no matrix"]),
    "clip": (lambda: run(opt=CLIP), ["chain(clip_by_global_norm, adamw) needs the gradients of all leaves",
                                     "before the others exist"]),
    "guard": (lambda: run(opt=GUARD), ["guarded sgd needs the gradients of all leaves"]),
    "zero": (lambda: run(opt=ZERO), ["zero(sgd) needs the gradients of all leaves"]),
    "differentiated": (lambda: run(differentiated), ["params['fc']['w'] would be stepped by a gradient that the loss"]),
    "too wide": (lambda: run(too_wide, "up"), ["linear: x is [4, 3, 8], and params['up'] is used as [5, 6]"]),
    "returned": (lambda: run(lambda p, x: (linear_loss(p, x), p), has_aux=True),
                 ["the function returns params['fc']['w'], which this call is about to overwrite"]),
    "twice": (lambda: run(twice), ["params['fc']['w'] is used twice", "first", "second", "in linear_loss"]),
    "scaled": (lambda: run(scaled), ["passes through MulBackward0 before nn.linear"]),
    "captured": (lambda: run(captured(torch.ones((), requires_grad=True))), ["cannot be differentiated itself"]),
    "placed": (lambda: run(change=lambda p: fs.device_put(p, P(), one())), ["params['fc']['w'] must be a tensor"]),
    "moments": (lambda: run(change=lambda p: {**p, "fc": {"w": p["fc"]["w"][:3], "b": p["fc"]["b"]}}),
                ["params['fc']['w'] is f64[3, 5], and a moment of it f64[7, 5]"]),
    "remat": (lambda: run(in_remat), ["params['fc']['w'] cannot be stepped", "remat"]),
    "other use": (lambda: run(lambda p, x: (p["fc"]["w"] @ x.flatten(0, 1).mT).sum()), ["is not a tensor"]),
    "embedding": (lambda: run(lambda p, x: nn.embedding(torch.tensor([0]), p["fc"]["w"]).sum()), ["embedding"]),
    "gradient": (lambda: fs.grad(lambda x: fs.value_and_update(linear_loss, optim.sgd(0.1), in_backward="fc.w")(
        values()[0], optim.sgd(0.1).init(values()[0]), x)[0])(values()[1]), ["of another gradient"]),
    "state": (lambda: run(change=lambda p: {**p, "more": p["body"]}), ["the state is not that of sgd"]),
    "tied": (lambda: run(change=lambda p: {**p, "body": p["fc"]["w"][:5]}), ["shares its memory with another leaf"]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, words = REFUSED[name]
    text = error_text(call)
    for word in words:
        assert word in text, text


def test_any_optimizer_and_transform_are_allowed_where_nothing_is_stepped_in_backward():
    assert_same(run(opt=CLIP, in_backward=())[0], run()[0])
    params, x, _ = values()
    sgd = optim.sgd(0.1)
    losses = torch.func.vmap(lambda x: fs.value_and_update(linear_loss, sgd, in_backward=())(
        params, sgd.init(params), x)[0])(x)  # fmt: skip
    assert_same(losses.mean(), run()[0], rtol=1e-12, atol=0)
    mesh, opt = fs.make_mesh(kind="simulated", data=2), optim.zero(sgd, P(), P("data"), axis="data", summed=True)
    step = fs.value_and_update(lambda p, x: fs.pmean(linear_loss(fs.pvary(p, "data"), x), "data"), opt, in_backward=())
    specs = (P(), opt.specs(P()))
    got = fs.shard_map(step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=(P(), *specs))
    new = fs.device_get(got({"fc": {"w": params["fc"]["w"]}}, sgd.init({}), x))[1]
    assert_same(new["fc"]["w"], run(opt=sgd)[1]["fc"]["w"], rtol=1e-11, atol=1e-12)


@pytest.mark.slow
def test_a_compiled_program_is_refused():
    mesh = fs.make_mesh(kind="simulated", model=1)
    params, x, _ = values()
    step = fs.shard_map(fs.value_and_update(linear_loss, optim.sgd(0.1), in_backward="fc.w"), mesh=mesh,
                        in_specs=None, out_specs=P(), compile=True)  # fmt: skip
    text = error_text(step, params, optim.sgd(0.1).init(params), x)
    assert "cannot be stepped in the backward pass of a compiled" in text


MISTAKES = {
    "no pvary": (lambda p, x: fs.pmean(linear_loss(p, x), "data"), P(), ["params['fc']['w']", "fs.pvary(params"]),
    "no mean": (lambda p, x: linear_loss(fs.pvary(p, "data"), x), P(), ["the loss that is differentiated varies"]),
    "gathered": (lambda p, x: fs.pmean(linear_loss(fs.unshard(p, {"fc": P("data")}, "data"), x), "data"), P("data"),
                 ["params['fc']['w'] passes through all_gather before nn.linear"]),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_of_sharding_are_found(name):
    loss_fn, spec, words = MISTAKES[name]
    opt = optim.sgd(0.1)
    mesh = fs.make_mesh(kind="simulated", data=2)

    @fs.shard_map(mesh=mesh, in_specs=(spec, P(), P("data")), out_specs=(P(), spec, P()))
    def step(params, state, x):
        return fs.value_and_update(loss_fn, opt, in_backward="fc.w")(params, state, x)

    params = {"fc": {"w": torch.ones(6, D)}}
    text = error_text(step, params, opt.init(params), torch.ones(4, D))
    for word in words:
        assert word in text, text
