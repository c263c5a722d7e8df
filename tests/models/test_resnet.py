"""ResNet equals transformers' in logits, loss, every gradient and the running statistics, on every mesh."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import fshard as fs
from fshard import P, ShardingError, hf, nn
from fshard.models import resnet
from tests.lib.assertions import assert_same, error_text
from tests.lib.model_cases import saved

transformers = pytest.importorskip("transformers")

TINY = {"num_channels": 2, "embedding_size": 5, "hidden_sizes": (8, 12), "depths": (2, 1), "num_labels": 7}
KINDS = {
    "basic": {"layer_type": "basic"},
    "bottleneck": {},
    "downsample in the 1x1, first stage": {"downsample_in_bottleneck": True, "downsample_in_first_stage": True},
    "equal sizes, gelu": {"hidden_sizes": (5, 5), "layer_type": "basic", "hidden_act": "gelu"},
}
# name: (mesh, axes of the classes, fully sharded, remat); 7 classes and 5 images are uneven over 2 to 9 ranks
MESHES = {
    "one device": ({}, None, False, False),
    "data": ({"data": 2}, None, False, False),
    "model": ({"model": 2}, "model", False, True),
    "data and model": ({"data": 2, "model": 2}, "model", False, False),
    "head over all": ({"data": 2, "model": 2}, ("data", "model"), False, True),
    "head over data": ({"data": 3}, "data", True, False),
    "fully sharded": ({"data": 2, "model": 2}, "model", True, True),
    "replicas": ({"replica": 2, "data": 2, "model": 2}, ("data", "model"), False, False),
    "empty shards": ({"data": 3, "model": 3}, ("data", "model"), False, False),
    "empty batches": ({"data": 6}, "data", True, True),
}
CHECKED = ("head over all", "fully sharded", "replicas")  # types do not depend on sizes


def model_of(kind="bottleneck", **more):
    torch.manual_seed(0)
    config = transformers.ResNetConfig(**{**TINY, **KINDS[kind], **more})
    model = transformers.ResNetForImageClassification(config).double()
    for p in model.parameters():
        if p.ndim == 1:
            torch.nn.init.normal_(p, 1.0, 0.3)
    return model


def inputs(n=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, 21, 17, generator=g).double(), torch.randint(0, 7, (n,), generator=g)


def their_steps(model, steps=2, rate=0.1):
    """Losses, logits, gradients of the last step, and all tensors after train steps by SGD."""
    losses = []
    for i in range(steps):
        x, y = inputs(seed=i)
        model.train().zero_grad()
        out = model(x)
        loss = torch.nn.functional.cross_entropy(out.logits, y)
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for p in model.parameters():
                p -= rate * p.grad
    return SimpleNamespace(losses=torch.stack(losses), logits=out.logits.detach(), tensors=model.state_dict(),
                           grads={name: p.grad for name, p in model.named_parameters()})  # fmt: skip


def our_steps(cfg, weights, name, steps=2, rate=0.1, **options):
    sizes, head, sharded, remat = MESHES[name]
    batch = tuple(axis for axis in ("replica", "data") if axis in sizes) or None
    mesh, layout = fs.make_mesh(**sizes or {"data": 1}), resnet.Layout(batch, head)
    specs = resnet.specs(cfg, model=head)
    if sharded:  # also the classes, along their other dim
        specs = fs.fully_shard(specs, weights["params"], axis="data", min_size=4)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P(batch), P(batch)),
                  out_specs=(specs, P(), P(), specs, P(layout.batch, head)),
                  check="first" if name in CHECKED else "never")  # fmt: skip
    def step(p, state, x, y):
        def loss_fn(p):
            return resnet.loss(cfg, p, state, x, y, layout=layout, specs=specs, remat=remat, **options)

        logits, _ = resnet.apply(cfg, p, state, x, train=options.get("train", True), layout=layout, specs=specs)
        (loss, new), grads = fs.value_and_grad(loss_fn, has_aux=True)(p)
        return fs.tree.map(lambda w, g: w - rate * g, p, grads), new, loss, grads, logits

    params = fs.materialize(weights["params"], specs, mesh, key=fs.key(0))
    state = fs.materialize(weights["state"], P(), mesh, key=fs.key(0))
    losses = []
    for i in range(steps):
        params, state, loss, grads, logits = step(params, state, *inputs(seed=i))
        losses.append(fs.device_get(loss))
    return SimpleNamespace(losses=torch.stack(losses), weights={"params": params, "state": state},
                           grads=fs.device_get(grads), logits=fs.device_get(logits))  # fmt: skip


def close(got, want, tol=1e-9):
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


def close_to_tensors(group, leaves, tensors, tol=1e-9):
    """Every leaf equals the tensor of its name in transformers, and every tensor has a leaf."""
    named = {resnet.theirs((group, *path)).name: leaf for path, leaf in fs.tree.leaves_with_path(leaves)}
    of_group = {name: x for name, x in tensors.items() if ("running" in name or "num_b" in name) == (group == "state")}
    assert named.keys() == of_group.keys()
    for name, leaf in named.items():
        torch.testing.assert_close(leaf, of_group[name], rtol=tol, atol=tol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Each kind of model: its folder, and two steps of transformers, once for all meshes."""
    out = {}
    for kind in KINDS:
        model, folder = model_of(kind), tmp_path_factory.mktemp("resnet")
        saved(model, folder)
        out[kind] = SimpleNamespace(folder=folder, model=model, steps=their_steps(model))
    return out


@pytest.mark.parametrize(("name", "kind"), [
    *(("one device", kind) for kind in KINDS), *((name, "bottleneck") for name in list(MESHES)[1:]),
])  # fmt: skip
def test_train_steps_equal_those_of_transformers(name, kind, known):
    cfg, weights = hf.load(known[kind].folder)
    assert cfg == resnet.Config(**{**TINY, **KINDS[kind]})
    got, want = our_steps(cfg, weights, name), known[kind].steps
    close(got.losses, want.losses)
    close(got.logits, want.logits)
    close_to_tensors("params", got.grads, want.grads)
    for group, leaves in got.weights.items():
        close_to_tensors(group, fs.device_get(leaves), want.tensors)
