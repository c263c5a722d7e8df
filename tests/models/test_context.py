"""Models with their positions split over an axis equal one device in loss, gradients and logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.models import bert, gpt2, gpt_neox, gptj, heads, llama, mistral, mixtral, qwen3, t5
from tests.lib.assertions import assert_same, error_text
from tests.lib.model_cases import DECODERS, LLAMA_SIZES, left_padding
from tests.nn.test_context import packed
from tests.nn.test_nn import ints

T = 16
MESHES = {"seq=4": ({"seq": 4}, False, False), "everything": ({"data": 2, "seq": 2, "model": 2}, True, True)}


def placed(module, cfg, axes, fully_sharded, dtype=torch.float64, **options):
    """Return the parameters of a model on a mesh, their specs, the layout and the spec of tokens."""
    has = lambda axis: axis if axis in axes else None  # noqa: E731
    if module is mixtral:
        options["experts"] = tuple(axis for axis in ("data", "seq") if axis in axes) or None
    split = {"experts": options["experts"]} if module is mixtral else {}
    specs, described = module.specs(cfg, model=has("model"), **split), module.init(cfg)
    if fully_sharded:
        specs = fs.fully_shard(specs, described, axis="data")
    params = fs.materialize(described, specs, fs.make_mesh(**axes), key=fs.key(1), dtype=dtype)
    layout = module.Layout(has("data"), has("model"), context=has("seq"), **options)
    return params, specs, layout, P(has("data"), has("seq"))


def losses(module, cfg, axes, fully_sharded=False, sequence=False, t=T, logits="apply", key=None, **tokens):
    """Return the loss of one batch, its gradients and the logits."""
    params, specs, layout, spec = placed(module, cfg, axes, fully_sharded, sequence=sequence)
    ids, targets = ints(31, 4, t), ints(31, 4, t, seed=1)
    targets[0, :3] = -100

    def step(params, ids, targets, tokens):
        options = {"layout": layout, "specs": specs, "key": key, **tokens}
        of = lambda p: module.loss(cfg, p, ids, targets, **options)  # noqa: E731
        return fs.value_and_grad(of)(params), getattr(module, logits)(cfg, params, ids, **options)

    out_specs = (P(), specs), P(*spec.parts(2), layout.model)
    run = fs.shard_map(step, mesh=fs.make_mesh(**axes), in_specs=(specs, spec, spec, spec), out_specs=out_specs,
                       check="first" if len(axes) > 1 and module in (bert, gpt2, mixtral) else "never")  # fmt: skip
    return fs.device_get(run(params, ids, targets, tokens))


CASES = [
    (gpt2, DECODERS["gpt2"].config()), (gptj, DECODERS["gptj"].config()), (gpt_neox, DECODERS["gpt_neox"].config()),
    (llama, llama.Config(**LLAMA_SIZES)), (qwen3, qwen3.Config(**LLAMA_SIZES, head_dim=8)),
    (mistral, mistral.Config(**LLAMA_SIZES, sliding_window=5)),
    (mixtral, mixtral.Config(**LLAMA_SIZES, num_local_experts=4, output_router_logits=True)),
    (llama, llama.Config(**LLAMA_SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.5, "rope_theta": 1e4})),
]  # fmt: skip


@pytest.mark.parametrize(
    ("module", "cfg"),
    [pytest.param(*case, marks=[] if case[0] is llama and case != CASES[-1] else pytest.mark.slow)
     for case in CASES],
    ids=["gpt2", "gptj", "gpt_neox", "llama", "qwen3", "mistral", "mixtral", "llama, dynamic"],
)  # fmt: skip
def test_decoder_with_split_positions_equals_one_device(module, cfg):
    """torchtitan#2559: positions must begin anew with each packed document."""
    t = min(T, getattr(cfg, "n_positions", T))
    cases = [(packed(t, 3).repeat(2, 1), "everything")]
    for documents, mesh in (*cases, *[(None, name) for name in ["seq=4"] if module in (gpt2, llama)]):
        want = losses(module, cfg, {"data": 1}, t=t, documents=documents)
        assert_same(losses(module, cfg, *MESHES[mesh], t=t, documents=documents), want, mesh, rtol=1e-12, atol=1e-12)


