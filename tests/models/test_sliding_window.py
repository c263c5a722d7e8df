"""Sliding windows of Mistral, Qwen 2 and Qwen 3: the cache, its size, layers with and without, and what is refused."""

from __future__ import annotations

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.models import llama, mistral, qwen2, qwen3
from fshard.models.kv_cache import Cache
from tests.lib import model_cases as cases
from tests.lib.assertions import error_text
from tests.lib.model_cases import DECODERS


def drawn(module, cfg):
    described = fs.tree.map(lambda d: fs.init.normal(d.shape, std=0.2), module.init(cfg))
    return fs.device_get(fs.materialize(described, P(), fs.make_mesh(data=1), key=fs.key(0)))


@pytest.mark.parametrize("window", [1, 2, 4, 9, 100])
@pytest.mark.parametrize("padded", [False, True])
def test_logits_with_a_cache_equal_those_of_one_call(window, padded):
    """Over parts of several tokens, shorter and longer than the window; a cache has the window - 1 last tokens."""
    cfg = DECODERS["mistral"].config(sliding_window=window)
    p, ids = drawn(mistral, cfg), cases.tokens(37)
    mask = cases.left_padding(*ids.shape) if padded else None
    cache, got = Cache(9), []
    for part in ids.split([2, 1, 5, 1], 1):
        seen = None if mask is None else mask[:, : cache.length + part.shape[1]]
        logits, cache = mistral.apply(cfg, p, part, mask=seen, cache=cache)
        got.append(logits)
        for block in cache.blocks:
            assert block.k.shape == block.v.shape == (6, 3, min(cache.length, window - 1), 4)
            assert block.k.untyped_storage().nbytes() == 4 * block.k.numel()
    want = mistral.apply(cfg, p, ids, mask=mask)
    real = slice(None) if mask is None else mask.bool()
    torch.testing.assert_close(torch.cat(got, 1)[real], want[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_token_is_seen_by_as_many_as_the_window(window):
    cfg = DECODERS["mistral"].config(sliding_window=window, num_hidden_layers=1)
    p, ids = drawn(mistral, cfg), cases.tokens(37, b=1)
    a, b = (mistral.apply(cfg, p, x)[0] for x in (ids, torch.cat([(ids[:, :1] + 1) % 37, ids[:, 1:]], 1)))
    assert (a != b).any(1).tolist() == [i < window for i in range(9)]


def test_only_layers_with_a_window_have_a_short_cache():
    cfg = DECODERS["qwen2"].config()  # a window of 3 from layer 1 on
    _, cache = qwen2.apply(cfg, drawn(qwen2, cfg), cases.tokens(37), cache=Cache(20))
    assert [block.k.shape[2] for block in cache.blocks] == [20, 2]


@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({}, [None, None]),
        ({"use_sliding_window": True, "max_window_layers": 0}, [4096, 4096]),
        ({"use_sliding_window": True, "max_window_layers": 1, "sliding_window": None}, [None, None]),
        ({"use_sliding_window": True, "sliding_window": 5, "layer_types": ("sliding_attention", "full_attention")},
         [5, None]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_windows_of_layers_are_those_of_transformers(name, options, windows):
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, f"{DECODERS[name].hf}Config")
    types = {"layer_types": list(options["layer_types"])} if "layer_types" in options else {}
    theirs = kind(num_hidden_layers=2, **{**options, **types})
    assert windows == [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    assert getattr(fs.models, name).Config(num_hidden_layers=2, **options).windows == windows


def test_dropout_in_a_window_does_not_depend_on_the_mesh():
    """The masks of weights [T, T] are drawn by global index although groups of heads are split."""
    cfg = DECODERS["qwen3"].config(attention_dropout=0.4, use_sliding_window=True, sliding_window=3,
                                   max_window_layers=0, num_hidden_layers=1)  # fmt: skip
    cases.check_the_mesh_never_changes_the_answer(qwen3, cfg, "model")


def test_unsupported_options_are_named():
    qwen = qwen2.Config
    text = error_text(qwen, num_hidden_layers=3, layer_types=("chunked_attention", "sliding_attention"))
    assert text.startswith("3 problems\n")
    assert "qwen2.Config: layer_types has 'chunked_attention'\n  fix: full_attention or sliding_attention" in text
    assert "qwen2.Config: layer_types has 2 entries for 3 layers\n  fix: one for each" in text
    assert "use_sliding_window  False    sliding_window  4096\n  fix: use_sliding_window=True" in text
    assert "mistral.Config: sliding_window=0" in error_text(mistral.Config, sliding_window=0)
    assert "the heads must divide the width\n  10 % 4 = 2" in error_text(
        mistral.Config, hidden_size=10, num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    text = error_text(mistral.loss, llama.Config(), {}, cases.tokens(3), cases.tokens(3))
    assert text.startswith("loss: cfg must be a mistral.Config, got ")
    assert text.endswith("fix: call fshard.models.llama.loss")
