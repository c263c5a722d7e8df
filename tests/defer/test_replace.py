"""Modules with submodules that are pure functions on shards: they train as the dense module on one device."""

from __future__ import annotations

import copy
import functools
import itertools
import os

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import fshard as fs
from fshard import P
from fshard.defer.functional_module import Apply
from fshard.nn import Replacement, column_embedding, column_linear, row_embedding, row_linear
from tests.lib.assertions import assert_same, error_text
from tests.lib.tiers import slow_unless

os.environ["HF_HUB_OFFLINE"] = "1"

B, T, V, D, C = 5, 3, 11, 8, 7  # odd sizes, which no axis of two or three divides
# eps is far above a gradient that is rounding alone (a key's bias has 1e-7 for 0), by whose size AdamW divides a step.
OPTIMIZER = {"lr": 3e-3, "eps": 1e-3}


def ids(high=V, shape=(B, T), seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def targets(shape, classes):
    return ids(classes, shape, seed=1)


class Mlp(nn.Module):
    def __init__(self, width=13):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, width), nn.Linear(width, D)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    """A language model whose head shares the table; the second block is used twice."""

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(V, D, padding_idx=2), nn.Embedding(T, D)
        block = Mlp()
        self.blocks = nn.ModuleList([Mlp(), block, block])
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(input=ids) + self.positions(torch.arange(T))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


COLUMN, ROW, TABLE = column_linear("model"), row_linear("model"), row_embedding("model")
UP, DOWN = column_linear("model", out="split"), row_linear("model", input="split")
LINEAR = lambda: nn.Sequential(nn.Linear(2, 2))  # noqa: E731


def language(axis="model"):
    up, down = column_linear(axis, out="split"), row_linear(axis, input="split")
    return {"embed": row_embedding(axis), "head": column_linear(axis), "positions": column_embedding(axis),
            "blocks.*.up": up, "blocks.**.down": down}  # fmt: skip


def dense_steps(module, inputs, loss, steps=2):
    """Losses, the first gradients, parameters and buffers of a module that torch trains on the whole batch."""
    opt = torch.optim.AdamW(module.parameters(), weight_decay=0.1, **OPTIMIZER)
    losses, grads = [], {}
    for _ in range(steps):
        opt.zero_grad()
        value = loss(module, *inputs)
        value.backward()
        grads = grads or {name: x.grad.clone() for name, x in module.named_parameters()}
        opt.step()
        losses.append(value.detach())
    params = {name: x.detach() for name, x in module.named_parameters()}
    return losses, grads, params, {name: x.clone() for name, x in module.named_buffers()}


def sharded_steps(module, inputs, loss, replace, sizes, *, fsdp=True, units=(), steps=2, over=None, check="first"):
    """The same of the module on a mesh, with the batch split over data, and submodules replaced."""
    mesh = fs.make_mesh(**sizes)
    apply = Apply(copy.deepcopy(module).to("meta"), Apply(module).ties, replace=replace, units=units)
    apply = apply.batch_norm_over(over) if over else apply
    params = {name: x.detach().clone() for name, x in module.named_parameters()}
    buffers = {name: x.clone() for name, x in module.named_buffers()}
    specs = fs.fully_shard(apply.specs["params"], params, axis="data") if fsdp else apply.specs["params"]
    opt = fs.optim.adamw(OPTIMIZER["lr"], eps=OPTIMIZER["eps"], weight_decay=0.1)
    placed = specs, P(), opt.specs(specs)

    @fs.shard_map(mesh=mesh, in_specs=(*placed, P("data")), out_specs=(P(), *placed, specs), check=check)
    def step(p, b, state, inputs):
        def loss_fn(p):
            f = apply if not units else apply.unshard(specs, "data", shapes=params)
            whole = p if units else fs.unshard(p, specs, "data", shapes=params)
            return loss(f.with_buffers, whole, b, *inputs)

        (value, new), grads = fs.value_and_grad(loss_fn, has_aux=True)(p)
        p, state = opt.update(grads, state, p)
        return value, p, new, state, grads

    p, state = fs.device_put(params, specs, mesh), fs.device_put(opt.init(params), placed[2], mesh)
    losses, first = [], None
    for _ in range(steps):
        value, p, buffers, state, grads = step(p, buffers, state, inputs)
        first = first or fs.device_get(grads)
        losses.append(fs.device_get(value))
    return losses, first, fs.device_get(p), fs.device_get(buffers)


def cross_entropy(f, p, b, x, y, axis=None, size=None):
    out, new = f(p, b, x)
    return fs.nn.cross_entropy(getattr(out, "logits", out), y, over="data", axis=axis, size=size), new


def dense_cross_entropy(module, x, y):
    out = module(x)
    return F.cross_entropy(getattr(out, "logits", out).flatten(0, -2), y.flatten())


@functools.cache
def dense(make, *shapes, high=V, classes=V):
    """A module, inputs, and the result of torch's training."""
    torch.manual_seed(0)
    module, (shape, of_targets) = make(), shapes
    inputs = ids(high, shape), targets(of_targets, classes)
    return module, inputs, dense_steps(copy.deepcopy(module), inputs, dense_cross_entropy)


