"""Leaves of a module from and to a folder: its names, ties and buffers, and the names of its library in files."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fshard import tree
from fshard._core.files.io import StrPath
from fshard.defer import Apply
from fshard.defer.constructor import Recorded
from fshard.defer.graph import draws
from fshard.errors import ShardingError, fail, join_limited, must_be, raise_all
from fshard.init import Deferred
from fshard.init.initializers import Full
from fshard.sharded import Sharded
from fshard.spec import describe, format_tensor

from .conversion import Converted, Pretrained, from_files, pretrained_in, to_files
from .export import model_contents, write_files
from .folder import WeightHeaders, explain_names
from .layout import Leaves
from .places import FilePart
from .traced import Traced, trace
from .weights import FileTensor, FromFile, check_dtype, join_scales, left_over, names_with, rest_error, unused, with_dot

KINDS = ("params", "buffers")
_MOST_PARTS = 16  # at the start of a name, in a pattern


def write_module(
    folder: StrPath, leaves: Any, of: Apply, *, config: Mapping[str, Any], like: StrPath | None, max_shard_bytes: int
) -> None:
    """Write all leaves of a module as a folder, under the names and in the shapes of its library; see `write`."""
    with_path, config = tree.leaves_with_path(leaves), _module_config(config, of)
    write_files(folder, with_path, lambda: model_contents(with_path, _file_parts(leaves, of), config, like), like=like,
                max_shard_bytes=max_shard_bytes)  # fmt: skip


def _module_config(config: Mapping[str, Any], of: Apply) -> dict[str, Any]:
    """Return the contents of config.json: of a model of transformers with its class, and without its local path."""
    pretrained, out = pretrained_in(of.module), dict(config)
    if pretrained is None or pretrained.adapted:
        return out
    kind = getattr(pretrained.model.config, "model_type", None)
    if out.setdefault("model_type", kind) != kind:
        raise fail(f"write: the model_type of config= is {out['model_type']!r}, and the one of {of!r} is {kind!r}",
                   fix="config.to_diff_dict(), of the config that the module was made of")  # fmt: skip
    out.pop("_name_or_path", None)
    out["architectures"] = out.get("architectures") or [type(pretrained.model).__name__]
    return out


def _file_parts(leaves: Any, of: Apply) -> Callable[[tree.Path], tuple[FilePart, ...]]:
    """Return the function from the path of a leaf to the parts of tensors in files that it is written to.

    `leaves` are all that the module stores; a buffer that is not persistent has no parts.
    """
    names = Names.of(of)
    named = [(name_of(path, leaves), path, leaf) for path, leaf in tree.leaves_with_path(leaves)]
    raise_all([
        *names.errors({name: path for name, path, _ in named}),
        *(must_be(f"write: {tree.show('tree', path)}", "a tensor or a Sharded", leaf)
          for name, path, leaf in named if name in names.kinds and not isinstance(leaf, (Sharded, torch.Tensor))),
    ])  # fmt: skip
    shapes = {names.stored(name): (tuple(leaf.shape), leaf.dtype)
              for name, _, leaf in named if name not in names.transient}  # fmt: skip
    parts = {name: trace(name, *of_leaf).parts for name, of_leaf in shapes.items()}
    if names.pretrained is not None:
        if names.pretrained.adapted:
            raise fail(f"write: {of!r} has adapters of peft, which its base model's folder has no place for",
                       fix="write the adapters by fs.peft.save_module; or merge them into the base layers, and write "
                           "the tree of the base model")  # fmt: skip
        parts = {name: x.parts for name, x in to_files(names.pretrained, shapes).items()}
    return lambda path: parts.get(names.stored(name_of(path, leaves)), ())


def name_of(path: tree.Path, described: Any) -> str:
    """Return the dotted name of a leaf in its module; `described` may be the full tree of `defer`."""
    is_full = isinstance(described, Mapping) and set(described) == set(KINDS)
    return tree.dotted(path[1:] if is_full else path)


def by_name(described: Any) -> Callable[[tree.Path], FileTensor]:
    return lambda path: FileTensor(name_of(path, described))


@dataclass(frozen=True)
class Names:
    """Names of a module's parameters and buffers; all empty if it is not known.

    `kinds`: the kind of each, tied ones too. `ties`: tied name -> the name of the leaf that it uses. `transient`:
    buffers that are not persistent. `frozen`: parameters that need no gradient.
    """

    kinds: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, str]
    transient: frozenset[str]
    frozen: frozenset[str]
    pretrained: Pretrained | None
    shown: str

    @classmethod
    def of(cls, apply: Apply | None) -> Names:
        if apply is None:
            return cls({}, {}, {}, frozenset(), frozenset(), None, "")
        named = {"params": apply.module.named_parameters(remove_duplicate=False),
                 "buffers": apply.module.named_buffers(remove_duplicate=False)}  # fmt: skip
        leaves = {name: (kind, tuple(x.shape)) for kind in KINDS for name, x in named[kind]}
        return cls({name: kind for name, (kind, _) in leaves.items()}, {name: s for name, (_, s) in leaves.items()},
                   apply.ties, apply.transient, apply.frozen, pretrained_in(apply.module), repr(apply))  # fmt: skip

    def errors(self, found: Mapping[str, tree.Path]) -> list[ShardingError]:
        """Return an error for each leaf to write, by name, that is not the module's, and each that is missing."""
        optional = {*self.transient, *self.ties, *found}
        return [
            *(fail(f"write: {tree.show('tree', path)} is not a leaf of {self.shown}")
              for name, path in found.items() if name not in self.kinds),
            *(fail(f"write: {kind}[{name!r}] is missing", fix="write the full tree: {'params': ..., 'buffers': ...}")
              for name, kind in self.kinds.items() if name not in optional),
        ]  # fmt: skip

    def plain(self, name: str) -> str:
        return self.pretrained.plain_name(name) if self.pretrained else name

    def stored(self, name: str) -> str:
        """Return the name under which a leaf is written: of a tied one that which its library keeps."""
        tied = self.pretrained.tied if self.pretrained else ()
        names = [name, *(other for other, first in self.ties.items() if first == name)]
        return self.plain(next((n for n in names if self.plain(n) not in tied), name))

    def may_lack(self, names: Sequence[str], leaf: Deferred) -> bool:
        """Return whether a folder may lack a leaf: not trained, not drawn, and not stored by its library."""
        if any(name in self.transient for name in names):
            return True
        trained = any(self.kinds.get(name) == "params" and name not in self.frozen for name in names)
        constant = isinstance(leaf.init, Full) or (isinstance(leaf.init, Recorded) and not draws(leaf.init.node))
        library = self.pretrained
        return constant and not trained and library is not None and any(library.may_lack(self.plain(n)) for n in names)


