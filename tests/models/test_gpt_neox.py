"""GPT-NeoX equals transformers' in logits, gradients and generated tokens, dense and on every mesh."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

import fshard as fs
from fshard import P, ShardingError
from fshard.models import gpt_neox
from tests.lib import model_cases as cases

transformers = pytest.importorskip("transformers")

# 3 heads of 8 dims, 61 tokens and 34 hidden units over 2 or 3: uneven; over "uneven", 3 x 3, also 9 positions
SIZES = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3,
         "intermediate_size": 34, "max_position_embeddings": 8}  # fmt: skip
HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
DROPS = {"hidden_dropout": 0.2, "attention_dropout": 0.3}
VARIANTS = {
    "one after the other, gelu_new": {"use_parallel_residual": False, "hidden_act": "gelu_new"},
    "no attention bias, tied, all of the head turned, another epsilon": {
        "attention_bias": False, "tie_word_embeddings": True, "num_hidden_layers": 1, "layer_norm_eps": 0.3,
        "rope_parameters": {**HALF, "partial_rotary_factor": 1.0},
    },
    "one after the other, no attention bias, gelu_fast, another epsilon and base": {
        "use_parallel_residual": False, "attention_bias": False, "hidden_act": "gelu_fast", "layer_norm_eps": 0.3,
        "num_hidden_layers": 1, "rope_parameters": {**HALF, "rope_theta": 50.0},
    },
}  # fmt: skip
SERIAL, TIED, OTHERS = VARIANTS.values()
SCALED = {  # more than the 8 positions of the config
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 16.0, "rope_theta": 4.0, "partial_rotary_factor": 1.0},  # enough to change tokens
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4, "beta_fast": 2, "beta_slow": 1},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"short_factor": [1.0, 2.0], "long_factor": [1.5, 3.0], "original_max_position_embeddings": 6},
}


def hugging_face(seed=0, **changes):
    torch.manual_seed(seed)
    config = {**SIZES, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "rope_parameters": HALF}
    return cases.awake(transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**{**config, **changes})))


def scaled(kind):
    return hugging_face(rope_parameters={**HALF, "rope_type": kind, **SCALED[kind]})


@pytest.mark.parametrize("name", cases.LAYOUTS)
def test_logits_loss_and_gradients_are_transformers(name, tmp_path):
    cases.check_logits_loss_and_gradients(gpt_neox, hugging_face(), name, tmp_path)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_transformers(variant, tmp_path):
    theirs = hugging_face(**VARIANTS[variant])
    cases.check_logits_loss_and_gradients(gpt_neox, theirs, "both, fully sharded, sequence", tmp_path)


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_positions_are_transformers_where_prompts_are_padded(kind, tmp_path):
    cases.check_padded_logits(gpt_neox, scaled(kind), "both", tmp_path)


@pytest.mark.parametrize(("name", "padded", "new", "changes"), [
    ("one device", True, 7, {}), ("both, fully sharded, sequence", True, 4, SERIAL),
    ("uneven", False, 3, TIED),
])  # fmt: skip
def test_greedy_generation_is_transformers(name, padded, new, changes, tmp_path):
    cases.check_generation(gpt_neox, hugging_face(**changes), name, tmp_path, padded=padded, new=new)


@pytest.mark.parametrize("padded", [False, True])
def test_generation_past_where_the_positions_scale_is_transformers(padded, tmp_path):
    cases.check_generation(gpt_neox, scaled("dynamic"), "data", tmp_path, padded=padded)


def test_generation_ends_where_theirs_does(tmp_path):
    theirs = hugging_face()
    ids = cases.tokens(61, t=5)
    told = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False, pad_token_id=0)
    cases.check_generation(gpt_neox, theirs, "both", tmp_path, new=5, eos=int(told[0, 6]))  # the first's second token


@pytest.mark.parametrize(("name", "changes"), [
    ("one device", {}), ("both, fully sharded, sequence", OTHERS),
    ("uneven", TIED),
])  # fmt: skip
def test_files_go_there_and_back(name, changes, tmp_path):
    cases.check_files(gpt_neox, hugging_face(**changes), name, tmp_path, transformers.GPTNeoXForCausalLM)


@pytest.mark.parametrize(("name", "remat", "parallel"), [
    ("one device", True, True), ("both, fully sharded, sequence", True, True), ("uneven", False, False),
])  # fmt: skip
def test_remat_and_dropout_are_the_same_on_every_mesh(name, remat, parallel):
    cfg = gpt_neox.Config(**SIZES, **DROPS, use_parallel_residual=parallel, rope_parameters=HALF)
    cases.check_the_mesh_never_changes_the_answer(gpt_neox, cfg, name, remat=remat)


@pytest.mark.parametrize("rate", ["hidden_dropout", "attention_dropout"])
def test_each_rate_drops(rate):
    layers = 0 if rate == "hidden_dropout" else 1  # the embeddings' own; those of blocks are below
    cfg, ids = gpt_neox.Config(**{**SIZES, "num_hidden_layers": layers}, **{rate: 0.5}), cases.tokens(61)
    p = fs.tree.map(lambda d: fs.init.normal(d.shape, std=0.5), gpt_neox.init(cfg))
    with_key, without = (cases.loss_and_grads(gpt_neox, cfg, p, "one device", ids, ids, key=key)[0]
                         for key in (fs.key(0), None))  # fmt: skip
    assert abs(float(with_key - without)) > 1e-3


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("half", ["proj", "down"])
def test_dropout_takes_the_biases_with_it(half, parallel):
    """Where all but a bias is 0, the stream is that bias under its mask, as in theirs; a norm of a constant is 0."""
    small = {**SIZES, "vocab_size": 24, "num_hidden_layers": 1}
    cfg = gpt_neox.Config(**small, hidden_dropout=0.5, rope_parameters=HALF, use_parallel_residual=parallel)
    p = fs.tree.map(lambda d: torch.zeros(d.shape), gpt_neox.init(cfg))
    p["h"][0][half]["b"] += 1
    p["ln_f"]["w"] += 1
    p["head"]["w"] += torch.eye(24)
    for key in (fs.key(0), None):
        run = fs.shard_map(lambda p, ids, key=key: gpt_neox.apply(cfg, p, ids, key=key), mesh=fs.make_mesh(data=1),
                           out_specs=P())  # fmt: skip
        assert (float(fs.device_get(run(p, cases.tokens(24))).std()) > 0.9) == (key is not None)


def test_there_may_be_more_ranks_than_heads(monkeypatch):
    monkeypatch.setitem(cases.LAYOUTS, "five", ({"data": 1, "model": 5}, False, True))
    cfg = gpt_neox.Config(**{**SIZES, "num_hidden_layers": 1})
    cases.check_the_mesh_never_changes_the_answer(gpt_neox, cfg, "five")


def transfers(layers, *, sequence=False, backward=False, **changes):
    """What one rank of model=2 moves in a model of so many layers: (op, bytes of its argument) -> count."""
    cfg = gpt_neox.Config(**{**SIZES, "num_hidden_layers": layers, **changes})
    mesh, specs = fs.make_mesh(model=2), gpt_neox.specs(cfg, model="model")
    layout, ids = gpt_neox.Layout(None, "model", sequence), cases.tokens(61, b=6, t=8)
    p = fs.materialize(gpt_neox.init(cfg), specs, mesh, key=fs.key(0))

    def loss(p, ids):
        return gpt_neox.loss(cfg, p, ids, ids, layout=layout, key=fs.key(1))

    f = fs.value_and_grad(loss) if backward else loss
    run = fs.shard_map(f, mesh=mesh, in_specs=(specs, P()), out_specs=(P(), specs) if backward else P(), check="never")
    with fs.recording() as log:
        run(p, ids)
    return Counter({sent: n // 2 for sent, n in Counter((t.op, t.bytes) for t in log).items()})


def test_a_block_of_two_halves_side_by_side_moves_its_stream_once_each_way():
    def of_block(**kwargs):
        return dict(transfers(2, **kwargs) - transfers(1, **kwargs))

    stream, norms = 4 * 6 * 8 * 24, 4 * 4 * 24  # bytes of [B, T, D], and of the gradients of two norms
    assert of_block() == {("all_reduce", stream): 1}
    assert of_block(backward=True) == {("all_reduce", stream): 2, ("all_reduce", norms): 1}
    assert of_block(sequence=True) == {("all_gather", stream // 2): 1, ("reduce_scatter", stream): 1}
    assert of_block(use_parallel_residual=False) == {("all_reduce", stream): 2}
    assert of_block(hidden_dropout=0.1) == {("all_reduce", stream): 2}  # two masks, two sums


def test_init_is_theirs_in_distribution():
    cfg = gpt_neox.Config(**{**SIZES, "hidden_size": 96, "intermediate_size": 200, "initializer_range": 0.05})
    p = fs.device_get(fs.materialize(gpt_neox.init(cfg), P(), fs.make_mesh(data=1), key=fs.key(0)))
    for path, x in fs.tree.leaves_with_path(p):
        if path[-1] == "b" or {"ln_1", "ln_2", "ln_f"} & set(path):
            assert (x == (1.0 if path[-1] == "w" else 0.0)).all(), path
        else:
            assert abs(float(x.std()) - 0.05) < 0.002, path
            assert abs(float(x.mean())) < 0.003, path


def test_configs_and_buffers_of_older_versions_are_read(tmp_path):
    folder = cases.saved(hugging_face(), tmp_path)
    given = json.loads((folder / "config.json").read_text())
    for new in ("rope_parameters", "attention_bias"):
        del given[new]
    old = {"rotary_pct": 1.0, "rotary_emb_base": 300, "rope_scaling": {"type": "linear", "factor": 4.0}}
    (folder / "config.json").write_text(json.dumps({**given, **old}))
    weights = load_file(folder / "model.safetensors")
    weights["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 8, 8, dtype=torch.bool)
    weights["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    weights["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    cfg, params = gpt_neox.load(folder)
    assert cfg.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 300, "partial_rotary_factor": 1}
    theirs, ids = transformers.GPTNeoXForCausalLM.from_pretrained(folder).eval(), cases.tokens(61)
    with torch.no_grad():
        cases.close(cases.logits(gpt_neox, cfg, params, "one device", ids), theirs(ids).logits, 1e-5, 1e-5)
    (folder / "config.json").write_text(json.dumps({**given, **old, "tie_word_embeddings": True}))
    assert "head" not in gpt_neox.load(folder)[1]  # though the file has one


def test_what_rope_parameters_lack_is_theirs():
    assert gpt_neox.Config().rope_parameters == transformers.GPTNeoXConfig().rope_parameters
    linear = {"rope_type": "linear", "factor": 2.0}
    assert gpt_neox.Config(rope_parameters=linear).rope_parameters == {
        **transformers.GPTNeoXConfig().rope_parameters, **linear,
    }  # fmt: skip


def test_what_it_is_not_is_refused(tmp_path):
    folder = cases.saved(hugging_face(), tmp_path)
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, "model_type": "gptj"}))
    with pytest.raises(ShardingError, match="not a supported gpt_neox\n  model_type: 'gptj', not 'gpt_neox'"):
        gpt_neox.load(folder)
    (folder / "config.json").write_text(json.dumps({**given, "intermediate_size": 35, "attention_bias": False}))
    with pytest.raises(ShardingError) as e:
        gpt_neox.load(folder)
    assert "'gpt_neox.layers.0.mlp.dense_h_to_4h.weight' has another shape" in str(e.value)
    assert "'gpt_neox.layers.1.attention.dense.bias' is not part of this model" in str(e.value)
    with pytest.raises(ShardingError) as e:
        gpt_neox.Config(hidden_size=10, num_attention_heads=3)
    assert str(e.value) == (
        "gpt_neox.Config: the heads must divide the width\n  hidden_size  10    num_attention_heads  3\n  10 % 3 = 1"
    )
    with pytest.raises(ShardingError) as e:
        gpt_neox.Config(hidden_act="relu")
    assert str(e.value) == "gpt_neox.Config: hidden_act='relu'\n  fix: one of ['gelu', 'gelu_new', 'gelu_fast']"
    with pytest.raises(ShardingError, match="3 dims of a head cannot be turned in pairs"):
        gpt_neox.Config(**SIZES, rope_parameters={"partial_rotary_factor": 0.4})
    with pytest.raises(ShardingError, match="the rope_type 'spiral' is not known"):
        gpt_neox.Config(**SIZES, rope_parameters={"rope_type": "spiral"})
