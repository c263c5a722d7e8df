"""The price of a call of small work, compared with plain torch: `python -m tests.benchmarks.small_calls [--only PART]`.

Parts: `step`, the default step of `fshard.recipes.pretrain` / the same program as an `nn.Module` with fused AdamW and
clipping; `leaves`, a call above its body; `first` and `later`, a checked and a later call of correct programs of the
corpus on four simulated ranks / four times the same on one device; `scan`, 32 tiny blocks on two ranks / loops of
`unshard` that make the same transfers; `restore`, a checkpoint in the page cache / `torch.load`.

CPU seconds; each ratio is the median of those of neighbours in time. README.md in this folder says more.
"""

from __future__ import annotations

import argparse
import importlib
import math
import pkgutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fshard as fs
from fshard import P
from fshard.models import gpt2
from fshard.recipes import pretrain
from tests.corpus import correct
from tests.corpus.correct.program import Program

from .gpt_module import from_params
from .init import Part, interleaved, parser_of, report

KEY = fs.key(0)
ASKED = {"step": 1.02, "first": 5.0, "later": 2.0, "restore": 1.1}
LEAVES = {1: 40, 10: 60, 100: 250, 1000: 1500}  # asked microseconds above the body


def compared(ours: Callable[[], object], peer: Callable[[], object], args: argparse.Namespace) -> dict[str, float]:
    """Return the medians of the CPU seconds of two functions, and the median ratio of neighbours."""
    times = interleaved({"ours": ours, "peer": peer}, args.repeats, args.device)
    ratio = statistics.median(a / b for a, b in zip(times["ours"], times["peer"], strict=True))
    return {name: statistics.median(t) for name, t in times.items()} | {"ratio": ratio}


# --- the default step of the README ---------------------------------------------------------------------------


