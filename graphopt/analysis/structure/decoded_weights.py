"""Weights that are stored as codes, and that no kernel reads as such: they are decoded to floats, and then read.

W = DequantizeLinear(codes, scales)
W = Mul(Cast(codes), scales)        the same, which onnxruntime computes when it opens the file
y = LSTM(x, Unsqueeze(W), R)        Unsqueeze, or what else moves numbers and computes none
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphopt.analysis.structure.convolutions import is_of_convolution

if TYPE_CHECKING:
    from collections.abc import Iterator

    import onnx_ir as ir

# Inputs that are weights and that onnxruntime has no codes for, by operator.
_WEIGHT_INPUTS = {"LSTM": (1, 2), "GRU": (1, 2), "RNN": (1, 2), "ConvTranspose": (1,), "Gemm": (1,)}
# What moves numbers; of Concat each input is moved, of others the first.
_MOVES = frozenset(("Identity", "Unsqueeze", "Squeeze", "Slice", "Split", "Concat", "Transpose", "Reshape"))


def is_weight_input(node: ir.Node, index: int) -> bool:
    """Return whether input ``index`` of ``node`` is a weight that onnxruntime reads as floats only."""
    return not node.domain and index in _WEIGHT_INPUTS.get(node.op_type, ())


def moved_inputs(node: ir.Node) -> list[ir.Value]:
    """Return the inputs whose numbers ``node`` moves and leaves as they are; none where it computes."""
    if node.domain or node.op_type not in _MOVES:
        return []
    inputs = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    return [value for value in inputs if value is not None]


def is_decoded_weight(node: ir.Node) -> bool:
    """Return whether ``node`` decodes constants that become, moved at most, weights that some node reads as floats.

    Those are of :func:`is_weight_input`, and of ``MatMul`` in branches and loops. A ``MatMul`` beside the decoder may
    read them too; where nothing else does, it is a product of codes.
    """
    codes = node.inputs[0] if (node.domain, node.op_type) == ("", "DequantizeLinear") else None
    if codes is None or not codes.is_initializer():
        return False
    ends = list(_ends(node.outputs[0]))
    uses = [end for end in ends if end is not None]
    reads_floats = (is_weight_input(reader, index) or reader.graph is not node.graph for reader, index in uses)
    return len(uses) == len(ends) and any(reads_floats)


def _ends(value: ir.Value) -> Iterator[tuple[ir.Node, int] | None]:
    """Yield each use of ``value`` as a weight, behind what moves numbers; ``None`` for another, an output, or none."""
    if value.is_graph_output() or not value.uses():
        yield None
    for use in value.uses():
        if value in moved_inputs(use.node):
            for output in use.node.outputs:
                yield from _ends(output)
        else:
            is_product = (use.node.domain, use.node.op_type) == ("", "MatMul") and use.idx == 1
            yield use if is_product or is_weight_input(use.node, use.idx) else None


def decoders(model: ir.Model) -> list[ir.Node]:
    """Return every ``DequantizeLinear`` of stored weights that some operator reads as floats.

    Those are of :func:`is_decoded_weight`, and of ``Conv`` that read floats. onnxruntime computes them in each run.
    """
    nodes = []
    for node in model.graph.all_nodes():
        if node.op_type != "DequantizeLinear" or node.domain or not _is_plain(node):
            continue
        is_of_floats = is_of_convolution(node) and all(
            use.idx == 1 and not _is_decoded(use.node.inputs[0]) for use in node.outputs[0].uses()
        )
        if is_of_floats or is_decoded_weight(node):
            nodes.append(node)
    return nodes


def _is_plain(node: ir.Node) -> bool:
    """Return whether codes and scales are constants, and there are no zero points."""
    constants = [value is not None and value.is_initializer() for value in node.inputs[:2]]
    return all(constants) and (len(node.inputs) < 3 or node.inputs[2] is None)


def _is_decoded(value: ir.Value | None) -> bool:
    producer = None if value is None else value.producer()
    return producer is not None and (producer.domain, producer.op_type) == ("", "DequantizeLinear")


def casts_codes(node: ir.Node) -> bool:
    """Return whether ``node`` makes floats of stored codes, a ``Cast``, for a ``Mul`` with their scales."""
    codes = node.inputs[0] if (node.domain, node.op_type) == ("", "Cast") else None
    if codes is None or not codes.is_initializer() or codes.dtype is None:
        return False
    is_code = codes.dtype.is_integer() and codes.dtype.bitwidth <= 8
    return is_code and all((use.node.domain, use.node.op_type) == ("", "Mul") for use in node.outputs[0].uses())


def holds_cast_codes(value: ir.Value) -> bool:
    """Return whether ``value`` are codes of a weight that is decoded by ``Cast`` and ``Mul``, as a whole or by rows."""
    if any(casts_codes(use.node) for use in value.uses()):
        return True
    return any(_casts_rows(node) and _is_scaled(node.outputs[0]) for node, _ in _uses_of_rows(value))


def scales_cast_codes(value: ir.Value) -> bool:
    """Return whether ``value`` are the scales of such codes, or the zero points of such rows."""
    for node, index in _uses_of_rows(value):
        if _has_type(node, "Mul") and any(_is_cast_codes(operand) for operand in node.inputs):
            return True
        if not _has_type(node, "Cast") or index:
            continue
        readers = [reader for reader, operand in _uses_of_rows(node.outputs[0]) if operand == 1]
        if any(_has_type(reader, "Sub") and _is_cast_codes(reader.inputs[0]) for reader in readers):
            return True
    return False


def _has_type(node: ir.Node | None, op_type: str) -> bool:
    return node is not None and (node.domain, node.op_type) == ("", op_type)


def _uses_of_rows(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """Yield what reads ``value``, or rows of it."""
    for use in value.uses():
        if _has_type(use.node, "Gather") and use.idx == 0:
            yield from _uses_of_rows(use.node.outputs[0])
        else:
            yield use.node, use.idx


def _casts_rows(node: ir.Node) -> bool:
    """Return whether ``node`` makes floats of rows of stored codes."""
    rows = node.inputs[0] if _has_type(node, "Cast") else None
    lookup = None if rows is None else rows.producer()
    codes = lookup.inputs[0] if lookup is not None and _has_type(lookup, "Gather") else None
    if codes is None or not codes.is_initializer() or codes.dtype is None:
        return False
    return codes.dtype.is_integer() and codes.dtype.bitwidth <= 8


def _is_scaled(numbers: ir.Value) -> bool:
    """Return whether numbers that were cast are multiplied, without their zero points or as they are."""
    differences = [use.node.outputs[0] for use in numbers.uses() if _has_type(use.node, "Sub") and use.idx == 0]
    return any(_has_type(use.node, "Mul") for value in (numbers, *differences) for use in value.uses())


def _is_cast_codes(value: ir.Value | None) -> bool:
    producer = None if value is None else value.producer()
    if producer is None:
        return False
    if _has_type(producer, "Sub"):
        return _is_cast_codes(producer.inputs[0])
    return casts_codes(producer) or _casts_rows(producer)
