"""The overhead of `shard_map`: `python -m tests.benchmarks.scaling [--json FILE] [--only PART ...]`.

Parts: `leaves`, a call on a mesh of one rank, by the number of leaves it takes and returns; `processes`, the same on a
mesh of two processes; `ranks`, a call on simulated ranks, by their number; `model`, a training step of GPT-2 on a mesh
of one rank against the same step without fshard, by the size of the model. README.md in this folder says how to read
the report.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.models import gpt2
from fshard.models.transformer import Layout

from .gpt_module import build
from .init import Part, interleaved, parser_of, report, spread

LEAVES = (1, 10, 100, 1000)
RANKS = (1, 2, 4, 8, 16, 32, 64)
KEY = fs.key(0)

# --- a call that computes almost nothing ----------------------------------------------------------------------


def in_place(state: list[Tensor]) -> list[Tensor]:
    """One operation for all leaves together."""
    torch._foreach_add_(state, 1.0)
    return state


def out_of_place(state: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_add(state, 1.0))


Body = Callable[[list[Tensor]], list[Tensor]]
BODIES: dict[str, tuple[Body, tuple[int, ...]]] = {"donated": (in_place, (0,)), "kept": (out_of_place, ())}


def looped(step: Callable[[Any], Any], state: Any, times: int) -> Callable[[], None]:
    """`times` steps, each on the result of the one before."""
    current = [state]

    def run() -> None:
        for _ in range(times):
            current[0] = step(current[0])

    return run


def calls(mesh: fs.Mesh, leaves: tuple[int, ...], args: argparse.Namespace) -> dict[str, Any]:
    """Microseconds of a call minus those of its body alone, with and without donation, by the number of leaves."""
    out: dict[str, Any] = {}
    for name, (body, donate) in BODIES.items():
        rows = {}
        for n in leaves:
            times = max(3, 2000 // (n + 20))
            state = [torch.zeros(4, device=args.device) for _ in range(n)]
            f = fs.shard_map(body, mesh=mesh, in_specs=(P(),), out_specs=P(), donate=donate)
            runs = {"call": looped(f, fs.device_put(state, P(), mesh), times), "body": looped(body, state, times)}
            each = {name: [t / times * 1e6 for t in spent]
                    for name, spent in interleaved(runs, args.repeats, args.device).items()}  # fmt: skip
            overhead = [a - b for a, b in zip(each["call"], each["body"], strict=True)]  # neighbours in time
            rows[n] = {**spread(overhead), "body": statistics.median(each["body"])}
        few, many = min(leaves), max(leaves)
        slope = (rows[many]["median"] - rows[few]["median"]) / (many - few) if many > few else 0.0
        out[name] = {"calls": rows, "leaf": slope}
    return out


def leaves(args: argparse.Namespace) -> dict[str, Any]:
    return calls(fs.make_mesh(kind="simulated", device=args.device, a=1), LEAVES, args)


def processes(args: argparse.Namespace) -> dict[str, Any]:
    """The times on two processes at once, each measured by itself; those of the slower one."""
    with tempfile.TemporaryDirectory() as place:
        context = multiprocessing.get_context("spawn")
        answers = context.SimpleQueue()
        ranks = [context.Process(target=_rank, args=(rank, place, args, answers)) for rank in range(2)]
        for p in ranks:
            p.start()
        found = [answers.get() for _ in ranks]
        for p in ranks:
            p.join()
    slower: dict[str, Any] = max(found, key=lambda rows: rows["donated"]["leaf"])
    return slower


def _rank(rank: int, place: str, args: argparse.Namespace, answers: Any) -> None:
    torch.set_num_threads(args.threads)
    device = torch.device("cuda", rank % torch.cuda.device_count()) if args.device.type == "cuda" else args.device
    args = argparse.Namespace(**{**vars(args), "device": device})
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=2)
    mesh = fs.make_mesh(kind="process", device=device, a=2)
    answers.put(calls(mesh, LEAVES, args))
    dist.barrier()
    dist.destroy_process_group()


def ranks(args: argparse.Namespace) -> dict[str, Any]:
    """Wall time of a call with ten donated leaves; simulated ranks mostly wait for each other."""
    out = {}
    for n in RANKS:
        mesh = fs.make_mesh(kind="simulated", device=args.device, a=n)
        f = fs.shard_map(in_place, mesh=mesh, in_specs=(P(),), out_specs=P(), donate=0)
        state = fs.device_put([torch.zeros(4, device=args.device) for _ in range(10)], P(), mesh)
        times = max(3, 200 // n)
        run = looped(f, state, times)
        run()
        found = []
        for _ in range(args.repeats):
            start = time.perf_counter()
            run()
            found.append((time.perf_counter() - start) / times * 1e6)
        out[n] = {**spread(found), "rank": statistics.median(found) / n}
    return out


# --- a training step ------------------------------------------------------------------------------------------

MODELS = {
    "0.1M": gpt2.Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=2),
    "0.9M": gpt2.Config(vocab_size=512, n_positions=128, n_embd=128, n_layer=4, n_head=4),
    "5M": gpt2.Config(vocab_size=1024, n_positions=128, n_embd=256, n_layer=6, n_head=4),
    "20M": gpt2.Config(vocab_size=2048, n_positions=256, n_embd=512, n_layer=6, n_head=8),
}


def model(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step of four sequences: on a mesh of one, with the functions alone, and with an `nn.Module`."""
    return {name: _steps(cfg, args) for name, cfg in MODELS.items()}


