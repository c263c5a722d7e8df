"""Modules and settings that threads share: each simulated rank has its own, as a process would."""

from __future__ import annotations

import contextvars
import re
import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fshard as fs
from fshard import P
from fshard._core.comm.rank_states import RankStates
from fshard._core.region import region

N = 4
mesh = fs.make_mesh(m=N)
SPLIT = P("m")


def on_ranks(f, *args, in_specs=SPLIT, out=SPLIT, check="never", mesh=mesh):
    return fs.device_get(fs.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out, check=check)(*args))


def rank_of():
    return region().rank


def swap():
    """Let every other rank run."""
    fs.psum(torch.zeros(1, dtype=torch.float32), "m")


# --- modules ------------------------------------------------------------------------------------------------------


class Between(nn.Module):
    """Two layers with a sum over the ranks between them."""

    def __init__(self, first: nn.Module, second: nn.Module):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        swap()
        return self.second(h)


class LastOutput(nn.Module):
    """A recurrent layer: its `forward` stores a list of the weights in an attribute."""

    def __init__(self, kind: type[nn.RNNBase]):
        super().__init__()
        self.layer = kind(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x[None])[0][0]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        h = self.first(x)
        swap()
        return self.second(h)


class Kept(nn.Module):
    """Reaches a layer through a closure, which `copy.deepcopy` would not follow."""

    def __init__(self):
        super().__init__()
        layer = self.layer = nn.Linear(3, 3)

        def call(x):
            return layer(x)

        self.call = call

    def forward(self, x):
        swap()
        return self.call(x)


MODULES = {
    "no collective": lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)),
    "a collective inside": lambda: Between(nn.Linear(3, 3), nn.Linear(3, 3)),
    "tied": Tied,
    "closure": Kept,
    "RNN": lambda: Between(LastOutput(nn.RNN), LastOutput(nn.RNN)),
    "LSTM": lambda: Between(LastOutput(nn.LSTM), LastOutput(nn.LSTM)),
    "batch norm": lambda: Between(nn.BatchNorm1d(3), nn.BatchNorm1d(3)),
    "parametrized": lambda: Between(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    ),
}


def expected(module, trees, x):
    """The same calls one after the other: `functional_call` in a plain loop, on a mesh of one rank."""
    one = fs.make_mesh(m=1)
    return torch.cat(
        [
            on_ranks(lambda x, tree=tree: functional_call(module, tree, (x,)), part, mesh=one)
            for tree, part in zip(trees, x.chunk(N), strict=True)
        ]
    )


@pytest.mark.parametrize("name", MODULES)
def test_functional_call_of_one_module_uses_the_parameters_of_each_rank(name):
    torch.manual_seed(0)
    module = MODULES[name]()
    state = {k: v.detach().clone() for k, v in [*module.named_parameters(), *module.named_buffers()]}
    own = {id(m): (vars(m), dict(m._parameters), dict(m._buffers)) for m in module.modules()}
    x = torch.randn(2 * N, 3)

    def trees():
        return [{k: (r + 1) * v if v.is_floating_point() else v.clone() for k, v in state.items()} for r in range(N)]

    want = expected(module, trees(), x)
    for check in ("first", "never"):
        got = on_ranks(lambda x: functional_call(module, trees()[rank_of()], (x,)), x, check=check)
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    for m in module.modules():
        attributes, parameters, buffers = own[id(m)]
        assert vars(m) is attributes
        assert all(m._parameters[k] is v for k, v in parameters.items())
        assert all(m._buffers[k] is v for k, v in buffers.items())


def test_functional_call_is_differentiated_on_each_rank():
    module = Between(nn.Linear(3, 3), nn.Linear(3, 3))
    params = {k: v.detach() for k, v in module.named_parameters()}
    x = torch.randn(N, 3)

    def gradient(x, r):
        scaled = {k: (r + 1) * v for k, v in params.items()}
        return torch.func.grad(lambda p: functional_call(module, p, (x,)).square().sum())(scaled)["first.weight"]

    got = on_ranks(lambda x: gradient(x, rank_of()), x)
    one = fs.make_mesh(m=1)
    want = [on_ranks(gradient, x[r : r + 1], r, in_specs=(P("m"), None), mesh=one) for r in range(N)]
    torch.testing.assert_close(got, torch.cat(want))


