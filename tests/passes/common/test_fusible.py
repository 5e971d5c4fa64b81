"""Products that onnxruntime leaves on dequantized weights, and the same in words that it fuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx.numpy_helper
import onnx.parser
import onnx.shape_inference
import onnx_ir as ir
import pytest

from graphopt.graph.diagnostics import PassReport
from graphopt.ort.session import ACCURACY_LEVEL, AS_IT_LIES, open_session
from graphopt.passes.common.fusible import keep_fusible
from graphopt.passes.context import Ledger
from graphopt.verification.kernels import FUSED_PRODUCT, quantized_products
from tests.graphs import save

# A table of rows as codes, a product of codes that reads its rows, and another one in front of a Relu.
GRAPH = """<ir_version: 10, opset_import: ["": 23]>
g (int64[batch, n] ids) => (float[batch, n, 64] y, float[batch, n, 64] z) {
    rows = Gather(table, ids)
    row_scales = Gather(table_scales, ids)
    e = DequantizeLinear<axis = 2, block_size = 64>(rows, row_scales)
    w = DequantizeLinear<axis = 0, block_size = 32>(up, up_scales)
    h = MatMul(e, w)
    r = Relu(h)
    v = DequantizeLinear<axis = 0, block_size = 32>(down, down_scales)
    y = MatMul(r, v)
    u = DequantizeLinear<axis = 0, block_size = 32>(side, side_scales)
    z = MatMul(e, u)
}"""


def model() -> ir.Model:
    random = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {
        "table": random.integers(-127, 128, (50, 64)).astype(np.int8),
        "table_scales": random.uniform(0.01, 0.02, (50, 1)).astype(np.float32),
    }
    for name in ("up", "down", "side"):
        arrays[name] = random.integers(-127, 128, (64, 64)).astype(np.int8)
        arrays[f"{name}_scales"] = random.uniform(0.001, 0.002, (2, 64)).astype(np.float32)
    proto = onnx.parser.parse_model(GRAPH)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    for node in proto.graph.node:
        node.name = node.output[0]
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def fused(candidate: ir.Model, folder: Path) -> int:
    """Return how many products onnxruntime fuses, as its own graph says."""
    entries = {**AS_IT_LIES, ACCURACY_LEVEL: "0"}
    open_session(save(candidate, folder), entries=entries, optimized_to=folder / "optimized.onnx")
    return sum(node.op_type == FUSED_PRODUCT for node in ir.load(folder / "optimized.onnx").graph)


def test_onnxruntime_fuses_all_products_afterwards_and_numbers_stay(tmp_path: Path) -> None:
    before, after = model(), model()
    report = PassReport(name="lower", effect="lossy")
    keep_fusible(after.graph, quantized_products(after.graph), Ledger(report))
    assert [(change.where, str(change.what)) for change in report.changes] == [
        ("e.apart", "apart from h, which onnxruntime would not fuse behind it"),
        ("r", "Max with 0, so that onnxruntime fuses h"),
    ]
    # The reason is a fact about the runtime: where this fails, the rewrite has become idle.
    assert fused(before, tmp_path) == 1
    assert fused(after, tmp_path) == 3
    feeds = {"ids": np.arange(8).reshape(2, 4)}
    # at level 0, since the kernel of a fused product rounds its inputs to int8 by default
    files = [save(graph, tmp_path, name) for graph, name in ((before, "before.onnx"), (after, "after.onnx"))]
    outputs = [open_session(file, entries={ACCURACY_LEVEL: "0"}).run(None, feeds) for file in files]
    for expected, actual in zip(*outputs, strict=True):
        # two sums of 64 products each, in another order
        assert np.abs(actual - expected).max() <= 2 * 64 * 2**-24 * np.abs(expected).max()


@pytest.mark.parametrize("name", ["lower", "again"])
def test_a_second_time_changes_nothing(name: str) -> None:
    graph = model().graph
    keep_fusible(graph, quantized_products(graph), Ledger(PassReport(name=name, effect="lossy")))
    report = PassReport(name=name, effect="lossy")
    keep_fusible(graph, quantized_products(graph), Ledger(report))
    assert report.changes == []
