"""Correct parallel programs, as data: each with the same computation on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import fshard as fs


@dataclass(frozen=True)
class Program:
    """A parallel program, and the same computation of full tensors without a mesh."""

    f: Callable[..., Any]  # runs in a region; its name is the name of the program
    axes: dict[str, int]
    in_specs: tuple[Any, ...]
    out_specs: Any
    args: tuple[Any, ...]
    dense: Callable[..., Any]  # of the same arguments, by torch alone: an equal tree of full tensors
    meshes: tuple[dict[str, int], ...] | None = None  # those to verify on, where an axis cannot be collapsed
    static: bool = True  # False: Python branches on values, which fs.check, without data, must refuse

    def __str__(self) -> str:
        return self.f.__name__

    def mapped(self, check: str = "always") -> Any:
        """Return shard_map of the program on its simulated mesh."""
        mesh = fs.make_mesh(kind="simulated", **self.axes)
        return fs.shard_map(self.f, mesh=mesh, in_specs=self.in_specs, out_specs=self.out_specs, check=check)


def dense_grad(loss: Callable[..., torch.Tensor], argnums: int | tuple[int, ...] = 0) -> Callable[..., Any]:
    """Return a function of full tensors that computes a loss and its gradient, by torch alone."""

    def value_and_grad(*args: Any) -> Any:
        grads, value = torch.func.grad_and_value(loss, argnums)(*args)
        return value, grads

    return value_and_grad


def normal(name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> torch.Tensor:
    """Return normal numbers that are a function of the name and the shape."""
    return fs.random.normal(fs.fold_in(fs.key(7), name), shape, std=std, mean=mean)
