"""`python -m fshard config`: ask about the machines and the strategy, and write a file that Accelerate reads as well.

The questions are those of `accelerate config` that have a meaning here.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from fshard.errors import fail
from fshard.interop.accelerate.config_file import SECTIONS, import_yaml, write_config
from fshard.interop.accelerate.keys import KEYS
from fshard.interop.accelerate.settings import read_launched

_FILE = "fshard.yaml"
_LOCAL = {"compute_environment": "LOCAL_MACHINE", "downcast_bf16": "no", "main_training_function": "main"}
_NO_TYPE, _CPU, _GPU = "one process", "several processes on CPUs", "several GPUs"


def add(commands: Any) -> None:
    """Add `config` to the commands of a parser."""
    command = commands.add_parser(
        "config", help="write a file for launch: asks how many devices, which strategy, which precision",
        description="Ask about the machines, the strategy and the precision, and write a file for `launch`, which "
                    "`accelerate launch` reads as well. Return takes the value in capitals or brackets.",
    )  # fmt: skip
    command.add_argument("--config_file", default=_FILE, metavar="FILE", help=f"YAML, or .json (default: {_FILE})")
    command.add_argument("--default", action="store_true", help="ask nothing: all GPUs of this machine, data parallel")
    command.add_argument("--mixed_precision", choices=("no", "bf16", "fp16"), help="with --default")
    command.set_defaults(run=config)


def config(options: argparse.Namespace) -> str:
    """Write the file, and return the command that uses it. Raises ShardingError if nothing was written."""
    path = Path(options.config_file)
    if path.is_dir():
        raise fail(f"config: {path} is a folder", fix=f"--config_file {path / _FILE}")
    if not path.parent.is_dir():  # known before the questions
        raise fail(f"config: cannot write {path}", f"there is no folder {path.parent}",
                   fix="--config_file with another path")  # fmt: skip
    if path.suffix != ".json":
        import_yaml(path)
    if options.mixed_precision and not options.default:
        raise fail("config: --mixed_precision is asked", fix="--default --mixed_precision bf16")
    if path.exists() and options.default:
        raise fail(f"config: {path} exists, and is not replaced", fix="--config_file with another name")
    if path.exists() and not _ask_bool(f"{path} exists. Replace it?", False):
        return f"{path} is unchanged"
    contents = default(options.mixed_precision or "no") if options.default else questionnaire()
    settings = read_launched(None, {name: x for name, x in _flat(contents).items() if x is not None})
    _write(path, contents)
    axes = ", ".join(f"{axis}={n}" for axis, n in settings.axes.items())
    return f"{path}: {settings.strategy}, {axes}\npython -m fshard launch --config_file {path} SCRIPT"


def _write(path: Path, contents: dict[str, Any]) -> None:
    """Write the file at once: after a failure the old one is there, or none."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
            temporary = Path(folder) / path.name
            write_config(temporary, contents)
            os.replace(temporary, path)
    except OSError as e:
        raise fail(f"config: cannot write {path}", str(e.strerror), fix="--config_file with another path") from e


def _flat(contents: dict[str, Any]) -> dict[str, Any]:
    """Return the keys, with those of sections at the top."""
    out = {name: x for name, x in contents.items() if name not in SECTIONS}
    for section in SECTIONS:
        out |= contents.get(section, {})
    return out


