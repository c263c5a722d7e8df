import functools
import itertools
import math
import re
import sys
from collections import namedtuple
from html.parser import HTMLParser
from textwrap import dedent

import pytest
import torch

import fshard as fs
from fshard import P
from fshard._core.display import bars, format_runs, page, rgba, table
from fshard.planning.show import show, size
from fshard.reshard import _sources
from fshard.spec import box_bounds, box_shape, draw, format_tensor, part_ranks
from tests.lib.assertions import error_text

SIZES = {"data": 2, "model": 4}


def gpt(layers):
    def block():
        return {
            "ln": {"scale": fs.init.ones(64), "bias": fs.init.zeros(64)},
            "qkv": fs.init.normal((64, 192), std=0.02),
        }

    return {"wte": fs.init.normal((50, 64)), "h": [block() for _ in range(layers)], "head": fs.init.zeros((64, 50))}


def layout(shape, spec, *, mesh):
    return draw(format_tensor(torch.float32, shape, spec).removeprefix("f32"), shape, spec, mesh)


SPECS = {"wte": P("model"), "h": fs.column("model"), "head": fs.column(("data", "model"))}


def check(view, text):
    assert str(view) == repr(view) == view.text == dedent(text).strip("\n")
    assert [line.rstrip() for line in view.text.splitlines()] == view.text.splitlines()
    parsed(view)


class Parser(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


def parsed(view):
    """Parse the HTML, which must close every tag that it opens."""
    parser = Parser()
    parser.feed(view._repr_html_())
    parser.close()
    assert parser.open == []
    return parser


# --- tables


def test_table_of_a_deferred_tree_with_specs_and_axis_sizes():
    check(
        show(gpt(3), specs=SPECS, mesh=SIZES),
        """
                                                               per device
        wte        f32[50@model, 64]       normal()           2.8–3.2 KiB
        h.0–2  ×3                                            3 × 12.1 KiB
          ln                                                        128 B
            scale  f32[64@model]           ones                      64 B
            bias   f32[64@model]           zeros                     64 B
          qkv      f32[64, 192@model]      normal(std=0.02)      12.0 KiB
        head       f32[64, 50@data+model]  zeros              1.0–1.8 KiB
        total  43,648 parameters, 170.5 KiB; 40.1–41.4 KiB on each of 8 devices (data=2, model=4)
        """,
    )


def test_bytes_per_device_are_those_of_its_parts():
    """Compare with the shards themselves, with sizes that no axis divides."""
    tree = {
        "a": fs.init.zeros((7, 5)),
        "b": fs.init.zeros((7,), dtype=torch.bfloat16),
        "c": [fs.init.zeros((4, 9, 2))],
        "d": fs.init.zeros(7),
    }
    specs = {"a": P("model", "data"), "b": P(("model", "data")), "c": P(None, ("data", "model")), "d": P("data")}
    mesh = fs.make_mesh(data=3, model=2)
    placed = fs.tree.leaves(fs.materialize(tree, specs, mesh, key=fs.key(0)))
    for leaves in ([placed[0]], [placed[1]], [placed[2]], [placed[1], placed[3]], placed):
        each = [sum(x.shards[r].nbytes for x in leaves) for r in range(mesh.size)]
        assert len(set(each)) > 1
        low, high = min(each), max(each)
        assert f"{low}–{high} B on each of 6 devices (data=3, model=2)" in show(leaves).text


def test_placed_leaves_show_their_mesh_and_tied_leaves_count_once():
    mesh = fs.make_mesh(data=2)
    w = fs.materialize(fs.init.zeros((5, 4)), P("data"), mesh, key=fs.key(0))
    check(
        show({"in": w, "out": w, "step": 3, "x": torch.zeros(2, dtype=torch.int64)}),
        """
                                    per device
        in    f32[5@data, 4]           32–48 B
        out   f32[5@data, 4]  = in
        step  3
        x     i64[2]                      16 B
        total  22 elements, 96 B; 48–64 B on each of 2 devices (data=2)
        """,
    )


def test_specs_and_mesh_replace_those_of_placed_leaves():
    w = fs.materialize({"w": fs.init.zeros((8, 4))}, P(), fs.make_mesh(data=2), key=fs.key(0))
    assert show(w, specs=P("x"), mesh={"x": 8}).text.splitlines()[1] == "w  f32[8@x, 4]        16 B"


def test_specs_alone_and_meshless_specs():
    check(
        show({"a": P("data"), "h": [P(), P(), P(..., "model")]}),
        """
        a          P('data')
        h
          0–1  ×2  P()
          2        P(..., 'model')
        """,
    )
    assert show({"w": fs.init.zeros((8, 4))}, specs=P("x")).text.splitlines()[0] == "w  f32[8@x, 4]  zeros  128 B"


def test_optimizer_states_are_counted_apart_from_parameters():
    params = {"w": fs.init.normal((4, 2)), "b": fs.init.zeros(2)}
    state = {"params": params, "opt": fs.optim.adamw(1e-3).init(params), "step": 7}
    total = show(state, specs=P(), mesh={"data": 2}).text.splitlines()[-1]
    assert total == "total  10 parameters, 40 B, and 21 other values (opt), 88 B; 128 B on each of 2 devices (data=2)"
    assert show(params).text.endswith("\ntotal  10 parameters, 40 B")
    assert show({"params": params, "step": 7}).text.endswith("\ntotal  10 parameters, 40 B")
    assert show({"params": params, "tied": params["w"]}).text.endswith("\ntotal  10 parameters, 40 B")
    _, tree = fs.defer(lambda: torch.nn.BatchNorm1d(3))
    assert show(tree).text.endswith("\ntotal  6 parameters, 24 B, and 7 other values (buffers), 32 B")


def test_only_floating_leaves_of_a_tree_are_counted_as_parameters():
    floats, ids = torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64)
    moments = fs.optim.adamw(1e-3).init({"w": floats})
    small = {"w": floats.to(torch.int8)}
    trees = {"parameters": [{"w": floats, "c": floats.to(torch.complex64)}, {"params": small}],
             "elements": [{"images": floats, "labels": ids}, moments, floats, ids, small]}  # fmt: skip
    for noun, each in trees.items():
        for tree in each:
            assert re.search(rf"total  \d+ {noun}, ", show(tree).text), show(tree)


