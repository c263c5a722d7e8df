"""First mistakes get first answers: small programs of newcomers, with what they print, or the error and its fix.

Users of PyTorch, JAX and Hugging Face, a teacher in a notebook and someone with images have written them.
"""

from __future__ import annotations

import contextlib
import io
import re
import textwrap

import pytest

import fshard as fs
from fshard.cli import command
from fshard.recipes import classify, finetune, pretrain

SETUP = """
import copy, json, pickle
import numpy as np
import torch, fshard as fs
from fshard import P
from torch import nn

mesh = fs.make_mesh(data=2)
params = fs.device_put({"w": torch.ones(4, 4)}, P(), mesh)
opt = fs.optim.adamw(1e-3)
apply, tree = fs.defer(lambda: nn.Linear(4, 4))
x, y = torch.ones(8, 4), torch.ones(8, 4)

@fs.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
def loss(p, x):
    return fs.pmean((x @ fs.pvary(p["w"], "data")).square().mean(), "data")
"""

PLACED = "is a placed leaf, not a tensor"
UPDATE = "params, state = opt.update(grads, state, params)"

# --- they work ------------------------------------------------------------------------------------------------

WORKS = {
    "unpack a replicated result": ("""
        @fs.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P())
        def accuracy(x):
            return fs.pmean(torch.stack([x.mean(), x.max()]), "data")
        top1, top5 = accuracy(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        print(f"{top1:.2f} {top5:.2f}", len(accuracy(x)), float(accuracy(x)[0]))
        """, "2.50 3.00 2 1.0"),
    "numpy and matplotlib read a replicated leaf": ("""
        losses = [loss(params, x) for _ in range(2)]
        half = fs.device_put(x.bfloat16(), P(), mesh)
        print(np.asarray(losses), np.asarray(params["w"]).shape, np.asarray(half).dtype)
        """, "[16. 16.] (4, 4) float32"),
    "a number in a tree for materialize": ("""
        state = {"w": fs.init.ones((4, 4)), "step": 0, "lr": 0.1, "name": "gpt", "done": False}
        print(fs.materialize(state, P(), mesh, key=fs.key(0)))
        """, "{'w': f32[4, 4], 'step': 0, 'lr': 0.1, 'name': 'gpt', 'done': False}"),
    "scan over a tensor": ("""
        stacked = fs.device_put({"w": torch.ones(3, 4, 4)}, P(), mesh)
        def f(p, x):
            block = lambda p, x, scale: x @ p["w"] * scale
            return fs.scan(block, p, x, specs=P(), axis=None, each=torch.tensor([1.0, 2.0, 3.0]))
        print(fs.device_get(fs.shard_map(f, mesh=mesh, out_specs=P())(stacked, x))[0, 0])
        """, "tensor(384.)"),
    "copy": ("print(copy.copy(params['w']), copy.deepcopy(params))", "f32[4, 4] {'w': f32[4, 4]}"),
    "schedules take their arguments in one order": ("""
        o = fs.optim
        print(o.linear(1.0, 10, end=0.5)(10), o.cosine(1.0, 10, end=0.5)(10), o.warmup(1.0, 10, start=0.5)(0))
        """, "0.5 0.5 0.5"),
    "stacked layers with the scale of one": ("""
        layer = {"up": fs.init.xavier_normal((64, 256)), "b": fs.init.zeros(256)}
        print(fs.init.stacked(layer, 12))
        """, "{'up': f32[12, 64, 256] = normal(std=0.07906), 'b': f32[12, 256] = zeros}"),
    "a state_dict in memory": ("""
        module = nn.Linear(4, 4)
        print(module.load_state_dict(fs.state_dict.gather(fs.materialize(tree, P(), mesh, key=fs.key(0)))))
        """, "<All keys matched successfully>"),
}  # fmt: skip

# --- errors of fshard, in full --------------------------------------------------------------------------------

