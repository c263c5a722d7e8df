"""The files of examples/, loaded as `python examples/NAME.py` does, which finds their shared mlp.py beside them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

FOLDER = Path(__file__).parents[2] / "examples"


def example(name: str) -> dict[str, Any]:
    """Return the names that a file defines, without training."""
    with mock.patch.object(sys, "path", [str(FOLDER), *sys.path]):
        return runpy.run_path(str(FOLDER / f"{name}.py"))
