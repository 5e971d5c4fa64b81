from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.artifact import artifact
from graphopt.artifact.artifact import DATA, MODEL, Artifact
from graphopt.artifact.hf_config import ModelFacts
from graphopt.artifact.manifest import MANIFEST, Manifest, Source, installed_versions, read_manifest
from graphopt.errors import InputError
from tests.facts import SENTENCE

ROWS = 40


def small_model() -> ir.Model:
    """y = x @ weight, with a weight large enough to be stored outside."""
    x = ir.val("x", ir.DataType.FLOAT, ir.Shape(["n", ROWS]))
    weight = ir.val("weight", const_value=ir.tensor(np.arange(ROWS * ROWS, dtype=np.float32).reshape(ROWS, ROWS)))
    node = ir.node("MatMul", [x, weight], name="product")
    node.outputs[0].name, node.outputs[0].dtype = "y", ir.DataType.FLOAT
    graph = ir.Graph([x], node.outputs, nodes=[node], initializers=[weight], opset_imports={"": 23}, name="main")
    return ir.Model(graph, ir_version=10)


def small_artifact(companions: dict[str, Path] | None = None) -> Artifact:
    facts, notes = ModelFacts(max_positions=7), [SENTENCE(text="a note")]
    manifest = Manifest(source=Source(kind="onnx", name="small"), model=facts, notes=notes)
    return Artifact(small_model(), manifest, companions or {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    artifact.write(small_artifact(), tmp_path / "small")
    return tmp_path / "small"


def refusal(path: Path) -> InputError:
    with pytest.raises(InputError) as caught:
        artifact.read(path)
    return caught.value


# ---- there and back


def test_written_and_read(tmp_path: Path) -> None:
    tokenizer = tmp_path / "somewhere.json"
    tokenizer.write_text('{"a": 1}')
    progress: list[tuple[int, int]] = []
    manifest = artifact.write(
        small_artifact({"tokenizer.json": tokenizer}),
        tmp_path / "deep" / "small",
        on_tensor=lambda *counts: progress.append(counts),
    )
    assert progress == [(1, 1)]
    result = artifact.read(tmp_path / "deep" / "small")
    assert result.manifest == manifest
    assert list(map(str, result.manifest.notes)) == [
        "a note",
        "no genai_config.json: the graph has no input of this name",
    ]
    assert [note.code for note in result.manifest.notes] == ["tests.sentence", "artifact.no-genai-config"]
    assert list(result.companions) == ["tokenizer.json"]
    assert result.companions["tokenizer.json"].read_text() == '{"a": 1}'
    weight = result.model.graph.initializers["weight"].const_value
    assert isinstance(weight, ir.ExternalTensor)
    assert np.array_equal(weight.numpy(), small_model().graph.initializers["weight"].const_value.numpy())
    assert set(manifest.files) == {MODEL, DATA, "tokenizer.json"}
    assert manifest.files[DATA].bytes == (tmp_path / "deep" / "small" / DATA).stat().st_size
    artifact.verify_files(tmp_path / "deep" / "small")


def test_weights_in_several_files(tmp_path: Path) -> None:
    sizes = {"a": 100, "b": 200, "c": 500, "d": 1}  # of 4 bytes; constants of up to 256 bytes stand in the model file
    values = [ir.val(name, const_value=ir.tensor(np.arange(size, dtype=np.float32))) for name, size in sizes.items()]
    source = small_artifact({})
    source.model.graph.initializers.clear()
    for value in values:
        source.model.graph.register_initializer(value)
    manifest = artifact.write(source, tmp_path / "parts", part_size=1200)
    # the first two fit into one file; the third is too large for any
    assert {name: record.bytes for name, record in manifest.files.items() if artifact.is_data(name)} == {
        DATA: 4 * 300,
        f"{DATA}.1": 4 * 500,
    }
    artifact.verify_files(tmp_path / "parts")
    result = artifact.read(tmp_path / "parts")
    for name, size in sizes.items():
        assert np.array_equal(result.model.graph.initializers[name].const_value.numpy(), np.arange(size))
    assert artifact.write(result, tmp_path / "one").files[DATA].bytes == 4 * 800
    (tmp_path / "parts" / f"{DATA}.1").write_bytes(b"")
    with pytest.raises(InputError, match=r"truncated|cut off"):
        artifact.read(tmp_path / "parts")
    assert [name for name in ("x", f"{DATA}.0", f"{DATA}.01", f"{DATA}.1x") if artifact.is_data(name)] == []


def test_plain_onnx_file(tmp_path: Path) -> None:
    ir.save(small_model(), tmp_path / "other.onnx")
    (tmp_path / "config.json").write_text(json.dumps({"n_positions": 9, "eos_token_id": 3}))
    result = artifact.read(tmp_path / "other.onnx")
    assert result.manifest.source == Source(kind="onnx", name=str(tmp_path / "other.onnx"))
    assert result.manifest.model == ModelFacts(max_positions=9, eos_token_ids=[3])
    assert list(result.companions) == ["config.json"]


def test_an_artifact_may_be_written_over_itself(folder: Path) -> None:
    result = artifact.read(folder)
    before = (folder / DATA).read_bytes()
    artifact.write(result, folder, overwrite=True)
    assert (folder / DATA).read_bytes() == before
    artifact.verify_files(folder)


# ---- whole or not at all


def test_nothing_is_left_when_writing_fails(tmp_path: Path) -> None:
    def fail(*_: int) -> None:
        raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="the disk is full"):
        artifact.write(small_artifact(), tmp_path / "small", on_tensor=fail)
    assert list(tmp_path.iterdir()) == []


def test_the_old_artifact_survives_when_writing_fails(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        artifact.write(small_artifact({"config.json": tmp_path / "gone.json"}), folder, overwrite=True)
    artifact.verify_files(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["small"]


def test_an_existing_output_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"the output exists .* --overwrite"):
        artifact.write(small_artifact(), folder)


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_output_that_is_no_artifact_is_refused(overwrite: bool, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    for output in (tmp_path, tmp_path / "thesis.txt"):
        with pytest.raises(InputError, match="not an artifact of graphopt"):
            artifact.write(small_artifact(), output, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    artifact.write(small_artifact(), tmp_path / "empty")
    artifact.verify_files(tmp_path / "empty")


# ---- what cannot be read


def test_missing_model(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "nowhere.onnx"):
        assert "there is no ONNX model here" in str(refusal(path))


@settings(max_examples=60)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_model_file_cut_anywhere_is_refused(share: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "cut.onnx"
    ir.save(small_model(), file)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    assert "truncated" in str(refusal(file))


@settings(max_examples=60)
@given(content=st.binary(max_size=200))
def test_a_file_of_anything_else_is_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "noise.onnx"
    file.write_bytes(content)
    assert refusal(file).file == file


def test_a_file_cut_between_two_parts_is_refused_by_its_size(folder: Path) -> None:
    # What comes after the opset (local functions) can be cut off and still parse.
    with (folder / MODEL).open("ab") as stream:
        stream.write(b"\x72\x00")
    assert "its manifest says" in str(refusal(folder))


def test_missing_external_data(folder: Path) -> None:
    (folder / DATA).unlink()
    error = refusal(folder)
    assert "external data is missing" in str(error)
    assert (error.file, error.tensor) == (folder / DATA, "weight")


def test_short_external_data(folder: Path) -> None:
    (folder / DATA).write_bytes((folder / DATA).read_bytes()[:-1])
    error = refusal(folder)
    assert "external data is truncated" in str(error)
    assert (error.file, error.tensor, error.shape) == (folder / DATA, "weight", [ROWS, ROWS])


def test_external_data_outside_the_folder_is_not_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.move(folder / DATA, tmp_path / "elsewhere")
    (folder / DATA).symlink_to(tmp_path / "elsewhere")
    monkeypatch.chdir(folder)
    # The relative path too: without a folder in it, onnx_ir would check nothing.
    for path in (folder, Path(MODEL)):
        error = refusal(path)
        assert "outside the model's folder" in str(error)
        assert error.tensor == "weight"


@pytest.mark.parametrize(
    ("key", "number", "message"),
    [("offset", -4, "cannot be read as ONNX"), ("length", 8, "has 6400"), ("length", 10**9, "has 6400")],
)
def test_external_data_described_wrongly(key: str, number: int, message: str, folder: Path) -> None:
    proto = onnx.load(folder / MODEL, load_external_data=False)
    entries = {entry.key: entry for entry in proto.graph.initializer[0].external_data}
    entries[key].value = str(number)
    (folder / MODEL).write_bytes(proto.SerializeToString())
    assert message in str(refusal(folder))


@pytest.mark.parametrize(
    ("opsets", "message"), [({"": 27}, "cannot load opset 27"), ({"com.microsoft": 1}, "names no opset")]
)
def test_opset(opsets: dict[str, int], message: str, tmp_path: Path) -> None:
    model = small_model()
    model.opset_imports.clear()
    model.opset_imports.update(opsets)
    ir.save(model, tmp_path / "model.onnx")
    assert message in str(refusal(tmp_path / "model.onnx"))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 2}', '{"surprise": 1}', "\udcff"])
def test_manifest_that_is_none(content: str, folder: Path) -> None:
    (folder / MANIFEST).write_bytes(content.encode(errors="surrogateescape"))
    error = refusal(folder)
    assert "the manifest cannot be read" in str(error)
    assert error.file == folder / MANIFEST


def test_manifest_with_an_unknown_key(folder: Path) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | {"surprise": 1}))
    assert "surprise" in str(refusal(folder))


def test_missing_manifest(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the folder has no manifest"):
        read_manifest(tmp_path)


def test_changed_and_missing_files_are_found(folder: Path) -> None:
    data = bytearray((folder / DATA).read_bytes())
    data[17] ^= 1
    (folder / DATA).write_bytes(data)
    with pytest.raises(InputError, match="not what its manifest says") as caught:
        artifact.verify_files(folder)
    assert caught.value.file == folder / DATA
    (folder / DATA).unlink()
    with pytest.raises(InputError, match="a file of the artifact is missing"):
        artifact.verify_files(folder)


# ---- facts of a configuration


def test_configuration_that_is_no_json(tmp_path: Path, folder: Path) -> None:
    shutil.copy(folder / MODEL, tmp_path / "plain.onnx")
    shutil.copy(folder / DATA, tmp_path)
    (tmp_path / "config.json").write_text("{")
    error = refusal(tmp_path / "plain.onnx")
    assert "not JSON" in str(error)
    assert error.file == tmp_path / "config.json"


def test_versions_of_what_is_installed() -> None:
    versions = installed_versions("no-such-package")
    assert {"graphopt", "onnx", "onnx-ir"} <= versions.keys()
    assert "no-such-package" not in versions
