"""`python -m fshard inspect`: the tensors of a path, and their placement on a mesh.

Only configs, manifests and the headers of files are read: leaves have no values, and no rank is needed.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fshard import checkpoint, models, tree
from fshard._core.files.url import AnyPath, as_path, exists
from fshard.checkpoint.commit import is_complete
from fshard.defer import defer
from fshard.errors import ShardingError, fail, join_limited, raise_all
from fshard.init import Deferred
from fshard.interop.hf import CONFIG, INDEX, PICKLES, SINGLE, read_json, tensors
from fshard.interop.hf.folder import ADAPTER, ADAPTER_CONFIG
from fshard.models.hf import model_of
from fshard.planning.show import show
from fshard.spec import P, column, fully_shard, replicated, row, rules

_MAX_DEVICES = 1 << 20
PATHS = "a Hugging Face folder, one of an adapter, a config.json, a .safetensors file, or a checkpoint"
_SPECS: dict[str, Callable[..., P]] = {"P": P, "row": row, "column": column, "replicated": replicated}


def add(commands: Any) -> None:
    """Add `inspect` to the commands of a parser."""
    command = commands.add_parser("inspect", help="print a tree: leaves, shapes, placement, source, bytes per device")
    option = command.add_argument
    option("path", metavar="PATH", help=PATHS)
    option("--step", type=int, default=None, help="of a directory of checkpoints (default: the last)")
    option("--mesh", default="", metavar="AXES", help="axis sizes: data=8,model=4")
    option("--specs", nargs="+", default=["auto"], metavar="RULE",
           help="auto (the model's specs), or rules 'GLOB=P(...)' or .json files of them: the first match")  # fmt: skip
    option("--fully-shard", default="", metavar="AXIS", help="also split every leaf over this axis")
    option("--dtype", default="", help="cast floating leaves: bfloat16 (default: as stored, or as config.json says)")
    option("--no-fold", action="store_true", help="show every layer")
    option("--raw", action="store_true", help="name tensors as the files do")
    command.set_defaults(run=lambda options: inspect(
        options.path, step=options.step, mesh=options.mesh, specs=options.specs, fully_sharded=options.fully_shard,
        dtype=options.dtype, fold=not options.no_fold, raw=options.raw))  # fmt: skip


@dataclass(frozen=True)
class Contents:
    """Described leaves, the text about their source, and the model's specs, by the axis that splits the model."""

    source: str
    tree: Any
    specs: Callable[[str | None], Any] = lambda axis: P()
    dtype: str = ""  # of the config, by which the leaves are described
    names: Any = None  # of leaves in Hugging Face's files: a model's `theirs`, for `lora.init`


def inspect(
    path: str | Path, *, step: int | None = None, mesh: str = "", specs: Sequence[str] = ("auto",),
    fully_sharded: str = "", dtype: str = "", fold: bool = True, raw: bool = False,
) -> str:  # fmt: skip
    """Return a table of the leaves at a path, below a line about their source: the text of `python -m fshard inspect`.

    Args:
        path: a Hugging Face folder, a config.json, a .safetensors file, the folder of an adapter, or a checkpoint or a
            directory of them.
        step: of a directory of checkpoints; by default the last one.
        mesh: axis sizes, `data=8,model=4`. Without it there are no bytes per device.
        specs: `auto` takes the model's specs, over the axis `model` if the mesh has it. Or rules, `GLOB=SPEC`, and
            .json files of them, as for `fs.rules`: the first match wins, and every leaf needs one.
        fully_sharded: an axis to add to every leaf, by `fs.fully_shard`.
        dtype: the dtype that floating leaves are cast to, `bfloat16`. By default leaves have the dtype of the file;
            described by a config.json only, the dtype in it.
        fold: show equal layers once.
        raw: name tensors as the files do, even if there is a model file.

    >>> print(inspect("my-gpt2/config.json", mesh="model=4"))
    my-gpt2/config.json: gpt2, as fs.models.gpt2 describes it, in its float32
    ...
    total  3,952 parameters, 15.4 KiB; 4.6 KiB on each of 4 devices (model=4)

    Raises ShardingError for a path that cannot be read, and for arguments that do not fit it.
    """
    sizes = _sizes(mesh)
    cast = _dtype(dtype)
    if fully_sharded and fully_sharded not in sizes:
        wider = ",".join(filter(None, (mesh, f"{fully_sharded}=8")))
        raise fail(f"--fully-shard {fully_sharded}: the mesh has no such axis", fix=f"--mesh {wider}")
    contents = read(path, raw=raw, step=step)
    leaves = contents.tree if cast is None else cast_leaves(contents.tree, cast)
    spec_tree: Any = None
    if list(specs) != ["auto"]:
        spec_tree = rules(_table(specs, sizes))(leaves)
    elif sizes:
        spec_tree = contents.specs("model" if "model" in sizes else None)
    if fully_sharded:
        spec_tree = fully_shard(spec_tree, leaves, axis=fully_sharded)
    table = show(leaves, specs=spec_tree, mesh=sizes or None, fold=fold)
    in_dtype = f", in its {contents.dtype}" if contents.dtype and cast is None else ""
    return f"{path}: {contents.source}{in_dtype}\n{table.text}"


