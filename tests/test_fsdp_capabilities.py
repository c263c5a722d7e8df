"""The rows of docs/fsdp-capabilities.md: those whose test stands nowhere else, and that the table names what exists."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import fshard as fs
from fshard import P
from fshard.cli import main
from fshard.defer import Apply
from fshard.interop.hf import FileTensor, write
from fshard.models import gpt2
from tests.lib.assertions import assert_same
from tests.lib.later import Later

fsdp = Later("torch.distributed.fsdp")

ROOT = Path(__file__).parent.parent
TREE = {"up": fs.init.normal((7, 10), std=0.1), "down": fs.init.normal((10, 7), std=0.1), "b": fs.init.normal((7,))}
STRATEGY = fs.strategy("HYBRID_SHARD")
SPECS = STRATEGY.param_specs(TREE)
MESH = fs.make_mesh(replica=2, shard=3)  # uneven over shard


def placed(mesh: fs.Mesh = MESH, specs: Any = SPECS) -> Any:
    return fs.materialize(TREE, specs, mesh, key=fs.key(0))


def whole() -> Any:
    return fs.device_get(placed(fs.make_mesh(data=1), P()))


# --- state dict -------------------------------------------------------------------------------------------------------


def test_state_dict_full_is_one_file_to_which_each_rank_writes_its_own_bytes(tmp_path: Path) -> None:
    name = lambda path: FileTensor(f"model.{path[0]}.weight")  # noqa: E731
    with fs.recording() as log:
        write(tmp_path, placed(), name, config={"model_type": "own"})
    assert log == []  # nothing is gathered
    assert_same(load_file(tmp_path / "model.safetensors"), {f"model.{k}.weight": x for k, x in whole().items()})


def test_state_dict_local_is_the_shards_as_they_are(tmp_path: Path) -> None:
    params = placed()
    for i, rank in enumerate(MESH.ranks):
        torch.save({k: x.shards[i].clone() for k, x in params.items()}, tmp_path / f"{rank}.pt")
    shards = [torch.load(tmp_path / f"{rank}.pt") for rank in MESH.ranks]
    assert [[tuple(x.shape) for x in own.values()] for own in shards[:3]] == [
        [(7, 4), (4, 7), (3,)], [(7, 4), (4, 7), (3,)], [(7, 2), (2, 7), (1,)]]  # fmt: skip
    again = {k: fs.Sharded(x.shape, x.spec, MESH, [own[k] for own in shards]) for k, x in params.items()}
    assert_same(fs.device_get(again), whole())


def test_cpu_ram_efficient_loading_and_sync_module_states_read_each_byte_on_the_rank_that_has_it(
    tmp_path: Path, monkeypatch: Any
) -> None:
    cfg = gpt2.Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    described = gpt2.init(cfg)
    want = fs.materialize(described, P(), fs.make_mesh(data=1), key=fs.key(0))
    gpt2.save(tmp_path, cfg, want)
    reads: list[int] = []
    preadv = os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        reads.append(preadv(fd, buffers, offset))
        return reads[-1]

    _, described = gpt2.load(tmp_path)
    mesh, specs = fs.make_mesh(data=4), fs.strategy("FULL_SHARD").param_specs(described)
    monkeypatch.setattr(os, "preadv", counted)
    with fs.recording() as log:
        params = fs.materialize(described, specs, mesh, key=fs.key(0))
    total = sum(x.numel() * 4 for x in fs.tree.leaves(described))
    assert sum(reads) == total  # the four ranks together: no rank reads another's part, and none is sent
    assert log == []
    assert_same(fs.device_get(params), fs.device_get(want))


# --- training ---------------------------------------------------------------------------------------------------------

CFG = gpt2.Config(vocab_size=31, n_positions=8, n_embd=12, n_layer=2, n_head=2)


def train(mesh: fs.Mesh, s: fs.Strategy, steps: int = 2, state: Any = None, begin: int = 0, **how: Any) -> Any:
    """Return (train state, losses) of clipped AdamW, after `steps` steps from a state."""
    described = gpt2.init(CFG)
    specs, layout = s.param_specs(described), gpt2.Layout(s.axis, **s.options, **how)
    rate = fs.optim.warmup(fs.optim.cosine(1e-2, 10), 2)
    opt = fs.optim.chain(fs.optim.clip_by_global_norm(0.3, specs), fs.optim.adamw(rate))
    tree = {"params": described, "opt": opt.init(described), "key": fs.key(5), "step": torch.tensor(0)}
    placed = {"params": specs, "opt": s.state_specs(opt, specs), "key": P(), "step": P()}

    @fs.shard_map(mesh=mesh, in_specs=(placed, P(s.axis)), out_specs=(placed, P()), check="never")
    def step(state: Any, rows: Tensor) -> Any:
        key = fs.fold_in(state["key"], state["step"])
        cfg, ids = gpt2.Config(**{**vars(CFG), "resid_pdrop": 0.1}), TEXT[rows]

        def loss(p: Any) -> Tensor:
            return gpt2.loss(cfg, p, ids[:, :-1], ids[:, 1:], layout=layout, specs=specs, key=key)

        value, grads = fs.value_and_grad(loss)(state["params"])
        params, moments = opt.update(grads, state["opt"], state["params"])
        return {**state, "params": params, "opt": moments, "step": state["step"] + 1}, value

    state = fs.materialize(tree, placed, mesh, key=fs.key(0)) if state is None else state(tree, placed, mesh)
    losses = []
    for i in range(begin, begin + steps):
        state, loss = step(state, fs.data.indices(fs.key(1), step=i, size=len(TEXT), batch=4))
        losses.append(float(loss))
    return state, losses


TEXT = torch.randint(31, (16, 9), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision_computes_in_half_sums_in_float32_and_keeps_float32_masters(dtype: torch.dtype) -> None:
    mesh, s, policy = fs.make_mesh(data=2), fs.strategy("FULL_SHARD"), fs.Policy(compute=dtype)
    with fs.recording() as log:
        state, losses = train(mesh, s, 1, **policy.options)
    assert {t.dtype for t in log if t.op == "all_gather"} == {dtype}
    assert {t.dtype for t in log if t.op == "reduce_scatter"} == {torch.float32}
    assert {x.dtype for x in fs.tree.leaves((state["params"], state["opt"])) if x.ndim} == {torch.float32}
    _, exact = train(mesh, s, 1)
    assert losses != exact
    torch.testing.assert_close(losses, exact, rtol=5 * torch.finfo(dtype).eps, atol=0)  # of a loss near log(31)


def test_save_state_and_load_state_resume_model_optimizer_schedule_key_and_data_on_another_mesh(tmp_path: Path) -> None:
    s, two = fs.strategy("FULL_SHARD"), fs.make_mesh(data=2)
    state, _ = train(two, s, 2)
    _, want = train(two, s, 2, lambda *_: state, begin=2)  # without an interruption
    fs.checkpoint.save(tmp_path / "state", state)
    restore = lambda tree, specs, mesh: fs.checkpoint.restore(tmp_path / "state", tree, specs=specs, mesh=mesh)  # noqa: E731
    again, rest = train(two, s, 2, restore, begin=2)
    assert rest == want
    assert int(again["step"]) == 4
    _, rest = train(fs.make_mesh(replica=2, shard=2), fs.strategy("HYBRID_SHARD"), 2, restore, begin=2)
    torch.testing.assert_close(rest, want, rtol=1e-5, atol=0)


def test_schedule_steps_once_for_each_step_of_the_optimizer_on_any_number_of_ranks() -> None:
    opt = fs.optim.sgd(fs.optim.linear(0.5, 4, end=0.1))
    specs = {"w": P("data")}
    placed = (specs, opt.specs(specs))

    def step(p: Any, state: Any, x: Tensor) -> Any:
        loss = lambda p, x: fs.pmean((fs.unshard(p, specs, "data", shapes=described)["w"] * x).sum(-1).mean(), "data")  # noqa: E731
        _, grads = fs.accumulate(loss, 2)(p, x)  # two microbatches are one step
        return opt.update(grads, state, p)

    for n in (1, 3):
        mesh, described = fs.make_mesh(data=n), {"w": fs.init.zeros((4,))}
        run = fs.shard_map(step, mesh=mesh, in_specs=(*placed, P("data")), out_specs=placed, check="never")
        state = fs.materialize((described, opt.init(described)), placed, mesh, key=fs.key(0))
        for _ in range(3):
            state = run(*state, torch.ones(2 * n, 4))
        assert_same(fs.device_get(state[0]["w"]), torch.full((4,), -(0.5 + 0.4 + 0.3)), rtol=1e-6, atol=0)


# --- the table --------------------------------------------------------------------------------------------------------


def rows() -> Iterator[tuple[str, str, str]]:
    """Return (capability, function, tests) of each row of the tables; the tests are in a hidden comment."""
    for line in (ROOT / "docs/fsdp-capabilities.md").read_text().splitlines():
        cells = [c.strip() for c in line.strip().strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 3 and cells[2] != "in fshard":
            function, _, tests = cells[2].partition("<!--")
            yield cells[0], function, tests.removesuffix("-->")


ROWS = list(rows())


def resolved(name: str) -> Any:
    """Return the object of a name in the table: `fs.a.b`, a module's `fshard.a.b`, a method of `fs.defer`'s `apply`."""
    first, *rest = name.split(".")
    x: Any = {"fs": fs, "fshard": fs, "apply": Apply}[first]
    for i, part in enumerate(rest):
        if first == "fshard" and not hasattr(x, part):
            x = importlib.import_module(".".join(["fshard", *rest[: i + 1]]))
        else:
            x = getattr(x, part)
    return x


@functools.cache
def collected(path: str) -> set[str]:
    """Return the names of the tests in a file."""
    return {node.name for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}  # fmt: skip


def test_function_and_test_of_each_row_exist(capsys: Any) -> None:
    for capability, function, test in ROWS:
        check_row(capability, function, test)


def check_row(capability: str, function: str, test: str) -> None:
    code = re.findall(r"`([^`]+)`", function)
    assert code, f"{capability}: no function"
    for text in code:
        if text.startswith("python -m fshard"):
            with pytest.raises(SystemExit) as e:
                main([text.split()[3], "--help"])
            assert e.value.code == 0, text
            continue
        name, _, arguments = text.partition("(")
        x = resolved(name)
        for argument in re.findall(r"(\w+)=", arguments):
            assert argument in inspect.signature(x).parameters, text
    for one in test.split(","):
        path, _, name = one.strip().partition("::")
        assert name in collected(path), one


def test_each_row_stands_once_and_no_option_of_torch_is_missing() -> None:
    assert len(ROWS) == len({row[0] for row in ROWS}) > 60
    page = (ROOT / "docs/fsdp-capabilities.md").read_text()
    options = list(inspect.signature(fsdp.FullyShardedDataParallel.__init__).parameters)[2:]  # after self and module
    names = [*fsdp.ShardingStrategy.__members__, *fsdp.StateDictType.__members__, *fsdp.BackwardPrefetch.__members__]
    assert [n for n in [*names, *options] if not re.search(rf"\b{n}\b", page)] == []