def test_a_leaf_without_dims_shows_its_value_where_it_has_one():
    mesh = fs.make_mesh(data=2)
    state = fs.device_put({"count": torch.tensor(7), "lr": torch.tensor(0.1), "x": torch.ones(1)}, P(), mesh)
    table = """
                            per device
        count  i64[]   7           8 B
        lr     f32[]   0.1         4 B
        x      f32[1]              4 B
        total  3 elements, 16 B; 16 B on each of 2 devices (data=2)
        """
    check(show(state), table)
    assert ">value<" in show(state).html
    assert ">initializer<" in show({"w": fs.init.zeros(2), "count": torch.tensor(7)}).html
    fs.shard_map(lambda x: x + 1, mesh=mesh, donate=0, out_specs=P())(state["lr"])  # a donated leaf has none
    assert [line.split() for line in show(state).text.splitlines()[1:3]] == [
        ["count", "i64[]", "7", "8", "B"], ["lr", "f32[]", "4", "B"]]  # fmt: skip
    # equal numbers fold, others do not
    rows = show({"h": [{"n": torch.tensor(float(i > 2))} for i in range(4)]}).text.splitlines()
    assert [row.split()[0] for row in rows] == ["h", "0–2.n", "3.n", "total"]
    # on meta, fake, of a transform: no value, or not that of one example
    seen = [show([torch.tensor(1.0, device="meta")])]
    note = lambda x: seen.append(show([x])) or x  # noqa: E731
    torch.func.vmap(note)(torch.ones(3))
    torch.func.grad(note)(torch.ones(()))
    fs.check(fs.shard_map(note, mesh=mesh, in_specs=P(), out_specs=P()), torch.ones(()))
    assert len(seen) >= 4
    assert {view.text.splitlines()[0] for view in seen} == {"0  f32[]  4 B"}
    values = [torch.nn.Parameter(torch.tensor(2.5)), torch.tensor(True), torch.tensor(0.1, dtype=torch.bfloat16)]
    assert [line.split()[2] for line in show(values).text.splitlines()[:3]] == ["2.5", "True", "0.100097656"]


def test_bytes_per_device_are_a_number_too():
    tree, specs = {"w": fs.init.zeros((7, 5)), "k": torch.tensor(3)}, {"w": P("data"), "k": P()}
    assert show(tree, specs=specs, mesh={"data": 2}).per_device == 4 * 4 * 5 + 8
    assert show(tree, specs=specs, mesh={"data": 2}, against=P()).per_device == 4 * 4 * 5  # to rank 1, of 7 rows
    assert show(tree).per_device == 4 * 35 + 8
    placed = fs.device_put(torch.zeros(7), P("data"), fs.make_mesh(data=2))
    assert show(placed).per_device == 16
    assert show(placed, against=P()).per_device == 16
    assert show(fs.make_mesh(data=2)).per_device is show({}).per_device is show(P()).per_device is None


