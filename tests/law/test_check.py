"""`check`: the rules of shard_map without data, on meshes of any size, and a record of every collective."""

from __future__ import annotations

import inspect
import logging
import sys
import threading

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from tests.lib import stages
from tests.lib.assertions import assert_same, error_text

SPECS = {"up": fs.column("model"), "down": fs.row("model")}


def init(d=16, f=64):
    return {"up": fs.init.normal((d, f)), "down": fs.init.normal((f, d))}


def loss_fn(p, x):
    p = fs.unshard(p, SPECS, "data")
    h = torch.relu(fs.pvary(x, "model") @ p["up"])
    y = fs.psum(h @ p["down"], "model")
    return fs.pmean((y - x).square().mean(), "data")


def step(p, x):
    loss, grads = fs.value_and_grad(loss_fn)(p, x)
    return fs.tree.map(lambda w, g: w - 0.1 * g, p, grads), loss


INS, OUT = (SPECS, P("data")), (SPECS, P())


def mapped(f=step, mesh=None, ins=INS, out=OUT, **options):
    return fs.shard_map(f, mesh=mesh or fs.make_mesh(data=2, model=2), in_specs=ins, out_specs=out, **options)


def test_check_takes_deferred_arguments_and_an_abstract_mesh():
    mesh = fs.make_mesh(kind="abstract", data=256, model=8)
    assert repr(mesh) == "Mesh(data=256, model=8; abstract, 2048 x cpu)"
    checked = fs.check(mapped(mesh=mesh), init(), fs.init.zeros((1024, 16)))
    params, loss = checked.result
    assert repr(params) == "{'up': f32[16, 64@model], 'down': f32[64@model, 16]}"
    assert repr(loss) == "f32[]"
    assert params["up"].shape == (16, 64)
    assert {x.device.type for leaf in fs.tree.leaves(checked.result) for x in leaf.shards} == {"meta"}


def test_check_takes_placed_and_plain_arguments_and_does_not_run_or_donate():
    mesh = fs.make_mesh(data=2, model=2)
    params = fs.materialize(init(), SPECS, mesh, key=fs.key(0))
    before = fs.device_get(params)
    checked = fs.check(mapped(mesh=mesh, donate=0), params, torch.randn(4, 16))
    assert checked.mesh == {"data": 2, "model": 2}
    for a, b in zip(fs.tree.leaves(before), fs.tree.leaves(fs.device_get(params)), strict=True):
        assert torch.equal(a, b)  # neither run nor donated


def test_each_collective_is_recorded_with_its_line_and_phase():
    checked = fs.check(mapped(mesh=fs.make_mesh(data=2, model=4)), init(), fs.init.zeros((8, 16)))
    first = inspect.getsourcelines(loss_fn)[1]
    rows = [(t.op, t.axes, t.bytes, t.where.line - first, t.phase) for t in checked.transfers]
    assert rows == [
        ("all_reduce", ("model",), 4 * 16 * 4, 3, "forward"),
        ("all_reduce", ("data",), 4, 4, "forward"),
        ("all_reduce", ("data",), 2 * 16 * 16 * 4, 1, "backward"),
    ]
    assert all(t.dtype == torch.float32 and t.where.function == "loss_fn" for t in checked.transfers)


def test_recorded_transfers_equal_those_of_a_run():
    mesh = fs.make_mesh(data=2, model=2)
    args = fs.materialize(init(), SPECS, mesh, key=fs.key(0)), torch.randn(4, 16)
    with fs.recording() as log:
        mapped(mesh=mesh, check="never")(*args)
    dry = fs.check(mapped(mesh=mesh), *args).transfers
    plain = lambda ts: sorted((t.op, t.axes, t.bytes, t.phase, str(t.where)) for t in ts)  # noqa: E731
    assert plain(log) == sorted(plain(dry) * mesh.size)
    assert len(dry) == 3


def test_repr_counts_transfers_and_bytes():
    line = inspect.getsourcelines(loss_fn)[1]
    assert repr(fs.check(mapped(mesh=fs.make_mesh(data=4, model=2)), init(), fs.init.zeros((8, 16)))) == (
        "checked on 8 ranks (data=4, model=2): each makes 3 transfers and sends 6.1 KiB\n"
        f"      1  all_reduce  model  forward        128 B  test_check.py:{line + 3} in loss_fn\n"
        f"      1  all_reduce  data   forward          6 B  test_check.py:{line + 4} in loss_fn\n"
        f"      1  all_reduce  data   backward     6.0 KiB  test_check.py:{line + 1} in loss_fn"
    )


