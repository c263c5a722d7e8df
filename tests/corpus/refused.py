"""Programs that the checker refuses. Their error messages are in refused.txt, which test_checker compares.

`python -m tests.corpus.refused` rewrites that file. Read the difference: users learn the rules from these texts.
"""

from __future__ import annotations

from pathlib import Path

import torch

import fshard as fs
from fshard import P

TEXTS = Path(__file__).with_name("refused.txt")
MESH = fs.make_mesh(data=2, model=2)
X, W, B = torch.ones(4, 8), torch.ones(8, 4), torch.ones(8)
ROWS, COLUMNS = P("data"), fs.column("model")


def missing_pvary_of_data(p, x):
    def loss(p):
        h = x * p["gain"]
        return fs.pmean(h.mean(), "data")

    return fs.grad(loss)(p)


def missing_pvary(x, p):
    def loss(x):
        h = torch.relu(x @ p["up"])
        return fs.psum(h.sum(), "model")

    return fs.grad(loss)(x)


def bias_before_the_sum(h, w, b):
    def loss(w, b):
        w, b = fs.pvary((w, b), "data")
        y = fs.psum(h @ w + b, "model")
        return fs.psum(y.sum(), "data")

    return fs.grad(loss, (0, 1))(w, b)


def bias_inside_linear(h, w, b):
    def loss(w, b):
        w, b = fs.pvary((w, b), "data")
        y = fs.psum(torch.nn.functional.linear(h, w.T, b), "model")
        return fs.psum(y.sum(), "data")

    return fs.grad(loss, (0, 1))(w, b)


def norm_of_split_and_replicated(w, b):
    total = w.square().sum() + b.square().sum()
    return torch.sqrt(total)


def psum_twice(x):
    total = fs.psum(x.sum(), "data")
    return fs.psum(total, "data")


def mean_of_a_mean_loss(x):
    return fs.pmean(fs.nn.cross_entropy(x, torch.zeros(len(x), dtype=torch.int64), over="data"), "data")


def accuracy_of_split_classes(x):
    y = fs.pslice(torch.zeros(4, dtype=torch.int64), "data")
    return fs.pmean((x.argmax(-1) == y).float().mean(), "data")


def mean_of_a_gradient(w, x):
    grads = fs.grad(lambda w: fs.psum((fs.pvary(w, "data") * x).sum(), "data"))(w)
    return fs.pmean(grads, "data")


def gathered_again(x):
    whole = fs.all_gather(x, "data", to="invariant")
    return fs.all_gather(whole, ("data", "model"), to="invariant")


def crossed_axes(x, w, b):
    def loss(x, w, b):
        h = torch.addmm(b, x, w)
        return fs.psum(h.square().sum(), ("data", "model"))

    return fs.grad(loss, (0, 1, 2))(x, w, b)


def update_by_another_value_of_each_rank(w, x):
    return w - 0.1 * x.mean(0)


def pvary_twice(w, x):
    def loss(w):
        h = fs.pvary(w, "data") * x
        return fs.pmean(fs.pvary(h, ("data", "model")).mean(), ("data", "model"))

    return fs.grad(loss)(w)


