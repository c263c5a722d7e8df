"""Generation by models of `transformers`, decoders and encoder-decoders, with their caches.

Legend: B batch, T the tokens of the prompt, S those so far, N of this step, V vocabulary, D width.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fshard.errors import checked, fail, must_be
from fshard.nn import decoding
from fshard.nn.decoding import Decoder, Options, check_ids
from fshard.nn.decoding.options import with_tokens
from fshard.spec import Axis

# Names of results that are arguments of the next call. Not "state", of RWKV: it mixes the rows of a batch.
_CACHES = ("cache", "past_key_values", "cache_params")  # the first since transformers 5.24, the others before


@checked
def generate(
    apply: Callable[..., Any], params: Any, buffers: Any, ids: Tensor, *, new: int, data: Axis = None,
    mask: Tensor | None = None, key: Tensor | None = None, on_token: Callable[..., Any] | None = None,
    decoder_start: int | None = None, module: nn.Module | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """Generate `new` tokens by a deferred model of `transformers`, as its `generate` does. Inside `shard_map`.

        a decoder:          ids [B@data, T], the prompts                 -> [B@data, T + new]
        an encoder-decoder: ids [B@data, T], the source, encoded once    -> [B@data, 1 + new], from `decoder_start` on

    Takes the likeliest token, the first among equals; with a `temperature`, draws one by `key`, the same on every mesh;
    `fs.decoding.Options` has all `options`, and `generation_options` reads them from a folder. Prompts of unequal
    lengths are padded on the left, and `mask` [B@data, T] is 0 there. `on_token(step, tokens)` is called on every rank
    with the new tokens [B@data] of each step, until all sequences of all ranks have ended.

    A model without a cache runs on all tokens at each step. Every rank has the logits of its rows, [B@data, V].

    Args:
        apply: of `fs.defer`, in eval mode, or a function with its arguments, which gathers the leaves as it needs them.
        params, buffers: as `apply` takes them: full leaves.
        data: the axes that split the batch; draws need it.
        decoder_start: the first token of an encoder-decoder; by default the one of its config. So are `eos` and `pad`,
            the tokens that end a sequence and fill it up; with `eos=None` none ends it.
        module: the module whose function `apply` is, if `apply` has no `.module`.

    >>> apply, described = fs.defer(lambda: GPT2LMHeadModel(config).eval())
    >>> apply, specs = apply.eval(), fs.fully_shard(P(), described["params"], axis="data")
    >>> params = fs.materialize(described["params"], specs, mesh, key=fs.key(0))
    >>> @fs.shard_map(mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"))
    ... def write(p, ids):
    ...     return generate(apply, fs.unshard(p, specs, "data"), {}, ids, new=4, data="data")
    >>> write(params, torch.tensor([[1, 2, 3], [4, 5, 6]]))
    i64[2@data, 7]

    Raises ShardingError for options that do not exist, are out of range or contradict each other, for an
    encoder-decoder without a start, and for a model that gives no logits.
    """
    model = _Model.from_module(getattr(apply, "module", None) if module is None else module)
    chosen = Options.of(with_tokens(options, model.eos, model.pad, model.size))
    check_ids("generate", ids)
    if mask is not None and mask.shape != ids.shape:
        raise fail("generate: the mask must have one entry for each token", mask=list(mask.shape), ids=list(ids.shape))

    run = functools.partial(apply, params, buffers)
    if not model.is_encoder_decoder:
        if decoder_start is not None:
            raise fail(f"generate: decoder_start={decoder_start}, and {model.name} has no encoder", fix="leave it out")
        decoder = Decoder(lambda *args: _step(model, run, {}, *args), _reordered, _State())
        return decoding.generate(decoder, ids, new=new, options=chosen, data=data, mask=mask, key=key,
                                 on_token=on_token)  # fmt: skip
    if not ids.shape[1]:
        raise fail("generate: the source has no tokens", ids=list(ids.shape))
    start = model.decoder_start if decoder_start is None else decoder_start
    if start is None:
        raise fail(f"generate: the config of {model.name} has no decoder_start_token_id",
                   fix="decoder_start=, the token that its outputs begin with")  # fmt: skip
    source = {"input_ids": _at_least_one_row(ids)}
    if mask is not None:
        source["attention_mask"] = _at_least_one_row(mask)
    decoder = Decoder(lambda ids, _, state: _step(model, run, source, ids, None, state), _reordered, _State())
    first = torch.full_like(ids[:, :1], start)
    return decoding.generate(decoder, first, new=new, options=chosen, data=data, key=key, on_token=on_token)


class _Model(NamedTuple):
    """Facts about a model: its class, the names of its arguments, and the facts about an encoder-decoder."""

    name: str
    takes: frozenset[str]
    is_encoder_decoder: bool
    decoder_start: int | None
    eos: Any
    pad: int | None
    size: int | None

    @classmethod
    def from_module(cls, module: object) -> _Model:
        if not isinstance(module, nn.Module):
            raise must_be("generate: apply.module", "a Module", module,
                          "pass module=apply.module, of the Apply of defer")  # fmt: skip
        name, config = type(module).__name__, getattr(module, "config", None)
        takes = frozenset(inspect.signature(type(module).forward).parameters)
        if config is None or "input_ids" not in takes:
            raise fail(f"generate: {name} is no model of transformers that takes input_ids",
                       fix="for another model, write the loop with fs.decoding.generate")  # fmt: skip
        if not takes.isdisjoint({"target_mapping", "langs"}):  # XLNet; XLM and Flaubert
            raise fail(f"generate: {name} predicts the token of a mask at the end of its input, not the next one",
                       fix="write the loop with fs.decoding.generate")  # fmt: skip
        start = next((token for token in (getattr(config, n, None) for n in ("decoder_start_token_id", "bos_token_id"))
                      if token is not None), None)  # fmt: skip
        tokens = getattr(module, "generation_config", None) or config
        eos, pad = getattr(tokens, "eos_token_id", None), getattr(tokens, "pad_token_id", None)
        text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        size = getattr(text, "vocab_size", None)
        return cls(name, takes, bool(getattr(config, "is_encoder_decoder", False)), start, eos, pad, size)


class _Encoded(NamedTuple):
    """The result of an encoder as models read it: by index or by name."""

    last_hidden_state: Tensor  # [B, T, D]
    hidden_states: None = None
    attentions: None = None
    router_logits: None = None  # of experts


class _State(NamedTuple):
    """The cache of a model and its name, of `length` tokens; without one, all of these; the result of the encoder."""

    length: int = 0
    cache: Mapping[str, Any] | None = None  # None before the first step
    ids: Tensor | None = None  # [B, S]
    encoded: Tensor | None = None  # [B, T, D]


def _step(
    model: _Model, run: Callable[..., Any], source: Mapping[str, Tensor], ids: Tensor, mask: Tensor | None,
    state: _State,
) -> tuple[Tensor, _State]:  # fmt: skip
    """Run the tokens of one step: (logits of the last one [B, V], the state after them)."""
    rows, ids = len(ids), _at_least_one_row(ids)
    length = state.length + ids.shape[1]
    ids = ids if state.ids is None else torch.cat([state.ids, ids], 1)
    inputs: dict[str, Any] = {"decoder_input_ids" if source else "input_ids": ids, **(state.cache or {})}
    if source:
        mask = source.get("attention_mask")
        if state.encoded is None:
            inputs["input_ids"] = source["input_ids"]
        else:
            inputs["encoder_outputs"] = _Encoded(state.encoded)
            mask = None if mask is None else mask.repeat_interleave(len(ids) // len(mask), 0)  # of beams
    if mask is not None and "attention_mask" in model.takes and not _holds_states_only(state.cache):
        mask = _at_least_one_row(mask)
        inputs["attention_mask"] = mask
    if not source and "position_ids" in model.takes:  # some models count from 0 at each step without them
        positions = torch.arange(length, device=ids.device).expand(len(ids), -1)
        if "attention_mask" in inputs:
            positions = (inputs["attention_mask"].long().cumsum(1) - 1).clamp(min=0)
        inputs["position_ids"] = positions[:, -ids.shape[1] :]
    has_cache = not model.takes.isdisjoint(_CACHES)
    inputs |= {name: x for name, x in (("use_cache", has_cache), ("logits_to_keep", 1)) if name in model.takes}
    out = run(**inputs)
    logits = getattr(out, "logits", None)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise fail(f"generate: {model.name} gives no logits of tokens", fix="use its class with a language model head: "
                   "AutoModelForCausalLM or AutoModelForSeq2SeqLM")  # fmt: skip
    caches = ((name, getattr(out, name, None)) for name in _CACHES if name in model.takes)
    cache = next(({name: value} for name, value in caches if value is not None), {})
    encoded = state.encoded if state.encoded is not None else getattr(out, "encoder_last_hidden_state", None)
    return logits[:rows, -1], _State(length, cache, None if cache else ids, encoded if source else None)


def _holds_states_only(cache: Mapping[str, Any] | None) -> bool:
    """Return whether a cache holds recurrent states without keys: only the prompt has padding to mask then."""
    return any(name == "cache_params" or all(getattr(x, "is_linear", [False])) for name, x in (cache or {}).items())


def _reordered(state: _State, rows: Tensor) -> _State:
    """Return the state of these rows [B] of the batch."""
    rows = rows if len(rows) else rows.new_zeros(1)  # of the row of a rank without rows
    for value in (state.cache or {}).values():
        if not hasattr(value, "reorder_cache"):
            raise fail(f"generate: beams need a cache that can be reordered, and it is a {type(value).__name__}",
                       fix="beams=1")  # fmt: skip
        value.reorder_cache(rows)
    ids, encoded = (None if x is None else x.index_select(0, rows) for x in (state.ids, state.encoded))
    return state._replace(ids=ids, encoded=encoded)


def _at_least_one_row(x: Tensor) -> Tensor:
    """Return x, or one row of ones for a rank without rows: models do not run on an empty batch."""
    return x if len(x) else x.new_ones(1, *x.shape[1:])
