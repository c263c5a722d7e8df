"""Functions that a module has, as attributes and hooks, read the leaves of the call, or the error names the line."""

from __future__ import annotations

import functools
import gc
import types
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import fshard as fs
from fshard import P
from fshard.defer import defer
from tests.lib.assertions import error_text

V, D = 7, 4
IDS = torch.tensor([[1, 2, 3], [4, 5, 6], [0, 1, 2], [3, 3, 3], [6, 0, 5]])


class Net(nn.Module):
    """An embedding, a layer, and `head`, an attribute that each case sets."""

    def __init__(self, change=None):
        super().__init__()
        self.emb, self.lin = nn.Embedding(V, D), nn.Linear(D, D)
        self.head = lambda t: t @ self.emb.weight.t()
        if change is not None:
            change(self)

    def forward(self, ids):
        return self.head(self.lin(self.emb(ids)))


def own(m):
    """Set nothing: the lambda of Net, as in x-transformers with tied embeddings."""


def parameter_in_a_closure(m):
    w = m.emb.weight
    m.head = lambda t: t @ w.t()


def default_arguments(m):
    def head(t, w=m.emb.weight, *, lin=m.lin):
        return F.linear(t, w) * lin.bias.exp().sum()

    m.head = head


def partial(m):
    head = lambda emb, t, w: F.linear(t, emb.weight) + (t @ w).sum(-1, keepdim=True)  # noqa: E731
    m.head = functools.partial(head, m.emb, w=m.lin.weight)


def containers(m):
    m.heads = [lambda t: t @ m.emb.weight.t(), {"scale": lambda: m.lin.bias.exp().sum()}]
    m.weights = [m.lin.weight]
    m.head = lambda t: m.heads[0](t @ m.weights[0]) * m.heads[1]["scale"]()


def objects(m):
    class Head:
        def __init__(self):
            self.m, self.embed = m, m.emb.forward  # a method of the module

        def __call__(self, t):
            return t @ self.m.emb.weight.t() + self.embed(torch.tensor([1])).sum()

    m.head = Head()


def decorated(m):
    plain = m.head

    @functools.wraps(plain)
    def twice(t):
        return 2 * plain(t)

    m.head = twice


def replaced_forwards(m):
    plain, of_lin = m.forward, m.lin.forward
    m.forward = lambda ids: plain(ids) * m.emb.weight.mean()
    m.lin.forward = types.MethodType(lambda self, x: of_lin(x) + self.bias, m.lin)


def hooks(m):
    m.lin.register_forward_pre_hook(lambda _, args: (args[0] + m.emb.weight.mean(0),))
    m.lin.register_forward_hook(lambda _, args, out: out * m.emb.weight.exp().mean())


def hook_that_stores(m):
    features, last = {}, None
    m.features = features

    def keep(_, args, out):
        nonlocal last
        features["x"], last = out, args[0]

    m.lin.register_forward_hook(keep)
    m.head = lambda t: m.features["x"] @ m.emb.weight.t() + last.sum(-1, keepdim=True)


def hook_that_appends(m):
    features = []
    m.append = features.append
    m.lin.register_forward_hook(lambda _, args, out: m.append(out))
    m.head = lambda t: features.pop() @ m.emb.weight.t()


def constant_in_a_closure(m):
    scale = torch.arange(1.0, D + 1)
    m.head = lambda t: (t * scale) @ m.emb.weight.t()


CASES = [own, parameter_in_a_closure, default_arguments, partial, containers, objects, decorated, replaced_forwards,
         hooks, hook_that_stores, hook_that_appends, constant_in_a_closure]  # fmt: skip


def made(change=None):
    torch.manual_seed(0)
    return Net(change)


def step_of(f, mesh, specs, check="first"):
    """One step on a mesh: (outputs, gradients)."""

    def step(p, ids):
        def loss(p):
            out = f(p, ids)
            return fs.psum((out * out.detach().sin()).sum(), "data"), out

        (_, out), grads = fs.value_and_grad(loss, has_aux=True)(p)
        return out, grads

    return fs.shard_map(step, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P("data"), specs), check=check)


@pytest.mark.parametrize("change", CASES, ids=lambda f: f.__name__)
def test_functions_of_a_module_read_the_leaves_of_the_call(change):
    one = made(change)
    out = one(IDS)
    (out * out.detach().sin()).sum().backward()
    want = out.detach(), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in one.named_parameters()}
    params, mesh = {n: p.detach() for n, p in one.named_parameters()}, fs.make_mesh(data=2)
    specs = fs.fully_shard(P(), params, axis="data")
    for reference in (None, 0):
        apply, _ = defer(lambda: made(change), reference=reference)
        f, check = (apply, "first") if reference is None else (apply.eval(), "never")
        step = step_of(lambda p, ids, f=f: f(fs.unshard(p, specs, "data", shapes=params), {}, ids), mesh, specs, check)
        for _ in range(2):
            got = fs.device_get(step(fs.device_put(params, specs, mesh), IDS))
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        for _ in range(2):  # the second call uses the copy of the first, whose changes are undone
            assert torch.equal(apply(params, {}, IDS), out)


