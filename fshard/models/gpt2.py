"""GPT-2 as pure functions, with tensor, sequence and vocabulary parallelism, and fully sharded by its specs.

Legend: B batch, T time, D width, H heads, K head width, F 4D, V vocabulary; [H@model] is a dim split over an axis.
Source: Radford et al., 2019; weights as in Hugging Face `GPT2LMHeadModel`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fshard import init as initial
from fshard import nn, tree
from fshard.collectives import Axis, all_gather, axis_size, pslice, psum, psum_scatter, pvary, unshard
from fshard.errors import fail, raise_all
from fshard.keys import fold_in
from fshard.spec import P
from fshard.transforms import remat as rematerialize


@dataclass(frozen=True)
class Config:
    """Sizes and rates, named as in Hugging Face's `GPT2Config`. The head is tied to the token embedding."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    embd_pdrop: float = 0.0
    attn_pdrop: float = 0.0
    resid_pdrop: float = 0.0
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        if self.n_embd % self.n_head:
            raise fail("gpt2.Config: the heads must divide the width", f"{self.n_embd} % {self.n_head} = "
                       f"{self.n_embd % self.n_head}", n_embd=self.n_embd, n_head=self.n_head)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """The mesh axes each part is split over; `None` leaves it whole.

    `data`: the batch. `model`: heads, hidden units and the vocabulary. `sequence`: also split the residual stream
    along time over `model`, between the blocks' halves.
    """

    data: Axis = None
    model: Axis = None
    sequence: bool = False

    @property
    def stream(self) -> P:
        """The spec of the residual stream, [B, T, D]."""
        return P(self.data, self.model if self.sequence else None)


ONE_DEVICE = Layout()


def init(cfg: Config) -> Any:
    """The described parameters. Projections into the residual stream are drawn with std / sqrt(2 n_layer)."""
    d, h, k, f = cfg.n_embd, cfg.n_head, cfg.n_embd // cfg.n_head, 4 * cfg.n_embd
    std, residual = cfg.initializer_range, cfg.initializer_range / math.sqrt(2 * cfg.n_layer)

    def norm() -> Any:
        return {"w": initial.ones(d), "b": initial.zeros(d)}

    def block() -> Any:
        return {
            "ln_1": norm(),
            "qkv": {"w": initial.normal((d, 3, h, k), std=std), "b": initial.zeros((3, h, k))},
            "proj": {"w": initial.normal((h, k, d), std=residual), "b": initial.zeros(d)},
            "ln_2": norm(),
            "up": {"w": initial.normal((d, f), std=std), "b": initial.zeros(f)},
            "down": {"w": initial.normal((f, d), std=residual), "b": initial.zeros(d)},
        }

    return {
        "wte": initial.normal((cfg.vocab_size, d), std=std),
        "wpe": initial.normal((cfg.n_positions, d), std=std),
        "h": [block() for _ in range(cfg.n_layer)],
        "ln_f": norm(),
    }


def specs(cfg: Config, *, model: Axis = None) -> Any:
    """Heads, hidden units and the vocabulary over `model`; the rest replicated. `fs.fully_shard` adds a data axis."""
    m = model
    block = {
        "ln_1": P(),
        "qkv": {"w": P(None, None, m), "b": P(None, m)},
        "proj": {"w": P(m), "b": P()},
        "ln_2": P(),
        "up": {"w": P(None, m), "b": P(m)},
        "down": {"w": P(m), "b": P()},
    }
    return {"wte": P(m), "wpe": P(), "h": [block] * cfg.n_layer, "ln_f": P()}


def apply(
    cfg: Config, params: Any, ids: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None, key: Tensor | None = None,
    remat: bool = False,
) -> Tensor:  # fmt: skip
    """Logits of the next token: ids [B@data, T] -> [B@data, T, V@model].

    `params` are as placed; give their `specs` where they vary over `layout.data` or are split over it (FSDP): each
    block is then unsharded just before its use. `key` turns dropout on; `remat` recomputes blocks in backward.
    """
    if ids.shape[-1] > cfg.n_positions:
        raise fail(f"gpt2: {ids.shape[-1]} tokens do not fit {cfg.n_positions} positions", fix="a larger n_positions")
    described = init(cfg)

    def whole(name: str, params: Any) -> Any:
        if specs is None:
            return pvary(params, layout.data)
        return unshard(params, specs[name], layout.data, shapes=described[name])

    m, t = layout.model, ids.shape[-1]
    wte, wpe = whole("wte", params["wte"]), whole("wpe", params["wpe"])
    tokens = nn.embedding(ids if m is None else pvary(ids, m), wte, axis=m, size=cfg.vocab_size)  # [B, T, D]{V model}
    # [B, T@model, D] under sequence parallelism
    x = psum_scatter(tokens, m, 1) + pslice(wpe[:t], m) if layout.sequence else psum(tokens, m) + wpe[:t]
    x = _dropout(x, cfg.embd_pdrop, layout, key, "embd", t)

    block_specs = specs["h"] if specs is not None else [None] * cfg.n_layer
    for i, (p, spec) in enumerate(zip(params["h"], block_specs, strict=True)):
        block_key = None if key is None else fold_in(key, i)

        def block(p: Any, x: Tensor, key: Tensor | None, spec: Any = spec) -> Tensor:
            full = pvary(p, layout.data) if spec is None else unshard(p, spec, layout.data, shapes=described["h"][0])
            return _block(cfg, full, x, layout, key, t)

        x = (rematerialize(block) if remat else block)(p, x, block_key)

    x = _norm(cfg, x, whole("ln_f", params["ln_f"]), layout)
    x = _enter(x, layout, t)
    return nn.linear(x, wte.transpose(0, 1))  # [B, T, V@model]


