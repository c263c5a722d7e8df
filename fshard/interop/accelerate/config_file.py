"""Read a configuration file, YAML or JSON: its keys, each with its place for an error message."""

from __future__ import annotations

import importlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fshard._core.files.io import open_file
from fshard.errors import ShardingError, fail, raise_all

_MAX_BYTES = 1 << 15  # such a file has about 1 KB, and pyyaml reads 64 KB in a second
_MAX_LENGTH, _MAX_BRACKETS = 1000, 200  # of one value, and in all
SECTIONS = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_", "parallelism_config": "parallelism_config_"}


@dataclass(frozen=True)
class Entry:
    """The value of a key, and its place: `fsdp.yaml, line 9: fsdp_config.fsdp_version`, or `--fsdp_version`."""

    value: Any
    where: str
    section: str = ""


def read_entries(path: Path) -> dict[str, Entry]:
    """Return the keys of a file; those in a section (`fsdp_config`) by their full names, as Accelerate has them."""
    wanted = "give the file that `accelerate config` wrote"
    with open_file(path, wanted) as f:
        content = f.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise fail(f"{path}: is too long", f"it has more than {_MAX_BYTES:,} bytes", fix=wanted)
    try:
        text = content.decode()
    except UnicodeDecodeError as e:
        raise fail(f"{path}: is not text in UTF-8", str(e)) from e
    contents, lines, errors = _json(path, text) if path.suffix == ".json" else _yaml(path, text)
    if not isinstance(contents, dict):
        raise fail(f"{path}: has no keys", f"its contents are {contents!r:.60}", fix=wanted)
    entries: dict[str, Entry] = {}
    for section, key, value in _flattened(contents):
        dotted = f"{section}.{key}" if section else key
        line = f", line {lines[dotted]}" if dotted in lines else ""
        entry = Entry(value, f"{path}{line}: {dotted}", section)
        if key in SECTIONS:
            if value:
                errors.append(fail(f"{entry.where}: {value!r:.60} is not a section of keys",
                                   fix=f"{key}:\n  key: value"))  # fmt: skip
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
    """Yield (section, key, value) of each key; a key outside of a section has the section ""."""
    for key, value in contents.items():
        if str(key) in SECTIONS and isinstance(value, dict):
            yield from ((str(key), str(k), v) for k, v in value.items())
        else:
            yield "", str(key), value


def _json(path: Path, text: str) -> tuple[Any, dict[str, int], list[ShardingError]]:
    errors: list[ShardingError] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        counts = Counter(name for name, _ in pairs)
        errors.extend(_twice(f"{path}: {name}") for name, count in counts.items() if count > 1)
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique), {}, errors
    except (ValueError, RecursionError) as e:
        raise fail(f"{path}: is not JSON", str(e)) from e


def _yaml(path: Path, text: str) -> tuple[Any, dict[str, int], list[ShardingError]]:
    """Return the contents, the line of each dotted key, and an error for each key that is there twice."""
    yaml = import_yaml(path)
    lines: dict[str, int] = {}
    errors: list[ShardingError] = []
    left = len(text)  # nodes: a few lines of aliases are lists of 10^9
    if (brackets := text.count("[") + text.count("{")) > _MAX_BRACKETS:  # pyyaml takes a second for 1,000 of "["
        raise fail(f"{path}: has {brackets:,} brackets", fix=f"{_MAX_BRACKETS} at most")

    def note(node: Any, prefix: str | None) -> None:
        """Look at all of a node; note its keys if there is a prefix: it is the file, or a section."""
        nonlocal left
        left -= 1
        line = node.start_mark.line + 1
        if left < 0:
            raise fail(f"{path}, line {line}: its aliases make more than {len(text):,} values", fix="write them out")
        if isinstance(node, yaml.ScalarNode) and len(node.value) > _MAX_LENGTH:
            raise fail(f"{path}, line {line}: a value has {len(node.value):,} characters",
                       fix=f"{_MAX_LENGTH:,} at most")  # fmt: skip
        for item in () if isinstance(node, yaml.ScalarNode) else node.value:
            key, value = item if isinstance(item, tuple) else (None, item)
            if key is not None:
                note(key, None)
            name = f"{prefix}{key.value}" if isinstance(key, yaml.ScalarNode) and prefix is not None else None
            if name in lines:
                where = f"{path}, line {key.start_mark.line + 1}: {name}"
                errors.append(_twice(where, f"line {lines[name]}"))
            if name is not None:
                lines[name] = key.start_mark.line + 1
            note(value, f"{name}." if name is not None and not prefix else None)

    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            return None, lines, errors
        note(root, "")
        return loader.construct_document(root), lines, errors
    except ShardingError:
        raise
    except Exception as e:  # a wrong value of a tag has errors of many kinds
        mark = getattr(e, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark is not None else ""
        raise fail(f"{path}{line}: is not YAML", re.sub(r"\s+", " ", str(getattr(e, "problem", None) or e))) from e


def _twice(where: str, first: str = "") -> ShardingError:
    note = f"the first is at {first}; a reader of YAML takes the last" if first else "a reader of JSON takes the last"
    return fail(f"{where} is there twice", note, fix="remove one of them")


def import_yaml(path: Path) -> ModuleType:
    try:
        return importlib.import_module("yaml")
    except ImportError as e:
        raise fail(f"{path}: a YAML file needs the package pyyaml",
                   fix="pip install pyyaml, or use a .json file") from e  # fmt: skip
