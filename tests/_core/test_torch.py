"""Every private API of torch that fshard uses still does what fshard needs of it.

A test is named for its entry in `fshard/_core/torch.py`. Where one fails, torch has changed: mend that file.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from fshard._core import torch as compat


def under_grad(f):
    """Call `f` with a tensor that torch.func.grad differentiates; the result of `f`."""
    out = []

    def loss(x: Tensor) -> Tensor:
        out.append(f(x))
        return x.sum()

    torch.func.grad(loss)(torch.ones(2))
    return out[0]


def under_vmap(f):
    """Call `f` with a tensor that torch.func.vmap batches; the result of `f`."""
    out = []
    torch.func.vmap(lambda x: (out.append(f(x)), x)[1])(torch.ones(2, 3))
    return out[0]


def test_is_wrapped():
    assert not compat.is_wrapped(torch.ones(2))
    assert under_grad(compat.is_wrapped)
    assert under_vmap(compat.is_wrapped)


def test_is_batched():
    assert under_vmap(compat.is_batched)
    assert not under_grad(compat.is_batched)


def test_is_grad_tracking():
    assert under_grad(compat.is_grad_tracking)
    assert not under_vmap(compat.is_grad_tracking)


def test_unwrapped():
    plain = torch.ones(2)
    assert compat.unwrapped(plain) is plain
    assert under_grad(lambda x: type(compat.unwrapped(x)) is Tensor and not compat.is_wrapped(compat.unwrapped(x)))


def test_in_transform():
    assert not compat.in_transform()
    assert compat.innermost_transform() is None
    assert under_grad(lambda _: compat.in_transform() and compat.innermost_transform() is not None)


def test_transform_level():
    assert compat.transform_level() == 0
    assert under_grad(lambda _: compat.transform_level()) == 1
    assert under_grad(lambda _: under_vmap(lambda _: compat.transform_level())) == 2


def test_level_of():
    assert compat.level_of(torch.ones(2)) == 0
    assert under_grad(lambda x: (compat.level_of(x), under_vmap(compat.level_of))) == (1, 2)
    assert compat.level_of(under_grad(lambda x: x)) < 0  # its transform has ended


def test_unwrapped_once():
    inner = under_grad(lambda x: under_vmap(compat.unwrapped_once))
    assert inner.shape == (2, 3)


def test_without_torch_function():
    class Raises(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            raise AssertionError

    with Raises(), compat.without_torch_function():
        torch.ones(2).sin()


def test_without_functorch():
    def made(_: Tensor) -> bool:
        with compat.without_functorch():
            return compat.is_wrapped(torch.ones(2))

    assert not under_grad(made)


def test_replace_reparametrize_module():
    module, x, names = torch.nn.Linear(1, 1), torch.ones(1, 1), []
    former = compat.replace_reparametrize_module(
        lambda *args, **kwargs: names.append([*args[1]]) or former(*args, **kwargs)
    )
    try:
        assert torch.func.functional_call(module, {"weight": 2 * x, "bias": x[0]}, x).item() == 3
    finally:
        compat.replace_reparametrize_module(former)
    torch.func.functional_call(module, {"bias": x[0]}, x)
    assert names == [["weight", "bias"]]


def test_in_backward():
    seen = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: seen.append(compat.in_backward()))
    x.sum().backward()
    assert seen == [True]
    assert not compat.in_backward()


def test_backward_number_is_the_next_number_of_the_forward_pass():
    seen = []
    x = torch.ones(2, requires_grad=True)
    number = compat.next_number()
    y = x * 3
    assert compat.next_number() == number + 1
    x.register_hook(lambda g: seen.append(compat.backward_number()))  # in the node of x * 3, and that of the leaf x
    y.register_hook(lambda g: seen.append(compat.backward_number()))
    assert compat.backward_number() is None
    y.sum().backward()
    assert seen[0] == number


class Seen(compat.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_torch_dispatch_mode():
    with Seen() as seen:
        torch.func.grad(lambda x: x.sin().sum())(torch.ones(2))
    assert {"sin", "cos"} <= set(seen.names)  # below torch.func: forward and backward


def test_without_modes():
    with Seen() as seen, compat.without_modes():
        torch.ones(2).sin()
    assert not seen.names


def test_suspended():
    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    names, x = [], torch.ones(2)
    with Seen() as seen, Functions() as functions:
        with compat.suspended(seen, functions):
            x.sin()
        assert seen.names == names == []
        x.cos()
        assert seen.names == names == ["cos"]
        with Seen() as above, Functions(), compat.suspended(seen, functions):  # not the innermost ones
            x.tan()
        assert (seen.names, above.names, names) == (["cos", "tan"], ["tan"], ["cos", "tan", "tan"])


def test_never_traced():
    def handler(*, traced: bool):
        class Mode(compat.TorchDispatchMode):
            pass

        def dispatch(self, func, types, args=(), kwargs=None):
            return twice(func(*args, **(kwargs or {})))

        Mode.__torch_dispatch__ = dispatch if traced else compat.never_traced(dispatch)
        return Mode()

    def twice(x: Tensor) -> Tensor:
        return 2 * x

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    graphs: list[object] = []
    x = torch.ones(2)
    for traced in (True, False):  # both have one code object, which is marked
        graphs.clear()
        f = torch.compile(lambda x: x.sin(), backend=backend)
        with handler(traced=traced):
            y = f(x)
        torch.testing.assert_close(y, 2 * x.sin())
        assert bool(graphs) == traced


def test_assume_constant_result():
    @compat.assume_constant_result
    def digest(name: str) -> int:
        return hashlib.blake2b(name.encode(), digest_size=1).digest()[0]

    compiled = torch.compile(lambda x: x + digest("a"), fullgraph=True, backend="eager")
    assert compiled(torch.tensor(0)).item() == digest("a")


def test_functional_collectives():
    schemas = {
        "all_reduce": ("input", "reduce_op", "group_name"),
        "all_gather_into_tensor": ("input", "group_size", "group_name"),
        "reduce_scatter_tensor": ("input", "reduce_op", "group_size", "group_name"),
        "all_to_all_single": ("input", "output_split_sizes", "input_split_sizes", "group_name"),
        "wait_tensor": ("tensor",),
    }
    for name, arguments in schemas.items():
        schema = getattr(compat.functional_collectives, name).default._schema
        assert tuple(a.name for a in schema.arguments) == arguments


def test_storage_id():
    x, y = torch.ones(4), torch.ones(4)
    assert compat.storage_id(x) == compat.storage_id(x[1:]) != compat.storage_id(y)
    with compat.FakeTensorMode():
        assert compat.storage_id(torch.ones(0)) != compat.storage_id(torch.ones(0))


def test_version_of():
    x = torch.ones(2)
    before = compat.version_of(x)
    x.add_(1)
    assert compat.version_of(x) > before
    with torch.inference_mode():
        assert compat.version_of(torch.ones(2)) == -1


def test_foreach_copy_():
    xs, ys = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    compat.foreach_copy_(xs, ys)
    assert all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def test_fused_adamw_():
    p, count = torch.nn.Parameter(torch.ones(16)), torch.tensor(3.0)
    p.grad, state = torch.full((16,), 0.5), [torch.full((16,), x) for x in (0.1, 0.2)]
    opt = torch.optim.AdamW([p], 0.1, weight_decay=0.0, fused=True)
    opt.state[p] = {"step": count - 1, "exp_avg": state[0].clone(), "exp_avg_sq": state[1].clone()}
    q = p.detach().clone()
    opt.step()
    compat.fused_adamw_([q], [p.grad], state[:1], state[1:], [], [count], lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8,
                        weight_decay=0.0, amsgrad=False, maximize=False)  # fmt: skip
    assert torch.equal(q, p)
    assert torch.equal(state[1], opt.state[p]["exp_avg_sq"])
    assert count == 3


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1,
                            timeout=datetime.timedelta(seconds=77))  # fmt: skip
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_backend_of_and_timeout_of(group):
    backend = compat.backend_of(group, "cpu")
    assert backend.name() == "gloo"
    assert compat.timeout_of(backend) == datetime.timedelta(seconds=77)


def test_default_store(group):
    compat.default_store().set("key", "value")
    assert compat.default_store() is compat.default_store()
    assert compat.default_store().clone().get("key") == b"value"


def test_fake_tensor_and_its_mode():
    with compat.FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.ones(2) + torch.ones(3)[:2]
        assert isinstance(x, compat.FakeTensor)
        assert x.shape == (2,)


def test_view_of_fake():
    aten, host = torch.ops.aten, torch.ones(2, 3, device="meta")
    with compat.FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        x = torch.ones(2, 6)
        same = compat.view_of_fake(aten.view.default, (x, [3, 4]), {})
        left, right = compat.view_of_fake(aten.split.Tensor, (x, 3, 1), {})
        assert [type(y) for y in (same, left, right)] == [compat.FakeTensor] * 3
        assert [compat.storage_id(y) for y in (same, left, right)] == [compat.storage_id(x)] * 3
        assert (same.shape, same.device, right.stride(), right.storage_offset()) == ((3, 4), x.device, (6, 1), 3)
        assert compat.view_of_fake(aten.t.default, (host,), {}).shape == (3, 2)  # not a fake one


def test_schema_of():
    schema = compat.schema_of(torch.ops.aten.add_.Tensor)
    assert [a.name for a in schema.arguments] == ["self", "other", "alpha"]
    assert [a.alias_info is not None and a.alias_info.is_write for a in schema.arguments] == [True, False, False]


def test_is_view():
    x = torch.ones(4)
    assert compat.is_view(x[1:])
    assert compat.is_view(x.view(2, 2))
    assert not compat.is_view(x)


def test_named_as():
    def f(x):
        """Slice."""
        return x[1:]

    g = compat.named_as(f)(lambda x: x)
    assert (g.__name__, g.__qualname__, g.__wrapped__) == (f.__name__, f.__qualname__, f)
    assert g.__doc__ is None


def test_set_jvp_nesting():
    with forward_ad.dual_level():  # held by somebody else: a second level would raise
        assert compat.set_jvp_nesting(5) == 0
        try:
            assert torch.func.jvp(torch.sin, (torch.zeros(2),), (torch.ones(2),))[1].tolist() == [1.0, 1.0]
        finally:
            assert compat.set_jvp_nesting(0) == 5


def test_replace_trunc_normal():
    calls = []
    former = compat.replace_trunc_normal(lambda x, *args, **kwargs: calls.append(args) or x)
    try:
        torch.nn.init.trunc_normal_(torch.empty(3), 1.0, 2.0, -3.0, 4.0)
    finally:
        compat.replace_trunc_normal(former)
    assert calls == [(1.0, 2.0, -3.0, 4.0)]
    assert torch.nn.init.trunc_normal_(torch.zeros(3), a=0.5, b=0.7).min() >= 0.5


def test_has_tangent():
    x = torch.ones(2)
    assert not compat.has_tangent(x)
    with forward_ad.dual_level():
        assert not compat.has_tangent(x)
        assert not compat.any_tangent([x])
        assert compat.has_tangent(forward_ad.make_dual(x, x))
        assert compat.any_tangent([x, forward_ad.make_dual(x, x)])


def test_with_tangents():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            with compat.with_tangents():
                seen.append(compat.has_tangent(inputs[0]))

        @staticmethod
        def jvp(ctx, t):
            return 2 * t

    seen = []
    with forward_ad.dual_level():
        Double.apply(forward_ad.make_dual(torch.ones(2), torch.ones(2)))
    assert seen == [True]


def test_replace_dual_levels():
    calls = []
    former = compat.replace_dual_levels(lambda: calls.append("enter") or 0, lambda: calls.append("exit"))
    try:
        with forward_ad.dual_level():
            pass
    finally:
        compat.replace_dual_levels(*former)
    assert calls == ["enter", "exit"]
    with forward_ad.dual_level():  # as before
        assert compat.has_tangent(forward_ad.make_dual(torch.ones(2), torch.ones(2)))


def test_legacy_batches():
    """compat.is_legacy_batched, compat.without_legacy_batch, compat.with_legacy_batch."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, g):
            plain = compat.without_legacy_batch(g)
            seen.append((compat.is_legacy_batched(g), compat.is_legacy_batched(plain), tuple(plain.shape)))
            return compat.with_legacy_batch(2 * plain)

    seen = []
    x = torch.ones(2, requires_grad=True)
    (rows,) = torch.autograd.grad(Double.apply(x), x, torch.eye(2), is_grads_batched=True)
    assert torch.equal(rows, 2 * torch.eye(2))
    assert seen == [(True, False, (2, 2))]