def test_error_text_names_the_line_of_a_wrong_program():
    def wrong(p, x):
        p = fs.pvary(p, "data")
        return fs.psum(x @ p["up"] @ p["down"], "model")

    def gradient(p, x):
        return fs.grad(lambda x: fs.psum(wrong(p, x).sum(), "data"))(x)

    line = inspect.getsourcelines(wrong)[1] + 2
    text = error_text(fs.check, mapped(gradient, out=P("data")), init(), fs.init.zeros((8, 16)))
    assert text == (
        f"test_check.py:{line} in wrong: "
        "matmul of an operand that is invariant (I) over 'model' with one that varies (V) over it\n"
        '    return fs.psum(x @ p["up"] @ p["down"], "model")\n'
        "                   ^^^^^^^^^^^\n"
        "  x        f32[4, 16]{V: data; I: model}\n"
        '  p["up"]  f32[16, 32]{V: data, model}\n'
        "  each of the 2 ranks of 'model' combines x with different values, so the gradient is a sum over the ranks;\n"
        "  pvary changes no value, and its transpose takes that sum\n"
        '  fix: return fs.psum(fs.pvary(x, "model") @ p["up"] @ p["down"], "model")'
    )


def test_error_text_of_a_program_that_needs_values():
    def branches(x):
        return x * 2 if float(x.sum()) > 0 else x

    text = error_text(fs.check, mapped(branches, ins=(P(),), out=P()), torch.ones(3))
    line = inspect.getsourcelines(branches)[1] + 1
    where = f"test_check.py:{line} in branches"
    assert text.startswith(f"{where}: an abstract mesh has no data, and this operation needs the value of a tensor: ")
    assert text.endswith('by fs.shard_map(..., check="always")')


def test_error_of_shapes_is_raised_and_not_logged_too():
    """Also after a pipeline, which computes shapes itself."""
    pipe = fs.pipelined(lambda ends, x: x, lambda w, h, x: h * w, lambda ends, h, x: h.mean(), axis="data",
                        microbatches=1)  # fmt: skip

    def f(x):
        pipe(({}, x[:1]), x)
        return x @ x

    logger, records = logging.getLogger("torch._subclasses.fake_tensor"), []
    handler = logging.Handler()
    handler.emit = records.append
    logger.addHandler(handler)
    try:
        with pytest.raises(RuntimeError, match="must have same reduction dim"):
            fs.check(mapped(f, ins=(P("data"),), out=P()), torch.ones(4, 3))
    finally:
        logger.removeHandler(handler)
    assert records == []


def test_sizes_that_ranks_would_exchange_must_be_passed():
    def gather(x):
        return fs.all_gather(x, "data", to="invariant")

    f = mapped(gather, ins=(P("data"),), out=P())
    assert error_text(fs.check, f, torch.ones(3)) == (
        "all_gather: sizes that the axis does not divide must be known to an abstract mesh\n"
        "  dim 0 of x is 3, split over the 2 ranks of 'data': 3 % 2 = 1\n"
        "  so where this rank has 2, another may have another size\n"
        f"  at test_check.py:{inspect.getsourcelines(gather)[1] + 1} in gather\n"
        "  fix: pass size=, the global size; or make dim 0 of x a multiple of 2, such as 4"
    )
    f = mapped(lambda x: fs.all_gather(x, "data", size=3, to="invariant"), ins=(P("data"),), out=P())
    assert fs.check(f, torch.ones(3)).result.shape == (3,)