def test_equal_neighbours_are_folded():
    one, two = fs.init.zeros(2), fs.init.ones(2)

    def rows(tree, **options):
        return [line.split()[0] for line in show(tree, **options).text.splitlines()[:-1]]

    assert rows({"h": [fs.init.zeros(2) for _ in range(4)]}) == ["h.0–3"]
    assert rows({"h": [fs.init.zeros(2) for _ in range(4)]}, fold=False) == ["h", "0", "1", "2", "3"]
    assert rows({"h": [one, two]}) == ["h", "0", "1"]
    assert rows({"h": [fs.init.zeros(2), fs.init.zeros(2), two, fs.init.zeros(2)]}) == ["h", "0–1,3", "2"]
    # other names below, other numbers, no numbers
    assert rows({"h": [{"a": fs.init.zeros(2)}, {"b": fs.init.zeros(2)}]}) == ["h", "0.a", "1.b"]
    assert rows({"1": fs.init.zeros(2), "3": fs.init.zeros(2)}) == ["1,3"]
    assert rows({"a": fs.init.zeros(2), "b": fs.init.zeros(2)}) == ["a", "b"]
    # digits as keys, in the order of the numbers
    assert rows({str(i): fs.init.zeros(2) for i in sorted(range(12), key=str)}) == ["0–11"]
    periodic = [{"moe": [one] * 2} if i % 4 == 3 else two if i % 2 else one for i in range(16)]
    assert rows({"h": [fs.tree.map(lambda x: fs.init.full(2, x.init.value), x) for x in periodic]}) == [
        "h", "0,2,…,14", "1,5,9,13", "3,7,11,15.moe", "0–1"]  # fmt: skip
    skipped = {str(i): fs.init.zeros(2) for i in (10, 3, 0, 7)}  # modules without leaves have numbers too
    assert rows(skipped) == ["0,3,7,10"]
    assert "4 × 8 B" in show(skipped).text
    # nested folds: an only-child chain that would need two counts is not joined
    nested = [[fs.init.zeros(2) for _ in range(2)] for _ in range(3)]
    assert rows({"h": nested}) == ["h.0–2", "0–1"]
    assert "3 × 16 B" in show({"h": nested}).text
    assert "2 × 8 B" in show({"h": nested}).text


def test_containers():
    pair = namedtuple("pair", ["mu", "nu"])
    tree = {"z": pair(fs.init.zeros(2), fs.init.ones(2)), "none": None, "empty": {}, "a": (fs.init.zeros(3),)}
    check(
        show(tree),
        """
        z                   16 B
          0  f32[2]  zeros   8 B
          1  f32[2]  ones    8 B
        a.0  f32[3]  zeros  12 B
        total  7 parameters, 28 B
        """,
    )
    assert show({}).text == show(None).text == "(no leaves)"
    parsed(show({}))
    assert show("x" * 100).text == "'" + "x" * 58 + "…"


def test_show_reads_no_storage():
    tree = gpt(333)
    tree["huge"] = fs.init.zeros((1 << 40, 1 << 20))
    view = show(tree, specs=P(("data", "model")), mesh={"data": 512, "model": 8})
    assert "h.0–332  ×333" in view.text
    assert "4194304.0 TiB; 1024.0 TiB on each of 4096 devices (data=512, model=8)" in view.text


def test_work_is_linear_in_the_size_of_the_tree():
    def calls(n):
        seen = []
        tree = gpt(n)
        before = sys.getprofile()  # a coverage run's
        sys.setprofile(lambda _, event, __: seen.append(1) if event == "call" else None)
        try:
            show(tree, specs=P(("data", "model")), mesh={"data": 512, "model": 8})
        finally:
            sys.setprofile(before)
        return len(seen)

    calls(1)
    assert calls(200) - calls(100) < 1.2 * (calls(100) - calls(1))


# --- HTML ---------------------------------------------------------------------------------------------------


def test_html_contains_the_text():
    view = show(gpt(2), specs=SPECS, mesh=SIZES)
    parser = parsed(view)
    html_text = " ".join(" ".join(parser.text).split())
    for line in view.text.splitlines()[1:]:
        for word in line.split("  "):
            assert word.strip() in html_text
    assert [tag for tag, _ in parser.tags].count("details") == 2
    assert all("open" in attrs for tag, attrs in parser.tags if tag == "details")


def test_html_is_escaped():
    bad = "<script>alert('&')</script>"
    views = [
        show({bad: {bad: fs.init.zeros(2), "b": bad, "c": P(bad)}}),
        show({bad: fs.init.zeros(2)}, specs=P(bad), mesh={bad: 2}),
        layout((2, 2), P(bad), mesh={bad: 2}),
        show(fs.make_mesh(**{bad: 2})),
        show(fs.make_mesh(**{bad: 2, "m": 1})),
    ]
    for view in views:
        parser = parsed(view)
        assert "script" not in [tag for tag, _ in parser.tags]
        assert bad in "".join(parser.text)


