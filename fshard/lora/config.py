"""The options of adapters, and the modules that they name."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from fshard.errors import checked, fail, raise_all
from fshard.spec import matches

ALL_LINEAR = "all-linear"
_GLOB = re.compile(r"[*?[]")
T = TypeVar("T")


@checked
@dataclass(frozen=True)
class Config:
    """The options of an adapter, after PEFT's `LoraConfig`. Names are of modules in Hugging Face's models.

    Args:
        targets: the modules to adapt: a list of names, of their last parts (`"q_proj"`, `"attn.c_attn"`) or of globs as
            in `fs.rules` (`"model.layers.*.mlp.*"`); or one regular expression of full names; or `"all-linear"`, which
            is every linear layer but the head.
        rank: r, the width of the factors: a [in, r], b [r, out].
        alpha: the adapter is scaled by s = alpha / r; with `rslora` by alpha / sqrt(r).
        dropout: the rate at which inputs of the adapter are dropped, by the key of `apply`.
        dora: also learn the norm of each output's weights (`"magnitude"`), as Liu et al., 2024.
        bias: biases that train: of no module, of all, or of the adapted ones.
        modules_to_save: modules whose parameters train in full, as copies: a new head.
        ranks, alphas: other ranks and alphas, by a regular expression of the end of names: `{"layers.0.mlp.down": 2}`.
        exclude: modules that are not adapted although they are targets, written as `targets`.
        init: of `a`: "kaiming", U(-1/sqrt(in), 1/sqrt(in)), or "gaussian", N(0, 1/r^2); `b` is 0. Tables of embeddings
            have a = 0 and b of N(0, 1). "random" also draws `b`, or `a` of tables, so that the adapter changes the
            model from the start: for tests.
        parameters: parameters outside of layers, by names or globs, as PEFT's target_parameters: stacks of experts,
            [experts, in, out] or [experts, out, in]. Each forward adds their factors to them.

    >>> Config(("q_proj", "v_proj"), rank=16, alpha=32, ranks={"layers.0.self_attn.q_proj": 4}).rank
    16

    Raises ShardingError listing every option that is out of range.
    """

    targets: str | Sequence[str]
    rank: int = 8
    alpha: float = 8
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    modules_to_save: Sequence[str] = ()
    ranks: Mapping[str, int] = field(default_factory=dict, hash=False)
    alphas: Mapping[str, float] = field(default_factory=dict, hash=False)
    exclude: str | Sequence[str] = ()
    init: Literal["kaiming", "gaussian", "random"] = "kaiming"
    parameters: Sequence[str] = ()

    def __post_init__(self) -> None:
        errors = []
        for name in ("targets", "modules_to_save", "exclude", "parameters"):
            value = getattr(self, name)
            if not isinstance(value, str):
                object.__setattr__(self, name, tuple(value))
        for name in ("ranks", "alphas"):  # a copy: what a config means does not change
            object.__setattr__(self, name, dict(getattr(self, name)))
        if not self.targets and not self.parameters:
            errors.append(fail("lora.Config: targets is empty", fix="names of modules, or 'all-linear'"))
        if self.parameters and (self.dropout or self.dora):
            errors.append(fail(f"lora.Config: parameters={self.parameters!r}, dropout={self.dropout}, dora={self.dora}",
                               fix="parameters without dropout and dora, as in PEFT"))  # fmt: skip
        ranks = {"rank": self.rank, **{f"ranks[{k!r}]": r for k, r in self.ranks.items()}}
        alphas = {"alpha": self.alpha, **{f"alphas[{k!r}]": a for k, a in self.alphas.items()}}
        errors += [fail(f"lora.Config: {name}={r}", fix="1 or more") for name, r in ranks.items() if r < 1]
        errors += [fail(f"lora.Config: {name}={a}", fix="a finite number")
                   for name, a in alphas.items() if not math.isfinite(a)]  # fmt: skip
        if not 0 <= self.dropout < 1:
            errors.append(fail(f"lora.Config: dropout={self.dropout}", fix="0 or more, less than 1"))
        patterns = {f"{name}={value!r}": value for name in ("targets", "exclude")
                    if isinstance(value := getattr(self, name), str)}  # fmt: skip
        patterns |= {f"{name}[{key!r}]": ending(key) for name in ("ranks", "alphas") for key in getattr(self, name)}
        for label, pattern in patterns.items():
            try:
                re.compile(pattern)
            except (re.error, OverflowError, RecursionError) as e:
                errors.append(fail(f"lora.Config: {label} is no regular expression", str(e),
                                   fix="escape its special characters, or pass a list of names"))  # fmt: skip
        raise_all(errors)

    def rank_of(self, name: str) -> int:
        """Return the rank of a module."""
        return value_for(self.ranks, name, self.rank)

    def scale_of(self, name: str) -> float:
        """Return s of a module."""
        rank, alpha = self.rank_of(name), value_for(self.alphas, name, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def check_weight(verb: str, weight: float) -> None:
    if not math.isfinite(weight):
        raise fail(f"{verb}: weight={weight}", fix="a finite number")


def ending(pattern: str) -> str:
    """Return the expression for names that end with what a pattern matches."""
    return rf"(.*\.)?({pattern})$"


_compiled = functools.lru_cache(1 << 12)(re.compile)  # more than `re` keeps: a config may have one for each module


def value_for(patterns: Mapping[str, T], name: str, otherwise: T) -> T:
    """Return the rank or alpha of a module: of the first pattern that the end of its name matches.

    >>> value_for({"q_proj": 3, ".*v_proj": 5}, "model.layers.0.self_attn.v_proj", 8)
    5
    """
    return next((x for pattern, x in patterns.items() if _compiled(ending(pattern)).match(name)), otherwise)


class ModuleNames:
    """Entries of a list that name modules: names, their last parts, or globs.

    Names are looked up by their ends, not compared one by one: a file may have 1,000 entries, a model 1,000 modules.
    """

    def __init__(self, wanted: Sequence[str]) -> None:
        self._wanted = frozenset(wanted)
        self._globs = [one.split(".") for one in wanted if _GLOB.search(one)]

    def name(self, module: str) -> bool:
        """Return whether an entry names the module."""
        parts = module.split(".")
        return not self._wanted.isdisjoint(_ends(parts)) or any(matches(parts, glob) for glob in self._globs)

    def contain(self, module: str) -> bool:
        """Return whether an entry names the module, or one that it is inside of."""
        return any(map(self.name, outer_names(module)))


module_names = functools.lru_cache(64)(ModuleNames)  # of a tuple: `apply` asks for each leaf


def without_module(wanted: Sequence[str], modules: Iterable[str], *, inside: bool = False) -> list[str]:
    """Return the entries that name no module; with `inside`, nor one that a module is inside of."""
    names = {name: name.split(".") for m in modules for name in (outer_names(m) if inside else [m])}
    ends = {end for parts in names.values() for end in _ends(parts)}
    return [one for one in wanted if one not in ends and not (
        _GLOB.search(one) and any(matches(parts, one.split(".")) for parts in names.values()))]  # fmt: skip


def _ends(parts: Sequence[str]) -> list[str]:
    return [".".join(parts[i:]) for i in range(len(parts))]


def outer_names(module: str) -> list[str]:
    """Return the names of a module, and of those that it is inside of."""
    parts = module.split(".")
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
