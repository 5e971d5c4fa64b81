"""Each part of ``model.onnx`` and of the data beside it belongs to something that is compared."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphopt.artifact.artifact import DATA, MODEL, Artifact, is_data, write
from graphopt.compile.pipeline import optimize
from graphopt.errors import VerificationError
from graphopt.passes.recipe import Recipe
from graphopt.verification import same_model
from graphopt.verification.same_model import confirm_model
from tests.verification.planted_faults import Fault, faults, faults_at, walk

FROZEN = Path(__file__).parent / "frozen"
RECIPE = Recipe.model_validate(
    {
        "name": "of all kinds",
        "steps": [
            {"step": "canonicalize"},
            {"step": "fold_norms"},
            {"step": "rotate", "weight_inputs": "hadamard"},
            {"step": "quantize_weights", "linear": {"format": "fp6-e2m3", "group": 16}},
        ],
    }
)


@pytest.fixture(scope="module")
def compilation(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Path]:
    """What a recipe makes, and the folder that it was written to: with functions, subgraphs in them, packed weights."""
    folder = tmp_path_factory.mktemp("same") / "made"
    artifact = optimize(FROZEN / "before", RECIPE, folder, run=False)
    for value in artifact.model.graph.initializers.values():
        # computed once for all tests
        assert value.const_value is not None
        value.const_value = ir.Tensor(value.const_value.numpy(), value.const_value.dtype, name=value.name)
    return artifact, folder


def error_of(model: ir.Model, folder: Path, proto: onnx.ModelProto) -> VerificationError | None:
    (folder / MODEL).write_bytes(proto.SerializeToString())
    try:
        confirm_model(model, folder)
    except VerificationError as error:
        return error
    return None


def test_what_was_made_is_what_is_stored(compilation: tuple[Artifact, Path]) -> None:
    extent = confirm_model(compilation[0].model, compilation[1])
    assert extent.tensors == len(compilation[0].model.graph.initializers)
    assert extent.functions == len(compilation[0].model.functions) > 0
    assert extent.rounded_tensors == 0


def test_a_fault_of_each_kind_at_each_part_is_refused(
    compilation: tuple[Artifact, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact, folder = compilation
    # The faults are in the file; what it is compared with is serialized once for all of them.
    serialize = functools.cache(same_model._serialize)
    monkeypatch.setattr(same_model, "_serialize", lambda model, outside: serialize(model, frozenset(outside)))
    copy = shutil.copytree(folder, tmp_path / "copy")
    proto_of_file = onnx.ModelProto.FromString((folder / MODEL).read_bytes())
    all_faults: list[Fault] = list(faults(proto_of_file))
    unseen = []
    for fault in all_faults:
        proto = onnx.ModelProto.FromString(proto_of_file.SerializeToString())
        fault.apply(proto)
        assert proto != proto_of_file, fault
        if error_of(artifact.model, copy, proto) is None:
            unseen.append(str(fault))
    assert len(all_faults) > 300
    assert unseen == []


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_fault_anywhere_is_refused(compilation: tuple[Artifact, Path], tmp_path: Path, data: st.DataObject) -> None:
    artifact, folder = compilation
    copy = shutil.copytree(folder, tmp_path / "copy", dirs_exist_ok=True)
    proto = onnx.ModelProto.FromString((folder / MODEL).read_bytes())
    everywhere = list(walk(proto))
    possible = list(faults_at(*everywhere[data.draw(st.integers(0, len(everywhere) - 1))]))
    fault, _ = possible[data.draw(st.integers(0, len(possible) - 1))]
    fault.apply(proto)
    assert error_of(artifact.model, copy, proto) is not None, fault


def entry_named(proto: Any, name: str) -> Any:
    return next(entry for entry in proto if entry.name == name)


def test_the_message_names_node_tensor_and_field(compilation: tuple[Artifact, Path], tmp_path: Path) -> None:
    artifact, folder = compilation
    copy = shutil.copytree(folder, tmp_path / "copy")
    proto_of_file = onnx.ModelProto.FromString((folder / MODEL).read_bytes())

    proto = onnx.ModelProto.FromString(proto_of_file.SerializeToString())
    body = entry_named(proto.functions, "MatMulTable")
    product = next(node for node in body.node if node.op_type == "Mul")
    product.op_type = "Div"
    error = error_of(artifact.model, copy, proto)
    assert f"functions[MatMulTable].node[{product.name}].op_type is 'Div' in the file, and 'Mul' is made" in str(error)
    assert error is not None
    assert (error.node, error.file) == (product.name, copy / MODEL)

    proto = onnx.ModelProto.FromString(proto_of_file.SerializeToString())
    entry_named(proto.graph.output, "logits").type.tensor_type.shape.dim[0].dim_param = "rows"
    error = error_of(artifact.model, copy, proto)
    assert "graph.output[logits].type.tensor_type.shape.dim[0].dim_param is 'rows' in the file" in str(error)


def test_numbers_may_lie_elsewhere_but_must_be_the_same(compilation: tuple[Artifact, Path], tmp_path: Path) -> None:
    artifact, folder = compilation
    copy = shutil.copytree(folder, tmp_path / "copy")
    # everything inside the file, nothing beside it
    ir.save(ir.from_proto(onnx.load(folder / MODEL)), copy / MODEL)
    (copy / DATA).unlink()
    confirm_model(artifact.model, copy)
    proto = onnx.load(copy / MODEL)
    tensor = max(proto.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    tensor.raw_data = tensor.raw_data[:-1] + bytes([tensor.raw_data[-1] ^ 1])
    error = error_of(artifact.model, copy, proto)
    assert error is not None
    assert "makes other numbers of this weight" in str(error)
    assert error.tensor == tensor.name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data + b"\0", "the last 1 bytes of the external data belong to no tensor"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "makes other numbers of this weight"),
    ],
    ids=["more", "other"],
)
def test_other_bytes_in_the_external_data_are_refused(
    compilation: tuple[Artifact, Path], tmp_path: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    copy = shutil.copytree(compilation[1], tmp_path / "copy")
    (copy / DATA).write_bytes(change((copy / DATA).read_bytes()))
    with pytest.raises(VerificationError, match=message):
        confirm_model(compilation[0].model, copy)


def test_weights_in_several_files_are_compared_as_one(compilation: tuple[Artifact, Path], tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    write(compilation[0], parts, part_size=512)
    names = sorted(file.name for file in parts.iterdir() if is_data(file.name))
    assert names[:3] == [DATA, f"{DATA}.1", f"{DATA}.2"]
    tensors = onnx.ModelProto.FromString((parts / MODEL).read_bytes()).graph.initializer
    largest = max(int(entry.value) for tensor in tensors for entry in tensor.external_data if entry.key == "length")
    assert all((parts / name).stat().st_size <= max(512, largest) for name in names)
    assert confirm_model(compilation[0].model, parts) == confirm_model(compilation[0].model, compilation[1])
    (parts / f"{DATA}.99").write_bytes(b"0")
    with pytest.raises(VerificationError, match="the last 1 bytes of the external data belong to no tensor") as error:
        confirm_model(compilation[0].model, parts)
    assert error.value.file == parts / f"{DATA}.99"
    (parts / f"{DATA}.99").unlink()
    (parts / names[1]).write_bytes((parts / names[1]).read_bytes() + b"0")
    with pytest.raises(VerificationError, match="the last 1 bytes of the external data belong to no tensor"):
        confirm_model(compilation[0].model, parts)


@pytest.mark.parametrize(
    ("gap", "message"),
    [(b"\0" * 100, None), (b"\0" * 99 + b"\1", "100 bytes before"), (b"\0" * (1 << 16), "65536 bytes before")],
    ids=["zeros", "numbers", "too many"],
)
def test_zeros_may_lie_between_tensors(
    compilation: tuple[Artifact, Path], tmp_path: Path, gap: bytes, message: str | None
) -> None:
    copy = shutil.copytree(compilation[1], tmp_path / "copy")
    (copy / DATA).write_bytes(gap + (copy / DATA).read_bytes())
    proto = onnx.ModelProto.FromString((copy / MODEL).read_bytes())
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "offset":
                entry.value = str(int(entry.value) + len(gap))
    error = error_of(compilation[0].model, copy, proto)
    assert (None if error is None else message in str(error)) is (None if message is None else True)


def test_rounding_that_a_certificate_covers_is_counted(compilation: tuple[Artifact, Path], tmp_path: Path) -> None:
    artifact, folder = compilation
    copy = shutil.copytree(folder, tmp_path / "copy")
    proto = onnx.load(copy / MODEL)
    scales = next(tensor for tensor in proto.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT)
    scales.raw_data = bytes([scales.raw_data[0] ^ 1]) + scales.raw_data[1:]
    (copy / DATA).unlink()
    (copy / MODEL).write_bytes(proto.SerializeToString())
    with pytest.raises(VerificationError, match="makes other numbers"):
        confirm_model(artifact.model, copy)
    assert confirm_model(artifact.model, copy, rounding_proved=True).rounded_tensors == 1
