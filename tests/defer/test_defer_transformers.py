"""`defer` of Hugging Face's architectures: ties, padding rows, dtypes, training. `test_zoo.py` has the rest.

transformers (5) wraps `torch.nn.init` and skips its own initialization only for tensors that are on the meta device or
marked as loaded; a recorded tensor says it is on the CPU, so every model initializes itself as it does eagerly.
"""

from __future__ import annotations

import functools
import os

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.defer.constructor import defer
from tests.defer.test_defer import (
    check_distribution,
    construct_eagerly,
    is_drawn,
    values_on_one_device,
    without_warnings,
)
from tests.defer.zoo_cases import CASES, small_config
from tests.lib.assertions import assert_same
from tests.lib.tiers import slow_unless

os.environ["HF_HUB_OFFLINE"] = "1"
hf = pytest.importorskip("transformers")

TIES = {
    "GPT2LMHeadModel": {"lm_head.weight": "transformer.wte.weight"},
    "T5ForConditionalGeneration": {
        "encoder.embed_tokens.weight": "shared.weight", "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight"},
    "BertForMaskedLM": {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias"},
    "Gemma2ForCausalLM": {"lm_head.weight": "model.embed_tokens.weight"},
    "LlamaForCausalLM": {},
}  # fmt: skip
PADDING = {
    "LlamaForCausalLM": ("model.embed_tokens.weight", 3),
    "BertForMaskedLM": ("bert.embeddings.word_embeddings.weight", 0),
    "OPTForCausalLM": ("model.decoder.embed_tokens.weight", 1),
    "WhisperForConditionalGeneration": ("model.decoder.embed_tokens.weight", 5),
}


def constructor(name, **options):
    return without_warnings(lambda: CASES[name].construct(**options))


@functools.cache
def deferred(name):
    return defer(constructor(name))


@pytest.mark.parametrize("name", TIES)
def test_tied_weights_are_one_leaf(name):
    assert deferred(name)[0].ties == TIES[name]


@pytest.mark.parametrize("name", PADDING)
def test_only_the_padding_row_is_zero(name):
    leaf, row = PADDING[name]
    weight = values_on_one_device({"params": deferred(name)[1]["params"]})["params"][leaf]
    assert (weight == 0).all(1).nonzero().tolist() == [[row]]


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM"])
def test_dtype_of_the_constructor_is_recorded(name):
    _, tree = defer(constructor(name, dtype=torch.bfloat16))
    eager = construct_eagerly(constructor(name, dtype=torch.bfloat16))
    values = values_on_one_device(tree)
    assert {x.dtype for x in values["params"].values()} == {torch.bfloat16}
    check_distribution(tree, values, eager)
    for n, x in values_on_one_device(deferred(name)[1])["params"].items():
        if is_drawn(deferred(name)[1]["params"][n]):
            assert_same(values["params"][n], x.bfloat16())


def test_auto_class_equals_its_model():
    config = small_config(hf.LlamaConfig)
    for auto, name in ((hf.AutoModelForCausalLM, "model.norm.weight"), (hf.AutoModel, "norm.weight")):
        apply, tree = defer(without_warnings(lambda auto=auto: auto.from_config(config)))
        assert name in tree["params"]
        placed = fs.materialize(tree, P(), fs.make_mesh(a=1), key=fs.key(0))
        params, buffers = fs.device_get(placed["params"]), fs.device_get(placed["buffers"])
        ids = torch.tensor([[1, 2, 3]])
        out = apply.eval()(params, buffers, input_ids=ids)[0]
        assert torch.isfinite(out).all()
        eager = apply_eager(auto, config, params, buffers)(input_ids=ids)[0]
        torch.testing.assert_close(out, eager, rtol=0, atol=0)


def apply_eager(auto, config, params, buffers):
    model = auto.from_config(config).eval()
    model.load_state_dict({**params, **buffers}, strict=False)
    return model


@pytest.mark.parametrize("name", slow_unless(["Llama"], ["Llama", "T5"]))
def test_deferred_model_trains_equally_on_every_mesh(name):
    """From `defer` to three steps of AdamW: data parallel, fully sharded, and the single device agree."""
    make = {
        "Llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(
            vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2)),
        "T5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(
            vocab_size=61, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4, decoder_start_token_id=0)),
    }[name]  # fmt: skip
    apply, tree = fs.defer(lambda: make().eval())
    ids = torch.randint(1, 61, (6, 9), generator=torch.Generator().manual_seed(0))

    def trained(sizes, fsdp):
        mesh = fs.make_mesh(**sizes)
        specs = fs.fully_shard(P(), tree["params"], axis="data") if fsdp else fs.tree.map(lambda _: P(), tree["params"])
        optimizer = fs.optim.adamw(1e-2, eps=1e-4)  # gradients that are zero but for rounding stay small steps
        state = {"params": tree["params"], "opt": optimizer.init(tree["params"]), "buffers": tree["buffers"]}
        places = {"params": specs, "opt": optimizer.specs(specs), "buffers": P()}
        state = fs.materialize(state, places, mesh, key=fs.key(1))
        fs.validate(state["params"], tree["params"])

        @fs.shard_map(mesh=mesh, in_specs=(places, P("data")), out_specs=(places, P()), check="never")
        def step(state, ids):
            buffers = fs.unshard(state["buffers"], P(), "data")

            def loss(p):
                out = apply(fs.unshard(p, specs, "data", shapes=tree["params"]), buffers, input_ids=ids, labels=ids)
                return fs.pmean(out.loss, "data")

            value, grads = fs.value_and_grad(loss)(state["params"])
            params, opt = optimizer.update(grads, state["opt"], state["params"])
            return {**state, "params": params, "opt": opt}, value

        losses = []
        for _ in range(3):
            state, value = step(state, ids)
            losses.append(float(value))
        return losses, fs.device_get(state["params"])

    losses, params = trained({"data": 1}, False)
    assert losses[2] < losses[0]
    for sizes, fsdp in (({"data": 2}, False), ({"data": 3}, True)):
        others, same = trained(sizes, fsdp)
        assert others == pytest.approx(losses, rel=1e-5)
        for leaf, expected in params.items():
            # one step moves a weight by at most 1e-2; rounding moved none by a thousandth of that
            torch.testing.assert_close(
                same[leaf], expected, rtol=1e-5, atol=1e-5, msg=lambda m, leaf=leaf: f"{leaf}: {m}"
            )