def test_decoder_with_split_positions_that_no_axis_divides_equals_one_device():
    cfg = llama.Config(**LLAMA_SIZES)
    for t in (11, 22):
        want = losses(llama, cfg, {"data": 1}, t=t)
        assert_same(losses(llama, cfg, {"data": 2, "seq": 2}, True, t=t), want, rtol=1e-12, atol=1e-12)


DROPS = [
    (gpt2, DECODERS["gpt2"].config(n_positions=22, embd_pdrop=0.1, attn_pdrop=0.2, resid_pdrop=0.3)),
    (gptj, DECODERS["gptj"].config(n_positions=22, embd_pdrop=0.1, attn_pdrop=0.2, resid_pdrop=0.3)),
    (gpt_neox, DECODERS["gpt_neox"].config(hidden_dropout=0.2, attention_dropout=0.3)),
    (mistral, mistral.Config(**LLAMA_SIZES, sliding_window=5, attention_dropout=0.3)),
    (bert, bert.Config(61, 24, 2, 3, 34, mlm=True, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.3)),
]  # fmt: skip


@pytest.mark.parametrize(("module", "cfg"), [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] is not gpt2),
                                                          id=case[0].__name__) for case in DROPS])  # fmt: skip
def test_dropout_by_position_equals_one_device(module, cfg):
    """Masks of the stream and of weights are functions of the row and of global positions."""
    options = {"t": 22, "logits": "logits" if module is bert else "apply"}
    want, key = losses(module, cfg, {"data": 1}, **options, key=fs.key(7)), fs.key(7)
    assert abs(want[0][0] - losses(module, cfg, {"data": 1}, **options)[0][0]) > 1e-4
    for mesh in (({"seq": 3},), MESHES["everything"]):
        assert_same(losses(module, cfg, *mesh, **options, key=key), want, str(mesh), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kind", "meshes"), [
    ("t5", [({"seq": 3},)]),
    pytest.param("umt5", [({"seq": 1},), ({"seq": 2},), MESHES["everything"]], marks=pytest.mark.slow),
])  # fmt: skip
def test_encoder_decoder_with_a_split_source_equals_one_device(kind, meshes):
    """Relative positions, dropout and padding are by global positions; the decoder's ranks have all of the source."""
    cfg, s = t5.Config(kind, 61, 24, 5, 34, 1, 1, 3, 8, 6, 0.2, tie_word_embeddings=kind == "t5"), 11
    ids, mask, targets = ints(61, 4, s), torch.arange(s) < s - torch.arange(4)[:, None], ints(61, 4, 7, seed=1)

    def run(axes, key, fully_sharded=False, sequence=False):
        params, specs, layout, spec = placed(t5, cfg, axes, fully_sharded, sequence=sequence)

        def step(params, ids, mask, targets):
            options = {"layout": layout, "specs": specs, "key": key, "mask": mask}
            loss = fs.value_and_grad(lambda p: t5.loss(cfg, p, ids, targets, **options))(params)
            return loss, t5.encode(cfg, params, ids, **options)

        mapped = fs.shard_map(step, mesh=fs.make_mesh(**axes), in_specs=(specs, spec, spec, P(layout.data)),
                              out_specs=((P(), specs), spec))  # fmt: skip
        return fs.device_get(mapped(params, ids, mask, targets))

    want = run({"data": 1}, fs.key(7))
    assert abs(want[0][0] - run({"data": 1}, None)[0][0]) > 1e-4
    for axes, *options in meshes:
        assert_same(run(axes, fs.key(7), *options), want, str(axes), rtol=1e-12, atol=1e-12)


def test_steps_with_dropout_and_microbatches_of_split_positions_verify():
    cfg = gpt2.Config(37, 16, 8, 1, 2, embd_pdrop=0.1, attn_pdrop=0.2, resid_pdrop=0.3)
    params, specs, layout, spec = placed(gpt2, cfg, {"data": 2, "seq": 2}, False)

    @fs.shard_map(mesh=fs.make_mesh(data=2, seq=2), in_specs=(specs, spec), out_specs=(P(), specs))
    def step(params, ids):
        def loss(params, ids):
            return gpt2.loss(cfg, params, ids, ids, layout=layout, specs=specs, key=fs.key(3))

        return fs.accumulate(loss, 2)(params, ids)

    fs.verify(step, params, ints(37, 8, 12))


