"""Dimensions that only one layer knows, such as how many tokens an expert got: each copy of the layer has its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.models.unrolling.layer_of_node import NO_LAYER, GraphLayers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_NAME = re.compile(r"[A-Za-z_]\w*")


class Symbols:
    """Symbolic dimensions of a graph of layers.

    Args:
        graph: the graph.
        layers: which node belongs to which layer.
    """

    def __init__(self, graph: ir.Graph, layers: GraphLayers) -> None:
        everywhere = set(_names([*graph.inputs, *graph.initializers.values()]))
        common_values = (value for node in graph if layers.layer_of(node) == NO_LAYER for value in node.outputs)
        everywhere |= set(_names(common_values))
        self._names_of = {
            layer: set(_names(value for node in layers.nodes(layer) for value in node.outputs)) - everywhere
            for layer in range(layers.count)
        }

    def rename(self, shape: ir.Shape | None, n: int, template: int) -> ir.Shape | None:
        """Return the shape, in layer ``n``, of what has ``shape`` in the traced layer at ``template``."""
        if shape is None:
            return None
        names = self._names_of[template]

        def rename(match: re.Match[str]) -> str:
            return f"{match[0]}_{n}" if match[0] in names else match[0]

        return ir.Shape(
            [
                ir.SymbolicDim(_NAME.sub(rename, dimension.value))
                if isinstance(dimension, ir.SymbolicDim) and dimension.value is not None
                else dimension
                for dimension in shape
            ]
        )


def _names(values: Iterable[ir.Value]) -> Iterator[str]:
    for value in values:
        for dimension in value.shape or ():
            if isinstance(dimension, ir.SymbolicDim) and dimension.value is not None:
                yield from _NAME.findall(dimension.value)
