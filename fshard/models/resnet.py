"""ResNet as pure functions: an image classifier whose batch statistics are of all ranks, and whose classes are split.

Legend: B batch, D channels of the features, C classes; [B@data] is a dim split over an axis; {V} varies over it, {I}
does not. Source: He et al., 2015, "Deep residual learning"; weights as in Hugging Face `ResNetForImageClassification`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard import init as initial
from fshard import nn, tree
from fshard._core.files.io import StrPath
from fshard._core.ops import own_range
from fshard._core.region import region
from fshard.collectives import all_gather, pvary
from fshard.errors import checked, fail, raise_all
from fshard.interop.hf import FileTensor, WeightHeaders, config_of, config_path, write
from fshard.nn.decoding import global_batch
from fshard.schedule import scan
from fshard.schedule.options import BackwardPrefetch, Release
from fshard.schedule.unshard import make_whole
from fshard.spec import Axis, P, describe, is_spec, names_of, part_lengths

from .activations import ACTIVATIONS, activation_errors
from .hf_files import ModelFile, file_functions
from .transformer import check_params, shapes_of, spec_of

DEPTHS: Mapping[int, tuple[Literal["basic", "bottleneck"], tuple[int, ...]]] = {
    18: ("basic", (2, 2, 2, 2)), 34: ("basic", (3, 4, 6, 3)), 50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)), 152: ("bottleneck", (3, 8, 36, 3)),
}  # fmt: skip
_REDUCTION = 4  # of the channels inside a bottleneck


@checked
@dataclass(frozen=True)
class Config:
    """Sizes named as in Hugging Face's `ResNetConfig`, the number of classes, and the stem.

    `num_labels` 0 is a model without a head, as `load` finds it in a folder without one. The stem "imagenet" is a
    convolution of 7x7 with stride 2 and a max pool, "cifar" one of 3x3 that keeps the size, for small images. A stage
    after the first halves height and width in the first 3x3 convolution of its first block, or with
    `downsample_in_bottleneck` in the 1x1 before it. `hidden_act` is the activation after the stem and after each block;
    inside blocks it is relu.

    >>> Config.of(50, num_labels=1_000_000).hidden_sizes
    (256, 512, 1024, 2048)
    """

    num_channels: int = 3
    embedding_size: int = 64
    hidden_sizes: tuple[int, ...] = (256, 512, 1024, 2048)
    depths: tuple[int, ...] = (3, 4, 6, 3)
    layer_type: Literal["basic", "bottleneck"] = "bottleneck"
    hidden_act: str = "relu"
    downsample_in_first_stage: bool = False
    downsample_in_bottleneck: bool = False
    num_labels: int = 1000
    stem: Literal["imagenet", "cifar"] = "imagenet"

    def __post_init__(self) -> None:
        errors = [fail(f"resnet.Config: {name}={n}", fix="1 or more, less than 2147483648")
                  for name, n in (("num_channels", self.num_channels), ("embedding_size", self.embedding_size))
                  if not 1 <= n < 2**31]  # fmt: skip
        if not 0 <= self.num_labels < 2**31:
            errors.append(fail(f"resnet.Config: num_labels={self.num_labels}", fix="0 or more, less than 2147483648"))
        if len(self.hidden_sizes) != len(self.depths) or not self.depths or min(*self.hidden_sizes, *self.depths) < 1:
            errors.append(fail("resnet.Config: every stage has a number of channels and of blocks, each 1 or more",
                               hidden_sizes=self.hidden_sizes, depths=self.depths))  # fmt: skip
        if self.layer_type == "bottleneck" and any(n < _REDUCTION for n in self.hidden_sizes):
            errors.append(fail(f"resnet.Config: hidden_sizes={self.hidden_sizes}",
                               f"a bottleneck has 1 of {_REDUCTION} channels inside",
                               fix=f"{_REDUCTION} or more"))  # fmt: skip
        if self.downsample_in_bottleneck and self.layer_type == "basic":
            errors.append(fail("resnet.Config: downsample_in_bottleneck=True with basic blocks, which have none",
                               fix='False, or layer_type="bottleneck"'))  # fmt: skip
        raise_all([*errors, *activation_errors("resnet.Config", "hidden_act", self.hidden_act)])

    @staticmethod
    def of(layers: Literal[18, 34, 50, 101, 152], **fields: Any) -> Config:
        """Return the config of the ResNet with this number of layers; `fields` replace some of it.

        >>> Config.of(18, num_channels=1, num_labels=2177, stem="cifar").layer_type
        'basic'
        """
        if layers not in DEPTHS:
            raise fail(f"resnet.Config.of: layers={layers!r}", fix=f"one of {', '.join(map(str, DEPTHS))}")
        kind, depths = DEPTHS[layers]
        sizes = (64, 128, 256, 512) if kind == "basic" else (256, 512, 1024, 2048)
        return Config(**{"hidden_sizes": sizes, "depths": depths, "layer_type": kind, **fields})


@checked
@dataclass(frozen=True)
class Layout:
    """The mesh axes each part is split over; `None` leaves it whole.

    `data`: the batch. `model`: the classes of the head; it may have axes of `data`, over which the features and the
    targets are then gathered first. `dtype`: the dtype that convolutions and the head compute with (norms keep theirs,
    and their statistics are float32 or better), and `reduce_dtype`: the dtype their gradients are summed over `data`
    with; by default the dtype they are stored in. `examples`: the number of images on all ranks, needed only in a
    compiled program that has an uneven dim anywhere and gathers features; elsewhere the ranks exchange it. `release`,
    `prefetch` and `backward_prefetch`: when the convolutions of the stem and of each block are gathered and freed; see
    `scan`. The norms are gathered at once, before the stem, and kept.

    >>> Layout(("replica", "data"), ("data", "model")).batch
    ('replica',)
    """

    data: Axis = None
    model: Axis = None
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    examples: int | None = None
    release: Release = True
    prefetch: int = 1
    backward_prefetch: BackwardPrefetch = None

    def __post_init__(self) -> None:
        data, gathered = names_of(self.data), self.gathered
        if data[len(data) - len(gathered) :] != gathered:
            raise fail(f"resnet.Layout: data={self.data!r}, model={self.model!r}: the head has an axis of the batch "
                       "that other axes split again", fix="let the last axes of data be the head's")  # fmt: skip

    @property
    def gathered(self) -> tuple[str, ...]:
        """The axes over which the features are gathered for the head."""
        return tuple(a for a in names_of(self.data) if a in names_of(self.model))

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes that split the batch of the head: `over=` of its loss."""
        return tuple(a for a in names_of(self.data) if a not in names_of(self.model))

    def gathered_size(self, n: int) -> int:
        """Return the number of images after the gather, of which this rank has `n`."""
        if self.examples is None:
            return global_batch("resnet", n, self.gathered, word="Layout(examples=)")
        if own_range("resnet", self.examples, self.data)[1] != n:
            sizes = [region().sizes[a] for a in names_of(self.data)]
            raise fail(f"resnet: Layout(examples={self.examples}), and this rank has {n} images",
                       f"{self.examples} over {self.data!r} splits into {part_lengths(self.examples, sizes)}",
                       fix="the number of images on all ranks")  # fmt: skip
        return own_range("resnet", self.examples, self.batch)[1]