# --- the leaves at a path -------------------------------------------------------------------------------------


def read(place: str | Path, *, raw: bool = False, step: int | None = None) -> Contents:
    """Describe the leaves at a path; only headers are read. Raises ShardingError if it cannot be read."""
    path = as_path(place)
    if not exists(path):
        raise fail(f"{path}: there is no such file or folder", fix=PATHS)
    if step is not None:
        return _read_checkpoint(path, step, f"its checkpoint of step {step}")
    if path.suffix == ".json" and path.is_file():
        return _read_config(path)
    if is_complete(path):
        return _read_checkpoint(path, None, "a checkpoint")
    if (step := checkpoint.latest(path)) is not None:
        return _read_checkpoint(path, step, f"its last checkpoint, step {step}")
    if not path.is_dir():
        return Contents("tensors, as the file names them", nested(tensors(path)))
    has_weights = any((path / name).is_file() for name in (SINGLE, INDEX))
    if (path / ADAPTER_CONFIG).is_file() and not has_weights:
        return _read_adapter(path)
    if not (path / CONFIG).is_file() or (not has_weights and any(f.suffix in PICKLES for f in path.iterdir())):
        return Contents("tensors, as the files name them", nested(tensors(path)))
    if not has_weights:
        return _read_config(path / CONFIG)
    config = read_json(path / CONFIG)
    kind, model = str(config.get("model_type")), None if raw else model_of(config)
    if model is None:
        return Contents(f"{kind}, as its files name the tensors", nested(tensors(path)))
    try:
        cfg, leaves = model.load(path)
    except ShardingError as e:
        raise ShardingError(f"{e}\n  (--raw shows the tensors of any folder by their names)") from e
    source = f"{kind}, its files read by {_name_of(model)}"
    has_state = model is models.resnet

    def specs(axis: str | None) -> Any:
        of_params = model.specs(cfg, model=axis)
        return {"params": of_params, "state": P()} if has_state else of_params

    return Contents(source, leaves, specs, names=getattr(model, "theirs", None))


def _read_adapter(path: AnyPath) -> Contents:
    """Describe the tensors of an adapter that `peft` saved, and its options."""
    config = read_json(path / ADAPTER_CONFIG)
    if not (path / ADAPTER).is_file():
        if pickle := next((f for f in path.iterdir() if f.suffix in PICKLES), None):
            tensors(pickle)  # raises
        raise fail(f"{path}: has {ADAPTER_CONFIG}, and no {ADAPTER}", fix="copy the folder again")
    options = [f"{name}={config[name]}" for name in ("r", "lora_alpha") if isinstance(config.get(name), int | float)]
    targets = config.get("target_modules")
    if isinstance(targets, list) and targets:
        options.append("on " + join_limited(sorted(map(str, targets)), 8))
    elif isinstance(targets, str):
        options.append(f"on {targets}")
    kind = config.get("peft_type") or "an"
    base = config.get("base_model_name_or_path") or "a model that it does not name"
    source = f"{kind} adapter of {base}{' (' * bool(options)}{', '.join(options)}{')' * bool(options)}"
    return Contents(f"{source}, as its file names the tensors", nested(tensors(path / ADAPTER)))


