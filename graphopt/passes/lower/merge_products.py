"""Products that read the same tensor become one: queries, keys and values; gate and up."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure import coded_nodes, dequantize_of, is_packed
from graphopt.editing import drop, shared
from graphopt.facts import Effect
from graphopt.passes.base import Pass, StepOptions
from graphopt.passes.context import Context, Ledger
from graphopt.runtime_ops import declare
from graphopt.runtime_ops.matmul_table.spec.packing import TILE
from graphopt.weights import Joined, WeightTensor, expression_of, new_weight, weight_of

_ZERO_POINTS, _BIAS = 4, 5


class MergeProductsOptions(StepOptions):
    """This step has no options."""

    step: Literal["merge_products"] = "merge_products"


class _Product(NamedTuple):
    """A product, the node that reads its codes, and what it must have in common with those it is merged with."""

    node: ir.Node
    reader: ir.Node
    along: dict[int, int]  # inputs of the reader that are joined, and the axis of each that counts columns
    columns: int
    kind: Hashable


class MergeProducts(Pass[MergeProductsOptions]):
    """Compute products with stored codes that read the same tensor as one product.

    before::

        y1 = ai.graphopt::MatMulTable(x, codes1, scales1, ...)
        y2 = ai.graphopt::MatMulTable(x, codes2, scales2, ...)

    after::

        y1, y2 = Split(ai.graphopt::MatMulTable(x, [codes1, codes2], [scales1, scales2], ...), [columns1, columns2])

    A column of a product depends on x and on its own codes and scales alone, so each stays what it was; graphopt's
    kernel gives the same bits. x is rounded once, threads are woken once, and memory is read from end to end in one go:
    what a decode step gains where a product takes a few tens of microseconds. ``MatMulDynamic`` and ``MatMul`` of a
    ``DequantizeLinear`` are merged likewise. Formats, groups, scale types and what x is rounded to must agree.
    """

    name: ClassVar[str] = "merge_products"
    effect: ClassVar[Effect] = "exact"
    options_type: ClassVar[type[StepOptions]] = MergeProductsOptions
    after: ClassVar[tuple[str, ...]] = ("lower",)

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Merge the products of each tensor that agree; say why the others of a tensor that several read stay."""
        ledger = context.ledger
        by_input: dict[ir.Value, list[ir.Node]] = {}
        for node in coded_nodes(model.graph):
            assert node.inputs[0] is not None
            by_input.setdefault(node.inputs[0], []).append(node)
        for x, nodes in by_input.items():
            if len(nodes) > 1:
                self._merge_readers(model.graph, x, nodes, ledger)
        declare(model)

    def _merge_readers(self, graph: ir.Graph, x: ir.Value, nodes: list[ir.Node], ledger: Ledger) -> None:
        alike: dict[Hashable, list[_Product]] = {}
        for node in nodes:
            product = _product(node)
            if isinstance(product, str):
                ledger.skipped(node, product)
            else:
                alike.setdefault(product.kind, []).append(product)
        for products in alike.values():
            if len(products) > 1:
                _merge(graph, products, ledger)
            else:
                what = "differ in format, group, scales, zero points or in what they round their input to"
                ledger.skipped(products[0].node, f"the other products of {x.name} {what}")


def _product(node: ir.Node) -> _Product | str:
    """Return what ``node`` is and must agree in, or why it cannot be merged with any."""
    reader, first = (node, 1) if is_packed(node) else (dequantize_of(node), 0)
    assert reader is not None
    stored = {
        index: weight_of(reader, index)
        for index, value in enumerate(reader.inputs)
        if index >= first and value is not None
    }
    codes, scales = stored[first], stored[first + 1]
    if codes is None or scales is None or None in stored.values():
        return "its codes, scales or zero points are no constants"
    if len(codes.uses()) > 1 or (reader is not node and len(reader.outputs[0].uses()) > 1):
        return "its weight is read elsewhere too, and would be stored twice"
    along = _columns_of_packed(node, stored) if reader is node else _columns_of_dequantize(reader, stored)
    if isinstance(along, str):
        return along
    columns = node.attributes.get_int("columns", 0) if reader is node else _shape(codes)[1]
    attributes = {name: each.value for name, each in reader.attributes.items() if name != "columns"}
    agreed = tuple(_agreed(value, along.get(index)) for index, value in stored.items())
    kind = (node.op_type, reader.overload, tuple(sorted(attributes.items())), agreed)
    return _Product(node, reader, along, columns, kind)