def assert_trained_equally(got, want):
    for part, (a, b) in zip(("losses", "gradients", "parameters", "buffers"), zip(got, want, strict=True), strict=True):
        assert_same(a, b, part, rtol=1e-4, atol=1e-6)


LAYOUTS = {
    "even and uneven": ({"data": 2, "model": 2}, ()),
    "empty shards": ({"data": 1, "model": 5}, ()),
    "units": ({"data": 2, "model": 2}, ("blocks.0", "blocks.1")),
}


@pytest.mark.parametrize("name", slow_unless(["empty shards", "units"], LAYOUTS))
def test_module_with_split_submodules_trains_as_the_dense_one(name):
    """A tied table with a padding row, a module that stands twice in another, sizes that no axis divides."""
    sizes, units = LAYOUTS[name]
    module, inputs, want = dense(Language, (B, T), (B, T))
    assert 2 in inputs[0]
    check = "first" if units else "never"  # types do not depend on sizes
    assert_trained_equally(
        sharded_steps(module, inputs, cross_entropy, language(), sizes, units=units, check=check), want
    )


class Seq2Seq(nn.Module):
    """torch's encoder-decoder, with one table for both inputs and the head."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
        self.core = nn.Transformer(D, 2, 1, 1, 13, dropout=0.0, batch_first=True)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.core(x, x))


def of_transformers(cls, **config):
    hf = pytest.importorskip("transformers")
    return getattr(hf, cls)(getattr(hf, cls).config_class(**config))


def pixels():
    return torch.randn(B, 3, 16, 16, generator=torch.Generator().manual_seed(1))


SMALL = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 37,
         "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": C, "vocab_size": V,
         "max_position_embeddings": 16, "image_size": 16, "patch_size": 8}  # fmt: skip
# name -> (constructor, replace, input, shape of the targets, classes); every head is split, and its loss has axis=
FOREIGN = {
    "torch seq2seq": (Seq2Seq, {"embed": TABLE, "head": UP, "**.linear1": UP, "**.linear2": DOWN}, ids, (B, T), V),
    "gpt2": (lambda: of_transformers("GPT2LMHeadModel", vocab_size=V, n_positions=12, n_embd=24, n_layer=1, n_head=3,
                                     resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
             {"**.wte": TABLE, "**.wpe": column_embedding("model"), "lm_head": UP, "**.attn.c_attn": COLUMN,
              "**.attn.c_proj": ROW, "**.c_fc": UP, "**.mlp.c_proj": DOWN}, ids, (B, T), V),
    "llama, by heads": (lambda: of_transformers("LlamaForCausalLM", **SMALL | {"num_attention_heads": 4},
                                                num_key_value_heads=2),
                        {"**.embed_tokens": TABLE, "lm_head": UP, "**.[qkv]_proj": UP, "**.o_proj": DOWN,
                         "**.gate_proj": UP, "**.up_proj": UP, "**.down_proj": DOWN}, ids, (B, T), V),
    "bert": (lambda: of_transformers("BertForSequenceClassification", **SMALL),
             {"classifier": UP, "**.word_embeddings": TABLE, "**.intermediate.dense": UP,
              "**.layer.*.output.dense": DOWN}, ids, (B,), C),
    "vit": (lambda: of_transformers("ViTForImageClassification", **SMALL),
            {"classifier": UP, "**.mlp.fc1": UP, "**.mlp.fc2": DOWN}, pixels, (B,), C),
    "convolution, in train mode": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(200, C)),
        {"4": UP}, pixels, (B,), C),
}  # fmt: skip
SLOW = ("torch seq2seq", "bert", "vit", "llama, by heads")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in FOREIGN])
def test_model_of_others_with_a_split_head_trains_as_torch_on_the_whole_batch(name):
    """Batch norms too: their statistics, and their buffers, are those of the five examples of two ranks."""
    make, replace, x, shape, size = FOREIGN[name]
    torch.manual_seed(0)
    module, inputs = make(), (x(), targets(shape, size))
    want = dense_steps(copy.deepcopy(module), inputs, dense_cross_entropy)
    loss = functools.partial(cross_entropy, axis="model", size=size)
    over = "data" if "train mode" in name else None
    check = "first" if over else "never"  # the types of replaced modules are those of Language
    got = sharded_steps(module, inputs, loss, replace, {"data": 2, "model": 2}, over=over, check=check)
    assert_trained_equally(got, want)
    if over:
        assert "is a BatchNorm2d in train mode" in error_text(
            sharded_steps, module, inputs, loss, replace, {"data": 2, "model": 2}
        )


@pytest.mark.parametrize("axis", [("model", "data"), ("a", "model")])
def test_leaves_are_split_over_several_axes(axis):
    module, inputs, want = dense(Language, (B, T), (B, T))
    if "data" not in axis:
        sizes = {"data": 1, "a": 2, "model": 2}
        got = sharded_steps(module, inputs, cross_entropy, language(axis), sizes, fsdp=False, check="never")
        return assert_trained_equally(got, want)
    # An axis that splits the batch too: each rank would have the part of another batch.
    text = error_text(sharded_steps, module, inputs, cross_entropy, language(axis), {"data": 2, "model": 2}, fsdp=False)
    assert "Apply(Language): 'embed': row_embedding(('model', 'data'))" in text
    return None


def test_specs_of_defer_place_leaves_of_replaced_modules_and_replicate_the_others():
    apply, tree = fs.defer(Language, replace=language())
    split = {"embed.weight": P("model"), "positions.weight": P(None, "model")}
    for block in ("blocks.0", "blocks.1"):
        split |= {f"{block}.up.weight": P("model"), f"{block}.up.bias": P("model"),
                  f"{block}.down.weight": P(None, "model")}  # fmt: skip
    assert apply.specs == {"params": {name: split.get(name, P()) for name in tree["params"]}, "buffers": {}}
    assert tree["params"].keys() == fs.defer(Language)[1]["params"].keys()
    eager, _ = fs.defer(Language, replace=language(), reference=0)
    for other in (apply.eval(), apply.train(False).train(), apply.batch_norm_over("data"), eager):
        assert other.specs == apply.specs
    assert fs.defer(Language)[0].specs == {"params": dict.fromkeys(tree["params"], P()), "buffers": {}}
    equal, _ = fs.defer(repeated, replace={"0": column_linear("model"), "2": column_linear("model")})
    assert equal.specs["params"] == {"0.weight": P("model"), "0.bias": P("model")}


@pytest.mark.parametrize("dtype", slow_unless([torch.float64], [torch.bfloat16, torch.float64]))
def test_other_dtypes(dtype):
    torch.manual_seed(0)
    module, inputs = Language().to(dtype), (ids(), targets((B, T), V))
    want = dense_steps(copy.deepcopy(module), inputs, dense_cross_entropy, steps=1)
    got = sharded_steps(module, inputs, cross_entropy, language(), {"data": 2, "model": 2}, steps=1, check="never")
    # bfloat16 rounds each partial sum of a row_linear to 8 bits, and the gradients of both ranks' batches again.
    tolerance = {"rtol": 5e-2, "atol": 4e-3} if dtype is torch.bfloat16 else {"rtol": 1e-10, "atol": 1e-12}
    assert_same(got[1], want[1], **tolerance)


# --- with the other parts of a deferred module ----------------------------------------------------------------------


def gradients(make, replace, sizes, *inputs, loss, units=None, key=None, check="first"):
    """The loss and the gradients of a deferred module whose leaves are drawn by one key, data split by data."""
    apply, tree = fs.defer(make, replace=replace, units=units)
    apply = apply.draws_over("data") if key is not None else apply
    mesh, specs = fs.make_mesh(**sizes), fs.fully_shard(apply.specs["params"], tree["params"], axis="data")
    p = fs.materialize(tree["params"], specs, mesh, key=fs.key(0))

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(), *[P("data")] * len(inputs)), out_specs=(P(), specs), check=check)
    def step(p, key, *inputs):
        def loss_fn(p):
            keys = {} if key is None else {"key": key}
            if units:
                f = apply.unshard(specs, "data", shapes=tree["params"], remat=key is not None)
                return loss(f(p, {}, *inputs, **keys))
            return loss(apply(fs.unshard(p, specs, "data", shapes=tree["params"]), {}, *inputs, **keys))

        return fs.value_and_grad(loss_fn)(p)

    return step, p, fs.device_get(step(p, key, *inputs))


def encoder(width=13):
    """Return a layer with dropout, and a head that shares the table of embeddings."""
    embed, head = nn.Embedding(V, 8), nn.Linear(8, V, bias=False)
    head.weight = embed.weight
    return nn.Sequential(embed, nn.TransformerEncoderLayer(8, 2, width, dropout=0.4, batch_first=True), head)


def mean_loss(y):
    total, n = fs.psum((y.sin().add(0.5).square().sum(), torch.tensor(float(y.numel()))), "data")
    return total / n


ENCODER = {"0": TABLE, "2": COLUMN, "**.linear1": UP, "**.linear2": DOWN}


@pytest.mark.parametrize(
    "units", slow_unless([["TransformerEncoderLayer", "0"]], [None, ["TransformerEncoderLayer", "0"]])
)
def test_dropout_of_split_features_by_key_is_the_same_on_every_mesh(units):
    """Each rank draws the numbers of its own features; in backward again, where a unit is recomputed."""
    run = functools.partial(gradients, encoder, loss=mean_loss, units=units)
    _, _, one = run(None, {"data": 1, "model": 1}, ids(), key=fs.key(7), check="never")
    assert_same(run(ENCODER, {"data": 2, "model": 2}, ids(), key=fs.key(7))[2], one, rtol=1e-4, atol=1e-6)
    if not units:
        assert not torch.allclose(run(None, {"data": 1, "model": 1}, ids(), key=fs.key(8))[2][0], one[0])


@pytest.mark.parametrize("flatten", [lambda h: h.flatten(), lambda h: h.view(len(h), -1, 2).flatten(0, 1)],
                         ids=["features", "heads"])  # fmt: skip
def test_dropout_of_split_features_that_are_flattened_with_the_batch_is_an_error(flatten):
    """A rank's part of [B*heads] is no range of it: each rank would draw numbers of others."""

    class Flattened(Mlp):
        def forward(self, x):
            h = self.up(x)
            return self.down(F.dropout(flatten(h), 0.5).view(h.shape))

    apply, tree = fs.defer(lambda: Flattened(16), replace={"up": UP, "down": DOWN})
    mesh, specs = fs.make_mesh(model=2), apply.specs["params"]
    f = fs.shard_map(lambda p, x, key: apply.draws_over(None)(p, {}, x, key=key), mesh=mesh,
                     in_specs=(specs, P(), P()), out_specs=P())  # fmt: skip
    text = error_text(f, fs.materialize(tree["params"], specs, mesh, key=fs.key(0)), torch.ones(2, D), fs.key(1))
    assert "or they are flattened with another dim, and a rank's part is no range of it: replace= is to" in text