# Declarations that JupyterLab's sanitizer was seen to keep in an untrusted notebook: its regular expressions know no
# `hsl()`, `inherit`, `ch` or `calc()`.
LENGTH = r"(0|-?[\d.]+(em|px|%))"
COLOUR = r"(transparent|rgba\(\d+, \d+, \d+, 0?\.?\d+\))"
KEPT = {
    r"width|height|min-width|max-width": rf"{LENGTH}|auto",
    r"padding|padding-left|margin|margin-right|border-spacing": rf"{LENGTH}( {LENGTH})*",
    r"border|border-top|outline": rf"none|\d+px (solid|dashed) {COLOUR}",
    r"background": COLOUR, r"box-shadow": rf"{COLOUR} {LENGTH} {LENGTH}(, {COLOUR} {LENGTH} {LENGTH})*",
    r"font": r"12px/1\.6 monospace", r"font-size": r"12px", r"font-weight": r"normal|bold", r"line-height": r"0",
    r"text-align": r"left|right|center", r"vertical-align": r"top|middle", r"white-space": r"nowrap|pre|pre-wrap",
    r"word-wrap": r"break-word", r"table-layout": r"fixed|auto", r"border-collapse": r"collapse|separate",
    r"display": r"inline-table|inline-block", r"float": r"left", r"overflow": r"hidden", r"overflow-x": r"auto",
    r"cursor": r"pointer", r"list-style-position": r"outside",
}  # fmt: skip
ATTRIBUTES = {"style", "title", "align", "colspan", "open"}


def declarations(html):
    for style in re.findall(r'style="([^"]*)"', html):
        for declaration in style.split(";"):
            if declaration.strip():
                name, _, value = declaration.partition(":")
                yield name.strip(), value.strip()


@functools.cache
def displays():
    mesh = fs.make_mesh(data=2, model=4)
    step = fs.shard_map(lambda x: fs.psum(x.sum(), "data"), mesh=mesh, in_specs=(P("data"),), out_specs=P())
    with fs.recording() as log:
        step(torch.ones(4, 2))
    return {
        "tree": show(gpt(2), specs=SPECS, mesh=SIZES),
        "closed": show(gpt(50), fold=False),
        "move": show(gpt(2), specs=SPECS, mesh=SIZES, against=P("data")),
        "mesh": mesh,
        "replicas": fs.device_put(torch.zeros(5, 8), P("model"), mesh),
        "host": fs.device_put(torch.zeros(5, 8), fs.on_host(P("model")), mesh),
        "number": fs.device_put(torch.tensor(2.5), P(), mesh),
        "stripes": layout((4, 4), P("a"), mesh={"a": 2, "b": 64}),
        "two layouts": show(fs.init.zeros((4, 4)), specs=P("data"), mesh=SIZES, against=P("model")),
        "spec": fs.on_host(P(("data", "model"), ..., "x")),
        "deferred": fs.init.zeros(3),
        "checked": fs.check(step, torch.ones(4, 2)),
        "recording": log,
        "verified": fs.verify(step, torch.ones(4, 2)),
        "a wide text": Wide(),
    }


class Wide:
    def _repr_html_(self):
        return page("<title>", table([("x" * 500, bars({"a&b": 0.5, "c": 0.9}))], head=("", "share")))


def test_html_needs_nothing_that_an_untrusted_notebook_removes():
    for name, value in displays().items():
        html = value._repr_html_()
        parsed(value)
        assert not re.search(r"<(style|script|svg|img|link)|http|url\(", html), name
        attributes = set(re.findall(r'([\w-]+)="', re.sub(r'"[^"]*"', '""', html)))
        assert attributes <= ATTRIBUTES, name
        for prop, text in declarations(html):
            allowed = [v for k, v in KEPT.items() if re.fullmatch(k, prop)]
            assert allowed, (name, prop)
            assert re.fullmatch(allowed[0], text), (name, prop, text)


def test_columns_of_nested_tables_have_the_same_widths():
    html = show(gpt(3), fold=False, specs=SPECS, mesh=SIZES).html
    tables = re.findall(r'<table style="([^"]*)"><tr[^>]*>(.*?)</tr>', html)
    assert len(tables) > 10
    assert len(set(tables)) == 1
    assert "width: 100%; table-layout: fixed" in tables[0][0]
    shares = [float(x) for x in re.findall(r"width: ([\d.]+)%", tables[0][1])]
    assert len(shares) == 5
    assert sum(shares) == pytest.approx(100, abs=0.01)


@pytest.mark.parametrize(
    ("row", "is_elastic"),
    [(("a scatter", "12.3 MiB", "two words and others"), True), (("reduce_scatter", "1", "of all"), False)],
)
def test_a_narrow_page_scrolls_before_a_number_or_a_word_breaks(row, is_elastic):
    style = str(table([row], align="lrl", head=("op", "", "line")))
    least, most = (float(x) for x in re.search(r"min-width: ([\d.]+)em; max-width: ([\d.]+)em", style).groups())
    shares = [float(x) / 100 for x in re.findall(r"width: ([\d.]+)%", style)[:3]]
    words = [max(map(len, texts)) for texts in (row[0].split(), [row[1]], row[2].split())]
    assert all(least * share >= 0.6 * n for share, n in zip(shares, words, strict=True))
    assert (least < most) == is_elastic


