"""Build the documentation: the guides, the notebooks, the examples, and an API reference made from the docstrings.

    pip install -e ".[docs]" && python -m docs.build [SITE]        # SITE: site/ by default; open site/index.html

Runs in the repository. Any warning ends it with status 1: a dead link or anchor, a page outside of the menu. Pages keep
their paths, so that the links of the repository work; a link to a folder or a Python file becomes a link to a page with
that code.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import fshard as fs
from fshard.errors import unquoted

ROOT = Path(__file__).parents[1]
PROJECT = ("CONTRIBUTING.md", "CHANGELOG.md", "tests/benchmarks/README.md")
LEGEND = """
Docstrings give the shapes on one rank. `[B, D]{V} -> [B, D]{I}     transpose: pvary     cost: 2(n-1)/n bytes` means:
B examples of D features, in a tensor that *varies* (V) over the axis or is *invariant* (I), the same on each of its
ranks. `[D, H@model]` has a dim split over the mesh axis `model`. The transpose is the backward pass. The cost is the
number of bytes that a rank sends, for an argument of `bytes` bytes on n ranks.
"""

CORE = "Specs, meshes, collectives, placed leaves, `shard_map`, gradients and trees."

STYLE = """
.md-grid { max-width: 78rem; } /* lines of 120 characters */
.md-typeset pre > code { font-size: 0.8em; white-space: pre-wrap; }
.md-typeset img[src*="pictures/"] { display: block; margin: 1em 0; }
/* Tables fit the page: names break where they must. Tables of notebooks have styles of their own. */
.md-typeset__scrollwrap { margin: 1em 0; }
.md-typeset__table { min-width: 100%; padding: 0; }
.md-typeset div[style] :is(.md-typeset__scrollwrap, .md-typeset__table) { min-width: 0; margin: 0; }
.md-typeset table:not([class], [style]) { display: table; }
.md-typeset table:not([class]) :is(th, td) { min-width: 0; padding: 0.6em 0.8em; }
.md-typeset :not(pre) > code { overflow-wrap: anywhere; }
.md-typeset td:first-child code { overflow-wrap: break-word; word-break: normal; }
.md-typeset .language-text .md-code__nav { display: none; } /* an output is not to be copied */
.md-typeset :not(.language-text) > pre > code { padding-right: 2.5em; } /* of the button that copies */
.md-typeset td:first-child code { white-space: nowrap; }
@media (max-width: 76rem) { .md-typeset td:first-child code { white-space: normal; } }
/* Columns of a notebook's table are as narrow as their longest word, if no row of it collapses. */
.md-typeset div[style*="min-width"]:not([style*="padding-left"]) { min-width: 0 !important; }
.md-typeset div[style*="min-width"]:not([style*="padding-left"]) table { table-layout: auto !important; }
.md-typeset div[style*="min-width"]:not([style*="padding-left"]) td[style*="width"] { width: auto !important; }
.md-typeset td:has(> div[style*="overflow: hidden"]) { min-width: 1em; } /* of a bar */
@media (min-width: 76rem) { .md-typeset td:has(> div[style*="overflow: hidden"]) { min-width: 6em; } }
@media (max-width: 45rem) {
  .md-typeset .language-text pre > code { font-size: 0.63em; }
  .md-typeset div[style*="overflow-x"] table { font-size: 9px !important; }
  .md-typeset div[style*="overflow-x"] > div[style*="padding-left"] { min-width: 0 !important; }
  .md-typeset div[style*="padding-left"] table { font-size: 7px !important; }
  .md-typeset__scrollwrap { margin: 1em -0.8rem; }
  .md-typeset table:not([class], [style]) { font-size: 0.55rem; }
  .md-typeset table:not([class], [style]) :is(th, td) { min-width: 4.6em; padding: 0.4em 0.25em; }
  .md-typeset table:not([class], [style]) :is(th, td) { overflow-wrap: anywhere; }
  .md-typeset table:not([class], [style]) :is(th, td):first-child { min-width: 8em; }
  .md-typeset table:not([class], [style], :has(th:nth-child(3))) :is(th, td):first-child { min-width: 12em; }
  .md-typeset table:has(th:nth-child(7)):not([class], [style]) { font-size: 0.5rem; }
  .md-typeset table:has(th:nth-child(7)):not([class], [style]) :is(th, td):not(:first-child) { min-width: 3.7em; }
  .md-typeset table:has(th:nth-child(10)):not([class], [style]) :is(th, td):not(:first-child) { min-width: 3em; }
}
/* Rows of tables in notebooks collapse: they are not boxes of the theme. */
.md-typeset td details { border: 0; box-shadow: none; margin: 0; padding: 0; font-size: inherit; background: none; }
.md-typeset td details, .md-typeset td details > summary { display: block; overflow: visible; }
.md-typeset td details > summary { margin: 0; padding: 0 !important; min-height: 0; border: 0; background: none; }
.md-typeset td :is(.md-typeset__scrollwrap, .md-typeset__table) { display: block; margin: 0; padding: 0; }
.md-typeset td details > summary::before { display: none; }
.md-typeset td details > summary::after { width: 1.2em; height: 1.2em; top: 0.2em; left: -1.4em; right: auto; }
"""

# A page that was opened from disk may not start a Worker: run its script, which searches, in a hidden frame.
THEME_WORKER = "https://unpkg.com/iframe-worker/shim"  # that the theme would load
WORKER = """
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.window = frame.contentWindow;
      const page = frame.contentDocument, script = page.createElement("script");
      page.open(); page.write("<body></body>"); page.close();
      this.window.postMessage = data => this.dispatchEvent(new MessageEvent("message", {data}));
      this.isReady = new Promise(resolve => script.onload = resolve);
      script.src = url;
      page.body.append(script);
    }
    postMessage(data) {
      this.isReady.then(() => this.window.dispatchEvent(new MessageEvent("message", {data})));
    }
  };
}
"""

# --- the API reference ---------------------------------------------------------------------------------------


def namespaces(module: ModuleType = fs, name: str = "fs") -> Iterator[tuple[str, ModuleType]]:
    """Return the library and its public namespaces: modules in an `__all__` that have public names."""
    yield name, module
    for key in module.__all__:
        inner = getattr(module, key)
        if isinstance(inner, ModuleType) and getattr(inner, "__all__", ()):
            yield from namespaces(inner, f"{name}.{key}")


def names(module: ModuleType) -> list[tuple[str, Any]]:
    """Return the public names of a namespace that are not namespaces."""
    found = [(key, getattr(module, key)) for key in module.__all__]
    return [(key, value) for key, value in found if not isinstance(value, ModuleType)]


def documented(value: Any) -> str:
    """Return the docstring of a function or class; "" for an alias of types."""
    return value.__doc__ or "" if inspect.isroutine(value) or inspect.isclass(value) else ""


def definition(value: Any) -> str:
    """Return the text of a constant, or of an alias of types."""
    text = inspect.formatannotation(value)
    return re.sub(r"\b(?:fshard|typing|collections\.abc)\.(?:\w+\.)*", "", text)


def signature(value: Any, name: str) -> str:
    """Return `fs.psum(x: T, axis: Axis) -> T`, with a parameter on each line if that is long."""
    if not documented(value):
        return f"{name} = {definition(value)}"
    try:
        found = unquoted(inspect.signature(value))
    except ValueError:  # an exception, with the signature of ValueError
        return name
    if inspect.isclass(value):
        found = found.replace(return_annotation=inspect.Signature.empty)
    text = str(found).replace("fshard.", "fs.")
    if len(name + text) <= 100:
        return name + text
    pieces = re.sub(r"0x[0-9a-f]+", "...", text)
    lines, depth, start = [], 0, 1
    for i, char in enumerate(pieces):  # split at the commas between parameters
        depth += (char in "([{") - (char in ")]}")
        if (char == "," and depth == 1) or depth == 0:
            lines.append("    " + pieces[start:i].strip() + ",")
            start = i + 1
            if depth == 0:
                return "\n".join([name + "(", *[line for line in lines if line.strip(" ,")], ")" + pieces[i + 1 :]])
    return name + text


SHAPE = re.compile(r"(?<![\w\]])\[[^\[\]]*\](?:\{[^{}]*\})?|\{[VI][^{}]*\}")  # int64 [B@data, T]{V}


def plain(line: str) -> str:
    """Escape tags and emphasis of markdown in a line, outside of backticks; shapes and types are code."""
    parts = re.split(r"(`+[^`]*`+)", line)
    for i in range(0, len(parts), 2):
        text = re.split(f"({SHAPE.pattern})", parts[i])
        text[::2] = [re.sub(r"([*_])", r"\\\1", t).replace("<", "&lt;") for t in text[::2]]
        text[1::2] = [f"`{t}`" for t in text[1::2]]
        parts[i] = "".join(text)
    return "".join(parts)


def markdown(docstring: str) -> str:
    """Format a docstring as markdown: shapes and tables as code, examples as sessions, `Args:` as a list."""
    out: list[str] = []
    arguments = session = code = False
    for line in inspect.cleandoc(docstring).splitlines():
        if session and not line.strip():
            out, session = [*out, "```"], False
        if line.lstrip().startswith(">>>") and not session:
            out, session, arguments = [*out, "", "```pycon"], True, False
        if session:
            out.append(line.removeprefix("    ") if line.startswith("    >>>") else line)
        elif re.fullmatch(r"(Args|Returns|Raises|Attributes):", line):
            out, arguments = [*out, "", f"**{line}**", ""], True
        elif arguments and (named := re.match(r" {4}([\w, *]+): (.*)", line)):
            out.append(f"- `{named[1]}`: {plain(named[2])}")
        elif arguments and line.startswith("    "):
            out.append("  " + plain(line.strip()))
        else:
            arguments = arguments and not line
            code = line.startswith("    ") and (code or not out or not out[-1])
            out.append(line if code or not line else plain(line))
    return "\n".join([*out, "```"] if session else out)


# Methods that only other files of the library call.
INTERNAL = ("check_names", "donate_to", "module_leaf", "refuse_changed", "run", "split_key")


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Return the documented methods and properties that a class defines itself."""
    for key, value in vars(cls).items():
        inner = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
        is_public = not key.startswith("_") and key not in INTERNAL
        if is_public and (inspect.isfunction(inner) or isinstance(inner, property)) and inner.__doc__:
            yield key, inner


