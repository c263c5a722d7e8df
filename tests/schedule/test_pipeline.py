"""Pipelines equal the model on one device: every schedule, any number of stages, microbatches and layers."""

from __future__ import annotations

import re
import weakref

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

import fshard as fs
from fshard import P, nn
from tests.lib.assertions import assert_same, error_text
from tests.lib.operations import Operations
from tests.lib.tiers import slow_unless

D, HIDDEN, VOCAB, ROWS = 6, 8, 12, 2
KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1)]
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def numbers(*shape, salt=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(salt), dtype=torch.float64)


def parameters(layers, tied=True):
    ends = {"wte": numbers(VOCAB, D, salt=1)} | ({} if tied else {"head": numbers(VOCAB, D, salt=2)})
    up, down = numbers(layers, D, HIDDEN, salt=3), numbers(layers, HIDDEN, D, salt=4)
    return ends, {"up": up / 3, "down": down / 3, "scale": 1 + numbers(layers, D, salt=5) / 3}


def batch(n):
    g = torch.Generator().manual_seed(0)
    return {name: torch.randint(VOCAB, (n, 3), generator=g) for name in ("ids", "targets")}


# --- a model of ends and layers, for any axes ----------------------------------------------------------------------


def first(ends, b):
    return ends["wte"][b["ids"]]


def layer(p, h, b):
    return h + torch.tanh(h * p["scale"] @ p["up"]) @ p["down"]


def losses(ends, h, b):
    logits = h @ ends.get("head", ends["wte"]).mT
    return F.cross_entropy(logits.flatten(0, 1), b["targets"].flatten(), reduction="none", ignore_index=0)


def mean(ends, h, b):
    return losses(ends, h, b).mean()


def total(ends, h, b):
    return losses(ends, h, b).sum(), (b["targets"] != 0).sum()


def dense(params, b, steps, counted=False):
    """The model on one device: the meaning of every pipeline."""

    def loss(params, b):
        ends, layers = params
        h = first(ends, b)
        for i in range(len(layers["up"])):
            h = layer({name: x[i] for name, x in layers.items()}, h, b)
        return (total if counted else mean)(ends, h, b)

    return fs.accumulate(loss, steps, counted=counted)(params, b)


