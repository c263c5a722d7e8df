"""`fs.accelerate`: files of Accelerate as they are, each key translated, named in a warning, or refused."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import textwrap
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import fshard as fs
from fshard import ShardingError
from fshard.interop.accelerate.keys import KEYS
from fshard.schedule.strategy import STRATEGIES

accelerate = pytest.importorskip("accelerate")
from accelerate.commands.config import config_args  # noqa: E402
from accelerate.commands.launch import _validate_launch_command, launch_command_parser  # noqa: E402
from accelerate.utils import FullyShardedDataParallelPlugin  # noqa: E402
from accelerate.utils.launch import prepare_multi_gpu_env  # noqa: E402
from torch.distributed.fsdp import CPUOffloadPolicy  # noqa: E402

T5_LORA = Path(__file__).parent / "t5_lora_fsdp.yaml"
Settings = fs.accelerate.Settings
PARSER = launch_command_parser()


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(name: str = "f.yaml", **contents: Any) -> str:
    Path(name).write_text(yaml.safe_dump(contents, sort_keys=False))
    return name


def fsdp(**config: Any) -> str:
    """Write a file of FSDP with two processes and these keys of `fsdp_config`."""
    return written(distributed_type="FSDP", num_processes=2, fsdp_config=config)


def read(path: str | Path, **keys: Any) -> Settings:
    """Read a file that gives no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return fs.accelerate.read(path, **keys)


def read_warned(path: str | Path, **keys: Any) -> tuple[Settings, list[str]]:
    with pytest.warns(UserWarning, match=": ") as told:
        settings = fs.accelerate.read(path, **keys)
    assert [str(w.message) for w in told] == list(settings.warnings)
    return settings, list(settings.warnings)


def error(path: str | Path, **keys: Any) -> str:
    with pytest.raises(ShardingError) as e:
        fs.accelerate.read(path, **keys)
    return str(e.value)


# --- whole files ------------------------------------------------------------------------------------------------


def test_file_of_the_t5_lora_example_is_read_as_it_stands():
    settings, told = read_warned(T5_LORA)
    assert settings == Settings(
        strategy="FULL_SHARD", processes=2, wrap=("T5Block",), offload=True, backward_prefetch="pre",
        warnings=tuple(told),
    )  # fmt: skip
    assert told == [(
        f"{T5_LORA}, line 10: fsdp_config.fsdp_backward_prefetch_policy: is honoured, as fsdp_backward_prefetch: "
        "BACKWARD_PRE; Accelerate ignores it and prefetches nothing"
    )]  # fmt: skip
    assert settings.axes == {"data": 2}
    assert settings.units() == ("T5Block",)


# The keys of `random_file`, with some of their values.
VALUES: dict[str, tuple[Any, ...]] = {
    "fsdp_version": (1, "1", 2, 2, 2, "2"),
    "fsdp_sharding_strategy": (*STRATEGIES, "full_shard", "HYBRID_SHARD_ZERO2", 1, 2, "3", 4),
    "fsdp_reshard_after_forward": (True, False, "true", "no", "FULL_SHARD", "SHARD_GRAD_OP", 2, "1"),
    "fsdp_offload_params": (True, False, "true", "no"),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP", "transformer_based_wrap"),
    "fsdp_transformer_layer_cls_to_wrap": ("T5Block", "BertLayer,BertEmbeddings", "A, B"),
    "fsdp_min_num_params": (0, 10, 2000000, "1e8"),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", "backward_pre", 1),
    "fsdp_backward_prefetch_policy": ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"),
    "fsdp_forward_prefetch": (True, False, "yes"),
    "fsdp_state_dict_type": ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", "3", 1),
    "fsdp_activation_checkpointing": (True, False, "on"),
    "fsdp_activation_checkpointing_offload": (True, False),
    "fsdp_cpu_ram_efficient_loading": (True, False),
    "fsdp_sync_module_states": (True, "true", False),
    "fsdp_use_orig_params": (True, "no"),
    "num_processes": (2, 4, 8), "num_machines": (1, 2), "mixed_precision": ("no", "bf16", "fp16"),
    "debug": (True, False), "downcast_bf16": ("no",), "main_process_port": (29501,), "rdzv_backend": ("static", "c10d"),
}  # fmt: skip
# The keys that may explain why a field differs from Accelerate's.
REASONS = {"strategy": "sharding_strategy|reshard_after_forward", "wrap": "transformer_layer_cls|min_num_params"}

# What Accelerate raises for files that are read here, and the key that a warning names. It cannot read a 1e8.
READ_HERE = {"invalid truth value": "reshard_after_forward", "set `--fsdp_sync_module_states`": "sync_module_states",
             "requires `fsdp_version=2`": "activation_checkpointing_offload", "'1e8'": ""}  # fmt: skip


