"""Write docs/architectures.md: the architectures of `zoo_cases.py` through fshard, each compared with itself in torch.

    python -m tests.defer.zoo                      the classes that the page lacks
    python -m tests.defer.zoo all                  all classes
    python -m tests.defer.zoo GPT2LMHeadModel ...  these classes

The page is written after each class, so a run that was interrupted continues. `measure` has the checks: an
architecture that fails one is printed with its error, and is not on the page.
"""

from __future__ import annotations

import copy
import os
import re
import sys
import textwrap
import traceback
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn

import fshard as fs
from fshard import P
from fshard.defer import Apply
from tests.defer.test_defer import check_distribution
from tests.defer.zoo_cases import CASES, FAMILIES, REFUSED, Case
from tests.lib.assertions import assert_same

TABLE = Path(__file__).parents[2] / "docs" / "architectures.md"
ONE, TWO, FOUR = fs.make_mesh(data=1), fs.make_mesh(data=2), fs.make_mesh(data=2, model=2)
MANY = fs.make_mesh(kind="abstract", data=4)
LEAVES = 40_000  # of all architectures: the level of the comparison of distributions

# The FSDP gradient on two ranks is compared with that of the whole batch on one, which sums the same numbers in other
# orders: matrix products of 4 examples instead of 2, sums over the batch instead of sums of two halves. That differs by
# a few units of rounding (1e-7) of the largest number in each sum, and most rows by less than 1e-6 of the largest
# gradient in the leaf. Norms of nearly constant rows and steep softmaxes amplify it, up to 1e-4 in the table. A leaf
# whose gradients nearly cancel is compared on the scale of the whole gradient, 1e-3 of its largest number.
TOLERANCE, CANCELLED = 1e-3, 1e-3


@dataclass(frozen=True)
class Row:
    """Results of an architecture; errors are 0.0 for equal bits, else relative to the largest number."""

    model: str
    forward: float
    gradient: float  # against torch's autograd on each rank's examples, summed over ranks
    batch: float | None  # against torch's autograd on the whole batch; None if the module mixes the examples of a batch
    check: str  # of the same step, on a mesh without ranks: "yes", or the reason why not


def measure(case: Case) -> Row:
    """Record, materialize, run and differentiate an architecture. Raises AssertionError for a difference."""
    module = eager(case)
    units = list(case.units) or unit_classes(module)
    apply, tree = fs.defer(case.construct, units=units)
    values = fs.device_get(fs.materialize(tree, P(), ONE, key=fs.key(0)))

    # 1. Names and initial values: those of the constructor, and on four ranks the same as on one.
    check_leaves(apply, tree, module)
    check_distribution(tree, values, module, LEAVES)
    both = fs.fully_shard(fs.fully_shard(P(), tree, axis="model"), tree, axis="data")
    placed = fs.tree.leaves_with_path(fs.materialize(tree, both, FOUR, key=fs.key(0)))
    for (path, leaf), x in zip(placed, fs.tree.leaves(values), strict=True):
        for rank, shard in zip(FOUR.ranks, leaf.shards, strict=True):
            assert_same(shard, x[leaf.box(rank)], f"{path} {leaf.spec}, rank {rank}")

    # 2. The same numbers in torch's module: all values, with noise in the parameters, since zeros and ones hide errors.
    values["params"] = {k: moved(x) for k, x in values["params"].items()}
    with torch.no_grad():
        for kind, named in (("params", module.named_parameters()), ("buffers", module.named_buffers())):
            for name, x in named:
                x.copy_(values[kind][name])
    batch, others = case.arguments(module)
    halves = [by_autograd(module, {k: x.chunk(2)[i] for k, x in batch.items()} | others, 0.5) for i in range(2)]
    expected = [torch.cat(xs) for xs in zip(*(h[0] for h in halves), strict=True)]
    summed = {k: x + halves[1][1][k] for k, x in halves[0][1].items()}
    dense, whole = by_autograd(module, batch | others, 1.0)
    scale = max(float(x.abs().max()) for x in whole.values() if x.numel())
    assert scale > 0
    assert all(torch.isfinite(x).all() for x in (*expected, *whole.values()))

    # 3. Forward and gradient on two ranks: leaves gathered whole, and by units.
    forward = gradient = error = 0.0
    placed = fs.device_put(values["params"], fully_sharded(tree), TWO)
    for by_units in (False, True) if units else (False,):
        step = train_step(apply, tree, by_units, others)
        out, grads = fs.device_get(step(placed, values["buffers"], batch))
        forward = max(forward, *(difference(a, b) for a, b in zip(out, expected, strict=True)))
        gradient = max(gradient, *(difference(grads[k], summed[k]) for k in summed))
        error = max(error, *(difference(grads[k], whole[k], CANCELLED * scale) for k in whole))
    assert forward <= TOLERANCE, f"forward differs by {forward:.1g}"
    assert gradient <= TOLERANCE, f"gradient differs from the sum over ranks by {gradient:.1g}"
    mixes = any(a.shape == b.shape and difference(a, b) > TOLERANCE for a, b in zip(expected, dense, strict=True))
    assert mixes == case.mixes, "one example's output depends on the others" if mixes else "it does not mix examples"
    assert mixes or error <= TOLERANCE, f"gradient differs from that of the whole batch by {error:.1g}"
    same = None if mixes else error
    return Row(case.model, forward, gradient, same, checked(step, tree, batch))


