"""Make hostile files at random, and see that each is read or refused with a clear error, soon and in little memory.

    python -m tests.faults.hostile --runs 10000

Each run makes a file of every kind, of at most about 1 MB: one that would expand (names that are in a list 2^30 times),
that has absurd numbers (sizes of 2^63, 30,000 dims), that is deep, long or twice, or one that another program wrote,
damaged. Reading it must end in a value or a ShardingError, within a second of CPU time, with at most 10 times the
size of the file and 16 MB of memory. The seed is new in each run of the script, and printed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import hashlib
import io
import json
import random
import re
import secrets
import signal
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import fshard as fs
from fshard import P, ShardingError
from fshard.cli import command
from fshard.interop.hf import tensors
from fshard.models import llama
from tests.faults.corruptions import BYTES

Random = random.Random
MEMORY_FACTOR, MEMORY = 10, 16 << 20


# --- files of torch.save ------------------------------------------------------------------------------------------


def put(i: int) -> bytes:
    return b"r" + i.to_bytes(4, "little")


def get(i: int) -> bytes:
    return b"j" + i.to_bytes(4, "little")


def text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return b"X" + len(data).to_bytes(4, "little") + data


def number(n: int) -> bytes:
    data = n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def tensor(shape: bytes = b"K\x02\x85", strides: bytes = b"K\x01\x85", offset: bytes = b"K\x00") -> bytes:
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu") + b"K\x02tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + offset + shape + strides + b"\x89" + hooks + b"tR"


def size(rng: Random) -> int:
    """Return a number from 0 to 2^60: each magnitude is as likely."""
    return rng.randrange(1 << rng.randrange(1, 61))


def count(rng: Random, most: int) -> int:
    """Return a number of repeats: one in five is of the largest, of the others each magnitude is as likely."""
    return rng.randrange(most // 2, most) if rng.random() < 0.2 else max(1, int(most ** rng.random()))


DOUBLED = 999


def doubled(new: bytes, join: bytes, levels: int = 30, times: int = 2) -> bytes:
    """Return a list (`]`, `e`) or tuple (``, `t`) that has a tensor `times` ** `levels` times; its memo is DOUBLED."""
    out = new + b"(" + tensor() + join + put(0)
    for level in range(levels):
        out += new + b"(" + get(level) * times + join + put(level + 1)
    return out + put(DOUBLED)


def nested(rng: Random, new: bytes, join: bytes) -> bytes:
    return doubled(new, join, rng.randrange(20, 60), rng.randrange(2, 6))


PICKLES: dict[str, Callable[[Random], bytes]] = {
    "a list in lists": lambda rng: nested(rng, b"]", b"e"),
    "a tuple in tuples": lambda rng: nested(rng, b"", b"t"),
    "a key that is a tuple in tuples": lambda rng: nested(rng, b"", b"t") + b"}" + get(DOUBLED) + b"Ns",
    "a list in itself": lambda rng: b"]" + put(0) + b"(" + tensor() + get(0) * rng.randrange(1, 99) + b"e",
    "place of the memo": lambda rng: b"]" + put(rng.randrange(1 << 32)),
    "many dims": lambda rng: b"}" + text("w") + tensor(*[b"(" + b"K\x01" * count(rng, 99_999) + b"t"] * 2) + b"s",
    "many tensors of many dims": lambda rng: b"](" + b"K\x01" * (n := count(rng, 9_999)) + b"t" + put(0) + (
        tensor(get(0), get(0)) + put(1) + b"(" + (tensor(get(0), get(0)) * (500_000 // (n + 200))) + b"e"),
    "absurd sizes": lambda rng: b"}" + text("w") + tensor(
        *(b"(" + b"".join(number(size(rng) << rng.randrange(200)) for _ in range(2)) + b"t" for _ in range(2)),
        number(-size(rng))) + b"s",
    "sizes that are lists": lambda rng: nested(rng, b"]", b"e") + b"}" + text("w") + tensor(get(DOUBLED)) + b"s",
    "a storage whose name is a list": lambda rng: nested(rng, b"]", b"e")
        + tensor().replace(text("0"), get(DOUBLED)),
    "many objects": lambda rng: b"](" + rng.choice([b"]", b"}", b"(", b")", b"N", b"K\x01", b"K\x01\x85", b"J9999"])
        * count(rng, 200_000) + b"e",
    "one tensor many times": lambda rng: b"](" + tensor() + put(0) + get(0) * count(rng, 100_000) + b"e",
    "many tensors": lambda rng: b"](" + tensor() * count(rng, 3_000) + b"e",
    "deep lists": lambda rng: b"]" * (n := count(rng, 400_000)) + b"a" * (n - 1),
    "deep tuples": lambda rng: b"N" + b"\x85" * count(rng, 400_000),
    "a key that is a deep tuple": lambda rng: b"}N" + b"\x85" * count(rng, 400_000) + b"Ns",
    "deep names": lambda rng: (b"}" + text("x" * count(rng, 9_999))) * (n := count(rng, 90)) + b"](" + tensor()
        + put(0) + get(0) * count(rng, 9_999) + b"e" + b"s" * n,
    "a long text": lambda rng: b"X" + rng.randrange(1 << 32).to_bytes(4, "little") + b"x" * count(rng, 99_999),
    "a call": lambda rng: b"c" + rng.choice([b"builtins\nbytearray", b"torch.storage\nUntypedStorage", b"torch\nempty",
        b"collections\nOrderedDict", b"torch\nSize", b"os\nsystem", b"torch\nFloatStorage", b"torch\nfloat32"]) + b"\n"
        + rng.choice([b"J\xff\xff\xff\x7f\x85", b"]\x85", text("x") + b"\x85", b")", b"("]) + b"R",
    "many calls": lambda rng: b"](" + b"](" + b"K\x01K\x01\x86" * (n := count(rng, 20_000)) + b"e\x85" + put(0)
        + b"ccollections\nOrderedDict\n" + put(1) + (get(1) + get(0) + b"R") * (200_000 // n) + b"e",
    "attributes of a function": lambda rng: b"c" + rng.choice([b"torch\nSize", b"torch._utils\n_rebuild_parameter"]) + (
        b"\n" + rng.choice([b"}", b"N}"]) + text("__doc__") + text("x") + rng.choice([b"sb", b"s\x86b", b"s\x85R"])),
    "long name of a storage": lambda rng: text("9" * count(rng, 400_000)) + put(0) + b"](" + (
        tensor().replace(text("0"), get(0)) * count(rng, 2_000) + b"e"),
    "much metadata": lambda rng: b"}(" + b"".join(map(number, range(count(rng, 30_000)))) + b"Nu" + put(0) + b"](" + (
        tensor()[:-2] + get(0) + b"tR") * count(rng, 2_000) + b"e",
    "random opcodes": lambda rng: b"}" + b"".join(
        rng.choice([b"]", b"}", b"(", b")", b"t", b"\x85", b"\x86", b"e", b"a", b"s", b"u", b"b", b"R", b"Q", b"q\0",
                    b"h\0", b"N", b"K\1", text("x"), tensor(), b"\x8a\xff", b"M99", b"c__main__\nx\n"])
        for _ in range(count(rng, 60))),
}  # fmt: skip


def archive(pickled: bytes, compression: int = zipfile.ZIP_STORED) -> bytes:
    """Return a file of torch.save with a pickle, and a storage of 8 bytes."""
    out = io.BytesIO()
    records = {"x/data.pkl": b"\x80\x02" + pickled + b".", "x/byteorder": b"little", "x/data/0": bytes(8)}
    with zipfile.ZipFile(out, "w", compression) as file:
        for name, data in records.items():
            file.writestr(name, data)
    return out.getvalue()


def directory(data: bytes, rng: Random) -> bytes:
    """Repeat the entries of an archive's directory, or write other numbers into one."""
    start, end = data.rindex(b"PK\1\2"), data.rindex(b"PK\5\6")
    if rng.random() < 0.5:
        at = rng.randrange(start + 4, len(data))
        return data[:at] + rng.randbytes(rng.choice([1, 2, 4, 8])) + data[at:][8:]
    n = count(rng, 9_999)
    entries = data[start:end] * n
    tail = bytearray(data[end:])
    tail[8:12] = min(n, 65_535).to_bytes(2, "little") * 2
    tail[12:16] = len(entries).to_bytes(4, "little")
    return data[:start] + entries + bytes(tail)