def test_units_gather_the_leaves_that_their_closures_read():
    def change(m):
        w = m.lin.weight
        m.lin.forward = lambda x: F.linear(x, w, m.lin.bias) * m.lin.bias.exp().sum()

    one, mesh = made(change), fs.make_mesh(data=2)
    out = one(IDS)
    (out * out.detach().sin()).sum().backward()
    params = {n: p.detach() for n, p in one.named_parameters()}
    apply, tree = defer(lambda: made(change), units="Linear")
    specs = fs.fully_shard(P(), tree["params"], axis="data")
    for remat in (False, True):
        unsharded = apply.unshard(specs, "data", remat=remat)
        step = step_of(lambda p, ids, f=unsharded: f(p, {}, ids), mesh, specs)
        got = fs.device_get(step(fs.device_put(params, specs, mesh), IDS))
        want = out.detach(), {n: p.grad for n, p in one.named_parameters()}
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


# --- refused ------------------------------------------------------------------------------------------------------


KEPT: dict[str, object] = {}


def read_by_a_global_name(m):
    KEPT["net"] = m
    m.head = lambda t: t @ KEPT["net"].emb.weight.t()


def written_in_place(m):
    """Add a tensor without values: torch writes nothing."""
    KEPT["net"] = m
    m.head = lambda t: t.clone().add_(KEPT["net"].lin.bias)


def read_by_a_class(m):
    class Head(nn.Module):
        def forward(self, t):
            return t @ m.emb.weight.t()

    m.head = Head()


def tuple_of_parameters(m):
    m.weights = (m.emb.weight,)
    m.head = lambda t: t @ m.weights[0].t()


def cached(m):
    m.head = functools.lru_cache(lambda t: t @ m.emb.weight.t())


@pytest.mark.parametrize(("change", "line"), [
    (read_by_a_global_name, 'm.head = lambda t: t @ KEPT["net"].emb.weight.t()'),
    (written_in_place, 'm.head = lambda t: t.clone().add_(KEPT["net"].lin.bias)'),
    (read_by_a_class, "return t @ m.emb.weight.t()"),
    (tuple_of_parameters, "m.head = lambda t: t @ m.weights[0].t()"),
    (cached, "m.head = functools.lru_cache(lambda t: t @ m.emb.weight.t())"),
], ids=lambda x: getattr(x, "__name__", ""))  # fmt: skip
@pytest.mark.parametrize("reference", [None, 0])
def test_reads_of_the_module_that_the_constructor_made_are_errors(change, line, reference):
    apply, _ = defer(lambda: made(change), reference=reference)
    params = {n: p.detach() for n, p in made().named_parameters()}
    f = fs.shard_map(lambda p, ids: apply(p, {}, ids), mesh=fs.make_mesh(data=2), in_specs=(P(), P("data")),
                     out_specs=P("data"), check="never")  # fmt: skip
    for text in (error_text(apply, params, {}, IDS), error_text(f, params, IDS)):
        leaf = "lin.bias" if change is written_in_place else "emb.weight"
        assert text.startswith(f"Apply(Net): forward reads {leaf!r}, of the module that the constructor made, and not ")
        assert f"\n    {line}\n" in text


def test_hidden_module_is_an_error_with_its_line():
    def hidden(m):
        other = [nn.Linear(D, V)]
        m.head = lambda t: 2 * other[0](t)

    apply, _ = defer(lambda: made(hidden))
    text = error_text(apply, {n: p.detach() for n, p in made().named_parameters()}, {}, IDS)
    assert "forward reads a tensor that is neither a leaf nor an attribute, of the module that the constructor" in text
    assert "\n    m.head = lambda t: 2 * other[0](t)\n" in text


class Output(dict):
    """As the results of transformers."""


