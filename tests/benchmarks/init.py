"""Cost of initialization: `python -m tests.benchmarks.init [--json FILE] [--device cuda] [--only PART ...]`.

Parts: `describe` a 70B Llama; `shard`, one rank's 1/64 of it; `ways`, materialize against meta -> to_empty -> init and
against full init then slice, on one rank of eight; `mesh`, one rank's time on 1, 2, 4 and 8; `small`, many small
leaves. README.md in this folder explains the figures.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

import fshard as fs
from fshard import P
from fshard.models import llama
from fshard.spec import Box, box_shape, local_box

MIB = 1 << 20
RANKS = 8  # of `ways`
KEY = fs.key(0)
BIG = llama.Config(
    vocab_size=128_256, hidden_size=8192, intermediate_size=28_672, num_hidden_layers=80,
    num_attention_heads=64, num_key_value_heads=8,
)  # fmt: skip

Times = dict[str, list[float]]
Part = Callable[[argparse.Namespace], dict[str, Any]]


# --- measuring ----------------------------------------------------------------------------------------------


def clock(device: torch.device) -> float:
    """Time in seconds: CPU time of this process, which other processes hardly change; on CUDA, wall time."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def interleaved(calls: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> Times:
    """Measure the seconds of every call: A B C, A B C, ... after one round of warm-up."""
    out: Times = {name: [] for name in calls}
    for i in range(repeats + 1):
        for name, call in calls.items():
            start = clock(device)
            made = call()
            spent = clock(device) - start
            del made
            if i:
                out[name].append(spent)
    return out


def peak_bytes() -> int:
    """Peak of resident bytes since `reset_peak`."""
    text = Path("/proc/self/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024


def reset_peak() -> int:
    """Reset the peak to the resident bytes now, and return them."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def measured(make: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Measure a call: seconds of CPU and wall, the bytes of its result, and the peak above the start."""
    cuda = device.type == "cuda"
    if cuda:
        torch.empty(1, device=device)
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if cuda else reset_peak()
    wall, cpu = time.perf_counter(), clock(device)
    made = make()
    cpu, wall = clock(device) - cpu, time.perf_counter() - wall
    peak = (torch.cuda.max_memory_allocated(device) if cuda else peak_bytes()) - before
    shards = [x for leaf in fs.tree.leaves(made) for x in (leaf.shards if isinstance(leaf, fs.Sharded) else [leaf])]
    nbytes = sum(x.nbytes for x in shards if isinstance(x, torch.Tensor))
    return {"seconds": cpu, "wall": wall, "leaves": len(shards), "bytes": nbytes, "peak": peak, "above": peak - nbytes}


def alone(part: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.init", "--one", part, "--device", str(args.device),
               "--threads", str(args.threads), "--rank", str(args.rank)]  # fmt: skip
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def one_of(world: int, rank: int, device: torch.device, **axes: int) -> fs.Mesh:
    """Mesh of one rank without the others: a collective raises, so that `materialize` must not communicate."""
    alone = FakeProcessGroup.Options()
    alone.error_on_collective = True
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world, pg_options=alone)
    return fs.make_mesh(kind="process", device=device, **axes)


# --- a 70B Llama --------------------------------------------------------------------------------------------


def describe(args: argparse.Namespace) -> dict[str, Any]:
    found = measured(lambda: llama.init(BIG), torch.device("cpu"))
    return {**found, "parameters": sum(leaf.numel() for leaf in fs.tree.leaves(llama.init(BIG)))}


def shard(args: argparse.Namespace) -> dict[str, Any]:
    """Measure `materialize` of one rank's part on data=8, model=8, in bfloat16."""
    mesh = one_of(64, args.rank, args.device, data=8, model=8)
    tree = llama.init(BIG)
    specs = fs.fully_shard(llama.specs(BIG, model="model"), tree, axis="data")
    return measured(lambda: fs.materialize(tree, specs, mesh, key=KEY, dtype=torch.bfloat16), args.device)


# --- three ways to initialize one rank of eight ---------------------------------------------------------------

SHAPES = [(4096, 4096), (4096, 4096), (4096,)]
LEAVES = [fs.init.normal(shape, std=0.02) for shape in SHAPES]
SPECS = [P("ranks"), P(None, "ranks"), P("ranks")]


