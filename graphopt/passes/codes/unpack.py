"""Products whose codes were packed, by an earlier run of graphopt, get back their logical form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import onnx_ir as ir

from graphopt.analysis.structure.product_codes import dequantize_of
from graphopt.analysis.structure.products import is_packed, packed_nodes, reads_packed
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import insert_behind, name_output, replace
from graphopt.graph.weights import Expression, WeightTensor, expression_of, new_weight, weight_of
from graphopt.passes.base import Pass
from graphopt.passes.common.input_rounding import round_input
from graphopt.passes.common.leveled_scales import join_levels
from graphopt.passes.common.logical_codes import columns_of, dequantize
from graphopt.passes.common.table_layout import UnpackCodes, UntileScales
from graphopt.runtime_ops import OPERATORS, Role, port, ports_of, schema_of
from graphopt.runtime_ops.matmul_codebook.spec.op import MATMUL_CODEBOOK
from graphopt.runtime_ops.matmul_table.spec.packing import bits_of
from graphopt.runtime_ops.schema import attributes_of

if TYPE_CHECKING:
    from graphopt.passes.context import Context, Ledger
    from graphopt.passes.recipe import Recipe

PRODUCT_UNPACKED = Rule("unpack.unpacked", "{op_type} as a MatMul of dequantized codes")
UNPACKED_LOOKUP = Rule("unpack.unpacked-lookup", "{op_type} as a Gather of the columns that {product} multiplies by")
NO_PRODUCT_READS = Rule("unpack.alone", "no product that is unpacked reads its codes")
NOT_CONSTANT = Rule("unpack.not-constant", "its codes, scales, table or zero points are no constants")
NOT_FLOAT = Rule("unpack.not-float", "it computes in {type}, and dequantized codes are float")
HAS_ZERO_POINTS = Rule("unpack.zero-points", "it has zero points, which the logical form of a trellis has not")
BIAS_BEHIND = Rule("unpack.bias", "adds the bias that the product had")


class Unpack(Pass):
    """Undo the packing of the step ``lower``, so that every step between meets codes in one form.

    before::

        y1 = ai.graphopt::MatMulTable(x, packed codes, scales, table, zero points, 0; group, activations)
        y2 = ai.graphopt::MatMulDynamic(x, packed codes, scales, ..., 0, left, right; group, bits, clip)
        e  = ai.graphopt::GatherTable(ids, packed codes, scales, table, zero points)     of the codes of one of them

    after::

        y1 = MatMul(RoundActivations(x; activations, group), Dequantize(codes, scales, table, zero points; group))
        y2 = MatMul(RoundActivations(Hadamard(x, left, right); bits per token, clip), Dequantize(...))
        e  = Gather(Transpose(Dequantize(...)), ids)

    A bias of a packed product is added behind. ``MatMulCodebook`` becomes a ``MatMul`` of ``DequantizeCodebook``, of
    the same tensors.

    Codes, scales and zero points are the same numbers in another layout; scales in two levels (``level_scales``) become
    one constant, and digits of base 3 codes. The step ``lower`` makes the same product
    of them again, to the last bit. graphopt adds this step itself where a packed model is optimized once more by a
    recipe that has work with codes.
    """

    name: ClassVar[str] = "unpack"
    effect: ClassVar[Effect] = "exact"

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether a product is packed, and the recipe has work with codes."""
        return bool(recipe.phases & {"codes", "lower"}) and bool(packed_nodes(graph))

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Unpack every packed product; say why one stays."""
        graph, ledger = model.graph, context.ledger
        join_levels(graph)
        for node in packed_nodes(graph):
            if node.op_type == MATMUL_CODEBOOK.name:
                new = _logical_entries(graph, node)
                replace(node, new)
                ledger.changed(new, PRODUCT_UNPACKED(op_type=node.op_type), [node])
                continue
            reason = _refusal(node)
            if reason is not None:
                ledger.skipped(node, reason)
                continue
            rounding, lookups, new = _rounding(node), _lookups(node), _logical(graph, node)
            for lookup in lookups:
                _unpack_lookup(graph, lookup, new, ledger)
            bias = _bias(node)
            add = None if bias is None else ir.node("Add", [new.outputs[0], bias], name=f"{node.name}.bias")
            replace(node, new)
            ledger.changed(new, PRODUCT_UNPACKED(op_type=node.op_type), [node])
            if add is not None:
                insert_behind(new.outputs[0], add, value_name=f"{node.name}.unbiased")
                ledger.changed(add, BIAS_BEHIND(), [node])
            if rounding is not None:
                round_input(graph, new, rounding, ledger)
        for node in graph:
            if _is_lookup(node):
                ledger.skipped(node, NO_PRODUCT_READS())


def _constants(node: ir.Node) -> dict[str, ir.Value]:
    """Return what a packed product reads besides its activations by name, where it is constant."""
    constants = ((port, weight_of(node, index)) for index, port in enumerate(schema_of(node).inputs))
    return {port.name: value for port, value in constants if port.role is not Role.DATA and value is not None}


def _is_absent(node: ir.Node, name: str) -> bool:
    """Return whether an input is the placeholder that says so."""
    schema = schema_of(node)
    return schema.inputs[schema.index(name)].is_absent(port(node, name))


def _refusal(node: ir.Node) -> Fact | None:
    x, constants_of_node, schema = _data(node), _constants(node), schema_of(node)
    if constants_of_node.keys() < {port.name for port in schema.inputs if port.role is not Role.DATA}:
        return NOT_CONSTANT()
    if x.dtype not in (None, ir.DataType.FLOAT):
        return NOT_FLOAT(type=str(x.dtype))
    if node.attributes.get_int("trellis", 0) and not _is_absent(node, "zero_points"):
        return HAS_ZERO_POINTS()
    return None


def _bias(node: ir.Node) -> ir.Value | None:
    """Return the bias of a packed product. That of one column has the size of the placeholder, which is 0."""
    bias = _constants(node)["bias"]
    assert bias.const_value is not None
    return bias if not _is_absent(node, "bias") or bias.const_value.numpy().any() else None


def _logical(graph: ir.Graph, node: ir.Node) -> ir.Node:
    """Return the product of dequantized codes; what it reads is inserted in front of ``node``."""
    rows, columns, group = (node.attributes.get_int(name, 0) for name in ("rows", "columns", "group"))
    constants_of_node = _constants(node)
    codes, scales, points = constants_of_node["codes"], constants_of_node["scales"], constants_of_node["zero_points"]
    table = constants_of_node["table"]
    assert codes.const_value is not None
    reader = dequantize(
        graph,
        node,
        _unpack_value(graph, codes, UnpackCodes(expression_of(codes.const_value), rows, columns)),
        _unpack_value(graph, scales, UntileScales(expression_of(scales.const_value), columns)),
        (table, bits_of(codes.const_value.shape.numpy())) if node.attributes.get_int("trellis", 0) else table,
        None
        if _is_absent(node, "zero_points")
        else _unpack_value(graph, points, UntileScales(expression_of(points.const_value), columns)),
        group,
        minimums=node.attributes.get_int("minimums", 0) == 1,
    )
    weight = reader.outputs[0]
    weight.name, weight.dtype, weight.shape = f"{reader.name}d", ir.DataType.FLOAT, ir.Shape([rows, columns])
    graph.insert_before(node, reader)
    return ir.node("MatMul", [_rotate_input(graph, node), weight], name=node.name)


def _logical_entries(graph: ir.Graph, node: ir.Node) -> ir.Node:
    """Return the product of a matrix of codes of vectors, which lie in the same bytes; its reader is inserted."""
    x, *operands = node.inputs
    reader = OPERATORS["DequantizeCodebook"].node(operands, attributes_of(node), name=f"{node.name}.dequantize")
    reader.outputs[0].name = f"{reader.name}d"
    graph.insert_before(node, reader)
    return ir.node("MatMul", [x, reader.outputs[0]], name=node.name)


def _lookups(node: ir.Node) -> list[ir.Node]:
    """Return the lookups of columns of the matrix that a packed product multiplies by."""
    codes = port(node, "codes")
    assert codes is not None
    return [use.node for use in codes.uses() if _is_lookup(use.node) and _reads_as(use.node, node)]


def _is_lookup(node: ir.Node) -> bool:
    return reads_packed(node) and not is_packed(node)


def _reads_as(lookup: ir.Node, node: ir.Node) -> bool:
    names = [name for name in schema_of(lookup).input_names if name in schema_of(node).input_names]
    sizes = ("rows", "columns", "group", "minimums", "trellis")
    return all(port(lookup, name) is port(node, name) for name in names) and all(
        lookup.attributes.get_int(name, 0) == node.attributes.get_int(name, 0) for name in sizes
    )


def _unpack_lookup(graph: ir.Graph, lookup: ir.Node, product: ir.Node, ledger: Ledger) -> None:
    """Let ``lookup`` become a Gather of the columns of the matrix that ``product`` multiplies by."""
    reader = dequantize_of(product)
    assert reader is not None
    new = ir.node("Gather", [columns_of(graph, reader, lookup), port(lookup, "ids")], {"axis": 0}, name=lookup.name)
    replace(lookup, new)
    ledger.changed(new, UNPACKED_LOOKUP(op_type=lookup.op_type, product=product.name), [lookup])


def _data(node: ir.Node) -> ir.Value:
    (x,) = ports_of(node, Role.DATA)
    return x


def _unpack_value(graph: ir.Graph, packed_value: ir.Value, expression: Expression) -> ir.Value:
    """Register what ``packed_value`` was made of, under its name where nothing else reads it."""
    name = packed_value.name or "codes"
    if sum(not _is_lookup(use.node) for use in packed_value.uses()) == 1:
        del graph.initializers[name]
    return new_weight(graph, name, WeightTensor(expression))


def _rotate_input(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """Return what the product multiplies, before it is rounded: a rotation inside it becomes a node in front."""
    x, matrices = _data(node), schema_of(node).of_role(Role.MATRIX)
    if all(_is_absent(node, name) for name in matrices):
        return x
    rotation = OPERATORS["Hadamard"].node([x, *ports_of(node, Role.MATRIX)], name=f"{node.name}.hadamard")
    graph.insert_before(node, rotation)
    return name_output(rotation, x)


def _rounding(node: ir.Node) -> dict[str, Any] | None:
    """Return the attributes of ``RoundActivations`` that say what the packed product rounds its input to."""
    if node.op_type == "MatMulDynamic":
        bits, clip = node.attributes.get_int("bits", 8), node.attributes.get_float("clip", 1.0)
        return {"activations": f"int{bits}", "group": 0, "clip": clip}
    activations = node.attributes.get_string("activations", "float32")
    if activations == "float32":
        return None
    return {"activations": activations, "group": node.attributes.get_int("group", 0), "clip": 1.0}