def _columns_of_packed(node: ir.Node, stored: dict[int, ir.Value | None]) -> dict[int, int] | str:
    columns = node.attributes.get_int("columns", 0)
    if columns % TILE:
        return f"its {columns} columns are no multiple of {TILE}: the next product would begin inside a tile"
    # Zero points and bias of one number are none.
    full = [index for index in (_ZERO_POINTS, _BIAS) if np.prod(_shape(stored[index])) > 1]
    return dict.fromkeys((1, 2, *full), 0)


def _columns_of_dequantize(reader: ir.Node, stored: dict[int, ir.Value | None]) -> dict[int, int] | str:
    # Groups run along the rows, as MatMulNBits wants it: [rows, columns] and [groups, columns].
    if reader.attributes.get_int("axis", 1) % 2 or any(len(_shape(value)) != 2 for value in stored.values()):
        return "its scales are not in groups of rows"
    return dict.fromkeys(stored, 1)


def _agreed(value: ir.Value | None, axis: int | None) -> Hashable:
    """Return what two products must have in common in an input: all of it, or all but its size along ``axis``."""
    assert value is not None
    if axis is None:
        return value.name
    shape = _shape(value)
    return value.dtype, shape[:axis], shape[axis + 1 :]


def _merge(graph: ir.Graph, products: Sequence[_Product], ledger: Ledger) -> None:
    first, nodes = products[0], [product.node for product in products]
    reader, columns = first.reader, [product.columns for product in products]
    names = ", ".join(node.name or "?" for node in nodes)
    inputs = list(reader.inputs)
    for index, axis in first.along.items():
        inputs[index] = _joined(graph, [product.reader.inputs[index] for product in products], axis)
    made = _like(reader, inputs, f"{reader.name}.merged")
    new = [made]
    if reader is not first.node:
        made.outputs[0].name = f"{made.name}.output"
        made.outputs[0].type = reader.outputs[0].type
        made.outputs[0].shape = ir.Shape([*_dims(reader.outputs[0])[:-1], sum(columns)])
        new.append(_like(first.node, [first.node.inputs[0], made.outputs[0]], f"{first.node.name}.merged"))
    else:
        made.attributes["columns"] = ir.AttrInt64("columns", sum(columns))
    product, old = new[-1], first.node.outputs[0]
    product.metadata_props.update(_common(nodes))
    y = product.outputs[0]
    y.name, y.type = f"{product.name}.output", old.type
    y.shape = None if old.shape is None else ir.Shape([*_dims(old)[:-1], sum(columns)])
    sizes = shared(graph, f"columns.{'.'.join(map(str, columns))}", np.array(columns, np.int64))
    split = ir.node("Split", [y, sizes], {"axis": -1}, num_outputs=len(nodes), name=f"{product.name}.split")
    graph.insert_before(first.node, [*new, split])
    for made_output, node in zip(split.outputs, nodes, strict=True):
        _take_over(graph, node, made_output)
    ledger.changed(product, f"{names} in one product of {sum(columns)} columns", nodes)
    ledger.changed(split, f"the columns of {names}", nodes)


def _take_over(graph: ir.Graph, node: ir.Node, output: ir.Value) -> None:
    """Let ``output`` take the place and the name of what ``node`` makes; remove it with what nothing else reads."""
    old, read = node.outputs[0], [value for value in node.inputs[1:] if value is not None]
    output.type, output.shape, name = old.type, old.shape, old.name
    output.metadata_props.update(old.metadata_props)
    old.replace_all_uses_with(output, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    output.name = name
    for value in read:
        drop(graph, value)


def _like(node: ir.Node, inputs: Sequence[ir.Value | None], name: str) -> ir.Node:
    made = ir.node(node.op_type, inputs, domain=node.domain, overload=node.overload, version=node.version, name=name)
    made.attributes.update(node.attributes)
    return made


def _joined(graph: ir.Graph, values: Sequence[ir.Value | None], axis: int) -> ir.Value:
    """Register one constant of all ``values``, one behind the other along ``axis``; it is made when it is written."""
    tensors = [value.const_value for value in values if value is not None and value.const_value is not None]
    first = values[0]
    assert first is not None and len(tensors) == len(values)
    tensor = WeightTensor(Joined(tuple(map(expression_of, tensors)), axis))
    made = new_weight(graph, f"{first.name}.merged", tensor)
    made.metadata_props.update(_common([value for value in values if value is not None]))
    return made


def _common(items: Sequence[ir.Node] | Sequence[ir.Value]) -> dict[str, str]:
    """Return the metadata that all of ``items`` have."""
    return dict(set.intersection(*(set(item.metadata_props.items()) for item in items)))


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    assert value is not None and value.const_value is not None
    return tuple(value.const_value.shape.numpy())


def _dims(value: ir.Value) -> list[int | str | None]:
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape or ()]
