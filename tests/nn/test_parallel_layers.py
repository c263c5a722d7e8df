"""Linear layers and embeddings, split by rows and by columns, equal torch's in value and every gradient."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import fshard as fs
from fshard import P, nn
from tests.lib.assertions import assert_same, error_text
from tests.nn.test_nn import AXES, axis_of, close, ints, on, rand, value_and_vjp

MESHES = {name: AXES[name] for name in ("1", "3", "two axes")}


def check_of(sizes):
    """Types do not depend on sizes: one mesh of each case is checked."""
    return "first" if sizes == AXES["two axes"] else "never"


# --- linear: every way to split it, on every mesh -----------------------------------------------------------
# Legend: D 5 and F 7 are uneven over 3 and 4 ranks; D 3 over 4 ranks leaves a rank without inputs.


def _linear_cases(a):
    """For each way: (function of x, w, b and a size, specs of x, w and b, spec of the result)."""
    column, row = (P(), P(None, a), P(a)), (P(..., a), P(a), P())
    table = (P(), P(a), P(a))  # one class in each row
    return {
        "column": (lambda x, w, b, n: nn.linear(x, w, b, axis=a), column, P(..., a)),
        "column, whole": (lambda x, w, b, n: nn.linear(x, w, b, axis=a, out="whole", size=n), column, P()),
        "column, no bias": (lambda x, w, b, n: nn.linear(x, w, axis=a, out="split") + 0 * b, column, P(..., a)),
        "row": (lambda x, w, b, n: nn.linear(x, w, b, axis=a, split="row"), row, P()),
        "row, split": (lambda x, w, b, n: nn.linear(x, w, b, axis=a, split="row", out="split"), (*row[:2], P(a)),
                       P(..., a)),
        "row of whole inputs": (lambda x, w, b, n: nn.linear(fs.pslice(x, a, -1), w, b, axis=a, split="row"),
                                (P(), *row[1:]), P()),
        "classes": (lambda x, w, b, n: nn.linear(x, w.mT, b, axis=a), table, P(..., a)),
        "classes, whole": (lambda x, w, b, n: nn.linear(x, w.mT, b, axis=a, out="whole"), table, P()),
    }  # fmt: skip


def test_layers_have_the_dtype_of_autocast_on_every_mesh():
    x, w, b = rand(2, 6).float(), rand(6, 4, seed=1).float(), rand(4, seed=2).float()

    def run(x, w, b, axis=None):
        with torch.autocast("cpu", torch.bfloat16):
            row = nn.linear(fs.pslice(x, axis, -1) if axis else x, w, b, axis=axis, split="row")
            return row, nn.mlp(x[..., :4], w.mT, w, down_b=b, axis=axis)

    def on_mesh(x, w, b):
        return run(x, w, b, "m")

    want = run(x, w, b)
    assert {y.dtype for y in want} == {torch.bfloat16}
    got = on({"m": 2}, on_mesh, (x, w, b), (P(), P("m"), P()), P())
    assert_same(got, want, rtol=2**-7, atol=2**-6)  # the halves of a sum are rounded too


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize(("d", "f"), [(5, 7), (3, 2)])
def test_linear_of_each_split_has_the_values_and_gradients_of_torch(name, d, f):
    sizes, a = AXES[name], axis_of(AXES[name])
    x, w, b = rand(2, 3, d), rand(d, f, seed=1), rand(f, seed=2)
    cases = _linear_cases(a)
    arguments = {case: (x, w.mT if "classes" in case else w, b) for case in cases}

    def run(arguments):
        return {case: value_and_vjp_of_split(f_, specs[-1], (2, 3, f), case, *arguments[case])
                for case, (f_, *specs) in cases.items()}  # fmt: skip

    def value_and_vjp_of_split(layer, out, shape, case, *args):
        y, pull = torch.func.vjp(lambda *args: layer(*args, f), *args)
        g = rand(*shape, seed=50)  # the same on every mesh, of which this rank has a part
        return y, pull(fs.pslice(g, a, -1) if out != P() else g)

    specs = {case: specs for case, (_, specs, _) in cases.items()}
    results = {case: (out, in_specs) for case, (_, in_specs, out) in cases.items()}
    got = on(sizes, run, (arguments,), (specs,), results, check_of(sizes))
    want = value_and_vjp(lambda x, w, b: x @ w + b, x, w, b)
    for case in cases:
        bare = case == "column, no bias"
        y, (gx, gw, gb) = value_and_vjp(lambda x, w, b: x @ w + 0 * b, x, w, b) if bare else want
        close(got[case], (y, (gx, gw.mT if "classes" in case else gw, gb)), case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear_keeps_the_dtype(dtype):
    x, w, b = rand(3, 4, dtype=dtype), rand(4, 6, seed=1, dtype=dtype), rand(6, seed=2, dtype=dtype)
    specs = {"column": (P(), P(None, "m"), P("m")), "row": (P(None, "m"), P("m"), P())}
    for split, in_specs in specs.items():
        run = lambda x, w, b, split=split: nn.linear(x, w, b, axis="m", split=split, out="whole")  # noqa: E731
        got = on({"m": 2}, run, (x, w, b), in_specs, P())
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), x.double() @ w.double() + b.double(), rtol=2e-2, atol=5e-2)


def test_linear_moves_what_it_says():
    """By columns the gradient of x alone is summed, by rows the result alone."""
    x, w = rand(2, 4, dtype=torch.float32), rand(4, 8, dtype=torch.float32)

    def moved(split, out, in_specs, spec):
        def run(x, w):
            y, pull = torch.func.vjp(lambda x, w: nn.linear(x, w, axis="m", split=split, out=out), x, w)
            pull(torch.ones_like(y))
            return y

        with fs.recording() as log:
            on({"m": 2}, run, (x, w), in_specs, spec)
        return sorted((m.op, m.bytes // 4) for m in log[::2])  # both ranks record the same

    column, row = (P(), P(None, "m")), (P(None, "m"), P("m"))
    assert moved("column", None, column, P(None, "m")) == [("all_reduce", 8)]
    assert [op for op, _ in moved("column", "whole", column, P())] == ["all_gather", "all_reduce"]
    assert moved("row", None, row, P()) == [("all_reduce", 16)]
    assert [op for op, _ in moved("row", "split", row, P(None, "m"))] == ["all_gather", "reduce_scatter"]


# --- embeddings ---------------------------------------------------------------------------------------------


def _embedding_cases(a, v, d):
    """For each way: (keywords, spec of the table, spec of the result)."""
    return {
        "rows": ({"out": "whole", "size": v}, P(a), P()),
        "rows, no size": ({"out": "whole"}, P(a), P()),
        "rows, split": ({"out": "split", "size": v}, P(a), P(..., a)),
        "columns": ({"split": "column"}, P(None, a), P(..., a)),
        "columns, whole": ({"split": "column", "out": "whole", "size": d}, P(None, a), P()),
        "columns, no size": ({"split": "column", "out": "whole"}, P(None, a), P()),
    }


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize(("v", "d", "padding"), [(7, 5, None), (3, 2, -1), (1, 1, 0)])
def test_embedding_of_each_split_has_the_values_and_gradients_of_torch(name, v, d, padding):
    sizes, a = AXES[name], axis_of(AXES[name])
    table, cases = rand(v, d), _embedding_cases(a, v, d)
    ids = torch.cat([ints(v, 4), torch.tensor([0, v - 1])])
    if padding is not None:
        ids[1:3] = padding % v
    given = [ids, ids.view(2, 1, 3).int(), ids[:0], ids[0]] if v == 7 else [ids]

    def run(given, tables):
        out = {}
        for case, (kw, _, spec) in cases.items():
            out[case] = []
            for ids in given:
                layer = lambda t, ids=ids, kw=kw: nn.embedding(ids, t, axis=a, padding_idx=padding, **kw)  # noqa: E731
                y, pull = torch.func.vjp(layer, tables[case])
                g = rand(*ids.shape, d, seed=50)
                out[case].append((y, pull(g if spec == P() else fs.pslice(g, a, -1))[0]))
        return out

    specs = {case: spec for case, (_, spec, _) in cases.items()}
    got = on(sizes, run, (given, dict.fromkeys(cases, table)), (P(), specs),
             {case: [(out, spec)] * len(given) for case, (_, spec, out) in cases.items()}, check_of(sizes))  # fmt: skip
    for i, ids in enumerate(given):
        y, pull = torch.func.vjp(lambda t, ids=ids: F.embedding(ids, t, padding_idx=padding), table)
        g = pull(rand(*ids.shape, d, seed=50))[0]
        for case in cases:
            close(got[case][i], (y, g), case)
        close(value_and_vjp(lambda t, ids=ids: nn.embedding(ids, t, padding_idx=padding), table), (y, (g,)))
        assert padding is None or not g[padding].any()


def test_the_padding_row_has_no_tangent_and_no_gradient_under_vmap():
    """torch's own rule for forward mode gives the row a tangent that its backward pass does not have."""
    table, ids = rand(7, 3), torch.tensor([[0, 2], [2, 6], [5, 2]])

    def layer(ids, t):
        return nn.embedding(ids, t, axis="m", size=7, padding_idx=2, out="whole")

    def run(table):
        jvp = torch.func.jvp(lambda t: layer(ids, t), (table,), (table,))[1]
        each = torch.func.vmap(torch.func.grad(lambda t, i: layer(i, t).square().sum()), (None, 0))(table, ids)
        plain = table.clone().requires_grad_()
        (once,) = torch.autograd.grad(layer(ids, plain).square().sum(), plain)
        return jvp, each, once

    jvp, each, once = on({"m": 4}, run, (table,), (P("m"),), (P(), P(None, "m"), P("m")))
    want = torch.zeros(3, 7, 3, dtype=torch.float64)
    for i, row in enumerate(ids.tolist()):
        for j in row:
            want[i, j] += 2 * table[j] * (j != 2)
    close(jvp, table[ids] * (ids != 2).unsqueeze(-1))
    close(each, want)
    close(once, want.sum(0))