def in_chunks(params, v):
    return (params[0], {k: x.reshape(v, len(x) // v, *x.shape[1:]) for k, x in params[1].items()}) if v > 1 else params


def pipeline(mesh, m, kind="1f1b", v=1, counted=False, check="first", stage=layer, **options):
    specs = (P(), P(None, "stage") if v > 1 else P("stage"))
    f = fs.pipelined(first, stage, options.pop("last", total if counted else mean), axis="stage", microbatches=m,
                     schedule=kind, chunks=v, counted=counted, **options)  # fmt: skip
    return fs.shard_map(f, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs), check=check)


def compare(mesh, m, kind, v, layers, tied=True, counted=False, check="never"):
    params, b = parameters(layers, tied), batch(ROWS * m)
    got = fs.device_get(pipeline(mesh, m, kind, v, counted, check)(in_chunks(params, v), b))
    loss, grads = dense(params, b, m, counted)
    assert_same(got, (loss, in_chunks(grads, v)), f"{mesh} {m} {kind}", **CLOSE)


CASES = [(kind, v, n, m) for kind, v in KINDS for n in (1, 2, 3, 4) for m in range(1, 13)]
FAST = [(kind, v, n, m) for kind, v in KINDS for n, m in ((2, 3), (4, 6))] + [
    ("1f1b", 1, 1, 2),
    ("interleaved", 2, 3, 2),
]


@pytest.mark.parametrize(("kind", "v", "n", "m"), slow_unless(FAST, CASES))
def test_every_schedule_equals_the_model_on_one_device(kind, v, n, m):
    mesh = fs.make_mesh(stage=n)
    for tied, counted in ((True, False), (False, True), (True, True)):
        check = "always" if n == 2 and not counted else "never"  # types do not depend on sizes
        compare(mesh, m, kind, v, 2 * n * v, tied, counted, check)


@pytest.mark.parametrize(("n", "layers"), [(2, 3), (4, 1)])
def test_stages_may_have_different_numbers_of_layers_and_none(n, layers):
    for kind in ("1f1b", "zero_bubble"):
        compare(fs.make_mesh(stage=n), 3, kind, 1, layers, check="always")
    compare(fs.make_mesh(stage=n), 2, "interleaved", 2, 2 * layers)


SPLIT_ENDS = [(P("stage"), 5, 1), (P("stage", lengths=(0, 5, 7)), 3, 1), (P("stage", lengths=(0, VOCAB)), 2, 1),
              (P(("model", "stage")), 2, 2)]  # fmt: skip


@pytest.mark.parametrize(("wte", "n", "model"), SPLIT_ENDS)
def test_ends_may_be_split_over_the_stages(wte, n, model):
    """Also unevenly, on one stage, over an axis whose parts the program gathers, evenly beside these, and donated."""
    params, b, specs = parameters(n, tied=False), batch(ROWS * 3), ({"wte": wte, "head": P("stage")}, P("stage"))

    def join(p):
        return p[0] | {"wte": fs.all_gather(p[0]["wte"], "model", to="invariant")}, p[1]

    f = fs.pipelined(first, layer, mean, axis="stage", microbatches=3, gather=join if model > 1 else None)
    mesh = fs.make_mesh(stage=n, model=model)
    step = fs.shard_map(f, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs), check="always", donate=0)
    with fs.recording() as log:
        got = fs.device_get(step(fs.device_put(params, specs, mesh), b))
    assert_same(got, dense(params, b, 3), f"{wte} on {n}", **CLOSE)
    for p in fs.plan(step, params, b).positions:  # in which no size is unknown
        assert [t.sent for t in p.transfers] == [t.sent for t in log if t.rank == p.rank]


@pytest.mark.parametrize(("kind", "v", "n", "layers"), [("1f1b", 1, 2, 5), ("zero_bubble", 1, 4, 3),
                                                       ("interleaved", 2, 2, 5)])  # fmt: skip
def test_layers_may_be_a_list_each_on_one_stage(kind, v, n, layers):
    """With matrices split over data, the rows of which are first on one stage."""
    ends, stacked = parameters(layers)
    listed = [{name: x[i] for name, x in stacked.items()} for i in range(layers)]
    wanted = [{"up": P("data"), "down": P(None, "data"), "scale": P()}] * layers
    specs = (P(), fs.on_stages(wanted, listed, "stage", n, chunks=v))
    stages = [spec["up"].lengths["stage"].index(D) for spec in specs[1]]
    assert stages == {"1f1b": [0, 0, 0, 1, 1], "zero_bubble": [0, 1, 2], "interleaved": [0, 0, 1, 0, 1]}[kind]
    assert str(specs[1][0]["up"]) == f"P(('stage', 'data'), lengths={{'stage': {(D,) + (0,) * (n - 1)}}})"

    def block(p, h, b):
        return layer(fs.unshard(p, wanted[0], "data", shapes=listed[0]), h, b)

    f = fs.pipelined(lambda ends, b: first(fs.pvary(ends, "data"), b), block,
                     lambda ends, h, b: fs.pmean(mean(fs.pvary(ends, "data"), h, b), "data"), axis="stage",
                     microbatches=3, schedule=kind, chunks=v)  # fmt: skip
    b = {"ids": torch.arange(18).view(6, 3) % VOCAB, "targets": 1 + torch.arange(18).view(6, 3) % (VOCAB - 1)}
    step = fs.shard_map(f, mesh=fs.make_mesh(data=2, stage=n), in_specs=(specs, P("data")), out_specs=(P(), specs),
                        check="always")  # fmt: skip
    loss, (d_ends, d_layers) = fs.device_get(step((ends, listed), b))
    want, (want_ends, want_layers) = dense((ends, stacked), b, 3)
    got = {name: torch.stack([d[name] for d in d_layers]) for name in stacked}
    assert_same((loss, d_ends, got), (want, want_ends, want_layers), **CLOSE)


def test_gather_may_make_a_list_of_stacked_layers():
    params, b, specs = parameters(4), batch(ROWS * 2), (P(), P("stage"))

    def unstacked(p):
        return p[0], [{name: x[i] for name, x in p[1].items()} for i in range(len(p[1]["up"]))]

    f = fs.pipelined(first, layer, mean, axis="stage", microbatches=2, gather=unstacked)
    step = fs.shard_map(f, mesh=fs.make_mesh(stage=2), in_specs=(specs, P()), out_specs=(P(), specs), check="always")
    assert_same(fs.device_get(step(params, b)), dense(params, b, 2), **CLOSE)


def listed(layers, specs, chunks=1, data=1):
    """Loss and gradients of layers that scale h and may have no leaves, on two stages; and of the dense model."""
    x, rows = numbers(4 * data, D), P("data")

    def scaled(p, h, b):
        return torch.sin(h * fs.unshard(p, rows, "data", shapes={"w": x[0]} if p else {}).get("w", 3.0))

    def loss(p, b):
        for i in range(len(p)):
            b = torch.sin(b * p[i].get("w", 3.0))
        return b.square().mean()

    f = fs.pipelined(lambda ends, b: b, scaled, lambda ends, h, b: fs.pmean(h.square().mean(), "data"), axis="stage",
                     microbatches=2, schedule="interleaved" if chunks > 1 else "1f1b", chunks=chunks)  # fmt: skip
    step = fs.shard_map(lambda p, b: f(({}, p), b), mesh=fs.make_mesh(data=data, stage=2), in_specs=(specs, P("data")),
                        out_specs=(P(), ({}, specs)), check="always")  # fmt: skip
    got, (_, grads) = fs.device_get(step(layers, x))
    return (got, grads), fs.accumulate(loss, 2)(layers, x)


def test_listed_layers_are_where_their_specs_place_them():
    """Also layers without leaves, and those of which some ranks of their stage have no rows: 6 over 4."""
    layers = [{}, {"w": numbers(D)}, {}, {"w": numbers(D, salt=1)}, {}]
    for chunks, data in ((1, 4), (2, 1)):
        got, want = listed(layers, fs.on_stages([P("data")] * 5, layers, "stage", 2, chunks=chunks), chunks, data)
        assert_same(got, want, f"{chunks} {data}", **CLOSE)


def test_listed_layers_in_another_order_than_the_stages_are_refused():
    layers = [{"w": numbers(D, salt=i)} for i in range(4)]
    text = error_text(listed, layers, fs.on_stages([P("data")] * 4, layers, "stage", 2, chunks=2))
    assert (
        text
        == """\
pipelined: params[1][2] is on stage 0, and stage 1 is next
  chunks  1    stages  2
  fix: fs.on_stages(specs, layers, axis, 2, chunks=1)"""
    )
    text = error_text(listed, layers, [{"w": P(("stage", "data"))}] * 4)
    assert text.startswith("pipelined: params[1][0] is on stage 0 and 1, and stage 1 is next"), text


def pipelines_on_two_processes():
    """A job for `ranks`: see tests/_core/comm/test_process.py."""
    for kind, v in KINDS:
        for m in (1, 5):
            compare(fs.make_mesh(stage=2), m, kind, v, 4, check="always" if m == 1 else "never")


# --- with other axes: data by FSDP or not, model, dropout, aux ------------------------------------------------------

ENDS = {"wte": P("data"), "head": P("data")}
LAYERS = {"up": P("stage", "data", "model"), "down": P("stage", "model", "data"), "scale": P("stage")}
ONE = {name: P(*[axes or None for axes in spec.parts(3)[1:]]) for name, spec in LAYERS.items()}


def every_axis(mesh, m, kind, *, gather, dropout=False, has_aux=False, check="first"):
    """Layers split over data, stage and model; weights gathered once a step, or by microbatch."""

    def whole(p, specs, once):
        return fs.unshard(p, specs, "data") if gather == once else p

    def begin(ends, b):
        h = whole(ends, ENDS, "microbatch")["wte"][b["ids"]]
        return nn.dropout(h, 0.3, key=fs.pvary(fs.key(5), "stage"), spec=P("data")) if dropout else h

    def block(p, h, b, *key):
        p = whole(p, ONE, "microbatch")
        y = fs.psum(torch.tanh(fs.pvary(h * p["scale"], "model") @ p["up"]) @ p["down"], "model")
        return h + (nn.dropout(y, 0.3, key=key[0], spec=P("data")) if key else y)

    def end(ends, h, b):
        loss = losses(whole(ends, ENDS, "microbatch"), h, b)
        out = fs.psum(loss.sum(), "data"), fs.psum((b["targets"] != 0).sum(), "data")
        return (out, {"mean": out[0] / 7, "is_large": out[0] > 50}) if has_aux else out

    f = fs.pipelined(begin, block, end, axis="stage", microbatches=m, schedule=kind, counted=True, has_aux=has_aux,
                     gather=lambda p: (whole(p[0], ENDS, "step"), whole(p[1], LAYERS, "step")))  # fmt: skip
    return fs.shard_map(lambda p, b, keys: f(p, b, each=keys if dropout else None), mesh=mesh, check=check,
                        in_specs=((ENDS, LAYERS), P("data"), P("stage")), out_specs=(P(), (ENDS, LAYERS)))  # fmt: skip


AXES = [
    (axes, kind, gather, dropout)
    for axes in ((2, 2, 1), (1, 2, 2), (2, 2, 2), (1, 4, 1))
    for kind in ("1f1b", "gpipe", "zero_bubble")
    for gather in ("step", "microbatch")
    for dropout in (False, True)
]
FEW_AXES = [((2, 2, 1), "1f1b", "microbatch", True), ((1, 2, 2), "zero_bubble", "step", True),
            ((1, 4, 1), "1f1b", "step", False)]  # fmt: skip


@pytest.mark.parametrize(("axes", "kind", "gather", "dropout"), slow_unless(FEW_AXES, AXES))
def test_stages_of_split_layers_and_data_equal_one_device(axes, kind, gather, dropout):
    params, b, keys = parameters(4, tied=False), batch(12), torch.stack(list(fs.split(fs.key(3), 4)))
    meshes = [fs.make_mesh(**dict(zip(("data", "stage", "model"), sizes, strict=True))) for sizes in (axes, (1, 1, 1))]
    steps = [every_axis(mesh, 3, kind, gather=gather, dropout=dropout, has_aux=True, check="always") for mesh in meshes]
    ((loss, aux), grads), ((want, want_aux), want_grads) = (fs.device_get(step(params, b, keys)) for step in steps)
    for x in (aux, want_aux):  # which rows a microbatch has depends on the mesh
        assert x["mean"].unique().numel() == 3
        assert x["is_large"].dtype == torch.bool
    assert_same((loss, grads, aux["mean"].sum()), (want, want_grads, want_aux["mean"].sum()), **CLOSE)


def test_verify_check_and_plan_accept_a_pipeline():
    step = every_axis(fs.make_mesh(data=2, stage=2, model=1), 2, "1f1b", gather="microbatch", dropout=True)
    args = parameters(4, tied=False), batch(8), torch.stack(list(fs.split(fs.key(3), 4)))
    assert "verified" in repr(fs.verify(step, *args))
    checked = fs.check(step, *args)
    assert {t.op for t in checked.transfers} >= {"permute", "all_gather", "reduce_scatter"}
    plan = fs.plan(step, *args)
    assert [t for t in plan.transfers if t.op == "permute"]


# --- what is kept and sent -----------------------------------------------------------------------------------------


class _Token:
    """Something that lives as long as a node of the graph."""


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, alive):
        ctx.token = _Token()
        alive.add(ctx.token)
        return h.view_as(h)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


