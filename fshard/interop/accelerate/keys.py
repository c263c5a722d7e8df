"""The keys of an Accelerate file, and the meaning of each here: translated, without effect, or refused.

`KEYS` has every key of Accelerate 1.15, and the keys of older versions that old files have. Source of the keys and of
their defaults: `accelerate/commands/config/config_args.py`, `commands/launch.py`, `utils/launch.py` and the class
`FullyShardedDataParallelPlugin` of `utils/dataclasses.py`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fshard.errors import ShardingError, fail, raise_all
from fshard.schedule.strategy import STRATEGIES

from .config_file import SECTIONS, Entry

NO_SPLIT_MODULES = "_no_split_modules"
_MAX_RANKS, _MAX_ERRORS = 1 << 20, 50
_TYPES = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP")
_DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# --- the kinds of values ----------------------------------------------------------------------------------------

Parse = Callable[[Any], Any]  # value in the file -> value; raises ValueError with the values that are accepted
_WORDS = {"yes": True, "true": True, "on": True, "y": True, "t": True, "1": True,
          "no": False, "false": False, "off": False, "n": False, "f": False, "0": False}  # fmt: skip


def _bool(x: Any) -> bool:
    value = _WORDS.get(str(x).lower())
    if value is None:
        raise ValueError("true or false")
    return value


def _int(least: int, most: int = 1 << 53) -> Parse:
    def parse(x: Any) -> int:
        try:
            value = float(x)  # YAML reads 1e8 as a text
        except (TypeError, ValueError, OverflowError):
            value = float("inf") if isinstance(x, int) else -0.5
        if value > most:
            raise ValueError(f"an integer of {most:,} at most")
        if isinstance(x, bool) or not value.is_integer() or value < least:
            raise ValueError(f"an integer of {least} or more")
        return int(value)

    return parse


def _one_of(*names: str, first: int | None = None, also: Mapping[str, str] | None = None) -> Parse:
    """Accept one of the names in any case, or its number, counted from `first`."""

    def parse(x: Any) -> str:
        upper = str(x).upper()
        by_number = {str(i): name for i, name in enumerate(names, first)} if first is not None else {}
        value = {**{name.upper(): name for name in names}, **by_number, **(also or {})}.get(upper)
        if value is None or isinstance(x, bool):
            numbers = f", or {first} to {first + len(names) - 1}" if first is not None else ""
            raise ValueError(f"one of {', '.join(names)}{numbers}")
        return value

    return parse


def _text(x: Any) -> str:
    if not isinstance(x, str) or not x.strip():
        raise ValueError("a text")
    return x.strip()


def _names(x: Any) -> tuple[str, ...]:
    parts = x if isinstance(x, list) else str(x).split(",")
    names = tuple(str(part).strip() for part in parts)
    if not names or not all(name.isidentifier() for name in names):
        raise ValueError("names of classes, as T5Block or BertLayer,BertEmbeddings")
    return names


def _gpu_ids(x: Any) -> tuple[int, ...] | None:
    parts = [str(part).strip() for part in (x if isinstance(x, list) else str(x).split(","))]
    if parts in (["all"], ["ALL"]):
        return None
    if not all(part.isdecimal() for part in parts) or len(set(parts)) < len(parts):
        raise ValueError("all, or different numbers, as 0,1")
    return tuple(map(int, parts))


def _raw(x: Any) -> Any:
    return x


_strategy = _one_of(*STRATEGIES, first=1, also={"HYBRID_SHARD_ZERO2": "_HYBRID_SHARD_ZERO2"})
_prefetch = _one_of("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", first=1)

# --- the keys ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """A key: its values, its meaning here in words, and the section of the file that it is in.

    `effect`: "translated"; "none", where a value that is not in `quiet` gives a warning; or "refused", where it is
    an error.
    """

    parse: Parse
    meaning: str
    effect: str = "translated"
    quiet: tuple[Any, ...] = ()
    section: str = ""


def _unused(parse: Parse, meaning: str, *quiet: Any) -> Key:
    return Key(parse, meaning, "none", quiet)


_TPU = "there are no TPUs here"
_TABLES: tuple[tuple[str, dict[str, Key]], ...] = (
    # the machines; numbers
    ("", {
        "compute_environment": Key(_one_of("LOCAL_MACHINE"), "only LOCAL_MACHINE"),
        "distributed_type": Key(_one_of(*_TYPES), "NO is one process; MULTI_CPU, MULTI_GPU: NO_SHARD; FSDP: "
                                                  "fsdp_config"),
        "num_processes": Key(_int(-1, _MAX_RANKS), "`processes`: ranks of all machines; -1: say it to `launch`"),
        "num_machines": Key(_int(1, _MAX_RANKS), "`machines`"),
        "machine_rank": Key(_int(0), "`machine_rank`"),
        "main_process_ip": Key(_text, "`address`: the host of the first rank"),
        "main_process_port": Key(_int(0), "`port`; 0: a free one"),
        "rdzv_backend": Key(_text, "`rendezvous`, as for torchrun"),
        "same_network": _unused(_bool, "torchrun needs an address that all machines reach, in one network or several",
                                True, False),
        "gpu_ids": Key(_gpu_ids, "`gpus`: CUDA_VISIBLE_DEVICES of the ranks"),
        "use_cpu": Key(_bool, "`cpu`: ranks on the CPU over gloo, also where there is a GPU"),
        "debug": Key(_bool, "`debug`: check every call, `shard_map(check=\"always\")`"),
        "mixed_precision": Key(_raw, "`compute`: float32, bfloat16 or float16; fp8 is refused"),
        "fp16": Key(_bool, "older name of mixed_precision: fp16"),
        "gradient_accumulation_steps": Key(_int(1), "`accumulate`: microbatches of one step"),
    }),
    ("dynamo_config", {
        "backend": Key(_one_of("NO", "INDUCTOR"), "`compile`: INDUCTOR is `shard_map(compile=True)`"),
        "mode": _unused(_text, "`shard_map(compile=True)` has torch's default mode", "default"),
        "use_fullgraph": _unused(_bool, "a call is always one graph", True, False),
        "use_dynamic": _unused(_bool, "each shape is compiled by itself", False),
        "use_regional_compilation": _unused(_bool, "a call is always one graph", False),
    }),
    ("fsdp_config", {
        "version": Key(_one_of("1", "2"), "the defaults and the words of that version"),
        "sharding_strategy": Key(_strategy, "`strategy`, by name or number"),
        "reshard_after_forward": Key(_raw, "version 1: as fsdp_sharding_strategy; 2: true FULL_SHARD, false "
                                           "SHARD_GRAD_OP, or a number, `reshard`: the size of the axis `group`"),
        "offload_params": Key(_bool, "`offload`: parameters, gradients and optimizer state in host memory"),
        "auto_wrap_policy": Key(_one_of("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"), "`wrap`"),
        "transformer_layer_cls_to_wrap": Key(_names, "`wrap`: the classes of the units"),
        "min_num_params": Key(_int(0), "`wrap`: the least number of parameters of a unit, 1e8 by default"),
        "backward_prefetch": Key(_prefetch, "`backward_prefetch`: pre, post or None"),
        "backward_prefetch_policy": Key(_prefetch, "as fsdp_backward_prefetch; Accelerate ignores it"),
        "forward_prefetch": Key(_bool, "`forward_prefetch`"),
        "limit_all_gathers": _unused(_bool, "gathered units are always limited: to one more than are gathered ahead",
                                     True),
        "state_dict_type": Key(_one_of("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", first=1),
                               "`state_dict`: full, local or sharded"),
        "activation_checkpointing": Key(_bool, "`remat`: activations are recomputed by unit"),
        "activation_checkpointing_offload": Key(_bool, "`offload_activations`: inputs of units in host memory"),
        "cpu_ram_efficient_loading": _unused(
            _bool, "each rank always reads the slices that it needs, and none reads all of a file", True),
        "sync_module_states": _unused(
            _bool, "initial values are a function of the key, the same on every rank", True),
        "use_orig_params": _unused(
            _bool, "leaves are always the model's, by their names; nothing is flattened", True),
        "ignored_modules": Key(_raw, "a leaf that is not to be sharded has the spec P()", "refused"),
    }),
    ("parallelism_config", {
        "dp_replicate_size": Key(_int(1), "`replicas`: size of the axis `replica`"),
        "dp_shard_size": Key(_int(1), "size of the axis `data`, or `shard` with replicas"),
        "tp_size": Key(_int(1), "`model`: size of the axis `model`"),
        "cp_size": Key(_int(1), "context parallelism is not here: a model's Layout has sequence parallelism",
                       "refused", (1,)),
        "sp_size": Key(_int(1), "DeepSpeed's sequence parallelism is not here: a model's Layout has it",
                       "refused", (1,)),
        "cp_backend": _unused(_raw, "cp_size is 1", "torch"),
        "cp_comm_strategy": _unused(_raw, "cp_size is 1", "allgather"),
        "sp_backend": _unused(_raw, "sp_size is 1", "deepspeed"),
        "sp_seq_length": _unused(_raw, "sp_size is 1"),
        "sp_seq_length_is_variable": _unused(_raw, "sp_size is 1", True),
        "sp_attn_implementation": _unused(_raw, "sp_size is 1", "sdpa"),
    }),
    # of other machines and libraries
    ("", {
        "deepspeed_config": Key(_raw, "gradient_accumulation_steps of it is read; DeepSpeed is not here"),
        "megatron_lm_config": _unused(_raw, "Megatron-LM is not here"),
        "fp8_config": _unused(_raw, "there is no fp8 here"),
        "mpirun_config": Key(_raw, "run `python -m fshard launch` on each machine", "refused"),
        "ipex_config": _unused(_raw, "of an older version: Intel's extension is not here"),
        "use_xpu": _unused(_bool, "of an older version: there are no XPUs here", False),
        "enable_cpu_affinity": _unused(_bool, "ranks are not bound to cores: numactl does that", False),
        "main_training_function": _unused(_text, "a script runs from its first line", "main"),
        "downcast_bf16": _unused(_bool, f"only of TPUs, and {_TPU}", False),
        **{name: _unused(_raw, _TPU, False)
           for name in ("tpu_name", "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "tpu_vm", "tpu_env", "command_file",
                        "commands")},
    }),
)  # fmt: skip
KEYS = {SECTIONS.get(section, "") + name: replace(key, section=section)
        for section, table in _TABLES for name, key in table.items()}  # fmt: skip


# --- their translation ------------------------------------------------------------------------------------------


@dataclass
class Values:
    """Parsed values of the keys of a file, and the errors and warnings that they gave so far."""

    entries: Mapping[str, Entry]
    values: dict[str, Any] = field(default_factory=dict)
    errors: list[ShardingError] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def get(self, name: str, default: Any = None) -> Any:
        return self.values.get(name, default)

    def warn(self, name: str, text: str) -> None:
        self.warnings.append(f"{self.entries[name].where}: {text}")

    def refuse(self, name: str, text: str, *notes: str, fix: str = "") -> None:
        entry = self.entries[name]
        self.errors.append(fail(f"{entry.where}: {entry.value!r:.60} {text}", *notes, fix=fix))


def translate(entries: Mapping[str, Entry], file: str) -> dict[str, Any]:
    """Return the fields of `Settings` for the keys of a file."""
    v = Values(entries)
    for name, entry in entries.items():
        _parse(v, name, entry)
        if len(v.errors) == _MAX_ERRORS:
            v.errors.append(fail(f"{file}: the keys after these are not read", fix="give a file of Accelerate"))
            break
    raise_all(v.errors)
    if "distributed_type" not in v.values:
        raise fail(f"{file}: has no distributed_type", fix="distributed_type: FSDP, MULTI_GPU, MULTI_CPU or NO")
    fields = {**_machines(v), **_precision(v), **_schedule(v)}
    raise_all(v.errors)
    return {**fields, "warnings": tuple(v.warnings)}


def _parse(v: Values, name: str, entry: Entry) -> None:
    key = KEYS.get(name)
    if key is None or (entry.section != key.section and entry.section + key.section != "dynamo_config"):
        v.errors.append(_unknown(name, entry, key))
        return
    if name == "distributed_type" and str(entry.value).upper() not in _TYPES:
        v.refuse(name, "is not supported", "Accelerate has it; here ranks are processes of torchrun, on the CPU or on "
                 "CUDA", fix=f"one of {', '.join(_TYPES)}; of DeepSpeed's ZeRO, stage 1 is MULTI_GPU and fs.optim."
                 "zero, stages 2 and 3 are SHARD_GRAD_OP and FULL_SHARD of FSDP")  # fmt: skip
        return
    if entry.value is None or (isinstance(entry.value, (str, list, dict)) and entry.value in ("", [], {}, [""])):
        return
    try:
        value = key.parse(entry.value)
    except ValueError as e:
        v.refuse(name, f"is not {e}")
        return
    if key.effect == "translated":
        v.values[name] = value
    elif value in key.quiet:
        pass
    elif key.effect == "none":
        v.warn(name, f"means nothing here: {key.meaning}")
    else:
        v.refuse(name, "is refused", key.meaning, fix=f"remove {name}")


def _unknown(name: str, entry: Entry, key: Key | None) -> ShardingError:
    if key is not None:
        place = f"in {key.section}" if key.section else "at the top of the file"
        return fail(f"{entry.where}: is in the wrong section", f"Accelerate reads it only {place}",
                    fix=f"move it: {place}")  # fmt: skip
    short = {other.removeprefix(SECTIONS.get(k.section, "")): other for other, k in KEYS.items()}
    near = difflib.get_close_matches(name.removeprefix(SECTIONS.get(entry.section, "")), short, 1, 0.7)
    nearest = [".".join(filter(None, (KEYS[short[n]].section, short[n]))) for n in near]
    fix = f"{nearest[0]}, if that is meant; or remove it" if nearest else "remove it"
    return fail(f"{entry.where}: unknown key", "Accelerate 1.15 does not have it", fix=fix)


def _machines(v: Values) -> dict[str, Any]:
    kind = v.get("distributed_type")
    processes, machines = v.get("num_processes", 1 if kind == "NO" else -1), v.get("num_machines", 1)
    if kind == "NO" and processes != 1:
        v.warn("num_processes", "means nothing with distributed_type NO, which is one process")
        processes = 1
    if kind == "NO" and machines > 1:
        v.refuse("num_machines", "machines, and distributed_type is NO, which is one process",
                 fix="distributed_type: MULTI_GPU, MULTI_CPU or FSDP")  # fmt: skip
    if processes == 0:
        v.refuse("num_processes", "is not a number of ranks", fix="1 or more; -1: say it to `launch`")
    if processes > 0 and processes % machines:
        name = "num_processes" if "num_processes" in v.values else "num_machines"
        v.refuse(name, "does not fit: each machine has as many ranks as another",
                 f"{processes} % {machines} = {processes % machines}",
                 fix=f"num_processes: {-(-processes // machines) * machines}")  # fmt: skip
    if v.get("machine_rank", 0) >= machines:
        v.refuse("machine_rank", f"is not a rank of {machines} machines", fix=f"0 to {machines - 1}")
    if v.get("main_process_port", 0) > 65535:
        v.refuse("main_process_port", "is not a port", fix="0 to 65535")
    return {
        "processes": processes if processes > 0 else None, "machines": machines,
        "machine_rank": v.get("machine_rank", 0), "address": v.get("main_process_ip"),
        "port": v.get("main_process_port") or None, "rendezvous": v.get("rdzv_backend", "static"),
        "cpu": v.get("use_cpu", False) or kind == "MULTI_CPU", "gpus": v.get("gpu_ids"), "debug": v.get("debug", False),
        "replicas": v.get("parallelism_config_dp_replicate_size"), "model": v.get("parallelism_config_tp_size", 1),
        "shards": v.get("parallelism_config_dp_shard_size"),
    }  # fmt: skip


def _precision(v: Values) -> dict[str, Any]:
    text = v.get("mixed_precision", "fp16" if v.get("fp16") else "no")
    text = "no" if text is False else str(text).lower()  # YAML reads an unquoted no as false
    if text not in _DTYPES:
        v.refuse("mixed_precision", f"is not one of {', '.join(_DTYPES)}")
    accumulate = v.get("gradient_accumulation_steps", 1)
    deepspeed = v.get("deepspeed_config", {})
    steps = deepspeed.get("gradient_accumulation_steps") if isinstance(deepspeed, dict) else None
    if deepspeed:
        rest = "the rest means nothing here" if steps is not None else "means nothing here"
        v.warn("deepspeed_config", f"{rest}: DeepSpeed is not here, and distributed_type is "
               f"{v.get('distributed_type')}")  # fmt: skip
    if steps is not None and "gradient_accumulation_steps" not in v.values:
        try:
            accumulate = _int(1)(steps)
        except ValueError as e:
            v.refuse("deepspeed_config", f"has gradient_accumulation_steps {steps!r}, which is not {e}")
        v.warn("deepspeed_config", "gradient_accumulation_steps is honoured; Accelerate reads it only with DeepSpeed")
    compiled = v.get("dynamo_backend", "NO") == "INDUCTOR"
    return {"compute": _DTYPES.get(text, torch.float32), "accumulate": accumulate, "compile": compiled}


# Keys that Accelerate reads only, or takes only, with another fsdp_version; and what they are then.
_OF_THE_OTHER_VERSION: Mapping[int, Mapping[str, Any]] = {
    1: {"fsdp_activation_checkpointing_offload": False,
        **{f"parallelism_config_{name}_size": 1 for name in ("dp_replicate", "dp_shard", "tp")}},
    2: {"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": True},
}  # fmt: skip


def _schedule(v: Values) -> dict[str, Any]:
    """Translate `fsdp_config`, whose defaults depend on its version."""
    if v.get("distributed_type") != "FSDP":
        for name in v.entries:
            if name in v.values and KEYS[name].section in ("fsdp_config", "parallelism_config"):
                v.warn(name, f"means nothing with distributed_type {v.get('distributed_type')}: fsdp_config is of FSDP")
        return {"strategy": "NO_SHARD", "replicas": None, "shards": None, "model": 1}
    version = int(v.get("fsdp_version", "1"))
    strategy, reshard = _strategy_of(v, version)
    if v.get("fsdp_activation_checkpointing_offload") and not v.get("fsdp_activation_checkpointing"):
        v.refuse("fsdp_activation_checkpointing_offload", "without fsdp_activation_checkpointing: the inputs of units "
                 "are kept only where the units are recomputed", fix="fsdp_activation_checkpointing: true")  # fmt: skip
    for name, default in _OF_THE_OTHER_VERSION[version].items():
        if v.get(name, default) != default:
            v.warn(name, f"is honoured; Accelerate does not take it with fsdp_version {version}")
    kinds = {"FULL_STATE_DICT": "full", "LOCAL_STATE_DICT": "local", "SHARDED_STATE_DICT": "sharded"}
    state_dict = v.get("fsdp_state_dict_type", "FULL_STATE_DICT" if version == 1 else "SHARDED_STATE_DICT")
    if version == 2 and state_dict == "LOCAL_STATE_DICT":
        v.refuse("fsdp_state_dict_type", "with fsdp_version 2, which Accelerate refuses too",
                 fix="SHARDED_STATE_DICT or FULL_STATE_DICT")  # fmt: skip
    return {
        "strategy": strategy, "reshard": reshard, "wrap": _wrap_of(v), "offload": v.get("fsdp_offload_params", False),
        "remat": v.get("fsdp_activation_checkpointing", False),
        "offload_activations": v.get("fsdp_activation_checkpointing_offload", False),
        "state_dict": kinds[state_dict],
        "backward_prefetch": _backward_prefetch_of(v, version),
        "forward_prefetch": v.get("fsdp_forward_prefetch", version == 2),
    }  # fmt: skip


def _strategy_of(v: Values, version: int) -> tuple[str, int | None]:
    """Return the strategy, and the size of the group over which weights stay split after forward, if there is one.

    In version 1 Accelerate reads fsdp_sharding_strategy, in version 2 fsdp_reshard_after_forward. Here the other key
    is read if that one is missing.
    """
    rows = [("fsdp_sharding_strategy", v.get("fsdp_sharding_strategy"), None),
            ("fsdp_reshard_after_forward", *_reshard_of(v, version))][:: 1 if version == 1 else -1]  # fmt: skip
    (first, strategy, group), (second, other, its_group) = rows
    there = strategy or "FULL_SHARD"
    if other not in (None, there):
        read_as = f"means nothing next to {first}" if strategy else f"is honoured, as {other}"
        v.warn(second, f"{read_as}; Accelerate 1.15 ignores it with fsdp_version {version}, and trains with {there}")
    if strategy is None:
        strategy, group = other or "FULL_SHARD", its_group
    if v.get("parallelism_config_dp_replicate_size", 1) > 1 and strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        strategy = "HYBRID_SHARD" if strategy == "FULL_SHARD" else "_HYBRID_SHARD_ZERO2"
    return strategy, group


def _reshard_of(v: Values, version: int) -> tuple[str | None, int | None]:
    """Return what fsdp_reshard_after_forward is: a strategy, and the size of a group."""
    name = "fsdp_reshard_after_forward"
    value = str(v.get(name)).lower()
    if name not in v.values:
        return None, None
    if value in _WORDS and (version == 2 or not value.isdecimal()):
        return "FULL_SHARD" if _WORDS[value] else "SHARD_GRAD_OP", None
    try:
        group = _int(2)(value) if version == 2 and value.isdecimal() else None
        strategy = "FULL_SHARD" if group else _strategy(value)
    except ValueError as e:
        v.refuse(name, f"is not true, false, or {e}")
        return None, None
    if version == 2:
        groups = f" in groups of {group}" if group else ""
        v.warn(name, f"is read as {strategy}{groups}; Accelerate refuses it with fsdp_version 2")
    return strategy, group


def _wrap_of(v: Values) -> tuple[str, ...] | int | str | None:
    policy, classes, least = (
        v.get(f"fsdp_{name}") for name in ("auto_wrap_policy", "transformer_layer_cls_to_wrap", "min_num_params")
    )
    if policy is None and classes is not None:
        v.warn("fsdp_transformer_layer_cls_to_wrap", "is honoured; Accelerate ignores it without fsdp_auto_wrap_policy")
        return tuple(classes)
    if classes is not None and policy != "TRANSFORMER_BASED_WRAP":
        v.warn("fsdp_transformer_layer_cls_to_wrap", f"means nothing with fsdp_auto_wrap_policy {policy}")
    if least is not None and policy != "SIZE_BASED_WRAP":
        v.warn("fsdp_min_num_params", f"means nothing with fsdp_auto_wrap_policy {policy or 'NO_WRAP'}")
    if policy == "TRANSFORMER_BASED_WRAP":
        return tuple(classes) if classes else NO_SPLIT_MODULES
    if policy == "SIZE_BASED_WRAP" and least != 0:
        return least or 100_000_000
    if least == 0 and policy:
        v.warn("fsdp_min_num_params", "as in Accelerate, 0 means no policy: the model is one unit, gathered at once")
    elif policy:
        v.warn("fsdp_auto_wrap_policy", "the model is one unit, gathered at once")
    return None


def _backward_prefetch_of(v: Values, version: int) -> str | None:
    key, ignored_there = "fsdp_backward_prefetch", "fsdp_backward_prefetch_policy"
    policy, value = v.get(ignored_there), v.get(key)
    if policy and value in (None, policy):
        v.warn(ignored_there, f"is honoured, as {key}: {policy}; Accelerate ignores it and prefetches nothing")
    elif policy:
        v.warn(ignored_there, f"means nothing next to {key}: {value}; Accelerate ignores it")
    default = "NO_PREFETCH" if version == 1 else "BACKWARD_PRE"
    words = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "NO_PREFETCH": None}
    return words[value or policy or default]


def overrides(keys: Mapping[str, Any]) -> dict[str, Entry]:
    """Return entries for keys that replace those in a file, named as options of the command line."""
    return {name: Entry(value, f"--{name}", KEYS[name].section if name in KEYS else "") for name, value in keys.items()}