def test_an_uneven_batch_needs_the_sizes_of_parameters_that_are_split_over_its_axes_alone():
    """Of computed ones: the sizes of arguments are known."""
    mesh, described = fs.make_mesh(data=2, model=3), {"w": fs.init.zeros((8, 3))}

    def program(x_spec, scale=1, **options):
        def loss(p, x):
            p = {"w": p["w"] * scale} if scale else p
            return fs.psum(fs.unshard(p, P("data"), "data", **options)["w"].sum() + x.sum(), ("data", "model"))

        return loss, mapped(loss, mesh, ins=(P("data"), x_spec), out=P())

    for spec, shape, why, even in (
        (P(("data", "model")), (9, 3), "dim 0 of x is 9, split over the 6 ranks of 'data' and 'model': 9 % 6 = 3", 12),
        (P("model", "data"), (3, 5), "dim 1 of x is 5, split over the 2 ranks of 'data': 5 % 2 = 1", 6),
    ):
        loss, f = program(spec)
        dim, n = why[:10], why.partition("the ")[2][0]
        assert error_text(fs.check, f, described, torch.ones(shape)) == (
            "unshard: sizes that the axis does not divide must be known to an abstract mesh\n"
            f"  {why}\n"
            "  so where this rank has 4, another may have another size\n"
            f"  at test_check.py:{inspect.getsourcelines(loss)[1] + 2} in loss\n"
            f"  fix: pass shapes=, the described tree, such as init(); or make {dim} a multiple of {n}, such as {even}"
        )
        for known in (program(spec, shapes=described), program(spec, scale=None)):
            assert fs.check(known[1], described, torch.ones(shape)).result.shape == ()
        assert fs.check(f, described, torch.ones([even if s in (9, 5) else s for s in shape])).result.shape == ()
    _, f = program(P("model"))  # over another axis: the parts of the parameters are equal, and no sizes are exchanged
    assert fs.check(f, described, torch.ones(4, 3)).result.shape == ()
    with fs.recording() as transfers:
        assert f({"w": torch.ones(8, 3)}, torch.ones(4, 3)).item() == 6 * 24 + 2 * 12
    assert sorted(t.op for t in transfers) == 6 * ["all_gather"] + 6 * ["all_reduce"]


# --- parts that are uneven or empty -----------------------------------------------------------------------------

UNEVEN = "uneven parts (checked as ranks {}) are right, but ranks with less to do wait for the others"


def checked_parts(f, ins, out, *args, **axes):
    return fs.check(mapped(f, fs.make_mesh(kind="abstract", **axes), ins=ins, out=out), *args)


def rows_of(n):
    return fs.init.zeros((n, 3))


def total(x):
    return fs.psum(x.sum(), "data")


DATA = (P("data"),)


def test_uneven_and_empty_parts_are_listed():
    even = checked_parts(total, DATA, P(), rows_of(8), data=4)
    assert (even.uneven, even.ranks) == ((), (0,))
    assert "uneven" not in repr(even)
    checked = checked_parts(total, DATA, P(), rows_of(5), data=4)
    (dim,) = checked.uneven
    assert (dim.name, dim.dim, dim.size, dim.axes, dim.lengths) == ("x", 0, 5, ("data",), (2, 2, 1, 0))
    assert dim.is_empty()
    assert checked.ranks == (0, 2, 3)  # the rank with a smaller part and one with none
    assert repr(checked).splitlines()[2:] == [
        UNEVEN.format("0, 2 and 3"), "  5 over data=4: 2 ranks have 2, 1 has 1, 1 has none    x dim 0"
    ]  # fmt: skip
    assert checked.transfers == checked_parts(total, DATA, P(), rows_of(8), data=4).transfers


def test_leaves_with_the_same_arithmetic_are_one_row():
    """Key and value heads that the axis exceeds, in every layer; and a batch that another axis exceeds."""
    h = [{name: fs.init.zeros((16, 8, 4)) for name in "kv"} for _ in range(3)]
    ins = (P(None, "model"), P("data"))
    checked = checked_parts(lambda h, x: h, ins, P(None, "model"), h, rows_of(2), data=4, model=16)
    assert repr(checked).splitlines()[1:] == [
        UNEVEN.format("0, 15, 48 and 63"),
        "  8 over model=16: 8 ranks have 1, 8 have none    h[0]['k'] dim 1, and 5 more",
        "  2 over data=4: 2 ranks have 1, 2 have none      x dim 0",
    ]
    assert repr(checked.result[0]) == "{'k': f32[16, 8@model, 4], 'v': f32[16, 8@model, 4]}"  # not rounded up to 16


def test_rows_are_limited_and_start_with_empty_parts():
    args = [rows_of(n) for n in (9, 10, 11, 13, 14, 15, 17, 2)]
    text = repr(checked_parts(lambda xs: total(xs[-1]), DATA, P(), args, data=4)).splitlines()[2:]
    assert text[1].startswith("  2 over data=4: 2 ranks have 1, 2 have none")
    assert text[2].startswith("  9 over data=4: 3 ranks have 3, 1 has none")  # more empty than 10 and 11
    assert (len(text), text[-1]) == (8, "  and 2 more")


def test_dims_that_become_uneven_inside_the_program_are_listed():
    def scatter(x):
        return fs.psum_scatter(x, "data")

    checked = checked_parts(scatter, (P(None, "data"),), P("data"), fs.init.zeros((3, 8)), data=4)
    line = inspect.getsourcelines(scatter)[1] + 1
    assert [(d.name, d.size, d.lengths) for d in checked.uneven] == [
        (f"psum_scatter at test_check.py:{line} in scatter", 3, (1, 1, 1, 0))
    ]
    assert checked.ranks == (0, 3)