def make_torch(path: Path, rng: Random) -> str:
    what = rng.choice([*PICKLES, "compressed", "directory", "damaged"])
    if what == "compressed":
        path.write_bytes(archive(bytes(count(rng, 90 << 20)), zipfile.ZIP_DEFLATED))
    elif what == "directory":
        path.write_bytes(directory(archive(b"}" + text("w") + tensor() + b"s"), rng))
    elif what == "damaged":
        torch.save({"w": torch.ones(3, 2), "b": [torch.ones(2)] * 9}, path)
        path.write_bytes(rng.choice(list(BYTES.values()))(path.read_bytes(), rng))
    else:
        path.write_bytes(archive(PICKLES[what](rng)))
    return what


def read_torch(path: Path) -> None:
    fs.state_dict.read(path, {"w": fs.init.zeros((3, 2))}, ignored=["b.*"])


# --- JSON, and files of safetensors -------------------------------------------------------------------------------


def name_of(rng: Random) -> str:
    """Return a name: long, of many parts, with characters of control or halves of a pair, or ordinary."""
    return rng.choice(["w", "a.b", "\x1b]0;x\a\x1b[2J", "\ud800", "a\nb", "", ".", "x" * count(rng, 9_999), "." * count(
        rng, 600), "\0", "../w", "__metadata__", "\u202e", "crc32:w", "['" * count(rng, 99), "h.0.w"])  # fmt: skip


