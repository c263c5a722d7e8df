"""Weights by slices of safetensors files: leaves whose initializer reads, on every rank, only the bytes of its part."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from fshard import tree
from fshard._core.files.io import StrPath, bytes_of, file_state, open_file, read_at
from fshard._core.files.safetensors import HeaderEntry
from fshard._core.files.url import AnyPath
from fshard.errors import ShardingError, checked, fail, must_be, raise_all
from fshard.init import Deferred
from fshard.spec import Box, box_shape, describe, format_tensor, full_box, overlap, relative_box

from .folder import CONFIG, WeightHeaders, explain_names, read_json, unsupported_dtype
from .pattern import Pattern, identity
from .places import FilePart, Places, check_division, count_elements

CHUNK_BYTES = 8 << 20  # in memory, in addition to the part that is read or written


@dataclass(frozen=True)
class FileTensor:
    """Name of a tensor in a file, and the `Pattern` from its dims to the leaf's; None if they are the same.

    >>> FileTensor("h.0.attn.c_attn.weight", "d (three h k) -> d three h k")
    FileTensor(name='h.0.attn.c_attn.weight', dims='d (three h k) -> d three h k', at=None)
    """

    name: str
    dims: str | None = None
    at: Mapping[str, int] | None = None

    def pattern(self, ndim: int) -> Pattern:
        return identity(ndim) if self.dims is None else Pattern(self.dims, self.at)

    def parts(self, shape: Sequence[int]) -> list[FilePart]:
        """Return the places of a leaf of `shape`, which is all of the tensor in the file or a part of it: one part."""
        pattern = self.pattern(len(shape))
        return [FilePart(full_box(shape), self.name, pattern.file_shape(shape), pattern.places(shape))]


@dataclass(frozen=True)
class FileTensors(FileTensor):
    """Tensors in a file, one for each index of dim 0 of a leaf: a `*` in `name` is the index, `dims` are of the others.

    >>> [part.name for part in FileTensors("experts.*.w1.weight", "f d -> d f").parts((2, 16, 64))]
    ['experts.0.w1.weight', 'experts.1.w1.weight']
    """

    def parts(self, shape: Sequence[int]) -> list[FilePart]:
        """Return the places of a leaf of `shape`: a part for each index of dim 0."""
        n, *rest = shape
        (one,) = super().parts(rest)
        places = Places(((), *one.places.dims), one.places.offset)
        return [FilePart((slice(i, i + 1), *one.box), self.name.replace("*", str(i)), one.shape, places)
                for i in range(n)]  # fmt: skip


class FromFile:
    """An initializer that reads its box from a file. Shown as `stored(model.safetensors: h.0.ln_1.weight)`.

    `parts` are the tensors in files that make up the leaf. `copies`, tied to it, must have the same values.
    """

    def __init__(self, parts: Sequence[tuple[HeaderEntry, FilePart]], copies: Sequence[FromFile] = ()) -> None:
        self.parts, self.copies = tuple(parts), tuple(copies)

    @property
    def reads(self) -> list[Any]:
        """The places in files that are read: equal for two initializers that read the same bytes."""
        return [(entry.file, entry.start, entry.dtype, part.box, part.places_in(entry)) for entry, part in self.parts]

    def describe(self) -> str:
        """Return the text that is shown after a leaf."""
        entry = self.parts[0][0]
        others = len({e.name for e, _ in self.parts}) - 1
        return f"stored({entry.file.name}: {entry.name}{f' and {others} more' if others else ''})"

    def fill(self, key: Tensor, shape: tuple[int, ...], box: Box, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Read the box of the leaf, rounded to `dtype`.

        No other byte of the tensor is read. Raises ShardingError if the file cannot be read, or has changed since its
        header was read.
        """
        out = torch.empty(box_shape(box), dtype=dtype, device=device)
        for entry, part in self.parts:
            common = overlap(part.box, box)
            if common is not None:
                _fill(out[relative_box(common, box)], entry, part.places_in(entry), relative_box(common, part.box))
        for copy in self.copies:
            other = copy.fill(key, shape, box, dtype, device)
            if not torch.equal(out.flatten().view(torch.uint8), other.flatten().view(torch.uint8)):
                first, second = self.parts[0][0], copy.parts[0][0]
                raise fail(f"{second.file}: {second.name!r} is not equal to {first.name!r}",
                           "they are tied: they would be one leaf",
                           fix="untie them (tie_word_embeddings: false in config.json), or take one out of the "
                               "file")  # fmt: skip
        return out


