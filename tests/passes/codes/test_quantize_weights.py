from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from graphopt.analysis.structure.product_codes import dequantize_of, rounding_of
from graphopt.artifact import artifact
from graphopt.graph import provenance
from graphopt.numerics.formats import FORMATS, format_of
from graphopt.ort.runner import Runner
from graphopt.ort.session import ACCURACY_LEVEL, open_session
from graphopt.passes.codes.quantize_weights import (
    CHOSEN_TOKENS,
    STATISTICS,
    STORAGE,
    EmbeddingFormat,
    LinearFormat,
    QuantizeWeights,
)
from graphopt.passes.context import Statistics, make_context
from graphopt.passes.lift.canonicalize import Canonicalize
from graphopt.passes.lower.lower import Lower
from graphopt.passes.recipe import load_recipe
from graphopt.quantization.rounding import round_to_nearest
from graphopt.quantization.rounding.float16_scales import fits_half
from graphopt.quantization.statistics import Calibration
from graphopt.tasks import task_of
from graphopt.util.targets import Target
from tests.graphs import residual_model, run_pass, save, session


def options(**given: object) -> QuantizeWeights:
    defaults = {"linear": LinearFormat(group=16), "lm_head": LinearFormat(format="int8", group=16)}
    return QuantizeWeights(**{**defaults, **given})  # type: ignore[arg-type]


def quantize(model: ir.Model, chosen: QuantizeWeights | None = None) -> Any:
    return (chosen or options())(model).report


def node_of(model: ir.Model, name: str) -> ir.Node:
    return next(node for node in model.graph if node.name == name)


def changes_of(report: Any) -> dict[str, str]:
    return {change.where: str(change.what) for change in report.changes}


def dequantized(model: ir.Model, chosen: QuantizeWeights) -> ir.Model:
    """Return a float copy of ``model`` whose weights are the values of the codes, computed by the definition."""
    copy = model.clone(deep_copy=True)
    for name, value in copy.graph.initializers.items():
        if name == "table":
            wanted, turned = chosen.embedding, True
        elif name.endswith(".weight"):
            wanted, turned = (chosen.lm_head if name.startswith("head") else chosen.linear), False
        else:
            continue
        if wanted is None:
            continue
        array = value.const_value.numpy()
        array = array.T if turned else array
        table = format_of(wanted.format)
        half = not turned and fits_half(array, table, wanted.group or len(array))
        stored = np.float16 if half else np.float32
        result = round_to_nearest(array, table, wanted.group, chosen.scale, scale_type=stored).dequantize()
        value.const_value = ir.tensor((result.T if turned else result).astype(np.float32), name=name)
    return copy


@given(
    seed=st.integers(0, 1000),
    linear=st.sampled_from(["int4", "int8", "uint4", "uint8"]),
    head=st.sampled_from(["int4", "int8", "uint4", "uint8", None]),
    embedding=st.sampled_from([("int8", None), ("int8", 16), ("uint8", 8), None]),
    scale=st.sampled_from(["extreme", "least_squares"]),
)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_onnxruntime_computes_what_the_codes_stand_for(
    tmp_path: Path, seed: int, linear: str, head: str | None, embedding: tuple[str, int | None] | None, scale: str
) -> None:
    chosen = options(
        linear=LinearFormat(format=linear, group=16),
        lm_head=None if head is None else LinearFormat(format=head, group=16),
        embedding=None if embedding is None else EmbeddingFormat(format=embedding[0], group=embedding[1]),
        scale=scale,
    )
    model = residual_model(width=32, inner=48, seed=seed, biases=True)
    expected = session(dequantized(model, chosen), tmp_path / "float")
    quantize(model, chosen)
    # float32 activations, so that only the weights differ from the original
    actual = open_session(save(model, tmp_path), entries={ACCURACY_LEVEL: "0"})
    ids = {"input_ids": np.random.default_rng(seed).integers(0, 24, (2, 6))}
    want, got = (s.run(["logits"], ids)[0] for s in (expected, actual))
    # float32 sums of up to 48 terms in another order: 48 * 6e-8, through 2 layers; seen 1e-6
    assert np.abs(want - got).max() < 2e-5 * np.abs(want).max()


