"""Elements of a page. Text is escaped; only what was made here is markup, so names of a model stay text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from graphopt.report.escape import plain

LONG = 2000
"""Characters of a text that are shown; names in it may be long."""


class Html(str):
    """Markup that was made here."""

    __slots__ = ()


def el(tag: str, *children: object, **attributes: object) -> Html:
    """Return an element.

    Args:
        tag: its name.
        children: text, escaped; :class:`Html`; or iterables of both.
        attributes: a trailing underscore is left out, other underscores become dashes; ``None`` leaves one out.
    """
    attributes_text = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{attributes_text}>{join_html(children)}</{tag}>")


def join_html(children: Iterable[object]) -> Html:
    """Return children one behind the other; text is escaped, control characters and all."""
    parts: list[str] = []
    for child in children:
        if isinstance(child, Html):
            parts.append(child)
        elif isinstance(child, str):
            parts.append(html.escape(plain(child, LONG)))
        elif isinstance(child, Iterable):
            parts.append(join_html(child))
        elif child is not None:
            parts.append(html.escape(str(child)))
    return Html("".join(parts))


def table(
    head: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[int] = (), long: Sequence[int] = ()
) -> Html:
    """Return a table.

    Args:
        head: names of its columns.
        rows: cells.
        right: columns of numbers, which are aligned to the right.
        long: columns of long names, which are broken anywhere where the page is narrow.
    """
    sides = ["n" if number in right else "long" if number in long else None for number in range(len(head))]
    cells = (el("th", name, class_=side, scope="col") for name, side in zip(head, sides, strict=True))
    body = (el("tr", (el("td", cell, class_=side) for cell, side in zip(row, sides, strict=True))) for row in rows)
    return el("div", el("table", el("thead", el("tr", cells)), el("tbody", body)), class_="scroll")


def bar(share: float, label: str = "", kind: str = "") -> Html:
    """Return a horizontal bar, ``share`` of its cell wide, with a label behind it."""
    width = f"width:{max(0.0, min(1.0, share)) * 100:.2f}%"
    return el("div", el("i", style=width, class_=f"bar {kind}".strip()), el("span", label), class_="barcell")


def section(name: str, title: str, *children: object) -> Html:
    """Return a part of the page, with its heading."""
    return el("section", el("h2", title), *children, id=name)


def shade(value: float, largest: float) -> str:
    """Return the style of a cell of a heat map."""
    share = 0.0 if not largest else max(0.0, min(1.0, value / largest))
    return f"background:color-mix(in srgb, var(--hot) {share * 85:.0f}%, transparent)"
