"""The shape of the library: packages import one way, private APIs of torch stand in one file, every file has a purpose.

`python -m tests.test_packages` writes the drawing of the package graph into CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import fshard as fs

ROOT = Path(fs.__file__).parent
REPOSITORY = Path(__file__).parents[1]
CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
IDEA = ("spec", "mesh", "collectives", "sharded", "shard_map")  # the five files a newcomer reads first
COMMS = ("AbstractComm", "PlannedComm", "ProcessComm", "SimulatedComm")
EXTRAS = ("transformers", "peft", "accelerate", "datasets", "nbformat", "nbclient")
MAY_IMPORT_EXTRAS = ("interop", "hf", "models", "recipes", "cli")
FACADE = "fshard"  # `fshard/__init__.py`, and the programs above it: no layer of the library

# Modules whose names have docstrings; those in the namespaces of `fs.` have examples too (tests/e2e/test_docs.py).
NAMESPACES = ["weight", "interop.defer", "interop.hf"]


def test_completion_of_the_library_shows_public_names_alone() -> None:
    assert dir(fs) == sorted([*fs.__all__, "__version__"])
    assert [n for n in dir(fs) if n.startswith("_")] == ["__version__"]
    assert all(hasattr(fs, name) for name in dir(fs))


def module_name(file: Path) -> str:
    """`spec`, `models.gpt2`, `models` for its `__init__`, `fshard` for the library's own."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__") or FACADE


FILES = {module_name(file): file for file in sorted(ROOT.rglob("*.py"))}


