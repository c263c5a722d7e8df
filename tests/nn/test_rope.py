"""RoPE gives the frequencies and rotations of transformers, bitwise, for every scaling and both layouts."""

from __future__ import annotations

import math
import os

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.nn import rope
from tests.lib.assertions import assert_same, error_text

os.environ["HF_HUB_OFFLINE"] = "1"

WIDTH, LONGEST = 24, 64
LONG = [1 + 0.5 * i for i in range(WIDTH // 2)]
SHORT = [1 + 0.01 * i for i in range(WIDTH // 2)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

# name: rope_parameters
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.5},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, tuned": {"rope_type": "yarn", "factor": 40, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7,
                    "mscale_all_dim": 1.0, "truncate": False, "original_max_position_embeddings": 32},
    "yarn, factor from the lengths": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32},
    "yarn, attention factor": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.3, "beta_fast": 1,
                               "beta_slow": 1},
    "longrope": {"rope_type": "longrope", "long_factor": LONG, "short_factor": SHORT, "factor": 4.0,
                 "original_max_position_embeddings": 16},
    "longrope, factor from the lengths": {"rope_type": "longrope", "long_factor": LONG, "short_factor": SHORT,
                                 "original_max_position_embeddings": 32},
    "longrope, attention factor": {"rope_type": "longrope", "long_factor": LONG, "short_factor": SHORT, "factor": 0.5,
                        "attention_factor": 0.8, "original_max_position_embeddings": 32},
    "llama3": {"rope_type": "llama3", **LLAMA3},
    "proportional": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.6},
}  # fmt: skip


def their_config(parameters, **kwargs):
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaConfig(
        hidden_size=96,
        num_attention_heads=4,
        head_dim=WIDTH,
        max_position_embeddings=LONGEST,
        rope_parameters=dict(parameters),
        **kwargs,
    )


def theirs(parameters, **kwargs):
    """Make the rotary module of a transformers model: (its config, the module)."""
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = their_config(parameters, **kwargs)
    return config, modeling.LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("length", "theta"), [(LONGEST, 500_000.0), (5 * LONGEST, 10_000.0)])
def test_angles_equal_those_of_transformers_bitwise(name, theta, length):
    config, module = theirs({**SCALINGS[name], "rope_theta": theta})
    parameters = rope.parameters(config.to_dict())
    positions = torch.arange(length)
    for dtype in (torch.float32, torch.bfloat16):
        rates, factor = rope.frequencies(parameters, WIDTH, LONGEST, length=length)
        got = rope.angles(positions, rates, factor, dtype=dtype)
        want = module(torch.zeros(1, dtype=dtype), positions[None])
        for ours, their in zip(got, want, strict=True):
            assert ours.dtype == their.dtype == dtype
            assert_same(torch.cat([ours, ours], -1), their[0])
    assert_same(rates, module.inv_freq)
    assert_same(rope.frequencies(parameters, WIDTH, LONGEST, length=torch.tensor(length))[0], rates)
    assert_same(rope.frequencies(parameters, WIDTH, LONGEST)[0], module.original_inv_freq)


