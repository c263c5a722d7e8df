"""fshard compared with torch: `python -m tests.benchmarks.peers --ranks 2 [--json FILE] [--only NAME ...]`.

The same GPT, values, batches and optimizer under plain torch, DDP, FSDP2 and DTensor, and under fshard; time and memory
of a step, its transfers, and whether the losses agree. README.md in this folder says how to read the report.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import datetime
import gc
import json
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # do not initialize CUDA before the fork
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch._inductor.compile_fx  # so that loading it does not count as memory of compiled steps
import torch.distributed as dist

from .init import MIB, peak_bytes, reset_peak, spread
from .step_cost import counting, measure_step
from .train_steps import SIZES, Step, build

# Steps of a family are compared with each other: they run in the same processes, in turn.
FAMILIES: dict[str, tuple[str, ...]] = {
    "data": ("floor", "ddp", "ddp view", "data", "ddp compiled", "data compiled"),
    "zero": ("floor", "ddp+zero", "zero", "data"),
    "sharded": ("floor", "fsdp2", "sharded", "fsdp2 compiled", "sharded compiled"),
    "remat": ("fsdp2+ac", "sharded+remat", "fsdp2+ac compiled", "sharded+remat compiled"),
    "tensor": ("dtensor", "tensor", "dtensor compiled", "tensor compiled"),
    "one": ("floor", "one", "floor compiled", "one compiled"),
}
SINGLE_RANK = ("one",)  # families that need no second rank
REFERENCE = {
    "data": "ddp",
    "zero": "ddp+zero",
    "sharded": "fsdp2",
    "remat": "fsdp2+ac",
    "tensor": "dtensor",
    "one": "floor",
}
# (number of the target, family, step of fshard, step of torch, measure, target for the ratio)
TARGETS = [
    ("1", "data", "data", "ddp", "time", 0.99), ("1", "data", "data", "ddp view", "time", 0.99),
    ("1", "data", "data", "floor", "time", 1.06),
    ("1", "data", "data", "ddp", "live", 1.0), ("1", "data", "data", "ddp view", "live", 1.0),
    ("8", "zero", "zero", "ddp+zero", "time", 0.99), ("8", "zero", "zero", "ddp+zero", "live", 1.0),
    ("2", "sharded", "sharded", "fsdp2", "time", 0.88), ("2", "sharded", "sharded", "floor", "time", 1.10),
    ("2", "sharded", "sharded", "fsdp2", "live", 0.90), ("2", "sharded", "sharded", "fsdp2", "resident", 0.90),
    ("3", "remat", "sharded+remat", "fsdp2+ac", "time", 0.90),
    ("3", "remat", "sharded+remat", "fsdp2+ac", "live", 1.0),
    ("3", "remat", "sharded+remat", "fsdp2+ac", "resident", 1.0),
    ("4", "tensor", "tensor", "dtensor", "time", 0.88),
    ("4", "tensor", "tensor compiled", "dtensor", "time", 0.83),
    ("4", "tensor", "tensor compiled", "dtensor compiled", "time", 0.83),
    ("5", "one", "one", "floor", "time", 1.02),
]  # fmt: skip
ON_CUDA = [("7", "one", "one", "floor", "time", 1.05), ("7", "one", "one compiled", "floor compiled", "time", 1.03)]
WARMUP = 3  # steps of each that are not counted
LOSSES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}  # the largest relative difference of two loss curves

Report = dict[str, Any]


# --- ranks ----------------------------------------------------------------------------------------------------


def run_on_ranks(ranks: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `job(*args)` in new processes, the ranks of a group: their results. Raises if any of them raised."""
    fork = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as place:
        pipes = [fork.Pipe(duplex=False) for _ in range(ranks)]
        processes = [fork.Process(target=_rank, args=(r, ranks, f"{place}/store", pipes[r][1], job, args), daemon=True)
                   for r in range(ranks)]  # fmt: skip
        sys.stdout.flush()
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        out: dict[int, Any] = {}
        waiting = {ours: r for r, (ours, _) in enumerate(pipes)}
        try:
            while waiting:
                for pipe in wait(list(waiting)):
                    rank = waiting.pop(pipe)  # type: ignore[call-overload]
                    try:
                        good, out[rank] = pipe.recv()  # type: ignore[union-attr]
                    except EOFError:
                        good, out[rank] = False, "the process was killed, or it crashed"
                    if not good:
                        raise RuntimeError(f"rank {rank}: {out[rank]}")
        finally:
            for process in processes:
                process.join(timeout=10 if len(out) == ranks else 0)
                process.kill()
                process.join()
    return [out[r] for r in range(ranks)]