def test_is_traced():
    seen = []
    f = lambda x: (seen.append(compat.is_traced()), x + 1)[1]  # noqa: E731
    x = torch.ones(2)
    f(x), make_fx(f)(x), make_fx(f, pre_dispatch=True)(x), torch.jit.trace(f, (x,), check_trace=False)
    assert seen == [False, True, True, True]


@pytest.mark.parametrize(("forward", "backward", "of_cuda"), [
    (compat.flash_attention, compat.flash_attention_backward, False),
    (compat.efficient_attention, compat.efficient_attention_backward, True),
])  # fmt: skip
def test_flash_attention_and_efficient_attention(forward, backward, of_cuda):
    """Attention, its log-sum-exp and its gradients; of the kernel for CUDA the shapes."""
    device, groups = torch.device("meta" if of_cuda else "cpu"), 4 if of_cuda else 2
    q, k, v = (torch.randn(2, n, t, 8, device=device) for n, t in ((4, 5), (groups, 7), (groups, 7)))
    out, lse, *rest = forward(q, k, v, None, True) if of_cuda else forward(q, k, v)
    grads = (backward(out, q, k, v, None, out, lse, *rest, 0.0, [True, True, True, False]) if of_cuda
             else backward(out, q, k, v, out, lse, 0.0, False))  # fmt: skip
    assert [x.shape for x in (out, *grads[:3])] == [q.shape, q.shape, k.shape, v.shape]
    if of_cuda:
        assert lse.shape == (2, 4, 32)
        return
    scores = q @ k.repeat_interleave(2, 1).mT / 8**0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ v.repeat_interleave(2, 1))


