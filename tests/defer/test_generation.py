"""Generation by deferred models of transformers: the tokens are those of their own `generate`, on every mesh."""

from __future__ import annotations

import copy
import functools
import os

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from fshard.defer import generate
from tests.defer.test_defer import without_warnings

os.environ["HF_HUB_OFFLINE"] = "1"
hf = pytest.importorskip("transformers")

WIDE = {"initializer_range": 0.5, "pad_token_id": 0, "eos_token_id": None, "bos_token_id": 1}  # logits that differ
SMALL = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
         "max_position_embeddings": 32, **WIDE}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
T5 = {"vocab_size": 61, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
      "initializer_factor": 8.0, "decoder_start_token_id": 0, "eos_token_id": None}  # fmt: skip
BART = {"vocab_size": 61, "d_model": 16, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 32,
        "init_std": 0.5, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "decoder_start_token_id": 2,
        "forced_eos_token_id": None, "scale_embedding": True}  # fmt: skip

MODELS = {
    "GPT2": ("GPT2LMHeadModel", "GPT2Config",
             {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, **WIDE}),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "Mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 4}),
    "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "GPTNeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SMALL),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 3}),
    "OPT": ("OPTForCausalLM", "OPTConfig",
            {**WIDE, "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
             "ffn_dim": 24, "max_position_embeddings": 32, "word_embed_proj_dim": 16, "init_std": 0.5}),
    "Mamba": ("MambaForCausalLM", "MambaConfig",
              {"vocab_size": 61, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, **WIDE}),
    "Bamba": ("BambaForCausalLM", "BambaConfig",  # which does not count the tokens in its cache
              {**GROUPED, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1,
               "mamba_chunk_size": 4, "attn_layer_indices": [1]}),
    "RWKV": ("RwkvForCausalLM", "RwkvConfig",
             {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 2, "context_length": 32, "eos_token_id": None,
              "rescale_every": 0}),  # else it changes its parameters in forward
    "T5": ("T5ForConditionalGeneration", "T5Config", T5),
    "BART": ("BartForConditionalGeneration", "BartConfig", BART),
    "NLLB-MoE": ("NllbMoeForConditionalGeneration", "NllbMoeConfig", {**BART, "num_experts": 2, "expert_capacity": 64}),
}  # fmt: skip
ENCODERS = ("T5", "BART", "NLLB-MoE")
PADDED = [name for name in MODELS if name != "RWKV"]  # which has no attention_mask
EOS = 60


@functools.cache
def reference(name):
    """The deferred model, its values on one device, and transformers' model with these."""
    cls, config, sizes = MODELS[name]
    make = without_warnings(lambda: getattr(hf, cls)._from_config(getattr(hf, config)(**sizes)).eval())
    apply, tree = fs.defer(make)
    placed = fs.materialize(tree, P(), fs.make_mesh(a=1), key=fs.key(3))
    values = {kind: fs.device_get(placed[kind]) for kind in ("params", "buffers")}
    theirs = make()
    theirs.load_state_dict({**values["params"], **values["buffers"]}, strict=False)
    theirs.tie_weights()
    return apply.eval(), tree, values, theirs


def ours(name, ids, sizes, mask=None, check="never", **kwargs):
    apply, tree, values, _ = reference(name)
    mesh = fs.make_mesh(**sizes)
    specs = fs.fully_shard(P(), tree["params"], axis="data")
    params = fs.device_put(values["params"], specs, mesh)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P("data"), P("data")), out_specs=P("data"), check=check)
    def run(p, b, ids, mask):
        whole = fs.unshard(p, specs, "data", shapes=tree["params"])
        return generate(apply, whole, fs.unshard(b, P(), "data"), ids, mask=mask, data="data", **kwargs)

    return fs.device_get(run(params, values["buffers"], ids, mask))


def wanted(name, ids, mask=None, **kwargs):
    kwargs = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6, **kwargs}
    mask = torch.ones_like(ids) if mask is None else mask
    with torch.no_grad():
        out = reference(name)[3].generate(ids, attention_mask=mask, **kwargs)
    n = 1 if name in ENCODERS else ids.shape[1]
    rest = n + kwargs["max_new_tokens"] - out.shape[1]  # to the length of ours
    ends = kwargs.get("eos_token_id") if "num_beams" in kwargs else None  # beams take a padding of 0 for none
    return torch.nn.functional.pad(out, (0, rest), value=kwargs["pad_token_id"] or (ends[0] if ends else 0))


def prompts(b=3, t=5):
    ids = torch.randint(1, EOS, (b, t), generator=torch.Generator().manual_seed(b))
    mask = torch.ones_like(ids)
    for row in range(b):
        mask[row, : (0, 3, 1)[row % 3]] = 0
    return ids, mask


