"""Cost of filling a part of a leaf in random words, bytes and operations; `benchmarks/init.py` measures time."""

from __future__ import annotations

import itertools
import math
import threading
import time
import tracemalloc

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import P
from fshard.models import llama
from fshard.random import draws as R  # noqa: N812
from fshard.random.threads import fill_parts, one_compute_thread
from fshard.spec import box_shape, local_box
from tests.benchmarks import init as benchmark
from tests.lib.operations import Operations

CPU = torch.device("cpu")
MIB = 1 << 20
SPECS = {"row": P("n"), "column": P(..., "n"), "middle": P(None, "n"), "both": P("n", "m")}
SHAPES = [(64, 128), (63, 127), (40, 3, 37), (16, 3, 8, 20), (8, 8, 8), (5, 7), (1, 200), (3, 3, 1, 65)]


@pytest.fixture
def words(monkeypatch):
    """Number of random words of each call of the generator, since the list was last cleared."""
    counts = []
    philox_in_place = R.philox_in_place

    def counted(lanes, *args):
        counts.append(lanes.numel())
        philox_in_place(lanes, *args)

    monkeypatch.setattr(R, "philox_in_place", counted)
    return counts


def fill(leaf, box):
    return leaf.init.fill(fs.key(0), leaf.shape, box, leaf.dtype, CPU)


def runs(shape, box):
    """(start, length) of each run of `box`: elements that are contiguous in the whole, found by their indices."""
    at = torch.arange(math.prod(shape)).view(shape)[box].flatten().tolist()
    cuts = [0, *(i for i in range(1, len(at)) if at[i] != at[i - 1] + 1), len(at)]
    return [(at[a], b - a) for a, b in itertools.pairwise(cuts)] if at else []


def number_of(seen):
    """Return the number of operations that are not views."""
    return sum(n for operation, n in seen.counts.items() if not operation.is_view)


