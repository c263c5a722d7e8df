"""`adapter_config.json`, PEFT's description of adapters: read as fields of `lora.Config`, and written.

Names and meanings of its fields: peft 0.21, `peft.LoraConfig` and `peft.tuners.tuners_utils`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from fshard._core.files.url import AnyPath
from fshard.errors import ShardingError, fail, raise_all
from fshard.lora.config import ending, outer_names

# The layers that PEFT adapts if the config names none, by the model_type of the base.
_QV = ("q_proj", "v_proj")
_FUSED = ("query_key_value",)
DEFAULT_TARGETS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("t5", "mt5"), ("q", "v")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), ("c_attn",)),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "electra", "layoutlm"), ("query", "value")),
    **dict.fromkeys(("bloom", "gpt_neox", "falcon", "chatglm"), _FUSED),
    **dict.fromkeys(("bart", "opt", "gptj", "gpt_neo", "llama", "llama4", "mistral", "mixtral", "stablelm", "gemma",
                     "gemma2", "gemma3_text", "qwen2", "qwen3"), _QV),
    "blip-2": ("q", "v", "q_proj", "v_proj"), "codegen": ("qkv_proj",), "mpt": ("Wqkv",),
    "deberta": ("in_proj",), "deberta-v2": ("query_proj", "value_proj"), "phi": (*_QV, "fc1", "fc2"),
}  # fmt: skip

# Fields that say something about the adapters without changing what they compute.
KEPT = ("auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type")
# Fields of methods that are not supported, with the values under which they do nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (), "arrow_config": (), "corda_config": (), "kasa_config": (),
    "layer_replication": ([],), "loftq_config": ({},), "lora_bias": (False,),
    "lora_ga_config": (), "megatron_config": (), "monteclora_config": (),
    "trainable_token_indices": ([], {}), "use_bdlora": (False,), "use_qalora": (False,), "velora_config": (),
}  # fmt: skip
# Fields of an option that is off, of how values began, and of how PEFT runs. `merge_weights` is of its first versions.
_WITHOUT_EFFECT = ("eva_config", "megatron_core", "merge_weights", "qalora_group_size", "runtime_config")
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


_WRAPPED = """apply, tree = fs.defer(lambda: peft.get_peft_model(model, config)), which has every method of peft;
    fs.peft.weights(folder, tree, of=apply)"""
_MAX_NAMES, _MAX_SAVED = 1_000, 100  # names of a list, or patterns
_NAMES = f"at most {_MAX_NAMES:,} names, or a regular expression"


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, kinds) and (bool in kinds or not isinstance(x, bool))


def _strings(x: Any) -> bool:
    return isinstance(x, list) and len(x) <= _MAX_NAMES and all(isinstance(s, str) for s in x)


def _patterns(x: Any) -> bool:
    return isinstance(x, dict) and len(x) <= _MAX_NAMES


def _number(x: Any) -> bool:
    return _is(int, float)(x) and abs(x) < 1e300


# Fields with a meaning here: the test of a value, and its words.
_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "r": (lambda x: _is(int)(x) and 0 < x < 1 << 31, "a number of 1 or more"),
    "lora_alpha": (_number, "a finite number"),
    "lora_dropout": (lambda x: _is(int, float)(x) and 0 <= x < 1, "0 or more, less than 1"),
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out", "ensure_weight_tying"), (_is(bool), "true or false")),
    "bias": (lambda x: x in ("none", "all", "lora_only"), "none, all or lora_only"),
    **dict.fromkeys(("target_modules", "exclude_modules"), (lambda x: isinstance(x, str) or _strings(x), _NAMES)),
    "target_parameters": (_strings, _NAMES),
    "modules_to_save": (lambda x: _strings(x) and len(x) <= _MAX_SAVED, f"at most {_MAX_SAVED} names"),
    "rank_pattern": (lambda x: _patterns(x) and all(_is(int)(n) and 0 < n < 1 << 31 for n in x.values()),
                     "a number of 1 or more for each pattern"),
    "alpha_pattern": (lambda x: _patterns(x) and all(map(_number, x.values())), "a finite number for each pattern"),
    "layers_to_transform": (lambda x: _is(int)(x) or (isinstance(x, list) and all(map(_is(int), x))), "numbers"),
    "layers_pattern": (lambda x: isinstance(x, str) or _strings(x), "names"),
    "init_lora_weights": (lambda x: isinstance(x, (bool, str)), "true, false or the name of an initialization"),
}  # fmt: skip
_IA3_FIELDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **{name: _FIELDS[name] for name in ("target_modules", "exclude_modules", "modules_to_save", "fan_in_fan_out")},
    "feedforward_modules": _FIELDS["exclude_modules"],
    "init_ia3_weights": (_is(bool), "true or false"),
}
_NULLABLE = ("target_modules", "target_parameters", "exclude_modules", "modules_to_save", "rank_pattern",
             "alpha_pattern", "layers_to_transform", "layers_pattern", "init_lora_weights", "feedforward_modules",
             "ensure_weight_tying")  # fmt: skip


def config_fields(
    path: AnyPath, contents: Mapping[str, Any], names: Sequence[str], *, model_type: str | None = None, prefix: str = ""
) -> dict[str, Any]:
    """Return the fields of `lora.Config`, or of `ia3.Config`, for the contents of `adapter_config.json`.

    `fan_in_fan_out` has no effect: the layer itself says how it stores its matrix, as in PEFT.

    Args:
        path: the file, for errors.
        names: of the modules of the base; `layers_to_transform` chooses some of them.
        model_type: of the base, for a config without target_modules.
        prefix: what names of modules here begin with, and names in the config may lack: `"transformer."`.
    """
    raise_all(_errors(path, contents, model_type, [*names, *(prefix + name for name in names if prefix)]))

    def of(name: str, default: Any) -> Any:
        return default if contents.get(name) is None else contents[name]

    chosen = {"targets": _with_prefix(of("target_modules", ()), prefix),
              "exclude": _with_prefix(of("exclude_modules", ()), prefix),
              "modules_to_save": tuple(of("modules_to_save", ()))}  # fmt: skip
    if contents["peft_type"] == "IA3":
        return {**chosen, "feedforward": _with_prefix(of("feedforward_modules", ()), prefix)}
    targets = of("target_modules", DEFAULT_TARGETS.get(str(model_type), ()))
    layers = of("layers_to_transform", [])
    layers = {layers} if isinstance(layers, int) else set(layers)
    if layers:
        patterns = of("layers_pattern", [])
        patterns = [patterns] if isinstance(patterns, str) else patterns
        chosen_layers = [n for n in names if n in targets or (selects(targets, n) and in_layers(n, layers, patterns))]
        targets = only(chosen_layers, names, selects)
    return {
        "rank": of("r", 8), "alpha": of("lora_alpha", 8), "dropout": float(of("lora_dropout", 0.0)),
        "rslora": of("use_rslora", False), "dora": of("use_dora", False), "bias": of("bias", "none"),
        **chosen, "targets": _with_prefix(targets, prefix), "parameters": tuple(of("target_parameters", ())),
        "ranks": dict(of("rank_pattern", {})), "alphas": dict(of("alpha_pattern", {})),
        "init": {"false": "random", "gaussian": "gaussian"}.get(str(of("init_lora_weights", True)).lower(), "kaiming"),
    }  # fmt: skip


def _errors(
    path: AnyPath, contents: Mapping[str, Any], model_type: str | None, names: Sequence[str]
) -> list[ShardingError]:
    kind = contents.get("peft_type")
    if kind not in ("LORA", "IA3"):
        return [fail(f"{path}: peft_type is {kind!r}, and neither 'LORA' nor 'IA3'", fix=_WRAPPED)]
    errors = []
    for name, value in sorted(contents.items()):
        test, words = (_FIELDS if kind == "LORA" else _IA3_FIELDS).get(name, (None, ""))
        if name in (*KEPT, *_WITHOUT_EFFECT, "inference_mode", "peft_type") or (value is None and name in _NULLABLE):
            continue
        if test is not None:
            if not test(value):
                errors.append(fail(f"{path}: {name} is {value!r}", fix=words))
        elif kind == "LORA" and name in _NEUTRAL:
            if value is not None and value not in _NEUTRAL[name]:
                errors.append(fail(f"{path}: {name} is not supported next to a tree", f"it is {value!r}", fix=_WRAPPED))
        elif value is not None:
            errors.append(fail(f"{path}: {name} is not a field of {kind} that is known here", f"it is {value!r}",
                               fix="take it out of the file if it changes nothing"))  # fmt: skip
    start = contents.get("init_lora_weights")
    if isinstance(start, str) and start.startswith(_CHANGE_THE_BASE):
        errors.append(fail(f"{path}: init_lora_weights is {start!r}, which changes the weights of the base too",
                           fix="in peft, save_pretrained(folder, path_initial_model_for_weight_conversion=...) writes "
                               "adapters of the base as it is"))  # fmt: skip
    elif isinstance(start, str) and start.lower() not in ("gaussian", "eva", "orthogonal"):
        errors.append(fail(f"{path}: init_lora_weights is {start!r}, which is not known here",
                           fix="true, if it says only how the values began: they are in the file"))  # fmt: skip
    targets, layers, patterns = (contents.get(k) for k in ("target_modules", "layers_to_transform", "layers_pattern"))
    has_default = kind == "LORA" and model_type in DEFAULT_TARGETS
    if targets is None and not contents.get("target_parameters") and not has_default:
        errors.append(fail(f"{path}: target_modules is null, and there is no default for the model type {model_type!r}",
                           fix="name the adapted layers in it"))  # fmt: skip
    if isinstance(targets, str) and layers not in (None, []):
        errors.append(fail(f"{path}: layers_to_transform is {layers!r}, and target_modules a regular expression",
                           fix="a list of names in target_modules, or the layers in the expression"))  # fmt: skip
    if patterns and layers in (None, []):
        errors.append(fail(f"{path}: layers_pattern is {patterns!r}, without layers_to_transform"))
    if not errors:  # of the types of the values
        whole = map(contents.get, ("target_modules", "exclude_modules", "feedforward_modules"))
        within = [patterns] if isinstance(patterns, str) else patterns or []
        ends = [x for name in ("rank_pattern", "alpha_pattern") for x in contents.get(name) or []]
        uses = [*((x, "fullmatch", x) for x in whole if isinstance(x, str)),
                *((x, "match", _in_layer(x)) for x in within), *((x, "match", ending(x)) for x in ends)]  # fmt: skip
        _check_time(path, uses, names)
        for text, _, expression in uses:
            try:
                re.compile(expression)
            except (re.error, OverflowError, RecursionError) as e:
                errors.append(fail(f"{path}: {text!r:.200} is not a regular expression", str(e)))
    return errors


# Matches expressions with names, and prints the number of each before it begins. One that is none is found later.
_MATCH = """
import contextlib, json, re, signal, sys
signal.setitimer(signal.ITIMER_VIRTUAL, 0.4)
uses, names = json.load(sys.stdin)
for i, (_, how, expression) in enumerate(uses):
    print(i, flush=True)
    with contextlib.suppress(re.error, OverflowError, RecursionError):
        for name in names:
            getattr(re, how)(expression, name)