FAST = ("GPT2", "Mamba")


@pytest.mark.parametrize("name", [pytest.param(m, marks=[] if m in FAST else pytest.mark.slow) for m in MODELS])
def test_greedy_tokens_are_those_of_transformers_with_padding_and_ends(name):
    ids, mask = prompts()
    # RWKV without its state, in which transformers mixes the rows of a batch: it runs on all tokens at each step.
    plain = wanted(name, ids, use_cache=name != "RWKV")
    assert len({tuple(row) for row in plain[:, -6:].tolist()}) > 1
    check = "first" if name == "GPT2" else "never"  # an encoder with a decoder is checked below
    assert torch.equal(ours(name, ids, {"data": 2}, check=check, new=6), plain)
    if name not in PADDED:
        return
    ids = ids.where(mask.bool(), 0)
    free = wanted(name, ids, mask)
    eos = [int(free[0, -4]), int(free[1, -3])]
    ended = wanted(name, ids, mask, eos_token_id=eos)
    assert (ended != free).any()
    assert torch.equal(ours(name, ids, {"data": 2}, mask, new=6, eos=eos, pad=0), ended)
    if name == "GPT2":  # the tokens of the module's own generation config are the defaults
        module = copy.copy(reference(name)[0].module)
        module.generation_config = copy.copy(module.generation_config)
        module.generation_config.eos_token_id = [*eos, 10**6]
        assert torch.equal(ours(name, ids, {"data": 2}, mask, new=6, module=module), ended)
        assert torch.equal(ours(name, ids, {"data": 2}, mask, new=6, module=module, eos=None), free)


@pytest.mark.parametrize(
    "name", ["BART", *(pytest.param(m, marks=pytest.mark.slow) for m in ("Llama", "Mamba", "RWKV"))]
)
def test_a_rank_without_prompts_runs_along(name):
    ids, mask = prompts(2)
    mask = None if name == "RWKV" else mask
    for options in ({"eos": EOS, "pad": 0}, {"temperature": 2.0, "key": fs.key(1), "top_k": 20}, {"beams": 2}):
        one = ours(name, ids, {"data": 1}, mask, new=2, **options)
        assert torch.equal(ours(name, ids, {"data": 3}, mask, new=2, **options), one)


@pytest.mark.parametrize(("name", "early"), [
    pytest.param(name, early, marks=[] if early is own else pytest.mark.slow)
    for name, own in {"BART": True, "GPT2": "never", "T5": None, "Mamba": None}.items()
    for early in (False, True, "never")
])  # fmt: skip
def test_beams_are_those_of_transformers(name, early):
    ids, mask = prompts()
    for padding in (mask, None):
        source = ids if padding is None else ids.where(mask.bool(), 0)
        greedy = wanted(name, source, padding)
        likely = int(greedy[0, -5])  # so that some beams end early
        both = {"length_penalty": 1.5, "early_stopping": early}
        # Not 0 as the padding of results: the beam search of transformers takes that for none, and fills with an eos.
        want = wanted(name, source, padding, num_beams=3, eos_token_id=[EOS, likely], pad_token_id=4, **both)
        options = {"eos": [EOS, likely], "pad": 4, "beams": 3, **both}
        assert not torch.equal(want, greedy)
        assert torch.equal(ours(name, source, {"data": 2}, padding, new=6, **options), want)


def noise(key, step, shape):
    """The noise that our draws add to logits."""
    draw = fs.shard_map(lambda: fs.random.uniform(fs.fold_in(key, step), shape), mesh=fs.make_mesh(a=1), in_specs=(),
                        out_specs=P())  # fmt: skip
    return -(-fs.device_get(draw()).log()).log()


