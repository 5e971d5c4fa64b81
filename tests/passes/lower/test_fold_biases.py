from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.ort.session import session_of
from graphopt.passes.common.formats import LinearFormat
from graphopt.passes.lower.fold_biases import BIAS_ALREADY, READ_BEFORE
from tests.graphs import run_pass

WIDTH, COLUMNS = 32, (48, 16)


def packed(*, biases: tuple[bool, bool] = (True, True), bits: int = 8) -> ir.Model:
    """Return two products of one input as one packed product, with biases behind some."""
    random = np.random.default_rng(0)
    x = ir.val("x", ir.DataType.FLOAT, ["batch", 5, WIDTH])
    nodes: list[ir.Node] = []
    initializers: list[ir.Value] = []

    def constant(name: str, array: np.ndarray) -> ir.Value:
        initializers.append(ir.val(name, const_value=ir.tensor(array, name=name)))
        return initializers[-1]

    outputs = []
    for index, (columns, has_bias) in enumerate(zip(COLUMNS, biases, strict=True)):
        weight = constant(f"w{index}", random.standard_normal((WIDTH, columns)).astype(np.float32))
        product = ir.node("MatMul", [x, weight], name=f"product{index}")
        product.outputs[0].type, product.outputs[0].shape = x.type, ir.Shape(["batch", 5, columns])
        nodes.append(product)
        if has_bias:
            bias = constant(f"b{index}", random.standard_normal(columns).astype(np.float32))
            nodes.append(ir.node("Add", [bias, product.outputs[0]], name=f"add{index}"))
            nodes[-1].outputs[0].type, nodes[-1].outputs[0].shape = x.type, product.outputs[0].shape
        outputs.append(nodes[-1].outputs[0])
        outputs[-1].name = f"y{index}"
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=initializers, opset_imports={"": 23}, name="biases")
    model = ir.Model(graph, ir_version=10)
    linear = LinearFormat(format="int8", group=16)
    run_pass(model, "quantize_weights", linear=linear, lm_head=linear)
    run_pass(model, "quantize_activations", bits=bits)
    run_pass(model, "merge_products")
    run_pass(model, "lower", target="ort-cpu", instructions="avx2")
    return model


def run(model: ir.Model) -> list[np.ndarray]:
    x = np.random.default_rng(1).standard_normal((3, 5, WIDTH), np.float32)
    with session_of(model) as session:
        outputs: list[np.ndarray] = session.run(None, {"x": x})
    return outputs


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


@pytest.mark.parametrize("biases", [(True, True), (False, True)])
def test_biases_behind_parts_of_a_merged_product_are_added_inside_and_the_bits_stay(biases: tuple[bool, bool]) -> None:
    model = packed(biases=biases)
    assert kinds(model).count("Add") == sum(biases)
    before = run(model)
    report = run_pass(model, "fold_biases")
    assert [str(change.what) for change in report.changes] == [
        f"adds {', '.join(f'b{index}' for index, has_bias in enumerate(biases) if has_bias)}"
    ]
    assert kinds(model) == ["MatMulDynamic", "Split"]
    assert all(np.array_equal(*pair) for pair in zip(before, run(model), strict=True))


def test_unpack_puts_a_bias_behind_its_product_again() -> None:
    model = packed()
    before = run(model)
    run_pass(model, "fold_biases")
    run_pass(model, "unpack")
    assert kinds(model).count("Add") == 1
    run_pass(model, "lower", target="ort-cpu", instructions="avx2")
    run_pass(model, "fold_biases")
    assert kinds(model) == ["MatMulDynamic", "Split"]
    assert all(np.array_equal(*pair) for pair in zip(before, run(model), strict=True))


def test_what_is_read_without_its_bias_and_what_has_one_stay() -> None:
    model = packed()
    split = next(node for node in model.graph if node.op_type == "Split")
    model.graph.outputs.append(split.outputs[0])
    report = run_pass(model, "fold_biases")
    assert [skip.reason.code for skip in report.skips] == [READ_BEFORE.code]
    assert kinds(model).count("Add") == 1
    again = packed()
    product = next(node for node in again.graph if node.op_type == "MatMulDynamic")
    bias = ir.val("other", const_value=ir.tensor(np.ones(sum(COLUMNS), np.float32), name="other"))
    again.graph.register_initializer(bias)
    product.replace_input_with(5, bias)
    assert [skip.reason.code for skip in run_pass(again, "fold_biases").skips] == [BIAS_ALREADY.code]
