"""Inputs and outputs of two models: by their names where these are the same, else by who reads and makes them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from graphopt.analysis.structure.folding.labels import dims
from graphopt.report.escape import plain
from graphopt.report.trace import Change

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import onnx_ir as ir

    from graphopt.analysis.structure.matching import Matching, Side


class Ports:
    """Which input and output of one model is which of another.

    Attributes:
        inputs: for each input of the second model that has a partner, that of the first.
        outputs: pairs of outputs.
        notes: what is different and changes nothing.
    """

    def __init__(self, before: Side, after: Side, matching: Matching) -> None:
        self._before, self._after = before.graph, after.graph
        self.notes: list[str] = []
        self.inputs = {second: first for first, second in self._inputs(before, after, matching)}
        self.outputs = list(_by_name_or_place(self._before.outputs, self._after.outputs))
        renames = sum(second.name != first.name for second, first in self.inputs.items())
        renames += sum(first.name != second.name for first, second in self.outputs)
        if renames:
            self.notes.append(f"inputs and outputs under other names: {renames:,}")

    def _inputs(self, before: Side, after: Side, matching: Matching) -> Iterator[tuple[ir.Value, ir.Value]]:
        first, second = (_by_name(graph.inputs) for graph in (before.graph, after.graph))
        names = first.keys() & second.keys()
        yield from ((first[name], second[name]) for name in names)
        if names == first.keys() or names == second.keys():
            return
        paired_values: set[ir.Value] = {first[name] for name in names} | {second[name] for name in names}
        for (value, port), _ in _votes(before, after, matching).most_common():
            if not {value, port} & paired_values:
                paired_values |= {value, port}
                yield value, port

    def changes(self, is_same: Callable[[ir.Value, ir.Value], bool]) -> Iterator[Change]:
        """Yield what is different."""
        partners = {*self.inputs, *self.inputs.values()}
        for first, second in [*((before, after) for after, before in self.inputs.items()), *self.outputs]:
            texts = _port_text(first), _port_text(second)
            if texts[0] != texts[1]:
                yield _change("port", second, *texts)
        for first, second in self.outputs:
            partners |= {first, second}
            if not is_same(first, second):
                yield _change("output", second, _maker(first), _maker(second))
        for value in [*self._before.inputs, *self._before.outputs]:
            if value not in partners:
                yield _change("port", value, _port_text(value), "absent")
        for value in [*self._after.inputs, *self._after.outputs]:
            if value not in partners:
                yield _change("port", value, "absent", _port_text(value))


def _votes(before: Side, after: Side, matching: Matching) -> Counter[tuple[ir.Value, ir.Value]]:
    """Return how many pairs of nodes read a graph input of the first model and one of the second in the same place."""
    votes: Counter[tuple[ir.Value, ir.Value]] = Counter()
    for node, partner in matching.pairs.items():
        ports = dict(after.inputs(partner))
        for index, value in before.inputs(node):
            port = ports.get(index)
            if port is not None and value.is_graph_input() and port.is_graph_input():
                votes[value, port] += 1
    return votes


def _by_name(values: object) -> dict[str, ir.Value]:
    return {value.name or "": value for value in values}  # type: ignore[attr-defined]


def _by_name_or_place(first: object, second: object) -> Iterator[tuple[ir.Value, ir.Value]]:
    before, after = _by_name(first), _by_name(second)
    names = before.keys() & after.keys()
    yield from ((before[name], after[name]) for name in before if name in names)
    remaining = [[value for name, value in ports.items() if name not in names] for ports in (before, after)]
    if not names:
        yield from zip(*remaining, strict=False)


def _change(kind: str, value: ir.Value, before: str, after: str) -> Change:
    return Change(what=kind, name=plain(value.name or ""), before=before, after=after)  # type: ignore[arg-type]


def _port_text(value: ir.Value) -> str:
    sizes = ["?" if size is None else str(size) for size in dims(value)]
    return f"{'unknown' if value.dtype is None else value.dtype.name.lower()}[{', '.join(sizes)}]"


def _maker(value: ir.Value) -> str:
    producer = value.producer()
    return plain((value.name if producer is None else producer.name or value.name) or "?")
