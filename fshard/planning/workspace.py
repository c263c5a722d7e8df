"""Memory that a kernel allocates by itself, in the time of a call: packed weights, copies in another layout, scratch.

On a CPU, in float32 and with one thread (each further one may sum gradients in another W'), by the rules of oneDNN
3.12; "blocked" is a copy whose channels are rounded up to the lanes of a vector (AVX-512: 16, AVX2: 8).

- Convolutions copy the source S, the weights W and the result D into blocked ones, S', W' and D', and the result back.
  Images of up to 3 channels are read in place; images of one pixel have one layout. Forward: max(S' + W' + D' - D, D');
  transposed: max(S' + W', 2 D). The gradients of S and then of W: max(D' + W' + S' - S - W, D' + S' + W' - W, W'), or
  with a stride 2 S - W, in groups S - W. Channels-last tensors are not copied, and W twice: 2 W', backward 3 W', in
  groups W and W'. Source: what `aten::convolution` allocates, as `tests.benchmarks.below_torch` counts it. torch's
  convolutions without oneDNN unfold their images.
- An LSTM saves its gates, states and their gradients for backward, and packs its weights: oneDNN,
  `src/cpu/rnn/rnn_utils.cpp`, `set_offsets` and `get_good_ld`.

Unknown, which `Plan.warnings` lists: cuDNN's convolutions and recurrent layers, and transforms, which choose an
algorithm; convolutions in other dtypes, in groups of several channels over one dim, and with AVX2 dilated ones and
not over two dims; LSTMs without gradients.

A plan for a GPU runs a recurrent layer as `aten::_cudnn_rnn`: it saves at least the gates and cells that its gradient
reads, and results between layers. cuDNN documents no formula of its reserve, so the plan warns. It copies weights that
are not one buffer, as the leaves of a tree, into one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fshard._core.torch import convolution_backend, cudnn_rnn

from .flops import kind_of, name_of

_PAGE = 4096
_LANES = {"AVX512": 16, "AVX2": 8}  # of float32, by torch's name of a CPU's vectors
_READ_IN_PLACE = 3  # channels of images
_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cuDNN's
_GATES = (1, 1, 4, 3)
RECURRENT = frozenset(_MODES)
_STEPS = ("_fused_adamw_", "_fused_adam_", "_fused_sgd_")


def workspace_of(op: Any, args: Sequence[Any], out: Any, accelerator: bool) -> int | None:
    """Return the bytes that a kernel allocates and frees in one call; None if nobody knows."""
    name, kind = name_of(op), kind_of(op)
    if kind == "fft" or "cudnn_rnn" in name:
        return None
    if name.startswith("mkldnn_rnn_layer"):
        return _lstm(args, name.endswith("backward"))
    if kind != "convolution":
        return 0
    lanes = _LANES.get(torch.backends.cpu.get_cpu_capability())
    if accelerator or lanes is None or name not in ("convolution", "convolution_backward"):
        return None
    if name == "convolution":
        return _convolution(args[0], args[1], out, args[3:9], None, lanes)
    return _convolution(args[1], args[2], args[0], args[4:10], args[10], lanes)


def run_on_shapes(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on fake tensors; recurrent kernels with what they save for backward, which torch leaves out.

    Kernels of optimizers write in place and allocate nothing: they do not run.
    """
    if name_of(op) in _STEPS:
        return None
    name, shapes = name_of(op), {"_cudnn_rnn": _cudnn_results, "_cudnn_rnn_backward": _cudnn_gradients}
    out = shapes[name](args) if name in shapes else op(*args, **kwargs)
    return (*out[:3], out[3].new_empty(saved_by_lstm(args))) if name == "mkldnn_rnn_layer" else out


def saved_by_lstm(args: Sequence[Any]) -> int:
    """Return the bytes that `mkldnn_rnn_layer` saves for its backward."""
    return sum(map(_pages, _states(args))) if torch.is_grad_enabled() else 0


