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

import onnx_ir as ir

from graphopt.analysis.bases.axes import Basis, BasisGraph
from graphopt.analysis.bases.pins import CAPTURED, PORT
from graphopt.analysis.bases.refinement import bases_of
from graphopt.analysis.bases.rules import RULES, observe
from graphopt.analysis.structure.ports import past_port


def find_bases(graph: ir.Graph) -> list[Basis]:
    """Return the bases of ``graph`` that some weight writes or reads or attention contracts, in graph order.

    A KV cache is no pin: what the app gets as ``present.N.key`` it gives back as ``past_key_values.N.key`` unread,
    so both may lie in a rotated basis, the same one.
    """
    found = BasisGraph()
    caches = cache_ports(graph)
    for value in graph.inputs:
        if _floating(value) and value.name not in caches:
            _pin_port(found, value, "graph input", "made")
    for node in graph:
        values = (*node.inputs, *node.outputs)
        if any(value is not None and _floating(value) for value in values):
            RULES.get((node.domain, node.op_type), observe)(found, node)
        _pin_captured(found, node)
    for value in graph.outputs:
        if _floating(value) and value.name not in caches:
            _pin_port(found, value, "graph output", "observed")
    outputs = {value.name: value for value in graph.outputs}
    for value in graph.inputs:
        if value.name in caches:
            for before, after in zip(found.axes(value), found.axes(outputs[caches[value.name]]), strict=True):
                found.join(before, after, None)
    return [basis for basis in bases_of(found) if basis.writers or basis.readers or _contracted(basis)]


def _contracted(basis: Basis) -> bool:
    # Scores times values is a contraction too, over positions, whose number varies at run time.
    return bool(basis.marks) and basis.width is not None


def cache_ports(graph: ir.Graph) -> dict[str | None, str]:
    """Return the other end of every cache port: ``past_key_values.N.key`` and ``present.N.key``, both ways."""
    ports: dict[str | None, str] = {}
    outputs = {value.name: value for value in graph.outputs}
    for value in graph.inputs:
        port = past_port(value)
        twin = outputs.get(port.present) if port is not None and port.grows else None
        same_rank = twin is not None and None not in (value.shape, twin.shape) and len(value.shape) == len(twin.shape)  # type: ignore[arg-type]
        if twin is not None and same_rank and twin is not value:
            ports[value.name], ports[twin.name] = twin.name or "", value.name or ""
    return ports


def _floating(value: ir.Value) -> bool:
    return value.dtype is None or value.dtype.is_floating_point()


def _pin_port(found: BasisGraph, value: ir.Value, port: str, side: str) -> None:
    for axis in found.axes(value):
        found.pin(axis, value.name or "", PORT(port=port), side)  # type: ignore[arg-type]


def _pin_captured(found: BasisGraph, node: ir.Node) -> None:
    """Pin what a subgraph of ``node`` reads from outside without naming it as an input."""
    for attribute in node.attributes.values():
        if attribute.type != ir.AttributeType.GRAPH:
            continue
        for inner in attribute.as_graph().all_nodes():
            for value in inner.inputs:
                if value is not None and value.graph is node.graph and _floating(value):
                    for axis in found.axes(value):
                        found.pin(axis, node.name or "", CAPTURED(op=node.op_type), "observed")
