"""Generation by the models here is the same on every mesh; padding, the cache, and errors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fshard as fs
from fshard import P, ShardingError
from fshard.models import gpt2
from fshard.models.kv_cache import Cache, Tokens

MESHES = [{"data": 1, "model": 1}, {"data": 2, "model": 1}, {"data": 1, "model": 3}, {"data": 2, "model": 2}]
CFG = gpt2.Config(vocab_size=13, n_positions=12, n_embd=12, n_layer=2, n_head=3)


def generated(sizes, ids, mask=None, cfg=CFG, **kwargs):
    mesh, specs = fs.make_mesh(**sizes), gpt2.specs(CFG, model="model")
    described = fs.tree.map(lambda d: fs.init.normal(d.shape, std=0.3), gpt2.init(CFG))
    params = fs.materialize(described, specs, mesh, key=fs.key(0))

    @fs.shard_map(mesh=mesh, in_specs=(specs, P("data"), P("data")), out_specs=P("data"),
                  check="never" if sizes == MESHES[3] else "first")  # fmt: skip
    def run(p, ids, mask):
        return gpt2.generate(cfg, p, ids, layout=gpt2.Layout("data", "model"), mask=mask, **kwargs)

    return fs.device_get(run(params, ids, mask))


def prompts(b=4, t=3):
    return torch.randint(0, 13, (b, t), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", [{"temperature": 0.7, "top_p": 0.8, "key": fs.key(5)}, {"beams": 3, "eos": 4}])
def test_options_generate_the_same_on_every_mesh(options):
    ids, mask = prompts(5), torch.ones(5, 3, dtype=torch.int64)  # of 5, two ranks have 3 and 2
    mask[1, :2] = 0
    want = generated(MESHES[0], ids, mask, new=4, **options)
    assert not torch.equal(want, generated(MESHES[0], ids, mask, new=4))
    assert torch.equal(generated(MESHES[3], ids, mask, new=4, **options), want)


def test_logits_with_a_cache_equal_those_of_one_call():
    ids = prompts(2, 9)
    params = fs.device_get(fs.materialize(gpt2.init(CFG), P(), fs.make_mesh(data=1), key=fs.key(0)))

    @fs.shard_map(mesh=fs.make_mesh(data=1), in_specs=(P(), P()), out_specs=P())
    def run(p, ids):
        cache, got = Cache(9), []
        for part in ids.split([4, 1, 3, 1], 1):
            logits, cache = gpt2.apply(CFG, p, part, cache=cache)
            got.append(logits)
        assert cache.length == 9
        return torch.cat(got, 1), gpt2.apply(CFG, p, ids)

    got, want = fs.device_get(run(params, ids))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_tokens_of_the_config_end_sequences_unless_options_are_given():
    ids = prompts(5)
    free = generated(MESHES[0], ids, new=6)
    end = int(free[0, 4])  # the second new token of the first sequence

    def run(in_config, pad_in_config=None, sizes=MESHES[0], **options):
        cfg = replace(CFG, eos_token_id=in_config, pad_token_id=pad_in_config)
        return generated(sizes, ids, new=6, cfg=cfg, **options)

    want = generated(MESHES[0], ids, new=6, eos=end, pad=12)
    assert torch.equal(run(end, 12, MESHES[1]), want)
    assert torch.equal(run((99, end), 12), want)  # one that the vocabulary lacks never comes
    assert torch.equal(run(None, 12, stop=[[end]]), want)
    assert torch.equal(run(1, 11, eos=end, pad=12), want)
    assert run(end)[0].tolist() == [*free[0, :5].tolist(), *[end] * 4]
    for none in (run(end, 12, eos=None), run(end, 12, eos=()), run(99, 12), run(None, 12)):
        assert torch.equal(none, free)


@pytest.mark.slow
def test_a_compiled_program_generates_the_same():
    params = fs.device_get(fs.materialize(gpt2.init(CFG), P(), fs.make_mesh(data=1), key=fs.key(0)))

    def run(p, ids):
        return gpt2.generate(CFG, p, ids, new=2, temperature=1.0, top_k=5, top_p=0.9, key=fs.key(1), eos=[3, 4])

    got = torch.compile(run, backend="eager", fullgraph=True)(params, prompts())
    assert torch.equal(got, run(params, prompts()))


def test_padding_has_no_position_and_is_not_attended_to():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0]])
    got = Tokens.of(torch.zeros(3, 4, dtype=torch.int64), mask)
    assert got.positions.tolist() == [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 1, 1]]
    assert got.mask[0, 0].long().tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    later = Tokens.of(torch.zeros(3, 1, dtype=torch.int64), mask, Cache(9, 3))
    assert later.positions.tolist() == [[1], [3], [1]]
    assert later.mask[:, 0, 0].long().tolist() == mask.tolist()


def test_impossible_arguments_are_errors():
    ids = prompts()
    with pytest.raises(ShardingError, match="12 tokens do not fit a cache of 10\n  fix: Cache\\(12\\)"):
        Tokens.of(ids, cache=Cache(10, 9))
    with pytest.raises(ShardingError, match="one entry for each token, also for those in the cache\n"
                                            "  got  \\[4, 3\\]    needed  \\[4, 5\\]"):  # fmt: skip
        Tokens.of(ids, torch.ones(4, 3), Cache(10, 2))
    with pytest.raises(ShardingError, match="13 tokens do not fit 12 positions"):
        generated(MESHES[0], ids, new=11)