@pytest.mark.parametrize(("kind", "v", "n", "m"), [("gpipe", 1, 2, 5), ("1f1b", 1, 3, 5), ("1f1b", 1, 4, 3),
                                                  ("interleaved", 2, 2, 6), ("zero_bubble", 1, 3, 7)])  # fmt: skip
def test_a_stage_keeps_the_graphs_of_as_many_chunks_as_the_table_says(kind, v, n, m):
    alive, most = [weakref.WeakSet() for _ in range(n)], [0] * n

    def stage(p, h, b):
        s = fs.axis_position("stage")
        h = layer(p, _Held.apply(h, alive[s]), b)
        most[s] = max(most[s], len(alive[s]))
        return h

    step = pipeline(fs.make_mesh(stage=n), m, kind, v, stage=stage, check="never")
    step(in_chunks(parameters(n * v), v), batch(m))
    assert tuple(most) == fs.schedule_table(kind, n, m, v).in_flight
    assert not any(map(len, alive))


def test_transfers_are_one_message_each_way_and_the_sums_of_the_ends_and_the_loss():
    params, b, m = parameters(4), batch(8), 4
    with fs.recording() as log:
        pipeline(fs.make_mesh(stage=2), m, check="never")(params, b)
    size = 2 * 3 * D * 8
    sent = [(t.op, t.phase, t.sent) for t in log if t.rank == 0 and t.sent]
    assert sent.count(("permute", "forward", size)) == m
    assert sorted(set(sent)) == sorted([("permute", "forward", size), ("all_reduce", "forward", 8),
                                        ("all_reduce", "backward", VOCAB * D * 8)])  # fmt: skip
    back = [t.sent for t in log if t.rank == 1 and t.op == "permute" and t.phase == "backward"]
    assert back == [size] * m


