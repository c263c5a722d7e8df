"""ResNet equals transformers' in logits, loss, every gradient and the running statistics, on every mesh."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import fshard as fs
from fshard import P, hf, nn
from fshard.models import resnet
from tests.lib.assertions import assert_same, error_text
from tests.lib.model_cases import saved

transformers = pytest.importorskip("transformers")

TINY = {"num_channels": 2, "embedding_size": 5, "hidden_sizes": (8, 12), "depths": (2, 1), "num_labels": 7}
KINDS = {
    "basic": {"layer_type": "basic"},
    "bottleneck": {},
    "downsample in the 1x1, first stage": {"downsample_in_bottleneck": True, "downsample_in_first_stage": True},
    "one stage": {"hidden_sizes": (8,), "depths": (2,)},
    "equal sizes, gelu": {"hidden_sizes": (5, 5), "layer_type": "basic", "hidden_act": "gelu"},
}
# name: (mesh, axes of the classes, fully sharded, remat); 7 classes and 5 images are uneven over 2 to 9 ranks
MESHES = {
    "one device": ({}, None, False, False),
    "data": ({"data": 2}, None, False, False),
    "model": ({"model": 2}, "model", False, True),
    "data and model": ({"data": 2, "model": 2}, "model", False, False),
    "head over all": ({"data": 2, "model": 2}, ("data", "model"), False, True),
    "head over data": ({"data": 3}, "data", True, False),
    "fully sharded": ({"data": 2, "model": 2}, "model", True, True),
    "replicas": ({"replica": 2, "data": 2, "model": 2}, ("data", "model"), False, False),
    "empty shards": ({"data": 3, "model": 3}, ("data", "model"), False, False),
    "empty batches": ({"data": 6}, "data", True, True),
}
CHECKED = ("head over all", "fully sharded", "replicas")  # types do not depend on sizes
SLOW = (
    "fully sharded",
    "data",
    "model",
    "data and model",
    "head over data",
    "head over all",
    "replicas",
    "empty shards",
)  # the others have their cases


def model_of(kind="bottleneck", **more):
    torch.manual_seed(0)
    config = transformers.ResNetConfig(**{**TINY, **KINDS[kind], **more})
    model = transformers.ResNetForImageClassification(config).double()
    for p in model.parameters():
        if p.ndim == 1:
            torch.nn.init.normal_(p, 1.0, 0.3)
    return model


def inputs(n=5, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 2, 17, 13, generator=g).double(), torch.randint(0, 7, (n,), generator=g)


def their_steps(model, steps=2, rate=0.1):
    """Losses, logits, gradients of the last step, and all tensors after train steps by SGD."""
    losses = []
    for i in range(steps):
        x, y = inputs(seed=i)
        model.train().zero_grad()
        out = model(x)
        loss = torch.nn.functional.cross_entropy(out.logits, y)
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for p in model.parameters():
                p -= rate * p.grad
    return SimpleNamespace(losses=torch.stack(losses), logits=out.logits.detach(), tensors=model.state_dict(),
                           grads={name: p.grad for name, p in model.named_parameters()})  # fmt: skip


def our_steps(cfg, weights, name, steps=2, rate=0.1, **options):
    sizes, head, sharded, remat = MESHES[name]
    batch = tuple(axis for axis in ("replica", "data") if axis in sizes) or None
    mesh, layout = fs.make_mesh(**sizes or {"data": 1}), resnet.Layout(batch, head, examples=5 if remat else None)
    specs = resnet.specs(cfg, model=head)
    has_logits = name == "one device" or "train" in options
    if sharded:  # also the classes, along their other dim
        specs = fs.fully_shard(specs, weights["params"], axis="data", min_size=4)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P(batch), P(batch)),
                  out_specs=(specs, P(), P(), specs, P(layout.batch, head) if has_logits else P()),
                  check="first" if name in CHECKED else "never")  # fmt: skip
    def step(p, state, x, y):
        def loss_fn(p):
            return resnet.loss(cfg, p, state, x, y, layout=layout, specs=specs, remat=remat, **options)

        logits = x.new_zeros(())
        if has_logits:
            logits, _ = resnet.apply(cfg, p, state, x, train=options.get("train", True), layout=layout, specs=specs)
        (loss, new), grads = fs.value_and_grad(loss_fn, has_aux=True)(p)
        return fs.tree.map(lambda w, g: w - rate * g, p, grads), new, loss, grads, logits

    params = fs.materialize(weights["params"], specs, mesh, key=fs.key(0))
    state = fs.materialize(weights["state"], P(), mesh, key=fs.key(0))
    losses = []
    for i in range(steps):
        params, state, loss, grads, logits = step(params, state, *inputs(seed=i))
        losses.append(fs.device_get(loss))
    return SimpleNamespace(losses=torch.stack(losses), weights={"params": params, "state": state},
                           grads=fs.device_get(grads), logits=fs.device_get(logits))  # fmt: skip


def close(got, want, tol=1e-9):
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


def close_to_tensors(group, leaves, tensors, tol=1e-9):
    """Every leaf equals the tensor of its name in transformers, and every tensor has a leaf."""
    named = {resnet.theirs((group, *path)).name: leaf for path, leaf in fs.tree.leaves_with_path(leaves)}
    of_group = {name: x for name, x in tensors.items() if ("running" in name or "num_b" in name) == (group == "state")}
    assert named.keys() == of_group.keys()
    for name, leaf in named.items():
        torch.testing.assert_close(leaf, of_group[name], rtol=tol, atol=tol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """Each kind of model: its folder, and two steps of transformers, once for all meshes."""
    out = {}
    for kind in KINDS:
        model, folder = model_of(kind), tmp_path_factory.mktemp("resnet")
        saved(model, folder)
        out[kind] = SimpleNamespace(folder=folder, model=model, steps=their_steps(model))
    return out


@pytest.mark.parametrize(("name", "kind"), [
    *(("one device", kind) for kind in KINDS),
    *(pytest.param(name, "one stage", marks=[pytest.mark.slow] if name in SLOW else []) for name in list(MESHES)[1:]),
])  # fmt: skip
def test_train_steps_equal_those_of_transformers(name, kind, known):
    cfg, weights = hf.load(known[kind].folder)
    assert cfg == resnet.Config(**{**TINY, **KINDS[kind]})
    got, want = our_steps(cfg, weights, name), known[kind].steps
    close(got.losses, want.losses)
    if name == "one device":
        close(got.logits, want.logits)
    close_to_tensors("params", got.grads, want.grads)
    for group, leaves in got.weights.items():
        close_to_tensors(group, fs.device_get(leaves), want.tensors)


def test_blocks_are_gathered_again_in_backward_if_released_with_the_same_gradients(known):
    cfg, weights = hf.load(known["one stage"].folder)
    mesh = fs.make_mesh(data=2)
    specs = fs.fully_shard(resnet.specs(cfg), weights["params"], axis="data", min_size=4)
    params = fs.materialize(weights["params"], specs, mesh, key=fs.key(0))
    state = fs.materialize(weights["state"], P(), mesh, key=fs.key(0))

    def run(remat, **options):
        layout = resnet.Layout("data", **options)

        @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P("data"), P("data")), out_specs=(P(), P(), specs),
                      check="never")  # fmt: skip
        def step(p, state, x, y):
            loss_fn = lambda p: resnet.loss(cfg, p, state, x, y, layout=layout, specs=specs, remat=remat)  # noqa: E731
            (loss, new), grads = fs.value_and_grad(loss_fn, has_aux=True)(p)
            return loss, new, grads

        with fs.recording() as log:
            got = step(params, state, *inputs())
        return fs.device_get(got), [t.phase for t in log if t.op == "all_gather" and t.rank == 0]

    want, kept = run(False, release=False)
    norms, stem, blocks, head = 1, 1, 2, 1
    assert kept == ["forward"] * (norms + stem + blocks + head)
    for remat in (False, True):
        got, gathered = run(remat, prefetch=0)
        assert_same(got, want)
        assert gathered == kept + ["backward"] * blocks  # the last of three is still there


def test_half_precision_computes_convolutions_and_the_head_in_it_and_norms_in_float32(known, monkeypatch):
    cfg, weights = hf.load(known["one stage"].folder)
    mesh = fs.make_mesh(data=2, model=2)
    layout = resnet.Layout("data", ("data", "model"), dtype=torch.bfloat16, reduce_dtype=torch.float32)
    specs = resnet.specs(cfg, model=layout.model)
    dtypes = set()

    def watch(name, weight):
        f = getattr(nn, name)

        def watched(*args, **options):
            dtypes.add((name, args[weight].dtype))
            return f(*args, **options)

        monkeypatch.setattr(nn, name, watched)

    for name, weight in (("conv2d", 1), ("batch_norm", 2), ("linear", 1)):
        watch(name, weight)

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P("data"), P("data")), out_specs=(P(), P(), specs))
    def step(p, state, x, y):
        def loss_fn(p):
            return resnet.loss(cfg, p, state, x, y, layout=layout, specs=specs)

        (loss, new), grads = fs.value_and_grad(loss_fn, has_aux=True)(p)
        return loss, new, grads

    place = lambda group, specs: fs.materialize(weights[group], specs, mesh, key=fs.key(0), dtype=torch.float32)  # noqa: E731
    x, y = inputs()
    loss, new, grads = fs.device_get(step(place("params", specs), place("state", P()), x.float(), y))
    assert dtypes == {("conv2d", torch.bfloat16), ("batch_norm", torch.float32), ("linear", torch.bfloat16)}
    assert {g.dtype for g in fs.tree.leaves((loss, grads))} == {torch.float32}
    # Rounding of 2^-8 at each of eight convolutions.
    torch.testing.assert_close(loss.double(), known["one stage"].steps.losses[0], rtol=0.03, atol=0)
    assert new["stem"]["norm_1"]["var"].dtype == torch.float32


def test_evaluation_and_frozen_norms_use_the_running_statistics(known):
    model = known["basic"].model.eval()
    cfg, weights = hf.load(saved(model, known["basic"].folder.parent / "trained"))
    x, y = inputs()
    model.zero_grad()
    want = model(x).logits
    torch.nn.functional.cross_entropy(want, y).backward()
    want_grads = {name: p.grad for name, p in model.named_parameters()}
    for name in ("one device", "head over all"):
        got = our_steps(cfg, weights, name, steps=1, train=False)
        close(got.logits, want.detach())
        close_to_tensors("params", got.grads, want_grads)
        assert_same(fs.device_get(got.weights["state"]), fs.device_get(fs.materialize(
            weights["state"], P(), fs.make_mesh(data=1), key=fs.key(0))))  # fmt: skip


def test_stem_for_small_images_keeps_their_size():
    cfg = resnet.Config(**TINY, stem="cifar")
    weights = {"params": resnet.init(cfg), "state": resnet.state(cfg)}
    weights = fs.device_get(fs.materialize(weights, P(), fs.make_mesh(data=1), key=fs.key(0)))
    weights = fs.tree.map(lambda w: w.double() if w.is_floating_point() else w, weights)
    model = model_of()
    embedder = model.resnet.embedder
    embedder.embedder.convolution = torch.nn.Conv2d(2, 5, 3, padding=1, bias=False).double()
    embedder.pooler = torch.nn.Identity()
    named = {resnet.theirs(path).name: leaf for path, leaf in fs.tree.leaves_with_path(weights)}
    model.load_state_dict(named)
    x, _ = inputs()
    logits, _ = resnet.apply(cfg, weights["params"], weights["state"], x, train=True)
    close(logits, model.train()(x).logits.detach())
    assert "stem='cifar': transformers has no such model" in error_text(resnet.save, "no", cfg, weights)


@pytest.mark.parametrize("layers", [18, 34, 50, 101, 152])
def test_named_sizes_have_the_parameters_of_the_paper(layers):
    """Numbers of parameters with 1,000 classes, as torchvision documents them."""
    known = {18: 11_689_512, 34: 21_797_672, 50: 25_557_032, 101: 44_549_160, 152: 60_192_808}
    cfg = resnet.Config.of(layers)
    assert sum(x.numel() for x in fs.tree.leaves(resnet.init(cfg))) == known[layers]
    norms = [n for n in fs.tree.leaves(resnet.state(cfg)) if not n.ndim]
    assert len(norms) == layers - 1 + (3 if layers < 50 else 4)  # one for each convolution, and of the shortcuts
    wide = resnet.Config.of(layers, num_labels=2_000_000, num_channels=1)
    assert resnet.init(wide)["fc"]["w"].shape == (2_000_000, cfg.hidden_sizes[-1])


@pytest.mark.parametrize("head", ["model", ("data", "model")])
def test_logits_of_ones_own_have_the_gradients_of_their_dense_form(head):
    """Cosines of features and classes, whose gradients pass the gathers of `head_inputs`."""
    cfg = resnet.Config(**TINY | {"hidden_sizes": (8,), "depths": (1,)})
    x, y = inputs()
    y[1] = -100

    def cosines(x, fc, _targets):
        normalize = torch.nn.functional.normalize
        return nn.linear(normalize(x), normalize(fc["w"]).mT)

    def run(sizes, layout):
        mesh, specs = fs.make_mesh(**sizes), resnet.specs(cfg, model=layout.model)
        params = fs.materialize(resnet.init(cfg), specs, mesh, key=fs.key(0), dtype=torch.float64)
        state = fs.materialize(resnet.state(cfg), P(), mesh, key=fs.key(0))

        @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P(layout.data), P(layout.data)), out_specs=(P(), specs),
                      check="never")  # fmt: skip
        def step(p, state, x, y):
            loss_fn = lambda p: resnet.loss(cfg, p, state, x, y, layout=layout, logits=cosines, label_smoothing=0.1)  # noqa: E731
            (loss, _), grads = fs.value_and_grad(loss_fn, has_aux=True)(p)
            return loss, grads

        return fs.device_get(step(params, state, x, y))

    want_loss, want = run({"data": 1}, resnet.Layout())
    loss, grads = run({"data": 2, "model": 2}, resnet.Layout("data", head))
    close(loss, want_loss)
    close(grads, want)
    assert want["stem"]["conv_1"]["w"].abs().max() > 1e-4


# --- files ----------------------------------------------------------------------------------------------------


def test_saved_from_a_mesh_loads_in_transformers_with_its_statistics(known, tmp_path):
    cfg, weights = hf.load(known["bottleneck"].folder)
    trained = our_steps(cfg, weights, "model").weights
    hf.save(tmp_path, cfg, trained, like=known["bottleneck"].folder, max_shard_bytes=3000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert model.config.id2label == known["bottleneck"].model.config.id2label
    assert model.dtype == torch.float64
    torch.testing.assert_close(model.state_dict(), known["bottleneck"].steps.tensors, rtol=1e-9, atol=1e-9)
    again, stored = hf.load(tmp_path)
    assert again == cfg
    assert_same(fs.device_get(fs.materialize(stored, P(), fs.make_mesh(data=1), key=fs.key(0))), fs.device_get(trained))


def test_a_head_of_other_classes_does_not_take_the_names_of_the_folder_it_is_like(known, tmp_path):
    cfg = resnet.Config(**TINY | {"num_labels": 3})
    weights = {"params": resnet.init(cfg), "state": resnet.state(cfg)}
    weights = fs.materialize(weights, P(), fs.make_mesh(data=1), key=fs.key(0))
    resnet.save(tmp_path, cfg, weights, like=known["basic"].folder)
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path)
    assert model.config.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    assert model.classifier[1].out_features == 3
    assert resnet.config(tmp_path) == cfg
    assert resnet.config(tmp_path, num_labels=5) == resnet.Config(**TINY | {"num_labels": 5})
    assert error_text(resnet.config, tmp_path, labels=5).startswith("config: there is no field labels\n  fix: one of ")


def test_backbone_without_a_head_is_read_and_written(known, tmp_path):
    base = known["basic"].model.resnet.eval()
    cfg, weights = hf.load(saved(base, tmp_path / "theirs"))  # names without a prefix
    assert (cfg.num_labels, list(weights["params"])) == (0, ["stem", "stages"])
    whole = fs.device_get(fs.materialize(weights, P(), fs.make_mesh(data=1), key=fs.key(0)))
    x, y = inputs()
    features, _ = resnet.apply(cfg, whole["params"], whole["state"], x, train=False)
    close(features, base(x).pooler_output.flatten(1).detach())
    assert "resnet: the config has no head" in error_text(
        resnet.loss, cfg, whole["params"], whole["state"], x, y, train=False)  # fmt: skip
    hf.save(tmp_path / "ours", cfg, whole)
    again = transformers.AutoModel.from_pretrained(tmp_path / "ours").eval()
    close(again(x).pooler_output, base(x).pooler_output)


def test_folder_with_missing_extra_and_misshapen_tensors_is_refused(known, tmp_path):
    saved(known["basic"].model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stem = "resnet.embedder.embedder.normalization"
    tensors["resnet.more"] = tensors.pop(f"{stem}.running_mean")
    tensors[f"{stem}.running_var"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    text = error_text(hf.load, tmp_path)
    for name in ("resnet.more", f"{stem}.running_mean", f"{stem}.running_var"):
        assert name in text


@pytest.mark.parametrize(("changes", "words"), [
    ({"layer_type": "inverted"}, "has values of the wrong kind\n  layer_type: 'inverted'"),
    ({"depths": 3}, "depths: 3"),
    ({"depths": [2]}, "every stage has a number of channels and of blocks"),
    ({"hidden_act": "prelu"}, "hidden_act='prelu'\n  it has parameters of its own"),
    ({"model_type": "regnet"}, "model_type: 'regnet', not 'resnet'"),
    ({"problem_type": "regression"}, "problem_type='regression'\n  the loss here is the cross-entropy of one class"),
])  # fmt: skip
def test_config_of_another_model_is_refused(changes, words, known, tmp_path):
    contents = json.loads((known["bottleneck"].folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(contents | changes))
    assert words in error_text(resnet.config, tmp_path)


def test_config_of_transformers_without_changes_is_that_of_resnet_50(tmp_path):
    transformers.ResNetConfig().save_pretrained(tmp_path)
    assert resnet.config(tmp_path) == resnet.Config.of(50, num_labels=2)  # their default number of labels
    transformers.ResNetConfig(num_labels=1000, layer_type="basic", hidden_sizes=[64, 128, 256, 512]).save_pretrained(
        tmp_path
    )
    assert resnet.config(tmp_path) == resnet.Config.of(34)


# --- wrong arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "words"), [
    ({"num_channels": 0}, "resnet.Config: num_channels=0"),
    ({"num_labels": -1}, "resnet.Config: num_labels=-1\n  fix: 0 or more"),
    ({"hidden_sizes": (8,)}, "every stage has a number of channels and of blocks, each 1 or more"),
    ({"depths": (1, 0)}, "every stage has a number"),
    ({"hidden_sizes": (), "depths": ()}, "every stage has a number"),
    ({"hidden_sizes": (3, 8)}, "a bottleneck has 1 of 4 channels inside"),
    ({"layer_type": "basic", "downsample_in_bottleneck": True}, "downsample_in_bottleneck=True with basic blocks"),
])  # fmt: skip
def test_wrong_sizes_are_refused(fields, words):
    assert words in error_text(lambda: resnet.Config(**TINY | fields))


def test_wrong_images_leaves_and_layouts_are_named():
    cfg = resnet.Config(**TINY)
    params, state = (fs.device_get(fs.materialize(part(cfg), P(), fs.make_mesh(data=1), key=fs.key(0)))
                     for part in (resnet.init, resnet.state))  # fmt: skip
    x = torch.zeros(2, 3, 8, 8)
    assert "the images do not fit the config\n  x  f32[2, 3, 8, 8]\n  fix: floating [B, 2, H, W]" in error_text(
        resnet.apply, cfg, params, state, x, train=True
    )
    assert "params['fc']['w']: is missing" in error_text(
        resnet.apply, cfg, params | {"fc": {"b": params["fc"]["b"]}}, state, x[:, :2], train=True
    )
    assert "state['stages'][0][0]['norm_skip']['mean']: is missing" in error_text(
        resnet.apply, cfg, params, resnet.state(resnet.Config(**TINY | {"embedding_size": 8})), x[:, :2], train=True
    )
    text = error_text(lambda: resnet.Layout(("data", "replica"), ("data", "model")))
    assert "the head has an axis of the batch that other axes split again" in text
    assert resnet.Layout(("replica", "data"), ("model", "data")).batch == ("replica",)
    layout = resnet.Layout("data", ("data", "model"), examples=9)
    mesh, f = fs.make_mesh(data=2, model=2), lambda x: resnet.head_inputs(cfg, params, x, layout=layout)[0]
    step = fs.shard_map(f, mesh=mesh, in_specs=P("data"), out_specs=P())
    assert error_text(fs.check, step, torch.zeros(5, 12)) == (
        "resnet: Layout(examples=9), and this rank has 3 images\n  9 over 'data' splits into [5, 4]\n"
        "  fix: the number of images on all ranks"
    )
    assert "layers=20\n  fix: one of 18, 34, 50, 101, 152" in error_text(resnet.Config.of, 20)
