"""GPT-2 equals transformers' in logits and gradients, leaf by leaf, dense and on every mesh."""

from __future__ import annotations

import json

import model_cases
import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from fshard.models import gpt2

TINY = gpt2.Config(vocab_size=61, n_positions=12, n_embd=24, n_layer=2, n_head=3)
LAYOUTS = {
    "one device": ({"data": 1, "model": 1}, False, False),
    "data": ({"data": 2, "model": 1}, False, False),
    "model": ({"data": 1, "model": 2}, False, False),  # 3 heads over 2, 61 tokens over 2: uneven
    "model=4": ({"data": 1, "model": 4}, False, False),  # an empty part of 3 heads
    "both": ({"data": 2, "model": 2}, False, False),
    "sequence": ({"data": 1, "model": 2}, False, True),
    "sequence uneven": ({"data": 1, "model": 5}, False, True),  # 11 positions over 5
    "fsdp": ({"data": 4, "model": 1}, True, False),
    "fsdp, model, sequence": ({"data": 2, "model": 2}, True, True),
    "fsdp uneven": ({"data": 3, "model": 2}, True, False),
}


def placed(cfg, params, sizes, fsdp):
    mesh = fs.make_mesh(**sizes)
    specs = gpt2.specs(cfg, model="model")
    if fsdp:
        specs = fs.fully_shard(specs, gpt2.init(cfg), axis="data")
    return mesh, specs, fs.materialize(params, specs, mesh, key=fs.key(7))


OVER_DATA = P("data")


def loss_and_grads(
    cfg, params, ids, targets, sizes, fsdp=False, sequence=False, key=None, remat=False, batch=OVER_DATA
):
    mesh, specs, params = placed(cfg, params, sizes, fsdp)
    layout = gpt2.Layout("data", "model", sequence)

    @fs.shard_map(mesh=mesh, in_specs=(specs, batch, batch), out_specs=(P(), specs))
    def run(p, ids, targets):
        return fs.value_and_grad(
            lambda p: gpt2.loss(cfg, p, ids, targets, layout=layout, specs=specs, key=key, remat=remat)
        )(p)

    return fs.device_get(run(params, ids, targets))


def batch(cfg, b=12, t=11, seed=0):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, cfg.vocab_size, (b, t + 1), generator=g)
    return ids[:, :-1], ids[:, 1:]


def close(got, want, rtol=1e-4, atol=2e-6):
    for (path, a), b in zip(fs.tree.leaves_with_path(got), fs.tree.leaves(want), strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol, msg=lambda m, path=path: f"{path}: {m}")


@pytest.fixture(scope="module")
def dense():
    """The same model on one device, by the same initial values."""
    params = gpt2.init(TINY)
    ids, targets = batch(TINY)
    return ids, targets, loss_and_grads(TINY, params, ids, targets, {"data": 1, "model": 1})


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_mesh_never_changes_the_answer(name, dense):
    ids, targets, (want_loss, want) = dense
    sizes, fsdp, sequence = LAYOUTS[name]
    loss, grads = loss_and_grads(TINY, gpt2.init(TINY), ids, targets, sizes, fsdp, sequence)
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)
    close(grads, want)


@pytest.mark.parametrize("name", ["both", "sequence uneven", "fsdp, model, sequence"])
def test_remat_and_dropout_are_the_same_on_every_mesh(name):
    cfg = gpt2.Config(**{**TINY.__dict__, "embd_pdrop": 0.2, "attn_pdrop": 0.3, "resid_pdrop": 0.1})
    ids, targets = batch(cfg)
    key = fs.key(3)
    want_loss, want = loss_and_grads(cfg, gpt2.init(cfg), ids, targets, {"data": 1, "model": 1}, key=key)
    without, _ = loss_and_grads(cfg, gpt2.init(cfg), ids, targets, {"data": 1, "model": 1})
    assert abs(want_loss - without) > 1e-4  # the masks do something
    sizes, fsdp, sequence = LAYOUTS[name]
    for remat in (False, True):
        loss, grads = loss_and_grads(cfg, gpt2.init(cfg), ids, targets, sizes, fsdp, sequence, key=key, remat=remat)
        torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)
        close(grads, want)


