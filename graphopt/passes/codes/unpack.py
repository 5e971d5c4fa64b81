"""Products whose codes were packed, by an earlier run of graphopt, get back their logical form."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir

from graphopt.analysis.codes import DEQUANTIZE
from graphopt.analysis.structure import packed_nodes
from graphopt.editing import replace, shared
from graphopt.facts import Effect, Fact, Rule
from graphopt.passes.base import Pass, StepOptions
from graphopt.passes.codes.inputs import round_input
from graphopt.passes.context import Context
from graphopt.passes.lower.layout import Unpacked, Untiled
from graphopt.runtime_ops import OPERATORS
from graphopt.weights import Expression, WeightTensor, expression_of, new_weight, weight_of

UNPACKED = Rule("unpack.unpacked", "{op_type} as a MatMul of dequantized codes")
NOT_CONSTANT = Rule("unpack.not-constant", "its codes, scales, table or zero points are no constants")
NOT_FLOAT = Rule("unpack.not-float", "it computes in {type}, and dequantized codes are float")
BIASED = Rule("unpack.biased", "it has a bias, which the logical form has not")


class UnpackOptions(StepOptions):
    """This step has no options."""

    step: Literal["unpack"] = "unpack"


class Unpack(Pass[UnpackOptions]):
    """Undo the packing of the step ``lower``, so that every step between meets codes in one form.

    before::

        y1 = ai.graphopt::MatMulTable(x, packed codes, scales, table, zero points, 0; group, activations)
        y2 = ai.graphopt::MatMulDynamic(x, packed codes, scales, ..., 0, left, right; group, bits, clip)

    after::

        y1 = MatMul(RoundActivations(x; activations, group), Dequantize(codes, scales, table, zero points; group))
        y2 = MatMul(RoundActivations(Hadamard(x, left, right); bits per token, clip), Dequantize(...))

    Codes, scales and zero points are the same numbers in another layout, and the step ``lower`` makes the same product
    of them again, to the last bit. graphopt adds this step itself where a packed model is optimized once more by a
    recipe that has work with codes.
    """

    name: ClassVar[str] = "unpack"
    effect: ClassVar[Effect] = "exact"
    options_type: ClassVar[type[StepOptions]] = UnpackOptions

    @classmethod
    def needed(cls, graph: ir.Graph) -> bool:
        """Return whether a product is packed."""
        return bool(packed_nodes(graph))

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Unpack every packed product; say why one stays."""
        graph, ledger = model.graph, context.ledger
        for node in packed_nodes(graph):
            reason = _refusal(node)
            if reason is not None:
                ledger.skipped(node, reason)
                continue
            rounding, new = _rounding(node), _logical(graph, node)
            replace(node, new)
            ledger.changed(new, UNPACKED(op_type=node.op_type), [node])
            if rounding is not None:
                round_input(graph, new, rounding, ledger)


def _refusal(node: ir.Node) -> Fact | None:
    x, bias = node.inputs[0], weight_of(node, 5)
    if bias is None or any(weight_of(node, index) is None for index in range(1, len(node.inputs))):
        return NOT_CONSTANT()
    if x is None or x.dtype not in (None, ir.DataType.FLOAT):
        return NOT_FLOAT(type=None if x is None else str(x.dtype))
    assert bias.const_value is not None
    return None if bias.const_value.size == 1 and not bias.const_value.numpy().any() else BIASED()


def _logical(graph: ir.Graph, node: ir.Node) -> ir.Node:
    """Return the product of dequantized codes; what it reads is inserted in front of ``node``."""
    rows, columns, group = (node.attributes.get_int(name, 0) for name in ("rows", "columns", "group"))
    codes, scales, table, zero_points = (weight_of(node, index) for index in range(1, 5))
    assert codes is not None and scales is not None and table is not None and zero_points is not None
    absent = np.zeros((1, 1), zero_points.dtype.numpy()) if _is_placeholder(zero_points) else None  # type: ignore[union-attr]
    inputs = [
        _unpacked(graph, codes, Unpacked(expression_of(codes.const_value), rows, columns)),
        _unpacked(graph, scales, Untiled(expression_of(scales.const_value), columns)),
        table,
        _unpacked(graph, zero_points, Untiled(expression_of(zero_points.const_value), columns))
        if absent is None
        else shared(graph, f"zero.{absent.dtype.name}", absent),
    ]
    dequantize = DEQUANTIZE.node(inputs, {"group": group}, name=f"{node.name}.dequantize")
    weight = dequantize.outputs[0]
    weight.name, weight.dtype, weight.shape = f"{dequantize.name}d", ir.DataType.FLOAT, ir.Shape([rows, columns])
    graph.insert_before(node, dequantize)
    return ir.node("MatMul", [_rotated(graph, node), weight], name=node.name)


def _is_placeholder(zero_points: ir.Value) -> bool:
    assert zero_points.const_value is not None
    return zero_points.const_value.size == 1


def _unpacked(graph: ir.Graph, packed: ir.Value, expression: Expression) -> ir.Value:
    """Register what ``packed`` was made of, under its name where nothing else reads it."""
    name = packed.name or "codes"
    if len(packed.uses()) == 1:
        del graph.initializers[name]
    return new_weight(graph, name, WeightTensor(expression))


def _rotated(graph: ir.Graph, node: ir.Node) -> ir.Value:
    """Return what the product multiplies, before it is rounded: a rotation inside it becomes a node in front."""
    x, *matrices = (node.inputs[index] for index in (0, 6, 7) if index < len(node.inputs))
    assert x is not None
    if all(value is not None and value.const_value is not None and value.const_value.size == 1 for value in matrices):
        return x
    rotation = OPERATORS["Hadamard"].node([x, *matrices], name=f"{node.name}.hadamard")
    made = rotation.outputs[0]
    made.name, made.type, made.shape = f"{rotation.name}.output", x.type, x.shape
    graph.insert_before(node, rotation)
    return made


def _rounding(node: ir.Node) -> dict[str, Any] | None:
    """Return the attributes of ``RoundActivations`` that say what the packed product rounds its input to."""
    if node.op_type == "MatMulDynamic":
        bits, clip = node.attributes.get_int("bits", 8), node.attributes.get_float("clip", 1.0)
        return {"activations": f"int{bits}", "group": 0, "clip": clip}
    activations = node.attributes.get_string("activations", "float32")
    if activations == "float32":
        return None
    return {"activations": activations, "group": node.attributes.get_int("group", 0), "clip": 1.0}