def test_zero_bubble_computes_no_product_twice():
    def count(params, b, kind):
        with Operations() as operations:
            fs.pipelined(first, layer, mean, axis="stage", microbatches=3, schedule=kind)(params, b)
        return torch.tensor([sum(n for op, n in operations.counts.items() if "mm" in str(op))])

    mesh, specs = fs.make_mesh(stage=2), ((P(), P("stage")), P())
    for kind in ("1f1b", "zero_bubble"):
        f = fs.shard_map(lambda p, b, kind=kind: count(p, b, kind), mesh=mesh, in_specs=specs, out_specs=P("stage"),
                         check="never")  # fmt: skip
        # Of 3 microbatches, three products for each of 2 matrices of 2 layers; the head is on the last stage.
        assert fs.device_get(f(parameters(4), batch(6))).tolist() == [3 * 3 * 4, 3 * 3 * (4 + 1)]


def test_forward_returns_the_results_of_the_last_stage_on_each():
    """Also with dropout: a microbatch has its rows' numbers of the draw for the batch, on one stage, too."""
    params, b, keys = parameters(4), batch(6), fs.split(fs.key(0), 4)

    def block(p, h, b, key):
        return nn.dropout(layer(p, h, b), 0.3, key=key)

    def logits(ends, h, b):
        return h @ ends["wte"].mT, b["ids"] > 3, *[b["ids"].to(dtype) for dtype in (torch.uint8, torch.uint32)]

    h = first(params[0], b)
    for i in range(4):
        h = block({name: x[i] for name, x in params[1].items()}, h, b, keys[i])
    want = tuple(x.unflatten(0, (3, 2)) for x in logits(params[0], h, b))
    f = fs.pipelined(first, block, logits, axis="stage", microbatches=3)
    for n in (1, 2, 4):
        step = fs.shard_map(lambda p, b, keys: f.forward(p, b, each=keys), mesh=fs.make_mesh(stage=n),
                            in_specs=((P(), P("stage")), P(), P("stage")), out_specs=P(), check="always")  # fmt: skip
        assert_same(fs.device_get(step(params, b, keys)), want, f"{n} stages", **CLOSE)