def fully_sharded(tree: Any) -> Any:
    return fs.fully_shard(P(), tree["params"], axis="data")


def train_step(apply: Any, tree: Any, by_units: bool, others: Mapping[str, Any]) -> Any:
    """Return the function (params, buffers, batch) -> (outputs, gradients of all parameters) on two ranks."""
    specs, shapes = fully_sharded(tree), tree["params"]

    @fs.shard_map(mesh=TWO, in_specs=(specs, P(), P("data")), out_specs=(P("data"), specs))
    def step(params, buffers, batch):
        def loss(trained):
            shards = {**params, **trained}
            if by_units:
                out = apply.unshard(specs, "data", shapes=shapes)(shards, buffers, **batch, **others)
            else:
                shards = fs.unshard(shards, specs, "data", shapes=shapes)
                out = apply(shards, fs.unshard(buffers, P(), "data"), **batch, **others)
            out = float_outputs(out)
            return fs.pmean(loss_of(out), "data"), out

        frozen = {k: torch.zeros_like(params[k]) for k in apply.frozen}
        (_, out), grads = fs.value_and_grad(loss, has_aux=True)({k: x for k, x in params.items() if k not in frozen})
        return out, {**grads, **frozen}

    return step


def checked(step: Any, tree: Any, batch: Any) -> str:
    """Return "yes" if `fs.check` accepts the step on a larger mesh, from shapes alone; else the reason."""
    try:
        fs.check(step.on(MANY), tree["params"], tree["buffers"], batch)
    except fs.ShardingError as e:
        if "needs the value of a tensor" not in str(e):
            raise
        return "reads values"
    except RuntimeError as e:  # torch._grouped_mm computes float32, but has its shapes in bfloat16 only
        if "Expected inputs of BF16" not in str(e):
            raise
        half = {k: replace(x, dtype=torch.bfloat16) for k, x in tree["params"].items()}
        try:
            fs.check(step.on(MANY), half, tree["buffers"], batch)
        except RuntimeError:  # a module that is not written for bfloat16
            return "no"
        return "in bf16"
    return "yes"


def eager(case: Case) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return case.construct()


def check_leaves(apply: Apply, tree: Any, module: nn.Module) -> None:
    """Assert that names, ties, buffers that are not persistent and frozen leaves are those of the module."""
    names = {n for n, _ in module.named_parameters(remove_duplicate=False)}
    assert names == {*tree["params"], *(n for n in apply.ties if n in names)}
    assert apply.frozen == {n for n, x in module.named_parameters() if not x.requires_grad}
    transient = set(tree["buffers"]) - set(module.state_dict())
    assert transient <= apply.transient
    assert not apply.transient & set(module.state_dict())


