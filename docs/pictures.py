"""Draw the pictures of the documentation: `python -m docs.pictures` writes docs/pictures/*.svg.

The blocks come from `fs.show`, and the numbers of collectives from a run on a simulated mesh. Numbers are dark on
pastel colours, and other texts are of middle grey, so a picture can be read on light and dark pages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import torch

import fshard as fs
from fshard import P
from fshard._core.display import rgba

FOLDER = Path(__file__).parent / "pictures"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"
GREY, DARK = "#768390", "#1f2933"
MIXED = "#d5dae1"  # of a number that is computed from several ranks
WIDE, HIGH = 26, 24  # of one number
SHEET = 4  # offset of a copy below a block


def pastel(number: int) -> str:
    """Return the colour that `fs.show` gives a block on a white page."""
    *rgb, alpha = (float(x) for x in re.findall(r"[\d.]+", rgba(number, 0.42)))
    return "#" + "".join(f"{round(255 - (255 - c) * alpha):02x}" for c in rgb)


@dataclass
class Drawing:
    """Elements of a picture, and the size that contains them. Each method draws one element."""

    title: str
    elements: list[str] = field(default_factory=list)
    width: float = 0
    height: float = 0

    def grow(self, x: float, y: float) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def rect(self, x: float, y: float, w: float, h: float, fill: str, *, stroke: str = GREY, style: str = "",
             rx: int = 3) -> None:  # fmt: skip
        self.grow(x + w, y + h)
        self.elements.append(f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{rx}" fill="{fill}" '
                             f'stroke="{stroke}" {style}/>')  # fmt: skip

    def text(self, x: float, y: float, text: str, *, anchor: str = "middle", fill: str = GREY, size: int = 13,
             font: str = SANS) -> None:  # fmt: skip
        """Write a line whose middle is at height y."""
        wide = len(text) * size * (0.62 if font == MONO else 0.53)
        self.grow(x + wide * {"start": 1, "middle": 0.5, "end": 0}[anchor], y + size)
        self.elements.append(f'<text x="{x:g}" y="{y + 0.35 * size:g}" text-anchor="{anchor}" fill="{fill}" '
                             f'font-size="{size}" font-family="{font}">{escape(text)}</text>')  # fmt: skip

    def line(self, *points: tuple[float, float], arrow: bool = False, dashed: bool = False) -> None:
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        style = ' marker-end="url(#arrow)"' * arrow + ' stroke-dasharray="4 3"' * dashed
        self.elements.append(f'<polyline points="{path}" fill="none" stroke="{GREY}" stroke-width="1.5"{style}/>')

    def numbers(self, x: float, y: float, rows: Sequence[Sequence[str]], colours: Sequence[Sequence[str]], *,
                copies: int = 1) -> None:  # fmt: skip
        """Draw a tensor as a grid of numbers, on a stack of sheets if there are copies."""
        w, h = WIDE * len(rows[0]), HIGH * len(rows)
        for i in reversed(range(1, min(copies, 4))):
            self.rect(x + SHEET * i, y + SHEET * i, w, h, colours[0][0], style='opacity="0.6"')
        for i, (row, fills) in enumerate(zip(rows, colours, strict=True)):
            for j, (number, fill) in enumerate(zip(row, fills, strict=True)):
                left, top = x + WIDE * j, y + HIGH * i
                self.rect(left, top, WIDE, HIGH, fill, stroke="none", rx=0)
                self.text(left + WIDE / 2, top + HIGH / 2, number, fill=DARK, font=MONO)
        self.rect(x, y, w, h, "none")

    def svg(self) -> str:
        w, h = math.ceil(self.width) + 8, math.ceil(self.height) + 4
        arrow = (f'<marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                 f'orient="auto-start-reverse"><path d="M0,0 L8,4 L0,8 z" fill="{GREY}"/></marker>')  # fmt: skip
        head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img">'
                f"\n<title>{escape(self.title)}</title>\n<defs>{arrow}</defs>")  # fmt: skip
        return "\n".join([head, *self.elements, "</svg>"]) + "\n"


# --- blocks, from fs.show ---------------------------------------------------------------------------------------


def draw_blocks(d: Drawing, x: float, y: float, spec: P, shape: tuple[int, ...], mesh: fs.Mesh) -> tuple[float, float]:
    """Draw the blocks of `fs.show(spec, shape, mesh=mesh)`; return the width and the height."""
    gap, top = 10, y
    left = x
    for line in fs.show(spec, shape, mesh=mesh).blocks:
        left = x
        for cell in line:
            rows = [text.split() for text in cell.values]
            name, *_ = cell.lines
            fill = pastel(cell.position)
            w, h = WIDE * len(rows[0]), HIGH * len(rows)
            for i in reversed(range(1, min(len(cell.devices), 4))):
                d.rect(left + SHEET * i, top + SHEET * i, w, h + HIGH, fill, style='opacity="0.6"')
            d.rect(left, top, w, h + HIGH, fill)
            d.text(left + w / 2, top + HIGH / 2 + 2, name, fill=DARK, size=11)
            for i, row in enumerate(rows):
                for j, number in enumerate(row):
                    d.text(left + WIDE * (j + 0.5), top + HIGH * (i + 1.4), number, fill=DARK, font=MONO)
            left += w + gap + SHEET * 2 * (len(cell.devices) > 1)
        top += h + HIGH + gap + SHEET * 2 * (len(cell.devices) > 1)
    return left - x - gap, top - y - gap


def blocks() -> Drawing:
    d = Drawing("The blocks of a matrix [4, 8] with P('data', 'model') on a mesh of data=2, model=4: one for each rank")
    mesh = fs.make_mesh(data=2, model=4)
    d.text(0, 10, 'fs.show(P("data", "model"), (4, 8), mesh=mesh)', anchor="start", font=MONO)
    x, y = 72, 62
    w, h = draw_blocks(d, x, y, P("data", "model"), (4, 8), mesh)
    for i in range(4):
        d.text(x + (i + 0.5) * (w + 10) / 4 - 5, y - 14, f"model={i}", size=12)
    for i in range(2):
        d.text(x - 12, y + (i + 0.5) * (h + 10) / 2 - 5, f"data={i}", anchor="end", size=12)
    return d


def spec() -> Drawing:
    d = Drawing("One matrix [2, 4] on a mesh of data=2, model=2, by four specs: copies of a block are drawn as a stack")
    mesh = fs.make_mesh(data=2, model=2)
    for i, (text, value) in enumerate({"P()": P(), 'P("data")': P("data"), 'P(None, "model")': P(None, "model"),
                                       'P("data", "model")': P("data", "model")}.items()):  # fmt: skip
        d.text(i * 148, 10, text, anchor="start", font=MONO)
        draw_blocks(d, i * 148, 28, value, (2, 4), mesh)
    return d


def lengths() -> Drawing:
    d = Drawing("Twelve layers on four stages: equal parts, and fewer layers on the first and the last stage")
    for i, text in enumerate(['P("stage")', 'P("stage", lengths=(2, 4, 4, 2))']):
        d.text(0, i * 92 + 10, text, anchor="start", font=MONO)
        draw_blocks(d, 0, i * 92 + 28, eval(text), (12,), fs.make_mesh(stage=4))
    return d


# --- collectives, from a run ----------------------------------------------------------------------------------

RANKS = 4
COLUMN = 112  # of a rank
LEFT = 72  # of the names of lines
WIDTH = LEFT + RANKS * COLUMN


@dataclass(frozen=True)
class Example:
    """A collective on an input `x`: of shape [ranks, ...] if it varies, one value if it is invariant."""

    code: str
    x: torch.Tensor | None
    kinds: str  # V->I: `x` varies, the result is invariant


def example(code: str, shape: tuple[int, ...], kinds: str) -> Example:
    """Return an example whose numbers are 1, 2, ... on rank 0, and 11, 12, ... on rank 1."""
    x = 1 + torch.arange(math.prod(shape)).reshape(shape).float()
    return Example(code, torch.stack([10 * r + x for r in range(RANKS)]) if kinds[0] == "V" else x, kinds)


COLLECTIVES = {
    "psum": example('fs.psum(x, "model")', (1, 2), "V->I"),
    "pmean": example('fs.pmean(x, "model")', (1, 2), "V->I"),
    "pmax": example('fs.pmax(x, "model")', (1, 2), "V->I"),
    "pmin": example('fs.pmin(x, "model")', (1, 2), "V->I"),
    "pvary": example('fs.pvary(x, "model")', (1, 2), "I->V"),
    "all_gather": example('fs.all_gather(x, "model", dim=0)', (1, 2), "V->V"),
    "all_gather_invariant": example('fs.all_gather(x, "model", dim=0, to="invariant")', (1, 2), "V->I"),
    "psum_scatter": example('fs.psum_scatter(x, "model", dim=0)', (4, 2), "V->V"),
    "pslice": example('fs.pslice(x, "model", dim=0)', (4, 2), "I->V"),
    "all_to_all": example('fs.all_to_all(x, "model", split=0, concat=1)', (4, 1), "V->V"),
    "all_to_all_rows": example('fs.all_to_all_rows(x, "model", send)', (4, 1), "V->V"),
    "take_rows": example('fs.take_rows(x, "model", torch.tensor([6, 1]))', (2, 1), "V->V"),
    "ppermute": example('fs.ppermute(x, "model", [(0, 1), (1, 2), (2, 3)])', (1, 2), "V->V"),
    "axis_index": Example('fs.axis_index("model")', None, "V->V"),
}


def run(code: str, x: torch.Tensor, kinds: str) -> torch.Tensor:
    """Run a collective on a simulated mesh. Where `x` or the result varies, dim 0 is that of the ranks."""

    def f(x: torch.Tensor) -> torch.Tensor:
        send = torch.tensor([2, 1, 1, 0]).roll(int(fs.axis_index("model")))
        y = eval(code, {"fs": fs, "torch": torch, "send": send, "x": x[0] if kinds[0] == "V" else x})
        return y.reshape(1, *(y.shape or (1, 1))) if kinds[-1] == "V" else y

    in_specs, out_specs = (P("model") if kind == "V" else P() for kind in (kinds[0], kinds[-1]))
    f = fs.shard_map(f, mesh=fs.make_mesh(model=RANKS), in_specs=(in_specs,), out_specs=out_specs)
    return fs.device_get(f(x))


def homes(x: torch.Tensor) -> dict[str, str]:
    """Return the colour of each number that only one rank has."""
    ranks: dict[str, set[int]] = {}
    for r, tensor in enumerate(x):
        for number in tensor.flatten().tolist():
            ranks.setdefault(f"{number:g}", set()).add(r)
    return {number: pastel(min(has)) for number, has in ranks.items() if len(has) == 1}


def draw_value(d: Drawing, y: float, name: str, x: torch.Tensor, kind: str, colours: dict[str, str]) -> float:
    """Draw a value in a line: that of each rank, or a stack if it is invariant; return the y below."""
    tensors = list(x) if kind == "V" else [x]
    column = RANKS * COLUMN / len(tensors)
    for r, tensor in enumerate(tensors):
        rows = [[f"{number:g}" for number in row] for row in tensor.tolist()]
        middle = LEFT + column * (r + 0.5)
        d.text(middle, y + 6, f"rank {r}" if kind == "V" else "ranks 0–3", size=12)
        fills = [[colours.get(number, MIXED) for number in row] for row in rows]
        d.numbers(middle - WIDE * len(rows[0]) / 2, y + 18, rows, fills, copies=1 if kind == "V" else RANKS)
    high = HIGH * len(rows)
    shape = list(tensor.shape) if tensor.numel() > 1 else []
    d.text(0, y + 10 + high / 2, f"{name} {shape}", anchor="start", size=12)
    d.text(0, y + 26 + high / 2, "varies" if kind == "V" else "invariant", anchor="start", size=12)
    return y + 18 + high + SHEET * 3 * (kind == "I")


def draw_call(d: Drawing, y: float, code: str) -> float:
    """Draw an arrow down and a call next to it, together in the middle; return the y below."""
    x = LEFT + (WIDTH - LEFT - 13 * 0.62 * len(code) - 14) / 2
    d.line((x, y + 8), (x, y + 40), arrow=True)
    d.text(x + 14, y + 24, code, anchor="start", font=MONO)
    return y + 50


def collective(e: Example) -> Drawing:
    """Draw the values of all ranks before and after a collective."""
    d, y = Drawing(f"Every rank before and after {e.code}"), 4.0
    after = run(e.code, torch.zeros(RANKS, 1) if e.x is None else e.x, e.kinds)
    colours = homes(e.x if e.x is not None and e.kinds[0] == "V" else after)
    if e.x is not None:
        y = draw_value(d, y, "x", e.x, e.kinds[0], colours)
    y = draw_call(d, y, e.code)
    draw_value(d, y, "result", after, e.kinds[-1], colours)
    d.grow(WIDTH, 0)
    return d


# --- words of the glossary ------------------------------------------------------------------------------------


def varies() -> Drawing:
    d, e = Drawing("A value that varies over an axis: another one on each rank"), COLLECTIVES["psum"]
    draw_value(d, 4, "x", e.x, "V", homes(e.x))
    return d


def invariant() -> Drawing:
    d, e = (
        Drawing("A value that is invariant over an axis: the same on each rank, drawn as a stack"),
        COLLECTIVES["psum"],
    )
    draw_value(d, 4, "x", run(e.code, e.x, e.kinds), "I", {})
    return d


def pvary() -> Drawing:
    """Draw `pvary` forward, and the gradient of a loss in which each rank uses the value with a number of its own."""
    d = Drawing("pvary: each rank takes the value; backward adds the gradients of all ranks")
    w, x = torch.ones(1, 2), COLLECTIVES["psum"].x
    loss = lambda w, x: fs.psum((fs.pvary(w, "model") * x).sum(), "model")  # noqa: E731
    mesh = fs.make_mesh(model=RANKS)
    grad = fs.shard_map(lambda w, x: fs.grad(loss)(w, x[0]), mesh=mesh, in_specs=(P(), P("model")), out_specs=P())
    y = draw_value(d, 4, "w", w, "I", {})
    y = draw_call(d, y, 'fs.pvary(w, "model")')
    y = draw_value(d, y, "result", run('fs.pvary(x, "model")', w, "I->V"), "V", {})
    d.text(0, y + 34, "backward", anchor="start", size=12)
    y = draw_value(d, y + 44, "gradient", x, "V", homes(x))
    y = draw_call(d, y, 'fs.psum(gradient, "model")')
    draw_value(d, y, "gradient", fs.device_get(grad(w, x)), "I", {})
    d.grow(WIDTH, 0)
    return d


def region() -> Drawing:
    """Draw one `shard_map` call: global tensors outside, and the function on each rank's part inside."""
    d = Drawing("A region: the inside of one shard_map call on one rank, where tensors are local")
    mesh, x = fs.make_mesh(model=RANKS), 1 + torch.arange(8.0).reshape(4, 2)
    double = fs.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=(P("model"),), out_specs=P("model"))
    values = {"x": x, "result": fs.device_get(double(x))}
    left = LEFT + RANKS * COLUMN / 2 - WIDE
    for i, (name, value) in enumerate(values.items()):
        rows = [[f"{n:g}" for n in row] for row in value.tolist()]
        d.numbers(left, 8 + 306 * i, rows, [[pastel(r)] * 2 for r in range(RANKS)])
        d.text(0, 48 + 306 * i, f"{name} [4, 2]", anchor="start", size=12)
        d.text(0, 64 + 306 * i, "global", anchor="start", size=12)
        for r in range(RANKS):
            middle = LEFT + COLUMN * (r + 0.5)
            far = left + (-8 if r < 2 else 2 * WIDE + 8), 20 + 306 * i + HIGH * r
            near = middle, 144 if i == 0 else 272
            d.line(*((far, near) if i == 0 else (near, far)), arrow=True)
            d.numbers(middle - WIDE, 168 + 54 * i, [rows[r]], [[pastel(r)] * 2])
    for r in range(RANKS):
        middle = LEFT + COLUMN * (r + 0.5)
        d.rect(middle - 44, 146, 88, 124, "none", style='stroke-dasharray="4 3"')
        d.text(middle, 157, f"rank {r}", size=12)
        d.text(middle, 207, "2 * x", font=MONO)
    d.text(0, 200, "regions", anchor="start", size=12)
    d.text(0, 216, "local [1, 2]", anchor="start", size=12)
    d.grow(WIDTH, 0)
    return d