def test_dropout_of_features_that_a_rank_has_none_of_is_an_error():
    four = functools.partial(encoder, 4)
    text = error_text(gradients, four, ENCODER, {"data": 1, "model": 3}, ids(), loss=mean_loss, key=fs.key(7))
    assert "or this rank has no part of the features that ('model',) splits, and torch draws nothing for it" in text


def test_dropout_of_split_features_without_a_probe_is_an_error():
    def run():
        apply, tree = fs.defer(encoder, replace=ENCODER)
        apply, specs = apply.draws_over(None, probe=False), apply.specs["params"]
        p = fs.materialize(tree["params"], specs, fs.make_mesh(model=2), key=fs.key(0))
        fs.shard_map(lambda p, x, key: apply(p, {}, x, key=key), mesh=fs.make_mesh(model=2),
                     in_specs=(specs, P(), P()), out_specs=P())(p, ids(), fs.key(1))  # fmt: skip

    text = error_text(run)
    assert "a random draw that is the same on every rank of 'model' with a varying operand" in text
    assert text.endswith("but those of features that replaced modules leave split, without probe=False")


def test_units_with_uneven_parts_are_verified_and_checked_without_data():
    """A whole leaf after an uneven one is at another offset of the gathered buffer on each rank."""
    make = lambda: nn.Sequential(nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 4), nn.LayerNorm(4)))  # noqa: E731
    split = {"0.0": UP, "0.2": DOWN}
    step, p, _ = gradients(make, split, {"data": 2, "model": 2}, torch.ones(6, 4), loss=mean_loss, units=["0"])
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    assert str(fs.verify(step, p, None, x)).startswith("verified: 7 leaves the same on data=2, model=2; ")
    moved = [(t.op, t.phase) for t in fs.check(step, p, None, x).transfers if "model" in t.axes]
    assert moved == [("all_reduce", "forward")]  # of row_linear; the input needs no gradient


