"""Small models of transformers with PEFT's adapters, and the same as trees of fshard."""

from __future__ import annotations

import re
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fshard as fs
from fshard.models import bert, t5
from tests.lib import model_cases as cases


def base_model(name):
    """The module of `fs.models`, and a small model of transformers in which every leaf matters."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "bert":
        config = transformers.BertConfig(
            vocab_size=37, hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=29,
            max_position_embeddings=16, initializer_range=0.2,
        )  # fmt: skip
        return bert, cases.randomize_vectors(transformers.BertForMaskedLM(config))
    if name == "t5":
        config = transformers.T5Config(
            vocab_size=61, d_model=24, d_kv=5, d_ff=34, num_layers=2, num_decoder_layers=1, num_heads=3,
            relative_attention_num_buckets=8, relative_attention_max_distance=6, dropout_rate=0.0,
            decoder_start_token_id=3, pad_token_id=3, eos_token_id=None, initializer_factor=0.6,
        )  # fmt: skip
        return t5, cases.randomize_vectors(transformers.T5ForConditionalGeneration(config))
    return cases.DECODERS[name].module, cases.hugging_face(name)


_made = {}


def pair(name, dtype=torch.float32, **options):
    """PEFT's model, and our config, described parameters, lora config and adapters (full tensors) of it.

    `options` are those of `lora.Config`; both factors are drawn, so that the adapters matter.
    """
    key = repr((name, dtype, options))
    if key not in _made:
        _made[key] = make_pair(name, dtype, options)
    return _made[key]


def make_pair(name, dtype, options):
    peft = pytest.importorskip("peft")
    module, base = base_model(name)
    with tempfile.TemporaryDirectory() as place:
        cfg, described = module.load(cases.saved(base.to(dtype), Path(place)))
        params = fs.device_get(fs.materialize(described, fs.P(), fs.make_mesh(**cases.ONE), key=fs.key(0)))
    lora = fs.lora.Config(**{"init": "random", **options})
    torch.manual_seed(1)
    with warnings.catch_warnings(action="ignore"):  # PEFT calls functions that transformers has deprecated
        theirs = peft.get_peft_model(base, peft_config(lora, name)).eval()
    with torch.no_grad():
        for n, p in theirs.named_parameters():
            if "magnitude" in n:
                p.mul_(1 + 0.3 * torch.rand_like(p))
    return SimpleNamespace(name=name, module=module, cfg=cfg, params=params, lora=lora, theirs=theirs,
                           adapters=read_adapters(module, cfg, lora, theirs.state_dict()))  # fmt: skip


def peft_config(lora, name):
    import peft

    return peft.LoraConfig(
        r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets if isinstance(lora.targets, str) else
        list(lora.targets), lora_dropout=lora.dropout, use_rslora=lora.rslora, use_dora=lora.dora, bias=lora.bias,
        modules_to_save=list(lora.modules_to_save) or None, rank_pattern=dict(lora.ranks),
        alpha_pattern=dict(lora.alphas), init_lora_weights=False, fan_in_fan_out=name == "gpt2",
        exclude_modules=lora.exclude if isinstance(lora.exclude, str) else list(lora.exclude) or None,
    )  # fmt: skip


def read_adapters(module, cfg, lora, state, adapter="default"):
    """The tensors of PEFT as our tree."""
    out = {}
    described = module.init(cfg)
    leaves = {fs.tree.dotted(path): (path, x) for path, x in fs.tree.leaves_with_path(described)}
    for name, own in fs.lora.init(lora, described, of=module.theirs).items():
        path, x = leaves[name]
        file = module.theirs(path)
        prefix = f"base_model.model.{file.name.rpartition('.')[0]}"
        if "value" in own:
            part = file.name.rpartition(".")[2]
            keys = [f"{prefix}.modules_to_save.{adapter}.{part}", f"{prefix}.base_layer.{part}", f"{prefix}.{part}"]
            stored = next(state[k] for k in keys if k in state)
            out[name] = {"value": to_leaf(stored, file.dims, x.shape)}
            continue
        if f"{prefix}.lora_embedding_A.{adapter}" in state:
            out[name] = {"a": state[f"{prefix}.lora_embedding_A.{adapter}"].T,
                         "b": state[f"{prefix}.lora_embedding_B.{adapter}"].T}  # fmt: skip
        else:
            a, b = (state[f"{prefix}.lora_{letter}.{adapter}.weight"] for letter in "AB")
            r = len(a)
            inputs, outputs = own["a"].shape[:-1], own["b"].shape[1:]
            out[name] = {"a": a.T.reshape(*inputs, r), "b": outputs_of(b.T, file.dims, outputs)}
        magnitude = f"{prefix}.lora_magnitude_vector.{adapter}"
        for key in (magnitude, f"{magnitude}.weight"):
            if key in state:
                out[name]["magnitude"] = outputs_of(state[key][None], file.dims, own["b"].shape[1:])[0]
        out[name] = {part: t.detach().clone() for part, t in out[name].items()}
    return out


def outputs_of(x, dims, shape):
    """[n, out] -> [n, *out], where the file's outputs are in the order of the pattern."""
    if len(shape) == 1:
        return x.reshape(len(x), *shape)
    left, right = dims.split("->")
    order = right.split()[-len(shape) :]  # names of the outputs in the leaf
    stored = re.search(r"\(([^)]*)\)", left).group(1).split()
    sizes = dict(zip(order, shape, strict=True))
    return x.reshape(len(x), *[sizes[n] for n in stored]).permute(0, *[1 + stored.index(n) for n in order]).contiguous()