def step(args: argparse.Namespace) -> dict[str, Any]:
    options = pretrain.Options()
    cfg = gpt2.Config(vocab_size=pretrain.VOCAB, n_positions=options.context, n_embd=options.width,
                      n_layer=options.layers, n_head=options.heads)  # fmt: skip
    mesh = fs.make_mesh(kind="simulated", device=args.device, data=1, model=1)
    layout, specs, described = gpt2.Layout("data", "model"), gpt2.specs(cfg, model="model"), gpt2.init(cfg)
    optimizer = pretrain.make_optimizer(options, described, specs, zero=False, weight_decay=0.1)
    placed = {"params": specs, "opt": optimizer.specs(specs)}
    ids = torch.randint(pretrain.VOCAB, (options.batch, options.context + 1), device=args.device)
    batch = fs.device_put({"ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}, P("data"), mesh)

    @fs.shard_map(mesh=mesh, in_specs=(placed, P("data")), out_specs=(placed, P()), donate=0)
    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Tensor:
            return gpt2.loss(cfg, params, batch["ids"], batch["targets"], layout=layout, specs=specs)

        loss, grads = fs.value_and_grad(loss_fn)(state["params"])
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, {"loss": loss, "grad_norm": opt[0]["norm"]}

    state = [fs.materialize({"params": described, "opt": optimizer.init(described)}, placed, mesh, key=KEY)]
    module = from_params(cfg, fs.device_get(state[0]["params"]))
    decayed = [[p for p in module.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False)]
    groups = [{"params": group, "weight_decay": w} for group, w in zip(decayed, (0.1, 0.0), strict=True)]
    adamw = torch.optim.AdamW(groups, 1e-3, (0.9, 0.99), fused=True)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def ours() -> None:
        state[0], _ = train_step(state[0], batch)

    def peer() -> None:
        module(x, y).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()

    ours()
    return {"the default step": compared(ours, peer, args)}


# --- calls ------------------------------------------------------------------------------------------------------


def leaves(args: argparse.Namespace) -> dict[str, Any]:
    return {f"{n} leaves": _above_body(n, args) for n in LEAVES}


def _above_body(n: int, args: argparse.Namespace) -> dict[str, float]:
    """Measure a call of one operation on n leaves, minus the operation without `shard_map`."""
    mesh = fs.make_mesh(kind="simulated", data=1)
    state, times = [torch.zeros(4) for _ in range(n)], max(3, 2000 // (n + 20))
    body = lambda xs: list(torch._foreach_add(xs, 1.0))  # noqa: E731
    f = fs.shard_map(body, mesh=mesh, in_specs=(P(),), out_specs=P())

    def looped(step: Callable[[Any], Any], state: Any) -> Callable[[], None]:
        def run() -> None:
            out = state
            for _ in range(times):
                out = step(out)

        return run

    runs = {"call": looped(f, fs.device_put(state, P(), mesh)), "body": looped(body, state)}
    spent = interleaved(runs, args.repeats, args.device)
    ours = statistics.median(a - b for a, b in zip(spent["call"], spent["body"], strict=True)) / times
    return {"ours": ours, "peer": LEAVES[n] * 1e-6, "ratio": ours / (LEAVES[n] * 1e-6)}


def programs() -> list[Program]:
    names = [m.name for m in pkgutil.iter_modules(correct.__path__) if m.name not in ("program", "test_correct")]
    found = [p for name in names for p in importlib.import_module(f"{correct.__name__}.{name}").PROGRAMS]
    return [p for p in found if math.prod(p.axes.values()) == 4]


def first(args: argparse.Namespace) -> dict[str, Any]:
    return {str(p): _call(p, args, is_first=True) for p in programs()}


def later(args: argparse.Namespace) -> dict[str, Any]:
    return {str(p): _call(p, args, is_first=False) for p in programs()}


def _call(program: Program, args: argparse.Namespace, *, is_first: bool) -> dict[str, float]:
    """Compare a call of a program with as many computations on one device as there are ranks."""
    known = program.mapped("first")
    known(*program.args)

    def dense() -> None:
        for _ in range(4):
            program.dense(*program.args)

    return compared(lambda: (program.mapped("first") if is_first else known)(*program.args), dense, args)


# --- scan -------------------------------------------------------------------------------------------------------


def scan(args: argparse.Namespace) -> dict[str, Any]:
    mesh = fs.make_mesh(kind="simulated", device=args.device, data=2)
    stack = [{"w": torch.randn(16, 16, device=args.device) / 4, "b": torch.zeros(16, device=args.device)}
             for _ in range(32)]  # fmt: skip
    specs = [{"w": P("data"), "b": P("data")} for _ in stack]
    placed, x = fs.device_put(stack, specs, mesh), torch.randn(8, 16, device=args.device)

    def block(p: Any, x: Tensor) -> Tensor:
        return x + torch.tanh(x @ p["w"] + p["b"])

    def by_loop(params: Any, x: Tensor) -> Tensor:
        for p, s in zip(params, specs, strict=True):
            x = block(fs.unshard(p, s, "data"), x)
        return x

    def mapped(forward: Callable[..., Tensor]) -> Callable[[], object]:
        def loss(params: Any, x: Tensor) -> Tensor:
            return fs.pmean(forward(params, x).square().mean(), "data")

        f = fs.shard_map(fs.value_and_grad(loss), mesh=mesh, in_specs=(specs, P("data")),
                         out_specs=(P(), specs))  # fmt: skip
        f(placed, x)
        return lambda: f(placed, x)

    def by_checkpoint(params: Any, x: Tensor) -> Tensor:
        for p, s in zip(params, specs, strict=True):
            x = checkpoint(lambda p, x, s=s: block(fs.unshard(p, s, "data"), x), p, x, use_reentrant=False)
        return x

    def by_scan(*, release: bool) -> Callable[[], object]:
        options: dict[str, Any] = {"specs": specs, "axis": "data", "release": release}
        return mapped(lambda params, x: fs.scan(block, params, x, **options))

    loop, freed = mapped(by_loop), by_scan(release=True)
    return {
        "freed / loop with checkpoint (1.05 asked)": compared(freed, mapped(by_checkpoint), args),
        "kept / loop (1.05 asked)": compared(by_scan(release=False), loop, args),
        "freed / loop, which gathers once": compared(freed, loop, args),
    }


# --- checkpoints ------------------------------------------------------------------------------------------------


def restore(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        return {name: _restored(Path(folder, name), *leaves, args)
                for name, leaves in {"64 x 4 MB": (64, 1 << 20), "400 x 1 KB": (400, 256)}.items()}  # fmt: skip


def _restored(path: Path, n: int, size: int, args: argparse.Namespace) -> dict[str, float]:
    tree = {f"w{i}": torch.randn(size) for i in range(n)}
    placed = fs.device_put(tree, P(), fs.make_mesh(kind="simulated", data=1))
    fs.checkpoint.save(path, placed)
    torch.save(tree, path / "torch.pt")
    return compared(lambda: fs.checkpoint.restore(path, placed), lambda: torch.load(path / "torch.pt"), args)


# --- the report -------------------------------------------------------------------------------------------------


def show(part: str, found: dict[str, Any]) -> None:
    print(f"\n{part:44}{'ours':>12}{'asked' if part == 'leaves' else 'peer':>12}{'ratio':>8}{'asked':>8}")
    for name, row in found.items():
        print(f"  {name:42}{row['ours'] * 1e6:9.0f} us{row['peer'] * 1e6:9.0f} us{row['ratio']:8.2f}")
    if part in ASKED:
        ratio = statistics.median(row["ratio"] for row in found.values())
        print(f"  {'median':66}{ratio:8.2f}{ASKED[part]:8.2f}")


PARTS: dict[str, Part] = {"step": step, "leaves": leaves, "first": first, "later": later, "scan": scan,
                          "restore": restore}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    report(parser_of("small_calls", __doc__, PARTS, repeats=9).parse_args(argv), PARTS, show)


if __name__ == "__main__":
    main()
