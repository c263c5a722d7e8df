"""Checks that every model must pass against transformers: logits, loss, every gradient, greedy generation, and files.

A module is one of `fshard.models`; `theirs` is a transformers model with a head, in eval mode.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.models import dots1, gpt2, gpt_neox, gptj, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from tests.nn.test_rope import LLAMA3, LONG, SHORT

os.environ["HF_HUB_OFFLINE"] = "1"

ONE = {"data": 1, "model": 1}
EVERYTHING = "both, fully sharded, sequence"

# name: (mesh, fully sharded over data, sequence parallel)
LAYOUTS = {
    "one device": (ONE, False, False),
    "data": ({"data": 2, "model": 1}, False, False),
    "data, fully sharded": ({"data": 2, "model": 1}, True, False),
    "model": ({"data": 1, "model": 2}, False, False),
    "model, sequence": ({"data": 1, "model": 2}, False, True),
    "both": ({"data": 2, "model": 2}, False, False),
    EVERYTHING: ({"data": 2, "model": 2}, True, True),
    "uneven": ({"data": 3, "model": 3}, True, True),
}
MORE_LAYOUTS = {
    "model=4": ({"data": 1, "model": 4}, False, False),  # one rank without any of 3 heads
    "model=5, sequence": ({"data": 1, "model": 5}, False, True),  # 9 positions over 5 ranks
    "data=3, fully sharded, model=2": ({"data": 3, "model": 2}, True, False),
}


def check_of(layout):
    """`check=` on a layout: types do not depend on sizes, so two layouts, with and without sequence=, have them all."""
    return "first" if layout in ("both", EVERYTHING) else "never"


# --- the decoders ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decoder:
    """A model with small sizes, and its variants: the fields of the config that differ from `sizes`."""

    module: ModuleType
    hf: str  # the prefix of the classes in transformers
    sizes: dict
    variants: dict = field(default_factory=dict)
    only_theirs: dict = field(default_factory=dict)  # what transformers' config needs in addition
    layers: str = "num_hidden_layers"

    def config(self, **changes):
        return self.module.Config(**{**self.sizes, **changes})


# Of most models 3 heads of 8 dims, 61 tokens and 34 hidden units: uneven over 2 or 3 ranks, as are 9 positions.
N_SIZES = {"vocab_size": 61, "n_positions": 12, "n_embd": 24, "n_layer": 2, "n_head": 3}
HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
SHALLOW = {"num_hidden_layers": 1}
# Positions are scaled beyond the 8 of this config.
NEOX_ROPES = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 16.0, "rope_theta": 4.0, "partial_rotary_factor": 1.0},  # large enough to change tokens
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4, "beta_fast": 2, "beta_slow": 1},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"short_factor": [1.0, 2.0], "long_factor": [1.5, 3.0], "original_max_position_embeddings": 6},
}
FACTORS = {"long_factor": LONG[:4], "short_factor": SHORT[:4]}
# Sequences have 9 tokens, and 5 to 10 in generation: rope types that depend on the length cross their limit meanwhile.
LLAMA_ROPES = {
    "linear": ({"rope_type": "linear", "factor": 3.0}, 64),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.5}, 6),
    "dynamic, short": ({"rope_type": "dynamic", "factor": 2.5}, 10),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
    "longrope": ({"rope_type": "longrope", **FACTORS, "factor": 4.0, "original_max_position_embeddings": 7}, 64),
    "longrope, short": ({"rope_type": "longrope", **FACTORS, "factor": 4.0, "original_max_position_embeddings": 10},
                        64),
    "llama3": ({"rope_type": "llama3", **LLAMA3}, 64),
    "proportional": ({"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.6}, 64),
}  # fmt: skip
LLAMA_SIZES = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 2,
               "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 64}  # fmt: skip

DECODERS = {
    "gpt2": Decoder(
        gpt2, "GPT2", N_SIZES, layers="n_layer",
        only_theirs={"embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0},
        variants={
            "base": {},
            "one head, other widths": {"n_embd": 16, "n_layer": 3, "n_head": 1, "n_inner": 10,
                                       "activation_function": "relu2"},
            "large vocabulary": {"vocab_size": 50257, "n_embd": 16, "n_layer": 1, "n_head": 4},
            "untied": {"tie_word_embeddings": False, "n_layer": 1},
        },
    ),
    "gptj": Decoder(
        gptj, "GPTJ", {**N_SIZES, "rotary_dim": 4, "n_inner": 34}, layers="n_layer",
        variants={
            "base": {},
            "tied": {"tie_word_embeddings": True},
            "tied, shallow": {"tie_word_embeddings": True, "n_layer": 1},
            "one head, all dims rotated": {"n_head": 1, "rotary_dim": 24, "n_inner": None, "n_layer": 1},
            "large epsilon, gelu": {"layer_norm_epsilon": 0.3, "n_layer": 1, "activation_function": "gelu"},
        },
    ),
    "gpt_neox": Decoder(
        gpt_neox, "GPTNeoX",
        {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
         "intermediate_size": 34, "max_position_embeddings": 8, "rope_parameters": HALF},
        variants={
            "base": {},
            "sequential residual, gelu_new": {"use_parallel_residual": False, "hidden_act": "gelu_new"},
            "tied, no attention bias, all dims rotated, large epsilon": {
                "attention_bias": False, "tie_word_embeddings": True, "layer_norm_eps": 0.3, **SHALLOW,
                "rope_parameters": {**HALF, "partial_rotary_factor": 1.0},
            },
            "sequential residual, no attention bias, gelu_fast, large epsilon, small theta": {
                "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast",
                "layer_norm_eps": 0.3, **SHALLOW, "rope_parameters": {**HALF, "rope_theta": 50.0},
            },
            **{f"rope {name}": {"rope_parameters": {**HALF, "rope_type": name, **changes}}
               for name, changes in NEOX_ROPES.items()},
        },
    ),
    "llama": Decoder(
        llama, "Llama",
        LLAMA_SIZES,
        variants={
            "base": {},  # 3 groups, 29 hidden units and 37 tokens: none of them even
            "one group": {"num_key_value_heads": 1, **SHALLOW},  # some ranks have no heads
            "no groups, tied": {"num_attention_heads": 4, "num_key_value_heads": None, "tie_word_embeddings": True,
                                **SHALLOW},
            "biased": {"attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-2, **SHALLOW},
            "wide heads, tied": {"head_dim": 10, "tie_word_embeddings": True, **SHALLOW},
            **{f"rope {name}": {"head_dim": 8, "max_position_embeddings": longest,
                                "rope_parameters": {**parameters, "rope_theta": 100.0}, **SHALLOW}
               for name, (parameters, longest) in LLAMA_ROPES.items()},
        },
    ),
    "mistral": Decoder(
        mistral, "Mistral", {**LLAMA_SIZES, "sliding_window": 4},  # of 9 tokens, 5 are outside of the last one's window
        variants={
            "base": {},
            "wide heads, tied, no window": {"hidden_size": 20, "head_dim": 10, "tie_word_embeddings": True,
                                            "sliding_window": None, **SHALLOW},
            "window of two tokens": {"sliding_window": 2, **SHALLOW},
            "window of all tokens": {"sliding_window": 9, "hidden_act": "gelu_pytorch_tanh", **SHALLOW},
        },
    ),
    "mixtral": Decoder(
        mixtral, "Mixtral", {**LLAMA_SIZES, "num_local_experts": 5, "num_experts_per_tok": 2},
        only_theirs={"experts_implementation": "eager"},  # the other needs widths that are multiples of 4
        variants={
            "base": {},
            "router losses, window": {"output_router_logits": True, "router_aux_loss_coef": 0.3, "sliding_window": 4,
                                      "num_experts_per_tok": 3},
            "all experts, tied": {"num_local_experts": 2, "tie_word_embeddings": True, "hidden_act": "gelu", **SHALLOW},
            "one of many experts": {  # some have no token
                "num_local_experts": 40, "num_experts_per_tok": 1, **SHALLOW,
                "output_router_logits": True, "router_aux_loss_coef": 0.5,  # a single weight is 1: no other gradient
            },
        },
    ),
    "qwen3_moe": Decoder(
        qwen3_moe, "Qwen3Moe", {**LLAMA_SIZES, "head_dim": 8, "num_experts": 5, "num_experts_per_tok": 3,
                                "moe_intermediate_size": 11, "norm_topk_prob": True},
        only_theirs={"experts_implementation": "eager"},
        variants={
            "base": {"mlp_only_layers": [0]},  # one layer without experts, one with
            "router losses, window, biased": {
                "output_router_logits": True, "router_aux_loss_coef": 0.3, "use_sliding_window": True,
                "sliding_window": 4, "attention_bias": True, "norm_topk_prob": False,
            },
        },
    ),
    "dots1": Decoder(
        dots1, "Dots1", {**LLAMA_SIZES, "head_dim": 8, "n_routed_experts": 8, "num_experts_per_tok": 3,
                         "moe_intermediate_size": 11, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
                         "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        only_theirs={"experts_implementation": "eager"},
        variants={
            "base": {"first_k_dense_replace": 1},
            "one group, window": {"n_group": 1, "topk_group": 1, "sliding_window": 4, "max_window_layers": 1,
                                  "norm_topk_prob": False},
        },
    ),
    "qwen2": Decoder(
        qwen2, "Qwen2", {**LLAMA_SIZES, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        variants={
            "base": {},  # one layer without a window, one with
            "layer types, tied": {"layer_types": ["sliding_attention", "full_attention"], "tie_word_embeddings": True},
            "no window": {"use_sliding_window": False, "num_key_value_heads": 1, **SHALLOW},
        },
    ),
    "qwen3": Decoder(
        qwen3, "Qwen3", {**LLAMA_SIZES, "head_dim": 8, "rms_norm_eps": 1e-2},
        variants={
            "base": {},
            "biased, window": {"attention_bias": True, "use_sliding_window": True, "sliding_window": 5,
                               "max_window_layers": 0, "num_key_value_heads": 1, **SHALLOW},
            "tied": {"tie_word_embeddings": True, "num_key_value_heads": None, **SHALLOW},
        },
    ),
}  # fmt: skip


def hugging_face(name, variant="base", **changes):
    """A transformers model with the sizes of a decoder, in which every leaf matters."""
    transformers = pytest.importorskip("transformers")
    model = DECODERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{model.hf}Config")(**{
        **model.sizes, **model.only_theirs, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None,
        **model.variants[variant], **changes,
    })  # fmt: skip
    suffix = "LMHeadModel" if name == "gpt2" else "ForCausalLM"
    return randomize_vectors(getattr(transformers, f"{model.hf}{suffix}")(config))


@functools.cache  # one folder and one backward pass for all layouts
def reference(name, variant="base"):
    """A transformers model, its folder, its logits, loss and gradients, and what `load` reads from the folder."""
    theirs, module = hugging_face(name, variant), DECODERS[name].module
    place = tempfile.TemporaryDirectory()
    folder = Path(place.name)
    cfg, params = module.load(saved(theirs, folder / "weights"))
    ids = tokens(cfg.vocab_size)
    out = theirs(ids)
    logits = out.logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    if getattr(out, "aux_loss", None) is not None:  # the router's
        loss = loss + theirs.config.router_aux_loss_coef * out.aux_loss
    loss.backward()
    grads = their_grads(module, theirs, folder / "gradients")
    return SimpleNamespace(module=module, theirs=theirs, cfg=cfg, params=params, ids=ids, logits=logits.detach(),
                           loss=loss.detach(), grads=grads, place=place)  # fmt: skip


def randomize_vectors(theirs, seed=0):
    """A transformers model in eval mode whose biases and norms are moved from their defaults, so that each matters."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in [*theirs.parameters(), *_router_biases(theirs)]:
            if p.ndim == 1:
                p.add_(torch.randn(p.shape, generator=g) * 0.1)
    return theirs.eval()


