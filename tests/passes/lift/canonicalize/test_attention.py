from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphopt.artifact import artifact
from graphopt.ort.session import open_session
from tests.passes.lift.canonicalize.common import canonicalize


def test_grouped_heads_are_read_once(llama_artifact: Path) -> None:
    model = artifact.read(llama_artifact).model
    canonicalize(model)
    for node in (node for node in model.graph if node.op_type == "Attention"):
        assert [value.shape[1] for value in node.inputs[:3]] == [4, 2, 2]


def test_onnxruntime_gives_zeros_to_a_query_that_sees_no_key(tmp_path: Path) -> None:
    """The guard around Attention may go because of this; it is a fact about the runtime, so it is tested there."""
    shape = [1, 2, 3, 4]
    inputs = [ir.val(name, ir.DataType.FLOAT, shape) for name in ("q", "k", "v")]
    mask = ir.val("mask", ir.DataType.BOOL, [1, 1, 3, 3])
    node = ir.node("Attention", [*inputs, mask], {"is_causal": 1})
    node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = "y", ir.DataType.FLOAT, ir.Shape(shape)
    graph = ir.Graph([*inputs, mask], node.outputs, nodes=[node], opset_imports={"": 23}, name="blind")
    ir.save(ir.Model(graph, ir_version=10), tmp_path / "blind.onnx")
    random = np.random.default_rng(0)
    feeds = {name: random.standard_normal(shape).astype(np.float32) for name in "qkv"}
    hidden = np.array([[[[0, 1, 1]] * 3]], bool)  # with causality, query 0 sees nothing
    y = open_session(tmp_path / "blind.onnx").run(None, {**feeds, "mask": hidden})[0]
    assert np.array_equal(y[:, :, 0], np.zeros_like(y[:, :, 0]))
    assert np.isfinite(y).all()
