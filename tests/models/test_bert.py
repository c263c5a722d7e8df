"""BERT equals transformers' in states, logits, loss and gradients, leaf by leaf, dense and on every mesh."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import fshard as fs
from fshard import P, ShardingError
from fshard.models import bert
from tests.lib import model_cases as cases
from tests.lib.assertions import assert_same, error_text
from tests.lib.model_cases import EVERYTHING, LAYOUTS, ONE, close, placed, randomize_vectors

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 35,
    "max_position_embeddings": 12, "type_vocab_size": 3, "initializer_range": 0.2, "pad_token_id": 40,
}  # fmt: skip
TINY = bert.Config(**SIZES)
OVER_DATA = P("data")


def hugging_face(kind="BertForMaskedLM", more=None, **config):
    torch.manual_seed(0)
    model = getattr(transformers, kind)(transformers.BertConfig(**{**SIZES, **config}), **(more or {}))
    return randomize_vectors(model)


def batch(b=6, t=11, seed=0):
    """Sequences of unequal lengths with some words masked, more in later ones; 11 positions split unevenly."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, TINY.vocab_size, (b, t), generator=g)
    mask = (torch.arange(t) < t - torch.arange(b)[:, None]).long()
    types = torch.randint(0, 3, (b, t), generator=g)
    masked = (torch.rand(b, t, generator=g) < torch.linspace(0.2, 0.9, b)[:, None]) & (mask == 1)
    targets = ids.where(masked, -100)
    return ids.where(mask == 1, TINY.pad_token_id), targets, mask, types


def on_mesh(f, cfg, params, name, *args, out=OVER_DATA, check=None):
    """f(params, layout and specs, *args) on a mesh; args [B, ...] are split over data."""
    mesh, specs, layout, p = placed(bert, cfg, params, name)

    @fs.shard_map(mesh=mesh, in_specs=(specs, *[P("data")] * len(args)), out_specs=out,
                  check=check or cases.check_of(name))  # fmt: skip
    def run(p, *args):
        return f(p, {"layout": layout, "specs": specs}, *args)

    return fs.device_get(run(p, *args))


def states(cfg, params, name, ids, mask, types):
    return on_mesh(lambda p, options, ids, mask, types: bert.apply(cfg, p, ids, mask=mask, types=types, **options),
                   cfg, params, name, ids, mask, types, check="never")  # fmt: skip


def loss_and_grads(cfg, params, name, inputs, **more):
    mesh, specs, layout, p = placed(bert, cfg, params, name)

    @fs.shard_map(mesh=mesh, in_specs=(specs, *[P("data")] * 4), out_specs=(P(), specs), check="never")
    def run(p, ids, targets, mask, types):
        options = {"mask": mask, "types": types, "layout": layout, "specs": specs, **more}
        return fs.value_and_grad(lambda p: bert.loss(cfg, p, ids, targets, **options))(p)

    return fs.device_get(run(p, *inputs))


def close_grads(got, want):
    """As `close`, except for the biases of keys.

    Such a bias adds one number to all scores of a query, which does not change their softmax: its gradient is zero,
    and the computed one is the rounding of sums that cancel. It is compared with the size of what is summed, that of
    the gradient of the queries' bias.
    """
    for a, b in zip(got["h"], want["h"], strict=True):
        for x in (a, b):
            assert x["k"]["b"].abs().max() <= 1e-5 * b["q"]["b"].abs().max()
    close(*({**grads, "h": [{**block, "k": block["k"]["w"]} for block in grads["h"]]} for grads in (got, want)),
          1e-5, 1e-5)  # fmt: skip


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """States, logits, loss and gradients of transformers, once for all meshes."""
    folder, model = tmp_path_factory.mktemp("bert"), hugging_face()
    ids, targets, mask, types = batch()
    out = model(ids, attention_mask=mask, token_type_ids=types, labels=targets, output_hidden_states=True)
    out.loss.backward()
    cfg, params = bert.load(cases.saved(model, folder / "weights"))
    grads = cases.their_grads(bert, model, folder / "gradients")
    return SimpleNamespace(cfg=cfg, params=params, inputs=(ids, targets, mask, types), loss=out.loss.detach(),
                           logits=out.logits.detach(), states=out.hidden_states[-1].detach(), grads=grads)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == EVERYTHING else pytest.mark.slow) for name in LAYOUTS],
)  # fmt: skip
def test_states_logits_loss_and_gradients_equal_transformers(name, known):
    mesh, specs, layout, p = placed(bert, known.cfg, known.params, name)

    @fs.shard_map(mesh=mesh, in_specs=(specs, *[P("data")] * 4),
                  out_specs=(P("data"), P("data", None, "model"), P(), specs), check=cases.check_of(name))  # fmt: skip
    def run(p, ids, targets, mask, types):
        options = {"mask": mask, "types": types, "layout": layout, "specs": specs}
        loss, grads = fs.value_and_grad(lambda p: bert.loss(known.cfg, p, ids, targets, **options))(p)
        return bert.apply(known.cfg, p, ids, **options), bert.logits(known.cfg, p, ids, **options), loss, grads

    states, logits, loss, grads = fs.device_get(run(p, *known.inputs))
    close({"states": states, "logits": logits}, {"states": known.states, "logits": known.logits}, 1e-5, 1e-5)
    torch.testing.assert_close(loss, known.loss, rtol=1e-5, atol=0)
    close_grads(grads, known.grads)


