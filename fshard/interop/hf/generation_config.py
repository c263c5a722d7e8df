"""Options of generation from a `generation_config.json`, or from the config of a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

from fshard._core.files.io import StrPath
from fshard._core.files.url import as_path
from fshard.errors import checked, fail, must_be, raise_all

from .folder import CONFIG, GENERATION_CONFIG, config_of, read_json

_OURS = {  # their name -> ours, and the values that change nothing
    "eos_token_id": ("eos", ()),
    "pad_token_id": ("pad", ()),
    "decoder_start_token_id": ("decoder_start", ()),
    "forced_bos_token_id": ("forced_bos", ()),
    "forced_eos_token_id": ("forced_eos", ()),
    "min_new_tokens": ("min_new", (0,)),
    "repetition_penalty": ("repetition_penalty", (1.0,)),
    "no_repeat_ngram_size": ("no_repeat_ngram", (0,)),
}
_OF_DRAWS = {"top_k": (0,), "top_p": (1.0,), "min_p": (), "typical_p": (1.0,)}
_OF_BEAMS = {"length_penalty": (1.0,), "early_stopping": (False,)}
# Lengths are arguments of the caller. The others change no token, or only with options of `_REFUSED`.
_IGNORED = {
    "do_sample", "temperature", "num_beams", "min_length", "max_length", "max_new_tokens", "bos_token_id", "use_cache",
    "cache_implementation", "cache_config", "max_cache_len", "output_attentions", "output_hidden_states",
    "output_scores", "output_logits", "return_dict_in_generate", "compile_config", "disable_compile",
    "continuous_batching_config", "prefill_chunk_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size",
    "low_memory", "transformers_version", "_from_model_config", "_commit_hash",
}  # fmt: skip
_REFUSED = {  # options that are not here, and the values that change nothing, besides None, False and empty ones
    "bad_words_ids": (), "begin_suppress_tokens": (), "constraints": (), "diversity_penalty": (0.0,),
    "dola_layers": (), "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1.0,),
    "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,), "exponential_decay_length_penalty": (), "force_words_ids": (),
    "guidance_scale": (1.0,), "max_time": (), "num_beam_groups": (1,), "num_return_sequences": (1,),
    "penalty_alpha": (0.0,), "prompt_lookup_num_tokens": (), "remove_invalid_values": (), "renormalize_logits": (),
    "sequence_bias": (), "stop_strings": (), "suppress_tokens": (), "token_healing": (), "top_h": (),
    "watermarking_config": (),
}  # fmt: skip


@checked
def generation_options(source: StrPath | Any) -> dict[str, Any]:
    """Return the options of `generate` that a model was published with, as keyword arguments.

    `source`: a folder with generation_config.json, or else config.json; or the contents of one; or an object with a
    `to_dict`, as `model.generation_config` is. With `do_sample`, the result has a temperature, and `generate` needs a
    key. Lengths are arguments of the caller: `new` counts new tokens, and `max_length` the prompt too.

    >>> generation_options({"eos_token_id": [2, 3], "do_sample": True, "top_p": 0.9})
    {'eos': [2, 3], 'temperature': 1.0, 'top_k': 50, 'top_p': 0.9}

    Raises ShardingError listing every option that fshard does not have, and every one that has no known name.
    """
    where, config = _contents(source)
    is_model = "model_type" in config  # whose other fields are the model's

    def value(name: str, nothing: tuple[Any, ...] = ()) -> Any:
        x = _tokens(config.get(name)) if name.endswith("_token_id") else config.get(name)
        return None if x is None or x in nothing or x is False or (isinstance(x, (list, dict)) and not x) else x

    wrong = [name for name in ("num_beams", "min_length") if not isinstance(config.get(name), (int, NoneType))]
    raise_all([must_be(f"{where}: {name}", "an int", config[name], "correct the file") for name in wrong])
    errors = [fail(f"{where}: {name}={value(name, nothing)!r} is not an option here",
                   fix=f"generate without it: pass the contents of the file without {name}")
              for name, nothing in _REFUSED.items() if value(name, nothing) is not None]  # fmt: skip
    known = {*_OURS, *_OF_DRAWS, *_OF_BEAMS, *_IGNORED, *_REFUSED}
    if not is_model:
        errors += [fail(f"{where}: {name}={x!r} is not an option of generation",
                        fix=f"pass the contents of the file without {name}")
                   for name, x in config.items() if name not in known and x is not None]  # fmt: skip
    out = {ours: value(name, nothing) for name, (ours, nothing) in _OURS.items()}
    out["min_new"] = _min_new(config, out, where, errors)
    raise_all(errors)
    if out["eos"] is None:
        out["pad"] = out["min_new"] = None  # nothing ends
    if config.get("do_sample"):
        out["temperature"] = 1.0 if config.get("temperature") is None else float(config["temperature"])
        top_k = {"top_k": config["top_k"] if config.get("top_k") is not None else 50}  # the default of transformers
        out |= {name: None if x in nothing else x
                for name, nothing in _OF_DRAWS.items() for x in [{**config, **top_k}.get(name)]}  # fmt: skip
    if (config.get("num_beams") or 1) > 1:
        out["beams"] = config["num_beams"]
        out |= {name: value(name, nothing) for name, nothing in _OF_BEAMS.items()}
    return {name: x for name, x in out.items() if x is not None}


def _tokens(x: Any) -> Any:
    """Return a token, or several; old files have -1 for none."""
    if isinstance(x, list):
        return [token for token in x if _tokens(token) is not None]
    return None if isinstance(x, int) and x < 0 else x


def _min_new(config: Mapping[str, Any], out: Mapping[str, Any], where: str, errors: list[Any]) -> int | None:
    """Return the number of new tokens before which a sequence does not end."""
    least = int(config.get("min_length") or 0)
    if out["min_new"] is not None or least <= 0:
        return out["min_new"]  # type: ignore[no-any-return]
    if out["decoder_start"] is None:
        errors.append(fail(f"{where}: min_length={least} counts the prompt, and min_new the new tokens",
                           fix="pass the contents of the file with min_new_tokens in its place"))  # fmt: skip
        return None
    return least - 1 or None  # of an encoder-decoder, whose first token is the start


def _contents(source: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(source, Mapping):
        return "generation_options", source
    if hasattr(source, "to_dict"):
        return f"generation_options: {type(source).__name__}", source.to_dict()
    if not isinstance(source, (str, Path)):
        raise must_be("generation_options: source", "a folder, a dict or a GenerationConfig", source)
    path = as_path(source) / GENERATION_CONFIG
    return (str(path), read_json(path)) if path.is_file() else (str(as_path(source) / CONFIG), config_of(source))