REFUSED = {
    "a module for a constructor": ("fs.defer(nn.Linear(4, 4))", """
        defer: got a Linear, which is constructed already, not a constructor
          fix: fs.defer(lambda: Linear(...)), which allocates nothing; for the values of this one, \
fs.device_put(dict(module.named_parameters()), specs, mesh)
        """),
    "a constructor that needs arguments": ("fs.defer(nn.Linear)", """
        defer: the constructor needs arguments: in_features, out_features
          fix: fs.defer(lambda: Linear(in_features, out_features))
        """),
    "init_empty_weights": ("""
        from accelerate import init_empty_weights
        with init_empty_weights():
            fs.defer(lambda: nn.Linear(4, 4))
        """, """
        defer: the constructor runs inside init_empty_weights of Accelerate, which puts parameters on the meta device
          fix: leave it out: fs.defer allocates no parameter
        """),
    "shards without unshard": ("""
        specs = fs.fully_shard(P(), tree["params"], axis="data")
        params = fs.materialize(tree["params"], specs, mesh, key=fs.key(0))
        f = fs.shard_map(lambda p, x: apply(p, {}, x), mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"))
        f(params, x)
        """, """
        Apply(Linear): params['weight'] is [2, 4], and [4, 4] in the module
          fix: apply.unshard(specs, axis)(params, buffers, *args), which gathers each unit; or \
apply(fs.unshard(params, specs, axis), buffers, *args)
        """),
    "apply without buffers": ("apply(tree['params'], x)", """
        Apply(Linear): buffers is a Tensor, not a dict of tensors by name
          fix: apply(tree["params"], tree["buffers"], *args); {} for a module without buffers
        """),
    "the tree of defer for its params": ("apply(tree, {}, x)", """
        Apply(Linear): params is the tree of fs.defer, not a dict of tensors by name
          fix: apply(tree["params"], tree["buffers"], *args); {} for a module without buffers
        """),
    "grad around shard_map": ("fs.grad(loss)(params, x)", """
        value_and_grad(loss): args[0]['w'] is Sharded, which has no gradient
          fix: differentiate inside: fs.shard_map(fs.value_and_grad(loss), ...), where leaves are tensors
        """),
    "value_and_grad around shard_map, of tensors": ("fs.value_and_grad(loss)({'w': torch.ones(4, 4)}, x)", """
        loss: args[0]['w']: requires grad, and no gradient flows out of shard_map
          fix: differentiate inside, as fs.shard_map(fs.value_and_grad(loss), ...) does; x.detach() if no gradient is \
wanted
        """),
    "backward inside": ("""
        @fs.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        def step(p, x):
            (x @ fs.pvary(p["w"], "data")).sum().backward()
        step(params, x)
        """, """
        program.py:4 in step: backward() of a result of tensors that require no gradient
          the arguments of step are parts of leaves, without one
          fix: compute the loss in a function of the parameters, and differentiate that by fs.value_and_grad, which \
returns (loss, grads)
        """),
    "an optimizer of torch": ("torch.optim.AdamW(params.values(), lr=1e-3)", f"""
        add_param_group: f32[4, 4] {PLACED}
          fix: opt = fs.optim.adamw(1e-3); state = opt.init(params); and in fs.shard_map {UPDATE}
        """),
    "parameters for the optimizer": ("fs.optim.adamw(params, lr=1e-3)", """
        adamw: lr is passed by position, as {'w': f32[4, 4]}, and by name
          fix: adamw(lr, b1=, b2=, eps=, weight_decay=, mask=)
        """),
    "an update without parameters": ("opt.update(params, opt.init(params))", f"""
        adamw: update without params
          fix: {UPDATE}
        """),
    "an update of a chain without parameters": (
        "fs.optim.chain(fs.optim.clip_by_global_norm(1.0, P()), opt).update(params, ())", f"""
        chain(clip_by_global_norm, adamw): update without params
          fix: {UPDATE}
        """),
    "an update of zero without parameters": (
        "fs.optim.zero(opt, P(), P('data'), axis='data').update(params, ())", f"""
        zero(adamw): update without params
          fix: {UPDATE}
        """),
    "an update of a loss scale's optimizer without parameters": (
        "fs.LossScale().guard(opt, P()).update(params, ())", f"""
        guarded adamw: update without params
          fix: {UPDATE}
        """),
    "specs of a clip that name another axis": ("""
        opt = fs.optim.chain(fs.optim.clip_by_global_norm(1.0, P("data")), opt)
        fs.shard_map(lambda p, s: opt.update(p, s, p), mesh=mesh, out_specs=P())(params, opt.init(params))
        """, """
        program.py:3 in <lambda>: clip_by_global_norm: grads['w'] is the same on each rank of 'data', which its spec \
P('data') names
          fix: pass the specs by which these leaves are placed
        """),
    "specs of a clip without an axis": ("""
        split = fs.device_put({"w": torch.ones(4, 4), "b": torch.ones(4)}, P("data"), mesh)
        clip = fs.optim.clip_by_global_norm(1.0, {"w": P("data"), "b": P()})
        fs.shard_map(lambda p: clip.update(p, {})[0], mesh=mesh, out_specs=P("data"))(split)
        """, """
        program.py:4 in <lambda>: clip_by_global_norm: grads['b'] varies over 'data', which its spec P() does not name
          fix: pass the specs by which these leaves are placed
        """),
    "specs of a loss scale with an axis that the mesh lacks": ("""
        opt = fs.LossScale().guard(opt, P("model"))
        fs.shard_map(lambda p, s: opt.update(p, s, p), mesh=mesh, out_specs=P())(params, opt.init(params))
        """, """
        guard: specs: the mesh has no axis 'model'
          mesh  data=2
          at program.py:3 in <lambda>
          fix: use one of ['data'], or None
        """),
    "specs with an axis that the mesh lacks": ("""
        specs = {"a": P("model"), "b": P(None, "model"), "c": [P("model"), P(("data", "model"))]}
        fs.device_put({"a": x, "b": y, "c": [torch.ones(2), y + 1]}, specs, mesh)
        """, """
        device_put: tree['a']: the mesh has no axis 'model'
          shape  [8, 4]    spec  P('model')    mesh  data=2
          fix: use one of ['data']
          the same for tree['b'], tree['c'][0], tree['c'][1]
        """),
    "options of peft": ("fs.lora.Config(['q_proj'], lora_alpha=16)", """
        Config: no argument is called 'lora_alpha'
          near  alpha
          fix: Config(targets, rank, alpha, dropout, rslora, dora, bias, modules_to_save, ranks, alphas, exclude, \
init, parameters)
        """),
    "a text for a dtype": ("fs.init.normal((2, 2), dtype='bfloat16')", """
        normal: dtype must be a dtype or None, got 'bfloat16'
          fix: torch.bfloat16
        """),
    "a size for a shape": ("fs.random.normal(fs.key(0), 3)", """
        normal: shape must be a Sequence of int, got 3
          fix: (64, 256), a tuple of sizes
        """),
    "betas": ("fs.optim.adamw(1e-3, betas=(0.9, 0.95))", """
        adamw: no argument is called 'betas'
          near  b1, b2
          fix: adamw(lr, b1=, b2=, eps=, weight_decay=, mask=)
        """),
    "sizes and names for make_mesh": ("fs.make_mesh((2, 4), ('data', 'model'))", """
        make_mesh: 2 arguments by position, and it takes 0
          fix: make_mesh(data=2, model=4)
        """),
    "a number for make_mesh": ("fs.make_mesh(4)", """
        make_mesh: 1 argument by position, and it takes 0
          fix: make_mesh(data=2, model=4)
        """),
    "no key": ("fs.materialize({'w': fs.init.ones(4)}, P(), mesh)", """
        materialize: key is missing
          fix: materialize(tree, specs, mesh, key=fs.key(0))
        """),
    "no axis": ("fs.psum(x)", """
        psum: axis is missing
          fix: psum(x, "data")
        """),
    "shard_map without parentheses": ("fs.shard_map(lambda x: x)", """
        shard_map: mesh and out_specs are missing
          fix: shard_map(f, mesh=..., out_specs=...)
        """),
    "a text for a spec": ("fs.device_put({'w': x}, {'w': 'data'}, mesh)", """
        specs['w']: 'data' is a str, not a P
          fix: use a P: P('data')
        """),
    "a tuple for a spec": ("fs.device_put({'w': x}, {'w': ('data', None)}, mesh)", """
        specs['w']: not a prefix of the tree it describes
          got  tuple of 2    expected  Tensor
          the tree has a leaf at this path
          fix: give the leaf a P: P('data', None)
        """),
    "pickle": ("pickle.dumps(params)", """
        pickle: f32[4, 4] is placed on the devices of Mesh(data=2; simulated, 2 x cpu)
          fix: fs.checkpoint.save(path, tree), which fs.checkpoint.restore places again on any mesh; or \
torch.save(fs.device_get(tree), path), of full tensors
        """),
    "torch.save": ("torch.save(params, io.BytesIO())", """
        pickle: f32[4, 4] is placed on the devices of Mesh(data=2; simulated, 2 x cpu)
          fix: fs.checkpoint.save(path, tree), which fs.checkpoint.restore places again on any mesh; or \
torch.save(fs.device_get(tree), path), of full tensors
        """),
    "a captured batch": ("""
        @fs.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        def loss(p, x):
            return fs.pmean((x @ p["w"] - y).square().mean(), "data")
        loss(params, x)
        """, """
        program.py:4 in loss: y, f32[8, 4], is captured: each rank has all of it, and a part of each argument
          RuntimeError: The size of tensor a (4) must match the size of tensor b (8) at non-singleton dimension 0
          fix: pass it as an argument, which in_specs splits
        """),
    "a captured batch, with one row for each rank": ("""
        y2 = torch.tensor([0, 1])
        @fs.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        def accuracy(p, x):
            return fs.pmean(((x @ p["w"]).argmax(-1) == y2).float().mean(), "data")
        accuracy(params, x[:2])
        """, """
        program.py:5 in accuracy: eq of all 2 rows of a captured tensor with the one row that each rank has
          a captured tensor   i64[2]
          a result of argmax  i64[1]{V: data}
          one device uses row i with row i, and a rank its row with all rows
          fix: pass it as an argument, which in_specs splits
        """),
    "a mean of means of unequal counts": ("""
        @fs.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P())
        def mean(x):
            return fs.pmean(x.square().mean(), "data")
        mean(x[:3])
        """, """
        program.py:4 in mean: pmean of a mean over 'data', of different counts of values
          data=0  8
          data=1  4
          a mean of means is the mean only of equal counts
          fix: divide the sum of all values by their number, each of them a psum over 'data'
        """),
    "no return in the loss": ("fs.grad(lambda p: None)(torch.ones(2))", """
        value_and_grad(<lambda>): the loss is a NoneType, not a tensor
          fix: end <lambda> with `return loss`
        """),
    "gradients before the loss": ("""
        grads, loss = fs.value_and_grad(lambda p: (p["w"] ** 2).sum())({"w": torch.ones(2)})
        fs.tree.map(lambda w, g: w - 0.1 * g, {"w": torch.ones(2)}, loss["w"].sum())
        """, """
        map: rest[0] has another structure than the tree
          tree  PyTreeSpec({'w': *})    other  PyTreeSpec(*)
          Expected an instance of dict, collections.OrderedDict, or collections.defaultdict
          fix: loss, grads = fs.value_and_grad(...): the loss comes first
        """),
    "no key of a dropout": ("fs.nn.dropout(x, 0.5, spec=P('data'))", """
        dropout: key is missing
          fix: dropout(x, rate, key=fs.key(0))
        """),
    "a parameter that the argument lacks": ("""
        fs.shard_map(lambda p: p, mesh=mesh, in_specs=({"w": P(), "b": P()},), out_specs=P())({"w": x})
        """, """
        <lambda>: in_specs[0]: not a prefix of the tree it describes
          missing []    extra ['b']
          fix: leave ['b'] out, or add what they describe to the tree
        """),
    "a list for a batch": ("loss(params, [[1.0, 2.0, 3.0, 4.0]])", """
        loss: args[1][0][0]: is a float, not a tensor: it has no parts for P('data') to place
          fix: pass one tensor: torch.tensor(the list)
          the same for args[1][0][1], args[1][0][2], args[1][0][3]
        """),
    "a bias that is not split like its columns": ("""
        @fs.shard_map(mesh=mesh, in_specs=(P(None, "data"), P(), P()), out_specs=P(None, "data"))
        def grads(w, b, x):
            def loss(w, b):
                return fs.psum((fs.pvary(x, "data") @ w + b).sum(), "data")
            return fs.grad(loss, (0, 1))(w, b)
        grads(torch.ones(4, 8), torch.ones(8), x)
        """, """
        program.py:5 in loss: add of an operand that is invariant (I) over 'data' with one that varies (V) over it
          b                   f32[8]{I: data}
          a result of matmul  f32[8, 4]{V: data}
          b has 8 elements where a result of matmul has 8 / 2 = 4
          fix: b is to be split in the same way: in spec P("data")
        """),
    "buffers of a batch norm": ("""
        apply, tree = fs.defer(lambda: nn.BatchNorm1d(4))
        placed = fs.materialize(tree, P(), mesh, key=fs.key(0))
        f = lambda p, b, x: apply.batch_norm_over(None).with_buffers(p, b, x)[1]
        f = fs.shard_map(f, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
        f(placed["params"], placed["buffers"], x)
        """, """
        program.py:4 in <lambda>: 2 results vary over 'data', which their out specs do not name
          result['running_mean']  f32[4]{V: data}    out spec P()
          result['running_var']   f32[4]{V: data}    out spec P()
          the 2 ranks would return different values, and the out spec declares one value
          result['running_mean'] varies since program.py:4 in <lambda>: native_batch_norm of p['weight'] with x
          fix: apply.batch_norm_over("data"), of all rows; or fs.pmean of the returned buffers
        """),
    "a pmean of the gradients of split leaves": ("""
        split = fs.device_put({"w": torch.ones(4, 4)}, P("data"), mesh)
        @fs.shard_map(mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
        def step(p, x):
            def loss(p):
                return fs.pmean((x @ fs.unshard(p, P("data"), "data")["w"]).square().mean(), "data")
            grads = fs.pmean(fs.grad(loss)(p), "data")
            return fs.tree.map(lambda w, g: w - 0.1 * g, p, grads)
        step(split, x)
        """, """
        program.py:7 in step: pmean over 'data' of a gradient whose dim 0 is split over 'data'
          a result of psum_scatter, the transpose of the all_gather  f32[2, 4]{V: data}
          each rank has other elements of it, and the pmean would mix them: the gradient of a split leaf is complete
          of a mean over the ranks the loss is fs.pmean(loss, "data")
          fix: leave the pmean out
        """),
    "a local sum of a loss": ("""
        @fs.shard_map(mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P())
        def loss(x, y):
            return nn.functional.mse_loss(x, y, reduction="sum")
        loss(x, y)
        """, """
        program.py:4 in loss: result varies over 'data', which its out spec does not name
          result  f32[]{V: data}    out spec P()
          the 2 ranks would return different values, and the out spec declares one value
          fix: if each rank has a part of a sum:  fs.psum(..., "data")
        """),
    "a target that is out of range on a split head": ("""
        @fs.shard_map(mesh=mesh, in_specs=(P(None, "data"), P(), P()), out_specs=P())
        def loss(w, x, y):
            return fs.nn.cross_entropy(x @ w, y)
        loss(x.T, x[:, :4], torch.arange(8))
        """, """
        cross_entropy: target 4 is out of range, of 4 classes
          so are 4 of 8
          at program.py:4 in loss
          fix: cross_entropy(..., axis="data"), which splits the classes
        """),
    "a target that is out of range in the loss of torch": ("""
        @fs.shard_map(mesh=mesh, in_specs=(P(None, "data"), P(), P()), out_specs=P())
        def loss(w, x, y):
            return nn.functional.cross_entropy(x @ w, y)
        loss(x.T, x[:, :4], torch.arange(8))
        """, """
        program.py:4 in loss: target 4 is out of bounds, of the classes that this rank has
          fix: if an axis splits the classes: fs.nn.cross_entropy(logits, targets, axis=...)
        """),
    "a loss that a package computes": ("""
        line = "def lm_loss(logits, y):\\n    return nn.functional.mse_loss(logits, y)"
        exec(compile(line, "/lib/site-packages/acme/losses.py", "exec"))
        @fs.shard_map(mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
        def step(p, x, y):
            return fs.value_and_grad(lambda p: lm_loss(x @ fs.pvary(p["w"], "data"), y))(p)
        step(params, x, y)
        """, """
        program.py:6 in step: the loss that is differentiated varies over 'data'
          loss    f32[]{V: data}
          p['w']  f32[4, 4]{I: data}
          the loss was made at losses.py:2 in lm_loss
          each of the 2 ranks would differentiate its own loss, and p['w'] has one gradient
          fix: if each rank has the mean over an equal count:  fs.pmean(..., "data") of what acme returns to your code
          or, if counts differ, as with padding:  fs.nn.cross_entropy(logits, targets, over="data") in your code
        """),
    "pvary before the function that is differentiated": ("""
        @fs.shard_map(mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
        def step(p, x, y):
            p = fs.pvary(p, "data")
            loss, g = fs.value_and_grad(lambda p: fs.pmean((x @ p["w"] - y).square().mean(), "data"))(p)
            return fs.tree.map(lambda w, g: w - 0.1 * g, {"w": p["w"]}, {"w": g["w"]})
        step(params, x, y)
        """, """
        program.py:6 in <lambda>: result['w'] was computed from a part of a gradient on each rank of 'data'
          result['w']  f32[4, 4]{V: data}    out spec P()
          fs.pvary came before the function that is differentiated: each rank has a part of a gradient
          fix: call fs.pvary(parameters, "data") in that function, and its transpose sums the parts
          or, reduce the gradients over 'data' before they are used: psum for a sum, pmean for a mean
        """),
    "unshard before the function that is differentiated": ("""
        split = fs.device_put({"w": torch.ones(4, 4)}, P(None, "data"), mesh)
        @fs.shard_map(mesh=mesh, in_specs=(P(None, "data"), P("data"), P("data")), out_specs=P(None, "data"))
        def step(p, x, y):
            p = fs.unshard(p, P(None, "data"), "data")
            g = fs.grad(lambda p: fs.pmean((x @ p["w"] - y).square().mean(), "data"))(p)
            return fs.tree.map(lambda w, g: w - 0.1 * g, p, g)
        step(split, x, y)
        """, """
        program.py:7 in <lambda>: result['w'] was computed from a part of a gradient on each rank of 'data'
          result['w']  f32[4, 4]{V: data}    out spec P(None, 'data')
          fs.unshard came before the function that is differentiated: each rank has a part of a gradient
          fix: call fs.unshard(parameters, their specs, "data") in that function, and its transpose sums the parts
          or, reduce the gradients over 'data' before they are used: psum for a sum, pmean for a mean
        """),
    "pvary before a loss with backward()": ("""
        @fs.shard_map(mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
        def step(p, x, y):
            w = fs.pvary(p["w"], "data").clone().requires_grad_()
            fs.pmean((x @ w - y).square().mean(), "data").backward()
            return (w - 0.1 * w.grad).detach()
        step(params, x, y)
        """, """
        program.py:6 in step: result was computed from a part of a gradient on each rank of 'data'
          result  f32[4, 4]{V: data}    out spec P()
          fs.pvary came before the function that is differentiated: each rank has a part of a gradient
          fix: call fs.pvary(parameters, "data") in that function, and its transpose sums the parts
          or, reduce the gradients over 'data' before they are used: psum for a sum, pmean for a mean
        """),
    "neither unshard nor pvary": ("""
        split = fs.device_put({"w": torch.ones(4, 4)}, P(None, "data"), mesh)
        @fs.shard_map(mesh=mesh, in_specs=(P(None, "data"), P("data")), out_specs=P(None, "data"))
        def step(p, x):
            return fs.grad(lambda p: fs.pmean((x @ p["w"]).square().mean(), "data"))(p)
        step(split, x)
        """, """
        program.py:5 in <lambda>: matmul of rows and columns that 'data' splits
          x       f32[4, 4]{V: data}    in spec P('data')
          p['w']  f32[4, 2]{V: data}    in spec P(None, 'data')
          each of the 2 ranks computes its rows with its columns, and not with the others'
          fix: p = fs.unshard(p, its specs, "data"), before its first use, in the function that is differentiated
        """),
    "pvary in place of unshard": ("""
        split = fs.device_put({"w": torch.ones(4, 4)}, P(None, "data"), mesh)
        @fs.shard_map(mesh=mesh, in_specs=(P(None, "data"), P("data")), out_specs=P(None, "data"))
        def step(p, x):
            def loss(p):
                p = fs.pvary(p, "data")
                return fs.pmean((x @ p["w"]).square().mean(), "data")
            return fs.grad(loss)(p)
        step(split, x)
        """, """
        program.py:6 in loss: pvary over 'data' of a value that varies over it already
          p['w']  f32[4, 2]{V: data}
          each of the 2 ranks has its own value already: their gradients are not to be summed
          fix: if each rank is to compute with all of p:  fs.unshard(p, its specs, "data") in place of the pvary
          or, if the pvary is one too many:  leave the pvary over 'data' out
        """),
    "gathered logits with an axis": ("""
        f = lambda x, y: fs.nn.cross_entropy(x, y, axis="data", size=4)
        fs.shard_map(f, mesh=mesh, in_specs=P(), out_specs=P())(x, y[:, 0].long())
        """, """
        cross_entropy: this rank holds 4 of the vocabulary, its part is 2
          4 over 'data' splits into [2, 2]
          fix: leave out axis='data': this rank has all of the vocabulary
        """),
    "a module of a package that draws": ("""
        line = "def forward(x):\\n    return nn.functional.dropout(x, 0.1)"
        exec(compile(line, "/lib/site-packages/acme/layers.py", "exec"))
        fs.shard_map(lambda x: forward(x), mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)
        """, """
        layers.py:2 in forward: bernoulli draws from torch's own generator
          its numbers depend on the process and on earlier draws, so another mesh would give another answer
          fix: apply(params, buffers, ..., key=key); without dropout, apply.eval()
        """),
    "a placed leaf that is written to": ("""
        @fs.shard_map(mesh=mesh, in_specs=P(), out_specs=P())
        def decay(p):
            p["w"].mul_(0.9)
            return p
        decay(params)
        """, """
        program.py:4 in decay: mul in place writes to p['w'], a placed leaf that the caller keeps
          p['w']  f32[4, 4]{I: data}
          an argument is not written to unless it is donated
          fix: p['w'] = p['w'].clone() before this line
          or, if the caller needs p['w'] no more:  fs.shard_map(..., donate=the argument's position)
        """),
    "the mesh before the specs": ("fs.device_put({'w': x}, mesh, P())", """
        device_put: mesh must be a Mesh, got P()
          fix: device_put(tree, specs, mesh)
        """),
    "the specs before the tree": ("fs.device_put({'w': P()}, {'w': x}, mesh)", """
        specs and the tree are swapped: the tree has leaves that are a P
          fix: device_put(tree, specs, mesh), materialize(tree, specs, mesh, key=), fully_shard(specs, tree, axis=)
        """),
    "the tree before the specs": ("fs.fully_shard({'w': x}, P(), axis='data')", """
        specs and the tree are swapped: the tree has leaves that are a P
          fix: device_put(tree, specs, mesh), materialize(tree, specs, mesh, key=), fully_shard(specs, tree, axis=)
        """),
    "scan with the arguments of lax.scan": ("""
        stacked = fs.device_put({"w": torch.ones(3, 4, 4)}, P(), mesh)
        f = lambda p, x: fs.scan(lambda p, x: x @ p["w"], x, p, specs=P(), axis=None)
        fs.shard_map(f, mesh=mesh, out_specs=P())(stacked, x)
        """, """
        scan: the arguments seem to be in the order of lax.scan
          TypeError: new(): invalid data type 'str'
          fix: fs.scan(block, params, x, specs=, axis=, each=), with block(params, x), which returns x
        """),
    "scan with the arguments of lax.scan, and specs": ("""
        stacked = fs.device_put({"w": torch.ones(3, 4, 4)}, P(), mesh)
        f = lambda p, x: fs.scan(lambda p, x: x @ p["w"], x, p, specs={"w": P(None, "data")}, axis="data")
        fs.shard_map(f, mesh=mesh, out_specs=P())(stacked, x)
        """, """
        scan: the arguments seem to be in the order of lax.scan
          params is f32[8, 4], one tensor, and x and specs are trees
          fix: fs.scan(block, params, x, specs=, axis=, each=), with block(params, x), which returns x
        """),
    "scan of a block that captures a shared weight": ("""
        @fs.shard_map(mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
        def grads(p, x):
            def loss(p):
                scale = p["w"][0]
                block = lambda p, x: x @ p["w"] * scale
                return fs.pmean(fs.scan(block, [p, p], x, specs=P(), axis="data").mean(), "data")
            return fs.grad(loss)(p)
        grads(params, x)
        """, """
        scan(<lambda>): captures 'scale', which is being differentiated
          its gradient would be lost
          fix: pass 'scale' as the block's third argument: each=[scale] * (number of blocks), and \
block(params, x, scale)
        """),
    "scan with the body of lax.scan": ("""
        stacked = fs.device_put({"w": torch.ones(3, 4, 4)}, P(), mesh)
        f = lambda p, x: fs.scan(lambda carry, p: carry @ p["w"], p, x, specs=P(), axis=None)
        fs.shard_map(f, mesh=mesh, out_specs=P())(stacked, x)
        """, """
        scan: the arguments seem to be in the order of lax.scan
          TypeError: new(): invalid data type 'str'
          fix: fs.scan(block, params, x, specs=, axis=, each=), with block(params, x), which returns x
        """),
    "scan of a block that returns (x, None)": ("""
        stacked = fs.device_put({"w": torch.ones(3, 4, 4)}, P(), mesh)
        f = lambda p, x: fs.scan(lambda p, x: (x @ p["w"], None), p, x, specs=P(), axis=None)
        fs.shard_map(f, mesh=mesh, out_specs=P())(stacked, x)
        """, """
        scan: the block returned (x, None)
          fix: return x; for an output of each block, has_aux=True
        """),
    "scan of a block that returns a pair": ("""
        stacked = fs.device_put({"w": torch.ones(3, 4, 4)}, P(), mesh)
        f = lambda p, x: fs.scan(lambda p, x: (x @ p["w"], x.mean()), p, x, specs=P(), axis=None)
        fs.shard_map(f, mesh=mesh, out_specs=P())(stacked, x)
        """, """
        scan: the block returned a pair, and x is not one
          fix: return x; for an output of each block, has_aux=True
        """),
    "scan over a pair": ("""
        stacked = fs.device_put({"w": torch.ones(3, 4, 4)}, P(), mesh)
        f = lambda p, x: fs.scan(lambda p, x: x @ p[0]["w"] * p[1], (p, torch.ones(3)), x, specs=P(), axis=None)
        fs.shard_map(f, mesh=mesh, out_specs=P())(stacked, x)
        """, """
        scan: params is a pair of a tree and a tensor
          fix: fs.scan(block, params[0], x, each=params[1], ...), with block(params, x, one of each)
        """),
    "a product with a split matrix, not summed": ("""
        split = fs.device_put({"w": torch.ones(4, 4)}, P("data"), mesh)
        @fs.shard_map(mesh=mesh, in_specs=(P("data"), P(None, "data")), out_specs=P())
        def loss(p, x):
            y = x @ p["w"]
            return (y - 1).square().mean()
        loss(split, x)
        """, """
        program.py:6 in loss: result varies over 'data', which its out spec does not name
          result  f32[]{V: data}    out spec P()
          the 2 ranks would return different values, and the out spec declares one value
          fix: at program.py:5, if each rank has a part of a sum:  fs.psum(..., "data")
        """),
    "weights of a folder by other names": ("""
        import tempfile
        from fshard.models import gpt2
        cfg = gpt2.Config(vocab_size=8, n_positions=4, n_embd=4, n_layer=1, n_head=2)
        folder = tempfile.mkdtemp(prefix="first-mistakes-")
        gpt2.save(folder, cfg, fs.materialize(gpt2.init(cfg), P(), mesh, key=fs.key(0)))
        fs.hf.weights(folder, gpt2.init(cfg))
        """, """
        hf.weights: FOLDER has none of the leaves by their names in `described`
          tree  h.0.down.b, h.0.down.w, and 14 more    files  transformer.h.0.mlp.c_proj.bias, \
transformer.h.0.mlp.c_proj.weight, and 14 more
          fix: give the folder of this model, or rename its tensors; of=apply, with the apply of fs.defer, knows the \
names of transformers; fs.hf.load(path) reads a model of fs.models
        """),
    "round": ("round(loss(params, x), 2)", f"""
        round: f32[] 16.0 {PLACED}
          fix: x.item() is its value, x.shards are its local parts; compute inside fs.shard_map; fs.reshard moves it
        """),
    "a module for its tensors": ("fs.device_put(nn.Linear(4, 4), P(), mesh)", """
        device_put: tree: cannot place a Linear
          fix: pass its tensors: dict(module.named_parameters()); fs.defer(constructor) also computes with them
        """),
    "parameters() for its tensors": ("fs.device_put(nn.Linear(4, 4).parameters(), P(), mesh)", """
        device_put: tree: cannot place a generator
          fix: pass a dict or a list, which have the same leaves each time: dict(module.named_parameters()), list(x)
        """),
}  # fmt: skip

