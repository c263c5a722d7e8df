"""Damage saved files at random, and see that what is restored is exact, or refused with a clear error.

    python -m tests.faults.corruptions --runs 1000

Each run damages a copy of a checkpoint in one way, or two, or of a Hugging Face folder in one, and restores it. What it
must not do: give another value, mix two states, end in any error but a ShardingError, or write into the folder. The
damage comes from a list of the ways in which files are lost and mixed up; the bytes, sizes and files are random. A
folder has no checksums: its damage is that of sizes and names.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P, ShardingError, checkpoint

KEY = fs.key(0)
MESHES = [(fs.make_mesh(data=1), P()), (fs.make_mesh(data=3), P("data"))]


def state(seed: int) -> dict[str, Any]:
    """Return leaves of several dtypes, and Python values; states of different seeds have the same shapes."""
    g = torch.Generator().manual_seed(seed)
    tensors = {
        "w": torch.randn(40, 30, generator=g),
        "half": torch.randn(31, generator=g).bfloat16(),
        "ids": torch.randint(0, 100, (9, 2), generator=g),
        "e": torch.zeros(0, 3),
        "s": torch.tensor(seed * 1.0),
    }
    return {**tensors, "step": seed, "lr": seed / 7, "name": f"run {seed}", "done": bool(seed % 2)}


# --- what is saved, and read back ---------------------------------------------------------------------------------


def save_checkpoint(folder: Path, seed: int) -> None:
    tree = state(seed)
    tensors = fs.device_put({k: x for k, x in tree.items() if isinstance(x, Tensor)}, P(), fs.make_mesh(data=2))
    specs = {k: P("data") if x.ndim else P() for k, x in tensors.items()}
    checkpoint.save(folder, {**tree, **fs.reshard(tensors, specs)})


def read_checkpoint(folder: Path, mesh: fs.Mesh, spec: P) -> dict[str, Any]:
    like = {k: fs.init.zeros(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else type(x)()
            for k, x in state(0).items()}  # fmt: skip
    specs = {k: spec if isinstance(x, fs.Deferred) and x.ndim else P() for k, x in like.items()}
    listed = checkpoint.inspect(folder)
    restored = checkpoint.restore(folder, like, specs=specs, mesh=mesh)
    assert {k: v for k, v in listed.items() if not isinstance(v, checkpoint.Saved)} == {
        k: v for k, v in restored.items() if not isinstance(v, fs.Sharded)
    }
    return {k: fs.device_get(v) if isinstance(v, fs.Sharded) else v for k, v in restored.items()}


def read_scalars(folder: Path, mesh: fs.Mesh, spec: P) -> dict[str, Any]:
    return {name: checkpoint.restore(folder, type(value)(), at=name)
            for name, value in state(0).items() if not isinstance(value, Tensor)}  # fmt: skip


def weights_of(seed: int) -> dict[str, Tensor]:
    return {k: x for k, x in state(seed).items() if isinstance(x, Tensor)}


def save_folder(folder: Path, seed: int) -> None:
    fs.hf.save(folder, {"model_type": "any"}, weights_of(seed))


def save_shards(folder: Path, seed: int) -> None:
    fs.hf.save(folder, {"model_type": "any"}, weights_of(seed), max_shard_bytes=200)


def read_folder(folder: Path, mesh: fs.Mesh, spec: P) -> dict[str, Any]:
    described = {k: fs.init.zeros(x.shape, dtype=x.dtype) for k, x in weights_of(0).items()}
    specs = {k: spec if x.ndim else P() for k, x in described.items()}
    placed = fs.materialize(fs.hf.weights(folder, described), specs, mesh, key=KEY)
    return dict(fs.device_get(placed))


Kind = tuple[Callable[[Path, int], None], Callable[[Path, fs.Mesh, P], dict[str, Any]]]
FOLDER = "Hugging Face folder"
KINDS: dict[str, Kind] = {
    "checkpoint": (save_checkpoint, read_checkpoint),
    "checkpoint, Python values alone": (save_checkpoint, read_scalars),
    f"{FOLDER}, one file": (save_folder, read_folder),
    f"{FOLDER}, shards": (save_shards, read_folder),
}


# --- damage: a function of the folder, another folder like it, and random numbers -------------------------------------


def files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_file() and p.name != "config.json")


def edit(change: Callable[[bytes, random.Random], bytes]) -> Callable[[Path, Path, random.Random], None]:
    """Return the damage that changes the bytes of one file."""

    def damage(folder: Path, other: Path, rng: random.Random) -> None:
        file = rng.choice(files(folder))
        data = file.read_bytes()
        file.write_bytes(change(data, rng) if data else b"x")  # an earlier damage may have emptied it

    return damage


def flip(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 100])):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def zero(data: bytes, rng: random.Random) -> bytes:
    i, n = rng.randrange(len(data)), rng.choice([1, 16, 512, 4096])
    return data[:i] + bytes(len(data[i : i + n])) + data[i + n :]


def exchange(data: bytes, rng: random.Random) -> bytes:
    n = rng.choice([1, 4, 64])
    i, j = sorted(rng.randrange(max(1, len(data) - n)) for _ in range(2))
    out = bytearray(data)
    out[i : i + n], out[j : j + n] = out[j : j + n], out[i : i + n]
    return bytes(out)


def repeat(data: bytes, rng: random.Random) -> bytes:
    i, n = rng.randrange(len(data)), rng.choice([1, 8, 64])
    return data[: i + n] + data[i:]


def cut_out(data: bytes, rng: random.Random) -> bytes:
    i = rng.randrange(len(data))
    return data[:i] + data[i + rng.choice([1, 8, 64]) :]


def another_digit(data: bytes, rng: random.Random) -> bytes:
    """Change a digit or a letter: JSON that is still JSON."""
    places = [i for i, c in enumerate(data) if chr(c).isalnum() and c < 128]
    i = rng.choice(places or [0])
    return data[:i] + rng.choice(b"0123456789abcdefFIU").to_bytes(1, "little") + data[i + 1 :]


def delete(folder: Path, other: Path, rng: random.Random) -> None:
    rng.choice(files(folder)).unlink()


def swap(folder: Path, other: Path, rng: random.Random) -> None:
    a, b = rng.choices(files(folder), k=2)
    one, two = a.read_bytes(), b.read_bytes()
    a.write_bytes(two)
    b.write_bytes(one)


def duplicate(folder: Path, other: Path, rng: random.Random) -> None:
    """Copy a file over another, or beside it, under a name like its own."""
    source, target = rng.choices(files(folder), k=2)
    if source == target:
        names = {f"{source.name}.bak", source.name.replace("0000", "0007")} - {source.name}
        target = folder / rng.choice(sorted(names))
    shutil.copyfile(source, target)


def replace(folder: Path, other: Path, rng: random.Random) -> None:
    """Replace one file by that of another model. The one file of a folder is all of it: then it is another folder."""
    names = [p.name for p in files(folder) if p.name != "model.safetensors" and (other / p.name).exists()]
    if names:
        name = rng.choice(names)
        shutil.copyfile(other / name, folder / name)


def make_folder(folder: Path, other: Path, rng: random.Random) -> None:
    file = rng.choice(files(folder))
    file.unlink()
    file.mkdir()


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bits flipped": flip,
    "bytes zeroed": zero,
    "a digit changed": another_digit,
    "bytes exchanged": exchange,
    "bytes repeated": repeat,
    "bytes cut out": cut_out,
    "cut short": lambda data, rng: data[: rng.randrange(len(data))],
    "extended": lambda data, rng: data + bytes(rng.choice([1, 8, 4096])),
    "emptied": lambda data, rng: b"",
    "random bytes": lambda data, rng: rng.randbytes(len(data)),
}
DAMAGE: dict[str, Callable[[Path, Path, random.Random], None]] = {
    **{name: edit(change) for name, change in BYTES.items()},
    "file deleted": delete,
    "files exchanged": swap,
    "file duplicated": duplicate,
    "file of another model": replace,
    "folder in place of a file": make_folder,
}


SAME_SIZE = ("bits flipped", "bytes zeroed", "a digit changed", "bytes exchanged", "file of another model")


def same(got: dict[str, Any], want: dict[str, Any]) -> bool:
    return all(
        torch.equal(got[k], want[k]) and got[k].dtype == want[k].dtype
        if isinstance(got[k], Tensor) else (type(got[k]), repr(got[k])) == (type(want[k]), repr(want[k]))
        for k in got
    )  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.faults.corruptions", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after about this long")
    args = parser.parse_args(argv)
    rng, begun, problems = random.Random(args.seed), time.monotonic(), []
    tallies: dict[str, Counter[str]] = {name: Counter() for name in KINDS}
    with tempfile.TemporaryDirectory() as root:
        for name, (save, _) in KINDS.items():
            for seed in (1, 2):
                save(Path(root) / f"{name} {seed}", seed)
        for i in range(args.runs):
            if time.monotonic() - begun > args.seconds:
                break
            name, (mesh, spec) = list(KINDS)[i % len(KINDS)], rng.choice(MESHES)
            folder, other = Path(root) / "damaged", Path(root) / f"{name} 2"
            shutil.copytree(Path(root) / f"{name} 1", folder)
            seen = [way for way in DAMAGE if way not in SAME_SIZE] if name.startswith(FOLDER) else list(DAMAGE)
            ways = rng.sample(seen, 1 if name.startswith(FOLDER) else rng.choice([1, 1, 1, 2]))
            for way in ways:
                if files(folder):
                    DAMAGE[way](folder, other, rng)
            before = contents(folder)
            try:
                outcome = "exact" if same(KINDS[name][1](folder, mesh, spec), state(1)) else "other values"
            except ShardingError:
                outcome = "refused"
            except Exception as e:
                outcome = f"{type(e).__name__}: {e}"
            if contents(folder) != before:
                outcome = "the folder was changed"
            tallies[name][outcome] += 1
            if outcome not in ("exact", "refused"):
                problems.append(f"{name}, run {i}, {' and '.join(ways)}: {outcome}")
            shutil.rmtree(folder)
    print("| what is damaged | runs | refused | exact values | anything else |\n|---|---|---|---|---|")
    for name, t in [*tallies.items(), ("all", sum(tallies.values(), Counter()))]:
        rest = t.total() - t["refused"] - t["exact"]
        print(f"| {name} | {t.total()} | {t['refused']} | {t['exact']} | {rest} |")
    print(f"{time.monotonic() - begun:.0f} s")
    print("\n".join(problems))
    return min(1, len(problems))


if __name__ == "__main__":
    sys.exit(main())
