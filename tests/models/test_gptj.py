"""Properties of GPT-J alone: attention scores of half precision, and the rotary dims that it refuses."""

from __future__ import annotations

import torch

import fshard as fs
from fshard import P
from fshard.models import gptj, transformer
from tests.lib import model_cases as cases
from tests.lib.assertions import error_text
from tests.lib.model_cases import DECODERS


def test_attention_scores_of_half_precision_are_float32_with_dropout(monkeypatch):
    """In bfloat16, scores in the tens are wrong by tenths. Without dropout, torch's kernel keeps them in float32."""
    dtypes, cfg = [], DECODERS["gptj"].config(embd_pdrop=0.2, attn_pdrop=0.3, resid_pdrop=0.1)

    def recorded(run, q, k, v, *args, **kwargs):
        dtypes.append((q.dtype, k.dtype, v.dtype))
        return original(run, q, k, v, *args, **kwargs)

    original = transformer.Run.attention
    monkeypatch.setattr(transformer.Run, "attention", recorded)
    described = fs.tree.map(lambda d: d.to(torch.bfloat16), gptj.init(cfg))
    for key, scores in ((fs.key(0), torch.float32), (None, torch.bfloat16)):
        mesh = fs.make_mesh(data=1)
        params = fs.materialize(described, P(), mesh, key=fs.key(0))
        logits = fs.shard_map(lambda p, ids, key=key: gptj.apply(cfg, p, ids, key=key), mesh=mesh,
                              out_specs=P())(params, cases.tokens(61))  # fmt: skip
        assert dtypes.pop() == (scores, scores, torch.bfloat16)
        assert logits.dtype == torch.bfloat16
    q, k, v = (x.bfloat16() for x in torch.randn(3, 1, 2, 16, 32, generator=torch.Generator().manual_seed(0)) * 5)
    want = torch.softmax(q.float() @ k.float().mT / 32**0.5, -1).bfloat16() @ v
    torch.testing.assert_close(fs.nn.attention(q, k, v), want, rtol=0, atol=0.1)
    low = torch.softmax(q @ k.mT / 32**0.5, -1) @ v
    assert (low - want).abs().max() > 0.3


def test_odd_or_large_rotary_dims_are_refused():
    for rotary in (0, 3, 10):
        assert error_text(DECODERS["gptj"].config, rotary_dim=rotary) == (
            f"gptj.Config: rotary_dim={rotary}\n  fix: an even number of at most 8, the width of a head"
        )
    assert error_text(DECODERS["gptj"].config, rotary_dim=None) == "Config: rotary_dim must be an int, got None"
