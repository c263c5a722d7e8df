"""Work of an operation of torch: its kind, its FLOPs, and the bytes that it reads and writes.

A multiply-add counts as two FLOPs; of complex numbers it is eight. Sources of the formulas:

- attention, matrix products: `torch.utils.flop_counter`. A program adds its operations by `register_flop_formula`.
- recurrent layers: each row of the input meets each matrix once (step t multiplies row t, and the state, by a matrix
  each). The backward pass has two products for each of the forward pass.
- convolutions: each element of the result (transposed: of the input) meets one filter of its group. The gradients of
  input and weight take as many products each; torch's counter takes g times as many for the weight of g groups.
- factorizations, solvers: Blackford and Dongarra, 1999, "Installation guide for LAPACK" (LAPACK working note 41),
  appendix C. Eigenvectors and singular vectors: Golub and Van Loan, 2013, "Matrix computations", 7.5, 8.3 and 8.6.
  The exponential of a matrix: five products (Bader, Blanes and Casas, 2019, "Computing the matrix exponential with an
  optimized Taylor polynomial approximation"), without squarings, since they depend on values.
- Fourier transforms: 5 N log2 N, of real numbers half (Frigo and Johnson, 2005, "The design and implementation of
  FFTW3").
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import default_decompositions
from torch.utils.flop_counter import flop_registry

from fshard._core.operations import tensors_in, written_arguments
from fshard._core.torch import schema_of

from .events import Kind

CONSTANTS = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}  # read nothing
_COPIES = {"_to_copy", "clone", "copy_", "copy", "_foreach_copy_", "cat", "stack", "constant_pad_nd", "fill_", "zero_",
           "zeros", "ones", "full", *CONSTANTS}  # fmt: skip
_LOOKUPS = {"embedding", "index", "index_select", "gather"}  # read as many bytes as they write
_OVERWRITE = {"copy_", "fill_", "zero_", "_foreach_copy_", "normal_", "uniform_"}  # do not read what they write
_LINEAR = {
    torch.Tag.pointwise,
    torch.Tag.reduction,
    torch.Tag.core,
    torch.Tag.view_copy,
    torch.Tag.inplace_view,
    torch.Tag.dynamic_output_shape,
}  # tags of operations that only read and write
_decomposed = functools.cache(default_decompositions)  # operations that torch writes in terms of simpler ones
_CONVOLUTION = re.compile(r"^(?!mkldnn_reorder).*conv(?!ert)")
_WEIGHTS = re.compile(r"weight|bias|params|mat2$|batch2$|running_")


def name_of(op: Any) -> str:
    """Return the name of an operation without its namespace: `mm`."""
    return str(getattr(op, "overloadpacket", op).__name__)


def kind_of(op: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Kind:
    """Return the kind of an operation; a custom one that a program has a formula for counts as a matmul.

    With its arguments, a convolution with a filter for each channel is "depthwise": it computes far fewer FLOP/s.
    """
    kind, _ = _kind_and_formula(op)
    if kind == "convolution" and op.namespace == "aten":
        values = _by_name(op, args, kwargs or {})
        return "depthwise" if values.get("groups", 1) > 1 and values["weight"].shape[1] == 1 else kind
    return "matmul" if kind == "elementwise" and op.namespace != "aten" and _formula(op) else kind


@functools.cache
def _kind_and_formula(op: Any) -> tuple[Kind, Callable[..., float] | None]:
    """Return the kind of an operation by its name, and the formula of one of torch."""
    name, is_aten = name_of(op), op.namespace == "aten"
    formula: Callable[..., float] | None = None
    for kind, formulas in _FORMULAS.items() if is_aten else ():
        if _base(name) in formulas:
            return kind, formulas[_base(name)]
    if "attention" in name:
        if is_aten and name.startswith("_scaled_dot_product"):
            formula = _attention_backward if name.endswith("backward") else _attention
        return "attention", formula
    if _CONVOLUTION.search(name):
        if is_aten and "backward" not in name:
            formula = _convolution_transpose if "transpose" in name else _convolution
        return "convolution", formula
    return "copy" if name in _COPIES or name.startswith(("empty", "new_empty")) else "elementwise", None


def _by_name(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {**dict(zip([a.name for a in schema_of(op).arguments], args, strict=False)), **kwargs}


@functools.cache
def is_view(op: Any) -> bool:
    """Return whether the results of an operation are views of its arguments, so that it computes nothing."""
    returns = [] if is_higher_order(op) else schema_of(op).returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def is_higher_order(op: Any) -> bool:
    """Return whether an operation takes functions, as `torch.cond` does: it has no schema."""
    return not hasattr(op, "overloadpacket")


@functools.cache
def is_elementwise(op: Any) -> bool:
    """Return whether an element of a result depends on one element of each argument: a copy, a sum, an update."""
    name = name_of(op)
    if name in CONSTANTS:
        return False
    return (kind_of(op) == "copy" or name.startswith(("_foreach_", "_fused_")) or op.namespace == "fshard"
            or torch.Tag.pointwise in _tags(op))  # fmt: skip


@functools.cache
def weight_arguments(op: Any) -> tuple[int, ...]:
    """Return the positions of the arguments that an operation takes as weights by its schema, as `mat2` of `mm`."""
    arguments = [] if is_higher_order(op) else schema_of(op).arguments
    found = tuple(i for i, a in enumerate(arguments) if _WEIGHTS.match(a.name) and "Tensor" in str(a.type))
    return (0, *found) if name_of(op) in ("addmm", "addmv") and found else found  # self is the bias


# --- FLOPs ----------------------------------------------------------------------------------------------------


def flops_of(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """Return the FLOPs of an operation; None if nobody knows, and 0 where it only reads and writes.

    Causal attention counts the pairs of a query and a position up to it, which the kernels compute. With a mask
    all of [T, S] count, as in torch's counters.
    """
    formula = _formula(op)
    if formula is None:
        return None if _is_heavy(op, args, kwargs, out) else 0
    flops = int(formula(*args, **kwargs, out_val=out))
    if name_of(op).startswith("_scaled_dot_product") and (values := _by_name(op, args, kwargs)).get("is_causal"):
        t, s = int(values["query"].shape[-2]), int(values["key"].shape[-2])
        flops = flops * sum(min(i + 1, s) for i in range(t)) // max(1, t * s)
    is_complex = kind_of(op) != "fft" and any(x.is_complex() for x in tensors_in(args))
    return 4 * flops if is_complex else flops


def _formula(op: Any) -> Callable[..., float] | None:
    _, formula = _kind_and_formula(op)
    return formula or flop_registry.get(op if is_higher_order(op) else op.overloadpacket)


def _base(name: str) -> str:
    """Return the name of the operation that does not write in place."""
    return name.removesuffix("_")


def _is_heavy(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
    """Return whether an operation without a formula may compute more than it reads and writes.

    1. Its work is linear by a tag, or torch writes it in terms of simpler ones, or it is a gradient of these.
    2. Of torch's other operations those are heavy that contract: a matrix does not broadcast to any result.
    3. All others are: custom operations, kernels of Triton, operations that call functions.
    """
    if op.namespace == "fshard" or (not is_higher_order(op) and _is_linear(op)):
        return False
    if op.namespace != "aten":
        return bool(tensors_in(args, kwargs))
    matrices = [x for x in tensors_in(args, kwargs) if x.is_floating_point() and x.ndim > 1]
    results = [x for x in tensors_in(out) if x.is_floating_point() and x.numel() > 1]
    contracts = any(not any(_broadcasts(x, y) for y in results) for x in matrices)
    return len(matrices) > 1 and bool(results) and contracts


def _broadcasts(x: Tensor, y: Tensor) -> bool:
    return x.ndim <= y.ndim and all(n in (1, m) for n, m in zip(x.shape[::-1], y.shape[::-1], strict=False))


@functools.cache
def _is_linear(op: Any) -> bool:
    variants = _overloads(op) if op.namespace == "aten" else []
    if any(_formula(x) is not None for x in variants):  # the gradient of a product
        return False
    return bool(_LINEAR & _tags(op)) or any(x in _decomposed() for x in variants)


def _tags(op: Any) -> set[Any]:
    """Return the tags of an operation, and of torch's one that it is a variant or the gradient of."""
    found = set(getattr(op, "tags", ()))
    return found.union(*(x.tags for x in _overloads(op))) if op.namespace == "aten" else found