def _router_biases(theirs):
    """The buffers of transformers that are leaves of ours: they have no gradient."""
    return [x for name, x in theirs.named_buffers() if name.endswith("e_score_correction_bias")]


def tokens(size, b=6, t=9, seed=0):
    return torch.randint(0, size, (b, t), generator=torch.Generator().manual_seed(seed))


def left_padding(b, t):
    """A mask [B, T] of sequences padded on their left, each by another length; the first is not padded."""
    return (torch.arange(t) >= (torch.arange(b) % (t - 1))[:, None]).long()


def saved(theirs, folder):
    theirs.save_pretrained(folder)
    return Path(folder)


# --- on a mesh ------------------------------------------------------------------------------------------------


def placed(module, cfg, params, layout):
    """The mesh, specs and `Layout` by the name of a layout, and the parameters placed on that mesh."""
    sizes, fully_sharded, sequence = {**LAYOUTS, **MORE_LAYOUTS}[layout]
    mesh, specs = fs.make_mesh(**sizes), module.specs(cfg, model="model")
    if fully_sharded:
        specs = fs.fully_shard(specs, module.init(cfg), axis="data")
    return mesh, specs, module.Layout("data", "model", sequence), fs.materialize(params, specs, mesh, key=fs.key(7))


def loss_and_grads(module, cfg, params, layout, *args, steps=1, **options):
    """The loss and the gradients on a mesh, as full tensors; args [B, ...] are split over data, and into `steps`."""
    mesh, specs, split, p = placed(module, cfg, params, layout)

    @fs.shard_map(mesh=mesh, in_specs=(specs, *[P("data")] * len(args)), out_specs=(P(), specs), check=check_of(layout))
    def run(p, *args):
        loss = functools.partial(module.loss, cfg, layout=split, specs=specs, **options)
        return fs.accumulate(loss, steps)(p, *args)

    return fs.device_get(run(p, *args))


