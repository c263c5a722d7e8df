"""The shape of the library: packages import one way, private APIs of torch stand in one file, every file has a purpose.

`python -m tests.test_packages` writes the drawing of the package graph into CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import fshard as fs

ROOT = Path(fs.__file__).parent
REPOSITORY = Path(__file__).parents[1]
CONTRIBUTING = REPOSITORY / "CONTRIBUTING.md"
IDEA = ("spec", "mesh", "collectives", "sharded", "shard_map")  # the five files a newcomer reads first
CORE = (*IDEA, "grad", "reshard", "tree", "errors", "_core", "init", "random")  # one room, with a picture of its own
COMMS = ("AbstractComm", "ProcessComm", "SimulatedComm")
EXTRAS = ("transformers", "peft", "accelerate", "datasets", "nbformat", "nbclient")
MAY_IMPORT_EXTRAS = ("defer", "interop", "models", "recipes", "cli")
BUDGET = {  # lines of each room: to raise one, give the reason in the commit
    "checkpoint": 1_464,
    "cli": 1_844,
    "core": 17_398,
    "data": 1_047,
    "defer": 5_115,
    "interop": 4_398,
    "law": 1_249,
    "lora": 1_769,
    "models": 4_655,
    "nn": 3_819,
    "optim": 2_762,
    "planning": 5_504,
    "recipes": 2_112,
    "schedule": 3_194,
    "fshard": 97,
}
FACADE = "fshard"  # `fshard/__init__.py`, and the programs above it: no layer of the library

# Modules whose names have docstrings; those in the namespaces of `fs.` have examples too (tests/e2e/test_docs.py).
NAMESPACES = ["_core.weight", "defer", "interop.hf"]


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
    """The names that a package's `__init__` imports: `law.check` is the function, not its file."""
    nodes = [node for node in parsed(name).body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name for node in nodes for alias in node.names}


def room_of(name: str) -> str:
    """The room of a file: a package at the top, or `core`."""
    first = name.split(".")[0]
    return "core" if first in CORE else first


def part_of(name: str) -> str:
    """The part of the core that a file is in: a file at the top, a file or a package of `_core`, `init` or `random`."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "_core" else parts[0]


@cache
def rooms() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    return grouped(list(FILES), room_of)


@cache
def core() -> dict[str, set[str]]:
    """The parts of the core that each of them imports."""
    return grouped([name for name in FILES if room_of(name) == "core" and name != "_core"], part_of)


@cache
def files() -> dict[str, set[str]]:
    """The files that each file imports."""
    return grouped(list(FILES), str)


def grouped(names: list[str], group_of: Callable[[str], str]) -> dict[str, set[str]]:
    out: dict[str, set[str]] = {group_of(name): set() for name in names}
    for name in names:
        out[group_of(name)] |= {group_of(other) for _, other, _ in imports(name)} - {group_of(name)}
    return out


def floors(edges: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each room: 1 for one that imports nothing, else one above the highest that it imports."""
    out: dict[str, int] = {}
    for room in in_order(edges):
        out[room] = 1 + max((out[other] for other in edges[room]), default=0)
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


def drawing(edges: dict[str, set[str]]) -> str:
    """Every node with those it imports, less those that these import themselves; an empty line between two floors."""
    below: dict[str, set[str]] = {}
    groups: dict[int, list[str]] = {}
    for node, floor in floors(edges).items():
        direct = edges[node]
        below[node] = direct.union(*(below[other] for other in direct))
        needed = sorted(o for o in direct if not any(o in below[other] for other in direct))
        groups.setdefault(floor, []).append(f"{node:20}{', '.join(needed)}".rstrip())
    return "\n\n".join("\n".join(sorted(groups[floor])) for floor in sorted(groups))


def test_at_the_top_are_nine_files_and_sixteen_packages() -> None:
    top = {name.split(".")[0] for name in FILES} - {FACADE, "__main__"}
    packages = {name for name in top if (ROOT / name).is_dir()}
    assert len(top - packages) <= 9
    assert len(packages) <= 16


