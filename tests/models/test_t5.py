"""T5 equals transformers' in logits, loss, gradients, generation and files, and is the same on every mesh."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.models import t5
from tests.lib import model_cases as cases
from tests.lib.model_cases import EVERYTHING, LAYOUTS, close, placed, randomize_vectors

transformers = pytest.importorskip("transformers")

# 3 heads of 5 dims, 61 tokens and 34 hidden units: uneven over 2 or 3 ranks, as are 9 and 7 positions. The longest
# distance is inside of the sequences, and heads x head width is not the width.
SIZES = {"vocab_size": 61, "d_model": 24, "d_kv": 5, "d_ff": 34, "num_layers": 2, "num_decoder_layers": 1,
         "num_heads": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6,
         "dropout_rate": 0.0, "decoder_start_token_id": 3, "pad_token_id": 3, "eos_token_id": None}  # fmt: skip
# The classes of transformers, and the changes of their config
VARIANTS = {
    "plain, tied": ("T5", {}),
    "gated, separate head": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "gated by silu, deep decoder": ("T5", {"feed_forward_proj": "gated-silu", "num_layers": 1, "num_decoder_layers": 2,
                                           "layer_norm_epsilon": 0.1}),
    "mt5": ("MT5", {"num_layers": 1}),
    "mt5, separate head": ("MT5", {"num_layers": 1, "feed_forward_proj": "relu"}),
    "umt5": ("UMT5", {"num_decoder_layers": 2}),
}  # fmt: skip
ONE = "one device"


def hugging_face(variant, **changes):
    """A transformers model in which every leaf matters, with a head of its own if the variant says so."""
    kind, own = VARIANTS[variant]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "initializer_factor": 0.6, **own, **changes})
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    with torch.no_grad():  # the residual stream is not mostly the token itself, which a tied head would repeat
        model.shared.weight.mul_(0.1)
    if "separate head" in variant:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(model.lm_head.weight.shape) * 0.3)
        del model.all_tied_weights_keys["lm_head.weight"]
    return randomize_vectors(model)


def batch(size=61, b=6, s=9, t=7):
    """ids, mask, targets: padded sources, on their right or left, and targets of unequal lengths, some of one token."""
    ids, targets = cases.tokens(size, b, s), cases.tokens(size, b, t, seed=1)
    mask = (torch.arange(s) < s - torch.arange(b)[:, None]).long()
    mask[2] = mask[2].flip(0)
    targets[torch.arange(t) > t - torch.arange(b)[:, None]] = -100
    return ids, mask, targets


@functools.cache  # one folder and one backward pass for all layouts
def reference(variant):
    theirs, place = hugging_face(variant), tempfile.TemporaryDirectory()
    cfg, params = t5.load(cases.saved(theirs, Path(place.name) / "weights"))
    ids, mask, targets = batch()
    out = theirs(input_ids=ids, attention_mask=mask, labels=targets)
    out.loss.backward()
    grads = cases.their_grads(t5, theirs, Path(place.name) / "gradients")
    return SimpleNamespace(theirs=theirs, cfg=cfg, params=params, grads=grads, batch=(ids, mask, targets), place=place,
                           logits=out.logits.detach(), loss=out.loss.detach(),
                           states=out.encoder_last_hidden_state.detach())  # fmt: skip


PARITY = {
    "plain, tied": LAYOUTS,
    "gated, separate head": [EVERYTHING, "uneven"],
    "gated by silu, deep decoder": ["model, sequence"],
    "mt5": ["both"],
    "mt5, separate head": [ONE],
    "umt5": [EVERYTHING],
}
FAST = {("plain, tied", ONE), ("plain, tied", EVERYTHING), ("gated, separate head", EVERYTHING),
        ("mt5, separate head", ONE)}  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "layout"),
    [pytest.param(variant, layout, marks=[] if (variant, layout) in FAST else [pytest.mark.slow])
     for variant, layouts in PARITY.items() for layout in layouts],
)  # fmt: skip
def test_logits_loss_and_gradients_equal_transformers(variant, layout):
    ref = reference(variant)
    mesh, specs, split, p = placed(t5, ref.cfg, ref.params, layout)

    @fs.shard_map(mesh=mesh, in_specs=(specs, *[P("data")] * 3),
                  out_specs=(P("data"), P("data", None, "model"), P(), specs))  # fmt: skip
    def run(p, ids, mask, targets):
        options = {"layout": split, "specs": specs, "mask": mask}
        loss, grads = fs.value_and_grad(lambda p: t5.loss(ref.cfg, p, ids, targets, **options))(p)
        states = t5.encode(ref.cfg, p, ids, **options)
        return states, t5.apply(ref.cfg, p, ids, t5.shifted(ref.cfg, targets), **options), loss, grads

    states, logits, loss, grads = fs.device_get(run(p, *ref.batch))
    close({"states": states, "logits": logits}, {"states": ref.states, "logits": ref.logits}, 1e-5, 1e-5)
    torch.testing.assert_close(loss, ref.loss, rtol=1e-5, atol=0)
    close(grads, ref.grads, 1e-5, 1e-5)


# --- generation -----------------------------------------------------------------------------------------------


def generated(ref, layout, ids, mask=None, *, new=6, decoder_ids=None, **options):
    mesh, specs, split, p = placed(t5, ref.cfg, ref.params, layout)

    @fs.shard_map(mesh=mesh, in_specs=(specs, *[P("data")] * 3), out_specs=P("data"))
    def run(p, ids, mask, decoder_ids):
        return t5.generate(ref.cfg, p, ids, new=new, layout=split, specs=specs, mask=mask, decoder_ids=decoder_ids,
                           **options)  # fmt: skip

    return fs.device_get(run(p, ids, mask, decoder_ids))


GENERATION = [  # variant, layout, whether sources are padded, end, beams, and whether that is slow
    ("gated, separate head", ONE, True, None, 1, False),
    ("gated, separate head", EVERYTHING, True, 32, 1, False),
    ("gated, separate head", "both", True, 32, 3, False),
    ("plain, tied", "both", False, 52, 1, True),
    ("umt5", "uneven", True, None, 3, True),
]


@pytest.mark.parametrize(
    ("variant", "layout", "padded", "eos", "beams"),
    [pytest.param(*row, marks=[pytest.mark.slow] * slow) for *row, slow in GENERATION],
)
def test_generated_tokens_equal_transformers(variant, layout, padded, eos, beams):
    ref, (ids, mask, _) = reference(variant), batch()
    mask = mask if padded else torch.ones_like(mask)
    want = ref.theirs.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False, num_beams=beams,
                               eos_token_id=eos)  # fmt: skip
    if eos is not None:
        assert 0 < (want == eos).any(1).sum() < len(ids), want  # some rows end, others do not
    assert len({tuple(row) for row in want.tolist()}) > 2  # the sources matter
    got = generated(ref, layout, ids, mask if padded else None, eos=eos, beams=beams)
    assert got.shape == (6, 7)
    assert torch.equal(got[:, : want.shape[1]], want), f"{got}\n{want}"
    assert (got[:, want.shape[1] :] == 3).all()