def logits(module, cfg, params, layout, ids, mask=None):
    mesh, specs, split, p = placed(module, cfg, params, layout)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=P("data", None, "model"),
                  check="first" if layout == EVERYTHING else "never")  # fmt: skip
    def run(p, ids, mask):
        return module.apply(cfg, p, ids, layout=split, specs=specs, mask=mask)

    return fs.device_get(run(p, ids, mask))


def their_grads(module, theirs, destination):
    """The gradients of a transformers model as our tree: saved as if they were weights, and loaded."""
    as_weights = copy.deepcopy(theirs)
    with torch.no_grad():
        for p, q in zip(as_weights.parameters(), theirs.parameters(), strict=True):
            p.copy_(q.grad)
        for bias in _router_biases(as_weights):
            bias.zero_()
    _, described = module.load(saved(as_weights, destination))
    return fs.device_get(fs.materialize(described, P(), fs.make_mesh(**ONE), key=fs.key(0)))


# --- checks ---------------------------------------------------------------------------------------------------


def close(got, want, rtol, atol):
    """Per leaf, in value. `atol` is a share of the largest entry of the leaf: rounding scales with what is summed."""
    for (path, a), b in zip(fs.tree.leaves_with_path(got), fs.tree.leaves(want), strict=True):
        assert a.isfinite().all(), path
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol * float(b.abs().max()),
                                   msg=lambda m, path=path: f"{fs.tree.dotted(path)}: {m}")  # fmt: skip


