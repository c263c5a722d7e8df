"""Properties of GPT-NeoX alone: defaults of rotary positions, and those that it refuses."""

from __future__ import annotations

import pytest

from fshard import ShardingError
from fshard.models import gpt_neox
from tests.lib.model_cases import DECODERS

transformers = pytest.importorskip("transformers")


def test_defaults_of_rope_parameters_are_those_of_transformers():
    assert gpt_neox.Config().rope_parameters == transformers.GPTNeoXConfig().rope_parameters
    linear = {"rope_type": "linear", "factor": 2.0}
    assert gpt_neox.Config(rope_parameters=linear).rope_parameters == {
        **transformers.GPTNeoXConfig().rope_parameters, **linear,
    }  # fmt: skip


def test_rotary_parameters_without_a_meaning_are_refused():
    with pytest.raises(ShardingError, match="cannot rotate 3 dims of a head in pairs"):
        DECODERS["gpt_neox"].config(rope_parameters={"partial_rotary_factor": 0.4})
    with pytest.raises(ShardingError, match="unknown rope_type 'spiral'"):
        DECODERS["gpt_neox"].config(rope_parameters={"rope_type": "spiral"})
