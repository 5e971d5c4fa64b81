from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.ort.session import open_session
from tests.graphs import relative
from tests.passes.lift.canonicalize.common import FLOAT32, canonicalize


@pytest.mark.parametrize("heads", [None, 4])
@pytest.mark.parametrize("honest", [True, False])
def test_products_between_reshapes_read_the_shape_around_them(tmp_path: Path, heads: int | None, honest: bool) -> None:
    """``addmm`` comes as Reshape, Gemm, Reshape; with heads still apart one reshape stays, in front."""
    random = np.random.default_rng(0)
    shape = ["batch", "length", 8] if heads is None else ["batch", "length", heads, 2]
    x = ir.val("x", ir.DataType.FLOAT, shape)
    numbers = {"flat": [-1, 8], "back": [2, 3, 6] if honest else [3, 2, 6]}
    weights = [ir.val(n, const_value=ir.tensor(np.array(v, np.int64), name=n)) for n, v in numbers.items()]
    weights += [
        ir.val(name, const_value=ir.tensor(random.standard_normal(size).astype(np.float32), name=name))
        for name, size in (("w", (8, 6)), ("b", (6,)))
    ]
    flat, back, w, b = weights
    tape = ir.tape.Tape()
    outputs = [tape.op("Reshape", [x, flat])]
    outputs.append(tape.op("Gemm", [outputs[-1], w, b]))
    outputs.append(tape.op("Reshape", [outputs[-1], back]))
    dims = [["rows", 8], ["rows", 6], ["batch", "length", 6] if honest else ["length", "batch", 6]]
    for node, value, dim, name in zip(tape.nodes, outputs, dims, ("flatten", "gemm", "y"), strict=True):
        node.name = value.name = name
        value.dtype, value.shape = ir.DataType.FLOAT, ir.Shape(dim)
    graph = ir.Graph([x], outputs[-1:], nodes=tape.nodes, initializers=weights, opset_imports={"": 23}, name="addmm")
    model = ir.Model(graph, ir_version=10)
    feeds = {"x": random.standard_normal((2, 3, 8) if heads is None else (2, 3, 4, 2)).astype(np.float32)}
    results = []
    for name in ("before", "after"):
        ir.save(model, tmp_path / f"{name}.onnx")
        results.append(open_session(tmp_path / f"{name}.onnx").run(["y"], feeds)[0])
        if name == "before":
            report = canonicalize(model)
    assert relative(*results) < FLOAT32
    reshapes = Counter(node.op_type for node in model.graph)["Reshape"]
    assert reshapes == (2 if not honest else 0 if heads is None else 1)
    assert bool(report.skips) != honest
