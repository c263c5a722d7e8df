"""Save and restore one folder from several programs at once, and count what each of them got.

    python -m tests.faults.two_writers --seconds 20

Two programs save state after state into one folder, and two restore it meanwhile. A save ends, or says by an error that
another program saves; a restore gives one state, old or new, in every value. Anything else is a problem.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fshard import ShardingError

from .kills import PROGRAMS, Program

NAMES = ("numbered steps, keep=2", "overwrite", "overwrite of one step", "Hugging Face folder", "file of torch")
OUTCOMES = ("saved", "another program saves", "read", "changed while it was read", "anything else")

# A step that `keep` has removed; and a folder for others, whose leaves are read later than its headers.
CHANGED = ("is not a checkpoint", "replaced or removed by another program", "has changed since its header was read",
           "o such file", "has neither")  # fmt: skip


def work(job: Callable[[int], str], seconds: float, results: multiprocessing.Queue[Counter[str]]) -> None:
    """Call `job(0)`, `job(1)`, ... for some seconds, and count what the calls return."""
    counts: Counter[str] = Counter()
    end, n = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        n += 1
        counts[job(n)] += 1
    results.put(counts)


def save(program: Program, folder: Path, n: int) -> str:
    try:
        program.save(folder, n, None)
    except ShardingError as e:
        is_refusal = any(text in str(e) for text in (": another program saves into ", f"step_{n:06d} exists"))
        return "another program saves" if is_refusal else f"save: {e}"
    except Exception as e:
        return f"save: {e!r}"
    return "saved"


def read(program: Program, folder: Path, n: int) -> str:
    try:
        program.read(folder)
    except ShardingError as e:
        is_clear = any(text in str(e) for text in CHANGED)
        return "changed while it was read" if is_clear else f"read: {e}"
    except Exception as e:
        return f"read: {e!r}"
    return "read"


def attack(name: str, seconds: float, folder: Path) -> Counter[str]:
    """Run two programs that save, and two that read; return what their calls returned."""
    program, fork = PROGRAMS[name], multiprocessing.get_context("fork")
    results: multiprocessing.Queue[Counter[str]] = fork.Queue()
    jobs = [lambda n: save(program, folder, n), lambda n: read(program, folder, n)]
    children = [fork.Process(target=work, args=(job, seconds, results)) for job in jobs for _ in range(2)]
    for child in children:
        child.start()
    total = sum((results.get(timeout=600) for _ in children), Counter())
    for child in children:
        child.join()
    left = [p.name for p in folder.rglob(".*")]
    total.update(f"left: {name}" for name in left)
    return total


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.faults.two_writers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=20, help="for each program")
    args = parser.parse_args(argv)
    print(f"| program | {' | '.join(OUTCOMES)} |\n|---|{'---|' * len(OUTCOMES)}")
    total: Counter[str] = Counter()
    for name in (*NAMES, "all"):
        with tempfile.TemporaryDirectory() as root:
            counts = total if name == "all" else attack(name, args.seconds, Path(root))
        problems = Counter({text: n for text, n in counts.items() if text not in OUTCOMES})
        row = [counts[text] for text in OUTCOMES[:-1]] + [problems.total()]
        print(f"| {name} | {' | '.join(map(str, row))} |", flush=True)
        total += counts
    print("\n".join(f"{n} x {text}" for text, n in problems.most_common(20)))
    return min(1, len(problems))


if __name__ == "__main__":
    sys.exit(main())
