"""Read and write a configuration file, YAML or JSON: its keys, each with its place for an error message."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fshard._io import open_file
from fshard.errors import ShardingError, fail, raise_all

SECTIONS = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "parallelism_config": "parallelism_config_"}


@dataclass(frozen=True)
class Entry:
    """The value of a key, and its place: `fsdp.yaml, line 9: fsdp_config.fsdp_version`, or `--fsdp_version`."""

    value: Any
    where: str
    section: str = ""


def read_entries(path: Path) -> dict[str, Entry]:
    """Return the keys of a file; those in a section (`fsdp_config`) by their full names, as Accelerate has them.

    Raises ShardingError if it cannot be read, is not a mapping, or has a key twice.
    """
    with open_file(path, "give the file that `python -m fshard config` or `accelerate config` wrote") as f:
        content = f.read()
    try:
        text = content.decode()
    except UnicodeDecodeError as e:
        raise fail(f"{path}: is not text in UTF-8", str(e)) from e
    contents, lines, errors = _json(path, text) if path.suffix == ".json" else _yaml(path, text)
    if not isinstance(contents, dict):
        raise fail(f"{path}: has no keys", f"its contents are {contents!r:.60}",
                   fix="give the file that `python -m fshard config` or `accelerate config` wrote")  # fmt: skip
    entries: dict[str, Entry] = {}
    for section, key, value in _flattened(contents):
        dotted = f"{section}.{key}" if section else key
        line = f", line {lines[dotted]}" if dotted in lines else ""
        entry = Entry(value, f"{path}{line}: {dotted}", section)
        if key in SECTIONS:
            if value:
                errors.append(fail(f"{entry.where}: {value!r:.60} is no section of keys", fix=f"{key}:\n  key: value"))
            continue
        prefix = SECTIONS.get(section, "")
        name = key if key.startswith(prefix.split("_")[0]) else prefix + key  # as Accelerate completes a short name
        if name in entries:
            errors.append(fail(f"{entry.where} is set twice", f"{name} is also at {entries[name].where}",
                               fix="remove one of them"))  # fmt: skip
        entries[name] = entry
    raise_all(errors)
    return entries


def _flattened(contents: Mapping[Any, Any]) -> Iterator[tuple[str, str, Any]]:
    """(section, key, value) of each key, of which those outside of a section have the section ""."""
    for key, value in contents.items():
        if str(key) in SECTIONS and isinstance(value, dict):
            yield from ((str(key), str(k), v) for k, v in value.items())
        else:
            yield "", str(key), value


def _json(path: Path, text: str) -> tuple[Any, dict[str, int], list[ShardingError]]:
    errors: list[ShardingError] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        errors.extend(_twice(f"{path}: {name}") for name in dict.fromkeys(names) if names.count(name) > 1)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique), {}, errors
    except (ValueError, RecursionError) as e:
        raise fail(f"{path}: is not JSON", str(e)) from e


def _yaml(path: Path, text: str) -> tuple[Any, dict[str, int], list[ShardingError]]:
    """Return the contents, the line of each dotted key, and an error for each key that stands twice."""
    yaml = import_yaml(path)
    lines: dict[str, int] = {}
    errors: list[ShardingError] = []

    def note(node: Any, prefix: str) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                continue
            name = prefix + key.value
            if name in lines:
                errors.append(_twice(f"{path}, line {key.start_mark.line + 1}: {name}", f"line {lines[name]}"))
            lines[name] = key.start_mark.line + 1
            if not prefix:
                note(value, f"{name}.")

    try:
        note(yaml.compose(text, Loader=yaml.SafeLoader), "")
        return yaml.safe_load(text), lines, errors
    except (yaml.YAMLError, RecursionError, ValueError) as e:
        mark = getattr(e, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise fail(f"{path}{line}: is not YAML", re.sub(r"\s+", " ", str(getattr(e, "problem", None) or e))) from e


def _twice(where: str, first: str = "") -> ShardingError:
    note = f"the first is at {first}; a reader of YAML takes the last" if first else "a reader of JSON takes the last"
    return fail(f"{where} stands twice", note, fix="remove one of them")


def write_config(path: Path, contents: Mapping[str, Any]) -> None:
    """Write a file that `read_entries` and Accelerate read: JSON if its name ends so, and else YAML."""
    if path.suffix == ".json":
        text = json.dumps(contents, indent=2, sort_keys=True) + "\n"
    else:
        text = import_yaml(path).safe_dump(dict(contents))
    path.write_text(text, encoding="utf-8")


def import_yaml(path: Path) -> ModuleType:
    try:
        return importlib.import_module("yaml")
    except ImportError as e:
        raise fail(
            f"{path}: a YAML file needs the package pyyaml", fix="pip install pyyaml, or use a .json file"
        ) from e
