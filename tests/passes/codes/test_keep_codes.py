from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import onnx_ir as ir
import pytest

from graphopt.errors import InputError
from graphopt.graph.weights import weight_of
from graphopt.ort.session import open_session
from graphopt.passes.codes.keep_codes import NO_LOOKUP, NOT_OF_FILE, NOT_USED, ON_CPUS, KeepCodes
from graphopt.passes.context import make_context
from graphopt.passes.lower.lower import lower_model
from graphopt.runtime_ops import declare, port
from graphopt.tasks import task_of
from graphopt.util.targets import Target
from tests import ggufs
from tests.graphs import VOCABULARY, relative, residual_model, run_pass, save

WIDTH = 256
EXACT = ("Q4_0", "Q8_0", "Q6_K", "Q5_0")
# float32 sums in another order, and zero points rounded to float32
TOLERANCE = 1e-5


def model_and_file(
    folder: Path, kinds: tuple[str, ...], table: str = "Q8_0", *, tied: bool = False, stacked: bool = False
) -> tuple[ir.Model, Path]:
    """Return a model whose weights are decoded from a file, where their columns are rows in another order.

    ``stacked``: the rows of a weight lie in two tensors, each of two matrices, as those of experts do.
    """
    model = residual_model(width=WIDTH, inner=WIDTH, tied=tied)
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
        stored, decoded = ggufs.encode(rows[order], kind)
        back = np.empty_like(decoded)
        back[order] = decoded
        parts = np.split(stored.reshape(4, -1, stored.shape[1]), 2) if stacked else [stored]
        for part, tensor in enumerate(parts):
            writer.add_tensor(f"tensor.{number}.{part}", tensor, raw_dtype=gguf.GGMLQuantizationType[kind])
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


@pytest.mark.parametrize(
    "kinds", [("Q4_0", "Q2_K", "IQ4_XS"), ("IQ4_NL", "TQ1_0", "Q3_K"), ("MXFP4", "NVFP4", "TQ2_0")]
)
def test_codes_of_experts_compute_the_same(kinds: tuple[str, ...], tmp_path: Path) -> None:
    model, path = model_and_file(tmp_path, kinds, table="IQ4_NL", stacked=True)
    before = exact_logits(model, tmp_path / "before")
    products = [node for node in model.graph if node.op_type == "MatMul"]
    report = run_pass(model, "keep_codes", file=path)
    assert not report.skips
    assert {node.inputs[1].producer().op_type for node in products} <= {"DequantizeLinear", "Dequantize"}
    run_pass(model, "lower")
    declare(model)
    assert relative(before, exact_logits(model, tmp_path / "lowered")) <= TOLERANCE


@pytest.mark.parametrize("kinds", [("IQ2_XXS", "IQ3_S"), ("IQ1_M", "IQ2_S"), ("IQ3_XXS", "IQ1_S"), ("IQ2_XS",)])
def test_codes_of_vectors_compute_the_same(kinds: tuple[str, ...], tmp_path: Path) -> None:
    model, path = model_and_file(tmp_path, kinds, table="Q6_K", stacked=True)
    before = exact_logits(model, tmp_path / "before")
    report = run_pass(model, "keep_codes", file=path)
    assert not report.skips
    logical = model.clone()
    declare(logical)
    assert relative(before, exact_logits(logical, tmp_path / "logical")) <= TOLERANCE
    run_pass(model, "lower")
    declare(model)
    assert {node.op_type for node in model.graph if node.domain} == {"MatMulCodebook", "GatherTable"}
    assert relative(before, exact_logits(model, tmp_path / "lowered")) <= TOLERANCE
    of_file = {row.name: row for row in gguf.GGUFReader(path).tensors if row.tensor_type.name in kinds}
    products = [node for node in model.graph if node.op_type == "MatMulCodebook"]
    stored = [node.inputs[index].const_value for node in products for index in (1, 2, 3)]  # type: ignore[union-attr]
    # the last product has 24 columns, which are padded to whole tiles of 16; test_entries.py compares bytes without
    assert sum(tensor.nbytes for tensor in stored) <= 1.03 * sum(row.n_bytes for row in of_file.values())  # type: ignore[union-attr]
    # what is packed is unpacked again, for another recipe
    run_pass(model, "unpack")
    declare(model)
    assert not [node for node in model.graph if node.op_type == "MatMulCodebook"]
    assert relative(before, exact_logits(model, tmp_path / "unpacked")) <= TOLERANCE


def test_codes_of_vectors_stay_floats_where_no_kernel_knows_them(tmp_path: Path) -> None:
    model, path = model_and_file(tmp_path, ("IQ2_S",), table="IQ2_S", tied=True)
    run_pass(model, "canonicalize")
    on_gpu = model.clone()
    report = run_pass(model, "keep_codes", file=path)
    assert {skip.reason for skip in report.skips} == {NO_LOOKUP(kind="IQ2_S")}
    report = KeepCodes(file=path)(on_gpu, make_context(task_of(on_gpu.graph), "ort-cuda")).report
    assert {skip.reason for skip in report.skips} == {NO_LOOKUP(kind="IQ2_S"), ON_CPUS(kind="IQ2_S")}
    assert not [node for node in on_gpu.graph if node.op_type == "DequantizeCodebook"]


