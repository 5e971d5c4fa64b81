"""Which nodes of a trace are meant, in one line: ``op:MatMul role:down_proj format:int4 layer:0-3``.

Terms stand behind one another, and all must hold. A term has alternatives, separated by commas; each is a pattern as
of a shell, with ``*`` and ``?``, and a layer a number or a range. What has no colon is looked for in names.
"""

from __future__ import annotations

import difflib
import shlex
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from graphopt.errors import InputError
from graphopt.report.escape import plain

if TYPE_CHECKING:
    from collections.abc import Callable

    from graphopt.report.trace import Node, Trace


def _words(trace: Trace, node: Node, key: str) -> list[str]:
    if key == "op":
        return [node.operator, node.operator.rpartition("::")[2]]
    if key == "format":
        return [trace.weights[number].format for number in node.weights]
    if key == "weight":
        return [trace.weights[number].name for number in node.weights]
    if key == "left":
        return [skip.by for skip in node.left]
    words: dict[str, list[str | None]] = {
        "name": [node.name],
        "role": [node.role],
        "runner": [node.runner],
        "computes": [node.computes],
        "pass": [*node.passes],
    }
    return [word for word in words[key] if word is not None]


_WORD_KEYS = ("role", "format", "runner", "computes", "pass", "left")
"""Keys of few different words."""

KEYS = ("op", "role", "format", "layer", "name", "weight", "runner", "computes", "pass", "left")
"""What can be asked for."""


def selector(trace: Trace, query: str) -> Callable[[Node], bool]:
    """Return whether a query means a node.

    Raises:
        InputError: a term has another key, a layer is no number or range, or a quotation does not end.
    """
    try:
        terms = shlex.split(query)
    except ValueError as error:
        raise InputError(f"the query cannot be read: {error}", remedy="close the quotation") from error
    tests = [_test(trace, *term.partition(":")) for term in terms]
    return lambda node: all(test(node) for test in tests)


def _test(trace: Trace, key: str, colon: str, words: str) -> Callable[[Node], bool]:
    if not colon:
        return lambda node: key in node.name
    if key not in KEYS:
        raise InputError(f"there is no key {plain(key)}", remedy=_keys(key))
    patterns = words.split(",")
    if key == "layer":
        ranges = [_range(pattern) for pattern in patterns]
        return lambda node: node.layer is not None and any(node.layer in layers for layers in ranges)
    return lambda node: any(fnmatchcase(word, pattern) for word in _words(trace, node, key) for pattern in patterns)


def _keys(key: str) -> str:
    close = difflib.get_close_matches(key, KEYS, 1)
    suggestion = f"did you mean {close[0]}? " if close else ""
    return f"{suggestion}the keys are {', '.join(KEYS)}; put a name that has a colon behind name:"


def _range(text: str) -> range:
    first, dash, last = text.partition("-")
    try:
        return range(int(first), int(last if dash else first) + 1)
    except ValueError as error:
        raise InputError(
            f"{plain(text)!r} is not a layer or a range of layers", remedy="write layer:3 or layer:0-7"
        ) from error


def mismatch(trace: Trace, query: str) -> str | None:
    """Say why a query means no node: of the first term that no node meets, what there is; ``None`` if it means some."""
    if any(map(selector(trace, query), trace.nodes)):
        return None
    for term in shlex.split(query):
        if not any(map(selector(trace, shlex.quote(term)), trace.nodes)):
            key, colon, _ = term.partition(":")
            is_enumerated = colon and key in _WORD_KEYS
            choices = (
                sorted({word for node in trace.nodes for word in _words(trace, node, key)}) if is_enumerated else []
            )
            return f"no node matches {plain(term)}" + (
                f"; there are {', '.join(map(plain, choices))}" if choices else ""
            )
    return "each term of the query matches some nodes, but no node matches all of them"


def select_nodes(trace: Trace, query: str) -> Trace:
    """Return a trace with only the nodes that a query means, and their figures."""
    is_selected = selector(trace, query)
    nodes = [node for node in trace.nodes if is_selected(node)]
    names = {node.name for node in nodes}
    measures = [measure for measure in trace.measures if measure.subject in names]
    return trace.model_copy(update={"nodes": nodes, "measures": measures})
