"""Puts it together: the record or a matching, what is different in each pair, and what became of the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.structure.cost import weight_totals
from graphopt.analysis.structure.matching import CONFIDENCE, Matching, Side, match
from graphopt.analysis.structure.matching.side import graph_key
from graphopt.report.description import stage_of
from graphopt.report.difference.changes import Comparer, operator
from graphopt.report.difference.grouping import grouped
from graphopt.report.difference.ports import Ports
from graphopt.report.difference.record import Record, record_of
from graphopt.report.trace import Change, Diff, Edge
from graphopt.report.trace_builder import opened

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
    return diff_of(opened(before), opened(after), (str(before), str(after)), numbers=numbers)


def diff_of(
    before: tuple[ir.Model, Manifest | None],
    after: tuple[ir.Model, Manifest | None],
    names: tuple[str, str] = ("before", "after"),
    *,
    numbers: bool = True,
) -> Diff:
    """Say how the second of two models differs from the first; see :func:`diff`."""
    return _Differ(before, after, numbers).diff(names)


class _Differ:
    def __init__(
        self, before: tuple[ir.Model, Manifest | None], after: tuple[ir.Model, Manifest | None], numbers: bool
    ) -> None:
        known: dict[Hashable, int] = {}
        self.models, self.manifests = (before[0], after[0]), (before[1], after[1])
        self.before, self.after = Side(before[0].graph, known), Side(after[0].graph, known)
        self.record = record_of(self.before, self.after, after[1], before[1])
        said = self.record or Record()
        self.matched: Matching = match(self.before, self.after, said.same, said.settled)
        self.said = said
        self.edges: list[tuple[list[ir.Node], list[ir.Node]]] = self._several()
        self.ports = Ports(self.before, self.after, self.matched)
        together = {node: number for number, both in enumerate(self.edges) for nodes in both for node in nodes}
        self.comparer = Comparer(self.before, self.after, self.matched, together, self.ports.inputs, numbers)

    def diff(self, names: tuple[str, str]) -> Diff:
        """Return it."""
        found, kept = self._edges(), len(self.matched.pairs) - self._edited
        ports = [*self.ports.changes(self.comparer.same), *self._functions()]
        totals = [weight_totals(model) for model in self.models]
        ran = 0 if self.manifests[0] is None else len(self.manifests[0].passes)
        manifest = self.manifests[1]
        reports = [] if self.record is None or manifest is None else manifest.passes[ran:]
        return Diff(
            before=names[0],
            after=names[1],
            equal=not found and not ports,
            record=self.record is not None,
            kept=kept,
            nodes=(len(self.before.graph), len(self.after.graph)),
            parameters=(totals[0].parameters, totals[1].parameters),
            bytes=(totals[0].bytes, totals[1].bytes),
            stages=[stage_of(report, manifest) for report in reports if manifest is not None],
            edges=found,
            groups=grouped(found, self._folds()),
            ports=ports,
            notes=self._notes(different=bool(found or ports)),
        )

    def _several(self) -> list[tuple[list[ir.Node], list[ir.Node]]]:
        """Return the nodes that others were made of, together with these, by the record."""
        becoming: dict[ir.Node, dict[ir.Node, None]] = {}
        for node, sources in self.said.made.items():
            for source in sources:
                if source not in self.matched.pairs and self._near(source, node):
                    becoming.setdefault(source, {})[node] = None
        for source, (_, heir) in self.said.gone.items():
            known = source in self.matched.pairs or source in becoming
            if heir is not None and not known and self._near(source, heir):
                becoming.setdefault(source, {})[heir] = None
        # Several nodes that were made of the same ones are one edge.
        groups: list[tuple[dict[ir.Node, None], dict[ir.Node, None]]] = []
        of: dict[ir.Node, tuple[dict[ir.Node, None], dict[ir.Node, None]]] = {}
        for source, heirs in becoming.items():
            joined = list({id(of[node]): of[node] for node in (source, *heirs) if node in of}.values())
            edge: tuple[dict[ir.Node, None], dict[ir.Node, None]] = ({}, {})
            for part in [*joined, ({source: None}, heirs)]:
                edge[0].update(part[0])
                edge[1].update(part[1])
            groups = [each for each in groups if not any(each is part for part in joined)] + [edge]
            of.update({node: edge for nodes in edge for node in nodes})
        return [(list(before), list(after)) for before, after in groups]

    def _near(self, ours: ir.Node, theirs: ir.Node) -> bool:
        """Return whether two nodes are in the same layer, or one is in none."""
        layers = self.before.layer.get(ours), self.after.layer.get(theirs)
        return layers[0] == layers[1]

    def _edges(self) -> list[Edge]:
        found, told = [], set[ir.Node]()
        self._edited = 0
        for before, after in self.edges:
            pairs = [(self.matched.back[node], node) for node in after if node in self.matched.back]
            changes = [change for ours, theirs in pairs for change in self.comparer.changes(ours, theirs)]
            ours = [*before, *(mine for mine, _ in pairs)]
            self._edited += len(pairs)
            told |= {*ours, *after}
            found.append(self._edge("replaced", ours, after, changes))
        for ours_, theirs in self.matched.pairs.items():
            changes = [] if ours_ in told else self.comparer.changes(ours_, theirs)
            if changes:
                self._edited += 1
                kind = "replaced" if any(change.what == "operator" for change in changes) else "edited"
                found.append(self._edge(kind, [ours_], [theirs], changes))
        gone = [node for node in self.before.nodes if node not in self.matched.pairs and node not in told]
        new = [node for node in self.after.nodes if node not in self.matched.back and node not in told]
        found += [self._edge("removed", [node], [], []) for node in gone]
        return found + [self._edge("added", [], [node], []) for node in new]

    def _edge(self, kind: str, before: list[ir.Node], after: list[ir.Node], changes: list[Change]) -> Edge:
        node, side = (after or before)[0], (self.before, self.after)[bool(after)]
        passes = dict.fromkeys(name for each in after for name in self.said.passes.get(each, ()))
        passes.update(dict.fromkeys(self.said.gone[each][0] for each in before if each in self.said.gone))
        how = None if not before else self.matched.how.get(before[-1])
        recorded = bool(passes) or how == "record"
        ordered = [each for each in passes if each]
        return Edge(
            kind=kind,  # type: ignore[arg-type]
            before=[each.name or "" for each in before],
            after=[each.name or "" for each in after],
            operators=([operator(each) for each in before], [operator(each) for each in after]),
            role=side.roles[node],
            layer=side.layer.get(node),
            passes=ordered,
            by="record" if recorded else how or "",
            confidence=1.0 if recorded else CONFIDENCE.get(how, 1.0) if how else 1.0,
            changes=changes,
        )

    def _folds(self) -> list[list[int]]:
        """Return the layers of each structure, of both models."""
        found: list[list[int]] = []
        for side in (self.before, self.after):
            kinds: dict[Hashable, list[int]] = {}
            for number, layer in enumerate(side.folded.layers()):
                kinds.setdefault(tuple(side.folded.structures[each] for each in layer), []).append(number)
            found += kinds.values()
        return found

    def _functions(self) -> list[Change]:
        ours, theirs = ({key: graph_key(each) for key, each in model.functions.items()} for model in self.models)
        keys = sorted(key for key in ours.keys() & theirs.keys() if ours[key] != theirs[key])
        return [
            Change(what="operator", name="::".join(filter(None, key)), before="a body", after="another body")
            for key in keys
        ]

    def _notes(self, different: bool) -> list[str]:
        pairs: Mapping[ir.Node, ir.Node] = self.matched.pairs
        renamed = sum(ours.name != theirs.name for ours, theirs in pairs.items())
        notes = [f"nodes that are the same under other names: {renamed:,}"] if renamed else []
        notes += self.ports.notes
        versions = [dict(sorted(model.opset_imports.items())) for model in self.models]
        if versions[0].get("") != versions[1].get(""):
            notes.append(f"opset {versions[0].get('')} became {versions[1].get('')}")
        if self.record is None and different:
            notes.append("no record leads from one model to the other: nodes are matched by structure and weights")
        return notes