ONE_DEVICE = Layout()


class _Convolution(NamedTuple):
    """A convolution of a block, which a norm follows."""

    inputs: int
    outputs: int
    kernel: int
    stride: int = 1


def _block(cfg: Config, stage: int, i: int) -> dict[str, _Convolution]:
    """Return the convolutions of block `i` of a stage: "1" to "3" in order, and "skip" if sizes differ."""
    outputs = cfg.hidden_sizes[stage]
    before = cfg.embedding_size if stage == 0 else cfg.hidden_sizes[stage - 1]
    inputs, stride = (outputs, 1) if i else (before, 2 if stage or cfg.downsample_in_first_stage else 1)
    if cfg.layer_type == "basic":
        out = {"1": _Convolution(inputs, outputs, 3, stride), "2": _Convolution(outputs, outputs, 3)}
    else:
        inner, first = outputs // _REDUCTION, cfg.downsample_in_bottleneck
        out = {"1": _Convolution(inputs, inner, 1, stride if first else 1),
               "2": _Convolution(inner, inner, 3, 1 if first else stride),
               "3": _Convolution(inner, outputs, 1)}  # fmt: skip
    return out if inputs == outputs and stride == 1 else {**out, "skip": _Convolution(inputs, outputs, 1, stride)}


def _stages(cfg: Config, part: Callable[[dict[str, _Convolution]], Any]) -> dict[str, Any]:
    """Return a tree of the stem and the blocks of each stage, made in this order from their convolutions."""
    kernel, stride = (7, 2) if cfg.stem == "imagenet" else (3, 1)
    stem = part({"1": _Convolution(cfg.num_channels, cfg.embedding_size, kernel, stride)})
    return {"stem": stem, "stages": [[part(_block(cfg, k, i)) for i in range(n)] for k, n in enumerate(cfg.depths)]}