def check_logits_loss_and_gradients(ref, layout, *, rtol=1e-5, atol=1e-5):
    """fp32: the logits, the loss, and every gradient are transformers', to 1e-5 of each leaf's largest entry."""
    mesh, specs, split, p = placed(ref.module, ref.cfg, ref.params, layout)
    targets = torch.cat([ref.ids[:, 1:], torch.full_like(ref.ids[:, :1], -100)], 1)
    check = "first" if layout == "both" else "never"  # with sequence= it is `loss_and_grads` that checks the types

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data"), P("data")),
                  out_specs=(P("data", None, "model"), P(), specs), check=check)  # fmt: skip
    def run(p, ids, targets):
        options = {"layout": split, "specs": specs}
        loss, grads = fs.value_and_grad(lambda p: ref.module.loss(ref.cfg, p, ids, targets, **options))(p)
        return ref.module.apply(ref.cfg, p, ids, **options), loss, grads

    logits, loss, grads = fs.device_get(run(p, ref.ids, targets))
    close(logits, ref.logits, rtol, atol)
    torch.testing.assert_close(loss, ref.loss, rtol=rtol, atol=0)
    close(grads, ref.grads, rtol, atol)


def check_padded_logits(ref, layout, *, rtol=1e-5, atol=1e-5):
    """Left-padded prompts have the logits transformers gives them, with positions that do not count padding."""
    mask = left_padding(*ref.ids.shape)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        want = ref.theirs(ref.ids, attention_mask=mask, position_ids=positions).logits
    got = logits(ref.module, ref.cfg, ref.params, layout, ref.ids, mask)
    close({"logits": got[mask.bool()]}, {"logits": want[mask.bool()]}, rtol, atol)