def test_rows_of_tensors_of_two_types_are_no_codes_of_one(tmp_path: Path) -> None:
    model, path = model_and_file(tmp_path, ("Q4_0", "Q8_0"))
    first, second, *_ = (node for node in model.graph if node.op_type == "MatMul" and weight_of(node, 1) is not None)
    weights = [weight_of(node, 1).const_value.numpy() for node in (first, second)]  # type: ignore[union-attr]
    mixed = np.concatenate([weights[0][:, :128], weights[1][:, 128:]], 1)
    weight_of(first, 1).const_value = ir.tensor(mixed, name="mixed")  # type: ignore[union-attr]
    report = run_pass(model, "keep_codes", file=path)
    skips = [(skip.where, skip.reason) for skip in report.skips]
    assert skips == [(first.name, NOT_OF_FILE()), ("tensor.0.0", NOT_USED())]


def scale_types(model: ir.Model) -> set[tuple[ir.DataType | None, ir.DataType | None]]:
    """Return the types of scales, and of zero points or minimums, of products in our layout."""
    nodes = [node for node in model.graph if node.op_type == "MatMulTable"]
    return {(port(node, "scales").dtype, port(node, "zero_points").dtype) for node in nodes}  # type: ignore[union-attr]


def test_minimums_are_kept_in_the_types_of_the_file(tmp_path: Path) -> None:
    for kind, dtype in (("Q4_1", ir.DataType.FLOAT16), ("Q5_1", ir.DataType.FLOAT16), ("Q4_K", ir.DataType.FLOAT)):
        folder = tmp_path / kind
        folder.mkdir()
        model, path = model_and_file(folder, (kind,))
        before = exact_logits(model, folder / "before")
        run_pass(model, "keep_codes", file=path)
        logical = model.clone()
        declare(logical)
        assert relative(before, exact_logits(logical, folder / "logical")) <= TOLERANCE
        run_pass(model, "lower")
        declare(model)
        assert scale_types(model) == {(dtype, dtype)}
        tables = [node for node in model.graph if node.op_type == "MatMulTable"]
        assert {node.attributes.get_int("minimums", 0) for node in tables} == {1}
        assert relative(before, exact_logits(model, folder / "lowered")) <= TOLERANCE
        # what is packed is unpacked again, for another recipe
        run_pass(model, "unpack")
        declare(model)
        assert not [node for node in model.graph if node.op_type == "MatMulTable"]
        assert relative(before, exact_logits(model, folder / "unpacked")) <= TOLERANCE


def test_minimums_are_zero_points_on_a_gpu(tmp_path: Path) -> None:
    model, path = model_and_file(tmp_path, ("Q4_1", "Q4_K"))
    before, kept = exact_logits(model, tmp_path / "before"), model.clone()
    KeepCodes(file=path)(model, make_context(task_of(model.graph), "ort-cuda"))
    run_pass(model, "lower")
    declare(model)
    # scales of Q4_1 are float16 numbers, their zero points are not: both are stored as float32
    assert scale_types(model) == {(ir.DataType.FLOAT, ir.DataType.FLOAT)}
    assert relative(before, exact_logits(model, tmp_path / "lowered")) <= TOLERANCE
    run_pass(kept, "keep_codes", file=path)
    with pytest.raises(InputError, match="kernels on GPUs know no minimums"):
        run_pass(kept, "lower", target="ort-cuda")


@pytest.mark.parametrize("target", ["portable", "ort-cpu"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q4_1"])
def test_a_tied_embedding_is_stored_once(kind: str, target: Target, tmp_path: Path) -> None:
    model, path = model_and_file(tmp_path, (kind,), table=kind, tied=True)
    run_pass(model, "canonicalize")
    before = exact_logits(model, tmp_path / "before")
    context = make_context(task_of(model.graph), target)
    report = KeepCodes(file=path)(model, context).report
    assert not report.skips
    rows, columns = VOCABULARY, WIDTH
    of_table = [value for value in model.graph.initializers.values() if set(value.shape or ()) == {rows, columns}]
    assert len(of_table) == 1
    run_pass(model, "lower")
    declare(model)
    assert [node.op_type for node in model.graph if node.op_type == "GatherTable"] == (
        [] if (kind, target) == ("Q8_0", "portable") else ["GatherTable"]
    )
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
    assert [skip.reason for skip in report.skips] == [NOT_OF_FILE(), NOT_USED()]
    assert report.skips[0].where == node.name
    assert weight_of(node, 1) is weight


@pytest.mark.parametrize("target", ["portable", "ort-cpu"])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_a_table_is_looked_up_in_its_own_bits(kind: str, target: Target, tmp_path: Path) -> None:
    model, path = model_and_file(tmp_path, ("Q8_0",), table=kind)
    before = exact_logits(model, tmp_path / "before")
    context = make_context(task_of(model.graph), target)
    assert not KeepCodes(file=path)(model, context).report.skips
    logical = lower_model(model)
    assert logical is not model
    run_pass(model, "lower", target=target, instructions="avx2", activations="float32")
    run_pass(model, "compact_scales")
    declare(model)
    assert relative(before, exact_logits(model, tmp_path / "lowered")) <= TOLERANCE
    (lookup,) = (node for node in model.graph if node.op_type == "GatherTable")
    codes = port(lookup, "codes")
    assert codes is not None
    assert codes.const_value is not None
    # tiles of 16 rows of the table
    assert codes.const_value.nbytes == -(-VOCABULARY // 16) * 16 * WIDTH // 2
    # nothing multiplies by it, so it stays packed when codes are unpacked for another recipe
    run_pass(model, "widen_scales")
    run_pass(model, "unpack")
    declare(model)
    assert [node.op_type for node in model.graph if node is lookup] == ["GatherTable"]
    assert relative(before, exact_logits(model, tmp_path / "unpacked")) <= TOLERANCE


@pytest.mark.parametrize("name", [None, "absent.gguf"])
def test_the_file_must_be_there(name: str | None, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--set keep_codes.file=model.gguf"):
        run_pass(residual_model(), "keep_codes", file=None if name is None else tmp_path / name)
