"""The leaves of a model in one table: their tensors in files, and their dims by letters; init and specs follow from it.

    LEAVES = Leaves({
        "wte": leaf("transformer.wte.weight", "v d"),
        **in_blocks("h", "transformer.h", {**layer("up", "mlp.fc_in", "f d -> d f", "f"), ...}),
    }, blocks=lambda cfg: {"h": cfg.n_layer}, sizes=lambda cfg: {"v": cfg.vocab_size, "d": cfg.n_embd, ...})

Letters of dims that `specs` split over `model`: v words of the vocabulary, h and g heads, f hidden units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fshard import init as initial
from fshard import tree
from fshard.errors import checked, fail
from fshard.interop.hf import FileTensor
from fshard.spec import Axis, P

from .transformer import check_config


class Leaf(NamedTuple):
    """A leaf: its tensor in a file, and a letter for each of its dims."""

    file: FileTensor
    dims: tuple[str, ...]


def leaf(name: str, dims: str) -> Leaf:
    """Return a leaf with a tensor of this name; `dims` are the leaf's, after the tensor's and an arrow if they differ.

    >>> leaf("ln_1.weight", "d"), leaf("attn.c_proj.weight", "(h k) d -> h k d").dims
    (Leaf(file=FileTensor(name='ln_1.weight', dims=None, at=None), dims=('d',)), ('h', 'k', 'd'))
    """
    _, arrow, ours = dims.partition(" -> ")
    return Leaf(FileTensor(name, dims if arrow else None), tuple((ours or dims).split()))


def layer(ours: str, name: str, w: str, b: str | None = None) -> dict[str, Leaf]:
    """Return the leaves `ours.w` and, with dims, `ours.b` of a layer, in files `name.weight` and `name.bias`."""
    bias = {} if b is None else {f"{ours}.b": leaf(f"{name}.bias", b)}
    return {f"{ours}.w": leaf(f"{name}.weight", w), **bias}


def in_blocks(ours: str, name: str, leaves: Mapping[str, Leaf]) -> dict[str, Leaf]:
    """Return the leaves of each block of `ours`, a list; `*` is the number of a block, in names and in files."""
    return {f"{ours}.*.{inner}": Leaf(replace(x.file, name=f"{name}.*.{x.file.name}"), x.dims)
            for inner, x in leaves.items()}  # fmt: skip


@dataclass(frozen=True)
class Leaves:
    """The leaves of a model by name; `blocks` are the lists of blocks of a config, and their numbers.

    `has(cfg, name, i)` is False for leaves that a config does not have, but for a tied head; `name` is the one inside
    block `i`. `sizes` has the sizes of dims by their letters, `std` is the standard deviation of a matrix, and `scale`
    the value of norms.
    """

    table: Mapping[str, Leaf]
    blocks: Callable[[Any], Mapping[str, int]]
    sizes: Callable[[Any], Mapping[str, int]]
    has: Callable[[Any, str, int], bool] = lambda cfg, name, i: True
    std: Callable[[Any, str], float] = lambda cfg, name: cfg.initializer_range
    scale: Callable[[Any], float] = lambda cfg: 1.0

    def init(self, cfg: Any) -> Any:
        """Describe the leaves: biases are 0, norms `scale`, others N(0, std^2)."""
        sizes = self.sizes(cfg)

        def described(name: str, x: Leaf) -> Any:
            shape = tuple([sizes[d] for d in x.dims])
            if name.endswith(".b"):
                return initial.zeros(shape)
            norm = len(shape) == 1
            return initial.full(shape, self.scale(cfg)) if norm else initial.normal(shape, std=self.std(cfg, name))

        return self._tree(cfg, described)

    def specs(self, cfg: Any, axes: Mapping[str, Axis]) -> Any:
        """Return the specs of the leaves, by the axes of the letters of their dims."""
        return self._tree(cfg, lambda _, x: P(*[axes.get(d) for d in x.dims]))

    def _tree(self, cfg: Any, make: Callable[[str, Leaf], Any]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        blocks = self.blocks(cfg)
        for name, x in self.table.items():
            if name == "head.w" and cfg.tie_word_embeddings:  # it is the table of embeddings
                continue
            stack, star, inner = name.partition(".*.")
            for i in range(blocks[stack] if star else 1):
                if not self.has(cfg, inner or name, i):
                    continue
                *parents, last = name.replace("*", str(i)).split(".")
                node = out
                for parent in parents:
                    node = node.setdefault(parent, {})
                node[last] = make(name, x)
        for stack in blocks:
            *parents, last = stack.split(".")
            node = out
            for parent in parents:
                node = node[parent]
            node[last] = list(node.get(last, {}).values())
        return out

    def tensor(self, path: tree.Path) -> FileTensor:
        """Return the file tensor of the leaf at a path. Raises ShardingError if there is no such leaf."""
        number = next((str(i) for i in path if type(i) is int), "")
        found = self.table.get(tree.dotted(tuple(["*" if type(i) is int else i for i in path])))
        if found is None:
            raise fail(f"theirs: the model has no leaf at the path {path!r}",
                       fix=f"one of {', '.join(self.table)}, where * is the number of a block")  # fmt: skip
        return replace(found.file, name=found.file.name.replace("*", number, 1))


def init_of(leaves: Leaves, config: type) -> Callable[[Any], Any]:
    """Make the `init` of a decoder from its leaves and the class of its configs."""

    @checked
    def init(cfg: Any) -> Any:
        """Return the described parameters: matrices are drawn from N(0, initializer_range^2), biases are 0, norms 1.

        GPT-2's projections into the residual stream are drawn with std / sqrt(2 n_layer).

        >>> list(gpt2.init(cfg))
        ['wte', 'wpe', 'h', 'ln_f']
        """
        check_config("init", cfg, config)
        return leaves.init(cfg)

    return init


def specs_of(leaves: Leaves, config: type) -> Callable[..., Any]:
    """Make the `specs` of a model from its leaves and the class of its configs."""

    @checked
    def specs(cfg: Any, *, model: Axis = None) -> Any:
        """Split heads, hidden units and the vocabulary over `model`; replicate the rest.

        Queries are split with the heads of their keys and values, and relative positions with their heads.
        `fs.fully_shard` adds a data axis.

        >>> params = fs.materialize(gpt2.init(cfg), gpt2.specs(cfg, model="model"), mesh, key=fs.key(0))
        >>> params["wte"]
        f32[32@model, 16]
        """
        check_config("specs", cfg, config)
        return leaves.specs(cfg, dict.fromkeys("vhgf", model))

    return specs