def draw_tree(d: Drawing, names: dict[str, int], first: float = 12) -> dict[str, float]:
    """Write the names of a tree in lines, indented by their depth, with lines from parent to child; return each y."""
    at, last = {}, {-1: first}
    for i, (path, depth) in enumerate(names.items()):
        y = first + 34 * i
        at[path], last[depth] = y, y
        d.text(30 * depth, y, path.rpartition(".")[2], anchor="start", font=MONO)
        if depth:
            x = 30 * (depth - 1) + 8
            d.line((x, last[depth - 1] + 10), (x, y), (x + 18, y))
    return at


def leaf() -> Drawing:
    """Draw a tree of two blocks, and its leaves."""
    d = Drawing("A tree of parameters: its leaves are tensors, each with a path")
    h = [{"up": fs.init.normal((8, 32)), "down": fs.init.normal((32, 8))}]
    at = draw_tree(d, {"params": 0, "params.wte": 1, "params.h": 1, "params.h.0": 2, "params.h.0.up": 3,
                       "params.h.0.down": 3})  # fmt: skip
    for i, (path, x) in enumerate(fs.tree.leaves_with_path({"wte": fs.init.normal((50, 8)), "h": h})):
        dotted = fs.tree.dotted(path)
        y = at[f"params.{dotted}"]
        d.line((150, y), (196, y), dashed=True)
        d.rect(200, y - 12, 12 * 9.4, 24, pastel(i))
        d.text(200 + 6 * 9.4, y, f"f32{list(x.shape)}", fill=DARK, font=MONO)
        d.text(328, y, f"leaf {dotted}", anchor="start")
    return d


