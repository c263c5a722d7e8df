"""GPT-2 as pure functions, with tensor, sequence and vocabulary parallelism, and fully sharded by its specs.

Legend: B batch, T time, D width, H heads, K head width, F 4D, V vocabulary; [H@model] is a dim split over an axis.
Source: Radford et al., 2019; weights as in Hugging Face `GPT2LMHeadModel`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fshard import init as initial
from fshard import nn, tree
from fshard.collectives import Axis
from fshard.errors import fail, raise_all
from fshard.spec import P

from .decoding import Cache, Seen, Tokens
from .decoding import generate as decode
from .stream import ONE_DEVICE, Layout, attend, through


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
    remat: bool = False, mask: Tensor | None = None, cache: Cache | None = None,
) -> Any:  # fmt: skip
    """Logits of the next token: ids [B@data, T] -> [B@data, T, V@model]; with a `cache`, (logits, the cache after).

    `params` are as placed; give their `specs` where they vary over `layout.data` or are split over it (FSDP): each
    block is then unsharded just before its use. `key` turns dropout on; `remat` recomputes blocks in backward.
    `mask` [B@data, T] is 0 where ids are padding; with a cache it counts the tokens in there too.
    """
    tokens = Tokens.of(ids, mask, cache)
    if tokens.start + tokens.t > cfg.n_positions:
        raise fail(f"gpt2: {tokens.start + tokens.t} tokens do not fit {cfg.n_positions} positions",
                   fix="a larger n_positions")  # fmt: skip
    described = init(cfg)
    top = {name: layout.whole(params[name], None if specs is None else specs[name], described[name])
           for name in ("wte", "wpe", "ln_f")}  # fmt: skip

    t = tokens.t
    x = layout.tokens(ids, top["wte"], cfg.vocab_size)  # [B, T, D], or [B, T@model, D] under sequence parallelism
    x = x + layout.part(top["wpe"][tokens.positions], tokens.positions.ndim - 1)
    x = layout.dropout(x, cfg.embd_pdrop, key, "embd", t)

    def block(p: Any, x: Tensor, key: Tensor | None, seen: Seen | None) -> tuple[Tensor, Seen | None]:
        return _block(cfg, p, x, layout, key, tokens, seen)

    x, seen = through(block, params["h"], x, layout=layout, shapes=described["h"], key=key, remat=remat, cache=cache,
                      specs=None if specs is None else specs["h"])  # fmt: skip
    x = layout.enter(_norm(cfg, x, top["ln_f"], layout), t)
    logits = nn.linear(x, top["wte"].transpose(0, 1))  # [B, T, V@model]
    return logits if cache is None else (logits, cache.after(seen, t))


def _block(
    cfg: Config, p: Any, x: Tensor, layout: Layout, key: Tensor | None, tokens: Tokens, seen: Seen | None
) -> tuple[Tensor, Seen | None]:
    """x + attention(norm(x)), then x + mlp(norm(x)); x [B, T, D]{I model}, or [B, T@model, D]."""
    t = tokens.t
    h = layout.enter(_norm(cfg, x, p["ln_1"], layout), t)
    q, k, v = _heads(h, p["qkv"]["w"], p["qkv"]["b"])  # each [B, H@model, T, K]
    a, seen = attend(q, k, v, tokens, seen, layout=layout, rate=cfg.attn_pdrop, key=key, heads=cfg.n_head)
    a = layout.leave(nn.linear(a, p["proj"]["w"].flatten(0, 1))) + layout.shared(p["proj"]["b"])
    x = x + layout.dropout(a, cfg.resid_pdrop, key, "proj", t)

    h = layout.enter(_norm(cfg, x, p["ln_2"], layout), t)
    h = nn.gelu(nn.linear(h, p["up"]["w"], p["up"]["b"]))  # [B, T, F@model]
    h = layout.leave(nn.linear(h, p["down"]["w"])) + layout.shared(p["down"]["b"])
    return x + layout.dropout(h, cfg.resid_pdrop, key, "down", t), seen


def _heads(h: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """[B, T, D] -> q, k, v, each [B, H, T, K]."""
    three, heads, k = w.shape[1:]
    flat = nn.linear(h, w.flatten(1), b.flatten())  # [B, T, 3HK]
    qkv: Tensor = flat.unflatten(-1, (three, heads, k))  # type: ignore[no-untyped-call]
    return qkv.permute(2, 0, 3, 1, 4).unbind(0)


def _norm(cfg: Config, x: Tensor, p: Any, layout: Layout) -> Tensor:
    p = layout.shared(p)
    return nn.layer_norm(x, p["w"], p["b"], eps=cfg.layer_norm_epsilon)


def loss(
    cfg: Config, params: Any, ids: Tensor, targets: Tensor, *, layout: Layout = ONE_DEVICE, specs: Any = None,
    key: Tensor | None = None, remat: bool = False, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Mean cross-entropy in nats over all targets of all ranks: [] {I}. Targets of -100 count nothing."""
    logits = apply(cfg, params, ids, layout=layout, specs=specs, key=key, remat=remat, mask=mask)
    return nn.cross_entropy(logits, targets, axis=layout.model, size=cfg.vocab_size, over=layout.data)


def generate(
    cfg: Config, params: Any, ids: Tensor, *, new: int, layout: Layout = ONE_DEVICE, specs: Any = None,
    mask: Tensor | None = None, eos: int | None = None, pad: int | None = None, temperature: float = 0.0,
    key: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`new` more tokens: ids [B@data, T] -> [B@data, T + new]; see `decoding.generate`. Called inside `shard_map`."""
    layout = replace(layout, sequence=False)  # one token has no sequence to split

    def step(ids: Tensor, mask: Tensor | None, cache: Cache) -> Any:
        return apply(cfg, params, ids, layout=layout, specs=specs, mask=mask, cache=cache)

    return decode(step, ids, new=new, size=cfg.vocab_size, data=layout.data, model=layout.model, mask=mask, eos=eos,
                  pad=pad, temperature=temperature, key=key)  # fmt: skip


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


__all__ = ["Cache", "Config", "Layout", "apply", "generate", "init", "load", "loss", "save", "specs"]
