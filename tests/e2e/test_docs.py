"""Every block of the README and of the pages in docs/ runs, and so does every example of every docstring.

Pages: the ```python blocks run in order, in one namespace. A ```text block right after one is exactly its output, but
for the numbers that change with the machine or the page (VARYING). `python -m tests.e2e.test_docs PAGE ...` writes the
outputs of pages anew.

Docstrings: every `>>>` example runs, as in a session that has `torch`, `np`, `fs`, the public names and those of its
own module, a simulated `mesh` of data=2, model=4, and the names of SETUP. An example that calls a collective runs
inside a region, on every rank, and shows the output of rank 0. An example without output is not compared.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import functools
import importlib
import inspect
import io
import linecache
import pkgutil
import re
import shlex
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest
import torch

import fshard as fs
from docs import build, pictures
from fshard._core.region import in_region, region
from tests.lib.signals import default_signals

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = ("install", "test")  # the blocks that CI and a newcomer copy; each after its <!-- marker -->


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """End with an example of `preempted` the handlers that it installs."""
    with default_signals():
        yield


# --- pages --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, text, first line, and the marker comment on the line above it, if any."""

    language: str
    text: str
    line: int
    marker: str
    follows: bool  # only blank lines stand between it and the block before


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    lines = text.splitlines()
    start, language, marker, follows = -1, "", "", False
    for i, line in enumerate(lines):
        if start >= 0:
            if line.startswith("```"):
                found.append(Block(language, "\n".join(lines[start:i]) + "\n", start + 1, marker, follows))
                start, marker, follows = -1, "", True
        elif line.startswith("```"):
            start, language = i + 1, line[3:].strip()
        elif line.startswith("<!--"):
            marker, follows = line, False
        elif line.strip():
            marker, follows = "", False
    assert start < 0, f"line {start}: the block is not closed"
    return found


def run_blocks(text: str, name: str) -> list[tuple[Block | None, str]]:
    """Run the python blocks; return the output of each, with the text block that shows it."""
    namespace: dict[str, Any] = {"__name__": name}
    found: list[tuple[Block | None, str]] = []
    before = ""
    code = [""] * len(text.splitlines())  # the document as one program: what is no code is blank
    for block in blocks(text):
        if block.language == "python":
            code[block.line - 1 : block.line - 1 + block.text.count("\n")] = block.text.splitlines()
    linecache.cache[name] = (len(text), None, [line + "\n" for line in code], name)
    for block in blocks(text):
        if block.language == "python":
            source = "\n" * (block.line - 1) + block.text  # so that a traceback has the document's own lines
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(source, name, "exec", dont_inherit=True), namespace)  # no `annotations` of this file
            found.append((None, out.getvalue()))
        elif block.language == "text" and block.follows and before == "python":
            found[-1] = (block, found[-1][1])
        before = block.language
    return found


# Lines of the page, temporary folders, digits that rounding changes; seconds, and their shares.
VARYING = re.compile(r"(?<=\.md:)\d+|/tmp/tmp\w+|(?<=largest relative error )\d[^)]*|(?<=largest error )\d[\d.e-]*"
                     r"|(?<=\d\.\d{4})\d+")  # fmt: skip
SECONDS = re.compile(r"\d[\d.,]* (?:ns|us|ms|s)\b|\d+%")


def is_shown(output: str, block: Block) -> bool:
    """Return whether a block shows an output, but for numbers that vary."""
    return _comparable(output) == _comparable(block.text)


def _comparable(text: str) -> list[str]:
    """Return the lines of a text without the numbers that vary; where it has seconds, without columns and order."""
    lines = VARYING.sub("#", _stripped(text)).splitlines()
    if not SECONDS.search(text):
        return lines
    return sorted(" ".join(SECONDS.sub("#", line).split()) for line in lines)


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines()) + "\n"


def regenerate(page: Path) -> None:
    """Write the outputs of a page into its text blocks, where they differ."""
    lines = page.read_text().splitlines()
    for block, output in reversed(run_blocks(page.read_text(), page.name)):
        if block and not is_shown(output, block):
            lines[block.line - 1 : block.line - 1 + block.text.count("\n")] = _stripped(output).splitlines()
    page.write_text("\n".join(lines) + "\n")


