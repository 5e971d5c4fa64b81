"""One node of an operator, run by its body alone: an onnxruntime that has no library of ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime

from graphopt.runtime_ops import OPERATORS, declare


def run_body(
    name: str, inputs: Sequence[np.ndarray], attributes: Mapping[str, Any], opset: int = 23, output_rank: int = 2
) -> np.ndarray:
    """Run one node of the operator called ``name``; every input is fed, so nothing is folded."""
    values = [
        ir.val(
            f"input{index}", ir.DataType.from_numpy(array.dtype), ir.Shape([f"{index}.{a}" for a in range(array.ndim)])
        )
        for index, array in enumerate(inputs)
    ]
    node = OPERATORS[name].node(values, dict(attributes), name="node")
    y = node.outputs[0]
    y.name, y.shape = "y", ir.Shape([f"y{axis}" for axis in range(output_rank)])
    assert y.dtype is not None, "the schema says what comes out"
    graph = ir.Graph(values, [y], nodes=[node], opset_imports={"": opset}, name="one")
    model = ir.Model(graph, ir_version=11)
    declare(model)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(
        ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    feeds = {value.name: array for value, array in zip(values, inputs, strict=True)}
    result: np.ndarray = session.run(None, feeds)[0]
    return result
