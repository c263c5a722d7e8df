"""What every model must hold, against transformers: logits, loss, every gradient, greedy generation, and files.

A model is a module of `fshard.models`; `theirs` is a transformers model with a head, in eval mode.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

import fshard as fs
from fshard import P

os.environ["HF_HUB_OFFLINE"] = "1"

ONE = {"data": 1, "model": 1}

# name: (mesh, fully sharded over data, sequence parallel)
LAYOUTS = {
    "one device": (ONE, False, False),
    "data": ({"data": 2, "model": 1}, False, False),
    "data, fully sharded": ({"data": 2, "model": 1}, True, False),
    "model": ({"data": 1, "model": 2}, False, False),
    "model, sequence": ({"data": 1, "model": 2}, False, True),
    "both": ({"data": 2, "model": 2}, False, False),
    "both, fully sharded, sequence": ({"data": 2, "model": 2}, True, True),
    "uneven": ({"data": 3, "model": 3}, True, True),
}


def awake(theirs, seed=0):
    """A transformers model in eval mode whose biases and norms are not at their defaults, so that each matters."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in theirs.parameters():
            if p.ndim == 1:
                p.add_(torch.randn(p.shape, generator=g) * 0.1)
    return theirs.eval()


def tokens(size, b=6, t=9, seed=0):
    return torch.randint(0, size, (b, t), generator=torch.Generator().manual_seed(seed))


def left_padding(b, t):
    """A mask [B, T] of sequences padded on their left, each by another length; the first is not padded."""
    return (torch.arange(t) >= (torch.arange(b) % (t - 1))[:, None]).long()


def saved(theirs, folder):
    theirs.save_pretrained(folder)
    return Path(folder)


def placed(model, cfg, params, name):
    sizes, fsdp, sequence = LAYOUTS[name]
    mesh, specs = fs.make_mesh(**sizes), model.specs(cfg, model="model")
    if fsdp:
        specs = fs.fully_shard(specs, model.init(cfg), axis="data")
    return mesh, specs, model.Layout("data", "model", sequence), fs.materialize(params, specs, mesh, key=fs.key(7))


def loss_and_grads(model, cfg, params, name, *args, **kwargs):
    """The loss and the gradients on a mesh, as full tensors; args [B, ...] are split over data."""
    mesh, specs, layout, p = placed(model, cfg, params, name)

    @fs.shard_map(mesh=mesh, in_specs=(specs, *[P("data")] * len(args)), out_specs=(P(), specs))
    def run(p, *args):
        return fs.value_and_grad(lambda p: model.loss(cfg, p, *args, layout=layout, specs=specs, **kwargs))(p)

    return fs.device_get(run(p, *args))


def logits(model, cfg, params, name, ids, mask=None):
    mesh, specs, layout, p = placed(model, cfg, params, name)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=P("data", None, "model"))
    def run(p, ids, mask):
        return model.apply(cfg, p, ids, layout=layout, specs=specs, mask=mask)

    return fs.device_get(run(p, ids, mask))


def their_grads(model, theirs, folder, again):
    """The gradients of a transformers model as our tree: saved as if they were weights, and loaded."""
    again.mkdir()
    shutil.copy(folder / "config.json", again)
    grads = {n: p.grad.contiguous() for n, p in theirs.named_parameters()}
    save_file(grads, again / "model.safetensors", metadata={"format": "pt"})
    _, described = model.load(again)
    return fs.device_get(fs.materialize(described, P(), fs.make_mesh(**ONE), key=fs.key(0)))


def close(got, want, rtol, atol):
    """Per leaf, in value. `atol` is a share of the largest entry of the leaf: rounding scales with what is summed."""
    for (path, a), b in zip(fs.tree.leaves_with_path(got), fs.tree.leaves(want), strict=True):
        assert a.isfinite().all(), path
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol * float(b.abs().max()),
                                   msg=lambda m, path=path: f"{fs.tree.dotted(path)}: {m}")  # fmt: skip


