"""The decoders equal transformers' in logits, gradients, generation and files, and are the same on every mesh.

One table for each property: (model, variant of its config) -> layouts. The default tier runs the layout in which
everything is split, or one device; other layouts are slow if one of these is in the same row. All models are built of
the same blocks: gpt2 has every layout, the others those in which their own parts could be split wrongly.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import fshard as fs
from fshard import P
from tests.lib import model_cases as cases
from tests.lib.assertions import error_text
from tests.lib.model_cases import DECODERS, EVERYTHING, LAYOUTS, LLAMA_ROPES, reference

ONE = "one device"
FAST = (EVERYTHING, ONE)
OTHER_BRANCHES = {  # variants of code that the first variant of the model does not run
    ("gpt2", "one head, other widths"), ("gpt2", "untied"), ("gpt_neox", "sequential residual, gelu_new"),
    ("llama", "one group"), ("llama", "rope yarn"), ("llama", "rope longrope"), ("mixtral", "router losses, window"),
}  # fmt: skip


SIBLINGS = ("mistral", "qwen2", "qwen3_moe")  # made of the blocks of llama, qwen3 and mixtral; window: mixtral


def rows(table, slow=()):
    """(model, variant, layout): the default tier runs the first variant of a model, in the first layout of FAST."""
    first = {model: variant for model, variant in reversed(table) if model not in slow}
    return [
        pytest.param(model, variant, layout, id=f"{model} {variant}, {layout}",
                     marks=[pytest.mark.slow] * (layout != fastest(layouts) or (
                         variant != first.get(model) and (model, variant) not in OTHER_BRANCHES)))
        for (model, variant), layouts in table.items() for layout in layouts
    ]  # fmt: skip


def fastest(layouts):
    return next(layout for layout in (*FAST, *layouts) if layout in layouts)


# --- as in transformers ---------------------------------------------------------------------------------------

PARITY = {
    ("gpt2", "base"): LAYOUTS,
    ("gpt2", "one head, other widths"): ["model"],  # one rank has no heads
    ("gpt2", "large vocabulary"): ["model"],
    ("gpt2", "untied"): [EVERYTHING],
    ("gptj", "base"): [ONE, EVERYTHING, "uneven"],
    ("gptj", "tied, shallow"): [EVERYTHING],
    ("gptj", "large epsilon, gelu"): [ONE],
    ("gpt_neox", "base"): [ONE, EVERYTHING, "uneven"],
    **{("gpt_neox", name): ["model, sequence"] for name in DECODERS["gpt_neox"].variants
       if name != "base" and not name.startswith("rope ")},
    ("llama", "base"): [ONE, EVERYTHING, "uneven"],
    ("llama", "one group"): ["both"],
    ("llama", "no groups, tied"): [ONE, "data, fully sharded"],
    ("llama", "biased"): [ONE, "both"],
    ("llama", "wide heads, tied"): [ONE, "model, sequence"],
    ("llama", "rope yarn"): ["model, sequence"],  # the angles of each kind: tests/nn/test_rope.py
    ("mistral", "base"): [EVERYTHING],
    ("mistral", "wide heads, tied, no window"): [ONE],
    ("mistral", "window of two tokens"): [ONE],
    ("mistral", "window of all tokens"): [ONE],
    ("qwen2", "layer types, tied"): [EVERYTHING],
    ("qwen2", "no window"): [ONE],
    ("qwen3", "biased, window"): [EVERYTHING],  # one rank has no heads
    ("qwen3", "tied"): [ONE],
    ("mixtral", "base"): [EVERYTHING],
    ("mixtral", "router losses, window"): [ONE, "uneven"],
    ("mixtral", "all experts, tied"): ["model, sequence"],
    ("mixtral", "one of many experts"): [ONE],
    ("qwen3_moe", "base"): [EVERYTHING],
    ("qwen3_moe", "router losses, window, biased"): [ONE],
    ("dots1", "base"): [EVERYTHING, "uneven"],
    ("dots1", "one group, window"): [ONE],
}  # fmt: skip


@pytest.mark.parametrize(("model", "variant", "layout"), rows(PARITY, SIBLINGS))
def test_logits_loss_and_gradients_equal_transformers(model, variant, layout):
    cases.check_logits_loss_and_gradients(reference(model, variant), layout)


PADDED = {
    ("gpt2", "base"): [ONE],
    ("gptj", "base"): ["both"],
    ("gpt_neox", "rope dynamic"): ["both"],
    ("llama", "biased"): ["model, sequence"],
    ("llama", "no groups, tied"): [EVERYTHING],
    ("llama", "rope dynamic"): ["both"],  # padding does not count as length
    ("llama", "rope longrope"): ["both"],
    ("mistral", "base"): ["model, sequence"],
    ("qwen2", "base"): [EVERYTHING],
    ("mixtral", "router losses, window"): ["model, sequence"],
}


@pytest.mark.parametrize(("model", "variant", "layout"), rows(PADDED))
def test_logits_of_padded_prompts_equal_transformers(model, variant, layout):
    cases.check_padded_logits(reference(model, variant), layout)


GENERATION = [  # (model, variant, layout, options), and whether that is slow
    (("gpt2", "base", ONE, {}), True),
    (("gpt2", "base", "model", {"padded": True}), True),
    (("gpt2", "base", EVERYTHING, {"eos": 51, "padded": True}), True),
    (("gpt2", "base", "uneven", {"new": 3}), True),
    (("gptj", "base", ONE, {"padded": True}), False),
    (("gptj", "base", "both", {"eos": "second", "new": 5}), True),
    (("gpt_neox", "base", ONE, {"padded": True}), False),
    (("gpt_neox", "sequential residual, gelu_new", "model, sequence", {"padded": True, "new": 4}), False),
    (("gpt_neox", "rope dynamic", "data", {"padded": True}), False),  # past the length at which positions are scaled
    (("llama", "base", ONE, {"padded": True, "eos": 25}), False),
    (("llama", "base", EVERYTHING, {"padded": True, "eos": 25}), True),
    (("llama", "one group", "model", {}), False),
    (("llama", "no groups, tied", "data", {"padded": True}), True),
    (("mistral", "base", ONE, {}), False),  # the window moves past the prompt meanwhile
    (("mistral", "base", EVERYTHING, {"padded": True, "eos": 25}), True),
    (("mistral", "window of two tokens", "model", {}), True),
    (("mixtral", "base", ONE, {"padded": True}), False),
    (("qwen2", "layer types, tied", ONE, {}), True),
    (("qwen3", "biased, window", "model", {"padded": True}), False),
    *((("llama", f"rope {name}", layout, {"new": 5, "padded": padded}), padded)  # the angles change meanwhile
      for name, layout, padded in (("dynamic", ONE, False), ("longrope", ONE, False), ("longrope", "both", True))),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "variant", "layout", "options"),
    [pytest.param(*row, id=", ".join(map(str, row)), marks=[pytest.mark.slow] * slow) for row, slow in GENERATION],
)
def test_greedy_generation_equals_transformers(model, variant, layout, options):
    cases.check_generation(reference(model, variant), layout, **options)


FILES = {
    ("gpt2", "base"): [ONE, EVERYTHING, "uneven"],
    ("gptj", "base"): [ONE, EVERYTHING],
    ("gptj", "tied"): ["uneven"],
    ("gpt_neox", "base"): [ONE],
    ("gpt_neox", "sequential residual, no attention bias, gelu_fast, large epsilon, small theta"): [EVERYTHING],
    ("gpt_neox", "tied, no attention bias, all dims rotated, large epsilon"): ["uneven"],
    ("llama", "base"): ["uneven"],
    ("llama", "no groups, tied"): ["both"],
    ("llama", "biased"): [EVERYTHING],
    **{("llama", f"rope {name}"): [ONE] for name in LLAMA_ROPES},
    ("mistral", "base"): ["both"],
    ("mistral", "wide heads, tied, no window"): [ONE],
    ("qwen2", "base"): [EVERYTHING],
    ("qwen2", "layer types, tied"): [ONE],
    ("qwen3", "base"): ["uneven"],
    ("qwen3", "biased, window"): [ONE],
    ("mixtral", "base"): [EVERYTHING],
    ("mixtral", "all experts, tied"): [ONE],
}


@pytest.mark.parametrize(("model", "variant", "layout"), rows(FILES))
def test_transformers_reads_a_saved_folder(model, variant, layout, tmp_path):
    cases.check_files(reference(model, variant), layout, tmp_path)


# --- on every mesh --------------------------------------------------------------------------------------------

RATES = {
    "gpt2": {"embd_pdrop": 0.2, "attn_pdrop": 0.3, "resid_pdrop": 0.1},
    "gptj": {"embd_pdrop": 0.2, "attn_pdrop": 0.3, "resid_pdrop": 0.1},
    "gpt_neox": {"hidden_dropout": 0.2, "attention_dropout": 0.3},
    "llama": {"attention_dropout": 0.3},
}
SERIAL = {**RATES["gpt_neox"], "use_parallel_residual": False}
SAME = [  # (model, changes of its config, layout, remat), and whether that is slow
    (("gpt2", RATES["gpt2"], EVERYTHING, True), True),
    (("gpt2", RATES["gpt2"], "uneven", False), True),
    *((("gpt2", {}, layout, False), True) for layout in cases.MORE_LAYOUTS),
    (("gptj", RATES["gptj"], EVERYTHING, True), True),
    (("gptj", {"n_layer": 1}, "model=5, sequence", False), True),  # more ranks than heads
    (("gpt_neox", RATES["gpt_neox"], EVERYTHING, True), True),
    (("gpt_neox", SERIAL, "both", False), True),
    (("gpt_neox", {"num_hidden_layers": 1}, "model=5, sequence", False), True),
    (("llama", RATES["llama"], EVERYTHING, True), True),  # 3 groups of 2 heads over 2 ranks: 4 heads and 2
    (
        ("mixtral", {"attention_dropout": 0.3, "router_z_loss_coef": 0.1, "num_hidden_layers": 1}, EVERYTHING, True),
        False,
    ),
    (("mixtral", {"num_hidden_layers": 1}, "model=5, sequence", False), True),
]


@pytest.mark.parametrize(
    ("model", "changes", "layout", "remat"),
    [pytest.param(*row, id=", ".join(map(str, row)), marks=[pytest.mark.slow] * slow) for row, slow in SAME],
)
def test_the_mesh_never_changes_the_answer(model, changes, layout, remat):
    cfg = DECODERS[model].config(**changes)
    steps = (
        3 if model != "mixtral" and layout in (ONE, EVERYTHING) else 1
    )  # the losses of a router are not means of rows
    cases.check_the_mesh_never_changes_the_answer(DECODERS[model].module, cfg, layout, remat=remat, steps=steps)


# --- dropout --------------------------------------------------------------------------------------------------

DROPOUTS = [  # model, rate, layers: without a block, only embeddings can have dropout
    *(("gpt2", rate, 1) for rate in ("embd_pdrop", "attn_pdrop", "resid_pdrop")),
    ("gptj", "embd_pdrop", 0), ("gptj", "attn_pdrop", 1), ("gptj", "resid_pdrop", 1),
    ("gpt_neox", "hidden_dropout", 0), ("gpt_neox", "attention_dropout", 1), ("llama", "attention_dropout", 1),
]  # fmt: skip


@pytest.mark.parametrize(("model", "rate", "layers"), DROPOUTS)
def test_each_dropout_rate_changes_the_loss(model, rate, layers):
    decoder = DECODERS[model]
    cfg = decoder.config(**{decoder.layers: layers, rate: 0.5})
    ids = cases.tokens(cfg.vocab_size)
    p = fs.tree.map(lambda d: fs.init.normal(d.shape, std=0.5), decoder.module.init(cfg))
    with_key, without = (cases.loss_and_grads(decoder.module, cfg, p, ONE, ids, ids, key=key)[0]
                         for key in (fs.key(0), None))  # fmt: skip
    assert abs(float(with_key - without)) > 1e-3


@pytest.mark.parametrize(
    ("model", "part", "changes"),
    [
        ("gptj", "down", {"resid_pdrop": 0.5, "n_layer": 1}),
        *(("gpt_neox", part, {"hidden_dropout": 0.5, "num_hidden_layers": 1, "use_parallel_residual": parallel})
          for part in ("proj", "down") for parallel in (True, False)),
    ],
)  # fmt: skip
def test_dropout_masks_biases_too(model, part, changes):
    """If all but a bias is 0, the stream is that bias under its mask, as in transformers; a norm of a constant is 0."""
    module, cfg = DECODERS[model].module, DECODERS[model].config(**changes, vocab_size=24)
    p = fs.tree.map(lambda d: torch.zeros(d.shape), module.init(cfg))
    p["h"][0][part]["b"] += 1
    p["ln_f"]["w"] += 1
    p["head"]["w"] += torch.eye(24)
    for key in (fs.key(0), None):
        run = fs.shard_map(lambda p, ids, key=key: module.apply(cfg, p, ids, key=key), mesh=fs.make_mesh(data=1),
                           out_specs=P())  # fmt: skip
        assert (float(fs.device_get(run(p, cases.tokens(24))).std()) > 0.9) == (key is not None)


# --- transfers ------------------------------------------------------------------------------------------------


def transfers(model, layers, *, sequence=False, backward=False, **changes):
    """The transfers of one rank of model=2 in a model of so many layers: (op, bytes of its argument) -> count."""
    module, cfg = DECODERS[model].module, DECODERS[model].config(**{DECODERS[model].layers: layers, **changes})
    mesh, specs = fs.make_mesh(model=2), module.specs(cfg, model="model")
    layout, ids = module.Layout(None, "model", sequence), cases.tokens(61, b=6, t=8)
    p = fs.materialize(module.init(cfg), specs, mesh, key=fs.key(0))

    def loss(p, ids):
        return module.loss(cfg, p, ids, ids, layout=layout, key=fs.key(1))

    f = fs.value_and_grad(loss) if backward else loss
    run = fs.shard_map(f, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs) if backward else P(), check="never")
    with fs.recording() as log:
        run(p, ids)
    return Counter({sent: n // 2 for sent, n in Counter((t.op, t.bytes) for t in log).items()})


STREAM, NORMS = 4 * 6 * 8 * 24, 4 * 4 * 24  # bytes of [B, T, D], and of the gradients of two norms


@pytest.mark.parametrize(
    ("model", "options", "want"),
    [
        ("gptj", {}, {("all_reduce", STREAM): 1}),
        ("gptj", {"backward": True}, {("all_reduce", STREAM): 2}),
        ("gptj", {"sequence": True}, {("all_gather", STREAM // 2): 1, ("reduce_scatter", STREAM): 1}),
        ("gptj", {"resid_pdrop": 0.1}, {("all_reduce", STREAM): 2}),  # two masks, two sums
        ("gpt_neox", {}, {("all_reduce", STREAM): 1}),
        ("gpt_neox", {"backward": True}, {("all_reduce", STREAM): 2, ("all_reduce", NORMS): 1}),
        ("gpt_neox", {"sequence": True}, {("all_gather", STREAM // 2): 1, ("reduce_scatter", STREAM): 1}),
        ("gpt_neox", {"use_parallel_residual": False}, {("all_reduce", STREAM): 2}),
        ("gpt_neox", {"hidden_dropout": 0.1}, {("all_reduce", STREAM): 2}),
    ],
)
def test_transfers_added_by_one_block(model, options, want):
    assert dict(transfers(model, 2, **options) - transfers(model, 1, **options)) == want


# --- initial values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "changes", "std", "most"),  # most: of the absolute mean
    [
        ("gptj", {"n_embd": 96, "rotary_dim": 8, "n_inner": None, "initializer_range": 0.05}, 0.05, 0.003),
        ("gpt_neox", {"hidden_size": 96, "intermediate_size": 200, "initializer_range": 0.05}, 0.05, 0.003),
        ("llama", {"hidden_size": 96, "attention_bias": True, "mlp_bias": True}, 0.02, 0.002),
    ],
)
def test_initial_values_have_the_distribution_of_transformers_on_every_mesh(model, changes, std, most):
    module, cfg = DECODERS[model].module, DECODERS[model].config(**changes)
    one, sharded = (fs.device_get(cases.placed(module, cfg, module.init(cfg), layout)[-1])
                    for layout in (ONE, EVERYTHING))  # fmt: skip
    for (path, x), y in zip(fs.tree.leaves_with_path(one), fs.tree.leaves(sharded), strict=True):
        assert torch.equal(x, y), path
        if path[-1] == "b":
            assert (x == 0).all(), path
        elif {"ln_1", "ln_2", "ln_f", "norm_1", "norm_2", "norm_f"} & set(path):
            assert (x == 1).all(), path
        else:
            assert abs(float(x.std()) - std) < 0.002, path
            assert abs(float(x.mean())) < most, path


# --- refusals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["gpt2", "gptj"])
def test_more_tokens_than_positions_are_refused(model):
    module, cfg = DECODERS[model].module, DECODERS[model].config()
    with pytest.raises(fs.ShardingError, match="13 tokens do not fit 12 positions\n  fix: a larger n_positions"):
        cases.logits(module, cfg, module.init(cfg), ONE, cases.tokens(61, t=13))


@pytest.mark.parametrize(
    ("model", "width", "heads"),
    [("gpt2", "n_embd", "n_head"), ("gptj", "n_embd", "n_head"), ("gpt_neox", "hidden_size", "num_attention_heads")],
)
def test_heads_that_do_not_divide_the_width_are_refused(model, width, heads):
    assert error_text(DECODERS[model].module.Config, **{width: 10, heads: 3}) == (
        f"{model}.Config: the heads must divide the width\n  {width}  10    {heads}  3\n  10 % 3 = 1"
    )
