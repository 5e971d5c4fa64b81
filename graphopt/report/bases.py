"""Bases as a report: data for a program, lines for a reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import BaseModel

from graphopt.analysis.bases.axes import Basis, Role, WeightAxis
from graphopt.analysis.structure.folding import fold
from graphopt.graph.diagnostics import Fact
from graphopt.report.escape import plain, ranges
from graphopt.report.sentences import sentence

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import onnx_ir as ir


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
    observation = next((pin for pin in basis.pins if pin.side == "observed"), None)
    pin = observation or next(iter(basis.pins), None)
    verdict = "free" if pin is None else "pinned" if observation is not None else "at run time"
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


def lines(reports: Sequence[BasisReport], graph: ir.Graph | None = None) -> list[str]:
    """Say of each basis, in a line or two, what is around it and what keeps it from being rotated.

    Args:
        reports: the bases.
        graph: where they are: bases at one place in layers of one structure, of which the same is to be said, are said
            once, by the first.
    """
    verdicts = {"free": "for free", "at run time": "at run time", "pinned": "not to be rotated"}
    positions = {} if graph is None else _positions(graph)
    layers_of: dict[Hashable, list[int]] = {}
    first: dict[Hashable, BasisReport] = {}
    for number, report in enumerate(reports):
        position, layer = positions.get(report.name, (("alone", number), None))
        reason = report.reason and sentence(report.reason)
        counts = len(report.writers), len(report.readers)
        key: Hashable = (position, report.role, report.width, report.verdict, reason, counts)
        first.setdefault(key, report)
        layers_of.setdefault(key, []).extend([] if layer is None else [layer])
    texts = []
    for first_key, report in first.items():
        counts_text = f"{len(report.writers)} writer(s), {len(report.readers)} reader(s)"
        repeats = (
            f"  (x {len(layers_of[first_key])}, layers {ranges(layers_of[first_key])})"
            if len(layers_of[first_key]) > 1
            else ""
        )
        reason_text = f"\n    {plain(report.node or '')}: {report.reason and sentence(report.reason)}"
        head = f"{plain(report.name)} [{report.width or '?'}]  {report.role}, {counts_text}: "
        head += verdicts[report.verdict] + repeats
        texts.append(head if report.node is None else head + reason_text)
    return texts


def _positions(graph: ir.Graph) -> dict[str, tuple[Hashable, int]]:
    """Return of each tensor that a layer makes: the fold of the layer and the place in it, and the layer."""
    folding = fold(graph)
    positions: dict[str, tuple[Hashable, int]] = {}
    for number, layer in enumerate(folding.layers()):
        kind = tuple(folding.structures[segment] for segment in layer)
        nodes = [node for segment in layer for node in folding.order[segment]]
        for index, node in enumerate(nodes):
            for value in node.outputs:
                positions[value.name or ""] = ((kind, index, value.index()), number)
    return positions


def _name(site: WeightAxis) -> str:
    copies = f" ({len(site.starts)} times)" if len(site.starts) > 1 else ""
    return f"{site.node.name}{copies}"
