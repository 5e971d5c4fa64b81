"""Products that read the same tensor become one: queries, keys and values; gate and up."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.product_codes import NOT_CONSTANT, NOT_IN_ROWS, coded_nodes, dequantize_of, is_trellis
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import clone_node, remove, shared_constant, take_place
from graphopt.graph.weights import Concat, WeightTensor, expression_of, new_weight, weight_of
from graphopt.passes.base import Pass
from graphopt.runtime_ops import signature_of
from graphopt.runtime_ops.matmul_table.spec.packing import TILE
from graphopt.util.targets import Target

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from graphopt.passes.context import Context, Ledger

MERGE = Rule("merge_products.merged", "{products} in one product of {columns} columns")
SIDE_BY_SIDE = Rule("merge_products.side-by-side", "the codes of {products} side by side")
SPLIT = Rule("merge_products.split", "the columns of {products}")
DIFFER = Rule(
    "merge_products.differ",
    "the other products of {input} differ in format, group, scales, zero points or in what they round their input to",
)
SHORT_TILE = Rule(
    "merge_products.short-tile", "its trellis has {columns} columns, which are no whole circles of {tile}"
)
READ_TWICE = Rule("merge_products.read-twice", "its weight is read elsewhere too, and would be stored twice")


class _Product(NamedTuple):
    """A product, the node that dequantizes its codes, and what it must have in common with those it is merged with."""

    node: ir.Node
    reader: ir.Node
    columns: int
    kind: Hashable


class MergeProducts(Pass):
    """Compute products with stored codes that read the same tensor as one product.

    before::

        y1 = MatMul(x, Dequantize(codes1, scales1, ...))
        y2 = MatMul(x, Dequantize(codes2, scales2, ...))

    after::

        y1, y2 = Split(MatMul(x, Dequantize([codes1, codes2], [scales1, scales2], ...)), [columns1, columns2])

    A column of a product depends on x and on its own codes and scales alone, so each stays what it was; graphopt's
    kernel gives the same bits. x is rounded once, threads are woken once, and memory is read from end to end in one go:
    what a decode step gains where a product takes a few tens of microseconds. Products of a ``DequantizeLinear`` are
    merged likewise. Formats, groups, scale types and what x is rounded to must agree.
    """

    name: ClassVar[str] = "merge_products"
    effect: ClassVar[Effect] = "exact"
    targets: ClassVar[tuple[Target, ...]] = ("ort-cpu", "ort-cuda")

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

    def _merge_readers(self, graph: ir.Graph, x: ir.Value, nodes: list[ir.Node], ledger: Ledger) -> None:
        groups: dict[Hashable, list[_Product]] = {}
        for node in nodes:
            product = _product(node)
            if isinstance(product, Fact):
                ledger.skipped(node, product)
            else:
                groups.setdefault(product.kind, []).append(product)
        for products in groups.values():
            if len(products) > 1:
                _merge(graph, products, ledger)
            else:
                ledger.skipped(products[0].node, DIFFER(input=x.name))


def _product(node: ir.Node) -> _Product | Fact:
    """Return what ``node`` is and must agree in, or why it cannot be merged with any."""
    reader = dequantize_of(node)
    assert reader is not None
    constants = [weight_of(reader, index) for index, value in enumerate(reader.inputs) if value is not None]
    codes = constants[0]
    if codes is None or None in constants:
        return NOT_CONSTANT()
    if len(codes.uses()) > 1 or len(reader.outputs[0].uses()) > 1:
        return READ_TWICE()
    if is_trellis(reader) and _shape(codes)[1] % TILE:  # what is joined to its last tile would be in its circle
        return SHORT_TILE(columns=_shape(codes)[1], tile=TILE)
    of_rows = not reader.attributes.get_int("axis", 0) % 2 and all(len(_shape(value)) == 2 for value in constants)
    if not reader.domain and not of_rows:  # as MatMulNBits wants it
        return NOT_IN_ROWS()
    joined_inputs = _joined_inputs(reader)
    # All but the number of columns, or all of it where there are none.
    shared_inputs = tuple(
        (value.dtype, _shape(value)[:1]) if index in joined_inputs else value.name
        for index, value in enumerate(constants)
        if value is not None
    )
    attributes = tuple(sorted((name, operand.value) for name, operand in reader.attributes.items()))
    return _Product(node, reader, _shape(codes)[1], (reader.domain, reader.op_type, attributes, shared_inputs))


def _joined_inputs(reader: ir.Node) -> set[int]:
    """Return which inputs of ``reader`` have columns: codes, scales and zero points, but no table or placeholder."""
    signature = signature_of(reader)
    assert signature is not None
    ports = enumerate(zip(signature.inputs, reader.inputs, strict=False))
    return {index for index, (port, value) in ports if port.columns is not None and not port.is_absent(value)}


def _merge(graph: ir.Graph, products: Sequence[_Product], ledger: Ledger) -> None:
    first, nodes = products[0], [product.node for product in products]
    reader, columns = first.reader, [product.columns for product in products]
    inputs, readers = list(reader.inputs), [operand.reader for operand in products]
    for index in _joined_inputs(reader):
        inputs[index] = _concatenate(graph, [operand.inputs[index] for operand in readers])
    merged_value = _merged_node(readers, inputs)
    merged_value.outputs[0].name = f"{merged_value.name}.output"
    merged_value.outputs[0].type = reader.outputs[0].type
    merged_value.outputs[0].shape = ir.Shape([*_dims(reader.outputs[0])[:-1], sum(columns)])
    product, old = _merged_node(nodes, [first.node.inputs[0], merged_value.outputs[0]]), first.node.outputs[0]
    y = product.outputs[0]
    y.name, y.type = f"{product.name}.output", old.type
    y.shape = None if old.shape is None else ir.Shape([*_dims(old)[:-1], sum(columns)])
    sizes = shared_constant(graph, f"columns.{'.'.join(map(str, columns))}", np.array(columns, np.int64))
    split = ir.node("Split", [y, sizes], {"axis": -1}, num_outputs=len(nodes), name=f"{product.name}.split")
    graph.insert_before(first.node, [merged_value, product, split])
    for made_output, node in zip(split.outputs, nodes, strict=True):
        take_place(node.outputs[0], made_output)
        remove(node)
    names, sources = [node.name or "?" for node in nodes], [*readers, *nodes]
    ledger.changed(merged_value, SIDE_BY_SIDE(products=names), readers)
    ledger.changed(product, MERGE(products=names, columns=sum(columns)), sources)
    ledger.changed(split, SPLIT(products=names), sources)


def _merged_node(nodes: Sequence[ir.Node], inputs: Sequence[ir.Value | None]) -> ir.Node:
    """Return a node that does to ``inputs`` what each of ``nodes`` does to its own; it keeps the metadata of all."""
    merged_value = clone_node(nodes[0], inputs, f"{nodes[0].name}.merged")
    merged_value.metadata_props.clear()
    merged_value.metadata_props.update(_common(nodes))
    return merged_value


def _concatenate(graph: ir.Graph, values: Sequence[ir.Value | None]) -> ir.Value:
    """Register one constant of all ``values``, side by side; it is made when it is written."""
    tensors = [value.const_value for value in values if value is not None and value.const_value is not None]
    first = values[0]
    assert first is not None and len(tensors) == len(values)
    tensor = WeightTensor(Concat(tuple(map(expression_of, tensors)), 1))
    merged_value = new_weight(graph, f"{first.name}.merged", tensor)
    merged_value.metadata_props.update(_common([value for value in values if value is not None]))
    return merged_value


def _common(items: Sequence[ir.Node] | Sequence[ir.Value]) -> dict[str, str]:
    """Return the metadata that all of ``items`` have."""
    return dict(set.intersection(*(set(item.metadata_props.items()) for item in items)))


def _shape(value: ir.Value | None) -> tuple[int, ...]:
    assert value is not None and value.const_value is not None
    return tuple(value.const_value.shape.numpy())


def _dims(value: ir.Value) -> list[int | str | None]:
    return [dim if isinstance(dim, int) else dim.value for dim in value.shape or ()]
