"""`python -m fshard plan`: the numbers of `fs.plan`, the step that it plans, searches, and errors."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fshard as fs
from fshard.cli import main
from fshard.cli.planning import _candidates, _heavier, _least, _neighbours, _slower
from fshard.cli.train_step import Job, read_job, train_step
from fshard.planning import search
from fshard.planning.device import Device, Link
from fshard.planning.devices import H100
from fshard.planning.plan import plan_ranks
from fshard.planning.repeat import Repeats

GPT2 = {"model_type": "gpt2", "vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 4}
DIMS = {"vocab_size": 33, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**DIMS, "intermediate_size": 24, "num_key_value_heads": 2},
    "mixtral": {**DIMS, "intermediate_size": 24, "num_key_value_heads": 2},
    "qwen3_moe": {**DIMS, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {**DIMS, "intermediate_size": 24, "num_key_value_heads": 2},
    "bert": {**DIMS, "intermediate_size": 24, "architectures": ["BertForSequenceClassification"]},
    "t5": {"vocab_size": 33, "d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4,
           "decoder_start_token_id": 0},
    "resnet": {"hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic", "embedding_size": 4},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(GPT2))


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["plan", "config.json", *argv]) == 0
    return capsys.readouterr().out


def error(capsys: pytest.CaptureFixture[str], *argv: str, model: str = "config.json") -> str:
    assert main(["plan", model, *argv]) == 2
    return capsys.readouterr().err.rstrip("\n")


@pytest.mark.slow
def test_rows_are_plans_of_the_train_step(capsys: pytest.CaptureFixture[str]):
    options = ("--devices", "4", "--device", "h100", "--batch", "8", "--html", "table.html")
    out = json.loads(run(capsys, *options, "--json", "--layout", "model=2,remat=yes", "replica=2,dtype=float32"))
    assert (out["batch"], out["length"], out["device"]) == (8, 8, "H100")
    rows = {row["layout"].get("model", 1): row for row in out["rows"]}
    assert rows[2]["layout"] == {"data": 2, "model": 2, "remat": True}
    assert rows[1]["layout"] == {"data": 2, "replica": 2, "dtype": "float32"}
    f, args = train_step(read_job("config.json"), data=2, model=2, remat=True, batch=8)
    plan = fs.plan(f, *args, device=fs.devices.fitted(H100))
    assert plan.time is not None
    assert (rows[2]["peak_bytes"], rows[2]["seconds"], rows[2]["tokens"]) == (plan.memory.peak, plan.time.seconds, 64)
    assert rows[2]["parts"]["optimizer"] > rows[2]["parts"]["parameters"] > 0
    assert rows[1]["fits"] is True
    page = Path("table.html").read_text()
    assert "fs.models.gpt2" in page
    assert page.count("<tr") >= 3


@pytest.mark.slow
def test_the_planned_step_trains_the_same_on_every_mesh():
    """One step of AdamW on a real mesh: the loss before and the weights after are those of one device."""
    job, outs = read_job("config.json"), []
    for sizes in ({"data": 1}, {"data": 2, "model": 2, "sequence": True}, {"replica": 2, "data": 2, "accumulate": 2}):
        f, (state, *_) = train_step(job, batch=8, dtype=torch.float32, **sizes)  # type: ignore[arg-type]
        mesh = fs.make_mesh(kind="simulated", **f.mesh.axes)
        placed = fs.materialize(state, f._in_specs[0], mesh, key=fs.key(0))
        ids = torch.arange(64).reshape(8, 8) % 32
        new, loss = f.on(mesh)(placed, ids, (ids + 1) % 32)
        outs.append((fs.device_get(new["params"]), float(loss)))
    for params, loss in outs[1:]:
        assert loss == pytest.approx(outs[0][1], rel=1e-5)
        for got, want in zip(fs.tree.leaves(params), fs.tree.leaves(outs[0][0]), strict=True):
            # AdamW's first step is about lr = 1e-4 by the gradient's sign, which rounding decides where it is 0
            torch.testing.assert_close(got, want, rtol=0, atol=2.1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_of_each_kind_is_planned(kind: str):
    Path("config.json").write_text(json.dumps({"model_type": kind, **CONFIGS[kind]}))
    job = read_job("config.json", 16 if kind == "resnet" else 8)
    f, args = train_step(job, data=2, model=2, batch=4, remat=True)
    assert fs.check(f, *args).transfers
    if job.splits_positions or job.experts:
        more = {"context": 2} if job.splits_positions else {}
        f, args = train_step(job, data=2, **more, model=2, batch=4, experts=bool(job.experts))
        assert job.splits_positions == ("permute" in {t.op for t in fs.check(f, *args).transfers})
    else:
        with pytest.raises(fs.ShardingError, match=f"plan: context=2: {job.name} has no form for it"):
            train_step(job, context=2, batch=4)
    want = {"resnet": (None, "images", 4), "t5": (2, "tokens", 64)}.get(kind, (2, "tokens", 32))
    assert (job.blocks, job.unit, job.units(4)) == want
    if job.blocks:
        assert job.with_blocks(1).blocks == 1


def test_a_model_with_blocks_of_two_kinds_is_not_predicted_from_a_few():
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    for more, blocks in ((windows, None), ({**windows, "max_window_layers": 0}, 2)):
        Path("config.json").write_text(json.dumps({"model_type": "qwen2", **CONFIGS["qwen2"], **more}))
        assert read_job("config.json").blocks == blocks


@pytest.mark.slow
def test_a_search_prints_the_fastest_first(capsys: pytest.CaptureFixture[str]):
    out = run(capsys, "--devices", "2", "--device", "h100", "--search", "--best", "1", "--layout", "remat=no,replica=1")
    notes = ("attention", "error bars", "first: ", "faster, but too large: ", "the next, ")
    assert "\nfirst: " in out
    head, facts, names, *lines = [line for line in out.splitlines() if not line.startswith(notes)]
    n = sum(x.numel() for x in fs.tree.leaves(fs.models.gpt2.init(read_job("config.json").cfg)))
    assert head == f"config.json: fs.models.gpt2, {n:,} parameters; 2 sequences of 8 tokens a step, AdamW"
    assert facts == f"{len(lines)} layouts on 2 H100 of 80.0 GiB; replica=1, remat=no; of each device"
    assert names.split()[:2] == ["data", "model"]
    times = [
        float(x) * {"us": 1, "ms": 1e3}[unit] for line in lines for x, unit in re.findall(r"([\d.]+) (us|ms) ", line)
    ]
    assert len(times) >= 3
    assert times == sorted(times)


def pipelines(far: float) -> tuple[Any, Device, list[dict[str, Any]]]:
    """A Llama of 4 blocks, 4 devices, a pair with fast links and others with slow ones, and the candidates."""
    cfg = fs.models.llama.Config(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
                                 num_attention_heads=4, num_key_value_heads=2)  # fmt: skip
    job, links = Job(fs.models.llama, cfg, 32), (Link("near", 2, 1e9, 1e-6), Link("far", None, far, 1e-6))
    device = Device("small", {torch.float32: 1e10, torch.bfloat16: 1e11}, 2**30, 1e10, links)
    layouts = list(_candidates(job, device, 4, 4, {"remat": True, "model": 1}))
    return functools.partial(train_step, job, batch=4), device, layouts


@pytest.mark.slow
def test_a_search_finds_the_pipeline_that_plans_of_all_layouts_find():
    """And no layout takes less time than its bound by another one."""
    step_of, device, layouts = pipelines(3e7)
    layouts += _neighbours(**layouts[0])
    options: Any = {"slower": _slower, "heavier": _heavier, "least": _least}
    got, table = (
        search(step_of, layouts, device=device, best=1, **options),
        fs.plan_table(step_of, layouts, device=device),
    )
    assert (got[0].layout, got[0].seconds) == (table[0].layout, table[0].seconds)
    assert got[0].layout["stage"] == 2
    assert re.search(r"first: .*stage=2.*: .* waits for stage of", got.note)
    bounds = [(*_least(a.layout, b), a) for a in table for b in table]
    assert sum(seconds > 0 for _, seconds, _ in bounds) >= len(layouts) - 1
    for peak, seconds, row in bounds:
        assert (peak <= (row.peak or 0), seconds <= (row.seconds or 0)) == (True, True), row.layout


def test_pipelines_that_cannot_be_among_the_best_are_counted_and_not_planned():
    made = []
    step_of, device, layouts = pipelines(1e9)

    def counted(**layout: Any) -> Any:
        made.append(layout)
        return step_of(**layout)

    table = search(counted, layouts, device=device, best=1, least=_least)
    assert len(layouts) > len(made) == 1
    n = len(layouts) - 1
    assert re.search(rf"{n} more layouts are not among the best 1: {n} take at least [\d.]+ ms$", table.note)
    none = search(step_of, layouts, device=device, best=2, least=_least, work=lambda **_: 2)
    assert f"{n} more layouts are not planned, and may be among the best 2: data=2, stage=2" in none.note


@pytest.mark.slow
def test_a_plan_of_a_pipeline_from_few_blocks_is_that_of_a_direct_one():
    layout = {"stage": 2, "data": 2, "accumulate": 2, "remat": True, "schedule": "zero_bubble"}
    cfg = fs.models.gpt2.Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=12, n_head=4)
    job = Job(fs.models.gpt2, cfg, 8)

    def step_of(*, blocks: int = 6, **layout: Any) -> Any:
        return train_step(job.with_blocks(2 * blocks), batch=8, **layout)

    planned = []
    for n in (2, 3, 5):
        planned += plan_ranks(*step_of(blocks=n, **layout), H100)
    repeats = Repeats.of(2, *planned[:2])
    assert repeats is not None
    got, want = repeats.plan(5), planned[2]
    assert (got.rank, repeats.peak(5), got.bubble) == (want.rank, want.memory.peak, want.bubble)
    assert [(p.memory, p.time, p.flops) for p in got.positions] == [(p.memory, p.time, p.flops) for p in want.positions]
    options: Any = {"device": H100, "blocks": lambda **_: (6, 2)}
    (few,), (row,) = search(step_of, [layout], best=1, **options), fs.plan_table(step_of, [layout], device=H100)
    assert (few.peak, few.seconds, few.sent) == (row.peak, row.seconds, row.sent)


def test_an_interrupted_search_prints_the_rows_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    made = []

    def interrupted(*args: Any, **layout: Any) -> Any:
        made.append(layout)
        if len(made) > 1:
            raise KeyboardInterrupt
        return train_step(*args, **layout)

    monkeypatch.setattr("fshard.cli.planning.train_step", interrupted)
    assert main(["plan", "config.json", "--devices", "2", "--device", "h100", "--search"]) == 130
    out = capsys.readouterr().out
    assert "1 layout on 2 H100" in out
    assert "\ninterrupted after 1 layout\n" in out


@pytest.mark.slow
def test_a_measured_network_makes_its_transfers_slower(capsys: pytest.CaptureFixture[str]):
    options = ("--devices", "32", "--device", "h100", "--layout", "data=32", "--json")
    fast, slow = (json.loads(run(capsys, *options, *more))["rows"][0]
                  for more in ((), ("--bus-bandwidth", "16=0.04, 32=0.002")))  # fmt: skip
    assert slow["seconds"] > 2 * fast["seconds"]
    assert slow["peak_bytes"] == fast["peak_bytes"]


def test_many_devices_with_the_network_of_a_data_sheet_are_warned_of(capsys: pytest.CaptureFixture[str]):
    for devices, more, warned in (("128", (), True), ("64", (), False), ("128", ("--bus-bandwidth", "16=180"), False)):
        assert main(["plan", "config.json", "--devices", devices, "--device", "h100", "--batch", "128", *more]) == 0
        assert ("warning: on more than 100 devices" in capsys.readouterr().err) is warned


def test_candidates_use_all_devices_and_rule_out_each_other():
    job = Job(fs.models.gpt2, fs.models.gpt2.Config(), 8)
    found = list(_candidates(job, H100, 32, 32, {}))
    assert {x["data"] * x["model"] * x.get("stage", 1) for x in found} == {32}
    assert [x.get("stage", 1) for x in found] == sorted(x.get("stage", 1) for x in found)  # others bound pipelines
    assert {(x["stage"], x["chunks"]) for x in found if "stage" in x} == {(2, 1), (2, 2), (4, 1)}  # of 12 blocks
    assert {x["accumulate"] // x["stage"] for x in found if "stage" in x} == {1, 2, 4}
    found = [x for x in found if "stage" not in x]
    assert {x["model"] for x in found} == {1, 2, 4, 8}  # of one node
    assert all(32 // x["data"] % x["accumulate"] == 0 for x in found)
    assert len({str(x) for x in found}) == len(found) == 2 * (1 + 2 + 3 + 4)
    fixed = list(_candidates(job, H100, 32, 32, {"stage": 1, "replica": 2, "model": 4, "remat": True}))
    assert {(x["replica"], x["data"], x["model"], x["remat"]) for x in fixed} == {(2, 4, 4, True)}
    long = list(_candidates(job, H100, 16, 4, {"stage": 1}))
    assert {(x["data"], x.get("context", 1), x["model"]) for x in long} == {
        (4, 4, 1), (4, 2, 2), (4, 1, 4), (2, 1, 8)}  # fmt: skip
    mixture = Job(fs.models.mixtral, fs.models.mixtral.Config(), 8)
    found = list(_candidates(mixture, H100, 16, 16, {"remat": False, "accumulate": 1, "stage": 1}))
    assert {x["data"] for x in found if not x["experts"]} == {16, 8, 4, 2}
    assert {x["data"] for x in found if x["experts"]} == {8, 4, 2}  # of 8 experts
    assert not _heavier({**found[0], "experts": True}, found[0])
    one, two, four = ({"data": 4, "model": 2, "remat": True, "accumulate": n} for n in (1, 2, 4))
    assert _heavier(two, four) == 1
    assert _heavier(one, two) == 0  # the gradients of several microbatches are there twice
    assert (_heavier(two, one), _heavier(four, one)) == (1 / 2, 1 / 4)  # of what grows with the batch
    assert _heavier({**four, "remat": False}, two) == 1 / 2
    assert _heavier({**two, "remat": False}, two)
    assert _heavier({**two, "replica": 2, "data": 2}, two)
    assert _heavier({**two, "release": False}, two)
    assert not _heavier({**two, "model": 4}, two)
    assert not _heavier({**two, "context": 4}, two)
    assert _slower(two, one)
    assert not _slower({**two, "remat": False}, one)
    staged = list(_candidates(job, H100, 8, 32, {"stage": 2, "remat": True, "model": 1}))
    assert {(x["stage"], x["data"], x["accumulate"]) for x in staged} == {(2, 4, 8), (2, 4, 4), (2, 4, 2)}
    assert {(x["schedule"], x["chunks"]) for x in staged} == {("1f1b", 1), ("zero_bubble", 1), ("interleaved", 2)}
    chunked = _candidates(job, H100, 8, 32, {"stage": 2, "schedule": "interleaved", "chunks": 4, "accumulate": 4})
    assert {(x["schedule"], x["chunks"], x["accumulate"]) for x in chunked} == {("interleaved", 4, 4)}
    assert not _slower(staged[0], {**staged[0], "accumulate": 2})  # more microbatches wait less
    assert _slower(staged[0], {**staged[0], "release": False})  # which gathers once
    assert not _heavier({**staged[0], "stage": 4}, staged[0])


def test_errors_name_the_option(capsys: pytest.CaptureFixture[str]):
    assert error(capsys, model="nowhere").splitlines()[0] == "plan: nowhere: there is no such folder or file"
    assert "'remat=3' is not a setting" in error(capsys, "--layout", "data=2,remat=3")
    assert "'schedule=1b' is not a setting" in error(capsys, "--layout", "stage=2,schedule=1b")
    assert "it has a value already" in error(capsys, "--layout", "data=2,data=4")
    assert "2 problems" in error(capsys, "--layout", "dat=2,model=0")
    assert "4 x 4 = 16" in error(capsys, "--devices", "8", "--layout", "data=4,model=4")
    assert error(capsys, "--devices", "0") == "plan: --devices 0\n  fix: 1 or more"
    assert "--search without --device" in error(capsys, "--search")
    assert "--bus-bandwidth without --device" in error(capsys, "--bus-bandwidth", "16=40")
    assert "'32' is not RANKS=GB/s" in error(capsys, "--device", "h100", "--bus-bandwidth", "16=40,32")
    assert "there is no folder" in error(capsys, "--html", "no/such/page.html")
    assert "no device is called 'h99'" in error(capsys, "--device", "h99")
    for layout, devices, batch, reason, fix in (
        ("remat=yes", 11, 3, "no number of data ranks divides a batch of 3", "--batch 11"),
        ("model=3", 8, 8, "--layout fixes model=3: 8 % 3 = 2", "--devices 9"),
        ("data=2,model=2", 8, 8, "--layout fixes data=2 x model=2: 4 devices", "--devices 4"),
        ("model=16", 32, 32, "which on H100 join 8", "--layout without --search"),
    ):
        numbers = ("--devices", str(devices), "--batch", str(batch), "--layout", layout)
        text = error(capsys, "--device", "h100", "--search", *numbers)
        assert text.startswith(f"plan: there is no layout to search for {devices} devices")
        assert reason in text
        assert f"fix: {fix}" in text
    others = '{"model_type": "t5gemma"}', '{"model_type": 3}', '{"model_type": "gemma2", "architectures": [1]}', "{}"
    for contents in ('{"model_type": "clip"}', '{"model_type": "clip", "architectures": ["CLIPModel"]}', *others):
        Path("config.json").write_text(contents)
        assert "config.json: there is no model file for " in error(capsys)


GEMMA2 = {"model_type": "gemma2", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8,
          "num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": 64, "max_position_embeddings": 8,
          "use_cache": True, "dtype": "bfloat16", "architectures": ["Gemma2ForCausalLM"]}  # fmt: skip


def test_class_without_a_model_file_is_planned_by_its_units_and_refuses_tensor_axes(capsys: pytest.CaptureFixture[str]):
    Path("my_gemma.json").write_text(json.dumps(GEMMA2))
    layouts = "data=2", "data=1,replica=2", "data=1,model=2", "data=2,remat=yes,accumulate=2"
    assert main(["plan", "my_gemma.json", "--batch", "4", "--layout", *layouts]) == 0
    head, _, *rows = capsys.readouterr().out.splitlines()
    model = read_job("my_gemma.json").model
    n = sum(x.numel() for x in fs.tree.leaves(model.init(None)))
    assert head == (f"my_gemma.json: by fs.defer of Gemma2ForCausalLM, {n:,} parameters; "
                    "4 sequences of 8 tokens a step, AdamW")  # fmt: skip
    assert {x.dtype for x in fs.tree.leaves(model.init(None))} == {torch.float32}
    (refused,) = [row for row in rows if "error" in row]
    assert refused.endswith("error: plan: model=2: Gemma2ForCausalLM has no form for it; fix: leave it out")
    assert main(["plan", "my_gemma.json", "--devices", "2", "--device", "h100", "--search", "--json"]) == 0
    assert {row["layout"].get("model", 1) for row in json.loads(capsys.readouterr().out)["rows"]} == {1}


def test_transfers_of_a_class_without_a_model_file_are_those_of_a_run(tmp_path: Path):
    Path("step.json").write_text(json.dumps(GEMMA2))
    f, args = train_step(read_job("step.json"), data=2, batch=4)
    mesh, plan = fs.make_mesh(data=2), fs.plan(f, *args)
    placed = [fs.materialize(x, spec, mesh, key=fs.key(0)) for x, spec in zip(args, f._in_specs, strict=True)]
    step = f.on(mesh)
    state, loss = step(*placed)
    with fs.recording() as log:
        step(state, *placed[1:])
    transfers = [[dataclasses.replace(t, where=None) for t in some] for some in (log, plan.transfers)]
    assert [t for t in transfers[0] if t.rank == plan.rank] == transfers[1]
    assert sum(t.phase == "forward" and t.op == "all_gather" for t in plan.transfers) == 1 + 2  # the ends, two blocks
    assert abs(fs.device_get(loss).item() - math.log(64)) < 1


@pytest.mark.slow
def test_rows_of_pipelines_have_their_schedules_and_waits(capsys: pytest.CaptureFixture[str]):
    Path("config.json").write_text(json.dumps({**GPT2, "n_layer": 2}))
    out = run(capsys, "--device", "h100", "--batch", "4", "--layout", "stage=2,data=1,accumulate=2,schedule=gpipe")
    row = out.splitlines()[-3]  # above the kind of attention and the error bars
    assert row.split()[:4] == ["2", "1", "2", "gpipe"]
    assert "stages wait " in row
    Path("config.json").write_text(json.dumps({**CONFIGS["t5"], "model_type": "t5"}))
    text = run(capsys, "--layout", "stage=2,data=1")
    assert "error: plan: stage=2: t5 has no form for it; fix: leave it out" in text


def test_an_efficiency_replaces_the_fitted_one_and_a_config_has_any_name(capsys: pytest.CaptureFixture[str]):
    Path("tiny.json").write_text(json.dumps({**GPT2, "n_layer": 1}))
    rates = {}
    for name, more in (("fitted", ()), ("bound", ("--efficiency", "1")), ("b200", ("--device", "b200"))):
        assert main(["plan", "tiny.json", "--devices", "1", "--device", "h100", *more, "--json"]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        rates[name] = row["seconds"], [text.split()[0] for text in row["warnings"]]
    assert rates["fitted"][0] >= rates["bound"][0]
    assert rates["fitted"][1] == rates["bound"][1] == ["attention:", "error"]
    assert rates["b200"][1] == ["seconds"]
    assert "--efficiency without --device" in error(capsys, "--efficiency", "0.5")
    assert "efficiency is 2.0" in error(capsys, "--device", "h100", "--efficiency", "2")


@pytest.mark.slow
def test_a_layout_that_does_not_fit_the_model_has_its_error_in_the_table(capsys: pytest.CaptureFixture[str]):
    out = run(capsys, "--layout", "data=2,accumulate=3", "data=2")
    assert "error: accumulate: args[1] cannot be split into 3 equal microbatches" in out
    assert out.count("error") == 1


def test_all_layouts_are_planned_with_the_efficiency_of_a_measured_one(capsys: pytest.CaptureFixture[str]):
    Path("config.json").write_text(json.dumps({**GPT2, "n_embd": 2048, "n_positions": 512, "vocab_size": 4096}))
    layouts = ("--device", "h100", "--batch", "64", "--layout", "data=2", "data=2,remat=yes")
    truth = json.loads(run(capsys, *layouts, "--efficiency", "0.4321", "--json"))
    rate = f"{truth['rows'][0]['tokens_per_second_per_device']:.6f}"
    found = json.loads(run(capsys, *layouts, "--measured", rate, "--json"))
    assert found["efficiency"] == pytest.approx(truth["efficiency"], abs=1e-5) == 0.4321
    assert [row["seconds"] for row in found["rows"]] == pytest.approx([row["seconds"] for row in truth["rows"]])
    assert "error bars, calibrated by one step: speed within 15%" in found["rows"][0]["warnings"][-1]
    peak = truth["rows"][0]["peak_bytes"] / 2**30
    out = run(capsys, *layouts, "--measured", f"{rate},{peak / 1.25}GiB")
    n = 64 * 512
    assert f"efficiency 0.4321, by the first layout's {n:,} / ({float(rate):,g} x 2 devices) = " in out
    assert "; again: --efficiency 0.4321\n" in out
    assert f"peak of the first layout: planned {peak:.1f} GiB, measured {peak / 1.25:g} GiB: +25.0%\n" in out
    for text in ("5,762", "fast", "-1", "0", "nan", "5762,58"):
        assert f"--measured {text}: not a rate of one device" in error(capsys, *layouts, f"--measured={text}")
    assert "too fast for any efficiency of H100" in error(capsys, *layouts, "--measured", "1000000000")
    for more in (("--search",), ("--efficiency", "0.5")):
        assert "fix: leave out --efficiency and --search; then" in error(capsys, *layouts, *more, "--measured", "5762")
    assert "--measured without --device: there is no time to plan" in error(capsys, "--measured", "5762")
