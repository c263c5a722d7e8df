"""docs/architectures.md: its rows are those of the list, and are true; `zoo.measure` compares with the modules."""

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
    rows = zoo.read_page()[0]
    answers = {(rows[case.model][-2], case.mixes) for case in CASES.values()}
    assert {(rows[m][-2], CASES[m].mixes) for m in SAMPLE} == answers
    assert all({case.model for case in cases} & {*SAMPLE} for cases in FAMILIES.values())


def test_page_is_that_of_the_list():
    rows, refusals = zoo.read_page()
    assert list(rows) == list(CASES)
    assert list(refusals) == list(REFUSED)
    assert zoo.TABLE.read_text() == zoo.page(rows, refusals), "python -m tests.defer.zoo"


@pytest.mark.parametrize("model", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in SAMPLE])
def test_row_of_the_page_is_reproduced(model):
    pytest.importorskip(CASES[model].library)
    row = without_warnings(lambda: zoo.measure(CASES[model]))()
    same = 5  # class, leaves, parameters, units, forward: the others depend on the order of sums, or on the clock
    assert zoo.cells(row)[:same] == zoo.read_page()[0][model][:same]


@pytest.mark.slow
@pytest.mark.parametrize("model", REFUSED)
def test_refused_architecture_has_the_error_of_the_page(model):
    assert without_warnings(lambda: zoo.refusal(model))() == zoo.read_page()[1][model]


def test_a_wrong_gradient_has_no_row(monkeypatch):
    monkeypatch.setattr(fs, "pmean", fs.psum)
    with pytest.raises(AssertionError, match="gradient differs from the sum over ranks by 1"):
        zoo.measure(CASES["MistralForCausalLM"])


def test_a_wrong_value_has_no_row(monkeypatch):
    def eager(case):
        module = case.construct()
        torch.nn.init.constant_(module.model.norm.weight, 2.0)
        return module

    monkeypatch.setattr(zoo, "eager", eager)
    with pytest.raises(AssertionError, match=r"model\.norm\.weight"):
        zoo.measure(CASES["MistralForCausalLM"])
