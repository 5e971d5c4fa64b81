"""onnxruntime's fused mixtures of experts with codes become products of dequantized codes, which every step knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import onnx_ir as ir

from graphopt.analysis.structure.contrib import contrib_nodes
from graphopt.graph.diagnostics import Effect, Fact, Rule
from graphopt.graph.editing import replace
from graphopt.graph.weights import Expression, Reshape, Transpose, WeightTensor, expression_of, new_weight, weight_of
from graphopt.graph.weights.rearrangement import Slice
from graphopt.passes.base import Pass
from graphopt.passes.common.fused_codes import CODE_TYPES, SpreadCodes
from graphopt.passes.common.fused_experts import FusedExperts, bias_of, split_gates, why_stays, write_experts
from graphopt.passes.common.input_rounding import round_input
from graphopt.passes.common.logical_codes import set_type

if TYPE_CHECKING:
    from graphopt.passes.context import Context
    from graphopt.passes.recipe import Recipe

EXPERTS_UNFUSED = Rule(
    "unfuse_experts.unfused",
    "QMoE of {experts} experts, {bits} bits in groups of {group}, as products of rows by expert",
)
OTHER_TARGET = Rule("unfuse_experts.target", "for {target} this is the form that runs")
NOT_CONSTANT = Rule("unfuse_experts.not-constant", "its codes, scales, zero points or biases are no constants")
NOT_FLOAT = Rule("unfuse_experts.not-float", "it computes in {type}, and dequantized codes are float")
OTHER_CODES = Rule("unfuse_experts.codes", "its codes are {type} of {bits} bits; known are integers of 4 and 8 bits")
OTHER_INPUTS = Rule("unfuse_experts.inputs", "it has the input {number} too, which onnxruntime does not run on CPUs")

_CODES, _SCALES, _BIASES, _ZERO_POINTS = (2, 5), (3, 6), (4, 7), (11, 12)
_KNOWN_INPUTS = {0, 1, *_CODES, *_SCALES, *_BIASES, *_ZERO_POINTS}
_INT8_LEVEL = 4


class UnfuseExperts(Pass):
    """Undo onnxruntime's fusion of mixtures of experts with codes, so that later steps meet codes in one form.

    before::

        y = QMoE(x, router, codes 1: uint8 [E, N, bytes], scales 1: [E, N, groups], biases 1, codes 2, scales 2,
                 biases 2, zero points 1, zero points 2; k, block_size, expert_weight_bits, activation_type)

    after, for each expert e, of the rows that the k largest scores of the router send to it::

        r = f(MatMul(rows, W1[e]) + b1[e])        y = sum of w_e (MatMul(r, W2[e]) + b2[e])
        W = DequantizeLinear(codes [K, N], scales [groups, N], zero points; axis=0, block_size)
        w = Softmax(the k largest scores)

    The columns of gates and of linear parts, which lie in turns, are sorted apart in W1. ``group_experts`` makes one
    node of the products of all experts behind ``lower``. Inputs of products are rounded to int8 in groups where
    onnxruntime does so: with ``accuracy_level`` 4, and always with 8 bits. Only for the target ``ort-cpu``: for others
    the fused form is the best there is.
    graphopt adds this step itself where a recipe has work with codes.
    """

    name: ClassVar[str] = "unfuse_experts"
    effect: ClassVar[Effect] = "exact"
    after: ClassVar[tuple[str, ...]] = ("unpack",)

    @classmethod
    def is_needed(cls, graph: ir.Graph, recipe: Recipe) -> bool:
        """Return whether there is such a mixture, and the recipe has work with codes."""
        return bool(recipe.phases & {"codes", "lower"}) and bool(contrib_nodes(graph, "QMoE"))

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Unfuse every mixture; say why one stays."""
        graph, ledger = model.graph, context.ledger
        for node in contrib_nodes(graph, "QMoE"):
            reason = _refusal(node) if context.target == "ort-cpu" else OTHER_TARGET(target=context.target)
            if reason is not None:
                ledger.skipped(node, reason)
                continue
            mixture = _mixture(graph, node)
            readers = [_Codes(graph, node, number, is_apart=mixture.is_gated and not number) for number in (0, 1)]
            nodes, output, products = write_experts(graph, mixture, readers[0].matrix, readers[1].matrix)
            replace(node, nodes, {node.outputs[0]: output})
            bits, group = node.attributes.get_int("expert_weight_bits", 4), readers[0].group
            for new in nodes:
                ledger.changed(new, EXPERTS_UNFUSED(experts=mixture.experts, bits=bits, group=group), [node])
            if _rounds_inputs(node):
                for product in products:
                    round_input(graph, product, {"activations": "int8", "group": group, "clip": 1.0}, ledger)


def _mixture(graph: ir.Graph, node: ir.Node) -> FusedExperts:
    codes = weight_of(node, _CODES[0])
    assert codes is not None and codes.const_value is not None
    is_gated = node.attributes.get_string("activation_type", "relu") == "swiglu"
    first, second = (_input(node, index) for index in _BIASES)
    experts = int(codes.const_value.shape.numpy()[0])
    return FusedExperts(node, experts, (bias_of(graph, first, is_gated=is_gated), second))


