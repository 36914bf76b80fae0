"""The page as text: its structure, and that nothing of evidence becomes markup."""

from __future__ import annotations

import collections
import html.parser
import itertools
import json
import pathlib
import re

import pytest
from kept_evidence import H200, ROOT, blocked, ended, imbalance, keep, read

from phases.checkout import Checkout
from phases.gate import Unit
from phases.reporting.gather import gather
from phases.reporting.model import as_json
from phases.reporting.page import as_html

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&"
VOID = {"meta", "link", "br", "hr"}


class Outline(html.parser.HTMLParser):
    """Tags that are open, headings, ids, and every start tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if re.fullmatch(r"h\d", tag):
            self.headings.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(folder: pathlib.Path) -> str:
    checkout = Checkout(ROOT, folder / "state")
    return as_html(gather(read(folder), checkout, imbalance))


@pytest.fixture(scope="module")
def page() -> str:
    """Of the evidence that the repository keeps."""
    return page_of(ROOT / "plans/evidence")


@pytest.fixture
def hostile(tmp_path: pathlib.Path) -> str:
    regime = "B=1 H=8 T=9 L=4096"
    keep(
        tmp_path,
        "cpu",
        blocked("peers", HOSTILE),
        ended("mask-paths", ((HOSTILE, 1.0, Unit.COUNT),)),
        ended("mask-layouts", failed=HOSTILE),
    )
    keep(
        tmp_path,
        "gpu",
        ended(
            "peers",
            ((regime, 9.0, Unit.MICROSECONDS), (f"{regime}, over a, tree", 2.0, Unit.SPEEDUP)),
            machine=H200,
            environment={"KDTREE_X": HOSTILE},
        ),
        machine=H200,
        environment={"KDTREE_X": HOSTILE},
        revision=HOSTILE,
    )
    for room in ("serve", "profile"):
        (tmp_path / room).mkdir()
    speeds = [{"length": 1024, "tokens_per_second": 5.0}]
    servers = [{"name": HOSTILE, "speeds": speeds}]
    bench = {"graphs": True, "layers": 1, "nodes": 9, "right": True, "servers": servers}
    (tmp_path / "serve/a.json").write_text(json.dumps(bench | {"started": HOSTILE}))
    classes = [{"name": HOSTILE, "us": 5.0, "lever": HOSTILE}]
    told = {"version": 1, "step_us": 5.0, "classes": classes, "remarks": [HOSTILE]}
    (tmp_path / "profile/a.json").write_text(json.dumps(told))
    return page_of(tmp_path)


def test_nothing_of_evidence_becomes_markup(hostile: str, page: str) -> None:
    outline = Outline(hostile)
    assert not outline.open
    assert {tag for tag, _ in outline.tags} <= {tag for tag, _ in Outline(page).tags} | {"code"}
    assert "&lt;script&gt;" in hostile
    assert not any(name.startswith("on") for _, attributes in outline.tags for name in attributes)


def test_a_headline_of_a_gate_that_failed_says_so(tmp_path: pathlib.Path) -> None:
    regime = "B=1 H=8 T=9 L=4096"
    figures = (
        (regime, 9.0, Unit.MICROSECONDS),
        (f"{regime}, over sglang-extend, tree", 2.0, Unit.SPEEDUP),
    )
    entry = ended("peers", figures, machine=H200, failed="slower than flashmla")
    keep(tmp_path, "gpu", entry, machine=H200)
    headlines = page_of(tmp_path).partition('class="headlines"')[2].partition("</ul>")[0]
    assert "current, the gate failed" in headlines


def test_it_has_no_script_and_names_no_other_file(page: str) -> None:
    outline = Outline(page)
    tags = {tag for tag, _ in outline.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "form", "video", "audio"}
    links = {attributes.get("href") or "" for _, attributes in outline.tags if "href" in attributes}
    assert all(link.startswith("#") for link in links)
    urls = set(re.findall(r"\bhttps?://[^\s\"<]+", page))
    assert urls <= {"http://www.w3.org/2000/svg"}  # a name, which nothing fetches
    assert "url(" not in page
    assert "@import" not in page


def test_headings_go_down_one_level_at_a_time_from_one_h1(page: str) -> None:
    levels = [int(name[1]) for name in Outline(page).headings]
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_landmarks_language_and_viewport(page: str) -> None:
    outline = Outline(page)
    counts = collections.Counter(tag for tag, _ in outline.tags)
    assert [counts[name] for name in ("header", "nav", "main", "footer")] == [1, 1, 1, 1]
    assert outline.named("html")[0]["lang"] == "en"
    assert any(one.get("name") == "viewport" for one in outline.named("meta"))
    assert outline.named("a")[0]["href"] == "#report"


def test_every_id_is_there_once_and_every_reference_is_to_one(page: str) -> None:
    outline = Outline(page)
    ids = collections.Counter(
        attributes["id"] for _, attributes in outline.tags if "id" in attributes
    )
    assert ids.most_common(1)[0][1] == 1
    for _, attributes in outline.tags:
        for name in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(name) is None or attributes[name] in ids
        href = attributes.get("href")
        assert href is None or href[1:] in ids


def test_tables_have_captions_and_their_heads_a_scope(page: str) -> None:
    outline = Outline(page)
    assert len(outline.named("caption")) == len(outline.named("table")) > 10
    assert all(one.get("scope") in ("col", "row") for one in outline.named("th"))


def test_regions_that_scroll_are_reached_by_keyboard_and_have_names(page: str) -> None:
    regions = [one for one in Outline(page).named("div") if one.get("class") == "scroll"]
    assert regions
    for one in regions:
        assert (one["tabindex"], one["role"]) == ("0", "region")
        assert one["aria-label"]


def test_every_drawing_has_a_role_and_its_data_in_a_table(page: str) -> None:
    outline = Outline(page)
    assert outline.named("svg")
    assert all(one["role"] == "img" for one in outline.named("svg"))
    assert page.count("The same as a table") + page.count("Decode speed, ") >= len(
        outline.named("figure")
    )


def test_a_folder_without_evidence_gives_a_whole_page(tmp_path: pathlib.Path) -> None:
    page = page_of(tmp_path)
    outline = Outline(page)
    assert not outline.open
    assert len(outline.named("section")) == 9
    assert page.count("Not measured: ") >= 8


def test_the_same_report_as_json() -> None:
    checkout = Checkout(ROOT, ROOT / ".kd")
    document = as_json(gather(read(ROOT / "plans/evidence"), checkout, imbalance))
    told = json.loads(json.dumps(document, default=str))
    assert told["version"] == 1
    kinds = {block["kind"] for section in told["sections"] for block in section["blocks"]}
    assert {"Table", "Bars", "Roofline", "Lines", "HeatMap", "Entries"} <= kinds