@pytest.mark.parametrize("axes", [("data",), ("data", "model"), ("model", "data")], ids=repr)
@pytest.mark.parametrize("n", [1, 5, 9, 11, 24, 25])
def test_the_ranks_that_run_have_every_length_of_a_dim(n, axes):
    sizes, seen = {"model": 2, "data": 6}, []
    mesh = fs.make_mesh(**sizes)
    checked = checked_parts(lambda x: seen.append(len(x)), (P(axes),), P(), rows_of(n), **sizes)
    boxes = [fs.spec.local_box((n, 3), P(axes), sizes, mesh.coords(rank))[0] for rank in range(mesh.size)]
    assert set(seen) == {box.stop - box.start for box in boxes}
    assert seen == [boxes[rank].stop - boxes[rank].start for rank in checked.ranks]


@pytest.mark.parametrize(
    ("f", "n", "error", "parts"),
    [
        (lambda x: fs.psum(x.squeeze().sum(1).sum(), "data"), 5, IndexError,
         "on rank 2 (data=2), which has 1 of the 5 of x dim 0"),
        (lambda x: total(x) if len(x) else x.sum(), 2, ShardingError,
         "on rank 3 (data=3), which has none of the 2 of x dim 0"),
    ],
    ids=["squeeze of one row", "types of another branch"],
)  # fmt: skip
def test_error_that_only_a_smaller_part_raises_names_the_rank(f, n, error, parts):
    assert checked_parts(f, DATA, P(), rows_of(8), data=4).ranks == (0,)
    with pytest.raises(error) as raised:
        checked_parts(f, DATA, P(), rows_of(n), data=4)
    text = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert f"{parts}; rank 0 does not raise it" in text


def branching(x):
    return total(x) if len(x) else torch.zeros(())


def test_ranks_that_disagree_on_a_collective_because_of_their_sizes_are_an_error():
    line = inspect.getsourcelines(total)[1] + 1
    assert error_text(checked_parts, branching, DATA, P(), rows_of(2), data=4) == (
        "the ranks disagree on a collective\n"
        f"  rank 0  all_reduce over data of f32 at test_check.py:{line} in total\n"
        "  rank 3  has returned\n"
        "  fix: every rank must call the same collectives in the same order: do not branch on the size of a part"
    )


def test_ranks_of_other_groups_may_call_other_collectives():
    """A data rank without rows leaves out the sums over model, as do all ranks that it would sum with."""

    def f(x, w):
        return fs.psum(x.sum() * fs.psum(w.sum(), "model") if len(x) else x.sum(), "data")

    args = rows_of(2), rows_of(3)
    checked = checked_parts(f, (P("data"), P("model")), P(), *args, data=4, model=2)
    assert checked.ranks == (0, 1, 6, 7)
    run = mapped(f, fs.make_mesh(data=4, model=2), ins=(P("data"), P("model")), out=P())
    assert fs.device_get(run(torch.ones(2, 3), torch.ones(3, 3))) == 54


def test_results_that_differ_because_of_the_sizes_are_an_error():
    def problem(f, *split):
        out = P(*split)
        return error_text(checked_parts, f, DATA, out, rows_of(5), data=4)

    assert problem(len).startswith("len: rank 2 returned something else than rank 0\n  rank 0  int 2")
    text = problem(lambda x: torch.zeros(len(x)))
    assert "result: the parts do not make up dim 0, which its out spec does not split" in text
    assert "rank 0 has 2, rank 2 has 1, rank 3 has 0" in text
    assert "the parts do not make up dim 0 split by ('data',)" in problem(lambda x: torch.cat([x, x]), "data")
    for n in (7, 5):  # of 5 rows, doubled parts are 4, 4, 2 and 0, which no dim splits into
        f = mapped(lambda x: torch.cat([x, x]), fs.make_mesh(data=4), ins=DATA, out=P("data"))
        if n == 5:
            assert "the parts do not make up dim 0" in error_text(f, torch.ones(n, 3))
        else:
            assert fs.check(f, rows_of(n)).result.shape == f(torch.ones(n, 3)).shape == (14, 3)


def test_number_that_differs_because_of_the_sizes_is_an_error():
    def f(w, x):
        return fs.grad(lambda w: fs.psum((fs.pvary(w * len(x), "data") * x).sum(), "data"))(w)

    text = error_text(checked_parts, f, (P(), P("data")), P(), fs.init.zeros(()), rows_of(5), data=4)
    assert "mul of a value that is invariant over 'data' with a number that differs between its ranks" in text
    assert "data=0  2\n  data=2  1\n  data=3  0" in text


