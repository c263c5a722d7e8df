"""Context parallel: the positions of each sequence are split over `seq`, and keys and values go round a ring.

python examples/context.py                               4 simulated devices
torchrun --nproc-per-node 4 examples/context.py          4 processes; the same losses
"""

import fshard as fs
from fshard import P
from fshard.models import llama

cfg = llama.Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                   num_key_value_heads=2)  # fmt: skip
layout = llama.Layout("data", context="seq")
specs = llama.specs(cfg)
opt = fs.optim.adamw(1e-2)


def train(mesh):
    params = fs.materialize(llama.init(cfg), specs, mesh, key=fs.key(0))

    @fs.shard_map(mesh=mesh, in_specs=(specs, opt.specs(specs), *[P("data", "seq")] * 3),
                  out_specs=(specs, opt.specs(specs), P()), donate=(0, 1))  # fmt: skip
    def step(params, state, ids, targets, documents):  # each [B@data, T@seq], in order
        def loss_fn(params):
            return llama.loss(cfg, params, ids, targets, layout=layout, specs=specs, documents=documents)

        loss, grads = fs.value_and_grad(loss_fn)(params)
        return *opt.update(grads, state, params), loss

    state, losses = opt.init(params), []
    for i in range(3):
        text = fs.random.randint(fs.fold_in(fs.key(1), i), (4, 31), low=0, high=64)  # 30 tokens: 8, 8, 8 and 6
        documents = (text[:, :-1] < 8).cumsum(1)  # a new document after each of these tokens
        params, state, loss = step(params, state, text[:, :-1], text[:, 1:], documents)
        losses.append(float(loss))
    return losses


if __name__ == "__main__":
    print(train(fs.make_mesh(data=1, seq=4)))
