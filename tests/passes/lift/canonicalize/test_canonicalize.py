from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graphopt import artifact, provenance
from graphopt.checks.equivalence import Verifier
from graphopt.errors import InputError
from graphopt.passes.lift.canonicalize import Canonicalize, CanonicalizeOptions
from graphopt.runtime import open_session
from tests.graphs import logits, relative, residual_model, session

# Lifts reorder nothing that is summed; only a decomposed norm is computed in another order. Seen 0 to 3e-7.
FLOAT32 = 2e-6


def canonicalize(model: ir.Model) -> object:
    return Canonicalize(CanonicalizeOptions())(model).report  # type: ignore[attr-defined]


def node_of(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in model.graph if node.name == name)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_export_keeps_its_logits_and_says_attention_plainly(
    family: str, make_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    model = artifact.read(make_artifact(family)).model
    verifier = Verifier(tmp_path, {})
    verifier.start(model)
    report = canonicalize(model)
    assert verifier.check(model, "canonicalize", "exact").figures["largest_change"] <= FLOAT32
    attentions = [node for node in model.graph if node.op_type == "Attention"]
    assert len(attentions) == 2
    for node in attentions:
        assert node.attributes.get_int("is_causal") == 1
        assert node.inputs[4].name.startswith("past_key_values.")
        assert node.outputs[1].name.startswith("present.")
        assert node.inputs[3].name == "padding_mask"
    kinds = Counter(node.op_type for node in model.graph)
    assert kinds["Where"] == kinds["GatherND"] == kinds["Range"] == 0
    assert kinds["Expand"] == 1  # the padding mask
    assert not report.skips


def test_grouped_heads_are_read_once(llama_artifact: Path) -> None:
    model = artifact.read(llama_artifact).model
    canonicalize(model)
    for node in (node for node in model.graph if node.op_type == "Attention"):
        assert [value.shape[1] for value in node.inputs[:3]] == [4, 2, 2]


def test_a_sliding_window_is_recognized_as_something_else(make_artifact: Callable[[str], Path]) -> None:
    model = artifact.read(make_artifact("gemma3")).model
    report = canonicalize(model)
    windows = [skip for skip in report.skips if "neither causal nor causal with padding" in skip.reason]
    assert len(windows) == 1  # one layer of two slides
    causal = [n for n in model.graph if n.op_type == "Attention" and n.attributes.get_int("is_causal", 0)]
    assert len(causal) == 1


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


@pytest.mark.parametrize("square", ["Pow", "Mul"])
@pytest.mark.parametrize("division", ["Div", "Reciprocal", "one over"])
@pytest.mark.parametrize("gain_first", [True, False])
def test_decomposed_norms_become_the_standard_op(tmp_path: Path, square: str, division: str, gain_first: bool) -> None:
    model = residual_model(layers=1)
    before = logits(model, tmp_path / "before")
    for norm in [node for node in model.graph if node.op_type == "RMSNormalization"]:
        decompose(model.graph, norm, square, division, gain_first)
    assert relative(before, logits(model, tmp_path / "spelled out")) < FLOAT32
    canonicalize(model)
    kinds = Counter(node.op_type for node in model.graph)
    assert (kinds["RMSNormalization"], kinds["Sqrt"]) == (2, 0)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def test_norms_that_share_a_gain_get_names_of_their_own(tmp_path: Path) -> None:
    # Exporters give equal gains one initializer; onnxruntime refuses two nodes of one name.
    model = residual_model(layers=1)
    norms = [node for node in model.graph if node.op_type == "RMSNormalization"]
    norms[1].replace_input_with(1, norms[0].inputs[1])
    before = logits(model, tmp_path / "before")
    for norm in norms:
        decompose(model.graph, norm, "Pow", "Div", gain_first=False)
    canonicalize(model)
    assert len({node.name for node in model.graph if node.op_type == "RMSNormalization"}) == 2
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def decompose(graph: ir.Graph, norm: ir.Node, square: str, division: str, gain_first: bool) -> None:
    """Spell a norm out as exporters do."""
    x, gain = norm.inputs

    def number(name: str, value: float | list[int], dtype: ir.DataType = ir.DataType.FLOAT) -> ir.Value:
        made = ir.val(f"{norm.name}.{name}", const_value=ir.tensor(value, dtype=dtype, name=f"{norm.name}.{name}"))
        graph.initializers[made.name] = made
        return made

    tape = ir.tape.Tape()
    squared = tape.op("Pow", [x, number("two", 2.0)]) if square == "Pow" else tape.op("Mul", [x, x])
    mean = tape.op("ReduceMean", [squared, number("axes", [-1], ir.DataType.INT64)], {"keepdims": 1})
    root = tape.op("Sqrt", [tape.op("Add", [mean, number("epsilon", norm.attributes.get_float("epsilon", 1e-5))])])
    if division == "Div":
        normalized = tape.op("Div", [x, root])
    elif division == "Reciprocal":
        normalized = tape.op("Mul", [x, tape.op("Reciprocal", [root])])
    else:
        normalized = tape.op("Mul", [x, tape.op("Div", [number("one", 1.0), root])])
    output = tape.op("Mul", [gain, normalized] if gain_first else [normalized, gain])
    for position, node in enumerate(tape.nodes):
        node.name = f"{norm.name}.{position}"
        node.outputs[0].dtype = ir.DataType.FLOAT
    output.shape = norm.outputs[0].shape
    graph.insert_before(norm, tape.nodes)
    norm.outputs[0].replace_all_uses_with(output)
    graph.remove(norm, safe=True)


def center(model: ir.Model, norm: ir.Node, **mean: object) -> tuple[ir.Node, ir.Value]:
    """Spell the mean of a LayerNormalization out, as Cohere's is, and return the RMSNormalization and x - mean(x)."""
    x, gain, *bias = norm.inputs
    axes = ir.val(f"{norm.name}.axes", const_value=ir.tensor([-1], dtype=ir.DataType.INT64, name=f"{norm.name}.axes"))
    model.graph.initializers[axes.name] = axes
    tape = ir.tape.Tape()
    centered = tape.op("Sub", [x, tape.op("ReduceMean", [x, axes], {"keepdims": 1, **mean})])
    output = tape.op("RMSNormalization", [centered, gain], {"axis": -1, "epsilon": 1e-5})
    normed = output.producer()
    if bias:
        output = tape.op("Add", [bias[0], output] if norm.name == "norm0" else [output, bias[0]])
    for node in tape.nodes:
        node.name = f"{norm.name}.{node.op_type}"
        node.outputs[0].dtype, node.outputs[0].shape = ir.DataType.FLOAT, norm.outputs[0].shape
    model.graph.insert_before(norm, tape.nodes)
    norm.outputs[0].replace_all_uses_with(output)
    model.graph.remove(norm, safe=True)
    return normed, centered


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("spelled_out", ["the mean", "all"])
def test_decomposed_layer_norms_become_the_standard_op(tmp_path: Path, biased: bool, spelled_out: str) -> None:
    model = residual_model(layers=1, layer_norm=True)
    for norm in [node for node in model.graph if node.op_type == "LayerNormalization"]:
        if not biased:
            norm.resize_inputs(2)
    before = logits(model, tmp_path / "before")
    for norm in [node for node in model.graph if node.op_type == "LayerNormalization"]:
        normed, _ = center(model, norm)
        if spelled_out == "all":
            decompose(model.graph, normed, "Pow", "Div", gain_first=False)
    assert relative(before, logits(model, tmp_path / "spelled out")) < FLOAT32
    canonicalize(model)
    kinds = Counter(node.op_type for node in model.graph)
    assert kinds["LayerNormalization"] == 2
    assert kinds["RMSNormalization"] == kinds["ReduceMean"] == kinds["Sub"] == 0
    norms = [node for node in model.graph if node.op_type == "LayerNormalization"]
    # onnxruntime 1.31 crashes the process while it optimizes a LayerNormalization whose third input is empty
    assert {len(node.inputs) for node in norms} == {3 if biased else 2}
    assert len({node.name for node in norms}) == 2
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def mean_without_its_axis(model: ir.Model, norm: ir.Node) -> None:
    center(model, norm, keepdims=0)


def norm_over_two_axes(model: ir.Model, norm: ir.Node) -> None:
    normed, _ = center(model, norm)
    normed.attributes["axis"] = ir.AttrInt64("axis", 1)


def gain_that_is_computed(model: ir.Model, norm: ir.Node) -> None:
    normed, centered = center(model, norm)
    gain = ir.node("Sigmoid", [centered], name="gain")
    gain.outputs[0].dtype = ir.DataType.FLOAT
    model.graph.insert_before(normed, gain)
    normed.replace_input_with(1, gain.outputs[0])


def centered_is_read(model: ir.Model, norm: ir.Node) -> None:
    _, centered = center(model, norm)
    node_of(model, "residual0").replace_input_with(0, centered)


def test_a_number_behind_a_layer_norm_is_a_bias_of_equal_numbers(tmp_path: Path) -> None:
    model = residual_model(layers=1, layer_norm=True)
    norm = node_of(model, "norm0")
    norm.resize_inputs(2)
    normed, _ = center(model, norm)
    number = ir.val("number", const_value=ir.tensor(np.array([0.5], np.float32), name="number"))
    model.graph.initializers["number"] = number
    shifted = ir.node("Add", [normed.outputs[0], number], name="shifted")
    shifted.outputs[0].dtype, shifted.outputs[0].shape = ir.DataType.FLOAT, normed.outputs[0].shape
    normed.outputs[0].replace_all_uses_with(shifted.outputs[0])
    shifted.replace_input_with(0, normed.outputs[0])
    model.graph.insert_after(normed, shifted)
    before = logits(model, tmp_path / "before")
    canonicalize(model)
    norm = next(node for node in model.graph if node.op_type == "LayerNormalization")
    assert (norm.inputs[2].const_value.numpy() == 0.5).all()
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


@pytest.mark.parametrize("twist", [mean_without_its_axis, norm_over_two_axes, gain_that_is_computed, centered_is_read])
def test_what_only_looks_like_a_layer_norm_stays(tmp_path: Path, twist: Callable[[ir.Model, ir.Node], None]) -> None:
    # One row of as many tokens as coordinates: a mean that lost its axis is spread over another, without an error.
    ids = {"input_ids": np.arange(5)[None]}
    model = residual_model(width=5, layers=1, layer_norm=True)
    for norm in [node for node in model.graph if node.op_type == "LayerNormalization"]:
        norm.resize_inputs(2)
    twist(model, node_of(model, "norm0"))
    before = session(model, tmp_path / "before").run(["logits"], ids)[0]
    canonicalize(model)
    assert node_of(model, "norm0.RMSNormalization").op_type == "RMSNormalization"
    assert relative(before, session(model, tmp_path / "after").run(["logits"], ids)[0]) < FLOAT32


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("biased", [True, False])
def test_gemm_becomes_matmul_and_add(tmp_path: Path, transposed: int, biased: bool) -> None:
    random = np.random.default_rng(0)
    x = ir.val("x", ir.DataType.FLOAT, ["rows", 6])
    weight = random.standard_normal((5, 6) if transposed else (6, 5)).astype(np.float32)
    values = [ir.val("w", const_value=ir.tensor(weight, name="w"))]
    if biased:
        values.append(ir.val("b", const_value=ir.tensor(random.standard_normal(5).astype(np.float32), name="b")))
    node = ir.node("Gemm", [x, *values], {"transB": transposed}, name="gemm")
    node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = "y", ir.DataType.FLOAT, ir.Shape(["rows", 5])
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=values, opset_imports={"": 23}, name="gemm")
    model = ir.Model(graph, ir_version=10)
    feeds = {"x": random.standard_normal((3, 6)).astype(np.float32)}
    results = []
    for name in ("before", "after"):
        ir.save(model, tmp_path / f"{name}.onnx")
        results.append(open_session(tmp_path / f"{name}.onnx").run(["y"], feeds)[0])
        canonicalize(model)
    assert {node.op_type for node in model.graph} == ({"MatMul", "Add"} if biased else {"MatMul"})
    assert relative(*results) < FLOAT32


