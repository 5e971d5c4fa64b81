from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphopt.passes.algebra.fold_norms import FoldNorms
from tests.graphs import VOCABULARY, logits, relative, residual_model

# float32: one rounding of each weight (6e-8) and sums of up to 16 terms, through 2 layers; seen 3e-7.
FLOAT32 = 3e-6


def fold(model: ir.Model) -> object:
    return FoldNorms()(model).report  # type: ignore[attr-defined]


def gains(model: ir.Model) -> list[np.ndarray]:
    found = [node.inputs[1].const_value.numpy() for node in model.graph if node.op_type == "RMSNormalization"]
    assert found
    return found


@given(
    seed=st.integers(0, 1000),
    width=st.sampled_from([4, 10, 16]),
    layers=st.integers(0, 3),
    biased=st.booleans(),
    tied=st.booleans(),
    post_norm=st.booleans(),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_logits_stay_and_gains_become_one(
    tmp_path: Path, seed: int, width: int, layers: int, biased: bool, tied: bool, post_norm: bool
) -> None:
    from graphopt.passes.lift.canonicalize import Canonicalize

    model = residual_model(width, layers=layers, seed=seed, biases=biased, tied=tied, post_norm=post_norm)
    before = logits(model, tmp_path / "before")
    Canonicalize()(model)
    report = fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    # a post-norm's gain sits on the residual itself and must stay, with its reason; every other gain is folded
    folded = [bool((gain == 1).all()) for gain in gains(model)]
    assert folded.count(False) == (layers if post_norm else 0)
    stays = [skip for skip in report.skips if "read by Add" in str(skip.reason)]
    assert len(stays) == (layers if post_norm else 0)


def test_a_gain_that_two_norms_share_is_folded_once_each(tmp_path: Path) -> None:
    model = residual_model()
    norms = [node for node in model.graph if node.op_type == "RMSNormalization"]
    for norm in norms:
        norm.replace_input_with(1, norms[0].inputs[1])
    before = logits(model, tmp_path / "before")
    fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    assert all((gain == 1).all() for gain in gains(model))


def test_a_weight_that_another_product_shares_is_copied_first(tmp_path: Path) -> None:
    model = residual_model()
    up = {node.name: node for node in model.graph}
    up["up1"].replace_input_with(1, up["up0"].inputs[1])
    before = logits(model, tmp_path / "before")
    fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32


def test_a_norm_that_the_app_reads_stays(tmp_path: Path) -> None:
    model = residual_model()
    final = next(node for node in model.graph if node.name == "final_norm")
    model.graph.outputs.append(final.outputs[0])
    report = fold(model)
    assert [(skip.where, str(skip.reason)) for skip in report.skips] == [
        ("final_norm", "its output is an output of the graph")
    ]
    assert not (gains(model)[-1] == 1).all()


def number(model: ir.Model, values: list[int] | int) -> ir.Value:
    value = ir.val(f"number{values}", const_value=ir.tensor(np.array(values, np.int64), name=f"number{values}"))
    return model.graph.initializers.setdefault(value.name, value)


Dims = list[int | str]


def put_behind(
    model: ir.Model, value: ir.Value, op_type: str, inputs: list[ir.Value], shapes: list[Dims], **attributes: object
) -> list[ir.Value]:
    """Return the outputs of ``op_type``, which reads ``value`` first; their element type is that of ``value``."""
    made = ir.node(
        op_type, [value, *inputs], attributes or None, num_outputs=len(shapes), name=f"{op_type}_of_{value.name}"
    )
    for position, (output, shape) in enumerate(zip(made.outputs, shapes, strict=True)):
        output.name, output.dtype, output.shape = f"{made.name}.{position}", value.dtype, ir.Shape(shape)
    producer = value.producer()
    assert producer is not None
    model.graph.insert_after(producer, made)
    return list(made.outputs)


# What is put between the last norm, of [batch, length, 16], and the head: it moves rows [16], and no row is broken.
MOVES: dict[str, tuple[str, list[list[int] | int], Dims, dict[str, object]]] = {
    "identity": ("Identity", [], ["batch", "length", 16], {}),
    "double precision": ("Cast", [], ["batch", "length", 16], {"to": ir.DataType.DOUBLE}),
    "flattened": ("Reshape", [[-1, 16]], ["rows", 16], {}),
    "turned": ("Transpose", [], ["length", "batch", 16], {"perm": [1, 0, 2]}),
    "an axis more": ("Unsqueeze", [[1, -2]], ["batch", 1, "length", 1, 16], {}),
    "an axis just before the last": ("Unsqueeze", [[2]], ["batch", "length", 1, 16], {}),
    "one token picked": ("Gather", [-1], ["batch", 16], {"axis": 1}),
    "tokens repeated": ("Gather", [[0, 0, 3]], ["batch", 3, 16], {"axis": -2}),
    "rows picked": ("GatherND", [[[0, 1], [2, 2]]], [2, 16], {}),
    "rows picked per batch": ("GatherND", [[[[1]], [[2]], [[0]]]], [3, 1, 16], {"batch_dims": 1}),
    "last tokens": ("Slice", [[-2], [2**63 - 1], [1]], ["batch", 2, 16], {}),
}


@pytest.mark.parametrize("layer_norm", [True, False])
@pytest.mark.parametrize("move", list(MOVES))
def test_gain_and_bias_pass_what_only_moves_rows(tmp_path: Path, move: str, layer_norm: bool) -> None:
    op_type, extra, shape, attributes = MOVES[move]
    model = residual_model(layers=1, layer_norm=layer_norm)
    head = next(node for node in model.graph if node.name == "head")
    inputs = [number(model, values) for values in extra]
    (moved,) = put_behind(model, head.inputs[0], op_type, inputs, [shape], **attributes)
    head.replace_input_with(0, moved)
    head.outputs[0].shape = ir.Shape([*shape[:-1], VOCABULARY])
    if op_type == "Cast":
        moved.dtype = head.outputs[0].dtype = ir.DataType.DOUBLE
        weight = head.inputs[1]
        weight.const_value = ir.tensor(weight.const_value.numpy().astype(np.float64), name=weight.name)
    before = logits(model, tmp_path / "before")
    report = fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    final = next(node for node in model.graph if node.name == "final_norm")
    assert (final.inputs[1].const_value.numpy() == 1).all()
    assert len(final.inputs) == 2
    assert not [skip for skip in report.skips if "gain" in str(skip.reason)]


def test_a_gain_passes_one_move_after_another(tmp_path: Path) -> None:
    model = residual_model(layers=1)
    head = next(node for node in model.graph if node.name == "head")
    axis = number(model, [2])
    (wide,) = put_behind(model, head.inputs[0], "Unsqueeze", [axis], [["batch", "length", 1, 16]])
    (back,) = put_behind(model, wide, "Squeeze", [axis], [["batch", "length", 16]])
    head.replace_input_with(0, back)
    before = logits(model, tmp_path / "before")
    fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    assert all((gain == 1).all() for gain in gains(model))


# Operators that split rows, or mix coordinates of a row; and the reader that the reason then names.
BREAKS: dict[str, tuple[str, list[list[int] | int], Dims, dict[str, object]]] = {
    "heads taken apart": ("Reshape", [[0, 0, 4, 4]], ["batch", "length", 4, 4], {}),
    "rows turned": ("Transpose", [], ["batch", 16, "length"], {"perm": [0, 2, 1]}),
    "rows turned without saying so": ("Transpose", [], [16, "length", "batch"], {}),
    "coordinates picked": ("Gather", [list(range(15, -1, -1))], ["batch", "length", 16], {"axis": 2}),
    "numbers picked": ("GatherND", [[[0, 1, 2], [2, 2, 15]]], [2], {}),
    "coordinates cut": ("Slice", [[8], [16], [-1]], ["batch", "length", 8], {}),
    "no axes, so that the last may be cut": ("Slice", [[0, 0, 8], [3, 5, 16]], ["batch", "length", 8], {}),
    "an axis behind": ("Unsqueeze", [[-1]], ["batch", "length", 16, 1], {}),
    "one byte": ("Cast", [], ["batch", "length", 16], {"to": ir.DataType.FLOAT8E4M3FN}),
    "integers": ("Cast", [], ["batch", "length", 16], {"to": ir.DataType.INT32}),
}


@pytest.mark.parametrize("what", list(BREAKS))
def test_a_gain_does_not_pass_what_breaks_rows_up(what: str) -> None:
    op_type, extra, shape, attributes = BREAKS[what]
    model = residual_model(layers=1)
    final = next(node for node in model.graph if node.name == "final_norm")
    inputs = [number(model, values) for values in extra]
    put_behind(model, final.outputs[0], op_type, inputs, [shape], **attributes)
    before = final.inputs[1].const_value.numpy()
    reasons = [str(skip.reason) for skip in fold(model).skips if skip.where == "final_norm"]
    assert reasons == [f"its output is read by {op_type}, which has no constant matrix to take the gain"]
    assert np.array_equal(final.inputs[1].const_value.numpy(), before)


def test_the_reason_names_who_reads_moved_rows_in_the_end() -> None:
    model = residual_model(layers=1)
    final = next(node for node in model.graph if node.name == "final_norm")
    flat = put_behind(model, final.outputs[0], "Reshape", [number(model, [-1, 16])], [["rows", 16]])
    picked = put_behind(model, flat[0], "Gather", [number(model, [1, 1])], [[2, 16]], axis=0)
    put_behind(model, picked[0], "Softmax", [], [[2, 16]], axis=-1)
    (reason,) = (str(skip.reason) for skip in fold(model).skips if skip.where == "final_norm")
    assert reason.startswith("its output, moved by Reshape and Gather, is read by Softmax, which has no")


def test_moved_rows_that_the_app_reads_keep_their_gain() -> None:
    model = residual_model(layers=1)
    final = next(node for node in model.graph if node.name == "final_norm")
    model.graph.outputs.extend(put_behind(model, final.outputs[0], "Identity", [], [["batch", "length", 16]]))
    (reason,) = (str(skip.reason) for skip in fold(model).skips if skip.where == "final_norm")
    assert reason == "its output, moved by Identity, is an output of the graph"


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("layer_norm", [True, False])
def test_the_experts_of_a_mixture_each_take_gain_and_bias(tmp_path: Path, layer_norm: bool, shared: bool) -> None:
    """Rows go to experts, as in Mixtral: norm -> Reshape -> Split (here) -> MatMul per expert -> Concat -> logits."""
    model = residual_model(layers=1, layer_norm=layer_norm)
    head = next(node for node in model.graph if node.name == "head")
    (flat,) = put_behind(model, head.inputs[0], "Reshape", [number(model, [-1, 16])], [["rows", 16]])
    parts = put_behind(model, flat, "Split", [number(model, [4, 11])], [[4, 16], [11, 16]], axis=0)
    products = []
    for position, part in enumerate(parts):
        array = np.random.default_rng(0 if shared else position).standard_normal((16, 8)).astype(np.float32)
        weight = ir.val(f"expert{position}", const_value=ir.tensor(array, name=f"expert{position}"))
        weight = model.graph.initializers.setdefault("expert0", weight) if shared else weight
        model.graph.initializers[weight.name] = weight
        product = ir.node("MatMul", [part, weight], name=f"expert{position}")
        product.outputs[0].name, product.outputs[0].dtype = f"expert{position}.out", ir.DataType.FLOAT
        product.outputs[0].shape = ir.Shape([part.shape[0], 8])
        products.append(product)
    (router,) = put_behind(model, flat, "Identity", [], [["rows", 16]])
    joined = ir.node("Concat", [product.outputs[0] for product in products], {"axis": 0}, name="joined")
    scores = ir.node("MatMul", [router, head.inputs[1]], name="router")
    output = ir.node("Concat", [joined.outputs[0], scores.outputs[0]], {"axis": 1}, name="output")
    for node in (joined, scores, output):
        node.outputs[0].name, node.outputs[0].dtype = f"{node.name}.out", ir.DataType.FLOAT
    output.outputs[0].name, model.graph.outputs[0].name = "logits", "head.out"
    model.graph.extend([*products, joined, scores, output])
    model.graph.outputs[0] = output.outputs[0]
    model.graph.remove(head, safe=True)
    before = logits(model, tmp_path / "before")
    fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    assert all((gain == 1).all() for gain in gains(model))
    added = {node.name for node in model.graph if node.name.endswith("add_bias")}
    assert added >= ({"expert0.add_bias", "expert1.add_bias", "router.add_bias"} if layer_norm else set())


@pytest.mark.parametrize("layers", [0, 2])
def test_a_layer_norm_without_a_bias_folds_as_cohere_has_it(tmp_path: Path, layers: int) -> None:
    model = residual_model(layers=layers, layer_norm=True)
    for norm in [node for node in model.graph if node.op_type == "LayerNormalization"]:
        norm.resize_inputs(2)
    before = logits(model, tmp_path / "before")
    fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    kinds = [node.op_type for node in model.graph]
    assert (kinds.count("LayerNormalization"), kinds.count("RMSNormalization")) == (0, layers + 1)
    assert all((gain == 1).all() for gain in gains(model))
    assert kinds.count("Add") == layers  # no bias came into being


@given(
    seed=st.integers(0, 1000),
    width=st.sampled_from([4, 10, 16]),
    layers=st.integers(0, 3),
    biased=st.booleans(),
    multiplier=st.sampled_from([None, 3.0]),
)
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_layer_norms_become_root_mean_square_norms_of_gain_one(
    tmp_path: Path, seed: int, width: int, layers: int, biased: bool, multiplier: float | None
) -> None:
    model = residual_model(width, layers=layers, seed=seed, biases=biased, multiplier=multiplier, layer_norm=True)
    before = logits(model, tmp_path / "before")
    fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    assert not [node for node in model.graph if node.op_type == "LayerNormalization"]
    assert len(gains(model)) == layers + 1
    assert all((gain == 1).all() for gain in gains(model))
    # whatever writes the stream has mean zero along it: numbers of up to 4 rounded to float32 once, seen 9e-9
    table = model.graph.initializers["table"].const_value.numpy()
    assert np.abs(table.mean(1)).max() < 1e-7


def test_the_bias_of_a_norm_reaches_a_head_without_one_and_logits_keep_their_name(tmp_path: Path) -> None:
    model = residual_model(layers=1, layer_norm=True)
    fold(model)
    (output,) = model.graph.outputs
    assert output.name == "logits"
    assert output.producer().op_type == "Add"


@pytest.mark.parametrize("reader", ["graph output", "MatMul"])
def test_a_mean_that_something_else_would_miss_stays(tmp_path: Path, reader: str) -> None:
    model = residual_model(layers=1, layer_norm=True, residual_output=reader == "graph output")
    if reader == "MatMul":  # reads the stream without a norm in front
        up = next(node for node in model.graph if node.name == "up0")
        up.replace_input_with(0, next(node for node in model.graph if node.name == "embedding").outputs[0])
    before = logits(model, tmp_path / "before")
    report = fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    why = "graph output" if reader == "graph output" else "up0 reads the same basis without a norm"
    kept = {skip.where for skip in report.skips if "keeps its mean" in str(skip.reason) and why in str(skip.reason)}
    assert "final_norm" in kept
    assert any(node.op_type == "LayerNormalization" for node in model.graph)


def test_a_folded_layer_norm_that_keeps_its_mean_has_no_empty_input() -> None:
    # onnxruntime 1.31 crashes the process while it optimizes a LayerNormalization whose third input is empty
    model = residual_model(layers=1, layer_norm=True, residual_output=True)
    fold(model)
    assert {len(node.inputs) for node in model.graph if node.op_type == "LayerNormalization"} == {2}


def spans_two_axes(model: ir.Model, norm: ir.Node) -> None:
    norm.attributes["axis"] = ir.AttrInt64("axis", 1)


def mean_is_read(model: ir.Model, norm: ir.Node) -> None:
    """Let the layer add the mean of its norm to the stream."""
    norm.resize_outputs(2)
    mean = norm.outputs[1]
    mean.name, mean.dtype, mean.shape = "mean", ir.DataType.FLOAT, ir.Shape(["batch", "length", 1])
    stream = next(node for node in model.graph if node.name == "residual0")
    added = ir.node("Add", [stream.outputs[0], mean], name="add_mean")
    added.outputs[0].name, added.outputs[0].dtype = "add_mean.out", ir.DataType.FLOAT
    added.outputs[0].shape = stream.outputs[0].shape
    model.graph.insert_after(stream, added)
    stream.outputs[0].replace_all_uses_with(added.outputs[0])
    added.replace_input_with(0, stream.outputs[0])


def flows_back(model: ir.Model, norm: ir.Node) -> None:
    """Let the layer add what its norm computes, instead of what its weights make of it."""
    stream = next(node for node in model.graph if node.name == "residual0")
    stream.replace_input_with(1, norm.outputs[0])


@pytest.mark.parametrize("twist", [spans_two_axes, mean_is_read, flows_back])
def test_a_mean_that_cannot_move_stays_and_the_logits_with_it(
    tmp_path: Path, twist: Callable[[ir.Model, ir.Node], None]
) -> None:
    model = residual_model(layers=1, layer_norm=True)
    twist(model, next(node for node in model.graph if node.name == "norm0"))
    before = logits(model, tmp_path / "before")
    report = fold(model)
    assert relative(before, logits(model, tmp_path / "after")) < FLOAT32
    assert {"norm0", "final_norm"} <= {skip.where for skip in report.skips if "keeps its mean" in str(skip.reason)}
