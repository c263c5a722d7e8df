"""Every deleted or doubled collective of a right program is noticed, unless it changes nothing at all."""

from __future__ import annotations

import pytest

import fshard as fs
from tests.corpus.mutants import PROGRAMS, Subject, changed

# What is changed here; `python tests/mutants.py` changes everything in every program, which takes minutes.
TESTED = {name: ("delete", "double") for name in PROGRAMS if not name.startswith("gpt2")} | {
    "clip and AdamW": ("delete",),
    "gpt2": ("delete",),
    "gpt2, dropout": ("draw",),
}

INTEGERS = "integers have no gradient"
UNDIFFERENTIATED = "nothing here is differentiated, so no gradient misses its sum"
UNUSED = "what the last turn of the loop sends is not used"
EQUAL = {
    "split vocabulary": {"delete, pvary 2 of loss in mutants": INTEGERS},
    "clip and AdamW": {f"delete, pvary {i} of norm_of in norm": UNDIFFERENTIATED for i in (1, 2, 3, 4)},
    "pipeline": {f"{change}, ppermute 4 of loss in mutants": UNUSED for change in ("delete", "double")},
    "ring attention": {f"{change}, ppermute 3 of loss in mutants": UNUSED for change in ("delete", "double")},
}


@pytest.fixture(scope="module")
def subjects():
    made: dict[str, Subject] = {}

    def get(name):
        if name not in made:
            made[name] = Subject(PROGRAMS[name])
        return made[name]

    return get


@pytest.mark.parametrize("name", TESTED)
def test_neither_net_says_anything_of_a_right_program(name, subjects):
    assert subjects(name).alarms == {"static": "", "verify": ""}


@pytest.mark.parametrize("name", TESTED)
def test_no_mutant_is_missed(name, subjects):
    subject = subjects(name)
    fates = [subject.first_fate(m) for m in subject.mutants if m.group in TESTED[name]]
    assert fates
    assert [f.mutant.name for f in fates if f.kind == "missed"] == []
    assert sorted(f.mutant.name for f in fates if f.kind == "equal") == sorted(EQUAL.get(name, {}))


def test_without_nets_a_mutant_is_missed_or_changes_nothing(subjects, monkeypatch):
    monkeypatch.setattr(Subject, "_nets", lambda self: {})
    subject = subjects("accumulation")
    fates = {m.name: (subject.fate(m).kind, subject.first_fate(m).kind) for m in subject.mutants if "pmean" in m.name}
    assert fates["delete, pmean 1 of step in mutants"] == ("missed", "missed")
    assert fates["double, pmean 1 of step in mutants"] == ("equal", "equal")


@pytest.mark.parametrize(
    ("name", "times"),
    [
        ("delete, psum_scatter 1 of leave in transformer", 4),  # once on each of 4 ranks: the embedding
        ("delete, psum_scatter 2 of leave in transformer", 8),  # in a block, which runs again
        ("draw: rank in the key, bernoulli 4 of dropout in layers", 8),
        ("delete, all_gather 2 of column_linear in transformer", 8),
        ("delete, all_gather 3 of column_linear in transformer", 4),  # after the blocks
    ],
)
def test_a_change_is_made_on_every_rank_and_wherever_remat_runs_again(name, times, subjects):
    subject = subjects("gpt2, all of these")
    (mutant,) = (m for m in subject.mutants if m.name == name)
    with changed(mutant) as struck:
        subject.results()
    assert struck == [times]


@pytest.mark.parametrize("name", ["pipeline", "ring attention", "gpt2, all of these", "clip and AdamW"])
def test_a_call_is_the_same_on_every_mesh(name, subjects):
    subject = subjects(name)

    def calls(sizes):
        log = {}
        with changed(None, log):
            mesh = fs.make_mesh(kind="simulated", **sizes)
            f = subject.f.on(mesh)
            f(*fs.tree.map(lambda x: fs.reshard(x, x.spec, mesh) if isinstance(x, fs.Sharded) else x, subject.args))
        return {call for call, seen in log.items() if seen.maps or seen.spec is not None}

    sizes = subject.f.mesh.axes
    every = calls(sizes)
    for axis in sizes:
        fewer = calls({**sizes, axis: 1})
        assert fewer < every
        assert fewer or len(sizes) == 1