@pytest.mark.parametrize(("attribute", "value", "reason"), [("alpha", 2.0, "alpha"), ("transA", 1, "transposes")])
def test_a_gemm_that_does_more_is_left_alone(attribute: str, value: float, reason: str) -> None:
    x = ir.val("x", ir.DataType.FLOAT, [6, 6])
    weight = ir.val("w", const_value=ir.tensor(np.eye(6, dtype=np.float32), name="w"))
    node = ir.node("Gemm", [x, weight], {attribute: value}, name="gemm")
    node.outputs[0].name, node.outputs[0].dtype, node.outputs[0].shape = "y", ir.DataType.FLOAT, ir.Shape([6, 6])
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[weight], opset_imports={"": 23}, name="gemm")
    report = canonicalize(ir.Model(graph, ir_version=10))
    assert [(skip.where, reason in skip.reason) for skip in report.skips] == [("gemm", True)]


def test_a_tied_head_becomes_a_weight_of_its_own(tmp_path: Path) -> None:
    model = residual_model(tied=True)
    before = logits(model, tmp_path / "before")
    canonicalize(model)
    assert node_of(model, "head").inputs[1].is_initializer()
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def test_an_opset_that_onnxruntime_cannot_load_is_refused() -> None:
    model = residual_model()
    model.graph.opset_imports[""] = 28
    with pytest.raises(InputError, match="opset 28 is newer than onnxruntime can load.*26"):
        canonicalize(model)


