"""A module as a pure function: models of Hugging Face train on meshes, and calls share no state."""

from __future__ import annotations

import copy
import functools
import os
import threading

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import fshard as fs
from fshard import P, ShardingError
from fshard.defer.functional_module import Apply
from tests.lib.assertions import error_text

os.environ["HF_HUB_OFFLINE"] = "1"

B, T, V = 6, 7, 61
SMALL = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2}
LM = {**SMALL, "vocab_size": V, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
HEADS = {**SMALL, "num_attention_heads": 3, "num_labels": 3}
DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def ids(t=T, seed=0):
    return torch.randint(0, V, (B, t), generator=torch.Generator().manual_seed(seed))


def pixels():
    return torch.randn(B, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def attention_mask_of_rows():
    """An attention mask with rows of 7, 6, 5 and 4 tokens."""
    return (torch.arange(T) < torch.tensor([[T - i % 4] for i in range(B)])).long()


def text(**more):
    return {"input_ids": ids(), "labels": ids(), **more}


def classes(**inputs):
    return {**inputs, "labels": torch.arange(B) % 3}


def seq2seq():
    return {"input_ids": ids(), "attention_mask": attention_mask_of_rows(), "labels": ids(5, seed=1)}


# name -> (class, config, inputs)
MODELS = {
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": V, "n_positions": 12, "n_embd": 24, "n_layer": 2, "n_head": 3,
                                 "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0,
                                 "eos_token_id": 0}, text),
    "llama": ("LlamaForCausalLM", LM, text),
    "bert": ("BertForSequenceClassification", {**HEADS, **DRY, "vocab_size": V, "max_position_embeddings": 16},
             lambda: classes(input_ids=ids(), attention_mask=attention_mask_of_rows())),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": V, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2,
                                          "num_heads": 3, "dropout_rate": 0.0, "decoder_start_token_id": 0}, seq2seq),
    "vit": ("ViTForImageClassification", {**HEADS, **DRY, "image_size": 32, "patch_size": 8},
            lambda: classes(pixel_values=pixels())),
    "resnet": ("ResNetForImageClassification", {"embedding_size": 8, "hidden_sizes": [8, 12], "depths": [1, 2],
                                                "layer_type": "basic", "num_labels": 3},
               lambda: classes(pixel_values=pixels())),
    "mixtral": ("MixtralForCausalLM", {**LM, "num_local_experts": 4}, text),
    "mamba": ("MambaForCausalLM", {"vocab_size": V, "hidden_size": 24, "state_size": 4, "num_hidden_layers": 2,
                                   "time_step_rank": 3}, text),
}  # fmt: skip
LAYOUTS = {
    "one device": ({"data": 1}, False),
    "data parallel": ({"data": 2}, False),
    "fully sharded": ({"data": 2}, True),
    "fully sharded, uneven": ({"data": 3}, True),
}
EVERY_LAYOUT = ("gpt2", "resnet")
FAST = {"gpt2": ["fully sharded, uneven"], "resnet": ["fully sharded"], "mixtral": ["fully sharded"]}
OPTIMIZER = {"lr": 1e-3, "weight_decay": 0.1}
# Far above the rounding of a gradient that is zero in exact arithmetic (1e-9, see `close`): Adam divides by its size.
EPS = 1e-4


def hugging_face_model(cls, config):
    """A model of transformers, in training mode."""
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    cls = getattr(hf, cls)
    return cls(cls.config_class(**config))


def leaves(module):
    params = {n: p.detach().clone() for n, p in module.named_parameters()}
    return params, {n: b.clone() for n, b in module.named_buffers()}


def on_meta(module):
    """An Apply whose skeleton is on meta. `to` loses ties, so they are passed."""
    return Apply(copy.deepcopy(module).to("meta"), Apply(module).ties)


@functools.cache
def eager(name):
    """The Apply, leaves and inputs of a model, and torch's loss, gradients and parameters after 3 steps."""
    cls, config, inputs = MODELS[name]
    module = hugging_face_model(cls, config).train(name != "resnet")
    apply, start, batch = on_meta(module), leaves(module), inputs()
    opt = torch.optim.AdamW(module.parameters(), eps=EPS, **OPTIMIZER)
    first = None
    for _ in range(3):
        opt.zero_grad()
        loss = module(**batch).loss
        loss.backward()
        # an unused parameter has no gradient in torch, and a zero one here: AdamW would decay it only then
        for p in module.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        first = first or (loss.detach(), {n: p.grad.clone() for n, p in module.named_parameters()})
        opt.step()
    return apply, start, batch, *first, leaves(module)[0]


