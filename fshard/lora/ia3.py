"""Learned scales of layers, (IA)^3, as a tree next to any parameter tree: one number for each output, or each input.

cfg      = fs.ia3.Config(targets=("k_proj", "v_proj", "down_proj"), feedforward=("down_proj",))
adapters = fs.ia3.init(cfg, params, of=llama.theirs)                   # described: {"h.0.k.w": {"scale"}, ...}
placed   = fs.ia3.specs(cfg, params, specs, of=llama.theirs)           # the specs of the scales, by their layers'

inside shard_map, differentiating only `adapters`:
    adapted = fs.ia3.apply(cfg, params, adapters, of=llama.theirs, specs=specs, model="model")
    loss    = llama.loss(model, adapted, ids, targets, layout=layout, specs=specs)

Source: Liu et al., 2022, "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning";
names and arithmetic are as in Hugging Face PEFT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fshard import init as initial
from fshard import lora
from fshard._core.weight import Leaf, Part
from fshard.collectives import pvary
from fshard.errors import ShardingError, checked, fail, raise_all
from fshard.spec import Axis, P, describe

from .adapted import AdaptedWeight, aligned, given_specs, model_axes, placement
from .targets import Of, Targets, check_adapters, named_leaves


@checked
@dataclass(frozen=True)
class Config:
    """The layers that are scaled. Names are of modules in Hugging Face's models, as in `lora.Config`.

    Args:
        targets: the layers: a list of names, of their last parts or of globs; one regular expression; "all-linear".
        feedforward: the layers among them whose inputs are scaled, not their outputs: a list of ends of names, or one
            regular expression of full names.
        modules_to_save: modules whose parameters train in full, as copies: a new head.
        exclude: layers that are not scaled although they are targets, written as `targets`.

    >>> Config(("k_proj", "v_proj", "down_proj"), feedforward=("down_proj",)).scales_inputs("layers.0.mlp.down_proj")
    True

    Raises ShardingError for options that name nothing, and expressions that are none.
    """

    targets: str | Sequence[str]
    feedforward: str | Sequence[str] = ()
    modules_to_save: Sequence[str] = ()
    exclude: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("targets", "feedforward", "modules_to_save", "exclude"):
            value = getattr(self, name)
            if not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
        try:
            re.compile(self.feedforward if isinstance(self.feedforward, str) else "")
            _ = self.named
        except re.error as e:
            raise fail(f"ia3.Config: feedforward={self.feedforward!r} is no regular expression", str(e),
                       fix="escape its special characters, or pass a list of names") from e  # fmt: skip
        except ShardingError as e:
            raise ShardingError(str(e).replace("lora.Config", "ia3.Config")) from e

    @property
    def named(self) -> lora.Config:
        """The config of `fs.lora` that names the same modules."""
        return lora.Config(self.targets, modules_to_save=self.modules_to_save, exclude=self.exclude)

    def scales_inputs(self, name: str) -> bool:
        """Return whether the inputs of a layer are scaled, and not its outputs."""
        if isinstance(self.feedforward, str):
            return re.fullmatch(self.feedforward, name) is not None
        return name.endswith(tuple(self.feedforward))


@checked
def init(cfg: Config, params: Any, *, of: Of = None, key: Tensor | None = None) -> dict[str, dict[str, Any]]:
    """Describe the scales of a parameter tree, ones in float32: {dotted path of a leaf: {"scale"}}.

        scale [out..] of a matrix [in.., out..], or [in..] of the feed-forward; a module to save: {"value"}

    The arguments are as for `lora.init`.

    >>> fs.ia3.init(fs.ia3.Config(["up"]), {"up": fs.init.zeros((4, 6))})
    {'up': {'scale': f32[6] = ones}}

    Raises ShardingError listing targets that name no layer, and targets that are not layers.
    """
    targets = _targets("ia3.init", cfg, params, of)
    copies = {name: parts for name, parts in lora.init(cfg.named, params, of=of, key=key).items() if "value" in parts}
    scales = {name: {"scale": initial.ones(_of_side(cfg, leaf, tuple(x.shape)))}
              for name, (leaf, x) in targets.adapted.items()}  # fmt: skip
    return {**scales, **copies}


@checked
def specs(cfg: Config, params: Any, specs: Any, *, of: Of = None) -> dict[str, dict[str, Any]]:
    """Return the specs of the scales of `init`, by the specs of their layers, on the same axes.

        w [in@data, out@model]  ->  scale [out@model], or the bias's spec; of the feed-forward scale [in@data]

    `specs` may be a prefix of `params`.

    >>> fs.ia3.specs(fs.ia3.Config(["up"]), {"up": fs.init.zeros((4, 6))}, {"up": P(None, "model")})
    {'up': {'scale': P('model')}}
    """
    targets = _targets("ia3.specs", cfg, params, of)
    by_name = targets.specs(params, specs)
    out = {name: {"scale": _scale_spec(cfg, name, leaf, x.ndim, by_name)}
           for name, (leaf, x) in targets.adapted.items()}  # fmt: skip
    return {**out, **{name: {"value": by_name[name]} for name in targets.copied}}


@checked
def apply(
    cfg: Config, params: Any, adapters: Mapping[str, Any], *, of: Of = None, specs: Any = None,
    adapter_specs: Any = None, model: Axis = None,
) -> Any:  # fmt: skip
    """Return the parameters with a `ScaledWeight` at each scaled layer, and the biases of scaled outputs scaled.

        y = (x @ w + b) * scale, or (x * scale) @ w + b     in the wider dtype, rounded to the layer's

    Differentiate with respect to `adapters`: the base then has no gradient.

    Args:
        of: as for `init`.
        specs: of params, a prefix; needed on a mesh.
        adapter_specs: of the scales; by default by `ia3.specs`. A scale that `model` does not split, of a layer that it
            splits, is the same on its ranks, and is sliced.
        model: the axes over which the base stays split inside the model.

    >>> params = fs.ia3.apply(fs.ia3.Config(["up"]), {"up": torch.eye(2)}, {"up": {"scale": torch.tensor([2.0, 3.0])}})
    >>> nn.linear(torch.tensor([[1.0, 2.0]]), params["up"])
    tensor([[2., 6.]])

    Raises ShardingError listing every scale that is missing, of no layer, or of another number of dims.
    """
    targets, over = _targets("ia3.apply", cfg, params, of), model_axes("ia3.apply", model, specs)
    wanted = {name: {"scale": len(_of_side(cfg, leaf, tuple(x.shape)))} for name, (leaf, x) in targets.adapted.items()}
    check_adapters(targets, adapters, wanted, (Tensor,))
    by_name = {} if specs is None else targets.specs(params, specs)
    given = given_specs("ia3.apply", adapters, adapter_specs)
    placed = {}
    for name, (leaf, x) in targets.adapted.items():  # as the bias that is multiplied: over all axes, and not varied
        spec, base = _scale_spec(cfg, name, leaf, x.ndim, by_name) if by_name else P(), by_name.get(name, P())
        axes = (*over, *base.axes, *spec.axes)
        placed[name, "scale"] = placement("scale", spec, given.get((name, "scale")), base, wanted[name]["scale"], axes)
    unvaried = {key: where._replace(varied=()) for key, where in placed.items()}
    scales, errors = aligned("ia3.apply", adapters, unvaried, given)
    raise_all(errors)
    found: dict[str, Any] = {name: adapters[name]["value"] for name in targets.copied}
    values = {name: x for name, (_, x) in targets.named.items()}
    for name, (leaf, x) in targets.adapted.items():
        scale = scales[name]["scale"]
        bias = _bias_of(name, values)
        if bias is not None and not cfg.scales_inputs(leaf.module):
            found[bias] = (values[bias] * scale).to(values[bias].dtype)
        where = placed[name, "scale"]
        scale = pvary(scale, tuple(a for a in where.varied if a in over) or None)
        found[name] = ScaledWeight(x, scale, leaf, leaf.inputs, cfg.scales_inputs(leaf.module), where.spec)
    return targets.replaced(params, found)


@dataclass(frozen=True, eq=False, repr=False)
class ScaledWeight(AdaptedWeight):
    """A matrix with a scale of its outputs, x @ base * scale, or of its inputs, (x * scale) @ base. Made by `apply`.

    >>> config, params = Config("w"), {"w": torch.ones(3, 4)}
    >>> scales = device_get(materialize(init(config, params), P(), mesh, key=key(0)))
    >>> view = apply(config, params, scales)["w"]
    >>> type(view).__name__, fs.nn.linear(torch.ones(2, 3), view).shape
    ('ScaledWeight', torch.Size([2, 4]))
    """

    children = ("base", "scale")

    base: Any  # [in.., out..]; flattened as its user asks
    scale: Tensor  # [out..], or [in..]
    leaf: Leaf
    inputs: int  # the number of input dims of the base, as flattened now
    of_inputs: bool
    spec: P  # of the scale

    def __repr__(self) -> str:
        return f"ScaledWeight({describe(self)}, {'in' if self.of_inputs else 'out'}puts)"

    def parts(self, spec: P | None, shape: Sequence[int] | None) -> list[Part]:
        scaled = None if shape is None else self.leaf.split(tuple(shape))[not self.of_inputs]
        return [*self.base_parts(spec, shape), (self.spec, scaled)]

    def linear(self, x: Tensor, b: Tensor | None = None) -> Tensor:
        """Compute the scaled x @ base, plus b, which `apply` has scaled: x [..., D] -> [..., F]."""
        scale = self.scale.flatten()
        if self.of_inputs:
            return self.base_linear((x * scale).to(x.dtype), b)
        y = self.base_linear(x, None)
        y = (y * scale).to(y.dtype)
        return y if b is None else y + b


def _targets(verb: str, cfg: Config, params: Any, of: Of) -> Targets:
    """Find the leaves. Raises ShardingError for names of no module, or of no linear layer."""
    found = Targets.among(verb, cfg.named, named_leaves(verb, params), of)
    raise_all([fail(f"{verb}: {name!r} is a table of embeddings, which has no scale", module=leaf.module,
                    fix="name linear layers, or exclude it")
               for name, (leaf, _) in found.adapted.items() if leaf.layout == "table"])  # fmt: skip
    modules = [leaf.module for leaf, _ in found.adapted.values()]
    if isinstance(cfg.feedforward, str):
        missing = [] if any(map(cfg.scales_inputs, modules)) else [cfg.feedforward]
    else:
        missing = [end for end in cfg.feedforward if not any(m.endswith(end) for m in modules)]
    raise_all([fail(f"{verb}: feedforward: no scaled layer is named {end!r}", fix="one of targets, or leave it out")
               for end in missing])  # fmt: skip
    return found


def _of_side(cfg: Config, leaf: Leaf, entries: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the entries of a layer's inputs, or of its outputs: those that are scaled."""
    return leaf.split(entries)[not cfg.scales_inputs(leaf.module)]


def _bias_of(name: str, values: Mapping[str, Any]) -> str | None:
    """Return the dotted path of the bias of the layer whose matrix is at `name`."""
    start, _, last = name.rpartition(".")
    bias = {"w": f"{start}.b", "weight": f"{start}.bias"}.get(last, "").removeprefix(".")
    return bias if bias in values else None


def _scale_spec(cfg: Config, name: str, leaf: Leaf, ndim: int, by_name: Mapping[str, P]) -> P:
    """Return the spec of a scale: the spec of the bias that it multiplies, or of the dims of the matrix."""
    bias = _bias_of(name, by_name)
    if bias is not None and not cfg.scales_inputs(leaf.module):
        return by_name[bias]
    return by_name[name].with_entries(*_of_side(cfg, leaf, by_name[name].parts(ndim)), memory="device")


__all__ = ["Config", "ScaledWeight", "apply", "init", "specs"]
