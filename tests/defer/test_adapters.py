"""Adapters beside a frozen base: the numbers of peft, and the memory of two units."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P, lora
from fshard._core.region import region
from fshard.models import t5
from fshard.schedule.buckets import buffer_pool
from tests.lib.adapters import described_model, like_described
from tests.lib.assertions import assert_same, error_text
from tests.lib.later import Later
from tests.lib.operations import Operations
from tests.lib.tiers import slow_unless

os.environ["HF_HUB_OFFLINE"] = "1"
hf = pytest.importorskip("transformers")
peft = Later("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # peft uses a name that transformers will remove
    pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings:UserWarning"),  # a merge would change the head
]

V = 61
SMALL = {
    "t5": {"vocab_size": V, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
           "decoder_start_token_id": 0, "pad_token_id": 0, "use_cache": False},
    "gpt2": {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 12, "bos_token_id": 1,
             "eos_token_id": 2, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False},
    "llama": {"vocab_size": V, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 4,
              "intermediate_size": 24, "num_key_value_heads": 2, "use_cache": False, "tie_word_embeddings": False},
}  # fmt: skip
KINDS = {"t5": ("T5ForConditionalGeneration", "T5Config"), "gpt2": ("GPT2LMHeadModel", "GPT2Config"),
         "llama": ("LlamaForCausalLM", "LlamaConfig")}  # fmt: skip
UNITS = {"t5": "T5Block", "gpt2": "GPT2Block", "llama": "LlamaDecoderLayer"}
# Linear layers; a Conv1D; a table of embeddings that the head shares, and one with a padding token.
TARGETS = {"t5": ("q", "v", "wo"), "gpt2": ("c_attn", "mlp.c_proj", "wte"),
           "llama": ("q_proj", "down_proj", "embed_tokens")}  # fmt: skip
IDS = torch.arange(3, 3 + 4 * 6).view(4, 6) % V  # with token 4, the padding of llama
STEPS, LR = 2, 3e-2


def built(name: str, **options: Any) -> nn.Module:
    kind, config = (getattr(hf, of) for of in KINDS[name])
    return kind(config(**{**SMALL[name], **options}))


class Reference(NamedTuple):
    """Adapters of peft before and after some steps of torch's AdamW on one device, by peft's names."""

    before: dict[str, Tensor]
    after: dict[str, Tensor]
    losses: list[float]
    first: dict[str, Tensor]  # gradients of the first step


@functools.cache
def reference(name: str, steps: int = STEPS, lr: float = LR) -> Reference:
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, lora_alpha=6, target_modules=list(TARGETS[name]), init_lora_weights=False,
                             fan_in_fan_out=name == "gpt2")  # fmt: skip
    module = peft.get_peft_model(built(name), config)
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=lr, weight_decay=0.0)
    losses, first = [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        loss = module(input_ids=IDS, labels=IDS).loss
        loss.backward()
        first = first or {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in trained.items()}
        optimizer.step()
        losses.append(float(loss.detach()))
    return Reference(before, trained, losses, first)


HOWS: list[tuple[dict[str, Any] | None, bool]] = [  # of apply.unshard, or its definition; are factors split too?
    (None, True), ({}, True), ({"remat": True}, False), ({"release": False, "prefetch": 0}, True),
]  # fmt: skip
CASES = [("t5", {"data": 1}, HOWS[:1]), ("t5", {"data": 2, "model": 2}, HOWS[1:3]), ("t5", {"data": 2}, HOWS[::3]),
         ("gpt2", {"data": 2}, HOWS[1:3]), ("llama", {"data": 2}, HOWS[3:])]  # fmt: skip


@pytest.mark.parametrize(("name", "axes", "hows"), slow_unless(CASES[3:4], CASES))
def test_adapters_beside_a_deferred_module_train_as_those_of_peft(name: str, axes: dict[str, int], hows: Any) -> None:
    axis, theirs = tuple(axes), reference(name)
    mesh, (apply, tree) = fs.make_mesh(**axes), fs.defer(functools.partial(built, name), units=UNITS[name], reference=0)
    cfg = lora.Config(TARGETS[name], rank=3, alpha=6)
    described = lora.init(cfg, tree["params"], of=apply)
    before, after, first = (like_described(described, tree["params"], apply, named)
                            for named in (theirs.before, theirs.after, theirs.first))  # fmt: skip
    specs = {leaf: P(axis) for leaf in tree["params"]}  # unevenly, and to nothing
    params = fs.materialize(tree["params"], specs, mesh, key=fs.key(0))
    buffers = fs.materialize(tree["buffers"], P(), mesh, key=fs.key(0))
    optimizer = fs.optim.adamw(LR, weight_decay=0.0)

    def definition(p: Any, b: Any, **inputs: Any) -> Any:
        return apply(fs.unshard(p, specs, axis, shapes=apply.shapes), fs.unshard(b, P(), axis), **inputs)

    for how, split in hows:
        own = lora.specs(cfg, tree["params"], specs, of=apply) if split else P()
        f = definition if how is None else apply.unshard(specs, axis, **how)
        placed = {"adapters": own, "opt": optimizer.specs(own if split else fs.tree.map(lambda _: P(), described))}

        def train(state: Any, params: Any, buffers: Any, ids: Tensor, f: Any = f, own: Any = own) -> Any:
            def loss(adapters: Any) -> Tensor:
                adapted = lora.apply(cfg, params, adapters, of=apply, specs=specs, adapter_specs=own)
                return fs.pmean(f(adapted, buffers, input_ids=ids, labels=ids).loss, axis)

            value, grads = fs.value_and_grad(loss)(state["adapters"])
            adapters, opt = optimizer.update(grads, state["opt"], state["adapters"])
            return {"adapters": adapters, "opt": opt}, value, grads

        check = "first" if how == {} and name != "llama" else "never"
        step = fs.shard_map(train, mesh=mesh, in_specs=(placed, specs, P(), P(axis)), out_specs=(placed, P(), own),
                            check=check)  # fmt: skip
        state = fs.device_put({"adapters": before, "opt": optimizer.init(before)}, placed, mesh)
        got = []
        for i in range(STEPS):
            state, value, grads = step(state, params, buffers, IDS)
            got.append(float(fs.device_get(value)))
            if i == 0:
                assert_same(grads, first, "gradients", rtol=1e-4, atol=1e-5)
        assert got == pytest.approx(theirs.losses, rel=1e-5)
        assert_same(state["adapters"], after, "adapters", rtol=1e-3, atol=1e-4)


RANKS = 2
SHORT = IDS[:2, :3]
# --- curves ---------------------------------------------------------------------------------------------------

# axes of the mesh, the strategy over those that split the batch, and the axis that splits heads
CURVES: dict[str, tuple[dict[str, int], fs.Strategy | None, str | None]] = {
    "FULL_SHARD": ({"data": 2}, fs.strategy("FULL_SHARD"), None),
    "FULL_SHARD, offload": ({"data": 2}, fs.strategy("FULL_SHARD", offload_params=True), None),
    "SHARD_GRAD_OP": ({"data": 2}, fs.strategy("SHARD_GRAD_OP"), None),
    "NO_SHARD": ({"data": 2}, fs.strategy("NO_SHARD"), None),
    "HYBRID_SHARD": ({"replica": 2, "shard": 2}, fs.strategy("HYBRID_SHARD"), None),
    "model": ({"model": 2}, None, "model"),
    "FULL_SHARD, model": ({"data": 2, "model": 2}, fs.strategy("FULL_SHARD"), "model"),
}
FAST = "FULL_SHARD, model"


def curve(case: str, steps: int, key: Tensor | None = None, **options: Any) -> list[float]:
    """Return the losses of `fs.models.t5` with adapters that begin as those of peft."""
    (axes, strategy, model), theirs = CURVES[case], reference("t5", steps, 1e-3)
    data, how = (strategy.axis, strategy.options) if strategy else (None, {})
    mesh, layout, cfg = fs.make_mesh(**axes), t5.Layout(data, model, **how), lora.Config(TARGETS["t5"], 3, 6, **options)
    torch.manual_seed(0)
    with described_model(t5, built("t5", **({"dropout_rate": 0.1} if key is not None else {}))) as (config, base):
        specs = t5.specs(config, model=model)
        specs = strategy.param_specs(base, specs) if strategy else specs
        frozen = fs.materialize(base, specs, mesh, key=fs.key(0))
    described = lora.init(cfg, base, of=t5.theirs)
    own = lora.specs(cfg, base, specs, of=t5.theirs)
    optimizer = fs.optim.adamw(1e-3, weight_decay=0.0)
    placed = {"adapters": own, "opt": strategy.state_specs(optimizer, own) if strategy else optimizer.specs(own)}

    @fs.shard_map(mesh=mesh, in_specs=(placed, specs, P(data), P()), out_specs=(placed, P()))
    def step(state: Any, base: Any, ids: Tensor, key: Tensor | None) -> Any:
        def loss(adapters: Any) -> Tensor:
            params = lora.apply(cfg, base, adapters, of=t5.theirs, specs=specs, data=data, model=model, key=key)
            return t5.loss(config, params, ids, ids, layout=layout, specs=specs, key=key)

        value, grads = fs.value_and_grad(loss)(state["adapters"])
        adapters, opt = optimizer.update(grads, state["opt"], state["adapters"])
        return {"adapters": adapters, "opt": opt}, value

    before = like_described(described, base, t5.theirs, theirs.before)
    state = fs.device_put({"adapters": before, "opt": optimizer.init(before)}, placed, mesh)
    losses = []
    for i in range(steps):
        state, value = step(state, frozen, IDS, None if key is None else fs.fold_in(key, i))
        losses.append(float(fs.device_get(value)))
    return losses


@pytest.mark.parametrize(("case", "steps"), [pytest.param(c, 30, marks=pytest.mark.slow) for c in CURVES])
def test_steps_have_the_losses_of_peft_on_one_device(case: str, steps: int) -> None:
    assert curve(case, steps) == pytest.approx(reference("t5", steps, 1e-3).losses, rel=1e-5)


@pytest.mark.slow
def test_dropout_of_adapters_and_of_the_model_is_the_same_on_every_mesh() -> None:
    one, other = (curve(case, 2, fs.key(5), dropout=0.3) for case in ("NO_SHARD", FAST))
    assert other == pytest.approx(one, rel=1e-5)
    assert abs(one[0] - reference("t5", 3, 1e-3).losses[0]) > 1e-2


# --- memory ---------------------------------------------------------------------------------------------------

WIDE = {"vocab_size": 1340, "d_model": 32, "d_kv": 8, "d_ff": 128}
CONFIG = lora.Config(("q", "v"), rank=2, alpha=8)
OPTIMIZER = fs.optim.adamw(1e-2, weight_decay=0.0)


def t5_with_lora() -> nn.Module:
    config = peft.LoraConfig(r=2, lora_alpha=8, target_modules=["q", "v"], init_lora_weights=False)
    return peft.get_peft_model(built("t5", **WIDE), config)


Parts = tuple[Any, Any]  # what trains and what is frozen


def measured(specs: Parts, described: Parts, loss: Callable[[Any, Any, Tensor], Tensor], steps: int = 1) -> Any:
    """Return the losses of some steps, and the most bytes of a rank in the last, beside parameters and moments.

    The buffers of scan stay from step to step. In the first step the decoder has others than the encoder.
    """
    mesh, peaks = fs.make_mesh(data=RANKS), {}
    placed = {"params": specs[0], "opt": OPTIMIZER.specs(specs[0])}

    def step(state: Any, frozen: Any, ids: Tensor) -> Any:
        kept = sum(b.write.numel() for b in buffer_pool(region("test")).free)
        with Operations() as seen:
            value, grads = fs.value_and_grad(lambda p: loss(p, frozen, ids))(state["params"])
            params, opt = OPTIMIZER.update(grads, state["opt"], state["params"])
        peaks[int(fs.axis_index("data"))] = kept + seen.peak
        return {"params": params, "opt": opt}, value

    run = fs.shard_map(step, mesh=mesh, in_specs=(placed, specs[1], P("data")), out_specs=(placed, P()), check="never")
    state = fs.materialize({"params": described[0], "opt": OPTIMIZER.init(described[0])}, placed, mesh, key=fs.key(0))
    frozen = fs.materialize(described[1], specs[1], mesh, key=fs.key(0))
    losses = []
    for _ in range(steps):
        state, value = run(state, frozen, SHORT)
        losses.append(float(fs.device_get(value)))
    return losses, max(peaks.values())


def by_units(constructor: Callable[[], nn.Module], units: Any, **how: Any) -> Any:
    """Return the arguments of `measured` for a module whose parameters that require no gradient are frozen."""
    apply, tree = fs.defer(constructor, units=units, reference=0)
    specs = fs.fully_shard(P(), tree["params"], axis="data")
    f = apply.unshard(specs, "data", **how)
    split = lambda named: tuple({k: x for k, x in named.items() if (k in apply.frozen) == frozen}  # noqa: E731
                                for frozen in (False, True))  # fmt: skip
    assert not tree["buffers"]
    loss = lambda p, frozen, ids: fs.pmean(f({**p, **frozen}, {}, input_ids=ids, labels=ids).loss, "data")  # noqa: E731
    return split(specs), split(tree["params"]), loss


def ours() -> Iterator[Any]:
    """Yield the arguments of `measured` for `fs.models.t5`, with the values of the module."""
    torch.manual_seed(0)
    named = dict(t5_with_lora().named_parameters())
    torch.manual_seed(0)
    with described_model(t5, built("t5", **WIDE)) as (config, base):
        specs = fs.fully_shard(t5.specs(config), base, axis="data")
        described = lora.init(CONFIG, base, of=t5.theirs)
        own = fs.fully_shard(lora.specs(CONFIG, base, specs, of=t5.theirs), described, axis="data")

        def loss(adapters: Any, frozen: Any, ids: Tensor) -> Tensor:
            params = lora.apply(CONFIG, frozen, adapters, of=t5.theirs, specs=specs, adapter_specs=own)
            return t5.loss(config, params, ids, ids, layout=t5.Layout("data"), specs=specs)

        yield (own, specs), (like_described(described, base, t5.theirs, named), base), loss


def deferred() -> Iterator[Any]:
    """Yield the arguments of `measured` for the module without adapters, and adapters of `fs.lora`."""
    torch.manual_seed(0)
    named = dict(t5_with_lora().named_parameters())
    build = functools.partial(built, "t5", **WIDE)
    apply, tree = fs.defer(build, units=("T5Block", "shared", "*.embed_tokens", "lm_head"), reference=0)
    specs = fs.fully_shard(P(), tree["params"], axis="data")
    described = lora.init(CONFIG, tree["params"], of=apply)
    own = fs.fully_shard(lora.specs(CONFIG, tree["params"], specs, of=apply), described, axis="data")
    f = apply.unshard(specs, "data")

    def loss(adapters: Any, frozen: Any, ids: Tensor) -> Tensor:
        params = lora.apply(CONFIG, frozen, adapters, of=apply, specs=specs, adapter_specs=own)
        return fs.pmean(f(params, {}, input_ids=ids, labels=ids).loss, "data")

    yield (own, specs), (like_described(described, tree["params"], apply, named), tree["params"]), loss


def saved_bytes(module: nn.Module, ids: Tensor) -> int:
    """Return the bytes that autograd saves for the backward pass of a module on one device, without its weights."""
    weights = {x.untyped_storage().data_ptr() for x in module.parameters()}
    alive: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            alive[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        module(input_ids=ids, labels=ids)
    return sum(x.untyped_storage().nbytes() for x in alive.values())


def limit(module: nn.Module, units: int) -> int:
    """Return the bytes of gathered units, of two packed shards, 16 for each trained parameter, and of activations."""
    trained = sum(x.numel() for x in module.parameters() if x.requires_grad)
    own = SHORT[:1]
    logits = 4 * own.numel() * WIDE["vocab_size"]
    # A rank packs its shards of a unit to send them. The gradient of the logits exists beside what was saved for it.
    return units + units // RANKS + 16 * trained // RANKS + saved_bytes(module, own) + 2 * logits


APART = ("T5Block", "**.shared", "**.embed_tokens", "**.lm_head")


@pytest.mark.slow
def test_memory_of_a_frozen_base_and_adapters_is_two_units_and_the_activations() -> None:
    """Three forms of one model: peft's module by units, the plain module and fs.lora, and `fs.models.t5` by scan.

    In the proportions of T5-base, where the table of embeddings is the largest unit.
    """
    module = t5_with_lora()
    nbytes = lambda kind: max(sum(x.nbytes for x in m.parameters()) for m in module.modules()  # noqa: E731
                              if type(m).__name__ == kind)  # fmt: skip
    table, block = nbytes("Embedding"), nbytes("T5Block")
    forms = {"peft": measured(*by_units(t5_with_lora, APART), steps=2)}
    for form in (deferred, ours):
        for arguments in form():
            forms[form.__name__] = measured(*arguments, steps=2)
    # By units: a block and the head. scan keeps its last two blocks for the start of backward.
    limits = {"peft": table + block, "deferred": table + block, "ours": table + 2 * block}
    for name, (losses, peak) in forms.items():
        assert losses == pytest.approx(forms["peft"][0], rel=1e-5), name
        assert limits[name] <= 2 * table
        assert peak <= limit(module, limits[name]), name
    shards = sum(x.nbytes for x in module.parameters()) // RANKS
    live = {name: shards + peak for name, (_, peak) in forms.items()}
    assert max(live.values()) <= 1.15 * min(live.values()), live
    assert measured(*by_units(t5_with_lora, APART, release=False))[1] > limit(module, table + block)  # all units


# --- stand-ins ------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """A block with two linear layers of one base matrix, and dropout between them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.drop = nn.Linear(6, 10), nn.Linear(10, 6), nn.Dropout(0.2)

        def forward(self, x: Tensor) -> Tensor:
            assert self.up.weight.shape == (10, 6)
            assert self.up.weight.device == x.device
            assert "up.weight" in repr(self.up.weight) or isinstance(self.up.weight, torch.Tensor)
            return x + self.drop(self.down(torch.relu(self.up(x))))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Net.Block(), Net.Block()])
        self.conv, self.head = nn.Conv1d(6, 6, 1), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) + x @ self.head.weight