def test_groups_are_open_as_far_as_40_rows_are_seen():
    def states(tree):
        return [("open" in attrs) for tag, attrs in parsed(show(tree, fold=False)).tags if tag == "details"]

    assert states(gpt(3)) == [True] * 7
    assert states(gpt(19)) == [True, *[False] * 38]  # 3 + 19 rows, and 38 more a level below
    assert states(gpt(50)) == [False] * 101


def test_bars_are_shares_of_all_bytes():
    html = show({"a": fs.init.zeros(60), "h": [fs.init.zeros(10) for _ in range(4)]}, mesh={"x": 2}).html
    assert re.findall(r'title="([\d.]+ %)" style="float: left; width: ([\d.]+)%', html) == [
        ("60 %", "60.00"), ("40 %", "40.00")]  # fmt: skip
    over = bars({"a": 1, "b": 3, "none": 0})  # more than the cell: in proportion
    assert re.findall(r"width: ([\d.]+)%", over) == ["25.00", "75.00"]


def test_dotted_names_of_modules_are_groups_that_fold():
    flat = {f"{i}.{name}": fs.init.zeros(2) for i in range(3) for name in ("norm.scale", "w")}
    check(
        show(
            {
                **{f"h.{k}": v for k, v in flat.items()},
                "head.w": fs.init.ones(2),
                "h": fs.init.zeros(5),
                ".x": 1,
                "a..b": 2,
            }
        ),
        """
        h.0–2  ×3                    3 × 16 B
          norm.scale  f32[2]  zeros       8 B
          w           f32[2]  zeros       8 B
        head.w        f32[2]  ones        8 B
        h             f32[5]  zeros      20 B
        .x            1
        a..b          2
        total  19 parameters, 76 B
        """,
    )
    _, tree = fs.defer(lambda: torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(12)]))
    assert "0–11  ×12" in show(tree).text
    assert len(show(tree, fold=False).text.splitlines()) == 1 + 12 * 3 + 1
    # numbers of flat names in their order, and periodic kinds once each
    kinds = {f"h.{i}.{'ab'[i % 2]}.w": fs.init.zeros(2) for i in reversed(range(32))}
    assert [line.split()[0] for line in show(kinds).text.splitlines()[:-1]] == ["h", "0,2,…,30.a.w", "1,3,…,31.b.w"]


# --- pictures -----------------------------------------------------------------------------------------------


def test_layout_of_replicas_and_a_vector_with_empty_parts():
    check(
        layout((6, 2), P("model"), mesh={"data": 2, "model": 2}),
        """
        [6@model, 2] on data=2, model=2
               0:2
             ┌─────┐
         0:3 │ 0 2 │
             ├─────┤
         3:6 │ 1 3 │
             └─────┘
        """,
    )
    check(
        layout((5,), P("data"), mesh={"data": 4}),
        """
        [5@data] on data=4
            0:2   2:4   4:5
          ┌─────┬─────┬─────┐
          │  0  │  1  │  2  │
          └─────┴─────┴─────┘
        empty on 3
        """,
    )
    check(
        layout((), P(), mesh=SIZES),
        """
        [] on data=2, model=4
          ┌─────┐
          │ 0–7 │
          └─────┘
        """,
    )
    assert layout((0, 2), P("data"), mesh=SIZES).text == "[0@data, 2] on data=2, model=4\nempty on 0–7"


def test_layout_of_more_dims_shows_those_that_are_split():
    check(
        layout((4, 6, 8), P("data", None, "model"), mesh={"data": 2, "model": 2}),
        """
        [4@data, 6, 8@model] on data=2, model=2
               0:4   4:8
             ┌─────┬─────┐
         0:2 │  0  │  1  │
             ├─────┼─────┤
         2:4 │  2  │  3  │
             └─────┴─────┘
        down: dim 0    across: dim 2
        """,
    )
    three = layout((4, 6, 8), P("a", "b", "c"), mesh={"a": 2, "b": 2, "c": 2}).text
    assert " 2:4, 0:3 │  4  │  5  │" in three
    assert three.endswith("down: dim 0, 1    across: dim 2")
    four = layout((2, 3, 4, 5), P("a", "b", "c", "d"), mesh={"a": 2, "b": 2, "c": 2, "d": 2}).text
    assert four.splitlines()[3].split() == ["0:1,", "0:2", "│", "0", "│", "1", "│", "2", "│", "3", "│"]
    assert four.endswith("down: dim 0, 1    across: dim 2, 3")


SPLITS = [P("b", "a"), P("a", "b"), P(("a", "b")), P(("b", "a")), P(None, ("b", "a")), P()]


