"""Puts it together: the record or a matching, what is different in each pair, and what became of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import onnx_ir as ir

from graphopt.analysis.structure.cost import weight_totals
from graphopt.analysis.structure.matching import CONFIDENCE, Matching, Side, match
from graphopt.analysis.structure.matching.side import graph_key
from graphopt.report.description import stage_of
from graphopt.report.difference.changes import Comparer, operator
from graphopt.report.difference.grouping import group_edges
from graphopt.report.difference.ports import Ports
from graphopt.report.difference.record import Record, record_of
from graphopt.report.trace import Change, Diff, Edge
from graphopt.report.trace_builder import open_model

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping
    from pathlib import Path

    from graphopt.artifact.manifest import Manifest


def diff(before: Path, after: Path, *, numbers: bool = True) -> Diff:
    """Open two models and say how the second differs from the first.

    Args:
        before: an artifact, or an .onnx file, of graphopt or not.
        after: another.
        numbers: compare weights of one format number by number; if false, by a sample of their bytes.

    Raises:
        InputError: there is no model, or it cannot be read.
    """
    return diff_of(open_model(before), open_model(after), (str(before), str(after)), numbers=numbers)


def diff_of(
    before: tuple[ir.Model, Manifest | None],
    after: tuple[ir.Model, Manifest | None],
    names: tuple[str, str] = ("before", "after"),
    *,
    numbers: bool = True,
) -> Diff:
    """Say how the second of two models differs from the first; see :func:`diff`."""
    return _Differ(before, after, numbers).diff(names)


_Group: TypeAlias = "tuple[dict[ir.Node, None], dict[ir.Node, None]]"
"""Nodes of the first model that became nodes of the second, in order."""


class _Differ:
    def __init__(
        self, before: tuple[ir.Model, Manifest | None], after: tuple[ir.Model, Manifest | None], numbers: bool
    ) -> None:
        keys: dict[Hashable, int] = {}
        self.models, self.manifests = (before[0], after[0]), (before[1], after[1])
        self.before, self.after = Side(before[0].graph, keys), Side(after[0].graph, keys)
        self.record = record_of(self.before, self.after, after[1], before[1])
        record = self.record or Record()
        self.matching: Matching = match(self.before, self.after, record.identical, record.without_partner)
        self.origin_record = record
        self.edges: list[tuple[list[ir.Node], list[ir.Node]]] = self._joint_edges()
        self.ports = Ports(self.before, self.after, self.matching)
        edge_of = {node: number for number, edge in enumerate(self.edges) for nodes in edge for node in nodes}
        self.comparer = Comparer(self.before, self.after, self.matching, edge_of, self.ports.inputs, numbers)

    def diff(self, names: tuple[str, str]) -> Diff:
        """Return it."""
        edges, kept_pairs = self._edges(), len(self.matching.pairs) - self._edit_count
        ports = [*self.ports.changes(self.comparer.is_same), *self._functions()]
        totals = [weight_totals(model) for model in self.models]
        earlier_passes = 0 if self.manifests[0] is None else len(self.manifests[0].passes)
        manifest = self.manifests[1]
        reports = [] if self.record is None or manifest is None else manifest.passes[earlier_passes:]
        return Diff(
            before=names[0],
            after=names[1],
            equal=not edges and not ports,
            record=self.record is not None,
            kept=kept_pairs,
            nodes=(len(self.before.graph), len(self.after.graph)),
            parameters=(totals[0].parameters, totals[1].parameters),
            bytes=(totals[0].bytes, totals[1].bytes),
            stages=[stage_of(report, manifest) for report in reports if manifest is not None],
            edges=edges,
            groups=group_edges(edges, self._folds()),
            ports=ports,
            notes=self._notes(different=bool(edges or ports)),
        )

    def _joint_edges(self) -> list[tuple[list[ir.Node], list[ir.Node]]]:
        """Return the nodes that others were made of, together with these, by the record."""
        groups: list[_Group] = []
        group_of: dict[ir.Node, _Group] = {}
        for source, heirs in self._heirs().items():
            # Several nodes that were made of the same ones are one edge.
            overlaps = list(
                {id(group_of[node]): group_of[node] for node in (source, *heirs) if node in group_of}.values()
            )
            group: _Group = ({}, {})
            for before, after in [*overlaps, ({source: None}, heirs)]:
                group[0].update(before)
                group[1].update(after)
            groups = [earlier for earlier in groups if not any(earlier is part for part in overlaps)] + [group]
            group_of.update({node: group for nodes in group for node in nodes})
        return [(list(before), list(after)) for before, after in groups]

    def _heirs(self) -> dict[ir.Node, dict[ir.Node, None]]:
        """Return the nodes without a partner that others were made of, by the record, each with these."""
        heirs: dict[ir.Node, dict[ir.Node, None]] = {}
        for node, sources in self.origin_record.origins.items():
            for source in sources:
                if source not in self.matching.pairs and self._in_same_layer(source, node):
                    heirs.setdefault(source, {})[node] = None
        for source, (_, heir) in self.origin_record.removals.items():
            is_settled = source in self.matching.pairs or source in heirs
            if heir is not None and not is_settled and self._in_same_layer(source, heir):
                heirs.setdefault(source, {})[heir] = None
        return heirs

    def _in_same_layer(self, first: ir.Node, second: ir.Node) -> bool:
        """Return whether two nodes are in the same layer, or one is in none."""
        layers = self.before.layer.get(first), self.after.layer.get(second)
        return layers[0] == layers[1]

    def _edges(self) -> list[Edge]:
        edges, edge_nodes = [], set[ir.Node]()
        self._edit_count = 0
        pairs, back = self.matching.pairs, self.matching.back
        for before, after in self.edges:
            members = [(back[node], node) for node in after if node in back]
            changes = [change for source, node in members for change in self.comparer.changes(source, node)]
            sources = [*before, *(source for source, _ in members)]
            self._edit_count += len(members)
            edge_nodes |= {*sources, *after}
            edges.append(self._edge("replaced", sources, after, changes))
        for source, node in pairs.items():
            changes = [] if source in edge_nodes else self.comparer.changes(source, node)
            if changes:
                self._edit_count += 1
                kind = "replaced" if any(change.what == "operator" for change in changes) else "edited"
                edges.append(self._edge(kind, [source], [node], changes))
        edge_nodes |= {*pairs, *back}
        edges += [self._edge("removed", [node], [], []) for node in self.before.nodes if node not in edge_nodes]
        return edges + [self._edge("added", [], [node], []) for node in self.after.nodes if node not in edge_nodes]

    def _edge(self, kind: str, before: list[ir.Node], after: list[ir.Node], changes: list[Change]) -> Edge:
        node, side = (after or before)[0], (self.before, self.after)[bool(after)]
        passes = self._passes(before, after)
        evidence = self.matching.evidence.get(before[-1]) if before else None
        evidence = "record" if passes else evidence
        return Edge(
            kind=kind,  # type: ignore[arg-type]
            before=[member.name or "" for member in before],
            after=[member.name or "" for member in after],
            operators=([operator(member) for member in before], [operator(member) for member in after]),
            role=side.roles[node],
            layer=side.layer.get(node),
            passes=[name for name in passes if name],
            by=evidence or "",
            confidence=1.0 if evidence in (None, "record") else CONFIDENCE.get(evidence, 1.0),
            changes=changes,
        )

    def _passes(self, before: list[ir.Node], after: list[ir.Node]) -> list[str]:
        """Return the passes that led from nodes of the first model to nodes of the second, by the record."""
        record = self.origin_record
        names = [name for node in after for name in record.passes.get(node, ())]
        names += [record.removals[node][0] for node in before if node in record.removals]
        return list(dict.fromkeys(names))

    def _folds(self) -> list[list[int]]:
        """Return the layers of each structure, of both models."""
        folds: list[list[int]] = []
        for side in (self.before, self.after):
            kinds: dict[Hashable, list[int]] = {}
            for number, layer in enumerate(side.folding.layers()):
                kinds.setdefault(tuple(side.folding.structures[segment] for segment in layer), []).append(number)
            folds += kinds.values()
        return folds

    def _functions(self) -> list[Change]:
        before, after = (
            {key: graph_key(function) for key, function in model.functions.items()} for model in self.models
        )
        keys = sorted(key for key in before.keys() & after.keys() if before[key] != after[key])
        return [
            Change(what="operator", name="::".join(filter(None, key)), before="a body", after="another body")
            for key in keys
        ]

    def _notes(self, different: bool) -> list[str]:
        pairs: Mapping[ir.Node, ir.Node] = self.matching.pairs
        renames = sum(source.name != partner.name for source, partner in pairs.items())
        notes = [f"nodes that are the same under other names: {renames:,}"] if renames else []
        notes += self.ports.notes
        versions = [dict(sorted(model.opset_imports.items())) for model in self.models]
        if versions[0].get("") != versions[1].get(""):
            notes.append(f"opset {versions[0].get('')} became {versions[1].get('')}")
        if self.record is None and different:
            notes.append("no record leads from one model to the other: nodes are matched by structure and weights")
        return notes