def _overloads(op: Any) -> list[Any]:
    forward = re.sub(r"_backward.*", "", base := _base(name_of(op)).removeprefix("_foreach").lstrip("_"))
    names = {f"{start}{name}{end}" for start in ("", "_") for name in (base, forward) for end in ("", "_forward")}
    found: list[Any] = [getattr(torch.ops.aten, name, None) for name in sorted(names)]
    packets = [p for p in found if hasattr(p, "overloads")]
    return [getattr(p, overload) for p in packets for overload in p.overloads()]


# --- formulas -------------------------------------------------------------------------------------------------


def _product(a: Tensor, *_: Any, out_val: Any, **__: Any) -> int:
    return 2 * a.numel() * int(out_val.shape[-1])  # each row of a, and each column of the result


def _added_product(_: Tensor, a: Tensor, b: Tensor, *__: Any, **___: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _grouped_product(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    groups = a.shape[0] if a.ndim == b.ndim == 3 else 1  # else a dim of a or of b has the rows of all groups
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _vector_product(a: Tensor, *_: Any, **__: Any) -> int:
    return 2 * a.numel()


def _recurrent(x: Tensor, *args: Any, **_: Any) -> int:
    weights: Sequence[Tensor] = args[0] if isinstance(args[0], (list, tuple)) else args[:2]
    return 2 * (x.numel() // x.shape[-1]) * sum(w.numel() for w in weights if w.ndim == 2)


def _recurrent_backward(*args: Any, **_: Any) -> int:
    mask = args[-1]  # of cuDNN: which gradients are computed, the last of them of the weights
    return _recurrent(*args) * (1 + int(mask[3] if isinstance(mask, (list, tuple)) else 1))


def _convolution(x: Tensor, w: Tensor, *args: Any, out_val: Any, **_: Any) -> int:
    is_transposed = len(args) > 4 and args[4] is True  # of cuDNN's, and others, that is a number
    meets: Tensor = x if is_transposed else out_val
    return 2 * meets.numel() * math.prod(w.shape[1:])


def _convolution_transpose(x: Tensor, w: Tensor, *_: Any, **__: Any) -> int:
    return 2 * x.numel() * math.prod(w.shape[1:])


def _convolution_backward(grad: Tensor, x: Tensor, w: Tensor, *args: Any, **_: Any) -> int:
    return 2 * (x if args[4] else grad).numel() * math.prod(w.shape[1:]) * int(sum(args[-1][:2]))


def _attention(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    b, h, t, d = q.shape  # two products for each query, key and dim
    return 2 * b * h * t * k.shape[-2] * (d + v.shape[-1])


def _attention_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> int:
    b, h, t, d = q.shape  # the scores again, then the gradients of scores, q, k and v
    return 2 * b * h * t * k.shape[-2] * (3 * d + 2 * v.shape[-1])


def _attention_layer(q: Tensor, k: Tensor, v: Tensor, width: int, *_: Any, **__: Any) -> int:
    scores = 4 * q.numel() * k.shape[-2]
    return 2 * width * (2 * q.numel() + k.numel() + v.numel()) + scores


def _encoder_layer(x: Tensor, *args: Any, **_: Any) -> int:
    matrices = sum(w.numel() for w in tensors_in(args) if w.ndim == 2 and x.shape[-1] in w.shape)
    return 2 * (x.numel() // x.shape[-1]) * matrices + 4 * x.numel() * x.shape[-2]


def _sides(x: Tensor) -> tuple[int, int, int]:
    """Return the number of matrices, their longer side, and the shorter one."""
    return math.prod(x.shape[:-2]), max(x.shape[-2:]), min(x.shape[-2:])


def _lu(a: Tensor, *_: Any, **__: Any) -> float:
    batch, m, n = _sides(a)
    return batch * (m * n**2 - n**3 / 3)


def _cubed(share: float) -> Callable[..., float]:
    """Return the formula of a factorization that takes `share` n^3."""
    return lambda a, *_, **__: share * _sides(a)[0] * _sides(a)[1] ** 3


def _qr(a: Tensor, mode: str = "reduced", *_: Any, **__: Any) -> float:
    batch, m, n = _sides(a)
    columns = {"r": 0, "complete": a.shape[-2]}.get(mode, min(a.shape[-2:]))
    return batch * (2 * m * n**2 - 2 * n**3 / 3 + _reflect(a.shape[-2], columns, n))


def _reflect(m: int, columns: int, k: int) -> float:
    """Return the FLOPs that make columns of Q [m, m] from k reflections."""
    return 4 * m * columns * k - 2 * (m + columns) * k**2 + 4 * k**3 / 3 if columns else 0.0


def _reflections(a: Tensor, tau: Tensor, *_: Any, **__: Any) -> float:
    return math.prod(a.shape[:-2]) * _reflect(a.shape[-2], a.shape[-1], tau.shape[-1])


def _apply_reflections(a: Tensor, tau: Tensor, c: Tensor, left: bool = True, *_: Any, **__: Any) -> float:
    batch, k = math.prod(c.shape[:-2]), tau.shape[-1]
    m, n = c.shape[-2:] if left else c.shape[:-3:-1]
    return batch * (4 * m * n * k - 2 * n * k**2)


# Without values torch asks for vectors also where the program does not, as in svdvals and eigvalsh.
def _svd(a: Tensor, full: bool = False, vectors: bool = True, *_: Any, **__: Any) -> float:
    batch, m, n = _sides(a)
    if not vectors:
        return batch * min(4 * m * n**2 - 4 * n**3 / 3, 2 * m * n**2 + 2 * n**3)
    if full:
        return batch * (4 * m**2 * n + min(8 * m * n**2 + 9 * n**3, 22 * n**3))
    return batch * min(14 * m * n**2 + 8 * n**3, 6 * m * n**2 + 20 * n**3)


def _eigh(a: Tensor, triangle: str = "L", vectors: bool = True, *_: Any, **__: Any) -> float:
    return _cubed(9 if vectors else 4 / 3)(a)


def _pinv(a: Tensor, *_: Any, **__: Any) -> float:
    batch, m, n = _sides(a)
    return _svd(a) + 2 * batch * m * n**2


def _least_squares(a: Tensor, b: Tensor, *_: Any, **__: Any) -> float:
    batch, m, n = _sides(a)
    columns = b.shape[-1] if b.ndim > 1 else 1
    return _qr(a, "r") + batch * columns * (4 * m * n - n**2)


def _fft(share: float) -> Callable[..., float]:
    """Return the formula of a transform that takes `share` N log2 N."""

    def formula(x: Tensor, dims: Sequence[int], *_: Any, out_val: Any, **__: Any) -> float:
        real = next((y for y in (x, out_val) if not y.is_complex()), x)
        return share * real.numel() * math.log2(max(1, math.prod(real.shape[d] for d in dims)))

    return formula


def _trilinear(a: Tensor, b: Tensor, c: Tensor, *dims: Any, **_: Any) -> int:
    expanded: list[list[int]] = [list(x.shape) for x in (a, b, c)]
    for shape, at in zip(expanded, dims, strict=False):
        for d in at:
            shape.insert(d, 1)
    elements: int = math.prod(max(sizes) for sizes in zip(*expanded, strict=True))
    return 3 * elements  # two products and a sum


def _distances(x: Tensor, *_: Any, out_val: Any, **__: Any) -> int:
    return 3 * int(out_val.numel()) * x.shape[-1]  # a difference, a product or power, a sum


def _distances_backward(grad: Tensor, x: Tensor, *_: Any, **__: Any) -> int:
    return 3 * grad.numel() * x.shape[-1]


def _bag(x: Tensor, indices: Tensor, *_: Any, **__: Any) -> int:
    return indices.numel() * x.shape[-1]


_FORMULAS: dict[Kind, dict[str, Callable[..., float]]] = {
    "matmul": {
        **dict.fromkeys(("mm", "bmm", "linear", "_int_mm", "_scaled_mm", "_scaled_mm_v2", "_weight_int8pack_mm",
                         "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "_dyn_quant_matmul_4bit",
                         "_weight_int4pack_mm_with_scales_and_zeros", "_mixed_dtypes_linear", "mkldnn_linear"),
                        _product),
        **dict.fromkeys(("addmm", "baddbmm", "addbmm", "_addmm_activation"), _added_product),
        **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped_product),
        "_foreach_mm": lambda a, b, **_: sum(2 * x.numel() * y.shape[-1] for x, y in zip(a, b, strict=True)),
        "mv": _vector_product, "dot": _vector_product, "vdot": _vector_product,
        "addmv": lambda _, a, *__, **___: 2 * a.numel(),
        "_euclidean_dist": lambda a, b, **_: 2 * a.numel() // a.shape[-1] * b.shape[-2] * (a.shape[-1] + 2),
        "_trilinear": _trilinear,
        **dict.fromkeys(("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn"), _recurrent),
        **dict.fromkeys((f"{name}_backward" for name in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")),
                        _recurrent_backward),
    },
    "attention": {"_native_multi_head_attention": _attention_layer, "_transformer_encoder_layer_fwd": _encoder_layer},
    "convolution": {"convolution_backward": _convolution_backward, "conv_tbc": lambda x, w, *_, out_val, **__:
                    2 * out_val.numel() * math.prod(w.shape[:2])},
    "linalg": {
        **dict.fromkeys(("linalg_cholesky_ex", "cholesky", "linalg_ldl_factor_ex"), _cubed(1 / 3)),
        **dict.fromkeys(("linalg_lu", "linalg_lu_factor_ex", "_linalg_det", "_linalg_slogdet"), _lu),
        "linalg_inv_ex": _cubed(2), "cholesky_inverse": _cubed(2 / 3), "linalg_matrix_exp": _cubed(10),
        "_linalg_solve_ex": lambda a, *_, out_val, **__: _lu(a) + 2 * out_val[0].numel() * a.shape[-1],
        "linalg_solve_triangular": lambda a, *_, out_val, **__: out_val.numel() * a.shape[-1],
        "triangular_solve": lambda b, a, *_, **__: b.numel() * a.shape[-1],
        "cholesky_solve": lambda b, a, *_, **__: 2 * b.numel() * a.shape[-1],
        **dict.fromkeys(("linalg_lu_solve", "linalg_ldl_solve"),
                        lambda a, *_, out_val, **__: 2 * out_val.numel() * a.shape[-1]),
        "linalg_qr": _qr, "geqrf": lambda a, **_: _qr(a, "r"), "linalg_householder_product": _reflections,
        "ormqr": _apply_reflections, "linalg_lstsq": _least_squares, "linalg_pinv": _pinv,
        "_linalg_svd": _svd, "_linalg_eigh": _eigh, "linalg_eig": _cubed(25), "_linalg_eigvals": _cubed(10),
        "_cdist_forward": _distances, "_pdist_forward": _distances,
        "_cdist_backward": _distances_backward, "_pdist_backward": _distances_backward,
    },
    "fft": {"_fft_c2c": _fft(5), "_fft_r2c": _fft(2.5), "_fft_c2r": _fft(2.5)},
    "elementwise": {
        **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_backward",
                         "_embedding_bag_dense_backward"), _bag),
        **dict.fromkeys(("_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell_backward_impl",
                         "_thnn_fused_gru_cell_backward"), lambda *_, **__: 0),  # what follows the products
    },
}  # fmt: skip

# --- bytes ----------------------------------------------------------------------------------------------------


@functools.cache
def _written(op: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the positions and the names of the arguments that an operation writes."""
    written = [] if is_higher_order(op) else written_arguments(op)
    return tuple(i for i, _ in written), tuple(a.name for _, a in written)


def written_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of an operation that it writes."""
    at, names = _written(op)
    return tensors_in([args[i] for i in at if i < len(args)], [kwargs.get(name) for name in names])


def work_of(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, inputs: Sequence[Tensor], new: Sequence[Tensor],
    written: Sequence[Tensor],
) -> tuple[str, Kind, torch.dtype, int | None, int]:  # fmt: skip
    """Return the name, kind, dtype, FLOPs and bytes of an operation, the first fields of `Operation`."""
    nbytes = bytes_of(op, inputs, written, new) if new or written else 0
    name = f"{op.namespace}.{name_of(op)}"
    return name, kind_of(op, args, kwargs), dtype_of(inputs, new), flops_of(op, args, kwargs, out), nbytes


def bytes_of(op: Any, inputs: Sequence[Tensor], written: Sequence[Tensor], new: Sequence[Tensor]) -> int:
    """Return the bytes that an operation reads and writes; an expanded dim is read once."""
    name, out = name_of(op), sum(map(_bytes, new)) + sum(map(_bytes, written))
    if name.startswith(("empty", "new_empty")):
        return 0
    if name in _LOOKUPS:
        return 2 * out + sum(_bytes(x) for x in inputs if not x.is_floating_point())
    if name in ("_embedding_bag", "_embedding_bag_forward_only"):  # rows of the table
        rows = inputs[1].numel() * inputs[0].shape[-1] * inputs[0].element_size()
        return rows + sum(map(_bytes, inputs[1:])) + out
    overwritten = sum(map(_bytes, written)) if name in _OVERWRITE else 0
    return sum(map(_bytes, inputs)) - overwritten + out


def _bytes(x: Tensor) -> int:
    if x.is_contiguous():  # most are, and a trace asks for each operand of each operation
        return x.nbytes
    sizes = [n for n, stride in zip(x.shape, x.stride(), strict=True) if stride or not n]
    return math.prod(sizes) * x.element_size()


def dtype_of(inputs: Sequence[Tensor], new: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype that an operation computes in: its first floating tensor's, of a complex one the parts'."""
    tensors = [*inputs, *new]
    floating = (x.dtype.to_real() for x in tensors if x.is_floating_point() or x.is_complex())
    return next(floating, tensors[0].dtype if tensors else torch.get_default_dtype())
