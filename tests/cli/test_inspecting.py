"""`python -m fshard inspect`: its exact output for every kind of path, and its errors."""

from __future__ import annotations

import builtins
import io
import json
import re
import runpy
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fshard as fs
from fshard import P, ShardingError, models
from fshard.cli import inspect, main, nested, spec_of
from fshard.planning.show import show, size

gpt2 = fs.models.gpt2
CONFIG = {"model_type": "gpt2", "vocab_size": 33, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 4}


def text(block: str) -> str:
    return dedent(block).strip("\n")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def folder(name: str, config: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> None:
    Path(name).mkdir(parents=True, exist_ok=True)
    if config is not None:
        Path(name, "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, Path(name, "model.safetensors"))


def my_gpt2() -> None:
    cfg = gpt2.Config(33, 8, 16, 2, 4)
    params = fs.materialize(gpt2.init(cfg), P(), fs.make_mesh(data=1), key=fs.key(0))
    gpt2.save("my-gpt2", cfg, params)


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command and return its output."""
    assert main(["inspect", *argv]) == 0
    got = capsys.readouterr()
    assert got.err == ""
    return got.out


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Run a command that fails and return its error."""
    assert main(["inspect", *argv]) == 2
    got = capsys.readouterr()
    assert got.out == ""
    return got.err.rstrip("\n")


def table(printed: str) -> list[str]:
    return printed.splitlines()[1:]


# --- output -------------------------------------------------------------------------------------------------


def test_config_alone_is_described_by_its_model(capsys):
    folder("tiny", CONFIG)
    want = text("""
        tiny/config.json: gpt2, as fs.models.gpt2 describes it
                                                              per device
        wte        f32[33@model, 16]       normal(std=0.02)    384–576 B
        wpe        f32[8, 16]              normal(std=0.02)        512 B
        h.0–1  ×2                                            2 × 3.5 KiB
          ln_1                                                     128 B
            w      f32[16]                 ones                     64 B
            b      f32[16]                 zeros                    64 B
          qkv                                                      816 B
            w      f32[16, 3, 4@model, 4]  normal(std=0.02)        768 B
            b      f32[3, 4@model, 4]      zeros                    48 B
          proj                                                     320 B
            w      f32[4@model, 4, 16]     normal(std=0.01)        256 B
            b      f32[16]                 zeros                    64 B
          ln_2                                                     128 B
            w      f32[16]                 ones                     64 B
            b      f32[16]                 zeros                    64 B
          up                                                     1.1 KiB
            w      f32[16, 64@model]       normal(std=0.02)      1.0 KiB
            b      f32[64@model]           zeros                    64 B
          down                                                   1.1 KiB
            w      f32[64@model, 16]       normal(std=0.01)      1.0 KiB
            b      f32[16]                 zeros                    64 B
        ln_f                                                       128 B
          w        f32[16]                 ones                     64 B
          b        f32[16]                 zeros                    64 B
        total  7,248 parameters, 28.3 KiB; 8.0–8.2 KiB on each of 32 devices (data=8, model=4)
    """)
    assert output(capsys, "tiny/config.json", "--mesh", "data=8,model=4") == want + "\n"
    assert table(output(capsys, "tiny", "--mesh", "data=8,model=4")) == table(want)


def test_bytes_per_device_equal_those_of_real_shards(capsys):
    """The range is that of the ranks of a simulated mesh, with uneven parts."""
    folder("tiny", CONFIG)
    mesh = fs.make_mesh(data=3, model=4)
    cfg = gpt2.Config(33, 8, 16, 2, 4)
    described = gpt2.init(cfg)
    specs = fs.fully_shard(gpt2.specs(cfg, model="model"), described, axis="data")
    params = fs.materialize(described, specs, mesh, key=fs.key(0), dtype=torch.bfloat16)
    nbytes = [sum(x.shards[r].nbytes for x in fs.tree.leaves(params)) for r in mesh.ranks]
    out = output(capsys, "tiny", "--mesh", "data=3,model=4", "--fully-shard", "data", "--dtype", "bfloat16")
    assert f"; {size(min(nbytes))}–{size(max(nbytes))} on each of 12 devices (data=3, model=4)\n" in out
    assert "wte        bf16[33@model, 16@data] " in out
    assert "    b      bf16[3, 4@model, 4@data]      zeros                    0–12 B\n" in out  # empty on some ranks


def test_folder_is_read_by_its_model_and_shows_the_source_of_values(capsys):
    my_gpt2()
    want = text("""
        my-gpt2: gpt2, its files read by fs.models.gpt2
                                                                                                           per device
        wte        f32[33@model, 16]       stored(model.safetensors: transformer.wte.weight)                384–576 B
        wpe        f32[8, 16]              stored(model.safetensors: transformer.wpe.weight)                    512 B
    """)
    out = output(capsys, "my-gpt2", "--mesh", "model=4")
    assert out.startswith(want + "\n")
    assert "    b      f32[3, 4@model, 4]      stored(model.safetensors: transformer.h.*.attn.c_attn.bias) " in out
    assert out.endswith("\ntotal  7,248 parameters, 28.3 KiB; 8.0–8.2 KiB on each of 4 devices (model=4)\n")
    unfolded = output(capsys, "my-gpt2", "--mesh", "model=4", "--no-fold")
    assert "stored(model.safetensors: transformer.h.1.attn.c_attn.weight)" in unfolded
    assert "*" not in unfolded


def test_folder_and_config_of_a_classifier_are_described_with_its_head(capsys):
    my_gpt2()
    cfg = models.heads.Config(models.gpt2.config("my-gpt2"), "sequence", ("a", "b", "c"))
    params = fs.materialize(models.heads.init(cfg), P(), fs.make_mesh(data=1), key=fs.key(0))
    models.heads.save("classifier", cfg, params)
    for path, source in (("classifier", "its files read by"), ("classifier/config.json", "as")):
        printed = output(capsys, path, "--mesh", "model=2")
        assert f"gpt2, {source} fs.models.heads" in printed
        assert "score.w" in printed


def test_own_specs_split_nothing_without_an_axis_model(capsys):
    folder("tiny", CONFIG)
    out = output(capsys, "tiny", "--mesh", "data=4")
    assert "@" not in out
    assert out.endswith("; 28.3 KiB on each of 4 devices (data=4)\n")


def test_no_value_is_read(capsys, monkeypatch):
    my_gpt2()
    fs.checkpoint.save("out", {"w": torch.ones(30_000)}, step=1)
    Path("plain").mkdir()
    Path("my-gpt2/model.safetensors").rename("plain/model.safetensors")
    file_size = Path("plain/model.safetensors").stat().st_size
    sizes: list[int] = []
    read = io.BufferedReader.read

    class Watched(io.BufferedReader):
        def read(self, n: int | None = -1, /) -> bytes:
            data = read(self, n)
            sizes.append(len(data))
            return data

    def watched(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return Watched(io.FileIO(file)) if mode == "rb" else builtin_open(file, mode, *args, **kwargs)

    builtin_open = builtins.open
    monkeypatch.setattr("os.preadv", None)
    monkeypatch.setattr("builtins.open", watched)
    output(capsys, "plain", "--mesh", "model=2")
    assert 0 < sum(sizes) < file_size - 4 * 7248 + 1  # the header, and not the 7248 elements
    sizes.clear()
    output(capsys, "out", "--mesh", "model=2")
    assert 0 < sum(sizes) < 30_000  # the manifest and a header


def test_unknown_model_type_shows_the_tensors_of_its_files(capsys):
    layer = {"w": torch.zeros(4, 6), "b": torch.zeros(6, dtype=torch.float16)}
    tensors = {f"layers.{i}.{name}": x.clone() for i in range(3) for name, x in layer.items()}
    folder("odd", {"model_type": "odd"}, {**tensors, "ids": torch.arange(3)})
    assert output(capsys, "odd", "--mesh", "data=2", "--specs", "**.w=P(None, 'data')", "**=P()") == text("""
        odd: odd, as its files name the tensors
                                                                               per device
        ids             i64[3]          stored(model.safetensors: ids)               24 B
        layers.0–2  ×3                                                           3 × 60 B
          w             f32[4, 6@data]  stored(model.safetensors: layers.*.w)        48 B
          b             f16[6]          stored(model.safetensors: layers.*.b)        12 B
        total  93 elements, 348 B; 204 B on each of 2 devices (data=2)
    """) + "\n"  # fmt: skip


def test_raw_names_and_single_files_are_those_of_the_file(capsys):
    my_gpt2()
    raw, single = output(capsys, "my-gpt2", "--raw"), output(capsys, "my-gpt2/model.safetensors")
    assert raw.startswith("my-gpt2: gpt2, as its files name the tensors\n")
    assert single.startswith("my-gpt2/model.safetensors: tensors, as the file names them\n")
    assert table(raw) == table(single)
    assert "c_attn" in raw
    folder("bare", tensors={"w": torch.ones(2)})
    assert output(capsys, "bare").splitlines() == [
        "bare: tensors, as the files name them", "w  f32[2]  stored(model.safetensors: w)  8 B",
        "total  2 parameters, 8 B"]  # fmt: skip


def test_checkpoint_and_last_of_several_are_shown(capsys):
    mesh = fs.make_mesh(data=2)
    w = fs.device_put(torch.ones(4, 2), P("data"), mesh)
    state = {"params": {"h": [{"w": w}, {"w": fs.device_put(torch.ones(4, 2), P(), mesh)}], "tied": w}, "n": 7,
             "opt": {"m": torch.zeros(3)}}  # fmt: skip
    for step in (1, 2):
        fs.checkpoint.save("out", state, step=step)
    assert output(capsys, "out", "--mesh", "model=2", "--specs", "params.**=P('model')", "**=P()") == text("""
        out: its last checkpoint, step 2
                                                        per device
        n              7
        opt.m          f32[3]                                 12 B
        params                                                32 B
          h.0–1.w  ×2  f32[4@model, 2]                    2 × 16 B
          tied         f32[4@model, 2]  = params.h.0.w
        total  16 parameters, 64 B, and 3 other values (opt), 12 B; 44 B on each of 2 devices (model=2)
    """) + "\n"  # fmt: skip
    cast = output(capsys, "out", "--dtype", "bfloat16")
    assert "  tied         bf16[4, 2]  = params.h.0.w" in cast  # still one leaf
    assert "bf16" in cast
    assert output(capsys, "out/step_000001").startswith("out/step_000001: a checkpoint\n")
    assert output(capsys, "out", "--step", "1").startswith("out: its checkpoint of step 1\n")
    assert error(capsys, "out", "--step", "3").startswith("out")


def test_model_type_without_a_model_file_is_described_by_its_constructor(capsys):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "vocab_size": 10, "state_size": 2, "time_step_rank": 1}
    folder("mamba", {"model_type": "mamba", "architectures": ["MambaForCausalLM"], **sizes})
    out = output(capsys, "mamba", "--mesh", "data=4", "--fully-shard", "data")
    assert out.startswith("mamba: MambaForCausalLM, as its constructor in transformers describes it\n")
    assert "  layers.0–1  ×2 " in out
    assert "  embeddings.weight    f32[10, 8@data]     normal(std=0.1) " in out
    folder("mamba", {"model_type": "mamba", "architectures": ["MambaConfig"], "dtype": "bfloat16", **sizes})
    out = output(capsys, "mamba")
    assert out.startswith("mamba: mamba, as its constructor in transformers describes it, in its bfloat16\n")
    assert "bf16[10, 8]" in out
    assert "f32" not in out


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_alone_has_the_dtype_in_it(capsys, key):
    folder("tiny", {**CONFIG, key: "bfloat16"})
    for path in ("tiny", "tiny/config.json"):
        out = output(capsys, path)
        assert out.startswith(f"{path}: gpt2, as fs.models.gpt2 describes it, in its bfloat16\n")
        assert "f32" not in out
        assert out.endswith("\ntotal  7,248 parameters, 14.2 KiB\n")
    out = output(capsys, "tiny", "--dtype", "float64")
    assert out.startswith("tiny: gpt2, as fs.models.gpt2 describes it\n")
    assert out.endswith("\ntotal  7,248 parameters, 56.6 KiB\n")
    for wrong in ("int8", "float33", 3):
        folder("tiny", {**CONFIG, key: wrong})
        assert error(capsys, "tiny") == text(f"""
            tiny/config.json: dtype {wrong!r} is not a floating dtype of torch
              fix: float32, bfloat16, float16
        """)


def test_llama_405b_takes_756_gib(capsys):
    sizes = {"vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126,
             "num_attention_heads": 128, "num_key_value_heads": 8, "torch_dtype": "bfloat16"}  # fmt: skip
    folder("llama", {"model_type": "llama", **sizes})
    out = output(capsys, "llama", "--mesh", "data=64,model=8", "--fully-shard", "data")
    assert out.endswith(
        "\ntotal  405,853,388,800 parameters, 756.0 GiB; 1.5 GiB on each of 512 devices (data=64, model=8)\n"
    )


@pytest.mark.parametrize("raw", [[], ["--raw"]], ids=["model", "raw"])
def test_layers_of_a_folder_with_many_files_are_one_row(capsys, raw):
    cfg = gpt2.Config(33, 8, 16, 16, 4)
    params = fs.device_get(fs.materialize(gpt2.init(cfg), P(), fs.make_mesh(data=1), key=fs.key(0)))
    gpt2.save("sharded", cfg, params, max_shard_bytes=7000)
    assert len(list(Path("sharded").glob("model-*"))) > 10
    out = output(capsys, "sharded", *raw)
    assert len(out.splitlines()) < 30
    assert "h.0–15  ×16" in out
    assert re.search(r"stored\(model-\*-of-000\d\d\.safetensors: transformer\.h\.\*\.mlp\.c_fc\.weight\)", out)
    assert f"total  {sum(x.numel() for x in fs.tree.leaves(params)):,} parameters" in out


def test_adapter_is_shown_with_its_base_model(capsys):
    low_rank = {"lora_A": torch.zeros(4, 16), "lora_B": torch.zeros(16, 4)}
    tensors = {
        f"base_model.model.h.{i}.attn.{name}.weight": x.clone() for i in range(3) for name, x in low_rank.items()
    }
    options = {"peft_type": "LORA", "base_model_name_or_path": "me/base", "r": 4, "lora_alpha": 8}
    folder("adapter", None, None)
    save_file(tensors, "adapter/adapter_model.safetensors")
    Path("adapter/adapter_config.json").write_text(json.dumps(options | {"target_modules": ["v_proj", "attn"]}))
    assert output(capsys, "adapter").splitlines() == [
        "adapter: LORA adapter of me/base (r=4, lora_alpha=8, on attn, v_proj), as its file names the tensors",
        f"base_model.model.h.0–2.attn  ×3{'':90}3 × 512 B",
        *(f"  {name}.weight                  f32{shape}  stored(adapter_model.safetensors: base_model.model.h.*.attn."
          f"{name}.weight)      256 B" for name, shape in (("lora_A", [4, 16]), ("lora_B", [16, 4]))),
        "total  384 parameters, 1.5 KiB",
    ]  # fmt: skip
    Path("adapter/adapter_config.json").write_text(json.dumps({"target_modules": "all-linear"}))
    assert output(capsys, "adapter").startswith(
        "adapter: an adapter of a model that it does not name (on all-linear), as"
    )
    Path("adapter/adapter_model.safetensors").unlink()
    assert error(capsys, "adapter") == text("""
        adapter: has adapter_config.json, and no adapter_model.safetensors
          fix: copy the folder again
    """)
    Path("adapter/adapter_model.bin").write_bytes(b"\x80")
    assert error(capsys, "adapter").startswith("adapter/adapter_model.bin: pickles are refused\n")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_adapter_that_peft_saved_is_shown():
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=2, n_head=2, n_positions=4)
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    peft.get_peft_model(transformers.GPT2LMHeadModel(config), lora).save_pretrained("adapter")
    out = inspect("adapter")
    assert out.startswith("adapter: LORA adapter of ")
    assert "(r=2, lora_alpha=8, on c_attn), as its file names the tensors\n" in out
    assert out.endswith("\ntotal  128 parameters, 512 B")


def test_rules_may_come_from_a_file_and_the_first_match_wins(capsys):
    folder("tiny", CONFIG)
    Path("specs.json").write_text(json.dumps({"h.*.up.w": [None, "model"], "h.**": "row('data')"}))
    out = output(
        capsys, "tiny", "--mesh", "data=2,model=2", "--specs", "wte=P(('data','model'))", "specs.json", "**=P()"
    )
    assert "wte        f32[33@data+model, 16]" in out
    assert "    w      f32[16, 64@model] " in out
    assert "    b      f32[64@data] " in out
    assert "wpe        f32[8, 16] " in out


def test_without_a_mesh_there_are_no_bytes_per_device(capsys):
    folder("tiny", CONFIG)
    out = output(capsys, "tiny")
    assert "per device" not in out
    assert out.endswith("\ntotal  7,248 parameters, 28.3 KiB\n")
    assert "wte        f32[33@model, 16] " in output(capsys, "tiny", "--specs", "wte=P('model')", "**=P()")


def test_python_m_fshard_runs_the_command(capsys, monkeypatch):
    folder("tiny", CONFIG)
    monkeypatch.setattr("sys.argv", ["fshard", "inspect", "tiny", "--mesh", "model=2"])
    with pytest.raises(SystemExit) as e:
        runpy.run_module("fshard", run_name="__main__")
    assert e.value.code == 0
    assert capsys.readouterr().out == inspect("tiny", mesh="model=2") + "\n"


def test_installed_command_shows_the_versions(capsys):
    scripts = tomllib.loads((Path(fs.__file__).parents[1] / "pyproject.toml").read_text())["project"]["scripts"]
    run = EntryPoint("fshard", scripts["fshard"], "console_scripts").load()
    with pytest.raises(SystemExit) as e:
        run(["--version"])
    assert e.value.code == 0
    assert capsys.readouterr().out == f"fshard {fs.__version__}, torch {torch.__version__}\n"


def test_closed_pipe_is_not_an_error(monkeypatch):
    folder("tiny", CONFIG)

    class ClosedPipe:
        def write(self, _: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            return 1_000  # not an open descriptor

    monkeypatch.setattr("sys.stdout", ClosedPipe())
    monkeypatch.setattr("os.dup2", lambda old, new: None)
    assert main(["inspect", "tiny"]) == 0


# --- errors -------------------------------------------------------------------------------------------------


def test_paths_without_tensors_are_refused(capsys):
    assert error(capsys, "nowhere") == text("""
        nowhere: there is no such file or folder
          fix: a Hugging Face folder, one of an adapter, a config.json, a .safetensors file, or a checkpoint
    """)
    folder("pickled", CONFIG)
    Path("pickled/pytorch_model.bin").write_bytes(b"\x80")
    want = text("""
        pickled: pickles are refused
          it has pytorch_model.bin; a pickle runs any code that is in it
          fs.state_dict.read reads one file of tensors, or an index, and runs nothing
          fix: convert it on a machine that may run that: AutoModel.from_pretrained(a).save_pretrained(b)
    """)
    assert error(capsys, "pickled") == want
    assert error(capsys, "pickled/pytorch_model.bin").startswith("pickled/pytorch_model.bin: pickles are refused\n")
    folder("empty")
    assert error(capsys, "empty").startswith("empty: has neither model.safetensors nor ")
    Path("some.json").write_text("{}")
    assert error(capsys, "some.json") == text("""
        some.json: it has no model_type
          fix: give the config.json of a Hugging Face model
    """)
    Path("some.json").write_text("{")
    assert error(capsys, "some.json").startswith("some.json: is not JSON\n")
    folder("other", {"model_type": "nobody-has-this"})
    assert error(capsys, "other").startswith("other/config.json: transformers cannot read it\n")
    Path("cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    assert error(capsys, "cut.safetensors").startswith("cut.safetensors: is not safetensors, or is cut short\n")


@pytest.mark.parametrize("config", [
    {"model_type": "mamba", "hidden_size": "wide"}, {"model_type": "mamba", "hidden_size": None},
    {"model_type": "timm_backbone"}, {"model_type": "olmo", "hidden_act": "nobody-has-this"},
])  # fmt: skip
def test_error_of_transformers_is_shown_in_one_line(capsys, config):
    """Each class of configs, and each constructor, raises errors of its own types."""
    pytest.importorskip("transformers")
    folder("odd", config)
    problem = "(transformers cannot read it|its constructor in transformers fails)"
    assert re.fullmatch(rf"odd/config.json: {problem}\n  model_type  \w+\n  \w+Error.*", error(capsys, "odd"))


def test_models_are_named_if_transformers_is_not_installed(capsys, monkeypatch):
    folder("other", {"model_type": "mamba"})
    monkeypatch.setitem(sys.modules, "transformers", None)
    out = error(capsys, "other")
    assert out.startswith(
        "other/config.json: there is no model file for 'mamba', and transformers is not installed\n  models  "
    )
    assert "gpt2" in out


def test_error_of_a_model_suggests_raw(capsys):
    my_gpt2()
    Path("my-gpt2/config.json").write_text(json.dumps({**CONFIG, "n_embd": 32}))
    out = error(capsys, "my-gpt2")
    assert "'transformer.wpe.weight' has another shape" in out
    assert out.endswith("\n  (--raw shows the tensors of any folder by their names)")
    assert output(capsys, "my-gpt2", "--raw").startswith("my-gpt2: gpt2, as its files name the tensors\n")


NO_SPEC = ["P(", "P", "P(axis='model')", "Q('model')", "P(open('x'))", "__import__('os')", "P(x)", "P.__init__('x')",
           "[1, 2]", "", "P()()", "(" * 500]  # fmt: skip
SPEC_FIX = """P(None, "model"), P("data", memory="host"), row("model"), column("model") or P()"""
NO_RULE = """only auto; GLOB=SPEC, such as '**.w=P(None, "model")'; or a .json file of them"""
# options, two spaces between them -> the error
WRONG_OPTIONS = [
    *((f"--mesh={mesh}", f"""--mesh {mesh}: {wrong!r} is not an axis of a mesh
  an axis is a name, and its size 1 or more
  fix: --mesh data=8,model=4""") for mesh, wrong in (
        ("data", "data"), ("data=8,model", "model"), ("data=0", "data=0"), ("data=-1", "data=-1"), ("data=x", "data=x"),
        ("=4", "=4"), ("data=2,", ""), ("a b=2", "a b=2"))),
    ("--mesh  data=2,data=4", """--mesh data=2,data=4: 'data=4' is not an axis of a mesh
  the axis has a size already
  fix: --mesh data=8,model=4"""),
    ("--mesh  data=8,model=99999999999999", """--mesh data=8,model=99999999999999: more than 1,048,576 devices
  the bytes of each of them are counted
  fix: a smaller mesh"""),
    ("--mesh  model=2  --fully-shard  data",
     "--fully-shard data: the mesh has no such axis\n  fix: --mesh model=2,data=8"),
    ("--fully-shard  data", "--fully-shard data: the mesh has no such axis\n  fix: --mesh data=8"),
    ("--mesh  model=2  --specs  wte=P('data')  **=P()",
     "--specs wte=P('data'): the mesh has no axis 'data'\n  fix: use one of ['model']"),
    ("--specs  q.*=P()  **=P()",
     "rules: 'q.*' matches no leaf\n  (an earlier rule may match all of its leaves)\n  fix: remove or correct it"),
    ("--specs  h.**=P()  wte=P()  ln_f.*=P()",
     "rules: no rule matches 'wpe'\n  fix: add a rule, or '**': P() at the end"),
    ("--specs  auto  **=P()", f"--specs auto: not a rule\n  fix: {NO_RULE}"),
    ("--specs  none.json", "--specs none.json: there is no such file"),
    ("--specs  wpe=P(None, None, 'model')  **=P()",
     "show: tree['wpe']: P(None, None, 'model') describes 3 dims, the leaf has 2\n  fix: drop 1"),
    *((f"--dtype  {name}", f"--dtype {name}: not a floating dtype of torch\n  fix: --dtype bfloat16")
      for name in ("int8", "float33", "nn", "Tensor")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "want"),
    [(options.split("  "), want) for options, want in WRONG_OPTIONS]
    + [(["--specs", f"**={spec}"], f"{spec!r} is not a spec\n  fix: {SPEC_FIX}") for spec in NO_SPEC],
)  # fmt: skip
def test_wrong_options_are_refused(capsys, options, want):
    folder("tiny", CONFIG)
    assert error(capsys, "tiny", *options) == want


def test_rule_of_too_many_dims_on_a_mesh_is_refused(capsys):
    folder("tiny", CONFIG)
    with_mesh = error(capsys, "tiny", "--mesh", "model=2", "--specs", "wpe=P(None, None, 'model')", "**=P()")
    assert with_mesh.startswith("show: tree['wpe']: the spec is longer than the shape\n")


def test_specs_parse_from_python_and_json():
    for source in ("P()", 'P("data")', "P(None, ('a', 'b'))", "P(..., 'm')", "row('a')", "column(('a','b'))"):
        assert spec_of(source) == eval(source, {"P": P, "row": fs.row, "column": fs.column})
    assert spec_of([None, ["a", "b"], "c"]) == P(None, ("a", "b"), "c")
    for wrong in ("P('a', 'a')", [3], "P(3)", "row()"):
        with pytest.raises(ShardingError, match=r"P|row: axis is missing"):
            spec_of(wrong)


@pytest.mark.parametrize("argv", [[], ["inspect"], ["nothing"], ["inspect", "x", "--wrong"]], ids=str)
def test_invalid_command_shows_usage(capsys, argv):
    with pytest.raises(SystemExit) as e:
        main(argv)
    assert e.value.code == 2
    assert "usage: python -m fshard" in capsys.readouterr().err


# --- names and folds ----------------------------------------------------------------------------------------


def test_dotted_names_become_nested_dicts_unless_one_is_a_prefix_of_another():
    assert nested({"a.b": 1, "a.c.0": 2, "d": 3}) == {"a": {"b": 1, "c": {"0": 2}}, "d": 3}
    for flat in ({"a": 1, "a.b": 2}, {"a.b": 2, "a": 1}):
        assert nested(flat) == flat


class From:
    """An initializer that describes the source of its values."""

    def __init__(self, name: str) -> None:
        self.name = name

    def fill(self, *_: object) -> torch.Tensor:
        raise NotImplementedError

    def describe(self) -> str:
        return f"from(file.1: {self.name})"


def leaf(name: str) -> Any:
    return fs.Deferred((2,), torch.float32, From(name))  # type: ignore[arg-type]


def test_layers_fold_if_their_sources_differ_only_in_the_layer_number():
    experts = {"h": [{"e": [leaf(f"h.{i}.e.{j}.w") for j in range(4)]} for i in range(3)]}
    assert str(show(experts)) == text("""
        h.0–2.e  ×3                                   3 × 32 B
          0–3  ×4    f32[2]  from(file.1: h.*.e.*.w)   4 × 8 B
        total  24 parameters, 96 B
    """)
    assert "from(file.1: *.1.w)" in str(show({"1": leaf("1.1.w"), "2": leaf("2.1.w")}))
    assert "0–1  ×2  f32[2]  from(file.1: h.0.w)" in str(show([leaf("h.0.w"), leaf("h.0.w")]))
    for other in ("h.2.w", "g.1.w", "h.1.v", "h.1.w.1", "h.11.w", "h1.1.w"):
        assert "×" not in str(show([leaf("h.0.w"), leaf(other)])), other
    assert "×" not in str(show([leaf("h.0.w"), leaf("h.1.w"), leaf("h.3.w")])).splitlines()[1]
    whole = str(show({"h": [{"w": leaf("a.0"), "v": leaf("b.0")}, {"w": leaf("a.1"), "v": leaf("b.2")}]}))
    assert "×" not in whole
    assert "*" not in whole
