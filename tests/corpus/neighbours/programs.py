"""Every program of the corpus in one form, for the comparison with other typed systems."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import fshard as fs
from fshard.shard_map import ShardMapped
from tests.corpus import bugs_gpt2, bugs_mlp, bugs_optim, correct, refused, wrong
from tests.corpus.bugs import TITLES
from tests.corpus.reported_bugs import REPORTED_BUGS

REPORTED_MESH = {"data": 2, "model": 4}


@dataclass(frozen=True)
class Entry:
    """A program, its arguments, and a function of them that computes on one device what it should compute."""

    name: str
    group: str  # a kind of mistake, or of correct program
    is_wrong: bool
    f: ShardMapped  # on a simulated mesh, not checked
    args: tuple[Any, ...]
    reference: Callable[..., Any]
    ours: str  # of a wrong program: the first check of fshard that catches it, "types", "verify" or "nothing"

    def expected(self) -> Any:
        """Return the result of the reference, as full tensors."""
        return fs.device_get(self.reference(*copied(self.args)))


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return copies of tensors, since some programs write to their arguments."""
    return fs.tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, args)


def collapsed(f: ShardMapped) -> Callable[..., Any]:
    """Return the same function on a mesh whose axes all have size 1, where nothing moves."""
    return f.on(fs.make_mesh(kind="simulated", **dict.fromkeys(f.mesh.axes, 1)), check="never")


@functools.cache
def entries() -> list[Entry]:
    """Return all programs; the names are unique."""
    out = [*_bugs(), *_reported(), *_refused(), *_wrong(), *_correct()]
    names = [e.name for e in out]
    repeated = sorted({n for n in names if names.count(n) > 1})
    assert not repeated, repeated
    return out


def _pair(
    name: str, group: str, wrong: Callable[[], tuple[Any, Any]], correct: Callable[[], tuple[Any, Any]], ours: str
) -> Iterator[Entry]:
    f, args = wrong()
    reference, reference_args = correct()
    yield Entry(name, group, True, f, args, collapsed(reference), ours)
    yield Entry(f"{name} (correct)", group, False, reference, reference_args, collapsed(reference), "")


def _bugs() -> Iterator[Entry]:
    seen: dict[Any, None] = {}
    for bug in [*bugs_mlp.BUGS, *bugs_gpt2.BUGS, *bugs_optim.BUGS]:
        build = functools.partial(bug.build, check="never")
        both = _pair(str(bug), TITLES[bug.number], functools.partial(build, bug.wrong),
                     functools.partial(build, bug.correct), bug.caught_by)  # fmt: skip
        yield next(both)
        key = (bug.program, bug.correct)
        if key not in seen:  # many bugs are of one correct program
            seen[key] = None
            yield from both


def _reported() -> Iterator[Entry]:
    mesh = fs.make_mesh(kind="simulated", **REPORTED_MESH)
    for bug in REPORTED_BUGS:
        mapped = functools.partial(
            fs.shard_map, mesh=mesh, in_specs=bug.in_specs, out_specs=bug.out_specs, check="never"
        )
        yield from _pair(bug.name, "reported bugs", lambda m=mapped, b=bug: (m(b.wrong), b.args),
                         lambda m=mapped, b=bug: (m(b.correct), b.args), bug.caught_by)  # fmt: skip


def _refused() -> Iterator[Entry]:
    for name, (f, ins, out, args) in refused.CASES.items():
        mapped = fs.shard_map(f, mesh=refused.MESH, in_specs=ins, out_specs=out, check="never")
        yield Entry(f"refused: {name}", "error messages", True, mapped, args, collapsed(mapped), "types")


def _modules(package: Any) -> Iterator[Any]:
    for module in pkgutil.iter_modules(package.__path__):
        if module.name != "program" and not module.name.startswith("test_"):
            yield importlib.import_module(f"{package.__name__}.{module.name}")


def _wrong() -> Iterator[Entry]:
    for module in _modules(wrong):
        group = module.__name__.rpartition(".")[2].replace("_", " ")
        for p in module.PROGRAMS:
            build = functools.partial(p.mapped, check="never")
            yield from _pair(f"{group}: {p}", group, lambda b=build, p=p: (b(p.wrong), p.args),
                             lambda b=build, p=p: (b(p.correct), p.args), p.caught_by or "nothing")  # fmt: skip


def _correct() -> Iterator[Entry]:
    for module in _modules(correct):
        group = module.__name__.rpartition(".")[2].replace("_", " ")
        for p in module.PROGRAMS:
            yield Entry(f"correct {group}: {p}", group, False, p.mapped("never"), p.args, p.dense, "")
