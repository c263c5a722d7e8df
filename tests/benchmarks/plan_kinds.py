"""Modules of many kinds, for `plan_accuracy`: recurrent, convolutional, state spaces, graphs, transforms, adapters.

Each is a constructor of a module that returns a loss, the described batch of one rank, and how its parameters are
placed. Sizes are small: activations are most of the peak, as in large steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import fshard as fs
from fshard import P

VOCAB = 512


@dataclass(frozen=True)
class Kind:
    """A module whose forward returns a loss; its batch for one rank: shapes, of ids where the dtype is int64.

    `imported`: a class that must be imported before the constructor runs. `targets`: the weights whose low-rank
    adapters the step trains.
    """

    make: Callable[[], nn.Module]
    batch: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    sharded: bool = True
    imported: tuple[str, str] = ("torch", "nn")
    targets: str = ""


def ids(*shape: int) -> tuple[tuple[int, ...], torch.dtype]:
    return shape, torch.int64


def floats(*shape: int) -> tuple[tuple[int, ...], torch.dtype]:
    return shape, torch.float32


class Loss(nn.Module):
    """A module whose result is compared with zeros: the mean square of its first tensor."""

    def __init__(self, module: nn.Module, *more: Any, **options: Any) -> None:
        super().__init__()
        self.module, self.more, self.options = module, more, options

    def forward(self, *xs: Tensor) -> Tensor:
        out = self.module(*xs, *self.more, **self.options)
        while not isinstance(out, Tensor):
            out = out[0]
        return out.float().square().mean()


class Recurrent(nn.Module):
    """A language model of a recurrent layer."""

    def __init__(self, layer: Any, width: int = 256, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 128)
        self.layer = layer(128, width, batch_first=True, **options)
        out = options.get("proj_size", 0) or width
        self.head = nn.Linear(out * (2 if options.get("bidirectional") else 1), VOCAB)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.layer(self.embedding(x))
        return F.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


class SequenceToSequence(nn.Module):
    """An LSTM that encodes, and a cell that decodes with attention."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, width)
        self.encoder = nn.LSTM(width, width, batch_first=True)
        self.cell = nn.LSTMCell(2 * width, width)
        self.head = nn.Linear(width, VOCAB)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        memory, (h, c) = self.encoder(self.embedding(x))
        h, c, losses = h[0], c[0], []
        for t in range(y.shape[1]):
            scores = torch.einsum("btd,bd->bt", memory, h).softmax(-1)
            context = torch.einsum("bt,btd->bd", scores, memory)
            h, c = self.cell(torch.cat([self.embedding(y[:, t]), context], -1), (h, c))
            losses.append(F.cross_entropy(self.head(h), y[:, t]))
        return torch.stack(losses).mean()


