"""Train a ResNet to tell characters in typefaces that it has not seen, with the classes split over ranks.

    python -m fshard.recipes.classify --out out                                one device: 2,180 characters, pictures
    python -m fshard.recipes.classify --mesh data=2,model=2 --head model       four simulated devices: the same losses
    torchrun --nproc-per-node 4 -m fshard.recipes.classify --classes 1000000 --partial-fc 0.1
    python -m fshard.recipes.classify --folder photos --depth 50 --width 256   your own images
    python -m fshard.recipes.classify --resume out --mesh model=4              resume on another mesh

Each rank computes the features of its images. The ranks that share the classes gather their features, and each compares
all of them with its part of the classes: no rank has all logits.

Legend: B batch, D features, C classes; ranks: all of the mesh; [C@split] is a dim split over the axes of the head, and
[B@rest] over the others.
"""

from __future__ import annotations

import math
import os
import signal
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset

import fshard as fs
from fshard import P, checkpoint, data, nn, optim
from fshard.models import resnet

from . import command, glyphs, pictures
from .command import DTYPES, POSITIVE, Refusal, at_least, is_first, option
from .log import Log, printer
from .pretrain import learning_rate, make_optimizer

RANKS = ("data", "model")  # the axes: images are split over both
SMOOTHING = 0.1  # of labels
SCALE = 32.0  # of cosines
DEPTHS: dict[int, tuple[Any, tuple[int, ...]]] = {10: ("basic", (1, 1, 1, 1)), **resnet.DEPTHS}
MARGINS = {"none": (1.0, 0.0, 0.0), "cosine": (1.0, 0.0, 0.0), "arcface": (1.0, 0.3, 0.0), "cosface": (1.0, 0.0, 0.2)}