LORA = {"language": (Language, ["up", "down", "embed"], None, language()),
        "Conv1D": (lambda: of_transformers("GPT2LMHeadModel", vocab_size=V, n_positions=12, n_embd=24, n_layer=1,
                                           n_head=3).eval(),
                   ["c_fc", "mlp.c_proj", "c_attn", "wte"], "GPT2Block",
                   {"**.wte": TABLE, "lm_head": COLUMN, "**.c_attn": COLUMN, "**.c_fc": UP, "**.mlp.c_proj": DOWN}),
        }  # fmt: skip


@pytest.mark.parametrize("name", slow_unless(["Conv1D"], LORA))
def test_adapters_beside_replaced_submodules(name):
    """DoRA with dropout: values and gradients of the factors are those of one device without replacements."""
    make, names, unit, replacements = LORA[name]
    cfg = fs.lora.Config(names, rank=2, dora=True, dropout=0.3)

    def run(replace, sizes, units=None):
        apply, tree = fs.defer(make, replace=replace, units=units)
        mesh, specs = fs.make_mesh(**sizes), fs.fully_shard(apply.specs["params"], tree["params"], axis="data")
        described = fs.lora.init(cfg, tree["params"], of=apply, key=fs.key(0))
        a_specs = fs.lora.specs(cfg, tree["params"], specs, of=apply)
        p = fs.materialize(tree["params"], specs, mesh, key=fs.key(0))
        start = fs.device_get(fs.materialize(described, P(), fs.make_mesh(one=1), key=fs.key(1)))
        start = fs.tree.map(
            lambda x: x if x.any() else torch.sin(torch.arange(1.0, x.numel() + 1)).view(x.shape), start
        )

        @fs.shard_map(mesh=mesh, in_specs=(specs, a_specs, P("data"), P("data")), out_specs=(P(), a_specs),
                      check="first" if replace else "never")  # fmt: skip
        def step(p, adapters, x, y):
            def loss(adapters):
                adapted = fs.lora.apply(cfg, p, adapters, of=apply, specs=specs, adapter_specs=a_specs, data="data",
                                        model="model", key=fs.key(5), shapes=tree["params"])  # fmt: skip
                if units:
                    out = apply.unshard(specs, "data", shapes=tree["params"])(adapted, {}, x)
                else:
                    out = apply(fs.unshard(adapted, specs, "data", shapes=tree["params"]), {}, x)
                return fs.nn.cross_entropy(getattr(out, "logits", out), y, over="data")

            return fs.value_and_grad(loss)(adapters)

        return fs.device_get(step(p, fs.device_put(start, a_specs, mesh), ids(), targets((B, T), V)))

    one = run(None, {"data": 1, "model": 1})
    size = max(float(x.abs().max()) for x in fs.tree.leaves(one))
    got = run(replacements, {"data": 2, "model": 2}, unit) if unit else run(replacements, {"data": 1, "model": 5})
    assert_same(got, one, rtol=1e-4, atol=1e-6 * size)


