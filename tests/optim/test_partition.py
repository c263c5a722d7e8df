"""`partition` and `combine`: what trains is a tree of its own, on which everything else works unchanged."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import optree
import pytest
import torch
from torch import Tensor

import fshard as fs
from fshard import P
from tests.lib.assertions import assert_same, error_text
from tests.lib.operations import Operations

Pair = namedtuple("Pair", "left right")
TREE = {"h": [{"w": 1, "b": 2}, {"w": 3, "b": 4}], "pair": Pair(5, (6,)), "head": 7}


def chosen(tree: Any) -> list[Any]:
    return fs.tree.leaves(tree)


@pytest.mark.parametrize(
    ("rules", "want"),
    [
        ("head", [7]),
        (["h.*.b", "head"], [2, 4, 7]),
        (["h.1.**", "pair.1.0"], [4, 3, 6]),
        ("**.b", [2, 4]),
        ("pair.*", [5]),
        ("**", [2, 1, 4, 3, 7, 5, 6]),
        ([], []),
        (lambda path, x: "w" in path or x == 6, [1, 3, 6]),
        (lambda path, x: False, []),
    ],
)
def test_parts_have_each_leaf_once_and_combine_to_the_tree(rules: Any, want: list[int]) -> None:
    selected, rest = fs.partition(TREE, rules)
    assert sorted(chosen(selected)) == sorted(want)
    assert sorted(chosen(selected) + chosen(rest)) == list(range(1, 8))
    for parts in ((selected, rest), (rest, selected)):
        out = fs.combine(*parts)
        assert out == TREE
        assert fs.tree.structure(out) == fs.tree.structure(TREE)


def test_parts_are_partitioned_again_and_some_of_them_combined() -> None:
    a, rest = fs.partition(TREE, "**.b")
    b, c = fs.partition(rest, "pair.**")
    assert fs.combine(c, a, b) == TREE
    assert chosen(fs.combine(b, c, partial=True)) == chosen(rest)
    assert fs.combine(TREE) == TREE
    leaf = torch.ones(2)
    assert fs.combine(*fs.partition(leaf, "**")) is leaf  # a tree that is one leaf
    mine = {"w": leaf, "b": None}  # None of the tree itself
    assert fs.combine(*fs.partition(mine, "w"), partial=True) == mine


class Node:
    """A container of one's own, with static data."""

    def __init__(self, left: Any, right: Any, name: str) -> None:
        self.left, self.right, self.name = left, right, name


optree.register_pytree_node(
    Node,
    lambda node: ((node.left, node.right), node.name, ("left", "right")),
    lambda name, children: Node(*children, name),
    namespace=optree.registry.__GLOBAL_NAMESPACE,
)


def test_containers_of_ones_own_are_split_too() -> None:
    selected, rest = fs.partition({"n": Node(1, 2, "x")}, "n.right")
    assert (selected["n"].left, selected["n"].right, rest["n"].left, rest["n"].name) == (None, 2, 1, "x")
    out = fs.combine(selected, rest)["n"]
    assert (out.left, out.right, out.name) == (1, 2, "x")


def test_errors_of_partition() -> None:
    assert error_text(fs.partition, TREE, ["h.0", "*.b", "nothing.**", "head"]) == (
        "3 problems\n"
        "partition: rules: 'h.0' matches no leaf of the tree\n"
        "  its leaves are h.0.b, h.0.w, h.1.b, h.1.w, and 3 more\n"
        "  fix: 'h.0.**' matches every leaf below it\n"
        "partition: rules: '*.b' matches no leaf of the tree\n"
        "  its leaves are h.0.b, h.0.w, h.1.b, h.1.w, and 3 more\n"
        "  fix: '**.b' matches it at any depth\n"
        "partition: rules: 'nothing.**' matches no leaf of the tree\n"
        "  its leaves are h.0.b, h.0.w, h.1.b, h.1.w, and 3 more\n"
        "  fix: correct it, or leave it out"
    )
    of_peft = {"h.0.q.lora_A.default.weight": 1, "h.0.q.base_layer.weight": 2}
    for glob in ("*.lora_*", "lora_*", "*.q.lora_*.*"):  # as `hf.weights(missing=)`, and as shells, match a text
        fix = error_text(fs.partition, of_peft, glob).rpartition("fix: '")[2].partition("'")[0]
        assert [x for x in fs.partition(of_peft, fix)[0].values() if x] == [1]
    w = torch.ones(2)
    assert error_text(fs.partition, {"wte": w, "head": [w]}, "wte") == (
        "partition: tree['wte'] is tied to tree['head'][0], which is not selected\n"
        "  fix: select both or none of them, or untie them: a copy of one"
    )
    fs.partition({"wte": w, "head": [w]}, ["wte", "head.0"])
    fs.partition({"wte": w, "head": [w.clone()]}, "wte")
    same = P("data")
    fs.partition({"wte": same, "head": [same]}, "wte")  # equal specs are no tie
    assert error_text(fs.partition, {"a": w}, lambda path, x: x.sum() > 0) == (
        "partition: rules: the result for tree['a'] must be True or False, got tensor(True)"
    )
    assert error_text(fs.partition, TREE, 3).startswith("partition: rules must be a str, a Sequence of str or a func")


