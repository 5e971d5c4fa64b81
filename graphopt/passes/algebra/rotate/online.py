"""Where rotations at run time go, and the nodes that make them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import networkx as nx

from graphopt.analysis.bases.axes import Basis, static_size
from graphopt.graph.diagnostics import Fact, Rule
from graphopt.graph.editing import free_name, insert_behind, shared_constant
from graphopt.runtime_ops import OPERATORS

if TYPE_CHECKING:
    import onnx_ir as ir

    from graphopt.numerics.rotations import HadamardRotation
    from graphopt.passes.context import Ledger

_BLIND = ("Shape", "Size")

ONLINE = Rule("rotate.online", "rotates {tensor} at run time by {rotation}")
NOT_READ = Rule("rotate.read-nowhere-else", "nothing reads it in other coordinates")
NEVER_LAST = Rule(
    "rotate.never-last-axis", "it is never the last axis of a tensor between what makes it and what reads it"
)
MORE_THAN_ONCE = Rule(
    "rotate.more-than-once", "rotating it would take more than one rotation on some way through the graph"
)


def places_behind_makers(graph: ir.Graph, basis: Basis) -> list[ir.Value] | Fact:
    """Return the tensors to rotate so that all of ``basis`` is rotated that is not made in its own coordinates.

    What makes the basis hands its coordinates on, through transposes, additions and the like, to weights and attention.
    Between the two, the fewest numbers per token that must be rotated are a minimum cut of the graph of tensors.

    Returns:
        The tensors, or why there are none.
    """
    inside = {axis.tensor: axis.index for axis in basis.axes if not axis.part}
    makers = {pin.tensor for pin in basis.pins}
    writing = {site.node for site in basis.writers}
    plain_values = _plain_values(graph, inside, makers, writing)
    flow: nx.DiGraph[tuple[str, str]] = nx.DiGraph()
    source, sink = ("", "source"), ("", "sink")
    flow.add_nodes_from((source, sink))
    for name, value in plain_values.items():
        if _can_rotate(value, inside[name], basis.width):
            flow.add_edge((name, "in"), (name, "out"), capacity=_numbers(value))
        else:
            flow.add_edge((name, "in"), (name, "out"))
        if name in makers:
            flow.add_edge(source, (name, "in"))
        for use in value.uses():
            if use.node.op_type in _BLIND:
                continue
            outputs = [output.name or "" for output in use.node.outputs if (output.name or "") in inside]
            for output in outputs:
                if output in plain_values:
                    flow.add_edge((name, "out"), (output, "in"))
            if not outputs or any(output not in plain_values for output in outputs):
                flow.add_edge((name, "out"), sink)
    if not nx.has_path(flow, source, sink):
        return NOT_READ()
    try:
        _, (near_side, far) = nx.minimum_cut(flow, source, sink)
    except nx.NetworkXUnbounded:
        return NEVER_LAST()
    cut = {name for name in plain_values if (name, "in") in near_side and (name, "out") in far}
    if not _consistent(plain_values, makers, cut, set(inside)):
        return MORE_THAN_ONCE()
    return [plain_values[name] for name in plain_values if name in cut]


def _plain_values(
    graph: ir.Graph, inside: dict[str, int], makers: set[str], writing: set[ir.Node]
) -> dict[str, ir.Value]:
    """Return the tensors of the basis that get their coordinates from its makers alone, in graph order."""
    values = {name: value for value in graph.inputs if (name := value.name or "") in makers}
    for node in graph:
        sources = [value.name for value in node.inputs if value is not None and value.name in inside]
        is_carried = bool(sources) and node not in writing and all(name in values for name in sources)
        for value in node.outputs:
            if value.name in inside and (value.name in makers or is_carried):
                values[value.name] = value
    return values


def _can_rotate(value: ir.Value, index: int, width: int | None) -> bool:
    if value.shape is None or value.is_graph_output():
        return False
    return index == len(value.shape) - 1 and value.shape[index] == width


def _numbers(value: ir.Value) -> int:
    """Return how many numbers ``value`` holds per token."""
    assert value.shape is not None
    return math.prod(number for dim in value.shape if (number := static_size(dim)) is not None)


def _consistent(plain_values: dict[str, ir.Value], makers: set[str], cut: set[str], inside: set[str]) -> bool:
    """Whether every tensor behind the cut is rotated on all ways to it, and once."""
    is_rotated: dict[str, bool] = {}
    for name, value in plain_values.items():
        producer = value.producer()
        before = set()
        if name not in makers and producer is not None:
            names = {v.name or "" for v in producer.inputs if v is not None and v.name in inside}
            before = {is_rotated[source] for source in names}
        if len(before) > 1 or (before == {True} and name in cut):
            return False
        is_rotated[name] = name in cut or before == {True}
    return True


def insert(
    graph: ir.Graph, value: ir.Value, rotation: HadamardRotation, ledger: Ledger, readers: set[ir.Node] | None = None
) -> ir.Node:
    """Put a ``Hadamard`` behind ``value``, for all that uses it or for ``readers`` only; blocks of its last axis."""
    name = free_name(graph, f"{value.name}.hadamard")
    if value.is_graph_input():
        # What reads its size alone goes on to read it of the input: masks are then computed of inputs only.
        readers = readers or {use.node for use in value.uses() if use.node.op_type not in _BLIND}
    node = OPERATORS["Hadamard"].node([value, *matrices(graph, rotation)], name=name)
    insert_behind(value, node, readers)
    ledger.changed(node, ONLINE(tensor=value.name, rotation=rotation.kind), [value])
    return node


def matrices(graph: ir.Graph, rotation: HadamardRotation) -> list[ir.Value]:
    """Return the two factors of ``rotation`` as initializers, shared by all rotations of the same order."""
    values: list[ir.Value] = []
    for matrix in rotation.pair:
        name = f"hadamard.{rotation.kind}.{len(values)}".replace(" ", "_").replace(",", "")
        values.append(shared_constant(graph, name, matrix))
    return values
