"""Mixtures of experts: a router, tokens that go to their experts and back, and a balance that no mesh changes.

No token is dropped: an expert computes however many tokens choose it, none or all. Legend: N the tokens of a rank, K
experts of a token, E experts, n ranks of the axis, D width, F hidden width, M rows; [E@axis] is a dim split over it.
Source: Shazeer et al., 2017; Fedus et al., 2021, "Switch transformers", for the balance loss; Zoph et al., 2022,
"ST-MoE", for the z-loss; DeepSeek-AI, 2024, "DeepSeek-V3", for groups and for balancing by a bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from fshard import tree
from fshard._core.ops import Counts, evenly, exchange_rows, host_numbers, own_range, tally
from fshard._core.region import device_type, has_values, known_axes, live_axis, region
from fshard.collectives import all_gather, all_to_all, psum, psum_scatter
from fshard.errors import checked, fail, shown
from fshard.spec import Axis, names_of, part_lengths

_TINY = 1e-20  # added to sums of weights, as DeepSeek-V3 does: all sigmoids of a token may be 0


class Routing(NamedTuple):
    """The experts of each token, and what the router computed for all of them.

    `experts` [N, K], the likeliest first; `weights` [N, K]; `probabilities` [N, E]; `z` [N], the square of the log of
    the sum of exponentials of the logits.

    >>> route(torch.tensor([[0.0, 2.0]]), 1).weights
    tensor([[1.]])
    """

    experts: Tensor
    weights: Tensor
    probabilities: Tensor
    z: Tensor


class Balance(NamedTuple):
    """The balance of experts over all ranks: `counts` [E] of tokens, `loss` [], K if they are even, and `z` [].

    >>> balance(route(torch.zeros(2, 4), 2), None).loss
    tensor(2.)
    """

    counts: Tensor
    loss: Tensor
    z: Tensor


class RouterSums(NamedTuple):
    """Sums over the tokens of one rank; `balance_of_sums` takes them after a psum."""

    counts: Tensor  # [E]
    tokens: Tensor  # []
    probabilities: Tensor  # [E]
    z: Tensor  # []


@checked
def route(
    logits: Tensor, k: int, *, score: Literal["softmax", "sigmoid"] = "softmax", bias: Tensor | None = None,
    groups: tuple[int, int] | None = None, renormalize: bool = True,
) -> Routing:  # fmt: skip
    """Choose `k` experts for each token: logits [N, E] -> a `Routing`. The first of equal experts is chosen.

    `bias` [E] is added to the scores for the choice, and scales nothing. `groups` (G, g) splits the experts into G
    groups, and chooses from the g with the highest sums of two scores. `renormalize` makes a token's weights sum to 1.

    >>> route(torch.tensor([[0.0, 2.0, 1.0]]), 2).experts
    tensor([[1, 2]])

    Raises ShardingError for more experts than there are to choose from.
    """
    e = logits.shape[-1]
    count, best = groups or (1, 1)
    if logits.ndim != 2 or count < 1 or e % count or not 1 <= best <= count or not 1 <= k <= best * (e // count):
        raise fail(
            f"nn.route: k={k} experts cannot be chosen by groups={groups}",
            logits=list(logits.shape),
            fix="logits [N, E], groups that divide E, and at most as many experts as the chosen groups have",
        )
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    choice = scores.detach() if bias is None else scores.detach() + bias.detach()
    if groups is not None:
        by_group = choice.view(len(choice), count, -1)
        sums = by_group.sort(dim=-1, descending=True).values[..., :2].sum(-1)
        chosen = torch.zeros_like(sums).scatter(-1, _likeliest(sums, best), 1.0)
        choice = by_group.masked_fill(chosen.unsqueeze(-1) == 0, float("-inf")).flatten(-2)
    experts = _likeliest(choice, k)
    weights = scores.gather(-1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    probabilities = scores if score == "softmax" else scores / (scores.sum(-1, keepdim=True) + _TINY)
    return Routing(experts, weights, probabilities, logits.logsumexp(-1).square())


def _likeliest(scores: Tensor, k: int) -> Tensor:
    # A stable sort, unlike topk, has one order of equal scores whatever the number of rows.
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


@checked
def balance(routing: Routing, over: Axis, *, counted: Tensor | None = None) -> Balance:
    """Return the tokens of each expert, the balance loss and the z-loss, over the tokens of all ranks of `over`.

    The loss is E times the sum over experts of the share of tokens that choose it times its mean probability: sums over
    the ranks first, then the product. Tokens where `counted` [N] is 0 are left out; of none, the losses are 0.

    To balance by a bias instead, outside of the gradient: `bias + 0.001 * (counts.float().mean() - counts).sign()`.

    >>> balance(route(torch.eye(4), 1), None).counts
    tensor([1, 1, 1, 1])
    """
    if names_of(over):
        known_axes("nn.balance: over", region("nn.balance"), over)
    return balance_of_sums(psum(router_sums(routing, counted), over))


def router_sums(routing: Routing, counted: Tensor | None = None) -> RouterSums:
    e, experts = routing.probabilities.shape[-1], routing.experts
    of_token = torch.ones_like(routing.z) if counted is None else (counted != 0).to(routing.z.dtype)
    ones = of_token.to(experts.dtype).unsqueeze(-1).expand_as(experts)
    probabilities = (routing.probabilities * of_token.unsqueeze(-1)).sum(0)
    return RouterSums(tally(experts.flatten(), e, ones.flatten()), of_token.to(experts.dtype).sum(), probabilities,
                      (routing.z * of_token).sum())  # fmt: skip


def balance_of_sums(sums: RouterSums) -> Balance:
    tokens = sums.tokens.clamp(min=1)
    share = sums.counts.to(sums.probabilities.dtype) / tokens
    loss = len(sums.counts) * (share * (sums.probabilities / tokens)).sum()
    return Balance(sums.counts, loss, sums.z / tokens)


Numbers = Sequence[int] | Tensor  # of rows, by expert
Run = Callable[[Any, Tensor, Any], Tensor]  # (params, rows, Numbers) -> results


@checked
def mixture(
    x: Tensor, routing: Routing, params: Any, run: Run, *, axis: Axis,
    method: Literal["rows", "gather", "partial"] = "rows",
) -> Tensor:  # fmt: skip
    """Compute the experts of each token, and sum their results by weight.

        [N, D]{V axis} -> [N, D]{V axis}, params [E@axis, ..]     cost: 2NKD(n-1)/n numbers each way; gather: 2(n-1)ND

    `run(params, rows, counts)` computes this rank's experts: rows [M, D], the first counts[0] of them for its first
    expert; see `grouped_linear`. An axis of `None` has all experts on every rank.

    - "rows": each row goes to its expert's rank and back; only counts are read by the host. The sum over K has one
      order on every mesh.
    - "gather": every rank gets the tokens of all; fewer bytes than "rows" where n < K.
    - "partial": the ranks have the same tokens, and the result is this rank's part of a sum over the axis.

    A compiled program, whose shapes may not depend on values, gathers. In bfloat16, if widths are multiples of 8, it
    computes the same rows, by one kernel with `counts` as a tensor, in buffers for min(K, E/n) rows of each token.
    Torch's compiler has no such kernel for other dtypes: there every expert computes every token.

    >>> logits, w = torch.eye(8)[:6], torch.ones(2, 3, 5)                          # w [E@model, D, F]; model=4
    >>> def run(w, rows, counts):
    ...     return grouped_linear(rows, w, counts)
    >>> mixture(torch.ones(6, 3), route(logits, 2), w, run, axis="model").shape
    torch.Size([6, 5])

    Raises ShardingError for a routing of other tokens, and for leaves without this rank's experts.
    """
    e = routing.probabilities.shape[-1]
    leaves = tree.leaves(params)
    here, *others = {len(leaf) if isinstance(leaf, Tensor) and leaf.ndim else -1 for leaf in leaves} or {-1}
    if here < 0 or others or not x.ndim or len(x) != len(routing.experts):
        raise fail("nn.mixture: x, routing and params do not fit",
                   f"x {list(x.shape)}, {len(routing.experts)} tokens of routing, params {shown(params)}",
                   fix="the routing of these tokens, and leaves that all have the experts as dim 0")  # fmt: skip
    start, length = own_range("nn.mixture", e, axis)
    if here != length:
        raise fail(f"nn.mixture: params have {here} experts, and this rank's part of {e} over axis={axis!r}: {length}",
                   fix="the axis over which the specs of params split their dim 0")  # fmt: skip
    compiling = torch.compiler.is_dynamo_compiling()
    if method == "rows" and not compiling:
        return _by_rows(x, routing, params, run, axis, here)
    experts, weights = routing.experts, routing.weights
    if method != "partial":
        x, experts, weights = all_gather((x, experts, weights), axis)
    lacks_kernel = compiling and not (x.dtype == torch.bfloat16 and all(_has_kernel(leaf) for leaf in leaves))
    compute = _of_every_token if lacks_kernel else _of_its_tokens
    out = compute(x, experts, weights, params, run, start, here, e)
    return out if method == "partial" else psum_scatter(out, axis)


@checked
def grouped_linear(x: Tensor, w: Tensor, counts: Sequence[int] | Tensor) -> Tensor:
    """Multiply each group of rows by its matrix: x [M, D], w [E, D, F], counts [E] -> [M, F].

    In bfloat16 on CUDA one kernel computes all groups, if D and F are multiples of 8. It takes counts in a tensor, also
    on CPUs, and does not compute rows after the last group.

    >>> grouped_linear(torch.ones(3, 2), torch.stack([torch.eye(2), 2 * torch.eye(2)]), [1, 2])[:, 0]
    tensor([1., 2., 2.])

    Raises ShardingError for shapes and counts that do not fit.
    """
    known, has_kernel = not isinstance(counts, Tensor), x.dtype == torch.bfloat16 and _has_kernel(w)
    n = None if isinstance(counts, Tensor) and counts.ndim != 1 else len(counts)
    if x.ndim != 2 or w.ndim != 3 or n != len(w) or (known and len(w) and sum(counts) != len(x)):
        raise fail("nn.grouped_linear: x, w and counts do not fit", x=list(x.shape), w=list(w.shape),
                   counts=counts if n is None else list(counts),
                   fix="x [M, D], w [E, D, F], and E counts whose sum is M")  # fmt: skip
    if not known and not has_kernel:
        raise fail("nn.grouped_linear: counts in a tensor need the kernel", x=x.dtype, w=list(w.shape),
                   fix="bfloat16, and D and F that are multiples of 8; or counts in a list")  # fmt: skip
    if not len(w):
        return x @ w.sum(0)  # no rows, with a gradient
    if not known or (device_type(x) == "cuda" and len(x) and has_kernel):
        ends = torch.as_tensor(counts, device=x.device).cumsum(0, dtype=torch.int32)
        out: Tensor = functional.grouped_mm(x, w.to(x.dtype), offs=ends)
        return out
    groups = zip(x.split_with_sizes(list(counts)), w.unbind(), strict=True)
    return torch.cat([rows @ matrix.to(rows.dtype) for rows, matrix in groups])


def _has_kernel(w: Tensor) -> bool:
    return w.ndim == 3 and not w.shape[-1] % 8 and not w.shape[-2] % 8


def _by_rows(x: Tensor, routing: Routing, params: Any, run: Run, axis: Axis, here: int) -> Tensor:
    (n_tokens, k), e = routing.experts.shape, routing.probabilities.shape[-1]
    axes = names_of(live_axis("nn.mixture", axis))
    sizes = [region().sizes[a] for a in axes]
    # 1. Sort the pairs of token and expert by expert, and exchange their numbers.
    pairs = routing.experts.flatten()
    order = pairs.argsort(stable=True)
    to_expert, parts = tally(pairs, e), part_lengths(e, sizes)
    got = all_to_all(to_expert.unsqueeze(1), axes, split=0, concat=1, size=len(parts))  # [E@axis, n]
    if has_values():
        to_rank = torch.stack([c.sum() for c in to_expert.split_with_sizes(parts)])
        to, of, counts = host_numbers([to_rank, got.sum(0), got.sum(1)])
    else:
        to = of = evenly(len(pairs), got.shape[1])
        counts = evenly(len(pairs), here)
    there = Counts(tuple(to), tuple(of), True)
    # 2. Send rows, which arrive by rank; compute them by expert.
    rows = x[order // k]
    if axes:
        (rows,) = exchange_rows(axes, there, [rows])
        expert = torch.arange(here, device=x.device).repeat(got.shape[1])
        arrived = expert.repeat_interleave(got.t().flatten(), output_size=len(rows)) if has_values() else order
        by_expert = arrived.argsort(stable=True)
        rows = rows[by_expert]
    y = run(params, rows, counts)
    # 3. Send them back, and sum in the order of K.
    if axes:
        (y,) = exchange_rows(axes, there.transpose, [y[by_expert.argsort()]])
    y = y[order.argsort()].view(n_tokens, k, *y.shape[1:])
    out, *terms = [r * w.unsqueeze(-1) for r, w in zip(y.unbind(1), routing.weights.unbind(1), strict=True)]
    for term in terms:
        out = out + term
    return out.to(x.dtype)


def _of_its_tokens(
    x: Tensor, experts: Tensor, weights: Tensor, params: Any, run: Run, start: int, here: int, e: int
) -> Tensor:
    """Sum the results of this rank's experts, for the tokens that choose them."""
    pairs, k = experts.flatten() - start, experts.shape[1]
    pairs = torch.where((pairs >= 0) & (pairs < here), pairs, here)  # others are last
    order, of_expert = pairs.argsort(stable=True), tally(pairs, here + 1)[:here]
    if torch.compiler.is_dynamo_compiling():
        most = len(x) * min(k, here)  # an expert computes a token once
        token, chosen = order[:most] // k, (torch.arange(most, device=x.device) < of_expert.sum()).unsqueeze(-1)
        rows = torch.where(chosen, x[token], 0)  # where, in both directions: the kernel leaves other rows undefined
        y = torch.where(chosen, run(params, rows, of_expert), 0)
    else:
        (counts,) = host_numbers([of_expert]) if has_values() else (evenly(len(pairs) * here // e, here),)
        order = order[: sum(counts)]
        token = order // k
        y = run(params, x[token], counts)
    y = y * weights.flatten()[order[: len(y)]].unsqueeze(-1)
    return x.new_zeros(len(x), *y.shape[1:]).index_add(0, token, y.to(x.dtype))


def _of_every_token(
    x: Tensor, experts: Tensor, weights: Tensor, params: Any, run: Run, start: int, here: int, e: int
) -> Tensor:
    """Sum the results of this rank's experts for every token, by weights that are 0 where one is not chosen."""
    dense = weights.new_zeros(len(x), e).scatter(1, experts, weights)[:, start : start + here]
    y = run(params, x.repeat(here, 1), [len(x)] * here)
    out = x.new_zeros(len(x), *y.shape[1:])
    for i, rows in enumerate(y.split_with_sizes([len(x)] * here)):
        out = out + (rows * dense[:, i : i + 1]).to(x.dtype)
    return out