def test_the_batch_reaches_every_leaf_and_the_padding_id(known):
    ids, targets, mask, types = known.inputs
    assert (ids[mask == 1] == TINY.pad_token_id).any()  # an attended word with this id: its embedding is not trained
    assert len(set((targets >= 0).sum(1).tolist())) > 1  # unequal counts over data
    assert set(types.flatten().tolist()) == {0, 1, 2}
    assert all(bool(g.any()) for g in fs.tree.leaves(known.grads))
    per_row = known.grads["word"].abs().amax(1)
    assert per_row[TINY.pad_token_id] > 0  # through the tied head only


def test_the_activation_is_that_of_the_config(tmp_path):
    model = hugging_face(hidden_act="quick_gelu", num_hidden_layers=1)
    cfg, params = bert.load(cases.saved(model, tmp_path))
    ids, _, mask, types = batch()
    with torch.no_grad():
        want = model(ids, attention_mask=mask, token_type_ids=types).logits
    got = on_mesh(lambda p, options, ids, mask, types: bert.logits(cfg, p, ids, mask=mask, types=types, **options),
                  cfg, params, "one device", ids, mask, types)  # fmt: skip
    close({"logits": got}, {"logits": want}, 1e-5, 1e-5)


def test_pooler_and_next_sentence_head_equal_transformers(tmp_path):
    model = hugging_face("BertForPreTraining")
    cfg, params = bert.load(cases.saved(model, tmp_path))
    ids, _, mask, types = batch()
    with torch.no_grad():
        want = model.bert(ids, attention_mask=mask, token_type_ids=types).pooler_output
        follows = model(ids, attention_mask=mask, token_type_ids=types).seq_relationship_logits

    def f(p, options, ids, mask, types):
        x = bert.pooled(cfg, p, bert.apply(cfg, p, ids, mask=mask, types=types, **options), **options)
        return {"pooled": x, "follows": bert.follows(cfg, p, x, **options)}

    close(on_mesh(f, cfg, params, EVERYTHING, ids, mask, types), {"pooled": want, "follows": follows}, 1e-5, 1e-5)


def test_defaults_are_the_first_sentence_and_no_padding(known):
    ids, *_ = known.inputs
    explicit = states(known.cfg, known.params, EVERYTHING, ids, torch.ones_like(ids), torch.zeros_like(ids))
    f = lambda p, options, ids: bert.apply(known.cfg, p, ids, **options)  # noqa: E731
    default = on_mesh(f, known.cfg, known.params, EVERYTHING, ids)
    close({"states": default}, {"states": explicit}, 1e-5, 1e-6)


def test_padding_changes_no_state_and_no_embedding(known):
    ids, _, mask, types = known.inputs
    other = ids.where(mask == 1, 3)
    a, b = (states(known.cfg, known.params, EVERYTHING, x, mask, types) for x in (ids, other))
    assert torch.equal(a[mask == 1], b[mask == 1])
    a, b = (on_mesh(lambda p, options, ids, mask: bert.embed(known.cfg, p, ids, mask=mask, **options), known.cfg,
                    known.params, EVERYTHING, x, mask, check="never") for x in (ids, other))  # fmt: skip
    assert torch.equal(a, b)
    torch.testing.assert_close(a.norm(dim=1), torch.ones(len(a)))


