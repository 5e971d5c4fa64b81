"""onnxruntime's fused products with codes become a ``MatMul`` of dequantized codes, which every step knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from graphopt.analysis.structure.contrib import MICROSOFT, contrib_nodes
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import name_output, replace
from graphopt.graph.weights import (
    Cast,
    Expression,
    Reshape,
    Transpose,
    WeightTensor,
    expression_of,
    new_weight,
    weight_of,
)
from graphopt.passes.base import Pass
from graphopt.passes.common.fused_codes import CODE_TYPES, SpreadCodes
from graphopt.passes.common.input_rounding import round_input
from graphopt.passes.common.logical_codes import columns_of, dequantize, set_type

if TYPE_CHECKING:
    from graphopt.passes.context import Context
    from graphopt.passes.recipe import Recipe

PRODUCT_UNFUSED = Rule("unfuse_products.unfused", "MatMulNBits of {bits} bits in groups of {group} as a MatMul")
LOOKUP_UNFUSED = Rule(
    "unfuse_products.lookup", "GatherBlockQuantized as a Gather of the columns that {product} multiplies by"
)
OTHER_TARGET = Rule("unfuse_products.target", "for {target} this is the form that runs")
NOT_CONSTANT = Rule("unfuse_products.not-constant", "its codes, scales or zero points are no constants")
SHARED_CODES = Rule("unfuse_products.shared", "{other} reads its codes too, in the layout that they have")
NOT_FLOAT = Rule("unfuse_products.not-float", "it computes in {type}, and dequantized codes are float")
OTHER_BITS = Rule("unfuse_products.bits", "ONNX has no type for codes of {bits} bits that onnxruntime reads")
OTHER_LEVEL = Rule("unfuse_products.level", "accuracy_level {level} computes in another type than float32 or int8")
BY_INPUT = Rule("unfuse_products.by-input", "its groups are a list, g_idx, and not runs of rows")

_CODES, _SCALES, _ZERO_POINTS, _GROUPS, _BIAS = range(1, 6)
_INT8_LEVEL, _FLOAT_LEVELS = 4, (0, 1)


class UnfuseProducts(Pass):
    """Undo onnxruntime's fusion of products and lookups with codes, so that every later step meets codes in one form.

    before::

        y = MatMulNBits(x, codes: uint8 [N, groups, bytes], scales, zero points, bias; bits, block_size, accuracy_level)
        e = GatherBlockQuantized(Reshape(codes), ids, scales, zero points; bits, block_size)                 tied

    after, where codes of 4 and 8 bits without zero points lose the half that onnxruntime takes off them::

        y = Add(MatMul(x', W), bias)
        e = Gather(Transpose(W), ids)
        W = DequantizeLinear(codes [K, N], scales [groups, N], zero points; axis=0, block_size)
        W = Dequantize(codes, scales, table 0 1 2 ..., zero points: float)         not whole, or W is looked up too
        x' = RoundActivations(x; int8, group)                                      accuracy_level=4
        x' = x                                                                     no level, 0 or 1

    Codes, scales and zero points are the same numbers in another layout, and ``lower`` makes of them what it makes of
    codes of any other origin. Only for the target ``ort-cpu``: for others the fused form is the best there is. graphopt
    adds this step itself where a recipe has work with codes, and no step of its own for ``MatMulNBits``.
    """

    name: ClassVar[str] = "unfuse_products"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("unpack",)

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether there is such a product, and the recipe has work with codes but no step for it as it is."""
        for_fused = {"accuracy_level", "integer_zero_points"} & {step.name for step in recipe.steps}
        has_work = bool(recipe.phases & {"codes", "lower"}) and not for_fused
        return has_work and bool(contrib_nodes(graph, "MatMulNBits"))

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Unfuse every product; say why one stays."""
        graph, ledger = model.graph, context.ledger
        for node in contrib_nodes(graph, "MatMulNBits"):
            lookups, other_reader = _lookups(node)
            reason = _refusal(node) if other_reader is None else SHARED_CODES(other=other_reader.name)
            reason = reason if context.target == "ort-cpu" else OTHER_TARGET(target=context.target)
            if reason is not None:
                ledger.skipped(node, reason)
                continue
            bits, group = node.attributes.get_int("bits", 4), node.attributes.get_int("block_size", 0)
            fact = PRODUCT_UNFUSED(bits=bits, group=group)
            reader = _reader(graph, node, is_looked_up=bool(lookups))
            graph.insert_before(node, reader)
            new_nodes = _product(node, reader)
            for lookup in lookups:
                gather = ir.node("Gather", [columns_of(graph, reader, lookup), lookup.inputs[1]], name=lookup.name)
                replace(lookup, gather)
                ledger.changed(gather, LOOKUP_UNFUSED(product=node.name), [lookup])
            replace(node, new_nodes)
            for new in new_nodes:
                ledger.changed(new, fact, [node])
            if node.attributes.get_int("accuracy_level", 0) == _INT8_LEVEL:
                round_input(graph, new_nodes[0], {"activations": "int8", "group": group, "clip": 1.0}, ledger)


def _inputs(node: ir.Node) -> list[ir.Value | None]:
    """Return all inputs of a product, those that it leaves out as ``None``."""
    return [*node.inputs, *[None] * (_BIAS + 1 - len(node.inputs))]


def _lookups(node: ir.Node) -> tuple[list[ir.Node], ir.Node | None]:
    """Return the lookups of columns of a product's codes, and another node that reads them, if there is one."""
    inputs, lookups = _inputs(node), []
    codes = inputs[_CODES]
    assert codes is not None
    readers = [use.node for use in codes.uses() if use.node is not node]
    for reader in readers:
        is_reshape = reader.op_type == "Reshape"
        for lookup in [use.node for use in reader.outputs[0].uses()] if is_reshape else [reader]:
            if not _looks_up(lookup, node):
                return [], reader
            lookups.append(lookup)
    return lookups, None


def _looks_up(lookup: ir.Node, product: ir.Node) -> bool:
    """Return whether a node looks up columns of what ``product`` multiplies by, all read in the same way."""
    if (lookup.domain, lookup.op_type) != (MICROSOFT, "GatherBlockQuantized"):
        return False
    _, ids, *operands = lookup.inputs
    sizes = (("bits", 4), ("block_size", 128))
    return (
        ids is not None
        and ids.shape is not None
        and [*operands, None][:2] == _inputs(product)[_SCALES : _ZERO_POINTS + 1]
        and lookup.attributes.get_int("gather_axis", 0) == 0
        and lookup.attributes.get_int("quantize_axis", 1) in (1, -1)
        and all(lookup.attributes.get_int(*size) == product.attributes.get_int(*size) for size in sizes)
    )


def _refusal(node: ir.Node) -> Fact | None:
    inputs, level = _inputs(node), node.attributes.get_int("accuracy_level", 0)
    for index in (_CODES, _SCALES, _ZERO_POINTS):
        weight = None if inputs[index] is None else weight_of(node, index)
        if inputs[index] is not None and (weight is None or weight.const_value is None):
            return NOT_CONSTANT()
    scales, bits = inputs[_SCALES], node.attributes.get_int("bits", 4)
    assert scales is not None
    if inputs[_GROUPS] is not None:
        return BY_INPUT()
    if bits not in CODE_TYPES:
        return OTHER_BITS(bits=bits)
    if scales.dtype != ir.DataType.FLOAT:
        return NOT_FLOAT(type=str(scales.dtype))
    return None if level in (*_FLOAT_LEVELS, _INT8_LEVEL) else OTHER_LEVEL(level=level)


def _reader(graph: ir.Graph, node: ir.Node, *, is_looked_up: bool) -> ir.Node:
    """Return what makes the matrix of a product of its codes."""
    rows, columns, group = (node.attributes.get_int(name, 0) for name in ("K", "N", "block_size"))
    bits, groups = node.attributes.get_int("bits", 4), -(-rows // group)
    codes, scales, points = (
        weight_of(node, index) if _inputs(node)[index] is not None else None
        for index in (_CODES, _SCALES, _ZERO_POINTS)
    )
    assert codes is not None and scales is not None
    name, (signed_type, unsigned_type) = codes.name or "codes", CODE_TYPES[bits]
    zero_points = None if points is None else _zero_points(points, bits, groups, columns)
    is_standard = not is_looked_up and (zero_points is None or zero_points.dtype == unsigned_type)
    code_type = (signed_type if points is None else unsigned_type) if is_standard else ir.DataType.UINT8
    if zero_points is not None and not is_standard:
        zero_points = Cast(zero_points, ir.DataType.FLOAT)
    expressions = {
        "rows": SpreadCodes(expression_of(codes.const_value), bits, rows, columns, code_type),
        "scales": _by_rows(scales, groups, columns),
        **({} if zero_points is None else {"zero_points": zero_points}),
    }
    weights = {part: new_weight(graph, f"{name}.{part}", WeightTensor(tensor)) for part, tensor in expressions.items()}
    if is_standard:
        attributes = {"axis": 0, "block_size": group}
        reader = ir.node("DequantizeLinear", [*weights.values()], attributes, name=f"{node.name}.dequantize")
    else:
        first = 0 if points is not None else -(1 << (bits - 1))
        table = new_weight(graph, f"{name}.table", ir.tensor(np.arange(first, first + (1 << bits), dtype=np.float32)))
        reader = dequantize(graph, node, weights["rows"], weights["scales"], table, weights.get("zero_points"), group)
    set_type(reader.outputs[0], f"{name}.dequantized", ir.DataType.FLOAT, [rows, columns])
    return reader


def _product(node: ir.Node, reader: ir.Node) -> list[ir.Node]:
    """Return the product with the matrix that ``reader`` makes, and the sum with a bias where there is one."""
    inputs = _inputs(node)
    product = ir.node("MatMul", [inputs[0], reader.outputs[0]], name=node.name)
    bias = inputs[_BIAS]
    if bias is None:
        return [product]
    name_output(product, node.outputs[0])
    return [product, ir.node("Add", [product.outputs[0], bias], name=f"{node.name}.bias")]


def _zero_points(points: ir.Value, bits: int, groups: int, columns: int) -> Expression:
    """Return zero points [groups, columns]: as codes where all of them are, else float32."""
    expression = expression_of(points.const_value)
    unsigned_type = CODE_TYPES[bits][1]
    if expression.dtype == ir.DataType.UINT8:
        return SpreadCodes(expression, bits, groups, columns, unsigned_type)
    floats = _by_rows(points, groups, columns)
    is_whole = np.isin(expression.numpy(), np.arange(1 << bits)).all()
    return Cast(floats, unsigned_type) if is_whole else floats


def _by_rows(weight: ir.Value, groups: int, columns: int) -> Expression:
    """Return numbers [columns, groups], flat or not, as [groups, columns]."""
    return Transpose(Reshape(expression_of(weight.const_value), (columns, groups)), (1, 0))