# --- attributes that other libraries have ---------------------------------------------------------------------

ATTRIBUTES = {
    "opt.step": f"an Optimizer has no attribute 'step': it is {UPDATE}, in fs.shard_map",
    "opt.zero_grad":
        "an Optimizer has no attribute 'zero_grad': it is not needed: fs.value_and_grad returns new gradients",
    "apply.unshard(P(), 'data', release=False).draws_over('data')":
        "the function of apply.unshard has no attribute 'draws_over': it is apply.draws_over(...).unshard(specs, axis)",
    "apply.parameters": "an Apply has no attribute 'parameters': it is tree[\"params\"], placed by fs.materialize",
    "fs.PartitionSpec": "fs has no attribute 'PartitionSpec': it is fs.P",
    "fs.jit": "fs has no attribute 'jit': it is fs.shard_map",
    "fs.vmap": "fs has no attribute 'vmap': it is torch.vmap",
    "fs.distribute_tensor": "fs has no attribute 'distribute_tensor': it is fs.device_put",
    "fs.optim.AdamW": "fs.optim has no attribute 'AdamW': it is fs.optim.adamw",
    "fs.nn.relu": "fs.nn has no attribute 'relu': it is torch.nn.functional.relu",
    "fs.init.xavier_normal_": "fs.init has no attribute 'xavier_normal_': it is fs.init.xavier_normal",
    "fs.init.lecun_normal":
        "fs.init has no attribute 'lecun_normal': it is fs.init.kaiming_normal(..., nonlinearity=\"linear\")",
    "fs.random.PRNGKey": "fs.random has no attribute 'PRNGKey': it is fs.key",
    "fs.checkpoint.load": "fs.checkpoint has no attribute 'load': it is fs.checkpoint.restore",
    "fs.no_such_name": "fs has no attribute 'no_such_name'",
}  # fmt: skip


