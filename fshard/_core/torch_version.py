"""The versions of torch that fshard is tested on, and the one warning of another one, when fshard is imported.

`docs/torch-versions.md` has the results of the tests, and the faults known on other versions.
"""

from __future__ import annotations

import re
import warnings

import torch

OLDEST, NEWEST = (2, 13), (2, 15)  # all tests pass on both; OLDEST is the floor in pyproject.toml

_OLDER = (
    "known faults: torch.compile fails in optimizers; before 2.12, gradients under torch.inference_mode are zero,\n"
    "  and a rank without attention heads ends the process"
)
_NEWER = "not tested: private names of torch that fshard uses may have moved"


def version_warning(version: str) -> str:
    """Return the text of the warning of a version of torch, empty for a tested one.

    Patches, nightlies and local builds of a tested release count as that release.

    >>> version_warning("2.13.1a0+git1f2e3d")
    ''
    >>> print(version_warning("2.16.0.dev20261122+cu132"))
    fshard is tested on torch 2.13 to 2.15, and this is torch 2.16.0.dev20261122+cu132
      not tested: private names of torch that fshard uses may have moved (docs/torch-versions.md)
      fix: pip install 'torch>=2.13,<2.16', or warnings.filterwarnings("ignore", "fshard is tested") before the import
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    release = (int(found[1]), int(found[2])) if found else None
    if release is not None and OLDEST <= release <= NEWEST:
        return ""
    faults = _OLDER if release is not None and release < OLDEST else _NEWER
    (a, b), (c, d) = OLDEST, NEWEST
    return (
        f"fshard is tested on torch {a}.{b} to {c}.{d}, and this is torch {version}\n"
        f"  {faults} (docs/torch-versions.md)\n"
        f"  fix: pip install 'torch>={a}.{b},<{c}.{d + 1}', or "
        'warnings.filterwarnings("ignore", "fshard is tested") before the import'
    )


if text := version_warning(torch.__version__):
    warnings.warn(text, stacklevel=1)
