import numpy as np
import pytest
import torch

import fshard as fs
from fshard import P, data
from fshard.random import orders
from tests.lib.assertions import error_text

ROWS = P("data")
# Golden values: a checkpoint's step number refers to these orders. A transcription of the network with Python's
# integers gives them too.
SHUFFLED = [9, 10, 3, 11, 6, 1, 2, 4, 7, 8, 5, 0]
PERMUTED = [0, 1, 8, 3, 7, 4, 2, 6, 9, 5]
PERMUTED_LARGE = [999020032776977081, 890656785506910270, 794857999561649329]
BATCHES = [[3, 8, 9, 6], [1, 0, 2, 7], [6, 9, 2, 1]]
MESHES = {
    "one": {"data": 1},
    "data=2": {"data": 2},
    "data=3": {"data": 3},
    "data=4": {"data": 4},
    "2x2": {"data": 2, "model": 2},
    "model first": {"model": 2, "data": 2},
}


def order(key, size):
    return data.permute(key, range(size), size=size).tolist()


# --- permute ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 9, 100, 1000, 65536, 65537])
def test_permute_is_a_bijection(size):
    for n in range(3):
        assert sorted(order(fs.key(n), size)) == list(range(size))


def test_permute_depends_only_on_the_key():
    orders = [order(fs.key(n), 1000) for n in range(20)]
    assert len({tuple(o) for o in orders}) == 20
    assert order(fs.key(7), 1000) == orders[7]


def test_permute_of_a_part_is_the_part_of_the_permutation():
    size = 12345
    whole = data.permute(fs.key(3), torch.arange(size), size=size)
    torch.testing.assert_close(data.permute(fs.key(3), range(5000, 6000), size=size), whole[5000:6000])
    grid = torch.randint(size, (3, 4, 5))
    torch.testing.assert_close(data.permute(fs.key(3), grid, size=size), whole[grid])
    assert data.permute(fs.key(3), torch.tensor(17), size=size).item() == whole[17]
    assert data.permute(fs.key(3), [], size=size).shape == (0,)


