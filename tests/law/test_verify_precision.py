"""`verify` accepts programs in half precision, of results of any dtype, and still catches their mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard._core.compare import OtherRounding, reround
from fshard.optim.precision import cast
from tests.lib.assertions import error_text
from tests.lib.tiers import slow_unless

MESH = fs.make_mesh(data=2, model=2)
SPECS = {"up": P(None, "model"), "down": P("model"), "bias": P()}
SHARDED = {"up": P("data", "model"), "down": P("model", "data"), "bias": P("data")}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def normal(name: str, *shape: int, std: float = 1.0) -> Tensor:
    return fs.random.normal(fs.fold_in(fs.key(7), name), shape, std=std)


@dataclass(frozen=True)
class Parts:
    """Lines of the program that a mistake replaces."""

    total: Callable[[Tensor], Tensor] = lambda y: fs.psum(y, "model")
    mean: Callable[[Tensor], Tensor] = lambda loss: fs.pmean(loss, "data")
    enter: Callable[[Any], Any] = lambda p: fs.pvary(p, "data")


RIGHT = Parts()
MISTAKES = {
    "a psum is missing": replace(RIGHT, total=lambda y: y),
    "a mean for a sum": replace(RIGHT, total=lambda y: fs.pmean(y, "model")),
    "a sum for a mean": replace(RIGHT, mean=lambda loss: fs.psum(loss, "data")),
    "a pvary is missing": replace(RIGHT, enter=lambda p: p),
}


def mlp(p: Any, x: Tensor, parts: Parts) -> Tensor:
    h = torch.relu(fs.pvary(x, "model") @ p["up"])
    y = parts.total(h @ p["down"]) + p["bias"]
    return (y.float() - x.float()).square().mean()


def sgd(p: Any, loss_fn: Callable[[Any], Tensor], scale: float = 1.0) -> Any:
    """Return the loss and new parameters, of gradients that are divided by a scale of the loss."""
    loss, grads = fs.value_and_grad(lambda p: scale * loss_fn(p))(p)
    return loss / scale, fs.tree.map(lambda w, g: w - 0.1 * g / scale, p, grads)


def params() -> Any:
    return {"up": normal("up", 16, 32, std=0.25), "down": normal("down", 32, 16, std=0.2), "bias": normal("bias", 16)}


# --- programs: (parts) -> a function, its specs and its arguments -----------------------------------------------------


def autocast(parts: Parts, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Any:
    def step(p: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            with torch.autocast("cpu", dtype):
                return parts.mean(mlp(parts.enter(p), x, parts))

        return sgd(p, loss, scale)

    return step, (SPECS, P("data")), (P(), SPECS), (params(), normal("x", 8, 16))


def autocast_float16_with_loss_scale(parts: Parts) -> Any:
    return autocast(parts, torch.float16, scale=1024.0)


def parameters_cast_to_bfloat16(parts: Parts) -> Any:
    def step(p: Any, x: Tensor) -> Any:
        return sgd(p, lambda p: parts.mean(mlp(cast(parts.enter(p), torch.bfloat16), x.bfloat16(), parts)))

    return step, (SPECS, P("data")), (P(), SPECS), (params(), normal("x", 8, 16))


def unshard_in_bfloat16_and_reduce_in_float32(parts: Parts) -> Any:
    def step(p: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            full = fs.unshard(p, SHARDED, "data", dtype=torch.bfloat16, reduce_dtype=torch.float32)
            return parts.mean(mlp(full, x.bfloat16(), parts))

        return sgd(p, loss)

    return step, (SHARDED, P("data")), (P(), SHARDED), (params(), normal("x", 8, 16))


def bfloat16_states_of_adam(parts: Parts) -> Any:
    optimizer = fs.optim.adamw(1e-3)
    p = cast(params(), torch.bfloat16)
    state = optimizer.init(p)
    states = optimizer.specs(SPECS)

    def step(p: Any, state: Any, x: Tensor) -> Any:
        loss, grads = fs.value_and_grad(lambda p: parts.mean(mlp(parts.enter(p), x.bfloat16(), parts)))(p)
        return loss, *optimizer.update(grads, state, p)

    return step, (SPECS, states, P("data")), (P(), SPECS, states), (p, state, normal("x", 8, 16))


def float64_with_one_step_in_float32(parts: Parts) -> Any:
    def step(p: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            p = parts.enter(p)
            h = torch.relu(fs.pvary(x, "model") @ p["up"])
            y = parts.total((h @ p["down"]).float()).double() + p["bias"]
            return parts.mean((y - x).square().mean())

        return sgd(p, loss)

    return step, (SPECS, P("data")), (P(), SPECS), (cast(params(), torch.float64), normal("x", 8, 16).double())


def activations_cast_to_float8(parts: Parts) -> Any:
    def step(p: Any, x: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            p = parts.enter(p)
            h = torch.relu(parts.total(fs.pvary(x, "model") @ p["down"].T @ p["up"].T) / 8)
            h8 = h + (h.detach().to(torch.float8_e4m3fn).float() - h.detach())  # its gradient is that of h
            return parts.mean((h8 - x).square().mean())

        return sgd(p, loss)

    return step, (SPECS, P("data")), (P(), SPECS), (params(), normal("x", 8, 16))


def activations_quantized_to_int8(parts: Parts) -> Any:
    def step(p: Any, x: Tensor) -> Any:
        p = parts.enter(p)
        y = parts.total((fs.pvary(x, "model") @ p["up"] @ p["down"]).bfloat16()).float()
        step = fs.pmax(y.abs().amax(), "data") / 127
        return parts.mean(y.square().mean()), (y / fs.pvary(step, "data")).round().to(torch.int8)

    return step, (SPECS, P("data")), (P(), P("data")), (params(), normal("x", 8, 16))


def sum_of_parts_that_cancel_in_bfloat16(parts: Parts) -> Any:
    """Each part is rounded to bfloat16 and is 2000 times as large as the sum: one rank has no such rounding."""

    def total(x: Tensor) -> Tensor:
        return fs.psum(x.sum(0).bfloat16(), "data").float()

    x = normal("large", 1, 16) * 1000
    return total, (P("data"),), P(), (torch.cat([x, normal("small", 1, 16) - x]),)


def gpt2_in_bfloat16(parts: Parts) -> Any:
    """The gradient of the key's bias is 0: all of it is noise, of bfloat16 though it is float32."""
    gpt2 = fs.models.gpt2
    cfg = gpt2.Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    specs = gpt2.specs(cfg, model="model")
    values = fs.device_get(fs.materialize(gpt2.init(cfg), specs, MESH, key=fs.key(0)))

    def step(p: Any, ids: Tensor) -> Any:
        def loss(p: Any) -> Tensor:
            layout = gpt2.Layout("data", "model")
            return gpt2.loss(cfg, cast(p, torch.bfloat16), ids[:, :-1], ids[:, 1:], layout=layout, specs=specs)

        return fs.value_and_grad(loss)(p)

    ids = torch.randint(0, 11, (4, 9), generator=torch.Generator().manual_seed(0))
    return step, (specs, P("data")), (P(), specs), (values, ids)


