"""Bases: the sets of tensor axes that must be rotated together, found from the graph alone.

Every axis of every tensor is a node; two axes are joined when an op forces them into the same basis. What remains
connected is a *basis*. Weights *write* a basis with their output axis and *read* it with their input axis. An op that
looks at single coordinates *pins* it. For an orthogonal Q, an unpinned basis may be rotated: multiply Q into every
writer and Q^T into every reader, and the function stays what it was (QuaRot, Ashkboos et al. 2024, section 3, after
SliceGPT's computational invariance; here without a table of model families).

What an op does to bases is a rule in :mod:`graphopt.analysis.bases.rules`; an op without a rule pins what it touches,
and says so. How axes that consist of others are resolved is in :mod:`graphopt.analysis.bases.refinement`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.analysis.bases.axes import Basis, BasisGraph, Side
from graphopt.analysis.bases.pins import PORT, READ_BY_SUBGRAPH
from graphopt.analysis.bases.refinement import bases_of
from graphopt.analysis.bases.rules import RULES, observe
from graphopt.analysis.bases.rules.common import is_floating
from graphopt.analysis.structure.ports import past_port

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence


def find_bases(graph: ir.Graph) -> list[Basis]:
    """Return the bases of ``graph`` that some weight writes or reads or attention contracts, in graph order.

    A KV cache is no pin: what the app gets as ``present.N.key`` it gives back as ``past_key_values.N.key`` unread,
    so both may lie in a rotated basis, the same one.
    """
    bases, caches = BasisGraph(), cache_ports(graph)
    _pin_ports(bases, graph.inputs, caches, "made")
    for node in graph:
        if any(value is not None and is_floating(value) for value in (*node.inputs, *node.outputs)):
            RULES.get((node.domain, node.op_type), observe)(bases, node)
        _pin_captures(bases, node)
    _pin_ports(bases, graph.outputs, caches, "observed")
    _join_caches(bases, graph, caches)
    return [basis for basis in bases_of(bases) if basis.writers or basis.readers or _is_contracted(basis)]


def _is_contracted(basis: Basis) -> bool:
    # Scores times values is a contraction too, over positions, whose number varies at run time.
    return bool(basis.marks) and basis.width is not None


def cache_ports(graph: ir.Graph) -> dict[str | None, str]:
    """Return the other end of every cache port: ``past_key_values.N.key`` and ``present.N.key``, both ways."""
    ports: dict[str | None, str] = {}
    outputs = {value.name: value for value in graph.outputs}
    for value in graph.inputs:
        port = past_port(value)
        twin = outputs.get(port.present) if port is not None and (port.grows or port.is_recurrent) else None
        if twin is not None and twin is not value and _is_same_rank(value, twin):
            ports[value.name], ports[twin.name] = twin.name or "", value.name or ""
    return ports


def _is_same_rank(a: ir.Value, b: ir.Value) -> bool:
    return a.shape is not None and b.shape is not None and len(a.shape) == len(b.shape)


def _pin_ports(bases: BasisGraph, values: Sequence[ir.Value], caches: Container[str | None], side: Side) -> None:
    reason = PORT(port="graph input" if side == "made" else "graph output")
    for value in values:
        if is_floating(value) and value.name not in caches:
            bases.pin_axes(bases.axes(value), value, reason, side)


def _join_caches(bases: BasisGraph, graph: ir.Graph, caches: Mapping[str | None, str]) -> None:
    outputs = {value.name: value for value in graph.outputs}
    for value in graph.inputs:
        if value.name in caches:
            for past, present in zip(bases.axes(value), bases.axes(outputs[caches[value.name]]), strict=True):
                bases.join(past, present, None)


def _pin_captures(bases: BasisGraph, node: ir.Node) -> None:
    """Pin what a subgraph of ``node`` reads from outside without naming it as an input."""
    for attribute in node.attributes.values():
        if attribute.type != ir.AttributeType.GRAPH:
            continue
        for inner in attribute.as_graph().all_nodes():
            for value in inner.inputs:
                if value is not None and value.graph is node.graph and is_floating(value):
                    bases.pin_axes(bases.axes(value), node, READ_BY_SUBGRAPH(op=node.op_type), "observed")
