"""A GPT-2 block written out by hand, with a vocabulary-parallel head, and the mistakes that people make in it.

Legend: B batch, T time, D width, H heads, K head width, F hidden width, V vocabulary; [H@model] is a dim split over an
axis; {V} varies over it, {I} does not. The residual stream is [B@data, T, D]{I model}, or under
sequence parallelism [B@data, T@model, D].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import fshard as fs
from fshard import P, nn
from tests.corpus.bugs import Bug, mapped
from tests.corpus.correct.program import normal

B, T, D, H, K, F, V = 4, 4, 8, 4, 2, 16, 8
KEY = fs.key(3)
SPECS = {
    "wpe": P(),
    "ln_1": P(),
    "qkv": {"w": P(None, None, "model"), "b": P(None, "model")},
    "proj": {"w": P("model"), "b": P()},
    "ln_2": P(),
    "up": {"w": P(None, "model"), "b": P("model")},
    "down": {"w": P("model"), "b": P()},
    "head": P(None, "model"),
}


def params(bias: float = 0.5) -> Any:
    def layer(name: str, shape: tuple[int, ...], *bias_shape: int) -> Any:
        return {"w": normal(name, *shape, std=0.4), "b": normal(name + ".b", *bias_shape, std=bias)}

    def norm(name: str) -> Any:
        return {"w": normal(name, D, std=0.1, mean=1.0), "b": normal(name + ".b", D, std=0.1)}

    return {
        "wpe": normal("wpe", 2 * T, D),  # longer than the sequences
        "ln_1": norm("ln_1"),
        "qkv": layer("qkv", (D, 3, H, K), 3, H, K),
        "proj": layer("proj", (H, K, D), D),
        "ln_2": norm("ln_2"),
        "up": layer("up", (D, F), F),
        "down": layer("down", (F, D), D),
        "head": normal("head", D, V),
    }


# --- parts of the correct program -----------------------------------------------------------------------------


def positions(p: Any, x: Tensor) -> Tensor:
    return x + p["wpe"][: x.shape[1]]


def norm(p: Any, x: Tensor) -> Tensor:
    return nn.layer_norm(x, p["w"], p["b"])


def heads(p: Any, h: Tensor) -> Tensor:
    return nn.linear(fs.pvary(h, "model"), p["w"].flatten(1), p["b"].flatten())  # [B, T, 3HK@model]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.attention(q, k, v, causal=True, rate=0.25, key=KEY, spec=P("data", "model"))  # [B, H@model, T, K]


def output(p: Any, h: Tensor) -> Tensor:
    """Row-parallel matmul, back into the residual stream: h [B, T, F@model], or HK@model."""
    return fs.psum(h @ p["w"].flatten(0, -2), "model") + p["b"]


def dropout(x: Tensor, name: str) -> Tensor:
    return nn.dropout(x, 0.25, key=fs.fold_in(KEY, name), spec=P("data"))


def up(p: Any, h: Tensor) -> Tensor:
    return nn.gelu(nn.linear(fs.pvary(h, "model"), p["w"], p["b"]))  # [B, T, F@model]


def project(p: Any, h: Tensor) -> Tensor:
    return fs.pvary(h, "model") @ p  # [B, T, V@model]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.cross_entropy(logits, targets, axis="model", over="data")


def step(loss: Any, p: Any, x: Tensor, targets: Tensor) -> Any:
    (value, _), grads = fs.value_and_grad(loss, has_aux=True)(p, x, targets)
    return {"loss": value, "grads": grads}


PARTS = {f.__name__: f for f in (positions, norm, heads, attend, output, dropout, up, project, loss, step)}


def loss_of(part: Any, p: Any, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss and the logits."""
    p = fs.pvary(p, "data")
    x = part["dropout"](part["positions"](p, x), "embd")
    qkv = part["heads"](p["qkv"], part["norm"](p["ln_1"], x))
    q, k, v = qkv.unflatten(-1, (3, -1, K)).permute(2, 0, 3, 1, 4)
    a = part["attend"](q, k, v).transpose(1, 2).flatten(2)  # [B, T, HK@model]
    x = x + part["dropout"](part["output"](p["proj"], a), "proj")
    h = part["up"](p["up"], part["norm"](p["ln_2"], x))
    x = x + part["dropout"](part["output"](p["down"], h), "down")
    logits = part["project"](p["head"], x)
    return part["loss"](logits, targets), logits