# --- words --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS)
def test_a_part_takes_the_words_of_its_runs_rounded_up_to_whole_blocks(spec, words):
    for shape, n in itertools.product(SHAPES, (1, 2, 4, 8)):
        leaf = fs.init.normal(shape)
        for i, j in itertools.product({0, n // 2, n - 1}, (0, 1)):
            box = local_box(shape, SPECS[spec], {"n": n, "m": 2}, {"n": i, "m": j})
            words.clear()
            fill(leaf, box)
            # A run of L elements that begins in the middle of a block needs up to 3 words before it and 3 after it.
            # If runs begin at different offsets in their blocks, all take as many words as the longest.
            box_runs = runs(shape, box)
            aligned = len({start % 4 for start, _ in box_runs}) < 2
            needed = sum((start % 4 + length + 3) // 4 * 4 for start, length in box_runs)
            most = needed if aligned else sum(length + 6 for _, length in box_runs)
            assert needed <= sum(words) <= most, (shape, box)


@pytest.mark.parametrize("spec", ["row", "column", "middle"])
@pytest.mark.parametrize("shape", [(64, 256), (32, 64, 128), (16, 8, 16, 64)])
def test_one_of_n_ranks_draws_one_nth_of_the_words(spec, shape, words):
    leaf = fs.init.uniform(shape)
    for n in (1, 2, 4, 8):
        for i in range(n):
            words.clear()
            fill(leaf, local_box(shape, SPECS[spec], {"n": n}, {"n": i}))
            assert sum(words) * n == leaf.numel()


def test_each_tile_of_a_long_run_takes_at_most_one_block_more(words, monkeypatch):
    monkeypatch.setattr(R, "_TILE_BLOCKS", 64)
    fill(fs.init.normal(100_000), (slice(3, 90_001),))
    assert 90_000 <= sum(words) <= 90_000 + 4 * (len(words) + 1)
    assert len(words) <= 90_000 // (4 * 64) + 1


def test_a_mesh_draws_every_element_once(words):
    mesh = fs.make_mesh(n=4, m=2)
    tree = {"a": fs.init.normal((64, 64)), "b": fs.init.normal((64, 128)), "c": fs.init.trunc_normal((32, 16))}
    fs.materialize(tree, {"a": P("n", "m"), "b": P(None, ("n", "m")), "c": P("n")}, mesh, key=fs.key(0))
    assert sum(words) == sum(leaf.numel() for leaf in fs.tree.leaves(tree))  # replicas over m are copies


# --- bytes and operations -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "dtype"), [("row", torch.float32), ("column", torch.bfloat16)], ids=str)
def test_scratch_memory_does_not_grow_with_the_part(spec, dtype):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for shape in [(1024, 1024), (2048, 2048), (513, 8191)]:
            leaf = fs.init.normal(shape, dtype=dtype)
            box = local_box(shape, SPECS[spec], {"n": 2}, {"n": 0})
            with Operations() as seen:
                made = fill(leaf, box)
            assert (
                max({a.nbytes for a in seen.allocated} - {made.untyped_storage().nbytes()}) <= 1.25 * MIB
            )  # 5 int64 rows of 2^15 blocks
    finally:
        torch.set_num_threads(threads)


@pytest.fixture
def two_threads():
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fills(monkeypatch):
    """(thread, compute threads of torch in it) of each tile."""
    seen = []
    philox_in_place = R.philox_in_place

    def watched(*args):
        seen.append((threading.get_ident(), torch.get_num_threads()))
        philox_in_place(*args)

    monkeypatch.setattr(R, "philox_in_place", watched)
    return seen


def threads_of_a_new_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("inference", [False, True])
def test_no_operation_is_split_between_threads_of_torch(two_threads, fills, inference):
    """Torch's threads wait for each other in every operation, which on a busy machine took ten times the CPU time."""
    here, part = threading.get_ident(), (slice(0, 513), slice(1, 300))
    shapes = {"large": (513, 400), "small": (128, 128)}
    made, idents = {}, {}
    for name, shape in shapes.items():
        fills.clear()
        with torch.inference_mode(inference):
            made[name] = fill(fs.init.normal(shape), part if name == "large" else (slice(0, 128),) * 2)
        idents[name] = {ident for ident, _ in fills}
        assert {n for _, n in fills} == {1}
        assert torch.get_num_threads() == threads_of_a_new_thread() == 2
    assert idents["small"] == {here}
    assert here not in idents["large"]
    torch.set_num_threads(1)
    assert torch.equal(made["large"], fill(fs.init.normal((513, 400)), part))
    assert torch.equal(made["small"], fill(fs.init.normal((128, 128)), (slice(0, 128),) * 2))


def test_thread_that_has_not_computed_yet_keeps_one_when_another_restores_two(two_threads):
    def restores():
        with one_compute_thread(then=2):
            pass

    def computes():
        with one_compute_thread(then=2):
            other = threading.Thread(target=restores)
            other.start()
            other.join()
            found.append(torch.get_num_threads())

    found = []
    thread = threading.Thread(target=computes)
    thread.start()
    thread.join()
    assert found == [1]


def test_tiles_are_divided_between_threads(two_threads, fills, monkeypatch):
    both = threading.Barrier(2, timeout=600)  # passed by two threads, each at its first tile
    first = threading.local()
    watched = R.philox_in_place

    def wait(*args):
        if not hasattr(first, "tile"):
            first.tile = both.wait()
        watched(*args)

    monkeypatch.setattr(R, "philox_in_place", wait)
    fill(fs.init.normal(1 << 20), (slice(0, 1 << 20),))
    assert len(fills) == 8
    assert len({ident for ident, _ in fills}) == 2


def test_error_in_a_thread_is_raised_and_restores_the_number_of_threads(two_threads, monkeypatch):
    def fails(*_):
        raise MemoryError

    monkeypatch.setattr(R, "philox_in_place", fails)
    for n in (1 << 20, 1 << 10):
        with pytest.raises(MemoryError):
            fill(fs.init.normal(n), (slice(0, n),))
        assert torch.get_num_threads() == threads_of_a_new_thread() == 2


def test_no_part_is_begun_after_an_error(two_threads):
    done = []

    def part(i):
        if i == 1:
            raise MemoryError
        time.sleep(1e-4)  # all parts would take 20 s
        done.append(i)

    with pytest.raises(MemoryError):
        fill_parts(range(200_000), lambda: part, 2)
    assert 199_999 not in done


def test_a_draw_in_a_region_stays_in_the_thread_of_its_rank(two_threads, fills):
    @fs.shard_map(mesh=fs.make_mesh(kind="simulated", n=2), in_specs=(), out_specs=P("n"))
    def draw():
        rank = threading.get_ident()
        with Operations() as seen:
            x = fs.random.normal(fs.key(0), (1 << 19,), spec=P("n"))
        assert {ident for ident, _ in fills} >= {rank}
        assert number_of(seen) > 50
        return x

    got = draw()
    assert len({ident for ident, _ in fills}) == 2
    assert torch.equal(fs.device_get(got), fs.random.normal(fs.key(0), (1 << 19,)))


@pytest.mark.parametrize("make", [fs.init.zeros, fs.init.ones, lambda s: fs.init.full(s, 0.5)])
def test_a_constant_takes_one_operation_and_no_words(make, words):
    with Operations() as seen:
        made = fill(make((256, 256)), (slice(0, 256), slice(0, 32)))
    assert (number_of(seen), seen.allocated, words) == (1, [(made.numel(), made.nbytes)], [])


def test_a_small_leaf_takes_the_same_few_operations_for_every_spec():
    counts = {}
    for n in (1, 2, 4, 8):
        for name in ("row", "column"):
            with Operations() as seen:
                fill(fs.init.normal((64, 64)), local_box((64, 64), SPECS[name], {"n": n}, {"n": n // 2}))
            counts[n, name] = number_of(seen)
    assert len(set(counts.values())) == 1, counts
    assert counts[1, "row"] < 120


# --- a 70B Llama ----------------------------------------------------------------------------------------------


def test_describing_a_llama_70b_takes_less_than_10_mib():
    tracemalloc.start()
    try:
        tree = llama.init(benchmark.BIG)
        specs = fs.fully_shard(llama.specs(benchmark.BIG, model="model"), tree, axis="data")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(x.numel() for x in fs.tree.leaves(tree)) == 70_553_706_496
    assert len(fs.tree.leaves(specs)) == len(fs.tree.leaves(tree))
    assert peak < 10 * MIB


@pytest.fixture
def rank_37():
    """Mesh of rank 37 of 64, in a process group without the other ranks, where any collective raises."""
    yield benchmark.one_of(64, 37, CPU, data=8, model=8)
    dist.destroy_process_group()


def test_one_rank_of_64_draws_its_share_of_the_words_without_communication(rank_37, words):
    cfg = llama.Config(vocab_size=256, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
                       num_attention_heads=16, num_key_value_heads=8)  # fmt: skip
    tree = llama.init(cfg)
    specs = fs.fully_shard(llama.specs(cfg, model="model"), tree, axis="data")
    placed = fs.materialize(tree, specs, rank_37, key=fs.key(0))
    drawn = [leaf.numel() for leaf in fs.tree.leaves(tree) if not isinstance(leaf.init, type(fs.init.ones(1).init))]
    assert sum(words) * 64 == sum(drawn)
    one = fs.materialize(tree, P(), fs.make_mesh(kind="simulated", one=1), key=fs.key(0))
    for part, whole in zip(fs.tree.leaves(placed), fs.tree.leaves(one), strict=True):
        box = part.box(37)
        assert tuple(part.shards[0].shape) == box_shape(box)
        assert torch.equal(part.shards[0], whole.shards[0][box])
