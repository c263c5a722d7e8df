"""The notebooks run from top to bottom, with the outputs that are in the files, which name no machine.

`python tests/e2e/test_notebooks.py [FILE ...]` runs them, or some, and writes their outputs into the files.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode, v4
from traitlets import default

import fshard as fs

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
MLP = next(path for path in NOTEBOOKS if "mlp" in path.name)
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},  # and no version: the kernel's would change with the machine
}
# The numbers that depend on the CPU: rounding of about 1e-16, by the order of its sums, and the length of a manifest,
# which has checksums of the weights in decimals. The others are float64 or whole numbers, printed with fewer digits
# than the order of a sum could change.
ROUNDING = re.compile(r"(largest relative error(?: |</td><td[^>]*>))\d+(?:\.\d+)?(?:e-\d+)?|(manifest.json )\d+")
FROM_THE_ERROR = "  # from the error"
# A path from the root, a home or a drive, or the file of a kernel's cell; but not a slash after a word (and/or, 1/n)
# or in a closing tag.
PATH = re.compile(r"(?<![\w./<:)\]])/[A-Za-z_.][\w.-]*|~/|\b[A-Za-z]:\\|ipykernel_\d")


# --- execution ----------------------------------------------------------------------------------------------


class ThisPython(AsyncKernelManager):
    """The kernel of the running interpreter, whichever kernels are installed."""

    @default("kernel_spec_manager")
    def _none_installed(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])  # python3 is then ipykernel's own, run by sys.executable


def execute(notebook: NotebookNode) -> NotebookNode:
    """The notebook with fresh outputs. Raises CellExecutionError where a cell does."""
    fresh = nbformat.from_dict(notebook)
    for cell in fresh.cells:  # without an editor's notes, and tags that let a cell fail
        cell.metadata = NotebookNode()
    with tempfile.TemporaryDirectory() as place:
        path = [str(Path(fs.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"IPYTHONDIR": place, "PYTHONPATH": os.pathsep.join(path)}  # no user's profile, and this fshard
        client = NotebookClient(
            fresh, timeout=900, startup_timeout=600, kernel_name="python3", kernel_manager_class=ThisPython,
            record_timing=False, coalesce_streams=True, resources={"metadata": {"path": place}},
            extra_arguments=["--log-level=ERROR"],  # it warns that it listens on this machine's own TCP ports
        )  # fmt: skip
        client.execute(env=os.environ | own)
    fresh.metadata = nbformat.from_dict(METADATA)  # the kernel adds its version
    return fresh


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


@functools.cache  # a kernel takes seconds to start
def executed(path: Path) -> NotebookNode:
    return execute(read(path))


def regenerate(paths: Sequence[Path]) -> None:
    for path in paths:
        start = time.perf_counter()
        nbformat.write(executed(path), path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s")


# --- outputs ------------------------------------------------------------------------------------------------


def code(notebook: NotebookNode) -> dict[str, NotebookNode]:
    return {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}


def shown(cell: NotebookNode) -> list[Any]:
    """The outputs of a cell, without the numbers that depend on the CPU, and without the bytes of plots.

    Another version of matplotlib, of a font or of zlib draws or packs the same plot otherwise.
    """
    return [_without_rounding(output) for output in cell.outputs]


def _without_rounding(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: "(plot)" if name == "image/png" else _without_rounding(value) for name, value in x.items()}
    return ROUNDING.sub(r"\1\2(rounding)", x) if isinstance(x, str) else x


def stale(kept: NotebookNode, fresh: NotebookNode) -> list[str]:
    """The code cells with other outputs or another number than in the file."""
    old, new = code(kept), code(fresh)
    assert list(old) == list(new)
    return [
        name
        for name in old
        if shown(old[name]) != shown(new[name]) or old[name].execution_count != new[name].execution_count
    ]


def compare(file: str, kept: NotebookNode, fresh: NotebookNode) -> None:
    for name in stale(kept, fresh):
        old, new = text(code(kept)[name]), text(code(fresh)[name])
        raise AssertionError(f"{file}, cell {name!r} shows\n{new}\nand the file has\n{old or 'nothing'}\n"
                             f"{'(its HTML or its number differs)' * (old == new)}\n"
                             "fix: if that is right, python tests/e2e/test_notebooks.py")  # fmt: skip


def text(cell: NotebookNode) -> str:
    """The printed output of a cell, or its value as text."""
    parts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "".join(parts).rstrip("\n")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_the_outputs_in_its_file(path: Path) -> None:
    compare(path.name, read(path), executed(path))


@pytest.mark.parametrize(
    ("kept", "fresh", "is_stale"),
    [
        ("loss 2.79", "loss 2.79", False),
        ("loss 2.79", "loss 2.80", True),
        ("loss 2.79", "", True),
        ("", "loss 2.79", True),
        ("verified (largest relative error 3e-16)", "verified (largest relative error 1.2e-15)", False),
        ("verified (largest relative error 3e-16)", "verified (largest relative error 0)", False),
        ("verified (largest relative error 3e-16)", "2 leaves verified (largest relative error 3e-16)", True),
        ("<td>largest relative error</td><td class>3e-16", "<td>largest relative error</td><td class>4e-16", False),
        ("<td>leaves</td><td>3e-16</td>", "<td>leaves</td><td>4e-16</td>", True),
        ("manifest.json 2190 bytes", "manifest.json 2187 bytes", False),
        ("largest error 3e-16", "largest error 2e-16", True),
    ],
)
def test_a_stale_output_is_detected(kept: str, fresh: str, is_stale: bool) -> None:
    for of in (printed, displayed):
        assert stale(notebook(of("a"), of(kept)), notebook(of("a"), of(fresh))) == (["cell-2"] if is_stale else [])


def test_a_cell_run_out_of_order_is_detected() -> None:
    kept = notebook(printed("a"), printed("a"))
    code(kept)["cell-2"].execution_count = 7
    assert stale(kept, notebook(printed("a"), printed("a"))) == ["cell-2"]


def test_a_stale_notebook_fails_with_the_command_that_updates_it() -> None:
    with pytest.raises(AssertionError, match=r"fix: .*python tests/e2e/test_notebooks\.py"):
        compare("n.ipynb", notebook(printed("a")), notebook(printed("b")))


def printed(output: str) -> list[NotebookNode]:
    return [v4.new_output("stream", text=output)] if output else []


def displayed(output: str) -> list[NotebookNode]:
    data = {"text/plain": "a view", "text/html": f"<div>{output}</div>"}
    return [v4.new_output("execute_result", data, execution_count=1)]


def notebook(*outputs: list[NotebookNode]) -> NotebookNode:
    cells = enumerate(outputs, 1)
    return v4.new_notebook(cells=[v4.new_code_cell(id=f"cell-{i}", outputs=o, execution_count=i) for i, o in cells])


# --- style --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_no_machine(path: Path) -> None:
    paths = [f"{cell.id}: {PATH.search(text)[0]}" for cell in read(path).cells for text in strings(cell)
             if PATH.search(text)]  # fmt: skip
    assert not paths
    assert read(path).metadata == METADATA
    assert not [cell.id for cell in read(path).cells if cell.metadata]


def strings(x: Any) -> list[str]:
    if isinstance(x, dict):
        return [s for name, value in x.items() if name != "image/png" for s in strings(value)]
    if isinstance(x, (list, tuple)):
        return [s for value in x for s in strings(value)]
    return [x] if isinstance(x, str) else []


@pytest.mark.parametrize(
    ("text", "is_path"),
    [
        ("/tmp/ipykernel_12/34.py:3 in f", True),
        ("at /home/me", True),
        ("open('/etc/hosts')", True),
        ("x\n/root/x.py", True),
        ("~/models", True),
        (r"C:\Users", True),
        ("ipykernel_123", True),
        ("In[14]:3 in f", False),
        ("<div>a</div>", False),
        ("and/or 1/n, 13 / 4", False),
        ("https://pytorch.org/docs", False),
        ("[2](2-mlp-four-ways.ipynb)", False),
        ("a // b", False),
    ],
)
def test_paths_are_detected(text: str, is_path: bool) -> None:
    assert bool(PATH.search(text)) is is_path


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_prediction_is_directly_before_the_cell_that_reveals_it(path: Path) -> None:
    cells = read(path).cells
    asking = [i for i, cell in enumerate(cells) if "**Predict:**" in cell.source]
    assert len(asking) >= 6
    for i in asking:
        assert cells[i].cell_type == "markdown"
        assert cells[i + 1].cell_type == "code", cells[i].id
        if not cells[i + 1].id.endswith("-code"):  # a program that a later cell runs
            assert cells[i + 1].outputs, cells[i + 1].id
    assert path.name.startswith(f"{NOTEBOOKS.index(path) + 1}-")


def test_the_fixed_line_is_the_one_the_error_prints() -> None:
    cells = code(read(MLP))
    message = text(cells["mistake-reveal"]).splitlines()
    quoted = message[1].strip()
    fix = message[-1].strip().removeprefix("fix: ")
    assert message[-1].startswith("  fix: ")
    mistaken, fixed = (cells[name].source.split("\n\n\n")[0] for name in ("mistake-reveal", "fix-reveal"))
    assert mistaken.count(quoted) == 1
    assert fixed.count(fix) == 1
    repaired = mistaken.replace(quoted, fix).replace("mistaken_loss", "fixed_loss")
    assert fixed.replace(FROM_THE_ERROR, "") == repaired


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_lines_from_an_error_are_in_the_fix_of_the_error_before(path: Path) -> None:
    message = ""
    for cell in code(read(path)).values():
        for line in cell.source.splitlines():
            if line.endswith(FROM_THE_ERROR):
                assert line.removesuffix(FROM_THE_ERROR).strip() in message.partition("fix: ")[2], cell.id
        message = text(cell) if "fix: " in text(cell) else message


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_small_and_a_cell_that_reveals_raises_no_error(path: Path) -> None:
    for cell in code(read(path)).values():
        for output in cell.outputs:
            assert output.output_type in ("stream", "execute_result", "display_data"), cell.id
            assert output.get("name") != "stderr", cell.id
            plot = output.get("data", {}).get("image/png", "")
            assert len(plot) * 3 // 4 <= 60_000, cell.id
            assert len(text(cell).splitlines()) <= 60, cell.id


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="run notebooks and write their outputs into the files")
    parser.add_argument("files", nargs="*", type=Path, default=NOTEBOOKS, help="(default: all)")
    regenerate(parser.parse_args().files)