def test_embedding_by_columns_reads_rows_as_torch_does():
    table = rand(4, 6).bfloat16()
    run = lambda i, t: nn.embedding(i, t, axis="m", split="column", out="whole")  # noqa: E731
    got = on({"m": 4}, run, (torch.tensor([[3], [0]]), table), (P(), P(None, "m")), P())
    assert torch.equal(got, table[torch.tensor([[3], [0]])])
    text = error_text(on, {"m": 2}, run, (torch.tensor([4]), table), (P(), P(None, "m")), P())
    assert text.startswith("embedding: id 4 is out of range, of 4 rows of table\n")


# --- the range of a rank ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MESHES)
def test_local_range_is_the_range_of_the_ranks_entries(name):
    sizes, a = MESHES[name], axis_of(MESHES[name])

    def run(*parts):
        ranges = [(x, fs.local_range(len(x), a, size=n)) for x, n in zip(parts, (0, 1, 2, 5, 12), strict=True)]
        ranges += [(x, fs.local_range(len(x), a)) for x in parts]
        return [x - torch.arange(start, stop) for x, (start, stop) in ranges]

    assert not any(x.any() for x in on(sizes, run, [torch.arange(n) for n in (0, 1, 2, 5, 12)], (P(a),) * 5, P(a)))
    assert fs.local_range(5, None) == (0, 5)