class UNet(nn.Module):
    def __init__(self, width: int = 32, inputs: int = 3) -> None:
        super().__init__()

        def block(a: int, b: int) -> nn.Sequential:
            return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU(),
                                 nn.Conv2d(b, b, 3, padding=1), nn.GroupNorm(8, b), nn.SiLU())  # fmt: skip

        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(block(a, b) for a, b in zip([inputs, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in pairwise(sizes))
        self.join = nn.ModuleList(block(2 * a, a) for a in sizes[:-1])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            kept.append(x)
        for i in reversed(range(len(self.up))):
            x = self.join[i](torch.cat([kept[i], self.up[i](x)], 1))
        return self.head(x)


class Separable(nn.Module):
    """Blocks of a depthwise convolution between two pointwise ones, as in MobileNetV2."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, 4 * width, 1), nn.GroupNorm(8, 4 * width), nn.ReLU6(),
                          nn.Conv2d(4 * width, 4 * width, 3, padding=1, groups=4 * width), nn.ReLU6(),
                          nn.Conv2d(4 * width, width, 1), nn.GroupNorm(8, width))
            for _ in range(blocks)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Dilated(nn.Module):
    """Causal convolutions over time whose dilation doubles, as in WaveNet."""

    def __init__(self, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(width, 2 * width, 2, dilation=2**i) for i in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + F.glu(layer(F.pad(x, (2**i, 0))), 1)
        return x


class Generator(nn.Sequential):
    """Transposed convolutions from noise to images, as in DCGAN."""

    def __init__(self, width: int = 32) -> None:
        super().__init__(
            nn.ConvTranspose2d(64, 4 * width, 4), nn.ReLU(),
            nn.ConvTranspose2d(4 * width, 2 * width, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip


class GraphConvolution(nn.Module):
    """Sums over the edges of a graph, of products of its nodes."""

    def __init__(self, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[:, 0], edges[:, 1]
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target))).clamp(min=1)
        for layer in self.layers:
            x = torch.relu(torch.zeros_like(x).index_add(0, target, layer(x)[source]) / degree[:, None])
        return x


class GraphAttention(nn.Module):
    """A softmax over the edges into each node."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))
        self.scores = nn.ModuleList(nn.Linear(2 * width, 1) for _ in range(layers))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[:, 0], edges[:, 1]
        for layer, score in zip(self.layers, self.scores, strict=True):
            h = layer(x)
            weights = F.leaky_relu(score(torch.cat([h[source], h[target]], -1))[:, 0])
            most = torch.zeros(len(x)).scatter_reduce(0, target, weights.detach(), "amax")
            weights = (weights - most[target]).exp()
            total = torch.zeros(len(x)).scatter_add(0, target, weights)
            out = torch.zeros_like(h).index_add(0, target, h[source] * weights[:, None])
            x = F.elu(out / total.clamp(min=1e-6)[:, None])
        return x


class Scan(nn.Module):
    """Diagonal state spaces, by a parallel scan of log2 T steps."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.decay = nn.ParameterList(nn.Parameter(torch.randn(width)) for _ in range(layers))
        self.mix = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for decay, mix in zip(self.decay, self.mix, strict=True):
            h, a, step = x, torch.sigmoid(decay).expand_as(x), 1
            while step < x.shape[1]:
                h = h + a * F.pad(h, (0, 0, step, 0))[:, : x.shape[1]]
                a = a * F.pad(a, (0, 0, step, 0), value=0.0)[:, : x.shape[1]]
                step *= 2
            x = x + F.glu(mix(h), -1)
        return x


class Loop(nn.Module):
    """Selective state spaces (Mamba's recurrence), one step after the other."""

    def __init__(self, width: int = 64, states: int = 16) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.rand(width, states))
        self.project = nn.Linear(width, width + 2 * states)

    def forward(self, x: Tensor) -> Tensor:
        n = self.a.shape[1]
        step, b, c = self.project(x).split([x.shape[-1], n, n], -1)
        step, outs = F.softplus(step), []
        state = x.new_zeros(x.shape[0], x.shape[2], n)
        for t in range(x.shape[1]):
            decay = torch.exp(-step[:, t, :, None] * self.a)
            state = decay * state + (step[:, t] * x[:, t])[..., None] * b[:, t, None]
            outs.append((state * c[:, t, None]).sum(-1))
        return torch.stack(outs, 1)


class Grouped(nn.Module):
    """Experts with equally many rows, by one grouped product for each matrix."""

    def __init__(self, width: int = 128, experts: int = 8) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * 0.05)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * 0.05)

    def forward(self, x: Tensor) -> Tensor:
        n, experts = len(x), len(self.up)
        ends = torch.arange(1, experts + 1, dtype=torch.int32) * (n // experts)
        h = F.grouped_mm(x.bfloat16(), self.up.bfloat16(), offs=ends)
        return F.grouped_mm(F.silu(h), self.down.bfloat16(), offs=ends)


class Mixer(nn.Module):
    """MLPs over positions and over features, in turn."""

    def __init__(self, tokens: int = 64, width: int = 128, blocks: int = 3) -> None:
        super().__init__()
        mlp = lambda n, m: nn.Sequential(nn.LayerNorm(n), nn.Linear(n, m), nn.GELU(), nn.Linear(m, n))  # noqa: E731
        self.tokens = nn.ModuleList(mlp(tokens, 2 * tokens) for _ in range(blocks))
        self.features = nn.ModuleList(mlp(width, 4 * width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for over_tokens, over_features in zip(self.tokens, self.features, strict=True):
            x = x + over_tokens(x.mT).mT
            x = x + over_features(x)
        return x


class Recommender(nn.Module):
    """Bags of embeddings and their products, as in DLRM."""

    def __init__(self, rows: int = 20_000, width: int = 32, tables: int = 4) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.dense = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, width))
        self.top = nn.Sequential(nn.Linear((tables + 1) ** 2, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        features = torch.stack([self.dense(x), *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        return self.top((features @ features.mT).flatten(1))


class Fourier(nn.Module):
    """Fourier neural operators: products of a signal's low frequencies."""

    def __init__(self, width: int = 32, modes: int = 12, layers: int = 3) -> None:
        super().__init__()
        self.modes = modes
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(width, width, modes, modes, 2)) for _ in range(layers))
        self.skip = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:  # [batch, width, height, width]
        n = self.modes
        for weight, skip in zip(self.weights, self.skip, strict=True):
            low = torch.fft.rfft2(x)[:, :, :n, :n]
            mixed = torch.einsum("bixy,ioxy->boxy", low, torch.view_as_complex(weight))
            mixed = F.pad(mixed, (0, x.shape[-1] // 2 + 1 - n, 0, x.shape[-2] - n))
            x = F.gelu(torch.fft.irfft2(mixed, s=x.shape[-2:]) + skip(x.movedim(1, -1)).movedim(-1, 1))
        return x


class Video(nn.Sequential):
    def __init__(self, width: int = 16) -> None:
        super().__init__(
            nn.Conv3d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool3d(2),
            nn.Conv3d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.Conv3d(2 * width, 2 * width, 3, padding=1),
        )  # fmt: skip


def _hugging_face(model: str, config: str, **options: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(**options)).eval()


def _diffusers(model: str, **options: Any) -> nn.Module:
    return getattr(importlib.import_module("diffusers"), model)(**options).eval()


class LanguageModel(Loss):
    def forward(self, x: Tensor) -> Tensor:
        return self.module(input_ids=x, labels=x, use_cache=False).loss


class Whisper(Loss):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.module(input_features=x, labels=y, use_cache=False).loss


class Conditioned(Loss):
    def forward(self, x: Tensor, time: Tensor, *text: Tensor) -> Tensor:
        return self.module(x, time, *text, return_dict=False)[0].square().mean()


def _mamba() -> nn.Module:
    return LanguageModel(_hugging_face("MambaForCausalLM", "MambaConfig", vocab_size=VOCAB, hidden_size=64,
                                       num_hidden_layers=2, state_size=8))  # fmt: skip


def _whisper() -> nn.Module:
    return Whisper(_hugging_face("WhisperForConditionalGeneration", "WhisperConfig", vocab_size=VOCAB, d_model=128,
                                 encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
                                 decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256,
                                 max_source_positions=100, max_target_positions=64, pad_token_id=0, bos_token_id=1,
                                 eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
                                 begin_suppress_tokens=None))  # fmt: skip


def _convnext() -> nn.Module:
    return Loss(_hugging_face("ConvNextModel", "ConvNextConfig", hidden_sizes=[32, 64, 128, 256], depths=[1, 1, 2, 1]))


def _vit() -> nn.Module:
    return Loss(_hugging_face("ViTModel", "ViTConfig", hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
                              intermediate_size=512, image_size=64, patch_size=8))  # fmt: skip


def _swin() -> nn.Module:
    return Loss(_hugging_face("SwinModel", "SwinConfig", image_size=64, patch_size=2, embed_dim=32, depths=[2, 2],
                              num_heads=[2, 4], window_size=4))  # fmt: skip


def _wav2vec2() -> nn.Module:
    return Loss(_hugging_face("Wav2Vec2Model", "Wav2Vec2Config", hidden_size=128, num_hidden_layers=2,
                              num_attention_heads=4, intermediate_size=256, conv_dim=[64] * 4, conv_stride=[5, 2, 2, 2],
                              conv_kernel=[10, 3, 3, 2], num_feat_extract_layers=4, num_conv_pos_embeddings=16,
                              num_conv_pos_embedding_groups=4))  # fmt: skip


def _bert() -> nn.Module:
    return Loss(_hugging_face("BertModel", "BertConfig", vocab_size=VOCAB, hidden_size=128, num_hidden_layers=3,
                              num_attention_heads=4, intermediate_size=512))  # fmt: skip


def _unet2d() -> nn.Module:
    return Conditioned(_diffusers("UNet2DModel", sample_size=32, in_channels=3, out_channels=3, layers_per_block=1,
                                  block_out_channels=(32, 64), norm_num_groups=8, attention_head_dim=8,
                                  down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                                  up_block_types=("AttnUpBlock2D", "UpBlock2D")))  # fmt: skip


def _unet2d_text() -> nn.Module:
    return Conditioned(_diffusers("UNet2DConditionModel", sample_size=16, in_channels=4, out_channels=4,
                                  layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8,
                                  cross_attention_dim=32, attention_head_dim=8,
                                  down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                                  up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")))  # fmt: skip


def _vae() -> nn.Module:
    return Loss(_diffusers("AutoencoderKL", block_out_channels=(32, 64), norm_num_groups=8, layers_per_block=1,
                           down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
                return_dict=False)  # fmt: skip


TOKENS, IMAGES = (ids(8, 64),), (floats(4, 3, 64, 64),)
GRAPH = (floats(1024, 64), ids(8192, 2))
KINDS = {
    "lstm": Kind(lambda: Recurrent(nn.LSTM, num_layers=2), TOKENS),
    "lstm-both-ways": Kind(lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True), TOKENS),
    "lstm-projected": Kind(lambda: Recurrent(nn.LSTM, proj_size=64), TOKENS),
    "gru": Kind(lambda: Recurrent(nn.GRU, num_layers=2), TOKENS),
    "rnn": Kind(lambda: Recurrent(nn.RNN, bidirectional=True), TOKENS),
    "seq2seq": Kind(SequenceToSequence, (ids(8, 48), ids(8, 24)), sharded=False),
    "unet": Kind(lambda: Loss(UNet()), IMAGES),
    "unet2d": Kind(_unet2d, (floats(4, 3, 32, 32), ids(4)), imported=("diffusers", "UNet2DModel")),
    "unet2d-text": Kind(
        _unet2d_text, (floats(4, 4, 16, 16), ids(4), floats(4, 8, 32)), imported=("diffusers", "UNet2DConditionModel")
    ),
    "vae": Kind(_vae, (floats(2, 3, 32, 32),), imported=("diffusers", "AutoencoderKL")),
    "convnext": Kind(_convnext, IMAGES, imported=("transformers", "ConvNextModel")),
    "separable": Kind(lambda: Loss(Separable()), IMAGES),
    "generator": Kind(lambda: Loss(Generator()), (floats(16, 64, 1, 1),)),
    "video": Kind(lambda: Loss(Video()), (floats(2, 3, 8, 32, 32),)),
    "dilated": Kind(lambda: Loss(Dilated()), (floats(4, 64, 1024),), sharded=False),
    "wav2vec2": Kind(_wav2vec2, (floats(4, 4000),), imported=("transformers", "Wav2Vec2Model")),
    "whisper": Kind(
        _whisper, (floats(4, 80, 200), ids(4, 32)), imported=("transformers", "WhisperForConditionalGeneration")
    ),
    "mamba": Kind(_mamba, (ids(4, 32),), imported=("transformers", "MambaForCausalLM")),
    "state-space": Kind(lambda: Loss(Loop()), (floats(4, 64, 64),), sharded=False),
    "scan": Kind(lambda: Loss(Scan()), (floats(8, 256, 64),)),
    "graph": Kind(lambda: Loss(GraphConvolution()), GRAPH),
    "graph-attention": Kind(lambda: Loss(GraphAttention()), GRAPH, sharded=False),
    "grouped": Kind(lambda: Loss(Grouped()), (floats(2048, 128),)),
    "mixer": Kind(lambda: Loss(Mixer()), (floats(16, 64, 128),)),
    "recommender": Kind(lambda: Loss(Recommender()), (floats(512, 16), ids(512, 4, 8))),
    "fourier": Kind(lambda: Loss(Fourier()), (floats(4, 32, 64, 64),)),
    "vit": Kind(_vit, IMAGES, imported=("transformers", "ViTModel")),
    "swin": Kind(_swin, IMAGES, imported=("transformers", "SwinModel")),
    "bert-lora": Kind(_bert, TOKENS, imported=("transformers", "BertModel"), targets="all-linear"),
}


def import_for(names: Iterable[str]) -> None:
    """Import what the constructors of some kinds use, before ranks are forked."""
    for package, name in {KINDS[name].imported for name in names if name in KINDS}:
        getattr(importlib.import_module(package), name)


def build(name: str, kind: str) -> tuple[Any, tuple[Any, ...], Any, Any]:
    """As `plan_accuracy.build`: a step of AdamW of one of `KINDS`, on two ranks that split the batch."""
    chosen, mesh = KINDS[name], fs.make_mesh(kind=kind, data=2)
    apply, module = fs.defer(chosen.make)
    options = fs.lora.Config(chosen.targets, rank=8) if chosen.targets else None
    trained = fs.lora.init(options, module["params"], of=apply) if options else module["params"]
    fixed = {"buffers": module["buffers"], **({"base": module["params"]} if options else {})}
    specs = fs.fully_shard(P(), trained, axis="data") if chosen.sharded else fs.tree.map(lambda _: P(), trained)
    opt = fs.optim.adamw(1e-3)
    state = {"params": trained, "opt": opt.init(trained), "fixed": fixed}
    placed = {"params": specs, "opt": opt.specs(specs), "fixed": P()}
    batch = [fs.init.zeros((2 * shape[0], *shape[1:]), dtype=dtype) if dtype == torch.int64 else
             fs.init.normal((2 * shape[0], *shape[1:])) for shape, dtype in chosen.batch]  # fmt: skip

    @fs.shard_map(mesh=mesh, in_specs=(placed, *[P("data")] * len(batch)), out_specs=(placed, P()), donate=0)
    def step(state: Any, *xs: Tensor) -> Any:
        def loss_fn(params: Any) -> Tensor:
            params = fs.unshard(params, specs, "data", shapes=trained)
            if options:
                params = fs.lora.apply(options, state["fixed"]["base"], params, of=apply)
            return fs.pmean(apply(params, state["fixed"]["buffers"], *xs), "data")

        loss, grads = fs.value_and_grad(loss_fn)(state["params"])
        params, new = opt.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": new, "fixed": state["fixed"]}, loss

    return step, (state, *batch), placed, P("data")