def tie() -> Drawing:
    """Draw one leaf at two paths."""
    d = Drawing("A tie: one leaf at two paths of a tree, whose gradients are added")
    at = draw_tree(d, {"params": 0, "params.wte": 1, "params.h": 1, "params.lm_head": 1})
    d.line((78, at["params.wte"]), (206, at["params.wte"]), (206, 70), arrow=True)
    d.line((112, at["params.lm_head"]), (206, at["params.lm_head"]), (206, 96), arrow=True)
    d.rect(150, 70, 114, 26, pastel(0))
    d.text(207, 83, "f32[50, 8]", fill=DARK, font=MONO)
    d.text(280, 83, "one leaf: stored, updated and saved once", anchor="start")
    return d


def unit() -> Drawing:
    """Draw the weights of three units in memory while a forward pass runs."""
    d = Drawing("Units: the weights of a unit are gathered before it runs, and freed after it")
    step, high = 120, 26
    for i, name in enumerate(["h.0", "h.1", "h.2"]):
        y = 30 + 44 * i
        d.text(0, y + high / 2, f"unit {name}", anchor="start")
        d.rect(70, y + high - 6, 4 * step + 20, 6, pastel(i), stroke="none")
        d.rect(80 + step * (i + 0.5), y, step * 1.5, high, pastel(i))
        d.text(80 + step * (i + 0.75), y + high / 2, "gather", fill=DARK, size=12)
        d.text(80 + step * (i + 1.5), y + high / 2, "run", fill=DARK, size=12)
        d.line((80 + step * (i + 1), y), (80 + step * (i + 1), y + high), dashed=True)
    d.text(70 + 2 * step, 12, "full weights in memory: one unit, and the next one", size=12)
    d.line((70, 168), (90 + 4 * step, 168), arrow=True)
    d.text(70 + 2 * step, 182, "time; the thin line is the part that each rank always keeps", size=12)
    return d


