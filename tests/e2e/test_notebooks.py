"""The notebooks run from top to bottom, and show what they keep; nothing in them is of one machine.

`python tests/e2e/test_notebooks.py` runs them and writes what they show now into the files.
"""

from __future__ import annotations

import functools
import os
import re
import tempfile
import time
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
# The one number here that depends on the CPU: it is all rounding, some 1e-16, of sums in the order of that CPU. The
# others are of float64 or of whole numbers, and are printed to fewer digits than any order of a sum could change.
ROUNDING = re.compile(r"(?<=largest relative error )\d+(\.\d+)?(e-\d+)?")
# A path from the root, a home, a drive, or the file in which a kernel keeps a cell. A slash after a word is none
# (and/or, 1/n), nor one that closes a tag.
PATH = re.compile(r"(?<![\w./<:)\]])/[A-Za-z_.][\w.-]*|~/|\b[A-Za-z]:\\|ipykernel_\d")


# --- running them -------------------------------------------------------------------------------------------


class ThisPython(AsyncKernelManager):
    """The kernel of the running interpreter, whatever kernels are installed on the machine or not."""

    @default("kernel_spec_manager")
    def _none_installed(self) -> KernelSpecManager:
        return KernelSpecManager(kernel_dirs=[])  # then python3 is ipykernel's own, started by sys.executable


def execute(notebook: NotebookNode) -> NotebookNode:
    """The notebook with fresh outputs. Raises CellExecutionError where a cell does."""
    made = nbformat.from_dict(notebook)
    for cell in made.cells:  # an editor's notes; and a tag may let a cell fail
        cell.metadata = NotebookNode()
    with tempfile.TemporaryDirectory() as place:
        path = [str(Path(fs.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"IPYTHONDIR": place, "PYTHONPATH": os.pathsep.join(path)}  # no one's profile; this fshard
        client = NotebookClient(
            made, timeout=120, startup_timeout=120, kernel_name="python3", kernel_manager_class=ThisPython,
            record_timing=False, coalesce_streams=True, resources={"metadata": {"path": place}},
            extra_arguments=["--log-level=ERROR"],  # it warns that it listens on this machine's own TCP ports
        )  # fmt: skip
        client.execute(env=os.environ | own)
    made.metadata = nbformat.from_dict(METADATA)  # for the kernel adds its version
    return made


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


@functools.cache  # a kernel takes seconds to start
def executed(path: Path) -> NotebookNode:
    return execute(read(path))


def regenerate() -> None:
    for path in NOTEBOOKS:
        start = time.perf_counter()
        nbformat.write(executed(path), path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s")


# --- what they show -----------------------------------------------------------------------------------------


def code(notebook: NotebookNode) -> dict[str, NotebookNode]:
    return {cell.id: cell for cell in notebook.cells if cell.cell_type == "code"}


def shown(cell: NotebookNode) -> list[Any]:
    """All that a cell's outputs say, with what rounding alone decides left out."""
    return [_plain(output) for output in cell.outputs]


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {name: _plain(value) for name, value in x.items()}
    return ROUNDING.sub("(rounding)", x) if isinstance(x, str) else x


def stale(kept: NotebookNode, fresh: NotebookNode) -> list[str]:
    """The code cells that show something else than the file says, or have another number."""
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
    """What a cell printed, or its value as text."""
    said = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.outputs]
    return "".join(said).rstrip("\n")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_it_keeps(path: Path) -> None:
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
        ("largest error 3e-16", "largest error 2e-16", True),
    ],
)
def test_a_stale_output_is_found(kept: str, fresh: str, is_stale: bool) -> None:
    for of in (printed, displayed):
        assert stale(notebook(of("a"), of(kept)), notebook(of("a"), of(fresh))) == (["cell-2"] if is_stale else [])


def test_a_cell_that_was_run_out_of_order_is_found() -> None:
    kept = notebook(printed("a"), printed("a"))
    code(kept)["cell-2"].execution_count = 7
    assert stale(kept, notebook(printed("a"), printed("a"))) == ["cell-2"]


def test_a_stale_notebook_fails_and_is_told_what_to_do() -> None:
    with pytest.raises(AssertionError, match=r"fix: .*python tests/e2e/test_notebooks\.py"):
        compare("n.ipynb", notebook(printed("a")), notebook(printed("b")))


def printed(said: str) -> list[NotebookNode]:
    return [v4.new_output("stream", text=said)] if said else []


def displayed(said: str) -> list[NotebookNode]:
    data = {"text/plain": "a view", "text/html": f"<div>{said}</div>"}
    return [v4.new_output("execute_result", data, execution_count=1)]


def notebook(*outputs: list[NotebookNode]) -> NotebookNode:
    cells = enumerate(outputs, 1)
    return v4.new_notebook(cells=[v4.new_code_cell(id=f"cell-{i}", outputs=o, execution_count=i) for i, o in cells])


# --- how they are written -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_names_no_machine(path: Path) -> None:
    found = [f"{cell.id}: {PATH.search(said)[0]}" for cell in read(path).cells for said in strings(cell)
             if PATH.search(said)]  # fmt: skip
    assert not found
    assert read(path).metadata == METADATA
    assert not [cell.id for cell in read(path).cells if cell.metadata]


def strings(x: Any) -> list[str]:
    if isinstance(x, dict):
        return [s for value in x.values() for s in strings(value)]
    if isinstance(x, (list, tuple)):
        return [s for value in x for s in strings(value)]
    return [x] if isinstance(x, str) else []


@pytest.mark.parametrize(
    ("said", "is_one"),
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
def test_a_path_is_found(said: str, is_one: bool) -> None:
    assert bool(PATH.search(said)) is is_one


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_prediction_comes_right_before_its_reveal(path: Path) -> None:
    cells = read(path).cells
    asking = [i for i, cell in enumerate(cells) if "**Predict:**" in cell.source]
    assert len(asking) >= 6
    for i in asking:
        assert cells[i].cell_type == "markdown"
        assert cells[i + 1].cell_type == "code", cells[i].id
        if not cells[i + 1].id.endswith("-code"):  # a program that a later cell runs
            assert cells[i + 1].outputs, cells[i + 1].id
    assert path.name.startswith(f"{NOTEBOOKS.index(path) + 1}-")


def test_the_line_of_the_fix_is_the_one_that_the_error_prints() -> None:
    cells = code(read(MLP))
    message = text(cells["mistake-reveal"]).splitlines()
    quoted = message[1].strip()
    fix = message[-1].strip().removeprefix("fix: ")
    assert message[-1].startswith("  fix: ")
    mistaken, fixed = (cells[name].source.split("\n\n\n")[0] for name in ("mistake-reveal", "fix-reveal"))
    assert mistaken.count(quoted) == 1
    assert fixed.count(fix) == 1
    repaired = mistaken.replace(quoted, fix).replace("mistaken_loss", "fixed_loss")
    assert fixed.replace("  # from the error", "") == repaired


if __name__ == "__main__":
    regenerate()