def _read_checkpoint(path: AnyPath, step: int | None, source: str) -> Contents:
    """Describe the leaves of a checkpoint by meta tensors, which have shapes and dtypes, and no initializer."""
    leaves: dict[str, Any] = {}
    for name, x in checkpoint.inspect(path, step=step).items():
        if not isinstance(x, checkpoint.Saved):
            leaves[name] = x
        elif x.same_as:
            leaves[name] = leaves[x.same_as]
        else:
            leaves[name] = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return Contents(source, nested(leaves))


def _read_config(path: AnyPath) -> Contents:
    """Describe a model by the model file of its type, or else by its constructor in transformers."""
    config = read_json(path)
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise fail(f"{path}: it has no model_type", fix="give the config.json of a Hugging Face model")
    name = config.get("dtype") or config.get("torch_dtype") or ""
    dtype = getattr(torch, str(name), None)
    if name and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise fail(f"{path}: dtype {name!r} is not a floating dtype of torch", fix="float32, bfloat16, float16")
    model = model_of(config)
    if model is None or path.name != CONFIG:
        return _read_constructor(path, kind, config, dtype)
    cfg = model.config(path.parent)
    leaves = model.init(cfg) if dtype is None else cast_leaves(model.init(cfg), dtype)
    source = f"{kind}, as {_name_of(model)} describes it"
    names = getattr(model, "theirs", None)
    return Contents(source, leaves, lambda axis: model.specs(cfg, model=axis), name, names)


def _name_of(model: ModuleType) -> str:
    return f"fs.models.{model.__name__.rpartition('.')[2]}"


def _read_constructor(path: AnyPath, kind: str, config: dict[str, Any], dtype: torch.dtype | None) -> Contents:
    """Describe a model by its constructor in transformers, which runs without values.

    Only parameters are cast: a buffer, such as rotary frequencies, may keep its dtype.
    """
    try:
        import transformers
    except ImportError as e:
        raise fail(f"{path}: there is no model file for {kind!r}, and transformers is not installed",
                   fix="pip install transformers", models=", ".join(models.ARCHITECTURES)) from e  # fmt: skip
    try:
        hf_config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False)
    except Exception as e:  # each class of configs has other checks
        raise fail(f"{path}: transformers cannot read it", _first_line(e), model_type=kind) from e
    names = config.get("architectures")
    classes = [getattr(transformers, str(name), None) for name in names or ()] if isinstance(names, list) else []
    usable = [c for c in classes if isinstance(c, type) and issubclass(c, transformers.PreTrainedModel)]
    make = usable[0] if usable else transformers.AutoModel.from_config
    return describe(path, lambda: make(hf_config), usable[0].__name__ if usable else kind, dtype, model_type=kind)


def describe(
    label: object, make: Callable[[], Any], name: str, dtype: torch.dtype | None = None, **facts: str
) -> Contents:
    """Describe a model by its constructor in transformers, which runs without values."""
    try:
        _, leaves = defer(make)
    except ShardingError:
        raise
    except Exception as e:
        raise fail(f"{label}: its constructor in transformers fails", _first_line(e), **facts) from e
    source = f"{name}, as its constructor in transformers describes it"
    params = leaves["params"] if dtype is None else cast_leaves(leaves["params"], dtype)
    groups = {"params": params, "buffers": leaves["buffers"]}
    shown = "" if dtype is None else str(dtype).removeprefix("torch.")
    return Contents(source, {group: nested(flat) for group, flat in groups.items() if flat}, dtype=shown)


