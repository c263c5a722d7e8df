"""T5 equals transformers' in logits, loss, gradients, generation and files, and is the same on every mesh."""

from __future__ import annotations

import functools
import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import fshard as fs
from fshard import P, hf
from fshard.models import t5
from tests.lib import model_cases as cases
from tests.lib.assertions import error_text
from tests.lib.model_cases import EVERYTHING, close, placed, randomize_vectors
from tests.lib.tiers import slow_unless

transformers = pytest.importorskip("transformers")

# 3 heads of 5 dims, 61 tokens and 34 hidden units: uneven over 2 or 3 ranks, as are 9 and 7 positions. The longest
# distance is inside of the sequences, and heads x head width is not the width.
SIZES = {"vocab_size": 61, "d_model": 24, "d_kv": 5, "d_ff": 34, "num_layers": 2, "num_decoder_layers": 1,
         "num_heads": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 6,
         "dropout_rate": 0.0, "decoder_start_token_id": 3, "pad_token_id": 3, "eos_token_id": None}  # fmt: skip
# The classes of transformers, and the changes of their config
VARIANTS = {
    "plain, tied": ("T5", {}),
    "gated, separate head": ("T5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_layers": 1,
                                     "layer_norm_epsilon": 0.1}),
    "gated by silu, deeper decoder": (
        "T5", {"feed_forward_proj": "gated-silu", "num_layers": 1, "num_decoder_layers": 2}),
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


def on_one_device(ref):
    return fs.device_get(fs.materialize(ref.params, P(), fs.make_mesh(data=1), key=fs.key(0)))


PARITY = {
    "plain, tied": [ONE, "data, fully sharded", "model, sequence", "both", EVERYTHING],
    "gated, separate head": [EVERYTHING, "uneven"],
    "gated by silu, deeper decoder": ["model, sequence"],
    "mt5": ["both"],
    "mt5, separate head": [ONE],
    "umt5": [EVERYTHING],
}
FAST = {("plain, tied", ONE), ("gated, separate head", EVERYTHING)}


@pytest.mark.parametrize(
    ("variant", "layout"),
    [pytest.param(variant, layout, marks=[] if (variant, layout) in FAST else [pytest.mark.slow])
     for variant, layouts in PARITY.items() for layout in layouts],
)  # fmt: skip
def test_logits_loss_and_gradients_equal_transformers(variant, layout):
    ref = reference(variant)
    mesh, specs, split, p = placed(t5, ref.cfg, ref.params, layout)

    @fs.shard_map(mesh=mesh, in_specs=(specs, *[P("data")] * 3),
                  out_specs=(P("data"), P("data", None, "model"), P(), specs),
                  check=cases.check_of(layout))  # fmt: skip
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

    @fs.shard_map(mesh=mesh, in_specs=(specs, *[P("data")] * 3), out_specs=P("data"), check=cases.check_of(layout))
    def run(p, ids, mask, decoder_ids):
        return t5.generate(ref.cfg, p, ids, new=new, layout=split, specs=specs, mask=mask, decoder_ids=decoder_ids,
                           **options)  # fmt: skip

    return fs.device_get(run(p, ids, mask, decoder_ids))