@pytest.mark.parametrize("spec", SPLITS, ids=repr)
def test_layout_shows_each_rank_in_the_cell_of_its_box(spec):
    mesh = fs.make_mesh(a=3, b=2)
    x = fs.device_put(torch.zeros(7, 11), spec, mesh)
    boxes = [box_bounds(x.box(r)) for r in range(6)]
    assert part_ranks((7, 11), spec, mesh.axes) == {at: [r for r in range(6) if boxes[r] == at] for at in boxes}
    lines = show(x).text.splitlines()
    columns = lines[1].split()
    empty = [r for r in range(6) if 0 in box_shape(x.box(r))]
    assert [line for line in lines if "empty" in line] == [f"empty on {format_runs(empty, most=8)}"] * bool(empty)
    for (start, stop), (left, right) in {boxes[r] for r in range(6) if r not in empty}:
        (row,) = [line for line in lines if "│" in line and line.split()[0] == f"{start}:{stop}"]
        cell = row.split("│")[1:-1][columns.index(f"{left}:{right}")].strip()
        assert cell == format_runs([r for r in range(6) if boxes[r] == ((start, stop), (left, right))])


def test_large_layouts_are_abbreviated():
    view = layout((4096, 4096), P("data", "model"), mesh={"data": 64, "model": 64})
    assert len(view.text.splitlines()) == 2 + 2 * 16 + 1
    assert "⋮" in view.text
    assert "…" in view.text
    parsed(view)
    spread = layout((64,), P("model"), mesh={"data": 20, "model": 2}).text
    assert "0 2 4 6 8 10 … 38" in spread


def test_a_mesh_and_a_described_leaf():
    check(
        show(fs.make_mesh(a=2, b=1, c=3)),
        """
        Mesh(a=2, b=1, c=3; simulated, 6 x cpu)
                    c=0   c=1   c=2
                  ┌─────┬─────┬─────┐
         a=0, b=0 │  0  │  1  │  2  │
                  ├─────┼─────┼─────┤
         a=1, b=0 │  3  │  4  │  5  │
                  └─────┴─────┴─────┘
        """,
    )
    assert show(fs.init.zeros(4), specs=P("a"), mesh={"a": 2}).text.splitlines()[0] == "f32[4@a] on a=2"
    assert show(fs.init.zeros(4)).text == "f32[4]  zeros  16 B\ntotal  4 elements, 16 B"


def blocks(html):
    """(devices, background) of each cell that is coloured."""
    cells = re.findall(r'<td align="center" title="([^"]*)" style="[^"]*background: ([^;"]*)[^"]*">([^<]*)</td>', html)
    return [(text.strip("[]"), background, title) for title, background, text in cells]


def test_a_block_has_one_colour_by_its_position_and_its_copies_are_a_stack():
    mesh = fs.make_mesh(data=2, model=4)
    for spec, n in ((P(), 1), (P("data"), 2), (P("model"), 4), (P("model", "data"), 8), (P(("model", "data")), 8)):
        html = fs.device_put(torch.zeros(8, 8), spec, mesh)._repr_html_()
        assert [colour for _, colour, _ in blocks(html)] == [rgba(i) for i in range(n)]
        sheets = [shadow.count("rgba") for shadow in re.findall(r"box-shadow: ([^;\"]*)", html)]
        assert sheets == {1: [2], 2: [2, 2], 4: [1] * 4, 8: []}[n]  # under the block, of 8, 4, 2 copies
    assert [colour for _, colour, _ in blocks(mesh._repr_html_())] == [rgba(i) for i in range(8)]
    assert len({rgba(r) for r in range(64)}) == 64


def test_cells_that_stand_for_others_have_no_colour():
    html = layout((64, 64), P("a", "b"), mesh={"a": 32, "b": 32}).html
    coloured = blocks(html)
    assert len(coloured) == 15 * 15
    assert not [text for text, *_ in coloured if "…" in text or "⋮" in text]
    assert coloured[-1][0] == "1023"
    assert len(re.findall(r"<td[^>]*>…</td>", html)) == 16 + 15


def test_hover_says_the_slices_of_each_rank_and_its_place():
    mesh = fs.make_mesh(data=2, model=2)
    x = fs.device_put(torch.zeros(5, 8), P("model"), mesh)
    said = [title for *_, title in blocks(x._repr_html_())]
    assert [title.splitlines() for title in said] == [
        [f"rank {r} (data={r // 2}, model={r % 2}): [{'3:5' if r % 2 else '0:3'}, 0:8], {64 if r % 2 else 96} B"
         for r in (at, at + 2)] for at in (0, 1)
    ]  # fmt: skip
    many = blocks(layout((4,), P("a"), mesh={"a": 2, "b": 64}).html)
    assert len(many) == 2
    assert many[0][2] == "rank 0 (a=0, b=0): [0:2], and the same on ranks 0–63"


def test_blocks_are_drawn_in_proportion():
    html = layout((5, 8), P("data"), mesh={"data": 2}).html
    assert re.findall(r"height: ([\d.]+)em", html) == ["4.8", "3.2"]
    assert re.findall(r"; width: ([\d.]+)em", html) == ["24.0", "24.0"]
    assert "dashed" not in html
    assert "dashed" in layout((5, 8), fs.on_host(P("data")), mesh={"data": 2}).html