def block(
    check: str, *, base: Any = PARTS, bias: float = 0.5, more: Any = None, model: int = 2, sequence: bool = False,
    ignored: int = 0, **changed: Any,
) -> tuple[Any, tuple[Any, ...]]:  # fmt: skip
    """Return one step with some parts changed; `more` are specs of more results, `ignored` counts ignored targets."""
    part = base | changed

    def train(p: Any, x: Tensor, targets: Tensor) -> Any:
        return part["step"](partial(loss_of, part), p, x, targets)

    out = {"loss": P(), "grads": SPECS, **(more or {})}
    stream = P("data", "model") if sequence else P("data")
    f = mapped(train, {"data": 2, "model": model}, (SPECS, stream, P("data")), out, check)
    targets = fs.random.randint(KEY, (B, T), high=V)
    targets.view(-1)[:ignored] = -100
    return f, (params(bias), normal("x", B, T, D), targets)


# --- parts of the correct program under sequence parallelism --------------------------------------------------


def split_positions(p: Any, x: Tensor) -> Tensor:
    return x + fs.pslice(p["wpe"][:T], "model")


def split_norm(p: Any, x: Tensor) -> Tensor:
    p = fs.pvary(p, "model")
    return nn.layer_norm(x, p["w"], p["b"])  # [B, T@model, D]


def gathered_heads(p: Any, h: Tensor) -> Tensor:
    return nn.linear(fs.all_gather(h, "model", 1), p["w"].flatten(1), p["b"].flatten())


def scattered_output(p: Any, h: Tensor) -> Tensor:
    return fs.psum_scatter(h @ p["w"].flatten(0, -2), "model", 1) + fs.pvary(p["b"], "model")


def split_dropout(x: Tensor, name: str) -> Tensor:
    return nn.dropout(x, 0.25, key=fs.fold_in(KEY, name), spec=P("data", "model"))


def gathered_up(p: Any, h: Tensor) -> Tensor:
    return nn.gelu(nn.linear(fs.all_gather(h, "model", 1), p["w"], p["b"]))


def gathered_project(p: Any, h: Tensor) -> Tensor:
    return fs.all_gather(h, "model", 1) @ p


SEQUENCE = PARTS | {
    "positions": split_positions, "norm": split_norm, "heads": gathered_heads, "output": scattered_output,
    "dropout": split_dropout, "up": gathered_up, "project": gathered_project,
}  # fmt: skip
sequence = partial(block, base=SEQUENCE, sequence=True)


# --- 1 and 2: a gradient that is never summed -----------------------------------------------------------------


def project_without_pvary(p: Any, h: Tensor) -> Tensor:
    return h @ p  # BUG: the gradient of h is of the local words only


def scattered_output_without_pvary_of_bias(p: Any, h: Tensor) -> Tensor:
    return fs.psum_scatter(h @ p["w"].flatten(0, -2), "model", 1) + p["b"]  # BUG: its gradient is of local positions


# --- 3 and 4: reduced again -----------------------------------------------------------------------------------


def output_summed_twice(p: Any, h: Tensor) -> Tensor:
    y = fs.psum(h @ p["w"].flatten(0, -2), "model")
    return fs.psum(y, "model") + p["b"]  # BUG: y is the total


def step_summing_norm_grads_again(loss: Any, p: Any, x: Tensor, targets: Tensor) -> Any:
    """Sum the gradients of norms after backward, as Megatron does: here the transpose of pvary has summed them."""
    (value, _), grads = fs.value_and_grad(loss, has_aux=True)(p, x, targets)
    grads["ln_1"] = fs.psum(grads["ln_1"], "model")  # BUG: summed already
    return {"loss": value, "grads": grads}


# --- 5 and 6: before the sum, after the sum -------------------------------------------------------------------


def output_with_bias_in_sum(p: Any, h: Tensor) -> Tensor:
    return fs.psum(nn.linear(h, p["w"].flatten(0, -2), p["b"]), "model")  # BUG: counted once by each rank


def output_with_pvaried_bias_in_sum(p: Any, h: Tensor) -> Tensor:
    b = fs.pvary(p["b"], "model")
    return fs.psum(nn.linear(h, p["w"].flatten(0, -2), b), "model")  # BUG: the types do not see it


def gelu_before_sum(p: Any, h: Tensor) -> Tensor:
    return fs.psum(nn.gelu(h @ p["w"].flatten(0, -2)), "model") + p["b"]  # BUG: of a partial sum


