"""A decoder whose blocks are on several stages: its loss with gradients, and its logits, by `schedule.pipelined`.

Legend: B batch, T time, V vocabulary; [B@data] is a dim split over an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fshard import nn, tree
from fshard.collectives import psum, pvary
from fshard.errors import checked, fail, must_be, shown
from fshard.nn.experts import RouterSums
from fshard.schedule import pipeline
from fshard.schedule.remat import remat as rematerialize
from fshard.schedule.tables import Kind
from fshard.schedule.unshard import make_whole
from fshard.spec import Axis, is_spec, names_of

from . import gpt2, gpt_neox, gptj, llama, mixtral
from .kv_cache import Tokens
from .transformer import Layout, check_params, fold_name, head_logits, shapes_of, spec_of


@checked
def pipelined(
    cfg: Any, *, layout: Layout, specs: Any, microbatches: int, schedule: Kind = "1f1b", chunks: int = 1,
    remat: bool = False,
) -> Stages:  # fmt: skip
    """Return the loss and gradients of a decoder whose blocks are on the ranks of `layout.stage`. Inside `shard_map`.

        f(params, ids, targets, key=None) -> (loss [] {I}, gradients)     f.loss(params, ids, targets) -> loss
        f.logits(params, ids) -> [B@data, T, V@model]

    They equal the model's `loss` and its gradients on any mesh: the mean over the targets of the full batch. `cfg` is
    of any decoder. `specs` place the blocks: `specs["h"] = fs.on_stages(specs["h"], init(cfg)["h"], "stage", n)`. They
    may also split embeddings and head over the stages, as P(("model", "stage")), or P("stage", lengths=(0, V)): these
    are gathered over the stages once a call. `key` turns dropout on. Other arguments are as of `fs.pipelined`.
    Parameters that `specs` split over `layout.data` are gathered in each microbatch, and with `Layout(release=False)`
    once.

    A balance loss of experts multiplies two sums over the full batch, which no microbatch knows. With
    `cfg.output_router_logits` the stages therefore first run forward, to count the tokens of each expert. To generate,
    call `f.logits` for each token: it computes the tokens before again, as stages have no cache of keys and values.

    >>> f = pipelined(cfg, layout=gpt2.Layout(), specs=P(), microbatches=2)
    >>> loss, grads = f(params, ids, ids)

    Raises ShardingError for a config of another model, and for a module of `fs.defer`.
    """
    if (model := model_on_stages(cfg)) is None:
        why = ["its forward may use the result of a unit anywhere: its units need not form a chain"] * callable(cfg)
        raise fail(f"pipelined: cfg is {shown(cfg)}, which has no form in stages", *why,
                   fix="a Config of a decoder; others by fs.pipelined")  # fmt: skip
    described = shapes_of(model.init, cfg)
    if isinstance(specs, Mapping):
        ends = [name for name in specs if name in described and name != "h"]
        specs = {**specs, **{name: _gathered(specs[name], described[name], layout.stage) for name in ends}}
    pipe = partial(pipeline.pipelined, axis=layout.stage, microbatches=microbatches, schedule=schedule, chunks=chunks,
                   counted=True)  # fmt: skip
    return Stages(model, cfg, described, layout, specs, pipe, remat)


def _gathered(specs: Any, described: Any, stage: Axis) -> Any:
    """Return the specs of leaves that a pipeline has gathered over its axis."""
    leaves, treedef = tree.flatten(described)
    each = tree.broadcast(specs, described, name="pipelined: specs", leaf=is_spec)
    dims = [[tuple(a for a in axes if a not in names_of(stage)) for axes in spec.parts(len(x.shape))]
            for x, spec in zip(leaves, each, strict=True)]  # fmt: skip
    return tree.unflatten(treedef, [spec.with_entries(*axes) for spec, axes in zip(each, dims, strict=True)])


def model_on_stages(cfg: Any) -> ModuleType | None:
    """Return the model file whose `pieces` compute a decoder with this config; None if it has no form in stages."""
    models = {gpt2.Config: gpt2, gptj.Config: gptj, gpt_neox.Config: gpt_neox, mixtral.BaseConfig: mixtral,
              llama.BaseConfig: llama}  # fmt: skip
    return next((m for kind, m in models.items() if isinstance(cfg, kind)), None)


@dataclass(frozen=True)
class Stages:
    """The functions of a decoder on stages: see `pipelined`."""

    model: ModuleType
    cfg: Any
    described: Any
    layout: Layout
    specs: Any
    pipe: Callable[..., pipeline.Pipelined]
    remat: bool

    def __call__(self, params: Any, ids: Tensor, targets: Tensor, key: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return the loss, and gradients like the parameters."""
        parts, batch, each = self._arguments(params, ids, targets)
        carried = self._router_loss(parts, batch, each, key)
        loss, (ends, blocks) = self._pipeline(self._total, key, carried)(parts, batch, each=each)
        return loss, {name: blocks if name == "h" else ends[name] for name in params}

    def loss(self, params: Any, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the model's loss, without gradients: the mean over all targets, and losses of a router."""
        parts, batch, each = self._arguments(params, ids, targets)
        carried = self._router_loss(parts, batch, each, None)
        total, count = self._pipeline(self._total, None, carried).forward(parts, batch, each=each)
        mean: Tensor = total.sum() / count.sum()
        return mean

    def logits(self, params: Any, ids: Tensor) -> Tensor:
        """Return the logits of the next tokens, without gradients."""
        parts, batch, each = self._arguments(params, ids)
        out: Tensor = self._pipeline(lambda logits, *_: logits(), None).forward(parts, batch, each=each)
        return self.layout.from_zigzag(out.flatten(0, 1))

    def _arguments(self, params: Any, *tokens: Tensor) -> tuple[tuple[Any, Any], dict[str, Tensor], list[int]]:
        """Return the ends and the blocks, the batch, and the numbers of the blocks."""
        if not isinstance(params, Mapping):
            raise must_be("params", "a dict", params, fix="the tree of init, or of load")
        check_params(params, self.described)
        batch = dict(zip(("ids", "targets"), self.layout.to_zigzag(*tokens)[1:], strict=False))
        ends, blocks = {name: x for name, x in params.items() if name != "h"}, params["h"]
        return (ends, blocks), batch, list(range(len(blocks)))

    # --- what the stages run ---

    def _pipeline(
        self, last: Callable[..., Any], key: Tensor | None, carried: Callable[[RouterSums], Tensor] | None = None
    ) -> pipeline.Pipelined:
        """Return the pipeline that ends with `last(logits, batch, carried)`, where logits is a function.

        `carried` of the sums of each block's router is summed along the stages.
        """
        key = None if key is None else pvary(key, self.layout.stage)
        # Parameters are gathered where a microbatch uses them, or once by `gather`.
        ends_of = self._whole if self.layout.release else lambda ends, names: ends
        block_of = self._whole_block if self.layout.release else lambda p, i: p

        def pieces(batch: Any) -> Any:
            layout = replace(self.layout, stage=None, zigzag=bool(self.layout.context))
            tokens = Tokens.of(batch["ids"], context=layout.context)
            return self.model.pieces(self.cfg, batch["ids"], layout=layout, key=key, mask=tokens)

        def first(ends: Any, batch: Any) -> Any:
            x = pieces(batch).embed(ends_of(ends, ("wte", "wpe")))
            # Zeros of the type that the blocks' sums have: they vary where x does.
            return x if carried is None else (x, carried(mixtral.no_sums(self.cfg, x)) + x.detach()[:0].sum())

        def stage(p: Any, h: Any, batch: Any, i: int) -> Any:
            def block(p: Any, h: Any) -> Any:
                x, run = (h if carried is None else h[0]), pieces(batch)
                each = () if run.each is None else run.each[i]
                x, more = run.block_for(x)(block_of(p, i), x, fold_name(key, i), None, *each)
                return x if carried is None else (x, h[1] + carried(more[1]))

            return rematerialize(block)(p, h) if self.remat else block(p, h)

        def end(ends: Any, h: Any, batch: Any) -> Any:
            x, total = (h, None) if carried is None else h
            run = pieces(batch)

            def logits() -> Tensor:
                names = [name for name in ends if name != "wpe" and not (name == "wte" and "head" in ends)]
                top, by = ends_of(ends, names), getattr(self.model, "head_logits", head_logits)
                return by(self.cfg, run.layout, top, run.norm(top, x), batch["ids"].shape[1])

            return last(logits, batch, total)

        def gather(params: Any) -> Any:
            ends, blocks = params
            return dict(self._whole(ends, ends)), [self._whole_block(p, i) for i, p in enumerate(blocks)]

        return self.pipe(first, stage, end, gather=None if self.layout.release else gather)

    def _whole(self, ends: Any, names: Any) -> Any:
        return self.layout.unshard([name for name in names if name in ends], ends, self.specs, self.described)

    def _whole_block(self, p: Any, i: int) -> Any:
        specs: Any = None if self.specs is None else spec_of(self.specs, "h")
        specs = specs[i] if isinstance(specs, (list, tuple)) else specs
        layout, described = self.layout, self.described["h"][i]
        apart = {}
        if mixtral.splits_by_data(layout) and "experts" in p:
            apart = {"experts": mixtral.unshard_experts(p["experts"], specs=specs["experts"], layout=layout,
                                                        described=described["experts"])}  # fmt: skip
            p, specs, described = ({name: x[name] for name in x if name != "experts"} for x in (p, specs, described))
        return make_whole(p, specs, layout.unsharded(specs), shapes=described, dtype=layout.dtype,
                          reduce_dtype=layout.reduce_dtype) | apart  # fmt: skip

    # --- losses ---

    def _total(self, logits: Callable[[], Tensor], batch: Any, router: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of a microbatch, and the number of its targets."""
        targets, over = batch["targets"], self.layout.examples or None
        total = nn.cross_entropy(logits(), targets, axis=self.layout.model, size=self.cfg.vocab_size, over=over,
                                 reduction="sum", donate=True)  # fmt: skip
        return total if router is None else total + self._of_all(router), psum((targets != -100).sum(), over)

    def _router_loss(self, parts: Any, batch: Any, each: Any, key: Tensor | None) -> Any:
        """Return the function from a block's sums to its losses of the router, times the number of all targets."""
        cfg, over = self.cfg, self.layout.examples
        if not isinstance(cfg, mixtral.BaseConfig) or not cfg.weigh(1, 1):
            return None
        ids, e = batch["ids"], cfg.experts.number
        targets = psum((batch["targets"] != -100).sum(), over)
        layers = cfg.num_hidden_layers - len(cfg.experts.dense_layers & set(range(cfg.num_hidden_layers)))
        tokens = (psum(torch.full((), layers * ids.numel(), device=ids.device), over)).clamp(min=1)
        share = torch.zeros((), device=ids.device)
        if cfg.weigh(1, 0):
            count = self._pipeline(lambda _, batch, counts: self._of_all(counts), key,
                                   lambda sums: sums.counts.to(sums.z.dtype))  # fmt: skip
            share = count.forward(parts, batch, each=each).sum(0) / tokens

        def loss(sums: RouterSums) -> Tensor:
            balance = e * (share * sums.probabilities).sum()
            out: Tensor = cfg.weigh(balance, sums.z) * targets / tokens
            return out

        return loss

    def _of_all(self, x: Tensor) -> Tensor:
        """Sum over the ranks that have other tokens."""
        model = names_of(self.layout.model) if self.layout.sequence else ()
        return psum(x, (*self.layout.examples, *model) or None)