@dataclass
class Options(command.Options):
    """Train a ResNet on images of characters, or on a folder of images."""

    name = "classify"
    may_differ = ("steps", "head", "zero", "compile", "workers")

    steps: int = option(2400, rule=at_least(1))
    batch: int = option(64, "images of a step, over all devices", rule=at_least(1))
    lr: float = option(2e-3, rule=POSITIVE)
    out: Path | None = option(None, "write metrics.jsonl, checkpoints, loss.png and confusion.png here")
    folder: Path | None = option(None, "a folder with a folder of images for each class, instead of characters")
    cjk: bool = option(False, "add 32,148 Han and Hangul characters, of the package noto-cjk-sans-otc")
    classes: int = option(0, "add classes without images up to this number", rule=at_least(0))
    head: str = option("all", "ranks that the classes are split over: all (default), only the axis model, or none",
                       choices=("all", "model", "replicated"))  # fmt: skip
    margin: str = option("none", "normalize classes, and ask for a margin", choices=MARGINS)
    partial_fc: float = option(1.0, "share of the classes that a step compares with (default: all)",
                               rule=(lambda x: 0 < x <= 1, "give a share above 0, at most 1"))  # fmt: skip
    batch_stats: str = option("global", "normalize by the statistics of the global batch, or by the initial ones",
                              choices=("global", "frozen"))  # fmt: skip
    depth: int = option(10, "layers of the ResNet (default: %(default)s)", choices=DEPTHS)
    width: int = option(32, "channels of its first stage (default: %(default)s)", rule=at_least(1))
    dtype: str = option("float32", "to compute with; parameters stay float32", choices=DTYPES)
    zero: bool = option(False, "split the optimizer's state over data (ZeRO-1)")
    compile: bool = option(False, "compile the step as one graph")
    workers: int = option(0, "processes that read the images (default: none)", rule=at_least(0))

    def problems(self) -> list[str]:
        problems, share = super().problems(), f"--partial-fc {self.partial_fc}"
        if self.folder and self.cjk:
            problems.append("--folder --cjk: give one of the two")
        if self.partial_fc < 1 and self.dtype == "float16":
            problems.append(f"{share} --dtype float16: a step that the loss scale skips would step the sampled "
                            "classes: give --dtype bfloat16")  # fmt: skip
        if self.partial_fc < 1 and self.compile:
            problems.append(f"{share} --compile: how many sampled classes a rank has depends on the batch, and a "
                            "compiled program has fixed shapes: give one of the two")  # fmt: skip
        return problems

    def make_mesh(self) -> fs.Mesh:
        """Make the mesh, whose ranks have equally many images of a batch."""
        mesh = super().make_mesh()
        if self.batch % mesh.size:
            more = -(-self.batch // mesh.size) * mesh.size
            raise Refusal(f"--batch {self.batch}: the {mesh.size} ranks must have equal parts, and {self.batch} % "
                          f"{mesh.size} = {self.batch % mesh.size}: give --batch {more}")  # fmt: skip
        return mesh


class Images(NamedTuple):
    """Datasets of (uint8 [channels, 32, 32], class), and the names of the classes."""

    train: Any
    test: Any
    names: Sequence[str]
    channels: int
    labels_crc32: int

    @classmethod
    def of(cls, args: Options) -> Images:
        """Draw the characters, or list the folder; every tenth image, by its name, is for testing."""
        if args.folder:
            folder = data.image_folder(args.folder, size=(glyphs.SIZE, glyphs.SIZE))
            held_out = np.array([zlib.crc32(os.fsencode(name)) % 10 == 0 for name in folder.files])
            every: Any = folder
            train, test = (Subset(every, np.flatnonzero(rows).tolist()) for rows in (~held_out, held_out))
            return cls(train, test, folder.classes, 3, zlib.crc32(os.fsencode("\n".join(folder.files))))
        drawn = glyphs.load(cjk=args.cjk)
        parts = [TensorDataset(torch.from_numpy(x)[:, None], torch.from_numpy(y)) for x, y in drawn[:2]]
        return cls(parts[0], parts[1], drawn.names, 1, zlib.crc32(drawn.train[1].tobytes()))


def augment(key: Tensor, images: Tensor, batch: int) -> Tensor:
    """Move, stretch, slant, thicken or thin each image by draws of the key: [B@ranks, channels, H, W] -> the same.

    An image of the batch has the same draws on every mesh.
    """
    u = fs.random.uniform(key, (batch, 7), low=-1, high=1, spec=P(RANKS))  # [B@ranks, 7]
    wide, high, slant, right, down = u[:, :5].mul(u.new_tensor([0.1, 0.1, 0.2, 0.125, 0.125])).unbind(1)
    wide, high, zero = wide.exp(), high.exp(), torch.zeros_like(wide)
    rows = torch.stack([wide, wide * slant, right, zero, high, down], 1).view(-1, 2, 3)
    grid = F.affine_grid(rows, list(images.shape), align_corners=False)
    images = F.grid_sample(images, grid, align_corners=False)
    by, share = u[:, 5:].view(-1, 2, 1, 1, 1).unbind(1)
    thick, thin = (s * F.max_pool2d(s * images, 3, 1, 1) for s in (1, -1))
    other = thick.where(by > 0, thin)
    return images + (other - images) * (share * 0.5).clamp(min=0)  # half of them unchanged


def main(argv: list[str] | None = None) -> float:
    """Train, and return the share of the test images whose class is the likeliest one."""
    return Options.run(run, argv)


def run(args: Options) -> float:
    clock = time.perf_counter()
    begin = args.check_folders()
    mesh = args.make_mesh()
    say = printer()
    images = Images.of(args)
    classes = max(args.classes, len(images.names))
    if 0 < args.classes < classes:
        raise Refusal(f"--classes {args.classes}: the images have {classes}: give {classes} or more, or leave it out")
    if len(images.train) < args.batch or not len(images.test):
        raise Refusal(f"--batch {args.batch}: there are only {len(images.train)} images to train on, and "
                           f"{len(images.test)} to test on: give a smaller batch, or more images")  # fmt: skip
    args.check_same_run(labels=(images.labels_crc32, "the same images"))
    say(f"{len(images.train)} images to train on, {len(images.test)} to test on, {classes} classes, on {mesh!r}")

    # The train state as a description, and its specs. Another optimizer steps a sample of the classes.
    cfg = config(args, images.channels, classes)
    split = {"all": RANKS, "model": ("model",), "replicated": ()}[args.head]  # axes of the classes
    layout = resnet.Layout(RANKS, split, dtype=DTYPES[args.dtype], reduce_dtype=torch.float32)
    described = resnet.init(cfg)
    specs = {**fs.tree.map(lambda _: P(), described), "fc": fs.tree.map(lambda _: P(split), described["fc"])}
    sampled = args.partial_fc < 1
    stepped, stepped_specs = (
        {k: v for k, v in tree.items() if not (sampled and k == "fc")} for tree in (described, specs)
    )
    scale = fs.LossScale() if args.dtype == "float16" else None
    optimizer = make_optimizer(
        args, stepped, stepped_specs, zero=("data",) * args.zero, weight_decay=0.05, summed=True, scale=scale
    )
    of_rows = optim.adamw(learning_rate(args), b2=0.99)
    key = fs.key(args.seed)
    like = {"params": described, "statistics": resnet.state(cfg), "opt": optimizer.init(stepped),
            "rows": of_rows.init(described["fc"]) if sampled else {}, "key": key, "step": torch.tensor(0)}  # fmt: skip
    state_specs = {"params": specs, "statistics": P(), "opt": optimizer.specs(stepped_specs),
                   "rows": of_rows.specs(specs["fc"]) if sampled else {}, "key": P(), "step": P()}  # fmt: skip
    folder = args.out or args.resume
    if args.resume:
        state = checkpoint.restore(args.resume, like, specs=state_specs, mesh=mesh, step=begin)
    else:
        state = fs.materialize(like, state_specs, mesh, key=fs.fold_in(key, "init"))
    n = sum(x.numel() for x in fs.tree.leaves(described))
    say(f"{n / 1e6:.2f}M parameters" + (f", resumed at step {begin}" if begin else ""))

    def logits_of(
        params: Any, statistics: Any, x: Tensor, y: Any, *, train: bool, margin: bool, sample: Tensor | None
    ) -> Any:
        """Return the logits [B@rest, C@split], with a margin for y if asked, these targets, and the new statistics."""
        x, statistics = resnet.features(cfg, params, statistics, x, train=train, layout=layout)  # [B@ranks, D]
        x, fc, y = resnet.head_inputs(cfg, params, x, y, layout=layout)  # [B@rest, D]
        if args.margin == "none":
            return nn.linear(x, fc["w"].mT, fc["b"]), y, statistics
        m1, m2, m3 = MARGINS[args.margin if margin else "cosine"]
        logits = nn.margin(nn.cosine_logits(x, fc["w"]), y, m1=m1, m2=m2, m3=m3, scale=SCALE, axis=split, size=classes,
                           classes=sample)  # fmt: skip
        return logits, y, statistics

    def loss_fn(params: Any, statistics: Any, batch: Any, sample: Tensor | None, scaling: Any) -> Any:
        train = args.batch_stats == "global"
        logits, y, statistics = logits_of(params, statistics, *batch, train=train, margin=True, sample=sample)
        loss = nn.cross_entropy(logits, y, axis=split, size=classes, classes=sample, over=layout.batch,
                                label_smoothing=SMOOTHING, donate=True)  # fmt: skip
        return (scale.scale(loss, scaling) if scale else loss), (statistics, loss.detach())

    @fs.shard_map(mesh=mesh, in_specs=(state_specs, P(RANKS)), out_specs=(state_specs, P()), donate=0,
                  compile=args.compile)  # fmt: skip
    def train_step(state: Any, batch: Any) -> Any:
        key = fs.fold_in(state["key"], state["step"])
        x, y = augment(key, batch[0] / 255, args.batch), batch[1]
        params, opt, sample = state["params"], state["opt"], None
        if sampled:
            count = math.ceil(args.partial_fc * classes)
            known = fs.all_gather(y, split or None, to="invariant")  # [B@rest]
            sample = nn.sample_classes(key, known, size=classes, count=count, axis=split, over=layout.batch)
            rows = sample - fs.local_range(len(params["fc"]["w"]), split, size=classes)[0]
            params = {**params, "fc": fs.tree.map(lambda w: w[rows], params["fc"])}
        (_, (statistics, loss)), grads = fs.value_and_grad(loss_fn, has_aux=True)(
            params, state["statistics"], (x, y), sample, opt.get("scale") if scale else None
        )
        if sampled:
            fc, of_classes = optim.update_rows(of_rows, rows, grads.pop("fc"), state["rows"], state["params"]["fc"])
            params, opt = optimizer.update(grads, opt, {name: params[name] for name in grads})
            params["fc"] = fc
        else:
            of_classes = state["rows"]
            params, opt = optimizer.update(grads, opt, params)
        state = {**state, "params": params, "statistics": statistics, "opt": opt, "rows": of_classes,
                 "step": state["step"] + 1}  # fmt: skip
        return state, {"loss": loss, "grad_norm": (opt["opt"] if scale else opt)[0]["norm"]}

    @fs.shard_map(mesh=mesh, in_specs=(specs, P(), P(RANKS), P(RANKS)), out_specs=P())
    def test_step(params: Any, statistics: Any, batch: Any, counted: Tensor) -> Any:
        with torch.no_grad():
            x, y = batch[0] / 255, batch[1].where(counted, -100)
            logits, y, _ = logits_of(params, statistics, x, y, train=False, margin=False, sample=None)
            nats = nn.cross_entropy(logits, y, axis=split, size=classes, over=layout.batch, reduction="sum")
            best = nn.top_k(logits, min(5, classes), axis=split, size=classes)[1]
            return nats, fs.all_gather((best, y), layout.batch or None, to="invariant")

    def batches(dataset: Any, key: Tensor | None, **options: Any) -> Iterator[Any]:
        sampler = data.sampler(key, len(dataset), args.batch, mesh, axis=RANKS, **options)
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=args.workers, worker_init_fn=ignore_signals)
        return data.batches(loader)

    schedule = learning_rate(args)
    train_batches = batches(images.train, fs.fold_in(key, "data"), step=begin)
    with Log(args, begin, args.steps, say, folder, unit="images") as log:
        for step in range(begin, args.steps):
            start = time.perf_counter()
            state, metrics = train_step(state, next(train_batches))
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
            log.write(step=step, loss=loss, grad_norm=norm, lr=float(schedule(step)),
                      images_per_s=args.batch / (time.perf_counter() - start))  # fmt: skip
            args.save(mesh, folder, state, step=step + 1, steps=args.steps, loss=loss, grad_norm=norm)

    nats, found = 0.0, []
    test_batches = args.until_told(mesh, batches(images.test, None, epoch=0, even=True))
    for i, batch in enumerate(test_batches):
        counted = data.counted(step=i, size=len(images.test), batch=args.batch)
        of_batch, results = test_step(state["params"], state["statistics"], batch, counted)
        nats += float(of_batch)
        found.append([fs.device_get(x)[counted].numpy() for x in results])
    best, targets = map(np.concatenate, zip(*found, strict=True))  # [N, 5], [N]
    hits = best == targets[:, None]
    top1 = float(hits[:, 0].mean())
    say(f"test images: top-1 {top1:.1%}, top-5 {hits.any(1).mean():.1%}, loss {nats / len(targets):.3f} "
        f"after {args.steps} steps, {time.perf_counter() - clock:.0f} s")  # fmt: skip
    if folder and is_first():
        if begin < args.steps:  # the folder has the losses of a step
            fs.plot.losses(folder).savefig(folder / "loss.png")
        pictures.confusion(folder / "confusion.png", targets, best[:, 0], images.names)
    return top1


def ignore_signals(_: int) -> None:
    """Let a worker process go on when all processes of the job are told to end: the step needs its batch."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def config(args: Options, channels: int, classes: int) -> resnet.Config:
    """Return the ResNet for small images: a stem of one 3x3 convolution, then stages that halve height and width."""
    kind, depths = DEPTHS[args.depth]
    return resnet.Config(
        num_channels=channels, embedding_size=max(1, args.width // 2), stem="cifar", downsample_in_first_stage=True,
        hidden_sizes=tuple(args.width << i for i in range(4)), depths=depths, layer_type=kind, num_labels=classes,
    )  # fmt: skip


if __name__ == "__main__":
    main()