def _in_order(x: Mapping[str, Any]) -> list[Any]:
    """Return the parts of such a tree in the order of the program: the stem, then each block."""
    return [x["stem"], *(block for stage in x["stages"] for block in stage)]


@checked
def init(cfg: Config) -> Any:
    """Return the described parameters: convolutions He-normal by fan out, norms 1 and 0, the head as torch's Linear.

    >>> init(Config.of(50))["fc"]["w"]
    f32[1000, 2048] = uniform(low=-0.0221, high=0.0221)
    """

    def convolution(c: _Convolution) -> Any:
        shape = (c.outputs, c.inputs, c.kernel, c.kernel)
        return {"w": initial.kaiming_normal(shape, mode="fan_out", nonlinearity="relu", in_dim=1, out_dim=0)}

    def layers(block: dict[str, _Convolution]) -> Any:
        return {key: part for n, c in block.items() for key, part in (
            (f"conv_{n}", convolution(c)), (f"norm_{n}", {"w": initial.ones(c.outputs), "b": initial.zeros(c.outputs)}),
        )}  # fmt: skip

    params = _stages(cfg, layers)
    if not cfg.num_labels:
        return params
    d = cfg.hidden_sizes[-1]
    bound = 1 / math.sqrt(d)
    return {**params, "fc": {"w": initial.uniform((cfg.num_labels, d), low=-bound, high=bound),
                             "b": initial.uniform((cfg.num_labels,), low=-bound, high=bound)}}  # fmt: skip


@checked
def state(cfg: Config) -> Any:
    """Describe the running statistics of the norms: means 0, variances 1, 0 batches. On a mesh they are `P()`.

    >>> state(Config.of(18))["stem"]["norm_1"]["mean"]
    f32[64] = zeros
    """

    def norms(block: dict[str, _Convolution]) -> Any:
        return {f"norm_{n}": {"mean": initial.zeros(c.outputs), "var": initial.ones(c.outputs),
                              "count": initial.zeros((), dtype=torch.int64)} for n, c in block.items()}  # fmt: skip

    return _stages(cfg, norms)


@checked
def specs(cfg: Config, *, model: Axis = None) -> Any:
    """Split the classes over `model`; replicate the rest. `fs.fully_shard` adds a data axis.

    The weights that `load` returns have the specs {"params": specs(cfg, ...), "state": P()}.

    >>> specs(Config.of(18), model=("data", "model"))["fc"]
    P(('data', 'model'))
    """
    backbone = {"stem": P(), "stages": P()}
    return {**backbone, "fc": P(model)} if cfg.num_labels else backbone