def _rounds_inputs(node: ir.Node) -> bool:
    """Return whether onnxruntime rounds inputs to int8: where asked to, and always with 8 bits.

    Both only with scales of blocks: codes with a scale for a column become floats first.
    """
    is_asked = node.attributes.get_int("accuracy_level", 0) == _INT8_LEVEL
    is_in_blocks = node.attributes.get_int("block_size", 0) > 0
    return is_in_blocks and (is_asked or node.attributes.get_int("expert_weight_bits", 4) == 8)


def _input(node: ir.Node, index: int) -> ir.Value | None:
    return node.inputs[index] if index < len(node.inputs) else None


def _refusal(node: ir.Node) -> Fact | None:
    for index, value in enumerate(node.inputs):
        if value is not None and index not in _KNOWN_INPUTS:
            return OTHER_INPUTS(number=index)
        if value is not None and index > 1:
            weight = weight_of(node, index)
            if weight is None or weight.const_value is None:
                return NOT_CONSTANT()
    kind, bits = node.attributes.get_string("quant_type", "int"), node.attributes.get_int("expert_weight_bits", 4)
    all_bits = {node.attributes.get_int(f"fc{number}_expert_weight_bits", bits) for number in (1, 2)}
    if kind != "int" or all_bits != {bits} or bits not in CODE_TYPES:
        return OTHER_CODES(type=kind, bits=bits)
    x = node.inputs[0]
    types = {value.dtype for value in (x, *(_input(node, index) for index in _SCALES)) if value is not None}
    if types != {ir.DataType.FLOAT}:
        return NOT_FLOAT(type=", ".join(sorted(str(kind) for kind in types)))
    return why_stays(node)


class _Codes:
    """The codes of one of the two matrices of all experts.

    Args:
        graph: the graph.
        node: the mixture.
        number: 0 for the first matrices, 1 for the second.
        is_apart: whether gates come in front of linear parts, which lie in turns in the mixture.
    """

    def __init__(self, graph: ir.Graph, node: ir.Node, number: int, *, is_apart: bool) -> None:
        self.graph, self.node, self.is_apart = graph, node, is_apart
        self.bits = node.attributes.get_int("expert_weight_bits", 4)
        codes, scales = (weight_of(node, index[number]) for index in (_CODES, _SCALES))
        assert codes is not None and scales is not None
        points = None if _input(node, _ZERO_POINTS[number]) is None else weight_of(node, _ZERO_POINTS[number])
        self.name = codes.name or f"{node.name}.fc{number + 1}"
        self.codes, self.scales = expression_of(codes.const_value), expression_of(scales.const_value)
        self.points = None if points is None else expression_of(points.const_value)
        _, self.columns, size = self.codes.shape
        self.rows = size * 8 // self.bits
        # Without a size of blocks a column has one scale.
        self.group = node.attributes.get_int("block_size", 0) or self.rows
        self.groups = -(-self.rows // self.group)

    def matrix(self, expert: int) -> ir.Value:
        """Write what makes the matrix [rows, columns] of an expert of its codes, in front of the mixture."""
        signed_type, unsigned_type = CODE_TYPES[self.bits]
        code_type = signed_type if self.points is None else unsigned_type
        scales = Transpose(Reshape(_expert_part(self.scales, expert), (self.columns, self.groups)), (1, 0))
        parts = {
            "rows": SpreadCodes(_expert_part(self.codes, expert), self.bits, self.rows, self.columns, code_type),
            "scales": scales,
            **({} if self.points is None else {"zero_points": self._zero_points(expert, unsigned_type)}),
        }
        weights = []
        for part, expression in parts.items():
            tensor = WeightTensor(split_gates(expression) if self.is_apart else expression)
            weight = new_weight(self.graph, f"{self.name}.{expert}.{part}", tensor)
            weight.dtype, weight.shape = tensor.dtype, ir.Shape(tensor.shape)
            weights.append(weight)
        attributes = {"axis": 0, "block_size": self.group}
        reader = ir.node("DequantizeLinear", weights, attributes, name=f"{self.name}.{expert}.dequantize")
        set_type(reader.outputs[0], f"{self.name}.{expert}.dequantized", ir.DataType.FLOAT, [self.rows, self.columns])
        self.graph.insert_before(self.node, reader)
        return reader.outputs[0]

    def _zero_points(self, expert: int, code_type: ir.DataType) -> Expression:
        """Return zero points [groups, columns]; of one group they lie side by side for all columns."""
        assert self.points is not None
        points = _expert_part(self.points, expert)
        if len(self.points.shape) == 3:
            return SpreadCodes(points, self.bits, self.groups, self.columns, code_type)
        return Transpose(SpreadCodes(points, self.bits, self.columns, 1, code_type), (1, 0))


def _expert_part(stack: Expression, expert: int) -> Expression:
    """Return the part of one expert, of which the first axis is left out."""
    return Reshape(Slice.cut(stack, {0: slice(expert, expert + 1)}), stack.shape[1:])