@pytest.mark.parametrize("name", [pytest.param(m, marks=[] if m == "GPT2" else pytest.mark.slow) for m in PADDED])
def test_greedy_drawn_and_searched_tokens_are_those_of_transformers_on_three_meshes(name, monkeypatch):
    """With padding on the left and a list of ends; both sides draw by the same noise."""
    ids, mask = prompts()
    ids, key, steps = ids.where(mask.bool(), 0), fs.key(7), iter(range(100))

    def draw(probs, num_samples):
        return (probs.log() + noise(key, next(steps), tuple(probs.shape))).argmax(-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", draw)
    free = wanted(name, ids, mask)
    ends = [EOS, int(free[0, -4]), int(free[1, -3])]
    drawn = {"temperature": 3.0, "top_p": 0.95, "top_k": 30}
    searched = {"length_penalty": 1.5, "early_stopping": True}
    for options, theirs in (({}, {}), ({**drawn, "key": key}, {**drawn, "do_sample": True}),
                            ({**searched, "beams": 3}, {**searched, "num_beams": 3})):  # fmt: skip
        want = wanted(name, ids, mask, eos_token_id=ends, **theirs)
        assert not theirs or not torch.equal(want, free)
        for sizes in ({"data": 1}, {"data": 2}, {"data": 3}):
            assert torch.equal(ours(name, ids, sizes, mask, new=6, eos=ends, pad=0, **options), want), (options, sizes)


def test_options_of_a_folder_are_those_that_transformers_generates_with(tmp_path):
    ids, mask = prompts()
    _, _, _, theirs = reference("BART")
    config = hf.GenerationConfig(
        eos_token_id=[7, 9], pad_token_id=0, bos_token_id=1, decoder_start_token_id=2, forced_bos_token_id=11,
        forced_eos_token_id=9, num_beams=2, length_penalty=0.5, early_stopping=True, no_repeat_ngram_size=2,
        repetition_penalty=1.2, min_length=4, max_length=8, use_cache=True,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    options = fs.hf.generation_options(tmp_path)
    assert options == fs.hf.generation_options(str(tmp_path)) == fs.hf.generation_options(config.to_dict())
    assert options == {"eos": [7, 9], "pad": 0, "decoder_start": 2, "forced_bos": 11, "forced_eos": 9, "min_new": 3,
                       "repetition_penalty": 1.2, "no_repeat_ngram": 2, "beams": 2, "length_penalty": 0.5,
                       "early_stopping": True}  # fmt: skip
    with torch.no_grad():
        want = theirs.generate(ids, attention_mask=mask, generation_config=config)
    got = ours("BART", ids, {"data": 2}, mask, check="first", new=7, **options)
    assert torch.equal(got, torch.nn.functional.pad(want, (0, 8 - want.shape[1])))


def test_options_of_draws_and_of_model_configs():
    draws = {"do_sample": True, "temperature": 0.6, "top_k": 0, "top_p": 0.9, "typical_p": 1.0, "eos_token_id": 2}
    assert fs.hf.generation_options(draws) == {"eos": 2, "temperature": 0.6, "top_p": 0.9}
    assert fs.hf.generation_options({**draws, "do_sample": False}) == {"eos": 2}
    assert fs.hf.generation_options(hf.GenerationConfig(do_sample=True, min_p=0.1, num_beams=1, length_penalty=3.0)) \
        == {"temperature": 1.0, "top_k": 50, "min_p": 0.1}  # fmt: skip
    assert fs.hf.generation_options(hf.LlamaConfig(eos_token_id=[3, 4], pad_token_id=0)) == {"eos": [3, 4], "pad": 0}
    assert fs.hf.generation_options({"pad_token_id": 3, "min_new_tokens": 4}) == {}  # nothing ends
    assert fs.hf.generation_options(hf.GenerationConfig()) == {}
    assert fs.hf.generation_options({"eos_token_id": [5, -1], "pad_token_id": -1}) == {"eos": [5]}  # -1 is none


@pytest.mark.parametrize("sizes", [{"data": 2, "replica": 2}])
def test_draws_and_callbacks_are_those_of_one_device(sizes):
    ids, mask = prompts()
    options = {"new": 4, "temperature": 3.0, "top_p": 0.95, "eos": list(range(20)), "key": fs.key(2)}
    seen = []
    want = ours("Llama", ids, {"data": 1}, mask, on_token=lambda step, tokens: seen.append((step, tokens)), **options)
    assert torch.equal(torch.stack([tokens for _, tokens in seen], 1), want[:, 5 : 5 + len(seen)])
    assert [step for step, _ in seen] == list(range(len(seen)))
    assert torch.equal(ours("Llama", ids, sizes, mask, **options), want)
    assert not torch.equal(ours("Llama", ids, {"data": 1}, mask, **{**options, "key": fs.key(3)}), want)


@pytest.mark.parametrize("name", ["GPT2", "T5"])
def test_any_function_with_the_arguments_of_apply_generates(name):
    """One that gathers the leaves of each call; every step runs one token, and the encoder runs once."""
    apply, tree, values, _ = reference(name)
    ids, _ = prompts(4)
    mesh = fs.make_mesh(data=2)
    specs = fs.fully_shard(P(), tree["params"], axis="data")
    calls = []

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P("data")), out_specs=P("data"), check="never")
    def run(p, b, ids):
        def gathering(p, b, **inputs):
            calls.append({name: tuple(x.shape) for name, x in inputs.items() if isinstance(x, torch.Tensor)})
            return apply(fs.unshard(p, specs, "data", shapes=tree["params"]), fs.unshard(b, P(), "data"), **inputs)

        # The ranks' sequences end after different numbers of tokens, and all ranks gather for each of them.
        return generate(gathering, p, b, ids, new=6, module=apply.module, eos=ends, pad=0)

    free = wanted(name, ids)
    ends = [int(free[0, -4]), int(free[1, -4]), int(free[2, -2])]
    out = run(fs.device_put(values["params"], specs, mesh), values["buffers"], ids)
    assert torch.equal(fs.device_get(out), wanted(name, ids, eos_token_id=ends))
    decoded = "decoder_input_ids" if name == "T5" else "input_ids"
    assert {call[decoded] for call in calls[:2]} == {(2, 1 if name == "T5" else 5)}
    assert {call[decoded] for call in calls[2:]} == {(2, 1)}
    assert sum("input_ids" in call for call in calls) == (2 if name == "T5" else len(calls))