GENERATION = [  # variant, layout, whether sources are padded, end, beams, and whether that is slow
    ("gated, separate head", ONE, True, None, 1, True),
    ("gated, separate head", EVERYTHING, True, 33, 1, True),
    ("gated, separate head", "both", True, 33, 3, False),
    ("plain, tied", "both", False, 52, 1, True),
    ("umt5", "model, sequence", True, None, 3, True),
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


def test_a_decoder_prompt_is_continued_and_its_padding_not_attended_to():
    ref, (ids, mask, _) = reference("gated, separate head"), batch()
    prompts = cases.tokens(61, t=4, seed=2)
    own = cases.left_padding(6, 4)
    options = {"attention_mask": mask, "decoder_input_ids": prompts, "decoder_attention_mask": own}
    want = ref.theirs.generate(ids, **options, max_new_tokens=5, do_sample=False)
    p = on_one_device(ref)
    got = t5.generate(ref.cfg, p, ids, new=5, mask=mask, decoder_ids=prompts, decoder_mask=own)
    assert torch.equal(got, want)
    encoder = {name: p[name] for name in ("wte", "encoder")}  # needs no more
    assert torch.equal(t5.encode(ref.cfg, encoder, ids, mask=mask), t5.encode(ref.cfg, p, ids, mask=mask))


@pytest.mark.slow
def test_drawn_tokens_are_the_same_on_every_mesh():
    ref, (ids, mask, _) = reference("gated, separate head"), batch()
    options = {"temperature": 0.8, "top_k": 20, "key": fs.key(5)}
    want = generated(ref, ONE, ids, mask, new=4, **options)
    assert not torch.equal(want, generated(ref, ONE, ids, mask, new=4))
    assert torch.equal(generated(ref, "both", ids, mask, new=4, **options), want)


def test_logits_of_parts_with_a_cache_equal_those_of_one_call():
    ref, (ids, mask, _) = reference("gated, separate head"), batch()
    decoder_ids, own = cases.tokens(61, t=7, seed=2), cases.left_padding(6, 7)

    @fs.shard_map(mesh=fs.make_mesh(data=1), in_specs=(P(), P(), P(), P(), P()), out_specs=P())
    def run(p, ids, mask, decoder_ids, own):
        states, cache, got, stop = t5.encode(ref.cfg, p, ids, mask=mask), t5.Cache(7), [], 0
        for part in decoder_ids.split([3, 1, 2, 1], 1):
            stop += part.shape[1]
            logits, cache = t5.decode(ref.cfg, p, states, part, mask=mask, decoder_mask=own[:, :stop], cache=cache)
            got.append(logits)
        return torch.cat(got, 1), t5.apply(ref.cfg, p, ids, decoder_ids, mask=mask, decoder_mask=own)

    got, want = fs.device_get(run(on_one_device(ref), ids, mask, decoder_ids, own))
    with torch.no_grad():
        theirs = ref.theirs(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids,
                            decoder_attention_mask=own).logits  # fmt: skip
    real = own.bool()
    close([got[real], want[real]], [theirs[real]] * 2, 1e-5, 1e-5)


# --- dropout --------------------------------------------------------------------------------------------------

RATE = 0.3


def keys_of(cfg, key):
    """The key of each dropout in the order in which transformers runs them."""
    for stack, layers, names in (
        ("encoder", cfg.num_layers, ("attn", "attn.proj", "hidden", "down")),
        ("decoder", cfg.decoder_layers, ("attn", "attn.proj", "cross", "cross.proj", "hidden", "down")),
    ):
        own = fs.fold_in(key, stack)
        yield fs.fold_in(own, "embd")
        yield from (fs.fold_in(fs.fold_in(own, i), name) for i in range(layers) for name in names)
        yield fs.fold_in(own, "final")


@functools.cache
def with_dropout(variant):
    """The loss and gradients of a transformers model in training, whose dropouts draw by the keys here."""
    theirs, place = hugging_face(variant, dropout_rate=RATE), tempfile.TemporaryDirectory()
    theirs.set_attn_implementation("eager")  # the other hides its dropout in a kernel
    cfg, params = t5.load(cases.saved(theirs, Path(place.name) / "weights"))
    ids, mask, targets = batch()
    keys = keys_of(cfg, fs.key(3))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", lambda x, p, *_, **__: fs.nn.dropout(x, p, key=next(keys)))
        loss = theirs.train()(input_ids=ids, attention_mask=mask, labels=targets).loss
    assert next(keys, None) is None
    loss.backward()
    return (
        cfg,
        params,
        (ids, mask, targets),
        loss.detach(),
        cases.their_grads(t5, theirs, Path(place.name) / "g"),
        place,
    )


@pytest.mark.parametrize(
    ("variant", "layout"),
    slow_unless([("gated, separate head", EVERYTHING)],
                [("plain, tied", ONE), ("gated, separate head", EVERYTHING), ("umt5", "both")]),
)  # fmt: skip
def test_dropout_is_that_of_transformers_with_masks_that_no_mesh_changes(variant, layout):
    cfg, params, inputs, want_loss, want, _ = with_dropout(variant)
    mesh, specs, split, p = placed(t5, cfg, params, layout)

    @fs.shard_map(mesh=mesh, in_specs=(specs, *[P("data")] * 3), out_specs=(P(), specs), check="never")
    def run(p, ids, mask, targets):
        options = {"layout": split, "specs": specs, "mask": mask, "key": fs.key(3), "remat": layout != ONE}
        return fs.value_and_grad(lambda p: t5.loss(cfg, p, ids, targets, **options))(p)

    loss, grads = fs.device_get(run(p, *inputs))
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=0)
    close(grads, want, 1e-5, 1e-5)