def entry(name: str, value: Any) -> str:
    """Return the documentation of one public name."""
    text = [f"## {name} {{ #{name} }}", "", "```python", signature(value, name), "```", "", markdown(documented(value))]
    for key, member in members(value) if inspect.isclass(value) else ():
        shown = f"{name.rpartition('.')[2]}.{key}"
        text += ["", f"### {shown} {{ #{name}.{key} }}", ""]
        if inspect.isfunction(member):
            text += ["```python", signature(member, shown).replace("(self, ", "(").replace("(self)", "()"), "```", ""]
        text += [markdown(member.__doc__ or "")]
    return "\n".join(text)


def first_sentence(docstring: str) -> str:
    return plain(" ".join(inspect.cleandoc(docstring).split("\n\n")[0].split()).split(". ")[0]).replace("|", "\\|")


def listing(rows: Mapping[str, str]) -> str:
    """Return a table of names, with links to their entries, and summaries."""
    return "\n".join(["| name | summary |", "|---|---|", *(f"| [`{k}`](#{k}) | {v} |" for k, v in rows.items())])


# The pages, by package, in the order of the menu. `core` is everything in none of the others.
PACKAGES = ("core", "init", "random", "nn", "optim", "schedule", "data", "checkpoint", "law", "planning", "defer",
            "lora", "interop", "models")  # fmt: skip


