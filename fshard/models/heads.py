"""Classification heads and sentence embeddings on any model here, split as their specs say.

Sequences are classified at their last token that is not padding by decoders, and by the pooler of BERT.

Legend: B batch, T time, D width, L labels; [B@data] is a dim split over an axis; {I} does not vary over it.
Weights as in Hugging Face `*ForSequenceClassification` and `*ForTokenClassification`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard import init as initial
from fshard import nn, tree
from fshard._core.files.io import StrPath
from fshard.collectives import psum
from fshard.errors import checked, fail, must_be, raise_all
from fshard.interop.hf import FileTensor, config_of, config_path, read, write
from fshard.random import fold_in
from fshard.spec import Axis, P

from . import bert, gpt2, gpt_neox, gptj, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe
from .leaves import layer
from .transformer import ONE_DEVICE, Layout, flat_linear, shapes_of, spec_of


class _Model(NamedTuple):
    """A model that can have a head, and the names of the head's tensor in files."""

    module: Any
    sequence: str = "score"  # of the head for sequences
    tokens: str | None = "score"  # and for tokens; None: transformers has no such class


_MODELS = {
    "bert": _Model(bert, "classifier", "classifier"), "gpt2": _Model(gpt2, "score", "classifier"),
    "gptj": _Model(gptj, "score", None), "gpt_neox": _Model(gpt_neox, "score", "classifier"), "llama": _Model(llama),
    "mistral": _Model(mistral), "mixtral": _Model(mixtral), "qwen2": _Model(qwen2), "qwen3": _Model(qwen3),
    "qwen3_moe": _Model(qwen3_moe),
}  # fmt: skip
_TASKS = {"sequence": "ForSequenceClassification", "tokens": "ForTokenClassification"}
_PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")


def _model_of(base: Any, label: str = "heads.Config: base") -> _Model:
    found = next((m for m in _MODELS.values() if isinstance(base, m.module.Config)), None)
    if found is None:
        fix = "cfg.base and params['base']" if isinstance(base, Config) else ""
        raise must_be(label, f"a Config of {', '.join(_MODELS)}", base, fix=fix)
    return found


@checked
@dataclass(frozen=True)
class Config:
    """A head on the model `base`, for "sequence" or "tokens", with names of its labels.

    The heads of `base` are left out. `problem_type`, of sequences, is Hugging Face's; None: a
    regression for one label, classes for integer targets, and several classes at once for others. A decoder classifies
    a sequence at its last token other than `pad_token_id`; None: at its last one. `dropout` is the rate at the head's
    input.

    >>> Config(gpt2.Config(), "sequence", labels=("bad", "good"), pad_token_id=50256).base.n_embd
    768
    """

    base: Any
    task: Literal["sequence", "tokens"]
    labels: tuple[str, ...] = ("LABEL_0", "LABEL_1")
    problem_type: str | None = None
    pad_token_id: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        model, errors = _model_of(self.base), []
        if isinstance(self.base, bert.Config):
            own = replace(self.base, mlm=False, nsp=False, pooler=self.task == "sequence")
            object.__setattr__(self, "base", own)
        if not self.labels or len(set(self.labels)) < len(self.labels):
            errors.append(fail(f"heads.Config: labels={self.labels!r}", fix="one name or more, each once"))
        if self.problem_type is not None and self.problem_type not in _PROBLEMS:
            errors.append(fail(f"heads.Config: problem_type={self.problem_type!r}",
                               fix=f"None, or one of {', '.join(_PROBLEMS)}"))  # fmt: skip
        if self.task == "tokens" and (self.problem_type in ("regression", "multi_label_classification")):
            errors.append(fail(f"heads.Config: problem_type={self.problem_type!r} of tokens, which have one class each",
                               fix="problem_type=None"))  # fmt: skip
        if self.task == "tokens" and model.tokens is None:
            errors.append(fail(f"heads.Config: transformers has no {model.module.FILE.kind}{_TASKS['tokens']}",
                               fix="another model, or task='sequence'"))  # fmt: skip
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.base.vocab_size:
            errors.append(fail(f"heads.Config: pad_token_id={self.pad_token_id} is not in a vocabulary of "
                               f"{self.base.vocab_size}", fix="one of its tokens, or None"))  # fmt: skip
        if not 0 <= self.dropout < 1:
            errors.append(fail(f"heads.Config: dropout={self.dropout}", fix="0 or more, less than 1"))
        raise_all(errors)

    @property
    def has_bias(self) -> bool:
        """True if the head has a bias, as in transformers."""
        return self.task == "tokens" or isinstance(self.base, bert.Config)


