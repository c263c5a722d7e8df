"""The warning of a torch that fshard is not tested on. The range is that of pyproject.toml and of the table in docs."""

from __future__ import annotations

import re
import runpy
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch

from fshard._core import torch as compat
from fshard._core import torch_version
from fshard._core.torch_version import NEWEST, OLDEST, version_warning
from tests.versions import counts

ROOT = Path(__file__).parents[2]
TESTED = [
    "2.13.0", "2.13.0+cpu", "2.13.0a0+git0f1e2d3", "2.13.1rc2", "2.14", "2.14.1", "2.15.0+cu132",
    "2.15.0.dev20260922+cu132", "2.15.7.post1",
]  # fmt: skip
OLDER = ["2.12.1", "2.11.0+cu128", "2.9.1", "2.1.0", "1.13.1", "0.4.1", "2.12.0.dev20260401"]
NEWER = ["2.16.0", "2.16.0.dev20261122+cpu", "2.16.0a0+git0f1e2d3", "2.20.1", "2.130.0", "3.0.0", "10.2.13"]


def test_no_warning_of_a_tested_version():
    assert [v for v in TESTED if version_warning(v)] == []


@pytest.mark.parametrize("version", [*OLDER, *NEWER, "parrot", "", "v2.13.0"])
def test_warning_of_another_version_names_it_its_faults_and_the_fix(version):
    first, *rest = version_warning(version).splitlines()
    assert first == f"fshard is tested on torch 2.13 to 2.15, and this is torch {version}"
    assert ("known faults" in rest[0]) == (version in OLDER)
    assert ("not tested" in rest[0]) == (version not in OLDER)
    assert all(len(line) <= 120 for line in rest)
    assert "docs/torch-versions.md" in "".join(rest)
    assert "pip install 'torch>=2.13,<2.16'" in rest[-1]


def test_import_with_another_version_warns_once_unless_the_filter_of_the_fix_is_set(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    with pytest.warns(UserWarning, match=r"tested on torch .* this is torch 2\.16\.0") as caught:
        runpy.run_path(torch_version.__file__)
    assert len(caught) == 1
    silence = re.search(r"warnings\.filterwarnings\(.*?\)", str(caught[0].message))[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(silence)
        runpy.run_path(torch_version.__file__)


def test_the_warning_comes_before_the_error_about_a_missing_private_name(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.16.0")
    monkeypatch.delattr(torch._C._functorch, "get_unwrapped")
    monkeypatch.delitem(sys.modules, torch_version.__name__)
    with pytest.warns(UserWarning, match=r"this is torch 2\.16\.0"), pytest.raises(ImportError, match="get_unwrapped"):
        runpy.run_path(compat.__file__)


def test_the_range_is_that_of_the_package_and_its_ends_are_in_the_table():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch>={OLDEST[0]}.{OLDEST[1]}" in project["dependencies"]
    table = (ROOT / "docs" / "torch-versions.md").read_text()
    rows = re.findall(r"^\| (\d+\.\d+)\S* \| (\d+\.\d+)\S* \|(.*)\|$", table, flags=re.MULTILINE)
    assert f">={min((python for python, *_ in rows), key=_numbers)}" == project["requires-python"]
    releases = [_numbers(torch) for _, torch, _ in rows]
    assert (min(releases), max(releases)) == (OLDEST, NEWEST)
    assert all(result.count(" passed, 0 failed") == 2 for *_, result in rows)  # of both tiers


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_counts_of_a_report_and_the_names_of_failed_tests(tmp_path):
    report = tmp_path / "report.xml"
    cases = "".join(
        f'<testcase classname="tests.test_a" name="{name}">{outcome}</testcase>'
        for name, outcome in [("a", ""), ("b", "<skipped/>"), ("c[1]", "<failure>no</failure>"), ("d", "<error/>")]
    )
    report.write_text(f'<testsuites><testsuite tests="4">{cases}</testsuite></testsuites>')
    assert counts(report) == ("1 passed, 2 failed, 1 skipped", ["tests.test_a::c[1]", "tests.test_a::d"])