# --- reading --------------------------------------------------------------------------------------------------


def read_module(
    folder: StrPath, described: Any, of: Apply | None, *, prefix: str, ignored: Sequence[str], missing: Sequence[str]
) -> Any:
    """Return the leaves of a module with their values in a folder, as `fs.hf.weights`."""
    headers = WeightHeaders(folder)
    join_scales(headers)
    return read_leaves(headers, described, Names.of(of), prefix, ignored, missing)


def read_leaves(
    headers: WeightHeaders, described: Any, names: Names, prefix: str, ignored: Sequence[str], missing: Sequence[str],
    call: str = "hf.weights",
) -> Any:  # fmt: skip
    """Return the leaves `described` with their values in files, by `names`. Errors name the function `call`."""
    prefix = with_dot(prefix)
    leaves = tree.leaves_with_path(described)
    names_of: dict[int, list[str]] = {}  # of each leaf: a tie has several
    for path, leaf in leaves:
        names_of.setdefault(id(leaf), []).append(name_of(path, described))
    for of_leaf in names_of.values():
        of_leaf += [tied for tied, name in names.ties.items() if name in of_leaf and tied not in of_leaf]

    def options(name: str) -> list[str]:
        return names_with(prefix, names.plain(name))

    known = {n for of_leaf in (*names_of.values(), names.kinds) for name in of_leaf for n in options(name)}
    stored = _stored(headers, names, prefix, known)
    errors = [*headers.errors, *(ShardingError(f"{headers.path}: {e}") for e in stored.errors)]
    out: dict[int, Deferred] = {}
    parts: dict[str, list[FilePart]] = {}  # that are read, by the name in a file
    lacking: list[str] = []
    present: list[str] = []  # names of leaves that the folder has
    for path, leaf in leaves:
        if id(leaf) in out:
            continue
        out[id(leaf)] = leaf
        label, own = tree.show("tree", path), names_of[id(leaf)]
        found = list(dict.fromkeys(n for name in own for n in options(name) if n in stored.leaves))
        for part in (part for n in found for part in stored.leaves[n].parts):
            parts.setdefault(part.name, []).append(part)
        try:
            if not isinstance(leaf, Deferred):
                raise fail(f"{label}: is a {type(leaf).__name__}", fix="describe it: fs.init.*")
            if unknown := [n for n in own if names.kinds and n not in names.kinds]:
                raise fail(f"{label}: {names.shown} has no leaf {unknown[0]!r}",
                           fix="pass the tree that fs.defer returned with it")  # fmt: skip
            if found:
                present += own
                out[id(leaf)] = _leaf(headers, [stored.leaves[n] for n in found], label, leaf)
            elif headers.complete and not names.may_lack(own, leaf) and not matches(own, missing):
                lacking.append(own[0])
                errors.append(fail(f"{headers.path}: {names.plain(own[0])!r} is missing",
                                   f"for {label}, {describe(leaf)}"))  # fmt: skip
        except ShardingError as e:
            errors.append(e)
    errors += _stale(leaves, out, names_of)
    own = [name for of_leaf in names_of.values() for name in of_leaf]
    kinds = {names.kinds.get(name) for name in own}
    # Name in a file -> the kind of the module's leaf that has its values.
    kind_in_module = {part.name: kind for name, kind in names.kinds.items() if names.plain(name) in stored.leaves
                      for part in stored.leaves[names.plain(name)].parts}  # fmt: skip
    skipped = {names.plain(name) for name in names.transient}

    def may_be_unused(name: str) -> bool:
        if kind_in_module.get(name) == "params" and "params" not in kinds:  # only buffers are read
            return True
        skips = names.pretrained is not None and names.pretrained.skips(name)
        return skips or name in skipped or matches([name], ignored)

    extra = left_over(headers, parts, prefix, may_be_unused)
    for name in extra:
        if kind := kind_in_module.get(name):
            errors.append(unused(headers, name, f"is in the module's {kind}, and not in this tree",
                                 "read the full tree: {'params': ..., 'buffers': ...}"))  # fmt: skip
        else:
            errors.append(unused(headers, name))
    errors += filter(None, (rest_error(headers.path, name, of_tensor) for name, of_tensor in parts.items()))
    verb = call.rpartition(".")[2]
    errors += [fail(f"{verb}: missing= has {pattern!r}, and no leaf has such a name", fix="correct it")
               for pattern in missing if not matches(own, [pattern])]  # fmt: skip
    if lacking or extra:
        plain = [names.plain(name) for name in lacking]
        if lacking and extra and not present and not names.kinds and not explain_names(headers, verb, plain, extra):
            raise fail(f"{call}: {headers.path} has none of the leaves by their names in `described`",
                       fix="give the folder of this model, or rename its tensors; of=apply, with the apply of "
                           "fs.defer, knows the names of transformers; fs.hf.load(path) reads a model of fs.models",
                       tree=join_limited(plain, 2), files=join_limited(extra, 2))  # fmt: skip
        errors.append(explain_names(headers, verb, plain, extra, prefix, call)
                      or _advice(names, (lacking, present), (extra, list(headers.tensors)), (missing, ignored), call,
                                 "folder" if headers.path.is_dir() else "file"))  # fmt: skip
    raise_all(errors)
    return tree.map(lambda leaf: out[id(leaf)], described)