@checked
def init(cfg: Config) -> Any:
    """Return the described parameters {"base", "score"}: of the model without heads, and of the head, drawn alike.

    >>> init(Config(gpt2.Config(), "tokens"))["score"]
    {'w': f32[768, 2] = normal(std=0.02), 'b': f32[2] = zeros}
    """
    d = cfg.base.n_embd if hasattr(cfg.base, "n_embd") else cfg.base.hidden_size
    n = len(cfg.labels)
    score = {
        "w": initial.normal((d, n), std=cfg.base.initializer_range),
        **({"b": initial.zeros(n)} if cfg.has_bias else {}),
    }
    return {"base": _without_head(_model_of(cfg.base).module.init(cfg.base)), "score": score}


@checked
def specs(cfg: Config, *, model: Axis = None) -> Any:
    """Return the specs of the base, whose `specs` have the same arguments, and a replicated head.

    >>> specs(cfg, model="model")["score"]
    {'w': P()}
    """
    score = {"w": P(), "b": P()} if cfg.has_bias else {"w": P()}
    return {"base": _without_head(_model_of(cfg.base).module.specs(cfg.base, model=model)), "score": score}


def _without_head(params: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in params.items() if name != "head"}


@checked
def apply(
    cfg: Config, params: Any, ids: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None, key: Tensor | None = None,
    remat: bool = False, mask: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Return scores of the labels: ids [B@data, T] -> [B@data, L]{I model}, or [B@data, T, L] for tokens.

    The arguments are as in the base's `apply`, `options` the others that it has (BERT's `types`).

    >>> apply(cfg, params, ids).shape
    torch.Size([2, 2])

    Raises ShardingError for params that are not a tree of `heads.init`, and for a layout with `context`.
    """
    layout.refuse_context("heads")
    if not isinstance(params, Mapping) or "base" not in params:
        raise must_be("params", "a dict with 'base' and 'score'", params, fix="the tree of heads.init, or of load")
    base, base_specs = params["base"], None if specs is None else spec_of(specs, "base")
    x = _states(cfg.base, base, ids, layout=layout, specs=base_specs, key=key, remat=remat, mask=mask, **options)
    if cfg.task == "sequence" and isinstance(cfg.base, bert.Config):
        x = bert.pooled(cfg.base, base, x, layout=layout, specs=base_specs)
    elif cfg.task == "sequence":
        x = _at_last_token(x, None if cfg.pad_token_id is None else ids != cfg.pad_token_id)
    if cfg.dropout and key is not None:
        shape = layout.with_batch(ids, key, cfg.dropout).global_shape(x.shape)
        x = nn.dropout(x, cfg.dropout, key=fold_in(key, "score"), spec=P(layout.data), shape=shape)
    score = layout.unshard(("score",), params, specs, shapes_of(init, cfg))["score"]
    return flat_linear(x, score)


def _states(base: Any, params: Any, ids: Tensor, **options: Any) -> Tensor:
    module: Any = _model_of(base).module
    return (bert.apply if module is bert else module.states)(base, params, ids, **options)


def _at_last_token(x: Tensor, real: Tensor | None) -> Tensor:
    """Select the state of the last real token: x [B, T, D], real [B, T] -> [B, D]; of all padding, the first."""
    if not x.shape[1]:
        raise fail("heads: sequences without tokens have no last one", states=list(x.shape), fix="one token or more")
    if real is None:
        return x[:, -1]
    last = (real * torch.arange(real.shape[1], device=x.device)).argmax(1)
    return x[torch.arange(len(x), device=x.device), last]


@checked
def loss(
    cfg: Config, params: Any, ids: Tensor, targets: Tensor, *, layout: Layout = ONE_DEVICE, **options: Any
) -> Tensor:
    """Return the mean loss over the targets of all ranks: [] {I}; `options` as in `apply`.

    Classes are targets [B@data], or [B@data, T] for tokens, where -100 is ignored: cross-entropy in nats. Several
    classes at once are [B@data, L] of 0 and 1: binary cross-entropy. A regression has targets [B@data], or
    [B@data, L]: the mean square of differences.

    >>> round(loss(cfg, params, ids, torch.tensor([0, 1])).item(), 1)
    0.7

    Raises ShardingError for targets that are not one for each score.
    """
    scores = apply(cfg, params, ids, layout=layout, **options)
    n, kind = len(cfg.labels), cfg.problem_type
    if kind is None:
        classes = cfg.task == "tokens" or (n > 1 and not targets.is_floating_point())
        kind = _PROBLEMS[1] if classes else _PROBLEMS[0] if n == 1 else _PROBLEMS[2]
    if kind == "single_label_classification":
        return nn.cross_entropy(scores, targets, over=layout.data)
    if targets.numel() != scores.numel() or len(targets) != len(scores):
        raise fail(f"heads: the targets of a {kind} must have one entry for each score", got=list(targets.shape),
                   needed=list(scores.shape))  # fmt: skip
    wanted = targets.reshape(scores.shape).to(scores.dtype)
    each = (scores - wanted).square() if kind == "regression" else F.softplus(scores) - scores * wanted
    total, count = psum((each.sum(), torch.ones_like(each).sum()), layout.data)
    return total / count


@checked
def embed(
    cfg: Any, params: Any, ids: Tensor, *, mask: Tensor | None = None,
    pooling: Literal["mean", "first", "last"] = "mean", normalize: bool = True, **options: Any,
) -> Tensor:  # fmt: skip
    """Return sentence embeddings by a model: ids [B@data, T] -> [B@data, D]{I model}; `options` as of its `apply`.

    `cfg` and `params` are the model's, without a head. The states of tokens whose `mask` is not 0 are averaged, or that
    of the "first" of the sequence (BERT's "[CLS]") or of the "last" such token (decoders) is taken, and with
    `normalize` scaled to length 1. Source: Reimers & Gurevych, 2019, "Sentence-BERT".

    >>> embed(cfg.base, params["base"], ids).shape
    torch.Size([2, 16])
    """
    _model_of(cfg, "embed: cfg")
    x = _states(cfg, params, ids, mask=mask, **options)
    if pooling == "mean":
        x = bert.pool(x, mask)
    elif pooling == "first":
        x = x[:, 0]
    else:
        x = _at_last_token(x, None if mask is None else mask != 0)
    return F.normalize(x, dim=-1) if normalize else x


# --- Hugging Face files ---------------------------------------------------------------------------------------


@checked
def has_head(config: Mapping[str, Any]) -> bool:
    """Return True if a config.json describes one of these heads, by its `architectures`.

    >>> has_head({"model_type": "gpt2", "architectures": ["GPT2ForSequenceClassification"]})
    True
    """
    return str(config.get("model_type")) in _MODELS and _task_of(config) is not None


def _task_of(config: Mapping[str, Any]) -> Any:
    kinds = config.get("architectures")
    kind = str(kinds[0]) if isinstance(kinds, list) and kinds else ""
    return next((task for task, suffix in _TASKS.items() if kind.endswith(suffix)), None)


@checked
def theirs(path: tree.Path, cfg: Config) -> FileTensor:
    """Return the Hugging Face file tensor of the leaf at a path.

    >>> theirs(("score", "w"), Config(bert.Config(), "tokens"))
    FileTensor(name='classifier.weight', dims='l d -> d l', at=None)

    Raises ShardingError for a path at which the model has no leaf.
    """
    model = _model_of(cfg.base)
    if path[:1] == ("base",):
        found: FileTensor = model.module.theirs(path[1:])
        return found
    name = str(model.sequence if cfg.task == "sequence" else model.tokens)
    leaves = layer("score", name, "l d -> d l", "l")
    if tree.dotted(path) not in leaves:
        raise fail(f"theirs: the model has no leaf at the path {path!r}", fix="('base', ...), or ('score', 'w' or 'b')")
    return leaves[tree.dotted(path)].file


_MAX_LABELS = 1 << 20  # each has a name in the memory


@checked
def config(folder: StrPath) -> Config:
    """Read a `Config` from the `config.json` of a folder. Raises ShardingError for a folder without such a head.

    >>> heads.config("my-classifier").labels
    ('LABEL_0', 'LABEL_1')
    """
    raw = config_of(folder)
    if not has_head(raw):
        raise fail(
            f"{config_path(folder)}: has no head that is supported",
            model_type=raw.get("model_type"),
            architectures=raw.get("architectures"),
            fix=f"one of {', '.join(m.module.FILE.kind for m in _MODELS.values())}, and {' or '.join(_TASKS.values())}",
        )
    model, task, names = _MODELS[raw["model_type"]], _task_of(raw), raw.get("id2label")
    if names is None:
        count = raw.get("num_labels") or 2
        if type(count) is not int or not 0 < count <= _MAX_LABELS:
            raise fail(f"{config_path(folder)}: num_labels={count!r}", fix=f"1 to {_MAX_LABELS:,}")
        names = {i: f"LABEL_{i}" for i in range(count)}
    try:
        labels = tuple(str(names[i]) for i in sorted(names, key=int))
    except (TypeError, ValueError, LookupError) as e:
        raise fail(f"{config_path(folder)}: id2label={names!r}", fix='numbers and names: {"0": "bad"}') from e
    rate = raw.get("classifier_dropout")
    if rate is None:  # the defaults of transformers: BERT's own rate, and 0.1 for the tokens of decoders
        rate = raw.get("hidden_dropout_prob", 0.1) if model.module is bert else raw.get("hidden_dropout", 0.1)
    has_dropout = task == "tokens" or model.module is bert
    return Config(model.module.config(folder), task, labels, raw.get("problem_type"),
                  None if model.module is bert else raw.get("pad_token_id"), rate if has_dropout else 0.0)  # fmt: skip


@checked
def load(path: StrPath) -> tuple[Config, Any]:
    """Return the config and the described parameters of a folder written by `save_pretrained`; placing them reads them.

    >>> cfg, weights = heads.load("my-classifier")
    >>> params = fs.materialize(weights, heads.specs(cfg, model="model"), mesh, key=fs.key(0))

    Raises ShardingError listing every tensor that is missing, of another shape, or not part of the model.
    """
    cfg = config(path)
    file = _model_of(cfg.base).module.FILE
    return cfg, read(path, init(cfg), lambda p: theirs(p, cfg), prefix=file.prefix, ignored=file.ignored)


@checked
def save(
    path: StrPath, cfg: Config, params: Any, *, like: StrPath | None = None, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write a folder that `from_pretrained` reads, of the class of the head; `params` may be placed on a mesh.

    `like`: see `hf.save`.

    >>> heads.save("another-classifier", cfg, params)
    """
    model = _model_of(cfg.base)
    contents = {
        **model.module.FILE.file_config(cfg.base, _TASKS[cfg.task]),
        "id2label": {str(i): name for i, name in enumerate(cfg.labels)},
        "label2id": {name: i for i, name in enumerate(cfg.labels)},
        "problem_type": cfg.problem_type, "classifier_dropout": cfg.dropout,
    }  # fmt: skip
    if model.module is not bert:
        contents["pad_token_id"] = cfg.pad_token_id
    write(path, params, lambda p: theirs(p, cfg), config=contents, like=like,
          max_shard_bytes=max_shard_bytes, described=init(cfg))  # fmt: skip


__all__ = ["Config", "Layout", "apply", "config", "embed", "has_head", "init", "load", "loss", "save", "specs",
           "theirs"]  # fmt: skip
