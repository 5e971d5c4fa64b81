from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import onnx_ir as ir
import pytest

from graphopt.errors import InputError
from graphopt.passes.codes.keep_codes import NO_LOOKUP, NOT_OF_FILE
from graphopt.runtime import open_session
from graphopt.runtime_ops import declare
from graphopt.weights import weight_of
from tests import ggufs
from tests.graphs import VOCABULARY, relative, residual_model, run_pass, save

WIDTH = 256
EXACT = ("Q4_0", "Q8_0", "Q6_K", "Q5_0")
# float32 sums in another order, and zero points rounded to float32
TOLERANCE = 1e-5


def model_and_file(folder: Path, kinds: tuple[str, ...], table: str = "Q8_0") -> tuple[ir.Model, Path]:
    """Return a model whose weights are decoded from a file, where their columns are rows in another order."""
    model = residual_model(width=WIDTH, inner=WIDTH)
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "any")
    products = [node for node in model.graph if node.op_type == "MatMul" and weight_of(node, 1) is not None]
    lookups = [node for node in model.graph if node.op_type == "Gather" and weight_of(node, 0) is not None]
    places = [(node, 1, kinds[number % len(kinds)]) for number, node in enumerate(products)]
    random = np.random.default_rng(0)
    for number, (node, index, kind) in enumerate([*places, *((node, 0, table) for node in lookups)]):
        weight = weight_of(node, index)
        assert weight is not None
        assert weight.const_value is not None
        array = weight.const_value.numpy()
        rows = np.ascontiguousarray(array.T if index else array)
        order = random.permutation(len(rows))
        if kind == "Q5_0":
            stored = gguf.quantize(rows[order], gguf.GGMLQuantizationType.Q5_0)
            decoded = gguf.dequantize(stored, gguf.GGMLQuantizationType.Q5_0)
        else:
            stored, decoded = ggufs.encoded(rows[order], kind)
        back = np.empty_like(decoded)
        back[order] = decoded
        writer.add_tensor(f"tensor.{number}", stored, raw_dtype=gguf.GGMLQuantizationType[kind])
        weight.const_value = ir.tensor(np.ascontiguousarray(back.T if index else back), name=weight.name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, path


def exact_logits(model: ir.Model, folder: Path) -> np.ndarray:
    """Run ``model`` on random tokens, with the inputs of all products as they are."""
    folder.mkdir()
    entries = {"session.qdq_matmulnbits_accuracy_level": "0"}
    ids = np.random.default_rng(1).integers(0, VOCABULARY, (3, 5))
    found: np.ndarray = open_session(save(model, folder), entries=entries).run(["logits"], {"input_ids": ids})[0]
    return found


def test_codes_of_the_file_compute_the_same(tmp_path: Path) -> None:
    model, path = model_and_file(tmp_path, EXACT)
    before = exact_logits(model, tmp_path / "before")
    products = [node for node in model.graph if node.op_type == "MatMul"]
    report = run_pass(model, "keep_codes", file=path)
    assert not report.skips
    readers = [node.inputs[1].producer().op_type for node in products]
    assert set(readers) == {"DequantizeLinear", "Dequantize"}
    assert not [name for name in model.graph.initializers if name.endswith(".weight") or name == "table"]
    declare(model)
    assert relative(before, exact_logits(model, tmp_path / "kept")) <= TOLERANCE
    run_pass(model, "lower")
    declare(model)
    assert {node.op_type for node in model.graph if node.domain} == {"MatMulTable"}
    assert relative(before, exact_logits(model, tmp_path / "lowered")) <= TOLERANCE


def test_minimums_become_zero_points_of_float32(tmp_path: Path) -> None:
    model, path = model_and_file(tmp_path, ("Q4_1", "Q4_K"))
    before = exact_logits(model, tmp_path / "before")
    run_pass(model, "keep_codes", file=path)
    run_pass(model, "lower")
    declare(model)
    # scales of Q4_1 are float16 numbers, their zero points are not: both are stored as float32
    tables = [node for node in model.graph if node.op_type == "MatMulTable"]
    assert tables
    assert all(node.inputs[2].dtype == node.inputs[4].dtype == ir.DataType.FLOAT for node in tables)
    assert relative(before, exact_logits(model, tmp_path / "lowered")) <= TOLERANCE


def test_inputs_are_rounded_where_the_option_says_so(tmp_path: Path) -> None:
    model, path = model_and_file(tmp_path, ("Q6_K",))
    run_pass(model, "keep_codes", file=path, activations="int8")
    run_pass(model, "lower")
    tables = [node for node in model.graph if node.op_type == "MatMulTable"]
    assert {node.attributes.get_string("activations") for node in tables} == {"int8"}


def test_a_weight_that_was_changed_is_left_alone(tmp_path: Path) -> None:
    model, path = model_and_file(tmp_path, EXACT)
    node = next(node for node in model.graph if node.op_type == "MatMul")
    weight = weight_of(node, 1)
    assert weight is not None
    assert weight.const_value is not None
    changed = weight.const_value.numpy().copy()
    changed[7, 3] += 1e-6
    weight.const_value = ir.tensor(changed, name=weight.name)
    report = run_pass(model, "keep_codes", file=path)
    assert [(skip.where, skip.reason) for skip in report.skips] == [(node.name, NOT_OF_FILE())]
    assert weight_of(node, 1) is weight


def test_a_table_with_minimums_is_left_alone(tmp_path: Path) -> None:
    model, path = model_and_file(tmp_path, EXACT, table="Q4_1")
    report = run_pass(model, "keep_codes", file=path)
    assert [skip.reason for skip in report.skips] == [NO_LOOKUP(kind="Q4_1")]


@pytest.mark.parametrize("name", [None, "absent.gguf"])
def test_the_file_must_be_there(name: str | None, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--set keep_codes.file=model.gguf"):
        run_pass(residual_model(), "keep_codes", file=None if name is None else tmp_path / name)
