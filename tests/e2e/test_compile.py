"""The whole train step of GPT-2 is one graph, compiled once, on real ranks, with the numbers of one device."""

from __future__ import annotations

import math

import pytest
import torch

import fshard as fs
from tests.lib.assertions import assert_same
from tests.lib.compile_cases import KINDS, compiled_and_eager, train, uneven, uneven_compiled
from tests.lib.processes import Pool

# The order of sums differs, by some 1e-9 for gradients of 1e-2, and AdamW divides by the size of a gradient: a step of
# 1e-2 is off by 1e-9. For a leaf whose exact gradient is 0, such as a key's bias, noise is divided by eps = 1e-8 and
# more: measured, four steps are off by 1.3e-6 there.
CLOSE = {"rtol": 2e-5, "atol": 5e-6}


@pytest.mark.slow
@pytest.mark.process
def test_a_whole_step_on_real_ranks_is_one_graph_and_equals_the_eager_step_and_one_device(ranks: Pool) -> None:
    for kind in KINDS:
        one = train(fs.make_mesh(ranks=1, kind="simulated"), kind)
        assert not torch.equal(one[0][0]["params"]["wte"], one[-1][0]["params"]["wte"])
        for compiled, eager, (graphs, breaks) in ranks(2, compiled_and_eager, kind, timeout=900):
            assert (graphs, breaks) == (1, {}), kind
            assert_same(compiled, eager, **CLOSE)
            assert_same(compiled, one, **CLOSE)


@pytest.mark.slow
@pytest.mark.process
def test_collectives_of_uneven_parts_may_be_reordered_by_a_compiler(ranks: Pool) -> None:
    for backend, axes in (("inductor", {"data": 1, "model": 2}), ("aot_eager", {"data": 2, "model": 2})):
        want = uneven(fs.make_mesh(kind="simulated", **axes), compile=False)
        for got in ranks(math.prod(axes.values()), uneven_compiled, backend, axes, timeout=900):
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b)  # inductor's sin and exp are not torch's, to the last bit