def test_rooms_are_on_at_most_eight_floors() -> None:
    assert max(floors(rooms()).values()) <= 8, floors(rooms())


@pytest.mark.parametrize("edges", [rooms, core, files])
def test_imports_make_no_circle(edges: Callable[[], dict[str, set[str]]]) -> None:
    in_order(edges())


@pytest.mark.parametrize("name", [n for n in FILES if n.startswith("models.") and n != "models.hf"])
def test_model_files_do_not_import_the_recorder_of_modules(name: str) -> None:
    reached: set[str] = set()
    new = {name}
    while new:
        reached |= new
        new = {other for file in new for other in files()[file]} - reached
    assert not {file for file in reached if file.split(".")[0] == "defer"}


def test_rooms_keep_to_their_budgets_of_lines() -> None:
    lines: Counter[str] = Counter()
    for name, file in FILES.items():
        lines[FACADE if name == "__main__" else room_of(name)] += len(file.read_text().splitlines())
    over = {room: f"{n} > {BUDGET.get(room)}" for room, n in lines.items() if n > BUDGET.get(room, 0)}
    assert not over, f"{over}: write less, or raise BUDGET"


def test_comm_has_a_small_face() -> None:
    assert len(face_names("_core.comm")) <= 25


def test_a_circle_of_packages_is_found() -> None:
    with pytest.raises(AssertionError, match="import each other: a -> b -> a"):
        in_order({"a": {"b"}, "b": {"a"}})
    assert floors({"a": set(), "b": {"a"}, "c": {"a", "b"}}) == {"a": 1, "b": 2, "c": 3}


@pytest.mark.parametrize("edges", [rooms, core])
def test_drawings_in_contributing_match_the_imports(edges: Callable[[], dict[str, set[str]]]) -> None:
    text = CONTRIBUTING.read_text()
    assert drawing(edges()) in text, "the drawing is out of date: python -m tests.test_packages writes it anew"


def test_imports_are_found_at_every_depth_of_a_file() -> None:
    assert {other for _, other, _ in imports("recipes.pretrain")} >= {"fshard", "models.gpt2"}
    assert {other for _, other, _ in imports("models.bert")} >= {"init", "nn"}


@pytest.mark.parametrize("name", IDEA)
def test_the_five_files_import_only_each_other_and_faces(name: str) -> None:
    faces = {package for package in FILES if FILES[package].name == "__init__.py"}
    allowed = {*CORE, *faces, *(n for n in FILES if n.count(".") == 1 and n.startswith("_core."))}
    wrong = [f"line {line}: {other}" for line, other, _ in imports(name) if other not in allowed]
    assert not wrong, f"{name}.py imports more than the idea: {wrong}"


def test_private_packages_are_imported_by_their_face() -> None:
    wrong = [
        f"{name}, line {line}: {other}"
        for name in FILES
        for line, other, _ in imports(name)
        if other.startswith("_core.") and other.count(".") > 1 and part_of(other) not in (part_of(name), "_core.files")
    ]
    assert not wrong, "\n".join(wrong)


def test_only_comm_and_mesh_know_the_kinds_of_comm() -> None:
    wrong = [
        f"{name}, line {line}: {item}"
        for name in FILES
        if part_of(name) not in ("_core.comm", "mesh")
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
        if room_of(name) not in MAY_IMPORT_EXTRAS
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
        if name != "_core.torch"
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
MAYBE = re.compile(rf'"""\s*({"|".join(QUESTIONS)})\b')  # a file without this need not be parsed


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
    for name, edges in (("rooms", rooms()), ("core", core())):
        start = text.index("```text\n", text.index(f"<!-- {name} -->")) + len("```text\n")
        text = text[:start] + drawing(edges) + text[text.index("\n```", start - 1) :]
    CONTRIBUTING.write_text(text)