@pytest.mark.parametrize(("wrap", "label"), [
    (lambda y: y, "its result"), (lambda y: (y, [y]), "its result[1][0]"),
    (lambda y: Output(logits=y), "its result['logits']"), (lambda y: types.SimpleNamespace(a=y), "its result.a"),
], ids=["tensor", "list", "model output", "object"])  # fmt: skip
def test_no_result_without_values_leaves_a_call(wrap, label):
    """The call that reads tensors of another module is not the first, in which each operation is watched."""

    def later(m):
        KEPT["net"], KEPT["read"] = m, False
        plain = m.head
        m.head = lambda t: KEPT["net"].emb.weight.t() if KEPT["read"] else plain(t)
        forward = m.forward
        m.forward = lambda ids: wrap(forward(ids))

    apply, _ = defer(lambda: made(later))
    params = {n: p.detach() for n, p in made().named_parameters()}
    apply(params, {}, IDS)
    KEPT["read"] = True
    assert error_text(apply, params, {}, IDS).startswith(f"Apply(Net): {label} has no values: ")
    on_meta = {n: p.to("meta") for n, p in params.items()}  # as in a dry run
    apply(on_meta, {}, IDS.to("meta"))


def transposed(m):
    w = m.emb.weight.t()
    m.head = lambda t: t @ w


def test_views_of_leaves_that_the_constructor_keeps_are_errors():
    for reference in (None, 0):
        text = error_text(defer, lambda: made(transposed), reference=reference)
        assert text.startswith("defer: w of transposed.<locals>.<lambda>: is a view of 'emb.weight', and each call has")


def stores_in_a_global(m):
    m.lin.register_forward_hook(lambda _, args, out: KEPT.update(x=out))


def global_hook(_, args, out):
    KEPT["x"] = out


@pytest.mark.parametrize("kind", ["closure", "nonlocal", "global", "global hook", "class", "object"])
def test_tensors_that_forward_stores_outside_of_the_module_are_an_error(kind):
    """The user would read features of another rank, or of an earlier call."""
    features, last, store = {}, None, types.SimpleNamespace()

    def keep(_, args, out):
        nonlocal last
        last = out

    def put(_, args, out):
        store.x = out

    class Kept(Net):
        def __init__(self):
            super().__init__()
            self.lin.register_forward_hook(lambda _, args, out: features.update(x=out))

    def hooked(hook):
        return lambda: made(lambda m: m.lin.register_forward_hook(hook))

    makers = {"closure": hooked(lambda _, args, out: features.update(x=out)), "nonlocal": hooked(keep), "class": Kept,
              "global": lambda: made(stores_in_a_global), "global hook": hooked(global_hook),
              "object": hooked(put)}  # fmt: skip
    names = {"nonlocal": "last", "global": "KEPT", "global hook": "KEPT", "object": "store"}
    apply, _ = defer(makers[kind])
    params = {n: p.detach() for n, p in made().named_parameters()}
    KEPT.clear()
    text = error_text(apply, params, {}, IDS)
    name = names.get(kind, "features")
    where = f"forward stores a tensor in {name!r}, which is not of the module\n  test_references.py:"
    assert text.startswith(f"Apply({type(apply.module).__name__}): {where}")
    KEPT.clear()


def test_other_objects_from_outside_are_shared_with_the_calls():
    calls, scale = [], torch.tensor(2.0)

    def counting(m):
        m.lin.register_forward_hook(lambda _, args, out: calls.append(len(args)) or out * scale)

    apply, _ = defer(lambda: made(counting))
    params = {n: p.detach() for n, p in made().named_parameters()}
    want = made(counting)(IDS)
    for _ in range(2):
        assert torch.equal(apply(params, {}, IDS), want)
    assert calls == [1, 1, 1]


def test_no_leaf_of_a_call_is_kept_after_it():
    apply, _ = defer(lambda: made(parameter_in_a_closure))
    params = {n: p.detach().clone() for n, p in made().named_parameters()}
    apply(params, {}, IDS)
    alive = weakref.ref(params.pop("emb.weight"))
    gc.collect()
    assert alive() is None


class WithoutLength(tuple):
    """A tuple whose `__len__` raises, as e3nn's `Irreps`."""

    def __len__(self):
        raise NotImplementedError


def test_tuple_without_a_length_is_an_attribute_like_others():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.sizes = nn.Linear(4, 4), WithoutLength((4, 1))

        def forward(self, x):
            return self.linear(x) * sum(self.sizes)

    apply, tree = defer(Layer, units=1)
    mesh = fs.make_mesh(data=2)
    params = fs.materialize(tree["params"], P("data"), mesh, key=fs.key(0))
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    f = fs.shard_map(lambda p, x: apply.unshard(P("data"), "data")(p, {}, x), mesh=mesh,
                     in_specs=(P("data"), P("data")), out_specs=P("data"))  # fmt: skip
    whole = {name: fs.device_get(p) for name, p in params.items()}
    assert torch.equal(fs.device_get(f(params, x)), F.linear(x, whole["linear.weight"], whole["linear.bias"]) * 5)