def value_of(rng: Random) -> Any:
    """Return a value as JSON may have it."""
    n = rng.choice([1, -1]) * size(rng) << rng.choice([0, 0, 0, 63, 999])
    return rng.choice([None, True, n, n, n, 0.7, float("inf"), float("nan"), "", [], {}, [n] * 3, [[]], {"a": n},
                       name_of(rng), [None] * count(rng, 9_999), "9" * 5_000])  # fmt: skip


def hostile_json(value: Any, rng: Random) -> bytes:
    """Return a value as JSON, at times with one of its numbers, texts or lists replaced, or as JSON that expands."""
    value = json.loads(json.dumps(value))
    for _ in range(rng.randrange(4)):
        at = value
        while isinstance(at, (dict, list)) and at:
            keys = list(at) if isinstance(at, dict) else range(len(at))
            key, inside = rng.choice(keys), at
            at = at[key]
            if rng.random() < 0.4 or not isinstance(at, (dict, list)):
                inside[key] = value_of(rng)
                break
        if isinstance(value, dict) and rng.random() < 0.3:
            value[name_of(rng)] = value_of(rng)
    data = json.dumps(value, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass")
    n = count(rng, 60_000)
    expanded = {
        "deep lists": b"[" * n + b"]" * n,
        "deep keys": b'{"a":' * n + b"1" + b"}" * n,
        "many keys": b"{" + b",".join(b'"%d":1' % i for i in range(n)) + b"}",
        "late duplicate": b"{" + b",".join(b'"%d":1' % min(i, n - 2) for i in range(n)) + b"}",
        "many lists": b"[" + b",".join([b"[]"] * n) + b"]",
        "digits": b"9" * n,
    }
    inside = rng.random() < 0.5 and data.startswith(b'{"')
    return rng.choice([data] * 6 + [data[:-1] + b',"x":' + x + b"}" if inside else x for x in expanded.values()])


def make_safetensors(path: Path, rng: Random) -> str:
    what = rng.choice(
        ["header", "header", "header", "empty tensors", "late duplicate", "dims", "length", "names", "damaged"]
    )
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header: Any = {
        name: {"dtype": "F32", "shape": [2], "data_offsets": [8 * i, 8 * i + 8]} for i, name in enumerate("wb")
    }
    if what in ("empty tensors", "late duplicate"):
        header = {f"{rng.choice('hx.')}{i}": empty for i in range(count(rng, 12_000))}
    elif what == "dims":
        header["w"]["shape"] = [rng.choice([0, 1, 2, size(rng)])] * count(rng, 99_999)
    elif what == "names":
        header = {name_of(rng): empty for _ in range(count(rng, 300))}
    data = hostile_json(header, rng) if what == "header" else json.dumps(header).encode()
    if what == "late duplicate":
        data = data[:-1] + b', "x0": ' + json.dumps(empty).encode() + b"}"
    length = size(rng) if what == "length" else len(data)
    path.write_bytes(length.to_bytes(8, "little") + data + bytes(16 * (what not in ("empty tensors", "names"))))
    if what == "damaged":
        fs.state_dict.write(path, {"w": torch.ones(3, 2), "b": torch.ones(2)})
        path.write_bytes(rng.choice(list(BYTES.values()))(path.read_bytes(), rng))
    return what


# --- configs, and folders -----------------------------------------------------------------------------------------

CONFIGS: list[dict[str, Any]] = [
    {"model_type": "gpt2", "vocab_size": 8, "n_positions": 4, "n_embd": 4, "n_layer": 1, "n_head": 2},
    {"model_type": "bert", "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
     "intermediate_size": 8, "max_position_embeddings": 8, "type_vocab_size": 2},
    {"model_type": "t5", "vocab_size": 8, "d_model": 4, "d_kv": 2, "d_ff": 8, "num_layers": 1, "num_heads": 2},
    {"model_type": "mixtral", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1,
     "num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 2, "num_experts_per_tok": 1},
    {"model_type": "resnet", "embedding_size": 4, "hidden_sizes": [4], "depths": [1], "layer_type": "basic",
     "num_labels": 2},
    {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"},
     "vocab_size": 8, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2},
    *({"model_type": name, "vocab_size": 8, "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 1,
       "num_attention_heads": 2, "rope_scaling": None, "rope_theta": 1e4} for name in ("llama", "qwen2", "gpt_neox")),
]  # fmt: skip


def make_config(path: Path, rng: Random) -> str:
    config = rng.choice(CONFIGS)
    what = rng.choice(["config", "config", "layers", "index", "tokens"])
    index = {"metadata": {"crc32": {}}, "weight_map": {"w": "model-00001-of-00001.safetensors", "b": "x/../x"}}
    data = {"config": hostile_json(config, rng)}.get(what, json.dumps(config).encode())
    if what == "layers":
        name = rng.choice(sorted(config.keys() - {"model_type"}))
        data = json.dumps(config | {name: [size(rng)] * 3 if isinstance(config[name], list) else size(rng)}).encode()
    path.write_bytes(data)
    path.with_name("generation_config.json").write_bytes(hostile_json({"eos_token_id": [1], "top_k": 3}, rng))
    if what == "index":
        path.with_name("model.safetensors.index.json").write_bytes(hostile_json(index, rng))
    elif rng.random() < 0.7:
        make_safetensors(path.with_name("model.safetensors"), rng)
    return f"{what} of {config['model_type']}"


def load_folder(path: Path) -> None:
    fs.hf.load(path.parent)


def inspect(path: Path) -> None:
    """Print the tensors at a path on a terminal that is looked at."""
    with contextlib.redirect_stdout(Screen()), contextlib.redirect_stderr(Screen()):
        if command.main(["inspect", str(path)]) == 2:
            raise ShardingError("refused")


def inspect_folder(path: Path) -> None:
    inspect(path.parent)


EXPRESSIONS = [
    "(a+)+$", "(.*)*x", ".*" * 40 + "x", "(.|.)*q", "((((.+)+)+)+)+!", "(?i)q", "(", "[", "a{99999999999}", "\\",
    "(" * 300, "(?P<a>.*)(?P=a)+x", "(?=.*)*x", "a|" * 9_000 + "b", r"(\w+\.)*q", "(.*.*.*)*=", "(?:a?){60}" + "a{60}",
    r"model\.layers\.(\d|1\d)\..*(q|v)_proj",
]  # fmt: skip


def make_adapter(path: Path, rng: Random) -> str:
    config: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj", "v_proj"],
                              "rank_pattern": {"q_proj": 2}, "alpha_pattern": {}, "bias": "none"}  # fmt: skip
    what = rng.choice(["config", "config", "config", "expression", "patterns", "names", "weights"])
    if what == "expression":
        key, given = (
            rng.choice(["target_modules", "exclude_modules", "rank_pattern", "layers_pattern"]),
            rng.choice(EXPRESSIONS),
        )
        config[key] = {given: 3} if key == "rank_pattern" else given
        config |= {"layers_to_transform": [0]} if key == "layers_pattern" else {}
    elif what == "patterns":
        config["rank_pattern"] = {f"{rng.choice(['x', '.*', '(a|b)'])}{i}": 2 for i in range(count(rng, 20_000))}
    elif what == "names":
        config[rng.choice(["target_modules", "exclude_modules", "modules_to_save"])] = [
            f"{rng.choice(['x', '*', '?', ''])}{i}" for i in range(count(rng, 20_000))]  # fmt: skip
        config["layers_to_transform"] = rng.choice([None, list(range(count(rng, 99_999)))])
    path.write_bytes(hostile_json(config, rng) if what == "config" else json.dumps(config).encode())
    if what == "weights":
        make_safetensors(path.with_name("adapter_model.safetensors"), rng)
    else:
        names = [f"base_model.model.model.layers.0.self_attn.{x}_proj.lora_{f}.weight" for x in "qv" for f in "AB"]
        fs.state_dict.write(path.with_name("adapter_model.safetensors"), {n: torch.ones(2, 4) for n in names})
    return what


def load_adapter(path: Path) -> None:
    cfg = llama.Config(8, 4, 8, 40, 2)
    fs.peft.load(path.parent, llama.init(cfg), of=llama.theirs)


def make_checkpoint(path: Path, rng: Random) -> str:
    """Change a manifest, at times with the digest of its new text, or a part file."""
    folder = path.parent
    folder.rmdir()
    fs.checkpoint.save(folder, {"w": torch.ones(3, 2), "b": torch.ones(2), "step": 1, "name": "x"})
    what = rng.choice(["manifest", "manifest", "manifest", "first line", "part", "damaged"])
    first, body = path.read_bytes().split(b"\n", 1)
    if what in ("manifest", "first line"):
        head, rest = json.loads(first.rstrip(b",") + b"}"), json.loads(b"{" + body)
        if what == "manifest":
            body = hostile_json(rest, rng)[1:]
            head["blake2b"] = hashlib.blake2b(body, digest_size=16).hexdigest()
        first = json.dumps(head).encode() if what == "manifest" else hostile_json(head, rng)
        path.write_bytes(first.replace(b"\n", b"")[:-1] + b",\n" + body)
    else:
        other = next(folder.glob("part*")) if what == "part" else path
        other.write_bytes(rng.choice(list(BYTES.values()))(other.read_bytes(), rng))
    return what


def restore(path: Path) -> None:
    like = {"w": fs.init.zeros((3, 2)), "b": fs.init.zeros(2), "step": 0, "name": ""}
    fs.checkpoint.restore(path.parent, like, specs=P(), mesh=fs.make_mesh(data=1))


def merge(path: Path) -> None:
    with contextlib.redirect_stdout(Screen()), contextlib.redirect_stderr(Screen()):
        if command.main(["merge", str(path.parent), str(path.parent / "out")]) == 2:
            raise ShardingError("refused")


def make_yaml(path: Path, rng: Random) -> str:
    what = rng.choice(["laughs", "keys", "deep", "values", "values", "values", "merge", "damaged"])
    n = count(rng, 9_000)
    good = {"distributed_type": "FSDP", "num_processes": 2, "num_machines": 1, "mixed_precision": "bf16",
            "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": True}, "main_process_port": 0,
            "gpu_ids": "0"}  # fmt: skip
    lines = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 'x'}]" for i in range(rng.randrange(2, 30))]
    merged = [f"a{i}: &a{i} {{k{i}: 1, <<: [{', '.join([f'*a{i - 1}'] * 9) if i else ''}]}}" for i in range(20)]
    texts = {
        "laughs": "\n".join(lines) + f"\nnum_processes: *a{len(lines) - 1}\n",
        "merge": "\n".join(merged),
        "keys": "".join(f"k{i * i}: {i}\n" for i in range(n)),
        "deep": rng.choice(["[" * n, "- " * n, "{a: " * n, "a: " + "[" * 99 + "]" * 99, "? " * n, "!!map " * n]),
        "values": "".join(
            f"{key}: {value if rng.random() < 0.8 else rng.choice(YAML_VALUES)}\n" for key, value in good.items()
        ),
    }
    text = texts.get(what, json.dumps(good)).encode("utf-8", "surrogatepass")
    path.write_bytes(rng.choice(list(BYTES.values()))(text, rng) if what == "damaged" else text)
    return what


