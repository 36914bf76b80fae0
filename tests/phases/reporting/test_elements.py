"""Elements escape whatever is not markup."""

from __future__ import annotations

from phases.reporting.elements import Markup, el, joined


def test_text_and_attributes_are_escaped() -> None:
    assert el("p", "a < b & c", title='"><script>') == (
        '<p title="&quot;&gt;&lt;script&gt;">a &lt; b &amp; c</p>'
    )


def test_markup_is_left_as_it_is_and_none_is_left_out() -> None:
    assert el("p", el("b", "x"), None, "y") == "<p><b>x</b>y</p>"
    assert isinstance(joined(["<"]), Markup)


def test_names_of_attributes_and_short_numbers() -> None:
    assert el("rect", x=1.0, y=2.126, fill_opacity=0.5, class_="a", id=None) == (
        '<rect x="1" y="2.13" fill-opacity="0.5" class="a"></rect>'
    )
    assert el("meta", charset="utf-8") == '<meta charset="utf-8">'
