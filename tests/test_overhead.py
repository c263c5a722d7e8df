"""Cost of a `shard_map` call besides its function, counted and not timed: operations, copies, Python calls, bytes."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
import torch

import fshard as fs
from fshard import P, optim
from fshard._core.region import region
from fshard._core.transfers import recording
from fshard.spec import is_spec
from tests.lib.assertions import error_text
from tests.lib.operations import Operations

ONE = fs.make_mesh(kind="simulated", a=1, b=1)
TWO = fs.make_mesh(kind="simulated", a=2)
MESHES = pytest.mark.parametrize("mesh", [ONE, TWO], ids=repr)


def state(n, mesh, spec=P(), shape=(4, 4)):  # noqa: B008
    return fs.device_put([torch.full(shape, float(i + 1)) for i in range(n)], spec, mesh)


# --- a mesh of one rank ------------------------------------------------------------------------------------


def losses(x, *, psum=lambda x: x, pvary=lambda x: x, gather=lambda x: x):
    """Return a loss with the collectives of data and tensor parallelism, or without collectives."""

    def loss(p):
        p = pvary(p)
        h = torch.relu(x @ p["up"])
        return psum((gather(h @ p["down"]) - x).square().mean())

    return loss


def test_mesh_of_one_rank_runs_exactly_the_operations_of_the_plain_function():
    def step(p, x, **verbs):
        leaves = {k: w.detach().requires_grad_() for k, w in p.items()}
        loss = losses(x, **verbs)(leaves)
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        return {k: w - 0.1 * grads[k] for k, w in p.items()}, loss.detach()

    verbs = {
        "psum": lambda x: fs.psum(x, ("a", "b")),
        "pvary": lambda p: fs.pvary(p, ("a", "b")),
        "gather": lambda x: fs.all_gather(fs.psum_scatter(x, "a"), "a"),
    }
    p, x = {"up": torch.randn(4, 8), "down": torch.randn(8, 4)}, torch.randn(2, 4)
    with Operations() as plain:
        want = step(p, x)
    specs = {"up": P(..., "a"), "down": P("a")}
    f = fs.shard_map(lambda p, x: step(p, x, **verbs), mesh=ONE, out_specs=(specs, P()), donate=0)
    for _ in range(3):
        args = fs.device_put(p, specs, ONE), fs.device_put(x, P(), ONE)
        with Operations() as mapped, recording() as moved:
            got = f(*args)
        assert mapped.counts == plain.counts
        assert sorted(mapped.allocated) == sorted(plain.allocated)
        assert not moved
        torch.testing.assert_close(fs.device_get(got), want, rtol=0, atol=0)


def test_mesh_of_one_rank_runs_in_the_callers_thread():
    seen = fs.shard_map(threading.get_ident, mesh=ONE, out_specs=P())()
    assert seen == threading.get_ident()


@MESHES
def test_placed_arguments_and_new_results_are_not_copied(mesh):
    seen = {}

    def f(x):
        made = x + 1
        seen[region().rank] = (x, made)
        return made

    x = state(1, mesh)[0]
    for _ in range(3):
        y = fs.shard_map(f, mesh=mesh, out_specs=P())(x)
        for rank in mesh.ranks:
            assert seen[rank][0] is x.shards[rank]
            assert seen[rank][1] is y.shards[rank]


def test_plain_tensor_is_only_viewed_on_a_mesh_of_one_rank():
    x = torch.randn(3, 4, requires_grad=True)
    f = fs.shard_map(lambda x: (x + 1,), mesh=ONE, in_specs=P("a"), out_specs=P("a"))
    with torch.no_grad(), Operations() as ran:
        f(x)  # a first call copies it: it is not known yet what the function writes to
        ran.counts.clear()
        f(x)
    assert ran.counts == {torch.ops.aten.detach.default: 1, torch.ops.aten.add.Tensor: 1}


def test_only_results_that_share_storage_are_copied():
    big, small = state(2, ONE)
    f = fs.shard_map(lambda x, y: (x, y, y[:1], y.mul_(2)), mesh=ONE, out_specs=P(), donate=1)
    for _ in range(3):
        with Operations() as ran:
            *out, small = f(big, small)
        assert ran.counts[torch.ops.aten.clone.default] == 3  # x is not donated; two results share y with a third
        assert [x.shards[0].numel() for x in out] == [16, 16, 4]


# --- Python calls of a later call, per leaf ---------------------------------------------------------------------


def python_calls(f, *args):
    """Count the Python functions and methods entered in this thread during a call; also returns its result.

    Those of dynamo are left out: they run only where a test before has loaded it.
    """
    count = 0

    def count_call(frame, event, arg):
        nonlocal count
        count += (event == "call" and frame.f_code.co_name not in ("<listcomp>", "<genexpr>")
                  and "_dynamo" not in frame.f_code.co_filename)  # fmt: skip

    before = sys.getprofile()
    gc.disable()  # a collection would run finalizers of what other tests have left
    sys.setprofile(count_call)
    try:
        out = f(*args)
    finally:
        sys.setprofile(before)
        gc.enable()
    return count, out


@pytest.mark.parametrize("donate", [(), (0,)])
def test_later_call_runs_68_python_functions_and_none_for_a_leaf_that_is_not_donated(donate):
    counts = {}
    for n in (1, 10, 100):
        f = fs.shard_map(lambda p: list(torch._foreach_add(p, 1)), mesh=ONE, in_specs=P("a"), out_specs=P("a"),
                         donate=donate)  # fmt: skip
        p = state(n, ONE, P("a"))
        for _ in range(3):
            counts[n], p = python_calls(f, p)
    assert counts[100] - counts[10] == 90 * len(donate)  # `donate_to`
    assert counts[1] <= 68 + 3 * len(donate)


def test_later_call_leaves_two_objects_to_the_garbage_collector_for_a_leaf():
    f = fs.shard_map(lambda p: list(torch._foreach_add(p, 1)), mesh=ONE, in_specs=P("a"), out_specs=P("a"))
    made = {}
    gc.disable()
    try:
        for n in (10, 110):
            p = f(f(state(n, ONE, P("a"))))
            before = gc.get_count()[0]
            out = f(p)
            made[n] = gc.get_count()[0] - before
            assert len(out) == n
    finally:
        gc.enable()
    assert (made[110] - made[10]) / 100 <= 2  # the tensor and the `Sharded`


def test_checked_call_runs_at_most_26_python_functions_per_operation():
    def repeat(x, n):
        for _ in range(n):
            x.sin()

    counts = []

    @fs.shard_map(mesh=TWO, in_specs=(P("a"),), out_specs=P("a"))
    def f(x):
        counts.append([python_calls(repeat, x, n)[0] for n in (10, 110)])
        return x

    f(torch.ones(4))
    for few, many in counts:
        assert (many - few) / 100 <= 26


def test_step_with_gradients_runs_at_most_one_python_function_per_leaf_and_139_for_one():
    def loss(p, x):
        return torch.stack([(w * x).sum() for w in p]).sum()

    counts = {}
    for n in (1, 10, 100):
        f = fs.shard_map(lambda p, x: torch._foreach_sub(p, fs.value_and_grad(loss)(p, x)[1]), mesh=ONE, out_specs=P())
        p, x = state(n, ONE), torch.ones(4, 4)
        for _ in range(3):
            counts[n] = python_calls(f, p, x)[0]
    assert counts[1] <= 139
    assert (counts[100] - counts[10]) / 90 <= 1


def test_step_of_a_clip_and_adamw_runs_at_most_19_python_functions_per_donated_leaf_and_197_for_one():
    opt = optim.chain(optim.clip_by_global_norm(1.0, P()), optim.adamw(1e-3))
    counts = {}
    for n in (1, 10, 110):
        f = fs.shard_map(lambda p, s, g: opt.update(g, s, p), mesh=ONE, out_specs=P(), donate=(0, 1))
        p, grads = state(n, ONE), state(n, ONE)
        s = opt.init(p)
        for _ in range(3):
            counts[n], (p, s) = python_calls(f, p, s, grads)
    assert counts[1] <= 197  # three of them ask whether `update` has the parameters
    assert (counts[110] - counts[10]) / 100 <= 19


def test_prefix_of_two_specs_is_broadcast_by_6_python_functions():
    counts = {}
    for n in (2, 20):
        blocks = {f"h{i}": {"w": torch.ones(1), "b": {"x": torch.ones(1), "y": torch.ones(1)}} for i in range(n)}
        specs = {name: {"w": P("a"), "b": P()} for name in blocks}
        counts[n], flat = python_calls(lambda: fs.tree.broadcast(specs, blocks, name="specs", leaf=is_spec))  # noqa: B023
        assert flat == [P(), P(), P("a")] * n
    assert (counts[20] - counts[2]) / 18 <= 6  # two of `is_spec`, and four that count the leaves below "b"


def test_materialize_runs_at_most_131_python_functions_per_leaf_and_71_more_for_another_rank():
    def calls(n, mesh):
        described = [fs.init.normal((8, 16)) for _ in range(n)]
        return python_calls(lambda: fs.materialize(described, P("a"), mesh, key=fs.key(0)))[0]

    calls(1, TWO)  # accepts the types of arguments
    per_leaf = {mesh.size: (calls(30, mesh) - calls(10, mesh)) / 20 for mesh in (ONE, TWO)}
    assert per_leaf[1] <= 131
    assert per_leaf[2] - per_leaf[1] <= 71


def test_block_of_a_scan_runs_at_most_300_python_functions_and_of_a_loop_212():
    mesh, specs = fs.make_mesh(kind="simulated", a=2), {"w": P("a"), "b": P("a")}
    counts = {}

    def run(forward, n):
        def of_rank(p, x):
            counts.setdefault((forward, n), []).append(
                python_calls(fs.value_and_grad(lambda p: forward(p, x).square().sum()), p)[0]
            )

        stack = [{"w": torch.eye(4), "b": torch.ones(4)} for _ in range(n)]
        f = fs.shard_map(of_rank, mesh=mesh, in_specs=([specs] * n, P()), out_specs=P(), check="never")
        for _ in range(2):
            f(fs.device_put(stack, [specs] * n, mesh), torch.ones(2, 4))
        return counts[forward, n][-1]

    def block(p, x):
        return torch.tanh(x @ p["w"] + p["b"])

    def by_scan(p, x):
        return fs.scan(block, p, x, specs=[specs] * len(p), axis="a")

    def by_loop(p, x):
        for block_params in p:
            x = block(fs.unshard(block_params, specs, "a"), x)
        return x

    assert (run(by_scan, 30) - run(by_scan, 10)) / 20 <= 300  # it gathers twice
    assert (run(by_loop, 30) - run(by_loop, 10)) / 20 <= 212


def test_checked_arguments_of_known_types_cost_one_look_up():
    arguments = torch.ones(3), "a"
    checked = fs.errors.checked(probe)
    checked(*arguments)
    assert python_calls(checked, *arguments)[0] == 3  # the wrapper, its question to dynamo, and the function


def probe(x: torch.Tensor, axis: str | tuple[str, ...] | None) -> None:
    pass


def test_alternating_signatures_are_planned_once_each():
    f = fs.shard_map(lambda p: list(torch._foreach_add(p, 1)), mesh=ONE, out_specs=P())
    states = [state(n, ONE) for n in (10, 110, 60)]
    for _ in range(2):
        for p in states:
            f(p)
    few, many, _ = (python_calls(f, p)[0] for p in states)
    assert many == few


# --- later calls are checked too ---------------------------------------------------------------------------------


def with_bodies(*bodies, mesh=TWO, out=P("a")):  # noqa: B008
    """Return a function that runs another body at every call."""
    at = [0]

    def f(*args):
        return bodies[at[0]](*args)

    mapped = fs.shard_map(f, mesh=mesh, out_specs=out)

    def call(*args):
        try:
            return mapped(*args)
        finally:
            at[0] += 1

    return call


def test_later_results_of_other_types_are_checked_again():
    x = state(1, TWO, P("a"))[0]
    rank = lambda: int(fs.axis_index("a"))  # noqa: E731
    fine = lambda x: {"x": x + 1}  # noqa: E731
    wrong = {
        "f: result['x']: the spec is longer than the shape": lambda x: {"x": x.sum()},
        "f: result['x']: the ranks returned different types": lambda x: {"x": x.double() if rank() else x},
        "f: result['x']: the parts do not make up dim 0": lambda x: {"x": x[: 1 + rank()]},
        "f: rank 1 returned another tree than rank 0": lambda x: {"x": x} if rank() else {"y": x},
        "f: result['x']: is an int, not a tensor": lambda x: {"x": rank()},
    }
    for text, body in wrong.items():
        f = with_bodies(fine, fine, body, fine)
        f(x)
        f(x)
        assert text in error_text(f, x)
        assert repr(f(x)) == "{'x': f32[4@a, 4]}"


def test_later_results_may_have_another_structure():
    x = state(1, TWO, P("a"))[0]
    bodies = [
        (lambda x: {"x": x + 1}, "{'x': f32[4@a, 4]}"),
        (lambda x: {"x": [x + 1, x + 2]}, "{'x': [f32[4@a, 4], f32[4@a, 4]]}"),
        (lambda x: {"x": None}, "{'x': None}"),
        (lambda x: (x.double(),), "(f64[4@a, 4],)"),
        (lambda x: [x[:1] + 1], "[f32[2@a, 4]]"),
        (lambda x: x.clone().requires_grad_(), "f32[4@a, 4]"),
        (lambda x: {"x": x + 1}, "{'x': f32[4@a, 4]}"),
    ]
    f = with_bodies(*(body for body, _ in bodies))
    for _, shown in bodies:
        out = f(x)
        assert repr(out) == shown
        assert not any(
            s.requires_grad for leaf in fs.tree.leaves(out) if isinstance(leaf, fs.Sharded) for s in leaf.shards
        )


def test_later_result_number_that_differs_between_ranks_is_an_error():
    x = state(1, TWO)[0]
    f = with_bodies(lambda x: (x + 1, 3), lambda x: (x + 1, 3), lambda x: (x + 1, int(fs.axis_index("a"))), out=P())
    assert f(x)[1] == f(x)[1] == 3
    assert "f: result[1]: is not a tensor and differs between ranks" in error_text(f, x)


def test_later_argument_may_replace_a_leaf_by_a_subtree_and_the_reverse():
    seen = []
    f = fs.shard_map(seen.append, mesh=ONE, out_specs=P())
    x = torch.ones(2)
    for t in ({"x": x}, {"x": [x]}, {"x": None}, {"x": 1}, {"x": x}, {"x": {"y": x}}, {"x": (x, 1)}, x, {"x": x}):
        f(t)
        assert fs.tree.structure(seen[-1]) == fs.tree.structure(t)
        assert [type(a) for a in fs.tree.leaves(seen[-1])] == [type(a) for a in fs.tree.leaves(t)]


# --- memory ------------------------------------------------------------------------------------------------


@MESHES
def test_during_a_call_only_the_function_refers_to_donated_tensors(mesh):
    alive = []

    def f(p, kept):
        old = weakref.ref(p.pop("w"))
        alive.append(old() is not None)
        return p["b"] + kept

    for _ in range(3):
        p = dict(zip(("b", "w"), state(2, mesh), strict=True))
        kept = state(1, mesh)[0]
        out = fs.shard_map(f, mesh=mesh, out_specs=P(), donate=0)(p, kept)
        assert kept.shards[0] is not out.shards[0]
    assert alive == [False] * 3 * mesh.size


@MESHES
def test_after_a_call_nothing_refers_to_donated_tensors(mesh):
    gc.freeze()  # a collection visits what this test makes, not the million objects of the tests before
    f = fs.shard_map(lambda p: [w + 1 for w in p], mesh=mesh, out_specs=P(), donate=0)
    p = state(3, mesh)
    for _ in range(3):
        old = [weakref.ref(s) for w in p for s in w.shards]
        new = f(p)
        gc.collect()
        assert not any(s() is not None for s in old)  # while `p` is alive
        p = new


@MESHES
def test_donated_adamw_step_allocates_no_second_copy_of_parameters_or_state(mesh):
    opt, shape = fs.optim.adamw(1e-3), (64, 64)
    params = {"w": state(1, mesh, P("a"), shape)[0], "v": state(1, mesh, P(), shape)[0]}
    specs = {"w": P("a"), "v": P()}
    moments = opt.init(params)
    made = [Operations() for _ in mesh.ranks]

    def step(p, s, g):
        with made[region().rank]:
            return opt.update(g, s, p)

    f = fs.shard_map(step, mesh=mesh, out_specs=(specs, opt.specs(specs)), donate=(0, 1), check="never")
    for _ in range(3):
        before = [s.data_ptr() for x in fs.tree.leaves((params, moments)) if x.ndim for s in x.shards]
        with Operations() as outside:
            grads = dict(zip(params, [state(1, mesh, x.spec, shape)[0] for x in params.values()], strict=True))
            outside.allocated.clear()
            params, moments = f(params, moments, grads)
        after = [s.data_ptr() for x in fs.tree.leaves((params, moments)) if x.ndim for s in x.shards]
        assert after == before
        assert sum(a.nbytes for a in outside.allocated) < 256  # at most the counts
    for ops in made:
        assert ops.largest <= 64  # the new counts


# --- scratch: what a rank keeps from call to call -------------------------------------------------------------


class Buffer:
    """An object that can be referred to weakly."""


def keep_buffer(x):
    """Return the buffer of this rank's scratch, made by the first call that finds none, and its id."""
    buffer = region().scratch.setdefault("buffer", Buffer())
    rank = region().scratch.setdefault("rank", region().rank)
    assert rank == region().rank
    return id(buffer), buffer