YAML_VALUES = [
    "1e400", "0x" + "f" * 900, "0x" + "f" * 9_000, "10" * 15, "1:1:1", ":".join("1" * 400), "-1", ".inf", ".nan",
    "!!int ''", "!!timestamp x", "!!bool x", "!!float x", "!!binary x", "!!python/name:os.system", "!!set {a, b}",
    "!!omap [a: 1]", "2001-99-99", "[[]]", "{}", "? x", "*x", "&x [*x]", '"\\e[2J"', '"\\ud800"', "x" * 5_000, "~",
    "'a\0'", "0o7", "1_000", "|\n  a\n  b", "[1, 2, 3]", '"\\n"',
]  # fmt: skip


class Screen(io.StringIO):
    """A terminal: refuses what would change how it shows the next text, and what is not Unicode."""

    def write(self, text: str) -> int:
        if odd := re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", text):
            raise AssertionError(f"prints {odd[0]!r}")
        return len(text)


Kind = tuple[str, Callable[[Path, Random], str], tuple[Callable[[Path], Any], ...]]  # name, maker, and readers
KINDS: dict[str, Kind] = {
    "torch": ("a.pt", make_torch, (read_torch,)),
    "safetensors": ("a.safetensors", make_safetensors, (read_torch, tensors, inspect)),
    "adapter": ("adapter_config.json", make_adapter, (load_adapter, inspect_folder)),
    "checkpoint": ("manifest.json", make_checkpoint, (restore, inspect_folder, merge)),
    "yaml": ("a.yaml", make_yaml, (fs.accelerate.read,)),
    "config": ("config.json", make_config, (load_folder, inspect, inspect_folder)),
}


