"""What a pass meets the world through: where it writes down what it does, and what it may know besides the graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from graphopt import provenance
from graphopt.facts import TEXT, Change, Fact, PassReport, Removal, Skip


class Ledger:
    """Where a pass writes down what it does: the report and the provenance are one act."""

    def __init__(self, report: PassReport) -> None:
        self.report = report

    def changed(
        self, item: ir.Node | ir.Value, what: Fact | str, sources: Iterable[ir.Node | ir.Value | str] = ()
    ) -> None:
        """Record that ``item`` was made, or edited, from ``sources``."""
        provenance.record(item, self.report.name, sources)
        self.report_change(item.name or "?", what)

    def report_change(self, where: str, what: Fact | str) -> None:
        """Record a change that no single node stands for."""
        self.report.changes.append(Change(where=where, what=_fact(what)))

    def skipped(self, item: ir.Node | ir.Value | str, reason: Fact | str, *, node: str | None = None) -> None:
        """Record that ``item`` was left alone, and why; ``node`` is the reason where it is another one."""
        where = item if isinstance(item, str) else item.name or "?"
        self.report.skips.append(Skip(where=where, reason=_fact(reason), node=node))


def _fact(said: Fact | str) -> Fact:
    return TEXT(text=said) if isinstance(said, str) else said


class Removals:
    """Finds which nodes of a graph a pass takes away: compares the graph of before, made note of here, with the later.

    Args:
        graph: the graph before the pass.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._before = {node: [name for name in (node.name, *_outputs(node)) if name] for node in graph}

    def found(self, graph: ir.Graph, pass_name: str) -> list[Removal]:
        """Return the nodes that are gone, each with what was made from it by the pass, or is in its outputs' place."""
        kept = set(graph)
        known = {(node.name, node.domain, node.op_type) for node in kept}
        heirs: dict[str, list[str]] = {name: [name] for name in graph.initializers}
        for node in graph:
            steps = [step for step in provenance.steps(node) if step.pass_name == pass_name]
            for name in {*(source for step in steps for source in step.sources), *_outputs(node)}:
                heirs.setdefault(name, []).append(node.name or "?")
        return [
            Removal(
                where=node.name or "?",
                op_type=node.op_type,
                by=list(dict.fromkeys(heir for name in names for heir in heirs.get(name, ()))),
            )
            for node, names in self._before.items()
            if node not in kept and (node.name, node.domain, node.op_type) not in known
        ]


def _outputs(node: ir.Node) -> list[str]:
    return [output.name for output in node.outputs if output.name]


@dataclass
class Context:
    """What a pass is given beside the model.

    Attributes:
        ledger: where it writes down every change and every skip.
    """

    ledger: Ledger