def boxes() -> list[Box]:
    """Boxes of the middle rank."""
    coords = {"ranks": RANKS // 2}
    return [local_box(s, spec, {"ranks": RANKS}, coords) for s, spec in zip(SHAPES, SPECS, strict=True)]


def by_materialize(device: torch.device) -> list[torch.Tensor]:
    """Fill the rank's part of the mesh-invariant values."""
    return [
        leaf.init.fill(fs.fold_in(KEY, str(i)), leaf.shape, box, leaf.dtype, device)
        for i, (leaf, box) in enumerate(zip(LEAVES, boxes(), strict=True))
    ]


def by_to_empty(device: torch.device) -> list[torch.Tensor]:
    """Make a module of local shape on meta, then draw from torch's generator: as cheap, with other values."""
    module = nn.ParameterList(nn.Parameter(torch.empty(box_shape(b), device="meta")) for b in boxes())
    module.to_empty(device=device)
    return [p.detach().normal_(std=0.02) for p in module]


def by_slicing(device: torch.device) -> list[torch.Tensor]:
    """Draw every leaf whole from torch's generator and slice it: mesh-invariant values at full cost."""
    both = zip(SHAPES, boxes(), strict=True)
    return [torch.empty(shape, device=device).normal_(std=0.02)[box].clone() for shape, box in both]


WAYS: dict[str, Callable[[torch.device], list[torch.Tensor]]] = {
    "materialize": by_materialize, "meta, to_empty, init": by_to_empty, "full init, slice": by_slicing,
}  # fmt: skip


def weigh_way(name: str) -> Callable[[argparse.Namespace], dict[str, Any]]:
    def weigh(args: argparse.Namespace) -> dict[str, Any]:
        nn.Linear(1, 1, device="meta").to_empty(device=args.device)  # loads 30 MiB of torch, which no leaf costs
        return measured(lambda: WAYS[name](args.device), args.device)

    return weigh


def ways(args: argparse.Namespace) -> dict[str, Any]:
    times = interleaved({n: lambda f=f: f(args.device) for n, f in WAYS.items()}, args.repeats, args.device)  # type: ignore[misc]
    local = sum(math.prod(box_shape(b)) for b in boxes())
    return {name: {**spread(t), "ns": statistics.median(t) / local * 1e9, **_memory(name, args)}
            for name, t in times.items()}  # fmt: skip


def _memory(name: str, args: argparse.Namespace) -> dict[str, Any]:
    found = alone(f"way:{name}", args)
    return {"bytes": found["bytes"], "above": found["above"]}


# --- one rank's time as the mesh grows ------------------------------------------------------------------------

MESHES = (1, 2, 4, 8)
PLACED: dict[str, tuple[tuple[int, ...], P]] = {
    "row": ((2048, 4096), P("n")),
    "column": ((2048, 4096), P(..., "n")),
    "heads": ((1024, 3, 16, 128), P(None, None, "n")),
    "short runs": ((1024, 64, 128), P(..., "n")),
    "odd row": ((2049, 4099), P("n")),
    "odd column": ((2049, 4099), P(..., "n")),
}


def mesh(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, for each spec, N times the time per rank on N ranks over the time on one: 1 is perfect."""
    out = {}
    for name, (shape, spec) in PLACED.items():
        leaf = fs.init.normal(shape, std=0.02)
        parts = {n: local_box(shape, spec, {"n": n}, {"n": n // 2}) for n in MESHES}
        calls = {str(n): lambda b=b: leaf.init.fill(KEY, leaf.shape, b, leaf.dtype, args.device)  # type: ignore[misc] # noqa: B023
                 for n, b in parts.items()}  # fmt: skip
        times = interleaved(calls, args.repeats, args.device)
        each = {n: [t / math.prod(box_shape(parts[n])) * 1e9 for t in times[str(n)]] for n in MESHES}
        # Compare calls of the same round, which a slow phase of the machine slows equally.
        ratio = {n: statistics.median(a / b for a, b in zip(each[n], each[1], strict=True)) for n in MESHES}
        out[name] = {"ns": statistics.median(each[1]), "ratio": ratio}
    return out


def small(args: argparse.Namespace) -> dict[str, Any]:
    """Measure `materialize` of a tree of 720 leaves of 128 elements: seconds per leaf."""
    one = fs.make_mesh(kind="simulated", device=args.device, one=1)
    trees = {"normal": [fs.init.normal(128) for _ in range(720)], "ones": [fs.init.ones(128) for _ in range(720)]}
    calls = {n: lambda t=t: fs.materialize(t, P(), one, key=KEY) for n, t in trees.items()}  # type: ignore[misc]
    return {n: spread([x / 720 for x in t]) for n, t in interleaved(calls, args.repeats, args.device).items()}


# --- the report -----------------------------------------------------------------------------------------------


def spread(times: list[float]) -> dict[str, float]:
    return {"median": statistics.median(times), "least": min(times), "most": max(times)}


def mib(n: float) -> str:
    return f"{n / MIB:.1f} MiB"


def show(part: str, found: dict[str, Any]) -> None:
    print(f"\n{part}")
    if part == "describe":
        print(f"  {found['parameters'] / 1e9:.1f}B parameters: {found['seconds']:.2f} s, {mib(found['peak'])}")
    elif part == "shard":
        seconds = f"{found['seconds']:.1f} s ({found['wall']:.1f} s wall)"
        print(f"  {found['leaves']} leaves, {mib(found['bytes'])}: {seconds}, {mib(found['above'])} above it")
    elif part == "ways":
        print(f"  {'':22}{'median':>10}{'least':>10}{'most':>10}{'ns/value':>10}{'shard':>12}{'above it':>12}")
        for name, x in found.items():
            seconds = "".join(f"{x[k] * 1e3:8.1f}ms" for k in ("median", "least", "most"))
            print(f"  {name:22}{seconds}{x['ns']:10.1f}{mib(x['bytes']):>12}{mib(x['above']):>12}")
    elif part == "mesh":
        print(f"  {'':22}{'ns/value, 1':>12}" + "".join(f"{f'N={n}':>8}" for n in MESHES))
        for name, x in found.items():
            print(f"  {name:22}{x['ns']:12.1f}" + "".join(f"{x['ratio'][n]:8.2f}" for n in MESHES))
    else:
        for name, x in found.items():
            print(f"  {name:22}{x['median'] * 1e6:8.0f} us a leaf (least {x['least'] * 1e6:.0f})")


ALONE = {"describe": describe, "shard": shard, **{f"way:{name}": weigh_way(name) for name in WAYS}}
PARTS: dict[str, Part] = {
    "describe": lambda args: alone("describe", args), "shard": lambda args: alone("shard", args),
    "ways": ways, "mesh": mesh, "small": small,
}  # fmt: skip


def parser_of(script: str, doc: str | None, parts: Mapping[str, Part], repeats: int) -> argparse.ArgumentParser:
    """Return the parser of a script that measures some parts."""
    parser = argparse.ArgumentParser(prog=f"python -m tests.benchmarks.{script}", description=doc)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    found = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--device", type=torch.device, default=found)
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=1)
    return parser


def report(args: argparse.Namespace, parts: Mapping[str, Part], show: Callable[[str, dict[str, Any]], None]) -> None:
    """Measure the chosen parts, and print each; write all figures to the file of `--json`."""
    torch.set_num_threads(args.threads)
    where = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else "cpu"
    facts = {"torch": torch.__version__, "device": where, "threads": args.threads, "load": os.getloadavg()[0]}
    print(", ".join(f"{k} {v}" for k, v in facts.items()))
    figures: dict[str, Any] = {"facts": facts}
    for part in args.only:
        figures[part] = parts[part](args)
        show(part, figures[part])
        sys.stdout.flush()
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


def main(argv: list[str] | None = None) -> None:
    parser = parser_of("init", __doc__, PARTS, repeats=7)
    parser.add_argument("--rank", type=int, default=37, help="which of the 64 ranks `shard` is")
    parser.add_argument("--one", choices=ALONE, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        torch.set_num_threads(args.threads)
        print(json.dumps(ALONE[args.one](args)))
    else:
        report(args, PARTS, show)


if __name__ == "__main__":
    main()