@cache
def parsed(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


@cache
def names(name: str) -> list[ast.Import | ast.ImportFrom | ast.Attribute]:
    """Imports and attributes of a file, at every depth."""
    kinds = ast.Import | ast.ImportFrom | ast.Attribute
    return [node for node in ast.walk(parsed(name)) if isinstance(node, kinds)]


@cache
def imports(name: str) -> tuple[tuple[int, str, str], ...]:
    """(line, module, imported name) of every import of fshard in a file: at its head, in a function, for types only."""
    file = FILES[name]
    package = ["fshard", *file.relative_to(ROOT).parent.parts]
    out = []
    for node in names(name):
        if isinstance(node, ast.Import):
            wanted = [(alias.name.split("."), "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = [*base, *(node.module.split(".") if node.module else [])]
            wanted = [(module, alias.name) for alias in node.names]
        else:
            continue
        for module, item in wanted:
            if module[0] == "fshard":
                outer = ".".join(module[1:]) or FACADE
                inner = item if outer == FACADE else f"{outer}.{item}"
                is_module = inner in FILES and (outer == FACADE or item not in face_names(outer))
                out.append((node.lineno, inner if is_module else outer, item))
    return tuple(out)


@cache
def face_names(name: str) -> set[str]:
    """The names that a package's `__init__` imports: `_comm.region` is the function, not its file."""
    nodes = [node for node in parsed(name).body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name for node in nodes for alias in node.names}


def package_of(name: str) -> str:
    """The node of the graph: a folder of `fshard/`, or a file at its top."""
    return name.split(".")[0]


@cache
def graph() -> dict[str, set[str]]:
    """The packages that each package imports."""
    out: dict[str, set[str]] = {package_of(name): set() for name in FILES}
    for name in FILES:
        out[package_of(name)] |= {package_of(other) for _, other, _ in imports(name)} - {package_of(name)}
    return out


def in_order(edges: dict[str, set[str]]) -> list[str]:
    """The packages, each after those it imports; raises with the circle where there is one."""
    done: list[str] = []

    def visit(package: str, path: tuple[str, ...]) -> None:
        assert package not in path, "packages import each other: " + " -> ".join(
            [*path[path.index(package) :], package]
        )
        if package not in done:
            for other in sorted(edges[package]):
                visit(other, (*path, package))
            done.append(package)

    for package in sorted(edges):
        visit(package, ())
    return done


@cache
def reachable(package: str) -> set[str]:
    return set().union(*({other} | reachable(other) for other in graph()[package]))


def drawing() -> str:
    """Every package with those it imports, less those that these import themselves; each line imports from above."""
    edges, lines = graph(), []
    for package in in_order(edges):
        direct = edges[package]
        needed = sorted(o for o in direct if not any(o in reachable(other) for other in direct - {o}))
        lines.append(f"{package:16}{', '.join(needed)}".rstrip())
    return "\n".join(lines)


def test_packages_import_one_way() -> None:
    in_order(graph())


def test_a_circle_of_packages_is_found() -> None:
    with pytest.raises(AssertionError, match="import each other: a -> b -> a"):
        in_order({"a": {"b"}, "b": {"a"}})


def test_drawing_in_contributing_is_that_of_the_imports() -> None:
    text = CONTRIBUTING.read_text()
    assert drawing() in text, "the drawing is out of date: python -m tests.test_packages writes it anew"


def test_imports_are_found_at_every_depth_of_a_file() -> None:
    assert {other for _, other, _ in imports("recipes.pretrain")} >= {"fshard", "models.gpt2"}
    assert {other for _, other, _ in imports("models.gpt2")} >= {"init", "tree"}


@pytest.mark.parametrize("name", IDEA)
def test_the_five_files_import_only_each_other_and_faces(name: str) -> None:
    faces = {package for package in FILES if FILES[package].name == "__init__.py"}
    allowed = {*IDEA, "tree", "errors", *faces}
    wrong = [f"line {line}: {other}" for line, other, _ in imports(name) if other not in allowed]
    assert not wrong, f"{name}.py imports more than the idea: {wrong}"


def test_private_packages_are_imported_by_their_face() -> None:
    wrong = [
        f"{name}, line {line}: {other}"
        for name in FILES
        for line, other, _ in imports(name)
        if other.startswith("_") and "." in other and package_of(other) != package_of(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_comm_and_mesh_know_the_kinds_of_comm() -> None:
    wrong = [
        f"{name}, line {line}: {item}"
        for name in FILES
        if package_of(name) not in ("_comm", "mesh")
        for line, _, item in imports(name)
        if item in COMMS
    ]
    assert not wrong, "\n".join(wrong)


@cache
def external(name: str) -> list[tuple[int, str]]:
    """(line, dotted name) of everything that a file imports or names from other libraries."""
    out = []
    for node in names(name):
        if isinstance(node, ast.Import):
            out += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.Attribute):
            out.append((node.lineno, ast.unparse(node)))
        elif not node.level and node.module:
            out += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return out


def test_extras_are_imported_only_where_they_may_be() -> None:
    wrong = [
        f"{name}, line {line}: {what}"
        for name in FILES
        if package_of(name) not in MAY_IMPORT_EXTRAS
        for line, what in external(name)
        if what.split(".")[0] in EXTRAS
    ]
    assert not wrong, "\n".join(wrong)


PRIVATE = re.compile(r"^(torch|dist)\.(?:\w+\.)*_(?!_)\w+")
ATTRIBUTES = (
    "_cdata", "_version", "_is_view", "_schema", "_get_backend", "_timeout", "_dynamo_marked_constant",
    "_current_level",
)  # fmt: skip


def test_private_names_of_torch_stand_in_one_file() -> None:
    wrong = [
        f"{name}, line {line}: {what}"
        for name in FILES
        if name != "_torch_compat"
        for line, what in external(name)
        if PRIVATE.match(what) or what.split(".")[-1] in ATTRIBUTES
    ]
    assert not wrong, "\n".join(wrong)


def test_every_file_has_a_docstring_and_a_name_for_an_idea() -> None:
    silent = [n for n, file in FILES.items() if file.read_text().strip() and not ast.get_docstring(parsed(n))]
    assert not silent, f"files without a docstring: {silent}"
    vague = [n for n in FILES if n.split(".")[-1] in ("utils", "util", "helpers", "common", "misc")]
    assert not vague, f"files named for no idea: {vague}"


QUESTIONS = ("What", "Whether", "How", "Where", "When", "Who", "Which")
MAYBE = re.compile(rf'"""\\s*({"|".join(QUESTIONS)})\\b')  # a file without this need not be parsed


def test_no_docstring_opens_with_a_question() -> None:
    found = []
    for file in [*ROOT.rglob("*.py"), *Path(__file__).parent.rglob("*.py")]:
        source = file.read_text()
        for node in ast.walk(ast.parse(source)) if MAYBE.search(source) else ():
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                text = ast.get_docstring(node) or ""
                if text.split(" ")[0].rstrip(",:") in QUESTIONS:
                    found.append(f"{file.relative_to(REPOSITORY)}: {getattr(node, 'name', '')}: {text[:60]}")
    assert not found, "\n".join(found)


def test_the_public_names_are_those_the_library_imports() -> None:
    tree = parsed(FACADE)
    names = [a.asname or a.name for node in tree.body if isinstance(node, ast.ImportFrom) for a in node.names]
    assert sorted(fs.__all__) == sorted(names)
    assert list(fs.__all__) == sorted(fs.__all__)


def module(name: str) -> ModuleType:
    return importlib.import_module("fshard" if name == FACADE else f"fshard.{name}")


def test_every_name_in_all_exists() -> None:
    modules = [module(name) for name in FILES if not name.endswith("__main__")]
    missing = [f"{m.__name__}.{n}" for m in modules for n in getattr(m, "__all__", ()) if not hasattr(m, n)]
    assert not missing


def public(name: str) -> Iterator[tuple[str, object]]:
    """The functions and classes of a namespace: those in its `__all__`, or those it defines."""
    listed = getattr(module(name), "__all__", None)
    for key, value in vars(module(name)).items():
        own = key in listed if listed is not None else getattr(value, "__module__", "") == module(name).__name__
        if not key.startswith("_") and own and (inspect.isfunction(value) or inspect.isclass(value)):
            yield key, value


@pytest.mark.parametrize("name", NAMESPACES)
def test_every_public_name_has_a_docstring(name: str) -> None:
    def generated(value: object) -> bool:  # by @dataclass
        return (value.__doc__ or "").startswith(f"{getattr(value, '__name__', '')}(")

    silent = [key for key, value in public(name) if not value.__doc__ or generated(value)]
    assert not silent, f"{name}: no docstring on {silent}"


if __name__ == "__main__":
    text = CONTRIBUTING.read_text()
    start = text.index("```text\n", text.index("<!-- package graph -->")) + len("```text\n")
    CONTRIBUTING.write_text(text[:start] + drawing() + text[text.index("\n```", start - 1) :])
