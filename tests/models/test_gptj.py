"""GPT-J equals transformers' in logits, gradients and generated tokens, dense and on every mesh."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from fshard.models import gptj
from tests.lib import model_cases as cases

transformers = pytest.importorskip("transformers")

# 3 heads of 8 dims, 61 tokens and 34 hidden units over 2 or 3: uneven; over "uneven", 3 x 3, also 9 positions
SIZES = {"vocab_size": 61, "n_positions": 12, "n_embd": 24, "n_layer": 2, "n_head": 3, "rotary_dim": 4, "n_inner": 34}
TINY = gptj.Config(**SIZES)
DROPS = gptj.Config(**SIZES, embd_pdrop=0.2, attn_pdrop=0.3, resid_pdrop=0.1)
VARIANTS = {
    "tied": ("both, fully sharded, sequence", {"tie_word_embeddings": True, "n_layer": 1}),
    "one head, all of it turned": ("both", {"n_head": 1, "rotary_dim": 24, "n_inner": None, "n_layer": 1}),
    "another epsilon": ("one device", {"layer_norm_epsilon": 0.3, "n_layer": 1}),
}


def hugging_face(seed=0, **changes):
    torch.manual_seed(seed)
    config = transformers.GPTJConfig(**{**SIZES, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None,
                                        **changes})  # fmt: skip
    return cases.awake(transformers.GPTJForCausalLM(config))


@pytest.mark.parametrize("name", cases.LAYOUTS)
def test_logits_loss_and_gradients_are_transformers(name, tmp_path):
    cases.check_logits_loss_and_gradients(gptj, hugging_face(), name, tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_transformers(variant, tmp_path):
    name, changes = VARIANTS[variant]
    cases.check_logits_loss_and_gradients(gptj, hugging_face(**changes), name, tmp_path)


@pytest.mark.parametrize("name", ["one device", "uneven"])
def test_left_padding_changes_no_logits(name, tmp_path):
    cases.check_padded_logits(gptj, hugging_face(), name, tmp_path)


@pytest.mark.parametrize(("name", "padded", "new", "changes"), [
    ("one device", True, 7, {}), ("both, fully sharded, sequence", True, 4, {}),
    ("uneven", False, 3, {"tie_word_embeddings": True, "n_layer": 1}),
])  # fmt: skip
def test_greedy_generation_is_transformers(name, padded, new, changes, tmp_path):
    cases.check_generation(gptj, hugging_face(**changes), name, tmp_path, padded=padded, new=new)


def test_generation_ends_where_theirs_does(tmp_path):
    theirs = hugging_face()
    ids = cases.tokens(61, t=5)
    told = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0)
    cases.check_generation(gptj, theirs, "both", tmp_path, new=5, eos=int(told[0, 6]))  # the second token of the first


@pytest.mark.parametrize(("name", "changes"), [
    ("one device", {}), ("both, fully sharded, sequence", {}), ("uneven", {"tie_word_embeddings": True}),
])  # fmt: skip
def test_files_go_there_and_back(name, changes, tmp_path):
    cases.check_files(gptj, hugging_face(**changes), name, tmp_path, transformers.GPTJForCausalLM)


@pytest.mark.parametrize(("name", "remat"), [
    ("one device", True), ("both, fully sharded, sequence", True), ("uneven", False),
])  # fmt: skip
def test_remat_and_dropout_are_the_same_on_every_mesh(name, remat):
    cases.check_the_mesh_never_changes_the_answer(gptj, DROPS, name, remat=remat)


@pytest.mark.parametrize(("rate", "layers"), [("embd_pdrop", 0), ("attn_pdrop", 1), ("resid_pdrop", 1)])
def test_each_rate_drops(rate, layers):
    cfg, ids = gptj.Config(**{**SIZES, "n_layer": layers}, **{rate: 0.5}), cases.tokens(61)
    p = fs.tree.map(lambda d: fs.init.normal(d.shape, std=0.5), gptj.init(cfg))
    with_key, without = (cases.loss_and_grads(gptj, cfg, p, "one device", ids, ids, key=key)[0]
                         for key in (fs.key(0), None))  # fmt: skip
    assert abs(float(with_key - without)) > 1e-3


def test_dropout_takes_the_bias_with_it():
    """Where all but a bias is 0, the stream is that bias under its mask, as in theirs; a norm of a constant is 0."""
    cfg = gptj.Config(**{**SIZES, "vocab_size": 24, "n_layer": 1, "resid_pdrop": 0.5})
    p = fs.tree.map(lambda d: torch.zeros(d.shape), gptj.init(cfg))
    p["h"][0]["down"]["b"] += 1
    p["ln_f"]["w"] += 1
    p["head"]["w"] += torch.eye(24)
    for key in (fs.key(0), None):
        run = fs.shard_map(lambda p, ids, key=key: gptj.apply(cfg, p, ids, key=key), mesh=fs.make_mesh(data=1),
                           out_specs=P())  # fmt: skip
        assert (float(fs.device_get(run(p, cases.tokens(24))).std()) > 0.9) == (key is not None)


def test_there_may_be_more_ranks_than_heads(monkeypatch):
    monkeypatch.setitem(cases.LAYOUTS, "five", ({"data": 1, "model": 5}, False, True))
    cases.check_the_mesh_never_changes_the_answer(gptj, gptj.Config(**{**SIZES, "n_layer": 1}), "five")


def transfers(layers, *, sequence=False, backward=False, **changes):
    """What one rank of model=2 moves in a model of so many layers, by the op."""
    cfg = gptj.Config(**{**SIZES, "n_layer": layers, **changes})
    mesh, specs = fs.make_mesh(model=2), gptj.specs(cfg, model="model")
    layout, ids = gptj.Layout(None, "model", sequence), cases.tokens(61)
    p = fs.materialize(gptj.init(cfg), specs, mesh, key=fs.key(0))

    def loss(p, ids):
        return gptj.loss(cfg, p, ids, ids, layout=layout, key=fs.key(1))

    f = fs.value_and_grad(loss) if backward else loss
    run = fs.shard_map(f, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs) if backward else P(), check="never")
    with fs.recording() as log:
        run(p, ids)
    return Counter({op: n // 2 for op, n in Counter(t.op for t in log).items()})


def test_a_block_moves_its_stream_once_each_way():
    def of_block(**kwargs):
        return dict(transfers(2, **kwargs) - transfers(1, **kwargs))

    assert of_block() == {"all_reduce": 1}
    assert of_block(backward=True) == {"all_reduce": 2}
    assert of_block(sequence=True) == {"all_gather": 1, "reduce_scatter": 1}
    assert of_block(resid_pdrop=0.1) == {"all_reduce": 2}  # two masks, two sums


def test_dropout_leaves_the_scores_of_half_precision_in_float32(monkeypatch):
    """In bfloat16, scores in the tens are wrong by tenths. Without dropout, torch's kernel keeps them in float32."""
    seen = []

    def attend(q, k, v, *args, **kwargs):
        seen.append((q.dtype, k.dtype, v.dtype))
        return original(q, k, v, *args, **kwargs)

    original = gptj.causal_attention
    monkeypatch.setattr(gptj, "causal_attention", attend)
    described = fs.tree.map(lambda d: d.to(torch.bfloat16), gptj.init(DROPS))
    for key, scores in ((fs.key(0), torch.float32), (None, torch.bfloat16)):
        mesh = fs.make_mesh(data=1)
        params = fs.materialize(described, P(), mesh, key=fs.key(0))
        logits = fs.shard_map(lambda p, ids, key=key: gptj.apply(DROPS, p, ids, key=key), mesh=mesh,
                              out_specs=P())(params, cases.tokens(61))  # fmt: skip
        assert seen.pop() == (scores, scores, torch.bfloat16)
        assert logits.dtype == torch.bfloat16
    q, k, v = (x.bfloat16() for x in torch.randn(3, 1, 2, 16, 32, generator=torch.Generator().manual_seed(0)) * 5)
    want = torch.softmax(q.float() @ k.float().mT / 32**0.5, -1).bfloat16() @ v
    torch.testing.assert_close(fs.nn.attention(q, k, v), want, rtol=0, atol=0.1)
    low = torch.softmax(q @ k.mT / 32**0.5, -1) @ v
    assert (low - want).abs().max() > 0.3


