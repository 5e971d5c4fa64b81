from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from graphopt.artifact import artifact
from graphopt.verification.equivalence import Verifier
from tests.graphs import VOCABULARY, Builder, logits, relative, run_pass

# Another library's tanh, erf and exp, in float32. Seen up to 2e-7.
FLOAT32 = 2e-6


def model_of(op_type: str, biased: bool, **attributes: float) -> ir.Model:
    """Return logits = head(activation(table[ids], bias))."""
    build = Builder(np.random.default_rng(0), [], [])
    ids = ir.val("input_ids", ir.DataType.INT64, ["batch", "length"])
    # from where both ends are flat to where they are not
    x = build.op(
        "Gather", [build.constant("table", 4 * build.random.standard_normal((24, 16), np.float32)), ids], 16, "x"
    )
    inputs: list[ir.Value | None] = [x, build.weight("bias", 16)] if biased else [x]
    y = build.op(op_type, inputs, 16, "activation", **attributes)
    y.producer().domain = "com.microsoft"
    out = build.op("MatMul", [y, build.weight("head", 16, VOCABULARY)], VOCABULARY, "logits")
    out.name = "logits"
    opsets = {"": 23, "com.microsoft": 1}
    graph = ir.Graph([ids], [out], nodes=build.nodes, initializers=build.weights, opset_imports=opsets, name="small")
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(
    ("op_type", "biased", "attributes", "becomes"),
    [
        ("FastGelu", False, {}, {"Gelu": 1}),
        ("FastGelu", True, {}, {"Gelu": 1, "Add": 1}),
        ("BiasGelu", True, {}, {"Gelu": 1, "Add": 1}),
        ("Gelu", False, {}, {"Gelu": 1}),
        ("QuickGelu", False, {}, {"Sigmoid": 1, "Mul": 2}),
        ("QuickGelu", False, {"alpha": 1.0}, {"Sigmoid": 1, "Mul": 1}),
        ("QuickGelu", False, {"alpha": 0.5}, {"Sigmoid": 1, "Mul": 2}),
    ],
)
def test_the_standard_ops_say_what_onnxruntimes_own_compute(
    op_type: str, biased: bool, attributes: dict[str, float], becomes: dict[str, int], tmp_path: Path
) -> None:
    model = model_of(op_type, biased, **attributes)
    before = logits(model, tmp_path / "before")
    report = run_pass(model, "canonicalize")
    assert not report.skips
    assert [str(change.what) for change in report.changes] == [f"onnxruntime's {op_type} became standard ops"]
    assert {node.domain for node in model.graph} == {""}
    assert Counter(node.op_type for node in model.graph) == {"Gather": 1, "MatMul": 1, **becomes}
    assert all(node.outputs[0].shape is not None for node in model.graph)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def test_the_approximation_stays_one(tmp_path: Path) -> None:
    """tanh and erf differ by up to 5e-4, so that one in the place of the other would show."""
    fast, exact = model_of("FastGelu", False), model_of("Gelu", False)
    for model in (fast, exact):
        run_pass(model, "canonicalize")
    found = [next(node for node in model.graph if node.op_type == "Gelu") for model in (fast, exact)]
    assert [node.attributes.get_string("approximate") for node in found] == ["tanh", "none"]
    assert relative(logits(fast, tmp_path / "fast"), logits(exact, tmp_path / "exact")) > 10 * FLOAT32


@pytest.mark.parametrize(
    ("family", "fused"), [("llama", {"QuickGelu"}), ("gpt2", {"FastGelu", "SkipLayerNormalization"})]
)
def test_a_graph_that_onnxruntime_optimized_and_saved_is_standard_again(
    family: str, fused: set[str], make_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / family
    shutil.copytree(make_artifact(family), folder)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    onnxruntime.InferenceSession(str(folder / artifact.MODEL), options, providers=["CPUExecutionProvider"])
    opened = artifact.read(folder / "optimized.onnx")
    assert {node.op_type for node in opened.model.graph if node.domain} == fused
    verifier = Verifier(tmp_path, {})
    verifier.start(opened.model)
    report = run_pass(opened.model, "canonicalize")
    assert not report.skips
    assert {node.domain for node in opened.model.graph} == {""}
    # two layers of sums in another order, and another library's tanh or exp: seen 5e-7
    assert verifier.check(opened.model, "canonicalize", "exact").figures["largest_change"] <= 1e-5
