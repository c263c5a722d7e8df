"""Adapters against PEFT: logits, loss and gradients per leaf, on every mesh."""

from __future__ import annotations

import pytest

from tests.lib.model_cases import LAYOUTS, close
from tests.lora import cases

CASES = {
    "gpt2": {"targets": ("c_attn",)},
    "llama": {"targets": ("q_proj", "v_proj"), "rank": 4, "alpha": 12},
    "bert": {"targets": ("query", "value"), "rank": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients_are_those_of_peft(name, layout):
    case = cases.pair(name, **CASES[name])
    close(cases.our_results(case, layout), cases.peft_results(case), 1e-5, 1e-5)