def _block(cfg: Config, p: Any, x: Tensor, layout: Layout, key: Tensor | None, t: int) -> Tensor:
    """x + attention(norm(x)), then x + mlp(norm(x)); x [B, T, D]{I model}, or [B, T@model, D]."""
    h = _enter(_norm(cfg, x, p["ln_1"], layout), layout, t)
    q, k, v = _heads(h, p["qkv"]["w"], p["qkv"]["b"])  # each [B, H@model, T, K]
    a = nn.attention(q, k, v, causal=True, rate=cfg.attn_pdrop, key=_sub(key, "attn"),
                     spec=P(layout.data, layout.model),
                     shape=_global(layout, (x.shape[0], cfg.n_head, t, t)))  # fmt: skip
    a = a.transpose(1, 2).flatten(2)  # [B, T, HK@model]
    a = _leave(nn.linear(a, p["proj"]["w"].flatten(0, 1)), layout) + _shared(p["proj"]["b"], layout)
    x = x + _dropout(a, cfg.resid_pdrop, layout, key, "proj", t)

    h = _enter(_norm(cfg, x, p["ln_2"], layout), layout, t)
    h = nn.gelu(nn.linear(h, p["up"]["w"], p["up"]["b"]))  # [B, T, F@model]
    h = _leave(nn.linear(h, p["down"]["w"]), layout) + _shared(p["down"]["b"], layout)
    return x + _dropout(h, cfg.resid_pdrop, layout, key, "down", t)