# --- errors -------------------------------------------------------------------------------------------------


def _inside(f):
    return lambda: on({"m": 2}, lambda: f() and None, (), (), P())


X, W = torch.ones(2, 4), torch.ones(3, 6)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: nn.linear(X, W[0]), "linear: w is [6]\n  fix: [D, F]; a table of classes [C, D] is used as w.mT"),
        (_inside(lambda: nn.linear(X, W, axis="m", split="row")),
         ("linear: x has 4 inputs and w has 3\n  x  [2, 4]    w  [3, 6]\n  fix: split='row' takes x [..., D@axis],"
          " w [D@axis, F]; fs.pslice(x, axis, -1) is the part of a whole x")),
        (_inside(lambda: nn.linear(X, W, axis="m")),
         ("linear: x has 4 inputs and w has 3\n  x  [2, 4]    w  [3, 6]\n"
          "  fix: split='column' takes x [..., D], w [D, F@axis]")),
        (_inside(lambda: nn.linear(X, torch.ones(3, 4), axis="m")),
         ("linear: x has 4 inputs and w has 3\n  x  [2, 4]    w  [3, 4]\n"
          "  fix: split='column' takes x [..., D], w [D, F@axis]; a table of classes [C, D] is used as w.mT")),
        (_inside(lambda: nn.linear(X, torch.ones(4, 2), torch.ones(3), axis="m")),
         "linear: w has 2 outputs and b is [3]\n  fix: split='column' takes b [F@axis], split as w"),
        (lambda: nn.embedding(ints(3, 2), W, max_norm=1.0),
         ("embedding: max_norm=1.0\n  torch's writes shorter rows into the table in forward\n"
          "  fix: table * (max_norm / table.norm(dim=1, keepdim=True)).clamp(max=1) after a step")),
        (lambda: nn.embedding(ints(3, 2), W, padding_idx=3),
         "embedding: padding_idx=3, and the table has 3 rows\n  fix: -3 <= padding_idx < 3"),
        (_inside(lambda: nn.embedding(ints(3, 2), W, axis="m", size=6, padding_idx=-7)),
         "embedding: padding_idx=-7, and the table has 6 rows\n  fix: -6 <= padding_idx < 6"),
        (_inside(lambda: nn.embedding(rand(2), W, axis="m", size=6)),
         "embedding: ids are f64[2]\n  fix: integer ids [...]"),
        (_inside(lambda: nn.embedding(ints(3, 2), W, axis="m", split="column", out="partial")),
         ("embedding: out='partial' of split='column'\n  fix: out='split' or 'whole': no rank has a partial sum")),
        (_inside(lambda: fs.local_range(3, "m", size=8)),
         ("local_range: this rank holds 3 of the dim, its part is 4\n  8 over 'm' splits into [4, 4]\n"
          "  fix: pass size=, of all ranks, or the lengths of their parts")),
    ],
)  # fmt: skip
def test_error_texts(call, text):
    assert error_text(call) == text


