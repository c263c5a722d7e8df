"""A step of some rows of a table: those rows of a step of torch's, and nothing else changes."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError, optim, tree
from fshard.optim import rows as module
from tests.lib.assertions import assert_same, error_text
from tests.lib.operations import Operations

C, D = 11, 5
OPTIMIZERS = {
    "sgd": optim.sgd(0.1),
    "momentum": optim.sgd(0.1, momentum=0.9, weight_decay=0.1),
    "nesterov": optim.sgd(0.1, momentum=0.9, nesterov=True),
    "dampening": optim.sgd(0.1, momentum=0.9, dampening=0.5),
    "adamw": optim.adamw(0.1),
    "lion": optim.lion(0.1),
    "schedule": optim.adamw(optim.warmup(optim.cosine(0.1, 10), 3), mask=lambda p: tree.map(lambda x: x.ndim > 1, p)),
}


def rand(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tables(dtype=torch.float32):
    return {"w": rand(C, D, dtype=dtype), "b": rand(C, seed=1, dtype=dtype)}


def rows_at(step):
    """Rows of a step: a few, one, none, all."""
    return [torch.tensor([0, 3, 4, 10]), torch.tensor([3]), torch.tensor([], dtype=torch.int64), torch.arange(C)][
        step % 4
    ]


def grads_at(step, params):
    n = len(rows_at(step))
    return tree.map(lambda p: rand(n, *p.shape[1:], seed=100 + step, dtype=p.dtype), params)


@pytest.fixture(params=["one block", "blocks of two rows"])
def block(request, monkeypatch):
    if request.param != "one block":
        monkeypatch.setattr(module, "_BLOCK", {"cpu": 2 * D})


def steps(opt, params, n=6):
    state = opt.init(params)
    for i in range(n):
        params, state = optim.update_rows(opt, rows_at(i), grads_at(i, params), state, params)
    return params, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_are_stepped_as_tables_of_these_rows(name, block):
    opt, params = OPTIMIZERS[name], tables()
    state = opt.init(params)
    for i in range(6):
        rows, grads = rows_at(i), grads_at(i, params)
        take = lambda x, rows=rows: x[rows] if x.ndim else x  # noqa: E731
        want = opt.update(grads, tree.map(take, state), tree.map(take, params))
        new_params, new_state = optim.update_rows(opt, rows, grads, state, params)
        assert_same((tree.map(take, new_params), tree.map(take, new_state)), want)
        others = [c for c in range(C) if c not in rows]
        rest = lambda x, others=others: x[others] if x.ndim else 0  # noqa: E731
        assert_same(tree.map(rest, (new_params, new_state)), tree.map(rest, (params, state)))
        assert int(new_state["count"]) == i + 1
        params, state = new_params, new_state


def test_momentum_is_that_of_a_parameter_for_each_row():
    """torch skips a parameter without a gradient, and its momentum with it."""
    options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}
    params = {"w": rand(C, D)}
    own = [torch.nn.Parameter(row.clone()) for row in params["w"]]
    theirs = torch.optim.SGD(own, **options)
    got, _ = steps(optim.sgd(options.pop("lr"), **options), params)
    for i in range(6):
        theirs.zero_grad()
        for row, g in zip(rows_at(i).tolist(), grads_at(i, params)["w"], strict=True):
            own[row].grad = g
        theirs.step()
    # A fused and a plain step differ in roundings of float32.
    torch.testing.assert_close(got["w"], torch.stack([p.detach() for p in own]), rtol=1e-5, atol=1e-6)


def test_adam_is_the_sparse_adam_of_torch():
    """Moments of other rows stay as they are, and bias is corrected by the number of steps of the table."""
    params = {"w": rand(C, D)}
    own = torch.nn.Parameter(params["w"].clone())
    theirs = torch.optim.SparseAdam([own], lr=0.05, eps=1e-12)
    got, state = steps(optim.adamw(0.05, eps=1e-12, weight_decay=0.0), params)
    for i in range(6):
        own.grad = torch.sparse_coo_tensor(rows_at(i)[None], grads_at(i, params)["w"], (C, D), check_invariants=True)
        theirs.step()
    torch.testing.assert_close(got["w"], own.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["m"]["w"], theirs.state[own]["exp_avg"], rtol=1e-5, atol=1e-6)


def test_a_chain_sees_all_rows_at_once(block):
    """The clip of a block would be that of its own norm."""
    params, rows = tables(), rows_at(0)
    grads = grads_at(0, params)
    opt = optim.chain(optim.clip_by_global_norm(0.5, P()), optim.sgd(0.1, momentum=0.9))
    got, state = optim.update_rows(opt, rows, grads, opt.init(params), params)
    norm = optim.global_norm(grads, P())
    assert_same(state[0]["norm"], norm)
    want, _ = steps_of_one(optim.sgd(0.1, momentum=0.9), rows, tree.map(lambda g: g * (0.5 / (norm + 1e-6)), grads))
    assert_same(got, want, rtol=1e-6, atol=1e-7)


def steps_of_one(opt, rows, grads):
    return optim.update_rows(opt, rows, grads, opt.init(tables()), tables())


def test_a_guarded_step_of_infinite_gradients_is_skipped():
    params, scale = tables(), fs.LossScale(initial=4.0)
    opt = scale.guard(optim.sgd(0.1, momentum=0.9), P())
    state, grads = opt.init(params), grads_at(0, params)
    grads["b"][1] = torch.inf
    got, new = optim.update_rows(opt, rows_at(0), grads, state, params)
    assert_same((got, new["opt"]), (params, state["opt"]))
    assert float(new["scale"]["scale"]) == 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype, block):
    params, opt = tables(dtype), OPTIMIZERS["momentum"]
    rows, grads = rows_at(0), grads_at(0, params)
    got, state = optim.update_rows(opt, rows, grads, opt.init(params), params)
    want = opt.update(grads, opt.init(grads), tree.map(lambda x: x[rows], params))[0]
    assert_same(tree.map(lambda x: x[rows], got), want)
    assert {x.dtype for x in tree.leaves([got, state["m"]])} == {dtype}


def test_arguments_are_not_changed(block):
    params, opt = tables(), OPTIMIZERS["momentum"]
    state, grads = opt.init(params), grads_at(0, params)
    before = tree.map(torch.clone, (params, state, grads))
    steps_of_one(opt, rows_at(0), grads)
    optim.update_rows(opt, rows_at(0), grads, state, params)
    assert_same((params, state, grads), before)


def test_donated_tables_are_written_in_place_without_an_array_of_their_size(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", {"cpu": 1 << 10})
    mesh, opt, specs = fs.make_mesh(m=2), optim.adamw(0.1), P("m")
    params = {"w": fs.device_put(rand(2000, 16), specs, mesh)}
    state = opt.init(params)
    places = [x.data_ptr() for leaf in (params["w"], state["m"]["w"], state["v"]["w"]) for x in leaf.shards]
    grads = rand(400, 16, seed=1)

    def step(params, state, grads):
        rows = torch.arange(0, 1000, 5)
        with Operations() as seen:
            out = optim.update_rows(opt, rows, {"w": grads}, state, params)
        # Blocks of 64 rows of 16: of a table and of two moments, copies to step, and what the kernel pads.
        assert seen.peak < 10 * 4 * 1024
        assert seen.largest <= 4 * 1024
        return out

    whole = {"w": rand(2000, 16)}
    want, _ = optim.update_rows(opt, torch.arange(0, 2000, 5), {"w": grads}, opt.init(whole), whole)
    mapped = fs.shard_map(step, mesh=mesh, in_specs=(specs, opt.specs(specs), P("m")),
                          out_specs=(specs, opt.specs(specs)), donate=(0, 1), check="never")  # fmt: skip
    params, state = mapped(params, state, grads)
    assert [x.data_ptr() for leaf in (params["w"], state["m"]["w"], state["v"]["w"]) for x in leaf.shards] == places
    assert_same(fs.device_get(params), want)


def test_a_gradient_within_a_donated_table_is_read_before_it_is_written(monkeypatch):
    monkeypatch.setattr(module, "_BLOCK", {"cpu": D})
    opt, rows = optim.sgd(1.0), torch.arange(1, 5)

    def step(params):
        return optim.update_rows(opt, rows, {"w": params["w"][:4]}, opt.init(params), params)[0]

    params = {"w": rand(C, D)}
    placed = fs.device_put(params, P(), fs.make_mesh(m=1))
    got = fs.shard_map(step, mesh=fs.make_mesh(m=1), in_specs=P(), out_specs=P(), donate=0)(placed)
    assert_same(fs.device_get(got), step(params))


def test_state_in_host_memory_is_stepped_there():
    mesh, opt = fs.make_mesh(m=2), optim.sgd(0.1, momentum=0.9)
    specs = {"w": P("m")}
    state_specs = {"count": P(), "m": fs.on_host(specs)}
    params = fs.device_put({"w": rand(C + 1, D)}, specs, mesh)
    state = fs.device_put(opt.init({"w": rand(C + 1, D)}), state_specs, mesh)

    def step(params, state, grads):
        return optim.update_rows(opt, torch.tensor([0, 4]), {"w": grads}, state, params)

    grads = rand(4, D, seed=1)
    mapped = fs.shard_map(step, mesh=mesh, in_specs=(specs, state_specs, P("m")), out_specs=(specs, state_specs))
    want = {"w": rand(C + 1, D)}
    want = optim.update_rows(opt, torch.tensor([0, 4, 6, 10]), {"w": grads}, opt.init(want), want)
    assert_same(fs.device_get(mapped(params, state, grads)), want)


def test_gradients_pass_through_a_step_and_it_can_be_mapped():
    params, opt, rows = {"w": rand(C, D, dtype=torch.float64)}, optim.adamw(0.1), torch.tensor([2, 7])
    grads, rate = rand(2, D, seed=1, dtype=torch.float64), rand(C, D, seed=2, dtype=torch.float64)

    def through(step):
        def f(w, g):
            return (step({"w": w}, g)["w"] * rate).sum()

        return fs.grad(f, (0, 1))(params["w"], grads), torch.func.grad(f)(params["w"], grads)

    def dense(params, g):
        w = params["w"]
        new, _ = opt.update({"w": g}, opt.init({"w": g}), {"w": w[rows]})
        return {"w": torch.stack([new["w"][list(rows).index(i)] if i in rows else w[i] for i in range(C)])}

    ours = lambda params, g: optim.update_rows(opt, rows, {"w": g}, opt.init(params), params)[0]  # noqa: E731
    assert_same(through(ours), through(dense), rtol=1e-12, atol=1e-12)
    mapped = torch.func.vmap(ours, (None, 0))(params, torch.stack([grads, 2 * grads]))
    assert_same(mapped["w"], torch.stack([ours(params, g)["w"] for g in (grads, 2 * grads)]))


# --- errors -------------------------------------------------------------------------------------------------

ROWS, SGD = torch.tensor([0, 2]), optim.sgd(0.1, momentum=0.9)
TABLE = {"w": torch.zeros(4, 3), "b": torch.zeros(4)}
GRADS = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
TIED = {"w": TABLE["w"], "v": TABLE["w"]}


def call(opt=SGD, rows=ROWS, grads=GRADS, state=None, params=TABLE):
    return lambda: optim.update_rows(opt, rows, grads, SGD.init(params) if state is None else state, params)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        *((call(rows=torch.tensor(rows)),
           ("update_rows: rows are not ascending, each once, of those of the tables\n"
           f"  rows  {rows}    needed  0 to 3\n  fix: rows = (classes - first).unique()"))
          for rows in ([2, 0], [2, 2], [2, 4], [-1, 0])),
        (call(rows=ROWS.int()), "update_rows: rows are i32[2]\n  fix: int64 [S]"),
        (call(grads=TABLE),
         ("2 problems\n"
         "update_rows: grads['b']: is f32[4]\n  fix: f32[2], for 2 rows of params['b']\n"
         "update_rows: grads['w']: is f32[4, 3]\n  fix: f32[2, 3], for 2 rows of params['w']")),
        (call(grads=GRADS["w"]),
         "update_rows: grads is not a tree like params\n  fix: the gradients of exactly these tables"),
        (call(state=optim.sgd(0.1).init(TABLE)),
         "update_rows: the state is not that of sgd\n  fix: state = opt.init(params)"),
        (call(state=SGD.init(GRADS)),
         ("2 problems\n"
         "update_rows: state['m']['b']: is f32[2], its table has 4 rows\n  fix: state = opt.init(params)\n"
         "update_rows: state['m']['w']: is f32[2, 3], its table has 4 rows\n  fix: state = opt.init(params)")),
        (call(optim.zero(SGD, P(), {"w": P("data"), "b": P("data")}, axis="data")),
         ("update_rows: zero(sgd) places its state by specs of its own, not by those of the tables\n"
         "  fix: another optimizer for these tables, optim.sgd or optim.adamw")),
        (call(grads={"w": GRADS["w"], "v": GRADS["w"]}, params=TIED),
         ("update_rows: params['w'] is params['v']: its rows would be stepped twice\n"
         "  fix: one table once in the tree, with the sum of its gradients")),
        (call(params={"w": TABLE["w"], "b": torch.zeros(4, dtype=torch.int64)}),
         "update_rows: params['b']: i64[4] is not floating\n  fix: keep it in another tree"),
        (call(params={"w": TABLE["w"], "b": torch.zeros(())}),
         ("2 problems\n"
         "update_rows: params['b']: f32[] is not a table with the rows of the others\n"
         "  fix: one call for each number of rows\n"
         "update_rows: params['w']: f32[4, 3] is not a table with the rows of the others\n"
         "  fix: one call for each number of rows")),
    ],
)  # fmt: skip
def test_error_texts(wrong, text):
    assert error_text(wrong) == text


def test_an_error_on_one_rank_writes_nothing_and_ends_all():
    mesh = fs.make_mesh(m=2)
    placed = fs.device_put({"w": rand(4, D)}, P("m"), mesh)
    opt = optim.sgd(0.1)

    def step(params):
        rows = torch.tensor([0, 1]) + fs.axis_index("m")
        return optim.update_rows(opt, rows, {"w": torch.ones(2, D)}, opt.init(params), params)[0]

    with pytest.raises(ShardingError, match=r"rows  \[1, 2\]    needed  0 to 1"):
        fs.shard_map(step, mesh=mesh, in_specs=P("m"), out_specs=P("m"))(placed)
