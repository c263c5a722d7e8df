"""The benchmarks measure exactly, and their `nn.Module` computes what the fshard model computes."""

from __future__ import annotations

import dataclasses
import datetime

import pytest
import torch
import torch.distributed as dist

import fshard as fs
from fshard import P
from fshard.models import gpt2, resnet
from tests.benchmarks import gpt_module, predict_classes, published_layouts
from tests.benchmarks.step_cost import StepCost, measure_step
from tests.lib.later import Later

train_steps = Later("tests.benchmarks.train_steps")

TINY = gpt2.Config(vocab_size=61, n_positions=12, n_embd=24, n_layer=2, n_head=3)


def test_the_live_bytes_of_a_known_program_are_counted_exactly():
    def setup():
        kept = [torch.zeros(1000)]
        torch.empty(100_000)  # above the peak of the step, and before it

        def step():
            kept.append(torch.empty(500, dtype=torch.float64))  # not freed
            big = torch.empty(3000, dtype=torch.uint8)
            more = torch.empty(2000, dtype=torch.int16)  # the peak: all four
            del big
            kept[0].untyped_storage().resize_(0)
            kept[0].untyped_storage().resize_(400)
            del more

        return step

    cost = measure_step(setup, warmup=0)
    assert (cost.start, cost.peak, cost.end) == (4000, 4000 + 4000 + 3000 + 4000, 400 + 4000)
    cost = measure_step(setup, warmup=2)
    assert (cost.start, cost.peak, cost.end) == (400 + 8000, 400 + 12000 + 7000, 400 + 12000)


def test_saved_tensors_are_live_until_backward():
    x, n = torch.ones(()), 10_000

    def setup():
        w = torch.ones(n, requires_grad=True)

        def step():
            (g,) = torch.autograd.grad((w.exp() + x).sum(), w)  # exp is saved
            del g

        return step

    cost = measure_step(setup, warmup=1)
    assert cost.start == cost.end == 4 * n
    assert 12 * n <= cost.peak <= 12 * n + 64  # w, exp(w), and exp(w) + x or the gradient


def test_operations_of_gloo_are_counted_with_their_bytes():
    """On a group of one rank."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, datetime.timedelta(seconds=20))

    def setup():
        x, half = torch.ones(10, 7), torch.ones(33, dtype=torch.bfloat16)

        def step():
            group.allreduce([x]).wait()
            group.allgather([[torch.empty_like(half)]], [half]).wait()

        return step

    assert measure_step(setup, warmup=1).transfers == [("all_reduce", 280), ("all_gather", 66)]


def test_the_bytes_a_rank_sends_are_those_of_the_best_algorithm():
    moved = [("all_reduce", 100), ("all_gather", 60), ("reduce_scatter", 80), ("all_to_all", 40), ("send", 7)]
    assert StepCost(0, 0, 0, moved).sent(2) == 100 + 60 + 40 + 20 + 7
    assert StepCost(0, 0, 0, moved).sent(4) == 150 + 180 + 60 + 30 + 7
    with pytest.raises(KeyError):  # an unknown transfer is not skipped
        StepCost(0, 0, 0, [("scatter", 1)]).sent(2)


def test_the_module_has_the_loss_and_gradients_of_fshard():
    generator = torch.Generator().manual_seed(0)

    def draw(leaf):  # biases that are not 0, and norms that are not the identity
        return 0.3 * torch.randn(leaf.shape, generator=generator, dtype=torch.float64)

    params = fs.tree.map(draw, gpt2.init(TINY))
    ids = torch.randint(61, (3, 13), generator=generator)
    ids, targets = ids[:, :-1], ids[:, 1:]

    module = gpt_module.from_params(TINY, params)
    theirs = module(ids, targets)
    theirs.backward()
    loss, grads = fs.value_and_grad(lambda p: gpt2.loss(TINY, p, ids, targets))(params)

    torch.testing.assert_close(loss, theirs.detach(), rtol=1e-12, atol=0)
    named = gpt_module.named(grads)
    assert sorted(named) == sorted(name for name, _ in module.named_parameters())
    for name, p in module.named_parameters():
        torch.testing.assert_close(named[name], p.grad, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


def test_the_module_has_the_initial_values_of_fshard():
    size = train_steps.SIZES["tiny"]
    one = fs.make_mesh(one=1)
    state = {"params": gpt2.init(size.cfg), "other": fs.init.zeros(())}
    ours = gpt_module.named(fs.device_get(fs.materialize(state, P(), one, key=train_steps.KEY))["params"])
    for name, p in gpt_module.build(size.cfg, train_steps.KEY, torch.device("cpu")).named_parameters():
        assert torch.equal(ours[name], p), name


@pytest.mark.slow
@pytest.mark.parametrize("head", ["row", "column chunked"])
def test_memory_that_is_predicted_from_shapes_is_the_memory_of_a_real_step(head: str) -> None:
    cfg = resnet.Config(embedding_size=8, hidden_sizes=(16, 32), depths=(1, 2), num_labels=3001)
    predicted = predict_classes.predict(cfg, head, 1, 8, 32)
    arguments, peak = predict_classes.measure(cfg, head, 8, 32)
    assert predicted.arguments == arguments
    # To a scalar. In half precision kernels of the CPU have scratch memory, too, that no plan sees.
    assert abs(predicted.peak - peak) <= 8


@pytest.mark.slow  # tests/planning/test_table.py predicts many blocks from few
def test_a_step_of_many_blocks_and_microbatches_is_predicted_from_few(monkeypatch) -> None:
    monkeypatch.setattr(published_layouts, "SIZES", {"tiny": (4, 64, 128, 4)})
    monkeypatch.setattr(published_layouts, "VOCAB", 96)
    monkeypatch.setattr(published_layouts, "TIME", 32)
    monkeypatch.setattr(published_layouts, "EXAMPLES", 12)
    layout = published_layouts.Layout("tiny", data=2, tensor=2, micro_batch=2, zero=1)
    step, args = published_layouts.step_of(layout, 4, layout.microbatches)
    device = dataclasses.replace(fs.devices.H100, efficiency=0.5)
    whole = layout.tokens / fs.plan(step, *args, device=device).time.seconds
    few = published_layouts.plans_of(layout)
    assert published_layouts.predict(layout, few, device) == pytest.approx(whole, rel=0.002)


def test_rank_correlations_are_those_of_known_orders() -> None:
    """Of 1 2 3 4 and 1 3 2 4: 1 - 6 (1 + 1) / (4 (16 - 1)). Two equal numbers share ranks 2 and 3."""
    of = published_layouts.rank_correlation
    assert of([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert of([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert of([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert of([1, 2, 3, 4], [1, 5, 5, 9]) == pytest.approx(4.5 / (5 * 4.5) ** 0.5)