def test_convolution_backend():
    x, w = torch.zeros(4, 8, 6, 6), torch.zeros(8, 8, 3, 3)
    args = [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    assert compat.convolution_backend(x, w, args) == "mkldnn"
    assert compat.convolution_backend(x, w, (*args[:3], True, *args[4:])) == "mkldnn"
    assert compat.convolution_backend(x.double(), w.double(), args) == "slow"


def test_cudnn_rnn():
    x, h = torch.zeros(5, 2, 4, device="meta"), torch.zeros(1, 2, 8, device="meta")
    weights = [torch.zeros(shape, device="meta") for shape in ((32, 4), (32, 8), 32, 32)]
    out, state, cell, *_ = compat.cudnn_rnn(x, weights, 4, None, h, h, 2, 8, 0, 1, False, 0.0, True, False, [], None)
    assert [y.shape for y in (out, state, cell)] == [(5, 2, 8), (1, 2, 8), (1, 2, 8)]


def test_is_summed_in_place():
    """Under a mode autograd adds out of place; without one to a gradient that nothing else refers to, in place."""
    found = []

    class Mode(compat.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op is torch.ops.aten.add.Tensor:
                found.append(compat.is_summed_in_place(args[0]))
            return op(*args, **(kwargs or {}))

    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    for loss in (
        (x * 2).sum() + (x * 3).sum(),
        (x * 3).sum() + ((x + y) * 2).sum(),
    ):  # y, too, has the gradient of x + y
        with Mode():
            torch.autograd.grad(loss, (x, y), allow_unused=True)
    assert found == [True, False]


def test_group_named(group):
    assert compat.group_named(group.group_name) is group


def test_every_entry_has_a_test():
    tests = Path(__file__).read_text()
    missing = [name for name in compat.__all__ if f"compat.{name}" not in tests]
    assert not missing, f"entries of _core.torch without a test: {missing}"


def test_fewer_than_47_private_names():
    """Count the names of torch in `_core/torch.py` that begin with an underscore, or whose module's name does."""
    tree = ast.parse(Path(compat.__file__).read_text())
    private = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torch"):
            private |= {a.name for a in node.names if "._" in f".{node.module}" or a.name.startswith("_")}
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            private.add(node.attr)
    private -= {"_C"}
    assert len(private) < 47, sorted(private)