def package_of(module: str) -> str:
    """Return the page of a module: `planning` of `fshard.planning.plan`, `core` of `fshard.spec`."""
    part = f"{module}..".split(".")[1]
    return part if part in PACKAGES else "core"


def reference() -> dict[str, str]:
    """Return every page of the API reference, by its path: one for each package, opened by a table of its names."""
    rows: dict[str, dict[str, str]] = {page: {} for page in PACKAGES}
    sections: dict[str, list[str]] = {page: [] for page in PACKAGES}
    for name, module in namespaces():
        public = {f"{name}.{key}": value for key, value in names(module)}
        summaries = {
            key: first_sentence(documented(value)) or f"`{definition(value)}`" for key, value in public.items()
        }
        page = package_of(module.__name__)
        if module.__name__ in ("fshard", f"fshard.{page}"):
            for key, value in public.items():
                if module is not fs and any(value is other for _, other in names(fs)):
                    continue  # fs.planning.plan is fs.plan
                page = package_of(value.__module__ if module is fs else module.__name__)
                rows[page][key] = summaries[key]
                sections[page].append(entry(key, value))
        elif public:  # a namespace inside of a package, such as fs.plot
            about = module.__doc__ or ""
            rows[page][name] = first_sentence(about)
            sections[page] += [f"## {name} {{ #{name} }}", markdown(about), listing(summaries)]
            sections[page] += [entry(key, value) for key, value in public.items()]
    pages = {}
    listed = ["# API reference", LEGEND, "| package | summary | names |", "|---|---|---|"]
    for page in PACKAGES:
        about = CORE if page == "core" else inspect.cleandoc(import_module(f"fshard.{page}").__doc__ or "")
        summary, _, rest = about.partition("\n\n")
        keys = ", ".join(f"[`{key}`]({page}.md#{key})" for key in rows[page])
        listed.append(f"| [{page}]({page}.md) | {first_sentence(summary)} | {keys} |")
        text = [f"# {page}", markdown(summary), listing(rows[page]), markdown(rest), *sections[page]]
        pages[f"api/{page}.md"] = "\n\n".join(text)
    return {"api/index.md": "\n".join(listed)} | pages


