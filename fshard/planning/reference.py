"""Train steps that `devices.measure` times: on one rank, in plain torch, with the operations of common models.

Each program is a function of a size that returns the described parameters and batch, and a loss of both. Sizes are few
rows, some that fit a cache, and many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard._core.torch import fused_adamw_
from fshard.grad import value_and_grad

# Shapes of the parameters and of the batch, of floats and of integers below a number; the loss of both.
Shapes = Sequence[tuple[int, ...]]
Program = tuple[Shapes, Shapes, Shapes, int, Callable[..., Tensor]]


def transformer(b: int, t: int, d: int, heads: int, vocab: int) -> Program:
    """Return two blocks: with norms of layers, causal attention and gelu, and as Llama and T5 have them."""
    first = [(d,), (d,), (d, 3 * d), (d, d), (4 * d, d), (4 * d,), (4 * d, d)]
    second = [(d,), (d, d), (d, d), (d, d), (d, 2 * d), (d, 2 * d), (2 * d, d), (heads, t, t)]
    shapes = [(vocab, d), (t, d), *first, *second]

    def split(x: Tensor) -> Tensor:
        return x.view(b, t, heads, d // heads).transpose(1, 2)

    def loss(p: list[Tensor], ids: Tensor) -> Tensor:
        tokens, positions, scale, shift, qkv, out, up, bias, down, scale2, q2, k2, out2, gate, up2, down2, pairs = p
        x = F.embedding(ids, tokens) + positions
        q, k, v = map(split, (F.layer_norm(x, (d,), scale, shift) @ qkv).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d) @ out
        h = F.gelu(F.linear(F.layer_norm(x, (d,), scale, shift), up, bias), approximate="tanh") @ down
        x = x + F.dropout(h, 0.1)
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * scale2
        q, k = split(h @ q2), split(h @ k2)
        half = q.chunk(2, -1)
        q = q + torch.cat([-half[1], half[0]], -1)  # as rotary positions
        h = F.scaled_dot_product_attention(q, k, k, attn_mask=pairs)
        h = h + torch.softmax(q @ k.mT + pairs, -1) @ k
        x = x + h.transpose(1, 2).reshape(b, t, d) @ out2
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        x = x + (F.silu(h @ gate) * (h @ up2)) @ down2
        return F.cross_entropy((x @ tokens.mT).float().view(-1, vocab), ids.view(-1))

    return shapes, [], [(b, t)], vocab, loss


def convolutional(b: int, c: int, n: int) -> Program:
    """Return convolutions of [n, n] pixels: strided, of 1 x 1, by channel, transposed; norms, a pool, a head."""
    d, e = 2 * c, 4 * c
    shapes = [(c, 3, 7, 7), (c, c, 3, 3), (d, c, 3, 3), (d, c, 1, 1), (d, 1, 7, 7), (d, e), (e, d), (d, c, 2, 2),
              (c, d, 3, 3), (d, d, 3, 3), (d, 1, 3, 3), (c, c), (c,), (d,)]  # fmt: skip

    def loss(p: list[Tensor], x: Tensor, y: Tensor) -> Tensor:
        stem, same, wider, skip, channels, up, down, larger, narrow, wide, near, head, c1, c2 = p
        h = F.relu(F.batch_norm(F.conv2d(x, stem, stride=2, padding=3), None, None, c1, c1, training=True))
        kept = h = F.max_pool2d(h, 2)
        h = h + F.silu(F.group_norm(F.conv2d(h, same, padding=1), 4, c1, c1))
        r = F.batch_norm(F.conv2d(h, wider, c2, stride=2, padding=1), None, None, c2, c2, training=True)
        h = F.relu(r + F.conv2d(h, skip, stride=2))
        h = h + F.conv2d(h, wide, padding=1)
        h = h + F.conv2d(h, near, padding=1, groups=d)
        r = F.layer_norm(F.conv2d(h, channels, c2, padding=3, groups=d).permute(0, 2, 3, 1), (d,), c2, c2)
        h = h + (F.gelu(r @ up) @ down).permute(0, 3, 1, 2)
        h = torch.cat([kept, F.pad(F.conv_transpose2d(h, larger, stride=2), (0, 0, 0, 0))], 1)  # a copy: its cost
        h = F.silu(F.group_norm(F.conv2d(h, narrow, padding=1), 4, c1, c1))
        return F.cross_entropy(F.linear(h.mean((2, 3)), head, c1).float(), y)

    return shapes, [(b, 3, n, n)], [(b,)], c, loss


def recurrent(b: int, t: int, d: int, vocab: int) -> Program:
    """Return an LSTM, and one step of a GRU, between an embedding and a head."""
    shapes = [(vocab, d), (4 * d, d), (4 * d, d), (4 * d,), (3 * d, d), (3 * d, d), (3 * d,), (d, vocab), (vocab,)]

    def loss(p: list[Tensor], ids: Tensor) -> Tensor:
        table, w, u, bias, w2, u2, bias2, head, last = p
        x, state = F.embedding(ids, table), table.new_zeros(1, b, d)
        x, h, _ = torch.lstm(x, (state, state), [w, u, bias, bias], True, 1, 0.0, True, False, True)
        h = torch.gru_cell(h[0], x[:, -1], w2, u2, bias2, bias2)
        return F.cross_entropy(torch.addmm(last, (x + h[:, None]).flatten(0, 1), head).float(), ids.view(-1))

    return shapes, [], [(b, t)], vocab, loss


def elementwise(n: int, m: int) -> Program:
    """Return functions of elements, indexing, sums and other reductions of [n, m]."""

    def loss(p: list[Tensor], rows: Tensor) -> Tensor:
        a, c, w = p
        x: Tensor = torch.exp(-a * a) + torch.log(c * c + 1.0)
        x = torch.tanh(x) * torch.sigmoid(c) + torch.sqrt(a.abs() + 1.0)
        x = x / (1.0 + c.square()) + F.softplus(a)
        x = torch.cat([torch.where(x > 0.5, x, F.relu(c)), c * w])
        y = x[rows] + torch.zeros_like(c).index_add(0, rows, c)
        y = torch.stack([y, y * 2.0], 1).sum(1).masked_fill(y > 3.0, 0.0).clamp(min=-3.0)
        z = y.gather(1, rows[:, None]).sum() + y.cumsum(0).mean() + y.amax(1).sum() + y.var(1).mean()
        y = y.detach().clone().exp_().mul_(0.1).copy_(c)
        z = z + torch.linalg.vector_norm(x) + y.max() + y.sin().cos().reciprocal().sum()
        return torch.sum(z)

    return [(n, m), (n, m), (m,)], [], [(n,)], n, loss


# A short measurement runs only the first ones: of medium sizes, of small ones, of large ones.
SIZES: tuple[tuple[Any, ...], ...] = (
    (transformer, 2, 64, 128, 2, 1000), (convolutional, 4, 16, 48), (elementwise, 256, 256), (recurrent, 8, 32, 96, 99),
    (transformer, 2, 16, 32, 2, 96), (convolutional, 2, 8, 16), (elementwise, 16, 32), (recurrent, 4, 8, 32, 50),
    (transformer, 3, 160, 320, 5, 2000), (convolutional, 8, 48, 80), (elementwise, 999, 999), (recurrent, 9, 48, 320, 9)
)  # fmt: skip


def train_step(
    program: Program, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[..., Any], tuple[Any, ...]]:  # fmt: skip
    """Return a step and its arguments: the loss, gradients, an update by differences, and one by a fused kernel."""
    *shapes, ids, high, loss = program

    def step(params: list[Tensor], *batch: Tensor) -> Any:
        value, grads = value_and_grad(lambda p: loss(p, *batch))(params)
        new = [w - 0.1 * g for w, g in zip(params, grads, strict=True)]
        first, second = ([torch.zeros_like(w) for w in params] for _ in range(2))
        unused, counts = list[Tensor](), [torch.ones((), device=w.device) for w in params]
        fused_adamw_(new, list(grads), first, second, unused, counts, lr=0.1, beta1=0.9, beta2=0.99, weight_decay=0.1,
                     eps=1e-8, amsgrad=False, maximize=False)  # fmt: skip
        return value, new

    draws = torch.Generator(device).manual_seed(0)
    params, floats = ([torch.randn(s, generator=draws, device=device, dtype=dtype) * 0.05 for s in some]
                      for some in shapes)  # fmt: skip
    return step, (params, *floats, *(torch.randint(high, s, generator=draws, device=device) for s in ids))