def test_impossible_arguments_are_errors():
    ids, mask = prompts()
    wrong = [
        ("ids must be int64 or int32", {"ids": ids * 1.0}),
        (r"one entry for each token\n  mask  \[3, 4\]    ids  \[3, 5\]", {"mask": mask[:, 1:]}),
        ("2 new tokens after 0", {"ids": ids[:, :0], "mask": None}),
        ("eos has the token 61, and the vocabulary has 61", {"eos": 61}),
        ("decoder_start=3, and LlamaForCausalLM has no encoder", {"decoder_start": 3}),
        ("there is no option max_new_tokens", {"max_new_tokens": 3}),
        ("temperature=0.5, key=None", {"temperature": 0.5}),
        ("module must be a Module", {"module": 3}),
        ("Linear is no model of transformers", {"module": torch.nn.Linear(2, 2)}),
    ]
    for message, arguments in wrong:
        with pytest.raises(ShardingError, match=message):
            ours("Llama", **{"ids": ids, "sizes": {"data": 1}, "mask": mask, "new": 2, **arguments})
    with pytest.raises(ShardingError, match="generate: the source has no tokens"):
        ours("T5", ids[:, :0], {"data": 1}, new=2)


def test_options_that_do_not_exist_here_are_errors(tmp_path):
    config = hf.GenerationConfig(suppress_tokens=[3], num_beam_groups=2, guidance_scale=1.0, epsilon_cutoff=0.0)
    with pytest.raises(
        ShardingError, match=r"(?s)2 problems.*num_beam_groups=2.*suppress_tokens=\[3\] is not an option here"
    ):
        fs.hf.generation_options(config)
    with pytest.raises(ShardingError, match="min_length=5 counts the prompt"):
        fs.hf.generation_options({"eos_token_id": 1, "min_length": 5})
    with pytest.raises(ShardingError, match=r"lang_to_id=\{'en': 3\} is not an option of generation"):
        fs.hf.generation_options({"lang_to_id": {"en": 3}})
    with pytest.raises(ShardingError, match=r"(?s)2 problems.*num_beams must be an int, got '4'"):
        fs.hf.generation_options({"num_beams": "4", "min_length": 2.5})
    with pytest.raises(ShardingError, match="source must be a folder, a dict or a GenerationConfig, got 3"):
        fs.hf.generation_options(3)
    with pytest.raises(ShardingError, match=r"config\.json: there is no such file"):
        fs.hf.generation_options(tmp_path)


def test_a_model_without_logits_or_start_is_an_error():
    base, tree = fs.defer(without_warnings(lambda: hf.GPT2Model(hf.GPT2Config(**MODELS["GPT2"][2])).eval()))
    t5, t5_tree = fs.defer(without_warnings(lambda: hf.T5ForConditionalGeneration(
        hf.T5Config(**{**T5, "decoder_start_token_id": None})).eval()))  # fmt: skip
    xlnet, xlnet_tree = fs.defer(without_warnings(lambda: hf.XLNetLMHeadModel(
        hf.XLNetConfig(vocab_size=9, d_model=8, n_layer=1, n_head=2, d_inner=8)).eval()))  # fmt: skip
    for apply, described, message in (
        (base, tree, "GPT2Model gives no logits of tokens\n  fix: .* AutoModelForCausalLM"),
        (xlnet, xlnet_tree, "XLNetLMHeadModel predicts the token of a mask at the end of its input"),
        (t5, t5_tree, "T5ForConditionalGeneration has no decoder_start_token_id\n  fix: decoder_start="),
    ):
        placed = fs.materialize(described, P(), fs.make_mesh(a=1), key=fs.key(0))
        values = {kind: fs.device_get(placed[kind]) for kind in ("params", "buffers")}
        with pytest.raises(ShardingError, match=message):
            generate(apply, values["params"], values["buffers"], torch.ones(1, 2, dtype=torch.int64), new=1)