PROGRAMS = [
    autocast, autocast_float16_with_loss_scale, parameters_cast_to_bfloat16, unshard_in_bfloat16_and_reduce_in_float32,
    bfloat16_states_of_adam, float64_with_one_step_in_float32, activations_cast_to_float8,
    activations_quantized_to_int8, sum_of_parts_that_cancel_in_bfloat16, gpt2_in_bfloat16,
]  # fmt: skip


def verify(program: Callable[[Parts], Any], parts: Parts) -> Any:
    f, in_specs, out_specs, args = program(parts)
    check = "first" if parts is RIGHT else "never"  # the checker would find some mistakes before values are compared
    f = fs.shard_map(f, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check=check)
    return fs.verify(f, *args, locate=False)  # the corpus has tests of the line


FAST = [float64_with_one_step_in_float32, autocast_float16_with_loss_scale, unshard_in_bfloat16_and_reduce_in_float32,
        sum_of_parts_that_cancel_in_bfloat16, activations_quantized_to_int8]  # fmt: skip


@pytest.mark.parametrize("program", slow_unless(FAST, PROGRAMS), ids=lambda program: program.__name__)
def test_correct_program_passes(program):
    verify(program, RIGHT)


@pytest.mark.parametrize(
    ("program", "mistake", "line"),
    [
        (autocast, "a psum is missing", ""),
        (autocast_float16_with_loss_scale, "a mean for a sum", ""),
        (autocast, "a sum for a mean", "2 is the size of data: a psum of a value that is already a total"),
        (autocast, "a pvary is missing", "the sum of the changes from args[0]['up'] on the ranks of 'data' is right"),
        pytest.param(parameters_cast_to_bfloat16, "a sum for a mean", "2 is the size of data", marks=pytest.mark.slow),
        (unshard_in_bfloat16_and_reduce_in_float32, "a sum for a mean", "2 is the size of data"),
        pytest.param(bfloat16_states_of_adam, "a sum for a mean", "2 is the size of data", marks=pytest.mark.slow),
        (float64_with_one_step_in_float32, "a pvary is missing", ""),
        (activations_cast_to_float8, "a psum is missing", ""),
        (activations_quantized_to_int8, "a mean for a sum", "every value is 0.25 times what it should be"),
    ],
    ids=lambda x: getattr(x, "__name__", None) or x.replace(" ", "_")[:20],
)
def test_mistake_in_half_precision_is_caught(program, mistake, line):
    text = error_text(verify, program, MISTAKES[mistake])
    assert f"collapsing '{'data' if mistake in ('a sum for a mean', 'a pvary is missing') else 'model'}'" in text
    assert line in text


