"""docs/architectures.md: it has the classes of the list, and is true; `zoo.measure` compares with the modules."""

from __future__ import annotations

import pytest
import torch

import fshard as fs

pytest.importorskip("transformers")
from tests.defer import zoo
from tests.defer.test_defer import without_warnings
from tests.defer.zoo_cases import CASES, FAMILIES, REFUSED

FAST = ["GPT2LMHeadModel"]
SAMPLE = [  # one class of each family and of each answer of check; one without units, one that mixes examples
    "GPT2LMHeadModel", "AlbertForMaskedLM", "LongformerForMaskedLM", "T5ForConditionalGeneration", "MixtralForCausalLM",
    "MiniMaxForCausalLM", "MambaForCausalLM", "GraniteMoeHybridForCausalLM", "ViTForImageClassification",
    "EncodecModel", "CLIPModel", "AutoformerModel", "AuraFlowTransformer2DModel",
]  # fmt: skip


def test_sample_has_each_family_and_each_answer():
    items = zoo.read_page()[0]
    answers = {(check_of(items[case.model]), case.mixes) for case in CASES.values()}
    assert len(answers) == 5
    assert {(check_of(items[m]), CASES[m].mixes) for m in SAMPLE} == answers
    assert all({case.model for case in cases} & {*SAMPLE} for cases in FAMILIES.values())


def check_of(item):
    remarks = item.partition(" (")[2].rstrip(")").split("; ")
    return remarks[-1] if remarks[-1] in zoo.CHECKS.values() else "yes"


def test_page_has_the_classes_of_the_list():
    items, refusals = zoo.read_page()
    assert list(items) == list(CASES)
    assert list(refusals) == list(REFUSED)
    assert zoo.TABLE.read_text() == zoo.page(items, refusals), "python -m tests.defer.zoo"


@pytest.mark.parametrize("model", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in SAMPLE])
def test_item_of_the_page_is_reproduced(model):
    pytest.importorskip(CASES[model].library)
    assert zoo.item(without_warnings(lambda: zoo.measure(CASES[model]))()) == zoo.read_page()[0][model]


@pytest.mark.slow
@pytest.mark.parametrize("model", REFUSED)
def test_refused_architecture_has_the_error_of_the_page(model):
    assert without_warnings(lambda: zoo.refusal(model))() == zoo.read_page()[1][model]


def test_a_wrong_gradient_is_not_on_the_page(monkeypatch):
    monkeypatch.setattr(fs, "pmean", fs.psum)
    with pytest.raises(AssertionError, match="gradient differs from the sum over ranks by 1"):
        zoo.measure(CASES["MistralForCausalLM"])


def test_a_wrong_value_is_not_on_the_page(monkeypatch):
    def eager(case):
        module = case.construct()
        torch.nn.init.constant_(module.model.norm.weight, 2.0)
        return module

    monkeypatch.setattr(zoo, "eager", eager)
    with pytest.raises(AssertionError, match=r"model\.norm\.weight"):
        zoo.measure(CASES["MistralForCausalLM"])