def test_h_may_be_a_tree_of_several_dtypes():
    def begin(ends, b):
        return first(ends, b), torch.zeros((), dtype=torch.float32)

    def block(p, h, b):
        x, penalty = h
        return layer(p, x, b), penalty + p["scale"].square().sum().float()

    def end(ends, h, b):
        return mean(ends, h[0], b) + h[1].double() / 9

    found = []
    for n in (1, 3):
        f = fs.pipelined(begin, block, end, axis="stage", microbatches=2)
        specs = (P(), P("stage"))
        step = fs.shard_map(
            f, mesh=fs.make_mesh(stage=n), in_specs=(specs, P()), out_specs=(P(), specs), check="always"
        )
        found.append(fs.device_get(step(parameters(3), batch(4))))
    assert_same(found[1], found[0], rtol=1e-6, atol=1e-6)


def test_a_number_of_the_batch_and_the_dtype_of_autocast_may_change_between_calls():
    def end(ends, h, b):
        return h.float().square().mean(), h[0, : b["n"]]

    f = fs.pipelined(lambda ends, b: b["x"] @ ends, lambda p, h, b: torch.tanh(h @ p), end, axis="stage",
                     microbatches=2, has_aux=True)  # fmt: skip

    def run(p, b, dtype):
        with torch.autocast("cpu", dtype):
            return f(p, b)[0][1]

    step = fs.shard_map(run, mesh=fs.make_mesh(stage=2), in_specs=((P(), P("stage")), P(), P()), out_specs=P())
    params = torch.eye(D), torch.eye(D).expand(2, D, D)
    for n, dtype in ((1, torch.bfloat16), (2, torch.bfloat16), (2, torch.float16)):
        for _ in range(2):
            aux = step(params, {"x": torch.ones(4, D), "n": n}, dtype)
            assert (aux.shape, aux.dtype) == ((2, n), dtype)


