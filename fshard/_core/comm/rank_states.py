"""Settings of torch and attributes of modules: a process has them once, and each simulated rank needs them separately.

Ranks that are threads take turns. When the turn changes, one rank's state is stored and the next one's is set.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from fshard._core.torch import in_transform, replace_dual_levels, replace_reparametrize_module, set_jvp_nesting
from fshard.errors import fail

_cuda = torch.backends.cuda

# Getter and setter of each setting that torch keeps for the process.
_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (_cuda.math_sdp_enabled, _cuda.enable_math_sdp),
    (_cuda.flash_sdp_enabled, _cuda.enable_flash_sdp),
    (_cuda.mem_efficient_sdp_enabled, _cuda.enable_mem_efficient_sdp),
    (_cuda.cudnn_sdp_enabled, _cuda.enable_cudnn_sdp),
)


_last: list[list[Any]] = [[]]  # one entry: the settings as a rank of any run has read or set them last


def _settings() -> list[Any]:
    _last[0] = [get() for get, _ in _SETTINGS]
    return _last[0]


def _set_settings(values: list[Any], now: list[Any]) -> None:
    """Set what differs from `now`."""
    for (_, set_), value, before in zip(_SETTINGS, values, now, strict=True):
        if value != before:
            set_(value)
    _last[0] = values


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))  # of every module: dicts of parameters, buffers, hooks


class RankStates:
    """The states of all ranks of one run. After the run, the process has the state of rank 0.

    torch.func.functional_call swaps the parameters of a module in place. From a module's first such call on, each rank
    has its attributes separately: a `__dict__` for the module and for each submodule, equal at first to the one before
    that call. Tensors are shared, and so are lists and other objects that modules refer to.
    """

    def __init__(self, n: int) -> None:
        self._before = _settings()
        self._settings = [self._before] * n
        self._modules: dict[int, tuple[nn.Module, dict[str, Any], dict[str, Any]]] = {}  # its __dict__, and a copy
        self._dicts: list[dict[int, dict[str, Any]]] = [{} for _ in range(n)]  # of each rank
        self._over = False

    def save(self, rank: int) -> None:
        """Store the state at the end of a turn."""
        self._settings[rank] = _settings()

    def load(self, rank: int) -> None:
        """Set the state at the start of a turn; none after the run, when a rank ends late."""
        if self._over:
            return
        _set_settings(self._settings[rank], _last[0])  # the turn before has ended, and has read them
        dicts = self._dicts[rank]
        for key, (module, original, before) in self._modules.items():
            if key not in dicts:
                dicts[key] = original if rank == 0 else _copy(before)
            object.__setattr__(module, "__dict__", dicts[key])

    def separate(self, module: nn.Module, rank: int) -> None:
        """Separate the ranks' attributes of a module and of its submodules."""
        new = {id(m): m for m in module.modules() if id(m) not in self._modules}
        if not new or self._over:
            return
        if not _separated.isdisjoint(new):
            raise fail(f"torch.func.functional_call of {type(module).__name__}: a call of shard_map on another thread "
                       "is using the module", fix="give each thread its own: copy.deepcopy(module)")  # fmt: skip
        _separated.update(new)
        self._modules.update((key, (m, m.__dict__, _copy(m.__dict__))) for key, m in new.items())
        self.load(rank)

    def end(self) -> None:
        """Set the state of rank 0 for the time after the run."""
        self.load(0)
        self._release()

    def abandon(self) -> None:
        """Set the state before the run: the ranks have not ended normally, and may still write to their state."""
        _set_settings(self._before, _settings())
        for module, _, before in self._modules.values():
            object.__setattr__(module, "__dict__", before)
        self._release()

    def _release(self) -> None:
        _separated.difference_update(self._modules)
        self._modules.clear()
        self._over = True

    @contextlib.contextmanager
    def on_thread(self, rank: int) -> Iterator[None]:
        """Run a rank's functional calls on this thread."""
        _thread.rank, _thread.has_level = (self, rank), False
        try:
            yield
        finally:
            del _thread.rank


def _copy(attributes: dict[str, Any]) -> dict[str, Any]:
    containers = (dict, OrderedDict, set)  # a scripted module has others, which cannot be copied
    return {k: copy.copy(x) if k in _MODULE_ATTRIBUTES and type(x) in containers else x for k, x in attributes.items()}


_separated: set[int] = set()  # the ids of modules whose attributes are separate for the ranks of some run
_thread = threading.local()  # `rank`: the states and the rank of a thread that runs one


class _TorchForRanks:
    """A context of simulated runs, in which torch keeps apart what it keeps once for all threads.

    `torch.func.functional_call` separates the modules of ranks. One level of forward-mode AD is open, so that all ranks
    can use `torch.func.jvp`: the first jvp opens one, and whichever rank ends the last jvp closes it, with the tangents
    of the others. While the nesting that torch counts is high, no jvp opens or closes one. A `dual_level` of
    a rank is that level, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs = 0
        self._nesting, self._level = 0, None
        self._reparametrize: Callable[..., Any] = replace_reparametrize_module
        self._levels: tuple[Any, Any] = forward_ad.enter_dual_level, forward_ad.exit_dual_level

    def __enter__(self) -> None:
        with self._lock:
            if self._runs == 0:
                with contextlib.suppress(RuntimeError):  # the caller has opened a level
                    self._level = forward_ad.enter_dual_level()  # type: ignore[no-untyped-call]
                self._nesting = set_jvp_nesting(1 << 20)
                self._reparametrize = replace_reparametrize_module(self._separate)
                self._levels = replace_dual_levels(self._enter_level, self._exit_level)
            self._runs += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._runs -= 1
            if self._runs == 0:
                replace_dual_levels(*self._levels)
                set_jvp_nesting(self._nesting)
                if self._level is not None:
                    forward_ad.exit_dual_level(level=self._level)
                    self._level = None
                replace_reparametrize_module(self._reparametrize)

    def _separate(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        states, rank = getattr(_thread, "rank", (None, 0))
        if states is not None:
            states.separate(module, rank)
        return self._reparametrize(module, *args, **kwargs)

    def _enter_level(self) -> int:
        # A level inside a jvp or inside another level is an error of torch on one device.
        if getattr(_thread, "rank", None) is None or _thread.has_level or in_transform():
            return int(self._levels[0]())
        _thread.has_level = True
        return 0

    def _exit_level(self, *, level: int | None = None) -> None:
        if getattr(_thread, "rank", None) is None or not _thread.has_level:
            self._levels[1](level=level)
        else:
            _thread.has_level = False

    def forget_runs(self) -> None:
        """End the runs of the process that forked this one: their threads are not here."""
        self._lock = threading.Lock()
        _separated.clear()
        if self._runs:
            self._runs = 1
            self.__exit__()


torch_for_ranks = _TorchForRanks()
os.register_at_fork(after_in_child=torch_for_ranks.forget_runs)
