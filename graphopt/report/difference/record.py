"""What the passes wrote down on the way from one model to another: which nodes were made of which.

before   q, k, v          Add              Where, Attention      Relu
record   merge_products   (no step)        canonicalize          (removed)
after    qkv              Add (the same)   Attention             .
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph import provenance

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphopt.analysis.structure.matching import Side
    from graphopt.artifact.manifest import Manifest
    from graphopt.graph.diagnostics import Removal
    from graphopt.graph.provenance import HistoryStep

_ENOUGH = 0.9
"""Share of the nodes of the second model that the record must lead back to the first."""


@dataclass
class Record:
    """What is known of two models by the record.

    Attributes:
        same: nodes that no pass replaced: they have their partner under their name.
        made: other nodes of the second model, with the nodes of the first that they were made of.
        passes: of each node of the second model, the passes that touched it or its weights on the way.
        gone: nodes of the first model that the report of a pass says are gone: the pass, and the node of the second in
            which they went up, if one did.
        settled: nodes of either that have no partner to be looked for.
    """

    same: dict[ir.Node, ir.Node] = field(default_factory=dict)
    made: dict[ir.Node, list[ir.Node]] = field(default_factory=dict)
    passes: dict[ir.Node, list[str]] = field(default_factory=dict)
    gone: dict[ir.Node, tuple[str, ir.Node | None]] = field(default_factory=dict)

    @property
    def settled(self) -> set[ir.Node]:
        """Nodes that have no partner to be looked for."""
        return {*self.made, *self.gone, *(each for made in self.made.values() for each in made)} - {
            *self.same,
            *self.same.values(),
        }


def record_of(before: Side, after: Side, manifest: Manifest | None, older: Manifest | None) -> Record | None:
    """Return what the record says; ``None`` where it does not lead from the second model to the first."""
    return _Reader(before, after, manifest, older).read()


class _Reader:
    def __init__(self, before: Side, after: Side, manifest: Manifest | None, older: Manifest | None) -> None:
        self.before, self.after = before, after
        ran = 0 if older is None else len(older.passes)
        self.reports = [] if manifest is None else manifest.passes[ran:]
        self.old = {step for node in before.graph for step in provenance.steps(node)}
        self.old |= {step for value in before.graph.initializers.values() for step in provenance.steps(value)}
        self.names: dict[str, ir.Node] = {}
        for node in before.graph:
            for name in [*(value.name for value in node.outputs), node.name]:
                if name:
                    self.names[name] = node
        self.given = {*before.graph.initializers, *(value.name or "" for value in before.graph.inputs)}

    def read(self) -> Record | None:
        """Return what the record says, or ``None``."""
        found, steps = Record(), {node: list(self._steps(node)) for node in self.after.nodes}
        if not any(steps.values()):
            return None
        lost = 0
        for node, own in steps.items():
            partner = self.names.get(node.name or "")
            found.passes[node] = list(dict.fromkeys(step.pass_name for step in own))
            known, origins = self._origins(own)
            there = partner is not None and partner not in self.before.constant
            if there and partner is not None and _kind(partner) == _kind(node):
                found.same[partner] = node
                if others := [each for each in origins if each is not partner]:
                    found.made[node] = others
            elif own and known:
                found.made[node] = [*origins, *([partner] if there and partner is not None else [])]
            else:
                lost += 1
        if lost > (1 - _ENOUGH) * len(steps):
            return None
        self._gone(found, steps)
        return found

    def _steps(self, node: ir.Node) -> Iterator[HistoryStep]:
        """Yield the steps of a node and of its constants that the first model does not have."""
        items: list[ir.Node | ir.Value] = [node, *self.after.made_of(node)]
        items += [v for each in list(items) if isinstance(each, ir.Node) for v in each.inputs if v is not None]
        seen = set(self.old)
        for item in items:
            if isinstance(item, ir.Value) and not item.is_initializer():
                continue
            for step in provenance.steps(item):
                if step not in seen:
                    seen.add(step)
                    yield step

    def _origins(self, steps: list[HistoryStep]) -> tuple[bool, list[ir.Node]]:
        """Return whether steps lead back to the first model, and the nodes that they lead to, weights left out."""
        made, known = {step.made for step in steps}, not steps
        found: dict[ir.Node, None] = {}
        for step in steps:
            for name in step.sources or (step.made,):
                node = self.names.get(name)
                known = known or node is not None or name in self.given
                if node is not None and node not in self.before.constant and (name not in made or name in step.sources):
                    found[node] = None
        return known, list(found)

    def _gone(self, found: Record, steps: dict[ir.Node, list[HistoryStep]]) -> None:
        mentioned: dict[str, ir.Node] = {}
        for node, own in steps.items():
            for name in (node.name or "", *(step.made for step in own)):
                mentioned.setdefault(name, node)
        removals: dict[str, tuple[str, Removal]] = {}
        for report in self.reports:
            for each in report.removed:
                removals.setdefault(each.where, (report.name, each))
        for name, (by, removal) in removals.items():
            gone = self.names.get(name)
            if gone is None or gone.name != name or gone in self.before.constant or gone in found.same:
                continue
            # What took its place may be gone itself, with heirs of its own.
            heir, waiting, seen = "", list(removal.by), set[str]()
            while waiting and not heir:
                place = waiting.pop(0)
                heir = place if place in mentioned else ""
                waiting += removals[place][1].by if place in removals and place not in seen else []
                seen.add(place)
            found.gone[gone] = (by, mentioned.get(heir))


def _kind(node: ir.Node) -> tuple[str, str]:
    return node.domain, node.op_type
