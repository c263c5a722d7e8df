"""LoRA: train low-rank adapters on frozen weights, which are fully sharded and have no gradients or moments.

python examples/lora.py                               4 simulated devices
torchrun --nproc-per-node 4 examples/lora.py          4 processes; the same losses
"""

import mlp

import fshard as fs
from fshard import P
from fshard.models import gpt2

cfg = gpt2.Config(vocab_size=67, n_positions=16, n_embd=16, n_layer=2, n_head=2)
config = fs.lora.Config(("c_attn", "c_proj"), rank=2, alpha=4)
specs = fs.fully_shard(gpt2.specs(cfg), gpt2.init(cfg), axis="data")  # of the frozen weights
opt = fs.optim.adamw(1e-2)


def loss_fn(adapters, params, ids):  # ids: [B@data, T]
    params = fs.unshard(params, specs, "data")
    params = fs.lora.apply(config, params, fs.pvary(adapters, "data"), of=gpt2.theirs)
    return gpt2.loss(cfg, params, ids[:, :-1], ids[:, 1:], layout=gpt2.Layout(data="data", varied=True))


def ids_of(i):
    return fs.random.randint(fs.fold_in(fs.key(1), i), (8, 9), low=0, high=cfg.vocab_size)


def train(mesh):
    params = fs.materialize(gpt2.init(cfg), specs, mesh, key=fs.key(0))
    adapters = fs.materialize(fs.lora.init(config, gpt2.init(cfg), of=gpt2.theirs), P(), mesh, key=fs.key(2))

    @fs.shard_map(mesh=mesh, in_specs=(P(), opt.specs(P()), specs, P("data")), out_specs=(P(), opt.specs(P()), P()),
                  donate=(0, 1))  # fmt: skip
    def step(adapters, state, params, ids):
        loss, grads = fs.value_and_grad(loss_fn)(adapters, params, ids)
        return *opt.update(grads, state, adapters), loss

    return mlp.losses(step, adapters, opt.init(adapters), lambda i: (params, ids_of(i)))


if __name__ == "__main__":
    print(train(fs.make_mesh(data=4)))