def default(mixed_precision: str) -> dict[str, Any]:
    """Return the contents of the file for this machine: all its GPUs, or one process on the CPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return _LOCAL | {
        "distributed_type": "MULTI_GPU" if gpus > 1 else "NO", "num_processes": max(1, gpus), "num_machines": 1,
        "use_cpu": gpus == 0, "mixed_precision": mixed_precision, "debug": False,
    }  # fmt: skip


def questionnaire() -> dict[str, Any]:
    """Ask all questions, and return the contents of the file."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    out: dict[str, Any] = dict(_LOCAL)
    kind = _ask_option("On what does the script run?", (_NO_TYPE, _CPU, _GPU), _GPU if gpus > 1 else _NO_TYPE)
    out["use_cpu"] = kind == _CPU
    machines = 1
    if kind != _NO_TYPE:
        out |= _ask_machines()
        machines = out["num_machines"]
    elif gpus:
        out["use_cpu"] = _ask_bool("On the CPU, although there is a GPU?", False)
    out["debug"] = _ask_bool("Check the transfers of every call, which is slower?", False)
    if _ask_bool("Compile each step with torch.compile?", False):
        out["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    out["distributed_type"] = {_NO_TYPE: "NO", _CPU: "MULTI_CPU", _GPU: "MULTI_GPU"}[kind]
    out["num_processes"] = 1
    if kind != _NO_TYPE:
        most = max(gpus, 1) * machines if kind == _GPU else 2 * machines

        def multiple(text: str) -> int:
            n = int(KEYS["num_processes"].parse(text))
            if n < 1 or n % machines:
                raise ValueError(f"a multiple of {machines}, the number of machines" if n > 0 else "1 or more")
            return n

        out["num_processes"] = _ask("How many processes on all machines together?", multiple, most)
        if _ask_bool("Shard parameters, gradients and optimizer state (FSDP)?", False):
            out["distributed_type"] = "FSDP"
            out["fsdp_config"] = _ask_fsdp()
            if out["fsdp_config"]["fsdp_version"] == 2:
                out |= _ask_parallelism(out["num_processes"])
    if not out["use_cpu"] and gpus:
        out["gpu_ids"] = _ask_key("gpu_ids", "Which GPUs of this machine, as 0,1?", "all")
    out["mixed_precision"] = _ask_option("In which precision does the script compute?", ("no", "bf16", "fp16"), "no")
    return out


def _ask_machines() -> dict[str, Any]:
    out: dict[str, Any] = {"num_machines": _ask_key("num_machines", "How many machines?", 1)}
    if (machines := out["num_machines"]) == 1:
        return out

    def rank(text: str) -> int:
        n = int(KEYS["machine_rank"].parse(text))
        if n >= machines:
            raise ValueError(f"one of 0 to {machines - 1}")
        return n

    out["machine_rank"] = _ask("Which rank has this machine?", rank, None)
    out["main_process_ip"] = _ask_key("main_process_ip", "Address of the machine with rank 0?", None)
    out["main_process_port"] = _ask_key("main_process_port", "A free port on that machine?", 29500)
    out["same_network"] = _ask_bool("Are all machines in one local network?", True)
    if not out["same_network"]:
        out["rdzv_backend"] = _ask_option("How do the machines meet?", ("static", "c10d"), "static")
    return out


def _ask_fsdp() -> dict[str, Any]:
    """Ask for `fsdp_config`. Version 1 has its strategy under the key that Accelerate reads."""
    version = int(_ask_option("Which version of FSDP?", ("1", "2"), "2"))
    out: dict[str, Any] = {"fsdp_version": version}
    if version == 1:
        names = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
        out["fsdp_sharding_strategy"] = _ask_option("Which strategy?", names, "FULL_SHARD")
    else:
        again = "Free weights after forward, and gather them again in backward?"
        out["fsdp_reshard_after_forward"] = _ask_bool(again, True)
    out["fsdp_offload_params"] = _ask_bool("Keep parameters and optimizer state in host memory?", False)
    policies = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
    policy = _ask_option("Which submodules are gathered as one unit?", policies, policies[0])
    out["fsdp_auto_wrap_policy"] = policy
    if policy == "TRANSFORMER_BASED_WRAP":
        names_of = "Names of their classes, as T5Block or BertLayer,BertEmbeddings (none: those that the model names)?"
        classes = _ask(names_of, KEYS["fsdp_transformer_layer_cls_to_wrap"].parse, "")
        if classes:
            out["fsdp_transformer_layer_cls_to_wrap"] = ",".join(classes)
    elif policy == "SIZE_BASED_WRAP":
        out["fsdp_min_num_params"] = _ask_key("fsdp_min_num_params", "With how many parameters, at least?", 100_000_000)
    if version == 1:
        prefetch = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
        text = "Gather the next unit in backward before or after the current one is differentiated, or when needed?"
        out["fsdp_backward_prefetch"] = _ask_option(text, prefetch, prefetch[0])
        out["fsdp_forward_prefetch"] = _ask_bool("Gather the next unit ahead in forward?", False)
    kinds = ("FULL_STATE_DICT", "SHARDED_STATE_DICT", *(("LOCAL_STATE_DICT",) if version == 1 else ()))
    out["fsdp_state_dict_type"] = _ask_option("In which form is a state saved?", kinds, "SHARDED_STATE_DICT")
    out["fsdp_activation_checkpointing"] = _ask_bool("Recompute activations in backward, to save memory?", False)
    return out


def _ask_parallelism(processes: int) -> dict[str, Any]:
    if processes == 1 or not _ask_bool("Replicate over groups of ranks, or split the model's matrices too?", False):
        return {}

    def divisor(of: int) -> Callable[[str], int]:
        def parse(text: str) -> int:
            n = int(KEYS["parallelism_config_tp_size"].parse(text))
            if of % n:
                raise ValueError(f"a divisor of {of}: {of} % {n} = {of % n}")
            return n

        return parse

    replicas = _ask("How many groups, each with all parameters?", divisor(processes), 1)
    model = _ask("Over how many ranks are matrices split (tensor parallel)?", divisor(processes // replicas), 1)
    sizes = {"dp_replicate_size": replicas, "dp_shard_size": processes // replicas // model, "tp_size": model}
    return {"parallelism_config": {f"parallelism_config_{name}": n for name, n in sizes.items()}}


# --- one question -------------------------------------------------------------------------------------------------


def _ask(text: str, parse: Callable[[str], Any], default: Any) -> Any:
    """Ask until the answer is valid, saying each time which answers are; None as default: there has to be one."""
    shown = "" if default in (None, "") else f" [{default}]"
    while True:
        try:
            answer = input(f"{text}{shown} ").strip()
        except EOFError as e:
            raise fail(f"config: no answer to {text!r}, and nothing is written",
                       fix="--default asks nothing") from e  # fmt: skip
        if not answer and default is not None:
            return default
        try:
            return parse(answer)
        except ValueError as e:
            print(f"  {answer!r} is not {e}" if answer else f"  an answer is needed: {e}")


def _ask_key(name: str, text: str, default: Any) -> Any:
    """Ask for the value of a key; it is written as it was entered, if that is a text."""

    def parse(answer: str) -> Any:
        value = KEYS[name].parse(answer)
        return value if isinstance(value, int) else answer

    return _ask(text, parse, default)


def _ask_bool(text: str, default: bool) -> bool:
    def parse(answer: str) -> bool:
        if answer.lower() not in ("yes", "no", "y", "n"):
            raise ValueError("yes or no")
        return answer.lower()[0] == "y"

    value = _ask(f"{text} [{'YES/no' if default else 'yes/NO'}]", parse, "")
    return default if value == "" else bool(value)


def _ask_option(text: str, options: Sequence[str], default: str) -> str:
    """Ask for one of several options, by its name in any case or its number in the list."""
    by_number = {str(i): option for i, option in enumerate(options, 1)}
    accepted = {**by_number, **{option.lower(): option for option in options}}
    if any(option.isdecimal() for option in options):
        accepted = {option: option for option in options}
        lines = ""
    else:
        lines = "".join(f"\n  {i}  {option}" for i, option in by_number.items()) + "\n "

    def parse(answer: str) -> str:
        if answer.lower() not in accepted:
            raise ValueError(f"one of {', '.join(options)}")
        return accepted[answer.lower()]

    return str(_ask(f"{text}{lines}", parse, default))
