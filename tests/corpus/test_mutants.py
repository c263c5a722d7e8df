"""Every deleted or doubled collective of a correct program is caught, unless it changes nothing."""

from __future__ import annotations

import pytest

import fshard as fs
from tests.corpus.mutants import PROGRAMS, Subject, changed
from tests.lib.tiers import slow_unless

# The changes tested here; `python -m tests.corpus.mutants` makes all changes in all programs, which takes minutes.
TESTED = {name: ("delete", "double") for name in PROGRAMS if not name.startswith("gpt2")} | {
    **dict.fromkeys(("clip and AdamW", "split vocabulary", "ring attention", "gradients per example"), ("delete",)),
    "gpt2": ("delete",),
    "gpt2, dropout": ("draw",),
}

GPT2_ALL = "gpt2, all of these"

INTEGERS = "integers have no gradient"
UNDIFFERENTIATED = "nothing is differentiated here, so no gradient misses its sum"
UNUSED = "the last iteration of the loop sends a value that is not used"
BOTH = ("delete", "double")
EQUAL = {
    "accumulation": {"double, pvary 1 of step in mutants": UNDIFFERENTIATED},
    "split vocabulary": {
        "delete, pvary 2 of loss in mutants": INTEGERS,
        "delete, pvary 1 of cross_entropy in loss": UNDIFFERENTIATED,
    },
    "clip and AdamW": {
        "delete, pvary 2 of loss in mutants": UNDIFFERENTIATED,
        **{f"delete, pvary {i} of norm_of in norm": UNDIFFERENTIATED for i in (1, 2, 3, 4)},
        **{f"delete, pvary {i} of factors in chain": UNDIFFERENTIATED for i in (1, 2)},
    },
    "pipeline": {
        **{f"{change}, ppermute 4 of loss in mutants": UNUSED for change in BOTH},
        **{f"{change}, pvary {i} of loss in mutants": UNDIFFERENTIATED for change in BOTH for i in (2, 3, 4)},
    },
    "ring attention": {"delete, ppermute 3 of loss in mutants": UNUSED},
    "softmax over a split dim": {f"{change}, pvary 2 of loss in mutants": UNDIFFERENTIATED for change in BOTH},
    "gradients per example": {"delete, pvary 1 of clipped in mutants": UNDIFFERENTIATED},
    "gpt2": {"delete, pvary 1 of cross_entropy in loss": UNDIFFERENTIATED},
}


# The others are made of parts that these have.
PARTS = [
    name
    for name in TESTED
    if name not in ("clip and AdamW", "gpt2", "gpt2, dropout", "pipeline", "split vocabulary", "ring attention")
]


@pytest.fixture(scope="module")
def subjects():
    made: dict[str, Subject] = {}

    def get(name):
        if name not in made:
            made[name] = Subject(PROGRAMS[name])
        return made[name]

    return get


@pytest.mark.parametrize("name", slow_unless(PARTS, TESTED))
def test_neither_check_refuses_the_correct_program(name, subjects):
    assert subjects(name).alarms == {"types": "", "verify": ""}


@pytest.mark.parametrize("name", slow_unless(PARTS, TESTED))
def test_no_mutant_is_missed(name, subjects):
    subject = subjects(name)
    outcomes = [subject.first_outcome(m) for m in subject.mutants if m.group in TESTED[name]]
    assert outcomes
    assert [o.mutant.name for o in outcomes if o.kind == "missed"] == []
    assert sorted(o.mutant.name for o in outcomes if o.kind == "equal") == sorted(EQUAL.get(name, {}))


def test_without_checks_a_mutant_is_missed_or_equal(subjects, monkeypatch):
    monkeypatch.setattr(Subject, "_checks", lambda self: {})
    subject = subjects("accumulation")
    kinds = {
        m.name: (subject.outcome(m).kind, subject.first_outcome(m).kind) for m in subject.mutants if "pmean" in m.name
    }
    assert kinds["delete, pmean 1 of step in mutants"] == ("missed", "missed")
    assert kinds["double, pmean 1 of step in mutants"] == ("equal", "equal")


@pytest.mark.parametrize(
    ("program", "name", "times"),
    [
        (GPT2_ALL, "delete, psum_scatter 1 of leave in transformer", 4),  # once on each of 4 ranks
        (GPT2_ALL, "delete, psum_scatter 2 of leave in transformer", 8),  # in a block: runs again
        # After the last transfer of a block, which is not recomputed: once.
        (GPT2_ALL, "draw: rank in the key, bernoulli 4 of dropout in layers", 4),
    ],
)
def test_change_is_made_on_every_rank_and_in_every_run_of_remat(program, name, times, subjects):
    subject = subjects(program)
    (mutant,) = (m for m in subject.mutants if m.name == name)
    with changed(mutant) as count:
        subject.results()
    assert count == [times]


@pytest.mark.parametrize("name", ["pipeline", GPT2_ALL])
def test_calls_are_the_same_on_smaller_meshes(name, subjects):
    subject = subjects(name)

    def calls(sizes):
        log = {}
        with changed(None, log):
            mesh = fs.make_mesh(kind="simulated", **sizes)
            f = subject.f.on(mesh)
            f(*fs.tree.map(lambda x: fs.reshard(x, x.spec, mesh) if isinstance(x, fs.Sharded) else x, subject.args))
        return {call for call, logged in log.items() if logged.maps or logged.spec is not None}

    sizes = subject.f.mesh.axes
    all_calls = calls(sizes)
    for axis in sizes:
        fewer = calls({**sizes, axis: 1})
        assert fewer < all_calls
        assert fewer or len(sizes) == 1
