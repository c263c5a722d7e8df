"""`python -m fshard launch`: what torchrun and the ranks get, the exit status, and errors before anything starts."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

import fshard as fs
from fshard.cli import main

T5_LORA = Path(__file__).parents[1] / "interop" / "t5_lora_fsdp.yaml"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    Path("train.py").write_text("")


def gpus(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: n)


def launched(monkeypatch: pytest.MonkeyPatch, *argv: str) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """Return torchrun's own arguments, the keys that the ranks get, and their environment."""
    seen: list[Any] = []
    monkeypatch.setattr(torchrun, "run", lambda args: seen.append((args, dict(os.environ))))
    before = dict(os.environ)
    assert main(["launch", *argv]) == 0
    assert dict(os.environ) == before
    args, env = seen[0]
    return args, json.loads(env["FSHARD_CONFIG_KEYS"]), env


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["launch", *argv]) == 2
    return capsys.readouterr().err.rstrip("\n")


# --- torchrun and the environment -------------------------------------------------------------------------------


def test_one_machine_meets_at_a_free_port(monkeypatch):
    args, keys, env = launched(monkeypatch, "--config_file", str(T5_LORA), "train.py", "--lr", "1")
    assert (args.nnodes, args.nproc_per_node, args.standalone, args.module) == ("1", "2", True, False)
    assert (args.training_script, args.training_script_args) == ("train.py", ["--lr", "1"])
    assert env["FSHARD_CONFIG_FILE"] == str(T5_LORA)
    assert keys == {}
    assert "CUDA_VISIBLE_DEVICES" not in env.keys() - os.environ.keys()


def test_several_machines_meet_at_the_address(monkeypatch):
    where = ["--num_machines=2", "--machine_rank=1", "--main_process_ip=node0", "--main_process_port=29501"]
    args, keys, _ = launched(monkeypatch, "--config_file", str(T5_LORA), *where, "--num_processes", "8", "train.py")
    config, _, _ = torchrun.config_from_args(args)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 4)
    assert (config.rdzv_backend, config.rdzv_endpoint, config.rdzv_configs["rank"]) == ("static", "node0:29501", 1)
    assert keys["num_processes"] == "8"
    other = ["--nnodes=2", "--node-rank=1", "--rdzv-endpoint=node0:29501", "--rdzv-backend=c10d", "--rdzv-id=a"]
    args, keys, _ = launched(monkeypatch, *other, "--nproc-per-node=4", "train.py")
    config, _, _ = torchrun.config_from_args(args)
    assert (config.nproc_per_node, config.rdzv_backend, config.rdzv_endpoint) == (4, "c10d", "node0:29501")
    assert config.run_id == "a"
    assert (keys["num_processes"], keys["distributed_type"]) == (8, "MULTI_CPU")


def test_range_of_machines_is_passed_on(monkeypatch, capsys):
    run = ["--nproc-per-node=2", "--rdzv-endpoint=node0:29501", "--max-restarts=9", "train.py"]
    args, keys, env = launched(monkeypatch, "--nnodes=1:4", *run)
    assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    config, _, _ = torchrun.config_from_args(args)
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (1, 4, 2, 9)
    assert (config.rdzv_backend, config.rdzv_endpoint, keys["num_processes"]) == ("c10d", "node0:29501", 8)
    for nodes in ("4:1", "0:2", "1:", "1:b"):
        assert error(capsys, f"--nnodes={nodes}", *run) == (
            f"--nnodes {nodes}: is not a range of machines\n  fix: the least and the most of them: --nnodes 1:4"
        )
    for wrong in (["--num-processes=4", "train.py"], ["--rdzv-backend=static", *run]):
        assert error(capsys, "--nnodes=1:2", *wrong) == (
            "--nnodes 1:2: the number of all ranks may change, and each machine has the same role\n"
            "  fix: --nproc_per_node N, without --num_processes; and --rdzv_backend c10d")  # fmt: skip


def test_options_replace_the_keys_of_the_file(monkeypatch):
    """In either spelling; the ranks read the same settings as the launcher."""
    options = ["--mixed-precision", "bf16", "--fsdp_sharding_strategy=2", "--fsdp-backward-prefetch=NO_PREFETCH"]
    Path("f.yaml").write_text("distributed_type: FSDP\nnum_processes: 2\n")
    _, keys, env = launched(monkeypatch, "--config-file", "f.yaml", *options, "train.py")
    assert keys == {"mixed_precision": "bf16", "fsdp_sharding_strategy": "2", "fsdp_backward_prefetch": "NO_PREFETCH"}
    for name in ("FSHARD_CONFIG_FILE", "FSHARD_CONFIG_KEYS"):
        monkeypatch.setenv(name, env[name])
    monkeypatch.chdir("/")  # the path of the file is absolute
    settings = fs.accelerate.settings()
    assert (settings.strategy, settings.compute) == (
        "SHARD_GRAD_OP",
        fs.interop.accelerate.settings.__globals__["torch"].bfloat16,
    )


