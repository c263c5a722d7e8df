"""Rotary positions: queries and keys are turned by angles that grow with their position, so scores see distances.

Legend: B batch, H heads, T time, K head width, R the first dims of a head that are turned, in R/2 pairs.
Sources: Su et al., 2021, "RoFormer"; of each scaling, the function that computes it. Every formula is in the order of
operations of transformers' `modeling_rope_utils`, in float32, so that its results are the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fshard.errors import fail

Parameters = Mapping[str, Any]


def parameters(config: Parameters, *, theta: float = 10_000.0, partial: float = 1.0) -> dict[str, Any]:
    """The rotary part of a Hugging Face config, in the names of transformers 5, from those of any version.

    `theta` and `partial` stand in for a rope_theta and a partial_rotary_factor that the config lacks.

    >>> parameters({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    {'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 500000.0}
    """
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise fail(f"rope: {found!r} are no parameters", fix='names and values: {"rope_type": "default"}')
    given = dict(found)
    if nested := [key for key, value in given.items() if isinstance(value, Mapping)]:
        raise fail("rope: rotary positions that differ between layers", fix="one set of parameters for all layers",
                   rope_parameters=nested)  # fmt: skip
    old = given.pop("type", None)
    out = {"rope_type": given.pop("rope_type", None) or old or "default", **given}
    for name, otherwise in (("rope_theta", theta), ("partial_rotary_factor", partial)):
        if out.get(name) is None:
            out[name] = config.get(name) or otherwise
    if out["partial_rotary_factor"] == 1.0:
        del out["partial_rotary_factor"]
    if config.get("original_max_position_embeddings") and out["rope_type"] in ("llama3", "yarn", "longrope"):
        out["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return out


def frequencies(
    parameters: Parameters, width: int, longest: int, *, length: int | Tensor | None = None,
    device: torch.device | None = None,
) -> tuple[Tensor, float]:  # fmt: skip
    """(radians per position, f32[R/2]; the factor of cos and sin) for heads of `width` dims.

    `parameters` are rope_type, rope_theta and what the type needs, named as in transformers; R is `width` times their
    partial_rotary_factor, or all of it for "proportional", whose last pairs stand still. `longest` is
    max_position_embeddings. "dynamic" and "longrope" depend on the `length` of the sequence, an int or a 0-d integer
    tensor; without one they are those of a short sequence.

    >>> frequencies({"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}, 4, 2048)
    (tensor([0.5000, 0.0050]), 1.0)
    """
    kind = parameters.get("rope_type", "default")
    if kind not in _KINDS:
        raise fail(f"rope: the rope_type {kind!r} is not known", fix=f"one of {list(_KINDS)}")
    needs, compute = _KINDS[kind]
    if missing := [name for name in ("rope_theta", *needs) if parameters.get(name) is None]:
        raise fail(f"rope: {kind} needs {missing}", parameters=dict(parameters))
    partial = parameters.get("partial_rotary_factor", 1.0)
    r = int(width * partial)
    if r < 2 or r % 2 or r > width:
        raise fail(f"rope: {r} dims of a head cannot be turned in pairs", width=width, partial_rotary_factor=partial)
    return compute(parameters, width if kind == "proportional" else r, longest, length, device)


def angles(
    positions: Tensor, rates: Tensor, factor: float = 1.0, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """The cos and sin to turn by, from positions [T] or [B, T] and `frequencies`: each [T, R/2] or [B, T, R/2].

    Computed in float32 and rounded once to `dtype`, that of the activations.

    >>> angles(torch.arange(2), torch.tensor([1.0]))
    (tensor([[1.0000],
            [0.5403]]), tensor([[0.0000],
            [0.8415]]))
    """
    turned = positions.unsqueeze(-1).float() * rates
    return (turned.cos() * factor).to(dtype), (turned.sin() * factor).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, style: Literal["half", "pairs"] = "half") -> Tensor:
    """Turn the first R dims of every head: x [B, H, T, K], cos and sin as `angles` gives them -> [B, H, T, K].

    "half" pairs dim i with dim i + R/2 (Llama, GPT-NeoX), "pairs" dim 2i with dim 2i + 1 (GPT-J, the paper). The
    transpose turns back.

    >>> rotate(torch.tensor([[[[1.0, 0.0, 7.0]]]]), torch.zeros(1, 1), torch.ones(1, 1))
    tensor([[[[0., 1., 7.]]]])
    """
    r = 2 * cos.shape[-1]
    if r > x.shape[-1]:
        raise fail(f"rope: {r} dims are to be turned, a head has {x.shape[-1]}", x=list(x.shape), cos=list(cos.shape))
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [B, 1, T, R/2]
    some = x[..., :r]
    a, b = some.chunk(2, -1) if style == "half" else (some[..., ::2], some[..., 1::2])
    a, b = a * cos - b * sin, b * cos + a * sin
    out = torch.cat([a, b], -1) if style == "half" else torch.stack([a, b], -1).flatten(-2)
    return out if r == x.shape[-1] else torch.cat([out, x[..., r:]], -1)


# --- the types: (parameters, R, longest, length, device) -> (frequencies, factor) ------------------------------

_Kind = Callable[[Parameters, int, int, "int | Tensor | None", "torch.device | None"], tuple[Tensor, float]]


def _powers(base: float | Tensor, r: int, device: torch.device | None, *, turned: int | None = None) -> Tensor:
    """base^(2i / r), for the first `turned` dims or all r."""
    powers: Tensor = base ** (torch.arange(0, r if turned is None else turned, 2, device=device).float() / r)
    return powers


def _default(p: Parameters, r: int, longest: int, length: Any, device: torch.device | None) -> tuple[Tensor, float]:
    return 1.0 / _powers(p["rope_theta"], r, device), 1.0


def _linear(p: Parameters, r: int, longest: int, length: Any, device: torch.device | None) -> tuple[Tensor, float]:
    """Positions divided by a factor. Source: Chen et al., 2023, "Position interpolation"."""
    return 1.0 / _powers(p["rope_theta"], r, device) / p["factor"], 1.0


def _proportional(
    p: Parameters, width: int, longest: int, length: Any, device: torch.device | None
) -> tuple[Tensor, float]:
    """All dims are paired, and the slowest pairs stand still. Source: transformers, for Gemma 4."""
    turned = int(p.get("partial_rotary_factor", 1.0) * width // 2)
    rates = 1.0 / _powers(p["rope_theta"], width, device, turned=2 * turned)
    return torch.cat([rates, rates.new_zeros(width // 2 - turned)]) / p.get("factor", 1.0), 1.0


def _dynamic(p: Parameters, r: int, longest: int, length: Any, device: torch.device | None) -> tuple[Tensor, float]:
    """A base that grows with sequences longer than `longest`. Source: bloc97 and emozilla, 2023, "NTK-aware"."""
    factor, power = p["factor"], r / (r - 2) if r > 2 else math.inf
    if r == 2:
        raise fail("rope: dynamic needs more than one pair of dims to turn", R=r)

    def grown(length: Any) -> Any:
        return p["rope_theta"] * (factor * length / longest - (factor - 1)) ** power

    short = 1.0 / _powers(grown(longest), r, device)
    if length is None:
        return short, 1.0
    length = torch.as_tensor(length, device=device)
    long = 1.0 / _powers(grown(length.clamp(min=longest).float()), r, device)
    return torch.where(length > longest, long, short), 1.0


def _longrope(p: Parameters, r: int, longest: int, length: Any, device: torch.device | None) -> tuple[Tensor, float]:
    """A divisor for each pair, others for sequences longer than in training. Source: Ding et al., 2024, "LongRoPE"."""
    original = p.get("original_max_position_embeddings") or longest
    for name in ("short_factor", "long_factor"):
        if len(p[name]) != r // 2:
            raise fail(f"rope: {name} must have one entry for each pair of dims", got=len(p[name]), expected=r // 2)
    divisors = (torch.tensor(p[name], dtype=torch.float32, device=device) for name in ("short_factor", "long_factor"))
    short, long = (1.0 / (divisor * _powers(p["rope_theta"], r, device)) for divisor in divisors)
    stretch = longest / original if p.get("factor") is None else p["factor"]
    factor = p.get("attention_factor")
    if factor is None:
        factor = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
    if length is None:
        return short, factor
    return torch.where(torch.as_tensor(length, device=device) > original, long, short), factor


def _yarn(p: Parameters, r: int, longest: int, length: Any, device: torch.device | None) -> tuple[Tensor, float]:
    """Slow pairs as in `_linear`, fast ones as they are, a ramp between. Source: Peng et al., 2023, "YaRN"."""
    base = p["rope_theta"]
    original = p.get("original_max_position_embeddings") or longest
    stretch = longest / original if p.get("factor") is None else p["factor"]
    factor = p.get("attention_factor")
    if factor is None:
        top, all_dims = p.get("mscale"), p.get("mscale_all_dim")
        factor = _temperature(stretch, top if top and all_dims else 1)
        factor = factor / _temperature(stretch, all_dims) if top and all_dims else factor

    def pair(turns: float) -> float:
        """Which pair makes so many turns in the original length."""
        return (r * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(base))

    low, high = pair(p.get("beta_fast") or 32), pair(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, r - 1)
    width = high - low if low != high else high + 0.001 - low
    powers = _powers(base, r, device)
    ramp = ((torch.arange(r // 2, dtype=torch.float32, device=device) - low) / width).clamp(0, 1)
    fast = 1 - ramp
    return 1.0 / (stretch * powers) * (1 - fast) + 1.0 / powers * fast, factor


def _temperature(stretch: float, scale: float) -> float:
    return 1.0 if stretch <= 1 else 0.1 * scale * math.log(stretch) + 1.0


def _llama3(p: Parameters, r: int, longest: int, length: Any, device: torch.device | None) -> tuple[Tensor, float]:
    """Long waves divided by a factor, short ones as they are. Source: Llama 3.1, Grattafiori et al., 2024."""
    rates = 1.0 / _powers(p["rope_theta"], r, device)
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    original = p.get("original_max_position_embeddings") or longest
    wave = 2 * math.pi / rates
    smooth = (original / wave - low) / (high - low)
    between = (1 - smooth) * rates / factor + smooth * rates
    scaled = torch.where(wave > original / low, rates / factor, rates)
    return torch.where((wave < original / high) | (wave > original / low), scaled, between), 1.0


_KINDS: dict[str, tuple[tuple[str, ...], _Kind]] = {
    "default": ((), _default),
    "linear": (("factor",), _linear),
    "dynamic": (("factor",), _dynamic),
    "yarn": ((), _yarn),
    "longrope": (("short_factor", "long_factor"), _longrope),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), _llama3),
    "proportional": ((), _proportional),
}

__all__ = ["angles", "frequencies", "parameters", "rotate"]
