"""What a checkpoint, a folder of weights or a config describes, and how it would lie on a mesh: `inspect`.

Only configs, manifests and the headers of files are read: nothing has values here, and no rank is needed.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import checkpoint, models, tree
from .checkpoint.manifest import MANIFEST
from .errors import ShardingError, fail, raise_all
from .hf import model_of
from .init import Deferred
from .interop.defer import defer
from .interop.hf import CONFIG, INDEX, PICKLES, SINGLE, read_json, tensors
from .show.table import show
from .spec import P, column, fully_shard, replicated, row, rules

_MOST_DEVICES = 1 << 20
_FIX = "a Hugging Face folder, a config.json, a .safetensors file, or a checkpoint"
_WORDS: dict[str, Callable[..., P]] = {"P": P, "row": row, "column": column, "replicated": replicated}


@dataclass(frozen=True)
class Described:
    """A tree of described leaves, what describes it, and its own specs, given the axis that splits the model."""

    source: str
    tree: Any
    specs: Callable[[str | None], Any]


def inspect(
    path: str | Path, *, mesh: str = "", specs: Sequence[str] = ("auto",), fully_sharded: str = "", dtype: str = "",
    fold: bool = True, raw: bool = False,
) -> str:  # fmt: skip
    """The tree as a table, below a line that says what describes it: the text of `python -m fshard inspect`.

    Args:
        path: a Hugging Face folder, a config.json, a .safetensors file, or a checkpoint or a directory of them.
        mesh: axis sizes, `data=8,model=4`. Without it there are no bytes per device.
        specs: `auto` is the model's own, over the axis `model` if the mesh has it. Or rules, `GLOB=SPEC`, and .json
            files of them, as for `fs.rules`: the first match wins, and every leaf needs one.
        fully_sharded: an axis to add to every leaf, by `fs.fully_shard`.
        dtype: what floating leaves are cast to, `bfloat16`.
        fold: show equal neighbours once.
        raw: name tensors as the files do, also where there is a model file.

    >>> print(inspect("my-gpt2/config.json", mesh="model=4"))
    my-gpt2/config.json: gpt2, as fs.models.gpt2 describes it
    ...
    total  3,952 parameters, 15.4 KiB; 4.6 KiB on each of 4 devices (model=4)

    Raises ShardingError for what cannot be read or does not fit.
    """
    sizes = _sizes(mesh)
    cast = _dtype(dtype)
    if fully_sharded and fully_sharded not in sizes:
        wider = ",".join(filter(None, (mesh, f"{fully_sharded}=8")))
        raise fail(f"--fully-shard {fully_sharded}: the mesh has no such axis", fix=f"--mesh {wider}")
    found = described(path, raw=raw)
    leaves = found.tree if cast is None else _cast(found.tree, cast)
    spec_tree: Any = None
    if list(specs) != ["auto"]:
        spec_tree = rules(_table(specs, sizes))(leaves)
    elif sizes:
        spec_tree = found.specs("model" if "model" in sizes else None)
    if fully_sharded:
        spec_tree = fully_shard(spec_tree, leaves, axis=fully_sharded)
    table = show(leaves, specs=spec_tree, mesh=sizes or None, fold=fold)
    return f"{path}: {found.source}\n{table.text}"


# --- what is described ----------------------------------------------------------------------------------------


def described(path: str | Path, *, raw: bool = False) -> Described:
    """What is at `path`; only headers are read. Raises ShardingError where there is nothing that can be read."""
    path = Path(path)
    if not path.exists():
        raise fail(f"{path}: there is no such file or folder", fix=_FIX)
    if path.suffix == ".json" and path.is_file():
        return _of_config(path)
    step = None if (path / MANIFEST).is_file() else checkpoint.latest(path)
    if step is not None or (path / MANIFEST).is_file():
        return _of_checkpoint(path, step)
    if not path.is_dir():
        return Described("tensors, as the file names them", nested(tensors(path)), _replicated)
    weights = any((path / name).is_file() for name in (SINGLE, INDEX))
    if not (path / CONFIG).is_file() or (not weights and any(f.suffix in PICKLES for f in path.iterdir())):
        return Described("tensors, as the files name them", nested(tensors(path)), _replicated)
    if not weights:
        return _of_config(path / CONFIG)
    kind = str(read_json(path / CONFIG).get("model_type"))
    model = None if raw else model_of(kind)
    if model is None:
        return Described(f"{kind}, as its files name the tensors", nested(tensors(path)), _replicated)
    try:
        cfg, leaves = model.load(path)
    except ShardingError as e:
        raise ShardingError(f"{e}\n  (--raw shows the tensors of any folder by their names)") from e
    return Described(f"{kind}, its files read by fs.models.{kind}", leaves, lambda axis: model.specs(cfg, model=axis))


def _of_checkpoint(path: Path, step: int | None) -> Described:
    """Leaves as meta tensors: of shapes and dtypes, and no initializer."""
    saved = checkpoint.inspect(path, step=step)
    made: dict[str, Any] = {}
    for name, x in saved.items():
        tied = isinstance(x, checkpoint.Saved) and x.same_as
        made[name] = made[tied] if tied else (
            torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, checkpoint.Saved) else x)  # fmt: skip
    what = "a checkpoint" if step is None else f"its last checkpoint, step {step}"
    return Described(what, nested(made), _replicated)


def _of_config(path: Path) -> Described:
    """By the model file of its type, or else by its constructor in transformers."""
    given = read_json(path)
    kind = given.get("model_type")
    if not isinstance(kind, str):
        raise fail(f"{path}: it has no model_type", fix="give the config.json of a Hugging Face model")
    model = model_of(kind)
    if model is None or path.name != CONFIG:
        return _of_constructor(path, kind, given)
    cfg = model.config(path.parent)
    what = f"{kind}, as fs.models.{kind} describes it"
    return Described(what, model.init(cfg), lambda axis: model.specs(cfg, model=axis))


def _of_constructor(path: Path, kind: str, given: dict[str, Any]) -> Described:
    try:
        import transformers
    except ImportError as e:
        raise fail(f"{path}: there is no model file for {kind!r}, and transformers is not installed",
                   fix="pip install transformers", models=", ".join(models.__all__)) from e  # fmt: skip
    try:
        config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as e:  # each class of configs checks them in its own way
        raise fail(f"{path}: transformers cannot read it", _first(e), model_type=kind) from e
    named = given.get("architectures")
    classes = [getattr(transformers, str(name), None) for name in named or ()] if isinstance(named, list) else []
    found = [c for c in classes if isinstance(c, type) and issubclass(c, transformers.PreTrainedModel)]
    make = found[0] if found else transformers.AutoModel.from_config
    try:
        _, leaves = defer(lambda: make(config))
    except ShardingError:
        raise
    except Exception as e:
        raise fail(f"{path}: its constructor in transformers fails", _first(e), model_type=kind) from e
    what = f"{found[0].__name__ if found else kind}, as its constructor in transformers describes it"
    return Described(what, {key: nested(flat) for key, flat in leaves.items() if flat}, _replicated)


def _first(e: Exception) -> str:
    """What kind of error it is, and the first line it says."""
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0]}" if lines else type(e).__name__


def _replicated(axis: str | None) -> P:
    return P()


def nested(flat: dict[str, Any]) -> Any:
    """Dotted names as nested dicts, so that equal layers can be shown once; as they are, if a leaf is inside another.

    >>> nested({"h.0.w": 1, "h.0.b": 2})
    {'h': {'0': {'w': 1, 'b': 2}}}
    """
    out: dict[str, Any] = {}
    for name, x in flat.items():
        *parents, last = name.split(".")
        at = out
        for part in parents:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                return flat
        if last in at:
            return flat
        at[last] = x
    return out


def _cast(leaves: Any, dtype: torch.dtype) -> Any:
    """Floating leaves in another dtype; a tie stays one leaf."""
    made: dict[int, Any] = {}

    def one(x: Any) -> Any:
        if not isinstance(x, (Deferred, torch.Tensor)) or not x.dtype.is_floating_point:
            return x
        return made.setdefault(id(x), x.to(dtype))

    return tree.map(one, leaves)


# --- the words of the command line ----------------------------------------------------------------------------


def _sizes(text: str) -> dict[str, int]:
    """`data=8,model=4` as axis sizes."""
    sizes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        axis, _, n = part.strip().partition("=")
        if not axis.isidentifier() or not n.isdecimal() or int(n) < 1 or axis in sizes:
            why = "it is there already" if axis in sizes else "an axis is a name, and its size 1 or more"
            raise fail(f"--mesh {text}: {part!r} is no axis of a mesh", why, fix="--mesh data=8,model=4")
        sizes[axis] = int(n) if len(n) < 10 else _MOST_DEVICES + 1
    if math.prod(sizes.values()) > _MOST_DEVICES:
        raise fail(f"--mesh {text}: more than {_MOST_DEVICES:,} devices", "what each of them holds is counted",
                   fix="a smaller mesh")  # fmt: skip
    return sizes


def _dtype(name: str) -> torch.dtype | None:
    found = getattr(torch, name, None) if name else None
    if name and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise fail(f"--dtype {name}: not a floating dtype of torch", fix="--dtype bfloat16")
    return found


def _table(given: Sequence[str], sizes: dict[str, int]) -> dict[str, P]:
    """The rules of `--specs`, in order."""
    table: dict[str, P] = {}
    for text in given:
        if text.endswith(".json"):
            path = Path(text)
            if not path.is_file():
                raise fail(f"--specs {text}: there is no such file")
            table |= {glob: spec_of(spec) for glob, spec in read_json(path).items()}
            continue
        glob, equals, spec = text.partition("=")
        if not equals:
            raise fail(
                f"--specs {text}: not a rule",
                fix="""auto alone; GLOB=SPEC, such as '**.w=P(None, "model")'; or a .json file of them""",
            )
        table[glob.strip()] = spec_of(spec)
    raise_all([fail(f"--specs {glob}={spec}: the mesh has no axis {axis!r}", fix=f"use one of {list(sizes)}")
               for glob, spec in table.items() for axis in spec.axes if sizes and axis not in sizes])  # fmt: skip
    return table


def spec_of(given: Any) -> P:
    """A spec from text, `P(None, "model")` or `column("model")`, or from a JSON list, [null, ["data", "model"]].

    Text is read and never run.

    >>> spec_of('P(None, ("data", "model"))'), spec_of([None, "model"]), spec_of('column("model")')
    (P(None, ('data', 'model')), P(None, 'model'), P(..., 'model'))

    Raises ShardingError for anything else.
    """
    if isinstance(given, list):
        return P(*(tuple(entry) if isinstance(entry, list) else entry for entry in given))
    try:
        call = ast.parse(str(given).strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        named = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return _WORDS[call.func.id](*(ast.literal_eval(arg) for arg in call.args), **named)
    except ShardingError:
        raise
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError) as e:
        words = """P(None, "model"), P("data", memory="host"), row("model"), column("model") or P()"""
        raise fail(f"{given!r} is not a spec", fix=words) from e


__all__ = ["Described", "described", "inspect", "nested", "spec_of"]
