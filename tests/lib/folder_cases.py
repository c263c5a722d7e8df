"""A small model with known values in a Hugging Face folder, for the tests of reading and writing such folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.interop.hf.weights import FileTensor

KEY = fs.key(0)
WIDTH, HEADS, K, HIDDEN = 20, 6, 8, 7

# Shapes of the leaves, and their tensors in the file: every kind of pattern that the models have.
SHAPES: dict[str, tuple[int, ...]] = {
    "emb": (13, WIDTH), "qkv": (WIDTH, 3, HEADS, K), "bias": (3, HEADS, K), "up": (WIDTH, HIDDEN),
    "gate": (WIDTH, HIDDEN), "norm": (WIDTH,), "scale": (),
}  # fmt: skip
THEIRS = {
    "emb": FileTensor("m.emb.weight"), "qkv": FileTensor("m.qkv.weight", "(h c k) d -> d c h k"),
    "bias": FileTensor("m.qkv.bias", "(h c k) -> c h k"), "norm": FileTensor("m.norm.weight"),
    "scale": FileTensor("m.scale"),
    "gate": FileTensor("m.gate_up.weight", "(two=2 f) d -> d f", {"two": 0}),
    "up": FileTensor("m.gate_up.weight", "(two=2 f) d -> d f", {"two": 1}),
}  # fmt: skip
SPECS: list[Any] = [
    P(),
    {"emb": P("model"), "qkv": P(None, None, "model"), "bias": P(None, "model"), "up": P(None, "model"),
     "gate": P(None, "model"), "norm": P(), "scale": P()},
    {"emb": P(None, "model"), "qkv": P(("model", "data")), "bias": P("data", None, "model"), "up": P("model", "data"),
     "gate": P("data", "model"), "norm": P(("data", "model")), "scale": P()},
]  # fmt: skip
MESHES: list[dict[str, int]] = [{"data": 1, "model": 1}, {"data": 2, "model": 2}, {"data": 1, "model": 4}]


def theirs(path: fs.tree.Path) -> FileTensor:
    return THEIRS[path[0]]


def described() -> dict[str, Any]:
    return {name: fs.init.zeros(shape) for name, shape in SHAPES.items()}


def values(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    gen = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=gen).to(dtype) for name, shape in SHAPES.items()}


def as_theirs(ours: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in the file, by plain torch."""
    return {
        "m.emb.weight": ours["emb"], "m.norm.weight": ours["norm"], "m.scale": ours["scale"],
        "m.qkv.weight": ours["qkv"].permute(2, 1, 3, 0).reshape(-1, WIDTH).contiguous(),
        "m.qkv.bias": ours["bias"].permute(1, 0, 2).reshape(-1).contiguous(),
        "m.gate_up.weight": torch.cat([ours["gate"].T, ours["up"].T]),
    }  # fmt: skip


def sharded_file(folder: Path, ours: dict[str, Tensor], count: int = 2) -> Path:
    """Write a folder with an index, as `save_pretrained` does."""
    folder.mkdir()
    weights = as_theirs(ours)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    file_of = {name: names[i % count] for i, name in enumerate(weights)}
    for file in names:
        save_file({n: x for n, x in weights.items() if file_of[n] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": file_of}))
    return folder


def single_file(folder: Path, ours: dict[str, Tensor]) -> Path:
    folder.mkdir()
    save_file(as_theirs(ours), folder / "model.safetensors")
    return folder
