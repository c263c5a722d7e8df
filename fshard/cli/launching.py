"""`python -m fshard launch`: start the ranks of a script with torchrun, as an Accelerate file and the options say.

A rank has the environment of torchrun (RANK, WORLD_SIZE, ...), with one process too, so that `fs.make_mesh` makes a
process mesh; and the file's path, from which `fs.accelerate.settings()` reads.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fshard.errors import fail
from fshard.interop.accelerate import Settings
from fshard.interop.accelerate.keys import KEYS
from fshard.interop.accelerate.settings import FILE, KEYS_REPLACED, read_launched

_SWITCHES = ("use_cpu", "debug", "same_network", "enable_cpu_affinity", "downcast_bf16", "dynamo_use_fullgraph",
             "dynamo_use_dynamic")  # fmt: skip
_PASSED_ON = {  # options of torchrun itself
    "max_restarts": "times that all ranks are started again after one has failed",
    "monitor_interval": "seconds between two looks at the ranks",
    "rdzv_id": "name of this run, if several share a rendezvous",
    "rdzv_conf": "more of the rendezvous: a=1,b=2",
    "tee": "also write the output of the ranks to files: 3 for all of it",
    "log_dir": "folder of these files",
    "role": "name of the ranks in logs",
}


def add(commands: Any) -> None:
    """Add `launch` to the commands of a parser."""
    command = commands.add_parser(
        "launch", allow_abbrev=False, help="run a script on several devices, with torchrun and an Accelerate file",
        usage="python -m fshard launch [--config_file FILE] [options] [-m] SCRIPT ...",
        description="Run a script with torchrun. Options have the names of `accelerate launch` and of torchrun, with _ "
                    "or -, and replace the keys of the file. Without both: one rank for each GPU, or one on the CPU.",
        epilog="The exit status comes from the first rank that fails; it is 130 after Ctrl-C, and 2 if nothing starts.",
    )  # fmt: skip
    _option(command, "config_file", metavar="FILE", help="of `accelerate config`")
    ranks = command.add_argument_group("ranks")
    _option(ranks, "num_processes", metavar="N", help="ranks of all machines together")
    _option(ranks, "nproc_per_node", metavar="N", help="ranks of each machine, instead")
    _option(ranks, "num_machines", "nnodes", metavar="N", help="or --nnodes; 1:4: machines may leave and join the run")
    _option(ranks, "machine_rank", "node_rank", metavar="N", help="or --node_rank: of this machine, from 0")
    _option(ranks, "main_process_ip", "master_addr", metavar="HOST", help="or --master_addr: of the machine of rank 0")
    _option(ranks, "main_process_port", "master_port", metavar="PORT",
            help="or --master_port; 0: a free one")  # fmt: skip
    _option(ranks, "rdzv_backend", metavar="NAME", help="static or c10d")
    _option(ranks, "rdzv_endpoint", metavar="HOST:PORT", help="instead of an address and a port")
    _option(ranks, "cpu", "use_cpu", switch=True, dest="use_cpu", help="ranks on the CPU, also where there is a GPU")
    _option(ranks, "gpu_ids", metavar="0,1", help="the GPUs of this machine to use")
    _option(ranks, "num_cpu_threads_per_process", metavar="N", help="OMP_NUM_THREADS; by default the cores are shared")
    for name, text in _PASSED_ON.items():
        _option(ranks, name, metavar="X", help=text)
    kind = command.add_argument_group("strategy")
    _option(kind, "use_fsdp", switch=True, help="distributed_type FSDP")
    _option(kind, "multi_gpu", switch=True, help="distributed_type MULTI_GPU: data parallel")
    given = {"num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend",
             "use_cpu", "gpu_ids"}  # fmt: skip
    for name, key in KEYS.items():
        shown = key.effect == "translated" and name not in ("compute_environment", "deepspeed_config", "fp16")
        if name not in given and (shown or key.section == "fsdp_config" or name in _SWITCHES):
            _option(kind, name, switch=name in _SWITCHES, metavar="X", help=key.meaning.replace("%", "%%"))
    _option(command, "module", "m", switch=True, help="SCRIPT is a module, as for python -m")
    _option(command, "no_python", switch=True, help="SCRIPT is a program, run without python")
    command.add_argument("script", metavar="SCRIPT")
    command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="the arguments of SCRIPT")
    command.set_defaults(run=launch)


def _option(command: Any, *names: str, switch: bool = False, **kwargs: Any) -> None:
    """Add an option under each name, with _ and with -; the help shows the first.

    An option that is not passed is left out of the result.
    """
    flags = [f"-{name}" if len(name) == 1 else f"--{name}" for name in names]
    flags += [flag.replace("_", "-") for flag in flags if "_" in flag]
    kwargs = {"dest": names[0], "default": argparse.SUPPRESS, **kwargs}
    if switch:
        kwargs.pop("metavar", None)
        kwargs |= {"action": "store_const", "const": True}
    action = command.add_argument(*flags, **kwargs)
    action.option_strings = flags[:1] if len(flags[-1]) > 2 else flags[:2]  # the help shows one name of each


def launch(options: argparse.Namespace) -> int:
    """Start the ranks, wait for them, and return 0, or the exit status of the rank that failed first."""
    given = {name: x for name, x in vars(options).items() if name not in ("run", "script", "arguments")}
    file = given.pop("config_file", None)
    nodes, variables = _take_range(given)
    settings, keys = _settings(file, given)
    _check_script(options.script, given)
    for warning in settings.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    per_machine = _check_devices(settings)
    if not nodes:
        _check_port(settings)
    arguments = [*torchrun_arguments(settings, given), *nodes, options.script, *options.arguments]
    with _environment(environment(settings, file, keys, given, per_machine) | variables):
        return _run(arguments)


def _take_range(given: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Replace a range of machines, `--nnodes 1:4`, by the most of them. Return torchrun's argument and variables."""
    nodes = str(given.get("num_machines", ""))
    if ":" not in nodes:
        return [], {}
    least, _, most = nodes.partition(":")
    if not (least.isdecimal() and most.isdecimal() and 1 <= int(least) <= int(most)):
        raise fail(f"--nnodes {nodes}: is not a range of machines", fix="the least and the most of them: --nnodes 1:4")
    if "nproc_per_node" not in given or given.get("rdzv_backend", "c10d") == "static":
        raise fail(f"--nnodes {nodes}: the number of all ranks may change, and each machine has the same role",
                   fix="--nproc_per_node N, without --num_processes; and --rdzv_backend c10d")  # fmt: skip
    given |= {"num_machines": most, "rdzv_backend": given.get("rdzv_backend", "c10d")}
    # In torch 2.13 a machine that joins later waits for the address of a store that the others keep for all attempts.
    return [f"--nnodes={nodes}"], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


