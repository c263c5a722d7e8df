"""Small architectures of transformers and diffusers, and the inputs of each: `CASES`.

A configuration of transformers is its class's default with every size that SMALL knows made small, its parts (text,
vision, audio) likewise, and then the `sizes` of the case. Sizes are such that heads split, and vocabularies and hidden
layers do not divide: parts of leaves on two ranks differ in size.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as fields_of
from typing import Any

import torch
from torch import Tensor, nn

BATCH, TOKENS, VOCABULARY, IMAGE = 4, 9, 61, 32

Input = Callable[[torch.Generator], Tensor]

# --- inputs ---------------------------------------------------------------------------------------------------


def floats(*shape: int) -> Input:
    return lambda g: torch.randn(BATCH, *shape, generator=g)


def ints(high: int, *shape: int, low: int = 0) -> Input:
    return lambda g: torch.randint(low, high, (BATCH, *shape), generator=g)


def ids(tokens: int = TOKENS) -> Input:
    return ints(40, tokens, low=4)  # no special token


def constant(value: Any, *shape: int) -> Input:
    return lambda g: torch.full((BATCH, *shape), value)


def ids_with(*special: tuple[int, int], tokens: int = TOKENS) -> Input:
    """Ids in which each `(token, n)` stands n times, one pair after the other, from position 1 on."""

    def draw(g: torch.Generator) -> Tensor:
        x, at = ids(tokens)(g), 1
        for token, n in special:
            x[:, at : at + n] = token
            at += n
        return x

    return draw


# --- configurations -------------------------------------------------------------------------------------------

SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "d_model": 32, "n_embd": 32, "embed_dim": 32, "hidden_dim": 32,
    "embedding_size": 16, "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2, "depth": 2, "num_attention_heads": 4,
    "num_heads": 4, "n_head": 4, "n_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 37, "encoder_ffn_dim": 37, "decoder_ffn_dim": 37,
    "ffn_dim": 37, "d_ff": 37, "d_kv": 8, "mlp_dim": 37, "n_inner": 37, "moe_intermediate_size": 24, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "shared_expert_intermediate_size": 24, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "max_position_embeddings": 64,
    "n_positions": 64, "max_source_positions": 64, "max_target_positions": 64, "image_size": IMAGE, "patch_size": 8,
    "projection_dim": 16, "num_mel_bins": 16, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
    "conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3), "classifier_proj_size": 16, "state_size": 4,
    "mamba_d_state": 4, "fusion_hidden_size": 16, "decoder_hidden_size": 16, "num_queries": 5, "out_hidden_size": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
    "codevector_dim": 8, "proj_codevector_dim": 8, "num_codevectors_per_group": 6, "num_negatives": 2,
}  # fmt: skip
TOKEN_IDS = {"image": 60, "video": 59, "audio": 58, "vision_start": 57, "vision_end": 56}  # by the start of a field


def small_config(config: Any, **sizes: Any) -> Any:
    """Return a configuration of this class (or sub-configuration's specification), made small."""
    defaults = {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields_of(config)}
    small = {k: v for k, v in SMALL.items() if k in defaults and isinstance(defaults[k], int) == isinstance(v, int)}
    for name, value in defaults.items():
        if name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCABULARY:
            small[name] = next((i for start, i in TOKEN_IDS.items() if name.startswith(start)), 55)
    parts = {}
    for name, part in config.sub_configs_defaults.items():
        given = sizes.pop(name, {})
        parts[name] = given if not isinstance(given, Mapping) else small_config(part_class(part, given), **{
            **part.init_kwargs, **{k: v for k, v in given.items() if k != "model_type"}})  # fmt: skip
    return config(**{**small, **parts, **sizes})


def part_class(part: Any, given: Mapping[str, Any]) -> Any:
    import transformers

    if issubclass(part.config_class, transformers.PreTrainedConfig):
        return part.config_class
    return part.get_config_class(given.get("model_type", part.model_type))


# --- cases ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """An architecture: the class, the sizes of its configuration beyond SMALL, and its inputs beyond the usual ones.

    Args:
        library: "transformers" or "diffusers".
        sizes: fields of the configuration; of diffusers, all arguments of the class.
        inputs: by the names of `forward`'s arguments; a value that is no function is passed as it is.
    """

    model: str
    library: str = "transformers"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)

    def construct(self) -> nn.Module:
        if self.library == "diffusers":
            import diffusers

            return getattr(diffusers, self.model)(**self.sizes).eval()
        import transformers

        model = getattr(transformers, self.model)
        return model._from_config(small_config(model.config_class, **self.sizes)).eval()

    def arguments(self, module: nn.Module) -> dict[str, Any]:
        """Return the inputs of a batch: the usual ones of the module, replaced by those of the case."""
        g = torch.Generator().manual_seed(1)
        inputs = {**usual_inputs(module), **self.inputs}
        return {k: x(g) if callable(x) else x for k, x in inputs.items() if x is not None}


def usual_inputs(module: Any) -> dict[str, Input]:
    if not hasattr(module, "main_input_name"):
        return {}
    config, name = module.config, module.main_input_name
    size = getattr(config, "image_size", IMAGE)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    usual = {
        "input_ids": ids(), "pixel_values": floats(getattr(config, "num_channels", 3), height, width),
        "input_values": floats(400), "input_features": floats(16, 20),
    }  # fmt: skip
    inputs = {name: usual[name]} if name in usual else {}
    if config.is_encoder_decoder and "decoder_input_ids" in inspect.signature(module.forward).parameters:
        inputs["decoder_input_ids"] = ids(5)
    return inputs


CASES: dict[str, Case] = {}