# --- pages of the repository ---------------------------------------------------------------------------------


def notebook(file: Path) -> str:
    """Format a notebook with its outputs as markdown."""
    out = []
    for cell in json.loads(file.read_text())["cells"]:
        source = "".join(cell["source"])
        out.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "text/html" in data:  # on one line: a blank one would end the block
                out.append("<div>" + re.sub(r"\s*\n\s*", " ", "".join(data["text/html"])) + "</div>")
            elif "image/png" in data:
                out.append(f'<img src="data:image/png;base64,{"".join(data["image/png"]).strip()}" alt="a plot">')
            elif text := "".join(output.get("text", data.get("text/plain", output.get("traceback", "")))):
                out.append("```text\n" + re.sub(r"\x1b\[[0-9;]*m", "", text) + "\n```")
    return "\n\n".join(out)


def code(path: Path) -> str:
    """Return the page of a file of code, or of a folder of Python files."""
    files = [path] if path.is_file() else sorted(path.glob("*.py")) + sorted(path.glob("*.ipynb"))
    text = [f"# {path.relative_to(ROOT)}"]
    for file in files:
        if file.suffix == ".ipynb":
            text.append(f"- [{file.stem}]({file.name})")
        elif file.read_text().strip():
            language = {".sbatch": "sh", ".yaml": "yaml"}.get(file.suffix, "python")
            text += [f"## {file.name}"] * path.is_dir() + [f"```{language}\n{file.read_text()}```"]
    return "\n\n".join(text)


LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
NAMED_BY_PATH = re.compile(r"\[`?([\w./-]+\.(?:md|ipynb))`?\]\(([^)#\s]+)")  # [docs/the-law.md](docs/the-law.md)


