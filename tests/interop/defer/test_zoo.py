"""docs/architectures.md: its rows are those of the list, and are true; `zoo.measure` compares with the modules."""

from __future__ import annotations

import pytest
import torch

import fshard as fs

pytest.importorskip("transformers")
pytest.importorskip("diffusers")
from tests.interop.defer import zoo
from tests.interop.defer.test_defer import without_warnings
from tests.interop.defer.zoo_cases import CASES, FAMILIES, REFUSED

FAST = ["GPT2LMHeadModel", "MambaForCausalLM"]
NO_UNITS = "AlbertForMaskedLM"


def sample() -> list[str]:
    """Return 39 classes: of each family the first with each answer of check, one that mixes examples, and others."""
    rows, first = zoo.read_page()[0], {}
    for family, cases in FAMILIES.items():
        for case in cases:
            first.setdefault((family, rows[case.model][-2], case.mixes), case.model)
    return sorted({*FAST, NO_UNITS, *first.values(), *list(CASES)[::11]}, key=list(CASES).index)


def test_page_is_that_of_the_list():
    rows, refusals = zoo.read_page()
    assert list(rows) == list(CASES)
    assert list(refusals) == list(REFUSED)
    assert zoo.TABLE.read_text() == zoo.page(rows, refusals), "python -m tests.interop.defer.zoo"


@pytest.mark.parametrize("model", [m if m in FAST else pytest.param(m, marks=pytest.mark.slow) for m in sample()])
def test_row_of_the_page_is_reproduced(model):
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