def _rank(rank: int, ranks: int, store: str, pipe: Any, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 64  # several models of one class are compiled
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks,
                                timeout=datetime.timedelta(minutes=20))  # fmt: skip
        pipe.send((True, job(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _first_error(error: str) -> str:
    """The error of the first rank that has one, on all ranks, so that all of them continue or none."""
    everyone: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everyone, error)
    return next(filter(None, everyone), "")


def _summary(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


# --- on the ranks ---------------------------------------------------------------------------------------------


def timed(name: str, names: tuple[str, ...], repeats: int, device: torch.device) -> Report:
    """Seconds and losses of the steps of these names, run in turn, and the errors of those that could not run."""
    steps: dict[str, Step] = {}
    failed: dict[str, str] = {}
    losses: dict[str, list[float]] = {}
    for one in names:
        error = ""
        try:
            step = build(one, SIZES[name], device)
            losses[one] = [float(step(i)) for i in range(WARMUP)]
            steps[one] = step
        except Exception as e:
            error = _summary(e)
            traceback.print_exc()
        if error := _first_error(error):
            failed[one] = error
            steps.pop(one, None)
    seconds: dict[str, list[float]] = {one: [] for one in steps}
    for i in range(WARMUP, WARMUP + 1 + repeats):  # one more round that is not counted
        for one, step in steps.items():
            gc.collect()
            dist.barrier()
            start = time.perf_counter()
            loss = step(i)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            spent = time.perf_counter() - start
            losses[one].append(float(loss))
            if i > WARMUP:
                seconds[one].append(spent)
    return {"seconds": seconds, "losses": {one: losses[one] for one in steps}, "failed": failed}


def resident(name: str, one: str, device: torch.device) -> Report:
    """The most resident bytes in later steps, above those of the process before."""
    if device.type == "cuda":
        step = build(one, SIZES[name], device)
        for i in range(WARMUP):
            step(i)
        torch.cuda.reset_peak_memory_stats(device)
        step(WARMUP)
        return {"live": torch.cuda.max_memory_allocated(device)}
    libc = ctypes.CDLL("libc.so.6")
    before = reset_peak()
    step = build(one, SIZES[name], device)
    for i in range(WARMUP):
        step(i)
    gc.collect()
    libc.malloc_trim(0)  # without what building and compiling left in the heap
    reset_peak()
    for i in range(WARMUP, WARMUP + 3):
        step(i)
    return {"resident": peak_bytes() - before}


def tensor_bytes(name: str, one: str, device: torch.device) -> Report:
    """The bytes live in tensors and the transfers in a later step."""
    cost = measure_step(lambda: counting(build(one, SIZES[name], device)), warmup=WARMUP)
    ops: dict[str, int] = {}
    for op, _ in cost.transfers:
        ops[op] = ops.get(op, 0) + 1
    return {"live": cost.peak, "before": cost.start, "growth": cost.end - cost.start, "transfers": ops,
            "sent": cost.sent(dist.get_world_size())}  # fmt: skip


# --- the parts of a report ------------------------------------------------------------------------------------


def family(name: str, which: str, names: tuple[str, ...], args: argparse.Namespace) -> Report:
    """Times of the slowest rank, loss curves, and their differences from the reference of the family."""
    rows = run_on_ranks(args.ranks, timed, name, names, args.repeats, args.device)
    done = list(rows[0]["seconds"])
    seconds = {one: [max(ts) for ts in zip(*(r["seconds"][one] for r in rows), strict=True)] for one in done}
    reference, difference = REFERENCE[which], {}
    curve = {one: [r["losses"][one] for r in rows] for one in done}
    if which not in SINGLE_RANK:  # a torch step has the mean loss of its own rows, fshard that of all
        curve = {one: [[statistics.fmean(xs) for xs in zip(*curve[one], strict=True)]] for one in done}
    for one in done:
        if reference in done and one != reference and (one != "floor" or which in SINGLE_RANK):
            difference[one] = max(map(distance, curve[one], curve[reference]))
    return {"seconds": seconds, "losses": curve, "difference": difference, "failed": rows[0]["failed"]}


def distance(a: list[float], b: list[float]) -> float:
    """The largest relative difference of two loss curves; infinite for a NaN."""
    differences = [abs(x - y) / abs(y) for x, y in zip(a, b, strict=True)]
    return max((math.inf if math.isnan(x) else x for x in differences), default=math.inf)


def memory(name: str, one: str, args: argparse.Namespace) -> Report:
    """The largest figure of any rank, each measure in new processes."""
    out: Report = {}
    for job in (resident,) if args.device.type == "cuda" else (resident, tensor_bytes):
        try:
            rows = run_on_ranks(args.ranks, job, name, one, args.device)
        except RuntimeError as e:
            print(e, file=sys.stderr)
            out["failed"] = str(e).splitlines()[-1]
            continue
        out |= {k: max(r[k] for r in rows) if isinstance(rows[0][k], int) else rows[0][k] for k in rows[0]}
    return out


def ratios(a: list[float], b: list[float]) -> tuple[float, float]:
    """(Median of the ratios of neighbours in time, ratio of the medians)."""
    return (statistics.median(x / y for x, y in zip(a, b, strict=True)), statistics.median(a) / statistics.median(b))


def verdicts(
    size: Report, families: dict[str, tuple[str, ...]], measures: list[str], targets: list[Any]
) -> list[Report]:
    """The targets of which both steps were asked for; with a missing figure the verdict is "not measured"."""
    out = []
    for number, which, ours, peer, measure, limit in targets:
        kind = "time" if measure == "time" else "memory"
        if kind not in measures or not {ours, peer} <= set(families.get(which, ())):
            continue
        row: Report = {"target": number, "ours": ours, "peer": peer, "measure": measure, "limit": limit}
        if measure == "time":
            seconds = size["families"][which]["seconds"]
            if {ours, peer} <= seconds.keys():
                row["ratio"], row["of medians"] = ratios(seconds[ours], seconds[peer])
        else:
            both = [size["memory"][one].get(measure) for one in (ours, peer)]
            if None not in both:
                row["ratio"] = both[0] / both[1]
        row["verdict"] = "not measured" if "ratio" not in row else "pass" if row["ratio"] <= limit else "miss"
        out.append(row)
    return out


# --- the report -----------------------------------------------------------------------------------------------


def show_family(which: str, found: Report) -> None:
    print(f"\n  {which}: seconds of a step, the slower rank's; losses against {REFERENCE[which]}'s")
    print(f"  {'':24}{'median':>9}{'least':>9}{'most':>9}{'difference':>12}")
    for one, times in found["seconds"].items():
        x = spread(times)
        difference = f"{found['difference'][one]:12.1e}" if one in found["difference"] else ""
        print(f"  {one:24}" + "".join(f"{x[k]:9.3f}" for k in ("median", "least", "most")) + difference)
    for one, why in found["failed"].items():
        print(f"  {one:24} FAILED: {why}")


MIBS = {"resident": 10, "live": 10, "before": 10, "growth": 8, "sent": 10}  # columns, and how wide they are


def show_memory(one: str, x: Report) -> None:
    row = "".join(f"{x[k] / MIB:{w}.1f}" if k in x else f"{'-':>{w}}" for k, w in MIBS.items())
    moved = ", ".join(f"{n} {op}" for op, n in sorted(x.get("transfers", {}).items()))
    print(f"  {one:24}{row}  {moved}" + (f"  FAILED: {x['failed']}" if "failed" in x else ""), flush=True)


def show_targets(rows: list[Report]) -> None:
    if not rows:
        return
    print("\n  target                                                ratio  of medians   limit")
    for r in rows:
        what = f"{r['target']}  {r['ours']} / {r['peer']}, {r['measure']}"
        ratio = f"{r['ratio']:7.3f}" if "ratio" in r else f"{'-':>7}"
        medians = f"{r['of medians']:12.3f}" if "of medians" in r else f"{'':12}"
        print(f"  {what:52}{ratio}{medians}{r['limit']:8.2f}  {r['verdict']}")


def problems_of(size: Report, dtype: torch.dtype) -> list[str]:
    """The problems of a run: loss curves that differ, and steps that could not run or be measured."""
    out = []
    for which, found in size["families"].items():
        out += [f"{which}: the losses of {one} are {x:.1e} from {REFERENCE[which]}'s"
                for one, x in found["difference"].items() if not x <= LOSSES[dtype]]  # fmt: skip
        out += [f"{which}: {one} could not run" for one in found["failed"]]
    out += [f"memory: {one} could not be measured" for one, x in size.get("memory", {}).items() if "failed" in x]
    return out


def main(argv: list[str] | None = None) -> int:
    """Print the report; the exit status is 0 if all ran with the same losses, even if a target was missed."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.peers", description=__doc__)
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", type=torch.device,
                        default=torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # fmt: skip
    parser.add_argument("--only", nargs="+", metavar="NAME",
                        help=f"families ({', '.join(FAMILIES)}), or steps in any of them")  # fmt: skip
    parser.add_argument("--eager", action="store_true", help="leave out what is compiled")
    parser.add_argument("--sizes", nargs="+", choices=SIZES)
    parser.add_argument("--repeats", type=int, default=9, help="counted rounds")
    parser.add_argument("--measure", nargs="+", choices=("time", "memory"), default=["time", "memory"])
    args = parser.parse_args(argv)
    cuda = args.device.type == "cuda"
    args.sizes = args.sizes or (["350M"] if cuda else ["27M", "3x"])
    if cuda and args.ranks != 1:
        parser.error("on a CUDA device this compares single devices: --ranks 1")
    where = f"cuda, {os.environ.get('CUDA_VISIBLE_DEVICES', '0')}" if cuda else "cpu"
    facts = {"torch": torch.__version__, "device": where, "ranks": args.ranks, "threads": 1, "load": os.getloadavg()[0]}
    print(", ".join(f"{k} {v}" for k, v in facts.items()), flush=True)
    report: Report = {"facts": facts, "sizes": {}}
    problems: list[str] = []
    families = chosen(args, parser)
    gc.freeze()  # ranks start as copies of this process: its imports are no garbage to look for
    for name in args.sizes:
        began = time.perf_counter()
        cfg, size = SIZES[name].cfg, {"parameters": SIZES[name].parameters, "families": {}}
        report["sizes"][name] = size
        shape = f"width {cfg.n_embd}, {cfg.n_layer} blocks, {SIZES[name].rows} sequences a rank of {cfg.n_positions}"
        print(f"\n{name}: {size['parameters'] / 1e6:.1f}M parameters: {shape}, {SIZES[name].dtype}", flush=True)
        if "time" in args.measure:
            for which, names in families.items():
                size["families"][which] = family(name, which, names, args)
                show_family(which, size["families"][which])
                sys.stdout.flush()
        if "memory" in args.measure:
            everyone = dict.fromkeys(one for names in families.values() for one in names)
            titles = "".join(f"{k:>{w}}" for k, w in MIBS.items())
            print(f"\n  MiB of a rank, and its transfers in a step\n  {'':24}{titles}  transfers", flush=True)
            size["memory"] = {}
            for one in everyone:
                size["memory"][one] = memory(name, one, args)
                show_memory(one, size["memory"][one])
        size["targets"] = verdicts(size, families, args.measure, ON_CUDA if cuda else TARGETS)
        show_targets(size["targets"])
        size["minutes"] = (time.perf_counter() - began) / 60
        problems += [f"{name}: {x}" for x in problems_of(size, SIZES[name].dtype)]
        if args.json:
            args.json.write_text(json.dumps(report, indent=1))
    for x in problems:
        print(f"PROBLEM: {x}")
    return 1 if problems else 0


def chosen(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, tuple[str, ...]]:
    families = {k: v for k, v in FAMILIES.items() if args.ranks > 1 or k in SINGLE_RANK}
    if args.only:
        known = {*families, *(one for names in families.values() for one in names)}
        if unknown := [x for x in args.only if x not in known]:
            parser.error(f"--only: {', '.join(unknown)}: not among {', '.join(sorted(known))}")
        families = {k: tuple(one for one in v if k in args.only or one in args.only) for k, v in families.items()}
    if args.eager:
        families = {k: tuple(one for one in v if not one.endswith(" compiled")) for k, v in families.items()}
    return {k: v for k, v in families.items() if v}


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
