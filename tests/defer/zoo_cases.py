"""Small architectures of transformers and diffusers, and the inputs of each: `CASES`.

A configuration of transformers is its class's default with every size that SMALL knows made small, its parts (text,
vision, audio) likewise, and then the `sizes` of the case. Sizes are such that heads split, and vocabularies and hidden
layers do not divide: parts of leaves on two ranks differ in size.
"""

from __future__ import annotations

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


def repeated(row: list[int]) -> Input:
    return lambda g: torch.tensor([row] * BATCH)


def boxes(g: torch.Generator) -> Tensor:
    """Left, top, right, bottom."""
    return torch.cat([ints(30, TOKENS, 2)(g), ints(60, TOKENS, 2, low=30)(g)], -1)


def patches(g: torch.Generator) -> Tensor:
    """16 patches of an image for each example: [B * 16, channels * frames * height * width]."""
    return torch.randn(BATCH * 16, 3 * 2 * 8 * 8, generator=g)


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
    "dim": 32, "emb_dim": 32, "d_head": 8, "d_inner": 37, "encoder_hidden_size": 32, "num_query_tokens": 3,
    "max_2d_position_embeddings": 64, "visual_feat_dim": 6, "expert_ffn_hidden_size": 24,
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
    if any("expert" in name for name in defaults) and "intermediate_size" in small:
        small["intermediate_size"] = 40  # grouped matrix products need rows of multiples of 16 bytes
    parts = {}
    for name, part in config.sub_configs_defaults.items():
        given = sizes.pop(name, {})
        parts[name] = given if not isinstance(given, Mapping) else small_config(part_class(part, given), **{
            **{k: v for k, v in part.init_kwargs.items() if k not in SMALL},
            **{k: v for k, v in given.items() if k != "model_type"}})  # fmt: skip
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
        inputs: by the names of `forward`'s arguments; a value that is no function is passed as it is, None is left out.
        mixes: whether an example's output depends on the others of its batch, in torch (Autoformer in eval mode has
            its delays in the order heads, examples, and its values in the order examples, heads).
        units: classes of units, if blocks cannot be (DiT's last layer uses the embedding of the first block).
    """

    model: str
    library: str = "transformers"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    mixes: bool = False
    units: tuple[str, ...] = ()

    def construct(self, **options: Any) -> nn.Module:
        if self.library == "diffusers":
            import diffusers

            return getattr(diffusers, self.model)(**self.sizes, **options).eval()
        import transformers

        model = getattr(transformers, self.model)
        return model._from_config(small_config(model.config_class, **self.sizes), **options).eval()

    def arguments(self, module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the inputs of a batch, the usual ones of the module replaced by those of the case; and the others."""
        g = torch.Generator().manual_seed(1)
        inputs = {k: x for k, x in {**usual_inputs(module), **self.inputs}.items() if x is not None}
        others = {k: x for k, x in inputs.items() if not callable(x)}
        return {k: x(g) for k, x in inputs.items() if k not in others}, others


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


def case(model: str, sizes: Mapping[str, Any] | None = None, *, mixes: bool = False, **inputs: Any) -> Case:
    return Case(model, "transformers", sizes or {}, inputs, mixes)


def diffusion(model: str, sizes: Mapping[str, Any], *, units: tuple[str, ...] = (), **inputs: Any) -> Case:
    return Case(model, "diffusers", sizes, inputs, units=units)


PIXELS = floats(3, IMAGE, IMAGE)
MASK = constant(1, TOKENS)
STAGES = {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16]}
WINDOWS = {"embed_dim": 8, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 2, "image_size": 16}
RESNET = {"model_type": "resnet", "embedding_size": 8, **STAGES}
BACKBONE = {"backbone_config": {**RESNET, "out_features": ["stage4"]}}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
SSM = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1}
SERIES = {"prediction_length": 4, "context_length": 12, "lags_sequence": [1, 2], "num_time_features": 2}
HISTORY = {"past_values": floats(14), "past_time_features": floats(14, 2), "past_observed_mask": constant(1.0, 14),
           "future_values": floats(4), "future_time_features": floats(4, 2)}  # fmt: skip
