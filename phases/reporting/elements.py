"""HTML and SVG elements. What is not markup already is escaped, so nothing can slip through."""

from __future__ import annotations

import html
from collections.abc import Iterable

__all__ = ["Markup", "el", "joined"]

_VOID = frozenset({"meta", "link", "br", "hr"})


class Markup(str):
    """Text that is HTML. Only `el` and `joined` make it, and `page` from its own constants."""

    __slots__ = ()


Child = str | Markup | None


def el(name: str, /, *children: Child, **attributes: str | float | None) -> Markup:
    """`el("p", "a < b", class_="x")` is `<p class="x">a &lt; b</p>`.

    A trailing underscore of an attribute's name is dropped, others become hyphens; None leaves it
    out. Numbers are written short, as coordinates need no more than two digits.
    """
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{told}>")
    return Markup(f"<{name}{told}>{joined(children)}</{name}>")


def joined(children: Iterable[Child]) -> Markup:
    """Side by side; plain text is escaped."""
    return Markup(
        "".join(
            child if isinstance(child, Markup) else html.escape(child, quote=False)
            for child in children
            if child is not None
        )
    )


def _value(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
