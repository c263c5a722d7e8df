"""Rotary position embeddings (RoPE): rotate queries and keys by their positions, so that scores depend on distances.

Legend: B batch, H heads, T time, K head width, R the first dims of a head, which are rotated in R/2 pairs.
Sources: Su et al., 2021, "RoFormer"; for each scaling, the docstring of its function. Every formula keeps the order of
operations of transformers' `modeling_rope_utils`, in float32, so that its results are the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from fshard.errors import checked, fail, must_be

Parameters = Mapping[str, Any]


_MAX_WIDTH = 1 << 16  # the frequencies of a wrong config would fill the memory


@checked
def parameters(config: Parameters, *, theta: float = 10_000.0, partial: float = 1.0) -> dict[str, Any]:
    """Extract the rotary parameters of a Hugging Face config of any version, with the names of transformers 5.

    `theta` and `partial` are the defaults of rope_theta and partial_rotary_factor.

    >>> parameters({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    {'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 500000.0}
    """
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise fail(f"rope: {scaling!r} is not a dict of parameters", fix='names and values: {"rope_type": "default"}')
    scaling = dict(scaling)
    if nested := [key for key, value in scaling.items() if isinstance(value, Mapping)]:
        raise fail("rope: parameters that differ between layers", fix="one set of parameters for all layers",
                   rope_parameters=nested)  # fmt: skip
    old_type = scaling.pop("type", None)
    out = {"rope_type": scaling.pop("rope_type", None) or old_type or "default", **scaling}
    for name, default in (("rope_theta", theta), ("partial_rotary_factor", partial)):
        if out.get(name) is None:
            out[name] = config.get(name) or default
    if out["partial_rotary_factor"] == 1.0:
        del out["partial_rotary_factor"]
    if config.get("original_max_position_embeddings") and out["rope_type"] in ("llama3", "yarn", "longrope"):
        out["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    return out


@checked
def frequencies(
    parameters: Parameters, width: int, longest: int, *, length: int | Tensor | None = None,
    device: torch.device | None = None,
) -> tuple[Tensor, float]:  # fmt: skip
    """Compute (radians per position f32[R/2], factor of cos and sin) for heads of `width` dims.

    `parameters` are rope_type, rope_theta and the parameters of the type, named as in transformers; R is `width` times
    their partial_rotary_factor, or `width` for "proportional", whose last pairs have frequency 0. `longest` is
    max_position_embeddings. "dynamic" and "longrope" depend on the `length` of the sequence, an int or a 0-d integer
    tensor; without it the sequence is taken as short.

    >>> frequencies({"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}, 4, 2048)
    (tensor([0.5000, 0.0050]), 1.0)
    """
    kind = parameters.get("rope_type", "default")
    if kind not in _KINDS:
        raise fail(f"rope: unknown rope_type {kind!r}", fix=f"one of {list(_KINDS)}")
    needs, compute = _KINDS[kind]
    if missing := [name for name in ("rope_theta", *needs) if parameters.get(name) is None]:
        raise fail(f"rope: {kind} needs {missing}", parameters=dict(parameters))
    partial = parameters.get("partial_rotary_factor", 1.0)
    numbers = {name: parameters[name] for name in ("rope_theta", *needs)}
    for name, x in {**numbers, "partial_rotary_factor": partial}.items():
        if isinstance(x, (str, bool)) or not isinstance(x, (int, float, list, tuple)):
            raise must_be(f"frequencies: parameters[{name!r}]", "a number", x)
    r = int(width * partial)
    if r < 2 or r % 2 or r > min(width, _MAX_WIDTH):
        raise fail(f"rope: cannot rotate {r} dims of a head in pairs", width=width, partial_rotary_factor=partial)
    return compute(parameters, width if kind == "proportional" else r, longest, length, device)


@checked
def angles(
    positions: Tensor, rates: Tensor, factor: float = 1.0, *, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Compute the cos and sin of the rotation at positions [T] or [B, T]: each [T, R/2] or [B, T, R/2].

    `rates` and `factor` are results of `frequencies`. Computed in float32 and rounded once to `dtype`.

    >>> angles(torch.arange(2), torch.tensor([1.0]))
    (tensor([[1.0000],
            [0.5403]]), tensor([[0.0000],
            [0.8415]]))
    """
    radians = positions.unsqueeze(-1).float() * rates
    return (radians.cos() * factor).to(dtype), (radians.sin() * factor).to(dtype)


@checked
def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, style: Literal["half", "pairs"] = "half") -> Tensor:
    """Rotate the first R dims of every head: x [B, H, T, K], cos and sin of `angles` -> [B, H, T, K].

    "half" pairs dim i with dim i + R/2 (Llama, GPT-NeoX), "pairs" dim 2i with dim 2i + 1 (GPT-J, the paper). The
    transpose is the inverse rotation.

    >>> rotate(torch.tensor([[[[1.0, 0.0, 7.0]]]]), torch.zeros(1, 1), torch.ones(1, 1))
    tensor([[[[0., 1., 7.]]]])
    """
    if not x.ndim or not cos.ndim or cos.shape != sin.shape:
        raise fail("rotate: cos and sin must be of angles, of one shape", x=list(x.shape), cos=list(cos.shape),
                   sin=list(sin.shape))  # fmt: skip
    r = 2 * cos.shape[-1]
    if r > x.shape[-1]:
        raise fail(f"rope: cannot rotate {r} dims of a head of {x.shape[-1]}", x=list(x.shape), cos=list(cos.shape))
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [B, 1, T, R/2]
    first = x[..., :r]
    a, b = first.chunk(2, -1) if style == "half" else (first[..., ::2], first[..., 1::2])
    a, b = a * cos - b * sin, b * cos + a * sin
    out = torch.cat([a, b], -1) if style == "half" else torch.stack([a, b], -1).flatten(-2)
    return out if r == x.shape[-1] else torch.cat([out, x[..., r:]], -1)


# --- the types: (parameters, R, longest, length, device) -> (frequencies, factor) ------------------------------

_Kind = Callable[[Parameters, int, int, "int | Tensor | None", "torch.device | None"], tuple[Tensor, float]]


def _powers(base: float | Tensor, r: int, device: torch.device | None, *, rotated: int | None = None) -> Tensor:
    """Compute base^(2i / r) for the first `rotated` dims or all r."""
    powers: Tensor = base ** (torch.arange(0, r if rotated is None else rotated, 2, device=device).float() / r)
    return powers


def _default(p: Parameters, r: int, longest: int, length: Any, device: torch.device | None) -> tuple[Tensor, float]:
    return 1.0 / _powers(p["rope_theta"], r, device), 1.0


def _linear(p: Parameters, r: int, longest: int, length: Any, device: torch.device | None) -> tuple[Tensor, float]:
    """Divide positions by a factor. Source: Chen et al., 2023, "Position interpolation"."""
    return 1.0 / _powers(p["rope_theta"], r, device) / p["factor"], 1.0


def _proportional(
    p: Parameters, width: int, longest: int, length: Any, device: torch.device | None
) -> tuple[Tensor, float]:
    """Pair all dims, and rotate only the fastest pairs. Source: transformers, for Gemma 4."""
    pairs = int(p.get("partial_rotary_factor", 1.0) * width // 2)
    rates = 1.0 / _powers(p["rope_theta"], width, device, rotated=2 * pairs)
    return torch.cat([rates, rates.new_zeros(width // 2 - pairs)]) / p.get("factor", 1.0), 1.0


def _dynamic(p: Parameters, r: int, longest: int, length: Any, device: torch.device | None) -> tuple[Tensor, float]:
    """Scale the base with sequences longer than `longest`. Source: bloc97 and emozilla, 2023, "NTK-aware"."""
    if r == 2:
        raise fail("rope: dynamic needs more than one pair of dims", R=r)
    factor, power = p["factor"], r / (r - 2)

    def scaled_base(length: Any) -> Any:
        return p["rope_theta"] * (factor * length / longest - (factor - 1)) ** power

    short = 1.0 / _powers(scaled_base(longest), r, device)
    if length is None:
        return short, 1.0
    length = torch.as_tensor(length, device=device)
    long = 1.0 / _powers(scaled_base(length.clamp(min=longest).float()), r, device)
    return torch.where(length > longest, long, short), 1.0


def _longrope(p: Parameters, r: int, longest: int, length: Any, device: torch.device | None) -> tuple[Tensor, float]:
    """Divide each pair's frequency by its short factor, or its long factor for sequences longer than in training.

    Source: Ding et al., 2024, "LongRoPE".
    """
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
    """Divide the frequencies of slow pairs, keep the frequencies of fast pairs, interpolate between.

    Source: Peng et al., 2023, "YaRN".
    """
    base = p["rope_theta"]
    original = p.get("original_max_position_embeddings") or longest
    stretch = longest / original if p.get("factor") is None else p["factor"]
    factor = p.get("attention_factor")
    if factor is None:
        top, all_dims = p.get("mscale"), p.get("mscale_all_dim")
        factor = _temperature(stretch, top if top and all_dims else 1)
        factor = factor / _temperature(stretch, all_dims) if top and all_dims else factor

    def pair(turns: float) -> float:
        """Return the index of the pair that makes `turns` full turns within the original length."""
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
    """Divide the frequencies of long waves, keep the frequencies of short waves, interpolate between.

    Source: Llama 3.1, Grattafiori et al., 2024.
    """
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