def test_init_is_theirs_in_distribution():
    cfg = gptj.Config(**{**SIZES, "n_embd": 96, "rotary_dim": 8, "n_inner": None, "initializer_range": 0.05})
    p = fs.device_get(fs.materialize(gptj.init(cfg), P(), fs.make_mesh(data=1), key=fs.key(0)))
    for path, x in fs.tree.leaves_with_path(p):
        if x.ndim == 1:
            assert (x == (1.0 if path[-1] == "w" else 0.0)).all(), path  # norms and biases
        else:
            assert abs(float(x.std()) - 0.05) < 0.002, path
            assert abs(float(x.mean())) < 0.003, path
    assert p["h"][0]["up"]["w"].shape == (96, 384)


def test_old_buffers_and_a_tied_head_are_passed_over(tmp_path):
    from safetensors.torch import load_file, save_file

    theirs = hugging_face(tie_word_embeddings=True)
    folder = cases.saved(theirs, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    tensors["transformer.h.0.attn.masked_bias"] = torch.tensor(-1e9)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _, described = gptj.load(folder)
    assert set(described["head"]) == {"b"}
    (folder / "config.json").write_text(json.dumps({**theirs.config.to_dict(), "tie_word_embeddings": False}))
    assert gptj.load(folder)[1]["head"]["w"].shape == (24, 61)


def test_what_it_is_not_is_refused(tmp_path):
    folder = cases.saved(hugging_face(), tmp_path)
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, "activation_function": "relu", "model_type": "gpt_neo"}))
    with pytest.raises(ShardingError) as e:
        gptj.load(folder)
    wrong = "model_type: 'gpt_neo', not 'gptj'\n  activation_function: 'relu', not 'gelu_new'"
    assert f"not a supported gptj\n  {wrong}\n  fix: " in str(e.value)
    (folder / "config.json").write_text(json.dumps({**given, "n_inner": 35}))
    with pytest.raises(ShardingError, match=r"'transformer.h.0.mlp.fc_in.weight' has another shape"):
        gptj.load(folder)
    with pytest.raises(ShardingError, match="the heads must divide the width\n  n_embd  10    n_head  3\n  10 % 3 = 1"):
        gptj.Config(n_embd=10, n_head=3)
    for rotary in (None, 0, 3, 10):
        with pytest.raises(ShardingError) as e:
            gptj.Config(**{**SIZES, "rotary_dim": rotary})
        assert str(e.value) == (
            f"gptj.Config: rotary_dim={rotary}\n  fix: an even number of at most 8, the width of a head"
        )
    with pytest.raises(ShardingError, match="13 tokens do not fit 12 positions\n  fix: a larger n_positions"):
        cases.logits(gptj, TINY, gptj.init(TINY), "one device", cases.tokens(61, t=13))
