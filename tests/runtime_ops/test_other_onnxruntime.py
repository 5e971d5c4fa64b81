"""The library in another onnxruntime than the one installed here: it asks for the ABI of 1.17, and no later one.

Set GRAPHOPT_OTHER_ONNXRUNTIME to a Python with another onnxruntime and NumPy; it needs nothing of graphopt::

    python3.11 -m venv other && other/bin/pip install "onnxruntime==1.18.1" "numpy<2"
    GRAPHOPT_OTHER_ONNXRUNTIME=other/bin/python pytest tests/runtime_ops/test_other_onnxruntime.py
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.numerics.rotations import hadamard
from graphopt.ort.session import open_session
from graphopt.runtime_ops import declare, library_path
from graphopt.runtime_ops.hadamard.spec.op import HADAMARD
from graphopt.runtime_ops.matmul_table.spec.op import MATMUL_TABLE
from graphopt.runtime_ops.matmul_table.spec.packing import pack, tile
from tests.native import needs_library

OTHER = os.environ.get("GRAPHOPT_OTHER_ONNXRUNTIME")

pytestmark = [
    needs_library,
    pytest.mark.skipif(OTHER is None, reason="GRAPHOPT_OTHER_ONNXRUNTIME names no Python with another onnxruntime"),
]

# What the other Python runs: with the kernels where a library is named, and without.
SCRIPT = """
import sys
import numpy, onnxruntime
model, x, y, optimized, library = sys.argv[1:]
options = onnxruntime.SessionOptions()
options.log_severity_level = 3
options.optimized_model_filepath = optimized
if library:
    options.register_custom_ops_library(library)
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
numpy.save(y, session.run(None, {"x": numpy.load(x)})[0])
print(onnxruntime.__version__)
"""

# The newest that onnxruntime 1.18 knows.
OPSET, IR_VERSION = 21, 10


def save(folder: Path) -> Path:
    """A file with both kinds of kernels: one that has attributes, and one that has none."""
    random = np.random.default_rng(0)
    x = ir.val("x", ir.DataType.FLOAT, ir.Shape(["rows", 96]))
    weights = {
        "codes": pack(random.integers(0, 16, (96, 40), np.uint8), 4),
        "scales": tile(random.uniform(0.1, 1, (3, 40)).astype(np.float32)),
        "table": np.arange(-8, 8, dtype=np.float32),
        "zero_points": np.zeros((1, 1, 1), np.float32),
        "bias": random.standard_normal(40).astype(np.float32),
    }
    constants = {"m12": hadamard(12), "m8": hadamard(8), **weights}
    values = {name: ir.val(name, const_value=ir.tensor(value, name=name)) for name, value in constants.items()}
    turn = HADAMARD.node([x, values["m12"], values["m8"]], name="turn")
    attributes = {"rows": 96, "columns": 40, "group": 32, "activations": "int8"}
    product = MATMUL_TABLE.node([turn.outputs[0], *(values[name] for name in weights)], attributes, name="product")
    y = product.outputs[0]
    y.name, y.type, y.shape = "y", x.type, ir.Shape(["rows", 40])
    opsets = {"": OPSET}
    graph = ir.Graph([x], [y], nodes=[turn, product], initializers=values.values(), opset_imports=opsets, name="both")
    model = ir.Model(graph, ir_version=IR_VERSION)
    declare(model)
    ir.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("native", [True, False])
def test_another_onnxruntime_gives_the_same(native: bool, tmp_path: Path) -> None:
    assert OTHER is not None
    file, optimized = save(tmp_path), tmp_path / "optimized.onnx"
    x = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    arguments = [file, tmp_path / "x.npy", tmp_path / "y.npy", optimized, library_path() if native else ""]
    said = subprocess.run([OTHER, "-c", SCRIPT, *arguments], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    ours = {node.op_type for node in ir.load(optimized).graph} & {"Hadamard", "MatMulTable"}
    assert ours == ({"Hadamard", "MatMulTable"} if native else set())
    expected = open_session(file, native=native).run(None, {"x": x})[0]
    y = np.load(tmp_path / "y.npy")
    if native:
        assert np.array_equal(y, expected)
    else:
        assert np.abs(y - expected).max() < 1e-5 * np.abs(expected).max()