def random_file(number: int) -> str:
    draw = random.Random(number)
    chosen = {name: draw.choice(values) for name, values in VALUES.items() if draw.random() < 0.25}
    items = [*{"distributed_type": "FSDP", "num_processes": 4, **chosen}.items()]
    draw.shuffle(items)
    short = draw.random() < 0.2  # in fsdp_config a key may lack its prefix
    section = {(key.removeprefix("fsdp_") if short else key): x for key, x in items if key.startswith("fsdp_")}
    top = {key: x for key, x in items if not key.startswith("fsdp_")}
    return written(**top, **({"fsdp_config": section} if section else {}))


def read_by_accelerate(path: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what Accelerate makes of a file: its launcher the environment, and its plugin the settings."""
    args = _validate_launch_command(PARSER.parse_args(["--config_file", path, "script.py"]))[0]
    for name, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    classes, policy = plugin.transformer_cls_names_to_wrap, getattr(plugin.auto_wrap_policy, "__name__", "none")
    wraps = {"transformer": tuple(map(str.strip, classes)) if classes else "_no_split_modules",
             "size": plugin.min_num_params or None, "none": None}  # fmt: skip
    out = {
        "processes": args.num_processes, "machines": args.num_machines, "debug": bool(args.debug),
        "port": args.main_process_port if "main_process_port" in Path(path).read_text() else None,
        "compute": {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[str(args.mixed_precision)],
        "wrap": wraps[policy.partition("_")[0]], "remat": plugin.activation_checkpointing,
        "offload_activations": plugin.activation_checkpointing_offload,
        "state_dict": plugin.state_dict_type.name.partition("_")[0].lower(),
    }  # fmt: skip
    if plugin.fsdp_version == 2:  # it always gathers the next unit ahead
        offload = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        strategy = "FULL_SHARD" if plugin.reshard_after_forward else "SHARD_GRAD_OP"
        return {**out, "strategy": strategy, "offload": offload, "backward_prefetch": "pre", "forward_prefetch": True}
    ahead = plugin.backward_prefetch and plugin.backward_prefetch.name.removeprefix("BACKWARD_").lower()
    return {**out, "strategy": plugin.sharding_strategy.name, "offload": plugin.cpu_offload.offload_params,
            "backward_prefetch": ahead, "forward_prefetch": plugin.forward_prefetch}  # fmt: skip


@pytest.mark.parametrize("files", [40, pytest.param(350, marks=pytest.mark.slow)])
def test_random_files_have_the_settings_of_accelerate_or_a_named_reason(files: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)
    monkeypatch.setattr("accelerate.utils.dataclasses.is_cuda_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    counts: Counter[str] = Counter()
    for number in range(files):
        path, want, refused, refused_here = random_file(number), None, "", ""
        with warnings.catch_warnings(), monkeypatch.context() as env:
            warnings.simplefilter("ignore")
            try:
                want = read_by_accelerate(path, env)
            except (ValueError, KeyError) as e:
                refused = str(e)
            try:
                settings = fs.accelerate.read(path)
            except ShardingError as e:
                refused_here = str(e)
        if refused_here:
            assert refused, (Path(path).read_text(), refused_here)
            assert re.match(r"(\d problems\n)?f\.yaml, line \d+: (\w+\.)?\w+: ", refused_here)
            counts["refused by both"] += 1
            continue
        told = "\n".join(settings.warnings)
        if want is None:
            key = next((key for words, key in READ_HERE.items() if words in refused), "none")
            assert key in told, (refused, told)
            counts["only here"] += 1
            continue
        differ = {name for name, value in want.items() if getattr(settings, name) != value}
        unnamed = {name for name in differ if not re.search(REASONS.get(name, name), told)}
        assert not unnamed, (number, Path(path).read_text(), unnamed, want, settings)
        counts["differ by a named reason" if differ else "same"] += 1
    assert counts["same"] > 0.4 * files, counts
    assert sum(counts.values()) == files


@pytest.mark.parametrize("version", [1, 2])
def test_file_that_accelerate_writes_is_read_without_a_warning(version: int):
    """All answers of its questionnaire that have the meaning they name."""
    config = config_args.ClusterConfig(
        compute_environment="LOCAL_MACHINE", distributed_type="FSDP", mixed_precision="bf16", use_cpu=False,
        debug=False, num_processes=4, downcast_bf16="no", rdzv_backend="static", same_network=True,
        main_training_function="main", tpu_env=[], dynamo_config={},
        fsdp_config={
            "fsdp_version": version, "fsdp_reshard_after_forward": "FULL_SHARD" if version == 1 else True,
            "fsdp_offload_params": False, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "T5Block, T5LayerFF", "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_cpu_ram_efficient_loading": True, "fsdp_activation_checkpointing": True,
        },
    )  # fmt: skip
    config.to_yaml_file("theirs.yaml")
    config.to_json_file("theirs.json")
    settings = read("theirs.yaml")
    assert settings == read("theirs.json")
    assert settings == Settings(
        strategy="FULL_SHARD", processes=4, wrap=("T5Block", "T5LayerFF"), remat=True, state_dict="sharded",
        compute=torch.bfloat16, backward_prefetch="pre" if version == 2 else None, forward_prefetch=version == 2,
    )  # fmt: skip


# --- every key ---------------------------------------------------------------------------------------------------


def test_every_key_of_accelerate_is_known():
    """A key that a new version of Accelerate adds fails here until it has a meaning."""
    sections = {"fsdp_config", "dynamo_config", "parallelism_config"}
    options = {a.dest for a in PARSER._actions}
    theirs = {f.name for f in dataclasses.fields(config_args.ClusterConfig)} - sections
    theirs |= {o for o in options if re.match("fsdp_|dynamo_|parallelism_config_", o)}
    assert theirs - KEYS.keys() == set()
    names_in_files = {
        "sharding_strategy": "fsdp_sharding_strategy", "cpu_offload": "fsdp_offload_params",
        "transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap", "fsdp_version": "fsdp_version",
    }  # fmt: skip
    objects = {"mixed_precision_policy", "state_dict_config", "optim_state_dict_config", "param_init_fn"}  # of Python
    fields = {f.name for f in dataclasses.fields(FullyShardedDataParallelPlugin)} - objects
    assert {names_in_files.get(name, f"fsdp_{name}") for name in fields} - KEYS.keys() == set()
    older = {"fp16", "ipex_config", "use_xpu", "fsdp_backward_prefetch_policy", "gradient_accumulation_steps"}
    only_ours = KEYS.keys() - theirs - older - {"fsdp_limit_all_gathers", "fsdp_ignored_modules"}
    assert only_ours == set()


# key -> (a value with an effect, the fields of Settings that change by it)
TRANSLATED: dict[str, tuple[Any, dict[str, Any]]] = {
    "num_processes": (6, {"processes": 6}),
    "num_machines": (2, {"machines": 2}),
    "machine_rank": (1, {"machine_rank": 1, "machines": 2}),
    "main_process_ip": ("10.0.0.1", {"address": "10.0.0.1"}),
    "main_process_port": (29501, {"port": 29501}),
    "rdzv_backend": ("c10d", {"rendezvous": "c10d"}),
    "gpu_ids": ("0,2", {"gpus": (0, 2)}),
    "use_cpu": (True, {"cpu": True}),
    "debug": (True, {"debug": True}),
    "mixed_precision": ("bf16", {"compute": torch.bfloat16}),
    "fp16": (True, {"compute": torch.float16}),
    "gradient_accumulation_steps": (4, {"accumulate": 4}),
    "dynamo_backend": ("INDUCTOR", {"compile": True}),
    "fsdp_version": (2, {"backward_prefetch": "pre", "forward_prefetch": True, "state_dict": "sharded"}),
    "fsdp_sharding_strategy": (3, {"strategy": "NO_SHARD"}),
    "fsdp_reshard_after_forward": ("FULL_SHARD", {}),
    "fsdp_offload_params": ("true", {"offload": True}),
    "fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP", {"wrap": "_no_split_modules"}),
    "fsdp_transformer_layer_cls_to_wrap": (["A", "B"], {"wrap": ("A", "B")}),
    "fsdp_min_num_params": ("1e6", {"wrap": 1_000_000, "": {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}}),
    "fsdp_backward_prefetch": ("BACKWARD_POST", {"backward_prefetch": "post"}),
    "fsdp_backward_prefetch_policy": ("BACKWARD_PRE", {"backward_prefetch": "pre"}),
    "fsdp_forward_prefetch": (True, {"forward_prefetch": True}),
    "fsdp_state_dict_type": ("LOCAL_STATE_DICT", {"state_dict": "local"}),
    "fsdp_activation_checkpointing": (True, {"remat": True}),
    "fsdp_activation_checkpointing_offload": (True, {"remat": True, "offload_activations": True,
                                                     "": {"fsdp_activation_checkpointing": True}}),
    "parallelism_config_dp_replicate_size": (2, {"replicas": 2, "strategy": "HYBRID_SHARD"}),
    "parallelism_config_dp_shard_size": (4, {"shards": 4}),
    "parallelism_config_tp_size": (2, {"model": 2}),
}  # fmt: skip
HONOURED = {"fsdp_backward_prefetch_policy", "fsdp_transformer_layer_cls_to_wrap",
            "fsdp_activation_checkpointing_offload", "parallelism_config_dp_replicate_size",
            "parallelism_config_dp_shard_size", "parallelism_config_tp_size"}  # fmt: skip
REFUSED = {"mpirun_config": {"mpirun_hostfile": "hosts"}, "fsdp_ignored_modules": "head",
           "parallelism_config_cp_size": 2, "parallelism_config_sp_size": 2}  # fmt: skip
NO_EFFECT: dict[str, Any] = {
    "dynamo_mode": "max-autotune", "dynamo_use_dynamic": True, "dynamo_use_regional_compilation": True,
    "fsdp_cpu_ram_efficient_loading": False, "fsdp_sync_module_states": "no", "fsdp_use_orig_params": False,
    "fsdp_limit_all_gathers": False,
    "deepspeed_config": {"zero_stage": 2}, "megatron_lm_config": {"megatron_lm_pp_degree": 2},
    "fp8_config": {"backend": "TE"}, "ipex_config": {"ipex": True}, "use_xpu": True, "enable_cpu_affinity": True,
    "main_training_function": "train", "downcast_bf16": "yes", "tpu_name": "a", "tpu_zone": "b",
    "tpu_use_cluster": True, "tpu_use_sudo": True, "tpu_vm": ["c"], "tpu_env": ["D=1"], "command_file": "e.sh",
    "commands": ["f"],
    "parallelism_config_cp_backend": "x", "parallelism_config_cp_comm_strategy": "alltoall",
    "parallelism_config_sp_backend": "x", "parallelism_config_sp_seq_length": 8,
    "parallelism_config_sp_seq_length_is_variable": False, "parallelism_config_sp_attn_implementation": "x",
}  # fmt: skip
ALWAYS_QUIET = {"compute_environment", "distributed_type", "same_network", "dynamo_use_fullgraph"}


def with_key(name: str, value: Any, **others: Any) -> str:
    """Write a file of FSDP with the key in its section."""
    contents: dict[str, Any] = {"distributed_type": "FSDP", "num_processes": 4}
    for key, x in {name: value, **others}.items():
        place = contents.setdefault(KEYS[key].section, {}) if KEYS[key].section else contents
        place[key] = x
    return written(**contents)


def test_tables_have_every_key():
    assert TRANSLATED.keys() | REFUSED.keys() | NO_EFFECT.keys() | ALWAYS_QUIET == KEYS.keys()


@pytest.mark.parametrize("name", TRANSLATED)
def test_key_is_translated(name: str):
    value, changed = TRANSLATED[name]
    others = {"num_machines": 2} if name == "machine_rank" else changed.get("", {})
    path = with_key(name, value, **others)
    settings = read_warned(path)[0] if name in HONOURED else read(path)
    want = {"strategy": "FULL_SHARD", "processes": 4} | {k: v for k, v in changed.items() if k}
    assert dataclasses.replace(settings, warnings=()) == Settings(**want)


@pytest.mark.parametrize("name", NO_EFFECT)
def test_key_without_effect_gives_a_warning_that_names_it(name: str):
    settings, told = read_warned(with_key(name, NO_EFFECT[name]))
    assert dataclasses.replace(settings, warnings=()) == Settings(strategy="FULL_SHARD", processes=4)
    assert re.match(rf"f\.yaml, line \d: (\w+\.)?{name}: .*means nothing here", told[0])


@pytest.mark.parametrize("name", REFUSED)
def test_key_that_would_change_the_run_is_refused(name: str):
    assert re.match(
        rf"f\.yaml, line \d: (\w+\.)?{name}: .* is refused\n  .*\n  fix: remove", error(with_key(name, REFUSED[name]))
    )


def test_key_without_a_value_is_as_if_missing():
    for name in KEYS.keys() - {"distributed_type", "num_processes"}:
        assert read(with_key(name, None)) == Settings(strategy="FULL_SHARD", processes=4), name


def test_defaults_of_accelerate_give_no_warning():
    """Those of the classes and options that write and read its files."""
    fields = dataclasses.fields(config_args.ClusterConfig)
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    said = {"distributed_type", "compute_environment", "num_processes", "fsdp_min_num_params"}
    sizes = {f"parallelism_config_dp_{name}_size" for name in ("replicate", "shard")}
    for name in KEYS.keys() - said - sizes:
        value = defaults.get(name, PARSER.get_default(name))
        assert read(with_key(name, value)) == Settings(strategy="FULL_SHARD", processes=4), name


# --- values ------------------------------------------------------------------------------------------------------


def test_strategy_by_name_or_number_is_that_of_torch():
    from torch.distributed.fsdp import ShardingStrategy

    for member in ShardingStrategy:
        for value in (member.value, str(member.value), member.name, member.name.lower(), member.name.lstrip("_")):
            assert read(fsdp(fsdp_sharding_strategy=value)).strategy == member.name
    assert set(STRATEGIES) == {member.name for member in ShardingStrategy}
    for wrong in (0, 6, "ZERO3", True, 1.5):
        assert "is not one of FULL_SHARD, " in error(fsdp(fsdp_sharding_strategy=wrong))


FSDP = {"distributed_type": "FSDP", "num_processes": 2}
VERSION_2 = {"backward_prefetch": "pre", "forward_prefetch": True, "state_dict": "sharded"}
# contents of a file, the settings that they make, and a part of the last warning
READ: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *((FSDP | {"fsdp_config": config}, {"strategy": "FULL_SHARD", "processes": 2} | want, told)
      for config, want, told in (
        # a number is a strategy in version 1, and in version 2 the size of a group, as in torch's `fully_shard`
        ({"version": 2, "reshard_after_forward": True}, VERSION_2, ""),
        ({"version": 2, "reshard_after_forward": "false"}, {"strategy": "SHARD_GRAD_OP"} | VERSION_2, ""),
        ({"version": 2, "reshard_after_forward": 1}, VERSION_2, ""),
        ({"version": 2, "reshard_after_forward": 2}, {"reshard": 2} | VERSION_2, "in groups of 2; Accelerate"),
        ({"version": 2, "reshard_after_forward": "NO_SHARD"}, {"strategy": "NO_SHARD"} | VERSION_2, "refuses it"),
        ({"version": 2, "reshard_after_forward": True, "sharding_strategy": "HYBRID_SHARD"}, VERSION_2,
         "means nothing next to fsdp_reshard_after_forward; Accelerate 1.15 ignores it with fsdp_version 2"),
        ({"sharding_strategy": "HYBRID_SHARD", "reshard_after_forward": True}, {"strategy": "HYBRID_SHARD"},
         "means nothing next to fsdp_sharding_strategy"),
        ({"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": False}, {"strategy": "SHARD_GRAD_OP"}, ""),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, {"strategy": "SHARD_GRAD_OP"},
         "ignores it with fsdp_version 1, and trains with FULL_SHARD"),
        ({"version": 1, "reshard_after_forward": "FULL_SHARD"}, {}, ""),
        ({"version": 1, "reshard_after_forward": 1}, {}, ""),
        ({"version": 2, "sharding_strategy": "SHARD_GRAD_OP"}, {"strategy": "SHARD_GRAD_OP"} | VERSION_2,
         "is honoured, as SHARD_GRAD_OP; Accelerate 1.15 ignores it with fsdp_version 2, and trains with FULL_SHARD"),
        ({"version": 2, "forward_prefetch": False}, VERSION_2 | {"forward_prefetch": False}, "does not take it"),
        ({"backward_prefetch": "BACKWARD_PRE", "backward_prefetch_policy": 1}, {"backward_prefetch": "pre"},
         "is honoured, as fsdp_backward_prefetch: BACKWARD_PRE"),
        ({"backward_prefetch": "BACKWARD_PRE", "backward_prefetch_policy": 2}, {"backward_prefetch": "pre"},
         "means nothing next to fsdp_backward_prefetch: BACKWARD_PRE"),
        ({"offload_params": True}, {"offload": True}, ""),
        ({}, {"wrap": None}, ""),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP"}, {"wrap": 100_000_000}, ""),
        ({"auto_wrap_policy": "size_based_wrap", "min_num_params": 10}, {"wrap": 10}, ""),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 0}, {"wrap": None}, "the model is one unit"),
        ({"auto_wrap_policy": "NO_WRAP"}, {"wrap": None}, "the model is one unit"),
        ({"transformer_layer_cls_to_wrap": "T5Block"}, {"wrap": ("T5Block",)}, "without fsdp_auto_wrap_policy"),
        ({"min_num_params": 10}, {"wrap": None}, "means nothing with fsdp_auto_wrap_policy NO_WRAP"),
        ({"auto_wrap_policy": "SIZE_BASED_WRAP", "transformer_layer_cls_to_wrap": "A"}, {"wrap": 100_000_000},
         "means nothing with fsdp_auto_wrap_policy SIZE_BASED_WRAP"),
    )),
    *((FSDP | {"fsdp_config": empty, "dynamo_config": empty}, {"strategy": "FULL_SHARD", "processes": 2}, "")
      for empty in (None, {}, "")),
    ({"distributed_type": "NO", "mixed_precision": False}, {}, ""),
    ({"distributed_type": "NO", "mixed_precision": "fp16"}, {"compute": torch.float16}, ""),
    ({"distributed_type": "NO", "num_processes": 3}, {}, "is one process"),
    ({"distributed_type": "MULTI_CPU", "num_processes": 3}, {"processes": 3, "cpu": True}, ""),
    ({"distributed_type": "MULTI_GPU", "num_processes": 3}, {"processes": 3}, ""),
    ({"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_offload_params": True}}, {"processes": None},
     "means nothing with distributed_type MULTI_GPU"),
    ({"distributed_type": "NO", "deepspeed_config": {"gradient_accumulation_steps": 8}}, {"accumulate": 8},
     "Accelerate reads it only with DeepSpeed"),
]  # fmt: skip


@pytest.mark.parametrize(("contents", "want", "warned"), READ)
def test_files_are_read_as_they_say(contents: dict[str, Any], want: dict[str, Any], warned: str):
    path = written(**contents)
    settings, told = read_warned(path) if warned else (read(path), [""])
    assert dataclasses.replace(settings, warnings=()) == Settings(**want)
    assert warned in told[-1]


def test_units_of_a_model_without_named_classes():
    class Model:
        _no_split_modules = ("Block", "Attention")

    settings = read(fsdp(fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP"))
    assert settings.units(Model) == ("Attention", "Block")
    assert settings.units(Model()) == settings.units(Model)
    for wrong in (None, int):
        with pytest.raises(ShardingError, match=r"_no_split_modules\n  (no model|model is a int, which has none)"):
            settings.units(wrong)
    assert Settings(wrap=7).units() == 7
    assert Settings().units() is None


# --- the ranks ---------------------------------------------------------------------------------------------------


def test_axes_of_the_strategies():
    def axes(**keys: Any) -> dict[str, int]:
        return read(written(distributed_type="FSDP", **keys)).axes

    hybrid = {"fsdp_config": {"sharding_strategy": "HYBRID_SHARD"}}
    assert axes(num_processes=8, num_machines=2) == {"data": 8}
    assert axes(num_processes=8, num_machines=2, **hybrid) == {"replica": 2, "shard": 4}
    assert axes(num_processes=8, **hybrid) == {"replica": 1, "shard": 8}
    assert axes() == axes(num_processes=-1) == {"data": -1}
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2, "tp_size": 2}
    two = {"fsdp_config": {"version": 2, "reshard_after_forward": False}, "parallelism_config": sizes}
    assert axes(num_processes=8, **two) == {"replica": 2, "shard": 2, "model": 2}
    assert read("f.yaml").strategy == "_HYBRID_SHARD_ZERO2"
    wrong = error(written(distributed_type="FSDP", num_processes=6, **two))
    assert "do not make up 6 processes\n  strategy  _HYBRID_SHARD_ZERO2    reshard  None\n" in wrong
    assert "\n  replica x shard x model = 2 x 2 x 2 = 8\n" in wrong


def test_number_of_reshard_after_forward_is_the_size_of_an_axis():
    """Weights stay split within groups of four of the eight ranks."""
    path = written(distributed_type="FSDP", num_processes=8, fsdp_config={"version": 2, "reshard_after_forward": 4})
    settings, told = read_warned(path)
    assert "FULL_SHARD in groups of 4; Accelerate refuses it" in told[0]
    assert settings.axes == {"data": 2, "group": 4}
    assert settings.strategy_options["axis"] == ("data", "group")
    assert settings.strategy_options["release"] == "group"
    wrong = error("f.yaml", fsdp_reshard_after_forward=3)
    assert "do not make up 8 processes\n  strategy  FULL_SHARD    reshard  3\n  data x group = 2 x 3 = 6" in wrong


def test_options_of_the_strategy():
    def options(**config: Any) -> tuple[Any, ...]:
        found = read(fsdp(**config)).strategy_options
        assert found.keys() == {"prefetch", "backward_prefetch", "offload_params"}
        return tuple(found.values())

    assert options() == (0, 0, False)
    assert options(backward_prefetch="BACKWARD_PRE", forward_prefetch=True, offload_params=True) == (1, 1, True)
    assert options(backward_prefetch="BACKWARD_POST") == (0, "post", False)
    assert options(version=2) == (1, 1, False)
    if hasattr(fs, "strategy"):
        made = fs.strategy("FULL_SHARD", **read(fsdp(backward_prefetch="BACKWARD_POST")).strategy_options)
        assert made.options == {"release": True, "prefetch": 0, "backward_prefetch": "post"}


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "XLA", "TPU", "MULTI_XPU", "FSDP2", True])
def test_unsupported_types_are_refused(kind: Any):
    assert error(written(distributed_type=kind)).splitlines() == [
        f"f.yaml, line 1: distributed_type: {kind!r} is not supported",
        "  Accelerate has it; here ranks are processes of torchrun, on the CPU or on CUDA",
        ("  fix: one of NO, MULTI_CPU, MULTI_GPU, FSDP; of DeepSpeed's ZeRO, stage 1 is MULTI_GPU and fs.optim.zero, "
         "stages 2 and 3 are SHARD_GRAD_OP and FULL_SHARD of FSDP"),
    ]  # fmt: skip


# contents of a file, and a part of the error
WRONG: list[tuple[dict[str, Any], str]] = [
    *((FSDP | keys, message) for keys, message in (
        ({"num_processes": 3, "num_machines": 2}, "3 % 2 = 1\n  fix: num_processes: 4"),
        ({"num_processes": 0}, "0 is not a number of ranks"),
        ({"num_processes": -2}, "-2 is not an integer of -1 or more"),
        ({"num_processes": "NUM_GPUS"}, "'NUM_GPUS' is not an integer"),
        ({"num_processes": True}, "True is not an integer"),
        ({"num_machines": 0}, "0 is not an integer of 1 or more"),
        ({"num_machines": 2, "machine_rank": 2}, "2 is not a rank of 2 machines\n  fix: 0 to 1"),
        ({"main_process_port": 70000}, "70000 is not a port"),
        ({"gpu_ids": "0,0"}, "'0,0' is not all, or different numbers"),
        ({"use_cpu": "maybe"}, "'maybe' is not true or false"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, "'AMAZON_SAGEMAKER' is not one of LOCAL_MACHINE"),
        ({"mixed_precision": "fp8"}, "'fp8' is not one of no, bf16, fp16"),
        ({"deepspeed_config": {"gradient_accumulation_steps": "auto"}}, "which is not an integer of 1 or more"),
        ({"fsdp_version": 2}, "fsdp_version: is in the wrong section\n  Accelerate reads it only in fsdp_config"),
        ({"dynamo_config": {"dynamo_num_machines": 2}}, "unknown key"),
        ({"fsdp_config": ["fsdp_version"]},
         "f.yaml, line 3: fsdp_config: ['fsdp_version'] is not a section of keys\n  fix: fsdp_config:"),
    )),
    *((FSDP | {"fsdp_config": config}, message) for config, message in (
        ({"reshard_after_forward": "ZERO"}, "is not true, false, or one of FULL_SHARD"),
        ({"version": 2, "state_dict_type": "LOCAL_STATE_DICT"}, "with fsdp_version 2, which Accelerate refuses too"),
        ({"offload_params": True, "fsdp_offload_params": False},
         "fsdp_config.fsdp_offload_params is set twice\n  fsdp_offload_params is also at f.yaml, line 4"),
    )),
]  # fmt: skip


@pytest.mark.parametrize(("contents", "message"), WRONG)
def test_wrong_values_are_refused(contents: dict[str, Any], message: str):
    assert message in error(written(**contents))


# --- the file ----------------------------------------------------------------------------------------------------


def test_unknown_key_is_an_error_with_the_nearest_one():
    got = error(written(distributed_type="FSDP", num_proceses=2, fsdp_config={"fsdp_offload_param": True, "foo": 1}))
    assert got.splitlines() == [
        "3 problems",
        "f.yaml, line 2: num_proceses: unknown key",
        "  Accelerate 1.15 does not have it",
        "  fix: num_processes, if that is meant; or remove it",
        "f.yaml, line 4: fsdp_config.fsdp_offload_param: unknown key",
        "  Accelerate 1.15 does not have it",
        "  fix: fsdp_config.fsdp_offload_params, if that is meant; or remove it",
        "f.yaml, line 5: fsdp_config.foo: unknown key",
        "  Accelerate 1.15 does not have it",
        "  fix: remove it",
    ]


def test_keys_replace_those_of_the_file():
    path = written(distributed_type="NO", num_processes=1, mixed_precision="bf16")
    settings = read(path, distributed_type="FSDP", num_processes=4, fsdp_sharding_strategy=2)
    assert settings == Settings(strategy="SHARD_GRAD_OP", processes=4, compute=torch.bfloat16)
    assert error(path, num_processes="x").startswith("--num_processes: 'x' is not an integer")
    assert error(path, num_processs=4).startswith("--num_processs: unknown key")


def test_damaged_json_is_an_error():
    Path("f.json").write_text('{"distributed_type": "NO", "debug": 1, "debug": 0}')
    assert error("f.json").startswith("f.json: debug is there twice")
    Path("f.json").write_text("{")
    assert error("f.json").startswith("f.json: is not JSON")
    assert error("none.yaml").startswith("none.yaml: ")


HOSTILE = {
    "laughs": ("\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]" for i in range(9)),
               "line 1: its aliases make more than "),
    "brackets": ("a: " + "[" * 9_000, "f.yaml: has 9,000 brackets\n  fix: 200 at most"),
    "length": ("#" * 40_000, "f.yaml: is too long\n  it has more than 32,768 bytes\n  fix: give the file that "),
    "a long value": ("num_processes: 0x" + "f" * 9_000, "f.yaml, line 1: a value has 9,002 characters\n  fix: 1,000"),
    "processes": (f"distributed_type: NO\nnum_processes: {10**30}",
                  f"f.yaml, line 2: num_processes: {10**30} is not an integer of 1,048,576 at most"),
    "machines": ("distributed_type: NO\nnum_machines: 0x" + "f" * 300, "is not an integer of 1,048,576 at most"),
    "a date": ("debug: 2001-99-99", "f.yaml: is not YAML\n  month must be in 1..12"),
    "an empty number": ("debug: !!int ''", "f.yaml: is not YAML\n  string index out of range"),
    "control": ('"\\e[2J": 1', r"f.yaml, line 1: \x1b[2J: unknown key"),
    "twice": ("distributed_type: FSDP\nnum_processes: 1\nnum_processes: 2\n",
              "f.yaml, line 3: num_processes is there twice\n  the first is at line 2"),
    "cut": ("distributed_type: FSDP\n bad: [\n", "f.yaml, line 2: is not YAML\n"),
    "a list": ("- 1\n", "f.yaml: has no keys\n  its contents are [1]"),
    "empty": ("", "f.yaml: has no keys"),
    "no type": ("num_processes: 2\n",
                "f.yaml: has no distributed_type\n  fix: distributed_type: FSDP, MULTI_GPU, MULTI_CPU or NO"),
    "an object": ("distributed_type: !!python/object:os.system x\n",
                  "f.yaml, line 1: is not YAML\n  could not determine a constructor"),
    "bytes": ("\udcff\udcfe\0", "f.yaml: is not text"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_damaged_and_hostile_files_are_errors_at_once(what: str):
    text, want = HOSTILE[what]
    Path("f.yaml").write_text(text, errors="surrogateescape")
    assert want in error("f.yaml")


def test_first_fifty_wrong_keys_are_listed():
    Path("f.yaml").write_text("".join(f"k{i}: 1\n" for i in range(3_000)))
    text = error("f.yaml")
    assert text.startswith("51 problems\nf.yaml, line 1: k0: unknown key")
    assert text.endswith("f.yaml: the keys after these are not read\n  fix: give a file of Accelerate")


def test_yaml_without_its_package_is_an_error(monkeypatch: pytest.MonkeyPatch):
    path = written(distributed_type="NO")
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    assert error(path) == (
        "f.yaml: a YAML file needs the package pyyaml\n  fix: pip install pyyaml, or use a .json file"
    )
    Path("f.json").write_text(json.dumps({"distributed_type": "NO"}))
    assert read("f.json") == Settings()


def test_settings_of_a_launch_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    assert fs.accelerate.settings() is None
    monkeypatch.setenv("FSHARD_CONFIG_FILE", str(T5_LORA))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the launcher has printed them
        assert fs.accelerate.settings().wrap == ("T5Block",)
        monkeypatch.setenv("FSHARD_CONFIG_KEYS", json.dumps({"num_processes": 4}))
        assert fs.accelerate.settings().axes == {"data": 4}
        monkeypatch.delenv("FSHARD_CONFIG_FILE")
        monkeypatch.setenv("FSHARD_CONFIG_KEYS", json.dumps({"distributed_type": "MULTI_CPU", "num_processes": 3}))
        assert fs.accelerate.settings() == Settings(processes=3, cpu=True)
    monkeypatch.setenv("FSHARD_CONFIG_KEYS", "{")
    with pytest.raises(ShardingError, match="FSHARD_CONFIG_KEYS is not JSON"):
        fs.accelerate.settings()


def test_settings_that_contradict_are_refused():
    for wrong in (
        {"processes": 0},
        {"accumulate": 0},
        {"wrap": "T5Block"},
        {"wrap": ()},
        {"wrap": 0},
        {"reshard": 1},
        {"processes": 4, "model": 3},
    ):
        with pytest.raises(ShardingError, match="Settings: "):
            Settings(**wrong)


# --- the page ----------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "launching.md"
START, END = "<!-- keys -->\n", "<!-- end of keys -->"


def listed() -> str:
    """Return the keys by section: what each becomes, and then why the others are refused or have no effect."""
    sections: dict[str, dict[tuple[str, str], list[str]]] = {}
    for name, key in KEYS.items():
        sections.setdefault(key.section, {}).setdefault((key.effect, key.meaning), []).append(f"`{name}`")
    wrap = textwrap.TextWrapper(120, subsequent_indent="  ", break_on_hyphens=False).fill
    text = ""
    for section, items in sorted(sections.items()):
        text += f"Keys of `{section}`:\n\n" if section else "Keys at the top of the file:\n\n"
        for (effect, meaning), names in items.items():
            if effect == "translated":
                text += wrap(f"- {', '.join(names)}{' →' if meaning[0] == '`' else ':'} {meaning}") + "\n"
        for effect, title in {"refused": "Refused", "none": "No effect"}.items():
            rest = [f"{', '.join(names)} ({meaning})" for (e, meaning), names in items.items() if e == effect]
            text += wrap(f"- {title}: {', '.join(rest)}") + "\n" if rest else ""
        text += "\n"
    return text


def test_page_has_every_key():
    assert listed() in PAGE.read_text(), "the list is out of date: python -m tests.interop.test_accelerate writes it"


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text[: text.index(START) + len(START)] + listed() + text[text.index(END) :])