def unit_classes(module: nn.Module) -> list[str]:
    """Return the classes that transformers does not split over devices, else the largest one that lists repeat."""
    known = {type(m).__name__ for m in module.modules()} - {type(module).__name__}
    if own := sorted(known & set(getattr(module, "_no_split_modules", None) or ())):
        return own
    lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    listed = [x for m in lists for x in m if isinstance(x, nn.Module) and not isinstance(x, nn.ModuleList)]
    blocks = [x for x in listed if len(list(x.modules())) > 1]
    often, sizes = Counter(type(x).__name__ for x in blocks), Counter[str]()
    for x in blocks:
        if often[type(x).__name__] > 1:
            sizes[type(x).__name__] += sum(p.numel() for p in x.parameters())
    return [max(sizes, key=sizes.__getitem__)] if any(sizes.values()) else []


def moved(x: Tensor) -> Tensor:
    return x + 0.02 * torch.randn(x.shape, generator=torch.Generator().manual_seed(x.numel())).to(x.dtype)


def float_outputs(out: Any) -> list[Tensor]:
    """Return the floating tensors of a module's result that depend on its parameters, but caches."""
    if isinstance(out, Tensor):
        return [out] if out.is_floating_point() and out.requires_grad and out.ndim else []
    if isinstance(out, Mapping):
        # logits_per_image compares every image with every text of a batch: on a mesh, all-gather the embeddings first
        out = [x for k, x in out.items() if not any(word in k for word in ("past_key", "cache", "logits_per_"))]
    return [t for x in out for t in float_outputs(x)] if isinstance(out, (list, tuple)) else []


def loss_of(outputs: Sequence[Tensor]) -> Tensor:
    return torch.stack([(x.float() - 1).square().mean() for x in outputs]).sum()


def by_autograd(module: nn.Module, inputs: Mapping[str, Any], scale: float) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the outputs, and the gradients of `scale` times the loss: zeros for frozen and unused parameters."""
    module = copy.deepcopy(module)  # forward may keep tensors in it
    out = float_outputs(module(**inputs))
    trained = {k: x for k, x in module.named_parameters() if x.requires_grad}
    grads = torch.autograd.grad(loss_of(out) * scale, list(trained.values()), allow_unused=True)
    found = {k: g for k, g in zip(trained, grads, strict=True) if g is not None}
    return [x.detach() for x in out], {k: torch.zeros_like(x) for k, x in module.named_parameters()} | found


def difference(x: Tensor, y: Tensor, least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest number of `y`, or to `least` if that is larger."""
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    return 0.0 if torch.equal(x, y) else float((x - y).abs().max()) / max(float(y.abs().max()), least)


# --- the page -------------------------------------------------------------------------------------------------

HEAD = """# Architectures

`fs.defer` records the classes of this page, of transformers and diffusers, without changes to their code:

```python
import fshard as fs
from transformers import Qwen3Config, Qwen3ForCausalLM

config = Qwen3Config(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
                     num_key_value_heads=1, head_dim=8)
apply, module = fs.defer(lambda: Qwen3ForCausalLM(config).eval(), units=Qwen3ForCausalLM._no_split_modules)
print(len(module["params"]), "parameters, gathered in", list(apply.units))
```

```text
25 parameters, gathered in ['model.layers.0', 'model.layers.1']
```

Units are the submodules that FSDP gathers one by one ([Any module](any-module.md#units)). A class of transformers names
them in `_no_split_modules`. For other classes take the class that its lists of blocks repeat.

For each class, made small, fshard gives the same bits as torch:

- *Initial values* on a mesh of data=2, model=2, sharded over both axes, equal the values on one device. Names, ties,
  constants and the distributions of draws are the constructor's.
- *Forward* in eval mode on data=2, fully sharded, equals the module's outputs for each rank's examples. Caches are not
  compared, and neither is `logits_per_image`, which compares each image of a batch with each text: on a mesh,
  all-gather the embeddings first.
- *The gradient* of all parameters equals the sum of torch's gradients for each rank's examples, both if all leaves are
  gathered at once and if they are gathered by units.

Remarks in brackets name the exceptions:

- *rounding*: the gradient of the full batch on one device sums the same numbers in another order. It differs by at most
  1e-5 of the largest number in each leaf, or by the number in the remark.
- *mixes examples*: an example's output depends on the other examples of its batch, in torch too.
- *check in bf16*: `fs.check` needs a bfloat16 model, since torch knows the shapes of grouped products only there.
- *no check*: `fs.check` cannot run the step from shapes, because the module reads values of tensors to choose what it
  computes, or does not run in bfloat16.

All classes were measured with torch 2.13, transformers 5.23 and diffusers 0.42. `python -m tests.defer.zoo all`
measures them and writes this page. Inputs and sizes are in `tests/defer/zoo_cases.py`.
"""
REFUSALS = """
## Refused, and the way out

Forward draws from torch's generator, also in eval mode, so the answer would depend on the mesh. The error names the
line.

"""
CHECKS = {"in bf16": "check in bf16", "reads values": "no check: reads values", "no": "no check"}
ROUNDING = 1e-5  # up to which a row has no remark


