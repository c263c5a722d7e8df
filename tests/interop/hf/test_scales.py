"""Folders of quantized weights: 8 bits with scales read by their formula, and the others named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.interop.hf import FileTensor
from tests.lib.assertions import error_text

FP8 = torch.float8_e4m3fn
SHAPE = (200, 150)
X = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))


def blocks(q: Tensor, scales: Tensor, size: int) -> Tensor:
    """Return the product as transformers has it: one scale for each block."""
    grown = scales.repeat_interleave(size, 0).repeat_interleave(size, 1)[: q.shape[0], : q.shape[1]]
    return q.float() * grown


SCALES = torch.rand(2, 2, generator=torch.Generator().manual_seed(1)) + 0.1
ROWS = torch.rand(200, 1, generator=torch.Generator().manual_seed(2)) + 0.1
INT8 = (X * 40).clamp(-127, 127).to(torch.int8)
# name -> the tensors next to the matrix, the matrix, its values, and the config
READ: dict[str, tuple[dict[str, Tensor], Tensor, Tensor, dict[str, Any]]] = {
    "blocks of 128": ({"weight_scale_inv": SCALES}, X.to(FP8), blocks(X.to(FP8), SCALES, 128), {}),
    "blocks of the config": ({"weight_scale_inv": torch.ones(4, 3) / 8}, X.to(FP8), X.to(FP8).float() / 8,
                             {"quant_method": "fp8", "weight_block_size": [64, 64]}),
    "rows": ({"weight_scale": ROWS}, X.to(FP8), X.to(FP8).float() * ROWS, {"quant_method": "compressed-tensors"}),
    "one scale": ({"weight_scale": torch.tensor(0.5)}, INT8, INT8.float() / 2, {}),
    "half precision": ({"weight_scale": ROWS.bfloat16()}, INT8, (INT8 * ROWS.bfloat16().float()).bfloat16(), {}),
    "bitsandbytes": ({"SCB": ROWS[:, 0], "weight_format": torch.tensor(0, dtype=torch.uint8)}, INT8,
                     INT8.float() * (ROWS * 7.874015718698502e-3), {"quant_method": "bitsandbytes"}),
}  # fmt: skip


def folder(path: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> Path:
    save_file({f"up.{name}": x for name, x in tensors.items()}, path / "model.safetensors")
    config = {"model_type": "llama", **({"quantization_config": quantization} if quantization else {})}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("what", READ)
@pytest.mark.parametrize("spec", [P("data"), P("model", "data")])
def test_matrix_and_scales_are_read_as_their_product_by_slices(what: str, spec: P, tmp_path: Path) -> None:
    others, matrix, want, quantization = READ[what]
    path = folder(tmp_path, {"weight": matrix, **others}, quantization)
    mesh = fs.make_mesh(data=3, model=2)
    apply, module = fs.defer(lambda: torch.nn.ModuleDict({"up": torch.nn.Linear(150, 200, bias=False)}))
    described = fs.hf.weights(path, module, of=apply)["params"]
    of_pattern = fs.interop.hf.read(
        path, {"up": fs.init.zeros((150, 200))}, lambda p: FileTensor("up.weight", "o i -> i o")
    )
    placed = fs.materialize(described, spec, mesh, key=fs.key(0))
    assert torch.equal(fs.device_get(placed)["up.weight"], want)
    turned = fs.materialize(of_pattern, spec, mesh, key=fs.key(0))
    assert torch.equal(fs.device_get(turned)["up"], want.T)
    assert fs.interop.hf.tensors(path)["up.weight"].dtype == matrix.dtype  # one by one they are as stored


REFUSED: dict[str, tuple[dict[str, Tensor], dict[str, Any]]] = {
    "GPTQ": ({"qweight": torch.ones(19, 200, dtype=torch.int32), "qzeros": torch.ones(1, 25, dtype=torch.int32),
              "scales": torch.ones(1, 200), "g_idx": torch.zeros(150, dtype=torch.int32)}, {"quant_method": "gptq"}),
    "AWQ": ({"qweight": torch.ones(150, 25, dtype=torch.int32), "qzeros": torch.ones(1, 25, dtype=torch.int32),
             "scales": torch.ones(1, 200)}, {"quant_method": "awq"}),
    "bitsandbytes, 4 bits": ({"weight": torch.ones(15_000, 1, dtype=torch.uint8), "weight.absmax": torch.ones(469),
                              "weight.quant_map": torch.ones(16)}, {"quant_method": "bitsandbytes"}),
    "blocks of another size": ({"weight": X.to(FP8), "weight_scale_inv": torch.ones(3, 3)}, {"quant_method": "fp8"}),
    "a zero point": ({"weight": INT8, "weight_scale": ROWS, "weight_zero_point": torch.ones(200, 1)}, {}),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_other_quantized_folders_are_named(what: str, tmp_path: Path) -> None:
    path = folder(tmp_path, *REFUSED[what])
    apply, module = fs.defer(lambda: torch.nn.ModuleDict({"up": torch.nn.Linear(150, 200, bias=False)}))
    for text in (
        error_text(fs.hf.weights, path, module, of=apply),
        error_text(fs.interop.hf.read, path, {"up": fs.init.zeros((200, 150))}, lambda p: FileTensor("up.weight")),
    ):
        assert "is quantized" in text, text
