"""What the script of a page reads: nodes in rows of a table, words once. JSON that cannot end its element."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from graphopt.report.difference.tables import cause, change_lines, operators_text
from graphopt.report.page.difference import edits
from graphopt.report.sentences import sentence
from graphopt.report.trace_builder import BYTES, OPERATIONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from graphopt.quality.losses import Losses
    from graphopt.report.trace import Diff, Trace

_NAME, _LINE = 4000, 600


class _Words:
    """Texts that are written once, and known by their place."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.texts.setdefault(text[:_NAME], len(self.texts))


def page_data(trace: Trace, difference: Diff | None, losses: Losses | None, time: Mapping[str, float]) -> str:
    """Return the JSON of a page; ``<`` is escaped, so that no name in it is markup."""
    words = _Words()
    figures: dict[str, dict[str, float]] = {}
    for measure in trace.measures:
        figures.setdefault(measure.subject, {})[measure.metric] = measure.value
    errors = {} if losses is None else {entry.node: (entry.local, entry.accumulated) for entry in losses.products}
    kinds = _edge_kinds(difference)
    rows: list[list[Any]] = []
    for node in trace.nodes:
        node_figures = figures.get(node.name, {})
        rows.append(
            [
                words(node.name),
                words(node.operator),
                words(node.role),
                node.layer,
                words(node.computes) if node.computes else None,
                words(node.runner),
                node.weights,
                [words(name) for name in node.passes],
                [[words(entry.by), words(sentence(entry.why)[:_LINE])] for entry in node.left],
                node.reads,
                node_figures.get(OPERATIONS),
                node_figures.get(BYTES),
                errors.get(node.name),
                [words(line[:_LINE]) for line in kinds.get(node.name, ())],
                time.get(node.name),
                node.fold,
                node.place,
            ]
        )
    weights = [[words(w.name), words(w.format), w.group, w.shape, w.parameters, w.bytes] for w in trace.weights]
    steps = edits(difference, words)
    content = {"nodes": rows, "weights": weights, "edits": steps, "words": list(words.texts)}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    escapes = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
    for mark, code in escapes.items():
        text = text.replace(mark, code)
    # A lone surrogate cannot be written as UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def _edge_kinds(difference: Diff | None) -> Mapping[str, Sequence[str]]:
    lines: dict[str, list[str]] = {}
    for edge in [] if difference is None else difference.edges:
        kinds = [
            f"{edge.kind}: {operators_text(edge, True)}",
            *change_lines(edge, True),
            *([f"by {cause(edge)}"] if cause(edge) else []),
        ]
        for name in edge.after:
            lines.setdefault(name, []).extend(kinds)
    return lines