def _fill(out: Tensor, entry: HeaderEntry, places: Places, box: Box) -> None:
    """Fill `out` with a box of a tensor that has these places in a tensor in a file."""
    product = entry if isinstance(entry, ScaledEntry) else None
    stored = product.stored if product else entry.dtype
    assert stored is not None
    scales = _all_of(product.scales) if product else torch.ones(0)
    buffer = torch.empty(0, dtype=stored, device="cpu")
    with _open(entry) as f:
        for inside, part in places.boxes(box):
            for target, offsets, run in part.chunks(out[inside], CHUNK_BYTES // (64 if product else stored.itemsize)):
                unchanged = product is None and target.dtype == stored
                if unchanged and target.device.type == "cpu" and target.is_contiguous():
                    _read(f, entry, target, offsets, run)
                    continue
                if buffer.numel() < target.numel():
                    buffer = torch.empty(target.numel(), dtype=stored, device="cpu")
                values = buffer[: target.numel()]
                _read(f, entry, values, offsets, run)
                values = product.multiplied(values, scales, offsets, run) if product else values
                target.copy_(values.view(target.shape))


def _all_of(entry: HeaderEntry) -> Tensor:
    out = torch.empty(math.prod(entry.shape), dtype=entry.dtype or torch.uint8, device="cpu")
    with _open(entry) as f:
        _read(f, entry, out, [0], out.numel())
    return out


def _read(f: BinaryIO, entry: HeaderEntry, values: Tensor, offsets: Sequence[int], run: int) -> None:
    """Fill a contiguous tensor from the runs of `run` elements at `offsets` of the tensor in the file."""
    buffer, size = bytes_of(values), run * values.itemsize  # no copy: it is contiguous and on the CPU
    for i, offset in enumerate(offsets):
        rest, position = buffer[i * size : (i + 1) * size], entry.start + offset * values.itemsize
        end = position + size
        while rest:
            count = read_at(f, rest, position)
            if not count:
                raise _changed(entry, f"it ends before byte {end}")
            rest, position = rest[count:], position + count


@contextlib.contextmanager
def _open(entry: HeaderEntry) -> Iterator[BinaryIO]:
    """Open the file of a tensor; on leaving, raise ShardingError if it has changed since its header was read."""
    with open_file(entry.file) as f:
        yield f
        size, time = file_state(f)
        if (size, time) != (entry.file_size, entry.file_time):
            raise _changed(entry, f"{entry.file_size} bytes then, {size} now")


def _changed(entry: HeaderEntry, difference: str) -> ShardingError:
    return fail(f"{entry.file}: has changed since its header was read", difference, f"in {entry.name!r}",
                fix="read the folder again, when nothing writes to it")  # fmt: skip


# --- matrices in 8 bits with scales, read as their products: FP8 and int8, by blocks or rows ----------------------

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# The end of the name of the scales -> the dtypes of the matrix, and a factor: bitsandbytes' are the largest of 127.
_SCALES = {".weight_scale_inv": (_FP8, 1.0), ".weight_scale": ((*_FP8, torch.int8), 1.0),
           ".SCB": ((torch.int8,), 7.874015718698502e-3)}  # fmt: skip

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of scales


@dataclass(frozen=True, kw_only=True)
class ScaledEntry(HeaderEntry):
    """A matrix of dtype `stored` in a file: each block is multiplied by one of `scales`, and by `factor`."""

    stored: torch.dtype
    scales: HeaderEntry
    block: tuple[int, int]
    factor: float

    def multiplied(self, values: Tensor, scales: Tensor, offsets: Sequence[int], run: int) -> Tensor:
        """Return the values of the runs of `run` elements at `offsets`."""
        index = (torch.tensor(offsets).unsqueeze(1) + torch.arange(run)).flatten()
        row, column = index // self.shape[1] // self.block[0], index % self.shape[1] // self.block[1]
        blocks = -(-self.shape[1] // self.block[1])
        return (values.float() * (scales.float() * self.factor)[row * blocks + column]).to(self.dtype)


def join_scales(headers: WeightHeaders) -> None:
    """Make each matrix with its scales one tensor of the scales' dtype. What has no known formula is left unchanged."""
    scaled = [(name, end) for name in headers.tensors for end in _SCALES if name.endswith(end)]
    if not scaled:
        return
    config = headers.path / CONFIG
    quantization = read_json(config).get("quantization_config") if config.is_file() else None
    size = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
    block = (size[0], size[1]) if isinstance(size, list) and len(size) == 2 else (128, 128)
    for name, end in scaled:
        stem, scales = name.removesuffix(end), headers.tensors[name]
        matrix, format_of = headers.tensors.get(f"{stem}.weight"), headers.tensors.get(f"{stem}.weight_format")
        if matrix is None or f"{stem}.weight_zero_point" in headers.tensors:
            continue
        of_scale = _block_of(end, matrix, scales, block)
        is_row_major = format_of is None or not _all_of(format_of).view(torch.uint8).any()
        if of_scale is None or matrix.dtype is None or not is_row_major:
            continue
        headers.tensors[f"{stem}.weight"] = ScaledEntry(
            **{**vars(matrix), "dtype": scales.dtype}, stored=matrix.dtype, scales=scales, block=of_scale,
            factor=_SCALES[end][1])  # fmt: skip
        for used in (name, f"{stem}.weight_format"):
            headers.tensors.pop(used, None)


def _block_of(end: str, matrix: HeaderEntry, scales: HeaderEntry, block: tuple[int, int]) -> tuple[int, int] | None:
    """Return the numbers of rows and columns that share a scale; None if no formula is known."""
    has_dtypes = matrix.dtype in _SCALES[end][0] and scales.dtype in _DTYPES
    if not has_dtypes or len(matrix.shape) != 2 or matrix.strides or scales.strides:
        return None
    rows, columns = matrix.shape
    if end == ".weight_scale_inv":
        return block if scales.shape == (-(-rows // block[0]), -(-columns // block[1])) else None
    if math.prod(scales.shape) == 1:
        return rows, columns
    return (1, columns) if scales.shape in ((rows,), (rows, 1)) else None


# --- the leaves -----------------------------------------------------------------------------------------------


@checked
def tensors(path: StrPath) -> dict[str, Deferred]:
    """Describe every tensor of a folder, or of one safetensors file; only the headers are read.

    >>> tensors("my-gpt2")["transformer.ln_f.weight"]
    f32[16] = stored(model.safetensors: transformer.ln_f.weight)

    Raises ShardingError listing every tensor that is cut short, out of place or of an unsupported dtype.
    """
    headers = WeightHeaders(path)
    entries = headers.tensors.values()
    raise_all(headers.errors + [unsupported_dtype(entry) for entry in entries if entry.dtype is None])
    return {entry.name: Deferred(entry.shape, entry.dtype, FromFile([(entry, part)]))
            for entry in entries if entry.dtype is not None
            for part in FileTensor(entry.name).parts(entry.shape)}  # fmt: skip


@checked
def read(
    folder: StrPath | WeightHeaders, described: Any, theirs: Callable[[tree.Path], FileTensor], *, prefix: str = "",
    ignored: Sequence[str] = (), copies: Mapping[str, str] | None = None,
) -> Any:  # fmt: skip
    """Return the tree `described` with its values in a folder: leaves of the same shapes, which `materialize` reads.

    Dtypes are the file's. Only the headers are read here. A leaf at two paths of `described`, a tie, is one
    leaf again, read under the first of its names that is in the folder.

    Args:
        folder: its path, or its headers if they have been read already.
        theirs: path of a leaf -> its tensor in the file, all or a part of it.
        prefix: names are looked up unchanged, without this prefix (`"transformer."`), and with it: for a base model
            saved without its head, or the reverse.
        ignored: suffixes of the names of tensors that may be unused.
        copies: another name -> the tensor that it is tied to. If the folder has both, both are read and compared.

    >>> weights = read("my-gpt2", {"w": fs.init.ones(16)}, lambda path: FileTensor("ln_f.weight"),
    ...                prefix="transformer.", ignored=("weight", "bias"))
    >>> fs.materialize(weights, P("model"), mesh, key=fs.key(0))
    {'w': f32[16@model]}

    Raises ShardingError, before any value is read, listing every tensor that is missing, extra, of another shape, of an
    unsupported dtype, cut short or out of place in its file, or in an index and not in its file.
    """
    headers = folder if isinstance(folder, WeightHeaders) else WeightHeaders(folder)
    join_scales(headers)
    errors = list(headers.errors)
    prefix = with_dot(prefix)
    paths_of: dict[int, list[tuple[tree.Path, FileTensor]]] = {}
    leaves = tree.leaves_with_path(described)
    for path, leaf in leaves:
        paths_of.setdefault(id(leaf), []).append((path, file_tensor("read", path, theirs(path))))

    def names_in_file(name: str) -> list[str]:
        return [n for n in names_with(prefix, name) if n in headers.tensors]

    out: dict[int, Deferred] = {}
    lacking: list[str] = []
    used: set[str] = set()
    parts_of: dict[str, list[FilePart]] = {}
    for first, leaf in leaves:
        if id(leaf) in out:
            continue
        out[id(leaf)] = leaf
        stored: list[tuple[HeaderEntry, FilePart]] = []
        copied: list[tuple[HeaderEntry, FilePart]] = []
        try:
            if not isinstance(leaf, Deferred):
                used |= {name for _, tensor in paths_of[id(leaf)] for name in names_in_file(tensor.name)}
                raise fail(f"{tree.show('params', first)}: is a {type(leaf).__name__}", fix="describe it: fs.init.*")
            of_paths = [_parts(path, tensor, leaf) for path, tensor in paths_of[id(leaf)]]
        except ShardingError as e:
            errors.append(e)
            continue
        for alternatives in zip(*of_paths, strict=True):
            options = [(name, *one) for one in alternatives for name in names_in_file(one[1].name)]
            used |= {name for name, *_ in options}
            try:
                if not options:
                    if headers.complete:
                        lacking.append(alternatives[0][1].name)
                        raise fail(f"{headers.path}: {alternatives[0][1].name!r} is missing",
                                   f"for {tree.show('params', first)}, {describe(leaf)}")  # fmt: skip
                    continue
                name, label, part, dims = options[0]
                tied = [n for other, of in (copies or {}).items() if of == part.name for n in names_in_file(other)]
                used |= set(tied)
                entry = headers.tensors[name]
                copy = headers.tensors[tied[0]] if tied else entry
                _check_entry(headers.path, entry, leaf, label, part, dims, copy)
                stored.append((entry, part))
                copied.append((copy, part))
                parts_of.setdefault(name, []).append(part)
            except ShardingError as e:
                errors.append(e)
        dtypes = [entry.dtype for entry, _ in stored if entry.dtype is not None]
        if dtypes:
            dtype = functools.reduce(torch.promote_types, dtypes)
            out[id(leaf)] = Deferred(leaf.shape, dtype, FromFile(stored, [FromFile(copied)] * (copied != stored)))
    for name, parts in parts_of.items():
        try:
            check_division(parts)
        except ShardingError as e:
            errors.append(ShardingError(f"{headers.path}: {name!r} {e}"))
            continue
        if error := rest_error(headers.path, name, parts):
            errors.append(error)
    extra = left_over(headers, used, prefix, lambda name: name.endswith(tuple(ignored)))
    errors += [unused(headers, name) for name in extra]
    if advice := explain_names(headers, "read", lacking, extra, prefix):
        errors.append(advice)
    raise_all(errors)
    return tree.map(lambda leaf: out[id(leaf)], described)


def file_tensor(verb: str, path: tree.Path, found: Any) -> FileTensor:
    """Return what `theirs` has returned for a leaf. Raises ShardingError if that is not a FileTensor."""
    if not isinstance(found, FileTensor):
        raise must_be(f"{verb}: theirs({path!r})", "a FileTensor", found)
    return found


def left_over(
    headers: WeightHeaders, used: Collection[str], prefix: str, may_be_unused: Callable[[str], bool]
) -> list[str]:
    """Return the names of tensors that no leaf uses. If all in use begin with a prefix, others are of another part."""
    in_use = {id(headers.tensors[name]) for name in used}  # an alias of a tensor has the same entry
    start = prefix if used and all(name.startswith(prefix) for name in used) else ""
    return [name for name, entry in headers.tensors.items()
            if id(entry) not in in_use and name.startswith(start) and not may_be_unused(name)]  # fmt: skip


def unused(headers: WeightHeaders, name: str, why: str = "is not part of this model", fix: str = "") -> ShardingError:
    """Return the error for a tensor in the files that no leaf uses."""
    entry = headers.tensors[name]
    return fail(f"{headers.path}: {name!r} {why}", f"{entry.dtype_name.lower()}{list(entry.shape)}", fix=fix)


def names_with(prefix: str, name: str) -> list[str]:
    """Return a name unchanged, without a prefix, and with it."""
    return list(dict.fromkeys([name, name.removeprefix(prefix), prefix + name]))


def with_dot(prefix: str) -> str:
    """Return a prefix of names with a dot at its end; `""` unchanged."""
    return prefix and prefix.rstrip(".") + "."


def rest_error(path: AnyPath, name: str, parts: Sequence[FilePart]) -> ShardingError | None:
    """Return the error for a tensor in a file, at `path`, that leaves use only partly, by these parts; else None."""
    different = list({(part.places.offset, *part.places.runs): part for part in parts}.values())
    used, total = count_elements(different), math.prod(parts[0].shape)
    if used == total:
        return None
    return fail(f"{path}: no leaf is the rest of {name!r}", f"{used} of its {total} elements are used")


def _parts(path: tree.Path, tensor: FileTensor, leaf: Deferred) -> list[tuple[str, FilePart, str | None]]:
    label = tree.show("params", path)
    try:
        return [(label, part, tensor.dims) for part in tensor.parts(leaf.shape)]
    except ShardingError as e:
        raise ShardingError(f"{label}: {e}") from e


def check_dtype(
    folder: AnyPath, entry: HeaderEntry, dtype: torch.dtype, shape: Sequence[int], label: str
) -> torch.dtype:
    """Return the dtype of a tensor in a file. Raises ShardingError unless that and `dtype` are floating, or neither."""
    if entry.dtype is None:
        raise unsupported_dtype(entry)
    if entry.dtype.is_floating_point != dtype.is_floating_point:
        raise fail(f"{folder}: {entry.name!r} has a dtype of another kind, for {label}",
                   got=format_tensor(entry.dtype, entry.shape), expected=format_tensor(dtype, shape))  # fmt: skip
    return entry.dtype


def _check_entry(
    folder: AnyPath, entry: HeaderEntry, leaf: Deferred, label: str, part: FilePart, dims: str | None, copy: HeaderEntry
) -> None:
    """Raise ShardingError unless a tensor in the file, and its copy, have the shape and dtype of a part of a leaf."""
    if entry.shape != part.shape:
        note = [] if dims is None else [f"{dims}, the leaf is {list(leaf.shape)}"]
        raise fail(f"{folder}: {entry.name!r} has another shape, for {label}", *note,
                   got=list(entry.shape), expected=list(part.shape))  # fmt: skip
    check_dtype(folder, entry, leaf.dtype, part.shape, label)
    if (copy.shape, copy.dtype_name) != (entry.shape, entry.dtype_name):
        raise fail(f"{folder}: {copy.name!r} is tied to {entry.name!r} by the config, and is another tensor",
                   got=f"{copy.dtype_name}{list(copy.shape)}",
                   expected=f"{entry.dtype_name}{list(entry.shape)}")  # fmt: skip