def test_an_older_opset_is_raised(tmp_path: Path) -> None:
    model = residual_model(layers=1)
    before = logits(model, tmp_path / "before")
    for norm in [node for node in model.graph if node.op_type == "RMSNormalization"]:
        decompose(model.graph, norm, "Pow", "Div", gain_first=False)
    model.graph.opset_imports[""] = 18
    report = canonicalize(model)
    assert model.graph.opset_imports[""] == 23
    assert any("opset 18 raised to 23" in change.what for change in report.changes)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def layout_model(op_type: str, shape: tuple[int, ...], extra: list[list[int] | int], **attributes: object) -> ir.Model:
    """Return y0, y1, .. = x * <what ``op_type`` makes of a weight of ``shape``>, for a number x."""
    x = ir.val("x", ir.DataType.FLOAT, [])
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    values = [ir.val("weight", const_value=ir.tensor(weight, name="weight"))]
    for position, numbers in enumerate(extra):
        values.append(ir.val(f"n{position}", const_value=ir.tensor(np.array(numbers, np.int64), name=f"n{position}")))
    parts = 1 if op_type != "Split" else attributes.get("num_outputs", 0) or len(extra[0])
    node = ir.node(op_type, values, attributes or None, num_outputs=parts, name="layout")
    products = [ir.node("Mul", [x, part], name=f"product{position}") for position, part in enumerate(node.outputs)]
    for position, product in enumerate(products):
        node.outputs[position].dtype = product.outputs[0].dtype = ir.DataType.FLOAT
        product.outputs[0].name = f"y{position}"
    outputs = [product.outputs[0] for product in products]
    graph = ir.Graph([x], outputs, nodes=[node, *products], initializers=values, opset_imports={"": 23}, name="layout")
    return ir.Model(graph, ir_version=10)