def _settings(file: str | None, given: Mapping[str, Any]) -> tuple[Settings, dict[str, Any]]:
    """Return the settings, and the keys that the options replace."""
    keys = {name: x for name, x in given.items() if name in KEYS}
    if endpoint := given.get("rdzv_endpoint"):
        host, colon, port = endpoint.rpartition(":")
        if not colon:
            raise fail(f"--rdzv_endpoint {endpoint}: has no port", fix=f"--rdzv_endpoint {endpoint}:29500")
        keys |= {"main_process_ip": host.strip("[]"), "main_process_port": port}
    kinds = [kind for name, kind in (("use_fsdp", "FSDP"), ("multi_gpu", "MULTI_GPU")) if given.get(name)]
    if len(kinds) > 1:
        raise fail("--use_fsdp and --multi_gpu: a run has one distributed_type", fix="leave one of them out")
    if kinds:
        keys["distributed_type"] = kinds[0]
    elif file is None and "distributed_type" not in keys:
        keys["distributed_type"] = _kind_without_file(given)
    if file is None and "num_processes" not in keys and "nproc_per_node" not in given:
        on_cpu = keys.get("use_cpu") or keys["distributed_type"] == "MULTI_CPU"
        per_machine = 1 if on_cpu else max(1, _gpu_count())
        keys["num_processes"] = per_machine * read_launched(None, {**keys, "num_processes": -1}).machines
    if per_node := given.get("nproc_per_node"):
        if "num_processes" in keys:
            raise fail("--num_processes and --nproc_per_node: one counts all ranks, the other those on a machine",
                       fix="leave one of them out")  # fmt: skip
        if not str(per_node).isdecimal() or int(per_node) < 1:
            raise fail(f"--nproc_per_node {per_node}: is not a number of ranks", fix="--nproc_per_node 2")
        machines = read_launched(file, {**keys, "num_processes": -1}).machines
        keys["num_processes"] = machines * int(per_node)
    settings = read_launched(file, keys)
    wanted = keys.get("num_processes")
    if settings.processes is None:
        raise fail(f"launch: {file or 'the command line'} does not say how many ranks to start",
                   fix="--num_processes 2")  # fmt: skip
    if wanted and KEYS["num_processes"].parse(wanted) != settings.processes:
        raise fail(f"--num_processes {wanted}: distributed_type is NO, which is one process",
                   fix="--use_fsdp, --multi_gpu, or --distributed_type MULTI_CPU")  # fmt: skip
    return settings, keys