@given(
    seed=st.integers(0, 1000),
    name=st.sampled_from([n for n in FORMATS if n not in ("int4", "int8", "uint4", "uint8")]),
    group=st.sampled_from([16, 32, None]),
    width=st.sampled_from([20, 32, 40]),
)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_other_formats_and_groups_compute_what_the_codes_stand_for(
    tmp_path: Path, seed: int, name: str, group: Any, width: int
) -> None:
    wanted = LinearFormat(format=name, group=group)
    chosen = options(linear=wanted, lm_head=wanted, embedding=None, activations="float32")
    model = residual_model(width=width, inner=48, seed=seed)
    expected = session(dequantized(model, chosen), tmp_path / "float")
    quantize(model, chosen)
    ids = {"input_ids": np.random.default_rng(seed).integers(0, 24, (2, 6))}
    (want,) = expected.run(["logits"], ids)
    runs = [open_session(save(model, tmp_path), entries={ACCURACY_LEVEL: "0"})]
    run_pass(model, "lower")
    path = save(model, tmp_path, "lowered.onnx")
    runs += [open_session(path, entries={ACCURACY_LEVEL: "0"}, native=native) for native in (False, True)]
    for each in runs:
        (got,) = each.run(["logits"], ids)
        # float32 sums of up to 48 terms in another order, through 2 layers; seen 1e-6
        assert np.abs(want - got).max() < 2e-5 * np.abs(want).max()


@pytest.mark.parametrize(
    ("name", "rows", "group", "op_type"),
    [
        ("int4", 32, 32, "DequantizeLinear"),
        ("int2", 32, 32, "Dequantize"),  # the type came with opset 25
        ("int4", 32, None, "Dequantize"),  # onnxruntime fuses no scale per column
        ("int4", 40, 32, "Dequantize"),  # and no ragged group
        ("int6", 32, 32, "Dequantize"),
        ("fp4", 32, 32, "Dequantize"),  # a type of ONNX that no CPU kernel reads
        ((-1.0, 0.0, 0.5), 32, 32, "Dequantize"),
    ],
)
def test_what_onnxruntime_has_a_kernel_for_keeps_its_standard_form(
    name: Any, rows: int, group: Any, op_type: str
) -> None:
    model = residual_model(width=rows, inner=48)
    quantize(model, options(linear=LinearFormat(format=name, group=group)))
    up = node_of(model, "up0")
    reader = dequantize_of(up)
    assert reader is not None
    assert reader.op_type == op_type
    assert reader.inputs[0].shape == [rows, 48]
    assert (rounding_of(up) is None) == (op_type == "DequantizeLinear")
    names = {key[1] for key in model.functions}
    assert names == (set() if op_type == "DequantizeLinear" else {"Dequantize", "RoundActivations"})


def test_int2_is_a_standard_type_from_opset_25_on(tmp_path: Path) -> None:
    model = residual_model(width=32, inner=48)
    model.opset_imports[""] = 25
    quantize(model, options(linear=LinearFormat(format="int2", group=16)))
    open_session(save(model, tmp_path), optimized_to=tmp_path / "optimized.onnx")
    kinds = Counter(node.op_type for node in ir.load(tmp_path / "optimized.onnx").graph)
    assert (kinds["MatMulNBits"], kinds["MatMul"]) == (5, 0)


@pytest.mark.parametrize("activations", ["float32", "bfloat16", "int8", "int16"])
def test_the_node_and_the_report_say_what_inputs_are_rounded_to(activations: Any) -> None:
    model = residual_model(width=40, inner=48)
    report = quantize(model, options(linear=LinearFormat(format="nf4", group=32), activations=activations))
    up = node_of(model, "up0")
    reader, rounding = dequantize_of(up), rounding_of(up)
    assert reader is not None
    assert reader.attributes["group"].as_int() == 32
    assert [(value.dtype, list(value.shape)) for value in reader.inputs] == [
        (ir.DataType.UINT8, [40, 48]),
        (ir.DataType.FLOAT, [2, 48]),
        (ir.DataType.FLOAT, [16]),
        (ir.DataType.FLOAT, [1, 1]),
    ]
    said = changes_of(report)
    assert said["up0.dequantize"] == "up0.weight as nf4 in groups of 32"
    if activations == "float32":
        assert rounding is None
    else:
        stated = {name: attribute.value for name, attribute in rounding.attributes.items()}
        assert stated == {"activations": activations, "group": 32, "clip": 1.0}
        assert said[rounding.name] == f"norm0.out rounded to {activations} in groups of 32"


def test_an_input_of_several_products_is_rounded_once(llama_canonical: ir.Model) -> None:
    quantize(llama_canonical, options(linear=LinearFormat(format="nf4", group=16)))
    rounded = [node for node in llama_canonical.graph if node.op_type == "RoundActivations"]
    assert [len(node.outputs[0].uses()) for node in rounded] == 2 * [3, 1, 2, 1]