def net_step(axes: dict[str, int], how: Any, targets: list[str], key: Tensor | None, dtype: Any = None) -> Any:
    """Return the loss and the gradients of two adapters at once, the second of half weight, on five rows."""
    mesh, (apply, tree) = fs.make_mesh(**axes), fs.defer(Net, units="Block", reference=0)
    apply = apply.draws_over("data") if key is not None else apply.eval()
    first = lora.Config(targets, rank=2, dropout=0.3 if key is not None else 0.0, init="random", bias="lora_only")
    second = lora.Config(targets[:1], rank=1, init="random")
    specs = {name: P("data") for name in tree["params"]}
    described = {"one": lora.init(first, tree["params"], of=apply), "two": lora.init(second, tree["params"], of=apply)}
    own = {name: lora.specs(cfg, tree["params"], specs, of=apply) for name, cfg in (("one", first), ("two", second))}
    adapters = fs.materialize(described, own, mesh, key=fs.key(1))
    params = fs.materialize(tree["params"], specs, mesh, key=fs.key(0))
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
    check = "first" if axes == {"data": 2} or key is not None else "never"  # draws need the types of arguments
    f = apply.unshard(specs, "data", **how, dtype=dtype) if how is not None else (
        lambda p, b, *args, **kwargs: apply(fs.unshard(p, specs, "data", shapes=apply.shapes, dtype=dtype), b, *args,
                                            **kwargs))  # fmt: skip

    @fs.shard_map(mesh=mesh, in_specs=(specs, own, P("data"), P()), out_specs=(P(), own), check=check)
    def step(params: Any, adapters: Any, x: Tensor, key: Tensor | None) -> Any:
        def loss(adapters: Any) -> Tensor:
            one = lora.apply(first, params, adapters["one"], of=apply, specs=specs, data="data", key=key,
                             shapes=tree["params"], batch=5)  # fmt: skip
            both = lora.apply(second, one, adapters["two"], of=apply, specs=specs, weight=0.5)
            draws = {} if key is None else {"key": fs.fold_in(key, "module")}
            y = f(both, {}, x if dtype is None else x.to(dtype), **draws)
            return fs.psum(y.float().square().sum(), "data")

        return fs.value_and_grad(loss)(adapters)

    return step(params, adapters, x, key)


