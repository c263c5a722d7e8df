import sys
from collections import namedtuple
from html.parser import HTMLParser
from textwrap import dedent

import pytest
import torch

import fshard as fs
from fshard import P
from fshard.show import size
from fshard.show.table import show
from fshard.spec import describe, draw
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
    return draw(describe(torch.float32, shape, spec).removeprefix("f32"), shape, spec, mesh)


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


def test_table_of_a_deferred_tree():
    check(
        show(gpt(3)),
        """
        wte        f32[50, 64]   normal()              12.5 KiB
        h.0–2  ×3                                  3 × 48.5 KiB
          ln                                              512 B
            scale  f32[64]       ones                     256 B
            bias   f32[64]       zeros                    256 B
          qkv      f32[64, 192]  normal(std=0.02)      48.0 KiB
        head       f32[64, 50]   zeros                 12.5 KiB
        total  43,648 parameters, 170.5 KiB
        """,
    )


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
        total  22 parameters, 96 B; 48–64 B on each of 2 devices (data=2)
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


def test_size():
    got = [size(n) for n in (0, 1023, 1024, 1536, 2**20, 3 * 2**30, 5 * 2**40, 2**60)]
    assert got == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "3.0 GiB", "5.0 TiB", "1048576.0 TiB"]


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


def test_html_of_a_large_tree_is_collapsed():
    parser = parsed(show(gpt(50), fold=False))
    details = [attrs for tag, attrs in parser.tags if tag == "details"]
    assert len(details) == 101
    assert all("open" not in attrs for attrs in details)


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


def test_html_sets_no_colours_of_text_or_page():
    for view in (show(gpt(1)), layout((2, 2), P("a"), mesh={"a": 2})):
        assert "color: inherit" in view.html
        assert "#" not in view.html
        assert "http" not in view.html


# --- pictures -----------------------------------------------------------------------------------------------


def test_layout_of_a_matrix():
    check(
        layout((5, 8), P("data", "model"), mesh=SIZES),
        """
        [5@data, 8@model] on data=2, model=4
               0:2   2:4   4:6   6:8
             ┌─────┬─────┬─────┬─────┐
         0:3 │  0  │  1  │  2  │  3  │
             ├─────┼─────┼─────┼─────┤
         3:5 │  4  │  5  │  6  │  7  │
             └─────┴─────┴─────┴─────┘
        """,
    )


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


def test_layout_shows_each_rank_in_the_cell_of_its_box():
    mesh = fs.make_mesh(a=3, b=2)
    x = fs.device_put(torch.zeros(7, 5), P("b", "a"), mesh)
    lines = show(x).text.splitlines()
    assert lines[0] == "f32[7@b, 5@a] on a=3, b=2"
    columns = lines[1].split()
    for rank in range(6):
        down, across = (f"{s.start}:{s.stop}" for s in x.box(rank))
        (row,) = [line for line in lines if line.startswith(f" {down} ")]
        assert row.split("│")[1:-1][columns.index(across)].strip() == str(rank)


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
    assert show(fs.init.zeros(4)).text == "f32[4]  zeros  16 B\ntotal  4 parameters, 16 B"


# --- errors -------------------------------------------------------------------------------------------------


def placed_on(**axes):
    return fs.device_put(torch.zeros(2), P(), fs.make_mesh(**axes))


ERRORS = {
    "two leaves that do not fit": (
        lambda: show({"a": fs.init.zeros(2), "b": fs.init.zeros((3, 4))}, specs=P("x"), mesh={"y": 2}),
        (
            "2 problems\n"
            "show: tree['a']: the mesh has no axis 'x'\n"
            "  shape  [2]    spec  P('x')    mesh  y=2\n"
            "  fix: use one of ['y']\n"
            "show: tree['b']: the mesh has no axis 'x'\n"
            "  shape  [3, 4]    spec  P('x')    mesh  y=2\n"
            "  fix: use one of ['y']"
        ),
    ),
    "two meshes": (
        lambda: show([placed_on(a=2), placed_on(b=3)]),
        "show: leaves on different meshes\n  a=2\n  b=3\n  fix: pass mesh=, or show them one by one",
    ),
    "specs of another tree": (
        lambda: show({"a": fs.init.zeros(2)}, specs={"b": P()}),
        (
            "specs: not a prefix of the tree it describes\n  got  dict    expected  dict\n"
            "  missing ['a']    extra ['b']\n  fix: give every key a P, or one P for the whole subtree"
        ),
    ),
    "layout": (
        lambda: layout((2,), P("x"), mesh={"y": 2}),
        ("layout: the mesh has no axis 'x'\n  shape  [2]    spec  P('x')    mesh  y=2\n  fix: use one of ['y']"),
    ),
}


@pytest.mark.parametrize(("call", "text"), ERRORS.values(), ids=ERRORS.keys())
def test_error_texts(call, text):
    assert error_text(call) == text
