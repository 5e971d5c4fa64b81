"""The part of a page about what is different: edits one by one with both sides, and all of them as a table."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any

from graphopt.report.difference.tables import cause, change_lines, layer_text, operators_text, rows_of
from graphopt.report.page.html import Html, el, join_html, section, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from graphopt.report.trace import Diff, Edge

_OPERATORS = 12
"""Nodes of one edit that are shown on each side."""


def difference_section(difference: Diff | None) -> Html | None:
    """Return what became of the model before, equal edits of many layers as one row."""
    if difference is None:
        return None
    kinds = Counter(edge.kind for edge in difference.edges)
    counts = ", ".join(f"{count:,} {kind}" for kind, count in kinds.items())
    lines = (
        (
            el("span", edges[0].kind, class_=f"chip {edges[0].kind}"),
            len(group.edges),
            layer_text(group),
            edges[0].role,
            _arrows(operators_text(edges[0], len(group.edges) == 1)) if len(edges) == 1 else operator_counts(edges),
            join_html(el("div", _arrows(line)) for line in change_lines(edges[0], len(group.edges) == 1)),
            cause(edges[0]),
        )
        for group, edges in rows_of(difference)
    )
    head = ("", "times", "layers", "role", "before → after", "what is different", "cause")
    notes = (el("p", note, class_="note") for note in difference.notes)
    text = (
        f"{difference.nodes[0]:,} nodes before, {difference.nodes[1]:,} after; {difference.kept:,} are kept as they are"
    )
    edit_list = el("div", table(head, lines, right=(1,), long=(4, 5)), id="edits")
    parts = [
        el("p", f"{text}; {counts}." if counts else f"{text}."),
        _stepper(difference) if difference.groups else None,
    ]
    return section("diff", "What is different", *parts, edit_list, notes)


def _stepper(difference: Diff) -> Html:
    """Return the controls that walk through the edits; the script of the page fills them."""
    passes = dict.fromkeys(name for edge in difference.edges for name in edge.passes)
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


def edits(difference: Diff | None, words: Any) -> list[list[Any]]:
    """Return the edits as the script of a page reads them: the rows of the table, with the nodes on both sides."""
    rows = []
    for group, edges in [] if difference is None else rows_of(difference):
        sides = []
        for side in (0, 1):
            pairs = [
                (operator, name)
                for edge in edges
                for operator, name in zip(edge.operators[side], (edge.before, edge.after)[side], strict=False)
            ]
            operators = [[words(operator), words(name)] for operator, name in islice(pairs, _OPERATORS)]
            sides.append([operators, len(pairs) - len(operators)])
        edge = edges[0]
        lines = [words(_arrows(line)) for line in change_lines(edge, len(group.edges) == 1)]
        passes = [words(name) for name in edge.passes]
        rows.append(
            [words(edge.kind), len(group.edges), words(layer_text(group)), words(edge.role), sides, lines, passes]
        )
    return rows


def _arrows(line: str) -> str:
    # A browser would break a line within "->".
    return line.replace(" -> ", " \N{RIGHTWARDS ARROW} ")


def operator_counts(edges: Sequence[Edge]) -> str:
    """Return how many nodes of which operators edges are about."""
    counts = Counter(name for edge in edges for name in (*edge.operators[0], *edge.operators[1]))
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.most_common())