def _kind_without_file(given: Mapping[str, Any]) -> str:
    several = any(str(given.get(name, 1)) != "1" for name in ("num_processes", "nproc_per_node", "num_machines"))
    if given.get("use_cpu") or _gpu_count() == 0:
        return "MULTI_CPU" if several else "NO"
    return "MULTI_GPU"


def _gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _check_script(script: str, given: Mapping[str, Any]) -> None:
    if given.get("no_python"):
        if given.get("module"):
            raise fail("launch: --no_python and --module", "a module is run by python", fix="leave one of them out")
        if shutil.which(script) is None:
            raise fail(f"launch: there is no program {script}", fix="its path, ./program; or a name in PATH")
        return
    if given.get("module"):
        try:
            found = importlib.util.find_spec(script) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise fail(f"launch: python finds no module {script}", fix="leave out -m if it is the path of a file")
    elif not Path(script).is_file():
        raise fail(f"launch: there is no file {script}", fix="the path of a script; or -m and the name of a module")


def _check_devices(settings: Settings) -> int:
    """Return the number of ranks of a machine. Raises ShardingError if it has fewer GPUs."""
    assert settings.processes is not None
    per_machine, gpus = settings.processes // settings.machines, _gpu_count()
    if settings.cpu:
        return per_machine
    if gpus == 0:
        print("launch: there is no CUDA device: ranks on the CPU, over gloo", file=sys.stderr)
    elif settings.gpus and max(settings.gpus) >= gpus:
        raise fail(f"launch: gpu_ids are {', '.join(map(str, settings.gpus))}", f"this machine has {gpus} GPUs, from 0",
                   fix=f"0 to {gpus - 1}")  # fmt: skip
    elif per_machine > len(settings.gpus or range(gpus)):
        have = f"gpu_ids are {', '.join(map(str, settings.gpus))}" if settings.gpus else f"it has {gpus} GPUs"
        most = len(settings.gpus or range(gpus)) * settings.machines
        raise fail(f"launch: {per_machine} ranks on this machine, and {have}", "each rank needs its GPU",
                   fix=f"--num_processes {most}, or --cpu")  # fmt: skip
    return per_machine