@pytest.mark.parametrize("size", [2**31 - 1, 2**40 + 15, 2**62 - 1, 2**62])
def test_permute_of_a_large_range_computes_only_the_positions(size):
    values = data.permute(fs.key(0), [0, 1, size // 2, size - 2, size - 1], size=size)
    assert values.dtype == torch.int64
    assert len(set(values.tolist())) == 5
    assert all(0 <= i < size for i in values.tolist())


@pytest.mark.parametrize(("size", "limit"), [(2, 15), (3, 27), (5, 50), (7, 80), (16, 330)])
def test_permute_maps_every_position_to_all_values_equally_often(size, limit):
    """Chi-square of (position, value) over random round keys; each limit is beyond p = 0.0001."""
    n = 4000
    words = np.random.default_rng(size).integers(0, 2**64, size=(orders._ROUNDS, n, 1), dtype=np.uint64)
    counts = np.zeros((size, size))
    at = np.broadcast_to(np.arange(size, dtype=np.int64), (n, size))
    keys = tuple(np.broadcast_to(w, (n, size)).reshape(-1) for w in words)
    for position, value in zip(at.T, permute_with_keys(at, keys, size).T, strict=True):
        counts[position[0]] = np.bincount(value, minlength=size)
    assert ((counts - n / size) ** 2 / (n / size)).sum() < limit


def permute_with_keys(at, keys, size):
    """Permute with different round keys for every element."""
    rows = (int(np.sqrt(size - 1)) // 2 + 1) * 2
    out = orders._shuffle(at.reshape(-1).astype(np.uint64), rows, -(-size // rows), keys)
    while (out >= size).any():
        out = np.where(out >= size, orders._shuffle(out, rows, -(-size // rows), keys), out)
    return out.astype(np.int64).reshape(-1, size)


def test_permute_has_no_correlation_and_no_repeated_steps():
    size = 4096
    permuted = np.array(order(fs.key(0), size))
    assert abs(np.corrcoef(np.arange(size), permuted)[0, 1]) < 0.08
    steps = np.diff(permuted) % size
    assert len(np.unique(steps)) > 2400  # a random order has 1 - 1/e of the 4096


def test_permute_golden_values():
    keys = tuple(np.array([k], dtype=np.uint64) for k in range(orders._ROUNDS))
    got = orders._shuffle(np.arange(12, dtype=np.uint64), 4, 3, keys)
    assert got.tolist() == SHUFFLED
    assert order(fs.key(0), 10) == PERMUTED
    assert data.permute(fs.key(1), [0, 1, 2], size=2**62).tolist() == PERMUTED_LARGE


# --- indices ------------------------------------------------------------------------------------------------


def test_steps_per_epoch():
    assert data.steps_per_epoch(10, 5) == 2
    assert data.steps_per_epoch(11, 5) == 2
    assert data.steps_per_epoch(11, 5, drop_last=False) == 3
    assert data.steps_per_epoch(3, 5, drop_last=False) == 1


def test_indices_golden_values():
    got = [data.indices(fs.key(5), step=s, size=10, batch=4).tolist() for s in range(3)]
    assert got == BATCHES


def test_every_epoch_covers_each_example_once_in_its_own_order():
    orders = []
    for epoch in range(3):
        steps = range(3 * epoch, 3 * epoch + 3)
        seen = torch.cat([data.indices(fs.key(0), step=s, size=12, batch=4) for s in steps])
        assert seen.sort().values.tolist() == list(range(12))
        orders.append(seen.tolist())
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_drop_last_omits_the_smaller_last_batch():
    def epoch(drop_last):
        n = data.steps_per_epoch(10, 4, drop_last=drop_last)
        return [data.indices(fs.key(2), step=s, size=10, batch=4, drop_last=drop_last) for s in range(n)]

    assert [len(b) for b in epoch(True)] == [4, 4]
    assert [len(b) for b in epoch(False)] == [4, 4, 2]
    assert torch.cat(epoch(False)).sort().values.tolist() == list(range(10))
    assert torch.cat(epoch(True)).tolist() == torch.cat(epoch(False))[:8].tolist()


def test_epoch_counts_steps_from_its_start():
    for step in range(9):
        whole = data.indices(fs.key(1), step=step, size=10, batch=3)
        assert data.indices(fs.key(1), epoch=step // 3, step=step % 3, size=10, batch=3).equal(whole)


def test_without_a_key_examples_keep_their_order():
    got = [data.indices(None, step=s, size=5, batch=2, drop_last=False).tolist() for s in range(4)]
    assert got == [[0, 1], [2, 3], [4], [0, 1]]


@pytest.mark.parametrize("size", [1, 3, 8, 10, 12])
@pytest.mark.parametrize("batch", [1, 4, 5, 16])
@pytest.mark.parametrize("key", [None, 3])
def test_even_batches_are_completed_from_the_start_of_the_epoch_and_counted_once(size, batch, key):
    key = None if key is None else fs.key(key)
    steps = data.steps_per_epoch(size, batch, drop_last=False)
    for epoch in range(2):
        rows = [data.indices(key, epoch=epoch, step=s, size=size, batch=batch, even=True) for s in range(steps)]
        masks = [data.counted(step=epoch * steps + s, size=size, batch=batch) for s in range(steps)]
        short = [data.indices(key, epoch=epoch, step=s, size=size, batch=batch, drop_last=False) for s in range(steps)]
        assert {len(x) for x in (*rows, *masks)} == {batch}
        whole = torch.cat(rows)
        assert whole.equal(torch.cat([torch.cat(short)] * batch)[: len(whole)])
        assert whole[torch.cat(masks)].equal(torch.cat(short))
        assert rows[-1].equal(data.indices(key, step=(epoch + 1) * steps - 1, size=size, batch=batch, even=True))


@pytest.mark.parametrize(("ranks", "size"), [(1, 10), (2, 10), (2, 7), (3, 10), (4, 2), (2, 12)])
def test_prepare_and_even_batches_of_accelerate_give_the_ranks_the_same_rows(ranks, size):
    """Of Accelerate's default each rank takes whole batches in turn; the global batch is those of all ranks."""
    shards = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    of_rank, mesh = 2, fs.make_mesh(data=ranks)
    order = data.permute(fs.key(4), range(size), size=size)
    sampler = torch.utils.data.BatchSampler(data.permute(fs.key(4), range(size), size=size).tolist(), of_rank, False)
    want = [list(shards(sampler, ranks, rank)) for rank in range(ranks)]
    batch = ranks * of_rank
    for step in range(data.steps_per_epoch(size, batch, drop_last=False)):
        places = data.indices(None, step=step, size=size, batch=batch, even=True)
        placed = data.load(lambda i: order[torch.from_numpy(i)], places, mesh=mesh)
        assert [shard.tolist() for shard in placed.shards] == [want[rank][step] for rank in range(ranks)]
    assert {len(batches) for batches in want} == {step + 1}


# --- load: the law ------------------------------------------------------------------------------------------


IMAGES = torch.arange(20 * 3 * 4, dtype=torch.float32).reshape(20, 3, 4)
LABELS = np.arange(20) * 10


def batch_of(step, axes, *, batch=6, spec=ROWS):
    rows = data.indices(fs.key(9), step=step, size=20, batch=batch)
    return data.load(lambda i: {"x": IMAGES[i], "y": LABELS[i]}, rows, mesh=fs.make_mesh(**axes), spec=spec)


@pytest.mark.parametrize("axes", MESHES.values(), ids=MESHES.keys())
@pytest.mark.parametrize("batch", [6, 5, 2, 1])
def test_the_global_batch_is_the_same_on_every_mesh(axes, batch):
    for step in range(5):
        rows = data.indices(fs.key(9), step=step, size=20, batch=batch)
        placed = batch_of(step, axes, batch=batch)
        assert placed["x"].shape == (batch, 3, 4)
        assert placed["y"].dtype == torch.int64
        got = fs.device_get(placed)
        torch.testing.assert_close(got["x"], IMAGES[rows], rtol=0, atol=0)
        torch.testing.assert_close(got["y"], torch.from_numpy(LABELS)[rows], rtol=0, atol=0)


def test_skip_first_batches_a_resumed_run_on_another_mesh_loads_the_same_batches():
    whole = [fs.device_get(batch_of(s, {"data": 2}))["y"].tolist() for s in range(8)]
    resumed = [fs.device_get(batch_of(s, {"data": 4}))["y"].tolist() for s in range(5, 8)]
    assert whole[5:] == resumed


@pytest.mark.parametrize(
    ("axes", "batch", "calls"),
    [
        ({"data": 2}, 6, [[0, 1, 2], [3, 4, 5]]),
        ({"data": 4}, 5, [[0, 1], [2, 3], [4], []]),
        ({"data": 4}, 2, [[0], [1], []]),
        ({"data": 2, "model": 2}, 4, [[0, 1], [2, 3]]),
        ({"model": 2}, 2, None),
    ],
)
def test_fetch_is_called_once_for_each_part(axes, batch, calls):
    requested = []

    def fetch(rows):
        assert type(rows) is np.ndarray
        assert rows.dtype == np.int64
        requested.append(rows.tolist())
        return IMAGES[rows]

    mesh = fs.make_mesh(**axes)
    if calls is None:
        assert error_text(data.load, fetch, range(batch), mesh=mesh) == (
            "load: the mesh has no axis 'data'\n"
            "  shape  [2]    spec  P('data')    mesh  model=2\n"
            "  fix: use one of ['model']"
        )
        assert requested == []
        return
    placed = data.load(fetch, range(batch), mesh=mesh)
    assert requested == calls
    for rank, shard in enumerate(placed.shards):
        torch.testing.assert_close(shard, IMAGES[:batch][placed.box(rank)], rtol=0, atol=0)


def test_process_with_one_rank_fetches_only_the_rows_of_that_rank(monkeypatch):
    requested = []
    mesh = fs.make_mesh(data=2, model=2)
    monkeypatch.setattr(mesh, "ranks", (2,))
    placed = data.load(lambda i: requested.append(i.tolist()) or IMAGES[i], range(6), mesh=mesh)
    assert requested == [[3, 4, 5]]
    assert placed.shape == (6, 3, 4)
    assert len(placed.shards) == 1
    torch.testing.assert_close(placed.shards[0], IMAGES[3:6])


def test_other_dims_are_sliced_after_fetching_and_specs_may_be_a_tree():
    spec = {"x": P("data", None, "model"), "y": P("data")}
    placed = batch_of(0, {"data": 2, "model": 3}, spec=spec)
    assert repr(placed) == "{'x': f32[6@data, 3, 4@model], 'y': i64[6@data]}"
    assert [tuple(s.shape) for s in placed["x"].shards[:3]] == [(3, 3, 2), (3, 3, 2), (3, 3, 0)]
    assert all(s.is_contiguous() for s in placed["x"].shards)
    whole = fs.device_get(batch_of(0, {"data": 1}))
    torch.testing.assert_close(fs.device_get(placed)["x"], whole["x"], rtol=0, atol=0)


def test_batch_may_be_replicated_or_split_over_two_axes():
    requested = []
    fetch = lambda i: requested.append(i.tolist()) or IMAGES[i]  # noqa: E731
    mesh = fs.make_mesh(a=2, b=2)
    data.load(fetch, range(4), mesh=mesh, spec=P())
    assert requested == [[0, 1, 2, 3]]
    requested.clear()
    placed = data.load(fetch, range(5), mesh=mesh, spec=P(("a", "b")))
    assert requested == [[0, 1], [2], [3], [4]]
    torch.testing.assert_close(fs.device_get(placed), IMAGES[:5])


def test_batch_shares_no_memory_with_the_data_set():
    table = np.zeros((4, 2), dtype=np.float32)
    table.flags.writeable = False
    whole = torch.zeros(4, 2)
    for source in (table, whole):
        placed = data.load(lambda i, s=source: s[i[0] : i[-1] + 1], range(4), mesh=fs.make_mesh(data=2))
        for shard in placed.shards:
            shard.fill_(1.0)
        assert source.sum() == 0


def test_loaded_batch_is_an_argument_of_shard_map():
    mesh = fs.make_mesh(data=4)
    placed = batch_of(0, {"data": 4}, batch=5)
    total = fs.shard_map(lambda b: fs.psum(b["x"].sum(), "data"), mesh=mesh, in_specs=(P("data"),), out_specs=P())(
        placed
    )
    assert total.item() == fs.device_get(placed)["x"].sum().item()


# --- crop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.int32, np.int64, torch.uint8, torch.uint16, torch.int32])
def test_crop_of_arrays_and_tensors(kind):
    array = np.arange(100).astype(kind) if isinstance(kind, type) else torch.arange(100).to(kind)
    for starts in ([0, 97, 50], torch.tensor([0, 97, 50]), np.array([0, 97, 50])):
        got = data.crop(array, starts, length=3)
        assert got.dtype == torch.int64
        assert got.tolist() == [[0, 1, 2], [97, 98, 99], [50, 51, 52]]
    assert data.crop(array, [], length=3).shape == (0, 3)


def test_crop_of_a_memory_map_larger_than_memory(tmp_path):
    path = tmp_path / "text.bin"
    with path.open("wb") as f:
        f.truncate(2 * (1 << 40))  # sparse
        f.seek(2 * 12345)
        f.write(np.array([7, 8, 9], dtype=np.uint16).tobytes())
    text = np.memmap(path, dtype=np.uint16, mode="r")
    got = data.crop(text, [12344, (1 << 40) - 5], length=5)
    assert got.tolist() == [[0, 7, 8, 9, 0], [0, 0, 0, 0, 0]]


# --- errors -------------------------------------------------------------------------------------------------


def load(fetch, rows=range(4), spec=ROWS, **axes):
    return data.load(fetch, rows, mesh=fs.make_mesh(**axes or {"data": 2}), spec=spec)


KEY = torch.tensor([0, 0])
ERRORS = {
    "permute size": (lambda: data.permute(KEY, [0], size=0), "permute: size=0\n  fix: a size from 1 to 2^62"),
    "permute positions": (
        lambda: data.permute(KEY, [3, -1, 12], size=10),
        "permute: positions outside range(10)\n  they range from -1 to 12\n  fix: 0 <= position < size",
    ),
    "permute floats": (
        lambda: data.permute(KEY, torch.zeros(2), size=10),
        "permute: positions are float32\n  fix: integers",
    ),
    "no batch": (
        lambda: data.indices(KEY, step=0, size=3, batch=4),
        ("steps_per_epoch: 3 examples do not fill a batch of 4\n  3 < 4\n  fix: batch=3 or less, or drop_last=False"),
    ),
    "no examples": (
        lambda: data.indices(KEY, step=0, size=0, batch=4, drop_last=False),
        "steps_per_epoch: size=0, batch=4\n  fix: both are 1 or more",
    ),
    "negative step": (
        lambda: data.indices(KEY, step=-1, size=9, batch=4),
        "indices: step=-1, epoch=None\n  fix: both count from 0",
    ),
    "past the epoch": (
        lambda: data.indices(KEY, epoch=2, step=2, size=9, batch=4),
        (
            "indices: epoch 2 has no step 2\n  9 examples in batches of 4 are 2 steps, 0 to 1\n"
            "  fix: leave out epoch= to count steps from the start of training"
        ),
    ),
    "load float indices": (
        lambda: load(lambda i: IMAGES[i], torch.zeros(4)),
        "load: indices are float32\n  fix: integers",
    ),
    "load 2-d indices": (
        lambda: load(lambda i: IMAGES[i], torch.zeros(4, 2, dtype=torch.int64)),
        "load: indices of shape [4, 2]\n  fix: one dim: the examples of the batch",
    ),
    "load no tensors": (
        lambda: load(lambda i: {"a": 1.0, "b": np.array(["x"] * len(i)), "c": IMAGES[i]}),
        (
            "2 problems\n"
            "load: batch['a']: fetch returned a float\n  fix: return tensors or numpy arrays, or a tree of them\n"
            "load: batch['b']: fetch returned an array of <U1\n  fix: return numbers"
        ),
    ),
    "load wrong rows": (
        lambda: load(lambda i: {"x": IMAGES[:3], "n": torch.tensor(2)}),
        (
            "2 problems\n"
            "load: batch['n']: fetch returned i64[] for 2 examples\n  fix: return a row for each, in dim 0\n"
            "load: batch['x']: fetch returned f32[3, 3, 4] for 2 examples\n  fix: return a row for each, in dim 0"
        ),
    ),
    "load ragged": (
        lambda: load(lambda i: torch.zeros(2, 3 + i[0])),
        (
            "load: batch: the rows differ between parts\n  a row is f32[3] or f32[5]\n"
            "  fix: pad to one shape, and use one dtype"
        ),
    ),
    "load other trees": (
        lambda: load(lambda i: {"x": IMAGES[i]} if i[0] else {"y": IMAGES[i]}),
        (
            "load: fetch returned another tree for other rows\n  PyTreeSpec({'y': *})\n  PyTreeSpec({'x': *})\n"
            "  fix: return the same keys for any rows"
        ),
    ),
    "load specs that split rows differently": (
        lambda: load(lambda i: {"x": IMAGES[i], "y": IMAGES[i]}, spec={"x": P("data"), "y": P()}),
        (
            "load: batch['y']: its spec is P(), other leaves split dim 0 by P('data')\n"
            "  fix: split dim 0 by the same axes in every leaf, and fs.reshard afterwards"
        ),
    ),
    "load specs that are too long": (
        lambda: load(lambda i: LABELS[i], spec=P("data", "model"), data=2, model=2),
        (
            "load: batch: the spec is longer than the shape\n"
            "  shape  [4]    spec  P('data', 'model')    mesh  data=2, model=2\n  2 > 1 dims\n"
            "  fix: drop 1 of its entries"
        ),
    ),
    "load specs of another tree": (
        lambda: load(lambda i: {"x": IMAGES[i]}, spec={"y": P("data")}),
        (
            "load: spec: not a prefix of the tree it describes\n"
            "  missing ['x']    extra ['y']\n  fix: give every key a P, or one P for the whole subtree"
        ),
    ),
    "crop past the end": (
        lambda: data.crop(torch.arange(10), [0, 8], length=3),
        "crop: starts from 0 to 8 reach past the text\n  10 - 3 = 7\n  fix: 0 <= start <= len(text) - length",
    ),
    "crop before the start": (
        lambda: data.crop(np.arange(10), [-1], length=3),
        ("crop: starts from -1 to -1 reach past the text\n  10 - 3 = 7\n  fix: 0 <= start <= len(text) - length"),
    ),
    "crop dims": (
        lambda: data.crop(np.zeros((2, 5)), [0], length=3),
        "crop: text [2, 5], starts [1]\n  fix: both have one dim",
    ),
}


@pytest.mark.parametrize(("call", "text"), ERRORS.values(), ids=ERRORS.keys())
def test_error_texts(call, text):
    assert error_text(call) == text