def test_scales_that_float16_cannot_hold_are_float32_and_the_report_says_so() -> None:
    model = residual_model(width=32, inner=48)
    weight = model.graph.initializers["up0.weight"]
    tiny = weight.const_value.numpy().copy()
    tiny[16:, 3] *= 1e-5
    weight.const_value = ir.tensor(tiny, name="up0.weight")
    quantize(model, options(linear=LinearFormat(format="fp6-e2m3", group=16)))
    said = changes_of(Lower()(model).report)
    assert "scales are float32" in said["up0"]
    assert "scales are float32" not in said["down0"]
    up, down = (node_of(model, name) for name in ("up0", "down0"))
    assert [up.inputs[place].dtype for place in (2, 4)] == 2 * [ir.DataType.FLOAT]
    assert [down.inputs[place].dtype for place in (2, 4)] == 2 * [ir.DataType.FLOAT16]


def test_tables_and_what_is_neutral_are_stored_once() -> None:
    model = residual_model(width=32, inner=48)
    wanted = LinearFormat(format="fp6-e2m3", group=16)
    quantize(model, options(linear=wanted, lm_head=wanted))
    names = set(model.graph.initializers)
    assert {"fp6-e2m3.table", "zero.float"} < names
    assert not {name for name in names if name.endswith(".1") or name.endswith(".weight")}


def test_a_product_of_another_type_than_float_is_left_alone() -> None:
    model = residual_model(width=32, inner=48)
    weight = model.graph.initializers["up0.weight"]
    weight.const_value = ir.tensor(weight.const_value.numpy().astype(np.float16), name="up0.weight")
    weight.dtype = ir.DataType.FLOAT16
    report = quantize(model, options(linear=LinearFormat(format="nf4", group=16)))
    assert any(skip.where == "up0" and "Dequantize makes float" in str(skip.reason) for skip in report.skips)


def test_every_product_becomes_the_fused_kernel_and_no_float_weight_stays(tmp_path: Path) -> None:
    model = residual_model(width=32, inner=48)
    quantize(model)
    path = save(model, tmp_path)
    stored = {n: v.const_value for n, v in ir.load(path).graph.initializers.items()}
    assert not {name for name in stored if name.endswith(".weight") or name == "table"}
    assert max(t.size for t in stored.values() if t.dtype == ir.DataType.FLOAT) < 32 * 48 / 8
    open_session(path, optimized_to=tmp_path / "optimized.onnx")
    kinds = Counter(node.op_type for node in ir.load(tmp_path / "optimized.onnx").graph)
    assert kinds["MatMulNBits"] == 5
    assert kinds["MatMul"] == 0
    # what is dequantized is the rows that were looked up, never a stored weight
    unpacked = [node for node in ir.load(tmp_path / "optimized.onnx").graph if node.op_type == "DequantizeLinear"]
    assert unpacked
    assert {node.inputs[0].producer().op_type for node in unpacked} == {"Gather"}


def test_the_embedding_is_looked_up_as_codes() -> None:
    model = residual_model(width=32)
    quantize(model)
    lookup = next(node for node in model.graph if node.op_type == "Gather")
    assert lookup.inputs[0].dtype == ir.DataType.INT8
    assert lookup.outputs[0].uses()[0].node.op_type == "DequantizeLinear"


def test_rows_that_the_group_does_not_divide_take_a_smaller_one_and_say_so() -> None:
    model = residual_model(width=96, inner=32)
    report = quantize(model, options(linear=LinearFormat(group=128)))
    assert "groups of 32 (128 does not divide 96 rows)" in changes_of(report)["up0.dequantize"]


@pytest.mark.parametrize(
    ("model", "chosen", "where", "reason"),
    [
        (residual_model(width=32), options(linear=None), "up0", "leaves it in floating point"),
        (residual_model(width=32), options(embedding=None), "embedding", "leaves it in floating point"),
        (
            residual_model(width=32),
            options(embedding=EmbeddingFormat(group=24)),
            "embedding",
            "multiple of the group 24",
        ),
    ],
)
def test_what_is_left_alone_has_its_reason(model: ir.Model, chosen: QuantizeWeights, where: str, reason: str) -> None:
    assert any(skip.where == where and reason in str(skip.reason) for skip in quantize(model, chosen).skips)


def test_a_table_that_tokens_do_not_index_is_left_alone() -> None:
    model = residual_model(width=32)
    lookup = next(node for node in model.graph if node.op_type == "Gather")
    lookup.inputs[1].name = "position_ids"
    assert any("not looked up by input_ids" in str(skip.reason) for skip in quantize(model).skips)


def test_a_stack_of_matrices_is_left_alone_with_its_shape() -> None:
    model = residual_model(width=32, inner=32)
    up = next(node for node in model.graph if node.name == "up0")
    stacked = ir.val("stacked", const_value=ir.tensor(np.zeros((1, 32, 32), np.float32), name="stacked"))
    model.graph.initializers["stacked"] = stacked
    up.replace_input_with(1, stacked)
    assert any(skip.where == "up0" and "[1, 32, 32]" in str(skip.reason) for skip in quantize(model).skips)


