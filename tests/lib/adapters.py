"""Models of transformers with adapters of peft, as the trees of `fs.models` and of `fs.lora`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from safetensors.torch import save_file
from torch import Tensor, nn

import fshard as fs
from fshard.lora.targets import leaf_of


@contextlib.contextmanager
def described_model(model: Any, module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """Yield the config and the described parameters, for a model of `fs.models`, of a module of transformers."""
    with tempfile.TemporaryDirectory() as folder:
        module.config.save_pretrained(folder)  # type: ignore[operator, union-attr]
        # `module.save_pretrained` writes on one rank of torch.distributed only.
        save_file(dict(module.named_parameters()), f"{folder}/model.safetensors", {"format": "pt"})
        yield model.load(folder)


def factors_of_peft(named: Mapping[str, Tensor]) -> dict[tuple[str, str], Tensor]:
    """Return the factors among tensors by peft's names: {(module, "a" or "b"): [in, r] or [r, out]}."""
    out: dict[tuple[str, str], Tensor] = {}
    for key, x in named.items():
        module, found, factor = key.removeprefix("base_model.model.").partition(".lora_")
        if found:
            out[module, "a" if "A" in factor else "b"] = x.detach().T.clone()
    return out


def like_described(described: Any, params: Any, of: Any, named: Mapping[str, Tensor]) -> Any:
    """Return tensors by peft's names in the form of the adapters that `lora.init` described for `params`."""
    factors = factors_of_peft(named)
    modules = {fs.tree.dotted(path): leaf_of(of, path, x.ndim).module
               for path, x in fs.tree.leaves_with_path(params)}  # fmt: skip
    assert {m for m, _ in factors} == {modules[name] for name in described}
    return {name: {part: factors[modules[name], part].reshape(x.shape) for part, x in own.items()}
            for name, own in described.items()}  # fmt: skip
