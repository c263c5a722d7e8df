"""Pipeline parallel, with everything else: data, experts, stages, positions and heads are split over five axes.

python examples/pipeline.py                              32 simulated devices
torchrun --nproc-per-node 32 examples/pipeline.py        32 processes; the same losses
"""

import torch
from torch.nn.functional import silu

import fshard as fs
from fshard import P, nn

D, H, K, E, F, V, LAYERS = 16, 4, 4, 4, 8, 32, 4  # width, heads, their width, experts, their width, vocabulary
TOKENS = ("data", "expert", "seq")  # the axes that split the tokens
BATCH = P(("data", "expert"), "seq")

LAYER = {"norm": P(), "qkv": P("data", None, "model"), "proj": P("model"), "router": P()}
EXPERTS = {"up": P("expert"), "down": P("expert")}
SPECS = (
    {"wte": P("data")},  # the embedding is also the head: both stages that use it have it
    {name: P("stage", *spec) for name, spec in {**LAYER, **EXPERTS}.items()},
)


def init():
    def stacked(*shape):
        return fs.init.normal((LAYERS, *shape), std=0.3)

    layers = {"norm": fs.init.ones((LAYERS, D)), "qkv": stacked(D, 3, H, K), "proj": stacked(H, K, D),
              "router": stacked(D, E), "up": stacked(E, D, F), "down": stacked(E, F, D)}  # fmt: skip
    return {"wte": fs.init.normal((V, D), std=0.3)}, layers


def embed(ends, batch):
    wte = fs.unshard(ends, SPECS[0], TOKENS)["wte"]
    return wte[nn.to_zigzag(batch["ids"], "seq")]


def layer(p, h, batch):
    experts = fs.unshard({name: p[name] for name in EXPERTS}, EXPERTS, ("data", "seq"))
    p = fs.unshard({name: p[name] for name in LAYER}, LAYER, TOKENS)
    x = fs.pvary(nn.rms_norm(h, p["norm"]), "model")
    q, k, v = torch.einsum("btd,dchk->cbhtk", x, p["qkv"])
    a = nn.context_attention(q, k, v, "seq")
    h = h + fs.psum(torch.einsum("bhtk,hkd->btd", a, p["proj"]), "model")
    x = h.flatten(0, 1)
    routing = nn.route(x @ p["router"], 2)
    return h + nn.mixture(x, routing, experts, expert, axis="expert").view_as(h)


def expert(p, rows, counts):
    return nn.grouped_linear(silu(nn.grouped_linear(rows, p["up"], counts)), p["down"], counts)


def loss(ends, h, batch):
    wte = fs.unshard(ends, SPECS[0], TOKENS)["wte"]
    return nn.cross_entropy(h @ wte.mT, nn.to_zigzag(batch["targets"], "seq"), over=TOKENS)


opt = fs.optim.adamw(1e-2)
state_specs = opt.specs(SPECS)
value_and_grad = fs.pipelined(embed, layer, loss, axis="stage", microbatches=2, schedule="zero_bubble")


def train(mesh):
    params = fs.materialize(init(), SPECS, mesh, key=fs.key(0))

    @fs.shard_map(mesh=mesh, in_specs=(SPECS, state_specs, BATCH), out_specs=(SPECS, state_specs, P()), donate=(0, 1))
    def step(params, state, batch):
        value, grads = value_and_grad(params, batch)
        return *opt.update(grads, state, params), value

    state, losses = opt.init(params), []
    for i in range(3):
        text = fs.random.randint(fs.fold_in(fs.key(1), i), (8, 9), low=0, high=V)
        params, state, value = step(params, state, {"ids": text[:, :-1], "targets": text[:, 1:]})
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    print(train(fs.make_mesh(data=2, expert=2, stage=2, seq=2, model=2)))
