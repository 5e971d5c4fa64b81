"""Bases: the sets of tensor axes that must be rotated together, found from the graph alone.

Every axis of every tensor is a node; two axes are joined when an op forces them into the same basis. What remains
connected is a *basis*. Weights *write* a basis with their output axis and *read* it with their input axis. An op that
looks at single coordinates *pins* it. For an orthogonal Q, an unpinned basis may be rotated: multiply Q into every
writer and Q^T into every reader, and the function stays what it was (QuaRot, Ashkboos et al. 2024, section 3, after
SliceGPT's computational invariance; here without a table of model families).

What an op does to bases is a rule in :mod:`graphopt.analysis.rules`; an op without a rule pins what it touches, and
says so.
"""

from __future__ import annotations

import onnx_ir as ir

from graphopt.analysis.axes import Basis, BasisGraph
from graphopt.analysis.rules import RULES, observe


def find_bases(graph: ir.Graph) -> list[Basis]:
    """Return the bases of ``graph`` that some weight writes or reads, pinned ones included, in graph order."""
    found = BasisGraph()
    for value in graph.inputs:
        _pin_port(found, value, "graph input")
    for node in graph:
        RULES.get((node.domain, node.op_type), observe)(found, node)
    for value in graph.outputs:
        _pin_port(found, value, "graph output")
    return [basis for basis in found.bases() if basis.writers or basis.readers]


def _pin_port(found: BasisGraph, value: ir.Value, what: str) -> None:
    if value.shape is None or value.dtype is None or not value.dtype.is_floating_point():
        return
    for index in range(len(value.shape)):
        found.pin(found.axis(value, index, len(value.shape)), value.name or "", f"it is a {what}, observed by the app")
