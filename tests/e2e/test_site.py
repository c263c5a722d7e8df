"""The site opens from disk in a real browser: its menu, its search, and every page on a narrow and a wide window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import build
from tests.lib import browser
from tests.lib.browser import Browser

pytestmark = pytest.mark.slow
TOO_WIDE = """(() => {
  const right = document.documentElement.clientWidth + 1
  const found = [...document.querySelectorAll('.md-content :is(table, img, h1, h2, h3, pre)')].filter(e =>
    e.getBoundingClientRect().right > right)
  const scroll = [...document.querySelectorAll('.md-content :is(div, pre, code)')].filter(e =>
    ['auto', 'scroll'].includes(getComputedStyle(e).overflowX) && e.scrollWidth > e.clientWidth + 1)
  return [...[...found, ...scroll].map(e => e.tagName + ' ' + e.textContent.slice(0, 40)),
          ...document.documentElement.scrollWidth > right ? ['the page'] : []]
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    build.build(folder)
    return folder


@pytest.fixture
def page(site: Path) -> Iterator[Browser]:
    path = browser.find()
    if path is None:
        pytest.skip("no browser is installed")
    with Browser(path) as page:
        page.resize(1400)
        page.open((site / "index.html").as_uri())
        yield page
        assert page.errors == []  # such as a file that is not on this disk


def click(page: Browser, selector: str, text: str) -> None:
    """Click the first element with a text, and wait for the page that it opens."""
    page.run("window.isOld = true")
    assert page.run(f"""(() => {{
      const found = [...document.querySelectorAll({selector!r})].find(e => e.textContent.trim() == {text!r})
      found?.click()
      return Boolean(found)
    }})()"""), (selector, text)  # fmt: skip
    page.wait_for("!window.isOld && document.readyState == 'complete'")


def heading(page: Browser) -> str:
    return str(page.run("document.querySelector('h1').firstChild.textContent"))


def test_menu_and_links_open_pages(page: Browser) -> None:
    assert heading(page) == "fshard"
    click(page, ".md-tabs a", "Guides")
    click(page, ".md-sidebar--primary a", "Every collective, before and after")
    assert page.run("[...document.querySelectorAll('.md-content img')].every(i => i.naturalWidth > 0)")
    click(page, ".md-tabs a", "API")
    click(page, ".md-content td a", "planning")
    assert heading(page) == "planning"
    assert page.run("document.querySelector('.md-content table').textContent.includes('fs.plot')")
    click(page, ".md-tabs a", "Notebooks")
    assert heading(page) == build.title(build.ROOT / "notebooks" / "1-shard-a-matrix.ipynb")


def test_search_finds_a_function_without_a_server(page: Browser) -> None:
    page.run("document.querySelector('label[for=__search]').click()")
    page.run("""(() => {
      const field = document.querySelector('.md-search__input')
      field.focus()
      field.value = 'psum_scatter'
      field.dispatchEvent(new Event('input', {bubbles: true}))
      field.dispatchEvent(new Event('keyup', {bubbles: true}))
    })()""")
    found = page.wait_for("[...document.querySelectorAll('.md-search-result__link')].map(a => a.href).join(' ')")
    assert "api/core.html" in found


@pytest.mark.parametrize("width", [390, 800])
def test_nothing_is_wider_than_the_window(page: Browser, site: Path, width: int) -> None:
    page.resize(width)
    wide = {}
    for file in sorted(site.rglob("*.html")):
        page.open(file.as_uri())
        if found := page.run(TOO_WIDE):
            wide[str(file.relative_to(site))] = found
    assert wide == {}
