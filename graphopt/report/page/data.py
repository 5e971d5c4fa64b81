"""What the script of a page reads: nodes in rows of a table, words once. JSON that cannot end its element."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from graphopt.report.difference.tables import became, cause, told
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


def page_data(trace: Trace, found: Diff | None, lost: Losses | None, time: Mapping[str, float]) -> str:
    """Return the JSON of a page; ``<`` is escaped, so that no name in it is markup."""
    words = _Words()
    figures: dict[str, dict[str, float]] = {}
    for measure in trace.measures:
        figures.setdefault(measure.subject, {})[measure.metric] = measure.value
    errors = {} if lost is None else {each.node: (each.local, each.accumulated) for each in lost.products}
    changed = _changed(found)
    rows: list[list[Any]] = []
    for node in trace.nodes:
        measured = figures.get(node.name, {})
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
                [[words(each.by), words(sentence(each.why)[:_LINE])] for each in node.left],
                node.reads,
                measured.get(OPERATIONS),
                measured.get(BYTES),
                errors.get(node.name),
                [words(line[:_LINE]) for line in changed.get(node.name, ())],
                time.get(node.name),
                node.fold,
                node.place,
            ]
        )
    weights = [[words(w.name), words(w.format), w.group, w.shape, w.parameters, w.bytes] for w in trace.weights]
    steps = edits(found, words)
    content = {"nodes": rows, "weights": weights, "edits": steps, "words": list(words.texts)}
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    escaped = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
    for mark, code in escaped.items():
        text = text.replace(mark, code)
    # A lone surrogate cannot be written as UTF-8.
    return text.encode("utf-8", "replace").decode("utf-8")


def _changed(found: Diff | None) -> Mapping[str, Sequence[str]]:
    lines: dict[str, list[str]] = {}
    for edge in [] if found is None else found.edges:
        said = [
            f"{edge.kind}: {became(edge, True)}",
            *told(edge, True),
            *([f"by {cause(edge)}"] if cause(edge) else []),
        ]
        for name in edge.after:
            lines.setdefault(name, []).extend(said)
    return lines
