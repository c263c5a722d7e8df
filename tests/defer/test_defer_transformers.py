"""`defer` of Hugging Face's architectures: ties, padding rows, dtypes. `test_zoo.py` has the rest.

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