def check_generation(ref, layout, *, new=7, padded=False, eos=None):
    """Greedy generation is that of transformers, token by token; `eos="second"` is their second token of row 0."""
    ids = tokens(ref.cfg.vocab_size, t=5)
    mask = left_padding(*ids.shape) if padded else torch.ones_like(ids)

    def theirs(ids, new, eos, pad):
        # The router's loss in transformers refuses a mask that covers cached tokens too.
        without_router = {"output_router_logits": False} if hasattr(ref.theirs.config, "output_router_logits") else {}
        own = ref.theirs.generation_config
        before, own.eos_token_id = own.eos_token_id, eos  # `generate` takes the argument None for the model's own
        try:
            return ref.theirs.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=pad,
                                       eos_token_id=eos, bos_token_id=None, **without_router)  # fmt: skip
        finally:
            own.eos_token_id = before

    if eos == "second":
        eos = int(theirs(ids, 3, None, 0)[0, 6])
    pad = 0 if eos is None else eos
    ids = ids.where(mask.bool(), pad)
    want = theirs(ids, new, eos, pad)
    if eos is not None:
        assert 0 < (want[:, 5:] == eos).any(1).sum() < len(ids)  # some rows end, others do not
    mesh, specs, split, p = placed(ref.module, ref.cfg, ref.params, layout)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=P("data"), check=check_of(layout))
    def run(p, ids, mask):
        return ref.module.generate(ref.cfg, p, ids, new=new, layout=split, specs=specs, mask=mask if padded else None,
                                   eos=eos)  # fmt: skip

    got = fs.device_get(run(p, ids, mask))
    assert got.shape == (len(ids), 5 + new)
    assert torch.equal(got[:, : want.shape[1]], want), f"{got}\n{want}"
    assert (got[:, want.shape[1] :] == pad).all()


def check_files(ref, layout, folder):
    """Loaded, placed on a mesh and saved from there: transformers reads the folder and gives the same logits."""
    _, _, _, p = placed(ref.module, ref.cfg, ref.params, layout)
    ref.module.save(folder, ref.cfg, p)
    again = read_by_transformers(type(ref.theirs), folder)
    with torch.no_grad():
        assert torch.equal(again(ref.ids).logits, ref.theirs(ref.ids).logits)
    greedy = {"attention_mask": torch.ones_like(ref.ids), "max_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(again.generate(ref.ids, **greedy), ref.theirs.generate(ref.ids, **greedy))  # the cache's window
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == ref.theirs.config.model_type
    assert ref.module.load(folder)[0] == ref.module.config(folder) == ref.cfg


def read_by_transformers(cls, folder):
    """The model that transformers reads, without anything missing or left over; experts as in `hugging_face`."""
    options = {"experts_implementation": "eager"} if cls.__name__.startswith(("Mixtral", "Qwen3Moe")) else {}
    model, info = cls.from_pretrained(folder, output_loading_info=True, **options)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    return model.eval()


def check_the_mesh_never_changes_the_answer(module, cfg, layout, **options):
    """From the same key: loss and gradients, with dropout if the config has some, are those of one device."""
    want_loss, want = _on_one_device(module, cfg)
    loss, grads = _with_drawn_parameters(module, cfg, layout, **options)
    torch.testing.assert_close(loss, want_loss, rtol=2e-6, atol=0)
    close(grads, want, 1e-5, 1e-5)


@functools.cache  # for all layouts
def _on_one_device(module, cfg):
    return _with_drawn_parameters(module, cfg, "one device")


def _with_drawn_parameters(module, cfg, layout, **options):
    """The loss and gradients of parameters none of which is 0 or 1, with a dropout key."""
    ids = tokens(cfg.vocab_size)
    described = fs.tree.map(lambda d: fs.init.normal(d.shape, std=0.2), module.init(cfg))
    return loss_and_grads(module, cfg, described, layout, ids, ids.roll(-1, 1), key=fs.key(3), **options)
