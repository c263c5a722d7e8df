"""Learned scales of layers: values and gradients by hand, dtypes, meshes, composition, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P, ia3, lora, nn
from fshard.models import gpt2
from tests.lib.assertions import error_text

W = torch.arange(24.0).reshape(4, 6) / 24
B, X = torch.arange(6.0), torch.arange(8.0).reshape(2, 4)
PARAMS = {"k": {"w": W, "b": B}, "down": {"w": W}}


def test_outputs_with_their_bias_are_scaled_or_the_inputs_of_the_feed_forward() -> None:
    cfg = ia3.Config(("k", "down"), feedforward=("down",))
    described = ia3.init(cfg, PARAMS)
    assert {name: (own["scale"].shape, own["scale"].dtype) for name, own in described.items()} == {
        "k.w": ((6,), torch.float32), "down.w": ((4,), torch.float32)}  # fmt: skip
    ones = fs.device_get(fs.materialize(described, P(), fs.make_mesh(a=1), key=fs.key(0)))
    k = ia3.apply(cfg, PARAMS, ones)["k"]
    assert torch.equal(nn.linear(X, k["w"], k["b"]), X @ W + B)
    scales = {"k.w": {"scale": 1 + torch.arange(6.0)}, "down.w": {"scale": 1 - torch.arange(4.0)}}
    params = ia3.apply(cfg, PARAMS, scales)
    got = nn.linear(X, params["k"]["w"], params["k"]["b"])
    torch.testing.assert_close(got, (X @ W + B) * scales["k.w"]["scale"])
    torch.testing.assert_close(nn.linear(X, params["down"]["w"]), (X * scales["down.w"]["scale"]) @ W)
    assert repr(params["down"]["w"]) == "ScaledWeight(f32[4, 6], inputs)"


def test_only_the_scales_have_gradients_and_a_half_precision_layer_keeps_its_dtype() -> None:
    cfg = ia3.Config(("k",))
    half = fs.cast(PARAMS, torch.bfloat16)
    scales = {"k.w": {"scale": torch.full((6,), 1.5)}}

    def loss(scales: Any) -> tuple[Tensor, Tensor]:
        params = ia3.apply(cfg, half, scales)
        out = nn.linear(X.bfloat16(), params["k"]["w"], params["k"]["b"])
        return out.float().sum(), out

    (_, out), grads = fs.value_and_grad(loss, has_aux=True)(scales)
    assert out.dtype == torch.bfloat16
    assert grads["k.w"]["scale"].dtype == torch.float32
    torch.testing.assert_close(grads["k.w"]["scale"], (X @ W + B).sum(0), rtol=2**-7, atol=2**-7)


def test_scales_compose_with_adapters_and_with_each_other() -> None:
    first, second = ia3.Config(("k",)), lora.Config(("k",), rank=2, alpha=2)
    scale = {"k.w": {"scale": 1 + torch.arange(6.0)}}
    factors = {"k.w": {"a": X.T[:, :2], "b": torch.ones(2, 6)}}
    params = lora.apply(second, ia3.apply(first, PARAMS, scale), factors)
    got = nn.linear(X, params["k"]["w"], params["k"]["b"])
    torch.testing.assert_close(got, (X @ W + B) * scale["k.w"]["scale"] + X @ X.T[:, :2] @ torch.ones(2, 6))
    twice = ia3.apply(first, ia3.apply(first, PARAMS, scale), scale)["k"]
    torch.testing.assert_close(nn.linear(X, twice["w"], twice["b"]), (X @ W + B) * scale["k.w"]["scale"] ** 2)


@pytest.mark.parametrize(
    "targets", [("attn.c_proj", "c_fc", "mlp.c_proj"), pytest.param(("c_attn", "mlp.c_proj"), marks=pytest.mark.slow)]
)
def test_mesh_never_changes_scaled_layers(targets: Any) -> None:
    """With scales that are placed as their layers, and with replicated ones, which are sliced."""
    model = gpt2.Config(vocab_size=13, n_positions=8, n_embd=12, n_layer=2, n_head=3)
    described = gpt2.init(model)
    cfg = ia3.Config(targets, feedforward=targets[-1:])
    own = {name: {"scale": fs.init.normal(one["scale"].shape)}
           for name, one in ia3.init(cfg, described, of=gpt2.theirs).items()}  # fmt: skip
    ids = torch.arange(20).reshape(4, 5) % 13
    results = []
    two = {"data": 2, "model": 2}
    for axes, sharded, replicated in (({"data": 1, "model": 1}, False, False), (two, True, False), (two, True, True)):
        mesh = fs.make_mesh(**axes)
        specs = gpt2.specs(model, model="model")
        specs = fs.fully_shard(specs, described, axis="data") if sharded else specs
        placed = P() if replicated else ia3.specs(cfg, described, specs, of=gpt2.theirs)

        @fs.shard_map(mesh=mesh, in_specs=(specs, placed, P("data")), out_specs=(P(), placed))
        def run(p: Any, scales: Any, ids: Tensor, specs: Any = specs, placed: Any = placed) -> Any:
            def loss(scales: Any) -> Tensor:
                adapted = ia3.apply(cfg, p, scales, of=gpt2.theirs, specs=specs, adapter_specs=placed, model="model")
                return gpt2.loss(model, adapted, ids[:, :-1], ids[:, 1:], layout=gpt2.Layout("data", "model"),
                                 specs=specs, remat=True)  # fmt: skip

            return fs.value_and_grad(loss)(scales)

        key = fs.key(0)
        out = run(fs.materialize(described, specs, mesh, key=key), fs.materialize(own, placed, mesh, key=key), ids)
        results.append(fs.tree.leaves(fs.device_get(out)))
    for a, b, c in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)
        assert a.abs().sum() > 0


def test_layers_of_a_deferred_module_are_scaled_with_their_bias() -> None:
    apply, described = fs.defer(lambda: torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2)))
    cfg, mesh = ia3.Config(("0", "1"), feedforward=("1",)), fs.make_mesh(data=2)
    w, v = torch.arange(24.0).reshape(6, 4) % 5 - 2, torch.arange(12.0).reshape(2, 6) % 7 - 3  # sums are exact
    params = {"0.weight": w, "0.bias": B, "1.weight": v, "1.bias": B[:2]}
    scales = {"0.weight": {"scale": 1 + torch.arange(6.0)}, "1.weight": {"scale": 1 - torch.arange(6.0)}}
    assert ia3.init(cfg, described["params"], of=apply)["1.weight"]["scale"].shape == (6,)

    @fs.shard_map(mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P("data"))
    def run(p: Any, scales: Any, x: Tensor) -> Any:
        p = fs.pvary(ia3.apply(cfg, p, scales, of=apply), "data")
        return apply(p, {}, x)

    h = (X @ w.T + B) * scales["0.weight"]["scale"]
    want = (h * scales["1.weight"]["scale"]) @ v.T + B[:2]
    assert torch.equal(fs.device_get(run(params, scales, X)), want)


def test_scales_that_do_not_fit_are_all_listed() -> None:
    cfg = ia3.Config(("k", "down"))
    text = error_text(ia3.apply, cfg, PARAMS, {"k.w": {"scale": torch.ones(2, 3)}, "q.w": {"scale": torch.ones(1)}})
    for part in ("3 problems", "adapters['down.w'] is missing", "adapters['k.w']['scale'] is [2, 3]",
                 "adapters['q.w']: params has no leaf 'q.w'"):  # fmt: skip
        assert part in text, part
    assert "a dict of Tensor leaves" in error_text(ia3.apply, cfg, PARAMS, {"k.w": 1})
    assert "model='model', and no specs" in error_text(ia3.apply, cfg, PARAMS, {}, model="model")
    assert "ia3.specs: specs" in error_text(ia3.specs, cfg, PARAMS, None)
    model = gpt2.init(gpt2.Config(vocab_size=13, n_positions=8, n_embd=12, n_layer=1, n_head=3))
    text = error_text(ia3.init, ia3.Config(("wte",)), model, of=gpt2.theirs)
    assert text.startswith("ia3.init: 'wte' is a table of embeddings, which has no scale")
    assert "ia3.Config: targets is empty" in error_text(ia3.Config, ())
    for wrong in (("down", "v"), "v"):
        text = error_text(ia3.apply, ia3.Config(("k", "down"), feedforward=wrong), PARAMS, {})
        assert text.startswith("ia3.apply: feedforward: no scaled layer is named 'v'")
    assert "feedforward='(' is no regular expression" in error_text(ia3.Config, ("k",), feedforward="(")
    assert "no module is named 'query'" in error_text(ia3.init, ia3.Config(("query",)), PARAMS)
