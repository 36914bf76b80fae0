"""The page in the Chromium of the distribution: what a person sees, at each width and scheme."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from kept_evidence import ROOT, imbalance, read
from traces import two_rounds

from kdtree_engine.profiling.summary import profile
from phases.checkout import Checkout
from phases.profile_table import as_json
from phases.reporting.gather import gather
from phases.reporting.page import as_html

CHROMIUM = shutil.which("chromium")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium (apt-get install chromium)"),
    pytest.mark.xdist_group("browser"),
]

WIDTHS, SCHEMES = (360, 768, 1440), ("light", "dark")

TIMES = {"p50": 0.0123, "p99": 1.234}
POINT = {
    **{"server": "kdtree_mla-9", "length": 16384, "concurrency": 16, "right": True, "answers": 512},
    **{"answers_judged": 12, "answers_not_judged": {"are of other prompts": 500}},
    **{"tokens_per_second": 12345.6, "first_token_seconds": TIMES},
    **{"inter_token_seconds": TIMES, "chunk_gap_seconds": TIMES},
}
LOAD = {"version": 1, "kind": "load", "right": True, "points": [POINT, {**POINT, "right": False}]}

# Every element with text of its own that is to be seen, with its colour and what is behind it.
CONTRASTS = """() => {
  const channels = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const luminance = ([r, g, b]) => [r, g, b]
    .map(v => v / 255)
    .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
  const behind = element => {
    for (let one = element; one; one = one.parentElement) {
      const colour = channels(getComputedStyle(one).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const ratio = (a, b) => {
    const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const found = {text: [], marks: []};
  for (const element of document.body.querySelectorAll('*')) {
    if (!element.checkVisibility() || element.matches('title, desc')) continue;
    const style = getComputedStyle(element);
    const inSvg = element instanceof SVGElement;
    const own = [...element.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
    if (own) {
      const colour = channels(inSvg ? style.fill : style.color);
      found.text.push([ratio(colour, behind(element)), element.textContent.slice(0, 40)]);
    }
    if (inSvg && element.matches('.bar, .mark, .roof, .line, .dot')) {
      const paint = element.matches('.roof, .line') ? style.stroke : style.fill;
      found.marks.push([ratio(channels(paint), behind(element)), element.getAttribute('class')]);
    }
  }
  return found;
}"""

# Text of drawings that lies on other text of the same drawing, or beyond its edge.
COLLISIONS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll('svg')) {
    if (!svg.checkVisibility()) continue;
    const frame = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll('text')].map(t => [t, t.getBoundingClientRect()]);
    for (const [at, [text, a]] of boxes.entries()) {
      const inside = a.left >= frame.left - 1 && a.right <= frame.right + 1;
      if (!inside) found.push(`out: ${text.textContent}`);
      if (text.hasAttribute('transform')) continue;
      for (const [other, b] of boxes.slice(at + 1)) {
        if (other.hasAttribute('transform')) continue;
        const across = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const down = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (across > 1 && down > 3) found.push(`${text.textContent} / ${other.textContent}`);
      }
    }
  }
  return found;
}"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The report of what the repository keeps, of profiles before and after, and of a load."""
    folder = tmp_path_factory.mktemp("report")
    shutil.copytree(ROOT / "plans/evidence", folder / "evidence")
    before = profile([two_rounds(reduce_us=40).write(folder / "before.json")])
    after = profile([two_rounds().write(folder / "after.json")])
    (folder / "evidence/profile").mkdir(exist_ok=True)
    for name, document in (("pair", as_json(after, before)), ("alone", as_json(after))):
        (folder / f"evidence/profile/{name}.json").write_text(json.dumps(document))
    (folder / "evidence/serve/load.json").write_text(json.dumps(LOAD))
    kept = read(folder / "evidence")
    report = gather(kept, Checkout(ROOT, folder / "state"), imbalance)
    path = folder / "report.html"
    path.write_text(as_html(report), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


class Opened:
    """The page in one window, with what it asked for and said."""

    def __init__(self, browser: Any, file: pathlib.Path, width: int, scheme: str) -> None:
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.requests: list[str] = []
        self.said: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.goto(file.as_uri())

    def unfold(self) -> None:
        self.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")


@pytest.fixture(params=[(width, scheme) for width in WIDTHS for scheme in SCHEMES], ids=str)
def opened(request: pytest.FixtureRequest, browser: Any, file: pathlib.Path) -> Iterator[Opened]:
    one = Opened(browser, file, *request.param)
    yield one
    one.page.close()


def test_it_fits_the_window_loads_nothing_and_says_nothing(
    opened: Opened, file: pathlib.Path
) -> None:
    for _ in range(2):
        wide, window = opened.page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide <= window
        opened.unfold()
    assert opened.requests == [file.as_uri()]
    assert opened.said == []


def test_all_text_and_marks_stand_out_from_what_is_behind_them(opened: Opened) -> None:
    opened.unfold()
    found = opened.page.evaluate(CONTRASTS)
    assert len(found["text"]) > 500
    assert [one for one in found["text"] if one[0] < 4.5] == []
    assert len(found["marks"]) > 50
    assert [one for one in found["marks"] if one[0] < 3.0] == []


def test_no_label_of_a_drawing_lies_on_another_or_beyond_the_edge(opened: Opened) -> None:
    assert opened.page.evaluate(COLLISIONS) == []


def test_there_is_something_to_see_in_the_colours_of_the_scheme(
    opened: Opened, request: pytest.FixtureRequest
) -> None:
    page = opened.page
    page.locator("#roofline figure").scroll_into_view_if_needed()
    seen = page.screenshot()
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128")
    page.evaluate("document.body.replaceChildren()")
    assert len(seen) > 3 * len(page.screenshot())
    assert dark is (request.node.callspec.params["opened"][1] == "dark")


def test_each_width_shows_one_drawing_of_each_plot(opened: Opened) -> None:
    wide, narrow = (
        opened.page.locator(f"svg[id], .{name} svg").filter(visible=True).count()
        for name in ("wide", "narrow")
    )
    assert (wide == 0) is (opened.page.viewport_size["width"] < 736)
    assert wide + narrow == opened.page.locator(".wide svg").count() > 5


def test_the_tab_key_reaches_the_skip_link_sections_details_and_what_scrolls(
    browser: Any, file: pathlib.Path
) -> None:
    opened = Opened(browser, file, 360, "light")
    page = opened.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the report"
    box = page.locator(".skip").bounding_box()
    assert box["x"] >= 0  # it is seen once it has the focus
    reached: list[str] = []
    for _ in range(400):
        page.keyboard.press("Tab")
        name = page.evaluate("document.activeElement.className || document.activeElement.tagName")
        if name == "BODY":
            break
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", f"{name} does not show that it has the focus"
        reached.append(name)
    assert reached.count("A") == page.locator("header a, nav a").count()
    assert reached.count("SUMMARY") == page.locator("summary").count()
    assert (
        reached.count("scroll")
        == page.locator("details[open] .scroll, .scroll:not(details *)").count()
    )
    page.close()


def test_the_skip_link_leads_past_the_navigation(browser: Any, file: pathlib.Path) -> None:
    opened = Opened(browser, file, 768, "light")
    opened.page.keyboard.press("Tab")
    opened.page.keyboard.press("Enter")
    assert opened.page.evaluate("document.activeElement.id") == "report"
    opened.page.close()


def test_a_table_that_is_wider_than_the_window_scrolls_by_keyboard(
    browser: Any, file: pathlib.Path
) -> None:
    opened = Opened(browser, file, 360, "light")
    region = opened.page.locator("#experts .scroll:not(details *)").last
    region.focus()
    for _ in range(5):
        opened.page.keyboard.press("ArrowRight")
    opened.page.wait_for_function("one => one.scrollLeft > 0", arg=region.element_handle())
    opened.page.close()