@pytest.mark.parametrize("way", ["nn.embedding", "row_embedding", "column_embedding"])
def test_padding_row_of_an_adapted_table_has_the_gradients_of_peft(way):
    """None in the table and in factor a; b and the magnitude have those of all tokens."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    theirs = peft.get_peft_model(nn.Sequential(nn.Embedding(V, D, padding_idx=2)), peft.LoraConfig(
        r=2, target_modules=["0"], use_dora=True, init_lora_weights=False))  # fmt: skip
    theirs(ids()).square().sum().backward()
    layer = theirs.base_model.model[0]
    named = {"a": layer.lora_embedding_A["default"], "b": layer.lora_embedding_B["default"],
             "magnitude": layer.lora_magnitude_vector["default"].weight}  # fmt: skip
    factors, want = ({key: f(x).reshape(-1) if key == "magnitude" else f(x).mT for key, x in named.items()}
                     for f in (torch.Tensor.detach, lambda x: x.grad))  # fmt: skip
    make = lambda: nn.Sequential(nn.Embedding(V, D, padding_idx=2))  # noqa: E731
    apply, tree = fs.defer(make, replace={"0": column_embedding("model") if way.startswith("column") else TABLE})
    cfg, specs = fs.lora.Config(["0"], rank=2, dora=True), apply.specs["params"]
    own = fs.lora.specs(cfg, tree["params"], specs, of=apply)

    def gradient(p, adapters, ids):
        def loss(adapters):
            p_ = fs.lora.apply(cfg, p, adapters, of=apply, specs=specs, adapter_specs=own, model="model",
                               shapes=tree["params"])  # fmt: skip
            if way != "nn.embedding":
                return apply(p_, {}, ids).square().sum()
            table = p_["0.weight"]
            return fs.nn.embedding(ids, table, axis="model", size=V, padding_idx=2 - V, out="whole").square().sum()

        return fs.grad(loss)(adapters)

    run = fs.shard_map(gradient, mesh=fs.make_mesh(model=3), in_specs=(specs, own, P()), out_specs=own)
    got = run({"0.weight": layer.base_layer.weight.detach()}, {"0.weight": factors}, ids())
    assert 2 in ids()
    assert_same(fs.device_get(got)["0.weight"], want, rtol=1e-4, atol=1e-5)


def test_generation_and_weights_of_a_folder_with_replaced_submodules(tmp_path):
    _, replace, *_ = FOREIGN["llama, by heads"]
    model = FOREIGN["llama, by heads"][0]().eval()
    model.save_pretrained(tmp_path)
    # Without a mask transformers leaves out tokens of the prompt that equal the pad token.
    want = model.generate(ids(), attention_mask=torch.ones_like(ids()), max_new_tokens=4, do_sample=False,
                          eos_token_id=None, pad_token_id=0)  # fmt: skip
    make = lambda: of_transformers("LlamaForCausalLM", **model.config.to_dict()).eval()  # noqa: E731
    apply, tree = fs.defer(make, replace={**replace, "lm_head": COLUMN})
    apply, mesh = apply.eval(), fs.make_mesh(data=2, model=2)
    specs = fs.fully_shard(apply.specs["params"], tree["params"], axis="data")
    stored = fs.materialize(fs.hf.weights(tmp_path, tree, of=apply), {"params": specs, "buffers": P()}, mesh,
                            key=fs.key(0))  # fmt: skip

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P("data")), out_specs=P("data"))
    def write(p, b, x):
        whole = fs.unshard(p, specs, "data", shapes=tree["params"])
        return fs.hf.generate(apply, whole, b, x, new=4, data="data", eos=None)

    assert torch.equal(fs.device_get(write(stored["params"], stored["buffers"], ids())), want)


TRANSFORMS = {
    "vmap of grad": lambda f, b, x: torch.func.vmap(torch.func.grad(lambda b, x: f(b, x).sin().mean()), (None, 0))(
        b, x
    ),
    "jvp": lambda f, b, x: torch.func.jvp(lambda b: f(b, x).sin(), (b,), (torch.ones_like(b),))[1],
    "hessian": lambda f, b, x: torch.func.jacrev(torch.func.grad(lambda b: f(b, x).sin().mean()))(b),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func_see_replaced_submodules(name):
    apply, tree = fs.defer(Language, replace=language())

    def result(sizes):
        mesh, specs = fs.make_mesh(**sizes), apply.specs["params"]
        p = fs.materialize(tree["params"], specs, mesh, key=fs.key(0))

        @fs.shard_map(mesh=mesh, in_specs=(specs, P()), out_specs=P(), check="first" if sizes["model"] > 1 else "never")
        def f(p, x):
            return TRANSFORMS[name](
                lambda b, x: apply({**p, "blocks.1.down.bias": b}, {}, x), p["blocks.1.down.bias"], x
            )

        return fs.device_get(f(p, ids()))

    assert_same(result({"model": 2}), result({"model": 1}), rtol=1e-4, atol=1e-6)


def test_compiled_call_is_an_error(monkeypatch):
    apply = Apply(LINEAR(), replace={"0": COLUMN})
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: True)
    text = error_text(apply, dict(LINEAR().named_parameters()), {}, torch.ones(2, 2))
    assert text == "Apply(Sequential): replaced modules cannot be compiled\n  fix: call it outside torch.compile"
    norm = nn.BatchNorm1d(2, affine=False, track_running_stats=False)
    text = error_text(Apply(norm).batch_norm_over("data"), {}, {}, torch.ones(2, 2))
    assert text.startswith("Apply(BatchNorm1d): statistics over an axis cannot be compiled\n")


# --- replacements of one's own --------------------------------------------------------------------------------------


class Vision(nn.Module):
    """A block whose norm sees split channels, and a head that is a module with parameters in two submodules."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Conv2d(3, 7, 3, padding=1), nn.PReLU(7), nn.Conv2d(7, 3, 3)
        self.mlp, self.head = Mlp(), nn.Linear(3, D)

    def forward(self, x):
        return self.mlp(self.head(self.down(self.norm(self.up(x))).mean((2, 3))))