# They train or plan models, as the tests of their parts do.
SLOW = ("fine-tuning.md", "hugging-face.md", "any-module.md", "planning.md", "custom-layer.md", "large-heads.md",
        "training-script.md", "from-accelerate.md", "architectures.md", "pipelines.md")  # fmt: skip


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # by peft, of transformers
@pytest.mark.parametrize("page", [pytest.param(page, id=page.name, marks=[pytest.mark.slow] * (page.name in SLOW))
                                  for page in PAGES])  # fmt: skip
def test_page_runs_and_prints_what_it_shows(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block, output in run_blocks(page.read_text(), page.name):
        assert not block or is_shown(output, block), (
            f"{page.name}, line {block.line}: it prints\n{output}and not\n{block.text}"
            f"fix: if that is right, python -m tests.e2e.test_docs {page.name}"
        )


def test_pages_draw_the_same_numbers_in_every_process() -> None:
    for page in PAGES:
        code = "\n".join(b.text for b in blocks(page.read_text()) if b.language == "python")
        found = re.findall(r"torch\.(?:rand\w*|normal|bernoulli|multinomial)\(|time\.|os\.getpid", code)
        assert not found, page.name


def test_links_exist() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
        assert not [link for link in links if not (page.parent / link).exists()], page.name


def test_every_page_is_linked_from_another_one() -> None:
    for page in PAGES[1:]:
        others = [p.read_text() for p in [*PAGES, ROOT / "CONTRIBUTING.md"] if p != page]
        assert any(re.search(rf"\]\((docs/)?{re.escape(page.name)}\)", text) for text in others), page.name


def test_readme_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 170


def test_readme_names_one_command_to_install_and_one_to_test() -> None:
    marked = {name: [b for b in blocks(README.read_text()) if b.marker == f"<!-- {name} -->"] for name in COMMANDS}
    for name, found in marked.items():
        assert len(found) == 1, f"{len(found)} blocks after a line <!-- {name} -->"
        assert found[0].language in ("sh", "bash")
        for line in found[0].text.splitlines():
            words = shlex.split(line, comments=True)
            if "install" in words:  # torch in the same command, or pip takes whatever build it likes
                assert any(w.startswith("torch==") for w in words), line
    assert re.search(r"\bpytest\b", marked["test"][0].text)


TEXT = """a
<!-- test -->
```sh
ls
```

```python
x = 1
print(x, 'b')
```

```text
1 b
```
b
```text
free
```
"""


def test_blocks_have_a_language_a_marker_and_a_line() -> None:
    assert [(b.language, b.marker, b.line, b.follows) for b in blocks(TEXT)] == [
        ("sh", "<!-- test -->", 4, False),
        ("python", "", 8, True),
        ("text", "", 13, True),
        ("text", "", 17, False),
    ]
    ((block, output),) = run_blocks(TEXT, "t")
    assert (block.line, output) == (13, "1 b\n")
    with pytest.raises(AssertionError, match="not closed"):
        blocks("```python\n")


@pytest.mark.parametrize(
    ("block", "output", "is_same"),
    [
        ("loss 2.79", "loss 2.79\n\n", True),
        ("loss 2.79", "loss 2.80", False),
        ("loss ...", "loss 2.80", False),
        ("largest error ...", "largest error 0.3", False),
        ("a.md:12 in f", "a.md:7 in f", True),
        ("a.md:12 in f", "a.md:12 in g", False),
        ("12.5 ms of 1,024 s", "0.3 us of 7 s", True),
        (" 61%  2.71 ms  f\n  9%   805 us  g", "55%  805 us  g\n45%  800 us  f", True),
        (" 61%  2.71 ms  f\n  9%   805 us  g", "55%  805 us  g\n45%  800 us  h", False),
        ("b\na", "a\nb", False),
        ("1.00761079788208", "1.00762", True),
        ("1.00761079788208", "1.00771", False),
        ("/tmp/tmpfk2cblcq/step_3", "/tmp/tmpabc/step_3", True),
        ("12.5 GiB", "12.6 GiB", False),
        ("(largest relative error 3e-16)", "(largest relative error 0)", True),
        ("largest error 0.25", "largest error 0.3", True),
        ("P(..., 'x')", "P(..., 'y')", False),
    ],
)
def test_numbers_that_vary_are_not_compared(block: str, output: str, is_same: bool) -> None:
    assert is_shown(output, Block("text", block + "\n", 1, "", True)) is is_same


# --- pictures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_picture_is_up_to_date(name: str) -> None:
    drawn = pictures.PICTURES[name]().svg()
    assert (pictures.FOLDER / f"{name}.svg").read_text() == drawn, "python -m docs.pictures draws it anew"


def test_every_picture_is_drawn_and_every_collective_is_in_the_gallery() -> None:
    assert {file.stem for file in pictures.FOLDER.iterdir()} == set(pictures.PICTURES)
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    assert not [name for name in pictures.COLLECTIVES if f"(pictures/{name}.svg)" not in gallery]
    drawn = {e.code.partition("(")[0].removeprefix("fs.") for e in pictures.COLLECTIVES.values()}
    of_numbers = {"axis_position", "axis_size", "global_shape", "local_range"}
    assert drawn == {f.__name__ for f in vars(fs).values() if inspect.isfunction(f)
                     and f.__module__ == "fshard.collectives"} - of_numbers  # fmt: skip


# --- docstrings ---------------------------------------------------------------------------------------------

MLP = """
params = fs.materialize({"up": fs.init.normal((64, 256)), "down": fs.init.normal((256, 64))},
                        {"up": fs.column("model"), "down": fs.row("model")}, mesh, key=fs.key(0))
"""
SAVED = """
specs = {"up": fs.column("model"), "down": fs.row("model")}
init = lambda: {"up": fs.init.normal((64, 256)), "down": fs.init.normal((256, 64))}
params = fs.materialize(init(), specs, mesh, key=fs.key(0))
for step in (25, 50):
    fs.checkpoint.save("out", {"params": params, "key": fs.key(0), "step": step}, step=step)
"""
LOCAL_MLP = """
params = {"up": torch.ones(8, 4), "down": torch.ones(4, 8)}
x = torch.ones(2, 3, 8)
"""
SCANNED = """
block = lambda p, x: x + torch.relu(x @ p["up"]) @ p["down"]
params, specs = {"h": [params, params]}, {"h": fs.P()}
"""
VOCABULARY = """
v = 12565 if fs.axis_index("model") < 3 else 12562
ids = torch.ones(2, 3, dtype=torch.int64)
"""
IMAGES = """
key, step = fs.key(0), 3
images, labels = np.zeros((500, 3, 32, 32), np.float32), np.zeros(500, int)
"""
PHOTOS = """
import PIL.Image
for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
    os.makedirs("photos/" + name[:3], exist_ok=True)
    PIL.Image.new("RGB", (12, 10)).save("photos/" + name)
"""
GPT2 = """
gpt2 = fs.models.gpt2
cfg = gpt2.Config(32, 8, 16, 1, 4)
gpt2.save("my-gpt2", cfg, fs.device_get(fs.materialize(gpt2.init(cfg), P(), mesh, key=fs.key(0))))
"""
GENERATOR = """
from transformers import GPT2Config, GPT2LMHeadModel
config = GPT2Config(vocab_size=31, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
"""
HEADS = """
from fshard.models import heads
cfg = heads.Config(fs.models.gpt2.Config(32, 8, 16, 1, 4), "sequence", pad_token_id=0)
params = fs.device_get(fs.materialize(heads.init(cfg), P(), fs.make_mesh(one=1), key=fs.key(0)))
ids = torch.ones(2, 4, dtype=torch.int64)
heads.save("my-classifier", cfg, params)
"""
PLANNED = """
step = shard_map(lambda x: psum((x @ x.T).sum(), "data"), mesh=make_mesh(data=4), in_specs=(P("data"),), out_specs=P())
args = (fs.init.zeros((8, 3)),)
plan = fs.plan(step, *args, device=fs.devices.H100)
"""
RESNET = """
resnet = fs.models.resnet
cfg = resnet.Config(3, 4, (8,), (1,), num_labels=8)
"""
RESNET_LOCAL = (
    RESNET
    + """
layout = resnet.Layout("data", "model")
init = lambda described: fs.tree.map(lambda d: torch.full(d.shape, 0.1, dtype=d.dtype), described)
params, state = init(resnet.init(cfg)), init(resnet.state(cfg))
params["fc"] = fs.tree.map(lambda x: fs.pslice(x, "model"), params["fc"])
x = fs.random.normal(fs.key(1), (4, 3, 32, 32), spec=P("data"))
y = fs.pslice(torch.tensor([0, 5, 7, 2]), "data")
"""
)
ADAPTERS = (
    GPT2
    + """
params, config = gpt2.init(cfg), fs.lora.Config(("c_attn",), rank=2)
adapters = fs.materialize(fs.lora.init(config, params, of=gpt2.theirs), P(), mesh, key=fs.key(0))
fs.peft.save("my-adapters", config, adapters, params, of=gpt2.theirs)
"""
)
WRAPPED = """
import peft, warnings
from transformers import AutoModel, LlamaConfig
warnings.simplefilter("ignore")
base = LlamaConfig(vocab_size=31, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
config = peft.LoraConfig(target_modules=["q_proj", "v_proj"])
peft.get_peft_model(AutoModel.from_config(base), config).save_pretrained("my-adapters")
"""
CHAIN = """
specs = {"w": P()}
params, grads = {"w": torch.zeros(1)}, {"w": torch.tensor([2.7183])}
state = fs.optim.chain(fs.optim.clip_by_global_norm(1.0, specs), fs.optim.adamw(3e-4)).init(params)
"""
CLASSIFIER = """
opt = fs.optim.sgd(0.1, momentum=0.9)
params = {"w": fs.random.normal(fs.key(0), (40, 8), spec=P("model")), "up": fs.random.normal(fs.key(1), (5, 8))}
state, targets = opt.init(params), torch.arange(6)
x = fs.random.normal(fs.key(2), (6, 5))
"""
SAMPLED = """
opt = fs.optim.sgd(0.1, momentum=0.9)
params = {"w": fs.random.normal(fs.key(0), (40, 8), spec=P("model"))}
state, targets = opt.init(params), torch.arange(3) + 3 * fs.axis_index("data")
x = fs.random.normal(fs.key(2), (6, 8), spec=P("data"))
"""
BATCH = """
x = y = torch.ones(8, 8)
loss_fn = lambda p, x, y: (x @ p["up"] @ p["down"] - y).square().mean()
"""

SMALL = {
    "bert": "32, 16, 1, 2, 32", "gpt2": "32, 8, 16, 1, 4", "gpt_neox": "32, 32, 1, 4, 24",
    "gptj": "vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=4, rotary_dim=4",
    "mistral": "32, 16, 24, 1, 4, 2", "mixtral": "32, 16, 24, 1, 4, 2", "qwen2": "32, 16, 24, 1, 4, 2",
    "llama": "32, 16, 24, 1, 4, 2",
    "qwen3_moe": "32, 16, 24, 1, 4, 2", "dots1": "32, 16, 24, 1, 4, 2", "qwen3": "32, 16, 24, 1, 4, 2, head_dim=8",
    "t5": "'t5', 32, 16, 4, 24, 1, 1, 2",
}  # fmt: skip


def model(name: str, *, saved: bool = False) -> str:
    """A small model of `fs.models`: its config, its parameters on one device and a batch of tokens; also a folder."""
    lines = [f"from fshard.models import {name}", f"cfg = {name}.Config({SMALL[name]})",
             f"params = fs.device_get(fs.materialize({name}.init(cfg), P(), fs.make_mesh(one=1), key=fs.key(0)))",
             "ids = torch.zeros(2, 4, dtype=torch.int64)"]  # fmt: skip
    return "\n".join([*lines, f"{name}.save('my-{name.replace('_', '-')}', cfg, params)"] if saved else lines)


RESNET_PLACED = (
    RESNET
    + """
weights = {"params": resnet.init(cfg), "state": resnet.state(cfg)}
weights = fs.device_get(fs.materialize(weights, P(), fs.make_mesh(one=1), key=fs.key(0)))
images = torch.ones(2, 3, 32, 32)
"""
)

YAML = 'from pathlib import Path; Path("fsdp.yaml").write_text("{distributed_type: FSDP, num_processes: 2}")'

# Code that runs before the examples of a docstring, by the name of the documented object.
SETUP = {
    "fshard.checkpoint.inspect": SAVED,
    "fshard.checkpoint.latest": SAVED,
    "fshard.checkpoint.loading.restore": SAVED,
    "fshard.checkpoint.saving.save": MLP,
    "fshard.checkpoint.steps": SAVED,
    "fshard.collectives.ppermute": "x = torch.ones(2)",
    "fshard.data.images.image_folder": PHOTOS,
    "fshard.data.loader.sampler": "from torch.utils.data import DataLoader",
    "fshard.data.placed_batch.load": IMAGES,
    "fshard.nn.loss.cross_entropy": VOCABULARY + "logits, targets = torch.zeros(2, 3, v), ids",
    "fshard.cli.inspecting.inspect": GPT2,
    "fshard.defer.generation.generate": GENERATOR,
    "fshard.interop.accelerate.settings.read": YAML,
    "fshard.interop.hf.folder.config_of": GPT2,
    "fshard.models.hf.load": GPT2,
    "fshard.models.hf.save": GPT2,
    "fshard.models.hf.weights": GPT2,
    "fshard.interop.hf.weights.read": GPT2,
    "fshard.interop.hf.weights.tensors": GPT2,
    "fshard.interop.peft.adapters.load": ADAPTERS,
    "fshard.interop.peft.adapters.save": ADAPTERS,
    "fshard.interop.peft.wrapped.save_module": WRAPPED
    + """
apply, module = fs.defer(lambda: peft.get_peft_model(AutoModel.from_config(base), config))
params = fs.materialize(module, P(), mesh, key=fs.key(0))
""",
    "fshard.interop.peft.wrapped.weights": WRAPPED,
    "fshard.models.resnet.head_inputs": RESNET_LOCAL + 'x = fs.random.normal(fs.key(1), (4, 8), spec=P("data"))',
    "fshard.models.resnet.loss": RESNET_LOCAL,
    "fshard.models.stages.pipelined": """
cfg, ids = gpt2.Config(32, 8, 16, 1, 4), torch.arange(8).view(2, 4)
params = fs.device_get(fs.materialize(gpt2.init(cfg), P(), mesh, key=fs.key(0)))
""",
    "fshard.schedule.pipeline.pipelined": """
embed = lambda ends, b: b @ ends["w"]
layer = lambda p, h, b: h + torch.tanh(h @ p["w"])
head_loss = lambda ends, h, b: (h @ ends["w"].mT).square().mean()
layers = fs.pvary(torch.ones(5, 2, 2), "stage")
batch, params = torch.ones(4, 3), {"ends": {"w": torch.ones(3, 2)}, "layers": {"w": layers}}
""",
    "fshard.nn.sampled_classes.sample_classes": SAMPLED,
    "fshard.nn.margins.margin": CLASSIFIER,
    "fshard.nn.batch_norm.batch_norm": """
x = fs.random.normal(fs.key(1), (4, 3, 4, 4), spec=P("data"))
p = {"w": torch.ones(3), "b": torch.zeros(3)}
state = {"mean": torch.zeros(3), "var": torch.ones(3), "count": torch.tensor(0)}
""",
    "fshard.nn.convolution.conv2d": """
x, params = torch.ones(2, 3, 5, 5), {"w": torch.ones(2, 3, 3, 3), "b": torch.ones(2)}
""",
    "fshard.nn.layers.attention": "q = k = v = torch.ones(2, 3, 4, 8)\nkey = fs.key(0)",
    "fshard.nn.layers.dropout": "x, key, layer = torch.ones(2, 3, 4), fs.key(0), 2",
    "fshard.nn.layers.embedding": VOCABULARY + 'params = {"wte": torch.ones(v, 4)}',
    "fshard.nn.layers.linear": LOCAL_MLP,
    "fshard.nn.layers.mlp": LOCAL_MLP,
    "fshard.nn.ranking.accuracy": VOCABULARY + "logits, targets = torch.zeros(2, 3, v), ids",
    "fshard.nn.ranking.top_k": VOCABULARY + "logits = torch.zeros(2, 3, v)",
    "fshard.optim.chain.chain": CHAIN,
    "fshard.reshard.device_get": MLP,
    "fshard.sharded.from_callback": "memory_map = np.zeros((8, 4), np.float32)",
    "fshard.optim.precision.Policy": LOCAL_MLP + 'apply = lambda p, x: x @ p["up"]',
    "fshard.grad.accumulate": LOCAL_MLP + BATCH,
    "fshard.schedule.scan.scan": LOCAL_MLP + SCANNED,
    "fshard.schedule.remat.remat": LOCAL_MLP + 'h = x\nblock = lambda p, h: torch.relu(h @ p["up"]) @ p["down"]',
}
OF_MODELS = {
    "bert": "apply embed follows init logits loss pooled", "mixtral": "losses specs",
    "t5": "apply decode encode generate init loss",
}  # fmt: skip
for _name, _keys in OF_MODELS.items():
    SETUP |= {f"fshard.models.{_name}.{key}": model(_name) for key in _keys.split()}
_MADE = "fshard.models.hf_files.file_functions.<locals>"
SETUP |= {f"{_MADE}.{key}": model("gpt2", saved=True) for key in ("config", "load", "save")}
SETUP |= {f"fshard.models.leaves.{key}_of.<locals>.{key}": model("gpt2") for key in ("init", "specs")}
MADE = ("decoder_of.apply", "decoder_of.states", "functions_of.generate", "functions_of.loss")
SETUP |= {f"fshard.models.transformer.{key.replace('.', '.<locals>.')}": model("gpt2") for key in MADE}
SETUP |= {f"fshard.models.resnet.{key}": RESNET_PLACED for key in ("apply", "features", "save")}
SETUP |= {f"fshard.models.heads.{key}": HEADS for key in ["apply", "config", "embed", "load", "loss", "save", "specs"]}
SETUP |= {
    f"fshard.planning.{key}": PLANNED
    for key in ("events.Operation", "events.Start", "events.Wait", "memory.Memory", "roofline.Roofline",
                "roofline.Span", "roofline.roofline", "table.PlanRow", "table.PlanTable", "trace.Trace")
}  # fmt: skip
SETUP |= {
    "fshard.checkpoint.manifest.Saved": SAVED,
    "fshard.data.images.ImageFolder": PHOTOS,
    "fshard.data.loader.batches": "from torch.utils.data import DataLoader",
    "fshard.models.kv_cache.Cache": model("gpt2"),
}
SETUP |= {f"fshard.nn.zigzag.{key}_zigzag": "ids = torch.arange(4)[None]" for key in ("to", "from")}
SETUP |= {
    f"fshard.nn.{key}": "q = k = v = torch.ones(2, 4, 6, 8)"
    for key in ("context.context_attention", "flash.attention_lse")
}
MESHES = {
    **{
        f"fshard.nn.{key}": fs.make_mesh(seq=2)
        for key in ("context.context_attention", "zigzag.to_zigzag", "zigzag.from_zigzag", "zigzag.zigzag_positions")
    },
    "fshard.collectives.ppermute": fs.make_mesh(stage=4),
    "fshard.law.verify.verify": fs.make_mesh(data=2, model=2),
    "fshard.schedule.pipeline.pipelined": fs.make_mesh(stage=2),
}


def public() -> dict[str, Any]:
    """The functions and classes in the `__all__` of fshard and of its namespaces, by the name of their definition."""
    values = [value for _, module in build.namespaces() for _, value in build.names(module)]
    defined = [value for value in values if inspect.isroutine(value) or inspect.isclass(value)]
    return {f"{value.__module__}.{value.__qualname__}": value for value in defined}


def documented() -> dict[str, tuple[Any, doctest.DocTest]]:
    """Every docstring with examples: name -> (module, examples)."""
    found = {}
    finder = doctest.DocTestFinder()
    names = [m.name for m in pkgutil.walk_packages(fs.__path__, "fshard.") if not m.name.endswith("__main__")]
    for name in ("fshard", *names):
        module = importlib.import_module(name)
        found |= {t.name: (module, t) for t in finder.find(module, name) if t.examples}
    for name, value in public().items():
        if name not in found and name.startswith("fshard."):  # that a function made: the `loss` of a model
            module = importlib.import_module(value.__module__)
            found |= {t.name: (module, t) for t in finder.find(value, name, module) if t.examples and t.name == name}
    return found


DOCUMENTED = documented()


def namespace(module: Any) -> dict[str, Any]:
    names: dict[str, Any] = {key: getattr(fs, key) for key in fs.__all__}
    package = importlib.import_module(module.__name__.rpartition(".")[0] or module.__name__)
    names |= vars(package) | vars(module) | {"torch": torch, "np": np, "fs": fs, "P": fs.P}
    return {key: value for key, value in names.items() if not key.startswith("__")}


_compiling = threading.Lock()


@functools.cache
def _compiled(source: str) -> tuple[CodeType, CodeType]:
    body = ast.parse(source, "<example>")
    last = body.body.pop().value if body.body and isinstance(body.body[-1], ast.Expr) else ast.Constant(None)
    expression = ast.fix_missing_locations(ast.Expression(last))
    return compile(body, "<example>", "exec"), compile(expression, "<example>", "eval")


def compiled(source: str) -> tuple[CodeType, CodeType]:
    """All but a last expression, and that one. By one thread at a time: CPython 3.11's parser allows no more."""
    with _compiling:
        return _compiled(source)


def session(name: str, mesh: fs.Mesh) -> list[str]:
    """Run the examples of a docstring in order; return the output of each."""
    module, test = DOCUMENTED[name]
    screen = io.StringIO()
    # Ranks are threads, and sys.stdout is all of theirs: so each session has a print of its own.
    names = namespace(module) | {"mesh": mesh, "print": functools.partial(print, file=screen)}
    for code in compiled(SETUP.get(name, "")):
        exec(code, names)
    outputs = []
    for example in test.examples:
        screen.seek(0)
        screen.truncate()
        statements, expression = compiled(example.source)
        try:
            with contextlib.nullcontext() if in_region() else contextlib.redirect_stdout(screen):  # of `fs.print`
                exec(statements, names)
                value = eval(expression, names)
            outputs.append(screen.getvalue() + ("" if value is None else repr(value)))
        except fs.ShardingError as e:
            if example.exc_msg is None:
                raise
            outputs.append(f"{type(e).__name__}: {e}")
    return outputs


def session_in_a_region(name: str, mesh: fs.Mesh) -> list[str]:
    outputs: dict[int, list[str]] = {}

    def on_each_rank() -> None:
        outputs[region().rank] = session(name, mesh)

    fs.shard_map(on_each_rank, mesh=mesh, out_specs=fs.P())()
    return outputs[0]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_example_has_the_output_it_shows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mesh = MESHES.get(name) or fs.make_mesh(data=2, model=4)
    try:
        outputs = session(name, mesh)
    except fs.ShardingError as e:
        if "called outside shard_map" not in str(e):
            raise
        outputs = session_in_a_region(name, mesh)
    for example, got in zip(DOCUMENTED[name][1].examples, outputs, strict=True):
        want = example.exc_msg or example.want
        assert not want.strip() or matches(want, got), f"{name}: >>> {example.source}shows\n{got}\nand not\n{want}"


def matches(want: str, got: str) -> bool:
    """Return whether an output is the one of a docstring, in which `...` is for any text."""
    return doctest.OutputChecker().check_output(_stripped(want), _stripped(got), doctest.ELLIPSIS)


def test_every_public_name_has_an_example_that_runs() -> None:
    lacking = sorted(name for name in public() if name.startswith("fshard.") and name not in DOCUMENTED)
    assert not lacking, f"no >>> in the docstrings of {lacking}"
    assert len(public()) > 200
    assert "fshard.optim.optimizers.adamw" in public()


RAISES = re.compile(r"raise (?:fail|must_be|ShardingError)\b|raise_all\(")


def test_every_public_function_that_raises_says_so() -> None:
    silent = []
    for name, value in public().items():
        if name.startswith("fshard.") and inspect.isfunction(value):
            body = inspect.getsource(inspect.unwrap(value)).split('"""', 2)[-1]
            if RAISES.search(body) and not re.search("[Rr]aise|error|refuse", value.__doc__ or ""):
                silent.append(name)
    assert not silent, f"no errors in the docstrings of {silent}"


def test_every_setup_belongs_to_an_example() -> None:
    assert not (set(SETUP) | set(MESHES)) - set(DOCUMENTED)


def test_wrong_docstring_example_fails() -> None:
    test = doctest.DocTestParser().get_doctest(">>> psum(1 + axis_index('data'), 'data')\n4", {}, "wrong", None, 0)
    DOCUMENTED["wrong"] = fs.collectives, test
    try:
        assert session_in_a_region("wrong", fs.make_mesh(data=2)) == ["tensor(3)"]
    finally:
        del DOCUMENTED["wrong"]
    assert not matches("4", "tensor(3)")
    assert matches("tensor(...)", "tensor(3)")


# --- the site -----------------------------------------------------------------------------------------------

DOCSTRING = """Sum `x[i]` over an axis: x [B, D]{V} -> [B]{I}, *always*.

    [B, D]{V} -> [B, D]{I}     cost: 2(n-1)/n bytes

Args:
    axis, size: <names>
        of axes

>>> psum(1, "data")
2

Raises ShardingError.
"""
MARKDOWN = """Sum `x[i]` over an axis: x `[B, D]{V}` -> `[B]{I}`, \\*always\\*.

    [B, D]{V} -> [B, D]{I}     cost: 2(n-1)/n bytes


**Args:**

- `axis, size`: &lt;names>
  of axes


```pycon
>>> psum(1, "data")
2
```

Raises ShardingError."""


def test_reference_shows_shapes_arguments_and_examples() -> None:
    assert build.markdown(DOCSTRING) == MARKDOWN
    assert build.signature(fs.psum, "fs.psum") == "fs.psum(x: T, axis: Axis) -> T"
    assert build.signature(fs.optim.adamw, "adamw").splitlines()[:3] == [
        "adamw(", "    lr: float | Schedule,", "    *,"]  # fmt: skip


def test_reference_has_every_name_once_that_a_notebook_completes_or_a_page_uses() -> None:
    entries = re.findall(r"\{ #(fs\.[\w.]+) \}", "\n".join(build.reference().values()))
    assert len(set(entries)) == len(entries)
    known = {*entries, *(name for name, _ in build.namespaces()), "fs.__version__"}
    completed = {f"fs.{name}" for name in dir(fs)} - {"fs.interop"}  # which has namespaces, and no names
    used = {name for page in PAGES for name in re.findall(r"\bfs\.\w+(?:\.\w+)*", page.read_text())}
    models = {name for page in PAGES for name in re.findall(r"from fshard\.models import (\w+)", page.read_text())}
    used |= {f"fs.models.{name}" for name in models}
    lacking = [name for name in sorted(completed | used) if name not in known and not _begins_with_one(name, entries)]
    assert not lacking, f"not in the API reference: {lacking}"
    assert {"fs.devices.H100", "fs.plot.memory"} <= used


def _begins_with_one(name: str, entries: list[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:n]) in entries for n in range(2, len(parts)))


def test_site_has_the_pages_that_others_link_to() -> None:
    pages = build.pages()
    assert {"README.md", "docs/the-law.md", "examples/index.md", "notebooks/1-shard-a-matrix.ipynb.md"} <= set(pages)
    assert "(examples/index.md)" in pages["README.md"]
    assert "(notebooks/1-shard-a-matrix.ipynb.md)" in pages["README.md"]
    assert "<table" in pages["notebooks/1-shard-a-matrix.ipynb.md"]
    named_by_path = [
        f"{name}: {link[0]}" for name, text in pages.items() for link in build.NAMED_BY_PATH.finditer(text)
    ]
    assert not named_by_path  # but by their titles
    menu = str(build.menu(pages | build.reference()))
    assert not [page for page in pages if f"'{page}'" not in menu]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
        for name in sys.argv[1:]:
            regenerate(README if name == README.name else ROOT / "docs" / name)
