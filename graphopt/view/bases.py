"""Bases as a report: data for a program, lines for a reader."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from graphopt.analysis.axes import Basis, Role, WeightAxis
from graphopt.facts import Fact
from graphopt.view.sentences import sentence


class BasisReport(BaseModel):
    """One basis, in words.

    Attributes:
        name: the first tensor that lies in it.
        role: what it is to the model.
        width: its dimension, ``None`` where it varies.
        writers: the nodes whose weights write it, and how often where it is one head of several.
        readers: the same for those that read it.
        verdict: ``free``, ``at run time`` or ``pinned``.
        node: the first node that pins it.
        reason: why it does.
    """

    name: str
    role: Role
    width: int | None
    writers: list[str]
    readers: list[str]
    verdict: str
    node: str | None
    reason: Fact | None


def describe(basis: Basis) -> BasisReport:
    """Say what can be done with ``basis``.

    A basis that is pinned by what makes it alone can be rotated behind that at run time; one that is observed cannot.
    """
    observed = next((pin for pin in basis.pins if pin.side == "observed"), None)
    pin = observed or next(iter(basis.pins), None)
    verdict = "free" if pin is None else "pinned" if observed is not None else "at run time"
    return BasisReport(
        name=basis.name,
        role=basis.role,
        width=basis.width,
        writers=[_name(site) for site in basis.writers],
        readers=[_name(site) for site in basis.readers],
        verdict=verdict,
        node=None if pin is None else pin.node,
        reason=None if pin is None else pin.reason,
    )


def lines(reports: Sequence[BasisReport]) -> list[str]:
    """Say of each basis, in a line or two, what is around it and what keeps it from being rotated."""
    verdicts = {"free": "for free", "at run time": "at run time", "pinned": "not to be rotated"}
    said = []
    for report in reports:
        counts = f"{len(report.writers)} writer(s), {len(report.readers)} reader(s)"
        said.append(
            f"{report.name} [{report.width or '?'}]  {report.role}, {counts}: {verdicts[report.verdict]}"
            + ("" if report.node is None else f"\n    {report.node}: {report.reason and sentence(report.reason)}")
        )
    return said


def _name(site: WeightAxis) -> str:
    copies = f" ({len(site.starts)} times)" if len(site.starts) > 1 else ""
    return f"{site.node.name}{copies}"
