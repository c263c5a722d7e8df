"""Convolutions and pools of images, whose batch or channels may be split over a mesh axis.

Legend: B batch, I input channels, O output channels, H and W height and width, h and w of a kernel; [O@model] is
a dim split over an axis; {V} varies over it, {I} does not. Weights have torch's layout, [O, I / groups, h, w].
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from fshard.errors import checked, fail
from fshard.spec import describe

Pair = int | tuple[int, int]


@checked
def conv2d(
    x: Tensor, w: Tensor, b: Tensor | None = None, *, stride: Pair = 1, padding: Pair | str = 0, dilation: Pair = 1,
    groups: int = 1,
) -> Tensor:  # fmt: skip
    """Convolve images: x [B, I, H, W], w [O, I / groups, h, w], b [O] -> [B, O, H', W'].

        output channels split:  x {V model}, w [O@model, I, h, w], b [O@model] -> [B, O@model, H', W']
        input channels split:   x [B, I@model, H, W], w [O, I@model, h, w] -> a part of the sum, {V model}: psum it,
                                then add the bias

    A rank whose part of the channels or of the batch is empty computes an empty result, or zeros. Height and width are
    complete on each rank. `padding` is a number of zeros on both sides, "valid" or "same". Options and result
    are as in torch.nn.functional.conv2d. Raises ShardingError for channels, or windows, that do not fit x.

    >>> y = nn.conv2d(fs.pvary(x, "model"), params["w"], params["b"], stride=2, padding=1)     # w [O@model, I, 3, 3]
    """
    if x.ndim != 4 or w.ndim != 4:
        raise fail("conv2d: x and w must have 4 dims", x=describe(x), w=describe(w),
                   fix="x [B, I, H, W]; w [O, I / groups, h, w]")  # fmt: skip
    if groups < 1 or x.shape[1] != w.shape[1] * groups or w.shape[0] % groups:
        raise fail("conv2d: the channels of w do not fit those of x", x=describe(x), w=describe(w), groups=groups,
                   fix="w [O, I / groups, h, w], where groups divides O and I")  # fmt: skip
    if b is not None and tuple(b.shape) != (w.shape[0],):
        raise fail("conv2d: b must be one number for each output channel here", w=describe(w), b=describe(b))
    if isinstance(padding, str) and padding not in ("valid", "same"):
        raise fail(f"conv2d: padding={padding!r}", fix='a number of zeros, "valid" or "same"')
    if padding == "same" and stride not in (1, (1, 1)):
        raise fail(f'conv2d: padding="same" and stride={stride}', fix="stride=1, or a number of zeros")
    zeros = 0 if isinstance(padding, str) else padding
    _check_windows("conv2d", x, (w.shape[2], w.shape[3]), stride, zeros, dilation, same=padding == "same")
    if x.shape[1] and w.shape[0]:
        return F.conv2d(x, w, b, stride, padding, dilation, groups)
    # torch has no convolution without channels: add channels of zeros, one to each group.
    inputs, outputs = (0 if n else 1 for n in (w.shape[1], w.shape[0]))
    y = F.conv2d(F.pad(x, (0, 0, 0, 0, 0, inputs * groups)), F.pad(w, (0, 0, 0, 0, 0, inputs, 0, outputs * groups)),
                 None if b is None else F.pad(b, (0, outputs * groups)), stride, padding, dilation, groups)  # fmt: skip
    return y[:, : w.shape[0]]


@checked
def max_pool2d(
    x: Tensor, kernel: Pair, *, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    """Take the largest value of each window: [B, C, H, W] -> [B, C, H', W']; `stride` is `kernel` by default.

    Batch and channels may be split over an axis, without communication. Of equal values the first has the gradient. The
    options and the result are as in torch.nn.functional.max_pool2d. Raises ShardingError for windows that do not
    fit x.

    >>> nn.max_pool2d(torch.arange(16.0).view(1, 1, 4, 4), 2)
    tensor([[[[ 5.,  7.],
              [13., 15.]]]])
    """
    _check_windows("max_pool2d", x, kernel, kernel if stride is None else stride, padding, dilation, pads_half=True)
    return _pool(x, lambda x: F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode))


@checked
def avg_pool2d(
    x: Tensor, kernel: Pair, *, stride: Pair | None = None, padding: Pair = 0, ceil_mode: bool = False,
    count_include_pad: bool = True,
) -> Tensor:  # fmt: skip
    """Average each window: [B, C, H, W] -> [B, C, H', W']; `stride` is `kernel` by default.

    Batch and channels may be split over an axis, without communication. Padding counts as zeros unless
    `count_include_pad` is False. The options and the result are as in torch.nn.functional.avg_pool2d; the mean of
    full images is `x.mean((2, 3))`.

    >>> nn.avg_pool2d(torch.arange(16.0).view(1, 1, 4, 4), 2)
    tensor([[[[ 2.5000,  4.5000],
              [10.5000, 12.5000]]]])
    """
    _check_windows("avg_pool2d", x, kernel, kernel if stride is None else stride, padding, pads_half=True)
    return _pool(x, lambda x: F.avg_pool2d(x, kernel, stride, padding, ceil_mode, count_include_pad))


def _check_windows(
    verb: str, x: Tensor, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair = 1, *, same: bool = False,
    pads_half: bool = False,
) -> None:  # fmt: skip
    """Raise ShardingError for windows that are none, and for images that have room for none."""
    if x.ndim != 4:
        raise fail(f"{verb}: x must have 4 dims", x=describe(x), fix="x [B, C, H, W]")
    pairs = [n if isinstance(n, tuple) else (n, n) for n in (kernel, stride, padding, dilation)]
    for dim, size, k, step, zeros, apart in zip("HW", x.shape[2:], *pairs, strict=True):
        options = f"kernel={k}, stride={step}, padding={zeros}, dilation={apart}"
        if min(k, step, apart) < 1 or zeros < 0:
            raise fail(f"{verb}: {options} along {dim}", fix="padding 0 or more, the others 1 or more")
        if pads_half and 2 * zeros > k:
            raise fail(f"{verb}: {options} along {dim}: windows of padding alone", f"2 * {zeros} > {k}",
                       fix="pad at most half of the kernel")  # fmt: skip
        span = apart * (k - 1) + 1
        if size + 2 * zeros < (1 if same else span):
            raise fail(f"{verb}: {options} along {dim}: the kernel does not fit", f"{size} + 2 * {zeros} < {span}",
                       x=describe(x), fix="a smaller kernel, larger images, or more padding")  # fmt: skip


def _pool(x: Tensor, pool: Callable[[Tensor], Tensor]) -> Tensor:
    if x.shape[1]:
        return pool(x)
    return pool(F.pad(x, (0, 0, 0, 0, 0, 1)))[:, :0]  # torch has no pool of no channels