# --- other roundings --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_other_rounding_changes_only_the_last_bits_and_keeps_order(dtype):
    x = normal("rounding", 4000).double().exp2() * torch.pi
    x = torch.cat([x, -x]).to(dtype)
    first, second = reround(x, 0), reround(x, 1)
    ulp = torch.finfo(dtype).eps * x.double().abs().log2().floor().exp2()
    distance = (first.double() - second.double()).abs() / ulp
    assert float(distance.max()) <= 3
    assert float((distance > 0).double().mean()) > (0.4 if dtype.itemsize == 1 else 0.8)  # the rest has few bits
    assert bool((first.double()[x.double().argsort()].diff() >= 0).all())
    assert torch.equal(reround(first, 0).double(), first.double())  # so copies of a rounded value stay
    exact = torch.tensor([0.0, -0.0, 1, 2, -4, 0.5, torch.inf, -torch.inf, torch.nan]).to(dtype).double()
    largest = torch.tensor(torch.finfo(dtype).max, dtype=torch.float64).to(dtype)
    for key in range(3):
        assert torch.equal(reround(exact.to(dtype), key).double().nan_to_num(7.0), exact.nan_to_num(7.0))
        assert bool(reround(largest, key).double().isfinite())


def test_other_rounding_reaches_forward_backward_and_in_place_operations():
    x = normal("x", 64)
    copy, grads = x.clone(), []
    for key in (0, 1):
        y = reround(x, 0).requires_grad_()
        with OtherRounding(key):
            (y * y.detach()).sum().backward()
            grads.append(y.grad)
            same = torch.where(y.detach() > 0, y.detach(), y.detach()).max()
            assert bool((y.detach() == same).any()) == (key == 0)  # of the bits of key 0, which `y` has
    assert float((grads[0] != grads[1]).double().mean()) > 0.9
    with OtherRounding(0), torch.no_grad():
        x.mul_(1.1)
        torch._foreach_mul_([copy], 1.1)
    assert torch.equal(x, copy)
    assert torch.equal(x, reround(x, 0))


def test_other_rounding_under_transforms():
    """Zeros of forward mode have no memory; operations of `vmap` are seen as one."""
    x = normal("x", 4, 3)
    hessian_product = lambda v: torch.func.jvp(torch.func.grad(lambda y: (y**3).sum()), (v,), (v,))[1]  # noqa: E731
    want = 6 * x * x
    with OtherRounding(0):
        got = torch.func.vmap(hessian_product)(x)
    torch.testing.assert_close(got, want)
    assert not torch.equal(got, want)


def test_error_text_where_noise_is_not_known():
    """A program that refuses other roundings is compared without, and says so."""

    def f(x: Tensor) -> Tensor:
        assert x[0] == 0.1
        return x * fs.axis_size("data")

    f = fs.shard_map(f, mesh=MESH, in_specs=(P(),), out_specs=P())
    text = error_text(fs.verify, f, torch.tensor([0.1, 2.0]))
    assert "every value is 2 times what it should be" in text
    assert "\n  noise is not known: with other roundings it raises AssertionError: " in text