@pytest.mark.parametrize("name", ["max", "min", "argmin", "amax", "aminmax", "max dim 0", "amax dim 0"])
def test_reduction_that_only_an_empty_part_refuses_is_an_error(name):
    op, _, dim = name.partition(" dim ")

    def f(x):
        assert x.amax(1).shape == x.shape[:1]  # of no rows, none
        out = getattr(x, op)(dim=int(dim)) if dim else getattr(x, op)()
        return fs.pmax(out if isinstance(out, torch.Tensor) else out[0], "data")

    for rows in (8, 5):  # every rank has a row
        assert fs.tree.leaves(checked_parts(f, DATA, P(), rows_of(rows), data=3))
    text = error_text(checked_parts, f, DATA, P(), rows_of(6), data=4)
    assert f"{op} of no elements, of a tensor of shape [0, 3]" in text
    assert "on rank 3 (data=3)" in text
    for check in ("always", "never"):  # "never": the error of torch
        with pytest.raises((ShardingError, RuntimeError, IndexError)):
            mapped(f, fs.make_mesh(data=4), ins=DATA, out=P(), check=check)(torch.ones(6, 3))


@pytest.mark.slow
def test_check_of_a_model_with_empty_heads_and_an_empty_batch():
    """More ranks than key heads, and than examples: every rank calls the same collectives, and the loss is equal."""
    llama = fs.models.llama
    cfg = llama.Config(vocab_size=18, hidden_size=16, intermediate_size=18, num_hidden_layers=1, num_attention_heads=4,
                       num_key_value_heads=2)  # fmt: skip
    layout, ids = llama.Layout("data", "model"), torch.arange(8).view(2, 4)

    def run(p, ids):
        return fs.value_and_grad(lambda p: llama.loss(cfg, p, ids, ids, layout=layout))(p)

    specs = llama.specs(cfg, model="model")
    ins, out = (specs, P("data")), (P(), specs)
    abstract = fs.make_mesh(kind="abstract", data=3, model=3)
    checked = fs.check(mapped(run, abstract, ins, out), llama.init(cfg), ids)
    assert checked.ranks == (0, 2, 6, 8)
    assert {(d.size, d.axes) for d in checked.uneven} == {(2, ("model",)), (2, ("data",))}
    values = []
    for mesh in (fs.make_mesh(data=3, model=3), fs.make_mesh(data=1, model=1)):
        params = fs.materialize(llama.init(cfg), specs, mesh, key=fs.key(0))
        values.append(fs.device_get(mapped(run, mesh, ins, out, check="never")(params, ids)))
    torch.testing.assert_close(*values)
    for leaf, x in zip(fs.tree.leaves(checked.result), fs.tree.leaves(values[0]), strict=True):
        assert leaf.shape == x.shape


# --- programs that branch on their position ---------------------------------------------------------------------


def test_each_position_of_a_program_that_branches_on_it_is_checked():
    checked = fs.check(stages.mapped(stage=4, data=2), *stages.arguments())
    assert (checked.branches_on, checked.ranks) == (("stage",), (0, 1, 2, 3))
    loss, w, _ = checked.result
    assert (loss.shape, w.shape, w.spec) == ((), (4, 8, 8), P("stage"))
    title = "checked on 8 ranks (data=2, stage=4), at each position of stage: rank 0 makes 5 transfers and sends 383 B"
    assert repr(checked).splitlines()[0] == title
    uneven = fs.check(stages.mapped(stage=4, data=3), *stages.arguments())
    assert uneven.ranks == (*range(4), *range(8, 12))  # each stage with more and with fewer rows
    assert fs.check(stages.mapped(stage=1, data=2), *stages.arguments()).branches_on == ()


def test_layers_on_one_stage_each_are_checked_once_at_each_stage():
    step, args = stages.listed(3)
    checked = fs.check(step, *args)
    assert checked.ranks == (0, 1, 2)
    assert {d.lengths for d in checked.uneven} == {(4, 4, 0, 0, 0, 0), (0, 0, 4, 4, 0, 0), (0, 0, 0, 0, 4, 4)}
    assert "uneven" not in repr(checked)  # a stage with fewer layers is in the schedule


