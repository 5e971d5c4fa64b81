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
    from collections.abc import Collection, Iterator, Mapping

    from graphopt.analysis.structure.matching import Side
    from graphopt.artifact.manifest import Manifest
    from graphopt.graph.diagnostics import Removal
    from graphopt.graph.provenance import HistoryStep

_LEAST_SHARE = 0.9
"""Share of the nodes of the second model that the record must lead back to the first."""


@dataclass
class Record:
    """What is known of two models by the record.

    Attributes:
        identical: nodes that no pass replaced: they have their partner under their name.
        origins: other nodes of the second model, with the nodes of the first that they were made of.
        passes: of each node of the second model, the passes that touched it or its weights on the way.
        removals: nodes of the first model that the report of a pass says are gone: the pass, and the node of the second
            that took them in, if one did.
        without_partner: nodes of either that have no partner to be looked for.
    """

    identical: dict[ir.Node, ir.Node] = field(default_factory=dict)
    origins: dict[ir.Node, list[ir.Node]] = field(default_factory=dict)
    passes: dict[ir.Node, list[str]] = field(default_factory=dict)
    removals: dict[ir.Node, tuple[str, ir.Node | None]] = field(default_factory=dict)

    @property
    def without_partner(self) -> set[ir.Node]:
        """Nodes that have no partner to be looked for."""
        return {*self.origins, *self.removals, *(source for sources in self.origins.values() for source in sources)} - {
            *self.identical,
            *self.identical.values(),
        }


def record_of(before: Side, after: Side, manifest: Manifest | None, older: Manifest | None) -> Record | None:
    """Return what the record says; ``None`` where it does not lead from the second model to the first."""
    return _Reader(before, after, manifest, older).read_record()


class _Reader:
    def __init__(self, before: Side, after: Side, manifest: Manifest | None, older: Manifest | None) -> None:
        self.before, self.after = before, after
        earlier_passes = 0 if older is None else len(older.passes)
        self.reports = [] if manifest is None else manifest.passes[earlier_passes:]
        self.old = {step for node in before.graph for step in provenance.steps(node)}
        self.old |= {step for value in before.graph.initializers.values() for step in provenance.steps(value)}
        self.names: dict[str, ir.Node] = {}
        for node in before.graph:
            for name in [*(value.name for value in node.outputs), node.name]:
                if name:
                    self.names[name] = node
        self.external_names = {*before.graph.initializers, *(value.name or "" for value in before.graph.inputs)}

    def read_record(self) -> Record | None:
        """Return what the record says, or ``None``."""
        record, steps = Record(), {node: list(self._steps(node)) for node in self.after.nodes}
        if not any(steps.values()):
            return None
        strays = sum(not self._add_node(record, node, node_steps) for node, node_steps in steps.items())
        if strays > (1 - _LEAST_SHARE) * len(steps):
            return None
        self._add_removals(record, steps)
        return record

    def _add_node(self, record: Record, node: ir.Node, steps: list[HistoryStep]) -> bool:
        """Add what the record says of a node of the second model; return whether it leads to the first one."""
        partner = self.names.get(node.name or "")
        partner = None if partner is None or partner in self.before.constant else partner
        record.passes[node] = list(dict.fromkeys(step.pass_name for step in steps))
        is_known, origins = self._origins(steps)
        if partner is not None and _kind(partner) == _kind(node):
            record.identical[partner] = node
            if other_origins := [origin for origin in origins if origin is not partner]:
                record.origins[node] = other_origins
            return True
        if steps and is_known:
            record.origins[node] = [*origins, *([] if partner is None else [partner])]
            return True
        return False

    def _steps(self, node: ir.Node) -> Iterator[HistoryStep]:
        """Yield the steps of a node and of its constants that the first model does not have."""
        items: list[ir.Node | ir.Value] = [node, *self.after.made_of(node)]
        items += [v for item_ in list(items) if isinstance(item_, ir.Node) for v in item_.inputs if v is not None]
        earlier_steps = set(self.old)
        for item in items:
            if isinstance(item, ir.Value) and not item.is_initializer():
                continue
            for step in provenance.steps(item):
                if step not in earlier_steps:
                    earlier_steps.add(step)
                    yield step

    def _origins(self, steps: list[HistoryStep]) -> tuple[bool, list[ir.Node]]:
        """Return whether steps lead back to the first model, and the nodes that they lead to, weights left out."""
        results, is_known = {step.name for step in steps}, not steps
        origins: dict[ir.Node, None] = {}
        for step in steps:
            for name in step.sources or (step.name,):
                node = self.names.get(name)
                is_known = is_known or node is not None or name in self.external_names
                if (
                    node is not None
                    and node not in self.before.constant
                    and (name not in results or name in step.sources)
                ):
                    origins[node] = None
        return is_known, list(origins)

    def _add_removals(self, record: Record, steps: dict[ir.Node, list[HistoryStep]]) -> None:
        node_of: dict[str, ir.Node] = {}
        for node, node_steps in steps.items():
            for name in (node.name or "", *(step.name for step in node_steps)):
                node_of.setdefault(name, node)
        removals: dict[str, tuple[str, Removal]] = {}
        for report in self.reports:
            for removal in report.removed:
                removals.setdefault(removal.where, (report.name, removal))
        for name, (pass_name, removal) in removals.items():
            source = self.names.get(name)
            if source is None or source.name != name or source in self.before.constant or source in record.identical:
                continue
            record.removals[source] = (pass_name, node_of.get(_heir(removal, removals, node_of)))


def _heir(removal: Removal, removals: Mapping[str, tuple[str, Removal]], node_of: Collection[str]) -> str:
    """Return the name of what took the place of a node: it may be gone itself, with heirs of its own; else ""."""
    waiting, visits = list(removal.by), set[str]()
    while waiting:
        name = waiting.pop(0)
        if name in node_of:
            return name
        waiting += removals[name][1].by if name in removals and name not in visits else []
        visits.add(name)
    return ""


def _kind(node: ir.Node) -> tuple[str, str]:
    return node.domain, node.op_type