def test_rank_that_reads_a_module_later_sees_its_own_parameters():
    """Rank 0 is inside its functional call while the others have not begun theirs."""
    module = Between(nn.Linear(3, 3), nn.Linear(3, 3))
    weight = module.first.weight.detach().clone()

    def f(x):
        read = module.first.weight.detach().clone()
        functional_call(module, {"first.weight": torch.zeros(3, 3)}, (x,))
        swap()
        return torch.stack([read, module.first.weight.detach()])[None]

    got = on_ranks(f, torch.ones(N, 3))
    torch.testing.assert_close(got, weight.expand(N, 2, 3, 3), rtol=0, atol=0)


def test_attributes_of_a_functional_call_are_those_of_each_rank_and_then_of_rank_0():
    class Counts(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            swap()
            self.seen = rank_of()
            swap()
            return x + self.seen

    module = Counts()

    def f(x):
        y = functional_call(module, {}, (functional_call(module, {}, (x,)),))
        swap()
        return y + 100 * module.calls + 1000 * module.seen

    assert on_ranks(f, torch.zeros(N)).tolist() == [200 + 1002 * r for r in range(N)]
    assert (module.calls, module.seen) == (2, 0)
    assert on_ranks(f, torch.zeros(N)).tolist() == [400 + 1002 * r for r in range(N)]


def test_module_is_as_before_when_a_rank_fails_inside_its_functional_call():
    module = Between(nn.Linear(3, 3), nn.Linear(3, 3))
    before = dict(module.named_parameters())

    def f(x):
        functional_call(module, {k: v * 2 for k, v in before.items()}, (x if rank_of() != 2 else x[:, :1],))

    with pytest.raises(RuntimeError, match="shapes"):
        on_ranks(f, torch.ones(N, 3))
    assert all(before[k] is v for k, v in module.named_parameters())


def test_error_text_of_a_module_that_a_run_on_another_thread_is_using():
    module, inside, leave = nn.Linear(1, 1), threading.Event(), threading.Event()
    before = dict(module.named_parameters())

    def waits(x):
        y = functional_call(module, {"weight": torch.zeros(1, 1)}, (x,))
        inside.set()
        assert leave.wait(600)
        return y

    other = threading.Thread(target=on_ranks, args=(waits, torch.ones(N, 1)))
    other.start()
    try:
        assert inside.wait(600)
        with pytest.raises(fs.ShardingError) as caught:
            on_ranks(lambda x: functional_call(nn.Sequential(module), {}, (x,)), torch.ones(N, 1))
    finally:
        leave.set()
        other.join()
    assert str(caught.value) == (
        "torch.func.functional_call of Sequential: a call of shard_map on another thread is using the module\n"
        "  fix: give each thread its own: copy.deepcopy(module)"
    )
    assert all(before[k] is v for k, v in module.named_parameters())
    on_ranks(lambda x: functional_call(module, {}, (x,)), torch.ones(N, 1))


def test_functional_call_outside_of_ranks_is_torchs_own_while_ranks_run():
    former = nn.utils.stateless._reparametrize_module
    module, seen = nn.Linear(1, 1), []

    def other():
        seen.append(functional_call(module, {"weight": torch.ones(1, 1), "bias": torch.ones(1)}, torch.ones(1)).item())

    def f(x):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return x

    on_ranks(f, torch.ones(N))
    assert seen == [2.0] * N
    assert nn.utils.stateless._reparametrize_module is former


# --- settings -----------------------------------------------------------------------------------------------------

SETTINGS = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1),
    "anomaly": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, True),
    "math attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
    "flash attention": (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "grad": (torch.is_grad_enabled, torch.set_grad_enabled, False),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", SETTINGS)
def test_setting_that_a_rank_changes_is_its_own(name):
    get, set_, other = SETTINGS[name]
    usual, seen = get(), []

    def f(x):
        if rank_of() % 2:
            set_(other)
        swap()
        seen.append((rank_of(), get()))
        if rank_of() % 2:
            set_(usual)
        swap()
        return x

    try:
        on_ranks(f, torch.ones(N))
        assert sorted(seen) == [(r, other if r % 2 else usual) for r in range(N)]
        assert get() == usual
    finally:
        set_(usual)


def test_setting_of_a_failed_run_is_not_left_behind():
    def f(x):
        if rank_of() == 1:
            torch.set_default_dtype(torch.float64)
            raise ZeroDivisionError
        swap()

    with pytest.raises(ZeroDivisionError):
        on_ranks(f, torch.ones(N))
    assert torch.get_default_dtype() == torch.float32


def test_rank_that_ends_after_its_run_was_given_up_changes_nothing():
    module, states = nn.Linear(1, 1), RankStates(2)
    own = vars(module)
    torch.set_default_dtype(torch.float64)
    try:
        states.save(1)
        states.separate(module, 0)
        torch.set_default_dtype(torch.float64)
        states.abandon()
        assert torch.get_default_dtype() == torch.float32
        assert vars(module) is not own  # rank 0 may still write to that one
        now = vars(module)
        states.load(1)
        states.separate(module, 1)
        assert torch.get_default_dtype() == torch.float32
        assert vars(module) is now
    finally:
        torch.set_default_dtype(torch.float32)


# --- what ranks take from the caller ------------------------------------------------------------------------------

variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


@pytest.mark.parametrize("n", [1, 2])
def test_context_variables_of_the_caller_are_seen_on_every_rank(n):
    token = variable.set(7)
    try:
        assert fs.make_mesh(m=n).run(lambda comm, rank: variable.get()) == [7] * n
    finally:
        variable.reset(token)


@pytest.mark.parametrize("n", [1, 2])
def test_default_device_of_the_caller_applies_on_every_rank(n):
    with torch.device("meta"):
        assert fs.make_mesh(m=n, device="cpu").run(lambda comm, rank: torch.empty(1).device.type) == ["meta"] * n
    assert fs.make_mesh(m=n).run(lambda comm, rank: torch.empty(1).device.type) == ["cpu"] * n


# --- tensors that the function captures ---------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["in place", "to a view", "foreach", "to .data", "to integers"])
def test_error_text_of_a_write_to_a_captured_tensor(write):
    total, count = torch.zeros(2, 3), torch.zeros((), dtype=torch.int64)
    functions = {
        "in place": lambda x: total.add_(1).sum() + x,
        "to a view": lambda x: total[0].t().add_(1).sum() + x,
        "foreach": lambda x: torch._foreach_add_([total], 1) or x,
        "to .data": lambda x: setattr(total, "data", 2 * total) or x,
        "to integers": lambda x: count.add_(1) + x,
    }
    f, one = functions[write], fs.make_mesh(m=1)
    on_ranks(f, torch.ones(1, 3), check="always", mesh=one)  # a mesh of one rank shares nothing
    with pytest.raises(fs.ShardingError) as caught:
        on_ranks(f, torch.ones(N, 3), check="first")
    place, *_, tensor, why, fix = str(caught.value).splitlines()
    how = "((foreach_)?add|an assignment to .data)"
    where = "that was made outside of shard_map"
    assert re.fullmatch(rf"test_rank_states.py:\d+ in <lambda>: {how} writes to a tensor {where}", place)
    assert tensor.endswith("  i64[]    captured" if write == "to integers" else "  f32[2, 3]{I: m}    captured")
    assert why == "  processes would each change a copy of their own, and simulated ranks, which are threads, share one"
    assert fix.startswith("  fix: pass it as an argument, and return its new value (of a module's buffers: fs.defer")


def test_buffers_of_a_captured_module_are_not_updated_by_all_ranks():
    norm = nn.BatchNorm1d(3)
    with pytest.raises(fs.ShardingError, match="add writes to a tensor"):  # the count of batches
        on_ranks(norm, torch.randn(8 * N, 3), check="first")
    norm.num_batches_tracked = None
    with pytest.raises(fs.ShardingError, match="batch_norm writes to a tensor"):
        on_ranks(norm, torch.randn(8 * N, 3), check="first")
    assert on_ranks(norm.eval(), torch.zeros(N, 3), check="first").shape == (N, 3)


def test_writes_to_tensors_of_one_rank_are_accepted():
    numbers, seen = np.ones(3, dtype=np.float32), torch.zeros(1)

    def f(x):
        y = torch.from_numpy(numbers.copy())  # no operation that a dispatch mode sees
        torch.tensor([1.0, 2.0]).add_(1)
        torch.empty(3).fill_(1)
        x.add_(y.mul_(2))
        return seen + x  # reads a captured tensor

    assert on_ranks(f, torch.zeros(N, 3), check="first").tolist() == [[2.0] * 3] * N
