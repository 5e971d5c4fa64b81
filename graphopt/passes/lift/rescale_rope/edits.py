"""Other frequencies and other amplitudes for the rotary embeddings of a graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph.editing import clone_node, drop, free_name, insert_behind, name_output

if TYPE_CHECKING:
    from graphopt.analysis.structure.rotary import RotaryAngles

_SUFFIX = ".rescaled"


def turn_by(graph: ir.Graph, angles: RotaryAngles, frequencies: ir.Value, first: ir.Value | None = None) -> None:
    """Let ``angles`` be made of other frequencies.

    Equal constants share one initializer, and what lies between them and the product may be shared too: other readers
    keep what they read.

    Args:
        graph: the graph.
        angles: which.
        frequencies: a constant or an input of the graph, of the type and shape of the frequencies that they have.
        first: one number of the type of :attr:`RotaryAngles.positions`: so many tokens at the start of a sequence keep
            the angles that they have.
    """
    product, old, scaled_frequencies = angles.product, angles.product.inputs[angles.side], frequencies
    for node in angles.path:
        copy = clone_node(node, [scaled_frequencies, *node.inputs[1:]], free_name(graph, name_with_suffix(node.name)))
        graph.insert_before(product, copy)
        scaled_frequencies = name_output(copy, node.outputs[0])
    if first is None:
        product.replace_input_with(angles.side, scaled_frequencies)
        assert old is not None
        drop(graph, old)
        return
    sides = [scaled_frequencies if index == angles.side else value for index, value in enumerate(product.inputs)]
    other_product = clone_node(product, sides, free_name(graph, name_with_suffix(product.name)))
    early = ir.node("Less", [angles.positions, first], name=free_name(graph, f"{product.name}.early"))
    angle = product.outputs[0]
    graph.insert_before(product, [other_product, early])
    name_output(other_product, angle)
    name_output(early, angles.positions, dtype=ir.DataType.BOOL)
    name = free_name(graph, f"{product.name}.chosen")
    insert_behind(angle, ir.node("Where", [early.outputs[0], angle, other_product.outputs[0]], name=name))


def multiply(graph: ir.Graph, wave: ir.Node, factor: ir.Value) -> ir.Node:
    """Multiply the cosines or sines that ``wave`` makes by one number; return the node that does."""
    node = ir.node("Mul", [wave.outputs[0], factor], name=free_name(graph, f"{wave.name}.scaled"))
    insert_behind(wave.outputs[0], node)
    return node


def name_with_suffix(name: str | None) -> str:
    """Return what rescaled frequencies, and what is made of them, are called."""
    return f"{(name or '?').removesuffix(_SUFFIX)}{_SUFFIX}"
