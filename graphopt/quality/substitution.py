"""Models that have each product twice, in floats and quantized, with an input that chooses: which causes the loss?

    y = Where(in floats, float product(x), quantized product(x))        in floats: a bool for each

    restorable    AFTER, with what the reference has beside each product
    degradable    the reference, with what AFTER has beside each product

One session of each serves every group of products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.graph.editing import clone_node, take_place
from graphopt.graph.weights import new_weight
from graphopt.quality.correspondence import Product, matrix_in_floats
from graphopt.runtime_ops import declare

if TYPE_CHECKING:
    from collections.abc import Sequence


def switch_of(product: Product) -> str:
    """Return the name of the input, bool [], that says whether a product is in floats."""
    return f"{product.name}.in_floats"


def restorable(after: ir.Model, products: Sequence[Product]) -> ir.Model:
    """Return a copy of ``after`` in which each of the products can be in floats."""
    model = after.clone()
    nodes, values = _nodes(model), _values(model)
    for product in products:
        node, data = nodes[product.name], values[product.data]
        matrix = new_weight(model.graph, f"{product.name}.restored", ir.tensor(matrix_in_floats(product)))
        nodes_ = []
        for front in product.front:
            inputs = [data if value is front.inputs[0] else _copy(value, model) for value in front.inputs]
            nodes_.append(clone_node(front, inputs, f"{product.name}.{front.name}"))
            data = nodes_[-1].outputs[0]
            data.name = f"{product.name}.{front.outputs[0].name}"
        nodes_.append(ir.node("MatMul", [data, matrix], name=f"{product.name}.float"))
        nodes_[-1].outputs[0].name = f"{product.name}.float"
        model.graph.insert_after(node, nodes_)
        _choose(model, node.outputs[0], _switch(model, product), (nodes_[-1].outputs[0], node.outputs[0]), nodes_[-1])
    declare(model)
    return model


def degradable(reference: ir.Model, after: ir.Model, products: Sequence[Product]) -> ir.Model:
    """Return a copy of ``reference`` in which each product can be as in ``after``, its rounding of inputs included."""
    model = reference.clone()
    nodes, values = _nodes(model), _values(model)
    for product in products:
        part_nodes, result = _take_product(model, after, product, values[product.data])
        floats = [nodes[product_node.name] for product_node in product.floats]
        parts: Sequence[ir.Value] = [result]
        if len(floats) > 1:
            part_nodes.append(_split(model, result, product))
            parts = part_nodes[-1].outputs
        model.graph.insert_before(floats[0], part_nodes)
        switch = _switch(model, product)
        for node, part in zip(floats, parts, strict=True):
            _choose(model, node.outputs[0], switch, (node.outputs[0], part), node)
    for domain, version in after.graph.opset_imports.items():
        model.graph.opset_imports.setdefault(domain, version)
    declare(model)
    return model


def _take_product(model: ir.Model, after: ir.Model, product: Product, data: ir.Value) -> tuple[list[ir.Node], ir.Value]:
    """Return the nodes of a quantized product, to be put into another model where they read ``data``; their result."""
    part = ir.convenience.extract(after.graph, [product.data], [product.output])
    for value in list(part.initializers.values()):
        copy = new_weight(model.graph, f"{product.name}.{value.name}", value.const_value)
        for use in list(value.uses()):
            use.node.replace_input_with(use.idx, copy)
    part.inputs[0].replace_all_uses_with(data)
    part_nodes, (result,) = list(part), part.outputs
    part.outputs.clear()
    part.remove(part_nodes)
    for node in part_nodes:
        node.name = f"{product.name}.quantized.{node.name}"
        for output in node.outputs:
            output.name = f"{product.name}.quantized.{output.name}"
    return part_nodes, result


def _choose(
    model: ir.Model, old: ir.Value, switch: ir.Value, sides: tuple[ir.Value, ir.Value], anchor: ir.Node
) -> None:
    """Let all that read ``old`` read one of two values instead."""
    choice = ir.node("Where", [switch, None, None], name=f"{old.name}.chosen")
    model.graph.insert_after(anchor, choice)
    take_place(old, choice.outputs[0])
    for index, side in enumerate(sides, 1):  # now, or they would be replaced as well
        choice.replace_input_with(index, side)


def _switch(model: ir.Model, product: Product) -> ir.Value:
    model.graph.inputs.append(ir.val(switch_of(product), ir.DataType.BOOL, []))
    return model.graph.inputs[-1]


def _split(model: ir.Model, result: ir.Value, product: Product) -> ir.Node:
    """Return the node that cuts what a merged product makes into what the products of the reference make."""
    widths = [_columns(node) for node in product.floats]
    sizes = new_weight(model.graph, f"{product.name}.widths", ir.tensor(widths, ir.DataType.INT64))
    name = f"{product.name}.quantized.split"
    node = ir.node("Split", [result, sizes], {"axis": -1}, num_outputs=len(widths), name=name)
    for number, output in enumerate(node.outputs):
        output.name = f"{name}{number}"
    return node


def _columns(node: ir.Node) -> int:
    matrix = node.inputs[1]
    assert matrix is not None and matrix.const_value is not None
    return int(matrix.const_value.shape.numpy()[1])


def _nodes(model: ir.Model) -> dict[str | None, ir.Node]:
    return {node.name: node for node in model.graph}


def _values(model: ir.Model) -> dict[str | None, ir.Value]:
    results = {value.name: value for node in model.graph for value in node.outputs}
    return {**{value.name: value for value in model.graph.inputs}, **results}


def _copy(value: ir.Value | None, model: ir.Model) -> ir.Value | None:
    return None if value is None else new_weight(model.graph, value.name or "copied", value.const_value)