def run_products(model: ir.Model, folder: Path) -> list[np.ndarray]:
    folder.mkdir()
    ir.save(model, folder / "model.onnx")
    return open_session(folder / "model.onnx").run(None, {"x": np.array(1.5, np.float32)})


@pytest.mark.parametrize(
    ("op_type", "shape", "extra", "attributes"),
    [
        ("Transpose", (2, 3, 4), [], {}),
        ("Transpose", (2, 3, 4), [], {"perm": [1, 2, 0]}),
        ("Split", (6, 3), [], {"axis": 0, "num_outputs": 3}),
        ("Split", (3, 7), [], {"axis": -1, "num_outputs": 3}),
        ("Split", (6, 3), [[1, 2, 3]], {}),
        ("Slice", (6, 5), [[1], [2**63 - 1]], {}),
        ("Slice", (6, 5), [[-1, 0], [-(2**63), -2], [1, 0], [-2, 1]], {}),
        ("Gather", (4, 3, 2), [-2], {"axis": 0}),
        ("Gather", (4, 3, 2), [1], {"axis": 2}),
        ("Squeeze", (1, 3, 1, 2), [[0, -2]], {}),
        ("Squeeze", (1, 3, 1, 2), [], {}),
        ("Unsqueeze", (3, 2), [[0, -1]], {}),
        ("Reshape", (4, 3, 2), [[0, -1]], {}),
        ("Reshape", (4, 3, 2), [[2, 2, -1]], {"allowzero": 1}),
    ],
)
def test_a_weight_is_stored_as_it_is_read(
    tmp_path: Path, op_type: str, shape: tuple[int, ...], extra: list[list[int] | int], attributes: dict[str, object]
) -> None:
    model = layout_model(op_type, shape, extra, **attributes)
    before = run_products(model, tmp_path / "before")
    canonicalize(model)
    assert {node.op_type for node in model.graph} == {"Mul"}
    assert "n0" not in model.graph.initializers
    after = run_products(model, tmp_path / "after")
    assert len(before) == len(after) == len(model.graph.outputs)
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))


