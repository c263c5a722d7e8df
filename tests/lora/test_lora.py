"""Adapters against PEFT: logits, loss and gradients per leaf, on every mesh."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard import P
from tests.lib.model_cases import LAYOUTS, close
from tests.lib.tiers import slow_unless
from tests.lora import cases

BASE = {
    "gpt2": {"targets": ("c_attn",)},
    "llama": {"targets": ("q_proj", "v_proj"), "rank": 4, "alpha": 12},
    "bert": {"targets": ("query", "value"), "rank": 2},
    "t5": {"targets": ("q", "v"), "alpha": 32},
}
OPTIONS = {
    "dora": ("llama", {"targets": ("q_proj", "o_proj", "down_proj"), "dora": True}),
    "dora, fused": ("gpt2", {"targets": ("c_attn", "attn.c_proj"), "dora": True}),
    "rslora, ranks": ("llama", {"targets": ("k_proj", "up_proj", "down_proj"), "rslora": True, "alpha": 3,
                                "ranks": {"layers.0.mlp.*": 3, "k_proj": 1}, "alphas": {"up_proj": 7}}),
    "all-linear": ("gpt2", {"targets": "all-linear", "rank": 3}),
    "all-linear, neox": ("gpt_neox", {"targets": "all-linear", "rank": 3}),
    "all-linear, bert": ("bert", {"targets": "all-linear", "rank": 3}),
    "embeddings, tied": ("gpt2", {"targets": ("wte", "wpe", "c_fc"), "rank": 3}),
    "embeddings, dora": ("llama", {"targets": ("embed_tokens", "lm_head"), "rank": 3, "dora": True}),
    "regex, bias of the adapted": ("gpt2", {"targets": r".*\.1\.(attn\.c_attn|mlp\.c_proj)", "bias": "lora_only"}),
    "all biases": ("gpt2", {"targets": ("c_proj",), "bias": "all"}),
    "a module to save": ("llama", {"targets": ("q_proj",), "modules_to_save": ("lm_head", "norm")}),
    "exclude": ("llama", {"targets": "all-linear", "exclude": ("mlp.up_proj", "k_proj")}),
}  # fmt: skip
TWO_AXES = "both, fully sharded, sequence"


PARITY = [*(("gpt2", layout) for layout in LAYOUTS), *((name, TWO_AXES) for name in BASE if name != "gpt2"),
          *((name, "one device") for name in BASE if name != "gpt2")]  # fmt: skip
FAST = {("gpt2", "one device"), ("llama", TWO_AXES)}
SLOW_OPTIONS = ("all-linear", "all-linear, neox", "all-linear, bert", "embeddings, dora", "exclude", "rslora, ranks",
                "all biases", "dora, fused", "a module to save", "embeddings, tied")  # fmt: skip


def unless(fast, *values):
    return pytest.param(*values, marks=[] if fast else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "layout"), [unless(case in FAST, *case) for case in PARITY])
def test_logits_loss_and_gradients_are_those_of_peft(name, layout):
    case = cases.pair(name, **BASE[name])
    close(cases.our_results(case, layout), cases.peft_results(case), 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("option", "layout"),
    [*(unless(option not in SLOW_OPTIONS, option, TWO_AXES) for option in OPTIONS),
     *(unless(False, option, "uneven") for option in ("dora", "dora, fused", "embeddings, tied"))],
)  # fmt: skip
def test_options_have_the_numbers_of_peft(option, layout):
    name, options = OPTIONS[option]
    case = cases.pair(name, **options)
    close(
        cases.our_results(case, layout), cases.peft_results(case), 1e-5, 2e-5
    )  # 2e-5: norms of DoRA are sums of three


@pytest.mark.parametrize("option", slow_unless(["embeddings, tied"], ["dora", "embeddings, tied"]))
def test_replicated_adapters_of_a_split_base_are_sliced(option):
    name, options = OPTIONS[option]
    case = cases.pair(name, **options)
    got = cases.our_results(case, TWO_AXES, adapter_specs=fs.P(), remat=True)
    close(got, cases.peft_results(case), 1e-5, 2e-5)


@pytest.mark.parametrize("layout", ["data, fully sharded", pytest.param("uneven", marks=pytest.mark.slow)])
def test_a_base_of_half_precision_has_adapters_of_single(layout):
    case = cases.pair("llama", torch.bfloat16, **BASE["llama"])
    assert {x.dtype for x in fs.tree.leaves(case.adapters)} == {torch.float32}
    got, want = cases.our_results(case, layout), cases.peft_results(case)
    assert [x.dtype for x in fs.tree.leaves(got[2])] == [torch.float32] * 8
    # bf16 keeps 8 bits; a mesh rounds partial results once more.
    close(got, want, 0.1, 0.05)


def test_half_precision_rounds_once_as_peft_on_one_device():
    case = cases.pair("llama", torch.bfloat16, targets="all-linear", rank=3)
    adapted = fs.lora.apply(case.lora, case.params, case.adapters, of=case.module.theirs)
    layer = case.theirs.base_model.model.model.layers[1].mlp.down_proj
    x = torch.randn(64, 29, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(fs.nn.linear(x, adapted["h"][1]["down"]["w"]), layer(x))
    second, tensors = cases.add_second(case, 0.3, targets=("down_proj",), rank=2)
    both = fs.lora.apply(second, adapted, tensors, of=case.module.theirs, weight=0.3)
    assert torch.equal(fs.nn.linear(x, both["h"][1]["down"]["w"]), layer(x))


@pytest.mark.parametrize(("dora", "layout"), [unless(False, False, "one device"), (True, TWO_AXES)])
def test_several_weighted_adapters_are_those_of_peft(dora, layout):
    case = cases.pair("llama", targets=("q_proj", "down_proj"), rank=4, alpha=6, dora=dora, init="random")
    second, tensors = cases.add_second(case, 0.3, targets=("down_proj", "v_proj"), rank=3, dora=dora)
    mesh, specs, split, params = cases.cases.placed(case.module, case.cfg, case.params, layout)
    ids, _ = cases.batch(case)
    of = case.module.theirs
    own = [fs.lora.specs(cfg, case.params, specs, of=of) for cfg in (case.lora, second)]

    @fs.shard_map(mesh=mesh, in_specs=(specs, *own, fs.P("data")), out_specs=fs.P("data", None, "model"),
                  check="first" if dora else "never")  # fmt: skip
    def run(p, one, two, ids):
        where = {"of": of, "specs": specs, "data": "data", "model": "model"}
        p = fs.lora.apply(second, fs.lora.apply(case.lora, p, one, **where), two, weight=0.3, **where)
        return case.module.apply(case.cfg, p, ids, layout=split, specs=specs)

    got = fs.device_get(run(params, *(fs.device_put(x, s, mesh) for x, s in zip((case.adapters, tensors), own,
                                                                              strict=True)), ids))  # fmt: skip
    close(got, case.theirs(input_ids=ids).logits.detach(), 1e-5, 2e-5)


@pytest.mark.parametrize(
    ("name", "targets", "layout"),
    [
        ("gpt2", ("c_attn", "mlp.c_proj"), TWO_AXES),
        pytest.param("llama", ("o_proj", "v_proj"), "uneven", marks=pytest.mark.slow),  # 3 groups over 3 ranks
        pytest.param("t5", ("o", "wi"), "model=4", marks=pytest.mark.slow),  # one rank without any of 3 heads
    ],
)
def test_dropout_by_a_key_is_the_same_on_every_mesh(name, targets, layout):
    case = cases.pair(name, targets=targets, rank=3, dropout=0.4)
    want = cases.our_results(case, "one device", key=fs.key(3))
    close(cases.our_results(case, layout, key=fs.key(3), remat=True, again=True), want, 1e-5, 2e-5)
    without = cases.our_results(case, "one device")
    assert not torch.allclose(without[1], want[1], rtol=1e-3)


def test_dropout_drops_inputs_of_the_adapter_alone_by_leaf_and_key():
    cfg = fs.lora.Config(["up", "down"], rank=4, alpha=8, dropout=0.25)
    eye = {"a": torch.eye(4), "b": torch.eye(4)}
    params = {"up": torch.eye(4), "down": torch.eye(4)}
    x = torch.ones(500, 4)

    def outputs(key):
        adapted = fs.lora.apply(cfg, params, {"up": eye, "down": eye}, key=key)
        return fs.nn.linear(x, adapted["up"]), fs.nn.linear(x, adapted["down"])

    up, down = outputs(fs.key(0))
    assert set(up.unique().tolist()) == {
        1.0,
        float(torch.tensor(1 / 0.75) * 2 + 1),
    }  # x, and twice the scaled x where it is not dropped
    assert abs(float((up == 1).float().mean()) - 0.25) < 0.05
    assert not torch.equal(up, down)
    assert torch.equal(up, outputs(fs.key(0))[0])
    assert not torch.equal(up, outputs(fs.key(1))[0])
    assert torch.equal(outputs(None)[0], 3 * x)


def test_training_follows_peft_with_adamw():
    case = cases.pair("gpt2", targets=("c_attn", "c_proj"), rank=4, alpha=8, init="kaiming")
    mesh, specs, split, params = cases.cases.placed(case.module, case.cfg, case.params, TWO_AXES)
    of, (ids, targets) = case.module.theirs, cases.batch(case)
    own = fs.lora.specs(case.lora, case.params, specs, of=of)
    opt = fs.optim.adamw(1e-2, weight_decay=0.1)
    state_specs = opt.specs(own)

    @fs.shard_map(mesh=mesh, in_specs=(specs, own, state_specs, fs.P("data"), fs.P("data")),
                  out_specs=(own, state_specs, fs.P()), check="never")  # fmt: skip
    def step(p, adapters, state, ids, targets):
        def loss(adapters):
            adapted = fs.lora.apply(case.lora, p, adapters, of=of, specs=specs, data="data", model="model")
            return case.module.loss(case.cfg, adapted, ids, targets, layout=split, specs=specs)

        value, grads = fs.value_and_grad(loss)(adapters)
        return *opt.update(grads, state, adapters), value

    adapters = fs.device_put(case.adapters, own, mesh)
    state = fs.materialize(opt.init(case.adapters), state_specs, mesh, key=fs.key(0))
    theirs = torch.optim.AdamW([p for p in case.theirs.parameters() if p.requires_grad], 1e-2, weight_decay=0.1)
    for _ in range(4):
        adapters, state, loss = step(params, adapters, state, ids, targets)
        want = cases.peft_results(case)[1]
        theirs.step()
        torch.testing.assert_close(fs.device_get(loss), want, rtol=1e-5, atol=0)
    case.theirs.zero_grad()
    trained = cases.read_adapters(case.module, case.cfg, case.lora, case.theirs.state_dict())
    close(fs.device_get(adapters), trained, 1e-4, 1e-4)


def test_generation_with_adapters_is_that_of_peft():
    case = cases.pair("llama", **BASE["llama"])
    mesh, specs, split, params = cases.cases.placed(case.module, case.cfg, case.params, TWO_AXES)
    own = fs.lora.specs(case.lora, case.params, specs, of=case.module.theirs)
    ids, _ = cases.batch(case)

    @fs.shard_map(mesh=mesh, in_specs=(specs, own, fs.P("data")), out_specs=fs.P("data"))
    def write(p, adapters, ids):
        adapted = fs.lora.apply(case.lora, p, adapters, of=case.module.theirs, specs=specs, model="model")
        return case.module.generate(case.cfg, adapted, ids, new=4, layout=split, specs=specs)

    got = fs.device_get(write(params, fs.device_put(case.adapters, own, mesh), ids))
    want = case.theirs.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert torch.equal(got, want)


def test_adapters_are_computed_in_the_dtype_of_the_layout():
    case = cases.pair("llama", **BASE["llama"])
    got = cases.our_results(case, TWO_AXES, dtype=torch.bfloat16, key=fs.key(0), again=True)
    assert {x.dtype for x in fs.tree.leaves(got[2])} == {torch.float32}
    assert got[0].dtype == torch.bfloat16
    close(got[:2], cases.our_results(case, "one device", dtype=torch.bfloat16)[:2], 0.1, 0.05)  # 8 bits of bf16


@pytest.mark.parametrize("spec", [P("data"), P(("data", "model")), P("model", "data"), P(None, "model", "data")])
def test_parameters_of_experts_are_added_to_their_factors_on_every_mesh(spec):
    """Values, gradients and merged leaves by hand, with factors placed as the parameter, and with replicated ones."""
    cfg = fs.lora.Config((), rank=2, alpha=4, init="random", parameters=("experts.up",))
    params = {"experts": {"up": torch.arange(96.0).reshape(4, 4, 6) / 96}}
    described = fs.lora.init(cfg, params)
    assert [tuple(x.shape) for x in fs.tree.leaves(described)] == [(4, 4, 2), (2, 4, 6)]
    assert "high=0.5" in repr(described["experts.up"]["a"])  # 1/sqrt(in), as peft has it
    x, mesh = torch.linspace(-1, 1, 32).reshape(4, 2, 4), fs.make_mesh(data=2, model=2)
    full = fs.device_get(fs.materialize(described, P(), mesh, key=fs.key(0)))

    def sum_of(factors):
        ab = torch.einsum("eir,reo->eio", factors["experts.up"]["a"], factors["experts.up"]["b"])
        return params["experts"]["up"] + 2 * ab

    want = fs.value_and_grad(lambda factors: (x @ sum_of(factors)).square().sum())(full)
    for placed in (fs.lora.specs(cfg, params, {"experts": {"up": spec}}), P()):

        @fs.shard_map(mesh=mesh, in_specs=(spec, placed, P()), out_specs=(P(), placed))
        def run(p, adapters, x, placed=placed):
            def loss(adapters):
                adapted = fs.lora.apply(cfg, p, adapters, specs=spec, adapter_specs=placed)
                w = fs.unshard(adapted, spec, ("data", "model"))["experts"]["up"]
                return fs.pmean((fs.pvary(x, ("data", "model")) @ w).square().sum(), ("data", "model"))

            return fs.value_and_grad(loss)(adapters)

        got = fs.device_get(run(params, fs.device_put(full, placed, mesh), x))
        for a, b in zip(fs.tree.leaves(got), fs.tree.leaves(want), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    merged = fs.lora.merge(cfg, fs.device_put(params, spec, mesh), fs.device_put(full, P(), mesh))
    torch.testing.assert_close(fs.device_get(merged)["experts"]["up"], sum_of(full), rtol=1e-6, atol=1e-6)
