"""A decoder whose blocks are on several stages: its loss with gradients, and its logits, by `schedule.pipelined`.

Legend: B batch, T time, V vocabulary; [B@data] is a dim split over an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from torch import Tensor

from fshard import nn
from fshard.collectives import psum, pvary
from fshard.errors import checked, fail, must_be, shown
from fshard.schedule import pipeline
from fshard.schedule.remat import remat as rematerialize
from fshard.schedule.tables import Kind
from fshard.schedule.unshard import make_whole

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
    of gpt2, gptj, gpt_neox, llama, mistral, qwen2 or qwen3. `specs` place the blocks:
    `specs["h"] = fs.on_stages(specs["h"], init(cfg)["h"], "stage", n)`. `key` turns dropout on. Other arguments are as
    of `fs.pipelined`. Parameters that `specs` split over `layout.data` are gathered in each microbatch, and with
    `Layout(release=False)` once.

    >>> f = pipelined(cfg, layout=gpt2.Layout(), specs=P(), microbatches=2)
    >>> loss, grads = f(params, ids, ids)

    Raises ShardingError for a config of another model.
    """
    if (model := model_on_stages(cfg)) is None:
        raise fail(f"pipelined: cfg is {shown(cfg)}, which has no form in stages",
                   fix="a Config of gpt2, gptj, gpt_neox, llama, mistral, qwen2 or qwen3; others by fs.pipelined"
                   )  # fmt: skip
    return Stages(model, cfg, layout, specs, microbatches, schedule, chunks, remat)


def model_on_stages(cfg: Any) -> ModuleType | None:
    """Return the model file whose `pieces` compute a decoder with this config; None if it has no form in stages."""
    models = {gpt2.Config: gpt2, gptj.Config: gptj, gpt_neox.Config: gpt_neox, llama.BaseConfig: llama}
    known = not isinstance(cfg, mixtral.BaseConfig)
    return next((m for kind, m in models.items() if known and isinstance(cfg, kind)), None)


@dataclass(frozen=True)
class Stages:
    """The functions of a decoder on stages: see `pipelined`."""

    model: ModuleType
    cfg: Any
    layout: Layout
    specs: Any
    microbatches: int
    schedule: Kind
    chunks: int
    remat: bool

    def __call__(self, params: Any, ids: Tensor, targets: Tensor, key: Tensor | None = None) -> tuple[Tensor, Any]:
        """Return the loss, and gradients like the parameters."""
        run = self._pipeline(self._total, key)
        loss, (ends, blocks) = run(self._parts(params), self._batch(ids, targets), each=self._numbers(params))
        return loss, {name: blocks if name == "h" else ends[name] for name in params}

    def loss(self, params: Any, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of all targets, without gradients."""
        run = self._pipeline(self._total, None)
        total, count = run.forward(self._parts(params), self._batch(ids, targets), each=self._numbers(params))
        mean: Tensor = total.sum() / count.sum()
        return mean

    def logits(self, params: Any, ids: Tensor) -> Tensor:
        """Return the logits of the next tokens, without gradients."""
        run = self._pipeline(self._logits, None)
        out: Tensor = run.forward(self._parts(params), self._batch(ids), each=self._numbers(params))
        return self.layout.from_zigzag(out.flatten(0, 1))

    def _parts(self, params: Any) -> tuple[Any, Any]:
        if not isinstance(params, Mapping):
            raise must_be("params", "a dict", params, fix="the tree of init, or of load")
        check_params(params, self._described)
        return {name: x for name, x in params.items() if name != "h"}, params["h"]

    @property
    def _described(self) -> Any:
        return shapes_of(self.model.init, self.cfg)

    def _batch(self, *tokens: Tensor) -> dict[str, Tensor]:
        return dict(zip(("ids", "targets"), self.layout.to_zigzag(*tokens)[1:], strict=False))

    def _numbers(self, params: Any) -> list[int]:
        return list(range(len(params["h"])))

    # --- what the stages run ---

    def _pipeline(self, last: Callable[..., Any], key: Tensor | None) -> pipeline.Pipelined:
        key = key if key is None or not self.layout.stage else pvary(key, self.layout.stage)

        def pieces(batch: Any) -> Any:
            layout = replace(self.layout, stage=None, zigzag=bool(self.layout.context))
            tokens = Tokens.of(batch["ids"], context=layout.context)
            return self.model.pieces(self.cfg, batch["ids"], layout=layout, key=key, mask=tokens)

        def first(ends: Any, batch: Any) -> Tensor:
            run = pieces(batch)
            out: Tensor = run.embed(self._whole(ends, ("wte", "wpe")))
            return out

        def stage(p: Any, x: Tensor, batch: Any, i: int) -> Tensor:
            def block(p: Any, x: Tensor) -> Tensor:
                run = pieces(batch)
                each = () if run.each is None else run.each[i]
                out: Tensor = run.block_for(x)(self._whole_block(p, i), x, fold_name(key, i), None, *each)[0]
                return out

            return rematerialize(block)(p, x) if self.remat else block(p, x)

        def end(ends: Any, x: Tensor, batch: Any) -> Any:
            run = pieces(batch)
            top = self._whole(ends, [name for name in ends if name != "wpe" and not (name == "wte" and "head" in ends)])
            logits = getattr(self.model, "head_logits", head_logits)
            return last(logits(self.cfg, run.layout, top, run.norm(top, x), batch["ids"].shape[1]), batch)

        def gather(params: Any) -> Any:
            once = replace(self, layout=replace(self.layout, release=True))
            ends, blocks = params
            return dict(once._whole(ends, ends)), [once._whole_block(p, i) for i, p in enumerate(blocks)]

        return pipeline.pipelined(first, stage, end, axis=self.layout.stage, microbatches=self.microbatches,
                                  schedule=self.schedule, chunks=self.chunks, counted=True,
                                  gather=None if self.layout.release else gather)  # fmt: skip

    def _whole(self, ends: Any, names: Any) -> Any:
        if not self.layout.release:  # gathered before
            return ends
        return self.layout.unshard([name for name in names if name in ends], ends, self.specs, self._described)

    def _whole_block(self, p: Any, i: int) -> Any:
        if not self.layout.release:
            return p
        specs, layout = None if self.specs is None else spec_of(self.specs, "h"), self.layout
        specs = specs[i] if isinstance(specs, (list, tuple)) else specs
        return make_whole(p, specs, layout.unsharded(specs), shapes=self._described["h"][i], dtype=layout.dtype,
                          reduce_dtype=layout.reduce_dtype)  # fmt: skip

    def _total(self, logits: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        targets, over = batch["targets"], self.layout.examples or None
        total = nn.cross_entropy(logits, targets, axis=self.layout.model, size=self.cfg.vocab_size, over=over,
                                 reduction="sum", donate=True)  # fmt: skip
        return total, psum((targets != -100).sum(), over)

    def _logits(self, logits: Tensor, _: Any) -> Tensor:
        return logits
