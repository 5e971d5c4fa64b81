"""onnxruntime's own MoE says what its weights mean; products of rows by expert must say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from graphopt.passes.common.fused_experts import OTHER_ACTIVATION
from graphopt.passes.lift.canonicalize.float_experts import EXPERTS_NOT_CONSTANT, EXPERTS_NOT_FLOAT, THIRD_MATRIX
from tests.graphs import run_pass, session

EXPERTS, HIDDEN, INNER, TOKENS = 4, 64, 32, 10


def mixture(
    activation: str, *, dims: list[str | int] | None = None, bias: bool = True, dtype: type = np.float32, **options: Any
) -> ir.Model:
    """Return y = MoE(x, router, ...) of random weights; outputs are of order 1."""
    random = np.random.default_rng(0)
    sizes = {"1": (2 * INNER if activation == "swiglu" else INNER, HIDDEN), "2": (HIDDEN, INNER)}
    weights: dict[str, np.ndarray] = {}
    for name, (columns, rows) in sizes.items():
        weights[f"W{name}"] = (random.standard_normal((EXPERTS, columns, rows)) / rows**0.5).astype(dtype)
        if bias:
            weights[f"b{name}"] = random.standard_normal((EXPERTS, columns)).astype(dtype)
    names = ["x", "router", *(name if name in weights else "" for name in ("W1", "b1", "W2", "b2"))]
    settings = {"k": 2, "activation_type": activation} | options
    node = helper.make_node("MoE", names, ["y"], "mixture", domain="com.microsoft", **settings)
    kind, dims = helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), [*(dims or ["tokens"]), HIDDEN]
    ports = [("x", dims), ("router", ["tokens", EXPERTS]), ("y", dims)]
    x, router, y = (helper.make_tensor_value_info(name, kind, shape) for name, shape in ports)
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([node], "mixture", [x, router], [y], tensors)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def feeds(rank: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    x, router = (random.standard_normal((TOKENS, size)).astype(np.float32) for size in (HIDDEN, EXPERTS))
    return {"x": x if rank == 2 else x.reshape(2, TOKENS // 2, HIDDEN), "router": router}


SWIGLU = {"swiglu_fusion": 1, "activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.7}
CASES: dict[str, dict[str, Any]] = {
    "swiglu": SWIGLU,
    "silu": {"normalize_routing_weights": 1},
    "gelu": {"bias": False, "k": 1},
    "relu": {"dims": ["batch", "length"]},
}


@pytest.mark.parametrize("activation", CASES)
def test_experts_mean_what_onnxruntime_says(activation: str, tmp_path: Path) -> None:
    model = mixture(activation, **CASES[activation])
    inputs = feeds(1 + len(CASES[activation].get("dims", [""])))
    (before,) = session(model, tmp_path / "before").run(None, inputs)
    report = run_pass(model, "canonicalize")
    assert "canonicalize.experts-lifted" in {change.what.code for change in report.changes}
    assert sum(node.op_type == "MatMul" for node in model.graph) == 2 * EXPERTS
    (after,) = session(model, tmp_path / "after").run(None, inputs)
    assert 0.1 < np.abs(before).max() < 10
    # Sums of 64 and of 32 products in float32, in another order.
    assert np.abs(after - before).max() <= 2e-6 * np.abs(before).max()


def test_one_node_multiplies_the_rows_of_all_experts(tmp_path: Path) -> None:
    model = mixture("swiglu", **SWIGLU)
    run_pass(model, "canonicalize")
    run_pass(model, "quantize_weights", linear={"format": "nf4", "group": 32}, lm_head=None, embedding=None)
    (before,) = session(model, tmp_path / "before").run(None, feeds(2))
    for name in ("lower", "group_experts"):
        run_pass(model, name, **({"target": "ort-cpu"} if name == "lower" else {}))
    assert [node.op_type for node in model.graph].count("MatMulExperts") == 2
    (after,) = session(model, tmp_path / "after").run(None, feeds(2))
    # The same codes and scales. Kernels may round the table of NF4 to multiples of its largest number / 32767, by half
    # of that, 1.5e-5, in each of two products one behind the other.
    assert np.abs(after - before).max() <= 5e-5 * np.abs(before).max()


def test_what_stays_says_why() -> None:
    computed, third = mixture("silu"), mixture("silu")
    computed.graph.inputs.append(computed.graph.initializers.pop("W1"))
    node = third.graph[0]
    node.resize_inputs(7)
    node.replace_input_with(6, third.graph.initializers["W1"])
    cases = [
        (computed, EXPERTS_NOT_CONSTANT),
        (third, THIRD_MATRIX),
        (mixture("silu", dtype=np.float16), EXPERTS_NOT_FLOAT),
        (mixture("swiglu", swiglu_fusion=2), OTHER_ACTIVATION),
    ]
    for model, rule in cases:
        report = run_pass(model, "canonicalize")
        assert [skip.reason.code for skip in report.skips] == [rule.code]
        assert [node.op_type for node in model.graph] == ["MoE"]