def test_an_axis_that_only_a_later_position_asks_for_is_checked_too():
    def f(x):
        is_last = fs.axis_position("b") == 1 and fs.axis_position("a") == 2
        return x.sum() if is_last else fs.psum(x.sum(), ("a", "b"))

    text = error_text(checked_parts, f, (P(("a", "b")),), P(), rows_of(6), a=3, b=2)
    assert "result varies over 'a' and 'b', which its out spec does not name" in text
    assert "on rank 5 (a=2, b=1); rank 0 does not raise it" in text


@pytest.mark.parametrize(
    ("wrong", "rows"),
    [
        ({"enter": lambda scale: fs.pvary(scale, "data")},
         ["mul of an operand that is invariant (I) over 'stage' with one that varies (V) over it",
          "  on rank 2 (data=0, stage=2); rank 0 does not raise it"]),
        ({"back": lambda g, stage: g[:1] if stage == 2 else g},
         ["  rank 1 (stage=1)  expects f32[4, 8] from rank 2 (stage=2) at stages.py:",
          "  rank 2 (stage=2)  sends f32[1, 8] to rank 1 (stage=1) at stages.py:"]),
        ({"back": lambda g, stage: g.half() if stage == 2 else g},
         ["  rank 2 (stage=2)  sends f16[4, 8] to rank 1 (stage=1) at stages.py:"]),
        ({"expects": lambda stage: stage != 1},
         ["  rank 1 (stage=1)  starts no further message with rank 2 (stage=2)",
          "  rank 2 (stage=2)  sends f32[4, 8] to rank 1 (stage=1) at stages.py:"]),
    ],
    ids=["pvary", "shape", "dtype", "receive"],
)  # fmt: skip
def test_what_only_the_last_stage_does_wrong_is_an_error(wrong, rows):
    text = error_text(fs.check, stages.mapped(stages.layers(**wrong), stage=3), *stages.arguments(3))
    for row in rows:
        assert row in text
    if "pvary" not in text:
        assert text.startswith("the ranks disagree on a message\n")
        assert text.endswith("fix: both ranks of a pair start the same messages, of the same shapes, in one order")


def test_a_collective_that_one_position_leaves_out_is_an_error():
    f = lambda x: total(x) if fs.axis_position("stage") < 2 else fs.psum(total(x), "stage")  # noqa: E731
    text = error_text(checked_parts, f, DATA, P(), rows_of(4), data=2, stage=3)
    assert "on rank 2 (data=0, stage=2)" in text  # a value that does not vary is summed
    f = lambda x: total(x) + 0 * (fs.psum(fs.pvary(total(x), "stage"), "stage") if fs.axis_position("stage") else 0)  # noqa: E731
    assert error_text(checked_parts, f, DATA, P(), rows_of(4), data=2, stage=3).splitlines()[:2] == [
        "the ranks disagree on a collective", "  rank 0 (stage=0)  has returned"
    ]  # fmt: skip


def test_leaves_of_an_abstract_mesh_have_no_values():
    mesh = fs.make_mesh(kind="abstract", data=4)
    placed = fs.materialize({"w": fs.init.normal((1 << 40, 8))}, P("data"), mesh, key=fs.key(0))
    assert repr(placed) == "{'w': f32[1099511627776@data, 8]}"
    assert placed["w"].shards[0].shape == (1 << 38, 8)
    assert fs.device_put(torch.ones(8), P("data"), mesh).shards[0].shape == (2,)
    for look in (lambda: fs.device_get(placed), lambda: fs.device_put(torch.ones(()), P(), mesh).item()):
        with pytest.raises(ShardingError, match="on an abstract mesh, where leaves have no values"):
            look()


def test_dry_run_overwrites_donated_leaves():
    """A dry run makes no copies that a run does not make."""
    opt = fs.optim.adamw(1e-3)
    seen = []

    def train(p, state, g):
        new, state = opt.update(g, state, p)
        seen.append([new[k].untyped_storage()._cdata == p[k].untyped_storage()._cdata for k in p])
        return new, state

    params = init()
    for donate in ((0, 1), ()):
        f = mapped(train, ins=(SPECS, opt.specs(SPECS), SPECS), out=(SPECS, opt.specs(SPECS)), donate=donate)
        fs.check(f, params, opt.init(params), params)
    assert seen == [[True, True], [False, False]]


def test_bool_and_string_arguments_are_part_of_the_signature():
    def f(x, kind):
        return x.sum() if kind == "bad" else fs.psum(x.sum(), "data")

    step = mapped(f, ins=(P("data"), P()), out=P())
    step(torch.ones(4), "good")
    with pytest.raises(ShardingError, match="result varies over 'data'"):
        step(torch.ones(4), "bad")


