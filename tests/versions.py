"""Run the whole suite on versions of torch and Python: `python -m tests.versions 2.13.0 2.15.0 --python python3.13`.

For each pair: a virtual environment with fshard and its test extras, both tiers of the tests, and a row of the table in
docs/torch-versions.md. Failed tests are named below the row, and then the status is 1. An environment takes up to 7 GB.
It is deleted after its tests, unless `--keep FOLDER` names a place for it; one that is there already is used again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
TIERS = {"fast": "not slow", "slow": "slow"}
_NAME = "import sys; print('py%d.%d' % sys.version_info[:2])"
_VERSIONS = "import sys, torch; print('%d.%d.%d |' % sys.version_info[:3], torch.__version__)"


def environment(python: str, torch: str, folder: Path) -> Path:
    """Return the folder of a virtual environment with fshard and one torch, made if it is not there."""
    place = folder / f"{_output(python, '-c', _NAME)}-torch{torch}"
    if not place.exists():
        subprocess.run([python, "-m", "venv", place], check=True)
    pip = [place / "bin" / "python", "-m", "pip", "install", "-q"]
    subprocess.run([*pip, f"torch=={torch}", "-e", f"{ROOT}[test]"], check=True)
    return place


def run_tier(place: Path, tier: str, more: Sequence[str]) -> tuple[str, list[str]]:
    """Run a tier of the tests in an environment; return its counts in words, and the names of the tests that failed."""
    report, log = place / f"{tier}.xml", place / f"{tier}.log"
    path = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
    command = [place / "bin" / "python", "-m", "pytest", "-q", "-m", TIERS[tier], f"--junitxml={report}", *more]
    env = os.environ | {"PYTHONPATH": str(ROOT), "PATH": path}
    with log.open("w") as out:
        run = subprocess.run(command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, check=False)
    if run.returncode not in (0, 1):  # an error of usage, or a crash: the report is not one of all tests
        raise SystemExit(f"{tier} tests: pytest ended with status {run.returncode}\n{log.read_text()[-4000:]}")
    return counts(report)


def counts(report: Path) -> tuple[str, list[str]]:
    """Return the counts of a JUnit report in words, and the names of the tests that failed."""
    outcomes: dict[str, list[str]] = {"failure": [], "error": [], "skipped": [], "passed": []}
    for case in ET.parse(report).getroot().iter("testcase"):
        outcome = next((kind for kind in outcomes if case.find(kind) is not None), "passed")
        outcomes[outcome].append(f"{case.get('classname')}::{case.get('name')}")
    failed = outcomes["failure"] + outcomes["error"]
    return f"{len(outcomes['passed']):,} passed, {len(failed)} failed, {len(outcomes['skipped'])} skipped", failed


def _output(*command: object) -> str:
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("torch", nargs="+", help="versions of torch, as 2.13.0")
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="programs, as python3.13")
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS))
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where environments, with logs, are kept")
    parser.add_argument("--pytest", default="", metavar="OPTIONS", help="more options of pytest, as --pytest='-n 2'")
    options = parser.parse_args()
    status = 0
    columns = ["Python", "torch", "; ".join(f"{tier} tests" for tier in options.tiers)]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for python in options.python:
        for torch in options.torch:
            with tempfile.TemporaryDirectory() as temporary:
                place = environment(python, torch, options.keep or Path(temporary))
                results = [run_tier(place, tier, options.pytest.split()) for tier in options.tiers]
                versions = _output(place / "bin" / "python", "-c", _VERSIONS)
            print(f"| {versions} |", "; ".join(text for text, _ in results), "|", flush=True)
            for name in [name for _, failed in results for name in failed]:
                print(f"  failed: {name}", flush=True)
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