def _stored(headers: WeightHeaders, names: Names, prefix: str, known: Container[str]) -> Converted:
    """Return the tensors of a folder by their names in the module; without a conversion only known ones, of many."""
    entries = {name: trace(name, x.shape, x.dtype or torch.uint8) for name, x in headers.tensors.items()
               if names.pretrained is not None or name in known}  # fmt: skip
    if names.pretrained is None:
        return Converted(entries)
    shapes = {names.plain(n): shape for n, shape in names.shapes.items() if n not in names.transient}
    stored = from_files(names.pretrained, shapes, entries)
    unknown = {name for name in stored.unknown if prefix and name.startswith(prefix)}
    if unknown:
        entries = {name.removeprefix(prefix) if name in unknown else name: x for name, x in entries.items()}
        stored = from_files(names.pretrained, shapes, entries)
    if not headers.complete:  # a conversion may lack a tensor of the file that cannot be read
        stored.errors.clear()
    return stored


def _leaf(headers: WeightHeaders, found: Sequence[Traced], label: str, leaf: Deferred) -> Deferred:
    """Return a leaf with the values of a tensor, and of those that must be equal to it."""
    sources = []
    first: dict[torch.dtype, str] = {}
    for x in found:
        parts = [(headers.tensors[part.name], part) for part in x.parts]
        if x.shape != leaf.shape:
            files = list(dict.fromkeys(repr(entry.name) for entry, _ in parts))
            which = f"{files[0]} has" if len(files) == 1 else f"{len(files)} tensors, {files[0]} to {files[-1]}, make"
            raise fail(f"{headers.path}: {which} another shape, for {label}",
                       got=list(x.shape), expected=list(leaf.shape))  # fmt: skip
        for entry, _ in parts:
            dtype = check_dtype(headers.path, entry, leaf.dtype, leaf.shape, label)
            first.setdefault(dtype, f"{format_tensor(dtype, entry.shape)}  {entry.name}")
        sources.append(parts)
    if len(first) > 1:
        raise fail(f"{headers.path}: the tensors of {label} have different dtypes", *first.values())
    first_source, *copies = map(FromFile, sources)
    copies = [copy for copy in copies if copy.reads != first_source.reads]  # other names of one tensor in the file
    return Deferred(leaf.shape, next(iter(first), leaf.dtype), FromFile(first_source.parts, copies))