SPEC_DRAWINGS = {
    "copies": (
        (P("model"), (3, 2), {"data": 2, "model": 2}),
        """
        P('model'): [3@model, 2] on data=2, model=2
                  0:2
             ┌───────────┐
             │ ranks 0 2 │
         0:2 │    0 1    │
             │    2 3    │
             ├───────────┤
         2:3 │ ranks 1 3 │
             │    4 5    │
             └───────────┘
        dim 0 is split over model
        each block has a copy on every rank of data
        """,
    ),
    "no dims": (
        (P(), (), {"data": 2}),
        """
        P(): [] on data=2
          ┌───────────┐
          │ ranks 0–1 │
          │     0     │
          └───────────┘
        no dim is split
        each block has a copy on every rank of data
        """,
    ),
    "too many numbers": (
        (P(("b", "a")), (32,), {"a": 2, "b": 1}),
        """
        P(('b', 'a')): [32@b+a] on a=2, b=1
             0:16   16:32
          ┌───────┬───────┐
          │   0   │   1   │
          └───────┴───────┘
        dim 0 is split over b and a
        """,
    ),
}


@pytest.mark.parametrize(("arguments", "text"), SPEC_DRAWINGS.values(), ids=SPEC_DRAWINGS)
def test_a_spec_is_drawn_without_a_tensor(arguments, text):
    spec, shape, mesh = arguments
    check(show(spec, shape, mesh=mesh), text)


def test_numbers_in_blocks_are_those_of_the_parts():
    mesh = fs.make_mesh(a=2, b=3)
    for spec in (P("a", "b"), P(None, ("b", "a")), P("b")):
        x = fs.device_put(torch.arange(77).reshape(7, 11), spec, mesh)
        for cell in itertools.chain(*show(spec, (7, 11), mesh=mesh).blocks):
            for r in cell.devices:
                assert [[int(n) for n in line.split()] for line in cell.values] == x.shards[r].tolist()


# --- two layouts --------------------------------------------------------------------------------------------


def test_bytes_received_are_those_of_reshard():
    """Compare with the parts that reshard copies from other ranks, for every pair of specs, also uneven ones."""
    mesh = fs.make_mesh(a=2, b=3)
    specs = [
        P(),
        P("a"),
        P("b"),
        P(None, "a"),
        P("a", "b"),
        P("b", "a"),
        P(("a", "b")),
        P(("b", "a")),
        P(None, ("a", "b")),
    ]
    for old, new in itertools.product(specs, repeat=2):
        x = fs.device_put(torch.zeros(7, 5), old, mesh)
        target = fs.device_put(torch.zeros(7, 5), new, mesh)
        each = [sum(4 * math.prod(box_shape(c)) for source, c in _sources(x, target.box(r), r) if source != r)
                for r in range(6)]  # fmt: skip
        view = show({"x": x}, against=new)
        span = f"{min(each)}–{max(each)} B" if min(each) < max(each) else f"{max(each)} B"
        assert view.text.splitlines()[1].endswith(f"  {span}"), (old, new)
        assert f"moves  {size(sum(each))}; {span} to each of 6 devices (a=2, b=3)" == view.text.splitlines()[2]