def test_options_of_torchrun_are_passed_on(monkeypatch):
    Path("pkg").mkdir()
    Path("pkg/__init__.py").write_text("")
    monkeypatch.syspath_prepend(".")
    options = ["--max_restarts=3", "--monitor_interval", "0.5", "--tee=3", "--log_dir=logs", "--role=trainer"]
    args, _, _ = launched(monkeypatch, *options, "-m", "pkg", "-m", "1")
    assert (args.max_restarts, args.monitor_interval, args.tee, args.log_dir) == (3, 0.5, "3", "logs")
    assert (args.role, args.module, args.training_script, args.training_script_args) == (
        "trainer",
        True,
        "pkg",
        ["-m", "1"],
    )
    args, _, _ = launched(monkeypatch, "--no_python", sys.executable, "x")
    assert (args.no_python, args.training_script) == (True, sys.executable)


def test_ranks_without_a_file(monkeypatch):
    def kind(*argv: str) -> tuple[Any, ...]:
        args, keys, _ = launched(monkeypatch, *argv, "train.py")
        return keys["distributed_type"], int(args.nproc_per_node)

    assert kind() == ("NO", 1)
    assert kind("--num_processes", "3") == kind("--num_processes", "3.0") == ("MULTI_CPU", 3)
    assert kind("--use_fsdp", "--num_processes", "3") == ("FSDP", 3)
    gpus(monkeypatch, 4)
    assert kind() == ("MULTI_GPU", 4)
    assert kind("--use_fsdp") == ("FSDP", 4)
    assert kind("--cpu") == ("NO", 1)
    assert kind("--cpu", "--nproc_per_node", "2") == ("MULTI_CPU", 2)


def test_devices_of_the_ranks(monkeypatch):
    gpus(monkeypatch, 4)
    file = ["--config_file", str(T5_LORA)]
    assert launched(monkeypatch, *file, "--gpu_ids", "1,3", "train.py")[2]["CUDA_VISIBLE_DEVICES"] == "1,3"
    assert launched(monkeypatch, *file, "--cpu", "train.py")[2]["CUDA_VISIBLE_DEVICES"] == ""
    assert launched(monkeypatch, *file, "--num_cpu_threads_per_process=7", "train.py")[2]["OMP_NUM_THREADS"] == "7"
    cores = len(os.sched_getaffinity(0))
    assert launched(monkeypatch, *file, "train.py")[2]["OMP_NUM_THREADS"] == str(max(1, cores // 2))
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert launched(monkeypatch, *file, "train.py")[2]["OMP_NUM_THREADS"] == "5"


def test_free_port_is_used_as_it_is_given(monkeypatch):
    with socket.socket() as s:
        s.bind(("", 0))
        port = s.getsockname()[1]
    args, _, _ = launched(monkeypatch, "--num_processes=2", f"--main_process_port={port}", "train.py")
    config, _, _ = torchrun.config_from_args(args)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("static", f"127.0.0.1:{port}")
    args, _, _ = launched(monkeypatch, "--num_processes=2", "--main_process_port=0", "train.py")
    assert args.standalone


# --- exit status -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("raised", "status"), [
    (ChildFailedError("x", {2: ProcessFailure(0, 1, 7, "<NONE>")}), 7),
    (ChildFailedError("x", {2: ProcessFailure(0, 1, -9, "<NONE>")}), 137),
    (SignalException("x", signal.SIGINT), 130), (SignalException("x", signal.SIGTERM), 143),
    (KeyboardInterrupt(), 130),
])  # fmt: skip
def test_exit_status_is_that_of_the_ranks(monkeypatch, capsys, raised: BaseException, status: int):
    def run(_: Any) -> None:
        raise raised

    monkeypatch.setattr(torchrun, "run", run)
    assert main(["launch", "train.py"]) == status
    if isinstance(raised, ChildFailedError):
        how = "exit status 7" if status == 7 else "signal 9"
        assert f"launch: rank 2 failed first, with {how}" in capsys.readouterr().err


@pytest.mark.parametrize("raised", [RendezvousTimeoutError("late"), torch.distributed.DistStoreError("late\nframes")])
def test_machines_that_do_not_meet_are_an_error(monkeypatch, capsys, raised: Exception):
    def run(_: Any) -> None:
        raise raised

    monkeypatch.setattr(torchrun, "run", run)
    assert "\nlaunch: the machines did not meet\n  late\n  fix: the same address" in error(capsys, "train.py")


# --- errors before anything starts --------------------------------------------------------------------------------