def test_new_nodes_know_where_they_come_from() -> None:
    model = residual_model(width=32)
    quantize(model)
    made = next(node for node in model.graph if node.name == "up0.dequantize")
    assert provenance.history(made) == (["quantize_weights"], ["up0.weight"])


@pytest.mark.parametrize("bad", [{"format": "int9"}, {"format": [1.0]}, {"group": 48}, {"grup": 32}])
def test_options_that_cannot_run_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LinearFormat(**bad)  # type: ignore[arg-type]


def test_formats_by_role_stand_between_those_of_all_and_of_one(llama_canonical: ir.Model) -> None:
    one = next(name for name in llama_canonical.graph.initializers if name.endswith("layers.1.mlp.down_proj.weight"))
    step = QuantizeWeights(
        linear=LinearFormat(format="nl3", group=None),
        roles={"down_proj": LinearFormat(format="nl5", group=None), "v_proj": None},
        matrices={one: LinearFormat(format="nl4", group=None)},
    )
    report = step(llama_canonical).report  # type: ignore[attr-defined]
    formats = {
        change.where: change.what.figures["format"] for change in report.changes if change.what.code == STORAGE.code
    }
    chosen = {where: format for where, format in formats.items() if "layers." in where}
    assert {format for where, format in chosen.items() if "down_proj" in where} == {"nl5", "nl4"}
    assert {format for where, format in chosen.items() if "down_proj" not in where} == {"nl3"}
    assert not [where for where in chosen if "v_proj" in where]
    with pytest.raises(ValidationError, match="q_proj"):
        QuantizeWeights(roles={"donw_proj": LinearFormat()})  # type: ignore[dict-item]


def test_an_embedding_of_4_bits_is_refused() -> None:
    with pytest.raises(ValidationError, match="int8"):
        EmbeddingFormat(format="int4")  # type: ignore[arg-type]


def test_experts_are_quantized_and_what_chooses_them_is_not(make_artifact: Callable[[str], Path]) -> None:
    model = artifact.read(make_artifact("mixtral")).model
    Canonicalize()(model)
    report = quantize(model)
    assert [(skip.where, str(skip.reason)) for skip in report.skips] == [
        (f"model.layers.{layer}.mlp.gate.Gemm", "it chooses experts: its few columns stay in floating point")
        for layer in range(2)
    ]
    experts = [change for change in report.changes if ".experts." in change.where]
    # of each of four experts in two layers, gate and up in one matrix, and down
    assert len(experts) == 2 * 4 * 2


def test_where_experts_are_chosen_inputs_are_those_of_the_model_as_it_is(
    make_artifact: Callable[[str], Path], tmp_path: Path
) -> None:
    model = artifact.read(make_artifact("mixtral")).model
    Canonicalize()(model)
    calibration = Calibration(tmp_path, lambda: [np.arange(1, 33)], Runner())
    context = make_context(task_of(model.graph), statistics=Statistics(calibration))
    step = options(rounding="gptq", inputs="rounded", fewest_tokens=1)
    report = step(model, context).report  # type: ignore[attr-defined]
    facts = [change.what for change in report.changes if change.where == "statistics"]
    assert [fact.code for fact in facts] == [CHOSEN_TOKENS.code, STATISTICS.code]
    assert all(inputs.shift_file is None for inputs in calibration.statistics.values())


def test_the_preset_int8_has_seven_bits_where_two_products_of_bytes_are_added_in_sixteen() -> None:
    linear = load_recipe("int8").options_of("quantize_weights")["linear"]
    assert linear.for_target("ort-cpu", "avx2").format == "int7"
    assert {
        linear.for_target(*on).format for on in (("ort-cpu", "avx512"), ("ort-cpu", "avxvnni"), ("portable", "avx2"))
    } == {"int8"}


@pytest.mark.parametrize(("target", "name"), [("ort-cuda", "nl4"), ("ort-cpu", "t4"), ("portable", "t4")])
def test_a_format_may_have_another_in_its_place_on_gpus_and_says_so(target: Target, name: str) -> None:
    formats = LinearFormat(format="t4", group=None, on_gpus={"format": "nl4", "group": 16})
    model = residual_model(width=32, inner=48)
    report = QuantizeWeights(linear=formats, lm_head=formats)(model, make_context(task_of(model.graph), target)).report
    texts = [str(change.what) for change in report.changes if change.what.code == STORAGE.code]
    matrices = [text for text in texts if name in text]
    assert len(matrices) == len(texts) - 1  # the token embedding is a table of int8
    ending = " as nl4 in groups of 16, in place of t4, as the recipe says for this target"
    assert all(text.endswith(ending if name == "nl4" else " with a scale per column") for text in matrices)
    Lower(target=target)(model)