def to_leaf(x, dims, shape):
    if dims is None:
        return x.clone()
    left, right = (side.strip() for side in dims.split("->"))
    stored = re.findall(r"\w+", left)
    order = right.split()
    sizes = dict(zip(order, shape, strict=True))
    return x.reshape([sizes[n] for n in stored]).permute([stored.index(n) for n in order]).contiguous()


def batch(case):
    """ids, targets: the next tokens; of T5 others."""
    size = case.cfg.vocab_size
    ids = cases.tokens(size)
    if case.module is t5:
        return ids, cases.tokens(size, t=7, seed=1)
    return ids, torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)


def peft_results(case):
    """The logits, the loss, and the gradients of the adapters, by PEFT."""
    ids, targets = batch(case)
    case.theirs.zero_grad()
    own = {"decoder_input_ids": t5.shifted(case.cfg, targets)} if case.module is t5 else {}
    logits = case.theirs(input_ids=ids, **own).logits
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    loss.backward()
    state = {n: p.grad for n, p in case.theirs.named_parameters() if p.grad is not None}
    return logits.detach(), loss.detach(), read_adapters(case.module, case.cfg, case.lora, state)


def our_results(case, layout, *, adapter_specs=None, remat=False, dtype=None, again=False, **options):
    """The logits, the loss, and the gradients of the adapters on a mesh, as full tensors.

    With `again`, those of a second call, which nothing checks.
    """
    module, lora, (ids, targets) = case.module, case.lora, batch(case)
    mesh, specs, split, p = cases.placed(module, case.cfg, case.params, layout)
    of = module.theirs
    if adapter_specs is None:
        adapter_specs = fs.lora.specs(lora, case.params, specs, of=of)
    placed = fs.device_put(case.adapters, adapter_specs, mesh)
    split = replace(split, dtype=dtype)
    rows = fs.P("data", None, "model")

    @fs.shard_map(mesh=mesh, in_specs=(specs, adapter_specs, fs.P("data"), fs.P("data")),
                  out_specs=(rows, fs.P(), adapter_specs), check=cases.check_of(layout))  # fmt: skip
    def run(p, adapters, ids, targets):
        def adapted(adapters):
            return fs.lora.apply(lora, p, adapters, of=of, specs=specs, adapter_specs=adapter_specs, data="data",
                                 model="model", **options)  # fmt: skip

        def loss(adapters):
            return module.loss(case.cfg, adapted(adapters), ids, targets, layout=split, specs=specs, remat=remat)

        value, grads = fs.value_and_grad(loss)(adapters)
        own = (t5.shifted(case.cfg, targets),) if module is t5 else ()
        logits = (module.logits if module is bert else module.apply)(case.cfg, adapted(adapters), ids, *own,
                                                                     layout=split, specs=specs)  # fmt: skip
        return logits, value, grads

    if again:
        run(p, placed, ids, targets)
    return fs.device_get(run(p, placed, ids, targets))


def add_second(case, weight, **options):
    """A second adapter of PEFT's model, active with the first: (its config, its tensors). The weights are of both."""
    import peft

    second = fs.lora.Config(**{"init": "random", **options})
    if "second" not in case.theirs.peft_config:
        torch.manual_seed(2)
        with warnings.catch_warnings(action="ignore"):
            case.theirs.add_adapter("second", peft_config(second, case.name))
        case.theirs.base_model.set_adapter(["default", "second"])
        for module in case.theirs.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer) and "second" in module.scaling:
                module.set_scale("second", weight)
    state = case.theirs.state_dict()
    return second, read_adapters(case.module, case.cfg, second, state, "second")
