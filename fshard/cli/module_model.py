"""A class of transformers in the place of a model file, for plans: `ModuleModel`, by `fs.defer` of its config.

Legend: B examples of a step, T time, V vocabulary; [B@data] is a dim split over an axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fshard import nn
from fshard.defer import defer
from fshard.errors import ShardingError, fail
from fshard.models.transformer import Layout
from fshard.spec import P

_HEADS = ("ForCausalLM", "ForMaskedLM")  # ends of the names of classes that return scores of tokens


class ModuleModel:
    """The functions of a model file, of a class of transformers: its blocks are units, and no axis splits a product.

    The class is named by the config's `architectures`; by default it is the decoder of the config's type.
    """

    def __init__(self, contents: Mapping[str, Any], where: str) -> None:
        names = contents.get("architectures") or ()
        try:
            import transformers

            cfg = transformers.AutoConfig.for_model(**{**contents, "use_cache": False})
            decoders: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            kind = getattr(transformers, names[0]) if names else decoders[type(cfg)]
            if not kind.__name__.endswith(_HEADS):
                raise TypeError(f"{kind.__name__} does not end in {' or '.join(_HEADS)}")
            blocks = set(kind._no_split_modules or ())
            self.apply, tree = defer(lambda: kind(cfg).eval(),
                                     units=(lambda _, m: type(m).__name__ in blocks) if blocks else None)  # fmt: skip
        except ShardingError:
            raise
        except Exception as e:  # of any kind: a constructor of another library runs
            what = f"there is no model file for {contents.get('model_type')!r}, and its class cannot be made"
            raise fail(f"{where}: {what}",
                       f"{type(e).__name__}: {str(e).strip().partition('. ')[0]}",
                       fix="mend the config, whose architectures name a class of transformers; or write its train "
                           "step, and call fs.plan_table(step_of, layouts, device=...)") from e  # fmt: skip
        self.__name__, self.cfg = kind.__name__, cfg
        self.params, self.buffers = tree["params"], tree["buffers"]

    def init(self, cfg: Any) -> Any:
        """Return the described parameters."""
        return self.params

    def specs(self, cfg: Any, model: None) -> Any:
        """Return the specs of unsharded parameters."""
        return dict.fromkeys(self.params, P())

    def loss(
        self, cfg: Any, params: Any, ids: Tensor, targets: Tensor, *, buffers: Any, layout: Layout, specs: Any,
        remat: bool,
    ) -> Tensor:  # fmt: skip
        """Return the mean cross-entropy of targets [B@data, T] over all ranks: [] {I}."""
        release = bool(self.apply.units) and layout.release
        forward = self.apply.unshard(specs, layout.data, remat=remat, release=release, prefetch=layout.prefetch,
                                     dtype=layout.dtype, reduce_dtype=layout.reduce_dtype)  # fmt: skip
        return nn.cross_entropy(forward(params, buffers, ids).logits, targets, over=layout.data)
