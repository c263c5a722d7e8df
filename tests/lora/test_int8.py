"""A base in 8 bits: its error, its bits on every mesh, models and adapters on it, bytes of gathers and of memory."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P
from fshard.models import gpt2, llama
from tests.lib.assertions import assert_same, error_text
from tests.lib.model_cases import ONE, placed
from tests.lib.operations import Operations

MODELS = {
    "gpt2": (gpt2, gpt2.Config(vocab_size=61, n_positions=12, n_embd=24, n_layer=2, n_head=3)),
    "llama": (llama, llama.Config(vocab_size=37, hidden_size=24, intermediate_size=29, num_hidden_layers=2,
                                  num_attention_heads=6, num_key_value_heads=3)),
}  # fmt: skip
LORA = {
    "gpt2": fs.lora.Config("all-linear", rank=2, init="random"),
    "llama": fs.lora.Config(["q_proj", "down_proj"], rank=2, init="random"),
}


def weights(module: Any, cfg: Any, key: int = 0) -> Any:
    return fs.device_get(fs.materialize(module.init(cfg), P(), fs.make_mesh(**ONE), key=fs.key(key)))


def dequantized(params: Any) -> Any:
    """Return full tensors in the place of Int8."""
    is_int8 = lambda x: isinstance(x, fs.lora.Int8)  # noqa: E731
    leaves, structure = fs.tree.flatten(params, is_int8)
    return fs.tree.unflatten(structure, [x.dequantize(torch.float32) if is_int8(x) else x for x in leaves])


def test_error_of_each_element_is_at_most_half_the_scale_of_its_output() -> None:
    w = torch.randn(40, 3, 5, generator=torch.Generator().manual_seed(0)) * torch.logspace(-42, 3, 5)
    w[:, 0, 1], w[:, 1, 2] = 0, torch.finfo(torch.float32).tiny / 64
    of = lambda path: fs.interop.hf.FileTensor("x.weight", "(c k) d -> d c k")  # noqa: E731
    for dtype in (torch.float32, torch.bfloat16):
        own = w.to(dtype)
        q = fs.lora.quantize({"w": own}, of=of)["w"]
        assert q.values.dtype == torch.int8
        assert q.scale.shape == (3, 5)
        assert q.inputs == 1
        largest = own.float().abs().amax(0)
        normal = largest > 1e-35
        torch.testing.assert_close(q.scale[normal], (largest / 127)[normal], rtol=1e-6, atol=0)
        error = (q.dequantize(torch.float32) - own.float()).abs()
        assert bool((error <= q.scale * (0.5 + 1e-4)).all())  # 1e-4: w / scale is rounded before it is an integer
        assert bool((q.values.abs().amax(0) == 127)[normal].all())
        assert bool((q.values[:, 0, 1] == 0).all())


@pytest.mark.parametrize(("name", "layout"), [("gpt2", "uneven"), ("llama", "both, fully sharded, sequence")])
def test_values_and_scales_are_the_same_bits_on_every_mesh_placed_or_described(name: str, layout: str) -> None:
    module, cfg = MODELS[name]
    params = weights(module, cfg)
    want = fs.lora.quantize(params, of=module.theirs)
    described = fs.lora.quantize(module.init(cfg), of=module.theirs)
    mesh, specs, _, p = placed(module, cfg, params, layout)
    assert_same(fs.device_get(fs.lora.quantize(p, of=module.theirs)), want)
    drawn = fs.materialize({"base": described}, {"base": fs.lora.part_specs(described, specs)}, mesh, key=fs.key(0))
    again = fs.materialize({"base": module.init(cfg)}, {"base": specs}, mesh, key=fs.key(0))
    assert_same(fs.device_get(drawn["base"]), fs.lora.quantize(fs.device_get(again["base"]), of=module.theirs))


def results(name: str, layout: Any, params: Any, **how: Any) -> Any:
    """Return loss, logits and gradients of adapters on a base of any weights, on a mesh."""
    (module, cfg), lora = MODELS[name], LORA[name]
    plain = dequantized(params)
    mesh, specs, split, _ = placed(module, cfg, plain, layout)
    own = fs.lora.part_specs(params, specs)
    base = fs.device_put(params, own, mesh)
    described = fs.lora.init(lora, plain, of=module.theirs)
    adapter_specs = fs.lora.specs(lora, plain, specs, of=module.theirs)
    adapters = fs.materialize(described, adapter_specs, mesh, key=fs.key(3))
    ids = torch.randint(cfg.vocab_size, (3, 9), generator=torch.Generator().manual_seed(0))

    @fs.shard_map(mesh=mesh, in_specs=(own, adapter_specs, P("data")), out_specs=(P(), adapter_specs),
                  check="never" if layout == "uneven" else "first")  # fmt: skip
    def run(p: Any, adapters: Any, ids: Tensor) -> Any:
        def loss(adapters: Any) -> Tensor:
            q = fs.lora.apply(lora, p, adapters, of=module.theirs, specs=specs, data="data", model="model")
            return module.loss(cfg, q, ids, ids, layout=split, specs=specs, **how)

        return fs.value_and_grad(loss)(adapters)

    return fs.device_get(run(base, adapters, ids))


@pytest.mark.parametrize(
    ("name", "layout", "remat"),
    [
        ("gpt2", "uneven", False),
        ("llama", "model", False),
        pytest.param("llama", "both, fully sharded, sequence", True, marks=pytest.mark.slow),
    ],
)
def test_adapters_on_a_base_of_8_bits_have_the_numbers_of_its_dequantized_weights(
    name: str, layout: str, remat: bool
) -> None:
    module, cfg = MODELS[name]
    params = fs.lora.quantize(weights(module, cfg), of=module.theirs)
    want = results(name, "one device", dequantized(params))
    assert_same(results(name, layout, params, remat=remat), want, rtol=2e-5, atol=2e-6)


N, D, ROWS = 6, 64, 2


def gradient_of_blocks(params: Any, specs: Any, mesh: fs.Mesh, peaks: list[int], **how: Any) -> Any:
    """Return a step (base, gains, x) -> gradients of gains, by `scan` over blocks x + tanh(x * gain @ w).

    `peaks` gets the most bytes that the step of each rank has allocated.
    """
    base = fs.lora.part_specs(params, specs)

    @fs.shard_map(mesh=mesh, in_specs=(base, P(), P("data")), out_specs=P(), check="never")
    def step(p: Any, gains: Any, x: Tensor) -> Any:
        def loss(gains: Any) -> Tensor:
            both = [{"w": w, "gain": g} for w, g in zip(p, gains, strict=True)]
            body = lambda p, x: x + torch.tanh(fs.nn.linear(x * p["gain"], p["w"]))  # noqa: E731
            own = [{"w": s, "gain": P()} for s in specs]
            return fs.pmean(fs.scan(body, both, x, specs=own, axis="data", **how).square().mean(), "data")

        with Operations() as seen:
            grads = fs.grad(loss)(gains)
        peaks.append(seen.peak)
        return grads

    return step


def test_gathers_move_one_byte_for_each_element_and_its_scale() -> None:
    mesh, specs = fs.make_mesh(data=2), [P("data")] * N
    params = fs.materialize([fs.init.normal((D, D), std=0.1)] * N, specs, mesh, key=fs.key(0))
    gains, x = [torch.ones(D)] * N, torch.randn(2 * ROWS, D)
    moved = {}
    for name, base in {"float32": params, "int8": fs.lora.quantize(params)}.items():
        with fs.recording() as log:
            gradient_of_blocks(base, specs, mesh, [])(base, gains, x)
        gathers = [t for t in log if t.op == "all_gather"]
        moved[name] = sum(t.bytes for t in gathers)
        assert {t.dtype for t in gathers} == {torch.float32 if name == "float32" else torch.int8}
        # Frozen: no sum of its gradients; those of gains and the loss.
        assert all(t.bytes <= 4 * D for t in log if t.op != "all_gather")
    assert moved["int8"] * 4 == moved["float32"] == 2 * (2 * N - 2) * D * D // 2 * 4


@pytest.mark.parametrize("how", [{}, {"remat": True}, {"release": False}], ids=str)
def test_dequantized_weights_of_one_block_exist_at_a_time(how: Any) -> None:
    mesh, specs, peaks = fs.make_mesh(data=2), [P("data")] * N, []
    params = fs.materialize(fs.lora.quantize([fs.init.normal((D, D), std=0.1)] * N),
                            fs.lora.part_specs(fs.lora.quantize([fs.init.normal((D, D), std=0.1)] * N), specs),
                            mesh, key=fs.key(0))  # fmt: skip
    gradient_of_blocks(params, specs, mesh, peaks, **how)(params, [torch.ones(D)] * N, torch.randn(2 * ROWS, D))
    gathered = (N if how == {"release": False} else 2) * (D * D + 4 * D + 64)
    one = 2 * 4 * D * D  # a cast of the values, and its product with the scale
    activations = (8 * N + 20) * 4 * ROWS * D
    assert max(peaks) <= gathered + one + activations < N * 4 * D * D  # all of them, dequantized


def test_placed_weights_of_8_bits_are_saved_and_restored_on_another_mesh(tmp_path: Any) -> None:
    module, cfg = MODELS["llama"]
    params = weights(module, cfg)
    _, _, _, p = placed(module, cfg, params, "both")
    quantized = fs.lora.quantize(p, of=module.theirs)
    fs.checkpoint.save(tmp_path / "base", quantized)
    like = fs.lora.quantize(module.init(cfg), of=module.theirs)
    mesh, specs, _, _ = placed(module, cfg, params, "uneven")
    again = fs.checkpoint.restore(tmp_path / "base", like, specs=fs.lora.part_specs(like, specs), mesh=mesh)
    assert_same(fs.device_get(again), fs.device_get(quantized))
    assert again["h"][0]["q"]["w"].values.dtype == torch.int8


def test_placed_base_of_8_bits_is_merged_after_it_is_dequantized() -> None:
    (module, cfg), lora = MODELS["gpt2"], LORA["gpt2"]
    params = weights(module, cfg)
    want = fs.lora.quantize(params, of=module.theirs)
    _, specs, _, p = placed(module, cfg, params, "uneven")
    got = fs.lora.dequantize(fs.lora.quantize(p, of=module.theirs))
    assert_same(fs.device_get(got), dequantized(want))
    assert_same(dequantized(want), fs.lora.dequantize(want))
    assert got["h"][0]["up"]["w"].spec == specs["h"][0]["up"]["w"]
    adapters = fs.materialize(fs.lora.init(lora, params, of=module.theirs), P(), fs.make_mesh(**ONE), key=fs.key(1))
    own = fs.device_get(adapters)
    merged = fs.lora.merge(lora, got, fs.device_put(own, P(), fs.make_mesh(data=3, model=3)), of=module.theirs)
    plain = fs.lora.merge(lora, dequantized(want), own, of=module.theirs)
    assert_same(fs.device_get(merged), plain, rtol=1e-5, atol=1e-7)


def test_magnitudes_on_a_base_of_8_bits_are_those_on_its_dequantized_weights() -> None:
    lora = fs.lora.Config(["up"], rank=2, dora=True)
    q = fs.lora.quantize({"up": torch.randn(4, 6)})
    adapters = {"up": {"a": torch.randn(4, 2), "b": torch.randn(2, 6), "magnitude": torch.rand(6)}}
    x, whole = torch.randn(3, 4), fs.lora.dequantize(q)
    ours, want = (fs.nn.linear(x, fs.lora.apply(lora, base, adapters)["up"]) for base in (q, whole))
    torch.testing.assert_close(ours, want)


@pytest.mark.slow
def test_linear_of_8_bits_under_transforms_and_compiled() -> None:
    q = fs.lora.quantize({"w": torch.randn(4, 3, generator=torch.Generator().manual_seed(0))})["w"]
    w, x, b = q.dequantize(torch.float32), torch.randn(5, 4), torch.randn(3)
    ours, plain = (lambda x: fs.nn.linear(x, q, b).sin().sum()), (lambda x: (x @ w + b).sin().sum())
    for of in (
        lambda f: f(x),
        lambda f: torch.func.grad(f)(x),
        lambda f: torch.func.vmap(torch.func.grad(f))(x),
        lambda f: torch.func.jvp(f, (x,), (x.cos(),))[1],
        lambda f: torch.func.hessian(f)(x),
        lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).square().sum())(x),
    ):
        torch.testing.assert_close(of(ours), of(plain), rtol=1e-5, atol=1e-6)
    half = x.bfloat16()
    assert fs.nn.linear(half, q).dtype == torch.bfloat16
    torch.testing.assert_close(fs.nn.linear(half, q), half @ q.dequantize(torch.bfloat16))
    compiled = torch.compile(lambda x: fs.nn.linear(x, q, b), backend="eager", fullgraph=True)
    # The traced product may add its 4 terms of at most 8 in another order: 4 eps * 8.
    torch.testing.assert_close(compiled(x), fs.nn.linear(x, q, b), rtol=0, atol=4e-6)
    flat = fs.lora.Int8(q.values.view(2, 2, 3), q.scale, 2).flatten(0, 1)
    assert torch.equal(fs.nn.linear(x, flat), fs.nn.linear(x, q))


def test_invalid_leaves_and_gradients_of_frozen_ones_are_errors() -> None:
    module, cfg = MODELS["gpt2"]
    described = module.init(cfg)
    text = error_text(fs.lora.quantize, described, ["wte", "c_fc"], of=module.theirs)
    assert "lora.quantize: params['wte'] is no matrix [in, out]" in text
    assert "no module is named 'up'" in error_text(fs.lora.quantize, described, ["up"], of=module.theirs)
    assert "must be a floating leaf" in error_text(fs.lora.quantize, {"w": torch.ones(2, 2, dtype=torch.int32)})
    assert "must be a floating leaf" in error_text(fs.lora.quantize, fs.lora.quantize({"w": torch.ones(2, 2)}))
    mesh = fs.make_mesh(data=2, model=2)
    for bad in (float("nan"), float("inf")):
        w = torch.ones(4, 4)
        w[3, 3] = bad
        for tree in ({"w": w}, fs.device_put({"w": w}, P("data", "model"), mesh)):
            assert "lora.quantize: 'w' has an element that is not finite" in error_text(fs.lora.quantize, tree)
    inside = fs.shard_map(fs.lora.quantize, mesh=mesh, in_specs=(P("data"),), out_specs=P("data"))
    assert "lora.quantize: called inside shard_map" in error_text(inside, {"w": torch.ones(4, 4)})
    q = fs.lora.quantize({"w": torch.ones(2, 2)})["w"]
    trained = fs.lora.Int8(q.values, q.scale.requires_grad_(), 1)
    assert "Int8[2, 2] is differentiated, and is frozen" in error_text(fs.nn.linear, torch.ones(1, 2), trained)
    assert "inputs and outputs" in error_text(q.flatten)
    assert "lora.dequantize: params" in error_text(fs.lora.dequantize, fs.lora.quantize({"w": fs.init.ones((2, 2))}))


def test_linear_layers_of_a_module_are_quantized_by_output() -> None:
    """Its base in 8 bits gives the numbers of its dequantized weights, the same bits placed, described or plain."""
    apply, tree = fs.defer(lambda: nn.Sequential(OrderedDict(up=nn.Linear(4, 6), act=nn.ReLU(), down=nn.Linear(6, 5))))
    one, mesh, key = fs.make_mesh(data=1), fs.make_mesh(data=2, model=2), fs.key(0)
    plain = fs.device_get(fs.materialize(tree["params"], P(), one, key=key))
    base = fs.lora.quantize(plain, of=apply)
    w, q = plain["up.weight"], base["up.weight"]
    torch.testing.assert_close(q.scale, w.abs().amax(1) / 127)
    assert bool(((q.dequantize(torch.float32) - w).abs() <= q.scale[:, None] * 0.5001).all())

    specs = {name: P("model", "data") if name.endswith("weight") else P() for name in plain}
    described = fs.lora.quantize(tree["params"], of=apply)
    for made in (fs.lora.quantize(fs.device_put(plain, specs, mesh), of=apply),
                 fs.materialize(described, fs.lora.part_specs(described, specs), mesh, key=key)):  # fmt: skip
        assert made["down.weight"].scale.spec == P("model")  # 5 outputs over 2 ranks
        assert_same(fs.device_get(made), base)

    cfg, x = fs.lora.Config("all-linear", rank=2, init="random", dora=True), torch.linspace(-1, 1, 12).view(3, 4)
    adapters = fs.device_get(fs.materialize(fs.lora.init(cfg, plain, of=apply), P(), one, key=fs.key(1)))
    view = lambda params: fs.lora.apply(cfg, params, adapters, of=apply)  # noqa: E731
    dense = dequantized(base)
    for own, want in ((base, dense), (view(base), view(dense))):
        f, g = (lambda x, params=params: apply(params, {}, x).square().sum() for params in (own, want))
        torch.testing.assert_close(torch.func.grad(f)(x), torch.func.grad(g)(x))
        torch.testing.assert_close(apply(own, {}, x), apply(want, {}, x))
