"""The types of values that a file does not state, as far as they follow from what makes them."""

from __future__ import annotations

import onnx_ir as ir

# Operators whose output has the type of their first input.
_KEEPERS = frozenset(
    ("MatMul", "Gemm", "Conv", "Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Neg", "Exp", "Relu", "Tanh")
)
_KEEPERS |= {"Sigmoid", "Softmax", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Gather"}
_KEEPERS |= {"Slice", "Concat", "Split", "Expand", "ReduceMean", "ReduceSum", "LayerNormalization", "Clip", "Erf"}


def type_of(value: ir.Value) -> ir.DataType | None:
    """Return the type of a value: as stated, or that of what makes it; ``None`` where that is not known."""
    while value.dtype is None:
        producer = value.producer()
        if producer is None or producer.domain:
            return None
        if producer.op_type == "Cast":
            return ir.DataType(producer.attributes.get_int("to", 1))
        first = producer.inputs[0] if producer.inputs else None
        if producer.op_type not in _KEEPERS or first is None:
            return None
        value = first
    return value.dtype