ROWS = {
    "linear": lambda x, w: nn.linear(x, w, axis="m", out="whole"),
    "mlp": lambda x, w: nn.mlp(x, w, w.mT, axis="m"),
    "embedding": lambda x, w: nn.embedding(x[:, 0].int(), w.mT, axis="m", out="whole"),
    "embedding, columns": lambda x, w: nn.embedding(x[:, 0].int(), w, axis="m", split="column", out="whole"),
}


@pytest.mark.parametrize("name", ROWS)
def test_inputs_that_vary_are_refused_where_each_rank_needs_all_of_them(name):
    """Each rank's own rows and its part of the weight would be joined with those of other rows: also without a gradient
    with respect to x, which a pvary refuses. Copies, as of a frozen model, are right."""
    f, x, w, specs = ROWS[name], ints(4, 2, 4).double(), rand(4, 4), (P("m"), P(None, "m"))
    verb, arg = name.partition(",")[0], "ids" if name.startswith("embedding") else "x"
    assert error_text(on, {"m": 2}, f, (x, w), specs, P()) == (
        f"{verb}: the ranks over 'm' have different {arg} and different parts of the weight\n"
        f"  their results would be joined as if {arg} were the same\n"
        f"  fix: another axis for one of them, or {arg} = fs.all_gather({arg}, 'm', to='invariant')"
    )
    want = on({"m": 2}, f, (x, w), (P(), P(None, "m")), P())
    close(on({"m": 2}, lambda x, w: f(fs.pvary(x, "m"), w), (x, w), (P(), P(None, "m")), P()), want)
    close(on({"m": 2}, lambda x, w: f(fs.all_gather(x, "m"), w), (x, w), specs, P()), want)