"""


def _check_time(path: AnyPath, uses: Sequence[tuple[str, str, str]], names: Sequence[str]) -> None:
    """Raise ShardingError for an expression that takes more than 0.4 s of CPU time for all names.

    `(a+)+b` takes 2^n steps for a name of n letters, and `re` cannot be stopped. So expressions of several operators
    are first matched in another process, which can. A use is the text in the file, the function and its argument.
    """
    uses = [use for use in uses if len(re.findall(r"[][*+?{|(\\]", use[0])) > 1]
    if not uses:
        return
    done = subprocess.run([sys.executable, "-I", "-S", "-c", _MATCH], input=json.dumps([uses, names]), text=True,
                          capture_output=True, check=False)  # fmt: skip
    if done.returncode:
        number = int((done.stdout.split() or ["0"])[-1])
        raise fail(f"{path}: {uses[number][0]!r:.200} takes too long to match",
                   f"more than 0.4 s of CPU time, for the names of {len(names)} modules",
                   *done.stderr.splitlines()[-1:], fix="a list of names; or an expression without repeats of "
                   "repeats, as in (a+)+")  # fmt: skip


def _in_layer(pattern: str) -> str:
    return rf"(?:^|.*?\.){pattern}\.(?P<layer>\d+)\."


def in_layers(name: str, layers: Container[int], patterns: Sequence[str]) -> bool:
    """Return whether PEFT counts a module to some layers.

    The index of its layer is the first number in its name after two parts or more, or after a pattern: the first of
    `patterns` that a number follows.

    >>> [in_layers(f"model.layers.{i}.self_attn.q_proj", [1], []) for i in (0, 1, 11)]
    [False, True, False]
    """
    found = (re.match(_in_layer(p), name) for p in patterns)
    match = next(filter(None, found), None) if patterns else re.match(r".*?\.[^.]*\.(?P<layer>\d+)\.", name)
    return match is not None and int(match["layer"]) in layers


def _with_prefix(chosen: str | Sequence[str], prefix: str) -> Any:
    """Return the modules that are chosen, as the names with a prefix are: a suffix has none."""
    if not isinstance(chosen, str):
        return tuple(chosen)
    return chosen if not prefix or chosen == "all-linear" else f"(?:{re.escape(prefix)})?(?:{chosen})"


def selects(chosen: str | Sequence[str], name: str) -> bool:
    r"""Return whether PEFT selects a module: by a regular expression for all of its name, or by the end of it.

    >>> selects(["c_attn"], "h.0.attn.c_attn"), selects(r"h\.[01]\..*", "h.2.attn.c_attn")
    (True, False)
    """
    if isinstance(chosen, str):
        return re.fullmatch(chosen, name) is not None
    return any(name == end or name.endswith(f".{end}") for end in chosen)


def only(chosen: list[str], names: Sequence[str], selected: Callable[[list[str], str], bool]) -> str | list[str]:
    r"""Return some of the modules as PEFT selects them and no others: a list; or an expression, if a list selects more.

    >>> only(["q"], ["q", "k"], selects), only(["q"], ["q", "h.q"], selects)
    (['q'], 'q')
    """
    return chosen if [n for n in names if selected(chosen, n)] == chosen else "|".join(map(re.escape, chosen))


def saves(chosen: Sequence[str], name: str) -> bool:
    """Return whether a module is one that PEFT trains in full, or inside of it: by the last letters of its name.

    >>> saves(["head"], "lm_head"), saves(["1.mlp"], "h.1.mlp.up")
    (True, True)
    """
    return any(outer.endswith(tuple(chosen)) for outer in outer_names(name))