def up_conv(leaves, x, *, of):
    return F.conv2d(fs.pvary(x, "model"), leaves["weight"], leaves["bias"], of.stride, of.padding)


def down_conv(leaves, x, *, of):
    return fs.psum(F.conv2d(x, leaves["weight"], None, of.stride, of.padding), "model") + leaves["bias"].view(-1, 1, 1)


def whole_mlp(leaves, x, *, of):
    h = fs.nn.layer_norm(x, leaves["norm.weight"], leaves["norm.bias"], eps=of.norm.eps)
    h = F.gelu(F.linear(fs.pvary(h, "model"), leaves["up.weight"], leaves["up.bias"]))
    assert of.up.weight.shape == (13, D)
    return x + fs.psum(F.linear(h, leaves["down.weight"]), "model") + leaves["down.bias"]


OWN = {
    "up": Replacement("up", (nn.Conv2d,), lambda of: {"weight": P("model"), "bias": P("model")}, up_conv),
    "norm": Replacement("slopes", (nn.PReLU,), lambda of: {"weight": P("model")},
                        lambda leaves, x, *, of: F.prelu(x, leaves["weight"]), input="split"),
    "down": Replacement("down", (nn.Conv2d,), lambda of: {"weight": P(None, "model")}, down_conv, input="split"),
    "mlp": Replacement("mlp", ("Mlp",), lambda of: {"up.weight": P("model"), "up.bias": P("model"),
                                                    "down.weight": P(None, "model")}, whole_mlp),
}  # fmt: skip


def test_replacements_of_ones_own():
    torch.manual_seed(0)
    module = Vision()
    inputs = pixels()[..., :6, :6], targets((B,), D)
    want = dense_steps(copy.deepcopy(module), inputs, dense_cross_entropy)
    assert_trained_equally(sharded_steps(module, inputs, cross_entropy, OWN, {"data": 2, "model": 2}), want)


def test_batch_norms_that_are_replaced_keep_their_function():
    norm = block_of(lambda leaves, x, *, of: x + 1, takes=(nn.BatchNorm1d,))
    apply = Apply(nn.Sequential(nn.BatchNorm1d(2, affine=False, track_running_stats=False)), replace={"0": norm})
    f = fs.shard_map(lambda x: apply.batch_norm_over("data")({}, {}, x), mesh=fs.make_mesh(data=2), in_specs=P("data"),
                     out_specs=P("data"))  # fmt: skip
    assert torch.equal(fs.device_get(f(torch.zeros(4, 2))), torch.ones(4, 2))


# --- errors -----------------------------------------------------------------------------------------------------


class Scaled(nn.Embedding):
    def forward(self, ids):
        return 2 * super().forward(ids)


def hooked():
    m = nn.Linear(2, 2)
    m.register_forward_hook(lambda *_: None)
    return m


def wrapped():
    m = nn.Linear(2, 2)
    m.forward = m.forward
    return m


def tied():
    m = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    m[1].weight = m[0].weight
    return m


def repeated():
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def block_of(forward=None, specs=None, takes=(nn.Sequential,)):
    return Replacement("mine", takes, specs or (lambda of: {}), forward or (lambda leaves, x, *, of: x))


