"""Which tensors between convolutions may be codes of eight bits, and the pair of nodes that makes them so."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graphopt.graph.editing import shared_constant
from graphopt.graph.weights import weight_of

if TYPE_CHECKING:
    from collections.abc import Collection

_COMPUTE = frozenset(("Add", "Mul", "Concat", "GlobalAveragePool", "AveragePool", "Sigmoid", "LeakyRelu"))
# What comes out has the range of what goes in, and the same codes.
_MOVE = frozenset(("MaxPool", "Resize", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Slice", "Split"))
_BOUNDS = ("Relu", "Clip")
# Operators that read several tensors; of others the first input is the tensor.
_OF_SEVERAL = frozenset(("Add", "Mul", "Concat"))


def integer_tensors(graph: ir.Graph, convolutions: Collection[ir.Node]) -> dict[ir.Value, ir.Value]:
    """Return the tensors that convolutions read and make, and those on the way from one to the next.

    A ``Relu`` or ``Clip`` that alone reads a result belongs to it: what comes out of it is the tensor then. Operators
    that onnxruntime has for codes belong to the way where all that they read are such tensors, and where a convolution
    reads what becomes of them.

    Returns:
        Each tensor with the one whose range it has: itself, or what an operator moved.
    """
    sources = {node.inputs[0] for node in convolutions if node.inputs[0] is not None}
    tensors: dict[ir.Value, ir.Value] = {source: source for source in sources if source.producer() is None}
    steps: list[list[ir.Value]] = []
    for node in graph:
        if node in convolutions:
            result = _behind_bounds(node.outputs[0])
            tensors[result] = result
        elif _is_step(node) and all(x in tensors for x in operands_of(node)):
            is_move = node.op_type in _MOVE
            results = [value for value in node.outputs if value.uses() or value.is_graph_output()]
            if node.op_type == "MaxPool" and results != [node.outputs[0]]:  # it tells places, too
                tensors |= {value: value for value in results if value in sources}
                continue
            results = results if is_move else [_behind_bounds(node.outputs[0])]
            origin = tensors[operands_of(node)[0]] if is_move else None
            tensors |= {result: origin or result for result in results}
            steps.append(results)
        else:
            tensors |= {value: value for value in node.outputs if value in sources and value not in tensors}
    for results in reversed(steps):
        if not any(result in sources or _feeds_step(result, tensors) for result in results):
            for result in results:
                del tensors[result]
    return tensors


def _is_step(node: ir.Node) -> bool:
    """Return whether onnxruntime has ``node`` for codes; cubic interpolation leaves the range of its input."""
    is_cubic = node.op_type == "Resize" and node.attributes.get_string("mode", "nearest") == "cubic"
    return not node.domain and node.op_type in _COMPUTE | _MOVE and not is_cubic


def operands_of(node: ir.Node) -> list[ir.Value]:
    """Return the tensors that a node computes with, without its settings; a constant is none."""
    inputs = node.inputs if node.op_type in _OF_SEVERAL else node.inputs[:1]
    return [value for value in inputs if value is not None]


def _feeds_step(value: ir.Value, tensors: dict[ir.Value, ir.Value]) -> bool:
    """Return whether a reader of ``value`` makes such a tensor of it."""
    return any(
        use.node.op_type in _COMPUTE | _MOVE
        and any(output in tensors or _behind_bounds(output) in tensors for output in use.node.outputs)
        for use in value.uses()
    )


def _behind_bounds(value: ir.Value) -> ir.Value:
    """Return ``value``, or what a ``Relu`` or ``Clip`` of constant bounds makes of it that alone reads it."""
    uses = [*value.uses()]
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.domain or uses[0].node.op_type not in _BOUNDS:
        return value
    reader = uses[0].node
    bounds = range(1, len(reader.inputs))
    if any(reader.inputs[index] is not None and weight_of(reader, index) is None for index in bounds):
        return value
    return reader.outputs[0]


def put_codes_between(graph: ir.Graph, value: ir.Value, step: np.float32, zero: int) -> ir.Node:
    """Let all that read ``value``, outputs of the graph too, read what its codes mean; return what makes the codes.

    Args:
        graph: the graph.
        value: a tensor of floats.
        step: between two codes.
        zero: the code of 0.
    """
    name = value.name or ""
    operands = [
        shared_constant(graph, f"{name}.step", np.array(step, np.float32)),
        shared_constant(graph, f"{name}.zero", np.array(zero, np.uint8)),
    ]
    uses = [*value.uses()]
    encode = ir.node("QuantizeLinear", [value, *operands], name=f"{name}.encode")
    decode = ir.node("DequantizeLinear", [encode.outputs[0], *operands], name=f"{name}.decode")
    codes, numbers = encode.outputs[0], decode.outputs[0]
    codes.name, codes.type, codes.shape = f"{name}.codes", ir.TensorType(ir.DataType.UINT8), value.shape
    numbers.name, numbers.type, numbers.shape = f"{name}.numbers", value.type, value.shape
    for use in uses:
        use.node.replace_input_with(use.idx, numbers)
    producer = value.producer()
    if producer is not None:
        graph.insert_after(producer, [encode, decode])
        if value.is_graph_output():
            graph.outputs[list(graph.outputs).index(value)] = numbers
            value.name, numbers.name = f"{name}.floats", name
    else:
        graph.insert_before(graph[0], [encode, decode])
    return encode