def _steps(cfg: gpt2.Config, args: argparse.Namespace) -> dict[str, Any]:
    mesh = fs.make_mesh(kind="simulated", device=args.device, data=1, model=1)
    specs = gpt2.specs(cfg, model="model")
    layout = Layout(data="data", model="model")
    opt = fs.optim.adamw(1e-3)
    tokens = torch.randint(cfg.vocab_size, (4, cfg.n_positions + 1), device=args.device)
    ids, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step(params: Any, state: Any, ids: Tensor, targets: Tensor) -> tuple[Any, Any, Tensor]:
        loss_fn = lambda p: gpt2.loss(cfg, p, ids, targets, layout=layout, specs=specs)  # noqa: E731
        loss, grads = fs.value_and_grad(loss_fn)(params)
        return *opt.update(grads, state, params), loss

    f = fs.shard_map(step, mesh=mesh, in_specs=(specs, None, P("data"), P("data")),
                     out_specs=(specs, opt.specs(specs), P()), donate=(0, 1))  # fmt: skip
    params = fs.materialize(gpt2.init(cfg), specs, mesh, key=KEY)
    state = [params, opt.init(params)]

    def mapped() -> None:
        state[:] = f(*state, ids, targets)[:2]

    plain = fs.device_get(params)
    flat, treedef = fs.tree.flatten(plain)
    flat = [x.clone() for x in flat]
    functions_adamw = torch.optim.AdamW(flat, 1e-3, fused=True)

    def functions() -> None:
        params = fs.tree.unflatten(treedef, flat)
        _, grads = fs.value_and_grad(lambda p: gpt2.loss(cfg, p, ids, targets))(params)
        for x, g in zip(flat, fs.tree.leaves(grads), strict=True):
            x.grad = g
        functions_adamw.step()
        functions_adamw.zero_grad()

    module = build(cfg, KEY, args.device)
    module_adamw = torch.optim.AdamW(module.parameters(), 1e-3, fused=True)

    def with_module() -> None:
        module(ids, targets).backward()
        module_adamw.step()
        module_adamw.zero_grad()

    mapped()  # with the type check
    mapped()
    runs = {"shard_map": mapped, "functions": functions, "module": with_module}
    times = interleaved(runs, 3 * args.repeats, args.device)
    ratio = lambda other: statistics.median(a / b for a, b in zip(times["shard_map"], times[other], strict=True))  # noqa: E731
    return {"leaves": 3 * len(flat) + 1, **{name: spread(t) for name, t in times.items()},
            "to functions": ratio("functions"), "to module": ratio("module")}  # fmt: skip


# --- the report -----------------------------------------------------------------------------------------------


def show(part: str, found: dict[str, Any]) -> None:
    print(f"\n{part}")
    if part in ("leaves", "processes"):
        print(f"  {'us above the body':18}{'leaves':>8}{'median':>10}{'least':>10}{'most':>10}{'a leaf':>10}")
        for name, x in found.items():
            for n, row in x["calls"].items():
                numbers = "".join(f"{row[k]:10.1f}" for k in ("median", "least", "most"))
                print(f"  {name:18}{n:8}{numbers}{row['median'] / n:10.2f}")
            print(f"  {'':18}{'each more':>38}{x['leaf']:10.2f}")
    elif part == "ranks":
        print(f"  {'us of a call':18}{'ranks':>8}{'median':>10}{'least':>10}{'most':>10}{'a rank':>10}")
        for n, x in found.items():
            print(f"  {'':18}{n:8}" + "".join(f"{x[k]:10.1f}" for k in ("median", "least", "most", "rank")))
    else:
        print(f"  {'ms of a step':18}{'leaves':>8}{'shard_map':>12}{'functions':>12}{'module':>12}{'ratios':>16}")
        for name, x in found.items():
            numbers = "".join(f"{x[way]['median'] * 1e3:12.2f}" for way in ("shard_map", "functions", "module"))
            print(f"  {name:18}{x['leaves']:8}{numbers}{x['to functions']:8.3f}{x['to module']:8.3f}")


PARTS: dict[str, Part] = {
    "leaves": leaves, "processes": processes, "ranks": ranks, "model": model,
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    report(parser_of("scaling", __doc__, PARTS, repeats=9).parse_args(argv), PARTS, show)


if __name__ == "__main__":
    main()