def check_logits_loss_and_gradients(model, theirs, name, folder, *, ids=None, rtol=1e-5, atol=1e-5):
    """fp32: the logits, the loss, and every gradient are transformers', to 1e-5 of each leaf's largest entry."""
    cfg, params = model.load(saved(theirs, folder / "weights"))
    ids = tokens(cfg.vocab_size) if ids is None else ids
    theirs.zero_grad()
    out = theirs(ids)
    loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    want = their_grads(model, theirs, folder / "weights", folder / "gradients")
    close(logits(model, cfg, params, name, ids), out.logits.detach(), rtol, atol)
    shifted = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    got_loss, grads = loss_and_grads(model, cfg, params, name, ids, shifted)
    torch.testing.assert_close(got_loss, loss.detach(), rtol=rtol, atol=0)
    close(grads, want, rtol, atol)


def check_padded_logits(model, theirs, name, folder, *, rtol=1e-5, atol=1e-5):
    """Left-padded prompts have the logits transformers gives them, with positions that do not count padding."""
    cfg, params = model.load(saved(theirs, folder))
    ids = tokens(cfg.vocab_size)
    mask = left_padding(*ids.shape)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        want = theirs(ids, attention_mask=mask, position_ids=positions).logits
    got = logits(model, cfg, params, name, ids, mask)
    seen = mask.bool()
    close({"logits": got[seen]}, {"logits": want[seen]}, rtol, atol)


def check_generation(model, theirs, name, folder, *, new=7, padded=False, eos=None):
    """Greedy generation is transformers.generate, token by token."""
    cfg, params = model.load(saved(theirs, folder))
    ids = tokens(cfg.vocab_size, t=5)
    mask = left_padding(*ids.shape) if padded else torch.ones_like(ids)
    pad = 0 if eos is None else eos
    ids = ids.where(mask.bool(), pad)
    theirs.generation_config.eos_token_id = eos
    want = theirs.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=pad,
                           eos_token_id=eos, bos_token_id=None)  # fmt: skip
    if eos is not None:
        assert 0 < (want[:, 5:] == eos).any(1).sum() < len(ids)  # some end, others go on
    mesh, specs, layout, p = placed(model, cfg, params, name)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=P("data"))
    def run(p, ids, mask):
        given = mask if padded else None
        return model.generate(cfg, p, ids, new=new, layout=layout, specs=specs, mask=given, eos=eos)

    got = fs.device_get(run(p, ids, mask))
    assert got.shape == (len(ids), 5 + new)
    assert torch.equal(got[:, : want.shape[1]], want), f"{got}\n{want}"
    assert (got[:, want.shape[1] :] == pad).all()


def check_files(model, theirs, name, folder, architecture):
    """Loaded, placed on a mesh and saved from there: transformers reads the folder, and gives the same logits."""
    cfg, params = model.load(saved(theirs, folder / "theirs"))
    _, _, _, p = placed(model, cfg, params, name)
    model.save(folder / "ours", cfg, p)
    again, info = architecture.from_pretrained(folder / "ours", output_loading_info=True)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    ids = tokens(cfg.vocab_size)
    with torch.no_grad():
        assert torch.equal(again.eval()(ids).logits, theirs(ids).logits)
    config = json.loads((folder / "ours" / "config.json").read_text())
    assert config["model_type"] == theirs.config.model_type
    assert model.load(folder / "ours")[0] == model.config(folder / "ours") == cfg


def check_the_mesh_never_changes_the_answer(model, cfg, name, *, remat=False):
    """From the same key: loss and gradients, with dropout where the config has some, are those of one device."""
    ids = tokens(cfg.vocab_size)
    described = fs.tree.map(lambda d: fs.init.normal(d.shape, std=0.2), model.init(cfg))  # no zeros, no ones
    key = fs.key(3)
    want_loss, want = loss_and_grads(model, cfg, described, "one device", ids, ids.roll(-1, 1), key=key)
    loss, grads = loss_and_grads(model, cfg, described, name, ids, ids.roll(-1, 1), key=key, remat=remat)
    torch.testing.assert_close(loss, want_loss, rtol=2e-6, atol=0)
    close(grads, want, 1e-5, 1e-5)
