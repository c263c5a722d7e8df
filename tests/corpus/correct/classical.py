"""Classical learning without autograd: local statistics, sums over the ranks, a small problem solved on each.

Legend: B rows, D features, K classes, factors or bins; [n@axis] is a dim split over an axis.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

import fshard as fs
from fshard import P
from tests.corpus.correct.program import Program, normal

DATA = {"data": 2}
BATCH = P("data")
X, Y = normal("x", 12, 4).double(), normal("y", 12).double()  # [B@data, D]


def boosted_stump(x, y, edges):
    """A gradient-boosting round: histograms of residuals by bin and feature are summed; the best split is shared."""
    bins = torch.searchsorted(edges, x.T.contiguous()).T  # [B@data, D], edges [D, K]
    hot = F.one_hot(bins, edges.shape[1] + 1).to(x.dtype)  # [B@data, D, K + 1]
    mass, count = fs.psum((torch.einsum("b,bdk->dk", y, hot), hot.sum(0)), "data")
    left, n = mass.cumsum(1)[:, :-1], count.cumsum(1)[:, :-1]
    right, m = mass.sum(1, keepdim=True) - left, count.sum(1, keepdim=True) - n
    gain = left.square() / (n + 1) + right.square() / (m + 1)
    best = gain.flatten().argmax(0, keepdim=True)
    goes_left = bins.gather(1, (best // gain.shape[1]).expand(len(x), 1))[:, 0] <= best % gain.shape[1]
    leaf = (torch.stack([right, left]) / (torch.stack([m, n]) + 1)).flatten(1)[:, best][:, 0]
    return y - leaf[goes_left.long()], gain.max()


def dense_boosted_stump(x, y, edges):
    best = (-1.0, None, None)
    for d in range(x.shape[1]):
        for cut in edges[d]:
            goes_left = x[:, d] <= cut
            a, b = y[goes_left], y[~goes_left]
            gain = float(a.sum() ** 2 / (len(a) + 1) + b.sum() ** 2 / (len(b) + 1))
            if gain > best[0] + 1e-12:
                best = (gain, goes_left, torch.where(goes_left, a.sum() / (len(a) + 1), b.sum() / (len(b) + 1)))
    return y - best[2], torch.tensor(best[0], dtype=x.dtype)


EDGES = torch.tensor([-0.7, -0.1, 0.4, 1.0]).double().repeat(4, 1)
PROGRAMS = [
    Program(boosted_stump, DATA, (BATCH, BATCH, P()), (BATCH, P()), (X, Y, EDGES), dense_boosted_stump),
]  # fmt: skip