# --- files ----------------------------------------------------------------------------------------------------


def their_logits(model, ids, mask, decoder_ids):
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=mask, decoder_input_ids=decoder_ids).logits


@pytest.mark.parametrize(
    ("variant", "layout"),
    [("plain, tied", EVERYTHING), ("umt5", ONE), pytest.param("mt5, separate head", "uneven", marks=pytest.mark.slow)],
)
def test_transformers_reads_a_saved_folder(variant, layout, tmp_path):
    ref, (ids, mask, targets) = reference(variant), batch()
    *_, p = placed(t5, ref.cfg, ref.params, layout)
    hf.save(tmp_path, ref.cfg, p)
    again = cases.read_by_transformers(type(ref.theirs), tmp_path)
    inputs = ids, mask, t5.shifted(ref.cfg, targets)
    assert torch.equal(their_logits(again, *inputs), their_logits(ref.theirs, *inputs))
    assert hf.load(tmp_path)[0] == t5.config(tmp_path) == ref.cfg


def copied(weights):
    for name in ("lm_head", "encoder.embed_tokens", "decoder.embed_tokens"):
        weights[f"{name}.weight"] = weights["shared.weight"].clone()


def with_a_head(weights):
    weights["lm_head.weight"] = torch.randn(61, 24, generator=torch.Generator().manual_seed(2))


def with_unused_positions(weights):
    weights["decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"] = torch.ones(8, 3)


OLD_FILES = [  # what tools wrote through the years: the type, changes of config.json (None: without it), of the weights
    ("T5", {"scale_decoder_outputs": None}, copied),
    ("T5", {"scale_decoder_outputs": None, "tie_word_embeddings": None, "dense_act_fn": None}, with_unused_positions),
    ("T5", {"scale_decoder_outputs": None, "tie_word_embeddings": False}, with_a_head),
    ("T5", {"scale_decoder_outputs": True, "tie_word_embeddings": False}, with_a_head),
    ("T5", {"scale_decoder_outputs": False}, with_a_head),
    ("MT5", {"tie_word_embeddings": False}, with_a_head),
    ("MT5", {"feed_forward_proj": None}, with_a_head),
    ("UMT5", {"tie_word_embeddings": False}, with_a_head),
]


@pytest.mark.parametrize(("kind", "changes", "change_weights"), OLD_FILES)
def test_folders_of_every_age_have_the_logits_of_transformers(kind, changes, change_weights, tmp_path):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, "num_layers": 1, "initializer_factor": 0.6})
    cls = getattr(transformers, f"{kind}ForConditionalGeneration")
    cls(config).save_pretrained(tmp_path)
    weights, contents = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    change_weights(weights)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    contents = {name: x for name, x in (contents | changes).items() if x is not None or name not in changes}
    (tmp_path / "config.json").write_text(json.dumps(contents))

    theirs, (ids, mask, _), decoder_ids = cls.from_pretrained(tmp_path).eval(), batch(), cases.tokens(61, t=5, seed=2)
    cfg, stored = hf.load(tmp_path)
    p = fs.device_get(fs.materialize(stored, P(), fs.make_mesh(data=1), key=fs.key(0)))
    got, want = t5.apply(cfg, p, ids, decoder_ids, mask=mask), their_logits(theirs, ids, mask, decoder_ids)
    close([got], [want], 1e-5, 1e-5)
    assert cfg.tie_word_embeddings == (theirs.lm_head.weight is theirs.shared.weight)


