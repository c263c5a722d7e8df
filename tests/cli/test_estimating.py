"""`python -m fshard estimate`: bytes of real shards, the formulas beside them, and errors."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.cli import main

gpt2 = fs.models.gpt2
CONFIG = {"model_type": "gpt2", "vocab_size": 33, "n_positions": 8, "n_embd": 16, "n_layer": 3, "n_head": 4}
CFG = gpt2.Config(33, 8, 16, 3, 4)
T5_LORA = Path(__file__).parents[1] / "interop" / "t5_lora_fsdp.yaml"
BLOCK = sum(x.numel() for x in fs.tree.leaves(gpt2.init(CFG)["h"][0]))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(CONFIG))


def rows(capsys: pytest.CaptureFixture[str], *argv: str, model: str = "config.json") -> dict[tuple[str, str], Any]:
    """Return the rows by dtype and strategy."""
    assert main(["estimate", model, "--json", *argv]) == 0
    table = json.loads(capsys.readouterr().out)["rows"]
    return {(row.pop("dtype"), row.pop("strategy")): row for row in table}


def error(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["estimate", *argv]) == 2
    return capsys.readouterr().err.rstrip("\n")


def of_rank(tree: Any, rank: int) -> int:
    return sum(x.shards[rank].nbytes for x in {id(x): x for x in fs.tree.leaves(tree)}.values())


@pytest.mark.parametrize(("ranks", "optimizer"), [(1, "adamw"), (3, "sgd"), (7, "adamw")])
def test_stored_bytes_are_those_of_real_shards(capsys, ranks: int, optimizer: str):
    """Of parameters, gradients and optimizer state; no axis divides all leaves by 3 or 7."""
    mesh = fs.make_mesh(kind="simulated", data=ranks)
    described, made = gpt2.init(CFG), getattr(fs.optim, optimizer)(1e-3)
    got = rows(capsys, "--ranks", str(ranks), "--optimizer", optimizer, "--dtypes", "float32")
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
        specs = P() if strategy == "NO_SHARD" else fs.fully_shard(P(), described, axis="data")
        params = fs.materialize(described, specs, mesh, key=fs.key(0))
        state = fs.materialize(made.init(described), made.specs(specs), mesh, key=fs.key(0))
        row = got["float32", strategy]
        assert row["parameters"] == row["gradients"] == max(of_rank(params, r) for r in range(ranks))
        assert row["optimizer"] == max(of_rank(state, r) for r in range(ranks))


def test_gathered_bytes_follow_the_strategy(capsys):
    total = sum(x.numel() for x in fs.tree.leaves(gpt2.init(CFG)))
    got = rows(capsys, "--ranks", "2", "--dtypes", "float32", "bfloat16")
    for dtype, c in (("float32", 4), ("bfloat16", 2)):
        full, kept, none = (got[dtype, name] for name in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"))
        assert full["gathered"] == 2 * BLOCK * c
        assert kept["gathered"] == total * c
        assert none["gathered"] == (total * c if c == 2 else 0)
        assert full["working"] == kept["working"] == BLOCK * (c + 4)
        assert none["working"] == 0
        for row in (full, kept, none):
            stored = row["parameters"] + row["gradients"] + row["optimizer"]
            assert row["device"] == stored + row["gathered"] + row["working"]
            assert row["host"] == 0
    assert got["float32", "NO_SHARD"]["device"] == 16 * total + 8  # and the step of the optimizer
    one = rows(capsys, "--ranks", "2", "--one_unit", "--dtypes", "float32")["float32", "FULL_SHARD"]
    assert one["gathered"] == total * 4


def test_offloaded_state_is_in_host_memory(capsys):
    total = sum(x.numel() for x in fs.tree.leaves(gpt2.init(CFG)))
    here = rows(capsys, "--ranks", "2", "--dtypes", "float32")
    there = rows(capsys, "--ranks", "2", "--dtypes", "float32", "--offload")
    for name in ("FULL_SHARD", "SHARD_GRAD_OP"):
        a, b = here["float32", name], there["float32", name]
        assert b["host"] == a["device"] - a["gathered"] - a["working"]
        assert b["device"] == a["gathered"] + a["working"]
    assert there["float32", "NO_SHARD"]["device"] == 4 * total


def test_hybrid_strategies_split_within_a_machine(capsys):
    of_four = rows(capsys, "--ranks", "4")
    got = rows(capsys, "--ranks", "8", "--machines", "2")
    assert ("float32", "HYBRID_SHARD") not in of_four
    for dtype in ("float32", "bfloat16"):
        assert got[dtype, "HYBRID_SHARD"] == of_four[dtype, "FULL_SHARD"]
        assert got[dtype, "_HYBRID_SHARD_ZERO2"] == of_four[dtype, "SHARD_GRAD_OP"]
    wanted = rows(capsys, "--ranks", "8", "--machines", "2", "--strategy", "hybrid_shard_zero2")
    assert wanted.keys() == {("float32", "_HYBRID_SHARD_ZERO2"), ("bfloat16", "_HYBRID_SHARD_ZERO2")}


def test_adapters_alone_have_gradients_and_state(capsys):
    """Three fused qkv of [16, 48], with factors of rank 2."""
    got = rows(capsys, "--ranks", "1", "--lora", "2", "--targets", "c_attn", "--optimizer", "adamw")
    trained = 3 * 2 * (16 + 48)
    total = sum(x.numel() for x in fs.tree.leaves(gpt2.init(CFG)))
    row = got["float32", "NO_SHARD"]
    assert (row["gradients"], row["optimizer"]) == (4 * trained, 8 * trained + 8)
    assert row["parameters"] == 4 * (total + trained)
    assert got["bfloat16", "NO_SHARD"]["parameters"] == 2 * total + 4 * trained  # the base is stored in bfloat16
    assert got["bfloat16", "NO_SHARD"]["gathered"] == 2 * trained
    sharded = rows(capsys, "--ranks", "2", "--lora", "2", "--targets", "c_attn")["float32", "FULL_SHARD"]
    assert sharded["working"] == 2 * (16 + 48) * 8  # of one block
    assert sharded["gathered"] == 2 * (BLOCK + 2 * (16 + 48)) * 4


def test_numbers_of_the_t5_lora_example(capsys):
    """t5-base with r=8 on 72 matrices: 884,736 parameters beside 222,903,552."""
    base = {"model_type": "t5", "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_decoder_layers": 12,
            "num_heads": 12, "vocab_size": 32128}  # fmt: skip
    Path("t5").mkdir()
    Path("t5/config.json").write_text(json.dumps(base))
    options = ["--lora", "8", "--targets", "q", "v", "--config_file", str(T5_LORA)]
    assert main(["estimate", "t5/config.json", *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("222,903,552 frozen parameters, and 884,736 that train; adamw; 2 ranks; bytes")
    assert lines[2].split() == ["dtype", "strategy", "parameters", "gradients", "optimizer", "gathered", "working",
                                "device", "host"]  # fmt: skip
    assert lines[3].split()[:2] == ["float32", "FULL_SHARD"]
    assert len(lines) == 4  # the file's strategy and dtype
    row = rows(capsys, *options, model="t5/config.json")["float32", "FULL_SHARD"]
    assert row["parameters"] == (222_903_552 + 884_736) * 4 // 2
    assert row["host"] == (222_903_552 * 4 + 884_736 * 16) // 2 + 8
    assert row["device"] == row["gathered"] + row["working"]


def test_axes_of_the_config_file(capsys):
    """Replicas divide the ranks as machines do; what is not estimated is refused, and 0 ranks are no default."""
    base = {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_version": 2}}
    Path("r.json").write_text(json.dumps({**base, "parallelism_config": {"dp_replicate_size": 4}}))
    Path("m.json").write_text(json.dumps({**base, "parallelism_config": {"tp_size": 2}}))
    fs.checkpoint.save("w", {"w": torch.ones(8, 3)})
    found = rows(capsys, "--config_file", "r.json", model="w")
    assert {key: row["parameters"] for key, row in found.items()} == {("float32", "HYBRID_SHARD"): 8 * 3 * 4 // 2}
    assert "axes are {'data': 4, 'model': 2}" in error(capsys, "w", "--config_file", "m.json")
    assert error(capsys, "w", "--config_file", "r.json", "--ranks", "0").startswith("estimate: 0 ranks")


@pytest.mark.slow
def test_class_of_transformers_needs_no_file(monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    config = functools.partial(transformers.GPT2Config, n_embd=8, n_layer=1, n_head=2, n_positions=4, vocab_size=10)
    monkeypatch.setattr(transformers.GPT2LMHeadModel, "config_class", config)
    assert main(["estimate", "GPT2LMHeadModel", "--ranks", "4", "--strategy", "NO_SHARD"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "GPT2LMHeadModel: GPT2LMHeadModel, as its constructor in transformers describes it",
        "1,000 parameters; adamw; 4 ranks; bytes of the rank with the most, without activations",
    ]
    assert " ".join(lines[3].split()) == "float32 NO_SHARD 3.9 KiB 3.9 KiB 7.8 KiB 0 B 0 B 15.6 KiB"


def test_checkpoint_of_a_train_state_counts_its_parameters(capsys):
    params = {"h": [{"w": torch.zeros(4, 4)}], "ids": torch.zeros(3, dtype=torch.int64)}
    fs.checkpoint.save("out", {"params": params, "opt": torch.zeros(1000), "step": 3})
    row = rows(capsys, "--ranks", "2", model="out")["float32", "FULL_SHARD"]
    assert (row["parameters"], row["gradients"]) == (16 * 4 // 2 + 3 * 8, 16 * 4 // 2)


def test_tied_leaf_counts_once(capsys):
    x = torch.zeros(6, 4)
    fs.checkpoint.save("out", {"params": {"embed": x, "h": [torch.zeros(2)], "head": x}})
    got = rows(capsys, "--ranks", "1", "--dtypes", "float32", "bfloat16", model="out")
    made = fs.optim.adamw(1e-3)
    embed = fs.init.zeros((6, 4))
    described = {"embed": embed, "h": [fs.init.zeros((2,))], "head": embed}
    state = fs.materialize(made.init(described), P(), fs.make_mesh(data=1), key=fs.key(0))
    row = got["float32", "NO_SHARD"]
    assert (row["parameters"], row["gradients"], row["optimizer"]) == (26 * 4, 26 * 4, of_rank(state, 0))
    assert got["bfloat16", "NO_SHARD"]["gathered"] == 26 * 2


@pytest.mark.parametrize(("argv", "message"), [
    (["nowhere/x"], "nowhere/x: there is no such file or folder"),
    (["NoSuchModel"], "estimate: NoSuchModel is neither a path nor a class of transformers that has a config"),
    (["config.json", "--ranks", "0"], "estimate: 0 ranks on 1 machines\n  1 or more of each"),
    (["config.json", "--ranks", "3", "--machines", "2"], "3 ranks on 2 machines\n  3 % 2 = 1"),
    (["config.json", "--lora", "2"], "--lora without --targets"),
    (["config.json", "--targets", "q"], "--targets without --lora"),
    (["config.json", "--lora", "2", "--targets", "nobody"], "no module is named 'nobody'"),
    (["config.json", "--lora", "0", "--targets", "c_attn"], "rank=0"),
    (["text"], "there are no parameters"),
])  # fmt: skip
def test_wrong_arguments(capsys, argv: list[str], message: str):
    pytest.importorskip("transformers")
    fs.checkpoint.save("text", {"step": 1})
    assert message in error(capsys, *argv)


@pytest.mark.parametrize("option", ["--strategy ZERO3", "--dtypes int8", "--optimizer lion"])
def test_unknown_names_are_refused_with_the_known_ones(capsys, option: str):
    with pytest.raises(SystemExit):
        main(["estimate", "config.json", *option.split()])
    assert f"argument {option.split()[0]}: invalid choice: " in capsys.readouterr().err
