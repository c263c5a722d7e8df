"""Properties of Llama alone: padding under dropout, and the configs that it refuses."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.models import llama
from fshard.models.activations import ACTIVATIONS
from tests.lib import model_cases as cases
from tests.lib.assertions import error_text
from tests.lib.model_cases import DECODERS


def test_padding_does_not_change_other_tokens_with_dropout():
    cfg = DECODERS["llama"].config(attention_dropout=0.3)
    ids, mask = cases.tokens(37), cases.left_padding(6, 9)
    mesh, specs, layout, p = cases.placed(llama, cfg, llama.init(cfg), "model")
    run = fs.shard_map(lambda p, ids, m: llama.apply(cfg, p, ids, layout=layout, key=fs.key(0), mask=m), mesh=mesh,
                       in_specs=(specs, P(), P()), out_specs=P(None, None, "model"))  # fmt: skip
    real = mask.bool()
    other = ids.where(real, (ids + 1) % 37)
    a, b = (fs.device_get(run(p, x, mask)) for x in (ids, other))
    torch.testing.assert_close(a[real], b[real], rtol=0, atol=0)


REFUSED = [
    ({"hidden_size": 10, "num_attention_heads": 4, "num_key_value_heads": 3, "head_dim": 4}, """\
2 problems
llama.Config: the heads must divide the width
  10 % 4 = 2
llama.Config: the groups must divide the heads
  4 % 3 = 1"""),
    ({"hidden_act": "prelu"}, f"""\
llama.Config: hidden_act='prelu'
  it has parameters of its own, for which the model has no leaf
  fix: one of {", ".join(ACTIVATIONS)}"""),
    ({"rope_parameters": {"rope_theta": 10.0, "partial_rotary_factor": 0.5}}, """\
llama.Config: all dims of a head are rotated
  rope_parameters  {'rope_theta': 10.0, 'partial_rotary_factor': 0.5}
  fix: leave out partial_rotary_factor"""),
    ({"rope_parameters": {"rope_type": "linear", "rope_theta": 10.0}}, """\
rope: linear needs ['factor']
  parameters  {'rope_type': 'linear', 'rope_theta': 10.0}"""),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "text"), REFUSED)
def test_impossible_configs_are_refused(changes, text):
    assert error_text(llama.Config, **changes) == text