def run(program: str) -> str:
    """Run a program, and return what it prints."""
    out, names = io.StringIO(), {"__name__": "program", "io": io}
    exec(compile(SETUP, "setup.py", "exec"), names)
    with contextlib.redirect_stdout(out):
        exec(compile(textwrap.dedent(program), "program.py", "exec"), names)
    return out.getvalue().strip()


@pytest.mark.parametrize("name", WORKS)
def test_first_programs_that_work(name: str) -> None:
    program, output = WORKS[name]
    assert run(program) == output


@pytest.mark.parametrize("name", REFUSED)
def test_first_mistakes_are_explained(name: str) -> None:
    program, text = REFUSED[name]
    with pytest.raises(fs.ShardingError) as e:
        run(program)
    assert re.sub(r"/\S*first-mistakes-\w*", "FOLDER", str(e.value)) == textwrap.dedent(text).strip()


@pytest.mark.parametrize("expression", ATTRIBUTES)
def test_names_of_other_libraries_are_explained(expression: str) -> None:
    with pytest.raises(AttributeError) as e:
        run(expression)
    assert str(e.value) == ATTRIBUTES[expression]


def test_an_exception_on_one_rank_names_the_rank() -> None:
    program = """
        @fs.shard_map(mesh=fs.make_mesh(data=2, model=2), in_specs=P(("data", "model")), out_specs=P())
        def f(x):
            if (x == 3).any():
                raise KeyError("no such example")
        f(torch.arange(4))
    """
    with pytest.raises(KeyError) as e:
        run(program)
    assert e.value.__notes__ == ["on rank 3: data=1, model=1"]


@pytest.mark.parametrize(
    ("main", "argv", "usage", "error"),
    [
        (command.main, ["plan", "m", "--layot", "x"], "fshard plan", "there is no --layot: --layout is near"),
        (command.main, ["inspect", "m", "n"], "fshard inspect", "there is no n"),
        (pretrain.main, ["--stpes", "3"], "fshard.recipes.pretrain", "there is no --stpes: --steps is near"),
    ],
)  # fmt: skip
def test_unknown_options_show_the_nearest_and_the_usage_of_their_command(main, argv, usage, error, capsys) -> None:
    with pytest.raises(SystemExit) as e:
        main(argv)
    text = capsys.readouterr().err
    assert e.value.code == 2
    assert " ".join(text.split()).startswith(f"usage: python -m {usage} [-h] ")  # in a narrow terminal on two lines
    assert text.splitlines()[-1].endswith(f"error: {error}")


def test_a_resumed_run_of_every_recipe_may_have_more_steps() -> None:
    assert all("steps" in recipe.Options.may_differ for recipe in (pretrain, classify, finetune))