def shape_is_computed(model: ir.Model) -> None:
    node_of(model, "layout").replace_input_with(1, computed(model, [6]))


def app_reads_it(model: ir.Model) -> None:
    output = node_of(model, "layout").outputs[0]
    output.name, output.shape = "y1", ir.Shape([6])
    model.graph.outputs.append(output)


def holds_integers(model: ir.Model) -> None:
    # Shapes and indices: what reads them wants them as they are, and they weigh nothing.
    weight = model.graph.initializers["weight"]
    weight.const_value = ir.tensor(np.arange(6).reshape(2, 3), name="weight")
    layout = node_of(model, "layout")
    number = ir.node("Cast", [layout.outputs[0]], {"to": ir.DataType.FLOAT}, name="number")
    number.outputs[0].dtype = ir.DataType.FLOAT
    layout.outputs[0].dtype = ir.DataType.INT64
    model.graph.insert_after(layout, number)
    node_of(model, "product0").replace_input_with(1, number.outputs[0])


def computed(model: ir.Model, numbers: list[int]) -> ir.Value:
    """Return ``numbers`` as something that is only known at run time: x, which is 1.5, is cast to 1 and multiplied."""
    layout = node_of(model, "layout")
    factor = ir.val("factor", const_value=ir.tensor(np.array(numbers, np.int64), name="factor"))
    model.graph.initializers["factor"] = factor
    tape = ir.tape.Tape()
    product = tape.op("Mul", [tape.op("Cast", [model.graph.inputs[0]], {"to": ir.DataType.INT64}), factor])
    for node in tape.nodes:
        node.outputs[0].dtype = ir.DataType.INT64
    model.graph.insert_before(layout, tape.nodes)
    return product


@pytest.mark.parametrize("twist", [shape_is_computed, app_reads_it, holds_integers])
def test_a_layout_that_cannot_be_stored_stays(tmp_path: Path, twist: Callable[[ir.Model], None]) -> None:
    model = layout_model("Reshape", (2, 3), [[6]])
    twist(model)
    before = run_products(model, tmp_path / "before")
    canonicalize(model)
    assert node_of(model, "layout").inputs[0].name == "weight"
    after = run_products(model, tmp_path / "after")
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))


def mixture(experts: int, rows: int, columns: int, *, transposed: bool = False) -> ir.Model:
    """Return y_e = x stack[e]; with ``transposed`` the stack is kept [experts, columns, rows]."""
    shape = (experts, columns, rows) if transposed else (experts, rows, columns)
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    stack, first = ir.val("stack", const_value=ir.tensor(array, name="stack")), ir.val("first")
    first.const_value = ir.tensor(np.array([0], np.int64), name="first")
    x = ir.val("x", ir.DataType.FLOAT, ["length", rows])
    tape = ir.tape.Tape()
    whole = tape.op("Transpose", [stack], {"perm": [0, 2, 1]}) if transposed else stack
    split = ir.node("Split", [whole], {"axis": 0, "num_outputs": experts}, num_outputs=experts, name="split")
    after, products = ir.tape.Tape(), []
    for expert, part in enumerate(split.outputs):
        products.append(after.op("MatMul", [x, after.op("Squeeze", [part, first])]))
        products[-1].name, products[-1].shape = f"y{expert}", ir.Shape(["length", columns])
    nodes = [*tape.nodes, split, *after.nodes]
    for position, node in enumerate(nodes):
        node.name = node.name or f"{node.op_type}{position}"
        for output in node.outputs:
            output.dtype = ir.DataType.FLOAT
    graph = ir.Graph([x], products, nodes=nodes, initializers=[stack, first], opset_imports={"": 23}, name="mixture")
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("transposed", [True, False])
def test_each_expert_becomes_a_matrix_of_its_own(tmp_path: Path, transposed: bool) -> None:
    model = mixture(3, 4, 5, transposed=transposed)
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)}
    results = []
    for name in ("before", "after"):
        ir.save(model, tmp_path / f"{name}.onnx")
        results.append(np.stack(open_session(tmp_path / f"{name}.onnx").run(None, feeds)))
        if name == "before":
            report = canonicalize(model)
    assert relative(*results) < FLOAT32
    assert {node.op_type for node in model.graph} == {"MatMul"}
    stem = "stack.transposed" if transposed else "stack"
    # and so neither the stack, nor what lay between
    assert list(model.graph.initializers) == [f"{stem}.{expert}" for expert in range(3)]
    assert all(value.shape == [4, 5] for value in model.graph.initializers.values())
    assert [change.where for change in report.changes] == list(model.graph.initializers)
    assert provenance.history(model.graph.initializers[f"{stem}.1"]) == (["canonicalize"], ["stack"])


