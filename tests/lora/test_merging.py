"""Merged adapters are those of PEFT: bit by bit on one device, on a mesh up to the order of a sum of r products."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import fshard as fs
from fshard import P
from tests.lib.assertions import error_text
from tests.lib.model_cases import ONE
from tests.lib.tiers import slow_unless
from tests.lora import cases

TARGETS = {"gpt2": ("c_attn", "mlp.c_proj", "wte"), "llama": ("q_proj", "o_proj", "down_proj"), "t5": ("v", "wo")}
MESHES = {"one device": ONE, "data": {"data": 2, "model": 1}, "both": {"data": 2, "model": 2},
          "uneven": {"data": 3, "model": 3}}  # fmt: skip


def merged_by_peft(case, safe):
    model = copy.deepcopy(case.theirs)
    with warnings.catch_warnings(action="ignore"):  # of a table that a head is tied to
        state = model.merge_and_unload(safe_merge=safe).state_dict()
    out = {}
    for path, x in fs.tree.leaves_with_path(case.module.init(case.cfg)):
        file = case.module.theirs(path)
        if fs.tree.dotted(path) in case.adapters:
            out[fs.tree.dotted(path)] = cases.to_leaf(state[file.name], file.dims, x.shape)
    return out


def placed(case, mesh, **changes):
    mesh = fs.make_mesh(**mesh)
    specs = fs.fully_shard(case.module.specs(case.cfg, model="model"), case.module.init(case.cfg), axis="data")
    return fs.device_put({**case.params, **changes}, specs, mesh), mesh


def by_name(tree, names):
    return {fs.tree.dotted(path): x for path, x in fs.tree.leaves_with_path(tree) if fs.tree.dotted(path) in names}


EVERY_KIND = [(name, dtype, safe, "uneven") for name in TARGETS for dtype in (torch.float32, torch.bfloat16)
              for safe in (False, True)]  # fmt: skip
FAST = [("gpt2", torch.bfloat16, False, "uneven"), ("t5", torch.float32, True, "uneven"),
        ("llama", torch.bfloat16, True, "uneven")]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "safe", "mesh"),
    [*slow_unless(FAST, EVERY_KIND), *(("gpt2", torch.bfloat16, False, mesh) for mesh in MESHES if mesh != "uneven")],
    ids=str,
)
def test_merge_has_the_bits_of_peft(name, dtype, safe, mesh):
    case = cases.pair(name, dtype, targets=TARGETS[name], rank=3, alpha=5)
    want = merged_by_peft(case, safe)
    whole = by_name(fs.lora.merge(case.lora, case.params, case.adapters, of=case.module.theirs, safe=safe), want)
    params, mesh = placed(case, MESHES[mesh])
    adapters = fs.device_put(case.adapters, P(), mesh)
    merged = fs.lora.merge(case.lora, params, adapters, of=case.module.theirs, safe=safe)
    got = by_name(fs.device_get(merged), want)
    assert got.keys() == whole.keys() == want.keys()
    for leaf in want:
        assert got[leaf].dtype == whole[leaf].dtype == dtype
        assert torch.equal(whole[leaf], want[leaf]), leaf
        torch.testing.assert_close(got[leaf], want[leaf], rtol=0, atol=rounding_of_merge(case, leaf, want[leaf]))
    assert [x.spec for x in fs.tree.leaves(merged)] == [x.spec for x in fs.tree.leaves(params)]


def rounding_of_merge(case, leaf, merged, r=3, alpha=5):
    """Most that two merges differ by whose products add their r terms in another order.

    BLAS chooses the order by the shape of a part. Each is off by at most r u |A| |B| (u: half of eps; Higham 2002,
    section 3.1), and s multiplies it, which rounds once more. In the leaf's dtype the two are then rounded to the
    same number or to neighbours: eps |W|, and with `safe` also eps |D|.
    """
    a, b = (case.adapters[leaf][part].abs().max().item() for part in ("a", "b"))
    product = alpha / r * r * a * b
    steps = torch.finfo(merged.dtype).eps * (merged.abs().max().item() + product)
    return (r + 1) * torch.finfo(torch.float32).eps * product + steps


def test_plain_and_safe_merges_differ_in_half_precision():
    case = cases.pair("llama", torch.bfloat16, targets=TARGETS["llama"], rank=3, alpha=5)
    plain, safe = (by_name(fs.lora.merge(case.lora, case.params, case.adapters, of=case.module.theirs, safe=safe),
                           case.adapters) for safe in (False, True))  # fmt: skip
    assert any(not torch.equal(plain[name], safe[name]) for name in plain)


@pytest.mark.parametrize("mesh", MESHES)
def test_merge_of_dora_and_of_modules_to_save_is_that_of_peft(mesh):
    case = cases.pair("llama", targets=("q_proj", "down_proj"), dora=True, modules_to_save=("lm_head",))
    params, mesh = placed(case, MESHES[mesh])
    adapters = fs.device_put(case.adapters, P(), mesh)
    got = by_name(fs.device_get(fs.lora.merge(case.lora, params, adapters, of=case.module.theirs)), case.adapters)
    torch.testing.assert_close(got, merged_by_peft(case, False), rtol=1e-6, atol=1e-6)


def test_unmerge_gives_the_base_back():
    case = cases.pair("gpt2", targets=TARGETS["gpt2"], rank=3, alpha=5)
    merged = fs.lora.merge(case.lora, case.params, case.adapters, of=case.module.theirs, weight=0.5)
    back = fs.lora.unmerge(case.lora, merged, case.adapters, of=case.module.theirs, weight=0.5)
    torch.testing.assert_close(back, case.params, rtol=0, atol=1e-6)
    assert not torch.equal(merged["wte"], case.params["wte"])


def test_a_result_that_is_not_finite_is_refused_on_every_mesh():
    case = cases.pair("llama", targets=TARGETS["llama"], rank=3, alpha=5)
    broken = {**case.adapters, "h.1.down.w": {**case.adapters["h.1.down.w"]}}
    broken["h.1.down.w"]["b"] = broken["h.1.down.w"]["b"].clone().fill_(torch.inf)
    for axes in MESHES.values():
        params, mesh = placed(case, axes)
        adapters = fs.device_put(broken, P(), mesh)
        text = error_text(fs.lora.merge, case.lora, params, adapters, of=case.module.theirs, safe=True)
        assert text.startswith("lora.merge: params['h'][1]['down']['w'] would not be finite\n  696 elements"), text


def test_merge_refuses_trees_that_it_cannot_merge():
    cfg, w = fs.lora.Config(["w"], rank=1, dora=True), {"w": torch.ones(2, 3)}
    own = {"w": {"a": torch.ones(2, 1), "b": torch.ones(1, 3), "magnitude": torch.ones(3)}}
    assert "merge does not keep what these had" in error_text(fs.lora.unmerge, cfg, w, own)
    assert error_text(fs.lora.merge, cfg, {"w": fs.init.zeros((2, 3))}, own) == (
        "lora.merge: params['w'] must be a Sharded or a Tensor, got f32[2, 3] = zeros\n  fix: fs.materialize it"
    )
    assert error_text(fs.lora.merge, cfg, fs.lora.quantize(w), own) == (
        "lora.merge: params['w'] must be a Sharded or a Tensor, got an Int8\n  fix: lora.dequantize(params)"
    )
    shapes = fs.make_mesh(kind="abstract", data=2)
    placed = fs.materialize({"w": fs.init.zeros((2, 3))}, P("data"), shapes, key=fs.key(0))
    adapters = fs.materialize(fs.tree.map(lambda x: fs.init.zeros(x.shape), own), P(), shapes, key=fs.key(0))
    assert fs.lora.merge(cfg, placed, adapters, safe=True)["w"].spec == P("data")  # without values nothing is refused
    inside = fs.shard_map(lambda w: fs.lora.merge(cfg, w, own), mesh=fs.make_mesh(data=1), in_specs=(P(),),
                          out_specs=P())  # fmt: skip
    assert error_text(inside, w).startswith("lora.merge: inside shard_map")
