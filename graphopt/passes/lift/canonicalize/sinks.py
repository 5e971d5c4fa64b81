"""Logits of sinks in attention that is spelled out: a column behind the scores, cut off behind the softmax.

t = Concat(s, Expand(l))                     l: one logit for each head
p = Softmax(t - ReduceMax(t))                or Softmax(t)
Slice(p, <all but the last key>)
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def without_shift(value: ir.Value | None) -> ir.Value | None:
    """Return x of x - ReduceMax(x), which has the same softmax, or ``value`` itself."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Sub" or node.domain:
        return value
    x, largest = node.inputs[:2]
    maximum = None if largest is None else largest.producer()
    is_largest = maximum is not None and maximum.op_type == "ReduceMax" and maximum.inputs[0] is x
    is_column = largest is not None and largest.shape is not None and list(largest.shape)[-1:] == [1]
    return x if is_largest and is_column else value


def appended_logits(value: ir.Value | None) -> tuple[ir.Value, ir.Value] | None:
    """Return scores [batch, heads, length, keys] and logits [1, heads, 1, 1] that stand behind the last key."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Concat" or node.domain or len(node.inputs) != 2:
        return None
    scores, column = node.inputs
    if scores is None or column is None or column.shape is None or node.attributes.get_int("axis") not in (-1, 3):
        return None
    expand = column.producer()
    logits = expand.inputs[0] if expand is not None and expand.op_type == "Expand" else column
    if logits is None or logits.shape is None or len(logits.shape) != 4 or logits.dtype != ir.DataType.FLOAT:
        return None
    batch, heads, length, width = logits.shape
    is_by_head = (batch, length, width) == (1, 1, 1) and isinstance(heads, int) and heads == column.shape[1]
    return (scores, logits) if is_by_head else None


def factor_of_sinks(softmax: ir.Node, product: ir.Node) -> tuple[ir.Value, ir.Node] | None:
    """Return logits [1, heads, 1] that scale the output of attention, and the node that does, as Granite has it.

    y * Unsqueeze(Sigmoid(ReduceLogSumExp(s) - l), -1)             s: what the softmax reads; y: of ``product``
    """
    scores = softmax.inputs[0]
    readers = [] if scores is None else [use.node for use in scores.uses()]
    total = next((node for node in readers if node.op_type == "ReduceLogSumExp" and not node.domain), None)
    if total is None or total.attributes.get_int("keepdims", 1) != 0 or _axes(total) != [-1]:
        return None
    chain = [total]
    for op_type in ("Sub", "Sigmoid", "Unsqueeze", "Mul"):
        value, uses = chain[-1].outputs[0], list(chain[-1].outputs[0].uses())
        if len(uses) != 1 or uses[0].node.op_type != op_type or value.is_graph_output():
            return None
        chain.append(uses[0].node)
    _, difference, _, column, node = chain
    logits = difference.inputs[1] if difference.inputs[0] is total.outputs[0] else None
    y = product.outputs[0]
    heads = None if y.shape is None else y.shape[1]
    is_by_head = logits is not None and logits.shape is not None and list(logits.shape) == [1, heads, 1]
    scales_output = y in node.inputs and len(list(y.uses())) == 1
    return (logits, node) if logits is not None and is_by_head and _axes(column) == [-1] and scales_output else None


def _axes(node: ir.Node | None) -> list[int] | None:
    axes = node.inputs[1] if node is not None and len(node.inputs) > 1 else None
    return None if axes is None else _constant(axes)


def drops_last(node: ir.Node) -> bool:
    """Return whether ``node`` is a ``Slice`` of probabilities [batch, heads, length, keys] without the last key."""
    if node.op_type != "Slice" or node.domain:
        return False
    numbers = [None if value is None else _constant(value) for value in node.inputs[1:]]
    starts, ends, axes, steps = [*numbers, *[None] * 4][:4]
    return (starts, ends) == ([0], [-1]) and axes in ([3], [-1]) and steps in (None, [1])


def _constant(value: ir.Value) -> list[int] | None:
    if value.const_value is None:
        return None
    numbers: list[int] = np.asarray(value.const_value.numpy()).reshape(-1).tolist()
    return numbers
