from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from graphopt.graph.weights import new_weight
from tests.graphs import run_pass


def run(model: ir.Model, feeds: dict[str, np.ndarray]) -> np.ndarray:
    opened = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    return np.asarray(opened.run(["y"], feeds)[0])


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("folds", [False, True])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_filled_tensor_is_a_concat(is_first: bool, folds: bool, turns: bool) -> None:
    """In any order, by indices that are computed or folded, and where keys are turned for a product besides."""
    float32 = ir.DataType.FLOAT
    parts = [ir.val(name, float32, [2, 3, 5, width]) for name, width in (("p", 4), ("q", 2))]
    ends = [(0, 4), (4, 2**63 - 1)]
    graph = ir.Graph(parts, [], nodes=[], opset_imports={"": 23}, name="filled")

    def op(op_type: str, inputs: list[ir.Value], dims: list[int], **attributes: object) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, name=f"node{len(list(graph))}")  # type: ignore[arg-type]
        value = node.outputs[0]
        value.name, value.shape, value.dtype = f"{node.name}.output", ir.Shape(dims), inputs[0].dtype
        graph.append(node)
        return value

    def integers(name: str, numbers: object) -> ir.Value:
        return new_weight(graph, name, ir.tensor(np.array(numbers, np.int64)))

    x = new_weight(graph, "zeros", ir.tensor(np.zeros((6, 3, 5, 2), np.float32)))
    indices = op("Range", [integers("zero", 0), integers("six", 6), integers("one", 1)], [6])
    for number in (1, 0) if is_first else (0, 1):
        width = parts[number].shape[3]
        start, end = (integers(f"{name}{number}", [bound]) for name, bound in zip("se", ends[number], strict=True))
        if folds:
            places = integers(f"places{number}", ends[number][0] + np.arange(width)[:, None])
        else:
            cut = op("Slice", [indices, start, end, integers(f"axis{number}", [0])], [width])
            places = op("Unsqueeze", [cut, integers(f"last{number}", [-1])], [width, 1])
        turned = op("Transpose", [parts[number]], [width, 3, 5, 2], perm=[3, 1, 2, 0])
        x = op("ScatterND", [x, places, turned], [6, 3, 5, 2])
    perm = [3, 1, 0, 2] if turns else [3, 1, 2, 0]
    y = op("Transpose", [x], [(6, 3, 5, 2)[axis] for axis in perm], perm=perm)
    y.name = "y"
    graph.outputs.append(y)
    model = ir.Model(graph, ir_version=11)
    feeds = {p.name: np.random.default_rng(0).standard_normal(p.shape.numpy()).astype(np.float32) for p in parts}
    before = run(model, feeds)
    report = run_pass(model, "canonicalize")
    assert "canonicalize.filled" in [change.what.code for change in report.changes]
    assert [node.op_type for node in model.graph] == ["Concat", "Transpose"][: 1 + turns]
    assert np.array_equal(before, run(model, feeds))