# --- LSTM -----------------------------------------------------------------------------------------------------


def _sizes(args: Sequence[Any]) -> tuple[int, int, int, int]:
    """Return the steps, the rows, the width of the input and of the state; oneDNN has the steps first."""
    t, n, width = args[0].shape
    return t, n, width, args[2].shape[1]


def _states(args: Sequence[Any]) -> list[int]:
    t, n, width, hidden = _sizes(args)
    states, cells = 8 * (t + 1) * n * _stride(max(width, hidden)), 8 * (t + 1) * n * hidden
    return [4 * t * n * _stride(4 * hidden), 4 * t * n * _stride(hidden), states, cells, states, states, cells]


def _lstm(args: Sequence[Any], is_backward: bool) -> int | None:
    if args[0].dtype != torch.float32 or not (is_backward or torch.is_grad_enabled()):
        return None
    t, n, width, hidden = _sizes(args)
    steps = t if is_backward or n < 128 else 1  # whose products with the input it computes together
    found = 4 * (width + hidden) * _stride(4 * hidden)
    found += _pages(4 * steps * n * _stride(4 * hidden)) + 2 * _pages(4 * n * _stride(hidden))
    aligned = [_stride(k) for k in (width, hidden) if _stride(k) != k]  # rows of gradients of weights
    return found + 16 * hidden * sum(aligned) if is_backward else found


def _stride(n: int) -> int:
    """Return the elements from row to row: complete lines of the cache, and no multiple of 256."""
    up = math.ceil(n / 16) * 16
    return up + 16 if up % 256 == 0 else up


def _pages(nbytes: int) -> int:
    return math.ceil(nbytes / _PAGE) * _PAGE


# --- recurrent layers on a GPU --------------------------------------------------------------------------------


def on_gpu(name: str, args: Sequence[Any], run: Callable[[], Any]) -> Any:
    """Run torch's recurrent layer of a name as a GPU does: by one kernel, if it does not draw between its layers."""
    x, state, weights, has_biases, layers, dropout, train, both_ways, batch_first = args
    if not torch.backends.cudnn.enabled or (dropout and train):
        with torch.backends.mkldnn.flags(enabled=False):
            return run()
    h, c = state if name == "lstm" else (state, None)
    per_layer = len(weights) // (layers * (2 if both_ways else 1))
    projected = h.shape[2] if per_layer > (4 if has_biases else 2) else 0
    hidden = weights[1].shape[0] // _GATES[_MODES[name]]
    out, h, c, *_ = cudnn_rnn(x, list(weights), per_layer, None, h, c, _MODES[name], hidden, projected, layers,
                              batch_first, dropout, train, both_ways, [], None)  # fmt: skip
    return (out, h, c) if name == "lstm" else (out, h)


