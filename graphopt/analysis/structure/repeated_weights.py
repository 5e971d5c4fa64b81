"""Weights that a file holds several times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.graph.weights import expression_of

if TYPE_CHECKING:
    import onnx_ir as ir

_SMALLEST = 256
"""Bytes from which a weight counts: smaller ones are constants, such as shapes, that each node may have its own of."""


def repeated_weights(model: ir.Model) -> list[tuple[ir.Value, list[ir.Value]]]:
    """Return each weight that is stored again, with its copies; all of them may lie in subgraphs.

    Equal are type, shape and every byte. One of the graph itself comes before those of subgraphs. One that is an output
    of a graph is no copy.
    """
    by_content: dict[tuple[object, ...], list[ir.Value]] = {}
    for graph in model.graphs():
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is None or tensor.nbytes < _SMALLEST or value.is_graph_output() or value.is_graph_input():
                continue
            key = (tensor.dtype, tuple(tensor.shape.numpy()), expression_of(tensor).digest)
            by_content.setdefault(key, []).append(value)
    groups = []
    for values in by_content.values():
        first = next((value for value in values if value.graph is model.graph), values[0])
        if len(values) > 1:
            groups.append((first, [value for value in values if value is not first]))
    return groups