def test_errors_of_combine() -> None:
    a, b = fs.partition(TREE, ["h.0.w", "head"])
    assert error_text(fs.combine, a, b, a) == (
        "combine: tree['h'][0]['w']: is in trees[0], trees[2]\n"
        "  fix: give parts of one tree, each of them once\n"
        "  the same for tree['head']"
    )
    assert error_text(fs.combine, b).splitlines() == [
        "combine: tree['h'][0]['w']: is None in every tree",
        "  fix: give all parts; partial=True leaves None where it is so",
        "  the same for tree['head']",
    ]
    assert "is in trees[0], trees[1]" in error_text(fs.combine, a, a, partial=True)
    assert error_text(fs.combine, {"a": 1, "b": None}, {"a": None, "c": 2}) == (
        "combine: trees[1] has another structure than trees[0]\n"
        "  missing tree['b']\n"
        "  extra tree['c']\n"
        "  fix: give parts of one tree, as fs.partition returns them"
    )
    assert "the containers at the same paths differ" in error_text(fs.combine, [1, None], (None, 2))
    assert error_text(fs.combine) == "combine: no trees\n  fix: the parts that fs.partition returned"


# --- only what trains -----------------------------------------------------------------------------------------

MESHES: list[dict[str, int]] = [{"data": 1}, {"data": 2}, {"data": 3}, {"data": 2, "model": 2}]
TRAINED = ["h.*.b", "head"]
SPECS = {"h": [{"w": P(None, "data"), "b": P("data")}] * 2, "head": P("data"), "norm": P()}
SIDE = 33  # uneven over 2 and 3 ranks


def described() -> Any:
    block = {"w": fs.init.normal((SIDE, SIDE), std=0.2), "b": fs.init.normal((SIDE,))}
    return {"h": [block, {**block, "w": fs.init.normal((SIDE, SIDE), std=0.1), "b": fs.init.zeros((SIDE,))}],
            "head": fs.init.normal((SIDE, 1)), "norm": fs.init.ones((SIDE,))}  # fmt: skip


def forward(p: Any, x: Tensor) -> Tensor:
    for block in p["h"]:
        x = torch.tanh(x @ block["w"] + block["b"])
    return ((x * p["norm"]) @ p["head"]).square().mean()


OPT = fs.optim.chain(fs.optim.clip_by_global_norm(0.05, fs.partition(SPECS, TRAINED)[0]), fs.optim.adamw(1e-2))


def train(
    axes: dict[str, int], steps: int = 3, folder: Any = None, resume: bool = False
) -> tuple[Any, Any, list[float]]:
    """Train a part of the parameters; return the whole tree, the state of the optimizer and the losses.

    With a folder, save the state of training at the end, or resume from there.
    """
    mesh, tree, key = fs.make_mesh(**axes), described(), fs.key(0)
    params, frozen = fs.partition(tree, TRAINED)
    specs, frozen_specs = fs.partition(SPECS, TRAINED)
    placed = {"params": specs, "opt": OPT.specs(specs)}
    state = {"params": fs.materialize(params, specs, mesh, key=key),
             "opt": fs.materialize(OPT.init(params), placed["opt"], mesh, key=key)}  # fmt: skip
    frozen = fs.materialize(frozen, frozen_specs, mesh, key=key)
    first, base = 0, fs.checkpoint.digest(frozen) if folder else None
    if resume:
        like = {"train": state, "key": key, "step": 0}
        saved = fs.checkpoint.restore(folder, like, base=base)
        assert torch.equal(saved["key"], key)
        state, first = saved["train"], saved["step"]

    @fs.shard_map(mesh=mesh, in_specs=(placed, SPECS, P("data")), out_specs=(placed, P()), donate=0)
    def step(state: Any, frozen: Any, x: Tensor) -> Any:
        def loss_fn(p: Any) -> Tensor:
            return fs.pmean(forward(fs.unshard(fs.combine(p, frozen), SPECS, "data", shapes=tree), x), "data")

        loss, grads = fs.value_and_grad(loss_fn)(state["params"])
        params, opt = OPT.update(grads, state["opt"], state["params"])
        return {"params": params, "opt": opt}, loss

    examples, losses = torch.randn(30, SIDE, generator=torch.Generator().manual_seed(1)), []
    for at in range(first, first + steps):
        rows = fs.data.indices(key, step=at, size=len(examples), batch=12, even=True)
        state, loss = step(state, frozen, fs.data.load(lambda i: examples[i], rows, mesh=mesh))
        losses.append(float(loss))
    if folder and not resume:
        fs.checkpoint.save(folder, {"train": state, "key": key, "step": first + steps}, base=base)
    return fs.device_get(fs.combine(state["params"], frozen)), state["opt"], losses