transformers = pytest.importorskip("transformers")


def hugging_face(seed=0, **sizes):
    torch.manual_seed(seed)
    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 24, "n_layer": 2, "n_head": 3, **sizes}
    config = transformers.GPT2Config(embd_pdrop=0, attn_pdrop=0, resid_pdrop=0, initializer_range=0.2, **sizes)
    return model_cases.awake(transformers.GPT2LMHeadModel(config), seed)


@pytest.fixture(scope="module")
def theirs():
    return hugging_face()


@pytest.mark.parametrize("name", model_cases.LAYOUTS)
def test_logits_loss_and_gradients_are_transformers(name, theirs, tmp_path):
    model_cases.check_logits_loss_and_gradients(gpt2, theirs, name, tmp_path)


@pytest.mark.parametrize("sizes", [{"n_embd": 16, "n_layer": 3, "n_head": 1, "n_inner": 10},
                                   {"vocab_size": 50257, "n_embd": 16, "n_layer": 1, "n_head": 4}])  # fmt: skip
def test_other_sizes_are_transformers_too(sizes, tmp_path):
    theirs = hugging_face(1, **sizes)
    model_cases.check_logits_loss_and_gradients(gpt2, theirs, "both, fully sharded, sequence", tmp_path)


@pytest.mark.parametrize(("name", "how"), [
    ("one device", {}), ("model", {"padded": True}), ("both, fully sharded, sequence", {"eos": 7, "padded": True}),
    ("uneven", {}),
])  # fmt: skip
def test_greedy_generation_is_transformers(name, how, theirs, tmp_path):
    model_cases.check_generation(gpt2, theirs, name, tmp_path, **how)


@pytest.mark.parametrize("name", ["one device", "uneven"])
def test_padded_prompts_have_transformers_logits(name, theirs, tmp_path):
    model_cases.check_padded_logits(gpt2, theirs, name, tmp_path)


@pytest.mark.parametrize("name", ["one device", "both, fully sharded, sequence", "uneven"])
def test_a_saved_folder_is_read_by_transformers(name, theirs, tmp_path):
    model_cases.check_files(gpt2, theirs, name, tmp_path, transformers.GPT2LMHeadModel)


def test_a_foreign_or_broken_folder_is_refused(tmp_path):
    theirs = hugging_face(n_positions=12)
    with pytest.raises(ShardingError, match="there is no such file"):
        gpt2.load(tmp_path)
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "n_layer": 3, "n_positions": 13}))
    with pytest.raises(ShardingError) as e:
        gpt2.load(tmp_path)
    assert "'transformer.h.2.ln_1.weight' is missing" in str(e.value)
    assert "'transformer.wpe.weight' has another shape, for params['wpe']\n  got  [12, 24]    expected  [13, 24]" in \
        str(e.value)
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ShardingError) as e:
        gpt2.load(tmp_path)
    assert str(e.value) == (
        f"{tmp_path}/config.json: not a gpt2 as it is here\n  model_type: 'llama', not 'gpt2'\n"
        "  fix: use the model of its type, or fs.defer(lambda: AutoModel.from_config(config))"
    )
    (tmp_path / "config.json").write_text(json.dumps({**config, "activation_function": "relu"}))
    with pytest.raises(ShardingError, match="activation_function: 'relu', not 'gelu_new'"):
        gpt2.load(tmp_path)


def test_bad_sizes():
    with pytest.raises(ShardingError, match="the heads must divide the width\n  n_embd  10    n_head  3\n  10 % 3 = 1"):
        gpt2.Config(n_embd=10, n_head=3)
    ids, targets = batch(TINY, t=20)
    with pytest.raises(ShardingError, match="20 tokens do not fit 12 positions"):
        loss_and_grads(TINY, gpt2.init(TINY), ids, targets, {"data": 1, "model": 1})