def test_an_embedding_is_the_normalized_mean_over_real_tokens(known):
    ids, _, mask, _ = known.inputs
    x = states(known.cfg, known.params, "one device", ids, mask, torch.zeros_like(ids))
    want = torch.stack([a[m == 1].mean(0) for a, m in zip(x, mask, strict=True)])
    want = want / want.norm(dim=1, keepdim=True)
    for name in ("one device", EVERYTHING):
        got = on_mesh(lambda p, options, ids, mask: bert.embed(known.cfg, p, ids, mask=mask, **options), known.cfg,
                      known.params, name, ids, mask)  # fmt: skip
        close({"embedding": got}, {"embedding": want}, 1e-5, 1e-6)
    torch.testing.assert_close(bert.pool(x), x.mean(1))


DROPS = bert.Config(**SIZES, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3)
DRAWN = fs.tree.map(lambda d: fs.init.normal(d.shape, std=0.2), bert.init(DROPS))  # no zeros, no ones


@pytest.fixture(scope="module")
def dropped():
    """On one device, with dropout: loss and gradients."""
    loss, grads = loss_and_grads(DROPS, DRAWN, "one device", batch(), key=fs.key(3))
    assert abs(loss - loss_and_grads(DROPS, DRAWN, "one device", batch())[0]) > 1e-3  # the masks change the loss
    return loss, grads


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        *(
            pytest.param(name, remat, marks=pytest.mark.slow)
            for name, remat in (("data", False), ("both", False), ("model, sequence", True), (EVERYTHING, False))
        ),
        (EVERYTHING, True),
    ],
)
def test_dropout_and_remat_do_not_depend_on_the_mesh(name, remat, dropped):
    loss, grads = loss_and_grads(DROPS, DRAWN, name, batch(), key=fs.key(3), remat=remat)
    torch.testing.assert_close(loss, dropped[0], rtol=2e-6, atol=0)
    close_grads(grads, dropped[1])


# --- initial values -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [0, 60, None])
def test_only_the_embedding_of_padding_is_zero_on_every_mesh(pad):
    cfg = bert.Config(**{**SIZES, "pad_token_id": pad})
    one, drawn = (fs.device_get(placed(bert, cfg, bert.init(cfg), name)[3]) for name in ("one device", "uneven"))
    assert_same(drawn, one)
    word = drawn["word"]
    assert (word == 0).all(1).nonzero().flatten().tolist() == ([] if pad is None else [pad])
    free = bert.Config(**{**SIZES, "pad_token_id": None})
    want = fs.device_get(placed(bert, free, bert.init(free), "one device")[3])["word"]
    assert torch.equal(word[torch.arange(61) != pad], want[torch.arange(61) != pad])


def test_initial_values_have_the_distribution_of_transformers(tmp_path):
    torch.manual_seed(0)
    big = {"vocab_size": 500, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "pad_token_id": 7}
    fresh = transformers.BertForPreTraining(transformers.BertConfig(**{**SIZES, **big, "initializer_range": 0.02}))
    cfg, theirs = bert.load(cases.saved(fresh, tmp_path))
    assert cfg == bert.Config(**{**SIZES, **big, "initializer_range": 0.02}, pooler=True, nsp=True)
    ours = fs.device_get(placed(bert, cfg, bert.init(cfg), "one device")[3])
    theirs = fs.device_get(placed(bert, cfg, theirs, "one device")[3])
    for (path, a), b in zip(fs.tree.leaves_with_path(ours), fs.tree.leaves(theirs), strict=True):
        if b.std() == 0:
            assert torch.equal(a, b), path
            continue
        # Five standard errors of the mean and of the standard deviation of n draws.
        assert a.mean().abs() < 5 * 0.02 / a.numel() ** 0.5, path
        assert abs(a.std() - 0.02) < 5 * 0.02 / (2 * a.numel()) ** 0.5 + 0.02 / 500, path  # 1 row of 500 is zero
        assert abs(b.std() - 0.02) < 5 * 0.02 / (2 * b.numel()) ** 0.5 + 0.02 / 500, path