def train_dense(steps: int = 3) -> tuple[Any, list[float]]:
    """Train the same leaves by torch alone."""
    p = fs.device_get(fs.materialize(described(), P(), fs.make_mesh(data=1), key=fs.key(0)))
    trained = [p["h"][0]["b"], p["h"][1]["b"], p["head"]]
    adamw = torch.optim.AdamW([x.requires_grad_() for x in trained], lr=1e-2)
    examples, losses = torch.randn(30, SIDE, generator=torch.Generator().manual_seed(1)), []
    for at in range(steps):
        adamw.zero_grad()
        loss = forward(p, examples[fs.data.indices(fs.key(0), step=at, size=30, batch=12, even=True)])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.05)
        adamw.step()
        losses.append(loss.item())
    return fs.tree.map(lambda x: x.detach(), p), losses


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_partition_of_what_trains_equals_torch_with_frozen_parameters(axes: dict[str, int]) -> None:
    got, opt, losses = train(axes)
    want, want_losses = train_dense()
    # fp32 sums in another order, through three steps of Adam
    assert_same(got, want, rtol=1e-4, atol=1e-5)
    assert losses == pytest.approx(want_losses, rel=1e-5)
    initial = fs.materialize(described(), P(), fs.make_mesh(data=1), key=fs.key(0))
    for path, x in fs.tree.leaves_with_path(fs.partition(got, TRAINED)[1]):  # the frozen leaves keep their bits
        assert_same(x, dict(fs.tree.leaves_with_path(fs.device_get(initial)))[path])
    shapes = [tuple(x.shape) for x in fs.tree.leaves(opt)]
    assert (SIDE, SIDE) not in shapes  # no moments of what is frozen
    assert shapes.count((SIDE,)) == 4


def test_save_state_and_load_state_resume_a_part_on_another_mesh(tmp_path: Any) -> None:
    """One tree is the state: parameters that train, moments, key and step; the frozen ones by digest."""
    want, _, losses = train({"data": 2}, steps=5)
    _, _, first = train({"data": 2}, 3, tmp_path / "state")
    saved = fs.checkpoint.inspect(tmp_path / "state")
    trained = [name.removeprefix("train.params.") for name in saved if name.startswith("train.params.")]
    assert trained == ["h.0.b", "h.1.b", "head"]
    for axes in ({"data": 3}, {"data": 1, "model": 2}):
        got, _, rest = train(axes, 2, tmp_path / "state", resume=True)
        assert first + rest == pytest.approx(losses, rel=1e-5)
        assert_same(got, want, rtol=1e-4, atol=1e-5)  # fp32 sums in another order, through five steps of Adam


def test_parts_of_a_deferred_module() -> None:
    mesh = fs.make_mesh(data=2)
    _, described = fs.defer(lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    whole = fs.materialize(described, P(), mesh, key=fs.key(0))
    parts = [fs.materialize(part, P(), mesh, key=fs.key(0)) for part in fs.partition(described, "params.**")]
    assert not fs.tree.leaves(parts[1]["params"])
    assert_same(fs.combine(*parts), whole)


def test_parts_are_materialized_with_the_values_of_the_whole_tree() -> None:
    mesh = fs.make_mesh(data=3)
    whole = fs.materialize(described(), SPECS, mesh, key=fs.key(5))
    parts = [fs.materialize(part, SPECS, mesh, key=fs.key(5)) for part in fs.partition(described(), "h.*.b")]
    assert_same(fs.combine(*parts), whole)


def test_specs_and_full_sharding_of_a_part() -> None:
    params, _ = fs.partition(described(), TRAINED)
    whole = fs.fully_shard(P(), described(), axis="data")
    assert fs.fully_shard(P(), params, axis="data") == fs.partition(whole, TRAINED)[0]


def test_checkpoint_of_a_part_has_its_leaves_alone(tmp_path: Any) -> None:
    mesh = fs.make_mesh(data=2)
    whole = fs.materialize(described(), SPECS, mesh, key=fs.key(0))
    params, frozen = fs.partition(whole, TRAINED)
    fs.checkpoint.save(tmp_path / "part", {"params": params})
    assert list(fs.checkpoint.inspect(tmp_path / "part")) == ["params.h.0.b", "params.h.1.b", "params.head"]
    other = fs.make_mesh(data=3)
    like, specs = fs.partition(described(), TRAINED)[0], fs.partition(SPECS, TRAINED)[0]
    got = fs.checkpoint.restore(tmp_path / "part", like, specs=specs, mesh=other, at="params")
    assert_same(fs.combine(got, fs.reshard(frozen, SPECS, other)), whole)


def test_gradient_of_a_part_allocates_nothing_for_the_rest() -> None:
    p = {"frozen": torch.ones(2, 1000), "trained": torch.ones(2)}
    trained, frozen = fs.partition(p, "trained")
    peaks = {}
    for name, tree in (("part", trained), ("all", p)):

        def loss(t: Any, name: str = name) -> Tensor:
            t = fs.combine(t, frozen) if name == "part" else t
            return ((torch.ones(1, 2) * t["trained"]) @ t["frozen"]).sum()

        with Operations() as seen:
            fs.grad(loss)(tree)
        peaks[name] = seen.peak
        assert (seen.largest >= 8000) is (name == "all")  # with one row the frozen leaf is larger than any activation
    assert peaks["all"] >= peaks["part"] + 4000
