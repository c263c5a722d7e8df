"""Digests of tensors: two 64-bit words that are equal for bitwise equal tensors, computed on their device."""

from __future__ import annotations

import functools
import hashlib
import struct

import numpy as np
import torch
from torch import Tensor


def digest(x: Tensor) -> Tensor:
    """Digest the shape, the dtype and every bit of a tensor: int64 [2], on its device.

    Equal for bitwise equal tensors of any strides; unequal for others, but once in 2^60 or so. A NaN equals itself, and
    -0.0 is not 0.0. Reads the tensor once, with at most 16 MiB of extra memory. Comparable within one device type.

    The bytes are read in chunks of 32-bit words v, and the digest of a chunk is sum(a_i v_i) and sum(b_i v_i) mod 2^64,
    with random 64-bit a and b. Since two 32-bit words never differ by 2^32 or more, each of the sums is the same for
    two different chunks with a probability of at most 2^-33. (Of 64-bit v it would be 1/2 where two signs are flipped:
    2^63 a_i + 2^63 a_j is often 0.) The digests of all chunks are then digested in the same way, with other weights.

    Source: Dietzfelbinger, 1996, "Universal hashing and k-wise independent random variables via integer arithmetic".
    """
    header = f"{x.dtype} {list(x.shape)}".encode()
    label = torch.tensor(struct.unpack("<2q", hashlib.blake2b(header, digest_size=16).digest()), device=x.device)
    sums, level = _weighted_sums(x.detach(), 0), 1
    while len(sums) > 1:
        sums, level = _weighted_sums(sums, level), level + 1
    return sums[0] + label


def _weighted_sums(x: Tensor, level: int) -> Tensor:
    """Return the two weighted sums of every chunk: int64 [chunks, 2]."""
    words = _words_per_chunk(x.device.type)
    step = words * 4 // x.element_size()
    out = torch.zeros(max(1, -(-x.numel() // step)), 2, dtype=torch.int64, device=x.device)
    weights = _weights(level, x.device)
    buffer = torch.empty(min(words, -(-x.numel() * x.element_size() // 4)), dtype=torch.int64, device=x.device)
    for row, start in zip(out, range(0, x.numel(), step), strict=False):  # without elements the sums stay 0
        chunk = _as_words(flat_slice(x, start, min(start + step, x.numel())))
        v = buffer[: len(chunk)].copy_(chunk)
        for total, weight in zip(row, weights, strict=True):
            # On a CPU `dot` allocates no array of the products; CUDA has none for integers.
            total.copy_(torch.dot(v, weight[: len(v)]) if x.is_cpu else (v * weight[: len(v)]).sum())
    return out


def _words_per_chunk(device: str) -> int:
    """Return as many words as fit in the cache of a CPU core, or are worth a kernel launch elsewhere."""
    return 1 << (15 if device == "cpu" else 17)


@functools.lru_cache(maxsize=16)
def _weights(level: int, device: torch.device) -> Tensor:
    """Return random 64-bit words, the same on every rank: int64 [2, chunk]. NumPy keeps this stream stable."""
    raw = np.random.Philox(key=level).random_raw(2 * _words_per_chunk(device.type))
    return torch.from_numpy(raw.view(np.int64)).view(2, -1).to(device)


def flat_slice(x: Tensor, start: int, stop: int) -> Tensor:
    """Return elements `start` to `stop` in the order of their indices, [stop - start]; copies no more than these."""
    if x.is_contiguous():
        return x.view(-1)[start:stop]
    row = x.numel() // x.shape[0]
    first, last = start // row, stop // row
    if first == last:
        return flat_slice(x[first], start - first * row, stop - first * row)
    parts = [flat_slice(x[first], start % row, row)] if start % row else []
    parts.append(x[first + len(parts) : last].reshape(-1))
    if stop % row:
        parts.append(flat_slice(x[last], 0, stop % row))
    return torch.cat(parts)


def _as_words(x: Tensor) -> Tensor:
    """Return the bytes of a 1-d tensor as int32, with zeros up to a full word."""
    x = x.resolve_conj().resolve_neg()
    if len(x) == 1:  # contiguous with any stride, but a view as bytes requires stride 1
        x = x.clone(memory_format=torch.contiguous_format)
    raw = x.view(torch.uint8)
    if len(raw) % 4 or raw.storage_offset() % 4:
        raw = torch.nn.functional.pad(raw, (0, -len(raw) % 4)) if len(raw) % 4 else raw.clone()
    return raw.view(torch.int32)


def digest_and_value(x: Tensor) -> Tensor:
    """Return the digest, and the value of a 0-d leaf in 64 bits (0 for others), which an error can show: int64 [3]."""
    if x.ndim or x.is_complex():
        value = torch.zeros(1, dtype=torch.int64, device=x.device)
    else:
        value = x.detach().reshape(1)
        value = value.to(torch.float64).view(torch.int64) if x.is_floating_point() else value.to(torch.int64)
    return torch.cat([digest(x), value])


def format_digest(words: tuple[int, int, int], x: Tensor | None = None) -> str:
    """Format one `digest_and_value`: the value of a 0-d leaf `x`, the digest of any other, or without `x`."""
    if x is None or x.ndim or x.is_complex():
        return f"digest {words[0] & 0xFFFFFFFF:08x}"
    value = words[2]
    if not x.is_floating_point():
        return str(bool(value)) if x.dtype == torch.bool else str(value)
    (number,) = struct.unpack("<d", struct.pack("<q", value))
    return format(number, ".17g" if x.dtype == torch.float64 else ".9g")
