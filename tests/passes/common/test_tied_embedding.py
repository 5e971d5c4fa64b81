"""A token embedding that is the transposed lm_head: one set of codes for both, from quantize_weights to the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graphopt.analysis.structure.cost import storage_formats, weight_totals
from graphopt.graph.weights.data_file import save_model
from graphopt.ort.session import ACCURACY_LEVEL, open_session
from graphopt.passes.codes.quantize_weights import LinearFormat
from graphopt.passes.phases import breaches
from tests.graphs import VOCABULARY, residual_model, run_pass, save
from tests.passes.codes.test_unpack import contents

WIDTH = 32
IDS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 6))


def quantized(name: Any = "int8", *, group: Any = 16, width: int = WIDTH, **given: Any) -> tuple[ir.Model, Any]:
    """Return a tied model whose lm_head alone is quantized, and the report of the pass."""
    model = residual_model(tied=True, width=width)
    run_pass(model, "canonicalize")
    lm_head = LinearFormat(format=name, group=group)
    options = {"linear": None, "lm_head": lm_head, "activations": "float32", **given}
    return model, run_pass(model, "quantize_weights", **options)


def with_embedding(model: ir.Model) -> ir.Model:
    """Return a copy that also gives what it looks up."""
    copy = model.clone()
    made = next(node for node in copy.graph if node.name == "embedding").outputs[0]
    copy.graph.outputs.append(made)
    return copy


def outputs(model: ir.Model, folder: Path, *, native: bool = True) -> list[np.ndarray]:
    folder.mkdir()
    file = save(with_embedding(model), folder)
    session = open_session(file, entries={ACCURACY_LEVEL: "0"}, native=native)
    found: list[np.ndarray] = session.run(None, {"input_ids": IDS})
    return found


def kinds(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


FORMS = {
    "int8": ["Gather", "Gather", "DequantizeLinear", "Transpose"],
    "uint8": ["Gather", "Gather", "Gather", "DequantizeLinear", "Transpose"],
    "int4": ["GatherBlockQuantized", "Transpose"],
    "uint4": ["GatherBlockQuantized", "Transpose"],
    "uint5": ["GatherTable"],
    "fp6-e2m3": ["GatherTable"],
    "nf4": ["GatherTable"],
    (-1.0, 0.0, 0.5): ["GatherTable"],
}


@pytest.mark.parametrize("target", ["portable", "ort-cuda"])
@pytest.mark.parametrize("name", FORMS)
def test_the_lookup_gives_the_columns_of_the_product_to_the_last_bit(name: Any, target: str, tmp_path: Path) -> None:
    model, _ = quantized(name)
    matrix = next(node for node in model.graph if node.name == "head").inputs[1]
    assert matrix is not None
    tapped = model.clone()
    tapped.graph.outputs.append(next(v for n in tapped.graph for v in n.outputs if v.name == matrix.name))
    W = open_session(save(tapped, tmp_path)).run([matrix.name], {"input_ids": IDS})[0]
    want, logical = outputs(model, tmp_path / "logical")
    np.testing.assert_array_equal(logical, W.T[IDS])
    run_pass(model, "lower", target=target, activations="float32")
    expected = FORMS[name] if target == "portable" else ["GatherTable"]
    first = [node.op_type for node in model.graph if node.name != "head.dequantize"]
    assert first[: len(expected)] == expected
    for native in (True, False):
        got, looked_up = outputs(model, tmp_path / f"native{native}", native=native)
        np.testing.assert_array_equal(looked_up, W.T[IDS])
        # sums of 32 products in another order: 32 * 6e-8 of the largest; seen 7e-7
        assert np.abs(got - want).max() < 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("name", FORMS)
def test_one_set_of_codes_is_in_the_file(name: Any, tmp_path: Path) -> None:
    model, _ = quantized(name, width=128)
    run_pass(model, "lower")
    float_weights = sum(
        value.const_value.nbytes
        for value in model.graph.initializers.values()
        if value.const_value is not None and any(word in (value.name or "") for word in (".weight", ".gain"))
    )
    save_model(model, tmp_path / "model.onnx", "weights")
    in_file = (tmp_path / "weights").stat().st_size - float_weights
    stored = [v for v in model.graph.initializers.values() if ".codes" in (v.name or "") and v.const_value is not None]
    (size,) = {value.const_value.nbytes for value in stored if value.const_value is not None}
    # beside the codes, scales, zero points and tables, of which those beyond 256 bytes are in the file: these are fewer
    # bytes than the codes, which would be there twice if they were not shared
    assert size <= in_file < 2 * size
    again = ir.load(tmp_path / "model.onnx")
    totals = weight_totals(again)
    one_matrix = 128 * VOCABULARY
    assert totals.parameters == weight_totals(model).parameters
    assert storage_formats(again) == storage_formats(model)
    assert totals.parameters - one_matrix == sum(
        value.const_value.size
        for value in model.graph.initializers.values()
        if (".weight" in (value.name or "") or ".gain" in (value.name or "")) and value.const_value is not None
    )


def test_files_keep_shared_bytes_shared(tmp_path: Path) -> None:
    model, _ = quantized("int8")
    run_pass(model, "lower")
    save_model(model, tmp_path / "one.onnx", "one")
    save_model(ir.load(tmp_path / "one.onnx"), tmp_path / "two.onnx", "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("name", ["int8", "uint8", "int4", "uint4"])
def test_a_lookup_of_a_model_that_was_portable_reads_what_the_product_reads(name: str) -> None:
    model, _ = quantized(name)
    direct = model.clone()
    run_pass(direct, "lower", target="ort-cpu", instructions="avx2")
    run_pass(model, "lower")
    assert kinds(model)[: len(FORMS[name])] != ["GatherTable"]
    run_pass(model, "lower", target="ort-cpu", instructions="avx2")
    assert kinds(model) == kinds(direct)
    assert contents(model) == contents(direct)


@pytest.mark.parametrize("name", ["uint5", "nf4"])
def test_a_packed_lookup_gets_its_logical_form_back(name: str) -> None:
    model, _ = quantized(name)
    run_pass(model, "lower")
    before = contents(model)
    report = run_pass(model, "unpack")
    assert not report.skips
    assert not list(breaches(model, "codes").in_graph)
    assert [str(change.what) for change in report.changes] == [
        "GatherTable as a Gather of the columns that head multiplies by",
        "MatMulTable as a MatMul of dequantized codes",
    ]
    run_pass(model, "lower")
    assert contents(model) == before


def test_a_lookup_without_its_product_stays_packed() -> None:
    model, _ = quantized("nf4")
    run_pass(model, "lower")
    product = next(node for node in model.graph if node.op_type == "MatMulTable")
    product.attributes["group"] = ir.AttrInt64("group", 32)  # it reads the same codes as another matrix
    report = run_pass(model, "unpack")
    assert [(skip.where, str(skip.reason)) for skip in report.skips] == [
        ("embedding", "no product that is unpacked reads its codes")
    ]
    assert "GatherTable" in kinds(model)


def test_the_logical_form_keeps_the_invariants_and_the_packed_one_does_not() -> None:
    model, _ = quantized("nf4")
    assert not breaches(model, "codes").in_graph
    run_pass(model, "lower")
    found = {rule.name for rule, node in breaches(model, "codes").in_graph if node and node.op_type == "GatherTable"}
    assert found == {"no packed codes"}
    assert not breaches(model, "lower").in_graph


def test_a_transposed_matrix_of_codes_is_for_lookups_alone() -> None:
    model, _ = quantized("nf4")
    turned = next(node for node in model.graph if node.op_type == "Transpose").outputs[0]
    model.graph.append(ir.node("Identity", [turned], name="odd"))
    assert [rule.name for rule, _ in breaches(model, "codes").in_graph] == ["codes are logical"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"tied": False}, None),
        ({"lm_head": None}, None),
        ({"embedding": None}, "the recipe leaves it in floating point"),
    ],
)
def test_the_recipe_may_keep_them_apart(given: dict[str, Any], reason: str | None) -> None:
    model, report = quantized(**given)
    assert "Transpose" not in kinds(model)
    assert reason in [None, *(str(skip.reason) for skip in report.skips)]
    assert ("table.codes" in model.graph.initializers) == (given.get("embedding", True) is not None)


def test_a_folded_gain_unties_them() -> None:
    model = residual_model(tied=True, width=WIDTH)
    for name in ("canonicalize", "fold_norms"):
        run_pass(model, name)
    run_pass(model, "quantize_weights", linear=None)
    assert "Transpose" not in kinds(model)
    assert "table.codes" in model.graph.initializers


def test_codes_of_two_bits_are_stored_apart_where_onnxruntime_fuses_them() -> None:
    model = residual_model(tied=True, width=WIDTH)
    model.graph.opset_imports[""] = 25
    run_pass(model, "canonicalize")
    report = run_pass(model, "quantize_weights", linear=None, lm_head=LinearFormat(format="int2", group=16))
    (skip,) = [skip for skip in report.skips if skip.where == "embedding"]
    assert str(skip.reason) == "it is tied to the lm_head, but onnxruntime looks nothing up in codes of int2"
    assert "table.codes" in model.graph.initializers


def test_indices_of_another_type_are_cast(tmp_path: Path) -> None:
    model, _ = quantized("nf4")
    lookup = next(node for node in model.graph if node.name == "embedding")
    narrow = ir.node("Cast", [lookup.inputs[1]], {"to": ir.DataType.INT32}, name="narrow")
    narrow.outputs[0].name, narrow.outputs[0].dtype = "narrow", ir.DataType.INT32
    narrow.outputs[0].shape = ir.Shape(["batch", "length"])
    model.graph.insert_before(model.graph[0], narrow)
    lookup.replace_input_with(1, narrow.outputs[0])
    want = outputs(model, tmp_path / "logical")[1]
    run_pass(model, "lower")
    assert "GatherTable" in kinds(model)
    np.testing.assert_array_equal(outputs(model, tmp_path / "lowered")[1], want)