# --- files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "more", "heads"),
    [
        ("BertModel", {}, {"pooler"}),
        ("BertModel", {"add_pooling_layer": False}, set()),
        ("BertForMaskedLM", {}, {"mlm"}),
        ("BertForPreTraining", {}, {"mlm", "pooler", "nsp"}),
    ],
)
def test_load_and_save_reproduce_the_file_of_transformers(kind, more, heads, tmp_path):
    model = hugging_face(kind, more=more)
    cfg, params = bert.load(cases.saved(model, tmp_path / "theirs"))
    assert {h for h in ("mlm", "pooler", "nsp") if getattr(cfg, h)} == heads
    bert.save(tmp_path / "ours", cfg, placed(bert, cfg, params, EVERYTHING)[3])
    assert bert.load(tmp_path / "ours")[0] == cfg

    ours, theirs = (load_file(tmp_path / x / "model.safetensors") for x in ("ours", "theirs"))
    ours, theirs = ({n.removeprefix("bert."): x for n, x in tensors.items()} for tensors in (ours, theirs))
    assert set(ours) == set(theirs)  # nothing is dropped
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)

    again, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True, **more)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    ids, _, mask, types = batch()
    with torch.no_grad():
        got, want = (m(ids, mask, types, return_dict=False) for m in (again.eval(), model))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True) if a is not None)
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == [kind]
    assert not {"mlm", "pooler", "nsp"} & set(config)


def test_files_of_older_versions_are_read(tmp_path, known):
    """With norms named as in TensorFlow, a buffer of positions, and the tied head stored twice."""
    model = hugging_face()
    folder = cases.saved(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for new, old in (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")):
        tensors = {n.replace(new, old): x for n, x in tensors.items()}
    tensors["bert.embeddings.position_ids"] = torch.arange(12)[None]
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    cfg, params = bert.load(folder)
    assert cfg == known.cfg
    mesh = fs.make_mesh(**ONE)
    assert_same(*(fs.materialize(x, P(), mesh, key=fs.key(0)) for x in (params, known.params)))


def test_all_missing_unknown_and_misshaped_tensors_are_listed(tmp_path):
    folder = cases.saved(hugging_face("BertForPreTraining"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["cls.predictions.transform.dense.weight"]
    tensors["classifier.weight"] = torch.zeros(2, 24)
    tensors["bert.pooler.dense.bias"] = torch.zeros(23)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = error_text(bert.load, folder)
    assert "'cls.predictions.transform.dense.weight' is missing" in text
    assert "'classifier.weight' is not part of this model" in text
    assert "'bert.pooler.dense.bias' has another shape" in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_type", "roberta"), ("is_decoder", True), ("add_cross_attention", True), ("tie_word_embeddings", False),
        ("position_embedding_type", "relative_key"),
    ],
)  # fmt: skip
def test_unsupported_configs_are_refused(name, value, tmp_path):
    folder = cases.saved(hugging_face(num_hidden_layers=1), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, name: value}))
    with pytest.raises(ShardingError, match=f"{name}: {value!r}, not "):
        bert.load(folder)


def test_all_wrong_sizes_are_listed():
    text = error_text(
        bert.Config, hidden_size=10, num_attention_heads=3, hidden_act="prelu", pad_token_id=30522, mlm=False, nsp=True
    )
    assert "the heads must divide the width\n" in text
    assert "10 % 3 = 1" in text
    assert "bert.Config: hidden_act='prelu'" in text
    assert "bert.Config: pad_token_id=30522 is not in a vocabulary of 30522" in text
    assert "bert.Config: nsp=True without a pooler\n  fix: pooler=True" in text


def test_all_wrong_arguments_are_listed():
    ids = torch.zeros(6, 13, dtype=torch.int64)
    text = error_text(
        on_mesh,
        lambda p, options, ids: bert.apply(TINY, p, ids, mask=ids[:, 1:], types=ids[0], **options),
        TINY,
        bert.init(TINY),
        "one device",
        ids,
    )
    assert "bert: mask must have one entry for each token\n  got  [6, 12]    needed  [6, 13]" in text
    assert "bert: types must have one entry for each token\n  got  [13]    needed  [6, 13]" in text
    assert "bert: 13 tokens do not fit 12 positions\n  fix: a larger max_position_embeddings" in text
    bare = bert.Config(**SIZES, mlm=False)
    for head, f in (("mlm", bert.logits), ("pooler", bert.pooled), ("nsp", bert.follows)):
        with pytest.raises(ShardingError, match=f"bert: the config has no {head}\n"):
            f(bare, bert.init(bare), ids)