def test_packed_documents_have_the_logits_of_each_document():
    """Also on one device: each document by itself, with positions from 0."""
    cfg, documents = llama.Config(**LLAMA_SIZES), packed(T, 3)[:1]
    params = fs.device_get(placed(llama, cfg, {"data": 1}, False)[0])
    ids = ints(31, 1, T)
    got = llama.apply(cfg, params, ids, documents=documents)
    apart = [llama.apply(cfg, params, ids[documents == i][None]) for i in range(3)]
    assert_same(got, torch.cat(apart, 1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("module", "cfg"),
    [(llama, CASES[-1][1]), *(pytest.param(*CASES[i], marks=pytest.mark.slow) for i in (0, 5, 6))],
    ids=["llama, dynamic", "gpt2", "mistral", "mixtral"],
)
def test_decoder_with_split_positions_and_padding_equals_one_device(module, cfg):
    """Positions do not count padding, on either side, and the router's losses leave it out."""
    t = min(14, getattr(cfg, "n_positions", 14))
    mask = left_padding(5, t)[1:]
    mask[1] = mask[1].flip(0)
    cfg = replace(cfg, max_position_embeddings=6) if cfg == CASES[-1][1] else cfg  # the longest on all ranks counts
    want = losses(module, cfg, {"data": 1}, t=t, mask=mask)
    mesh = MESHES["everything"] if module is mixtral else ({"seq": 3},)
    assert_same(losses(module, cfg, *mesh, t=t, mask=mask), want, str(mesh), rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_bert_with_split_positions_and_padding_equals_one_device():
    cfg = bert.Config(61, 24, 2, 3, 34, mlm=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    mask = torch.ones(4, T, dtype=torch.int64)
    mask[:, 13:] = 0
    want = losses(bert, cfg, {"data": 1}, logits="logits", mask=mask)
    got = losses(bert, cfg, *MESHES["everything"], logits="logits", mask=mask)
    assert_same(got, want, rtol=1e-12, atol=1e-12)


def test_a_rank_of_four_holds_a_quarter_of_the_activations_of_a_long_sequence():
    cfg = llama.Config(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                       num_attention_heads=4, max_position_embeddings=1 << 14)  # fmt: skip

    def peak(n):
        specs, described, layout = llama.specs(cfg), llama.init(cfg), llama.Layout(context="seq")

        def step(params, ids):
            return fs.value_and_grad(lambda p: llama.loss(cfg, p, ids, ids, layout=layout, specs=specs))(params)

        mesh = fs.make_mesh(kind="abstract", seq=n)
        run = fs.shard_map(step, mesh=mesh, in_specs=(specs, P(None, "seq")), out_specs=(P(), specs), check="never")
        memory = fs.plan(run, described, fs.init.zeros((1, 1 << 14), dtype=torch.int64)).memory
        return memory.peak - memory.parts.get("parameters", 0) - memory.parts.get("gradients", 0)

    assert peak(4) <= 0.27 * peak(1)


def test_parts_of_models_without_a_form_for_split_positions_refuse_them():
    cfg = gpt2.Config(37, 16, 8, 1, 2, embd_pdrop=0.1)
    params = fs.device_get(placed(gpt2, cfg, {"data": 1}, False)[0])
    layout, ids = gpt2.Layout(context="seq"), ints(31, 2, 8)

    def text(f):
        return error_text(fs.shard_map(f, mesh=fs.make_mesh(seq=2), in_specs=P(), out_specs=P()), params)

    for what, f in {
        "generate": lambda p: gpt2.generate(cfg, p, ids, new=1, layout=layout),
        "heads": lambda p: heads.apply(heads.Config(cfg, "tokens"), p, ids, layout=layout),
        "bert.embed": lambda p: bert.embed(bert.Config(), p, ids, layout=layout),
        "t5.decode": lambda p: t5.decode(t5.Config(), p, ids, ids, layout=layout),
    }.items():
        assert f"{what}: has no form for positions that an axis splits" in text(f), what
    encoder = bert.Config(61, 24, 2, 3, 34)
    weights = fs.device_get(placed(bert, encoder, {"data": 1}, False)[0])
    assert "bert: its tokens have no zigzag order" in text(
        lambda p: bert.apply(encoder, weights, ids, layout=bert.Layout(context="seq", zigzag=True))
    )
    cache = gpt2.Cache(8)
    assert "Layout(context=) takes no cache" in text(lambda p: gpt2.apply(cfg, p, ids, layout=layout, cache=cache)[0])
    assert "one entry for each token" in text(lambda p: gpt2.apply(cfg, p, ids, documents=ids[:, :3]))
