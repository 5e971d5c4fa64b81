"""onnxruntime's own QMoE says what its codes mean; products of dequantized codes must say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from graphopt.ort.session import ACCURACY_LEVEL, open_session
from graphopt.passes.base import PassReport
from graphopt.passes.codes.unfuse_experts.unfuse_experts import (
    NOT_CONSTANT,
    NOT_FLOAT,
    OTHER_CODES,
    OTHER_INPUTS,
    OTHER_TARGET,
    UnfuseExperts,
)
from graphopt.passes.common.fused_experts import OTHER_ACTIVATION, SPARSE_MIXER
from graphopt.passes.context import make_context
from graphopt.tasks.registry import task_of
from tests.graphs import run_pass, save, session

EXPERTS, HIDDEN, INNER, TOKENS = 4, 64, 32, 10
SWIGLU = {"swiglu_fusion": 1, "activation_alpha": 1.702, "activation_beta": 1.0, "swiglu_limit": 0.7}


def mixture(
    bits: int = 4,
    group: int = 32,
    activation: str = "swiglu",
    level: int = 0,
    *,
    zeros: bool = False,
    bias: bool = True,
    rank: int = 2,
    dtype: type = np.float32,
    **attributes: Any,
) -> ir.Model:
    """Return y = QMoE(x, router, ...) of random codes; outputs are of order 1."""
    random = np.random.default_rng(bits)
    first = 2 * INNER if activation == "swiglu" else INNER
    sizes = {"1": (first, HIDDEN), "2": (HIDDEN, INNER)}
    weights: dict[str, np.ndarray] = {}
    for name, (columns, rows) in sizes.items():
        groups = rows // group if group else 1
        scales = random.uniform(0.5, 1, (EXPERTS, columns, groups)) / ((1 << bits) * rows**0.5)
        weights[f"codes{name}"] = random.integers(0, 256, (EXPERTS, columns, rows * bits // 8), np.uint8)
        weights[f"scales{name}"] = (scales if group else scales[..., 0]).astype(dtype)
        if bias:
            weights[f"bias{name}"] = random.standard_normal((EXPERTS, columns)).astype(dtype)
        if zeros:
            # close to the middle, as quantizers choose them: products stay of order 1
            packed = (EXPERTS, columns, -(-groups * bits // 8)) if group else (EXPERTS, columns * bits // 8)
            low, high = (random.integers(6, 10, packed) for _ in range(2))
            points = low + 16 * high if bits == 4 else random.integers(110, 147, packed)
            weights[f"zeros{name}"] = points.astype(np.uint8)
    order = ["codes1", "scales1", "bias1", "codes2", "scales2", "bias2", "", "", "", "zeros1", "zeros2"]
    names = ["x", "router", *(name if name in weights else "" for name in order)]
    while not names[-1]:
        names.pop()
    settings = {"k": 2, "expert_weight_bits": bits, "activation_type": activation, "accuracy_level": level}
    settings |= {"block_size": group} if group else {}
    settings |= SWIGLU if activation == "swiglu" else {}
    node = helper.make_node("QMoE", names, ["y"], "mixture", domain="com.microsoft", **settings | attributes)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    dims = ["tokens", HIDDEN] if rank == 2 else ["batch", "length", HIDDEN]
    ports = [("x", dims), ("router", ["tokens", EXPERTS]), ("y", dims)]
    x, router, y = (helper.make_tensor_value_info(name, kind, shape) for name, shape in ports)
    tensors = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([node], "mixture", [x, router], [y], tensors)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def unfuse(model: ir.Model, target: Any = "ort-cpu") -> PassReport:
    report: PassReport = UnfuseExperts()(model, make_context(task_of(model.graph), target=target)).report
    return report


def feeds(rank: int = 2) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    x, router = (random.standard_normal((TOKENS, size)).astype(np.float32) for size in (HIDDEN, EXPERTS))
    return {"x": x if rank == 2 else x.reshape(2, TOKENS // 2, HIDDEN), "router": router}


CASES: list[dict[str, Any]] = [
    {},
    {"zeros": True},
    {"group": 0},
    {"group": 0, "zeros": True},
    {"activation": "silu", "normalize_routing_weights": 1},
    {"activation": "gelu", "bias": False, "k": 1},
    {"activation": "relu", "rank": 3},
    {"activation": "identity"},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_codes_mean_what_onnxruntime_says(case: dict[str, Any], tmp_path: Path) -> None:
    model, inputs = mixture(**case), feeds(case.get("rank", 2))
    (before,) = session(model, tmp_path / "before").run(None, inputs)
    report = unfuse(model)
    assert not report.skips
    assert report.changes
    # onnxruntime would round inputs of the products to int8: level 0 lets it not
    after_session = open_session(save(model, tmp_path), entries={ACCURACY_LEVEL: "0"})
    (after,) = after_session.run(None, inputs)
    # of order 1, as `mixture` makes them: a bound relative to the largest says nothing of zeros, or of what overflows
    assert 0.1 < np.abs(before).max() < 10
    # Sums of 64 and of 32 products in float32, in another order.
    assert np.abs(after - before).max() <= 2e-6 * np.abs(before).max()


@pytest.mark.parametrize("case", [{"level": 4}, {"bits": 8}, {"bits": 8, "zeros": True}], ids=str)
def test_inputs_are_rounded_where_onnxruntime_rounds_them(case: dict[str, Any], tmp_path: Path) -> None:
    model = mixture(**case)
    (before,) = session(model, tmp_path / "before").run(None, feeds())
    unfuse(model)
    roundings = [node for node in model.graph if node.op_type == "RoundActivations"]
    assert len(roundings) == 2 * EXPERTS
    assert roundings[0].attributes.get_int("group") == 32
    (after,) = session(model, tmp_path / "after").run(None, feeds())
    # The same integers, but for a few that round to the other side of a half: a step of 1/127 of the largest number of
    # a group times a weight, one of 96 terms. Without rounding the difference is five times that.
    assert np.abs(after - before).max() <= 1e-3 * np.abs(before).max()


def test_one_node_multiplies_the_rows_of_all_experts(tmp_path: Path) -> None:
    model = mixture(level=4)
    (before,) = session(model, tmp_path / "before").run(None, feeds())
    unfuse(model)
    for name in ("lower", "group_experts"):
        run_pass(model, name, **({"target": "ort-cpu"} if name == "lower" else {}))
    kinds = [node.op_type for node in model.graph]
    # nothing is sorted in front and put back behind
    assert kinds.count("MatMulExperts") == 2
    assert kinds.count("TopK") == 1
    assert not {"MatMulTable", "Range", "ScatterElements"} & set(kinds)
    (after,) = session(model, tmp_path / "after").run(None, feeds())
    assert np.abs(after - before).max() <= 1e-3 * np.abs(before).max()  # as above


def test_what_stays_says_why() -> None:
    computed = mixture()
    computed.graph.inputs.append(computed.graph.initializers.pop("scales1"))
    weighted = mixture()
    node = weighted.graph[0]
    node.resize_inputs(15)
    node.replace_input_with(14, weighted.graph.inputs[1])
    cases = [
        (mixture(), "portable", OTHER_TARGET),
        (computed, "ort-cpu", NOT_CONSTANT),
        (weighted, "ort-cpu", OTHER_INPUTS),
        (mixture(dtype=np.float16), "ort-cpu", NOT_FLOAT),
        (mixture(quant_type="fp4"), "ort-cpu", OTHER_CODES),
        (mixture(fc2_expert_weight_bits=8), "ort-cpu", OTHER_CODES),
        (mixture(use_sparse_mixer=1), "ort-cpu", SPARSE_MIXER),
        (mixture(swiglu_fusion=2), "ort-cpu", OTHER_ACTIVATION),
    ]
    for model, target, rule in cases:
        report = unfuse(model, target)
        assert [skip.reason.code for skip in report.skips] == [rule.code]
        assert [node.op_type for node in model.graph] == ["QMoE"]