@MESHES
def test_each_rank_has_one_scratch_for_all_calls_of_a_function(mesh):
    gc.freeze()
    seen = []

    def f(x):
        seen.append((region().rank, keep_buffer(x)[1]))

    mapped = fs.shard_map(f, mesh=mesh, out_specs=P(), check="never")
    x, y = state(1, mesh)[0], state(1, mesh, shape=(2,))[0]
    for args in (x, x, y, x):
        mapped(args)
    n = mesh.size
    calls = [dict(seen[i : i + n]) for i in range(0, 4 * n, n)]
    assert len({id(b) for b in calls[0].values()}) == n
    assert calls == [calls[0]] * 4  # one of its own for each batch size would multiply the buffers
    seen.clear()
    last = [weakref.ref(b) for b in calls[3].values()]
    calls.clear()
    assert all(b() is not None for b in last)
    del mapped
    gc.collect()
    assert all(b() is None for b in last)


@pytest.mark.parametrize(("check", "shared"), [("first", [1, 1]), ("always", [])])
def test_a_checked_call_starts_and_ends_with_empty_scratch(check, shared):
    seen = []
    f = fs.shard_map(lambda x: seen.append(sorted(region().scratch)) or keep_buffer(x)[0] * 0, mesh=TWO, out_specs=P(),
                     check=check)  # fmt: skip
    for _ in range(3):
        f(state(1, TWO)[0])
    assert [len(keys) for keys in seen] == [0] * (4 if shared else 6) + [2] * len(shared)


def test_the_scratch_of_a_failed_call_is_dropped():
    def f(x, fails):
        keep_buffer(x)
        if fails:
            raise ZeroDivisionError
        return len(region().scratch)

    seen = []
    mapped = fs.shard_map(lambda x, n: seen.append(sorted(region().scratch)) or f(x, n), mesh=ONE, out_specs=P())
    x = state(1, ONE)[0]
    mapped(x, 0)
    mapped(x, 0)
    with pytest.raises(ZeroDivisionError):
        mapped(x, 1)
    mapped(x, 0)
    assert [len(keys) for keys in seen] == [0, 2, 2, 0]


def test_concurrent_calls_have_separate_scratch():
    barrier, seen = threading.Barrier(2, timeout=600), []

    def f(x):
        seen.append(keep_buffer(x)[1])
        barrier.wait()  # both calls are inside

    mapped = fs.shard_map(f, mesh=ONE, out_specs=P())
    for _ in range(3):
        seen.clear()
        threads = [threading.Thread(target=mapped, args=(state(1, ONE)[0],)) for _ in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(seen) == 2
        assert seen[0] is not seen[1]
