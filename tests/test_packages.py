"""The shape of the library: files import only from those above them, stay small, and say what they hold."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import fshard as fs

ROOT = Path(fs.__file__).parent
MOST_LINES = 350

# Each file imports only from the ones above it. A new file takes its place here.
LAYERS = [
    "errors", "source", "repair", "tree", "spec", "facts", "comm", "memory", "buffers", "abstract", "simulated",
    "packed", "board", "mail", "pairs", "visible", "processes", "mesh",
    "wording", "blame", "verdicts", "operations", "ledger", "vma",
    "maps", "recast", "linear", "overlap", "extreme", "replicas", "sizes", "collectives", "unshard",
    "philox", "keys", "random", "deferred", "init", "sharded", "reshard", "differences", "copies",
    "results", "arguments", "ahead", "shard_map", "verify",
    "transforms", "remat", "memo", "fetch", "given", "loop", "scan", "schedules", "norm", "fused",
    "optim", "precision", "softmax", "extent", "loss", "nn", "rope", "data",
    "checkpoint.parts", "checkpoint.manifest", "checkpoint.commit", "checkpoint.saving", "checkpoint.loading",
    "checkpoint", "picture", "display", "check", "evidence", "validate",
    "interop", "interop.window", "interop.graph", "interop.laws", "interop.evaluate", "interop.meaning",
    "interop.record", "interop.late", "interop.recording", "interop.functional", "interop.module",
    "interop.pattern", "interop.folder", "interop.weights", "interop.layout", "interop.export",
    "models.hf_files", "models.decoding", "models.transformer",
    "models.gpt2", "models.gptj", "models.gpt_neox", "models.llama", "models.bert", "models", "interop.hf",
    "fshard",
    "recipes", "recipes.pretrain", "inspection", "__main__",
]  # fmt: skip

# The namespaces of the public surface: every public name in them is for users.
NAMESPACES = [
    "fshard",
    "tree",
    "init",
    "random",
    "nn",
    "rope",
    "optim",
    "data",
    "checkpoint",
    "interop.module",
    "interop.functional",
    "interop.pattern",
    "interop.weights",
    "interop.export",
    "interop.hf",
    "models.gpt2",
    "models.gptj",
    "models.gpt_neox",
    "models.llama",
    "models.bert",
]


def name_of(file: Path) -> str:
    """`comm`, `models.gpt2`, `models` for its `__init__`, `fshard` for the library's own."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__") or "fshard"


FILES = {name_of(file): file for file in sorted(ROOT.rglob("*.py"))}


def imported(name: str) -> Iterator[tuple[int, str]]:
    """(line, file) of all of fshard that a file imports: at its head, in a function, or for types only."""
    file = FILES[name]
    package = ["fshard", *file.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            wanted = [(alias.name.split("."), "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            where = [*base, *(node.module.split(".") if node.module else [])]
            wanted = [(where, alias.name) for alias in node.names]
        else:
            continue
        for where, item in wanted:
            if where[0] == "fshard":
                found = ".".join(where[1:]) or "fshard"
                inner = item if found == "fshard" else f"{found}.{item}"
                yield node.lineno, inner if inner in FILES else found


def test_every_file_has_its_place() -> None:
    assert len(set(LAYERS)) == len(LAYERS)
    assert set(FILES) - set(LAYERS) == set(), "files without a place in LAYERS"
    assert set(LAYERS) - set(FILES) == set(), "places in LAYERS without a file"


def test_imports_go_up_the_list() -> None:
    wrong = []
    for at, name in enumerate(LAYERS):
        for line, other in imported(name) if name in FILES else ():
            if other not in LAYERS[:at]:
                wrong.append(f"{name}, line {line}: imports {other}, which is not above it")
    assert not wrong, "\n".join(wrong)


def test_imports_are_found_wherever_they_stand() -> None:
    assert {other for _, other in imported("recipes.pretrain")} >= {"fshard", "models.gpt2"}
    assert {other for _, other in imported("models.gpt2")} >= {"nn", "tree", "collectives"}  # .. and ..x
    assert "checkpoint.loading" in {other for _, other in imported("checkpoint")}  # inside a function


def test_files_are_small_and_named_for_an_idea() -> None:
    long = {name: lines for name, file in FILES.items() if (lines := len(file.read_text().splitlines())) > MOST_LINES}
    assert not long, f"over {MOST_LINES} lines: {long}"
    assert not {name for name in FILES if name.split(".")[-1] in ("utils", "util", "helpers", "common", "misc")}


def test_files_say_what_they_hold() -> None:
    silent = [
        name
        for name, file in FILES.items()
        if file.read_text().strip() and not ast.get_docstring(ast.parse(file.read_text()))
    ]
    assert not silent


def test_the_public_names_are_those_the_library_imports() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    names = [a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names]
    assert sorted(fs.__all__) == sorted(names)
    assert list(fs.__all__) == sorted(fs.__all__)


def module(name: str) -> ModuleType:
    return importlib.import_module("fshard" if name == "fshard" else f"fshard.{name}")


@pytest.mark.parametrize("name", [n for n in FILES if not n.endswith("__main__")])
def test_all_names_what_is_there(name: str) -> None:
    held = module(name)
    missing = [n for n in getattr(held, "__all__", ()) if not hasattr(held, n)]
    assert not missing


def public(name: str) -> Iterator[tuple[str, object]]:
    """The functions and classes that a namespace shows: those in its `__all__`, or those it defines."""
    held = module(name)
    listed = getattr(held, "__all__", None)
    for key, value in vars(held).items():
        own = key in listed if listed is not None else getattr(value, "__module__", "") == held.__name__
        if not key.startswith("_") and own and (inspect.isfunction(value) or inspect.isclass(value)):
            yield key, value


@pytest.mark.parametrize("name", NAMESPACES)
def test_every_public_name_is_documented(name: str) -> None:
    generated = lambda value: (value.__doc__ or "").startswith(f"{getattr(value, '__name__', '')}(")  # noqa: E731  of a dataclass
    silent = [key for key, value in public(name) if not value.__doc__ or generated(value)]
    assert not silent, f"{name}: no docstring on {silent}"
