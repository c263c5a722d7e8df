"""Each file of examples/ trains to the losses of one device; those of one model, to the losses of torch's own AdamW."""

from __future__ import annotations

import functools
import signal
import subprocess

import pytest
import torch
import torch.distributed.run as torchrun

import fshard as fs
from fshard import cli
from tests.lib.examples import FOLDER, example
from tests.lib.signals import default_signals
from tests.lib.tiers import slow_unless

EXAMPLES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "mlp")  # which the others import
ONE_MODEL = ["accumulation", "data", "fsdp", "hybrid", "remat_offload", "sequence", "tensor", "zero"]
MESHES = {
    "hybrid": [{"replica": 2, "shard": 2}, {"replica": 1, "shard": 4}],
    "context": [{"data": 2, "seq": 3}],
    "experts": [{"expert": 4}, {"expert": 2}],
    "pipeline": [{"data": 1, "expert": 1, "stage": 2, "seq": 2, "model": 1}],
    "elastic": [{"data": 4}, {"data": 3}],  # the second splits the batch of 8 unevenly
    **{name: [{"data": 2, "model": 2}, {"data": 1, "model": 3}] for name in ("tensor", "sequence", "vocabulary")},
}


@functools.cache
def dense_losses() -> list[float]:
    """The losses of the model that most examples train, by torch alone on one device."""
    init = example("mlp")["init"]
    blocks = fs.device_get(fs.materialize(init(), fs.P(), fs.make_mesh(one=1), key=fs.key(0)))
    leaves = [block[name].requires_grad_() for block in blocks for name in ("up", "down")]
    optimizer = torch.optim.AdamW(leaves, lr=1e-2)
    losses = []
    for i in range(3):
        y = x = fs.random.normal(fs.fold_in(fs.key(1), i), (8, 6, 16))
        for block in blocks:
            y = y + torch.relu(y @ block["up"]) @ block["down"]
        loss = (y - x.flip(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", slow_unless([n for n in EXAMPLES if n not in ("context", "pipeline")], EXAMPLES))
def test_example_has_the_losses_of_one_device(name: str) -> None:
    train = default_signals()(example(name)["train"])
    meshes = MESHES.get(name, [{"data": 4}])
    want = train(fs.make_mesh(**dict.fromkeys(meshes[0], 1)))
    if name in ONE_MODEL:
        assert want == pytest.approx(dense_losses(), rel=1e-5)
    for axes in meshes:
        assert train(fs.make_mesh(**axes)) == pytest.approx(want, rel=1e-5)


@pytest.mark.slow
def test_pipeline_with_experts_data_positions_and_heads_on_32_ranks_has_the_losses_of_one_device() -> None:
    train, axes = example("pipeline")["train"], ("data", "expert", "stage", "seq", "model")
    one, many = (train(fs.make_mesh(**dict.fromkeys(axes, n))) for n in (1, 2))
    assert many == pytest.approx(one, rel=1e-5)


def test_every_parallelism_has_an_example() -> None:
    assert set(EXAMPLES) == {*ONE_MODEL, "context", "elastic", "experts", "lora", "pipeline", "vocabulary"}


def test_elastic_example_goes_on_from_the_step_at_which_it_was_told_on_another_mesh(tmp_path, monkeypatch) -> None:
    module = example("elastic")
    train, mlp = default_signals()(module["train"]), module["mlp"]
    want, batch = train(fs.make_mesh(data=1), steps=8), mlp.batch
    monkeypatch.setattr(mlp, "batch", lambda i: (signal.raise_signal(signal.SIGTERM) if i == 4 else None, batch(i))[1])
    with pytest.raises(SystemExit) as e:
        train(fs.make_mesh(data=4), tmp_path, steps=8)
    assert e.value.code == 75
    assert fs.checkpoint.steps(tmp_path) == [5]
    assert train(fs.make_mesh(data=3), tmp_path, steps=8) == pytest.approx(want[5:], rel=1e-5)
    assert len((FOLDER / "elastic.py").read_text().splitlines()) <= 60


def test_job_of_slurm_is_a_script_whose_status_75_is_requeued(tmp_path) -> None:
    """Run it with programs in the place of Slurm's, which print what they get."""
    script = FOLDER / "elastic.sbatch"
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    options = [line.split()[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--requeue", "--signal=USR1@120", "--nodes=1-4"} <= set(options)
    for name, body in {
        "scontrol": '[ "$1" = show ] && printf "node3\\nnode4\\n" || echo "scontrol $*"',
        "srun": 'SLURM_PROCID=9 SLURM_LOCALID=1 "$@"; exit $?',
        "python": 'echo "$* $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT"; exit $STATUS',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    for status, last in (("75", ["scontrol requeue 12345"]), ("0", []), ("1", [])):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "node[3-4]",
               "SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8", "STATUS": status}  # fmt: skip
        result = subprocess.run(["bash", script], env=env, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (int(status), "")
        assert result.stdout.splitlines() == ["examples/elastic.py out 9 1 16 8 node3 22345", *last]


def test_job_of_kubernetes_has_what_an_elastic_run_needs(monkeypatch) -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((FOLDER / "elastic.yaml").read_text())
    assert (service["kind"], job["kind"], job["apiVersion"]) == ("Service", "Job", "batch/v1")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["template"]["metadata"]["labels"].items() >= service["spec"]["selector"].items()
    assert pod["subdomain"] == service["metadata"]["name"]
    assert (spec["completionMode"], pod["restartPolicy"]) == ("Indexed", "Never")  # as podFailurePolicy needs
    assert [rule["action"] for rule in spec["podFailurePolicy"]["rules"]] == ["Ignore", "Ignore"]
    (container,) = pod["containers"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    assert f"{job['metadata']['name']}-0.{pod['subdomain']}:29500" in " ".join(container["args"])
    assert container["command"] == ["python", "-m", "fshard", "launch"]
    seen = []
    monkeypatch.chdir(FOLDER.parent)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torchrun, "run", seen.append)
    assert cli.main(["launch", *container["args"]]) == 0
    config, _, script = torchrun.config_from_args(seen[0])
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (1, 4, 8, 100)
    assert (config.rdzv_backend, script[-2:]) == ("c10d", ["examples/elastic.py", "/out/run"])