def _check_port(settings: Settings) -> None:
    """Raise ShardingError if several machines lack an address, or the port is taken on the machine that serves it."""
    is_local = settings.machines == 1 and settings.rendezvous in ("static", "c10d")
    if not is_local and (settings.address is None or settings.port is None):
        missing = [name for name, x in (("main_process_ip", settings.address), ("main_process_port", settings.port))
                   if x is None]  # fmt: skip
        what = f"{settings.machines} machines" if settings.machines > 1 else f"rdzv_backend {settings.rendezvous}"
        raise fail(f"launch: {what} need{'s' * (settings.machines == 1)} {' and '.join(missing)}",
                   "the ranks meet there",
                   fix="--main_process_ip HOST --main_process_port 29500")  # fmt: skip
    if settings.port is not None and settings.machine_rank == 0 and settings.rendezvous in ("static", "c10d"):
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("", settings.port))
            except OSError as e:
                fix = "--main_process_port 0 takes a free one" if settings.machines == 1 else "another port, everywhere"
                raise fail(f"launch: port {settings.port} cannot be used", str(e.strerror), fix=fix) from e


def torchrun_arguments(settings: Settings, given: Mapping[str, Any]) -> list[str]:
    """Return the arguments of torchrun, without the script."""
    assert settings.processes is not None
    arguments = [f"--nnodes={settings.machines}", f"--nproc_per_node={settings.processes // settings.machines}"]
    if settings.machines == 1 and settings.port is None and settings.rendezvous in ("static", "c10d"):
        arguments.append("--standalone")
    else:
        endpoint = f"{settings.address or '127.0.0.1'}:{settings.port or 0}"
        arguments += [f"--node_rank={settings.machine_rank}", f"--rdzv_backend={settings.rendezvous}",
                      f"--rdzv_endpoint={endpoint}"]  # fmt: skip
    arguments += [f"--{name}={given[name]}" for name in _PASSED_ON if name in given]
    arguments.append("--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")  # by default all but the last
    return arguments + [f"--{name}" for name in ("module", "no_python") if given.get(name)]


def environment(
    settings: Settings, file: str | None, keys: Mapping[str, Any], given: Mapping[str, Any], per_machine: int
) -> dict[str, str]:
    """Return the variables of the ranks' environment that the launcher sets."""
    out = {KEYS_REPLACED: json.dumps(dict(keys)), FILE: str(Path(file).absolute()) if file else ""}
    if settings.cpu:
        out["CUDA_VISIBLE_DEVICES"] = ""  # so that the mesh is on the CPU
    elif settings.gpus is not None:
        out["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, settings.gpus))
    if threads := given.get("num_cpu_threads_per_process"):
        if not threads.isdecimal() or int(threads) < 1:
            raise fail(f"--num_cpu_threads_per_process {threads}: is not a number of threads", fix="1 or more")
        out["OMP_NUM_THREADS"] = threads
    elif "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        out["OMP_NUM_THREADS"] = str(max(1, cores // per_machine))
    return out


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _run(arguments: Sequence[str]) -> int:
    """Run torchrun in this process, and return the exit status."""
    torchrun: Any = importlib.import_module("torch.distributed.run")  # has no annotations
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    try:
        torchrun.run(torchrun.parse_args(list(arguments)))
    except ChildFailedError as e:
        rank, failure = e.get_first_failure()
        code = failure.exitcode
        how = f"exit status {code}" if code > 0 else f"signal {-code}"
        print(f"launch: rank {rank} failed first, with {how}", file=sys.stderr)
        return code if code > 0 else 128 - code
    except SignalException as e:  # torchrun has passed it on to the ranks, and waited for them
        return 128 + int(e.sigval)
    except (RendezvousError, torch.distributed.DistError) as e:
        raise fail("launch: the machines did not meet", str(e).partition("\n")[0],
                   fix="the same address, port and number of machines on each of them, started within the timeout, "
                       "which --rdzv_conf timeout=SECONDS sets") from e  # fmt: skip
    except (AssertionError, ValueError) as e:
        raise fail("launch: torchrun refuses the options", str(e)) from e
    return 0
