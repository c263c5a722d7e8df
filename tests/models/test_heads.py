"""Classification heads and sentence embeddings equal transformers' on every mesh, and in files."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import fshard as fs
from fshard import P, hf
from fshard.models import bert, gpt2, gptj, heads, mixtral
from tests.lib import model_cases as cases
from tests.lib.assertions import error_text
from tests.lib.model_cases import DECODERS, EVERYTHING, left_padding, placed
from tests.models.test_bert import SIZES as BERT_SIZES
from tests.models.test_bert import close_grads

transformers = pytest.importorskip("transformers")

ONE, UNEVEN = "one device", "uneven"
PAD = 7
LABELS = {"num_labels": 3}
SEQUENCE, TOKENS = "ForSequenceClassification", "ForTokenClassification"
CASES = {  # class: (model, changes of the config)
    **{f"{d.hf}{SEQUENCE}": (name, {}) for name, d in DECODERS.items() if name != "dots1"},  # transformers has none
    **{f"{d.hf}{TOKENS}": (name, {}) for name, d in DECODERS.items() if name not in ("gptj", "dots1")},
    f"Bert{SEQUENCE}": ("bert", {}),
    f"Bert{TOKENS}": ("bert", {"classifier_dropout": 0.3}),
}
FAST = [f"Llama{TOKENS}", f"Bert{SEQUENCE}"]


@functools.cache
def reference(kind, **changes):
    """A transformers model, its scores, loss and gradients, and what `load` reads from its folder."""
    name, options = CASES[kind]
    sizes = BERT_SIZES if name == "bert" else {**DECODERS[name].sizes, **DECODERS[name].only_theirs}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{
        **sizes, "initializer_range": 0.2, "pad_token_id": PAD, "bos_token_id": None, "eos_token_id": None,
        ("n_layer" if "n_layer" in sizes else "num_hidden_layers"): 1, **({} if "num_labels" in changes else LABELS),
        **options, **changes,
    })  # fmt: skip
    theirs = cases.randomize_vectors(getattr(transformers, kind)(config))
    ids = cases.tokens(config.vocab_size)
    mask = left_padding(*ids.shape).flip(1)
    ids = ids.where(mask.bool(), PAD)
    g = torch.Generator().manual_seed(1)
    n = config.num_labels
    if kind.endswith(TOKENS):
        targets = torch.randint(0, n, ids.shape, generator=g).where(mask.bool(), -100)
    elif config.problem_type in (None, "single_label_classification") and n > 1:
        targets = torch.randint(0, n, (len(ids),), generator=g)
    else:
        targets = torch.rand(len(ids), *([n] if n > 1 else []), generator=g)
        targets = targets.round() if config.problem_type == "multi_label_classification" else targets
    out = theirs(ids, attention_mask=mask, labels=targets)
    out.loss.backward()
    place = tempfile.TemporaryDirectory()
    cfg, params = heads.load(cases.saved(theirs, Path(place.name) / "weights"))
    grads = cases.their_grads(heads, theirs, Path(place.name) / "gradients")
    return SimpleNamespace(theirs=theirs, cfg=cfg, params=params, ids=ids, mask=mask, targets=targets, grads=grads,
                           logits=out.logits.detach(), loss=out.loss.detach(), place=place)  # fmt: skip


def check(ref, layout):
    mesh, specs, split, p = placed(heads, ref.cfg, ref.params, layout)

    @fs.shard_map(mesh=mesh, in_specs=(specs, *[P("data")] * 3), out_specs=(P("data"), P(), specs),
                  check=cases.check_of(layout))  # fmt: skip
    def run(p, ids, mask, targets):
        options = {"layout": split, "specs": specs, "mask": mask}
        loss, grads = fs.value_and_grad(lambda p: heads.loss(ref.cfg, p, ids, targets, **options))(p)
        return heads.apply(ref.cfg, p, ids, **options), loss, grads

    logits, loss, grads = fs.device_get(run(p, ref.ids, ref.mask, ref.targets))
    real = ref.mask.bool() if ref.cfg.task == "tokens" else slice(None)
    cases.close({"logits": logits[real]}, {"logits": ref.logits[real]}, 1e-5, 1e-5)
    torch.testing.assert_close(loss, ref.loss, rtol=1e-5, atol=0)
    if isinstance(ref.cfg.base, bert.Config):
        close_grads(grads["base"], ref.grads["base"])
        cases.close(grads["score"], ref.grads["score"], 1e-5, 1e-5)
    else:
        cases.close(grads, ref.grads, 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [*((kind, EVERYTHING) for kind in FAST),
     *(pytest.param(kind, layout, marks=pytest.mark.slow) for kind in CASES for layout in (ONE, UNEVEN))],
)  # fmt: skip
def test_scores_loss_and_gradients_equal_transformers(kind, layout):
    check(reference(kind), layout)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_labels": 1},
        {"num_labels": 3, "problem_type": "regression"},
        {"num_labels": 3, "problem_type": "multi_label_classification"},
    ],
)
@pytest.mark.parametrize("layout", [ONE, pytest.param(UNEVEN, marks=pytest.mark.slow)])
def test_each_problem_has_the_loss_of_transformers(changes, layout):
    check(reference(f"GPT2{SEQUENCE}", **changes), layout)


@pytest.mark.parametrize("kind", [kind if kind in FAST else pytest.param(kind, marks=pytest.mark.slow)
                                  for kind in CASES])  # fmt: skip
def test_transformers_reads_a_saved_folder(kind, tmp_path):
    ref = reference(kind)
    *_, p = placed(heads, ref.cfg, ref.params, EVERYTHING)
    hf.save(tmp_path / "ours", ref.cfg, p)
    again = cases.read_by_transformers(getattr(transformers, kind), tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(again(ref.ids, attention_mask=ref.mask).logits, ref.logits)
    assert again.config.id2label == ref.theirs.config.id2label
    ours, theirs = (load_file(Path(folder) / "model.safetensors")
                    for folder in (tmp_path / "ours", Path(ref.place.name) / "weights"))  # fmt: skip
    assert ours.keys() == theirs.keys()
    cfg, stored = hf.load(tmp_path / "ours")
    assert cfg == ref.cfg
    assert fs.tree.structure(stored) == fs.tree.structure(heads.init(cfg))


def test_names_of_labels_and_the_rate_of_dropout_are_read_and_written(tmp_path):
    theirs = transformers.BertForTokenClassification(transformers.BertConfig(
        **BERT_SIZES, id2label={0: "out", 1: "name", 2: "place"}, classifier_dropout=0.3))  # fmt: skip
    cfg, params = hf.load(cases.saved(theirs, tmp_path / "theirs"))
    assert (cfg.labels, cfg.dropout, cfg.task) == (("out", "name", "place"), 0.3, "tokens")
    hf.save(tmp_path / "ours", cfg, fs.materialize(params, P(), fs.make_mesh(data=1), key=fs.key(0)))
    again = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    assert again.id2label == {0: "out", 1: "name", 2: "place"}
    assert again.label2id == {"out": 0, "name": 1, "place": 2}
    assert again.classifier_dropout == 0.3


@pytest.mark.parametrize("task", ["sequence", pytest.param("tokens", marks=pytest.mark.slow)])
def test_dropout_of_the_head_does_not_depend_on_the_mesh(task):
    cfg = heads.Config(DECODERS["gpt2"].config(n_layer=1), task, labels=("a", "b", "c"), dropout=0.5)
    described = fs.tree.map(lambda d: fs.init.normal(d.shape, std=0.3), heads.init(cfg))
    ids = cases.tokens(61)
    targets = ids % 3 if task == "tokens" else ids[:, 0] % 3
    want = cases.loss_and_grads(heads, cfg, described, ONE, ids, targets, key=fs.key(3))
    assert abs(want[0] - cases.loss_and_grads(heads, cfg, described, ONE, ids, targets)[0]) > 1e-3
    got = cases.loss_and_grads(heads, cfg, described, UNEVEN, ids, targets, key=fs.key(3))
    torch.testing.assert_close(got[0], want[0], rtol=2e-6, atol=0)
    cases.close(got[1], want[1], 1e-5, 1e-5)


@pytest.mark.parametrize("side", ["left", "right", "none"])
def test_a_sequence_is_classified_at_its_last_token_on_either_side_of_padding(side):
    ref = reference(f"GPT2{SEQUENCE}")
    mask = {"left": ref.mask.flip(1), "right": ref.mask, "none": torch.ones_like(ref.mask)}[side]
    ids = cases.tokens(61).where(mask.bool(), PAD)
    with torch.no_grad():
        want = ref.theirs(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits
    mesh, specs, layout, p = placed(heads, ref.cfg, ref.params, "data")
    run = fs.shard_map(lambda p, ids, mask: heads.apply(ref.cfg, p, ids, mask=mask, layout=layout, specs=specs),
                       mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=P("data"))  # fmt: skip
    cases.close({"scores": fs.device_get(run(p, ids, mask))}, {"scores": want}, 1e-5, 1e-5)


@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
@pytest.mark.parametrize("layout", [ONE, pytest.param(EVERYTHING, marks=pytest.mark.slow)])
def test_sentence_embeddings_are_pooled_states(pooling, layout):
    ref = cases.reference("gpt2", "base")
    mask = left_padding(*ref.ids.shape).flip(1)
    with torch.no_grad():
        x = ref.theirs.transformer(ref.ids, attention_mask=mask).last_hidden_state
    rows = [a[m.bool()] for a, m in zip(x, mask, strict=True)]
    want = torch.stack([{"mean": a.mean(0), "first": a[0], "last": a[-1]}[pooling] for a in rows])
    mesh, specs, split, p = placed(gpt2, ref.cfg, ref.params, layout)
    for normalize in (True, False):
        run = fs.shard_map(lambda p, ids, mask, n=normalize: heads.embed(
            ref.cfg, p, ids, mask=mask, pooling=pooling, normalize=n, layout=split, specs=specs), mesh=mesh,
            in_specs=(specs, P("data"), P("data")), out_specs=P("data"))  # fmt: skip
        wanted = want / want.norm(dim=1, keepdim=True) if normalize else want
        cases.close({"x": fs.device_get(run(p, ref.ids, mask))}, {"x": wanted}, 1e-5, 1e-5)


def test_what_no_head_can_be_is_refused(tmp_path):
    small = DECODERS["gpt2"].config()
    text = error_text(heads.Config, gptj.Config(), "tokens", labels=("a", "a"), problem_type="ranking",
                      pad_token_id=50400, dropout=1.0)  # fmt: skip
    assert text.startswith("5 problems\n")
    for line in ("labels=('a', 'a')\n  fix: one name or more, each once",
                 "problem_type='ranking'\n  fix: None, or one of",
                 "transformers has no GPTJForTokenClassification", "pad_token_id=50400 is not in a vocabulary of 50400",
                 "dropout=1.0\n  fix: 0 or more, less than 1"):  # fmt: skip
        assert line in text
    assert "problem_type='regression' of tokens" in error_text(heads.Config, small, "tokens", problem_type="regression")
    assert error_text(heads.Config, {"n_embd": 3}, "tokens").startswith(
        "heads.Config: base must be a Config of bert, gpt2, "
    )
    folder = cases.saved(cases.hugging_face("gpt2"), tmp_path)
    text = error_text(heads.load, folder)
    assert "has no head that is supported" in text
    assert "GPT2LMHeadModel" in text
    cfg = heads.Config(small, "sequence", problem_type="multi_label_classification")
    p = fs.device_get(fs.materialize(heads.init(cfg), P(), fs.make_mesh(data=1), key=fs.key(0)))
    ids = cases.tokens(61)
    assert "needed  [6, 2]" in error_text(heads.loss, cfg, p, ids, ids[:, 0])
    assert "params must be a dict with 'base' and 'score'" in error_text(heads.apply, cfg, p["base"], ids)
    assert "mixtral, qwen2, qwen3, qwen3_moe, got a Config\n  fix: cfg.base and params['base']" in (
        error_text(heads.embed, cfg, p, ids))  # fmt: skip
    assert "sequences without tokens have no last one" in error_text(heads.apply, cfg, p, ids[:, :0])
    assert "bert: the config has no mlm" in error_text(
        bert.logits, heads.Config(bert.Config(**BERT_SIZES), "tokens").base, {}, ids)  # fmt: skip
    assert "is missing" in error_text(heads.save, tmp_path / "x", heads.Config(mixtral.Config(), "tokens"),
                                      {"base": {}, "score": {}})  # fmt: skip