def test_compiled_parts_of_a_program_are_checked():
    inner = torch.compile(lambda x: x * 2, fullgraph=True, backend="eager")

    def f(x):
        return inner(x).sum()

    with pytest.raises(ShardingError, match="result varies over 'data'"):
        mapped(f, ins=(P("data"),), out=P())(torch.ones(4))


def test_higher_order_operators_are_typed_as_a_whole():
    def f(x, y):
        return torch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a - 1, (y,))

    step = mapped(f, ins=(P("data"), P("data")), out=P("data"))
    torch.testing.assert_close(fs.device_get(step(torch.ones(4), torch.ones(4))), torch.full((4,), 2.0))
    with pytest.raises(ShardingError, match="result varies over 'data'"):
        mapped(f, ins=(P("data"), P("data")), out=P())(torch.ones(4), torch.ones(4))


def test_verify_on_an_abstract_mesh_is_an_error():
    mesh = fs.make_mesh(kind="abstract", data=2, model=2)
    with pytest.raises(ShardingError, match="is on an abstract mesh, where nothing has a value"):
        fs.verify(mapped(mesh=mesh), init(), torch.ones(4, 16))


def test_calling_with_deferred_leaves_is_an_error():
    text = error_text(mapped(), init(), torch.ones(4, 16))
    assert "step: args[0]['down']: is only described" in text
    assert "fix: fs.materialize it, or fs.check(f, ...), which needs no values" in text


def test_plain_function_is_an_error():
    assert error_text(fs.check, abs, torch.ones(1)) == (
        "check: f must be a ShardMapped, got <built-in function abs>\n  fix: pass what fs.shard_map returns"
    )


def test_dropout_and_the_optimizer_run_without_data():
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0, SPECS), fs.optim.adamw(1e-3))

    def train(p, state, x, key):
        key = fs.fold_in(key, state[1]["count"])
        loss = lambda p: loss_fn(p, fs.nn.dropout(x, 0.1, key=key, spec=P("data")))  # noqa: E731
        value, grads = fs.value_and_grad(loss)(p)
        p, state = opt.update(grads, state, p)
        return p, state, value

    f = mapped(train, ins=(SPECS, opt.specs(SPECS), P("data"), P()), out=(SPECS, opt.specs(SPECS), P()), donate=(0, 1))
    params = init()
    checked = fs.check(f, params, opt.init(params), fs.init.zeros((8, 16)), fs.key(0))
    assert fs.tree.structure(checked.result[1]) == fs.tree.structure(opt.init(params))


def test_compiled_function_is_checked_before_it_is_compiled():
    mesh = fs.make_mesh(kind="abstract", data=4)

    def wrong(x):
        return x.sum()

    with pytest.raises(ShardingError, match="result varies over 'data'"):
        fs.check(fs.shard_map(wrong, mesh=mesh, in_specs=(P("data"),), out_specs=P(), compile=True), torch.ones(4))


def test_overlapping_checked_calls_restore_the_compiler_stance():
    """Compiled parts run eagerly while a call is checked on any thread, and compiled again afterwards."""
    inside, leave = ([threading.Event() for _ in range(2)] for _ in range(2))
    seen = []

    def call(i):
        def f(x):
            inside[i].set()
            assert leave[i].wait(600)
            seen.append(torch._dynamo.eval_frame._stance.stance)
            return x

        fs.shard_map(f, mesh=fs.make_mesh(data=2), in_specs=(P(),), out_specs=P())(torch.ones(1))

    torch.compile(torch.sin, backend="eager")(torch.ones(1))
    threads = [threading.Thread(target=call, args=(i,)) for i in range(2)]
    for thread, entered in zip(threads, inside, strict=True):
        thread.start()
        assert entered.wait(600)
    for thread, go in zip(threads, leave, strict=True):  # the first to enter leaves first
        go.set()
        thread.join(600)
    assert seen == ["force_eager"] * 4
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_compiling_a_checked_call_fails_and_restores_the_compiler_stance():
    step = fs.shard_map(lambda x: fs.psum(x, "data"), mesh=fs.make_mesh(data=2), in_specs=(P("data"),), out_specs=P())
    with pytest.raises(RuntimeError):
        torch.compile(step, backend="eager")(torch.ones(2))
    seen = []

    def f(x):
        seen.append(torch._dynamo.eval_frame._stance.stance)
        return x

    fs.shard_map(f, mesh=fs.make_mesh(data=2), in_specs=(P(),), out_specs=P())(torch.ones(1))
    assert seen == ["force_eager"] * 2
    assert torch._dynamo.eval_frame._stance.stance == "default"