def _heads(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """[B, T, D] -> q, k, v, each [B, H, T, K]."""
    three, heads, k = w.shape[1:]
    flat = nn.linear(h, w.flatten(1), b.flatten())  # [B, T, 3HK]
    qkv: Tensor = flat.unflatten(-1, (three, heads, k))  # type: ignore[no-untyped-call]
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


def _norm(cfg: Config, x: Tensor, p: Any, layout: Layout) -> Tensor:
    p = _shared(p, layout)
    return nn.layer_norm(x, p["w"], p["b"], eps=cfg.layer_norm_epsilon)


def _shared(p: Any, layout: Layout) -> Any:
    """A replicated parameter of the residual stream: under sequence parallelism each rank uses it on its own part."""
    return pvary(p, layout.model) if layout.sequence else p


def _enter(x: Tensor, layout: Layout, t: int) -> Tensor:
    """From the residual stream into a part split over model: [B, T, D]{V model}."""
    out: Tensor = all_gather(x, layout.model, 1, size=t) if layout.sequence else pvary(x, layout.model)
    return out


def _leave(x: Tensor, layout: Layout) -> Tensor:
    """The sum of the ranks' partial results, back in the residual stream."""
    out: Tensor = psum_scatter(x, layout.model, 1) if layout.sequence else psum(x, layout.model)
    return out


def _sub(key: Tensor | None, name: str) -> Tensor | None:
    return None if key is None else fold_in(key, name)


def _dropout(x: Tensor, rate: float, layout: Layout, key: Tensor | None, name: str, t: int) -> Tensor:
    if not rate or key is None:
        return x
    shape = _global(layout, (x.shape[0], t, x.shape[2]))
    return nn.dropout(x, rate, key=fold_in(key, name), spec=layout.stream, shape=shape)


def _global(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape whose dim 0 is this rank's batch, as a global one; the data axes must divide the batch."""
    return (shape[0] * axis_size(layout.data), *shape[1:]) if layout.data else shape


def loss(
    cfg: Config, params: Any, ids: Tensor, targets: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None,
    key: Tensor | None = None, remat: bool = False,
) -> Tensor:  # fmt: skip
    """Mean cross-entropy in nats over all targets of all ranks: [] {I}. Targets of -100 count nothing."""
    logits = apply(cfg, params, ids, layout=layout, specs=specs, key=key, remat=remat)
    return nn.cross_entropy(logits, targets, axis=layout.model, size=cfg.vocab_size, over=layout.data)


# --- Hugging Face files ---------------------------------------------------------------------------------------

_NAMES = {
    "ln_1.w": "ln_1.weight", "ln_1.b": "ln_1.bias", "qkv.w": "attn.c_attn.weight", "qkv.b": "attn.c_attn.bias",
    "proj.w": "attn.c_proj.weight", "proj.b": "attn.c_proj.bias", "ln_2.w": "ln_2.weight", "ln_2.b": "ln_2.bias",
    "up.w": "mlp.c_fc.weight", "up.b": "mlp.c_fc.bias", "down.w": "mlp.c_proj.weight", "down.b": "mlp.c_proj.bias",
}  # fmt: skip


def _their_name(path: tree.Path) -> str:
    """Our path as a name in a Hugging Face file."""
    if path[0] == "h":
        return f"transformer.h.{path[1]}.{_NAMES[tree.dotted(path[2:])]}"
    last = {"w": "weight", "b": "bias"}
    rest = [last[p] for p in path[1:]] or ["weight"]  # the embeddings are leaves themselves
    return ".".join(["transformer", str(path[0]), *rest])


def load(path: str | Path) -> tuple[Config, Any]:
    """The config and the parameters, as CPU tensors, of a folder written by `save_pretrained` (safetensors only).

    >>> cfg, weights = gpt2.load("my-gpt2")
    >>> params = fs.materialize(weights, gpt2.specs(cfg, model="model"), mesh, key=fs.key(0))

    Raises ShardingError listing every tensor that is missing, of another shape, or not a GPT-2's.
    """
    folder = Path(path)
    given = json.loads(_must_exist(folder / "config.json").read_text())
    if given.get("model_type") != "gpt2" or given.get("tie_word_embeddings") is False:
        raise fail(f"{folder / 'config.json'}: not a GPT-2 with a tied head", fix="convert it, or use its own model",
                   model_type=given.get("model_type"),
                   tie_word_embeddings=given.get("tie_word_embeddings", True))  # fmt: skip
    cfg = Config(**{k: given[k] for k in Config.__dataclass_fields__ if k in given})
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found: dict[str, tuple[Path, str, list[int]]] = {}
    for name in names:
        with safe_open(_must_exist(folder / name), "pt") as file:
            for full in file.keys():  # noqa: SIM118
                bare = full if full.startswith(("transformer.", "lm_head.")) else f"transformer.{full}"
                found[bare] = (folder / name, full, file.get_slice(full).get_shape())
    described = tree.leaves_with_path(init(cfg))
    _check_names(folder, found, {_their_name(p): _their_shape(p, d.shape) for p, d in described})
    tensors = []
    for p, leaf in described:
        where, full, _ = found[_their_name(p)]
        with safe_open(where, "pt") as file:
            tensors.append(file.get_tensor(full).view(leaf.shape))
    return cfg, tree.unflatten(tree.structure(init(cfg)), tensors)


def save(path: str | Path, cfg: Config, params: Any) -> None:
    """Write a folder that `GPT2LMHeadModel.from_pretrained` reads; `params` are full CPU tensors (`fs.device_get`)."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    described = tree.leaves_with_path(params)
    tensors = {_their_name(p): x.reshape(_their_shape(p, x.shape)).contiguous() for p, x in described}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    theirs = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new"}
    config = {**theirs, **asdict(cfg)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _their_shape(path: tree.Path, shape: Any) -> tuple[int, ...]:
    """[D, 3, H, K] and [H, K, D] are matrices there; [3, H, K] a vector."""
    if "qkv" in path:
        return (shape[0], math.prod(shape[1:])) if path[-1] == "w" else (math.prod(shape),)
    return (shape[0] * shape[1], shape[2]) if "proj" in path and path[-1] == "w" else tuple(shape)


def _check_names(
    folder: Path, found: dict[str, tuple[Path, str, list[int]]], wanted: dict[str, tuple[int, ...]]
) -> None:
    ignored = ("lm_head.weight", ".attn.bias", ".attn.masked_bias")  # the tied head, and buffers of older versions
    errors = [fail(f"{folder}: {n!r} is missing") for n in wanted if n not in found]
    errors += [fail(f"{folder}: {n!r} is not part of a GPT-2")
               for n in found if n not in wanted and not n.endswith(ignored)]  # fmt: skip
    errors += [fail(f"{folder}: {n!r} has another shape", got=found[n][2], expected=list(shape))
               for n, shape in wanted.items() if n in found and tuple(found[n][2]) != shape]  # fmt: skip
    raise_all(errors)


def _must_exist(path: Path) -> Path:
    if not path.is_file():
        raise fail(f"{path}: there is no such file",
                   fix="a folder with config.json and model.safetensors; pickles are refused")  # fmt: skip
    return path


__all__ = ["Config", "Layout", "apply", "init", "load", "loss", "save", "specs"]