def test_a_head_that_is_tied_only_in_its_first_rows_is_refused(tmp_path):
    torch.manual_seed(0)
    cases.saved(transformers.T5ForConditionalGeneration(transformers.T5Config(**{**SIZES, "vocab_size": 80})), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["shared.weight"].clone()
    weights["lm_head.weight"][79] += 1
    save_file(weights, tmp_path / "model.safetensors")
    _, stored = t5.load(tmp_path)
    text = error_text(fs.materialize, stored, P(), fs.make_mesh(data=1), key=fs.key(0))
    assert "'lm_head.weight' is not equal to 'shared.weight'" in text
    assert "fix: untie them (tie_word_embeddings: false in config.json)" in text


def test_what_is_no_t5_is_refused(tmp_path):
    config = {"model_type": "t5", "is_encoder_decoder": False, "feed_forward_proj": "gated-gelu",
              "dense_act_fn": "relu"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = error_text(t5.config, tmp_path)
    assert "is_encoder_decoder: False, not True" in text
    assert "dense_act_fn: 'relu', not 'gelu_new'" in text
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bart"}))
    assert "model_type: 'bart', not 't5'" in error_text(t5.config, tmp_path)
    text = error_text(t5.Config, "bart", relative_attention_num_buckets=2, feed_forward_proj="gated-prelu")
    assert text.startswith("3 problems\n"), text
    text = error_text(t5.Config, relative_attention_max_distance=16)
    assert "max_distance=16\n  32 buckets hold the distances up to 16 exactly\n  fix: 17 or more" in text


# --- relative positions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "longest"), [(32, 128), (8, 6), (4, 3), (33, 1000), (5, 20), (64, 33)])
def test_buckets_of_distances_are_those_of_transformers(n, longest):
    from transformers.models.t5.modeling_t5 import T5Attention

    cfg = t5.Config(relative_attention_num_buckets=n, relative_attention_max_distance=longest)
    distances = torch.arange(-3000, 3000).view(2, -1)
    for both in (True, False):
        want = T5Attention._relative_position_bucket(distances, both, n, longest)
        assert torch.equal(t5._buckets(distances, cfg, bidirectional=both), want)
        assert 0 <= want.min() <= want.max() < n


# --- batches and dtypes ------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_without_heads_or_examples_and_with_no_time_change_nothing():
    """Over data=3 and model=3: 2 examples, 2 heads, 4 source tokens of which a rank has 2 or none, and 2 of target."""
    cfg = t5.Config(**{**SIZES, "num_layers": 1, "num_heads": 2, "dropout_rate": RATE})
    p = fs.tree.map(lambda d: fs.init.normal(d.shape, std=0.2), t5.init(cfg))
    inputs, options = (cases.tokens(61, 2, 4), cases.tokens(61, 2, 2)), {"key": fs.key(1), "remat": True}
    want = cases.loss_and_grads(t5, cfg, p, ONE, *inputs, **options)
    close(cases.loss_and_grads(t5, cfg, p, "uneven", *inputs, **options), want, 1e-5, 1e-5)


def test_rows_of_padding_alone_are_finite_and_do_not_change_others():
    ref = reference("plain, tied")
    p, (ids, mask, targets) = on_one_device(ref), batch()
    mask[1], targets[1] = 0, -100
    own = (targets != -100).long()
    own[:, 0] = 1
    own[1] = 0
    loss, grads = fs.value_and_grad(lambda p: t5.loss(ref.cfg, p, ids, targets, mask=mask, decoder_mask=own))(p)
    others = [i for i in range(6) if i != 1]
    want_loss, want = fs.value_and_grad(lambda p: t5.loss(ref.cfg, p, ids[others], targets[others], mask=mask[others],
                                                          decoder_mask=own[others]))(p)  # fmt: skip
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)
    close(grads, want, 1e-5, 1e-5)


def test_infinities_of_half_precision_are_its_largest_numbers():
    ref = reference("plain, tied")
    p = fs.tree.map(lambda x: x.half(), on_one_device(ref))
    for name, factor in (("up", 100), ("down", 1e4)):  # sums of 34 products of up to 60 and 1000 or so
        p["encoder"]["h"][0]["mlp"][name]["w"] *= factor
    ids, mask, targets = batch()
    with torch.no_grad():
        assert t5.apply(ref.cfg, p, ids, t5.shifted(ref.cfg, targets), mask=mask).isfinite().all()


@pytest.mark.slow
def test_parameters_are_gathered_and_computed_with_in_bfloat16():
    ref = reference("gated, separate head")
    mesh, specs, _, p = placed(t5, ref.cfg, ref.params, EVERYTHING)
    layout = t5.Layout("data", "model", sequence=True, dtype=torch.bfloat16, reduce_dtype=torch.float32)

    @fs.shard_map(mesh=mesh, in_specs=(specs, *[P("data")] * 3), out_specs=(P("data", None, "model"), P(), specs))
    def run(p, ids, mask, targets):
        options = {"layout": layout, "specs": specs, "mask": mask}
        loss, grads = fs.value_and_grad(lambda p: t5.loss(ref.cfg, p, ids, targets, **options))(p)
        return t5.apply(ref.cfg, p, ids, t5.shifted(ref.cfg, targets), **options), loss, grads

    logits, loss, grads = fs.device_get(run(p, *ref.batch))
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    assert {g.dtype for g in fs.tree.leaves(grads)} == {torch.float32}
    torch.testing.assert_close(loss, ref.loss, rtol=0.02, atol=0)  # a rounding is up to 0.4% of an activation


@pytest.mark.parametrize(("sequence", "backward"), [(False, False), (True, True)])
def test_a_decoder_block_sends_the_stream_of_targets_but_not_the_source(sequence, backward):
    def transfers(layers):
        """The transfers of one rank of model=2: (op, bytes of its argument) -> count."""
        cfg = t5.Config("t5", 61, 24, 5, 34, 1, layers, 3)
        specs, layout, (ids, _, targets) = t5.specs(cfg, model="model"), t5.Layout(None, "model", sequence), batch()
        mesh = fs.make_mesh(model=2)
        p = fs.materialize(t5.init(cfg), specs, mesh, key=fs.key(0))

        def loss(p, ids, targets):
            return t5.loss(cfg, p, ids[:, :8], targets[:, :6], layout=layout)

        f = fs.value_and_grad(loss) if backward else loss
        run = fs.shard_map(f, mesh=mesh, in_specs=(specs, P(), P()), out_specs=(P(), specs) if backward else P(),
                           check="never")  # fmt: skip
        with fs.recording() as log:
            run(p, ids, targets)
        return Counter({sent: n // 2 for sent, n in Counter((t.op, t.bytes) for t in log).items()})

    stream, norms = 4 * 6 * 6 * 24, {("all_reduce", 4 * 24): 3} if sequence and backward else {}
    passes = 2 if backward else 1
    want = {("all_gather", stream // 2): 3 * passes, ("reduce_scatter", stream): 3 * passes, **norms}
    assert dict(transfers(2) - transfers(1)) == (want if sequence else {("all_reduce", stream): 3 * passes})


def test_what_cannot_be_is_refused():
    ref = reference("plain, tied")
    p, (ids, mask, targets), cfg = on_one_device(ref), batch(), ref.cfg
    assert error_text(t5.apply, cfg, p, ids, targets, mask=mask[:, 1:]) == (
        "t5: the mask must have one entry for each token of the source\n  mask  [6, 8]    needed  [6, 9]"
    )
    assert "source  6    decoder_ids  5" in error_text(t5.apply, cfg, p, ids, targets[1:])
    assert "needed  [6, 7]" in error_text(t5.apply, cfg, p, ids, targets, decoder_mask=mask)
    assert "ids must be int64 or int32 [B, T]" in error_text(t5.apply, cfg, p, ids.float(), targets)
    assert "targets must be int64 or int32 [B, T]" in error_text(t5.loss, cfg, p, ids, targets.float())
    assert "fix: Config(pad_token_id=0)" in error_text(t5.loss, replace(cfg, pad_token_id=None), p, ids, targets)
    without_start = replace(cfg, decoder_start_token_id=None)
    for call in (lambda: t5.loss(without_start, p, ids, targets), lambda: t5.generate(without_start, p, ids, new=1)):
        assert "decoder_start_token_id is None" in error_text(call)
    assert "the source has no tokens" in error_text(t5.generate, cfg, p, ids[:, :0], new=1)
    assert "there is no option beam" in error_text(t5.generate, cfg, p, ids, new=1, beam=3)
    text = error_text(t5.apply, replace(cfg, tie_word_embeddings=False), p, ids, targets)
    assert "params['head']['w']: is missing" in text
    text = error_text(t5.apply, cfg, {**p, "encoder": {"h": p["encoder"]["h"], "norm_f": {}}}, ids, targets)
    assert "params['encoder']['bias']: is missing" in text
    assert "params['encoder']['norm_f']['w']: is missing" in text
    text = error_text(t5.loss, cfg, {**p, "decoder": {**p["decoder"], "h": p["decoder"]["h"][:-1]}}, ids, targets)
    assert f"params['decoder']['h'][{len(p['decoder']['h']) - 1}]" in text
    assert "has no leaf at the path ('encoder', 'h', 0, 'cross', 'q', 'w')" in (
        error_text(t5.theirs, ("encoder", "h", 0, "cross", "q", "w")))  # fmt: skip
