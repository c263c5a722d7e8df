"""Placeholder until the real random.py lands (being written): torch generator seeded by the key; whole leaf, then sliced."""
from __future__ import annotations
import hashlib
import torch
from .errors import fail
def check_key(verb, key):
    if not isinstance(key, torch.Tensor) or key.dtype != torch.int64 or tuple(key.shape) != (2,):
        raise fail(f"{verb}: not a key", fix="fs.key(0)")
def key(n): return torch.tensor([n & 0xFFFFFFFF, n >> 32])
def fold_in(key, data):
    d = hashlib.blake2b(repr((key.tolist(), data)).encode(), digest_size=8).digest()
    return torch.tensor([int.from_bytes(d[:4], "little"), int.from_bytes(d[4:], "little")])
def split(key, n=2): return torch.stack([fold_in(key, i) for i in range(n)])
def _g(key):
    a, b = key.tolist(); g = torch.Generator(); g.manual_seed(a + (b << 32) >> 1); return g
def normal_box(key, shape, box, *, mean, std, dtype, device): return (torch.randn(shape, generator=_g(key))[box] * std + mean).to(dtype)
def trunc_normal_box(key, shape, box, *, mean, std, a, b, dtype, device): return normal_box(key, shape, box, mean=mean, std=std, dtype=dtype, device=device).clamp(a, b)
def uniform_box(key, shape, box, *, low, high, dtype, device): return (torch.rand(shape, generator=_g(key))[box] * (high - low) + low).to(dtype)
def normal(key, shape, *, mean=0.0, std=1.0, dtype=torch.float32): return normal_box(key, shape, (), mean=mean, std=std, dtype=dtype, device=None)
