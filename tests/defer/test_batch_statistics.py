"""Operations that compute with all rows of a batch are those of one device, or refused with their line."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import fshard as fs
from fshard import P
from fshard.defer import defer
from tests.defer.test_functional_module import run_norm
from tests.lib.assertions import error_text


class Functional(nn.Module):
    """A norm without a class of its own."""

    def __init__(self, c, call):
        super().__init__()
        self.scale, self.call = nn.Parameter(torch.linspace(0.5, 1.5, c)), call
        self.register_buffer("mean", torch.zeros(c))
        self.register_buffer("var", torch.ones(c))

    def forward(self, x):
        return self.call(x, self.mean, self.var, self.scale)


def test_fix_for_returned_buffers_follows_from_the_operation_that_wrote_them_and_not_from_their_names():
    apply, tree = defer(lambda: NORMS["positional"](3))
    mesh, x = fs.make_mesh(data=2), torch.ones(4, 3)
    placed = fs.materialize(tree, P(), mesh, key=fs.key(0))

    def buffers(over, p, b, x):
        return apply.batch_norm_over(over).with_buffers(fs.pvary(p, "data"), fs.pvary(b, "data"), x)[1]

    def text(over):
        f = fs.shard_map(functools.partial(buffers, over), mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
        return error_text(f, placed["params"], placed["buffers"], x)

    assert 'fix: apply.batch_norm_over("data"), of all rows; or fs.pmean of the returned buffers' in text(None)
    assert "result['mean']  f32[3]{V: data}" in text("data")
    assert 'batch_norm_over("data")' not in text("data")  # it is so already


def patched(c):
    norm = nn.BatchNorm2d(c)
    plain = norm.forward
    norm.forward = lambda x: plain(x) * norm.bias.exp().sum()
    return norm


NORMS = {
    "positional": lambda c: Functional(c, lambda x, m, v, w: F.batch_norm(x, m, v, w, None, True, 0.3, 1e-3)),
    "by name": lambda c: Functional(c, lambda x, m, v, w: F.batch_norm(weight=w, running_var=v, input=x,
                                                                       running_mean=m, training=True)),
    "of torch": lambda c: Functional(c, lambda x, m, v, w: torch.batch_norm(x, w, None, m, v, True, 0.1, 1e-5, False)),
    "replaced forward": patched,
    "instance norm": lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_statistics_of_any_code_are_those_of_one_device_or_an_error(name):
    def make():
        return nn.Sequential(nn.Identity(), NORMS[name](3))

    module, one = make(), make()
    x = fs.random.normal(fs.key(1), (5, 3, 2, 2), mean=2.0) * torch.arange(1, 6)[:, None, None, None]
    mesh = fs.make_mesh(data=2)  # of 3 and 2 examples
    apply, _ = defer(make)
    got = run_norm(apply.batch_norm_over("data"), module, mesh, x)
    for _ in range(2):
        one.zero_grad()
        out = one(x)
        (out * out.detach().sin()).sum().backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in one.named_parameters()}
    torch.testing.assert_close(got, (out.detach(), grads, dict(one.named_buffers())), rtol=1e-4, atol=1e-5)
    text = error_text(run_norm, apply, module, mesh, x, check="first")
    assert "Apply(Sequential): '1' is a " in text
    assert "varies over 'data': the statistics of each rank's own examples" in text
    assert 'fix: apply = apply.batch_norm_over("data")' in text


def test_error_text_of_statistics_names_the_module_and_the_line():
    apply, _ = defer(lambda: nn.Sequential(NORMS["positional"](3)))
    params, buffers = {"0.scale": torch.ones(3)}, {"0.mean": torch.zeros(3), "0.var": torch.ones(3)}
    run = fs.shard_map(lambda p, b, x: apply.with_buffers(p, b, x)[0], mesh=fs.make_mesh(data=2),
                       in_specs=(P(), P(), P("data")), out_specs=P("data"))  # fmt: skip
    text = error_text(run, params, buffers, torch.ones(4, 3))
    assert text.startswith("Apply(Sequential): '0' is a Functional that calls batch_norm\n  test_batch_statistics.py:")
    assert '    "positional": lambda c: Functional(c, lambda x, m, v, w: F.batch_norm(' in text


TABLES = {
    "embedding": (lambda **flags: nn.Embedding(7, 2, **flags), "it is a Embedding"),
    "bag": (lambda **flags: nn.EmbeddingBag(7, 2, mode="sum", **flags), "it is a EmbeddingBag"),
    "function": (lambda **flags: Lookup(flags), "it is a Lookup that calls embedding"),
}


class Lookup(nn.Module):
    def __init__(self, flags):
        super().__init__()
        self.weight, self.flags = nn.Parameter(torch.randn(7, 2)), flags

    def forward(self, ids):
        return F.embedding(ids, self.weight, **self.flags)


@pytest.mark.parametrize("name", TABLES)
def test_gradients_of_tables_are_those_of_one_device_or_an_error(name):
    make, what = TABLES[name]
    ids = torch.tensor([[1, 1, 2], [1, 3, 4], [5, 1, 2], [0, 0, 0]])

    def gradient(flags, batch="data"):
        apply, _ = defer(lambda: make(**flags))

        def step(p, x):
            def loss(p):
                y = apply(fs.pvary(p, batch), {}, x).square().sum()
                return fs.psum(y, batch) if batch else y

            return fs.grad(loss)(p)

        run = fs.shard_map(step, mesh=fs.make_mesh(data=2), in_specs=(P(), P(batch)), out_specs=P())
        return fs.device_get(run({"weight": weight}, ids))["weight"]

    module = make(scale_grad_by_freq=True)
    weight = module.weight.detach().clone()
    module(ids).square().sum().backward()
    counts = {"scale_grad_by_freq": True}
    torch.testing.assert_close(gradient(counts, None), module.weight.grad)  # each rank has all ids
    text = error_text(gradient, counts)
    assert text.startswith(f"Apply({type(module).__name__}): {what} with scale_grad_by_freq=True\n")
    fix = "fs.psum(torch.bincount(ids.flatten(), minlength=7), 'data').clamp(min=1)"
    assert text.endswith(fix)
    if name != "bag":  # torch divides the rows of a bag by the counts of other ids
        over = torch.bincount(ids.flatten(), minlength=7).clamp(min=1)  # what the fix computes
        torch.testing.assert_close(gradient({}) / over[:, None], module.weight.grad)
    for batch in ("data", None):
        assert error_text(gradient, {"sparse": True}, batch).endswith(
            "fix: sparse=False: the gradient has the same numbers"
        )
    assert "forward writes to params['weight']: aten.embedding_renorm_" in error_text(gradient, {"max_norm": 0.5})