class Mixed(nn.Module):
    """Linear layers, some of them not replaceable: tied, parametrized, or used by the attention around them."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(V, D), nn.TransformerEncoderLayer(D, 2, 13, dropout=0.0, batch_first=True)
        self.scaled = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))
        self.row, self.head = nn.Linear(D, D), nn.Linear(D, V, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.row(self.scaled(self.block(self.embed(ids)))))


def test_class_replaces_the_submodules_that_it_can_and_lists_the_others():
    module, inputs, want = dense(Mixed, (B, T), (B, T))
    left = {"block.self_attn.out_proj": "its parent computes with its parameters, and does not call it",
            "scaled": "it has parametrizations, which compute its parameters"}  # fmt: skip
    tied = {"head": "'embed.weight' is one of its parameters, in a module that is not replaced"}
    split = {"block.linear1.weight", "block.linear1.bias", "block.linear2.weight", "row.weight"}
    for replace, unreplaced, more in [
        ({nn.Linear: COLUMN}, left | tied, {"block.linear2.bias", "row.bias"}),
        ({nn.Linear: COLUMN, nn.Embedding: TABLE}, left, {"block.linear2.bias", "row.bias", "embed.weight"}),
        ({"row": ROW, nn.Linear: COLUMN}, left | tied, {"block.linear2.bias"}),
    ]:
        apply, _ = fs.defer(Mixed, replace=replace)
        assert apply.unreplaced == apply.eval().unreplaced == unreplaced
        assert {name for name, spec in apply.specs["params"].items() if spec.axes} == split | more
    got = sharded_steps(module, inputs, cross_entropy, replace, {"data": 2, "model": 2})
    assert_trained_equally(got, want)
    assert "matches no submodule" in error_text(fs.defer, Mixed, replace={nn.Conv1d: COLUMN})


OF_LINEAR = functools.partial(block_of, takes=(nn.Linear,))
REFUSED = {
    "unmatched": (Language, {"**.donw": COLUMN}, "'**.donw' matches no submodule\n  near  blocks.0.down, "),
    "shadowed": (Language, {"head": COLUMN, "hea?": COLUMN}, "'hea?' matches no submodule\n  near  head"),
    "no submodules": (lambda: nn.Linear(2, 2), {"**": COLUMN},
                      "'**' matches no submodule\n  near  Linear has none\n  fix: torch.nn.Sequential(module) has"),
    "kind": (Language, {"*.0.norm": COLUMN},
             "'blocks.0.norm' is a LayerNorm: column_linear('model') takes Linear and Conv1D\n"),
    "subclass": (lambda: nn.Sequential(Scaled(3, 2)), {"0": TABLE},
                 "'0' is a Scaled: row_embedding('model') computes the forward of Embedding, and this one has its own"),
    "own forward": (lambda: nn.Sequential(wrapped()), {"0": ROW}, "computes the forward of Linear, and this one has"),
    "hooks": (lambda: nn.Sequential(hooked()), {"0": COLUMN}, "'0' is a Linear: it has hooks"),
    "weight_norm": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))), {"0": COLUMN},
                    "'0' is a ParametrizedLinear: it has parametrizations"),
    "max_norm": (lambda: nn.Sequential(nn.Embedding(3, 2, max_norm=0.0)), {"0": TABLE}, "it has max_norm=0.0\n"),
    "sparse": (lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)), {"0": column_embedding("model")},
               "it has sparse=True\n"),
    "counts": (lambda: nn.Sequential(nn.Embedding(3, 2, scale_grad_by_freq=True)), {"0": TABLE},
               "it has scale_grad_by_freq=True\n"),
    "nested": (lambda: nn.Sequential(LINEAR()), {"0": block_of(), "0.0": COLUMN},
               "'0.0' is in '0', which is replaced too\n"),
    "tied": (tied, {"0": COLUMN, "1": ROW},
             "two ways\n  0  P('model'), by column_linear('model')    1  P(None, 'model'), by row_linear('model')"),
    "repeated": (repeated, {"0": COLUMN, "2": ROW},
                 "'0' and '2' are one module, and globs replace it by column_linear('model') and by row_linear("),
    "no leaf": (LINEAR, {"0": OF_LINEAR(specs=lambda of: {"w": P()})},
                "'0' is a Linear: mine has a spec for 'w', and it has no such parameter\n  has  weight, bias"),
    "spec": (LINEAR, {"0": OF_LINEAR(specs=lambda of: {"bias": P(None, "a")})},
             "'0' is a Linear: mine: 'bias': P(None, 'a') describes 2 dims, the leaf has 1"),
    "no specs": (LINEAR, {"0": OF_LINEAR(specs=lambda of: None)},
                 "'0' is a Linear: mine: specs must be a function that returns a dict of parameters' names and specs"),
    "no P": (LINEAR, {"0": OF_LINEAR(specs=lambda of: {"bias": "a"})}, "the spec of 'bias' must be a P"),
    "no replacement": (Language, {"head": P("model")}, "must be"),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_submodule_that_cannot_be_replaced_is_an_error(case):
    make, replace, text = REFUSED[case]
    assert text in error_text(fs.defer, make, replace=replace, reference=0)


def test_all_errors_are_told_at_once():
    text = error_text(fs.defer, Language, replace={"embd": TABLE, "blocks.0.norm": COLUMN, "head": TABLE})
    assert text.startswith("3 problems\n")


def run(make, replace, x, *, sizes=None, specs=None, batch=None):
    """Run a deferred module on an axis of two ranks; an axis `batch` splits the batch."""
    apply, tree = fs.defer(make, replace=replace)
    mesh, specs = fs.make_mesh(**(sizes or {"model": 2})), apply.specs["params"] if specs is None else specs
    p = fs.materialize(tree["params"], specs, mesh, key=fs.key(0))
    f = fs.shard_map(lambda p, x: apply(p, {}, x), mesh=mesh, in_specs=(specs, P(batch)), out_specs=P(batch))
    return fs.device_get(f(p, x))


def test_split_parameter_that_other_code_reads_is_an_error():
    """The head uses the table of embeddings by itself; so does attention its out_proj."""

    class Tied(Language):
        def forward(self, ids):
            return F.linear(self.embed(ids), self.embed.weight)

    assert error_text(run, Tied, {"embed": TABLE}, ids()).startswith(
        "'embed.weight' is split by replace= (embed: row_embedding('model')), and used by linear outside of the "
        "forward of these modules, as head.weight\n  a rank has only its part of the parameter\n  fix: replace every"
    )
    attention = lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)  # noqa: E731
    text = error_text(run, attention, {"self_attn.out_proj": COLUMN}, torch.randn(2, 3, 8))
    assert "'self_attn.out_proj.weight' is split by replace=" in text
    assert "used by multi_head_attention_forward" in text


def test_split_layers_have_the_dtype_of_autocast():
    class Half(nn.Sequential):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    for replacement, layer in itertools.product((ROW, COLUMN), (lambda: nn.Linear(4, 2), lambda: conv1d(2, 4))):
        make = lambda layer=layer: Half(layer())  # noqa: E731
        assert run(make, {"0": replacement}, torch.ones(3, 4)).dtype == torch.bfloat16


def test_facts_of_a_split_parameter_are_those_of_the_whole():
    class Reads(Language):
        def forward(self, ids):
            w = self.embed.weight
            assert (w.shape, w.dtype, w.device.type, len(w), w.numel()) == ((V, D), torch.float32, "cpu", V, V * D)
            return self.embed(ids)

    assert run(Reads, {"embed": TABLE, "head": COLUMN}, ids()).shape == (B, T, D)


def test_leaf_that_is_not_the_part_of_its_replacement_is_an_error():
    assert error_text(run, Language, language(), ids(), specs=P()) == (
        "Apply(Language): 'embed': row_embedding('model'): params['embed.weight'] is [11, 8] here, and not [6, 8], "
        "this rank's part of [11, 8]\n  spec  P('model')    mesh  model=2\n"
        '  fix: place it by apply.specs["params"]; fs.unshard over other axes alone'
    )
    # The part of another axis: it has the right shape, and is that of another rank.
    other = {"0.weight": P("a"), "0.bias": P("a")}
    text = error_text(run, LINEAR, {"0": COLUMN}, torch.ones(4, 2), sizes={"a": 2, "model": 2}, specs=other, batch="a")
    assert "params['0.weight'] is the same on all ranks of 'model', which is to split it\n  spec  P('model')" in text
    text = error_text(run, Language, language(), ids(), sizes={"other": 2}, specs=P())
    assert text.startswith("Apply(Language): 'embed': row_embedding('model'): the mesh has no axis 'model'\n")
    apply, _ = fs.defer(Language, replace=language())
    assert "outside" in error_text(apply, dict(Language().named_parameters()), {}, ids())


def test_wrong_form_of_an_input_is_an_error_with_the_fix():
    mlp = lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))  # noqa: E731
    up, down, x = column_linear("model", out="split"), row_linear("model", input="split"), torch.randn(2, 4)
    for wrong in (ROW, COLUMN):  # after a split output
        assert error_text(run, mlp, {"0": up, "2": wrong}, x).startswith(
            f"Apply(Sequential): '2': {wrong}: its input varies over 'model', which split its parameters"
        )
    text = error_text(run, mlp, {"0": COLUMN, "2": down}, x)
    assert "'2': row_linear('model', input='split'): its input has 6 features here, not 3\n" in text


TAKES_WHOLE = {"embed": TABLE, "columns": column_embedding("model"), "linear": COLUMN, "row": ROW}


@pytest.mark.parametrize("name", TAKES_WHOLE)
def test_batch_that_the_axis_of_the_parameters_splits_is_an_error(name):
    of_ids = name in ("embed", "columns")
    make, x = (lambda: nn.Sequential(nn.Embedding(3, 2)), ids(3, (4,))) if of_ids else (LINEAR, torch.ones(4, 2))
    text = error_text(run, make, {"0": TAKES_WHOLE[name]}, x, batch="model")
    assert "its input varies over 'model', which split its parameters: each rank has another part of it\n" in text
