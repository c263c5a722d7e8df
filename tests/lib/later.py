"""Modules that are imported when a test first uses them: each worker collects all files, and one runs their tests."""

from __future__ import annotations

from typing import Any

import pytest


class Later:
    """`peft = Later("peft")`: reading a name of it imports the module, or skips the test where there is none."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked by pytest of all that a file has
            raise AttributeError(name)
        return getattr(pytest.importorskip(self._module), name)