def sum_over_the_axis_of_rows(p, x, y):
    def loss(p):
        p = fs.pvary(p, "data")
        out = fs.psum(torch.relu(fs.pvary(x, "model") @ p["up"]) @ p["down"], "data")
        return fs.pmean((out - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def sum_over_both_axes(p, x, y):
    def loss(p):
        p = fs.pvary(p, "data")
        out = fs.psum(torch.relu(fs.pvary(x, "model") @ p["up"]) @ p["down"], ("data", "model"))
        return fs.pmean((out - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def sum_of_the_sum(p, x, y):
    def loss(p):
        p = fs.pvary(p, "data")
        out = fs.psum(fs.psum(torch.relu(fs.pvary(x, "model") @ p["up"]) @ p["down"], "model"), "model")
        return fs.pmean((out - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def sum_before_relu(p, x, y):
    def loss(p):
        p = fs.pvary(p, "data")
        h = fs.psum(fs.pvary(x, "model") @ p["up"], "model")
        out = torch.relu(h) @ p["down"]
        return fs.pmean((out - y).square().mean(), "data")

    return fs.value_and_grad(loss)(p)


def mean_over_both_axes(p, x, y):
    def loss(p):
        p = fs.pvary(p, "data")
        out = fs.psum(torch.relu(fs.pvary(x, "model") @ p["up"]) @ p["down"], "model")
        return fs.pmean((out - y).square().mean(), ("data", "model"))

    return fs.value_and_grad(loss)(p)


def means_of_unequal_counts(x):
    return fs.pmean((x - 1).square().mean(), "data")


def columns_not_gathered(p, x):
    def loss(p):
        h = torch.relu(x @ p["up"])
        return fs.pmean((h @ p["down"]).square().mean(), "data")

    return fs.grad(loss)(p)


def update_by_gradients_that_vary(p, x):
    opt = fs.optim.adamw(0.1)
    grads = fs.grad(lambda p: fs.pmean((x * fs.pvary(p["gain"], "data")).mean(), "data"))(p)
    grads = {"gain": grads["gain"] * x[0, 0]}
    p, _ = opt.update(grads, opt.init(p), p)
    return p


def pslice_of_varying(x):
    return fs.pslice(x, "data")


def one_mask_for_all(x):
    keep = fs.random.bernoulli(fs.key(0), x.shape, p=0.5)
    return torch.where(keep, x, 0)


def one_mask_per_rank(x):
    key = fs.fold_in(fs.key(0), fs.axis_index("model"))
    return fs.nn.dropout(x, 0.5, key=key)


def local_loss(w, x):
    def loss(w):
        return (fs.pvary(w, "data") * x).mean()

    return fs.value_and_grad(loss)(w)


def indexed_by_ids(table, ids):
    def loss(table):
        rows = table[ids]
        return fs.psum(rows.sum(), "data")

    return fs.grad(loss)(table)


def indexed_by_rank(gates, x):
    def loss(gates):
        mine = torch.softmax(gates, -1).index_select(0, fs.axis_index("model"))
        return fs.psum((mine * x).sum(), ("data", "model"))

    return fs.grad(loss)(gates)


def returned_as_replicated(x):
    return x.sum()


def returned_as_sharded(x):
    return {"y": x * 2}


def noise_before_the_sum(x, w):
    g = (x @ w).sum(0)
    noise = 0.1 * fs.random.normal(fs.key(0), g.shape)
    return fs.psum(g - noise, "data")


def noise_on_a_part_of_a_sum(x, w):
    g = (x @ w).sum(0)
    g = g + fs.random.normal(fs.key(0), g.shape)
    return fs.psum(g, "data")


def sum_of_products(x):
    a, b = {"u": x, "v": x.sin()}, {"u": x.cos(), "v": x}
    return sum((a[k] * b[k]).sum() for k in a)


def sum_of_sums(x):
    return (x.square().sum() + x.cos().sum()).sqrt()


def cosine(x):
    return (x * x.cos()).sum() / x.square().sum().sqrt()


def part_by_local_range(w):
    start, stop = fs.local_range(w.shape[0] // fs.axis_size("data"), "data")
    return fs.psum(w[start:stop].square().sum(), "data")


def returned_part_by_local_range(w):
    start, stop = fs.local_range(w.shape[0] // fs.axis_size("data"), "data")
    part = w[start:stop]
    return part.sin()


def parts_of_columns(x):
    start, stop = fs.local_range(x.shape[1] // fs.axis_size("data"), "data")
    part = (x + 1)[:, start:stop]
    return fs.pvary(x, "data").sum() * part


def torch_generator(x):
    return x + torch.rand(8)


def rank_dependent_number(x):
    scale = 1 + int(fs.axis_index("model"))
    return x * scale


def part_by_rank_number(x):
    n = x.shape[0] // 2
    return fs.pvary(x.chunk(2)[int(fs.axis_index("data"))], "data") * n


def gathered_targets(z, y):
    def loss(z):
        targets = fs.all_gather(y, "model")
        return fs.nn.cross_entropy(z, targets, axis="model")

    return fs.grad(loss)(z)


def gathered_targets_of_a_metric(z, y):
    targets = fs.all_gather(y, "model")
    hits = (z.argmax(-1) == targets).float()
    return fs.pmean(hits.mean(), "data")


def gathered_targets_of_an_evaluation(z, y):
    return fs.nn.cross_entropy(z, fs.all_gather(y, "model"), axis="model")


def gathered_mask(x, m):
    def loss(x):
        keep = fs.all_gather(m, "model")
        return torch.where(keep, x.square(), 0.0).sum()

    return fs.grad(loss)(x)


def gathered_indices(x, ids):
    def loss(x):
        rows = x[fs.all_gather(ids, "model")]
        return rows.square().sum()

    return fs.grad(loss)(x)


def gathered_weights(x, w):
    def loss(x):
        weights = fs.all_gather(w, "model")
        return (x.square().sum(-1) * weights).sum()

    return fs.grad(loss)(x)


def captured_weight(x):
    loss = fs.pmean((x * WEIGHT).square().mean(), "data")
    return torch.autograd.grad(loss, WEIGHT)[0]


def captured_module(x):
    loss = fs.pmean(MODULE(x).square().mean(), "data")
    return torch.autograd.grad(loss, tuple(MODULE.parameters()))


def training_of_a_captured_module(x):
    optimizer = torch.optim.SGD(MODULE.parameters(), 0.1)
    loss = fs.pmean(MODULE(x).square().mean(), "data")
    loss.backward()
    optimizer.step()
    return loss


def running_mean_in_a_captured_tensor(x):
    MEAN.mul_(0.9).add_(fs.pmean(x.mean(0), "data"), alpha=0.1)
    return x - MEAN


def psum_of_captured(x):
    penalty = fs.psum(WEIGHT.square().sum(), "data")
    return fs.pmean(x.square().mean(), "data") + penalty


def rows_of_captured_by_number(x):
    n = x.shape[0]
    rows = TABLE[n * int(fs.axis_index("data")) :][:n]
    return fs.pmean(rows.square().mean(), "data")


def prompt_of_zeros(x):
    prompt = torch.zeros(8)
    return fs.grad(lambda p: fs.pmean((x + p).square().mean(), "data"))(prompt)


def leaf_of_zeros(x):
    prompt = torch.zeros(8, requires_grad=True)
    fs.pmean((x + prompt).square().mean(), "data").backward()
    return prompt.grad


WEIGHT, MODULE, MEAN = torch.ones(8, requires_grad=True), torch.nn.Linear(8, 1), torch.zeros(8)
TABLE = torch.arange(4.0)
LOGITS, IDS = torch.sin(torch.arange(32.0)).view(4, 8), torch.arange(4) * 2


# name: (program, in_specs, out_specs, arguments)
def loss_without_over(w, x, ids):
    def loss(w):
        logits = x @ fs.pvary(w, "data")
        return fs.nn.cross_entropy(logits, ids)

    return fs.value_and_grad(loss)(w)


def split_head_without_axis(w, x, ids):
    logits = x @ w
    return fs.nn.cross_entropy(logits, ids)


def split_head_in_the_loss_of_torch(w, x, ids):
    logits = x @ w
    loss = torch.nn.functional.cross_entropy(logits, ids)
    return 2 * loss


def placed():
    """Return a leaf for one program, which may change what it refers to."""
    return fs.device_put({"gain": B.clone()}, P(), MESH)


def placed_leaf_written(p):
    p["gain"] *= 1 + 0.1
    return p


def gradient_of_a_placed_leaf(p):
    gain = p["gain"].requires_grad_()
    gain.square().sum().backward()
    return gain - 0.1 * gain.grad


def dropout_without_a_spec(x):
    return fs.nn.dropout(x, 0.5, key=fs.key(0))


def mean_of_each_rank_by_a_gathered_weight(w, x):
    return fs.value_and_grad(lambda w: (x @ fs.all_gather(w, "data")).square().mean())(w)[1]


_SPECS = {"up": COLUMNS, "down": P("model")}
_WEIGHTS = {"up": W, "down": W.T.clone()}
_LAYERS = ((_SPECS, ROWS, ROWS), (P(), _SPECS), (_WEIGHTS, torch.arange(32.0).reshape(4, 8) / 32, X))
_SHARDS = {"up": fs.column("data"), "down": P("data")}
CASES = {
    "sum_over_the_axis_of_rows": (sum_over_the_axis_of_rows, *_LAYERS),
    "sum_over_both_axes": (sum_over_both_axes, *_LAYERS),
    "sum_of_the_sum": (sum_of_the_sum, *_LAYERS),
    "sum_before_relu": (sum_before_relu, *_LAYERS),
    "mean_over_both_axes": (mean_over_both_axes, *_LAYERS),
    "means_of_unequal_counts": (means_of_unequal_counts, (ROWS,), P(), (torch.arange(6.0).reshape(3, 2),)),
    "update_by_gradients_that_vary": (update_by_gradients_that_vary, (P(), ROWS), P(), ({"gain": B}, X)),
    "columns_not_gathered": (columns_not_gathered, (_SHARDS, ROWS), _SHARDS, (_WEIGHTS, X)),
    "missing_pvary_of_data": (missing_pvary_of_data, (P(), ROWS), P(), ({"gain": B}, X)),
    "missing_pvary": (missing_pvary, (P(), {"up": COLUMNS}), P(), (X, {"up": W})),
    "bias_before_the_sum": (
        bias_before_the_sum, (P("data", "model"), P("model"), P()), (P("model"), P()), (X, W, torch.ones(4)),
    ),
    "bias_inside_linear": (
        bias_inside_linear, (P("data", "model"), P("model"), P()), (P("model"), P()), (X, W, torch.ones(4)),
    ),
    "norm_of_split_and_replicated": (norm_of_split_and_replicated, (COLUMNS, P()), P(), (W, B)),
    "psum_twice": (psum_twice, (ROWS,), P(), (X,)),
    "mean_of_a_mean_loss": (mean_of_a_mean_loss, (ROWS,), P(), (X,)),
    "accuracy_of_split_classes": (accuracy_of_split_classes, (P("data", "model"),), P(), (X,)),
    "mean_of_a_gradient": (mean_of_a_gradient, (P(), ROWS), P(), (B, X)),
    "gathered_again": (gathered_again, (ROWS,), P(), (X,)),
    "crossed_axes": (crossed_axes, (ROWS, COLUMNS, P()), (ROWS, COLUMNS, P()), (X, W, torch.ones(1, 1))),
    "update_by_another_value_of_each_rank": (
        update_by_another_value_of_each_rank, (P(), P(("data", "model"))), P(), (B, X),
    ),
    "pvary_twice": (pvary_twice, (P(), ROWS), P(), (B, X)),
    "pslice_of_varying": (pslice_of_varying, (ROWS,), ROWS, (X,)),
    "one_mask_for_all": (one_mask_for_all, (ROWS,), ROWS, (X,)),
    "one_mask_per_rank": (one_mask_per_rank, (P(),), P(), (X,)),
    "local_loss": (local_loss, (P(), ROWS), P(), (B, X)),
    "indexed_by_ids": (indexed_by_ids, (P(), ROWS), P(), (X, torch.arange(4))),
    "indexed_by_rank": (indexed_by_rank, (P(), P("data")), P(), (torch.ones(2, 8), X)),
    "returned_as_replicated": (returned_as_replicated, (ROWS,), P(), (X,)),
    "returned_as_sharded": (returned_as_sharded, (P(),), {"y": P(None, "model")}, (X,)),
    "noise_before_the_sum": (noise_before_the_sum, (ROWS, P()), P(), (X, W)),
    "noise_on_a_part_of_a_sum": (noise_on_a_part_of_a_sum, (ROWS, P()), P(), (X, W)),
    "sum_of_products": (sum_of_products, (ROWS,), P(), (X,)),
    "sum_of_sums": (sum_of_sums, (ROWS,), P(), (X,)),
    "cosine": (cosine, (ROWS,), P(), (X,)),
    "part_by_local_range": (part_by_local_range, (P(),), P(), (B,)),
    "returned_part_by_local_range": (returned_part_by_local_range, (P(),), ROWS, (B,)),
    "parts_of_columns": (parts_of_columns, (P(),), P(None, "data"), (X,)),
    "torch_generator": (torch_generator, (ROWS,), ROWS, (X,)),
    "rank_dependent_number": (rank_dependent_number, (P(),), P(), (X,)),
    "part_by_rank_number": (part_by_rank_number, (P(),), ROWS, (X,)),
    "gathered_targets": (gathered_targets, (COLUMNS, P("model")), COLUMNS, (LOGITS, IDS)),
    "gathered_targets_of_a_metric": (gathered_targets_of_a_metric, (ROWS, P(("data", "model"))), P(), (LOGITS, IDS)),
    "gathered_targets_of_an_evaluation": (
        gathered_targets_of_an_evaluation, (COLUMNS, P("model")), P(), (LOGITS, IDS),
    ),
    "gathered_mask": (gathered_mask, (P(), P("model")), P(), (LOGITS[0], LOGITS[1] > 0)),
    "gathered_indices": (gathered_indices, (P(), P("model")), P(), (LOGITS.T, IDS)),
    "captured_weight": (captured_weight, (ROWS,), P(), (X,)),
    "captured_module": (captured_module, (ROWS,), P(), (X,)),
    "training_of_a_captured_module": (training_of_a_captured_module, (ROWS,), P(), (X,)),
    "running_mean_in_a_captured_tensor": (running_mean_in_a_captured_tensor, (ROWS,), ROWS, (X,)),
    "psum_of_captured": (psum_of_captured, (ROWS,), P(), (X,)),
    "rows_of_captured_by_number": (rows_of_captured_by_number, (ROWS,), P(), (X,)),
    "prompt_of_zeros": (prompt_of_zeros, (ROWS,), P(), (X,)),
    "leaf_of_zeros": (leaf_of_zeros, (ROWS,), P(), (X,)),
    "gathered_weights": (gathered_weights, (P(), P("model")), P(), (LOGITS, LOGITS[:, 0])),
    "loss_without_over": (loss_without_over, (P(), ROWS, P("data")), (P(), P()), (W, X, torch.arange(4))),
    "split_head_without_axis": (split_head_without_axis, (COLUMNS, P(), P()), P(), (W, X, torch.arange(4) % 2)),
    "split_head_in_the_loss_of_torch": (
        split_head_in_the_loss_of_torch, (COLUMNS, P(), P()), P(), (W, X, torch.arange(4) % 2),
    ),
    "placed_leaf_written": (placed_leaf_written, (P(),), P(), (placed(),)),
    "gradient_of_a_placed_leaf": (gradient_of_a_placed_leaf, (P(),), P(), (placed(),)),
    "dropout_without_a_spec": (dropout_without_a_spec, (ROWS,), ROWS, (X,)),
    "mean_of_each_rank_by_a_gathered_weight": (
        mean_of_each_rank_by_a_gathered_weight, (P("data"), P("data")), P("data"), (W, X),
    ),
}  # fmt: skip


def text_of(name):
    """Return the error of a program."""
    f, ins, out, args = CASES[name]
    try:
        fs.shard_map(f, mesh=MESH, in_specs=ins, out_specs=out, check="always")(*args)
    except fs.ShardingError as e:
        return str(e)
    return "no error"


def texts():
    """Return the texts of refused.txt, by program."""
    parts = TEXTS.read_text().split("\n## ")[1:]
    return {name: text for name, _, text in (part.strip().partition("\n") for part in parts)}


if __name__ == "__main__":
    TEXTS.write_text("The error of each program of refused.py.\n"
                     + "".join(f"\n## {name}\n{text_of(name)}\n" for name in CASES))  # fmt: skip
