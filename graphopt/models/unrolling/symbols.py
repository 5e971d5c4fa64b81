"""Dimensions that only one layer knows, such as how many tokens an expert got: each copy of the layer has its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.models.unrolling.layer_of_node import SHARED, Places

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_NAME = re.compile(r"[A-Za-z_]\w*")


class Symbols:
    """Symbolic dimensions of a graph of layers.

    Args:
        graph: the graph.
        places: which node belongs to which layer.
    """

    def __init__(self, graph: ir.Graph, places: Places) -> None:
        everywhere = set(_names([*graph.inputs, *graph.initializers.values()]))
        shared = (value for node in graph if places.of(node) == SHARED for value in node.outputs)
        everywhere |= set(_names(shared))
        self._own = {
            place: set(_names(value for node in places.nodes(place) for value in node.outputs)) - everywhere
            for place in range(places.count)
        }

    def moved(self, shape: ir.Shape | None, n: int, place: int) -> ir.Shape | None:
        """Return the shape, in layer ``n``, of what has ``shape`` in the traced layer at ``place``."""
        if shape is None:
            return None
        own = self._own[place]

        def renamed(match: re.Match[str]) -> str:
            return f"{match[0]}_{n}" if match[0] in own else match[0]

        return ir.Shape(
            [
                ir.SymbolicDim(_NAME.sub(renamed, each.value))
                if isinstance(each, ir.SymbolicDim) and each.value is not None
                else each
                for each in shape
            ]
        )


def _names(values: Iterable[ir.Value]) -> Iterator[str]:
    for value in values:
        for dimension in value.shape or ():
            if isinstance(dimension, ir.SymbolicDim) and dimension.value is not None:
                yield from _NAME.findall(dimension.value)