def _first_line(e: Exception) -> str:
    """Return the type of an error, and the first line of its message."""
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0]}" if lines else type(e).__name__


def nested(flat: dict[str, Any]) -> Any:
    """Turn dotted names into nested dicts, so that equal layers are shown once.

    Returns `flat` itself if a leaf would be inside another.

    >>> nested({"h.0.w": 1, "h.0.b": 2})
    {'h': {'0': {'w': 1, 'b': 2}}}
    """
    out: dict[str, Any] = {}
    for name, x in flat.items():
        *parents, last = name.split(".")
        node = out
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                return flat
        if last in node:
            return flat
        node[last] = x
    return out


def cast_leaves(leaves: Any, dtype: torch.dtype) -> Any:
    """Cast floating leaves to another dtype; a tie stays one leaf."""
    cast: dict[int, Any] = {}

    def one(x: Any) -> Any:
        if not isinstance(x, (Deferred, torch.Tensor)) or not x.dtype.is_floating_point:
            return x
        return cast.setdefault(id(x), x.to(dtype))

    return tree.map(one, leaves)


# --- the options of the command line --------------------------------------------------------------------------


def _sizes(text: str) -> dict[str, int]:
    """Parse `data=8,model=4` as axis sizes."""
    sizes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        axis, _, n = part.strip().partition("=")
        if not axis.isidentifier() or not n.isdecimal() or int(n) < 1 or axis in sizes:
            problem = "the axis has a size already" if axis in sizes else "an axis is a name, and its size 1 or more"
            raise fail(f"--mesh {text}: {part!r} is not an axis of a mesh", problem, fix="--mesh data=8,model=4")
        sizes[axis] = int(n) if len(n) < 10 else _MAX_DEVICES + 1
    if math.prod(sizes.values()) > _MAX_DEVICES:
        raise fail(f"--mesh {text}: more than {_MAX_DEVICES:,} devices", "the bytes of each of them are counted",
                   fix="a smaller mesh")  # fmt: skip
    return sizes


def _dtype(name: str) -> torch.dtype | None:
    dtype = getattr(torch, name, None) if name else None
    if name and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise fail(f"--dtype {name}: not a floating dtype of torch", fix="--dtype bfloat16")
    return dtype


def _table(texts: Sequence[str], sizes: dict[str, int]) -> dict[str, P]:
    """Parse the rules of `--specs`, in order."""
    table: dict[str, P] = {}
    for text in texts:
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
                fix="""only auto; GLOB=SPEC, such as '**.w=P(None, "model")'; or a .json file of them""",
            )
        table[glob.strip()] = spec_of(spec)
    raise_all([fail(f"--specs {glob}={spec}: the mesh has no axis {axis!r}", fix=f"use one of {list(sizes)}")
               for glob, spec in table.items() for axis in spec.axes if sizes and axis not in sizes])  # fmt: skip
    return table


def spec_of(value: Any) -> P:
    """Parse a spec from text, `P(None, "model")` or `column("model")`, or from a JSON list, [null, ["data", "model"]].

    Text is parsed and never run.

    >>> spec_of('P(None, ("data", "model"))'), spec_of([None, "model"]), spec_of('column("model")')
    (P(None, ('data', 'model')), P(None, 'model'), P(..., 'model'))

    Raises ShardingError for anything else.
    """
    if isinstance(value, list):
        return P(*(tuple(entry) if isinstance(entry, list) else entry for entry in value))
    try:
        call = ast.parse(str(value).strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError
        keywords = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
        return _SPECS[call.func.id](*(ast.literal_eval(arg) for arg in call.args), **keywords)
    except ShardingError:
        raise
    except (ValueError, SyntaxError, KeyError, TypeError, RecursionError) as e:
        fix = """P(None, "model"), P("data", memory="host"), row("model"), column("model") or P()"""
        raise fail(f"{value!r} is not a spec", fix=fix) from e