def title(path: Path) -> str:
    """Return the first heading of a page or notebook."""
    text = notebook(path) if path.suffix == ".ipynb" else path.read_text()
    return next(line for line in text.splitlines() if line.startswith("# ")).removeprefix("# ")


def pages() -> dict[str, str]:
    """Return every page by its path, with the pages of code that others link to."""
    waiting = ["README.md", *sorted(str(f.relative_to(ROOT)) for f in ROOT.glob("docs/*.md")), *PROJECT]
    found: dict[str, str] = {}

    def follow(page: str, target: str) -> str:
        path = (ROOT / page).parent / target
        relative = os.path.relpath(path, ROOT)
        if path.suffix in (".md", ".svg") or not path.exists():  # mkdocs reports an absent file
            return target
        waiting.append(relative)
        return target.rstrip("/") + (".md" if path.is_file() else "/index.md")

    while waiting:
        page = waiting.pop(0)
        path = ROOT / page
        name = page if path.suffix == ".md" else f"{page}.md" if path.is_file() else f"{page}/index.md"
        if name in found:
            continue
        text = path.read_text() if path.suffix == ".md" else notebook(path) if path.suffix == ".ipynb" else code(path)
        base = page if path.is_file() else f"{page}/index.md"
        text = NAMED_BY_PATH.sub(lambda link, path=path: f"[{title(path.parent / link[2])}]({link[2]}", text)
        fences = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)  # no links in code
        found[name] = "".join(
            part if i % 2 else LINK.sub(lambda link, base=base: follow(base, link[1]), part)  # type: ignore[misc]
            for i, part in enumerate(fences)
        )
    return found


def menu(found: dict[str, str]) -> list[dict[str, Any]]:
    """Return the guides in the order in which the README's list of pages links them, then the others."""
    linked = LINK.findall(found["README.md"].partition("## Read on")[2])
    guides = sorted(
        (p for p in found if p.startswith("docs/")),
        key=lambda p: (p not in linked, linked.index(p) if p in linked else 0, p),
    )
    rest = [p for p in found if not p.startswith(("docs/", "api/", "notebooks/")) and p != "README.md"]
    return [
        {"Home": "README.md"},
        {"Guides": guides},
        {"Notebooks": sorted(p for p in found if p.startswith("notebooks/"))},
        {"API": ["api/index.md", *(f"api/{page}.md" for page in PACKAGES)]},
        {"Code": rest},
    ]


def build(site: Path) -> None:
    """Write the site. Raises `mkdocs.exceptions.Abort` at a warning."""
    os.environ.setdefault("NO_MKDOCS_2_WARNING", "1")  # an advertisement of the theme
    from mkdocs.commands.build import build as write
    from mkdocs.config import load_config

    found = pages() | reference()
    with tempfile.TemporaryDirectory() as folder:
        for name, text in found.items():
            file = Path(folder, name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        for picture in ROOT.glob("docs/**/*.svg"):
            (target := Path(folder, picture.relative_to(ROOT))).parent.mkdir(exist_ok=True)
            shutil.copy(picture, target)
        Path(folder, "style.css").write_text(STYLE)
        write(
            load_config(
                str(ROOT / "docs" / "mkdocs.yml"), docs_dir=folder, site_dir=str(site), nav=menu(found), strict=True
            )
        )
    (site / "404.html").unlink()  # for a server
    (site / "worker.js").write_text(WORKER)
    for file in site.rglob("*.html"):
        worker = os.path.relpath(site / "worker.js", file.parent)
        file.write_text(file.read_text().replace(THEME_WORKER, worker))


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")  # mkdocs prints nothing by itself
    parser = argparse.ArgumentParser(prog="python -m docs.build", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("site", metavar="SITE", nargs="?", type=Path, default=ROOT / "site", help="default: site/")
    site = parser.parse_args().site.absolute()
    build(site)
    sys.stdout.write(f"{site / 'index.html'}\n")