# --- errors ----------------------------------------------------------------------------------------------------------


def wrong(n=2, rows=4, layers=4, specs=None, in_chunks_=1, f=None, **options):
    """Return the text of the error of a pipeline with some wrong option."""
    options = {"first": first, "stage": layer, "last": mean, "axis": "stage", "microbatches": 2} | options
    specs = specs or (P(), P("stage"))
    run = fs.pipelined(*[options.pop(name) for name in ("first", "stage", "last")], **options)
    run = f(run) if f else run
    step = fs.shard_map(run, mesh=fs.make_mesh(stage=n), in_specs=(specs, P()), out_specs=P(), check="never")
    return error_text(step, in_chunks(parameters(layers), in_chunks_), batch(rows))


MISTAKES = {
    "rows": ({"rows": 3}, """\
pipelined: batch['ids'] cannot be split into 2 equal microbatches
  shape  [3, 3]
  3 % 2 = 1
  fix: another number of steps, or another batch size; what is not split, by a closure"""),
    "layers not split": ({"specs": (P(), P())}, """\
pipelined: params[1]['down']: the layers are not split over the axis
  shape  [4, 8, 6]    spec  P()    chunks  1
  fix: P('stage', ...), of leaves [layers, ...]"""),
    "chunks of plain layers": ({"chunks": 2, "schedule": "interleaved"}, """\
pipelined: params[1]['down']: the layers are not split over the axis
  shape  [2, 8, 6]    spec  P('stage')    chunks  2
  fix: P(None, 'stage', ...), of leaves [2, layers of a chunk, ...]"""),
    "other chunks": ({"chunks": 3, "schedule": "interleaved", "specs": (P(), P(None, "stage"))}, """\
pipelined: the leaves must be stacked, with the layers of this stage as dims 0 and 1, [3, layers of a chunk, ...]
  layers['down'] [4, 4, 6]
  layers['scale'] [4, 3]
  layers['up'] [4, 3, 8]
  fix: x.reshape(3, L // 3, *x.shape[1:]) of a leaf of L layers"""),
    "dtype": ({"stage": lambda p, h, b: h.float()}, """\
pipelined(stage): h has another structure, shape or dtype than first returns
  stage  float32[2, 3, 6]    first  float64[2, 3, 6]
  each stage sends to the next one what it receives
  fix: one form of h for all layers, x.to(h.dtype) for another dtype"""),
    "shape": ({"stage": lambda p, h, b: h[:, :1]}, """\
pipelined(stage): h has another structure, shape or dtype than first returns
  stage  float64[2, 1, 6]    first  float64[2, 3, 6]
  each stage sends to the next one what it receives
  fix: one form of h for all layers, x.to(h.dtype) for another dtype"""),
    "tree": ({"stage": lambda p, h, b: [h, h], "layers": 2}, """\
pipelined(stage): h has another structure, shape or dtype than first returns
  stage  ['float64[2, 3, 6]', 'float64[2, 3, 6]']    first  float64[2, 3, 6]
  each stage sends to the next one what it receives
  fix: one form of h for all layers, x.to(h.dtype) for another dtype"""),
    "a count": ({"last": total}, """\
pipelined(last): the loss is a tuple, not a tensor
  fix: return (loss, aux) with has_aux=True, or (total, count) with counted=True"""),
    "no count": ({"counted": True}, """\
pipelined(last): counted=True, and the result is tensor(0., dtype=torch.float64)
  fix: return (total, count)"""),
    "losses": ({"last": losses}, """\
pipelined(last): the loss must be one floating number, not float64[6]
  fix: reduce it: loss.mean() or loss.sum()"""),
    "integers": ({"first": lambda ends, b: b["ids"]}, """\
pipelined: the h of first is int64[2, 3], not a tensor of floating numbers
  fix: what is not differentiated is in the batch, which each stage has"""),
    "a gradient": ({"f": lambda run: lambda p, b: fs.grad(lambda p: run(p, b)[0])(p)}, """\
pipelined: called in fs.grad, or another transform
  it computes a loss with its gradients, while it sends messages
  fix: call it in place of value_and_grad, in a program that is not compiled"""),
    "no pair": ({"f": lambda run: lambda p, b: run(p[0], b)}, """\
pipelined: params is a dict
  fix: pass a pair: (ends, layers)"""),
    "keys among the layers": ({"f": lambda run: lambda p, b: run((p[0], {"up": p[1]["up"], "key": b["ids"]}), b)}, """\
pipelined: params[1]['key'] is int64, which has no gradient
  fix: pass it by each=, or capture it"""),
    "rows of each": ({"f": lambda run: lambda p, b: run(p, b, each=b["ids"] + 0)}, """\
pipelined: the leaves must be stacked, with the layers of this stage as dim 0, [layers, ...]
  each [4, 3]
  layers['down'] [2, 8, 6]
  layers['scale'] [2, 6]
  layers['up'] [2, 6, 8]
  fix: torch.stack the leaves of the layers; each= like them"""),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    options, text = MISTAKES[name]
    assert wrong(**options) == text


@pytest.mark.parametrize("check", ["first", "never"])
def test_a_sum_over_the_stages_inside_one_is_refused(check):
    """It would wait for stages that compute other microbatches."""
    step = pipeline(fs.make_mesh(stage=2), 2, check=check, stage=lambda p, h, b: fs.psum(layer(p, h, b), "stage"))
    text = error_text(step, parameters(4), batch(4))
    assert (
        re.sub(r":\d+ ", ":0 ", text)
        == """\
all_reduce: called in a stage of a pipeline, which the ranks do not run together
  over stage, at test_pipeline.py:0 in <lambda>
  it would not end
  fix: call it in gather=, or after the pipeline; over axes without the stages'"""
    )


def test_a_loss_that_asks_for_the_value_of_a_tensor_is_refused():
    text = wrong(last=lambda ends, h, b: losses(ends, h, b)[b["targets"].flatten() > 1].mean())
    assert (
        re.sub(r":\d+ ", ":0 ", text)
        == """\
test_pipeline.py:0 in <lambda>: in a pipeline each stage first computes shapes without data, and this operation \
needs the value of a tensor: aten.nonzero.default
  fix: keep it a tensor (torch.where, indexing by tensors)"""
    )


def test_types_of_h_are_checked_at_each_stage():
    """A stage whose result varies over data, where the h of first does not, would have a wrong gradient."""
    f = fs.pipelined(lambda ends, b: ends["x"].expand(2, D), lambda p, h, b: h * fs.pvary(p["w"], "data") * b.sum(),
                     lambda ends, h, b: fs.pmean(h.sum(), "data"), axis="stage", microbatches=2)  # fmt: skip
    mesh = fs.make_mesh(data=2, stage=2)
    specs = ({"x": P()}, {"w": P("stage")})
    step = fs.shard_map(f, mesh=mesh, in_specs=(specs, P("data")), out_specs=(P(), specs), check="always")
    text = error_text(step, ({"x": numbers(D)}, {"w": numbers(2, D)}), numbers(8))
    assert (
        text
        == """\
pipelined: the h of stage varies over 'data', and the h of first does not
  each stage sends to the next one what it receives
  fix: fs.pvary(h, 'data') in first"""
    )