def item(row: Row) -> str:
    """Return a class with its remarks."""
    remarks = [f"{what} differs by {e:.0e}" for what, e in (("forward", row.forward), ("gradient", row.gradient)) if e]
    if row.batch is None:
        remarks.append("mixes examples")
    elif row.batch > ROUNDING:
        remarks.append(f"rounding {row.batch:.0e}")
    if row.check != "yes":
        remarks.append(CHECKS[row.check])
    return f"`{row.model}`" + f" ({'; '.join(remarks)})" * bool(remarks)


def page(items: Mapping[str, str], refusals: Mapping[str, Sequence[str]]) -> str:
    """Return the page of the classes, in the order of the list of cases."""
    text = HEAD
    for family, cases in FAMILIES.items():
        done = ", ".join(items[c.model] for c in cases if c.model in items)
        text += f"\n## {family}\n\n{textwrap.fill(done, 120, break_on_hyphens=False)}\n"
    return text + REFUSALS + "".join("- {} ({}): pass {}\n".format(*refusals[m]) for m in REFUSED if m in refusals)


def read_page() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return the items of the page and the parts of its refusals, by class."""
    text = TABLE.read_text() if TABLE.exists() else ""
    listed = " ".join(text.partition(f"## {next(iter(FAMILIES))}")[2].partition("## Refused")[0].split())
    refused = [list(x) for x in re.findall(r"^- (`.*) \((.*)\): pass (.*)$", text, flags=re.MULTILINE)]
    return {x[1]: x[0] for x in re.finditer(r"`(\w+)`( \([^)]*\))?", listed)}, {x[0].split("`")[1]: x for x in refused}


def refusal(model: str) -> list[str]:
    """Return the class, the draw and the way out of an architecture. Raises AssertionError if it is not refused."""
    case, arguments, way_out = REFUSED[model]
    try:
        measure(case)
    except fs.ShardingError as e:
        place, error = str(e).splitlines()[0].split(": ", 1)
        draws, _, _ = error.partition(" draws from torch's")
        return [f"`{model}`, {arguments}", f"{draws}, in `{place.split(' in ')[1]}`", way_out]
    raise AssertionError(f"{model} runs")


def main(names: Sequence[str]) -> int:
    import transformers

    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows, refusals = read_page()
    every, failed = names == ["all"], 0
    for model, case in CASES.items():
        if every or model in names or not (names or model in rows):
            try:
                rows[model] = item(measure(case))
                print(rows[model], flush=True)
            except Exception as e:
                failed += 1
                rows.pop(model, None)
                print(f"{model}: {type(e).__name__}: {e}\n  {traceback.extract_tb(e.__traceback__)[-1]}", flush=True)
            TABLE.write_text(page(rows, refusals))
    TABLE.write_text(page(rows, {m: refusal(m) for m in REFUSED}))
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
