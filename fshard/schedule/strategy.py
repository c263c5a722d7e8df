"""Sharding strategies by the names of torch's FSDP, as specs and options of a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fshard import tree as _tree
from fshard.errors import checked, fail
from fshard.spec import P, fully_shard, names_of, on_host

from .options import BackwardPrefetch, GatherOptions, Release

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")  # numbered from 1


class Optimizer(Protocol):
    """An optimizer, as a strategy uses it: for the specs of its state, computed from the parameters' specs."""

    def specs(self, param_specs: Any, /) -> Any: ...


@checked
@dataclass(frozen=True)
class Strategy:
    """Axes that split the state of training, and when weights are gathered; made by `fs.strategy`.

    Fields:
        axis: the axes of the batch, and of `scan`, `unshard` and `Apply.unshard`: their ranks have different data.
        shard: the axes that also split parameters, gradients and the optimizer's state, which are replicated over the
            rest.
        release, prefetch, backward_prefetch: options of `scan`, `Apply.unshard` and the models' `Layout`.
        offload_params, offload_optimizer: keep parameters and gradients, or the optimizer's state, in host memory.

    >>> fsdp = fs.strategy("FULL_SHARD", axis="data")
    >>> fsdp.param_specs({"w": fs.init.zeros((8, 4))})
    {'w': P('data')}
    >>> fsdp.release, fsdp.prefetch
    (True, 1)
    """

    name: str
    axis: str | tuple[str, ...]
    shard: tuple[str, ...]
    release: Release = True
    prefetch: int = 1
    backward_prefetch: BackwardPrefetch = None
    offload_params: bool = False
    offload_optimizer: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Return the options to pass to `scan`, `apply.unshard` and `Layout`, as `scan(..., **options)`."""
        return {"release": self.release, "prefetch": self.prefetch, "backward_prefetch": self.backward_prefetch}

    @checked
    def param_specs(self, tree: Any, specs: Any = P(), *, stacked: str | Sequence[str] = ()) -> Any:  # noqa: B008
        """Return the specs of parameters and of their gradients.

        The leaves of `tree` have a `.shape`; `specs`, or a prefix of it, splits them over other axes, as a model's
        `specs(cfg, model=...)` does. `stacked` as for `fully_shard`.
        """
        sharded = fully_shard(specs, tree, axis=self.shard, stacked=stacked)
        return on_host(sharded) if self.offload_params else sharded

    @checked
    def state_specs(self, optimizer: Optimizer, param_specs: Any) -> Any:
        """Return the specs of an optimizer's state: split as the parameters are, in the memory of the strategy."""
        _tree.check_leaves("state_specs", "param_specs", param_specs, P)
        specs = optimizer.specs(_tree.map(lambda s: s.with_entries(*s, memory="device"), param_specs))
        return on_host(specs) if self.offload_optimizer else specs


@checked
def strategy(
    name: str | int, *, axis: str | tuple[str, ...] | None = None, release: Release | None = None, prefetch: int = 1,
    backward_prefetch: BackwardPrefetch = None, offload_params: bool = False, offload_optimizer: bool | None = None,
) -> Strategy:  # fmt: skip
    """Return a strategy of torch's FSDP, by its name, or by its number in a config of Accelerate.

        name                       parameters, gradients, optimizer   gathered weights
        1, FULL_SHARD              split over `axis`                  freed after forward, gathered again in backward
        2, SHARD_GRAD_OP           split over `axis`                  kept until backward
        3, NO_SHARD                replicated                         none: gradients are summed (DDP)
        4, HYBRID_SHARD            split, but for the first axis      as FULL_SHARD, over the axes that split them
        5, _HYBRID_SHARD_ZERO2     split, but for the first axis      as SHARD_GRAD_OP

    A program computes the same numbers with every strategy: bit for bit if the gradients are summed over the same axes
    in one step, and to rounding for the two sums of hybrid sharding.

    Args:
        axis: by default "data"; for the hybrid strategies ("replica", "shard").
        release: an axis, or axes, over which weights stay split between forward and backward, as for `scan`: torch's
            `reshard_after_forward=k` for a mesh with an axis of size k. By default the strategy's.
        prefetch, backward_prefetch: as for `scan`. torch's BACKWARD_PRE is 1, BACKWARD_POST "post" and none 0; its
            `forward_prefetch=False` is prefetch=0, and `limit_all_gathers` always holds.
        offload_params: keep parameters and gradients in host memory.
        offload_optimizer: the same for the optimizer's state; by default equal to `offload_params`, as in torch.

    >>> s = strategy("FULL_SHARD")
    >>> s.param_specs({"w": torch.empty(64, 8)})
    {'w': P('data')}
    >>> s = strategy("HYBRID_SHARD", offload_params=True)
    >>> s.axis, s.param_specs({"w": torch.empty(64, 8)}, {"w": P("model")})
    (('replica', 'shard'), {'w': P('model', 'shard', memory='host')})
    >>> s.options
    {'release': True, 'prefetch': 1, 'backward_prefetch': None}

    Raises ShardingError for an unknown name, for axes that a strategy has no use for, and for a `release` that
    contradicts it.
    Source: Zhao et al., 2023, "PyTorch FSDP"; `torch.distributed.fsdp.ShardingStrategy` for the names.
    """
    known = STRATEGIES[name - 1] if isinstance(name, int) and 1 <= name <= len(STRATEGIES) else str(name)
    known = known if known in STRATEGIES else f"_{known}"
    if known not in STRATEGIES:
        raise fail(f"strategy: name={name!r}", fix=", ".join(f"{n!r} ({i})" for i, n in enumerate(STRATEGIES, 1)))
    hybrid, keeps = "HYBRID" in known, known not in ("FULL_SHARD", "HYBRID_SHARD")
    axis = axis if axis is not None else ("replica", "shard") if hybrid else "data"
    names = names_of(axis)
    if not names or (hybrid and len(names) < 2) or len(set(names)) < len(names):
        raise fail(f"strategy: {known} with axis={axis!r}",
                   fix="the axis that replicates first, then the axes that split: ('replica', 'shard')" if hybrid
                   else "one or more axes: 'data'")  # fmt: skip
    shard = () if known == "NO_SHARD" else names[1:] if hybrid else names
    release = (not keeps) if release is None else release
    if keeps and release is not False:
        raise fail(f"strategy: {known} keeps gathered weights until backward", f"release={release!r}",
                   fix="'FULL_SHARD' or 'HYBRID_SHARD', with release=")  # fmt: skip
    GatherOptions(release, prefetch, backward_prefetch).check("strategy", shard)
    on_host = offload_params if offload_optimizer is None else offload_optimizer
    return Strategy(known, axis, shard, release, prefetch, backward_prefetch, offload_params, on_host)