@pytest.mark.parametrize("name", SCALINGS)
def test_partial_rotation_equals_that_of_transformers(name):
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    kind = SCALINGS[name]["rope_type"]
    parameters = {**SCALINGS[name], "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    for part in ("long_factor", "short_factor"):
        if part in parameters:
            parameters[part] = parameters[part][: WIDTH // 4]
    rates, factor = rope.frequencies(parameters, WIDTH, LONGEST)
    assert len(rates) == (WIDTH // 2 if kind == "proportional" else WIDTH // 4)
    if kind != "default":
        want, want_factor = utils.ROPE_INIT_FUNCTIONS[kind](their_config(parameters))
        assert_same(rates, want)
        assert factor == want_factor


def test_rotations_equal_those_of_transformers_in_both_layouts():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    neox = pytest.importorskip("transformers.models.gpt_neox.modeling_gpt_neox")
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 3, 5, 8, generator=g), torch.randn(2, 1, 5, 8, generator=g)
    positions = torch.tensor([[0, 0, 1, 2, 3], [0, 1, 2, 3, 4]])
    for r in (8, 4):
        rates, _ = rope.frequencies({"rope_theta": 100.0}, r, 16)
        cos, sin = rope.angles(positions, rates)
        both = [torch.cat([x, x], -1) for x in (cos, sin)]
        want = (llama if r == 8 else neox).apply_rotary_pos_emb(q, k, *both)
        for x, y in zip((q, k), want, strict=True):
            assert_same(rope.rotate(x, cos, sin), y)
        rotated = gptj.apply_rotary_pos_emb(q.transpose(1, 2)[..., :r], sin, cos).transpose(1, 2)
        assert_same(rope.rotate(q, cos, sin, style="pairs"), torch.cat([rotated, q[..., r:]], -1))
    table = gptj.create_sinusoidal_positions(5, 8)
    cos, sin = rope.angles(torch.arange(5), rope.frequencies({"rope_theta": 10_000}, 8, 16)[0])
    assert_same(torch.cat([sin, cos], -1), table)


@pytest.mark.parametrize("style", ["half", "pairs"])
def test_scores_depend_on_distances_only_and_the_transpose_is_the_inverse(style):
    g = torch.Generator().manual_seed(1)
    q, k = (torch.randn(1, 1, 1, 8, generator=g, dtype=torch.float64) for _ in "qk")
    rates = rope.frequencies({"rope_theta": 100.0}, 8, 64)[0]

    def at(x, position):
        cos, sin = rope.angles(torch.tensor([position]), rates, dtype=torch.float64)
        return rope.rotate(x, cos, sin, style=style)

    near, far = ((at(q, p + 3) * at(k, p)).sum() for p in (0, 40))
    torch.testing.assert_close(near, far, rtol=1e-5, atol=0)  # angles are in float32
    x = q.requires_grad_()
    (back,) = torch.autograd.grad(at(x, 5), x, at(x, 5))
    torch.testing.assert_close(back, x, rtol=1e-6, atol=0)


def test_rotation_is_the_same_on_every_mesh():
    mesh = fs.make_mesh(data=2, model=3)
    x = torch.randn(4, 5, 7, 6, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(28).view(4, 7) % 9

    def rotate(x, positions):
        return rope.rotate(x, *rope.angles(positions, rope.frequencies({"rope_theta": 100.0}, 6, 16)[0]))

    run = fs.shard_map(rotate, mesh=mesh, in_specs=(P("data", "model"), P("data")), out_specs=P("data", "model"))
    assert_same(fs.device_get(run(x, positions)), rotate(x, positions))


OLD = [
    ({}, {"rope_type": "default", "rope_theta": 10_000.0}),
    ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 5e5}),
    ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
     {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
    ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
     {"rope_type": "llama3", **LLAMA3, "rope_theta": 5e5}),
    ({"rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 2.0}},
     {"rope_type": "default", "rope_theta": 2.0}),
    ({"partial_rotary_factor": 0.25}, {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}),
    ({"original_max_position_embeddings": 16, "rope_scaling": {"type": "yarn", "factor": 4.0}},
     {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0, "original_max_position_embeddings": 16}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "want"), OLD)
def test_configs_of_older_versions_are_read_as_by_transformers(config, want):
    transformers = pytest.importorskip("transformers")
    before = dict(config)
    assert rope.parameters(config) == want
    assert config == before
    read = transformers.LlamaConfig.from_dict({**config, "max_position_embeddings": LONGEST})
    for parameters in (want, rope.parameters(read.to_dict())):
        got = rope.frequencies(parameters, 128, LONGEST)[0]
        assert_same(got, rope.frequencies(want, 128, LONGEST)[0])


REFUSED = [
    ({"rope_type": "axial"}, 8, """\
rope: unknown rope_type 'axial'
  fix: one of ['default', 'linear', 'dynamic', 'yarn', 'longrope', 'llama3', 'proportional']"""),
    ({"rope_type": "linear", "rope_theta": 10.0}, 8, """\
rope: linear needs ['factor']
  parameters  {'rope_type': 'linear', 'rope_theta': 10.0}"""),
    ({"rope_theta": 10.0}, 7, """\
rope: cannot rotate 7 dims of a head in pairs
  width  7    partial_rotary_factor  1.0"""),
    ({"rope_theta": 10.0, "partial_rotary_factor": 0.1}, 8, """\
rope: cannot rotate 0 dims of a head in pairs
  width  8    partial_rotary_factor  0.1"""),
    ({"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10.0}, 2, """\
rope: dynamic needs more than one pair of dims
  R  2"""),
    ({"rope_type": "longrope", "rope_theta": 10.0, "short_factor": [1.0], "long_factor": [1.0] * 4}, 8, """\
rope: short_factor must have one entry for each pair of dims
  got  1    expected  4"""),
]  # fmt: skip


@pytest.mark.parametrize(("parameters", "width", "text"), REFUSED)
def test_error_texts_of_frequencies(parameters, width, text):
    assert error_text(rope.frequencies, parameters, width, 16) == text


def test_error_texts_of_parameters_and_rotate():
    assert error_text(rope.parameters, {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}) == (
        "rope: parameters that differ between layers\n  rope_parameters  ['full_attention']\n"
        "  fix: one set of parameters for all layers"
    )
    assert (
        error_text(rope.rotate, torch.zeros(1, 1, 3, 4), torch.zeros(3, 4), torch.zeros(3, 4))
        == "rope: cannot rotate 8 dims of a head of 4\n  x  [1, 1, 3, 4]    cos  [3, 4]"
    )


def test_default_frequencies_are_those_of_the_paper():
    rates, factor = rope.frequencies({"rope_theta": 10_000.0}, 128, 2048)
    assert factor == 1.0
    want = torch.tensor([math.pow(10_000, -2 * i / 128) for i in range(64)])
    torch.testing.assert_close(rates, want, rtol=3e-7, atol=0)
