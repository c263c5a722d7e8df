"""A saved folder is used as the one that was loaded: tokens that end a text, tokenizer, dtype and other keys."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P, hf
from fshard.interop.hf import config_of, export
from fshard.interop.hf.weights import FileTensor
from fshard.models import bert, gpt2, gpt_neox, gptj, llama, mistral, mixtral, qwen2, qwen3
from tests.lib.assertions import error_text
from tests.lib.tiers import slow_unless

WINDOW = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
SIZES: dict[str, dict[str, Any]] = {
    "GPT2LMHead": {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2},
    "GPTJForCausalLM": {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2, "rotary_dim": 4},
    "GPTNeoXForCausalLM": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                           "intermediate_size": 24, "max_position_embeddings": 32},
    "LlamaForCausalLM": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                         "intermediate_size": 24, "max_position_embeddings": 32},
    "BertForMaskedLM": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                        "intermediate_size": 24, "max_position_embeddings": 32},
    **{f"{name}ForCausalLM": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
                              "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32, **more}
       for name, more in {"Mistral": {"sliding_window": 4}, "Mixtral": {"num_local_experts": 3},
                          "Qwen2": WINDOW, "Qwen3": {"head_dim": 4, **WINDOW}}.items()},
}  # fmt: skip
DECODERS = [name for name in SIZES if not name.startswith("Bert")]
MODULES = {"GPT2": gpt2, "GPTJ": gptj, "GPTNeoX": gpt_neox, "Llama": llama, "Bert": bert, "Mistral": mistral,
           "Mixtral": mixtral, "Qwen2": qwen2, "Qwen3": qwen3}  # fmt: skip
# Files that a tokenizer or a processor writes, and some that are not carried over.
CARRIED: dict[str, bytes] = {
    "tokenizer.json": b"{}", "tokenizer_config.json": b"{}", "special_tokens_map.json": b"{}", "vocab.json": b"{}",
    "merges.txt": b"a b\n", "vocab.txt": b"[PAD]\n", "added_tokens.json": b"{}", "tokenizer.model": b"\x00\xff",
    "chat_template.jinja": b"{{ messages }}", "additional_chat_templates/tools.jinja": b"{{ tools }}",
    "preprocessor_config.json": b"{}", "modeling_mine.py": b"pass\n", "LICENSE": b"mine",
}  # fmt: skip
LEFT: dict[str, bytes] = {
    "README.md": b"#",
    "pytorch_model.bin": b"\x80",
    "optimizer.pt": b"",
    "tokenizer.safetensors": b"",
    "x.json": b"",
}


def names(kind: str) -> tuple[str, str]:
    """Names of the config and of the model in transformers."""
    base = kind.removesuffix("LMHead").removesuffix("ForCausalLM").removesuffix("ForMaskedLM")
    return f"{base}Config", f"{kind}Model" if kind.endswith("LMHead") else kind


def module_of(kind: str) -> Any:
    return MODULES[names(kind)[0].removesuffix("Config")]


def their_folder(kind: str, folder: Path, *, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """Save a model of transformers with random weights; return it."""
    transformers = pytest.importorskip("transformers")
    config_name, model_name = names(kind)
    torch.manual_seed(1)
    sizes = {"vocab_size": 13, "initializer_range": 0.5, "bos_token_id": None, "eos_token_id": None, **SIZES[kind]}
    theirs = getattr(transformers, model_name)(getattr(transformers, config_name)(**sizes | config)).eval().to(dtype)
    theirs.save_pretrained(folder)
    return theirs


def write_files(folder: Path, contents: dict[str, bytes]) -> None:
    for name, data in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)


def through_fshard(source: Path, target: Path, like: Path | None, **changes: Any) -> Any:
    """Load a folder, place it on a mesh, save it from there; return the config."""
    mesh = fs.make_mesh(data=2, model=2)
    cfg, stored = hf.load(source)
    cfg = type(cfg)(**{**vars(cfg), **changes})
    hf.save(target, cfg, fs.materialize(stored, P(), mesh, key=fs.key(0)), like=like)
    return cfg


PROMPTS = torch.tensor([[3], [5], [7], [11]])


def greedy(model: Any, new: int = 12) -> Any:
    """Generate as a user does who reads the folder: stops, pads and all other options are those of the folder."""
    return model.generate(PROMPTS, max_new_tokens=new, do_sample=False).tolist()


def greedy_by_fshard(kind: str, folder: Path, new: int = 12) -> Any:
    """Generate in the same way by the model file, with the vocabulary split too."""
    model, mesh, options = module_of(kind), fs.make_mesh(data=2, model=2), hf.generation_options(folder)
    cfg, stored = hf.load(folder)
    specs = model.specs(cfg, model="model")

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"), check="never")
    def run(params, ids):
        return model.generate(cfg, params, ids, new=new, layout=model.Layout("data", "model"), **options)

    return fs.device_get(run(fs.materialize(stored, specs, mesh, key=fs.key(0)), PROMPTS)).tolist()


def read_again(kind: str, folder: Path) -> Any:
    return getattr(pytest.importorskip("transformers"), names(kind)[1]).from_pretrained(folder).eval()


LIKE_LLAMA = ("Qwen2ForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM")  # in all that is tested here


@pytest.mark.parametrize(("kind", "several", "carry"), [
    pytest.param(kind, several, carry, id=f"{kind}, {'two stops' if several else 'one stop'}{', like' * carry}",
                 marks=[pytest.mark.slow] * (several is not carry or kind in LIKE_LLAMA or kind.startswith("GPT")))
    for kind in DECODERS for several in (False, True) for carry in (False, True)
    if (several and carry) or kind == DECODERS[0]  # every kind with all of a folder, one with each part of it
])  # fmt: skip
def test_saved_decoder_stops_where_the_loaded_one_does(kind, several, carry, tmp_path):
    free = greedy(their_folder(kind, tmp_path / "free"))
    stop: Any = free[0][4]  # a token that the first row generates, and so its end
    stop = [stop, free[1][3]] if several else stop
    theirs = their_folder(kind, tmp_path / "theirs", eos_token_id=stop, bos_token_id=2, pad_token_id=0)
    want = greedy(theirs)
    assert want != [row[: len(want[0])] for row in free]  # stops matter
    cfg = through_fshard(tmp_path / "theirs", tmp_path / "ours", tmp_path / "theirs" if carry else None)
    assert cfg.eos_token_id == (tuple(stop) if several else stop)
    assert (cfg.bos_token_id, cfg.pad_token_id) == (2, 0)
    again = read_again(kind, tmp_path / "ours")
    assert greedy(again) == want
    if carry:
        assert [row[: len(want[0])] for row in greedy_by_fshard(kind, tmp_path / "ours")] == want
    assert again.generation_config.eos_token_id == theirs.generation_config.eos_token_id
    assert (tmp_path / "ours" / "generation_config.json").exists() == carry


# Keys of the config.json of transformers that a folder saved without `like=` lacks, and why none of them is needed.
ALONE: dict[str, set[str]] = {
    "GPT2LMHead": {"reorder_and_upcast_attn"} | {f"summary_{x}" for x in ("activation", "first_dropout",
                   "proj_to_labels", "type", "use_proj")},  # of half precision on old GPUs; of the double head
    "GPTJForCausalLM": set(),
    "GPTNeoXForCausalLM": {"classifier_dropout", "is_decoder"},  # of another head; false in decoders, by history
    "LlamaForCausalLM": {"pretraining_tp"},  # splits a matrix product, with the same result
    "BertForMaskedLM": {"classifier_dropout", "bos_token_id", "eos_token_id"},  # of another head; null
    "MistralForCausalLM": set(),
    "Qwen2ForCausalLM": set(),
    "Qwen3ForCausalLM": set(),
    "MixtralForCausalLM": {"head_dim"},  # null
}  # fmt: skip
DEFAULTS = {"BertForMaskedLM": {"position_embedding_type"}, "Qwen2ForCausalLM": {"use_mrope"},
            "MixtralForCausalLM": {"router_z_loss_coef"}}  # that transformers does not write  # fmt: skip
ANY = {"use_cache", "transformers_version"}  # of no effect on values; who wrote it


@pytest.mark.parametrize("kind", slow_unless(list(SIZES)[::2], SIZES))
def test_every_key_of_config_json_is_kept_or_explained(kind, tmp_path):
    their_folder(kind, tmp_path / "theirs", dtype=torch.bfloat16)
    write_keys(tmp_path / "theirs", sliding_window=16, mine={"a": [1]}, torch_dtype="float16")
    through_fshard(tmp_path / "theirs", tmp_path / "like", tmp_path / "theirs")
    through_fshard(tmp_path / "theirs", tmp_path / "alone", None)
    want, like, alone = (config_of(tmp_path / name) for name in ("theirs", "like", "alone"))
    del want["torch_dtype"]  # the old name of dtype
    assert {key: like[key] for key in want} == want
    assert like.keys() - want.keys() == DEFAULTS.get(kind, set())
    of_model = {"sliding_window"} & vars(module_of(kind).Config()).keys()
    assert {key for key in want if key not in alone} == ALONE[kind] | ANY | {"sliding_window", "mine"} - of_model
    assert alone["dtype"] == like["dtype"] == "bfloat16"
    for name in ("like", "alone"):
        again = read_again(kind, tmp_path / name)
        assert again.dtype == torch.bfloat16
        assert getattr(again.config, "sliding_window", None) == (16 if name == "like" or of_model else None)
        assert module_of(kind).config(tmp_path / name) == module_of(kind).config(tmp_path / "theirs")


def write_keys(folder: Path, **keys: Any) -> None:
    config = config_of(folder)
    (folder / "config.json").write_text(json.dumps(config | keys))


# --- files ----------------------------------------------------------------------------------------------------

ONE = {"w": torch.ones(4)}
CONFIG = {"model_type": "gpt2", "n_layer": 2, "eos_token_id": 5}


def folder(path: Path, config: dict[str, Any] = CONFIG, **contents: bytes) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    write_files(path, contents)
    return path


def write(path: Path, like: Path | None, config: dict[str, Any] = CONFIG, leaves: Any = ONE) -> None:
    export.write(path, leaves, lambda path: FileTensor(path[0]), config=config, like=like)


def files(path: Path) -> dict[str, bytes]:
    return {f.relative_to(path).as_posix(): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def test_small_files_are_carried_over_and_weights_are_not(tmp_path):
    like = folder(tmp_path / "like", CONFIG, **CARRIED, **LEFT)
    write(tmp_path / "new", like)
    got = files(tmp_path / "new")
    assert {name: data for name, data in got.items() if name not in ("config.json", "model.safetensors")} == CARRIED
    (tmp_path / "new" / "merges.txt").write_text("old")
    (tmp_path / "new" / "mine.txt").write_text("mine")
    write(tmp_path / "new", like)  # over an old folder: replaced, and files of other names stay
    assert files(tmp_path / "new") == got | {"mine.txt": b"mine"}
    write(tmp_path / "new", tmp_path / "new", {**CONFIG, "x": 1})  # over itself
    write(tmp_path / "new", tmp_path / "new")
    assert config_of(tmp_path / "new")["x"] == 1
    assert files(tmp_path / "new").keys() == got.keys() | {"mine.txt"}


def test_tokenizer_of_transformers_reads_a_saved_folder(tmp_path):
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "[PAD]": 2}, unk_token="b"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", chat_template="{{ 1 }}")
    like = folder(tmp_path / "like")
    fast.save_pretrained(like)
    write(tmp_path / "new", like)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
    assert again(["a b a", "b"], padding=True)["input_ids"] == [[0, 1, 0], [1, 2, 2]]
    assert (again.pad_token, again.chat_template) == ("[PAD]", "{{ 1 }}")


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_failed_save_leaves_no_partial_folder(tmp_path, monkeypatch, fails):
    like = folder(tmp_path / "like", CONFIG, **CARRIED)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os." + fails, full)
    assert "No space left on device" in error_text(write, tmp_path / "new", like)
    assert not (tmp_path / "new").exists()


def test_file_that_cannot_be_read_is_an_error_before_anything_is_written(tmp_path, monkeypatch):
    like = folder(tmp_path / "like", CONFIG, **CARRIED)
    opened = os.open

    def unreadable(path, flags):
        if Path(path).name == "merges.txt":
            raise PermissionError(13, "Permission denied")
        return opened(path, flags)

    monkeypatch.setattr(os, "open", unreadable)
    text = error_text(write, tmp_path / "new", like)
    assert text == f"{like}/merges.txt: cannot be read\n  Permission denied"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("ours", "before", "generation", "want"),
    [
        (7, 5, 5, 7),  # changed by the caller
        (5, 5, [5, 6], [5, 6]),  # unchanged: generation_config.json knows more
        ((7, 8), [5, 6], [5, 6], [7, 8]),
        ((5, 6), [5, 6], [5, 6, 7], [5, 6, 7]),  # a tuple is the list that JSON has
        (None, 5, 5, None),
        (2, ..., [5, 6], [5, 6]),  # the default of a config.json without the key
    ],
)
def test_changed_tokens_are_changed_in_generation_config(tmp_path, ours, before, generation, want):
    config = {"model_type": "gpt2", "n_layer": 2} | ({} if before is ... else {"eos_token_id": before})
    kept = json.dumps({"top_k": 3, "eos_token_id": generation}).encode()
    like = folder(tmp_path / "like", config, **{"generation_config.json": kept})
    write(tmp_path / "new", like, CONFIG | {"eos_token_id": ours})
    got = json.loads((tmp_path / "new" / "generation_config.json").read_text())
    assert got == {"top_k": 3, "eos_token_id": want}
    if generation == want:
        assert (tmp_path / "new" / "generation_config.json").read_bytes() == kept


def test_keys_of_the_stored_values_and_old_names_are_not_carried(tmp_path):
    other = {"dtype": "float16", "torch_dtype": "float16", "quantization_config": {"bits": 4}, "rope_theta": 5.0,
             "rope_scaling": {"factor": 2.0}, "kept": 1}  # fmt: skip
    like = folder(tmp_path / "like", CONFIG | other)
    write(tmp_path / "new", like, CONFIG | {"rope_parameters": {"rope_theta": 7.0}})
    assert config_of(tmp_path / "new") == CONFIG | {"rope_parameters": {"rope_theta": 7.0}, "kept": 1,
                                                    "dtype": "float32"}  # fmt: skip


@pytest.mark.parametrize(
    ("dtypes", "want"),
    [(["bfloat16", "bfloat16", "int64"], "bfloat16"), (["bfloat16", "float32"], "float32"),
     (["bfloat16", "bfloat16", "float32"], "bfloat16"), (["bfloat16", "float8_e4m3fn"], "bfloat16"), (["int64"], None),
     (["float64"], "float64")],
)  # fmt: skip
def test_dtype_of_config_json_is_that_of_most_numbers_and_of_equally_many_the_widest(tmp_path, dtypes, want):
    leaves = {str(i): torch.zeros(2, dtype=getattr(torch, name)) for i, name in enumerate(dtypes)}
    write(tmp_path / "new", None, CONFIG | ({"torch_dtype": "float16"} if want else {}), leaves)
    config = config_of(tmp_path / "new")
    assert config.get("dtype") == want
    assert "torch_dtype" not in config


def test_folder_of_another_model_is_refused(tmp_path):
    like = folder(tmp_path / "like", {"model_type": "llama"})
    assert error_text(write, tmp_path / "new", like) == (
        f"write: like='{like}' is a folder of another type of model\n"
        "  its model_type is 'llama', and config= has 'gpt2'\n"
        "  fix: the folder that was loaded; or leave like= out"
    )
    like = folder(tmp_path / "deep", CONFIG | {"n_layer": 3, "layer_types": ["a", "b", "a"], "other": [1, 2]})
    assert error_text(write, tmp_path / "new", like) == (
        f"write: like='{like}' has 3 layers, and config= has 2\n"
        "  of layer_types it has an entry for each layer\n"
        "  fix: leave like= out, and copy the files that fit"
    )
    write(tmp_path / "new", like, CONFIG | {"layer_types": ["a", "a"]})
    assert "there is no such file" in error_text(write, tmp_path / "new", tmp_path / "nowhere")


def test_described_module_is_saved_like_the_folder_it_was_read_from(tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = their_folder("LlamaForCausalLM", tmp_path / "theirs", eos_token_id=[4, 5], dtype=torch.bfloat16)
    write_files(tmp_path / "theirs", {"tokenizer.json": b"{}"})
    write_keys(tmp_path / "theirs", mine=1)
    config = transformers.AutoConfig.from_pretrained(tmp_path / "theirs")
    _, module = fs.defer(lambda: transformers.LlamaForCausalLM(config))
    params = fs.materialize(hf.weights(tmp_path / "theirs", module["params"]), P(), fs.make_mesh(a=2), key=fs.key(0))
    own = {key: value for key, value in config.to_dict().items() if key != "mine"}
    hf.save(tmp_path / "ours", own, params, like=tmp_path / "theirs")
    again = read_again("LlamaForCausalLM", tmp_path / "ours")
    assert (again.dtype, again.config.mine, again.generation_config.eos_token_id) == (torch.bfloat16, 1, [4, 5])
    assert greedy(again) == greedy(theirs)
    assert (tmp_path / "ours" / "tokenizer.json").exists()


# --- tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "size", "stored", "want"),
    [
        (gpt2, 50257, {}, (50256, 50256, None)),  # as transformers has them
        (gpt2, 33, {}, (None, None, None)),  # no text can have them
        (gptj, 50400, {"pad_token_id": 3}, (50256, 50256, 3)),
        (gpt_neox, 33, {"eos_token_id": None}, (0, None, None)),
        (llama, 33, {"pad_token_id": -1, "eos_token_id": [3, 4]}, (1, (3, 4), None)),
        (llama, 33, {"eos_token_id": 99}, (1, 99, None)),  # kept as it is
    ],
)
def test_tokens_are_those_of_config_json_or_of_transformers(tmp_path, model, size, stored, want):
    kind = model.__name__.rpartition(".")[2]
    cfg = model.config(folder(tmp_path / "x", {"model_type": kind, "vocab_size": size, **stored}))
    assert (cfg.bos_token_id, cfg.eos_token_id, cfg.pad_token_id) == want
    assert hash(cfg) == hash(type(cfg)(**vars(cfg)))


@pytest.mark.parametrize("wrong", [-2, 1.5, "2", [1, "2"], True])
def test_invalid_tokens_are_refused(tmp_path, wrong):
    stored = folder(tmp_path / "x", {"model_type": "llama", "eos_token_id": wrong})
    text = error_text(llama.config, stored)
    assert text.startswith(f"{stored}/config.json: has values of the wrong kind\n  eos_token_id: ")
    text = error_text(llama.Config, eos_token_id=tuple(wrong) if isinstance(wrong, list) else wrong)
    assert "eos_token_id" in text
    assert llama.Config(bos_token_id=0, eos_token_id=(0, 1)).eos_token_id == (0, 1)
    assert bert.Config(pad_token_id=None).pad_token_id is None
