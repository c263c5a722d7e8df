"""The train step of a model file as one would write it, with described arguments: for plans of any layout.

Parameters and AdamW's moments are float32, and split over `data` and `context` (FSDP) and `model`; weights are gathered
and computed with in bfloat16, and gradients summed in float32. Without dropout.

Legend: B examples of a step, T time, C channels, L labels; [B@data] is a dim split over an axis.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fshard import init as initial
from fshard import models, optim
from fshard.errors import fail
from fshard.grad import accumulate as accumulated
from fshard.grad import value_and_grad
from fshard.interop.hf import CONFIG, config_path, read_json
from fshard.mesh import make_mesh
from fshard.models.hf import model_of
from fshard.models.transformer import Layout
from fshard.schedule import on_stages
from fshard.schedule.tables import Kind
from fshard.shard_map import ShardMapped, shard_map
from fshard.spec import P, fully_shard

from .module_model import ModuleModel

AXES = ("stage", "replica", "data", "context", "model")  # of a mesh, the nearest ranks last
_LENGTHS = ("n_positions", "max_position_embeddings")  # fields of configs: the longest sequence
_BLOCKS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")  # and numbers of blocks
_MOST_TOKENS, _SIDE = 8192, 224  # by default: of a sequence, and of an image


@dataclass(frozen=True)
class Job:
    """A model of `fs.models`, or another class of transformers, and the size of its examples.

    `length` is in tokens, or in pixels of an image's side.
    """

    model: ModuleType | ModuleModel
    cfg: Any
    length: int

    @property
    def name(self) -> str:
        """Return the name of the model file, or of the class."""
        return self.model.__name__.rpartition(".")[2]

    @property
    def source(self) -> str:
        """Return where the model is from, for the head of a table."""
        return f"fs.models.{self.name}" if self.splits_weights else f"by fs.defer of {self.name}"

    @property
    def unit(self) -> str:
        """Return the plural of what a step trains on, for rates."""
        return "images" if self.model is models.resnet else "tokens"

    def units(self, batch: int) -> int:
        """Return the number of units in a batch; a T5 counts tokens of both sources and targets."""
        return batch * (1 if self.model is models.resnet else self.length * (1 + (self.model is models.t5)))

    @property
    def splits_positions(self) -> bool:
        """True if the model has a form for an axis that splits the positions."""
        return self.splits_weights and self.model not in (models.resnet, models.t5, models.heads)

    @property
    def splits_weights(self) -> bool:
        """True if the model has a form for an axis that splits heads, hidden units and the vocabulary."""
        return not isinstance(self.model, ModuleModel)

    @property
    def splits_blocks(self) -> bool:
        """True if the model has a form for blocks on several stages."""
        return models.stages.model_on_stages(self.cfg) is not None

    @property
    def experts(self) -> int:
        """Return the number of experts of a block."""
        return int(self.cfg.experts.number) if hasattr(self.cfg, "experts") else 0

    @property
    def blocks(self) -> int | None:
        """Return the number of blocks, if a model with fewer of them has the same blocks; else None."""
        base = _base(self.cfg)
        counts = {getattr(base, name) for name in _BLOCKS if getattr(base, name, None) is not None}
        alike = self.splits_weights and len(counts) == 1 and len(set(getattr(base, "windows", ()))) < 2
        return counts.pop() if alike else None

    def with_blocks(self, n: int) -> Job:
        """Return the same model with `n` blocks."""
        base = _base(self.cfg)
        fewer: dict[str, Any] = {name: n for name in _BLOCKS if getattr(base, name, None) is not None}
        if getattr(base, "layer_types", None) is not None:
            fewer["layer_types"] = base.layer_types[:1] * n
        base = dataclasses.replace(base, **fewer)
        has_base = self.model is models.heads
        return dataclasses.replace(self, cfg=dataclasses.replace(self.cfg, base=base) if has_base else base)


def read_job(path: str | Path, length: int | None = None) -> Job:
    """Read the model of a Hugging Face folder, or of a config under any name ending in .json.

    Raises ShardingError for one that is neither of a model file nor of a class of transformers with scores of tokens.
    """
    config = Path(str(config_path(path)))
    if not config.is_file():
        found = "its name does not end in .json" if Path(path).is_file() else "there is no such folder or file"
        what = f"there is no {CONFIG}" if Path(path).is_dir() else found
        raise fail(f"plan: {path}: {what}", fix="a Hugging Face folder, or a config under a name that ends in .json")
    contents = read_json(config)
    model = model_of(contents) or ModuleModel(contents, str(config))
    cfg = model.cfg if isinstance(model, ModuleModel) else model.config(path)
    if model is models.resnet:
        return Job(model, cfg, length or _SIDE)
    longest = next((getattr(_base(cfg), name) for name in _LENGTHS if hasattr(_base(cfg), name)), 512)
    return Job(model, cfg, length or min(longest, _MOST_TOKENS))


def _base(cfg: Any) -> Any:
    """Return the config of the blocks: a model with a head for classes has it in its base."""
    return cfg.base if isinstance(cfg, models.heads.Config) else cfg


def train_step(
    job: Job, *, stage: int = 1, replica: int = 1, data: int = 1, context: int = 1, model: int = 1, batch: int,
    accumulate: int = 1, schedule: Kind = "1f1b", chunks: int = 1, remat: bool = False, sequence: bool = True,
    experts: bool = False, release: bool = True, prefetch: int = 1, dtype: torch.dtype = torch.bfloat16,
) -> tuple[ShardMapped, tuple[Any, ...]]:  # fmt: skip
    """Return a train step with AdamW on an abstract mesh, and its described arguments: (state, *batch) -> state, loss.

    Args:
        stage, replica, data, context, model: axis sizes. Each of `replica` groups has all parameters (DDP), split over
            `data` and `context` (FSDP), and heads, hidden units and the vocabulary over `model`; positions over
            `context`, and blocks over `stage`.
        batch: examples of a step on all ranks, in `accumulate` microbatches.
        schedule, chunks: of the stages, as for `fs.pipelined`.
        remat: recompute blocks in backward.
        sequence: split the residual stream along time over `model`.
        experts: split experts by expert over `data` and `context`; tokens go to them.
        release: free gathered weights between forward and backward.
        prefetch: blocks to gather ahead.
        dtype: to compute with.

    Raises ShardingError for a layout that does not fit the model.
    """
    for setting, fits in ((f"context={context}", job.splits_positions or context == 1),
                          (f"stage={stage}", job.splits_blocks or stage == 1),
                          (f"model={model}", job.splits_weights or model == 1),
                          (f"experts={experts}", job.experts or not experts)):  # fmt: skip
        if not fits:
            raise fail(f"plan: {setting}: {job.name} has no form for it", fix="leave it out")
    names = dict(zip(AXES, (stage, replica, data, context, model), strict=True))
    sizes: dict[str, Any] = {a: n for a, n in names.items() if n > 1 or a == "data"}
    mesh = make_mesh(kind="abstract", **sizes)
    axes, sharded = (tuple(a for a in some if a in mesh.axes) for some in (AXES[1:3], AXES[2:4]))
    over, positions = (a if a in mesh.axes else None for a in ("model", "context"))
    by_expert: dict[str, Any] = {"experts": sharded} if experts else {}
    module: Any = job.model
    cfg, buffers = job.cfg, {"buffers": module.buffers} if isinstance(module, ModuleModel) else {}
    described = module.init(cfg)
    specs = fully_shard(module.specs(cfg, model=over, **by_expert), described, axis=sharded)
    if stage > 1:
        specs["h"] = on_stages(specs["h"], described["h"], "stage", stage, chunks=chunks)
    casts: dict[str, Any] = {} if dtype == torch.float32 else {"dtype": dtype, "reduce_dtype": torch.float32}
    options: dict[str, Any] = {"specs": specs, "remat": remat}
    args: tuple[Any, ...]
    if module is models.resnet:
        options["layout"] = models.resnet.Layout(axes, over, release=release, prefetch=prefetch, **casts)
        shape = (batch, cfg.num_channels, job.length, job.length)  # [B@data, C, H, W]
        args = (initial.zeros(shape), _integers(batch))
    else:
        options["layout"] = Layout(axes, over, sequence and model > 1, release=release, prefetch=prefetch,
                                   context=positions, stage="stage" if stage > 1 else None, **by_expert,
                                   **casts)  # fmt: skip
        classes = module is models.heads and cfg.task == "sequence"
        args = (_integers(batch, job.length), _integers(batch) if classes else _integers(batch, job.length))
    adamw = optim.adamw(1e-4)
    state = {"params": described, "opt": adamw.init(described), **buffers}
    state_specs = {"params": specs, "opt": adamw.specs(specs), **dict.fromkeys(buffers, P())}
    has_aux = module is models.resnet
    if has_aux:
        state, state_specs = {**state, "norms": module.state(cfg)}, {**state_specs, "norms": P()}
    if has_aux and accumulate > 1:
        raise fail(f"plan: accumulate={accumulate} of a {job.name}", "the statistics of its norms need the full batch",
                   fix="accumulate=1")  # fmt: skip

    def step(state: Any, *batch: Tensor) -> Any:
        def loss(params: Any, *args: Any) -> Any:
            return module.loss(cfg, params, *args, **{name: state[name] for name in buffers}, **options)

        gradient = value_and_grad(loss, has_aux=has_aux)
        if stage > 1:
            how: dict[str, Any] = {"microbatches": accumulate, "schedule": schedule, "chunks": chunks, **options}
            gradient = models.stages.pipelined(cfg, **how)
        elif accumulate > 1:
            gradient = accumulated(loss, accumulate, has_aux=has_aux)
        more = (state["norms"],) if has_aux else ()
        value, grads = gradient(state["params"], *more, *batch)
        params, opt = adamw.update(grads, state["opt"], state["params"])
        new = {**state, "params": params, "opt": opt}
        return ({**new, "norms": value[1]}, value[0]) if has_aux else (new, value)

    tokens = P(axes) if positions is None else P(axes, positions)
    in_specs = (state_specs, *[tokens] * len(args))
    f = shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=(state_specs, P()), donate=0)
    return f, (state, *args)


def _integers(*shape: int) -> Any:
    return initial.zeros(shape, dtype=torch.int64)