@pytest.mark.parametrize(("argv", "message"), [
    (["none.py"], "launch: there is no file none.py\n  fix: the path of a script; or -m and the name of a module"),
    (["-m", "no.such.module"], "launch: python finds no module no.such.module\n  fix: leave out -m"),
    (["-m", "train.py"], "launch: python finds no module train.py"),
    (["--config_file", "none.yaml", "train.py"], "none.yaml: "),
    (["--num_processes", "x", "train.py"], "--num_processes: 'x' is not an integer"),
    (["--num_processes", "1e999", "train.py"], "--num_processes: '1e999' is not an integer"),
    (["--num_machines", "x", "train.py"], "--num_machines: 'x' is not an integer of 1 or more"),
    (["--num_cpu_threads_per_process", "x", "train.py"], "--num_cpu_threads_per_process x: is not a number of threads"),
    (["--nproc_per_node", "gpu", "train.py"], "--nproc_per_node gpu: is not a number of ranks"),
    (["--nproc_per_node", "2", "--num_processes", "2", "train.py"], "one counts all ranks"),
    (["--num_processes", "3", "--num_machines", "2", "train.py"], "3 % 2 = 1"),
    (["--num_machines", "2", "--num_processes", "2", "train.py"], "2 machines need main_process_ip and main_process_"),
    (["--num_machines", "2", "--num_processes", "2", "--master_addr=a", "train.py"], "2 machines need main_process_p"),
    (["--rdzv_backend", "etcd", "train.py"], "rdzv_backend etcd needs main_process_ip and main_process_port"),
    (["--max_restarts", "-1", "train.py"], "launch: torchrun refuses the options\n  max_restarts must be >= 0"),
    (["--rdzv_endpoint", "node0", "train.py"], "--rdzv_endpoint node0: has no port"),
    (["--use_fsdp", "--multi_gpu", "train.py"], "a run has one distributed_type"),
    (["--no_python", "-m", "x"], "a module is run by python"),
    (["--no_python", "no-such-program"], "launch: there is no program no-such-program"),
    (["--mixed_precision", "fp8", "train.py"], "--mixed_precision: 'fp8' is not one of no, bf16, fp16"),
    (["--config_file", "no.yaml", "--num_processes=2", "train.py"], "--num_processes 2: distributed_type is NO"),
    (["--config_file", "open.yaml", "train.py"], "open.yaml does not say how many ranks"),
])  # fmt: skip
def test_wrong_command_is_refused(capsys, argv: list[str], message: str):
    Path("no.yaml").write_text("distributed_type: 'NO'\n")
    Path("open.yaml").write_text("distributed_type: FSDP\n")
    assert message in error(capsys, *argv)


def test_more_ranks_than_gpus_are_refused(monkeypatch, capsys):
    gpus(monkeypatch, 2)
    assert error(capsys, "--num_processes", "3", "train.py") == (
        "launch: 3 ranks on this machine, and it has 2 GPUs\n  each rank needs its GPU\n"
        "  fix: --num_processes 2, or --cpu"
    )
    assert "gpu_ids are 0, 2\n  this machine has 2 GPUs" in error(capsys, "--gpu_ids", "0,2", "train.py")
    assert "and gpu_ids are 1\n" in error(capsys, "--num_processes", "2", "--gpu_ids", "1", "train.py")


def test_port_in_use_is_refused(capsys):
    with socket.socket() as s:
        s.bind(("", 0))
        s.listen()
        port = s.getsockname()[1]
        got = error(capsys, "--num_processes", "2", "--main_process_port", str(port), "train.py")
    assert re.match(
        rf"launch: port {port} cannot be used\n  .*in use\n  fix: --main_process_port 0 takes", got, re.DOTALL
    )


@pytest.mark.parametrize("argv", [[], ["--num_proc", "2", "train.py"], ["--zero_stage", "2", "train.py"]])
def test_unknown_option_shows_usage(capsys, argv: list[str]):
    with pytest.raises(SystemExit) as e:
        main(["launch", *argv])
    assert e.value.code == 2
    assert re.search("usage: python -m fshard launch|unrecognized arguments: --[nz]", capsys.readouterr().err)


def test_names_of_options_are_those_of_accelerate():
    """Every key that is translated is an option, under the name that Accelerate's own launcher has, if it has one."""
    parser = pytest.importorskip("accelerate.commands.launch").launch_command_parser()
    from fshard.cli.command import _parser
    from fshard.interop.accelerate.keys import KEYS

    ours = next(a for a in _parser()._actions if a.choices).choices["launch"]._option_string_actions
    theirs = parser._option_string_actions
    keys = {f"--{name}" for name, key in KEYS.items() if key.effect == "translated"}
    assert {option for option in keys & theirs.keys() if option not in ours} == set()
    switches = {o for o in ours.keys() & theirs.keys() if (ours[o].nargs == 0) != (theirs[o].nargs == 0)}
    assert switches == set(), "one takes a value, the other none"