def close(result, expected, *, size=None, rtol=1e-5):
    """Assert equality to rounding. A gradient that is zero in exact arithmetic (of a key's bias, which softmax cancels)
    is the rounding of a sum of terms as large as other gradients: hence the tolerance of 1e-6 of the largest."""
    assert result.keys() == expected.keys()
    size = max(float(x.abs().max()) for x in expected.values()) if size is None else size
    for name, x in expected.items():
        torch.testing.assert_close(
            result[name], x, rtol=rtol, atol=1e-6 * size, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize(
    ("name", "layout"),
    [pytest.param(name, layout, id=f"{name}-{layout}",
                  marks=[pytest.mark.slow] * (layout not in FAST.get(name, [])))
     for name in MODELS for layout in LAYOUTS if layout != "one device" or name in EVERY_LAYOUT],
)  # fmt: skip
def test_hugging_face_model_trains_on_every_mesh_as_torch_on_the_whole_batch(name, layout):
    apply, (params, buffers), batch, expected_loss, expected_grads, expected_params = eager(name)
    sizes, sharded = LAYOUTS[layout]
    mesh = fs.make_mesh(**sizes)
    specs, buffer_specs = {n: P() for n in params}, {n: P() for n in buffers}
    if sharded:
        specs = fs.fully_shard(specs, params, axis="data")
        buffer_specs = fs.fully_shard(buffer_specs, buffers, axis="data")
    opt = fs.optim.adamw(OPTIMIZER["lr"], eps=EPS, weight_decay=OPTIMIZER["weight_decay"])
    opt_specs = opt.specs(specs)

    @fs.shard_map(mesh=mesh, in_specs=(specs, buffer_specs, opt_specs, P("data")),
                  out_specs=(P(), specs, specs, opt_specs), check="never")  # fmt: skip
    def step(p, b, state, batch):
        def loss_fn(p):
            whole = fs.unshard(p, specs, "data", shapes=params)
            out = apply(whole, fs.unshard(b, buffer_specs, "data", shapes=buffers), **batch)
            return fs.pmean(out.loss, "data")  # each rank has as many examples and targets

        loss, grads = fs.value_and_grad(loss_fn)(p)
        p, state = opt.update(grads, state, p)
        return loss, grads, p, state

    p, b = fs.device_put(params, specs, mesh), fs.device_put(buffers, buffer_specs, mesh)
    loss, grads, p, state = step(p, b, fs.device_put(opt.init(params), opt_specs, mesh), batch)
    torch.testing.assert_close(fs.device_get(loss), expected_loss, rtol=1e-5, atol=0.0)
    close(fs.device_get(grads), expected_grads)
    for _ in range(2):
        _, _, p, state = step(p, b, state, batch)
    close(fs.device_get(p), expected_params, size=1.0)


# --- shared modules, and tensors that hooks compute ---------------------------------------------------------------


class Twice(nn.Module):
    """A module under two names."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.alias = self.a
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.alias(self.a(x)))


def repeated():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer, Twice())


def of_lstm(f, *names):
    """An LSTM whose weights of these names a hook computes; it returns its output alone."""

    class Lstm(nn.LSTM):
        def forward(self, x):
            return super().forward(x.unflatten(1, (2, 2)))[0]

    return functools.reduce(f, names, Lstm(2, 4, batch_first=True))


SPECIAL = {
    "shared": repeated,
    "weight_norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.Tanh()),
    "weight_norm of a conv": lambda: nn.Sequential(nn.Unflatten(1, (4, 1)), nn.utils.weight_norm(nn.Conv1d(4, 3, 1))),
    "weight_norm of an LSTM": lambda: of_lstm(nn.utils.weight_norm, "weight_hh_l0", "weight_ih_l0"),
    "spectral_norm": lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Tanh()),
    "spectral_norm, parametrized": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh()),
    "prune": lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.4),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 3)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", SPECIAL)
def test_shared_modules_and_hooked_tensors_train_as_the_eager_module(name):
    module = SPECIAL[name]().double()
    apply, tree = fs.defer(SPECIAL[name])
    params, buffers = leaves(module)
    assert {kind: list(named) for kind, named in tree.items()} == {"params": list(params), "buffers": list(buffers)}
    specs, x = fs.fully_shard(P(), params, axis="data"), torch.randn(6, 4, dtype=torch.float64)
    apply = apply.batch_norm_over("data")

    @fs.shard_map(mesh=fs.make_mesh(data=3), in_specs=(specs, P(), P("data")), out_specs=(P(), specs, P()),
                  check="first" if name == "shared" else "never")  # fmt: skip
    def step(p, b, x):
        def loss_fn(p):
            out, new = apply.with_buffers(fs.unshard(p, specs, "data"), fs.pvary(b, "data"), x)
            return fs.pmean(out.sin().add(0.5).square().mean(), "data"), new

        (loss, new), grads = fs.value_and_grad(loss_fn, has_aux=True)(p)
        one = lambda b: fs.pmean(b, "data") if b.is_floating_point() else fs.pmax(b, "data")  # noqa: E731
        return loss, grads, fs.tree.map(one, new)

    loss, grads, new = fs.device_get(step(fs.device_put(params, specs, fs.make_mesh(data=3)), buffers, x))
    expected = module(x).sin().add(0.5).square().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    close(grads, {n: p.grad for n, p in module.named_parameters()})
    close(new, dict(module.named_buffers()), size=1.0)


def test_shared_module_has_a_tie_for_each_of_its_names():
    apply, tree = fs.defer(repeated)
    assert apply.ties == {"2.weight": "0.weight", "2.bias": "0.bias", "3.alias.weight": "3.a.weight",
                          "3.alias.bias": "3.a.bias"}  # fmt: skip
    assert [p.names for p in apply._places][:2] == [("0.weight", "2.weight"), ("0.bias", "2.bias")]
    assert len(apply._places) == sum(map(len, tree.values()))


def test_module_that_contains_itself_has_each_leaf_once():
    def cycle():
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        module[0].parent = module
        return module

    apply, tree = fs.defer(cycle)
    assert list(tree["params"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    module, x = cycle(), torch.randn(2, 4)
    params = {n: module.get_parameter(n) for n in tree["params"]}
    assert torch.equal(apply(params, {}, x), module(x))
    assert fs.defer(cycle, replace={"0": fs.nn.column_linear("model")})[0].specs["params"]["0.weight"] == P("model")


class InForward(nn.Module):
    """A forward that changes its parameters."""

    def __init__(self, change):
        super().__init__()
        self.emb, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.change = change

    def forward(self, x):
        self.change(self)
        return self.head(self.emb(x))


def tie(m):
    m.head.weight = m.emb.weight


def replace(m):
    m.head.weight = nn.Parameter(m.head.weight * 0.5)


def write(m):
    m.head.weight.data.clamp_(-0.5, 0.5)


def write_under_no_grad(m):
    with torch.no_grad():
        m.head.weight[1:].zero_()


def set_data(m):
    m.head.weight.data = m.head.weight.data * 0.5


CHANGES = {
    set_data: "Apply(InForward): forward writes to params['head.weight']: params.data = ...\n",
    tie: "Apply(InForward): forward assigns a tensor to the parameter 'weight'\n"
    "  parameters are plain tensors in a pure call, which torch does not register\n"
    "  fix: assign it in the constructor (self.head.weight = self.embedding.weight ties them there), not in forward",
    replace: "Apply(InForward): forward replaced parameters: head.weight\n"
    "  no gradient reaches the call's parameters, and the new ones are lost after it\n"
    "  fix: do it in the constructor; or compute a tensor and leave the parameter",
    write: "Apply(InForward): forward writes to params['head.weight']: aten.clamp_.default\n"
    "  a pure function leaves its arguments unchanged\n"
    "  fix: write in the train step, to the new parameters; or switch it off in the module's configuration; or "
    "apply.eval(), if it is done only in training",
    write_under_no_grad: "Apply(InForward): forward writes to params['head.weight']: aten.zero_.default\n",
}


@pytest.mark.parametrize("change", CHANGES)
def test_error_text_of_a_forward_that_changes_its_parameters(change):
    module = InForward(change)
    apply, (params, _) = Apply(module), leaves(module)
    before = copy.deepcopy(params)
    for call in (
        apply,
        lambda p, *args: fs.value_and_grad(lambda p: apply(fs.tree.map(torch.clone, p), *args).sum())(p),
    ):
        assert error_text(call, params, {}, torch.arange(3)).startswith(CHANGES[change])
    torch.testing.assert_close(params, before, rtol=0, atol=0)
    if change is replace:  # for values alone it is as good as eager
        with torch.no_grad():
            torch.testing.assert_close(apply(params, {}, torch.arange(3)), module(torch.arange(3)))


@pytest.mark.parametrize("reference", [None, 0])
def test_hook_on_the_gradient_of_a_parameter_is_an_error(reference):
    def hooked():
        module = nn.Linear(2, 2)
        module.weight.register_hook(lambda g: g * 2)
        return module

    text = error_text(fs.defer, hooked, reference=reference)
    assert text.startswith("defer: a hook on the gradient of a parameter would never be called\n")
    assert "    module.weight.register_hook(lambda g: g * 2)\n" in text
    assert text.endswith("fix: change the gradients that fs.value_and_grad returns")


# --- calls at the same time -----------------------------------------------------------------------------------


def free_copies(apply):
    """The copies of the module that no call uses, of all threads."""
    return [c for of_thread in apply._free_copies.values() for c in of_thread]


@pytest.mark.parametrize("name", ["llama", "mamba"])
def test_concurrent_calls_of_ranks_equal_sequential_calls(name):
    module = hugging_face_model(*MODELS[name][:2])
    params, buffers = leaves(module)
    apply, alone = on_meta(module), on_meta(module)
    each = {n: torch.stack([x * (1 + r / 10) for r in range(4)]) for n, x in params.items()}
    expected = torch.stack(
        [alone({n: x[r] for n, x in each.items()}, buffers, input_ids=ids()).logits for r in range(4)]
    )
    f = fs.shard_map(
        lambda p, b, x: apply({n: q[0] for n, q in p.items()}, fs.pvary(b, "data"), input_ids=x).logits[None],
        mesh=fs.make_mesh(data=4), in_specs=(P("data"), P(), P()), out_specs=P("data"), check="never",
    )  # fmt: skip
    for _ in range(8):
        assert torch.equal(fs.device_get(f(each, buffers, ids())), expected)
    assert len(free_copies(alone)) == 1
    modules = [c.module for c in free_copies(apply)]
    assert 1 <= len(modules) <= 4
    assert len({id(m) for m in [apply.module, *modules]}) == 1 + len(modules)


class References(nn.Module):
    """Module with cross references, bound methods, a tie, lists of tensors, and tensors that are not buffers."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2, bias=False)
        self.b.weight = self.a.weight
        self.path = [self.a, self.b]
        self.again = self.b.forward
        self.table = torch.arange(2.0)
        self.tables = {"t": [torch.ones(2)]}

    def forward(self, x):
        return self.again(self.path[0](x)) + self.table + self.tables["t"][0]


def test_copy_shares_tensors_and_has_its_own_structure():
    module = References()
    apply = Apply(module)
    assert apply.ties == {"b.weight": "a.weight"}
    params, _ = leaves(module)
    x = torch.randn(3, 2)
    torch.testing.assert_close(apply(params, {}, x), module(x))
    (free,) = free_copies(apply)
    own = free.module
    assert own is not module
    assert own.path == [own.a, own.b]
    assert own.again.__self__ is own.b
    assert own.table is module.table
    assert own.tables is not module.tables
    assert own.tables["t"][0] is module.tables["t"][0]
    assert own.a.weight is own.b.weight is not module.a.weight  # between calls a copy has no leaves


def test_tie_by_name_sets_both_parameters():
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    apply = Apply(module, {"1.weight": "0.weight"})
    w = torch.randn(2, 2)
    x = torch.randn(3, 2)
    torch.testing.assert_close(apply({"0.weight": w}, {}, x), x @ w.T @ w.T)


def test_exception_in_forward_discards_the_copy():
    class Fails(nn.Linear):
        def forward(self, x):
            if x.sum() > 0:
                self.bias = None
                raise RuntimeError("too large")
            return super().forward(x)

    module = Fails(2, 2)
    before = copy.deepcopy(module.state_dict())
    apply, (params, _) = Apply(module), leaves(module)
    changed = {n: x + 1 for n, x in params.items()}
    with pytest.raises(RuntimeError, match="too large"):
        apply(changed, {}, torch.ones(1, 2))
    assert not free_copies(apply)
    assert all(torch.equal(x, before[n]) for n, x in module.state_dict().items())
    torch.testing.assert_close(apply(params, {}, -torch.ones(1, 2)), module(-torch.ones(1, 2)))


def test_changes_of_forward_are_undone():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.log, self.by_name, self.names = 0, [], {"x": [0]}, set()

        def forward(self, x):
            self.calls += 1
            self.log.append(x)
            self.by_name["x"].append(self.calls)
            self.by_name["y"] = [1]
            self.names.add(self.calls)
            self.extra = nn.Linear(1, 1)
            self.register_forward_hook(lambda *_: None)
            return torch.tensor([self.calls, len(self.log), len(self.by_name["x"]), len(self._forward_hooks)])

    apply = Apply(Counts())
    result = [apply({}, {}, torch.ones(1)).tolist() for _ in range(3)]
    assert result == [[1, 1, 2, 1]] * 3
    (free,) = free_copies(apply)
    assert (free.module.calls, free.module.log, free.module.by_name, free.module.names) == (0, [], {"x": [0]}, set())
    assert not hasattr(free.module, "extra")
    assert len(free_copies(apply)) == 1


class Average(nn.Module):
    """As ema_pytorch's: made by a `__new__` with an argument, with which copy.deepcopy does not call it."""

    def __new__(cls, model):
        return super().__new__(cls)

    def __init__(self, model):
        super().__init__()
        unset, self.online, self.model = None, [model], copy.deepcopy(model)
        self.scale = lambda x: x if unset is None else x * unset

    def forward(self, x):
        return self.scale(self.model(x))


def test_module_with_a_new_of_its_own_is_copied():
    apply, tree = fs.defer(lambda: nn.Sequential(Average(nn.Linear(3, 2))))
    x, mesh = torch.ones(4, 3), fs.make_mesh(data=2)
    params = fs.device_get(fs.materialize(tree["params"], P(), mesh, key=fs.key(0)))
    run = fs.shard_map(lambda p, x: apply(p, {}, x), mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    assert torch.equal(fs.device_get(run(params, x)), F.linear(x, params["0.model.weight"], params["0.model.bias"]))


class Strided(nn.Module):
    """Parameters and a buffer that are not row-major."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 37).t())
        self.conv = nn.Conv2d(3, 37, 3).to(memory_format=torch.channels_last)
        self.register_buffer("b", torch.randn(37, 37).t())

    def forward(self, x):
        return self.conv(x).mean((2, 3)) @ self.w @ self.w.t() @ self.b


@pytest.mark.parametrize("units", [None, "Conv2d"])
def test_leaves_have_the_strides_that_the_constructor_gave_them(units):
    apply, tree = fs.defer(Strided, units=units, reference=0)
    torch.manual_seed(0)
    module, x, mesh = Strided(), torch.randn(4, 3, 9, 9), fs.make_mesh(data=2)
    specs = fs.fully_shard(P(), tree["params"], axis="data")
    params, buffers = (
        fs.materialize(tree[k], s, mesh, key=fs.key(0)) for k, s in (("params", specs), ("buffers", P()))
    )

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P("data")), out_specs=P("data"))
    def run(p, b, x):
        return apply.unshard(specs, "data", release=units is not None)(p, b, x)

    assert apply.orders == {"w": [1, 0], "conv.weight": [0, 2, 3, 1], "b": [1, 0]}
    expected = torch.cat([module(part) for part in x.chunk(2)])
    assert torch.equal(fs.device_get(run(params, buffers, x)), expected)


def test_error_text_of_a_module_that_cannot_be_copied():
    class Fixed(nn.Module):
        def __deepcopy__(self, memo):
            raise TypeError("this object cannot be copied")

        def forward(self, x):
            return x

    assert error_text(Apply(Fixed()), {}, {}, torch.ones(1)) == (
        "Fixed: cannot be copied, and each rank of a simulated mesh needs its own\n"
        "  TypeError: this object cannot be copied\n"
        "  fix: keep objects that copy.deepcopy refuses out of the module"
    )


# --- buffers --------------------------------------------------------------------------------------------------


def test_plain_call_that_changes_a_buffer_is_an_error():
    norm = nn.BatchNorm1d(2)
    apply, (params, buffers) = Apply(norm), leaves(norm)
    x = torch.randn(4, 2)
    for call in (apply, torch.func.grad(lambda *args: apply(*args).square().sum())):
        assert error_text(call, params, buffers, x) == (
            "Apply(BatchNorm1d): forward changed buffers, and a plain call returns none: num_batches_tracked\n"
            "  fix: out, buffers = apply.with_buffers(params, buffers, ...), or apply.eval()"
        )
    assert all(torch.equal(b, norm.state_dict()[n]) for n, b in buffers.items())
    assert apply.eval()(params, buffers, x).shape == (4, 2)
    assert apply.module.training  # eval returned another


def test_buffer_written_without_a_version_is_an_error():
    norm = nn.BatchNorm1d(2)
    norm.num_batches_tracked = None  # batch_norm writes running_mean without a new version
    apply, state = Apply(norm), leaves(norm)
    for _ in range(2):
        with pytest.raises(ShardingError, match="running_mean, running_var"):
            apply(*state, torch.randn(4, 2))


def test_buffer_whose_data_has_another_dtype_is_compared_by_its_values():
    class Casts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor([2.0, torch.nan]))

        def forward(self, x, change=0):
            self.scale.data = self.scale.data.to(x.dtype) + change
            return x * self.scale[0]

    apply, (_, buffers), x = Apply(Casts()), leaves(Casts()), torch.ones(2, dtype=torch.float64)
    assert "a plain call returns none: scale\n" in error_text(apply, {}, buffers, x, change=1)
    assert torch.equal(apply({}, buffers, x), 2 * x)


def test_buffer_that_changes_in_a_later_call_under_vmap_is_an_error():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.tensor(0.0))

        def forward(self, x, count):
            return x + (self.n.add_(1) if count else self.n)

    apply = Apply(Counts())
    many = {"n": torch.zeros(3)}
    call = lambda b, x, count: torch.func.vmap(lambda b, x: apply({}, b, x, count))(b, x)  # noqa: E731
    assert torch.equal(call(many, torch.ones(3), False), torch.ones(3))
    with pytest.raises(ShardingError, match=r"forward changed buffers.*: n"):
        call(many, torch.ones(3), True)
    assert torch.equal(many["n"], torch.zeros(3))


@pytest.mark.parametrize("in_region", [False, True])
def test_forward_that_changes_parameters_in_place_is_an_error(in_region):
    """An embedding that renormalizes its rows: a gathered copy on a mesh, and on one device the parameter."""
    apply = Apply(nn.Embedding(5, 3, max_norm=1.0))
    params, ids = {"weight": torch.full((5, 3), 2.0)}, torch.tensor([1, 2])
    call = lambda p, ids: fs.grad(lambda p: apply(p, {}, ids).sum())(p)  # noqa: E731
    if in_region:
        run = fs.shard_map(lambda p, ids: call(fs.unshard(p, P("a"), "a", shapes=params), ids),
                           mesh=fs.make_mesh(a=2), in_specs=(P("a"), P("a")), out_specs=P("a"))  # fmt: skip
    else:
        run = call
    start = "Apply(Embedding): forward writes to params['weight']: aten.embedding_renorm_.default\n"
    assert start in error_text(run, params, ids)


@pytest.mark.parametrize("under", ["plain", "grad", "vmap", "inference"])
def test_with_buffers_returns_the_buffers_of_the_module(under):
    norm = nn.BatchNorm1d(2, momentum=0.3)
    apply, (params, buffers) = Apply(norm), leaves(norm)
    x = torch.randn(4, 2) + 3
    norm(x)
    expected = dict(norm.named_buffers())
    if under == "plain":
        _, result = apply.with_buffers(params, buffers, x)
    elif under == "inference":
        with torch.inference_mode():
            _, result = apply.with_buffers(params, buffers, x)
    elif under == "grad":

        def loss(p):
            out, new = apply.with_buffers(p, buffers, x)
            return out.square().sum(), new

        (_, result), _ = fs.value_and_grad(loss, has_aux=True)(params)
    else:
        two = {n: torch.stack([b, b]) for n, b in buffers.items()}
        _, both = torch.func.vmap(apply.with_buffers, (None, 0, 0))(params, two, torch.stack([x, x]))
        result = {n: b[1] for n, b in both.items()}
    close(result, expected, size=1.0)
    assert int(buffers["num_batches_tracked"]) == 0
    assert torch.equal(buffers["running_mean"], torch.zeros(2))


def test_spectral_norm_and_instance_norm_update_their_buffers():
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4))
    instance = nn.InstanceNorm1d(3, track_running_stats=True)
    for module, x in ((spectral, torch.randn(2, 3)), (instance, torch.randn(2, 3, 5))):
        apply, state = Apply(copy.deepcopy(module)), leaves(module)
        with pytest.raises(ShardingError, match="forward changed buffers"):
            apply(*state, x)
        out, new = apply.with_buffers(*state, x)
        torch.testing.assert_close(out, module(x))
        close(new, dict(module.named_buffers()), size=1.0)


def rope(kind, **more):
    config = {**LM, "max_position_embeddings": 16 if kind == "longrope" else 5,
              "rope_parameters": {"rope_type": kind, "rope_theta": 100.0, "factor": 4.0, **more}}  # fmt: skip
    return hugging_face_model("LlamaForCausalLM", config)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_recomputed_frequencies_equal_those_of_a_new_module(kind):
    more = {"short_factor": [1.0] * 3, "long_factor": [2.0, 3.0, 4.0], "original_max_position_embeddings": 5}
    module = rope(kind, **(more if kind == "longrope" else {}))
    apply, (params, buffers) = Apply(copy.deepcopy(module)), leaves(module)
    before = {n: b.clone() for n, b in buffers.items()}
    assert apply.transient == set(buffers)
    for t in (3, 7, 3, 6):  # below and above 5 positions, where the frequencies change
        expected = copy.deepcopy(module)(input_ids=ids(t)).logits
        torch.testing.assert_close(apply(params, buffers, input_ids=ids(t)).logits, expected)
    assert all(torch.equal(b, before[n]) for n, b in buffers.items())


class CallsSuper(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x)


class WithActivation(nn.BatchNorm1d):
    """As BatchNormAct2d of timm."""

    def forward(self, x):
        rate = self.momentum
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
            rate = 1.0 / float(self.num_batches_tracked) if rate is None else rate
        own = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if own else (None, None)
        y = F.batch_norm(x, mean, var, self.weight, self.bias, self.training or mean is None, rate or 0.0, self.eps)
        return F.silu(y)


NORMS = {
    "BatchNorm1d": (nn.BatchNorm1d, (5, 3)),
    "BatchNorm1d of sequences": (nn.BatchNorm1d, (5, 3, 4)),
    "BatchNorm2d": (nn.BatchNorm2d, (5, 3, 2, 2)),
    "BatchNorm3d": (nn.BatchNorm3d, (5, 3, 2, 2, 1)),
    "SyncBatchNorm": (nn.SyncBatchNorm, (5, 3, 4)),
    "average of all batches": (functools.partial(nn.BatchNorm1d, momentum=None), (5, 3)),
    "subclass that calls super": (CallsSuper, (5, 3)),
    "subclass with a forward of its own": (functools.partial(WithActivation, momentum=0.3), (5, 3, 4)),
    "subclass without running statistics": (functools.partial(CallsSuper, track_running_stats=False), (5, 3)),
    "no running statistics": (functools.partial(nn.BatchNorm1d, track_running_stats=False), (5, 3)),
}


def run_norm(apply, module, mesh, x, *, check="never", steps=2):
    """Train steps of a batch norm: outputs, gradients and buffers, which are invariant."""
    params, buffers = leaves(module)

    @fs.shard_map(mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P("data"), P(), P()), check=check)
    def step(p, b, x):
        def loss_fn(p):
            out, new = apply.with_buffers(fs.pvary(p, "data"), b, x)
            return fs.psum((out * out.detach().sin()).sum(), "data"), (out, new)

        (_, (out, new)), grads = fs.value_and_grad(loss_fn, has_aux=True)(p)
        return out, grads, new

    for _ in range(steps):
        out, grads, buffers = fs.device_get(step(params, buffers, x))
    return out, grads, buffers


@pytest.mark.parametrize(("name", "ranks"), [("BatchNorm1d", 6), *((name, 2) for name in NORMS)])  # of 6, one is empty
def test_batch_norm_over_an_axis_equals_one_device(name, ranks):
    make, shape = NORMS[name]
    module, x = nn.Sequential(make(3)), fs.random.normal(fs.key(1), shape, mean=2.0)
    check = "first" if name in ("BatchNorm1d", "subclass with a forward of its own") else "never"
    got = run_norm(on_meta(module).batch_norm_over("data"), module, fs.make_mesh(data=ranks), x, check=check)
    one = copy.deepcopy(module)
    for _ in range(2):
        one.zero_grad()
        out = one(x)
        if out.requires_grad:
            (out * out.detach().sin()).sum().backward()
    expected = out.detach(), {n: p.grad for n, p in one.named_parameters()}, dict(one.named_buffers())
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NORMS)
def test_batch_norm_of_one_ranks_examples_is_an_error(name):
    make, shape = NORMS[name]
    module, x, mesh = nn.Sequential(nn.Identity(), make(3)), torch.randn(shape), fs.make_mesh(data=2)
    text = error_text(run_norm, on_meta(module), module, mesh, x, check="first")
    kind = type(module[1]).__name__
    assert text.startswith(f"Apply(Sequential): '1' is a {kind} in train mode\n")
    assert 'fix: apply = apply.batch_norm_over("data"): the statistics of all examples; or apply.eval(); or' in text
    apply, given = on_meta(module), fs.tree.map(lambda b: b.clone(), leaves(module))
    same = fs.shard_map(lambda p, b, x: apply.with_buffers(p, b, x)[0], mesh=mesh, in_specs=(P(), P(), P()),
                        out_specs=P())  # fmt: skip
    # Every rank has all examples.
    torch.testing.assert_close(fs.device_get(same(*given, x)), copy.deepcopy(module)(x).detach())
    module.eval()
    if module[1].running_mean is None:
        text = error_text(run_norm, on_meta(module), module, mesh, x, check="first")
        assert f"'1' is a {kind} without running statistics" in text
    else:
        torch.testing.assert_close(run_norm(on_meta(module), module, mesh, x)[0], module(x).detach())


@pytest.mark.parametrize("kind", ["BatchNorm1d", "SyncBatchNorm"])
def test_batch_norm_of_split_channels_equals_one_device(kind):
    module, x = nn.Sequential(getattr(nn, kind)(4)), fs.random.normal(fs.key(1), (6, 4), mean=2.0)
    mesh = fs.make_mesh(data=2, model=2)
    apply, (params, buffers) = on_meta(module), leaves(module)
    p_specs = {n: P("model") for n in params}
    b_specs = {n: P("model") if b.ndim else P() for n, b in buffers.items()}

    def run(apply, rows=None):
        def step(p, b, x):
            p = fs.unshard(p, P(), rows) if rows else p
            return apply.with_buffers(p, b, x)

        specs = (p_specs, b_specs, P(rows, "model"))
        out, new = fs.shard_map(step, mesh=mesh, in_specs=specs, out_specs=(specs[2], b_specs))(params, buffers, x)
        return fs.device_get(out), fs.device_get(new)

    one = nn.BatchNorm1d(4)
    expected = one(x).detach(), {f"0.{n}": b for n, b in one.named_buffers()}
    torch.testing.assert_close(run(apply), expected)
    assert "varies over 'data': the statistics" in error_text(run, apply, "data")
    torch.testing.assert_close(run(apply.batch_norm_over("data"), "data"), expected, rtol=1e-4, atol=1e-5)
    for axis in ("model", ("data", "model")):
        assert error_text(run, apply.batch_norm_over(axis), "data") == (
            f"Apply(Sequential): '0' is a {kind} in train mode whose leaves vary over 'model': "
            f"batch_norm_over({axis!r}) would take the mean over different channels\n"
            "  fix: leave that axis out: each rank has all examples of its channels; for no axis at all, leave out "
            "batch_norm_over"
        )


WRONG = {
    "dims": (nn.BatchNorm2d(3), (6, 3), r"expected 4D input \(got 2D input\)"),  # by torch
    "channels": (nn.BatchNorm1d(1), (6, 3), "it is a BatchNorm1d in train mode whose weight has 1 channels"),
    "one value": (nn.BatchNorm1d(3), (1, 3), "all ranks of 'data' together have one value of each channel"),
    "one value, no statistics": (nn.BatchNorm1d(3, track_running_stats=False), (1, 3), "have one value of each"),
}


@pytest.mark.parametrize("name", WRONG)
def test_batch_norm_over_an_axis_refuses_what_torch_refuses(name):
    module, shape, text = WRONG[name]
    with pytest.raises((ValueError, RuntimeError)):
        module(torch.ones(shape))
    for axis, ranks in (("data", 1), ("data", 2), (None, 2)):  # None: torch's own checks
        with pytest.raises((ValueError, RuntimeError, ShardingError), match=text if axis else None):
            run_norm(
                on_meta(module).batch_norm_over(axis), module, fs.make_mesh(data=ranks), torch.ones(shape), steps=1
            )


def test_norm_that_averages_all_batches_is_checked_without_data():
    module, x = nn.BatchNorm1d(3, momentum=None), torch.randn(4, 3)
    apply = Apply(module).batch_norm_over("data")
    f = fs.shard_map(lambda p, b, x: apply.with_buffers(p, b, x)[1], mesh=fs.make_mesh(data=2),
                     in_specs=(P(), P(), P("data")), out_specs=P())  # fmt: skip
    assert len(fs.check(f, *leaves(module), x).transfers) > 0
    assert apply.module.momentum is None


def test_batch_norm_over_none_without_a_count_of_batches_equals_torch():
    module, x = nn.BatchNorm1d(3, track_running_stats=False, momentum=None), torch.randn(4, 3)
    torch.testing.assert_close(Apply(module).batch_norm_over(None)(*leaves(module), x), module(x).detach())


def test_a_batch_norm_with_a_forward_of_its_own_and_instance_norms_run_as_they_are():
    class Own(nn.BatchNorm1d):
        def forward(self, x):
            return x + self.weight[:, None]

    for module in (Own(3), nn.InstanceNorm1d(3, affine=True)):
        x = torch.randn(4, 3, 5)
        for apply in (on_meta(module), on_meta(module).batch_norm_over("data")):
            result, *_ = run_norm(apply, module, fs.make_mesh(data=2), x)
            torch.testing.assert_close(result, copy.deepcopy(module)(x).detach())


def test_batch_norm_over_none_uses_the_statistics_of_each_rank():
    module, batch = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)), torch.randn(6, 4)
    apply, (params, buffers) = on_meta(module).batch_norm_over(None), leaves(module)
    ranks = [copy.deepcopy(module) for _ in range(2)]
    losses = [rank(half).square().mean() for rank, half in zip(ranks, batch.split(3), strict=True)]
    sum(losses).div(2).backward()
    expected_grads = {n: sum(r.get_parameter(n).grad for r in ranks) for n in params}
    expected = {n: sum(r.get_buffer(n).double() for r in ranks).div(2).to(b.dtype) for n, b in buffers.items()}

    @fs.shard_map(mesh=fs.make_mesh(data=2), in_specs=(P(), P(), P("data")), out_specs=P())
    def step(p, b, batch):
        def loss_fn(p):
            out, new = apply.with_buffers(fs.unshard(p, P(), "data"), fs.unshard(b, P(), "data"), batch)
            return fs.pmean(out.square().mean(), "data"), new

        (loss, new), grads = fs.value_and_grad(loss_fn, has_aux=True)(p)
        one = lambda b: fs.pmean(b, "data") if b.is_floating_point() else fs.pmax(b, "data")  # noqa: E731
        return loss, grads, fs.tree.map(one, new)

    loss, grads, new = fs.device_get(step(params, buffers, batch))
    torch.testing.assert_close(loss, sum(losses).detach() / 2)
    close(grads, expected_grads)
    close(new, expected, size=1.0)
    assert int(new["1.num_batches_tracked"]) == 1
    with pytest.raises(ShardingError, match="change with the mesh"):
        fs.verify(step, params, buffers, batch)


# --- modes ----------------------------------------------------------------------------------------------------


def test_train_and_eval_return_new_applies():
    module = nn.Dropout(0.5)
    apply = Apply(module)
    x = torch.ones(100)
    assert torch.equal(apply.eval()({}, {}, x), x)
    assert (apply.eval().train()({}, {}, x) == 0).any()
    assert module.training
    assert apply.train() is not apply


def test_gradient_checkpointing_is_refused():
    module = hugging_face_model("LlamaForCausalLM", LM)
    for m in module.modules():
        if hasattr(m, "gradient_checkpointing"):
            m.gradient_checkpointing = True
    apply, state = Apply(module), leaves(module)
    assert error_text(apply, *state, **text()) == (
        "Apply(LlamaForCausalLM): gradient checkpointing is on in 'model'\n"
        "  torch.utils.checkpoint would run a part of forward again in backward, when the module has no leaves\n"
        "  fix: switch checkpointing off in the module, and wrap the call in fs.remat; or choose units=, and "
        "apply.unshard(..., remat=True)"
    )
    assert apply.eval()(*state, **text()).loss.ndim == 0  # evaluation recomputes nothing


def test_remat_of_a_call_has_equal_gradients():
    module = hugging_face_model("LlamaForCausalLM", LM)
    apply, (params, buffers) = on_meta(module), leaves(module)
    loss = lambda p, b: apply(p, b, **text()).loss  # noqa: E731
    expected, result = torch.func.grad(loss)(params, buffers), torch.func.grad(fs.remat(loss))(params, buffers)
    close(result, expected)


# --- torch.utils.checkpoint ------------------------------------------------------------------------------------

REFUSED = "forward calls torch.utils.checkpoint\n"
ENDED = "Apply(Checkpointed): 'h.1.weight' is used by linear after forward has ended\n"


def save_products(ctx, op, *args, **kwargs):
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS = {  # ways to reach torch's checkpoint, of a list of modules
    "plain": lambda h, x: functools.reduce(lambda x, m: checkpoint(m, x, use_reentrant=False), h, x),
    "reentrant": lambda h, x: functools.reduce(lambda x, m: checkpoint(m, x, use_reentrant=True), h, x),
    "selective": lambda h, x: checkpoint(
        h, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(save_products)
    ),
    "sequential": lambda h, x: checkpoint_sequential(h, 2, x, use_reentrant=False),
    "nested": lambda h, x: checkpoint(
        lambda x: checkpoint(h[1], h[0](x), use_reentrant=False), x, use_reentrant=False
    ),
    "closure": lambda h, x: checkpoint(
        lambda x: h[1](F.linear(x, h[0].weight, h[0].bias)), x, use_reentrant=False, preserve_rng_state=False
    ),
}  # fmt: skip


class Checkpointed(nn.Module):
    def __init__(self, kind="plain"):
        super().__init__()
        self.kind, self.h = kind, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    def forward(self, x, on=True):
        return CHECKPOINTS[self.kind](self.h, x) if on else self.h(x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's, of a reentrant one
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_torch_checkpoint_in_forward_is_refused_at_its_call(kind):
    """Also where torch.func, which has no saved tensor hooks, would refuse it in words of its own."""
    apply, state = fs.defer(lambda: Checkpointed(kind))
    mesh, x = fs.make_mesh(data=2), torch.randn(4, 3)
    params = fs.materialize(state["params"], P(), mesh, key=fs.key(0))
    loss = lambda p, x: fs.pmean(apply(fs.pvary(p, "data"), {}, x).square().mean(), "data")  # noqa: E731
    one = fs.device_get(params)
    leaf = {n: w.clone().requires_grad_() for n, w in one.items()}
    # Where nothing is differentiated, nothing is recomputed. Such a call is the first.
    dense = Checkpointed()
    dense.load_state_dict(one)
    torch.testing.assert_close(apply(one, {}, x), dense.h(x))
    with torch.no_grad():
        torch.testing.assert_close(apply(leaf, {}, x), dense.h(x))
    for check in ("first", "never"):
        step = fs.shard_map(fs.grad(loss), mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check=check)
        assert REFUSED in (text := error_text(step, params, x))
        assert "test_functional_module.py:" in text
        assert text.endswith("fix: switch checkpointing off in the module, and wrap the call in fs.remat; or choose "
                             "units=, and apply.unshard(..., remat=True)")  # fmt: skip
    of_func = torch.func.grad(lambda p: apply(p, {}, x).square().mean())
    assert REFUSED in error_text(of_func, one)
    assert REFUSED in error_text(apply, leaf, {}, x)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_torch_checkpoint_in_a_later_call_is_refused_in_backward(kind):
    """The first call is watched, and later ones are not: then a module that no call uses has no leaves."""
    apply, state = fs.defer(lambda: Checkpointed(kind))
    params = fs.device_get(fs.materialize(state["params"], P(), fs.make_mesh(data=1), key=fs.key(0)))
    x = torch.randn(4, 3, requires_grad=True)  # which a reentrant one needs
    leaf = {n: w.clone().requires_grad_() for n, w in params.items()}
    apply(leaf, {}, x, on=False).sum().backward()
    dense = Checkpointed()
    dense.load_state_dict(params)
    dense.h(x).sum().backward()
    close({n: w.grad for n, w in leaf.items()}, {n: w.grad for n, w in dense.named_parameters()})
    y = apply(leaf, {}, x)
    apply({n: 2 * w for n, w in leaf.items()}, {}, x)  # of other leaves, by the same copy
    text = error_text(y.sum().backward)
    assert text == ENDED.replace("h.1.", "h.0." if kind not in ("plain", "reentrant") else "h.1.") + (
        "  a module has the leaves of a call while its forward runs; torch.utils.checkpoint, and an adjoint "
        "method, run a part of it again in backward\n"
        "  fix: switch checkpointing off in the module, and wrap the call in fs.remat; or choose units=, and "
        "apply.unshard(..., remat=True)"
    )


def test_recomputation_on_one_rank_never_sees_the_leaves_of_another():
    """While rank 1 is in forward, rank 0 is in backward: it may not run with the copy that rank 1 uses."""
    first, second = threading.Event(), threading.Event()

    class Waits(Checkpointed):
        def forward(self, x, wait, on=True):
            if wait:  # in forward until rank 0 has recomputed
                first.set()
                assert second.wait(600)
            return super().forward(x, on)

    apply = Apply(Waits().to("meta"))
    p = {n: torch.ones(w.shape, requires_grad=True) for n, w in apply.module.named_parameters()}
    apply(p, {}, torch.ones(1, 3), False, on=False)
    y = apply(p, {}, torch.ones(1, 3), False)
    other = threading.Thread(target=apply, args=({n: 2 * w.detach() for n, w in p.items()}, {}, torch.ones(1, 3), True))
    other.start()
    assert first.wait(600)
    try:
        assert ENDED[20:] in error_text(y.sum().backward)
    finally:
        second.set()
        other.join()


def test_checkpoint_around_a_call_has_equal_gradients():
    """It passes the leaves again."""
    apply, x = Apply(Checkpointed().to("meta")), torch.randn(4, 3)
    dense = Checkpointed()
    p = {n: w.detach().clone().requires_grad_() for n, w in dense.named_parameters()}
    checkpoint(lambda p, x: apply(p, {}, x, on=False), p, x, use_reentrant=False).sum().backward()
    dense.h(x).sum().backward()
    close({n: w.grad for n, w in p.items()}, {n: w.grad for n, w in dense.named_parameters()})


def test_hook_that_reads_a_leaf_in_backward_is_refused():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x):
            y = x * self.scale
            y.register_hook(lambda g: g * self.scale)
            return y

    p = {"scale": torch.ones(3, requires_grad=True)}
    assert "'scale' is used by mul after forward has ended" in error_text(
        Apply(Scales())(p, {}, torch.ones(3)).sum().backward
    )


@pytest.mark.slow
def test_apply_compiles_without_graph_breaks():
    shared = nn.Linear(4, 4)
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), shared, nn.Tanh(), shared)
    apply, (params, buffers) = Apply(module), leaves(module)
    x = torch.randn(5, 3)

    def step(p, b, x):
        def loss(p):
            out, new = apply.with_buffers(p, b, x)
            return out.pow(3).sum(), new

        return fs.value_and_grad(loss, has_aux=True)(p)

    (loss, new), grads = torch.compile(step, fullgraph=True, backend="aot_eager")(params, buffers, x)
    (expected_loss, expected_buffers), expected_grads = step(params, buffers, x)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-6)
    close(new, expected_buffers, size=1.0)
    close(grads, expected_grads)
    assert int(buffers["1.num_batches_tracked"]) == 0


def test_recurrent_module_uses_the_passed_weights():
    module = nn.LSTM(3, 4, 2)
    apply, (params, buffers) = on_meta(module), leaves(module)
    x = torch.randn(5, 2, 3)
    result = torch.func.grad(lambda p: apply(p, buffers, x)[0].square().sum())(params)
    module(x)[0].square().sum().backward()
    close(result, {n: p.grad for n, p in module.named_parameters()})


def test_frozen_names_parameters_without_gradient():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    assert Apply(module).frozen == {"bias"}


# --- errors ---------------------------------------------------------------------------------------------------


def test_error_lists_every_leaf_that_does_not_fit():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
    module[1].weight = module[0].weight
    _, buffers = leaves(module)
    params = {"0.weight": torch.ones(2), "1.weight": torch.ones(2, 2), "1.bias": [0.0], "3": {"bias": torch.ones(2)}}
    params["2.running_mean"] = buffers.pop("2.running_mean")
    name = "Apply(Sequential)"
    assert error_text(Apply(module), params, buffers, torch.ones(1, 2)) == (
        "8 problems\n"
        f"{name}: buffers['2.running_mean'] is missing\n"
        f"{name}: params['0.bias'] is missing\n"
        f"{name}: params['0.weight'] has 1 dims, not 2\n"
        "  argument  f32[2]    module  f32[2, 2]\n"
        f"{name}: params['1.bias'] is a list, not a tensor\n"
        "  fix: call it inside shard_map, where leaves are tensors\n"
        f"{name}: params['1.weight'] is not a leaf of the module\n"
        "  fix: leave it out: it is tied to '0.weight'\n"
        f"{name}: params['2.running_mean'] is not a leaf of the module\n"
        "  fix: pass it in buffers\n"
        f"{name}: params['3'] is a dict, not a tensor\n"
        "  fix: names are flat: 'a.b', not ['a']['b']\n"
        f"{name}: params['3'] is not a leaf of the module\n"
        "  fix: leave it out"
    )


UNSHARD = (
    "apply.unshard(specs, axis)(params, buffers, *args), which gathers each unit; or "
    "apply(fs.unshard(params, specs, axis), buffers, *args)"
)


def test_error_text_of_parameters_that_are_parts():
    part = {"weight": torch.ones(1, 4), "bias": torch.ones(1)}  # which would give a part of the result
    assert error_text(Apply(nn.Linear(4, 2)), part, {}, torch.ones(1, 4)) == (
        f"Apply(Linear): params['weight'] is [1, 4], and [2, 4] in the module\n  fix: {UNSHARD}"
    )
    part = {"weight": torch.ones(2), "bias": torch.ones(2)}  # a norm may have a part of its channels
    assert error_text(Apply(nn.LayerNorm(4)), part, {}, torch.ones(1, 4)) == (
        "Apply(LayerNorm): params['weight'] is [2], and [4] in the module, and 1 more\n"
        "  forward failed: RuntimeError: Expected weight to be of same shape as normalized_shape, but got weight of "
        f"shape [2] and normalized_shape = [4]\n  fix: {UNSHARD}"
    )


def test_buffers_need_no_unshard():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("angle", torch.ones(2))

        def forward(self, x):
            return x * self.angle.cos()

    apply = Apply(Scaled())

    @fs.shard_map(mesh=fs.make_mesh(data=2), in_specs=(P(), P("data")), out_specs=P("data"))
    def run(buffers, x):
        return apply({}, buffers, x)

    x = torch.ones(4, 2)
    assert torch.equal(fs.device_get(run(leaves(apply.module)[1], x)), x * torch.ones(2).cos())


def test_other_errors_in_a_region_are_not_changed():
    run = fs.shard_map(lambda x: Apply(nn.Dropout())({}, {}, x), mesh=fs.make_mesh(data=2), in_specs=P("data"),
                       out_specs=P("data"))  # fmt: skip
    assert "Apply(" not in error_text(run, torch.ones(4, 2)).split("fix:")[1]
