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

    def __init__(self, before: Side, after: Side, matched: Matching) -> None:
        self._before, self._after = before.graph, after.graph
        self.notes: list[str] = []
        self.inputs = {theirs: ours for ours, theirs in self._inputs(before, after, matched)}
        self.outputs = list(_by_name_or_place(self._before.outputs, self._after.outputs))
        renamed = sum(theirs.name != ours.name for theirs, ours in self.inputs.items())
        renamed += sum(ours.name != theirs.name for ours, theirs in self.outputs)
        if renamed:
            self.notes.append(f"inputs and outputs under other names: {renamed:,}")

    def _inputs(self, before: Side, after: Side, matched: Matching) -> Iterator[tuple[ir.Value, ir.Value]]:
        ours, theirs = (_named(graph.inputs) for graph in (before.graph, after.graph))
        shared = ours.keys() & theirs.keys()
        yield from ((ours[name], theirs[name]) for name in shared)
        if shared == ours.keys() or shared == theirs.keys():
            return
        votes: Counter[tuple[ir.Value, ir.Value]] = Counter()
        for mine, other in matched.pairs.items():
            read = dict(after.inputs(other))
            for place, value in before.inputs(mine):
                port = read.get(place)
                if port is not None and value.name in ours and port.name in theirs and value.producer() is None:
                    votes[value, port] += port.producer() is None
        taken: set[ir.Value] = {ours[name] for name in shared} | {theirs[name] for name in shared}
        for (value, port), count in votes.most_common():
            if count and not {value, port} & taken:
                taken |= {value, port}
                yield value, port

    def changes(self, same: Callable[[ir.Value, ir.Value], bool]) -> Iterator[Change]:
        """Yield what is different."""
        paired = {*self.inputs, *self.inputs.values()}
        for ours, theirs in [*((mine, other) for other, mine in self.inputs.items()), *self.outputs]:
            said = _said(ours), _said(theirs)
            if said[0] != said[1]:
                yield _change("port", theirs, *said)
        for ours, theirs in self.outputs:
            paired |= {ours, theirs}
            if not same(ours, theirs):
                yield _change("output", theirs, _maker(ours), _maker(theirs))
        for value in [*self._before.inputs, *self._before.outputs]:
            if value not in paired:
                yield _change("port", value, _said(value), "absent")
        for value in [*self._after.inputs, *self._after.outputs]:
            if value not in paired:
                yield _change("port", value, "absent", _said(value))


def _named(values: object) -> dict[str, ir.Value]:
    return {value.name or "": value for value in values}  # type: ignore[attr-defined]


def _by_name_or_place(ours: object, theirs: object) -> Iterator[tuple[ir.Value, ir.Value]]:
    mine, other = _named(ours), _named(theirs)
    shared = mine.keys() & other.keys()
    yield from ((mine[name], other[name]) for name in mine if name in shared)
    rest = [[value for name, value in found.items() if name not in shared] for found in (mine, other)]
    if not shared:
        yield from zip(*rest, strict=False)


def _change(what: str, value: ir.Value, before: str, after: str) -> Change:
    return Change(what=what, name=plain(value.name or ""), before=before, after=after)  # type: ignore[arg-type]


def _said(value: ir.Value) -> str:
    sizes = ["?" if size is None else str(size) for size in dims(value)]
    return f"{'unknown' if value.dtype is None else value.dtype.name.lower()}[{', '.join(sizes)}]"


def _maker(value: ir.Value) -> str:
    producer = value.producer()
    return plain((value.name if producer is None else producer.name or value.name) or "?")