def zigzag() -> Drawing:
    """Draw the positions of a sequence on each rank, in order and in the zigzag order."""
    d, x = Drawing("16 positions over four ranks, in order and in the zigzag order"), torch.arange(16.0)
    parts = x.view(RANKS, 1, 4)
    y = draw_value(d, 4, "x", parts, "V", homes(parts))
    y = draw_call(d, y, code := 'fs.nn.to_zigzag(x, "model")')
    draw_value(d, y, "result", run(code, parts, "V->V"), "V", homes(parts))
    d.grow(WIDTH, 0)
    return d


CHOICES = [[0, 1, 5], [5, 5, 2], [5, 7, 5], [0, 5, 3]]  # the expert of each token, by rank


def experts() -> Drawing:
    """Draw the tokens of each rank, and then the tokens of each expert, on the rank that has it."""
    d = Drawing("Eight experts on four ranks: each token goes to its expert, most of them to expert 5, none to 4 and 6")
    for r, chosen in enumerate(CHOICES):
        middle = LEFT + COLUMN * (r + 0.5)
        d.text(middle, 10, f"rank {r}", size=12)
        d.numbers(middle - WIDE * 1.5, 22, [[str(e) for e in chosen]], [[pastel(r)] * 3])
        for i, expert in enumerate((2 * r, 2 * r + 1)):
            sources = [source for source, others in enumerate(CHOICES) for e in others if e == expert]
            x, y = middle - 36, 108 + 34 * i
            d.text(x - 6, y + HIGH / 2, f"{expert}:", anchor="end", size=12)
            for k, source in enumerate(sources):
                d.rect(x + 15 * k, y, 15, HIGH, pastel(source), rx=0)
            if not sources:
                d.text(x, y + HIGH / 2, "no tokens", anchor="start", size=12)
    d.text(0, 22 + HIGH / 2, "choices", anchor="start", size=12)
    draw_call(d, 50, 'nn.mixture(x, routing, params, run, axis="expert")')
    d.text(0, 108 + HIGH / 2, "experts", anchor="start", size=12)
    d.grow(WIDTH, 170)
    return d


WORDS = (leaf, spec, lengths, region, varies, invariant, pvary, unit, tie, zigzag, experts)
PICTURES: dict[str, Callable[[], Drawing]] = {
    "blocks": blocks,
    **{name: lambda e=e: collective(e) for name, e in COLLECTIVES.items() if name != "pvary"},
    **{draw.__name__: draw for draw in WORDS},
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for file in FOLDER.glob("*.svg"):
        file.unlink()
    for name, draw in PICTURES.items():
        (FOLDER / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
