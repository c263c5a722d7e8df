"""verify names the first line whose result differs between two meshes while its operands agree.

The corpus of wrong programs (`tests/corpus`) tests that the line is right; this is the text, and what they do not have.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import fshard as fs
from fshard import P
from tests.lib.assertions import error_text

MESH = fs.make_mesh(kind="simulated", data=2, model=2)
X = torch.arange(1, 9.0).view(4, 2) / 8


def located(f, *args, in_specs, out_specs=None, mesh=MESH, check="always", donate=()):
    """Return the lines of the error from the first different line on."""
    out_specs = P() if out_specs is None else out_specs
    mapped = fs.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check, donate=donate)
    text = error_text(fs.verify, mapped, *args)
    lines = text[text.index("  first different line") :].splitlines()
    return "\n".join(line for line in lines if set(line) - set(" ^"))


def line_of(f, n):
    return f"test_locate.py:{f.__code__.co_firstlineno + n} in {f.__name__}"


def test_text_names_the_line_its_callers_both_sums_and_their_ratio():
    def bent(x):
        return torch.tanh(x.sum(0))

    def f(x):
        return fs.psum(bent(x), "data")

    assert located(f, X, in_specs=(P("data"),)) == (
        f"  first different line: {line_of(bent, 1)}\n"
        "      return torch.tanh(x.sum(0))\n"
        f"    called at {line_of(f, 1)}\n"
        "    sum of its result, a mean over the ranks of data  1.47189 on data=2, model=2    1.95064 on data=1, model=1"
        "    ratio 0.7546\n"
        "    its operands agree"
    )


def test_line_of_a_wrong_gradient_is_that_of_the_operation_that_is_differentiated():
    def f(b, x):
        def loss(b):
            own = x.sum(1) + fs.pvary(b, "model")
            return (fs.psum(own, "model") + 1).square().sum()

        return fs.grad(loss)(b)

    text = located(f, torch.zeros(4), X, in_specs=(P(), P(None, "model")))
    assert text.startswith(
        f"  first different line, in its backward pass: test_locate.py:{f.__code__.co_firstlineno + 3} in"
    )


def test_gradient_of_a_split_leaf_is_wrong_from_the_loss_and_not_from_its_gather():
    """Partial gradients that are too large by the size of the axis could be copies, but the all_gather sums them."""

    def f(w, x):
        def loss(w):
            full = fs.unshard(w, P("data"), "data")
            return fs.psum((x @ full).square().mean(), "data")

        return fs.grad(loss)(w)

    text = located(f, torch.ones(2, 2), X, in_specs=(P("data"), P("data")), out_specs=P("data"))
    line = f.__code__.co_firstlineno + 3
    assert text.startswith(f"  first different line, in its backward pass: test_locate.py:{line} in loss\n")


def test_first_nan_is_named():
    def f(x):
        total = fs.psum(x.sum(), "data")
        ratio = (total - total) / (total - total)
        return ratio + 1

    assert located(f, X, in_specs=(P("data"),)) == (
        f"  first different line: {line_of(f, 2)}\n"
        "      ratio = (total - total) / (total - total)\n"
        "    its result has NaN\n"
        "    its operands agree"
    )


def test_right_steps_on_the_way_are_not_named():
    """Local maxima, means of microbatches, a ring of unequal length, masks by position and in-place writes heal."""

    def f(x, w):
        n, me = fs.axis_size("data"), fs.axis_index("data")
        top = fs.pvary(fs.pmax(x.amax(), "data"), "data")
        mean = fs.pvary(fs.pmean(x.mean(), "data"), "data")
        total, block = torch.zeros(len(x)), x
        for _ in range(n):
            total = total + (x @ block.T).sum(1)
            block = fs.ppermute(block, "data", [(i, (i + 1) % n) for i in range(n)])
        first = (me * len(x) + torch.arange(len(x))) == 0
        y = torch.zeros(len(x))
        y[:] = total.where(first, total + 1) / top - mean
        y.mul_(2)
        return fs.psum((y * w).sum().sqrt(), "data")

    text = located(f, X.abs(), torch.tensor(3.0), in_specs=(P("data"), P()))
    assert text.startswith(f"  first different line: {line_of(f, 12)}"), text


def test_uneven_parts_donated_arguments_and_other_meshes():
    def f(x):
        return {"y": x + x.amax(0)}

    mesh, split = fs.make_mesh(kind="simulated", data=4), P("data")
    x = fs.device_put(torch.arange(7.0).view(7, 1), split, mesh)
    assert located(f, x, in_specs=(split,), out_specs=split, mesh=mesh, donate=0).startswith(
        f"  first different line: {line_of(f, 1)}"
    )
    wrong = fs.shard_map(lambda x: x * fs.axis_size("data"), mesh=mesh, in_specs=(P(),), out_specs=P())
    text = error_text(fs.verify, wrong, torch.ones(3), meshes=[{"data": 2}])
    assert "sum of its result  12 on data=4    6 on data=2    ratio 2" in text


def test_wrong_types_are_named_where_the_call_is_not_checked():
    def f(x):
        total = fs.psum(x.sum(), "data")
        return fs.psum(total, "data")

    text = located(f, X, in_specs=(P("data"),), check="never")
    assert text.splitlines()[0] == '  first different line: check="always" finds a mistake'
    assert text.splitlines()[1].startswith(f"    {line_of(f, 2)}: psum over 'data' of a value that does not vary")


def test_nothing_is_recorded_of_a_right_program_or_with_locate_false():
    with mock.patch("fshard.law.verify.recording_program", side_effect=AssertionError):
        right = fs.shard_map(lambda x: fs.psum(x.sum(), "data"), mesh=MESH, in_specs=(P("data"),), out_specs=P())
        fs.verify(right, X)
        wrong = fs.shard_map(lambda x: fs.pmean(x.sum(), "data"), mesh=MESH, in_specs=(P("data"),), out_specs=P())
        with pytest.raises(fs.ShardingError) as e:
            fs.verify(wrong, X, locate=False)
        assert "first different line" not in str(e.value)


def test_gathers_of_weights_that_only_one_mesh_needs_are_not_named():
    gpt2 = fs.models.gpt2
    cfg = gpt2.Config(vocab_size=6, n_positions=4, n_embd=4, n_layer=1, n_head=2)
    specs = fs.fully_shard(gpt2.specs(cfg), gpt2.init(cfg), axis="data")
    mesh = fs.make_mesh(kind="simulated", data=2)

    def f(p, ids):
        def loss(p):
            logits = gpt2.apply(cfg, p, ids, layout=gpt2.Layout("data"), specs=specs)
            return fs.pmean(torch.logsumexp(99 * logits, -1).amax(), "data")

        return fs.value_and_grad(loss)(p)

    params = fs.materialize(gpt2.init(cfg), specs, mesh, key=fs.key(0))
    ids = torch.tensor([[0, 1, 2], [5, 3, 4]])
    text = located(f, params, ids, in_specs=(specs, P("data")), out_specs=(P(), specs), mesh=mesh)
    assert text.startswith(f"  first different line: test_locate.py:{f.__code__.co_firstlineno + 3} in loss\n")
