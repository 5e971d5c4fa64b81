"""The part of a page about what is different: edits one by one with both sides, and all of them as a table."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

from graphopt.report.difference.tables import became, cause, rows_of, told, where
from graphopt.report.page.html import Html, el, joined, section, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.report.trace import Diff, Edge

_SHOWN = 12
"""Nodes of one edit that are shown on each side."""


def difference_section(found: Diff | None) -> Html | None:
    """Return what became of the model before, equal edits of many layers as one row."""
    if found is None:
        return None
    kinds = Counter(edge.kind for edge in found.edges)
    said = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    lines = (
        (
            el("span", edges[0].kind, class_=f"chip {edges[0].kind}"),
            len(group.edges),
            where(group),
            edges[0].role,
            _arrows(became(edges[0], len(group.edges) == 1)) if len(edges) == 1 else counted_operators(edges),
            joined(el("div", _arrows(line)) for line in told(edges[0], len(group.edges) == 1)),
            cause(edges[0]),
        )
        for group, edges in rows_of(found)
    )
    head = ("", "times", "layers", "role", "before → after", "what is different", "cause")
    notes = (el("p", note, class_="note") for note in found.notes)
    text = f"{found.nodes[0]:,} nodes before, {found.nodes[1]:,} after; {found.kept:,} are kept as they are"
    listed = el("div", table(head, lines, right=(1,), long=(4, 5)), id="edits")
    parts = [el("p", f"{text}; {said}." if said else f"{text}."), _stepper(found) if found.groups else None]
    return section("diff", "What is different", *parts, listed, notes)


def _stepper(found: Diff) -> Html:
    """Return the controls that walk through the edits; the script of the page fills them."""
    passes = dict.fromkeys(name for edge in found.edges for name in edge.passes)
    options = [el("option", "all passes", value=""), *(el("option", name, value=name) for name in passes)]
    controls = el(
        "div",
        el("button", "‹ previous", type="button", data_step="-1"),
        el("button", "next ›", type="button", data_step="1"),
        el("label", "edits by ", el("select", options, id="by")) if passes else None,
        el("span", id="at", class_="note", role="status"),
        class_="controls",
    )
    return el("div", controls, el("div", id="edit", class_="sides"), id="step", hidden="")


def edits(found: Diff | None, words: Any) -> list[list[Any]]:
    """Return the edits as the script of a page reads them: the rows of the table, with the nodes on both sides."""
    rows = []
    for group, edges in [] if found is None else rows_of(found):
        sides = []
        for side in (0, 1):
            pairs = [
                (operator, name)
                for edge in edges
                for operator, name in zip(edge.operators[side], (edge.before, edge.after)[side], strict=False)
            ]
            shown = [[words(operator), words(name)] for operator, name in islice(pairs, _SHOWN)]
            sides.append([shown, len(pairs) - len(shown)])
        edge = edges[0]
        lines = [words(_arrows(line)) for line in told(edge, len(group.edges) == 1)]
        passes = [words(name) for name in edge.passes]
        rows.append([words(edge.kind), len(group.edges), words(where(group)), words(edge.role), sides, lines, passes])
    return rows


def _arrows(line: str) -> str:
    # A browser would break a line within "->".
    return line.replace(" -> ", " \N{RIGHTWARDS ARROW} ")


def counted_operators(edges: Sequence[Edge]) -> str:
    """Return how many nodes of which operators edges are about."""
    found = Counter(name for edge in edges for name in (*edge.operators[0], *edge.operators[1]))
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in found.most_common())