def _cudnn_results(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return results of `_cudnn_rnn`: output, states, what it saves, its copy of the weights."""
    x, weights, h, c, mode, hidden, layers, directions = *args[:2], *args[4:8], args[9], 2 if args[13] else 1
    width, rows = h.shape[2] * directions, x.numel() // x.shape[-1]
    saved = rows * directions * hidden * layers * (_GATES[mode] + (c is not None)) + rows * width * (layers - 1)
    return (x.new_empty((*x.shape[:-1], width)), torch.empty_like(h), x.new_empty(0 if c is None else c.shape),
            x.new_empty(saved * x.itemsize * bool(args[12]), dtype=torch.uint8),
            x.new_empty(sum(w.numel() for w in weights)))  # fmt: skip


def _cudnn_gradients(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return results of `_cudnn_rnn_backward`: of the input and the states, and of the weights in one buffer."""
    x, weights, buffer, h, c = args[0], args[1], *args[3:6]
    flat = torch.split(torch.empty_like(buffer), [w.numel() for w in weights])
    gradients = [part.view(w.shape) for part, w in zip(flat, weights, strict=True)]
    states = torch.empty_like(h), x.new_empty(0) if c is None else torch.empty_like(c)
    return torch.empty_like(x), *states, gradients if args[-1][3] else []


# --- convolutions ---------------------------------------------------------------------------------------------


def _convolution(
    x: Tensor, w: Tensor, result: Tensor, settings: Sequence[Any], gradients: Sequence[bool] | None, lanes: int
) -> int | None:  # fmt: skip
    """Return the bytes of a forward pass, or of a backward pass that computes some `gradients`."""
    backend = convolution_backend(x, w, settings)
    if backend != "mkldnn":
        return _unfolded(x, w, result) if backend == "slow" else None
    stride, _, dilation, transposed, _, groups = settings
    by_channel = w.shape[1] == 1 or w.shape[0] == groups
    if x.dtype != torch.float32 or (groups > 1 and x.ndim == 3 and not by_channel):
        return None
    if lanes < 16 and (x.ndim != 4 or max(dilation) > 1):
        return None
    weights, is_forward = _blocked_weights(w, groups, lanes, x.shape[1]), gradients is None
    if x.ndim > 3 and x.stride(1) == 1 and x.shape[1] > 1:  # channels last
        if is_forward or groups == 1:
            return (2 if is_forward else 3) * weights
        outputs = _rounded(w.shape[0] // groups, lanes) * groups
        padded: int = weights * outputs * _rounded(w.shape[1], lanes) // w.shape[0]
        return weights + padded // w.shape[1]
    if gradients is None:
        source, blocked = _read(x, lanes), _blocked(result, lanes)
        return (max(source + weights, 2 * result.nbytes) if transposed else
                max(source + weights + blocked - result.nbytes, blocked))  # fmt: skip
    of_x, of_w = gradients[:2]
    read, found = _read(result, lanes) if transposed else _blocked(result, lanes), [weights]
    if of_x:
        is_plain = x.shape[1] <= _READ_IN_PLACE and max(stride) > 1  # the gradient of such images
        copies = _blocked_weights(w, groups, lanes) + (x.nbytes if is_plain else _blocked(x, lanes))
        found.append(read + copies - x.nbytes - (w.nbytes if of_w else 0))
        if max(stride) > 1 and not transposed:  # torch copies the gradient of S
            found.append(x.nbytes * (2 if groups == 1 else 1) - (w.nbytes if of_w else 0))
    if of_w:
        found.append(read + _read(x, lanes) + weights - w.nbytes)
    return max(found)


def _blocked(x: Tensor, lanes: int) -> int:
    """Return the bytes of a blocked copy; 0 for images of one pixel."""
    return 0 if math.prod(x.shape[2:]) == 1 else x.nbytes // x.shape[1] * _rounded(x.shape[1], lanes)


def _read(x: Tensor, lanes: int) -> int:
    """Return the bytes of a copy that is only read."""
    return 0 if x.shape[1] <= _READ_IN_PLACE else _blocked(x, lanes)


def _blocked_weights(w: Tensor, groups: int, lanes: int, channels: int = 4) -> int:
    """Return the bytes of blocked weights, for images of some channels."""
    a, b = (_rounded(n, lanes) for n in w.shape[:2])
    b = w.shape[1] if channels <= _READ_IN_PLACE else b
    return w.nbytes if groups > 1 else w.nbytes // (w.shape[0] * w.shape[1]) * a * b


def _rounded(channels: int, lanes: int) -> int:
    return math.ceil(channels / lanes) * lanes


def _unfolded(x: Tensor, w: Tensor, out: Tensor) -> int:
    """Return the bytes of the columns of the product that a convolution is, unless it is one already."""
    if math.prod(w.shape[2:]) == 1 and out.shape[2:] == x.shape[2:]:
        return 0
    return len(x) * math.prod(w.shape[1:]) * math.prod(out.shape[2:]) * x.itemsize
