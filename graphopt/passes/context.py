"""What a pass meets the world through: where it writes down what it does, and what it may know besides the graph."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from graphopt import provenance
from graphopt.facts import Change, PassReport, Skip


class Ledger:
    """Where a pass writes down what it does: the report and the provenance are one act."""

    def __init__(self, report: PassReport) -> None:
        self.report = report

    def changed(self, item: ir.Node | ir.Value, what: str, sources: Iterable[ir.Node | ir.Value | str] = ()) -> None:
        """Record that ``item`` was made, or edited, from ``sources``."""
        provenance.record(item, self.report.name, sources)
        self.report.changes.append(Change(where=item.name or "?", what=what))

    def report_change(self, where: str, what: str) -> None:
        """Record a change that no single node stands for."""
        self.report.changes.append(Change(where=where, what=what))

    def skipped(self, item: ir.Node | ir.Value | str, reason: str) -> None:
        """Record that ``item`` was left alone, and why."""
        where = item if isinstance(item, str) else item.name or "?"
        self.report.skips.append(Skip(where=where, reason=reason))


@dataclass
class Context:
    """What a pass is given beside the model.

    Attributes:
        ledger: where it writes down every change and every skip.
    """

    ledger: Ledger