CODEC = {"hidden_size": 16, "num_filters": 4, "upsampling_ratios": [2, 2], "codebook_size": 16, "codebook_dim": 16}
ROPE_3D = {"text_config": {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}}
PATCHES = {"pixel_values": patches, "image_grid_thw": repeated([1, 4, 4])}
IMAGE_TOKENS = repeated([0, 0, 1, 1, 1, 1, 0, 0, 0])
UNET = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
CROSS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
}
LATENT = floats(4, 16, 16)
TIMES = ints(1000)
MAE = {"decoder_num_attention_heads": 4, "decoder_num_hidden_layers": 1, "decoder_intermediate_size": 24}

# fmt: off
FAMILIES: dict[str, list[Case]] = {
    "Decoders": [
        case("GPT2LMHeadModel"), case("GPTJForCausalLM", {"rotary_dim": 4}), case("GPTNeoXForCausalLM"),
        case("GPTNeoForCausalLM", {"attention_types": [[["global", "local"], 1]], "window_size": 4}),
        case("GPTBigCodeForCausalLM"), case("OpenAIGPTLMHeadModel"), case("CodeGenForCausalLM", {"rotary_dim": 4}),
        case("LlamaForCausalLM", {"pad_token_id": 3}), case("MistralForCausalLM", {"sliding_window": 4}),
        case("Ministral3ForCausalLM"), case("Qwen2ForCausalLM"), case("Qwen3ForCausalLM"), case("GemmaForCausalLM"),
        case("Gemma2ForCausalLM", {"sliding_window": 4}), case("Gemma3ForCausalLM", {"sliding_window": 4}),
        case("PhiForCausalLM"), case("Phi3ForCausalLM"),
        case("OPTForCausalLM", {"word_embed_proj_dim": 16, "pad_token_id": 1}), case("BloomForCausalLM"),
        case("FalconForCausalLM"), case("MptForCausalLM"), case("StableLmForCausalLM"), case("OlmoForCausalLM"),
        case("Olmo2ForCausalLM"), case("Olmo3ForCausalLM"), case("Starcoder2ForCausalLM"), case("CohereForCausalLM"),
        case("Cohere2ForCausalLM"), case("GraniteForCausalLM"), case("GlmForCausalLM"), case("Glm4ForCausalLM"),
        case("SmolLM3ForCausalLM"), case("HeliumForCausalLM"), case("PersimmonForCausalLM"),
        case("NemotronForCausalLM", {"head_dim": 8, "num_key_value_heads": 2}), case("Exaone4ForCausalLM"),
        case("SeedOssForCausalLM"), case("ApertusForCausalLM"), case("NanoChatForCausalLM"),
        case("ModernBertDecoderForCausalLM"), case("BioGptForCausalLM"), case("XGLMForCausalLM"),
        case("CTRLLMHeadModel", {"dff": 37}), case("ImageGPTForCausalImageModeling"), case("DiffLlamaForCausalLM"),
        case("BitNetForCausalLM"),
    ],
    "Encoders": [
        case("BertForMaskedLM"), case("RobertaForMaskedLM"), case("XLMRobertaForMaskedLM"),
        case("CamembertForMaskedLM"), case("DistilBertForMaskedLM", {"hidden_dim": 37}), case("ElectraForPreTraining"),
        case("DebertaForMaskedLM", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}),
        case("DebertaV2ForMaskedLM", {"relative_attention": True, "pos_att_type": ["c2p", "p2c"],
             "position_buckets": 4}),
        case("AlbertForMaskedLM"), case("XLNetLMHeadModel"), case("MPNetForMaskedLM"),
        case("LongformerForMaskedLM", {"attention_window": 4}),
        case("BigBirdForMaskedLM", {"attention_type": "original_full"}),
        case("FunnelForMaskedLM", {"block_sizes": [1, 1]}), case("ConvBertForMaskedLM"), case("ModernBertForMaskedLM"),
        case("MobileBertForMaskedLM"), case("SqueezeBertForMaskedLM", {"embedding_size": 32, "intermediate_size": 40}),
        case("NystromformerForMaskedLM"), case("FNetForMaskedLM"), case("RoFormerForMaskedLM"),
        case("RemBertForMaskedLM"), case("CanineModel", {"num_hash_buckets": 64}), case("YosoForMaskedLM"),
        case("XLMWithLMHeadModel"), case("IBertForMaskedLM"),
        case("EsmForMaskedLM", {"vocab_size": VOCABULARY, "pad_token_id": 1, "mask_token_id": 2}),
        case("TapasForMaskedLM"),
        case("LukeForMaskedLM", {"entity_vocab_size": 7, "entity_emb_size": 8}, entity_ids=ints(7, 2),
             entity_position_ids=ints(TOKENS, 2, 3)),
        case("DPRQuestionEncoder"),
    ],
    "Encoder-decoders": [
        case("T5ForConditionalGeneration"), case("MT5ForConditionalGeneration"), case("UMT5ForConditionalGeneration"),
        case("LongT5ForConditionalGeneration"), case("BartForConditionalGeneration"),
        case("MBartForConditionalGeneration"), case("PegasusForConditionalGeneration"), case("MarianMTModel"),
        case("LEDForConditionalGeneration", {"attention_window": 4}),
        case("ProphetNetForConditionalGeneration", {"num_buckets": 8, "relative_max_distance": 16}),
        case("M2M100ForConditionalGeneration"), case("BlenderbotForConditionalGeneration"),
        case("BigBirdPegasusForConditionalGeneration", {"attention_type": "original_full"}),
        case("T5GemmaForConditionalGeneration"), case("PLBartForConditionalGeneration"),
        case("FSMTForConditionalGeneration", {"src_vocab_size": 61, "tgt_vocab_size": 59}),
        case("EncoderDecoderModel"), case("SwitchTransformersForConditionalGeneration"),
        case("NllbMoeForConditionalGeneration"),
    ],
    "Mixtures of experts": [
        case("MixtralForCausalLM"), case("Qwen2MoeForCausalLM"), case("Qwen3MoeForCausalLM"),
        case("Qwen3NextForCausalLM", {**HYBRID, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
             "linear_key_head_dim": 8, "linear_value_head_dim": 8}),
        case("DeepseekV2ForCausalLM", {"num_experts_per_tok": 2, "num_key_value_heads": 4, "head_dim": 8}),
        case("DeepseekV3ForCausalLM", {"num_key_value_heads": 4}), case("OlmoeForCausalLM"),
        case("GraniteMoeForCausalLM"),
        case("DbrxForCausalLM", {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
             "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32}}),
        case("PhimoeForCausalLM"), case("GptOssForCausalLM"), case("Glm4MoeForCausalLM"),
        case("Ernie4_5_MoeForCausalLM"), case("JetMoeForCausalLM"), case("MiniMaxForCausalLM"),
        case("Llama4ForCausalLM"),
        case("JambaForCausalLM", {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4}),
    ],
    "State spaces and recurrences": [
        case("MambaForCausalLM"),
        case("Mamba2ForCausalLM", {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}),
        case("FalconMambaForCausalLM"),
        case("RwkvForCausalLM", {"context_length": 8, "attention_hidden_size": 32, "rescale_every": 0},
             use_cache=False),
        case("RecurrentGemmaForCausalLM", {"block_types": ["recurrent", "attention"]}),
        case("BambaForCausalLM", {**SSM, "attn_layer_indices": [1]}),
        case("ZambaForCausalLM", {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2}),
        case("Zamba2ForCausalLM", {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
             "mamba_headdim": 8, "n_mamba_heads": 8, "chunk_size": 8}),
        case("GraniteMoeHybridForCausalLM", {**SSM, **HYBRID, "shared_intermediate_size": 24}),
        case("FalconH1ForCausalLM", {**SSM, "mamba_d_ssm": 64}), case("Lfm2ForCausalLM"),
        case("OlmoHybridForCausalLM"),
    ],
    "Vision": [
        case("ViTForImageClassification"), case("DeiTForImageClassification"), case("BeitForImageClassification"),
        case("Dinov2ForImageClassification"), case("DINOv3ViTModel"),
        case("ViTMAEForPreTraining", MAE, noise=floats(16)), case("ViTMSNForImageClassification"),
        case("SwinForImageClassification", WINDOWS), case("Swinv2ForImageClassification", WINDOWS),
        case("ConvNextForImageClassification", {**STAGES, "image_size": 64}),
        case("ConvNextV2ForImageClassification", {**STAGES, "image_size": 64}),
        case("ResNetForImageClassification", {"embedding_size": 8, **STAGES}),
        case("RegNetForImageClassification", {"embedding_size": 8, **STAGES, "groups_width": 4}),
        case("SegformerForSemanticSegmentation", {**STAGES, "num_attention_heads": [1, 1, 2, 2]}),
        case("MobileViTForImageClassification", {"hidden_sizes": [8, 8, 8],
             "neck_hidden_sizes": [4, 4, 8, 8, 8, 8, 16]}),
        case("MobileNetV2ForImageClassification", {"depth_multiplier": 0.25}),
        case("EfficientNetForImageClassification", {"width_coefficient": 0.1, "depth_coefficient": 0.2,
             "hidden_dim": 128, "image_size": 32}),
        case("PvtForImageClassification", {**STAGES, "num_attention_heads": [1, 1, 2, 2]}),
        case("PoolFormerForImageClassification", STAGES),
        case("FocalNetForImageClassification", {"embed_dim": 8, **STAGES}),
        case("LevitForImageClassification", {"hidden_sizes": [8, 16, 16], "num_attention_heads": [2, 2, 2],
             "depths": [1, 1, 1], "key_dim": [4, 4, 4], "image_size": 64, "patch_size": 16}),
        case("HieraForImageClassification", {"embed_dim": 8, "image_size": [32, 32], "depths": [1, 1, 1],
             "num_heads": [1, 2, 4], "num_query_pool": 2, "masked_unit_size": [4, 4],
             "masked_unit_attention": [True, True, False]}),
        case("DPTForDepthEstimation", {"num_hidden_layers": 4, "backbone_config": None,
             "backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [8, 8, 8, 8]}),
        case("GLPNForDepthEstimation", {**STAGES, "num_attention_heads": [1, 1, 2, 2]}),
        case("DetrForObjectDetection", BACKBONE, pixel_values=floats(3, 64, 64)),
        case("DeformableDetrForObjectDetection", {**BACKBONE, "num_feature_levels": 2},
             pixel_values=floats(3, 96, 96)),
        case("YolosForObjectDetection", {"image_size": [32, 32], "num_detection_tokens": 5}),
        case("Mask2FormerForUniversalSegmentation", {"backbone_config": {"model_type": "swin", "embed_dim": 8,
             "depths": [1, 1, 1, 1], "num_heads": [2, 2, 2, 2], "window_size": 4, "image_size": 128,
             "out_features": ["stage1", "stage2", "stage3", "stage4"]}, "feature_size": 32, "mask_feature_size": 32,
             "encoder_feedforward_dim": 24, "dim_feedforward": 24, "encoder_layers": 1, "decoder_layers": 3},
             pixel_values=floats(3, 128, 128)),
        case("SamModel", {"vision_config": {"hidden_size": 32, "output_channels": 16, "num_pos_feats": 8,
             "global_attn_indexes": [1], "window_size": 2}, "prompt_encoder_config": {"hidden_size": 16},
             "mask_decoder_config": {"hidden_size": 16, "iou_head_hidden_dim": 16}}, input_points=floats(1, 2, 2)),
        case("VideoMAEForVideoClassification", {"num_frames": 4}, pixel_values=floats(4, 3, IMAGE, IMAGE)),
        case("TimesformerForVideoClassification", {"num_frames": 2}, pixel_values=floats(2, 3, IMAGE, IMAGE)),
        case("VivitForVideoClassification", {"num_frames": 4, "tubelet_size": [2, 8, 8]},
             pixel_values=floats(4, 3, IMAGE, IMAGE)),
    ],
    "Audio": [
        case("WhisperForConditionalGeneration", {"max_source_positions": 10, "pad_token_id": 5}),
        case("Wav2Vec2ForCTC"), case("HubertForCTC"), case("WavLMForCTC"), case("UniSpeechForCTC"),
        case("Data2VecAudioForCTC"), case("SEWForCTC"), case("Wav2Vec2ConformerForCTC", {"vocab_size": 31}),
        case("Wav2Vec2BertForCTC", {"vocab_size": 31, "feature_projection_input_dim": 16},
             input_features=floats(20, 16)),
        case("Speech2TextForConditionalGeneration", {"input_feat_per_channel": 16, "conv_channels": 16},
             input_features=floats(20, 16)),
        case("ASTForAudioClassification", {"max_length": 40}, input_values=floats(40, 16)),
        case("EncodecModel", CODEC, input_values=floats(1, 64)), case("SpeechT5ForSpeechToText"),
        case("ClapModel", {"audio_config": {"spec_size": 32, "num_mel_bins": 8, "patch_embeds_hidden_size": 8,
             "depths": [1, 1], "num_attention_heads": [2, 4], "hidden_size": 16, "num_hidden_layers": 2,
             "window_size": 4}}, input_features=floats(1, 32, 8)),
        case("MusicgenForConditionalGeneration", {"audio_encoder": CODEC, "decoder": {"vocab_size": 12,
             "pad_token_id": 11, "num_codebooks": 2}},
             decoder_input_ids=lambda g: torch.randint(0, 11, (BATCH * 2, 5), generator=g)),
        case("SeamlessM4TForTextToText"),
    ],
    "Images, texts and pages": [
        case("CLIPModel", pixel_values=PIXELS), case("ChineseCLIPModel", pixel_values=PIXELS),
        case("AltCLIPModel", pixel_values=PIXELS), case("SiglipModel", pixel_values=PIXELS),
        case("BlipForConditionalGeneration", pixel_values=PIXELS, input_ids=ids()),
        case("Blip2ForConditionalGeneration", {"image_token_index": 60,
             "qformer_config": {"cross_attention_frequency": 1}}, input_ids=ids_with((60, 3))),
        case("LlavaForConditionalGeneration", {"vision_config": {"num_hidden_layers": 2}}, pixel_values=PIXELS,
             input_ids=ids_with((60, 16), tokens=20)),
        case("Qwen2VLForConditionalGeneration", ROPE_3D, **PATCHES, input_ids=ids_with((57, 1), (60, 4), (56, 1)),
             mm_token_type_ids=IMAGE_TOKENS),
        case("Qwen2_5_VLForConditionalGeneration", {**ROPE_3D, "vision_config": {"fullatt_block_indexes": [1],
             "window_size": 16}}, **PATCHES, input_ids=ids_with((57, 1), (60, 4), (56, 1)),
             mm_token_type_ids=IMAGE_TOKENS),
        case("Qwen3VLForConditionalGeneration", {**ROPE_3D, "vision_config": {"deepstack_visual_indexes": [1]}},
             **PATCHES, input_ids=ids_with((57, 1), (60, 4), (56, 1)), mm_token_type_ids=IMAGE_TOKENS),
        case("Idefics3ForConditionalGeneration", pixel_values=floats(1, 3, IMAGE, IMAGE), input_ids=ids_with((60, 4))),
        case("IdeficsForVisionText2Text", {"freeze_text_layers": False}, pixel_values=floats(1, 3, IMAGE, IMAGE),
             image_attention_mask=constant(1, TOKENS, 1)),
        case("PaliGemmaForConditionalGeneration", {"vision_config": {"projection_dim": 32}, "projection_dim": 32},
             pixel_values=PIXELS, input_ids=ids_with((60, 16), tokens=20)),
        case("Gemma3ForConditionalGeneration", {"mm_tokens_per_image": 4}, pixel_values=PIXELS,
             input_ids=ids_with((60, 4))),
        case("InternVLForConditionalGeneration", {"vision_config": {"image_size": [IMAGE, IMAGE],
             "patch_size": [8, 8]}}, pixel_values=PIXELS, input_ids=ids_with((60, 4))),
        case("MllamaForCausalLM"), case("FlavaModel", pixel_values=PIXELS),
        case("ViltModel", pixel_values=None, image_embeds=floats(4, 32), pixel_mask=constant(1, 2, 2)),
        case("GitForCausalLM", pixel_values=PIXELS), case("OwlViTModel", pixel_values=PIXELS, attention_mask=MASK),
        case("LayoutLMForMaskedLM", bbox=boxes),
        case("LayoutLMv3Model", {"coordinate_size": 5, "shape_size": 6, "input_size": IMAGE}, bbox=boxes,
             pixel_values=PIXELS),
        case("LiltModel", {"hidden_size": 48}, bbox=boxes),
        case("BrosModel", {"hidden_size": 64}, bbox=floats(TOKENS, 4)),
        case("UdopForConditionalGeneration", bbox=floats(TOKENS, 4)),
        case("LxmertModel", {"l_layers": 1, "x_layers": 1, "r_layers": 1}, visual_feats=floats(3, 6),
             visual_pos=floats(3, 4)),
        case("VisualBertModel", {"visual_embedding_dim": 6}, visual_embeds=floats(3, 6)),
        case("VisionEncoderDecoderModel", {"encoder": {"model_type": "donut-swin", **WINDOWS}}),
        case("TrOCRForCausalLM"), case("VisionTextDualEncoderModel", pixel_values=PIXELS),
    ],
    "Series and decisions": [
        case("PatchTSTForPrediction", {"num_input_channels": 2, "patch_length": 4, "patch_stride": 4},
             past_values=floats(32, 2)),
        case("PatchTSMixerForPrediction", {"num_input_channels": 2}, past_values=floats(32, 2)),
        case("InformerModel", {**SERIES, "attention_type": "full"}, **HISTORY),
        case("AutoformerModel", mixes=True, sizes={**SERIES, "label_length": 4, "moving_average": 3}, **HISTORY),
        case("TimeSeriesTransformerModel", SERIES, **HISTORY),
        case("DecisionTransformerModel", {"state_dim": 5, "act_dim": 3, "max_ep_len": 20}, states=floats(4, 5),
             actions=floats(4, 3), rewards=floats(4, 1), returns_to_go=floats(4, 1), timesteps=ints(20, 4),
             attention_mask=constant(1, 4)),
    ],
    "Diffusion": [
        diffusion("UNet2DModel", {**UNET, "sample_size": 16, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                  "up_block_types": ("AttnUpBlock2D", "UpBlock2D"), "attention_head_dim": 4}, sample=floats(3, 16, 16),
                  timestep=TIMES),
        diffusion("UNet2DConditionModel", {**UNET, **CROSS, "sample_size": 16,
                  "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}, sample=LATENT, timestep=TIMES,
                  encoder_hidden_states=floats(5, 16)),
        diffusion("UNet3DConditionModel", {**UNET, "cross_attention_dim": 16, "attention_head_dim": 4,
                  "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
                  "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D")}, sample=floats(4, 2, 8, 8), timestep=TIMES,
                  encoder_hidden_states=floats(5, 16)),
        diffusion("UNet1DModel", {"block_out_channels": (8, 8, 16, 16), "in_channels": 6, "out_channels": 6,
                  "time_embedding_type": "positional", "use_timestep_embedding": True, "flip_sin_to_cos": False,
                  "freq_shift": 1.0, "layers_per_block": 1, "out_block_type": "OutConv1DBlock",
                  "mid_block_type": "MidResTemporalBlock1D", "down_block_types": ("DownResnetBlock1D",) * 4,
                  "up_block_types": ("UpResnetBlock1D",) * 3, "act_fn": "swish"}, sample=floats(6, 16),
                  timestep=TIMES),
        diffusion("ControlNetModel", {**UNET, **CROSS, "conditioning_embedding_out_channels": (4, 8)}, sample=LATENT,
                  timestep=TIMES, encoder_hidden_states=floats(5, 16), controlnet_cond=floats(3, 32, 32)),
        diffusion("DiTTransformer2DModel", {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
                  "sample_size": 8, "norm_num_groups": 4, "num_embeds_ada_norm": 10}, hidden_states=floats(4, 8, 8),
                  timestep=TIMES, class_labels=ints(10), units=("Attention", "FeedForward")),
        diffusion("PixArtTransformer2DModel", {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
                  "sample_size": 8, "cross_attention_dim": 16, "caption_channels": 12, "norm_num_groups": 4},
                  hidden_states=floats(4, 8, 8), timestep=TIMES, encoder_hidden_states=floats(5, 12),
                  added_cond_kwargs={"resolution": None, "aspect_ratio": None}),
        diffusion("SD3Transformer2DModel", {"sample_size": 8, "in_channels": 4, "num_layers": 2,
                  "attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 12,
                  "caption_projection_dim": 16, "pooled_projection_dim": 10, "out_channels": 4},
                  hidden_states=floats(4, 8, 8), timestep=TIMES, encoder_hidden_states=floats(5, 12),
                  pooled_projections=floats(10)),
        diffusion("FluxTransformer2DModel", {"in_channels": 4, "num_layers": 1, "num_single_layers": 1,
                  "attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": 12,
                  "pooled_projection_dim": 10, "axes_dims_rope": (2, 2, 4)}, hidden_states=floats(16, 4),
                  encoder_hidden_states=floats(5, 12), pooled_projections=floats(10), timestep=floats(),
                  img_ids=torch.zeros(16, 3), txt_ids=torch.zeros(5, 3)),
        diffusion("AutoencoderKL", {**UNET, "down_block_types": ("DownEncoderBlock2D",) * 2,
                  "up_block_types": ("UpDecoderBlock2D",) * 2}, sample=floats(3, 16, 16)),
        diffusion("VQModel", {**UNET, "down_block_types": ("DownEncoderBlock2D",) * 2,
                  "up_block_types": ("UpDecoderBlock2D",) * 2, "num_vq_embeddings": 12, "vq_embed_dim": 3},
                  sample=floats(3, 16, 16)),
        diffusion("Transformer2DModel", {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 8,
                  "norm_num_groups": 4, "cross_attention_dim": 16}, hidden_states=floats(8, 8, 8),
                  encoder_hidden_states=floats(5, 16)),
        diffusion("AuraFlowTransformer2DModel", {"sample_size": 8, "in_channels": 4, "num_mmdit_layers": 1,
                  "num_single_dit_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2,
                  "joint_attention_dim": 12, "caption_projection_dim": 16, "pos_embed_max_size": 64},
                  hidden_states=floats(4, 8, 8), encoder_hidden_states=floats(5, 12), timestep=floats()),
        diffusion("HunyuanDiT2DModel", {"sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2,
                  "attention_head_dim": 8, "num_attention_heads": 2, "cross_attention_dim": 12,
                  "cross_attention_dim_t5": 16, "pooled_projection_dim": 6, "hidden_size": 16, "text_len": 4,
                  "text_len_t5": 5}, hidden_states=floats(4, 8, 8), timestep=floats(),
                  encoder_hidden_states=floats(4, 12), text_embedding_mask=constant(1, 4),
                  encoder_hidden_states_t5=floats(5, 16), text_embedding_mask_t5=constant(1, 5),
                  image_meta_size=floats(6), style=ints(1), image_rotary_emb=(torch.ones(16, 8), torch.zeros(16, 8))),
        diffusion("SanaTransformer2DModel", {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2,
                  "attention_head_dim": 8, "num_layers": 2, "num_cross_attention_heads": 2,
                  "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 12, "sample_size": 8},
                  hidden_states=floats(4, 8, 8), encoder_hidden_states=floats(5, 12), timestep=TIMES),
        diffusion("WanTransformer3DModel", {"num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4,
                  "out_channels": 4, "text_dim": 12, "freq_dim": 8, "ffn_dim": 20, "num_layers": 2,
                  "rope_max_seq_len": 32}, hidden_states=floats(4, 2, 8, 8), timestep=TIMES,
                  encoder_hidden_states=floats(5, 12)),
        diffusion("CogVideoXTransformer3DModel", {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4,
                  "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 12, "num_layers": 2, "sample_width": 8,
                  "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 5}, hidden_states=floats(2, 4, 8, 8),
                  encoder_hidden_states=floats(5, 12), timestep=TIMES),
        diffusion("PriorTransformer", {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2,
                  "embedding_dim": 12, "num_embeddings": 5}, hidden_states=floats(12), timestep=TIMES,
                  proj_embedding=floats(12), encoder_hidden_states=floats(5, 12)),
        diffusion("UNetSpatioTemporalConditionModel", {"block_out_channels": (32, 64), "layers_per_block": 1,
                  "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
                  "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
                  "cross_attention_dim": 16, "num_attention_heads": (2, 4), "addition_time_embed_dim": 8,
                  "projection_class_embeddings_input_dim": 24, "in_channels": 8}, sample=floats(2, 8, 8, 8),
                  timestep=TIMES, encoder_hidden_states=floats(1, 16), added_time_ids=floats(3)),
        diffusion("AutoencoderTiny", {"encoder_block_out_channels": (8, 8, 8, 8),
                  "decoder_block_out_channels": (8, 8, 8, 8)}, sample=floats(3, 16, 16)),
    ],
}
# fmt: on
CASES = {c.model: c for cases in FAMILIES.values() for c in cases}

REFUSED = {  # class -> the case, its arguments in words, and the way out
    "BigBirdForMaskedLM": (case("BigBirdForMaskedLM"), "a short sequence", '`attention_type="original_full"`'),
    "InformerModel": (case("InformerModel", SERIES, **HISTORY), '`attention_type="prob"`', '`attention_type="full"`'),
    "ViltModel": (case("ViltModel", pixel_values=PIXELS), "`pixel_values`", "`image_embeds`"),
    "ViTMAEForPreTraining": (case("ViTMAEForPreTraining", MAE), "`pixel_values`", "`noise`, drawn by a key"),
}