# --- on ranks that are processes --------------------------------------------------------------------------------


def on_ranks():
    """Return the message of every wrong program on one rank; no rank may wait for another."""
    mesh = fs.make_mesh(data=2, model=2)
    outcomes = {}
    programs = {
        "right": lambda x: fs.psum(x.sum(), "data"),
        "result": lambda x: x.sum(),
        "number": lambda x: fs.psum(x.sum(), "data") * (1 + int(fs.axis_index("model"))),
        "other collectives": lambda x: (fs.psum if int(fs.axis_index("data")) else fs.all_gather)(x, "data"),
        "other sizes": lambda x: fs.psum(x[: 1 + int(fs.axis_index("data"))], "data"),
        "values": lambda x: torch.ones(()) * int(fs.axis_index("data")),
    }
    layer = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    def train(x):
        optimizer.zero_grad()
        loss = fs.pmean(layer(x).square().mean(), "data")
        loss.backward()  # of a captured layer
        optimizer.step()
        return loss

    programs["captured layer"] = train
    for name, f in programs.items():
        check = "values" if name == "values" else "first"
        step = fs.shard_map(f, mesh=mesh, in_specs=(P("data"),), out_specs=P(), check=check)
        try:
            for _ in range(2):
                step(torch.ones(4, 3))
            outcomes[name] = "passed"
        except ShardingError as e:
            outcomes[name] = str(e)
    return outcomes


def compiler_is_loaded():
    """Return whether a new process has loaded torch's compiler, which takes seconds: before and after a first call."""
    f = lambda w, x: fs.value_and_grad(lambda w: fs.psum((fs.pvary(w, "data") * x).sum(), "data"))(w)[1]  # noqa: E731
    mesh, before = fs.make_mesh(kind="simulated", data=2), "torch._dynamo" in sys.modules
    fs.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(torch.ones(()), torch.ones(4))
    return before, "torch._dynamo" in sys.modules


@pytest.mark.process
def test_every_process_raises_the_same_error(ranks):
    assert ranks(1, compiler_is_loaded) == [(False, False)]
    first, *others = ranks(4, on_ranks)
    for other in others:
        assert other == first
    assert first["right"] == "passed"
    assert "result varies over 'data', which its out spec does not name" in first["result"]
    assert (
        "mul of a value that is invariant over 'model' with a number that differs between its ranks" in first["number"]
    )
    assert "model=0  1\n  model=1  2" in first["number"]
    line = f"test_check.py:{inspect.getsourcelines(on_ranks)[1] + 8} in <lambda>"
    assert first["other collectives"] == (
        "the ranks disagree on a collective\n"
        f"  data=0  all_gather over data of torch.float32 ((0, 4),), at {line}\n"
        f"  data=1  psum over data of torch.float32 [[2, 3]], at {line}\n"
        "  fix: every rank must call the same collectives in the same order, on equal shapes"
    )
    assert "data=1  psum over data of torch.float32 [[2, 3]]" in first["other sizes"]
    assert "result differs between ranks of 'data', over which its spec says it is one value" in first["values"]
    lines = inspect.getsource(on_ranks).splitlines()
    line = inspect.getsourcelines(on_ranks)[1] + next(i for i, x in enumerate(lines) if "# of a captured layer" in x)
    assert first["captured layer"].startswith(f"test_check.py:{line} in train: writes to the .grad of 2 tensors made")


def test_uneven_leaves_that_are_arguments_need_no_shapes_and_no_exchange_of_sizes():
    specs = {"w": P("data"), "b": P()}

    def step(p, x):
        def loss(p):
            q = fs.unshard(p, specs, "data")
            return fs.psum(((x @ q["w"] + q["b"]) ** 2).sum(), "data")

        return fs.value_and_grad(loss)(p)

    f = fs.shard_map(step, mesh=fs.make_mesh(data=4), in_specs=(specs, P("data")), out_specs=(P(), specs))
    args = {"w": torch.arange(15.0).view(5, 3), "b": torch.ones(3)}, torch.eye(8)[:, :5]
    with fs.recording() as log:
        got = fs.device_get(f(*args))
    assert {t.dtype for t in log} == {torch.float32}  # no sizes
    assert_same(got, fs.device_get(f.on(fs.make_mesh(data=1))(*args)))
    abstract = f.on(fs.make_mesh(kind="abstract", data=4))
    assert [t.op for t in fs.check(abstract, *args).transfers] == [t.op for t in log if t.rank == 0]
    assert len(fs.plan(abstract, *args).transfers) == 4