@pytest.mark.slow
@pytest.mark.parametrize("key", [pytest.param(None, marks=pytest.mark.slow), fs.key(2)])
def test_two_adapters_and_biases_with_dropout_on_every_mesh_and_schedule(key: Tensor | None) -> None:
    want = net_step({"data": 1}, None, ["up", "down"], key)
    for axes, how in (({"data": 2}, None), ({"data": 3}, {"remat": True})):
        # Gradients are sums of terms up to 30 in another order: some times 30 times the precision of float32.
        assert_same(net_step(axes, how, ["up", "down"], key), want, f"{axes} {how}", rtol=1e-5, atol=2e-5)
    if key is not None:
        plain, _ = net_step({"data": 1}, None, ["up", "down"], None)
        assert float(fs.device_get(want[0])) != float(fs.device_get(plain))


def test_adapters_in_bfloat16_by_units_have_the_numbers_of_the_definition() -> None:
    want = net_step({"data": 2}, None, ["up"], None, torch.bfloat16)
    assert_same(net_step({"data": 2}, {}, ["up"], None, torch.bfloat16), want)


def test_use_of_an_adapted_parameter_that_adapters_do_not_take_part_in_is_an_error() -> None:
    for how in (None, {}):
        assert error_text(net_step, {"data": 2}, how, ["head"], None).startswith(
            "'head.weight' is adapted, and used by matmul, which adapters do not take part in\n"
            "  they do in nn.Linear, nn.Embedding and transformers' Conv1D\n"
            "  fix: exclude its module from the adapter's targets"
        )
    apply, tree = fs.defer(Net, reference=0)
    text = error_text(lora.init, lora.Config(["conv"]), tree["params"], of=apply)
    assert "params['conv.weight'] is a target and no matrix: it is the weight of a Conv1d" in text
    assert "is not a parameter of the module" in error_text(lora.init, lora.Config(["up"]), tree, of=apply)
    named_alike, _ = fs.defer(lambda: type("Conv1D", (nn.Linear,), {})(3, 2), reference=0)
    assert named_alike.module_leaf(("weight",), 2).layout == "oi"  # it is no Conv1D of transformers
    table, _ = fs.defer(lambda: nn.Embedding(5, 3, max_norm=1.0), reference=0)
    weights = {"weight": torch.ones(5, 3)}
    cfg = lora.Config(".*", rank=1)
    adapters = {"weight": {"a": torch.ones(5, 1), "b": torch.ones(1, 3)}}
    adapted = lora.apply(cfg, weights, adapters, of=table)
    assert "'weight' is adapted, and used by embedding" in error_text(table, adapted, {}, torch.tensor([1]))
    layer, _ = fs.defer(lambda: nn.Linear(3, 2), reference=0)
    params = lora.quantize({"weight": torch.ones(2, 3)}) | {"bias": torch.ones(2)}
    assert error_text(layer, params, {}, torch.ones(1, 3)) == (
        "'weight' was quantized, or adapted, as [in, out], and linear takes [out, in]\n"
        "  fix: pass of=, the function that fs.defer returned, to each function of fs.lora"
    )
    view = lora.apply(cfg, params, {"weight": {"a": torch.ones(3, 1), "b": torch.ones(1, 2)}}, of=layer)
    assert error_text(layer, view, {}, torch.ones(1, 3)) == (
        "linear: the base is [out, in], and its base was quantized as [in, out]\n"
        "  fix: pass one of= to lora.quantize and to lora.apply: of a module, the function that fs.defer returned"
    )