# --- one file -----------------------------------------------------------------------------------------------------


class Hang(BaseException):
    """A reader that is still at work after two minutes."""


@contextlib.contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise Hang after a while; end the process with a traceback if that is not noticed, as in C code."""

    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    faulthandler.dump_traceback_later(10 * seconds, exit=True)  # also a machine may stand still for a while
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def _memory(field: str) -> int:
    """Return VmRSS, the memory of the process, or VmHWM, its maximum since the last `_memory`."""
    text = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(text.split(f"{field}:")[1].split()[0]) << 10


def attempt(read: Callable[[Path], Any], path: Path) -> tuple[str, float, int]:
    """Read a file, and return what came of it, the seconds of CPU time and the bytes of memory that it took."""
    before, begun = _memory("VmRSS"), time.process_time()
    try:
        with alarm(120):
            read(path)
        outcome = "read"
    except ShardingError as e:
        try:
            print(e, file=Screen())
            outcome = "refused"
        except AssertionError as unclear:
            outcome = f"{unclear}: {e!s:.200}"
    except BaseException as e:
        outcome = f"{type(e).__name__}: {e!s:.200}"
    seconds = time.process_time() - begun
    return outcome, seconds, _memory("VmHWM") - before


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.faults.hostile", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=1000, help="files of each kind")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", type=int, help="the file of this run alone, of one kind")
    parser.add_argument("--seconds", type=float, default=1.0, help="most CPU time of a file; more on a busy machine")
    args = parser.parse_args(argv)
    gc.freeze()  # what torch's import made: each collection would go through it
    print(f"--seed {args.seed}\n\n| files | runs | read | refused | anything else | most seconds | most memory, MB |")
    print("|---|---|---|---|---|---|---|", flush=True)
    problems = []
    with tempfile.TemporaryDirectory() as root:
        for kind in args.kinds:
            name, make, readers = KINDS[kind]
            tally: Counter[str] = Counter()
            slowest, largest = 0.0, 0
            for i in range(args.runs) if args.only is None else [args.only]:
                rng = random.Random(f"{args.seed} {kind} {i}")
                folder = Path(root) / f"{kind} {i}"
                folder.mkdir()
                what = make(folder / name, rng)
                outcome, seconds, memory = attempt(rng.choice(readers), folder / name)
                size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
                if outcome in ("read", "refused"):
                    if seconds > args.seconds:
                        outcome = f"{seconds:.1f} s"
                    elif memory > MEMORY_FACTOR * size + MEMORY:
                        outcome = f"{memory >> 20} MB of memory"
                if outcome not in ("read", "refused"):
                    problems.append(f"--kinds {kind} --only {i}: {what}, {size:,} bytes: {outcome}")
                tally[outcome] += 1
                slowest, largest = max(slowest, seconds), max(largest, memory)
                with contextlib.suppress(OSError):
                    for f in sorted(folder.rglob("*"), reverse=True):
                        f.rmdir() if f.is_dir() else f.unlink()
                    folder.rmdir()
            others = tally.total() - tally["read"] - tally["refused"]
            print(f"| {kind} | {tally.total()} | {tally['read']} | {tally['refused']} | {others} | {slowest:.2f} | "
                  f"{largest / 1e6:.0f} |", flush=True)  # fmt: skip
    print("\n".join(problems[:50]))
    return min(1, len(problems))


if __name__ == "__main__":
    sys.exit(main())