def gelu_after_sum(p: Any, h: Tensor) -> Tensor:
    return nn.gelu(fs.psum(h @ p["w"].flatten(0, -2), "model")) + p["b"]


def logits_of_targets(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the logit of each target, [B, T]: a sum of zeros but for one rank."""
    words = fs.axis_index("model") * logits.shape[-1] + torch.arange(logits.shape[-1])
    return fs.psum(torch.where(targets.unsqueeze(-1) == words, logits, 0.0).sum(-1), "model")


def loss_with_log_after_sum(logits: Tensor, targets: Tensor) -> Tensor:
    total = fs.psum(logits.exp().sum(-1), "model").log()
    return fs.pmean((total - logits_of_targets(logits, targets)).mean(), "data")


def loss_with_log_before_sum(logits: Tensor, targets: Tensor) -> Tensor:
    total = fs.psum(logits.exp().sum(-1).log(), "model")  # BUG: the logarithm of a partial sum
    return fs.pmean((total - logits_of_targets(logits, targets)).mean(), "data")


# --- 9 and 10: masks ------------------------------------------------------------------------------------------


def attend_with_one_mask_for_all_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.attention(q, k, v, causal=True, rate=0.25, key=KEY, spec=P("data"))  # BUG: heads are split over model


def dropout_with_a_mask_per_rank(x: Tensor, name: str) -> Tensor:
    key = fs.fold_in(fs.fold_in(KEY, name), fs.axis_index("model"))
    return nn.dropout(x, 0.25, key=key, spec=P("data"))  # BUG: x is the same on every rank of model


# --- 11 and 12: a value of one rank used as if replicated -----------------------------------------------------


def positions_by_the_wrong_axis(p: Any, x: Tensor) -> Tensor:
    start = int(fs.axis_index("data")) * x.shape[1]  # BUG: time is split over model
    return x + fs.pvary(p["wpe"], "model")[start : start + x.shape[1]]


def step_with_accuracy(loss: Any, p: Any, x: Tensor, targets: Tensor) -> Any:
    (value, logits), grads = fs.value_and_grad(loss, has_aux=True)(p, x, targets)
    best = fs.all_gather(logits, "model", -1, to="invariant").argmax(-1)
    return {"loss": value, "grads": grads, "accuracy": fs.pmean((best == targets).float().mean(), "data")}


def step_with_accuracy_of_local_logits(loss: Any, p: Any, x: Tensor, targets: Tensor) -> Any:
    (value, logits), grads = fs.value_and_grad(loss, has_aux=True)(p, x, targets)
    correct = (logits.argmax(-1) == targets).float().mean()
    return {"loss": value, "grads": grads, "accuracy": fs.pmean(correct, "data")}  # BUG: argmax of the local words


logged = partial(block, more={"accuracy": P()})
zero_bias = partial(block, bias=0.0)

BUGS = [
    Bug(1, "block", "logits", block, "project", project_without_pvary, None, "types", "model", "['grads']"),
    Bug(2, "block", "bias", sequence, "output", scattered_output_without_pvary_of_bias, None, "types", "model",
        "['grads']['down']['b']"),
    Bug(3, "block", "row parallel", block, "output", output_summed_twice, None, "types", "model"),
    Bug(4, "block", "norms", sequence, "step", step_summing_norm_grads_again, None, "types", "model",
        "['grads']['ln_1']", 2),
    Bug(5, "block", "as it is", block, "output", output_with_bias_in_sum, None, "types", "model"),
    Bug(5, "block", "varied over four", partial(zero_bias, model=4), "output", output_with_pvaried_bias_in_sum, None,
        "verify", "model", "['grads']['down']['b']", 4),
    Bug(6, "block", "gelu", block, "output", gelu_before_sum, gelu_after_sum, "verify", "model"),
    Bug(6, "block", "logarithm", block, "loss", loss_with_log_before_sum, loss_with_log_after_sum, "verify", "model"),
    Bug(9, "block", "attention", block, "attend", attend_with_one_mask_for_all_heads, None, "types", "model"),
    Bug(10, "block", "residual", block, "dropout", dropout_with_a_mask_per_rank, None, "types", "model"),
    Bug(11, "block", "positions", sequence, "positions", positions_by_the_wrong_axis, None, "verify",
        "data"),
    Bug(12, "block", "accuracy", logged, "step", step_with_accuracy_of_local_logits, step_with_accuracy, "types",
        "model", "['accuracy']"),
]  # fmt: skip
