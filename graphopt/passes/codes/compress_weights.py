"""Weights that no kernel reads as codes are stored as int8 all the same: of recurrences, and in branches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import onnx_ir as ir

from graphopt.analysis.structure.decoded_weights import is_weight_input, moved_inputs
from graphopt.graph.diagnostics import Effect, Rule
from graphopt.graph.editing import drop
from graphopt.graph.weights import Reshape, Transpose, WeightTensor, expression_of, new_weight, weight_of
from graphopt.numerics.formats import format_of
from graphopt.passes.base import Pass
from graphopt.passes.common.weight_decoders import lift_weight
from graphopt.quantization.rounding.lazy_codes import quantize_lazily
from graphopt.quantization.rounding.scales import Scale

if TYPE_CHECKING:
    from collections.abc import Iterator

    from graphopt.graph.weights import Expression
    from graphopt.passes.context import Context, Ledger

STORAGE = Rule("compress_weights.stored", "{weight} of {op_type} as int8, one scale for an output")
NO_CONSTANT = Rule("compress_weights.no-constant", "its weight is computed")
NOT_FLOAT = Rule("compress_weights.not-float", "its weight is {type}, not float32")
ALSO_READ = Rule("compress_weights.also-read", "{weight} is no weight for {op_type}, which reads it, too")

Uses = list[tuple[ir.Node, int]]

_CODES = format_of("int8")
_FEWEST = 1024
"""Numbers of a weight that are worth a node that decodes them."""


class CompressWeights(Pass):
    """Store as int8 the weights for which onnxruntime has no product of codes, one scale for each output.

    before::

        y = LSTM(x, W, R)                                       W [directions, 4 hidden, inputs], float32

    after::

        y = LSTM(x, DequantizeLinear(codes, scales; axis=1), R')             scales [4 hidden]

    It takes ``W`` and ``R`` of ``LSTM``, ``GRU`` and ``RNN``, also where ``Slice``, ``Concat`` and their like move
    their rows first, weights of ``ConvTranspose``, and of ``MatMul`` and ``Gemm`` in branches and loops, with products
    outside of them that read the same. Constants of
    branches move out of them. Products are of floats as before: what is gained is the size of the file, and the step
    ``decode_at_load`` keeps the time what it was.

    A recurrence reads what it made, so errors of its weights add up over steps: compare with ``quality`` on sequences
    of your own.

    Attributes:
        scale: how scales are chosen, see :func:`graphopt.quantization.rounding.round_to_nearest`.
    """

    name: ClassVar[str] = "compress_weights"
    effect: ClassVar[Effect] = "lossy"
    after: ClassVar[tuple[str, ...]] = ("quantize_convolutions",)

    scale: Scale = "least_squares"

    def rewrite(self, model: ir.Model, context: Context) -> None:
        """Give each such weight codes; say why another one stays."""
        graph, ledger = model.graph, context.ledger
        uses: dict[ir.Value, Uses] = {}
        readers: dict[ir.Value, ir.Node] = {}
        for node, index in _weight_inputs(model):
            for value, user, input_index in _sources(node, index):
                weight = lift_weight(graph, value)
                if weight is None or weight.const_value is None:
                    ledger.skipped(node, NO_CONSTANT())
                elif weight.dtype != ir.DataType.FLOAT:
                    ledger.skipped(node, NOT_FLOAT(type=str(weight.dtype)))
                elif weight.const_value.size >= _FEWEST and (user, input_index) not in uses.setdefault(weight, []):
                    uses[weight].append((user, input_index))
                    readers.setdefault(weight, node)
        for weight, uses_of_weight in uses.items():
            uses_of_weight += [use for use in _products_of(weight) if use not in uses_of_weight]
            strangers = [use.node for use in weight.uses() if (use.node, use.idx) not in uses_of_weight]
            if strangers:
                ledger.skipped(weight, ALSO_READ(weight=weight.name, op_type=strangers[0].op_type))
            else:
                self._store(graph, weight, readers[weight], uses_of_weight, ledger)

    def _store(
        self,
        graph: ir.Graph,
        weight: ir.Value,
        reader: ir.Node,
        uses_of_weight: Uses,
        ledger: Ledger,
    ) -> None:
        """Put codes in the place of ``weight``, which nodes read at ``uses_of_weight``."""
        assert weight.const_value is not None
        expression = expression_of(weight.const_value)
        shape, axis = expression.shape, _output_axis(reader, uses_of_weight, len(expression.shape))
        # Rows of one matrix, one for each scale.
        order = (axis, *(dim for dim in range(len(shape)) if dim != axis)) if axis is not None else None
        matrix: Expression = expression if order is None else Transpose(expression, order)
        rows = matrix.shape[0] if order is not None else -1
        columns = -1 if order is not None else shape[-1]
        tensor = WeightTensor(Reshape.to_dims(matrix, (rows, columns)))
        parts = quantize_lazily(tensor, _CODES, tensor.shape.numpy()[1], self.scale, is_transposed=True)
        codes, scales = (expression_of(parts[name]) for name in ("codes", "scales"))
        attributes: dict[str, Any] = {"axis": axis}
        if order is not None:
            back = tuple(order.index(dim) for dim in range(len(shape)))
            codes = Transpose(Reshape.to_dims(codes, matrix.shape), back)
            scales = Reshape.to_dims(scales, (rows,))
        else:
            codes, scales = Reshape.to_dims(codes, shape), Reshape.to_dims(scales, (*shape[:-1], 1))
            attributes = {"axis": len(shape) - 1, "block_size": shape[-1]}
        values = [
            new_weight(graph, f"{weight.name}.{part}", WeightTensor(content))
            for part, content in (("codes", codes), ("scales", scales))
        ]
        # In the graph itself: in a branch onnxruntime takes DequantizeLinear and a product for one of codes, which it
        # looks for among the weights of that branch.
        decoder = ir.node("DequantizeLinear", values, attributes, name=f"{weight.name}.decode")
        output = decoder.outputs[0]
        output.name, output.type, output.shape = f"{weight.name}.decoded", weight.type, weight.shape
        graph.insert_before(graph[0], decoder)
        for node, index in uses_of_weight:
            node.replace_input_with(index, output)
        ledger.changed(decoder, STORAGE(weight=weight.name, op_type=reader.op_type), [weight])
        drop(graph, weight)


def _weight_inputs(model: ir.Model) -> Iterator[tuple[ir.Node, int]]:
    """Yield each node with the place of a weight of it that nothing else makes codes of."""
    for node in model.graph.all_nodes():
        if node.domain:
            continue
        is_inside = node.graph is not model.graph
        if is_inside and node.op_type in ("MatMul", "Gemm"):
            if weight_of(node, 1) is not None or _is_constant_node(node.inputs[1]):
                yield node, 1
        elif node.op_type != "Gemm":
            yield from ((node, index) for index in range(len(node.inputs)) if is_weight_input(node, index))


def _products_of(weight: ir.Value) -> Uses:
    """Return the products that read a weight: those beside its decoder would keep it in floats, or store it twice."""
    return [(use.node, use.idx) for use in weight.uses() if (use.node.op_type, use.idx) == ("MatMul", 1)]


def _is_constant_node(value: ir.Value | None) -> bool:
    producer = None if value is None else value.producer()
    return producer is not None and (producer.domain, producer.op_type) == ("", "Constant")


def _sources(node: ir.Node, index: int) -> Iterator[tuple[ir.Value | None, ir.Node, int]]:
    """Yield what input ``index`` of ``node`` is made of by moving numbers: each value, a reader, its place there."""
    value = node.inputs[index]
    producer = None if value is None else value.producer()
    operands = [] if producer is None else moved_inputs(producer)
    if not operands:
        yield value, node, index
        return
    assert producer is not None
    for operand_index in range(len(operands)):
        yield from _sources(producer, operand_index)


def _output_axis(reader: ir.Node, uses_of_weight: Uses, rank: int) -> int | None:
    """Return the axis of a weight along which scales lie; ``None`` for a scale for each row of its last axis."""
    if reader.op_type in ("LSTM", "GRU", "RNN"):
        return 0 if rank == 2 else None
    if reader not in [node for node, _ in uses_of_weight]:  # what moves its numbers may have other axes
        return 0
    if reader.op_type == "Gemm" and reader.attributes.get_int("transB", 0) == 1:
        return 0
    return 1 if reader.op_type in ("Gemm", "ConvTranspose") else rank - 1