COLLECTIVES = {  # a region that moves P(...) to P(...) with the collectives that are named
    "all_gather a": (P("a"), P(), lambda x: fs.all_gather(x, "a", dim=0, to="invariant")),
    "slice a": (P(), P("a"), lambda x: fs.pslice(x, "a", dim=0)),
    "all_to_all a": (P("a", "b"), P(None, ("b", "a")), lambda x: fs.all_to_all(x, "a", split=1, concat=0)),
    "slice b, all_gather a": (
        P("a"),
        P(None, "b"),
        lambda x: fs.all_gather(fs.pslice(x, "b", dim=1), "a", dim=0, to="invariant"),
    ),
    "slice b, all_to_all a": (
        P("a"),
        P(None, ("b", "a")),
        lambda x: fs.all_to_all(fs.pslice(x, "b", dim=1), "a", split=1, concat=0),
    ),
    "all_gather b": (P(("a", "b")), P("a"), lambda x: fs.all_gather(x, "b", dim=0, to="invariant")),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_beside_a_move_have_its_effect_and_send_its_bytes(name):
    old, new, f = COLLECTIVES[name]
    mesh = fs.make_mesh(a=2, b=2)
    x = torch.arange(64.0).reshape(8, 8)
    placed = fs.device_put(x, old, mesh)
    view = show({"x": placed}, against=new)
    assert view.text.splitlines()[1].split("]  ")[1].split("   ")[0] == name
    with fs.recording() as log:
        out = fs.shard_map(f, mesh=mesh, in_specs=(old,), out_specs=new)(placed)
    assert torch.equal(fs.device_get(out), x)
    assert view.text.splitlines()[2].startswith(f"moves  {size(sum(t.sent for t in log))};")


def test_moves_of_a_tree_and_of_one_leaf():
    tree = {"h": [{"w": fs.init.zeros((8, 6))} for _ in range(3)], "b": fs.init.zeros(4), "n": 3, "k": fs.init.ones(8)}
    specs = {"h": P("data"), "b": P("data"), "n": P(), "k": fs.on_host(P("data"))}
    check(
        show(
            tree,
            specs=specs,
            mesh={"data": 2},
            against={"h": P(None, "data"), "b": P("data"), "n": P(), "k": P("data")},
        ),
        """
                                                                          received per device
        h.0–2.w  ×3  f32[8@data, 6] → f32[8, 6@data]  all_to_all data                3 × 48 B
        b            f32[4@data]                      stays                               0 B
        n            3
        k            f32<host>[8@data] → f32[8@data]  copy to the device                  0 B
        moves  288 B; 144 B to each of 2 devices (data=2)
        """,
    )
    one = show(fs.init.zeros((4, 2)), specs=P("data"), mesh={"data": 2}, against=P())
    assert one.text.splitlines()[0] == "f32[4@data, 2] on data=2"
    assert "all_gather data: moves  32 B; 16 B to each of 2 devices (data=2)" in one.text
    assert one.text.splitlines()[-1].strip() == "└─────┘"
    swapped = show({"w": fs.init.zeros((8, 6))}, specs=P(("a", "b")), mesh={"a": 2, "b": 2}, against=P(("b", "a")))
    assert "exchange a+b" in swapped.text


# --- reprs --------------------------------------------------------------------------------------------------


def test_a_mesh_of_processes_marks_this_one():
    mesh = fs.make_mesh(data=2, model=2)
    assert "[" not in show(mesh).text
    assert "font-weight: bold" not in mesh._repr_html_()
    mesh.kind, mesh.ranks = "process", (2,)
    assert "│   [2]   │    3    │" in show(mesh).text
    marked = [text for text, _, title in blocks(mesh._repr_html_()) if "this process" in title]
    assert marked == ["2"]
    assert mesh._repr_html_().count("font-weight: bold") == 1


def test_reprs_contain_the_text():
    for name, value in displays().items():
        words = [] if name == "a wide text" else re.findall(r"[\w@]+", repr(value).splitlines()[0])
        text = " ".join(parsed(value).text)
        assert not [word for word in words if word not in text], name


# --- errors -------------------------------------------------------------------------------------------------


def placed_on(**axes):
    return fs.device_put(torch.zeros(2), P(), fs.make_mesh(**axes))


ERRORS = {
    "two leaves that do not fit": (
        lambda: show({"a": fs.init.zeros(2), "b": fs.init.zeros((3, 4))}, specs=P("x"), mesh={"y": 2}),
        (
            "show: tree['a']: the mesh has no axis 'x'\n"
            "  shape  [2]    spec  P('x')    mesh  y=2\n"
            "  fix: use one of ['y']\n"
            "  the same for tree['b']"
        ),
    ),
    "two meshes": (
        lambda: show([placed_on(a=2), placed_on(b=3)]),
        "show: leaves on different meshes\n  a=2\n  b=3\n  fix: pass mesh=, or show them one by one",
    ),
    "specs of another tree": (
        lambda: show({"a": fs.init.zeros(2)}, specs={"b": P()}),
        (
            "specs: not a prefix of the tree it describes\n"
            "  missing ['a']    extra ['b']\n  fix: give every key a P, or one P for the whole subtree"
        ),
    ),
    "against without a mesh": (
        lambda: show({"a": fs.init.zeros(2)}, specs=P("x"), against=P()),
        'show: against= needs a mesh\n  fix: pass mesh=, or axis sizes such as mesh={"data": 64}',
    ),
    **{
        name: (
            call,
            (
                "show: with shape=, tree must be one spec, and mesh a Mesh or its axis sizes\n"
                '  fix: fs.show(P("data", "model"), (4, 8), mesh={"data": 2, "model": 4})'
            ),
        )
        for name, call in {
            "a shape for a tree": lambda: show({"w": P()}, (2, 2), mesh={"x": 2}),
            "a shape without a mesh": lambda: show(P("x"), (2, 2)),
        }.items()
    },
    "a spec that does not fit its shape": (
        lambda: show(P("x"), (), mesh={"x": 2}),
        (
            "show: tree: the spec is longer than the shape\n  shape  []    spec  P('x')    mesh  x=2\n  1 > 0 dims\n"
            "  fix: drop 1 of its entries"
        ),
    ),
    "against specs that do not fit": (
        lambda: show({"a": fs.init.zeros(2)}, specs=P("y"), mesh={"y": 2}, against=P("x")),
        (
            "show: against: tree['a']: the mesh has no axis 'x'\n  shape  [2]    spec  P('x')    mesh  y=2\n"
            "  fix: use one of ['y']"
        ),
    ),
}


@pytest.mark.parametrize(("call", "text"), ERRORS.values(), ids=ERRORS.keys())
def test_error_texts(call, text):
    assert error_text(call) == text