def _stale(leaves: Leaves, out: Mapping[int, Any], names_of: Mapping[int, Sequence[str]]) -> list[ShardingError]:
    """Return an error for each leaf whose initial values the constructor computed from others, now read from files."""
    names = {name for path, leaf in leaves if out[id(leaf)] is not leaf for name in names_of[id(leaf)]}
    read = {f"{kind}.{name}": name for kind in KINDS for name in names}
    errors = []
    for path, leaf in leaves:
        scope = leaf.scope if isinstance(leaf, Deferred) and out[id(leaf)] is leaf else None
        if scope is not None and (sources := [read[owner] for owner in scope.owners if owner in read]):
            errors.append(fail(f"weights: {tree.show('tree', path)} is computed from {join_limited(sources, 2)}",
                               "that is read from the folder, and this leaf would have the value for another one",
                               fix="take it out of the tree, read the rest, and compute it from that"))  # fmt: skip
    return errors


# --- names that may be missing or unused ----------------------------------------------------------------------


def matches(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether a name ends with one of the patterns, or, if that has a `*`, is matched by it."""
    return any(fnmatch.fnmatchcase(n, p) if "*" in p else n.endswith(p) for n in names for p in patterns)


def _advice(
    names: Names, leaves: tuple[Sequence[str], Sequence[str]], tensors: tuple[Sequence[str], Sequence[str]],
    now: tuple[Sequence[str], Sequence[str]], call: str, where: str,
) -> ShardingError:  # fmt: skip
    """Return the error that names the arguments with which the folder is accepted, if that drops no values of a leaf.

    Args:
        leaves: names of those that are not in the folder, and of the others.
        tensors: names of those that no leaf uses, and of all.
        now: `missing` and `ignored` of this call, which is of the function `call`.
    """
    lacking, extra = leaves[0], tensors[0]
    accepted = (*now[0], *globs(*leaves)), (*now[1], *globs(*tensors))
    arguments = [f"{key}={value!r}" for key, value in zip(("missing", "ignored"), accepted, strict=True) if value]
    notes = ["leaves named by missing= keep their initializers; tensors named by ignored= are not read"]
    if not names.kinds:
        notes.append("for the names, ties and buffers of fs.defer's module: of=apply")
    leaves_have = "1 leaf has" if len(lacking) == 1 else f"{len(lacking)} leaves have"
    tensors_have = "1 tensor has" if len(extra) == 1 else f"{len(extra)} tensors have"
    what = f"{call.rpartition('.')[2]}: {leaves_have} no tensor in the {where}, {tensors_have} no leaf"
    owners = {name.rpartition(".")[0] for name in extra} - {""}
    renamed = bool(extra) and (len(lacking) > len(leaves[1]) or any(n.rpartition(".")[0] in owners for n in lacking))
    if lacking and (renamed or not leaves[1]):
        return fail(what, f"the {where} has other names for them, or is of another model", *notes[1:],
                    fix=f"give the {where} of this model, or rename its tensors")  # fmt: skip
    return fail(what, *notes, fix=f"if that is intended, {call}(..., {', '.join(arguments)})")


def globs(chosen: Sequence[str], every: Iterable[str]) -> list[str]:
    """Return few patterns that match the chosen names and none of the others.

    >>> globs(["classifier.weight", "classifier.bias"], ["classifier.weight", "classifier.bias", "bert.weight"])
    ['classifier.*']
    >>> globs(["h.0.lora_A.weight", "h.1.lora_A.weight"], ["h.0.lora_A.weight", "h.1.lora_A.weight", "h.0.weight"])
    ['*.lora_A.*']
    """
    rest = set(chosen)
    refused = {glob for name in every if name not in rest for glob in _globs_of(name)}
    names_of: dict[str, set[str]] = {}
    for name in dict.fromkeys(chosen):
        for glob in _globs_of(name):
            if glob not in refused:
                names_of.setdefault(glob, set()).add(name)
    out: list[str] = []
    while names_of and len(out) < 16:
        best = min(names_of, key=lambda glob: (-len(names_of[glob]), glob[0] == "*", len(glob)))
        out.append(best)
        rest -= names_of[best]
        names_of = {glob: left for glob, names in names_of.items() if (left := names & rest)}
    return out + [name for name in dict.fromkeys(chosen) if name in rest]


def _globs_of(name: str) -> dict[str, None]:
    """Return patterns that match a name: of its first parts, and of each part inside it."""
    parts = [] if {*name} & {*"[?*"} else name.split(".")
    starts = (".".join(parts[:i]) + ".*" for i in range(1, min(len(parts), _MOST_PARTS)))
    return dict.fromkeys([*starts, *(f"*.{part}.*" for part in parts[1:-1] if not part.isdigit())])