def test_a_stack_that_is_read_whole_as_well_stays_beside_its_parts() -> None:
    model = mixture(3, 4, 5)
    whole = ir.node("ReduceSum", [model.graph.initializers["stack"]], name="whole")
    whole.outputs[0].name, whole.outputs[0].dtype = "sum", ir.DataType.FLOAT
    model.graph.append(whole)
    model.graph.outputs.append(whole.outputs[0])
    canonicalize(model)
    assert set(model.graph.initializers) == {"stack", "stack.0", "stack.1", "stack.2"}


@pytest.mark.parametrize("transposed", [True, False])
def test_reading_an_expert_takes_the_memory_of_that_expert(tmp_path: Path, transposed: bool) -> None:
    ir.save(mixture(8, 128, 256, transposed=transposed), tmp_path / "model.onnx", external_data="model.data")
    model = ir.load(tmp_path / "model.onnx")
    canonicalize(model)
    assert len(model.graph.initializers) == 8
    size = 4 * 128 * 256
    for value in model.graph.initializers.values():
        tracemalloc.start()
        assert value.const_value.numpy().nbytes == size
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        # a view of the mapped file where it lies there in order; else one copy, and small things
        assert peak < (1.2 * size if transposed else 0.2 * size)


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


def test_a_spelled_out_rotary_embedding_becomes_the_standard_op(tmp_path: Path) -> None:
    size = 8

    def turn(tape: ir.tape.Tape, x: ir.Value, angles: ir.Value, number: Number) -> ir.Value:
        both = tape.op("Concat", [angles, angles], {"axis": -1})
        cos, sin = (tape.op("Unsqueeze", [tape.op(function, [both]), number([1])]) for function in ("Cos", "Sin"))
        first, second = (
            tape.op("Slice", [x, number([start]), number([end]), number([3]), number([1])])
            for start, end in ((0, size // 2), (size // 2, 2**63 - 1))
        )
        turned = tape.op("Concat", [tape.op("Neg", [second]), first], {"axis": -1})
        return tape.op("Add", [tape.op("Mul", [x, cos]), tape.op("Mul", [turned, sin])])

    model, before = rotary_model(size, turn, tmp_path / "before")
    canonicalize(model)
    assert sorted(node.op_type for node in model.graph) == ["Cos", "RotaryEmbedding", "Sin"]
    assert relative(before, run_rotary(model, size, tmp_path / "after")) < FLOAT32


Number = Callable[[list[int]], ir.Value]


def neighbours(
    size: int, *, after: int = 3, shape: list[int | str] | None = None
) -> Callable[[ir.tape.Tape, ir.Value, ir.Value, Number], ir.Value]:
    """Return what spells out a rotary embedding of neighbours as Cohere's export does, or nearly so."""

    def turn(tape: ir.tape.Tape, x: ir.Value, angles: ir.Value, number: Number) -> ir.Value:
        tiled = tape.op("Tile", [tape.op("Unsqueeze", [angles, number([after])]), number([1, 1, 1, 2])])
        doubled = tape.op("Reshape", [tiled, number([0, 0, size])])
        doubled.shape = ir.Shape(["batch", "length", size])
        cos, sin = (tape.op("Unsqueeze", [tape.op(function, [doubled]), number([1])]) for function in ("Cos", "Sin"))
        even, odd = (
            tape.op("Slice", [x, number([start]), number([2**63 - 1]), number([3]), number([2])]) for start in (0, 1)
        )
        pairs = [tape.op("Unsqueeze", [half, number([-1])]) for half in (tape.op("Neg", [odd]), even)]
        turned = tape.op("Reshape", [tape.op("Concat", pairs, {"axis": -1}), number([0, 0, 0, size])])
        turned.shape = ir.Shape(shape or ["batch", 2, "length", size])
        return tape.op("Add", [tape.op("Mul", [x, cos]), tape.op("Mul", [turned, sin])])

    return turn


def test_a_rotary_embedding_of_neighbours_becomes_the_standard_op(tmp_path: Path) -> None:
    model, before = rotary_model(8, neighbours(8), tmp_path / "before")
    canonicalize(model)
    assert sorted(node.op_type for node in model.graph) == ["Cos", "RotaryEmbedding", "Sin"]
    assert relative(before, run_rotary(model, 8, tmp_path / "after")) < FLOAT32


@pytest.mark.parametrize(
    "turn",
    [
        # a name that says the length, where the shape must say it
        neighbours(8, shape=["batch", 2, "other", 8]),
        # neighbours in x, halves in the angles: Tile of [.., 1, size / 2] repeats all of them
        neighbours(8, after=2),
    ],
)
def test_what_only_looks_like_a_rotation_of_neighbours_stays(
    tmp_path: Path, turn: Callable[[ir.tape.Tape, ir.Value, ir.Value, Number], ir.Value]
) -> None:
    model, before = rotary_model(8, turn, tmp_path / "before")
    canonicalize(model)
    assert "RotaryEmbedding" not in {node.op_type for node in model.graph}
    assert relative(before, run_rotary(model, 8, tmp_path / "after")) < FLOAT32


def rotary_model(
    size: int, turn: Callable[[ir.tape.Tape, ir.Value, ir.Value, Number], ir.Value], folder: Path
) -> tuple[ir.Model, np.ndarray]:
    """Return y = turn(x, angles) for x of two heads of ``size``, and what onnxruntime computes of it."""
    x = ir.val("x", ir.DataType.FLOAT, ["batch", 2, "length", size])
    angles = ir.val("angles", ir.DataType.FLOAT, ["batch", "length", size // 2])
    numbers: dict[str, ir.Value] = {}

    def number(values: list[int]) -> ir.Value:
        name = f"number{values}"
        return numbers.setdefault(name, ir.val(name, const_value=ir.tensor(np.array(values, np.int64), name=name)))

    tape = ir.tape.Tape()
    y = turn(tape, x, angles, number)
    for position, node in enumerate(tape.nodes):
        node.name = f"{node.op_type}{position}"
        node.outputs[0].dtype = ir.DataType.FLOAT
    y.name, y.shape = "y", x.shape
    graph = ir.Graph(
        [x, angles], [y], nodes=tape.nodes, initializers=list(numbers.values()), opset_imports={"": 23}, name="rotary"
    )
    model = ir.Model(graph, ir_version=10)
    return model, run_rotary(model, size, folder)


def run_rotary(model: ir.Model, size: int, folder: Path) -> np.ndarray:
    folder.mkdir()
    ir.save(model, folder / "model.onnx")
    random = np.random.default_rng(0)
    feeds = {"x": random.standard_normal((2, 2, 5, size)), "angles": random.uniform(0, 7, (2, 5, size // 2))}
    return open_session(folder / "model.onnx").run(["y"], {k: v.astype(np.float32) for k, v in feeds.items()})[0]


def windowed_model(window: int | None) -> ir.Model:
    """Return one Attention with its mask spelled out: causal, not padding, and within ``window`` keys if given."""
    ids = ir.val("input_ids", ir.DataType.INT64, ["batch", "length"])
    real = ir.val("attention_mask", ir.DataType.INT64, ["batch", "past + length"])
    caches = [
        ir.val(f"past_key_values.0.{part}", ir.DataType.FLOAT, ["batch", 2, "past", 4]) for part in ("key", "value")
    ]
    numbers = {"zero": 0, "one": 1, "axes": [1, 2], "last": [1], "window": window or 0}
    values = {n: ir.val(n, const_value=ir.tensor(np.array(v, np.int64), name=n)) for n, v in numbers.items()}
    table = np.random.default_rng(0).standard_normal((24, 8)).astype(np.float32)
    values["table"] = ir.val("table", const_value=ir.tensor(table, name="table"))
    values["heads"] = ir.val("heads", const_value=ir.tensor(np.array([0, 0, 2, 4], np.int64), name="heads"))
    values["flat"] = ir.val("flat", const_value=ir.tensor(np.array([0, 0, 8], np.int64), name="flat"))
    tape = ir.tape.Tape()

    def size(value: ir.Value, axis: int) -> ir.Value:
        return tape.op("Squeeze", [tape.op("Shape", [value], {"start": axis, "end": axis + 1})])

    past = size(caches[0], 2)
    keys = tape.op("Range", [values["zero"], size(real, 1), values["one"]])
    queries = tape.op("Add", [tape.op("Range", [values["zero"], size(ids, 1), values["one"]]), past])
    queries = tape.op("Unsqueeze", [queries, values["last"]])
    mask = tape.op("LessOrEqual", [keys, queries])
    if window is not None:
        mask = tape.op("And", [mask, tape.op("Greater", [keys, tape.op("Sub", [queries, values["window"]])])])
    padding = tape.op("Unsqueeze", [tape.op("Cast", [real], {"to": ir.DataType.BOOL}), values["axes"]])
    mask = tape.op("And", [mask, padding])
    x = tape.op("Reshape", [tape.op("Gather", [values["table"], ids]), values["heads"]])
    x = tape.op("Transpose", [x], {"perm": [0, 2, 1, 3]})
    x.shape = ir.Shape(["batch", 2, "length", 4])
    attention = ir.node("Attention", [x, x, x, mask, *caches], {"is_causal": 0}, num_outputs=3, name="attention")
    y, *presents = attention.outputs
    for value, name in zip(presents, ("present.0.key", "present.0.value"), strict=True):
        value.name, value.dtype, value.shape = name, ir.DataType.FLOAT, ir.Shape(["batch", 2, "past + length", 4])
    y.dtype = ir.DataType.FLOAT
    nodes = [*tape.nodes, attention]
    after = ir.tape.Tape()
    logits = after.op("Reshape", [after.op("Transpose", [y], {"perm": [0, 2, 1, 3]}), values["flat"]])
    logits.name, logits.dtype, logits.shape = "logits", ir.DataType.FLOAT, ir.Shape(["batch", "length", 8])
    graph = ir.Graph(
        [ids, real, *caches],
        [logits, *presents],
        nodes=[*nodes, *after.nodes],
        initializers=list(values.values()),
        opset_imports={"": 23},
        name="windowed",
    )
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("window", [5, 100, 4096, 131072])
def test_a_window_longer_than_any_test_sequence_is_still_seen(window: int) -> None:
    model = windowed_model(window)
    report = canonicalize(model)
    assert any("neither causal nor" in skip.reason for skip in report.skips)
    assert [n.attributes.get_int("is_causal", 0) for n in model.graph if n.op_type == "Attention"] == [0]


def test_the_same_mask_without_a_window_is_causal() -> None:
    model = windowed_model(None)
    assert not canonicalize(model).skips
    assert [n.attributes.get_int("is_causal") for n in model.graph if n.op_type == "Attention"] == [1]


def test_a_number_too_long_to_try_leaves_the_mask_alone() -> None:
    report = canonicalize(windowed_model(1 << 23))
    assert any("8388608, too long a sequence to try" in skip.reason for skip in report.skips)


def test_a_mask_that_cannot_be_run_on_its_own_is_left_alone_with_the_reason() -> None:
    # It looks into the cache, at a head that the thin stand-in for long caches does not have.
    model = windowed_model(None)
    cache = next(value for value in model.graph.inputs if value.name == "past_key_values.0.key")
    attention = next(node for node in model.graph if node.op_type == "Attention")
    tape = ir.tape.Tape()
    one = next(v for n, v in model.graph.initializers.items() if n == "one")
    total = tape.op("ReduceSum", [tape.op("Gather", [cache, one], {"axis": 1})], {"keepdims": 0})
    anything = tape.op("GreaterOrEqual", [tape.op("Mul", [total, total]), tape.op("Sub", [total, total])])
    mask = tape.op("And", [attention.inputs[3], anything])
    for node in tape.nodes:
        node.outputs[0].dtype = ir.DataType.FLOAT if node.op_type in ("Gather", "ReduceSum", "Mul", "Sub") else None
    model.graph.insert_before(attention, tape.nodes)
    attention.replace_input_with(3, mask)
    report = canonicalize(model)
    assert any("cannot be run on its own" in skip.reason for skip in report.skips)
    assert attention.attributes.get_int("is_causal") == 0