@checked
def features(
    cfg: Config, params: Any, state: Any, x: Tensor, *, train: bool, layout: Layout = ONE_DEVICE, specs: Any = None,
    remat: bool = False,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Return the mean of the last stage over each image, and the new state: x [B@data, channels, H, W] -> [B@data, D].

    With `train` the norms use the statistics of the images of all ranks of `layout.data`, and the new state is their
    running average; otherwise they use the state. `params` are as placed. Pass their `specs` if they are split over
    `layout.data` (FSDP). The convolutions of each block are gathered just before it runs, and freed by
    `layout.release`; `remat` recomputes blocks in backward.

    >>> features(cfg, weights["params"], weights["state"], images, train=False)[0].shape
    torch.Size([2, 8])

    Raises ShardingError for images that do not fit the config.
    """
    described = shapes_of(init, cfg)
    if x.ndim != 4 or x.shape[1] != cfg.num_channels or not x.is_floating_point():
        raise fail("resnet: the images do not fit the config", x=describe(x),
                   fix=f"floating [B, {cfg.num_channels}, H, W]")  # fmt: skip
    check_params(params, described)
    check_params(state, shapes_of(_state, cfg), "state")
    x = x.to(layout.dtype or x.dtype)
    backbone, wanted = ({part: of[part] for part in ("stem", "stages")} for of in (params, described))
    own = P() if specs is None else specs if is_spec(specs) else {part: spec_of(specs, part) for part in backbone}
    leaf_specs = tree.unflatten(tree.flatten(backbone)[1], tree.broadcast(own, backbone, name="specs", leaf=is_spec))

    def of_kind(kind: str) -> tuple[Any, Any, Any]:
        """Return the parameters of this kind, their specs and shapes, of the stem and each block."""
        return tuple([{k: v for k, v in part.items() if k.startswith(kind)} for part in _in_order(of)]
                     for of in (backbone, leaf_specs, wanted))  # type: ignore[return-value]  # fmt: skip

    def block(convolutions: Any, x: Tensor, own: tuple[int, Any, Any]) -> tuple[Tensor, dict[str, Any]]:
        i, norms, state = own
        return _apply_block(cfg, blocks[i], {**convolutions, **norms}, state, x, train, layout)

    blocks = _in_order(_stages(cfg, lambda block: block))
    norms, norm_specs, norm_shapes = of_kind("norm_")
    norms = make_whole(norms, norm_specs, layout.data, shapes=norm_shapes)
    convolutions, conv_specs, shapes = of_kind("conv_")
    each = list(zip(range(len(blocks)), norms, _in_order(state), strict=True))
    x, statistics = scan(block, convolutions, x, specs=conv_specs, axis=layout.data, each=each, shapes=shapes,
                         has_aux=True, remat=remat, release=layout.release, prefetch=layout.prefetch,
                         backward_prefetch=layout.backward_prefetch, dtype=layout.dtype,
                         reduce_dtype=layout.reduce_dtype)  # fmt: skip
    new = iter(statistics)
    return x.mean((2, 3)), _stages(cfg, lambda _: next(new))


_state = state  # for functions with an argument of this name


def _convolve(
    p: Any, state: Any, n: str, c: _Convolution, x: Tensor, train: bool, layout: Layout
) -> tuple[Tensor, dict[str, Any]]:
    """Convolve, then normalize: the result, and the new state of the norm by its name."""
    conv, norm = p[f"conv_{n}"], p[f"norm_{n}"]
    h = nn.conv2d(x, conv["w"], stride=c.stride, padding=c.kernel // 2)
    h, new = nn.batch_norm(h, state[f"norm_{n}"], norm["w"], norm["b"], train=train, over=layout.data)
    return h, {f"norm_{n}": new}


def _apply_block(
    cfg: Config, block: dict[str, _Convolution], p: Any, state: Any, x: Tensor, train: bool, layout: Layout
) -> tuple[Tensor, dict[str, Any]]:
    """Return the stem or a block. Inside a block the activation is relu, whatever `hidden_act`, as in transformers."""
    if len(block) == 1:
        x, new = _convolve(p, state, "1", block["1"], x, train, layout)
        x = ACTIVATIONS[cfg.hidden_act](x)
        return nn.max_pool2d(x, 3, stride=2, padding=1) if cfg.stem == "imagenet" else x, new
    new = {}
    h = skip = x
    for n, c in block.items():
        if n == "skip":
            skip, norm = _convolve(p, state, n, c, x, train, layout)
        else:
            h, norm = _convolve(p, state, n, c, h if n == "1" else F.relu(h), train, layout)
        new |= norm
    return ACTIVATIONS[cfg.hidden_act](h + skip), new


@checked
def head_inputs(
    cfg: Config, params: Any, x: Tensor, targets: Tensor | None = None, *, layout: Layout = ONE_DEVICE,
    specs: Any = None,
) -> tuple[Tensor, Any, Tensor | None]:  # fmt: skip
    """Prepare the features [B@data, D] for a head split by class: (x, {"w": [C@model, D], "b": [C@model]}, targets).

    Over axes of `layout.model` that split the batch too, features and targets are gathered: x [B@batch, D]{V model},
    targets [B@batch]{I model}, where `batch` are `layout.batch`, the axes that remain. The gradient of x is summed over
    the ranks' classes. For a loss of one's own:

    >>> x, fc, y = resnet.head_inputs(cfg, params, x, y, layout=layout)
    >>> loss = nn.cross_entropy(nn.linear(x, fc["w"].mT), y, axis=layout.model, size=cfg.num_labels, over=layout.batch)

    Raises ShardingError if the config has no head.
    """
    if not cfg.num_labels:
        raise fail("resnet: the config has no head", fix="Config(num_labels=1000)")
    described = shapes_of(init, cfg)
    own = P() if specs is None else spec_of(specs, "fc")
    fc = make_whole(params["fc"], own, layout.batch or None, shapes=described["fc"], dtype=layout.dtype,
                    reduce_dtype=layout.reduce_dtype)  # fmt: skip
    if layout.gathered:
        size = layout.gathered_size(len(x))
        x = all_gather(x, layout.gathered, size=size)
        targets = None if targets is None else all_gather(targets, layout.gathered, size=size, to="invariant")
    x = pvary(x, tuple(a for a in names_of(layout.model) if a not in layout.gathered) or None)
    return x, fc, targets


@checked
def apply(
    cfg: Config, params: Any, state: Any, x: Tensor, *, train: bool, layout: Layout = ONE_DEVICE, **options: Any
) -> tuple[Tensor, Any]:
    """Return logits of the classes, and the new state: images [B@data, channels, H, W] -> [B@batch, C@model].

    `batch` are the axes of `layout.data` that do not split the classes. Without a head: the features. `options` are
    as in `features`.

    >>> logits, state = apply(cfg, weights["params"], weights["state"], images, train=True)
    >>> logits.shape
    torch.Size([2, 8])
    """
    x, new = features(cfg, params, state, x, train=train, layout=layout, **options)
    if not cfg.num_labels:
        return x, new
    x, fc, _ = head_inputs(cfg, params, x, layout=layout, specs=options.get("specs"))
    return _linear(x, fc), new


def _linear(x: Tensor, fc: Any, _targets: Tensor | None = None) -> Tensor:
    return nn.linear(x, fc["w"].mT, fc["b"])


@checked
def loss(
    cfg: Config, params: Any, state: Any, x: Tensor, targets: Tensor, *, train: bool = True,
    layout: Layout = ONE_DEVICE, logits: Callable[[Tensor, Any, Tensor], Tensor] | None = None,
    label_smoothing: float = 0.0, **options: Any,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Return the mean cross-entropy in nats over the targets of all ranks, [] {I}, and the new state.

    Targets [B@data] are classes; -100 is ignored. `logits(x, fc, targets)` computes the logits [B, C@model]
    of the arguments that `head_inputs` returns; by default x @ w + b. `options` as in `features`.

    >>> (loss, state), grads = fs.value_and_grad(
    ...     lambda p: resnet.loss(cfg, p, state, x, y, layout=layout), has_aux=True)(params)
    """
    x, new = features(cfg, params, state, x, train=train, layout=layout, **options)
    x, fc, y = head_inputs(cfg, params, x, targets, layout=layout, specs=options.get("specs"))
    assert y is not None
    out = nn.cross_entropy((logits or _linear)(x, fc, y), y, axis=layout.model, size=cfg.num_labels,
                           over=layout.batch or None, label_smoothing=label_smoothing, donate=True)  # fmt: skip
    return out, new


# --- Hugging Face files ---------------------------------------------------------------------------------------


_LEAVES = {
    ("params", "conv", "w"): "convolution.weight",
    ("params", "norm", "w"): "normalization.weight",
    ("params", "norm", "b"): "normalization.bias",
    ("state", "norm", "mean"): "normalization.running_mean",
    ("state", "norm", "var"): "normalization.running_var",
    ("state", "norm", "count"): "normalization.num_batches_tracked",
}
_FC = {"params.fc.w": "classifier.1.weight", "params.fc.b": "classifier.1.bias"}
_PATH = re.compile(r"(params|state)\.(stem|stages\.(\d+)\.(\d+))\.(conv|norm)_(1|2|3|skip)\.(\w+)")


def _tensor(path: tree.Path) -> FileTensor:
    name = tree.dotted(path)
    if name in _FC:
        return FileTensor(_FC[name])
    found = _PATH.fullmatch(name)
    last = _LEAVES.get((found[1], found[5], found[7])) if found else None
    if found is None or last is None:
        raise fail(f"theirs: the model has no leaf at the path {path!r}",
                   fix="('params', 'fc', 'w'), or ('params' or 'state', 'stages', 0, 0, 'norm_1', ...)")  # fmt: skip
    inner = "shortcut" if found[6] == "skip" else f"layer.{int(found[6]) - 1}"
    block = "embedder.embedder" if found[3] is None else f"encoder.stages.{found[3]}.layers.{found[4]}.{inner}"
    return FileTensor(f"resnet.{block}.{last}")


class _ResNetFile(ModelFile):
    def read_config(self, folder: StrPath, **others: Any) -> Any:
        """Read a config, refusing a regression and several classes at once."""
        raw = config_of(folder)
        problem = raw.get("problem_type")
        if problem not in (None, "single_label_classification"):
            raise fail(f"{config_path(folder)}: problem_type={problem!r}",
                       "the loss here is the cross-entropy of one class",
                       fix="fs.defer(lambda: AutoModelForImageClassification.from_config(config))")  # fmt: skip
        names = raw.get("id2label")
        found = len(names) if isinstance(names, dict) else raw.get("num_labels", 2)  # 2: transformers' default
        return super().read_config(folder, **{"num_labels": found, **others})


def _with_head_of(cfg: Config, headers: WeightHeaders) -> Config:
    has_head = any(name.startswith("classifier.") for name in headers.tensors)
    return cfg if has_head else replace(cfg, num_labels=0)


FILE = _ResNetFile(
    Config, lambda cfg: {"params": init(cfg), "state": state(cfg)}, _tensor,
    kind="ResNet", suffix=lambda cfg: "ForImageClassification" if cfg.num_labels else "Model", prefix="resnet.",
    fixed={"model_type": "resnet"}, completed=_with_head_of,
    sizes=lambda cfg: {name: value for name, value in asdict(cfg).items() if name not in ("num_labels", "stem")},
)  # fmt: skip
theirs, config, load, _ = file_functions(FILE)


@checked
def save(
    path: StrPath, cfg: Config, weights: Any, *, like: StrPath | None = None, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write a folder that `from_pretrained` reads, of {"params": ..., "state": ...}, which may be placed on a mesh.

    `like`: see `hf.save`. Raises ShardingError for the stem "cifar", which transformers does not have.

    >>> save("again", cfg, weights)
    >>> config("again") == cfg
    True
    """
    if cfg.stem != "imagenet":
        raise fail(f"resnet.save: stem={cfg.stem!r}: transformers has no such model", fix="fs.checkpoint.save")
    contents = {**FILE.file_config(cfg), **_labels(cfg, like)}
    write(path, weights, FILE.tensor, config=contents, described=FILE.init(cfg), like=like,
          max_shard_bytes=max_shard_bytes)  # fmt: skip


def _labels(cfg: Config, like: StrPath | None) -> dict[str, Any]:
    """Return names of the labels for config.json, unless `like` has as many."""
    names = None if like is None else config_of(like).get("id2label")
    if not cfg.num_labels or (isinstance(names, dict) and len(names) == cfg.num_labels):
        return {}
    labels = [f"LABEL_{i}" for i in range(cfg.num_labels)]
    return {"id2label": dict(enumerate(labels)), "label2id": {name: i for i, name in enumerate(labels)}}


__all__ = ["Config", "Layout", "apply", "config", "features", "head_inputs", "init", "load", "loss", "save", "specs",
           "state", "theirs"]  # fmt: skip
